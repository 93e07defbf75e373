"""The text of a trace, read in pieces: JSON of any size in the memory of a few megabytes."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

from nsys_analyzer.errors import TraceError

RECORD = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"
"""The hint for a file that is no trace of PyTorch's profiler."""

AGAIN = "Copy it again, or record it again"
"""The hint for a trace that is damaged."""

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20
"""Bytes that are read at once; a few thousand events."""

_LONGEST_VALUE = 4 << 20
"""Characters of the longest event or property that is read: an object of two characters takes 64 bytes of memory.
Kineto's longest values are below a hundredth.
"""

MOST_EXPANDED = 200
"""How many times larger than its file a compressed trace may be: those of Kineto expand 10 to 30 times, 50 with deep
indentation, and deflate can do 1,000.
"""

_ALWAYS_READ = 64 << 20
"""Bytes that are read however few they were compressed to."""

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"\}[ \t\n\r]*(?=,[ \t\n\r]*\{)")
_PART_OF_NUMBER = re.compile(r"[-+.0-9eE]*")
_NEAR_THE_END = 1 << 16
"""Characters at the end of the buffer in which the end of an event is looked for."""


def _integer(text: str) -> int | Decimal:
    """Returns an integer; a decimal where no column can hold it, because converting a million digits takes minutes."""
    return int(text) if len(text) < 20 else Decimal(text)


def _fraction(text: str) -> Decimal | str:
    """Returns a decimal; the text where the exponent is too large for one."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text


#: Accepts what profilers have written besides JSON: control characters in texts, NaN and Infinity. Numbers with a
#: fraction become decimals, because a double cannot hold the nanoseconds of a time since 1970.
_TOLERANT = json.JSONDecoder(parse_float=_fraction, parse_int=_integer, parse_constant=str, strict=False)


class JsonText:
    """A position ``at`` in the text of a file, and as much of the text, ``buffer``, as the value there needs.

    Every method that reads raises TraceError where the file is not JSON or expands too much.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.buffer = ""
        self.at = 0
        self._dropped = 0
        self._pieces = _pieces(path, file)

    @property
    def position(self) -> int:
        """The position in the file's text."""
        return self._dropped + self.at

    def next(self) -> str:
        """Returns the character that follows white space, not yet taken; empty at the end of the file."""
        while True:
            if space := _WHITE_SPACE.match(self.buffer, self.at):
                self.at = space.end()
            if self.at < len(self.buffer) or not self._read_on():
                return self.buffer[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        """Takes a character if it is the next one, and returns whether it was."""
        is_next = self.next() == character
        self.at += is_next
        return is_next

    def objects(self) -> str:
        """Returns several objects of an array, up to the last end of one that is in memory; not yet taken.

        The end may lie inside a text or a nested object: then a decoder refuses the result.
        """
        if len(self.buffer) - self.at < _PIECE // 2:
            self._read_on()
        ends = [match.end() for match in _BETWEEN.finditer(self.buffer, max(self.at, len(self.buffer) - _NEAR_THE_END))]
        return self.buffer[self.at : ends[-1]] if ends else ""

    def value(self) -> Any:
        """Takes the value that begins here: fractions as decimals, NaN and Infinity as texts."""
        self.next()
        while True:
            try:
                value, end = _TOLERANT.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if not self._read_twice_as_much():
                    raise self.broken(error.msg, self._dropped + error.pos) from error
            except RecursionError as error:
                raise self.broken("nested too deep") from error
            else:
                may_go_on = _PART_OF_NUMBER.fullmatch(self.buffer, end)
                if not may_go_on or not self._read_twice_as_much():
                    self.at = end
                    return value

    def _read_twice_as_much(self) -> bool:
        """Reads on, for a value that goes on beyond the buffer; False at the end of the file, or if it is too long."""
        remaining = len(self.buffer) - self.at
        if remaining > _LONGEST_VALUE or not self._read_on():
            return False
        while len(self.buffer) < min(2 * remaining, _LONGEST_VALUE) and self._read_on():
            pass
        return True

    def _read_on(self) -> bool:
        """Reads another piece and drops the text before the position; False at the end of the file."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._dropped += self.at
        self.buffer = self.buffer[self.at :] + piece
        self.at = 0
        return True

    def broken(self, what: str, position: int | None = None) -> TraceError:
        """Returns the error for what is not JSON, at a position in the file's text, or at the present one."""
        where = f"character {self.position if position is None else position:,}"
        limit = f"a value of more than {_LONGEST_VALUE >> 20} MiB"
        return TraceError(f"{self.path} is not JSON, or only a part of it, or has {limit} ({what} at {where})", AGAIN)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a trace for reading; raises TraceError, in the block, too, where it cannot be read to its end."""
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is no file that can be read to its end", "Give the path of a .json or .json.gz")
        with path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", AGAIN) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .json or .json.gz trace") from error


def _pieces(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Returns the text of a file, plain or compressed with gzip, a piece at a time."""
    is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    most = max(_ALWAYS_READ, MOST_EXPANDED * os.fstat(file.fileno()).st_size)
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with gzip.open(file) if is_packed else nullcontext(file) as stream:
        while piece := stream.read(_PIECE):
            most -= len(piece)
            if most < 0:
                raise TraceError(
                    f"{path} expands more than {MOST_EXPANDED} times, as no recorded trace does",
                    f"If you trust it, unpack it and give the .json: gunzip -k {path.name}",
                )
            yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)
