"""A model of three billion weights on a card of 24 GiB: from float32 and AdamW step by step, and what each step costs.

The model has the shapes of Llama-3.2-3B and random weights. Each row of the table adds one flag to the row above and is
run in a process of its own: first with the allocator capped to ``--cap``; if that runs out of memory, without the cap,
so that the row has a time. Weights, gradients and optimizer state are computed from the weights' number and dtypes; the
rest is measured. Without a GPU, or with ``--tiny``, a small model runs the same steps, and what a forward keeps is
counted by pyactcomp's report.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pyactcomp

GIB = 2**30
# The flags in the order in which the rows add them, and what a user pays for each.
STEPS = {
    "float32": "the first form: float32 weights, torch's AdamW",
    "bf16": "updates are rounded to 8 bits of mantissa",
    "adam8bit": "both moments are rounded to 8 bits, in blocks of 256",
    "int8": "gradients are off by up to 2 % of their norm",
    "offload": "pinned memory of the host, and its link",
    "update-in-backward": "no accumulation and no clipping over all gradients",
    "checkpoint": "each block's forward runs twice",
}
SIZES = {
    False: {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    True: {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
}  # fmt: skip


def size(text: str) -> int:
    """Return the bytes of a size such as 24GiB."""
    for unit, factor in {"GiB": GIB, "GB": 10**9}.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise argparse.ArgumentTypeError(f"{text!r}: write a size such as 24GiB or 80GB")


def reason_left_out(name: str, tiny: bool) -> str | None:
    """Return why a row cannot be run here, or None."""
    if name == "adam8bit" and not any(map(importlib.util.find_spec, ("bitsandbytes", "torchao"))):
        return "needs bitsandbytes or torchao"
    if name == "offload" and "offload" not in inspect.signature(pyactcomp.compress).parameters:
        return f"pyactcomp {pyactcomp.__version__} has no offload"
    return "needs a GPU" if name == "offload" and tiny else None


def optimizer_of(flags: list[str], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the flags ask for."""
    if "adam8bit" not in flags:
        return torch.optim.AdamW(parameters, lr=1e-5)
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-5)
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-5)


