"""What is done about saved activations: nothing, ours, and the peers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import codec
from pyactcomp.engine import reasons
from pyactcomp.fusions import fused_modules

from .rows import Row
from .workload import LanguageModelLoss, Objective, Workload

Blocks = list[nn.Module]
Context = Callable[[], AbstractContextManager[object]]
Apply = Callable[[nn.Module, Blocks], Context]

VANILLA = "vanilla"
VANILLA_AGAIN = "vanilla-again"
EXACT = "exact"


def _suits_all(_: Workload) -> str | None:
    return None


def _suits_gpus(_: Workload) -> str | None:
    return None if torch.cuda.is_available() else "offload needs a GPU"


def _suits_llama(workload: Workload) -> str | None:
    return None if workload.liger else "Liger-Kernel has no patch for this architecture"


def _suits_language_models(workload: Workload) -> str | None:
    return None if workload.language_model else "there is no language-model head, so it is int8"


def _suits_blocks(workload: Workload) -> str | None:
    return "the model's own checkpointing takes every block" if workload.checkpoints_itself else None


def _suits_chunked_graphs(workload: Workload) -> str | None:
    suits = workload.language_model or workload.written_loss
    return None if suits else "there is no language-model head, so it is compile+int8"


@dataclass(frozen=True)
class Method:
    """``apply(module, blocks)`` changes the module and returns the context that each forward runs in."""

    name: str
    apply: Apply
    steps: int = 8
    cost: float = 1.5
    """Time of the row in times of the vanilla row, to judge whether it fits into what is left of a budget."""
    compile_s: float = 0.0
    """Seconds beside that, in which code is compiled."""
    compared: bool = False
    """Whether the gradients are compared with the reference's."""
    reference: Apply | None = None
    """What is applied before the gradients compared with are taken: nothing, or the same compilation without us."""
    ours: bool = False
    timed: bool = True
    """False for what only says which gradients agree to the bit."""
    alone: bool = False
    """Whether it needs a process of its own, because it changes more than the model that it is applied to."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that process."""
    unsuitable: Callable[[Workload], str | None] = _suits_all
    """Why a workload has no such row, or None."""


def _vanilla(_: nn.Module, __: Blocks) -> Context:
    return nullcontext


def _checkpoint(every: int) -> Apply:
    """Return gradient checkpointing: the model's own where it brings one, else of every so many blocks."""

    def apply(module: nn.Module, blocks: Blocks) -> Context:
        if isinstance(module, Objective) and module.checkpoint is not None:
            module.checkpoint()
            return nullcontext
        for block in blocks[::every]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return nullcontext

    return apply


def _save_on_cpu(module: nn.Module, _: Blocks) -> Context:
    pinned = next(module.parameters()).is_cuda
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)


def _compile(memory_budget: float | None = None) -> Apply:
    def apply(module: nn.Module, _: Blocks) -> Context:
        if memory_budget is not None:
            import torch._functorch.config

            torch._functorch.config.activation_memory_budget = memory_budget
        module.compile()
        return nullcontext

    return apply


def _compile_fp8(quant_type: str) -> Apply:
    """Return PyTorch's own activation quantisation in the partitioner, with a scale for each row."""

    def apply(module: nn.Module, blocks: Blocks) -> Context:
        import torch._dynamo
        import torch._functorch.config
        import torch._inductor.config

        # The key of AOTAutograd's cache knows nothing of the pass: the graphs would be those of torch.compile alone.
        torch._functorch.config.enable_autograd_cache = False
        torch._inductor.config.post_grad_fusion_options["activation_quantization_aten_pass"] = {
            "quant_type": f"torch.{quant_type}",
            "use_scaling": True,
            # In MiB. At the default, 100, most tensors stay as they are; 0.125 is the default of `compress`.
            "size_in_mb": 0.125,
            "allowed_dtypes": "torch.bfloat16;torch.float16;torch.float32",
            "exclude_primals": True,
            "skip_dynamo_guards": True,
            "quantize_dynamic_shape": True,
        }
        # Dynamo guards no option of Inductor: the graph that gave the reference's gradients would serve.
        torch._dynamo.reset()
        return _compile()(module, blocks)

    return apply


def _then(first: Apply, second: Apply) -> Apply:
    def apply(module: nn.Module, blocks: Blocks) -> Context:
        first(module, blocks)
        return second(module, blocks)

    return apply


def _compile_blocks(_: nn.Module, blocks: Blocks) -> Context:
    import torch._dynamo.config

    # Each shape and variant of a block is compiled for itself; past 8, the default, one would run as it is.
    torch._dynamo.config.recompile_limit = 64
    for block in blocks:
        block.compile(dynamic=False)
    return nullcontext


def _liger(module: Any, _: Blocks) -> Context:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=module.model)
    return nullcontext


