"""Rows that look like one run: of two conditions, iterations of one run, or a run that was timed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.table import listed
from nsys_analyzer.runs.timings.timing import Timing
from nsys_analyzer.trace.arrays import Ints

if TYPE_CHECKING:
    import pandas as pd

_FEW = 6
#: So many numbers at one distance, such as every tenth step, are no accident.
_EVENLY = 3
#: Which of several rows for one run is used: the one with most of the first that all of them have.
_PREFERRED = {"warmup_steps": "the most warm-up steps", "time_stamp_s": "the newest time stamp"}


def split_by_conditions(runs: Sequence[Timing], figures: pd.DataFrame) -> list[Timing]:
    """The runs with those of their ``conditions`` that tell rows of one phase and known setup apart.

    A column that differs in every row of several setups is the row's name or its result, and no condition.
    """
    import pandas as pd

    conditions = pd.DataFrame([dict(run.conditions) for run in runs], dtype=object)
    if conditions.empty:
        return list(runs)
    used = figures["run"].unique()
    setups = numbered([msgspec.structs.replace(run, conditions=()) for run in runs])
    kept = conditions.iloc[used].groupby(setups[used]).nunique(dropna=False).gt(1).any()
    if len({runs[number].known_setup for number in used}) > 1:
        of_rows = conditions.iloc[figures.drop_duplicates("row")["run"]]
        kept &= of_rows.nunique() < of_rows.count()
    headers = set(kept.index[kept])
    told = [tuple(pair for pair in run.conditions if pair[0] in headers) for run in runs]
    return [
        msgspec.structs.replace(run, conditions=own, condition_cells=(*run.condition_cells, *own))
        for run, own in zip(runs, told, strict=True)
    ]


def pool_iterations(runs: Sequence[Timing], figures: pd.DataFrame, skip: int | None) -> tuple[pd.DataFrame, list[str]]:
    """One row for the iterations of one run, without the first ``skip`` of them, and the notes of it.

    Iterations are rows that a column of consecutive numbers alone tells apart; where ``skip`` is given, any rows
    that nothing tells apart, in the order of the file. Other rows stay as they are. The deviation is that between
    the iterations.

    Raises:
        TimingsError: an iteration stands there twice, or none is left.
    """
    import pandas as pd

    key = figures.groupby(["timing", "warmup_steps"], dropna=False, sort=False).ngroup()
    rows = figures.assign(key=key, ms=figures["mean_ms"].fillna(figures["median_ms"]))
    rows = rows[rows["key"].duplicated(keep=False)].sort_values(["key", "iteration", "line"])
    rows["distance"] = rows.groupby("key")["iteration"].diff()
    runs_of = rows.groupby("key").agg(
        rows=("row", "size"), first=("row", "min"), numbers=("iteration", "count"),
        nearest=("distance", "min"), farthest=("distance", "max"),
    )  # fmt: skip
    is_numbered = (runs_of["numbers"] == runs_of["rows"]) & (runs_of["farthest"] > 0)
    is_even = (runs_of["nearest"] == 1) | (runs_of["rows"] >= _EVENLY)
    is_pooled = is_numbered & (runs_of["nearest"] == runs_of["farthest"]) & is_even | (skip is not None)
    _check_numbers(runs, rows[rows["key"].isin(is_numbered.index[is_numbered])])
    _check_skip(runs, rows, skip or 0)
    rows = rows[rows["key"].isin(is_pooled.index[is_pooled])]
    if rows.empty:
        return figures, []
    kept = rows[rows.groupby("key").cumcount() >= (skip or 0)]
    pooled = kept.loc[kept["ms"].isna().sort_values(kind="stable").index].drop_duplicates("key").set_index("key")
    whole = _pooled(kept[kept["ms"].notna()])
    pooled.loc[whole.index, whole.columns] = whole
    pooled["row"] = runs_of["first"]
    single = figures[~key.isin(pooled.index)]
    left_out = f", the first {skip} of each left out" if skip else ""
    counts = kept.groupby("key").size().value_counts(sort=False)
    notes = [f"{runs} timings are each the mean of {n} rows, its iterations{left_out}" for n, runs in counts.items()]
    return pd.concat([single, pooled[single.columns]]).sort_values("row", kind="stable", ignore_index=True), notes


def _check_numbers(runs: Sequence[Timing], rows: pd.DataFrame) -> None:
    """Makes sure that no iteration stands there twice."""
    for place in np.flatnonzero(rows["distance"] == 0)[:1]:
        run, number = runs[rows["run"].to_numpy()[place]], rows["iteration"].iat[place]
        lines = _lines(runs, rows.iloc[place - 1 : place + 1])
        remedy = "Keep one run, or pick one by a column that tells them apart: --csv-where COLUMN=VALUE"
        raise TimingsError(f"{lines}: iteration {number:.0f} of {_label(run)} twice", remedy)


def _check_skip(runs: Sequence[Timing], rows: pd.DataFrame, skip: int) -> None:
    """Makes sure that there are iterations to leave out, and others."""
    if skip and rows.empty:
        problem = f"--csv-skip {skip} leaves out iterations, and no run has a row for each"
        raise TimingsError(problem, "Leave the option out, or give the file with a row for each iteration")
    for _, own in rows.groupby("key") if skip else ():
        if len(own) <= skip:
            run = runs[own["run"].to_numpy()[0]]
            problem = f"{run.file}: --csv-skip {skip} leaves none of {len(own)} iterations of {_label(run)}"
            raise TimingsError(problem, "Give a smaller number")


def _pooled(timed: pd.DataFrame) -> pd.DataFrame:
    """The figures of the iterations of each run, from those with a time."""
    import pandas as pd

    runs = timed.assign(several=timed["steps"].fillna(1).clip(lower=1)).groupby("key")
    times = runs["ms"]
    return pd.DataFrame(
        {
            "steps": runs["several"].sum().where(runs["std_ms"].max() > 0, runs.size()),
            "mean_ms": times.mean(),
            "std_ms": times.std(),
            "median_ms": times.median(),
            "min_ms": np.fmin(times.min(), runs["min_ms"].min()),
            "max_ms": np.fmax(times.max(), runs["max_ms"].max()),
            "peak_memory_bytes": runs["peak_memory_bytes"].max(),
        }
    )


def without_repeats(runs: Sequence[Timing], figures: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row per capture, setup, mode and phase, and the notes of what was chosen.

    Raises:
        TimingsError: two rows for one of these that nothing tells apart.
    """
    choices: dict[str, list[str]] = defaultdict(list)
    left_out: list[int] = []
    repeated = figures[figures["timing"].duplicated(keep=False)].sort_values("timing", kind="stable")
    preferred = {reason: repeated[name].to_numpy(np.float64) for name, reason in _PREFERRED.items()}
    index, line, run = (column.to_numpy() for column in (repeated.index, repeated["line"], repeated["run"]))
    for rows in np.split(np.arange(len(repeated)), np.flatnonzero(np.diff(repeated["timing"])) + 1):
        if len(rows):
            chosen, reason = _choose(runs, rows, preferred, repeated)
            others = rows[rows != chosen]
            left_out += index[others].tolist()
            phase, lost = runs[run[chosen]].phase, listed(map(str, line[others]), str)
            choices[reason].append(f"line {line[chosen]} ({phase}), not {lost}")
    return figures.drop(index=left_out), [
        f"rows for the same run, the one with {reason} used: {_shortened(lines)}" for reason, lines in choices.items()
    ]


