"""From a PyTorch profiler trace (``.json``, ``.json.gz``) to the tables of an nsys export, made once and kept."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from nsys_analyzer.capture.kineto_events import KinetoTrace, read_kineto
from nsys_analyzer.capture.kineto_ids import Strings, Threads
from nsys_analyzer.capture.kineto_operators import operator_rows
from nsys_analyzer.capture.kineto_rows import (
    CONVERTER_VERSION,
    environment_rows,
    export_rows,
    gpu_rows,
    memory_rows,
    range_rows,
    thread_rows,
)
from nsys_analyzer.capture.kineto_tables import Rows, write_tables
from nsys_analyzer.capture.placement import is_fresh, is_sqlite, made_whole, places, trace_stem, writable_place
from nsys_analyzer.errors import ExportError

_CONVERTER = "1"  # a file of another converter is made again


def converted_sqlite(trace: Path) -> Path:
    """Return the SQLite file made from a PyTorch profiler trace, converting only where no fresh one is there.

    Looked for, and made, as ``X.sqlite`` beside ``X.json.gz`` (``X.pt.trace.json``, ``X.json``); in the cache where
    the folder cannot be written, or where an export of something else has that name.

    Raises:
        TraceError: see :func:`read_kineto`.
        ExportError: there is no place for the file, or no space.
    """
    beside, cached = places(trace, trace_stem(trace))
    if beside.exists() and _converter_of(beside) is None:
        beside = cached  # somebody's own: an export of nsys, say
    for made in (beside, cached):
        if trace.is_file() and is_fresh(made, trace) and _converter_of(made) == _CONVERTER:
            return made
    read = read_kineto(trace)
    target = writable_place(beside, cached)
    _write(read, target)
    return target


def _converter_of(path: Path) -> str | None:
    """Which converter made a SQLite file, None where it was none of ours."""
    if not is_sqlite(path):
        return None
    query = "SELECT value FROM META_DATA_EXPORT WHERE name = ?"
    try:
        with closing(sqlite3.connect(path)) as connection:
            row = connection.execute(query, (CONVERTER_VERSION,)).fetchone()
    except sqlite3.Error:
        return None  # no such table, or a damaged file: not ours either way
    return str(row[0]) if row else None


def convert_trace(trace: Path, output: Path) -> None:
    """Write the tables of an nsys export from a PyTorch profiler trace; ``output`` appears whole or not at all.

    Kernels, copies and fills keep their launches, ranges are those of ``record_function``. In a trace without any
    of the first three, the operators are the kernels, of a device called "CPU".

    Raises:
        TraceError: see :func:`read_kineto`.
        ExportError: ``output`` cannot be written.
    """
    _write(read_kineto(trace), output)


def _write(trace: KinetoTrace, output: Path) -> None:
    try:
        with made_whole(output) as unfinished:
            write_tables(unfinished, _tables(trace))
    except (sqlite3.Error, OSError) as error:
        raise ExportError(
            f"{output} cannot be written: {error}", "Make room, or set XDG_CACHE_HOME to a folder that has it"
        ) from error


def _tables(trace: KinetoTrace) -> dict[str, Rows]:
    """The tables in an order in which the strings come last: they are collected as the rows are written."""
    strings, threads = Strings(), Threads(trace)
    tables = gpu_rows(trace, threads, strings) if trace.has_gpu else operator_rows(trace, threads, strings)
    tables |= {
        "NVTX_EVENTS": range_rows(trace, threads, strings),
        "CUDA_GPU_MEMORY_USAGE_EVENTS": memory_rows(trace, threads),
        "ThreadNames": thread_rows(trace, threads, strings),
        "TARGET_INFO_SYSTEM_ENV": environment_rows(trace),
        "META_DATA_EXPORT": export_rows(trace, _CONVERTER),
    }
    return {**tables, "StringIds": strings.rows()}
