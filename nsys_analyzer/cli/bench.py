"""``nsys-analyze bench``: runs a standard experiment, and writes its rows and its section with charts."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nsys_analyzer.cli.help import EXPERIMENT, Command, Group, option
from nsys_analyzer.cli.options import quote_command_line, running_options, valued_option

if TYPE_CHECKING:
    from nsys_analyzer.experiments.model import Bench


class _Benches(Group):
    """The group of the experiments' commands. They are made only when needed, because importing experiments is slow."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the experiments."""
        del ctx
        return list(_make_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of the experiment with this name; None for an unknown name."""
        del ctx
        return _make_commands().get(cmd_name)


@click.group(cls=_Benches, epilog="Example: nsys-analyze bench attention --d-head 64 --context-length 256,1024")
def bench() -> None:
    """Runs a standard experiment and writes its results.

    Each experiment writes NAME.md with charts, and bench.jsonl, which nsys-analyze report reads. Without a GPU, an
    experiment runs smaller cases on the CPU.
    """


@cache
def _make_commands() -> dict[str, click.Command]:
    from nsys_analyzer.experiments.benches import BENCHES

    return {experiment.name: _make_command(experiment) for experiment in BENCHES}


def _make_command(experiment: Bench) -> click.Command:
    """Returns the command of an experiment: its own options, then the options that all experiments share."""
    from nsys_analyzer.experiments.model import to_command_line_value

    def run_experiment(**options: Any) -> None:
        """Runs the experiment and prints its answer; exits with 1 if a case failed."""
        from nsys_analyzer.cli.run_progress import handle_interruption, show_progress
        from nsys_analyzer.experiments.running import make_plan, run_bench
        from nsys_analyzer.report.renderers.terminal import print_answer

        sources = {name: click.get_current_context().get_parameter_source(name) for name in options}
        typed_options = {name for name, source in sources.items() if source is ParameterSource.COMMANDLINE}
        plan = make_plan(experiment, options, typed_options)
        for notice in plan.notices:
            click.echo(notice, err=True)
        if options["dry_run"]:
            for task in plan.cases:
                click.echo(task.label)
            return
        folder = options["output_dir"]
        with handle_interruption(folder):
            report, ended_well = run_bench(
                plan, folder, options["timeout"], options["resume"], show_progress, quote_command_line()
            )
        print_answer(report)
        click.echo(f"\n{folder / f'{experiment.name}.md'}")
        if not ended_well:
            sys.exit(1)

    decorators = []
    for field in experiment.options:
        default_on_cuda, default_on_cpu = (
            to_command_line_value(field.default_on(device)) for device in ("cuda", "cpu")
        )
        default = (
            default_on_cuda if default_on_cpu == default_on_cuda else f"{default_on_cuda}; {default_on_cpu} on a CPU"
        )
        decorators.append(
            valued_option(
                EXPERIMENT, field.flag, field.name, field.choices or field.kind,
                field.unit if field.kind is int else "NAME",
                f"{field.help[:1].upper()}{field.help[1:]}. Default: {default}.",
                least=field.least, in_list=field.several,
            )
        )  # fmt: skip
    device_help = "The device to run on. Default: cuda if there is a GPU."
    decorators.append(option(EXPERIMENT, "--device", type=click.Choice(["cuda", "cpu"]), help=device_help))
    decorators.append(running_options(Path("bench") / experiment.name))
    function = run_experiment
    for decorate in reversed(decorators):
        function = decorate(function)
    example = f"Example: nsys-analyze bench {experiment.name} --output-dir {experiment.name}"
    return click.command(experiment.name, cls=Command, help=experiment.summary, epilog=example)(function)
