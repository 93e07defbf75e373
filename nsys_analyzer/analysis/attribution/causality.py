"""Operations whose times contradict their launch or their stream: left out of every figure, with a warning."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.attribution.launches import match_launches
from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Axis, holds_any
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, blocks, distinct, distinct_rows
from nsys_analyzer.trace.columns import Operations
from nsys_analyzer.trace.metadata import CUDA, HIP
from nsys_analyzer.trace.time_checks import LeftOut, TimedRows, left_out_rows
from nsys_analyzer.trace.trace import Trace

#: How far an operation may lie before its launch, besides what nearly all of its device do: clocks drift.
CLOCK_ERROR_NS = 100_000_000
#: How far a few may, where all others lie behind theirs, and how few these are; on devices whose clocks are read
#: together with the CPU's.
_FEW_ERROR_NS, _FEW = 1_000_000, 0.01
_IN_STEP = (CUDA, HIP)
#: The share of a device's operations that may be broken where the difference of its clock is estimated from them, and
#: the share that starts before its launch where its clock is behind.
_BROKEN, _NEARLY_ALL = 0.1, 0.75
#: How long two operations of one stream may overlap: they run one after the other but for what graphs, contexts and
#: programmatic launches let overlap.
_OVERLAP_NS = 10_000_000


@dataclass(frozen=True)
class Consistent:
    """A trace without the operations that contradict the rest of it.

    Attributes:
        launch: shape (operations,), the launch of each operation, -1 for none.
        behind: shape (operations,), by how much the clock of each one's device is behind the CPU's, ns below zero.
        unmeasured: the launches of the operations that were left out, here and when the trace was read.
    """

    trace: Trace
    launch: SmallInts
    behind: Ints
    unmeasured: Ints


def consistent(trace: Trace) -> Consistent:
    """Leaves out what starts before its launch, and what still runs when its stream has long gone on."""
    operations = trace.operations
    launch = match_launches(operations, trace.launches)
    unmeasured = match_launches(trace.untimed, trace.launches) if trace.untimed else launch[:0]
    wait = waits(operations.start, trace.launches.start, launch)
    behind = _behind(operations, launch, wait)
    wait -= behind
    before = wait < -_FEW_ERROR_NS
    few = np.count_nonzero(before) <= max(1, _FEW * np.count_nonzero(launch != NONE))
    early = before if few and trace.metadata.platform in _IN_STEP else wait < -CLOCK_ERROR_NS
    endless = ~early & _endless(trace) if trace.metadata.profiler == "nsys" else np.zeros(len(operations), np.bool_)
    wrong = early | endless
    if wrong.any():
        left_out = [
            *trace.left_out,
            *_left_out(operations, "a start before the launch", early),
            *_left_out(operations, "an end long after all others and the next start of their stream", endless),
        ]
        unmeasured = np.concatenate([unmeasured, launch[wrong]])
        trace = replace(trace, operations=operations.select(~wrong), left_out=tuple(left_out))
        launch, behind = launch[~wrong], behind[~wrong]
    return Consistent(trace, launch, behind, np.unique(unmeasured[unmeasured != NONE]))


def waits(start: Ints, called: Ints, launch: SmallInts) -> Ints:
    """From each launch to the start of its operation, ns, each by its own clock; 0 without a launch."""
    wait = np.zeros(len(start), np.int64)
    for block in blocks(len(wait)):
        launched = launch[block] != NONE
        wait[block][launched] = start[block][launched] - called[launch[block][launched]]
    return wait


def _behind(operations: Operations, launch: SmallInts, wait: Ints) -> Ints:
    """Shape (operations,): below zero for a device most of whose operations start before their launch."""
    if not (wait < -CLOCK_ERROR_NS).any():
        return np.broadcast_to(np.int64(0), len(wait))
    found = np.zeros(len(wait), np.int64)
    launched = np.flatnonzero(launch != NONE)
    process, device = operations.process[launched], operations.device[launched].astype(np.int64)
    clock = Axis(process, device).place(process, device)
    for one in distinct(clock):
        mine = launched[clock == one]
        behind, most = np.quantile(wait[mine], [_BROKEN, _NEARLY_ALL], method="higher").tolist()
        found[mine] = int(behind) if most < 0 else 0
    return found


def _endless(trace: Trace) -> Bools:
    """The operations that still run when all else has ended, though their stream went on long before.

    Stream numbers are unique within a context only, so that the next operation alone may be another stream's.
    """
    operations = trace.operations
    endless = np.zeros(len(operations), np.bool_)
    of_block = [block.start + np.flatnonzero(_is_long(operations.select(block))) for block in blocks(len(operations))]
    long = np.concatenate(of_block) if of_block else np.empty(0, np.int64)
    if len(long):
        others = [np.delete(operations.end, long), trace.launches.start, operations.start]
        last = max(int(some.max(initial=LONG_AGO)) for some in others)
        stream = distinct_rows(operations.process, operations.device, operations.stream)[1].astype(np.int64)
        start, end = operations.start[long], operations.end[long]
        goes_on = holds_any(stream, operations.start, stream[long], start + 1, end)
        endless[long] = goes_on & (end > last + _OVERLAP_NS)
    return endless


def _is_long(operations: Operations) -> Bools:
    long: Bools = (operations.end - operations.start > _OVERLAP_NS) & (operations.graph_node == 0)
    return long


def _left_out(operations: Operations, why: str, wrong: Bools) -> list[LeftOut]:
    found: list[LeftOut] = []
    for kind, table in enumerate(schema.OPERATIONS_BY_KIND):
        of_kind = wrong & (operations.kind == kind)
        rows = TimedRows(table, operations.start, operations.end, operations.process, operations.called)
        found += left_out_rows(rows, why, of_kind)
    return found
