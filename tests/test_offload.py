"""Stored bytes leave the device and come back: every gradient is bitwise the one without offload."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from offload_programs import (
    DATA,
    KIB,
    RUNS,
    Delayed,
    Model,
    Run,
    assert_equal,
    check_clean,
    checkpointed,
    compressed,
    delayed_fixture,
    gradients,
    one,
    only,
    play_many,
    wanted,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import config
from pyactcomp.checkpoint import checkpoint_blocks
from pyactcomp.engine import offloading

__all__ = ["delayed_fixture"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_gradients_are_bitwise_those_without_offload(delayed: Delayed, mode: str, run: Run) -> None:
    cases = [("late", 1, 1.0), ("random", 64 * KIB, 1.0), ("random", 16 * KIB, 0.5)]
    if mode == "int8":  # the order of copies knows no form of what is copied
        cases += [("early", 64 * KIB, 1.0), ("late", 1 << 40, 1.0)]
    for when, window, share in cases:
        link = delayed.use(when, window=window)
        model = compressed(Model(), mode=mode, offload=share)
        for _ in range(2):
            assert_equal(gradients(model, run), list(wanted(mode, run)), (when, window, share))
        found = check_clean()
        assert found["left"] > 0 or window > 64 * KIB or (window > 1 and run is checkpointed), found
        assert found["sent"] == 0 or window < 1 << 40, found
        del model
        gc.collect()
        assert link.pinned == 0
        assert link.live_events == 0


def test_random_programs(delayed: Delayed) -> None:
    """Each on a link of its own; `python tests/offload_programs.py 10000` plays more."""
    left = brought = 0.0
    for start in (0, 150):
        gone, back = play_many(delayed, start, 150)
        left, brought = left + gone, brought + back
    assert left > 1000
    assert brought > 1000


class Keep(torch.autograd.Function):
    """Save a table, and memory of so many bytes, which nobody fills."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nbytes: int, table: Tensor | None) -> Tensor:
        ctx.save_for_backward(torch.empty(nbytes, dtype=torch.uint8), table)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        kept, _ = ctx.saved_tensors
        return gradient + 0 * kept[0], None, None


class Keeps(nn.Module):
    def __init__(self, sizes: list[int], table: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.sizes, self.table = sizes, table

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        table = torch.empty(self.table, dtype=torch.uint8) if self.table else None
        for each in self.sizes:
            x = Keep.apply(x, each, table)
        return x


KEYS, NORM, STATISTICS, RESIDUAL, GATED = (each * KIB for each in (4096, 8704, 256, 16384, 31232))
LAYER = [KEYS, RESIDUAL, NORM // 4, STATISTICS, NORM, RESIDUAL, STATISTICS, GATED, NORM]


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        # A decoder's, between the tables of positions and a head: the first nine sizes lack the largest one.
        pytest.param([512 * KIB] * 3 + LAYER * 8 + [NORM, 8 * KIB], sum(LAYER), id="decoder"),
        # Nothing repeats: room for the two largest, so that one comes while the other is read.
        pytest.param(
            [(3 + i * i % 89) * KIB for i in range(80)] + [48 * 1024 * KIB, 40 * 1024 * KIB],
            88 * 1024 * KIB,
            id="irregular",
        ),
        # Each layer packs one: room for two, so that one comes while the other is read.
        pytest.param([33 * 1024 * KIB] * 12, 66 * 1024 * KIB, id="checkpointed"),
    ],
)
def test_the_window_holds_a_layer_and_hardly_anything_comes_late(
    delayed: Delayed, sizes: list[int], window: int
) -> None:
    delayed.use("late", window=0)
    model = compressed(Keeps(sizes), offload=1.0)
    late = []
    for _ in range(3):
        model(torch.ones(1)).sum().backward()
        late.append(check_clean()["late"])
    assert only()["window_bytes"] == window
    assert only()["brought"] > 0
    # With a window of a layer nothing that left is asked for before it was sent for.
    assert late[2] == late[1]


