"""Autograd functions of a user in random training programs: what each keeps for backward, and how."""

from __future__ import annotations

FUNCTIONS = {
    "SavesInput": """
class SavesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()
""",
    "SavesOutput": """
class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)
""",
    "SavesBetween": """
class SavesBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = x.sigmoid()
        ctx.save_for_backward(s, x > 0)
        return x * s

    @staticmethod
    def backward(ctx, g):
        s, positive = ctx.saved_tensors
        return g * s * (1 + positive)
""",
    "TwoOutputs": """
class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, index = x.max(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(x, index)
        return y, index

    @staticmethod
    def backward(ctx, g, _):
        x, index = ctx.saved_tensors
        return torch.zeros_like(x).scatter(-1, index[..., None], g[..., None])
""",
    "InPlace": """
class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.tanh_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)
""",
    "HoldsInput": """
class HoldsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return g * 2 * ctx.x
""",
}
