"""Defines the rows of an experiment, each with a case and its measured figures, and reads and writes the rows file.

A target is a program that measures one case after another. Cases and figures are dataclasses: the target writes them,
and the experiment's section of the report reads them. Only this module converts them to JSON and back:

- A field that is None, which means that it was not measured, has no key.
- A field that is itself a dataclass, such as ``forward: Times``, has a key for each of its own fields: ``forward_ms``,
  ``forward_std_ms``.
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
    """A program that measures the cases of an experiment: its module, and the types of its cases and figures."""

    module: str
    case: type[C] = dict  # type: ignore[assignment]
    figures: type[F] = dict  # type: ignore[assignment]


@dataclass(frozen=True)
class Times:
    """Statistics of repeated measurements, in ms. ``ms`` is the mean. A single measurement has no standard deviation.

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
        """Returns the statistics of one or more times in ms."""
        mean = statistics.fmean(times_ms)
        std = statistics.stdev(times_ms) if len(times_ms) > 1 else None
        cv = None if std is None else std / mean
        return cls(mean, min(times_ms), max(times_ms), statistics.median(times_ms), std, cv)


@dataclass(frozen=True)
class Task(Generic[C]):
    """A measurement that an experiment will make. The label names it in progress lines and messages."""

    target: CaseTarget[C, Any]
    case: C
    label: str

    @property
    def key(self) -> str:
        """Returns the text that identifies the task in the rows file."""
        return _make_key(self.target.module, self.case)


@dataclass(frozen=True)
class Row(Generic[C, F]):
    """The result of a task.

    Attributes:
        module: the module of the target.
        case: the options of the case.
        status: how the measurement ended.
        message: one line with the reason, if the status is not ok.
        figures: the measured figures. After a failure, these are the figures that were measured before it.
        machine: the device, and the versions of the software.
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
        return _make_key(self.module, self.case)

    def to_json_values(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return {**vars(self), "case": to_json_values(self.case), "figures": to_json_values(self.figures)}


#: A row whose case and figures are JSON values, as in the rows file.
_JsonRow = Row[dict[str, Scalar], dict[str, Scalar | list[Any] | dict[str, Any]]]


def _make_key(module: str, case: object) -> str:
    return json.dumps([module, to_json_values(case)], sort_keys=True)


def to_json_values(struct: object) -> dict[str, Any]:
    """Returns a case or figures as JSON values, with a key for each field that is not None."""
    if isinstance(struct, Mapping):
        return dict(struct)
    values: dict[str, Any] = {}
    for declared_field in fields(struct):  # type: ignore[arg-type]
        value = getattr(struct, declared_field.name)
        if is_dataclass(value):
            values |= {f"{declared_field.name}_{key}": part for key, part in to_json_values(value).items()}
        elif value is not None:
            values[declared_field.name] = msgspec.to_builtins(value)
    return values


def from_json_values(kind: type[T], values: Mapping[str, Any]) -> T:
    """Converts JSON values to a case or figures of this type.

    Raises:
        ValueError: a value is missing or has another type. The message names the value.
    """
    if not is_dataclass(kind):
        return values  # type: ignore[return-value]
    arguments = {key: value for key, value in values.items() if value is not None}
    for name, keys in _find_keys_of_parts(kind).items():
        part = {field_name: arguments.pop(key) for key, field_name in keys.items() if key in arguments}
        if part:
            arguments[name] = part
    return msgspec.convert(arguments, kind)


@cache
def _find_keys_of_parts(kind: type) -> dict[str, dict[str, str]]:
    """Returns the JSON keys for each field that is itself a dataclass, each with the name of the field in it."""
    keys = {}
    for name, hint in get_type_hints(kind).items():
        types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if part := next((part_type for part_type in types if is_dataclass(part_type)), None):
            keys[name] = {f"{name}_{declared_field.name}": declared_field.name for declared_field in fields(part)}
    return keys


def convert_row(row: Row[Any, Any], target: CaseTarget[C, F]) -> Row[C, F]:
    """Returns a row of the rows file with its case and figures converted to the target's types.

    Raises:
        ValueError: a value of the case is missing, a value has another type, or the row is ok without figures.
    """
    case, figures = from_json_values(target.case, row.case), from_json_values(target.figures, row.figures)
    if row.ok and not to_json_values(figures):
        raise ValueError(f"a row of {row.module} is ok, and has no figures")
    return replace(row, case=case, figures=figures)


def start_rows_file(folder: Path, header: Mapping[str, Any]) -> None:
    """Creates the rows file with a header, and replaces an older file."""
    line = json.dumps({"schema_version": SCHEMA_VERSION, **header})
    write_text(folder / ROWS_FILE, line + "\n")


def append_command(folder: Path, command: str) -> None:
    """Appends the command line that makes the next rows to the rows file.

    An interruption may have left an incomplete last line. It is removed first, so that the next line does not join it.
    """
    path = folder / ROWS_FILE
    complete_lines = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    with path.open("r+b") as file:
        file.truncate(len(complete_lines))
    _append_line(folder, {"run": command})


def append_row(folder: Path, row: Row[Any, Any]) -> None:
    """Appends a row to the rows file."""
    _append_line(folder, row.to_json_values())


def _append_line(folder: Path, values: Mapping[str, Any]) -> None:
    append_text(folder / ROWS_FILE, json.dumps(values) + "\n")


def read_rows_file(path: Path) -> tuple[dict[str, Any], tuple[Row[Any, Any], ...]]:
    """Returns the header of a rows file and the latest row of each task, with cases and figures as JSON values.

    The key ``runs`` of the header contains all command lines that made rows. An incomplete last line is ignored.

    Raises:
        ConfigurationError: the file was not written by an experiment of this version.
    """
    remedy = "Make it anew: nsys-analyze bench"
    try:
        *lines, last_line = path.read_bytes().split(b"\n")
        header, *entries = (decode_json(line) for line in (lines or [last_line]))
        results = [{**entry, "message": entry.get("message") or ""} for entry in entries if "module" in entry]
        rows = {(row := msgspec.convert(result, _JsonRow)).key: row for result in results}
        commands = [entry["run"] for entry in (header, *entries) if entry.get("run") and "module" not in entry]
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} was not written by nsys-analyze bench ({error})", remedy) from error
    is_current = isinstance(header, dict) and header.get("schema_version") == SCHEMA_VERSION
    if not is_current or not all(isinstance(text, str) for text in (header.get("bench"), *commands)):
        raise ConfigurationError(f"{path} was not written by nsys-analyze bench of this version", remedy)
    return {**header, "runs": list(dict.fromkeys(commands))}, tuple(rows.values())
