"""Where the ranks of a run lose time: a rank to another one, and all to what would make their steps shorter."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from nsys_analyzer.analysis.findings.diagnosis import SMALLEST_SAVING
from nsys_analyzer.analysis.findings.finding import Finding, Place, times
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.run import DATA_PARALLEL, SHARDED, LostTime, ParallelRun, Part, RankFigures
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.text import rounded, rounded_percent

#: A timeline shows what a run's findings are about by its collectives.
_SEEN = Place("class", COMMUNICATION)
#: The GPU's work differs by so much from run to run, that of two GPUs and the CPU's own time by more.
_RUNS, _GPUS, _CPU_RUNS = 0.03, 0.1, 0.29
#: PyTorch's default size of a bucket of gradients, bytes; buckets so many times larger are too large.
_BUCKET, _LARGER = 25 * 2**20, 2
#: Collectives that are hidden slow what runs beside them down, by this share of their time at most: they took a
#: quarter to a third of it on an H200 (all-reduce of two ranks, over NVLink and over the host's memory).
_SLOWS = 0.35
#: A bucket may be ready late: so many of the last ones are exposed at most.
_LAST_BUCKETS = 3
#: What to try where collectives are not hidden, in a run with replicas of the model, and in others.
_OVERLAP = (
    "with model.no_sync(): ...  # accumulate gradients, and reduce those of several batches at once",
    "model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)",
    "# FSDP2: layer.set_modules_to_forward_prefetch([next_layer]); reshard_after_forward=False where memory allows",
)
_FEWER = (
    "# fewer ranks for each copy of the model, or larger batches: a collective for each layer stays",
    "torch._inductor.config._micro_pipeline_tp = True  # torch.compile overlaps matmuls with their collectives",
)
#: What makes up so much of a part explains it.
_EXPLAINS = 0.5

Key = TypeVar("Key", bound=Hashable)


# --- what one rank loses to another


def find_losses(
    slow: tuple[RankFigures, CaptureSummary], fast: tuple[RankFigures, CaptureSummary]
) -> tuple[tuple[LostTime, ...], float] | None:
    """Returns the own time of a rank less that of a faster one, ms of a step; None where a step is not known.

    Of two values the first are the rows by phase and part, the largest first, and the second is by how much the own
    work of the faster one took longer because its collectives waited beside it. A collective that waits occupies a part
    of the GPU: kernels beside it take longer than on the rank that is waited for, as far as collectives waited beside
    other work. The rows less the second value add up to what their steps differ by without exposed waiting, as far as
    all steps were looked at.
    """
    devices = [
        device
        for figures, capture in (slow, fast)
        for device in (capture.step.devices if capture.step else ())
        if device.device == figures.device
    ]
    if len(devices) < 2:
        return None
    # The time of each device but for communication, by phase and part.
    own: list[dict[tuple[str, Part], float]] = [{}, {}]
    for parts, device in zip(own, devices, strict=True):
        for phase in device.phases:
            parts[phase.phase, "compute"] = phase.compute_ms
            parts[phase.phase, "copies"] = phase.exposed_copy_ms
            parts[phase.phase, "idle"] = phase.idle_ms
    less = _less(*own)
    slowed = _take_off_slowed(less, fast[0])
    transfers = (slow[0].exposed_transfer_ms or 0.0) - (fast[0].exposed_transfer_ms or 0.0)
    rows = [LostTime(phase, part, ms) for (phase, part), ms in less.items()]
    rows = sorted((*rows, LostTime("", "transferring", transfers)), key=lambda row: -row.ms)
    # The largest loss in compute and the largest in idle time get what explains most of them.
    largest: dict[Part, int] = {}
    for place, row in enumerate(rows):
        largest.setdefault(row.part, place)
    if "idle" in largest:
        row = rows[largest["idle"]]
        causes = ({(idle.cause, idle.range or ""): idle.ms for idle in device.idle_by_cause} for device in devices)
        if cause := _most(row.ms, _less(*causes)):
            told = (idle.lines for idle in devices[0].idle_by_cause if (idle.cause, idle.range or "") == cause)
            rows[largest["idle"]] = replace(row, cause=cause[0], range=cause[1], lines=next(filter(None, told), ()))
    if "compute" in largest:
        row = rows[largest["compute"]]
        classes = _less(*({each.kernel_class: each.ms for each in device.classes} for device in devices))
        trees = [capture.modules.modules if capture.modules else () for _, capture in (slow, fast)]
        modules = _less(*({each.path: each.own_forward_ms + each.own_backward_ms for each in tree} for tree in trees))
        module = _most(row.ms, modules) or ""
        line = next((one.line for one in trees[0] if one.path == module), "")
        explained = replace(row, kernel_class=_most(row.ms, classes) or "", module=module, module_line=line)
        rows[largest["compute"]] = explained
    return tuple(rows), slowed


def _take_off_slowed(less: dict[tuple[str, Part], float], fast: RankFigures) -> float:
    """Takes off the losses what slowed the faster rank's kernels down, and returns it, ms.

    In a phase in which they take longer, as far as its other parts do not make up for it: kernels that take longer
    leave less time in which the GPU is idle.
    """
    left = (fast.waiting_ms or 0.0) - (fast.exposed_waiting_ms or 0.0)
    slowed = 0.0
    for phase in dict.fromkeys(phase for phase, _ in less):
        compute, all_ms = less.get((phase, "compute"), 0.0), sum(ms for key, ms in less.items() if key[0] == phase)
        ms = min(max(-compute, 0.0), max(-all_ms, 0.0), left)
        if ms:
            less[phase, "compute"] += ms
            slowed, left = slowed + ms, left - ms
    return slowed


def _less(here: Mapping[Key, float], there: Mapping[Key, float]) -> dict[Key, float]:
    """Returns the values of one table less those of another, without zeros."""
    keys = dict.fromkeys((*here, *there))
    return {key: ms for key in keys if (ms := here.get(key, 0.0) - there.get(key, 0.0))}


def _most(ms: float, less: Mapping[Key, float]) -> Key | None:
    """Returns the key of the largest difference, where it explains the loss."""
    largest = max(less, key=lambda key: less[key], default=None)
    return largest if largest is not None and less[largest] >= _EXPLAINS * ms > 0 else None


# --- what would make the steps shorter


def find_in_run(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns the findings of a run of several ranks, the largest saving first."""
    slowest = run.slowest_rank
    if slowest is None or slowest.own_ms is None or len(run.ranks) < 2 or run.missing:
        return ()  # of ranks that are missing nobody knows who waits for them
    step_ms = run.step_ms
    case = run, slowest, step_ms
    # The GPU's own work stays, whatever the other ranks do.
    most_ms = max(step_ms - slowest.compute_ms - slowest.exposed_copy_ms, 0.0)
    # Communication that nothing hides: for the size of the buckets, else for whatever reason.
    unhidden = list(_large_buckets(*case)) or list(_exposed(*case))
    findings = []
    left = step_ms
    for finding in sorted((*_late_rank(*case), *unhidden), key=lambda finding: -finding.saves_ms):
        low, high = (min(ms, most_ms) for ms in (finding.saves_ms_low, finding.saves_ms_high))
        if (low + high) / 2 >= SMALLEST_SAVING * step_ms:
            # They are of different time, so each leaves what those before it left, less its own saving.
            left = max(left - (low + high) / 2, 0.0)
            findings.append(replace(finding, saves_ms_low=low, saves_ms_high=high, left_after_all_ms=left, place=_SEEN))
    return tuple(findings)


