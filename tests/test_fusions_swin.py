"""timm's Swin Transformer with its blocks fused: the same function, drops and parameters, in fewer bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from functional_checks import normal, saved_by
from torch import Tensor
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

from pyactcomp.codec.format import packed_nbytes
from pyactcomp.config import Config
from pyactcomp.engine.marks import FUSING, RECIPE
from pyactcomp.fusions import fuse, fused_modules, unfuse
from pyactcomp.fusions.families import swin
from pyactcomp.fusions.state import FusionState

pytest.importorskip("timm", reason="the fused blocks are timm's; pip install timm")
from timm.models.swin_transformer import SwinTransformer


def model(**options: Any) -> SwinTransformer:
    """Return a stage of two blocks, of which the second is shifted and drops paths."""
    torch.manual_seed(0)
    settings = {"img_size": 56, "embed_dim": 32, "depths": (2,), "num_heads": (1,), "drop_path_rate": 0.4}
    return SwinTransformer(num_classes=10, **settings | options).train()


def fused(original: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Return a copy of which only the blocks and their attentions are fused, in any mode."""
    result = copy.deepcopy(original)
    state = FusionState(Config(min_bytes=0, **options))
    for module in result.modules():
        if type(module) in swin.by_class(()):
            module.__class__ = swin.by_class(())[type(module)].fused
            FUSING.set(module, state)
    return result


def step(network: torch.nn.Module, size: int = 56, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the output and all gradients, with the same drops in every call."""
    torch.manual_seed(1)
    network.zero_grad()
    out = network(normal(6, 3, size, size).to(dtype))
    F.cross_entropy(out.float(), torch.arange(6)).backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("drop_path_rate", [0.0, 0.4])
def test_lossless_blocks_are_timms_to_the_bit(autocast: bool, dtype: torch.dtype, drop_path_rate: float) -> None:
    original = model(drop_path_rate=drop_path_rate).to(dtype)
    ours = copy.deepcopy(original)
    fuse(ours, Config(min_bytes=0, mode="lossless"))
    assert {kind for _, kind in fused_modules(ours)} >= {"Block"}
    assert "WindowAttention" not in {kind for _, kind in fused_modules(ours)}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for got, expected in zip(step(ours, dtype=dtype), step(original, dtype=dtype), strict=True):
            assert torch.equal(got, expected)


class Adapted(torch.nn.Module):
    """A Linear with another beside it, as LoRA has it, that may run outside autocast or see its input's range."""

    def __init__(self, linear: torch.nn.Linear, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = linear, kind
        self.beside = copy.deepcopy(linear)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "float32":
            with torch.autocast("cpu", enabled=False):
                return self.linear(x)
        if self.kind == "scaled":
            return self.linear(x / x.abs().amax())
        return self.linear(x) + self.beside(x)


@pytest.mark.parametrize("mode", ["lossless", "int8"])
@pytest.mark.parametrize("kind", ["float32", "scaled", "beside"])
def test_block_around_other_projections_casts_nothing_early(kind: str, mode: str) -> None:
    original = model().layers[0].blocks[0]
    original.attn.qkv, original.mlp.fc1 = Adapted(original.attn.qkv, kind), Adapted(original.mlp.fc1, kind)
    ours = copy.deepcopy(original)
    fuse(ours, Config(min_bytes=0, mode=mode))
    assert "Block" in {kind for _, kind in fused_modules(ours)}
    seen: list[torch.dtype] = []
    for adapted in (ours.attn.qkv, ours.mlp.fc1):
        adapted.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    results = []
    for block in (ours, original):
        x = normal(6, 14, 14, 32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = block(x)
        leaves = [x, *block.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)])
    assert seen == [torch.float32] * 2
    if mode == "lossless":
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_from_codes_are_within_two_percent(autocast: bool) -> None:
    original = model()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, gradients = step(original)
        ours, ours_gradients = step(fused(original))
    unit = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    # The forward is not quantised: a rounding or two of each of four branches.
    assert distance(ours, out) < 16 * unit
    assert 0 < distance(ours_gradients, gradients) < GRADIENT_BOUND


def test_drops_take_the_random_numbers_of_timm() -> None:
    original = model()
    states = []
    for network in (original, fused(original)):
        step(network)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_norms_and_attention_keep_no_floats() -> None:
    original = model()

    def kept(network: torch.nn.Module) -> int:
        sizes: dict[int, int] = {}
        parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}

        def pack(x: Tensor) -> Tensor:
            if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
                # What is offered is computed again, and costs nothing.
                source = x if x._base is None else x._base
                if RECIPE.get(source) is None:
                    sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                    alive.append(x)
            return x

        alive: list[Tensor] = []
        block = network.layers[0].blocks[1]
        x = normal(6, 14, 14, 32).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            block(x)
        return sum(sizes.values())

    n = 6 * 14 * 14 * 32 * 4
    # Two MLP tensors of four times the width stay float here; mask, bias and statistics are small.
    small = 4 * (4 * 49 * 49 + 49 * 49) + 4 * 6 * 196 * 4
    assert 8 * n <= kept(fused(original)) <= 8 * n + small
    assert kept(original) > 14 * n


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["exact", "int8"])
def test_attention_stores_its_projection_as_the_configuration_has_it(attention: str, autocast: bool) -> None:
    module = fused(model(), attention=attention).layers[0].blocks[0].attn
    x = normal(24, 49, 32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        saved = saved_by(lambda: module(x))
    n = 24 * 49 * 3 * 32
    kept = [t for t in saved if t.dtype is torch.uint8 or t.numel() == n]
    # A float32 projection is scaled, and a scale has four bytes.
    sixteen_bits = (2 * n, torch.bfloat16) if autocast else (2 * n + 4, torch.uint8)
    codes = packed_nbytes(n, 8, 64), torch.uint8
    assert [(t.nbytes, t.dtype) for t in kept] == [sixteen_bits if attention == "exact" else codes]


@pytest.mark.parametrize(
    ("options", "size"),
    [({"img_size": 48, "strict_img_size": False}, 48), ({"attn_drop_rate": 0.1}, 56), ({"proj_drop_rate": 0.1}, 56)],
)
def test_other_configurations_have_the_results_of_timm(options: dict[str, Any], size: int) -> None:
    original = model(**options)
    out, gradients = step(original, size)
    ours, ours_gradients = step(fused(original), size)
    assert distance(ours, out) < 1e3 * torch.finfo(torch.float32).eps
    assert distance(ours_gradients, gradients) < GRADIENT_BOUND


def test_evaluation_runs_timms_forward() -> None:
    original = model().eval()
    x = normal(2, 3, 56, 56)
    assert torch.equal(fused(original)(x), original(x))


def test_fuse_takes_the_blocks_and_gives_them_back() -> None:
    network = model()
    names, types = list(network.state_dict()), [type(m) for m in network.modules()]
    fuse(network, Config(min_bytes=0))
    forms = [name for _, name in fused_modules(network)]
    assert (forms.count("Block"), forms.count("WindowAttention")) == (2, 2)
    assert list(network.state_dict()) == names
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(step(other)[1], step(network)[1])
    unfuse(network)
    assert [type(m) for m in network.modules()] == types


def test_a_hooked_norm_leaves_its_block_alone() -> None:
    network = model()
    network.layers[0].blocks[0].norm1.register_forward_hook(lambda *_: None)
    fuse(network, Config(min_bytes=0))
    assert [name for _, name in fused_modules(network)].count("Block") == 1
