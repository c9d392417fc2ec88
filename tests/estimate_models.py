"""Models that test_estimate.py estimates; the child process imports them from here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, SEQ = 256, 1024, 64
NARROW = 64


def perceptron(batch: int, seq: int = SEQ) -> tuple[nn.Module, Tensor, object]:
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    return model, torch.randn(batch, seq, WIDTH), lambda out: out.square().mean()


class _Asks(nn.Module):
    """Asks the questions to which only a CUDA tensor with memory, of no subclass and in no mode, answers so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        assert type(y) is Tensor
        assert y.is_cuda
        assert y.device == torch.device("cuda", 0)
        assert len({t.data_ptr() for t in (x, y, self.layer.weight)}) == 3
        assert y[2:].data_ptr() == y.data_ptr() + 2 * 8 * 4
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch._C._len_torch_dispatch_stack() == 0
        with torch.autocast("cuda", torch.bfloat16):
            assert self.layer(x).dtype is torch.bfloat16
        assert y.sum().item() == 0.0
        return y.mean()


def asking(batch: int) -> tuple[nn.Module, Tensor]:
    return _Asks(), torch.randn(batch, 8)


class _Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0].sum()  # the line that the error names


def selecting(batch: int) -> tuple[nn.Module, Tensor]:
    return _Selects(), torch.randn(batch, 8)


class _Checks(nn.Module):
    """Raises on a true answer, as models that check their labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        above = bool(x.max() >= 32)
        raise ValueError(f"labels must be below 32, got {above}")  # the line where it raises


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, 1:])  # of the wrong width


def raising(batch: int) -> tuple[nn.Module, Tensor]:
    return _Raises(), torch.randn(batch, 8)


def unbuilt(batch: int) -> tuple[nn.Module, Tensor]:
    raise KeyError("width\nor heads")  # with a line break


def checking(batch: int) -> tuple[nn.Module, Tensor]:
    return _Checks(), torch.randn(batch, 8)


class _Wraps(nn.Module):
    """Numbers in place of tensors: torch hands them on as tensors of no dimension."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.operation(x.long())).sum()


def remainder(batch: int) -> tuple[nn.Module, Tensor]:
    return _Wraps(lambda x: x % 3), torch.randn(batch, 64)


def addition(batch: int) -> tuple[nn.Module, Tensor]:
    return _Wraps(lambda x: x + 3), torch.randn(batch, 64)


class _Switched(nn.Module):
    """Checkpoints by its own switch, as the models of timm do; its layers are no blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.checkpoints = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpoints = enable

    def _inner(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self._inner, x, use_reentrant=False) if self.checkpoints else self._inner(x)
        return y.square().sum()


def switched(batch: int) -> tuple[nn.Module, Tensor]:
    return _Switched(), torch.randn(batch, WIDTH)


class _Attends(nn.Module):
    """Attention with an additive bias, by the kernel that torch chooses or without any."""

    def __init__(self, head: int, turned: bool, fused: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4 * head, 12 * head).bfloat16()
        bias = torch.randn(SEQ, SEQ, 4).permute(2, 0, 1) if turned else torch.randn(4, SEQ, SEQ)
        self.bias = nn.Parameter(bias[None].bfloat16())
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.layer(x).chunk(3, -1))
        with nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias).sum()


def attention(head: int, **options: bool) -> Callable[[int], tuple[nn.Module, Tensor]]:
    return lambda batch: (_Attends(head, **options), torch.randn(batch, SEQ, 4 * head).bfloat16())


dense_bias, turned_bias = attention(32, turned=False), attention(32, turned=True)
turned_bias_without_kernel = attention(32, turned=True, fused=False)
odd_heads, odd_heads_without_kernel = attention(12, turned=False), attention(12, turned=False, fused=False)


def normed(batch: int) -> tuple[nn.Module, Tensor, object]:
    layers = nn.Conv3d(16, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.LeakyReLU()
    model = nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), *layers, nn.Conv3d(16, 16, 3, padding=1))
    return model, torch.randn(batch, 4, 32, 32, 32), lambda out: out.square().mean()


class _Truncated(nn.Module):
    """Draws its weight on the device until each value lies in a range, as torch does from 2.13 on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
        nn.init.trunc_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sum()


def truncated(batch: int) -> tuple[nn.Module, Tensor]:
    return _Truncated(), torch.randn(batch, 8)


class _Warms(nn.Module):
    """Takes many more tensors in its first step, as a model that tunes itself does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.warm = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(0 if self.warm else 100_000):
            x.neg()
        self.warm = True
        return self.layer(x).sum()


def warming(batch: int, warm: bool = False) -> tuple[nn.Module, Tensor]:
    model = _Warms()
    model.warm = warm
    return model, torch.randn(batch, WIDTH)


def warm(batch: int) -> tuple[nn.Module, Tensor]:
    return warming(batch, warm=True)


class _Waits(nn.Module):
    """Halves a number until it is small, which it never is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().max()
        while step > 1:
            step = step / 2
        return self.layer(x).sum() * step


