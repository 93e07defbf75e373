"""Draws what fills a step, and the steps of several ranks, as bars: compute, exposed copies and communication, idle."""

from __future__ import annotations

import math
from dataclasses import replace

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.operators.account import StepAccount
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.report.evidence import format_step_length
from nsys_analyzer.report.model import Bar, StepBars
from nsys_analyzer.report.units import format_ms
from nsys_analyzer.text import plural
from nsys_analyzer.trace.schema import NS_PER_MS

IDLE = "idle"
#: The parts of the bar from the attainable step to the step, in their order.
ATTAINABLE, EXCESS, UNFUSED, REDUNDANT, LAUNCHING, UNEXPLAINED = (
    "attainable", "excess of operators", "unfused operators", "redundant work", "launching and waiting", "unexplained",
)  # fmt: skip
#: The part of the bar for each cause in an account. The other causes are causes of idle time.
_PART_OF_CAUSE = {
    ATTAINABLE: ATTAINABLE, "operators": EXCESS, "unfused": UNFUSED, "redundant": REDUNDANT,
    "communication": COMMUNICATION, UNEXPLAINED: UNEXPLAINED,
}  # fmt: skip
#: Parts of a bar that are shorter than a nanosecond are rounding errors of sums, and are not drawn.
MIN_PART_MS = 1 / NS_PER_MS
#: Parts that take less than this share of each bar are drawn as one part.
MIN_PART_SHARE = 0.01
#: The most ranks that are drawn as bars. If a run has more ranks, those with the shortest and the longest own times
#: are drawn.
MAX_RANK_BARS = 12


def make_step_bars(step: StepSummary, capture: str, *, on_cpu: bool = False) -> StepBars | None:
    """Returns a bar for each device of a step; None if nothing runs on the GPU.

    A bar is as long as the step that the report states. The GPU's work is assumed to take equally long with and
    without the profiler, and the remaining time of the step is idle. For a program that ran on the CPU, the bar shows
    the step under the profiler, because the profiler makes the operators longer as well.
    """
    times: list[dict[str, float]] = []
    profiled = on_cpu or step.unprofiled_ms is None
    for device in step.devices:
        remaining_ms = device.exposed_communication_ms + device.idle_ms
        if not profiled:  # without the profiler, collectives wait less for other ranks
            remaining_ms = max(step.reported_ms - device.compute_ms - device.exposed_copy_ms, 0.0)
        exposed = min(device.exposed_communication_ms, remaining_ms)
        exposed_ms = {"exposed copies": device.exposed_copy_ms, "exposed communication": exposed}
        classes_ms = {share.kernel_class: share.ms for share in device.classes}
        times.append(classes_ms | exposed_ms | {IDLE: remaining_ms - exposed})
    classes = {share.kernel_class for device in step.devices for share in device.classes}
    longest_first = sorted(classes, key=lambda name: (-sum(row.get(name, 0.0) for row in times), name))
    names = (*longest_first, "exposed copies", "exposed communication", IDLE)
    several = len(step.devices) > 1
    rows = tuple(
        Bar(f"GPU {device.device}" if several else "", tuple(row.get(name, 0.0) for name in names))
        for device, row in zip(step.devices, times, strict=True)
    )
    if not any(any(row.ms[:-1]) for row in rows):
        return None
    length = f"the profiled {format_ms(step.length_ms)}" if on_cpu else f"these {format_step_length(step)}"
    return _combine_small_parts(StepBars(names, rows, f"In {'a step' if several else length}:", capture=capture))


def make_account_bars(account: StepAccount, length: str, capture: str) -> StepBars:
    """Returns a bar from the attainable step to the step, parted by cause; a negative part is in its note.

    Args:
        account: the account of the step.
        length: the length of the step, as the report states it.
        capture: the title of the capture.
    """
    names = (ATTAINABLE, EXCESS, UNFUSED, REDUNDANT, LAUNCHING, COMMUNICATION, UNEXPLAINED)
    totals = dict.fromkeys(names, 0.0)
    for cause, ms in round_account(account).items():
        totals[_PART_OF_CAUSE.get(cause, LAUNCHING)] += ms
    excess_ms = -min(totals[UNEXPLAINED], 0.0)
    note = f"The parts of the replayed step are {format_ms(excess_ms)} longer than the step." if excess_ms else ""
    drawn = {name: ms for name, ms in totals.items() if ms >= MIN_PART_MS}
    bar = Bar("", tuple(drawn.values()))
    return StepBars(tuple(drawn), (bar,), f"From attainable to today's {length}:", note, capture)


