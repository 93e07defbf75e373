"""IDs as nsys writes them, for a trace that writes them otherwise: global process and thread IDs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import count

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.sources.kineto.events import KinetoTrace, Name

_VM = 1 << 48
_LIMIT = 1 << 24  # a global ID has 24 bits for the process and 24 for the thread

#: Kinds of event that happen on a thread of a process; the others name a GPU and a stream there.
ON_A_THREAD = ("runtime", "range", "operator", "memory")


class Threads:
    """The processes and threads of a trace, by what the trace calls them: any number, or any text."""

    def __init__(self, trace: KinetoTrace) -> None:
        threads: dict[Name, set[Name]] = defaultdict(set)
        for pid, tid in {place for kind in ON_A_THREAD for place in trace.places_of(kind)}:
            threads[pid].add(tid)
        self._pids = folded(threads)
        self._threads = {
            (pid, tid): self.process(pid) | number
            for pid, tids in threads.items()
            for tid, number in folded(tids).items()
        }

    @property
    def processes(self) -> list[int]:
        """The global process IDs; one that stands for the GPU's own where the trace holds no thread."""
        return [_VM | (pid << 24) for pid in self._pids.values()] or [_VM]

    def thread(self, pid: Name, tid: Name) -> int:
        """The global thread ID."""
        return self._threads[pid, tid]

    def process(self, pid: Name) -> int:
        """The global process ID."""
        return _VM | (self._pids[pid] << 24)

    def knows(self, pid: Name, tid: Name) -> bool:
        """Whether anything happened on this thread."""
        return (pid, tid) in self._threads


def folded(ids: Iterable[Name]) -> dict[Name, int]:
    """A number below 2^24 for each ID: itself where it is one, else the next that is free."""
    known = set(ids)
    fitting = {one for one in known if isinstance(one, int) and 0 <= one < _LIMIT}
    free = (number for number in count(1) if number not in fitting)
    return {one: one if one in fitting else next(free) for one in sorted(known, key=lambda one: (str(type(one)), one))}


def processes_of_gpus(trace: KinetoTrace, threads: Threads) -> dict[Name, int]:
    """The global process ID behind each GPU of the trace: that of the process which launched what ran there.

    Kineto writes a GPU's number where the process belongs. With several processes in one trace (the traces of
    several ranks, put together) a correlation ID alone says little, for each process counts its own from 1.

    Raises:
        TraceError: several ranks call their GPU by one number.
    """
    operations, calls = trace.operations, trace.calls
    gpus = sorted({trace.places[place][0] for place in np.unique(operations["place"])}, key=str)
    processes = threads.processes
    if len(processes) == 1:
        return dict.fromkeys(gpus, processes[0])
    launched: dict[int, dict[int, int]] = {process: {} for process in processes}
    for place, correlation, start in calls[["place", "correlation", "start"]].tolist():
        launched[threads.process(trace.places[place][0])].setdefault(correlation, start)
    ran: dict[Name, list[tuple[int, int]]] = {gpu: [] for gpu in gpus}
    for place, correlation, start in operations[["place", "correlation", "start"]].tolist():
        ran[trace.places[place][0]].append((correlation, start))
    _check_ranks(trace, ran, list(launched.values()))
    return {gpu: max(processes, key=lambda process: _fit(ran[gpu], launched[process])) for gpu in gpus}


def _check_ranks(trace: KinetoTrace, ran: dict[Name, list[tuple[int, int]]], launched: list[dict[int, int]]) -> None:
    """Refuses a GPU on which two operations of one correlation ID have a launch each, by either rank.

    A replay of a graph is one launch of many operations.
    """
    calls = trace.calls
    graphs = [number for number in np.unique(calls["name"]) if "Graph" in trace.texts[number]]
    replays = {*calls["correlation"][np.isin(calls["name"], graphs)].tolist(), 0}
    for gpu, operations in ran.items():
        for correlation, times in Counter(correlation for correlation, _ in operations).items():
            ranks = sum(correlation in launches for launches in launched)
            if correlation not in replays and min(times, ranks) > 1:
                what = f"holds several ranks under one GPU number ({gpu}): their kernels cannot be told apart"
                raise TraceError(f"{trace.path} {what}", "Give the trace of each rank alone")


def _fit(ran: list[tuple[int, int]], launched: dict[int, int]) -> tuple[int, float]:
    """How many operations of a GPU these launches explain; of equals, the shorter wait between the two is better."""
    waits = [start - launched[correlation] for correlation, start in ran if correlation in launched]
    possible = [wait for wait in waits if wait >= 0]
    return len(possible), -float(np.median(possible)) if possible else 0.0
