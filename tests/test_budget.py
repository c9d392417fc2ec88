"""A budget of bytes for each of eleven models: operands of layers in codes, and between layers 16 bits."""

from __future__ import annotations

import pytest
import torch
from budget_models import MODELS
from compiled_backend import gradients
from torch import Tensor, nn

import pyactcomp
from pyactcomp.config import Config

# Statistics of norms and of attention, one number for many elements, gates of whole channels, the router's scores.
SMALL = 1.02
# Of a graph's inputs a leaf lives anyway.
ALIVE = ("an input that is a leaf or needs no gradient", "depends on parameters alone")


def _model(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Return a model, its input, and a parameter that makes the input a result with a gradient."""
    torch.manual_seed(0)
    build, shape, _ = MODELS[name]
    return nn.Sequential(nn.Identity(), build()), [torch.randn(shape), torch.ones(1, requires_grad=True)]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stores_no_more_than_its_budget(name: str) -> None:
    model, (x, one) = _model(name)
    pyactcomp.compress(model, min_bytes=1)
    model(x * one).square().mean().backward()
    report = pyactcomp.report(model)
    budget = MODELS[name][2].bytes(x.numel(), graph=False)
    assert report.stored_bytes <= SMALL * budget, f"{report.stored_bytes / report.unique_bytes:.3f} of autograd's bytes"


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_stores_no_more_than_its_budget(name: str) -> None:
    model, (x, one) = _model(name)
    records = gradients(lambda x, one: model(x * one).square().mean(), [one], Config(min_bytes=1), x, one)[2]
    stored = sum(saved.after for record in records for saved in record.saved if saved.reason not in ALIVE)
    assert stored <= SMALL * MODELS[name][2].bytes(x.numel(), graph=True)
