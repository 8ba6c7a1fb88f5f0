"""Training runs: a recipe and images (folders, shards or a COCO file) in; weights, curves and a result out.

`fit` hands the work to Lightning's Trainer (devices, DDP, precision, accumulation, averaging, loggers). `callbacks.py`
has the checkpoints, the stop on time or signal, the averaged weights and the speed; `finola.data.loader` resumes in
the middle of an epoch.

A run's folder:
    recipe.yaml            what was run; at its end, as comments, the weights and files it was run with
    last.ckpt              the newest checkpoint
    features_0/            what a frozen encoder gives for the images, while a probe runs; one for each process
    csv/, tensorboard/     logs; each resume starts a new csv version
    panels/                one image for each validation: reconstructions, predictions, objects, or the confusion of
                           classes
    weights.safetensors, result.json, curve.png, panel.png    written when the run ends
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from finola.codec.calibration import Calibration, calibration_path, find_calibration
from finola.errors import DataError, RecipeError, WeightsError
from finola.files import atomic_write, check_folder, write_json
from finola.models.base import ImageModel, ModelConfig, resolve
from finola.provenance import device_name, environment
from finola.training.callbacks import Averaging, Checkpoints, EpochLines, Speed, WholeFileCheckpoints
from finola.training.convergence import all_finite, why_not_converged
from finola.training.datamodule import RunData
from finola.training.origin import UNKNOWN, as_comment, origin_of_data, origin_of_weights, own_figures, runs_of
from finola.training.recipe import FREE_KEYS, Precision, Recipe, differences
from finola.training.sync_batchnorm import synchronise_batch_norm
from finola.training.tasks.base import NonFiniteLoss, Task
from finola.training.transfer import transfer
from finola.weights import find_weights, save_weights

HARMLESS_WARNINGS = (
    ".*smaller than the logging interval", "`isinstance.treespec, LeafSpec.` is deprecated",
    "Grad strides do not match bucket view strides", r".*module\(s\) in eval mode at the start of training",
)


def fit(
    recipe: Recipe, data: list[str], val: list[str] | None, out: str | Path, *,
    resume: bool = False, allow_changes: bool = False, init_from: str | Path | None = None,
    num_classes: int | None = None, new_head: bool = False,
) -> dict[str, Any]:
    """Train, or resume training, and write the run's folder.

    Args:
        data, val: folders or shards of training and validation images, or for a detector an annotation file in COCO's
            format and perhaps the folder of its images; without `val` nothing is validated.
        out: the run's folder; must be empty or absent unless `resume`.
        resume: continue from `out`/last.ckpt, exactly where it stopped, on a CPU with the same bits; from the start
            if there is none yet.
        allow_changes: resume although the recipe, the number of processes, the data or the weights of the start have
            changed.
        init_from: a weights file, or a shipped model's name, to start from (see `finola.training.transfer`).
        num_classes: how many classes `data` has; given, a classifier or detector in `init_from` that is for other
            classes gets a new last layer instead of being refused.
        new_head: take the encoder alone of a classifier or a detector in `init_from`.

    Returns:
        The content of result.json.

    Raises:
        RecipeError, DataError, WeightsError: on bad input.
        NonFiniteLoss: the run did not converge; result.json says so.
        SystemExit: 128 + the signal's number, after SIGTERM or SIGINT and a last checkpoint.
    """
    started, out = time.monotonic(), Path(out)
    going_on = resume and (out / "last.ckpt").exists()
    _check_options(recipe, init_from, num_classes, new_head, going_on)
    torch.set_flush_denormal(True)  # a CPU takes many times longer over numbers below 1e-38
    _check_folder(out, resume)
    images: RunData = resolve(recipe.model_config().data).open(recipe, data, val, out)
    config = _model_config(recipe, images, num_classes)
    task = _task(recipe, config, images, out)
    files = {"train": origin_of_data(data, images.train), "val": origin_of_data(val, images.val)}
    origin: dict[str, Any] = {"weights": None, "files": files}
    if init_from and not going_on:
        part = transfer(task.model, init_from, new_classes=num_classes is not None, new_head=new_head)
        origin["weights"] = origin_of_weights(init_from, part)
    if recipe.optim.rate and init_from:
        task.calibration = _calibration(init_from, None if going_on else task.model)
    deadline = started + 60 * recipe.trainer.max_time if recipe.trainer.max_time else math.inf
    speed = Speed()
    classes = getattr(config, "classes", ())
    checkpoints = Checkpoints(out / "last.ckpt", recipe, len(images.train), classes, origin, deadline)
    trainer = _trainer(recipe, out, [speed, checkpoints], images)
    _check_division(recipe, trainer.world_size)
    checkpoint = _read_checkpoint(checkpoints.path) if going_on else None
    if checkpoint:
        identity = checkpoints.identity(trainer) | _weights_on_resume(init_from, checkpoint)
        _check_same_run(checkpoint, identity, checkpoints.path, allow_changes)
        origin["weights"] = checkpoint["identity"].get("weights", UNKNOWN)
        images.first_epoch = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    elif recipe.optim.start_images and not init_from:
        task.model.start_from_images(images.some(recipe.optim.start_images))
    if trainer.world_size > 1:
        task.model = cast(ImageModel, synchronise_batch_norm(task.model, trainer.strategy.root_device))
    _open_folder(out, recipe, origin)
    _announce(recipe, images, task, trainer, out, origin, checkpoint)
    for harmless in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", harmless)

    try:
        if checkpoint and checkpoint["global_step"] >= images.total_steps:
            _restore_finished(task, speed, checkpoint)
            finished, step = True, checkpoint["global_step"]
        else:
            _run(trainer, task, images, checkpoints.path if checkpoint else None)
            finished, step = not checkpoints.out_of_time, trainer.global_step
    except NonFiniteLoss as error:
        names = [images.train.name(index) for index in error.indices]
        reason = f"the training loss is not finite at step {error.step}"
        outcome = {"finished": False, "converged": False, "reason": reason, "step": error.step, "failed_batch": names}
        _write_results(recipe, task, images, trainer, speed, out, origin, outcome)
        raise
    outcome = {"finished": finished, **_judged(finished, task, images, trainer), "step": step}
    result = _write_results(recipe, task, images, trainer, speed, out, origin, outcome)
    _announce_end(result, out)
    return result


def _judged(finished: bool, task: Task, images: RunData, trainer: Trainer) -> dict[str, Any]:
    """What the result says of convergence: null before the end of the run (and in all processes but the first)."""
    if not finished or not trainer.is_global_zero:
        return {"converged": None}
    reason = why_not_converged(task, images)
    return {"converged": True} if reason is None else {"converged": False, "reason": reason}


def _model_config(recipe: Recipe, images: RunData, num_classes: int | None) -> ModelConfig:
    """The recipe's, with the classes of the data for a model that has classes."""
    config = recipe.model_config()
    if not config.has_classes:
        return config
    fields = images.classes()
    wanted = num_classes or recipe.model.overrides.get("num_classes", fields["num_classes"])
    if wanted != fields["num_classes"]:
        raise DataError(f"{images.train.source}: holds {fields['num_classes']} classes, expected {wanted}; correct"
                        " --num-classes or model.num_classes, or choose other data")
    return replace(config, **fields)


