"""The report on the terminal: its answers in short, or a section with its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from textwrap import fill
from typing import TYPE_CHECKING

import click

from nsys_analyzer.report.model import (
    TEXT_UNITS,
    Answer,
    Block,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    Table,
)
from nsys_analyzer.report.renderers.step_bar import StepBars, bars_of_run, bars_of_step, draw
from nsys_analyzer.report.screen import console
from nsys_analyzer.report.sections.findings import first_to_fix, saving, without_profiler
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import Words, plain, plural, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from nsys_analyzer.analysis.summary.summary import CaptureSummary

#: Captures, or runs of several ranks, that have bars; of more, and of each rank, the first lines.
_FEW, _FIRST = 6, 2
#: Lines of the smallest usual screen, and those of the command, an empty one, the report's path and the prompt.
_SCREEN, _AROUND = 24, 4
#: Topics of answers that tell most beside the bar; others follow where there is room.
_AT_A_GLANCE = ("unprofiled", "time", "limits")

#: The topic of a line, empty where it belongs to the one above, and what it says.
_Line = tuple[str, Words]
#: The answers of a capture or a run, with the lines that belong to each.
_Answers = list[list[_Line]]


def print_answers(report: Report) -> None:
    """Prints a screen of each capture, or run of several ranks: what fills its step, and its answers in a few words.

    Of many captures the first answer of each is printed; where a terminal has no room for these, a line of each.
    """
    screen = console()
    said: dict[str, _Answers] = {}
    for section in report.sections:
        for answer in section.answers:
            lines: list[_Line] = [(section.topic, answer.short), *(("", line) for line in answer.more)]
            said.setdefault(answer.capture, []).append(lines)
    bars = _bars(report)
    ranks = _ranks(report) & said.keys()
    first = [name for name in said if name not in ranks]
    if len(first) > _FEW:
        _print_many(screen, report, said)
        return
    left = _SCREEN - _AROUND
    room = left // max(len(first), 1)
    for place, name in enumerate(first):
        if place:
            screen.print()
        left -= _print_one(screen, name, said[name], bars.get(name), room - bool(place)) + bool(place)
    _print_short(screen, {name: said[name] for name in said if name in ranks}, left)


def _bars(report: Report) -> dict[str, StepBars]:
    """The bars of the runs of several ranks and of the captures, by name."""
    steps = {one.title: bars_of_step(one.step) for one in report.captures if one.step}
    found = steps | {run.name: bars_of_run(run) for run in report.runs}
    return {name: bars for name, bars in found.items() if bars}


def _ranks(report: Report) -> set[str]:
    """The captures that are ranks of a run of several."""
    ranks = {(one.capture, one.process) for run in report.runs if len(run.ranks) > 1 for one in run.ranks}
    return {one.title for one in report.captures if any((each.capture, each.process) in ranks for each in one.members)}


def _print_one(screen: Console, name: str, answers: _Answers, bars: StepBars | None, room: int) -> int:
    """Prints the bars of a capture, its first answer and as many others as fit; returns how many lines these are."""
    from rich.text import Text

    above: list[RenderableType] = [Text(_shown(name), "bold"), *(draw(bars, screen) if bars else ())]
    left = room - sum(_height(screen, line) for line in above)
    kept = {0}
    shortest_first = sorted(range(1, len(answers)), key=lambda i: _height(screen, _grid([answers[i]])))
    for place in sorted(shortest_first, key=lambda i: answers[i][0][0] not in _AT_A_GLANCE):
        if _height(screen, _grid([answers[i] for i in sorted({*kept, place})])) <= left:
            kept.add(place)
    grid = _grid([answers[i] for i in sorted(kept)])
    for line in (*above, grid):
        screen.print(line)
    return room - left + _height(screen, grid)


def _print_many(screen: Console, report: Report, said: Mapping[str, _Answers]) -> None:
    """Prints the first lines of many captures, or a line of each where a terminal has no room for them.

    Those of runs that were timed alone are counted.
    """
    from rich.text import Text

    # A run that was timed alone has nothing to say but its time.
    alone = {one.title for one in report.captures if one.status == "not_profiled"} & said.keys()
    shown = {name: answers for name, answers in said.items() if name not in alone}
    room = max(_SCREEN, screen.height) - _AROUND - bool(alone)
    height = sum(_height(screen, Text(_shown(name))) + _height(screen, _in_short(shown[name])) for name in shown)
    if not screen.is_terminal or height <= room:
        _print_short(screen, shown, None)
    else:
        _print_lines(screen, report.captures, shown, room)
    if alone:
        screen.print(f"{len(alone)} {plural(len(alone), 'configuration')} without a capture: see the report.")


def _print_lines(
    screen: Console, captures: Sequence[CaptureSummary], said: Mapping[str, _Answers], room: int
) -> None:  # fmt: skip
    """Prints a line of each capture, its step and what to fix first, and of each run; as many as there is room for."""
    from rich import table
    from rich.text import Text

    named = {one.title: one for one in captures}
    fits = len(said) < room
    grid = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("capture", no_wrap=True, overflow="ellipsis", ratio=2)
    grid.add_column("step ms", no_wrap=True, justify="right")
    grid.add_column("what to fix first", no_wrap=True, overflow="ellipsis", ratio=3)
    grid.add_column("saves ms", no_wrap=True, justify="right")
    for name in list(said) if fits else list(said)[: room - 2]:
        capture = named.get(name)
        first = first_to_fix(capture) if capture else None
        step = format_cell(without_profiler(capture), "ms") if capture else ""
        saves = format_cell(saving(first), "ms") if first else ""
        what = first.title if first else "" if capture else said[name][0][0][1]  # of a run what it says first
        grid.add_row(*(Text(_shown(cell)) for cell in (name, step, what, saves)))
    screen.print(grid)
    if not fits:
        left = len(said) - (room - 2)
        screen.print(f"{left} more {plural(left, 'capture')}: see the report.")


def _print_short(screen: Console, said: Mapping[str, _Answers], room: int | None) -> None:
    """Prints the first lines of captures, as many as there is room for, and how many are left out."""
    from rich.text import Text

    printed = 0
    for place, (name, answers) in enumerate(said.items()):
        title, grid = Text(_shown(name), "bold"), _in_short(answers)
        printed += _height(screen, title) + _height(screen, grid)
        is_last = place == len(said) - 1
        if room is not None and printed > room - (not is_last):
            left = len(said) - place
            screen.print(f"{left} {'more ' if place else ''}{plural(left, 'capture')}: see the report.")
            return
        screen.print(title)
        screen.print(grid)


def _in_short(answers: _Answers) -> RenderableType:
    """The first lines of a capture."""
    return _grid([list(chain.from_iterable(answers))[:_FIRST]])


def _grid(answers: _Answers) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column()
    grid.add_column(overflow="fold")
    for topic, words in chain.from_iterable(answers):
        grid.add_row(Text(_shown(topic), "cyan"), Text(_shown(words)))
    return grid


def _height(screen: Console, shown: RenderableType) -> int:
    """The lines that it takes."""
    return len(screen.render_lines(shown, pad=False))


def print_section(section: Section) -> None:
    """Prints a section: its text, tables and lines of code, what is folded in a report too; no figures."""
    from rich.text import Text

    screen = console()
    screen.print(Text(_shown(section.title), "bold"))
    _print_blocks(screen, section.blocks)


def _print_blocks(screen: Console, blocks: Iterable[Block]) -> None:
    """Prints blocks with an empty line before each."""
    from rich import table
    from rich.text import Text

    for block in blocks:
        match block:
            case Paragraph(text):
                screen.print("", Text(_shown(text)), sep="\n")
            case Answer(capture, text):
                screen.print("", Text.assemble((f"{_shown(capture)}: ", "bold"), _shown(text)), sep="\n")
            case Listing(lines, "bullets"):
                grid = table.Table.grid(padding=(0, 1))
                grid.add_column()
                grid.add_column(overflow="fold")  # a long path is broken, not cut
                for line in lines:
                    grid.add_row("-", _shown(line))
                screen.print("", grid, sep="\n")
            case Listing(lines):  # to be copied: each on a line of its own, however long
                screen.print()
                for line in lines:
                    screen.print(Text(f"    {_shown(line)}", "green"), soft_wrap=True)
            case Table():
                screen.print()
                _print_table(screen, block)
            case Details(title, inner):
                screen.print("", Text(_shown(title), "bold"), sep="\n")
                _print_blocks(screen, inner)


def _print_table(screen: Console, block: Table) -> None:
    from rich import table
    from rich.text import Text

    if block.caption:
        screen.print(Text(_shown(block.caption)))
    grid = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in block.columns:
        is_text = column.unit in TEXT_UNITS
        grid.add_column(_shown(column.title), justify="left" if is_text else "right", overflow="fold")
    for row in block.rows:
        cells = (format_cell(cell, column.unit) for cell, column in zip(row, block.columns, strict=True))
        grid.add_row(*map(_shown, cells))
    screen.print(grid)


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_shown(first.text), 100))


def _shown(text: Words) -> str:
    """Text without marks, and without the no-break spaces that a terminal breaks at all the same."""
    return visible(plain(text)).replace("\N{NO-BREAK SPACE}%", "%")
