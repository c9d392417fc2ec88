"""What the suite `context` trains: language models in the shapes of published ones, random weights, their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Parameters = Sequence[nn.Parameter]
CHUNK = 2048
"""Tokens whose logits exist at a time."""
RATE = 510e12
"""Operations a second that durations are estimated with: of a step of 64k tokens with LoRA on an H200."""
LORA_RANK = 16


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    architecture: str
    """The prefix of transformers' classes."""
    width: int
    inner: int
    heads: int
    key_value_heads: int
    layers: int
    vocabulary: int
    rope_theta: float
    head_width: int = 128

    @property
    def block_weights(self) -> int:
        """Elements of the matrices of all blocks."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_value_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    def seconds(self, tokens: int, full: bool, reruns: int) -> float:
        """Estimate a step of one sequence at ``RATE``; ``reruns`` counts the forwards that backward runs again."""
        weights = self.block_weights + self.width * self.vocabulary
        forward = 2 * weights * tokens
        attention = 2 * tokens**2 * self.heads * self.head_width * self.layers
        # With frozen weights backward has the products for the inputs alone.
        return ((1 + reruns + (2 if full else 1)) * forward + (3.5 + reruns) * attention) / RATE


SHAPES = {
    "llama8b": Shape("Llama", 4096, 14336, 32, 8, 32, 128256, 500000.0),  # Llama-3.1-8B
    "qwen8b": Shape("Qwen3", 4096, 12288, 32, 8, 36, 151936, 1000000.0),  # Qwen3-8B
}
TINY = {name: Shape(shape.architecture, 64, 128, 4, 2, 3, 512, shape.rope_theta, 16) for name, shape in SHAPES.items()}


def build(shape: Shape, tokens: int, device: str, layers: int | None = None, vocabulary: int | None = None) -> Any:
    """Return a causal language model in training mode; in float32 on a CPU, else in bfloat16."""
    import transformers

    config = getattr(transformers, f"{shape.architecture}Config")(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_width,
        vocab_size=vocabulary or shape.vocabulary,
        max_position_embeddings=max(tokens, 8192),
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32 if device == "cpu" else torch.bfloat16
        )
    return model.train()


def freeze_beside_lora(model: Any) -> None:
    """Freeze a model, and give the matrices of its blocks adapters."""
    import peft

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=targets, init_lora_weights=False)
    # In place, so that what patches the model's class finds it as it was.
    peft.inject_adapter_in_model(config, model)


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of hidden states, by chunks of tokens; the gradients are computed in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grad = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), CHUNK):
            part, target = hidden[begin : begin + CHUNK], labels[begin : begin + CHUNK]
            logits = (part @ weight.t()).float()
            total += F.cross_entropy(logits, target, reduction="sum")
            of_logits = logits.softmax(-1)
            of_logits[torch.arange(len(part), device=part.device), target] -= 1.0
            of_logits = of_logits.div_(len(hidden)).to(part.dtype)
            torch.mm(of_logits, weight, out=grad[begin : begin + CHUNK])
            if grad_weight is not None:
                grad_weight.addmm_(of_logits.t(), part)
        ctx.save_for_backward(grad, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            of_hidden * grad.to(of_hidden.dtype),
            None if of_weight is None else of_weight * grad.to(of_weight.dtype),
            None,
        )


class NextToken(nn.Module):
    """A causal language model that returns its loss.

    Logits of a whole long sequence would fill the card under every method, so all take the loss in chunks: by
    :class:`ChunkedLoss`, or where the method brings its own (``own_head``) by the model itself.
    """

    def __init__(self, model: Any, own_head: bool) -> None:
        super().__init__()
        self.model, self.own_head = model, own_head

    def forward(self, tokens: Tensor) -> Tensor:
        if self.own_head:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        hidden = self.model.model(input_ids=tokens).last_hidden_state
        loss = ChunkedLoss.apply(hidden[:, :-1].flatten(0, 1), self.model.lm_head.weight, tokens[:, 1:].flatten())
        return loss


def _bitsandbytes(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=lr)


def _torchao(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=lr)


EIGHT_BIT: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def _reason_unusable(make: Callable[[Parameters, float], torch.optim.Optimizer], device: str) -> str | None:
    """Return why an optimizer cannot take a step of a small parameter on the device, or None."""
    small = nn.Parameter(torch.zeros(128, 128, device=device, dtype=torch.bfloat16))
    small.grad = torch.ones_like(small)
    try:
        make([small], 1e-3).step()
    except Exception as problem:  # a package may be installed without the kernels of this device
        return f"{type(problem).__name__}: {problem}"[:150]
    return None if bool((small < 0).all()) else "its step left a parameter unchanged"


def adamw_8bit(parameters: Parameters, lr: float, device: str, tiny: bool) -> tuple[torch.optim.Optimizer, str]:
    """Return AdamW with a state of 8 bits, and the package that it is from: the first that works on the device.

    Sizes that test the bench alone fall back to torch's AdamW.
    """
    reasons = {}
    for package, make in EIGHT_BIT.items():
        reason = _reason_unusable(make, device)
        if reason is None:
            return make(parameters, lr), package
        reasons[package] = reason
    if tiny:
        return torch.optim.AdamW(parameters, lr=lr), "torch"
    found = "; ".join(f"{package}: {reason}" for package, reason in reasons.items())
    raise ImportError(f"no package with an 8-bit AdamW works here; install bitsandbytes or torchao ({found})")
