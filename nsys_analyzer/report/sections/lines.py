"""The lines of the program in words: where time passes, and the source code around the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.report.model import Block, Details, Listing
from nsys_analyzer.report.units import format_ms, rounded, rounded_percent
from nsys_analyzer.text import StrOrText, phrase


def describe_line(line: Line) -> StrOrText:
    """Returns a line and its time: "train.py:212 in log_norms, called from train.py:140 · 9.8 of 10.1 ms (97 %)"."""
    caller = phrase(", called from `{}`", line.called_from) if line.called_from else ""
    share = rounded_percent(line.share)
    time = f" · {share} of {'the time of a process that loads data' if line.loads else 'the samples'}"
    if line.ms is not None:
        time = f" · {rounded(line.ms)} of {format_ms(line.ms / line.share)} ({share})"
    return phrase("`{}` in `{}`", line.place, line.function) + caller + time


def lines_of_program(lines: Sequence[Line], capture: str) -> Iterator[Block]:
    """Yields the lines with most time, and the folded source code around the first; nothing without sampled stacks."""
    if lines:
        yield Listing(tuple(map(describe_line, lines)), capture=capture)
        if lines[0].source:
            yield Details(f"The code around {lines[0].place}", (Listing(lines[0].source, "python"),), capture)
