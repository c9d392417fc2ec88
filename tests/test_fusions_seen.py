"""Fused modules, and their children, that others see: hooks, changes, and runs that are repeated."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from works_with import GRADIENT_BOUND, gradients, relative_error
from works_with_text import BATCH, LENGTH, built, llama, step, text, transformers

import pyactcomp
from pyactcomp.config import Config
from pyactcomp.fusions import fuse, fused_modules
from pyactcomp.fusions.families.transformers import modules as transformers_modules

INT8 = Config(min_bytes=0)
WIDTH = 64


def test_block_with_a_hook_on_a_norm_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    fuse(model, INT8)
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    own, past = transformers_modules.add_rms_norm, []

    def noted(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        past.append(1)
        return own(*args, **options)

    monkeypatch.setattr(transformers_modules, "add_rms_norm", noted)
    step(model)
    assert seen == [1]
    assert past == [1, 1]  # of the other block


def test_hook_of_all_modules_sees_those_that_blocks_bypass() -> None:
    exact = built(llama)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    counts = []
    for candidate in (exact, model):
        seen: list[str] = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))  # noqa: B023
        step(candidate)
        handle.remove()
        counts.append(sorted(seen))
    assert counts[0] == counts[1]


class _Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 3


def _parametrize(linear: nn.Linear) -> None:
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", _Tripled())


def _give_bias(linear: nn.Linear) -> None:
    linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _give_constant_bias(linear: nn.Linear) -> None:
    del linear.bias
    linear.bias = torch.ones(linear.out_features)


def _double_input(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def _double_input_in_place(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    linear.weight.requires_grad_(False)


def _double_output(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda _, args, out: out * 2)


@pytest.mark.parametrize(
    "change",
    [_parametrize, _give_bias, _give_constant_bias, _double_input, _double_input_in_place, _double_output],
)
@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_changed_linears_of_a_gated_mlp_compute_what_they_do(change: Callable[[nn.Linear], None], name: str) -> None:
    exact = built(llama)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    for each in (exact, model):
        change(getattr(each.model.layers[0].mlp, name))
        # What is written to its input would reach gate's gradient, which reads it too.
        each.model.layers[0].mlp.gate_proj.weight.requires_grad_(change is not _double_input_in_place)
    _, got = step(model)
    assert 0.0 < relative_error(got, step(exact)[1]) <= GRADIENT_BOUND


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_hooks_of_all_modules_may_replace_outputs_in_checkpointed_blocks() -> None:
    exact = built(llama)
    model = copy.deepcopy(exact)
    fuse(model, INT8)

    def scaled(module: nn.Module, _: object, out: object) -> object:
        return out * 1.5 if isinstance(out, Tensor) and type(module).__name__ != "Embedding" else out

    handle = nn.modules.module.register_module_forward_hook(scaled)
    try:
        for each in (exact, model):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert 0.0 < relative_error(step(model)[1], step(exact)[1]) <= GRADIENT_BOUND
    finally:
        handle.remove()


def hook(model: nn.Module, hooked: str, calls: list[int]) -> RemovableHandle:
    """Note the calls of a module of the first layer, or those of all modules."""
    if hooked == "all":
        return nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    return model.model.layers[0].get_submodule(hooked).register_forward_hook(lambda *_: calls.append(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "hooked",
    [
        "all",
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.k_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.act_fn",
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointed_block_runs_again_without_the_hooks_of_its_first_run(hooked: str, dtype: torch.dtype) -> None:
    model = built(llama).to(dtype)
    fuse(model, INT8)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, expected = step(model)
    model.zero_grad()
    calls: list[int] = []
    handle = hook(model, hooked, calls)
    loss = model(**text("cpu")).loss
    handle.remove()
    assert len(calls) >= 1
    loss.backward()
    # Without its SiLU, a gated MLP has other tensors in codes.
    assert relative_error(gradients(model), expected) <= GRADIENT_BOUND
    model.zero_grad()
    loss = model(**text("cpu")).loss
    handle = hook(model, hooked, calls)
    loss.backward()
    handle.remove()
    assert relative_error(gradients(model), expected) == 0.0


@pytest.mark.parametrize("hooked", ["all", "post_attention_layernorm", "mlp.up_proj", "mlp.act_fn"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_each_run_of_a_checkpointed_block_is_repeated_as_it_was(hooked: str) -> None:
    model = built(llama)
    fuse(model, INT8)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, expected = step(model)
    model.zero_grad()
    losses = [model(**text("cpu")).loss]
    handle = hook(model, hooked, [])
    losses.append(model(**text("cpu")).loss)
    handle.remove()
    losses.append(model(**text("cpu")).loss)
    (sum(losses) / 3).backward()
    assert relative_error(gradients(model), expected) <= GRADIENT_BOUND


@pytest.mark.parametrize("seen_by", ["nobody", "a hook on up", "a hook on down", "all hooks", "another weight"])
def test_gated_mlp_writes_over_what_nobody_else_sees(seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    fuse(model, INT8)
    mlp = model.model.layers[0].mlp
    allowed = []
    own = transformers_modules.silu_mul

    def noted(gate: Tensor, up: Tensor, **options: object) -> Tensor:
        allowed.append(options["inplace"])
        return own(gate, up, **options)

    monkeypatch.setattr(transformers_modules, "silu_mul", noted)
    handle = None
    if seen_by == "a hook on up":
        handle = mlp.up_proj.register_forward_hook(lambda *_: None)
    elif seen_by == "a hook on down":
        handle = mlp.down_proj.register_full_backward_hook(lambda *_: None)
    elif seen_by == "all hooks":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    elif seen_by == "another weight":
        mlp.down_proj.weight = type("Weight", (nn.Parameter,), {})(mlp.down_proj.weight.detach())
    try:
        mlp(torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)).sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    assert allowed == ([] if seen_by == "all hooks" else [seen_by == "nobody"])


class _Output(nn.Module):
    """The output part of a BERT's attention, its input added to what it makes of it."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        config = transformers.BertConfig(hidden_size=128, hidden_dropout_prob=0.5)
        self.part = transformers.models.bert.modeling_bert.BertSelfOutput(config)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.part, x, x, use_reentrant=False)
        return self.part(x, x)


