"""Gated MLPs of models in tiles of tokens: which are, their gradients and bytes, and which call their children."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_checks import Passing, normal
from live_bytes import LiveBytes
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from works_with import GRADIENT_BOUND, relative_error
from works_with_text import BATCH, LENGTH, MORE, WIDTH, built, llama, phi3, qwen3, step, text, transformers

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.functional import linear_cross_entropy
from pyactcomp.fusions.families.transformers import tiles as tiled

TILE = 16
OPTIONS: dict[str, Any] = {"min_bytes": 0, "tile": TILE}


def gemma(attention: str) -> nn.Module:
    config = transformers.GemmaConfig(**MORE, head_dim=16, num_key_value_heads=2, attn_implementation=attention)
    return transformers.GemmaForCausalLM(config)


BUILDERS = [llama, qwen3, gemma, phi3]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the rows of the tiles of each MLP."""
    rows: list[int] = []
    own = tiled.gated_mlp

    def noted(*args: Any, **options: Any) -> Tensor:
        rows.append(options["tile"])
        return own(*args, **options)

    monkeypatch.setattr(tiled, "gated_mlp", noted)
    return rows


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_step_in_tiles_has_the_loss_of_torch_and_gradients_with_the_error_of_codes(
    build: Callable[[str], nn.Module], checkpointed: bool, autocast: bool, calls: list[int]
) -> None:
    exact = built(build)
    model = copy.deepcopy(exact)
    for each in (exact, model):
        if checkpointed:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss, got = step(pyactcomp.compress(model, **OPTIONS), autocast)
    assert calls == [TILE] * (4 if checkpointed else 2)
    of_torch, expected = step(exact, autocast)
    # In bfloat16 each fused module and each matrix product of another number of rows may round an ulp otherwise.
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    torch.testing.assert_close(loss, of_torch, rtol=18 * eps, atol=0.0)
    assert got.keys() == expected.keys()
    assert 0.0 < relative_error(got, expected) <= GRADIENT_BOUND


@pytest.mark.parametrize("build", BUILDERS)
def test_stored_bytes_are_no_more_than_without_tiles(build: Callable[[str], nn.Module]) -> None:
    stored = []
    for tile in (TILE, None):
        model = pyactcomp.compress(built(build), min_bytes=0, tile=tile)
        model(**text("cpu")).loss.backward()
        stored.append(pyactcomp.report(model).stored_bytes)
    # SiLU's product was fused before: gate alone is stored. Elsewhere up was stored too.
    assert stored[0] == stored[1] if build in (llama, qwen3) else stored[0] < stored[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_of_an_mlp_is_that_of_a_tile(checkpointed: bool) -> None:
    """The MLP and the norm before it: what backward needs beside what forward stored."""
    tokens, width, middle, tile = 2048, 64, 1024, 128
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=middle, num_attention_heads=4, num_hidden_layers=1
    )
    peaks = {}
    for rows in (tile, None):
        torch.manual_seed(0)
        model = pyactcomp.compress(_Block(config, checkpointed), min_bytes=0, tile=rows)
        out = model(normal(1, tokens, width).requires_grad_())
        grad = torch.ones_like(out)
        with LiveBytes() as backward:
            out.backward(grad)
        peaks[rows] = backward.peak
    row, wide_row = 4 * width, 4 * middle
    # Four tensors of a tile, the gradients of the weights, and x, over which its gradient is written. Under checkpoint
    # also what the rerun stored for the norms: a sum, and codes of the input. Each norm has a number for each row.
    of_norms = tokens * row + fmt.packed_nbytes(tokens * width, 8, 64) if checkpointed else 0
    assert peaks[tile] <= 4 * tile * wide_row + 3 * width * wide_row + tokens * row + of_norms + 4 * tokens * 4
    assert peaks[None] >= 3 * tokens * wide_row > 2 * peaks[tile]


class _Block(nn.Module):
    """A block without attention."""

    def __init__(self, config: Any, checkpointed: bool) -> None:
        super().__init__()
        self.block = transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, 0)
        self.block.self_attn = _NoAttention()
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def _by_hook(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda _, args, out: out * 1.5)


def _by_class(linear: nn.Linear) -> None:
    linear.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})


def _by_weight(linear: nn.Linear) -> None:
    linear.weight = type("Weight", (nn.Parameter,), {})(linear.weight.detach())


def _by_parametrization(linear: nn.Linear) -> None:
    nn.utils.parametrizations.weight_norm(linear)


@pytest.mark.parametrize("change", [_by_hook, _by_class, _by_weight, _by_parametrization])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_changed_linears_are_called(change: Callable[[nn.Linear], None], name: str, calls: list[int]) -> None:
    exact = built(llama)
    model = pyactcomp.compress(copy.deepcopy(exact), **OPTIONS)
    for each in (exact, model):
        change(getattr(each.model.layers[0].mlp, name))
    _, got = step(model)
    assert calls == [TILE]  # the other layer's
    assert 0.0 < relative_error(got, step(exact)[1]) <= GRADIENT_BOUND


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "lossless"},
        {"keep_weight_copies": True},
        {"tile": None},
        {"tile": BATCH * LENGTH},
        {"tile": "auto"},
        {"fuse": False},
    ],
)
def test_where_there_are_no_tiles(options: dict[str, Any], calls: list[int]) -> None:
    exact = built(llama)
    model = pyactcomp.compress(copy.deepcopy(exact), **{**OPTIONS, **options})
    _, got = step(model)
    assert calls == []
    error = relative_error(got, step(exact)[1])
    assert error == 0.0 if "mode" in options else 0.0 < error <= GRADIENT_BOUND


