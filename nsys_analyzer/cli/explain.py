"""``nsys-analyze explain``: why a step is as long as it is, and what to do first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import JUDGED, OUTPUT, SHOWN, command, format_option, option
from nsys_analyzer.cli.options import evidence_options, ledger_option, tell

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence


@command(epilog="Example: nsys-analyze explain capture.sqlite")
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="TRACE|FOLDER...")
@format_option("text", "markdown", "json", help="json holds every figure, as the report's JSON does.")
@option(
    SHOWN, "--all", "everything", is_flag=True, help="Print the rest of the report, too, with all that is folded in it."
)
@option(
    OUTPUT, "--budget", type=click.IntRange(min=200), metavar="BYTES",
    help="Of json: the most valuable answers in so many bytes, each with what it rests on, and what cannot be told.",
)  # fmt: skip
@option(JUDGED, "--calibrate", is_flag=True, help="Widen intervals as far as what verify measured asks for.")
@ledger_option
@evidence_options
def explain(
    evidence: Callable[[], Evidence], output_format: str, everything: bool, budget: int | None,
    calibrate: bool, ledger: Path,
) -> None:  # fmt: skip
    """Print why a training step of TRACE is as long as it is, and what would make it shorter.

    The first block of the report, and the findings, the largest saving first: what was seen, the lines of code to try,
    and how to check it. TRACE is a capture or a folder of captures; several are the ranks of a run, say.
    """
    from nsys_analyzer.questions.ask import brief
    from nsys_analyzer.report.renderers import markdown
    from nsys_analyzer.report.renderers.json_report import STEP_KEYS, captures_data, in_json
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections import EXPLAINING, build_report
    from nsys_analyzer.report.sections.about import count_of_warnings, warnings_of
    from nsys_analyzer.verify.ledger import calibrated

    if budget and output_format != "json":
        raise click.UsageError("--budget is of --format json.")
    gathered = evidence()
    if calibrate:
        gathered = replace(gathered, captures=calibrated(gathered.captures, ledger, tell))
    if output_format == "json":
        text = (
            brief(gathered, budget) if budget else in_json(captures_data(gathered.captures, gathered.runs, STEP_KEYS))
        )
        click.echo(text, nl=False, file=data_stream())
        return
    built = build_report(gathered)
    kept = tuple(one for one in built.sections if everything or one.key in EXPLAINING)
    if output_format == "markdown":
        click.echo(markdown.render(replace(built, sections=kept), {}), nl=False)
        return
    click.secho(built.title, bold=True)
    for place, one in enumerate(kept):
        click.echo(nl=place > 0)
        print_section(one)
    if not everything and warnings_of(gathered):
        click.echo(f"\n{count_of_warnings(gathered)}, in full with --all")
