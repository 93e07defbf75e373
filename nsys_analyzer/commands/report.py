"""``nsys-analyze report``: the answers, as markdown with figures or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.commands.options import phase_names_option
from nsys_analyzer.errors import NsysAnalyzerError

if TYPE_CHECKING:
    from nsys_analyzer.questions.evidence import Evidence
    from nsys_analyzer.report.model import Report


#: A report is never written over a capture, its export or the timings.
_INPUT_SUFFIXES = (".sqlite", ".nsys-rep", ".qdrep", ".csv", ".db")


@click.command(
    epilog="Example: nsys-analyze report small_ctx128.sqlite small_ctx256.sqlite --csv timings.csv -o report.md"
)
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path), metavar="[TRACE|FOLDER]...")
@click.option(
    "-o",
    "--output",
    default=None,
    metavar="FILE",
    help="Where to write, folders made as needed; - prints. Default: report.md.",
)
@click.option(
    "--format", "output_format", type=click.Choice(["markdown", "json"]), default="markdown", show_default=True,
    help="JSON is printed, unless -o names a file.",
)  # fmt: skip
@click.option(
    "--csv", "csv_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Timings of unprofiled runs; without traces, those of the CSV's folder are read.",
)  # fmt: skip
@click.option("--no-figures", is_flag=True, help="Leave the figures out.")
@phase_names_option("--phase", "--phase-name")
@click.option(
    "--model",
    metavar="NAME",
    help="The model of the captures, for FLOPs: small, medium, large, xl, 2.7B, xl-2026, 10B.",
)
@click.option("--context-length", type=click.IntRange(1), metavar="TOKENS", help="Their context length.")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Their batch size.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16", "fp16"], case_sensitive=False),
    help="The precision that was asked for.",
)  # fmt: skip
def report(
    traces: tuple[Path, ...],
    output: str | None,
    output_format: str,
    csv_path: Path | None,
    no_figures: bool,
    phase_names: tuple[str, ...],
    model: str | None,
    context_length: int | None,
    batch_size: int | None,
    precision: str | None,
) -> None:
    """Answer where the time goes, in markdown with figures, from one or more captures.

    TRACE is an nsys export (.sqlite) or report (.nsys-rep); a FOLDER stands for the traces in it.
    """
    if not traces and not csv_path:
        raise click.UsageError("Give a trace, a folder of traces, or --csv timings.csv beside them.")
    from nsys_analyzer.analysis.phases import PhaseNames
    from nsys_analyzer.capture.timings import read_timings
    from nsys_analyzer.commands.gather import Given, gather
    from nsys_analyzer.questions.evidence import Evidence

    if output not in (None, "-"):
        _writable(Path(str(output)))  # before the captures are read: a long wait should not end in a typing error
    timings = read_timings(csv_path) if csv_path else None
    given = Given(model, context_length, batch_size, precision)
    paths = traces or ((csv_path.resolve().parent,) if csv_path else ())
    captures = gather(paths, PhaseNames.parse(phase_names), given, timings)
    evidence = Evidence(captures, _command(), csv_path.name if csv_path else "", timings.notes if timings else ())
    if output_format == "json":
        _write_json(evidence, output)
    else:
        _write_markdown(evidence, output, figures=not no_figures)


def _command() -> str:
    """The command line as a reader of the report would type it, beside the captures."""
    import shlex
    import sys

    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["nsys-analyze", *words])


def _write_json(evidence: Evidence, output: str | None) -> None:
    import json

    from nsys_analyzer.report.data import report_data

    text = json.dumps(report_data(evidence.captures, evidence.labels), indent=1, allow_nan=False)
    if output in (None, "-"):
        click.echo(text)
    else:
        _replace(Path(str(output)), text + "\n")


def _write_markdown(evidence: Evidence, output: str | None, *, figures: bool) -> None:
    from nsys_analyzer.questions import build_report
    from nsys_analyzer.report.markdown import render_markdown
    from nsys_analyzer.report.terminal import print_answers

    built = build_report(evidence)
    if output == "-":
        click.echo(render_markdown(built, {}), nl=False)
        return
    path = Path(output) if output else _writable(Path("report.md"))
    _replace(path, render_markdown(built, _draw(built, path) if figures else {}))
    print_answers(built)
    click.echo(f"\n{path}")


def _draw(built: Report, path: Path) -> dict[str, str]:
    """Draws the figures into a folder beside the report: figure key to its path as the report sees it."""
    from nsys_analyzer.report.plots import draw

    folder = path.parent / f"{path.stem}_figures"
    if built.figures:
        folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for figure in built.figures:
        draw(figure, folder / f"{figure.key}.png")
        drawn[figure.key] = f"{folder.name}/{figure.key}.png"
    return drawn


def _writable(path: Path) -> Path:
    """The path, once a file can be made beside it.

    Raises:
        NsysAnalyzerError: a folder stands there, or its folder cannot be made or written.
    """
    import tempfile

    if path.is_dir():
        raise NsysAnalyzerError(f"{path} is a folder", f"Name a file in it: -o {path / 'report.md'}")
    if path.suffix.lower() in _INPUT_SUFFIXES:
        raise NsysAnalyzerError(f"{path} has the name of an input, not of a report", "Name another file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise NsysAnalyzerError(f"{path} cannot be written ({reason})", "Name another file with -o") from error


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all: what stood there stays until the new text is complete."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
