"""Finds the trace files at the paths that a command was given, and names them."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.inputs.manifest import capture_name, find_untraced_manifests
from nsys_analyzer.trace.nsys_report import export_time_ns, is_export_of
from nsys_analyzer.trace.sources import EXPORT, FOLDER, find_source, is_capture, is_export_folder, is_report, trace_stem

Result = TypeVar("Result")
_DIGITS = re.compile(r"\d+")


def find_traces(paths: Iterable[Path], *, allow_none: bool = False) -> list[Path]:
    """Returns the traces among files and folders. Each capture occurs only once.

    A folder stands for the traces in it and in its direct subfolders.

    Raises:
        TraceError: a folder contains no trace, unless ``allow_none`` is set.
    """
    traces: dict[Path, Path] = {}
    for path in paths:
        traces_inside = _find_traces_in(path) if is_folder(path) else [path]
        if not traces_inside and not allow_none and not find_untraced_manifests(path):
            raise TraceError(
                f"{path} contains no trace", "Give a folder with .sqlite, .nsys-rep or .pt.trace.json files"
            )
        for trace in traces_inside:
            traces.setdefault(Path(os.path.realpath(trace)), trace)
    return list(traces.values())


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder of traces, and not a folder that is itself an export."""
    return path.is_dir() and not is_export_folder(path)


def holds_captures(path: Path) -> bool:
    """Returns whether a path is a trace, or a folder that contains traces or manifests of runs."""
    return not is_folder(path) or bool(_find_traces_in(path) or find_untraced_manifests(path))


def list_traces(folder: Path) -> dict[Path, list[Path] | OSError]:
    """Returns the trace files of a folder and of each subfolder, or the error if a subfolder cannot be read.

    The files are sorted by name, with numbers in numerical order: `rank2` is before `rank10`.
    """
    subfolders = (path for path in folder.iterdir() if is_folder(path) and not path.name.startswith("."))
    files_of_folder: dict[Path, list[Path] | OSError] = {}
    for place in (folder, *sorted(subfolders)):
        try:
            paths = sorted(place.iterdir(), key=lambda path: _DIGITS.sub(lambda number: number[0].zfill(20), path.name))
            files_of_folder[place] = [
                path
                for path in paths
                # A broken link is kept, so that the report has a row with its error.
                if is_capture(path)
                and (path.is_file() or is_export_folder(path) or (path.is_symlink() and not path.exists()))
            ]
        except OSError as error:
            if place == folder:
                raise
            files_of_folder[place] = error
    return files_of_folder


def _find_traces_in(folder: Path) -> list[Path]:
    """Returns the traces in a folder and in its direct subfolders.

    A report and its exports are the same capture. Only the newest of these files is returned.
    """
    files = [path for files in list_traces(folder).values() if not isinstance(files, OSError) for path in files]
    exports: dict[Path, list[Path]] = defaultdict(list)
    for path in files:
        if find_source(path) in (EXPORT, FOLDER):
            exports[path.with_name(trace_stem(path))].append(path)
    replaced_files = {
        older for same_capture in exports.values() for older in sorted(same_capture, key=export_time_ns)[:-1]
    }
    for report in filter(is_report, files):
        exports_of_report = exports[report.with_name(trace_stem(report))]
        replaced_files |= (
            {report} if any(is_export_of(export, report) for export in exports_of_report) else set(exports_of_report)
        )
    return [path for path in files if path not in replaced_files]


def find_titles(traces: Sequence[Path]) -> dict[Path, str]:
    """Returns the title of each capture: its name, with its folder if several captures have the same name."""
    titles = {trace: name_of_trace(trace) for trace in traces}
    for make_longer in (lambda path: f"{Path(os.path.realpath(path)).parent.name}/{name_of_trace(path)}", str):
        counts = Counter(titles.values())
        titles = {trace: title if counts[title] == 1 else make_longer(trace) for trace, title in titles.items()}
    return titles


def name_of_trace(path: Path) -> str:
    """Returns the name of a capture, which is the name of its file or its folder."""
    stem = trace_stem(path)
    stem = stem if stem != path.name else path.name.removesuffix(path.suffix)
    return capture_name(stem, Path(os.path.realpath(path)).parent)


def read_each_trace(path: Path, read_trace: Callable[[Path], Result], tell: Callable[[str], None]) -> Iterator[Result]:
    """Yields the result of ``read_trace`` for a trace, or for each trace of a folder.

    If a trace cannot be read, ``tell`` is called with the error.

    Raises:
        NsysAnalyzerError: no trace could be read.
    """
    traces, errors = find_traces([path]), list[NsysAnalyzerError]()
    if not traces:  # there are no traces if no run in the folder was profiled
        raise TraceError(f"{path} contains no trace", "Give a trace, or a folder with some")
    for trace in traces:
        try:
            yield read_trace(trace)
        except NsysAnalyzerError as error:
            errors.append(error)
            if len(errors) == len(traces):
                raise
            tell(str(error))
