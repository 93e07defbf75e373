"""All that a report or a comparison is made from: captures, the timings beside them, experiments that have run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.captures import Inputs, holds_captures, load_captures, timings_beside
from nsys_analyzer.inputs.rows import NAME
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import FinishedBench, Paragraph, Section
from nsys_analyzer.system.cluster import SEQUENTIAL, Workers
from nsys_analyzer.text import phrase
from nsys_analyzer.trace.phase_names import PhaseNames

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import Summary
    from nsys_analyzer.inputs.timings import Timings


def load_evidence(
    paths: Sequence[Path],
    csv_paths: Sequence[Path],
    command: str,
    tell: Callable[[str], None] = lambda _: None,
    names: PhaseNames | None = None,
    given: Run | None = None,
    workers: Workers = SEQUENTIAL,
    *,
    timings: Timings | None = None,
    step_ms: float | None = None,
    in_order: bool = False,
    with_tracks: bool = False,
) -> Evidence:
    """Reads all that a report is made from.

    Args:
        paths: traces, and folders that hold them or benches; without any, the folders of the timings.
        csv_paths: timings of unprofiled runs; without any, those beside the captures.
        command: the command line that makes the report again.
        tell: takes a line for the user on timings that were found, or left out.
        names: the names of the ranges of phases.
        given: what is known of the configuration besides.
        workers: where the captures are read.
        timings: those of the sweep that was just run, in place of files.
        step_ms: the time of a step without the profiler, in place of timings.
        in_order: whether the paths are the ranks of one run, in their order.
        with_tracks: whether to keep every moment of the measured steps, for a timeline.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    found = None if csv_paths or step_ms or timings else timings_beside(paths, tell)
    timings = _read(csv_paths) if csv_paths else timings or found
    places = paths or tuple(dict.fromkeys(path.resolve().parent for path in csv_paths))
    of_place = {place: _bench_folders(place) for place in places}
    folders = dict.fromkeys(folder for place in places for folder in of_place[place])
    with_traces = [place for place in places if not of_place[place] or holds_captures(place)]
    alone = len(folders) == 1 and not with_traces and not timings
    benches = tuple(_finished(folder, alone=alone) for folder in folders)
    loaded = Inputs((), ())
    if with_traces or timings or not benches:
        loaded = load_captures(
            with_traces, names, given, timings, step_ms=step_ms, in_order=in_order, workers=workers,
            with_tracks=with_tracks,
        )  # fmt: skip
    notes = (phrase("Read from the captures' folder; `--csv` names another file."),) if found else ()
    source = timings.source if timings else "--step-ms" if step_ms else ""
    return Evidence(loaded.captures, command, source, notes, benches, loaded.runs)


def load_runs(
    path: Path,
    csv_paths: Sequence[Path],
    tell: Callable[[str], None] = lambda _: None,
    names: PhaseNames | None = None,
    given: Run | None = None,
    workers: Workers = SEQUENTIAL,
    option: str = "--csv-before or --csv-after",
) -> tuple[Summary, ...]:
    """The runs of one side of a comparison: of a capture, a folder of captures, a report's JSON, or a baseline.

    Args:
        path: where they are.
        csv_paths: timings of unprofiled runs, in place of those beside the captures.
        tell, names, given, workers: as of ``load_evidence``.
        option: names other timings, for a line to the user.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    from nsys_analyzer.report.finding_texts import write_texts
    from nsys_analyzer.report.renderers.json_report import read_report

    if reports := reports_at(path):
        return tuple(run for report in reports for run in read_report(report))
    timings = _read(csv_paths) if csv_paths else timings_beside((path,), tell, option=option)
    captures = load_captures((path,), names, given, timings, workers=workers).captures
    return tuple(write_texts(capture) for capture in captures if path.is_dir() or capture.source == path.name)


def reports_at(path: Path) -> list[Path]:
    """Returns the report's JSON that a path is, or those of the folder of a baseline, which holds nothing else."""
    from nsys_analyzer.report.renderers.json_report import is_report

    if path.is_dir():
        return [] if holds_captures(path) else [file for file in sorted(path.glob("*.json")) if is_report(file)]
    return [path] if is_report(path) else []


def _read(csv_paths: Sequence[Path]) -> Timings:
    from nsys_analyzer.inputs.timings import read_timings  # a report of a trace alone starts without it

    return read_timings(*csv_paths)


def _bench_folders(place: Path) -> list[Path]:
    """Returns the folders of benches at a path: itself, and those one level below."""
    if not place.is_dir():
        return []
    # pathlib raises where a folder cannot be looked into, which then holds none
    return [folder for folder in (place, *sorted(place.iterdir())) if os.path.isfile(folder / NAME)]  # noqa: PTH113


def _finished(folder: Path, *, alone: bool) -> FinishedBench:
    """A bench that has run; one that cannot be read ends a report of it alone, and no report of others."""
    try:
        from nsys_analyzer.experiments.results import read_finished

        return read_finished(folder)
    except NsysAnalyzerError as error:
        if alone:
            raise
        section = Section(f"bench-{folder.name}", f"Bench: {folder.name}", (Paragraph(f"Left out: {error}"),))
        return FinishedBench(folder.name, section)
