"""The packets of a Perfetto trace, written by numpy: strings by ID, tracks, slices and counters, many at once.

The numbers of fields are those of Perfetto's ``perfetto_trace.proto``. A field is a matrix of bytes with a row for each
message, and a mask of the bytes that the row has; a message is its fields side by side, behind the sum of their
lengths. No object is made for a message: Google's library writes a tenth as many packets a second (100,000 of a kernel,
in place of 1,000,000), and would be one more to install.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, SmallInts, blocks, distinct_rows

# --- protocol buffers

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # wire types
_GROUP_BITS = 7


@dataclass(frozen=True)
class Part:
    """Some bytes of each message: those of ``data[i]`` where ``kept[i]``, ``length[i]`` many; one row may serve all."""

    data: npt.NDArray[np.uint8]
    kept: Bools
    length: Ints


#: What stands one behind the other in each message.
Parts: TypeAlias = "tuple[Part, ...]"


def number(field: int, values: Ints | int) -> Parts:
    """Encodes an integer, an enumeration's value or a bool: one for each message, or one for all."""
    if isinstance(values, int):
        return (_constant(_varint(field << 3 | _VARINT) + _varint(values)),)
    return (_constant(_varint(field << 3 | _VARINT)), _varints(values))


def fixed64(field: int, values: Ints) -> Parts:
    """Encodes a fixed64 for each message."""
    data = values.astype("<i8").view(np.uint8).reshape(len(values), 8)
    return _constant(_varint(field << 3 | _FIXED64)), Part(data, np.ones(data.shape, np.bool_), np.full(len(data), 8))


def text(field: int, content: str | bytes) -> Parts:
    """Encodes a string or bytes, the same in all messages."""
    encoded = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return (_constant(_varint(field << 3 | _BYTES) + _varint(len(encoded)) + encoded),)


def message(field: int, *fields: Parts) -> Parts:
    """Encodes a message inside each message."""
    inside = tuple(part for parts in fields for part in parts)
    length = np.sum(np.broadcast_arrays(np.zeros(1, np.int64), *(part.length for part in inside)), axis=0)
    return (_constant(_varint(field << 3 | _BYTES)), _varints(length), *inside)


def where(present: Bools, parts: Parts) -> Parts:
    """Leaves the parts out of the messages in which they are not present."""
    return tuple(Part(one.data, one.kept & present[:, None], one.length * present) for one in parts)


def taken(parts: Parts, index: Integers) -> Parts:
    """Takes the parts of some messages, by their positions: what is the same in many of them is encoded once."""
    data, kept = _matrix(parts)
    return (Part(data[index], kept[index], kept.sum(axis=1)[index]),)


def encoded(*fields: Parts) -> bytes:
    """Returns the bytes of all messages, one behind the other."""
    data, kept = _matrix(tuple(part for parts in fields for part in parts))
    return data[kept].tobytes()


def _matrix(parts: Parts) -> tuple[npt.NDArray[np.uint8], Bools]:
    """Lays the parts side by side."""
    shape = max(len(part.data) for part in parts), sum(part.data.shape[1] for part in parts)
    data, kept = np.empty(shape, np.uint8), np.empty(shape, np.bool_)
    first = 0
    for part in parts:
        behind = first + part.data.shape[1]
        data[:, first:behind], kept[:, first:behind] = part.data, part.kept
        first = behind
    return data, kept


def _varints(values: Ints) -> Part:
    """Encodes each number in groups of 7 bits, the lowest first; one below 0 as 64 bits of two's complement."""
    numbers = values.astype(np.int64).view(np.uint64)
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // _GROUP_BITS))
    data, kept = np.empty((len(numbers), width), np.uint8), np.ones((len(numbers), width), np.bool_)
    for group in range(width):
        data[:, group] = numbers & np.uint64(0x7F)
        numbers = numbers >> np.uint64(_GROUP_BITS)
        if group + 1 < width:
            more = numbers != 0
            kept[:, group + 1] = more
            data[:, group] |= more.view(np.uint8) << 7
    return Part(data, kept, kept.sum(axis=1))


def _varint(value: int) -> bytes:
    part = _varints(np.array([value]))
    return part.data[part.kept].tobytes()


