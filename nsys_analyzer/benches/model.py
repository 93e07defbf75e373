"""What a bench is: options, cases that a target measures, and the section that its rows become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsys_analyzer.capture.cases import Case as Case
from nsys_analyzer.capture.cases import Row as Row
from nsys_analyzer.report.model import Section

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary import CaptureSummary
    from nsys_analyzer.capture.targets import Target

#: The target that every bench measures first: what the device reaches.
CEILINGS = "profiling_targets.ceilings"


@dataclass(frozen=True)
class Option:
    """An option of a bench's command line.

    Attributes:
        name: the key in the settings; the command line spells it ``--d-head``.
        kind: int, float, str, or the choices; of these ``("on", "off")`` where both can be wanted.
        cuda, cpu: the values by default on a GPU, and the smaller ones on a CPU.
        help: what the command line says of it.
        several: whether it takes several values with commas between them; of one that does not, the only value counts.
        least: the lowest value of an int.

    """

    name: str
    kind: type | tuple[str, ...]
    cuda: tuple[Any, ...]
    cpu: tuple[Any, ...]
    help: str
    several: bool = True
    least: int = 1


@dataclass(frozen=True)
class Settings:
    """What a bench was asked for: a tuple for each option that takes several values, else the value itself."""

    device: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Results:
    """What a bench's section is made from.

    Attributes:
        rows: those of the bench's own targets, in the order in which they were first measured.
        ceilings: those of the device's ceilings, by precision.
        captures: summaries of what was profiled, empty where the bench profiles nothing.
        commands: the command lines that made it.
        folder: where its files lie, as the section's reader sees it.

    """

    rows: tuple[Row, ...]
    ceilings: Mapping[str, Row] = field(default_factory=dict)
    captures: tuple[CaptureSummary, ...] = ()
    commands: tuple[str, ...] = ()
    folder: str = ""

    def of(self, **values: Any) -> tuple[Row, ...]:
        """The rows whose cases have these values."""
        return tuple(row for row in self.rows if all(row.case.get(key) == value for key, value in values.items()))

    @property
    def on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return any(row.case.get("device") == "cuda" for row in self.rows)


@dataclass(frozen=True)
class Profiled:
    """Targets that a bench profiles besides, and whether memory events are recorded."""

    targets: tuple[Target, ...]
    memory: bool = False


@dataclass(frozen=True)
class Bench:
    """An experiment.

    Attributes:
        name: what the command line calls it.
        summary: what it measures, in a line.
        options: its own options, beside ``--device`` and those of every bench.
        cases: the cases of the settings, in order; the device's ceilings are measured before them.
        section: the section that comes of the results; a pure function.
        captures: targets to profile after the cases, None for none.
        precisions: those whose ceilings are measured.

    """

    name: str
    summary: str
    options: tuple[Option, ...]
    cases: Callable[[Settings], tuple[Case, ...]]
    section: Callable[[Results], Section]
    captures: Callable[[Settings], Profiled] | None = None
    precisions: Callable[[Settings], tuple[str, ...]] = lambda _: ("fp32",)


@dataclass(frozen=True)
class Finished:
    """A bench that was run, and its section."""

    name: str
    results: Results
    section: Section