def _task(recipe: Recipe, config: ModelConfig, images: RunData, out: Path) -> Task:
    torch.manual_seed(recipe.seed)
    images.model = config.build()
    if recipe.trainer.compile:
        images.model.compile()  # in place: the names of the weights stay
    task: Task = resolve(config.task)(
        images.model, recipe.optim, images.total_steps, seed=recipe.seed, panel_folder=out / "panels",
        panel_every=recipe.trainer.panel_every, channels_last=recipe.trainer.channels_last,
    )
    every = recipe.trainer.knn_every

    def neighbours() -> float | None:
        due = every is not None and (len(task.history) + 1) % every == 0
        return images.neighbours_accuracy(task.model) if due else None

    task.neighbours = neighbours
    return task


def _trainer(recipe: Recipe, out: Path, callbacks: list[Callback], images: RunData) -> Trainer:
    section = recipe.trainer
    if section.ema_decay is not None:
        callbacks.append(Averaging(section.ema_decay))
    bar = sys.stdout.isatty()
    callbacks.append(RichProgressBar() if bar else EpochLines())
    # Lightning's requeueing may save in mid-step; SIGTERM and --resume do not
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    on_gpu = section.accelerator != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    return Trainer(
        accelerator=section.accelerator, devices=section.devices, num_nodes=section.num_nodes,
        strategy=section.strategy, precision=cast(Precision, section.precision),
        plugins=[WholeFileCheckpoints(), *slurm], callbacks=callbacks,
        logger=[CSVLogger(out, name="csv"), TensorBoardLogger(out, name="tensorboard", version="")],
        max_epochs=recipe.optim.epochs, accumulate_grad_batches=section.accumulate,
        gradient_clip_val=recipe.optim.clip_grad, check_val_every_n_epoch=_val_every(recipe),
        limit_val_batches=1.0 if images.val is not None else 0, num_sanity_val_steps=0, log_every_n_steps=10,
        enable_progress_bar=bar, use_distributed_sampler=False, enable_model_summary=False,
        default_root_dir=out, benchmark=images.one_size and on_gpu,  # of cuDNN's algorithms
    )


