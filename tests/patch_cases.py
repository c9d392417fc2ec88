"""What each patch of ``patches`` is for, in a tree that has it: the working directory, with Triton's interpreter.

Run by ``test_patches.py`` with the name of a case.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

TREE = Path.cwd()
MIB = 1 << 20


def plain_and_compressed(model: nn.Module, x: Tensor, factors: Tensor, **options: Any) -> tuple[list[Tensor], ...]:
    """Return output and gradients of ``(model(x) * factors).sum()``, without and with compression."""
    import pyactcomp

    results = []
    for compressed in (False, True):
        if compressed:
            pyactcomp.compress(model, **options)
        out = model(x)
        results.append([out.detach(), *torch.autograd.grad((out * factors).sum(), list(model.parameters()))])
    return results[0], results[1]


def activation() -> None:
    from functional_checks import EPS, SEED, assert_codes_saved, assert_within, error_of, normal, saved_by
    from transformers.activations import QuickGELUActivation

    import pyactcomp
    from pyactcomp import Packed, dequantize
    from pyactcomp.codec.format import packed_nbytes
    from pyactcomp.functional import Codes, quick_gelu  # type: ignore[attr-defined]
    from pyactcomp.fusions import fused_modules

    # Whole tiles of the kernels, and a part of one in which the last group is not whole either.
    numel = 4096 + 99
    forms = [(8, 64, torch.float32), (8, 256, torch.bfloat16), (4, 64, torch.bfloat16), (2, 128, torch.float32)]
    for impl in ("triton", "reference"):
        for bits, group_size, dtype in forms:
            x, grad = (3 * normal(numel, seed=seed).to(dtype) for seed in (0, 1))
            leaf = x.clone().requires_grad_()
            codes = Codes(bits=bits, group_size=group_size, seed=SEED, impl=impl)  # type: ignore[arg-type]
            compute = functools.partial(quick_gelu, leaf, codes=codes)
            saved, out = saved_by(compute), compute()
            assert [each.numel() for each in saved] == [packed_nbytes(numel, bits, group_size)]
            assert_codes_saved(saved, x, bits, group_size, None)
            (found,) = torch.autograd.grad(out, leaf, grad)
            restored = dequantize(Packed(saved[0], (numel,), (1,), dtype, bits, group_size), impl="reference")
            # The second derivative is at most 0.851.
            for values, stored in ((x, 0.851 * error_of(x, bits, group_size)), (restored, 0.0)):
                wide = values.double().requires_grad_()
                exact = wide * torch.sigmoid(1.702 * wide)
                (expected,) = torch.autograd.grad(exact, wide, grad.double())
                # A dozen operations on magnitudes of at most |x|, or of at most 1.2 in the derivative, whose 1 - s
                # cancels.
                eps, a, g = torch.finfo(dtype).eps, wide.detach().abs(), grad.double().abs()
                if values is x:
                    assert_within(out, exact.detach(), 12 * eps * a)
                assert_within(found, expected, (stored + (1.2 * 12 + 2 * 1.702 * a) * eps) * g)

    x, factors = normal(128, 64), normal(128, 64, seed=1)
    for impl in ("triton", "auto"):
        model = nn.Sequential(nn.Linear(64, 256), QuickGELUActivation(), nn.Linear(256, 64))
        hidden, weight = model[0](x).detach(), model[2].weight.detach()
        plain, compressed = plain_and_compressed(model, x, factors, impl=impl)
        assert fused_modules(model) == [("1", "QuickGELU")]
        # The model's input is kept, and the second Linear's is computed again.
        assert pyactcomp.report(model).stored_bytes == x.nbytes + packed_nbytes(hidden.numel(), 8, 64)
        of_hidden = (factors @ weight).abs().double()
        bound = (0.851 * error_of(hidden, 8, 64) * of_hidden).sum(0) + len(x) * EPS * 2 * of_hidden.sum(0)
        assert_within(compressed[2], plain[2].double(), bound)
        pyactcomp.decompress(model)
        pyactcomp.compress(model, mode="lossless")
        assert fused_modules(model) == []


BINDINGS = """
#include "bindings/allocator.cpp"
#include "bindings/allocator_config.cpp"
#include "bindings/allocator_dicts.cpp"
#include "bindings/python_values.cpp"
#include "bindings/sharing.cpp"
#include "bindings/simulated_device.cpp"

