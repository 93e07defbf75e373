"""How the ranks of a run work together: who waits for whom, and what the collectives cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.ranks.run import LATE_SHARE
from nsys_analyzer.analysis.steps.process import OUTSIDE
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS, Evidence, median_cell
from nsys_analyzer.report.model import Answer, Block, Details, Field, Listing, Paragraph, Section, make_table
from nsys_analyzer.report.sections.bars import bars_of_run
from nsys_analyzer.report.sections.findings import run_finding_blocks
from nsys_analyzer.report.units import format_ms, format_ms_range, format_precise_ms, rounded, rounded_percent
from nsys_analyzer.text import StrOrText, join_texts, phrase, plain, plural, strong

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import Alignment, CollectiveFigures, LostTime, ParallelRun, RankFigures

#: Differences below this share of a step have no row.
_MIN_ROW_SHARE = 0.002
#: Rows of the tables of collectives and of losses.
_MOST_ROWS = 12
_CAPTION = "The steps of each rank, profiled, ms of the median step:"
#: The finding of what makes a rank late.
_LATE_RANK = "late_rank"
_LEGEND = (
    phrase(
        "compute + exposed copies + waiting + transferring + idle = step, for each rank: *waiting* is exposed "
        "communication until the last rank has started the collective, *transferring* from then on. The ranks' steps "
        "are joined by number, and their collectives by their order in a step of a communicator."
    ),
    phrase(
        "*own time*: the step without waiting. A rank is *late* by as much as its own time is longer than the "
        "shortest one. *unprofiled*: by a replay without what recording costs, and with launching as slow on all ranks "
        "where that makes the latest rank less late."
    ),
    phrase(
        "*bytes*: the message of one rank, as NCCL counts it. *bus bandwidth*: the bytes over each link ÷ the median "
        "time of transferring, as nccl-tests defines them."
    ),
)
_NO_SIZES = phrase(
    "The sizes of messages are not known: the capture does not hold them. Of nsys repeat `nsys export` with "
    "`--include-blobs=true`; newer versions of PyTorch note them."
)


def answer_ranks(evidence: Evidence) -> Section:
    """Each run of several ranks: its steps, the rank that the others wait for, and what would make a step shorter."""
    blocks: list[Block] = []
    for run in evidence.runs:
        blocks += [Paragraph(strong(run.name))] if len(evidence.runs) > 1 else []
        blocks += _of_run(run)
    return Section("ranks", "Ranks", (*note_unjoined_captures(evidence), *blocks))


def note_unjoined_captures(evidence: Evidence) -> list[Paragraph]:
    """What captures with collectives leave open that are joined with no other one, and the line that joins them."""
    # A process may be the only one of its run; of others each is one side.
    alone = [run.ranks[0] for run in evidence.runs if len(run.ranks) == 1 and run.world_size != 1]
    named = join_texts(", ", [phrase("`{}`", one.capture) for one in alone])
    text = phrase(
        "The collectives of {} are joined with those of no other rank: whether they transfer or wait for a late rank, "
        "and what a change would save, is not known. Give the captures of all ranks, in order, with `--ranks`.",
        named,
    )
    return [Paragraph(text)] if alone else []


def _of_run(run: ParallelRun) -> Iterator[Block]:
    """What is said of a run."""
    yield Answer(_sentence(run), run.name)
    yield Answer(_communication(run), run.name)
    if bars := bars_of_run(run):
        yield bars
    yield from run_finding_blocks(run)
    tables: list[Block] = [make_table(_RANKS, run.ranks, _CAPTION, capture=run.name)]
    tables += _losses(run)
    tables += _collectives(run)
    said = [*([_clocks(run.alignment)] if run.alignment else []), *run.notes]
    tables += [Listing((*said, *_LEGEND), capture=run.name)]
    yield Details(f"Rank by rank: {run.name}", tuple(tables), run.name)


def find_rank_titles(captures: Iterable[CaptureSummary], runs: Iterable[ParallelRun]) -> frozenset[str]:
    """Returns the titles of the captures that are ranks of a run of several."""
    ranks = {(rank.capture, rank.process) for run in runs if len(run.ranks) > 1 for rank in run.ranks}
    return frozenset(c.title for c in captures if any((rank.capture, rank.process) in ranks for rank in c.members))


def _sentence(run: ParallelRun) -> StrOrText:
    """Returns how many ranks share the work and how, how long a step takes, and which rank is late and why."""
    count = max(len(run.ranks), run.world_size or 0)
    noun = plural(count, "device" if all(rank.rank is None for rank in run.ranks) else "rank")
    shared = f", {' and '.join(run.strategies)}" if run.strategies else ""
    profiled = rounded(max((rank.step_ms.median or 0.0) for rank in run.ranks))
    measurement = f"(measured; profiled {profiled})" if run.unprofiled_ms else "under the profiler"
    first = f"{count} {noun}{shared}: {format_ms(run.step_ms)} a step {measurement}."
    return join_texts(" ", (first, describe_late_rank(run)))


def describe_late_rank(run: ParallelRun) -> StrOrText:
    """Returns the sentence on the rank that the others wait for, or that there is none."""
    slowest = run.slowest_rank
    if slowest is None or run.skew_ms is None or slowest.step_ms.median is None or len(run.ranks) < 2:
        return "Who waits for whom is not known."
    skew = format_ms(run.skew_ms)
    if run.skew_ms < LATE_SHARE * slowest.step_ms.median:
        return f"No rank is late: their own times differ by {skew}."
    profiled = " under the profiler" if run.unprofiled_ms or run.later_than_others_ms else ""
    if run.takes_turns:
        return f"No rank is late throughout: they take turns, and their own times differ by {skew}{profiled}."
    if not run.is_late_unprofiled:
        none = "No stage is known to be the longest" if run.is_pipeline else "No rank is late"
        none = none if run.unprofiled_ms or run.is_pipeline else "No rank is known to be late"
        under_it = f"the longest is {slowest.label}'s," if run.is_pipeline else f"{slowest.label} is late"
        why = "launching limits the ranks, and the profiler makes it slower"
        return f"{none} without the profiler. Under it {under_it} by {skew}: {why}."
    if run.is_pipeline:
        return f"The longest stage is {slowest.label}'s, by {skew} of own time{profiled}."
    most = run.lost[0] if run.lost and run.lost[0].ms > 0 else None
    if run.later_than_others_ms:
        unprofiled = format_ms(run.later_than_others_ms[-1])
        skew = f"{unprofiled} without the profiler, by a replay, and under it by {skew}"
    late: list[StrOrText] = [
        f"{slowest.label.capitalize()} is late by {skew} in {slowest.slowest_steps} of {run.steps} steps"
    ]
    late += [join_texts("", (", ", _loss(most)))] if most else []
    finding = next((one for one in run.findings if one.id == _LATE_RANK), None)
    own = slowest.own_ms.median if slowest.own_ms else None
    is_bound = own and own - run.least_cpu_ms < run.skew_ms / 2
    if finding:
        shorter = format_ms_range(finding.saves_ms_low, finding.saves_ms_high)
        late.append(f"; without that a step is {shorter} shorter")
    elif is_bound:
        late.append("; but a step would hardly be shorter")
    late.append(".")
    if is_bound:
        needed = f"{format_ms(run.least_cpu_ms)}{profiled}"
        late.append(f" The CPU limits the other ranks, too: each needs {needed} for a step.")
    return join_texts("", late)


def _loss(row: LostTime) -> StrOrText:
    """A loss in words: "13.5 ms of idle (launching) in forward"."""
    why, lost = _why(row), f"{format_ms(row.ms)} of {row.part}"
    what = phrase("{} ({})", lost, why) if plain(why) else lost
    if row.part == "transferring":
        return what
    return join_texts(" ", (what, row.phase if row.phase == OUTSIDE else f"in {row.phase}"))


def _communication(run: ParallelRun) -> str:
    """How much of a step is communication that nothing hides, on the rank with most of it."""
    most = max(run.ranks, key=lambda one: one.exposed_communication_ms)
    ms, step, waits = most.exposed_communication_ms, most.step_ms.median, most.exposed_waiting_ms
    share = f", {rounded_percent(ms / step)} of it" if step else ""
    a_step = "Under the profiler a step" if run.unprofiled_ms else "A step"
    sentence = f"{a_step} of {most.label} has {format_ms(ms)} of exposed communication{share}"
    return f"{sentence}." if waits is None else f"{sentence}: {format_ms(waits)} of waiting."


def _losses(run: ParallelRun) -> Iterator[Block]:
    slowest = run.slowest_rank
    if slowest is None or run.fastest is None or run.skew_ms is None:
        return
    if run.skew_ms < LATE_SHARE * (slowest.step_ms.median or 0.0):
        return
    step = slowest.step_ms.median or 0.0
    shown = [row for row in run.lost if abs(row.ms) >= _MIN_ROW_SHARE * step][:_MOST_ROWS]
    rest = sum(row.ms for row in run.lost) - sum(row.ms for row in shown)
    rows: list[tuple[str, StrOrText, StrOrText, float]] = [(row.phase, row.part, _why(row), row.ms) for row in shown]
    rows += [("", "smaller ones", "", rest)] if abs(rest) >= _MIN_ROW_SHARE * step else []
    rows += [("", "all", "", sum(row.ms for row in run.lost))]
    fast = run.ranks[run.fastest].label
    caption = f"Where {slowest.label} loses time to {fast}, profiled, ms of a step (below zero: where it needs less):"
    yield make_table(_LOSSES, rows, caption, capture=run.name, names=3)


def _why(row: LostTime) -> StrOrText:
    words: list[StrOrText] = [CAUSE_WORDS[row.cause]] if row.cause else []
    words += [phrase("range `{}`", row.range)] if row.range else []
    words += [row.kernel_class] if row.kernel_class else []
    words += [phrase("module `{}`", row.module)] if row.module else []
    words += [phrase("`{}`", line)] if (line := row.lines[0].place if row.lines else row.module_line) else []
    return join_texts(", ", words)


def _collectives(run: ParallelRun) -> Iterator[Block]:
    rows = run.collectives
    if not rows:
        return
    rest = f" ({len(rows) - _MOST_ROWS} smaller rows left out)" if len(rows) > _MOST_ROWS else ""
    caption = f"The collectives{rest}; waiting and transferring: ms of a step, mean of the ranks; of one: median ms:"
    fields = [one for one in _COLLECTIVES if one.title != "ranks" or len({row.ranks for row in rows}) > 1]
    yield make_table(fields, rows[:_MOST_ROWS], caption, capture=run.name)
    if all(row.bytes is None for row in rows):
        yield Paragraph(_NO_SIZES, capture=run.name)


def _clocks(known: Alignment) -> str:
    """How well the clocks agree."""
    counted = f"{known.collectives:,} {plural(known.collectives, 'collective')}"
    if known.one_clock:
        return f"All ranks are on one clock: the ends of {counted} agree to {format_precise_ms(known.spread_ms)}."
    return (
        f"The captures' clocks were aligned on the ends of {counted} that the ranks share; aligned, they differ by "
        f"{format_precise_ms(known.spread_ms)} (standard deviation)."
    )


_RANKS: tuple[Field[RankFigures], ...] = (
    Field("rank", "text", lambda row: row.label),
    Field("step", "ms", lambda row: row.step_ms.median),
    Field("compute", "ms", lambda row: row.compute_ms),
    Field("copies", "ms", lambda row: row.exposed_copy_ms or None),
    Field("waiting", "ms", lambda row: row.exposed_waiting_ms),
    Field("transferring", "ms", lambda row: row.exposed_transfer_ms),
    Field("idle", "ms", lambda row: row.idle_ms),
    Field("hidden communication", "ms", lambda row: row.communication_ms - row.exposed_communication_ms),
    Field("own time", "ms", lambda row: row.own_ms.median if row.own_ms else None),
    Field("late by (least – most)", "ms", lambda row: median_cell(row.late_ms)),
    Field("late by, unprofiled", "ms", lambda row: row.late_unprofiled_ms),
    Field("slowest in steps", "count", lambda row: row.slowest_steps if row.own_ms else None),
    Field("GPU", "text", lambda row: str(row.device)),
    Field("capture", "text", lambda row: row.capture),
)
_LOSSES: tuple[Field[tuple[str, StrOrText, StrOrText, float]], ...] = (
    Field("phase", "text", lambda row: row[0]),
    Field("what", "text", lambda row: row[1]),
    Field("why", "text", lambda row: row[2]),
    Field("ms", "ms", lambda row: row[3]),
)
_COLLECTIVES: tuple[Field[CollectiveFigures], ...] = (
    Field("collective", "text", lambda row: f"{row.kind}, {row.phase}" if row.phase else row.kind),
    Field("bytes", "bytes", lambda row: row.bytes),
    Field("ranks", "count", lambda row: row.ranks),
    Field("a step", "count", lambda row: row.count),
    Field("ms of one", "ms", lambda row: row.duration_ms.median),
    Field("waiting", "ms", lambda row: row.waiting_ms),
    Field("transferring", "ms", lambda row: row.transfer_ms),
    Field("bus bandwidth", "bytes/s", lambda row: row.bus_bytes_per_s),
)
