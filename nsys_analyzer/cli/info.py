"""``nsys-analyze info``: prints the contents of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import command
from nsys_analyzer.cli.options import folder_argument, tell
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.schema import COSTLY_TABLES, NS_PER_MS

if TYPE_CHECKING:
    from nsys_analyzer.trace.reader import Reader
    from nsys_analyzer.trace.trace import Trace

#: The number of range names that are printed; the rest are counted.
_MAX_RANGE_NAMES = 40


@command(epilog="Example: nsys-analyze info capture.sqlite")
@folder_argument
def info(trace: Path) -> None:
    """Prints the contents of TRACE: versions, tables, processes, ranges, messages of the profiler, and warnings.

    For a FOLDER, info prints the contents of each capture in the folder.
    """
    from nsys_analyzer.inputs.traces import read_each_trace
    from nsys_analyzer.trace.sources import is_export_folder

    has_captures = trace.is_dir() and not is_export_folder(trace)
    for _ in read_each_trace(
        trace, lambda path: _print_capture(path, header=f"{path}:\n" if has_captures else ""), tell
    ):
        pass


def _print_capture(trace: Path, header: str) -> None:
    """Prints the contents of one capture below a header."""
    from nsys_analyzer.analysis.summary.summarize import summarize
    from nsys_analyzer.report.facts import say_all
    from nsys_analyzer.text import plain, visible
    from nsys_analyzer.trace.sources import open_capture
    from nsys_analyzer.trace.trace import Trace

    reader = open_capture(trace)
    loaded_trace = Trace.read(reader, trace)
    warnings = [
        plain(text, "`") for capture in summarize(loaded_trace, trace.name) for text in say_all(capture.warnings)
    ]
    further_records = [*_list_further_records(loaded_trace, reader)]
    for title, lines in (
        ("Capture", _list_versions(loaded_trace)),
        ("Tables (rows)", _list_tables(reader)),
        *([("Recorded besides", further_records)] if further_records else []),
        ("Processes", _list_processes(loaded_trace)),
        ("Ranges (count, total ms)", _list_ranges(loaded_trace)),
        ("A step without the profiler", _describe_pace(trace)),
        ("Messages of the profiler", _list_messages(loaded_trace)),
        ("Warnings", dict.fromkeys(warnings) or ["none"]),
    ):
        click.echo(f"{header}{title}:")
        header = ""
        for line in lines:
            click.echo(f"  {visible(line)}")


def _list_versions(trace: Trace) -> Iterator[str]:
    from nsys_analyzer.text import format_bytes

    metadata = trace.metadata
    if metadata.profiler == "torch":
        version = metadata.profiler_version
        yield "a trace of PyTorch's profiler" + (f", PyTorch {version}" if version != "unknown" else "")
    else:
        yield f"nsys {metadata.profiler_version}, schema {metadata.schema_version}"
    versions = (f"driver {metadata.driver}", f"{metadata.platform} {metadata.runtime}", metadata.os, metadata.cpu)
    if known_versions := [text for text in versions if not text.endswith("unknown")]:
        yield ", ".join(known_versions)
    for gpu in metadata.gpus.values():
        if gpu.is_cpu:
            yield "no GPU: PyTorch's operators are treated as kernels"
            continue
        multiprocessors = f"{gpu.sm_count} {metadata.multiprocessors}"
        yield f"GPU {gpu.gpu_id}: {gpu.name}, {format_bytes(gpu.memory_bytes)}, {multiprocessors}"


def _list_tables(reader: Reader) -> Iterator[str]:
    unread_tables = reader.unread_tables()
    for name, rows in reader.count_rows(
        sorted(name for name in reader.columns_of if not name.startswith("ENUM_"))
    ).items():
        if rows:
            yield f"{name}: {rows:,}{' (not read)' if name in unread_tables else ''}"


#: What nsys records besides the program's work, by the names of the tables.
_FURTHER_TABLES = {
    **COSTLY_TABLES,
    "SCHED_EVENTS": "context switches of threads",
    "NET_NIC_METRIC": "metrics of network cards",
    "NET_IB_SWITCH_METRIC": "metrics of InfiniBand switches",
    "GPU_CONTEXT_SWITCH_EVENTS": "context switches of GPUs",
    "PMU_EVENT_COUNTERS": "counters of the CPU",
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": "page faults of unified memory on the CPU",
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": "page faults of unified memory on GPUs",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "allocations of device memory",
}


def _list_further_records(trace: Trace, reader: Reader) -> Iterator[str]:
    """Yields the counters of GPUs, and the other tables that describe more than the program's work."""
    for gpu_id, samples in sorted(trace.counters.items()):
        names = ", ".join(name.replace("_", " ") for name in samples.values)
        yield f"hardware counters of GPU {gpu_id}: {len(samples.start):,} samples of {names}"
    unread_tables = reader.unread_tables()
    for name, description in _FURTHER_TABLES.items():
        if name in reader.columns_of and reader.has_rows(name):
            yield f"{description} ({name}{', not read' if name in unread_tables else ''})"


