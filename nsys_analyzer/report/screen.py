"""Output to a terminal without control characters, whatever names the text contains.

All text passes through a ``SafeStream`` in place of ``sys.stdout`` and ``sys.stderr``. Colors and progress bars need
control characters, which only rich writes, through ``console``.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from nsys_analyzer.text import visible_lines

if TYPE_CHECKING:
    from rich.console import Console


class SafeStream:
    """A stream of text that replaces every control character except the newline."""

    #: Hides the buffer of the wrapped stream, which click would write to if that stream were ASCII.
    buffer = None

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes a text to the stream, without its control characters."""
        self.stream.write(visible_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def use_safe_streams() -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by safe streams, unless they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # writes "?" for a character that the encoding lacks
            stream.reconfigure(errors="replace")
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def console(*, stderr: bool = False) -> Console:
    """Returns a rich console that writes its own control sequences, and text without any."""
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Yields the segments of the rendered text, without control characters."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible_lines(segment.text))

    return SafeConsole(
        file=_wrapped_stream(sys.stderr if stderr else sys.stdout), highlight=False, markup=False, emoji=False
    )


def data_stream() -> TextIO:
    """Returns the stream for CSV and JSON: ``sys.stdout`` without replacements, unless it is a terminal."""
    stream = _wrapped_stream(sys.stdout)
    return sys.stdout if stream.isatty() else stream


def _wrapped_stream(stream: TextIO) -> TextIO:
    return cast("SafeStream", stream).stream if isinstance(stream, SafeStream) else stream
