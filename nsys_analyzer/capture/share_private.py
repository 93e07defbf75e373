"""Finds what an export holds of its owner: environment variables, host and user names."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping

from nsys_analyzer.capture.share_vocabulary import is_field_word
from nsys_analyzer.capture.share_words import PrivateValues, is_host, is_telling, private_parts
from nsys_analyzer.trace.reader import quoted

#: Texts worth a look, wherever they are: blocks of variables, and paths that name a user.
_WORTH_A_LOOK = (
    "instr(CAST({0} AS BLOB), x'00') OR instr({0}, '/home/') OR instr({0}, '/Users/') OR instr({0}, '\\Users\\')"
)
_HOME = re.compile(r"(?:/home/|/Users/|\\Users\\)([^/\\\s:;,\"'\0]+)")
_VARIABLE = r"[A-Za-z_]\w*="

#: Properties of the capture, the export and the machine that name a host, a user, or hold variables; each may bear a
#: number: ``PROCESS_0:ENVIRONMENT_VARIABLE_12``.
_NUMBER = r"(?:[_:]?\d+)?$"
_HOSTS = re.compile(
    rf"(?i)(?:host|machine|node|computer|server|domain|target|DEVICE_DISPLAY)_?NAME{_NUMBER}|FQDN{_NUMBER}|(?:EXPORT_|_|^)HOST{_NUMBER}"
)
_USERS = re.compile(rf"(?i)(?:USER|LOGIN|ACCOUNT|OWNER)(?:_?NAME)?{_NUMBER}")
_ONE_VARIABLE = re.compile(rf"(?i)ENV(?:IRONMENT)?(?:_?VAR(?:IABLE)?S?)?{_NUMBER}")
_BLOCK = re.compile(r"(?i)DeviceEnvironment$")
_COMMAND = re.compile(
    rf"(?i)(?:COMMAND|CMD)(?:_?LINE)?{_NUMBER}|(?:WORKING|CURRENT)_?DIR(?:ECTORY)?{_NUMBER}|CWD$|EXECUTABLE(?:_?PATH)?$"
)
_ARGUMENT = re.compile(r"(?i)ARGUMENT_?\d*$")


def find_private(connection: sqlite3.Connection, columns_of: Mapping[str, tuple[str, ...]]) -> PrivateValues:
    """What to look for in the texts of an export.

    Args:
        connection: the export.
        columns_of: the columns of each of its tables.

    Raises:
        sqlite3.Error: the file is damaged.
    """
    texts = [text for table in columns_of for text in _texts(connection, table)]
    properties = [pair for table, columns in columns_of.items() for pair in _properties(connection, table, columns)]
    variables = [pair for text in texts if "\0" in text for pair in _variables(text)]
    variables += [pair for name, value in properties for pair in _variables_of(name, value)]
    variables += list(_arguments([value for name, value in properties if _ARGUMENT.search(name)]))
    commands = [value for name, value in properties if _COMMAND.search(name)]
    variables += [pair for command in commands for pair in _arguments(command.split())]
    texts += [value for _, value in (*properties, *variables)]
    found = {part for name, value in variables for part in private_parts(name, value)}
    found.update(part for text in texts for user in _HOME.findall(text) for part in private_parts("USER", user))
    found.update(part for command in commands for folder in _folders(command) for part in private_parts("-", folder))
    hosts = {part for name, value in variables if is_host(name) for part in private_parts(name, value)}
    return PrivateValues.of(found, hosts, len({name for name, _ in variables if not name.startswith("-")}))


def _texts(connection: sqlite3.Connection, table: str) -> Iterator[str]:
    """The texts of a table that may tell of its owner; columns of numbers are not looked at."""
    for _, column, kind, *_ in connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall():
        if kind.upper() not in ("INTEGER", "REAL"):
            where = _WORTH_A_LOOK.format(quoted(column))
            query = f"SELECT DISTINCT CAST({quoted(column)} AS BLOB) FROM {quoted(table)} WHERE {where}"
            for (raw,) in connection.execute(query):
                yield _decoded(raw)


def _properties(connection: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """The rows of a table of names and values."""
    if not {"name", "value"} <= set(columns):
        return []
    pairs = "SELECT CAST(name AS BLOB), CAST(value AS BLOB)"
    query = f"{pairs} FROM {quoted(table)} WHERE name NOTNULL AND value NOTNULL"
    return [(_decoded(name), _decoded(value)) for name, value in connection.execute(query)]


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _variables_of(name: str, value: str) -> Iterator[tuple[str, str]]:
    """The variables behind a property of the capture: hosts and users count as such."""
    if _ONE_VARIABLE.search(name) and "=" in value:
        variable, _, text = value.partition("=")
        yield variable, text[1:-1] if text[:1] == text[-1:] == '"' and len(text) > 1 else text
    elif _BLOCK.search(name):
        yield from _variables(value)
    elif _HOSTS.search(name):
        yield "-HOST", value
        yield "-HOST", value.partition(".")[0]
    elif _USERS.search(name):
        yield "-USER", value


def _variables(block: str) -> Iterator[tuple[str, str]]:
    """The variables of a block: ``A=b`` behind each other, NUL or a semicolon between them."""
    for variable in block.split("\0") if "\0" in block else re.split(rf";(?={_VARIABLE})", block):
        if re.match(_VARIABLE, variable):
            name, _, value = variable.partition("=")
            yield name, value


def _folders(command: str) -> Iterator[str]:
    """The folders of the paths in a command line that are not called as everybody's; a path's last name is a file's."""
    for word in command.split():
        for folder in re.split(r"[/\\]", word)[:-1]:
            if not all(map(is_field_word, re.findall(r"[A-Za-z0-9]+", folder))):
                yield folder


def _arguments(words: list[str]) -> Iterator[tuple[str, str]]:
    """The options of the program that was profiled which hold a secret: ``--api-key X``, ``--user=X``."""
    for option, following in zip(words, (*words[1:], ""), strict=False):
        name, _, value = option.partition("=")
        if name.startswith("--") and is_telling(name):
            yield name, value or following
