"""The report as data: sections of paragraphs, tables and figures, without a word of formatting.

A string is plain text; where more than that may stand, it is ``Words``: a string, or a text with spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nsys_analyzer.text import Text, Words

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.runs.rows import Row

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


Cell: TypeAlias = "Words | int | float | Spread | Typical | None"


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
    caption: Words = ""
    capture: str = ""

    def __post_init__(self) -> None:
        """Makes sure that every cell can be written as its column's unit says, before any renderer meets it.

        Raises:
            TypeError: a number in a column of texts, or what is neither anywhere.
        """
        for row in self.rows:
            for cell, column in zip(row, self.columns, strict=True):
                wanted = (str, Text) if column.unit in TEXT_UNITS else (str, Text, int, float, Spread, Typical)
                if cell is not None and not isinstance(cell, wanted):
                    raise TypeError(f"column {column.title!r} ({column.unit}) cannot hold {str(cell)[:50]!r}")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: Words


@dataclass(frozen=True)
class Answer:
    """The answer of a question for one configuration, computed: in a sentence or two, and in a few words."""

    capture: str
    text: Words
    short: Words


@dataclass(frozen=True)
class Listing:
    """Lines of text that stand together: commands, lines of Python, or warnings as bullets."""

    lines: tuple[Words, ...]
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
        kind: bars side by side; parts of one bar for each group; one bar for each group; or bars for each group that
            lie in each other, the first series the outermost.
        color_names: of one bar for each group: the class, phase or other name that gives each bar its color.
        mark: of bars in each other: the series that is a mark across them instead.
    """

    key: str
    title: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    axis: str
    kind: Literal["grouped", "stacked", "horizontal", "nested"] = "grouped"
    color_names: tuple[str, ...] = ()
    mark: str = ""

    def __post_init__(self) -> None:
        """Makes sure that every value can be drawn.

        Raises:
            TypeError: one is no number.
        """
        _check_numbers(self.title, (value for _, values in self.series for value in values))


#: The name and the points of each curve; a curve breaks where y is None.
Curves: TypeAlias = "tuple[tuple[str, tuple[tuple[float, float | None], ...]], ...]"


@dataclass(frozen=True)
class Lines:
    """Curves over a numeric axis.

    Attributes:
        key: the figure's file name, without extension.
        title: what it shows.
        series: the curves.
        x_axis, y_axis: titles of the axes, with their units.
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

    def __post_init__(self) -> None:
        """Makes sure that every point can be drawn.

        Raises:
            TypeError: one is no number.
        """
        _check_numbers(self.title, (value for _, points in self.series for point in points for value in point))
        _check_numbers(self.title, (moment for _, *moments in self.spans for moment in moments))


@dataclass(frozen=True)
class Panels:
    """Small multiples: curves of several models or widths, in panels side by side that share their axes.

    Attributes:
        key: the figure's file name, without extension.
        title: what it shows.
        panels: title and curves of each panel; curves of one name have one color in all of them.
        x_axis, y_axis, log_x, log_y: as of ``Lines``.
    """

    key: str
    title: str
    panels: tuple[tuple[str, Curves], ...]
    x_axis: str
    y_axis: str
    log_x: bool = True
    log_y: bool = False

    def __post_init__(self) -> None:
        """Makes sure that every point can be drawn.

        Raises:
            TypeError: one is no number.
        """
        points = (point for _, curves in self.panels for _, points in curves for point in points)
        _check_numbers(self.title, (value for point in points for value in point))


Figure: TypeAlias = "Bars | Lines | Panels"
Block: TypeAlias = "Paragraph | Answer | Listing | Table | Details | Figure"


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
class FinishedBench:
    """An experiment that has run: its section, and the data behind it.

    Attributes:
        name, section: the experiment's.
        rows: its own rows.
        ceilings: the rows of the device's ceilings, by precision.
        commands: the command lines that made the rows.
    """

    name: str
    section: Section
    rows: tuple[Row[Any, Any], ...] = ()
    ceilings: Mapping[str, Row[Any, Any]] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


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
    benches: tuple[FinishedBench, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every figure of the report."""
        blocks = (block for section in self.sections for block in unfolded(section.blocks))
        return tuple(block for block in blocks if isinstance(block, Bars | Lines | Panels))
