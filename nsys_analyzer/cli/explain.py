"""``nsys-analyze explain``: why a step is as long as it is, and what to do first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import JUDGED, OUTPUT, SHOWN, Choice, command, option
from nsys_analyzer.cli.options import (
    command_line,
    configuration_options,
    names_options,
    scheduler_option,
    tell,
    unprofiled_options,
)

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranges.phases import PhaseNames
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.runs.timings import Selection


@command(epilog="Example: nsys-analyze explain capture.sqlite")
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="TRACE|FOLDER...")
@option(
    OUTPUT, "--format", "output_format", type=Choice(["text", "markdown", "json"]), default="text", show_default=True,
    help="json holds every figure, as the report's JSON does.",
)  # fmt: skip
@option(
    SHOWN, "--all", "everything", is_flag=True, help="Print the rest of the report, too, with all that is folded in it."
)
@option(
    JUDGED, "--calibrate", "ledger", type=click.Path(path_type=Path), metavar="LEDGER",
    help="Widen intervals as what verify measured, and kept in this file, asks for.",
)  # fmt: skip
@scheduler_option
@unprofiled_options
@names_options
@configuration_options
def explain(
    traces: tuple[Path, ...],
    csv_paths: tuple[Path, ...],
    selection: Selection,
    step_ms: float | None,
    in_order: bool,
    output_format: str,
    everything: bool,
    ledger: Path | None,
    scheduler: str | None,
    names: PhaseNames,
    given: Run,
) -> None:
    """Print why a training step of TRACE is as long as it is, and what would make it shorter.

    The first block of the report, and the findings, the largest saving first: what was seen, the lines of code to try,
    and how to check it. TRACE is a capture or a folder of captures; several are the ranks of a run, say.
    """
    from nsys_analyzer.cli.run_progress import reading
    from nsys_analyzer.experiments.loading import load_evidence
    from nsys_analyzer.report.renderers import markdown
    from nsys_analyzer.report.renderers.json_report import STEPS, captures_data, in_json
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections import EXPLAINING, build_report
    from nsys_analyzer.report.sections.about import count_of_warnings, warnings_of
    from nsys_analyzer.runs.ledger import calibrate
    from nsys_analyzer.system.cluster import Workers

    workers = Workers(scheduler, reading)
    evidence = load_evidence(
        traces, csv_paths, command_line(), tell, names, given, None, selection, workers, step_ms=step_ms,
        in_order=in_order,
    )  # fmt: skip
    if ledger:
        evidence = replace(evidence, captures=calibrate(evidence.captures, ledger))
    if output_format == "json":
        click.echo(in_json(captures_data(evidence.captures, evidence.runs, STEPS)), nl=False, file=data_stream())
        return
    built = build_report(evidence)
    kept = tuple(one for one in built.sections if everything or one.key in EXPLAINING)
    if output_format == "markdown":
        click.echo(markdown.render(replace(built, sections=kept), {}), nl=False)
        return
    click.secho(built.title, bold=True)
    for place, one in enumerate(kept):
        click.echo(nl=place > 0)
        print_section(one)
    if not everything and warnings_of(evidence):
        click.echo(f"\n{count_of_warnings(evidence)}, in full with --all")
