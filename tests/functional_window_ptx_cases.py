"""What the kernels of window attention compile to for sm_90; needs no GPU.

Run by ``test_triton.py`` in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_ptx_cases import GROUP, assert_no_spills, ptx

from pyactcomp.functional.windows import kernels
from pyactcomp.functional.windows import launch as launches


@pytest.mark.parametrize(("kept", "group"), [("*u8", GROUP), ("*bf16", 0)])
def test_kernels_of_swins_windows_do_not_spill(kept: str, group: int, tmp_path: Path) -> None:
    form = {"N": 49, "ROWS": 64, "HEADS": 4, "HEAD": 32, "HAS_MASK": True, "GROUP": group}
    again = f"{kept} *fp32 *fp32 *bf16 i64 i32 fp32"
    assert_no_spills(ptx(kernels.window_attention_recompute_kernel, again, launches.WARPS, **form), tmp_path)
    backward = f"{kept} *fp32 *fp32 *bf16 *bf16 *fp32 i64 i32 fp32"
    kernel, registers = kernels.window_attention_backward_kernel, launches.BACKWARD_REGISTERS
    assert_no_spills(ptx(kernel, backward, launches.WARPS, registers, **form), tmp_path)


def test_forward_that_packs_does_not_spill(tmp_path: Path) -> None:
    form = {"N": 49, "ROWS": 64, "HEADS": 4, "HEAD": 32, "HAS_MASK": True, "GROUP": GROUP, "STOCHASTIC": False}
    types = "*bf16 *fp32 *fp32 *bf16 *u8 i64 i32 fp32 u32 u32"
    kernel, registers = kernels.window_attention_forward_kernel, launches.FORWARD_REGISTERS
    assert_no_spills(ptx(kernel, types, launches.WARPS, registers, **form), tmp_path)
