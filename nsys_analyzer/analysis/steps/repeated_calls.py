"""Inserts repetitions of calls into studied steps, for changes with which a program runs a part of a step again.

The repetitions take no time at first. So the steps before and after a change have the same calls and operations, and
all functions that compare two replays can compare these steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.steps.replay import CALL_COLUMNS, COLLECTIVE_COLUMNS, OPERATION_COLUMNS, Replay
from nsys_analyzer.analysis.steps.study import RangeSpans, Study
from nsys_analyzer.trace.arrays import Floats, Ints

#: The columns of a replay that contain indices of operations.
_INDICES = ("awaited", "joined")


class Repetition(NamedTuple):
    """Calls of the steps that the program makes again.

    Attributes:
        first, end: the repeated calls: [first, end).
        before: the call before which they are repeated.
    """

    first: int
    end: int
    before: int


@dataclass(frozen=True)
class RepeatedCalls:
    """Studied steps with repetitions of calls that take no time yet.

    Attributes:
        study: the steps with the repetitions.
        original_call, original_operation: the index in ``study`` of the call or operation that each call or operation
            repeats; its own index if it repeats none.
        repetition: the index of the repetition to which each call belongs; ``NONE`` for calls that repeat none.
        source_call, source_operation: the indices of the repeated calls and operations in the given study.
    """

    study: Study
    original_call: Ints
    original_operation: Ints
    repetition: Ints
    source_call: Ints
    source_operation: Ints

    @property
    def repetition_of_operation(self) -> Ints:
        """Returns the repetition of each operation, or ``NONE``."""
        repetition: Ints = self.repetition[self.study.replay.launch]
        return repetition

    def run(self, replay: Replay, call_share: Floats, operation_share: Floats) -> Replay:
        """Returns the steps in which the repetitions take a share of the time of what they repeat.

        Args:
            replay: a replay of ``study``.
            call_share: shape (calls,), the share of the time of the repeated call.
            operation_share: shape (operations,), the share of the duration of the repeated operation.
        """
        is_call, is_operation = self.repetition != NONE, self.repetition_of_operation != NONE
        columns: dict[str, Any] = {}
        for name in (*CALL_COLUMNS, *OPERATION_COLUMNS, *_INDICES):
            column = getattr(replay, name)
            if not len(column):
                continue
            of_calls = name in CALL_COLUMNS or name == "awaited"
            original = self.original_call if of_calls else self.original_operation
            repeated, share = column[original], call_share if of_calls else operation_share
            if name in _INDICES:
                repeated = self._find_repeated(repeated, of_calls=of_calls)
                repeated = np.where(share > 0, repeated, NONE)
            elif name != "stream":
                repeated = repeated * share
            columns[name] = np.where(is_call if of_calls else is_operation, repeated, column)
        return replace(replay, **columns)

    def inside(self, outer: RepeatedCalls) -> RepeatedCalls:
        """Returns these repetitions in steps that contain further repetitions, which repeat calls of ``study``."""
        calls, operations = (
            np.flatnonzero(numbers == NONE) for numbers in (outer.repetition, outer.repetition_of_operation)
        )
        return RepeatedCalls(
            outer.study,
            calls[self.original_call[outer.source_call]],
            operations[self.original_operation[outer.source_operation]],
            np.where(outer.repetition == NONE, self.repetition[outer.source_call], NONE),
            self.source_call[outer.source_call],
            self.source_operation[outer.source_operation],
        )

    def _find_repeated(self, awaited: Ints, *, of_calls: bool) -> Ints:
        """Returns the operations that repetitions wait for: those of the same repetition, if it contains them."""
        own = self.repetition_of_operation
        number = self.repetition if of_calls else own
        copy_of = {
            (int(own[index]), int(self.original_operation[index])): int(index) for index in np.flatnonzero(own != NONE)
        }
        pairs = zip(number.tolist(), awaited.tolist(), strict=True)
        return np.array([copy_of.get(pair, pair[1]) for pair in pairs], np.int64)


def repeat_calls(study: Study, repetitions: Iterable[Repetition]) -> RepeatedCalls:
    """Returns the steps with the given repetitions, in the order in which they are to be made."""
    replay, count = study.replay, len(study.calls)
    inserted: dict[int, list[tuple[int, Ints]]] = {}
    for number, (first, end, before) in enumerate(repetitions):
        inserted.setdefault(before, []).append((number, np.arange(first, end)))
    sources, numbers, position = [], [], 0
    for before in sorted({*inserted, count}):
        sources.append(np.arange(position, before))
        numbers.append(np.full(before - position, NONE))
        position = before
        for number, calls in inserted.get(before, ()):
            sources.append(calls)
            numbers.append(np.full(len(calls), number))
    source, repetition = np.concatenate(sources), np.concatenate(numbers)
    new_call = np.append(np.flatnonzero(repetition == NONE), len(source))  # of each call of the given study
    low, high = (np.searchsorted(replay.launch, source, side=side) for side in ("left", "right"))
    launch = np.repeat(np.arange(len(source)), high - low)
    offset = np.arange(len(launch)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    source_operation = low[launch] + offset
    is_operation = repetition[launch] == NONE
    new_operation = np.append(np.flatnonzero(is_operation), NONE)  # the last one is for NONE
    is_kept = {True: repetition == NONE, False: is_operation}
    columns: dict[str, Any] = {}
    for name in (*CALL_COLUMNS, *OPERATION_COLUMNS, *_INDICES, *COLLECTIVE_COLUMNS):
        column = getattr(replay, name)
        if len(column):
            of_calls = name in CALL_COLUMNS or name == "awaited"
            selected = column[source if of_calls else source_operation]
            selected = new_operation[selected] if name in _INDICES else selected
            nothing = NONE if name in (*_INDICES, "collective") else 0
            kept = np.ones(len(selected), np.bool_) if name == "stream" else is_kept[of_calls]
            columns[name] = np.where(kept, selected, nothing)
    columns |= {"launch": launch, "first_call": new_call[replay.first_call]}
    spans = study.spans
    bounds = (new_call[calls] for calls in (spans.first_call, spans.end_call, spans.first_pause, spans.end_pause))
    widened = replace(
        study,
        replay=replace(replay, **columns),
        calls=study.calls.select(source),
        operations=study.operations.select(source_operation),
        spans=RangeSpans(spans.name, *bounds),
    )
    return RepeatedCalls(
        widened, new_call[source], new_operation[source_operation], repetition, source, source_operation
    )
