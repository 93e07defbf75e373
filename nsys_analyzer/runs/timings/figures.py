"""The times of a table's rows and the other figures beside them, as a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nsys_analyzer.runs.timings.columns import TimeColumn
from nsys_analyzer.runs.timings.layouts import Runs
from nsys_analyzer.runs.timings.rows import Objects, Rows
from nsys_analyzer.runs.timings.timing import Timing
from nsys_analyzer.trace.arrays import Bools

if TYPE_CHECKING:
    import pandas as pd

#: Fields with a figure of the row, and the name of each in ``Timing``.
_BESIDE = {"iteration": "iteration", "peak_memory_bytes": "peak_memory_bytes", "time_stamp": "time_stamp_s"}
FIGURES = ("mean_ms", "std_ms", "min_ms", "max_ms", "median_ms", *_BESIDE.values())
_Floats = npt.NDArray[np.float64]


def figures_of(rows: Rows, described: Sequence[Runs]) -> tuple[list[Timing], pd.DataFrame]:
    """The runs of all groups of time columns, and a row for each timing of one, in the order of the table.

    The columns are ``row`` of the table and ``group`` of columns, both from 0, ``line``, ``run`` of the list,
    ``status``, and ``FIGURES`` by the names that ``Timing`` gives them; NaN is a figure that is missing.
    """
    import pandas as pd

    lines, fields = rows.table.frame.index.to_numpy(np.int32), rows.columns.fields
    beside = {name: rows.field(field).astype(float) for field, name in _BESIDE.items() if field in fields}
    runs: list[Timing] = []
    parts: list[pd.DataFrame] = []
    for own in described:
        for group, timings in own.timings.items():
            is_timed = np.array([timing is not None for timing in timings])
            number = (len(runs) - 1 + np.cumsum(is_timed, dtype=np.int32))[own.codes]
            timed = is_timed[own.codes]
            times = _times(rows, rows.columns.of(group), own, timed, of_row=group.phase is None)
            of_row = {"row": np.arange(len(lines), dtype=np.int32), "group": np.int16(len(parts)), "line": lines}
            part = pd.DataFrame({**of_row, "run": number, **times, **beside})
            parts.append(part if timed.all() else part[timed])
            runs += [timing for timing in timings if timing]
    figures = parts[0]
    if len(parts) > 1:
        figures = pd.concat(parts, ignore_index=True).sort_values(["row", "group"], kind="stable", ignore_index=True)
    is_missing = figures["status"] == "missing"
    if is_missing.any():
        has_time = ~np.isnan(np.fmax(figure(figures, "mean_ms"), figure(figures, "median_ms")))
        figures = figures[~is_missing | ~figures["row"].isin(figures["row"][has_time])]
    return runs, figures


def figure(figures: pd.DataFrame, name: str) -> _Floats:
    """One of ``FIGURES`` of each row, NaN where no file has it."""
    if name in figures:
        return figures[name].to_numpy()
    return np.broadcast_to(np.float64(np.nan), len(figures))


def _times(
    rows: Rows, group: dict[str, TimeColumn], runs: Runs, timed: Bools, *, of_row: bool
) -> dict[str, Objects | _Floats]:
    """The status of each row, and its times in this group of columns, which count only where the status is ok.

    A row of one time (``of_row``) has none where it says that the run failed; one that has a time for each phase may
    have failed late and still holds the times of the phases before.
    """
    center = group["mean"] if "mean" in group else group["median"]
    asked = timed & ~np.array(runs.failed)[runs.codes] if of_row else timed
    found = rows.times(center, asked)
    ms, is_status = _floats(found)
    without_time = np.array(runs.without_time, object)[runs.codes]
    status = np.where(asked & is_status, found, np.where(asked & ~np.isnan(ms), "ok", without_time)).astype(object)
    ok = timed & (status == "ok")
    times = {}
    for name, column in group.items():
        own = ms if column is center else _floats(rows.times(column, ok))[0]
        times[f"{name}_ms"] = np.where(ok, own, np.nan)
    lacking = ok & np.isnan(times["std_ms"]) if "std_ms" in times else ok
    beside = np.where(lacking, rows.deviations(center, lacking), np.nan).astype(float)
    if not np.isnan(beside).all():
        times["std_ms"] = np.fmax(times["std_ms"], beside) if "std_ms" in times else beside
    return {"status": status, **times}


def _floats(found: Objects) -> tuple[_Floats, Bools]:
    """The numbers among numbers and texts, and which are texts."""
    is_text = np.array([isinstance(one, str) for one in found.tolist()])
    return np.where(is_text, np.nan, found).astype(float), is_text
