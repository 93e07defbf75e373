"""Shows the progress of a sweep and of reading captures on a terminal, and ends cleanly after an interruption."""

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

#: The number of characters after which a message on the terminal is cut. The manifest contains the full message.
_MAX_MESSAGE_LENGTH = 300


@contextmanager
def handle_interruption(folder: Path, advice: str = "; the same command with --resume continues") -> Iterator[None]:
    """Ends the process and prints ``advice`` if the user, a scheduler or a closed terminal interrupts the work."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"Interrupted. Finished results are in {folder}{advice}.", err=True)
        sys.exit(130)


@contextmanager
def show_progress(total: int, finished_count: int) -> Iterator[Progress]:
    """Shows the progress through ``total`` configurations. ``finished_count`` have results from an earlier run.

    The bar is shown only on a terminal. A line for each result is always printed.
    """
    screen = console(stderr=True)
    if finished_count:
        click.echo(f"{finished_count} of {total} configurations are finished already.")
    with _bar((), ["{task.description}"], screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=finished_count)

        def show_activity(name: str, work: str) -> None:
            """Shows in the bar what is being done for a configuration, such as "timing"."""
            bar.update(task, description=f"{name}: {work}")

        def print_result(name: str, result: JobResult, seconds: float) -> None:
            """Prints how the run of a configuration ended, and advances the bar."""
            message = f", {shorten(result.message, _MAX_MESSAGE_LENGTH, placeholder='…')}" if result.message else ""
            screen.print(f"{name}: {result.status} after {seconds:.0f} s{message}", soft_wrap=True)
            bar.advance(task)

        yield Progress(show_activity, print_result)


@contextmanager
def show_reading(total: int) -> Iterator[OnTaskDone]:
    """Shows the progress of reading several captures, only on a terminal."""
    if total < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    with _bar(["Reading"], (), console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _bar(texts_before: Sequence[str], texts_after: Sequence[str], screen: Console, *, disable: bool = False) -> Bar:
    """Returns a progress bar between columns of text, with the number of finished tasks and the elapsed time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns_before, columns_after = (
        [TextColumn(text, markup=False) for text in side] for side in (texts_before, texts_after)
    )
    columns = (*columns_before, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), *columns_after)
    return Progress(*columns, console=screen, transient=True, disable=disable)
