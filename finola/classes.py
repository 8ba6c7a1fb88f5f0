"""Names of classes for people: data sets of ImageNet's kind name theirs by WordNet ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

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
    return ImageNetInfo()  # one subset of ImageNet like another: all know the words of all 21,844 ids