def _late_rank(run: ParallelRun, slowest: RankFigures, step_ms: float) -> Iterator[Finding]:
    """Yields the rank that all others wait for."""
    others = sorted(rank.late_ms.median or 0.0 for rank in run.ranks if rank is not slowest and rank.late_ms)
    late = run.skew_ms or 0.0
    # Stages are not meant to take equally long.
    if not others or run.takes_turns or run.is_pipeline or not run.is_late_unprofiled:
        return
    # No step is shorter than what the programs of the other ranks need of the CPU.
    own = slowest.own_ms.median or 0.0 if slowest.own_ms else 0.0
    later = run.later_than_others_ms or tuple(min(late - other, own - run.least_cpu_ms) for other in reversed(others))
    least, most = later[0], later[len(later) // 2]
    most_lost = run.lost[0] if run.lost else None
    apart = _CPU_RUNS if most_lost and most_lost.part == "idle" else _GPUS
    place = most_lost.range or most_lost.module if most_lost else ""
    basis = "but no more than the other programs' CPU time allows"
    if run.later_than_others_ms:
        basis = "both replayed without the profiler"
    look = (f"# {slowest.label} loses most of that in {place}: look there first",) if place else ()
    yield Finding(
        "late_rank",
        "All ranks wait for one",
        max(least, 0.0) * (1 - apart),
        min(max(most, 0.0) * (1 + apart), max(later[-1] if run.later_than_others_ms else late, 0.0)),
        step_ms,
        step_ms,
        (
            f"Under the profiler {slowest.label} needs {rounded(late)} ms more of its own than the rank with least, "
            f"and is the slowest in {slowest.slowest_steps} of {run.steps} steps.",
        ),
        f"Its own time less that of the next rank, and less that of the middle one, {basis}; "
        f"±{rounded_percent(apart)} from run to run.",
        (
            *look,
            "# what this rank alone does: logging, checkpoints, longer batches; in other steps, or beside them:",
            "if rank == 0 and step % 100 == 0: log(metrics)",
            "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)",
            "# if it does the same as the others: nvidia-smi -q -d CLOCK,TEMPERATURE, and the CPUs that it may use",
        ),
        "Swap the ranks' GPUs: if the same rank is late, it is the program; if the same GPU is, the machine.",
        lines=most_lost.lines if most_lost else (),
    )


def _large_buckets(run: ParallelRun, slowest: RankFigures, step_ms: float) -> Iterator[Finding]:
    """Yields gradients that wait for the end of backward, since a bucket holds so many of them."""
    exposed = slowest.exposed_transfer_ms or 0.0
    # The all-reduces that backward launches, of a run that shares its data alone.
    is_alone = run.strategies == (DATA_PARALLEL,)
    rows = [row for row in run.collectives if is_alone and (row.kind, row.phase) == ("all-reduce", "backward")]
    transfer = sum(row.transfer_ms or 0.0 for row in rows)
    count = sum(row.count for row in rows)
    sizes = sorted(row.bytes or 0 for row in rows for _ in range(min(round(row.count), 2)))
    # One bucket may hold one large parameter, which cannot be split.
    usual = sizes[-2:][0] if sizes else 0
    if not transfer or usual <= _LARGER * _BUCKET:
        return
    total = sum((row.bytes or 0) * row.count for row in rows)
    buckets = max(total / _BUCKET, 1.0)
    high = exposed - min(exposed, transfer / buckets)
    low = exposed - min(exposed, _LAST_BUCKETS * transfer / buckets) - _SLOWS * high
    is_one, size = count == 1, f"{sizes[-1] / 2**20:,.0f} MiB"
    yield Finding(
        "large_buckets",
        "Buckets of gradients are too large to be hidden",
        max(low, 0.0) * (1 - _RUNS),
        min(high * (1 + _RUNS), exposed),
        step_ms,
        step_ms,
        (
            f"{times(count, 'bucket')} a step of up to {size} {'is' if is_one else 'are'} reduced in "
            f"{rounded(transfer)} ms, of which nothing hides {rounded(min(exposed, transfer))} ms: a bucket can start "
            "when its last gradient is there.",
        ),
        f"With buckets of 25 MiB the last one to {_LAST_BUCKETS} of about {rounded(buckets)} stay exposed, and the "
        f"others slow backward down by up to {rounded_percent(_SLOWS)} of their time.",
        ("model = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)",),
        "Time the step with bucket_cap_mb=25: exposed communication falls to that of the last buckets.",
    )


def _exposed(run: ParallelRun, slowest: RankFigures, step_ms: float) -> Iterator[Finding]:
    """Yields communication that nothing hides, where the stages of a pipeline are not meant to wait for it."""
    exposed = slowest.exposed_transfer_ms or 0.0
    if run.is_pipeline:
        return
    replicas = not set(run.strategies).isdisjoint((DATA_PARALLEL, SHARDED))
    remedy = _OVERLAP if replicas else _FEWER
    yield Finding(
        "exposed_communication",
        "Collectives are not hidden by computation",
        0.0,
        exposed,
        step_ms,
        step_ms,
        (
            f"Collectives transfer for {rounded(slowest.transfer_ms or 0.0)} ms a step, of which nothing hides "
            f"{rounded(exposed)} ms ({slowest.label}; waiting for other ranks is not counted).",
        ),
        "From nothing, if none of it can be hidden or left out, to all of it.",
        remedy,
        "Run on one GPU with the same batch: if the step is as long, collectives do not hold it up.",
    )