def build(flags: list[str], tiny: bool, tokens: int, device: str) -> Any:
    """Return the model in the form that the flags ask for."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[tiny], tie_word_embeddings=True, max_position_embeddings=tokens, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16 if "bf16" in flags else torch.float32
        )
    model.train()
    if "int8" in flags:
        offload: dict[str, Any] = {"offload": "auto"} if "offload" in flags else {}
        pyactcomp.compress(model, fuse_head=True, min_bytes=1024 if tiny else 128 * 1024, **offload)
    if "checkpoint" in flags:
        if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.20
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def kept_by_a_forward(model: Any, flags: list[str], batch: torch.Tensor) -> int:
    """Return the bytes that a forward keeps for backward, by the report: of a plain model, what autograd would hold."""
    if "int8" in flags:
        return pyactcomp.report(model).stored_bytes
    pyactcomp.compress(model, mode="lossless", fuse=False, min_bytes=0)
    model(input_ids=batch, labels=batch)
    kept = pyactcomp.report(model).unique_bytes
    pyactcomp.decompress(model)
    return kept


def run(flags: list[str], tiny: bool, tokens: int, cap: int | None) -> dict[str, Any]:
    """Train some steps in this process, and return what they took."""
    device = "cuda" if torch.cuda.is_available() and not tiny else "cpu"
    if device == "cuda" and cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    model = build(flags, tiny, tokens, device)
    parameters = list(model.parameters())
    batch = torch.randint(SIZES[tiny]["vocab_size"], (1, tokens), device=device)
    finish = [optimizer_of(flags, parameters)] if "update-in-backward" not in flags else []
    for parameter in parameters if not finish else []:
        own = optimizer_of(flags, [parameter])

        def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    times, kept = [], 0
    for number in range(3 if tiny else 6):
        if device == "cuda" and number == 2:
            torch.cuda.reset_peak_memory_stats()
        begin, before = time.perf_counter(), torch.cuda.memory_allocated() if device == "cuda" else 0
        loss = model(input_ids=batch, labels=batch).loss
        kept = torch.cuda.memory_allocated() - before if device == "cuda" else 0
        loss.backward()
        for optimizer in finish:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - begin)
    weights = sum(p.numel() for p in parameters)
    width = parameters[0].element_size()
    # A gradient that is used at once leaves no other beside it than that of the largest parameter.
    gradients = max(p.numel() for p in parameters) if "update-in-backward" in flags else weights
    return {
        "weights": weights * width,
        "gradients": gradients * width,
        "optimizer": weights * (2 if "adam8bit" in flags else 2 * width),
        "activations": kept if device == "cuda" else kept_by_a_forward(model, flags, batch),
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "seconds": statistics.median(times[2:]),
    }


def answer(flags: list[str], tiny: bool, tokens: int, cap: int | None, to: Connection) -> None:
    """Run a row, and send what it took, or what failed."""
    try:
        to.send(run(flags, tiny, tokens, cap))
    except Exception as problem:
        to.send({"failed": f"{type(problem).__name__}: {problem}"})


def child(flags: list[str], tiny: bool, tokens: int, cap: int | None) -> dict[str, Any]:
    """Run a row in a process of its own: without a GPU a copy of this one, which has imported everything."""
    context = multiprocessing.get_context("fork" if tiny and not torch.cuda.is_available() else "spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(flags, tiny, tokens, cap, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {}
    process.join()
    return found or {"failed": f"exit code {process.exitcode}"}


def row(name: str, flags: list[str], tiny: bool, tokens: int, cap: int) -> str:
    """Return a row of the table."""
    found, fits = child(flags, tiny, tokens, cap), "yes"
    if found.get("failed", "").startswith("OutOfMemoryError"):
        found, fits = child(flags, tiny, tokens, None), "no"
    if "failed" in found:
        return f"{name:20} not run: {found['failed'][:90]}"
    unit = 2**20 if tiny else GIB
    parts = [found[column] for column in ("weights", "gradients", "optimizer", "activations")]
    figures = "".join(f"{part / unit:12.2f}" for part in parts)
    peak = "-" if found["peak"] is None else f"{found['peak'] / unit:.2f}"
    fits = "-" if found["peak"] is None else fits
    rate = tokens / found["seconds"]
    return f"{name:20}{figures}{sum(parts) / unit:10.2f}{peak:>10}{fits:>6}{rate:10.0f}   {STEPS[name]}"


def main() -> None:
    """Print the table, a row a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=size, default=size("24GiB"), help="of the allocator, by default 24GiB")
    parser.add_argument("--tokens", type=int, help="of the one sequence a step, by default 4096")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, as without a GPU")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"rows, of {', '.join(STEPS)}")
    options = parser.parse_args()
    chosen = options.steps.split(",")
    if unknown := set(chosen) - set(STEPS):
        parser.error(f"unknown step {sorted(unknown)}; known: {', '.join(STEPS)}")
    if "offload" in chosen and "int8" not in chosen[: chosen.index("offload")]:
        parser.error("offload moves codes: put int8 before it")
    tiny = options.tiny or not torch.cuda.is_available()
    tokens = options.tokens or (256 if tiny else 4096)
    print(f"in {'MiB' if tiny else 'GiB'}")
    print("computed: weights, gradients, optimizer, and the sum of the four; measured: peak and tokens/s")
    print(f"activations, at the end of a forward: {'counted by the report' if tiny else 'measured'}")
    parts = "".join(f"{part:>12}" for part in ("weights", "gradients", "optimizer", "activations"))
    print(f"{'each row adds':20}{parts}{'sum':>10}{'peak':>10}{'fits':>6}{'tokens/s':>10}   cost")
    flags: list[str] = []
    for name in chosen:
        if reason := reason_left_out(name, tiny):
            print(f"{name:20} left out, here and below: {reason}")
            continue
        flags.append(name)
        print(row(name, flags, tiny, tokens, options.cap), flush=True)


if __name__ == "__main__":
    main()
