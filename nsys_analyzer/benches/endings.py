"""How rows ended that were not measured to their end: a sentence for each way, and why in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from nsys_analyzer.benches.model import Row
from nsys_analyzer.report.model import Block, Column, Details, Table

_WORDS = {"oom": "Out of memory", "timeout": "Out of time", "failed": "Failed", "unsupported": "Not supported here"}
_MOST_NAMED = 4
#: Letters of a message that a table has room for; the file of rows has all of them.
_MOST_SAID = 160


def named(names: Iterable[str]) -> str:
    """The names for a sentence, of many the first, and how many more there are."""
    every = list(names)
    more = f"; {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return "; ".join(every[:_MOST_NAMED]) + more


def endings(rows: Sequence[Row], name: Callable[[Row], str], all_well: str = "") -> Iterator[str]:
    """A sentence for each status that is not ok, with the rows that ended so; where all are, what is said then."""
    for status, word in _WORDS.items():
        if ended := [name(row) for row in rows if row.status == status]:
            yield f"{word}: {named(ended)}."
    if all_well and rows and all(row.ok for row in rows):
        yield all_well


def messages(rows: Sequence[Row], name: Callable[[Row], str]) -> Iterator[Block]:
    """Why rows are not ok, folded away."""
    lacking = tuple((name(row), row.status, _brief(row.message)) for row in rows if not row.ok)
    if lacking:
        columns = (Column("what"), Column("status"), Column("message"))
        yield Details(f"What was not measured, and why: {len(lacking)} rows", (Table(columns, lacking),))


def _brief(message: str) -> str:
    return message if len(message) <= _MOST_SAID else f"{message[:_MOST_SAID]}…"
