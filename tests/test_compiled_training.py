"""Works with: the usual ways to train, inside and around torch.compile, its graphs compressed."""

from __future__ import annotations

import copy
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor, held_by_graphs
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from works_with import (
    GRADIENT_BOUND,
    MIN_BYTES,
    WIDTH,
    Block,
    Transformer,
    assert_losses_agree,
    gradients,
    regression,
    relative_error,
)

import pyactcomp
from pyactcomp.compiled.graphs import GraphRecord

pytestmark = [
    pytest.mark.slow,
    # Torch's own: of tracing a block whose input has a grad_fn, and Inductor's advice.
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

Gradients = dict[str, Tensor]
Graphs = tuple[GraphRecord, ...]
Options = dict[str, Any] | None
Compile = Callable[[nn.Module], None]

LOSSLESS: Options = {"mode": "lossless", "min_bytes": 1}
INT8: Options = {"min_bytes": MIN_BYTES}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: nn.Module) -> None:
    model.compile(backend=as_inductor, fullgraph=True)


def in_parts(model: nn.Module) -> None:
    model.compile(backend=as_inductor)


def blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend=as_inductor, fullgraph=True)


WHOLE_OR_BLOCKS = [pytest.param(whole, id="model"), pytest.param(blocks, id="blocks")]


def transformer(blocks: int = 1, kind: type[Transformer] = Transformer) -> Transformer:
    torch.manual_seed(0)
    return kind(blocks)


def loss_of(model: nn.Module, batch: int = 4) -> Tensor:
    inputs, targets = regression("cpu", batch)
    return F.mse_loss(model(inputs).float(), targets)


def step_of(model: nn.Module) -> None:
    loss_of(model).backward()


def trained(
    model: nn.Module, step: Callable[[nn.Module], object], options: Options, compiled: Compile = whole
) -> tuple[Gradients, Graphs]:
    """Return gradients and graphs of one step of a compiled copy, compressed unless ``options`` is None."""
    torch.compiler.reset()
    model = copy.deepcopy(model)
    if options is not None:
        pyactcomp.compress(model, **options)
    compiled(model)
    torch.manual_seed(1)
    step(model)
    return gradients(model), () if options is None else pyactcomp.report(model).graphs


def before(graphs: Graphs) -> int:
    return sum(graph.before for graph in graphs)


def after(graphs: Graphs) -> int:
    return sum(graph.after for graph in graphs)


def assert_agrees(
    model: nn.Module, step: Callable[[nn.Module], object] = step_of, compiled: Compile = whole, most: float = 0.75
) -> Graphs:
    """Compare a step of compressed graphs with that of the graphs alone; return the graphs in int8.

    The graphs may save ``most`` of the bytes.
    """
    exact, _ = trained(model, step, None, compiled)
    lossless, graphs = trained(model, step, LOSSLESS, compiled)
    assert graphs
    assert relative_error(lossless, exact) == 0.0
    int8, graphs = trained(model, step, INT8, compiled)
    assert 0.0 < relative_error(int8, exact) <= GRADIENT_BOUND
    # Rows of 32 scores are shorter than a group, so attention's probabilities stay exact.
    assert after(graphs) < most * before(graphs)
    return graphs


@pytest.mark.parametrize(("dtype", "compiled"), [(torch.bfloat16, whole), (torch.float16, blocks)])
def test_autocast(dtype: torch.dtype, compiled: Compile) -> None:
    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype):
            step_of(model)

    assert_agrees(transformer(2 if compiled is blocks else 1), step, compiled)


def test_gradient_accumulation() -> None:
    def step(model: nn.Module) -> None:
        inputs, targets = regression("cpu", 8)
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            F.mse_loss(model(x), y).backward()

    assert len(assert_agrees(transformer(), step)) == 1


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(self.dropout(x)))


@pytest.mark.parametrize("compiled", WHOLE_OR_BLOCKS)
def test_dropout_draws_the_masks_of_the_graphs_alone(compiled: Compile) -> None:
    model = transformer()
    model.blocks = nn.ModuleList(Dropping() for _ in range(2))
    graphs = assert_agrees(model, step_of, compiled)
    masks = [value for graph in graphs for value in graph.saved if value.dtype is torch.bool and value.before > 1024]
    assert {value.form for value in masks} == {"bits"}