def _val_every(recipe: Recipe) -> int:
    """`val_every`, or the next smaller number that divides the epochs: the last epoch is always validated."""
    epochs = recipe.optim.epochs
    return max(n for n in range(1, min(recipe.trainer.val_every, epochs) + 1) if epochs % n == 0)


def _run(trainer: Trainer, task: Task, images: RunData, checkpoint_path: Path | None) -> None:
    try:
        trainer.fit(task, datamodule=images, ckpt_path=checkpoint_path, weights_only=True)
    except SystemExit as error:
        if error.code == 1 and trainer.interrupted:  # Lightning's answer to Ctrl-C before the first step
            raise KeyboardInterrupt from None
        raise


def _restore_finished(task: Task, speed: Speed, checkpoint: dict[str, Any]) -> None:
    """For a run that was killed between its last step and its results."""
    task.load_state_dict(checkpoint["state_dict"])  # the averaged weights, where weights are averaged
    task.on_load_checkpoint(checkpoint)
    speed.load_state_dict(checkpoint["callbacks"][speed.state_key])


# checks -------------------------------------------------------------------------------------------


def _check_options(recipe: Recipe, init_from: str | Path | None, num_classes: int | None, new_head: bool,
                   going_on: bool) -> None:
    """`num_classes` and `new_head` say what becomes of a head for classes: there must be one. A frozen encoder must
    come from somewhere."""
    config = recipe.model_config()
    for option, given in (("--num-classes", num_classes is not None), ("--new-head", new_head)):
        if given and not config.has_classes:
            raise RecipeError(f"{option}: is for classifiers and detectors, {recipe.name} trains a model of kind"
                              f" {config.kind!r}; leave it out, or choose a recipe for one of these")
    if recipe.optim.freeze_encoder and not init_from and not going_on:
        raise RecipeError("--weights is missing; name the pre-trained encoder that"
                          f" {recipe.name} keeps as it is (optim.freeze_encoder)")
    if recipe.optim.rate and not init_from:
        raise RecipeError("--weights is missing; name calibrated ones, in resuming too: their codec's tables are"
                          " what optim.rate trains for")
    if new_head and not init_from:
        raise RecipeError("--new-head: takes the encoder of given weights, but none are given; name them or leave it"
                          " out")


def _calibration(weights: str | Path, model: ImageModel | None) -> Calibration:
    """That of the weights a run starts from; made for `model`, where it is still at its start."""
    path = calibration_path(find_weights(weights))
    return Calibration.load(path) if model is None else find_calibration(model, path)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"{path}: not a whole checkpoint ({reason}); remove it to start again") from None


