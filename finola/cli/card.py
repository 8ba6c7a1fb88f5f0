"""The README.md of a model on the Hub, written from what its weights file says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from finola.models.base import ModelConfig

PIPELINE_TAGS = {"classes": "image-classification", "objects": "object-detection"}  # by what is scored
NOT_SHOWN = ("format", "config", "licence")


def front_matter(config: ModelConfig, licence: str | None, **more: Any) -> str:
    """The YAML header by which the Hub files a model.

    Args:
        licence: the Hub's name of it, or a name of its own; None where it is not known.
        more: further fields of the header.
    """
    own = {"license": "other", "license_name": licence} if licence else {"license": "unknown"}
    fields = {**own, "library_name": "finola",
              "pipeline_tag": PIPELINE_TAGS.get(config.score or "", "image-feature-extraction"),
              "tags": ["finola", config.kind], **more}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def model_card(name: str, config: ModelConfig, metadata: Mapping[str, str], files: Mapping[str, str],
               licence: str | None) -> str:
    """The whole card.

    Args:
        name: owner/name.
        metadata: of the header of the weights.
        files: name on the Hub -> what is said of it.
        licence: in words; None where nothing is known of it.
    """
    rows = {**files, **_known(metadata)}
    return "\n".join([
        front_matter(config, "see-below" if licence else None),
        f"# {name.partition('/')[2]}", "",
        f"A model of kind `{config.kind}` with the encoder `{config.encoder}`, for images of {config.image_size} px. "
        "Written by `finola push`.", "",
        "```python", "import finola", "", f'model = finola.load_weights("hf-hub:{name}").eval()', "```", "",
        "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), "",
        "## Licence", "",
        licence or "The weights file says nothing of a licence, nor of that of the images behind it.", ""])


def _known(metadata: Mapping[str, str]) -> dict[str, str]:
    """The entries of a header that are words or numbers; a run writes them as JSON."""
    values = {}
    for key, text in metadata.items():
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if key not in NOT_SHOWN and isinstance(value, str | int | float):
            values[key] = str(value).replace("|", "\\|")
    return values
