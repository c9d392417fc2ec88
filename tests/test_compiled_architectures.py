"""Architectures of five kinds in compressed graphs; ``python tests/compiled_architectures.py`` draws others."""

from __future__ import annotations

from importlib.util import find_spec

import compiled_architectures
import pytest
from breadth_checks import quietly  # noqa: F401

from bench.breadth_models import Pair

PAIRS = [
    Pair("transformers", "llama", "CAUSAL_LM"),
    Pair("transformers", "convnext", "IMAGE_CLASSIFICATION"),
    Pair("transformers", "wav2vec2", "CTC"),
    Pair("diffusers", "DiTTransformer2DModel", "transformer"),
    Pair("torch_geometric", "PNA", "model"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_architecture_in_compressed_graphs(pair: Pair) -> None:
    if find_spec(pair.library) is None:
        pytest.skip(f"{pair.library} is not installed")
    failures, saved = compiled_architectures.failures(pair)
    assert not failures
    assert saved > 0