PYBIND11_MODULE(_settings, module) { pac::bindings::bind_allocator(module); }
"""


def build_settings() -> None:
    """Compile the allocator's core and its bindings, without CUDA and two files at once: all of _core takes minutes."""
    import pybind11

    core = {*(TREE / "csrc" / "allocator").glob("*.cpp"), *(TREE / "csrc" / "device").glob("*.cpp")}
    core -= set((TREE / "csrc" / "device").glob("cuda_*.cpp"))
    core -= {TREE / "csrc" / "allocator" / "runtime.cpp"}
    sources = {"bindings": BINDINGS, "core": "".join(f'#include "{path}"\n' for path in sorted(core))}
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden"]
    compiler += [f"-I{path}" for path in (TREE / "csrc", pybind11.get_include(), sysconfig.get_path("include"))]

    def compiled(name: str) -> str:
        Path(f"{name}.cpp").write_text(sources[name])
        subprocess.run([*compiler, "-c", f"{name}.cpp", "-o", f"{name}.o"], check=True)
        return f"{name}.o"

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, sources))
    library = f"_settings{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([*compiler, "-shared", *objects, "-o", library], check=True)


def setting() -> None:
    build_settings()
    sys.path.insert(0, str(TREE))
    built = importlib.import_module("_settings")
    config = built.AllocatorConfig
    parsed = config.parse("growth:malloc,min_split_remainder_mb:8")
    assert parsed == config(growth="malloc", min_split_remainder="8MiB")
    assert parsed.min_split_remainder == 8 * MIB
    assert str(parsed) == "growth:malloc,min_split_remainder_mb:8"
    assert config().min_split_remainder == MIB
    with pytest.raises(ValueError, match="min_split_remainder must be at least 1 MiB, got 0"):
        config.parse("min_split_remainder_mb:0")
    # 20 MiB serve a request for 15: split by default, whole where the 5 that remain are too few.
    for least, size in ((MIB, 15 * MIB), (5 * MIB - 1, 15 * MIB), (5 * MIB, 20 * MIB), (8 * MIB, 20 * MIB)):
        settings = config(growth="malloc", min_split_remainder=least)
        allocator = built.CachingAllocator(built.SimulatedDevice("1GiB"), settings)
        allocator.free(allocator.allocate(20 * MIB))
        assert allocator.block(allocator.allocate(15 * MIB))["size"] == size
        allocator.check_invariants()
    # In a process of its own: the types of _core and of the library just built are the same to pybind11.
    command = [sys.executable, __file__, "keywords", json.dumps(list(config.settings()))]
    subprocess.run(command, check=True)


def keywords(names: str) -> None:
    """What reads the table follows it by itself; Python's signatures are written, and are held against the table."""
    from allocator_cases import assert_typed

    from pyactcomp.allocator import attach

    settings = json.loads(names)
    assert "min_split_remainder" in settings
    assert set(inspect.signature(attach.enable).parameters) == set(settings)
    assert_typed(TREE / "pyactcomp" / "_core.pyi", settings)
    with mock.patch.object(attach.settings, "override") as override, mock.patch.object(attach, "activate"):
        attach.enable(min_split_remainder="8MiB")  # type: ignore[call-arg]
    assert override.call_args.kwargs["min_split_remainder"] == "8MiB"


