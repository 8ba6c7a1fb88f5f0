"""Statistics of vectors against float64 references, and the studies of the embedding space."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from finola.analysis import embedding
from finola.analysis.statistics import (
    Statistics,
    embedding_statistics,
    load_statistics,
    principal_components,
    save_statistics,
)
from finola.cli import main as cli
from finola.errors import DataError, FinolaError
from finola.weights import save_weights

DIM = 6


def vectors(count, dim=DIM, seed=0):
    """Correlated vectors, far from zero."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(count, dim)) @ rng.normal(size=(dim, dim)) + 1e4)


def statistics_of(q, sizes):
    statistics = Statistics(q.shape[1])
    for part in q.split(sizes):
        statistics.add(part)
    return statistics


@pytest.fixture(scope="module")
def space(model):
    x = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    statistics = embedding_statistics(model, [{"image": part} for part in x.split(7)])
    return embedding.embedding_space(model, statistics, list("abcdefgh"), x[:8])


# --- statistics --------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 30), max_size=5), seed=st.integers(0, 100))
def test_statistics_are_numpys_however_the_vectors_are_split(cuts, seed):
    q = vectors(30, seed=seed)
    ends = [0, *sorted(cuts), 30]
    statistics = statistics_of(q, [b - a for a, b in zip(ends, ends[1:], strict=False)])
    covariance = np.cov(q.numpy(), rowvar=False)
    assert statistics.count == 30
    np.testing.assert_allclose(statistics.mean, q.numpy().mean(0), rtol=1e-14)
    np.testing.assert_allclose(statistics.covariance(), covariance, atol=1e-10 * np.abs(covariance).max())


@settings(max_examples=30)
@given(cut=st.integers(0, 30))
def test_merged_statistics_are_those_of_all_vectors(cut):
    q = vectors(30)
    merged, rest = statistics_of(q[:cut], 4), statistics_of(q[cut:], 5)
    merged.merge(rest)
    whole = statistics_of(q, 30)
    assert merged.count == whole.count
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(merged.scatter, whole.scatter, rtol=0, atol=1e-9 * whole.scatter.abs().max().item())


def test_single_precision_vectors_are_summed_in_double():
    q = (vectors(1000) + 1e6).float()
    np.testing.assert_allclose(statistics_of(q, 10).covariance(), np.cov(q.double().numpy(), rowvar=False), rtol=1e-6)


def test_components_are_orthonormal_and_diagonalise_the_covariance():
    statistics = statistics_of(vectors(50), 50)
    variances, v = components = principal_components(statistics)
    assert (variances.diff() <= 0).all() and variances.min() >= 0
    torch.testing.assert_close(v.T @ v, torch.eye(DIM).double())
    torch.testing.assert_close(v * variances @ v.T, statistics.covariance())
    assert components.explained(DIM) == pytest.approx(1)
    assert components.explained(2) == pytest.approx((variances[:2].sum() / statistics.covariance().trace()).item())


def test_few_vectors_have_components_of_zero_variance():
    variances, _ = principal_components(statistics_of(vectors(3), 3))
    assert (variances[:2] > 0).all() and variances[2:].max() < 1e-6 * variances[0]


