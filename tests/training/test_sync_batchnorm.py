"""Batch norm over two real processes equals batch norm in one with all their images."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch import nn

from finola.autoregression import Finola
from finola.training.sync_batchnorm import synchronise_batch_norm

IMAGES, CHANNELS, SIZE = 4, 4, (3, 4)  # two images a process; a line of as many positions as channels, among others


def made() -> tuple[Finola, torch.Tensor, torch.Tensor]:
    """The operator with batch norm, vectors q (IMAGES, CHANNELS) and weights of a loss, in double precision."""
    torch.manual_seed(0)
    finola = Finola(CHANNELS, SIZE, norm="batch", gain=1.0).double()
    return finola, torch.randn(IMAGES, CHANNELS).double(), torch.randn(IMAGES, CHANNELS, *SIZE).double()


def grown(finola: nn.Module, q: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One training step's map, gradients and running statistics, and the map in evaluation afterwards."""
    q = q.clone().requires_grad_()
    z = finola.train()(q)
    (z * weight).sum().backward()
    found = {"map": z, "gradient of q": q.grad, "evaluation": finola.eval()(q)}
    found |= {f"gradient of {name}": p.grad for name, p in finola.named_parameters()}
    found |= {name: buffer.double() for name, buffer in finola.named_buffers()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def one_of_two(rank: int, meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    finola, q, weight = made()
    half = slice(rank * IMAGES // 2, (rank + 1) * IMAGES // 2)
    torch.save(grown(synchronise_batch_norm(finola, torch.device("cpu")), q[half], weight[half]), f"{out}{rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(one_of_two, (str(folder / "meet"), str(folder / "part")), nprocs=2)
    return grown(*made()), [torch.load(folder / f"part{rank}", weights_only=True) for rank in range(2)]


def test_the_maps_and_the_gradients_of_the_vectors(one_and_two):
    one, parts = one_and_two
    for name in ("map", "gradient of q", "evaluation"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), one[name], msg=name)


def test_the_gradients_of_the_matrices(one_and_two):
    """Each process has those of its own images; their sum is the whole gradient (DDP takes the mean)."""
    one, parts = one_and_two
    for name in ("right", "left", "down", "up"):
        torch.testing.assert_close(sum(part[f"gradient of {name}"] for part in parts), one[f"gradient of {name}"])


def test_the_running_statistics(one_and_two):
    one, parts = one_and_two
    names = [name for name in one if name.startswith("norms.")]
    assert len(names) == 12  # mean, variance and count of four directions
    for part in parts:
        for name in names:
            torch.testing.assert_close(part[name], one[name], msg=name)


def test_a_weights_file_has_the_names_it_had():
    names = {name for name, _ in made()[0].named_buffers()}
    assert "norms.right.running_mean" in names and "norms.up.num_batches_tracked" in names
