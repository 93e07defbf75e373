"""Runs the cases of a bench in processes of their own, and keeps a row for each in ``bench.jsonl``.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from nsys_analyzer.capture.atomic_write import append_whole, write_whole
from nsys_analyzer.capture.process import Ended, run_logged
from nsys_analyzer.capture.progress import Progress
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.strict_json import check_numbers, decoded

Scalar: TypeAlias = str | int | float | bool | None

NAME = "bench.jsonl"
#: Names the bench's folder to its targets, for what they keep beside the rows.
FOLDER = "NSYS_ANALYZE_BENCH_FOLDER"
SCHEMA_VERSION = 1
_LOG = "target.log"
#: Ends after which a case is not run again.
_FINAL = ("ok", "oom")
#: Rows after which a target ends by itself, its other cases left to a fresh process.
_STOPPING = ("oom", "failed")
#: What a process is given, and the rows that it gives back.
_HIDDEN = re.compile(r"\.[0-9a-f]{32}\.(cases\.json|rows\.jsonl)")


@dataclass(frozen=True)
class Case:
    """One measurement: the target's module, its options, and what it is called in progress and messages.

    ``environment`` holds variables that its process needs; cases of other variables run in other processes.
    """

    module: str
    values: Mapping[str, Any]
    label: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What tells it from all others, as text."""
        return _key(self.module, self.values, self.environment)


@dataclass(frozen=True)
class Row:
    """What a case came to.

    Attributes:
        module: the target.
        case: its options.
        status: ``ok``, ``oom``, ``unsupported``, ``failed`` or ``timeout``.
        message: why, in a line, empty where it is ok.
        figures: what was measured, a unit in each key.
        machine: device, versions.
        environment: variables that its process was given.

    """

    module: str
    case: Mapping[str, Any]
    status: str
    message: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was measured to its end."""
        return self.status == "ok"

    @property
    def key(self) -> str:
        """The key of its case."""
        return _key(self.module, self.case, self.environment)


def _key(module: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    return json.dumps([module, dict(values), dict(environment)], sort_keys=True)


def start_file(folder: Path, header: Mapping[str, Any]) -> None:
    """Makes ``bench.jsonl`` anew, with a first line that says what it is of."""
    line = json.dumps({"schema_version": SCHEMA_VERSION, **header})
    write_whole(folder / NAME, line + "\n")


def go_on(folder: Path, command: str) -> None:
    """Notes in ``bench.jsonl`` that the rows behind this line are of another command line.

    A last line that an interrupt cut off is removed: what comes behind it would be lost with it.
    """
    path = folder / NAME
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    with path.open("r+b") as file:
        file.truncate(len(whole))
    append_whole(path, json.dumps({"run": command}) + "\n")


def read_file(path: Path) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """The header and the rows, each case once, with its latest row.

    The header's ``runs`` are all command lines that made rows. A last line that an interrupt cut off is passed over.

    Raises:
        ConfigurationError: the file is none of a bench's.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        header, *found = (decoded(line) for line in (lines or [rest]))
        rows = {(row := _row(one)).key: row for one in found if "module" in one}
        commands = [one["run"] for one in (header, *found) if one.get("run") and "module" not in one]
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is no file of a bench ({error})", "Make it anew: nsys-analyze bench"
        ) from error
    known = isinstance(header, dict) and header.get("schema_version") == SCHEMA_VERSION
    if not known or not all(isinstance(text, str) for text in (header.get("bench"), *commands)):
        raise ConfigurationError(f"{path} is no file of a bench of this version", "Make it anew: nsys-analyze bench")
    return {**header, "runs": list(dict.fromkeys(commands))}, tuple(rows.values())


def _row(values: Mapping[str, Any]) -> Row:
    """The row of a line.

    Raises:
        ValueError: a value of another type, or a number beyond any figure.
    """
    check_numbers(values)
    line = msgspec.convert(values, _Line)
    return Row(line.module, line.case, line.status, line.message or "", line.figures, line.machine, line.environment)


