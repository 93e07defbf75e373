"""Rows that look like one run: of two conditions, iterations of one run, or a run that was timed again."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.figures import FIGURES, figure
from nsys_analyzer.runs.timings.timing import Timing
from nsys_analyzer.trace.arrays import Ints

if TYPE_CHECKING:
    import pandas as pd

_FEW = 6
#: So many numbers at one distance, such as every tenth step, are no accident.
_EVENLY = 3
_Rows = dict[str, npt.NDArray[Any]]
"""Figures of some rows by the names of ``figures_of``, and ``steps``."""


def split_by_conditions(runs: Sequence[Timing], figures: pd.DataFrame) -> list[Timing]:
    """The runs with those of their ``conditions`` that tell rows of one phase and known setup apart.

    A column that differs in every row of several setups is the row's name or its result, and no condition.
    """
    if not any(run.conditions for run in runs):
        return list(runs)
    lines = figures.groupby("run")["line"].agg(["min", "max"])
    groups: dict[object, list[tuple[Timing, dict[str, str], set[int]]]] = defaultdict(list)
    for number, *own in lines.itertuples():
        run = runs[number]
        groups[_key(run, conditions=())].append((run, dict(run.conditions), set(own)))
    places: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    varying: set[str] = set()
    for group in groups.values():
        for header in {header for _, conditions, _ in group for header in conditions}:
            values = {conditions.get(header, "") for _, conditions, _ in group}
            varying |= {header} if len(values) > 1 else set()
            for run, conditions, own_lines in group:
                places[header, conditions.get(header, "")] |= {(run.file, line) for line in own_lines}
    recurring = {header for (header, _), found in places.items() if len(found) > 1}
    one_setup = len({runs[number].known_setup for number in lines.index}) == 1
    kept = varying if one_setup else varying & recurring
    return [_with_conditions(run, kept) for run in runs]


def _with_conditions(run: Timing, kept: set[str]) -> Timing:
    own = tuple(pair for pair in run.conditions if pair[0] in kept)
    return replace(run, conditions=own, said=(*run.said, *own))


def pool_iterations(runs: Sequence[Timing], figures: pd.DataFrame, skip: int | None) -> tuple[pd.DataFrame, list[str]]:
    """One row for the iterations of one run, without the first ``skip`` of them, and the notes of it.

    Iterations are rows that a column of consecutive numbers alone tells apart; where ``skip`` is given, any rows
    that nothing tells apart, in the order of the file. Other rows stay as they are.

    Raises:
        TimingsError: an iteration stands there twice, or none is left.
    """
    import pandas as pd

    counts: Counter[int] = Counter()
    pooled: list[dict[str, Any]] = []
    single = np.ones(len(figures), np.bool_)
    for places, rows in _repeated(figures, [(_key(run), run.warmup_steps) for run in runs]):
        if not _are_iterations(runs, rows, given=skip is not None):
            continue
        numbers = np.nan_to_num(rows["iteration"])
        kept = np.lexsort((rows["line"], numbers))[skip or 0 :]
        if not len(kept):
            run = runs[rows["run"][0]]
            problem = f"{run.file}: --csv-skip {skip} leaves none of {len(places)} iterations of {_label(run)}"
            raise TimingsError(problem, "Give a smaller number")
        single[places] = False
        pooled.append({**_pool({name: values[kept] for name, values in rows.items()}), "row": rows["row"][0]})
        counts[len(kept)] += 1
    if skip and not counts:
        problem = f"--csv-skip {skip} leaves out iterations, and no run has a row for each"
        raise TimingsError(problem, "Leave the option out, or give the file with a row for each iteration")
    if pooled:
        figures = pd.concat([figures[single], pd.DataFrame(pooled)]).sort_values(["row", "group"], kind="stable")
    left_out = f", the first {skip} of each left out" if skip else ""
    return figures, [
        f"{times} timings are each the mean of {n} rows, its iterations{left_out}" for n, times in counts.items()
    ]


def _repeated(figures: pd.DataFrame, keys: Iterable[Hashable]) -> Iterator[tuple[Ints, _Rows]]:
    """The rows of each group of more than one: those of runs with equal keys; by their places and their figures."""
    import pandas as pd

    numbers: dict[Hashable, int] = {}
    of_run = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    groups = pd.factorize(of_run[figures["run"].to_numpy()])[0]
    several = np.flatnonzero((np.bincount(groups) > 1)[groups])
    several = several[np.argsort(groups[several], kind="stable")]
    columns = {name: figures[name].to_numpy() for name in ("row", "group", "line", "run", "status")}
    columns |= {name: figure(figures, name) for name in ("steps", *FIGURES)}
    for places in np.split(several, np.flatnonzero(np.diff(groups[several])) + 1) if len(several) else ():
        yield places, {name: values[places] for name, values in columns.items()}


def _are_iterations(runs: Sequence[Timing], rows: _Rows, *, given: bool) -> bool:
    """Whether these rows are iterations: asked for, or numbered one after the other.

    Raises:
        TimingsError: a number stands there twice.
    """
    numbers = rows["iteration"].tolist()
    if any(map(math.isnan, numbers)) or len(set(numbers)) == 1:
        return given
    first_of: dict[float, int] = {}
    for row, number in enumerate(numbers):
        if (first := first_of.setdefault(number, row)) != row:
            problem = (
                f"{_lines(runs, rows, first, row)}: iteration {number:.0f} of {_label(runs[rows['run'][row]])} twice"
            )
            remedy = "Keep one run, or pick one by a column that tells them apart: --csv-where COLUMN=VALUE"
            raise TimingsError(problem, remedy)
    steps = {after - before for before, after in pairwise(sorted(numbers))}
    return given or steps == {1} or (len(steps) == 1 and len(numbers) >= _EVENLY)


def _pool(rows: _Rows) -> dict[str, Any]:
    """The rows as one: the deviation is that between them."""
    centers = np.where(np.isnan(rows["mean_ms"]), rows["median_ms"], rows["mean_ms"])
    has_time = np.flatnonzero(~np.isnan(centers))
    if not len(has_time):
        return {name: values[0] for name, values in rows.items()}
    timed = {name: values[has_time] for name, values in rows.items()}
    times = centers[has_time].tolist()
    of_several = np.nan_to_num(timed["std_ms"]).any()
    peak = np.nan_to_num(rows["peak_memory_bytes"]).max()
    return {
        **{name: values[0] for name, values in timed.items()},
        "steps": np.maximum(np.nan_to_num(timed["steps"]), 1).sum() if of_several else len(times),
        "mean_ms": statistics.fmean(times),
        "std_ms": statistics.stdev(times) if len(times) > 1 else math.nan,
        "min_ms": np.nanmin([*times, *timed["min_ms"]]),
        "max_ms": np.nanmax([*times, *timed["max_ms"]]),
        "median_ms": statistics.median(times),
        "peak_memory_bytes": peak or math.nan,
    }


def without_repeats(runs: Sequence[Timing], figures: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row per capture, setup, mode and phase, and the notes of what was chosen.

    Raises:
        TimingsError: two rows for one of these that nothing tells apart.
    """
    rank = np.arange(len(figures))  # of each row among those that are left: that of the first of its group
    choices: dict[str, list[str]] = defaultdict(list)
    for places, rows in _repeated(figures, map(_key, runs)):
        chosen, reason = _choose(runs, rows)
        rank[places] = -1
        rank[places[chosen]] = places[0]
        others = ", ".join(map(str, np.delete(rows["line"], chosen).tolist()))
        choices[reason].append(f"line {rows['line'][chosen]} ({runs[rows['run'][chosen]].phase}), not {others}")
    notes = [f"rows for the same run, the one with {reason} used: {_shortened(c)}" for reason, c in choices.items()]
    return figures.iloc[np.argsort(rank, kind="stable")[np.count_nonzero(rank < 0) :]], notes


