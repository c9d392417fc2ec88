"""Tables of the suite `breadth`: by family, then every exception, then everything that does not build."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .rows import Row, quantile, select
from .tables import conditions, section, table

LIMIT = 0.02
"""The error over all gradients that int8 may have; where bfloat16's own is larger, that is the limit."""
WORSE = 0.05
"""By how much a pair's stored ratio may grow before the comparison with an earlier file names it."""
FIGURES = ("lossless", "lossless_dropout", "int8", "noise", "int8_ckpt", "int8_head", "ratio")

FAMILIES = {
    "causal LM": ("CAUSAL_LM",),
    "masked LM, text encoders": (
        "MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE",
        "NEXT_SENTENCE_PREDICTION", "TEXT_ENCODING",
    ),
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image or video classification": ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
    "detection, segmentation, depth": (
        "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
        "IMAGE_SEGMENTATION", "DEPTH_ESTIMATION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "POSE_ESTIMATION",
        "MASK_GENERATION", "IMAGE_MATTING", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_TO_IMAGE",
        "MASKED_IMAGE_MODELING", "ZERO_SHOT_OBJECT_DETECTION", "TEXT_RECOGNITION", "TABLE_RECOGNITION",
    ),
    "image and text": (
        "IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING", "MULTIMODAL_LM",
        "DOCUMENT_QUESTION_ANSWERING", "CAUSAL_IMAGE_MODELING",
    ),
    "audio": (
        "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR", "CTC", "SPEECH_SEQ_2_SEQ", "RNNT", "TDT",
        "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM",
    ),
    "time series": ("TIME_SERIES_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION"),
    "pretraining heads": ("PRETRAINING",),
}  # fmt: skip
_FAMILY_OF = {head: family for family, heads in FAMILIES.items() for head in heads}


def name(row: Row) -> str:
    return f"{row['library']}/{row['architecture']}/{row['head']}"


def _family(row: Row) -> tuple[str, str]:
    if row["library"] != "transformers":
        return row["library"], row["head"]
    return row["library"], _FAMILY_OF.get(row["head"], "trunks and other heads")


def number(value: float | str | None) -> float:
    """Return a figure, where "inf" stands for an infinite one and None for none at all."""
    return math.nan if value is None else float(value)


def limit(row: Row, factor: float = 1.0) -> float:
    """Return the error that a pair's int8 gradients may have."""
    noise = number(row.get("noise"))
    return max(LIMIT, factor * noise) if math.isfinite(noise) else LIMIT


def differs(row: Row) -> bool:
    return bool(row.get("lossless") or row.get("lossless_dropout"))


def above(row: Row, figure: str = "int8", factor: float = 1.0) -> bool:
    """Return whether an error exceeds its limit; one that was not measured does not."""
    return number(row.get(figure)) > limit(row, factor)


def exceptional(row: Row) -> bool:
    return differs(row) or above(row) or above(row, "int8_head") or above(row, "int8_ckpt", 2.0)


def _percent(value: float | str | None) -> str:
    found = number(value)
    if math.isnan(found):
        return ""
    return f"{100 * found:.2f} %" if found < 10 else f"{found:.3g} x" if math.isfinite(found) else "**not finite**"


def _bitwise(row: Row, figure: str) -> str:
    value = row.get(figure)
    return "" if value is None else "bitwise" if value == 0 else f"{value:g} of {row['tensors']} differ"


