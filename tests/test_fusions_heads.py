"""Models of Hugging Face transformers with the loss head in chunks."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from head_checks import largest_numel
from torch import Tensor, nn
from works_with_text import transformers

import pyactcomp
from pyactcomp.config import Config
from pyactcomp.engine.marks import FUSING
from pyactcomp.functional import linear_cross_entropy, tiles
from pyactcomp.fusions import head as heads
from pyactcomp.fusions import logits as logits_of
from pyactcomp.fusions.fusion import original_of
from pyactcomp.fusions.state import FusionState

VOCABULARY, WIDTH, ROWS = 211, 32, 48
EPS = torch.finfo(torch.float32).eps
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
EXACT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 16}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
GPT2_EXACT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": {**SMALL, "num_key_value_heads": 1},
    "Qwen3ForCausalLM": GROUPED,
    "GemmaForCausalLM": GROUPED,
    # Small caps, so that a head without them gives another loss: logits of these models are about one.
    "Gemma2ForCausalLM": {**GROUPED, "final_logit_softcapping": 0.5},
    "RecurrentGemmaForCausalLM": {
        **SMALL,
        "num_key_value_heads": 1,
        "lru_width": WIDTH,
        "attention_window_size": 16,
        "logits_soft_cap": 0.5,
        "block_types": ["attention"],
    },
    "GPT2LMHeadModel": GPT2 | GPT2_EXACT,
    "BertForMaskedLM": SMALL | EXACT,
    "BertForPreTraining": SMALL | EXACT,
    "RobertaForMaskedLM": SMALL | EXACT | {"pad_token_id": 0},
    "DistilBertForMaskedLM": DISTILBERT | {"dropout": 0.0, "attention_dropout": 0.0},
    "T5ForConditionalGeneration": T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
}


def build(name: str, **settings: Any) -> nn.Module:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**(MODELS[name] | settings))).train()


def fused(model: nn.Module) -> nn.Module:
    """Return a copy with the head in chunks."""
    model = copy.deepcopy(model)
    cls = heads.fused_head_class(model)
    assert cls is not None
    model.__class__ = cls
    FUSING.set(model, FusionState(Config()))
    return model


def batch(name: str = "", **more: Any) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (4, ROWS // 4), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    if name == "BertForPreTraining":
        more["next_sentence_label"] = torch.tensor([0, 1, 0, 1])
    return {"input_ids": ids, "labels": labels, **more}


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model: nn.Module, other: nn.Module, inputs: dict[str, Any], eps: float = EPS) -> None:
    """Compare loss and gradients, which only differ in the order of sums of the loss and of its gradient."""
    loss, got = step(model, inputs)
    expected_loss, expected = step(other, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=(ROWS + VOCABULARY) * eps, atol=0.0)
    assert got.keys() == expected.keys()
    # Some gradients are zero but for rounding, so that all are measured by the largest.
    largest = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((got[name] - gradient).norm()) <= (ROWS + VOCABULARY + WIDTH) * eps * largest, name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return the shapes of the rows that the chunked head was given."""
    seen: list[torch.Size] = []

    def record(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.shape)
        return linear_cross_entropy(x, *args, **kwargs)

    monkeypatch.setattr(logits_of, "linear_cross_entropy", record)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_step_is_that_of_the_model(name: str, calls: list[torch.Size]) -> None:
    model = build(name)
    assert_same_step(fused(model), model, batch(name))
    assert calls == [(ROWS, WIDTH)]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_output_has_no_logits_and_the_rest_of_the_outputs(name: str) -> None:
    model = build(name)
    inputs = batch(output_hidden_states=True)
    output, expected = fused(model)(**inputs), model(**inputs)
    assert type(output) is type(expected)
    assert output.logits is None
    assert list(output) == [key for key in expected if key != "logits"]
    assert len(output.hidden_states) == len(expected.hidden_states)
    values = fused(model)(**inputs, return_dict=False)
    assert len(values) == len(output)
    assert torch.equal(values[0], output.loss)


