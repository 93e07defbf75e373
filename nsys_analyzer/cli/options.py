"""Options that several commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from nsys_analyzer.configuration import OPTIONS, Option

Command = TypeVar("Command", bound=Callable[..., Any])

#: A number of tokens or sequences.
SIZE = click.IntRange(1, 2**31 - 1)

_PHASE_HELP = (
    "A range of this name is this phase: forward, loss, backward, optimizer, step, warmup, a part of attention "
    "(attention, scores, softmax, values), or a phase of your own. Repeatable."
)


def command_line() -> str:
    """The command line of this process as a reader of the report would type it, beside the captures."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["nsys-analyze", *words])


def phase_names_option(*names: str) -> Callable[[Command], Command]:
    """The option that gives range names a phase."""
    return click.option(*names, "phase_names", metavar="PHASE=RANGE", multiple=True, help=_PHASE_HELP)


def trace_argument(function: Command) -> Command:
    """The trace a command reads."""
    return click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")(function)


def several(name: str, kind: Any, metavar: str, help: str) -> Callable[[Command], Command]:
    """An option of several values of a click type, with commas between them or given again: one tuple, each once.

    The tuple is empty where the option is not given.
    """

    def convert(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        if given and not words:
            raise click.BadParameter("give at least one value", ctx, param)
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(name, metavar=f"{metavar}[,...]", multiple=True, callback=convert, help=help)


def target_options(function: Command) -> Command:
    """The options of the transformer target; None, or an empty tuple, where one is not given."""
    for name, one in reversed(list(OPTIONS.items())):
        if one.in_run:
            function = _target_option(name, one)(function)
    return function


def _target_option(name: str, one: Option) -> Callable[[Command], Command]:
    if one.kind is bool:
        return click.option(one.flag, name, is_flag=True, default=None, help=one.help)
    lighter = f", {one.default_on_cpu} on a CPU" if one.default_on_cpu is not None else ""
    says = one.help if one.default is None else f"{one.help} Default: {one.default}{lighter}."
    metavar = f"[{'|'.join(one.choices)}]" if one.choices else one.unit
    if one.several:
        return several(one.flag, _kind(one), metavar, says)
    return click.option(one.flag, name, type=_kind(one), metavar=metavar, help=says)


def _kind(one: Option) -> Any:
    if one.choices:
        return click.Choice(one.choices)
    if one.kind is int:
        return SIZE if one.least == 1 else click.IntRange(one.least)
    return click.types.convert_type(one.kind)
