"""``nsys-analyze ask``: prints single figures of a capture by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import evidence_argument, evidence_options, print_json

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence

#: The exit status if a question has no answer.
CANNOT_ANSWER_STATUS = 4


def _list_figures(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    from nsys_analyzer.questions.ask import list_figures

    if is_requested:
        click.echo(list_figures(), nl=False)
        ctx.exit()


@command(epilog="Example: nsys-analyze ask capture.sqlite 'gpu_busy_ms phase=forward' 'class_share class=matmul'")
@evidence_argument
@click.argument("questions", nargs=-1, required=True, metavar="QUESTION...")
@option(SELECTION, "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_figures,
        help="List all figures with their arguments, units and meanings.")  # fmt: skip
@format_option("text", "json", help="json contains each answer with its unit and the rows that the answer is based on.")
@evidence_options
@click.pass_context
def ask(
    ctx: click.Context, evidence: Callable[[], Evidence], questions: tuple[str, ...], output_format: str
) -> None:  # fmt: skip
    """Prints figures of TRACE by their names, with their units and the rows that they are based on.

    A question is the name of a figure, followed by its arguments: 'class_ms class=matmul phase=forward'. If TRACE has
    several processes, process=, rank= or capture= selects one of them. If TRACE does not contain the answer, ask prints
    the reason and the command that would record the answer, and the exit status is 4.
    """
    from nsys_analyzer.questions.ask import Answers, format_answer
    from nsys_analyzer.questions.ask import ask as answer_question
    from nsys_analyzer.report.renderers.json_report import to_plain_data

    gathered_evidence = evidence()
    answers = tuple(answer_question(gathered_evidence, question) for question in questions)
    if output_format == "json":
        print_json(to_plain_data(Answers(answers)), indent=None)
    else:
        for answer in answers:
            click.echo(format_answer(answer))
    if any(answer.cannot_answer for answer in answers):
        ctx.exit(CANNOT_ANSWER_STATUS)
