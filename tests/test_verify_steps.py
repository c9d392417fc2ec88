"""``verify``: what it tells of the state it looked at, looks while training runs, and edits that nobody counts."""

from __future__ import annotations

import io
import itertools
import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verify_checks import Stateful, batch, hooks, perceptron, square

import pyactcomp
from pyactcomp import PyactcompError, verify
from pyactcomp.verify import state as states

CLASSES = 64


class Attention(nn.Module):
    """One layer of fused attention, whose queries are multiplied by ``sharpness``."""

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.Linear(128, 3 * 128)
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projections(x).view(4, 128, 3, 2, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query * self.sharpness, key, value)


def labels() -> Tensor:
    return torch.randint(CLASSES, (512,), generator=torch.Generator().manual_seed(0))


def classifier(scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(128, CLASSES)
    with torch.no_grad():
        model.weight.mul_(scale)
    return model


def negative_log_likelihood(output: Tensor) -> Tensor:
    return F.cross_entropy(output, labels())


# What the graph of a loss tells


@pytest.mark.parametrize("dim", [1, -1, -3])
def test_uniformity_is_the_mean_entropy_along_the_classes(dim: int) -> None:
    logits = torch.randn(5, CLASSES, 3, 2, requires_grad=True).movedim(1, dim)
    result = logits.log_softmax(dim)
    found = states.state_of(result.sum()).uniformity
    probabilities = result.detach().double().movedim(dim, -1).exp()
    expected = float(-(probabilities * probabilities.log()).sum(-1).mean()) / math.log(CLASSES)
    # float32's exp and a sum of CLASSES terms: each is off by a few ulp of a number of at most 1.
    assert found == pytest.approx(expected, rel=4 * CLASSES * 2.0**-24)


def test_classes_that_are_ruled_out_have_no_entropy() -> None:
    logits = torch.zeros(4, CLASSES)
    logits[:, CLASSES // 2 :] = -math.inf
    found = states.state_of(logits.requires_grad_().log_softmax(1)[:, 0].sum())
    assert found.uniformity == pytest.approx(math.log(CLASSES / 2) / math.log(CLASSES), rel=4 * CLASSES * 2.0**-24)
    assert not found.looks_untrained


def test_largest_attention_logit_is_bounded_from_above() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 2, 128, 64).unbind()
    out = F.scaled_dot_product_attention(query.requires_grad_(), key, key)
    largest = float((query.detach() @ key.mT / 8).max())
    found = states.state_of(out.sum()).attention_logit
    # A log-sum-exp of 128 logits lies between the largest and log(128) above it; float32's rounding aside.
    assert found is not None
    assert largest - 1e-5 * abs(largest) <= found <= largest + math.log(128)


def test_padding_and_rows_that_attend_to_nothing_are_no_logits() -> None:
    # As the node of CUDA's memory-efficient attention looks, for 3 rows padded to 4.
    plain, sums = SimpleNamespace(unpack_hook=None), torch.tensor([[[1.0, math.inf, 2.0, 9.0]]])
    node = SimpleNamespace(
        _raw_saved_query=plain,
        _saved_query=torch.zeros(1, 1, 3, 8),
        _raw_saved_log_sum_exp=plain,
        _saved_log_sum_exp=sums,
    )
    assert states._largest_log_sum_exp(node) == 2.0


def test_what_a_checkpoint_holds_is_not_unpacked() -> None:
    runs: list[int] = []

    def head(x: Tensor) -> Tensor:
        runs.append(1)
        return x.log_softmax(1)

    x = torch.randn(4, CLASSES, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(head, x, use_reentrant=False).sum()
    assert states.state_of(loss) == states.State(None, None)
    assert len(runs) == 1


# Notes


def test_notes_name_the_state() -> None:
    v = verify(perceptron(), batch(), square)
    assert len(v.notes) == 1
    assert f"the loss is {v.loss_exact:.4g}" in v.notes[0]
    assert "steps=" in v.notes[0]
    assert str(v).splitlines()[-1] == f"note: {v.notes[0]}"
    assert v.history == ((0, v.loss_exact, v.error, None),)


def test_lossless_gradients_need_no_notes() -> None:
    assert verify(classifier(), batch(), negative_log_likelihood, mode="lossless").notes == ()


@pytest.mark.parametrize(("scale", "warned"), [(1.0, True), (30.0, False)], ids=["initialised", "sure"])
def test_a_model_that_looks_untrained_is_told(scale: float, warned: bool) -> None:
    v = verify(classifier(scale), batch(), negative_log_likelihood)
    assert any("looks untrained" in note for note in v.notes) is warned


def test_attention_is_told_by_its_largest_logit() -> None:
    x = batch().view(4, 128, 128)
    found = []
    for sharpness in (1.0, 100.0):
        model = Attention(sharpness)
        (note,) = (note for note in verify(model, x, square).notes if "attention" in note)
        found.append(float(note.split("above ")[1].split(";")[0]))
    assert found[0] < math.log(128) + 5 < found[1]


# Looks while training runs


def descent(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


@pytest.mark.parametrize(("steps", "looks"), [(1, [0, 1]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_looks_are_at_powers_of_two_and_at_the_end(steps: int, looks: list[int]) -> None:
    v = verify(perceptron(), batch(), square, steps=steps)
    assert [look.step for look in v.history] == looks
    assert v.error == max(look.error for look in v.history)
    worst = max(v.history, key=lambda look: look[2])
    assert (v.loss_exact, v.error, v.noise) == worst[1:]


def test_losses_are_those_of_the_optimizers_exact_steps() -> None:
    v = verify(perceptron(), batch(), square, steps=4, optimizer=descent(0.1), min_bytes=0)
    model = perceptron()
    optimizer = descent(0.1)(list(model.parameters()))
    losses = []
    for _ in range(5):
        loss = square(model(batch()))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [look.loss for look in v.history] == [losses[step] for step in (0, 1, 2, 4)]
    assert losses[4] < losses[0]


def test_random_numbers_and_buffers_go_on_from_step_to_step() -> None:
    # Looks run three steps each and leave no trace: the losses are those of training without them.
    model = Stateful()
    torch.manual_seed(7)
    v = verify(model, batch(), square, steps=2, optimizer=descent(0.1), min_bytes=0)
    torch.manual_seed(7)
    optimizer = descent(0.1)(list(model.parameters()))
    for _, loss_of_look, _, _ in v.history:
        loss = square(model(batch()))
        assert float(loss.detach()) == loss_of_look
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert int(model.calls) == 3


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_training_is_undone(fails: bool) -> None:
    model = Stateful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square(model(batch(1))).backward()
    optimizer.step()
    model.drop.eval()
    parameters = {name: (p, p.detach().clone(), p.grad, p.grad.clone()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    moments = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    modes, installed, random = [m.training for m in model.modules()], hooks(model), torch.get_rng_state()
    calls = itertools.count()

    def loss(output: Tensor) -> Tensor:
        if fails and next(calls) == 9:
            raise ArithmeticError("of the test")
        return square(output)

    if fails:
        with pytest.raises(ArithmeticError, match="of the test"):
            verify(model, batch(), loss, steps=5, optimizer=lambda _: optimizer)
    else:
        assert len(verify(model, batch(), loss, steps=5, optimizer=lambda _: optimizer).history) == 5

    for name, parameter in model.named_parameters():
        same, value, grad, grad_value = parameters[name]
        assert parameter is same
        assert parameter.grad is grad
        assert torch.equal(parameter, value)
        assert torch.equal(grad, grad_value)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    for state, before in zip(optimizer.state.values(), moments, strict=True):
        assert set(state) == set(before)
        assert all(torch.equal(state[name], before[name]) for name in before)
    assert [m.training for m in model.modules()] == modes
    assert hooks(model) == installed
    assert torch.equal(torch.get_rng_state(), random)


def test_an_iterator_gives_a_batch_for_each_step() -> None:
    seen: list[float] = []
    model = perceptron()
    model.register_forward_pre_hook(lambda _, args: seen.append(float(args[0][0, 0])))
    given = [batch(seed) for seed in range(4)]
    verify(model, iter(given), square, steps=3)
    assert list(dict.fromkeys(seen)) == [float(each[0, 0]) for each in given]
    with pytest.raises(ValueError, match="3 steps need 4 batches"):
        verify(model, iter(given[:3]), square, steps=3)


def test_notes_tell_how_far_training_went() -> None:
    v = verify(classifier(), batch(), negative_log_likelihood, steps=4, optimizer=descent(100.0))
    lowest = min(look.loss for look in v.history)
    assert f"4 states in 4 steps, at losses down to {lowest:.4g}" in v.notes[0]
    assert not any("looks untrained" in note for note in v.notes)
    short = verify(classifier(), batch(), negative_log_likelihood, steps=1, optimizer=descent(1e-6))
    assert any("looks untrained still" in note for note in short.notes)
    assert all(f"{look.error:.3%}" in str(v) for look in v.history)


def test_training_that_diverges_raises() -> None:
    with pytest.raises(ValueError, match=r"the loss is (inf|nan) at step \d+: pass optimizer"):
        verify(nn.Linear(128, 8), batch(), square, steps=200, optimizer=descent(1e6))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"steps": -1}, ValueError, "steps must be at least 0"),
        ({"steps": 1.5}, TypeError, "steps must be an integer"),
        ({"optimizer": descent(0.1)}, ValueError, "pass steps="),
    ],
    ids=["negative", "float", "no-steps"],
)
def test_wrong_steps_raise(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        verify(perceptron(), batch(), square, **wrong)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "second", "shown"),
    [(Terminal, 1.0, [3, 4]), (Terminal, 0.01, []), (io.StringIO, 1.0, [])],
    ids=["slow", "fast", "no-terminal"],
)
def test_progress_shows_on_a_terminal_after_two_seconds(
    stream: Callable[[], io.StringIO], second: float, shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Iterator[float] = itertools.count(0.5, second)
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    verify(perceptron(), batch(), square, steps=4)
    lines = [line for line in written.getvalue().split("\r\x1b[K") if line]
    # The clock goes on by ``second`` each time it is asked: after each of the four steps, and 2 s are not over 2 s.
    assert [line.split(",")[0] for line in lines] == [f"verify: step {step} of 4" for step in shown]
    assert written.getvalue().endswith("\r\x1b[K" if lines else "")


def test_casts_are_those_of_the_step() -> None:
    # Autocast keeps a parameter's cast as long as its context is entered, through all steps here.
    with torch.autocast("cpu", torch.bfloat16):
        v = verify(perceptron(), batch(), lambda y: square(y.float()), steps=2, optimizer=descent(0.1), min_bytes=0)
    model = perceptron()
    optimizer = descent(0.1)(list(model.parameters()))
    for _, loss_of_look, _, _ in v.history:
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model(batch()).float())
        assert float(loss.detach()) == loss_of_look
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Edits through .data


class Rounding(nn.Module):
    """A straight-through quantizer of a product, which rounds it as it is told to."""

    def __init__(self, rounds: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(128, 128), nn.Parameter(torch.ones(128))
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) * 1.0) * (self.scale * 1.0)
        self.rounds(y)
        return y * y


def counted(y: Tensor) -> None:
    with torch.no_grad():
        y.round_()


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_a_result_that_is_rounded_through_data_is_named(mode: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128), Rounding(lambda y: y.data.round_()))
    with pytest.raises(PyactcompError, match=r"module '1' saved \(recomputed .*through \.data.*skip=\['1'\]"):
        verify(model, batch(), torch.sum, mode=mode, min_bytes=0)
    # What the message advises helps.
    verify(model, batch(), torch.sum, mode=mode, min_bytes=0, skip=["1"])
    model[1].rounds = counted
    assert verify(model, batch(), torch.sum, mode="lossless", min_bytes=0).error == 0.0


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_a_parameter_that_is_written_to_before_backward_is_named(mode: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))

    def loss(output: Tensor) -> Tensor:
        model[1].weight.data.mul_(1.001)
        return square(output.float())

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(PyactcompError, match=r"module '1' saved \(autocast copy .*keep_weight_copies=True"):
            verify(model, batch(), loss, mode=mode, min_bytes=0)
        verify(model, batch(), square, mode=mode, min_bytes=0)


