"""pyactcomp.use_checkpoint: models that others checkpoint hold the inputs of their blocks in codes."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
from exactness_checks import distance
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from trainers import arguments
from works_with import GRADIENT_BOUND, Block, regression

import pyactcomp
from pyactcomp.integrations.transformers import CompressionCallback

transformers = pytest.importorskip("transformers")

WIDTH, TOKENS = 64, 512  # a block's input of 128 KiB in float32, the least that is packed
BLOCKS = 3
reentrant_or_not = pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def llama(use_reentrant: bool | None = None) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        use_cache=False,
        attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


TEXT = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % 64


def of_text(model: nn.Module) -> Tensor:
    return model(input_ids=TEXT, labels=TEXT).loss


class Wrapped(nn.Module):
    """Blocks in torch's wrapper, as torchtitan and accelerate's FSDP leave them."""

    def __init__(self, implementation: CheckpointImpl | None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH // 2, WIDTH)
        made = [Block() for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(
            made if implementation is None else [checkpoint_wrapper(each, implementation) for each in made]
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_regression(model: nn.Module) -> Tensor:
    inputs, targets = regression("cpu", 16)
    return nn.functional.mse_loss(model(inputs), targets)


def transformer_of_diffusers(enable: bool) -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=BLOCKS,
        num_single_layers=1,
        attention_head_dim=WIDTH // 4,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).train()
    if enable:
        model.enable_gradient_checkpointing()
    return model


def of_image(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    image, text, pooled = (torch.randn(*shape, generator=generator) for shape in ((TOKENS, 4), (TOKENS, 32), (32,)))
    out = model(
        hidden_states=image[None],
        encoder_hidden_states=text[None],
        pooled_projections=pooled[None],
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(TOKENS, 3),
        txt_ids=torch.zeros(TOKENS, 3),
    )
    return out.sample.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "llama": (functools.partial(llama, False), of_text),
    "llama reentrant": (functools.partial(llama, True), of_text),
    "wrapper": (functools.partial(Wrapped, CheckpointImpl.NO_REENTRANT), of_regression),
    "wrapper reentrant": (functools.partial(Wrapped, CheckpointImpl.REENTRANT), of_regression),
    "diffusers": (functools.partial(transformer_of_diffusers, True), of_image),
}
every_model = pytest.mark.parametrize("name", MODELS)


def gradients(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> tuple[Tensor, ...]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model).backward()
    return tuple(p.grad.clone() for p in model.parameters() if p.grad is not None)


def functions(model: nn.Module) -> list[Any]:
    """Return what the modules of a model checkpoint with."""
    names = ("_gradient_checkpointing_func", "checkpoint_fn")
    return [vars(module)[name] for module in model.modules() for name in names if name in vars(module)]


@every_model
@pytest.mark.parametrize("compressed", [False, True], ids=["alone", "in lossless compress"])
def test_int8_stays_within_the_bar_and_exact_is_bitwise(name: str, compressed: bool) -> None:
    make, loss_of = MODELS[name]
    model = make()
    before = functions(model)
    exact = gradients(model, loss_of)
    if compressed:
        pyactcomp.compress(model, mode="lossless")
    handle = pyactcomp.use_checkpoint(model)
    assert handle.modules >= 1
    assert 0 < distance(gradients(model, loss_of), exact) <= GRADIENT_BOUND
    pyactcomp.use_checkpoint(model, store="exact")
    assert distance(gradients(model, loss_of), exact) == 0
    if compressed:
        pyactcomp.decompress(model)
        assert functions(model) == before


@every_model
@pytest.mark.parametrize("store", ["int8", "exact"])
def test_block_inputs_live_until_backward_only_if_exact(name: str, store: Any) -> None:
    make, loss_of = MODELS[name]
    model = make()
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == BLOCKS)
    inputs: list[StorageWeakRef] = []

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    # The first input is the embedding's result, which others hold too.
    handles = [block.register_forward_pre_hook(note) for block in blocks[1:]]
    pyactcomp.use_checkpoint(model, store=store)
    loss = loss_of(model)
    gc.collect()
    for handle in handles:
        handle.remove()
    assert [each.expired() for each in inputs] == [store == "int8"] * (BLOCKS - 1)
    loss.backward()


def test_a_handle_gives_back_what_was_there() -> None:
    model = llama(False)
    before = functions(model)
    with pyactcomp.use_checkpoint(model, store="exact") as outer:
        first = functions(model)
        assert first != before
        inner = pyactcomp.use_checkpoint(model, store="int8")
        assert inner.modules == outer.modules
        inner.remove()
        assert functions(model) == first
    assert functions(model) == before
    handle = pyactcomp.use_checkpoint(model)
    model.activation_checkpointing_enable()  # the model's own call since then stays
    mine = functions(model)
    handle.remove()
    assert functions(model) == mine


def test_a_graph_recorded_before_the_removal_runs_backward() -> None:
    model = llama(False)
    pyactcomp.use_checkpoint(model)
    expected = gradients(model, of_text)
    model.zero_grad()
    torch.manual_seed(1)
    with pyactcomp.use_checkpoint(model):
        loss = of_text(model)
    loss.backward()
    assert distance(tuple(p.grad for p in model.parameters()), expected) == 0


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_store_codes_too_and_are_independent(through: str) -> None:
    model = Wrapped(CheckpointImpl.NO_REENTRANT)
    handle = pyactcomp.use_checkpoint(model)
    got = gradients(model, of_regression)
    if through == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        pickle.dump(model, buffer)
        twin = pickle.loads(buffer.getvalue())
    handle.remove()
    assert distance(gradients(twin, of_regression), got) == 0
    assert distance(gradients(model, of_regression), got) > 0


def test_bad_arguments_change_nothing() -> None:
    plain = llama()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_enable\(\) first"):
        pyactcomp.use_checkpoint(plain)
    model = llama(False)
    model.activation_checkpointing_disable()
    with pytest.raises(ValueError, match="found no module of this LlamaForCausalLM that checkpoints"):
        pyactcomp.use_checkpoint(model)
    model.activation_checkpointing_enable()
    before = functions(model)
    with pytest.raises(ValueError, match=r"store must be one of .*, got 'int4'"):
        pyactcomp.use_checkpoint(model, store="int4")
    with pytest.raises(TypeError, match="Module, got function"):
        pyactcomp.use_checkpoint(torch_checkpoint)
    assert functions(model) == before


def test_hooks_inside_the_checkpoint_function_are_refused() -> None:
    model = llama(False)

    def offloads(function: Any, *args: Any) -> Any:  # as transformers with offload=True, which needs a GPU
        with torch.autograd.graph.save_on_cpu():
            return torch_checkpoint(function, *args, use_reentrant=False)

    model._set_gradient_checkpointing(True, offloads)
    pyactcomp.use_checkpoint(model)
    with pytest.raises(pyactcomp.HookConflictError, match="opens saved-tensor hooks of its own"):
        of_text(model)


def test_a_function_that_does_not_checkpoint_some_blocks_saves_their_tensors_exactly() -> None:
    """LLaMA-Factory runs frozen blocks as they are."""
    model = llama(False)
    exact = gradients(model, of_text)
    bound = functions(model)[0]
    frozen = list(model.model.layers)

    @functools.wraps(bound)
    def custom(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if function.args[0] in frozen else bound(function, *args, **kwargs)

    model._set_gradient_checkpointing(True, custom)
    pyactcomp.use_checkpoint(model)
    assert distance(gradients(model, of_text), exact) == 0
    del frozen[1:]
    assert 0 < distance(gradients(model, of_text), exact) <= GRADIENT_BOUND


def test_verify_compares_with_plain_checkpointing() -> None:
    model = Wrapped(CheckpointImpl.NO_REENTRANT)
    exact = gradients(model, of_regression)
    pyactcomp.use_checkpoint(pyactcomp.compress(model))
    error = distance(gradients(model, of_regression), exact)
    inputs, targets = regression("cpu", 16)
    verification = pyactcomp.verify(model, inputs, lambda output: nn.functional.mse_loss(output, targets))
    # The norm of the difference is summed in another order, over fewer than 2**20 elements.
    assert verification.error == pytest.approx(error, rel=2.0**-12)


# Trainers.


made: list[nn.Module] = []


def stored(model: nn.Module) -> list[Any]:
    """Return what use_checkpoint has put into a model."""
    cls = importlib.import_module("pyactcomp.checkpoint").StoredCheckpoint
    return [each for each in functions(model) if isinstance(each, cls)]


def trained(tmp_path: Path, callback: CompressionCallback | None, **more: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    model = llama()
    made.append(model)
    rows = [{"input_ids": row, "labels": row} for row in TEXT]
    trainer = transformers.Trainer(
        model,
        arguments(transformers.TrainingArguments, tmp_path, **more),
        train_dataset=rows,
        callbacks=[callback] if callback else [],
    )
    trainer.train()
    assert not stored(model)
    return tuple(p.detach() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:nothing was compressed:UserWarning")
def test_the_callbacks_keyword(tmp_path: Path) -> None:
    plain = trained(tmp_path, None, gradient_checkpointing=True)
    results = {
        store: trained(tmp_path, CompressionCallback(mode="lossless", checkpoint=store), gradient_checkpointing=True)
        for store in ("exact", "int8")
    }
    assert distance(results["exact"], plain) == 0
    assert distance(results["int8"], plain) > 0
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        trained(tmp_path, CompressionCallback(checkpoint="int8"))
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(made.pop())
    with pytest.raises(ValueError, match="checkpoint must be one of"):
        CompressionCallback(checkpoint="int4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", [None, CheckpointImpl.NO_REENTRANT], ids=["plain", "checkpointed"])
def test_lightnings_keyword(implementation: CheckpointImpl | None) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    compression = importlib.import_module("pyactcomp.integrations.lightning").Compression
    during: list[int] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Wrapped(implementation)

        def training_step(self, batch: Any, index: int) -> Tensor:
            during.append(len(stored(self)))
            return of_regression(self.model)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[compression(checkpoint="int8")], **quiet)
    fit = functools.partial(trainer.fit, module, torch.utils.data.DataLoader(torch.ones(2), batch_size=2))
    if implementation is None:
        with pytest.raises(ValueError, match="checkpoint_wrapper"):
            fit()
    else:
        fit()
    assert during == ([] if implementation is None else [BLOCKS])
    assert stored(module) == []
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(module)
    with pytest.raises(ValueError, match="checkpoint must be one of"):
        compression(checkpoint="int4")


# Two processes.


def ddp(rank: int, backend: str) -> dict[str, Any]:
    """Take one step of each checkpointed model under DDP."""
    results = {}
    for store in ("exact", "int8"):
        torch.manual_seed(0)
        model = Wrapped(CheckpointImpl.NO_REENTRANT)
        pyactcomp.use_checkpoint(model, store=store)
        inputs, targets = (each.chunk(2)[rank] for each in regression("cpu", 32))
        wrapped = nn.parallel.DistributedDataParallel(model)
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        results[store] = tuple(p.grad for p in model.parameters())
    return results


def test_ddp_averages_the_gradients_of_both_processes(tmp_path: Path) -> None:
    first, second = worker.run(ddp, "gloo", 2, tmp_path)
    model = Wrapped(None)
    inputs, targets = regression("cpu", 32)
    parts = [
        gradients(model, lambda m, i=i: nn.functional.mse_loss(m(inputs.chunk(2)[i]), targets.chunk(2)[i]))  # type: ignore[misc]
        for i in range(2)
    ]
    exact = tuple((a + b) / 2 for a, b in zip(*parts, strict=True))
    for store, bound in (("exact", 2.0**-20), ("int8", GRADIENT_BOUND)):
        assert distance(first[store], second[store]) == 0
        assert distance(first[store], exact) <= bound
    assert distance(first["int8"], first["exact"]) > 0
