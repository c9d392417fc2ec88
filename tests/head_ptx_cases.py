"""What the kernel of ``linear_cross_entropy`` compiles to for sm_90, read from its PTX; needs no GPU.

Run by ``test_functional_head.py`` in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pyactcomp.functional.head.kernels import cross_entropy_kernel as kernel
from pyactcomp.functional.head.linear_cross_entropy import BLOCK, WARPS


def ptx(vocabulary: int, dtype: str, gradient: bool, capped: bool = False) -> str:
    vector = 4 if dtype == "fp32" else 8
    stride = -(-vocabulary // 64) * 64
    constants = [vocabulary, stride, vector, BLOCK, gradient, capped]
    names = [p.name for p in kernel.params]
    types = [f"*{dtype}", "*i64", "*fp32", "*fp32", "i64", "fp32", *["constexpr"] * len(constants)]
    source = ASTSource(
        kernel,
        dict(zip(names, types, strict=True)),
        dict(zip(names[-len(constants) :], constants, strict=True)),
        {(i,): [["tt.divisibility", 16]] for i in range(4)},
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(32000, "bf16"), (50304, "bf16"), (50257, "bf16"), (50257, "fp16"), (30522, "fp32")]
)
def test_rows_move_in_16_byte_accesses_also_where_their_length_is_odd(
    vocabulary: int, dtype: str, capped: bool
) -> None:
    text = ptx(vocabulary, dtype, True, capped)
    accesses = BLOCK // (32 * WARPS) * (4 if dtype == "fp32" else 2) // 16
    assert text.count("ld.global.v4.b32") == 2 * accesses
    assert text.count("st.global.v4.b32") == accesses
    assert ".local" not in text


def test_threads_of_a_program_meet_only_after_the_loops() -> None:
    for gradient in (False, True):
        text = ptx(50257, "bf16", gradient)
        loops = re.findall(r"^(\$L__BB\d+_\d+):(?:(?!^\$L__BB).)*?bra(?:\.uni)?\s+\1;", text, re.MULTILINE | re.DOTALL)
        assert len(loops) == 1 + gradient
        for label in loops:
            body = text[text.index(f"{label}:") :]
            assert "bar.sync" not in body[: re.search(rf"bra(?:\.uni)?\s+{re.escape(label)};", body).start()]


def test_kernel_specialises_on_pointers_alone() -> None:
    # Launcher reuses what was compiled for other integers.
    (integer,) = (p for p in kernel.params if p.annotation_type == "i64")
    assert integer.name == "ignore_index"
    assert integer.do_not_specialize
