"""Every private name of torch used by pyactcomp, in one place; ``tests.py`` has a test for each.

Longer than 400 lines, since every private name is here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import Node

Hook = TypeVar("Hook", bound=Callable[..., object])
SavedTensorHooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost active pair of saved-tensor hooks."""
    return cast("SavedTensorHooks | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


@contextmanager
def hooks_on_top(
    is_own: Callable[[object], bool], own: tuple[Callable[..., object], Callable[..., Tensor]]
) -> Iterator[None]:
    """Bring the pair ``own``, whose pack hook ``is_own`` tells, to the top of this thread's pairs in a ``with`` block.

    The pairs above, which a program left active, are back afterwards. A pair that is gone is there again, so that the
    block removes no other.
    """
    hooks = torch._C._autograd
    above: list[SavedTensorHooks] = []
    while (top := top_saved_tensor_hooks()) is not None and not is_own(top[0]):
        above.append(top)
        hooks._pop_saved_tensors_default_hooks()
    if top is None:
        while above:
            hooks._push_saved_tensors_default_hooks(*above.pop())
        hooks._push_saved_tensors_default_hooks(*own)
    try:
        yield
    finally:
        while above:
            hooks._push_saved_tensors_default_hooks(*above.pop())


def _pack_of_checkpoint() -> Callable[[Tensor], object] | None:
    """Return torch.utils.checkpoint's pack hook, or None outside of a checkpointed function."""
    top = top_saved_tensor_hooks()
    return top[0] if top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint" else None


def under_checkpoint() -> bool:
    """Return whether torch.utils.checkpoint runs the current function, for the first time or recomputing."""
    return _pack_of_checkpoint() is not None


def _of_checkpoint() -> dict[str, Any]:
    """Return the variables around torch.utils.checkpoint's pack hook; none outside of a checkpointed function."""
    pack = _pack_of_checkpoint()
    if pack is None:
        return {}
    pack = inspect.unwrap(pack)
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells}


def checkpointed_run() -> object | None:
    """Return checkpoint's frame of the current run, the same object in the rerun in backward; None outside."""
    variables = _of_checkpoint()
    if "frame" in variables:
        return cast(object, variables["frame"])
    return variables["target_frame_ref"]() if "target_frame_ref" in variables else None


def rerun_stops_after(saves: int) -> bool:
    """Return whether the current run is checkpoint's rerun and ends as soon as ``saves`` more tensors are saved."""
    variables = _of_checkpoint()
    if "target_frame_ref" not in variables or "gid" not in variables:
        return False
    frame = variables["target_frame_ref"]()
    done = frame.recomp_counter[variables["gid"]]
    return bool(frame.early_stop) and cast(int, done) + saves == len(frame.weak_holders)


def wrap_rerun(run: object, around: Callable[[], AbstractContextManager[object]]) -> None:
    """Rerun a checkpointed function, given the frame of its first run, inside a context each time."""
    recompute = cast(Any, run).recompute_fn

    def rerun(*args: object) -> None:
        with around():
            recompute(*args)

    cast(Any, run).recompute_fn = rerun


@functools.cache
def _code_of_dropping_hook() -> CodeType | None:
    """Return the code of torch.utils.checkpoint's pack hook for the first run, whose saved tensors are dropped."""
    hooks = getattr(torch.utils.checkpoint, "_checkpoint_hook", None)
    constants = hooks.__init__.__code__.co_consts if hooks is not None else ()
    return next((code for code in constants if isinstance(code, CodeType) and code.co_name == "pack_hook"), None)


def saves_are_dropped() -> bool:
    """Return whether saved tensors are dropped unread: in the first run of a function under torch.utils.checkpoint.

    Compare the hook's code, since wrappers copy names. Not for code that torch.compile traces: the test breaks graphs.
    """
    top = top_saved_tensor_hooks()
    code = None if top is None else getattr(top[0], "__code__", None)
    return code is not None and code is _code_of_dropping_hook()


def owns_alone(x: Tensor) -> bool:
    """Return whether no other tensor has the memory of ``x`` and C++ holds none, False if unknown.

    Other variables of Python may hold ``x`` all the same.
    """
    of_storage, of_tensor = getattr(torch._C, "_storage_Use_Count", None), getattr(x, "_use_count", None)
    if of_storage is None or of_tensor is None:
        return False
    # The Python objects of tensor and storage are a use of each.
    return bool(of_tensor() == 1 and of_storage(x.untyped_storage()._cdata) == 2)


