"""Encodes the packets of a Perfetto trace with numpy: strings, tracks, slices and counters, many at a time.

The field numbers are from Perfetto's ``perfetto_trace.proto``. Many messages with the same fields are encoded at once:
a field is a matrix of bytes with a row for each message, and a mask of the bytes that are used. A nested message
consists of the total length of its fields, followed by the fields. Because the module makes no object per message, it
writes 1,000,000 packets of kernels per second. Google's library, which makes an object per message, writes 100,000, and
would be an additional dependency.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, SmallInts, distinct_rows, iterate_blocks

# --- protocol buffers

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # wire types
_VARINT_GROUP_BITS = 7


@dataclass(frozen=True)
class MessagePart:
    """Some bytes of each of many messages. If the bytes are equal in all messages, the arrays have only one row.

    Attributes:
        data: bytes of shape (messages, width).
        is_used: whether each byte belongs to the message, of the same shape.
        length: the number of bytes that belong to each message.
    """

    data: npt.NDArray[np.uint8]
    is_used: Bools
    length: Ints


#: The parts of messages, in order.
MessageParts: TypeAlias = "tuple[MessagePart, ...]"


def encode_number(field: int, values: Ints | int) -> MessageParts:
    """Encodes a field with an integer, a bool or an enumeration: one value per message, or one for all messages."""
    if isinstance(values, int):
        return (_make_constant(_encode_varint(field << 3 | _VARINT) + _encode_varint(values)),)
    return (_make_constant(_encode_varint(field << 3 | _VARINT)), _encode_varints(values))


def encode_fixed64(field: int, values: Ints) -> MessageParts:
    """Encodes a field of the type fixed64, with one value per message."""
    data = values.astype("<i8").view(np.uint8).reshape(len(values), 8)
    part = MessagePart(data, np.ones(data.shape, np.bool_), np.full(len(data), 8))
    return _make_constant(_encode_varint(field << 3 | _FIXED64)), part


def encode_text(field: int, content: str | bytes) -> MessageParts:
    """Encodes a field with a string or bytes that are equal in all messages."""
    content_bytes = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return (_make_constant(_encode_varint(field << 3 | _BYTES) + _encode_varint(len(content_bytes)) + content_bytes),)


def encode_message(field: int, *fields: MessageParts) -> MessageParts:
    """Encodes a field that contains a nested message with the given fields."""
    field_parts = tuple(part for parts in fields for part in parts)
    length = np.sum(np.broadcast_arrays(np.zeros(1, np.int64), *(part.length for part in field_parts)), axis=0)
    return (_make_constant(_encode_varint(field << 3 | _BYTES)), _encode_varints(length), *field_parts)


def encode_if(is_present: Bools, parts: MessageParts) -> MessageParts:
    """Returns the parts without the bytes of messages for which ``is_present`` is False."""
    return tuple(MessagePart(part.data, part.is_used & is_present[:, None], part.length * is_present) for part in parts)


def take_rows(parts: MessageParts, index: Integers) -> MessageParts:
    """Returns the parts of the messages whose rows are in ``index``.

    A row may occur several times in ``index``, so that equal messages are encoded only once.
    """
    data, is_used = _join_parts(parts)
    return (MessagePart(data[index], is_used[index], is_used.sum(axis=1)[index]),)


def to_bytes(*fields: MessageParts) -> bytes:
    """Returns the bytes of all messages, one message after the other."""
    data, is_used = _join_parts(tuple(part for parts in fields for part in parts))
    return data[is_used].tobytes()


def _join_parts(parts: MessageParts) -> tuple[npt.NDArray[np.uint8], Bools]:
    """Joins parts side by side. Returns a matrix of bytes with a row per message, and the mask of the bytes in use."""
    shape = max(len(part.data) for part in parts), sum(part.data.shape[1] for part in parts)
    data, is_used = np.empty(shape, np.uint8), np.empty(shape, np.bool_)
    first = 0
    for part in parts:
        end = first + part.data.shape[1]
        data[:, first:end], is_used[:, first:end] = part.data, part.is_used
        first = end
    return data, is_used


def _encode_varints(values: Ints) -> MessagePart:
    """Encodes integers as varints: groups of 7 bits, lowest first. Negative ones are 64-bit two's complements."""
    numbers = values.astype(np.int64).view(np.uint64)
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // _VARINT_GROUP_BITS))
    data, is_used = np.empty((len(numbers), width), np.uint8), np.ones((len(numbers), width), np.bool_)
    for group in range(width):
        data[:, group] = numbers & np.uint64(0x7F)
        numbers = numbers >> np.uint64(_VARINT_GROUP_BITS)
        if group + 1 < width:
            continues = numbers != 0
            is_used[:, group + 1] = continues
            data[:, group] |= continues.view(np.uint8) << 7
    return MessagePart(data, is_used, is_used.sum(axis=1))


