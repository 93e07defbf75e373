"""``nsys-analyze run``: times and profiles a sweep of configurations, or any program, and writes the report."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nsys_analyzer.commands.options import SIZE, Command, several
from nsys_analyzer.errors import CaptureError, NoSpaceError
from profiling_targets.config import ATTENTIONS, MODES, PRECISIONS

if TYPE_CHECKING:
    from nsys_analyzer.commands.run_plan import Plan

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
@several("--model", click.STRING, "NAME", "small", "small, medium, large, xl, 2.7B, xl-2026 or 10B.")
@several("--context-length", SIZE, "TOKENS", None, "Of each sequence. Default: 256, 128 on a CPU.")
@several("--mode", click.Choice(MODES), "MODE", "train", "What a step is: forward, forward-backward or train.")
@several("--precision", click.Choice(PRECISIONS), "PRECISION", "fp32", "fp32, tf32 or bf16 (autocast).")
@click.option("--batch-size", type=SIZE, default=4, show_default=True, help="Sequences.")
@click.option("--attention", type=click.Choice(ATTENTIONS), default="unfused", show_default=True,
              help="Written out, or PyTorch's scaled_dot_product_attention.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["torch", "plain"]), default="torch", show_default=True,
              help="AdamW of torch.optim, or one parameter at a time.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="torch.compile the model.")
@click.option("--cuda-graph", is_flag=True, help="Replay each phase as a CUDA graph.")
@click.option("--warmup", type=click.IntRange(0), help="Steps before the measured ones. Default: 5, 1 on a CPU.")
@click.option("--steps", type=click.IntRange(1), help="Measured steps. Default: 10, 2 on a CPU.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: cuda where there is a GPU.")
@click.option("--target-option", multiple=True, metavar="OPTION", help="Passed on to the target. Repeatable.")
@click.option("--profiler", type=click.Choice(["nsys", "torch", "none"]),
              help="Default: nsys where it and a GPU are there, else torch.")  # fmt: skip
@click.option("--trace", default="cuda,nvtx", show_default=True, help="What nsys traces; osrt costs ten times as long.")
@click.option("--memory", is_flag=True, help="Record memory events too.")
@click.option("--autograd-ranges", is_flag=True, help="A range for every operator of autograd (nsys).")
@click.option("--whole-program", is_flag=True, help="Record everything, not only from cudaProfilerStart to -Stop.")
@click.option("--nsys-option", multiple=True, metavar="OPTION", help="Passed on to nsys profile. Repeatable.")
@timeout_option("For each process.")
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"), show_default=True,
              help="Where the results go.")  # fmt: skip
@click.option("--resume/--rerun", default=None, help="Keep, or replace, the results that are there.")
@click.option("--dry-run", is_flag=True, help="Print the commands and run nothing.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGUMENTS...]")
def run(**options: Any) -> None:
    """Time and profile transformers, or a program of your own after --, and write the report.

    A sweep is the product of --model, --context-length, --mode and --precision. Each configuration runs in
    processes of its own: once without a profiler, for its times, once with. Out of memory, a crash or a time-out is
    that configuration's result; the others go on. Everything is in --output-dir: a folder for each configuration,
    timings.csv and report.md.
    """
    from nsys_analyzer.commands.run_plan import make_plan

    context = click.get_current_context()
    given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    plan = make_plan(options, given)
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for line in plan.command_lines(options["output_dir"]):
            click.echo(line)
        return
    _run(plan, options["output_dir"], options["timeout"], options["resume"])


def _run(plan: Plan, folder: Path, timeout_s: float, resume: bool | None) -> None:
    """Runs what is left of the plan and writes the report; the exit code says whether all of it ended well."""
    from nsys_analyzer.capture.sweep import locked, recover, remaining, run_sweep
    from nsys_analyzer.capture.timings.writing import NAME as TIMINGS
    from nsys_analyzer.commands.run_progress import shown
    from nsys_analyzer.commands.writing import ELSEWHERE, check_replaceable, command_line, write_report
    from nsys_analyzer.report.renderers.terminal import print_answers

    check_replaceable(folder / "report.md", ELSEWHERE)
    interrupt_at_the_end()
    try:
        with locked(folder):
            recover(plan.targets, folder)
            todo = remaining(plan.targets, folder, plan.profiler, resume)
            with shown(len(plan.targets), len(plan.targets) - len(todo)) as progress:
                ended = run_sweep(todo, folder, plan.profiler, timeout_s, progress, command_line())
            built = write_report([folder], folder / TIMINGS, folder / "report.md", command_line())
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
