"""Operations whose times contradict their launch or their stream: found, left out of every figure, and told of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.launches import match_launches
from nsys_analyzer.analysis.timeline import NONE, count_within
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KINDS, Operations
from nsys_analyzer.trace.possible import LeftOut, interval, tell
from nsys_analyzer.trace.trace import Trace

#: How far the clocks of CPU and GPU may differ besides the constant that all operations share.
CLOCK_ERROR_NS = 1_000_000
#: How long two operations of one stream may overlap: they run one after the other but for what graphs and programmatic
#: launches let overlap.
_OVERLAP_NS = 10**9
_TABLES = {table.key: table for table in (schema.KERNEL, schema.MEMCPY, schema.MEMSET, schema.GRAPH)}


@dataclass(frozen=True)
class Consistent:
    """A trace without the operations that contradict the rest of it.

    Attributes:
        trace: the trace.
        launch: shape (operations,), the launch of each operation, as :func:`match_launches` gives it.
        unmeasured: the launches of the operations that were left out, here and when the trace was read.
    """

    trace: Trace
    launch: Ints
    unmeasured: Ints


def consistent(trace: Trace) -> Consistent:
    """Leaves out what starts before its launch, and what still runs when its stream has long gone on."""
    operations = trace.operations
    launch = match_launches(operations, trace.launches)
    unmeasured = match_launches(trace.untimed, trace.launches) if trace.untimed else launch[:0]
    early = _early(operations, trace.launches.start, launch)
    endless = ~early & _endless(operations)
    wrong = early | endless
    if wrong.any():
        told = [
            *_told(operations, "a start before the launch", early),
            *_told(operations, "an end long after the next start of their stream", endless),
        ]
        unmeasured = np.concatenate([unmeasured, launch[wrong]])
        trace = replace(trace, operations=operations.select(~wrong), left_out=(*trace.left_out, *told))
        launch = launch[~wrong]
    return Consistent(trace, launch, np.unique(unmeasured[unmeasured != NONE]))


def _early(operations: Operations, called: Ints, launch: Ints) -> Bools:
    """Which operations start before their launch, by more than the clocks' error."""
    early = np.zeros(len(operations), np.bool_)
    launched = launch != NONE
    if launched.any():
        wait = operations.start[launched] - called[launch[launched]]
        early[launched] = wait < min(float(np.median(wait)), 0.0) - CLOCK_ERROR_NS
    return early


def _endless(operations: Operations) -> Bools:
    """Which operations still run a second after the next one of their stream has started."""
    endless = np.zeros(len(operations), np.bool_)
    long = np.flatnonzero((operations.end - operations.start > _OVERLAP_NS) & (operations.graph_node == 0))
    if len(long):
        streams = np.stack([operations.process, operations.device, operations.stream])
        stream = np.unique(streams, axis=1, return_inverse=True)[1].reshape(-1)
        start, end = operations.start[long] + 1, operations.end[long] - _OVERLAP_NS
        endless[long] = count_within(stream, operations.start, stream[long], start, end) > 0
    return endless


def _told(operations: Operations, why: str, wrong: Bools) -> list[LeftOut]:
    found: list[LeftOut] = []
    for kind, key in enumerate(KINDS):
        of_kind = wrong & (operations.kind == kind)
        found += tell(_TABLES[key], why, of_kind, operations.process, lambda i: _described(operations, i))
    return found


def _described(operations: Operations, index: int) -> str:
    return f"{operations.called(index)}{interval(operations.start[index], operations.end[index])}"
