"""The figures of a run of several ranks: each rank, the collectives, and the time that the latest rank loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.process import Cause

RanksFrom = Literal["file names", "order of the call"]
Part = Literal["compute", "copies", "idle", "transferring"]
#: Why captures are not joined with those of another run.
Separation = Literal[
    "same rank", "unknown rank", "different world sizes", "no common communicator", "different runs", "different names",
    "different times",
]  # fmt: skip
#: Why the clocks of ranks are not aligned.
AlignmentFailure = Literal[
    "no common step", "no shared collective", "all collectives differ", "no matched collective", "ends differ",
]  # fmt: skip
Schedule = Literal["GPipe", "1F1B", "GPipe or 1F1B", "interleaved", "unknown"]
NoteKind = Literal[
    "copy", "ranks from file names", "ranks from order", "missing ranks", "different steps", "differing collectives",
    "unknown communicators", "distant clocks", Separation, AlignmentFailure,
]  # fmt: skip
#: The parallel strategies on which findings depend.
DATA_PARALLEL, SHARDED, PIPELINE = "data parallel (DDP)", "fully sharded (FSDP)", "pipeline parallel"

#: What takes the time on the critical path of all ranks.
Limit = Literal["launching", "other CPU work", "work of the GPU", "communication"]

#: A way in which collectives could run beside other work, but do not. A late gather is an all-gather that begins only
#: after the computation before it. The other kinds are buckets of gradients: the last one of a backward pass (large, if
#: it is larger than usual), and small buckets, which have a launch each.
OverlapKind = Literal["late gather", "large buckets", "exposed bucket", "small buckets"]

#: A rank counts as late if its lateness is at least this share of a step.
LATE_SHARE = 0.02
#: Ranks have unequal work if one rank has at least this many times the FLOPs, and the GPU time, of another rank.
_UNEQUAL_WORK_RATIO = 1.05
#: The profiler counts as not slowing a step down if the unprofiled step takes at least this share of the profiled step.
_NEGLIGIBLE_SLOWDOWN_RATIO = 0.97


@dataclass(frozen=True)
class RankStep:
    """One step of one rank.

    Attributes:
        number: the number of the step.
        step_ms: the length of the step.
        own_ms: the length of the step without exposed waiting; None if waiting is not known.
    """

    number: int
    step_ms: float
    own_ms: float | None = None


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank. Values without statistics are means over the steps, in ms per step.

    compute + exposed copies + exposed communication + idle = step, and waiting + transfer = communication. Values that
    need the times of other ranks are None if those times are not known.

    Attributes:
        label: the name of the rank in reports, such as "rank 1"; "device 1" if the rank is not known or if one process
            uses several devices.
        rank: the number of the rank in the run; None if it is not known.
        process: the global ID of the rank's process.
        capture: the name of the rank's capture.
        source: the file name of the rank's capture.
        device: the number of the rank's GPU.
        step_ms: the length of a step.
        compute_ms: the time in which the GPU computes.
        exposed_copy_ms: the time in which the GPU only copies.
        communication_ms: the time in which at least one collective runs, hidden or exposed.
        exposed_communication_ms: the time in which collectives run and the GPU neither computes nor copies.
        idle_ms: the time in which nothing runs on the GPU.
        cpu_ms: the CPU time that the program needs for a step, without calls that wait for the GPU.
        waiting_ms: the part of the communication in which the last rank has not yet started the collective.
        transfer_ms: the part of the communication in which the collective transfers data.
        exposed_waiting_ms: the part of the exposed communication in which the last rank has not yet started.
        exposed_transfer_ms: the part of the exposed communication in which the collective transfers data.
        own_ms: the length of the step without exposed waiting, as if no other rank were late.
        late_ms: the rank's own time minus the fastest rank's own time, step by step. It is corrected for the waiting
            collectives of the fastest rank, which slowed other work on that rank's GPU down.
        late_unprofiled_ms: by how much a step without the profiler would be shorter if no other rank waited for this
            rank, by a replay. It is known for the slowest rank and for the rank that delays the others most besides.
            None for other ranks, if no rank is late under the profiler, or if no replay is possible.
        slowest_steps: the number of steps in which the rank has the longest own time.
        offset_ms: how far the rank's clock is ahead of the first rank's clock.
        shift_ns: how far the times in the rank's capture are ahead of the times in the first rank's capture.
        steps: the steps that the means are taken from.
        flops: the FLOPs of the step in which the program's operators were counted; None if they were not counted.
        tokens: the batch size × the context length of the rank; None if they are not known.
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
    flops: float | None = None
    tokens: int | None = None

    @property
    def lateness_ms(self) -> Stats | float | None:
        """Returns how late the rank is: without the profiler if that is known, else under the profiler."""
        return self.late_ms if self.late_unprofiled_ms is None else self.late_unprofiled_ms


@dataclass(frozen=True)
class CollectiveFigures:
    """The figures of the collectives of one kind, phase and message size.

    Attributes:
        kind: one of ``COLLECTIVE_KINDS``.
        phase: the phase that launches the collectives; empty outside of the phases.
        bytes: the message size of one rank, as NCCL counts it; None if it is not known.
        ranks: the number of ranks that take part; None if captures of ranks are missing and NCCL does not record it.
        count: the number of these collectives per step and rank.
        duration_ms: the duration of one collective on one rank.
        waiting_ms: the total waiting per step, as a mean over the ranks; None if captures of ranks are missing.
        transfer_ms: the total transfer time per step, as a mean over the ranks; None if captures of ranks are missing.
        bus_bytes_per_s: the bytes that pass each link per second of transfer time, as nccl-tests defines bus bandwidth;
            None if the size or the time is not known.
        attainable_ms: ``transfer_ms`` at the bus bandwidth that the run's largest collectives reach; None if the size
            or the time is not known.
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
    attainable_ms: float | None = None