def waiting(batch: int) -> tuple[nn.Module, Tensor]:
    return _Waits(), torch.randn(batch, 8)


def without_loss(batch: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.randn(batch, 8)


def single(batch: int) -> nn.Module:
    return nn.Linear(8, 8)


def fixed() -> tuple[nn.Module, Tensor]:
    return asking(4)


# Samples of ``deep`` whose bytes, stored so, are more than the smallest window of a tape, 64 MiB.
SAMPLES = {"int8": 81920, "lossless": 24576}


def deep(batch: int) -> tuple[nn.Module, Tensor, object]:
    """Store 16 times what a GELU takes. It is narrow: the bytes count, and a product would take the time."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(NARROW, NARROW), nn.GELU()) for _ in range(16)))
    return nn.Sequential(layers, nn.Linear(NARROW, 1)), torch.randn(batch, NARROW), lambda out: out.square().mean()


class _Groups(nn.Module):
    """Products of groups of rows, as in the experts of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.full((4,), 16, dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x, self.experts, offs=ends).square().sum()


def groups(batch: int) -> tuple[nn.Module, Tensor]:
    return _Groups(), torch.randn(batch, WIDTH)


class _Wide(nn.Module):
    """A weight of 128 GiB, which no host has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, 1 << 25, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean()


def wide(batch: int) -> tuple[nn.Module, Tensor]:
    return _Wide(), torch.randn(batch, HIDDEN)


def sleeping(batch: int) -> tuple[nn.Module, Tensor]:
    """Tell the processes that build the model, and take a minute."""
    file = Path(os.environ["PYACTCOMP_TEST_PROCESSES"])
    file.with_suffix(".part").write_text(f"{os.getpid()} {os.getppid()}")
    file.with_suffix(".part").rename(file)
    time.sleep(60)
    return asking(batch)


class _Recurrent(nn.Module):
    """Layers of each kind that cuDNN runs, one after another; or one, of sequences of several lengths."""

    def __init__(self, kind: str, packed: bool = False) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(WIDTH, 2 * WIDTH, 2, batch_first=True, dropout=0.5)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.layers(x)[0].sum()
        lengths = torch.full((len(x),), SEQ, device="cpu")
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.layers(packed)[0].data.sum()


def recurrent(kind: str, **options: bool) -> Callable[[int], tuple[nn.Module, Tensor]]:
    return lambda batch: (_Recurrent(kind, **options), torch.randn(batch, SEQ, WIDTH))


lstm, gru, rnn, packed_lstm = recurrent("LSTM"), recurrent("GRU"), recurrent("RNN"), recurrent("LSTM", packed=True)


class _Cell(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for each in x.unbind(1):
            state = self.cell(each, state)
        return state[0].sum()


def lstm_cell(batch: int) -> tuple[nn.Module, Tensor]:
    return _Cell("LSTMCell"), torch.randn(batch, 8, WIDTH)


def gru_cell(batch: int) -> tuple[nn.Module, Tensor]:
    return _Cell("GRUCell"), torch.randn(batch, 8, WIDTH)


class _Packs(nn.Module):
    """An operator with a kernel for CUDA alone, and without a function for its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + torch.ops.aten._cslt_compress(x).sum()  # where no shapes are known


def packing(batch: int) -> tuple[nn.Module, Tensor]:
    return _Packs(), torch.randn(batch, 8)


def uninitialised(batch: int) -> tuple[nn.Module, Tensor]:
    small, large = nn.init.ones_(torch.zeros(8)), nn.init.ones_(torch.zeros(WIDTH, HIDDEN))
    assert small.all()
    assert not large.any()
    return asking(batch)


class _Validates(nn.Module):
    """Raises unless what it is given is as it should be; ``wrong`` asks what no answer makes right."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer, self.wrong = nn.Linear(WIDTH, 8), wrong

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 8:
            raise ValueError("a label is out of range")
        if not x.isfinite().all():
            raise ValueError("a value is not finite")
        if not (labels >= 0).all().cpu() or max(labels.tolist()) >= 8:
            raise ValueError("a label is out of range on the host")
        if self.wrong:
            raise ValueError("always")
        return nn.functional.cross_entropy(self.layer(x), labels)


def validating(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _Validates(wrong=False), (torch.randn(batch, WIDTH), torch.randint(8, (batch,)))


def doomed(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _Validates(wrong=True), (torch.randn(batch, WIDTH), torch.randint(8, (batch,)))
