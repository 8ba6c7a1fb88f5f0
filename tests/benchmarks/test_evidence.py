"""The script of the evidence: its commands are ours, and the page says what was kept."""

import argparse
import json
import shlex

import pytest
import selfsupervised
import yaml
from scripts import load_script

import finola.photographs
from finola.cli.main import build_parser
from finola.training.tables import find_table

evidence = load_script("evidence")
CLAIMS = yaml.safe_load((evidence.ROOT / "benchmarks/evidence.yaml").read_text())
PHOTOGRAPHS = next(iter(finola.photographs.__path__))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["claim"])
def test_a_claim_s_commands_are_ours(claim):
    for step in claim["runs"]:
        program, *words = shlex.split(step["command"].format(**evidence.PLACES))
        if program == "finola":
            args, _ = build_parser().parse_known_args(words)
            if args.command == "reproduce":
                assert set(args.rows or ()) <= {row.name for row in find_table(args.table).rows}
        else:
            assert program == "python" and (evidence.ROOT / words[0]).exists()
        if "--methods" in words:
            assert set(words[words.index("--methods") + 1:]) <= set(selfsupervised.METHODS)
        assert all(source.startswith("{out}/") for source in step["keep"].values())
    for name, source in claim.get("plots", {}).items():
        assert name in evidence.PLOTS and any(source in step["keep"] for step in claim["runs"])


def test_the_page_is_what_the_script_writes():
    assert (evidence.ROOT / "docs/evidence.md").read_text() == evidence.page(CLAIMS)


def test_a_claim_is_run_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "kept")
    command = "finola inspect law --data {data} --val {val} --limit 2 --out {out}/law"
    step = {"command": command, "keep": {"law.json": "{out}/law/law.json", "law.png": "{out}/law/law.png"}}
    claim = {"claim": "law", "title": "The law", "tables": "the title", "paper": "It holds.", "setting": "Two images.",
             "runs": [step], "verdict": "appears", "why": "It does."}
    assert "Not run yet." in evidence.page([claim])
    args = argparse.Namespace(data=PHOTOGRAPHS, val=PHOTOGRAPHS, coco=None, out=tmp_path)
    assert evidence.run(claim, args)
    assert json.loads((tmp_path / "kept" / "law.json").read_text())["data"] == ["TRAIN"]
    page = evidence.page([claim])
    assert "| patches of pixels | " in page and "2 images fitted, 2 judged" in page
    assert "![law](../results/evidence/law.png)" in page and "**Verdict: appears.** It does." in page
    failing = {**claim, "runs": [{**step, "command": "finola inspect law --data {out}/none --val {val} --out {out}/a"}]}
    assert not evidence.run(failing, args)


def test_a_pattern_names_files(tmp_path):
    for seed in (1, 0):
        (tmp_path / f"seed{seed}.json").touch()
    assert evidence.expand(f"{tmp_path}/seed*.json") == [f"{tmp_path}/seed0.json", f"{tmp_path}/seed1.json"]
    assert evidence.expand(f"{tmp_path}/none*") == [f"{tmp_path}/none*"]  # the command says what is missing
    assert evidence.expand("--limit") == ["--limit"]


def test_a_verdict_is_one_of_four():
    with pytest.raises(SystemExit, match="verdict 'perhaps', expected one of appears"):
        evidence.section({**CLAIMS[0], "verdict": "perhaps"})


def test_plots_show_the_paper_and_ours_by_the_size_of_each(monkeypatch):
    drawn = []
    monkeypatch.setattr(evidence, "finished", lambda figure: drawn.append(figure.axes[0].get_lines()))
    rows = [{"name": f"channels_{n}", "scaled_to": f"64 px, map 8x8, {n // 16} channels", "paper": {"psnr": paper},
             "ours": {"psnr": {"mean": ours}}} for n, paper, ours in ((4096, 25.9, 17.0), (64, 18.2, 12.0))]
    evidence.plot_channels({"rows": rows})
    paper, ours = drawn[0]
    assert paper.get_xydata().tolist() == [[64, 18.2], [4096, 25.9]]
    assert ours.get_xydata().tolist() == [[4, 12.0], [256, 17.0]]


def test_plots_of_lengths_join_the_schedules_of_a_method(monkeypatch):
    drawn = []
    monkeypatch.setattr(evidence, "finished", lambda figure: drawn.append(figure.axes[0].get_lines()))
    scores = {"untrained encoder": [30.0], "FINOLA": [40.0, 42.0], "masked FINOLA-E": [39.0], "masked FINOLA-B": [38.0],
              "masked FINOLA-B, three times the epochs": [45.0], "masked FINOLA-B, a third of the epochs": []}
    evidence.plot_lengths({"epochs": 10, "methods": [{"name": n, "scores": {"lin": v}} for n, v in scores.items()]})
    finola, _, b, untrained = drawn[0]
    assert finola.get_xydata().tolist() == [[10, 41.0]] and b.get_xydata().tolist() == [[10, 38.0], [30, 45.0]]
    assert set(untrained.get_ydata()) == {30.0}