def _list_processes(trace: Trace) -> Iterator[str]:
    import numpy as np

    from nsys_analyzer.analysis.attribution.processes import find_processes
    from nsys_analyzer.trace.columns import OPERATION_KINDS

    for process in find_processes(trace):
        operations = trace.operations.select(trace.operations.process == process.global_pid)
        counts = zip(OPERATION_KINDS, np.bincount(operations.kind, minlength=len(OPERATION_KINDS)), strict=True)
        counts_by_kind = ", ".join(f"{count:,} {kind}" for kind, count in counts if count)
        devices = ", ".join(map(str, np.unique(operations.device))) or "none"
        label = f" ({process.label})" if process.label else ""
        yield f"pid {process.pid}{label}: device {devices}; {counts_by_kind or 'no GPU operation'}"


def _describe_pace(trace: Path) -> Iterator[str]:
    """Yields the length of a step without the profiler that the manifest of a trace contains, and who measured it."""
    from nsys_analyzer.inputs.manifest import capture_name, find_manifests_beside
    from nsys_analyzer.inputs.unprofiled_times import read_manifest_timings
    from nsys_analyzer.trace.phase_names import STEP
    from nsys_analyzer.trace.sources import trace_stem

    name = capture_name(trace_stem(trace), trace.parent)
    try:
        rows = [row for path in find_manifests_beside(trace) for row in read_manifest_timings(path)]
    except NsysAnalyzerError as error:
        yield f"unknown: {error}"
        return
    steps = [row for row in rows if row.phase == STEP and row.run.capture == name]
    for row in steps:
        if row.times and row.times.typical:
            process = "the recorded process, outside of the recording" if row.in_recorded_process else "another process"
            yield f"{row.times.typical:,.3f} ms, the median of {row.times.n} steps of {process}"
    if not any(row.times for row in steps):
        yield "not measured: a report estimates its length, or uses that of --step-ms or --csv"


def _list_messages(trace: Trace) -> Iterator[str]:
    from nsys_analyzer.trace.metadata import SEVERITIES

    counts = Counter((event.severity, " ".join(event.text.split())) for event in trace.metadata.diagnostics)
    for (severity, text), count in counts.items():
        yield f"{SEVERITIES.get(severity, severity)}: {text}{f' ({count} times)' if count > 1 else ''}"


def _list_ranges(trace: Trace) -> Iterator[str]:
    import numpy as np

    ranges = trace.ranges
    count = np.bincount(ranges.name, minlength=len(ranges.names))
    total = np.bincount(ranges.name, weights=ranges.end - ranges.start, minlength=len(ranges.names))
    name_indices = [int(i) for i in np.argsort(-total, kind="stable") if count[i]]
    for i in name_indices[:_MAX_RANGE_NAMES]:
        yield f"{ranges.names[i] or '(unnamed)'}: {count[i]:,}, {total[i] / NS_PER_MS:,.3f}"
    if len(name_indices) > _MAX_RANGE_NAMES:
        yield f"and {len(name_indices) - _MAX_RANGE_NAMES} more names"
    for i in np.unique(trace.open_ranges.name).tolist():
        yield f"{trace.open_ranges.names[i]}: {(trace.open_ranges.name == i).sum():,} without an end"
