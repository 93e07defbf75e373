"""Defines the contents of a report, and the words that several sections share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.kernel_tables import KernelRow
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.inputs.gather import find_runs_of_captures
from nsys_analyzer.report.finding_texts import write_run_texts, write_texts
from nsys_analyzer.report.model import FinishedBench, MedianRange
from nsys_analyzer.report.units import format_ms
from nsys_analyzer.text import StrOrText
from nsys_analyzer.trace.phase_names import STEP

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun

#: The words for each cause of the GPU's idle time.
CAUSE_WORDS: Mapping[str, str] = {
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
#: Matches the exception class at the start of a Python message, which is left out because a cell has little room.
_EXCEPTION_CLASS = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")
#: The most characters of a message in a table's cell.
_MAX_MESSAGE_LENGTH = 60


@dataclass(frozen=True)
class Evidence:
    """The contents of a report, and how it was made.

    Attributes:
        captures: the summaries in order, one for each process.
        command: the command line that makes the report again; empty if a program made it through the API.
        timings: the name of the table of unprofiled times, empty without one.
        notes: sentences on how the table of unprofiled times was found.
        benches: the finished experiments whose sections the report includes.
    """

    captures: tuple[CaptureSummary, ...]
    command: str = ""
    timings: str = ""
    notes: tuple[StrOrText, ...] = ()
    benches: tuple[FinishedBench, ...] = ()

    def __post_init__(self) -> None:
        """Writes the sentences of all findings, and of why findings are missing."""
        vars(self).update(captures=tuple(map(write_texts, self.captures)))

    @cached_property
    def runs(self) -> tuple[ParallelRun, ...]:
        """Returns the runs of several ranks that the captures belong to. They are joined once for a report."""
        return tuple(map(write_run_texts, find_runs_of_captures(self.captures)))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Returns the short label of each kernel name. Labels are unique in the report."""
        return {row.name: row.label for row in self.kernel_rows}

    @property
    def kernel_rows(self) -> Iterator[KernelRow]:
        """Yields the kernels of each whole capture, which include those of all phases."""
        for capture in self.captures:
            yield from capture.whole.kernels if capture.whole else ()


def make_median_cell(stats: Stats | None) -> MedianRange | float | None:
    """Returns a cell with median, minimum and maximum; the mean if only the mean is known; None without figures."""
    if stats is None:
        return None
    if stats.median is None or stats.min is None or stats.max is None:
        return stats.typical
    return MedianRange(stats.median, stats.min, stats.max)


def kernel_word(*captures: CaptureSummary) -> str:
    """Returns "kernel", or "operator" if all the captures are of programs that ran on the CPU."""
    return "operator" if captures and all(capture.on_cpu for capture in captures) else "kernel"


def launch_word(capture: CaptureSummary) -> str:
    """Returns "launch", or "call" if the program ran on the CPU."""
    return "call" if capture.on_cpu else "launch"


def name_scope(scope: str) -> str:
    """Returns the name of a phase, a step or the whole capture as it stands in a sentence: "forward", "the step"."""
    bare_name = scope.partition(" (")[0]
    return f"the {scope}" if " " in bare_name or bare_name in (STEP, "optimizer") else scope


def step_noun(step: StepSummary | None) -> str:
    """Returns the words for a step, or for the whole capture if its steps are not known."""
    if step and step.is_pass:
        return "for the whole capture"
    return f"a {step.kind} step" if step and step.kind else "a step"


def find_peak_memory(capture: CaptureSummary) -> int | None:
    """Returns the peak device memory in bytes, of an unprofiled run if it is known, and of the capture otherwise."""
    unprofiled_bytes = capture.unprofiled.peak_memory_bytes if capture.unprofiled else None
    return unprofiled_bytes or capture.peak_memory_bytes


def format_step_length(step: StepSummary) -> str:
    """Returns the reported length of a step with three digits; an estimate has the sign ≈."""
    is_estimated = step.unprofiled_ms is not None and not step.unprofiled_ms.timed
    return f"{'≈ ' if is_estimated else ''}{format_ms(step.reported_ms)}"


def format_status(status: str, message: str = "") -> str:
    """Returns a status and the start of its message as a cell. The complete message is one of the warnings."""
    if status == "oom":
        return "out of memory"
    words = status.replace("_", " ")
    return f"{words}: {shorten_message(message)}" if message else words


def shorten_message(message: str) -> str:
    """Returns the start of a message, on one line."""
    line = _EXCEPTION_CLASS.sub("", " ".join(message.split()))
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[: _MAX_MESSAGE_LENGTH - 1].rstrip()}…"
