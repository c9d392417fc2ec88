"""Which reading each saved tensor gets, the order of forms, and readers that are registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.readers import forms, table
from pyactcomp.readers import lookup as readers
from pyactcomp.readers.forms import (
    AS_CODES,
    AS_SHAPE,
    BFLOAT16,
    BITS,
    ITSELF,
    LOG,
    POSITIVE,
    PROBABILITY,
    SCALED,
    Form,
    Reading,
    Use,
)
from pyactcomp.readers.lookup import register_reader
from pyactcomp.readers.observer import observer
from pyactcomp.readers.table import READERS
from pyactcomp.report import Report
from pyactcomp.torch_private import extensions

N = 16


def readings(call: Callable[[], object]) -> list[tuple[Tensor, Reading]]:
    """Return what a call saves, with how it is read."""
    seen: list[tuple[Tensor, Reading]] = []

    def pack(tensor: Tensor) -> Tensor:
        observer().note_save()
        reading = observer().facts(tensor)[0]
        assert reading is not None
        seen.append((tensor, reading))
        return tensor

    observer().start()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call()
    finally:
        observer().stop()
    return seen


def the_reading(call: Callable[[], object], operand: Tensor) -> Reading:
    """Return how a call reads an operand, which it saves."""
    (found,) = {reading for tensor, reading in readings(call) if tensor.data_ptr() == operand.data_ptr()}
    return found


def matrix() -> Tensor:
    return torch.rand(N, N) + 0.5


def heads() -> Tensor:
    return torch.rand(2, 2, N, N)


def image() -> Tensor:
    return torch.rand(2, 4, 8, 8)


# An operator, its operands by name, and how it is called with them.
CALLS: dict[str, tuple[dict[str, Callable[[], Tensor]], Callable[..., Tensor]]] = {
    "mul": ({"self": matrix, "other": matrix}, torch.mul),
    "div": ({"self": matrix, "other": matrix}, torch.div),
    "addcmul": ({"self": matrix, "tensor1": matrix, "tensor2": matrix}, torch.addcmul),
    "addcdiv": ({"self": matrix, "tensor1": matrix, "tensor2": matrix}, torch.addcdiv),
    "lerp": ({"self": matrix, "end": matrix, "weight": matrix}, torch.lerp),
    "pow.Tensor_Tensor": ({"self": matrix, "exponent": matrix}, torch.pow),
    "xlogy.Tensor": ({"self": matrix, "other": matrix}, torch.xlogy),
    "atan2": ({"self": matrix, "other": matrix}, torch.atan2),
    "mm": ({"self": matrix, "mat2": matrix}, torch.mm),
    "addmm": ({"self": matrix, "mat1": matrix, "mat2": matrix}, torch.addmm),
    "bmm": ({"self": lambda: image()[0], "mat2": lambda: image()[0]}, torch.bmm),
    "mv": ({"self": matrix, "vec": lambda: torch.rand(N)}, torch.mv),
    "dot": ({"self": lambda: torch.rand(N), "tensor": lambda: torch.rand(N)}, torch.dot),
    "maximum": ({"self": matrix, "other": matrix}, torch.maximum),
    "native_layer_norm": (
        {"input": matrix, "weight": lambda: torch.rand(N), "bias": lambda: torch.rand(N)},
        lambda x, w, b: F.layer_norm(x, (N,), w, b),
    ),
    "native_group_norm": (
        {"input": image, "weight": lambda: torch.rand(4), "bias": lambda: torch.rand(4)},
        lambda x, w, b: F.group_norm(x, 2, w, b),
    ),
    "native_batch_norm": (
        {"input": image, "weight": lambda: torch.rand(4), "bias": lambda: torch.rand(4)},
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    ),
    "convolution": (
        {"input": image, "weight": lambda: torch.rand(4, 4, 3, 3), "bias": lambda: torch.rand(4)},
        lambda x, w, b: torch.convolution(x, w, b, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    ),
    "_prelu_kernel": ({"self": matrix, "weight": lambda: torch.rand(N, N)}, torch._prelu_kernel),
    "binary_cross_entropy": ({"self": lambda: torch.rand(N, N)}, lambda p: F.binary_cross_entropy(p, torch.ones(N, N))),
    "_scaled_dot_product_flash_attention_for_cpu": (
        {"query": heads, "key": heads, "value": heads},
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    ),
    "softplus": ({"self": matrix}, F.softplus),
    "_log_softmax": ({"self": matrix}, lambda x: x.log_softmax(-1)),
    "_softmax": ({"self": matrix}, lambda x: x.softmax(-1)),
    "sigmoid": ({"self": matrix}, torch.sigmoid),
    "tanh": ({"self": matrix}, torch.tanh),
    "amax": ({"self": matrix}, lambda x: x.amax(0)),
}
PATTERNS = [
    (operator, pattern)
    for operator, (operands, _) in CALLS.items()
    for pattern in itertools.product([False, True], repeat=len(operands))
    if any(pattern)
]


@pytest.mark.parametrize(("operator", "pattern"), PATTERNS, ids=str)
def test_each_saved_operand_gets_its_own_reading(operator: str, pattern: tuple[bool, ...]) -> None:
    """Whatever requires grad decides what is saved, and in which order."""
    operands, call = CALLS[operator]
    given = {name: make().requires_grad_(needs) for (name, make), needs in zip(operands.items(), pattern, strict=True)}
    seen = readings(lambda: call(*given.values()))
    for tensor, reading in seen:
        names = [name for name, each in given.items() if each.data_ptr() == tensor.data_ptr()]
        operand = names[0] if names else "result"
        expected = READERS[operator].get(operand, READERS[operator].get(""))
        if expected is None or expected.form is ITSELF:
            assert reading.form is ITSELF
            assert reading.operator.startswith(f"aten::{operator.partition('.')[0]}")
        else:
            assert reading == expected
    assert seen or operator in ("addcmul", "addcdiv", "addmm", "native_layer_norm", "native_group_norm", "convolution")


def power(exponent: object) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.pow(x, exponent)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("call", "how"),
    [
        *((power(exponent), Use.SQUARE) for exponent in (1, 2, 2.0, 3, 4)),
        *((power(exponent), BFLOAT16) for exponent in (0.5, -0.5, -1, -2, 1.5, 5, 8, -8)),
        *((power(exponent), ITSELF) for exponent in (20, -9, 8.5, float("nan"), float("inf"))),
        (torch.square, Use.SQUARE),
        (lambda x: x**2, Use.SQUARE),
        (lambda x: torch.linalg.vector_norm(x), Use.SQUARE),
        (lambda x: torch.linalg.vector_norm(x, 2, dim=-1), Use.SQUARE),
        *((lambda x, p=p: torch.linalg.vector_norm(x, p), ITSELF) for p in (1, 3, 0.5, float("inf"))),
    ],
    ids=lambda value: value.name if isinstance(value, (Form, Use)) else "call",
)
def test_a_scalar_argument_decides_the_form(call: Callable[[Tensor], Tensor], how: Form | Use) -> None:
    x = matrix().requires_grad_()
    found = the_reading(lambda: call(x), x)
    assert (found.use or found.form) is how


@pytest.mark.parametrize(
    ("call", "bounds"),
    [
        (lambda x: x.clamp(-1, 2.5), (-1, 2.5)),
        (lambda x: x.clamp(min=0.25), (0.25, float("inf"))),
        (lambda x: x.clamp(max=0.25), (-float("inf"), 0.25)),
        (lambda x: x.clamp_min(0.5), (0.5, float("inf"))),
        (lambda x: x.clamp_max(0.5), (-float("inf"), 0.5)),
        (F.relu6, (0, 6)),
        (F.hardtanh, (-1, 1)),
        (lambda x: F.hardtanh(x, -2, 3), (-2, 3)),
        (F.hardsigmoid, (-3, 3)),
        (lambda x: F.hardshrink(x, 0.25), (-0.25, 0.25)),
        (lambda x: F.softshrink(x, 0.25), (-0.25, 0.25)),
        (lambda x: F.threshold(x, 0.75, 20), (0.75, float("inf"))),
        (lambda x: F.leaky_relu(x, 0.3), (0, float("inf"))),
    ],
)
def test_bounds_become_the_question_that_a_bit_answers(
    call: Callable[[Tensor], Tensor], bounds: tuple[float, float]
) -> None:
    x = matrix().requires_grad_()
    form = the_reading(lambda: call(x), x).form
    assert form.need == BITS
    assert form.comparison is not None
    assert (form.comparison.low, form.comparison.high) == bounds
    # What elements come back as answers as they do.
    answers = form.comparison(torch.tensor([form.comparison.yes, form.comparison.no]))
    assert answers.tolist() == [True, False]


@pytest.mark.parametrize(
    "bounds", [(0.5, None), (None, 0.5), (-0.5, 0.5), (0.0, 1e-30), (0.5, float("inf")), (0.5, 0.5)]
)
def test_a_clamp_whose_derivative_is_zero_at_its_bounds(
    bounds: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from torch 2.14 on: a bit for "within the bounds" gave no element between them a gradient."""
    monkeypatch.setattr(table, "CLAMP_DROPS_BOUNDS", True)
    form, _ = table._between(1, 2)({1: bounds[0], 2: bounds[1]})
    if form is ITSELF:
        assert bounds in ((0.5, float("inf")), (0.5, 0.5))
        return
    x = torch.tensor([-float("inf"), -0.5, 0.0, 1e-31, 1e-30, 0.25, 0.5, 1.0, float("inf"), float("nan")])
    inside = torch.ones(len(x), dtype=torch.bool)
    for bound, strictly in zip(bounds, (torch.gt, torch.lt), strict=True):
        inside = inside if bound is None else inside & strictly(x, bound)
    assert form.comparison is not None
    assert torch.equal(form.comparison(x), inside & ~x.isnan())
    assert form.comparison(torch.tensor([form.comparison.yes, form.comparison.no])).tolist() == [True, False]


