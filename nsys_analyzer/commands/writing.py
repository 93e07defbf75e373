"""From traces and timings to a report on disk: what ``report`` and ``run`` have in common."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from nsys_analyzer.analysis.phases import PhaseNames
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.capture.placement import made_whole
from nsys_analyzer.capture.timings import read_timings
from nsys_analyzer.capture.timings.rows import has_rows
from nsys_analyzer.commands.bench_results import bench_folders, read_finished
from nsys_analyzer.commands.gather import Given, gather, holds_captures
from nsys_analyzer.questions import build_report
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.data import report_data
from nsys_analyzer.report.markdown import render_markdown
from nsys_analyzer.report.model import Report


def write_report(paths: Sequence[Path], csv_path: Path | None, output: Path, command: str) -> Report:
    """Reads captures and timings, and writes the report as markdown with its figures beside it.

    Args:
        paths: traces, and folders that hold them or benches; without any, the folder of the timings.
        csv_path: timings of unprofiled runs; passed over where it has no row, as of programs that time nothing.
        output: the markdown file, in a folder that exists; figures go into ``<stem>_figures`` beside it.
        command: the command line that makes the report again, for its reader.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    timed = csv_path if csv_path and has_rows(csv_path) else None
    return write_markdown(gather_evidence(paths, timed, command, beside=output.parent), output)


def gather_evidence(
    paths: Sequence[Path],
    csv_path: Path | None,
    command: str,
    names: PhaseNames | None = None,
    given: Given | None = None,
    beside: Path | None = None,
) -> Evidence:
    """What a report of these captures, timings and benches is made from; the arguments are those of ``write_report``.

    Links to what lies in a bench's folder are relative to ``beside``, the report's folder.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    timings = read_timings(csv_path) if csv_path else None
    places = paths or ((csv_path.resolve().parent,) if csv_path else ())
    folders = dict.fromkeys(folder for place in places for folder in bench_folders(place))
    benches = tuple(read_finished(one, os.path.relpath(one, beside or Path())) for one in folders)
    with_traces = [place for place in places if not bench_folders(place) or holds_captures(place)]
    captures: tuple[CaptureSummary, ...] = ()
    if with_traces or timings or not benches:
        captures = gather(with_traces, names or PhaseNames.parse(()), given or Given(), timings)
    notes = timings.notes if timings else ()
    return Evidence(captures, command, csv_path.name if csv_path else "", notes, benches)


def command_line() -> str:
    """The command line of this process as a reader of the report would type it, beside the captures."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["nsys-analyze", *words])


def write_markdown(evidence: Evidence, path: Path, *, figures: bool = True) -> Report:
    """Writes the report and its figures, the report whole or not at all."""
    return write_markdown_of(build_report(evidence), path, figures=figures)


def write_markdown_of(built: Report, path: Path, *, figures: bool = True) -> Report:
    """Writes a report that is built already; returns it."""
    _replace(path, render_markdown(built, _draw(built, path) if figures else {}))
    return built


def write_json(evidence: Evidence, path: Path | None) -> None:
    """Writes the captures as JSON, whole or not at all; prints them where there is no path."""
    text = json.dumps(report_data(evidence.captures, evidence.labels, evidence.benches), indent=1, allow_nan=False)
    if path:
        _replace(path, text + "\n")
    else:
        click.echo(text)


def print_markdown(evidence: Evidence) -> None:
    """Prints the report without figures."""
    click.echo(render_markdown(build_report(evidence), {}), nl=False)


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


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all: what stood there stays until the new text is complete."""
    with made_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
