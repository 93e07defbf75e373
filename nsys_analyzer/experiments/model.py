"""Experiments: their options, the tasks that targets measure, and what is said of the rows.

A new experiment is a module ``experiments/NAME.py``, an entry in ``BENCHES`` and a target in ``profiling_targets/``:

- the module declares a frozen ``Case`` dataclass, whose fields are made by ``option``, a ``Figures`` dataclass, whose
  fields have a unit in their names and are None until they are measured, and the ``CaseTarget`` of both;
- the target imports these and fills the figures: ``harness.main(TARGET, measure)``;
- its ``BENCH`` says which of the case's options it has (``several`` values of one, or a ``single`` one for all tasks),
  the conditions, and what answers, tables and figures the rows give. ``section`` makes the rest, the same for all.
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
#: Options that say how something is measured, and not what.
CONDITIONS = ("device", "steps", "warmup_steps", "warmup_tokens", "measured_ms")


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


def describe(case: Any, options: Iterable[str]) -> str:
    """Returns the values of some options of a case, for a sentence: ``small, context length 1,024, compile on``."""
    values = ((key, getattr(case, key)) for key in options)
    return ", ".join(value if isinstance(value, str) else f"{words(key)} {told(value)}" for key, value in values)


def told(value: Any) -> str:
    """Returns the value of an option for a sentence."""
    return f"{value:,}" if type(value) is int else str(spelled(value))


def configuration(case: Any, without: str = "") -> Hashable:
    """Returns what a case measures: its options but for the conditions, and for one more."""
    keys = (one.name for one in fields(case) if one.name not in (*CONDITIONS, without))
    return frozenset((key, getattr(case, key)) for key in keys)


def words(option: str) -> str:
    """Returns what an option is called in a table."""
    return option.replace("_", " ")


def spelled(value: Any) -> Any:
    """Returns the value of an option as the command line has it; several with commas between them."""
    if isinstance(value, tuple):
        return ",".join(str(spelled(inner)) for inner in value)
    return ("off", "on")[value] if isinstance(value, bool) else value


def figure(row: AnyRow | None, path: str) -> Any:
    """Returns a figure of a row by its path, such as ``forward.cv``; None where one of the two is missing."""
    found = row.figures if row else None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def mean_ms(row: AnyRow | None, path: str) -> float | None:
    """Returns the time of a pass in ms; None where it was not measured."""
    ms: float | None = figure(row, f"{path}.ms")
    return ms


def ratio(over: float | None, under: float | None) -> float | None:
    """Returns the one ÷ the other; None where either is missing or 0."""
    return over / under if over and under else None


@dataclass(frozen=True)
class Results:
    """All that is said of a bench is made from its ``rows``, in the order in which they were first measured."""

    rows: tuple[AnyRow, ...]

    @cached_property
    def _by_case(self) -> dict[Any, AnyRow]:
        return {configuration(row.case): row for row in self.rows}

    def beside(self, row: AnyRow, **changes: Any) -> AnyRow | None:
        """Returns the row whose configuration differs from this one's in some options alone; None without any."""
        case = replace(row.case, **changes)
        return None if case == row.case else self._by_case.get(configuration(case))

    def gain(self, row: AnyRow, path: str, **changes: Any) -> float | None:
        """Returns the time of the row beside this one ÷ its own: how many times as fast this one is."""
        return ratio(mean_ms(self.beside(row, **changes), path), mean_ms(row, path))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An experiment.

    Attributes:
        name, title, summary: its name on the command line, that of its section, and what it measures, in a line.
        options: its own options, beside those of every bench.
        target: the program that measures its cases.
        how: conditions, with the values of options in braces: ``{"warm-up": "{warmup_steps} steps"}``.
        answers, blocks: sentences, and tables and figures, of the results.
        definitions: what its tables' columns mean.
    """

    name: str
    title: str
    summary: str
    options: tuple[Option, ...]
    target: CaseTarget[Any, Any]
    answers: Callable[[Results], Iterable[StrOrText]]
    blocks: Callable[[Results], Iterable[Block]]
    how: Mapping[str, str] = field(default_factory=dict)
    definitions: StrOrText = ""

    def tasks(self, values: Mapping[str, Any]) -> tuple[Task[Any], ...]:
        """Returns a task for each combination of values of options, those of the last one varying fastest."""
        every = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
        if "model" in every:
            every["model"] = tuple(find_model(name).name for name in every["model"])
        several = [name for name, value in values.items() if isinstance(value, tuple)]
        cases = [self.target.case(**dict(zip(every, each, strict=True))) for each in itertools.product(*every.values())]
        return tuple(Task(self.target, case, describe(case, several)) for case in dict.fromkeys(cases))
