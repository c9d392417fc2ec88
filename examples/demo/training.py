"""The demo: train one small transformer five ways on the same text, and measure each.

``plain`` is PyTorch alone. ``lossless`` and ``int8`` are the same model after :func:`pyactcomp.compress` in this
mode, ``checkpoint`` has ``torch.utils.checkpoint`` around every block, and ``int8 + checkpoint`` has both. All start
from the same weights and see the same batches. The steps are interleaved, so a change in the machine's speed affects
all methods alike. Nothing here prints.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import library_text
import step_memory
import torch
from byte_transformer import ByteTransformer
from gpu_figures import Figures
from torch import Tensor

import pyactcomp

METHODS = ("plain", "lossless", "int8", "checkpoint", "int8 + checkpoint")

# The first step allocates the optimizer's state and the second still differs; the third is typical.
_MEMORY_STEP = 2
_FIRST_TIMED_STEP = 3
MINIMUM_STEPS = 8

_VALIDATIONS = 10
_VALIDATION_BATCHES = 4

# Above half of the memory, too little is left for the optimizer, the other methods' models and fragmentation.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Config:
    """Size and length of the training; ``batch=None`` fills half of the GPU's free memory."""

    device: torch.device
    width: int
    depth: int
    heads: int
    sequence: int
    batch: int | None
    steps: int
    learning_rate: float
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One method's result: bytes, milliseconds, and nats per byte."""

    method: str
    saved_bytes: int
    peak_bytes: int
    step_ms: float
    val_loss: float


@dataclass(frozen=True)
class Result:
    """The rows in the order of ``METHODS``, and the losses of each method at each step and each validation."""

    config: Config
    batch: int
    parameters: int
    rows: tuple[Row, ...]
    training: Mapping[str, list[float]]
    validation: Mapping[str, list[tuple[int, float]]]

    def as_json(self) -> dict[str, list[dict[str, object]]]:
        """Return ``{"rows": [{"method", "saved_bytes", "peak_bytes", "step_ms", "val_loss"}]}``."""
        return {"rows": [asdict(row) for row in self.rows]}


def default_config(device: torch.device, *, steps: int | None = None, seed: int = 0) -> Config:
    """Return the demo's size: small on a CPU, as large as the memory allows on a GPU.

    Raises ValueError for fewer than ``MINIMUM_STEPS`` steps.
    """
    if steps is not None and steps < MINIMUM_STEPS:
        raise ValueError(f"got {steps} steps, expected at least {MINIMUM_STEPS}: the first ones are warm-up")
    if device.type == "cuda":
        # Three times this learning rate made the loss of one exact run jump, and left it 0.075 above another's.
        return Config(device, 768, 12, 12, 1024, None, steps or 100, 2e-4, seed)
    # Twice this learning rate gave plain PyTorch a higher validation loss on seeds 0, 1 and 2, and let rounding
    # differences of any origin grow.
    return Config(device, 128, 4, 4, 128, 16, steps or 100, 1e-3, seed)


@dataclass
class _Run:
    """One method's model and its measurements."""

    model: ByteTransformer
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    memory: step_memory.StepMemory | None = None
    step_ms: list[float] = field(default_factory=list)
    training: list[Tensor] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def run(config: Config, on_step: Callable[[int, Mapping[str, float]], None] | None = None) -> Result:
    """Train a model each way and measure each.

    ``on_step`` gets the number of finished steps and each method's last validation loss.
    """
    device = config.device
    text, held_out = library_text.load()
    generator = torch.Generator().manual_seed(config.seed)
    # fork_rng warns if there are several devices and none is named.
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = ByteTransformer(config.width, config.depth, config.heads, config.sequence).to(device)
    batch = config.batch or _largest_batch(model, config, text)
    exam = [_draw(held_out, batch, config, generator) for _ in range(_VALIDATION_BATCHES)]

    runs = {method: _prepare(method, copy.deepcopy(model), config) for method in METHODS}
    validate_every = max(config.steps // _VALIDATIONS, 1)
    for step in range(config.steps):
        inputs, targets = _draw(text, batch, config, generator)
        # Rotated, so that no method always follows the same neighbour.
        for offset in range(len(METHODS)):
            _train_step(runs[METHODS[(step + offset) % len(METHODS)]], device, inputs, targets, step)
        finished = step + 1
        if finished % validate_every == 0 or finished == config.steps:
            for one in runs.values():
                one.validation.append((finished, _validate(one.model, device, exam)))
        if on_step:
            on_step(finished, {method: one.validation[-1][1] for method, one in runs.items() if one.validation})

    return Result(
        config=config,
        batch=batch,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        rows=tuple(_row(method, one) for method, one in runs.items()),
        training={method: torch.stack(one.training).tolist() for method, one in runs.items()},
        validation={method: one.validation for method, one in runs.items()},
    )


def _prepare(method: str, model: ByteTransformer, config: Config) -> _Run:
    if method == "lossless":
        pyactcomp.compress(model, mode="lossless")
    elif method.startswith("int8"):
        pyactcomp.compress(model)
    model.checkpoint_blocks = method.endswith("checkpoint")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=config.device.type == "cuda"
    )
    warmup = max(config.steps // 10, 1)

    def scale(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        return min((step + 1) / warmup, 1.0) * decay

    return _Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale))


