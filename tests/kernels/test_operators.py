"""The custom operators under torch.compile, torch.export and torch.func (finola/kernels/operators.py)."""

import time

import pytest
import torch
from laws import random_law
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import finola.evaluation.flops  # noqa: F401  (tells torch how to count the operators)
from finola.autoregression import Finola, autoregress
from finola.errors import FinolaError
from finola.kernels import operators

SIZE = (3, 4)
FLOPS = 2 * 2 * (3 * 4 - 1) * 5**2  # of SIZE at 5 channels: two paths, an addition with each multiplication


def law(implementation="auto", **options):
    """(q, matrices) -> map."""
    return lambda q, weights: autoregress(q, SIZE, **weights, implementation=implementation, **options)


def loss(implementation):
    return lambda q, weights: law(implementation)(q, weights).sin().sum()


def copies(weights, count=3):
    """Each matrix `count` times, in different sizes."""
    return {d: torch.stack([w * (i + 0.5) for i in range(count)]) for d, w in weights.items()}


# --- torch.library ---


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("dtype", "path", "normalised"), [
    (torch.float64, "average", True), (torch.float32, "row_first", True), (torch.bfloat16, "average", True),
    (torch.float32, "column_first", False)])
def test_opcheck(keep, dtype, path, normalised):
    q, weights = random_law(5)
    q, matrices = q.to(dtype).requires_grad_(keep), [w.to(dtype).requires_grad_(keep) for w in weights.values()]
    torch.library.opcheck(operators.grow, (q, matrices, SIZE, (1, 2), path, normalised, 1e-5, dtype, keep))
    q, matrices = q.detach(), [m.detach() for m in matrices]
    z, normals, rstds = operators.grow(q, matrices, SIZE, (1, 2), path, normalised, 1e-5, dtype, True)
    torch.library.opcheck(operators.ungrow, (z, normals, rstds, matrices, (1, 2), path, normalised, dtype))


def test_multiplications_are_counted():
    q, weights = random_law(5, batch=1)
    for w in weights.values():
        w.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        z = law()(q, weights)
    with FlopCounterMode(display=False) as backward:
        z.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (FLOPS, 2 * FLOPS)


# --- torch.compile, torch.export ---


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_compiled_equals_eager_with_gradients_in_one_graph(norm, autocast):
    torch.manual_seed(0)
    module = Finola(8, (4, 5), norm=norm)
    q = torch.randn(2, 8)
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        inputs = [q.clone().requires_grad_(), *module.parameters()]
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            z = call(inputs[0])
        results.append([z, *torch.autograd.grad(z.sin().sum(), inputs)])
        with torch.no_grad():
            torch.testing.assert_close(call(q), module(q))
    torch.testing.assert_close(*results)


def test_a_compiled_graph_holds_one_operator():
    nodes = []

    def backend(graph, inputs):
        nodes.extend(graph.graph.nodes)
        return graph

    module = Finola(8, (16, 16))
    torch.compile(module, fullgraph=True, backend=backend)(torch.randn(2, 8))
    calls = [node.target for node in nodes if "finola" in str(node.target)]
    assert len(calls) == 1 and len(nodes) < 30


@pytest.mark.slow
def test_compiling_takes_little_longer_than_a_linear_layer():
    def seconds(module):
        start = time.perf_counter()
        torch.compile(module, fullgraph=True)(torch.randn(2, 64)).sum().backward()
        return time.perf_counter() - start

    linear = seconds(torch.nn.Linear(64, 64))
    assert seconds(Finola(64, (16, 16))) < linear + 5


def test_exported_at_any_batch_loads_and_trains(tmp_path):
    module, q = Finola(8, (4, 5)), torch.randn(3, 8)
    program = torch.export.export(module, (torch.randn(2, 8),), dynamic_shapes={"q": {0: torch.export.Dim("b", min=2)}})
    torch.export.save(program, tmp_path / "law.pt2")
    loaded = torch.export.load(tmp_path / "law.pt2").module()
    torch.testing.assert_close(loaded(q), module(q))
    loaded(q).sin().sum().backward()
    module(q).sin().sum().backward()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.grad, module.get_parameter(name).grad)


