"""The engine on a GPU: streams, no synchronisation, the memory that is really freed, ReLU's signs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp import codec
from pyactcomp.codec import format as fmt
from pyactcomp.codec.reference import error_bound

pytestmark = pytest.mark.gpu

IMPLS = ["cuda", "triton"]


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(256, 256), nn.ReLU()))).cuda()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_keep_positive_gives_the_host_codecs_bytes(impl: str, dtype: torch.dtype, stochastic: bool) -> None:
    torch.manual_seed(0)
    # Two tiles of ReLU results with many values far below half a step, one flagged group, a partial last one.
    x = (torch.randn(5000) * torch.logspace(-6, 0, 5000)).relu().to(dtype)
    x[1000] = float("inf")
    packed = {}
    for name, source in (("cpu", x), (impl, x.cuda())):
        kernel = codec.bind(name, dtype, 8, 64, stochastic, True, source.device)
        out = torch.empty(fmt.packed_nbytes(5000, 8, 64), dtype=torch.uint8, device=source.device)
        kernel.encode(source, out, 7)
        packed[name] = out.cpu()
    assert torch.equal(packed["cpu"], packed[impl])
    assert torch.equal(packed["cpu"][:5000] > 0, x > 0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_synchronises(impl: str) -> None:
    model = pyactcomp.compress(layers(3), min_bytes=0, impl=impl)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x * 1).float().square().mean()
        loss.backward()

    step()  # compiles, and records for the report
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_memory_of_a_forward_is_what_the_report_says() -> None:
    model = pyactcomp.compress(layers(8), min_bytes=0)
    x = torch.randn(4096, 256, device="cuda", requires_grad=True)
    model(x * 1).sum().backward()
    report = pyactcomp.report(model)
    model.zero_grad()
    # What was asked for: what the allocator adds to a buffer depends on the free blocks that it has.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = model(x * 1)
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    # The result is held by us. Nothing else is but scalars, such as seeds.
    stored = report.stored_bytes + out.nbytes
    assert stored <= held <= stored + 16 * len(report.tensors)


def test_a_region_is_ordered_and_kept_for_another_stream() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(2**22, device="cuda", requires_grad=True)
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # the packing comes late
            with pyactcomp.compressed(min_bytes=0):
                y = x * 2
                z = nn.functional.silu(y)
        node = z.grad_fn
        assert node is not None
        del y, z
        restored = node._saved_self  # type: ignore[attr-defined]  # on the default stream, while `side` still sleeps
        error = (restored - 2 * x.detach()).abs()
        del node
        with torch.cuda.stream(side):  # would take the packed buffer if it were free
            torch.full((2**22 + 2**18,), 255, dtype=torch.uint8, device="cuda")
        bound = error_bound((2 * x).detach()[:4096]).max() * 2
        assert float(error.max().detach()) <= float(bound)


def test_forward_and_backward_on_a_side_stream_give_the_same_gradients() -> None:
    model = pyactcomp.compress(layers(3), min_bytes=0)
    x = torch.randn(512, 256, device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = gradients()
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