def module_hooks_are_global() -> bool:
    """Return whether global module hooks are registered, which run in every module's call."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def saved_tensor_hooks_enabled() -> bool:
    """Return False inside ``disable_saved_tensors_hooks``."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def inside_functorch() -> bool:
    """Return whether a transform of torch.func (vmap, grad, jvp, functionalize) is being traced."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batch(x: Tensor) -> bool:
    """Return whether ``x`` is a batched tensor, such as a gradient with is_grads_batched=True."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


@contextmanager
def profiled_range(name: str) -> Iterator[None]:
    """Show a ``with`` block in the profile under a name.

    Not ``torch.profiler.record_function``: its first call imports a module, and with ``with_stack=True`` the profiler
    reads the name of that module's code after the code is gone. The range has the scope of a user's: the observer would
    take one of an operator's scope for the operator that runs.
    """
    record = torch.ops.profiler._record_function_enter_new(name, None)
    try:
        yield
    finally:
        torch.ops.profiler._record_function_exit._RecordFunction(record)


def has_no_memory(x: Tensor) -> bool:
    """Return whether ``x`` may be a wrapper without memory.

    As a batch of gradients is, any tensor in torch.func, or what a collective still computes.
    """
    return inside_functorch() or is_batch(x) or type(x).__name__ == "AsyncCollectiveTensor"


function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of torch function modes that are active: mostly none."""


def function_mode_active() -> bool:
    """Return whether a torch function mode may replace calls: neither torch.device's nor one of this package."""
    return not all(_passes_calls_on(torch._C._get_function_stack_at(index)) for index in range(function_modes()))


def _passes_calls_on(mode: object) -> bool:
    return type(mode).__module__ == "torch.utils._device" or type(mode).__module__.startswith("pyactcomp.")


def dispatch_mode_active() -> bool:
    """Return whether a dispatch mode is active: modes see operators, but no kernel that is called directly."""
    return bool(torch._C._len_torch_dispatch_stack())


def being_traced() -> bool:
    """Return whether make_fx records operators. Other modes (selective checkpointing, FLOP counters) run them.

    make_fx does not record a kernel that is called directly, so the graph would read uninitialised memory.
    """
    # All tracers import this module; without it, skip the slower look-up of the second mode stack in Python.
    if "torch.fx.experimental.proxy_tensor" not in sys.modules:
        return False
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return (
        torch._C._get_dispatch_mode(proxy) is not None or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]
    )


def forward_ad_active() -> bool:
    """Return whether forward-mode AD is active: tensors may have tangents, and zero tangents may have no memory."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Return whether functorch, forward-mode AD, jit tracing or make_fx is active; saved tensors are then kept."""
    return inside_functorch() or forward_ad_active() or torch._C._is_tracing() or being_traced()


def profiler_enabled() -> bool:
    """Return whether a torch profiler is recording."""
    return profiler._is_profiler_enabled


