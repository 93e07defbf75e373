"""``nsys-analyze ask``: single figures of a capture by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import SHOWN, command, format_option, option
from nsys_analyzer.cli.options import evidence_argument, evidence_options

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence

#: The exit status where the capture does not tell what is asked.
CANNOT_ANSWER = 4


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    from nsys_analyzer.questions.ask import usage
    from nsys_analyzer.questions.named_figures import FIGURES, unit_of

    if wanted:
        for name, named in FIGURES.items():
            click.echo(f"{usage(name)}\n    {unit_of(name)}: {named.doc}")
        ctx.exit()


@command(epilog="Example: nsys-analyze ask capture.sqlite 'gpu_busy_ms phase=forward' 'class_share class=matmul'")
@evidence_argument
@click.argument("questions", nargs=-1, required=True, metavar="QUESTION...")
@option(SHOWN, "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Name the figures.")
@format_option("text", "json", help="json holds what each answer rests on.")
@evidence_options
@click.pass_context
def ask(
    ctx: click.Context, evidence: Callable[[], Evidence], questions: tuple[str, ...], output_format: str
) -> None:  # fmt: skip
    """Print figures of TRACE by their names, with units, and what they rest on.

    A question is the name of a figure, and what it is of: 'class_ms class=matmul phase=forward'. Of several processes
    process=, rank= or capture= names one. The exit code is 4 where the capture does not tell, which is said with the
    command that would.
    """
    from nsys_analyzer.questions.ask import Answers, in_words
    from nsys_analyzer.questions.ask import ask as answer
    from nsys_analyzer.report.renderers.json_report import in_json, to_plain_data
    from nsys_analyzer.report.screen import data_stream

    read = evidence()
    found = Answers(tuple(answer(read, question) for question in questions))
    if output_format == "json":
        click.echo(in_json(to_plain_data(found), indent=None), nl=False, file=data_stream())
    else:
        for one in found.answers:
            click.echo(in_words(one))
    if any(one.cannot_answer for one in found.answers):
        ctx.exit(CANNOT_ANSWER)
