"""compress(compile_blocks=True): which blocks are compiled, how often, and what happens to those that cannot be."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import REORDERED, as_inductor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from works_with import GRADIENT_BOUND, MIN_BYTES, WIDTH, Transformer, gradients, regression, relative_error

import pyactcomp
from pyactcomp.compiled import blocks
from pyactcomp.compiled.blocks import repeating_blocks

# torch's own: of tracing a block whose input has a grad_fn, and inductor's advice.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

DEVICES = [("cpu", as_inductor), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]


class Compiler:
    """Stands for torch.compile, without code generation on the CPU; counts the graphs."""

    def __init__(self, inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = 0
        self._inner = torch._dynamo.lookup_backend(inner)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=self.backend))

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return self._inner(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(as_inductor, monkeypatch)


class Block(nn.Module):
    """A block without the attention, which takes the compiler the longest; twelve whole ones are compiled below."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@pytest.fixture
def exact() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(0)
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    return model


def compress(model: nn.Module, **options: Any) -> nn.Module:
    return pyactcomp.compress(model, min_bytes=MIN_BYTES, compile_blocks=True, **options)


def step(model: nn.Module, batch: int = 4, device: str = "cpu") -> dict[str, Tensor]:
    model.zero_grad()
    inputs, targets = regression(device, batch)
    F.mse_loss(model(inputs), targets).backward()
    return gradients(model)


def error(model: nn.Module, exact: nn.Module, batch: int = 4, device: str = "cpu") -> float:
    return relative_error(step(model, batch, device), step(exact, batch, device))


@pytest.mark.parametrize(("device", "backend"), DEVICES)
def test_twelve_equal_blocks_are_compiled_once(device: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(backend, monkeypatch)
    torch.manual_seed(0)
    exact = Transformer(12).to(device)
    model = compress(copy.deepcopy(exact))
    for _ in range(3):
        assert REORDERED < error(model, exact, device=device) <= GRADIENT_BOUND
    assert compiler.graphs == 1
    report = pyactcomp.report(model)
    (graph,) = report.graphs
    assert graph.after < 0.6 * graph.before
    assert "graph of Block" in str(report)
    # The rest of the model runs in eager mode, and is compressed there.
    assert any(tensor.kept is None and tensor.module == "head" for tensor in report.tensors)


def test_lossless_gradients_are_those_of_the_same_blocks_without_compression(
    exact: Transformer, compiler: Compiler
) -> None:
    plain = copy.deepcopy(exact)
    for block in plain.blocks:
        block.compile()
    expected = step(plain)
    got = step(compress(copy.deepcopy(exact), mode="lossless"))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert compiler.graphs == 2


@pytest.mark.parametrize("options", [{}, {"fuse": False, "skip": [nn.LayerNorm]}], ids=str)
def test_a_batch_of_another_size_makes_graphs_for_all_sizes(
    exact: Transformer, compiler: Compiler, options: dict[str, Any]
) -> None:
    model = compress(copy.deepcopy(exact), **options)
    graphs = []
    for batch in (4, 6, 7):
        assert error(model, exact, batch) <= GRADIENT_BOUND
        graphs.append(compiler.graphs)
    # The first block's input is a view of another tensor, and Dynamo guards that.
    assert graphs == [1, 3, 3]


def test_a_model_goes_back_and_forth(exact: Transformer, compiler: Compiler) -> None:
    model = copy.deepcopy(exact)
    names = list(model.state_dict())
    compress(model)
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert list(model.state_dict()) == names
    assert pyactcomp.decompress(model) is model
    assert all(type(block) is Block and block._compiled_call_impl is None for block in model.blocks)
    assert error(model, exact) == 0.0
    compress(model)
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1, "the graph compiled first serves again"
    pyactcomp.compress(pyactcomp.decompress(model), min_bytes=MIN_BYTES)
    assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert not pyactcomp.report(model).graphs


def test_copies_are_compiled_by_themselves(exact: Transformer, compiler: Compiler) -> None:
    model = compress(copy.deepcopy(exact))
    for number, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model))), 1):
        assert REORDERED < error(twin, exact) <= GRADIENT_BOUND
        assert compiler.graphs == number
        assert len(pyactcomp.report(twin).graphs) == 1
        pyactcomp.decompress(twin)
        assert all(type(block) is Block for block in twin.blocks)
    assert not pyactcomp.report(model).graphs


class Breaking(Block):
    """Cannot be compiled in a graph: in training, or in evaluation alone."""

    in_training = True

    def forward(self, x: Tensor) -> Tensor:
        if self.in_training or not self.training:
            torch._dynamo.graph_break()
        return super().forward(x)


