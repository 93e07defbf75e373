"""The answers in short, for the terminal."""

from __future__ import annotations

from textwrap import fill

import click

from nsys_analyzer.report.model import Paragraph, Report
from nsys_analyzer.report.screen import console
from nsys_analyzer.text import Words, plain, visible

#: Captures whose every answer fits a screen.
_FEW = 6


def print_answers(report: Report) -> None:
    """Prints every answer of the report in a few words, capture by capture; of many captures the first answer."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    captures: dict[str, list[tuple[str, Words]]] = {}
    for section in report.sections:
        for answer in section.answers:
            captures.setdefault(answer.capture, []).append((section.topic, answer.short))
    for capture, answers in captures.items():
        screen.print(Text(_shown(capture), "bold"))
        lines = Table.grid(padding=(0, 2), pad_edge=True)
        for topic, short in answers if len(captures) <= _FEW else answers[:1]:
            lines.add_row(Text(_shown(topic), "cyan"), _shown(short))
        screen.print(lines)


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_shown(first.text), 100))


def _shown(text: Words) -> str:
    """Text without marks, and without the no-break spaces that a terminal breaks at all the same."""
    return visible(plain(text)).replace("\N{NO-BREAK SPACE}%", "%")
