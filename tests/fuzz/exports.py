"""Breaks nsys exports: bytes, pages, values, structure, causality and names."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from nsys_analyzer.trace.reader import quote_identifier
from tests.fuzz.texts import sqlite_number, text, value

_KERNEL, _CALL, _RANGE = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"


def bytes_(path: Path, random: Random) -> str:
    """A few bytes overwritten."""
    content = bytearray(path.read_bytes())
    for _ in range(random.randrange(1, 30)):
        content[random.randrange(len(content))] = random.randrange(256)
    path.write_bytes(content)
    return "bytes overwritten"


def pages(path: Path, random: Random) -> str:
    """A page of zeros, of noise, of another page, or the rest cut off."""
    content = bytearray(path.read_bytes())
    size, count = 4096, max(len(content) // 4096, 1)
    at = random.randrange(count) * size
    kind = random.randrange(4)
    if kind == 0:
        content[at : at + size] = bytes(size)
    elif kind == 1:
        content[at : at + size] = random.randbytes(size)
    elif kind == 2:
        other = random.randrange(count) * size
        content[at : at + size] = content[other : other + size]
    else:
        del content[at + random.randrange(size) :]
    path.write_bytes(content)
    return ("a page of zeros", "a page of noise", "a page twice", "cut off")[kind]


def values(path: Path, random: Random) -> str:
    """One column of some rows set to something else."""
    with closing(sqlite3.connect(path)) as connection:
        table, columns = _table(connection, random)
        column = random.choice(columns)
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {quote_identifier(table)}").fetchall()]
        chosen = random.sample(rows, min(len(rows), random.choice((1, 1, 2, 10, len(rows)))))
        one = value(random)
        for row in chosen:
            each = one if random.random() < 0.7 else value(random)
            with suppress(sqlite3.IntegrityError):  # a key takes integers alone
                connection.execute(
                    f"UPDATE OR IGNORE {quote_identifier(table)} SET {quote_identifier(column)} = ? WHERE rowid = ?",
                    [each, row],
                )
        connection.commit()
        return f"{table}.{column} of {len(chosen)} rows"


def structure(path: Path, random: Random) -> str:
    """A table or column dropped, emptied, renamed, made a view, or shadowed by a newer one."""
    with closing(sqlite3.connect(path)) as connection:
        table, columns = _table(connection, random)
        name, column = quote_identifier(table), quote_identifier(random.choice(columns))
        change = random.choice(
            (
                f"DROP TABLE {name}",
                f"DELETE FROM {name}",
                f"ALTER TABLE {name} RENAME TO {quote_identifier(f'{table}_V{random.randrange(1, 20)}')}",
                f"CREATE TABLE {quote_identifier(f'{table}_V{random.randrange(2, 20)}')} AS "
                f"SELECT * FROM {name} WHERE 0",
                f"ALTER TABLE {name} DROP COLUMN {column}",
                f"ALTER TABLE {name} RENAME COLUMN {column} TO {quote_identifier(random.choice(columns) + 'x')}",
                f"INSERT INTO {name} SELECT * FROM {name}",
                f"INSERT INTO {name} DEFAULT VALUES",
                f'ALTER TABLE {name} ADD COLUMN "a ""b" TEXT',
                f'CREATE TABLE "odd "" name{random.randrange(9)}" (a)',
            )
        )
        try:
            connection.execute(change)
        except (sqlite3.OperationalError, sqlite3.IntegrityError):
            return "nothing"  # a column that cannot be dropped: the capture stays as it is
        if random.random() < 0.2:
            connection.execute(f"CREATE VIEW IF NOT EXISTS {name} AS SELECT * FROM sqlite_master")
        connection.commit()
        return change


def causality(path: Path, random: Random) -> str:
    """Rows whose times or IDs contradict each other."""
    some = f"rowid IN (SELECT rowid FROM {{0}} ORDER BY rowid * {random.randrange(1, 10**6)} % 1000003"
    some += f" LIMIT {random.choice((1, 3, 50))})"
    shift = sqlite_number(random) >> random.randrange(40)
    table = random.choice((_KERNEL, _CALL, _RANGE))
    change = random.choice(
        (
            f"UPDATE {table} SET start = start + {shift} WHERE {some}",
            f"UPDATE {table} SET end = end + {shift} WHERE {some}",
            f"UPDATE {table} SET start = end, end = start WHERE {some}",
            f"UPDATE {table} SET start = 0, end = 0 WHERE {some}",
            f"UPDATE {table} SET start = NULL WHERE {some}",
            f"UPDATE {table} SET end = NULL WHERE {some}",
            f"UPDATE {table} SET start = start + {shift}",
            f"DELETE FROM {table} WHERE {some}",
            f"INSERT INTO {table} SELECT * FROM {table} WHERE {some}",
            f"UPDATE {_KERNEL} SET correlationId = correlationId + {random.choice((1, -1, 2**32, 2**40))}",
            f"UPDATE {_KERNEL} SET globalPid = {sqlite_number(random)} WHERE {some.replace('{0}', _KERNEL)}",
            f"UPDATE {_CALL} SET globalTid = {sqlite_number(random)} WHERE {some.replace('{0}', _CALL)}",
            f"UPDATE {_RANGE} SET globalTid = {sqlite_number(random)} WHERE {some.replace('{0}', _RANGE)}",
            f"UPDATE {_KERNEL} SET deviceId = {sqlite_number(random)}, streamId = {sqlite_number(random)}",
        )
    ).replace("{0}", table)
    with closing(sqlite3.connect(path)) as connection:
        try:
            connection.execute(change)
        except (sqlite3.OperationalError, sqlite3.IntegrityError):  # a capture without the table
            return "nothing"
        connection.commit()
    return change


def names(path: Path, random: Random) -> str:
    """Names of ranges, kernels, threads, GPUs and messages that are markup, control characters or endless."""
    changes = []
    with closing(sqlite3.connect(path)) as connection:
        for query, key in (
            ("UPDATE StringIds SET value = ? WHERE id = ?", "SELECT id FROM StringIds"),
            ("UPDATE TARGET_INFO_GPU SET name = ? WHERE rowid = ?", "SELECT rowid FROM TARGET_INFO_GPU"),
            ("UPDATE TARGET_INFO_SYSTEM_ENV SET value = ? WHERE rowid = ?", "SELECT rowid FROM TARGET_INFO_SYSTEM_ENV"),
            ("UPDATE META_DATA_EXPORT SET value = ? WHERE rowid = ?", "SELECT rowid FROM META_DATA_EXPORT"),
            ("UPDATE DIAGNOSTIC_EVENT SET text = ? WHERE rowid = ?", "SELECT rowid FROM DIAGNOSTIC_EVENT"),
            ("UPDATE NVTX_EVENTS SET text = ?, textId = NULL WHERE rowid = ?", "SELECT rowid FROM NVTX_EVENTS"),
        ):
            if random.random() < 0.5:
                continue
            try:
                rows = [row for (row,) in connection.execute(key).fetchall()]
                for row in random.sample(rows, min(len(rows), random.choice((1, 5, 200)))):
                    connection.execute(query, [text(random), row])
                changes.append(query.split()[1])
            except (sqlite3.OperationalError, sqlite3.IntegrityError):
                continue  # a capture without the table
        connection.commit()
    return f"names in {', '.join(changes)}"


def _table(connection: sqlite3.Connection, random: Random) -> tuple[str, list[str]]:
    """A table and its columns; those that hold the most are chosen more often."""
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
    likely = [name for name in tables if name in (_KERNEL, _CALL, _RANGE, "StringIds")]
    table = random.choice(likely if likely and random.random() < 0.6 else tables)
    return table, [row[1] for row in connection.execute(f"PRAGMA table_info({quote_identifier(table)})").fetchall()]


MUTATORS: tuple[Callable[[Path, Random], str], ...] = (bytes_, pages, values, structure, causality, names)
