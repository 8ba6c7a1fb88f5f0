"""`finola inspect embedding`: what the space of the vectors q holds, in six images and their numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.inspect.results import choose_images, write_results
from finola.cli.options import (
    Subparsers,
    add_model,
    add_reading,
    natural,
    open_limited,
    open_model,
    positive,
    weights_identity,
    weights_path,
)
from finola.errors import DataError
from finola.files import check_folder

if TYPE_CHECKING:
    from torch import Tensor

    from finola.analysis.embedding import Study
    from finola.analysis.statistics import Statistics
    from finola.models.autoencoder import FinolaAutoencoder

EXAMPLE = """examples:
  finola inspect embedding --images photos --data imagenette/val --out inspected
  finola inspect embedding --images photos --statistics inspected/statistics.safetensors --out again --seed 1

The mean m and the covariance of the vectors q are those of the images of --data, in one pass over a set of any
size; they are kept in OUT/statistics.safetensors, for --statistics. The images are of the examples:
  mean.png         what the mean vector is decoded to
  fade.png         on the way from q to m
  mirror.png       on through m: 2m - q reverses colours; 2q - m, which the paper prints, is the other way
  samples.png      vectors drawn from the mean and covariance
  mixtures.png     two vectors mixed, beside their pixels mixed
  components.png   reconstructions from the first K principal components
  embedding.json   the numbers of all of them
An image that cannot be decoded stops the command with exit code 3."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "embedding",
        help="mean, fade, mirror, samples, mixtures and components of the vectors",
        description="What the space of an autoencoder's vectors holds, in images and numbers.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--images", nargs="+", required=True, metavar="IMAGES",
                        help="the examples: files, folders or patterns")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", nargs="+", metavar="DIR", help="images for the statistics: folders or shards")
    source.add_argument("--statistics", metavar="FILE", help="statistics that this command wrote, for the same weights")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results, made if need be")
    parser.add_argument("--examples", type=positive, default=24, metavar="N",
                        help="take N of --images, spread evenly over them (%(default)s); six are shown")
    parser.add_argument("--components", type=positive, nargs="+", metavar="K",
                        help="numbers of principal components (1/16, 1/8, 1/4, 1/2 and all of q's, as far as"
                             " the images tell them apart)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the samples (%(default)s)")
    add_model(parser)
    add_reading(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.analysis import embedding

    out = check_folder(args.out)
    paths = _examples(args, out)
    weights = weights_path(args)
    model = open_model(args)
    names, x = [path.stem for path in paths], _load(paths, model.config.image_size)
    statistics, source = _statistics(args, model, weights, out)
    wanted = args.components or embedding.default_counts(model.config.embed_dim)
    counts = args.components or embedding.told_apart(wanted, model.config.embed_dim, statistics.count)
    space = embedding.embedding_space(model, statistics, names, x)
    studies = {
        "mean": lambda: embedding.study_mean(space),
        "fade": lambda: embedding.study_fade(space),
        "mirror": lambda: embedding.study_mirror(space),
        "samples": lambda: embedding.study_samples(space, args.seed),
        "mixtures": lambda: embedding.study_mixtures(space),
        "components": lambda: embedding.study_components(space, counts),
    }
    done = {name: study() for name, study in _bar(args, studies)}
    done["components"].numbers["left_out"] = [count for count in wanted if count not in counts]
    result = _result(model, weights, source, names, {name: study.numbers for name, study in done.items()})
    write_results(out, "embedding", result, {name: study.image for name, study in done.items()})
    print(json.dumps(result) if args.json else _summary(result, out))


def _examples(args: argparse.Namespace, out: Path) -> list[Path]:
    """The files of --images and --examples."""
    paths = choose_images(args.images, out, args.examples)
    if len(paths) < 2:
        raise DataError(f"--images: got {len(paths)} images, expected at least 2, so that there is a mixture")
    return paths


def _load(paths: list[Path], size: int) -> Tensor:
    """The centre squares (E, 3, S, S)."""
    import torch

    from finola.data.images import load_square

    return torch.stack([load_square(path, size) for path in paths])


def _statistics(
    args: argparse.Namespace, model: FinolaAutoencoder, weights: Path, out: Path
) -> tuple[Statistics, dict[str, str]]:
    """The statistics, read or made and kept, and of which images they are."""
    from finola.analysis.embedding import check_counts
    from finola.analysis.statistics import embedding_statistics, load_statistics, save_statistics
    from finola.cli.measures import squares
    from finola.weights import weights_hash

    sha256 = weights_hash(weights)
    if args.statistics:
        return load_statistics(args.statistics, sha256, model.config.embed_dim)
    dataset = open_limited(args.data, args.limit)
    check_counts(args.components or [], model.config.embed_dim, len(dataset))  # here too, since the pass may be long
    show = sys.stderr.isatty() and not args.json
    statistics = embedding_statistics(model, squares(args, dataset, model, show, "statistics"))
    source = {"data": " ".join(args.data), "resample": args.resample}
    save_statistics(statistics, out / "statistics.safetensors", sha256, source)
    return statistics, source


def _bar(
    args: argparse.Namespace, studies: dict[str, Callable[[], Study]]
) -> Iterable[tuple[str, Callable[[], Study]]]:
    from tqdm import tqdm

    return tqdm(studies.items(), "studies", disable=args.json or not sys.stderr.isatty())


def _result(model: FinolaAutoencoder, weights: Path, source: dict[str, str], names: list[str],
            numbers: dict[str, dict]) -> dict:
    from finola.provenance import record

    return record(model.mean.device, {
        **weights_identity(weights, model.config),
        "statistics": {"data": source.get("data"), "resample": source.get("resample")},
        "examples": names,
        **numbers,
    })


def _summary(result: dict, out: Path) -> str:
    mean, samples = result["mean"], result["samples"]
    mirrors = {name: row["correlation_with_reconstruction"] for name, row in result["mirror"].items()}
    half = next(row for row in result["mixtures"]["shares"] if row["share"] == 0.5)
    lines = [
        f"mean of {mean['images']} vectors: an image {mean['deviation']['channels']:.1f} levels from gray and "
        f"{mean['deviation']['pixels']:.1f} from one colour",
        *(f"{name}: correlation {row['values']:+.2f} with the reconstruction, {row['hues']:+.2f} of the hues"
          for name, row in mirrors.items()),
        f"samples: neighbouring pixels differ by {samples['roughness']:.1f} levels, those of reconstructions by "
        f"{samples['roughness_of_reconstructions']:.1f}",
        f"half of each: the mixed vectors' image is at {half['psnr_to_mixed_reconstructions']:.2f} dB of the mixed "
        "reconstructions",
        *(f"{row['components']} components: {100 * row['explained_variance']:.1f} % of the variance, "
          f"{100 * row['explained_of_examples']:.1f} % of the examples', {row['psnr']:.2f} dB"
          for row in result["components"]["counts"]),
        *(f"{count} components: left out, they need statistics of at least {count + 1} images, not {mean['images']}"
          for count in result["components"]["left_out"]),
        f"images and embedding.json in {out}",
    ]
    return "\n".join(lines)
