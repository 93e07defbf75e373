"""Reports what changed between two runs: the step, the parts that explain its change, and, folded, other figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, GPU_SPREAD, Change
from nsys_analyzer.analysis.comparison.comparison import (
    Budget,
    Comparison,
    FindingChange,
    KernelChange,
    Obstacle,
    OperatorChange,
    PartChange,
    StepChange,
    find_timing_methods,
)
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import CannotAnswerError, DifferentConditionsError
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.facts import describe_message, say_all
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
from nsys_analyzer.report.sections.counters import describe_clock_change
from nsys_analyzer.report.units import (
    format_cell,
    format_change,
    format_count,
    format_ms_range,
    format_number,
    shorten_shapes,
)
from nsys_analyzer.text import NO_BREAK_SPACE, StrOrText, join_texts, phrase, plain, rounded_percent
from nsys_analyzer.trace.metadata import CPU
from nsys_analyzer.trace.phase_names import STEP

#: The most pairs and runs that are listed as not compared, and the most rows of the table of kernels.
_MAX_NOTES, _MAX_KERNEL_ROWS = 20, 10
#: A mean number of launches is rounded to an integer if it is at least this value.
_MIN_INTEGER_LAUNCHES = 100
#: Changes below this share of the step share one row of the table of parts, and are left out of the table of kernels.
_MIN_ROW_SHARE = 0.005
#: The report advises to record more steps if the variance between steps is at least this share of the variance of the
#: change.
_NOTABLE_STEP_VARIANCE_SHARE = 0.5
#: The interval of a change is omitted if its width exceeds this factor times the time before the change.
_MAX_INTERVAL_WIDTH_SHARE = 2
_GLOSSARY: tuple[StrOrText, ...] = (
    phrase(
        "*95\N{NO-BREAK SPACE}% interval* (in brackets): the change is more than chance if 0 lies outside of the "
        "interval. The half width of the interval is Student's t × the standard error. For medians, the standard error "
        "comes from the bootstrap. If a side has a single run, the interval includes the variation between runs of one "
        "program: a standard deviation of {} of the GPU's work, and of {} of the time in which the GPU waits for the "
        "program, as measured on shared H200 hosts. `--cpu-spread` gives another value for the second. If each side "
        "has several runs (`--repeats`), this variation is measured.",
        rounded_percent(GPU_SPREAD, 2), rounded_percent(CPU_SPREAD),
    ),
    phrase(
        "*before*, *after*: medians of steps and phases, and means per step of parts and kernels under the profiler. "
        "Kernels that run at the same time share that time, so that the times of kernels add up to the time of their "
        "class, and the times of parts add up to the step."
    ),
    phrase(
        "*A → B*: two kernels with different names that are assumed to do the same work, because they are launched "
        "equally often in a step."
    ),
)  # fmt: skip


def answer_comparison(comparisons: Comparisons, limit: float, *, detailed: bool = True) -> Section:
    """Returns the section on what changed in each pair. Several pairs share a table, and their figures are folded.

    Args:
        comparisons: the comparisons.
        limit: the change of the step that the verdict looks for, as a share of the step.
        detailed: whether to include the figures of each of several pairs.
    """
    pairs, title = comparisons.compared, f"{len(comparisons.compared)} comparisons"
    if len(pairs) == 1:
        title, blocks = _name_pair(pairs[0]), [*_describe_pair(pairs[0], limit)]
    else:
        fields: tuple[Field[Comparison], ...] = (
            Field("pair", "text", _name_pair),
            Field("before", "ms", lambda pair: pair.headline.before_ms if pair.headline else None),
            Field("after", "ms", lambda pair: pair.headline.after_ms if pair.headline else None),
            Field("change", "percent", lambda pair: SignedChange(pair.headline.share or 0) if pair.headline else None),
            Field("verdict", "text", lambda pair: pair.verdict(limit)),
            Field("largest change", "text", _describe_largest_change),
        )
        caption = "The step of each pair, ms (without the profiler if both sides were timed without a profiler):"
        blocks = [make_table(fields, pairs, caption)]
        if detailed:
            blocks += [Details(_name_pair(pair), (*_describe_pair(pair, limit),), _name_pair(pair)) for pair in pairs]
    notes = [
        phrase("`{}` and `{}`: {}.", pair.before.title, pair.after.title, join_texts("; ", caution_sentences(pair)))
        for pair in comparisons.refused
    ]
    for unmatched in comparisons.unmatched:
        if unmatched.obstacles:
            reasons = join_texts("; ", map(describe_obstacle, unmatched.obstacles))
            notes.append(phrase("{}: {}.", unmatched.side.capitalize(), reasons))
        else:
            notes.append(phrase("`{}` exists only {} the change.", unmatched.run.title, unmatched.side))
    if notes:
        hidden_notes = (f"and {len(notes) - _MAX_NOTES} more",) if len(notes) > _MAX_NOTES else ()
        blocks += [Paragraph("These runs are not compared:"), Listing((*notes[:_MAX_NOTES], *hidden_notes))]
    return Section("comparison", title, (*blocks, Details("What the terms mean", (Listing(_GLOSSARY),))))


def require_comparisons(comparisons: Comparisons) -> Comparisons:
    """Returns the comparisons if there are any.

    Raises:
        DifferentConditionsError: all pairs ran on different hardware, or were timed in different ways.
        CannotAnswerError: no pair could be compared for another reason.
    """
    refused_pairs = comparisons.refused
    if comparisons.compared or not refused_pairs:
        return comparisons
    reasons = dict.fromkeys(sentence for pair in refused_pairs for sentence in caution_sentences(pair))
    error = DifferentConditionsError if all(pair.conditions_differ for pair in refused_pairs) else CannotAnswerError
    reason = plain(join_texts("; ", reasons), "`")
    raise error(f"These runs cannot be compared: {reason}", "To compare them nevertheless, add --force")


def _name_pair(pair: Comparison) -> str:
    before, after = pair.before.title, pair.after.title
    return before if before == after else f"{before} → {after}"


def _describe_largest_change(pair: Comparison) -> str | None:
    """Returns the part of the step with the largest change that is more than chance, and its change."""
    parts = [part for part in pair.step.parts if part.change.is_change] if pair.step else []
    return f"{_name_part(parts[0])}, {_format_signed_ms(parts[0].change.ms)}" if parts else None


def _format_signed_ms(ms: float) -> str:
    return f"{format_change(SignedChange(ms), 'ms')}\N{NO-BREAK SPACE}ms"


# --- one pair


def _describe_pair(pair: Comparison, limit: float) -> Iterator[Block]:
    """Yields the verdict, remarks, what explains the change, and the other figures folded."""
    title, verdict, change = _name_pair(pair), pair.verdict(limit), pair.headline
    word = "Too uncertain to tell" if verdict == "unclear" else verdict.capitalize()
    clock = "without" if pair.unprofiled else "under"
    change_text = _describe_step_change(change, clock) if change else "the time of a step is not known for both sides."
    yield Answer(f"{word}: {change_text}", title)
    if remarks := (*_list_remarks(pair, limit),):
        yield Listing(remarks, capture=title)
    if pair.budgets:
        caption = f"Budgets per step, ms; the step and its phases are those {clock} the profiler:"
        yield make_table(_BUDGET_FIELDS, pair.budgets, caption, capture=title)
    if pair.cautions:
        yield Paragraph("The sides are compared because of --force, despite these differences:", title)
        yield Listing(caution_sentences(pair), capture=title)
    if pair.step:
        yield _tabulate_parts(pair.step, title)
    figures: list[Block] = []
    if time_rows := [*_list_times(pair)]:
        figures.append(_tabulate_changes("time", time_rows, "percent", "Times, ms:", title))
    if pair.step and (kernels := _tabulate_kernels(pair.step, title)).rows:
        figures.append(kernels)
    if pair.step and (operators := _tabulate_operators(pair, pair.step, title)).rows:
        figures.append(operators)
    if pair.findings:
        caption = "Findings and their savings (of several runs: the findings of most runs, and median savings):"
        figures += [Paragraph(caption, title), Listing(tuple(map(_describe_finding, pair.findings)), capture=title)]
    if figures:
        yield Details(
            "Times, kernels, operators and findings" if pair.operators else "Times, kernels and findings",
            tuple(figures),
            title,
        )


_BUDGET_FIELDS: tuple[Field[Budget], ...] = (
    Field("budget", "text", lambda budget: budget.quantity),
    Field("at most", "text", lambda budget: format_cell(budget.limit, budget.unit)),
    Field("is", "text", lambda budget: format_cell(budget.value, budget.unit)),
    Field("verdict", "text", lambda budget: budget.verdict),
)


def _describe_step_change(change: Change, clock: str) -> str:
    """Returns the step before and after, and its change with the interval as a share of the step before."""
    cell = _make_change_cell(change)
    if isinstance(cell, SignedChange):
        by = format_change(cell, "percent", interval_name="95\N{NO-BREAK SPACE}% interval ")
    else:
        by = f"{_format_signed_ms(change.ms)}{f' ({cell})' if cell else ''}"
    before, after = format_number(change.before_ms, "ms"), format_number(change.after_ms, "ms")
    return f"a step takes {before} → {after}{NO_BREAK_SPACE}ms {clock} the profiler, {by}."


def _make_change_cell(change: Change, unit: Literal["ms", "percent"] = "percent") -> SignedChange | str | None:
    """Returns a change with its interval in ms or as a share of the time before; None if that is not known."""
    if unit == "ms":
        return SignedChange(change.ms, change.low_ms, change.high_ms)
    if change.share is None:
        return None
    low, high = change.low_share, change.high_share
    if low is not None and high is not None and high - low > _MAX_INTERVAL_WIDTH_SHARE and not change.is_change:
        return "too short to tell"
    return SignedChange(change.share, low, high)


def _list_remarks(pair: Comparison, limit: float) -> Iterator[StrOrText]:
    """Yields remarks: what the verdict rests on, how the sides differ, and what the reader should know or do."""
    change, step, runs = pair.headline, pair.step, (*pair.before.runs, *pair.after.runs)
    if pair.same:
        yield "Both sides are the same capture."
    if change:
        run_counts = len(pair.before.runs), len(pair.after.runs)
        compared_counts, noun = (
            (run_counts, "run") if max(run_counts) > 1 else ((change.before_n, change.after_n), "step")
        )
        before, after = (
            format_count(count, noun) if count else "an unknown number of steps" for count in compared_counts
        )
        yield f"The comparison uses {before} before the change and {after} after the change."
    if pair.unprofiled and step:
        yield _describe_step_change(step.wall, "under").capitalize()
    if joules := pair.joules:
        before_joules, after_joules = (format_number(value, "J") for value in (joules.before_ms, joules.after_ms))
        cell = _make_change_cell(joules)
        by = format_change(cell, "percent", "95\N{NO-BREAK SPACE}% interval ") if isinstance(cell, SignedChange) else ""
        yield f"Without the profiler, a step takes {before_joules} → {after_joules}{f', {by}' if by else ''}."
    yield from describe_clock_change(pair.before.runs, pair.after.runs)
    for run in runs if pair.unprofiled is None else ():
        if run.unprofiled and (doubts := run.unprofiled.doubts.get(STEP)):
            reasons = "; ".join(map(plain, say_all(doubts)))
            yield f"The step of {run.title} without the profiler is not trusted: {reasons}."
    if pair.differences:
        rows = (f"{row.key.replace('_', ' ')} ({row.before} → {row.after})" for row in pair.differences)
        yield f"The sides differ in {', '.join(rows)}."
    for status in ("gone", "new"):
        if titles := [f"“{row.finding.title}”" for row in pair.findings or () if row.status == status]:
            yield f"{'New findings' if status == 'new' else 'Findings that are gone'}: {', '.join(titles)}."
    if step and round(step.before_launches) != round(step.after_launches):
        yield f"Kernels launched per step: {_format_launches(step.before_launches, step.after_launches)}."
    batches = {run.configuration and run.configuration.batch_size for run in runs}
    if step and step.common_factor and (None in batches or len(batches) > 1):
        yield f"The times of all large classes changed by the factor {step.common_factor:.2f}. Do batch sizes differ?"
    if pair.is_slowed_on_one_side:
        yield (
            "The profiler slows the two sides down differently. Record both in the same way, or compare times without "
            "the profiler."
        )
    if pair.verdict(limit) == "unclear" and change:
        yield _explain_how_to_narrow(change, limit)


def _explain_how_to_narrow(change: Change, limit: float) -> str:
    """Returns the advice on how to narrow the interval of a change that is too uncertain."""
    if change.low_share is None or change.high_share is None:
        return (
            "It is unknown how much the steps vary. Record more steps, or give the number of the steps and their "
            "standard deviation (steps, std_ms)."
        )
    half_width, threshold = rounded_percent((change.high_share - change.low_share) / 2), rounded_percent(limit)
    remedy = (
        "Record more steps, or several runs of each side."
        if change.inside > _NOTABLE_STEP_VARIANCE_SHARE
        else "The CPU time of a program varies from run to run. Record each side several times and compare the folders "
        "with --repeats, or give the spread of your machine with --cpu-spread."
    )
    return f"A change below {half_width} could not be detected, and the limit is {threshold}. {remedy}"


#: A row of a table of changes: its name, and the change.
_NamedChange = tuple[str, Change]


def _tabulate_changes(
    name: str, rows: Sequence[_NamedChange], unit: Literal["ms", "percent"], caption: str, title: str
) -> Table:
    fields: tuple[Field[_NamedChange], ...] = (
        Field(name, "text", lambda row: row[0]),
        Field("before", "ms", lambda row: row[1].before_ms),
        Field("after", "ms", lambda row: row[1].after_ms),
        Field("change (95\N{NO-BREAK SPACE}% interval)", unit, lambda row: _make_change_cell(row[1], unit)),
    )
    return make_table(fields, rows, caption, capture=title)


def _name_part(part: PartChange) -> str:
    """Returns the name of a part, such as "compute: matmul" or "idle: waits for the GPU"."""
    return f"{part.kind}: {CAUSE_WORDS.get(part.name, part.name)}" if part.name else part.kind


def _tabulate_parts(step: StepChange, title: str) -> Table:
    """Returns the table of the parts that explain the change, with the sum of the small ones. Each column adds up."""
    threshold_ms = _MIN_ROW_SHARE * max(step.wall.before_ms, step.wall.after_ms)
    small_changes = [part.change for part in step.parts if abs(part.change.ms) < threshold_ms]
    rows = [
        (_name_part(part), part.change)
        for part in step.parts
        if len(small_changes) == 1 or part.change not in small_changes
    ]
    if len(small_changes) > 1:
        sums_ms = (sum(change.before_ms for change in small_changes), sum(change.after_ms for change in small_changes))
        rows.append((f"{len(small_changes)} parts with less change", Change(*sums_ms, None, None, None, None)))
    caption = "What explains the change of the step under the profiler, ms, the largest change first:"
    return _tabulate_changes("part of the step", [*rows, ("the step", step.wall)], "ms", caption, title)


def _describe_finding(row: FindingChange) -> StrOrText:
    findings = (finding for finding in (row.before, row.after) if finding)
    savings = (format_ms_range(finding.saves_ms_low, finding.saves_ms_high) for finding in findings)
    return phrase("**{}**: {} ({})", row.status, row.finding.title, " → ".join(dict.fromkeys(savings)))


def _list_times(pair: Comparison) -> Iterator[_NamedChange]:
    """Yields the times of the step and the phases, first without the profiler and then under it.

    The wall time of a phase is left out if the program does not wait for the GPU work of the phase.
    """
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


def _tabulate_kernels(step: StepChange, title: str) -> Table:
    """Returns the table of the kernels whose time changed most, and by more than chance."""
    labels = make_short_labels(
        [name for part in step.parts for kernel in part.kernels for name in _list_kernel_names(kernel)]
    )

    def label_kernels(row: tuple[str, KernelChange]) -> str:
        """Returns the label of a kernel, or of both kernels of a pair; the class if the kernel has no name."""
        kernel_class, kernel = row
        side = " (only before)" if kernel.after_name is None else " (only after)" if kernel.before_name is None else ""
        return (" → ".join(labels[name] for name in _list_kernel_names(kernel)) or kernel_class) + side

    threshold_ms = _MIN_ROW_SHARE * max(step.wall.before_ms, step.wall.after_ms) / 2
    kernels = [(part.name, kernel) for part in step.parts for kernel in part.kernels]
    changed_kernels = [row for row in kernels if row[1].change.is_change and abs(row[1].change.ms) >= threshold_ms]
    fields: tuple[Field[tuple[str, KernelChange]], ...] = (
        Field("kernel", "text", label_kernels),
        Field("class", "text", lambda row: row[0]),
        Field("launches", "text", lambda row: _format_launches(row[1].before_launches, row[1].after_launches)),
        Field("before", "ms", lambda row: row[1].change.before_ms),
        Field("after", "ms", lambda row: row[1].change.after_ms),
        Field("change", "ms", lambda row: SignedChange(row[1].change.ms)),
    )
    caption = "The kernels whose time per step changed most, ms, and their launches per step:"
    largest_changes = sorted(changed_kernels, key=lambda row: -abs(row[1].change.ms))[:_MAX_KERNEL_ROWS]
    return make_table(fields, largest_changes, caption, capture=title, names=2)


def _tabulate_operators(pair: Comparison, step: StepChange, title: str) -> Table:
    """Returns the table of the operators whose kernel time changed most."""

    def describe_shapes_of(row: OperatorChange) -> str:
        """Returns the shapes of an operator, before and after if they differ."""
        side = " (only before)" if row.after_shapes is None else " (only after)" if row.before_shapes is None else ""
        shapes = (shorten_shapes(text) for text in (row.before_shapes, row.after_shapes) if text)
        return " → ".join(dict.fromkeys(shapes)) + side

    threshold_ms = _MIN_ROW_SHARE * max(step.wall.before_ms, step.wall.after_ms) / 2
    fields: tuple[Field[OperatorChange], ...] = (
        Field("operator", "code", lambda row: row.operator.removeprefix("aten::")),
        Field("shapes", "text", describe_shapes_of),
        Field("calls", "text", lambda row: _format_launches(row.before_calls, row.after_calls)),
        Field("before", "ms", lambda row: row.before_ms),
        Field("after", "ms", lambda row: row.after_ms),
        Field("change", "ms", lambda row: SignedChange(row.ms)),
    )
    changed_operators = [row for row in pair.operators or () if abs(row.ms) >= threshold_ms][:_MAX_KERNEL_ROWS]
    caption = "The operators whose kernel time per step changed most, ms, and their calls per step:"
    return make_table(fields, changed_operators, caption, capture=title, names=2)


def _list_kernel_names(kernel: KernelChange) -> tuple[str, ...]:
    """Returns the names of a kernel before and after, or one name if both are equal."""
    return tuple(dict.fromkeys(name for name in (kernel.before_name, kernel.after_name) if name))


def _format_launches(before: float, after: float) -> str:
    """Returns the launches per step before and after, or one number if both are equal after rounding."""
    rounded_numbers = (number if number < _MIN_INTEGER_LAUNCHES else round(number) for number in (before, after))
    return " → ".join(dict.fromkeys(format_number(number, "count") for number in rounded_numbers))


# --- why runs are not compared

_STATUS_CLAUSES = {
    "oom": "ran out of memory",
    "partial": "is partial: a range has no end, or some of its kernels are missing",
    "no_kernels": "contains no kernel",
    "failed": "failed",
    "timeout": "was stopped after its time limit",
    "not_profiled": "was not profiled",
}


def caution_sentences(pair: Comparison) -> tuple[StrOrText, ...]:
    """Returns the reasons against comparing a pair, without repetitions."""
    return tuple(dict.fromkeys(map(describe_obstacle, pair.cautions)))


def describe_obstacle(obstacle: Obstacle) -> StrOrText:
    """Returns a reason against comparing runs, without the final period."""
    run, *second = obstacle.runs
    if obstacle.kind == "not analysed":
        message = f" ({describe_message(run)})" if run.message else ""
        return f"{run.title} {_STATUS_CLAUSES.get(run.status, run.status)}{message}"
    if obstacle.kind == "no step":
        return f"{run.title} contains no step that ran on a GPU"
    (second_run,) = second
    if obstacle.kind == "hardware":
        return f"{run.title} ran on {run.hardware}, {second_run.title} on {second_run.hardware}"
    if obstacle.kind == "timing":
        return f"{run.title} was timed {_describe_timing(run)}, {second_run.title} {_describe_timing(second_run)}"
    if obstacle.difference:
        setting = obstacle.difference.key.replace("_", " ")
        before, after = obstacle.difference.before, obstacle.difference.after
        if run.title == second_run.title:
            return f"The {setting} is {before} in the first run, and {after} in the second run"
        return f"The {setting} is {before} in {run.title}, and {after} in {second_run.title}"
    if obstacle.kind == "modules":
        return f"The models of {run.title} and {second_run.title} have no module in common"
    assert run.step
    assert second_run.step
    if obstacle.kind == "kind of step":
        return phrase(
            "The steps are defined differently: a step of {} is {}, a step of {} is {}",
            run.title, run.step.unit, second_run.title, second_run.step.unit,
        )  # fmt: skip
    return phrase(
        "{} has {:,.0f} matmuls in {}, {} has {:,.0f} in {}, and no range name identifies a step (`--step RANGE`, "
        "`--steps N`)",
        run.title, run.step.matmuls, run.step.unit, second_run.title, second_run.step.matmuls, second_run.step.unit,
    )  # fmt: skip


def _describe_timing(run: Summary) -> str:
    methods = ("without a profiler" if name == "none" else f"under {name}" for name in find_timing_methods(run))
    return " and ".join(sorted(methods))
