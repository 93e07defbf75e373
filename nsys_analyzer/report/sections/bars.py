"""What fills a step, and the steps of several ranks, as bars: what computes, what only copies or communicates, idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.report.evidence import format_step_length
from nsys_analyzer.report.model import Bar, StepBars
from nsys_analyzer.report.units import format_ms
from nsys_analyzer.trace.schema import NS_PER_MS

IDLE = "idle"
#: Shorter parts are left out as rounding errors of the sums.
NANOSECOND_MS = 1 / NS_PER_MS
#: Parts of a smaller share of every bar are one.
LEAST_SHARE = 0.01
#: Bars of ranks that are shown; of more those with the least and the most own time.
MOST_RANKS = 12
#: What stands before the legend of several bars, whose times stand behind them.
_SEVERAL = "Profiled steps:"


def bars_of_step(step: StepSummary, capture: str, *, on_cpu: bool = False) -> StepBars | None:
    """A bar of each device of a step, as long as the step is said to be; None where nothing runs on the GPU.

    The GPU works as long without the profiler as under it, and the rest of the step is idle. On a CPU the profiler
    makes the operators longer, too: the bar is of the step under it.
    """
    times: list[dict[str, float]] = []
    profiled = on_cpu or step.unprofiled_ms is None
    for device in step.devices:
        remaining_ms = device.exposed_communication_ms + device.idle_ms
        if not profiled:  # collectives that wait for other ranks wait for less without the profiler
            remaining_ms = max(step.reported_ms - device.compute_ms - device.exposed_copy_ms, 0.0)
        exposed = min(device.exposed_communication_ms, remaining_ms)
        exposed_ms = {"exposed copies": device.exposed_copy_ms, "exposed communication": exposed}
        classes_ms = {share.kernel_class: share.ms for share in device.classes}
        times.append(classes_ms | exposed_ms | {IDLE: remaining_ms - exposed})
    classes = {one.kernel_class for device in step.devices for one in device.classes}
    longest_first = sorted(classes, key=lambda name: (-sum(row.get(name, 0.0) for row in times), name))
    names = (*longest_first, "exposed copies", "exposed communication", IDLE)
    several = len(step.devices) > 1
    rows = tuple(
        Bar(f"GPU {device.device}" if several else "", tuple(row.get(name, 0.0) for name in names))
        for device, row in zip(step.devices, times, strict=True)
    )
    if not any(any(row.ms[:-1]) for row in rows):
        return None
    these = f"the profiled {format_ms(step.length_ms)}" if on_cpu else f"these {format_step_length(step)}"
    return _without_small(StepBars(names, rows, f"In {'a step' if several else these}:", capture=capture))


def bars_of_run(run: ParallelRun) -> StepBars | None:
    """A bar of each rank of a run; None of a single one, which its capture's bar shows by kernel class."""
    if len(run.ranks) < 2:
        return None
    shown = _shown_ranks(run)
    names = ("compute", "exposed copies", "waiting", "transferring", "exposed communication", IDLE)
    rows = tuple(Bar(one.label, _parts_of(one)) for one in shown)
    left = len(run.ranks) - len(shown)
    between = " between these in own time" if run.slowest is not None else ""
    note = f"{left} more{between}: see the report." if left else ""
    return _without_small(StepBars(names, rows, _SEVERAL, note, run.name))


def _shown_ranks(run: ParallelRun) -> Sequence[RankFigures]:
    """The ranks, of many those with the least and the most own time, in their order."""
    if len(run.ranks) <= MOST_RANKS:
        return run.ranks
    if run.slowest is None:
        return run.ranks[:MOST_RANKS]
    fastest_first = sorted(
        range(len(run.ranks)),
        key=lambda i: (own.median or 0.0) if (own := run.ranks[i].own_ms) else 0.0,
    )
    half = MOST_RANKS // 2
    return [run.ranks[i] for i in sorted((*fastest_first[:half], *fastest_first[-half:]))]


def _parts_of(rank: RankFigures) -> tuple[float, ...]:
    """The parts of a rank's step; what is exposed is one part where waiting is not known."""
    waits, transfers, both = rank.exposed_waiting_ms, rank.exposed_transfer_ms, rank.exposed_communication_ms
    known = waits is not None and transfers is not None
    exposed = (waits or 0.0, transfers or 0.0, 0.0) if known else (0.0, 0.0, both)
    return (rank.compute_ms, rank.exposed_copy_ms, *exposed, rank.idle_ms)


def _without_small(bars: StepBars) -> StepBars:
    """Returns the bars without parts that none of them has. Several small parts become one, before idle time."""
    totals = [sum(row.ms) for row in bars.rows]
    longest = [max(row.ms[i] for row in bars.rows) for i in range(len(bars.parts))]
    drawn_parts = [i for i, ms in enumerate(longest) if ms >= NANOSECOND_MS or bars.parts[i] == IDLE]
    small = [
        i
        for i in drawn_parts[:-1]
        if all(row.ms[i] < LEAST_SHARE * total for row, total in zip(bars.rows, totals, strict=True))
    ]
    separate = [i for i in drawn_parts[:-1] if i not in small or len(small) == 1]
    smaller = (f"{len(small)} smaller parts",) if len(small) > 1 else ()

    def ms(row: Bar) -> tuple[float, ...]:
        return (
            *(row.ms[i] for i in separate),
            *(sum(row.ms[i] for i in small) for _ in smaller),
            row.ms[drawn_parts[-1]],
        )

    names = (*(bars.parts[i] for i in separate), *smaller, IDLE)
    return replace(bars, parts=names, rows=tuple(Bar(row.label, ms(row)) for row in bars.rows))