def verb() -> None:
    def output(*arguments: str) -> str:
        command = [sys.executable, "-m", "pyactcomp", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "formats" in output("--help")
    rows = json.loads(output("formats", "--json"))
    # A code, and two numbers of 16 bits a group.
    taken = {(row["bits"], row["group_size"]): row["bits_per_element"] for row in rows}
    assert taken == {(bits, size): bits + 32 / size for bits in (8, 4, 2) for size in (64, 128, 256)}
    table = output("formats").split()
    for row in rows:
        assert f"{row['bits_per_element']:g}" in table


def width() -> None:
    from functional_checks import EPS, assert_within, normal

    import pyactcomp
    from pyactcomp.codec import reference
    from pyactcomp.codec.format import packed_nbytes
    from pyactcomp.functional.codes import Codes
    from pyactcomp.functional.convolutional.launch import batch_norm_serves
    from pyactcomp.functional.saving import saving

    x, factors = normal(128, 64), normal(128, 64, seed=1)
    for impl in ("auto", "triton"):
        for fuse in (True, False):
            for mode, bits in (("int8", 8), ("int4", 4)):
                model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                hidden, weight = model[0](x).detach(), model[2].weight.detach()
                plain, compressed = plain_and_compressed(model, x, factors, mode=mode, fuse=fuse, impl=impl)
                # The model's input is kept, and the second Linear's is computed again.
                stored = pyactcomp.report(model).stored_bytes - x.nbytes
                assert stored == packed_nbytes(hidden.numel(), bits, 64) == (bits + 0.5) / 8 * hidden.numel()
                flat = reference.error_bound(hidden.view(-1), bits=bits, group_size=64, stochastic=False)
                # GELU's slope is at most 1.13 and its second derivative 0.8. Sums over the batch are rounded at each
                # term, by torch and here.
                error, rounding = flat.view(hidden.shape).double(), 2 * len(x) * EPS
                of_hidden, of_out = (factors @ weight).abs().double(), factors.abs().double().T
                of_bias = (0.8 * error * of_hidden).sum(0) + rounding * 1.13 * of_hidden.sum(0)
                assert_within(compressed[2], plain[2].double(), of_bias)
                of_weight = of_out @ (1.13 * error + rounding * hidden.abs())
                assert_within(compressed[3], plain[3].double(), of_weight)

    # Kernels that know 8 bits alone leave 4 to others.
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    # 256 elements a channel and more: fewer run torch's own batch norm.
    images = normal(2, 3, 18, 18).to(memory_format=torch.channels_last)
    hidden = model[0](images)
    assert [batch_norm_serves(hidden, None, saving(Codes(bits=bits, impl="triton"))) for bits in (8, 4)] == [
        True,
        False,
    ]
    factors = normal(2, 8, 14, 14)
    stored, errors = [], []
    for mode in ("int8", "int4"):
        plain, compressed = plain_and_compressed(model, images, factors, mode=mode, impl="triton", min_bytes=0)
        stored.append(pyactcomp.report(model).stored_bytes)
        errors.append(distance(compressed[1:], plain[1:]) / distance(plain[1:]))
        pyactcomp.decompress(model)
    assert stored[1] < 0.6 * stored[0]
    # A step is 255 / 15 times as large, and so is the error, but for the draw.
    assert 0 < errors[0] < errors[1] < 2 * 255 / 15 * errors[0]


def distance(tensors: Iterable[Tensor], others: Iterable[Tensor] | None = None) -> float:
    """Return the norm of all tensors, or of their differences from others, as of one vector."""
    pairs = [(t, torch.zeros(())) for t in tensors] if others is None else zip(tensors, others, strict=True)
    return float(sum(float((a - b).norm()) ** 2 for a, b in pairs)) ** 0.5


def main() -> None:
    # Not imported: pybind11 has a type once in a process, and `setting` brings those of the allocator.
    found = importlib.util.find_spec("pyactcomp")
    assert found is not None
    assert found.origin == str(TREE / "pyactcomp" / "__init__.py"), found.origin
    torch.manual_seed(0)
    case, *arguments = sys.argv[1:]
    globals()[case](*arguments)


if __name__ == "__main__":
    main()