def test_a_graph_runs_backward_twice() -> None:
    def step(model: nn.Module) -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        once = gradients(model)
        model.zero_grad()
        loss.backward()
        assert relative_error(gradients(model), once) == 0.0

    assert_agrees(transformer(2), step, blocks)


def test_double_backward_raises_torchs_own_error() -> None:
    messages = []

    def step(model: nn.Module) -> None:
        found = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
        with pytest.raises(RuntimeError) as raised:
            torch.stack([g.square().sum() for g in found]).sum().backward()
        messages.append(str(raised.value))

    for options in (None, LOSSLESS, INT8):
        trained(transformer(), step, options)
    assert "double backward" in messages[0]
    assert messages == messages[:1] * 3


class Checkpointed(Transformer):
    """Checkpoints every other block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
        return self.head(x)


def test_checkpointing_inside_a_graph_keeps_less_than_either_alone() -> None:
    codes = trained(transformer(2), step_of, INT8)[1]
    both = assert_agrees(transformer(2, Checkpointed))
    assert after(both) < min(before(both), after(codes))


class Selective(Transformer):
    """Saves the results of matrix products and recomputes the rest."""

    def forward(self, x: Tensor) -> Tensor:
        def keep(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


def test_selective_checkpointing_inside_a_graph() -> None:
    (graph,) = assert_agrees(transformer(kind=Selective))
    coded = [value.operator for value in graph.saved if value.form == "codes"]
    assert {"mm", "addmm"} & set(coded)


def test_an_activation_memory_budget_and_codes_multiply() -> None:
    import torch._functorch.config as functorch

    model = transformer()
    exact, _ = trained(model, step_of, None)
    _, plain = trained(model, step_of, LOSSLESS)
    _, codes = trained(model, step_of, INT8)
    with functorch.patch(activation_memory_budget=0.5):
        _, budget = trained(model, step_of, LOSSLESS)
        found, both = trained(model, step_of, INT8)
    assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND
    assert after(budget) < after(plain)
    assert after(both) < min(after(codes), after(budget))


def test_batches_of_other_sizes_compile_once_more() -> None:
    compilations = []

    def step(model: nn.Module) -> None:
        counters.clear()
        for batch in (4, 6, 9):
            loss_of(model, batch).backward()
        compilations.append(counters["stats"]["unique_graphs"])

    graphs = assert_agrees(transformer(), step, in_parts)
    assert compilations == [2, 2, 2]
    assert len(graphs) == 2


class BrokenInALoop(Transformer):
    """Breaks the graph between blocks, inside a loop: Dynamo compiles the blocks alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


