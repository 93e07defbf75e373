"""The answers in short, for the terminal."""

from __future__ import annotations

import re
from textwrap import fill

import click

from nsys_analyzer.report.model import Paragraph, Report

#: Captures whose every answer fits a screen.
_FEW = 6


def print_answers(report: Report) -> None:
    """Prints every answer of the report in a few words, capture by capture; of many captures the first answer."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    captures: dict[str, list[tuple[str, str]]] = {}
    for section in report.sections:
        for answer in section.answers:
            captures.setdefault(answer.capture, []).append((section.topic, answer.short))
    for capture, answers in captures.items():
        console.print(f"[bold]{escape(capture)}[/bold]")
        lines = Table.grid(padding=(0, 2), pad_edge=True)
        for topic, short in answers if len(captures) <= _FEW else answers[:1]:
            lines.add_row(f"[cyan]{topic}[/cyan]", escape(_plain(short)))
        console.print(lines)


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_plain(first.text), 100))


def _plain(text: str) -> str:
    """Markdown without its marks, and without the no-break spaces that a terminal breaks at all the same."""
    return re.sub(r"[`*]", "", text).replace("\N{NO-BREAK SPACE}%", "%")
