"""A photograph <-> the bytes of a `.fnl` file.

    image -> tiles -> model.encode -> q -> grid -> symbols -> entropy coder -> payload -> container
    image <- tiles <- model.decode <- q <- grid <- symbols <- entropy coder <- payload <- container

The paper (section "Comparison with Baselines", Table "Image compression") quantises q uniformly per channel, 4 bits
each and no entropy coding: `compress(image, bits=4, entropy=False)`. Everything else is beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from finola.codec.calibration import Calibration, find_calibration
from finola.codec.container import PADDED, SIDES, STRETCHED, Header, Mode, count_tiles, pack, unpack
from finola.codec.quantiser import Quantiser, pack_bits, unpack_bits
from finola.codec.refine import decode_tiles, refine
from finola.data.images import upright_rgb
from finola.errors import BitstreamError, FinolaError, RecipeError, WeightsError
from finola.inference.precision import precision
from finola.inference.tiles import Tiling
from finola.models.autoencoder import FinolaAutoencoder

BATCH = 32
QUALITIES = range(1, 101)
DEFAULT_QUALITY = 50
# what quality 50 stands for; 25 more halve the side and add 15 to the level, which keeps the error of quantisation
# near that of the model itself at each side (found on photographs with the shipped weights)
SIDE_AT_50, LEVEL_AT_50 = 88, 63
REFINE = 1  # steps of refinement, unless told, where the paper's mode is not asked for


class Codec:
    """A model with its calibration, ready to code many images.

    Args:
        model: an autoencoder on any device; put into evaluation mode. None: the shipped one.
        calibration: made for the model's weights; None: the shipped one, if it was.
        batch_size: tiles at once; a quarter of them where they are refined.
        fast: the networks in bf16: on a CPU with units for it some three times as fast to decompress and 1.4 times to
            compress, for an error of one or two grey levels.

    Raises:
        WeightsError: there is no calibration for these weights.
        RecipeError: `fast` where nothing would be.
    """

    def __init__(self, model: FinolaAutoencoder | None = None, calibration: Calibration | None = None,
                 batch_size: int = BATCH, fast: bool = False):
        if batch_size < 1:
            raise RecipeError(f"batch_size: got {batch_size}, expected at least 1")
        self.model = (_shipped() if model is None else model).eval()
        if not isinstance(self.model, FinolaAutoencoder):
            raise WeightsError(f"model: got {type(self.model).__name__}, expected an autoencoder")
        self.calibration = calibration or find_calibration(self.model)
        if self.calibration.channels != self.model.config.embed_dim:
            raise WeightsError(f"calibration: is for {self.calibration.channels} channels, the model has "
                               f"{self.model.config.embed_dim}")
        self.batch_size, self.fast = batch_size, fast
        precision(self.device, fast)

    @torch.inference_mode(False)  # refinement takes gradients, wherever this is called
    def compress(self, image: Image.Image | str | Path, *, bits: int | None = None, quality: int | None = None,
                 entropy: bool = True, refine: int | None = None, side: int | None = None, overlap: int = 0,
                 progress: bool = False) -> bytes:
        """See `compress`."""
        image = upright_rgb(image)
        width, height = image.size
        mode = choose_mode(bits, quality, entropy)
        if refine is None:
            refine = REFINE if mode.bits is None else 0
        if side is None:
            side = self.model.config.image_size if quality is None and bits else choose_side(quality, width, height)
        version = STRETCHED if min(width, height) < side else PADDED
        header = Header(width, height, side, overlap, mode, self.calibration.identity, version)
        if fault := header.fault():
            raise RecipeError(f"{fault}; this image cannot be written so")
        quantiser = self.calibration.quantiser(mode.bits, mode.level)
        with tqdm(total=header.tiles, desc="tiles", unit="tile", leave=False, disable=not progress) as bar:
            symbols = np.concatenate([*self._symbols(image, header, quantiser, refine, bar)])
        if not mode.entropy and mode.bits is not None:
            return pack(header, pack_bits(symbols, mode.bits))
        from finola.codec.entropy import encode

        return pack(header, encode(symbols, self.calibration, quantiser))

    def compress_to(self, image: Image.Image | str | Path, most: int, *, refine: int | None = None,
                    side: int | None = None, overlap: int = 0, progress: bool = False) -> tuple[bytes, int]:
        """The stream of the highest quality that takes at most so many bytes, and that quality.

        The image is compressed some seven times, by bisection. Bytes grow with the quality, by up to a third at once
        where smaller tiles are taken, so that a stream may stay so far below `most`.

        Raises:
            RecipeError: not even quality 1 is that small; and see `compress`.
        """
        image, fits, too_large = upright_rgb(image), 0, QUALITIES.stop
        best, smallest = b"", None
        while too_large - fits > 1:
            quality = (fits + too_large) // 2
            data = self.compress(image, quality=quality, refine=refine, side=side, overlap=overlap, progress=progress)
            if len(data) <= most:
                fits, best = quality, data
            else:
                too_large, smallest = quality, len(data)
        if not best:
            raise RecipeError(f"target: got {most:,} bytes, expected at least {smallest:,}, which quality 1 takes for "
                              "this image; larger tiles (side) take less")
        return best, fits

    def decompress(self, data: bytes, *, progress: bool = False) -> Image.Image:
        """See `decompress`."""
        header, symbols = read_symbols(data, self.calibration)
        quantiser = self.calibration.quantiser(header.mode.bits, header.mode.level)
        tiling = Tiling(header.width, header.height, header.side, header.overlap, header.version == PADDED)
        with tqdm(total=len(symbols), desc="tiles", unit="tile", leave=False, disable=not progress) as bar:
            return tiling.paint(self._tiles(symbols, quantiser, header.side, bar))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _symbols(self, image: Image.Image, header: Header, quantiser: Quantiser, steps: int,
                 bar: tqdm) -> Iterator[np.ndarray]:
        """Symbols of the tiles, batch after batch, (B, C) int16."""
        tiling = Tiling(header.width, header.height, header.side, header.overlap)
        for x, squares in tiling.cut(image, self.model.config.image_size, self.batch_size):
            with torch.no_grad(), precision(self.device, self.fast):
                q = self.model.encode(squares.to(self.device)).float()
            if not torch.isfinite(q).all():
                raise FinolaError("q: the encoder gave values that are not finite; check the model's weights")
            if steps:
                few = max(1, self.batch_size // 4)  # gradients keep what the decoder computes on its way
                with precision(self.device, self.fast):
                    symbols = refine(self.model, self.calibration, quantiser, q, x.to(self.device), steps,
                                     header.mode.entropy, few)
            else:
                symbols = quantiser.symbols(self.calibration.positions(q))
            bar.update(len(q))
            yield symbols.cpu().numpy().astype(np.int16)

    @torch.no_grad()
    def _tiles(self, symbols: np.ndarray, quantiser: Quantiser, side: int, bar: tqdm) -> Iterator[Tensor]:
        """The tiles (3, side, side) that symbols (N, C) stand for."""
        for first in range(0, len(symbols), self.batch_size):
            chunk = torch.from_numpy(symbols[first : first + self.batch_size]).to(self.device)
            q = self.calibration.vectors(quantiser.centres(chunk))
            with precision(self.device, self.fast):
                tiles = decode_tiles(self.model, q, side)
            yield from tiles.cpu()
            bar.update(len(chunk))


def choose_mode(bits: int | None, quality: int | None, entropy: bool) -> Mode:
    """RecipeError where the three do not go together or are out of range."""
    if bits is not None and quality is None:
        return Mode(bits, None, entropy)
    quality = DEFAULT_QUALITY if quality is None else quality
    if bits is not None or not entropy or quality not in QUALITIES:
        raise RecipeError(f"quality: got {quality} with bits={bits} and entropy={entropy}; expected 1 to 100, or bits "
                          "in its place, which alone can do without entropy coding")
    return Mode(None, level_of(quality), True)


def level_of(quality: float) -> int:
    """The quantiser's level at a quality."""
    return round(LEVEL_AT_50 + 0.6 * (quality - 50))


