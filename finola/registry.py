"""Model names -> configurations and weights, as in timm: `create_model`, `list_models`.

    finola_mfw2880_c3072_r16      the autoencoder with the encoder mobileformer_w2880, q of 3072 channels and a 16x16
                                  map, for images of 256 pixels
    masked_finola_b_mfw2880       block-wise masked FINOLA; masked_finola_e_...: element-wise
    mobileformer_w2880+lin        a classifier: an encoder with the head lin, tran1 or tran4
    mae_vit_base, simmim_vit_base, moco_mfw2880      the baselines of self-supervised pre-training
    detr_mf_dec_522_mfw2880       DETR with a Mobile-Former head, 522 or 211; mask_rcnn_mfw2880: Mask R-CNN
    detr_r50                      DETR as published, with a ResNet-50

Every field of a model's configuration can be overridden by keyword.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from torch import nn

from finola.classifier import Classifier, ClassifierConfig
from finola.detection.detr import Detr, DetrConfig
from finola.detection.mask_rcnn import MaskRcnn, MaskRcnnConfig
from finola.errors import FinolaError, WeightsError
from finola.heads import HEADS
from finola.masked import MaskedConfig, MaskedFinola
from finola.model import AutoencoderConfig, FinolaAutoencoder
from finola.selfsupervised import Mae, MaeConfig, Moco, MocoConfig, Simmim, SimmimConfig

PRETRAINED_FOLDER = Path(__file__).parent / "pretrained"
WIDTHS = (720, 1440, 2880, 4320, 5760)
VITS = ("tiny", "small", "base")
DEFAULT_MODEL = "finola_mfw720_c768_r8"

MODELS = {  # the name of a kind, which stands in weights files -> its configuration and its class
    config.kind: (config, model) for config, model in (
        (AutoencoderConfig, FinolaAutoencoder), (MaskedConfig, MaskedFinola), (ClassifierConfig, Classifier),
        (MaeConfig, Mae), (SimmimConfig, Simmim), (MocoConfig, Moco), (DetrConfig, Detr), (MaskRcnnConfig, MaskRcnn))
}


def _autoencoders() -> dict[str, AutoencoderConfig]:
    rows = [(2880, 3072, r) for r in (8, 16, 32, 64, 128, 256)]  # Table "resolution"
    rows += [(2880, 3072, 24)]  # image size 384
    rows += [(2880, c, 16) for c in (4096, 2048, 1024, 512, 256, 128, 64)]  # Table "ablation" (a)
    rows += [(w, 3072, 16) for w in WIDTHS if w != 2880]  # Table "ablation" (b)
    configurations = {
        f"finola_mfw{w}_c{c}_r{r}": AutoencoderConfig(
            f"mobileformer_w{w}", embed_dim=c, map_size=r, image_size=384 if r == 24 else 256)
        for w, c, r in rows
    }
    # the compact models for 128-pixel squares, at the paper's rate: 768 numbers for 128², as 3072 for 256²
    configurations |= {
        f"finola_mfw720_c768_r{r}": AutoencoderConfig(
            "mobileformer_w720", embed_dim=768, map_size=r, image_size=128, decoder_widths=widths)
        for r, widths in ((8, (224, 128, 64, 16, 16)), (16, (128, 64, 32, 16)), (32, (64, 32, 16)))
    }
    configurations[DEFAULT_MODEL] = replace(configurations[DEFAULT_MODEL], start="shifts", pool_heads=64)
    return configurations


def _pretraining() -> dict:
    masked = {f"masked_finola_{variant[0]}_mfw{w}": MaskedConfig(f"mobileformer_w{w}", variant)
              for variant in ("block", "element") for w in WIDTHS}
    vits = {size: f"vit_{size}_patch16_224" for size in VITS}
    mae = {f"mae_vit_{size}": MaeConfig(vit) for size, vit in vits.items()}
    simmim = {f"simmim_vit_{size}": SimmimConfig(vit) for size, vit in vits.items()}
    moco = {f"moco_mfw{w}": MocoConfig(f"mobileformer_w{w}") for w in WIDTHS}
    return masked | mae | simmim | moco


def _classifiers() -> dict[str, ClassifierConfig]:
    encoders = [f"mobileformer_w{w}" for w in WIDTHS] + [f"vit_{size}_patch16_224" for size in VITS]
    return {f"{encoder}+{head}": ClassifierConfig(encoder, head=head) for encoder in encoders for head in HEADS}


def _detectors() -> dict:
    detrs = {f"detr_mf_dec_{depths}_mfw{w}": DetrConfig(f"mobileformer_w{w}", head=f"mf_dec_{depths}")
             for depths in (522, 211) for w in WIDTHS}
    masks = {f"mask_rcnn_mfw{w}": MaskRcnnConfig(f"mobileformer_w{w}") for w in WIDTHS}
    return detrs | masks | {"detr_r50": DetrConfig("resnet50", head="transformer")}


CONFIGURATIONS = _autoencoders() | _pretraining() | _classifiers() | _detectors()


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Names of the models, those that match a shell pattern; with `pretrained` only those that have weights."""
    names = [name for name in CONFIGURATIONS if fnmatch(name, pattern)]
    if pretrained:
        names = [name for name in names if pretrained_path(name).exists()]
    return sorted(names, key=lambda name: (re.split(r"\d", name)[0], [int(n) for n in re.findall(r"\d+", name)], name))


def model_config(name: str, **overrides):
    """The configuration of a registered model, with some fields replaced."""
    if name not in CONFIGURATIONS:
        near = get_close_matches(name, CONFIGURATIONS, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise FinolaError(f"model: unknown name {name!r}{hint} (finola.list_models() lists them)")
    known = [field.name for field in fields(CONFIGURATIONS[name])]
    for key in overrides:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FinolaError(f"model: unknown option {key!r}{hint} (options: {', '.join(known)})")
    return replace(CONFIGURATIONS[name], **overrides)


def build_model(config) -> nn.Module:
    """An untrained model of a configuration, of whatever kind."""
    return MODELS[config.kind][1](config)


def create_model(name: str = DEFAULT_MODEL, pretrained: bool = False, **overrides) -> nn.Module:
    """A model by name, with random weights or, with `pretrained`, the ones shipped in the package.

    Raises:
        FinolaError: an unknown name (with near ones) or option. WeightsError: no weights are shipped for it, or
            overrides that change the architecture the weights were trained with.
    """
    config = model_config(name, **overrides)
    if not pretrained:
        return build_model(config)
    from finola.weights import load_weights

    path = pretrained_path(name)
    if not path.exists():
        raise WeightsError(f"{name}: no weights are shipped for it; shipped: {', '.join(list_models(pretrained=True))}")
    if overrides:
        raise WeightsError(f"{name}: pretrained weights fit the registered configuration alone, got {list(overrides)}")
    return load_weights(path)


def pretrained_path(name: str) -> Path:
    return PRETRAINED_FOLDER / f"{name}.safetensors"
