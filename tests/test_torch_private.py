"""Each private name of torch that the engine relies on does what it is relied on for."""

from __future__ import annotations

import ast
import inspect
import threading
import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pyactcomp import torch_private
from pyactcomp.torch_private import compiler_tests, distributed, distributed_tests, phantom_tests
from pyactcomp.torch_private import tests as torch_private_tests


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    return torch_private_tests.self_test()


@pytest.mark.parametrize("name", torch_private_tests._TESTS)
def test_a_private_name_does_what_is_relied_on(name: str, results: dict[str, str | None]) -> None:
    assert results[name] is None


def test_the_self_test_reports_a_name_that_moved(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, str | None]
) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    monkeypatch.delattr(torch._C._functorch, "is_legacy_batchedtensor")
    after = torch_private_tests.self_test()
    assert set(after) == set(results)
    wrong = {name: reason for name, reason in after.items() if reason is not None}
    assert set(wrong) == {
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._functorch.is_legacy_batchedtensor",
    }
    assert "AttributeError" in wrong["torch._C._autograd._get_current_graph_task_keep_graph"]


def test_the_self_test_passes_on_no_warning_of_torch(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, str | None]
) -> None:
    """Torch 2.14 deprecates torch.jit.trace by a warning that Python shows: the doctor printed it first of all."""
    trace = torch.jit.trace

    def deprecated(*args: object, **options: object) -> object:
        for category in (DeprecationWarning, FutureWarning, RuntimeWarning):
            warnings.warn("deprecated", category, stacklevel=2)
        return trace(*args, **options)

    monkeypatch.setattr(torch.jit, "trace", deprecated)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = torch_private_tests.self_test()
    assert [str(each.message) for each in caught] == []
    assert after == results


def test_the_self_test_leaves_no_hook_behind(results: dict[str, str | None]) -> None:
    assert results
    assert torch_private.top_saved_tensor_hooks() is None
    assert torch_private.saved_tensor_hooks_enabled()
    assert not torch_private.profiler_enabled()


def test_top_saved_tensor_hooks_is_the_innermost_pair_of_this_thread() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    def other(x: Tensor) -> Tensor:
        return x

    seen: list[object] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        with torch.autograd.graph.saved_tensors_hooks(other, pack):
            assert torch_private.top_saved_tensor_hooks() == (other, pack)
        assert torch_private.top_saved_tensor_hooks() == (pack, pack)
        thread = threading.Thread(target=lambda: seen.append(torch_private.top_saved_tensor_hooks()))
        thread.start()
        thread.join()
    assert torch_private.top_saved_tensor_hooks() is None
    assert seen == [None]


def test_inside_functorch_tells_every_transform() -> None:
    def probe(x: Tensor) -> Tensor:
        assert torch_private.inside_functorch()
        return x.sum()

    x = torch.ones(3)
    torch.func.grad(probe)(x)
    torch.func.vmap(probe)(x.view(3, 1))
    torch.func.functionalize(probe)(x)
    assert not torch_private.inside_functorch()


@pytest.mark.gpu
def test_current_raw_stream_follows_the_current_stream() -> None:
    assert torch_private.current_raw_stream(0) == torch.cuda.current_stream().cuda_stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_private.current_raw_stream(0) == stream.cuda_stream != 0


def test_every_public_function_has_a_self_test() -> None:
    """What the module offers must be among what ``pyactcomp doctor`` tests."""
    offered = set(_functions(torch_private)) | {"current_raw_stream"}
    functions = _functions(torch_private_tests) | _functions(compiler_tests) | _functions(phantom_tests)
    functions.pop("self_test")
    tested = {name.id for each in functions.values() for name in ast.walk(each) if isinstance(name, ast.Name)}
    assert {name for name in offered if not name.startswith("_")} - tested == set()
    named = {test.__name__ for test in torch_private_tests._TESTS.values()}
    assert named - {"test_dtensors", "_test_clamp", "_test_functions"} == set(functions)
    offered = {name for name in _functions(distributed) if not name.startswith("_")}
    assert offered - set(vars(distributed_tests)) == set()


def _functions(module: ModuleType) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
