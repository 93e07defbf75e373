"""The figures of one phase per measured instance: clocks, kernels, classes, copies and fills; and device memory."""

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

from nsys_analyzer.analysis.intervals import measure_unions
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, MATMUL, UNKNOWN
from nsys_analyzer.analysis.kernels.classes import find_precision
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, Kernels
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.steps.tracks import memory_levels
from nsys_analyzer.trace.arrays import Ints, SmallInts, blocks
from nsys_analyzer.trace.columns import GRAPH, OPERATION_KINDS, Operations
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US, US_PER_MS

#: A share that is shown as 0.0 %.
_NO_DIGIT = 0.0005
_CLASS, _NAME_AND_CLASS = attrgetter("kernel_class"), attrgetter("key")


class KernelRow(msgspec.Struct, frozen=True):
    """One kernel of a phase, per instance; ``share`` is a fraction of the phase's total kernel time.

    A kernel that some operators launch as part of other work (a GEMM in a convolution) has a row for each class.
    Its ``label`` is short, and unique among the captures that are read together.
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
        """Name and class, which no two rows of a table share."""
        return self.name, self.kernel_class


class ClassRow(msgspec.Struct, frozen=True):
    """One class of kernels of a phase, per instance; ``share`` is a fraction of the phase's total kernel time."""

    kernel_class: str = msgspec.field(name="class")
    launches_per_instance: float
    ms_per_instance: float
    share: float


@dataclass(frozen=True)
class MemoryRow:
    """Copies, fills or opaque graphs of a phase, per instance."""

    kind: str
    operations_per_instance: float
    ms_per_instance: float


@dataclass(frozen=True)
class GpuClocks:
    """GPU time of each instance in ns, and how many kernels and opaque graphs it launched."""

    span: Ints
    busy: Ints
    kernel_time: Ints
    last_end: Ints
    kernels: Ints
    opaque: Ints


def gpu_clocks(operations: Operations, instance: SmallInts, instances: int) -> GpuClocks:
    """The clocks of so many instances; ``instance``, shape (operations,), is that of each operation, -1 for none."""
    # Operations without an instance are a group of their own, dropped at the end: cheaper than leaving them out.
    group, groups = instance + 1, instances + 1
    busy, first, last = measure_unions(group, operations.start, operations.end, groups)
    kernels = operations.kernels
    of_instance = instance[kernels]
    no_code = np.broadcast_to(np.int32(0), len(of_instance))
    count, ns = sums_of(operations.select(kernels), of_instance, no_code, (instances, 1))
    return GpuClocks(
        span=(last - first)[1:],
        busy=busy[1:],
        kernel_time=ns[:, 0],
        last_end=last[1:],
        kernels=count[:, 0],
        opaque=np.bincount(group[operations.of_kind(GRAPH)], minlength=groups)[1:],
    )


@dataclass(frozen=True)
class Totals:
    """Counts and summed durations of operations by group (a phase, as a rule).

    Attributes:
        kernels, kernel_ns: shape (groups, distinct kernels).
        others, other_ns: shape (groups, kinds of operation), of all but kernels.
    """

    kernels: Ints
    kernel_ns: Ints
    others: Ints
    other_ns: Ints


def totals(operations: Operations, kernel: SmallInts, group: SmallInts, sizes: tuple[int, int]) -> Totals:
    """Sums of the operations of each group.

    Args:
        operations: the operations.
        kernel, group: shape (operations,), codes; group -1 is none.
        sizes: the numbers of distinct kernels and groups.
    """
    distinct, groups = sizes
    kernels = operations.kernels
    others = slice(kernels.stop, None)  # kernels come first
    running, rest = operations.select(kernels), operations.select(others)
    return Totals(
        *sums_of(running, group[kernels], kernel[kernels], (groups, distinct)),
        *sums_of(rest, group[others], rest.kind, (groups, len(OPERATION_KINDS))),
    )


def sums_of(operations: Operations, group: Any, code: Any, shape: tuple[int, int]) -> tuple[Ints, Ints]:
    """The number of operations and their duration (ns, exact below 2**53) by group and code; group -1 has no row.

    ``group`` and ``code`` have shape (operations,), the results ``shape``: as many groups and codes.
    """
    rows, width = shape[0] + 1, shape[1]
    count, ns = np.zeros(rows * width, np.int64), np.zeros(rows * width)
    for block in blocks(len(group), least=rows * width):
        key = (group[block].astype(np.int64) + 1) * width + code[block]
        count += np.bincount(key[operations.continues[block] == 0], minlength=rows * width)
        ns += np.bincount(key, operations.end[block] - operations.start[block], rows * width)
    return count.reshape(rows, width)[1:], ns.astype(np.int64).reshape(rows, width)[1:]


def kernel_rows(kernels: Kernels, launches: Ints, ns: Ints, instances: int) -> tuple[KernelRow, ...]:
    """Kernels by name and class, longest first, per instance; ``launches`` and ``ns`` are sums, of shape (kernels,)."""
    total = int(ns.sum())
    return tuple(
        KernelRow(
            name=kernels.names[i],
            kernel_class=kernels.classes[i],
            launches_per_instance=int(launches[i]) / instances,
            ms_per_instance=int(ns[i]) / instances / NS_PER_MS,
            avg_us=int(ns[i]) / int(launches[i]) / NS_PER_US,
            share=int(ns[i]) / total if total else 0.0,
        )
        for i in np.argsort(-ns, kind="stable").tolist()
        if launches[i]
    )


