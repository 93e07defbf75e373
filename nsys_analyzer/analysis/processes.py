"""The processes of a trace that deserve an entry of their own, and what to call them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import pid_of, process_of
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class Process:
    """A process: its global ID, its operating system's ID, and a label, empty where it is the only one."""

    global_pid: int
    pid: int
    label: str


def processes_of(trace: Trace) -> tuple[Process, ...]:
    """The processes with GPU operations, in order of device; without any, the first one with ranges or launches.

    A process is called by its rank where each one has a GPU of its own, as in one process per GPU; else by
    its process ID.
    """
    used = distinct(trace.operations.process)
    if not len(used):
        idle = np.concatenate([trace.ranges.thread, trace.open_ranges.thread, trace.launches.thread])
        fallback = int(process_of(idle[:1])[0]) if len(idle) else 0
        return (Process(fallback, pid_of(fallback), ""),)
    if len(used) == 1:
        return (Process(int(used[0]), pid_of(int(used[0])), ""),)
    devices = [_gpu_of(trace, int(process)) for process in used]
    ranked = len(set(devices)) == len(devices)
    order = sorted(range(len(used)), key=lambda i: (devices[i], int(used[i])))
    return tuple(
        Process(int(used[i]), pid_of(int(used[i])), f"rank {n}" if ranked else f"pid {pid_of(int(used[i]))}")
        for n, i in enumerate(order)
    )


def _gpu_of(trace: Trace, process: int) -> int:
    """The GPU a process's first operation ran on; with its visible devices reordered, not its ordinal."""
    device = int(trace.operations.device[np.argmax(trace.operations.process == process)])
    return trace.metadata.gpu_of.get((pid_of(process), device), device)
