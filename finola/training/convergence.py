"""Did a finished run converge? Its loss at the end is compared with that of a guess that looks at no image.

    reconstruction     every image guessed as the mean image
    masked prediction  every masked patch guessed as the mean image's; 0 where patches are normalised one by one
    classification     every class guessed alike: ln(classes)
    MoCo               the other crop guessed alike among all: ln(1 + queue)
    detection          no such guess: a finite run counts as converged

The loss is the mean training loss of the last epoch: one of validation may rise above a guess because a model has
learnt its training images too well, which is another matter. The mean image is that of up to 256 validation images
(or training ones), spread evenly over the set, and for each of them the mean of the others. A task says what it is
compared with in `Task.guess_loss`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finola.training.datamodule import RunData
from finola.training.tasks.base import Task


def why_not_converged(task: Task, images: RunData) -> str | None:
    """What a finished run's loss is above, in words; None for a run that converged."""
    if not all_finite(task.model.state_dict()):
        return "its weights are not finite"
    loss = last_loss(task)
    if not math.isfinite(loss):
        return "the training loss is not finite at the end"
    with torch.no_grad():
        guess = task.guess_loss(images.examples)
    if guess is None or loss <= guess[0]:
        return None
    return f"the training loss is {loss:.4g} at the end, above the {guess[0]:.4g} of {guess[1]}"


def last_loss(task: Task) -> float:
    """The mean training loss of the last epoch; not a number where that was not finite."""
    if task.history:
        loss = task.history[-1]["train_loss"]
        return math.nan if loss is None else loss
    total, _, batches = task.train_sums.tolist()
    return total / batches if batches else math.nan


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether no tensor of a state_dict holds an infinity or a value that is not a number."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())