def test_a_table_that_each_layer_reads_stays_once_it_came_late(delayed: Delayed) -> None:
    """It was packed first, so it would be fetched last, and wait for the copies of a whole window."""
    delayed.use("late", window=sum(LAYER))
    model = compressed(Keeps(LAYER * 8, table=4 * 1024 * KIB), offload=1.0)
    late, stayed = [], []
    for _ in range(4):
        model(torch.ones(1)).sum().backward()
        found = check_clean()
        late.append(found["late"])
        stayed.append(found["stayed_bytes"])
    assert late[0] > 0
    assert late[1:] == [late[0]] * 3
    assert stayed == [step * 4 * 1024 * KIB for step in range(4)]
    model.sizes = model.sizes[1:]
    model.table *= 2  # another shape may be read in another order
    model(torch.ones(1)).sum().backward()
    assert check_clean()["stayed_bytes"] == stayed[-1]


@pytest.mark.parametrize("first", [0, 1])
def test_the_window_follows_whichever_graph_is_read(delayed: Delayed, first: int) -> None:
    """Two graphs are alive, as in a pipeline, and backward runs through the older or the newer one first."""
    delayed.use("late", window=sum(LAYER))
    model = compressed(Keeps(LAYER * 8), offload=1.0)
    for _ in range(3):
        losses = [model(torch.ones(1)).sum() for _ in range(2)]
        before = only()["late"]
        losses[first].backward()
        losses[1 - first].backward()
        found = check_clean()
    # The window is left where it was for nine tensors, until it follows the other graph.
    assert found["late"] - before <= 10
    assert found["brought"] / 3 >= 100


def test_later_steps_pin_nothing_and_hold_the_same(delayed: Delayed) -> None:
    link = delayed.use("late", window=32 * KIB)
    model = compressed(Model(), offload=1.0)
    after_forward, pins = [], []
    for _ in range(6):
        loss = model(DATA).square().mean()
        found = only()
        after_forward.append((found["device_bytes"], found["host_bytes"]))
        loss.backward()
        pins.append(link.pins)
    assert pins == [pins[0]] * 6
    assert len(set(after_forward[1:])) == 1
    # Past the window lies at most what is being packed: the last tensor, and those whose copies go in one batch.
    assert after_forward[-1][0] <= 32 * KIB + 2 * 48 * 128 * 4
    assert after_forward[-1][1] > after_forward[-1][0]


def test_the_last_window_is_not_sent(delayed: Delayed) -> None:
    """Backward begins with it, so it needs no room on the host. In a pipeline the next forward sends it."""
    sizes = [40 * KIB] * 12
    delayed.use("late", window=100 * KIB)
    model = compressed(Keeps(sizes), offload=1.0)
    sent = []
    for _ in range(3):
        loss = model(torch.ones(1)).sum()
        sent.append(only()["sent"])
        loss.backward()
    assert [sent[1] - sent[0], sent[2] - sent[1]] == [10, 10]
    losses = [model(torch.ones(1)).sum() for _ in range(2)]
    assert only()["sent"] - sent[-1] == 24
    sum(losses).backward()
    check_clean()


class Holds(torch.autograd.Function):
    """Save bytes drawn from a seed, and check them in backward."""

    @staticmethod
    def drawn(nbytes: int) -> Tensor:
        return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))

    @staticmethod
    def forward(ctx: Any, x: Tensor, nbytes: int) -> Tensor:
        ctx.nbytes = nbytes
        ctx.save_for_backward(Holds.drawn(nbytes))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        assert torch.equal(kept, Holds.drawn(ctx.nbytes))
        return gradient + 1, None


class HoldsAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for each in self.sizes:
            x = Holds.apply(x, each)
        return x