def test_a_second_cast_that_is_edited_is_named() -> None:
    # Casts of one tensor to one dtype are stored once.
    def forward(x: Tensor) -> Tensor:
        out = norm(x)
        first, second = out.to(torch.bfloat16), out.to(torch.bfloat16)
        second.data.mul_(2)
        return (first * first).sum() + (second * second).sum()

    norm = nn.LayerNorm(128)
    model = nn.Sequential(nn.Linear(128, 128))
    model.add_module("norm", norm)
    with pytest.raises(PyactcompError, match="another cast of the same tensor"):
        verify(model, batch(), lambda y: forward(y.relu()), mode="lossless", min_bytes=0)


def test_a_nan_is_no_edit() -> None:
    x = batch()
    x[0, 0] = math.nan
    v = verify(perceptron(), x, lambda y: y.nan_to_num().square().mean(), mode="lossless", min_bytes=0)
    assert v.loss_exact == v.loss_compressed


def test_a_loss_that_reads_a_shape_alone_is_no_edit() -> None:
    # nll_loss is restored a float32 copy of log_softmax's result without its values.
    def loss(output: Tensor) -> Tensor:
        return F.nll_loss(output.to(torch.bfloat16).log_softmax(-1).float(), labels())

    assert verify(classifier(), batch(), loss, mode="lossless", min_bytes=0).error == 0.0


def test_each_saved_tensor_is_compared_although_another_report_exists() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(128, 128), Rounding(lambda y: y.data.round_())), min_bytes=0)
    square(model(batch())).backward()
    with pytest.raises(PyactcompError, match=r"through \.data"):
        verify(model, batch(), square)