def _weights_on_resume(init_from: str | Path | None, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The record of the weights that a resumed run names, to be compared with the checkpoint's; the checkpoint's own
    where it names none, where the file, which is not needed any more, is gone, and where nothing is known of it."""
    known = checkpoint["identity"].get("weights", UNKNOWN)
    if init_from is None or known == UNKNOWN:
        return {"weights": known}
    try:
        find_weights(init_from)
    except WeightsError:
        return {"weights": known}
    return {"weights": origin_of_weights(init_from)}


def _check_same_run(checkpoint: dict[str, Any], identity: dict[str, Any], path: Path, allow_changes: bool) -> None:
    before = {"weights": UNKNOWN, "files": identity["files"], **checkpoint["identity"]}  # which older ones do not know
    pairs = differences(before, identity)
    changed = {key: pair for key, pair in pairs.items() if key not in FREE_KEYS}
    if changed and not allow_changes:
        listed = "; ".join(f"{key}: {_short(before)} then, {_short(after)} now"
                           for key, (before, after) in changed.items())
        raise RecipeError(f"{path}: is of another run ({listed}); undo the change, choose another --out,"
                          " or add --allow-changes")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@rank_zero_only
def _announce(recipe: Recipe, images: RunData, task: Task, trainer: Trainer, out: Path,
              origin: dict[str, Any], checkpoint: dict[str, Any] | None) -> None:
    parameters = sum(p.numel() for p in task.model.parameters()) / 1e6
    begin = f"step {checkpoint['global_step']}" if checkpoint else "the start"
    if not checkpoint and (weights := origin["weights"]):
        begin = f"{weights['file']} ({weights['part']})"
    print(f"{recipe.name}: {len(images.train)} images, {recipe.optim.epochs} epochs, {images.total_steps}"
          f" steps of {recipe.optim.batch_size}, lr {recipe.optim.lr:.3g}, {parameters:.1f}M parameters, on"
          f" {trainer.world_size} x {device_name(trainer.strategy.root_device)};"
          f" {out}, from {begin}", flush=True)


@rank_zero_only
def _announce_end(result: dict[str, Any], out: Path) -> None:
    scores = [f"{name.removeprefix('val_')} {value:.2f}" for name, value in result.items()
              if name.startswith("val_") and value is not None]
    if scores and "chance" in result:
        scores[0] += f" (a guess: {result['chance']:.2f})"
    missing = ", not yet validated" if result["images"]["val"] else ""
    score = f", validation: {', '.join(scores)}" if scores else missing
    state = "finished" if result["finished"] else "stopped by max_time, --resume continues"
    if result["converged"] is False:
        state = f"finished, but did not converge ({result['reason']})"
    print(f"{state}: step {result['step']} of {result['total_steps']}{score}; {out / 'result.json'}")


@rank_zero_only
def _check_folder(out: Path, resume: bool) -> None:
    check_folder(out)
    if out.exists() and any(out.iterdir()) and not resume:
        raise RecipeError(f"{out}: is not empty; add --resume to continue it, or choose another --out")


@rank_zero_only
def _open_folder(out: Path, recipe: Recipe, origin: dict[str, Any]) -> None:
    for leftover in out.glob(".*-*.ckpt"):  # of a process killed while it wrote a checkpoint
        leftover.unlink()
    with atomic_write(out / "recipe.yaml") as path:
        path.write_text(recipe.as_yaml() + as_comment(origin), encoding="utf-8")


def _check_division(recipe: Recipe, processes: int) -> None:
    parts = processes * recipe.trainer.accumulate
    if recipe.optim.batch_size % parts:
        raise RecipeError(f"optim.batch_size: got {recipe.optim.batch_size}, expected a multiple of {parts}"
                          f" ({processes} processes x trainer.accumulate {recipe.trainer.accumulate})")


# results ------------------------------------------------------------------------------------------


def _write_results(recipe: Recipe, task: Task, images: RunData, trainer: Trainer, speed: Speed, out: Path,
                   origin: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    surroundings = environment(trainer.strategy.root_device)
    result = {
        "recipe": recipe.name, **outcome,
        "total_steps": images.total_steps,
        **_last_scores(task),
        "seconds": round(speed.seconds, 1), "images_per_second": speed.images_per_second,
        **surroundings, "hardware": f"{trainer.world_size} x {surroundings['hardware']}", **origin,
        "images": {"train": len(images.train), "val": len(images.val) if images.val else 0},
        "runs": runs_of(recipe, origin["weights"]), "paper": own_figures(recipe, origin["weights"]),
        "settings": recipe.as_dict(), "history": task.history,
    }
    if trainer.is_global_zero:
        _write_files(task, out, result)
    return result


def _last_scores(task: Task) -> dict[str, float | None]:
    """What the last validation found, None where there was none; "chance" is what a guess has of the first score."""
    last = task.history[-1] if task.history else {}
    names = [f"val_{name}" for name in task.scores] or ["val_loss"]
    found = {name: last.get(name) for name in [*names, *(["val_knn"] if "val_knn" in last else [])]}
    return found if task.chance is None else {**found, "chance": task.chance}


def _write_files(task: Task, out: Path, result: dict[str, Any]) -> None:
    if "failed_batch" not in result and all_finite(task.model.state_dict()):
        model = task.model.config.build()  # with plain batch norm
        model.load_state_dict(task.model.state_dict())
        scores = [name for name in result if name.startswith("val_")]
        kept = ("recipe", "converged", "reason", "step", "total_steps", *scores, "hardware", "torch", "commit",
                "weights", "files", "runs", "paper")
        metadata = {key: json.dumps(result[key]) for key in kept if key in result}
        save_weights(model, out / "weights.safetensors", metadata)
    panels = sorted((out / "panels").glob("*.png"))
    if panels:
        with atomic_write(out / "panel.png") as path:
            shutil.copyfile(panels[-1], path)
    if task.history:
        _draw_curve(task, out / "curve.png")
    write_json(out / "result.json", result, indent=2)


def _draw_curve(task: Task, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    score = task.scores[0] if task.scores else "loss"
    steps = [point["step"] for point in task.history]
    shown = [(axes, f"train_{score}", "training"), (axes, f"val_{score}", "validation")]
    axes.set(xlabel="optimiser steps", ylabel=f"{score}, {task.unit}" if task.unit else score)
    if task.scores and not task.follows_score:
        right = axes.twinx()
        right.set(ylabel="loss", yscale="log")
        shown = [(axes, f"val_{name}", name) for name in task.scores[:2]] + [(right, "train_loss", "training loss")]
    for i, (of, key, label) in enumerate(shown):
        of.plot(steps, [point.get(key, math.nan) for point in task.history], marker=".", label=label, color=f"C{i}")
    if task.chance is not None:
        axes.axhline(task.chance, color="0.5", linestyle=":", label="a guess")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
