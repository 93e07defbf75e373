"""Makes copies of captures for other people. A copy contains the data that the analysis needs, and no private data."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.share.names import (
    ARGUMENTS,
    CALL,
    KERNEL,
    OPERATOR,
    PROFILER_EVENT,
    RANGE,
    REMOVED_MARK,
    THREAD,
    Renaming,
    Scrubber,
    is_public,
)
from nsys_analyzer.system.atomic_write import atomic_write, check_parent_folder, check_regular
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Frame, Ints, arrow_integers, arrow_table, iterate_rows
from nsys_analyzer.trace.gpu_counters import find_counter, select_samples
from nsys_analyzer.trace.memory_snapshot import find_snapshot_files
from nsys_analyzer.trace.operator_calls import find_operator_files
from nsys_analyzer.trace.ranks import read_nccl_calls, read_nccl_ranges, read_ranks
from nsys_analyzer.trace.reader import Reader, write_sqlite
from nsys_analyzer.trace.schema import Table
from nsys_analyzer.trace.sources import check_output_is_no_input, find_source, open_capture, trace_stem
from nsys_analyzer.trace.stacks import find_stack_files
from nsys_analyzer.trace.trace import check_recorded, costly_tables

if TYPE_CHECKING:
    import pyarrow as pa

#: The tables that are not copied: the layouts of payloads, the time of day, and the NCCL calls. The copy gets a new
#: table of NCCL calls, which is made from the payloads of NCCL's ranges if the trace has no such table.
_OMITTED_TABLES = (schema.PAYLOAD_FIELDS, schema.SESSION_START, schema.NCCL_CALLS)

_COPIED_TABLES = tuple(
    replace(table, columns=(*table.columns, *schema.KERNEL_RESOURCES.columns)) if table == schema.KERNEL else table
    for table in dict.fromkeys((*schema.TABLES.values(), schema.METRIC_NAMES))
    if table not in _OMITTED_TABLES
)

#: The names of the properties that are copied, by table. The program's command line is private, so it is not copied.
_COPIED_PROPERTIES = {
    "environment": (
        "NvDriverVersion", "CudaDriverVersion", "DevicePlatform", "HipDriverVersion", "HipRuntimeVersion",
        "CpuDescription", "OsDescription",
    ),
    "export": (
        "EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION",
        "EXPORT_CONVERTER_VERSION", "EXPORT_SOURCE_SUFFIX",
    ),
    "capture": ("CAPTURE_EVENT_TYPE", "CUDA_GRAPH_TRACE_OPTIONS:MODE", "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE"),
}  # fmt: skip
#: The role of the strings to which the string IDs of a table refer, by the key of the table.
_STRING_ROLES = {
    "kernel": KERNEL, "runtime": CALL, "nvtx": RANGE, "operators": OPERATOR, "threads": THREAD,
    "overhead": PROFILER_EVENT, "profiler_overhead": PROFILER_EVENT,
}  # fmt: skip
#: The columns that contain string IDs. ``arguments`` refers to descriptions of arguments in any table.
_STRING_ID_COLUMNS = ("name", "text_id", "arguments")


def share(
    trace: Path, output: Path, *, force: bool = False, keep: Sequence[re.Pattern[str]] = (), keep_source: bool = False
) -> tuple[Renaming, ...]:
    """Copies the data that the analysis of a trace needs into a new SQLite export, and returns the replaced names.

    The copy is written completely or not at all. Its analysis gives the same figures as the analysis of the trace. The
    copy does not contain the program's command line, and an alias replaces each private name.

    Args:
        trace: the capture, in any format that ``Trace.load`` accepts.
        output: the copy, with the suffix ``.sqlite``. Its folder is created if needed.
        force: whether to replace an existing file. The trace itself is never replaced.
        keep: patterns of names that remain unchanged. A pattern must match the whole name.
        keep_source: whether to copy the files of stacks, operators and memory beside the trace, which contain paths,
            lines and modules of the program.

    Raises:
        TraceError: the trace cannot be read.
        NsysAnalyzerError: the output is the trace itself, exists already, or cannot be written.
    """
    files = {
        path: output.with_name(path.name.replace(trace_stem(trace), output.stem, 1))
        for path in (
            (*find_stack_files(trace), *find_operator_files(trace), *find_snapshot_files(trace)) if keep_source else ()
        )
    }
    _check_copy_path(trace, output, force=force)
    for path, target in list(files.items()):
        if target.exists() and target.samefile(path):
            del files[path]
        else:
            _check_replaceable(target, force=force and not target.is_symlink())
    reader = open_capture(trace)
    _check_copy_path(
        reader.path, output, force=force
    )  # opening a report may have created its export at the output's path
    check_recorded(reader, reader.path)
    scrubber = Scrubber(keep)
    tables = _copy_tables(reader, scrubber) | _make_rank_tables(reader)
    # An empty table shows that the table was recorded. The analysis does not need the content.
    empty_table = arrow_table({column: np.empty(0, np.int64) for column in schema.COSTLY_MARK})
    tables |= dict.fromkeys(costly_tables(reader), empty_table)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(output) as unfinished:
            write_sqlite(tables, unfinished)
        for path, target in files.items():
            with atomic_write(target) as unfinished:
                shutil.copyfile(path, unfinished)
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        raise NsysAnalyzerError(f"{output} cannot be written ({reason})", "Name another file with -o") from error
    return tuple(scrubber.renamed)


def find_missing_tables(trace: Path, copy: Path) -> list[str]:
    """Returns the tables that have rows in a trace of nsys, and that are missing from its copy."""
    if find_source(trace).makes_tables:
        return []
    reader, copied_tables = open_capture(trace), open_capture(copy).columns_of
    missing_tables = (name for name in reader.columns_of if name not in copied_tables and not name.startswith("ENUM_"))
    return sorted(name for name in missing_tables if reader.has_rows(name))


def _check_copy_path(trace: Path, output: Path, *, force: bool) -> None:
    """Checks that the copy of a trace may be written to a path; raises NsysAnalyzerError otherwise."""
    if output.suffix.lower() != ".sqlite":
        raise NsysAnalyzerError(f"{output} has no suffix .sqlite", f"Name it {output.stem or 'small'}.sqlite")
    check_output_is_no_input(output, [trace])
    check_parent_folder(output, force=force)
    _check_replaceable(output, force=force)


def _check_replaceable(path: Path, *, force: bool) -> None:
    """Checks that a file does not exist, or that ``force`` is set; raises NsysAnalyzerError otherwise."""
    check_regular(path, "Name another file with -o")
    if os.path.lexists(path) and not force:
        raise NsysAnalyzerError(f"{path} exists already", "Name another file with -o, or replace it with --force")


def _copy_tables(reader: Reader, scrubber: Scrubber) -> dict[str, pa.Table]:
    """Returns the tables of the copy by their names in the trace, without private data."""
    copied_tables = (*_COPIED_TABLES, select_samples(reader))
    name_of = {table: name for table in copied_tables if (name := reader.name_of(table))}
    frames = reader.read_all(name_of)
    threads = [np.unique(frame["thread"]) for key, frame in frames.items() if key != "threads" and "thread" in frame]
    roles_of: dict[int, set[str]] = defaultdict(set)
    for key, role in _STRING_ROLES.items():
        frame = frames.get(key, {})
        # Leaves out threads without recorded events, whose names would reveal other programs.
        if key == "threads" and frame:
            recorded_rows = np.flatnonzero(np.isin(frame["thread"], np.concatenate([np.empty(0, np.int64), *threads])))
            frame |= {column: values[recorded_rows] for column, values in frame.items()}
        for column in set(_STRING_ID_COLUMNS) & set(frame):
            for number in np.unique(frame[column]).tolist():
                roles_of[number].add(ARGUMENTS if column == "arguments" else role)
    tables = {}
    for table, name in name_of.items():
        frame = frames[table.key]
        rows = _find_copied_rows(table, frame, roles_of)
        if len(rows):
            tables[name] = _scrub_rows(table, frame, rows, roles_of, scrubber)
        elif table.filter and table.key not in _COPIED_PROPERTIES:
            # One row that the filter excludes shows that the table was recorded.
            tables[name] = arrow_table({column.aliases[0]: np.array([schema.NO_TIME]) for column in table.columns})
    return tables


def _find_copied_rows(table: Table, frame: Frame, roles_of: Mapping[int, set[str]]) -> Ints:
    """Returns the positions of the rows that are copied from a table."""
    first_column = next(iter(frame.values()))
    are_copied: Any = np.ones(len(first_column), np.bool_)
    if table.key in _COPIED_PROPERTIES:
        are_copied = [
            name in _COPIED_PROPERTIES[table.key]
            or (name == schema.TIME_SHIFT and bool(re.fullmatch(r"[+-]?[1-9]\d{0,18}", value)))
            for name, value in iterate_rows(frame)
        ]
    elif table == schema.DIAGNOSTICS:
        are_copied = ["might be missing" in text or severity in (2, 3) for _, severity, text in iterate_rows(frame)]
    elif table == schema.METRIC_NAMES:
        are_copied = [find_counter(name) is not None for _, _, name in iterate_rows(frame)]
    elif table == schema.STRINGS:
        are_copied = [number in roles_of for number in frame["id"].tolist()]
    return np.flatnonzero(are_copied)


def _scrub_rows(
    table: Table, frame: Frame, rows: Ints, roles_of: Mapping[int, set[str]], scrubber: Scrubber
) -> pa.Table:
    """Returns the given rows of a table without private data, and without columns that contain only their default."""
    columns = {}
    for column in table.columns:
        if not column.is_text:
            column_values = frame[column.name][rows]
            if column.name in table.required or (column_values != column.default).any():
                columns[column.aliases[0]] = column_values.astype(np.int64)
            continue
        column_texts = frame[column.name].take(arrow_integers(rows)).to_pylist()
        if table == schema.STRINGS:
            column_texts = [
                scrubber.scrub_name(text, *roles_of[i])
                for i, text in zip(frame["id"][rows].tolist(), column_texts, strict=True)
            ]
        elif table == schema.NVTX:
            column_texts = [scrubber.scrub_name(text, RANGE) for text in column_texts]
        elif table == schema.DIAGNOSTICS:
            column_texts = [scrubber.scrub_message(text) for text in column_texts]
        elif table.key not in _COPIED_PROPERTIES and table != schema.METRIC_NAMES:  # names of known metrics are kept
            column_texts = [scrubber.scrub_property(text) for text in column_texts]
        elif column.name == "value":
            range_names = frame["name"].take(arrow_integers(rows)).to_pylist()
            # The time shift is copied, because times are meaningless without it, and the times reveal it anyway.
            column_texts = [
                text if name == schema.TIME_SHIFT else scrubber.scrub_property(text)
                for name, text in zip(range_names, column_texts, strict=True)
            ]
        if column.name in table.required or any(column_texts):
            columns[column.aliases[0]] = column_texts
    return arrow_table(columns)


def _make_rank_tables(reader: Reader) -> dict[str, pa.Table]:
    """Returns tables of the ranks and of the NCCL calls, because the data from which they are read is not copied."""
    strings = dict(iterate_rows(reader.read(schema.STRINGS)))
    nccl_ranges = read_nccl_ranges(reader, strings)
    tables = {}
    ranks = {} if reader.name_of(schema.RANKS) else read_ranks(reader, strings.values(), nccl_ranges)
    if ranks:
        rank_rows = np.array([(process, rank.number, rank.world_size) for process, rank in ranks.items()], np.int64)
        column_names = [column.aliases[0] for column in schema.RANKS.columns]
        tables[schema.RANKS.aliases[0]] = arrow_table(dict(zip(column_names, rank_rows.T, strict=True)))
    calls = read_nccl_calls(reader, nccl_ranges)
    if len(calls):
        # PyTorch names the range of a collective "nccl:" and the name of the collective.
        column_names = [
            name if is_public(name, RANGE) or is_public(f"nccl:{name}", RANGE) else REMOVED_MARK for name in calls.names
        ]
        columns = {key: getattr(calls, key) for key in ("start", "communicator", "bytes", "peer", "ranks")}
        functions = [column_names[code] for code in calls.name.tolist()]
        tables[schema.NCCL_CALLS.aliases[0]] = arrow_table(
            {"globalTid": calls.thread, "function": functions, **columns}
        )
    return tables
