"""``nsys-analyze run``: times and profiles a sweep of configurations, or any program, and writes the report."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.analysis.transformer.models import model_names
from nsys_analyzer.cli.options import Command, command_line, several, target_options
from nsys_analyzer.configuration import OPTIONS
from nsys_analyzer.errors import CaptureError, NoSpaceError

if TYPE_CHECKING:
    from nsys_analyzer.capture.plan import Plan, Request

_NO_PLACE = "Make room there, or name another --output-dir; what was finished stays, and --resume goes on with it"


def _a_time(_ctx: click.Context, _param: click.Parameter, seconds: float) -> float:
    """Refuses what a comparison lets through."""
    if math.isnan(seconds):
        raise click.BadParameter("nan is no time to wait")
    return seconds


def timeout_option(help: str) -> Callable[[Command], Command]:
    """The option that ends what takes too long."""
    return click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800, show_default=True, callback=_a_time,
        metavar="SECONDS", help=help,
    )  # fmt: skip


@click.command(
    epilog="Example: nsys-analyze run --model small,medium --context-length 128,256 --precision bf16 --dry-run"
)
@several("--model", click.STRING, "NAME", f"Model: {model_names()}. Default: small.")
@target_options
@click.option("--target-option", multiple=True, metavar="OPTION", help="Passed on to the target. Repeatable.")
@click.option("--profiler", type=click.Choice(["nsys", "torch", "none"]),
              help="What records. Default: nsys where it and a GPU are there, else torch.")  # fmt: skip
@click.option("--trace", help="What nsys traces; osrt costs ten times as long. Default: cuda,nvtx.")
@click.option("--memory", is_flag=True, help="Record memory events too.")
@click.option("--autograd-ranges", is_flag=True, help="An NVTX range around every operator of autograd (nsys).")
@click.option("--whole-program", is_flag=True, help="Record everything, not only from cudaProfilerStart to -Stop.")
@click.option("--nsys-option", multiple=True, metavar="OPTION", help="Passed on to nsys profile. Repeatable.")
@timeout_option("Time limit of each process.")
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"), show_default=True,
              help="Where the results go.")  # fmt: skip
@click.option("--resume/--rerun", default=None, help="Keep what is finished in the output folder, or replace it.")
@click.option("--dry-run", is_flag=True, help="Print the commands and run nothing.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGUMENTS...]")
def run(**options: Any) -> None:
    """Time and profile transformers, or a program of your own after --, and write the report.

    A sweep is the product of --model, --context-length, --mode and --precision. Each configuration runs in
    processes of its own: once without a profiler, for its times, once with. Out of memory, a crash or a time-out is
    that configuration's result; the others go on. Everything is in --output-dir: a folder for each configuration,
    timings.csv and report.md.
    """
    from nsys_analyzer.capture.plan import make_plan

    plan = make_plan(_request(options))
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for line in plan.command_lines(options["output_dir"]):
            click.echo(line)
        return
    _run(plan, options["output_dir"], options["timeout"], options["resume"])


def _request(options: Mapping[str, Any]) -> Request:
    from nsys_analyzer.capture.plan import Recording, Request

    given = {name: value for name in OPTIONS if (value := options.get(name)) not in (None, ())}
    return Request(
        models=options["model"],
        options={name: value if isinstance(value, tuple) else (value,) for name, value in given.items()},
        recording=Recording(**{one.name: options[one.name] for one in fields(Recording)}),
        target_option=options["target_option"],
        program=options["program"],
    )


def _run(plan: Plan, folder: Path, timeout_s: float, resume: bool | None) -> None:
    """Runs what is left of the plan and writes the report; the exit code says whether all of it ended well."""
    from nsys_analyzer.capture.runner import locked
    from nsys_analyzer.capture.sweep import remaining, run_sweep
    from nsys_analyzer.cli.run_progress import shown
    from nsys_analyzer.experiments.gathering import gather_evidence
    from nsys_analyzer.report.renderers.terminal import print_answers
    from nsys_analyzer.report.sections import build_report
    from nsys_analyzer.report.writing import ELSEWHERE, check_replaceable, write_as
    from nsys_analyzer.runs.timings.table import has_rows
    from nsys_analyzer.runs.timings.writing import NAME as TIMINGS

    check_replaceable(folder / "report.md", ELSEWHERE)
    interrupt_at_the_end()
    try:
        with locked(folder):
            todo = remaining(plan.targets, folder, plan.profiler, resume)
            with shown(len(plan.targets), len(plan.targets) - len(todo)) as progress:
                ended = run_sweep(todo, folder, plan.profiler, timeout_s, progress, command_line())
            timed = [folder / TIMINGS] if has_rows(folder / TIMINGS) else []  # programs may time nothing
            built = build_report(gather_evidence([folder], timed, command_line(), beside=folder))
            write_as("markdown", built, folder / "report.md")
    except KeyboardInterrupt:
        click.echo(f"Interrupted. What was finished is in {folder}; the same command with --resume goes on.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        raise  # somebody stopped reading what is printed: no fault of the folder's
    except NoSpaceError as error:
        raise CaptureError(error.message, _NO_PLACE) from error
    except OSError as error:
        raise CaptureError(f"{error.filename or folder} cannot be written ({error.strerror})", _NO_PLACE) from error
    print_answers(built)
    click.echo(f"\n{folder / 'report.md'}")
    if any(one.status in ("failed", "timeout") for one in ended):
        sys.exit(1)


def interrupt_at_the_end() -> None:
    """Makes the end that a scheduler, a closed terminal or a keyboard sends an interrupt: no target outlives it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, signal.default_int_handler)
