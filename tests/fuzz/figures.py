"""One row of a capture changed: the figures of the phases that it does not touch stay, or a warning says why not."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from nsys_analyzer.analysis.kernels.frame import kernel_frame
from nsys_analyzer.analysis.ranges.phases import PhaseNames, is_framework_name
from nsys_analyzer.trace.trace import Trace
from tests.fuzz.sandbox import Outcome, run
from tests.fuzz.texts import sqlite_number

_GPU = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_CALL, _RANGE = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_AROUND = ("step", "other step")
#: Stands for the phases that are inferred.
_INFERRED = ("inferred",)


@dataclass(frozen=True)
class Changed:
    """What was done to a row of a table, and the phases whose figures it may change; None where it may change any.

    ``others`` is how many phases it may change besides: a launch at another time is of another phase.
    """

    what: str
    table: str
    touches: frozenset[str] | None
    others: int = 0


@cache
def phase_of_correlation(path: Path) -> Mapping[int, str]:
    """The phase of each kernel of an unchanged capture, by its correlation ID."""
    frame = kernel_frame(Trace.load(path))
    return dict(
        zip(frame["correlation_id"], frame["phase"].astype(object).where(frame["phase"].notna(), ""), strict=True)
    )


def change(path: Path, original: Path, random: Random) -> Changed:
    """Changes a time of one row, or an ID of an operation.

    Args:
        path: the copy to change.
        original: the capture as it was.
        random: decides.
    """
    phases = phase_of_correlation(original)
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall()}
        table = random.choice([name for name in (*_GPU, _CALL, _RANGE) if name in tables])
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}").fetchall()]
        row = random.choice(rows)
        column = random.choice(("start", "end", "start", "end", "both"))
        new = random.choice((None, 0, sqlite_number(random), sqlite_number(random) >> 30))
        columns = ("start", "end") if column == "both" else (column,)
        what = f"{table} {row}: {', '.join(columns)} = {new}"
        touches, others = _touched(connection, table, row, phases)
        for one in columns:
            connection.execute(f'UPDATE {table} SET "{one}" = ? WHERE rowid = ?', [new, row])
        connection.commit()
    return Changed(what, table, touches, others)


def _touched(
    connection: sqlite3.Connection, table: str, row: int, phases: Mapping[int, str]
) -> tuple[frozenset[str] | None, int]:
    """The phases that a row may change, and how many others."""
    if table == _RANGE:
        query = f"SELECT coalesce((SELECT value FROM StringIds WHERE id = textId), text) FROM {_RANGE} WHERE rowid = ?"
        ((name,),) = connection.execute(query, [row]).fetchall()
        # A phase that is inferred may rest on any range.
        return None if PhaseNames().key_of(name or "") or is_framework_name(name or "") else frozenset(_INFERRED), 0
    ((correlation,),) = connection.execute(f"SELECT correlationId FROM {table} WHERE rowid = ?", [row]).fetchall()
    known = correlation in phases  # else it is a copy, whose phase no kernel tells, or the call of one
    own = frozenset({*([phases[correlation]] if known else []), *_AROUND})
    if table == _CALL:
        return own.union(_INFERRED), 1 if known else 2
    return own, 0 if known else 1


def figures(outcome: Outcome) -> tuple[dict[tuple[str, str], Any], set[str]]:
    """The figures of each phase of each process in a report's JSON, and its warnings."""
    captures = json.loads(outcome.out)["captures"]
    phases = {
        (capture["process"] or "", phase["phase"]): {
            key: phase[key] for key in ("wall_ms", "gpu_busy_ms", "gpu_span_ms", "kernels", "inferred")
        }
        for capture in captures
        for phase in capture["phases"]
    }
    return phases, {warning for capture in captures for warning in capture["warnings"]}


@cache
def unchanged_figures(path: Path, folder: Path) -> tuple[dict[tuple[str, str], Any], set[str]]:
    """The figures and warnings of a capture as it was."""
    return figures(run(["report", str(path), "--format", "json"], folder))


def fault(changed: Changed, before: Path, outcome: Outcome, folder: Path) -> str:
    """Which phase has other figures without a warning; empty where none has, or the report says why."""
    if outcome.code or changed.touches is None:
        return ""
    (old, known), (new, said) = unchanged_figures(before, folder), figures(outcome)
    inferred = changed.touches.issuperset(_INFERRED)
    kept = [key for key in old if key[1] not in changed.touches and not (inferred and old[key]["inferred"])]
    news = " ".join(said - known)
    # A warning that names the table or the phase says why its figures are others.
    differing = [key for key in kept if old[key] != new.get(key) and changed.table not in news and key[1] not in news]
    lost = differing[changed.others :]
    return f"other figures of {lost[0]} without a warning after {changed.what}" if lost else ""
