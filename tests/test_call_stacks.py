"""Contract under test: of a call stack the lines are shown that say whose memory it is, in few characters."""

from __future__ import annotations

import pytest

from pyactcomp.snapshots.call_stacks import cleaned, described, fold_stacks, shortened
from pyactcomp.snapshots.model import Frame, Settings, Snapshot


def cpp(name: str) -> Frame:
    return Frame("??", 0, name)


# As torch 2.11 records them with its defaults; innermost first.
INSIDE = [
    cpp("torch::unwind::unwind()"),
    cpp("torch::CapturedTraceback::gather(bool, bool, bool)"),
    cpp("gather_with_cpp()"),
    cpp(
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char, unsigned long, "
        "CUstream_st*)"
    ),
    cpp("c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)"),
    cpp("at::detail::empty_cuda(c10::ArrayRef<long>, c10::ScalarType, std::optional<c10::Device>)"),
]
MM = [
    cpp("at::native::(anonymous namespace)::structured_mm_out_cuda_functional::set_output_raw_strided(long)"),
    cpp("at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const&, at::Tensor const&)"),
    cpp("torch::autograd::VariableType::(anonymous namespace)::mm(c10::DispatchKeySet, at::Tensor const&)"),
    cpp("at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
]
TENSORS = "(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)"
NODE = cpp(f"torch::autograd::generated::MmBackward0::apply{TENSORS}")
PYTHON_NODE = cpp(f"torch::autograd::PyNode::apply{TENSORS}")
ENGINE = [
    cpp(f"torch::autograd::Node::operator(){TENSORS}"),
    cpp(
        "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&, "
        "torch::autograd::Node*, torch::autograd::InputBuffer&)"
    ),
    cpp("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
    cpp("torch::autograd::python::PythonEngine::thread_init(int)"),
]
THREAD = [cpp("std::error_code::default_error_condition() const"), cpp("start_thread"), cpp("__clone3")]
TORCH = "/v/lib/python3.11/site-packages/torch"
LINEAR = Frame(f"{TORCH}/nn/functional.py", 9, "linear")
CALLED = Frame(f"{TORCH}/nn/modules/module.py", 1776, "_call_impl")
APPLY = Frame(f"{TORCH}/autograd/function.py", 315, "apply")
RERUN = Frame(f"{TORCH}/utils/checkpoint.py", 320, "backward")
LAYER = Frame("/home/me/model.py", 12, "forward")
BLOCK = Frame("/home/me/model.py", 30, "forward")
MODEL = Frame("/home/me/model.py", 50, "forward")
MAIN = Frame("/home/me/train.py", 3, "main")
OWN_BACKWARD = Frame("/home/me/ops.py", 7, "backward")
GRAPH = "/tmp/torchinductor_me/ey/cey3bxvupp5khpeneyf5nlsg5v7wzvb4bszbp4rrx2b4elwmolwu.py"


def folded(*stack: Frame) -> list[str]:
    numbers = tuple(range(len(stack)))
    snapshot = Snapshot((), stack, ((), numbers), ((0, 0),), Settings(), (), ())
    nothing, lines = fold_stacks(snapshot)
    assert nothing == ()
    return [shortened(line) for line in lines]


def test_forward_shows_the_programs_own_lines() -> None:
    stack = (*INSIDE, *MM, LINEAR, CALLED, LAYER, CALLED, BLOCK, CALLED, MODEL, CALLED, MAIN)
    assert folded(*stack) == ["model.py:12 forward", "model.py:30 forward", "model.py:50 forward"]


def test_gradient_of_a_thread_without_python_shows_the_node() -> None:
    assert folded(*INSIDE, *MM, NODE, *ENGINE, *THREAD) == ["MmBackward0"]
    accumulates = cpp(f"torch::autograd::AccumulateGrad::apply{TENSORS}")
    assert folded(*INSIDE, accumulates, *ENGINE, *THREAD) == ["AccumulateGrad"]


def test_gradient_in_the_thread_of_the_call_shows_the_call_too() -> None:
    called = Frame(f"{TORCH}/autograd/graph.py", 850, "_engine_run_backward")
    assert folded(*INSIDE, *MM, NODE, *ENGINE[:2], called, MAIN) == ["MmBackward0", "train.py:3 main"]


def test_block_run_again_in_backward_shows_its_forward_lines() -> None:
    stack = (*INSIDE, *MM, LINEAR, CALLED, LAYER, CALLED, RERUN, APPLY, PYTHON_NODE, *ENGINE, *THREAD)
    assert folded(*stack) == ["model.py:12 forward"]
    # The gradients of that block, by a second call of the engine.
    inner = Frame(f"{TORCH}/autograd/graph.py", 850, "_engine_run_backward")
    stack = (*INSIDE, *MM, NODE, *ENGINE[:2], inner, RERUN, APPLY, PYTHON_NODE, *ENGINE, *THREAD)
    assert folded(*stack) == ["MmBackward0"]


def test_function_of_the_program_shows_its_backward() -> None:
    assert folded(*INSIDE, *MM, OWN_BACKWARD, APPLY, PYTHON_NODE, *ENGINE, *THREAD) == ["ops.py:7 backward"]


def test_engine_without_a_node_is_named_by_what_it_does() -> None:
    cast = [
        cpp("at::_ops::_to_copy::call(at::Tensor const&)"),
        cpp("void torch::autograd::validate_outputs_impl<torch::autograd::Edge>(std::vector<torch::autograd::Edge>)"),
        cpp("torch::autograd::validate_outputs(std::vector<torch::autograd::Edge> const&)"),
    ]
    assert folded(*INSIDE, *cast, *ENGINE[1:], *THREAD) == ["autograd: validate_outputs"]


def test_hook_in_python_that_the_engine_calls_shows_its_line() -> None:
    shard = Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 400, "foreach_reduce")
    hook = cpp("torch::autograd::PyFunctionPostHook::operator()(std::vector<at::Tensor> const&)")
    assert folded(*INSIDE, shard, hook, *ENGINE[1:], *THREAD) == ["_fsdp_collectives.py:400 foreach_reduce"]


@pytest.mark.parametrize("cache", ["/tmp/torchinductor_me", "/scratch/cache", "C:\\cache"])
def test_compiled_graph_is_one_line_whatever_the_cache(cache: str) -> None:
    name = GRAPH.removeprefix("/tmp/torchinductor_me")
    code = Frame(f"{TORCH}/_inductor/output_code.py", 600, "__call__")
    lines = [
        folded(*INSIDE, Frame(cache + name, line, "call"), code, CALLED, LAYER, MAIN) for line in (1853, 1856, 9999)
    ]
    assert lines == [["compiled graph cey3bxvu", "model.py:12 forward", "train.py:3 main"]] * 3
    # In backward, in a thread of its own.
    stack = (*INSIDE, Frame(cache + name, 7, "call"), code, APPLY, PYTHON_NODE, *ENGINE, *THREAD)
    assert folded(*stack) == ["compiled graph cey3bxvu"]
    # A file of the program that merely looks a little like it.
    own = Frame("/home/me/ey/cey_model.py", 7, "call")
    assert folded(*INSIDE, own) == ["cey_model.py:7 call"]


def test_generated_graph_shows_the_lines_it_comes_from() -> None:
    known = Frame("/tmp/fx_generated_ab.py", 9, "forward", original=(LINEAR, LAYER, MODEL))
    unknown = Frame("/tmp/fx_generated_ab.py", 10, "forward")
    assert folded(*INSIDE, known, CALLED, MAIN) == ["model.py:12 forward", "train.py:3 main"]
    assert folded(*INSIDE, unknown, CALLED, MAIN) == ["train.py:3 main"]
    assert folded(*INSIDE, Frame("<eval_with_key>.3", 10, "forward"), CALLED, MAIN) == ["train.py:3 main"]


def test_stack_of_torchs_inside_alone_shows_the_operator_or_the_innermost_function() -> None:
    # Operators call each other: the outermost is what was asked for.
    linear = cpp("at::_ops::linear::call(at::Tensor const&, at::Tensor const&)")
    assert folded(*INSIDE, *MM, linear, cpp("main")) == ["at::linear"]
    assert folded(*INSIDE[:5], cpp("void thrust::f<int, std::vector<int> >(int)")) == ["thrust::f"]
    assert folded(*INSIDE, *MM, LINEAR, CALLED) == ["functional.py:9 linear"]
    assert folded(*INSIDE[:2]) == ["torch::unwind::unwind"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void a::b<c<d>, e>(f const&) const", "a::b"),
        ("a::(anonymous namespace)::b(int)", "a::b"),
        ("a::b::operator()(int) const", "a::b::operator"),
        ("std::vector<int> a::b(std::function<void (int)>)", "a::b"),
        ("a::f(int)::{lambda(int)#1}::operator()(int) const", "a::f::{lambda#1}::operator"),
        ("main", "main"),
        ("(", "("),
    ],
)
def test_cpp_name_is_cut_to_the_function(name: str, short: str) -> None:
    assert cleaned(name) == short


def test_description_has_the_path_where_there_is_one() -> None:
    assert described(LAYER) == "/home/me/model.py:12 forward"
    assert described(Frame("", 0, "MmBackward0")) == "MmBackward0"
    assert described(cpp("main")) == "main"
    assert described(Frame(GRAPH, 0, "compiled graph cey3bxvu")) == f"{GRAPH} compiled graph cey3bxvu"
