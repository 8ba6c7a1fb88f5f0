"""`finola pack`: turn folders of images into shards of resized images."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from finola.cli.options import Subparsers, add_resample
from finola.data.workers import usable_cores

EXAMPLE = """example:
  finola pack imagenet/train --out imagenet-256/train --size 256 --workers 16
  finola train RECIPE --data imagenet-256/train

The shards are tar files of KEY.jpg and KEY.cls with an index. An image that cannot be decoded is
reported and left out; the exit code is then 3."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "pack",
        help="turn folders of images into shards of resized images",
        description="Turn folders of images into WebDataset shards of resized images.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="folder of images, or of one folder a class")
    add("--out", required=True, metavar="DIR", help="new or empty folder for the shards")
    add("--size", type=int, default=256, help="shorter side in pixels, never enlarged (%(default)s)")
    add("--format", choices=("jpeg", "webp"), default="jpeg", help="(%(default)s)")
    add("--quality", type=int, default=90, help="1 to 100 (%(default)s)")
    add_resample(parser)
    add("--shard-size", type=int, default=1000, metavar="N", help="images a shard (%(default)s)")
    add("--workers", type=int, default=usable_cores(), metavar="N", help="threads (%(default)s)")
    add("--json", action="store_true", help="print a report for machines, no progress bar")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.data.pack import Encoding, pack
    from finola.data.shards import open_data
    from finola.errors import DataError

    dataset = open_data(args.sources)
    report = pack(
        dataset,
        args.out,
        Encoding(args.size, args.format, args.quality, args.resample),
        shard_size=args.shard_size,
        workers=args.workers,
        progress=sys.stderr.isatty() and not args.json,
    )
    for message in report.bad:
        print(f"left out: {message}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        total = sum(shard["bytes"] for shard in report.shards)
        print(f"{report.images} images, {len(report.shards)} shards, {total / 2**20:.1f} MiB in {report.out}")
    if report.bad:
        raise DataError(
            f"{len(report.bad)} of {len(dataset)} images could not be decoded; "
            f"the other {report.images} are packed in {report.out}"
        )
