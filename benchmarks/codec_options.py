"""What the options of Pillow's codecs are worth: PSNR at some rates, all images at one setting, interpolated.

    python benchmarks/codec_options.py kodak --limit 8 --out results/rd/options.json

Each codec first as `finola rd` runs it, then with one option changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import features
from tqdm import tqdm

from finola.cli.options import open_limited, positive
from finola.codec import competitors
from finola.codec.rd import Trials
from finola.files import write_json
from finola.provenance import record

VARIANTS: dict[str, list[dict]] = {  # {}: as finola rd
    "jpeg": [{}, {"optimize": False}, {"progressive": True}, {"subsampling": "4:4:4"}],
    "webp": [{}, {"method": 4}],
    "jpeg2000": [{}, {"mct": 0}, {"irreversible": False}, {"no_jp2": False}],
    "avif": [{}, {"speed": 6}, {"subsampling": "4:4:4"}, {"advanced": {"tune": "psnr"}}],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DIR", help="a folder of images")
    parser.add_argument("--target", type=float, nargs="+", default=[0.19, 0.5], metavar="BPP")
    parser.add_argument("--codecs", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="only these")
    parser.add_argument("--limit", type=positive, metavar="N", help="so many images, spread over the folder")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    dataset = open_limited([args.data], args.limit)
    cases = [(name, options) for name in args.codecs if features.check(competitors.FEATURES[name])
             for options in VARIANTS[name]]
    rows = []
    for name, options in tqdm(cases, unit="case"):
        trials = Trials(competitors.MAKERS[name](**options), dataset.load, len(dataset))
        found = {f"{rate:g}": trials.fixed(rate) for rate in args.target}
        psnr = {rate: fixed["psnr"] for rate, fixed in found.items()}
        times = [fixed["below"]["encoding_time"] for fixed in found.values() if fixed["below"]]
        rows.append({"codec": name, "changed": options, "options": trials.codec.description, "psnr": psnr,
                     "encoding_time": sum(times) / len(times) if times else None})
        print(f"{trials.codec.description:100}", psnr, flush=True)
        if args.out:  # after each case: some take minutes
            result = record(torch.device("cpu"), {"data": Path(args.data).resolve().name, "images": len(dataset),
                                                  "pillow": features.version("pil"), "results": rows})
            write_json(args.out, result)


if __name__ == "__main__":
    main()
