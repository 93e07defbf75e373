"""How fast memory rises and falls in forward and backward, and what each phase waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.experiments.memory.case import MemoryRow, PhaseFigures, Point, run_name
from nsys_analyzer.experiments.model import known
from nsys_analyzer.report.model import Block, Details, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import phrase

#: The loss is too short for a slope, and the optimizer keeps nothing.
_SLOPED = ("forward", "backward")
#: Least share of the issue time in the allocator, and of the wall time behind the issue time, to wait for these.
_ALLOCATOR_SHARE, _WAITING_SHARE = 0.5, 0.1
_DEFINITIONS = phrase(
    "Memory changes when work is issued: at the pace of the host until the launch queue is full, then at that of the "
    "GPU. Of a full step the table has the first and the last third of the time up to a phase's last allocation or "
    "free, of backward from where the old gradients are freed. Forward alone is a sawtooth: bytes of its rises, and "
    "of its falls by a tenth of its height or more, ÷ their time. *Waiting* is the share of the wall time after all "
    "work is issued: from {} on a phase waits for the GPU; else for the allocator, where that takes {} of the issue "
    "time or more (an upper bound); else for the host. A CPU computes while it issues. This is no claim of GPU-bound, "
    "memory-bound or compute-bound.",
    percent(_WAITING_SHARE),
    percent(_ALLOCATOR_SHARE),
)


class Slope(NamedTuple):
    """A forward or backward phase of a run."""

    row: MemoryRow
    phase: PhaseFigures

    @property
    def waits_for(self) -> str:
        """The ``GPU``, ``allocator`` or ``host``; on a CPU the ``CPU`` or ``allocator``."""
        phase, on_gpu = self.phase, self.row.case.device == "cuda"
        if on_gpu and phase.wall_ms - phase.issue_ms >= _WAITING_SHARE * phase.wall_ms:
            return "GPU"
        if phase.allocator_ms >= _ALLOCATOR_SHARE * phase.issue_ms:
            return "allocator"
        return "host" if on_gpu else "CPU"

    def third(self, index: int) -> float | None:
        """Bytes per second in the first (0) or the last (-1) third of a full step's phase; None in forward alone."""
        found = slope_of_thirds(_course(self)) if self.row.case.trains else None
        return found[index] * 1e3 if found else None


def slopes_of(rows: Sequence[MemoryRow]) -> Iterator[Slope]:
    """Each forward and backward phase of the runs that were measured."""
    for row in rows:
        if row.ok:
            yield from (Slope(row, phase) for phase in known(row.figures.phases) if phase.name in _SLOPED)


def slope_of_thirds(points: Sequence[Point]) -> tuple[float, float] | None:
    """Bytes per ms by which a curve changes in the first and in the last third of its time; None without time."""
    import numpy as np  # here, so that help need not wait for it

    times, levels = np.array(points, float).T
    thirds = np.linspace(times[0], times[-1], 4)
    if thirds[0] == thirds[-1]:
        return None
    changes = np.diff(levels[np.searchsorted(times, thirds, side="right") - 1]) / np.diff(thirds)
    return float(changes[0]), float(changes[-1])


def _course(one: Slope) -> list[Point]:
    """The curve of a phase, of backward from where the gradients of the step before are freed."""
    phase, figures = one.phase, one.row.figures
    timeline = known(figures.timeline_ms_bytes)
    points = [(phase.start_ms, phase.start_bytes)]
    points += [(ms, level) for ms, level in timeline if phase.start_ms < ms <= phase.end_ms]
    if phase.name == "forward":
        return points
    # Gradients have the size of the parameters; they go at once, which is no slope.
    freed = phase.start_bytes - known(figures.parameter_bytes)
    begin = next((index for index, (_, level) in enumerate(points) if level <= freed), 0)
    return points[begin:]


def _per_second(one: Slope, per_ms: float | None) -> float | None:
    return None if per_ms is None or one.row.case.trains else per_ms * 1e3


_SLOPES: tuple[Field[Slope], ...] = (
    Field("run", "text", lambda one: run_name(one.row)),
    Field("phase", "text", lambda one: one.phase.name),
    Field("first third of issue", "bytes/s", lambda one: one.third(0)),
    Field("last third of issue", "bytes/s", lambda one: one.third(-1)),
    Field("rises", "bytes/s", lambda one: _per_second(one, one.phase.rise_bytes_per_ms)),
    Field("falls", "bytes/s", lambda one: _per_second(one, one.phase.fall_bytes_per_ms)),
    Field("number of falls", "count", lambda one: None if one.row.case.trains else one.phase.teeth),
    Field("issue ms", "ms", lambda one: one.phase.issue_ms),
    Field("wall ms", "ms", lambda one: one.phase.wall_ms),
    Field("cold ms", "ms", lambda one: one.phase.cold_ms),
    Field("allocator", "percent", lambda one: one.phase.allocator_ms / one.phase.issue_ms),
    Field("waiting", "percent", lambda one: max(1 - one.phase.issue_ms / one.phase.wall_ms, 0)),
    Field("waits for", "text", lambda one: one.waits_for),
)


def slopes(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """The slopes of forward and backward, and what these wait for."""
    found = table(_SLOPES, slopes_of(rows), "How fast memory changes, and what the phase waits for:", names=2)
    return (Details("Slopes", (found, Paragraph(_DEFINITIONS))),) if found.rows else ()
