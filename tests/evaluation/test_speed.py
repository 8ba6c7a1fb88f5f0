"""How the operator and the product it is compared with are timed; CUDA's part with a stand-in for CUDA."""

import time
from contextlib import nullcontext

import pytest
import torch

from finola.evaluation import speed
from finola.evaluation.speed import bench_operator, stopwatch


class FakeCuda:
    """What `speed` asks of torch.cuda, on the host's clock; replaying a graph does nothing."""

    def __init__(self, captures: bool):
        self.captures, self.capturing = captures, None

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1000 * (end.time - self.time)

    class Stream:
        def wait_stream(self, other):
            pass

    class CUDAGraph:
        replays = 0

        def replay(self):
            self.replays += 1

    def graph(self, graph, stream):
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return nullcontext()

    def current_stream(self):
        return self.Stream()

    def stream(self, stream):
        return nullcontext()

    def synchronize(self):
        pass


@pytest.fixture(params=[True, False])
def cuda(request, monkeypatch):
    fake = FakeCuda(request.param)
    for name in ("Event", "Stream", "CUDAGraph", "graph", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_a_cpu_is_timed_by_the_clock():
    calls = []
    watch = stopwatch(lambda: (calls.append(1), time.sleep(0.01)), "cpu", times=4)
    assert watch.method == "clock" and not calls
    assert 0.01 <= watch.seconds() < 0.1 and len(calls) == 4


def test_cuda_is_timed_by_events_round_a_graph_or_the_calls(cuda):
    calls = []
    watch = stopwatch(lambda: (calls.append(1), time.sleep(0.002)), "cuda", times=4)
    assert watch.method == ("graph" if cuda.captures else "events")
    before = len(calls)
    taken = watch.seconds()
    if cuda.captures:
        assert len(calls) == before  # replayed, not launched
    else:
        assert len(calls) - before == 4 * speed.REPLAYS and 0.002 <= taken < 0.02


def test_the_benchmark_says_how_it_timed():
    result = bench_operator(2, 16, 4, "fp32", compare=False, repeats=2)
    assert result.timed_by == ("clock",) * 3
    assert result.forward_launched is None and result.forward_backward_launched is None
    assert result.forward > 0 and result.forward_of_product > 0


def test_the_benchmark_adds_launched_times_where_graphs_are_timed(monkeypatch):
    watched = []

    def graphs(function, device, times=1):
        watched.append(times)
        return speed.Stopwatch("graph", lambda: speed.seconds(function, device, times) / times)

    monkeypatch.setattr(speed, "stopwatch", graphs)
    result = bench_operator(2, 16, 4, "fp32", compare=False, repeats=2)
    assert result.timed_by == ("graph",) * 3 and watched == [20, 1, 1]
    assert result.forward_launched > 0 and result.forward_backward_launched > 0
