"""Is everything here that finola needs? The checks of `finola doctor`."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from finola.data.workers import usable_cores

MALICIOUS = {"lightning": ("2.6.2", "2.6.3")}  # releases withdrawn for a supply-chain attack, GHSA-w37p-236h-pfx3
CODECS = {"JPEG": "jpg", "PNG": "zlib", "WebP": "webp", "AVIF": "avif", "JPEG 2000": "jpg_2000"}
REQUIRED_CODECS = ("JPEG", "PNG")
TOLERANCE = 1e-10  # of the operator against the literal recursion, float64
ROUNDING = 1e-5  # of a model against its copy, float32: some matrix products round as their weights lie in memory


class Check(NamedTuple):
    """One finding. `ok`: nothing to do, or nothing that finola cannot do without; `detail` says what was found, or
    what is wrong and what helps."""

    group: str
    name: str
    ok: bool
    detail: str


def checks() -> Iterator[Check]:
    """Everything `finola doctor` looks at, in order. What needs torch is left out where torch is missing."""
    yield from check_packages()
    if importlib.util.find_spec("torch") is None:
        return
    yield from check_devices()
    yield from check_codecs()
    yield from check_weights()
    yield from check_operator()


def check_packages() -> Iterator[Check]:
    """The installed version of each requirement in finola's own metadata, with the extras for users."""
    yield Check("package", "python", True, platform.python_version())
    requirements = {r.name: r for r in reversed([Requirement(line) for line in requires("finola") or []])}
    for requirement in reversed(requirements.values()):  # the first, where several extras ask for the same
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        if extra is None or extra[1] not in ("dev", "docs"):
            yield check_package(requirement, extra[1] if extra else None)


def check_package(requirement: Requirement, extra: str | None) -> Check:
    """A missing package is a fault only where no extra asks for it; a wrong version is one everywhere."""
    name = requirement.name
    install = f"pip install '{f'finola[{extra}]' if extra else str(requirement)}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check("package", name, extra is not None, f"not installed; {install}")
    if found in MALICIOUS.get(name, ()):
        return Check("package", name, False, f"{found} is known malware; uninstall it, change the passwords and "
                     f"keys this machine holds, then {install}")
    if not requirement.specifier.contains(found, prereleases=True):
        return Check("package", name, False, f"got {found}, expected {requirement.specifier}; {install}")
    return Check("package", name, True, found)


def check_devices() -> Iterator[Check]:
    import torch

    from finola.inference.precision import has_bf16_units

    bf16 = "bf16 units" if has_bf16_units() else "no bf16 units found"
    yield Check("device", "cpu", True, f"{usable_cores()} cores, {torch.get_num_threads()} threads, {bf16}")
    if not torch.cuda.is_available():
        yield Check("device", "cuda", True, "none; training at the paper's size needs one")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        bf16 = "bf16" if device.major >= 8 else "no bf16 units; train with --trainer.precision 32-true"
        yield Check("device", f"cuda:{index}", True, f"{device.name}, {memory}, {bf16}")


def check_codecs() -> Iterator[Check]:
    from PIL import features

    for name, feature in CODECS.items():
        present = features.check(feature)
        advice = "" if present else "; reinstall Pillow from its wheel: pip install --force-reinstall pillow"
        yield Check("codec", name, bool(present) or name not in REQUIRED_CODECS,
                    ("yes" if present else "not in this Pillow") + advice)


def check_weights() -> Iterator[Check]:
    """The shipped weights against the hashes in their model cards."""
    from finola.registry import list_models, pretrained_path

    names = list_models(pretrained=True)
    if not names:
        yield Check("weights", "shipped", True, "none in this installation")
    for name in names:
        yield check_weights_file(name, pretrained_path(name))


def check_weights_file(name: str, path: Path) -> Check:
    from finola.weights import weights_hash

    card = path.with_suffix(".json")
    if not card.exists():
        return Check("weights", name, True, "present; no model card to check it against")
    try:
        expected = json.loads(card.read_text(encoding="utf-8"))["sha256"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        return Check("weights", name, False, f"{card.name} has no readable field sha256 ({error}); reinstall finola")
    found = weights_hash(path)
    if found != expected:
        return Check("weights", name, False, f"SHA-256 {found}, expected {expected}; reinstall finola")
    return Check("weights", name, True, f"SHA-256 {found[:12]}... as in its card")


def check_operator() -> Iterator[Check]:
    """The fast operator against the recursion as the paper states it, and a tiny model through a weights file."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        error = operator_error()
        yield Check("self-test", "operator", error < TOLERANCE, f"differs from the literal recursion by {error:.1e}")
        same = _survives_a_file()
        yield Check("self-test", "model", same, "a tiny model read back from a file reconstructs "
                    + ("the same image" if same else "another image"))


def operator_error() -> float:
    """The largest difference of the operator from the literal recursion on a small map."""
    import torch

    from finola.autoregression import EPS, autoregress, autoregress_literal
    from finola.kernels.grid import DIRECTIONS, resolve_origin

    size, channels = (4, 5), 6
    q = torch.randn(2, channels, dtype=torch.float64)
    weights = {direction: torch.randn(channels, channels, dtype=torch.float64) for direction in DIRECTIONS}
    expected = autoregress_literal(q, size, weights, resolve_origin("center", size))
    found = autoregress(q, size, **weights, origin="center", path="average", norm="layer", eps=EPS,
                        implementation="auto")
    return (found - expected).abs().max().item()


def _survives_a_file() -> bool:
    import torch

    from finola.models.autoencoder import AutoencoderConfig, FinolaAutoencoder
    from finola.weights import load_weights, save_weights

    config = AutoencoderConfig("mobileformer_w720", embed_dim=8, image_size=32, map_size=16, decoder_widths=(8, 8))
    model, x = FinolaAutoencoder(config).eval(), torch.rand(1, 3, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        copy = load_weights(save_weights(model, Path(folder) / "tiny.safetensors")).eval()
    return torch.allclose(copy(x), model(x), rtol=0, atol=ROUNDING)
