"""Write a model as ONNX files, which run without PyTorch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finola.cli.options import Subparsers, add_model, weights_identity, weights_path

if TYPE_CHECKING:
    from PIL import Image

    from finola.inference.export import Exported
    from finola.models.base import ModelConfig

EPILOG = """examples:
  finola export --out onnx
  finola export --weights runs/mine/weights.safetensors --data photos --out onnx

Writes encoder.onnx (image -> vector) and decoder.onnx (vector -> image) of an autoencoder, classifier.onnx of a
classifier, detector.onnx of a DETR, for batches of any size, and README.md, which says what goes in and what comes out.
Each file is run by onnxruntime beside PyTorch on the images of --data, and what differs is printed.
"""
CARD = """# {title}

Written by `finola export` from {weights} (sha256 {sha256}).

| file | in | out |
|---|---|---|
{rows}

Images are float32, RGB, channels first, from 0 to 1: the shorter side resized to {shorter} px by antialiased bicubic,
of that the centre {side}x{side}. {meaning}

```python
{imports}import numpy as np, onnxruntime
from PIL import Image, ImageOps

photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
photo = photo.resize([round(side * {shorter} / min(photo.size)) for side in photo.size], Image.Resampling.BICUBIC)
left, top = ((side - {side}) // 2 for side in photo.size)
photo = photo.crop((left, top, left + {side}, top + {side}))
{argument} = np.asarray(photo, np.float32).transpose(2, 0, 1)[None] / 255  # (1, 3, {side}, {side})

session = onnxruntime.InferenceSession("{first}")
{results} = session.run(None, {{"{argument}": {argument}}})
{classes}```
"""
CLASSES = 'classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])  # in order\n'


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("export", help="write a model as ONNX files", description=__doc__, epilog=EPILOG)
    add_model(parser)
    parser.add_argument("--data", nargs="+", metavar="DIR", help="images to compare on (default: those of finola demo)")
    parser.add_argument("--out", required=True, metavar="DIR", help="for the ONNX files and README.md")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


def run(args: argparse.Namespace) -> None:
    import torch

    from finola.data.images import load_square
    from finola.files import atomic_write, check_folder
    from finola.inference.export import export
    from finola.weights import load_weights

    out, source = check_folder(args.out), weights_path(args)
    model = load_weights(source).eval()
    side = next(iter(model.export_parts().values())).example.shape[-1]
    images = torch.stack([load_square(image, side, model.config.crop_pct) for image in _images(args.data)])
    exported = export(model, out, images, progress=sys.stderr.isatty() and not args.json)
    identity = weights_identity(source, model.config)
    with atomic_write(out / "README.md") as path:
        path.write_text(_card(exported, identity, model.config), encoding="utf-8")
    report = {**identity, "images": len(images), "files": [_numbers(part) for part in exported]}
    print(json.dumps(report) if args.json else "\n".join(_line(part, len(images)) for part in exported))


def _images(data: list[str] | None) -> list[Image.Image | Path]:
    """What --data names, at most 16, or those of `finola demo`."""
    from finola.cli.images import find_images
    from finola.data.datasets import spread
    from finola.data.examples import example_images
    from finola.errors import DataError

    if data is None:
        return list(example_images().values())
    paths, faults = find_images(data)
    if faults:
        raise DataError(faults[0])
    return [paths[i] for i in spread(len(paths), 16).tolist()]


def _numbers(part: Exported) -> dict[str, Any]:
    onnx, torch = part.milliseconds
    return {"file": part.path.name, "bytes": part.path.stat().st_size, "in": part.argument, "out": part.results,
            "difference": part.difference, "onnx_ms": onnx, "torch_ms": torch}


def _shape(shape: tuple) -> str:
    return f"({', '.join(map(str, shape))})"


def _line(part: Exported, count: int) -> str:
    onnx, torch = part.milliseconds
    return (f"{part.path}: {_signature(part)}, {part.path.stat().st_size / 1e6:.1f} MB; on {count} images at most"
            f" {part.difference:.1e} of the largest value from torch; {onnx:.1f} ms an image, torch {torch:.1f} ms")


def _signature(part: Exported) -> str:
    given, found = (", ".join(f"{name} {_shape(shape)}" for name, shape in values.items())
                    for values in (part.argument, part.results))
    return f"{given} -> {found}"


def _card(exported: list[Exported], identity: dict[str, Any], config: ModelConfig) -> str:
    from finola.data.images import shorter_side

    first = exported[0]
    (argument, shape), = first.argument.items()
    rows = [f"| {part.path.name} | {' | '.join(_signature(part).split(' -> '))} |" for part in exported]
    results = ", ".join(first.results) + ("," if len(first.results) == 1 else "")
    named = bool(getattr(config, "classes", ()))
    return CARD.format(
        title=Path(identity["weights"]).stem, weights=identity["weights"], sha256=identity["sha256"],
        rows="\n".join(rows), first=first.path.name, results=results, argument=argument, side=shape[-1],
        shorter=shorter_side(shape[-1], config.crop_pct), meaning=" ".join(part.meaning for part in exported),
        imports="import json\n\n" if named else "", classes=CLASSES if named else "")
