"""Finds what an export holds of its owner: the values of variables, and host and user names."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nsys_analyzer.share.vocabulary import is_field_word, is_ordinary, ordinary_words
from nsys_analyzer.trace.sqlite_reader import quoted

#: The shortest value of a variable that is looked for. A shorter one is found in half of all names.
_SHORTEST = 6
_SHORTEST_SECRET = 4
_SHORTEST_PERSON = 3
_SHORTEST_PART = 8

#: Variables that hold a secret, and those that name a person or a machine, by their own names.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|SIGNATURE|_PWD", re.I)
_HOST = re.compile(r"HOST(?!TYPE|CC|CXX)|NODE_?(?:NAME|LIST)|CLUSTER", re.I)
_PERSON = re.compile(rf"USER|LOGNAME|{_HOST.pattern}|MAIL|AUTHOR|OWNER|ACCOUNT", re.I)

_PATH_NAME = r"[^\s/\\:;,\"'<>|()\[\]{}]+"
#: Paths are not looked for: no name that holds one stays, but a layer's.
_PATHS = re.compile(rf"~?(?:/{_PATH_NAME}){{2,}}/?(?::~?(?:/{_PATH_NAME}){{2,}}/?)*")
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


@dataclass(frozen=True)
class PrivateValues:
    """The values that are looked for in every text: ``values`` wherever they stand, ``words`` where they stand alone.

    ``hosts`` are those of both that name a machine: the domain behind one goes, too. ``variables`` counts the
    environment variables they all come from.
    """

    values: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    variables: int = 0

    @staticmethod
    def of(found: set[str], hosts: set[str], variables: int) -> PrivateValues:
        """Sorts what was found, longest first, so that a part does not hide the whole."""
        order = sorted(found, key=lambda value: (-len(value), value))
        words = tuple(value for value in order if _stands_alone(value))
        values = tuple(value for value in order if not _stands_alone(value))
        return PrivateValues(values, words, frozenset(hosts), variables)


def _stands_alone(value: str) -> bool:
    """Plain letters, or a few characters: part of many a longer word."""
    return value.isalpha() or len(value) < _SHORTEST


def is_telling(name: str) -> bool:
    """Whether the name of a variable or an option speaks of a secret, a person or a machine."""
    return bool(_SECRET.search(name) or _PERSON.search(name))


def is_host(name: str) -> bool:
    """Whether the name of a variable says that it names a machine."""
    return bool(_HOST.search(name))


def private_parts(name: str, value: str) -> Iterator[str]:
    """The private parts of a variable's value: the value, and those parts of a list that hold letters and numbers.

    A value of six characters or more; of four where the variable's name speaks of a secret, of three where it
    speaks of a person or a machine; and none that everybody has.
    """
    secret, person = bool(_SECRET.search(name)), bool(_PERSON.search(name))
    shortest = _SHORTEST_SECRET if secret else _SHORTEST_PERSON if person else _SHORTEST
    value = value.strip()
    if len(value) >= shortest and _is_private(value, telling=secret or person):
        yield value
    for part in re.split(r"[\s:;,|@/]+" if "://" in value else r"[\s:;,|]+", value):
        mixed = re.search(r"\d", part) and re.search(r"[A-Za-z]", part)
        if mixed and len(part) >= min(shortest + 2, _SHORTEST_PART) and _is_private(part, telling=secret or person):
            yield part


def _is_private(value: str, *, telling: bool) -> bool:
    if telling:  # its numbers are no version, and its words no list of settings: gpu-node-17
        return value.lower() not in ordinary_words() and not (value.isdigit() and len(value) < _SHORTEST)
    return not is_ordinary(value) and not _PATHS.fullmatch(value)


def find_private(connection: sqlite3.Connection, columns_of: Mapping[str, tuple[str, ...]]) -> PrivateValues:
    """The private values to look for in the texts of an export, given the columns of each of its tables."""
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
    """The variables behind a property of the capture, hosts and users among them."""
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
