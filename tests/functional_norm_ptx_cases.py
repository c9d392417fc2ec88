"""What the kernels of the norms compile to for sm_90; needs no GPU.

Run by ``test_triton.py`` in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from triton_ptx_cases import GROUP, RCP, assert_exact, assert_no_spills, multiply_adds, ptx

from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional.norms import kernels as norm_kernels

# Types of x and of the output (of the gradient and of that of x, in backward), elements of a row, groups of its tile,
# rows and warps of a program: BERT's, GPT-2's, Llama's and Swin's rows, and one that is no power of two.
FORMS = [("fp32", "fp32", 1024, 16, 1, 2), ("fp32", "bf16", 768, 16, 1, 2), ("bf16", "bf16", 128, 16, 8, 2)]

NOISE = "i64 i64 u32 u32 fp32"


def quads(dtype: str) -> int:
    """Return how many quads of elements lie in the 16 bytes that torch's dropout takes at a time."""
    return 1 if dtype == "fp32" else 2


def constants(length: int, groups: int, rows: int, **flags: Any) -> dict[str, Any]:
    codes = {"BITS": 8, "GROUP": GROUP, "GROUPS": groups}
    return {"N": length, "ROWS": rows, "HAS_WEIGHT": True, **codes, **flags}


@pytest.mark.parametrize(("x", "out", "length", "groups", "rows", "warps"), FORMS)
@pytest.mark.parametrize("form", ["layer_norm", "rows", "sum", "rms_norm"])
def test_forward_is_exact_in_what_it_packs(
    form: str, x: str, out: str, length: int, groups: int, rows: int, warps: int, tmp_path: Path
) -> None:
    residual = "fp32" if form == "sum" else x
    centred = form != "rms_norm"
    flags = {"HAS_BIAS": centred, "HAS_RESIDUAL": form == "sum", "INDEXED": form == "rows", "STOCHASTIC": False}
    flags["QUADS"] = quads(x) if form == "sum" else 0
    text = ptx(
        norm_kernels.norm_forward_kernel,
        f"*{x} *{residual} *fp32 *fp32 *i32 *{out} *u8 *fp32 i64 fp32 u32 u32 {NOISE}",
        warps,
        kernels.REGISTERS if flags["QUADS"] == 2 else None,
        **constants(length, groups, rows, CENTRED=centred, **flags),
    )
    # What the row does not have, and the compiler knows of, takes none.
    most = multiply_adds(groups * GROUP // (32 * warps), 8 if x == "bf16" else 4)
    contracted = len(re.findall(r"^\s+fma\.", text, re.MULTILINE))
    # torch's own reciprocal root; its argument is at least eps, far from what it flushes.
    assert_exact(text, contracted, flushing=(RCP,) if centred else (RCP, "rsqrt.approx.ftz.f32"))
    assert contracted <= most
    assert contracted == most or length != groups * GROUP // rows
    assert_no_spills(text, tmp_path)


@pytest.mark.parametrize(
    ("grad", "x", "length", "groups", "rows", "warps"),
    [
        ("fp32", "fp32", 1024, 32, 2, 8),
        ("fp32", "bf16", 768, 16, 1, 4),
        ("bf16", "bf16", 2048, 32, 1, 8),
        ("bf16", "bf16", 128, 32, 16, 8),
    ],
)
@pytest.mark.parametrize("form", ["layer_norm", "rows", "sum", "rms_norm", "beside"])
def test_backward_is_exact(
    form: str, grad: str, x: str, length: int, groups: int, rows: int, warps: int, tmp_path: Path
) -> None:
    needs = {f"NEEDS_{name}": True for name in ("INPUT", "WEIGHT", "BIAS")}
    flags = {"CENTRED": form not in ("rms_norm", "beside"), "TWICE": form == "sum", "INDEXED": form == "rows", **needs}
    text = ptx(
        norm_kernels.norm_backward_kernel,
        f"*u8 *fp32 *fp32 *{grad} *{x} *i32 *{x} *bf16 *fp32 *fp32 i64 {NOISE}",
        warps,
        **constants(length, groups, rows, ADDED=form == "beside", QUADS=quads(x) if form == "sum" else 0, **flags),
    )
    assert_exact(text, 0)
    assert_no_spills(text, tmp_path)


@pytest.mark.parametrize(("out", "length", "groups", "rows"), [("bf16", 1024, 32, 2), ("fp32", 768, 16, 1)])
def test_recomputing_is_exact(out: str, length: int, groups: int, rows: int, tmp_path: Path) -> None:
    flags = {"CENTRED": True, "HAS_BIAS": True}
    form = constants(length, groups, rows, **flags)
    text = ptx(norm_kernels.norm_recompute_kernel, f"*u8 *fp32 *fp32 *fp32 *{out} i64", 4, **form)
    assert_exact(text, 0)
    assert_no_spills(text, tmp_path)


def test_kernels_that_keep_a_copy_do_not_spill(tmp_path: Path) -> None:
    # A Llama's rows, bfloat16 throughout.
    form = constants(2048, 32, 1, CENTRED=False, BITS=int(norm_kernels.COPY.value))
    for residual in (False, True):
        forward = ptx(
            norm_kernels.norm_forward_kernel,
            f"*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *fp32 i64 fp32 u32 u32 {NOISE}",
            4,
            **form,
            **{"QUADS": 0, "HAS_BIAS": False, "HAS_RESIDUAL": residual, "INDEXED": False, "STOCHASTIC": False},
        )
        assert_no_spills(forward, tmp_path)
        # Two stores of the same width: of the output and of the copy.
        assert forward.count("st.global.v4.b32") == 2 * (2048 // (32 * 4)) * 2 // 16
    flags = {
        "NEEDS_INPUT": True,
        "NEEDS_WEIGHT": True,
        "NEEDS_BIAS": False,
        "TWICE": False,
        "INDEXED": False,
        "QUADS": 0,
    }
    types = f"*bf16 *fp32 *bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *fp32 i64 {NOISE}"
    for added in (False, True):
        backward = ptx(norm_kernels.norm_backward_kernel, types, 8, **form, **flags, ADDED=added)
        assert_no_spills(backward, tmp_path)
    recompute = ptx(norm_kernels.norm_recompute_kernel, "*bf16 *fp32 *bf16 *bf16 *bf16 i64", 4, **form, HAS_BIAS=False)
    assert_no_spills(recompute, tmp_path)
