"""The cost of one allocation and its free, hot: from Python, and from native threads without the interpreter."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .rows import ROOT, Row, quantile, summary

SIZES = (4 << 10, 8 << 20)
"""One of the small pool, one of the large."""
THREADS = (1, 2, 8)
PAIRS, REPEATS = 20_000, 7
SOURCE = Path(__file__).with_name("alloc_threads.cpp")


def check(nbytes: int, stream: int) -> None:
    """Raise unless two blocks held at once are aligned and do not overlap."""
    first, second = (torch._C._cuda_cudaCachingAllocator_raw_alloc(nbytes, stream) for _ in range(2))
    # 256 is the least that CUDA itself guarantees.
    if first % 256 or second % 256 or abs(first - second) < nbytes:
        raise RuntimeError(f"two blocks of {nbytes} bytes are at {first:#x} and {second:#x}")
    for address in (first, second):
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)


def raw_pairs(nbytes: int, stream: int) -> Callable[[int], None]:
    """Return what makes pairs through torch's allocator interface and nothing else."""
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def run(pairs: int) -> None:
        for _ in range(pairs):
            delete(allocate(nbytes, stream))

    return run


def empty_pairs(nbytes: int, device: str) -> Callable[[int], None]:
    """Return what makes pairs as a program does: a tensor, dropped."""
    empty, dtype = torch.empty, torch.uint8

    def run(pairs: int) -> None:
        for _ in range(pairs):
            empty(nbytes, dtype=dtype, device=device)

    return run


def time_pairs(run: Callable[[int], None], pairs: int, repeats: int) -> Row:
    """Return the nanoseconds of a pair, once per repeat after one that is not counted."""
    run(pairs)
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        run(pairs)
        samples.append((time.perf_counter_ns() - begin) / pairs)
    return {"best_ns": min(samples), **summary(samples, "ns")}


def measure_pairs(tiny: bool) -> Iterator[Row]:
    """Yield a row for each way to ask and each size."""
    pairs, repeats = (100, 2) if tiny else (PAIRS, REPEATS)
    stream = torch.cuda.current_stream().cuda_stream
    for nbytes in SIZES:
        check(nbytes, stream)
        for call, run in (("raw", raw_pairs(nbytes, stream)), ("empty", empty_pairs(nbytes, "cuda"))):
            yield {"call": call, "nbytes": nbytes, "threads": 0, **time_pairs(run, pairs, repeats)}


def library(folder: Path = ROOT / "build" / "bench") -> Path:
    """Return the compiled alloc_threads.cpp, built against this torch where it is not there yet."""
    from torch.utils.cpp_extension import include_paths

    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = folder / f"alloc_threads-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".tmp")
    libraries = Path(torch.__file__).parent / "lib"
    includes = [argument for path in include_paths("cuda") for argument in ("-isystem", path)]
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread", *includes, str(SOURCE)]
    command += ["-o", str(draft), f"-L{libraries}", "-lc10", "-lc10_cuda"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} does not compile: {built.stderr.strip()[:300]}")
    draft.replace(target)
    return target


def run_threads(compiled: ctypes.CDLL, threads: int, nbytes: int, pairs: int) -> tuple[float, float]:
    """Return a thread's mean nanoseconds of a pair, and the seconds from the first start to the last end."""
    each, wall, error = (ctypes.c_double * threads)(), ctypes.c_double(), ctypes.create_string_buffer(1024)
    failed = compiled.bench_alloc_pairs(
        threads, ctypes.c_size_t(nbytes), ctypes.c_uint64(pairs), each, ctypes.byref(wall), error,
        ctypes.c_size_t(len(error)),
    )  # fmt: skip
    if failed:
        raise RuntimeError(f"{threads} threads with {nbytes} bytes: {error.value.decode(errors='replace')}")
    return sum(each) / threads, wall.value * 1e-9


def measure_threads(tiny: bool) -> Iterator[Row]:
    """Yield a row for each size and number of threads."""
    pairs, repeats = (100, 2) if tiny else (PAIRS, REPEATS)
    compiled = ctypes.CDLL(str(library()))
    for nbytes in SIZES:
        for threads in THREADS:
            runs = [run_threads(compiled, threads, nbytes, pairs) for _ in range(repeats)]
            samples = [ns for ns, _ in runs]
            rates = [2 * threads * pairs / wall_s for _, wall_s in runs]
            yield {
                "call": "native",
                "nbytes": nbytes,
                "threads": threads,
                "operations_per_s": quantile(rates, 0.5),
                "best_ns": min(samples),
                **summary(samples, "ns"),
            }