@pytest.mark.parametrize("repeats", [7, 8, 64])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("operator", [torch.mul], ids=lambda f: f.__name__)
def test_one_number_for_many_elements_is_exact(operator: Any, expanded: bool, repeats: int) -> None:
    x, s = torch.rand(N, repeats, requires_grad=True), (torch.rand(N, 1) + 1).requires_grad_()
    given = s.expand(N, repeats) if expanded else s
    name = operator.__name__
    found = the_reading(lambda: operator(x, given), s)
    if repeats >= 8:
        assert found.form is ITSELF
        assert "statistic" in found.reason
    else:
        assert found == READERS[name]["other"]
    assert the_reading(lambda: operator(x, given), x) == READERS[name]["self"]


def test_views_of_one_base_are_told_apart() -> None:
    base = torch.rand(3, 2, 2, N, N, requires_grad=True) * 1
    names = READERS["_scaled_dot_product_flash_attention_for_cpu"]
    for order in itertools.permutations(range(3)):
        q, k, v = (base[i] for i in order)
        found = readings(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
        for given, name in ((q, "query"), (k, "key"), (v, "value")):
            (reading,) = (r for t, r in found if t.data_ptr() == given.data_ptr())
            assert reading == names[name]


def test_an_operand_that_is_given_twice_is_read_as_the_stricter_of_both() -> None:
    x = matrix().requires_grad_()
    assert the_reading(lambda: x * x, x).use is Use.FACTOR
    assert the_reading(lambda: x @ x, x).use is Use.MATRIX
    assert the_reading(lambda: x / x, x).form is ITSELF
    h = heads().requires_grad_()
    assert the_reading(lambda: F.scaled_dot_product_attention(h, h, h), h).form is SCALED
    # An alias of it, of the same shape, is another object.
    assert the_reading(lambda: x * x.detach(), x).use is Use.FACTOR


def test_a_result_in_place_is_read_as_the_result() -> None:
    for call, form in ((torch.relu_, POSITIVE), (torch.sigmoid_, PROBABILITY), (torch.exp_, ITSELF)):
        x = matrix().requires_grad_() * 1
        assert the_reading(lambda call=call, x=x: call(x), x).form is form


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda b: b.name)
def test_statistics_of_attention_and_norms_are_exact(backend: SDPBackend) -> None:
    q, k, v = (heads().requires_grad_() for _ in range(3))
    with sdpa_kernel(backend):
        found = readings(lambda: F.scaled_dot_product_attention(q, k, v))
    named = {reading.operator for _, reading in found}
    if backend is SDPBackend.FLASH_ATTENTION:
        assert named == {"aten::_scaled_dot_product_flash_attention_for_cpu"}
    else:
        assert {"aten::bmm"} < named