def _hook_dropout(part: nn.Module) -> None:
    part.dropout.register_forward_hook(lambda _, args, out: out * 2)


def _evaluate_dropout(part: nn.Module) -> None:
    part.dropout.eval()


def _drop_in_place(part: nn.Module) -> None:
    part.dropout.inplace = True


def _drop_all(part: nn.Module) -> None:
    part.dropout.p = 1.0


def _drop_nothing(part: nn.Module) -> None:
    part.dropout.p = 0.0


def _drop_channels(part: nn.Module) -> None:
    part.dropout = nn.Dropout1d(0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "change",
    [None, _hook_dropout, _evaluate_dropout, _drop_in_place, _drop_all, _drop_nothing, _drop_channels],
)
def test_dropout_before_a_norm_drops_what_it_would_alone(
    change: Callable[[nn.Module], None] | None, checkpointed: bool, device: str
) -> None:
    torch.manual_seed(0)
    exact = _Output(checkpointed).to(device)
    model = copy.deepcopy(exact)
    fuse(model, INT8)
    results = []
    for each in (exact, model):
        if change is not None:
            change(each.part)
        dense: list[Tensor] = []
        each.part.dense.register_forward_hook(lambda _, args, out: dense.append(out))  # noqa: B023
        torch.manual_seed(1)
        x, grad = torch.randn(2, 4, 32, 128, device=device)
        x.requires_grad_()
        out = each(x)
        after = torch.rand((), device=device)
        out.backward(grad)
        results.append((out.detach(), gradients(each) | {"x": x.grad}, after, dense[0].detach()))
    (expected, wanted, drawn, whole), (found, got, drawn_beside, whole_beside) = results
    assert torch.equal(drawn, drawn_beside)
    # Dropped in place or not.
    assert torch.equal(whole, whole_beside)
    # Sums of 128 in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=128 * torch.finfo(torch.float32).eps * 8)
    assert got.keys() == wanted.keys()
    # Of what is dropped, dense has no gradient.
    assert all(float((got[name] - g).norm()) <= GRADIENT_BOUND * float(g.norm()) for name, g in wanted.items())
    assert relative_error(got, wanted) > 0.0


@pytest.mark.parametrize("skip", [(), ("part.dropout",)])
def test_skipped_dropout_before_a_norm_is_not_bypassed(skip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Output(checkpointed=False)
    pyactcomp.compress(model, min_bytes=0, skip=skip)
    drawn = []
    own = transformers_modules.add_layer_norm

    def noted(*args: object, p: float, **options: object) -> Tensor:
        drawn.append(p)
        return own(*args, p=p, **options)

    monkeypatch.setattr(transformers_modules, "add_layer_norm", noted)
    model(torch.randn(4, 32, 128, requires_grad=True)).sum().backward()
    assert drawn == [0.0 if skip else 0.5]


@pytest.mark.parametrize("first", ["hooks", "compress"])
def test_hooks_of_a_fused_module_see_what_those_of_its_own_see(first: str) -> None:
    """A library that shards parameters has hooks on every module."""
    seen: dict[str, list[Tensor]] = {}
    for name in ("plain", "fused"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
        tensors = seen[name] = []

        def see(*given: object, tensors: list[Tensor] = tensors) -> None:
            tensors.extend(t.detach() for each in given if isinstance(each, tuple) for t in each if t is not None)
            tensors.extend(each.detach() for each in given if isinstance(each, Tensor))

        def hook(model: nn.Sequential = model, see: Callable[..., None] = see) -> None:
            for module in model:
                module.register_forward_pre_hook(see)
                module.register_forward_hook(see)
                module.register_full_backward_pre_hook(see)
                module.register_full_backward_hook(see)

        if first == "hooks":
            hook()
        if name == "fused":
            fuse(model, INT8)
            assert {kind for _, kind in fused_modules(model)} == {"LayerNorm", "GELU"}
        if first == "compress":
            hook()
        model(torch.randn(32, 64, requires_grad=True)).square().sum().backward()
    assert len(seen["fused"]) == len(seen["plain"]) == 4 * (1 + 2 + 1 + 2)
    for found, expected in zip(seen["fused"], seen["plain"], strict=True):
        assert found.shape == expected.shape
        assert found.dtype is expected.dtype
        assert relative_error({"": found}, {"": expected}) <= GRADIENT_BOUND
