"""Works with: torch.compile, in whatever order and around whatever part."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import REORDERED, as_inductor
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from works_with import GRADIENT_BOUND, MIN_BYTES, WIDTH, Block, Transformer, gradients, regression, relative_error

import pyactcomp
from pyactcomp.compiled import partition
from pyactcomp.engine import reasons

# torch's own: of tracing a block whose input has a grad_fn, and inductor's advice.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

# On the CPU inductor would spend the time on the C++ compiler; what the hooks see is decided before it.
TARGETS = [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
PARTITIONED = [("cpu", as_inductor), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]

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


ORDERS = [
    compiled_then_compressed,
    blocks_compiled_then_compressed,
    compressed_then_blocks_compiled,
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
    rtol = REORDERED if loss.device.type == "cuda" else 0.0  # Inductor fuses the forward
    torch.testing.assert_close(loss, exact_loss, rtol=rtol, atol=0.0)
    error = relative_error(gradients(model), gradients(exact))
    assert error <= GRADIENT_BOUND, "NaN, from the mask's infinities, fails here too"
    return error


@pytest.mark.parametrize(("device", "backend"), PARTITIONED)
@pytest.mark.parametrize("order", ORDERS)
def test_graphs_of_a_compressed_model_are_compressed_in_every_order(
    exact: Transformer, order: Compile, device: str, backend: Any
) -> None:
    model = copy.deepcopy(exact.to(device))
    call, compressed = order(model, {"backend": backend, "fullgraph": True})
    for _ in range(2):
        for parameter in (*model.parameters(), *exact.parameters()):
            parameter.grad = None
        # Codes change gradients only, and eager blocks between graphs are packed too.
        assert assert_agrees(model, step(call, device), exact, step(exact, device)) > REORDERED
    graphs = pyactcomp.report(compressed).graphs
    assert graphs
    for graph in graphs:
        # Rows of 32 scores are shorter than a group: attention's probabilities take 16 bits, divisors stay exact.
        assert graph.after < 0.6 * graph.before
        forms = {value.form for value in graph.saved if value.before >= MIN_BYTES and value.shape[-2:] != (32, 32)}
        assert forms <= {"codes", "bits", "kept"}
    assert "MiB saved for backward" in str(pyactcomp.report(compressed))


@pytest.mark.parametrize("order", ORDERS)
def test_a_backend_without_a_partitioner_keeps_what_graphs_save_and_says_so_once(
    exact: Transformer, order: Compile
) -> None:
    model = copy.deepcopy(exact)
    call, compressed = order(model, {"backend": "aot_eager", "fullgraph": True})
    with pytest.warns(UserWarning, match=r"backend 'aot_eager' does not partition") as w:
        loss = step(call, "cpu")
    assert len({str(warning.message) for warning in w if "pyactcomp" in str(warning.message)}) <= 1
    error = assert_agrees(model, loss, exact, step(exact, "cpu"))
    report = pyactcomp.report(compressed)
    assert not report.graphs
    # Without a packed tensor there is nothing that moves gradients.
    assert error <= REORDERED or any(tensor.kept is None for tensor in report.tensors)


def test_a_batch_of_another_size_makes_graphs_for_all_sizes(exact: Transformer) -> None:
    torch._dynamo.utils.counters.clear()
    model, _ = compressed_then_blocks_compiled(copy.deepcopy(exact), {"backend": as_inductor, "fullgraph": True})
    graphs = []
    for batch in (4, 6, 7):
        inputs, targets = regression("cpu", batch)
        F.mse_loss(model(inputs), targets).backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # Nothing but torch.compile reads sizes while a block is traced. Static and dynamic graphs of inputs that are views,
    # as the first block's, and of others.
    assert graphs[1:] == graphs[1:2] * 2
    assert graphs[1] <= 4


def test_graphs_are_told_apart_and_none_is_stale(exact: Transformer) -> None:
    model, other = copy.deepcopy(exact), copy.deepcopy(exact)
    run, run_other = (torch.compile(m, backend=as_inductor, fullgraph=True) for m in (model, other))
    torch._dynamo.utils.counters.clear()

    def error(call: Any, of: nn.Module) -> float:
        of.zero_grad()
        exact.zero_grad()
        return assert_agrees(of, step(call, "cpu"), exact, step(exact, "cpu"))

    def graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    assert error(run, model) <= REORDERED
    assert graphs() == 1
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    assert error(run, model) > REORDERED
    assert graphs() == 2
    assert error(run_other, other) <= REORDERED
    assert graphs() == 2
    pyactcomp.decompress(model)
    assert error(run, model) <= REORDERED
    assert graphs() == 2
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    assert error(run, model) > REORDERED
    assert graphs() == 2
    pyactcomp.decompress(model)
    pyactcomp.compress(model, min_bytes=MIN_BYTES, mode="lossless")
    assert error(run, model) <= REORDERED
    assert graphs() == 3


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, /, y: Tensor | None = None, *, k: int = 0) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor, k: int = 0) -> Tensor:
        return x + k


class Rest(Optional):
    def forward(self, *xs: Tensor, k: int = 0, **others: Tensor) -> Tensor:
        return super().forward(*xs, **others) + k


class Claiming(Optional):
    """A decorator may name other parameters than the function has."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(Optional.forward)  # type: ignore[attr-defined]


