"""Suite `codec`: quantise and dequantise against a device copy and the peers, device time; and the forms of 16 bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyactcomp import codec
from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.codec.kernels import Kernel
from pyactcomp.readers.forms import Comparison

from .measure import CONTENDED, buffer_sets, device_task, host_task, interleave
from .rows import Options, Row, failure, quantile, summary

MIB = 1 << 20
BITS, GROUP = 8, 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
ROUNDS = {"cuda": 25, "cpu": 5}
CHECK_CHUNK = 1 << 24
PEER_ERROR = 0.05
"""Largest relative L2 error of a peer on normal data. Eight bits over +-6.5 sigma leave a step of 0.05 sigma,
whose rounding error is 0.015 sigma; output that is not restored data at all is off by 1 or more."""


ABOVE_ZERO = Comparison("above", 0.0, float("inf"), 1.0, -1.0)


@dataclass(frozen=True)
class Form:
    """A form between codes and float32 itself: what it holds, made of normal numbers, and what it restores of that."""

    encoding: str
    held: Callable[[Tensor], Tensor]
    restored: Callable[[Tensor], Tensor] = lambda x: x
    narrow: torch.dtype | None = None
    comparison: Comparison | None = None


# Logits of standard deviation 8: some lie on the coarse steps, some probabilities are one.
FORMS = {
    "probabilities": Form("probability", lambda x: x.mul_(8).sigmoid_()),
    "log-probabilities": Form("log_probability", lambda x: torch.nn.functional.logsigmoid(x.mul_(8))),
    "bfloat16": Form("bfloat16", lambda x: x),
    "float16": Form("float16", lambda x: x.mul_(8)),
    "artanh": Form("artanh", lambda x: x.tanh_()),
    "scaled": Form("scaled", lambda x: x),
    "cast": Form("cast", lambda x: x.bfloat16().float(), narrow=torch.bfloat16),
    "above-zero": Form("comparison", lambda x: x, lambda x: torch.where(x > 0, 1.0, -1.0), comparison=ABOVE_ZERO),
}


@dataclass(frozen=True)
class Case:
    """One tensor: its dtype and its size in bytes; normal numbers for codes, or what one of FORMS holds."""

    dtype: str
    nbytes: int
    form: str = ""

    @property
    def name(self) -> str:
        size = f"{self.nbytes // MIB}MiB" if self.nbytes >= MIB else f"{self.nbytes >> 10}KiB"
        return f"{self.form or self.dtype}/{size}"

    @property
    def numel(self) -> int:
        return self.nbytes // DTYPES[self.dtype].itemsize

    def draw(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(self.numel, generator=generator, device=generator.device, dtype=DTYPES[self.dtype])
        return FORMS[self.form].held(x) if self.form else x

    def kernel(self, implementation: str, device: torch.device) -> Kernel:
        if not self.form:
            return codec.bind(implementation, DTYPES[self.dtype], BITS, GROUP, False, False, device)
        form = FORMS[self.form]
        return codec.bind_form(implementation, form.encoding, torch.float32, device, form.narrow, form.comparison)


def cases(tiny: bool, device: str) -> list[Case]:
    """Return the tensors to measure, the most telling first."""
    if tiny:
        return [Case("bf16", 8 << 10), Case("fp32", 16 << 10)]
    if device == "cpu":
        return [Case("fp32", 64 * MIB), Case("bf16", 64 * MIB), *(Case("fp32", 64 * MIB, form) for form in FORMS)]
    main = [Case("bf16", size * MIB) for size in (256, 64, 1, 1024, 8)]
    main += [Case("fp32", size * MIB, form) for form in FORMS for size in (256, 64, 1)]
    return main + [Case(dtype, size * MIB) for dtype in ("fp32", "fp16") for size in (256, 64, 1)]


@dataclass(frozen=True)
class Provider:
    """A way to pack a tensor and to restore it; ``tensors`` lists what it stores in between."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    tensors: Callable[[Any], tuple[Tensor, ...]]
    exact_format: bool = False
    expected: Callable[[Tensor], Tensor] = lambda x: x
    """What is restored but for rounding."""
    capturable: bool = True
    """False for what launches on the default stream: a graph would not hold it."""


def _cast(_: Case, __: torch.device) -> Provider:
    return Provider("cast-bfloat16", lambda x: x.bfloat16(), lambda stored: stored.float(), lambda stored: (stored,))


