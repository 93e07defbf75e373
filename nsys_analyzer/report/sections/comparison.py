"""Two runs side by side in words and tables: whether the step changed, what explains it, and what else did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, GPU_SPREAD, Change
from nsys_analyzer.analysis.comparison.comparison import (
    Comparison,
    Difference,
    FindingChange,
    StepChange,
    Verdict,
)
from nsys_analyzer.analysis.comparison.pairs import Comparisons, UnmatchedRun
from nsys_analyzer.report.model import Answer, Block, Details, Listing, Paragraph, Section, Shift, Table
from nsys_analyzer.report.sections.changes import explaining, has_renamed, launches_of, name_of, others, relative
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import (
    about_percent,
    counted,
    milliseconds,
    shifted,
)
from nsys_analyzer.text import Words, joined, phrase

TITLE = "What changed, and what explains it?"
#: What the verdict is called.
VERDICTS: dict[Verdict, str] = {
    "faster": "Faster",
    "slower": "Slower",
    "no change": "No change",
    "unclear": "Too uncertain to tell",
}
#: Runs that are listed because they were not compared.
_MOST_NOTES = 20
#: The most differences of a run of the other side that is worth a word.
_NEAR = 2
#: Parts and findings that an answer names, and the least share of the largest that another one has.
_NAMED, _LARGE = 3, 0.2
_LEGEND: tuple[Words, ...] = (
    phrase(
        "*95% interval*, in brackets: the change lies in it, and is more than chance where 0 does not. It is Student's "
        "t times the standard error: of a median by the bootstrap over the instances, of a mean by their deviation, "
        "and, where a side is a single run, with what runs of one program differ by. On an H200 that was {:.2%} of the "
        "GPU's work and {:.0%} of the time that the GPU waits for the program (a standard deviation, on a shared "
        "host); `--cpu-spread` sets the second. Several runs on each side (`--repeats`) tell it by themselves.",
        GPU_SPREAD,
        CPU_SPREAD,
    ),
    phrase(
        "*before*, *after*: medians of steps and phases; of parts and kernels means of a step under the profiler, in "
        "which a moment belongs to one kernel alone, and waiting is scaled to the length of a step. So kernels add up "
        "to their class, and the parts to the step."
    ),
)
_PAIRED: Words = phrase(
    "*A → B*: two kernels of other names that stand for each other: of one class, launched as often in a step; matmuls "
    "with the same operands transposed, where their names say so."
)
_ORDERED = "Processes that share a GPU stand against each other in the order of their IDs."


class Pair(NamedTuple):
    """A comparison, and the limit of its verdict."""

    comparison: Comparison
    threshold: float

    @property
    def title(self) -> str:
        """The names of both sides, once where they are one."""
        before, after = self.comparison.before.title, self.comparison.after.title
        return before if before == after else f"{before} → {after}"

    @property
    def verdict(self) -> Verdict:
        """Whether the step changed."""
        return self.comparison.verdict(self.threshold)


def answer(found: Comparisons, limit: float, *, detailed: bool = True) -> Section:
    """What changed in each pair; of several a table first, and the figures of each folded, or left out.

    Args:
        found: the comparisons.
        limit: the change of the step that the verdict looks for, as a share of it.
        detailed: whether the figures of several pairs are shown, too.
    """
    pairs = [Pair(one, limit) for one in found.compared]
    alone = len(pairs) == 1
    blocks: list[Block] = [] if alone else [_overview(pairs)]
    for pair in pairs:
        blocks.append(Answer(_text(pair), pair.title))
        first, more = (tuple(part(pair.comparison, pair.title)) for part in (explaining, others))
        if alone:
            blocks += [*first, Details("Times, kernels and findings", more, pair.title)]
        elif detailed:
            blocks.append(Details(f"{pair.title}: the figures", (*first, *more), pair.title))
    if notes := (*map(_refused, found.refused), *map(_unmatched, found.unmatched)):
        left = (f"and {len(notes) - _MOST_NOTES} more",) if len(notes) > _MOST_NOTES else ()
        blocks += [Paragraph("Not compared:"), Listing((*notes[:_MOST_NOTES], *left))]
    if detailed or alone:
        words = [*_LEGEND]
        if any(has_renamed(pair.comparison.step) for pair in pairs):
            words.append(_PAIRED)
        if any(run.shares_gpu for pair in pairs for run in pair.comparison.before.runs):
            words.append(_ORDERED)
        blocks.append(Details("What the words mean", (Listing(tuple(words)),)))
    return Section("comparison", TITLE, tuple(blocks))


def _overview(pairs: Sequence[Pair]) -> Table:
    return table(_OVERVIEW, pairs, "The step of each pair, ms: without the profiler where both were timed so.")


def _headline(pair: Pair) -> Change | None:
    return pair.comparison.headline


def _alone_share(change: Change | None) -> Shift | None:
    return Shift(change.share) if change and change.share is not None else None


_OVERVIEW: tuple[Field[Pair], ...] = (
    Field("pair", "text", lambda pair: pair.title),
    Field("before", "ms", lambda pair: change.before_ms if (change := _headline(pair)) else None),
    Field("after", "ms", lambda pair: change.after_ms if (change := _headline(pair)) else None),
    Field("change", "percent", lambda pair: _alone_share(_headline(pair))),
    Field("verdict", "text", lambda pair: pair.verdict),
)


# --- the answer in words


def _text(pair: Pair) -> Words:
    comparison = pair.comparison
    found = comparison.findings or ()
    said: list[Words] = []
    if comparison.same:
        said.append("Both sides are the same capture.")
    said.append(_changed(pair))
    if comparison.differences:
        said.append(f"They differ in {', '.join(map(_difference, comparison.differences))}.")
    said += _gone_and_new(found)
    if comparison.step and not comparison.same:
        said += _explained(comparison.step)
    if comparison.is_slowed_on_one_side:
        said.append(
            "The profiler slows the two sides down differently: record both in one way, or compare times without it."
        )
    if pair.verdict == "unclear" and comparison.headline:
        said.append(_how_to_tell(pair, comparison.headline))
    return joined(" ", said)


def _difference(one: Difference) -> str:
    return f"{one.key.replace('_', ' ')} ({one.before} → {one.after})"


def _changed(pair: Pair) -> Words:
    """The verdict, and the step before and after."""
    comparison = pair.comparison
    change, step = comparison.headline, comparison.step
    word = VERDICTS[pair.verdict]
    if change is None:
        return f"{word}: a side has no step."
    where = "without the profiler" if comparison.unprofiled else "under the profiler"
    times = f"{milliseconds(change.before_ms)} before and {milliseconds(change.after_ms)} after"
    said = f"{word}: {where} a step takes {times}, {_in_percent(change)} ({_instances(comparison, change)})."
    if comparison.unprofiled and step:
        wall = step.wall
        times = f"{milliseconds(wall.before_ms)} and {milliseconds(wall.after_ms)}"
        said += f" Under the profiler it takes {times}, {_in_percent(wall)}."
    return said


def _in_percent(change: Change) -> str:
    """A change and its interval as shares of what was before."""
    shift = relative(change)
    if shift is None:
        return f"{shifted(Shift(change.ms), 'ms')} ms"
    alone, interval = shifted(Shift(shift.value), "percent"), shifted(shift, "percent").partition(" (")[2][:-1]
    return f"{alone}, 95% interval {interval}" if interval else alone


def _instances(comparison: Comparison, change: Change) -> str:
    counts = len(comparison.before.runs), len(comparison.after.runs)
    if max(counts) > 1:
        return f"{counts[0]} and {counts[1]} runs"
    before, after = map(_steps, (change.before_n, change.after_n))
    return f"{before} each" if before == after else f"{before} and {after}"


def _steps(n: int | None) -> str:
    return "an unknown number of steps" if n is None else counted(n, "step")


def _how_to_tell(pair: Pair, change: Change) -> str:
    """What would narrow the interval of a change that is too uncertain."""
    limit = about_percent(pair.threshold)
    if change.low_share is None or change.high_share is None:
        if 1 in (change.before_n, change.after_n):
            return "A single step on one side does not tell how much steps vary: record more of them."
        return (
            "The timings of a side do not tell how much steps vary: give the number of steps (a column steps) and the "
            "standard deviation (std_ms)."
        )
    half = about_percent((change.high_share - change.low_share) / 2)
    said = f"A change below {half} would not be seen, and {limit} is looked for"
    if change.inside > _MOSTLY:
        more = "runs" if max(len(pair.comparison.before.runs), len(pair.comparison.after.runs)) > 1 else "steps"
        return f"{said}: there are too few {more}, so record more of them."
    return (
        f"{said}: by so much does the program's own time differ from run to run. Record each side several times, and "
        "compare the folders with --repeats; or say with --cpu-spread how much it differs on your machine."
    )


#: From this share of an interval's variance on, instances make it wide.
_MOSTLY = 0.5


def _explained(step: StepChange) -> Iterator[Words]:
    """The parts that changed most, whichever way, and the kernels that were launched."""
    most = max((abs(part.change.ms) for part in step.parts), default=0.0)
    large = [part for part in step.parts if part.change.is_change and abs(part.change.ms) >= _LARGE * most]
    if large:
        listed = ", ".join(f"{name_of(part)} {_ms(part.change)}" for part in large[:_NAMED])
        yield f"What changed most under the profiler: {listed}."
    if round(step.before_launches) != round(step.after_launches):
        yield f"Kernels launched in a step: {launches_of(step.before_launches, step.after_launches)}."


def _ms(change: Change) -> str:
    return f"{shifted(Shift(change.ms), 'ms')}\N{NO-BREAK SPACE}ms"


def _gone_and_new(findings: Sequence[FindingChange]) -> Iterator[str]:
    for status, word in (("gone", "Gone"), ("new", "New")):
        titles = [f'"{one.finding.title}"' for one in findings if one.status == status]
        if titles:
            more = f" and {len(titles) - _NAMED} more" if len(titles) > _NAMED else ""
            yield f"{word}: {', '.join(titles[:_NAMED])}{more}."


def _unmatched(one: UnmatchedRun) -> Words:
    """Why a run stands against none."""
    if one.reasons:
        return phrase("{}: {}.", one.side.capitalize(), joined("; ", one.reasons))
    if one.nearest is None or len(one.differences) > _NEAR:
        return phrase("`{}` is only {}.", one.run.title, one.side)
    listed = ", ".join(map(_difference, one.differences)) or "its name"
    return phrase(
        "`{}` is only {}; `{}` is most like it, and differs in {}.", one.run.title, one.side, one.nearest.title, listed
    )


def _refused(comparison: Comparison) -> Words:
    """Why two sides are not compared."""
    reasons = joined("; ", comparison.cautions)
    return phrase("`{}` and `{}`: {}.", comparison.before.title, comparison.after.title, reasons)
