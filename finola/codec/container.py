"""The container of a `.fnl` file: 28 bytes around the payload, all little-endian.

| bytes | field    |                                                                                    |
|-------|----------|------------------------------------------------------------------------------------|
| 3     | magic    | "FNL"                                                                              |
| 1     | version  | 1; 2 where a side of the image is shorter than a tile, and was stretched to one    |
| 2, 2  | width, height | of the image in pixels                                                      |
| 2     | side     | of a tile in pixels of the image                                                 |
| 1     | overlap  | pixels that neighbouring tiles share at least                                      |
| 1     | mode     | b = 1 ... 8: b bits a number; 16 + b: the same, entropy coded; 128 + level 1 ... 100 |
| 8     | identity | of the weights and of the calibration: the first bytes of a SHA-256                |
| 4     | length   | of the payload in bytes                                                            |
| ...   | payload  | `finola.codec.entropy`                                                             |
| 4     | checksum | CRC-32 of all that stands before it                                                |

Earlier writers padded such an image, and wrote version 1: of those a reader keeps the top left part of the tile.
Everything is checked before anything is allocated: a stream that passes describes an image of at most
`MAX_PIXELS` pixels in at most `MAX_TILES` tiles.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from finola.errors import BitstreamError, RecipeError

MAGIC, PADDED, STRETCHED = b"FNL", 1, 2  # the two versions; they differ in images smaller than a tile alone
HEAD, TAIL = struct.Struct("<3sBHHHBB8sI"), struct.Struct("<I")
OVERHEAD = HEAD.size + TAIL.size
MAX_PIXELS = 89_478_485  # as `finola.data.images`; 256 MiB of RGB
MAX_SIDE = 65_535
MAX_TILES = 2**20
SIDES = range(16, 1025)  # of a tile in pixels
MAX_BITS, MAX_LEVEL = 8, 100
MAX_BYTES = 2**31  # of a stream; `finola decompress` opens no longer file


@dataclass(frozen=True)
class Mode:
    """How the numbers of q are written: `bits` a number in fixed length (the paper's mode), the same `entropy`
    coded, or with steps of a `level` from 1 to 100, always entropy coded. One of `bits` and `level` is None."""

    bits: int | None = 4
    level: int | None = None
    entropy: bool = False

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.level is None):
            raise RecipeError(f"bits, level: got {self.bits} and {self.level}, expected one of them")
        if self.bits is not None and not 1 <= self.bits <= MAX_BITS:
            raise RecipeError(f"bits: got {self.bits}, expected 1 to {MAX_BITS}")
        if self.level is not None and not (1 <= self.level <= MAX_LEVEL and self.entropy):
            raise RecipeError(f"level: got {self.level} with entropy={self.entropy}, expected 1 to {MAX_LEVEL}, "
                              "entropy coded")

    def to_byte(self) -> int:
        if self.level is not None:
            return 128 + self.level
        assert self.bits is not None  # one of the two is given
        return self.bits + 16 * self.entropy

    @classmethod
    def from_byte(cls, value: int) -> Mode:
        try:
            return cls(None, value - 128, True) if value >= 128 else cls(value % 16, None, bool(value // 16))
        except RecipeError as error:
            raise BitstreamError(f"mode: got {value}, which no finola writes ({error})") from error


@dataclass(frozen=True)
class Header:
    """What a stream says before its payload; see the table above. `identity` is 8 bytes."""

    width: int
    height: int
    side: int
    overlap: int
    mode: Mode
    identity: bytes
    version: int = PADDED

    def fault(self) -> str | None:
        """What is wrong with the sizes, or None. Whoever writes a stream and whoever reads one asks this."""
        if not (1 <= self.width <= MAX_SIDE and 1 <= self.height <= MAX_SIDE):
            return f"size: got {self.width}x{self.height} pixels, expected sides from 1 to {MAX_SIDE:,}"
        if self.width * self.height > MAX_PIXELS:
            return f"size: got {self.width}x{self.height} pixels, expected at most {MAX_PIXELS:,}"
        if self.side not in SIDES:
            return f"side: got tiles of {self.side} pixels, expected {SIDES.start} to {SIDES.stop - 1}"
        if not 0 <= self.overlap <= min(self.side // 2, 255):
            return (f"overlap: got {self.overlap} pixels, expected 0 to {min(self.side // 2, 255)} for tiles of "
                    f"{self.side}")
        if (tiles := self.tiles) > MAX_TILES:
            return f"tiles: got {tiles:,}, expected at most {MAX_TILES:,}; take larger tiles or a smaller overlap"
        return None

    @property
    def tiles(self) -> int:
        return count_tiles(self.width, self.side, self.overlap) * count_tiles(self.height, self.side, self.overlap)


def count_tiles(length: int, side: int, overlap: int) -> int:
    """As few tiles of `side` pixels as cover `length` pixels and share `overlap` with the next."""
    return max(1, -((overlap - length) // (side - overlap)))


def pack(header: Header, payload: bytes) -> bytes:
    """The whole stream."""
    h = header
    head = HEAD.pack(MAGIC, h.version, h.width, h.height, h.side, h.overlap, h.mode.to_byte(), h.identity, len(payload))
    return head + payload + TAIL.pack(zlib.crc32(head + payload))


def unpack(data: bytes) -> tuple[Header, bytes]:
    """Header and payload of a stream.

    Raises:
        BitstreamError: not a stream of ours, of a newer version, cut short, too long, damaged, or with sizes that
            are out of bounds.
    """
    if len(data) < OVERHEAD:
        raise BitstreamError(f"stream: got {len(data)} bytes, expected at least {OVERHEAD}; the file is cut short")
    magic, version, width, height, side, overlap, mode, identity, length = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BitstreamError(f"magic: got {magic!r}, expected {MAGIC!r}; this is no .fnl file")
    if version not in (PADDED, STRETCHED):
        raise BitstreamError(f"version: got {version}, expected {PADDED} or {STRETCHED}; update finola")
    if len(data) != OVERHEAD + length:
        raise BitstreamError(f"length: got {len(data)} bytes, expected {OVERHEAD + length} by the header; "
                             "the file is cut short or something follows it")
    (checksum,) = TAIL.unpack_from(data, HEAD.size + length)
    if checksum != (found := zlib.crc32(memoryview(data)[: -TAIL.size])):
        raise BitstreamError(f"checksum: got {found:08x}, expected {checksum:08x}; the file is damaged")
    header = Header(width, height, side, overlap, Mode.from_byte(mode), identity, version)
    if fault := header.fault():
        raise BitstreamError(fault)
    return header, data[HEAD.size : -TAIL.size]
