"""How commands show themselves: options in groups, and what a mistyped word may have been meant for."""

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
MEASURED = "What is measured"
RECORDING = "Recording"
PROGRAM = "A program of yours"
ASKED = "What is changed"
SHOWN = "What to show"
JUDGED = "How to judge"
RUNNING = "Running"
OUTPUT = "Output"
OTHER = "Other"
GROUPS = (INPUT, PHASES, CONFIGURATION, MEASURED, RECORDING, PROGRAM, ASKED, SHOWN, JUDGED, RUNNING, OUTPUT, OTHER)


class Option(click.Option):
    """An option of a group."""

    def __init__(self, *names: Any, group: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.group = group


def option(group: str, *names: str, **more: Any) -> Callable[[Function], Function]:
    """Adds an option to a command, as ``click.option`` does, in one of the ``GROUPS``."""
    return click.option(*names, cls=Option, group=group, **more)


def format_option(*forms: str, help: str) -> Callable[[Function], Function]:
    """Adds the option that says in which of these forms a command prints, the first one by default."""
    kind = click.Choice(forms)
    return option(OUTPUT, "--format", "output_format", type=kind, default=forms[0], show_default=True, help=help)


class Command(click.Command):
    """A command whose help has its options in groups, and whose JSON says why there is no answer."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; where it cannot answer and was to write JSON, that says so, beside the error."""
        try:
            return super().invoke(ctx)
        except CannotAnswerError as error:
            if ctx.params.get("output_format") == "json":
                click.echo(json.dumps(error.data), file=data_stream())
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each group of options below its title."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                rows[getattr(param, "group", OTHER)].append(record)  # click adds --help
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def command(cls: type[Command] = Command, **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """Makes a command, as ``click.command`` does, with its options in groups."""
    return click.command(cls=cls, **settings)


class Group(click.Group):
    """Commands that are imported when they are asked for; ``list_commands`` knows their names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; of a name that no command has, says which one may have been meant."""
        from difflib import get_close_matches  # nobody else waits for it

        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            nearest = get_close_matches(name.lower(), names, 1)
            ctx.fail(f"No such command {name!r}.{f' Did you mean {nearest[0]!r}?' if nearest else ''}")
        return super().resolve_command(ctx, args)
