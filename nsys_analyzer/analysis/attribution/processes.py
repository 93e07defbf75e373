"""The processes of a trace that deserve an entry of their own, and what to call them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import Operations, pid_of, process_of
from nsys_analyzer.trace.ranks import Rank, distinct_ranks
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class Process:
    """A process; its label is empty where it is the only one, unless it is one of several ranks."""

    global_pid: int
    pid: int
    label: str
    rank: int | None = None


def find_processes(trace: Trace) -> tuple[Process, ...]:
    """The processes with GPU operations, in order of rank, then of device; without any, the first with ranges or calls.

    The label is the rank where the trace has it; else the devices, as CUDA numbers them in the process, where no other
    process uses one of that number; else the process ID.
    """
    used: list[int] = distinct(trace.operations.process).tolist()
    if not used:
        threads = np.concatenate([trace.ranges.thread, trace.open_ranges.thread, trace.launches.thread])
        used = process_of(threads[:1]).tolist() or [0]
    ranks = distinct_ranks(trace.ranks, used)
    devices = _devices(trace.operations, used)
    used.sort(key=lambda process: (process not in ranks, ranks.get(process, Rank(0)).number, devices[process], process))
    users = Counter(device for numbers in devices.values() for device in numbers)
    shared = {process for process in used if any(users[device] > 1 for device in devices[process])}
    labels = {one: _label(one, ranks.get(one), [] if one in shared else devices[one]) for one in used}
    if len(used) == 1 and ranks.get(used[0], Rank(0, 1)).world_size == 1:
        labels[used[0]] = ""
    return tuple(Process(one, pid_of(one), labels[one], ranks[one].number if one in ranks else None) for one in used)


def is_on_cpu(trace: Trace, process: int) -> bool:
    """Whether a process's work is operators on the CPU, which neither wait for a device nor let it idle."""
    devices = distinct(trace.operations.device[trace.operations.process == process]).tolist()
    gpus = [trace.metadata.gpu(pid_of(process), device) for device in devices]
    return any(gpu is not None and gpu.is_cpu for gpu in gpus)


def make_pid_label(pid: int) -> str:
    """The label of a process that neither a rank nor a device of its own tells from the others."""
    return f"pid {pid}"


def _label(process: int, rank: Rank | None, devices: list[int]) -> str:
    """The label of one of several processes, with the devices that it alone uses."""
    if rank or not devices:
        return f"rank {rank.number}" if rank else make_pid_label(pid_of(process))
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


def _devices(operations: Operations, used: list[int]) -> dict[int, list[int]]:
    """The CUDA ordinals of the devices of each of the processes ``used``, which are in order."""
    devices: dict[int, list[int]] = {process: [] for process in used}
    if len(operations):
        low = int(operations.device.min())
        count = int(operations.device.max()) - low + 1
        # One number for a process and a device: a pass over the operations, and not one for each process.
        for pair in distinct(np.searchsorted(used, operations.process) * count + operations.device - low).tolist():
            devices[used[pair // count]].append(pair % count + low)
    return devices