CALLS: dict[type[nn.Module], list[Callable[[nn.Module, Tensor], Tensor]]] = {
    Optional: [
        lambda m, x: m(x),
        lambda m, x: m(x, None),
        lambda m, x: m(x, None, None),
        lambda m, x: m(x, y=None),
        lambda m, x: m(x, k=0),
        lambda m, x: m(x, k=0, y=None),
    ],
    Static: [lambda m, x: m(x), lambda m, x: m(x, k=2), lambda m, x: m(x=x)],
    Rest: [lambda m, x: m(x, k=2), lambda m, x: m(x, y=x)],
    Claiming: [lambda m, x: m(x), lambda m, x: m(x, k=0)],
}


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_a_marked_forward_takes_arguments_as_the_class_does(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, WIDTH, requires_grad=True)
    expected = [call(model, x).detach() for call in CALLS[kind]]
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    assert all(torch.equal(call(model, x), out) for call, out in zip(CALLS[kind], expected, strict=True))
    with pytest.raises(TypeError, match="forward"):
        model()
    model.compile(backend=as_inductor)
    torch._dynamo.utils.counters.clear()
    # Decomposed operators sum in another order.
    for call, out in zip(CALLS[kind], expected, strict=True):
        torch.testing.assert_close(call(model, x), out, rtol=REORDERED, atol=REORDERED)
    if kind is Optional:  # as many graphs as without compression: one
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_forward_compiled_as_a_method_is_plain_after_decompress(exact: Transformer) -> None:
    """The compiled method is bound to the function of the class given by ``compress``."""
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    model.forward = torch.compile(model.forward, backend=as_inductor)
    expected = step(exact, "cpu")
    assert assert_agrees(model, step(model, "cpu"), exact, expected) > REORDERED
    pyactcomp.decompress(model)
    for _ in range(2):  # the second time compiled anew
        model.zero_grad()
        assert assert_agrees(model, step(model, "cpu"), exact, expected) <= REORDERED
        torch.compiler.reset()


def test_a_skipped_module_inside_a_graph_is_kept(exact: Transformer) -> None:
    whole, part = copy.deepcopy(exact), copy.deepcopy(exact)
    pyactcomp.compress(whole, min_bytes=MIN_BYTES)
    pyactcomp.compress(part, min_bytes=MIN_BYTES, skip=["blocks.0.mlp", nn.LayerNorm])
    stored = []
    for model in (whole, part):
        assert assert_agrees(model, step(torch.compile(model, backend=as_inductor), "cpu"), exact, step(exact, "cpu"))
        exact.zero_grad()
        (graph,) = pyactcomp.report(model).graphs
        stored.append(graph.after)
    assert any(value.reason == "skipped" for value in graph.saved)
    assert stored[0] < stored[1]


@pytest.mark.parametrize("options", [{"rounding": "stochastic"}, {"impl": "cpu"}], ids=str)
def test_an_option_that_a_graph_cannot_serve_is_named(exact: Transformer, options: dict[str, Any]) -> None:
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES, **options)
    with pytest.warns(UserWarning, match=next(iter(options))):
        loss = step(torch.compile(model, backend=as_inductor), "cpu")
    assert assert_agrees(model, loss, exact, step(exact, "cpu")) <= REORDERED