def _copy(_: Case, __: torch.device) -> Provider:
    def copy(x: Tensor) -> Tensor:
        return torch.add(x, 0)

    # A kernel that copies is the stricter roofline: on an H200 it moved 3.87, 4.16 and 4.26 TB/s at 64, 256 and 1024
    # MiB, where the driver's memcpy moved 3.67, 4.05 and 4.19, and 2.7 as a node of a graph at 1024 MiB.
    return Provider("copy", copy, copy, lambda stored: (stored,))


def _memcpy(_: Case, __: torch.device) -> Provider:
    return Provider("memcpy", torch.clone, torch.clone, lambda stored: (stored,))


def _ours(implementation: str) -> Callable[[Case, torch.device], Provider]:
    def make(case: Case, device: torch.device) -> Provider:
        if (reason := codec.unavailable_reason(implementation, device)) is not None:
            raise ImportError(reason)
        kernel, numel, dtype = case.kernel(implementation, device), case.numel, DTYPES[case.dtype]

        def encode(source: Tensor) -> Tensor:
            out = torch.empty(kernel.packed_nbytes(numel), dtype=torch.uint8, device=device)
            kernel.encode(source, out, 0)
            return out

        def decode(packed: Tensor) -> Tensor:
            out = torch.empty(numel, dtype=dtype, device=device)
            kernel.decode(packed, out)
            return out

        expected = FORMS[case.form].restored if case.form else lambda x: x
        name = implementation if implementation == "reference" else f"pyactcomp-{implementation}"
        return Provider(name, encode, decode, lambda stored: (stored,), not case.form, expected)

    return make


def _bitsandbytes(_: Case, __: torch.device) -> Provider:
    functional = importlib.import_module("bitsandbytes.functional")
    return Provider(
        "bitsandbytes",
        lambda x: functional.quantize_blockwise(x, blocksize=256),
        lambda stored: functional.dequantize_blockwise(stored[0], stored[1]),
        lambda stored: (stored[0], stored[1].absmax),
        capturable=False,
    )


def _eager(case: Case, _: torch.device) -> Provider:
    dtype = DTYPES[case.dtype]

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax() / 127
        return (x / scale).round().to(torch.int8), scale

    return Provider("eager-absmax", encode, lambda stored: stored[0].to(dtype) * stored[1], lambda stored: stored)


# Of the forms; what is ours serves them as well as codes.
CASTS = {"cast-bfloat16": _cast}
OF_ALL = frozenset({"copy", "reference", "pyactcomp-cpu", "pyactcomp-cuda", "pyactcomp-triton"})


def makers(device: str) -> dict[str, Callable[[Case, torch.device], Provider]]:
    """Return the providers by name; the copy is the roofline of the others."""
    if device == "cpu":
        return {
            "copy": _copy,
            "pyactcomp-cpu": _ours("cpu"),
            "reference": _ours("reference"),
            "eager-absmax": _eager,
        }
    return {
        "copy": _copy,
        "memcpy": _memcpy,
        "pyactcomp-cuda": _ours("cuda"),
        "pyactcomp-triton": _ours("triton"),
        "bitsandbytes": _bitsandbytes,
        "eager-absmax": _eager,
        **CASTS,
    }


def serves(method: str, case: Case) -> bool:
    """Return whether a provider is for the case: of the peers, a cast packs what 16 bits hold, the others codes."""
    if method in CASTS:
        return bool(case.form) and FORMS[case.form].comparison is None
    return method in OF_ALL or not case.form


def share_of_copy(nbytes: int, us: float, copy_nbytes: int, copy_us: float) -> float:
    """Return the bytes moved over time as a share of the copy's: 1 is as fast as a copy moves bytes."""
    return (nbytes / us) / (copy_nbytes / copy_us)