def _shortened(choices: list[str]) -> str:
    more = len(choices) - _FEW
    return "; ".join(choices[:_FEW]) + (f"; and {more} more" if more > 0 else "")


def _choose(runs: Sequence[Timing], rows: _Rows) -> tuple[int, str]:
    """The row to use of those for one configuration and phase, and what it was chosen for."""
    warmup = np.array([runs[run].warmup_steps for run in rows["run"]], np.float64)
    left = np.arange(len(warmup))
    for reason, values in (("the most warm-up steps", warmup), ("the newest time stamp", rows["time_stamp_s"])):
        if not np.isnan(values[left]).any():
            left = left[values[left] == values[left].max()]
        if len(left) == 1:
            return int(left[0]), reason
    run = runs[rows["run"][left[0]]]
    problem = f"{_lines(runs, rows, left[0], left[1])}: both time the {run.phase} of {_label(run)}"
    remedy = "tell them apart by a column warmup_steps or timestamp, or take them for iterations: --csv-skip 0"
    raise TimingsError(problem, f"Remove one, {remedy}")


def _key(run: Timing, conditions: tuple[tuple[str, str], ...] | None = None) -> Hashable:
    """Equal for timings of one run and phase, under these conditions in place of their own where given."""
    own = run.conditions if conditions is None else conditions
    return run.capture, *run.known_setup, own, run.mode, run.phase


def _lines(runs: Sequence[Timing], rows: _Rows, first: int, second: int) -> str:
    file, other = (runs[rows["run"][row]].file for row in (first, second))
    if file == other:
        return f"{file}, lines {rows['line'][first]} and {rows['line'][second]}"
    return f"{file}, line {rows['line'][first]}, and {other}, line {rows['line'][second]}"


def _label(run: Timing) -> str:
    known = (
        run.model_name,
        run.context_length and f"context {run.context_length}",
        run.batch_size and f"batch {run.batch_size}",
        run.precision,
        run.mode,
    )
    return ", ".join(str(part) for part in known if part)
