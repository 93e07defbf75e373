"""Reads a Chrome trace of PyTorch's profiler (Kineto): the events worth keeping, by kind.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So it is read a piece at a time, and its events condensed to a few columns.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.text import visible
from nsys_analyzer.trace.kineto.events import (
    COLUMNS,
    EVENT,
    GPU_RANGE,
    OLD_OPERATOR,
    OTHER_DEVICE,
    UNREADABLE,
    Event,
    Numbers,
    Place,
    Properties,
    Rows,
    as_number,
    collectives_of,
    decode_many,
    decode_one,
    encode,
    kind_of,
    rows_of,
    times_of,
)
from nsys_analyzer.trace.kineto.json_text import RECORD, JsonText, opened

_MOST_WAITING = 4096
"""Events read one by one that are condensed at once."""

_ON_A_GPU = ("kernel", "memcpy", "memset")
_BACKWARD = re.compile(r"Backward\d*$")


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them.

    Attributes:
        events: kinds are ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``,
            ``thread``; ``collective``, what kernels say of theirs; and ``gpu range``, a range on the GPU's timeline,
            where the trace holds nothing of the CPU.
        texts, places: those of the numbers in the events.
        remarks: warnings about what could not be read.
        on_cpu: whether it holds nothing of a GPU.
    """

    path: Path
    properties: Properties
    events: dict[str, Rows]
    texts: list[str]
    places: list[Place]
    remarks: list[str]
    on_cpu: bool

    def of(self, kind: str) -> Rows:
        """Returns the events of a kind."""
        return self.events.get(kind, np.empty(0, COLUMNS.get(kind, EVENT)))

    @property
    def operations(self) -> Rows:
        """The GPU operations: kernels, copies and fills."""
        return np.concatenate([self.of(kind) for kind in _ON_A_GPU])


def read_kineto(path: Path) -> KinetoTrace:
    """Reads a Chrome trace of PyTorch's profiler, plain or compressed with gzip.

    An event that cannot be what it says is left out; the trace's remarks say so.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, of a device that is not read, or nothing in
            it to analyse.
    """
    read = _Events(path)
    with opened(path) as file:
        written = _read(JsonText(path, file), read)
    events, left_out = read.finished()
    properties, remarks = Properties(), left_out.copy()
    try:
        properties = msgspec.json.decode(encode(written), type=Properties)
    except UNREADABLE as error:
        remarks.append(f"The trace's properties are ignored: {error}")
    if "range" in events or "operator" in events:
        events.pop(GPU_RANGE, None)  # it repeats the CPU's
    because = f": {left_out[0]}" if left_out else ""
    timed = [rows for kind, rows in events.items() if kind not in ("thread", "collective")]
    if not timed:
        raise TraceError(f"{path} holds no events of PyTorch's profiler{because}", RECORD)
    on_cpu = not set(events) & set(_ON_A_GPU)
    if on_cpu and "operator" not in events:
        hint = "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise TraceError(f"{path} holds neither operators nor kernels{because}", hint)
    first = min(int(rows["start"].min()) for rows in timed)
    for rows in timed:
        rows["start"] -= first
        rows["end"] -= first
    if on_cpu:
        remarks += make_kernels(events, read.numbers.texts)
        if properties.device_properties:
            remarks.append(
                "The machine has a GPU, and the trace holds nothing that ran there: the times are those of the CPU"
            )
    texts = list(read.numbers.texts)
    places = [(as_number(pid), as_number(tid)) for pid, tid in read.numbers.places]
    return KinetoTrace(path, properties, events, texts, places, remarks, on_cpu)


def _read(text: JsonText, events: _Events) -> dict[str, Any]:
    """Reads a trace: the events into ``events``; returns the properties that are of use as they are written."""
    if not text.next():
        raise TraceError(f"{text.path} is empty", RECORD)
    properties: dict[str, Any] = {}
    has_events = False
    if text.take("["):  # a bare array of events
        _read_events(text, events)
        has_events = True
    elif not text.take("{"):
        text.value()
    else:
        while text.next() != "}":
            key = text.value()
            if not isinstance(key, str) or not text.take(":"):
                raise text.broken("no property")
            if key == "traceEvents" and text.take("["):
                _read_events(text, events)
                has_events = True
            else:
                value = text.value()
                if key in Properties.__struct_encode_fields__ and value is not None:
                    properties[key] = value
            if not text.take(",") and text.next() != "}":
                raise text.broken("neither a comma nor a closing brace")
        text.take("}")
    if text.next():
        raise text.broken("extra data")
    if not has_events:
        raise TraceError(f"{text.path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", RECORD)
    return properties


