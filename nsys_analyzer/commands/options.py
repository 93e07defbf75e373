"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

#: A number of tokens or sequences.
SIZE = click.IntRange(1, 2**31 - 1)

_PHASE_HELP = (
    "A range of this name is this phase: forward, loss, backward, optimizer, step, warmup, a part of attention "
    "(attention, scores, softmax, values), or a phase of your own. Repeatable."
)


def phase_names_option(*names: str) -> Callable[[Command], Command]:
    """The option that gives range names a phase."""
    return click.option(*names, "phase_names", metavar="PHASE=RANGE", multiple=True, help=_PHASE_HELP)


def trace_argument(function: Command) -> Command:
    """The trace a command reads."""
    return click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")(function)


def several(name: str, kind: Any, metavar: str, default: str | None, help: str) -> Callable[[Command], Command]:
    """An option of several values of a click type, with commas between them or given again: one tuple, each once.

    Without a default the tuple is empty where the option is not given.
    """

    def convert(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        if given and not words:
            raise click.BadParameter("give at least one value", ctx, param)
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(
        name, metavar=f"{metavar}[,...]", multiple=True, default=(default,) if default else (),
        callback=convert, help=f"{help} Default: {default}." if default else help,
    )  # fmt: skip
