"""The ledger: what was predicted and what was measured, a line of JSON for each ``nsys-analyze verify``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import LEDGER
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.system.atomic_write import append_text, check_regular
from nsys_analyzer.text import join_texts, plural

#: Measured predictions that are enough to widen others by, and the share of them that is to lie inside.
FEWEST, INSIDE = 5, 0.8

#: The beginning of each entry. Before it, a line may hold an unfinished entry, which is no entry.
_BEGINNING = b'{"verdict":'
Verdict = Literal["faster", "slower", "no change that can be told", "not comparable"]


class Prediction(msgspec.Struct, frozen=True):
    """What a finding said that its remedy saves a step, ms."""

    finding: str
    title: str
    low_ms: float
    high_ms: float

    @property
    def middle_ms(self) -> float:
        """Returns the middle of the interval."""
        return (self.low_ms + self.high_ms) / 2


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One verification.

    Attributes:
        verdict: what the measurement says.
        time: when it ended, UTC, ISO 8601.
        before, after: the command lines of both programs.
        before_ms, after_ms: a step of each, without a profiler.
        change_ms: after − before, with the ends of its interval of 95 %; None where too few pairs tell it.
        pairs: of processes that took turns.
        reasons: why the programs cannot be compared.
        prediction: of the finding that was acted on; None where there is none.
        held: whether the measured change lies inside the prediction, as far as it is known.
        gpu, host_cpu, torch, git_commit, git_dirty: as in a manifest, of the program after.
        version: of nsys-analyze.
    """

    verdict: Verdict
    time: str
    before: str
    after: str
    before_ms: float
    after_ms: float
    change_ms: float
    low_ms: float | None
    high_ms: float | None
    pairs: int
    version: str
    reasons: tuple[str, ...] = ()
    prediction: Prediction | None = None
    held: bool | None = None
    gpu: str | None = None
    host_cpu: str | None = None
    torch: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None

    @property
    def saved_ms(self) -> float:
        """Returns what a step is shorter by."""
        return -self.change_ms


def verdict_of(change: Change, reasons: Sequence[str]) -> Verdict:
    """Returns what a measured change says."""
    if reasons:
        return "not comparable"
    if not change.is_change:
        return "no change that can be told"
    return "faster" if change.ms < 0 else "slower"


def holds(prediction: Prediction, change: Change) -> bool | None:
    """Tells whether a prediction and the measured interval have savings in common; None where that is not known."""
    if change.low_ms is None or change.high_ms is None:
        return None
    return -change.high_ms <= prediction.high_ms and -change.low_ms >= prediction.low_ms


def now() -> str:
    """Returns the time as an entry holds it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append(entry: Entry, path: Path = LEDGER) -> None:
    """Adds a line to the ledger. If a full disk or a crash left half a line there, it ends that line first.

    Raises:
        NsysAnalyzerError: it cannot be written.
    """
    check_regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_ended = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        append_text(path, ("" if is_ended else "\n") + msgspec.json.encode(entry).decode() + "\n")
    except OSError as error:
        raise NsysAnalyzerError(f"{path} cannot be written ({error.strerror})", f"See: ls -ld {path.parent}") from error


def read_ledger(path: Path = LEDGER, tell: Callable[[str], None] = lambda _: None) -> tuple[Entry, ...]:
    """Returns the entries, the oldest first; ``tell`` reports unfinished entries, which are left out.

    Raises:
        NsysAnalyzerError: there is no such file, or a line of it is no entry.
    """
    remedy = "nsys-analyze verify writes one"
    check_regular(path, remedy)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise NsysAnalyzerError(f"{path}: cannot be read ({error.strerror})", remedy) from error
    entries = []
    for number, line in enumerate(lines, 1):
        text = line.strip(b"\0 \r")  # a crash may leave zeros in place of a line
        begin = max(text.rfind(_BEGINNING), 0)
        try:
            entries += [msgspec.json.decode(text[begin:], type=Entry)] if text else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            is_unfinished = text.startswith(_BEGINNING[: len(text)]) and not isinstance(error, msgspec.ValidationError)
            if not is_unfinished:
                raise NsysAnalyzerError(f"{path}: line {number} is no entry ({error})", "Remove the line") from error
            begin = len(text)
        if begin or b"\0" in line:
            tell(f"{path}: line {number} holds an unfinished entry, which is left out")
    return tuple(entries)


def widening(entries: Sequence[Entry]) -> float:
    """Returns the factor by which intervals must be wider for 80 % of the measured savings to lie inside.

    Raises:
        NsysAnalyzerError: too few predictions were measured.
    """
    off = [
        abs(entry.saved_ms - predicted.middle_ms) / (predicted.high_ms - predicted.low_ms) * 2
        for entry in entries
        if (predicted := entry.prediction) and not entry.reasons and predicted.high_ms > predicted.low_ms
    ]
    if len(off) < FEWEST:
        measured_count = f"{len(off)} {plural(len(off), 'prediction')}"
        raise NsysAnalyzerError(f"verify measured {measured_count}, too few to calibrate by", f"{FEWEST} are enough")
    return statistics.quantiles(off, n=10, method="inclusive")[round(INSIDE * 10) - 1]


def calibrated(
    captures: Sequence[CaptureSummary], path: Path, tell: Callable[[str], None] = lambda _: None
) -> tuple[CaptureSummary, ...]:
    """Returns captures whose findings have intervals as wide as a ledger asks for, and say so.

    Raises:
        NsysAnalyzerError: it cannot be read, or holds too few predictions.
    """
    entries = read_ledger(path, tell)
    factor, count = widening(entries), sum(one.prediction is not None for one in entries)
    said = f" Its interval is {factor:.2f} times as wide as that, by {count} savings that verify measured."

    def widened(finding: Finding) -> Finding:
        half = (finding.saves_ms - finding.saves_ms_low) * factor
        low, high = max(finding.saves_ms - half, 0.0), min(finding.saves_ms + half, finding.step_ms)
        derivation = join_texts("", (finding.derivation, said))
        return replace(finding, saves_ms_low=low, saves_ms_high=high, derivation=derivation)

    def told(capture: CaptureSummary) -> CaptureSummary:
        if capture.diagnosis is None:
            return capture
        findings = tuple(map(widened, capture.diagnosis.findings))
        return replace(capture, diagnosis=replace(capture.diagnosis, findings=findings), findings=findings)

    return tuple(map(told, captures))
