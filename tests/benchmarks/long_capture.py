"""A long capture for benchmarks: a real export, repeated end to end."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

REPEATED_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
)
RANGES = "eventType IN (59, 60, 70, 71) AND end IS NOT NULL"  # marks and open ranges stay single


def columns_of(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def enlarge(source: Path, target: Path, kernels: int) -> int:
    """Write ``source``, repeated to about this many kernels, to ``target``; return how many there are."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        (once,) = database.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        copies = max(1, round(kernels / once))
        repeat(database, [table for table in REPEATED_TABLES if columns_of(database, table)], copies)
    return int(once * copies)


def repeat(database: sqlite3.Connection, tables: Sequence[str], copies: int) -> None:
    """Append each table to itself, later in time and with correlation IDs of its own."""
    spans = [f"SELECT min(start) AS low, max(end) AS high FROM {table}{where(table)}" for table in tables]
    bounds = f"SELECT max(high) - min(low) + 1000 FROM ({' UNION ALL '.join(spans)})"
    highest = [
        f"SELECT max(correlationId) AS c FROM {table}"
        for table in tables
        if "correlationId" in columns_of(database, table)
    ]
    (shift_ns,) = database.execute(bounds).fetchone()
    (shift_id,) = database.execute(f"SELECT max(c) + 1 FROM ({' UNION ALL '.join(highest)})").fetchone()
    shifts = {"start": shift_ns, "end": shift_ns, "correlationId": shift_id}
    database.execute(
        "CREATE TEMP TABLE copy AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        " SELECT i FROM n WHERE i < ?",
        (copies, copies),
    )
    if columns_of(database, "ANALYSIS_DETAILS"):  # the session lasts as much longer
        database.execute("UPDATE ANALYSIS_DETAILS SET duration = duration + ?", ((copies - 1) * shift_ns,))
    for table in tables:
        shifted = [
            f'"{column}" + i * {shifts[column]}' if column in shifts else f'"{column}"'
            for column in columns_of(database, table)
        ]
        database.execute(f"CREATE TEMP TABLE original AS SELECT * FROM {table}{where(table)}")
        database.execute(f"INSERT INTO main.{table} SELECT {', '.join(shifted)} FROM copy CROSS JOIN original")
        database.execute("DROP TABLE original")


def where(table: str) -> str:
    return f" WHERE {RANGES}" if table == "NVTX_EVENTS" else ""
