"""Every private name of torch that pyactcomp relies on, in one place.

``tests.py`` tests what each must do.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import Node

__all__ = [
    "being_traced",
    "checkpointed_run",
    "constant_in_graphs",
    "current_raw_stream",
    "dispatch_mode_active",
    "draw_from_generator",
    "forward_ad_active",
    "graph_is_retained",
    "has_no_memory",
    "history_enabled",
    "inside_functorch",
    "is_batch",
    "module_hooks_are_global",
    "never_traced",
    "normalises_by_cudnn",
    "pluggable_setters",
    "profiler_enabled",
    "replace_entry_points",
    "saved_as_it_is",
    "saved_form",
    "saved_tensor_hooks_enabled",
    "saves_are_dropped",
    "source_dtype",
    "top_saved_tensor_hooks",
    "transformed",
    "under_checkpoint",
]

Hook = TypeVar("Hook", bound=Callable[..., object])
SavedTensorHooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost active pair of saved-tensor hooks."""
    return cast("SavedTensorHooks | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


def _pack_of_checkpoint() -> Callable[[Tensor], object] | None:
    """Return the hook by which torch.utils.checkpoint saves, or None outside."""
    top = top_saved_tensor_hooks()
    return top[0] if top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint" else None


def under_checkpoint() -> bool:
    """Return whether what is saved now is torch.utils.checkpoint's, to be thrown away or freshly made again."""
    return _pack_of_checkpoint() is not None


def checkpointed_run() -> object | None:
    """Return what stands for a run of a function under torch.utils.checkpoint, and for what repeats it in backward."""
    pack = _pack_of_checkpoint()
    if pack is None:
        return None
    pack = inspect.unwrap(pack)
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))
    if "frame" in cells:
        return cast(object, cells["frame"].cell_contents)
    return cells["target_frame_ref"].cell_contents() if "target_frame_ref" in cells else None


@functools.cache
def _code_of_dropping_hook() -> CodeType | None:
    """Return the code of the hook by which torch.utils.checkpoint throws away what a first run saves."""
    hooks = getattr(torch.utils.checkpoint, "_checkpoint_hook", None)
    constants = hooks.__init__.__code__.co_consts if hooks is not None else ()
    return next((code for code in constants if isinstance(code, CodeType) and code.co_name == "pack_hook"), None)


def saves_are_dropped() -> bool:
    """Return whether what is saved now is thrown away unread: torch.utils.checkpoint runs a function for its output.

    By the hook's code, since what wraps a hook takes over its names. While torch.compile traces, it is False: to look
    would end the graph.
    """
    if torch.compiler.is_compiling():
        return False
    top = top_saved_tensor_hooks()
    code = None if top is None else getattr(top[0], "__code__", None)
    return code is not None and code is _code_of_dropping_hook()


def module_hooks_are_global() -> bool:
    """Return whether there are hooks that every module's call runs."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def saved_tensor_hooks_enabled() -> bool:
    """Return False inside ``disable_saved_tensors_hooks``."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def inside_functorch() -> bool:
    """Return whether a transform of torch.func (vmap, grad, jvp, functionalize) is being traced."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batch(x: Tensor) -> bool:
    """Return whether ``x`` stands for the tensors of a batch, as gradients do with is_grads_batched=True."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def has_no_memory(x: Tensor) -> bool:
    """Return whether ``x`` stands for tensors: in a batch of gradients, or in a transform of torch.func."""
    return inside_functorch() or is_batch(x)


def dispatch_mode_active() -> bool:
    """Return whether operators are being recorded or replaced, as make_fx does: they see no kernel called directly."""
    return bool(torch._C._len_torch_dispatch_stack())


def being_traced() -> bool:
    """Return whether make_fx records operators; selective checkpoints and counters of FLOPs are modes that run them.

    A kernel called directly is not recorded, and memory that it fills would be read as it is.
    """
    # Imported by all that traces; of the two stacks of modes only the first is looked up in C++.
    if "torch.fx.experimental.proxy_tensor" not in sys.modules:
        return False
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return (
        torch._C._get_dispatch_mode(proxy) is not None or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]
    )