def test_of_a_model_they_do_not_depend_on_the_batch_size(model):
    x = torch.rand(9, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    one, other = (embedding_statistics(model, [{"image": part} for part in x.split(size)]) for size in (2, 9))
    with torch.no_grad():
        q = model.encode(x).double().numpy()
    assert one.count == other.count == 9
    for statistics in (one, other):
        np.testing.assert_allclose(statistics.mean, q.mean(0), atol=1e-6)
        np.testing.assert_allclose(statistics.covariance(), np.cov(q, rowvar=False), atol=1e-6)


def test_saved_statistics_come_back_bit_for_bit(tmp_path):
    statistics = statistics_of(vectors(10), 10)
    save_statistics(statistics, tmp_path / "s.safetensors", "abc", {"data": "somewhere"})
    loaded, metadata = load_statistics(tmp_path / "s.safetensors", "abc", DIM)
    assert loaded.count == 10 and metadata["data"] == "somewhere"
    assert torch.equal(loaded.mean, statistics.mean) and torch.equal(loaded.scatter, statistics.scatter)


@pytest.mark.parametrize(("q", "error", "message"), [
    (torch.zeros(3, DIM + 1), FinolaError, r"got shape \(3, 7\), expected \(B, 6\)"),
    (torch.zeros(DIM), FinolaError, r"got shape \(6,\)"),
    (torch.full((2, DIM), torch.nan), DataError, "not finite"),
])  # fmt: skip
def test_wrong_vectors_are_refused_and_change_nothing(q, error, message):
    statistics = statistics_of(vectors(4), 4)
    before = statistics.scatter.clone()
    with pytest.raises(error, match=message):
        statistics.add(q)
    assert statistics.count == 4 and torch.equal(statistics.scatter, before)


def test_too_few_or_equal_vectors_have_no_components():
    with pytest.raises(DataError, match="got 1 images, expected at least 2"):
        statistics_of(vectors(1), 1).covariance()
    with pytest.raises(DataError, match="all have the same vector"):
        principal_components(statistics_of(torch.ones(5, DIM), 2))
    with pytest.raises(FinolaError, match="vectors of 5 numbers, expected 6"):
        Statistics(6).merge(Statistics(5))


# --- vectors -----------------------------------------------------------------------------------------------


def test_the_mirror_undoes_itself_and_the_printed_one_does_not():
    q, mean = vectors(4), vectors(20).mean(0)
    assert torch.equal(embedding.mirror(embedding.mirror(q, mean), mean), q)
    assert not torch.allclose(embedding.mirror_as_printed(embedding.mirror_as_printed(q, mean), mean), q, rtol=1e-6)
    torch.testing.assert_close((embedding.mirror(q, mean) + q) / 2, mean.expand_as(q))


def test_the_mirrors_lie_on_the_line_of_the_fade():
    q, mean = vectors(4), vectors(20).mean(0)
    for share, expected in ((1, q), (0, mean.expand_as(q)), (-1, embedding.mirror(q, mean)),
                            (2, embedding.mirror_as_printed(q, mean))):  # fmt: skip
        torch.testing.assert_close(embedding.along_line(q, mean, share), expected)


def test_all_components_give_q_back_and_fewer_the_nearest_point():
    q, statistics = vectors(50), statistics_of(vectors(50), 50)
    components = principal_components(statistics)
    torch.testing.assert_close(embedding.project(q, statistics.mean, components, DIM), q)
    lost = []
    for count in range(1, DIM):
        near = embedding.project(q, statistics.mean, components, count)
        torch.testing.assert_close(embedding.project(near, statistics.mean, components, count), near)
        lost.append((q - near).square().sum().item())
        left = components.variances[count:].sum().item() * 49  # what the other components hold of the 50 vectors
        assert lost[-1] == pytest.approx(left, rel=1e-6, abs=1e-6)
    assert lost == sorted(lost, reverse=True)


def test_samples_have_the_mean_and_covariance_they_are_drawn_from():
    count, statistics = 20_000, statistics_of(vectors(50), 50)
    components = principal_components(statistics)
    q = embedding.sample(statistics.mean, components, count, seed=0)
    error = (q.mean(0) - statistics.mean) / (statistics.covariance().diagonal() / count).sqrt()
    assert error.abs().max() < 5  # standard errors
    assert (q.T.cov() - statistics.covariance()).norm() < 0.05 * statistics.covariance().norm()


def test_samples_hang_on_the_seed_and_not_on_the_signs_of_components():
    statistics = statistics_of(vectors(50), 50)
    components = principal_components(statistics)
    turned = components._replace(vectors=components.vectors * torch.tensor([1, -1, 1, -1, -1, 1]))
    q = embedding.sample(statistics.mean, components, 3, seed=0)
    torch.testing.assert_close(embedding.sample(statistics.mean, turned, 3, seed=0), q)
    assert not torch.allclose(embedding.sample(statistics.mean, components, 3, seed=1), q, rtol=1e-6)


# --- measures of images ----------------------------------------------------------------------------------


def test_grayness_of_known_pictures():
    assert embedding.grayness(torch.full((3, 4, 4), 0.5)) == {"channels": 0, "pixels": 0}
    red = torch.zeros(3, 4, 4)
    red[0] = 0.3
    assert embedding.grayness(red) == {"channels": pytest.approx(255 * 0.4 / 3), "pixels": pytest.approx(0, abs=1e-5)}
    stripes = torch.tensor([0.0, 1.0]).repeat(3, 4, 2)
    assert embedding.grayness(stripes) == {"channels": 0, "pixels": 127.5}


def test_reversed_colours_correlate_by_minus_one():
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert embedding.colour_correlation(x, 1 - x) == {"values": pytest.approx(-1), "hues": pytest.approx(-1)}
    assert embedding.colour_correlation(x, 0.5 * x + 0.2) == {"values": pytest.approx(1), "hues": pytest.approx(1)}
    lit = x + torch.linspace(0, 50, 8)  # the same hues in another light
    correlation = embedding.colour_correlation(x, lit)
    assert correlation["hues"] == pytest.approx(1, abs=1e-4) and abs(correlation["values"]) < 0.5


def test_roughness_is_the_difference_of_neighbours():
    checkers = (torch.arange(4)[:, None] + torch.arange(4)) % 2
    assert embedding.roughness(checkers.expand(1, 3, 4, 4).float()) == 255
    assert embedding.roughness(torch.full((1, 3, 4, 4), 0.7)) == 0


# --- studies -----------------------------------------------------------------------------------------------


def test_every_study_gives_a_picture_and_numbers_that_json_takes(space):
    studies = {
        "mean": embedding.study_mean(space), "fade": embedding.study_fade(space),
        "mirror": embedding.study_mirror(space), "samples": embedding.study_samples(space, seed=0),
        "mixtures": embedding.study_mixtures(space), "components": embedding.study_components(space, [1, 4, 16]),
    }  # fmt: skip
    for name, (numbers, picture) in studies.items():
        assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers, name
        assert picture.mode == "RGB" and picture.getextrema() != ((255, 255),) * 3


def test_the_ends_of_the_studies_are_the_reconstructions(space):
    with torch.no_grad():
        x_hat = space.model(space.x).clamp(0, 1)
    torch.testing.assert_close(space.x_hat, x_hat, rtol=0, atol=1e-5)
    fade, mixed = embedding.study_fade(space).numbers["steps"], embedding.study_mixtures(space).numbers
    assert fade[0]["correlation_with_reconstruction"]["values"] == pytest.approx(1)
    assert [step["share"] for step in fade] == list(embedding.FADE) and fade[-1]["distance_from_mean_picture"] == 0
    assert mixed["pairs"] == 7
    assert all(mixed["shares"][end]["psnr_to_mixed_reconstructions"] > 80 for end in (0, -1))
    counts = embedding.study_components(space, [16]).numbers["counts"]
    psnr = -10 * (x_hat - space.x).square().flatten(1).mean(1).log10().mean().item()
    assert counts[0]["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert counts[0]["explained_variance"] == counts[0]["explained_of_examples"] == pytest.approx(1)


def test_default_numbers_of_components_are_the_papers():
    assert embedding.default_counts(3072) == [192, 384, 768, 1536, 3072]
    assert embedding.default_counts(8) == [1, 2, 4, 8]


# --- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(root / f"{i:02}.png")
    return root


def test_the_command_writes_all_and_takes_its_statistics_again(model, folder, tmp_path, capsys):
    weights = save_weights(model, tmp_path / "tiny.safetensors")
    options = ["inspect", "embedding", "--images", str(folder), "--weights", str(weights), "--workers", "0", "--json",
               "--examples", "3", "--components", "2", "16"]  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main([*options, "--data", str(folder), "--batch-size", "8", "--out", str(first)]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = ("mean", "fade", "mirror", "samples", "mixtures", "components")
    assert {path.name for path in first.iterdir()} == {
        "embedding.json", "statistics.safetensors", *(f"{name}.png" for name in names)}  # fmt: skip
    assert printed == json.loads((first / "embedding.json").read_text()) and set(names) < set(printed)
    assert printed["examples"] == ["00", "06", "13"] and printed["mean"]["images"] == 20
    statistics = str(first / "statistics.safetensors")
    assert cli.main([*options, "--statistics", statistics, "--out", str(second)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert all(again[name] == printed[name] for name in (*names, "statistics", "sha256"))


def test_the_curvature_command_lays_models_over_one_another(model, folder, tmp_path, capsys):
    weights = str(save_weights(model, tmp_path / "tiny" / "weights.safetensors"))
    options = ["--data", str(folder), "--limit", "4", "--workers", "0", "--top", "5", "--out", str(tmp_path / "out")]
    assert cli.main(["inspect", "curvature", "--weights", weights, weights, *options, "--interior"]) == 0
    assert "FINOLA, tiny (2), map 16 x 8 x 8" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "curvature.json").read_text())
    assert (result["images"], result["positions"], len(result["models"])) == (4, "interior", 2)
    one, other = result["models"]
    assert [row["rank"] for row in one["raw"]] == [1, 2, 4] and one["raw"] == other["raw"]
    assert one["map"] == {"shape": [16, 8, 8], "grown_from": "q", "block_corner": None}
    assert math.isfinite(one["raw"][0]["median"]) and (tmp_path / "out" / "curvature.png").exists()
