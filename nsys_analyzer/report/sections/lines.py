"""The lines of the program in words: where some time passes, and the source around the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.report.model import Block, Details, Listing
from nsys_analyzer.report.units import format_ms, rounded, rounded_percent
from nsys_analyzer.text import StrOrText, phrase


def in_words(line: Line) -> StrOrText:
    """A line and its part: "train.py:212 in log_norms, called from train.py:140 · 9.8 of 10.1 ms (97 %)"."""
    called = phrase(", called from `{}`", line.called_from) if line.called_from else ""
    share = rounded_percent(line.share)
    part = f" · {share} of {'the time of a process that loads data' if line.loads else 'the samples'}"
    if line.ms is not None:
        part = f" · {rounded(line.ms)} of {format_ms(line.ms / line.share)} ({share})"
    return phrase("`{}` in `{}`", line.place, line.function) + called + part


def lines_of_program(lines: Sequence[Line], capture: str) -> Iterator[Block]:
    """The hottest lines, and folded the source around the first; nothing where no stacks tell them."""
    if lines:
        yield Listing(tuple(map(in_words, lines)), capture=capture)
        if lines[0].source:
            yield Details(f"The code around {lines[0].place}", (Listing(lines[0].source, "python"),), capture)
