"""Training that compresses nothing is told once, with the reason; the report says the same."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compiled_backend import as_inductor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp.engine.packing import Packing
from pyactcomp.errors import ImplementationUnavailableError

ROWS = 256


class Net(nn.Module):
    """A perceptron with a method for training beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8))

    def evaluate(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(x)


class Offloaded(Net):
    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.evaluate(x)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return out


def step(call: Callable[[Tensor], Tensor], rows: int = ROWS) -> None:
    call(torch.randn(rows, 64)).square().sum().backward()


@contextmanager
def told(*words: str) -> Iterator[None]:
    """Expect one warning, with all the words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (message,) = (str(warning.message) for warning in caught)
    for word in words:
        assert word in message


@contextmanager
def untold() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (Offloaded, {}, ["opened inside the model", "save_on_cpu", "use one of the two"]),
        (Checkpointed, {}, ["1 of 1 tensors", "does not require grad"]),
        (Net, {"min_bytes": 2**30}, ["smaller than min_bytes", "pass a smaller min_bytes"]),
        (lambda: nn.Linear(64, 8), {}, ["1 of 1 tensors", "does not require grad"]),
        (Net, {"skip": ["net"]}, ["inside a skipped module", "see the option skip"]),
    ],
)
def test_a_first_step_that_packs_nothing_is_told_once(
    build: Callable[[], nn.Module], options: dict[str, Any], words: list[str]
) -> None:
    model = pyactcomp.compress(build(), **{"min_bytes": 1024, **options})
    with told("nothing was compressed", *words):
        step(model)
    with untold():
        step(model)
    note = pyactcomp.report(model).note
    assert all(word in note for word in words)
    assert str(pyactcomp.report(model)).startswith(note)


def test_a_device_that_is_not_served_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unserved(*_: object) -> None:
        raise ImplementationUnavailableError("not here")

    model = pyactcomp.compress(Net(), min_bytes=1024, fuse=False)
    monkeypatch.setattr(Packing, "_new_kernel", unserved)
    with told("nothing was compressed", "does not serve it"):
        step(model)


def test_steps_that_compress_and_steps_without_gradients_are_not_told() -> None:
    with untold():
        model = pyactcomp.compress(Net(), min_bytes=1024)
        with torch.no_grad():
            model(torch.randn(ROWS, 64))
        assert "gradients were disabled" in pyactcomp.report(model).note
        step(model)
        assert pyactcomp.report(model).note == ""
        frozen = pyactcomp.compress(Net().requires_grad_(False), min_bytes=1024)
        frozen(torch.randn(ROWS, 64))
        assert "saved no tensor" in pyactcomp.report(frozen).note
        lossless = pyactcomp.compress(nn.Linear(64, 8), mode="lossless")
        step(lossless)
        evaluated = pyactcomp.compress(Net().eval(), min_bytes=1024)
        step(evaluated)
        assert "evaluation mode" in pyactcomp.report(evaluated).note


def test_everything_off_is_named_in_the_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    model = pyactcomp.compress(Net(), min_bytes=1024)
    with untold():
        step(model)
        step(model.evaluate)
    assert "PYACTCOMP_DISABLE=1" in pyactcomp.report(model).note


def test_hooks_around_the_forward_are_named_in_the_report() -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024, on_conflict="skip")
    with untold(), save_on_cpu():
        step(model)
    assert "save_on_cpu" in pyactcomp.report(model).note


def hooked(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # type: ignore[attr-defined]


def test_training_through_another_method_is_told_once_and_leaves_no_hook() -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024)
    with torch.no_grad():
        model(torch.randn(ROWS, 64))  # as a rollout
    with told("a gradient has reached a parameter of this Net", "pyactcomp.compressed(model)"):
        step(model.evaluate)
    assert hooked(model) == 0
    assert "pyactcomp.compressed(model)" in pyactcomp.report(model).note
    with untold():
        step(model.evaluate)
        with pyactcomp.compressed(model, min_bytes=1024) as c:
            loss = model.evaluate(torch.randn(ROWS, 64)).square().sum()
        loss.backward()
    report = pyactcomp.report(c)
    assert report.stored_bytes < report.unique_bytes / 2
    with untold():
        step(model)
    assert pyactcomp.report(model).note == ""


def test_training_through_submodules_is_told_at_the_first_backward_alone() -> None:
    pair = pyactcomp.compress(nn.ModuleDict({"generator": Net(), "discriminator": Net()}), min_bytes=1024)
    with untold():
        out = pair["generator"](torch.randn(ROWS, 64))
    with told("ModuleDict"):
        out.sum().backward()


@pytest.mark.parametrize("around", [False, True])
def test_a_block_around_the_step_needs_no_warning(around: bool) -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024)
    with untold():
        with pyactcomp.compressed(*([model] if around else []), min_bytes=1024):
            loss = model.evaluate(torch.randn(ROWS, 64)).square().sum()
        loss.backward()
    assert hooked(model) == 0


def test_hooks_of_the_watch_end_with_the_first_forward_and_with_decompress() -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024)
    assert hooked(model) == len(list(model.parameters()))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [hooked(each) for each in copies] == [0, 0]
    model(torch.randn(ROWS, 64))
    assert hooked(model) == 0
    assert hooked(pyactcomp.decompress(pyactcomp.compress(Net()))) == 0


def test_a_model_compiled_whole_is_no_model_without_forward() -> None:
    torch.compiler.reset()
    model = pyactcomp.compress(Net(), min_bytes=1024)
    compiled = torch.compile(model, backend=as_inductor)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nothing was compressed")
        step(compiled)
    report = pyactcomp.report(model)
    (graph,) = report.graphs
    assert (report.unique_bytes, report.stored_bytes) == (graph.before, graph.after)
    # GELU's operand; the input is held anyway, and the derivative of tanh needs its result exact.
    (packed,) = [saved for saved in graph.saved if saved.form == "codes"]
    assert packed.before == ROWS * 256 * 4
    assert graph.before - graph.after == packed.before - packed.after
    torch.compiler.reset()


# torch's own, of a conversion to a fake tensor.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["mode", "tensors alone", "meta"])
def test_a_dry_run_is_not_the_recorded_step(kind: str) -> None:
    model, x = pyactcomp.compress(Net(), min_bytes=1024), torch.randn(ROWS, 64)
    other = pyactcomp.compress(Net(), min_bytes=1024)
    if kind == "mode":
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.randn(ROWS, 64)).square().sum().backward()
    elif kind == "tensors alone":
        # Parameters are converted at each call.
        model(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)).square().sum().backward()
    else:
        model.to_empty(device="meta")
        model(x.to("meta")).square().sum().backward()
        model.to_empty(device="cpu")
        model.load_state_dict(other.state_dict())
    model.zero_grad()
    assert not pyactcomp.report(model).tensors
    model(x).square().sum().backward()
    other(x).square().sum().backward()
    report, expected = pyactcomp.report(model), pyactcomp.report(other)
    assert (report.stored_bytes, report.unique_bytes) == (expected.stored_bytes, expected.unique_bytes)
    assert 0 < report.stored_bytes < report.unique_bytes / 2


def test_the_report_is_found_through_wrappers(tmp_path: Any) -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replicated = DistributedDataParallel(model)
        step(replicated)
        assert pyactcomp.report(replicated) == pyactcomp.report(model)
    finally:
        torch.distributed.destroy_process_group()
    assert pyactcomp.report(model).fused


def test_the_module_inside_a_compiled_wrapper_has_its_report() -> None:
    model = Net()
    wrapper = pyactcomp.compress(torch.compile(model, backend=as_inductor), min_bytes=1024)
    assert pyactcomp.report(model) == pyactcomp.report(wrapper)
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(model.net[0])


def test_fused_modules_are_listed_before_the_forward_has_run() -> None:
    model = pyactcomp.compress(Net(), min_bytes=1024)
    assert pyactcomp.report(model).fused
