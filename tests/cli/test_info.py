"""`finola info`: every figure is counted, the published ones stand beside them."""

import json

import pytest
import torch

from finola import create_model, list_models
from finola.autoregression import Finola
from finola.cli.main import main
from finola.errors import FinolaError
from finola.evaluation.complexity import PAPER, all_rows, model_parts, row
from finola.evaluation.flops import count
from finola.models.mobileformer import CONFIGS

FIELDS = ["name", "params", "macs", "input", "paper_params", "paper_macs"]


@pytest.fixture(scope="module")
def rows():
    return {r.name: r for r in all_rows()}


def test_every_encoder_head_decoder_detection_head_and_model_has_a_row(rows):
    decoders = [f"decoder_s{s}{reading}" for s in (1, 2, 4, 8, 16, 32) for reading in ("", "_published")]
    heads = [f"mf_dec_{depths}_w{width}" for depths in ("522", "211") for width in (720, 1440, 2880)]
    wanted = [*CONFIGS, *(f"{name}+lin" for name in CONFIGS), *decoders, *heads, *list_models()]
    assert set(wanted) <= rows.keys()


def test_every_published_figure_is_shown(rows):
    for name, figures in PAPER.items():
        assert (rows[name].paper_params, rows[name].paper_macs) == figures


def test_encoders_meet_the_published_figures(rows):
    for name in CONFIGS:
        r = rows[name]
        assert r.params == pytest.approx(r.paper_params, rel=0.015), name
        if r.paper_macs:
            assert r.input == "3x800x1333"
            assert r.macs == pytest.approx(r.paper_macs, rel=0.015), name


@pytest.mark.parametrize("width", [720, 1440, 2880])
@pytest.mark.parametrize("head", ["mf_dec_522", "mf_dec_211"])
def test_detection_heads_meet_the_published_figures(head, width):
    r = row(f"{head}_w{width}")
    assert r.input == "3x800x1333"
    assert r.params == pytest.approx(r.paper_params, rel=0.01)
    assert r.macs == pytest.approx(r.paper_macs, rel=0.02)


@pytest.mark.parametrize("width, excess", [(4320, 0.026), (5760, 0.041)])
def test_a_final_map_as_wide_as_the_name_misses_the_published_count(rows, width, excess):
    wide = rows[f"mobileformer_w{width} (out_channels={width})"]
    assert wide.params / wide.paper_params - 1 == pytest.approx(excess, abs=0.001)


@pytest.mark.parametrize("scale", [1, 2, 4, 8, 16, 32])
def test_only_the_matched_decoders_are_near_the_published_counts(rows, scale):
    printed, matched = rows[f"decoder_s{scale}"], rows[f"decoder_s{scale}_published"]
    assert matched.params == pytest.approx(matched.paper_params, rel=0.06)
    assert printed.params > 1.2 * printed.paper_params


def test_the_meta_device_counts_what_a_run_counts():
    name = "finola_mfw720_c768_r8"
    params, macs = count(create_model(name), torch.rand(1, 3, 128, 128))
    r = row(name)
    assert (r.params, r.macs) == (params, macs)
    assert sum(part.params for part in model_parts(name)) == params


def test_the_operator_takes_two_products_a_position_but_the_origin():
    (operator,) = [part for part in model_parts("finola_mfw2880_c3072_r64") if part.name == "autoregression"]
    assert operator.macs == 2 * (64 * 64 - 1) * 3072**2
    with torch.device("meta"):
        assert operator.params == sum(p.numel() for p in Finola(3072, (64, 64)).parameters())


def test_json_is_a_list_of_objects(capsys, rows):
    assert main(["info", "--json"]) == 0
    objects = json.loads(capsys.readouterr().out)
    assert [list(o) for o in objects] == [FIELDS] * len(rows)
    assert objects == [r._asdict() for r in rows.values()]


def test_json_of_one_model_has_its_parts_and_configuration(capsys):
    assert main(["info", "finola_mfw720_c768_r32", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert list(model) == [*FIELDS, "parts", "config"]
    assert [part["name"] for part in model["parts"]] == ["encoder", "pooling", "autoregression", "decoder"]
    assert model["macs"] == sum(part["macs"] for part in model["parts"])
    assert model["config"]["map_size"] == 32


def test_the_table_shows_the_deviation_from_the_paper(capsys):
    assert main(["info", "mobileformer_w2880"]) == 0
    header, line, *_ = capsys.readouterr().out.splitlines()
    r = row("mobileformer_w2880")
    assert header.split()[0] == "name"
    assert f"{r.params / 25.0e6 - 1:+.1%}" in line.split()
    assert f"{r.macs / 77.5e9 - 1:+.1%}" in line.split()


def test_an_unknown_name_gives_near_ones(capsys):
    with pytest.raises(FinolaError, match="did you mean finola_mfw720_c768_r8"):
        row("finola_mfw720_c768_r9")
    assert main(["info", "mobileformer_w2881"]) == 2
    assert "mobileformer_w2880" in capsys.readouterr().err
