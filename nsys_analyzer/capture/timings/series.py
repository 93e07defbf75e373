"""The timing of a phase in many rows: what they share once, what they differ in by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from nsys_analyzer.capture.timings.columns import Group
from nsys_analyzer.capture.timings.kinds import Kind
from nsys_analyzer.capture.timings.rows import Row
from nsys_analyzer.capture.timings.timing import Timing, timings_of

#: Fields of a row that hold a number and are no time, with their names in a timing.
_NUMBERS = (("iteration", "iteration"), ("peak_memory_bytes", "peak_memory_bytes"), ("time_stamp", "time_stamp_s"))
_NAMES = tuple(field.name for field in fields(Timing))


@dataclass(frozen=True)
class Series:
    """The timings of one phase in several rows.

    Attributes:
        timing: that of the first row; all that is not in ``columns`` is true of every row.
        places: where each row stands among all that are read.
        columns: by their name in ``Timing``, the values in which rows differ, one for each row.
    """

    timing: Timing
    places: Sequence[int]
    columns: Mapping[str, Sequence[Any]]

    def column(self, name: str) -> Sequence[Any]:
        """What each row has under this name of ``Timing``."""
        return self.columns[name] if name in self.columns else [getattr(self.timing, name)] * len(self.places)

    def row(self, index: int) -> Timing:
        """The timing of one row."""
        return replace(self.timing, **{name: values[index] for name, values in self.columns.items()})

    def rows(self, indices: Sequence[int]) -> Series:
        """These rows alone, in this order."""
        columns = {name: [values[index] for index in indices] for name, values in self.columns.items()}
        return Series(self.row(indices[0]), [self.places[index] for index in indices], columns)


def series_of(kind: Kind, before: int, admits: Callable[[Row], bool] | None = None) -> list[Series]:
    """The timings of rows of one kind: one series, or one per phase (and condition) where its columns are wide.

    Args:
        kind: the rows.
        before: how many rows of other files stand before them.
        admits: picks among the conditions that the headers of wide columns name.

    Raises:
        TimingsError: a value that is no number or impossible; it names line and column.
    """
    return [_series(kind, before, group, timing) for group, timing in timings_of(kind.first, admits)]


def _series(kind: Kind, before: int, group: Group, timing: Timing) -> Series:
    header = kind.first.columns
    sources = {name: header.fields[field] for field, name in _NUMBERS if field in header.fields}
    sources |= {f"{time.statistic}_ms": time.index for time in header.times if time.group == group}
    numbers = {name: kind.numbers[index] for name, index in sources.items() if index in kind.numbers}
    # Times count only where the status is ok; what the first row has not, none has.
    counting = {name: values for name, values in numbers.items() if getattr(timing, name) is not None}
    return Series(timing, [before + place for place in kind.places], {"line": kind.lines, **counting})


def joined(group: Sequence[Series]) -> Series:
    """The rows of all these as one series, one after the other."""
    if len(group) == 1:
        return group[0]
    first = group[0].timing
    differing = {name for series in group for name in series.columns}
    differing |= {name for name in _NAMES if any(getattr(s.timing, name) != getattr(first, name) for s in group)}
    columns = {name: list(chain.from_iterable(series.column(name) for series in group)) for name in sorted(differing)}
    return Series(first, list(chain.from_iterable(series.places for series in group)), columns)
