"""A checkpointed block that runs again in backward takes the way of its first run, whatever changed in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from works_with import GRADIENT_BOUND, gradients, relative_error

import pyactcomp

WIDTH = 128


class Watching(TorchFunctionMode):
    """Watches calls, as a counter of operators does."""

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Calls(nn.Module):
    """A block that calls one module twice, once under a mode that keeps fused modules from running."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gelu = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gelu(self.up(self.norm(x)))
        with Watching():
            return x + self.down(self.gelu(y))


def plain() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def nested() -> nn.Module:
    return nn.Sequential(plain(), Checkpointed(plain(), whole))


class First(nn.Module):
    """A block of transformers, with a Tensor as the result and what its forward needs beside."""

    def __init__(self, block: nn.Module, **others: Any) -> None:
        super().__init__()
        self.block, self.others = block, others

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x.unflatten(0, (2, -1)), **self.others)
        return (out if isinstance(out, Tensor) else out[0]).flatten(0, 1)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 256, "hidden_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0, _attn_implementation="sdpa")
    return First(transformers.models.bert.modeling_bert.BertLayer(config))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
    module = transformers.models.llama.modeling_llama
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=2, intermediate_size=256, _attn_implementation="sdpa"
    )
    position = torch.arange(64)[None]
    rotated = module.LlamaRotaryEmbedding(config)(torch.zeros(1, 64, WIDTH), position)
    return First(module.LlamaDecoderLayer(config, 0), position_embeddings=rotated)


def whole(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def selective(block: nn.Module, x: Tensor) -> Tensor:
    def products(_: object, operator: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(products)

    out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return out


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.block, x)


def compress(model: nn.Module, **options: Any) -> None:
    pyactcomp.compress(model, min_bytes=256, **options)


def recompress(model: nn.Module) -> None:
    compress(pyactcomp.decompress(model), mode="lossless")


def hook(model: nn.Module) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "eval": nn.Module.eval,
    "decompress": pyactcomp.decompress,
    "decompress, eval": lambda model: pyactcomp.decompress(model).eval(),
    "recompress": recompress,
    "hook": hook,
}


def step(
    model: nn.Module, change: Callable[[nn.Module], object] = lambda model: None, backwards: int = 1
) -> dict[str, Tensor]:
    model.zero_grad()
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = model(x).square().mean()
    change(model)
    for left in reversed(range(backwards)):
        model.zero_grad()
        loss.backward(retain_graph=left > 0)
    return gradients(model)


def built(block: Callable[[], nn.Module], how: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Checkpointed(block(), how) for _ in range(2)))


BLOCKS = [plain, Calls, nested, bert, llama]


@pytest.mark.parametrize("how", [whole, selective, reentrant])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_rerun_takes_the_way_of_the_first_run(
    block: Callable[[], nn.Module], how: Callable[[nn.Module, Tensor], Tensor], change: str
) -> None:
    exact = built(block, how)
    model = copy.deepcopy(exact)
    compress(model)
    expected = step(model)
    assert 0.0 < relative_error(expected, step(exact)) <= GRADIENT_BOUND
    got = step(model, CHANGES[change])
    if how is reentrant:  # a first run without gradients, of which nothing is compared: the rerun may be the plain one
        assert relative_error(got, step(exact)) <= GRADIENT_BOUND
    else:
        assert relative_error(got, expected) == 0.0
    # The change is there once backward is done.
    if "decompress" in change:
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert relative_error(step(model), step(exact)) == 0.0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("how", [whole, selective])
def test_a_first_run_without_compression_is_repeated_without(
    block: Callable[[], nn.Module], how: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    model = built(block, how)
    expected = step(model)
    assert relative_error(step(model, compress), expected) == 0.0
    # In evaluation mode fused modules run the module's own forward.
    model.eval()
    assert relative_error(step(model, nn.Module.train), expected) == 0.0


@pytest.mark.parametrize("first", ["0", "1"])
def test_the_switch_in_the_environment_is_as_in_the_first_run(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(plain, whole)
    exact = step(model)
    compress(model)
    monkeypatch.setenv("PYACTCOMP_DISABLE", first)
    expected = step(model)
    assert (relative_error(expected, exact) == 0.0) == (first == "1")
    other = "0" if first == "1" else "1"
    got = step(model, lambda model: monkeypatch.setenv("PYACTCOMP_DISABLE", other))
    assert relative_error(got, expected) == 0.0


def test_each_of_several_backwards_repeats_the_first_run() -> None:
    model = built(Calls, whole)
    compress(model)
    expected = step(model)
    assert relative_error(step(model, nn.Module.eval, backwards=3), expected) == 0.0
