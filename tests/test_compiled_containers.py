"""Blocks in whatever holds them, compiled in whatever order: their graphs save codes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, MIN_BYTES, Block, Transformer, gradients, regression, relative_error

import pyactcomp
from pyactcomp.compiled.blocks import blocks_of, repeating_blocks

# torch's own: of tracing a block whose input has a grad_fn.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

BLOCKS = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Shelf(nn.Module):
    """A user's own collection: holds blocks and has no forward."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            self.add_module(f"book{number}", block)


class Stack(Shelf):
    """Holds blocks as attributes, and calls them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


HOLDERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "ModuleList": nn.ModuleList,
    "Sequential": lambda blocks: nn.Sequential(*blocks),
    "ModuleDict": lambda blocks: nn.ModuleDict({f"layer{i}": block for i, block in enumerate(blocks)}),
    "lists in a list": lambda blocks: nn.ModuleList([nn.ModuleList(blocks[:1]), nn.ModuleList(blocks[1:])]),
    "lists in a dict": lambda blocks: nn.ModuleDict({"a": nn.ModuleList(blocks[:2]), "b": nn.ModuleList(blocks[2:])}),
    "own collection": Shelf,
    "attributes": Stack,
}


class Held(Transformer):
    """The transformer with its blocks in another collection."""

    def __init__(self, hold: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__(BLOCKS)
        blocks = list(self.blocks)
        del self.blocks
        self.hold = hold(blocks)
        self.order = [name for name, module in self.named_modules() if isinstance(module, Block)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for name in self.order:
            x = self.get_submodule(name)(x)
        return self.head(x)


def in_place(model: nn.Module) -> None:
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        block.compile(backend=as_inductor, fullgraph=True)


def wrapped(model: nn.Module) -> None:
    for holder in list(model.modules()):
        for name, block in list(holder.named_children()):
            if isinstance(block, Block):
                setattr(holder, name, torch.compile(block, backend=as_inductor, fullgraph=True))


def step(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    inputs, targets = regression("cpu")
    F.mse_loss(model(inputs), targets).backward()
    return {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(model).items()}


@pytest.mark.parametrize(
    ("holder", "compile_each", "when"),
    [
        *((holder, in_place, "after") for holder in HOLDERS),
        *(("ModuleDict", in_place, when) for when in ("before", "after a step")),
        *(("ModuleDict", wrapped, when) for when in ("before", "after", "after a step")),
    ],
)
def test_graphs_of_blocks_save_codes_in_every_collection(
    holder: str, compile_each: Callable[[nn.Module], None], when: str
) -> None:
    torch.manual_seed(0)
    exact = Held(HOLDERS[holder])
    model = copy.deepcopy(exact)
    if when == "before":
        compile_each(model)
    pyactcomp.compress(model, min_bytes=MIN_BYTES)
    if when == "after a step":
        step(model)
    if when != "before":
        compile_each(model)
    assert relative_error(step(model), step(exact)) <= GRADIENT_BOUND
    report = pyactcomp.report(model)
    assert report.graphs
    assert all(graph.after < 0.6 * graph.before for graph in report.graphs)
    if when != "after a step":  # which is the one reported
        # Beside what the graphs save there is the model's input, and the small input of the head.
        values = [value for graph in report.graphs for value in graph.saved]
        runs = len(report.tensors) / len(values)
        assert report.stored_bytes < 0.6 * report.unique_bytes, runs


@pytest.mark.parametrize("holder", HOLDERS)
def test_compile_blocks_finds_the_blocks_in_every_collection(holder: str) -> None:
    model = Held(HOLDERS[holder])
    every = {module for module in model.modules() if isinstance(module, Block)}
    assert len(every) == BLOCKS
    assert set(repeating_blocks(model)) == set(blocks_of(model)) == every
    assert len(set(repeating_blocks(model).values())) == 1
    assert not repeating_blocks(model, {model.hold})
    last = list(every)[-1]
    assert set(repeating_blocks(model, {last})) == every - {last}


class Towers(nn.Module):
    """Two encoders side by side, as attributes: each has its own list of blocks. A loop calls them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = Transformer(), Transformer()


def test_encoders_that_hold_blocks_are_no_blocks() -> None:
    model = Towers()
    assert set(repeating_blocks(model)) == {*model.queries.blocks, *model.keys.blocks}


class Leaf(nn.Module):
    """Without children, and so no block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * self.weight) @ torch.ones(64, 64)


@pytest.mark.parametrize("skip", [(), ("1",)])
def test_a_module_that_is_no_block_is_found_once_compiled(skip: Any) -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), Leaf()), min_bytes=MIN_BYTES, skip=skip)
    model[1].compile(backend=as_inductor, fullgraph=True)
    x = torch.randn(256, 64)
    if skip:
        with pytest.warns(UserWarning, match="a graph compiled by torch.compile runs under"):
            model(x).sum().backward()
        assert not pyactcomp.report(model).graphs
    else:
        model(x).sum().backward()
        (graph,) = pyactcomp.report(model).graphs
        assert graph.after < 0.6 * graph.before
