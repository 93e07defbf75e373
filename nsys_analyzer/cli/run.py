"""``nsys-analyze run``: times and profiles a sweep of configurations, or any program, and writes the report."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.analysis.transformer.models import list_model_names
from nsys_analyzer.cli.help import CONFIGURATION, PROGRAM, RECORDING, command, option
from nsys_analyzer.cli.options import command_line, running_options, several, target_options
from nsys_analyzer.configuration import OPTIONS
from nsys_analyzer.errors import CaptureError, NoSpaceError

if TYPE_CHECKING:
    from nsys_analyzer.capture.plan import Plan
    from nsys_analyzer.inputs.targets import Target

#: Letters that the titles of other runs take on the screen at most.
_MAX_TITLES_WIDTH = 200
_NO_PLACE = "Free some space, or name another --output-dir; finished results stay, and --resume continues"


@command(epilog="Example: nsys-analyze run --model small,medium --context-length 128,256 --precision bf16 --dry-run")
@several(CONFIGURATION, "--model", "model", click.STRING, "NAME", f"Model: {list_model_names()}. Default: small.")
@target_options
@option(CONFIGURATION, "--target-option", multiple=True, metavar="OPTION", help="Passed on to the target. Repeatable.")
@option(RECORDING, "--profiler", type=click.Choice(["nsys", "torch", "none"]),
              help="Profiler. Default: nsys where it and a GPU are there, else torch.")  # fmt: skip
@option(RECORDING, "--memory", is_flag=True, help="Record memory events too.")
@option(
    RECORDING, "--whole-program", is_flag=True, help="Record all, not only from cudaProfilerStart to cudaProfilerStop."
)
@option(PROGRAM, "--annotate/--no-annotate", default=True,
              help="Find steps and phases of a program of yours, and time it. Default: --annotate.")  # fmt: skip
@option(PROGRAM, "--run-to-end", is_flag=True, help="Let a program of yours go on after the recorded steps.")
@option(PROGRAM, "--delay", type=click.FloatRange(0), metavar="S", help="Of a server, which runs on: record from S "
              "seconds after its start, or from SIGUSR1, on until Ctrl-C ends it.")  # fmt: skip
@option(PROGRAM, "--duration", type=click.FloatRange(0, min_open=True), metavar="S",
              help="Of a server: record for S seconds, then end it.")  # fmt: skip
@option(PROGRAM, "--modules", is_flag=True, help="A range around each call of a module of a program of "
              "yours, and in its backward pass: the report says what each module takes.")  # fmt: skip
@option(
    PROGRAM,
    "--no-stacks",
    is_flag=True,
    help="Do not sample where in a program of yours time passes; the report names no lines then.",
)
@option(PROGRAM, "--nproc", type=click.IntRange(1), metavar="N",
              help="Start a program of yours as N ranks, as torchrun does, and record each of them.")  # fmt: skip
@option(PROGRAM, "--one-report", is_flag=True, help="With --nproc: one report of nsys over all ranks.")
@option(RECORDING, "--nsys-option", multiple=True, metavar="OPTION",
        help="Passed on to nsys profile, in place of our option of that name. Repeatable.")  # fmt: skip
@running_options(Path("runs"))
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGUMENTS...]")
def run(**options: Any) -> None:
    """Time and profile transformers, or a program of your own after --, and write the report.

    A sweep runs every combination of --model, --context-length, --mode and --precision, each in processes of its
    own: once without a profiler, for its times, and once with a profiler. A configuration that runs out of memory,
    crashes or takes too long does not stop the others. --output-dir gets a folder for each configuration, timings.csv
    and report.md.

    A PyTorch program of your own needs no change: its steps, forward and backward passes and optimizer steps are found
    as it runs. The first --warmup steps pass, --steps are recorded, and the program ends. Where it calls
    cudaProfilerStart itself, that decides.
    """
    from nsys_analyzer.capture.plan import Recording, make_plan
    from nsys_analyzer.capture.profilers import check_code

    given = {name: value for name in OPTIONS if (value := options.get(name)) not in (None, ())}
    plan = make_plan(
        models=options["model"],
        options={name: value if isinstance(value, tuple) else (value,) for name, value in given.items()},
        recording=Recording(**{option.name: options[option.name] for option in fields(Recording)}),
        target_option=options["target_option"],
        program=options["program"],
        elsewhere=options["dry_run"],
    )
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for line in plan.command_lines(options["output_dir"]):
            click.echo(line)
        return
    if options["program"]:
        check_code(options["program"])
    _run(plan, options["output_dir"], options["timeout"], options["resume"])


def _run(plan: Plan, folder: Path, timeout_s: float, resume: bool | None) -> None:
    """Runs what is left of the plan and writes the report; exits with 1 where a target failed."""
    from nsys_analyzer.capture.jobs import locked, remaining, run_sweep
    from nsys_analyzer.cli.run_progress import interruptible, shown
    from nsys_analyzer.experiments.gather import load_evidence
    from nsys_analyzer.inputs.manifest import capture_name
    from nsys_analyzer.inputs.targets import capture_stems
    from nsys_analyzer.inputs.timings import timings_of_sweep
    from nsys_analyzer.report.renderers.terminal import print_first_screen
    from nsys_analyzer.report.sections import build_report, first_screen
    from nsys_analyzer.report.writing import FOLDER_IN_USE_HINT, check_replaceable, write_report

    check_replaceable(folder / "report.md", FOLDER_IN_USE_HINT)
    try:
        with interruptible(folder), locked(folder):
            todo = remaining(plan.targets, folder, plan.profiler, resume)
            with shown(len(plan.targets), len(plan.targets) - len(todo)) as progress:
                results = run_sweep(todo, folder, plan.profiler, timeout_s, progress, command_line())
            timings = timings_of_sweep(folder)  # programs may time nothing
            evidence = load_evidence([folder], (), command_line(), timings=timings if timings.rows else None)
            built = build_report(evidence)
            write_report("markdown", built, folder / "report.md")
    except BrokenPipeError:
        raise  # the reader of the output has gone: no fault of the folder
    except NoSpaceError as error:
        raise CaptureError(error.message, _NO_PLACE) from error
    except OSError as error:
        raise CaptureError(f"{error.filename or folder} cannot be written ({error.strerror})", _NO_PLACE) from error
    stems = [(stem, folder / target.name) for target in plan.targets for stem in capture_stems(target.ranks)]
    own_names = {capture_name(*stem) for stem in stems}
    other_titles = dict.fromkeys(capture.title for capture in evidence.captures if capture.name not in own_names)
    if other_titles and len(other_titles) < len(evidence.captures):
        own_captures = tuple(capture for capture in evidence.captures if capture.name in own_names)
        built = build_report(replace(evidence, captures=own_captures, benches=(), joined=None))
    print_first_screen(built, first_screen(built))
    if other_titles:
        titles = shorten(", ".join(other_titles), _MAX_TITLES_WIDTH)
        click.echo(f"\n{folder} holds other runs, too, which the report compares: {titles}")
    for target in plan.targets:
        if not target.timed:
            click.echo(f"\n{_what_was_run(target, folder / target.name, recorded=plan.profiler is not None)}")
    click.echo(f"\n{folder / 'report.md'}")
    if any(result.status in ("failed", "timeout") for result in results):
        sys.exit(1)


def _what_was_run(target: Target, place: Path, *, recorded: bool) -> str:
    """Says how often a program of the user's ran, where it was stopped, and where its output is."""
    from nsys_analyzer.capture.jobs import LOG
    from nsys_analyzer.inputs.manifest import manifest_of_stem, read_manifest
    from nsys_analyzer.inputs.targets import capture_stems

    run = read_manifest(place / manifest_of_stem(capture_stems(target.ranks)[0]))
    if run.status != "ok":
        return f"The program's output is in {place / LOG}"
    times = ", to be timed and then recorded" if target.is_timed and recorded else ""
    said = f"The program ran {'twice' if times else 'once'}{times}"
    if run.stopped_after:
        said += f", and was stopped after step {run.stopped_after}: nothing later was executed (--run-to-end goes on)"
    elif run.not_annotated:
        said += f"; {run.not_annotated}"
    return f"{said}. Its output is in {place / LOG}"
