"""compress(compile_blocks=True): which projections beside the blocks are compiled, and when."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, MIN_BYTES, WIDTH, Block, gradients, relative_error

import pyactcomp
from pyactcomp.compiled import marks, projections
from pyactcomp.compiled.projections import unaligned_projections

# torch's own: of tracing a block whose input has a grad_fn, and inductor's advice.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
WORDS = 101


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def small_projections_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(projections, "_FEWEST", WIDTH * WORDS)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(model: nn.Module, device: str) -> dict[str, Tensor]:
    model.zero_grad()
    tokens = torch.randint(WORDS, (4, 32), generator=torch.Generator().manual_seed(0)).to(device)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((64, 101), True), ((101, 64), True), ((64, 104), False), ((64, 99), False), ((99, 65), False)],
    ids=str,
)
def test_large_projections_with_unaligned_rows_are_found(sizes: tuple[int, int], found: bool) -> None:
    model = nn.Sequential(nn.Linear(*sizes), nn.ReLU())
    assert (model[0] in unaligned_projections(model, ())) is found
    assert not unaligned_projections(model, [model[0]])
    model[0].forward = functools.partial(nn.Linear.forward, model[0])
    assert not unaligned_projections(model, ())


def test_projections_of_another_class_stay() -> None:
    class Counted(nn.Linear):
        pass

    assert not unaligned_projections(nn.Sequential(Counted(64, 101)), ())


@pytest.mark.parametrize(
    ("device", "backend", "forced"),
    [("cpu", as_inductor, True), pytest.param("cuda", "inductor", False, marks=pytest.mark.gpu)],
)
def test_the_head_is_compiled_in_training_alone(
    device: str, backend: object, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:  # a CPU has no use for it; the rest is the same
        monkeypatch.setattr(marks, "pays", lambda module, args: module.training and torch.is_grad_enabled())
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    exact = Language().to(device)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES, compile_blocks=True)
    assert 0 < relative_error(step(model, device), step(exact, device)) <= GRADIENT_BOUND
    report = pyactcomp.report(model)
    assert [graph.name for graph in report.graphs] == ["Block", "Linear"]
    assert all(graph.after < 0.6 * graph.before for graph in report.graphs)
    # In evaluation the products are small, as one token's.
    model.eval()
    tokens = torch.arange(8, device=device).view(1, 8)
    assert torch.equal(model.head(model.embed(tokens)), exact.head(exact.embed(tokens)))
    pyactcomp.decompress(model)
    assert type(model.head) is nn.Linear


def test_on_a_cpu_the_head_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=as_inductor))
    model = pyactcomp.compress(Language(), min_bytes=MIN_BYTES, compile_blocks=True)
    step(model, "cpu")
    assert [graph.name for graph in pyactcomp.report(model).graphs] == ["Block"]


def test_a_skipped_head_and_one_inside_a_block_are_no_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_FEWEST", 1)
    model = Language()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 101), nn.ReLU(), nn.Linear(101, WIDTH)) for _ in "ab")
    pyactcomp.compress(model, min_bytes=MIN_BYTES, compile_blocks=True, skip=["head"])
    compiled = [module for module in model.modules() if (mark := marks.compiled_mark(type(module))) and mark.compiled]
    assert compiled == list(model.blocks)
