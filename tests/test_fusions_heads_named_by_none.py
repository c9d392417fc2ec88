"""``fuse_head=True`` for a model that names no head: its forward takes targets and calls ``cross_entropy``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, MIN_BYTES, Block, gradients, relative_error

import pyactcomp
from pyactcomp.fusions.head import head_of

VOCABULARY, WIDTH, BATCH, LENGTH = 384, 64, 4, 32
EPS = torch.finfo(torch.float32).eps


class GPT(nn.Module):
    """The layout of nanoGPT: logits and loss in one forward, only the last row of logits without targets."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        # As many positions as a projection has outputs, which is no head.
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(WIDTH, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Flat(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Shifting(GPT):
    """Reads the logits before the loss."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 1:].reshape(-1, VOCABULARY), targets[:, 1:].flatten())


class Outside(GPT):
    """Leaves the loss to the caller."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return targets


def built(cls: type[GPT] = GPT, **options: Any) -> GPT:
    torch.manual_seed(0)
    return cls(**options)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_same_step(model: nn.Module, of: nn.Module, exact: GPT) -> pyactcomp.Report:
    """Compare a step with that of ``exact``; ``of`` is what ``compress`` returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits, loss = model(*tokens())
    _, expected = exact(*tokens())
    assert logits is None
    torch.testing.assert_close(loss, expected, rtol=(BATCH * LENGTH + VOCABULARY) * EPS, atol=0.0)
    for each in (loss, expected):
        each.backward()
    assert 0.0 < relative_error(gradients(getattr(of, "_orig_mod", of)), gradients(exact)) <= GRADIENT_BOUND
    report = pyactcomp.report(of)
    logits_bytes = 4 * BATCH * LENGTH * VOCABULARY
    saved = [tensor.saved_bytes for tensor in report.tensors] + [v.before for g in report.graphs for v in g.saved]
    assert max(saved) < logits_bytes
    return report


@pytest.mark.parametrize("cls", [GPT, Flat])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_of_a_forward_with_targets_is_taken_in_chunks(cls: type[GPT], tied: bool) -> None:
    exact = built(cls, tied=tied)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES, fuse_head=True)
    assert ("", "Head") in assert_same_step(model, model, exact).fused
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Without targets, and in evaluation, the model runs as it is.
        assert model(tokens()[0])[0].shape == (BATCH, 1, VOCABULARY)
        logits, loss = model.eval()(*tokens())
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert torch.equal(loss, exact.eval()(*tokens())[1])


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_model_returns_no_logits_and_reports(compiled_first: bool, fresh_compiler: None) -> None:
    exact = built()
    model = copy.deepcopy(exact)
    options: dict[str, Any] = {"min_bytes": MIN_BYTES, "fuse_head": True}
    if compiled_first:
        step = of = pyactcomp.compress(torch.compile(model, backend=as_inductor), **options)
    else:
        of = pyactcomp.compress(model, **options)
        step = torch.compile(of, backend=as_inductor)
    report = assert_same_step(step, of, exact)
    assert report.graphs
    assert report.stored_bytes < 0.5 * report.unique_bytes


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(Shifting, "__getitem__ took the logits before"), (Outside, "no torch.nn.functional.cross_entropy took")],
)
def test_a_forward_that_computes_its_logits_is_right_and_says_so_once(cls: type[GPT], reason: str) -> None:
    exact = built(cls)
    model = pyactcomp.compress(copy.deepcopy(exact), fuse=False, min_bytes=MIN_BYTES, fuse_head=True)
    with pytest.warns(UserWarning, match=f"fuse_head=True has no effect in the forward of {cls.__name__}: {reason}"):
        got = model(*tokens())
    expected = exact(*tokens())
    for ours, theirs in zip(got, expected, strict=True):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(*tokens())


def test_head_is_the_one_that_the_model_names_or_that_shares_a_weight_or_the_last() -> None:
    model, tied = built(tied=False), built()
    assert head_of(model) is model.lm_head
    for each in (model, tied):
        each.after = nn.Linear(2, 2)
    assert head_of(tied) is tied.lm_head
    assert head_of(model) is model.after
    model.get_output_embeddings = lambda: model.lm_head
    assert head_of(model) is model.lm_head
