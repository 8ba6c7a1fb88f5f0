"""The notebook in examples/ runs from its first cell to its last, and is fit to be shown as it is."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_the_notebook_is_small_and_names_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) <= 300_000
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert len(outputs) >= 7 and not any(output["output_type"] == "error" for output in outputs)
    words = [word for output in outputs for word in output.get("text", output.get("data", {}).get("text/plain", []))]
    assert not re.search(r"/(home|root|tmp|work|Users)/|site-packages", "".join(words))


@pytest.mark.slow
def test_the_notebook_runs_and_shows_as_much_as_is_committed(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'dev'")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'dev'")
    pytest.importorskip("constriction")
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbclient.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=120, kernel_name="python3",
                                  resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(run.cells, shown.cells, strict=True):
        kinds = [[output.output_type for output in one.get("outputs", []) if output.get("name") != "stderr"]
                 for one in (cell, before)]
        assert kinds[0] == kinds[1], cell.source
