"""Packing and restoring one tensor: layouts, dtypes, implementations, and a ``Packed`` that was tampered with."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyactcomp
from pyactcomp import PyactcompError, codec
from pyactcomp.codec import Packed, api, reference
from pyactcomp.codec import format as fmt
from pyactcomp.codec.layouts import is_dense
from pyactcomp.errors import ImplementationUnavailableError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference-cpu"),
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("triton", "cpu"), id="triton-interpreted"),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
    pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.device]:
    impl, device = request.param[0], torch.device(request.param[1])
    reason = codec.unavailable_reason(impl, device)
    if reason is not None:
        pytest.skip(f"impl={impl!r} cannot be used for {device}: {reason}")
    return impl, device


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """Forget which implementation serves which device, before and after."""
    codec.resolve.cache_clear()
    codec.bind.cache_clear()
    yield
    codec.resolve.cache_clear()
    codec.bind.cache_clear()


def randn(*shape: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def in_storage_order(x: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory, by sorting their offsets."""
    offsets = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(length) * stride
        offsets += steps.view([-1 if d == dim else 1 for d in range(x.dim())])
    return x.detach().cpu().reshape(-1)[offsets.reshape(-1).argsort()]


# name -> (make, whether the tensor is dense)
LAYOUTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "contiguous": (lambda **to: randn(6, 35, **to), True),
    "scalar": (lambda **to: randn(1, **to).view(()), True),
    "empty": (lambda **to: randn(0, 3, **to), True),
    "transposed": (lambda **to: randn(7, 30, **to).t(), True),
    "permuted": (lambda **to: randn(3, 5, 14, **to).permute(2, 0, 1), True),
    "channels_last": (lambda **to: randn(2, 6, 5, 4, **to).contiguous(memory_format=torch.channels_last), True),
    "offset": (lambda **to: randn(300, **to)[77:290], True),
    "size-one-dimensions": (lambda **to: randn(1, 90, 1, **to).as_strided((1, 90, 1), (7, 1, 500)), True),
    "expanded": (lambda **to: randn(70, 1, **to).expand(70, 3), False),
    "sliced": (lambda **to: randn(20, 12, **to)[:, 1:8], False),
    "stepped": (lambda **to: randn(300, **to)[::3], False),
    "overlapping": (lambda **to: randn(99, **to).as_strided((90, 10), (1, 1)), False),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_keeps_the_layout_and_stays_within_the_bound(
    layout: str, dtype: torch.dtype, backend: tuple[str, torch.device]
) -> None:
    impl, device = backend
    make, dense = LAYOUTS[layout]
    x = make(device=device, dtype=torch.float32)
    x = torch.empty_like(x, dtype=dtype).copy_(x > 0 if dtype is torch.bool else x) if dense else _cast(x, dtype)
    assert is_dense(tuple(x.shape), x.stride()) == dense
    before = x.clone()
    packed = pyactcomp.codec.quantize(x, impl=impl)
    restored = pyactcomp.codec.dequantize(packed, impl=impl)

    assert torch.equal(x, before)
    assert (restored.shape, restored.dtype, restored.device) == (x.shape, x.dtype, x.device)
    assert restored.stride() == (x.stride() if dense else x.contiguous().stride())
    assert packed.nbytes == fmt.packed_nbytes(x.numel(), 1 if dtype is torch.bool else 8, 64)
    assert packed.numel == x.numel()
    if dtype is torch.bool:
        assert torch.equal(restored, x)
        return
    stored = x if dense else x.contiguous()
    flat = in_storage_order(stored)
    carried = flat.float() if dtype is torch.float64 else flat
    assert torch.equal(packed.buffer.cpu(), reference.quantize(carried))
    # float64 passes through float32: half an ulp of that on the way in, nothing on the way out.
    bound = reference.error_bound(carried, dtype=carried.dtype) + (carried.double() - flat.double()).abs()
    assert ((in_storage_order(restored).double() - flat.double()).abs() <= bound).all()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Change the dtype of a view with gaps or repetitions, strides kept."""
    storage = torch.empty(x.untyped_storage().nbytes() // 4, dtype=dtype, device=x.device)
    whole = x.as_strided((storage.numel(),), (1,), 0)
    return storage.copy_(whole > 0 if dtype is torch.bool else whole).as_strided(
        x.size(), x.stride(), x.storage_offset()
    )


@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("group_size", fmt.GROUP_SIZES)
@pytest.mark.parametrize("rounding", codec.ROUNDINGS)
def test_every_width_group_and_rounding_gives_the_definitions_bytes(
    bits: int, group_size: int, rounding: codec.Rounding, backend: tuple[str, torch.device]
) -> None:
    impl, device = backend
    options: dict[str, Any] = {"bits": bits, "group_size": group_size, "seed": 5}
    for n, dtype in itertools.product((0, 1, 63, 64, 65), DTYPES):
        x = randn(n, dtype=dtype)
        packed = pyactcomp.codec.quantize(x.to(device), rounding=rounding, impl=impl, **options)
        expected = reference.quantize(x, stochastic=rounding == "stochastic", **options)
        assert torch.equal(packed.buffer.cpu(), expected)
        restored = pyactcomp.codec.dequantize(packed, impl=impl).cpu()
        decoded = reference.dequantize(expected, n, dtype=dtype, bits=bits, group_size=group_size)
        assert torch.equal(restored, decoded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_keep_positive_gives_the_definitions_bytes(
    bits: int, dtype: torch.dtype, stochastic: bool, backend: tuple[str, torch.device]
) -> None:
    impl, device = backend
    x = (randn(500) ** 3).relu().to(dtype)
    kernel = codec.bind(impl, dtype, bits, 64, stochastic, device=device, keep_positive=True)
    out = torch.empty(fmt.packed_nbytes(500, bits, 64), dtype=torch.uint8, device=device)
    kernel.encode(x.to(device), out, 7)
    expected = reference.quantize(x, bits=bits, stochastic=stochastic, seed=7, keep_positive=True)
    assert not torch.equal(expected, reference.quantize(x, bits=bits, stochastic=stochastic, seed=7))
    assert torch.equal(out.cpu(), expected)


def test_float64_is_packed_from_float32(backend: tuple[str, torch.device]) -> None:
    impl, device = backend
    x = (randn(70) / 3).double().to(device) + 1e-12
    restored = pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x, impl=impl), impl=impl)
    through = pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x.float(), impl=impl), impl=impl)
    assert torch.equal(restored, through.double())


def test_nonfinite_values_round_trip(backend: tuple[str, torch.device]) -> None:
    impl, device = backend
    for dtype in (*DTYPES, torch.float64):
        x = randn(200).to(device, dtype)
        x[70:73] = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype)
        restored = pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x, impl=impl), impl=impl)
        assert torch.equal(restored.isfinite(), x.isfinite())
        assert torch.equal(restored[70:72], x[70:72])
        assert bool(restored[72].isnan())


def test_default_rounding_is_nearest_for_8_bits_and_stochastic_below() -> None:
    x = randn(500)
    for bits in fmt.BITS:
        by_default = [pyactcomp.codec.quantize(x, bits=bits, seed=seed).buffer for seed in (1, 2)]
        rounding: codec.Rounding = "nearest" if bits == 8 else "stochastic"
        explicit = [pyactcomp.codec.quantize(x, bits=bits, seed=seed, rounding=rounding).buffer for seed in (1, 2)]
        assert torch.equal(by_default[0], explicit[0])
        assert torch.equal(by_default[1], explicit[1])
        assert torch.equal(by_default[0], by_default[1]) == (bits == 8)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_taken(seed: int, backend: tuple[str, torch.device]) -> None:
    impl, device = backend
    x = randn(200)
    packed = pyactcomp.codec.quantize(x.to(device), rounding="stochastic", seed=seed, impl=impl)
    assert torch.equal(packed.buffer.cpu(), reference.quantize(x, stochastic=True, seed=seed))


def test_quantize_is_outside_of_autograd() -> None:
    x = randn(64).requires_grad_()
    packed = pyactcomp.codec.quantize(x)
    assert not packed.buffer.requires_grad
    assert not pyactcomp.codec.dequantize(packed).requires_grad


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_packed_survives_pickle_copy_and_torch_save(dtype: torch.dtype) -> None:
    x = randn(9, 40).t().to(dtype)
    packed = pyactcomp.codec.quantize(x)
    expected = pyactcomp.codec.dequantize(packed)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for restored in (
        pickle.loads(pickle.dumps(packed)),
        copy.deepcopy(packed),
        torch.load(file, weights_only=False),
    ):
        assert restored.nbytes == packed.nbytes
        again = pyactcomp.codec.dequantize(restored)
        assert torch.equal(again, expected)
        assert again.stride() == expected.stride()


# The choice of an implementation.


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_named_implementation_never_falls_back_on_another_device(
    impl: codec.Impl, monkeypatch: pytest.MonkeyPatch, fresh_choice: None
) -> None:
    reason = codec.unavailable_reason(impl, torch.device("cpu"))
    if reason is None:
        pytest.skip("Triton's interpreter is on, which serves CPU tensors")
    with pytest.raises(ImplementationUnavailableError) as caught:
        pyactcomp.codec.quantize(torch.zeros(64), impl=impl)
    assert reason in str(caught.value)
    assert repr(impl) in str(caught.value)
    with pytest.raises(ImplementationUnavailableError):
        pyactcomp.codec.dequantize(pyactcomp.codec.quantize(torch.zeros(64)), impl=impl)


def test_an_unusable_implementation_is_named_and_only_auto_passes_it_over(
    monkeypatch: pytest.MonkeyPatch, fresh_choice: None
) -> None:
    def reason(impl: str, device: torch.device) -> str | None:
        return None if impl == "reference" else f"no {impl}: install the thing"

    monkeypatch.setattr(api, "unavailable_reason", reason)
    x = randn(100)
    assert codec.resolve("auto", x.device) == "reference"
    assert torch.equal(pyactcomp.codec.quantize(x).buffer, reference.quantize(x))
    for impl in ("cpu", "cuda", "triton"):
        with pytest.raises(ImplementationUnavailableError, match=f"impl='{impl}'.*no {impl}: install the thing"):
            pyactcomp.codec.quantize(x, impl=impl)
        with pytest.raises(ImplementationUnavailableError, match=f"impl='{impl}'"):
            pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x), impl=impl)


def test_auto_takes_the_fastest_that_works(monkeypatch: pytest.MonkeyPatch, fresh_choice: None) -> None:
    lacking = {"none": "no estimate runs"}
    monkeypatch.setattr(api, "unavailable_reason", lambda impl, device: lacking.get(impl))
    assert codec.resolve("auto", torch.device("cpu")) == "cpu"
    assert codec.resolve("auto", torch.device("cuda", 1)) == "cuda"
    codec.resolve.cache_clear()
    lacking["cuda"] = "no nvcc"
    assert codec.resolve("auto", torch.device("cuda", 1)) == "triton"


def test_a_device_that_nothing_serves_is_named() -> None:
    with pytest.raises(ImplementationUnavailableError, match=r"on xpu.*\['cpu', 'cuda'\]"):
        codec.resolve("auto", torch.device("xpu"))


def test_meta_tensors_give_shapes_and_sizes() -> None:
    packed = pyactcomp.codec.quantize(torch.zeros(10, 20, device="meta").t())
    assert (packed.buffer.device.type, packed.nbytes) == ("meta", 224)
    restored = pyactcomp.codec.dequantize(packed)
    assert (restored.device.type, restored.shape, restored.stride()) == ("meta", (20, 10), (1, 20))


# Wrong arguments.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 3}, ValueError, r"bits must be one of \(8, 4, 2\), got 3"),
        ({"bits": 8.0}, (TypeError, ValueError), "bits must be .*got 8.0"),
        ({"bits": None}, (TypeError, ValueError), "bits must be .*got None"),
        ({"group_size": 65}, ValueError, r"group_size must be one of \(64, 128, 256\), got 65"),
        ({"group_size": 64.0}, (TypeError, ValueError), "group_size must be .*got 64.0"),
        ({"rounding": "up"}, ValueError, "rounding must be one of .*got 'up'"),
        ({"impl": "gpu"}, ValueError, "impl must be one of .*got 'gpu'"),
        ({"impl": 3}, (TypeError, ValueError), "impl must be .*got 3"),
        ({"seed": 1.5}, (TypeError, ValueError), "seed must be .*got 1.5"),
        ({"seed": "1"}, (TypeError, ValueError), "seed must be .*got '1'"),
        ({"seed": 2**64}, ValueError, f"seed must be .*got {2**64}"),
        ({"seed": -1}, ValueError, "seed must be .*got -1"),
    ],
    ids=str,
)
def test_quantize_rejects_unknown_values(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pyactcomp.codec.quantize(torch.zeros(64), **options)


def test_quantize_rejects_unknown_options() -> None:
    with pytest.raises(TypeError, match="mode"):
        pyactcomp.codec.quantize(torch.zeros(64), mode="int8")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_quantize_rejects_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"quantize takes .*got {dtype}"):
        pyactcomp.codec.quantize(torch.zeros(64).to(dtype))


@pytest.mark.parametrize(
    "x", [[1.0, 2.0], None, 3.0, torch.zeros(4, 4).to_sparse()], ids=["list", "none", "float", "sparse"]
)
def test_quantize_rejects_what_is_no_strided_tensor(x: Any) -> None:
    with pytest.raises(
        TypeError, match=r"expects a strided torch\.Tensor, got (list|NoneType|float|torch\.sparse_coo)"
    ):
        pyactcomp.codec.quantize(x)


@pytest.mark.parametrize(
    "packed", [torch.zeros(68, dtype=torch.uint8), None, b"", (1, 2)], ids=["tensor", "none", "bytes", "tuple"]
)
def test_dequantize_rejects_what_is_no_packed(packed: Any) -> None:
    with pytest.raises(TypeError, match="expects a Packed"):
        pyactcomp.codec.dequantize(packed)


# A Packed that is not as quantize returned it.

TAMPERED: dict[str, dict[str, Any]] = {
    "buffer-truncated": {"buffer": torch.zeros(223, dtype=torch.uint8)},
    "buffer-empty": {"buffer": torch.zeros(0, dtype=torch.uint8)},
    "buffer-longer": {"buffer": torch.zeros(225, dtype=torch.uint8)},
    "buffer-dtype": {"buffer": torch.zeros(224, dtype=torch.int8)},
    "buffer-shape": {"buffer": torch.zeros(2, 112, dtype=torch.uint8)},
    "buffer-stepped": {"buffer": torch.zeros(448, dtype=torch.uint8)[::2]},
    "buffer-expanded": {"buffer": torch.zeros(1, dtype=torch.uint8).expand(224)},
    "buffer-none": {"buffer": None},
    "buffer-bytes": {"buffer": bytes(224)},
    "shape-longer": {"shape": (9, 23)},
    "shape-shorter": {"shape": (8, 22)},
    "shape-negative": {"shape": (-9, -23)},
    "shape-huge": {"shape": (2**40, 2**40), "stride": (2**40, 1)},
    "shape-rank": {"shape": (200,)},
    "shape-none": {"shape": None},
    "shape-text": {"shape": ("10", "20")},
    "shape-float": {"shape": (10.0, 20.0)},
    "stride-overlapping": {"stride": (1, 1)},
    "stride-zero": {"stride": (0, 1)},
    "stride-gaps": {"stride": (40, 2)},
    "stride-negative": {"stride": (-20, -1)},
    "stride-huge": {"stride": (2**62, 1)},
    "stride-rank": {"stride": (20, 1, 1)},
    "stride-none": {"stride": None},
    "stride-text": {"stride": ("20", "1")},
    "dtype-integer": {"dtype": torch.int32},
    "dtype-bool": {"dtype": torch.bool},
    "dtype-complex": {"dtype": torch.complex64},
    "dtype-text": {"dtype": "float32"},
    "bits-other": {"bits": 4},
    "bits-unknown": {"bits": 7},
    "bits-one": {"bits": 1},
    "bits-float": {"bits": 8.0},
    "bits-none": {"bits": None},
    "group-size-other": {"group_size": 128},
    "group-size-zero": {"group_size": 0},
    "group-size-float": {"group_size": 64.0},
    "group-size-none": {"group_size": None},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_packed_raises(name: str) -> None:
    packed = pyactcomp.codec.quantize(randn(10, 20))
    assert packed.nbytes == 224
    with pytest.raises(PyactcompError) as caught:
        pyactcomp.codec.dequantize(replace(packed, **TAMPERED[name]))
    assert len(str(caught.value)) > 20


def test_a_tampered_boolean_packed_raises() -> None:
    packed = pyactcomp.codec.quantize(randn(100) > 0)
    for fields in ({"bits": 8}, {"shape": (105,)}, {"buffer": packed.buffer[:-1]}, {"dtype": torch.float32}):
        with pytest.raises(PyactcompError):
            pyactcomp.codec.dequantize(replace(packed, **fields))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("bits", fmt.BITS)
def test_random_bytes_decode_as_the_definition_says(
    bits: int, dtype: torch.dtype, backend: tuple[str, torch.device]
) -> None:
    impl, device = backend
    generator = torch.Generator().manual_seed(bits)
    packed = pyactcomp.codec.quantize(randn(333).to(dtype), bits=bits)
    codes = fmt.parameters_offset(333, bits)
    for where in (slice(0, codes), slice(codes, None), slice(None)):
        buffer = packed.buffer.clone()
        buffer[where] = torch.randint(0, 256, buffer[where].shape, dtype=torch.uint8, generator=generator)
        restored = pyactcomp.codec.dequantize(replace(packed, buffer=buffer.to(device)), impl=impl).cpu()
        if dtype is torch.bool:
            assert torch.equal(restored, reference.unpack_bool(buffer, 333))
            continue
        expected = reference.dequantize(buffer, 333, dtype=dtype, bits=bits)
        assert torch.equal(restored.isnan(), expected.isnan())
        assert torch.equal(restored.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("bits", fmt.BITS)
def test_random_codes_over_sound_parameters_stay_in_their_groups_range(bits: int) -> None:
    x = randn(640)
    packed = pyactcomp.codec.quantize(x, bits=bits)
    offset = fmt.parameters_offset(640, bits)
    buffer = packed.buffer.clone()
    buffer[:offset] = torch.randint(0, 256, (offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    restored = pyactcomp.codec.dequantize(replace(packed, buffer=buffer)).view(-1, 64).double()
    parameters = buffer[offset:].clone().view(torch.bfloat16).view(-1, 2).double()
    minimum, step = parameters[:, :1], parameters[:, 1:]
    assert (step > 0).all()
    # Half an ulp of the largest magnitude, for the rounding of the restored value.
    slack = restored.abs().amax(dim=1, keepdim=True) * 2.0**-24
    assert (restored >= minimum - slack).all()
    assert (restored <= minimum + step * (2**bits - 1) + slack).all()


def test_a_packed_states_its_size() -> None:
    packed = pyactcomp.codec.quantize(randn(1000))
    assert (packed.nbytes, packed.numel) == (1000 + 8 + 4 * 16, 1000)
    assert isinstance(packed, Packed)
