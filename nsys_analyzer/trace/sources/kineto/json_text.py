"""The text of a trace, read in pieces: JSON of any size in the memory of a few megabytes."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

import numpy as np

from nsys_analyzer.errors import TraceError

RECORD = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"
"""The hint for a file that is no trace of PyTorch's profiler."""

AGAIN = "Copy it again, or record it again"
"""The hint for a trace that is damaged."""

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20
"""Bytes that are read at once; a few thousand events."""

_LONGEST_VALUE = 4 << 20
"""Characters of one event or property that is read, white space within it included; never are more than these and a
piece decoded, for an object of two characters takes 64 bytes. Kineto's longest are below a hundredth.
"""

_FIRST_LOOK = 1 << 10
"""Characters in which the end of a value is looked for first; then in twice as many."""

MOST_EXPANDED = 200
"""How many times larger than its file a compressed trace may be: those of Kineto expand 10 to 30 times, 50 with deep
indentation, and deflate can do 1,000.
"""

_ALWAYS_READ = 64 << 20
"""Bytes that are read however few they were compressed to."""

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"\}[ \t\n\r]*(?=,[ \t\n\r]*\{)")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_OF_A_NUMBER = re.compile(r"[-+.0-9eE]*")
_NEAR_THE_END = 1 << 16
"""Characters at the end of the buffer in which the end of an event is looked for."""


def _whole_number(text: str) -> int | Decimal:
    """An integer; one that no column holds stays a decimal, since to convert a million digits takes minutes."""
    return int(text) if len(text) < 20 else Decimal(text)


def _fraction(text: str) -> Decimal | str:
    """A decimal; the text where its exponent is beyond those that decimals have."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text


#: As JSON, but for control characters in texts, and NaN and Infinity, which profilers have written. Numbers with a
#: fraction are decimals, for a double does not hold the nanoseconds of a time since 1970.
_TOLERANT = json.JSONDecoder(parse_float=_fraction, parse_int=_whole_number, parse_constant=str, strict=False)


class TooDeepError(TraceError):
    """A value that has more objects in one another than can be read; it has not been taken."""


class JsonText:
    """A position in the text of a file, and as much of the text as the value there needs.

    Everything here that reads raises TraceError where the file is not JSON or expands too much, and what
    :func:`opened` makes one of where it cannot be read.

    Attributes:
        path: the file.
        buffer: the text that is in memory.
        at: the position in it.
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
        """The character that follows white space, not yet taken; empty at the end of the file."""
        while True:
            if space := _WHITE_SPACE.match(self.buffer, self.at):
                self.at = space.end()
            if self.at < len(self.buffer) or not self.read_on():
                return self.buffer[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        """Take a character where it is the next one, and say whether it was."""
        found = self.next() == character
        self.at += found
        return found

    def objects(self) -> str:
        """Some of the objects of an array, from here to the last end of one that is in memory; not yet taken.

        Where the text has another form it is no list of objects, and a decoder says so.
        """
        if len(self.buffer) - self.at < _PIECE // 2:
            self.read_on()
        ends = [found.end() for found in _BETWEEN.finditer(self.buffer, max(self.at, len(self.buffer) - _NEAR_THE_END))]
        return self.buffer[self.at : ends[-1]] if ends else ""

    def value(self) -> Any:
        """Take the value that begins here: fractions as decimals, NaN and Infinity as texts.

        Raises:
            TooDeepError: it is nested too deep; :meth:`skip` takes it.
        """
        self.next()
        while True:
            try:
                value, end = _TOLERANT.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if self._is_too_long():
                    raise self.broken(f"{error.msg}, or a value of more than {_LONGEST_VALUE >> 20} MiB") from error
                if not self._read_twice_as_much():
                    raise self.broken(error.msg, self._dropped + error.pos) from error
            except RecursionError as error:
                told = self.broken("nested too deep")
                raise TooDeepError(told.message, told.hint) from error
            else:
                # What ends with the buffer may be the first digits of a number.
                may_go_on = _OF_A_NUMBER.fullmatch(self.buffer, end) and not self._is_too_long()
                if not may_go_on or not self._read_twice_as_much():
                    self.at = end
                    return value

    def skip(self) -> None:
        """Take the value that begins here, of any length and depth, without building it."""
        if self.next() not in ("{", "[", '"'):
            self.value()
            return
        extent, look = _Extent(), _FIRST_LOOK
        while self.at < len(self.buffer) or self.read_on():
            piece = self.buffer[self.at : self.at + look]
            end = extent.end_in(piece)
            self.at += len(piece) if end is None else end
            if end is not None:
                return
            look = min(2 * look, _PIECE)
        raise self.broken("a value without an end")

    def _is_too_long(self) -> bool:
        return len(self.buffer) - self.at > _LONGEST_VALUE

    def _read_twice_as_much(self) -> bool:
        """Read on, for a value that goes on beyond the buffer; False at the end of the file."""
        remaining = len(self.buffer) - self.at
        if not self.read_on():
            return False
        while len(self.buffer) < min(2 * remaining, _LONGEST_VALUE) and self.read_on():
            pass
        return True

    def read_on(self) -> bool:
        """Read another piece, forgetting what lies before the position; False at the end of the file."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._dropped += self.at
        self.buffer = self.buffer[self.at :] + piece
        self.at = 0
        return True

    def broken(self, what: str, position: int | None = None) -> TraceError:
        """The error for what is not JSON, at a position in the file's text, or at the present one."""
        where = f"character {self.position if position is None else position:,}"
        return TraceError(f"{self.path} is not JSON, or only a part of it ({what} at {where})", AGAIN)


class _Extent:
    """The extent of an object, an array or a text, looked for in one piece of it after another.

    It is found without building the value, by the brackets that stand outside of texts.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False

    def end_in(self, piece: str) -> int | None:
        """The number of characters in the next piece up to the value's end; None where it goes on behind the piece."""
        if not piece:
            return None
        plain = _ESCAPED.sub("__", "_" + piece[1:] if self._is_escaped else piece)
        self._is_escaped = plain.endswith("\\")
        codes = np.frombuffer(plain.encode("utf-32-le"), np.uint32)
        in_text = (np.cumsum(codes == ord('"')) + self._in_text) % 2 == 1  # from the opening quote on
        opens, closes = (np.isin(codes, [ord(one) for one in brackets]) & ~in_text for brackets in ("[{", "]}"))
        depth = self._depth + np.cumsum(opens.astype(np.int64) - closes)
        self._depth, self._in_text = int(depth[-1]), bool(in_text[-1])
        ends = np.flatnonzero((depth <= 0) & ~in_text)
        return int(ends[0]) + 1 if len(ends) else None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a trace to read it.

    Raises:
        TraceError: no such file, or none that ends (a FIFO, a device); in the block, too, where it cannot be read on.
    """
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
    """The text of a file, plain or compressed with gzip, a piece at a time."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    for piece in _unpacked(path, file):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def _unpacked(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    if not is_packed:
        yield from iter(lambda: file.read(_PIECE), b"")
        return
    most = max(_ALWAYS_READ, MOST_EXPANDED * os.fstat(file.fileno()).st_size)
    unpacked = 0
    with gzip.open(file) as stream:
        while piece := stream.read(_PIECE):
            unpacked += len(piece)
            if unpacked > most:
                raise TraceError(
                    f"{path} expands more than {MOST_EXPANDED} times, as no recorded trace does",
                    f"If you trust it, unpack it and give the .json: gunzip -k {path.name}",
                )
            yield piece