@pytest.mark.parametrize("when", ["late", "random"])
def test_host_memory_is_what_is_taken_and_a_slab(delayed: Delayed, when: str) -> None:
    """Slabs are of 32 MiB: nothing is pinned for what free ranges have room for together, however long the tensors."""
    link = delayed.use(when, window=1)
    model = compressed(HoldsAll(), mode="lossless", offload=1.0)
    for sizes in ([20] * 5, [20] * 5, [23, 1, 23, 1, 23], [45, 45], [9] * 11):
        model.sizes = [each * 1024 * KIB - 77 for each in sizes]
        model(torch.ones(1)).sum().backward()
        found = check_clean()
        assert link.pinned == found["pinned_bytes"] <= found["host_peak_bytes"] + 34 * 1024 * KIB, sizes
    assert found["pins"] <= 5
    assert pyactcomp.offload.pinned_bytes() == link.pinned


def test_gradients_of_the_head_stay(delayed: Delayed) -> None:
    """Backward begins with them, and that of the weight is larger than a layer's bytes."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=2, **shape)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(4096, (1, 256))
    delayed.use("late", window=1)
    checkpoint_blocks(model.model.layers)
    compressed(model, fuse_head=True, min_bytes=KIB, offload=1.0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    codes = 256 * 64 * 17 // 16
    # Both blocks' inputs, the last norm's, and statistics; a gradient of the head has 64 KiB or 1 MiB.
    assert 3 * codes <= check_clean()["packed_bytes"] <= 3 * codes + 16 * KIB


def test_most_is_sent_for_before_backward_asks(delayed: Delayed) -> None:
    delayed.use("late", window=128 * KIB)
    model = compressed(Model(layers=8), offload=1.0)
    one(model)
    found = check_clean()
    assert found["brought"] == found["left"] > 0
    assert found["prefetched"] >= 0.9 * found["brought"]


def test_a_tensor_that_the_user_holds_stays(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    model = compressed(nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]), mode="lossless")
    held: list[Tensor] = []
    for block in model:
        block[1].register_forward_hook(lambda module, args, out: held.append(out))
    expected = gradients(model, lambda m: m(DATA[0]).sum().backward())
    pyactcomp.decompress(model)
    held.clear()
    compressed(model, mode="lossless", offload=1.0)
    found = gradients(model, lambda m: m(DATA[0]).sum().backward())
    assert_equal(found, expected)
    assert only()["held"] >= 5
    assert only()["left"] == 0


def test_a_write_to_a_tensor_that_left_raises_autograds_error(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    for mode in ("int8", "lossless"):
        weight = torch.randn(64, 64, requires_grad=True)
        with pyactcomp.compressed(mode=mode, min_bytes=2 * KIB, offload=1.0) as context:
            x = DATA[0] @ weight
            loss = sum((x @ weight.detach()).tanh().sum() for _ in range(3)) + (x @ weight).sum()
        x.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, x
        torch.ones(1, requires_grad=True).sum().backward()  # torch holds a failed backward's nodes until the next
        check_clean()
        del context


@pytest.mark.parametrize("memory", ["limit", "host"])
def test_what_finds_no_room_on_the_host_stays(delayed: Delayed, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = 256 * KIB
    options: dict[str, Any] = {"host_memory": short * 10 // 6 + KIB} if memory == "host" else {}
    monkeypatch.setattr(config, "SMALLEST_HOST", KIB)
    link = delayed.use("random", window=32 * KIB, **options)
    room = offloading.room_on_host(torch.device("cpu"))
    model = compressed(Model(), offload=1.0 if memory == "host" else "256KiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_equal(gradients(model, one), list(wanted("int8", one)))
    texts = [str(each.message) for each in caught if "pinned host memory" in str(each.message)]
    assert len(texts) == (1 if memory == "host" else 0)
    found = check_clean()
    assert found["stayed"] > 0
    assert found["left"] > 0
    assert link.pinned <= short
    assert (short <= room < short + 2 * KIB) == (memory == "host")
    assert link.pinned <= room


def test_threads_share_one_tape(delayed: Delayed) -> None:
    delayed.use("random", window=16 * KIB)
    model = compressed(Model(dropout=0.0), offload=1.0)
    one(model)
    expected = gradients(model, one)
    losses: list[Tensor] = []

    def work() -> None:
        for _ in range(4):
            found = torch.autograd.grad(model(DATA).square().mean(), list(model.parameters()))
            losses.append(torch.tensor([torch.equal(a, b) for a, b in zip(found, expected, strict=True)]).all())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 12
    assert all(losses)
    check_clean()


def test_trim_gives_the_host_memory_back(delayed: Delayed) -> None:
    link = delayed.use("late", window=1)
    model = compressed(Model(), offload=1.0)
    loss = model(DATA).square().mean()
    assert link.pinned > 0
    assert pyactcomp.offload.trim() == 0  # in use
    loss.backward()
    del loss
    assert pyactcomp.offload.trim() > 0
    assert link.pinned == 0
    assert_equal(gradients(model, one), list(wanted("int8", one)))


def test_a_capture_is_refused_with_the_reason(delayed: Delayed) -> None:
    link = delayed.use("late", window=1)
    model = compressed(Model(), offload=1.0)
    one(model)
    link.capturing = True
    with pytest.raises(pyactcomp.PyactcompError, match="CUDA graph is being captured"):
        model(DATA)
    link.capturing = False
    assert_equal(gradients(model, one), list(wanted("int8", one)))
    check_clean()


def test_eval_and_no_grad_move_nothing(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    model = compressed(Model(), offload=1.0)
    with torch.no_grad():
        model(DATA)
    assert pyactcomp.offload.statistics() == {}
    model.eval()(DATA)
    assert pyactcomp.offload.statistics() == {}


def test_a_copy_of_a_model_has_a_tape_of_its_own(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    model = compressed(Model(), offload=1.0)
    twin = copy.deepcopy(model)
    loss = model(DATA).square().mean()
    assert_equal(gradients(twin, one), list(wanted("int8", one)))
    del twin
    loss.backward()
    check_clean()


def test_other_hooks_are_named(delayed: Delayed) -> None:
    delayed.use()
    model = compressed(Model(), offload=1.0)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(pyactcomp.HookConflictError, match="save_on_cpu"):
        model(DATA)


def test_pinning_that_fails_leaves_everything_on_the_device(delayed: Delayed) -> None:
    link = delayed.use("late", window=1, host_memory=0)
    model = compressed(Model(), offload=1.0)
    with pytest.warns(UserWarning, match="no more pinned host memory: 0.0 GiB are pinned, 0.0 GiB of the host"):
        one(model)
    assert_equal(gradients(model, one), list(wanted("int8", one)))
    found = check_clean()
    assert (found["left"], found["stayed"], link.pins) == (0, found["packed"], 0)


def test_what_was_held_for_a_while_leaves_once_it_is_free(delayed: Delayed) -> None:
    """As the skip connections of a U-Net, which the forward holds until the decoder."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.down, self.up = (nn.ModuleList(nn.Linear(64, 64) for _ in range(6)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            held = []
            for layer in self.down:
                x = layer(x).tanh()
                held.append(x)
            for layer in self.up:
                x = layer(x * held.pop()).tanh()
            for _ in range(8):
                x = x.tanh()
            return x

    expected = gradients(compressed(Skips(), mode="lossless"), lambda m: m(DATA[0]).sum().backward())
    delayed.use("late", window=1)
    model = compressed(Skips(), mode="lossless", offload=1.0)
    assert_equal(gradients(model, lambda m: m(DATA[0]).sum().backward()), expected)
    found = check_clean()
    assert found["held"] >= 5
    assert found["left"] >= found["sent"] - 3  # the data, and the last results: nothing is stored after them


