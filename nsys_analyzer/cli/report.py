"""``nsys-analyze report``: the answers, as markdown with figures or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, SHOWN, command, option
from nsys_analyzer.cli.options import evidence_options, format_of, tell
from nsys_analyzer.report.renderers import RENDERERS

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence


@command(epilog="Example: nsys-analyze report small_ctx128.sqlite small_ctx256.sqlite -o report.md")
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path), metavar="[TRACE|FOLDER]...")
@option(OUTPUT, "-o", "--output", metavar="FILE", help="The file to write, or - to print. Default: report.md.")
@option(
    OUTPUT, "--format", "output_format", type=click.Choice(list(RENDERERS)),
    help="JSON is printed, unless -o names a file. Default: what -o ends in (.md, .html, .json), else markdown.",
)  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace a file that nsys-analyze did not write; make a missing folder.")
@option(SHOWN, "--no-figures", is_flag=True, help="Leave the figures out.")
@option(OUTPUT, "--open", "open_page", is_flag=True, help="Open the page in the browser; with --format html.")
@evidence_options
@click.pass_context
def report(
    ctx: click.Context, evidence: Callable[..., Evidence], output: str | None, output_format: str | None, force: bool,
    no_figures: bool, open_page: bool,
) -> None:  # fmt: skip
    """Answer where the time goes, in markdown with figures, from one or more captures.

    TRACE is an nsys export (.sqlite, or a folder of Parquet or Arrow files) or report (.nsys-rep), or a PyTorch
    profiler trace (.json, .json.gz); a FOLDER stands for the traces in it, with its timings.csv, or for what
    nsys-analyze bench left there. Without a TRACE, the traces in the folder of --csv are read. A report of nsys-analyze
    is replaced; any other file only with --force.
    Many captures are read side by side.
    """
    traces, csv_paths = ctx.params["traces"], ctx.params["csv_paths"]
    if not traces and not csv_paths:
        raise click.UsageError("Give a trace, a folder of traces, or --csv timings.csv beside them.")
    suffixes = {form: Path(renderer.file).suffix for form, renderer in RENDERERS.items()}
    output_format = format_of(Path(output) if output else None, output_format, suffixes, "markdown")
    if open_page and (output_format != "html" or output == "-"):
        raise click.UsageError("--open shows a page in the browser: it needs --format html, and no -o -.")
    import webbrowser

    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.writing import check_target, write_report

    # Before the captures are read: a long wait should not end in a typing error.
    to_file = output != "-" and (output or not RENDERERS[output_format].is_data)
    target = Path(output or RENDERERS[output_format].file) if to_file else None
    # Of timings alone the captures beside them are read.
    sources = (*traces, *csv_paths, *({path.parent for path in csv_paths} if not traces else ()))
    if target:
        check_target(target, sources, force=force)
    found = evidence(with_tracks=RENDERERS[output_format].has_timeline)
    if target:  # reading has made exports
        check_target(target, sources, force=force)
    chosen = RENDERERS[output_format]
    if chosen.is_data:  # what programs read has no sentences
        built = Report("", (), found.captures, benches=found.benches, runs=found.runs)
    else:
        from nsys_analyzer.report.sections import build_report

        built = build_report(found)
    if target is None:
        click.echo(chosen.render(built, {}), nl=False, file=data_stream() if chosen.is_data else None)
        return
    write_report(output_format, built, target, figures=not no_figures, force=force)
    if not RENDERERS[output_format].is_data:
        from nsys_analyzer.report.renderers.terminal import print_first_screen
        from nsys_analyzer.report.sections import first_screen
        from nsys_analyzer.report.sections.about import count_of_warnings, warnings_of

        print_first_screen(built, first_screen(built))
        count = f", with {count_of_warnings(found)}" if warnings_of(found) else ""
        click.echo(f"\n{target}{count}")
    if open_page and not webbrowser.open(target.resolve().as_uri()):
        tell(f"No browser could be opened here: open {target} in one.")
