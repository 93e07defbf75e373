"""Rows that look like one run: of two conditions, iterations of one run, or a run that was timed again."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from nsys_analyzer.capture.timings.timing import Timing
from nsys_analyzer.errors import TimingsError

_Key = tuple[object, ...]
_FEW = 6
#: So many numbers at one distance, such as every tenth step, are no accident.
_EVENLY = 3


def split_by_conditions(timings: Sequence[Timing]) -> list[Timing]:
    """The timings with those of their ``conditions`` that tell rows of one phase and known setup apart.

    A column that differs in every row of several setups is the row's name or its result, and no condition.
    """
    groups = _groups((_key(replace(timing, conditions=())), timing) for timing in timings)
    setups = {replace(timing, conditions=()).setup for timing in timings}
    rows: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    varying: set[str] = set()
    for group in groups.values():
        for header in dict.fromkeys(header for timing in group for header, _ in timing.conditions):
            own = {(timing.file, timing.line, dict(timing.conditions).get(header, "")) for timing in group}
            rows[header] |= own
            if len({value for *_, value in own}) > 1:
                varying.add(header)
    kept = {header for header in varying if len(setups) == 1 or _recurs([value for *_, value in rows[header]])}
    return [_with_conditions(timing, kept) for timing in timings]


def _recurs(values: Sequence[str]) -> bool:
    return len(set(values)) < len(values)


def _with_conditions(timing: Timing, kept: set[str]) -> Timing:
    own = tuple(pair for pair in timing.conditions if pair[0] in kept)
    return replace(timing, conditions=own, said=(*timing.said, *own))


def pool_iterations(timings: Sequence[Timing], skip: int | None) -> tuple[list[Timing], list[str]]:
    """One timing for the iterations of one run, without the first ``skip`` of them, and the notes of it.

    Iterations are rows that a column of consecutive numbers alone tells apart; where ``skip`` is given, any rows
    that nothing tells apart, in the order of the file.

    Raises:
        TimingsError: an iteration stands there twice, or none is left.
    """
    pooled: list[Timing] = []
    counts: dict[int, int] = {}
    groups = _groups(((*_key(timing), timing.warmup_steps), timing) for timing in timings).values()
    for group in groups:
        if len(group) == 1 or not _are_iterations(group, given=skip is not None):
            pooled += group
            continue
        ordered = sorted(group, key=lambda timing: (timing.iteration or 0, timing.line))
        kept = ordered[skip or 0 :]
        if not kept:
            problem = f"{group[0].file}: --csv-skip {skip} leaves none of {len(group)} iterations of {_label(group[0])}"
            raise TimingsError(problem, "Give a smaller number")
        pooled.append(_pool(kept))
        counts[len(kept)] = counts.get(len(kept), 0) + 1
    if skip and not counts:
        problem = f"--csv-skip {skip} leaves out iterations, and no run has a row for each"
        raise TimingsError(problem, "Leave the option out, or give the file with a row for each iteration")
    left_out = f", the first {skip} of each left out" if skip else ""
    notes = [f"{times} timings are each the mean of {n} rows, its iterations{left_out}" for n, times in counts.items()]
    return pooled, notes


def _are_iterations(group: list[Timing], *, given: bool) -> bool:
    """Whether these rows are iterations: asked for, or numbered one after the other.

    Raises:
        TimingsError: a number stands there twice.
    """
    numbers = [timing.iteration for timing in group if timing.iteration is not None]
    if len(numbers) < len(group) or len(set(numbers)) == 1:
        return given
    if len(set(numbers)) == len(numbers):
        ordered = sorted(numbers)
        steps = {after - before for before, after in pairwise(ordered)}
        return given or steps == {1} or (len(steps) == 1 and len(numbers) >= _EVENLY)
    twice = next(timing for i, timing in enumerate(group) if timing.iteration in numbers[:i])
    first = next(timing for timing in group if timing.iteration == twice.iteration)
    problem = f"{_lines(first, twice)}: iteration {twice.iteration} of {_label(twice)} twice"
    raise TimingsError(problem, "Keep one run, or pick one by a column that tells them apart: --csv-where COLUMN=VALUE")


def _pool(group: list[Timing]) -> Timing:
    """The rows as one timing: the deviation is that between them."""
    timed = [timing for timing in group if timing.center_ms is not None]
    values = [timing.center_ms for timing in timed if timing.center_ms is not None]
    if not values:
        return group[0]
    return replace(
        timed[0],
        steps=sum(timing.steps or 1 for timing in timed) if any(timing.std_ms for timing in timed) else len(timed),
        mean_ms=statistics.fmean(values),
        std_ms=statistics.stdev(values) if len(values) > 1 else None,
        min_ms=min([*values, *(timing.min_ms for timing in timed if timing.min_ms is not None)]),
        max_ms=max([*values, *(timing.max_ms for timing in timed if timing.max_ms is not None)]),
        median_ms=statistics.median(values),
        peak_memory_bytes=max((timing.peak_memory_bytes or 0 for timing in group), default=0) or None,
    )


def without_repeats(timings: Sequence[Timing]) -> tuple[tuple[Timing, ...], list[str]]:
    """One timing per capture, setup, mode and phase, and the notes of what was chosen.

    Raises:
        TimingsError: two rows for one of these that nothing tells apart.
    """
    chosen: list[Timing] = []
    choices: dict[str, list[str]] = defaultdict(list)
    for group in _groups((_key(timing), timing) for timing in timings).values():
        timing, reason = _choose(group)
        chosen.append(timing)
        if reason:
            others = ", ".join(str(other.line) for other in group if other is not timing)
            choices[reason].append(f"line {timing.line} ({timing.phase}), not {others}")
    notes = [f"rows for the same run, the one with {reason} used: {_shortened(c)}" for reason, c in choices.items()]
    return tuple(chosen), notes


def _shortened(choices: list[str]) -> str:
    more = len(choices) - _FEW
    return "; ".join(choices[:_FEW]) + (f"; and {more} more" if more > 0 else "")


def _choose(group: list[Timing]) -> tuple[Timing, str]:
    """The row to use of those for one configuration and phase, and what it was chosen for."""
    if len(group) == 1:
        return group[0], ""
    rules: tuple[tuple[str, Callable[[Timing], float | None]], ...] = (
        ("the most warm-up steps", lambda timing: timing.warmup_steps),
        ("the newest time stamp", lambda timing: timing.time_stamp_s),
    )
    for reason, measure in rules:
        values = [value for timing in group if (value := measure(timing)) is not None]
        if len(values) == len(group):
            group = [timing for timing in group if measure(timing) == max(values)]
        if len(group) == 1:
            return group[0], reason
    problem = f"{_lines(group[0], group[1])}: both time the {group[0].phase} of {_label(group[0])}"
    remedy = "tell them apart by a column warmup_steps or timestamp, or take them for iterations: --csv-skip 0"
    raise TimingsError(problem, f"Remove one, {remedy}")


def _key(timing: Timing) -> _Key:
    return timing.capture, *timing.setup, timing.mode, timing.phase


def _groups(pairs: Iterable[tuple[_Key, Timing]]) -> dict[_Key, list[Timing]]:
    groups: dict[_Key, list[Timing]] = defaultdict(list)
    for key, timing in pairs:
        groups[key].append(timing)
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
