"""Draws the SVG files of the pages: python docs/site/drawings.py, from the repository's root."""

from __future__ import annotations

from pathlib import Path

INK, SOFT, OURS, TINT, GREEN = "#22303c", "#7a8594", "#c8324a", "#faeef0", "#e8f3ec"


def box(
    x: int, y: int, w: int, h: int, *lines: str, fill: str = "#ffffff", stroke: str = SOFT, bold: bool = False
) -> str:
    """Return a box with centred lines of text."""
    weight = ' font-weight="600"' if bold else ""
    top = y + h / 2 - 8 * (len(lines) - 1) + 5
    texts = "".join(
        f'<text x="{x + w / 2}" y="{top + 17 * i}" text-anchor="middle"{weight if i == 0 else ""}>{line}</text>'
        for i, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{stroke}"/>{texts}'


def bar(x: float, y: float, w: float, h: float, fill: str, stroke: str = "none") -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{stroke}"/>'


def arrow(x0: int, y0: int, x1: int, y1: int, color: str = INK) -> str:
    """Return an arrow."""
    return (
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{color}" stroke-width="1.4" marker-end="url(#head)"/>'
    )


def note(x: float, y: float, text: str, anchor: str = "start", color: str = SOFT) -> str:
    """Return a line of small text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" font-size="12">{text}</text>'


def drawing(width: int, height: int, title: str, *parts: str) -> str:
    """Return the file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}" role="img"><title>{title}</title>'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return head + "".join(parts) + "</svg>\n"


def saved() -> str:
    """Return the way of a saved tensor from forward to backward."""
    forms = (
        ("recomputed", "GELU, norms, products: a recipe", "0 bits"),
        ("its shape", "pooling, padding, nll_loss", "0 bits"),
        ("one bit", "leaky_relu, clamp, masks", "1 bit"),
        ("codes", "matmul, convolution, norms", "8.5 bits"),
        ("half precision", "log_softmax, division, q and k", "16 bits"),
        ("itself", "anything not known to need less", "as it is"),
    )
    parts = [
        box(10, 128, 120, 58, "operator", "runs in forward", bold=True),
        arrow(130, 157, 172, 157),
        box(174, 120, 150, 74, "autograd saves", "an operand or", "the result", bold=True),
        arrow(324, 157, 366, 157),
        box(
            368,
            112,
            150,
            90,
            "the reader",
            "the observer finds",
            "the operator, a table",
            "has its need",
            fill=TINT,
            stroke=OURS,
            bold=True,
        ),
    ]
    for i, (name, example, bits) in enumerate(forms):
        y = 10 + 50 * i
        parts += [
            arrow(518, 157, 556, y + 20, OURS),
            box(
                558,
                y,
                112,
                40,
                name,
                bits,
                fill=TINT if i < 5 else "#ffffff",
                stroke=OURS if i < 5 else SOFT,
                bold=True,
            ),
            note(680, y + 24, example),
        ]
    parts.append(
        note(
            10,
            326,
            "Backward restores each tensor when an operator asks, and checks the operator's need against the form.",
        )
    )
    return drawing(890, 340, "A saved tensor and its forms", *parts)


def fused() -> str:
    """Return the tensors held of a gated block, plainly and compressed."""
    names = ("norm's input", "norm's output", "gate", "up", "SiLU(gate)", "product")
    plain = (1, 1, 3, 3, 3, 3)
    ours = (1, 0, 1.6, 0, 0, 0)
    why = (
        "kept as it is",
        "recomputed: one pass",
        "codes, written by the fused pass",
        "recomputed: one product",
        "recomputed from gate",
        "recomputed in one pass",
    )
    parts = [note(110, 22, "plain PyTorch, bfloat16", color=INK), note(430, 22, "int8", color=INK)]
    for i, name in enumerate(names):
        y = 34 + 34 * i
        parts.append(note(100, y + 16, name, "end", INK))
        parts.append(bar(110, y, plain[i] * 90, 22, "#c9d0d8"))
        width = max(ours[i] * 90, 1)
        parts.append(bar(430, y, width, 22, OURS))
        parts.append(note(430 + width + 8, y + 16, why[i]))
    return drawing(820, 244, "Tensors of a Llama's gated MLP, held for backward", *parts)


def segments() -> str:
    """Return segments that fragment, and handles that are mapped instead."""
    parts = [note(10, 20, "PyTorch's allocator: segments cannot change their size", color=INK)]
    x = 10
    for width, used in ((150, 60), (190, 80), (120, 40), (160, 70)):
        parts.append(bar(x, 32, width, 40, "#ffffff", SOFT))
        parts.append(bar(x, 32, used, 40, "#c9d0d8", SOFT))
        x += width + 8
    parts += [
        box(10, 86, 260, 34, "request: fits no free piece", fill=TINT, stroke=OURS),
        arrow(270, 103, 318, 103),
        note(326, 107, "a new segment, or out of memory, with half of the bytes free", color=INK),
        note(
            10,
            160,
            "pyactcomp: whole free handles are mapped one after another, at addresses that cost nothing",
            color=INK,
        ),
    ]
    for i in range(16):
        used = i in (0, 1, 5, 6, 10, 11)
        parts.append(bar(10 + i * 40, 172, 36, 40, "#c9d0d8" if used else GREEN, SOFT))
    for i, j in ((2, 0), (3, 1), (4, 2), (7, 3), (8, 4), (9, 5)):
        parts.append(arrow(28 + i * 40, 212, 28 + j * 40, 250, OURS))
        parts.append(bar(10 + j * 40, 252, 40, 36, TINT, OURS))
    parts += [note(266, 275, "the same request: one range, six handles that were free", color=INK)]
    return drawing(720, 300, "Segments and mapped handles", *parts)


if __name__ == "__main__":
    for name, draw in (("saved", saved), ("fused", fused), ("segments", segments)):
        Path("docs", f"drawing_{name}.svg").write_text(draw(), encoding="utf-8")