def _encode_varint(value: int) -> bytes:
    """Encodes one integer as a varint."""
    part = _encode_varints(np.array([value]))
    return part.data[part.is_used].tobytes()


def _make_constant(content: bytes) -> MessagePart:
    """Returns bytes as a part that is equal in all messages."""
    data = np.frombuffer(content, np.uint8)[None, :]
    return MessagePart(data, np.ones(data.shape, np.bool_), np.array([len(content)]))


# --- packets

#: A string in the first packet of each file, by which the tool recognizes its own files.
MARK = b"written by nsys-analyze"

_BEGIN, _END, _COUNTER = 1, 2, 4  # the types of a track event
_STRINGS_CLEARED, _STRINGS_NEEDED = 1, 2  # the flags of a sequence
_BYTES_UNIT = 3  # the unit of a counter
_IN_GIVEN_ORDER = 3  # the order of child tracks
#: The sequences of packets. All slices belong to one sequence, so that they share strings. Tracks belong to another
#: sequence, because Perfetto would assign each slice to a thread that is described in the same sequence.
_SLICE_SEQUENCE, _TRACK_SEQUENCE = encode_number(10, 1), encode_number(10, 2)
_USES_STRINGS = encode_number(13, _STRINGS_NEEDED)


class StringKind(IntEnum):
    """The kinds of strings, which are fields of ``InternedData``. Each kind has its own IDs."""

    CATEGORY = 1
    NAME = 2
    ARGUMENT = 3
    VALUE = 29


class Strings:
    """The strings of a Perfetto trace by kind. IDs start at 1, and 0 means no string."""

    def __init__(self) -> None:
        self._ids: dict[StringKind, dict[str, int]] = {kind: {} for kind in StringKind}
        self._new: list[MessageParts] = []

    def get_id(self, kind: StringKind, content: str) -> int:
        """Returns the ID of a string. A new string is added."""
        ids = self._ids[kind]
        if content not in ids:
            ids[content] = len(ids) + 1
            self._new.append(encode_message(kind, encode_number(1, ids[content]), encode_text(2, content)))
        return ids[content]

    def get_ids(self, kind: StringKind, codes: Integers, texts: Sequence[str]) -> Ints:
        """Returns, for each code, the ID of the text at that position in ``texts``, or 0 for the code -1.

        Texts to which no code refers are not added.
        """
        use_count = np.bincount(codes.astype(np.int64) + 1, minlength=len(texts) + 1)[1:]
        ids = np.zeros(len(texts) + 1, np.int64)  # the code -1 selects the last element
        for code in np.flatnonzero(use_count).tolist():
            ids[code] = self.get_id(kind, texts[code])
        return ids[codes]

    def packet(self) -> bytes:
        """Returns a packet with the strings that were added since the last call of this method."""
        new_strings, self._new = self._new, []
        if not new_strings:
            return b""
        return to_bytes(encode_message(1, _SLICE_SEQUENCE, encode_message(12, *new_strings), _USES_STRINGS))


def first_packet() -> bytes:
    """Returns the first packet of a file, whose strings include ``MARK``."""
    mark = encode_message(12, encode_message(StringKind.VALUE, encode_number(1, 2**31), encode_text(2, MARK)))
    return to_bytes(encode_message(1, _SLICE_SEQUENCE, mark, encode_number(13, _STRINGS_CLEARED | _STRINGS_NEEDED)))


@dataclass(frozen=True)
class Track:
    """A track of the timeline: of a process, of a thread, of bytes over time, or of other slices.

    Attributes:
        id: the ID of the track.
        name: the name of the track.
        parent: the ID of the track above it, or 0.
        process: the process ID, if it is the track of a process.
        thread: the process ID and the thread ID, if it is the track of a thread.
        counts_bytes: whether the track shows bytes over time.
        ordered: whether the child tracks are sorted by their ``position``.
        position: the position among the child tracks of an ordered parent.
    """

    id: int
    name: str
    parent: int = 0
    process: int | None = None
    thread: tuple[int, int] | None = None
    counts_bytes: bool = False
    ordered: bool = False
    position: int | None = None

    def packet(self) -> bytes:
        """Returns the packet that describes the track."""
        fields = [encode_number(1, self.id)]
        name = encode_text(2, self.name)
        if self.parent:
            fields.append(encode_number(5, self.parent))
        if self.process is not None:
            name = encode_message(3, encode_number(1, self.process), encode_text(6, self.name))
        elif self.thread is not None:
            pid, tid = map(encode_number, (1, 2), self.thread)
            name = encode_message(4, pid, tid, encode_text(5, self.name))
        fields.append(name)
        if self.counts_bytes:
            fields.append(encode_message(8, encode_number(3, _BYTES_UNIT)))
        if self.ordered:
            fields.append(encode_number(11, _IN_GIVEN_ORDER))
        if self.position is not None:
            fields.append(encode_number(12, self.position))
        return to_bytes(encode_message(1, _TRACK_SEQUENCE, encode_message(60, *fields)))


