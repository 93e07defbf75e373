"""What a report is made from, and the words that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.kernel_tables import KernelRow
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import FinishedBench, MedianRange
from nsys_analyzer.report.units import format_ms
from nsys_analyzer.text import StrOrText

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun

#: What the GPU's idle time is due to.
CAUSE_WORDS: dict[Cause, str] = {
    "launch": "launching, short pauses",
    "sync": "waits for the GPU",
    "copy": "waits for a copy",
    "allocator": "allocates or frees memory",
    "host": "other CPU work",
    "data": "loads a batch",
    "communication": "a collective waits to start",
    "unrecorded": "waits for unrecorded work",
    "profiler": "the profiler's own work",
    "unknown": "unknown",
}
#: The class that a message of Python's starts with, which is longer than a cell is wide.
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")
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
    notes: tuple[StrOrText, ...] = ()
    benches: tuple[FinishedBench, ...] = ()
    joined: tuple[ParallelRun, ...] | None = None

    @cached_property
    def runs(self) -> tuple[ParallelRun, ...]:
        """The runs of several ranks among the captures."""
        if self.joined is not None:
            return self.joined
        if not any(capture.members for capture in self.captures):
            return ()
        from nsys_analyzer.analysis.ranks.join import find_runs  # a report of one rank starts without it

        return find_runs(self.captures)

    @cached_property
    def labels(self) -> dict[str, str]:
        """The short label of every kernel name, unique in the report."""
        return {row.name: row.label for row in self.kernel_rows}

    @property
    def kernel_rows(self) -> Iterator[KernelRow]:
        """The kernels of every whole capture, which no phase has more than."""
        for capture in self.captures:
            yield from capture.whole.kernels if capture.whole else ()


def typical(stats: Stats | None) -> MedianRange | float | None:
    """Median, least and most as a cell, the mean where a timing says no more; None without figures."""
    if stats is None:
        return None
    if stats.median is None or stats.min is None or stats.max is None:
        return stats.typical
    return MedianRange(stats.median, stats.min, stats.max)


def kernel_word(*captures: CaptureSummary) -> str:
    """The word for what runs: "kernel", or "operator" where all these captures are of the CPU."""
    return "operator" if captures and all(capture.on_cpu for capture in captures) else "kernel"


def launch_word(capture: CaptureSummary) -> str:
    """The word for each time that a kernel runs, or an operator."""
    return "call" if capture.on_cpu else "launch"


def step_noun(step: StepSummary | None) -> str:
    """What a step is called: the whole capture, where nothing tells its steps."""
    if step and step.is_pass:
        return "for the whole capture"
    return f"a {step.kind} step" if step and step.kind else "a step"


def peak_memory(capture: CaptureSummary) -> int | None:
    """Returns the peak device memory in bytes: of tensors in an unprofiled run if known, else in the recording."""
    timed = capture.unprofiled.peak_memory_bytes if capture.unprofiled else None
    return timed or capture.peak_memory_bytes


def said_length(step: StepSummary) -> str:
    """The one length of a step, in three digits: ≈ where it is estimated."""
    estimated = step.unprofiled_ms is not None and not step.unprofiled_ms.timed
    return f"{'≈ ' if estimated else ''}{format_ms(step.said_ms)}"


def status_of(status: str, message: str = "") -> str:
    """A status as a cell, with the start of what was said of it; the whole message stands among the warnings."""
    if status == "oom":
        return "out of memory"
    words = status.replace("_", " ")
    return f"{words}: {shortened(message)}" if message else words


def shortened(message: str) -> str:
    """The start of a message, on one line."""
    line = _EXCEPTION.sub("", " ".join(message.split()))
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1].rstrip()}…"
