"""Copies the tables of an export into a file to share, with the texts scrubbed on their way."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsys_analyzer.capture.share_private import find_private
from nsys_analyzer.capture.share_scrub import Renamed, Scrubber
from nsys_analyzer.capture.share_tables import KeptTable, kept_tables
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.ranks import Rank, read_ranks
from nsys_analyzer.trace.reader import Reader, quoted
from nsys_analyzer.trace.trace import costly_tables


@dataclass(frozen=True)
class LeftOut:
    """What of an export is not in its copy.

    Attributes:
        tables: rows of each table that is not in the copy; those without rows and nsys's lists of codes not told.
        rows: rows that a table of the copy has no more, by the table's name.
        strings: rows of ``StringIds`` to which nothing refers any more.
        texts: texts that lost a private value or a word.
        renamed: names that have an alias in the copy.
        variables: environment variables that the export held.
    """

    tables: dict[str, int]
    rows: dict[str, int]
    strings: int
    texts: int
    renamed: tuple[Renamed, ...]
    variables: int


def copy_export(reader: Reader, output: Path, keep: Sequence[re.Pattern[str]] = ()) -> LeftOut:
    """Writes the copy: the export is only read, the output must not be there yet. Names that match ``keep`` stay.

    Raises:
        sqlite3.Error: the export is damaged, or the output cannot be written.
    """
    with closing(sqlite3.connect(reader.uri, uri=True)) as source:
        private = find_private(source, reader.columns_of)
        scrubber = Scrubber(private, keep)
        source.create_function("scrub_name", 1, scrubber.name)
        source.create_function("scrub_message", 1, scrubber.message)
        _attach(source, output)
        tables = kept_tables(reader)
        for table in tables:
            _copy_table(source, table)
            if table.thread and table.key != schema.THREADS.key:
                _use(source, table, table.thread, "used_threads")
        if not reader.name_of(schema.RANKS):
            _write_ranks(source, read_ranks(reader))
        _note_costly_tables(source, reader)
        source.commit()
        return _left_out(source, reader, tables, scrubber, variables=private.variables)


def _attach(source: sqlite3.Connection, output: Path) -> None:
    source.execute("ATTACH CAST(? AS TEXT) AS copy", (os.fsencode(output),))
    for setting in ("copy.journal_mode = OFF", "copy.synchronous = OFF", "temp_store = MEMORY"):
        source.execute(f"PRAGMA {setting}")  # a copy broken off is thrown away: nothing needs to survive it
    source.execute("CREATE TABLE temp.used_threads (id INTEGER PRIMARY KEY)")
    source.execute("CREATE TABLE temp.used_strings (id INTEGER PRIMARY KEY)")


def _copy_table(source: sqlite3.Connection, table: KeptTable) -> None:
    columns = _filled(source, table)
    declared = ", ".join(f'"{name}" {"TEXT" if name in table.texts else "INTEGER"}' for name in columns)
    source.execute(f'CREATE TABLE copy."{table.name}" ({declared})')
    selected = ", ".join(_expression(table, name) for name in columns)
    source.execute(
        f'INSERT INTO copy."{table.name}" SELECT {selected} FROM main."{table.name}" WHERE {table.rows} ORDER BY rowid'
    )
    for name in set(table.string_ids).intersection(columns):
        _use(source, table, name, "used_strings")


def _write_ranks(source: sqlite3.Connection, ranks: Mapping[int, Rank]) -> None:
    """The ranks as numbers, in a table of ours: what the export tells them by stays behind."""
    if ranks:
        source.execute("CREATE TABLE copy.PROCESS_RANKS (globalPid INTEGER, rank INTEGER, worldSize INTEGER)")
        rows = [(process, rank.number, rank.world_size) for process, rank in ranks.items()]
        source.executemany("INSERT INTO copy.PROCESS_RANKS VALUES (?, ?, ?)", rows)


def _note_costly_tables(source: sqlite3.Connection, reader: Reader) -> None:
    """Tables without rows: verdicts depend on whether these things were recorded, and on nothing that they hold."""
    (mark,) = schema.COSTLY_MARK
    for name in costly_tables(reader):
        source.execute(f'CREATE TABLE copy."{name}" ({mark} INTEGER)')


def _use(source: sqlite3.Connection, table: KeptTable, column: str, used: str) -> None:
    """Notes the IDs that a column of the copy refers to."""
    ids = f'SELECT DISTINCT "{column}" FROM copy."{table.name}" WHERE "{column}" NOTNULL'  # a NULL would take an ID
    source.execute(f"INSERT OR IGNORE INTO temp.{used} {ids}")


def _filled(source: sqlite3.Connection, table: KeptTable) -> list[str]:
    """The columns that hold anything in the rows to keep, and those that a reader asks for."""
    columns = (*table.numbers, *table.texts)
    counts = ", ".join(f'count("{name}")' for name in columns)
    row = source.execute(f'SELECT count(*), {counts} FROM main."{table.name}" WHERE {table.rows}').fetchone()
    return [name for name, count in zip(columns, row[1:], strict=True) if count or not row[0] or name in table.required]


def _expression(table: KeptTable, name: str) -> str:
    """A column on its way: what is not a number stays behind in a column of numbers."""
    if name in table.exact or name not in table.texts:
        return f'CAST("{name}" AS {"TEXT" if name in table.exact else "INTEGER"})'
    scrubbed = f'scrub_{"name" if name in table.names else "message"}(CAST("{name}" AS BLOB))'
    if table.key != schema.EXPORT.key:
        return scrubbed
    # A long number would be taken out. Without this one the times of the copy mean nothing, and they tell it anyway.
    return f"CASE name WHEN '{schema.TIME_SHIFT}' THEN CAST(CAST({name} AS INTEGER) AS TEXT) ELSE {scrubbed} END"


def _left_out(
    source: sqlite3.Connection, reader: Reader, tables: Iterable[KeptTable], scrubber: Scrubber, *, variables: int
) -> LeftOut:
    kept = {table.name for table in tables}
    before = {
        name: _count(source, f"main.{quoted(name)}") for name in reader.columns_of if not name.startswith("ENUM_")
    }
    fewer = {name: before[name] - _count(source, f"copy.{quoted(name)}") for name in before if name in kept}
    return LeftOut(
        tables={name: rows for name, rows in before.items() if rows and name not in kept},
        rows={name: rows for name, rows in fewer.items() if rows and name not in schema.STRINGS.aliases},
        strings=sum(fewer.get(name, 0) for name in schema.STRINGS.aliases),
        texts=len(scrubber.changed),
        renamed=tuple(scrubber.renamed),
        variables=variables,
    )


def _count(source: sqlite3.Connection, table: str) -> int:
    return int(source.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