def _read_events(text: JsonText, events: _Events) -> None:
    """Reads an array of events to its end: many at once, or one by one beside those that msgspec cannot read."""
    one_by_one_until = 0
    while text.next() != "]":
        several = text.objects() if text.position >= one_by_one_until else ""
        if several and events.add_all(several):
            text.at += len(several)
        else:
            one_by_one_until = max(one_by_one_until, text.position + (len(several) or len(text.buffer) - text.at))
            events.add(text.value())
        if not text.take(",") and text.next() != "]":
            raise text.broken("neither a comma nor a closing bracket")
    text.take("]")


class _Events:
    """The events of a trace as they are read: those that are kept, by kind, and how many are left out."""

    def __init__(self, path: Path) -> None:
        self.numbers = Numbers()
        self._path = path
        self._kept: dict[str, list[Rows]] = defaultdict(list)
        self._left_out: Counter[str] = Counter()
        self._first_left_out: dict[str, str] = {}
        self._waiting: list[Event] = []

    def add_all(self, text: str) -> bool:
        """Adds events from the text of several, ``{…}, {…}``; False, and none, where :meth:`add` must take each."""
        try:
            events = decode_many(text)
        except UNREADABLE:
            return False
        self._condense()
        self._waiting = events
        self._condense()
        return True

    def add(self, value: Any) -> None:
        """Adds an event from the value of its JSON, or counts it among those left out."""
        if not isinstance(value, dict):
            self._leave_out("unknown", None)
        elif kind := kind_of(value.get("ph"), value.get("cat"), value.get("name")):
            try:
                self._waiting.append(decode_one(value))
            except UNREADABLE:
                self._leave_out(kind, value.get("name"))
            if len(self._waiting) == _MOST_WAITING:
                self._condense()

    def finished(self) -> tuple[dict[str, Rows], list[str]]:
        """Returns the rows of each kind, and a warning for each kind of which events were left out."""
        self._condense()
        events = {kind: np.concatenate(self._kept.pop(kind)) for kind in tuple(self._kept)}
        remarks = [
            f"Left out: {count:,} of {count + len(events.get(kind, ())):,} events of the kind {kind}, which have no "
            f"time, or hold what cannot be read; the first is {self._first_left_out[kind]}"
            for kind, count in self._left_out.items()
        ]
        if OLD_OPERATOR in events:
            self._sort_old_operators(events)
        return events, remarks

    def _leave_out(self, kind: str, name: object, count: int = 1) -> None:
        self._first_left_out.setdefault(kind, f'"{visible(name[:60])}"' if isinstance(name, str) else "without a name")
        self._left_out[kind] += count

    def _condense(self) -> None:
        """Condenses the events that wait to rows."""
        by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self._waiting:
            if kind := kind_of(event.ph, event.cat, event.name):
                by_kind[kind].append(event)
        self._waiting = []
        for kind, events in by_kind.items():
            if kind == OTHER_DEVICE:
                hint = "Traces of NVIDIA's and AMD's GPUs are read, and those of CPUs"
                raise TraceError(f"{self._path} is of a device that is not read ({events[0].cat})", hint)
            starts, ends, are_timed = times_of(kind, events)
            if not are_timed.all():
                self._leave_out(kind, events[int(are_timed.argmin())].name, int((~are_timed).sum()))
                events = list(compress(events, are_timed.tolist()))
            rows = rows_of(kind, events, self.numbers)
            rows["start"], rows["end"] = starts[are_timed], ends[are_timed]
            if kind == "kernel" and len(collectives := collectives_of(rows, events, self.numbers)):
                self._kept["collective"].append(collectives)
            if len(rows):
                self._kept[kind].append(rows)

    def _sort_old_operators(self, events: dict[str, Rows]) -> None:
        """Parts operators from ranges by their names, in place."""
        rows, texts = events.pop(OLD_OPERATOR), list(self.numbers.texts)
        names = {texts[number]: number for number in np.unique(rows["name"]).tolist()}
        operators = [
            number
            for name, number in names.items()
            if "::" in name or f"aten::{name}" in names or _BACKWARD.search(name)
        ]
        are_operators = np.isin(rows["name"], operators)
        for kind, some in (("operator", rows[are_operators]), ("range", rows[~are_operators])):
            if len(some):
                columns = COLUMNS.get(kind, EVENT)
                there = events.get(kind, np.empty(0, columns))
                events[kind] = np.concatenate([there, some[list(columns.names or ())].astype(columns)])


