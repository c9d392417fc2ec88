"""The trainings of the suite `holds`, what is done about their saved activations, and one run of one of them."""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyactcomp
from pyactcomp.config import MIN_BYTES
from pyactcomp.readers.nodes import CAST, VIEWS

from . import holds_data as data
from . import holds_models as models
from .methods import VANILLA, Context
from .rows import Row
from .training import STEP_SEED, clean

MUST_FAIL = "nearest2"
EVERY = 10
"""Steps whose mean training loss is one point of the curve."""


def _vanilla(_: nn.Module) -> Context:
    return nullcontext


def _compress(mode: str) -> Callable[[nn.Module], Context]:
    def apply(module: nn.Module) -> Context:
        pyactcomp.compress(module, mode=mode)
        return nullcontext

    return apply


def _is_cast_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor``, or the tensor that it is a view of, is a parameter in another dtype."""
    node = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST:
        return False
    leaf = node.next_functions[0][0]
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)


def _nearest_in_two_bits(module: nn.Module) -> Context:
    """Pack in two bits, rounded to nearest, what int8 packs where it is not fused."""

    def pack(tensor: Tensor) -> Tensor | pyactcomp.codec.Packed:
        owner = tensor if tensor._base is None else tensor._base
        packs = tensor.requires_grad and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES
        if not packs or owner.is_leaf or _is_cast_parameter(tensor):
            return tensor
        return pyactcomp.codec.quantize(tensor, bits=2, rounding="nearest")

    def unpack(packed: Tensor | pyactcomp.codec.Packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else pyactcomp.codec.dequantize(packed)

    return lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)


ARMS: dict[str, Callable[[nn.Module], Context]] = {
    VANILLA: _vanilla,
    "lossless": _compress("lossless"),
    "int8": _compress("int8"),
    MUST_FAIL: _nearest_in_two_bits,
}
"""Each changes the module and returns the context of its forwards. The last shows that the test can tell."""


class Task(ABC):
    """A model, its data and how it is trained.

    A batch is made from one row of what :meth:`order` drew for the seed, so that all arms see the same.
    """

    name: str
    metric: str
    lower_is_better: bool
    validate_every: int
    steps: int
    autocast = False
    note = ""
    """What a reader of the table should know, in a sentence."""
    device: str

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model, on the current default device."""

    @abstractmethod
    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; its groups' learning rates are the highest of the schedule."""

    @abstractmethod
    def order(self, seed: int) -> list[Tensor]:
        """Return what says, step by step, which data are seen and how: tensors [steps, ...] on the CPU."""

    @abstractmethod
    def batch(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Return a step's batch from that step's rows of the order."""

    @abstractmethod
    def evaluate(self, module: nn.Module) -> tuple[float, float]:
        """Return the validation loss and the metric of a module in evaluation mode."""


class ByteLanguage(Task):
    """Next bytes of the installed packages' source; validation on packages that training never saw."""

    name, metric, lower_is_better = "byte_lm", "validation bits per byte", True
    validate_every = 200
    autocast = True

    def __init__(self, device: str, tiny: bool) -> None:
        self.device = device
        # After 400 steps of 64 windows trainings that differ in rounding alone were a percent apart: all had only just
        # left the plateau of the first 100 steps, at times that chance decides.
        self.steps = 12 if tiny else 1200
        self.size, windows = (16, 16) if tiny else (32, 1024)
        self.shape = models.Shape(2, 128, 2, 64) if tiny else models.Shape(8, 512, 8, 256)
        limits = (1 << 17, 1 << 15) if tiny else (data.TEXT_BYTES, data.PACKAGE_BYTES)
        text = data.installed_sources(data.site_packages(), *limits)
        self.text = text.training.to(device)
        self.offsets = torch.arange(self.shape.window + 1, device=device)
        held_out = text.validation.to(device)
        starts = torch.linspace(0, len(held_out) - len(self.offsets), windows, device=device).long()
        self.validation = held_out[starts[:, None] + self.offsets].long()

    def build(self) -> nn.Module:
        return models.ByteModel(self.shape)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(models.by_decay(module, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def order(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(len(self.text) - self.shape.window, (self.steps, self.size), generator=generator)]

    def batch(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        windows = self.text[drawn[0][:, None] + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def evaluate(self, module: nn.Module) -> tuple[float, float]:
        losses = [module(windows[:, :-1], windows[:, 1:]).float() for windows in self.validation.split(256)]
        loss = float(torch.stack(losses).mean())
        return loss, loss / math.log(2)


class Digits(Task):
    """Handwritten digits, scaled up to 64 pixels."""

    # The cross-entropy of a classifier that is nearly always right hangs on a handful of images and varies by tens of
    # percent from seed to seed; half a percent of the accuracy is four to five of the 900 images.
    name, metric, lower_is_better = "resnet50_digits", "validation accuracy", False
    validate_every = 50

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        # After 300 steps all arms were at 99 %, and what must fail had come within 0.3 % of vanilla.
        self.steps = 12 if tiny else 150
        self.size, self.side = (32, 16) if tiny else (128, 64)
        images = data.digits()
        self.images, self.labels = images.training.to(device), images.training_labels.to(device)
        # Five views of each image make the accuracy finer than one image in 900.
        views = data.shifted_views(images.validation, self.side).to(device)
        self.validation = views.contiguous(memory_format=torch.channels_last)
        self.validation_labels = images.validation_labels.repeat(5).to(device)

    def build(self) -> nn.Module:
        model = models.small_convolutional() if self.tiny else models.resnet50()
        return model.to(memory_format=torch.channels_last)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        # After 150 steps on a CPU (ResNet-26, 32 px, 64 images a batch) this was at an accuracy of 0.96 and SGD with
        # 0.02 at 0.20; ResNet-50 (32 px) with SGD and 0.1 was at 0.95 after 200 steps of 128.
        return torch.optim.AdamW(models.by_decay(module, 0.05), lr=1e-3, fused=True)

    def order(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-self.steps * self.size // len(self.images))
        images = torch.cat([torch.randperm(len(self.images), generator=generator) for _ in range(epochs)])
        shape = (self.steps, self.size)
        return [images[: self.steps * self.size].view(shape), data.random_transforms(shape, generator)]

    def batch(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        chosen, transforms = drawn
        images = data.render(self.images[chosen], transforms, self.side)
        return images.contiguous(memory_format=torch.channels_last), self.labels[chosen]

    def evaluate(self, module: nn.Module) -> tuple[float, float]:
        logits = torch.cat([module.model(images) for images in self.validation.split(450)])
        loss = F.cross_entropy(logits.float(), self.validation_labels)
        return float(loss), float((logits.argmax(1) == self.validation_labels).double().mean())


class Memorise(Task):
    """Random bytes by heart: a loss near zero, where a gradient is a small difference of large numbers.

    The gradient of the logits is ``exp(log p) - 1`` for the right byte. Where log-probabilities are rounded, that is
    wrong by the rounding, however small it should be: an error that trainings which end at a higher loss never see.
    """

    # No share of a loss near zero is a limit, since trainings that differ in rounding alone end tens of percent apart.
    # The share of bytes that are known ends at 1 in all of them. Known is above 0.99: 8-bit codes of log-probabilities
    # down to -10 have a step of 0.04, which hides what lies above 0.98; 0.9 is reached with them as well.
    name, metric, lower_is_better = "memorise", "bytes recalled with probability above 0.99", False
    known = 0.99
    note = (
        "`memorise` ends at a loss near zero: there the gradient of the logits is a small difference of large numbers, "
        "so rounded log-probabilities show. Its validation data are its training data."
    )
    validate_every = 25

    def __init__(self, device: str, tiny: bool) -> None:
        self.device = device
        self.steps = 12 if tiny else 150
        self.shape, sequences = (models.Shape(2, 128, 2, 32), 16) if tiny else (models.Shape(2, 128, 2, 64), 32)
        self.sequences = data.random_sequences(sequences, self.shape.window + 1).to(device)

    def build(self) -> nn.Module:
        return models.ByteModel(self.shape)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def order(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.stack([torch.randperm(len(self.sequences), generator=generator) for _ in range(self.steps)])]

    def batch(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        chosen = self.sequences[drawn[0]]
        return chosen[:, :-1], chosen[:, 1:]

    def evaluate(self, module: nn.Module) -> tuple[float, float]:
        log_probabilities = module.logits(self.sequences[:, :-1]).float().log_softmax(-1)
        right = log_probabilities.gather(-1, self.sequences[:, 1:, None])
        return -float(right.mean()), float((right.exp() > self.known).double().mean())


TASKS: dict[str, type[Task]] = {task.name: task for task in (ByteLanguage, Digits, Memorise)}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the tensors' values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def number(value: float) -> float | None:
    """Return a value that JSON can hold, None where the training diverged."""
    return round(value, 6) if math.isfinite(value) else None


def curve(losses: Tensor) -> list[list[float | None]]:
    """Return [step, mean loss of the steps since the last point], from the losses of all steps."""
    chunks = losses.tolist()
    points = [(min(i + EVERY, len(chunks)), chunks[i : i + EVERY]) for i in range(0, len(chunks), EVERY)]
    return [[step, number(sum(values) / len(values))] for step, values in points]


def validate(task: Task, module: nn.Module) -> tuple[float, float]:
    """Return the validation loss and the metric, leaving the module in training mode."""
    module.eval()
    with torch.no_grad(), torch.autocast(task.device, torch.bfloat16, enabled=task.autocast):
        result = task.evaluate(module)
    module.train()
    return result


def train(task: Task, arm: str, seed: int) -> Row:
    """Train once and return the figures of the row; ``pair`` tells runs that may be compared."""
    clean(task.device)
    on_gpu = task.device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(seed)
    with torch.device(task.device):
        module = task.build()
    order = task.order(seed)
    pair = fingerprint(
        [*module.state_dict().values(), *order, *task.batch(*(rows[0].to(task.device) for rows in order))]
    )
    order = [rows.to(task.device) for rows in order]
    context = ARMS[arm](module.train())
    optimizer = task.optimizer(module)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps=task.steps, pct_start=0.1, cycle_momentum=False
    )
    losses = torch.zeros(task.steps, device=task.device)
    validation: list[list[float | None]] = []
    memory: Row = {}

    torch.manual_seed(STEP_SEED + seed)
    begin = time.monotonic()
    for step in range(task.steps):
        batch = task.batch(*(rows[step] for rows in order))
        before = torch.cuda.memory_allocated() if on_gpu else 0
        with torch.autocast(task.device, torch.bfloat16, enabled=task.autocast), context():
            loss = module(*batch)
        if on_gpu and step == EVERY:
            memory = {"act_bytes": torch.cuda.memory_allocated() - before}
        loss.backward()
        losses[step] = loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % task.validate_every == 0 or step + 1 == task.steps:
            measured = validate(task, module)
            validation.append([step + 1, *map(number, measured)])
            if not math.isfinite(measured[0]):
                break
    _, final_loss, final = validation[-1]
    return {
        "metric": task.metric,
        "lower_is_better": task.lower_is_better,
        "value": final,
        "loss": final_loss,
        "pair": pair,
        "parameters": models.parameters_of(module),
        **memory,
        "train_s": round(time.monotonic() - begin, 2),
        "training_curve": curve(losses[: step + 1]),
        "validation_curve": validation,
    }
