"""Untrained models of debug size, the same in every test."""

from __future__ import annotations

import torch

from finola.factory import create_model
from finola.models.autoencoder import FinolaAutoencoder
from finola.models.classifier import Classifier
from finola.registry import DEFAULT_MODEL

SIZE, CHANNELS = 32, 16  # of the autoencoder: pixels on a side, numbers in q
AUTOENCODER = {"image_size": SIZE, "embed_dim": CHANNELS, "decoder_widths": (16, 8, 8), "pool_heads": 2}
COARSE = {"map_size": 4, "decoder_widths": (16, 8, 8, 8), "pool_heads": 1}  # with a map of 4x4


def autoencoder(**options) -> FinolaAutoencoder:
    """With a map of 8x8, ready for evaluation."""
    torch.manual_seed(0)
    return create_model(DEFAULT_MODEL, start="random", **AUTOENCODER | options).eval()


def classifier(**options) -> Classifier:
    """Of 32-px images in three classes, as sure of itself as if it were trained."""
    torch.manual_seed(0)
    options = {"image_size": 32, "num_classes": 3, "classes": ("a", "b", "c")} | options
    model = create_model("mobileformer_w720+lin", **options)
    torch.nn.init.normal_(model.head.fc.weight, std=0.3)
    return model.eval()
