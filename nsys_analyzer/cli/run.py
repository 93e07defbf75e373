"""``nsys-analyze run``: times and profiles a sweep of configurations, or any program, and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.analysis.transformer.models import list_model_names
from nsys_analyzer.cli.help import CONFIGURATION, PROGRAM, RECORDING, command, option
from nsys_analyzer.cli.options import list_option, price_options, quote_command_line, running_options, target_options
from nsys_analyzer.configuration import OPTIONS, Prices
from nsys_analyzer.errors import CaptureError, NoSpaceError, NsysAnalyzerError
from nsys_analyzer.report.model import Answer
from nsys_analyzer.text import plain

if TYPE_CHECKING:
    from nsys_analyzer.capture.plan import Plan
    from nsys_analyzer.capture.targets import Target

#: The number of characters after which the printed list of other runs is cut.
_MAX_TITLES_WIDTH = 200
_SPACE_HINT = "Free some space, or name another --output-dir; finished results stay, and --resume continues"


@command(epilog="Example: nsys-analyze run --model small,medium --context-length 128,256 --precision bf16 --dry-run")
@list_option(CONFIGURATION, "--model", "model", click.STRING, "NAME", f"Model: {list_model_names()}. Default: small.")
@target_options
@option(
    CONFIGURATION, "--target-option", multiple=True, metavar="OPTION",
    help="A further option for the program that trains the transformer, such as '--seed 1'. Repeatable.",
)  # fmt: skip
@option(RECORDING, "--profiler", type=click.Choice(["nsys", "torch", "none"]),
              help="The profiler. Default: nsys if this machine has nsys and a GPU, else torch.")  # fmt: skip
@option(RECORDING, "--memory", is_flag=True,
        help="Also record when memory is allocated and freed, and run the program once more for a snapshot of "
        "PyTorch's memory, with the lines that allocate it.")  # fmt: skip
@option(
    RECORDING,
    "--counters",
    is_flag=True,
    help="Also sample the hardware counters of the GPU with nsys: active SMs, tensor cores, memory bandwidth, clock.",
)
@option(RECORDING, "--whole-program", is_flag=True,
        help="Record the whole program, not only from cudaProfilerStart to cudaProfilerStop.")  # fmt: skip
@option(PROGRAM, "--annotate/--no-annotate", default=True,
        help="Find the steps and phases of your program, and time them. Default: --annotate.")  # fmt: skip
@option(PROGRAM, "--run-to-end", is_flag=True, help="Let your program continue after the recorded steps.")
@option(PROGRAM, "--delay", type=click.FloatRange(0), metavar="S",
        help="For a server: start recording S seconds after the server has started, or earlier if nsys-analyze "
        "receives SIGUSR1. Ctrl-C ends the recording.")  # fmt: skip
@option(PROGRAM, "--duration", type=click.FloatRange(0, min_open=True), metavar="S",
        help="For a server: record for S seconds, and then end the server.")  # fmt: skip
@option(PROGRAM, "--modules", is_flag=True,
        help="Put a range around each call of a module of your program, and around the module's backward pass. The "
        "report then shows the time of each module.")  # fmt: skip
@option(PROGRAM, "--no-stacks", is_flag=True,
        help="Do not sample the call stacks of your program. The report then names no source lines.")  # fmt: skip
@option(PROGRAM, "--no-operators", is_flag=True,
        help="Do not record the additional step with the shapes of each operator. The report then does not say what "
        "each operator should cost.")  # fmt: skip
@option(RECORDING, "--unprofiled-steps", type=click.IntRange(0), metavar="N",
        help="In the recorded run, measure the length of at most N steps before the recording and N steps after it, "
        "while "
        "the profiler records nothing. 0 measures none. Default: the number of --steps, at most 10.")  # fmt: skip
@option(RECORDING, "--no-energy", is_flag=True,
        help="Do not read the energy of the GPUs, which takes 5 to 15 seconds.")  # fmt: skip
@option(PROGRAM, "--nproc", type=click.IntRange(1), metavar="N",
        help="Start your program as N ranks, as torchrun does, and record each rank.")  # fmt: skip
@option(PROGRAM, "--one-report", is_flag=True, help="With --nproc, write one nsys report of all ranks.")
@option(RECORDING, "--nsys-option", multiple=True, metavar="OPTION",
        help="An option for nsys profile, which replaces the default option of the same name. Repeatable.")  # fmt: skip
@price_options
@running_options(Path("runs"))
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGUMENTS...]")
def run(**options: Any) -> None:
    """Times and profiles transformers, or your own program after --, and writes the report.

    A sweep runs every combination of --model, --context-length, --mode and --precision. Each combination runs in
    processes of its own: first without a profiler, which gives its times, and then with a profiler. If a combination
    runs out of memory, crashes or takes too long, the other combinations still run. The folder of --output-dir then
    contains timings.csv, report.md, and a folder for each combination.

    Your own PyTorch program needs no change. nsys-analyze finds the steps, forward passes, backward passes and
    optimizer steps of the program while the program runs. The program first runs --warmup steps that are not measured.
    Then --steps steps are measured, and the program ends. On a GPU whose energy can be read, the run without a profiler
    first makes steps for 5 to 15 more seconds, in which the energy is read. In the recorded run, one more step shows
    which operators the program calls, and the steps before and after the recording are timed, because processes of one
    program differ. If the program calls cudaProfilerStart itself, it is recorded from there to cudaProfilerStop
    instead.
    """
    from nsys_analyzer.capture.plan import Recording, make_plan
    from nsys_analyzer.capture.profilers import check_script_exists

    given_options = {name: value for name in OPTIONS if (value := options.get(name)) not in (None, ())}
    plan = make_plan(
        models=options["model"],
        options={name: value if isinstance(value, tuple) else (value,) for name, value in given_options.items()},
        recording=Recording(**{option.name: options[option.name] for option in fields(Recording)}),
        target_option=options["target_option"],
        program=options["program"],
        dry_run=options["dry_run"],
    )
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for line in plan.command_lines(options["output_dir"]):
            click.echo(line)
        return
    if options["program"]:
        check_script_exists(options["program"])
    _run_plan(plan, options["output_dir"], options["timeout"], options["resume"], options["prices"])


def _run_plan(plan: Plan, folder: Path, timeout_s: float, resume: bool | None, prices: Prices) -> None:
    """Runs the unfinished targets of a plan and writes the report; exits with 1 if a target failed."""
    from nsys_analyzer.capture.jobs import lock_folder, run_sweep, select_remaining_targets
    from nsys_analyzer.capture.targets import capture_stems
    from nsys_analyzer.cli.run_progress import handle_interruption, show_progress
    from nsys_analyzer.experiments.evidence import make_evidence
    from nsys_analyzer.inputs.gather import gather
    from nsys_analyzer.inputs.manifest import capture_name
    from nsys_analyzer.inputs.unprofiled_times import read_sweep_timings
    from nsys_analyzer.report.renderers.terminal import print_first_screen
    from nsys_analyzer.report.sections import build_report, select_first_screen
    from nsys_analyzer.report.writing import FOLDER_IN_USE_HINT, check_replaceable, write_report

    check_replaceable(folder / "report.md", FOLDER_IN_USE_HINT)
    try:
        with handle_interruption(folder), lock_folder(folder):
            unfinished = select_remaining_targets(plan.targets, folder, plan.profiler, resume)
            with show_progress(len(plan.targets), len(plan.targets) - len(unfinished)) as progress:
                results = run_sweep(unfinished, folder, plan.profiler, timeout_s, progress, quote_command_line())
            timings = read_sweep_timings(folder)  # if the file has no rows, no program was timed
            inputs = gather([folder], timings=timings if timings.rows else None, prices=prices)
            evidence = make_evidence(inputs, quote_command_line())
            report = build_report(evidence)
            write_report("markdown", report, folder / "report.md")
    except BrokenPipeError:
        raise  # the reader of standard output has closed it; this is no error of the folder
    except NoSpaceError as error:
        raise CaptureError(error.message, _SPACE_HINT) from error
    except OSError as error:
        raise CaptureError(f"{error.filename or folder} cannot be written ({error.strerror})", _SPACE_HINT) from error
    stems = [(stem, folder / target.name) for target in plan.targets for stem in capture_stems(target.ranks)]
    own_names = {capture_name(*stem) for stem in stems}
    other_titles = dict.fromkeys(capture.title for capture in evidence.captures if capture.name not in own_names)
    if other_titles and len(other_titles) < len(evidence.captures):
        own_captures = tuple(capture for capture in evidence.captures if capture.name in own_names)
        report = build_report(replace(evidence, captures=own_captures, benches=()))
    print_first_screen(report, select_first_screen(report))
    if other_titles:
        titles = shorten(", ".join(other_titles), _MAX_TITLES_WIDTH)
        click.echo(f"\n{folder} also contains other runs, which the report compares: {titles}")
    for target in plan.targets:
        for line in _describe_memory(target, folder / target.name):
            click.echo(f"\n{line}")
        if not target.timed:
            click.echo(f"\n{_summarize_execution(target, folder / target.name, is_recorded=plan.profiler is not None)}")
    click.echo(f"\n{folder / 'report.md'}")
    if any(result.status in ("failed", "timeout") for result in results):
        sys.exit(1)


def _describe_memory(target: Target, folder: Path) -> Iterator[str]:
    """Yields for each memory snapshot of a target where it is, and what it shows in one sentence."""
    from nsys_analyzer.analysis.memory.accounting import account_memory
    from nsys_analyzer.capture.targets import capture_stems
    from nsys_analyzer.inputs.manifest import manifest_file_name, read_manifest
    from nsys_analyzer.report.sections.memory import answer_memory
    from nsys_analyzer.trace.memory_snapshot import read_snapshot

    manifests = [folder / manifest_file_name(stem) for stem in capture_stems(target.ranks)]
    runs = [read_manifest(path) for path in manifests if path.is_file()]
    for path in (folder / name for run in runs for name in run.memory or ()):
        try:
            first = next(iter(answer_memory(account_memory(read_snapshot(path)), path.name)))
            message = plain(first.text) if isinstance(first, Answer) else ""
        except NsysAnalyzerError as error:
            message = f"It shows nothing: {error.message}."
        yield f"nsys-analyze memory {path}\n{message}"
    if target.memory and not any(run.memory for run in runs):
        yield "There is no memory snapshot: PyTorch used no GPU, or the program ended before its steps"


def _summarize_execution(target: Target, folder: Path, *, is_recorded: bool) -> str:
    """Returns sentences on how often the user's program ran, whether it was stopped, and where its output is."""
    from nsys_analyzer.capture.jobs import LOG
    from nsys_analyzer.capture.targets import capture_stems
    from nsys_analyzer.inputs.manifest import manifest_file_name, read_manifest

    run = read_manifest(folder / manifest_file_name(capture_stems(target.ranks)[0]))
    if run.status != "ok":
        return f"The program's output is in {folder / LOG}"
    purposes = ", to be timed and then recorded" if target.is_timed and is_recorded else ""
    summary = f"The program ran {'twice' if purposes else 'once'}{purposes}"
    if target.memory:
        summary += ", and once more for a snapshot of its memory"
    if run.stopped_after:
        later_steps = bool(run.operators) + target.unprofiled_steps
        recorded = f" (when recorded, after step {run.stopped_after + later_steps})" if later_steps else ""
        timed_steps = run.stopped_after + (run.energy[0].steps if run.energy else 0)
        summary += f", and was stopped after step {timed_steps}{recorded}. --run-to-end lets it continue"
    elif run.not_annotated:
        summary += f"; {run.not_annotated}"
    return f"{summary}. Its output is in {folder / LOG}"
