"""The terminal: text without control characters, whoever wrote the names in it.

What commands and errors say passes a ``Screen``, which stands for ``sys.stdout`` and ``sys.stderr``. Colours and the
moves of a progress bar are control characters too: rich alone may write them, through ``console``.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from nsys_analyzer.text import visible_lines

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """A stream that shows text: marks left out, a stand-in for each control character but the newline."""

    #: No way around it: click would take the bytes below a stream that is ASCII.
    buffer = None

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes what may be seen of a text."""
        self.stream.write(visible_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def use_screens() -> None:
    """Puts a screen before ``sys.stdout`` and ``sys.stderr``, where they are open."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter shows a question mark
            stream.reconfigure(errors="replace")
        if stream is not None and not isinstance(stream, Screen):
            setattr(sys, name, Screen(stream))


def console(*, stderr: bool = False) -> Console:
    """A console of rich on the terminal: its own colours and moves, and text that says no other."""
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible_lines(segment.text))

    return SafeConsole(file=_below(sys.stderr if stderr else sys.stdout), highlight=False, markup=False, emoji=False)


def data_stream() -> TextIO:
    """Where data goes, CSV or JSON: ``sys.stdout`` as it is, but for a terminal, which shows it as any text."""
    below = _below(sys.stdout)
    return sys.stdout if below.isatty() else below


def _below(stream: TextIO) -> TextIO:
    return cast("Screen", stream).stream if isinstance(stream, Screen) else stream