def breaking(exact: Transformer) -> Transformer:
    model = copy.deepcopy(exact)
    for block in model.blocks:
        block.__class__ = Breaking
    return model


def test_a_block_that_cannot_be_compiled_runs_as_without(exact: Transformer, compiler: Compiler) -> None:
    model = compress(breaking(exact))
    with pytest.warns(UserWarning, match="Breaking runs uncompiled: Unsupported: .*graph_break") as caught:
        assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert len([w for w in caught if "uncompiled" in str(w.message)]) == 1
    report = pyactcomp.report(model)
    assert not report.graphs
    assert compiler.graphs == 0
    pyactcomp.compress(plain := breaking(exact), min_bytes=MIN_BYTES)
    expected = step(plain)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in step(model).items())
    # The inner modules of the blocks that were to be compiled have no lines of their own.
    assert report.stored_bytes == pyactcomp.report(plain).stored_bytes


def test_a_failure_of_the_backend_is_named(
    exact: Transformer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise FileNotFoundError("no C++ compiler")

    monkeypatch.setattr(compiler, "_inner", fails)
    model = compress(copy.deepcopy(exact))
    with pytest.warns(UserWarning, match="Block runs uncompiled: BackendCompilerFailed: .*FileNotFoundError: no C"):
        assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1


class Named(nn.Module):
    """A block whose keywords are the names of the wrapper's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, block: Tensor, name: str = "") -> Tensor:
        return x + self.linear(x) * block


def test_a_block_takes_any_keyword(compiler: Compiler) -> None:
    torch.manual_seed(0)
    exact = nn.ModuleList([Named(), Named()])
    model, x = compress(copy.deepcopy(exact)), torch.randn(16, 64)
    got = [each[1](x, block=x, name="a") for each in (model, exact)]
    torch.testing.assert_close(*got, rtol=REORDERED, atol=REORDERED)
    assert compiler.graphs == 1


def test_a_construct_of_evaluation_leaves_training_compiled(
    exact: Transformer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaking, "in_training", False)
    model, inputs = compress(breaking(exact)), regression("cpu")[0]
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    with torch.no_grad(), pytest.warns(UserWarning, match="Breaking runs uncompiled"):
        assert torch.equal(model.eval()(inputs), exact(inputs))
    assert REORDERED < error(model.train(), exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1


def test_an_error_of_the_block_itself_is_raised_as_without(exact: Transformer, compiler: Compiler) -> None:
    model = compress(copy.deepcopy(exact))
    wrong = torch.zeros(4, 32, 65)
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[64\]") as caught:
        model.blocks[0](wrong)
    assert not isinstance(caught.value, torch._dynamo.exc.TorchDynamoException)
    # The error was no reason against the blocks.
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1


def test_evaluation_runs_compiled_blocks(exact: Transformer, compiler: Compiler) -> None:
    model, inputs = compress(copy.deepcopy(exact)).eval(), regression("cpu")[0]
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(inputs), exact(inputs), rtol=REORDERED, atol=REORDERED)
    # Dynamo guards whether an input is a view.
    assert 1 <= compiler.graphs <= 2


class Numbered(nn.Module):
    """A block that divides by a number of its own, and by one that the caller names."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(64, 64), number

    def forward(self, x: Tensor, name: str = "1") -> Tensor:
        return x + self.linear(x.sin()) / (self.number + int(name))


def numbered(numbers: Iterable[int]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    exact = nn.Sequential(*map(Numbered, numbers))
    return compress(copy.deepcopy(exact)), exact


def test_blocks_that_differ_in_a_number_have_graphs_of_their_own(compiler: Compiler) -> None:
    (model, exact), x = numbered(range(12)), torch.randn(16, 64)
    for _ in range(2):
        torch.testing.assert_close(model(x), exact(x), rtol=REORDERED, atol=REORDERED)
    assert compiler.graphs == 12 > torch._dynamo.config.recompile_limit


def test_a_block_that_is_compiled_for_each_call_is_not_compiled_forever(compiler: Compiler) -> None:
    (model, exact), x = numbered([0] * 4), torch.randn(16, 64)
    limit = torch._dynamo.config.recompile_limit
    for call in range(1, 21):
        # A string is a constant of the graph.
        expected = exact[0](x, str(call))
        refused = pytest.warns(UserWarning, match="Numbered runs uncompiled: FailOnRecompileLimitHit")
        with refused if call == limit + 1 else contextlib.nullcontext():
            got = model[0](x, str(call))
        torch.testing.assert_close(got, expected, rtol=REORDERED, atol=REORDERED)
    assert compiler.graphs == limit


def test_a_skipped_block_runs_eagerly_and_exactly(exact: Transformer, compiler: Compiler) -> None:
    model = compress(copy.deepcopy(exact), skip=["blocks.1"])
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    kept = {tensor.kept for tensor in pyactcomp.report(model).tensors if tensor.module.startswith("blocks.1.")}
    assert kept
    assert None not in kept
    assert compiler.graphs == 1


@pytest.mark.parametrize(("skip", "graphs"), [([nn.Sequential], 1), (["blocks.1.mlp"], 2)], ids=str)
def test_a_skipped_module_in_a_block_is_kept(
    exact: Transformer, compiler: Compiler, skip: list[Any], graphs: int
) -> None:
    model, whole = compress(copy.deepcopy(exact), skip=skip), compress(copy.deepcopy(exact))
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == graphs
    step(whole)
    found = pyactcomp.report(model).graphs
    assert any(value.reason == "skipped" for graph in found for value in graph.saved)
    assert max(graph.after for graph in found) > pyactcomp.report(whole).graphs[0].after


def test_a_graph_around_the_model_holds_the_blocks(exact: Transformer, compiler: Compiler) -> None:
    model = compress(copy.deepcopy(exact))
    model.compile(fullgraph=True)
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1
    (graph,) = pyactcomp.report(model).graphs
    assert graph.name == "Transformer"


def test_blocks_that_the_user_compiled_stay_compiled(exact: Transformer, compiler: Compiler) -> None:
    model = copy.deepcopy(exact)
    for block in model.blocks:
        block.compile()
    own = [block._compiled_call_impl for block in model.blocks]
    compress(model)
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 1
    pyactcomp.decompress(model)
    assert [block._compiled_call_impl for block in model.blocks] == own


def test_a_checkpointed_block_is_compiled(exact: Transformer, compiler: Compiler) -> None:
    model = copy.deepcopy(exact)
    model.use_reentrant = False
    compress(model)
    assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert 1 <= compiler.graphs <= 2


@pytest.mark.parametrize("change", [nn.Module.eval, pyactcomp.decompress])
def test_a_checkpointed_block_runs_the_graph_of_its_first_run_again(
    exact: Transformer, compiler: Compiler, change: Callable[[nn.Module], object]
) -> None:
    model = copy.deepcopy(exact)
    model.use_reentrant = False
    compress(model)
    expected = step(model)
    model.zero_grad()
    inputs, targets = regression("cpu")
    loss = F.mse_loss(model(inputs), targets)
    change(model)
    modes = [module.training for module in model.modules()]
    loss.backward()
    assert relative_error(gradients(model), expected) == 0.0
    assert [module.training for module in model.modules()] == modes


def test_hooks_of_a_block_run_outside_of_its_graph(exact: Transformer, compiler: Compiler) -> None:
    model, seen = copy.deepcopy(exact), []

    def hook(*_: object) -> None:
        # Dynamo would end the graph here.
        torch._dynamo.graph_break()
        seen.append(1)

    for block in model.blocks:
        block.register_forward_hook(hook)
        block.register_full_backward_hook(hook)
    compress(model)
    assert REORDERED < error(model, exact) <= GRADIENT_BOUND
    assert len(seen) == 2 * len(model.blocks)
    assert compiler.graphs == 1


def test_everything_off_is_eager(exact: Transformer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compress(copy.deepcopy(exact))
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    assert error(model, exact) == 0.0
    assert compiler.graphs == 0


def flops(model: nn.Module, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        out = model(x)
    assert counter.get_total_flops() > 0
    return out


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "make_fx": lambda model, x: make_fx(model)(x)(x),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x[:, None])[:, 0],
    "dispatch mode": flops,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_other_tracers_and_modes_see_eager_blocks(name: str, compiler: Compiler) -> None:
    torch.manual_seed(0)
    exact, x = nn.Sequential(pair(64), pair(64)), torch.randn(16, 64)
    assert torch.equal(CALLS[name](compress(copy.deepcopy(exact)), x), exact(x))
    assert compiler.graphs == 0


def test_threads_share_the_graph(exact: Transformer, compiler: Compiler) -> None:
    model, inputs = compress(copy.deepcopy(exact)), regression("cpu")[0]
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda _: model(inputs), range(8)))
    expected = exact(inputs)
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=REORDERED, atol=REORDERED)
    assert 1 <= compiler.graphs <= 4


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("order", ["shard, compress", "compress, shard", "compress, replicate"])
@pytest.mark.usefixtures("process_group")
def test_sharded_and_replicated_blocks_share_the_graph(exact: Transformer, compiler: Compiler, order: str) -> None:
    model = copy.deepcopy(exact)
    called: nn.Module = model
    for change in order.split(", "):
        if change == "compress":
            compress(model)
        elif change == "replicate":
            called = DistributedDataParallel(model)
        else:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
    for _ in range(2):
        step(called)
    got = {name: getattr(grad, "to_local", lambda grad=grad: grad)() for name, grad in gradients(model).items()}
    assert REORDERED < relative_error(got, step(exact)) <= GRADIENT_BOUND
    assert compiler.graphs == len(pyactcomp.report(model).graphs) == 1