def _constant(content: bytes) -> Part:
    data = np.frombuffer(content, np.uint8)[None, :]
    return Part(data, np.ones(data.shape, np.bool_), np.array([len(content)]))


# --- packets

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
        """Returns the ID of a string."""
        ids = self._ids[kind]
        if one not in ids:
            ids[one] = len(ids) + 1
            self._new.append(message(kind, number(1, ids[one]), text(2, one)))
        return ids[one]

    def by_code(self, kind: Kind, codes: Integers, texts: Sequence[str]) -> Ints:
        """Returns the ID of each code's text, 0 for the code -1; a text that no code stands for needs none."""
        used = np.bincount(codes.astype(np.int64) + 1, minlength=len(texts) + 1)[1:]
        ids = np.zeros(len(texts) + 1, np.int64)  # the last one is that of -1
        for code in np.flatnonzero(used).tolist():
            ids[code] = self.of(kind, texts[code])
        return ids[codes]

    def packet(self) -> bytes:
        """Returns a packet with the strings that are new since the last one."""
        new, self._new = self._new, []
        return encoded(message(1, _SEQUENCE, message(12, *new), _USES_STRINGS)) if new else b""


def first_packet() -> bytes:
    """Returns the packet that begins the sequence, with our mark among its strings."""
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
        """Returns the packet that describes it."""
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


@dataclass(frozen=True)
class Arguments:
    """What the details of slices say.

    Attributes:
        texts: the text arguments of each distinct combination, encoded, and ``combination`` that of each slice.
        numbers: by the ID of an argument's name, its value for each slice, and where there is one.
    """

    texts: Parts
    combination: SmallInts
    numbers: dict[int, tuple[Ints, Bools]]


@dataclass(frozen=True)
class Slices:
    """Slices of one or more tracks; each array has shape (slices,).

    Attributes:
        start, end: ns.
        track: the ID of its track.
        name, category: IDs of strings.
        flow: the ID of what leads from a launch to its operations, 0 for none.
    """

    start: Ints
    end: Ints
    track: Ints
    name: Ints
    category: Ints
    flow: Ints
    arguments: Arguments | None = None

    def __len__(self) -> int:
        return len(self.start)


def combinations(strings: Strings, texts: dict[str, Ints]) -> tuple[Parts, SmallInts]:
    """Encodes the text arguments of slices, by name the IDs of their values, and returns which each slice has."""
    first, combination = distinct_rows(*texts.values())
    parts: list[Part] = []
    for name, values in texts.items():
        argument = message(4, number(1, strings.of(Kind.ARGUMENT, name)), number(17, values[first]))
        parts += where(values[first] != 0, argument)
    return tuple(parts), combination


def slice_packets(slices: Slices) -> Iterator[bytes]:
    """Yields the packets of slices, in some blocks.

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
    fields = [number(3, slices.category[index])]
    if slices.arguments:
        fields.append(taken(slices.arguments.texts, slices.arguments.combination[index]))
        for name, (values, present) in slices.arguments.numbers.items():
            fields.append(where(present[index], message(4, number(1, name), number(4, values[index]))))
    fields += [number(9, _BEGIN), number(10, slices.name[index]), number(11, slices.track[index])]
    if flow.any():
        fields.append(where(flow != 0, fixed64(47, flow)))
    return message(1, number(8, slices.start[index]), _SEQUENCE, message(11, *fields), _USES_STRINGS)


def _end(slices: Slices, index: Ints) -> Parts:
    event = message(11, number(9, _END), number(11, slices.track[index]))
    return message(1, number(8, slices.end[index]), _SEQUENCE, event)


def counter_packets(track: int, time: Ints, value: Ints) -> Iterable[bytes]:
    """Yields the packets of a counter: its value from each moment on."""
    for block in blocks(len(time)):
        event = message(11, number(9, _COUNTER), number(11, track), number(30, value[block]))
        yield encoded(message(1, number(8, time[block]), _SEQUENCE, event))


def compressed(content: bytes) -> bytes:
    """Compresses packets into one that holds them."""
    return encoded(message(1, text(50, zlib.compress(content, 1))))