def test_logits_of_all_rows_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk of 128 rows is the least by itself, and more than the rows of the batch.
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "TILE_BYTES", 8 * 256 * 4)
    for name in ("LlamaForCausalLM", "BertForMaskedLM"):
        model = build(name, max_position_embeddings=ROWS)
        other = fused(model)
        assert largest_numel(lambda: model(**batch()).loss) == ROWS * VOCABULARY  # noqa: B023
        assert largest_numel(lambda: other(**batch()).loss) == 256 * WIDTH  # noqa: B023, the padded weight


@pytest.mark.parametrize("items", [17, torch.tensor(17)])
def test_loss_is_divided_by_the_number_of_items(items: int | Tensor) -> None:
    model = build("LlamaForCausalLM")
    assert_same_step(fused(model), model, batch(num_items_in_batch=items))


def test_labels_that_are_already_shifted() -> None:
    model = build("LlamaForCausalLM")
    inputs = batch()
    shifted = inputs["labels"].roll(-2, 1)
    assert_same_step(fused(model), model, {**inputs, "shift_labels": shifted})


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_tied_weight_is_one_parameter_with_one_gradient(name: str) -> None:
    model = fused(build(name))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    _, gradients = step(model, batch())
    assert sum(g.shape == (VOCABULARY, WIDTH) for g in gradients.values()) == 1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_checkpointed_blocks() -> None:
    model = build("LlamaForCausalLM")
    other = fused(model)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_step(other, model, batch(use_cache=False))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(name: str, autocast: bool) -> None:
    model = build(name)
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, got = step(fused(model), batch())
        expected_loss, expected = step(model, batch())
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(loss, expected_loss, rtol=eps, atol=0.0)
    total = sum(float((got[name].float() - g.float()).square().sum()) for name, g in expected.items())
    assert total**0.5 <= eps * sum(float(g.float().square().sum()) for g in expected.values()) ** 0.5


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model, inputs: model.eval(),
        lambda model, inputs: inputs.pop("labels"),
        lambda model, inputs: setattr(FUSING.get(model), "paused", True),
        lambda model, inputs: model.lm_head.register_forward_hook(lambda *_: None),
        lambda model, inputs: setattr(model, "lm_head", nn.Sequential(model.lm_head)),
    ],
    ids=["evaluation", "no labels", "paused", "hooked", "replaced"],
)
def test_model_runs_as_its_own_class_otherwise(
    prepare: Callable[[nn.Module, dict[str, Any]], Any], calls: list[torch.Size]
) -> None:
    model = build("LlamaForCausalLM")
    inputs = batch()
    other = fused(model)
    prepare(other, inputs)
    expected = model(**inputs)
    output = other(**inputs)
    assert torch.equal(output.logits, expected.logits)
    assert output.loss is expected.loss is None or torch.equal(output.loss, expected.loss)
    assert calls == []


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("change", "in_chunks"),
    [
        (lambda x: torch.tanh(x / 3.0) * 3.0, True),
        (lambda x: 3 * (x.div(3)).tanh(), True),
        (lambda x: torch.mul(nn.functional.tanh(torch.div(x, 3.0)), 3.0), True),
        (lambda x: torch.tanh((x / 3.0).float()) * 3.0, True),
        (lambda x: torch.tanh(x / 3.0) * 2.0, False),
        (lambda x: torch.tanh(x / torch.tensor(3.0)) * 3.0, False),
        (lambda x: torch.tanh(x) * 3.0, False),
        (lambda x: x / 3.0, False),
        (lambda x: torch.tanh(x / 3.0), False),
        (lambda x: torch.div(x, 3.0, rounding_mode="floor"), False),
        (lambda x: torch.tanh(x / -3.0) * -3.0, False),
        (lambda x: 2 * torch.tanh(x / 3.0) * 3.0, False),
    ],
)
def test_capped_logits_are_taken_in_chunks_in_any_spelling(
    change: Callable[[Tensor], Tensor], in_chunks: bool, wide: bool, calls: list[torch.Size]
) -> None:
    head = nn.Linear(WIDTH, VOCABULARY)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = torch.arange(ROWS)
    results = []
    for later in (False, True):
        with logits_of.projecting_later(head, "auto") if later else nullcontext():
            logits = head(rows)
            capped = change(logits.float() if wide else logits)
            assert capped.shape == (ROWS, VOCABULARY)
            loss = nn.functional.cross_entropy(capped.float(), labels)
        results.append((loss, *torch.autograd.grad(loss, [rows, *head.parameters()])))
    for expected, got in zip(*results, strict=True):
        largest = float(expected.detach().abs().max())
        torch.testing.assert_close(got, expected, rtol=0.0, atol=(ROWS + VOCABULARY + WIDTH) * EPS * largest)
    assert calls == [(ROWS, WIDTH)] * in_chunks