def test_a_failure_while_rewriting_gives_torchs_own_partition(
    exact: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(forward: torch.fx.GraphModule, *_: object) -> None:
        # Leave the graphs broken, as a failure midway would.
        forward.graph.erase_node(next(iter(reversed(forward.graph.nodes))))
        raise KeyError("a test")

    monkeypatch.setattr(partition, "rewrite", fails)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    with pytest.warns(UserWarning, match="could not compress a graph of Transformer.*KeyError"):
        loss = step(torch.compile(model, backend=as_inductor), "cpu")
    assert assert_agrees(model, loss, exact, step(exact, "cpu")) <= REORDERED


@pytest.mark.parametrize("fuse", [False, True])
def test_a_marked_model_is_copied_and_pickled(exact: Transformer, fuse: bool) -> None:
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES, fuse=fuse)
    # A block with a fused class of its own is marked too.
    model.blocks[0].mlp_norm.compile(backend=as_inductor)
    pyactcomp.compress(pyactcomp.decompress(model), min_bytes=MIN_BYTES, fuse=fuse)
    assert isinstance(model, Transformer)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin).__name__ == "Transformer"
        exact.zero_grad()
        assert assert_agrees(twin, step(torch.compile(twin, backend=as_inductor), "cpu"), exact, step(exact, "cpu"))
        assert type(pyactcomp.decompress(twin)) is Transformer
        assert all(type(block) is Block for block in twin.blocks)


def test_verify_compares_compiled_graphs_with_uncompressed_ones(exact: Transformer) -> None:
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    model.compile(backend=as_inductor)
    inputs, targets = regression("cpu")
    found = pyactcomp.verify(model, inputs, lambda output: F.mse_loss(output, targets))
    assert REORDERED < found.error <= GRADIENT_BOUND


@pytest.mark.parametrize(("name", "head"), [("Bert", "ForMaskedLM"), ("Llama", "ForCausalLM")])
def test_fused_models_of_transformers_make_one_graph(name: str, head: str) -> None:
    transformers = pytest.importorskip("transformers", reason="builds the model")
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    config = getattr(transformers, f"{name}Config")(vocab_size=256, **sizes)
    torch.manual_seed(0)
    model = pyactcomp.compress(getattr(transformers, name + head)(config), min_bytes=MIN_BYTES)
    tokens = torch.randint(256, (4, 64))
    # A fused forward that breaks the graph is an error here.
    run = torch.compile(model, backend=as_inductor, fullgraph=True)
    run(input_ids=tokens, labels=tokens).loss.backward()
    (graph,) = pyactcomp.report(model).graphs
    assert any(value.form == "codes" for value in graph.saved)


def test_blocks_of_a_class_that_dynamo_may_leave_in_the_graph_make_one_graph() -> None:
    """As the blocks of diffusers are, wherever torch.compile is there."""

    @torch._dynamo.allow_in_graph
    class Leaf(Block):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(Leaf(), Leaf())
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    torch.compile(model, backend=as_inductor, fullgraph=True)(torch.randn(4, 16, WIDTH)).sum().backward()
    (graph,) = pyactcomp.report(model).graphs
    assert any(value.form == "codes" for value in graph.saved)


_IN_A_PROCESS = """
import sys, torch
from torch import nn
from torch._functorch import partitioners
import pyactcomp
calls = []
cut = partitioners.min_cut_rematerialization_partition
partitioners.min_cut_rematerialization_partition = lambda *a, **k: calls.append(1) or cut(*a, **k)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
pyactcomp.compress(net, min_bytes=0, **eval(sys.argv[1]))
x = torch.randn(128, 64)
torch.compile(net)(x).square().sum().backward()
got = [p.grad.clone() for p in net.parameters()]
(graph,) = pyactcomp.report(net).graphs
pyactcomp.decompress(net)
net.zero_grad()
net(x).square().sum().backward()
error = max(float((a - p.grad).norm() / p.grad.norm()) for a, p in zip(got, net.parameters()))
print(len(calls), graph.before, graph.after, error)
"""


def _in_a_process(directory: Path, options: str) -> tuple[int, int, int, float]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _IN_A_PROCESS, options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    calls, before, after, error = done.stdout.split()
    return int(calls), int(before), int(after), float(error)