def check(provider: Provider, source: Tensor) -> float:
    """Return the relative L2 error of packing and restoring; raise where the result is not right.

    Ours must have the reference's bytes and stay within its error bound in every element.
    """
    stored = provider.encode(source)
    restored = provider.decode(stored)
    squares = torch.zeros(2, dtype=torch.float64, device=source.device)
    for begin in range(0, source.numel(), CHECK_CHUNK):
        part = slice(begin, min(begin + CHECK_CHUNK, source.numel()))
        x, y = source[part], restored[part]
        expected = provider.expected(x).double()
        difference = y.double() - expected
        squares += torch.stack([difference.square().sum(), expected.square().sum()])
        if not provider.exact_format:
            continue
        # A chunk is whole groups, so its codes and parameters are slices of the tensor's.
        exact = reference.quantize(x)
        codes, groups = x.numel(), fmt.group_count(x.numel(), GROUP) * fmt.PARAMETER_BYTES
        offset = fmt.parameters_offset(source.numel(), BITS) + part.start // GROUP * fmt.PARAMETER_BYTES
        same_codes = torch.equal(stored[part], exact[:codes])
        if not same_codes or not torch.equal(stored[offset : offset + groups], exact[-groups:]):
            raise RuntimeError(f"{provider.name} differs from the reference's bytes in elements {part}")
        if not bool((difference.abs() <= reference.error_bound(x, dtype=x.dtype)).all()):
            raise RuntimeError(f"{provider.name} exceeds the error bound in elements {part}")
    error = float((squares[0] / squares[1]).sqrt())
    if not error <= PEER_ERROR:
        raise RuntimeError(f"{provider.name} restores the data with a relative error of {error:.3g} > {PEER_ERROR}")
    return error


def measure(case: Case, methods: list[str], options: Options) -> Iterator[Row]:
    """Yield the rows of one tensor: both directions of the copy and of ``methods``, timed in the same rounds."""
    device = torch.device(options.device)
    gpu = options.device == "cuda"
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if gpu else 0
    sets = buffer_sets(case.nbytes, l2_bytes) if gpu else 1
    generator = torch.Generator(device).manual_seed(0)
    sources = [case.draw(generator) for _ in range(sets)]

    tasks: dict[str, Callable[[], float]] = {}
    results: dict[str, Row] = {}
    for name, make in makers(options.device).items():
        if name != "copy" and name not in methods:
            continue
        row: Row = {
            "suite": "codec",
            "workload": case.name,
            "method": name,
            "scale": options.scale,
            "nbytes": case.nbytes,
            "sets": sets,
        }
        try:
            provider = make(case, device)
            error = check(provider, sources[0])
            stored = [provider.encode(x) for x in sources]
            moved = case.nbytes + sum(t.numel() * t.element_size() for t in provider.tensors(stored[0]))
            for phase, function, items in (
                ("quantise", provider.encode, sources),
                ("dequantise", provider.decode, stored),
            ):
                if gpu:
                    task, timer = device_task(function, items, capture=provider.capturable)
                else:
                    task, timer = host_task(function, items), "host"
                tasks[f"{name}:{phase}"] = task
                results[f"{name}:{phase}"] = {
                    **row, "phase": phase, "timer": timer, "bytes_moved": moved, "relative_l2": error
                }  # fmt: skip
        except (ImportError, RuntimeError, TypeError, ValueError) as problem:
            yield {**row, **failure(problem)}

    samples = interleave(tasks, 3 if options.tiny else ROUNDS[options.device])
    for key, row in results.items():
        copy_key = f"copy:{row['phase']}"
        copy_us = quantile(samples[copy_key], 0.5)
        us = quantile(samples[key], 0.5)
        yield {
            **row,
            "status": "ok",
            **summary(samples[key], "us"),
            "share_of_copy": share_of_copy(row["bytes_moved"], us, results[copy_key]["bytes_moved"], copy_us),
            "time_over_copy": us / copy_us,
            "contended": quantile(samples[copy_key], 0.9) > CONTENDED * copy_us,
        }


def run(options: Options) -> None:
    """Measure every case that is selected, missing and within the budget."""
    store = options.store("codec")
    longest = 0.0
    for case in cases(options.tiny, options.device):
        served = [name for name in makers(options.device) if serves(name, case)]
        wanted = [name for name in served if options.selects(case.name, name)]
        pending = [name for name in wanted if options.again or not store.has(workload=case.name, method=name)]
        if not pending:
            continue
        if not options.budget.allows(longest):
            print(f"codec {case.name}: not started, the budget is used up")
            return
        begin = options.budget.clock()
        for row in measure(case, pending, options):
            store.append(row)
            figure = f"{row['median_us']:9.2f} us  {row['share_of_copy']:.3f} of copy" if row["status"] == "ok" else ""
            print(f"codec {case.name:12} {row['method']:17} {row.get('phase', ''):10} {row['status']:11} {figure}"
                  f"{row.get('reason', '')}", flush=True)  # fmt: skip
        longest = max(longest, options.budget.clock() - begin)
