"""``nsys-analyze explain``: explains the length of a step, and prints what to do first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import CRITERIA, OUTPUT, SELECTION, command, format_option, option
from nsys_analyzer.cli.options import PATH, evidence_options, ledger_option, print_json, print_report, tell

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence


@command(epilog="Example: nsys-analyze explain capture.sqlite")
@click.argument("traces", type=PATH, nargs=-1, required=True, metavar="TRACE|FOLDER...")
@format_option("text", "markdown", "json", help="json contains every figure, in the form of the report's JSON.")
@option(SELECTION, "--all", "show_all", is_flag=True,
        help="Also print the rest of the report, with its folded parts.")  # fmt: skip
@option(
    OUTPUT, "--budget", type=click.IntRange(min=200), metavar="BYTES",
    help="The largest size of the JSON, in bytes. The JSON then contains the most valuable answers that fit into this "
    "size, each with the rows that the answer is based on, and then the figures that are unknown.",
)  # fmt: skip
@option(CRITERIA, "--calibrate", is_flag=True,
        help="Widen the intervals of the predicted savings to fit the savings that verify measured.")  # fmt: skip
@ledger_option
@evidence_options
def explain(
    evidence: Callable[[], Evidence], output_format: str, show_all: bool, budget: int | None,
    calibrate: bool, ledger: Path,
) -> None:  # fmt: skip
    """Explains why a training step of TRACE is as long as it is, and what would make it shorter.

    explain prints the beginning of the report, and then the findings, with the largest saving first. Each finding has
    its evidence, lines of code to try, and a way to check the finding. TRACE is a capture or a folder of captures.
    Several captures may be the ranks of a run.
    """
    from nsys_analyzer.questions.ask import write_ranked_answers
    from nsys_analyzer.report.renderers.json_report import STEP_KEYS, captures_data
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections import EXPLAIN_SECTION_KEYS, build_report
    from nsys_analyzer.report.sections.about import collect_warnings, format_warning_count
    from nsys_analyzer.verify.ledger import with_calibrated_intervals

    if budget and output_format != "json":
        raise click.UsageError("--budget needs --format json.")
    gathered_evidence = evidence()
    if calibrate:
        gathered_evidence = replace(
            gathered_evidence, captures=with_calibrated_intervals(gathered_evidence.captures, ledger, tell)
        )
    if budget:
        click.echo(write_ranked_answers(gathered_evidence, budget), nl=False, file=data_stream())
        return
    if output_format == "json":
        print_json(captures_data(gathered_evidence.captures, gathered_evidence.runs, STEP_KEYS))
        return
    report = build_report(gathered_evidence)
    sections = tuple(section for section in report.sections if show_all or section.key in EXPLAIN_SECTION_KEYS)
    if output_format == "text":
        click.secho(report.title, bold=True)
    print_report(replace(report, sections=sections), output_format)
    if output_format == "text" and not show_all and collect_warnings(gathered_evidence):
        click.echo(f"\n{format_warning_count(gathered_evidence)}, in full with --all")
