"""``nsys-analyze bench NAME``: a standard experiment, its rows as CSV, and its section as markdown with figures."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nsys_analyzer.cli.options import command_line, several
from nsys_analyzer.cli.run import interrupt_at_the_end, timeout_option

if TYPE_CHECKING:
    from nsys_analyzer.experiments.model import Bench, Option


class _Benches(click.Group):
    """One command for each bench, made when it is asked for: ``nsys-analyze --help`` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        return _commands().get(cmd_name)


@click.group(cls=_Benches, epilog="Example: nsys-analyze bench attention --d 64 --context-length 256,1024")
def bench() -> None:
    """Run a standard experiment and write what came of it.

    Each writes NAME.csv, NAME.md with figures, and bench.jsonl, from which nsys-analyze report takes the section in.
    Without a GPU each runs a smaller default on the CPU.
    """


@cache
def _commands() -> dict[str, click.Command]:
    from nsys_analyzer.experiments.registry import BENCHES

    return {one.name: _command(one) for one in BENCHES}


def _command(one: Bench) -> click.Command:
    """The command of a bench: its own options, then those of every bench."""

    def callback(**options: Any) -> None:
        context = click.get_current_context()
        given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        _start(one, options, given)

    function = callback
    for decorate in reversed([*map(_own_option, one.options), *_every_option(one)]):
        function = decorate(function)
    return click.command(
        one.name, help=one.summary, epilog=f"Example: nsys-analyze bench {one.name} --output-dir {one.name}"
    )(function)


def _own_option(option: Option) -> Any:
    choices = _SWITCH if option.kind is bool else option.kind
    kind = _kind(option)
    name = f"--{option.name.replace('_', '-')}"
    says = f"{option.help} Default: {_listed(option.cuda)}{_on_cpu(option)}."
    metavar = f"[{'|'.join(choices)}]" if isinstance(choices, tuple) else _METAVARS[choices]
    if option.several:
        return several(name, kind, metavar, says)
    return click.option(name, option.name, type=kind, metavar=metavar, help=says)


_SWITCH = ("off", "on")


class _Switch(click.Choice[str]):
    """On or off, as a bool."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) == "on"


def _kind(option: Option) -> Any:
    if option.kind is bool:
        return _Switch(_SWITCH)
    if isinstance(option.kind, tuple):
        return click.Choice(option.kind)
    if option.kind is int:
        return click.IntRange(option.least)
    return click.FLOAT if option.kind is float else click.STRING


_METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", str: "NAME"}


def _listed(values: tuple[Any, ...]) -> str:
    from nsys_analyzer.experiments.model import spelled

    return ",".join(str(spelled(value)) for value in values)


def _on_cpu(option: Option) -> str:
    return "" if option.cpu == option.cuda else f"; {_listed(option.cpu)} on a CPU"


def _every_option(one: Bench) -> tuple[Any, ...]:
    profiler = click.option(
        "--profiler",
        type=click.Choice(["nsys", "torch"]),
        help="Default: nsys where it and a GPU are there, else torch.",
    )
    return (
        *((profiler,) if one.captures else ()),
        click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: cuda where there is a GPU."),
        timeout_option("For each case."),
        click.option(
            "--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("bench") / one.name,
            show_default=True, help="Where the results go.",
        ),
        click.option("--resume/--rerun", default=None, help="Keep, or replace, the results that are there."),
        click.option("--dry-run", is_flag=True, help="List the cases and run nothing."),
    )  # fmt: skip


def _start(one: Bench, options: dict[str, Any], given: set[str]) -> None:
    from nsys_analyzer.cli.run_progress import shown
    from nsys_analyzer.experiments.running import make_plan, run_bench
    from nsys_analyzer.report.renderers.terminal import print_answer

    plan = make_plan(one, options, given)
    for notice in plan.notices:
        click.echo(notice, err=True)
    if options["dry_run"]:
        for line in plan.lines():
            click.echo(line)
        return
    interrupt_at_the_end()
    folder = options["output_dir"]
    try:
        built, ended_well = run_bench(plan, folder, options["timeout"], options["resume"], shown, command_line())
    except KeyboardInterrupt:
        click.echo(f"Interrupted. What was measured is in {folder}; the same command with --resume goes on.", err=True)
        sys.exit(130)
    print_answer(built)
    click.echo(f"\n{folder / f'{one.name}.md'}")
    if not ended_well:
        sys.exit(1)
