"""Verifies a change: measures the old and the new program in turns, and compares the result with the prediction."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from nsys_analyzer.analysis.comparison.turns import ProcessPairs, TimedProcess
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
from nsys_analyzer.capture.jobs import lock_folder, run_sweep
from nsys_analyzer.capture.plan import Plan
from nsys_analyzer.capture.targets import is_python, program_target
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.experiments.evidence import load_runs
from nsys_analyzer.share.names import remove_secrets
from nsys_analyzer.system.process import Progress
from nsys_analyzer.verify.ledger import Entry, Prediction, judge_change, prediction_holds
from nsys_analyzer.verify.section import describe_work_difference
from nsys_analyzer.verify.turns import HOW_TO_NAME_OLD, Program, checkout, take_turns, with_blocks_of_steps


@dataclass(frozen=True)
class Request:
    """A change to verify.

    Attributes:
        folder: the folder with the captures of the old program.
        plan: the plan that runs the new program.
        old_command: the command line of the old program. If it is None, the captures give it.
        commit: the commit of the old program. If it is None, the captures give it if the command lines are equal.
        finding: the ID of the finding that the change acts on. None selects the finding with the largest saving that
            the new program no longer has.
        time_limit_s: the time limit of all pairs together, in seconds.
        timeout_s: the time limit of each pair and of the recording, in seconds.
        output_dir: the folder for the logs and the capture of the new program.
        is_recorded: whether the new program is recorded after the measurement.
        version: the version of nsys-analyze, which the ledger keeps.
    """

    folder: Path
    plan: Plan
    old_command: str | None
    commit: str | None
    finding: str | None
    time_limit_s: float
    timeout_s: float
    output_dir: Path
    is_recorded: bool
    version: str


@dataclass(frozen=True)
class Verification:
    """The result of verifying a change.

    Attributes:
        entry: the line for the ledger.
        more_pairs: how many more pairs of processes would show a change; None if more than 1,000.
        remark: why there is no prediction, or what could not be compared; empty if there is nothing to remark.
        before, after: the captures of both programs; ``after`` is None if the new program was not recorded.
    """

    entry: Entry
    more_pairs: int | None
    remark: str
    before: CaptureSummary
    after: CaptureSummary | None

    @property
    def findings_after(self) -> tuple[Finding, ...]:
        """Returns the findings of the new program's capture."""
        return _findings_of(self.after) if self.after else ()


