"""What others report of learned codecs, and of the best that are not learned, on the 24 Kodak images.

Figures only. Each is the PSNR of RGB in dB, averaged over the images at a fixed setting, and interpolated linearly in
the logarithm of the rate between the points that its source gives; a rate outside them has no figure. The rates are
those of the sources, some of which estimate them from probabilities in place of measuring files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

COMPRESSAI = "InterDigitalInc/CompressAI 869a9f5d, results/image/kodak/{}.json"
C3 = "google-deepmind/c3_neural_compression e63e7519, baselines/kodak.py"
SHALLOW = "mandt-lab/shallow-ntc e0c48c7a, results/kodak/aggregate.json"

IMAGES, SIZES = 24, ((768, 512), (512, 768))  # Kodak's


class Reported(NamedTuple):
    """Attributes:
        psnr: bit per pixel -> dB.
        paper: where the codec is described. source: the file that the figures come from, with the commit.
    """

    name: str
    psnr: Mapping[float, float]
    paper: str
    source: str


KODAK = (
    Reported("Ballé 2017, factorised", {0.125: 26.97, 0.19: 28.24, 0.25: 29.15}, "arXiv:1611.01704",
             COMPRESSAI.format("compressai-bmshj2018-factorized_mse_cuda")),
    Reported("Ballé 2018, hyperprior", {0.19: 28.87, 0.25: 29.95}, "arXiv:1802.01436",
             COMPRESSAI.format("compressai-bmshj2018-hyperprior_mse_cuda")),
    Reported("Minnen 2018, mean-scale", {0.125: 27.73, 0.19: 29.21, 0.25: 30.30}, "arXiv:1809.02736",
             COMPRESSAI.format("compressai-mbt2018-mean_mse_cuda")),
    Reported("Minnen 2018, with context", {0.125: 28.45, 0.19: 29.71, 0.25: 30.80}, "arXiv:1809.02736",
             COMPRESSAI.format("compressai-mbt2018_mse_cuda")),
    Reported("Cheng 2020, anchor", {0.125: 28.73, 0.19: 30.09, 0.25: 31.06}, "arXiv:2001.01568",
             COMPRESSAI.format("compressai-cheng2020-anchor_mse_cuda")),
    Reported("ELIC", {0.125: 29.15, 0.19: 30.58, 0.25: 31.65}, "arXiv:2203.10886", C3),
    Reported("VTM (H.266)", {0.125: 28.86, 0.19: 30.31, 0.25: 31.27}, "not learned", COMPRESSAI.format("vtm")),
    Reported("BPG 4:4:4", {0.125: 27.95, 0.19: 29.30, 0.25: 30.32}, "not learned",
             COMPRESSAI.format("bpg_444_x265_ycbcr")),
    Reported("COOL-CHIC", {0.125: 27.08, 0.19: 28.36, 0.25: 29.28}, "arXiv:2212.05458", C3),
    Reported("COOL-CHIC v2", {0.125: 27.33, 0.19: 28.86, 0.25: 29.87}, "arXiv:2307.12706", C3),
    Reported("C3, adaptive", {0.125: 28.44, 0.19: 29.86, 0.25: 30.92}, "arXiv:2312.02753", C3),
    Reported("shallow-ntc, linear decoder", {0.125: 26.98, 0.19: 28.29, 0.25: 29.26}, "arXiv:2304.06244", SHALLOW),
    Reported("shallow-ntc, two layers", {0.125: 27.52, 0.19: 28.81, 0.25: 29.90}, "arXiv:2304.06244", SHALLOW),
    Reported("shallow-ntc, two layers, SGA", {0.125: 28.05, 0.19: 29.39, 0.25: 30.42}, "arXiv:2304.06244", SHALLOW),
)
