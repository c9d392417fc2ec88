"""What random training programs do besides assigning expressions: edits, modules and a user's autograd functions.

Names in braces are those of ``programs_rows``.
"""

from __future__ import annotations

# Made to be written to: most products and sums may be, what others are computed again from may not.
FRESH = [
    "{x} * {c}",
    "{x} + {y}",
    "{x} * {y}",
    "{x} + {w}",
    "{x} * {w}",
    "{x}.clone()",
    "{x}.to(torch.bfloat16)",
    "F.gelu({x} * {c})",
    "F.silu({x} * {c})",
    "{p} * {c}",
    "{p}.to(torch.bfloat16)",
]

# Written to in place. A row starts with the statement's tensor, and assigns nothing. None goes through ``.data``, which
# no version counter sees: ``pyactcomp.verify`` finds what such an edit does.
EDITS = [
    "{f}.add_({y})",
    "{f}.mul_({c})",
    "{f}.mul_({y})",
    "{f}.relu_()",
    "{f}.clamp_(-{c}, {c})",
    "{f}.masked_fill_({mask}, {c})",
    "{f}.copy_({y})",
    "{f}.exp_()",
    "{f}.sigmoid_()",
    "{f}.tanh_()",
    "{f}.zero_()",
    "{f}.div_({pos})",
    "{f}.addcmul_({y}, {z})",
    "{f}.index_put_(({i0},), {y}[{i0}])",
    "{f}.index_add_({d}, torch.arange({n}).flip(0), {y})",
    "{f}.scatter_({d}, {cells}, {y})",
    "{f}.narrow({d}, {start}, {k}).mul_({c})",
    "{f}.select({d}, {at}).copy_({c} * {y}.select({d}, {at}))",
    "{f}[..., 0] = {c}",
    "{f}[::2] += {c}",
    "{f}[{mask}] = 0",
    "{f}.transpose({d}, {other}).relu_()",
    "{f}.view(-1)[::2].relu_()",
    "{f}.unsqueeze(0).mul_({c})",
    "F.relu({f}, inplace=True)",
    "F.leaky_relu_({f}, 0.1)",
    "F.elu_({f})",
    "F.dropout({f}, {q}, inplace=True)",
    "F.silu({f}, inplace=True)",
    "{f}.transpose_({d}, {other})",
    "{f}.detach().mul_({c})",
]

# Written to under no_grad, mostly what was just made.
SILENT_EDITS = [
    "{f}.clamp_(-0.5, 0.5)",
    "{f}.mul_({c})",
    "{f}.copy_({f}.round())",
    "{f}[..., 0] = 0",
    "{f}.t_()",
    "{p}.add_(0.1)",
    "{f}.normal_()",
]

# Modules: the call, with the module's name for {module}, and what makes the module.
MODULES = [
    ("{module}({x})", "nn.Linear({last}, {out})"),
    ("{module}({x})", "nn.Linear({last}, {last}, bias=False)"),
    ("{module}({x})", "nn.Sequential(nn.Linear({last}, 12), nn.ReLU(inplace=True), nn.Linear(12, {last}))"),
    ("{module}({x})", "nn.Sequential(nn.LayerNorm({last}), nn.Linear({last}, 12), nn.GELU(), nn.Linear(12, {last}))"),
    ("{module}({x})", "nn.Sequential(nn.RMSNorm({last}, eps=1e-6), nn.Linear({last}, 12), nn.SiLU())"),
    ("{module}({x})", "nn.LayerNorm({last})"),
    ("{module}({x})", "nn.RMSNorm({last}, eps=1e-6)"),
    ("{module}({x})", "nn.RMSNorm({last})"),
    ("{module}({x})", "nn.Dropout({q})"),
    ("{module}({x})", "nn.Sequential(nn.Dropout({q}), nn.Linear({last}, {last}))"),
    ("{module}({x})", "nn.{activation}()"),
    ("{module}({x} * {c})", "nn.{activation}()"),
    ("{module}({v2})", "nn.BatchNorm1d({last})"),
    ("{module}({v4})", "nn.Sequential(nn.Conv2d({channels}, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())"),
    ("{module}({v4})", "nn.Sequential(nn.Conv2d({channels}, 4, 3, bias=False), nn.ReLU6(), nn.MaxPool2d(2))"),
    # Torch 2.13 crashes on the gradient of its bias alone where the input lies channels last; ``contiguous`` leaves one
    # pixel as it lies.
    ("{module}({v4}.clone(memory_format=torch.contiguous_format))", "nn.GroupNorm(1, {channels})"),
    ("{module}({v3}, {v3}, {v3})[0]", "nn.MultiheadAttention({last}, 1, batch_first=True)"),
    ("{module}({v3}, {y}, {z}, need_weights=False)[0]", "nn.MultiheadAttention({last}, 1, dropout=0.1)"),
    ("{module}({v3})[0]", "nn.LSTM({last}, 5, batch_first=True)"),
    ("{module}({v3})[0]", "nn.GRU({last}, 5)"),
    ("{module}({v3})", "nn.TransformerEncoderLayer({last}, 1, 12, batch_first=True)"),
    ("{module}({v3})", "nn.TransformerEncoderLayer({last}, 1, 12, norm_first=True, activation='gelu')"),
    ("{module}({v2}.argsort(-1) % 16)", "nn.Embedding(16, 6)"),
]
ACTIVATIONS = (
    "GELU ReLU SiLU Mish ELU SELU CELU LeakyReLU PReLU RReLU Hardtanh ReLU6 Hardswish Hardsigmoid Softplus Softsign "
    "Tanhshrink Softshrink Hardshrink LogSigmoid Tanh Sigmoid"
).split()

# Autograd functions of a user: what each keeps for backward, and how.
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
