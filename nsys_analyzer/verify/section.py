"""What a change brought, measured and predicted, in words; and what was measured so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from nsys_analyzer.report.units import format_change, format_ms, format_ms_range
from nsys_analyzer.text import plural
from nsys_analyzer.verify.ledger import Entry, widening

_SHORT = {"no change that can be told": "no change seen"}
_HELD = {True: "yes", False: "no", None: None}


def answer(entry: Entry, more_pairs: int | None, unseen: str, left: Sequence[Finding]) -> Section:
    """The verdict, the prediction beside it, and what comes next.

    Args:
        entry: what was measured.
        more_pairs: how many more pairs of processes would tell a change, None where it is too many to count.
        unseen: why there is no prediction, or what could not be compared.
        left: the findings of the program after the change.
    """
    return Section("verify", "", tuple(_blocks(entry, more_pairs, unseen, left)))


def _blocks(entry: Entry, more_pairs: int | None, unseen: str, left: Sequence[Finding]) -> Iterator[Block]:
    times = f"{format_ms(entry.before_ms)} → {format_ms(entry.after_ms)}"
    pairs = f"{entry.pairs} {plural(entry.pairs, 'pair')} of processes that took turns, without a profiler"
    yield Answer(f"{entry.verdict.capitalize()}: a step takes {times}{_interval(entry)}, in {pairs}.")
    if entry.reasons:
        yield Listing(entry.reasons)
        return
    if entry.verdict == "no change that can be told" and more_pairs != 0:
        more = (
            "More than 1,000" if more_pairs is None else f"{'At least' if entry.pairs == 1 else 'About'} {more_pairs}"
        )
        yield Paragraph(f"{more} more {plural(more_pairs or 2, 'pair')} would tell: give more --time-limit.")
    if told := entry.prediction:
        predicted = f"`{told.finding}` ({told.title}) was to save {format_ms_range(told.low_ms, told.high_ms)}"
        held = {
            True: "it held: the measured interval and the predicted one meet",
            False: f"it did not hold: {'more' if entry.saved_ms > told.high_ms else 'less'} is saved",
            None: "whether it held is not known",
        }
        yield Paragraph(f"{predicted}; {held[entry.held]}.")
    if unseen:
        yield Paragraph(unseen)
    if left:
        yield Paragraph(f"What to do next: {summarize_finding(left[0])}.")


def _interval(entry: Entry) -> str:
    """The change as a share of the step before, with its interval of 95 %."""
    bounds = [bound for bound in (entry.low_ms, entry.high_ms) if bound is not None]
    change, *ends = (format_change(SignedChange(ms / entry.before_ms), "percent") for ms in (entry.change_ms, *bounds))
    return f" ({change}, {' to '.join(ends)} at 95\N{NO-BREAK SPACE}%)" if len(ends) == 2 else f" ({change})"


_FIELDS: tuple[Field[Entry], ...] = (
    Field("time, UTC", "text", lambda one: one.time[5:16].replace("T", " ")),
    Field("verdict", "text", lambda one: _SHORT.get(one.verdict, one.verdict)),
    Field("finding", "text", lambda one: one.prediction.finding if one.prediction else None),
    Field("step, ms", "ms", lambda one: one.after_ms),
    Field("saved, ms", "ms", lambda one: _measured(one)),
    Field("predicted", "ms", lambda entry: Interval(p.low_ms, p.high_ms) if (p := entry.prediction) else None),
    Field("held", "text", lambda one: _HELD[one.held]),
    Field("hardware", "text", lambda one: one.gpu or one.host_cpu),
    Field("commit", "text", lambda one: f"{one.git_commit[:9]}{'+' * bool(one.git_dirty)}" if one.git_commit else None),
)


def _measured(one: Entry) -> Interval | float:
    if one.low_ms is None or one.high_ms is None:
        return one.saved_ms
    return Interval(-one.high_ms, -one.low_ms)


def history(entries: Sequence[Entry], *, calibrate: bool = False) -> Report:
    """Returns the ledger as a table and a curve.

    Args:
        entries: the oldest first.
        calibrate: whether to say how wide intervals would have to be.
    """
    judged = [one for one in entries if one.held is not None]
    verdicts = ", ".join(
        f"{sum(one.verdict == verdict for one in entries)} {verdict}"
        for verdict in dict.fromkeys(one.verdict for one in entries)
    )
    said = f"{len(entries)} {plural(len(entries), 'verification')}: {verdicts}."
    if judged:
        said += f" {sum(bool(one.held) for one in judged)} of {len(judged)} predictions held."
    blocks: list[Block] = [Answer(said)]
    if calibrate:
        try:
            wider = f"intervals must be {widening(entries):.2f} times as wide."
            blocks.append(Paragraph(f"For 80\N{NO-BREAK SPACE}% of what was measured to lie inside, {wider}"))
        except NsysAnalyzerError as error:  # the table above is right without it
            blocks.append(Paragraph(f"{error}."))
    blocks.append(make_table(_FIELDS, entries))
    series = (
        ("before", tuple((float(place), one.before_ms) for place, one in enumerate(entries, 1))),
        ("after", tuple((float(place), one.after_ms) for place, one in enumerate(entries, 1))),
    )
    blocks.append(Lines("history", "A step before and after each change", series, "verification", "ms"))
    return Report("What changes brought", (Section("history", "", tuple(blocks)),))