def _values(rows: Iterable[Row], figure: str) -> list[float]:
    return [found for row in rows if not math.isnan(found := number(row.get(figure)))]


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return quantile(finite, 0.5) if finite else None


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the sources that were measured last."""
    return [row for row in rows if row["origin"]["sources"] == rows[-1]["origin"]["sources"]] if rows else []


def _line(label: Sequence[str], rows: Sequence[Row]) -> list[str]:
    built = select(rows, status="ok")
    compared = [row for row in built if row.get("lossless") is not None or row.get("lossless_dropout") is not None]
    errors = _values(built, "int8")
    ckpt = [row for row in built if row.get("int8_ckpt") is not None]
    ratio = _median(_values(built, "ratio"))
    return [
        *label,
        str(len(rows)),
        str(len(built)),
        f"{sum(not differs(row) for row in compared)} of {len(compared)}",
        _percent(_median(errors)),
        _percent(max(errors, default=None)),
        _percent(_median(_values(built, "noise"))),
        str(sum(above(row) for row in built)),
        f"{sum(above(row, 'int8_ckpt', 2.0) for row in ckpt)} of {len(ckpt)}",
        "" if ratio is None else f"{ratio:.2f}",
    ]


def families_table(rows: Sequence[Row]) -> str:
    """Return the table of all families, with a line of everything."""
    found = latest(rows)
    if not found:
        return ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault(_family(row), []).append(row)
    order = list(_FAMILY_OF.values())
    keys = sorted(
        groups, key=lambda key: (key[0] != "transformers", key[0], order.index(key[1]) if key[1] in order else 99)
    )
    header = (
        "library", "family", "pairs", "built", "lossless bitwise", "int8 median", "worst", "bfloat16 median",
        "above limit", "with checkpointing", "ratio median",
    )  # fmt: skip
    lines = [_line(key, groups[key]) for key in keys] + [_line(("all", ""), found)]
    note = (
        "int8: relative L2 error over all gradients of one step. bfloat16: the same error under bfloat16 autocast. "
        f"Above limit: int8 above {100 * LIMIT:g} % and above bfloat16. With checkpointing: above {100 * LIMIT:g} % "
        "and above twice bfloat16. Ratio: bytes held for backward, over the bytes that plain torch holds."
    )
    return section(table(header, lines), note, conditions(found))


def exceptions_table(rows: Sequence[Row]) -> str:
    """Return the table of the pairs that exceed a limit or differ in a bit, worst first."""
    found = [row for row in latest(rows) if row["status"] == "ok" and exceptional(row)]
    if not found:
        return "None." if rows else ""
    worst = sorted(found, key=lambda row: -max(_values([row], "int8") + _values([row], "int8_ckpt"), default=0.0))
    header = ("pair", "lossless", "with dropout", "int8", "bfloat16", "with checkpointing", "fused head", "says")
    lines = [
        [
            f"`{name(row)}`",
            *(_bitwise(row, figure) for figure in ("lossless", "lossless_dropout")),
            *(_percent(row.get(figure)) for figure in ("int8", "noise", "int8_ckpt", "int8_head")),
            _cell("; ".join(f"{figure}: {text}" for figure, text in row.get("problems", {}).items())),
        ]
        for row in worst
    ]
    return table(header, lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def failures_list(rows: Sequence[Row]) -> str:
    """Return what does not build or was not measured, by reason."""
    found: dict[str, list[str]] = {}
    for row in latest(rows):
        if row["status"] != "ok":
            found.setdefault(f"{row['status']}: {row['reason']}", []).append(name(row))
    lines = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    quoted = (
        f"- `` {reason.replace('``', '` `')} ``: {', '.join(f'`{each}`' for each in names)}" for reason, names in lines
    )
    return "\n".join(quoted) or ("None." if rows else "")


def summary(rows: Sequence[Row]) -> str:
    """Return what a run found, in a few lines and lists."""
    built = select(rows, status="ok")
    lists = {
        "lossless differs": [row for row in built if differs(row)],
        f"int8 above max({100 * LIMIT:g} %, bfloat16)": [row for row in built if above(row)],
        f"with checkpointing above max({100 * LIMIT:g} %, 2 bfloat16)": [
            row for row in built if above(row, "int8_ckpt", 2.0)
        ],
        "fused head above the limit": [row for row in built if above(row, "int8_head")],
    }
    ratio = _median(_values(built, "ratio"))
    lines = [
        f"{len(rows)} pairs of {len({(r['library'], r['architecture']) for r in rows})} architectures; built: "
        f"{len(built)} of {len({(r['library'], r['architecture']) for r in built})}; median stored ratio "
        + ("unknown" if ratio is None else f"{ratio:.3f}")
    ]
    lines += [f"{title}: {len(found)}" + "".join(f"\n  {name(row)}" for row in found) for title, found in lists.items()]
    return "\n".join(lines)


def against(rows: Sequence[Row], earlier: Sequence[Row]) -> str:
    """Return the pairs that hold more, by over `WORSE` of what plain torch holds, than in an earlier file."""
    before = {name(row): row for row in earlier if row.get("ratio") is not None}
    worse = []
    for row in latest(rows):
        old = before.get(name(row))
        if old is not None and row.get("ratio") is not None and row["ratio"] - old["ratio"] > WORSE:
            reasons = ", ".join(f"{reason} ({count / 1024:.0f} KiB)" for reason, count in row.get("kept", []))
            worse.append(
                (row["ratio"] - old["ratio"], [f"`{name(row)}`", f"{old['ratio']:.2f}", f"{row['ratio']:.2f}", reasons])
            )
    shared = sum(name(row) in before for row in latest(rows) if row.get("ratio") is not None)
    head = (
        f"{len(worse)} of {shared} pairs hold over {WORSE:g} more of what plain torch holds than in the earlier file."
    )
    lines = [cells for _, cells in sorted(worse, key=lambda item: -item[0])]
    return section(head, table(("pair", "ratio before", "ratio", "kept mostly because"), lines) if lines else "")


TABLES = {
    "breadth": ("breadth", families_table),
    "breadth-exceptions": ("breadth", exceptions_table),
    "breadth-failures": ("breadth", failures_list),
}
"""The suite and the table of each block."""
