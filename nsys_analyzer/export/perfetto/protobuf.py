"""Protocol buffers written by numpy: many messages of one kind at once.

A field is a matrix of bytes with a row for each message, and a mask of the bytes that the row has; a message is its
fields side by side, behind the sum of their lengths. No object is made for a message: Google's library writes a tenth
as many packets a second (100,000 of a kernel, in place of 1,000,000), and would be one more to install.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.arrays import Bools, Integers, Ints

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
    """An integer, an enumeration's value or a bool: one for each message, or one for all."""
    if isinstance(values, int):
        return (_constant(_varint(field << 3 | _VARINT) + _varint(values)),)
    return (_constant(_varint(field << 3 | _VARINT)), _varints(values))


def fixed64(field: int, values: Ints) -> Parts:
    """A fixed64 for each message."""
    data = values.astype("<i8").view(np.uint8).reshape(len(values), 8)
    return _constant(_varint(field << 3 | _FIXED64)), Part(data, np.ones(data.shape, np.bool_), np.full(len(data), 8))


def text(field: int, content: str | bytes) -> Parts:
    """A string or bytes, the same in all messages."""
    encoded = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return (_constant(_varint(field << 3 | _BYTES) + _varint(len(encoded)) + encoded),)


def message(field: int, *fields: Parts) -> Parts:
    """A message inside each message."""
    inside = tuple(part for parts in fields for part in parts)
    length = np.sum(np.broadcast_arrays(np.zeros(1, np.int64), *(part.length for part in inside)), axis=0)
    return (_constant(_varint(field << 3 | _BYTES)), _varints(length), *inside)


def where(present: Bools, parts: Parts) -> Parts:
    """The parts, left out of the messages in which they are not present."""
    return tuple(Part(one.data, one.kept & present[:, None], one.length * present) for one in parts)


def taken(parts: Parts, index: Integers) -> Parts:
    """The parts of some messages, by their positions: what is the same in many of them is encoded once."""
    data, kept = _matrix(parts)
    return (Part(data[index], kept[index], kept.sum(axis=1)[index]),)


def encoded(*fields: Parts) -> bytes:
    """The bytes of all messages, one behind the other."""
    data, kept = _matrix(tuple(part for parts in fields for part in parts))
    return data[kept].tobytes()


def _matrix(parts: Parts) -> tuple[npt.NDArray[np.uint8], Bools]:
    """The parts side by side."""
    shape = max(len(part.data) for part in parts), sum(part.data.shape[1] for part in parts)
    data, kept = np.empty(shape, np.uint8), np.empty(shape, np.bool_)
    first = 0
    for part in parts:
        behind = first + part.data.shape[1]
        data[:, first:behind], kept[:, first:behind] = part.data, part.kept
        first = behind
    return data, kept


def _varints(values: Ints) -> Part:
    """Each number in groups of 7 bits, the lowest first; one below 0 as 64 bits of two's complement."""
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
