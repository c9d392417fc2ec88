"""The table of the models that pyactcomp is not tuned on: int8 beside plain PyTorch and the model's checkpointing."""

from __future__ import annotations

from collections.abc import Iterable

from .rows import GIB, Row, select
from .tables import conditions, figure, latest, on_gpus, reasons, section, table

TITLES = {
    "whisper_medium_amp": "Whisper medium", "maxvit_base_amp": "MaxViT-B", "convnext_base_amp": "ConvNeXt-B",
    "sd15_unet_amp": "UNet of SD 1.5", "gatv2_fp32": "GATv2, 200,000 nodes", "bert_large_fp32": "BERT-large",
    "encoder_amp": "nn.TransformerEncoder", "efficientnet_b4_amp": "EfficientNet-B4",
    "modernbert_base_amp": "ModernBERT", "qwen3_moe_bf16": "Qwen3-MoE", "llama_8b_lora_bf16": "Llama, 8 B, LoRA",
    "wav2vec2_base_amp": "wav2vec 2.0", "detr_resnet50_amp": "DETR", "unet3d_amp": "3-D U-Net",
}  # fmt: skip
STEP, STEP_OF_CHECKPOINTING, KERNELS, HOST_US = 1.10, 0.92, 1.08, 30.0
"""The most that int8 may take: of plain steps, of checkpointed ones, of plain kernels, of the host for each tensor."""
ACTIVATIONS, ACTIVATIONS_BF16 = 0.33, 0.42
"""The most bytes in units of plain activations; 16-bit models have half as many to begin with."""


def _against(value: float | None, most: float, form: str = ".2f") -> str:
    """Return a figure, in bold where it is over its bar."""
    if value is None:
        return ""
    text = format(value, form)
    return f"**{text}**" if value > most else text


def _ratio(row: Row, other: Row, name: str) -> float | None:
    return row[name] / other[name] if name in row and other.get(name) else None


def host_us(row: Row, plain: Row) -> float | None:
    """Return the microseconds that the host takes longer for each saved tensor."""
    if "host_ms" not in row or "host_ms" not in plain or not row.get("saved_tensors"):
        return None
    return float((row["host_ms"] - plain["host_ms"]) * 1e3 / row["saved_tensors"])


def _three(row: Row | None, plain: Row) -> str:
    if row is None:
        return ""
    ratios = (_ratio(row, plain, name) for name in ("median_ms", "act_bytes", "peak_minus_base_bytes"))
    return ", ".join("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def untuned_table(rows: Iterable[Row]) -> str:
    """Return the table; a bold figure is over its bar."""
    measured = [row for row in on_gpus(rows) if row["workload"] in TITLES]
    newest = latest(measured, "gpu", "workload", "method")
    lines, shown = [], []
    for name, title in TITLES.items():
        for gpu in dict.fromkeys(row["gpu"] for row in measured):
            row = newest.get((gpu, name, "int8"))
            plain = select(measured, workload=name, method="vanilla", status="ok", run=row["run"]) if row else []
            if row is None or row["status"] != "ok" or not plain:
                continue
            checkpointed = select(measured, workload=name, method="ckpt", status="ok", run=row["run"])
            other = checkpointed[-1] if checkpointed else None
            shown += [plain[-1], row, *checkpointed[-1:]]
            most = ACTIVATIONS_BF16 if name.endswith("_bf16") else ACTIVATIONS
            lines.append([
                title,
                gpu,
                f"{plain[-1]['median_ms']:.0f} ms, {figure(plain[-1], 'act_bytes', '.1f', GIB)} GiB",
                _against(_ratio(row, plain[-1], "median_ms"), STEP),
                _against(_ratio(row, plain[-1], "act_bytes"), most),
                _against(_ratio(row, plain[-1], "peak_minus_base_bytes"), 1.0),
                _against(_ratio(row, plain[-1], "kernels_ms"), KERNELS),
                _against(host_us(row, plain[-1]), HOST_US, ".0f"),
                str(row.get("saved_tensors", "")),
                figure(row, "grad_error", ".2%"),
                _three(other, plain[-1]),
                "" if other is None else _against(_ratio(row, other, "median_ms"), STEP_OF_CHECKPOINTING),
            ])  # fmt: skip
    failed = [row for key, row in newest.items() if row["status"] not in ("ok", "not applicable")]
    if not lines and not failed:
        return ""
    header = (
        "model", "GPU", "plain PyTorch", "int8: step", "act", "peak", "kernels", "host us", "tensors",
        "gradient error", "checkpointing: step, act, peak", "int8's step / checkpointing's",
    )  # fmt: skip
    note = (
        "Multiples of plain PyTorch in the same run. kernels: the time of all kernels of a step. host us: how much "
        "longer the host takes for a step, for each tensor that pyactcomp saves. Bold: over the bar, which is a step "
        f"of {STEP:.2f} and of {STEP_OF_CHECKPOINTING:.2f} times checkpointing's, activations of {ACTIVATIONS} "
        f"({ACTIVATIONS_BF16} for models in bfloat16), kernels of {KERNELS:.2f}, {HOST_US:.0f} us."
    )
    return section(table(header, lines), note, conditions(shown or failed), reasons([*shown, *failed]))


TABLES = {"frontier-untuned": ("frontier", untuned_table)}
"""The suite and the table of each block."""
