"""``nsys-analyze bench NAME``: a standard experiment, its rows, and its section as markdown with figures."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nsys_analyzer.cli.help import MEASURED, Command, Group, option
from nsys_analyzer.cli.options import command_line, running_options, valued

if TYPE_CHECKING:
    from nsys_analyzer.experiments.model import Bench


class _Benches(Group):
    """One command for each bench, made when it is asked for: ``nsys-analyze --help`` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        return _commands().get(cmd_name)


@click.group(cls=_Benches, epilog="Example: nsys-analyze bench attention --d-head 64 --context-length 256,1024")
def bench() -> None:
    """Run a standard experiment and write its results.

    Each writes NAME.md with figures, and bench.jsonl, which nsys-analyze report reads. Without a GPU each runs smaller
    cases on the CPU.
    """


@cache
def _commands() -> dict[str, click.Command]:
    from nsys_analyzer.experiments.results import BENCHES

    return {experiment.name: _command(experiment) for experiment in BENCHES}


def _command(experiment: Bench) -> click.Command:
    """Returns the command of a bench: its own options, then those of every bench."""
    from nsys_analyzer.experiments.model import spelled

    def callback(**options: Any) -> None:
        context = click.get_current_context()
        given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        _start(experiment, options, given)

    decorators = []
    for one in experiment.options:
        cuda, cpu = (spelled(one.default_on(device)) for device in ("cuda", "cpu"))
        words = f"{one.help[:1].upper()}{one.help[1:]}"
        text = f"{words}. Default: {cuda}{'' if cpu == cuda else f'; {cpu} on a CPU'}."
        kind, unit = one.choices or one.kind, one.unit if one.kind is int else "NAME"
        decorators.append(valued(MEASURED, one.flag, one.name, kind, unit, text, least=one.least, in_list=one.several))
    default = "Default: cuda where there is a GPU."
    decorators.append(option(MEASURED, "--device", type=click.Choice(["cuda", "cpu"]), help=default))
    decorators.append(running_options(Path("bench") / experiment.name))
    function = callback
    for decorate in reversed(decorators):
        function = decorate(function)
    example = f"Example: nsys-analyze bench {experiment.name} --output-dir {experiment.name}"
    return click.command(experiment.name, cls=Command, help=experiment.summary, epilog=example)(function)


def _start(experiment: Bench, options: dict[str, Any], given: set[str]) -> None:
    from nsys_analyzer.cli.run_progress import interruptible, shown
    from nsys_analyzer.experiments.running import make_plan, run_bench
    from nsys_analyzer.report.renderers.terminal import print_answer

    plan = make_plan(experiment, options, given)
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for task in plan.cases:
            click.echo(task.label)
        return
    folder = options["output_dir"]
    with interruptible(folder):
        built, ended_well = run_bench(plan, folder, options["timeout"], options["resume"], shown, command_line())
    print_answer(built)
    click.echo(f"\n{folder / f'{experiment.name}.md'}")
    if not ended_well:
        sys.exit(1)