class BrokenInLine(Transformer):
    """Breaks the graph between blocks: Dynamo compiles each part of the forward as a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](F.gelu(self.embed(x)))
        torch._dynamo.graph_break()
        x = F.gelu(self.blocks[1](x))
        torch._dynamo.graph_break()
        x = F.gelu(x * x)
        torch._dynamo.graph_break()
        return self.head(F.gelu(x))


@pytest.mark.parametrize(
    ("kind", "compiled", "graphs"),
    [(BrokenInALoop, in_parts, 2), (BrokenInALoop, blocks, 2), (BrokenInLine, in_parts, 4)],
)
def test_graphs_broken_between_blocks_are_compressed_and_nothing_is_packed_twice(
    kind: type[Transformer], compiled: Compile, graphs: int
) -> None:
    def step(model: nn.Module) -> None:
        loss = loss_of(model)
        found.append(held_by_graphs(loss, model))
        reported.append(pyactcomp.report(model) if len(found) > 1 else None)
        loss.backward()

    found: list[tuple[int, int]] = []
    reported: list[Any] = []
    records = assert_agrees(transformer(2, kind), step, compiled)
    held, ran = found[-1]
    assert ran == graphs
    if kind is BrokenInALoop:  # the blocks are alike and run one graph
        assert held == graphs * after(records)
    else:  # a part without a module keeps its input
        assert len(records) == graphs - 1
        assert held == after(records) + 4 * 32 * WIDTH * 4
    # Hooks see what graphs save, and keep all of it: besides, they pack what runs outside of graphs, here the head's
    # input. Each run of a graph is reported; of a model without anything outside, each graph.
    packed = Counter((tensor.shape, tensor.dtype) for tensor in reported[-1].tensors if tensor.kept is None)
    values = [value for record in records for value in record.saved if value.form != "kept"]
    of_graphs = Counter((value.shape, str(value.dtype).removeprefix("torch.")) for value in values)
    for key in of_graphs:
        of_graphs[key] *= graphs if compiled is blocks else 1
    assert packed - of_graphs == (Counter({((128, WIDTH), "float32"): 1}) if compiled is blocks else Counter())
    assert of_graphs - packed == Counter()


def test_no_broken_graph_is_stale() -> None:
    model = transformer(2, BrokenInLine)
    exact, _ = trained(model, step_of, None, in_parts)
    in_parts(model)
    errors = []
    for change in 2 * (lambda: pyactcomp.compress(model, **INT8), lambda: pyactcomp.decompress(model)):
        change()
        model.zero_grad()
        step_of(model)
        errors.append(relative_error(gradients(model), exact))
    assert errors[1] == errors[3] == 0.0
    assert errors[0] == errors[2] <= GRADIENT_BOUND
    assert errors[0] > 0.0


class Wrapper(nn.Module):
    """Calls a module from a forward that Dynamo does not trace, as wrappers for distributed training do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_the_graph_of_a_module_inside_a_wrapper_is_compressed() -> None:
    (graph,) = assert_agrees(Wrapper(transformer()), step_of, in_parts)
    assert graph.name == "Transformer"


class Mutating(nn.Module):
    """Writes to an input, a buffer and a result; returns a view of an input, a view of a result, and a result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.count += 1
        hidden = F.gelu(self.up(x * 2))
        state.add_(hidden.detach().mean(0))
        hidden.mul_(state)
        return x.view(-1), hidden.transpose(0, 1), self.down(hidden)


def test_inputs_written_to_and_outputs_that_alias() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH)
    states = []

    def step(model: nn.Module) -> None:
        state = torch.zeros(4 * WIDTH)
        same, view, y = model(x, state)
        (view.square().mean() + y.square().mean()).backward()
        assert same.data_ptr() == x.data_ptr()
        assert view.stride() == (1, 4 * WIDTH)
        assert model.count == 1
        states.append(state)

    assert_agrees(Mutating(), step)
    assert all(torch.equal(state, states[0]) for state in states)


def test_compiled_autograd_runs_the_backward_of_compressed_graphs() -> None:
    def step(model: nn.Module) -> None:
        counters.clear()
        with compiled_autograd._enable(torch.compile(backend=as_inductor, fullgraph=True)):
            step_of(model)
        assert counters["compiled_autograd"]["captures"] == 1

    exact, _ = trained(transformer(), step, None)
    found, graphs = trained(transformer(), step, INT8)
    assert after(graphs) < 0.75 * before(graphs)
    assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND


def test_evaluation_mode_keeps_what_graphs_save() -> None:
    def step(model: nn.Module) -> None:
        step_of(model.eval())

    exact, _ = trained(transformer(), step, None)
    found, graphs = trained(transformer(), step, INT8)
    assert not graphs
    assert relative_error(found, exact) == 0.0


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_compressed_model_gives_the_models_results(strict: bool) -> None:
    model = transformer()
    inputs, _ = regression("cpu")
    compressed = pyactcomp.compress(copy.deepcopy(model), min_bytes=MIN_BYTES)
    exported = torch.export.export(compressed, (inputs,), strict=strict)
    plain = torch.export.export(model, (inputs,), strict=strict)
    assert [node.target for node in exported.graph.nodes] == [node.target for node in plain.graph.nodes]
    assert torch.equal(exported.module()(inputs), plain.module()(inputs))
    step_of(compressed)
    report = pyactcomp.report(compressed)
    assert report.stored_bytes < report.unique_bytes


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let the backend "inductor" partition without code generation, since trainers take a backend by its name."""
    import torch._inductor.compile_fx as inductor

    found = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, **_: as_inductor(graph, inputs))
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the Trainer sets it, and leaves it set
    found.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield found
    found.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("accelerate")
