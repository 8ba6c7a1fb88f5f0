"""Looking inside a model: the space of its vectors q and the surfaces of its maps z.

    statistics    mean, covariance and principal components of any number of vectors, in one pass
    embedding     what the decoder paints for the mean vector and along lines, samples and components
    curvature     Gaussian curvature of the feature surfaces
    growth        the map and the image as the law walks away from q
    equations     how far the law's two equations hold, and finer grids (`finola.pde`)
    law           how far maps that nothing made obey the law obey one
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finola.analysis import curvature, embedding, equations, growth, law, statistics

__all__ = ["curvature", "embedding", "equations", "growth", "law", "statistics"]


if not TYPE_CHECKING:  # imported on first use: growth and equations draw with matplotlib

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f"finola.analysis.{name}")
        raise AttributeError(f"module 'finola.analysis' has no attribute {name!r}")
