"""Tabulates the GPU work of a phase per measured instance: kernels, classes, copies and peak memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, MATMUL, UNKNOWN
from nsys_analyzer.analysis.kernels.classes import Kernels, find_precision
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.tracks import measure_memory_levels
from nsys_analyzer.trace.arrays import Ints, SmallInts, iterate_blocks
from nsys_analyzer.trace.columns import OPERATION_KINDS, Operations
from nsys_analyzer.trace.phase_names import STEP
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US, US_PER_MS

#: A share up to this value is displayed as 0.0 %, so kernels with this share do not matter.
_INVISIBLE_SHARE = 0.0005


class KernelRow(msgspec.Struct, frozen=True):
    """The figures of one kernel of a phase, as means per instance.

    ``share`` is the kernel's share of the total kernel time of the phase. A kernel has a row for each of its classes: a
    GEMM that a convolution launches counts as convolution. The ``label`` is a short name that is unique among all
    captures of a report.
    """

    name: str
    kernel_class: str = msgspec.field(name="class")
    launches_per_instance: float
    ms_per_instance: float
    avg_us: float
    share: float
    label: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Returns the name and the class, which identify the row in its table."""
        return self.name, self.kernel_class


class ClassRow(msgspec.Struct, frozen=True):
    """The figures of one kernel class of a phase, as means per instance. ``share`` is of the total kernel time."""

    kernel_class: str = msgspec.field(name="class")
    launches_per_instance: float
    ms_per_instance: float
    share: float


@dataclass(frozen=True)
class MemoryRow:
    """The figures of the copies, fills or opaque graphs of a phase, as means per instance."""

    kind: str
    operations_per_instance: float
    ms_per_instance: float


@dataclass(frozen=True)
class GroupSums:
    """The counts and the total durations of operations by group, such as a phase.

    Attributes:
        kernels, kernel_ns: the count and the duration of each distinct kernel, shape (groups, distinct kernels).
        others, other_ns: the count and the duration of the other operations by kind, shape (groups, kinds).
    """

    kernels: Ints
    kernel_ns: Ints
    others: Ints
    other_ns: Ints


def sum_by_group(operations: Operations, kernel: SmallInts, group: SmallInts, sizes: tuple[int, int]) -> GroupSums:
    """Returns the counts and durations of the operations of each group.

    Args:
        operations: the operations.
        kernel, group: the codes of each operation's kernel and group, -1 for no group; shape (operations,).
        sizes: the numbers of distinct kernels and groups.
    """
    distinct_kernels, groups = sizes
    # Operations are sorted by kind, and kernels come first.
    kernel_operations, copies_and_fills = operations.kernels, slice(operations.kernels.stop, None)
    kernels, other_operations = operations.select(kernel_operations), operations.select(copies_and_fills)
    return GroupSums(
        *sum_by_group_and_code(
            kernels, group[kernel_operations], kernel[kernel_operations], (groups, distinct_kernels)
        ),
        *sum_by_group_and_code(
            other_operations, group[copies_and_fills], other_operations.kind, (groups, len(OPERATION_KINDS))
        ),
    )


def sum_by_group_and_code(operations: Operations, group: Any, code: Any, shape: tuple[int, int]) -> tuple[Ints, Ints]:
    """Returns the number of operations and their summed duration in ns, by group and code.

    Durations are summed as floats, which is exact below 2**53 ns.

    Args:
        operations: the operations.
        group, code: the group and the code of each operation, shape (operations,). Group -1 is left out.
        shape: the numbers of groups and codes, which are the shape of both results.
    """
    rows, width = shape[0] + 1, shape[1]
    count, duration_ns = np.zeros(rows * width, np.int64), np.zeros(rows * width)
    for block in iterate_blocks(len(group), min_length=rows * width):
        key = (group[block].astype(np.int64) + 1) * width + code[block]
        count += np.bincount(key[operations.continues[block] == 0], minlength=rows * width)
        duration_ns += np.bincount(key, operations.end[block] - operations.start[block], rows * width)
    return count.reshape(rows, width)[1:], duration_ns.astype(np.int64).reshape(rows, width)[1:]


def make_kernel_rows(kernels: Kernels, launches: Ints, duration_ns: Ints, instances: int) -> tuple[KernelRow, ...]:
    """Makes the table of the kernels of a phase, the kernel with the most time first.

    Args:
        kernels: the distinct kernels of the trace.
        launches, duration_ns: the sums over all instances, shape (kernels,).
        instances: the number of instances.
    """
    total_ns = int(duration_ns.sum())
    return tuple(
        KernelRow(
            name=kernels.names[i],
            kernel_class=kernels.classes[i],
            launches_per_instance=int(launches[i]) / instances,
            ms_per_instance=int(duration_ns[i]) / instances / NS_PER_MS,
            avg_us=int(duration_ns[i]) / int(launches[i]) / NS_PER_US,
            share=int(duration_ns[i]) / total_ns if total_ns else 0.0,
        )
        for i in np.argsort(-duration_ns, kind="stable").tolist()
        if launches[i]
    )


def merge_kernels(*tables: Sequence[KernelRow]) -> tuple[KernelRow, ...]:
    """Merges kernel tables by adding up the rows of each kernel. The kernel with the most time comes first."""
    rows = sorted(chain.from_iterable(tables), key=attrgetter("key"))
    total_ms = sum(row.ms_per_instance for table in tables for row in table)
    merged_kernels = []
    for (name, kernel_class), group in groupby(rows, key=attrgetter("key")):
        same_kernel = list(group)
        launches, ms, _ = _add_rows(same_kernel)
        share, label = ms / total_ms if total_ms else 0.0, same_kernel[0].label
        merged_kernels.append(KernelRow(name, kernel_class, launches, ms, ms * US_PER_MS / launches, share, label))
    return tuple(sorted(merged_kernels, key=lambda row: -row.ms_per_instance))


