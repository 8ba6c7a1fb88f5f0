"""A detector on a COCO-format data set: average precision, results in COCO's format, and speed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from finola.data import Batches
from finola.detection.coco import CocoDetection
from finola.detection.detector import Detector
from finola.detection.loader import build_detection_loader, targets_of
from finola.detection.scores import CocoScores, Scores, coco_results
from finola.errors import WeightsError
from finola.evaluation.speed import timed
from finola.training.transfer import first_names

WARM_UP = 2  # batches left out of the times, where there are more


@dataclass
class Evaluation:
    """Attributes:
        scores: by name, between 0 and 1; None where there is nothing to score (see `CocoScores`); and for each class.
        results: what was found, in COCO's format.
        images_per_second, latency_ms: of the detector alone, loading and scoring aside, without the first batches; the
            latter is the median batch.
        peak_memory: on a GPU, in bytes; None elsewhere.
    """

    scores: Scores
    results: list[dict]
    images_per_second: float
    latency_ms: float
    peak_memory: int | None


@torch.no_grad()
def evaluate(model: Detector, dataset: CocoDetection, *, batch_size: int = 1, num_workers: int = 0,
             progress: bool = False) -> Evaluation:
    """Show a data set to a model in evaluation mode, on the device it is on.

    Raises:
        DataError: an image that cannot be decoded, or masks asked of annotations without.
        WeightsError: the model is for other classes than the data's.
    """
    check_categories(model, dataset)
    device, masks = model.mean.device, model.config.masks
    loader = build_detection_loader(
        dataset, Batches(batch_size, train=False), image_size=model.config.image_size,
        max_size=model.config.max_size, masks=masks, num_workers=num_workers, device=device)
    scores, results, times = CocoScores(masks=masks, classes=dataset.classes).to(device), [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tqdm(total=len(dataset), desc="evaluating", unit="image", disable=not progress) as bar:
        for batch in loader:
            detect = partial(
                model.detect, padding=batch["padding"], sizes=batch["size"], originals=batch["original"])
            found, seconds = timed(detect, batch["image"])
            times.append((seconds, len(found)))
            scores.update(found, targets_of(batch))
            for index, of in zip(batch["index"].tolist(), found, strict=True):
                results += coco_results(of, dataset.image_ids[index], dataset.category_ids)
            bar.update(len(found))
    times = times[WARM_UP:] or times
    return Evaluation(
        scores.compute(), results,
        images_per_second=sum(n for _, n in times) / sum(seconds for seconds, _ in times),
        latency_ms=1000 * statistics.median(seconds for seconds, _ in times),
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)


def check_categories(model: Detector, dataset: CocoDetection) -> None:
    """Raise WeightsError unless a model is for a data set's classes: as many and, where it names them, the same."""
    config = model.config
    if config.classes and config.classes != tuple(dataset.classes):
        raise WeightsError(f"the weights are for {config.num_classes} classes{first_names(config.classes)}, "
                           f"{dataset.source} holds {len(dataset.classes)}{first_names(dataset.classes)}; "
                           "take other weights, or train these on with --num-classes")
    if config.num_classes != len(dataset.classes):
        raise WeightsError(f"{dataset.source}: holds {len(dataset.classes)} classes, the weights know "
                           f"{config.num_classes}; take other weights")
