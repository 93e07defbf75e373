"""The packets of a Perfetto trace: strings by ID, tracks, slices and counters.

The numbers of fields are those of Perfetto's ``perfetto_trace.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from nsys_analyzer.export.perfetto.protobuf import Parts, encoded, fixed64, message, number, taken, text, where
from nsys_analyzer.export.perfetto.slices import Arguments, Slices
from nsys_analyzer.trace.arrays import Integers, Ints, SmallInts, blocks, distinct_rows

#: A string in the first packet by which a file of ours is known.
MARK = b"written by nsys-analyze"

_BEGIN, _END, _COUNTER = 1, 2, 4  # types of a track event
_CLEARED, _NEEDED = 1, 2  # of a sequence's strings
_BYTES_UNIT = 3
_IN_GIVEN_ORDER = 3
#: All slices are of one sequence, so that they share their strings. The tracks are of another one: of a sequence that
#: describes a thread, Perfetto notes that thread with each slice.
_SEQUENCE, _TRACKS = number(10, 1), number(10, 2)
_USES_STRINGS = number(13, _NEEDED)


class Kind(IntEnum):
    """The kinds of string, each with IDs of its own: the fields of ``InternedData``."""

    CATEGORY = 1
    NAME = 2
    ARGUMENT = 3
    VALUE = 29


class Strings:
    """The strings of a trace, by kind, with their IDs from 1; 0 stands for none."""

    def __init__(self) -> None:
        self._ids: dict[Kind, dict[str, int]] = {kind: {} for kind in Kind}
        self._new: list[Parts] = []

    def of(self, kind: Kind, one: str) -> int:
        """The ID of a string."""
        ids = self._ids[kind]
        if one not in ids:
            ids[one] = len(ids) + 1
            self._new.append(message(kind, number(1, ids[one]), text(2, one)))
        return ids[one]

    def by_code(self, kind: Kind, codes: Integers, texts: Sequence[str]) -> Ints:
        """The ID of each code's text, 0 for the code -1; a text that no code stands for needs none."""
        used = np.bincount(codes.astype(np.int64) + 1, minlength=len(texts) + 1)[1:]
        ids = np.zeros(len(texts) + 1, np.int64)  # the last one is that of -1
        for code in np.flatnonzero(used).tolist():
            ids[code] = self.of(kind, texts[code])
        return ids[codes]

    def packet(self) -> bytes:
        """A packet with the strings that are new since the last one."""
        new, self._new = self._new, []
        return encoded(message(1, _SEQUENCE, message(12, *new), _USES_STRINGS)) if new else b""


def first_packet() -> bytes:
    """The packet that begins the sequence, with our mark among its strings."""
    mark = message(12, message(Kind.VALUE, number(1, 2**31), text(2, MARK)))
    return encoded(message(1, _SEQUENCE, mark, number(13, _CLEARED | _NEEDED)))


@dataclass(frozen=True)
class Track:
    """A track: of a process (its ID), of a thread (IDs of its process and its own), of bytes over time, or of slices.

    ``place``: where it is among those of its parent, where that is ``ordered``.
    """

    id: int
    name: str
    parent: int = 0
    process: int | None = None
    thread: tuple[int, int] | None = None
    counts_bytes: bool = False
    ordered: bool = False
    place: int | None = None

    def packet(self) -> bytes:
        """The packet that describes it."""
        fields = [number(1, self.id)]
        if self.parent:
            fields.append(number(5, self.parent))
        if self.process is not None:
            fields.append(message(3, number(1, self.process), text(6, self.name)))
        elif self.thread is not None:
            fields.append(message(4, number(1, self.thread[0]), number(2, self.thread[1]), text(5, self.name)))
        else:
            fields.append(text(2, self.name))
        if self.counts_bytes:
            fields.append(message(8, number(3, _BYTES_UNIT)))
        if self.ordered:
            fields.append(number(11, _IN_GIVEN_ORDER))
        if self.place is not None:
            fields.append(number(12, self.place))
        return encoded(message(1, _TRACKS, message(60, *fields)))


def combinations(strings: Strings, texts: dict[str, Ints]) -> tuple[Parts, SmallInts]:
    """The text arguments of slices, by name the IDs of their values: each combination once, and that of each slice."""
    first, combination = distinct_rows(*texts.values())
    columns = ((strings.of(Kind.ARGUMENT, name), values[first]) for name, values in texts.items())
    return tuple(part for name, values in columns for part in _text_argument(name, values)), combination


def slice_packets(slices: Slices) -> Iterator[bytes]:
    """The packets of slices, in some blocks.

    The end of a slice is that of the innermost open one. So all ends stand before all beginnings: of those of one
    moment, Perfetto takes first what stands first. What takes no time comes last, end behind beginning.
    """
    order = np.lexsort((-slices.end, slices.start))
    lasting = (slices.end > slices.start)[order]
    some, moments = order[lasting], order[~lasting]
    for block in blocks(len(some)):
        yield encoded(_end(slices, some[block]))
    for block in blocks(len(some)):
        yield encoded(_begin(slices, some[block]))
    for block in blocks(len(moments)):
        yield encoded(_begin(slices, moments[block]), _end(slices, moments[block]))


def _begin(slices: Slices, index: Ints) -> Parts:
    flow = slices.flow[index]
    fields = [number(3, slices.category[index]), *_arguments(slices.arguments, index)]
    fields += [number(9, _BEGIN), number(10, slices.name[index]), number(11, slices.track[index])]
    if flow.any():
        fields.append(where(flow != 0, fixed64(47, flow)))
    return message(1, number(8, slices.start[index]), _SEQUENCE, message(11, *fields), _USES_STRINGS)


def _end(slices: Slices, index: Ints) -> Parts:
    event = message(11, number(9, _END), number(11, slices.track[index]))
    return message(1, number(8, slices.end[index]), _SEQUENCE, event)


def _arguments(arguments: Arguments | None, index: Ints) -> Iterator[Parts]:
    if arguments:
        yield taken(arguments.texts, arguments.combination[index])
        for name, (values, present) in arguments.numbers.items():
            value = message(4, number(1, name), number(4, values[index]))
            yield where(present[index], value)


def _text_argument(name: int, values: Ints) -> Parts:
    return where(values != 0, message(4, number(1, name), number(17, values)))


def counter_packets(track: int, time: Ints, value: Ints) -> Iterable[bytes]:
    """The packets of a counter: its value from each moment on."""
    for block in blocks(len(time)):
        event = message(11, number(9, _COUNTER), number(11, track), number(30, value[block]))
        yield encoded(message(1, number(8, time[block]), _SEQUENCE, event))


def compressed(content: bytes) -> bytes:
    """A packet that holds others, compressed."""
    import zlib

    return encoded(message(1, text(50, zlib.compress(content, 1))))
