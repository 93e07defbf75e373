"""Events of one kind as they are written, condensed to rows: which are refused, and what the others say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.sources.kineto.events import (
    CALL,
    COLLECTIVE,
    COLUMNS,
    EVENT,
    GPU_OPERATION,
    NULL,
    OPERATOR,
    Name,
    Numbered,
    Place,
    Rows,
    with_columns,
)
from nsys_analyzer.trace.sources.kineto.legacy import ARROW, LEGACY_ON_CPU, LEGACY_ON_GPU
from nsys_analyzer.trace.sources.kineto.times import all_nanoseconds, nanoseconds
from nsys_analyzer.trace.sources.kineto.written import (
    GPU_RANGE,
    ON_A_GPU,
    ON_MTIA,
    OPERATORS,
    UNREADABLE,
    Arguments,
    Written,
    message_bytes,
    reason,
    time_of,
)

#: What an MTIA does for its queues beside running kernels and moving data.
_MTIA_QUEUE = ("event_record", "event_wait")

_COLUMNS = {**COLUMNS, LEGACY_ON_CPU: OPERATOR, ARROW: CALL, ON_MTIA: GPU_OPERATION}
_WITHOUT_DURATION = ("memory", "thread", ARROW)
_NO_ARGUMENTS = Arguments()

#: The sizes of tensors, or of lists of tensors; anything else is none.
_SHAPES = re.compile(r"\[(?:\[[\d\[\], ]*\])?\]")


class Numbers:
    """The texts and places of a trace, by which its rows name them, and the sizes of operators' inputs."""

    def __init__(self) -> None:
        self.texts = Numbered[str]()
        self.places = Numbered[Place]()
        self.shapes = _Shapes(self.texts)


class _Shapes(dict[bytes, int]):
    """The number of the text for the sizes of an operator's inputs, by how they are written; NULL for none."""

    def __init__(self, texts: Numbered[str]) -> None:
        self._texts = texts

    def __missing__(self, written: bytes) -> int:
        line = "".join(written.decode().split()).replace(",", ", ")
        self[written] = number = self._texts[line] if _SHAPES.fullmatch(line) else NULL
        return number


