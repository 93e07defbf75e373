"""Cases that experiments ask of targets, figures that these measure, and the file of rows that keeps both.

A target is a program that measures one case after another. Its case and its figures are dataclasses, which the target
writes and the experiment's section reads; this module alone turns them into JSON and back:

- a field that is None is not measured, and has no key;
- a part, such as ``forward: Times | None``, has a key for each of its own fields: ``forward_ms``, ``forward_std_ms``.
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
C = TypeVar("C")
F = TypeVar("F")
T = TypeVar("T")

#: The file of rows in an experiment's folder.
NAME = "bench.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class CaseTarget(Generic[C, F]):
    """A program that measures cases: its module, and the types of its cases and of its figures."""

    module: str
    case: type[C] = dict  # type: ignore[assignment]
    figures: type[F] = dict  # type: ignore[assignment]


@dataclass(frozen=True)
class Times:
    """Times in ms of something done several times, ``ms`` their mean; once done it has no standard deviation.

    ``cv`` is the coefficient of variation, standard deviation ÷ mean.
    """

    ms: float
    min_ms: float | None = None
    max_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    cv: float | None = None

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        """Returns the figures of these times in ms, one at the least."""
        mean = statistics.fmean(times)
        std = statistics.stdev(times) if len(times) > 1 else None
        cv = None if std is None else std / mean
        return cls(mean, min(times), max(times), statistics.median(times), std, cv)


@dataclass(frozen=True)
class Task(Generic[C]):
    """One measurement to be made: the target, its case, and what it is called in progress and messages."""

    target: CaseTarget[C, Any]
    case: C
    label: str

    @property
    def key(self) -> str:
        """Tells it from all others, as text."""
        return _key(self.target.module, self.case)


@dataclass(frozen=True)
class Row(Generic[C, F]):
    """The result of a task.

    Attributes:
        module: the target's.
        case: its options.
        message: why it is not ok, in a line.
        figures: what was measured, also before it failed.
        machine: device, versions.
    """

    module: str
    case: C
    status: Status
    message: str = ""
    figures: F = field(default_factory=dict)  # type: ignore[assignment]
    machine: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Returns whether it was measured to its end."""
        return self.status == "ok"

    @property
    def key(self) -> str:
        """Returns the key of its task."""
        return _key(self.module, self.case)

    def written(self) -> dict[str, Any]:
        """Returns the row in JSON's types."""
        return {**vars(self), "case": written(self.case), "figures": written(self.figures)}


def _key(module: str, case: object) -> str:
    return json.dumps([module, written(case)], sort_keys=True)


def written(value: object) -> dict[str, Any]:
    """Returns a case or figures in JSON's types: the parts spelled out, without what is None."""
    if isinstance(value, Mapping):
        return dict(value)
    found: dict[str, Any] = {}
    for one in fields(value):  # type: ignore[arg-type]
        held = getattr(value, one.name)
        if is_dataclass(held):
            found |= {f"{one.name}_{key}": inner for key, inner in written(held).items()}
        elif held is not None:
            found[one.name] = msgspec.to_builtins(held)
    return found


def loaded(kind: type[T], values: Mapping[str, Any]) -> T:
    """Returns the case or figures that JSON's values stand for.

    Raises:
        ValueError: one is missing, or of another type; it says which.
    """
    if not is_dataclass(kind):
        return values  # type: ignore[return-value]
    known = {key: value for key, value in values.items() if value is not None}
    for name, keys in _parts(kind).items():
        part = {short: known.pop(key) for key, short in keys.items() if key in known}
        if part:
            known[name] = part
    return msgspec.convert(known, kind)


@cache
def _parts(kind: type) -> dict[str, dict[str, str]]:
    """Returns the parts of a type, and of each its keys in JSON with the names of their fields."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if part := next((one for one in kinds if is_dataclass(one)), None):
            found[name] = {f"{name}_{one.name}": one.name for one in fields(part)}
    return found


def typed(row: Row[Any, Any], target: CaseTarget[C, F]) -> Row[C, F]:
    """Returns a row as the file holds it, its case and figures in their types.

    Raises:
        ValueError: a value of the case is missing, one is of another type, or nothing was measured although it is ok.
    """
    case, figures = loaded(target.case, row.case), loaded(target.figures, row.figures)
    if row.ok and not written(figures):
        raise ValueError(f"a row of {row.module} is ok, and has no figures")
    return replace(row, case=case, figures=figures)


def start_file(folder: Path, header: Mapping[str, Any]) -> None:
    """Makes the file of rows anew, with a first line that says what it is of."""
    line = json.dumps({"schema_version": SCHEMA_VERSION, **header})
    write_text(folder / NAME, line + "\n")


def note_command(folder: Path, command: str) -> None:
    """Notes that the rows behind this line are of another command line.

    A last line that an interrupt cut off is removed: what comes behind it would be lost with it.
    """
    path = folder / NAME
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    with path.open("r+b") as file:
        file.truncate(len(whole))
    _append(folder, {"run": command})


def add_row(folder: Path, row: Row[Any, Any]) -> None:
    """Adds a row to the file."""
    _append(folder, row.written())


def _append(folder: Path, values: Mapping[str, Any]) -> None:
    append_text(folder / NAME, json.dumps(values) + "\n")


def read_file(path: Path) -> tuple[dict[str, Any], tuple[Row[Any, Any], ...]]:
    """Returns the header and the rows, each task once, with its latest row; cases and figures as JSON has them.

    The header's ``runs`` are all command lines that made rows. A last line that an interrupt cut off is passed over.

    Raises:
        ConfigurationError: the file is none of an experiment's.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        header, *found = (decode_json(line) for line in (lines or [rest]))
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


def _row(values: Mapping[str, Any]) -> Row[Any, Any]:
    line = {**values, "message": values.get("message") or ""}
    return msgspec.convert(line, Row[dict[str, Scalar], dict[str, Scalar | list[Any] | dict[str, Any]]])