def merge_kernels(*tables: Sequence[KernelRow]) -> tuple[KernelRow, ...]:
    """Kernel tables of several phases as one table of all of them, longest first."""
    rows = list(chain.from_iterable(tables))
    total = sum(row.ms_per_instance for row in rows)
    merged = []
    for (name, kernel_class), group in groupby(sorted(rows, key=_NAME_AND_CLASS), key=_NAME_AND_CLASS):
        same = list(group)
        launches, ms, _ = _added(same)
        share, label = ms / total if total else 0.0, same[0].label
        merged.append(KernelRow(name, kernel_class, launches, ms, ms * US_PER_MS / launches, share, label))
    return tuple(sorted(merged, key=lambda row: -row.ms_per_instance))


def class_rows(kernels: Sequence[KernelRow]) -> tuple[ClassRow, ...]:
    """The classes of a kernel table, longest first."""
    groups = groupby(sorted(kernels, key=_CLASS), key=_CLASS)
    return tuple(sorted((ClassRow(one, *_added(rows)) for one, rows in groups), key=lambda row: -row.ms_per_instance))


def _added(rows: Iterable[KernelRow]) -> tuple[float, float, float]:
    """Launches and ms per instance, and shares, each summed up."""
    columns = zip(*((row.launches_per_instance, row.ms_per_instance, row.share) for row in rows), strict=True)
    launches, ms, share = map(sum, columns)
    return launches, ms, share


def precision_shares(kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Shares of the time of some kernels by the precision in their names, the largest first."""
    ms: defaultdict[str, float] = defaultdict(float)
    for row in kernels:
        ms[find_precision(row.name) or "unknown"] += row.ms_per_instance
    total = sum(ms.values())
    return {key: value / total for key, value in sorted(ms.items(), key=lambda item: -item[1])} if total else {}


def share_of(classes: Sequence[ClassRow], kernel_class: str) -> float | None:
    """The share of a class, 0 without a kernel; None where kernels without a name may change its digits."""
    shares = {row.kernel_class: row.share for row in classes}
    return None if shares.get(UNKNOWN, 0.0) > _NO_DIGIT else shares.get(kernel_class, 0.0)


def memory_rows(count: Ints, ns: Ints, instances: int) -> tuple[MemoryRow, ...]:
    """Copies, fills and opaque graphs, per one of ``instances`` instances; both arrays have shape (kinds,)."""
    return tuple(
        MemoryRow(kind, int(count[code]) / instances, int(ns[code]) / instances / NS_PER_MS)
        for code, kind in enumerate(OPERATION_KINDS)
        if count[code]
    )


@dataclass(frozen=True)
class Leader:
    """The kernel with the most time of a part of a capture: one that computes, where there is any."""

    scope: str
    kernel: KernelRow


@dataclass(frozen=True)
class ClassShares:
    """The classes of a part of a capture, longest first, each a share of its total kernel time.

    ``matmul`` is its share; None where kernels without a name may change it.
    """

    scope: str
    classes: tuple[ClassRow, ...]
    matmul: float | None = field(init=False)

    def __post_init__(self) -> None:
        """Fills the share of matmul."""
        vars(self)["matmul"] = share_of(self.classes, MATMUL)

    def of(self, name: str) -> float:
        """The share of a class, by the kernels whose names are known."""
        return sum(row.share for row in self.classes if row.kernel_class == name)

    @property
    def communicates(self) -> bool:
        """True where communication is among the classes."""
        return any(row.kernel_class == COMMUNICATION for row in self.classes)

    def computing(self) -> ClassShares:
        """The classes that compute, as shares of their time."""
        rows = [row for row in self.classes if row.kernel_class != COMMUNICATION]
        total = sum(row.ms_per_instance for row in rows)
        if len(rows) == len(self.classes):
            return self
        shares = (structs.replace(row, share=row.ms_per_instance / total if total else 0.0) for row in rows)
        return replace(self, classes=tuple(shares))


@dataclass(frozen=True)
class MatmulShare:
    """The share of matmul in each compared phase, in a training step and in a forward pass.

    ``inference_of`` is the forward-only capture of the same configuration that ``inference`` is of, None where it is
    this one.
    """

    phases: tuple[ClassShares, ...]
    step: ClassShares | None
    inference: ClassShares | None
    inference_of: str | None = None

    @property
    def scopes(self) -> tuple[ClassShares, ...]:
        """The phases, and the step where it is none of them."""
        apart = self.step is not None and all(phase.scope != STEP for phase in self.phases)
        return (*self.phases, self.step) if self.step and apart else self.phases

    @property
    def of_all(self) -> ClassShares | None:
        """The classes of a training step, else of the forward pass where that is all there is."""
        return self.step or (self.phases[0] if [one.scope for one in self.phases] == ["forward"] else None)


def peak_memory(attributed: AttributedTrace, process: int) -> tuple[int | None, int]:
    """Returns the most device memory of a process over its measured phases, bytes, and the number of memory events.

    The former is None if memory was not recorded, or if no phase was measured.
    """
    uses, instances = attributed.trace.memory, attributed.instances
    mine = instances.measured & (instances.process == process)
    if uses is None or not mine.any():
        return None, 0
    events, alive = memory_levels(uses, process)
    start, end = instances.start[mine].min(), instances.end[mine].max()
    inside = (events.start >= start) & (events.start <= end)
    before = alive[np.searchsorted(events.start, start)]
    return int(max(before, alive[1:][inside].max(initial=0))), len(events)
