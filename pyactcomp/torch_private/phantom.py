"""Private names of torch that phantom tensors use: the dispatcher's tables, fake tensors, the answers about CUDA.

In a process of its own: :func:`pretend` replaces functions of :mod:`torch.cuda` for good.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn import init
from torch.utils.flop_counter import flop_registry

#: Errors of an operator whose result depends on values, and of one without a function for shapes.
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
HAS_NO_SHAPES = (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError, RuntimeError)
#: In a RuntimeError, the sign of an operator that has a kernel for CUDA alone; others are the operator's own.
ASSERTION = "func != nullptr INTERNAL ASSERT FAILED"

# Operators with kernels for CUDA and composite kernels, besides those of _foreach_: a build without CUDA would take the
# composite ones. The tables of torch 2.11.0+cu130 are the source, and a test holds the list against a build with CUDA.
WITH_KERNELS_FOR_CUDA = (
    *("_chunk_cat", "_chunk_cat.out", "_grouped_mm", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims"),
    *("any.dims_out", "convolution_backward", "linalg__powsum", "native_group_norm", "native_layer_norm"),
    *("split_with_sizes_copy.out", "_fused_rms_norm", "mish_backward", "silu_backward"),
)
# Not a kernel for CUDA, but the choice between cuDNN's and others: FakeTensor knows the layouts of all.
_WHOLE = ("convolution",)

# These have kernels for CUDA alone, of which a build without CUDA knows no shapes. The engine calls the one here.
SHAPES_FOR_CUDA_ALONE: dict[str, Callable[..., torch.Tensor]] = {"batch_norm_elemt": lambda x, *_: torch.empty_like(x)}


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of a product of groups of rows, or of columns: its rows begin at multiples of 16 bytes.

    ATen's GroupedMMUtils.h: kernels take floating-point numbers of 16 and 32 bits, torch's function for shapes takes
    bfloat16 alone, and pads no rows in a build without CUDA.
    """
    torch._check(  # type: ignore[no-untyped-call]
        all(each.dtype in (torch.bfloat16, torch.float16, torch.float32) and each.dim() in (2, 3) for each in (a, b)),
        lambda: f"a grouped product takes matrices of float32, bfloat16 or float16, got {a.dtype} and {b.dtype}",
    )
    for each in (a, b):
        rows, columns = each.stride()[-2:]
        pitch, dense, width = (columns, rows, each.shape[-2]) if rows == 1 else (rows, columns, each.shape[-1])
        torch._check(  # type: ignore[no-untyped-call]
            dense == 1 and pitch >= max(width, 1) and pitch * each.itemsize % 16 == 0,
            lambda each=each: (
                "a grouped product takes rows or columns that begin at multiples of 16 bytes, got "
                f"shape {tuple(each.shape)} and strides {each.stride()}"
            ),
        )
    torch._check(  # type: ignore[no-untyped-call]
        bias is None and dtype in (None, a.dtype), lambda: f"a grouped product takes no bias, and returns {a.dtype}"
    )
    size: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        size = (offsets.numel() if a.dim() == 2 and offsets is not None else a.shape[0], *size)
    pitch = -(-size[-1] * a.itemsize // 16) * 16 // a.itemsize
    stride = (size[-2] * pitch, pitch, 1)[-len(size) :]
    return torch.empty_strided(size, stride, dtype=a.dtype, device=a.device)


#: Operators whose kernel for CUDA takes more than torch's function for its shapes, which is stricter.
SHAPES_OF_KERNELS: dict[str, Callable[..., torch.Tensor]] = {"_grouped_mm": _grouped_product}

# These write metadata, not elements.
_NOT_ELEMENTS = ("set_", "resize_", "_resize_output_", "copy_", "record_stream")


def operators(measured: Collection[str] = ()) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return the operators of CUDA: those that only write into arguments, the others, and the others that stay whole.

    Parameters
    ----------
    measured : collection of str
        Operators that write into arguments, and count as others that stay whole.

    Returns
    -------
    tuple
        Twice a list of pairs of name and overload; and the qualified names that composite kernels must not serve.
    """
    tables = {
        key: {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith("aten::")}
        for key in ("CUDA", "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    }
    composite = tables["CompositeExplicitAutograd"] | tables["CompositeImplicitAutograd"]
    known = tables["CUDA"] | tables["CPU"]
    known |= {name for name in composite if name.startswith("aten::_foreach_")}
    known |= {f"aten::{name}" for name in (*WITH_KERNELS_FOR_CUDA, *SHAPES_FOR_CUDA_ALONE, *_WHOLE)}
    known = {name for name in known if torch._C._dispatch_has_kernel(name)}
    writing, others, whole = [], [], []
    for name in sorted(known):
        if name.partition("::")[2].split(".")[0] in _NOT_ELEMENTS:
            continue
        short = name.partition("::")[2]
        if short not in measured and _writes_only(_overload(name)._schema):
            writing.append(_parts(name))
        else:
            others.append(_parts(name))
            if name in composite or short in _WHOLE or short in measured:
                whole.append(name)
    return writing, others, whole


def _parts(name: str) -> tuple[str, str]:
    base, _, overload = name.partition(".")
    return base, overload


def _overload(name: str) -> Any:
    base, overload = _parts(name)
    namespace, _, operator = base.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _writes_only(schema: Any) -> bool:
    """Return whether an operator only returns arguments that it writes."""
    writes = [each.alias_info for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    returned = all(each.alias_info is not None and each.alias_info.is_write for each in schema.returns)
    return bool(writes) and returned


def serve_others(handler: Callable[..., Any], whole: list[str]) -> list[Any]:
    """Let ``handler`` serve, on csrc/phantom's backend, operators without a composite kernel, and those in ``whole``.

    Returns
    -------
    list
        The registrations, which last as long as the list.
    """
    every = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    every.fallback(handler, "PrivateUse3")  # type: ignore[no-untyped-call]
    aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in whole:
        operator = _overload(name)
        aten.impl(name.partition("::")[2], _bound(handler, operator), "PrivateUse3")  # type: ignore[no-untyped-call]
    for name, shapes in SHAPES_FOR_CUDA_ALONE.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            aten.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]
    return [every, aten]


def _bound(handler: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(operator, *args, **kwargs)


def fake_mode() -> Any:
    """Return the mode in which operators compute shapes alone."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(mode: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory that claims to be on a device."""
    return FakeTensor(mode, meta, device)


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """Return a storage without memory."""
    return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]


def flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of an operator by torch's formulas; zero for one without, such as an elementwise one."""
    formula = flop_registry.get(operator._overloadpacket)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except AssertionError:
        # Attention whose keys have fewer heads than its queries: torch 2.11 counts none, later ones as if all had.
        heads = max(each.shape[1] for each in args if isinstance(each, torch.Tensor) and each.dim() == 4)
        return int(formula(*[_with_heads(each, heads) for each in args], **kwargs, out_val=out))


def _with_heads(given: Any, heads: int) -> Any:
    if not isinstance(given, torch.Tensor) or given.dim() != 4:
        return given
    return torch.Size((given.shape[0], heads, *given.shape[2:]))


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that views of the same memory share."""
    return int(tensor.untyped_storage()._cdata)


class _Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Generator:
    """The generator of a device without numbers."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass

    def initial_seed(self) -> int:
        return 0

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_state(self, state: torch.Tensor) -> None:
        pass


def pretend_streams() -> None:
    """Let the functions in C that tell the current stream and device speak of one of each."""
    native: Any = torch._C
    native._cuda_getCurrentRawStream = lambda *_: 0
    native._cuda_getDevice = lambda: 0


def pretend(properties: SimpleNamespace, live: Callable[[], int]) -> None:
    """Let :mod:`torch.cuda` speak of one device with these properties; ``live`` counts the bytes in use."""
    cuda: Any = torch.cuda
    capability = (properties.major, properties.minor)
    stream = _Stream()
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: properties.name,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: properties.major >= 8,
        "mem_get_info": lambda *_: (properties.total_memory - live(), properties.total_memory),
        "memory_allocated": lambda *_: live(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.Stream = cuda.Event = _Stream
    cuda.default_generators = (_Generator(),)
    backends: Any = torch.backends.cuda
    backends.is_built = lambda: True
    native: Any = torch._C
    # torch.tensor(..., device="cuda") is made on the host, and then copied.
    native._set_only_lift_cpu_tensors(True)
    _skip_initialisation()


_LARGE = 1 << 16  # elements: a small tensor of settings may be read while the model is built


def _skip_initialisation() -> None:
    """Let the functions of :mod:`torch.nn.init` leave phantoms alone: some draw until all values lie in a range.

    They leave large tensors on the host alone, too.
    """
    for name, function in list(vars(init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(function):
            setattr(init, name, _for_values(function))


def _for_values(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialise(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # A model that is built on the host leaves its values there, and memory that nobody wrote takes no room.
        return tensor if tensor.is_cuda or tensor.numel() >= _LARGE else function(tensor, *args, **options)

    return initialise
