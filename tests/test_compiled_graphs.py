"""Compressed graphs: gradients, bytes and reasons against the same graphs without compression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import backend, gradients, off
from compiled_blocks import Attention, Block, Llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.compiled import partitioner
from pyactcomp.compiled.context import digest_of_sources
from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.compiled.head import HeadPass
from pyactcomp.config import Config
from pyactcomp.readers import lookup

INT8 = Config(min_bytes=4096)
LOSSLESS = Config(mode="lossless", min_bytes=4096)


def _chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def _rows() -> Tensor:
    return torch.randn(4, 64, 128)


# Model, input, and the largest share of the bytes of torch's saved tensors in float32: the measured share and a
# twentieth. The model's input is kept, so a deep model has smaller shares than these few layers.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], float]] = {
    "gelu": (
        lambda: _chain(*(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(3))),
        _rows,
        0.54,
    ),
    "relu": (lambda: _chain(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(3))), _rows, 0.42),
    "gpt": (lambda: _chain(Block(False), Block(False)), _rows, 0.36),
    "bert": (lambda: _chain(Block(True, 0.1), Block(True, 0.1)), _rows, 0.42),
    "llama": (lambda: _chain(Llama(), Llama()), _rows, 0.41),
    "conv": (
        lambda: _chain(
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ),
        lambda: torch.randn(8, 8, 16, 16),
        0.4,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_bytes(name: str) -> None:
    build, draw, bar = MODELS[name]
    model, x = build(), draw()
    parameters = list(model.parameters())

    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss, expected, _ = gradients(step, parameters, None, x)
    packed_loss, got, (record,) = gradients(step, parameters, INT8, x)
    assert torch.equal(loss, packed_loss)
    assert off(got, expected) < GRADIENT_BOUND
    assert record.after < bar * record.before
    lossless = gradients(step, parameters, LOSSLESS, x)[1]
    assert all(map(torch.equal, lossless, expected))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_in_bfloat16(name: str) -> None:
    build, draw, _ = MODELS[name]
    layer, x = build()[0].bfloat16(), draw().bfloat16()

    def step(x: Tensor) -> Tensor:
        return layer(x).float().square().mean()

    loss, expected, _ = gradients(step, list(layer.parameters()), None, x)
    packed_loss, got, _ = gradients(step, list(layer.parameters()), INT8, x)
    assert torch.equal(loss, packed_loss)
    assert off(got, expected) < 2 * GRADIENT_BOUND


@pytest.mark.parametrize("mask", [None, -1e9, -float("inf")])
def test_cross_entropy_with_masked_logits(mask: float | None) -> None:
    head, x = nn.Linear(128, 512), torch.randn(64, 128)
    target = torch.randint(0, 256, (64,)).index_fill(0, torch.tensor([3, 9]), -100)

    def step(x: Tensor) -> Tensor:
        logits = head(x)
        if mask is not None:
            logits = logits.masked_fill(torch.arange(512) >= 256, mask)
        return F.cross_entropy(logits, target, ignore_index=-100)

    expected = gradients(step, list(head.parameters()), None, x)[1]
    got, records = gradients(step, list(head.parameters()), INT8, x)[1:]
    assert off(got, expected) < GRADIENT_BOUND
    assert {
        v.form for v in records[0].saved if v.dtype is torch.float32 and v.before >= 4096 and v.operator == "sub"
    } <= {"16 bits"}


def test_dynamic_shapes_make_one_graph() -> None:
    model = MODELS["gelu"][0]()
    torch._dynamo.reset()
    records: list[GraphRecord] = []
    compiled = torch.compile(model, backend=backend(INT8, records), fullgraph=True)
    for size in (48, 64, 80):
        x = torch.randn(4, size, 128)
        torch._dynamo.mark_dynamic(x, 1)
        model.zero_grad()
        compiled(x).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        assert off(got, [p.grad for p in model.parameters()]) < GRADIENT_BOUND
    assert len(records) == 1
    assert records[0].after < 0.48 * records[0].before


def test_checkpoint_inside_the_graph() -> None:
    model, x = Block(False), _rows()

    def step(x: Tensor) -> Tensor:
        y = checkpoint(model, x.square(), use_reentrant=False)
        return checkpoint(model, y, use_reentrant=False).square().mean()

    expected = gradients(step, list(model.parameters()), None, x)[1]
    assert off(gradients(step, list(model.parameters()), INT8, x)[1], expected) < GRADIENT_BOUND


def test_mutated_inputs_and_aliased_outputs() -> None:
    layer, x = nn.Linear(128, 128), torch.randn(64, 128)
    state = torch.zeros(64, 128)

    def step(x: Tensor, state: Tensor) -> Tensor:
        y = F.gelu(layer(x))
        state.add_(y.detach())
        view = y.view(-1)
        return (view * view).mean() + layer(y).square().mean()

    exact = state.clone()
    expected = gradients(step, list(layer.parameters()), None, x, exact)[1]
    mutated = state.clone()
    got = gradients(step, list(layer.parameters()), INT8, x, mutated)[1]
    assert off(got, expected) < GRADIENT_BOUND
    assert torch.equal(mutated, exact)


def test_static_inputs_and_leaves_are_never_packed() -> None:
    layer, x = nn.Linear(128, 128), torch.randn(64, 128, requires_grad=True)
    records = gradients(lambda x: layer(F.gelu(layer(x))).square().mean(), [*layer.parameters(), x], INT8, x)[2]
    packed = {v.name for v in records[0].saved if v.form != "kept"}
    assert packed
    assert not {name for name in packed if name.startswith("primals")}


def test_a_difference_that_may_be_small_is_exact() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    near = (x + 1e-4 * torch.randn(64, 128)).detach().requires_grad_()
    step = lambda x, y: F.mse_loss(x * 3, y * 3)  # noqa: E731
    expected = gradients(step, [x, near], None, x, near)[1]
    assert off(gradients(step, [x, near], INT8, x, near)[1], expected) < 1e-6


def test_views_of_one_tensor_share_its_codes() -> None:
    torch.manual_seed(0)
    model = Attention(False)
    x = torch.randn(4, 64, 128, requires_grad=True)
    (record,) = gradients(lambda x: model(x * 1).square().sum(), [x], INT8, x)[2]
    # Attention's result, read by attention's backward and, in another shape, by that of the projection.
    results = [v for v in record.saved if v.form == "codes" and v.before == x.nbytes and v.operator == "getitem"]
    assert len(results) == 1


def test_factors_of_a_divisor_are_exact() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((4096, 16), (16, 4), (4, 4))]
    # One row in 16 is a thousandth of the others, and shares a group with 15 of them.
    small = torch.where(torch.arange(4096) % 16 == 0, 1e-3, 1.0)[:, None]

    def step(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        # Backward does not recompute products of matrices.
        return (1 / ((x * small @ w) @ m)).square().mean()

    _, exact, _ = gradients(step, leaves, None, *leaves)
    _, got, _ = gradients(step, leaves, INT8, *leaves)
    assert off(got, exact) <= GRADIENT_BOUND


def test_results_of_attention_with_heads_shorter_than_a_group_take_16_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128, requires_grad=True)
    forms = {}
    for heads in (2, 4):
        model = Attention(False, heads=heads)
        (record,) = gradients(lambda x, model=model: model(x * 1).square().sum(), [x], INT8, x)[2]
        forms[heads] = {v.form for v in record.saved if v.before == x.nbytes and v.operator == "getitem"}
    assert forms == {2: {"codes"}, 4: {"16 bits"}}


def test_a_masked_factor_keeps_its_small_elements() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(256, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)]
    mask = torch.arange(64) % 8 == 0
    factor = torch.randn(256, 64, requires_grad=True)

    def step(x: Tensor, w: Tensor, factor: Tensor) -> Tensor:
        masked = torch.where(mask, 1e4, x @ w)
        # The second product has backward save the masked values themselves.
        products = (masked * factor).masked_fill(mask, 0.0)
        return products.sum() + 1e-12 * (masked @ w).sum()

    _, exact, _ = gradients(step, [*leaves, factor], None, *leaves, factor)
    _, got, _ = gradients(step, [*leaves, factor], INT8, *leaves, factor)
    assert off(got, exact) <= GRADIENT_BOUND


def test_statistics_are_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 64, requires_grad=True)
    # Each row's scale is a product of matrices, which backward does not compute again. The scale of one row in 64 is
    # larger by far, and would share a group with the others; the loss counts all rows alike.
    scales = torch.where(torch.arange(4096) % 64 == 0, 1e3, 1.0)[:, None]
    weight = torch.randn(64, 1)
    step = lambda x: ((x * ((x * scales) @ weight) / scales) * torch.arange(64)).sum()  # noqa: E731
    expected = gradients(step, [x], None, x)[1]
    assert off(gradients(step, [x], INT8, x)[1], expected) <= GRADIENT_BOUND


def test_kept_views_are_copied_out_of_a_larger_memory() -> None:
    torch.manual_seed(0)
    model, x = Attention(False).to(torch.bfloat16), torch.randn(4, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    (record,) = gradients(lambda x: model(x).float().sum(), [x], INT8, x)[2]
    # Queries and keys in 16 bits; values and attention's result in codes: no view of the projection's.
    kept = [value for value in record.saved if value.reason.startswith("16 bits already")]
    codes = [value for value in record.saved if value.form == "codes"]
    assert (len(kept), len(codes)) == (2, 2)
    assert all(value.after == value.before == x.nbytes for value in kept)
    held: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        torch._dynamo.reset()
        torch.compile(lambda x: model(x).float().sum(), backend=backend(INT8, []))(x)
    assert max(held) <= max(x.nbytes, *(p.nbytes for p in model.parameters()))


def test_nothing_is_packed_beside_a_kept_view_of_most_of_a_memory() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = x.sin()
        # Most of y is a divisor, which stays exact; the rest alone would fit in codes.
        return (1 / (y[:, :60] + 2)).sum() + (y[:, 60:] @ torch.ones(128, 128) * y[:, 60:]).sum()

    (record,) = gradients(step, [x], INT8, x)[2]
    assert {value.form for value in record.saved} == {"kept"}


@pytest.mark.parametrize("solution", [torch.linalg.pinv, lambda x: torch.linalg.qr(x)[1]], ids=["pinv", "qr"])
def test_operands_and_results_of_solutions_are_exact(solution: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(128, 128) * 0.1 + torch.eye(128)).requires_grad_()

    def step(x: Tensor, data: Tensor) -> Tensor:
        # Backward does not compute a product of matrices again.
        return (solution(x @ data) * torch.arange(128)).sum()

    expected = gradients(step, [x], None, x, torch.eye(128))[1]
    assert torch.equal(gradients(step, [x], INT8, x, torch.eye(128))[1][0], expected[0])


def test_rows_that_lie_apart_in_memory_are_stored_normalized() -> None:
    torch.manual_seed(0)
    patches, layer, images = nn.Conv2d(3, 128, 4, 4), nn.Linear(128, 128), torch.randn(4, 3, 32, 32)
    places = torch.randn(1, 64, 128, requires_grad=True)

    def step(images: Tensor) -> Tensor:
        # As a vision transformer's: channels are a row of the norm, tokens are adjacent in memory.
        x = patches(images).flatten(2).transpose(1, 2) + places
        return (x + layer(F.layer_norm(x, (128,)))).sum()

    leaves = [*patches.parameters(), places, *layer.parameters()]
    expected = gradients(step, leaves, None, images)[1]
    _, got, (record,) = gradients(step, leaves, INT8, images)
    assert off(got, expected) <= GRADIENT_BOUND
    # The forward normalizes a copy, the derivative normalizes again: one tensor of codes serves both. Codes of the rows
    # themselves would span rows.
    (normalized,) = [value for value in record.saved if value.before == 4 * 64 * 128 * 4]
    assert (normalized.operator, normalized.form) == ("mul", "codes")


def test_windows_and_their_rolls_share_the_codes_of_what_they_are_made_from() -> None:
    torch.manual_seed(0)
    layers, x = [nn.Linear(128, 128) for _ in range(3)], torch.randn(4, 8, 8, 128)

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            rows = F.layer_norm(x, (128,))
            windows = rows.roll((-1, -1), (1, 2)).view(4, 2, 4, 2, 4, 128).transpose(2, 3).reshape(-1, 16, 128)
            back = layer(windows).view(4, 2, 2, 4, 4, 128).transpose(2, 3).reshape(x.shape)
            x = x + back.roll((1, 1), (1, 2))
        return x.square().mean()

    leaves = [p for layer in layers for p in layer.parameters()]
    expected = gradients(step, leaves, None, x)[1]
    _, got, (record,) = gradients(step, leaves, INT8, x)
    assert off(got, expected) <= GRADIENT_BOUND
    # Of each layer the normalized rows, and the result: the first input is kept, as the caller's.
    codes = [value for value in record.saved if value.form == "codes"]
    assert len(codes) <= 3, [(value.operator, value.shape) for value in codes]
    assert not [value for value in record.saved if value.form == "kept" and value.before > x.nbytes // 2][1:]


def test_queries_and_keys_of_a_written_softmax_take_codes() -> None:
    torch.manual_seed(0)
    model, x = Attention(True), torch.randn(4, 49, 128)
    (record,) = gradients(lambda x: model(x).mean(), list(model.parameters()), INT8, x)[2]
    # Rows of a window's attention are shorter than a group. A sum of softmax is one at least and amplifies no error.
    heads = [value for value in record.saved if value.before == x.nbytes and value.reason != "needs no gradient"]
    assert {value.form for value in heads} == {"codes"}, [(v.operator, v.form, v.reason) for v in heads]
    # Probabilities in the 16 bits that the product reads, without the scores and their statistics.
    scores = [value for value in record.saved if value.shape[-2:] == (49, 49)]
    assert [value.form for value in scores] == ["16 bits"], scores
    assert not [value for value in record.saved if value.shape[-2:] == (49, 1)]


@pytest.mark.parametrize("config", [LOSSLESS, INT8], ids=["lossless", "int8"])
@pytest.mark.parametrize(
    "read", [lambda h, m: h + m / 2, lambda h, m: h - m[0], lambda h, m: h * torch.rsqrt(m.square() + 1)]
)
def test_backward_reads_a_buffer_as_it_was_before_the_forward_changed_it(
    read: Callable[[Tensor, Tensor], Tensor], config: Config
) -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
            self.register_buffer("memory", torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            y = self.last(read(h, self.memory))
            self.memory.copy_(0.5 * self.memory + h.detach())
            return y.square().mean()

    x, eager, model = torch.randn(64, 16), Memory(), Memory()
    eager(x).backward()
    _, got, _ = gradients(model, list(model.parameters()), config, x)
    exact = [p.grad for p in eager.parameters() if p.grad is not None]
    # Without codes, a graph rounds as eager code does but in the order of its sums.
    assert off(got, exact) <= (1e-6 if config is LOSSLESS else GRADIENT_BOUND)
    assert torch.equal(model.memory, eager.memory)


def test_keys_of_graphs_in_torchs_caches_change_with_registered_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = SimpleNamespace(graphs=SimpleNamespace(config=INT8, tape=0))
    monkeypatch.setattr(partitioner, "partitioned_mark", lambda: mark)
    monkeypatch.setattr(lookup, "_registered", {})
    before = partitioner.Partitioner(None).uuid()
    pyactcomp.register_reader("aten::silu", self="relative")
    assert partitioner.Partitioner(None).uuid() != before


def test_keys_of_graphs_in_torchs_caches_change_with_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "needs.py"
    source.write_text("RANGE_WALK = 8")
    before = digest_of_sources(tmp_path)
    digest_of_sources.cache_clear()
    source.write_text("RANGE_WALK = 9")
    assert digest_of_sources(tmp_path) != before
    for key in (partitioner.Partitioner(None).uuid(), HeadPass(()).uuid()):
        assert isinstance(key, tuple)
        assert key[0] == digest_of_sources()