@dataclass(frozen=True)
class LostTime:
    """The difference between two ranks in one part of their own time.

    Attributes:
        phase: the phase of the work, or of the work that ends an idle gap; empty for transfers.
        part: what the time is spent on.
        ms: the mean time that the slower rank loses per step; negative if it needs less time than the faster rank.
        kernel_class, module: the class and the module that cause most of a loss in compute; empty if none does.
        cause, range: the cause and the range with most of a loss in idle time.
        lines: the lines of the slower rank's program that cause the idle time, if its call stacks were sampled.
        module_line: the file and line of the module's class; empty if it is not known.
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
class Stage:
    """One stage of a pipeline. If the pipeline has replicas, the times are medians over the ranks of the stage.

    Attributes:
        ranks: the labels of the ranks that run the stage, one for each replica of the pipeline.
        own_ms: the length of a step of the stage without exposed waiting.
        bubble_ms: the time per step in which the stage only waits in sends and receives.
    """

    ranks: tuple[str, ...]
    own_ms: float
    bubble_ms: float


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a run, under the profiler.

    Attributes:
        schedule: the order of the forward and backward passes, inferred from the first stage.
        micro_batches: the number of micro-batches per step.
        chunks: the number of parts of the model that each stage has; more than 1 if the schedule is interleaved.
        stages: the stages in the order of the forward pass.
        bubble_share: the part of a step in which a stage only waits in sends and receives, as a mean over the stages.
        equal_stages_share: ``bubble_share`` if all p stages took equally long: (p − 1) / (m · chunks + p − 1) for m
            micro-batches.
        saves_ms: the most that twice as many micro-batches of half the size would save per step.
        slow_rank: the label of a rank that is always slower than the other ranks of its stage; empty if there is none.
        slow_rank_stage: the number of the stage of ``slow_rank``, counted from 1; 0 if there is no such rank.
        slow_rank_ms: the own time of ``slow_rank`` per step minus the median own time of the ranks of its stage.
    """

    schedule: Schedule
    micro_batches: int
    chunks: int
    stages: tuple[Stage, ...]
    bubble_share: float
    equal_stages_share: float
    saves_ms: float
    slow_rank: str = ""
    slow_rank_stage: int = 0
    slow_rank_ms: float = 0.0

    @property
    def longest_stage(self) -> int:
        """Returns the number of the stage with the longest own time, counted from 1."""
        return 1 + max(range(len(self.stages)), key=lambda place: self.stages[place].own_ms)


@dataclass(frozen=True)
class SlowLink:
    """A group of ranks whose collectives transfer for longer than the same collectives of other groups.

    Attributes:
        ranks: the labels of the ranks.
        ratio: the time of the transfers of these ranks ÷ the usual time, which is the median over all groups.
        later_ms: by how much longer the transfers of a step take than usual, ms.
    """

    ranks: tuple[str, ...]
    ratio: float
    later_ms: float


@dataclass(frozen=True)
class UnusedOverlap:
    """Collectives that could run beside other work of the GPU, but do not.

    Attributes:
        kind: what the collectives are.
        count: the number of these collectives per step and rank.
        bytes: the median of their message sizes; -1 if it is unknown.
        transfer_ms: their transfer time per step and rank.
        saves_ms_low, saves_ms_high: the least and the most that a step would be shorter, in any replay.
    """

    kind: OverlapKind
    count: float
    bytes: int
    transfer_ms: float
    saves_ms_low: float
    saves_ms_high: float


@dataclass(frozen=True)
class ReplayedRun:
    """A step of all ranks, replayed together. Savings are (least, most) in any replay without the profiler, ms.

    A collective begins when its last rank arrives, and takes as long as the transfer took in the capture. If the step
    was measured without the profiler, the CPU's pace is fitted to the measured length for savings and limits.

    Attributes:
        estimated_ms: the bounds of the length of a step without the profiler, from the capture alone.
        step_ms: the length of a step if the pace of each rank alone is fitted to the rank's own measured step, and all
            ranks are then replayed together; None if the steps were not measured.
        spread_ms: the standard deviation of steps: of the measured steps, or else of the replayed steps.
        limits: the share of each kind of time on the critical path of all ranks, the largest share first.
        without_transfers_ms: the saving per step if the transfers of collectives took no time.
        overlaps: the collectives that could run beside other work, but do not.
        reduced_once_ms: the saving per step if each gradient was reduced once; None if that is so already.
        equal_work_ms: the saving per step if all ranks had the mean number of FLOPs; None if they have.
    """

    estimated_ms: tuple[float, float]
    step_ms: float | None
    spread_ms: float
    limits: dict[Limit, float]
    without_transfers_ms: tuple[float, float]
    overlaps: tuple[UnusedOverlap, ...] = ()
    reduced_once_ms: tuple[float, float] | None = None
    equal_work_ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Alignment:
    """How well the clocks of the ranks agree.

    Attributes:
        one_clock: whether all ranks are in one capture.
        spread_ms: the standard deviation of the times at which the ranks see the end of one collective.
        collectives: the smallest number of shared collectives from which the clock of a rank was aligned.
    """

    one_clock: bool
    spread_ms: float
    collectives: int


@dataclass(frozen=True)
class JoinNote:
    """A note on how ranks were joined. ``report.sections.ranks`` writes its sentence.

    Attributes:
        kind: what the note is about.
        names: the captures or ranks that the note is about.
        numbers: ranks, world sizes or step numbers. For "different steps": the number of steps that all ranks have,
            followed by the number of steps of each rank in ``names``.
        ms: how far clocks or the ends of collectives are apart.
    """

    kind: NoteKind
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    ms: float = 0.0


class ParallelRun(msgspec.Struct, frozen=True):
    """Several ranks of one run, joined step by step, in the form of a report's JSON.

    Attributes:
        name: the name of the run, made from the names of its captures.
        strategies: how the ranks share the work, such as "data parallel (DDP)", inferred from their collectives.
        world_size: the number of ranks of the run; None if it is not known.
        missing: the ranks without a capture.
        steps: the number of steps that all ranks have with equal collectives. Figures are means over these steps.
        ranks: the figures of each rank.
        collectives: the figures of the collectives.
        slowest, fastest: the positions of the ranks with the longest and the shortest own time; None if waiting is not
            known.
        takes_turns: whether ranks other than ``slowest`` have the longest own time in more than a quarter of the steps.
        skew_ms: how late the slowest rank is under the profiler, as a median over the steps.
        unprofiled_ms: the longest step of a rank without the profiler, if it was measured on every rank.
        replayed: the step of all ranks, replayed without the profiler; None if no replay is possible.
        late_bounds_ms: the least and the most that a step would be shorter, in any replay, if no other rank waited for
            the slowest rank; None if that rank is not late under the profiler, or if no replay is possible.
        lost: the time that the slowest rank loses to the fastest rank, by part, the largest part first.
        slowed_ms: the time by which the work of the fastest rank took longer, because waiting collectives occupied a
            part of its GPU. The sum of ``lost`` minus this value is the mean difference of the two ranks' own times.
        alignment: how well the ranks' clocks agree; None if the clocks could not be aligned.
        ranks_from: the source of the rank numbers, if neither captures nor manifests contain them.
        pipeline: the stages, schedule and micro-batches of a pipeline; None if the ranks form none, or if it is not
            known which rank waits.
        slow_link: the group of ranks that transfers slowest, if it is slower than other groups; else None.
        reductions: the number of backward passes per step that reduce the same gradients.
        findings: changes that would make the step shorter, the largest saving first.
        notes: the notes on how the ranks were joined.
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
    replayed: ReplayedRun | None = msgspec.field(default=None, name="replayed_step")
    late_bounds_ms: tuple[float, float] | None = None
    lost: tuple[LostTime, ...] = ()
    slowed_ms: float = 0.0
    alignment: Alignment | None = msgspec.field(default=None, name="clocks")
    ranks_from: RanksFrom | None = None
    pipeline: Pipeline | None = None
    slow_link: SlowLink | None = None
    reductions: int = msgspec.field(default=1, name="gradient_reductions")
    findings: tuple[Finding, ...] = msgspec.field(default=(), name="run_findings")
    notes: tuple[JoinNote, ...] = msgspec.field(default=(), name="run_notes")

    @property
    def is_pipeline(self) -> bool:
        """Returns whether the ranks are pipeline stages, which may take different times by design."""
        return PIPELINE in self.strategies

    @property
    def is_delayed_by_link(self) -> bool:
        """Returns whether the slowest rank is one of the ranks that exchange data over a slow link."""
        slowest = self.slowest_rank
        return slowest is not None and self.slow_link is not None and slowest.label in self.slow_link.ranks

    @property
    def step_ms(self) -> float:
        """Returns the longest step of a rank: without the profiler if it was measured, else under the profiler."""
        return self.unprofiled_ms or max((rank.step_ms.median or 0.0) for rank in self.ranks)

    @property
    def unequal_work(self) -> tuple[RankFigures, RankFigures] | None:
        """Returns the ranks with the most and the fewest FLOPs, if replicas of the model have unequal work.

        The GPU of the rank with more FLOPs must compute for longer, because FLOPs are counted in one step only.
        """
        counted = [rank for rank in self.ranks if rank.flops]
        if len(counted) < len(self.ranks) or {DATA_PARALLEL, SHARDED}.isdisjoint(self.strategies) or self.is_pipeline:
            return None
        most, least = (choose(counted, key=lambda rank: rank.flops or 0.0) for choose in (max, min))
        is_unequal = (most.flops or 0.0) >= _UNEQUAL_WORK_RATIO * (least.flops or 0.0)
        return (most, least) if is_unequal and most.compute_ms >= _UNEQUAL_WORK_RATIO * least.compute_ms else None

    @property
    def is_slowed(self) -> bool:
        """Returns whether the profiler makes the steps of the ranks notably longer."""
        profiled_ms = max((rank.step_ms.median or 0.0) for rank in self.ranks)
        unprofiled_ms = self.unprofiled_ms or (self.replayed.estimated_ms[1] if self.replayed else profiled_ms)
        return unprofiled_ms < _NEGLIGIBLE_SLOWDOWN_RATIO * profiled_ms

    @property
    def is_late(self) -> bool:
        """Returns whether the slowest rank delays the other ranks, and neither a slow link nor a pipeline explains it.

        The delay must exceed the standard deviation of steps. If the profiler makes steps longer, the delay comes from
        a replay without the profiler, and must exceed the delay of any other rank by the standard deviation of steps.
        """
        slowest = self.slowest_rank
        if self.is_pipeline or self.is_delayed_by_link or self.takes_turns or slowest is None or self.skew_ms is None:
            return False
        delay_ms = self.skew_ms
        if self.is_slowed and slowest.late_unprofiled_ms is not None:
            others_ms = (rank.late_unprofiled_ms or 0.0 for rank in self.ranks if rank is not slowest)
            delay_ms = min(delay_ms, slowest.late_unprofiled_ms - max(others_ms, default=0.0))
        return delay_ms >= max(LATE_SHARE * self.step_ms, self.replayed.spread_ms if self.replayed else 0.0)

    @property
    def slowest_rank(self) -> RankFigures | None:
        """Returns the rank with the longest own time; None if waiting is not known."""
        return None if self.slowest is None else self.ranks[self.slowest]
