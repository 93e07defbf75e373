"""Writes the sentences of findings about all ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsys_analyzer.analysis.findings.finding import FindingFigures, FindingTexts
from nsys_analyzer.analysis.ranks.findings import (
    ExposedCommunicationFigures,
    LateRankFigures,
    RepeatedReductionFigures,
    UnequalWorkFigures,
    UnusedOverlapFigures,
)
from nsys_analyzer.analysis.ranks.overlap import HIDDEN_COLLECTIVE_COST, MAX_EXPOSED_BUCKETS
from nsys_analyzer.analysis.ranks.run import OverlapKind
from nsys_analyzer.report.units import format_bytes, format_count, format_ms, rounded_percent


def describe_late_rank(figures: LateRankFigures) -> FindingTexts:
    """Returns the sentences of the finding on a rank that all others wait for."""
    bounds = "The ranks cannot be replayed, so the saving is between nothing and all of the difference of own times."
    if figures.is_replayed:
        bounds = (
            f"The saving is the replayed step minus a step in which no other rank waits for {figures.rank}. Both are "
            "replayed without the profiler, at the estimated pace of each rank and with all ranks at one pace."
        )
    place = [f"# {figures.rank} loses most of this time in {figures.place}: look there first"] if figures.place else []
    return FindingTexts(
        title="All ranks wait for one rank",
        evidence=(
            f"Under the profiler, the own time of {figures.rank} (its step without waiting) is "
            f"{format_ms(figures.late_ms)} longer than the shortest own time of a rank. In {figures.slowest_steps} of "
            f"{figures.steps} steps, {figures.rank} is the slowest.",
        ),
        derivation=f"{bounds} The bounds include a variation of ±{rounded_percent(figures.tolerance)} from run to run.",
        remedy=(
            *place,
            "# what only this rank does: logging, checkpoints, longer batches; in other steps, or beside them:",
            "if rank == 0 and step % 100 == 0: log(metrics)",
            "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)",
            "# if its work equals that of other ranks: nvidia-smi -q -d CLOCK,TEMPERATURE, and its CPU affinity",
        ),
        disproof="Swap the ranks' GPUs: if the same rank is late, the cause is the program; if the same GPU is late, "
        "the cause is the machine.",
    )


def describe_unequal_work(figures: UnequalWorkFigures) -> FindingTexts:
    """Returns the sentences of the finding on ranks with unequal work."""
    tokens = ""
    if figures.most_tokens and figures.least_tokens and figures.most_tokens != figures.least_tokens:
        tokens = f", with {figures.most_tokens:,} tokens per step instead of {figures.least_tokens:,}"
    return FindingTexts(
        title="Ranks have unequal work",
        evidence=(
            f"{figures.most.capitalize()} computes {figures.ratio:.2f} times as many FLOPs as {figures.least}{tokens}. "
            f"Its GPU computes for {format_ms(figures.most_compute_ms)} per step instead of "
            f"{format_ms(figures.least_compute_ms)}.",
        ),
        derivation="The saving is the replayed step of all ranks minus a step in which the work of each rank is scaled "
        "to the mean number of FLOPs. The bounds include a variation of ±10 % between two GPUs.",
        remedy=(
            "# give each rank equally many tokens, not equally many sequences:",
            "batches = sorted_by_length[rank::world_size]  # neighbors have similar lengths",
        ),
        disproof="Give all ranks the same batch: if the step is as long, another cause limits it.",
    )


_BUCKETS_EVIDENCE = "The reduction of a bucket cannot start before its last gradient is ready."
#: For each kind of unused overlap: the title, the end of the evidence, the change in the replay, and the remedy.
_OVERLAP_TEXTS: dict[OverlapKind, tuple[str, str, str, tuple[str, ...]]] = {
    "late gather": (
        "Parameters are gathered only after the computation before it",
        "Each all-gather could transfer data while the layer before it computes.",
        "each of these all-gathers starts together with the all-gather before it",
        (
            "for layer, next_layer in itertools.pairwise(layers):  # FSDP2; the parameters of two layers are in memory",
            "    layer.set_modules_to_forward_prefetch([next_layer])",
            "    next_layer.set_modules_to_backward_prefetch([layer])",
        ),
    ),
    "large buckets": (
        "Buckets of gradients are too large to be hidden",
        _BUCKETS_EVIDENCE,
        f"only 1 to {MAX_EXPOSED_BUCKETS} buckets of 25 MiB are reduced after backward. The other buckets slow "
        f"backward down by up to {rounded_percent(HIDDEN_COLLECTIVE_COST)} of their time",
        ("model = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)",),
    ),
    "exposed bucket": (
        "The last bucket of gradients is not hidden",
        _BUCKETS_EVIDENCE,
        "a quarter to three quarters of the last bucket are reduced after backward",
        (
            "model = DistributedDataParallel(model, bucket_cap_mb=8)  # a larger parameter has a bucket of its own",
            "# or put the largest parameters, such as an embedding, where their gradients are ready earlier",
        ),
    ),
    "small buckets": (
        "Small buckets of gradients are reduced one by one",
        "Each bucket has its own launch and its own latency.",
        "small buckets are joined to larger buckets. Their bytes take no time, or the time at the largest bandwidth "
        "of a bucket",
        ("model = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)",),
    ),
}


def describe_unused_overlap(figures: UnusedOverlapFigures) -> FindingTexts:
    """Returns the sentences of the finding on collectives that could run beside other work."""
    overlap = figures.overlap
    title, cause, change, remedy = _OVERLAP_TEXTS[overlap.kind]
    size = f" of {format_bytes(overlap.bytes)}" if overlap.bytes > 0 else ""
    noun = "all-gather" if overlap.kind == "late gather" else "bucket"
    return FindingTexts(
        title=title,
        evidence=(
            f"In each step, the transfer of {format_count(overlap.count, noun)}{size} (median) takes "
            f"{format_ms(overlap.transfer_ms)}. {cause}",
        ),
        derivation=f"The saving is the replayed step of all ranks minus a step in which {change}. The bounds include a "
        "variation of ±10 % between two runs.",
        remedy=remedy,
        disproof="Time the step with this change: if it is no shorter, other work already hides the transfers, or the "
        "CPU limits the step.",
    )


def describe_repeated_reductions(figures: RepeatedReductionFigures) -> FindingTexts:
    """Returns the sentences of the finding on gradients that are reduced in each backward pass of a step."""
    remedy: tuple[str, ...] = (
        "for index, batch in enumerate(micro_batches):",
        "    is_last = index == len(micro_batches) - 1",
        "    with contextlib.nullcontext() if is_last else model.no_sync():",
        "        loss_of(model, batch).backward()",
    )
    if figures.is_sharded:
        remedy = (
            "# the gradients of the whole model then stay in memory until the last backward pass:",
            "model.set_requires_gradient_sync(is_last_micro_batch)  # FSDP2, before each backward pass",
        )
    return FindingTexts(
        title=f"Gradients are reduced {figures.reductions} times per step",
        evidence=(
            f"Each step has {figures.reductions} backward passes with equal collectives. A reduction after the "
            "last of these passes is sufficient, because the optimizer runs only then.",
            f"Under the profiler, collectives transfer for {format_ms(figures.transfer_ms)} per step, of which "
            f"{format_ms(figures.exposed_ms)} are exposed. On average, a rank also waits for the other ranks for "
            f"{format_ms(figures.waiting_ms)}.",
        ),
        derivation="The saving is the replayed step of all ranks minus a step without the reductions before the last "
        "backward pass: without their launches, without writing gradients to buckets and back, and without waiting for "
        "the latest rank in them. The bounds include the variation of launch times from run to run, and two standard "
        "errors of the length of a step.",
        remedy=remedy,
        disproof="Time the step with no reduction in all but the last backward pass: if it is no shorter, the "
        "reductions are already hidden.",
    )


def describe_exposed_communication(figures: ExposedCommunicationFigures) -> FindingTexts:
    """Returns the sentences of the finding on communication that no computation hides."""
    remedy: tuple[str, ...] = (
        "# fewer ranks for each copy of the model, or larger batches: a collective for each layer stays",
        "torch._inductor.config._micro_pipeline_tp = True  # torch.compile overlaps matmuls with their collectives",
    )
    if figures.has_replicas:
        remedy = (
            "with model.no_sync(): ...  # accumulate gradients, and reduce those of several batches at once",
            "model.register_comm_hook(None, "
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)",
            "# FSDP2: layer.set_modules_to_forward_prefetch([next_layer]); reshard_after_forward=False where memory "
            "allows",
        )
    return FindingTexts(
        title="Collectives are not hidden by computation",
        evidence=(
            f"In each step, collectives transfer for {format_ms(figures.transfer_ms)}, of which "
            f"{format_ms(figures.exposed_ms)} are exposed ({figures.rank}; waiting for other ranks is not counted).",
        ),
        derivation="The saving is between nothing and all of the exposed time, because it is unknown how much of the "
        "communication can be hidden or avoided.",
        remedy=remedy,
        disproof="Run on one GPU with an equal batch: if the step is as long, collectives do not limit it.",
    )


TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    LateRankFigures: describe_late_rank,
    UnequalWorkFigures: describe_unequal_work,
    RepeatedReductionFigures: describe_repeated_reductions,
    UnusedOverlapFigures: describe_unused_overlap,
    ExposedCommunicationFigures: describe_exposed_communication,
}
