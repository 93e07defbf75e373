"""Defines the rows of experiments, each with a case and its measured figures, and reads and writes the file of rows.

A target is a program that measures one case after another. Cases and figures are dataclasses, which the target writes
and the section of the experiment reads. Only this module converts them to JSON and back:

- A field that is None was not measured and has no key.
- A part, such as ``forward: Times | None``, has a key for each of its own fields: ``forward_ms``, ``forward_std_ms``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.atomic_write import append_text, write_text
from nsys_analyzer.system.strict_json import decode_json

Scalar: TypeAlias = str | int | float | bool | None
Status: TypeAlias = Literal["ok", "oom", "unsupported", "failed", "timeout"]
C = TypeVar("C")  # the type of cases
F = TypeVar("F")  # the type of figures
T = TypeVar("T")

#: The name of the file of rows in an experiment's folder.
ROWS_FILE = "bench.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class CaseTarget(Generic[C, F]):
    """A program that measures cases: its module, and the types of its cases and figures."""

    module: str
    case: type[C] = dict  # type: ignore[assignment]
    figures: type[F] = dict  # type: ignore[assignment]


@dataclass(frozen=True)
class Times:
    """Statistics in ms of repeated measurements; ``ms`` is the mean. A single measurement has no standard deviation.

    ``cv`` is the coefficient of variation, standard deviation ÷ mean.
    """

    ms: float
    min_ms: float | None = None
    max_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    cv: float | None = None

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Times:
        """Returns the statistics of at least one time in ms."""
        mean = statistics.fmean(times_ms)
        std = statistics.stdev(times_ms) if len(times_ms) > 1 else None
        cv = None if std is None else std / mean
        return cls(mean, min(times_ms), max(times_ms), statistics.median(times_ms), std, cv)


@dataclass(frozen=True)
class Task(Generic[C]):
    """One measurement to be made: the target, its case, and a label for progress and messages."""

    target: CaseTarget[C, Any]
    case: C
    label: str

    @property
    def key(self) -> str:
        """Returns the text that identifies the task."""
        return _key(self.target.module, self.case)


@dataclass(frozen=True)
class Row(Generic[C, F]):
    """The result of a task.

    Attributes:
        module: the module of the target.
        case: the options of the case.
        status: how the measurement ended.
        message: one line that says why the status is not ok.
        figures: the measured figures, also those measured before a failure.
        machine: the device and the versions.
    """

    module: str
    case: C
    status: Status
    message: str = ""
    figures: F = field(default_factory=dict)  # type: ignore[assignment]
    machine: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Returns whether the measurement was completed."""
        return self.status == "ok"

    @property
    def key(self) -> str:
        """Returns the key of the row's task."""
        return _key(self.module, self.case)

    def to_json_values(self) -> dict[str, Any]:
        """Returns the row in the types of JSON."""
        return {**vars(self), "case": to_json_values(self.case), "figures": to_json_values(self.figures)}


#: A row as the file has it.
_JsonRow = Row[dict[str, Scalar], dict[str, Scalar | list[Any] | dict[str, Any]]]


def _key(module: str, case: object) -> str:
    return json.dumps([module, to_json_values(case)], sort_keys=True)


def to_json_values(struct: object) -> dict[str, Any]:
    """Returns a case or figures in the types of JSON, with a key for each field that is not None."""
    if isinstance(struct, Mapping):
        return dict(struct)
    values: dict[str, Any] = {}
    for declared in fields(struct):  # type: ignore[arg-type]
        value = getattr(struct, declared.name)
        if is_dataclass(value):
            values |= {f"{declared.name}_{key}": part for key, part in to_json_values(value).items()}
        elif value is not None:
            values[declared.name] = msgspec.to_builtins(value)
    return values


def from_json_values(kind: type[T], values: Mapping[str, Any]) -> T:
    """Returns the case or figures that the values of JSON describe.

    Raises:
        ValueError: a value is missing or has another type. The message names it.
    """
    if not is_dataclass(kind):
        return values  # type: ignore[return-value]
    arguments = {key: value for key, value in values.items() if value is not None}
    for name, keys in _keys_of_parts(kind).items():
        part = {field_name: arguments.pop(key) for key, field_name in keys.items() if key in arguments}
        if part:
            arguments[name] = part
    return msgspec.convert(arguments, kind)


@cache
def _keys_of_parts(kind: type) -> dict[str, dict[str, str]]:
    """Returns the JSON keys of each part of a type, with the names of their fields."""
    keys = {}
    for name, hint in get_type_hints(kind).items():
        types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if part := next((part_type for part_type in types if is_dataclass(part_type)), None):
            keys[name] = {f"{name}_{declared.name}": declared.name for declared in fields(part)}
    return keys


def convert_row(row: Row[Any, Any], target: CaseTarget[C, F]) -> Row[C, F]:
    """Returns a row from the file with its case and figures converted to the target's types.

    Raises:
        ValueError: a value of the case is missing, a value has another type, or the row is ok without figures.
    """
    case, figures = from_json_values(target.case, row.case), from_json_values(target.figures, row.figures)
    if row.ok and not to_json_values(figures):
        raise ValueError(f"a row of {row.module} is ok, and has no figures")
    return replace(row, case=case, figures=figures)


def start_rows_file(folder: Path, header: Mapping[str, Any]) -> None:
    """Creates the file of rows with a header, in place of an older one."""
    line = json.dumps({"schema_version": SCHEMA_VERSION, **header})
    write_text(folder / ROWS_FILE, line + "\n")


def append_command(folder: Path, command: str) -> None:
    """Appends the command line that makes the rows after it.

    An incomplete last line, which an interruption left, is removed first. Otherwise the next line would be lost, too.
    """
    path = folder / ROWS_FILE
    complete_lines = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    with path.open("r+b") as file:
        file.truncate(len(complete_lines))
    _append(folder, {"run": command})


def append_row(folder: Path, row: Row[Any, Any]) -> None:
    """Appends a row to the file."""
    _append(folder, row.to_json_values())


def _append(folder: Path, values: Mapping[str, Any]) -> None:
    append_text(folder / ROWS_FILE, json.dumps(values) + "\n")


def read_rows_file(path: Path) -> tuple[dict[str, Any], tuple[Row[Any, Any], ...]]:
    """Returns the header and the latest row of each task, with cases and figures as JSON values.

    The key ``runs`` of the header has all command lines that made rows. An incomplete last line is ignored.

    Raises:
        ConfigurationError: the file was not written by an experiment, or by another version.
    """
    remedy = "Make it anew: nsys-analyze bench"
    try:
        *lines, last_line = path.read_bytes().split(b"\n")
        header, *entries = (decode_json(line) for line in (lines or [last_line]))
        results = [{**entry, "message": entry.get("message") or ""} for entry in entries if "module" in entry]
        rows = {(row := msgspec.convert(result, _JsonRow)).key: row for result in results}
        commands = [entry["run"] for entry in (header, *entries) if entry.get("run") and "module" not in entry]
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no file of a bench ({error})", remedy) from error
    is_current = isinstance(header, dict) and header.get("schema_version") == SCHEMA_VERSION
    if not is_current or not all(isinstance(text, str) for text in (header.get("bench"), *commands)):
        raise ConfigurationError(f"{path} is no file of a bench of this version", remedy)
    return {**header, "runs": list(dict.fromkeys(commands))}, tuple(rows.values())
