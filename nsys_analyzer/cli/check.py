"""``nsys-analyze check``: checks the statements of a text against a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

import click

from nsys_analyzer.cli.ask import CANNOT_ANSWER_STATUS
from nsys_analyzer.cli.help import command, format_option
from nsys_analyzer.cli.options import evidence_argument, evidence_options, print_json

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence

#: The exit status if a claim is false.
FALSE_CLAIM_STATUS = 3


@command(epilog="Example: nsys-analyze check capture.sqlite claims.txt")
@evidence_argument
@click.argument("text", type=click.File(encoding="utf-8"))
@format_option("text", "json", help="json contains each answer with its unit and the rows that the answer is based on.")
@evidence_options
@click.pass_context
def check(ctx: click.Context, evidence: Callable[[], Evidence], text: TextIO, output_format: str) -> None:
    """Checks each line of TEXT against TRACE.

    check judges two kinds of lines. The first kind is a line that ask prints, such as "gpu_busy_ms phase=forward = 9.04
    ms". The second kind is a sentence or a table row in the words of the report of TRACE. For a false line, check also
    prints the right figure. Any other line is not judged. The exit status is 3 if a line is false, else 4 if a line is
    not judged. TEXT is a file, or - for standard input.
    """
    from nsys_analyzer.questions.ask import format_answer
    from nsys_analyzer.questions.claims import check as check_claims
    from nsys_analyzer.report.renderers.json_report import to_plain_data

    claims = check_claims(evidence(), text.read())
    if output_format == "json":
        print_json(to_plain_data(claims), indent=None)
    else:
        explained_reasons: set[str] = set()
        for claim in claims.claims:
            click.echo(f"{'not judged' if claim.holds is None else str(claim.holds).lower()}: {claim.text}")
            for detail in (*map(format_answer, claim.answers), *claim.report):
                click.echo(f"    {detail}")
            missing_answer = None if claim.answers else claim.cannot_answer
            if missing_answer and missing_answer.why not in explained_reasons:
                explained_reasons.add(missing_answer.why)
                click.echo(f"    {missing_answer.why}. It needs: {missing_answer.needs}")
    verdicts = {claim.holds for claim in claims.claims}
    ctx.exit(FALSE_CLAIM_STATUS if False in verdicts else CANNOT_ANSWER_STATUS if None in verdicts else 0)
