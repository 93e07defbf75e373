"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

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
