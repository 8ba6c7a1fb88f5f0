"""`finola push`: a model to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.options import SOURCES, Subparsers
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.models.base import ImageModel

EXAMPLE = """examples:
  finola push runs/mine/weights.safetensors owner/name --private
  finola push finola_mfw720_c768_r8 owner/name --card docs/model-card.md --message "the shipped weights"

Writes model.safetensors, config.json, README.md and, where there is one, codec.safetensors by one commit, and makes the
repository if need be: a public one unless --private is there. The files are checked as finola load_weights does before
anything is sent. The login is the Hub library's: the variable HF_TOKEN, or `hf auth login`."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "push", help="put a model on the Hugging Face Hub", epilog=EXAMPLE,
        description="Put a model on the Hugging Face Hub, from where hf-hub:OWNER/NAME loads it.",
    )
    parser.add_argument("weights", metavar="WEIGHTS", help=SOURCES)
    parser.add_argument("repository", metavar="OWNER/NAME", help="of the repository; made if need be")
    parser.add_argument("--codec", metavar="FILE", help="the calibration of these weights (default: the one beside them"
                        " where there is one)")
    parser.add_argument("--card", metavar="FILE", help="the model card (default: written from what the weights file"
                        " says of itself)")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--message", metavar="TEXT", help="of the commit (default: the weights' hash)")
    parser.add_argument("--json", action="store_true", help="print a report for machines")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola import hub
    from finola.weights import description, find_weights, load_weights, weights_hash

    path = find_weights(args.weights)
    model = load_weights(path)
    codec = _calibration(args.codec, path, model)
    large = {hub.WEIGHTS: path} | ({hub.CODEC: codec} if codec else {})
    config = json.dumps({"library_name": "finola", **description(path)}, indent=1) + "\n"
    hashes = {name: weights_hash(file) for name, file in large.items()}
    files: dict[str, Path | bytes] = {**large, hub.CONFIG: config.encode(), hub.CARD: _card(args, model, large, hashes)}
    digest = hashes[hub.WEIGHTS]
    commit = hub.upload(args.repository, files, args.message or f"finola push: weights {digest[:12]}", args.private)
    sizes = {name: content.stat().st_size if isinstance(content, Path) else len(content)
             for name, content in files.items()}
    if args.json:
        print(json.dumps({"url": commit.commit_url, "commit": commit.oid, "sha256": digest, "bytes": sizes}))
    else:
        print(f"{commit.commit_url}: {', '.join(f'{name} {size:,} bytes' for name, size in sizes.items())}")


def _calibration(given: str | None, weights: Path, model: ImageModel) -> Path | None:
    """The file of --codec, or the one beside the weights if there is one; WeightsError unless it is of the weights."""
    from finola.codec import calibration_path, find_calibration

    path = Path(given) if given else calibration_path(weights)
    if not given and not path.exists():
        return None
    find_calibration(model, path)
    return path


def _card(args: argparse.Namespace, model: ImageModel, files: dict[str, Path], hashes: dict[str, str]) -> bytes:
    """The file of --card, or one that is written here."""
    from finola import hub
    from finola.cli.card import model_card
    from finola.registry import PRETRAINED_FOLDER
    from finola.weights import read_metadata

    if args.card:
        text = Path(args.card).read_bytes()
        if not text.startswith(b"---\n"):
            raise RecipeError(f"--card: {args.card} does not begin with a YAML header between lines of ---, by which"
                              " the Hub files a model")
        return text
    weights = files[hub.WEIGHTS]
    metadata = read_metadata(weights)
    licence = metadata.get("licence")
    if weights.parent == PRETRAINED_FOLDER:
        licence = (PRETRAINED_FOLDER / "LICENSE").read_text(encoding="utf-8").partition("\n\n")[2].strip()
    said = {name: f"{path.stat().st_size:,} bytes, sha256 `{hashes[name]}`" for name, path in files.items()}
    return model_card(args.repository, model.config, metadata, said, licence).encode()