@dataclass(frozen=True)
class Arguments:
    """The arguments of slices, which Perfetto shows as details.

    Attributes:
        texts: the encoded text arguments, one row for each distinct combination of texts.
        combination: the row of each slice in ``texts``.
        numbers: for each numeric argument, by the ID of its name, the value of each slice and whether the slice has the
            argument.
    """

    texts: MessageParts
    combination: SmallInts
    numbers: dict[int, tuple[Ints, Bools]]


@dataclass(frozen=True)
class Slices:
    """Slices of one or more tracks; each array has shape (slices,).

    Attributes:
        start, end: times in ns.
        track: the IDs of the tracks.
        name, category: the IDs of strings.
        flow: the IDs of the arrows from launches to their operations; 0 without an arrow.
        arguments: the arguments of the slices, if they have any.
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


def find_combinations(strings: Strings, texts: dict[str, Ints]) -> tuple[MessageParts, SmallInts]:
    """Encodes each distinct combination of text arguments, and returns them with the combination of each slice.

    ``texts`` contains, by the name of the argument, the ID of each slice's value.
    """
    first_of_combination, combination = distinct_rows(*texts.values())
    parts: list[MessagePart] = []
    for name, values in texts.items():
        argument = encode_message(
            4,
            encode_number(1, strings.get_id(StringKind.ARGUMENT, name)),
            encode_number(17, values[first_of_combination]),
        )
        parts += encode_if(values[first_of_combination] != 0, argument)
    return tuple(parts), combination


def slice_packets(slices: Slices) -> Iterator[bytes]:
    """Yields the packets of slices, many at a time.

    An end event closes the innermost open slice, and Perfetto processes events of equal times in the order of the file.
    So all end events precede all begin events. Slices of zero duration come last, each with its begin before its end.
    """
    order = np.lexsort((-slices.end, slices.start))
    has_duration = (slices.end > slices.start)[order]
    timed_events, instant = order[has_duration], order[~has_duration]
    for block in iterate_blocks(len(timed_events)):
        yield to_bytes(_encode_end_events(slices, timed_events[block]))
    for block in iterate_blocks(len(timed_events)):
        yield to_bytes(_encode_begin_events(slices, timed_events[block]))
    for block in iterate_blocks(len(instant)):
        yield to_bytes(_encode_begin_events(slices, instant[block]), _encode_end_events(slices, instant[block]))


def _encode_begin_events(slices: Slices, index: Ints) -> MessageParts:
    """Encodes the packets with the begin events of the given slices."""
    flow = slices.flow[index]
    fields = [encode_number(3, slices.category[index])]
    if slices.arguments:
        fields.append(take_rows(slices.arguments.texts, slices.arguments.combination[index]))
        for name_id, (values, is_present) in slices.arguments.numbers.items():
            argument = encode_message(4, encode_number(1, name_id), encode_number(4, values[index]))
            fields.append(encode_if(is_present[index], argument))
    fields += [encode_number(9, _BEGIN), encode_number(10, slices.name[index]), encode_number(11, slices.track[index])]
    if flow.any():
        fields.append(encode_if(flow != 0, encode_fixed64(47, flow)))
    start = encode_number(8, slices.start[index])
    return encode_message(1, start, _SLICE_SEQUENCE, encode_message(11, *fields), _USES_STRINGS)


def _encode_end_events(slices: Slices, index: Ints) -> MessageParts:
    """Encodes the packets with the end events of the given slices."""
    event = encode_message(11, encode_number(9, _END), encode_number(11, slices.track[index]))
    return encode_message(1, encode_number(8, slices.end[index]), _SLICE_SEQUENCE, event)


def counter_packets(track: int, time: Ints, value: Ints) -> Iterable[bytes]:
    """Yields the packets of a counter that takes a new value at each time."""
    header = encode_number(9, _COUNTER), encode_number(11, track)
    for block in iterate_blocks(len(time)):
        event = encode_message(11, *header, encode_number(30, value[block]))
        yield to_bytes(encode_message(1, encode_number(8, time[block]), _SLICE_SEQUENCE, event))


def compress_packets(content: bytes) -> bytes:
    """Returns one packet that contains the given packets in compressed form."""
    return to_bytes(encode_message(1, encode_text(50, zlib.compress(content, 1))))
