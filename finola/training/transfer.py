"""Starting from the weights of another run: a whole model, its encoder alone, or a head for other classes.

The paper's chains: pre-training -> probing (the encoder) -> fine-tuning (encoder and the probed head) -> one's own
classes (all but the last layer); masked FINOLA -> reconstruction with a frozen encoder (appendix "Comparison of
FINOLA and masked FINOLA on image reconstruction").
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from finola.errors import WeightsError
from finola.models.base import ImageModel
from finola.weights import load_state, load_weights

WHOLE_MODEL = "whole model"


def transfer(model: ImageModel, source: str | Path, *, new_classes: bool = False, new_head: bool = False) -> str:
    """Load into `model` what a weights file holds for it.

    A model of the same kind takes everything. A classifier or a detector takes the encoder of any other kind, and so
    does an autoencoder, with pooling and matrices where the file is of masked FINOLA with as many channels (the
    block-wise variant has no pooling).

    Args:
        source: a file written by `finola.save_weights`, or a shipped model's name.
        new_classes: let a classifier or detector for other classes keep all but its last layer, which starts anew.
        new_head: take the encoder of a classifier or detector alone.

    Returns:
        What was taken: "whole model", "all but the last layer", "encoder", "encoder, matrices, pooling", ...

    Raises:
        WeightsError: another encoder or architecture; without `new_head` another head, without `new_classes` other
            classes. The message names both sides.
    """
    donor = load_weights(source)
    theirs, ours = donor.config, model.config
    if theirs.encoder != ours.encoder:
        raise WeightsError(f"{source}: holds the encoder {theirs.encoder}, the recipe wants {ours.encoder}; choose a "
                           "recipe for that encoder, or other weights")
    if theirs.kind != ours.kind or new_head:
        _take_encoder(model.encoder, donor.encoder, source)
        more = model.take_over(donor) if theirs.kind != ours.kind else ()
        return ", ".join(("encoder", *more))
    if ours.has_classes:
        return _take_classes(model, donor, source, new_classes)
    _take_all(model, donor, donor.state_dict(), source)
    return WHOLE_MODEL


def _take_all(model: ImageModel, donor: ImageModel, state: dict[str, Tensor], source: str | Path) -> None:
    """Load the donor's `state`; where it does not fit, say in what the two configurations differ."""
    try:
        load_state(model, state, source)
    except WeightsError as error:
        theirs, ours = donor.config.to_dict(), model.config.to_dict()
        differing = ", ".join(f"{key} {theirs[key]} there, {ours[key]} in the recipe"
                              for key in ours if theirs[key] != ours[key])
        raise WeightsError(f"{error} ({differing})") from None


def _take_encoder(encoder: nn.Module, donor: nn.Module, source: str | Path) -> None:
    load_state(encoder, _encoder_state(encoder, donor), source)


def _encoder_state(encoder: nn.Module, donor: nn.Module) -> dict[str, Tensor]:
    """The donor's tensors, the position embedding of a ViT resampled to the size of `encoder`."""
    state, grid = donor.state_dict(), getattr(getattr(encoder, "patch_embed", None), "grid_size", None)
    if grid is not None:
        from timm.layers.pos_embed import resample_abs_pos_embed

        prefixes: Any = encoder.num_prefix_tokens
        state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], list(grid), num_prefix_tokens=prefixes)
    return state


def _take_classes(model: ImageModel, donor: Any, source: str | Path, new_classes: bool) -> str:
    """Everything of a classifier or detector, with a fresh last layer where the classes differ; says which."""
    theirs: Any = donor.config  # with the fields of a kind that `has_classes`
    ours: Any = model.config
    if getattr(theirs, "head", None) != getattr(ours, "head", None):
        raise WeightsError(f"{source}: holds the head {theirs.head}, the recipe wants {ours.head}; add --new-head to "
                           "keep its encoder alone")
    same = theirs.num_classes == ours.num_classes and (not theirs.classes or theirs.classes == ours.classes)
    if not same and not new_classes:
        raise WeightsError(f"{source}: is for {theirs.num_classes} classes{first_names(theirs.classes)}, the data "
                           f"holds {ours.num_classes} classes{first_names(ours.classes)}; add --num-classes "
                           f"{ours.num_classes} for a new last layer, or --new-head to keep the encoder alone")
    if not same:
        donor.reset_classifier(ours.num_classes, ours.classes)
    encoder = {f"encoder.{name}": tensor for name, tensor in _encoder_state(model.encoder, donor.encoder).items()}
    _take_all(model, donor, donor.state_dict() | encoder, source)
    return WHOLE_MODEL if same else "all but the last layer"


def first_names(classes: Sequence[str]) -> str:
    """" (cat, dog, owl, ...)" for messages, or nothing where classes have no names."""
    shown = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
    return f" ({shown})" if shown else ""