def test_parts_of_one_memory_with_counters_of_their_own(delayed: Delayed) -> None:
    """A later part is written to after the memory was copied, which the counter of the first part does not tell."""

    def run(weight: Tensor, **options: Any) -> Tensor:
        with pyactcomp.compressed(mode="lossless", min_bytes=KIB, **options):
            first, second = torch.unsafe_split(DATA[0] @ weight, 24)
            out = first.tanh().sum() + (first * first).sum()
            for _ in range(3):
                out = out + (DATA[1] @ weight).tanh().sum()
            second.mul_(3)
            out = out + (second * second).sum()
        [found] = torch.autograd.grad(out, weight)
        return found

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    expected = run(weight)
    delayed.use("early", window=1)
    assert torch.equal(run(weight, offload=1.0), expected)


@pytest.mark.parametrize("when", ["late", "random"])
def test_gradients_of_gradients(delayed: Delayed, when: str) -> None:
    def run(model: nn.Module) -> None:
        x = DATA.clone().requires_grad_()
        loss = model(x).square().mean()
        [slope] = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    def make(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
        return compressed(nn.Sequential(*layers), mode="lossless", **options)

    expected = gradients(make(), run)
    delayed.use(when, window=1)
    model = make(offload=1.0)
    for _ in range(2):
        assert_equal(gradients(model, run), expected)
    assert check_clean()["left"] > 0


def test_two_models_in_turn(delayed: Delayed) -> None:
    link = delayed.use("random", window=8 * KIB)
    first, second = compressed(Model(), offload=1.0), compressed(Model(), offload=0.5)
    for _ in range(2):
        torch.manual_seed(1)
        a = first(DATA).square().mean()
        torch.manual_seed(1)
        b = second(DATA).square().mean()
        a.backward()
        b.backward()
    del a, b
    for model in (first, second):
        assert_equal([2 * each for each in wanted("int8", one)], [p.grad for p in model.parameters()])
    assert pyactcomp.offload.statistics()["cpu"]["alive"] == 0
    del first, second, model
    gc.collect()
    assert (link.pinned, link.live_events) == (0, 0)


def test_nested_checkpoints(delayed: Delayed) -> None:
    class Nested(Model):
        def forward(self, x: Tensor) -> Tensor:
            def pair(y: Tensor) -> Tensor:
                return checkpoint(
                    self.blocks[1], checkpoint(self.blocks[0], y, use_reentrant=False), use_reentrant=False
                )

            x = self.blocks[2](x)
            return self.blocks[3](checkpoint(pair, x, use_reentrant=False))

    expected = gradients(compressed(Nested()), one)
    delayed.use("late", window=1)
    model = compressed(Nested(), offload=1.0)
    for _ in range(2):
        assert_equal(gradients(model, one), expected)
    check_clean()


def test_an_interrupted_forward_and_a_backward_that_stops_half_way(delayed: Delayed) -> None:
    delayed.use("random", window=8 * KIB)
    model = compressed(Model(), offload=1.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(DATA)
    handle.remove()
    handle = model.blocks[1].register_full_backward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        one(model)
    handle.remove()
    assert_equal(gradients(model, one), list(wanted("int8", one)))
    check_clean()


def test_a_generator_that_is_closed_between_two_steps(delayed: Delayed) -> None:
    delayed.use("late", window=8 * KIB)
    model = compressed(Model(), offload=1.0)

    def losses() -> Any:
        while True:
            torch.manual_seed(1)
            loss = model(DATA).square().mean()
            yield loss

    steps = losses()
    next(steps)
    next(steps).backward()
    steps.close()
    del steps
    assert_equal(gradients(model, one), list(wanted("int8", one)))
    check_clean()


def test_torchs_generators_are_left_alone(delayed: Delayed) -> None:
    delayed.use("random", window=1)
    states = []
    for offload in (0.0, 1.0):
        torch.manual_seed(7)
        one(compressed(Model(), offload=offload))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
