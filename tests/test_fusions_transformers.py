"""Fused modules of Hugging Face transformers: results, what is recognised and what is left alone."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_checks import normal
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, relative_error
from works_with_text import BATCH, LENGTH, SIZES, VOCABULARY, WIDTH, built, gpt2, llama, qwen3, step, transformers

import pyactcomp
from pyactcomp.config import Config
from pyactcomp.functional import Codes
from pyactcomp.fusions import fuse, fused_modules, left_alone, unfuse
from pyactcomp.fusions.families import torch_modules
from pyactcomp.fusions.families.transformers import attention
from pyactcomp.fusions.families.transformers import modules as transformers_modules
from pyactcomp.fusions.tampering import tampering_reason

INT8 = Config(min_bytes=0)
LOSSLESS = Config(mode="lossless", min_bytes=0)


def bert(attention: str) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, vocab_size=VOCABULARY, intermediate_size=256, attn_implementation=attention)
    )


def assert_step_equals(model: nn.Module, other: nn.Module, autocast: bool = False) -> None:
    loss, got = step(model, autocast)
    expected_loss, expected = step(other, autocast)
    assert torch.equal(loss, expected_loss)
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def kinds(model: nn.Module) -> set[str]:
    return {kind for _, kind in fused_modules(model)}


@pytest.mark.parametrize(("attention", "autocast"), [("eager", False), ("sdpa", True)])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (llama, {"DecoderLayer", "GatedMLP", "Projections", "RMSNorm", "RMSNormForGatedMLP"}),
        (qwen3, {"DecoderLayer", "GatedMLP", "Projections", "RMSNorm", "RMSNormForGatedMLP"}),
        (gpt2, {"Dropout", "GPT2Block", "LayerNorm", "NewGELU"}),
        (bert, {"Dropout", "GELU", "LayerNorm", "Projections", "ResidualNorm"}),
    ],
)
def test_fused_step_agrees_with_the_exact_one(
    build: Callable[[str], nn.Module], expected: set[str], attention: str, autocast: bool
) -> None:
    exact = built(build, attention)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    assert kinds(model) == expected
    loss, got = step(model, autocast)
    exact_loss, exact_gradients = step(exact, autocast)
    # Forwards differ in roundings only: a module's output by an ulp or two of its dtype, the sums over a row in it by
    # the row's length in float32. The logits, hence the loss, are no worse conditioned than that at initialisation.
    ulp = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    bound = len(fused_modules(model)) * max(2 * ulp, WIDTH * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(loss, exact_loss, rtol=bound, atol=0.0)
    assert 0.0 < relative_error(got, exact_gradients) <= GRADIENT_BOUND


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("build", "expected"), [(llama, {"GatedMLP", "Projections"}), (gpt2, {"Dropout", "NewGELU"}), (bert, {"Dropout"})]
)
def test_lossless_step_is_the_exact_one_to_the_bit(
    build: Callable[[str], nn.Module], expected: set[str], autocast: bool
) -> None:
    exact = built(build)
    model = copy.deepcopy(exact)
    fuse(model, LOSSLESS)
    assert kinds(model) == expected
    assert_step_equals(model, exact, autocast)


def test_a_norm_of_the_same_name_behind_the_attention_keeps_codes() -> None:
    block = built(llama).model.layers[0]
    norm = block.post_attention_layernorm
    assert list(transformers_modules.by_place(block)) == [norm]
    block.post_feedforward_layernorm = copy.deepcopy(norm)
    assert transformers_modules.by_place(block) == {}


def test_block_adds_and_normalises_as_its_modules_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    fuse(model, INT8)
    separate = copy.deepcopy(model)
    for layer in separate.model.layers:
        layer.__class__ = type(built(llama).model.layers[0])
    given = []
    own = transformers_modules.add_rms_norm

    def noted(x: Tensor, residual: Tensor | None, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        given.append(residual is not None)
        return own(x, residual, *args, **options)

    monkeypatch.setattr(transformers_modules, "add_rms_norm", noted)
    assert_step_equals(model, separate)
    assert given == [False, True] * 2
    # By position or left out, as its own forward takes them.
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    positions = torch.arange(LENGTH)[None]
    embeddings = model.model.rotary_emb(x, positions)
    expected = separate.model.layers[0](x, position_embeddings=embeddings)
    assert torch.equal(model.model.layers[0](x, None, positions, None, False, embeddings), expected)
    assert torch.equal(model.model.layers[0](x, position_embeddings=embeddings), expected)
    with pytest.raises(TypeError, match="too many positional arguments"):
        model.model.layers[0](x, None, positions, None, False, embeddings, None)


def test_only_blocks_that_pass_all_their_arguments_on_are_known() -> None:
    layer = type(built(llama).model.layers[0])
    source = textwrap.dedent(inspect.getsource(layer.forward))
    known = transformers_modules._is_decoder_layer

    def parsed(text: str) -> ast.FunctionDef:
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        return function

    assert known(parsed(source))
    for old, new in (
        ("use_cache=use_cache,", ""),
        ("position_ids=position_ids", "position_ids=None"),
        ("residual + hidden_states", "hidden_states + residual"),
        ("self.mlp(hidden_states)", "self.mlp(hidden_states) * 2"),
    ):
        assert old in source
        assert not known(parsed(source.replace(old, new)))


@pytest.mark.parametrize("build", [llama, bert])
def test_evaluation_and_unfused_models_are_the_exact_ones(build: Callable[[str], nn.Module]) -> None:
    exact = built(build)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    assert list(model.state_dict()) == list(exact.state_dict())
    assert_step_equals(model.eval(), exact.eval())
    unfuse(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in exact.modules()]
    assert_step_equals(model.train(), exact.train())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("build", [llama, gpt2])
def test_gradient_checkpointing_gives_the_gradients_without_it(build: Callable[[str], nn.Module]) -> None:
    model = built(build)
    fuse(model, INT8)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss, gradients = step(checkpointed)
    plain_loss, plain = step(model)
    assert torch.equal(loss, plain_loss)
    # Of SwiGLU's operands a checkpointed block keeps codes of both, another computes one again from what it stores.
    assert relative_error(gradients, plain) <= (GRADIENT_BOUND if build is llama else 0.0)


def test_saved_model_loads_in_a_plain_one(tmp_path) -> None:
    model = built(llama)
    fuse(model, INT8)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_norms_that_compute_something_else_are_not_fused() -> None:
    model = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(
            **SIZES, vocab_size=VOCABULARY, intermediate_size=192, num_key_value_heads=2, head_dim=16
        )
    ).train()
    exact = copy.deepcopy(model)
    fuse(model, INT8)
    assert "RMSNorm" not in kinds(model)
    assert 0.0 < relative_error(step(model)[1], step(exact)[1]) <= GRADIENT_BOUND


def test_attention_sees_what_its_module_defines_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama, "eager")
    fuse(model, INT8)
    modeling = transformers.models.llama.modeling_llama
    calls = []
    rotate, attend = modeling.apply_rotary_pos_emb, modeling.eager_attention_forward

    def attend_and_count(*arguments, **keywords):
        calls.append("attend")
        return attend(*arguments, **keywords)

    def rotate_and_count(*arguments, **keywords):
        calls.append("rotate")
        return rotate(*arguments, **keywords)

    monkeypatch.setattr(modeling, "eager_attention_forward", attend_and_count)
    step(model)
    assert calls == ["attend"] * 2
    calls.clear()
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotate_and_count)
    step(model)
    assert calls == ["rotate", "attend"] * 2


def test_rotary_embedding_of_another_shape_is_left_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def rope(*_: object, **__: object) -> None:
        raise AssertionError("called with a shape that it does not serve")

    monkeypatch.setattr(attention, "rope", rope)
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    heads = torch.randn(2, 6, 8)
    angles = torch.randn(6, 8)
    got = attention._rotated(rotate, Codes(), heads, heads, angles, angles, 0)
    for turned, expected in zip(got, rotate(heads, heads, angles, angles, 0), strict=True):
        assert torch.equal(turned, expected)


def test_changed_modules_are_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", forward)
    model = built(llama)
    first, second = model.model.layers
    first.mlp.act_fn.register_forward_hook(lambda *_: None)
    second.self_attn.forward = second.self_attn.forward
    fuse(model, INT8)
    assert kinds(model) == {"GatedMLP", "Projections"}
    reasons = {left.name: left.reason for left in left_alone(model)}
    assert reasons.keys() == {
        "model.layers.0.mlp",
        "model.layers.1.self_attn",
        "model.norm",
        "model.layers.0",
        "model.layers.1",
        *(f"model.layers.{i}.{norm}" for i in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")),
    }
    assert reasons["model.norm"] == "the forward of LlamaRMSNorm was replaced"
    assert reasons["model.layers.0"] == "its input_layernorm: the forward of LlamaRMSNorm was replaced"
    assert reasons["model.layers.0.mlp"].startswith("its act_fn: it has a hook")
    assert reasons["model.layers.1.self_attn"] == "its forward was replaced"


def test_head_that_cannot_be_chunked_is_named() -> None:
    config = Config(fuse=False, fuse_head=True)
    model = nn.ModuleDict({"model": built(llama), "other": nn.Linear(2, 2)})
    fuse(model, config)
    assert kinds(model) == {"Head"}
    assert left_alone(model) == []
    unfuse(model)
    with pytest.raises(ValueError, match="got Linear: the forward of Linear takes no targets"):
        fuse(model["other"], config)


def test_decorators_in_the_source_are_not_taken_for_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = transformers.LlamaForCausalLM
    model = built(llama)
    assert tampering_reason(model) is None  # its forward is decorated, as is that of the layers by their base class
    assert tampering_reason(model.model.layers[0]) is None
    own = cls.forward

    @functools.wraps(own)
    def forward(self: nn.Module, **inputs: Tensor) -> object:
        return own(self, **inputs)

    monkeypatch.setattr(cls, "forward", forward)
    assert tampering_reason(model) == "the forward of LlamaForCausalLM was replaced"


def test_skipped_child_keeps_what_would_bypass_it() -> None:
    model = built(bert)
    layer = model.bert.encoder.layer[0]
    fuse(model, INT8, [layer.output.LayerNorm])
    names = {name for name, _ in fused_modules(model)}
    assert "bert.encoder.layer.1.output" in names
    assert "bert.encoder.layer.0.output" not in names
    assert "its LayerNorm is skipped" in {left.reason for left in left_alone(model)}


def test_child_hooked_after_fusing_is_not_bypassed() -> None:
    exact = built(bert)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    seen = []
    model.bert.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda *_: seen.append(1))
    assert relative_error(step(model)[1], step(exact)[1]) <= GRADIENT_BOUND
    assert seen == [1]


def test_input_of_several_linears_is_cast_once_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(bert)
    fuse(model, INT8)
    cast: list[torch.dtype] = []
    own = attention.cast_once

    def noted(module: nn.Module, x: Tensor) -> Tensor:
        cast.append(own(module, x).dtype)
        return own(module, x)

    monkeypatch.setattr(attention, "cast_once", noted)
    step(model, autocast=True)
    assert cast == [torch.bfloat16] * 2
    # A hook sees what it would without compress.
    seen: list[torch.dtype] = []
    model.bert.encoder.layer[0].attention.self.key.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    cast.clear()
    step(model, autocast=True)
    assert cast == [torch.float32, torch.bfloat16]
    assert seen == [torch.float32]


def test_norm_before_a_linear_writes_what_autocast_would_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(gpt2)
    fuse(model, INT8)
    written: list[torch.dtype | None] = []
    own = torch_modules.layer_norm_unchecked

    def noted(*args: Any) -> Tensor:
        *_, dtype, _ = args
        written.append(dtype)
        return own(*args)

    monkeypatch.setattr(torch_modules, "layer_norm_unchecked", noted)
    step(model, autocast=True)
    # Two norms of each block, and the last one, which the head reads: no block's forward calls that.
    assert written == [torch.bfloat16] * 4 + [None]
    written.clear()
    step(model)
    assert written == [None] * 5
    # For others that call a norm its output is float32, as without compress.
    written.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model.transformer.h[0].ln_1(torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True))
    assert written == [None]


def test_disabled_step_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = built(llama)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    assert_step_equals(model, exact, autocast=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_a_fused_model_agrees_with_lora_on_the_exact_one() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    losses, grads = [], []
    for fused in (False, True):
        model = built(llama)
        if fused:
            fuse(model, INT8)
        torch.manual_seed(2)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "gate_proj"], init_lora_weights="gaussian")
        )
        assert bool(fused_modules(adapted.base_model.model)) == fused
        loss, got = step(adapted, autocast=True)
        losses.append(loss)
        grads.append(got)
    # As above: an ulp or two of bfloat16 in each of the nine fused modules.
    torch.testing.assert_close(losses[1], losses[0], rtol=9 * 2 * torch.finfo(torch.bfloat16).eps, atol=0.0)
    assert 0.0 < relative_error(grads[1], grads[0]) <= GRADIENT_BOUND


def error_of_change(change: Callable[[nn.Module], object]) -> float:
    """Return the error of the gradients of an MLP whose up projection changes between forward and backward."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, mlp_bias=True)
    model = nn.Sequential(LlamaRMSNorm(64), LlamaMLP(config)).train()
    x = normal(8, 16, 64).requires_grad_()
    found = []
    for each in (copy.deepcopy(model), pyactcomp.compress(model, min_bytes=0)):
        owned = {"down": each[1].down_proj.weight, "gate": each[1].gate_proj.weight, "norm": each[0].weight}
        loss = each(x * 1).square().sum()
        change(each[1])
        found.append(dict(zip(owned, torch.autograd.grad(loss, owned.values()), strict=True)))
    return relative_error(found[1], found[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: setattr(mlp.up_proj, "bias", None),
        lambda mlp: mlp.up_proj.bias.data.add_(3),
        lambda mlp: setattr(mlp.up_proj, "weight", nn.Parameter(torch.randn(128, 64))),
    ],
    ids=["no bias", "bias", "weight"],
)
def test_an_up_projection_that_changes_after_the_forward_is_made_again_as_it_was(
    change: Callable[[nn.Module], object],
) -> None:
    assert 0 < error_of_change(change) <= GRADIENT_BOUND


def test_a_gated_mlp_behind_a_reshaped_norm_under_autocast() -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(64)
            self.mlp = LlamaMLP(transformers.LlamaConfig(hidden_size=64, intermediate_size=128))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x).view(-1, 64)).float().square().sum()

    torch.manual_seed(0)
    model = Expert().train()
    exact = copy.deepcopy(model)
    pyactcomp.compress(model, min_bytes=0)
    for each in (model, exact):
        with torch.autocast("cpu", torch.bfloat16):
            each(normal(2, 8, 64).requires_grad_() * 1).backward()
    assert (
        0
        < relative_error(
            {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in exact.named_parameters()}
        )
        <= GRADIENT_BOUND
    )