def test_tiles_by_themselves_are_for_long_sequences(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    model = pyactcomp.compress(built(llama), min_bytes=0)
    monkeypatch.setattr("pyactcomp.functional.tiles.TILE_BYTES", BATCH * LENGTH * 192 * 4 // 2 - 1)
    monkeypatch.setattr("pyactcomp.functional.tiles.ROWS", 1)
    step(model)
    assert calls == [-(-BATCH * LENGTH // 3)] * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("targets", [["q_proj", "gate_proj"], "all-linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_adapters_are_in_the_tiles(targets: Any, dtype: torch.dtype, calls: list[int]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(2)
    config = peft.LoraConfig(target_modules=targets, init_lora_weights="gaussian", lora_alpha=5)
    exact = peft.get_peft_model(built(llama).to(dtype), config)
    for name, parameter in exact.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(exact)
    pyactcomp.compress(model.base_model.model, **OPTIONS)
    loss, got = step(model)
    assert calls == [TILE] * 2
    of_torch, expected = step(exact)
    # Factors in float32 are rounded to the dtype of the products, and a result once more than by PEFT.
    torch.testing.assert_close(loss, of_torch, rtol=18 * torch.finfo(dtype).eps, atol=0.0)
    assert got.keys() == expected.keys()
    bound = GRADIENT_BOUND if dtype is torch.float32 else 3 * GRADIENT_BOUND
    assert 0.0 < relative_error(got, expected) <= bound


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["down_proj"]}],
    ids=lambda options: next(iter(options)),
)
def test_adapters_of_other_kinds_are_called(options: dict[str, Any], calls: list[int]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(2)
    config = peft.LoraConfig(target_modules=["gate_proj"], **options)
    exact = peft.get_peft_model(built(llama), config)
    model = copy.deepcopy(exact)
    pyactcomp.compress(model.base_model.model, **OPTIONS)
    torch.manual_seed(3)
    _, got = step(model)
    assert calls == []
    torch.manual_seed(3)
    assert 0.0 < relative_error(got, step(exact)[1]) <= GRADIENT_BOUND


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("change", ["disabled", "merged"])
def test_adapters_that_are_switched_off_are_called(change: str, calls: list[int]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    exact = peft.get_peft_model(built(llama), peft.LoraConfig(target_modules=["gate_proj"], lora_alpha=64))
    exact.base_model.model.model.embed_tokens.weight.requires_grad_()
    model = copy.deepcopy(exact)
    pyactcomp.compress(model.base_model.model, **OPTIONS)
    for each in (exact, model):
        if change == "disabled":
            each.base_model.disable_adapter_layers()
            each.base_model.model.model.embed_tokens.weight.requires_grad_()
        else:
            each.base_model.merge_adapter()
    _, got = step(model)
    assert calls == []
    assert 0.0 < relative_error(got, step(exact)[1]) <= GRADIENT_BOUND


def test_a_number_of_tokens_is_that_of_the_heads_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def noted(*args: Any, **options: Any) -> Tensor:
        chunks.append(options["chunk"])
        return linear_cross_entropy(*args, **options)

    monkeypatch.setattr("pyactcomp.fusions.logits.linear_cross_entropy", noted)
    for tile in (TILE, "auto", None):
        step(pyactcomp.compress(built(llama), fuse_head=True, tile=tile))
    assert chunks == [TILE, None, None]


def test_under_a_mode_that_may_hold_tensors_none_is_overwritten(calls: list[int]) -> None:
    _, expected = step(pyactcomp.compress(built(llama), min_bytes=0, tile=None))
    model = pyactcomp.compress(built(llama), **OPTIONS)
    with Passing():
        _, got = step(model)
    assert calls == []
    assert relative_error(got, expected) == 0.0


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_keeps_what_it_saves(policy: CheckpointPolicy, calls: list[int]) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    exact = built(llama)
    model = copy.deepcopy(exact)
    pyactcomp.compress(model, **OPTIONS)
    options = {"use_reentrant": False, "context_fn": contexts}
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, **options))
    _, got = step(model)
    assert calls == []
    assert relative_error(got, step(exact)[1]) <= GRADIENT_BOUND


def test_a_checkpointed_graph_that_is_retained_runs_backward_again(calls: list[int]) -> None:
    config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=192, num_attention_heads=4)
    model = pyactcomp.compress(_Block(config, checkpointed=True), **OPTIONS)
    out = model(normal(2, 40, WIDTH).requires_grad_())
    grads = [torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True) for _ in range(2)]
    for first, again in zip(*grads, strict=True):
        assert torch.equal(first, again)
    assert calls == [TILE] * 3


@pytest.mark.filterwarnings("ignore:torch.compile's graph of Phi3")
def test_graphs_of_the_compiler_are_left_to_it(calls: list[int]) -> None:
    exact = built(phi3)
    model = pyactcomp.compress(copy.deepcopy(exact), **OPTIONS)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(**text("cpu")).loss.backward()
    assert calls == []
    exact(**text("cpu")).loss.backward()
    found, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, exact))
    assert relative_error(found, expected) <= GRADIENT_BOUND


def test_a_width_that_does_not_fit_raises_as_torch_does() -> None:
    model = built(llama)
    mlp = pyactcomp.compress(model, **OPTIONS).model.layers[0].mlp
    for wrong, match in ((normal(64, WIDTH + 1), "mat1 and mat2"), (normal(64, WIDTH).bfloat16(), "dtype")):
        with pytest.raises(RuntimeError, match=match):
            mlp(wrong.requires_grad_())
