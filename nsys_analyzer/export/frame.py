"""Makes a pandas DataFrame of a trace's GPU operations. A row contains all known facts about an operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import ATTRIBUTION_METHODS, make_range_paths
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import FILLS, UNKNOWN
from nsys_analyzer.analysis.kernels.classes import find_launching_operators, find_precision, known_classes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import COPY_KINDS, GRAPH, KERNEL, MEMCPY, OPERATION_KINDS, pid_of
from nsys_analyzer.trace.metadata import explain_missing_cuda
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Column:
    """A column of the table of GPU operations.

    Attributes:
        type: the type of the values.
        unit: the unit of the values; empty if they have none.
        doc: the meaning of the values.
        of_kernels: whether the table of kernels (:func:`kernel_frame`) also has the column.
    """

    type: Literal["category", "integer", "flag"]
    unit: str
    doc: str
    of_kernels: bool = True


#: The columns of :func:`operation_frame`.
OPERATION_COLUMNS = {
    "capture": Column("category", "", "file name of the capture", of_kernels=False),
    "rank": Column("integer", "", "rank of the process in the run; missing if it is not known", False),
    "kind": Column("category", "", "kernel, memcpy, memset, or graph (a replay recorded as a whole)", of_kernels=False),
    "name": Column("category", "", "full kernel name; missing for other operations"),
    "class": Column("category", "", "kernel class; memcpy for a copy, memset for a fill"),
    "start_ns": Column("integer", "ns", "start on the GPU, since the start of the session"),
    "end_ns": Column("integer", "ns", "end on the GPU"),
    "duration_ns": Column("integer", "ns", "end_ns minus start_ns"),
    "device": Column("integer", "", "CUDA device ordinal in its process"),
    "stream": Column("integer", "", "CUDA stream ID"),
    "pid": Column("integer", "", "process ID"),
    "correlation_id": Column("integer", "", "CUPTI correlation ID, unique within a process"),
    "launch_ns": Column("integer", "ns", "start of the API call that launched the operation; missing if not recorded"),
    "launch_tid": Column(
        "integer", "", "thread ID of the API call that launched the operation; missing if not recorded"
    ),
    "launch_latency_ns": Column(
        "integer", "ns", "time from launch_ns to start_ns; missing if the launch is not recorded", False
    ),
    "operator": Column(
        "category", "", "innermost open PyTorch operator at the launch, such as aten::mm; missing if none was open"
    ),
    "phase": Column(
        "category", "", "forward, loss, …, or a phase of your own; 'step' in the rest of a step; missing outside steps"
    ),
    "instance": Column("integer", "", "index of the phase's instance in the process, from 0; missing outside phases"),
    "warmup": Column("flag", "", "true in a warm-up instance"),
    "range_path": Column(
        "category", "", "names of the ranges that were open at the launch, the outermost first, joined by ' / '"
    ),
    "how": Column("category", "", "how the ranges were found: same thread, other thread, graph, or none"),
    "ambiguous": Column("flag", "", "true if several threads had phases open at the launch"),
    "graph_node_id": Column("integer", "", "CUDA graph node ID, 0 outside graph replays"),
    "continues": Column("flag", "", "true for a part of a CPU operator that follows its call of another operator"),
    "precision": Column(
        "category", "", "precision that a matmul computes in; missing if the kernel's name does not show it", False
    ),
    "thread_blocks": Column(
        "integer", "blocks", "blocks in the grid of a kernel; missing if not known", of_kernels=False
    ),
    "bytes": Column("integer", "bytes", "size of a copy or a fill; missing for other operations", of_kernels=False),
    "copy": Column(
        "category",
        "",
        "direction and memory of a copy, such as pageable to device; missing for other operations",
        False,
    ),
}

#: The meaning and unit of each column of :func:`kernel_frame`.
COLUMNS = {
    name: column.doc
    + (f", {column.unit}" if column.unit else "")
    + (" (categorical)" if column.type == "category" else "")
    for name, column in OPERATION_COLUMNS.items()
    if column.of_kernels
}


def kernel_frame(trace: Trace, names: PhaseNames | None = None) -> pd.DataFrame:
    """Returns the kernels of a trace in the order of the file, with the columns of ``COLUMNS``.

    Kernels with impossible times are left out.

    Args:
        trace: the trace.
        names: range names of phases, which replace the default names.

    Raises:
        MissingTableError: the export has no table of GPU activity.
    """
    attributed = AttributedTrace(trace, names)
    return operation_frame(attributed).iloc[attributed.trace.operations.kernels][list(COLUMNS)]


def operation_frame(attributed: AttributedTrace) -> pd.DataFrame:
    """Returns the GPU operations of a trace, with the columns of ``OPERATION_COLUMNS``.

    Kernels come first. The operations of each kind are in the order of the file.

    Raises:
        MissingTableError: the export has no table of GPU activity.
    """
    import pandas as pd

    if not attributed.as_recorded.tables & {"kernel", "graph"}:
        explanation = explain_missing_cuda(attributed.as_recorded.metadata.diagnostics)
        remedy = explanation or "Capture again with --trace=cuda,nvtx"
        raise MissingTableError(f"{attributed.as_recorded.path} contains no CUDA kernels", remedy)
    trace, attribution, instances = attributed.trace, attributed.attribution, attributed.instances
    operations, kind, size = trace.operations, trace.operations.kind, trace.operations.size
    phase_instance, step = attributed.instances_of_operations
    instance = np.where(phase_instance == NONE, step, phase_instance)
    instances_by_phase = pd.Series(instances.phase).groupby([instances.process, instances.phase])
    paths, path_names = make_range_paths(trace, attribution)
    operator = find_launching_operators(trace, attribution, np.arange(len(operations)))
    kernel = attributed.kernels.code
    precisions = [find_precision(name) or "" for name in attributed.kernels.names]
    precision_names = sorted({precision for precision in precisions if precision})
    precision_of_kernel = [precision_names.index(precision) if precision else NONE for precision in precisions]
    classes = list(known_classes())
    class_of_kernel = np.array([*map(classes.index, attributed.kernels.classes), NONE], np.int64)[kernel]
    # A graph that is recorded as a whole has an unknown class; the other operations without a kernel are fills.
    class_without_kernel = np.where(kind == GRAPH, classes.index(UNKNOWN), classes.index(FILLS))
    processes = distinct(operations.process)
    rank_of_process = {row.global_pid: row.rank for row in find_processes(trace) if row.rank is not None}
    ranks = np.array([rank_of_process.get(process, NONE) for process in processes.tolist()], np.int64)
    rank = ranks[np.searchsorted(processes, operations.process)]
    capture = trace.path.name.encode("utf-8", "replace").decode()  # a file name need not be valid UTF-8
    columns = {
        "capture": _make_categorical(np.zeros(len(kind), np.int8), [capture]),
        "rank": _mask_integers(rank, rank == NONE),
        "kind": _make_categorical(kind, list(OPERATION_KINDS)),
        "name": _make_categorical(operations.name, list(operations.names)),
        "class": _make_categorical(np.where(kernel == NONE, class_without_kernel, class_of_kernel), classes),
        "start_ns": operations.start,
        "end_ns": operations.end,
        "duration_ns": operations.end - operations.start,
        "device": operations.device,
        "stream": operations.stream,
        "pid": pid_of(operations.process),
        "correlation_id": operations.correlation,
        "launch_ns": _take_or_missing(trace.launches.start, attribution.launch),
        "launch_tid": _take_or_missing(trace.launches.thread & 0xFFFFFF, attribution.launch),
        "launch_latency_ns": _mask_integers(attributed.measure_launch_waits(slice(None)), attribution.launch == NONE),
        "operator": _make_categorical(operator, list(trace.operators.names)),
        "phase": _make_categorical(np.append(instances.phase, NONE)[instance], list(instances.phases)),
        "instance": _take_or_missing(instances_by_phase.cumcount().to_numpy(np.int64), instance),
        "warmup": np.append(instances.warmup, False)[instance],
        "range_path": _make_categorical(paths, path_names),
        "how": _make_categorical(attribution.method, list(ATTRIBUTION_METHODS)),
        "ambiguous": attribution.is_ambiguous,
        "graph_node_id": operations.graph_node,
        "continues": operations.continues != 0,
        "precision": _make_categorical(np.array([*precision_of_kernel, NONE], np.int64)[kernel], precision_names),
        "thread_blocks": _mask_integers(size, (kind != KERNEL) | (size == 0)),
        "bytes": _mask_integers(size, (kind == KERNEL) | (kind == GRAPH)),
        "copy": _make_categorical(np.where(kind == MEMCPY, operations.copy, NONE), list(COPY_KINDS)),
    }
    return pd.DataFrame(columns, columns=list(OPERATION_COLUMNS), copy=False)


def _make_categorical(codes: Any, names: list[str]) -> Any:
    """Returns a categorical column with the names at the given positions in ``names``; -1 is a missing value.

    A name may occur several times in ``names``.
    """
    import pandas as pd

    position: dict[str, int] = {}
    recode = [position.setdefault(name, len(position)) for name in names]
    if len(position) < len(names):
        codes = np.array([*recode, NONE], np.int64)[codes]
    return pd.Categorical.from_codes(codes, pd.Index(list(position), dtype=object))


def _take_or_missing(values: Any, index: Any) -> Any:
    """Returns the integers at the given positions. The value is missing if the position is -1."""
    return _mask_integers(np.append(values, 0)[index], index == NONE)


def _mask_integers(values: Any, missing: Any) -> Any:
    """Returns integers, in which the values that the mask marks are missing."""
    import pandas as pd

    return pd.arrays.IntegerArray(values.astype(np.int64), missing)
