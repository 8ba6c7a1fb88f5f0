"""A law fitted to maps: exact where it holds, nothing where there is none."""

import json
import shutil

import pytest
import torch
from laws import random_law

from finola.analysis.law import LeastSquares, Scores, as_record, measure_law, plot_law, shuffled, steps
from finola.autoregression import autoregress
from finola.cli.main import main
from finola.errors import DataError, FinolaError


def lawful(batch, size, seed=0):
    """Maps of one path, which obey one law exactly: along y everywhere, along x in the origin's row."""
    q, matrices = random_law(6, batch=batch, gain=0.3)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 6, generator=generator, dtype=torch.float64)
    return autoregress(q, size, **matrices, path="row_first"), matrices


def test_steps_lead_from_a_position_to_its_neighbour():
    z = torch.arange(12.0).view(1, 1, 3, 4)
    for direction, step in {"right": 1, "left": -1, "down": 4, "up": -4}.items():
        rows, found = steps(z, direction)
        assert (found == step).all() and len(rows) == (9 if abs(step) == 1 else 8)


def test_a_law_that_holds_is_found():
    """Where down alone is used, in maps grown downwards from the top row."""
    z, matrices = lawful(40, (6, 1))
    z = torch.cat([z, z], 3)  # two columns, so that there are steps along x: of no length
    fit = LeastSquares()
    for part in z.split(7):
        fit.add(part)
    fitted = fit.solve()
    torch.testing.assert_close(fitted.mean, z.mean((0, 2, 3)))
    lower = z[:, :, 3:]  # below the origin, where the steps are those of the matrix "down"
    fit = LeastSquares()
    fit.add(lower)
    down = fit.solve().matrices["norm+linear"]["down"]
    rows, step = steps(lower, "down")
    found = torch.nn.functional.layer_norm(rows, [6]) @ down.T
    assert (found - step).norm() < 1e-4 * step.norm()
    n = torch.nn.functional.layer_norm(torch.randn(50, 6, dtype=torch.float64), [6])
    assert (n @ (down - matrices["down"]).T).norm() < 1e-2 * (n @ matrices["down"].T).norm()


def test_of_maps_that_have_no_law_the_way_back_to_the_mean_is_explained():
    noise = torch.randn(400, 5, 4, 4, generator=torch.Generator().manual_seed(0)) + 3
    scores = measure_law({"noise": lambda x: x}, noise[:300].split(50), [noise[300:]])["noise"]
    assert scores["maps"].explained()["affine"] == pytest.approx(0.5, abs=0.03)
    assert scores["maps"].explained()["norm+linear"] == pytest.approx(
        scores["shuffled"].explained()["norm+linear"], abs=0.03)
    by_distance = scores["maps"].by_distance()
    assert by_distance["grown"][0] == by_distance["standing"][0] == pytest.approx(1)
    assert by_distance["standing"][3] == pytest.approx(-1, abs=0.3)  # twice the spread
    assert all(abs(value) < 0.3 or value < 0 for value in by_distance["grown"][1:])


def test_channels_that_nearly_depend_on_each_other():
    """A large offset and a few large variances, as a trained encoder's maps have them: the fit is not noise."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(40, 4, 8, 8, generator=generator, dtype=torch.float64)
    z = 3 + torch.einsum("bkhw,kc->bchw", few, torch.randn(4, 96, generator=generator, dtype=torch.float64))
    z = z + 1e-3 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    found = {}
    for dtype in (torch.float32, torch.float64):
        fit = LeastSquares()
        fit.add(z.to(dtype))
        scores = Scores(fit.solve())
        scores.add(z.to(dtype))
        found[dtype] = scores.explained()
    assert found[torch.float32] == pytest.approx(found[torch.float64], abs=1e-3)
    assert 0.4 < found[torch.float64]["norm+linear"] < 0.6  # steps between unrelated positions


def test_a_grown_map_is_its_own_growth():
    z, _ = lawful(60, (5, 5))
    scores = measure_law({"law": lambda x: z[x.long()]}, [torch.arange(40)], [torch.arange(40, 60)])["law"]
    assert scores["maps"].explained()["norm+linear"] > scores["shuffled"].explained()["norm+linear"] + 0.2
    assert plot_law(as_record({"law": scores})).width > 500


def test_positions_are_shuffled_within_an_image():
    z = torch.arange(2 * 3 * 12.0).view(2, 3, 3, 4)
    mixed = shuffled(z)
    assert not torch.equal(mixed, z) and not torch.equal(mixed[0], mixed[1] - 36)
    assert torch.equal(mixed.flatten(2).sort(2).values, z.flatten(2))
    assert torch.equal(mixed[:, 1], mixed[:, 0] + 12)  # a position's channels stay together


def test_what_cannot_be_measured():
    with pytest.raises(DataError, match="no maps"):
        LeastSquares().solve()
    with pytest.raises(DataError, match="not finite"):
        LeastSquares().add(torch.full((1, 2, 3, 3), float("nan")))
    with pytest.raises(FinolaError, match="H and W of at least 2"):
        LeastSquares().add(torch.zeros(1, 2, 1, 3))
    fit = LeastSquares()
    fit.add(torch.ones(2, 3, 4, 4))
    scores = Scores(fit.solve())
    scores.add(torch.ones(2, 3, 4, 4))
    assert scores.explained() == {"norm+linear": None, "affine": None}


def test_the_command_measures_a_model(images, weights, tmp_path, capsys):
    out = tmp_path / "law"
    words = ["inspect", "law", "--weights", str(weights), "--data", str(images / "train"), "--val", str(images / "val"),
             "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    result = json.loads((out / "law.json").read_text())
    names = [row["name"] for row in result["maps"]]
    assert any(name.startswith("grown by") for name in names) and "patches of pixels" in names
    assert all(name in printed for name in names) and (out / "law.png").stat().st_size > 10_000
    for row in result["maps"]:
        assert row["maps"]["by_distance"]["grown"][0] == pytest.approx(1)


def test_the_command_measures_runs_of_one_file_name(images, weights, tmp_path, capsys):
    """Every run's file is called weights.safetensors."""
    runs = [tmp_path / name / "weights.safetensors" for name in ("a", "b")]
    for run in runs:
        run.parent.mkdir()
        shutil.copyfile(weights, run)
    words = ["inspect", "law", "--weights", *map(str, runs), "--data", str(images / "train"),
             "--val", str(images / "val"), "--out", str(tmp_path / "law")]
    assert main(words) == 0
    names = [row["name"] for row in json.loads((tmp_path / "law/law.json").read_text())["maps"]]
    assert {"encoder of a", "encoder of b", "grown by a", "grown by b"} <= set(names)
    assert "encoder of a" in capsys.readouterr().out
