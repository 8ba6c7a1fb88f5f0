"""The names of models and of their kinds, and the configuration that each name stands for.

    finola_mfw2880_c3072_r16      the autoencoder with the encoder mobileformer_w2880, q of 3072 channels and a 16x16
                                  map, for images of 256 pixels
    masked_finola_b_mfw2880       block-wise masked FINOLA; masked_finola_e_...: element-wise
    mobileformer_w2880+lin        a classifier: an encoder with the head lin, tran1 or tran4
    mae_vit_base, simmim_vit_base, moco_mfw2880      the baselines of self-supervised pre-training
    detr_mf_dec_522_mfw2880       DETR with a Mobile-Former head, 522 or 211; mask_rcnn_mfw2880: Mask R-CNN
    detr_r50                      DETR as published, with a ResNet-50

"mfw2880" is short for the encoder mobileformer_w2880. Every field of a model's configuration can be overridden by
keyword. This module imports no model: the code of a kind is imported when one of its models is first asked for. A
package of your own adds kinds and names by `register_kind`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

from finola.errors import FinolaError, near
from finola.models.base import ModelConfig, resolve

PRETRAINED_FOLDER = Path(__file__).parent / "pretrained"
DEFAULT_MODEL: Final = "finola_mfw720_c768_r8"
ENCODER_WIDTHS = (720, 1440, 2880, 4320, 5760)
VITS = ("tiny", "small", "base")

# the kinds of models, by the names that stand in weights files -> their configurations
KINDS: dict[str, str | type[ModelConfig]] = {
    "autoencoder": "finola.models.autoencoder:AutoencoderConfig",
    "masked": "finola.models.masked:MaskedConfig",
    "classifier": "finola.models.classifier:ClassifierConfig",
    "mae": "finola.models.selfsupervised:MaeConfig",
    "simmim": "finola.models.selfsupervised:SimmimConfig",
    "moco": "finola.models.selfsupervised:MocoConfig",
    "detr": "finola.detection.detr:DetrConfig",
    "mask_rcnn": "finola.detection.mask_rcnn:MaskRcnnConfig",
}


class Entry(NamedTuple):
    """A registered model: its kind, and those fields of its configuration that are not the defaults."""

    kind: str
    fields: Mapping[str, Any]


def _autoencoders() -> dict[str, Entry]:
    rows = [(2880, 3072, r) for r in (8, 16, 32, 64, 128, 256)]  # Table "resolution"
    rows += [(2880, 3072, 24)]  # image size 384
    rows += [(2880, c, 16) for c in (4096, 2048, 1024, 512, 256, 128, 64)]  # Table "ablation" (a)
    rows += [(w, 3072, 16) for w in ENCODER_WIDTHS if w != 2880]  # Table "ablation" (b)
    models: dict[str, dict[str, Any]] = {
        f"finola_mfw{w}_c{c}_r{r}": {
            "encoder": f"mobileformer_w{w}", "embed_dim": c, "map_size": r, "image_size": 384 if r == 24 else 256}
        for w, c, r in rows
    }
    # the compact models for 128-pixel squares, at the paper's rate: 768 numbers for 128², as 3072 for 256²
    models |= {
        f"finola_mfw720_c768_r{r}": {
            "encoder": "mobileformer_w720", "embed_dim": 768, "map_size": r, "image_size": 128,
            "decoder_widths": widths}
        for r, widths in ((8, (224, 128, 64, 16, 16)), (16, (128, 64, 32, 16)), (32, (64, 32, 16)))
    }
    models[DEFAULT_MODEL] |= {"start": "shifts", "pool_heads": 64}
    return {name: Entry("autoencoder", fields) for name, fields in models.items()}


def _pretraining() -> dict[str, Entry]:
    masked = {
        f"masked_finola_{variant[0]}_mfw{w}": Entry("masked", {"encoder": f"mobileformer_w{w}", "variant": variant})
        for variant in ("block", "element") for w in ENCODER_WIDTHS
    }
    vits = {f"{kind}_vit_{size}": Entry(kind, {"encoder": f"vit_{size}_patch16_224"})
            for kind in ("mae", "simmim") for size in VITS}
    moco = {f"moco_mfw{w}": Entry("moco", {"encoder": f"mobileformer_w{w}"}) for w in ENCODER_WIDTHS}
    return masked | vits | moco


def _classifiers() -> dict[str, Entry]:
    encoders = [f"mobileformer_w{w}" for w in ENCODER_WIDTHS] + [f"vit_{size}_patch16_224" for size in VITS]
    return {f"{encoder}+{head}": Entry("classifier", {"encoder": encoder, "head": head})
            for encoder in encoders for head in ("lin", "tran1", "tran4")}


def _detectors() -> dict[str, Entry]:
    detrs = {
        f"detr_mf_dec_{depths}_mfw{w}": Entry(
            "detr", {"encoder": f"mobileformer_w{w}", "head": f"mf_dec_{depths}"})
        for depths in (522, 211) for w in ENCODER_WIDTHS
    }
    masks = {f"mask_rcnn_mfw{w}": Entry("mask_rcnn", {"encoder": f"mobileformer_w{w}"}) for w in ENCODER_WIDTHS}
    return detrs | masks | {"detr_r50": Entry("detr", {"encoder": "resnet50", "head": "transformer"})}


MODELS = _autoencoders() | _pretraining() | _classifiers() | _detectors()


def register_kind(config: type[ModelConfig], models: Mapping[str, Mapping[str, Any]]) -> None:
    """Make known a kind of model of your own, and names of models: name -> fields of the configuration.

    From then on `create_model`, weights files, recipes and `finola.training.engine.fit` know them.

    Raises:
        FinolaError: a kind or a name that is taken, or a kind that weights files cannot name.
    """
    if not re.fullmatch(r"\w+", config.kind):
        raise FinolaError(f"kind: got {config.kind!r}, expected letters, digits and underscores")
    if config.kind in KINDS and config_class(config.kind) is not config:
        raise FinolaError(f"kind: {config.kind!r} is {config_class(config.kind)} already; choose another name")
    entries = {name: Entry(config.kind, fields) for name, fields in models.items()}
    taken = sorted(name for name, entry in entries.items() if MODELS.get(name, entry) != entry)
    if taken:
        raise FinolaError(f"model: {taken[0]!r} is a {MODELS[taken[0]].kind} already; choose another name")
    KINDS[config.kind] = config
    MODELS.update(entries)


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Names of the models, those that match a shell pattern; with `pretrained` only those that have weights."""
    names = [name for name in MODELS if fnmatch(name, pattern)]
    if pretrained:
        names = [name for name in names if pretrained_path(name).exists()]
    return sorted(names, key=lambda name: (re.split(r"\d", name)[0], [int(n) for n in re.findall(r"\d+", name)], name))


def config_class(kind: str) -> type[ModelConfig]:
    """The class of a kind's configurations, imported when it is first asked for."""
    found: type[ModelConfig] = resolve(KINDS[kind])
    return found


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a registered model, with some fields replaced.

    Raises:
        FinolaError: an unknown name or field (with near ones), or a value that the configuration refuses.
    """
    if name not in MODELS:
        raise FinolaError(f"model: unknown name {name!r}{near(name, MODELS)} (finola.list_models() lists them)")
    kind, changes = MODELS[name]
    config = config_class(kind)(**changes)
    known = [field.name for field in fields(config)]
    for key in overrides:
        if key not in known:
            raise FinolaError(f"model: unknown option {key!r}{near(key, known, 1)} (options: {', '.join(known)})")
    return replace(config, **overrides)


def pretrained_path(name: str) -> Path:
    """Where the weights that are shipped for a model would be."""
    return PRETRAINED_FOLDER / f"{name}.safetensors"
