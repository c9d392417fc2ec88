"""The library packs and restores without Python; stored forms are its objects, which Python can look at."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp
from pyactcomp.engine import saved
from pyactcomp.readers.observer import observer
from pyactcomp.torch_private import saved_form


def calls_of(package: str, work: Callable[[], object], except_in: Collection[int] = ()) -> list[str]:
    """Return the functions of a package that Python calls in ``work``, except in the calls of objects, given by id."""
    seen: list[str] = []
    excepted: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__call__" and id(frame.f_locals.get("self")) in except_in:
            excepted.append(frame)
        elif event == "return" and excepted and frame is excepted[-1]:
            excepted.pop()
        elif event == "call" and not excepted and frame.f_globals.get("__name__", "").startswith(package):
            seen.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


CHAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "codes": lambda x, w: x @ w,
    "a product with a vector": lambda x, w: x * w[0] + 1,
    "16 bits": lambda x, w: x.cos() @ x.sin(),
    "one bit": lambda x, w: F.leaky_relu(x @ w, 0.1),
    "a drawn mask": lambda x, w: torch.native_dropout(x @ w, 0.5, True)[0] + 1,
    "kept": lambda x, w: (x @ w).amax(1, keepdim=True) + x @ w,
    "constants": lambda x, w: (x @ w) * torch.ones(64, 64) + 1,
    "expanded": lambda x, w: (x @ w)[:, :1].expand(64, 64) @ w,
    "parts of one projection": lambda x, w: torch.cat([part @ w[:32] for part in (x @ w).chunk(2, 1)]).view(64, 128)[
        :, 64:
    ],
    "columns with gaps": lambda x, w: (x @ w)[:, 1:33] @ w[:32],
    "dropout on the CPU": lambda x, w: observer().dropout(x @ w, 0.5) + 1,
    "a shape alone": lambda x, w: (x @ w).sum(0, keepdim=True) + x @ w,
}


@pytest.mark.parametrize("name", CHAINS)
def test_in_a_steady_step_no_python_runs_for_a_saved_tensor(name: str) -> None:
    link, w = CHAINS[name], torch.randn(64, 64).mul_(0.1).requires_grad_()
    x = torch.randn(64, 64, requires_grad=True)

    def step(context: pyactcomp.compress, links: int) -> None:
        y = x * 1
        with context:
            for _ in range(links):
                y = link(y, w)
        y.sum().backward()

    context = pyactcomp.compressed(min_bytes=0)
    step(context, 4)  # records for the report
    step(context, 4)  # decides
    few, many = (calls_of("pyactcomp", lambda n=n: step(context, n)) for n in (2, 12))
    assert sorted(many) == sorted(few)


def test_a_fused_dropout_runs_python_to_choose_its_way_alone() -> None:
    """Nothing of the engine but the look-up of a module's mark runs for it, and nothing at all in backward."""
    x = torch.randn(64, 64, requires_grad=True)
    models = [pyactcomp.compress(nn.Sequential(*(nn.Dropout(0.5) for _ in range(n))), min_bytes=0) for n in (2, 12)]
    seen: list[list[str]] = []
    for model in models:
        for _ in range(2):  # the first step records for the report
            model(x).sum().backward()
        seen.append(calls_of("pyactcomp.engine", lambda model=model: model(x)))
        loss = model(x).sum()
        assert calls_of("pyactcomp", loss.backward) == []
    few, many = (sorted(name for name in calls if name != "pyactcomp.engine.marks.get") for calls in seen)
    assert many == few


def test_autocast_copies_of_parameters_are_cast_again_without_python() -> None:
    layers = [nn.Linear(64, 64) for _ in range(8)]
    x = torch.randn(64, 64, requires_grad=True)
    context = pyactcomp.compressed(min_bytes=0)

    def step(links: int) -> None:
        y = x * 1
        with context, torch.autocast("cpu", torch.bfloat16):
            for layer in layers[:links]:
                y = layer(y)
        y.float().sum().backward()

    step(8)
    step(8)
    few, many = (calls_of("pyactcomp", lambda n=n: step(n)) for n in (2, 8))
    assert sorted(many) == sorted(few)


