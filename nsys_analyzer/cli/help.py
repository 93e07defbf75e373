"""Shows the options of a command in groups, and suggests the nearest command for a mistyped name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nsys_analyzer.errors import CannotAnswerError
from nsys_analyzer.report.screen import data_stream

Function = TypeVar("Function", bound=Callable[..., Any])

#: The groups of options, in the order in which every command shows them.
INPUT = "Input"
PHASES = "Phases and steps"
CONFIGURATION = "Configuration"
EXPERIMENT = "Experiment"
RECORDING = "Recording"
PROGRAM = "Your own program"
CHANGES = "Changes"
SELECTION = "Selection"
CRITERIA = "Criteria"
OUTPUT = "Output"
RUNNING = "Running"
GENERAL = "General"
GROUPS = (
    INPUT, PHASES, CONFIGURATION, EXPERIMENT, RECORDING, PROGRAM, CHANGES, SELECTION, CRITERIA, OUTPUT, RUNNING,
    GENERAL,
)  # fmt: skip


class Option(click.Option):
    """An option that the help lists in one of the groups of options."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def option(group: str, *names: str, **attributes: Any) -> Callable[[Function], Function]:
    """Adds an option to a command, as ``click.option`` does, in one of the ``GROUPS``."""
    return click.option(*names, cls=Option, group=group, **attributes)


def format_option(*formats: str, help: str) -> Callable[[Function], Function]:
    """Adds the option ``--format``, which chooses one of these formats; the first is the default."""
    choice = click.Choice(formats)
    return option(OUTPUT, "--format", "output_format", type=choice, default=formats[0], show_default=True, help=help)


class Command(click.Command):
    """A command that shows its options in groups, and whose JSON explains a missing answer."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. If it cannot answer and ``--format`` is json, prints the reason as JSON."""
        try:
            return super().invoke(ctx)
        except CannotAnswerError as error:
            if ctx.params.get("output_format") == "json":
                click.echo(json.dumps(error.data), file=data_stream())
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options of a command, each group below its title."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                rows[getattr(param, "group", GENERAL)].append(record)  # --help, which click adds, has no group
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def command(cls: type[Command] = Command, **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """Makes a command, as ``click.command`` does, with its options in groups."""
    return click.command(cls=cls, **settings)


class Group(click.Group):
    """A group of commands; each command is imported when it is used, and ``list_commands`` returns their names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command by its name; for an unknown name, fails and suggests the nearest command."""
        from difflib import get_close_matches  # imported only for a mistyped name

        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            nearest_names = get_close_matches(name.lower(), names, 1)
            ctx.fail(f"No such command {name!r}.{f' Did you mean {nearest_names[0]!r}?' if nearest_names else ''}")
        return super().resolve_command(ctx, args)
