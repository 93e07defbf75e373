"""Finds and labels the processes of a trace that a report describes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import pid_of, process_of
from nsys_analyzer.trace.ranks import Rank, find_unambiguous_ranks
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class Process:
    """A process of a trace. The label is empty if the trace has no other process and the program has a single rank."""

    global_pid: int
    pid: int
    label: str
    rank: int | None = None


def find_processes(trace: Trace) -> tuple[Process, ...]:
    """Returns the processes with GPU operations, sorted by rank, then by device.

    If no process has GPU operations, the function returns the first process with ranges or API calls.

    The label of a process is its rank if the trace names the rank. Otherwise, the label consists of the CUDA device
    numbers of the process, if no other process uses these devices. Otherwise, the label is the process ID.
    """
    process_ids: list[int] = distinct(trace.operations.process).tolist()
    if not process_ids:
        threads = np.concatenate([trace.ranges.thread, trace.open_ranges.thread, trace.launches.thread])
        process_ids = process_of(threads[:1]).tolist() or [0]
    operations = trace.operations
    devices: dict[int, list[int]] = {process: [] for process in process_ids}
    if len(operations):
        lowest_device = int(operations.device.min())
        count = int(operations.device.max()) - lowest_device + 1
        # Encode each pair of a process and a device as one integer, so that one pass over the operations is enough.
        for pair in distinct(
            np.searchsorted(process_ids, operations.process) * count + operations.device - lowest_device
        ).tolist():
            devices[process_ids[pair // count]].append(pair % count + lowest_device)
    ranks = find_unambiguous_ranks(trace.ranks, process_ids)
    process_ids.sort(
        key=lambda process: (process not in ranks, ranks.get(process, Rank(0)).number, devices[process], process)
    )
    process_counts = Counter(device for numbers in devices.values() for device in numbers)
    processes = []
    for process in process_ids:
        rank, pid, numbers = ranks.get(process), pid_of(process), devices[process]
        label = f"rank {rank.number}" if rank else make_pid_label(pid)
        if not rank and numbers and all(process_counts[device] == 1 for device in numbers):
            label = f"device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        processes.append(Process(process, pid, label, rank.number if rank else None))
    if len(process_ids) == 1 and ranks.get(process_ids[0], Rank(0, 1)).world_size == 1:
        return (replace(processes[0], label=""),)
    return tuple(processes)


def runs_on_cpu(trace: Trace, process: int) -> bool:
    """Returns True if the operations of a process are operators that ran on the CPU, not on a GPU."""
    devices = distinct(trace.operations.device[trace.operations.process == process]).tolist()
    gpus = [trace.metadata.gpu(pid_of(process), device) for device in devices]
    return any(gpu is not None and gpu.is_cpu for gpu in gpus)


def make_pid_label(pid: int) -> str:
    """Returns the label of a process without a known rank and without a device that only this process uses."""
    return f"pid {pid}"
