"""Gathers everything that a report or a comparison is made from: both commands begin here.

``gather`` reads the captures with their manifests and unprofiled times, joins the ranks of parallel runs, and finds the
experiments that have run. ``gather_runs`` reads one side of a comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
from nsys_analyzer.configuration import NO_PRICES, Prices, Run
from nsys_analyzer.errors import NsysAnalyzerError, TimingsError
from nsys_analyzer.inputs.captures import read_captures, sort_for_report
from nsys_analyzer.inputs.manifest import TIMINGS, find_manifests_beside
from nsys_analyzer.inputs.rows import ROWS_FILE
from nsys_analyzer.inputs.saved_reports import is_saved_report, read_saved_report
from nsys_analyzer.inputs.traces import find_titles, find_traces, holds_captures, is_folder
from nsys_analyzer.system.cluster import SEQUENTIAL, Workers
from nsys_analyzer.trace.phase_names import PhaseNames

if TYPE_CHECKING:  # imported where they are needed, so that a report of one capture starts faster
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.inputs.unprofiled_times import Timings

#: The largest number of ranks of one run for which findings are derived. In a larger run, many ranks do equal work.
MAX_DIAGNOSED_RANKS = 12


@dataclass(frozen=True)
class Inputs:
    """Everything that a report or a comparison is made from.

    Attributes:
        captures: a complete summary for each process of each capture, sorted by model and context length.
        bench_folders: the folders that contain the results of experiments.
        times_source: the name of the table of unprofiled times; empty without such a table.
        found_times: whether the unprofiled times were found beside the captures, and not named by the user.
    """

    captures: tuple[CaptureSummary, ...]
    bench_folders: tuple[Path, ...] = ()
    times_source: str = ""
    found_times: bool = False

    @cached_property
    def runs(self) -> tuple[ParallelRun, ...]:
        """Returns the runs with several ranks among the captures."""
        return find_runs_of_captures(self.captures)


def gather(
    paths: Sequence[Path],
    csv_paths: Sequence[Path] = (),
    *,
    names: PhaseNames | None = None,
    overrides: Run | None = None,
    timings: Timings | None = None,
    step_ms: float | None = None,
    find_times: bool = True,
    in_order: bool = False,
    with_tracks: bool = False,
    prices: Prices = NO_PRICES,
    workers: Workers = SEQUENTIAL,
    tell: Callable[[str], None] = lambda _: None,
) -> Inputs:
    """Gathers all data that a report is made from.

    Args:
        paths: traces, and folders that contain traces or experiments. If empty, the folders of ``csv_paths`` are read.
        csv_paths: tables of unprofiled times.
        names: the names of the ranges of phases.
        overrides: model, context length, batch size and precision from the command line. They take precedence over a
            manifest.
        timings: unprofiled times that replace tables, such as the times of the sweep that was just run.
        step_ms: the unprofiled time of a step, which replaces tables, for one capture or the ranks of one run.
        find_times: whether to look for unprofiled times beside the captures if none are given.
        in_order: whether the captures are the ranks of one run, in the order of the paths.
        with_tracks: whether to keep every operation of the measured steps for a timeline.
        prices: what electricity and GPUs cost.
        workers: the processes that read the captures.
        tell: called with a message for the user if a table of times is found, or cannot be used.

    Raises:
        NsysAnalyzerError: nothing could be read, or ``step_ms`` is given for several runs.
    """
    given_timings = _read_timings(csv_paths) if csv_paths else timings
    found_timings = _find_timings(paths, tell) if find_times and not (given_timings or step_ms) else None
    timings = given_timings or found_timings
    searched_folders = paths or tuple(dict.fromkeys(path.resolve().parent for path in csv_paths))
    bench_folders = {place: _find_experiment_folders(place) for place in searched_folders}
    all_bench_folders = tuple(dict.fromkeys(folder for folders in bench_folders.values() for folder in folders))
    trace_places = [place for place in searched_folders if not bench_folders[place] or holds_captures(place)]
    captures: tuple[CaptureSummary, ...] = ()
    if trace_places or timings or not all_bench_folders:
        rows = read_captures(
            trace_places, names, overrides,
            has_times=timings is not None, in_order=in_order, with_tracks=with_tracks, workers=workers,
        )  # fmt: skip
        if timings or step_ms:
            rows = _match_timings(rows, timings, step_ms)
        captures = complete_captures(rows, _find_ranks_like_others(rows), prices)
    return Inputs(
        captures,
        all_bench_folders,
        timings.source if timings else "--step-ms" if step_ms else "",
        found_timings is not None,
    )


def gather_runs(
    path: Path,
    csv_paths: Sequence[Path] = (),
    *,
    names: PhaseNames | None = None,
    overrides: Run | None = None,
    workers: Workers = SEQUENTIAL,
    tell: Callable[[str], None] = lambda _: None,
    option: str = "--csv-before or --csv-after",
) -> tuple[Summary, ...]:
    """Gathers the runs that one path of a comparison stands for.

    Args:
        path: a capture, a folder of captures, the JSON of a report, or the folder of a baseline.
        csv_paths: tables of unprofiled times, which replace the tables beside the captures.
        names, overrides, workers, tell: see ``gather``.
        option: the command-line option for other tables of times, which messages to the user name.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    if reports := find_saved_reports(path):
        return tuple(run for report in reports for run in read_saved_report(report))
    timings = _read_timings(csv_paths) if csv_paths else _find_timings((path,), tell, option)
    rows = read_captures((path,), names, overrides, has_times=timings is not None, workers=workers)
    captures = complete_captures(_match_timings(rows, timings, None) if timings else rows)
    return tuple(capture for capture in captures if path.is_dir() or capture.source == path.name)