def test_plain_is_exported_as_torchs_own_operations():
    module = Finola(8, (2, 3), implementation="plain")
    program = torch.export.export(module, (torch.randn(2, 8),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names and all(name.startswith("aten") for name in names)


# --- torch.func ---


TRANSFORMS = {
    "grad": lambda law, loss, q, w: grad(loss, argnums=(0, 1))(q, w),
    "jacrev": lambda law, loss, q, w: jacrev(law, argnums=(0, 1))(q, w),
    "vmap": lambda law, loss, q, w: vmap(law, in_dims=(1, None), out_dims=2)(q[:, None].expand(-1, 3, -1), w),
    "vmap of vmap": lambda law, loss, q, w: vmap(vmap(law, (0, None)), (0, None))(q.expand(2, 1, *q.shape), w),
    "vmap over matrices": lambda law, loss, q, w: vmap(law, (None, 0))(q, copies(w)),
    "gradients of each image": lambda law, loss, q, w: vmap(grad(loss, (0, 1)), (0, None))(q[:, None], w),
    "gradients of each law": lambda law, loss, q, w: vmap(grad(loss, (0, 1)), (None, 0))(q, copies(w)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_on_the_fast_path_equals_plain(transform):
    q, weights = random_law(5)
    fast, plain = (TRANSFORMS[transform](law(name), loss(name), q, weights) for name in ("auto", "plain"))
    torch.testing.assert_close(fast, plain)


def test_vmap_is_one_call_with_a_larger_batch(monkeypatch):
    q, weights = random_law(5, batch=6)
    batches, kernel = [], operators.batched.grow
    monkeypatch.setattr(operators.batched, "grow", lambda q, *rest: batches.append(len(q)) or kernel(q, *rest))
    z = vmap(lambda q: law()(q, weights))(q.unflatten(0, (3, 2)))
    assert batches == [6]
    torch.testing.assert_close(z.flatten(0, 1), law()(q, weights))


def test_backward_through_vmap():
    q, weights = random_law(5, batch=6)
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    z = vmap(lambda q: law()(q, weights))(q.unflatten(0, (3, 2))).flatten(0, 1)
    torch.testing.assert_close(torch.autograd.grad(z.sin().sum(), inputs),
                               torch.autograd.grad(law()(q, weights).sin().sum(), inputs))


def test_forward_mode_on_the_plain_path_equals_jacrev():
    q, weights = random_law(5)
    tangent = torch.randn_like(q)
    _, slope = jvp(lambda q: law("plain")(q, weights), (q,), (tangent,))
    jacobian = jacrev(lambda q: law()(q, weights))(q)
    torch.testing.assert_close(slope, torch.einsum("bchwid,id->bchw", jacobian, tangent))


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_second_derivatives_of_the_plain_path(norm):
    q, weights = random_law(4, batch=1)
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    assert torch.autograd.gradgradcheck(
        lambda q, *w: law("plain", norm=norm)(q, dict(zip(weights, w, strict=True))), inputs)


@pytest.mark.parametrize(("what", "transform"), [
    ("forward-mode derivatives", lambda q, w: jvp(lambda q: law()(q, w), (q,), (q,))),
    ("forward-mode derivatives", lambda q, w: jvp(lambda w: law()(q, w), (w,), (w,))),
    ("forward-mode derivatives", lambda q, w: jacfwd(jacrev(lambda q: loss("auto")(q, w)))(q)),
    ("gradients of gradients", lambda q, w: jacrev(jacrev(lambda q: loss("auto")(q, w)))(q)),
    ("gradients of gradients", lambda q, w: torch.autograd.functional.hessian(lambda q: loss("auto")(q, w), q)),
])
def test_what_the_fast_path_has_not_is_said_in_one_line(what, transform):
    with pytest.raises(FinolaError, match=rf"^finola.autoregress: .* has no {what} .*; pass implementation='plain'$"):
        transform(*random_law(4, batch=1))
