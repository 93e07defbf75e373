"""Operators of a machine without a GPU as kernels: the time that each spends itself.

An operator calls others (``aten::linear`` calls ``aten::mm``), and its own time is what theirs leaves of it, in
several stretches. One call is one row, so that matmuls can be counted; a row must not overlap another of its
thread; so the row is the longest stretch. A warning says how much lies in the shorter ones. The code of
torch.compile is no matmul but many loops between the operators that it calls: each of its stretches is a row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from nsys_analyzer.trace.kineto.events import COLUMNS, Rows

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
    found: list[list[Stretch]] = []
    ends: list[int] = []
    free_from: list[int] = []
    stack: list[int] = []

    def leave_out(index: int, start: int, end: int) -> None:
        if start > free_from[index]:
            found[index].append((free_from[index], start))
        free_from[index] = end

    for start, end in intervals:
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            end = min(end, ends[stack[-1]])  # profilers round, and a child may outlive its parent by 1 ns
            leave_out(stack[-1], start, end)
        stack.append(len(found))
        found.append([])
        ends.append(end)
        free_from.append(start)
    for index, end in enumerate(ends):
        leave_out(index, end, end)
    return found
