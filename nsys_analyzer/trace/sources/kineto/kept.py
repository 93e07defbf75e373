"""The events of a trace that are kept, by kind, and how many are left out and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.sources.kineto.batch import Batch, Numbers
from nsys_analyzer.trace.sources.kineto.events import Rows
from nsys_analyzer.trace.sources.kineto.written import (
    KINDS,
    ON_MTIA,
    UNKNOWN,
    UNREADABLE,
    Written,
    decode_many,
    decode_one,
    kind_of,
    reason,
    shown,
    used_of,
)

_MOST_WAITING = 4096
"""Events read one by one that are condensed at once."""

_Refusal = tuple[int, str, str, object]
"""Of an event that is left out: its place among those read with it, kind, why, and name."""


class Events:
    """The events of a trace as they are read: those that are kept, by kind, and those left out.

    Attributes:
        found: the rows of each kind, once :meth:`finish` was called.
        numbers: the texts and places by which they name theirs.
        any_phase: whether anything had a "ph", as every event of a Chrome trace has.
    """

    def __init__(self) -> None:
        self.found: dict[str, Rows] = {}
        self.numbers = Numbers()
        self.any_phase = self.on_mtia = False
        self._parts: dict[str, list[Rows]] = defaultdict(list)
        self._waiting: list[Written] = []
        self._refusals: list[_Refusal] = []  # of events between those that wait
        self._refused: dict[str, Counter[str]] = defaultdict(Counter)
        self._first_refused: dict[str, str] = {}
        self._unread: Counter[tuple[str, str]] = Counter()

    def add_all(self, text: str) -> bool:
        """Adds events from the text of several, ``{…}, {…}``; False, and none, where :meth:`add` must take each."""
        try:
            events = decode_many(text)
        except UNREADABLE:
            return False
        self._condense()
        self._waiting = events
        self._condense()
        return True

    def add(self, value: Any) -> None:
        """Adds an event from the value of its JSON, or counts it among those left out."""
        if not isinstance(value, dict):
            self._leave_out(UNKNOWN, "no object", None)
            return
        kind = kind_of(*(value.get(key) for key in ("ph", "cat", "name", "pid")))
        if kind is None:
            self.any_phase = self.any_phase or value.get("ph") is not None
            return
        used, unread = used_of(kind, value)
        self._unread.update((kind, key) for key in unread)
        try:
            self._waiting.append(decode_one(used))
        except UNREADABLE as error:
            self._leave_out(kind, reason(error), value.get("name"))
        if len(self._waiting) == _MOST_WAITING:
            self._condense()

    def finish(self) -> None:
        """Puts the rows of each kind together, when all events were added."""
        self._condense()
        self.found = {kind: np.concatenate(parts) for kind, parts in self._parts.items()}
        self._parts.clear()

    def leave_out(self, is_bad: Callable[[Ints], Bools], why: str) -> None:
        """Takes out the events whose starts are bad, and counts them."""
        names = list(self.numbers.texts)
        for kind, rows in list(self.found.items()):
            if kind not in ("thread", "collective") and (bad := is_bad(rows["start"])).any():
                self._refuse(kind, why, names[rows["name"][bad.argmax()]], int(bad.sum()))
                self.found[kind] = rows[~bad]
                if bad.all():
                    del self.found[kind]

    def remarks(self) -> list[str]:
        """A warning for each kind of which events were left out, and for each argument that could not be read."""
        unread = (
            f"{count:,} events of the kind {kind} have a `{key}` that cannot be read"
            for (kind, key), count in self._unread.items()
        )
        return [*(self._remark(kind, reasons) for kind, reasons in self._refused.items()), *unread]

    def _remark(self, kind: str, reasons: Counter[str]) -> str:
        count = reasons.total()
        why = ", ".join(f"{text} ({times:,})" for text, times in reasons.most_common())
        return (
            f"Left out: {count:,} of {count + len(self.found.get(kind, ())):,} events of the kind {kind}, "
            f"which cannot be what the trace says: {why}; the first is {self._first_refused[kind]}"
        )

    def _leave_out(self, kind: str, why: str, name: object) -> None:
        """Refuses an event that comes after those that wait."""
        self._refusals.append((len(self._waiting), kind, why, name))
        if len(self._refusals) == _MOST_WAITING:
            self._condense()

    def _refuse(self, kind: str, why: str, name: object, count: int = 1) -> None:
        self._first_refused.setdefault(kind, shown(name))
        self._refused[kind][why] += count

    def _condense(self) -> None:
        """Condenses the events that wait, and counts the refusals in the order in which the events stand."""
        waiting, refusals = self._waiting, self._refusals
        self._waiting, self._refusals = [], []
        self.any_phase = self.any_phase or any(event.ph is not None for event in waiting)
        kept: list[tuple[int, str, Rows]] = []
        for kind, where in _by_kind(waiting).items():
            batch = Batch(kind, [waiting[at] for at in where], self.numbers)
            refusals += [(where[n], kind, why, waiting[where[n]].name) for n, why in batch.refused.items()]
            kept += [(where[first], kind, rows) for first, kind, rows in batch.kept()]
            self._unread.update({(kind, "stream"): count for kind, count in batch.without_stream.items()})
            self.on_mtia = self.on_mtia or (kind == ON_MTIA and len(batch.refused) < len(where))
        for _, kind, rows in sorted(kept, key=itemgetter(0)):
            self._parts[kind].append(rows)
        for _, kind, why, name in sorted(refusals, key=itemgetter(0)):
            self._refuse(kind, why, name)


def _by_kind(events: list[Written]) -> dict[str, list[int]]:
    """The places of the events that are used, by kind."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        kind = KINDS.get(event.cat or "") if event.ph == "X" else None  # most are found so, in half the time
        kind = kind or kind_of(event.ph, event.cat, event.name, event.pid)
        if kind is not None:
            places[kind].append(place)
    return places