def test_capped_logits_that_are_read_are_those_of_the_functions() -> None:
    head, rows = nn.Linear(WIDTH, VOCABULARY), torch.randn(ROWS, WIDTH)
    with logits_of.projecting_later(head, "auto"):
        logits = head(rows)
        capped = torch.tanh(logits / 3.0) * 3.0
        logits.add_(1)  # written after the division: what was divided stays
        read = capped + 0
    expected = nn.functional.linear(rows, head.weight, head.bias)
    assert torch.equal(read, torch.tanh(expected / 3.0) * 3.0)
    assert torch.equal(logits + 0, expected + 1)


def test_head_is_itself_again_after_an_error() -> None:
    model = fused(build("LlamaForCausalLM"))
    inputs = batch()
    inputs["labels"][0, 5] = VOCABULARY
    with pytest.raises(IndexError, match="labels must be"):
        model(**inputs)
    assert model.lm_head(torch.zeros(1, WIDTH)).shape == (1, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "settings", "setting"),
    [
        ("GraniteForCausalLM", {**SMALL, "num_key_value_heads": 1, "logits_scaling": 2.0}, "logits_scaling"),
    ],
)
def test_model_that_changes_its_logits_is_named_and_right_all_the_same(
    name: str, settings: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch, calls: list[torch.Size]
) -> None:
    monkeypatch.setitem(MODELS, name, settings)
    model = build(name)
    assert heads.unsupported_head(model) == f"{name} changes its logits before the loss ({setting})"
    assert heads.fused_head_class(model) is None
    # A model of which no setting tells computes its logits, because it uses them.
    monkeypatch.setattr(heads, "_BETWEEN", ())
    other = fused(model)
    output, expected = other(**batch()), model(**batch())
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    assert calls == []


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Linear(2, 2), "the forward of Linear takes no targets"),
        (lambda: build("LlamaForCausalLM").model, "LlamaModel has no output embeddings"),
        (lambda: hooked(build("LlamaForCausalLM")), "it has a hook"),
        (lambda: with_head(build("LlamaForCausalLM"), nn.Identity()), "Identity: expected nn.Linear"),
    ],
)
def test_reason_why_a_head_is_not_supported(make: Callable[[], nn.Module], match: str) -> None:
    module = make()
    assert match in str(heads.unsupported_head(module))
    assert heads.fused_head_class(module) is None


def hooked(model: nn.Module) -> nn.Module:
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def with_head(model: nn.Module, head: nn.Module) -> nn.Module:
    model.lm_head = head
    return model


def test_class_keeps_the_signature_name_and_state_and_is_copied_and_pickled() -> None:
    model = build("LlamaForCausalLM")
    other = fused(model)
    assert inspect.signature(other.forward) == inspect.signature(model.forward)
    assert type(other).__name__ == "LlamaForCausalLM"
    assert list(other.state_dict()) == list(model.state_dict())
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert type(copied) is type(other)
        assert_same_step(copied, model, batch())
    other.__class__ = original_of(type(other))
    assert type(other) is type(model)


