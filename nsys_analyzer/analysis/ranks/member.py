"""What one rank did in each of its steps: the record that is joined with those of the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import Columns

#: The kinds of collective, in the order of ``Collectives.kind``'s codes.
COLLECTIVE_KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "send/receive", "all-to-all", "gather",
    "scatter", "other",
)  # fmt: skip
(
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, SEND_RECEIVE, ALL_TO_ALL, GATHER, SCATTER, OTHER_KIND,
) = range(len(COLLECTIVE_KINDS))  # fmt: skip

#: The run of captures whose order in the call is said to be that of their ranks.
BY_ORDER = "--ranks"
#: Start and end, ns.
Stretches: TypeAlias = "tuple[Ints, Ints]"


@dataclass(frozen=True)
class Collectives(Columns):
    """The collectives of a rank, each a kernel, in order of start.

    Attributes:
        length_ms: the length of a step.
        start, end: ns.
        launched: ns, when the program launched it.
        step: which of the rank's steps launched it; -1 outside.
        since: which of the steps had begun last when it was launched, whether or not it had ended; -1 before the first.
        kind: code into ``COLLECTIVE_KINDS``.
        communicator: its ID, one for all of its ranks; where that is not known, minus the stream it runs on.
        ranks: how many its communicator is of; 0 where that is not known.
        bytes: the message as NCCL counts it, of one rank, of an exchange the larger way; -1 where it is not known.
        peer: the other rank of a send or receive, in its communicator; -1 where it is not known.
        peers: how many ranks it sends to or receives from, itself among them; 0 where that is not known.
        phase: code into ``names``, the phases of steps; -1 outside.
    """

    end: Ints
    launched: Ints
    step: Ints
    since: Ints
    kind: Ints
    communicator: Ints
    ranks: Ints
    bytes: Ints
    peer: Ints
    peers: Ints
    phase: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class StepParts:
    """What fills each step on one device, shape (steps,), ns: all but ``communication`` add up to its length.

    ``communication`` is the union of collectives, hidden or not.
    """

    compute: Ints
    exposed_copy: Ints
    exposed_communication: Ints
    idle: Ints
    communication: Ints


@dataclass(frozen=True)
class Member:
    """One device of one process of a run: a rank, or one of several devices that a process drives.

    Attributes:
        capture, source: the capture's name, and its file's.
        world_size: ranks of the run, 0 where it is not known.
        process: global process ID.
        run: what the manifest calls the run, empty where it does not; ``BY_ORDER`` where the call says the ranks.
        named: the file's name but for the rank that it says, empty where the rank is known by other means.
        started_utc_ns: when the profiler's session started, 0 where that is not known.
        number: shape (steps,), the number of each step: that in its range's name, else its place.
        numbered: whether the ranges' names say the numbers.
        start, end: shape (steps,), ns.
        length_ms: the length of a step, which parts are scaled to.
        cpu: shape (steps,), ns that the program needs for a step itself: without calls that wait for the GPU.
        exposed: the stretches, in order and apart, in which collectives run and nothing else does.
    """

    capture: str
    source: str
    rank: int | None
    world_size: int
    process: int
    device: int
    started_utc_ns: int
    number: Ints
    numbered: bool
    start: Ints
    end: Ints
    length_ms: float
    parts: StepParts
    collectives: Collectives
    cpu: Ints
    exposed: Stretches = field(repr=False)
    run: str = ""
    named: str = ""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def label(self) -> str:
        """The rank, else the device."""
        return f"device {self.device}" if self.rank is None else f"rank {self.rank}"
