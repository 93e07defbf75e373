"""The progress of a sweep on the terminal: a bar with what is at work, and a line for each result; and of reading."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import click

from nsys_analyzer.report.screen import console
from nsys_analyzer.system.cluster import OnTaskDone
from nsys_analyzer.system.process import JobResult, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

#: Characters of a message on the terminal; the manifest has all of it.
_MESSAGE = 300


@contextmanager
def interruptible(folder: Path, goes_on: str = "; the same command with --resume continues") -> Iterator[None]:
    """Ends with a line on how to continue where the user, a scheduler or a closed terminal interrupts the work."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        line = f"Interrupted. Finished results are in {folder}{goes_on}."
        click.echo(line, err=True)
        sys.exit(130)


def _bar(before: Sequence[str], after: Sequence[str], screen: Console, *, disable: bool = False) -> Bar:
    """Returns a bar between columns of text, with how many are done and the time that has passed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    texts = [[TextColumn(text, markup=False) for text in side] for side in (before, after)]
    columns = (*texts[0], BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), *texts[1])
    return Progress(*columns, console=screen, transient=True, disable=disable)


@contextmanager
def shown(total: int, done: int) -> Iterator[Progress]:
    """Shows a bar of ``total`` configurations, of which ``done`` are finished already; on terminals only."""
    screen = console(stderr=True)
    if done:
        click.echo(f"{done} of {total} configurations are finished already.")
    with _bar((), ["{task.description}"], screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done)

        def started(name: str, work: str) -> None:
            bar.update(task, description=f"{name}: {work}")

        def ended(name: str, result: JobResult, seconds: float) -> None:
            message = f", {shorten(result.message, _MESSAGE, placeholder='…')}" if result.message else ""
            screen.print(f"{name}: {result.status} after {seconds:.0f} s{message}", soft_wrap=True)
            bar.advance(task)

        yield Progress(started, ended)


@contextmanager
def reading(total: int) -> Iterator[OnTaskDone]:
    """Shows a bar of ``total`` captures that are read, in one line; on terminals only, and for several."""
    if total < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    with _bar(["Reading"], (), console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
