"""What a copy to share keeps of an export: tables, columns and rows; all else is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.schema import Column, Table

#: The tables that the package reads, each under its key.
_TABLES = {table.key: table for table in vars(schema).values() if isinstance(table, Table) and not table.limit}

#: Columns of numbers that are kept beside those that the package reads.
_MORE_COLUMNS = {
    "kernel": (
        "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory",
        "dynamicSharedMemory",
    ),
    "memcpy": ("bytes", "copyKind"),
    "memset": ("bytes",),
    "runtime": ("end",),
    "nvtx": ("domainId",),
    "memory": ("deviceId", "address", "memKind", "correlationId", "streamId"),
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

#: The columns, by our names, that hold names; other texts are messages or properties of the machine.
_NAMES = {("strings", "value"), ("nvtx", "text")}
#: The tables of properties, of which the rows above are kept.
_PROPERTIES = ("environment", "export", "capture")

#: The columns, by our names, that hold IDs of strings.
_STRING_IDS = ("name", "text_id")


@dataclass(frozen=True)
class KeptTable:
    """One table of the copy, in the export's own names.

    Attributes:
        key: the table's key in ``trace.schema``.
        name: its name in the file.
        numbers, texts: its columns.
        names: those of the texts that are names of ranges, kernels, functions and threads.
        exact: those of the texts that the rows are chosen by: they hold nothing else.
        string_ids: those of the numbers that are IDs of strings.
        required: those that a reader cannot do without.
        thread: the column with global thread IDs, empty where there is none.
        rows: SQL that is true for the rows to keep.
    """

    key: str
    name: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    names: tuple[str, ...]
    exact: tuple[str, ...]
    string_ids: tuple[str, ...]
    required: tuple[str, ...]
    thread: str
    rows: str


def kept_tables(reader: Reader) -> list[KeptTable]:
    """The tables of an export that its copy has; names of threads and strings last, for others refer to them."""
    last = (schema.THREADS.key, schema.STRINGS.key)
    tables = [table for key, table in _TABLES.items() if key not in last]
    tables += [_TABLES[key] for key in last]
    named = ((table, reader.name_of(table)) for table in tables)
    return [_kept(reader, table, name) for table, name in named if name is not None]


def _kept(reader: Reader, table: Table, name: str) -> KeptTable:
    present = reader.columns_of[name]
    chosen = [(column, alias) for column in table.columns if (alias := _present_name(column, present))]
    numbers = [alias for column, alias in chosen if isinstance(column.default, int)]
    numbers += [more for more in _MORE_COLUMNS.get(table.key, ()) if more in present and more not in numbers]
    return KeptTable(
        table.key,
        name,
        tuple(numbers),
        tuple(alias for column, alias in chosen if isinstance(column.default, str)),
        tuple(alias for column, alias in chosen if (table.key, column.name) in _NAMES),
        tuple(alias for column, alias in chosen if column.name == "name" and table.key in _PROPERTIES),
        tuple(alias for column, alias in chosen if column.name in _STRING_IDS and isinstance(column.default, int)),
        tuple(alias for column, alias in chosen if column.name in table.required),
        next((alias for column, alias in chosen if column.name == "thread"), ""),
        " AND ".join(f"({condition})" for condition in _conditions(reader, table, present)) or "1",
    )


def _present_name(column: Column, present: tuple[str, ...]) -> str | None:
    return next((alias for alias in column.aliases if alias in present), None)


def _conditions(reader: Reader, table: Table, present: tuple[str, ...]) -> Iterator[str]:
    """The rows that the package reads, of those the ones to show."""
    wanted = table.filter
    if wanted and wanted.column in present and (not wanted.table or wanted.table in reader.columns_of):
        yield f'"{wanted.column}" {wanted.predicate}'
    rows = _ROWS.get(table.key, "")
    if table is schema.DIAGNOSTICS and "severity" not in present:
        rows = rows.partition(" OR ")[0]
    if rows:
        yield rows