class _Line(msgspec.Struct):
    """A row as a line of ``bench.jsonl`` holds it."""

    module: str
    case: dict[str, Scalar]
    status: Literal["ok", "oom", "unsupported", "failed", "timeout"]
    message: str | None = None
    figures: dict[str, Scalar | list[Any] | dict[str, Any]] = {}
    machine: dict[str, Scalar] = {}
    environment: dict[str, str] = {}


def remaining_cases(cases: Sequence[Case], rows: Sequence[Row]) -> list[Case]:
    """The cases without a row, or with one that a second try may better."""
    final = {row.key for row in rows if row.status in _FINAL}
    return [case for case in cases if case.key not in final]


def run_cases(cases: Sequence[Case], folder: Path, timeout_s: float | None, progress: Progress) -> None:
    """Measures the cases in order, each row written to ``bench.jsonl`` as it comes.

    Args:
        cases: those still to run.
        folder: where ``bench.jsonl`` lies, which must be locked.
        timeout_s: seconds for each case, the start of its process included.
        progress: is told of each.

    Raises:
        KeyboardInterrupt: the rows that were finished are kept.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    for path in folder.iterdir():  # of a run that was killed
        if _HIDDEN.fullmatch(path.name):
            path.unlink()
    for _, group in itertools.groupby(cases, lambda case: (case.module, tuple(case.environment.items()))):
        todo = list(group)
        while todo:
            todo = _Process(todo, folder, progress).run(timeout_s)


class _Process:
    """One process of a target, and the rows that come out of it."""

    def __init__(self, cases: Sequence[Case], folder: Path, progress: Progress) -> None:
        self._todo = list(cases)
        self._folder, self._progress = folder, progress
        own = uuid.uuid4().hex  # what an earlier run was killed over may still write to files of its own
        self._given, self._taken = (folder.resolve() / f".{own}.{kind}" for kind in ("cases.json", "rows.jsonl"))
        self._since = time.monotonic()
        self._read, self._last = 0, ""

    def run(self, timeout_s: float | None) -> list[Case]:
        """Runs it to its end and returns the cases that it left."""
        write_whole(self._given, json.dumps([dict(case.values) for case in self._todo]))
        self._taken.write_text("", encoding="utf-8")
        first = self._todo[0]
        command = [sys.executable, "-m", first.module, "--cases", str(self._given), "--rows", str(self._taken)]
        self._started()
        try:
            ended = run_logged(
                command,
                self._folder / _LOG,
                timeout_s,
                environment={FOLDER: str(self._folder.resolve()), **first.environment},
                is_ahead=self._take,
            )
        finally:
            self._take()
            self._given.unlink()
            self._taken.unlink()
        if self._todo and self._last not in _STOPPING:  # it ended over this case, before a row of it was written
            self._keep({"status": ended.status if ended.status != "ok" else "failed",
                        "message": ended.message or "it ended before its cases did"})  # fmt: skip
        return self._todo

    def _take(self) -> bool:
        """Takes over the rows that are new; whether there were any."""
        text = self._taken.read_text(encoding="utf-8")
        new = text[self._read : text.rfind("\n") + 1]
        self._read += len(new)
        for line in new.splitlines():
            self._keep(json.loads(line))
        return bool(new)

    def _keep(self, result: Mapping[str, Any]) -> None:
        """Writes the row of the case at work, and goes on to the next."""
        case = self._todo.pop(0)
        row = {
            "module": case.module, "case": dict(case.values), "environment": dict(case.environment),
            "status": result["status"], "message": result.get("message"),
            "figures": result.get("figures", {}), "machine": result.get("machine", {}),
        }  # fmt: skip
        append_whole(self._folder / NAME, json.dumps(row) + "\n")
        self._last = row["status"]
        ended = Ended(row["status"], row["message"])
        self._progress.ended(case.label, ended, time.monotonic() - self._since)
        self._started()

    def _started(self) -> None:
        self._since = time.monotonic()
        if self._todo:
            self._progress.started(self._todo[0].label, "measuring")
