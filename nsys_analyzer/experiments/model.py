"""Defines what an experiment is: its options, its tasks, and the sentences, tables and figures of its rows.

A new experiment is a module ``experiments/NAME.py``, an entry in ``BENCHES`` and a target in ``profiling_targets/``:

- The module declares a frozen ``Case`` dataclass, a ``Figures`` dataclass, and the ``CaseTarget`` of both. The fields
  of a case are made by ``option``. The fields of the figures carry a unit in their names, and are None until measured.
- The target imports these types and fills in the figures: ``harness.main(TARGET, measure)``.
- The module's ``BENCH`` lists the options of the experiment, the conditions, and the functions that make sentences,
  tables and charts from the rows. An option takes either several values, each of which is measured (``list_option``),
  or one value for all cases (``scalar_options``). ``section`` makes the parts that all experiments share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.configuration import OPTIONS, Option
from nsys_analyzer.inputs.rows import CaseTarget, Row, Task
from nsys_analyzer.report.model import Block
from nsys_analyzer.text import StrOrText

C = TypeVar("C")
F = TypeVar("F")
#: A row of any target.
AnyRow: TypeAlias = Row[Any, Any]
#: The options that set how a case is measured. All other options set what work is measured.
CONDITION_OPTIONS = ("device", "steps", "warmup_steps", "warmup_tokens", "measured_ms")


def option(
    default: Any, help: str = "", choices: tuple[str, ...] = (), *, cpu: Any = None, least: int = 1, spelling: str = ""
) -> Any:  # fmt: skip
    """Makes a field of a case. The field is an option of the target, and of each experiment that lists the option.

    Args:
        default: the default value.
        help: the help of the command line.
        choices: the values that a text may have. If it is empty, any text is allowed.
        cpu: the default of experiments on a CPU, if it differs from ``default``.
        least: the lowest value of a whole number.
        spelling: the name on command lines, if it differs from the name of the field.
    """
    return field(default=default, metadata={"option": Option(default, help, choices, cpu, least, spelling=spelling)})


def options_of(case: type) -> dict[str, Option]:
    """Returns the options of a case by name. Spelling and unit are those of an equal option of ``nsys-analyze run``."""
    option_of_field = {field.name: field.metadata.get("option") for field in fields(case)}
    run_options = {name: {"spelling": option.spelling, "unit": option.unit} for name, option in OPTIONS.items()}
    return {
        name: replace(option, name=name, **run_options.get(name, {}))
        for name, option in option_of_field.items()
        if option
    }


def list_option(
    case: type, name: str, values: Sequence[Any], cpu: Sequence[Any] | None = None, /, **changes: Any
) -> Option:
    """Returns the option of a case's field, for an experiment that measures several values of the option.

    Args:
        case: the type of the case.
        name: the field.
        values: the default values.
        cpu: the default values on a CPU, if they differ from ``values``.
        changes: further changes of the option.
    """
    on_cpu = None if cpu is None else tuple(cpu)
    return replace(options_of(case)[name], default=tuple(values), default_on_cpu=on_cpu, several=True, **changes)


def scalar_options(case: type, *names: str) -> tuple[Option, ...]:
    """Returns the options of a case's fields, for an experiment that takes a single value of each option."""
    return tuple(options_of(case)[name] for name in names)


def describe(case: Any, options: Iterable[str]) -> str:
    """Describes a case in a sentence by the values of some options: ``small, context length 1,024, compile on``."""
    values = ((key, getattr(case, key)) for key in options)
    return ", ".join(
        value if isinstance(value, str) else f"{format_option_name(key)} {format_value(value)}" for key, value in values
    )


def format_value(value: Any) -> str:
    """Returns the value of an option for a sentence, such as ``1,024``."""
    return f"{value:,}" if type(value) is int else str(to_command_line_value(value))


def configuration(case: Any, without: str = "") -> Hashable:
    """Returns a hashable configuration of a case: all options except for the conditions and the option ``without``."""
    keys = (field.name for field in fields(case) if field.name not in (*CONDITION_OPTIONS, without))
    return frozenset((key, getattr(case, key)) for key in keys)


def format_option_name(option: str) -> str:
    """Returns the name of an option as a table shows it."""
    return option.replace("_", " ")


def to_command_line_value(value: Any) -> Any:
    """Returns the value of an option as on a command line. Several values are separated by commas."""
    if isinstance(value, tuple):
        return ",".join(str(to_command_line_value(inner)) for inner in value)
    return ("off", "on")[value] if isinstance(value, bool) else value


def find_figure(row: AnyRow | None, path: str) -> Any:
    """Returns a figure of a row by its path, such as ``forward.cv``, or None if the row or the figure is missing."""
    value = row.figures if row else None
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def mean_ms(row: AnyRow | None, path: str) -> float | None:
    """Returns the mean time of a pass in ms, or None if the pass was not measured."""
    ms: float | None = find_figure(row, f"{path}.ms")
    return ms


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Returns ``numerator`` ÷ ``denominator``, or None if either is missing or 0."""
    return numerator / denominator if numerator and denominator else None


@dataclass(frozen=True)
class Results:
    """The rows of an experiment, in the order in which they were first measured."""

    rows: tuple[AnyRow, ...]

    @cached_property
    def _rows_by_case(self) -> dict[Any, AnyRow]:
        return {configuration(row.case): row for row in self.rows}

    def find_row(self, row: AnyRow, **changes: Any) -> AnyRow | None:
        """Returns the row whose configuration differs from this row's only in ``changes``, or None if there is none."""
        case = replace(row.case, **changes)
        return None if case == row.case else self._rows_by_case.get(configuration(case))

    def speed_up(self, row: AnyRow, path: str, **changes: Any) -> float | None:
        """Returns the time of a pass in the row that differs only in ``changes`` ÷ the time of the pass in this row."""
        return ratio(mean_ms(self.find_row(row, **changes), path), mean_ms(row, path))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Describes an experiment.

    Attributes:
        name: the name on the command line.
        title: the title of the report's section.
        summary: one line that says what the experiment measures.
        options: the options of this experiment, besides those that all experiments have.
        target: the program that measures the cases.
        conditions: the conditions of the measurement by name. A name of an option in braces stands for the option's
            value: ``{"warm-up": "{warmup_steps} steps"}``.
        write_sentences: makes the sentences of the section.
        make_tables_and_charts: makes the tables and charts of the section.
        definitions: the sentences that define the columns of the tables.
    """

    name: str
    title: str
    summary: str
    options: tuple[Option, ...]
    target: CaseTarget[Any, Any]
    write_sentences: Callable[[Results], Iterable[StrOrText]]
    make_tables_and_charts: Callable[[Results], Iterable[Block]]
    conditions: Mapping[str, str] = field(default_factory=dict)
    definitions: StrOrText = ""

    def tasks(self, values: Mapping[str, Any]) -> tuple[Task[Any], ...]:
        """Returns a task for each combination of the options' values. The values of the last option vary fastest."""
        choices = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
        if "model" in choices:
            choices["model"] = tuple(find_model(name).name for name in choices["model"])
        names_with_several_values = [name for name, value in values.items() if isinstance(value, tuple)]
        combinations = itertools.product(*choices.values())
        cases = [self.target.case(**dict(zip(choices, values, strict=True))) for values in combinations]
        return tuple(
            Task(self.target, case, describe(case, names_with_several_values)) for case in dict.fromkeys(cases)
        )
