"""What the suite `context` does about the memory of long sequences: nothing, ours, and the peers."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import pyactcomp
from pyactcomp.errors import ImplementationUnavailableError

from .context_peers import HostInputs

Context = Callable[[], AbstractContextManager[object]]
Apply = Callable[[Any], Context]
PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """``apply(model)`` changes a causal language model, and returns what a step's forward and backward run inside."""

    name: str
    title: str
    apply: Apply
    reruns: int = 0
    """Forwards that backward runs again."""
    own_head: bool = False
    """Whether it computes the model's loss without the logits of the whole sequence."""
    ours: bool = False
    needs_gpu: bool = False
    package: str | None = None
    """What has to be installed."""
    compile_s: float = 0.0
    leaves: float = 0.0
    """Bytes that go to the host, for each token, layer and unit of width: what the host has no room for is not run."""
    input_needs_grad: bool = False
    """Whether a checkpointed block needs an input that requires grad, though all weights before it are frozen."""


def _plain(_: Any) -> Context:
    return nullcontext


def checkpoint(model: Any, **options: Any) -> Context:
    """Checkpoint each block as transformers does."""
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.20
        model.activation_checkpointing_enable({"use_reentrant": False}, **options)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    return nullcontext


def _checkpoint_on_host(model: Any) -> Context:
    return checkpoint(model, offload=True)


def _trl(model: Any) -> Context:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    manager = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return lambda: manager


def _unsloth(model: Any) -> Context:
    checkpoint(model)
    inputs = HostInputs(len(model.model.layers), next(model.parameters()).device)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=inputs)
    return nullcontext


def _deepspeed(model: Any) -> Context:
    from deepspeed.runtime.activation_checkpointing import offload_activations

    checkpoint(model)
    pinned = model.device.type == "cuda"
    manager = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager(pinned, pinned)

    @contextmanager
    def context() -> Iterator[None]:
        with manager:
            yield
            if not manager.stats.offloaded_tensors:
                raise RuntimeError("DeepSpeed offloaded nothing: its patch misses this version of transformers")

    return context


def _liger(model: Any) -> Context:
    from liger_kernel import transformers as liger

    getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    return nullcontext


def _compile_with_budget(budget: float) -> Apply:
    def apply(model: Any) -> Context:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = budget
        # As a whole, transformers gives attention a mask while it is traced: at 128k tokens 16 GiB of it.
        for block in model.model.layers:
            block.compile(dynamic=False)
        return nullcontext

    return apply


def _accepts(function: Callable[..., Any], **options: Any) -> None:
    """Raise if this version's function lacks one of the options."""
    for name in options.keys() - inspect.signature(function).parameters.keys():
        raise ImplementationUnavailableError(
            f"{function.__name__} of pyactcomp {pyactcomp.__version__} has no option {name!r}"
        )


def _compress(**options: Any) -> Apply:
    def apply(model: Any) -> Context:
        _accepts(pyactcomp.compress, **options)
        # On a CPU only the bench itself is tested, with tensors that are not worth a kernel.
        small = {"min_bytes": 1024} if model.device.type == "cpu" else {}
        pyactcomp.compress(model, fuse_head=True, **options, **small)
        return nullcontext

    return apply


def _stored_inputs(**options: Any) -> Apply:
    def apply(model: Any) -> Context:
        _accepts(pyactcomp.use_checkpoint, **options)
        checkpoint(model)
        pyactcomp.use_checkpoint(model, **options)
        return nullcontext

    return apply


def _then_checkpoint(first: Apply) -> Apply:
    def apply(model: Any) -> Context:
        first(model)
        return checkpoint(model)

    return apply


_peer_on_host = functools.partial(Method, reruns=1, leaves=2)
_ligers = functools.partial(Method, own_head=True, needs_gpu=True, package="liger_kernel")
_ours = functools.partial(Method, own_head=True, ours=True)

METHODS = {
    method.name: method
    for method in (
        Method(PLAIN, "plain PyTorch", _plain),
        Method("ckpt", "checkpointing (HF)", checkpoint, reruns=1),
        _peer_on_host("ckpt+offload", "checkpointing, offload=True (HF)", _checkpoint_on_host, needs_gpu=True),
        Method("trl", "activation offload (TRL)", _trl, needs_gpu=True, leaves=60, package="trl"),
        _peer_on_host("unsloth", "checkpointing, Unsloth's way (the bench's)", _unsloth, input_needs_grad=True),
        _peer_on_host(
            "deepspeed", "checkpointing, offload (DeepSpeed)", _deepspeed, needs_gpu=True, package="deepspeed"
        ),
        _ligers("liger", "Liger", _liger),
        _ligers("liger+ckpt", "Liger, checkpointing", _then_checkpoint(_liger), reruns=1),
        # The partitioner runs cheap operators again: no whole forward.
        Method("compile0.5", "compiled blocks, memory budget 0.5", _compile_with_budget(0.5), compile_s=90.0),
        _ours("int8", "pyactcomp int8", _compress()),
        _ours("int8+offload", "pyactcomp int8, offload", _compress(offload="auto"), needs_gpu=True, leaves=11),
        _ours("int8+ckpt", "pyactcomp int8, checkpointing", _then_checkpoint(_compress()), reruns=1),
        _ours(
            "int8+ckpt+offload", "pyactcomp int8, checkpointing, offload", _then_checkpoint(_compress(offload="auto")),
            reruns=1, needs_gpu=True, leaves=1.1,
        ),
        Method(
            "inputs+offload", "checkpointing, use_checkpoint with offload",
            _stored_inputs(store="int8", offload="auto"), reruns=1, ours=True, needs_gpu=True, leaves=1.1,
        ),
        _ours("int8-compiled", "pyactcomp int8, compiled blocks", _compress(compile_blocks=True), compile_s=90.0),
        _ours(
            "int8-compiled+offload", "pyactcomp int8, compiled blocks, offload",
            _compress(compile_blocks=True, offload="auto"), needs_gpu=True, leaves=11, compile_s=90.0,
        ),
    )
}  # fmt: skip


def reason_unavailable(method: Method, device: str) -> str | None:
    """Return why a method cannot run on a device, or None."""
    if method.needs_gpu and device != "cuda":
        return f"needs a GPU, and this is a {device}"
    missing = method.package is not None and importlib.util.find_spec(method.package) is None
    return f"{method.package} is not installed" if missing else None


def apply(method: Method, model: Any) -> Context:
    """Apply a method to a causal language model, or raise ImplementationUnavailableError or ImportError."""
    if method.input_needs_grad and not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()
    return method.apply(model)


def host_peak_bytes() -> int:
    """Return the most bytes of host memory that were pinned: by torch's cache, or by an arena of ours."""
    return max(int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)), pyactcomp.offload.pinned_bytes())
