"""Computes the figures of a capture by plain SQL and sums, without the package.

The rules are those of the documentation: an operation belongs to a phase where its launch starts inside one of the
phase's ranges, in the same process; ranges inside warm-up count for nothing; clocks are medians over instances, and
what is counted or added up is a mean.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sqlite3
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

PROCESS = ~0xFFFFFF
TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")


class Operation(NamedTuple):
    table: str
    start: int
    end: int
    launched: int
    name: str


class Capture:
    """An export of nsys; ``device`` chooses the process that uses it."""

    def __init__(self, path: Path, device: int | None = None) -> None:
        self.db = sqlite3.connect(path)
        self.tables = {name for (name,) in self.db.execute("SELECT name FROM sqlite_master")}
        found = "SELECT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = ?"
        self.process = None if device is None else self.db.execute(found, (device,)).fetchone()[0]
        self.operations = [one for table in TABLES for one in self.read(table)]

    def columns(self, table: str) -> set[str]:
        return {row[1] for row in self.db.execute(f"PRAGMA table_info({table})")}

    def read(self, kind: str) -> Iterator[Operation]:
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        if table not in self.tables:
            return
        name = "(SELECT value FROM StringIds WHERE id = o.demangledName)" if kind == "KERNEL" else "''"
        sql = (
            f"SELECT o.start, o.end, MIN(r.start), {name} FROM {table} o JOIN CUPTI_ACTIVITY_KIND_RUNTIME r"
            f" ON r.correlationId = o.correlationId AND (r.globalTid & {PROCESS}) = o.globalPid"
            " WHERE ? IS NULL OR o.globalPid = ? GROUP BY o.rowid"
        )
        for row in self.db.execute(sql, (self.process, self.process)):
            yield Operation(kind, *row)

    def ranges(self, *names: str) -> list[tuple[int, int]]:
        text = "COALESCE((SELECT value FROM StringIds WHERE id = n.textId), n.text)"
        text = text if "textId" in self.columns("NVTX_EVENTS") else "n.text"
        sql = (
            f"SELECT n.start, n.end FROM NVTX_EVENTS n WHERE {text} IN ({','.join('?' * len(names))})"
            f" AND n.end NOT NULL AND (? IS NULL OR (n.globalTid & {PROCESS}) = ?) ORDER BY n.start"
        )
        return list(self.db.execute(sql, (*names, self.process, self.process)))

    def instances(self, name: str) -> list[tuple[int, int]]:
        warm = self.ranges("warmup")
        return [one for one in self.ranges(name) if not any(start <= one[0] <= end for start, end in warm)]

    def inside(self, name: str, *tables: str) -> list[list[Operation]]:
        """The operations of each instance of a phase."""
        held = [one for one in self.operations if one.table in (tables or TABLES)]
        return [[one for one in held if start <= one.launched < end] for start, end in self.instances(name)]

    # --- figures

    def wall(self, name: str) -> float:
        return median(end - start for start, end in self.instances(name)) / 1e6

    def length(self, name: str) -> float:
        """From start to start, of the last step to its end."""
        steps = self.instances(name)
        bounds = [*(start for start, _ in steps), steps[-1][1]]
        return median(after - start for start, after in pairwise(bounds)) / 1e6

    def count(self, name: str) -> int:
        return len(self.instances(name))

    def busy(self, name: str) -> float:
        return median(map(union, self.inside(name))) / 1e6

    def span(self, name: str) -> float:
        return median(max(x.end for x in one) - min(x.start for x in one) for one in self.inside(name)) / 1e6

    def kernels(self, name: str, pattern: str = "") -> float:
        return mean(len(matching(one, pattern)) for one in self.inside(name, "KERNEL"))

    def kernel_sum(self, name: str) -> float:
        return median(map(total, self.inside(name, "KERNEL"))) / 1e6

    def kernel_ms(self, name: str, pattern: str) -> float:
        return mean(total(matching(one, pattern)) for one in self.inside(name, "KERNEL")) / 1e6

    def share(self, name: str, pattern: str) -> float:
        inside = self.inside(name, "KERNEL")
        return sum(total(matching(one, pattern)) for one in inside) / sum(map(total, inside))

    def top(self, name: str) -> str:
        times: dict[str, int] = {}
        for one in (one for part in self.inside(name, "KERNEL") for one in part):
            times[one.name] = times.get(one.name, 0) + one.end - one.start
        return max(times, key=lambda kernel: times[kernel])

    def copies(self, name: str) -> float:
        return mean(map(len, self.inside(name, "MEMCPY")))

    def copy_ms(self, name: str) -> float:
        return mean(map(total, self.inside(name, "MEMCPY"))) / 1e6

    def nested(self, name: str, pattern: str, *inner: str) -> float:
        """The kernels of a name launched in ranges inside a phase, of one instance of it."""
        phases = self.instances(name)
        held = [one for one in self.ranges(*inner) if any(start <= one[0] < end for start, end in phases)]
        kernels = matching([one for one in self.operations if one.table == "KERNEL"], pattern)
        return sum(total([one for one in kernels if a <= one.launched < b]) for a, b in held) / len(phases) / 1e6

    def gpu(self) -> str:
        return str(self.db.execute("SELECT name FROM TARGET_INFO_GPU").fetchone()[0])

    def counter(self, name: str, *metrics: str) -> float:
        """The share of metrics while a phase runs, from samples with only its operations, for half of their time."""
        sql = (
            "SELECT timestamp, SUM(value) FROM GPU_METRICS JOIN TARGET_INFO_GPU_METRICS USING (typeId, metricId)"
            f" WHERE metricName IN ({','.join('?' * len(metrics))}) GROUP BY timestamp ORDER BY timestamp"
        )
        phases, activity, busy = self.instances(name), 0.0, 0
        for (begin, value), (end, _) in pairwise(self.db.execute(sql, metrics).fetchall()):
            running = [one for one in self.operations if one.start < end and one.end > begin]
            cut = [one._replace(start=max(one.start, begin), end=min(one.end, end)) for one in running]
            alone = all(any(start <= one.launched < stop for start, stop in phases) for one in running)
            if running and alone and 2 * union(cut) >= end - begin:
                activity, busy = activity + value / 100 * (end - begin), busy + union(cut)
        return activity / busy

    def peak_memory(self) -> int:
        """Of what was allocated and is not freed, from the first phase's start to the last one's end."""
        every = [one for name in ("forward", "loss", "backward", "optimizer", "step") for one in self.instances(name)]
        first, last = min(one[0] for one in every), max(one[1] for one in every)
        sql = (
            "SELECT start, CASE memoryOperationType WHEN 0 THEN bytes ELSE -bytes END"
            " FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE memKind = 2"  # the device's
        )
        level = most = 0
        for at, step in sorted(self.db.execute(sql)):
            level += step
            most = max(most, level) if at >= first and at <= last else level if at < first else most
        return most


class Times:
    """A ``timings.csv``."""

    def __init__(self, path: Path) -> None:
        self.rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))

    def timed(self, capture: str, phase: str) -> float:
        (row,) = (one for one in self.rows if one["capture"] == capture and one["phase"] == phase)
        return float(row["median_ms"])


class Trace:
    """A trace of PyTorch on a CPU."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]

    def wall(self, name: str) -> float:
        return (
            median(one["dur"] for one in self.events if (one.get("cat"), one["name"]) == ("user_annotation", name))
            / 1e3
        )


def matching(operations: list[Operation], pattern: str) -> list[Operation]:
    return [one for one in operations if re.search(pattern, one.name)]


def total(operations: list[Operation]) -> int:
    return sum(one.end - one.start for one in operations)


def union(operations: list[Operation]) -> int:
    """The length of the union of their intervals."""
    busy, until = 0, 0
    for one in sorted(operations, key=lambda operation: operation.start):
        busy += max(one.end - max(one.start, until), 0)
        until = max(until, one.end)
    return busy
