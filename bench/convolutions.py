"""The workspaces of cuDNN's convolutions: ``python -m bench.convolutions`` writes bench/results/convolutions.json.

The bytes that a convolution takes besides its operands and results, forward and for each gradient, on this machine's
GPU. The rule of ``pyactcomp/estimate/kernel_memory.py`` is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .rows import ROOT, Row, Store, provenance

FILE = ROOT / "bench" / "results" / "convolutions.json"
NAMES = ("dims", "n", "cin", "cout", "side", "k", "stride", "groups")
# Of U-Nets, ResNets, ConvNeXt, whisper and wav2vec2, and sides and channels that are no powers of two.
CASES = (
    (3, 2, 32, 32, 128, 3, 1, 1), (3, 2, 64, 32, 128, 3, 1, 1), (3, 2, 1, 32, 128, 3, 1, 1),
    (3, 2, 32, 64, 128, 3, 2, 1), (3, 2, 64, 64, 64, 3, 1, 1), (3, 2, 128, 128, 32, 3, 1, 1),
    (3, 2, 32, 3, 128, 1, 1, 1), (3, 2, 256, 320, 16, 3, 1, 1), (3, 1, 48, 48, 60, 3, 1, 1),
    (3, 4, 24, 40, 33, 3, 1, 1), (3, 8, 16, 16, 32, 5, 1, 1), (3, 2, 32, 32, 64, 3, 1, 32),
    (2, 16, 64, 64, 112, 3, 1, 1), (2, 16, 64, 128, 112, 3, 2, 1), (2, 16, 3, 64, 224, 7, 2, 1),
    (2, 16, 256, 64, 56, 1, 1, 1), (2, 8, 320, 320, 64, 3, 1, 1), (2, 16, 96, 96, 56, 7, 1, 96),
    (2, 4, 48, 48, 255, 3, 1, 1),
    (1, 8, 80, 1024, 3000, 3, 1, 1), (1, 8, 512, 512, 8000, 3, 2, 1), (1, 8, 768, 768, 750, 128, 1, 16),
)  # fmt: skip
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "tf32")
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def workspace(compute: Callable[[], Any]) -> int:
    """Return the most bytes that a call takes beyond its results; the first call takes what stays."""
    compute()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = compute()
    kept = torch.cuda.memory_allocated() - before
    del result
    return torch.cuda.max_memory_allocated() - before - kept


def row(case: tuple[int, ...], dtype: str, last: bool) -> Row:
    """Measure one convolution; ``tf32`` is float32 with ``torch.backends.cudnn.allow_tf32``."""
    dims, n, cin, cout, side, k, stride, groups = case
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype.partition(".")[2])
    layout = LAST[dims] if last else torch.contiguous_format
    how = [stride] * dims, [k // 2] * dims, [1] * dims, False, [0] * dims, groups
    x = torch.randn(n, cin, *[side] * dims, device="cuda").to(kind).to(memory_format=layout)
    weight = torch.randn(cout, cin // groups, *[k] * dims, device="cuda").to(kind).to(memory_format=layout)
    grad = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *how))

    def backward(of_x: bool) -> Any:
        return torch.ops.aten.convolution_backward(grad, x, weight, [0], *how, [of_x, not of_x, False])

    return {
        **dict(zip(NAMES, case, strict=True)),
        "dtype": dtype,
        "last": last,
        "forward": workspace(lambda: torch.ops.aten.convolution(x, weight, None, *how)),
        "input": workspace(lambda: backward(True)),
        "weight": workspace(lambda: backward(False)),
    }


def main() -> None:
    """Measure all cases."""
    origin = {**provenance("cuda"), "cudnn": torch.backends.cudnn.version()}
    store = Store(FILE, origin, key=(*NAMES, "dtype", "last"))
    for case in CASES:
        for dtype in DTYPES:
            for last in (False, True) if case[0] in LAST else (False,):
                store.append(row(case, dtype, last))


if __name__ == "__main__":
    main()
