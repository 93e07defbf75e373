"""Reports how the ranks of a run work together: which rank waits for which, and how long collectives take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.ranks.run import LATE_SHARE
from nsys_analyzer.analysis.steps.process import OUTSIDE_PHASES
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS, Evidence, make_median_cell
from nsys_analyzer.report.model import Answer, Block, Details, Field, Listing, Paragraph, Section, make_table
from nsys_analyzer.report.sections.bars import make_rank_bars
from nsys_analyzer.report.sections.counters import describe_clocks_of_ranks
from nsys_analyzer.report.sections.energy import describe_energy_of_ranks, tabulate_gpus
from nsys_analyzer.report.sections.findings import run_finding_blocks
from nsys_analyzer.report.sections.parallel import describe_pipeline, describe_slow_link, describe_slow_rank_of_stage
from nsys_analyzer.report.units import format_count, format_ms, format_ms_range
from nsys_analyzer.text import StrOrText, join_texts, phrase, plain, plural, rounded_percent, strong

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import (
        Alignment,
        CollectiveFigures,
        JoinNote,
        LostTime,
        ParallelRun,
        RankFigures,
        ReplayedRun,
    )

#: Losses below this share of a step are added up in one row.
_MIN_ROW_SHARE = 0.002
#: The most rows of the tables of collectives and of losses.
_MAX_ROWS = 12
#: The most steps and missing ranks that a sentence names.
_MAX_NAMED_STEPS, _MAX_NAMED_RANKS = 3, 16
#: The word for each part of a step that sentences use.
_PART_WORDS = {"compute": "compute", "copies": "copies", "idle": "idle time", "transferring": "data transfer"}
_RANK_CAPTION = "The median step of each rank under the profiler, ms:"
#: The ID of the finding about a late rank.
_LATE_RANK_ID = "late_rank"
_LEGEND = (
    phrase(
        "For each rank, compute + exposed copies + waiting + transferring + idle = step. *Waiting* is exposed "
        "communication before the last rank has started the collective. *Transferring* is exposed communication after "
        "the last rank has started it. The steps of the ranks are joined by their numbers, and the collectives by "
        "their order in a step and communicator."
    ),
    phrase(
        "*Own time* is the step without waiting. A rank is *late* by the difference between its own time and the "
        "shortest own time. *Unprofiled* lateness is by how much a step would be shorter if no other rank waited for "
        "this rank. This time comes from replays without the profiler. In some replays, all ranks launch at the pace "
        "of the fastest rank. The replay with the shortest time counts. A rank is late if its unprofiled lateness "
        "exceeds the standard deviation of steps, and exceeds that of every other rank by at least as much."
    ),
    phrase(
        "*Bytes* is the message size of one rank, as NCCL counts it. *Bus bandwidth* is the bytes over each link ÷ the "
        "median transfer time, as nccl-tests defines it. *Attainable* is the time of transferring at the bus bandwidth "
        "of the collectives with the most bytes."
    ),
)
_NO_MESSAGE_SIZES = phrase(
    "The message sizes are not known, because the capture does not contain them. For Nsight Systems, repeat `nsys "
    "export` with `--include-blobs=true`. For PyTorch, use a newer version, which records them."
)


def answer_ranks(evidence: Evidence) -> Section:
    """Returns the section on runs of several ranks: their steps, which rank is late, and what would shorten a step."""
    blocks: list[Block] = []
    if unjoined := [run.ranks[0] for run in evidence.runs if len(run.ranks) == 1 and run.world_size != 1]:
        text = phrase(
            "The collectives of {} could not be joined with the collectives of another rank. Therefore it is unknown "
            "whether collectives transfer data or wait for a late rank, and what a change would save. Give the "
            "captures of all ranks, in order, with `--ranks`.",
            join_texts(", ", [phrase("`{}`", rank.capture) for rank in unjoined]),
        )
        blocks.append(Paragraph(text))
    for run in evidence.runs:
        blocks += [Paragraph(strong(run.name))] if len(evidence.runs) > 1 else []
        blocks += _describe_run(run, evidence.captures)
    return Section("ranks", "Ranks", tuple(blocks))


def _describe_run(run: ParallelRun, captures: Sequence[CaptureSummary]) -> Iterator[Block]:
    """Yields how long a step takes, which rank is late and why, what would shorten the step, and the tables folded."""
    count = max(len(run.ranks), run.world_size or 0)
    noun = plural(count, "device" if all(rank.rank is None for rank in run.ranks) else "rank")
    strategies = f", {' and '.join(run.strategies)}" if run.strategies else ""
    sentences = (f"{count} {noun}{strategies}.", _describe_step(run), describe_late_rank(run))
    yield Answer(join_texts(" ", sentences), run.name)
    yield Answer(_describe_communication(run), run.name)
    if run.unequal_work:
        most, least = run.unequal_work
        ratio = (most.flops or 0.0) / (least.flops or 1.0)
        tokens = f" ({most.tokens:,} and {least.tokens:,} tokens)" if most.tokens and least.tokens else ""
        text = f"The ranks have unequal work: {most.label} computes {ratio:.2f} times as many FLOPs per step as"
        yield Answer(f"{text} {least.label}{tokens}.", run.name)
    if run.slow_link and not run.is_delayed_by_link:
        yield Answer(describe_slow_link(run.slow_link), run.name)
    if run.pipeline:
        yield Answer(describe_pipeline(run.pipeline), run.name)
    titles = find_rank_titles(captures, [run])
    energies = [capture.energy for capture in captures if capture.title in titles and capture.energy]
    if energies and len(energies) == len(titles):
        yield Answer(describe_energy_of_ranks(energies), run.name)
    for sentence in describe_clocks_of_ranks([capture for capture in captures if capture.title in titles]):
        yield Answer(sentence, run.name)
    if bars := make_rank_bars(run):
        yield bars
    yield from run_finding_blocks(run)
    detail_blocks: list[Block] = [make_table(_RANK_FIELDS, run.ranks, _RANK_CAPTION, capture=run.name)]
    if gpus := [gpu for energy in energies for gpu in energy.gpus]:
        detail_blocks.append(tabulate_gpus(gpus, run.name, "The energy of each GPU, without the profiler:"))
    detail_blocks += _tabulate_losses(run)
    if run.collectives:
        rows = run.collectives
        left_out = f", without {len(rows) - _MAX_ROWS} smaller rows" if len(rows) > _MAX_ROWS else ""
        caption = f"The collectives{left_out} (waiting and transferring: ms per step, mean of the ranks):"
        differ_in_ranks = len({row.ranks for row in rows}) > 1
        fields = [field for field in _COLLECTIVE_FIELDS if field.title != "ranks" or differ_in_ranks]
        detail_blocks.append(make_table(fields, rows[:_MAX_ROWS], caption, capture=run.name))
        if all(row.bytes is None for row in rows):
            detail_blocks.append(Paragraph(_NO_MESSAGE_SIZES, capture=run.name))
    facts = [_describe_clocks(run.alignment)] if run.alignment else []
    facts += [_describe_replay(run, run.replayed)] if run.replayed else []
    detail_blocks.append(Listing((*facts, *describe_joins(run), *_LEGEND), capture=run.name))
    yield Details(f"Rank by rank: {run.name}", tuple(detail_blocks), run.name)


def find_rank_titles(captures: Iterable[CaptureSummary], runs: Iterable[ParallelRun]) -> frozenset[str]:
    """Returns the titles of the captures that are ranks of a run with several ranks."""
    ranks = {(rank.capture, rank.process) for run in runs if len(run.ranks) > 1 for rank in run.ranks}
    return frozenset(c.title for c in captures if any((rank.capture, rank.process) in ranks for rank in c.members))


# --- the sentences about a run


def _describe_step(run: ParallelRun) -> str:
    """Returns the length of a step, measured or else estimated without the profiler, and what limits the step."""
    profiled_ms, replayed = max((rank.step_ms.median or 0.0) for rank in run.ranks), run.replayed
    if run.unprofiled_ms:
        length = f"{format_ms(run.unprofiled_ms)} (measured without the profiler)."
    elif replayed:
        estimate = format_ms_range(*replayed.estimated_ms)
        length = f"{format_ms(profiled_ms)} under the profiler, and about {estimate} without it (from a replay)."
    else:
        length = f"{format_ms(profiled_ms)} under the profiler."
    if not replayed:
        return f"A step takes {length}"
    limit, share = next(iter(replayed.limits.items()))
    limited = f"{limit[0].upper()}{limit[1:]} limits the step ({rounded_percent(share)} of the critical path)."
    return f"A step takes {length} {limited}"


def _describe_replay(run: ParallelRun, replayed: ReplayedRun) -> str:
    """Returns the sentences on how long a replayed step is, beside the measured length."""
    estimate = f"From the capture alone, a step without the profiler takes {format_ms_range(*replayed.estimated_ms)}"
    if not run.unprofiled_ms or not replayed.step_ms:
        return f"All ranks were replayed together. {estimate}."
    return (
        f"All ranks were replayed together. {estimate}. If the pace of each rank alone is fitted to its own measured "
        f"step, a step of all ranks takes {format_ms(replayed.step_ms)}. The measured step takes "
        f"{format_ms(run.unprofiled_ms)}."
    )


def describe_late_rank(run: ParallelRun) -> StrOrText:
    """Returns a sentence on the rank that the other ranks wait for, or a sentence that no rank is late."""
    slowest = run.slowest_rank
    if slowest is None or run.skew_ms is None or slowest.step_ms.median is None or len(run.ranks) < 2:
        return "It is not known which rank waits for which."
    if run.slow_link and run.is_delayed_by_link:
        return describe_slow_link(run.slow_link)
    if run.pipeline and run.pipeline.slow_rank:
        return describe_slow_rank_of_stage(run.pipeline)
    skew, profiled = format_ms(run.skew_ms), " under the profiler" if run.unprofiled_ms or run.is_slowed else ""
    if not run.is_late:
        if run.skew_ms < LATE_SHARE * slowest.step_ms.median:
            return f"No rank is late: the own times of the ranks differ by {skew}{profiled}."
        if run.takes_turns:
            return "No rank is always late: the latest rank changes from step to step."
        if run.is_pipeline and run.is_slowed:
            known = "It is not known which stage is the longest without the profiler."
            return f"{known} Under the profiler, {slowest.label} has the longest stage, by {skew} of own time."
        if run.is_pipeline:
            return f"{slowest.label.capitalize()} has the longest stage, by {skew} of own time{profiled}."
        conclusion = "No rank is late" if run.unprofiled_ms else "No rank is known to be late"
        delay = f"A delay of {skew} on {slowest.label} is no longer than the differences between steps."
        if run.is_slowed:
            delay = f"{slowest.label.capitalize()} is late by {skew} only under the profiler, which delays launches."
        return f"{conclusion} without the profiler. {delay}"
    largest_loss = run.lost[0] if run.lost and run.lost[0].ms > 0 else None
    steps = f"in {slowest.slowest_steps} of {run.steps} steps"
    sentences: list[StrOrText] = [f"{slowest.label.capitalize()} is late by {skew} {steps}."]
    if run.is_slowed and slowest.late_unprofiled_ms:
        unprofiled = format_ms(slowest.late_unprofiled_ms)
        sentences = [
            f"{slowest.label.capitalize()} is late by {unprofiled} without the profiler (from a replay).",
            f"Under the profiler, it is late by {skew} {steps}.",
        ]
    sentences += [phrase("Its largest loss is {}.", _describe_loss(largest_loss))] if largest_loss else []
    finding = next((finding for finding in run.findings if finding.id == _LATE_RANK_ID), None)
    if finding:
        saving = format_ms_range(finding.saves_ms_low, finding.saves_ms_high)
        sentences.append(f"Without this delay, a step would be {saving} shorter.")
    else:
        sentences.append("Without this delay, a step would hardly be shorter.")
    return join_texts(" ", sentences)


def _describe_loss(row: LostTime) -> StrOrText:
    """Returns a loss in words: "13.5 ms of idle time (launching) in forward"."""
    reason, lost_time = _describe_reason(row), f"{format_ms(row.ms)} of {_PART_WORDS[row.part]}"
    loss = phrase("{} ({})", lost_time, reason) if plain(reason) else lost_time
    if row.part == "transferring":
        return loss
    return join_texts(" ", (loss, row.phase if row.phase == OUTSIDE_PHASES else f"in {row.phase}"))


def _describe_reason(row: LostTime) -> StrOrText:
    """Returns what causes most of a loss: its cause, range, class, module and line, as far as they are known."""
    words: list[StrOrText] = [CAUSE_WORDS[row.cause]] if row.cause else []
    words += [phrase("range `{}`", row.range)] if row.range else []
    words += [row.kernel_class] if row.kernel_class else []
    words += [phrase("module `{}`", row.module)] if row.module else []
    words += [phrase("`{}`", line)] if (line := row.lines[0].place if row.lines else row.module_line) else []
    return join_texts(", ", words)


def _describe_communication(run: ParallelRun) -> str:
    """Returns the sentence on the exposed communication of a step, on the rank that has the most of it."""
    rank = max(run.ranks, key=lambda rank: rank.exposed_communication_ms)
    exposed_ms, step_ms, waiting_ms = rank.exposed_communication_ms, rank.step_ms.median, rank.exposed_waiting_ms
    share = f" ({rounded_percent(exposed_ms / step_ms)} of the step)" if step_ms else ""
    profiled = " under the profiler" if run.unprofiled_ms else ""
    sentence = f"In a step of {rank.label}{profiled}, {format_ms(exposed_ms)}{share} are exposed communication"
    return f"{sentence}." if waiting_ms is None else f"{sentence}, of which {format_ms(waiting_ms)} are waiting."


def _describe_clocks(alignment: Alignment) -> str:
    """Returns the sentence on how well the clocks agree."""
    collectives = format_count(alignment.collectives, "collective")
    if alignment.one_clock:
        return (
            f"All ranks use one clock: the ends of {collectives} differ by {format_ms(alignment.spread_ms)} (standard "
            "deviation)."
        )
    return (
        f"The clocks of the captures were aligned on the ends of {collectives} that the ranks share. After the "
        f"alignment, the clocks differ by {format_ms(alignment.spread_ms)} (standard deviation)."
    )


# --- the sentences about how ranks were joined

#: The reason why two captures are not joined, by the kind of the note. The braces take the numbers of the note.
_SEPARATION_REASONS = {
    "same rank": "both have rank {}",
    "unknown rank": "the rank of one of them is not known",
    "different world sizes": "one belongs to a run of {} ranks, the other to a run of {}",
    "no common communicator": "they share no communicator",
    "different runs": "their manifests name different runs",
    "different names": "their names differ in more than the rank",
    "different times": "one had ended before the other began",
}
#: The sentences of notes without figures, by the kind of the note.
_NOTES_WITHOUT_FIGURES: dict[str, StrOrText] = {
    "ranks from file names": "The rank of each capture is taken from its file name, because the captures lack it.",
    "ranks from order": phrase("Ranks are assigned in the order in which the captures were given (`--ranks`)."),
    "no common step": "The ranks have no step number in common, so the report does not compare their steps.",
    "all collectives differ": "The collectives of every step differ from rank to rank, so waiting time is unknown.",
    "no matched collective": "No collective could be matched with a collective of another rank, so waiting is unknown.",
}


def describe_joins(run: ParallelRun) -> tuple[StrOrText, ...]:
    """Returns sentences on how the ranks were joined, one for each note."""
    return tuple(_describe_note(note, run) for note in run.notes)


def _describe_note(note: JoinNote, run: ParallelRun) -> StrOrText:
    numbers, count = note.numbers, len(note.numbers)
    if note.kind in _NOTES_WITHOUT_FIGURES:
        return _NOTES_WITHOUT_FIGURES[note.kind]
    if note.kind in _SEPARATION_REASONS:
        return phrase("`{}` and `{}` are not joined: {}.", *note.names, _SEPARATION_REASONS[note.kind].format(*numbers))
    if note.kind == "copy":
        return phrase("`{}` is the same capture as `{}`, and counts once.", *note.names)
    if note.kind == "missing ranks":
        ending = f" and {count - _MAX_NAMED_RANKS:,} more" if count > _MAX_NAMED_RANKS else ""
        ranks = f"{plural(count, 'rank')} {', '.join(map(str, numbers[:_MAX_NAMED_RANKS]))}{ending}"
        pronoun = "it" if count == 1 else "them"
        effect = f"it is unknown which ranks wait for {pronoun}"
        if run.alignment:
            effect = f"time spent waiting for {pronoun} counts as transferring"
        return phrase("There is no capture of {}, so {}.", ranks, effect)
    if note.kind == "different steps":
        common, *steps = numbers
        counts = ", ".join(f"{label} has {number}" for label, number in zip(note.names, steps, strict=True))
        return phrase("The ranks have different steps ({}). The analysis uses the {} common steps.", counts, common)
    if note.kind == "differing collectives":
        steps_named = ", ".join(map(str, numbers[:_MAX_NAMED_STEPS]))
        ending = ", …" if count > _MAX_NAMED_STEPS else ""
        noun = plural(count, "step")
        return phrase(
            "No figure includes {} {} whose collectives differ from rank to rank ({} {}{}).",
            count, noun, noun, steps_named, ending,
        )  # fmt: skip
    if note.kind == "unknown communicators":
        return phrase(
            "The captures do not name communicators. The report assumes that each collective includes all {} ranks, "
            "which is wrong if groups of ranks have communicators of their own. For Nsight Systems, `nsys export "
            "--include-blobs=true` keeps the communicators.",
            len(note.names),
        )
    if note.kind == "distant clocks":
        return phrase(
            "The captures' clocks are {:,.0f} ms apart, more than half a step. If the captures did not begin with the "
            "same step, put the number of each step into the name of its range, as in `step 17`.",
            note.ms,
        )
    if note.kind == "no shared collective":
        verb = "shares" if len(note.names) == 1 else "share"
        labels = ", ".join(note.names)
        return phrase("The clocks cannot be aligned: {} {} no collective with the other ranks.", labels, verb)
    return phrase("The clocks cannot be aligned: collectives end {:.3g} ms apart from rank to rank.", note.ms)


# --- the tables


def _tabulate_losses(run: ParallelRun) -> Iterator[Block]:
    """Yields the table of where the slowest rank loses time to the fastest one, if a rank is late."""
    slowest = run.slowest_rank
    if slowest is None or run.fastest is None or run.skew_ms is None:
        return
    step_ms = slowest.step_ms.median or 0.0
    if run.skew_ms < LATE_SHARE * step_ms:
        return
    large_losses = [row for row in run.lost if abs(row.ms) >= _MIN_ROW_SHARE * step_ms][:_MAX_ROWS]
    smaller_ms = sum(row.ms for row in run.lost) - sum(row.ms for row in large_losses)
    rows: list[tuple[str, StrOrText, StrOrText, float]] = [
        (row.phase, row.part, _describe_reason(row), row.ms) for row in large_losses
    ]
    rows += [("", "smaller losses", "", smaller_ms)] if abs(smaller_ms) >= _MIN_ROW_SHARE * step_ms else []
    rows += [("", "all", "", sum(row.ms for row in run.lost))]
    fastest = run.ranks[run.fastest].label
    caption = f"The time that {slowest.label} loses to {fastest} under the profiler, ms per step (negative: gains):"
    yield make_table(_LOSS_FIELDS, rows, caption, capture=run.name, names=3)


_RANK_FIELDS: tuple[Field[RankFigures], ...] = (
    Field("rank", "text", lambda row: row.label),
    Field("step", "ms", lambda row: row.step_ms.median),
    Field("compute", "ms", lambda row: row.compute_ms),
    Field("copies", "ms", lambda row: row.exposed_copy_ms or None),
    Field("waiting", "ms", lambda row: row.exposed_waiting_ms),
    Field("transferring", "ms", lambda row: row.exposed_transfer_ms),
    Field("idle", "ms", lambda row: row.idle_ms),
    Field("hidden communication", "ms", lambda row: row.communication_ms - row.exposed_communication_ms),
    Field("own time", "ms", lambda row: row.own_ms.median if row.own_ms else None),
    Field("late by (least – most)", "ms", lambda row: make_median_cell(row.late_ms)),
    Field("late by, unprofiled", "ms", lambda row: row.late_unprofiled_ms),
    Field("slowest in steps", "count", lambda row: row.slowest_steps if row.own_ms else None),
    Field("GPU", "text", lambda row: str(row.device)),
    Field("capture", "text", lambda row: row.capture),
)
_LOSS_FIELDS: tuple[Field[tuple[str, StrOrText, StrOrText, float]], ...] = (
    Field("phase", "text", lambda row: row[0]),
    Field("part", "text", lambda row: row[1]),
    Field("reason", "text", lambda row: row[2]),
    Field("ms", "ms", lambda row: row[3]),
)
_COLLECTIVE_FIELDS: tuple[Field[CollectiveFigures], ...] = (
    Field("collective", "text", lambda row: f"{row.kind}, {row.phase}" if row.phase else row.kind),
    Field("bytes", "bytes", lambda row: row.bytes),
    Field("ranks", "count", lambda row: row.ranks),
    Field("per step", "count", lambda row: row.count),
    Field("duration (median)", "ms", lambda row: row.duration_ms.median),
    Field("waiting", "ms", lambda row: row.waiting_ms),
    Field("transferring", "ms", lambda row: row.transfer_ms),
    Field("attainable", "ms", lambda row: row.attainable_ms),
    Field("bus bandwidth", "bytes/s", lambda row: row.bus_bytes_per_s),
)