def _compress(*, head: bool = True, **options: Any) -> Apply:
    """Return ours; the loss head is fused where there is one, unless told otherwise."""

    def apply(module: nn.Module, _: Blocks) -> Context:
        pyactcomp.compress(module, fuse_head=head and isinstance(module, LanguageModelLoss), **options)
        return nullcontext

    return apply


def _compress_chunked(module: nn.Module, _: Blocks) -> Context:
    pyactcomp.compress(module, fuse_head=True)
    return nullcontext


def _then_checkpoint(first: Apply) -> Apply:
    # In this order: a block whose forward is patched already would not be fused.
    return _then(first, _checkpoint(1))


_ours = functools.partial(Method, cost=3.0, compared=True, ours=True)
# Compiled code draws dropout by a generator of its own: gradients are compared with those of the same compilation.
_compiled = functools.partial(Method, cost=3.0, compile_s=120.0, alone=True, compared=True, reference=_compile())

METHODS = {
    method.name: method
    for method in (
        Method(VANILLA, _vanilla),
        _ours("int8", _compress()),
        _ours("int8-attention", _compress(attention="int8")),
        _ours("int8+offload", _compress(offload=1.0), unsuitable=_suits_gpus),
        _ours("lossless", _compress(mode="lossless", head=False)),
        Method("ckpt", _checkpoint(1)),
        Method("ckpt2", _checkpoint(2), unsuitable=_suits_blocks),
        _ours("int8+ckpt", _then_checkpoint(_compress())),
        Method("liger", _liger, cost=4.0, compared=True, alone=True, unsuitable=_suits_llama),
        Method("liger+ckpt", _then_checkpoint(_liger), cost=4.0, compared=True, alone=True, unsuitable=_suits_llama),
        _ours("int8-nohead", _compress(head=False), unsuitable=_suits_language_models),
        _ours("int8-unfused", _compress(fuse=False, head=False)),
        _ours("int8-g128", _compress(group_size=128)),
        Method("save_on_cpu", _save_on_cpu, steps=3, cost=8.0),
        # Compiled code draws dropout by a generator of its own, so its gradients are not comparable.
        Method("compile", _compile(), compile_s=60.0, alone=True),
        Method("compile0.5", _compile(memory_budget=0.5), compile_s=60.0, alone=True),
        # As a whole, transformers gives attention a mask while it is traced, which keeps it from torch's flash kernel.
        Method("compile-blocks", _compile_blocks, compile_s=40.0, alone=True),
        Method("compile0.3", _compile(memory_budget=0.3), compile_s=60.0, alone=True),
        _compiled("compile+int8", _then(_compress(head=False), _compile()), ours=True),
        _compiled(
            "compile+int8+head", _then(_compile(), _compress_chunked), ours=True, unsuitable=_suits_chunked_graphs
        ),
        _compiled("compile+lossless", _then(_compress(mode="lossless", head=False), _compile()), ours=True),
        # Half of what codes take: about the bytes of a budget of 0.3 without codes.
        _compiled("compile+int8+budget", _then(_compress(head=False), _compile(memory_budget=0.5)), ours=True),
        _compiled("compile-blocks+int8", _compress(compile_blocks=True), reference=_compile_blocks, ours=True),
        _compiled("compile-fp8-e4m3", _compile_fp8("float8_e4m3fn")),
        _compiled("compile-fp8-e5m2", _compile_fp8("float8_e5m2")),
        _ours(
            EXACT, _compress(mode="lossless", head=False), timed=False, alone=True,
            environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
        Method(VANILLA_AGAIN, _vanilla),
    )
}  # fmt: skip
STAGES = (
    (VANILLA, "int8", "lossless", "ckpt"),
    ("int8+ckpt", "liger", "liger+ckpt", EXACT),
    ("ckpt2", "int8-nohead", "int8-unfused", "int8-g128", "int8-attention", "int8+offload"),
    ("save_on_cpu",),
    ("compile",),
    ("compile0.5",),
    ("compile-blocks",),
    ("compile+int8", "compile+int8+head", "compile-blocks+int8", "compile+lossless"),
    ("compile-fp8-e4m3", "compile-fp8-e5m2", "compile0.3", "compile+int8+budget"),
)
"""What to measure first on all workloads, so that a budget that ends early keeps what tells most."""


def implementation(module: nn.Module) -> Row:
    """Return what serves a compressed model: codec, fused modules of each kind, fused functions; and what it stores."""
    device = next(module.parameters()).device
    report = pyactcomp.report(module)
    counted = [tensor for tensor in report.tensors if tensor.kept not in reasons.ALIVE_ANYWAY]
    return {
        "saved_tensors": len(counted),
        "saved_bytes": report.unique_bytes,
        "stored_bytes": report.stored_bytes,
        "codec": codec.resolve("auto", device),
        "fused_modules": dict(Counter(kind for _, kind in fused_modules(module))),
        "functions": "torch" if codec.unavailable_reason("triton", device) else "triton",
    }
