"""`finola doctor`: is everything here that finola needs?"""

from __future__ import annotations

import argparse
import json

from finola.cli.options import Subparsers

EPILOG = """example:
  finola doctor
  finola doctor --json

Exit code 0: whatever finola cannot do without is here and works. 2: something is not; the last line says
what. Packages of an extra may be missing; where they are, the line says how to install them."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor", help="check the installation",
        description="Check packages, devices, image codecs, shipped weights and the operator.", epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects for machines")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.cli.checks import checks
    from finola.errors import FinolaError

    found = []
    for check in checks():
        found.append(check)
        if not args.json:
            mark = "BAD" if not check.ok else "-  " if check.detail.startswith("not installed") else "ok "
            print(f"{mark}  {check.group:9}  {check.name:16}  {check.detail}", flush=True)
    if args.json:
        print(json.dumps([check._asdict() for check in found], indent=1))
    bad = [f"{check.name}: {check.detail}" for check in found if not check.ok]
    if bad:
        raise FinolaError(f"{len(bad)} of {len(found)} checks failed: {'; '.join(bad)}")
