"""Writes a copy of an export that can be given to others: what analysis needs, and nothing of its owner."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.share.names import CALL, KERNEL, MARK, OPERATOR, RANGE, THREAD, Renamed, Scrubber, is_public
from nsys_analyzer.system.atomic_write import atomic_write, check_regular
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import rows_of
from nsys_analyzer.trace.ranks import noted_calls, read_nccl_calls, read_ranks
from nsys_analyzer.trace.reader import Reader, SqliteReader, column_in
from nsys_analyzer.trace.schema import Table
from nsys_analyzer.trace.sources import check_no_input, sqlite_of
from nsys_analyzer.trace.trace import check_recorded, costly_tables

#: The tables that a copy has, those of threads and strings last, for others refer to them. Payloads and the time of
#: the day stay behind; what is read of NCCL's is written as a table of ours.
_LAST = (schema.THREADS, schema.STRINGS)
_BEHIND = (schema.PAYLOAD_FIELDS, schema.SESSION_START, schema.NCCL_CALLS)
_FIRST = (table for table in dict.fromkeys(schema.TABLES.values()) if table not in (*_LAST, *_BEHIND))
_TABLES = (*_FIRST, *_LAST)

#: Columns of numbers that are kept beside those that the package reads: what a look at one kernel or copy asks for.
_MORE_COLUMNS = {
    "kernel": (
        "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory",
        "dynamicSharedMemory",
    ),
    "memory": ("deviceId", "address", "memKind"),
    "gpus": ("clockRate", "computeMajor", "computeMinor"),
}  # fmt: skip

#: The rows that are kept, where not all are. A list of the host's threads would be a list of its processes.
_ROWS = {
    "environment": (
        "name IN ('NvDriverVersion', 'CudaDriverVersion', 'DevicePlatform', 'HipDriverVersion', 'HipRuntimeVersion',"
        " 'CpuDescription', 'OsDescription')"
    ),
    "export": (
        "name IN ('EXPORT_PRODUCT_NAME', 'EXPORT_PRODUCT_VERSION', 'PRODUCT_VERSION', 'EXPORT_SCHEMA_VERSION',"
        " 'EXPORT_CONVERTER_VERSION', 'EXPORT_SOURCE_SUFFIX', 'EXPORT_RANGES_ON')"
        f" OR (name = '{schema.TIME_SHIFT}' AND value <> '0')"
    ),
    # Not the command line of the program, which is its owner's.
    "capture": "name = 'CAPTURE_EVENT_TYPE' OR name LIKE '%CUDA_GRAPH_TRACE_OPTIONS:MODE'",
    "diagnostics": "instr(text, 'might be missing') OR severity IN (2, 3)",
    "threads": "globalTid IN (SELECT id FROM temp.used_threads)",
    "strings": "id IN (SELECT id FROM temp.used_strings)",
}

#: The tables of properties, of which the rows above are kept.
_PROPERTIES = ("environment", "export", "capture")
#: What the strings are whose IDs a table holds, in the columns that hold any.
_ROLES = {"kernel": KERNEL, "runtime": CALL, "nvtx": RANGE, "operators": OPERATOR, "threads": THREAD}
_STRING_IDS = ("name", "text_id", "shapes")


@dataclass(frozen=True)
class Shared:
    """A copy, and what is not in it.

    Attributes:
        tables: rows of each table that is not in the copy; those without rows and nsys's lists of codes not told.
        rows: rows that a table of the copy has no more, by the table's name.
        strings: rows of ``StringIds`` to which nothing refers any more.
        texts: how many messages and properties of the machine lost words.
        renamed: names that have an alias in the copy.
    """

    path: Path
    bytes_before: int
    bytes_after: int
    tables: dict[str, int]
    rows: dict[str, int]
    strings: int
    texts: int
    renamed: tuple[Renamed, ...]


def share(trace: Path, output: Path, *, force: bool = False, keep: Sequence[re.Pattern[str]] = ()) -> Shared:
    """Copies what analysis needs of a trace into a new export, which appears whole or not at all.

    The copy gives the same figures as the trace; the program's command line is not in its report, and names that
    nobody allowed are aliases.

    Args:
        trace: a ``.sqlite`` export, or anything else that ``Trace.load`` takes.
        output: the copy, ``.sqlite``; its folder is made as needed.
        force: whether a file that is there already is replaced. The trace itself never is.
        keep: names that match one of these as a whole stay as they are.

    Raises:
        TraceError: the trace cannot be read, as by ``Trace.load``.
        NsysAnalyzerError: the output is the trace, is there already, or cannot be written.
    """
    _check_output(trace, output, force=force)
    reader = SqliteReader(sqlite_of(trace))
    _check_output(reader.path, output, force=force)
    check_recorded(reader, reader.path)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(output) as unfinished:
            scrubber = _copy(reader, unfinished, keep)
            sizes = reader.path.stat().st_size, unfinished.stat().st_size
            tables, rows, strings = _missing_rows(reader, SqliteReader(unfinished))
    except sqlite3.Error as error:
        if "disk" in str(error).replace("disk image", ""):  # "database or disk is full", "disk I/O error"
            hint = "Name a file on another disk with -o"
            raise NsysAnalyzerError(f"{output} cannot be written ({error})", hint) from error
        raise TraceError(f"{reader.path} is damaged or truncated ({error})", "Export the report again") from error
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise NsysAnalyzerError(f"{output} cannot be written ({reason})", "Name another file with -o") from error
    return Shared(output, *sizes, tables, rows, strings, len(scrubber.changed), tuple(scrubber.renamed))


def _check_output(trace: Path, output: Path, *, force: bool) -> None:
    if output.suffix.lower() != ".sqlite":
        raise NsysAnalyzerError(f"{output} is not called like an export", f"Name it {output.stem or 'small'}.sqlite")
    check_regular(output, "Name a file with -o")
    check_no_input(output, [trace])
    if output.exists() and not force:
        raise NsysAnalyzerError(f"{output} is there already", "Name another file with -o, or replace it with --force")


def _copy(reader: SqliteReader, output: Path, keep: Sequence[re.Pattern[str]]) -> Scrubber:
    """Writes the copy: the export is only read, the output must not be there yet."""
    with closing(sqlite3.connect(reader.uri, uri=True)) as source:
        scrubber = Scrubber(keep)
        source.create_function("scrub_name", 2, scrubber.name)
        source.create_function("scrub_message", 1, scrubber.message)
        source.create_function("scrub_machine", 1, scrubber.machine)
        source.execute("ATTACH CAST(? AS TEXT) AS copy", (os.fsencode(output),))
        for setting in ("copy.journal_mode = OFF", "copy.synchronous = OFF", "temp_store = MEMORY"):
            source.execute(f"PRAGMA {setting}")  # a copy broken off is thrown away: nothing needs to survive it
        source.execute("CREATE TABLE temp.used_threads (id INTEGER PRIMARY KEY)")
        source.execute("CREATE TABLE temp.used_strings (id INTEGER, role TEXT, PRIMARY KEY (id, role)) WITHOUT ROWID")
        for table in _TABLES:
            if name := reader.name_of(table):
                _copy_table(source, reader, table, name)
        # Verdicts depend on whether these things were recorded, and on nothing that the tables hold.
        (mark,) = schema.COSTLY_MARK
        for name in costly_tables(reader):
            source.execute(f'CREATE TABLE copy."{name}" ({mark} INTEGER)')
        source.commit()
    _write_found(reader, output)
    return scrubber


@dataclass(frozen=True)
class _Column:
    """A column of the copy: its name in the file, and the SQL of its type and its value there."""

    name: str
    kind: str
    value: str
    is_required: bool
    used: str = ""  # the table that notes the IDs it refers to
    role: str = ""  # what the strings are whose IDs it holds


def _columns(table: Table, of_file: str, present: Sequence[str]) -> Iterator[_Column]:
    """Yields the columns that are kept of a table; what is not a number stays behind in a column of numbers."""
    taken = []
    for column in table.columns:
        name = column_in(column, present)
        if name is None:
            continue
        taken.append(name)
        is_required = column.name in table.required
        if isinstance(column.default, int):
            role = _ROLES.get(table.key, "") if column.name in _STRING_IDS else ""
            used = "used_strings" if role else ""
            if column.name == "thread" and table is not schema.THREADS:
                used = "used_threads"
            yield _Column(name, "INTEGER", f'CAST("{name}" AS INTEGER)', is_required, used, role)
        else:
            yield _Column(name, "TEXT", _scrubbed(table, of_file, column.name, name), is_required)
    for name in _MORE_COLUMNS.get(table.key, ()):
        if name in present and name not in taken:
            yield _Column(name, "INTEGER", f'CAST("{name}" AS INTEGER)', is_required=False)


def _scrubbed(table: Table, of_file: str, column: str, name: str) -> str:
    """Returns the SQL of a text without what is private, by our name of its column and that in the file."""
    if column == "name" and table.key in _PROPERTIES:  # the rows are chosen by it: it holds nothing else
        return f'CAST("{name}" AS TEXT)'
    text = f'CAST("{name}" AS BLOB)'
    if table is schema.NVTX:
        return f"scrub_name({text}, '{RANGE}')"
    if table is schema.STRINGS:
        roles = f'SELECT group_concat(role) FROM temp.used_strings AS used WHERE used.id = main."{of_file}".id'
        return f"scrub_name({text}, ({roles}))"
    scrubbed = f"scrub_{'message' if table is schema.DIAGNOSTICS else 'machine'}({text})"
    if table is schema.EXPORT:
        # The times of the copy mean nothing without the shift, and tell it anyway; it would go as a long number.
        shift = f"CAST(CAST({name} AS INTEGER) AS TEXT)"
        return f"CASE name WHEN '{schema.TIME_SHIFT}' THEN {shift} ELSE {scrubbed} END"
    return scrubbed


def _copy_table(source: sqlite3.Connection, reader: SqliteReader, table: Table, name: str) -> None:
    """Copies the columns that hold anything in the rows to keep, and those that a reader asks for."""
    where = _ROWS.get(table.key, "1")
    if table is schema.DIAGNOSTICS and "severity" not in reader.columns_of[name]:
        where = where.partition(" OR ")[0]
    if wanted := reader.filter_of(table, name):
        where = f'("{wanted.column}" {wanted.predicate}) AND ({where})'
    columns = list(_columns(table, name, reader.columns_of[name]))
    counts = ", ".join(f'count("{column.name}")' for column in columns)
    rows, *filled = source.execute(f'SELECT count(*), {counts} FROM main."{name}" WHERE {where}').fetchone()
    if not rows and table.key not in _ROWS:  # that it was recorded counts, and a row that nobody reads tells it
        where = f'rowid = (SELECT min(rowid) FROM main."{name}")'
    columns = [one for one, count in zip(columns, filled, strict=True) if count or not rows or one.is_required]
    declared = ", ".join(f'"{column.name}" {column.kind}' for column in columns)
    source.execute(f'CREATE TABLE copy."{name}" ({declared})')
    selected = ", ".join(column.value for column in columns)
    source.execute(f'INSERT INTO copy."{name}" SELECT {selected} FROM main."{name}" WHERE {where} ORDER BY rowid')
    for column in columns:
        if column.used:  # a NULL would take an ID
            role = f", '{column.role}'" if column.role else ""
            ids = f'SELECT DISTINCT "{column.name}"{role} FROM copy."{name}" WHERE "{column.name}" NOTNULL'
            source.execute(f"INSERT OR IGNORE INTO temp.{column.used} {ids}")


def _write_found(reader: Reader, output: Path) -> None:
    """Ranks and the calls of NCCL's functions as numbers, in tables of ours: what tells them stays behind."""
    from sqlite_utils import Database

    tables: dict[str, list[dict[str, Any]]] = {}
    strings = dict(rows_of(reader.read(schema.STRINGS)))
    noted = noted_calls(reader, strings)
    if not reader.name_of(schema.RANKS):
        tables["PROCESS_RANKS"] = [
            {"globalPid": process, "rank": rank.number, "worldSize": rank.world_size}
            for process, rank in read_ranks(reader, strings.values(), noted).items()
        ]
    calls = read_nccl_calls(reader, noted)
    columns = (calls.start, calls.thread, calls.name, calls.communicator, calls.bytes, calls.peer, calls.ranks)
    names = ("start", "globalTid", "function", "communicator", "bytes", "peer", "ranks")
    rows = (dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True))
    # PyTorch calls collectives as NCCL's ranges do, without their beginning.
    functions = [name if is_public(name, RANGE) or is_public(f"nccl:{name}", RANGE) else MARK for name in calls.names]
    tables["NCCL_CALLS"] = [{**row, "function": functions[row["function"]]} for row in rows]
    with closing(Database(output).conn) as connection:
        for name, found in tables.items():
            if found:
                Database(connection).table(name).insert_all(found)


def _missing_rows(reader: SqliteReader, copy: SqliteReader) -> tuple[dict[str, int], dict[str, int], int]:
    """Returns the rows that are not in the copy: of other tables, of its own, and of the table of strings."""
    before = reader.counts([name for name in reader.columns_of if not name.startswith("ENUM_")])
    after = copy.counts(list(copy.columns_of))
    others = {name: count for name, count in before.items() if count and not after.get(name)}
    fewer = {name: before[name] - count for name, count in after.items() if count and before.get(name, 0) > count}
    return others, fewer, fewer.pop(schema.STRINGS.aliases[0], 0)
