"""Reads and writes the ledger of predictions and measurements. Each ``nsys-analyze verify`` adds a line of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import LEDGER
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.finding_texts import write_finding
from nsys_analyzer.system.atomic_write import append_text, check_regular
from nsys_analyzer.text import join_texts, plural

#: The number of measured predictions that are needed to widen intervals.
MIN_PREDICTIONS = 5
#: The share of the measured savings that should lie inside the widened intervals.
CONTAINED_SHARE = 0.8

#: The first bytes of each entry. They show where a complete entry begins in a line that also has an unfinished entry.
_FIRST_BYTES = b'{"verdict":'
ChangeVerdict = Literal["faster", "slower", "no change that can be told", "not comparable"]


class Prediction(msgspec.Struct, frozen=True):
    """The saving per step, in ms, that a finding predicted."""

    finding: str
    title: str
    low_ms: float
    high_ms: float


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one verification, which is a line of the ledger.

    Attributes:
        verdict: the result of the measurement.
        time: the end of the measurement in UTC, ISO 8601.
        before, after: the command lines of both programs.
        before_ms, after_ms: the length of a step of each program without a profiler.
        change_ms: ``after_ms`` − ``before_ms``.
        low_ms, high_ms: the 95 % interval of the change; None if too few pairs were measured.
        pairs: the number of pairs of processes that took turns.
        version: the version of nsys-analyze.
        reasons: why the programs cannot be compared.
        prediction: the prediction of the finding that the change acts on; None if there is none.
        held: whether the measured and the predicted interval overlap; None if the measured interval is not known.
        before_joules, after_joules: the energy of a step in the captures of both programs; None if it is not known.
        gpu, host_cpu, torch, git_commit, git_dirty: the conditions of the new program, as in its manifest.
    """

    verdict: ChangeVerdict
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
    before_joules: float | None = None
    after_joules: float | None = None
    gpu: str | None = None
    host_cpu: str | None = None
    torch: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None

    @property
    def saved_ms(self) -> float:
        """Returns the saving per step that the pairs of processes showed, ms."""
        return -self.change_ms


def judge_change(change: Change, reasons: Sequence[str]) -> ChangeVerdict:
    """Returns the verdict on a measured change; ``reasons`` are the reasons why the programs cannot be compared."""
    if reasons:
        return "not comparable"
    if not change.is_change:
        return "no change that can be told"
    return "faster" if change.ms < 0 else "slower"


def prediction_holds(prediction: Prediction, change: Change) -> bool | None:
    """Tells whether the predicted and the measured interval overlap; None if the measured interval is not known."""
    if change.low_ms is None or change.high_ms is None:
        return None
    return -change.high_ms <= prediction.high_ms and -change.low_ms >= prediction.low_ms


def append_entry(entry: Entry, path: Path = LEDGER) -> None:
    """Adds a line to the ledger. If a full disk or a crash left the last line unfinished, a line break is added first.

    Raises:
        NsysAnalyzerError: the ledger cannot be written.
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
        NsysAnalyzerError: the file cannot be read, or one of its lines is not an entry.
    """
    remedy = "nsys-analyze verify writes one"
    check_regular(path, remedy)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise NsysAnalyzerError(f"{path}: cannot be read ({error.strerror})", remedy) from error
    entries = []
    for number, line in enumerate(lines, 1):
        text = line.strip(b"\0 \r")  # removes zero bytes, which a crash may leave in place of a line
        begin = max(text.rfind(_FIRST_BYTES), 0)
        try:
            entries += [msgspec.json.decode(text[begin:], type=Entry)] if text else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            is_unfinished = text.startswith(_FIRST_BYTES[: len(text)]) and not isinstance(
                error, msgspec.ValidationError
            )
            if not is_unfinished:
                raise NsysAnalyzerError(
                    f"{path}: line {number} is not an entry ({error})", "Remove the line"
                ) from error
            begin = len(text)
        if begin or b"\0" in line:
            tell(f"{path}: line {number} contains an unfinished entry, which is left out")
    return tuple(entries)


def widening_factor(entries: Sequence[Entry]) -> float:
    """Returns the factor by which predicted intervals must be wider to contain 80 % of the measured savings.

    Raises:
        NsysAnalyzerError: too few predictions were measured.
    """
    distances_in_half_widths = [
        abs(2 * entry.saved_ms - predicted.low_ms - predicted.high_ms) / (predicted.high_ms - predicted.low_ms)
        for entry in entries
        if (predicted := entry.prediction) and not entry.reasons and predicted.high_ms > predicted.low_ms
    ]
    count = len(distances_in_half_widths)
    if count < MIN_PREDICTIONS:
        raise NsysAnalyzerError(
            f"verify measured only {count} {plural(count, 'prediction')}",
            f"To calibrate intervals, {MIN_PREDICTIONS} are needed",
        )
    distance_deciles = statistics.quantiles(distances_in_half_widths, n=10, method="inclusive")
    return distance_deciles[round(CONTAINED_SHARE * 10) - 1]


def with_calibrated_intervals(
    captures: Sequence[CaptureSummary], path: Path, tell: Callable[[str], None] = lambda _: None
) -> tuple[CaptureSummary, ...]:
    """Returns the captures with wider intervals of their findings, based on the measured predictions in a ledger.

    The derivation of each finding names the factor.

    Raises:
        NsysAnalyzerError: the ledger cannot be read, or contains too few predictions.
    """
    entries = read_ledger(path, tell)
    factor, count = widening_factor(entries), sum(entry.prediction is not None for entry in entries)
    remark = f" The interval is widened by a factor of {factor:.2f}, from {count} savings that verify measured."

    def widen_interval(finding: Finding) -> Finding:
        """Returns a finding with a wider interval, which stays between 0 and the length of a step."""
        finding = write_finding(finding)
        half_width = (finding.saves_ms - finding.saves_ms_low) * factor
        low, high = max(finding.saves_ms - half_width, 0.0), min(finding.saves_ms + half_width, finding.step_ms)
        derivation = join_texts("", (finding.derivation, remark))
        return replace(finding, saves_ms_low=low, saves_ms_high=high, derivation=derivation)

    def calibrate_capture(capture: CaptureSummary) -> CaptureSummary:
        """Returns a capture with wider intervals of its findings."""
        if capture.diagnosis is None:
            return capture
        findings = tuple(map(widen_interval, capture.diagnosis.findings))
        return replace(capture, diagnosis=replace(capture.diagnosis, findings=findings), findings=findings)

    return tuple(map(calibrate_capture, captures))
