"""Which values of an export are a person's or a machine's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.capture.share_vocabulary import is_ordinary, ordinary_words

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


@dataclass(frozen=True)
class PrivateValues:
    """What is looked for in every text: ``values`` wherever they stand, ``words`` where they stand alone.

    ``hosts`` are those of both that name a machine: with them goes the domain behind them. ``variables`` counts the
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
    """What of a variable's value is private: the value, and those parts of a list that hold letters and numbers.

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