def forward_ad_active() -> bool:
    """Return whether tensors may have tangents, some of which stand for zeros and have no memory."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Return whether operators are not just run and differentiated backward, so that saved tensors stay as they are."""
    return inside_functorch() or forward_ad_active() or torch._C._is_tracing() or being_traced()


def profiler_enabled() -> bool:
    """Return whether a torch profiler is recording."""
    return profiler._is_profiler_enabled


def normalises_by_cudnn(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """Return whether torch's batch norm of ``x``, with both parameters and in training mode, runs cuDNN's kernel."""
    # Of the running statistics it asks whether both are there or neither is; the binding takes no None.
    backend = torch._C._select_batch_norm_backend(x, weight, bias, weight, bias, True, eps)
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""Return the current stream of a CUDA device, by its index, as an integer."""


def draw_from_generator(device: int, count: int) -> tuple[int, int]:
    """Return seed and offset of a CUDA device's generator, by its index, and move it on by ``count`` numbers.

    Not for several threads that draw from one device at once: torch has no call that does both (2.13 has one).
    """
    generator = torch.cuda.default_generators[device]
    offset = generator.get_offset()
    generator.set_offset(offset + count)
    return generator.initial_seed(), offset


def graph_is_retained() -> bool:
    """Return whether the backward in progress keeps its graph, so that a node may run once more."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def running_node() -> Node | None:
    """Return the node whose backward runs on this thread, also while it unpacks what it saved."""
    node: Node | None = torch._C._current_autograd_node()
    return node


def saved_form(node: Node, name: str) -> object:
    """Return what a pack hook returned for a tensor that ``node`` saves under a name, or None if it saves none."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    # Of a list of tensors it is a tuple.
    return None if saved is None or getattr(saved, "unpack_hook", None) is None else saved.data


def saved_as_it_is(node: Node, name: str) -> Tensor | None:
    """Return a tensor that ``node`` saves under a name and that no hook packed, or None; runs no unpack hook."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach()


def source_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of the first tensor that ``node`` read, or None if it needs no gradient."""
    producer, number = node.next_functions[0]
    if producer is None:
        return None
    leaf = getattr(producer, "variable", None)
    dtype: torch.dtype = producer._input_metadata[number].dtype if leaf is None else leaf.dtype
    return dtype


def constant_in_graphs(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function that torch.compile runs while it traces instead of tracing it.

    As torch.compiler.assume_constant_result does, which imports the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(function: Hook) -> Hook:
    """Keep torch.compile's hands off what a function runs: a hook, which a compiled module in an eager model calls.

    ``torch.compiler.disable`` does so too, for a microsecond a call, and imports the whole compiler.
    """
    frames: Any = torch._C._dynamo.eval_frame
    # Where it has moved the package can be imported still, and its doctor says so.
    with suppress(AttributeError):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    return function


def history_enabled() -> bool:
    """Return whether torch records the history of CUDA memory."""
    # Before CUDA is initialised there is no allocator to ask, and torch 2.11 does not check.
    return torch.cuda.is_initialized() and bool(torch._C._cuda_isHistoryEnabled())  # type: ignore[no-untyped-call]


def replace_entry_points(functions: Mapping[str, Callable[..., object]]) -> None:
    """Put functions in the place of torch._C's, for all that look them up there at each call."""
    for name, function in functions.items():
        setattr(torch._C, name, function)


def pluggable_setters(allocator: object) -> dict[str, Callable[[int], None]]:
    """Return, by what they do, the functions that give a pluggable allocator the address of one of its functions."""
    return {
        "init": allocator.set_init_fn,  # type: ignore[attr-defined]
        "reset": allocator.set_reset_fn,  # type: ignore[attr-defined]
        "memory_fraction": allocator.set_memory_fraction_fn,  # type: ignore[attr-defined]
        "base_alloc": allocator.set_base_alloc_fn,  # type: ignore[attr-defined]
        "record_stream": allocator.set_record_stream_fn,  # type: ignore[attr-defined]
        "begin_allocate_to_pool": allocator.set_begin_allocate_to_pool,  # type: ignore[attr-defined]
        "end_allocate_to_pool": allocator.set_end_allocate_to_pool_fn,  # type: ignore[attr-defined]
        "release_pool": allocator.set_release_pool,  # type: ignore[attr-defined]
    }
