"""Whatever a program does with the parts of a compressed model, values and gradients are those of the plain model.

Each family of fused modules meets each way in which a program looks at a part, changes or replaces it, or calls it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from functional_checks import normal
from resnets import Model as ResNet
from resnets import stand_in
from tampering_ways import WAYS, Seen, first
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, gradients, relative_error
from written_norms import CentredByVar, Gemma, Llama

import pyactcomp
from pyactcomp.fusions import fused_modules

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

WIDTH = 64
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
IMAGES = {"image_size": 32, "patch_size": 8}
DETERMINISTIC_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DETERMINISTIC_GPT2 = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class HiddenStates(nn.Module):
    """A transformer's hidden states, from what a wrapper embeds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last hidden states."""
        hidden: Tensor = self.model(inputs).last_hidden_state
        return hidden


def resnet() -> nn.Module:
    """Return a ResNet whose ReLUs write elsewhere: torch's backward hooks refuse writes to what they see."""
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def timm_model(module: str, cls: str, **options: Any) -> nn.Module:
    models = pytest.importorskip(f"timm.models.{module}", reason="timm defines the blocks", exc_type=ImportError)
    made: nn.Module = getattr(models, cls)(num_classes=4, **options)
    return made


def written_norms() -> nn.Module:
    """Return norms that a program writes out, between Linears."""
    norms = Llama(WIDTH), Gemma(WIDTH), CentredByVar(WIDTH)
    parts = [part for norm in norms for part in (norm, nn.Linear(WIDTH, WIDTH))]
    return nn.Sequential(nn.Embedding(64, WIDTH), nn.Sequential(*parts), nn.Linear(WIDTH, WIDTH))


def tokens() -> Tensor:
    return (torch.arange(128) % 61).view(4, 32)


def images() -> Tensor:
    return normal(4, 3, 32, 32)