@pytest.mark.slow
def test_a_second_process_takes_compressed_graphs_from_torchs_cache(tmp_path: Path) -> None:
    calls, before, after, error = first = _in_a_process(tmp_path, "{}")
    assert calls == 1
    assert after < 0.5 * before
    assert 0.0 < error <= GRADIENT_BOUND
    assert _in_a_process(tmp_path, "{}") == (0, *first[1:])
    # Another configuration is another graph.
    assert _in_a_process(tmp_path, "{'group_size': 128}")[0] == 1


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
    assert reasons.NO_GRAD in {tensor.kept for tensor in report.tensors}
    # The loss is computed in eager mode: only its operand is packed, and no weight in any shape.
    assert {tensor.shape for tensor in report.tensors if tensor.kept is None} <= {tuple(targets.shape)}


@pytest.mark.filterwarnings("ignore:.*does not partition by Inductor")
def test_skipped_module_inside_a_compiled_block_does_not_break_its_graph(exact: Transformer) -> None:
    model = copy.deepcopy(exact)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    pyactcomp.compress(model, min_bytes=MIN_BYTES, skip=[nn.LayerNorm])
    assert assert_agrees(model, step(model, "cpu"), exact, step(exact, "cpu")) > 0.0


# Dynamo's own, of how it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_ends_no_graph_to_look_for_hooks() -> None:
    function = pyactcomp.functional.gelu
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

    compiled = [module for module in model.modules() if isinstance(module, kind)]
    for module in compiled:
        module.compile(backend=counting)
    assert_agrees(model, step(model, device), exact, step(exact, device))
    # One operator for each module, and nothing of what autograd calls to save its operands.
    operators = [node.op for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert len(operators) == len(graphs) <= len(compiled)


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
def test_a_compressed_model_is_scripted_once_decompressed(fuse: bool) -> None:
    model, x = Scripted(), torch.randn(32, 64)
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    # A fused module alone, the model, and a copy of it.
    for each in ([model.gelu] if fuse else []) + [model, copy.deepcopy(model)]:
        with pytest.raises(pyactcomp.PyactcompError, match=f"this {type(each).__name__} is compressed: .*decompress"):
            torch.jit.script(each)
    model(x).square().sum().backward()
    assert pyactcomp.report(model).stored_bytes < pyactcomp.report(model).unique_bytes
    scripted = torch.jit.script(pyactcomp.decompress(model))
    assert torch.equal(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_scripted_part_of_a_model_stays_as_it_is(how: str, fuse: bool) -> None:
    torch.manual_seed(0)
    part, x = Scripted(), torch.randn(32, 64)
    scripted = torch.jit.script(part) if how == "script" else torch.jit.trace(part, x)
    # Not called before: a traced module finds its forward at the first call.
    model = nn.Sequential(scripted, nn.LayerNorm(64), nn.Linear(64, 64))
    plain = nn.Sequential(part, *model[1:])
    exact = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    pyactcomp.decompress(model)
    assert torch.equal(model(x), plain(x))
    off = sum(float((a - b).square().sum()) for a, b in zip(got, exact, strict=True))
    assert off <= GRADIENT_BOUND**2 * sum(float(b.square().sum()) for b in exact)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("fuse", [True, False])
def test_a_compressed_model_is_traced_as_the_plain_one(fuse: bool) -> None:
    torch.manual_seed(0)
    model, x = Scripted(), torch.randn(32, 64)
    exact = model(x)
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), exact)
    # No operator of Python's is in the graph: it can be saved.
    assert "PythonOp" not in str(traced.inlined_graph)


@pytest.mark.parametrize(("device", "backend"), PARTITIONED)
def test_a_module_of_fx_is_compressed_in_graphs_of_a_module_around_it(device: str, backend: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    x = torch.randn(128, WIDTH, device=device)
    plain(x).square().mean().backward()
    exact = gradients(plain)
    traced = torch.fx.symbolic_trace(copy.deepcopy(plain))
    traced.zero_grad()
    alone = pyactcomp.compress(copy.deepcopy(traced), min_bytes=MIN_BYTES)
    with pytest.warns(UserWarning, match=r"compress and compile a module around it, such as torch\.nn\.Sequential"):
        torch.compile(alone, backend=backend)(x).square().mean().backward()
    assert relative_error(gradients(alone), exact) <= REORDERED
    around = pyactcomp.compress(nn.Sequential(traced), min_bytes=MIN_BYTES)
    torch.compile(around, backend=backend)(x).square().mean().backward()
    report = pyactcomp.report(around)
    assert len(report.graphs) == 1
    assert sum(graph.after for graph in report.graphs) < sum(graph.before for graph in report.graphs) / 2
    found = {name.removeprefix("0."): gradient for name, gradient in gradients(around).items()}
    assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND
