"""The figures of several ranks of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.text import StrOrText

RanksFrom = Literal["file names", "order of the call"]
Part = Literal["compute", "copies", "idle", "transferring"]
#: The ways to share work between ranks that findings ask for.
DATA_PARALLEL, SHARDED, PIPELINE = "data parallel (DDP)", "fully sharded (FSDP)", "pipeline parallel"

#: A rank counts as late from this share of a step on. In a replay without the profiler, launching times differ from
#: rank to rank, so the second share counts there.
LATE_SHARE, LATE_UNPROFILED_SHARE = 0.02, 0.1


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, ms, as of ``RankFigures``; ``number`` is that of the step."""

    number: int
    step_ms: float
    own_ms: float | None = None


@dataclass(frozen=True)
class RankFigures:
    """One rank, mean of a step in ms where no statistics are given; None where other ranks' times are needed.

    compute + exposed copy + exposed communication + idle = step, and waiting + transfer = communication.

    Attributes:
        label: "rank 1", or "device 1" where the rank is not known or a process drives several devices.
        process: its global process ID.
        communication_ms: the union of its collectives, hidden or not.
        waiting_ms, transfer_ms: of that, until the last rank has started the collective, and from then on.
        exposed_waiting_ms, exposed_transfer_ms: the same of the exposed communication.
        own_ms: the step without the exposed waiting: what it would take if no other rank were late.
        late_ms: its own time less that of the rank with least in most steps, step by step, and what slowed that rank
            down because its collectives waited beside its own work.
        late_unprofiled_ms: how much longer than the fastest rank it takes by itself without the profiler, by a replay;
            None if the profiler makes no step longer, if no rank is late under it, or if no replay tells it.
        slowest_steps: in how many steps it has the most own time.
        cpu_ms: what its program needs for a step itself, without calls that wait for the GPU.
        offset_ms: by how much its clock is ahead of the first rank's.
        shift_ns: what its capture's times are ahead of those of the first rank's capture.
        steps: one by one, those that the means are of.
    """

    label: str
    rank: int | None
    process: int
    capture: str
    source: str
    device: int
    step_ms: Stats
    compute_ms: float
    exposed_copy_ms: float
    communication_ms: float
    exposed_communication_ms: float
    idle_ms: float
    cpu_ms: float
    waiting_ms: float | None = None
    transfer_ms: float | None = None
    exposed_waiting_ms: float | None = None
    exposed_transfer_ms: float | None = None
    own_ms: Stats | None = None
    late_ms: Stats | None = None
    late_unprofiled_ms: float | None = None
    slowest_steps: int = 0
    offset_ms: float | None = None
    shift_ns: float | None = None
    steps: tuple[RankStep, ...] = ()

    @property
    def lateness_ms(self) -> Stats | float | None:
        """Returns how late it is: without the profiler if that is known."""
        return self.late_ms if self.late_unprofiled_ms is None else self.late_unprofiled_ms


@dataclass(frozen=True)
class CollectiveFigures:
    """The collectives of one kind, phase and size.

    Attributes:
        kind: one of ``COLLECTIVE_KINDS``.
        phase: the phase that launches them, empty outside.
        bytes: the message of one rank as NCCL counts it; None where it is not known.
        ranks: how many take part; None where ranks of the run are missing, and NCCL does not say.
        count: in a step, of one rank.
        duration_ms: of one on one rank.
        waiting_ms, transfer_ms: of a step, mean of the ranks, sums over collectives; None where ranks are missing.
        bus_bytes_per_s: bytes over each link in the time of transferring, as nccl-tests counts them; None where the
            size or the time is not known.
    """

    kind: str
    phase: str
    bytes: int | None
    ranks: int | None
    count: float
    duration_ms: Stats
    waiting_ms: float | None
    transfer_ms: float | None
    bus_bytes_per_s: float | None


@dataclass(frozen=True)
class LostTime:
    """A part of a rank's own time that another rank does not need, mean ms of a step.

    Attributes:
        phase: the phase of the work, or of the work that ends a gap; empty of what is transferred.
        kernel_class, module: what explains most of a loss in compute, empty where nothing does.
        cause, range: the same of idle time.
        lines: of the rank's program, behind idle time of that cause, where its stacks were sampled.
        module_line: file and line of the module's class, empty where it is not known.
    """

    phase: str
    part: Part
    ms: float
    kernel_class: str = ""
    module: str = ""
    cause: Cause | None = None
    range: str = ""
    lines: tuple[Line, ...] = ()
    module_line: str = ""


@dataclass(frozen=True)
class Alignment:
    """How well the clocks of a run agree.

    Attributes:
        one_clock: all members are of one capture.
        spread_ms: how far the ends of one collective are apart from rank to rank, a standard deviation.
        collectives: on how many it rests, of the rank with fewest.
    """

    one_clock: bool
    spread_ms: float
    collectives: int


class ParallelRun(msgspec.Struct, frozen=True):
    """Several ranks of one run, joined step by step, as a report's JSON holds them.

    Attributes:
        name: of its captures.
        strategies: how the work is shared, such as "data parallel (DDP)", from the pattern of its collectives.
        world_size: ranks of the run, None where it is not known.
        missing: the ranks that no capture is of.
        steps: how many all ranks have with the same collectives, whose means the figures are.
        takes_turns: whether the rank with most own time is another one in more than a quarter of the steps.
        slowest, fastest: the positions of the ranks with most and least own time; None where waiting is not known.
        skew_ms: how late the slowest one is, median of the steps, under the profiler.
        unprofiled_ms: a step without the profiler, where it was measured on every rank: the longest.
        lost: where it loses that, the largest part first.
        slowed_ms: by how much the own work of the rank with least took longer because its collectives waited beside it;
            ``lost`` less this is the mean difference of their own times.
        findings: what would make the step shorter, the largest saving first.
        alignment: None where clocks could not be aligned.
        ranks_from: what tells the ranks, where neither captures nor manifests do.
        notes: what a reader must know of the join.
    """

    name: str = msgspec.field(name="run")
    strategies: tuple[str, ...]
    world_size: int | None
    missing: tuple[int, ...] = msgspec.field(name="missing_ranks")
    steps: int
    ranks: tuple[RankFigures, ...]
    collectives: tuple[CollectiveFigures, ...]
    slowest: int | None = msgspec.field(default=None, name="slowest_position")
    fastest: int | None = msgspec.field(default=None, name="fastest_position")
    takes_turns: bool = False
    skew_ms: float | None = None
    unprofiled_ms: float | None = msgspec.field(default=None, name="step_unprofiled_ms")
    lost: tuple[LostTime, ...] = ()
    slowed_ms: float = 0.0
    alignment: Alignment | None = msgspec.field(default=None, name="clocks")
    ranks_from: RanksFrom | None = None
    findings: tuple[Finding, ...] = msgspec.field(default=(), name="run_findings")
    notes: tuple[StrOrText, ...] = msgspec.field(default=(), name="run_notes")

    @property
    def is_pipeline(self) -> bool:
        """Returns whether the ranks are stages, which are not meant to take equally long."""
        return PIPELINE in self.strategies

    @property
    def least_cpu_ms(self) -> float:
        """Returns what a step takes at least without the slowest rank: the others' programs need so much of the CPU."""
        return max((rank.cpu_ms for rank in self.ranks if rank is not self.slowest_rank), default=0.0)

    @property
    def step_ms(self) -> float:
        """Returns the longest step of a rank: without the profiler if that was measured, else under it."""
        return self.unprofiled_ms or max((rank.step_ms.median or 0.0) for rank in self.ranks)

    @property
    def later_than_others_ms(self) -> tuple[float, ...] | None:
        """Returns by how much the slowest rank is later than each other rank without the profiler, the least first.

        None if the profiler makes no step longer, or if no replay tells it.
        """
        slowest = self.slowest_rank
        if slowest is None or slowest.late_unprofiled_ms is None:
            return None
        late_ms = [rank.late_unprofiled_ms for rank in self.ranks if rank is not slowest]
        return tuple(sorted(slowest.late_unprofiled_ms - ms for ms in late_ms if ms is not None))

    @property
    def is_late_unprofiled(self) -> bool:
        """Returns whether the slowest rank is certainly later than the middle one without the profiler, too."""
        later = self.later_than_others_ms
        return later is None or later[len(later) // 2] >= LATE_UNPROFILED_SHARE * self.step_ms

    @property
    def slowest_rank(self) -> RankFigures | None:
        """Returns the rank with the most own time."""
        return None if self.slowest is None else self.ranks[self.slowest]
