"""Operators of a machine without a GPU as kernels: the time that each spends itself.

An operator calls others (``aten::linear`` calls ``aten::mm``), and its own time is what theirs leaves of it, in
several stretches. One call is one row, so that products can be counted; a row must not overlap another of its
thread; so the row lies where the longest stretch is. What the shorter ones hold is summed up, and told. The code of
torch.compile is no product but many loops between the operators that it calls: each of its stretches is a row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from nsys_analyzer.trace.sources.kineto.events import Event, KinetoTrace, Name

#: Autograd's own bookkeeping, which runs operators: ``autograd::engine::evaluate_function: MmBackward0``,
#: ``torch::autograd::AccumulateGrad``, ``MmBackward0``, ``torch::jit::…Backward``, a function's ``MyBackward``.
_AUTOGRAD = re.compile(r"^(?:torch::)?autograd::|^[\w:<>., ]*Backward\d*$")
#: What torch.compile's own code runs in; its products are operators in it.
_COMPILED = "## Call CompiledFxGraph"
COMPILED_GRAPH = "CompiledFxGraph"
#: The name of the device that stands for the CPU.
CPU = "CPU"
#: The share of the operators' own time that may be missing without a word.
_TOLERATED = 0.01


Stretch = tuple[int, int]
"""Where an operator runs and none that it calls: start and end in ns."""


class OperatorCall(msgspec.Struct, gc=False):
    """A call of an operator: from when to when it was launched and ran (ns), and on which stream."""

    event: Event
    launch: Stretch
    run: Stretch
    stream: int

    @property
    def name(self) -> str:
        """The operator's name; a graph that torch.compile made has a hash in its, which would part equals."""
        return COMPILED_GRAPH if self.event.name.startswith(_COMPILED) else self.event.name


def operator_calls(trace: KinetoTrace) -> tuple[list[OperatorCall], tuple[str, ...]]:
    """The calls of a trace without a GPU, and warnings.

    What the calls lack of the operators' own time is a warning where it is above 1 %.
    """
    calls: list[OperatorCall] = []
    own = 0
    for stream, events in enumerate(_by_thread(trace)):
        for event, found in events:
            calls += _calls(event, found, stream)
            own += sum(end - start for start, end in found)
    return calls, tuple(_warnings(trace, calls, own))


def _calls(event: Event, found: list[Stretch], stream: int) -> Iterator[OperatorCall]:
    """One call, launched where the operator starts and as long as it, with what it called; of compiled code, many."""
    if event.name.startswith(_COMPILED):
        yield from (OperatorCall(event, one, one, stream) for one in found)
    else:
        longest = max(found, key=lambda one: one[1] - one[0], default=(event.start, event.start))
        yield OperatorCall(event, (event.start, event.end), longest, stream)


def _by_thread(trace: KinetoTrace) -> Iterator[Iterator[tuple[Event, list[Stretch]]]]:
    threads: dict[tuple[Name, Name], list[Event]] = defaultdict(list)
    for event in trace.of("operator"):
        if is_operator(event.name):
            threads[event.pid, event.tid].append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event.start, -event.end))
        yield zip(events, stretches((event.start, event.end) for event in events), strict=True)


def _warnings(trace: KinetoTrace, calls: list[OperatorCall], own: int) -> Iterator[str]:
    lost = own - sum(call.run[1] - call.run[0] for call in calls)
    if lost > _TOLERATED * own:
        yield (
            f"{lost / own:.1%} of the operators' own time lies between the operators that they call, outside each "
            "one's longest stretch, and is not counted"
        )
    if trace.properties.devices:
        yield "The machine has a GPU, and the trace holds nothing that ran there: the times are those of the CPU"


def is_operator(name: str) -> bool:
    """Say whether a ``cpu_op`` does work: it has a namespace (``aten::mm``), and is not autograd's bookkeeping.

    What has none is a label somebody put around operators: ``MmBackward0``, ``enumerate(DataLoader)#…``,
    ``Optimizer.step#AdamW.step``, ``DistributedDataParallel.forward``; but for what torch.compile made.
    """
    return ("::" in name and not _AUTOGRAD.search(name)) or name.startswith(_COMPILED) or "cpp_fused" in name


def stretches(intervals: Iterable[tuple[int, int]]) -> list[list[Stretch]]:
    """Return the stretches of each interval of one thread that no interval nested in it covers.

    Args:
        intervals: (start, end) in ns, by start and, where they start together, the longer first. One that ends
            after the one it starts in is cut there.

    Returns:
        Those of each interval, in the same order, none empty. No two overlap; each lies within its interval.
    """
    found: list[_Open] = []
    stack: list[_Open] = []
    for start, end in intervals:
        while stack and stack[-1].end <= start:
            stack.pop()
        if stack:
            end = min(end, stack[-1].end)  # profilers round, and a child may outlive its parent by 1 ns
            stack[-1].leave_out(start, end)
        stack.append(_Open(start, end))
        found.append(stack[-1])
    return [one.stretches() for one in found]


class _Open:
    """An interval whose nested ones are being taken out of it."""

    __slots__ = ("end", "found", "free_from")

    def __init__(self, start: int, end: int) -> None:
        self.end = end
        self.free_from = start
        self.found: list[Stretch] = []

    def leave_out(self, start: int, end: int) -> None:
        if start > self.free_from:
            self.found.append((self.free_from, start))
        self.free_from = end

    def stretches(self) -> list[Stretch]:
        self.leave_out(self.end, self.end)
        return self.found