def side_of(quality: float) -> float:
    """Pixels of a tile at a quality, where the image does not matter."""
    return SIDE_AT_50 * 2 ** ((50 - quality) / 25)


def choose_side(quality: int | None, width: int, height: int) -> int:
    """Pixels of a tile at a quality: near `side_of` it, and such that the tiles reach little
    beyond this image, since what they share is paid twice."""
    middle = side_of(DEFAULT_QUALITY if quality is None else quality)
    sides = range(max(SIDES.start, round(0.8 * middle)), round(1.25 * middle) + 1)

    def cost(side: int) -> float:
        area = count_tiles(width, side, 0) * count_tiles(height, side, 0) * side**2
        return area * (1 + abs(side / middle - 1) / 2)

    return min(sides, key=cost)


def compress(image: Image.Image | str | Path, model: FinolaAutoencoder | None = None, *, bits: int | None = None,
             quality: int | None = None, entropy: bool = True, refine: int | None = None, side: int | None = None,
             overlap: int = 0, calibration: Calibration | None = None) -> bytes:
    """Compress a photograph.

    Args:
        image: a path or a PIL image of any size and mode (`finola.data.images`: how each becomes RGB).
        model: None for the shipped one.
        bits: 1 to 8 for each number of q, in place of `quality`; 4 with entropy=False is the paper's mode.
        quality: 1 to 100 (50): unequal steps for the channels, and tiles of a fitting size.
        entropy: code the symbols by their probability; False is the paper's fixed length, for `bits` only.
        refine: steps of gradient descent on q against this image, each some five times as slow as encoding. None: one
            with a quality, none with `bits`, as in the paper.
        side: of a tile in pixels; the model's own for `bits`. Smaller tiles are sharper and take more bytes.
        overlap: pixels that neighbouring tiles share.
        calibration: of the model, for weights that are not shipped.

    Returns:
        The bytes of a `.fnl` file (`finola.codec.container`).

    Raises:
        DataError: an image that cannot be read.
        RecipeError: an option out of range, an image of more than 65,535 pixels a side or 89,478,485 in all.
        WeightsError: no calibration for the weights.
    """
    codec = Codec(model, calibration)
    return codec.compress(image, bits=bits, quality=quality, entropy=entropy, refine=refine, side=side, overlap=overlap)