def make_class_rows(kernels: Sequence[KernelRow]) -> tuple[ClassRow, ...]:
    """Makes the table of the classes of kernels, the class with the most time first."""
    get_class = attrgetter("kernel_class")
    groups = groupby(sorted(kernels, key=get_class), key=get_class)
    classes = (ClassRow(kernel_class, *_add_rows(rows)) for kernel_class, rows in groups)
    return tuple(sorted(classes, key=lambda row: -row.ms_per_instance))


def _add_rows(rows: Iterable[KernelRow]) -> tuple[float, float, float]:
    """Returns the sums of the rows' launches per instance, ms per instance, and shares."""
    columns = zip(*((row.launches_per_instance, row.ms_per_instance, row.share) for row in rows), strict=True)
    launches, ms, share = map(sum, columns)
    return launches, ms, share


def find_precision_shares(kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Returns the share of the kernels' time in each precision that kernel names show, the largest first."""
    ms_by_precision: defaultdict[str, float] = defaultdict(float)
    for row in kernels:
        ms_by_precision[find_precision(row.name) or "unknown"] += row.ms_per_instance
    total_ms = sum(ms_by_precision.values())
    longest_first = sorted(ms_by_precision.items(), key=lambda item: -item[1])
    return {precision: ms / total_ms for precision, ms in longest_first} if total_ms else {}


def find_class_share(classes: Sequence[ClassRow], kernel_class: str) -> float | None:
    """Returns the share of a class, 0 if it has no kernel; None if the share is unknown because kernels lack a name."""
    shares = {row.kernel_class: row.share for row in classes}
    return None if shares.get(UNKNOWN, 0.0) > _INVISIBLE_SHARE else shares.get(kernel_class, 0.0)


def make_memory_rows(count: Ints, duration_ns: Ints, instances: int) -> tuple[MemoryRow, ...]:
    """Makes the table of copies, fills and opaque graphs.

    Args:
        count, duration_ns: the sums over all instances, shape (kinds of operation,).
        instances: the number of instances.
    """
    return tuple(
        MemoryRow(kind, int(count[code]) / instances, int(duration_ns[code]) / instances / NS_PER_MS)
        for code, kind in enumerate(OPERATION_KINDS)
        if count[code]
    )


@dataclass(frozen=True)
class Leader:
    """The kernel that takes the most time in a scope, such as a phase.

    A collective counts only if no other kernel ran.
    """

    scope: str
    kernel: KernelRow


@dataclass(frozen=True)
class ClassShares:
    """The kernel classes of a scope, such as a phase, as shares of its total kernel time, the largest share first.

    ``matmul`` is the share of matmuls; None if it is unknown because kernels lack a name.
    """

    scope: str
    classes: tuple[ClassRow, ...]
    matmul: float | None = field(init=False)

    def __post_init__(self) -> None:
        """Computes the share of matmul in the kernel time."""
        vars(self)["matmul"] = find_class_share(self.classes, MATMUL)

    def of(self, kernel_class: str) -> float:
        """Returns the share of a class among the kernels whose names are known."""
        return sum(row.share for row in self.classes if row.kernel_class == kernel_class)

    @property
    def communicates(self) -> bool:
        """Returns whether communication is one of the classes."""
        return any(row.kernel_class == COMMUNICATION for row in self.classes)

    def without_communication(self) -> ClassShares:
        """Returns the classes other than communication, as shares of their total time."""
        rows = [row for row in self.classes if row.kernel_class != COMMUNICATION]
        total_ms = sum(row.ms_per_instance for row in rows)
        if len(rows) == len(self.classes):
            return self
        shares = (structs.replace(row, share=row.ms_per_instance / total_ms if total_ms else 0.0) for row in rows)
        return replace(self, classes=tuple(shares))


@dataclass(frozen=True)
class MatmulShare:
    """The share of matmuls in each compared phase, in a training step and in inference.

    ``inference_of`` is the title of the forward-only capture in which ``inference`` was measured; None if it was
    measured in this capture.
    """

    phases: tuple[ClassShares, ...]
    step: ClassShares | None
    inference: ClassShares | None
    inference_of: str | None = None

    @property
    def scopes(self) -> tuple[ClassShares, ...]:
        """Returns the phases, and the step if it is not one of the phases."""
        is_step_missing = all(phase.scope != STEP for phase in self.phases)
        return (*self.phases, self.step) if self.step and is_step_missing else self.phases

    @property
    def overall(self) -> ClassShares | None:
        """Returns the classes of a training step, or of the forward pass if that is the only phase; None otherwise."""
        return self.step or (self.phases[0] if [phase.scope for phase in self.phases] == ["forward"] else None)


def find_peak_memory(attributed: AttributedTrace, process: int) -> tuple[int | None, int]:
    """Finds the peak of a process's device memory during its measured phases.

    Returns:
        The peak in bytes, and the number of the process's memory events. The peak is None if memory was not recorded or
        no phase was measured.
    """
    memory_uses, instances = attributed.trace.memory, attributed.instances
    is_measured = instances.is_measured & (instances.process == process)
    if memory_uses is None or not is_measured.any():
        return None, 0
    events, allocated_bytes = measure_memory_levels(memory_uses, process)
    start, end = instances.start[is_measured].min(), instances.end[is_measured].max()
    is_inside = (events.start >= start) & (events.start <= end)
    bytes_before = allocated_bytes[np.searchsorted(events.start, start)]
    return int(max(bytes_before, allocated_bytes[1:][is_inside].max(initial=0))), len(events)
