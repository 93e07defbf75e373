"""Experiments: their options, the tasks that targets measure, and the section that is made from the rows.

A new experiment is a module ``experiments/NAME.py``, an entry in ``BENCHES`` and a target in ``profiling_targets/``:

- the module declares a frozen ``Case`` dataclass, whose fields are made by ``option``, a ``Figures`` dataclass, whose
  fields have a unit in their names and are None until they are measured, and the ``CaseTarget`` of both;
- the target imports these and fills the figures: ``harness.main(TARGET, measure)``;
- its ``BENCH`` says which of the case's options it has (``several`` values of one, or a ``single`` one for all tasks),
  which tasks come of them (``grid``), and makes the section of ``results.rows_of(TARGET)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nsys_analyzer.configuration import OPTIONS, Option
from nsys_analyzer.report.model import Section
from nsys_analyzer.runs.rows import CaseTarget, Row, Task, written

if TYPE_CHECKING:  # numpy comes with them, and help need not wait for it
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.runs.targets import Target

C = TypeVar("C")
F = TypeVar("F")
T = TypeVar("T")
#: A row of any target.
AnyRow: TypeAlias = Row[Any, Any]


def require(figure: T | None) -> T:
    """Returns a figure that every row has which was measured to its end.

    Raises:
        LookupError: it is missing.
    """
    if figure is None:
        raise LookupError("a row that was measured lacks a figure")
    return figure


def option(
    default: Any, help: str = "", choices: tuple[str, ...] = (), *, cpu: Any = None, least: int = 1, spelling: str = ""
) -> Any:  # fmt: skip
    """Makes a field of a case, which is an option of its target, and of the experiments that have it among theirs.

    Args:
        default: the value where none is given.
        help: what command lines say of it.
        choices: the values that a text may have; none for any.
        cpu: an experiment's default on a CPU, where it is another.
        least: the lowest value of a whole number.
        spelling: its name on command lines, where that is not the field's.
    """
    return field(default=default, metadata={"option": Option(default, help, choices, cpu, least, spelling=spelling)})


def options_of(case: type) -> dict[str, Option]:
    """Returns the options of a case by name; one that ``nsys-analyze run`` has, too, is spelled as there."""
    declared = {field.name: field.metadata.get("option") for field in fields(case)}
    known = {name: {"spelling": one.spelling, "unit": one.unit} for name, one in OPTIONS.items()}
    return {name: replace(one, name=name, **known.get(name, {})) for name, one in declared.items() if one}


def several(
    case: type, name: str, values: Sequence[Any], cpu: Sequence[Any] | None = None, /, **changes: Any
) -> Option:
    """Returns the option of a case's field as an experiment's that takes several values, with its defaults."""
    on_cpu = None if cpu is None else tuple(cpu)
    return replace(options_of(case)[name], default=tuple(values), default_on_cpu=on_cpu, several=True, **changes)


def single(case: type, *names: str) -> tuple[Option, ...]:
    """Returns the options of a case's fields that are the same for all tasks of an experiment."""
    return tuple(options_of(case)[name] for name in names)


@dataclass(frozen=True)
class Settings:
    """The values of a bench's options: a tuple for each that takes several, else the value itself."""

    device: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def all_of(self, name: str) -> tuple[Any, ...]:
        """Returns the values of an option, whether it takes several or one."""
        value = self[name]
        return value if isinstance(value, tuple) else (value,)


def grid(
    target: CaseTarget[C, Any], settings: Settings, label: Callable[[C], str], *,
    environment: Mapping[str, str] | None = None, **values: Sequence[Any],
) -> Iterator[Task[C]]:  # fmt: skip
    """Yields a task for each combination of the settings' values, those of the last option varying fastest.

    ``values`` take the place of the settings.
    """
    names = {known.name for known in fields(target.case)}  # type: ignore[arg-type]
    every = {key: settings.all_of(key) for key in settings.values if key in names} | values
    for combination in itertools.product(*every.values()):
        case = target.case(**{"device": settings.device, **dict(zip(every, combination, strict=True))})
        yield Task(target, case, label(case), environment or {})


@dataclass(frozen=True)
class Results:
    """All that a bench's section is made from.

    Attributes:
        rows: those of the bench's own targets, in the order in which they were first measured.
        ceilings: those of the device's ceilings, by precision.
        captures: summaries of what was profiled.
        commands: the command lines that made the rows.
        folder: the bench's folder, as the section's reader sees it.
    """

    rows: tuple[Row[Any, Any], ...]
    ceilings: Mapping[str, AnyRow] = field(default_factory=dict)
    captures: tuple[CaptureSummary, ...] = ()
    commands: tuple[str, ...] = ()
    folder: str = ""

    def rows_of(self, target: CaseTarget[C, F]) -> tuple[Row[C, F], ...]:
        """Returns the rows of one target."""
        return tuple(row for row in self.rows if row.module == target.module)

    def by_case(self, target: CaseTarget[C, F]) -> dict[C, Row[C, F]]:
        """Returns the rows of one target by case; of one that was measured in several environments the last."""
        return {row.case: row for row in self.rows_of(target)}

    @property
    def gpu(self) -> str | None:
        """The name of the GPU that it ran on, None on a CPU."""
        return next((str(row.machine["gpu"]) for row in self.rows if row.machine.get("gpu")), None)

    @property
    def on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return any(written(row.case).get("device") == "cuda" for row in self.rows)


@dataclass(frozen=True)
class Profiled:
    """Targets that a bench profiles besides, and whether memory events are recorded."""

    targets: tuple[Target, ...]
    memory: bool = False


@dataclass(frozen=True)
class Bench:
    """An experiment.

    Attributes:
        name, summary: its name on the command line, and what it measures, in a line.
        options: its own options, beside those of every bench.
        cases: makes the tasks of the settings, in order; the device's ceilings are measured before them.
        section: makes the section of the results; a pure function.
        captures: makes the targets to profile after the cases.
        precisions: gives the precisions whose ceilings are measured, by default those of the option.
        targets: the programs that measure its cases.
    """

    name: str
    summary: str
    options: tuple[Option, ...]
    cases: Callable[[Settings], tuple[Task[Any], ...]]
    section: Callable[[Results], Section]
    captures: Callable[[Settings], Profiled] | None = None
    precisions: Callable[[Settings], tuple[str, ...]] = lambda settings: settings.all_of("precision")
    targets: tuple[CaseTarget[Any, Any], ...] = ()


def spelled(value: Any) -> Any:
    """Returns the value of an option as the command line has it; several with commas between them."""
    if isinstance(value, tuple):
        return ",".join(str(spelled(inner)) for inner in value)
    return ("off", "on")[value] if isinstance(value, bool) else value
