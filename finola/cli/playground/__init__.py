"""`finola playground`: a page in the browser to try a model on photographs."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.options import Subparsers, add_device, add_model, open_model, weights_path
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.cli.playground.actions import Playground

HOST, PORT = "127.0.0.1", 7860
HEAD_START = 3.0  # seconds at most for a browser to load the page
OFTEN, OLD = 600, 7200  # seconds: how often images shown are deleted, and how old they are then

EPILOG = """examples:
  finola playground
  finola playground --weights runs/mine/weights.safetensors --port 8000 --open

Drop a photograph on the page: see it rebuilt from its vector q, slide to a second one, move q along principal
components and through the mean to the mirror, watch the map grow, quantise q, paint on a finer grid, and download what
you see. Needs pip install 'finola[app]'.

The page is served to this machine alone and loads nothing from elsewhere; what is dropped on it is deleted at the end,
by Ctrl-C. For weights of your own, finola calibrate makes the two files that quantising and the components need."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "playground",
        help="try a model on photographs in the browser",
        description=f"Serve a page on {HOST} to try an autoencoder on photographs.",
        epilog=EPILOG,
    )
    parser.add_argument("--port", type=port, default=PORT, metavar="N", help="of the page (%(default)s)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_model(parser)
    add_device(parser)
    return parser


def port(text: str) -> int:
    """A port that anyone may use, for argparse."""
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port from 1024 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> None:
    check_port(args.port)
    with temporary_folder() as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(folder / "uploads")  # read when gradio is imported
        for name in ("no_proxy", "NO_PROXY"):  # it asks itself whether it is there
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), HOST)))
        from finola.cli.playground.page import Page

        page = Page()
        page.launch(HOST, args.port, args.open)
        try:
            page.asked.wait(HEAD_START)  # first the page, then torch: both at a time would take longer
            page.play(open_playground(args, folder))
            while True:  # until Ctrl-C or a signal
                time.sleep(OFTEN)
                sweep(folder, OLD)
        finally:
            page.close()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, even if what still runs writes into it."""
    folder = Path(tempfile.mkdtemp(prefix="finola-playground-"))
    try:
        yield folder
    finally:
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def sweep(folder: Path, age: float) -> None:
    """Delete what was written more than `age` seconds ago."""
    before = time.time() - age
    for path in list(folder.rglob("*")):
        with suppress(FileNotFoundError):  # gone meanwhile
            if path.is_file() and path.stat().st_mtime < before:
                path.unlink()


def check_port(port: int) -> None:
    """RecipeError where the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RecipeError(f"--port: {port} on {HOST} cannot be used ({error.strerror}); choose another") from error


def open_playground(args: argparse.Namespace, folder: Path) -> Playground:
    """The model of --model or --weights with the calibration and the components that stand beside it."""
    import torch

    from finola.analysis.statistics import components_path, load_components
    from finola.cli.playground.actions import Axes, Playground
    from finola.codec import Codec, calibration_path, find_calibration
    from finola.weights import weights_hash

    torch.set_num_threads(1)  # one image takes little, and the browser needs the other cores
    model, weights, axes = open_model(args), weights_path(args), None
    calibration = calibration_path(weights)
    codec = Codec(model, find_calibration(model, calibration)) if calibration.exists() else None
    if (path := components_path(weights)).exists():
        axes = Axes(*load_components(path, weights_hash(weights)))
    return Playground(model, codec, axes, folder)
