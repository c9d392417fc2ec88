"""Trainings that no rule of the allocator was tuned on, beside those of :mod:`bench.alloc_workloads`."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .alloc_workloads import SEED, WORKLOADS, Step, Workload, make, trainer


class Residual(nn.Module):
    """Two convolutions with group norms around a shortcut, as image diffusion has them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class Denoiser(nn.Module):
    """A U-Net without attention."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            Residual(a + b, b) for a, b in zip([widths[-1], *reversed(widths)], reversed(widths), strict=False)
        )
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.begin(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            beside = kept.pop()
            x = block(torch.cat([F.interpolate(x, size=beside.shape[-2:]), beside], dim=1))
        return self.end(x)


def _diffusion(device: str, tiny: bool) -> Step:
    model = make(device, lambda: Denoiser(8, 2) if tiny else Denoiser(96, 4))
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        if tiny:
            batch, height, width = 2, 16, 24
        else:  # buckets of aspect ratios, with as many images as keep the pixels alike
            height, width = 32 * draw.randint(4, 16), 32 * draw.randint(4, 16)
            batch = max(1, draw.randint(2, 4) * 2**18 // (height * width))
        images = torch.randn(batch, 3, height, width, device=device)
        with torch.autocast(device, torch.bfloat16):
            return finish(F.mse_loss(model(images + torch.randn_like(images)).float(), images))

    return step


def _translation(device: str, tiny: bool) -> Step:
    width, layers, heads, words = (32, 1, 2, 128) if tiny else (768, 6, 12, 32000)
    model = make(
        device,
        lambda: nn.ModuleDict(
            {
                "embed": nn.Embedding(words, width),
                "body": nn.Transformer(width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True),
                "head": nn.Linear(width, words),
            }
        ),
    )
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        source, target = (9, 7) if tiny else (draw.randint(16, 512), draw.randint(16, 512))
        batch = 2 if tiny else max(1, 16384 // max(source, target))
        given = torch.randint(words, (batch, source), device=device)
        wanted = torch.randint(words, (batch, target + 1), device=device)
        embed, body, head = model["embed"], model["body"], model["head"]
        with torch.autocast(device, torch.bfloat16):
            mask = nn.Transformer.generate_square_subsequent_mask(target, device=device)
            out = head(body(embed(given), embed(wanted[:, :-1]), tgt_mask=mask, tgt_is_causal=True))
            return finish(F.cross_entropy(out.float().flatten(0, 1), wanted[:, 1:].flatten(), label_smoothing=0.1))

    return step


class Finder(nn.Module):
    """Looks at regions of an image: a pyramid of maps, and a crop of a fixed size for each region."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip([3, *widths], widths, strict=False)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in widths)
        self.head = nn.Sequential(nn.Linear(width * 49, 8 * width), nn.ReLU(), nn.Linear(8 * width, classes))

    def forward(self, image: Tensor, boxes: Tensor) -> Tensor:
        x, found = image, []
        for level, lateral in zip(self.levels, self.lateral, strict=True):
            x = level(x)
            found.append(lateral(x))
        mixed = found[0] + sum(F.interpolate(each, size=found[0].shape[-2:]) for each in found[1:])
        grid = F.affine_grid(boxes, [len(boxes), 1, 7, 7], align_corners=False)
        crops = F.grid_sample(mixed.expand(len(boxes), -1, -1, -1), grid.to(mixed.dtype), align_corners=False)
        return self.head(crops.flatten(1))


def _detection(device: str, tiny: bool) -> Step:
    width, levels, classes = (8, 2, 5) if tiny else (128, 4, 80)
    model = make(device, lambda: Finder(width, levels, classes))
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        losses = []
        for _ in range(2):  # images of one batch differ in size, and so does the number of their regions
            height, across = (32, 48) if tiny else (32 * draw.randint(12, 32), 32 * draw.randint(12, 32))
            count = 3 if tiny else draw.randint(20, 400)
            boxes = torch.rand(count, 2, 3, device=device) * 0.5
            logits = model(torch.randn(1, 3, height, across, device=device), boxes)
            losses.append(F.cross_entropy(logits, torch.randint(classes, (count,), device=device)))
        return finish(torch.stack(losses).mean())

    return step


HELD_OUT = {
    workload.name: workload
    for workload in (
        Workload(
            "diffusion", _diffusion, 40,
            "U-Net of 4 levels of 96 to 768 channels, bf16 autocast, images of 128 to 512 px a side in every ratio",
        ),
        Workload(
            "translation", _translation, 40,
            "encoder and decoder of 6 layers of 768, bf16 autocast, sources and targets of 16 to 512 tokens, about "
            "16,000 tokens a batch",
        ),
        Workload(
            "detection", _detection, 40,
            "pyramid of 4 maps, fp32, two images of 384 to 1024 px a side, each with 20 to 400 regions",
        ),
    )
}  # fmt: skip
TRAININGS = {**WORKLOADS, **HELD_OUT}
