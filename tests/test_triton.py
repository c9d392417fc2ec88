"""The Triton kernels: bytes in the interpreter and on the GPU, the compiled code, and the division they do."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from child_pytest import run_cases
from numpy.typing import NDArray

from pyactcomp import codec
from pyactcomp.codec import format as fmt
from pyactcomp.errors import ImplementationUnavailableError

Floats = NDArray[np.float32]


# In as few processes as serve two workers: each imports torch, Triton and its interpreter.
CASES = {
    "codec": ("triton",),
    "activations and norms": ("functional_activation", "functional_rope", "functional_norm", "functional_fused"),
    "heads, windows and convolutions": (
        "functional_head",
        "functional_gated_mlp",
        "functional_layout",
        "functional_window",
        "functional_convolutional",
    ),
}


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreted", "gpu"])
@pytest.mark.parametrize("kind", [pytest.param("codec", marks=pytest.mark.alone), *list(CASES)[1:]])
def test_kernels_give_what_torchs_operators_and_the_reference_give(kind: str, interpret: bool) -> None:
    run_cases(*(f"{name}_cases.py" for name in CASES[kind]), interpret=interpret)


@pytest.mark.slow
def test_compiled_kernels_hold_no_inexact_instruction_and_no_spill() -> None:
    run_cases("triton_ptx_cases.py", "functional_norm_ptx_cases.py", "functional_window_ptx_cases.py", interpret=False)


def test_triton_serves_cpu_tensors_only_in_the_interpreter() -> None:
    triton = pytest.importorskip("pyactcomp.codec.kernels.triton")
    cpu = torch.device("cpu")
    if triton.interpreted():
        assert codec.unavailable_reason("triton", cpu) is None
    else:
        with pytest.raises(ImplementationUnavailableError, match="TRITON_INTERPRET=1"):
            codec.resolve("triton", cpu)


def fused_multiply_add(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c rounded once, to float32.

    The product of two float32 is exact in float64. The sum is rounded there to odd, of which a second rounding, to
    29 bits fewer, makes the same as one rounding of the exact sum.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) % 2 == 0
    outward = (error > 0) == (total > 0)
    bits = total.view(np.int64) + np.where((error != 0) & even, np.where(outward, 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def test_fused_multiply_add_rounds_once() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        # A sum close to c, as where the division corrects its quotient.
        values = [draw.choice((-1, 1)) * draw.uniform(1, 2) * 2.0 ** draw.choice((0, -12, 12)) for _ in range(3)]
        a, b, c = (np.array([v], np.float32) for v in values)
        exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
        got = fused_multiply_add(a, b, c)[0]
        error = abs(Fraction(float(got)) - exact)
        for neighbour in (np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


def divide_by_reciprocal(a: Floats, b: Floats) -> Floats:
    """Divide as the compiled kernels do."""
    reciprocal = np.float32(1) / b
    quotient = a * reciprocal
    return fused_multiply_add(fused_multiply_add(quotient, -b, a), reciprocal, quotient)


# All significands of a step, at the smallest exponent, at which the remainder is just representable, and others.
@pytest.mark.parametrize("exponent", [-118, -117, -60, 0, 60, 117])
def test_division_by_reciprocal_gives_the_code_of_the_division(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    step = np.ldexp(1 + np.arange(128, dtype=np.float32)[:, None] / 128, exponent).astype(np.float32)
    assert exponent > -118 or float(step.min()) == fmt.MIN_STEP
    # Quotients all over a code's range, those next to k + 1/2 with an ulp to either side, and tiny ones.
    spread = rng.uniform(0, 255, (128, 30_000)).astype(np.float32) * step
    halves = (np.arange(255, dtype=np.float32) + np.float32(0.5)) * step
    near = np.concatenate([np.nextafter(halves, np.float32(np.inf)), halves, np.nextafter(halves, np.float32(0))], 1)
    tiny = np.exp2(rng.uniform(-30, 0, (128, 1000))).astype(np.float32) * step
    range_ = np.concatenate([spread, near, tiny], 1)
    steps = np.broadcast_to(step, range_.shape)

    exact, got = range_ / steps, divide_by_reciprocal(range_, steps)
    large = exact >= 0.5
    np.testing.assert_array_equal(got[large], exact[large])
    np.testing.assert_array_equal(np.rint(got), np.rint(exact))
