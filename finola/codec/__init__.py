"""Photographs as `.fnl` files: one vector for each tile, quantised and entropy coded.

    data = finola.codec.compress(image)             # PIL image or path -> bytes
    image = finola.codec.decompress(data)           # finola.BitstreamError for anything else
"""

from finola.codec.calibration import Calibration, calibration_path, find_calibration
from finola.codec.codec import Codec, compress, decompress

__all__ = ["Calibration", "Codec", "calibration_path", "compress", "decompress", "find_calibration"]