def round_account(account: StepAccount) -> dict[str, float]:
    """Returns the attainable time and the parts above it, ms, rounded so that they add up to the rounded step.

    They have as many decimal places as the step has with three digits. Parts that are rounded to 0 are left out.
    """
    scale = 10.0 ** max(2 - math.floor(math.log10(account.step_ms)), 0)
    parts = {ATTAINABLE: account.attainable_ms} | {part.cause: part.ms for part in account.parts}
    units = {name: math.floor(ms * scale) for name, ms in parts.items()}
    missing = round(account.step_ms * scale) - sum(units.values())
    for name in sorted(parts, key=lambda name: units[name] - parts[name] * scale)[:missing]:
        units[name] += 1
    return {name: count / scale for name, count in units.items() if count}


def make_rank_bars(run: ParallelRun) -> StepBars | None:
    """Returns a bar for each rank of a run; None for a single rank, whose capture has a bar by kernel class."""
    if len(run.ranks) < 2:
        return None
    positions = list(range(len(run.ranks)))
    if len(positions) > MAX_RANK_BARS and run.slowest is None:
        positions = positions[:MAX_RANK_BARS]
    elif len(positions) > MAX_RANK_BARS:
        own_ms = [rank.own_ms.median or 0.0 if rank.own_ms else 0.0 for rank in run.ranks]
        fastest_first = sorted(positions, key=lambda position: own_ms[position])
        positions = sorted((*fastest_first[: MAX_RANK_BARS // 2], *fastest_first[-(MAX_RANK_BARS // 2) :]))
    ranks = [run.ranks[position] for position in positions]
    names = ("compute", "exposed copies", "waiting", "transferring", "exposed communication", IDLE)
    rows = []
    for rank in ranks:
        # Exposed communication is one part if waiting is not known.
        exposed = (0.0, 0.0, rank.exposed_communication_ms)
        if rank.exposed_waiting_ms is not None and rank.exposed_transfer_ms is not None:
            exposed = (rank.exposed_waiting_ms, rank.exposed_transfer_ms, 0.0)
        rows.append(Bar(rank.label, (rank.compute_ms, rank.exposed_copy_ms, *exposed, rank.idle_ms)))
    hidden = len(run.ranks) - len(ranks)
    between = ", with own times between those of the ranks above" if run.slowest is not None else ""
    note = f"The report lists {hidden} more {plural(hidden, 'rank')}{between}." if hidden else ""
    return _combine_small_parts(StepBars(names, tuple(rows), "Profiled steps:", note, run.name))


def _combine_small_parts(bars: StepBars) -> StepBars:
    """Returns the bars without parts that are zero in every bar, and with the small parts combined into one."""
    totals = [sum(row.ms) for row in bars.rows]
    longest = [max(row.ms[i] for row in bars.rows) for i in range(len(bars.parts))]
    drawn_parts = [i for i, ms in enumerate(longest) if ms >= MIN_PART_MS or bars.parts[i] == IDLE]
    small_parts = [
        i
        for i in drawn_parts[:-1]
        if all(row.ms[i] < MIN_PART_SHARE * total for row, total in zip(bars.rows, totals, strict=True))
    ]
    separate_parts = [i for i in drawn_parts[:-1] if i not in small_parts or len(small_parts) == 1]
    combined_name = (f"{len(small_parts)} smaller parts",) if len(small_parts) > 1 else ()

    def combine_times(row: Bar) -> tuple[float, ...]:
        """Returns the times of a bar's parts in the order of the legend, in ms."""
        return (
            *(row.ms[i] for i in separate_parts),
            *(sum(row.ms[i] for i in small_parts) for _ in combined_name),
            row.ms[drawn_parts[-1]],
        )

    names = (*(bars.parts[i] for i in separate_parts), *combined_name, IDLE)
    return replace(bars, parts=names, rows=tuple(Bar(row.label, combine_times(row)) for row in bars.rows))