# Forms.


def reading(form: Form) -> Reading:
    return Reading("aten::x", "self", form, "for a test")


ONE_BIT = Form("1 bit", BITS, forms.Comparison("above", 0.0, float("inf"), 1.0, -1.0))
OTHER_BIT = Form("1 bit", BITS, forms.Comparison("within", 0.0, 1.0, 0.0, float("inf")))
RELATIVE = [BFLOAT16, SCALED, LOG, forms.LOG_PROBABILITY, PROBABILITY, forms.EXPONENTIAL, forms.ARTANH]
ALL = [AS_SHAPE, ONE_BIT, OTHER_BIT, AS_CODES, POSITIVE, *RELATIVE, ITSELF]


def test_every_form_serves_itself_and_a_reader_of_the_shape() -> None:
    for form in ALL:
        assert form.serves(form)
        assert form.serves(AS_SHAPE)


def test_as_it_is_serves_every_reader_of_values() -> None:
    for form in (AS_CODES, POSITIVE, *RELATIVE, ITSELF):
        assert ITSELF.serves(form)
        assert not AS_SHAPE.serves(form)
        for bits in (ONE_BIT, OTHER_BIT):
            assert not bits.serves(form)
            assert not form.serves(bits)


def test_stricter_forms_serve_codes_and_none_another_of_its_rank() -> None:
    assert POSITIVE.serves(AS_CODES)
    assert not AS_CODES.serves(POSITIVE)
    assert not ONE_BIT.serves(OTHER_BIT)
    for form in RELATIVE:
        assert form.serves(AS_CODES) is (form not in (LOG, forms.LOG_PROBABILITY))
        also = (BFLOAT16,) if form in (PROBABILITY, forms.EXPONENTIAL) else ()
        assert [form.serves(other) for other in RELATIVE] == [other in (form, *also) for other in RELATIVE]
        assert not form.serves(ITSELF)