def _shortened(choices: list[str]) -> str:
    more = len(choices) - _FEW
    return "; ".join(choices[:_FEW]) + (f"; and {more} more" if more > 0 else "")


def _choose(
    runs: Sequence[Timing], rows: Ints, preferred: Mapping[str, npt.NDArray[np.float64]], repeated: pd.DataFrame
) -> tuple[int, str]:
    """The row to use of those for one configuration and phase, and what it was chosen for."""
    for reason, column in preferred.items():
        values = column[rows]
        if not np.isnan(values).any():
            rows = rows[values == values.max()]
        if len(rows) == 1:
            return int(rows[0]), reason
    run = runs[repeated["run"].to_numpy()[rows[0]]]
    problem = f"{_lines(runs, repeated.iloc[rows[:2]])}: both time the {run.phase} of {_label(run)}"
    remedy = "tell them apart by a column warmup_steps or timestamp, or take them for iterations: --csv-skip 0"
    raise TimingsError(problem, f"Remove one, {remedy}")


def numbered(runs: Sequence[Timing]) -> Ints:
    """A number for each of these, the same for one phase of one run."""
    numbers: dict[Hashable, int] = {}
    keys = ((run.capture, run.setup, run.mode, run.phase) for run in runs)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _lines(runs: Sequence[Timing], two: pd.DataFrame) -> str:
    (file, line), (other, second) = zip([runs[run].file for run in two["run"]], two["line"], strict=True)
    return f"{file}, lines {line} and {second}" if file == other else f"{file}, line {line}, and {other}, line {second}"


def _label(run: Timing) -> str:
    known = (
        run.model_name,
        run.context_length and f"context {run.context_length}",
        run.batch_size and f"batch {run.batch_size}",
        run.precision,
        run.mode,
    )
    return ", ".join(str(part) for part in known if part)
