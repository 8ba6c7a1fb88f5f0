"""Constants that papers and the field set, typed from these and not from the code: each default once, by its source.

Formulas have tests of their own; a constant that is a little wrong trains almost as well, and nothing else tells.
"""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from tiny_codecs import tiny_codec
from torch import nn

from finola import autoregression
from finola.codec.quantiser import Quantiser
from finola.codec.refine import bit_price
from finola.data import crops
from finola.data.policies import get_policy
from finola.evaluation.linear_codes import _RGB_TO_YCC
from finola.evaluation.neighbours import NEIGHBOURS, knn_accuracy
from finola.models import base, masked
from finola.registry import model_config
from finola.training.recipe import OptimSection

CONFIGURATIONS = [
    # MAE (He et al., 2022): section 4.1, Table 1, appendix A.1
    ("mae_vit_base", "mask_ratio", 0.75), ("mae_vit_base", "decoder_dim", 512), ("mae_vit_base", "decoder_depth", 8),
    ("mae_vit_base", "decoder_heads", 16), ("mae_vit_base", "norm_pix_loss", True), ("mae_vit_base", "image_size", 224),
    # SimMIM (Xie et al., 2022): section 4.1.1
    ("simmim_vit_base", "mask_ratio", 0.6), ("simmim_vit_base", "mask_patch", 32),
    # MoCo (He et al., 2020) section 3.3; MoCo-v2 (Chen et al., 2020) section 3: an MLP head of 2048, temperature 0.2
    ("moco_mfw720", "momentum", 0.999), ("moco_mfw720", "queue", 65536), ("moco_mfw720", "dim", 128),
    ("moco_mfw720", "hidden_dim", 2048), ("moco_mfw720", "temperature", 0.2), ("moco_mfw720", "image_size", 224),
    # DETR (Carion et al., 2020): section 4, appendix A.4; COCO's sizes as in torchvision and Detectron
    ("detr_r50", "num_queries", 100), ("detr_r50", "dropout", 0.1), ("detr_r50", "aux_loss", True),
    ("detr_r50", "image_size", 800), ("detr_r50", "max_size", 1333),
    # Mask R-CNN (He et al., 2017) section 3.1 and FPN (Lin et al., 2017) sections 4.1, 5.2
    ("mask_rcnn_mfw720", "anchor_sizes", (32, 64, 128, 256, 512)), ("mask_rcnn_mfw720", "pyramid_channels", 256),
    ("mask_rcnn_mfw720", "box_head_width", 1024), ("mask_rcnn_mfw720", "mask_head_width", 256),
    ("mask_rcnn_mfw720", "rpn_batch", 256), ("mask_rcnn_mfw720", "roi_batch", 512),
    ("mask_rcnn_mfw720", "detections", 100),
    # FINOLA: Table "resolution" (C = 3072 and 256 px), section "Masked FINOLA" (half of the side of 16 is visible)
    ("finola_mfw2880_c3072_r16", "embed_dim", 3072), ("finola_mfw2880_c3072_r16", "image_size", 256),
    ("masked_finola_b_mfw2880", "image_size", 256), ("masked_finola_b_mfw2880", "block_size", 8),
]


@pytest.mark.parametrize(("model", "field", "published"), CONFIGURATIONS)
def test_a_models_default_is_the_published_one(model, field, published):
    assert getattr(model_config(model), field) == published


@pytest.mark.parametrize(("found", "published"), [
    (crops.RATIO, (3 / 4, 4 / 3)),  # Szegedy et al., 2015, section 6; torchvision's RandomResizedCrop
    (crops.ATTEMPTS, 10),  # torchvision's RandomResizedCrop
    (crops.Augment().scale, (0.2, 1.0)),  # MAE, appendix A.1; MoCo-v2
    (base.IMAGENET_MEAN, (0.485, 0.456, 0.406)),  # torchvision's models
    (base.IMAGENET_STD, (0.229, 0.224, 0.225)),
    (base.CLASSES_CROP_PCT, 224 / 256),  # torchvision's and timm's evaluation on ImageNet
    (masked.PATCH_EPS, 1e-6),  # MAE's code, norm_pix_loss
    (masked.ELEMENT_DIM, 512),  # FINOLA, appendix, table "Comparison between FINOLA and Masked FINOLA"
    (autoregression.EPS, 1e-5),  # torch's and the field's layer norm
    (NEIGHBOURS, 20),  # DINO (Caron et al., 2021), section 4.1
    (inspect.signature(knn_accuracy).parameters["temperature"].default, 0.07),  # Wu et al., 2018; DINO's code
], ids=str)
def test_a_constant_is_the_published_one(found, published):
    assert found == published


