"""Rows that look like one run: of two conditions, iterations of one run, or a run that was timed again."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from nsys_analyzer.capture.timings.series import Series, joined
from nsys_analyzer.capture.timings.timing import Timing
from nsys_analyzer.errors import TimingsError

_Key = tuple[object, ...]
_T = TypeVar("_T")
_FEW = 6
#: So many numbers at one distance, such as every tenth step, are no accident.
_EVENLY = 3


def split_by_conditions(timed: Sequence[Series]) -> list[Series]:
    """The timings with those of their ``conditions`` that tell rows of one phase and known setup apart.

    A column that differs in every row of several setups is the row's name or its result, and no condition.
    """
    groups = _groups((_key(series.timing, ()), series) for series in timed).values()
    values: dict[tuple[int, str], set[str]] = defaultdict(set)
    lines: dict[tuple[str, str], tuple[str, int]] = {}
    recurring: set[str] = set()
    for number, group in enumerate(groups):
        conditions = [dict(series.timing.conditions) for series in group]
        headers = dict.fromkeys(header for own in conditions for header in own)
        for series, own in zip(group, conditions, strict=True):
            first, last = ((series.timing.file, series.column("line")[row]) for row in (0, -1))
            for header in headers:
                value = own.get(header, "")
                values[number, header].add(value)
                if {first, last} != {lines.setdefault((header, value), first)}:
                    recurring.add(header)
    varying = {header for (_, header), own in values.items() if len(own) > 1}
    one_setup = len({series.timing.known_setup for series in timed}) == 1
    kept = varying if one_setup else varying & recurring
    return [replace(series, timing=_with_conditions(series.timing, kept)) for series in timed]


def _with_conditions(timing: Timing, kept: set[str]) -> Timing:
    own = tuple(pair for pair in timing.conditions if pair[0] in kept)
    return replace(timing, conditions=own, said=(*timing.said, *own))


def pool_iterations(timed: Sequence[Series], skip: int | None) -> tuple[list[Series], list[str]]:
    """One timing for the iterations of one run, without the first ``skip`` of them, and the notes of it.

    Iterations are rows that a column of consecutive numbers alone tells apart; where ``skip`` is given, any rows
    that nothing tells apart, in the order of the file. Other rows stay as they are.

    Raises:
        TimingsError: an iteration stands there twice, or none is left.
    """
    pooled: list[Series] = []
    counts: dict[int, int] = {}
    groups = _groups(((*_key(series.timing), series.timing.warmup_steps), series) for series in timed).values()
    for group in groups:
        series = joined(group)
        if len(group) > 1:
            series = series.rows(sorted(range(len(series.places)), key=series.places.__getitem__))
        count = len(series.places)
        if count == 1 or not _are_iterations(series, given=skip is not None):
            pooled.append(series)
            continue
        ordered = sorted(range(count), key=series.column("line").__getitem__)
        numbers = [number or 0 for number in series.column("iteration")]
        kept = sorted(ordered, key=numbers.__getitem__)[skip or 0 :]
        if not kept:
            problem = f"{series.timing.file}: --csv-skip {skip} leaves none of {count} iterations"
            raise TimingsError(f"{problem} of {_label(series.timing)}", "Give a smaller number")
        pooled.append(Series(_pool(series.rows(kept)), series.places[:1], {}))
        counts[len(kept)] = counts.get(len(kept), 0) + 1
    if skip and not counts:
        problem = f"--csv-skip {skip} leaves out iterations, and no run has a row for each"
        raise TimingsError(problem, "Leave the option out, or give the file with a row for each iteration")
    left_out = f", the first {skip} of each left out" if skip else ""
    notes = [f"{times} timings are each the mean of {n} rows, its iterations{left_out}" for n, times in counts.items()]
    return pooled, notes


def _are_iterations(series: Series, *, given: bool) -> bool:
    """Whether these rows are iterations: asked for, or numbered one after the other.

    Raises:
        TimingsError: a number stands there twice.
    """
    numbers = series.column("iteration")
    row_of: dict[int | None, int] = {}
    for row, number in enumerate(numbers):
        row_of.setdefault(number, row)
    if None in row_of or len(row_of) == 1:
        return given
    if len(row_of) == len(numbers):
        steps = {after - before for before, after in pairwise(sorted(numbers))}
        return given or steps == {1} or (len(steps) == 1 and len(numbers) >= _EVENLY)
    twice = next(row for row, number in enumerate(numbers) if row_of[number] != row)
    first, second = series.row(row_of[numbers[twice]]), series.row(twice)
    problem = f"{_lines(first, second)}: iteration {second.iteration} of {_label(second)} twice"
    raise TimingsError(problem, "Keep one run, or pick one by a column that tells them apart: --csv-where COLUMN=VALUE")


def _pool(series: Series) -> Timing:
    """The rows as one timing: the deviation is that between them."""
    means, medians = series.column("mean_ms"), series.column("median_ms")
    centers = [median if mean is None else mean for mean, median in zip(means, medians, strict=True)]
    rows = [row for row, center in enumerate(centers) if center is not None]
    if not rows:
        return series.row(0)
    timed, values = series.rows(rows), [centers[row] for row in rows]
    of_several = any(timed.column("std_ms"))
    return replace(
        timed.row(0),
        steps=sum(steps or 1 for steps in timed.column("steps")) if of_several else len(values),
        mean_ms=statistics.fmean(values),
        std_ms=statistics.stdev(values) if len(values) > 1 else None,
        min_ms=min(value for value in (*values, *timed.column("min_ms")) if value is not None),
        max_ms=max(value for value in (*values, *timed.column("max_ms")) if value is not None),
        median_ms=statistics.median(values),
        peak_memory_bytes=max(bytes_ or 0 for bytes_ in series.column("peak_memory_bytes")) or None,
    )


def without_repeats(timed: Sequence[Series]) -> tuple[tuple[Timing, ...], list[str]]:
    """One timing per capture, setup, mode and phase, and the notes of what was chosen.

    Raises:
        TimingsError: two rows for one of these that nothing tells apart.
    """
    chosen: list[Timing] = []
    choices: dict[str, list[str]] = defaultdict(list)
    for series in map(joined, _groups((_key(series.timing), series) for series in timed).values()):
        row, reason = _choose(series)
        timing = series.row(row)
        chosen.append(timing)
        if reason:
            others = ", ".join(str(line) for other, line in enumerate(series.column("line")) if other != row)
            choices[reason].append(f"line {timing.line} ({timing.phase}), not {others}")
    notes = [f"rows for the same run, the one with {reason} used: {_shortened(c)}" for reason, c in choices.items()]
    return tuple(chosen), notes


def _shortened(choices: list[str]) -> str:
    more = len(choices) - _FEW
    return "; ".join(choices[:_FEW]) + (f"; and {more} more" if more > 0 else "")


def _choose(series: Series) -> tuple[int, str]:
    """The row to use of those for one configuration and phase, and what it was chosen for."""
    rows = list(range(len(series.places)))
    if len(rows) == 1:
        return 0, ""
    for reason, name in (("the most warm-up steps", "warmup_steps"), ("the newest time stamp", "time_stamp_s")):
        values = series.column(name)
        if all(values[row] is not None for row in rows):
            most = max(values[row] for row in rows)
            rows = [row for row in rows if values[row] == most]
        if len(rows) == 1:
            return rows[0], reason
    first, second = series.row(rows[0]), series.row(rows[1])
    problem = f"{_lines(first, second)}: both time the {first.phase} of {_label(first)}"
    remedy = "tell them apart by a column warmup_steps or timestamp, or take them for iterations: --csv-skip 0"
    raise TimingsError(problem, f"Remove one, {remedy}")


def _key(timing: Timing, conditions: tuple[tuple[str, str], ...] | None = None) -> _Key:
    """Equal for timings of one run and phase, under these conditions in place of their own where given."""
    own = timing.conditions if conditions is None else conditions
    return timing.capture, *timing.known_setup, own, timing.mode, timing.phase


def _groups(pairs: Iterable[tuple[_Key, _T]]) -> dict[_Key, list[_T]]:
    groups: dict[_Key, list[_T]] = defaultdict(list)
    for key, one in pairs:
        groups[key].append(one)
    return groups


def _lines(first: Timing, second: Timing) -> str:
    if first.file == second.file:
        return f"{first.file}, lines {first.line} and {second.line}"
    return f"{first.file}, line {first.line}, and {second.file}, line {second.line}"


def _label(timing: Timing) -> str:
    known = (
        timing.model_name,
        timing.context_length and f"context {timing.context_length}",
        timing.batch_size and f"batch {timing.batch_size}",
        timing.precision,
        timing.mode,
    )
    return ", ".join(str(part) for part in known if part)
