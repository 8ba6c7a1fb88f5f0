"""Images for `finola demo`, which needs no file and no network: scenes drawn here, and one photograph where
matplotlib, which brings it along, is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from finola.data.images import decode_image

SIZE = 256  # of the drawn scenes; the model's squares are smaller, so that edges come out smooth
PHOTOGRAPH = "mpl-data/sample_data/grace_hopper.jpg"

Array = NDArray[np.float64]


def demo_images() -> dict[str, Image.Image]:
    """Name -> RGB image; the names say which are drawn."""
    images = {"drawn: spheres": spheres(), "drawn: hills": hills(), "drawn: lake": lake()}
    if photograph := _photograph():
        images["photo: Grace Hopper"] = decode_image(photograph)
    return images


def _photograph() -> Path | None:
    matplotlib = find_spec("matplotlib")  # found, not imported
    if matplotlib is None or matplotlib.origin is None:
        return None
    path = Path(matplotlib.origin).parent / PHOTOGRAPH
    return path if path.exists() else None


def spheres() -> Image.Image:
    """Two lit spheres and their shadows on a chequered floor that fades into the haze."""
    light = _unit(np.array([-0.6, 0.8, -0.5]))
    balls = [((-0.5, 1.0, 5.0), 1.0, (0.85, 0.25, 0.2)), ((1.3, 0.6, 4.0), 0.6, (0.2, 0.45, 0.8))]
    y, x = (0.5 - (np.mgrid[:SIZE, :SIZE] + 0.5) / SIZE) * np.array([1, -1]).reshape(2, 1, 1)
    ray = _unit(np.stack([x, y - 0.08, np.ones_like(x)], axis=-1))  # (S, S, 3), from the eye at (0, 1.2, 0)
    eye = np.array([0.0, 1.2, 0.0])
    sky = _mix((0.85, 0.88, 0.9), (0.35, 0.55, 0.85), np.clip(3 * ray[..., 1], 0, 1))

    floor = np.where(ray[..., 1] < 0, -eye[1] / np.minimum(ray[..., 1], -1e-6), np.inf)  # distance to y = 0
    ground = eye + np.minimum(floor, 200)[..., None] * ray
    squares = (np.floor(ground[..., 0]) + np.floor(ground[..., 2])) % 2
    shadow = np.minimum.reduce([np.where(np.isfinite(_distance(ground, light, c, r)), 0.35, 1) for c, r, _ in balls])
    image = _mix((0.9, 0.87, 0.8), (0.3, 0.25, 0.22), squares) * shadow[..., None]
    image = _mix(sky, image, np.exp(-floor / 12))

    for centre, radius, colour in balls:
        distance = _distance(eye, ray, centre, radius)
        hit = np.isfinite(distance)
        normal = (eye + np.where(hit, distance, 0)[..., None] * ray - centre) / radius
        diffuse = np.clip(normal @ light, 0, 1)
        shine = np.clip((ray - 2 * (ray * normal).sum(-1, keepdims=True) * normal) @ light, 0, 1) ** 40
        lit = np.array(colour) * (0.25 + 0.75 * diffuse)[..., None] + 0.6 * shine[..., None]
        image = np.where(hit[..., None], lit, image)
    return _image(image)


def hills() -> Image.Image:
    """The sun going down behind hills, each range darker than the one behind it."""
    y, x = (np.mgrid[:SIZE, :SIZE] + 0.5) / SIZE
    image = _mix((0.25, 0.3, 0.55), (0.98, 0.65, 0.35), np.clip(y / 0.6, 0, 1) ** 1.5)
    sun = np.hypot(x - 0.65, y - 0.42)
    image = _mix(image, (1.0, 0.93, 0.75), np.clip(np.exp(-sun / 0.12) + (sun < 0.06), 0, 1))
    for i in range(5):
        ridge = 0.5 + 0.1 * i - 0.06 * _ridge(x, seed=i, first=2 + i)
        colour = _mix((0.75, 0.5, 0.45), (0.08, 0.1, 0.14), np.full_like(x, i / 4))
        haze = np.clip((y - ridge) / 0.25, 0, 1) * (0.35 - 0.07 * i)  # brighter in the valleys
        image = np.where((y > ridge)[..., None], _mix(colour, (0.95, 0.7, 0.5), haze), image)
    return _image(image)


def lake() -> Image.Image:
    """Snowy mountains under drifting clouds, mirrored in rippled water."""
    y, x = (np.mgrid[:SIZE, :SIZE] + 0.5) / SIZE
    shore = 0.55
    ripple = 0.012 * np.sin(300 * (y - shore) / (0.3 + y)) * np.sin(25 * x + 40 * y)
    up = np.where(y < shore, y, 2 * shore - y + ripple)  # height in the scene that each pixel shows
    clouds = np.clip(_ridge(x + 0.4 * up, 7, 2) * _ridge(3 * up + 0.3 * x, 8, 2), 0, 1)
    image = _mix(_mix((0.3, 0.5, 0.8), (0.75, 0.85, 0.93), np.clip(up / shore, 0, 1)), (1, 1, 1), 0.6 * clouds)
    for i, (level, depth, colour) in enumerate([(0.3, 0.12, (0.45, 0.5, 0.6)), (0.45, 0.06, (0.16, 0.28, 0.2))]):
        ridge = level - depth * _ridge(x, seed=20 + i, first=3 + 3 * i)
        rock = np.array(colour) * (0.8 + 0.3 * _ridge(x + 0.5 * up, 30 + i, 12))[..., None]
        snow = np.clip((level - 0.02 - up) / 0.05 + 0.5 * _ridge(x - up, 40, 9), 0, 1) * (i == 0)
        image = np.where((up > ridge)[..., None], _mix(rock, (0.95, 0.96, 1.0), snow), image)
    return _image(np.where((y < shore)[..., None], image, 0.75 * image + (0.0, 0.03, 0.05)))


def _distance(origin: Array, direction: Array, centre: Sequence[float], radius: float) -> Array:
    """Along rays (..., 3) of unit direction to the near side of a sphere; infinite where they miss it."""
    offset = origin - np.array(centre)
    along = (offset * direction).sum(-1)
    square = along**2 - (offset**2).sum(-1) + radius**2
    distance = -along - np.sqrt(np.maximum(square, 0))
    return np.where((square > 0) & (distance > 1e-6), distance, np.inf)


def _ridge(x: Array, seed: int, first: int) -> Array:
    """A wavy line between about -1 and 1: sines from `first` waves upwards, the fainter the finer."""
    random = np.random.default_rng(seed)
    waves = [np.sin(2 * np.pi * (first * 1.7**k * x + random.random())) / 1.7**k for k in range(6)]
    total: Array = np.add.reduce(waves)
    return total / 2


def _mix(a: ArrayLike, b: ArrayLike, share: Array) -> Array:
    """Colours a and b, (3,) or (S, S, 3), mixed by (S, S) shares of b."""
    mixed: Array = np.asarray(a) + (np.asarray(b) - np.asarray(a)) * share[..., None]
    return mixed


def _unit(vector: Array) -> Array:
    unit: Array = vector / np.linalg.norm(vector, axis=-1, keepdims=True)
    return unit


def _image(image: Array) -> Image.Image:
    """(S, S, 3) -> RGB, values outside [0, 1] clipped."""
    return Image.fromarray((np.clip(image, 0, 1) * 255).round().astype(np.uint8))
