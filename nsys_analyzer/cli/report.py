"""``nsys-analyze report``: writes the report of captures, as markdown with charts, a page or JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, SELECTION, command, option
from nsys_analyzer.cli.options import PATH, choose_format, evidence_options, force_option, tell
from nsys_analyzer.report.renderers import RENDERERS

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence


@command(epilog="Example: nsys-analyze report small_ctx128.sqlite small_ctx256.sqlite -o report.md")
@click.argument("traces", nargs=-1, type=PATH, metavar="[TRACE|FOLDER]...")
@option(OUTPUT, "-o", "--output", metavar="FILE", help="The file to write; - prints the report. Default: report.md.")
@option(
    OUTPUT, "--format", "output_format", type=click.Choice(list(RENDERERS)),
    help="The format of the report. Default: the format that the suffix of -o names (.md, .html, .json), else "
    "markdown. JSON is printed unless -o names a file.",
)  # fmt: skip
@force_option
@option(SELECTION, "--no-figures", is_flag=True, help="Write the report without charts.")
@option(OUTPUT, "--open", "open_page", is_flag=True, help="Open the page in a browser. It needs --format html.")
@evidence_options
@click.pass_context
def report(
    ctx: click.Context, evidence: Callable[..., Evidence], output: str | None, output_format: str | None, force: bool,
    no_figures: bool, open_page: bool,
) -> None:  # fmt: skip
    """Writes a report on where the time goes, from one or more captures.

    TRACE is an nsys export (.sqlite, or a folder of Parquet or Arrow files), an nsys report (.nsys-rep), or a trace of
    the PyTorch profiler (.json, .json.gz). FOLDER contains traces with their timings.csv, or the results of
    nsys-analyze bench. Without TRACE, the traces beside the file of --csv are read. The command replaces an earlier
    report of nsys-analyze, but replaces any other file only with --force.
    """
    traces, csv_paths = ctx.params["traces"], ctx.params["csv_paths"]
    if not traces and not csv_paths:
        raise click.UsageError("Give a trace, a folder of traces, or --csv with the timings.csv beside them.")
    suffixes = {name: Path(renderer.file).suffix for name, renderer in RENDERERS.items()}
    output_format = choose_format(Path(output) if output else None, output_format, suffixes, "markdown")
    if open_page and (output_format != "html" or output == "-"):
        raise click.UsageError("--open shows a page in a browser: it needs --format html, and a file instead of -o -.")
    import webbrowser

    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.writing import check_target, write_report

    # The target is checked before the captures are read, so that a mistyped path is reported at once.
    renderer = RENDERERS[output_format]
    writes_file = output != "-" and (output or not renderer.is_data)
    target = Path(output or renderer.file) if writes_file else None
    # If only timings are given, the captures beside them are read.
    sources = (*traces, *csv_paths, *({path.parent for path in csv_paths} if not traces else ()))
    if target:
        check_target(target, sources, force=force)
    gathered_evidence = evidence(with_tracks=renderer.has_timeline)
    if target:  # checked again: reading a report of nsys may have written its export to this path
        check_target(target, sources, force=force)
    if renderer.is_data:  # JSON is made from the figures, so no sections are built
        report = Report(
            "", (), gathered_evidence.captures, benches=gathered_evidence.benches, runs=gathered_evidence.runs
        )
    else:
        from nsys_analyzer.report.sections import build_report

        report = build_report(gathered_evidence)
    if target is None:
        click.echo(renderer.render(report, {}), nl=False, file=data_stream() if renderer.is_data else None)
        return
    write_report(output_format, report, target, figures=not no_figures, force=force)
    if not renderer.is_data:
        from nsys_analyzer.report.renderers.terminal import print_first_screen
        from nsys_analyzer.report.sections import select_first_screen
        from nsys_analyzer.report.sections.about import collect_warnings, format_warning_count

        print_first_screen(report, select_first_screen(report))
        count = f", with {format_warning_count(gathered_evidence)}" if collect_warnings(gathered_evidence) else ""
        click.echo(f"\n{target}{count}")
    if open_page and not webbrowser.open(target.resolve().as_uri()):
        tell(f"No browser could be opened. Open {target} in one.")