def test_verify_compares_with_the_same_blocks_without_compression(exact: Transformer, compiler: Compiler) -> None:
    model = compress(copy.deepcopy(exact))
    inputs, targets = regression("cpu")
    found = pyactcomp.verify(model, inputs, lambda output: F.mse_loss(output, targets))
    assert REORDERED < found.error <= GRADIENT_BOUND
    assert found.loss_exact == found.loss_compressed
    # Without compression, lossless, and in codes.
    assert compiler.graphs == 3


@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_one_line_tells_of_a_compilation_that_takes_long(
    exact: Transformer,
    compiler: Compiler,
    wait: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(blocks, "_PATIENCE_S", wait)
    model = compress(copy.deepcopy(exact))
    with caplog.at_level(logging.WARNING):
        step(model)
        step(model)
    lines = [record.getMessage() for record in caplog.records if record.name == "pyactcomp"]
    assert len(lines) == (wait == 0.0)
    assert all("torch.compile compiles Block" in line for line in lines)


def test_this_torch_cannot_be_asked_to_compile(
    exact: Transformer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["pyactcomp.compress"], "reason_unavailable", lambda: "torch 9 has no name")
    with pytest.warns(UserWarning, match="compile_blocks=True compiles nothing: torch 9 has no name"):
        model = compress(copy.deepcopy(exact))
    assert 0.0 < error(model, exact) <= GRADIENT_BOUND
    assert compiler.graphs == 0


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (perceptron, {}, "found no block to compile in this Sequential: at least two modules .* Drop compile_blocks"),
        (lambda: Transformer(1), {}, "found no block to compile in this Transformer"),
        (Transformer, {"skip": ["blocks"]}, "found no block to compile in this Transformer: .* not skipped"),
        (Transformer, {"rounding": "stochastic"}, "compile_blocks=True .*rounding='stochastic'"),
        (Transformer, {"impl": "cpu"}, "compile_blocks=True .*impl='cpu'"),
    ],
)
def test_bad_input_changes_nothing(build: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    model = build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        compress(model, **options)
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def pair(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(pair() for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: nn.ModuleList([pair(), pair()]), ["0", "1"]),
        (lambda: nn.Sequential(pair(), pair(4), pair()), ["0", "2"]),
        (lambda: nn.ModuleList([pair(), pair(4)]), []),
        (lambda: nn.ModuleList([pair(), pair().double()]), []),
        (lambda: nn.ModuleDict({"a": pair(), "b": pair()}), ["a", "b"]),
        (lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), []),
        # Lists in a list have no forward.
        (lambda: nn.ModuleList([nn.ModuleList([pair(), pair()]), nn.ModuleList([pair(), pair()])]), 4),
        # The outermost block counts; stages of different depth are none.
        (lambda: nn.ModuleList([Stage(2), Stage(2)]), ["0", "1"]),
        (lambda: nn.ModuleList([Stage(2), Stage(3)]), 5),
        (lambda: nn.ModuleList([Stage(1), pair()]), []),
    ],
)
def test_blocks_are_found_by_class_and_structure(build: Callable[[], nn.Module], found: list[str] | int) -> None:
    model = build()
    names = [name for name, module in model.named_modules() if module in repeating_blocks(model)]
    assert (len(names) if isinstance(found, int) else names) == found


def test_a_block_whose_forward_was_replaced_is_left_alone(exact: Transformer) -> None:
    exact.blocks[1].forward = functools.partial(Block.forward, exact.blocks[1])
    assert set(repeating_blocks(exact)) == {exact.blocks[0], exact.blocks[2]}


@pytest.mark.filterwarnings("ignore:a graph compiled by torch.compile runs under")
@pytest.mark.parametrize("skip", [["blocks"], ["blocks.0"]], ids=str)
def test_a_compiled_block_inside_a_skipped_module_is_kept(
    exact: Transformer, compiler: Compiler, skip: list[str]
) -> None:
    model = copy.deepcopy(exact)
    model.blocks[0].compile()
    pyactcomp.compress(model, min_bytes=MIN_BYTES, skip=skip)
    step(model)
    assert not pyactcomp.report(model).graphs
