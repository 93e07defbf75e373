"""The evidence: the captures that the questions are answered from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.summary.statistics import KernelRow, Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.report.model import Bars, FinishedBench, Paragraph, Spread, Typical
from nsys_analyzer.text import Words

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun

#: Up to so many captures each is answered in full view; of more, tables of one row each come first.
FEW = 6
#: The class that a message of Python's starts with, which is longer than a cell is wide.
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")
#: What stands where no capture can answer a question.
NOTHING_MEASURED = Paragraph("No capture of this report has the ranges or kernels to answer this.")
#: Letters of a message that a table's cell has room for.
_MESSAGE = 60


@dataclass(frozen=True)
class Evidence:
    """The captures of a report in order, one for each process, and how it was made.

    Attributes:
        command: the command line that makes the report again, empty where a program of its own has made it.
        timings: the name of the timings CSV, empty without one.
        notes: what was decided while reading it.
        benches: the experiments whose sections the report takes in.
        joined: the runs of several ranks among the captures, None where they have not been joined.
    """

    captures: tuple[CaptureSummary, ...]
    command: str = ""
    timings: str = ""
    notes: tuple[Words, ...] = ()
    benches: tuple[FinishedBench, ...] = ()
    joined: tuple[ParallelRun, ...] | None = None

    @cached_property
    def runs(self) -> tuple[ParallelRun, ...]:
        """The runs of several ranks among the captures."""
        if self.joined is not None:
            return self.joined
        if not any(capture.members for capture in self.captures):
            return ()
        from nsys_analyzer.analysis.ranks.join import runs_of  # a report of one rank starts without it

        return runs_of(self.captures)

    @cached_property
    def labels(self) -> dict[str, str]:
        """The short label of every kernel name, unique in the report."""
        return {row.name: row.label for row in self.kernel_rows}

    @property
    def kernel_rows(self) -> Iterator[KernelRow]:
        """The kernels of every whole capture, which no phase has more than."""
        for capture in self.measured:
            yield from capture.whole.kernels if capture.whole else ()

    @property
    def kernel(self) -> str:
        """The word for its kernels: operator, where every capture is of the CPU."""
        return kernel_word(*self.measured)

    @property
    def measured(self) -> tuple[CaptureSummary, ...]:
        """The captures with GPU operations."""
        return tuple(capture for capture in self.captures if capture.whole)


def spread(stats: Stats | None) -> Spread | None:
    """Mean and standard deviation as a cell; None without figures."""
    return None if stats is None or stats.mean is None else Spread(stats.mean, stats.std)


def typical(stats: Stats | None) -> Typical | None:
    """Median, least and most as a cell; None without figures."""
    if stats is None or stats.median is None or stats.min is None or stats.max is None:
        return None
    return Typical(stats.median, stats.min, stats.max)


def figures_of(evidence: Evidence, draw: Callable[[CaptureSummary], Bars]) -> tuple[Bars, ...]:
    """The figure of each capture that has something to draw; many captures are drawn together."""
    figures = [draw(capture) for capture in evidence.measured] if len(evidence.captures) <= FEW else []
    return tuple(figure for figure in figures if figure.groups and any(any(v) for _, v in figure.series))


def kernel_word(*captures: CaptureSummary) -> str:
    """The word for what runs: "kernel", or "operator" where all these captures are of the CPU."""
    return "operator" if captures and all(capture.on_cpu for capture in captures) else "kernel"


def status_of(status: str, message: str = "") -> str:
    """A status as a cell, with what was said of it, shortened to the cell's room."""
    words = status.replace("_", " ")
    return f"{words}: {shortened(message)}" if message else words


def ended(unprofiled: Unprofiled) -> str | None:
    """How a run that was timed ended, None where it ended well or nothing is known of it."""
    return None if unprofiled.status in ("ok", "missing") else status_of(unprofiled.status)


def shortened(message: str) -> str:
    """The start of a message, on one line; the whole message stands among the warnings."""
    line = _EXCEPTION.sub("", " ".join(message.split()))
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1].rstrip()}…"


def model_of(capture: CaptureSummary) -> str:
    """The model's name, else the capture's."""
    return capture.configuration.model.name if capture.configuration and capture.configuration.model else capture.title