class Family(NamedTuple):
    """A small model, the folder of its parts, and those that fused modules compute, bypass or trust."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    autocast: bool
    inside: str
    parts: str


FAMILIES = {
    "resnet": Family(
        resnet, lambda: normal(4, 3, 16, 16), False, "",
        "conv1 bn1 relu maxpool layer1.0 layer1.0.bn1 layer1.0.relu layer1.0.conv2 layer1.0.downsample",
    ),
    "llama": Family(
        lambda: HiddenStates(
            transformers.LlamaModel(transformers.LlamaConfig(**SIZES, vocab_size=64, use_cache=False))
        ),
        tokens, True, "model.layers.0.",
        "input_layernorm post_attention_layernorm self_attn self_attn.k_proj mlp mlp.gate_proj mlp.up_proj"
        " mlp.down_proj mlp.act_fn",
    ),
    "bert": Family(
        lambda: HiddenStates(
            transformers.BertModel(
                transformers.BertConfig(**SIZES, vocab_size=64, **DETERMINISTIC_BERT), add_pooling_layer=False
            )
        ),
        tokens, True, "model.encoder.layer.0.",
        "attention.self attention.self.key attention.output attention.output.dense attention.output.LayerNorm"
        " intermediate.intermediate_act_fn output.dropout",
    ),
    "gpt2": Family(
        lambda: HiddenStates(
            transformers.GPT2Model(
                transformers.GPT2Config(n_embd=WIDTH, n_layer=1, n_head=2, vocab_size=64, **DETERMINISTIC_GPT2)
            )
        ),
        tokens, True, "model.h.0.", "ln_1 attn attn.c_attn ln_2 mlp mlp.c_fc mlp.act",
    ),
    "vit": Family(
        lambda: HiddenStates(transformers.ViTModel(transformers.ViTConfig(**SIZES, **IMAGES), add_pooling_layer=False)),
        images, True, "model.layers.0.", "layernorm_before attention attention.q_proj layernorm_after mlp mlp.fc1",
    ),
    "timm's vit": Family(
        lambda: timm_model(
            "vision_transformer", "VisionTransformer", img_size=32, patch_size=8, embed_dim=WIDTH, depth=1, num_heads=2
        ),
        images, True, "blocks.0.", "norm1 attn attn.qkv norm2 mlp mlp.fc1",
    ),
    "timm's swin": Family(
        lambda: timm_model(
            "swin_transformer", "SwinTransformer",
            img_size=32, patch_size=4, window_size=4, embed_dim=32, depths=(2,), num_heads=(1,),
        ),
        images, True, "layers.0.blocks.1.",
        "norm1 attn attn.qkv attn.softmax attn.attn_drop attn.proj norm2 drop_path1 mlp mlp.fc1",
    ),
    "written norms": Family(written_norms, tokens, False, "1.", "0 1 2 3 4 5"),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    if request.param == "resnet":
        stand_in(monkeypatch)
    return FAMILIES[request.param]


def built(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return family.build().train()


def bound(model: nn.Module, autocast: bool) -> float:
    """Return how far the roundings of fused forwards move a value, relative to all values.

    Each of the fused modules rounds in other places: by an ulp or two of the dtype, and in sums over a row by an ulp of
    float32 for each of its elements.
    """
    unit = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    return len(fused_modules(model)) * max(2 * unit, WIDTH * torch.finfo(torch.float32).eps)


def distance(got: Tensor, expected: Tensor) -> float:
    difference = float((got.double() - expected.double()).norm())
    return difference and difference / max(float(expected.double().norm()), torch.finfo(torch.float32).tiny)


class Step(NamedTuple):
    """One step, and what hooks saw of it."""

    out: Tensor
    gradients: dict[str, Tensor]
    seen: Seen


def differences(got: Step, expected: Step, of_values: float, of_gradients: float) -> list[str]:
    """Return what of a step is farther from the expected one than the bounds allow."""
    limits = {"in": of_values, "out": of_values, "grad": of_gradients}
    wrong = ["output"] if distance(got.out, expected.out) > of_values else []
    if relative_error(got.gradients, expected.gradients) > of_gradients:
        wrong.append("gradients")
    kinds = [[(what, value.dtype, value.shape) for what, value in each.seen] for each in (got, expected)]
    if kinds[0] != kinds[1]:
        return [*wrong, f"seen {kinds[0]}, expected {kinds[1]}"]
    pairs = zip(got.seen, expected.seen, strict=True)
    return wrong + [f"seen {what}" for (what, a), (_, b) in pairs if distance(a, b) > limits[what]]


def step(model: nn.Module, family: Family, seen: Seen) -> Step:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=family.autocast):
        out = model(family.inputs())
    (out.float() * normal(*out.shape)).sum().backward()
    return Step(out.detach(), gradients(model), seen)


def stepped(
    model: nn.Module, family: Family, part: str, way: Callable[..., None], compress: Callable[..., object], after: bool
) -> Step:
    """Run a step of a model, of which a part meets a way before it is compressed or after."""
    seen: Seen = []
    with ExitStack() as undo:
        if after:
            compress(model)
        way(model, family.inside + part, seen, undo)
        if not after:
            compress(model)
        return step(model, family, seen)


# Each part of a model meets each way in one of these, and each of these with each way and with each part: what a way
# changes is seen as the model is compressed or as it runs, whichever part it is.
WHEN = (("int8", False), ("int8", True), ("lossless", True))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to module")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_step_is_that_of_the_plain_model(family: Family, way: Callable[..., None]) -> None:
    original = built(family)
    wrong = {}
    for number, part in enumerate(family.parts.split(), WAYS.index(way) + list(FAMILIES.values()).index(family)):
        mode, after = WHEN[number % len(WHEN)]
        expected = stepped(copy.deepcopy(original), family, part, way, lambda model: None, True)
        model = copy.deepcopy(original)
        compress = functools.partial(pyactcomp.compress, mode=mode, min_bytes=0)
        got = stepped(model, family, part, way, compress, after)
        limits = (bound(model, family.autocast), GRADIENT_BOUND) if mode == "int8" else (0.0, 0.0)
        if found := differences(got, expected, *limits):
            wrong[part, mode, "after compress" if after else "before"] = found
    assert wrong == {}


class ByHand(nn.Module):
    """A wrapper that calls one part of a model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, name: str, args: Any, named: dict[str, Any]) -> Any:
        """Return the output of a part."""
        return self.model.get_submodule(name)(*args, **named)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def leaf(value: Any) -> Any:
    needs = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if needs else value


def calls_of(model: nn.Module, family: Family) -> dict[str, Call]:
    """Return the arguments of the first call of each part."""
    calls: dict[str, Call] = {}
    for name, part in model.named_modules():
        if name.startswith(family.inside):

            def record(_: nn.Module, args: Any, named: dict[str, Any], name: str = name) -> None:
                of_call = tuple(map(leaf, args)), {key: leaf(value) for key, value in named.items()}
                calls.setdefault(name, of_call)

            part.register_forward_pre_hook(record, with_kwargs=True)
    step(model, family, [])
    return calls


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_part_called_by_a_wrapper_is_that_of_the_plain_model(family: Family, mode: str) -> None:
    plain = ByHand(built(family))
    model = pyactcomp.compress(copy.deepcopy(plain), mode=mode, min_bytes=0)
    limits = (bound(model, family.autocast), GRADIENT_BOUND) if mode == "int8" else (0.0, 0.0)
    calls = calls_of(copy.deepcopy(plain.model), family)
    assert len(calls) > 3
    wrong = {}
    for name, (args, named) in calls.items():
        steps = []
        for each in (model, plain):
            each.zero_grad()
            inputs = tuple(map(leaf, args)), {key: leaf(value) for key, value in named.items()}
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=family.autocast):
                out = first(each(name, *inputs))
            (out.float() * normal(*out.shape)).sum().backward()
            leaves = [t.grad for t in (*inputs[0], *inputs[1].values()) if isinstance(t, Tensor) and t.grad is not None]
            grads = gradients(each) | {str(index): grad for index, grad in enumerate(leaves)}
            steps.append(Step(out.detach(), grads, [("out", out.detach())]))
        if found := differences(*steps, *limits):
            wrong[name] = found
    assert wrong == {}
