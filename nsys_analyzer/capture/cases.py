"""Runs the tasks of an experiment in processes of their own, and keeps a row for each in the file of rows.

Cases of one target share a process until one of them runs out of memory, fails or takes too long; the rest go on in a
fresh one. A row is there as soon as its case has ended, so that an interrupt loses nothing but the case at work.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.runner import FINAL, LOG
from nsys_analyzer.runs.rows import Row, Task, add_row, written
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.process import Ended, Progress, run_logged

#: Names the bench's folder to its targets, for what they keep beside the rows.
FOLDER = "NSYS_ANALYZE_BENCH_FOLDER"
#: Rows after which a target ends by itself, its other cases left to a fresh process.
_STOPPING = ("oom", "failed")
#: The files of cases for a process, and of the rows that it writes.
_HIDDEN = re.compile(r"\.[0-9a-f]{32}\.(cases\.json|rows\.jsonl)")


def remaining_cases(cases: Sequence[Task[Any]], rows: Sequence[Row[Any, Any]]) -> list[Task[Any]]:
    """The cases without a row, or with one that a second try may better."""
    final = {row.key for row in rows if row.status in FINAL}
    return [case for case in cases if case.key not in final]


def run_cases(cases: Sequence[Task[Any]], folder: Path, timeout_s: float | None, progress: Progress) -> None:
    """Measures the cases in order and adds their rows to ``bench.jsonl`` of the folder, which must be locked.

    ``timeout_s`` is the limit of each case, the start of its process included.

    Raises:
        KeyboardInterrupt: the rows that were finished are kept.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    for path in folder.iterdir():  # of a run that was killed
        if _HIDDEN.fullmatch(path.name):
            path.unlink()
    for _, group in itertools.groupby(cases, lambda case: (case.target.module, tuple(case.environment.items()))):
        todo = list(group)
        while todo:
            todo = _Process(todo, folder, progress).run(timeout_s)


class _Process:
    """One process of a target, and the rows that come out of it."""

    def __init__(self, cases: Sequence[Task[Any]], folder: Path, progress: Progress) -> None:
        self._todo = list(cases)
        self._folder, self._progress = folder, progress
        name = uuid.uuid4().hex  # a process that outlived an earlier run may still write to its own files
        self._cases, self._rows = (folder.resolve() / f".{name}.{kind}" for kind in ("cases.json", "rows.jsonl"))
        self._since = time.monotonic()
        self._read, self._last = 0, ""

    def run(self, timeout_s: float | None) -> list[Task[Any]]:
        """Runs it to its end and returns the cases that it left."""
        write_text(self._cases, json.dumps([written(one.case) for one in self._todo]))
        self._rows.write_text("", encoding="utf-8")
        first = self._todo[0]
        command = [sys.executable, "-m", first.target.module, "--cases", str(self._cases), "--rows", str(self._rows)]
        self._started()
        try:
            ended = run_logged(
                command,
                self._folder / LOG,
                timeout_s,
                environment={FOLDER: str(self._folder.resolve()), **first.environment},
                made_progress=self._take,
            )
        finally:
            self._take()
            self._cases.unlink()
            self._rows.unlink()
        if self._todo and self._last not in _STOPPING:  # it ended over this case, before a row of it was written
            self._keep({"status": ended.status if ended.status != "ok" else "failed",
                        "message": ended.message or "it ended before its cases did"})  # fmt: skip
        return self._todo

    def _take(self) -> bool:
        """Takes over the rows that are new; whether there were any."""
        text = self._rows.read_text(encoding="utf-8")
        new = text[self._read : text.rfind("\n") + 1]
        self._read += len(new)
        for line in new.splitlines():
            self._keep(json.loads(line))
        return bool(new)

    def _keep(self, result: Mapping[str, Any]) -> None:
        """Writes the row of the case at work, and goes on to the next."""
        task = self._todo.pop(0)
        row = Row(
            task.target.module, written(task.case), result["status"], result.get("message") or "",
            result.get("figures", {}), result.get("machine", {}), task.environment,
        )  # fmt: skip
        add_row(self._folder, row)
        self._last = row.status
        self._progress.ended(task.label, Ended(row.status, row.message or None), time.monotonic() - self._since)
        self._started()

    def _started(self) -> None:
        self._since = time.monotonic()
        if self._todo:
            self._progress.started(self._todo[0].label, "measuring")
