"""The report as data: sections of paragraphs, tables and figures, without a word of formatting.

Every string is text as ``nsys_analyzer.text`` has it: plain, but for stretches that are marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary import CaptureSummary
    from nsys_analyzer.benches.model import Finished

#: What the cells of a column are; ``report.units`` says how each is written.
Unit = Literal["text", "code", "count", "ms", "us", "percent", "factor", "flop", "flop/s", "bytes", "bytes/s"]

TEXT_UNITS = ("text", "code")


def _check_numbers(of: str, values: Iterable[object]) -> None:
    """Makes sure that a renderer can write or draw values; None is one that is unknown."""
    for value in values:
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"{of} cannot hold {str(value)[:50]!r}")


@dataclass(frozen=True)
class Spread:
    """A mean with its standard deviation (None below two samples).

    Raises:
        TypeError: one of them is no number.
    """

    mean: float
    std: float | None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_numbers("a spread", (self.mean, self.std))


@dataclass(frozen=True)
class Typical:
    """A median with the least and the most of its samples."""

    median: float
    least: float
    most: float


Cell: TypeAlias = "str | int | float | Spread | Typical | None"


@dataclass(frozen=True)
class Column:
    """A column of a table: its title and the unit of its cells."""

    title: str
    unit: Unit = "text"


@dataclass(frozen=True)
class Table:
    """A table; a cell of None is a figure that does not exist.

    Attributes:
        columns, rows: what it holds.
        caption: what it shows.
        capture: the one capture that it is of, empty where it is of several.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    capture: str = ""

    def __post_init__(self) -> None:
        """Makes sure that every cell can be written as its column's unit says, before any renderer meets it.

        Raises:
            TypeError: a number in a column of texts, or what is neither anywhere.
        """
        for row in self.rows:
            for cell, column in zip(row, self.columns, strict=True):
                wanted = (str,) if column.unit in TEXT_UNITS else (str, int, float, Spread, Typical)
                if cell is not None and not isinstance(cell, wanted):
                    raise TypeError(f"column {column.title!r} ({column.unit}) cannot hold {str(cell)[:50]!r}")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Answer:
    """The answer of a question for one configuration, computed: in a sentence or two, and in a few words."""

    capture: str
    text: str
    short: str


@dataclass(frozen=True)
class Listing:
    """Lines of text that stand together: commands, lines of Python, or warnings as bullets."""

    lines: tuple[str, ...]
    kind: Literal["commands", "python", "bullets"] = "bullets"


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away under a title."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Bars:
    """A bar chart.

    Attributes:
        key: the figure's file name, without extension.
        title: what it shows.
        groups: names along the axis.
        series: name and one value per group (None: nothing known).
        axis: title of the value axis, with its unit.
        kind: bars side by side, stacked, or one horizontal bar for each group.
    """

    key: str
    title: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    axis: str
    kind: Literal["grouped", "stacked", "horizontal"] = "grouped"

    def __post_init__(self) -> None:
        """Makes sure that every value can be drawn.

        Raises:
            TypeError: one is no number.
        """
        _check_numbers(self.title, (value for _, values in self.series for value in values))


@dataclass(frozen=True)
class Lines:
    """Curves over a numeric axis.

    Attributes:
        key: the figure's file name, without extension.
        title: what it shows.
        series: name and points of each curve; a curve breaks where y is None.
        x_axis, y_axis: titles of the axes, with their units.
        log_x, log_y: whether an axis is logarithmic; x to the base of 2.
        spans: name, start and end along x of stretches that are shaded, such as the phases of a step.
        steps: whether a value holds until the next one, as of memory, instead of a straight line between points.
    """

    key: str
    title: str
    series: tuple[tuple[str, tuple[tuple[float, float | None], ...]], ...]
    x_axis: str
    y_axis: str
    log_x: bool = False
    log_y: bool = False
    spans: tuple[tuple[str, float, float], ...] = ()
    steps: bool = False

    def __post_init__(self) -> None:
        """Makes sure that every point can be drawn.

        Raises:
            TypeError: one is no number.
        """
        _check_numbers(self.title, (value for _, points in self.series for point in points for value in point))
        _check_numbers(self.title, (moment for _, *moments in self.spans for moment in moments))


Figure: TypeAlias = "Bars | Lines"
Block: TypeAlias = "Paragraph | Answer | Listing | Table | Details | Bars | Lines"


def unfolded(blocks: tuple[Block, ...]) -> Iterator[Block]:
    """The blocks, those inside folded ones in place of these."""
    for block in blocks:
        if isinstance(block, Details):
            yield from unfolded(block.blocks)
        else:
            yield block


@dataclass(frozen=True)
class Section:
    """One section of the report: a title, its blocks, and the topic of its answers in a word or two."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    topic: str = ""

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The section's answers, folded ones too."""
        return tuple(block for block in unfolded(self.blocks) if isinstance(block, Answer))


@dataclass(frozen=True)
class Report:
    """A title and sections in order, and the data that they are written from.

    Attributes:
        title, sections: for people.
        captures: one entry for each process of each capture.
        labels: a short label of every kernel name.
        benches: the experiments whose sections the report takes in.
    """

    title: str
    sections: tuple[Section, ...]
    captures: tuple[CaptureSummary, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    benches: tuple[Finished, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every figure of the report."""
        blocks = (block for section in self.sections for block in unfolded(section.blocks))
        return tuple(block for block in blocks if isinstance(block, Bars | Lines))