def decompress(data: bytes, model: FinolaAutoencoder | None = None, *,
               calibration: Calibration | None = None) -> Image.Image:
    """The RGB image, of its original size, in the bytes of a `.fnl` file.

    Raises:
        BitstreamError: damaged, cut short, of a newer version, or written with other weights.
        WeightsError: no calibration for the weights.
    """
    return Codec(model, calibration).decompress(data)


def read_symbols(data: bytes, calibration: Calibration) -> tuple[Header, np.ndarray]:
    """The header of a stream and its symbols (tiles, C), without painting them: no model takes part.

    Raises:
        BitstreamError: see `decompress`.
    """
    header, payload = unpack(data)
    if header.identity != calibration.identity:
        raise BitstreamError(f"weights: the stream was written with {header.identity.hex()}, these weights and their "
                             f"calibration are {calibration.identity.hex()}; decode with the former")
    shape, mode = (header.tiles, calibration.channels), header.mode
    if not mode.entropy and mode.bits is not None:
        return header, unpack_bits(payload, shape, mode.bits)
    from finola.codec.entropy import decode

    return header, decode(payload, shape[0], calibration, calibration.quantiser(mode.bits, mode.level))


@cache
@torch.inference_mode(False)
def _shipped() -> FinolaAutoencoder:
    from finola.factory import create_model

    model = create_model(pretrained=True)
    assert isinstance(model, FinolaAutoencoder)  # the default model is one
    return model