#: Autograd's own bookkeeping, which runs operators: ``autograd::engine::evaluate_function: MmBackward0``,
#: ``torch::autograd::AccumulateGrad``, ``MmBackward0``, ``torch::jit::…Backward``, a function's ``MyBackward``.
_AUTOGRAD = re.compile(r"^(?:torch::)?autograd::|^[\w:<>., ]*Backward\d*$")
#: What torch.compile's own code runs in; its matmuls are operators in it.
_COMPILED = "## Call CompiledFxGraph"
COMPILED_GRAPH = "CompiledFxGraph"
#: The share of the operators' own time that may be missing without a warning.
_TOLERATED = 0.01

Stretch = tuple[int, int]
"""Where an operator runs and none that it calls: start and end in ns."""


def make_kernels(events: dict[str, Rows], texts: dict[str, int]) -> Iterator[str]:
    """Makes a kernel and its launch of each call of an operator, in place; a thread is a stream. Yields warnings."""
    operators, names = events["operator"], list(texts)
    working = [number for number in np.unique(operators["name"]) if is_operator(names[number])]
    threads: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for span in operators[np.isin(operators["name"], working)][["name", "place", "start", "end"]].tolist():
        threads[span[1]].append(span)
    calls, kernels = list[tuple[int, ...]](), list[tuple[int, ...]]()
    own_ns = 0
    for stream, spans in enumerate(threads.values()):
        spans.sort(key=lambda span: (span[2], -span[3]))
        for (name, place, start, end), free in zip(spans, stretches(span[2:] for span in spans), strict=True):
            own_ns += sum(end - start for start, end in free)
            if names[name].startswith(_COMPILED):
                name = texts[COMPILED_GRAPH]  # without the hash, which would part equals
                launched = [(run, run) for run in free]
            else:
                longest = max(free, key=lambda run: run[1] - run[0], default=(start, start))
                launched = [((start, end), longest)]
            for call, run in launched:
                calls.append((name, place, *call, len(calls) + 1))
                kernels.append((name, place, *run, len(calls), 0, stream, 0, 0))
    events |= {"runtime": np.array(calls, COLUMNS["runtime"]), "kernel": np.array(kernels, COLUMNS["kernel"])}
    lost_ns = own_ns - int((events["kernel"]["end"] - events["kernel"]["start"]).sum())
    if lost_ns > _TOLERATED * own_ns:
        yield (
            f"{lost_ns / own_ns:.1%} of the operators' own time lies between the operators that they call, outside "
            "each one's longest stretch, and is not counted"
        )


def is_operator(name: str) -> bool:
    """Returns whether a ``cpu_op`` does work: it has a namespace (``aten::mm``), and is not autograd's bookkeeping.

    What has none is a label somebody put around operators: ``MmBackward0``, ``enumerate(DataLoader)#…``,
    ``Optimizer.step#AdamW.step``, ``DistributedDataParallel.forward``; but for what torch.compile made.
    """
    return ("::" in name and not _AUTOGRAD.search(name)) or name.startswith(_COMPILED) or "cpp_fused" in name


def stretches(intervals: Iterable[tuple[int, int]]) -> list[list[Stretch]]:
    """Returns the stretches of each interval of one thread that no interval nested in it covers; none empty.

    Args:
        intervals: (start, end) in ns, by start and, where they start together, the longer first. One that ends
            after the one it starts in is cut there.
    """
    free: list[list[Stretch]] = []
    ends: list[int] = []
    free_from: list[int] = []
    stack: list[int] = []

    def leave_out(index: int, start: int, end: int) -> None:
        if start > free_from[index]:
            free[index].append((free_from[index], start))
        free_from[index] = end

    for start, end in intervals:
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            end = min(end, ends[stack[-1]])  # profilers round, and a child may outlive its parent by 1 ns
            leave_out(stack[-1], start, end)
        stack.append(len(free))
        free.append([])
        ends.append(end)
        free_from.append(start)
    for index, end in enumerate(ends):
        leave_out(index, end, end)
    return free
