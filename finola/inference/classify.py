"""Photographs of any size and mode through a classifier: the most likely classes of the centre square."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from finola.data.images import ImageLike, SeveralImages, load_square, upright_rgb
from finola.drawing import GAP, LABEL_HEIGHT
from finola.errors import FinolaError, WeightsError
from finola.models.base import ImageModel, require_evaluation
from finola.models.classifier import Classifier

if TYPE_CHECKING:
    from timm.data.imagenet_info import ImageNetInfo

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

LONGEST_SIDE, LEAST_WIDTH = 512, 240  # of a chart's image, and of the chart, in pixels
BAR = "#a9cfe8"


@dataclass(frozen=True)
class Prediction:
    """One class an image may be of.

    Attributes:
        label: the class as the weights name it, such as n03028079; its number where they name none.
        name: the same for people, such as church.
        probability: in [0, 1]; those of all classes sum to one.
    """

    label: str
    name: str
    probability: float

    def __str__(self) -> str:
        return f"{self.name} {100 * self.probability:.1f} %"


@overload
def predict(model: Classifier, image: ImageLike, top: int = 5, crop_pct: float | None = None) -> list[Prediction]: ...


@overload
def predict(model: Classifier, image: SeveralImages, top: int = 5,
            crop_pct: float | None = None) -> list[list[Prediction]]: ...


def predict(
    model: Classifier, image: ImageLike | SeveralImages, top: int = 5, crop_pct: float | None = None
) -> list[Prediction] | list[list[Prediction]]:
    """The `top` most likely classes of a photograph, the likeliest first; all classes if there are no more.

    Args:
        model: in evaluation mode, on any device.
        image: a path, a PIL image of any size and mode, an array (H, W, 3) or a tensor (3, H, W); or a list of them,
            for a list of results. Its shorter side is resized to the model's size over
            `crop_pct` (antialiased bicubic) and the centre square is taken, as in `finola eval`.
        crop_pct: the share of the shorter side that is seen, by default the classifiers' 0.875 (224 of 256 px).

    Raises:
        DataError: an image that cannot be decoded or has no pixels.
        WeightsError: a model that is no classifier.
        FinolaError: a model in training mode.
        RecipeError: a share outside 0 < crop_pct <= 1.
    """
    if isinstance(image, list | tuple):
        return [predict(model, one, top, crop_pct) for one in image]
    config = require_classifier(model).config
    square = load_square(image, config.image_size, config.crop_pct if crop_pct is None else crop_pct)
    return predict_squares(model, square[None], top)[0]


@torch.no_grad()
def predict_squares(model: Classifier, x: Tensor, top: int = 5) -> list[list[Prediction]]:
    """`predict` for squares x (B, 3, S, S) in [0, 1], as `load_square` gives them, at once."""
    require_evaluation(model, "where an image's classes depend on the others of its batch")
    if top < 1:
        raise FinolaError(f"top: got {top}, expected at least 1")
    config = model.config
    labels = config.classes or tuple(map(str, range(config.num_classes)))
    names = readable_names(labels)
    probabilities = model(x.to(model.mean.device)).float().softmax(dim=1)  # (B, classes)
    values, numbers = probabilities.topk(min(top, config.num_classes), dim=1)
    return [[Prediction(labels[i], names[i], p) for p, i in zip(*row, strict=True)]
            for row in zip(values.tolist(), numbers.tolist(), strict=True)]


def require_classifier(model: ImageModel, source: str | Path = "model") -> Classifier:
    """The model itself; raises WeightsError unless it is a classifier. `source` is what the message calls it."""
    if not isinstance(model, Classifier):
        raise WeightsError(f"{source}: got a model of kind {model.config.kind!r}, expected a classifier; "
                           "finola probe or finola finetune makes one of its encoder")
    return model


def chart(image: Image.Image | str | Path, predictions: list[Prediction]) -> Image.Image:
    """The image, at most 512 pixels wide and high, and below it one bar for each prediction."""
    picture = upright_rgb(image).copy()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    width = max(picture.width, LEAST_WIDTH)
    line = LABEL_HEIGHT + GAP
    canvas = Image.new("RGB", (width + 2 * GAP, picture.height + 2 * GAP + len(predictions) * line), "white")
    canvas.paste(picture, ((canvas.width - picture.width) // 2, GAP))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    for i, prediction in enumerate(predictions):
        top = picture.height + 2 * GAP + i * line
        length = round(prediction.probability * (width - 1))
        draw.rectangle((GAP, top, GAP + length, top + LABEL_HEIGHT - 1), fill=BAR)
        percent = f"{100 * prediction.probability:.1f} %"
        room = width - font.getlength(percent) - 4 * GAP
        draw.text((2 * GAP, top + 1), _shorten(prediction.name, font, room), fill="black", font=font)
        draw.text((width, top + 1), percent, fill="black", font=font, anchor="ra")
    return canvas


def _shorten(text: str, font: Font, room: float) -> str:
    """As much of a text as `room` pixels hold."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}...") > room:
        text = text[:-1]
    return f"{text}..."


WORDNET_ID = re.compile(r"n\d{8}")


def readable_names(classes: Sequence[str]) -> list[str]:
    """The first English word of each WordNet id (n03028079 -> church); other names as they are.

    Where two classes would be called alike, as ImageNet's two cranes, the id follows the word."""
    words = [_word(name) for name in classes]
    counts = Counter(words)
    return [word if counts[word] == 1 else f"{word} ({name})" for word, name in zip(words, classes, strict=True)]


def _word(name: str) -> str:
    if not WORDNET_ID.fullmatch(name):
        return name
    try:
        return _wordnet().label_name_to_description(name).partition(",")[0]
    except KeyError:  # an id that is not of ImageNet
        return name


@cache
def _wordnet() -> ImageNetInfo:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo()  # one subset of ImageNet like another: all know the words of all 21,844 ids
