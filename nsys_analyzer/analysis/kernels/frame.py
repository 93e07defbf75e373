"""The GPU operations of a trace as a pandas DataFrame: a row for each, with all that was found out about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import ATTRIBUTION_METHODS, make_range_paths
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import FILLS, UNKNOWN
from nsys_analyzer.analysis.kernels.classes import find_precision, known_classes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, find_launching_operators
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.text import plain
from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import COPY_KINDS, GRAPH, KERNEL, MEMCPY, OPERATION_KINDS, pid_of
from nsys_analyzer.trace.metadata import explain_missing_cuda
from nsys_analyzer.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Column:
    """A column of the table of operations: what its values are, their unit (empty for none), and what they say.

    ``of_kernels``: whether :func:`kernel_frame` has it, too.
    """

    type: Literal["category", "integer", "flag"]
    unit: str
    doc: str
    of_kernels: bool = True


#: The columns of :func:`operation_frame`.
OPERATION_COLUMNS = {
    "capture": Column("category", "", "file name of the capture", of_kernels=False),
    "rank": Column("integer", "", "rank of its process among those of the run; missing where not known", False),
    "kind": Column("category", "", "kernel, memcpy, memset, or graph (a replay recorded as a whole)", of_kernels=False),
    "name": Column("category", "", "full kernel name; missing for what is no kernel"),
    "class": Column("category", "", "kernel class; of copies and fills memset/memcpy"),
    "start_ns": Column("integer", "ns", "start on the GPU, since the start of the session"),
    "end_ns": Column("integer", "ns", "end on the GPU"),
    "duration_ns": Column("integer", "ns", "end minus start"),
    "device": Column("integer", "", "CUDA device ordinal in its process"),
    "stream": Column("integer", "", "CUDA stream ID"),
    "pid": Column("integer", "", "process ID"),
    "correlation_id": Column("integer", "", "CUPTI correlation ID, unique within a process"),
    "launch_ns": Column("integer", "ns", "start of the API call that launched it; missing without a launch row"),
    "launch_tid": Column("integer", "", "thread ID of that call; missing without a launch row"),
    "launch_latency_ns": Column(
        "integer", "ns", "from that call's start to its own; missing without a launch row", False
    ),
    "operator": Column(
        "category", "", "innermost operator of PyTorch open at its launch, such as aten::mm; or missing"
    ),
    "phase": Column(
        "category", "", "forward, loss, …, one of your own, or 'step' outside these; missing outside a step"
    ),
    "instance": Column("integer", "", "which occurrence of that phase in its process, from 0; missing outside phases"),
    "warmup": Column("flag", "", "true in a warm-up instance"),
    "range_path": Column("category", "", "names of the ranges open at its launch, outermost first, joined by ' / '"),
    "how": Column("category", "", "how the ranges were found: same thread, other thread, graph, or none"),
    "ambiguous": Column("flag", "", "true where several threads had phases open"),
    "graph_node_id": Column("integer", "", "CUDA graph node ID, 0 outside graph replays"),
    "continues": Column("flag", "", "true for a later part of an operator on the CPU that calls others"),
    "precision": Column("category", "", "what a matmul multiplies in; missing where its name does not say", False),
    "thread_blocks": Column("integer", "blocks", "grid of a kernel; missing where not known", of_kernels=False),
    "bytes": Column("integer", "bytes", "size of a copy or a fill; missing for others", of_kernels=False),
    "copy": Column("category", "", "way and memory of a copy, such as pageable to device; missing for others", False),
}

#: The columns of :func:`kernel_frame`, with their units.
COLUMNS = {
    name: one.doc + (f", {one.unit}" if one.unit else "") + (" (categorical)" if one.type == "category" else "")
    for name, one in OPERATION_COLUMNS.items()
    if one.of_kernels
}


def kernel_frame(trace: Trace, names: PhaseNames | None = None) -> pd.DataFrame:
    """The kernels of a trace with possible times, in the order of the file; the columns are those of ``COLUMNS``.

    Raises:
        MissingTableError: the export has no GPU activity table at all.
    """
    attributed = AttributedTrace(trace, names)
    return operation_frame(attributed).iloc[attributed.trace.operations.kernels][list(COLUMNS)]


def operation_frame(attributed: AttributedTrace) -> pd.DataFrame:
    """All operations, kernels first, else as of :func:`kernel_frame`; the columns are those of ``OPERATION_COLUMNS``.

    Raises:
        MissingTableError: the export has no GPU activity table at all.
    """
    import pandas as pd

    if not attributed.as_recorded.tables & {"kernel", "graph"}:
        why = plain(explain_missing_cuda(attributed.as_recorded.metadata.diagnostics), "`")
        path = attributed.as_recorded.path
        raise MissingTableError(f"{path} holds no CUDA kernels", why or "Capture again with --trace=cuda,nvtx")
    trace, attribution, instances = attributed.trace, attributed.attribution, attributed.instances
    operations, kind, size = trace.operations, trace.operations.kind, trace.operations.size
    classes, code = list(known_classes()), attributed.kernels.code
    fallback = np.where(kind == GRAPH, classes.index(UNKNOWN), classes.index(FILLS))
    class_of_kernel = np.array([*(classes.index(one) for one in attributed.kernels.classes), NONE], np.int64)[code]
    operator = find_launching_operators(trace, attribution, np.arange(len(operations)))
    leaf, step = attributed.instances_of_operations
    instance = np.where(leaf == NONE, step, leaf)
    by_phase = pd.Series(instances.phase).groupby([instances.process, instances.phase])
    paths, path_names = make_range_paths(trace, attribution)
    found = [find_precision(name) for name in attributed.kernels.names]
    precisions = sorted({one for one in found if one})
    precision = np.array([*(precisions.index(one) if one else NONE for one in found), NONE], np.int64)[code]
    rank_of = {one.global_pid: NONE if one.rank is None else one.rank for one in find_processes(trace)}
    processes = distinct(operations.process)
    ranks = np.array([rank_of.get(one, NONE) for one in processes.tolist()], np.int64)
    rank = ranks[np.searchsorted(processes, operations.process)]
    capture = trace.path.name.encode("utf-8", "replace").decode()  # a name of a file need not be text
    columns = {
        "capture": _categorical(np.zeros(len(kind), np.int8), [capture]),
        "rank": _masked(rank, rank == NONE),
        "kind": _categorical(kind, list(OPERATION_KINDS)),
        "name": _categorical(operations.name, list(operations.names)),
        "class": _categorical(np.where(class_of_kernel == NONE, fallback, class_of_kernel), classes),
        "start_ns": operations.start,
        "end_ns": operations.end,
        "duration_ns": operations.end - operations.start,
        "device": operations.device,
        "stream": operations.stream,
        "pid": pid_of(operations.process),
        "correlation_id": operations.correlation,
        "launch_ns": _nullable(trace.launches.start, attribution.launch),
        "launch_tid": _nullable(trace.launches.thread & 0xFFFFFF, attribution.launch),
        "launch_latency_ns": _masked(attributed.measure_launch_waits(slice(None)), attribution.launch == NONE),
        "operator": _categorical(operator, list(trace.operators.names)),
        "phase": _categorical(np.append(instances.phase, NONE)[instance], list(instances.phases)),
        "instance": _nullable(by_phase.cumcount().to_numpy(np.int64), instance),
        "warmup": np.append(instances.warmup, False)[instance],
        "range_path": _categorical(paths, path_names),
        "how": _categorical(attribution.how, list(ATTRIBUTION_METHODS)),
        "ambiguous": attribution.ambiguous,
        "graph_node_id": operations.graph_node,
        "continues": operations.continues != 0,
        "precision": _categorical(precision, precisions),
        "thread_blocks": _masked(size, (kind != KERNEL) | (size == 0)),
        "bytes": _masked(size, (kind == KERNEL) | (kind == GRAPH)),
        "copy": _categorical(np.where(kind == MEMCPY, operations.copy, NONE), list(COPY_KINDS)),
    }
    return pd.DataFrame(columns, columns=list(OPERATION_COLUMNS), copy=False)


def _categorical(codes: Any, names: list[str]) -> Any:
    import pandas as pd

    place: dict[str, int] = {}  # of each text, which may stand for several codes
    recode = [place.setdefault(name, len(place)) for name in names]
    if len(place) < len(names):
        codes = np.array([*recode, NONE], np.int64)[codes]
    return pd.Categorical.from_codes(codes, pd.Index(list(place), dtype=object))


def _nullable(values: Any, index: Any) -> Any:
    return _masked(np.append(values, 0)[index], index == NONE)


def _masked(values: Any, missing: Any) -> Any:
    import pandas as pd

    return pd.arrays.IntegerArray(values.astype(np.int64), missing)
