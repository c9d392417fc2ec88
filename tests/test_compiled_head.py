"""``fuse_head=True`` in graphs: losses written with functions are taken in chunks, and no logits are saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor
from torch import Tensor, nn
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.compiled.graphs import GraphRecord

TOKENS, WIDTH, VOCABULARY = (4, 64), 128, 1000
# Rounding of logits' gradients to the dtype of the products, in another order; with int8 the body's codes add.
EXACT = {torch.float32: 1e-5, torch.bfloat16: 0.02}
# A mean over the tokens by halves, in another order: a rounding for each halving.
LOSS_BOUND = math.log2(math.prod(TOKENS)) * torch.finfo(torch.float32).eps

WAYS: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "view": lambda head, x, y: F.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1)),
    "float": lambda head, x, y: F.cross_entropy(head(x).float().reshape(-1, VOCABULARY), y.reshape(-1)),
    "flatten": lambda head, x, y: F.cross_entropy(head(x).flatten(0, 1), y.flatten()),
    "shift": lambda head, x, y: F.cross_entropy(
        head(x)[:, :-1, :].contiguous().view(-1, VOCABULARY), y[:, 1:].reshape(-1)
    ),
    "shift by ellipsis": lambda head, x, y: F.cross_entropy(
        head(x)[..., :-1, :].flatten(0, 1).float(), y[..., 1:].flatten()
    ),
    "sum": lambda head, x, y: F.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1), reduction="sum") / 7,
    "ignored": lambda head, x, y: F.cross_entropy(
        head(x).view(-1, VOCABULARY), y.view(-1).where(y.view(-1) > 500, 3), ignore_index=3
    ),
    "module": lambda head, x, y: nn.CrossEntropyLoss()(head(x).view(-1, VOCABULARY), y.view(-1)),
    "function": lambda head, x, y: F.cross_entropy(F.linear(x, head.weight).view(-1, VOCABULARY), y.view(-1)),
}
# Losses left as they are, and the reason.
OTHERS: dict[str, tuple[Callable[[nn.Linear, Tensor, Tensor], Tensor], str]] = {
    "smoothed": (
        lambda head, x, y: F.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1), label_smoothing=0.1),
        "label_smoothing=0.1",
    ),
    "capped": (
        lambda head, x, y: F.cross_entropy(head(x).tanh().view(-1, VOCABULARY), y.view(-1)),
        "tanh is between the head and the loss",
    ),
    "columns": (
        lambda head, x, y: F.cross_entropy(head(x)[..., :500].reshape(-1, 500), y.view(-1) % 500),
        "is between the head and the loss",
    ),
    "read twice": (
        lambda head, x, y: (lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1)) + logits.mean())(
            head(x)
        ),
        "2 readers",
    ),
    "classes first": (
        lambda head, x, y: F.cross_entropy(head(x).transpose(1, 2), y),
        "does not take rows of logits",
    ),
}


class Model(nn.Module):
    def __init__(self, way: Callable[[nn.Linear, Tensor, Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.head, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias), way

    def forward(self, tokens: Tensor) -> Tensor:
        return self.way(self.head, F.gelu(self.up(self.embedding(tokens))), tokens)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _step(model: Model, autocast: bool, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, TOKENS).to(device)
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(tokens)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _off(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))


def _compressed(model: Model) -> Model:
    model.compile(backend=as_inductor)
    pyactcomp.compress(model, min_bytes=4096, fuse_head=True)
    return model


def _largest(model: nn.Module) -> int:
    records: tuple[GraphRecord, ...] = tuple(pyactcomp.report(model).graphs)
    assert records
    return max(value.before for record in records for value in record.saved)


@pytest.mark.parametrize(
    ("way", "form"),
    [
        *((way, "float32") for way in WAYS),
        *((way, form) for way in ("float", "shift") for form in ("autocast", "bfloat16")),
    ],
)
def test_a_loss_in_a_graph_is_taken_in_chunks(way: str, form: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    model = Model(WAYS[way], bias=way in ("view", "shift") and form != "bfloat16").to(dtype)
    expected_loss, expected = _step(model, form == "autocast")
    loss, got = _step(_compressed(model), form == "autocast")
    assert loss.dtype is expected_loss.dtype
    exact = EXACT[torch.float32 if form == "float32" else torch.bfloat16]
    assert abs(float(loss / expected_loss) - 1) <= exact
    # The gradients of the head have no codes behind them.
    heads = [k for k, name in enumerate(name for name, _ in model.named_parameters()) if name.startswith("head")]
    assert _off([got[k] for k in heads], [expected[k] for k in heads]) <= max(
        exact, GRADIENT_BOUND if form != "float32" else 0
    )
    assert _off(got, expected) <= GRADIENT_BOUND + (exact if form != "float32" else 0)
    rows = TOKENS[0] * (TOKENS[1] - ("shift" in way))
    # Nothing as large as the logits in 8 bits, but the gradient of the head's weight.
    assert _largest(model) <= max(rows * VOCABULARY, VOCABULARY * WIDTH * 4)


@pytest.mark.parametrize("way", OTHERS)
def test_another_loss_is_left_with_the_reason(way: str) -> None:
    torch.manual_seed(0)
    function, reason = OTHERS[way]
    model = Model(function, bias=False)
    expected_loss, expected = _step(model, False)
    with pytest.warns(UserWarning, match=f"computes the logits of the whole batch: .*{reason}"):
        loss, got = _step(_compressed(model), False)
    assert torch.allclose(loss, expected_loss, rtol=LOSS_BOUND, atol=0)
    assert _off(got, expected) <= GRADIENT_BOUND


def test_logits_that_a_graph_returns_are_computed() -> None:
    class Returning(Model):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = self.head(self.up(self.embedding(tokens)))
            return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)), logits

    torch.manual_seed(0)
    model = Returning(WAYS["view"], bias=False)
    tokens = torch.randint(VOCABULARY, TOKENS)
    expected_loss, expected = model(tokens)
    model.compile(backend=as_inductor)
    pyactcomp.compress(model, fuse_head=True)
    with pytest.warns(UserWarning, match="the graph returns the logits"):
        loss, logits = model(tokens)
    assert torch.equal(logits, expected)
    assert torch.allclose(loss, expected_loss, rtol=LOSS_BOUND, atol=0)


def test_a_model_of_transformers_returns_no_logits_and_saves_none() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))
    tokens = torch.randint(VOCABULARY, TOKENS)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(input_ids=tokens, labels=tokens).loss, parameters)
    pyactcomp.compress(model, min_bytes=4096, fuse_head=True)
    model.compile(backend=as_inductor)
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits is None
    assert _off(list(torch.autograd.grad(output.loss, parameters)), list(expected)) <= GRADIENT_BOUND
    assert _largest(model) <= max(tokens.numel() * VOCABULARY, VOCABULARY * 128 * 4)
    # In evaluation the logits are there.
    assert model.eval()(input_ids=tokens).logits.shape == (*TOKENS, VOCABULARY)


def test_without_the_option_a_graph_keeps_its_loss() -> None:
    torch.manual_seed(0)
    model = Model(WAYS["view"], bias=False)
    model.compile(backend=as_inductor)
    pyactcomp.compress(model, min_bytes=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, False)
    assert _largest(model) >= TOKENS[0] * TOKENS[1] * VOCABULARY * 4


def test_a_model_without_a_head_is_to_be_compiled_first() -> None:
    with pytest.raises(ValueError, match="compile the module with the loss before compress"):
        pyactcomp.compress(Model(WAYS["view"], bias=False), fuse_head=True)


def test_a_wrapper_around_a_compiled_model_takes_the_option_too() -> None:
    model = nn.Sequential(torch.compile(Model(WAYS["view"], bias=False), backend=as_inductor))
    assert pyactcomp.compress(model, fuse_head=True) is model


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["view", "shift"])
def test_a_loss_in_generated_code_is_taken_in_chunks(way: str) -> None:
    torch.manual_seed(0)
    model = Model(WAYS[way], bias=True).cuda()
    expected_loss, expected = _step(model, True, "cuda")
    model.compile()
    pyactcomp.compress(model, min_bytes=4096, fuse_head=True)
    loss, got = _step(model, True, "cuda")
    assert abs(float(loss / expected_loss) - 1) <= EXACT[torch.bfloat16]
    assert _off(got, expected) <= GRADIENT_BOUND + EXACT[torch.bfloat16]