class Blocks(nn.Module):
    """A transformer whose blocks share their weights: the model's size does not depend on the number of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
            attended = F.scaled_dot_product_attention(*heads)
            x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)
            hidden = self.second(x)
            x = x + F.dropout(self.down(F.gelu(self.up(hidden)) * F.silu(self.gate(hidden))), 0.1)
        return x


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_a_steady_step_of_a_transformer_packs_and_recomputes_without_python(mode: Any) -> None:
    torch.manual_seed(0)
    model, x = Blocks(32), torch.randn(2, 16, 32)
    pyactcomp.compress(model, mode=mode, min_bytes=1, fuse=False)
    # A norm offers its output by a hook of its module, before anybody saves the output.
    hooks = {id(hook) for norm in (model.first, model.second) for hook in norm._forward_hooks.values()}

    def step(count: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x * 1, count).float().square().mean()
        loss.backward()

    step(4)
    step(4)
    before = saved.library().counts()[2]
    few, many = (calls_of("pyactcomp", lambda n=n: step(n), hooks) for n in (1, 4))
    assert sorted(many) == sorted(few)
    # At least the casts of both norms' outputs, and the factors of the gated product, in each of five blocks.
    assert saved.library().counts()[2] - before >= 5 * (4 if mode == "int8" else 2)


def test_python_can_look_at_stored_forms() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with pyactcomp.compressed(min_bytes=0):
        hidden = x * 1
        product = hidden @ w
        weights = product.softmax(-1)
    node = product.grad_fn
    assert node is not None
    region, kept = saved_form(node, "self"), saved_form(node, "mat2")
    assert isinstance(region, saved.Region)
    assert isinstance(kept, saved.Kept)
    assert region.form.name == "codes"
    assert (region.layout.shape, region.layout.stride, region.layout.dense) == ((64, 64), (64, 1), True)
    assert region.nbytes < hidden.nbytes / 3
    assert region.dtype is torch.float32
    assert region.unchanged
    assert region.uses == 1
    assert region.is_of(hidden)
    assert kept.tensor is w
    assert kept.is_leaf
    assert kept.has_its_memory
    assert (kept.version, kept.unchanged) == (0, True)
    # Half a step of a group of 64 normal numbers, which spans less than 8; beside it float32's rounding is nothing.
    assert (region.restore() - hidden).abs().max() <= 4 / 255
    assert weakref.ref(region)() is region
    with torch.no_grad():
        hidden.mul_(2)
    assert not region.unchanged
    del weights


@pytest.mark.parametrize("freed", ["backward", "deletion"])
def test_stored_bytes_are_freed_with_the_graph_without_a_collection(freed: str) -> None:
    gc.collect()
    gc.disable()
    try:
        x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), min_bytes=0)
        model(x).sum().backward()
        out = model(x * 1 @ w)
        loss = F.leaky_relu(out, 0.1).sum()
        node = out.grad_fn
        assert node is not None
        forms = [weakref.ref(saved_form(node, name)) for name in ("mat1", "mat2")]
        assert all(form() is not None for form in forms)
        if freed == "backward":
            loss.backward()
        del loss, out, node
        assert all(form() is None for form in forms)
    finally:
        gc.enable()


def test_a_collection_while_a_form_is_freed_does_not_free_it_again() -> None:
    """What is freed may call Python, and another thread may collect meanwhile: here the callback does."""
    gc.collect()
    before = saved.library().counts()[0]
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64)), min_bytes=0)
    loss = model(x * 1 @ w).sum()
    forms: list[weakref.ref[Any]] = []
    node: Any = loss.grad_fn.next_functions[0][0]
    forms.append(weakref.ref(saved_form(node, "mat1"), lambda _: gc.collect()))
    del loss, node
    assert forms[0]() is None
    gc.collect()
    assert saved.library().counts()[0] == before


def test_a_list_of_forms_has_those_alive_alone() -> None:
    """Python's collector does not know them, and one that is being freed has no reference left."""
    before = saved.stored_forms()
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64)), min_bytes=0)
    loss = model(x * 1 @ w).sum()
    node: Any = loss.grad_fn.next_functions[0][0]
    form = saved_form(node, "mat1")
    assert not gc.is_tracked(form)
    assert sum(each is form for each in saved.stored_forms()) == 1
    lists: list[int] = []
    watched = weakref.ref(form, lambda _: lists.append(len(saved.stored_forms())))
    alive = len(saved.stored_forms())
    del form, loss, node
    assert watched() is None
    assert lists
    assert lists[0] < alive
    assert len(saved.stored_forms()) == len(before)


def test_threads_may_restore_one_graph_at_a_time_each() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(4)]

    def gradient(seed: int) -> Tensor:
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with pyactcomp.compressed(min_bytes=0):
            y = x * 1
            loss = sum((y @ w).tanh().sum() for w in weights)
        (found,) = torch.autograd.grad(loss, x)
        return found

    alone = [gradient(seed) for seed in range(4)]
    together: list[list[Tensor]] = [[] for _ in alone]

    def work(seed: int) -> None:
        together[seed] += [gradient(seed) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(alone, together, strict=True):
        assert len(found) == 20
        assert all(torch.equal(each, expected) for each in found)


def test_an_exception_of_pythons_part_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("decided wrongly")

    x = torch.randn(64, 64, requires_grad=True)
    monkeypatch.setattr("pyactcomp.engine.packing.Packing.form_for", fails)
    with pyactcomp.compressed(min_bytes=0), pytest.raises(ZeroDivisionError, match="decided wrongly"):
        x * 1 @ x
    monkeypatch.undo()
    with pyactcomp.compressed(min_bytes=0):
        loss = (x * 1 @ x).sum()
    loss.backward()
    assert x.grad is not None


@pytest.mark.gpu
def test_a_form_restored_on_another_stream_waits_for_the_stream_that_packed() -> None:
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    w = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with pyactcomp.compressed(min_bytes=0):
        product = (x * 1) @ w
    node = product.grad_fn
    form = saved_form(node, "self")
    assert isinstance(form, saved.Region)
    expected = form.restore()
    with torch.cuda.stream(side):
        found = form.restore()
    torch.cuda.synchronize()
    assert form.stream != side.cuda_stream
    assert torch.equal(found, expected)
