"""The `finola` command: a sub-command for each name in `COMMANDS`.

Nothing here imports torch, so that `finola --help` answers at once. A command module has two functions:
`add_parser(subparsers)`, which declares its options and an example, and `run(args)`, which does the work.
A command that takes a recipe's keys as options (--optim.epochs 5) has a default for `overrides` and finds them there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

from finola.cli.options import split_overrides
from finola.errors import EXTRAS, FinolaError, near

COMMANDS = (
    "demo", "info", "reconstruct", "compress", "decompress", "calibrate", "rd", "pack", "train", "probe", "finetune",
    "reproduce", "predict", "eval", "export", "detect", "inspect", "push", "playground", "bench", "doctor",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finola",
        description="Images as first-order norm+linear autoregression: one vector in, the whole image out.",
    )
    parser.add_argument("--version", action="version", version=f"finola {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = import_module(f"finola.cli.{name}")
        sub = command.add_parser(subparsers)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 2 usage, 3 data, 4 weights or stream, 130/143 signals."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"{words[0]}: no such command{near(words[0], COMMANDS) or '; finola --help lists them'}")
    args = parser.parse_args(words)
    if overrides and "overrides" not in args:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    args.overrides = overrides
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        args.run(args)
        return 0
    except BrokenPipeError:  # the reader of our output went away: `finola info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _fail(args, "interrupted", 130)
    except FinolaError as error:
        return _fail(args, str(error), error.exit_code)
    except ModuleNotFoundError as error:
        return _fail(args, missing_extra(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(args, f"{where}{error.strerror or error}", 3)


def _fail(args: argparse.Namespace, message: str, code: int) -> int:
    if args.debug:
        raise  # the error being handled
    print(f"finola {args.command}: {' '.join(message.split())}", file=sys.stderr)
    return code


def missing_extra(error: ModuleNotFoundError) -> str:
    extra = EXTRAS.get((error.name or "").split(".")[0])
    hint = f"; install it with: pip install 'finola[{extra}]'" if extra else ""
    return f"this command needs the package {error.name!r}, which is not installed{hint}"


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _version() -> str:
    try:
        return version("finola")
    except PackageNotFoundError:
        return "unknown"
