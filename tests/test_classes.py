"""Models whose classes refuse to be derived from, copy themselves or rewrite themselves: compressed as any other.

Longer than 400 lines: a class of models for each way to do so.
"""

from __future__ import annotations

import abc
import copy
import io
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import as_inductor
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from works_with import GRADIENT_BOUND, gradients, relative_error

import pyactcomp
from pyactcomp.compiled import marks
from pyactcomp.engine.classes import own_class
from pyactcomp.engine.marks import FUSING
from pyactcomp.engine.session import Session

WIDTH = 64
# How far decomposed operators, which sum in another order, move gradients: a few ulp through each of some 10 operators.
REORDERED = 16 * torch.finfo(torch.float32).eps


class Plain(nn.Module):
    """What all models below compute, in two blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(2)))

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


T = typing.TypeVar("T")


class Encoder(abc.ABC):
    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Abstract(Encoder, Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super(Encoder, self).forward(x)


class Generic(typing.Generic[T], Plain):
    pass


@typing.runtime_checkable
class Named(typing.Protocol):
    def name(self) -> str: ...


class Structural(Named, Plain):
    def name(self) -> str:
        return "structural"


class Mixin:
    """As transformers' classifiers: the first base is no Module."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)  # type: ignore[misc, no-any-return]


class Mixed(Mixin, Plain):
    pass


class Final(type):
    """Lets no class derive from its own."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
        if any(isinstance(base, cls) for base in bases):
            raise TypeError(f"{bases[0].__name__} is final")
        return super().__new__(cls, name, bases, body)


class Sealed(Plain, metaclass=Final):
    pass


class Slotted(Plain):
    __slots__ = ("extra",)


class Posing(Plain):
    """Says that it is of another class, as proxies do."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return Plain


class Forwarding(Plain):
    """Looks attributes up elsewhere, and has a super() without arguments."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("blocks"), name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Keyword(Plain):
    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class Tagged(Keyword, tag="tagged"):
    pass


class Reduced(Plain):
    """Pickles itself, by the class that it has."""

    def __reduce__(self) -> Any:
        return type(self), (), self.__getstate__()


class Rebuilt(Plain):
    """Pickles itself by a function, and nothing but its parameters."""

    def __reduce__(self) -> Any:
        return rebuilt, (type(self), dict(self.state_dict()))


class Named(Plain):
    """Pickles itself by the name that it has in this file."""

    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()


def rebuilt(cls: type[nn.Module], state: dict[str, Tensor]) -> nn.Module:
    model = cls()
    model.load_state_dict(state)
    return model


class Copied(Plain):
    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class Lazy(Plain):
    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Normed(Plain):
    """Has a weight of its own, for a parametrization of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.weight))


KINDS: list[type[nn.Module]] = [
    *(
        Abstract,
        Generic,
        Structural,
        Mixed,
        Sealed,
        Slotted,
        Posing,
        Forwarding,
        Tagged,
        Reduced,
        Rebuilt,
        Copied,
        Lazy,
    ),
]


def traced() -> nn.Module:
    # Torch pickles no annotation that is a string.
    return torch.fx.symbolic_trace(nn.Sequential(Plain().blocks))


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(Normed())


BUILDS: list[Callable[[], nn.Module]] = [*KINDS, traced, parametrized]


def inputs() -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    model(inputs())  # a lazy module gets its class
    return model


def step(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(inputs()).square().mean().backward()
    return gradients(model)


def compress(model: nn.Module, **options: Any) -> nn.Module:
    return pyactcomp.compress(model, min_bytes=256, **options)


def assert_compressed(model: nn.Module, exact: dict[str, Tensor]) -> None:
    assert 0.0 < relative_error(step(model), exact) <= GRADIENT_BOUND
    report = pyactcomp.report(model)
    assert 0 < report.stored_bytes < report.unique_bytes / 2


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("options", [{}, {"fuse": False}], ids=str)
def test_a_model_of_any_class_goes_back_and_forth(build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    model = built(build)
    own, exact = [type(module) for module in model.modules()], step(model)
    for _ in range(2):
        assert_compressed(compress(model, **options), exact)
        assert isinstance(model, own[0])
        assert type(model).__name__ == own[0].__name__
        pyactcomp.decompress(model)
        assert [type(module) for module in model.modules()] == own
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert relative_error(step(model), exact) == 0.0


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__)
def test_copies_of_a_model_of_any_class_train(build: type[nn.Module], how: str) -> None:
    model = built(build)
    exact = step(model)
    twin = COPIES[how](compress(model))
    if build is Rebuilt:
        # Built anew, without the hooks of the model.
        assert type(twin) is build
        assert relative_error(step(twin), exact) == 0.0
        compress(twin)
    assert_compressed(twin, exact)
    assert type(pyactcomp.decompress(twin)) is build
    assert relative_error(step(twin), exact) == 0.0


def test_a_module_that_pickles_its_name_stays_itself() -> None:
    assert own_class(type(compress(NAMED))) is Named is not type(NAMED)
    assert copy.deepcopy(NAMED) is NAMED
    assert pickle.loads(pickle.dumps(NAMED)) is NAMED
    pyactcomp.decompress(NAMED)


@pytest.mark.parametrize("kind", [Abstract, Sealed, Slotted, Posing, Forwarding], ids=lambda kind: kind.__name__)
def test_graphs_of_a_model_of_any_class_are_told_apart(kind: type[nn.Module]) -> None:
    torch.compiler.reset()
    model = built(kind)
    call, exact = torch.compile(model, backend=as_inductor), step(model)
    for compressed in (False, True, False):
        if compressed:
            compress(model)
        model.zero_grad()
        call(inputs()).square().mean().backward()
        error = relative_error(gradients(model), exact)
        assert (REORDERED < error <= GRADIENT_BOUND) if compressed else error <= REORDERED
        if compressed:
            (graph,) = pyactcomp.report(model).graphs
            assert graph.after < graph.before / 2
            pyactcomp.decompress(model)
    torch.compiler.reset()


def test_a_saved_model_is_loaded_by_another_process(tmp_path: Path) -> None:
    model = compress(Plain.block())
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        f"model(torch.randn(256, {WIDTH})).sum().backward()\n"
        "import pyactcomp; r = pyactcomp.report(model); print(r.stored_bytes < r.unique_bytes / 2)\n"
        "print(*(type(module).__name__ for module in pyactcomp.decompress(model).modules()))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True", "Sequential LayerNorm Linear GELU Linear"], done.stderr[-2000:]


