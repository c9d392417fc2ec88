"""The report on the saved tensors of one forward: sizes by module, and reasons for uncompressed tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from .compiled.graphs import GraphRecord
from .compiled.marks import graphs_of
from .compress import Compressed, compressed_model
from .engine import reasons
from .engine.offloading import Sample
from .engine.record import SavedTensor, of_graph
from .engine.session import Session
from .errors import PyactcompError
from .fusions import fused_modules, left_alone
from .model_hooks import session_of
from .sizes import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODULE_ROWS = 20


@dataclass
class Line:
    """Sums over saved tensors, in bytes."""

    name: str
    tensors: int = 0
    saved_bytes: int = 0
    unique_bytes: int = 0
    stored_bytes: int = 0
    restored_bytes: int = 0
    host_bytes: int = 0

    def add(self, tensor: SavedTensor) -> None:
        """Add a tensor to the sums."""
        self.tensors += 1
        self.saved_bytes += tensor.saved_bytes
        self.unique_bytes += tensor.unique_bytes
        self.stored_bytes += tensor.stored_bytes
        self.restored_bytes += tensor.restored_bytes
        self.host_bytes += tensor.stored_bytes if tensor.where == "host" else 0

    @property
    def ratio(self) -> float | None:
        """Stored over unique bytes, what is held over what plain PyTorch would hold; None of nothing."""
        return self.stored_bytes / self.unique_bytes if self.unique_bytes else None


@dataclass(frozen=True)
class Report:
    """The saved tensors of one forward.

    Attributes
    ----------
    tensors : tuple of SavedTensor
        One record for each tensor saved by autograd, in order, and for each value that a run of a compressed graph
        saves; empty before the first step. Of a model that runs as compiled graphs alone, each graph counts once.
    note : str
        Why nothing was recorded or compressed; else empty.
    gradient_bytes : dict of str to int
        Bytes of the gradients of each module's own parameters.
    fused : tuple of (str, str)
        The modules running through a fused function, by name, with the name of the fused form.
    left_alone : tuple of (str, str, str)
        Name, class and reason for each module with a fused form but not running through it: foreign hooks, a changed
        forward.
    graphs : tuple of GraphRecord
        The graphs compiled by torch.compile and compressed, with every value that each saves for backward.
    offloaded : tuple of str
        What left each device under ``offload``, in all steps so far; see also :func:`pyactcomp.offload.statistics`.
    window_bytes : int
        The stored bytes that ``offload`` leaves on the devices, at most.
    step : dict of str to sequence of Sample
        By device, what lay where during the last step under ``offload``; :meth:`plot` draws it.

    Notes
    -----
    The totals leave out parameters, buffers and other leaves, which are alive whether saved or not; see :attr:`kept`
    for their sums. ``unique_bytes`` is the memory that autograd alone would have held, each storage counted once.
    ``stored_bytes`` is the memory held instead. ``restored_bytes`` is the memory allocated by backward to restore the
    tensors of a module, at most all at once.
    """

    tensors: tuple[SavedTensor, ...]
    note: str = ""
    gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    fused: tuple[tuple[str, str], ...] = ()
    left_alone: tuple[tuple[str, str, str], ...] = ()
    graphs: tuple[GraphRecord, ...] = ()
    offloaded: tuple[str, ...] = ()
    window_bytes: int = 0
    step: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    _total: Line = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total = Line("total")
        for tensor in self.tensors:
            if tensor.kept not in reasons.ALIVE_ANYWAY:
                total.add(tensor)
        object.__setattr__(self, "_total", total)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by autograd; a tensor saved twice counts twice."""
        return self._total.saved_bytes

    @property
    def unique_bytes(self) -> int:
        """Bytes of the storages kept alive by autograd without compression."""
        return self._total.unique_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes held for backward."""
        return self._total.stored_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes held for backward on the host: ``stored_bytes`` has them too."""
        return self._total.host_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper estimate of the bytes held by a step on top of the model.

        While backward runs in a module, memory holds the stored tensors of this and all earlier modules, the restored
        tensors of this module, two restored tensors shared with neighbours, the incoming and outgoing gradients (taken
        to be as large as the module's saved tensors), and the parameter gradients of the later modules. Of the bytes
        that leave for the host, at most a window is on the device.
        """
        stored = peak = 0
        shared = sorted((t.restored_bytes for t in self.tensors if t.kept not in reasons.ALIVE_ANYWAY), reverse=True)
        later_gradients = sum(self.gradient_bytes.values())
        for line in self.modules:
            stored += line.stored_bytes - line.host_bytes
            peak = max(peak, stored + line.restored_bytes + line.saved_bytes + later_gradients)
            later_gradients -= self.gradient_bytes.get(line.name, 0)
        return peak + sum(shared[:2]) + min(self.host_bytes, self.window_bytes)

    @property
    def modules(self) -> tuple[Line, ...]:
        """Sums for each module with saved tensors, in the order of the forward."""
        return self._lines(lambda tensor: tensor.module, alive_anyway=False)

    @property
    def kept(self) -> tuple[Line, ...]:
        """Sums of the uncompressed tensors, for each reason."""
        return self._lines(lambda tensor: tensor.kept, alive_anyway=True)

    def _lines(self, key: Callable[[SavedTensor], str | None], *, alive_anyway: bool) -> tuple[Line, ...]:
        lines: dict[str, Line] = {}
        for tensor in self.tensors:
            name = key(tensor)
            if name is not None and (alive_anyway or tensor.kept not in reasons.ALIVE_ANYWAY):
                lines.setdefault(name, Line(name)).add(tensor)
        return tuple(lines.values())

    def _by_size(self) -> list[tuple[str, Line, tuple[Line, ...]]]:
        """Return the rows of tables: title, sums and modules; the smallest modules together in the last row."""
        largest = sorted(self.modules, key=lambda line: -line.unique_bytes)
        rows: list[tuple[str, Line, tuple[Line, ...]]] = [
            (line.name or "(root)", line, (line,)) for line in largest[:_MODULE_ROWS]
        ]
        if others := tuple(largest[_MODULE_ROWS:]):
            sums = Line("", *(sum(getattr(line, name) for line in others) for name in _SUMS))
            rows.append((f"({len(others)} more modules)", sums, others))
        return rows

    def _parts(self) -> Iterator[str | _Cells]:
        """Yield what is shown, in order: text, and tables as rows of cells."""
        if self.note:
            yield self.note
        if self.tensors:
            rows = [(title, line) for title, line, _ in self._by_size()]
            yield _cells("module", [*rows, ("total", self._total)], on_host=self.host_bytes > 0)
            yield "\n".join(self._sentences())
            if self.kept:
                yield _cells("not compressed because", [(line.name, line) for line in self.kept])
        yield from map(str, self.graphs)

    def _sentences(self) -> Iterator[str]:
        yield f"A step holds at most about {self.peak_bytes / 2**20:.0f} MiB on top of the model."
        if self.fused:
            kinds = Counter(kind for _, kind in self.fused)
            yield "Fused: " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items()) + "."
        yield from self.offloaded
        for name, kind, reason in self.left_alone[:_MODULE_ROWS]:
            yield f"Not fused: {name or '(root)'}, {kind}: {reason}."

    def __str__(self) -> str:
        return "\n\n".join(part if isinstance(part, str) else _aligned(part) for part in self._parts())

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return "".join(
            f'<p style="white-space: pre-wrap">{escape(part)}</p>' if isinstance(part, str) else _html(part)
            for part in self._parts()
        )

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the bytes of each module, and below, under ``offload``, the bytes of the last step in time.

        A bar shows what is held for a module: coded (in 16 bits or fewer), kept, or on the host; then, pale, what is
        recomputed and not held. A line shows what plain PyTorch would hold.

        Parameters
        ----------
        path : str or Path, optional
            Where to write the picture: a name that matplotlib knows, such as ``"step.png"``.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it once ``matplotlib.pyplot`` is imported.

        Raises
        ------
        PyactcompError
            If nothing was recorded so far, or matplotlib is not installed.
        """
        if not self.modules:
            raise PyactcompError("there is nothing to draw: run a training step before report()")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise PyactcompError("the picture is drawn with matplotlib; run: pip install matplotlib") from None

        rows = self._by_size()
        steps = {device: samples for device, samples in self.step.items() if samples}
        heights = [1.2 + 0.25 * len(rows), *(3.6 for _ in steps)]
        figure = Figure(figsize=(10, sum(heights)), dpi=150, layout="constrained")
        bars, *curves = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
        self._draw_modules(bars, rows)
        for axes, (device, samples) in zip(curves, steps.items(), strict=True):
            _draw_step(axes, device, samples)
        if path is not None:
            figure.savefig(path)
        return figure

    def _draw_modules(self, axes: Any, rows: Sequence[tuple[str, Line, tuple[Line, ...]]]) -> None:
        row_of = {line.name: index for index, (_, _, lines) in enumerate(rows) for line in lines}
        widths = {part: [0] * len(rows) for part, _ in _BARS}
        for tensor in self.tensors:
            if tensor.kept not in reasons.ALIVE_ANYWAY:
                part, size = _bar_of(tensor)
                widths[part][row_of[tensor.module]] += size
        scale, unit = unit_of(max(line.unique_bytes for _, line, _ in rows))
        left = [0.0] * len(rows)
        for part, colour in _BARS:
            sizes = [size / scale for size in widths[part]]
            if any(sizes):
                axes.barh(range(len(rows)), sizes, left=left, color=colour, label=part)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        plain = [line.unique_bytes / scale for _, line, _ in rows]
        axes.scatter(plain, range(len(rows)), marker="|", s=120, color="#222222", label="plain PyTorch", zorder=3)
        axes.set_yticks(range(len(rows)), [title for title, _, _ in rows])
        axes.set(xlabel=unit, xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


_BARS = (("coded", "#2e6f95"), ("kept", "#e3c567"), ("on the host", "#8d3b72"), ("recomputed, not held", "#e5e7eb"))


def _bar_of(tensor: SavedTensor) -> tuple[str, int]:
    """Return which part of a bar shows a tensor, and the bytes there."""
    if tensor.kept in reasons.HOLDS_NOTHING:
        return "recomputed, not held", tensor.unique_bytes
    if tensor.where == "host":
        return "on the host", tensor.stored_bytes
    return "coded" if tensor.kept is None else "kept", tensor.stored_bytes


def _draw_step(axes: Any, device: str, samples: Sequence[Sample]) -> None:
    scale, unit = unit_of(max(max(each[1:]) for each in samples))
    for name, text in _PLOTTED:
        values = [getattr(each, name) / scale for each in samples]
        if any(values):
            axes.step(range(len(values)), values, where="post", label=text.format(device))
    turn = next((i for i, each in enumerate(samples) if each.backward), len(samples))
    axes.axvline(turn, color="0.6", linestyle=":", label="backward begins")
    axes.set(xlabel="tensors stored, then read", ylabel=unit, ylim=(0, None), xlim=(0, len(samples) - 1))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


_PLOTTED = (
    ("allocated_bytes", "allocated on {}"),
    ("device_bytes", "stored, on {}"),
    ("host_bytes", "stored, on the host"),
)
_SUMS = ("tensors", "saved_bytes", "unique_bytes", "stored_bytes", "restored_bytes", "host_bytes")


_Cells = list[tuple[str, ...]]


def _cells(title: str, rows: list[tuple[str, Line]], *, on_host: bool = False) -> _Cells:
    """Return the rows of a table, its head first."""
    cells: _Cells = [
        (title, "tensors", "saved MiB", "unique MiB", "stored MiB", "ratio", "restored MiB")
        + (("on host MiB",) if on_host else ())
    ]
    for name, line in rows:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        counts = (line.saved_bytes, line.unique_bytes, line.stored_bytes, line.restored_bytes)
        *sizes, restored = (f"{count / 2**20:.2f}" for count in counts)
        host = (f"{line.host_bytes / 2**20:.2f}",) if on_host else ()
        cells.append((name, str(line.tensors), *sizes, ratio, restored, *host))
    return cells


def _aligned(cells: _Cells) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _html(cells: _Cells) -> str:
    def row(texts: Sequence[str], tag: str) -> str:
        title, *sizes = map(escape, texts)
        aligned = f'<{tag} style="text-align: left">{title}</{tag}>'
        return f"<tr>{aligned}{''.join(f'<{tag}>{size}</{tag}>' for size in sizes)}</tr>"

    head, *body = cells
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{''.join(row(each, 'td') for each in body)}</tbody></table>"


def report(target: Module | Compressed) -> Report:
    """Return a report on the tensors saved by autograd in the first recorded training forward.

    Parameters
    ----------
    target : Module or Compressed
        A compressed model, a wrapper around one, as ``DistributedDataParallel`` and ``torch.compile`` make, the module
        inside a compressed wrapper, or ``c`` of ``with pyactcomp.compressed() as c``.

    Returns
    -------
    Report
        Plain data, printed as a table. ``note`` says why nothing was recorded or compressed so far.

    Raises
    ------
    PyactcompError
        If the model is not compressed.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()]
    >>> model = pyactcomp.compress(torch.nn.Sequential(*layers))
    >>> print(pyactcomp.report(model))
    nothing was recorded yet: run a training step first
    >>> model(torch.randn(1024, 256)).sum().backward()
    >>> r = pyactcomp.report(model)
    >>> r.unique_bytes, r.stored_bytes       # 4 MiB: the model's input is kept, two are packed, one is recomputed
    (4194304, 1605632)
    """
    if isinstance(target, Module):
        target = compressed_model(target)
    session: Session = target.session if isinstance(target, Compressed) else session_of(target)
    compiled = graphs_of(target) if isinstance(target, Module) else None
    graphs = () if compiled is None else tuple(compiled.records)
    recorder, note, offloading = session.recorder, session.silence, session.offloading
    tensors = [] if recorder is None else recorder.saved
    if recorder is None:
        if graphs:
            note = "the model runs as compiled graphs, each counted once"
            tensors = of_graph("", (value for graph in graphs for value in graph.saved))
        if isinstance(target, Module) and not target.training:
            note += " (the model is in evaluation mode, in which nothing is compressed; call model.train())"
    return Report(
        tuple(tensors),
        note,
        gradient_bytes={} if recorder is None else recorder.gradient_bytes,
        fused=tuple(fused_modules(target)) if isinstance(target, Module) else (),
        left_alone=tuple((each.name, each.type, each.reason) for each in left_alone(target))
        if isinstance(target, Module)
        else (),
        graphs=graphs,
        offloaded=() if offloading is None else tuple(offloading.lines()),
        window_bytes=0 if offloading is None else offloading.window_bytes(),
        step={} if offloading is None else offloading.samples(),
    )
