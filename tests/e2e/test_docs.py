"""Every command that README and docs/ show is run, page by page, in order, in a folder with what they name."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec

import pytest
from coco_data import make_coco
from hub_server import Hub
from pages import PAGES, ROOT, SHELL, blocks, in_clone, shell_lines
from pictures import photo
from terminal import Terminal
from training import make_images

from finola.codec import calibration_path
from finola.registry import DEFAULT_MODEL, pretrained_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not in_clone, reason="runs in a clone, which has README and docs"),
    pytest.mark.skipif(not all(map(find_spec, ("lightning", "scipy", "faster_coco_eval", "constriction", "diffusers"))),
                       reason="needs the extras 'train', 'detection', 'codec' and 'first-stages'"),
]

# Commands are run as they are shown, with these words behind those that begin so: few images, an epoch, small models.
STEPS = ("--optim.epochs 1 --optim.warmup_epochs 0 --optim.batch_size 4 --data.num_workers 0 --trainer.accelerator cpu "
         "--trainer.precision 32-true ")
SHORTER = {
    **dict.fromkeys(("finola train", "finola probe", "finola finetune", "finola detect train"), STEPS),
    "finola detect train coco/": "--model.encoder mobileformer_w720 --model.max_size 96 --data.image_size 64 "
                                 "--data.scales null --optim.milestones null ",
    "finola reproduce norm+linear": STEPS + "--rows autoregression_repeat_16",
    "finola reproduce resolution": STEPS + "--rows resolution_8",
    "finola rd": "--limit 1 --codecs finola-paper jpeg",
    "finola eval finola_mfw720_c768_r8 --first-stage": "--limit 1 --size 128",
}
NOT_RUN = {  # beginnings of commands, and why
    "finola rd kodak --out rd --literature": "wants Kodak's 24 images, whole: tests/codec/test_rd.py does it",
    "finola playground": "serves until it is ended: tests/cli/test_playground.py",
    "finola pack": "its images are named by the reader (CONTRIBUTING.md)",
}
VAE = {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
       "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1, "norm_num_groups": 4}


@pytest.fixture(scope="module")
def furniture(tmp_path_factory):
    """A folder with all that the pages name, made anew and small. Weights are the shipped ones under other names."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("furniture")
    for name in ("photo.jpg", "a.jpg", "b.png"):
        photo(200, 150).save(folder / name)
    for name in ("kodak", "photos", "holidays", "imagenet1k-sample"):
        (folder / name).mkdir()
        for seed in range(2):
            photo(160, 144, seed).save(folder / name / f"{seed}.png")
    for name in ("", "imagenette", "imagenet", "mine"):
        make_images(folder / name)
    for name, split in (("coco128", "train2017"), ("COCO", "train2017"), ("COCO", "val2017")):
        make_coco(folder / name, split)
    for name in ("a", "b", "runs/mine/weights", "runs/imagenet/masked_b_w2880/weights"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pretrained_path(DEFAULT_MODEL), folder / f"{name}.safetensors")
    tables = calibration_path(pretrained_path(DEFAULT_MODEL))
    shutil.copy(tables, calibration_path(folder / "runs/mine/weights.safetensors"))
    for name in ("sd-vae", "sdxl-vae"):
        AutoencoderKL(**VAE).save_pretrained(folder / name)
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


@pytest.fixture(scope="module")
def terminal(furniture, tmp_path_factory) -> Iterator[Terminal]:
    """With a Hub on a loopback address, where owner/name is the model of runs/mine, and v1 a tag of it."""
    home = str(tmp_path_factory.mktemp("hf"))
    with Hub() as hub, closing(Terminal(HF_ENDPOINT=hub.url, HF_HOME=home, OMP_NUM_THREADS="1")) as terminal:
        assert terminal("push", furniture / "runs/mine/weights.safetensors", "owner/name", "--private")[0] == 0
        refs = hub.repositories["owner/name"].refs
        refs["v1"] = refs["main"]
        yield terminal


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, *SHELL)], ids=lambda page: page.name)
def test_commands_run(page, furniture, terminal, tmp_path):
    folder = shutil.copytree(furniture, tmp_path / "reader")
    terminal.python(f"os.chdir({str(folder)!r})")
    for language, text in blocks(page, *SHELL, "python"):
        if language == "python" and "hf-hub:" in text:
            terminal.python(text)
        for line, shown in shell_lines(text, language) if language in SHELL else ():
            if line.startswith("finola ") and not any(line.startswith(begin) for begin in NOT_RUN):
                more = "".join(words for begin, words in SHORTER.items() if line.startswith(begin))
                code, printed, errors = terminal(*shlex.split(f"{line} {more}")[1:])
                assert code == 0, f"{line}: {errors}"
                assert not shown or form(printed.splitlines()) == form(shown)


def form(lines: list[str]) -> list[str]:
    """Lines as far as they must agree: not in their numbers."""
    return [re.sub(r"[\d.]+", "0", re.sub(r"\s+", " ", line)) for line in lines]
