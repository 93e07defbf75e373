"""What one phase costs: five clocks, kernels and classes, per measured instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.classes import classify
from nsys_analyzer.analysis.intervals import group_bounds, group_sum, union_length
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.trace import GRAPH, KERNEL, KINDS, Operations

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Stats:
    """Statistics of a figure over instances, in the unit of the field that holds it.

    ``std`` is the sample standard deviation (n - 1), None below two instances; all are None without any.
    """

    n: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    median: float | None = None
    max: float | None = None

    @staticmethod
    def of_ns(values: Ints | Sequence[int]) -> Stats:
        """Statistics in ms of durations in ns."""
        ms = np.asarray(values, np.float64) / _NS_PER_MS
        if not len(ms):
            return Stats(0)
        std = float(ms.std(ddof=1)) if len(ms) > 1 else None
        return Stats(len(ms), float(ms.mean()), std, float(ms.min()), float(np.median(ms)), float(ms.max()))


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a phase, per instance; ``share`` is a fraction of the phase's kernel sum."""

    name: str
    kernel_class: str
    launches_per_instance: float
    ms_per_instance: float
    avg_us: float
    share: float


@dataclass(frozen=True)
class ClassRow:
    """One class of kernels of a phase, per instance; ``share`` is a fraction of the phase's kernel sum."""

    kernel_class: str
    launches_per_instance: float
    ms_per_instance: float
    share: float


@dataclass(frozen=True)
class MemoryRow:
    """Copies or fills of a phase, per instance: they are GPU operations, but no kernels."""

    kind: str
    operations_per_instance: float
    ms_per_instance: float


@dataclass(frozen=True)
class GpuClocks:
    """GPU time of instances, one entry per instance, ns, and how many kernels each launched."""

    span: Ints
    busy: Ints
    kernel_sum: Ints
    last_end: Ints
    kernels: Ints
    opaque: Ints


def gpu_clocks(operations: Operations, instance: Ints, instances: int) -> GpuClocks:
    """Clocks of each instance from the operations attributed to it.

    Args:
        operations: the operations.
        instance: shape (operations,), from 0 to ``instances - 1``; -1 for none.
        instances: how many there are.

    """
    inside = instance >= 0
    if not inside.all():
        operations, instance = operations.select(inside), instance[inside]
    first, last = group_bounds(instance, operations.start, operations.end, instances)
    is_kernel = operations.kind == KERNEL
    duration = (operations.end - operations.start)[is_kernel]
    return GpuClocks(
        span=last - first,
        busy=union_length(instance, operations.start, operations.end, instances),
        kernel_sum=group_sum(instance[is_kernel], duration, instances),
        last_end=last,
        kernels=np.bincount(instance[is_kernel], minlength=instances),
        opaque=np.bincount(instance[operations.kind == GRAPH], minlength=instances),
    )


def kernel_rows(operations: Operations, instances: int) -> tuple[KernelRow, ...]:
    """The kernels among some operations by name, longest first, per one of ``instances`` instances."""
    is_kernel = operations.kind == KERNEL
    code = operations.name[is_kernel].astype(np.int64)
    total = group_sum(code, (operations.end - operations.start)[is_kernel], len(operations.names))
    launches = np.bincount(code, minlength=len(operations.names))
    order = [int(i) for i in np.lexsort((np.arange(len(total)), -total)) if launches[i]]
    everything = int(total.sum())
    return tuple(
        KernelRow(
            name=operations.names[i],
            kernel_class=classify(operations.names[i]),
            launches_per_instance=int(launches[i]) / instances,
            ms_per_instance=int(total[i]) / instances / _NS_PER_MS,
            avg_us=int(total[i]) / int(launches[i]) / 1e3,
            share=int(total[i]) / everything if everything else 0.0,
        )
        for i in order
    )


def merge_kernels(*tables: Sequence[KernelRow]) -> tuple[KernelRow, ...]:
    """Kernel tables of several phases as one table of all of them, longest first."""
    rows: dict[str, list[KernelRow]] = {}
    for row in (row for table in tables for row in table):
        rows.setdefault(row.name, []).append(row)
    everything = sum(row.ms_per_instance for table in tables for row in table)
    merged = [_sum_rows(same, everything) for same in rows.values()]
    return tuple(sorted(merged, key=lambda row: (-row.ms_per_instance, row.name)))


def _sum_rows(same: Sequence[KernelRow], everything: float) -> KernelRow:
    launches = sum(row.launches_per_instance for row in same)
    ms = sum(row.ms_per_instance for row in same)
    share = ms / everything if everything else 0.0
    return KernelRow(same[0].name, same[0].kernel_class, launches, ms, ms * 1e3 / launches, share)


def class_rows(kernels: Sequence[KernelRow]) -> tuple[ClassRow, ...]:
    """The classes of a kernel table, longest first."""
    classes: dict[str, list[KernelRow]] = {}
    for row in kernels:
        classes.setdefault(row.kernel_class, []).append(row)
    rows = [
        ClassRow(
            name,
            sum(row.launches_per_instance for row in members),
            sum(row.ms_per_instance for row in members),
            sum(row.share for row in members),
        )
        for name, members in classes.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ms_per_instance, row.kernel_class)))


def memory_rows(operations: Operations, instances: int) -> tuple[MemoryRow, ...]:
    """Copies, fills and opaque graphs among some operations, per one of ``instances`` instances."""
    rows = []
    for code, kind in enumerate(KINDS):
        chosen = operations.kind == code
        count = int(chosen.sum())
        if code != KERNEL and count:
            ns = int((operations.end - operations.start)[chosen].sum())
            rows.append(MemoryRow(kind, count / instances, ns / instances / _NS_PER_MS))
    return tuple(rows)