class Batch:
    """Events of one kind on their way to rows.

    Attributes:
        refused: why an event cannot be what it says, by its index.
        without_stream: how many events of each kind have a stream that cannot be read.
    """

    def __init__(self, kind: str, written: Sequence[Written], numbers: Numbers) -> None:
        self.refused: dict[int, str] = {}
        self.without_stream = Counter[str]()
        self._kind = kind
        self._written = written
        self._numbers = numbers
        self._arguments = [event.args or _NO_ARGUMENTS for event in written]
        self._rows = np.zeros(len(written), _COLUMNS.get(kind, EVENT))
        self._fill()

    def kept(self) -> Iterator[tuple[int, str, Rows]]:
        """The rows that are kept, by kind, each with the index of the first of its events."""
        is_kept = np.ones(len(self._rows), np.bool_)
        is_kept[list(self.refused)] = False
        if self._kind != ON_MTIA:
            parts = [(self._kind, is_kept)]
        else:
            is_kept &= np.array([event.name not in _MTIA_QUEUE for event in self._written])
            is_kernel = np.array([arguments.direction is None for arguments in self._arguments])
            parts = [("kernel", is_kept & is_kernel), ("memcpy", is_kept & ~is_kernel)]
        for kind, selected in parts:
            if selected.any():
                yield int(selected.argmax()), kind, self._rows[selected]
        if self._kind == "kernel":
            exchange = [n for n in np.flatnonzero(is_kept).tolist() if self._arguments[n].collective]
            if exchange:
                yield exchange[0], "collective", self._collectives(exchange)

    def _collectives(self, chosen: Sequence[int]) -> Rows:
        """What the kernels of collectives say of them."""
        arguments = [self._arguments[n] for n in chosen]
        found = with_columns(self._rows[chosen], COLLECTIVE)
        found["name"] = [self._numbers.texts[each.collective or ""] for each in arguments]
        found["size"] = list(map(message_bytes, arguments))
        found["ranks"] = [each.group_size for each in arguments]
        return found

    def _refuse(self, index: int, why: str) -> None:
        """Refuses an event, if it was not refused before."""
        self.refused.setdefault(index, why)

    def _fill(self) -> None:
        """Fills the columns; the earlier check that an event fails says why it is refused."""
        kind, rows, arguments = self._kind, self._rows, self._arguments
        starts, without_start = self._times("ts", "time")
        durations, without_duration = self._times("dur", "duration")
        self._identify()
        if kind == "thread":
            rows["name"] = [self._numbers.texts[each.name] for each in arguments]
            return
        rows["start"] = rows["end"] = starts
        self._refuse_all(without_start)
        if kind not in _WITHOUT_DURATION:
            rows["end"] += durations
            self._refuse_all(without_duration)
            self._refuse_all(dict.fromkeys(np.flatnonzero(durations < 0).tolist(), "a negative duration"))
        if kind in OPERATORS:
            rows["sequence"] = [each.sequence for each in arguments]
            rows["forward_thread"] = [each.forward_thread for each in arguments]
            rows["shapes"] = [self._numbers.shapes[bytes(each.shapes)] for each in arguments]
        elif kind == "memory":
            rows["size"] = [each.size for each in arguments]
            rows["device"] = [each.memory_device if each.device_type else NULL for each in arguments]
            rows["allocated"] = [NULL if each.allocated is None else each.allocated for each in arguments]
        elif kind == ARROW:
            rows["correlation"] = [self._number(n, each.id) + 1 for n, each in enumerate(self._written)]  # 0 is none
        elif kind == "runtime":
            rows["correlation"] = [each.correlation or 0 for each in arguments]
        elif kind in ON_A_GPU:
            self._fill_operations()
        elif kind in (GPU_RANGE, LEGACY_ON_GPU):
            for index, event in enumerate(self._written):
                self._number(index, event.tid)  # a stream, or a device

    def _refuse_all(self, reasons: dict[int, str]) -> None:
        for index, why in reasons.items():
            self._refuse(index, why)

    def _times(self, key: str, what: str) -> tuple[Ints, dict[int, str]]:
        """A time of each event in ns, and why an event has none; refuses those that cannot be read."""
        written = list(map(attrgetter(key), self._written))
        if (found := all_nanoseconds(written)) is not None:
            return found, {}
        found, without = np.zeros(len(written), np.int64), dict[int, str]()
        if not any(written):
            return found, dict.fromkeys(range(len(written)), f"no {what}")
        for index, text in enumerate(written):
            try:
                microseconds = time_of(key, text) if text else None
            except UNREADABLE as error:
                self._refuse(index, reason(error))
                continue
            ns = None if microseconds is None else nanoseconds(microseconds)
            if ns is None:
                without[index] = f"no {what}" if microseconds is None else f"an impossible {what}"
            else:
                found[index] = ns
        return found, without

    def _identify(self) -> None:
        """Fills in the numbers of the names and places."""
        texts, places = self._numbers.texts, self._numbers.places
        names_of, places_of = list[int](), list[int]()
        for index, event in enumerate(self._written):
            name, pid, tid = event.name, event.pid, event.tid
            if name is None or pid is None or tid is None:
                self._refuse(index, f"no {'name' if name is None else 'pid' if pid is None else 'tid'}")
                name, pid, tid = "", 0, 0
            names_of.append(texts[name])
            places_of.append(places[pid, tid])
        self._rows["name"], self._rows["place"] = names_of, places_of

    def _fill_operations(self) -> None:
        """Fills in what a GPU operation has, and only it."""
        rows, arguments = self._rows, self._arguments
        rows["correlation"] = [each.correlation or 0 for each in arguments]
        rows["device"] = [
            self._device(index, each) if each.device is None else each.device for index, each in enumerate(arguments)
        ]
        rows["stream"] = [
            each.stream if type(each.stream) is int else self._stream(index, each)
            for index, each in enumerate(arguments)
        ]
        rows["graph_node"] = [each.graph_node or 0 for each in arguments]
        rows["size"] = [each.bytes or 0 for each in arguments]

    def _device(self, index: int, arguments: Arguments) -> int:
        """The device of a GPU operation; where no argument says it, the number in the process's place, 0 for a text."""
        if arguments.in_device is not None:
            return arguments.in_device
        process = self._written[index].pid
        if not isinstance(process, int):
            return 0
        if not 0 <= process < 2**31:
            self._refuse(index, "no device")
            return 0
        return process

    def _stream(self, index: int, arguments: Arguments) -> int:
        """The stream of a GPU operation; where no argument says it, the number in the thread's place."""
        told = arguments.stream
        if isinstance(told, str) and not told.isdecimal():
            if index not in self.refused:
                kind = self._kind if self._kind != ON_MTIA else "kernel" if arguments.direction is None else "memcpy"
                self.without_stream[kind] += 1
            told = None
        return self._number(index, self._written[index].tid) if told is None else int(told)

    def _number(self, index: int, value: Name | None) -> int:
        if not isinstance(value, int) or not -(2**62) < value < 2**62:
            self._refuse(index, "a text, or nothing, where a number belongs")
            return 0
        return value
