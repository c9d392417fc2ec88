"""Training programs for the leak check: twelve that leak, by the mistakes that people make, and thirteen clean ones.

Each calls ``step()`` at the end of a step. The line that makes what leaks ends in ``# leaks``.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8
Step = Callable[[], None]


def built() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def batch() -> Tensor:
    return torch.randn(4, 16)


def list_of_losses(step: Step) -> None:
    model, optimizer = built()
    losses = []
    for _ in range(STEPS):
        loss = model(batch()).square().mean()  # leaks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        step()


class Accuracy:
    def __init__(self) -> None:
        self.total: Any = 0.0

    def update(self, score: Tensor) -> None:
        self.total = self.total + score  # leaks


def graph_kept_by_a_metric(step: Step) -> None:
    model, optimizer = built()
    metric = Accuracy()
    for _ in range(STEPS):
        out = model(batch())
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        metric.update(out.mean())
        step()


def hook_that_stores_outputs(step: Step) -> None:
    model, optimizer = built()
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))
    for _ in range(STEPS):
        x = batch()
        hidden = F.linear(x, model[0].weight, model[0].bias)
        out = model[2](model[1](hidden))  # leaks
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        step()


def closures(step: Step) -> None:
    model, optimizer = built()
    later: list[Callable[[], float]] = []

    def report(loss: Tensor) -> Callable[[], float]:
        return lambda: float(loss)

    for _ in range(STEPS):
        loss = model(batch()).mean()  # leaks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        later.append(report(loss))
        step()


def tracebacks(step: Step) -> None:
    model, optimizer = built()
    errors: list[Exception] = []

    def risky() -> None:
        out = model(batch())  # leaks
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        raise ValueError("bad batch")

    for _ in range(STEPS):
        try:
            risky()
        except ValueError as error:
            errors.append(error)
        step()


def batches_kept(step: Step) -> None:
    model, optimizer = built()
    loader = DataLoader(TensorDataset(torch.randn(4 * STEPS, 16)), batch_size=4)
    kept: dict[str, list[Tensor]] = {"inputs": []}
    for (x,) in loader:  # leaks
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        kept["inputs"].append(x)
        step()


def retained_graph(step: Step) -> None:
    model, optimizer = built()
    running = torch.zeros(())
    for _ in range(STEPS):
        running = running + model(batch()).mean()  # leaks
        optimizer.zero_grad()
        running.backward(retain_graph=True)
        step()


def cache_by_id(step: Step) -> None:
    model, optimizer = built()
    cache: dict[int, tuple[Any, Tensor]] = {}
    for _ in range(STEPS):
        x = batch()
        cache[id(x)] = (None, torch.relu(x))  # leaks
        optimizer.zero_grad()
        model(cache[id(x)][1]).mean().backward()
        optimizer.step()
        cache[-len(cache)] = cache.pop(id(x))
        step()


def optimizers_made_anew(step: Step) -> None:
    model, _ = built()
    schedules = []
    for _ in range(STEPS):
        optimizer = torch.optim.Adam(model.parameters())
        schedules.append(torch.optim.lr_scheduler.ConstantLR(optimizer))
        model(batch()).mean().backward()
        optimizer.step()  # leaks
        optimizer.zero_grad()
        step()


def hidden_state_not_detached(step: Step) -> None:
    cell, head = nn.GRUCell(16, 16), nn.Linear(16, 1)
    hidden = torch.zeros(4, 16)
    for _ in range(STEPS):
        hidden = cell(batch(), hidden)  # leaks
        head(hidden.detach()).mean().backward()
        out = head(hidden).mean()
        assert out.requires_grad
        step()


def running_average(step: Step) -> None:
    model, optimizer = built()
    average: Any = 0.0
    for _ in range(STEPS):
        loss = model(batch()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * loss  # leaks
        step()


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(0, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])  # leaks
        return self.layer(x)


def buffers_that_grow(step: Step) -> None:
    model = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()
        step()


def adam_with_schedule(step: Step) -> None:
    model, optimizer = built()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in range(STEPS):
        loss = model(batch()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        step()


def momentum_made_late(step: Step) -> None:
    model, _ = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for number in range(STEPS):
        model(batch()).mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        step()


def averaged_model(step: Step) -> None:
    model, optimizer = built()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        shadow = {name: 0.9 * shadow[name] + 0.1 * value.detach() for name, value in model.named_parameters()}
        step()


def cache_filled_once(step: Step) -> None:
    model, optimizer = built()
    positions: dict[int, Tensor] = {}
    for number in range(STEPS):
        length = 4 + number % 3
        if length not in positions:
            positions[length] = torch.arange(16.0).repeat(length, 1)
        optimizer.zero_grad()
        model(torch.randn(length, 16) + positions[length]).mean().backward()
        optimizer.step()
        step()


def cache_of_fixed_size(step: Step) -> None:
    model, _ = built()
    keys = torch.zeros(STEPS, 16)
    with torch.no_grad():
        for number in range(STEPS):
            x = batch()
            keys[number] = x[0]
            model(keys[: number + 1])
            step()


def hidden_state_detached(step: Step) -> None:
    cell = nn.LSTMCell(16, 16)
    state = torch.zeros(4, 16), torch.zeros(4, 16)
    optimizer = torch.optim.SGD(cell.parameters(), lr=1e-3)
    for _ in range(STEPS):
        hidden, memory = cell(batch(), state)
        optimizer.zero_grad()
        hidden.mean().backward()
        optimizer.step()
        state = hidden.detach(), memory.detach()
        step()


def accumulated_gradients(step: Step) -> None:
    model, optimizer = built()
    total = 0.0
    for _ in range(STEPS):
        parts = []
        for _ in range(3):
            loss = model(batch()).mean() / 3
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        total += torch.stack(parts).sum().item()
        step()


def lengths_that_vary(step: Step) -> None:
    model, optimizer = built()
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        length = int(torch.randint(2, 40, (), generator=generator))
        x = torch.randn(length, 16)
        out = model(x)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()


def garbage_in_cycles(step: Step) -> None:
    model, optimizer = built()
    for _ in range(STEPS):
        out = model(batch())
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        cycle: list[Any] = [out.detach()]
        cycle.append(cycle)
        step()


def copies_and_checkpoints(step: Step) -> None:
    model, optimizer = built()
    best: Any = None
    recent: deque[dict[str, Any]] = deque(maxlen=2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()
        best = copy.deepcopy(model.state_dict())
        recent.append({"model": best, "optimizer": copy.deepcopy(optimizer.state_dict())})
        step()


def least_recently_used(step: Step) -> None:
    model, optimizer = built()
    kept: OrderedDict[int, Tensor] = OrderedDict()

    @functools.lru_cache(maxsize=2)
    def mask(length: int) -> Tensor:
        return torch.ones(length, 16)

    for number in range(STEPS):
        x = torch.randn(4, 16) * mask(4)
        kept[number] = x
        if len(kept) > 3:
            kept.popitem(last=False)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        step()


def frozen_and_penalty(step: Step) -> None:
    model, optimizer = built()
    teacher = copy.deepcopy(model).requires_grad_(False)
    for _ in range(STEPS):
        x = batch().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (out - teacher(x)).square().mean() + grad.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()


def replay_buffer(step: Step) -> None:
    model, optimizer = built()
    replayed = [torch.randn(16) for _ in range(4 * STEPS)]
    for number in range(STEPS):
        replayed[3 * number] = torch.randn(16)
        optimizer.zero_grad()
        model(torch.stack(replayed[::7])).mean().backward()
        optimizer.step()
        step()


LEAKING = (
    list_of_losses,
    graph_kept_by_a_metric,
    hook_that_stores_outputs,
    closures,
    tracebacks,
    batches_kept,
    retained_graph,
    cache_by_id,
    optimizers_made_anew,
    hidden_state_not_detached,
    running_average,
    buffers_that_grow,
)
CLEAN = (
    adam_with_schedule,
    momentum_made_late,
    averaged_model,
    cache_filled_once,
    cache_of_fixed_size,
    hidden_state_detached,
    accumulated_gradients,
    lengths_that_vary,
    garbage_in_cycles,
    copies_and_checkpoints,
    least_recently_used,
    frozen_and_penalty,
    replay_buffer,
)
