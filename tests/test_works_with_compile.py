"""Works with: torch.compile, in whatever order and around whatever part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend
from works_with import GRADIENT_BOUND, MIN_BYTES, Transformer, gradients, regression, relative_error

import pyactcomp
from pyactcomp.engine import policy

# torch's own: of tracing a block whose input has a grad_fn, and inductor's advice.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

# On the CPU inductor would spend the time on the C++ compiler; what the hooks see is decided before it.
TARGETS = [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]

Compile = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def exact() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def compiled_then_compressed(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    compiled = torch.compile(model, **options)
    return compiled, pyactcomp.compress(compiled, min_bytes=MIN_BYTES)


def blocks_compiled_then_compressed(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    for block in model.blocks:
        block.compile(**options)
    return model, pyactcomp.compress(model, min_bytes=MIN_BYTES)


def compressed_then_blocks_compiled(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    for block in model.blocks:
        block.compile(**options)
    return model, model


def compressed_then_compiled(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    return torch.compile(model, **options), model


def compressed_then_compiled_in_place(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    model.compile(**options)
    return model, model


def compiled_in_place_then_compressed(model: Transformer, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model.compile(**options)
    return model, pyactcomp.compress(model, min_bytes=MIN_BYTES)


HOOKS_AROUND_GRAPHS = [
    compiled_then_compressed,
    blocks_compiled_then_compressed,
    compressed_then_blocks_compiled,
]
HOOKS_INSIDE_THE_GRAPH = [
    compressed_then_compiled,
    compressed_then_compiled_in_place,
    compiled_in_place_then_compressed,
]


def step(call: nn.Module, device: str) -> torch.Tensor:
    inputs, targets = regression(device)
    loss = F.mse_loss(call(inputs), targets)
    loss.backward()
    return loss.detach()


def assert_agrees(model: Transformer, loss: torch.Tensor, exact: Transformer, exact_loss: torch.Tensor) -> float:
    # Inductor fuses the forward, which moves float32 roundings: a few ulp through each of some 50 operators.
    rtol = 64 * torch.finfo(torch.float32).eps if loss.device.type == "cuda" else 0.0
    torch.testing.assert_close(loss, exact_loss, rtol=rtol, atol=0.0)
    error = relative_error(gradients(model), gradients(exact))
    assert error <= GRADIENT_BOUND, "NaN, from the mask's infinities, fails here too"
    return error


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("order", HOOKS_AROUND_GRAPHS)
def test_what_a_compiled_graph_saves_is_kept_and_warned_of_once(
    exact: Transformer, order: Compile, device: str, backend: str
) -> None:
    model = copy.deepcopy(exact.to(device))
    call, compressed = order(model, {"backend": backend, "fullgraph": True})
    with pytest.warns(UserWarning, match=r"kept as it is.* Leave the modules") as w:
        loss = step(call, device)
    assert sum("pyactcomp" in str(warning.message) for warning in w) == 1
    error = assert_agrees(model, loss, exact, step(exact, device))
    report = pyactcomp.report(compressed)
    # A graph saves plain tensors; what blocks exchange in eager mode requires grad and is packed.
    assert policy.NO_GRAD in {tensor.kept for tensor in report.tensors}
    packed = [tensor for tensor in report.tensors if tensor.kept is None]
    assert bool(packed) == (order is not compiled_then_compressed)
    # Without a packed tensor there is only what inductor's order of operations moves, as in the loss.
    assert packed or error <= 64 * torch.finfo(torch.float32).eps
    for parameter in (*model.parameters(), *exact.parameters()):
        parameter.grad = None
    # The second step runs the compiled graphs again, warns no more (a warning is an error here), and is as right.
    assert_agrees(model, step(call, device), exact, step(exact, device))


@pytest.mark.filterwarnings("ignore:a graph compiled by torch.compile runs under")
@pytest.mark.parametrize("order", HOOKS_AROUND_GRAPHS)
def test_compressing_around_compiled_graphs_causes_no_further_compilation(exact: Transformer, order: Compile) -> None:
    compilations = []

    def counting(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        compilations.append(graph)
        return lookup_backend("aot_eager")(graph, examples)

    call, _ = order(copy.deepcopy(exact), {"backend": counting, "fullgraph": True})
    step(call, "cpu")
    first = len(compilations)
    step(call, "cpu")
    assert len(compilations) == first > 0


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("order", HOOKS_INSIDE_THE_GRAPH)
def test_compiling_a_compressed_module_itself_compresses_nothing_and_says_so(
    exact: Transformer, order: Compile, device: str, backend: str
) -> None:
    model = copy.deepcopy(exact.to(device))
    call, compressed = order(model, {"backend": backend, "fullgraph": True})
    with pytest.warns(UserWarning, match=r"torch\.compile"):
        loss = step(call, device)
    assert_agrees(model, loss, exact, step(exact, device))
    assert not pyactcomp.report(compressed).tensors


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("named", [False, True], ids=["without model", "with model"])
def test_compressed_context_around_a_compiled_model(exact: Transformer, device: str, backend: str, named: bool) -> None:
    model = copy.deepcopy(exact.to(device))
    compiled = torch.compile(model, backend=backend)
    inputs, targets = regression(device)
    with pytest.warns(UserWarning, match=r"torch\.compile"):
        with pyactcomp.compressed(model if named else None, min_bytes=MIN_BYTES) as context:
            loss = F.mse_loss(compiled(inputs), targets)
    loss.backward()
    assert_agrees(model, loss.detach(), exact, step(exact, device))
    report = pyactcomp.report(context)
    assert policy.NO_GRAD in {tensor.kept for tensor in report.tensors}
    # The loss is computed in eager mode: only its operand is packed, and no weight in any shape.
    assert {tensor.shape for tensor in report.tensors if tensor.kept is None} <= {tuple(targets.shape)}


@pytest.mark.filterwarnings("ignore:a graph compiled by torch.compile runs under")
def test_skipped_module_inside_a_compiled_block_does_not_break_its_graph(exact: Transformer) -> None:
    model = copy.deepcopy(exact)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    pyactcomp.compress(model, min_bytes=MIN_BYTES, skip=[nn.LayerNorm])
    assert assert_agrees(model, step(model, "cpu"), exact, step(exact, "cpu")) > 0.0


# Dynamo's own, of how it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_a_function_ends_no_graph_to_look_for_hooks(name: str) -> None:
    function = getattr(pyactcomp.functional, name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: function(x.sin()).cos(), backend="aot_eager", dynamic=False)
    compiled(torch.randn(6, 64, requires_grad=True)).sum().backward()
    assert not [reason for reason in torch._dynamo.utils.counters["graph_break"] if "saved_tensors" in reason]


@pytest.mark.parametrize(("device", "backend"), TARGETS)
@pytest.mark.parametrize("kind", [nn.Linear, nn.GELU])
@pytest.mark.filterwarnings("ignore:a graph compiled by torch.compile runs under")
def test_hooks_are_not_traced_where_a_module_of_torch_is_compiled(
    exact: Transformer, kind: type[nn.Module], device: str, backend: str
) -> None:
    model = pyactcomp.compress(copy.deepcopy(exact.to(device)), min_bytes=MIN_BYTES, fuse=False)
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return lookup_backend(backend)(graph, examples)

    for module in model.modules():
        if isinstance(module, kind):
            module.compile(backend=counting)
    assert_agrees(model, step(model, device), exact, step(exact, device))
    # What autograd calls for modules of torch, which are not traced themselves, is not traced either.
    assert graphs == []


class Scripted(nn.Module):
    """A model with all that compress adds: fused modules, exact ones, norms that are offered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.gelu = nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()
        self.kinked, self.last = nn.LeakyReLU(), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.kinked(self.gelu(self.norm(self.first(x)))))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("fuse", [True, False])
def test_a_compressed_model_is_scripted_without_what_compresses_it(fuse: bool) -> None:
    torch.manual_seed(0)
    model, x = Scripted(), torch.randn(32, 64)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    with pytest.warns(UserWarning, match="without pyactcomp"):
        scripted = torch.jit.script(model)
    got = torch.autograd.grad(scripted(x).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, exact, strict=True))
    # The model itself stays as it is, and so do its copies.
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(x).square().sum().backward()
        assert pyactcomp.report(each).stored_bytes < pyactcomp.report(each).unique_bytes
    pyactcomp.decompress(model)
    assert torch.equal(torch.jit.script(model)(x), scripted(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("fuse", [True, False])
def test_a_compressed_model_is_traced_as_the_plain_one(fuse: bool) -> None:
    torch.manual_seed(0)
    model, x = Scripted(), torch.randn(32, 64)
    exact = model(x)
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    traced = torch.jit.trace(model, x)
    assert torch.allclose(traced(x), exact, rtol=1e-5, atol=1e-5)
    # No operator of Python's is in the graph: it can be saved.
    assert "PythonOp" not in str(traced.inlined_graph)
