"""Two runs side by side: whether the step changed, what explains it, and folded all else that did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, GPU_SPREAD, Change
from nsys_analyzer.analysis.comparison.comparison import (
    Budget,
    Comparison,
    Difference,
    FindingChange,
    KernelChange,
    PartChange,
    StepChange,
)
from nsys_analyzer.analysis.comparison.pairs import Comparisons, UnmatchedRun
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import (
    Answer,
    Block,
    Details,
    Field,
    Listing,
    Paragraph,
    Section,
    SignedChange,
    Table,
    make_table,
)
from nsys_analyzer.report.units import (
    format_cell,
    format_change,
    format_count,
    format_ms_range,
    format_number,
    format_precise_ms,
    rounded_percent,
)
from nsys_analyzer.text import StrOrText, join_texts, phrase
from nsys_analyzer.trace.metadata import CPU
from nsys_analyzer.trace.phase_names import STEP

_CAUSES: dict[str, str] = dict(CAUSE_WORDS.items())
#: Runs that are listed because they were not compared, and rows of the table of kernels.
_MOST_NOTES, _MOST_KERNELS = 20, 10
#: From this many launches a step, their mean is shown as a whole number.
_MANY_LAUNCHES = 100
#: What is below this share of the step is not in a table by itself; from this share of an interval's variance on,
#: instances make it wide.
_MATTERS, _MOSTLY = 0.005, 0.5
_GLOSSARY: tuple[StrOrText, ...] = (
    phrase(
        "*95\N{NO-BREAK SPACE}% interval*, in brackets: the change is more than chance where 0 lies outside of it: "
        "Student's t times the standard error, of medians by the bootstrap; where a side is a single run, with what "
        "runs of one program differ by: {} of the GPU's work, and {} of the time that the GPU waits for the program, "
        "unless `--cpu-spread` says otherwise (standard deviations, measured on shared H200 hosts). Several runs on "
        "each side (`--repeats`) tell it by themselves.",
        rounded_percent(GPU_SPREAD, 2), rounded_percent(CPU_SPREAD),
    ),
    phrase(
        "*before*, *after*: medians of steps and phases; of parts and kernels means of a step under the profiler, in "
        "which kernels at once share a moment. So kernels add up to their class, and the parts to the step. *A → B*: "
        "two kernels of other names that stand for each other, launched as often in a step."
    ),
)  # fmt: skip


def answer_comparison(found: Comparisons, limit: float, *, detailed: bool = True) -> Section:
    """What changed in each pair; of several a table, and the figures of each folded, or left out.

    Args:
        found: the comparisons.
        limit: the change of the step that the verdict looks for, as a share of it.
        detailed: whether the figures of several pairs are shown, too.
    """
    pairs, title = found.compared, f"{len(found.compared)} comparisons"
    if len(pairs) == 1:
        title, blocks = _title(pairs[0]), [*_of_pair(pairs[0], limit)]
    else:
        blocks = [_overview(pairs, limit)]
        blocks += [Details(_title(one), (*_of_pair(one, limit),), _title(one)) for one in pairs if detailed]
    sides = ((pair.before.title, pair.after.title, join_texts("; ", pair.cautions)) for pair in found.refused)
    if notes := [*(phrase("`{}` and `{}`: {}.", *one) for one in sides), *map(_unmatched, found.unmatched)]:
        left = (f"and {len(notes) - _MOST_NOTES} more",) if len(notes) > _MOST_NOTES else ()
        blocks += [Paragraph("Not compared:"), Listing((*notes[:_MOST_NOTES], *left))]
    return Section("comparison", title, (*blocks, Details("What the words mean", (Listing(_GLOSSARY),))))


def _title(pair: Comparison) -> str:
    before, after = pair.before.title, pair.after.title
    return before if before == after else f"{before} → {after}"


def _overview(pairs: Sequence[Comparison], limit: float) -> Table:
    fields: tuple[Field[Comparison], ...] = (
        Field("pair", "text", _title),
        Field("before", "ms", lambda pair: pair.headline.before_ms if pair.headline else None),
        Field("after", "ms", lambda pair: pair.headline.after_ms if pair.headline else None),
        Field("change", "percent", lambda pair: SignedChange(pair.headline.share or 0.0) if pair.headline else None),
        Field("verdict", "text", lambda pair: pair.verdict(limit)),
        Field("what changed most", "text", _most),
    )
    return make_table(fields, pairs, "The step of each pair, ms: without the profiler where both sides were timed so.")


def _most(pair: Comparison) -> str | None:
    """The part of the step that changed most, where it is more than chance."""
    parts = [part for part in pair.step.parts if part.change.is_change] if pair.step else []
    return (
        f"{_part(parts[0])}, {format_change(SignedChange(parts[0].change.ms), 'ms')}\N{NO-BREAK SPACE}ms"
        if parts
        else None
    )


def _of_pair(pair: Comparison, limit: float) -> Iterator[Block]:
    """The verdict, what else is to be known, what explains the change, and folded the other figures."""
    title, verdict, change = _title(pair), pair.verdict(limit), pair.headline
    word = "Too uncertain to tell" if verdict == "unclear" else verdict.capitalize()
    clock = "without" if pair.unprofiled else "under"
    yield Answer(f"{word}: {_changed(change, clock) if change else 'no time of a step is known of both sides.'}", title)
    if remarks := (*_remarks(pair, limit),):
        yield Listing(remarks, capture=title)
    if pair.budgets:
        yield _budgets(pair, title)
    if pair.cautions:
        yield Paragraph("Compared all the same, as --force says, although:", title)
        yield Listing(pair.cautions, capture=title)
    if pair.step:
        yield _explaining(pair.step, title)
    if figures := (*_figures(pair, title),):
        yield Details("Times, kernels and findings", figures, title)


def _budgets(pair: Comparison, title: str) -> Table:
    """The budgets of the side after, and what it takes of each."""
    fields: tuple[Field[Budget], ...] = (
        Field("budget", "text", lambda one: one.what),
        Field("at most", "text", lambda one: format_cell(one.most, one.unit)),
        Field("is", "text", lambda one: format_cell(one.value, one.unit)),
        Field("verdict", "text", lambda one: one.verdict),
    )
    clock = "without" if pair.unprofiled else "under"
    return make_table(
        fields, pair.budgets, f"Budgets of a step, ms; it and its phases {clock} the profiler:", capture=title
    )


def _changed(change: Change, clock: str) -> str:
    """The step before and after, and the change as a share of what was before, with its interval."""
    cell, before = _shift(change), format_number(change.before_ms, "ms")
    by = f"{format_change(SignedChange(change.ms), 'ms')}\N{NO-BREAK SPACE}ms{f' ({cell})' if cell else ''}"
    if isinstance(cell, SignedChange):
        by = format_change(cell, "percent").replace("(", "(95\N{NO-BREAK SPACE}% interval ")
    return f"a step takes {before} → {format_precise_ms(change.after_ms)} {clock} the profiler, {by}."


def _shift(change: Change, unit: Literal["ms", "percent"] = "percent") -> SignedChange | str | None:
    """A change in ms or as a share of what was before, with its interval, where that tells anything."""
    if unit == "ms":
        return SignedChange(change.ms, change.low_ms, change.high_ms)
    if change.share is None:
        return None
    low, high = change.low_share, change.high_share
    if low is not None and high is not None and high - low > 2 and not change.is_change:
        return "too short to tell"
    return SignedChange(change.share, low, high)


def _remarks(pair: Comparison, limit: float) -> Iterator[StrOrText]:
    """What the verdict rests on, what the sides differ in, and what the reader must know or do."""
    change, step, runs = pair.headline, pair.step, (*pair.before.runs, *pair.after.runs)
    if pair.same:
        yield "Both sides are the same capture."
    if change:
        counts = len(pair.before.runs), len(pair.after.runs)
        numbers, noun = (counts, "run") if max(counts) > 1 else ((change.before_n, change.after_n), "step")
        before, after = (format_count(n, noun) if n else "an unknown number of steps" for n in numbers)
        yield f"Compared: {before} before, {after} after."
    if pair.unprofiled and step:
        yield _changed(step.wall, "under").capitalize()
    for run in runs if pair.unprofiled is None else ():
        if run.unprofiled and (doubts := run.unprofiled.doubts.get(STEP)):
            yield f"The step of {run.title} without the profiler is distrusted: {'; '.join(doubts)}."
    if pair.differences:
        yield f"The sides differ in {', '.join(map(_difference, pair.differences))}."
    for status in ("gone", "new"):
        if titles := [f"“{one.finding.title}”" for one in pair.findings or () if one.status == status]:
            yield f"{status.capitalize()}: {', '.join(titles)}."
    if step and round(step.before_launches) != round(step.after_launches):
        yield f"Kernels launched in a step: {_launches(step.before_launches, step.after_launches)}."
    batches = {run.configuration and run.configuration.batch_size for run in runs}
    if step and step.common_factor and (None in batches or len(batches) > 1):
        yield f"All large classes took {step.common_factor:.2f} of their time: another batch size?"
    if pair.is_slowed_on_one_side:
        yield "The profiler slows the two sides down differently: record both in one way, or compare times without it."
    if pair.verdict(limit) == "unclear" and change:
        yield _how_to_tell(change, limit)


def _difference(one: Difference) -> str:
    return f"{one.key.replace('_', ' ')} ({one.before} → {one.after})"


def _how_to_tell(change: Change, limit: float) -> str:
    """What would narrow the interval of a change that is too uncertain."""
    if change.low_share is None or change.high_share is None:
        return "How much steps vary is not known: record more, or give their number and deviation (steps, std_ms)."
    half, looked = rounded_percent((change.high_share - change.low_share) / 2), rounded_percent(limit)
    how = (
        "Record more steps, or several runs of each side."
        if change.inside > _MOSTLY
        else "So much does the program's own time differ from run to run: record each side several times, and compare "
        "the folders with --repeats, or say with --cpu-spread how much it differs on your machine."
    )
    return f"A change below {half} would not be seen, and {looked} is looked for. {how}"


#: A row of a table of changes: what changed, and how.
_Row = tuple[str, Change]


def _table(what: str, rows: Sequence[_Row], unit: Literal["ms", "percent"], caption: str, title: str) -> Table:
    """Changes under each other, in ms or as shares of what was before."""
    fields: tuple[Field[_Row], ...] = (
        Field(what, "text", lambda row: row[0]),
        Field("before", "ms", lambda row: row[1].before_ms),
        Field("after", "ms", lambda row: row[1].after_ms),
        Field("change (95\N{NO-BREAK SPACE}% interval)", unit, lambda row: _shift(row[1], unit)),
    )
    return make_table(fields, rows, caption, capture=title)


def _part(part: PartChange) -> str:
    """A part in words: compute: matmul; idle: waits for the GPU."""
    return f"{part.kind}: {_CAUSES.get(part.name, part.name)}".removesuffix(": ")


def _explaining(step: StepChange, title: str) -> Table:
    """What explains the change of the step: the parts that matter, and the sum of the others; each column adds up."""
    least = _MATTERS * max(step.wall.before_ms, step.wall.after_ms)
    small = [part.change for part in step.parts if abs(part.change.ms) < least]
    rows = [(_part(part), part.change) for part in step.parts if len(small) == 1 or part.change not in small]
    if len(small) > 1:
        sums = (sum(one.before_ms for one in small), sum(one.after_ms for one in small))
        rows.append((f"{len(small)} parts with less change", Change(*sums, None, None, None, None)))
    caption = "What explains the change: the step under the profiler, ms, the largest change first."
    return _table("part of the step", [*rows, ("the step", step.wall)], "ms", caption, title)


def _figures(pair: Comparison, title: str) -> Iterator[Block]:
    """The other figures: times, kernels, findings."""
    if times := [*_times(pair)]:
        yield _table("time", times, "percent", "Times, ms:", title)
    if pair.step and (kernels := _kernels(pair.step, title)).rows:
        yield kernels
    if pair.findings:
        yield Paragraph("Findings, and what removing each would save (of several runs, those of most, medians):", title)
        yield Listing(tuple(map(_finding, pair.findings)), capture=title)


def _finding(one: FindingChange) -> StrOrText:
    savings = (format_ms_range(each.saves_ms_low, each.saves_ms_high) for each in (one.before, one.after) if each)
    return phrase("**{}**: {} ({})", one.status, one.finding.title, " → ".join(dict.fromkeys(savings)))


def _times(pair: Comparison) -> Iterator[_Row]:
    """The step and the phases by each clock: without the profiler first. Wall time needs somebody who waits."""
    busy = "operators busy" if pair.before.runs[0].gpu == CPU else "GPU busy"
    unprofiled = [("step", pair.unprofiled), *((phase.phase, phase.unprofiled) for phase in pair.phases)]
    yield from ((f"{name}, without the profiler", change) for name, change in unprofiled if change)
    if pair.step:
        yield ("step, under the profiler", pair.step.wall)
        yield (f"step, {busy}", pair.step.busy)
    for phase in pair.phases:
        if phase.synchronized:
            yield (f"{phase.phase}, under the profiler", phase.wall)
        yield (f"{phase.phase}, {busy}", phase.busy)


def _kernels(step: StepChange, title: str) -> Table:
    """The kernels whose time changed most, by more than chance."""
    labels = make_short_labels([name for part in step.parts for one in part.kernels for name in _names(one)])

    def label(row: tuple[str, KernelChange]) -> str:
        """A kernel's label, or both where two stand for each other; of fills and opaque graphs their class."""
        kernel_class, one = row
        only = " (only before)" if one.after_name is None else " (only after)" if one.before_name is None else ""
        return (" → ".join(labels[name] for name in _names(one)) or kernel_class) + only

    least = _MATTERS * max(step.wall.before_ms, step.wall.after_ms) / 2
    every = [(part.name, one) for part in step.parts for one in part.kernels]
    changed = [row for row in every if row[1].change.is_change and abs(row[1].change.ms) >= least]
    fields: tuple[Field[tuple[str, KernelChange]], ...] = (
        Field("kernel", "text", label),
        Field("class", "text", lambda row: row[0]),
        Field("launches", "text", lambda row: _launches(row[1].before_launches, row[1].after_launches)),
        Field("before", "ms", lambda row: row[1].change.before_ms),
        Field("after", "ms", lambda row: row[1].change.after_ms),
        Field("change", "ms", lambda row: SignedChange(row[1].change.ms)),
    )
    caption = "Kernels whose time changed most, ms and launches of a step:"
    shown = sorted(changed, key=lambda row: -abs(row[1].change.ms))[:_MOST_KERNELS]
    return make_table(fields, shown, caption, capture=title, names=2)


def _names(one: KernelChange) -> tuple[str, ...]:
    """The kernel's name before and after, once where it is the same."""
    return tuple(dict.fromkeys(name for name in (one.before_name, one.after_name) if name))


def _launches(before: float, after: float) -> str:
    """Returns the launches of a step before and after, or one number if both are shown alike."""
    rounded = (number if number < _MANY_LAUNCHES else round(number) for number in (before, after))
    return " → ".join(dict.fromkeys(format_number(number, "count") for number in rounded))


def _unmatched(one: UnmatchedRun) -> StrOrText:
    """Why a run stands against none."""
    if one.reasons:
        return phrase("{}: {}.", one.side.capitalize(), join_texts("; ", one.reasons))
    return phrase("`{}` is only {}.", one.run.title, one.side)
