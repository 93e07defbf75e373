"""The kernel table as a pandas DataFrame: one row for each kernel, with all that was found out about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import HOW
from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.kernels.classes import CLASSES
from nsys_analyzer.analysis.kernels.kernels import launching_operators
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.paths import range_paths
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.text import plain
from nsys_analyzer.trace.columns import KERNEL, pid_of
from nsys_analyzer.trace.diagnostics import explained
from nsys_analyzer.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

#: The columns of :func:`kernel_frame`, with their units.
COLUMNS = {
    "name": "full kernel name (categorical)",
    "class": "kernel class (categorical)",
    "start_ns": "start on the GPU, ns since the start of the session",
    "end_ns": "end on the GPU, ns",
    "duration_ns": "end minus start, ns",
    "device": "CUDA device ordinal in its process",
    "stream": "CUDA stream ID",
    "pid": "process ID",
    "correlation_id": "CUPTI correlation ID, unique within a process",
    "launch_ns": "start of the API call that launched it, ns; <NA> without a launch row",
    "launch_tid": "thread ID of that call; <NA> without a launch row",
    "operator": "innermost operator of PyTorch open at its launch, such as aten::mm; missing where the trace has none "
    "(categorical)",
    "phase": "forward, loss, backward, optimizer or one of the user's own; 'step' in a step outside these; "
    "missing outside every phase (categorical)",
    "instance": "which occurrence of that phase in its process, from 0; <NA> outside every phase",
    "warmup": "True in a warm-up instance",
    "range_path": "names of the ranges open at its launch, outermost first, joined by ' / ' (categorical)",
    "how": "same thread, other thread, graph, or none (categorical)",
    "ambiguous": "True where several threads had phases open",
    "graph_node_id": "CUDA graph node ID, 0 outside graph replays",
}


def kernel_frame(trace: Trace, names: PhaseNames | None = None) -> pd.DataFrame:
    """The kernels of a trace with possible times, in the order of the file; the columns are those of ``COLUMNS``.

    Raises:
        MissingTableError: the export has no GPU activity table at all.
    """
    import pandas as pd

    if not trace.tables & {"kernel", "graph"}:
        why = plain(explained(trace.metadata.diagnostics), "`")
        raise MissingTableError(f"{trace.path} holds no CUDA kernels", why or "Capture again with --trace=cuda,nvtx")
    attributed = AttributedTrace(trace, names)
    trace = attributed.trace  # without what contradicts it
    kernel = trace.operations.kind == KERNEL
    operations = trace.operations.select(kernel)
    attribution = attributed.attribution
    classes = list(CLASSES)
    class_of_kernel = np.array([classes.index(one) for one in attributed.kernels.classes], np.int64)
    operator = launching_operators(trace, attribution, np.flatnonzero(kernel))
    leaf, step = (part[kernel] for part in attributed.instance_pair)
    instance, instances = np.where(leaf == NONE, step, leaf), attributed.instances
    by_phase = pd.Series(instances.phase).groupby([instances.process, instances.phase])
    paths, path_names = range_paths(trace, attribution)
    launch = attribution.launch[kernel]
    columns: dict[str, Any] = {
        "name": _categorical(operations.name, list(operations.names)),
        "class": _categorical(class_of_kernel[attributed.kernels.code[kernel]], classes),
        "start_ns": operations.start,
        "end_ns": operations.end,
        "duration_ns": operations.end - operations.start,
        "device": operations.device,
        "stream": operations.stream,
        "pid": pid_of(operations.process),
        "correlation_id": operations.correlation,
        "launch_ns": _nullable(trace.launches.start, launch),
        "launch_tid": _nullable(trace.launches.thread & 0xFFFFFF, launch),
        "operator": _categorical(operator, list(trace.operators.names)),
        "phase": _categorical(np.append(instances.phase, NONE)[instance], list(instances.phases)),
        "instance": _nullable(by_phase.cumcount().to_numpy(np.int64), instance),
        "warmup": np.append(instances.warmup, False)[instance],
        "range_path": _categorical(paths[kernel], path_names),
        "how": _categorical(attribution.how[kernel], list(HOW)),
        "ambiguous": attribution.ambiguous[kernel],
        "graph_node_id": operations.graph_node,
    }
    return pd.DataFrame(columns, copy=False)


def _categorical(codes: Any, names: list[str]) -> Any:
    import pandas as pd

    return pd.Categorical.from_codes(codes, pd.Index(names, dtype=object))


def _nullable(values: Any, index: Any) -> Any:
    import pandas as pd

    return pd.arrays.IntegerArray(np.append(values, 0)[index], index == NONE)