# What torchvision's feature extractor does in train() and eval(), and quantization-aware training.
def rewritten(model: torch.fx.GraphModule) -> nn.Module:
    training, evaluating = model.graph, copy.deepcopy(model.graph)
    for graph in (evaluating, training):
        model.graph = graph  # recompiles
    return model


CHANGES: dict[str, Callable[[Any], nn.Module]] = {
    **{how: copied for how, copied in COPIES.items() if how != "copy"},  # shares the children
    "rewrite": rewritten,
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_module_of_fx_is_copied_and_rewritten(how: str, fuse: bool) -> None:
    model = built(traced)
    exact = step(model)
    compress(model, fuse=fuse)
    for _ in range(2):
        assert_compressed(model, exact)
        model.eval()
        twin = CHANGES[how](model.train())
        # torch.fx copies no hooks, whoever registered them.
        assert_compressed(twin if how == "rewrite" else compress(twin, fuse=fuse), exact)
    pyactcomp.decompress(model)
    assert relative_error(step(CHANGES[how](model)), exact) == 0.0


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first * self.second


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("first", ["before", "after"])
def test_parametrizations_come_and_go_while_compressed(first: str) -> None:
    """Torch sets properties on the class that the module has, and takes them from there."""
    model, x = Both(), torch.ones(WIDTH)
    if first == "after":
        compress(model)
    parametrize.register_parametrization(model, "first", Double())
    if first == "before":
        own = type(model)
        compress(model)
    parametrize.register_parametrization(model, "second", Double())
    assert torch.equal(model(x), 4 * x)
    if first == "before":
        assert type(pyactcomp.decompress(model)) is own
        assert torch.equal(model(x), 4 * x)
        compress(model)
    for name in ("first", "second"):
        parametrize.remove_parametrizations(model, name, leave_parametrized=False)
    assert torch.equal(model(x), x)
    assert type(pyactcomp.decompress(model)) is Both
    assert torch.equal(model(x), x)


def test_a_parametrization_taken_off_after_decompress_leaves_the_module_to_the_next_compress() -> None:
    model = built(Plain)
    norm, exact = model.blocks[0][0], step(model)
    assert_compressed(compress(model), exact)
    fused = pyactcomp.report(model).fused
    parametrize.register_parametrization(norm, "bias", Double())
    pyactcomp.decompress(model)
    parametrize.remove_parametrizations(norm, "bias", leave_parametrized=False)
    assert relative_error(step(model), exact) == 0.0
    assert_compressed(compress(model), exact)
    assert pyactcomp.report(model).fused == fused
    assert type(pyactcomp.decompress(model).blocks[0][0]) is nn.LayerNorm


def three(self: nn.Module, x: object = None) -> int:
    return 3


@pytest.mark.parametrize("name", ["forward", "block", "added"])
def test_a_method_is_replaced_for_a_while(name: str) -> None:
    """As tests do: afterwards the class of the user has what it had."""
    model, x = built(Plain), inputs()
    before = dict(vars(Plain))
    compress(model)
    expected = model(x)
    with mock.patch.object(type(model), name, three, create=True):
        assert getattr(model, name)() == 3
        assert (model(x) == 3) if name == "forward" else torch.equal(model(x), expected)
    assert dict(vars(Plain)) == before
    assert torch.equal(model(x), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), name, three, raising=False)
        assert getattr(model, name)() == 3
    assert dict(vars(Plain)) == before
    assert torch.equal(model(x), expected)


Step = tuple[Any, str]
STEPS: list[Step] = [
    (pyactcomp.compress.__globals__["fusions"], "fuse"),
    (FUSING, "set"),
    (Session, "__init__"),
    (nn.Module, "register_forward_pre_hook"),
    (nn.Module, "register_forward_hook"),
    (pyactcomp.compress.__globals__["marks"], "mark"),
    (marks, "_class_of"),
]


@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_compress_that_fails_changes_nothing(
    step: Step, call: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(Plain)
    before = [(type(module), set(module.__dict__)) for module in model.modules()]
    owner, name = step
    real, left = getattr(owner, name), [call]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise kind("a test")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        try:
            compress(model, skip=["blocks.0.0"], compile_blocks=True)
        except kind:
            assert [(type(module), set(module.__dict__)) for module in model.modules()] == before
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            with pytest.raises(pyactcomp.PyactcompError):
                pyactcomp.decompress(model)
        else:
            assert left[0] >= 0
            pyactcomp.decompress(model)
    compress(model)  # not "compressed already"