def _draw(text: Tensor, batch: int, config: Config, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = library_text.windows(text, batch, config.sequence, generator)
    return inputs.to(config.device), targets.to(config.device)


def _loss(model: ByteTransformer, device: torch.device, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = model(inputs, targets)
    return loss


def _train_step(one: _Run, device: torch.device, inputs: Tensor, targets: Tensor, step: int) -> None:
    one.optimizer.zero_grad(set_to_none=True)

    def forward() -> Tensor:
        return _loss(one.model, device, inputs, targets)

    def finish(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        one.optimizer.step()
        one.training.append(loss.detach())

    if step == _MEMORY_STEP:
        one.memory = step_memory.measure(device, forward, finish)
    else:
        started = _now(device)
        finish(forward())
        if step >= _FIRST_TIMED_STEP:
            one.step_ms.append((_now(device) - started) * 1e3)
    one.schedule.step()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def _validate(model: ByteTransformer, device: torch.device, exam: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    losses = [_loss(model, device, inputs, targets) for inputs, targets in exam]
    model.train()
    return float(torch.stack(losses).mean())


def _largest_batch(model: ByteTransformer, config: Config, text: Tensor) -> int:
    """Return the batch size at which a plain step takes ``_MEMORY_SHARE`` of the free memory, from two small steps."""
    device = config.device
    generator = torch.Generator().manual_seed(config.seed)
    peaks = []
    for batch in (2, 4):
        inputs, targets = _draw(text, batch, config, generator)
        memory = step_memory.measure(
            device,
            lambda inputs=inputs, targets=targets: _loss(model, device, inputs, targets),  # type: ignore[misc]
            lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        )
        model.zero_grad(set_to_none=True)
        peaks.append(memory.peak_bytes)
    per_sequence = max((peaks[1] - peaks[0]) // 2, 1)
    free, _ = torch.cuda.mem_get_info(device)
    return max(int(free * _MEMORY_SHARE) // per_sequence, 1)


def _row(method: str, one: _Run) -> Row:
    assert one.memory is not None
    return Row(
        method=method,
        saved_bytes=one.memory.saved_bytes,
        peak_bytes=one.memory.peak_bytes,
        step_ms=statistics.median(one.step_ms),
        val_loss=one.validation[-1][1],
    )


def summary(result: Result, gpu: Mapping[str, Figures]) -> str:
    """Return the rows in two sentences, for a run on a CPU with the committed figures of a GPU, by method."""
    rows = {row.method: row for row in result.rows}
    plain, int8, exact = rows["plain"], rows["int8"], rows["checkpoint"]
    text = (
        f"With one call, pyactcomp.compress(model), training kept {int8.saved_bytes / plain.saved_bytes:.0%} of the "
        f"bytes that autograd saves for backward. Its validation loss differs by "
        f"{abs(int8.val_loss - plain.val_loss):.4f} nats per byte; that of checkpointing, which is exact, by "
        f"{abs(exact.val_loss - plain.val_loss):.4f}. "
    )
    time_x, exact_time_x = (row.step_ms / plain.step_ms for row in (int8, exact))
    here = f"{time_x:.2f}x plain PyTorch's time, with checkpointing {exact_time_x:.2f}x"
    if result.config.device.type == "cuda" or "int8" not in gpu or "checkpoint" not in gpu:
        return f"{text}A step took {here}."
    measured = gpu["int8"]
    return (
        f"{text}On this CPU, where packing is no cheaper than computing, a step took {here}. On a GPU it is quicker: "
        f"{measured.step:.2f}x for GPT-2 medium on an {measured.device}, with checkpointing "
        f"{gpu['checkpoint'].step:.2f}x (committed figures, not of this run)."
    )