@pytest.mark.parametrize(("field", "published"), [
    ("optimizer", "adamw"), ("base_lr", 1.5e-4), ("batch_size", 128), ("epochs", 100), ("warmup_epochs", 10.0),
    ("weight_decay", 0.1), ("betas", (0.9, 0.95)), ("loss", "normalised"),
])
def test_the_optimisers_defaults_are_the_papers(field, published):
    """FINOLA, appendix, Table "appendix:FINOLA": the setting of image reconstruction."""
    assert getattr(OptimSection(), field) == published


def test_colours_are_jpegs():
    """Y = 0.299 R + 0.587 G + 0.114 B, Cb = 0.564 (B - Y), Cr = 0.713 (R - Y); ITU-R BT.601."""
    expected = [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]
    torch.testing.assert_close(_RGB_TO_YCC, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_distortions_are_moco_v2s():
    """MoCo-v2's code: ColorJitter(0.4, 0.4, 0.4, 0.1) with probability 0.8, grey 0.2, blur (sigma 0.1 to 2) 0.5."""
    jitter, grey, blur = get_policy("moco").transform.transforms
    (colours,), (gaussian,) = jitter.transforms, blur.transforms
    assert (jitter.p, grey.p, blur.p, gaussian.sigma) == (0.8, 0.2, 0.5, (0.1, 2.0))
    assert (colours.brightness, colours.contrast, colours.saturation) == ((0.6, 1.4),) * 3
    assert colours.hue == (-0.1, 0.1)


def test_detrs_loss_and_views():
    """DETR, appendix A.4: weights 5 of L1 and 2 of GIoU, 1 of the class, "no object" down by a factor of 10. Its crop:
    resized to 400, 500 or 600, sides from 384 to 600."""
    pytest.importorskip("scipy", reason="needs the extra 'detection'")
    from finola.detection import matcher, transforms

    assert (matcher.CLASS, matcher.L1, matcher.GIOU, matcher.NO_OBJECT) == (1, 5, 2, 0.1)
    assert (transforms.CROP_FROM, transforms.CROP_SIDES) == ((400, 500, 600), (384, 600))
    nothing = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}]
    one = [{"boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]]), "labels": torch.tensor([0])}]
    logits, boxes = torch.tensor([[[[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]]]), torch.tensor([[[[0.5, 0.5, 0.2, 0.2]] * 2]])
    assert matcher.set_losses(logits, boxes, nothing)["class"] > 0
    shares = torch.stack([1.0 * torch.log1p(2 * torch.tensor(-1.0).exp()),  # the object's query is right
                          0.1 * torch.log1p(2 * torch.tensor(-3.0).exp())])  # "no object", a tenth as heavy
    found = matcher.set_losses(logits, boxes, one)["class"]
    torch.testing.assert_close(found, shares.sum() / 1.1)


def test_detrs_transformer():
    """DETR, appendix A.4: 6 layers each, width 256, 8 heads, 2048 hidden."""
    pytest.importorskip("scipy", reason="needs the extra 'detection'")
    from finola.detection.heads import DIM, DetrTransformer

    head = DetrTransformer({32: 8}, 100, 0.1)
    assert DIM == 256 and len(head.encoder) == len(head.decoder) == 6
    assert head.encoder[0].feed_forward.fc1.out_features == 2048


@pytest.mark.parametrize(("updates", "decay"), [(1, 2 / 11), (10, 11 / 20), (90, 91 / 100), (10_000, 0.999)])
def test_averaging_starts_as_tensorflows(updates, decay):
    """ExponentialMovingAverage with num_updates: min(decay, (1 + n) / (10 + n))."""
    pytest.importorskip("lightning", reason="needs the extra 'train'")
    from finola.training.callbacks import Average

    model = nn.Linear(1, 1, bias=False)
    average = Average(model, torch.device("cpu"), 0.999)
    average.n_averaged.fill_(updates)
    nn.init.ones_(average.module.weight)
    nn.init.zeros_(model.weight)
    average.update_parameters(model)
    assert average.module.weight.item() == pytest.approx(decay, abs=1e-6)


def test_the_price_of_a_bit_is_the_slope_of_the_noise():
    """A uniform quantiser of step d leaves d^2 / 12, and half a step takes one bit more (Gersho and Gray, 1992, section
    5.6): the price is how much error a little less of a bit adds, in one of the channels."""
    codec = tiny_codec()
    calibration, values = codec.calibration, 3 * 32 * 32
    quantiser = Quantiser.from_steps(calibration.step.astype(np.int64))

    def noise(bits: float) -> float:
        """Of a channel in the tile's squared error, when each channel's share at the calibration's steps is 30 dB."""
        step = math.sqrt(12 * 1e-3 * values / calibration.channels)
        return (step * 2**-bits) ** 2 / 12

    slope = (noise(-1e-5) - noise(1e-5)) / 2e-5
    assert bit_price(calibration, quantiser, values) == pytest.approx(slope, rel=0.02)