def test_trainer_compiles_a_compressed_model(tmp_path: Path) -> None:
    trainers = importlib.import_module("trainers")  # needs transformers and accelerate
    callback = importlib.import_module("pyactcomp.integrations.transformers").CompressionCallback(**INT8)
    got = trainers.trained(tmp_path / "ours", callback, bf16=True, torch_compile=True)
    torch.compiler.reset()
    assert_losses_agree(got, trainers.trained(tmp_path / "exact", None, bf16=True, torch_compile=True))
    (graph,) = callback.report.graphs
    assert graph.after < 0.75 * graph.before


@pytest.mark.parametrize("regional", [False, True])
def test_accelerate_compiles_a_compressed_model(accelerate: Any, regional: bool) -> None:
    from works_with_text import built, llama, text

    from pyactcomp.integrations.accelerate import prepare

    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)

    def step(options: Options) -> tuple[Gradients, Graphs]:
        torch.compiler.reset()
        model = built(llama)
        prepared = accelerator.prepare(model) if options is None else prepare(accelerator, model, **options)
        accelerator.backward(prepared(**text("cpu")).loss)
        return gradients(model), () if options is None else pyactcomp.report(model).graphs

    exact, _ = step(None)
    lossless, _ = step(LOSSLESS)
    assert relative_error(lossless, exact) == 0.0
    int8, graphs = step(INT8)
    assert 0.0 < relative_error(int8, exact) <= GRADIENT_BOUND
    # By regions also what is compiled beside the blocks has a graph.
    assert len(graphs) == 1 or regional
    assert after(graphs) < 0.75 * before(graphs)
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_a_frozen_base_under_autocast() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from works_with_text import built, llama, text

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1)
    base = built(llama)
    base.model.layers = base.model.layers[:1]
    model = peft.get_peft_model(base, config).train()

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(**text("cpu")).loss.backward()
        assert all("lora_" in name for name in gradients(model))

    (graph,) = assert_agrees(model, step, in_parts, most=0.72)
    # The stream begins with the frozen embedding, which has no gradient: its sums are packed, and the tokens not kept.
    assert not [v for v in graph.saved if v.form == "kept" and v.shape[-1:] == (64,) and v.dtype is torch.float32]
    frozen = {tuple(sorted(p.shape)) for p in model.parameters() if not p.requires_grad and p.dim() == 2}
    frozen.remove((64, 128))  # the embedding's; that of 128 positions too
    packed = {tuple(sorted(value.shape)) for value in graph.saved if value.form != "kept"}
    assert packed
    assert not packed & frozen


@pytest.mark.gpu
# Torch's own, where its tree manager captures an empty graph to begin with.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_cuda_graph_trees_replay_compressed_graphs(compiled: str) -> None:
    model = transformer(2).cuda()
    inputs, targets = regression("cuda")

    def steps(options: Options) -> tuple[list[Gradients], Graphs]:
        torch.compiler.reset()
        twin = copy.deepcopy(model)
        if options is not None:
            pyactcomp.compress(twin, **options)
        for module in [twin] if compiled == "model" else twin.blocks:
            module.compile(mode="reduce-overhead")
        found = []
        for _ in range(3):  # warm up, record, replay
            torch.compiler.cudagraph_mark_step_begin()
            twin.zero_grad()
            F.mse_loss(twin(inputs), targets).backward()
            found.append(gradients(twin))
        return found, () if options is None else pyactcomp.report(twin).graphs

    exact, _ = steps(None)
    int8, graphs = steps(INT8)
    assert after(graphs) < 0.75 * before(graphs)
    for got, expected in zip(int8, exact, strict=True):
        assert 0.0 < relative_error(got, expected) <= GRADIENT_BOUND


def test_as_many_compressed_models_are_compiled_as_plain_ones() -> None:
    """Dynamo's limit of 8 graphs holds for a model, not for all compressed models of a process."""
    for _ in range(11):
        model = pyactcomp.compress(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), min_bytes=MIN_BYTES)
        compiled = torch.compile(model, backend=as_inductor, fullgraph=True)
        compiled(torch.randn(64, WIDTH)).square().sum().backward()
        assert len(pyactcomp.report(model).graphs) == 1
