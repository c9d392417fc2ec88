"""Products of matrices that Inductor pads, where it measures that aligned rows are faster: planned as without pads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from works_with import GRADIENT_BOUND

from pyactcomp.compiled.joint import is_view, name_of
from pyactcomp.config import Config

INT8 = Config(min_bytes=1)
# Windows of 7 by 7 in heads shorter than a group, as in Swin.
TOKENS, HEADS, SIZE, CLASSES = 49, 4, 32, 101

Form = Callable[[Tensor], Tensor]
# The functions of scores: a product with softmax's results takes codes, one without has short sums and takes 16 bits.
FORMS: dict[str, Form] = {
    "softmax": lambda scores: scores.softmax(-1),
    "linear": lambda scores: scores.tril(),
    "sigmoid": torch.sigmoid,
    "dropped softmax": lambda scores: F.dropout(scores.softmax(-1), 0.1),
    "log_softmax": lambda scores: scores.log_softmax(-1).exp(),
}


class Attention(nn.Module):
    """Attention with a bias of each pair of tokens, and a projection on classes whose rows are not aligned."""

    def __init__(self, weigh: Form) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, CLASSES)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.weigh = weigh

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.weigh(q * SIZE**-0.5 @ k.transpose(-2, -1) + self.bias)
        logits = self.head((weights @ v).transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), target)


def step(weigh: Form, config: Config | None) -> tuple[list[Tensor], dict[str, int]]:
    """Return the gradients of parameters, and the bytes that the graph stores in each form."""
    torch.manual_seed(0)
    attention, x = Attention(weigh), torch.randn(8, TOKENS, HEADS * SIZE)
    target = torch.randint(CLASSES, (8 * TOKENS,))
    _, found, records = gradients(attention, list(attention.parameters()), config, x, target)
    stored: dict[str, int] = {}
    for saved in (saved for record in records for saved in record.saved):
        stored[saved.form] = stored.get(saved.form, 0) + saved.after
    return found, stored


@pytest.mark.parametrize("form", FORMS)
def test_what_inductor_pads_takes_no_more_than_without_pads(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import pad_mm

    _, unpadded = step(FORMS[form], INT8)
    products = []

    def unaligned(match: object, first: Tensor, second: Tensor, *others: object, **options: object) -> bool:
        """Stand for the measurement, which takes a GPU."""
        sizes = (*first.shape[-2:], second.shape[-1])
        products.append(any(size % pad_mm.get_alignment_size(first) for size in sizes))
        return products[-1]

    monkeypatch.setattr(pad_mm, "should_pad", unaligned)
    exact, _ = step(FORMS[form], None)
    compressed, padded = step(FORMS[form], INT8)
    assert any(products)
    # The partition may differ, as probabilities can be recomputed from scores or from statistics of their rows.
    assert all(stored <= unpadded[form] for form, stored in padded.items())
    assert off(compressed, exact) <= GRADIENT_BOUND


@pytest.mark.parametrize("number", [0.0, 2.0])
def test_probabilities_beside_another_number_are_none(number: float) -> None:
    graph = make_fx(lambda p: F.pad(p, (0, 3), value=number), tracing_mode="fake")(torch.rand(4, 5)).graph
    (pad,) = (node for node in graph.nodes if name_of(node) == "constant_pad_nd")
    assert is_view(pad) == (number == 0)
