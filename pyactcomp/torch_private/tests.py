"""A test for each private name of torch in ``torch_private/__init__.py``.

``pyactcomp doctor`` runs the tests, so the doctor can report the name moved or changed by a torch release.

Longer than 400 lines: one test for each name, and a table of the tests.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from . import (
    StoredForm,
    allocator_settings_setter,
    being_traced,
    checkpointed_run,
    constant_in_graphs,
    current_cuda_device,
    current_raw_stream,
    dispatch_mode_active,
    draw_from_generator,
    forward_ad_active,
    function_mode_active,
    function_of,
    graph_is_retained,
    has_no_memory,
    held_by_node,
    history_enabled,
    hooks_on_top,
    inside_functorch,
    is_batch,
    module_hooks_are_global,
    never_traced,
    normalises_by_cudnn,
    on_top,
    owns_alone,
    pluggable_setters,
    profiled_range,
    profiler_enabled,
    replace_entry_points,
    rerun_stops_after,
    running_node,
    saved_as_it_is,
    saved_form,
    saved_tensor_hooks_enabled,
    saves_are_dropped,
    source_dtype,
    top_saved_tensor_hooks,
    transformed,
    under_checkpoint,
    wrap_rerun,
)
from .compiler_tests import TESTS as _OF_THE_COMPILER
from .distributed_tests import TESTS as _OF_DTENSORS
from .functions import _test_clamp, _test_functions
from .phantom_tests import TESTS as _OF_PHANTOMS


def _test_top_hooks() -> None:
    def same(tensor: Tensor) -> Tensor:
        return tensor

    assert top_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        top = top_saved_tensor_hooks()
        assert top is not None
        assert top[0] is top[1] is same
        with hooks_on_top(lambda hook: False, (Tensor.sin, Tensor.cos)):
            assert top_saved_tensor_hooks() == (Tensor.sin, Tensor.cos)
            torch._C._autograd._pop_saved_tensors_default_hooks()
            assert top_saved_tensor_hooks() == (same, same)
    seen: list[tuple[bool, bool, list[bool]]] = []

    def probe(x: Tensor) -> Tensor:
        x = x.exp()  # saves the result
        seen.append((under_checkpoint(), saves_are_dropped(), [rerun_stops_after(count) for count in range(3)]))
        return x.sin()

    torch.utils.checkpoint.checkpoint(probe, torch.zeros(1, requires_grad=True), use_reentrant=False).sum().backward()
    # The first tensor that the rerun saves is not the last one, the second is.
    assert seen == [(True, True, [False] * 3), (True, False, [False, True, False])]
    assert not under_checkpoint()
    assert not saves_are_dropped()


def _test_owners() -> None:
    x = torch.zeros(4)
    assert owns_alone(x)
    view = x.view(2, 2)
    assert not owns_alone(x)
    assert not owns_alone(view)
    del view
    assert owns_alone(x)
    operand = x.requires_grad_() * 1
    result = operand.exp()
    assert owns_alone(operand)
    assert not owns_alone(result)  # saved by its node
    saving = operand.sin()
    assert not owns_alone(operand)  # held by the node of saving
    del saving
    assert owns_alone(operand)


def _test_hooks_enabled() -> None:
    assert saved_tensor_hooks_enabled()
    with torch.autograd.graph.disable_saved_tensors_hooks("self test"):
        assert not saved_tensor_hooks_enabled()


def _test_functorch() -> None:
    seen: list[bool] = []

    def probe(x: Tensor) -> Tensor:
        seen.extend((inside_functorch(), has_no_memory(x)))
        return x

    torch.func.vmap(probe)(torch.zeros(1))
    assert seen == [True, True]
    assert not inside_functorch()


def _test_batched() -> None:
    seen: list[bool] = []
    x = torch.zeros(2, requires_grad=True)
    out = x * 1
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: seen.append(is_batch(grads[0])))
    torch.autograd.grad(out, x, torch.zeros(3, 2), is_grads_batched=True)
    assert seen == [True]
    assert not is_batch(x)


def _test_function_mode() -> None:
    assert not function_mode_active()
    with torch.device("cpu"):
        assert not function_mode_active()
        with torch.overrides.BaseTorchFunctionMode() as mode:
            assert function_mode_active()
            assert on_top(mode)
        assert not on_top(mode)


def _test_dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert not dispatch_mode_active()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        assert dispatch_mode_active()


def _test_being_traced() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[bool] = []

    def probe(x: Tensor) -> Tensor:
        seen.append(being_traced())
        return x + 1

    for options in ({}, {"tracing_mode": "fake"}, {"pre_dispatch": True}):
        make_fx(probe, **options)(torch.zeros(1))
    assert seen == [True] * 3
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        assert not being_traced()


def _test_transformed() -> None:
    seen: list[bool] = []

    def probe(x: Tensor) -> Tensor:
        seen.append(transformed())
        return x

    torch.jit.trace(probe, torch.zeros(1), check_trace=False)  # type: ignore[no-untyped-call]
    with forward_ad.dual_level():
        assert forward_ad_active()
        probe(torch.zeros(1))
    assert seen == [True, True]
    assert not forward_ad_active()
    assert not transformed()


def _test_profiler() -> None:
    assert not profiler_enabled()
    with profiler.profile() as profile, profiled_range("a range"):
        assert profiler_enabled()
    assert "a range" in {event.name for event in profile.function_events}


def _test_storage_weak_ref() -> None:
    tensor = torch.zeros(2)
    reference = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    assert reference() is view.untyped_storage()
    del view
    assert reference() is None


def _test_raw_stream() -> None:
    if torch.cuda.is_available():
        assert current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream
        assert current_cuda_device() == torch.cuda.current_device()


def _test_batch_norm_backend() -> None:
    parameter = torch.ones(2)
    assert not normalises_by_cudnn(torch.zeros(2, 2, 2, 2), parameter, parameter, 1e-5)
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        on_device, x = parameter.cuda(), torch.zeros(2, 2, 2, 2, device="cuda")
        assert normalises_by_cudnn(x, on_device, on_device, 1e-5)
        with torch.backends.cudnn.flags(enabled=False):
            assert not normalises_by_cudnn(x, on_device, on_device, 1e-5)


def _test_constant_in_graphs() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    torch.compiler.assume_constant_result(theirs)  # type: ignore[no-untyped-call]
    assert vars(constant_in_graphs(ours)) == vars(theirs) != {}


def _test_checkpointed_run() -> None:
    runs: list[object] = []

    def noted(x: Tensor) -> Tensor:
        runs.append(checkpointed_run())
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    results = [torch.utils.checkpoint.checkpoint(noted, x, use_reentrant=False) for _ in range(2)]
    around = [nullcontext(), nullcontext()]
    for run in runs:
        wrap_rerun(run, around.pop)
    (results[0] + results[1]).backward()  # reruns the first function last
    assert (checkpointed_run(), around, runs[2:]) == (None, [], runs[1::-1])


def _test_never_traced() -> None:
    # Dynamo runs this as it stands, and traces the functions called inside, hooks too.
    run_by_python: Any = torch._dynamo.disable(torch.square, recursive=False)  # type: ignore[no-untyped-call]

    def graphs_of(pack: Callable[[Tensor], Tensor]) -> int:
        backend = mock.Mock(side_effect=lambda graph, _: graph.forward)
        torch._dynamo.reset()  # Dynamo stops compiling a function after too many compilations
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            torch.compile(lambda x: run_by_python(x), backend=backend)(torch.ones(2, requires_grad=True))
        return backend.call_count

    def double(x: Tensor) -> Tensor:
        return x * 2

    traced = graphs_of(lambda x: double(x))
    # Not on the same line: there Python 3.10 makes one code of the two functions, and a code is traced or is not.
    assert traced > graphs_of(never_traced(lambda x: double(x))) == 0


def _test_version_counter() -> None:
    tensor = torch.zeros(1)
    probe = tensor.detach()
    probe.data = torch.empty(0)
    tensor.add_(1)
    assert probe._version == tensor._version == 1
    assert probe.untyped_storage().nbytes() == 0


def _test_base() -> None:
    tensor = torch.zeros(2, 3)
    assert tensor.t()._base is tensor


def _test_node_names() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    node = weight.to(torch.bfloat16).t().grad_fn
    assert node is not None
    assert node.name() == "TBackward0"
    cast_node = node.next_functions[0][0]
    assert cast_node is not None
    assert cast_node.name() == "ToCopyBackward0"
    leaf = cast_node.next_functions[0][0]
    assert getattr(leaf, "variable", None) is weight


def _test_saved_form() -> None:
    class Held(StoredForm):
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        out = torch.nn.functional.gelu(x * 1)
    node: Any = out.grad_fn
    assert isinstance(saved_form(node, "self"), Held)
    assert saved_form(node, "result") is None
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        norm: Any = torch.nn.functional.layer_norm(x, (2,), bias=x).grad_fn
    assert norm._saved_result2.shape == (1,)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        of_other_hooks: Any = torch.nn.functional.gelu(x * 1).grad_fn
    assert saved_form(of_other_hooks, "self") is None
    assert saved_as_it_is(node, "self") is None
    node.metadata["self test"] = 1
    again: Any = out.grad_fn
    assert again.metadata == {"self test": 1}
    scaled = (2.0 * x).grad_fn
    assert scaled is not None
    assert saved_form(scaled, "self") is None
    tanh: Any = x.tanh().grad_fn
    result = saved_as_it_is(tanh, "result")
    assert result is not None
    assert result.shape == x.shape


def _test_held_by_node() -> None:
    x = torch.zeros(2, requires_grad=True)
    out = x.exp()
    node: Any = out.grad_fn
    assert [each.data_ptr() for each in held_by_node(node)] == [out.data_ptr()]  # type: ignore[attr-defined]
    with torch.autograd.graph.save_on_cpu():
        packed: Any = x.exp().grad_fn
    assert [type(each) for each in held_by_node(packed)] == [tuple]
    torch.autograd.grad(out.sum(), x)
    assert list(held_by_node(node)) == []
    indexed: Any = x[torch.tensor([0])].grad_fn
    assert len(list(held_by_node(indexed))) == 1

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a * 2)
            return a * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    of_python: Any = Keeps.apply(x)  # type: ignore[no-untyped-call]
    assert len(list(held_by_node(of_python.grad_fn))) == 1
    assert function_of(of_python.grad_fn) is Keeps
    assert function_of(node) is None
    of_python.backward(torch.ones(2))
    assert list(held_by_node(of_python.grad_fn)) == []


def _test_graph_is_retained() -> None:
    seen: list[bool] = []
    x = torch.zeros(2, requires_grad=True)
    out = (x * 1).sum()
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda *_: seen.append(graph_is_retained()))
    torch.autograd.grad(out, x, retain_graph=True)
    torch.autograd.grad(out, x)
    assert seen == [True, False]


def _test_generator() -> None:
    assert callable(torch.Generator.get_offset)
    assert callable(torch.Generator.set_offset)
    if torch.cuda.is_available():
        device = torch.cuda.current_device()  # fills the tuple of generators
        generator = torch.cuda.default_generators[device]
        state = generator.get_state()
        try:
            seed, offset = draw_from_generator(device, 8)
            assert (seed, generator.get_offset()) == (generator.initial_seed(), offset + 8)
        finally:
            generator.set_state(state)


def _test_running_node() -> None:
    seen: list[str] = []

    def unpack(held: Tensor) -> Tensor:
        node = running_node()
        assert node is not None
        seen.append(node.name())
        return held

    x = torch.zeros(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = torch.nn.functional.nll_loss(x * 1, torch.zeros(2, dtype=torch.int64))
    out.backward()  # type: ignore[no-untyped-call]
    assert set(seen) == {"NllLossBackward0"}
    assert running_node() is None


def _test_source_dtype() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    for source in (x, x * 1):
        node = source.float().grad_fn
        assert node is not None
        assert source_dtype(node) is torch.bfloat16


def _test_module_hooks() -> None:
    module = torch.nn.Identity()
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert handle.id in module._forward_pre_hooks
    module.register_forward_hook(lambda *_: None, always_call=True)
    assert len(module._forward_hooks) == len(module._forward_hooks_always_called) == 1


def _test_global_module_hooks() -> None:
    assert not module_hooks_are_global()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert module_hooks_are_global()
    finally:
        handle.remove()


def _test_entry_points() -> None:
    memory, accelerator = torch.cuda.memory, torch.accelerator
    callers: dict[str, Callable[..., object]] = {
        "_cuda_memoryStats": memory.memory_stats_as_nested_dict,
        "_cuda_resetPeakMemoryStats": memory.reset_peak_memory_stats,
        "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
        "_cuda_memorySnapshot": memory.memory_snapshot,
        "_cuda_getMemoryFraction": memory.get_per_process_memory_fraction,
        "_cuda_record_memory_history": memory._record_memory_history_impl,
        "_accelerator_isAllocatorInitialized": accelerator.empty_cache,
        "_accelerator_getDeviceStats": accelerator.memory_stats,
        "_accelerator_resetPeakStats": accelerator.reset_peak_memory_stats,
        "_accelerator_resetAccumulatedStats": accelerator.reset_accumulated_memory_stats,
        "_accelerator_emptyCache": accelerator.empty_cache,
        "_accelerator_setAllocatorSettings": memory._set_allocator_settings,
    }
    for name, caller in callers.items():
        assert name in inspect.unwrap(caller).__code__.co_names, f"{caller.__name__} does not look {name} up"
        assert hasattr(torch._C, name) or torch.version.cuda is None, f"torch._C has no {name}"
    assert allocator_settings_setter() is torch._C._accelerator_setAllocatorSettings
    replace_entry_points({"_pyactcomp_self_test": _test_entry_points})
    assert vars(torch._C).pop("_pyactcomp_self_test") is _test_entry_points


# Of _pyactcomp_startup, which stands outside the package: the functions that initialise CUDA, and who looks them up.
INITIALISING: dict[str, Callable[..., object] | None] = {
    "_cuda_init": torch.cuda._lazy_init,
    "_cuda_record_memory_history": torch.cuda.memory._record_memory_history_impl,
    "_cuda_record_memory_history_legacy": torch.cuda.memory._record_memory_history_legacy,
    "_cuda_attach_out_of_memory_observer": None,  # programs alone
}


def _test_initialising() -> None:
    for name, caller in INITIALISING.items():
        assert hasattr(torch._C, name) or torch.version.cuda is None, f"torch._C has no {name}"
        found = caller is None or name in inspect.unwrap(caller).__code__.co_names
        assert found, f"{caller} does not look {name} up"


def _test_history_enabled() -> None:
    assert history_enabled() in (False, True)


def _test_pluggable_setters() -> None:
    if torch.version.cuda is not None:
        pluggable_setters(torch._C._CUDAPluggableAllocator)  # type: ignore[attr-defined]


_TESTS: dict[str, Callable[[], None]] = {
    "torch._C._cuda_isHistoryEnabled": _test_history_enabled,
    "torch._C._autograd._top_saved_tensors_default_hooks, _push, _pop": _test_top_hooks,
    "torch._C._autograd._saved_tensors_hooks_is_enabled": _test_hooks_enabled,
    "torch.utils.checkpoint's hooks, and the frame that they enclose": _test_checkpointed_run,
    "torch._C._storage_Use_Count, Tensor._use_count": _test_owners,
    "torch._C._functorch.peek_interpreter_stack": _test_functorch,
    "torch._C._functorch.is_legacy_batchedtensor": _test_batched,
    "torch._C._len_torch_function_stack, _get_function_stack_at": _test_function_mode,
    "torch._C._len_torch_dispatch_stack": _test_dispatch_mode,
    "torch._C._get_dispatch_mode, torch._ops._get_dispatch_mode_pre_dispatch": _test_being_traced,
    "torch.autograd.forward_ad._current_level, torch._C._is_tracing": _test_transformed,
    "torch.autograd.profiler._is_profiler_enabled, torch.ops.profiler._record_function_enter_new": _test_profiler,
    "UntypedStorage: one Python object, alive as long as the storage": _test_storage_weak_ref,
    "torch._C._cuda_getCurrentRawStream, _cuda_getDevice": _test_raw_stream,
    "torch._C._select_batch_norm_backend": _test_batch_norm_backend,
    "torch.Generator.get_offset, set_offset": _test_generator,
    "Tensor._version, shared by detach() and kept by .data =": _test_version_counter,
    "_dynamo_marked_constant": _test_constant_in_graphs,
    "the derivative of Tensor.clamp at its bounds": _test_clamp,
    "torch.autograd.Function.apply; AUTOGRAD_FUNCTION_COUNTER": _test_functions,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": _test_never_traced,
    "Tensor._base": _test_base,
    "names and edges of autograd nodes": _test_node_names,
    "Node._raw_saved_*: SavedTensor.data and unpack_hook; Node.metadata": _test_saved_form,
    "Node._raw_saved_* of every kind of node, _forward_cls": _test_held_by_node,
    "torch._C._autograd._get_current_graph_task_keep_graph": _test_graph_is_retained,
    "torch._C._current_autograd_node, while saved tensors are unpacked": _test_running_node,
    "Node._input_metadata": _test_source_dtype,
    "Module._forward_pre_hooks, Module._forward_hooks": _test_module_hooks,
    "torch.nn.modules.module._has_any_global_hook": _test_global_module_hooks,
    "torch._C._cuda_memoryStats and the like, looked up at each call": _test_entry_points,
    "torch._C._cuda_init and the like, looked up at each call": _test_initialising,
    "torch._C._CUDAPluggableAllocator.set_init_fn and the like": _test_pluggable_setters,
    **_OF_THE_COMPILER,
    **_OF_DTENSORS,
    **_OF_PHANTOMS,
}


def self_test() -> dict[str, str | None]:
    """Test every private name.

    Returns
    -------
    dict
        Name to None if the test passed, otherwise to the error.

    Examples
    --------
    >>> from pyactcomp.torch_private import tests
    >>> [name for name, wrong in tests.self_test().items() if wrong]
    []
    """
    results: dict[str, str | None] = dict.fromkeys(_TESTS)
    for name, test in _TESTS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of what it deprecates or finds slow
                test()
            results[name] = None
        except Exception as error:  # a changed torch may raise anything
            results[name] = f"{type(error).__name__}: {error}"
    return results
