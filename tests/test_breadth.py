"""Forty architectures of three libraries: lossless is bitwise torch's, int8 within 2 % or as exact as bfloat16."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from breadth_checks import quietly  # noqa: F401

import pyactcomp
from bench.breadth_measure import DROPOUT, MIN_BYTES, differing, error, gradients
from bench.breadth_models import Pair, build
from bench.breadth_report import LIMIT

ARCHITECTURES = {
    "CAUSAL_LM": "apertus bloom deepseek_v3 falcon gemma3_text gpt2 gpt_neox llama mamba mixtral olmo2 phi qwen3",
    "MASKED_LM": "albert bert deberta-v2 modernbert",
    "SEQ_TO_SEQ_CAUSAL_LM": "bart t5",
    "SPEECH_SEQ_2_SEQ": "whisper",
    "IMAGE_CLASSIFICATION": "convnext mobilevit resnet swin vit",
    "OBJECT_DETECTION": "yolos",
    "SEMANTIC_SEGMENTATION": "segformer",
    "CTC": "hubert wav2vec2",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "clip siglip",
    "IMAGE_TEXT_TO_TEXT": "llava qwen2_vl",
}
PAIRS = [
    *(Pair("transformers", name, head) for head, names in ARCHITECTURES.items() for name in names.split()),
    Pair("torch_geometric", "GCN", "model"),
    Pair("torch_geometric", "PNA", "model"),
    Pair("torch_geometric", "GATv2Conv", "convolution"),
    Pair("torch_geometric", "SAGEConv(max)", "convolution"),
    Pair("diffusers", "UNet2DConditionModel", "unet"),
    Pair("diffusers", "DiTTransformer2DModel", "transformer"),
    Pair("diffusers", "AutoencoderKL", "autoencoder"),
]

CASES = [
    pytest.param(
        pair,
        id=str(pair),
        marks=pytest.mark.skipif(find_spec(pair.library) is None, reason=f"{pair.library} is not installed"),
    )
    for pair in PAIRS
]


def test_there_are_forty_architectures() -> None:
    assert len({(pair.library, pair.architecture) for pair in PAIRS}) == 40


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("pair", CASES)
def test_lossless_gradients_are_bitwise_those_of_torch(pair: Pair, dropout: float) -> None:
    step = build(pair, dropout)
    exact = gradients(step)
    plainly = differing(exact, gradients(step))
    assert plainly == 0, "plain torch does not repeat itself"
    pyactcomp.compress(step, mode="lossless", min_bytes=MIN_BYTES)
    losslessly = differing(exact, gradients(step))
    assert losslessly == 0


@pytest.mark.parametrize("pair", CASES)
def test_int8_gradients_are_within_2_percent_or_as_exact_as_bfloat16(pair: Pair) -> None:
    step = build(pair, 0.0)
    exact = gradients(step)
    noise = error(exact, gradients(step, autocast=True))
    pyactcomp.compress(step, min_bytes=MIN_BYTES)
    found = error(exact, gradients(step))
    assert found <= max(LIMIT, noise)
    report = pyactcomp.report(step)
    assert report.stored_bytes < report.unique_bytes
