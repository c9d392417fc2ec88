"""A test for each private name of torch in :mod:`.phantom`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import phantom, recurrent


def _test_operators() -> None:
    writing, others, whole = phantom.operators()
    assert ("aten::add_", "Tensor") in writing
    assert ("aten::mm", "out") in writing
    assert ("aten::embedding_dense_backward", "") in others
    assert ("aten::resize_", "") not in writing
    assert "aten::_foreach_add.List" in whole
    assert ("aten::sum", "IntList_out") in writing
    writing, others, whole = phantom.operators(["sum.IntList_out"])
    assert ("aten::sum", "IntList_out") in others
    assert ("aten::sum", "IntList_out") not in writing
    assert "aten::sum.IntList_out" in whole
    if torch.version.cuda is not None:
        # A build with CUDA confirms the list for builds without.
        tables = {
            key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
            for key in ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        }
        both = tables["CUDA"] & (tables["CompositeExplicitAutograd"] | tables["CompositeImplicitAutograd"])
        listed = {f"aten::{name}" for name in phantom.WITH_KERNELS_FOR_CUDA}
        missing = {name for name in both if name.startswith("aten::") and "_foreach_" not in name} - listed
        assert not missing, f"kernels for CUDA that the list lacks: {sorted(missing)}"


def _test_fake() -> None:
    mode = phantom.fake_mode()
    storage = phantom.meta_storage(24)
    flat = torch.empty(0, device="meta")
    flat.set_(storage, 0, (2, 3), (3, 1))
    claimed = phantom.fake(mode, flat, torch.device("cuda", 0))
    with mode:
        out = claimed.t()
    assert out.device.type == "cuda"
    assert tuple(out.shape) == (3, 2)
    assert phantom.storage_key(out) == phantom.storage_key(claimed)


def _test_recurrent() -> None:
    counts = {name: len(getattr(torch.ops.aten, name).default._schema.arguments) for name in recurrent.SHAPES}
    assert counts == {
        "_cudnn_rnn": 16,
        "_cudnn_rnn_backward": 22,
        "_thnn_fused_lstm_cell": 5,
        "_thnn_fused_lstm_cell_backward_impl": 6,
        "_thnn_fused_gru_cell": 5,
        "_thnn_fused_gru_cell_backward": 3,
    }
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        packet = getattr(torch.ops.aten, name)
        given = [each.name for each in packet.input._schema.arguments]
        assert given[2:] == "params has_biases num_layers dropout train bidirectional batch_first".split()
        assert [each.name for each in packet.data._schema.arguments][1] == "batch_sizes"


def _test_flops() -> None:
    a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")
    assert phantom.flops(torch.ops.aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    assert phantom.flops(torch.ops.aten.relu.default, (a,), {}, a) == 0
    query, key = torch.empty(2, 4, 8, 16, device="meta"), torch.empty(2, 2, 8, 16, device="meta")
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    assert phantom.flops(attention.default, (query, key, key), {}, (query,)) == 2 * (2 * 2 * 4 * 8 * 8 * 16)
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward
    grouped, whole = (phantom.flops(back.default, (query, query, k, k, query), {}, (query,)) for k in (key, query))
    assert grouped == whole


TESTS: dict[str, Callable[[], None]] = {
    "torch._C._dispatch_get_registrations_for_dispatch_key, _dispatch_has_kernel": _test_operators,
    "torch._subclasses.fake_tensor.FakeTensor; UntypedStorage._cdata": _test_fake,
    "torch.utils.flop_counter.flop_registry, OpOverload._overloadpacket": _test_flops,
    "torch.ops.aten._cudnn_rnn, _thnn_fused_lstm_cell, _thnn_fused_gru_cell": _test_recurrent,
}
