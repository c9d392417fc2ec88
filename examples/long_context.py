"""Sequences of random length: compressed activations, a chunked loss, and an allocator that does not fragment.

On a GPU this trains under pyactcomp's allocator. Without one it replays the sizes that such a training asks for on a
simulated device of the same decisions, under PyTorch's way of growing and under ours.
"""

from __future__ import annotations

import argparse
import random

import torch

import pyactcomp
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice


def train(lengths: list[int], width: int, layers: int) -> None:
    """Train a Llama on sequences of these lengths under the allocator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    pyactcomp.allocator.enable()
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        use_cache=False,
        max_position_embeddings=max(lengths),
    )
    model = pyactcomp.compress(LlamaForCausalLM(config).to("cuda", torch.bfloat16), fuse_head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for length in lengths:
        tokens = torch.randint(32000, (1, length), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = pyactcomp.allocator.stats()
    reserved = f"{stats['reserved_bytes.all.peak'] / 2**30:.2f} GiB reserved, {stats['utilization']:.1%} of it used"
    print(f"{len(lengths)} steps of {min(lengths)} to {max(lengths)} tokens: {reserved}")


def simulate(growth: str, lengths: list[int], width: int, layers: int) -> str:
    """Return what steps of these lengths reserve: each layer keeps some tensors, and backward frees them in turn."""
    allocator = CachingAllocator(SimulatedDevice("1TiB"), AllocatorConfig(growth=growth))
    for length in lengths:
        kept = [allocator.allocate(2 * length * width * factor) for _ in range(layers) for factor in (1, 3, 1, 4, 4)]
        while kept:
            gradient = allocator.allocate(2 * length * width * 4)
            allocator.free(kept.pop())
            allocator.free(gradient)
    reserved, needed = (allocator.stats()[f"{name}_bytes.all.peak"] / 2**30 for name in ("reserved", "allocated"))
    return f"{reserved:.2f} GiB reserved for {needed:.2f} GiB"


def main() -> None:
    """Train where there is a GPU, else simulate."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--longest", type=int, default=32768)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--steps", type=int, default=30)
    arguments = options.parse_args()

    draw = random.Random(0)
    lengths = [draw.randrange(arguments.longest // 16, arguments.longest + 1) for _ in range(arguments.steps)]
    if torch.cuda.is_available():
        train(lengths, arguments.width, arguments.layers)
        return
    for growth, name in (("malloc", "PyTorch's segments"), ("vmm", "pyactcomp")):
        print(f"simulated, {name}: {simulate(growth, lengths, arguments.width, arguments.layers)}")


if __name__ == "__main__":
    main()
