"""``nsys-analyze check``: whether a capture holds the figures of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

import click

from nsys_analyzer.cli.ask import CANNOT_ANSWER, in_words
from nsys_analyzer.cli.help import command, format_option
from nsys_analyzer.cli.options import evidence_argument, evidence_options

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence

#: The exit status where a claim is false.
FALSE = 3


@command(epilog="Example: nsys-analyze check capture.sqlite claims.txt")
@evidence_argument
@click.argument("text", type=click.File(encoding="utf-8"))
@format_option("text", "json", help="json holds what each answer rests on.")
@evidence_options
@click.pass_context
def check(ctx: click.Context, evidence: Callable[[], Evidence], text: TextIO, output_format: str) -> None:
    """Print of each figure in TEXT whether TRACE holds it.

    A figure is a number with a unit. The words beside it, or the name that `ask --list` gives it, say which it is. It
    is true, false, with the right figure, or cannot be told. The exit code is 3 where one is false, else 4 where one
    cannot be told. TEXT is a file, or - for standard input.
    """
    import msgspec

    from nsys_analyzer.report.claims import check as checked
    from nsys_analyzer.report.screen import data_stream

    found = checked(evidence(), text.read())
    if output_format == "json":
        click.echo(msgspec.json.encode(found), file=data_stream())
    else:
        for claim in found.claims:
            click.echo(f"{'cannot be told' if claim.holds is None else str(claim.holds).lower()}: {claim.text}")
            for answer in claim.answers:
                click.echo(f"    {in_words(answer)}")
            if claim.cannot_answer:
                click.echo(f"    {claim.cannot_answer.why}. It needs: {claim.cannot_answer.needs}")
    held = {claim.holds for claim in found.claims}
    ctx.exit(FALSE if False in held else CANNOT_ANSWER if None in held else 0)