def find_saved_reports(path: Path) -> list[Path]:
    """Returns the JSON reports at a path: the file itself, or the files of a baseline's folder."""
    if path.is_dir():
        return [] if holds_captures(path) else [file for file in sorted(path.glob("*.json")) if is_saved_report(file)]
    return [path] if is_saved_report(path) else []


def find_runs_of_captures(captures: Sequence[CaptureSummary]) -> tuple[ParallelRun, ...]:
    """Returns the runs with several ranks among captures."""
    if not any(capture.members for capture in captures):
        return ()
    from nsys_analyzer.analysis.ranks.runs import find_runs  # imported here, so that a report of one rank starts faster

    return find_runs(captures)


def _find_ranks_like_others(rows: Sequence[CaptureSummary]) -> dict[str, Fact]:
    """Returns the titles of captures that get no findings because their run has many ranks, with the reason.

    Findings are derived for ranks at equal distances in the order of times without communication, the longest first.
    """
    if sum(len(row.members) for row in rows) <= MAX_DIAGNOSED_RANKS:
        return {}
    from nsys_analyzer.analysis.ranks.matching import group_members

    title_of = {(member.capture, member.process): row.title for row in rows for member in row.members}
    not_diagnosed: dict[str, Fact] = {}
    for members, _ in group_members([member for row in rows for member in row.members]):
        order = sorted(members, key=lambda member: -member.median_work_ns)
        diagnosed = order[:: -(-len(order) // MAX_DIAGNOSED_RANKS)]
        reason = Fact("one_of_many_ranks", ranks=len(order), labels=tuple(member.label for member in diagnosed))
        others = [member for member in order if all(member is not other for other in diagnosed)]
        not_diagnosed |= {title_of[member.capture, member.process]: reason for member in others}
    return not_diagnosed


def _read_timings(csv_paths: Sequence[Path]) -> Timings:
    """Reads the given tables of unprofiled times."""
    from nsys_analyzer.inputs.unprofiled_times import read_timings

    return read_timings(*csv_paths)


def _find_timings(paths: Sequence[Path], tell: Callable[[str], None], option: str = "--csv") -> Timings | None:
    """Returns the unprofiled times of captures; None without times, or if several tables of times are found.

    The times are read from ``timings.csv`` in a capture's folder or its parent folder, or else from the captures'
    manifests. Rows of captures that are not among ``paths`` are left out.

    Args:
        paths: the captures' files or folders.
        tell: called with a message for the user about the table that is used or left out.
        option: the command-line option for other tables of times, which messages to the user name.
    """
    timing_files: dict[Path, Path] = {}
    for path in paths:
        folder = path if is_folder(path) else path.parent
        for place in (folder, Path(os.path.realpath(folder)).parent):
            if os.path.isfile(table := place / TIMINGS):  # noqa: PTH113 - pathlib raises if a folder cannot be searched
                timing_files[Path(os.path.realpath(table))] = table
                break
    if len(timing_files) > 1:
        tell(f"Several folders have a {TIMINGS}, and none is used: name one with {option}.")
        return None
    try:
        traces = find_traces((path for path in paths if path.exists()), allow_none=True)
        manifests = [] if timing_files else [path for trace in traces for path in find_manifests_beside(trace)]
        if not timing_files and not manifests:
            return None
        from nsys_analyzer.inputs.unprofiled_times import Timings, read_manifest_timings, read_timings

        titles = set(find_titles(traces).values())
        if manifests:
            all_rows = (row for path in dict.fromkeys(manifests) for row in read_manifest_timings(path))
            rows = [row for row in all_rows if row.times and row.run.capture in titles]
            return Timings("the manifest", tuple(rows), of_captures=True) if rows else None
        (file,) = timing_files.values()
        if b"\n" not in file.read_bytes().strip():
            return None  # a table with only a header means that no program was timed
        timings = read_timings(file)
        if file.parent not in paths:
            other_titles = set(find_titles(find_traces((file.parent,), allow_none=True)).values()) - titles
            timings_of_inputs = (row for row in timings.rows if row.run.capture not in other_titles)
            matching_rows = (row for row in timings_of_inputs if row.run.capture or row.model or not other_titles)
            timings = replace(timings, rows=tuple(matching_rows), of_captures=True)
    except (NsysAnalyzerError, OSError) as error:
        tell(f"Left out, as it cannot be read: {error}")
        return None
    tell(f"Unprofiled times: {file}; {option} names others.")
    return timings if timings.rows else None


def _match_timings(
    rows: Sequence[CaptureSummary], timings: Timings | None, step_ms: float | None
) -> list[CaptureSummary]:
    """Returns the captures with their unprofiled times, and a row for each run that has times but no capture.

    Raises:
        TimingsError: ``step_ms`` is given, and the captures belong to several runs.
    """
    from nsys_analyzer.analysis.ranks.matching import group_members
    from nsys_analyzer.inputs.match_times import match_timings
    from nsys_analyzer.inputs.unprofiled_times import PhaseTiming, Timings

    capture_names = {row.name for row in rows}
    member_groups = group_members([member for row in rows for member in row.members]) if len(capture_names) > 1 else []
    one_run = len(capture_names) <= 1 or [{member.capture for member in group} for group, _ in member_groups] == [
        capture_names
    ]
    if step_ms and not one_run:
        problem = f"--step-ms is for one capture or the ranks of one run, and these are {len(capture_names)} captures"
        hint = "Give the times of each by --csv, in a table with the columns capture, phase and mean_ms"
        raise TimingsError(problem, hint)
    if step_ms or timings is None:
        timings = Timings("--step-ms", (PhaseTiming("step", Stats(None, step_ms), "--step-ms"),))
    return sort_for_report(match_timings(rows, timings, one_run=one_run))


def _find_experiment_folders(place: Path) -> list[Path]:
    """Returns the folders with results of experiments among a path and its direct subfolders."""
    if not place.is_dir():
        return []
    # os.path is used because pathlib raises if a folder cannot be searched.
    return [folder for folder in (place, *sorted(place.iterdir())) if os.path.isfile(folder / ROWS_FILE)]  # noqa: PTH113
