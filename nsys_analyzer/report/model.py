"""The report as data: sections of paragraphs, tables and figures, independent of any output format.

A ``str`` is plain text. ``StrOrText`` is either a ``str`` or a ``Text`` with code, emphasis or links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from nsys_analyzer.text import StrOrText, plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.findings.finding import Place
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.inputs.rows import Row

#: The unit of the cells of a column. ``report.units`` defines how each unit is formatted.
Unit = Literal[
    "text", "code", "bar", "count", "ms", "us", "percent", "factor", "flop", "flop/s", "bytes", "bytes/s", "J"
]

#: The units whose cells are aligned to the left. A bar is a share that is drawn.
TEXT_UNITS = ("text", "code", "bar")


@dataclass(frozen=True)
class Spread:
    """A mean with its standard deviation, which is None if there are fewer than two samples."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class MedianRange:
    """A median with the minimum and the maximum of the samples."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Interval:
    """A lower and an upper bound of a figure; they are equal if the figure is known."""

    low: float
    high: float


@dataclass(frozen=True)
class SignedChange:
    """A change of a figure, and the bounds of its confidence interval, which are None if it is unknown."""

    value: float
    low: float | None = None
    high: float | None = None


Cell: TypeAlias = "StrOrText | int | float | Spread | MedianRange | Interval | SignedChange | None"


@dataclass(frozen=True)
class Column:
    """A column of a table: its title and the unit of its cells."""

    title: str
    unit: Unit = "text"


@dataclass(frozen=True)
class Table:
    """A table. A cell is None if its figure does not exist.

    Attributes:
        capture: the title of the capture that the table describes, or empty.
        names: the number of leading columns that identify the row.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: StrOrText = ""
    capture: str = ""
    names: int = 1


RowData = TypeVar("RowData")


@dataclass(frozen=True)
class Field(Generic[RowData]):
    """A column of a table, and the function that makes its cells.

    Attributes:
        cell: computes the cell from the data of a row.
        fills: tells whether a cell has content. A column in which no cell has content is left out.
    """

    title: str
    unit: Unit
    cell: Callable[[RowData], Cell]
    fills: Callable[[Cell], bool] = lambda cell: cell is not None


def make_table(
    fields: Sequence[Field[RowData]],
    rows: Iterable[RowData],
    caption: StrOrText = "",
    *,
    capture: str = "",
    names: int = 1,
) -> Table:
    """Makes a table without empty rows and columns.

    The first ``names`` fields name the row. They are always shown, and a row without any other figure is left out.
    """
    all_cells = [tuple(field.cell(row) for field in fields) for row in rows]
    filled_rows = [cells for cells in all_cells if any(cell is not None for cell in cells[names:])]
    filled_fields = [
        i for i, field in enumerate(fields) if i < names or any(field.fills(cells[i]) for cells in filled_rows)
    ]
    columns = tuple(Column(fields[i].title, fields[i].unit) for i in filled_fields)
    return Table(
        columns, tuple(tuple(cells[i] for i in filled_fields) for cells in filled_rows), caption, capture, names
    )


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text. ``capture`` is the title of the capture that it describes, or empty."""

    text: StrOrText
    capture: str = ""


@dataclass(frozen=True)
class Answer:
    """A quotable sentence that answers a question. ``capture`` is the title of the described capture, or empty."""

    text: StrOrText
    capture: str = ""


@dataclass(frozen=True)
class Listing:
    """A group of lines: commands, lines of Python or C, or warnings as bullets.

    ``capture`` is the title of the capture that they describe, or empty.
    """

    lines: tuple[StrOrText, ...]
    kind: Literal["commands", "python", "bullets"] = "bullets"
    capture: str = ""


@dataclass(frozen=True)
class TimelineLink:
    """A link to the place on the timeline that a finding is about. Formats without a timeline omit it."""

    place: Place
    capture: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded under a title. ``capture`` is the title of the capture that they describe, or empty."""

    title: str
    blocks: tuple[Block, ...]
    capture: str = ""


class Bar(NamedTuple):
    """One bar of ``StepBars``: the ms of each part, and a label, which is empty if there is only one bar."""

    label: str
    ms: tuple[float, ...]


@dataclass(frozen=True)
class StepBars:
    """Steps drawn as bars on one scale.

    Attributes:
        parts: the names of the parts that every bar consists of.
        rows: the bars.
        title: what the bars show.
        note: what the bars omit, or empty.
        capture: the title of the capture that they describe, or empty.
    """

    parts: tuple[str, ...]
    rows: tuple[Bar, ...]
    title: str
    note: str = ""
    capture: str = ""


@dataclass(frozen=True)
class Bars:
    """A bar chart; its file is named after ``key``.

    Attributes:
        series: pairs of a name and its values, one for each group; a value is None if it is unknown.
        axis: the label of the value axis.
    """

    key: str
    title: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    axis: str
    kind: Literal["grouped", "stacked"] = "grouped"


#: The name and the points of each curve. A curve is interrupted where y is None.
Curves: TypeAlias = "tuple[tuple[str, tuple[tuple[float, float | None], ...]], ...]"


@dataclass(frozen=True)
class Lines:
    """A chart of curves over a numeric axis; its file is named after ``key``.

    Attributes:
        log_x: whether the x axis is logarithmic to the base of 2.
        log_y: whether the y axis is logarithmic if its values span more than a decade.
        spans: name, start and end of the shaded intervals of the x axis, such as the phases of a step.
        steps: whether each value stays constant until the next point, as memory does, instead of a straight line.
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
Block: TypeAlias = "Paragraph | Answer | Listing | Table | StepBars | Details | TimelineLink | Figure"


def unfold_details(blocks: tuple[Block, ...]) -> Iterator[Block]:
    """Yields the blocks, with each ``Details`` replaced by the blocks inside it."""
    for block in blocks:
        if isinstance(block, Details):
            yield from unfold_details(block.blocks)
        else:
            yield block


@dataclass(frozen=True)
class Section:
    """A section of the report: its title and blocks. The first section may have an empty title."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class FinishedBench:
    """A finished experiment: its section, its rows, and the commands that ran it."""

    name: str
    section: Section
    rows: tuple[Row[Any, Any], ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A title, the sections in order, and the data that they were made from.

    Attributes:
        labels: the short label of each kernel, by the kernel's name.
    """

    title: str
    sections: tuple[Section, ...]
    captures: tuple[CaptureSummary, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    benches: tuple[FinishedBench, ...] = ()
    runs: tuple[ParallelRun, ...] = ()

    def __repr__(self) -> str:
        """Returns one line, as an interactive session or a notebook shows it."""
        return f"<Report {plain(self.title)}: {', '.join(section.key for section in self.sections)}>"

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Returns all figures of the report."""
        blocks = (block for section in self.sections for block in unfold_details(section.blocks))
        return tuple(block for block in blocks if isinstance(block, Bars | Lines))
