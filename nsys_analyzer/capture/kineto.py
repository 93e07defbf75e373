"""From a PyTorch profiler trace (``.json``, ``.json.gz``) to the tables of an nsys export, made once and kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsys_analyzer.capture.atomic_write import made_whole
from nsys_analyzer.capture.kineto_devices import environment_rows
from nsys_analyzer.capture.kineto_events import KinetoTrace
from nsys_analyzer.capture.kineto_file import read_kineto
from nsys_analyzer.capture.kineto_ids import Strings, Threads
from nsys_analyzer.capture.kineto_operators import operator_rows
from nsys_analyzer.capture.kineto_origin import is_current, is_made_from, origin_rows
from nsys_analyzer.capture.kineto_rows import (
    export_rows,
    gpu_rows,
    memory_rows,
    operator_event_rows,
    range_rows,
    rank_rows,
    thread_rows,
    warning_row,
)
from nsys_analyzer.capture.kineto_tables import Rows, write_tables
from nsys_analyzer.capture.placement import places, trace_stem, writable_place
from nsys_analyzer.errors import ExportError, TraceError


def converted_sqlite(trace: Path) -> Path:
    """Return the SQLite file made from a PyTorch profiler trace, converting only where no fresh one is there.

    Looked for, and made, as ``X.sqlite`` beside ``X.json.gz`` (``X.pt.trace.json``, ``X.json``); in the cache where
    the folder cannot be written, or where what was made of another trace has that name.

    Raises:
        TraceError: see :func:`read_kineto`; or there is too little memory for its events.
        ExportError: there is no place for the file, or no space.
    """
    beside, cached = places(trace, trace_stem(trace))
    if beside.exists() and not is_made_from(beside, trace):
        beside = cached  # an export of nsys, say
    for made in (beside, cached):
        if trace.is_file() and is_current(made, trace):
            return made
    with _in_memory(trace):
        read = read_kineto(trace)
        target = writable_place(beside, cached)
        _write(read, target)
    return target


def convert_trace(trace: Path, output: Path) -> None:
    """Write the tables of an nsys export from a PyTorch profiler trace; ``output`` appears whole or not at all.

    Kernels, copies and fills keep their launches, ranges are those of ``record_function``. In a trace without any
    of the first three, the operators are the kernels, of a device called "CPU".

    Raises:
        TraceError: see :func:`read_kineto`; or there is too little memory for its events.
        ExportError: ``output`` cannot be written.
    """
    with _in_memory(trace):
        _write(read_kineto(trace), output)


@contextmanager
def _in_memory(trace: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise TraceError(
            f"{trace} needs more memory than there is", "Record fewer steps, or read it on a machine with more memory"
        ) from error


def _write(trace: KinetoTrace, output: Path) -> None:
    try:
        with made_whole(output, source=trace.path) as unfinished:
            write_tables(unfinished, _tables(trace))
    except (sqlite3.Error, OSError) as error:
        raise ExportError(
            f"{output} cannot be written: {error}", "Make room, or set XDG_CACHE_HOME to a folder that has it"
        ) from error


def _tables(trace: KinetoTrace) -> dict[str, Rows]:
    """The tables in an order in which the strings come last: they are collected as the rows are written."""
    strings, threads = Strings(), Threads(trace)
    tables = gpu_rows(trace, threads, strings) if trace.has_gpu else operator_rows(trace, threads, strings)
    remarks = [warning_row(text, threads.processes[0]) for text in trace.remarks]
    tables |= {
        "DIAGNOSTIC_EVENT": [*remarks, *tables.get("DIAGNOSTIC_EVENT", ())],
        "NVTX_EVENTS": range_rows(trace, threads, strings),
        "TORCH_OPERATOR_EVENTS": operator_event_rows(trace, threads, strings),
        "CUDA_GPU_MEMORY_USAGE_EVENTS": memory_rows(trace, threads),
        "ThreadNames": thread_rows(trace, threads, strings),
        "TARGET_INFO_SYSTEM_ENV": environment_rows(trace),
        "PROCESS_RANKS": rank_rows(trace, threads),
        "META_DATA_EXPORT": [*export_rows(trace), *origin_rows(trace.path, trace.source)],
    }
    return {**tables, "StringIds": strings.rows()}
