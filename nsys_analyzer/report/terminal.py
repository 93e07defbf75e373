"""The answers in short, for the terminal."""

from __future__ import annotations

import re

from nsys_analyzer.report.model import Report


def print_answers(report: Report) -> None:
    """Prints every answer of the report in a few words, capture by capture."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    captures = dict.fromkeys(answer.capture for section in report.sections for answer in section.answers)
    for capture in captures:
        console.print(f"[bold]{escape(capture)}[/bold]")
        lines = Table.grid(padding=(0, 2), pad_edge=True)
        for section in report.sections:
            for answer in section.answers:
                if answer.capture == capture:
                    lines.add_row(f"[cyan]{section.topic}[/cyan]", escape(_plain(answer.short)))
        console.print(lines)


def _plain(text: str) -> str:
    """Markdown without its marks, and without the no-break spaces that a terminal breaks at all the same."""
    return re.sub(r"[`*]", "", text).replace("\N{NO-BREAK SPACE}%", "%")
