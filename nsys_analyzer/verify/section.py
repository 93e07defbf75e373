"""Describes a verification, and the history of all verifications, as sections of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nsys_analyzer.analysis.comparison.turns import WorkDifference
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.model import (
    Answer,
    Block,
    Field,
    Interval,
    Lines,
    Listing,
    Paragraph,
    Report,
    Section,
    SignedChange,
    make_table,
)
from nsys_analyzer.report.sections.findings import summarize_finding
from nsys_analyzer.report.units import format_change, format_ms, format_ms_range, format_number
from nsys_analyzer.text import plural
from nsys_analyzer.verify.ledger import Entry, widening_factor

_SHORT_VERDICTS = {"no change that can be told": "no change seen"}
_HELD_CELLS = {True: "yes", False: "no", None: None}


def verification_section(
    entry: Entry, more_pairs: int | None, remark: str, findings_after: Sequence[Finding]
) -> Section:  # fmt: skip
    """Returns the section with the verdict, the comparison with the prediction, and what to do next.

    Args:
        entry: the result of the measurement.
        more_pairs: how many more pairs of processes would show a change; None if more than 1,000.
        remark: why there is no prediction, or what could not be compared.
        findings_after: the findings of the new program.
    """
    times_text = f"{format_ms(entry.before_ms)} → {format_ms(entry.after_ms)}"
    pairs_text = f"{entry.pairs} {plural(entry.pairs, 'pair')} of processes that took turns, without a profiler"
    verdict = f"{entry.verdict.capitalize()}: a step takes {times_text}{_change_in_percent(entry)}, in {pairs_text}."
    if entry.reasons:
        return Section("verify", "", (Answer(verdict), Listing(entry.reasons)))
    blocks: list[Block] = [Answer(verdict)]
    if entry.verdict == "no change that can be told" and more_pairs != 0:
        number = f"{'At least' if entry.pairs == 1 else 'About'} {more_pairs}" if more_pairs else "More than 1,000"
        blocks.append(
            Paragraph(f"{number} more {plural(more_pairs or 2, 'pair')} would show a change: increase --time-limit.")
        )
    if prediction := entry.prediction:
        interval = format_ms_range(prediction.low_ms, prediction.high_ms)
        outcome = {
            True: "The prediction held: the measured and the predicted interval overlap",
            False: "The prediction did not hold: the change saves "
            f"{'more' if entry.saved_ms > prediction.high_ms else 'less'} than predicted",
            None: "It is not known whether the prediction held",
        }[entry.held]
        prediction_text = f"`{prediction.finding}` ({prediction.title}) was predicted to save {interval}"
        blocks.append(Paragraph(f"{prediction_text}. {outcome}."))
    if entry.before_joules and entry.after_joules:
        share = format_change(SignedChange(entry.after_joules / entry.before_joules - 1), "percent")
        joules = " → ".join(format_number(value, "J") for value in (entry.before_joules, entry.after_joules))
        blocks.append(Paragraph(f"In the runs of the two captures, a step takes {joules} ({share})."))
    if remark:
        blocks.append(Paragraph(remark))
    if findings_after:
        blocks.append(Paragraph(f"What to do next: {summarize_finding(findings_after[0])}."))
    return Section("verify", "", tuple(blocks))


def _change_in_percent(entry: Entry) -> str:
    """Returns the change as a share of the old step, with the 95 % interval of the change if it is known."""
    bounds = [bound for bound in (entry.low_ms, entry.high_ms) if bound is not None]
    change, *ends = (format_change(SignedChange(ms / entry.before_ms), "percent") for ms in (entry.change_ms, *bounds))
    return f" ({change}, {' to '.join(ends)} at 95\N{NO-BREAK SPACE}%)" if len(ends) == 2 else f" ({change})"


def history_report(entries: Sequence[Entry], *, calibrate: bool = False) -> Report:
    """Returns the report of a ledger: a table and a curve.

    Args:
        entries: the entries of the ledger, the oldest first.
        calibrate: whether to add the factor by which predicted intervals must be wider.
    """
    counts = Counter(entry.verdict for entry in entries)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    summary = f"{len(entries)} {plural(len(entries), 'verification')}: {verdicts}."
    if outcomes := [entry.held for entry in entries if entry.held is not None]:
        summary += f" {sum(outcomes)} of {len(outcomes)} predictions held."
    blocks: list[Block] = [Answer(summary)]
    if calibrate:
        try:
            factor = widening_factor(entries)
            share = "80\N{NO-BREAK SPACE}% of the measured savings"
            blocks.append(Paragraph(f"To contain {share}, intervals must be {factor:.2f} times as wide."))
        except NsysAnalyzerError as error:  # without a factor, only the table and the curve are shown
            blocks.append(Paragraph(f"{error}."))
    blocks.append(make_table(_FIELDS, entries))
    series = (
        ("before", tuple((float(place), entry.before_ms) for place, entry in enumerate(entries, 1))),
        ("after", tuple((float(place), entry.after_ms) for place, entry in enumerate(entries, 1))),
    )
    blocks.append(Lines("history", "A step before and after each change", series, "verification", "ms"))
    return Report("Predicted and measured changes", (Section("history", "", tuple(blocks)),))


def _measured_saving(entry: Entry) -> Interval | float:
    if entry.low_ms is None or entry.high_ms is None:
        return entry.saved_ms
    return Interval(-entry.high_ms, -entry.low_ms)


_FIELDS: tuple[Field[Entry], ...] = (
    Field("time, UTC", "text", lambda entry: entry.time[5:16].replace("T", " ")),
    Field("verdict", "text", lambda entry: _SHORT_VERDICTS.get(entry.verdict, entry.verdict)),
    Field("finding", "text", lambda entry: entry.prediction.finding if entry.prediction else None),
    Field("step, ms", "ms", lambda entry: entry.after_ms),
    Field("saved, ms", "ms", _measured_saving),
    Field("predicted", "ms", lambda entry: Interval(p.low_ms, p.high_ms) if (p := entry.prediction) else None),
    Field("held", "text", lambda entry: _HELD_CELLS[entry.held]),
    Field("hardware", "text", lambda entry: entry.gpu or entry.host_cpu),
    # The abbreviated commit hash, with a + if tracked files differed from the commit.
    Field(
        "commit",
        "text",
        lambda entry: f"{entry.git_commit[:9]}{'+' * bool(entry.git_dirty)}" if entry.git_commit else None,
    ),
)


def describe_work_difference(difference: WorkDifference) -> str:
    """Returns how the work of two programs differs, without the final period."""
    before, after = difference.before, difference.after
    if difference.kind == "rows":
        return f"A step computes {before:,.0f} rows before the change and {after:,.0f} after it: the batches differ"
    return f"The loss of step {difference.step} is {before:.4g} before the change and {after:.4g} after it"
