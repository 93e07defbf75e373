"""The report as data: sections of paragraphs, tables and figures, without a word of formatting.

A string is plain text; where more than that may stand, it is ``Words``: a string, or a text with spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from nsys_analyzer.text import Words, plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.findings.finding import Place
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.inputs.rows import Row

#: What the cells of a column are; ``report.units`` says how each is written.
Unit = Literal["text", "code", "bar", "count", "ms", "us", "percent", "factor", "flop", "flop/s", "bytes", "bytes/s"]

#: The units of what stands at the left of its column; a bar is a share that is drawn.
TEXT_UNITS = ("text", "code", "bar")


@dataclass(frozen=True)
class Spread:
    """A mean with its standard deviation (None below two samples)."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Typical:
    """A median with the least and the most of its samples."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Interval:
    """A figure that lies between two bounds; equal where it is known."""

    low: float
    high: float


@dataclass(frozen=True)
class Shift:
    """A change of a figure, and the interval that it lies in; None where nothing tells it."""

    value: float
    low: float | None = None
    high: float | None = None


Cell: TypeAlias = "Words | int | float | Spread | Typical | Interval | Shift | None"


@dataclass(frozen=True)
class Column:
    """A column of a table: its title and the unit of its cells."""

    title: str
    unit: Unit = "text"


@dataclass(frozen=True)
class Table:
    """A table; a cell of None is a figure that does not exist.

    Attributes:
        capture: the one below whose answer it stands, or empty.
        names: how many of the columns, the first ones, name the row.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: Words = ""
    capture: str = ""
    names: int = 1


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text; ``capture`` is the one that it tells of, or empty."""

    text: Words
    capture: str = ""


@dataclass(frozen=True)
class Answer:
    """A sentence that answers a question and can be quoted; ``capture`` is the one that it tells of, or empty."""

    text: Words
    capture: str = ""


@dataclass(frozen=True)
class Listing:
    """Lines of text that stand together: commands, lines of Python or C, or warnings as bullets.

    ``capture`` is the one that they tell of, or empty.
    """

    lines: tuple[Words, ...]
    kind: Literal["commands", "python", "bullets"] = "bullets"
    capture: str = ""


@dataclass(frozen=True)
class Seen:
    """Where a timeline shows what a finding is about; a format without a timeline leaves it out."""

    place: Place
    capture: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away under a title; ``capture`` is the one that they tell of, or empty."""

    title: str
    blocks: tuple[Block, ...]
    capture: str = ""


class Bar(NamedTuple):
    """One bar of ``StepBars``: its label, empty where it is the only one, and the ms of each part."""

    label: str
    ms: tuple[float, ...]


@dataclass(frozen=True)
class StepBars:
    """Steps as bars on one scale, of the same ``parts``; ``title`` says what they are of, ``note`` what they omit."""

    parts: tuple[str, ...]
    rows: tuple[Bar, ...]
    title: str
    note: str = ""
    capture: str = ""


@dataclass(frozen=True)
class Bars:
    """A bar chart; ``key`` is the name of its file.

    Attributes:
        series: name and one value per group (None: nothing known).
    """

    key: str
    title: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    axis: str
    kind: Literal["grouped", "stacked"] = "grouped"


#: The name and the points of each curve; a curve breaks where y is None.
Curves: TypeAlias = "tuple[tuple[str, tuple[tuple[float, float | None], ...]], ...]"


@dataclass(frozen=True)
class Lines:
    """Curves over a numeric axis.

    Attributes:
        log_x: whether x is logarithmic, to the base of 2.
        log_y: whether y is logarithmic where its values span more than a decade.
        spans: name, start and end along x of stretches that are shaded, such as the phases of a step.
        steps: whether a value holds until the next one, as of memory, instead of a straight line between points.
    """

    key: str
    title: str
    series: Curves
    x_axis: str
    y_axis: str
    log_x: bool = False
    log_y: bool = False
    spans: tuple[tuple[str, float, float], ...] = ()
    steps: bool = False


Figure: TypeAlias = "Bars | Lines"
Block: TypeAlias = "Paragraph | Answer | Listing | Table | StepBars | Details | Seen | Figure"


def unfolded(blocks: tuple[Block, ...]) -> Iterator[Block]:
    """The blocks, those inside folded ones in place of these."""
    for block in blocks:
        if isinstance(block, Details):
            yield from unfolded(block.blocks)
        else:
            yield block


@dataclass(frozen=True)
class Section:
    """One section of the report: a title, empty for the first one below the report's own, and its blocks."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class FinishedBench:
    """An experiment that has run: its section, its rows, and its commands."""

    name: str
    section: Section
    rows: tuple[Row[Any, Any], ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A title and sections in order, and the data behind them.

    Attributes:
        labels: a short label of every kernel name.
    """

    title: str
    sections: tuple[Section, ...]
    captures: tuple[CaptureSummary, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    benches: tuple[FinishedBench, ...] = ()
    runs: tuple[ParallelRun, ...] = ()

    def __repr__(self) -> str:
        """Returns one line: a session or a notebook shows it."""
        return f"<Report {plain(self.title)}: {', '.join(section.key for section in self.sections)}>"

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every figure of the report."""
        blocks = (block for section in self.sections for block in unfolded(section.blocks))
        return tuple(block for block in blocks if isinstance(block, Bars | Lines))
