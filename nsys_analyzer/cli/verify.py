"""``nsys-analyze verify``: whether a changed program is faster, and whether the prediction held."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import INPUT, JUDGED, OUTPUT, RECORDING, RUNNING, command, option
from nsys_analyzer.cli.options import tell
from nsys_analyzer.configuration import LEDGER
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError

if TYPE_CHECKING:
    from nsys_analyzer.analysis.comparison.turns import ProcessPairs, TimedProcess
    from nsys_analyzer.analysis.findings.finding import Finding
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
    from nsys_analyzer.capture.plan import Plan
    from nsys_analyzer.verify.ledger import Prediction
    from nsys_analyzer.verify.turns import Program

#: The exit status of each verdict; 1 and 2 are errors, as of every command.
EXIT_STATUS = {"faster": 0, "slower": 3, "not comparable": 4, "no change that can be told": 5}
_OLD = "Give the old program by --before 'python old/train.py', or its commit by --before-commit"


@command(epilog="Example: nsys-analyze verify runs/train --before-commit HEAD~1 -- python train.py")
@click.argument("folder", type=click.Path(path_type=Path), metavar="BEFORE")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- PROGRAM ARGUMENTS...")
@option(INPUT, "--before", "old_command", metavar="COMMAND",
        help="The old program's command line. Default: that of BEFORE, where it is another one.")  # fmt: skip
@option(INPUT, "--before-commit", "commit", metavar="REVISION",
        help="Run the old program from this commit, in a worktree of its own. Default: the commit of BEFORE, where its "
        "command line is that of PROGRAM.")  # fmt: skip
@option(JUDGED, "--finding", metavar="ID", help="The finding of BEFORE that was acted on, such as host_sync. Default: "
        "the largest that is gone.")  # fmt: skip
@option(RUNNING, "--time-limit", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
        metavar="SECONDS", help="Measure no longer than this.")  # fmt: skip
@option(RUNNING, "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True,
        metavar="SECONDS", help="Time limit of each pair of processes, and of the profiled run.")  # fmt: skip
@option(RUNNING, "--warmup", type=click.IntRange(0), metavar="N", help="Steps of each process that are not measured. "
        "Default: as of run.")  # fmt: skip
@option(RECORDING, "--profiler", type=click.Choice(["nsys", "torch", "none"]), help="Profiler of the last run. "
        "Default: as of run; none measures only.")  # fmt: skip
@option(OUTPUT, "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        default=Path("verified"), show_default=True, help="Gets the capture of the new program, and logs.")  # fmt: skip
@click.pass_context
def verify(
    ctx: click.Context, folder: Path, program: tuple[str, ...], old_command: str | None, commit: str | None,
    finding: str | None, time_limit: float, timeout: float, warmup: int | None, profiler: str | None, output_dir: Path,
) -> None:  # fmt: skip
    """Measure the program of BEFORE and PROGRAM in turns, and say whether the prediction held.

    BEFORE is a folder that run wrote. Pairs of processes, one of each program, take turns without a profiler until
    the change is known, or --time-limit is over; then PROGRAM is recorded once. The interval allows for having been
    looked at after each pair. A line of .nsys-analyze/ledger.jsonl keeps the result.

    Exit status: 0 faster, 3 slower, 4 not comparable (other losses or batches), 5 no change that can be told.
    """
    from nsys_analyzer.capture.plan import Recording, make_plan
    from nsys_analyzer.cli.run_progress import interruptible
    from nsys_analyzer.experiments.gather import load_runs
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.verify import ledger
    from nsys_analyzer.verify.section import answer

    recording = Recording(profiler=profiler if profiler != "none" else "torch")
    options = {} if warmup is None else {"warmup_steps": (warmup,)}
    plan = make_plan(options=options, recording=recording, program=program)
    before = _captured(load_runs(folder, ()), plan, folder)
    if finding and finding not in (ids := [candidate.id for candidate in _findings(before)]):
        raise ConfigurationError(f"{folder} has no finding {finding!r}", f"It has: {', '.join(ids) or 'none'}")
    output_dir.mkdir(parents=True, exist_ok=True)
    with interruptible(output_dir, ""), ExitStack() as stack:
        programs = _programs(stack, before, plan, program, old_command, commit)
        turns = _measure(programs, output_dir, time_limit, timeout)
        reasons = tuple(turns.other_work())
        after = None if profiler == "none" or reasons else _record(plan, output_dir, timeout)
    change, prediction, unseen = turns.change, None, ""
    if not reasons:
        prediction, unseen = _prediction(before, after, finding)
        if not turns.has_losses:
            unseen = f"{unseen} No losses of both programs are known, nor whether they compute the same.".lstrip()
        if turns.unclear_loss:
            unseen = f"{unseen} {turns.unclear_loss}: more pairs would tell whether that is chance.".lstrip()
    made = before.run
    entry = ledger.Entry(
        verdict=ledger.verdict_of(change, reasons), time=ledger.now(), before=_shown(programs[0]),
        after=_shown(programs[1]), before_ms=change.before_ms, after_ms=change.after_ms, change_ms=change.ms,
        low_ms=change.low_ms, high_ms=change.high_ms, pairs=len(turns.pairs), reasons=reasons, prediction=prediction,
        held=ledger.holds(prediction, change) if prediction else None, **_machine(after.run if after else made),
    )  # fmt: skip
    print_section(answer(entry, turns.more_pairs, unseen, _findings(after) if after else ()))
    try:
        ledger.append(entry)
        if after:
            _explain(before, after)
        click.echo(f"\n{LEDGER}")
    except NsysAnalyzerError as error:  # the verdict is right without them
        tell(f"\n{error}")
    ctx.exit(EXIT_STATUS[entry.verdict])


def _captured(runs: tuple[Summary, ...], plan: Plan, folder: Path) -> CaptureSummary:
    """Returns the run of a program in BEFORE: the one called like the new one, else the only one.

    Raises:
        ConfigurationError: there is none, or several.
    """
    from nsys_analyzer.analysis.summary.summary import CaptureSummary

    made = [one for one in runs if isinstance(one, CaptureSummary) and one.run and one.run.command]
    chosen = [one for one in made if one.name == plan.targets[0].name] or made
    if not chosen or len({one.run.command for one in chosen if one.run}) > 1:
        what = f"{len(chosen)} programs" if chosen else "no run of a program"
        raise ConfigurationError(f"{folder} holds {what}", "Give a folder that nsys-analyze run -- PROGRAM wrote")
    return chosen[0]


def _findings(capture: CaptureSummary) -> tuple[Finding, ...]:
    return capture.diagnosis.findings if capture.diagnosis else ()


def _programs(
    stack: ExitStack, before: CaptureSummary, plan: Plan, program: tuple[str, ...], old: str | None, commit: str | None
) -> tuple[Program, Program]:
    """Returns the old program and the new one; the old one is that of a commit where both are called the same.

    Raises:
        ConfigurationError: nobody knows what the old program was.
    """
    from nsys_analyzer.inputs.targets import is_python, program_target
    from nsys_analyzer.verify.turns import Program, checkout, measured

    made, target = before.run, plan.targets[0]
    words = tuple(shlex.split(old or (made.command if made else "") or ""))
    if words[:1] == ("python",) and is_python(program[0]):  # a manifest's name for the program's Python
        words = (program[0], *words[1:])
    if "***" in words:
        raise ConfigurationError("The command line of BEFORE holds keys, which are not kept", _OLD)
    same = words[1:] == program[1:] and not old
    if same and not commit:
        commit = made.git_commit if made and not made.git_dirty else None
        if commit is None:
            raise ConfigurationError("The old program is called like the new one, and was of no commit", _OLD)
        tell(f"The old program is that of commit {commit[:9]}, from which BEFORE was recorded.")
    step_ms = before.step.said_ms if before.step else None
    new = Program("new", measured(target, step_ms), Path.cwd())
    place, words, moved = stack.enter_context(checkout(commit, words)) if commit else (Path.cwd(), words, None)
    former = program_target(words, target.run, target.annotation, target.ranks)
    return Program("old", measured(former, step_ms), place, moved), new


def _measure(programs: tuple[Program, Program], folder: Path, limit_s: float, timeout_s: float) -> ProcessPairs:
    """Measures pairs of processes until they tell enough, or the time is over."""
    from nsys_analyzer.analysis.comparison.turns import ProcessPairs
    from nsys_analyzer.verify.turns import take_turns

    begun, pairs = time.monotonic(), list[tuple["TimedProcess", "TimedProcess"]]()
    for pair in take_turns(programs, folder, timeout_s):
        pairs.append(pair)
        turns, took = ProcessPairs(tuple(pairs)), time.monotonic() - begun
        old, new = (one.step_ms for one in pair)
        click.echo(f"pair {len(pairs)}: {old:.4g} → {new:.4g} ms a step, {took:.0f} s", err=True)
        if turns.is_enough or any(turns.other_work()) or took * (1 + 1 / len(pairs)) > limit_s:
            break
    return turns


def _record(plan: Plan, folder: Path, timeout_s: float) -> CaptureSummary | None:
    """Records the new program once; None if that fails, which it reports."""
    from nsys_analyzer.capture.jobs import locked, run_sweep
    from nsys_analyzer.experiments.gather import load_runs
    from nsys_analyzer.system.process import Progress

    silent = Progress(lambda *_: None, lambda *_: None)
    try:
        with locked(folder):
            (result,) = run_sweep(plan.targets, folder, plan.profiler, timeout_s, silent)
        if result.status == "ok":
            return _captured(load_runs(folder, ()), plan, folder)
        tell(f"The new program could not be recorded: {result.message}")
    except (NsysAnalyzerError, OSError) as error:  # the measurement is right without the recording
        tell(f"The new program could not be recorded: {error}")
    return None


def _prediction(
    before: CaptureSummary, after: CaptureSummary | None, asked: str | None
) -> tuple[Prediction | None, str]:
    """Returns what the finding that was acted on predicted, or why there is nothing."""
    from nsys_analyzer.verify.ledger import Prediction

    gone = {one.id for one in _findings(after)} if after else set()
    found = [one for one in _findings(before) if (one.id == asked if asked else after and one.id not in gone)]
    if not found:
        why = "Every finding of BEFORE is still there: --finding names the one that was acted on."
        return None, why if _findings(before) and after else f"{before.findings_missing or 'BEFORE predicted nothing.'}"
    if after and before.gpu != after.gpu:
        return None, f"BEFORE was recorded on {before.gpu}, and predicts nothing for {after.gpu}."
    one = found[0]
    return Prediction(one.id, one.title, one.saves_ms_low, one.saves_ms_high), ""


def _shown(program: Program) -> str:
    from nsys_analyzer.share.names import without_secrets

    words = ["python" if word == sys.executable else word for word in program.target.program]
    return shlex.join(without_secrets(words))


def _machine(made: Any) -> dict[str, Any]:
    from nsys_analyzer import __version__

    names = ("gpu", "host_cpu", "torch", "git_commit", "git_dirty")
    return {"version": __version__, **{name: getattr(made, name, None) for name in names}}


def _explain(before: CaptureSummary, after: CaptureSummary) -> None:
    """Prints what explains the change, as compare does."""
    from dataclasses import replace

    from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.report.model import Table
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.sections.comparison import answer_comparison

    section = answer_comparison(compare_runs((before,), (after,), repeats=True), DEFAULT_THRESHOLD, detailed=False)
    tables = tuple(one for one in section.blocks if isinstance(one, Table))
    if tables:
        print_section(replace(section, title="", blocks=tables))