def normalises_by_cudnn(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """Return whether torch's batch norm of ``x``, with both parameters and in training mode, runs cuDNN's kernel."""
    # torch only tests whether both running statistics are present; the binding takes no None, so pass the parameters.
    backend = torch._C._select_batch_norm_backend(x, weight, bias, weight, bias, True, eps)
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""Return the current stream of a CUDA device, by its index, as an integer."""


current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""Return the index of the current CUDA device, once CUDA is in use."""


def draw_from_generator(device: int, count: int) -> tuple[int, int]:
    """Return seed and offset of the generator of a CUDA device, by index, and advance the offset by ``count`` numbers.

    Not safe if several threads draw from one device: torch before 2.13 has no atomic call for both.
    """
    generator = torch.cuda.default_generators[device]
    offset = generator.get_offset()
    generator.set_offset(offset + count)
    return generator.initial_seed(), offset


def graph_is_retained() -> bool:
    """Return whether the running backward retains the graph, so a node may run again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def running_node() -> Node | None:
    """Return the node running in backward on this thread, also while the node unpacks saved tensors."""
    node: Node | None = torch._C._current_autograd_node()
    return node


class StoredForm:
    """Base of what this package's pack hooks return, to tell it from the results of other hooks."""

    __slots__ = ()


def saved_form(node: Node, name: str) -> object:
    """Return the :class:`StoredForm` of the tensor saved by ``node`` under a name, or None without one.

    Hooks of other code around a part of a model return any object, often a tensor.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    # A saved list of tensors is a tuple, without `unpack_hook`.
    data = None if saved is None or getattr(saved, "unpack_hook", None) is None else saved.data
    return data if isinstance(data, StoredForm) else None


def saved_as_it_is(node: Node, name: str) -> Tensor | None:
    """Return the tensor saved by ``node`` under a name, or None if a hook packed the tensor; runs no unpack hook."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach()


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def held_by_node(node: Node) -> Iterator[object]:
    """Yield what a node holds for backward: tensors, or what a hook packed in their place; runs no unpack hook."""
    for name in _names_of_saved(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # of a Python function whose backward has run
            continue
        for each in saved if isinstance(saved, tuple) else (saved,):
            if each.data is not None:
                yield each.data


def function_of(node: Node) -> type | None:
    """Return the torch.autograd.Function of a node, or None for an operator's."""
    return getattr(type(node), "_forward_cls", None)


def on_top(mode: object) -> bool:
    """Return whether a torch function mode is this thread's innermost."""
    return bool(function_modes()) and torch._C._get_function_stack_at(function_modes() - 1) is mode


def source_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of the first input of ``node``, or None if the input needs no gradient."""
    producer, number = node.next_functions[0]
    if producer is None:
        return None
    leaf = getattr(producer, "variable", None)
    dtype: torch.dtype = producer._input_metadata[number].dtype if leaf is None else leaf.dtype
    return dtype


def constant_in_graphs(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function to be run, not traced, by torch.compile.

    Does the same as torch.compiler.assume_constant_result, but without importing the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(function: Hook) -> Hook:
    """Keep torch.compile from tracing a function and its callees: a hook called inside a compiled module.

    ``torch.compiler.disable`` costs a microsecond a call, and imports the whole compiler.
    """
    frames: Any = torch._C._dynamo.eval_frame
    # If torch moves the name, pyactcomp must still import, and `pyactcomp doctor` reports the name.
    with suppress(AttributeError):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    return function


def tracing_context() -> object | None:
    """Return torch.compile's context of the graph being compiled in this thread, or None."""
    context: object | None = torch._guards.TracingContext.try_get()
    return context


def history_enabled() -> bool:
    """Return whether torch records the history of CUDA memory."""
    # Before CUDA is initialised there is no allocator, and torch 2.11 does not check.
    return torch.cuda.is_initialized() and bool(torch._C._cuda_isHistoryEnabled())  # type: ignore[no-untyped-call]


def allocator_settings_setter() -> Callable[[str], None]:
    """Return torch's own function that parses and sets its allocators' settings."""
    return torch._C._accelerator_setAllocatorSettings


def replace_entry_points(functions: Mapping[str, Callable[..., object]]) -> None:
    """Replace functions of torch._C; callers that look the name up at each call then use the replacement."""
    for name, function in functions.items():
        setattr(torch._C, name, function)


def pluggable_setters(allocator: object) -> dict[str, Callable[[int], None]]:
    """Return the setters of a pluggable allocator's function pointers, by purpose."""
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


def backend_being_traced() -> str | None:
    """Return the registered backend for which torch.compile traces in this thread, or None for a function."""
    from torch._dynamo.backends.registry import list_backends
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend = getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)
    name: str | None = getattr(backend, "compiler_name", None)
    return name if name in list_backends(exclude_tags=()) else None


def owner_being_traced() -> object | None:
    """Return the argument ``self`` of the function that torch.compile compiles in this thread, if its class is guarded.

    A function that only passes ``self`` on serves objects of all classes.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    with suppress(AttributeError):  # of no trace in progress
        output = InstructionTranslator.current_tx().output
        for guard in output.guards:
            if guard.name == "L['self']" and guard.create_fn_name() == "TYPE_MATCH":
                owner: object = output.root_tx.f_locals["self"]
                return owner
    return None