def test_uncomputed_logits_are_logits_to_all_else() -> None:
    rows, weight, bias = torch.randn(2, 3, 4, requires_grad=True), torch.randn(7, 4), torch.randn(7)
    logits = logits_of.Logits.of(logits_of.Projection(rows, weight, bias, "auto"), rows)
    expected = nn.functional.linear(rows, weight, bias)
    assert logits.shape == logits.size() == expected.shape
    assert (logits.size(-1), logits.dim(), logits.device) == (7, 3, expected.device)
    labels = torch.tensor([1, 2, 3, 4, 5, 6])
    flat = expected.view(-1, 7)
    for ours, theirs in (
        (logits - 2, expected - 2),
        (1 + logits, 1 + expected),
        (logits[:, :-1], expected[:, :-1]),
        (torch.cat([logits, expected]), torch.cat([expected, expected])),
        (logits.transpose(1, 2), expected.transpose(1, 2)),
        (logits.view(-1), expected.view(-1)),
        (logits.float().view(6, 7).sum(), expected.sum()),
        (logits.argmax(-1), expected.argmax(-1)),
        *(
            (
                nn.functional.cross_entropy(logits.view(-1, 7), labels, **options),
                nn.functional.cross_entropy(flat, labels, **options),
            )
            for options in ({"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.arange(7.0)})
        ),
    ):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad


def test_a_model_without_a_head_to_fuse_is_refused_and_left_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.GELU())
    with pytest.raises(
        ValueError, match=r"fuse_head=True needs a language model .* got Sequential: .*leave fuse_head out"
    ):
        pyactcomp.compress(model, fuse_head=True)
    assert [type(module) for module in model] == [torch.nn.LayerNorm, torch.nn.GELU]
    assert not model._forward_pre_hooks


def test_a_head_whose_model_was_changed_names_the_change() -> None:
    model = build("LlamaForCausalLM")
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    with pytest.raises(ValueError, match="got LlamaForCausalLM: its forward was replaced"):
        pyactcomp.compress(model, fuse_head=True)
    del model.forward
    with pytest.raises(ValueError, match="got LlamaForCausalLM: it is skipped"):
        pyactcomp.compress(model, fuse_head=True, skip=[type(model)])


def loss_of_written(write: Callable[[Tensor], object], lazy: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 16, generator=generator).requires_grad_()
    weight = torch.randn(10, 16, generator=generator).requires_grad_()
    projection = logits_of.Projection(rows, weight, None, "auto")
    logits = logits_of.Logits.of(projection, rows) if lazy else nn.functional.linear(rows, weight)
    write(logits)
    loss = nn.functional.cross_entropy(logits, torch.arange(8))
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


@pytest.mark.parametrize(
    "write",
    [
        lambda logits: logits.__setitem__((slice(None), 3), -1e4),
        lambda logits: logits.mul_(0.1),
        lambda logits: logits.view(-1, 10).masked_fill_(torch.eye(8, 10, dtype=torch.bool), -1e4),
        lambda logits: logits[:, 3].mul_(0),
    ],
    ids=["index", "mul_", "view", "slice"],
)
def test_what_is_written_to_logits_is_in_the_loss(write: Callable[[Tensor], object]) -> None:
    for ours, theirs in zip(loss_of_written(write, True), loss_of_written(write, False), strict=True):
        assert torch.equal(ours, theirs)


def test_logits_that_an_autograd_function_takes_raise_in_backward() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * x).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.new_zeros(0)

    rows, weight = torch.randn(4, 8).requires_grad_(), torch.randn(6, 8).requires_grad_()
    loss = Square.apply(logits_of.Logits.of(logits_of.Projection(rows, weight, None, "auto"), rows))
    with pytest.raises(pyactcomp.PyactcompError, match="fuse_head=False"):
        loss.backward()


def test_a_loss_outside_the_autocast_of_the_projection_is_eagers() -> None:
    rows, weight = torch.randn(8, 16).requires_grad_(), torch.randn(10, 16).requires_grad_()
    losses = []
    for lazy in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            projection = logits_of.Projection(rows, weight, None, "auto")
            logits = logits_of.Logits.of(projection, rows) if lazy else nn.functional.linear(rows, weight)
        losses.append(nn.functional.cross_entropy(logits.float(), torch.arange(8)))
    assert losses[0].dtype is losses[1].dtype is torch.float32
    # Sums of 16 products rounded to bfloat16, in another order at most.
    torch.testing.assert_close(*losses, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("width", [WIDTH + 1, WIDTH])
def test_a_head_that_does_not_fit_raises_as_that_of_the_model(width: int) -> None:
    """A weight of another width, or of another dtype."""
    model = build("LlamaForCausalLM")
    model.lm_head = nn.Linear(width, VOCABULARY, bias=False, dtype=torch.float64)
    for each in (model, fused(model)):
        with pytest.raises(RuntimeError, match=r"dtype|shapes"):
            each(**batch())
