"""``nsys-analyze what-if``: what a step would take if some of its parts took more or less time."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import ASKED, Command, command, format_option, option
from nsys_analyzer.cli.options import evidence_options

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence


class _Pair(click.ParamType[tuple[Any, Any]]):
    """A name and what it is to be, as in ``matmul=0.5``."""

    name = "pair"

    def __init__(self, example: str, first: click.ParamType[Any], second: click.ParamType[Any]) -> None:
        self.example, self.types = example, (first, second)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, Any]:
        """Returns both, or fails."""
        name, equals, what = value.rpartition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not of the form {self.example}", param, ctx)
        return self.types[0].convert(name, param, ctx), self.types[1].convert(what, param, ctx)


class _WhatIf(Command):
    """The command, which suggests --class if a kernel class is given as an option of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words, or fails."""
        words = " ".join(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from nsys_analyzer.analysis.kernels.classes import known_classes

            kernel_class = error.option_name.lstrip("-").replace("-", " ").casefold()
            if kernel_class not in known_classes():
                raise
            factor = re.search(rf"{re.escape(error.option_name)}[= ]([\d.]+)", words)
            pair = shlex.quote(f"{kernel_class}={factor[1] if factor else 2}")
            message = f"No such option {error.option_name!r}. Did you mean --class {pair}?"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from error


_FACTOR = _Pair("NAME=FACTOR, such as matmul=0.5", click.STRING, click.FLOAT)


@command(cls=_WhatIf, epilog="Example: nsys-analyze what-if capture.sqlite --class matmul=0.5 --launches 0")
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="TRACE|FOLDER...")
@option(
    ASKED, "--class", "classes", type=_FACTOR, multiple=True, metavar="CLASS=FACTOR",
    help="Kernels of this class take so many times their time: 0.5 is twice as fast, 0 none. Repeatable.",
)  # fmt: skip
@option(
    ASKED, "--range", "ranges", type=_FACTOR, multiple=True, metavar="RANGE=FACTOR",
    help="What the program does in ranges of this name, and what it launches there, takes so many times its time. "
    "0: it is gone, with its waits. Repeatable.",
)  # fmt: skip
@option(
    ASKED, "--launches", type=float, metavar="FACTOR",
    help="Launching takes so many times its time. 0: nothing, about as in a CUDA graph.",
)  # fmt: skip
@option(
    ASKED, "--copies", type=click.Choice(["pinned"]),
    help="pinned: large copies to the GPU come from pinned memory, and the program does not wait for them.",
)  # fmt: skip
@option(
    ASKED, "--rank", "on_time", type=_Pair("RANK=on-time", click.INT, click.Choice(["on-time"])), multiple=True,
    metavar="RANK=on-time",
    help="The other ranks of the run do not wait for this one. Give the captures of all ranks. Repeatable.",
)  # fmt: skip
@option(
    ASKED, "--network", type=float, metavar="FACTOR",
    help="Collectives transfer so many times as fast, once the last rank has started them.",
)  # fmt: skip
@format_option("text", "markdown", "json", help="json holds every figure.")
@evidence_options
def what_if(
    evidence: Callable[[], Evidence], classes: tuple[tuple[str, float], ...], ranges: tuple[tuple[str, float], ...],
    launches: float | None, copies: str | None, on_time: tuple[tuple[int, str], ...], network: float | None,
    output_format: str,
) -> None:  # fmt: skip
    """Print what a step of TRACE would take if some of its parts took more or less time.

    The recorded steps are replayed with all the changes that you give: the new step, what it saves, and what limits it
    then. The ranks of a run are replayed together, and any other capture by itself.
    """
    from nsys_analyzer.analysis import what_if as question
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.renderers import markdown
    from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION, in_json, to_plain_data
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections.what_if import what_if_section

    asked = question.Question(dict(classes), dict(ranges), launches, copies == "pinned", tuple(dict(on_time)), network)
    if asked == question.Question():
        raise click.UsageError("Say what is changed: --class, --range, --launches, --copies, --rank or --network.")
    found = list(question.answer_all(evidence().captures, asked))
    if output_format == "json":
        data = {"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "what_if": to_plain_data(found)}
        click.echo(in_json(data), nl=False, file=data_stream())
        return
    sections = tuple(map(what_if_section, found))
    if output_format == "markdown":
        click.echo(markdown.render(Report("What if", sections), {}), nl=False)
        return
    for place, section in enumerate(sections):
        click.echo(nl=place > 0)
        print_section(section)