@pytest.mark.parametrize(
    "given", list(itertools.product(ALL, repeat=2)), ids=lambda pair: f"{pair[0].name}-{pair[1].name}"
)
def test_the_strictest_of_two_readings_serves_both(given: tuple[Form, Form]) -> None:
    found = readers.strictest(map(reading, given)).form
    if ITSELF in given or found is not ITSELF:
        assert found in (*given, ITSELF)
    for form in given:
        # As it is there is no bit in the sense of `serves`, but the values are all there.
        assert found is ITSELF or found.serves(form)
    assert readers.strictest([reading(given[0])]).form is given[0]


# Registered readers.


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(readers, "_registered", {})
    monkeypatch.setattr(readers, "_registered_functions", {})
    yield
    monkeypatch.undo()
    for changed in readers.on_change:
        changed()


def test_the_linear_of_zero_3_is_read_as_a_matrix_product() -> None:
    """By the name of its class: nothing imports DeepSpeed."""

    class LinearFunctionForZeroStage3(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            x, weight, _ = ctx.saved_tensors
            return grad @ weight, grad.t() @ x, grad.sum(0)

    LinearFunctionForZeroStage3.__module__ = "deepspeed.runtime.zero.linear"
    LinearFunctionForZeroStage3.__qualname__ = "LinearFunctionForZeroStage3"
    x, weight = matrix().requires_grad_() * 1, matrix().requires_grad_() * 1
    bias = torch.zeros(weight.shape[0], requires_grad=True) * 1
    found = readings(lambda: LinearFunctionForZeroStage3.apply(x, weight, bias))
    assert [(each.operator, each.form) for _, each in found[:2]] == [("aten::mm", AS_CODES)] * 2
    assert found[2][1].form is ITSELF


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(None, x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        _, x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((3,), {"x": "linear"}, TypeError, r"'namespace::operator' or an autograd function's class, got 3"),
    ((Tensor,), {"x": "linear"}, TypeError, r"autograd function's class, got <class 'torch\.Tensor'>"),
    (("aten::mul", {0: "linear"}), {}, TypeError, r"operator 'aten::mul' go by name"),
    ((Scaled,), {"x": "linear"}, TypeError, r"operands of Scaled go by position"),
    ((Scaled, {}), {}, TypeError, r"operands of Scaled go by position"),
    ((Scaled, {-1: "linear"}), {}, ValueError, r"integer from 0, got -1"),
    ((Scaled, {"x": "linear"}), {}, ValueError, r"integer from 0, got 'x'"),
    ((Scaled, {0: "codes"}), {}, ValueError, r"saved 0.*'codes'"),
    (("aten::no_such",), {"x": "linear"}, ValueError, r"no operator 'aten::no_such': import the package"),
    (("mul",), {"self": "linear"}, ValueError, r"no operator 'mul'.*'namespace::name'"),
    (("aten::mul.No",), {"self": "linear"}, ValueError, r"'mul' has no overload 'No'; known: .*Tensor"),
    (("aten::mul",), {}, ValueError, r"name an operand of 'aten::mul'"),
    (("aten::mul",), {"third": "linear"}, ValueError, r"'third' of 'aten::mul' is not there; known: .*other, .*result"),
    (("aten::add.Tensor",), {"alpha": "linear"}, ValueError, r"'alpha' of 'aten::add\.Tensor' is no tensor"),
    (("aten::mul",), {"other": "int8"}, ValueError, r"the exactness of other.*'int8'"),
]


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize(("arguments", "named", "error", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_registration_says_so_and_changes_nothing(
    arguments: tuple[Any, ...], named: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        register_reader(*arguments, **named)
    assert not readers._registered
    assert not readers._registered_functions


def stored(call: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[Report, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with pyactcomp.compressed(min_bytes=0, **options) as c:
        out = call(x * 1, y * 1)
    return pyactcomp.report(c), torch.autograd.grad(out.square().sum(), (x, y))


WHOLE, HALF, CODES = 64 * 64 * 4, 64 * 64 * 2, 64 * 64 + 64 * 4


@pytest.fixture(params=["frame", "name"])
def _class_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the class of an autograd function is found: from torch 2.14 on by the name alone, which the library tells."""
    if request.param == "name":
        monkeypatch.setattr(readers, "_APPLY", None)
        if extensions.load("_observer")[0] is None:
            pytest.skip("needs the observer: without it no one tells the name")
    elif readers._APPLY is None:
        pytest.skip("no frame of Python runs apply under this torch")


@pytest.mark.usefixtures("_registry", "_class_by")
def test_a_function_is_exact_until_it_is_registered() -> None:
    name = f"{__name__}.Scaled"
    report, exact = stored(Scaled.apply)
    assert [(t.stored_bytes, t.unknown_reader) for t in report.tensors] == [(WHOLE, name)] * 2
    report, _ = stored(Scaled.apply, unknown="int8")
    assert [(t.stored_bytes, t.kept, t.unknown_reader) for t in report.tensors] == [(CODES, None, None)] * 2
    register_reader(Scaled, {0: "linear", 1: "relative"})
    report, got = stored(Scaled.apply)
    assert [(t.stored_bytes, t.kept, t.unknown_reader) for t in report.tensors] == [
        (CODES, None, None),
        (HALF, None, None),
    ]
    for a, b in zip(got, exact, strict=True):
        assert 0 < float((a - b).norm()) <= GRADIENT_BOUND * float(b.norm())


def twin(module: str) -> Any:
    """Return a class of its own with the name that all twins have."""
    return type(Scaled)("Twin", (Scaled,), {"__module__": module})


@pytest.mark.usefixtures("_registry", "_class_by")
def test_of_classes_with_one_name_the_strictest_reading_serves() -> None:
    """Where the name alone tells the class, a registered function is exact while another class has its name."""
    by_frame = readers._APPLY is not None
    first, other = twin("first"), twin("other")
    register_reader(first, {0: "linear", 1: "linear"})
    report, _ = stored(first.apply)
    assert [t.stored_bytes for t in report.tensors] == [CODES if by_frame else WHOLE] * 2
    # What is registered as exact stays so under options for the unknown.
    register_reader(other, {0: "exact", 1: "linear"})
    report, _ = stored(first.apply, unknown="int8")
    assert [t.stored_bytes for t in report.tensors] == [CODES if by_frame else WHOLE, CODES]


@pytest.mark.usefixtures("_class_by")
def test_what_our_own_functions_save_is_known() -> None:
    def gelu(x: Tensor, y: Tensor) -> Tensor:
        return pyactcomp.functional.gelu(x) + y

    report, _ = stored(gelu, unknown="int8")
    assert [t.unknown_reader for t in report.tensors] == [None] * len(report.tensors)


@pytest.mark.usefixtures("_registry", "_class_by")
def test_a_position_that_is_not_registered_is_exact_and_known() -> None:
    register_reader(Scaled, {1: "linear"})
    report, _ = stored(Scaled.apply)
    assert [(t.stored_bytes, t.unknown_reader) for t in report.tensors] == [(WHOLE, None), (CODES, None)]


@torch.library.custom_op("pyactcomp_tests::scaled", mutates_args=())
def scaled(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad * y, grad * x


scaled.register_autograd(_backward, setup_context=_keep)


@pytest.mark.usefixtures("_registry")
def test_an_operator_of_a_library_is_exact_until_it_is_registered() -> None:
    report, exact = stored(scaled)
    assert [t.stored_bytes for t in report.tensors] == [WHOLE] * 2
    assert all("scaled" in (t.unknown_reader or "") for t in report.tensors)
    register_reader("pyactcomp_tests::scaled", x="linear", y="linear")
    report, got = stored(scaled)
    assert [(t.stored_bytes, t.kept, t.unknown_reader) for t in report.tensors] == [(CODES, None, None)] * 2
    for a, b in zip(got, exact, strict=True):
        assert 0 < float((a - b).norm()) <= GRADIENT_BOUND * float(b.norm())


@pytest.mark.usefixtures("_registry")
def test_what_is_registered_comes_before_the_table_and_after_it_has_been_used() -> None:
    def summed(x: Tensor, y: Tensor) -> Tensor:
        return torch.atan2(x, y)

    report, exact = stored(summed)
    assert [t.stored_bytes for t in report.tensors] == [WHOLE] * 2
    register_reader("aten::atan2", self="relative", other="linear")
    report, got = stored(summed)
    assert sorted(t.stored_bytes for t in report.tensors) == [CODES, HALF]
    assert not any(torch.equal(a, b) for a, b in zip(got, exact, strict=True))


@pytest.mark.usefixtures("_registry")
def test_a_node_that_has_run_is_not_taken_for_one_that_needs_more() -> None:
    def logarithm(x: Tensor, y: Tensor) -> Tensor:
        return torch.log(x.abs() + 1) + y

    assert [t.stored_bytes for t in stored(logarithm)[0].tensors][-1] == WHOLE
    register_reader("aten::log", self="linear")
    assert [t.stored_bytes for t in stored(logarithm)[0].tensors][-1] == CODES
