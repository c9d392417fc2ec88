"""What the Triton kernels compile to for sm_90, read from their PTX; needs no GPU.

Run by ``test_triton.py`` in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.codec.kernels import triton_kernels
from pyactcomp.functional.activations.gated import kernels as silu_mul_kernels
from pyactcomp.functional.activations.gelu import kernels as gelu_kernels
from pyactcomp.functional.attention import kernels as rope_kernels
from pyactcomp.functional.convolutional import batch_norm_kernels, max_pool_kernels
from pyactcomp.functional.elementwise import FLAT_TILE
from pyactcomp.functional.norms import kernels as norm_kernels
from pyactcomp.functional.windows import kernels as window_kernels

CODEC_KERNELS = [
    triton_kernels.encode_kernel,
    triton_kernels.decode_kernel,
    triton_kernels.encode_bool_kernel,
    triton_kernels.decode_bool_kernel,
    triton_kernels.widen_kernel,
    triton_kernels.encode_probability_kernel,
    triton_kernels.decode_probability_kernel,
]
FUSED_KERNELS = [
    gelu_kernels.gelu_forward_kernel,
    gelu_kernels.gelu_backward_kernel,
    gelu_kernels.gelu_backward_recompute_kernel,
    gelu_kernels.gelu_recompute_kernel,
    gelu_kernels.new_gelu_kernel,
    gelu_kernels.new_gelu_backward_kernel,
    silu_mul_kernels.silu_mul_forward_kernel,
    silu_mul_kernels.silu_mul_backward_kernel,
    silu_mul_kernels.silu_mul_recompute_kernel,
    silu_mul_kernels.silu_mul_exact_kernel,
    silu_mul_kernels.silu_mul_exact_backward_kernel,
    rope_kernels.rope_kernel,
    norm_kernels.norm_forward_kernel,
    norm_kernels.norm_backward_kernel,
    norm_kernels.norm_recompute_kernel,
    batch_norm_kernels.batch_norm_statistics_kernel,
    batch_norm_kernels.batch_norm_finish_kernel,
    batch_norm_kernels.batch_norm_apply_kernel,
    batch_norm_kernels.batch_norm_recompute_kernel,
    batch_norm_kernels.batch_norm_sums_kernel,
    batch_norm_kernels.batch_norm_backward_kernel,
    max_pool_kernels.max_pool_forward_kernel,
    max_pool_kernels.max_pool_backward_kernel,
    window_kernels.window_attention_forward_kernel,
    window_kernels.window_attention_backward_kernel,
    window_kernels.window_attention_recompute_kernel,
    window_kernels.residual_add_forward_kernel,
    window_kernels.residual_add_backward_kernel,
]
GROUP = 64
PER_THREAD = kernels.TILE // (32 * kernels.WARPS)


def ptx(kernel: Any, types: str, warps: int = kernels.WARPS, registers: int | None = None, **constants: Any) -> str:
    """Compile for sm_90 as ``Launcher`` does, given the types of the arguments, pointers aligned to 16 bytes."""
    arguments = dict(zip([p.name for p in kernel.params if not p.is_constexpr], types.split(), strict=True))
    signature = {p.name: arguments.get(p.name, "constexpr") for p in kernel.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, {p.name: constants[p.name] for p in kernel.params if p.is_constexpr}, aligned)
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
    text = str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    # Triton takes a literal that is subnormal in float32 as float64, and all that it meets.
    assert ".f64" not in text
    return text


def encode(dtype: str, bits: int = 8, stochastic: bool = False) -> str:
    return ptx(
        triton_kernels.encode_kernel,
        f"*{dtype} *u8 i64 u32 u32",
        BITS=bits,
        GROUP=GROUP,
        GROUPS=kernels.TILE // GROUP,
        STOCHASTIC=stochastic,
        KEEP_POSITIVE=False,
    )


def decode(dtype: str, bits: int = 8) -> str:
    return ptx(
        triton_kernels.decode_kernel,
        f"*u8 *{dtype} i64",
        BITS=bits,
        GROUP=GROUP,
        GROUPS=kernels.TILE // GROUP,
    )


def assert_no_spills(text: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.ptx"
    source.write_text(text)
    command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", str(source), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report) == [("0", "0")]


def assert_exact(text: str, multiply_adds: int, *, flushing: tuple[str, ...] = ()) -> None:
    """Assert that divisions are rounded correctly, nothing flushes, and nothing was contracted."""
    instructions = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.]+)", text, re.MULTILINE)
    assert len(instructions) > 100
    assert [i for i in instructions if re.match(r"div\..*f\d", i) and i != "div.rn.f32"] == []
    assert [i for i in instructions if ".ftz" in i and i not in flushing] == []
    assert sum(i.startswith(("fma.", "mad.rn")) for i in instructions) == multiply_adds


RCP, EX2 = "rcp.approx.ftz.f32", "ex2.approx.ftz.f32"


def multiply_adds(per_thread: int, run: int, *, stochastic: bool = False) -> int:
    """Return those of encoding an ordinary tile: two each for a quotient, a step and the reciprocal of a step.

    A thread holds runs of consecutive elements, each in a group of its own, of which it computes the step.
    Stochastic rounding divides.
    """
    groups = per_thread // run
    return 2 * groups + (0 if stochastic else 2 * per_thread + 2 * groups)


# The last, partial tile divides.
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("bits", "stochastic"), [(8, False), (4, True), (2, False)])
def test_encode_is_exact(dtype: str, bits: int, stochastic: bool) -> None:
    # Codes of 8 bits of a thread's elements are one 16-byte store.
    run = 16 if bits == 8 else {"bf16": 8, "fp16": 8, "fp32": 4}[dtype]
    flushing = () if stochastic else (RCP,)
    assert_exact(
        encode(dtype, bits, stochastic), multiply_adds(PER_THREAD, run, stochastic=stochastic), flushing=flushing
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bits", [8, 2])
def test_decode_is_exact(dtype: str, bits: int) -> None:
    assert_exact(decode(dtype, bits), 0)


def test_whole_tiles_move_in_16_byte_accesses() -> None:
    wide = PER_THREAD * 2 // 16
    assert encode("bf16").count("ld.global.v4.b32") == wide
    assert decode("bf16").count("st.global.v4.b32") == wide


def test_widening_moves_in_16_byte_accesses() -> None:
    text = ptx(triton_kernels.widen_kernel, "*bf16 *fp32 i64", warps=kernels.DECODE_WARPS, TILE=kernels.DECODE_TILE)
    elements = kernels.DECODE_TILE // (32 * kernels.DECODE_WARPS)
    assert text.count("ld.global.v4.b32") == elements * 2 // 16
    assert text.count("st.global.v4.b32") >= elements * 4 // 16


@pytest.mark.parametrize("log", [False, True])
def test_probabilities_move_in_16_byte_accesses(log: bool, tmp_path: Path) -> None:
    elements = kernels.DECODE_TILE // (32 * kernels.DECODE_WARPS)
    options = {"warps": kernels.DECODE_WARPS, "TILE": kernels.DECODE_TILE, "LOG": log}
    text = ptx(triton_kernels.encode_probability_kernel, "*fp32 *i16 i64", **options)
    assert text.count("ld.global.v4.b32") == elements * 4 // 16
    assert_no_spills(text, tmp_path)
    text = ptx(triton_kernels.decode_probability_kernel, "*i16 *fp32 i64", **options)
    assert text.count("ld.global.v4.b32") == elements * 2 // 16
    assert_no_spills(text, tmp_path)


# Exponentials and reciprocals of gelu are approximate on purpose, as torch's; what is flushed of them is 2**-126 of 1.
@pytest.mark.parametrize("unit", [kernels.TILE, 16, 1])
@pytest.mark.parametrize("tanh", [False, True])
def test_fused_gelu_is_exact_in_what_it_packs(tanh: bool, unit: int) -> None:
    tile = {"BITS": 8, "GROUP": GROUP, "GROUPS": kernels.TILE // GROUP, "UNIT": unit}
    # One of the cube; or five of the polynomial.
    polynomial = (1 if tanh else 5) * PER_THREAD
    types = "*bf16 *bf16 *u8 i64 u32 u32"
    forward = ptx(gelu_kernels.gelu_forward_kernel, types, TANH=tanh, STOCHASTIC=False, **tile)
    # Where elements may be absent one by one, each of a thread's is loaded alone, and consecutive threads hold a group.
    assert_exact(forward, polynomial + multiply_adds(PER_THREAD, 8), flushing=(RCP, EX2))
    backward = ptx(gelu_kernels.gelu_backward_kernel, "*u8 *bf16 *bf16 i64", TANH=tanh, **tile)
    # Two more of the slope and the derivative; or one of the derivative.
    assert_exact(backward, polynomial + (2 if tanh else 1) * PER_THREAD, flushing=(RCP, EX2))


CODES = {"BITS": 8, "GROUP": GROUP, "GROUPS": FLAT_TILE // GROUP}
WARPS = 4
# Kernel, types, tensors of the tile's shape that it reads and writes, its warps and registers, its constants.
ELEMENTWISE = [
    (gelu_kernels.gelu_forward_kernel, "*bf16 *bf16 *u8 i64 u32 u32", 1, 1, 2, 64, {**CODES, "TANH": True}),
    (gelu_kernels.gelu_backward_kernel, "*u8 *bf16 *bf16 i64", 1, 1, 2, None, {**CODES, "TANH": True}),
    (gelu_kernels.gelu_backward_recompute_kernel, "*u8 *bf16 *bf16 *bf16 i64", 1, 2, 2, None, {**CODES, "TANH": False}),
    (gelu_kernels.gelu_recompute_kernel, "*u8 *bf16 i64", 0, 1, 2, None, {**CODES, "TANH": True}),
    (gelu_kernels.new_gelu_kernel, "*bf16 *bf16 i64", 1, 1, WARPS, None, {"WIDE": False}),
    (gelu_kernels.new_gelu_backward_kernel, "*bf16 *bf16 *bf16 i64", 2, 1, WARPS, None, {"WIDE": False}),
    (
        silu_mul_kernels.silu_mul_forward_kernel,
        "*bf16 *bf16 *bf16 *u8 *u8 i64 u32 u32 u32 u32",
        *(2, 1, WARPS, 64),
        {**CODES, "PACK_UP": True},
    ),
    (
        silu_mul_kernels.silu_mul_backward_kernel,
        "*u8 *u8 *bf16 *bf16 *bf16 i64",
        *(1, 2, WARPS, None),
        {**CODES, "UP_PACKED": True},
    ),
    (silu_mul_kernels.silu_mul_recompute_kernel, "*u8 *u8 *bf16 i64", 0, 1, WARPS, None, {**CODES, "UP_PACKED": True}),
    (silu_mul_kernels.silu_mul_exact_kernel, "*bf16 *bf16 *bf16 i64", 2, 1, 2, 80, {}),
    (silu_mul_kernels.silu_mul_exact_backward_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i64", 3, 2, WARPS, None, {}),
]


@pytest.mark.parametrize("unit", [FLAT_TILE, 16])
@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case[0].__name__)
def test_elementwise_kernels_move_16_bytes_at_a_time(case: tuple[Any, ...], unit: int, tmp_path: Path) -> None:
    kernel, types, read, written, warps, registers, constants = case
    every = {"STOCHASTIC": False, **constants, "UNIT": unit}
    text = ptx(kernel, types, warps, registers, **every)
    accesses = FLAT_TILE * 2 // (32 * warps * 16)
    assert text.count("ld.global.v4.b32") == read * accesses
    assert text.count("st.global.v4.b32") == written * accesses
    if unit == FLAT_TILE:
        assert_no_spills(text, tmp_path)


@pytest.mark.parametrize("kernel", [*CODEC_KERNELS, *FUSED_KERNELS], ids=lambda kernel: kernel.__name__)
def test_kernel_specialises_on_pointers_alone(kernel: Any) -> None:
    # Launcher reuses what was compiled for other integers.
    integers = [p for p in kernel.params if p.annotation_type.startswith(("i", "u"))]
    assert [p.name for p in integers if not p.do_not_specialize] == []
    assert "numel" in [p.name for p in integers]