def verify(request: Request, tell: Callable[[str], None]) -> Verification:
    """Measures a change, records the new program, and compares both with the prediction.

    Args:
        request: the change.
        tell: reports the progress, and why the new program could not be recorded.

    Raises:
        ConfigurationError: the old program is not known, or has no such finding.
        CaptureError: one of the programs failed.
    """
    plan, output_dir = request.plan, request.output_dir
    before = _capture_of_program(load_runs(request.folder), plan, request.folder)
    ids = [finding.id for finding in _findings_of(before)]
    if request.finding and request.finding not in ids:
        raise ConfigurationError(
            f"{request.folder} has no finding {request.finding!r}", f"It has: {', '.join(ids) or 'none'}"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    with _prepare_programs(request, before, tell) as programs:
        # Pairs are measured until the change is known, or until another pair would exceed the time limit.
        start, timed_pairs = time.monotonic(), list[tuple[TimedProcess, TimedProcess]]()
        for pair in take_turns(programs, request.output_dir, request.timeout_s):
            timed_pairs.append(pair)
            turns, elapsed_s = ProcessPairs(tuple(timed_pairs)), time.monotonic() - start
            old_ms, new_ms = (process.step_ms for process in pair)
            tell(f"pair {len(timed_pairs)}: {old_ms:.4g} → {new_ms:.4g} ms per step, {elapsed_s:.0f} s")
            if (
                turns.is_certain_enough
                or turns.work_differences
                or elapsed_s * (1 + 1 / len(timed_pairs)) > request.time_limit_s
            ):
                break
        reasons = tuple(map(describe_work_difference, turns.work_differences))
        after = _record_new_program(request, tell) if request.is_recorded and not reasons else None
    change, prediction, remarks = turns.change, None, list[str]()
    if not reasons:
        prediction, missing_reason = find_prediction(before, after, request.finding)
        remarks.append(missing_reason)
        if not turns.has_losses:
            remarks.append("The losses are not known, so the results of both programs may differ.")
        if turns.unclear_loss_difference:
            difference = describe_work_difference(turns.unclear_loss_difference)
            remarks.append(f"{difference}: more pairs would show whether this difference is chance.")
    manifest = after.run if after else before.run
    old, new = (
        shlex.join(remove_secrets(["python" if word == sys.executable else word for word in program.target.program]))
        for program in programs
    )
    time_of_end = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # The captures measured energy one after the other, so only captures of one kind of GPU are compared.
    energies = (before.energy, after.energy) if after and before.gpu == after.gpu else (None, None)
    before_joules, after_joules = (energy.joules if all(energies) and energy else None for energy in energies)
    entry = Entry(
        verdict=judge_change(change, reasons), time=time_of_end, before=old, after=new, before_ms=change.before_ms,
        after_ms=change.after_ms, change_ms=change.ms, low_ms=change.low_ms, high_ms=change.high_ms,
        pairs=len(turns.pairs), reasons=reasons, prediction=prediction,
        held=prediction_holds(prediction, change) if prediction else None, version=request.version,
        before_joules=before_joules, after_joules=after_joules,
        **{name: getattr(manifest, name, None) for name in ("gpu", "host_cpu", "torch", "git_commit", "git_dirty")},
    )  # fmt: skip
    return Verification(entry, turns.more_pairs, " ".join(filter(None, remarks)), before, after)


def find_prediction(
    before: CaptureSummary, after: CaptureSummary | None, finding_id: str | None
) -> tuple[Prediction | None, str]:
    """Returns the prediction of the finding that the change acts on, or the reason why there is none.

    Args:
        before: the capture of the old program.
        after: the capture of the new program, if it was recorded.
        finding_id: the finding that the change acts on. None selects the finding with the largest saving that the new
            program no longer has.
    """
    ids_after = {finding.id for finding in _findings_of(after)} if after else set()
    findings = [
        finding
        for finding in _findings_of(before)
        if (finding.id == finding_id if finding_id else after and finding.id not in ids_after)
    ]
    if not findings:
        if _findings_of(before) and after:
            return (
                None,
                "Every finding of BEFORE is still found: name the finding that was acted on with --finding.",
            )
        return None, f"{before.findings_missing or 'BEFORE has no findings, so nothing was predicted.'}"
    if after and before.gpu != after.gpu:
        return None, f"BEFORE was recorded on {before.gpu}, and predicts no saving on {after.gpu}."
    finding = findings[0]
    return Prediction(finding.id, finding.title, finding.saves_ms_low, finding.saves_ms_high), ""


def _capture_of_program(runs: Sequence[Summary], plan: Plan, folder: Path) -> CaptureSummary:
    """Returns the capture of the program in a folder: the capture with the new program's name, else the only capture.

    Raises:
        ConfigurationError: the folder contains captures of no program, or of several programs.
    """
    captures = [run for run in runs if isinstance(run, CaptureSummary) and run.run and run.run.command]
    captures = [capture for capture in captures if capture.name == plan.targets[0].name] or captures
    if not captures or len({capture.run.command for capture in captures if capture.run}) > 1:
        contents = f"{len(captures)} programs" if captures else "no run of a program"
        raise ConfigurationError(
            f"{folder} contains {contents}", "Give a folder that nsys-analyze run -- PROGRAM wrote"
        )
    return captures[0]


def _findings_of(capture: CaptureSummary) -> tuple[Finding, ...]:
    return capture.diagnosis.findings if capture.diagnosis else ()


@contextmanager
def _prepare_programs(
    request: Request, before: CaptureSummary, tell: Callable[[str], None]
) -> Iterator[tuple[Program, Program]]:
    """Yields the old and the new program. If their command lines are equal, the old program is taken from a commit.

    Raises:
        ConfigurationError: the old program is not known.
    """
    run, target, commit = before.run, request.plan.targets[0], request.commit
    command_words = tuple(shlex.split(request.old_command or (run.command if run else "") or ""))
    # A manifest records any Python interpreter as "python", so the old program gets the interpreter of the new one.
    if command_words[:1] == ("python",) and is_python(target.program[0]):
        command_words = (target.program[0], *command_words[1:])
    if "***" in command_words:
        raise ConfigurationError("The command line in BEFORE had keys or passwords, which are hidden", HOW_TO_NAME_OLD)
    if command_words[1:] == target.program[1:] and not request.old_command and not commit:
        commit = run.git_commit if run and not run.git_dirty else None
        if commit is None:
            raise ConfigurationError(
                "The command lines of the old and the new program are equal, and the old commit is not known",
                HOW_TO_NAME_OLD,
            )
        tell(f"The old program is taken from commit {commit[:9]}, from which BEFORE was recorded.")
    step_ms = before.step.reported_ms if before.step else None
    new = Program("new", with_blocks_of_steps(target, step_ms), Path.cwd())
    with checkout(commit, command_words) as (folder, command_words, root_and_worktree):
        old_target = program_target(command_words, target.run, target.annotation, target.ranks)
        yield Program("old", with_blocks_of_steps(old_target, step_ms), folder, root_and_worktree), new


def _record_new_program(request: Request, tell: Callable[[str], None]) -> CaptureSummary | None:
    """Records the new program once, and returns its capture; reports a failure and returns None."""
    plan, folder = request.plan, request.output_dir
    try:
        with lock_folder(folder):
            silent_progress = Progress(lambda *_: None, lambda *_: None)
            (result,) = run_sweep(plan.targets, folder, plan.profiler, request.timeout_s, silent_progress)
        if result.status == "ok":
            return _capture_of_program(load_runs(folder), plan, folder)
        tell(f"The new program could not be recorded: {result.message}")
    except (NsysAnalyzerError, OSError) as error:
        tell(f"The new program could not be recorded: {error}")
    return None
