"""Finds the captures a report is about, reads them, and keeps a row for those that failed."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec import structs

from nsys_analyzer.analysis.kernels.classes import given_classes, use_classes
from nsys_analyzer.analysis.kernels.own_classes import OwnClasses
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.member import BY_ORDER
from nsys_analyzer.analysis.steps.tracks import MOST_OPERATIONS
from nsys_analyzer.analysis.summary.complete import complete_captures, with_counted_flops
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration, configuration_from_name, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import DEBUG_VARIABLE, NsysAnalyzerError, TimingsError, TraceError
from nsys_analyzer.inputs.manifest import (
    TIMINGS,
    capture_name,
    configuration_of,
    find_manifest,
    manifests_beside,
    manifests_without_trace,
    name_by_manifest,
)
from nsys_analyzer.system.cluster import SEQUENTIAL, Workers
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.sources import (
    export_time_ns,
    is_capture,
    is_export_folder,
    is_export_of,
    is_report,
    trace_stem,
)
from nsys_analyzer.trace.trace import Trace

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.inputs.timings import Timings

Result = TypeVar("Result")
#: Reading one takes a quarter of a second, and 10 ms for each MB of its export: 44 captures of 0.1 to 6.5 MB, and one
#: of 270 MB with 1.2 million kernels; 0.2 GB of memory, and less than twice the export's bytes.
_SECONDS, _SECONDS_PER_BYTE = 0.25, 1e-8
_MEMORY_BYTES, _MEMORY_PER_BYTE = 200_000_000, 2
#: What is packed grows as it is read: JSON about fifteen times, a report of nsys about eight times as an export, a
#: table of Parquet about four times.
_GROWTH = {".gz": 15, ".nsys-rep": 8, ".qdrep": 8, ".parquet": 4}
#: How a file's name says its rank: `ddp_rank0` (as nsys writes %q{RANK}), `rank-1`, `ddp.rank2.profile`, `ddp_r3`.
_RANK = re.compile(r"(?<![^\W_])(?:rank|r)[\W_]?(\d{1,6})(?![^\W_])", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


class Inputs(NamedTuple):
    """Captures, one summary for each process, and the runs of several ranks among them."""

    captures: tuple[CaptureSummary, ...]
    runs: tuple[ParallelRun, ...]


@dataclass(frozen=True)
class _Capture:
    """A file that is to be read, and what is known of it: all that another process needs for it.

    ``alone`` says that there is no report without it, ``tracked`` of how many operations every moment is kept.
    """

    path: Path
    title: str
    names: PhaseNames
    classes: OwnClasses
    given: Run
    alone: bool
    tracked: int

    @property
    def seconds(self) -> float:
        return _SECONDS + self._bytes * _SECONDS_PER_BYTE

    @property
    def memory_bytes(self) -> int:
        return _MEMORY_BYTES + self._bytes * _MEMORY_PER_BYTE

    @property
    def _bytes(self) -> int:
        try:
            files = list(self.path.iterdir()) if self.path.is_dir() else [self.path]
            return sum(file.stat().st_size * _GROWTH.get(file.suffix, 1) for file in files)
        except OSError:  # it cannot be read either, and its row says so
            return 0


# --- which captures


def find_traces(paths: Iterable[Path], *, may_lack: bool = False) -> list[Path]:
    """Returns the trace files among files and folders (its own, and those one level below), each capture once.

    Raises:
        TraceError: a folder holds no trace, unless folders ``may_lack`` them.
    """
    traces: dict[Path, Path] = {}
    for path in paths:
        is_folder = path.is_dir() and not is_export_folder(path)
        inside = _traces_in(path) if is_folder else [path]
        if not inside and not may_lack and not manifests_without_trace(path):
            raise TraceError(f"{path} holds no trace", "Give a folder with .sqlite, .nsys-rep or .pt.trace.json files")
        for trace in inside:
            traces.setdefault(Path(os.path.realpath(trace)), trace)
    return list(traces.values())


def each_trace(path: Path, read_trace: Callable[[Path], Result], tell: Callable[[str], None]) -> Iterator[Result]:
    """Yields the result of ``read_trace`` for a trace or each trace of a folder; ``tell`` reports unreadable ones.

    Raises:
        NsysAnalyzerError: none could be read.
    """
    traces, failed = find_traces([path]), list[NsysAnalyzerError]()
    if not traces:  # a folder of runs that were not profiled
        raise TraceError(f"{path} holds no trace", "Give a trace, or a folder with some")
    for trace in traces:
        try:
            yield read_trace(trace)
        except NsysAnalyzerError as error:
            failed.append(error)
            if len(failed) == len(traces):
                raise
            tell(str(error))


def holds_captures(path: Path) -> bool:
    """Tells whether a path is a trace, or a folder that holds traces or manifests of runs."""
    return not path.is_dir() or is_export_folder(path) or bool(_traces_in(path) or manifests_without_trace(path))


def _traces_in(folder: Path) -> list[Path]:
    """Returns the captures in a folder and one level below.

    A trace and the exports made from it are one capture; where the trace is newer, it stands for all of them.
    """
    files = [path for files in _files_of(folder).values() if not isinstance(files, OSError) for path in files]
    exports: dict[Path, list[Path]] = defaultdict(list)
    for path in files:
        if path.suffix == ".sqlite" or path.is_dir():
            exports[path.with_name(trace_stem(path))].append(path)
    # Of several exports of one name, a folder of Parquet or Arrow files beside a SQLite file, the newest is read.
    replaced = {older for same in exports.values() for older in sorted(same, key=export_time_ns)[:-1]}
    for report in filter(is_report, files):
        of_report = exports[report.with_name(trace_stem(report))]
        replaced |= {report} if any(is_export_of(export, report) for export in of_report) else set(of_report)
    return [path for path in files if path not in replaced]


def _files_of(folder: Path) -> dict[Path, list[Path] | OSError]:
    """Returns the traces of a folder and of its subfolders, `rank2` before `rank10`, or why one cannot be read."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not is_export_folder(path))
    files: dict[Path, list[Path] | OSError] = {}
    for place in (folder, *sorted(path for path in inside if not path.name.startswith("."))):
        try:
            paths = sorted(place.iterdir(), key=lambda path: _DIGITS.sub(lambda number: number[0].zfill(20), path.name))
            files[place] = [
                path
                for path in paths
                if (is_export_folder(path) and not path.name.startswith("."))
                # A link that leads nowhere has a row that says so.
                or (is_capture(path) and (path.is_file() or (path.is_symlink() and not path.exists())))
            ]
        except OSError as error:
            if place == folder:
                raise
            files[place] = error
    return files


# --- all that is known of them


def load_captures(
    paths: Sequence[Path], names: PhaseNames | None = None, given: Run | None = None, timings: Timings | None = None,
    *, step_ms: float | None = None, in_order: bool = False, beside_others: bool = False, workers: Workers = SEQUENTIAL,
    with_tracks: bool = False,
) -> Inputs:  # fmt: skip
    """Returns a summary for each process of each capture, by model and context length, and the runs that they are of.

    A capture that cannot be read keeps a row with its error, unless there is nothing else to report: no other capture,
    no timings of the folder, no manifest that says how its run ended, nothing ``beside_others``.

    Args:
        paths: traces, and folders that hold them.
        names: the names of phases' ranges.
        given: model, context length, batch size and precision of the command line; they outrank a manifest.
        timings: of unprofiled runs.
        step_ms: the time of a step without the profiler in place of ``timings``, of one capture or one run's ranks.
        in_order: whether the captures are the ranks of one run, in the order of the paths.
        beside_others: whether the report has other contents.
        workers: where the captures are read; the summaries are the same.
        with_tracks: whether to keep every moment of the measured steps, for a timeline.

    Raises:
        NsysAnalyzerError: nothing could be read, or ``step_ms`` is given for several runs.
    """
    names, given = names or PhaseNames.parse(()), given or Run()
    folders = [path for path in paths if path.is_dir() and not is_export_folder(path)]
    unread, untraced = [], []
    for folder in folders:
        for place, files in _files_of(folder).items():
            if isinstance(files, OSError):
                error = TraceError(
                    f"{place} cannot be read ({files.strerror})", f"Make it readable: chmod u+rx {place}"
                )
                unread.append(_failed(place.name, place, str(error)))
        for path, run in manifests_without_trace(folder).items():
            if isinstance(run, NsysAnalyzerError):
                unread.append(_failed(name_by_manifest(path), path, str(run)))
            else:
                untraced.append(_without_trace(path, run))
    traces = find_traces(paths, may_lack=timings is not None or bool(unread))
    titles = _titles(traces)
    # A folder of runs is worth a report where timings alone were kept; a file that is named must be readable.
    must_read = not beside_others and (timings is None or not folders)
    alone = must_read and len(traces) == 1 and not unread
    tracked = MOST_OPERATIONS // max(len(traces), 1) if with_tracks else 0  # a page holds so many in all
    captures = [_Capture(trace, titles[trace], names, dict(given_classes), given, alone, tracked) for trace in traces]
    rows = unread + [row for read in workers.map(_read, captures) for row in read]
    if rows and must_read and all(row.metadata is None and row.run is None for row in rows):
        raise TraceError(f"None of {len(rows)} captures could be read; the first: {rows[0].message}")
    rows = _with_ranks(rows + untraced, [titles[trace] for trace in traces] if in_order else [])
    rows.sort(key=_order)
    if timings or step_ms:
        from nsys_analyzer.analysis.ranks.matching import group_members
        from nsys_analyzer.inputs.timed import with_timings
        from nsys_analyzer.inputs.timings import Timing, Timings

        places = {row.name for row in rows}
        joined = group_members([member for row in rows for member in row.members]) if len(places) > 1 else []
        one_run = len(places) <= 1 or [{member.capture for member in group} for group, _ in joined] == [places]
        if step_ms and not one_run:
            hint = "Give the times of each by --csv, in a table with the columns capture, phase and mean_ms"
            what = f"--step-ms is of one capture, or of the ranks of one run, and these are {len(places)} captures"
            raise TimingsError(what, hint)
        given_step = Timing("step", Stats(None, step_ms), "--step-ms")
        timings = timings if timings and not step_ms else Timings("--step-ms", (given_step,))
        rows = sorted(with_timings(rows, timings, one_run=one_run), key=_order)
    summaries = complete_captures(rows)  # all that findings and rates rest on is known now
    runs: tuple[ParallelRun, ...] = ()
    if any(row.members for row in rows):
        from nsys_analyzer.analysis.ranks.join import find_runs  # captures of one rank need none of it

        runs = find_runs(summaries)
    return Inputs(summaries, runs)


def timings_beside(
    paths: Sequence[Path],
    tell: Callable[[str], None],
    option: str = "--csv",
) -> Timings | None:
    """Reads the unprofiled times of captures, whichever of their files or folders these paths name.

    They stand in the ``timings.csv`` of the folder or of the one above, else in the captures' manifests. Rows of
    captures that were not asked for are left out. None where there are no times, or several tables.

    ``tell`` gets a line for the user on the file that is used, or left out, with the ``option`` that names others.
    """
    near = (_places_of_times(path) for path in paths)
    tables = [next((place / TIMINGS for place in places if os.path.isfile(place / TIMINGS)), None) for places in near]  # noqa: PTH113 - pathlib raises
    files = {Path(os.path.realpath(file)): file for file in tables if file}
    if len(files) > 1:
        tell(f"Several folders have a {TIMINGS}, and none is used: name one with {option}.")
        return None
    try:
        traces = find_traces((path for path in paths if path.exists()), may_lack=True)
        manifests = [] if files else [path for trace in traces for path in manifests_beside(trace)]
        if not files and not manifests:
            return None
        from nsys_analyzer.inputs.timings import Timings, of_manifest, read_timings

        names = set(_titles(traces).values())
        if manifests:
            timed = (row for path in dict.fromkeys(manifests) for row in of_manifest(path))
            rows = [row for row in timed if row.times and row.run.capture in names]
            return Timings("the manifest", tuple(rows), of_captures=True) if rows else None
        (file,) = files.values()
        if b"\n" not in file.read_bytes().strip():
            return None  # a header alone: programs may time nothing
        timings = read_timings(file)
        if file.parent not in paths:
            other_names = set(_titles(find_traces((file.parent,), may_lack=True)).values()) - names
            matching_rows = (row for row in timings.rows if row.run.capture not in other_names)
            matching_rows = (row for row in matching_rows if row.run.capture or row.model or not other_names)
            timings = replace(timings, rows=tuple(matching_rows), of_captures=True)
    except (NsysAnalyzerError, OSError) as error:
        tell(f"Left out, as it cannot be read: {error}")
        return None
    tell(f"Unprofiled times: {file}; {option} names others.")
    return timings if timings.rows else None


def _places_of_times(path: Path) -> tuple[Path, ...]:
    """Returns the folders whose table of times may be of the captures at a path, the nearest first."""
    folder = path if path.is_dir() and not is_export_folder(path) else path.parent
    return folder, Path(os.path.realpath(folder)).parent


def _failed(name: str, path: Path, message: str) -> CaptureSummary:
    return CaptureSummary(name, None, path.name, "failed", message, warnings=(message,))


def _without_trace(path: Path, run: Run) -> CaptureSummary:
    """Returns the row of a run that has left only a manifest."""
    status, message = ("not_profiled", None) if run.profiler == "none" else ("failed", "its trace is missing")
    name = name_by_manifest(path)
    return _with_run(CaptureSummary(name, None, path.name, status, message, configuration=configuration_of(run)), run)


def _titles(traces: Sequence[Path]) -> dict[Path, str]:
    """Returns the name of each capture: its file's, with its folder where several files have one name."""
    titles = {trace: _name(trace) for trace in traces}
    for longer in (lambda path: f"{Path(os.path.realpath(path)).parent.name}/{_name(path)}", str):
        times = Counter(titles.values())
        titles = {trace: title if times[title] == 1 else longer(trace) for trace, title in titles.items()}
    return titles


def _name(path: Path) -> str:
    stem = trace_stem(path)
    stem = stem if stem != path.name else path.name.removesuffix(path.suffix)
    return capture_name(stem, Path(os.path.realpath(path)).parent)


def _read(capture: _Capture) -> tuple[CaptureSummary, ...]:
    """Returns the rows of a capture."""
    path, given = capture.path, capture.given
    use_classes(capture.classes)  # of another process these are none
    configuration = _overridden(configuration_from_name(_name(path)), given)
    manifest = None
    try:
        if path.is_symlink() and not path.exists():
            raise TraceError(f"{path} is a link that leads nowhere", f"See where: readlink {path}")  # noqa: TRY301
        manifest = find_manifest(path) if path.exists() else None
        configuration = _overridden(configuration_of(manifest), given) if manifest else configuration
        trace = Trace.load(path)
        summaries = summarize(trace, capture.title, capture.names, configuration, tracked=capture.tracked)
        return tuple(_with_run(summary, manifest) for summary in summaries)
    except Exception as error:  # of a file that no test has thought of: the others have a report all the same
        is_ours = isinstance(error, NsysAnalyzerError)
        if capture.alone and (not is_ours or manifest is None or manifest.status == "ok"):
            raise
        if not is_ours and os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        failure = f"{path} cannot be read: {type(error).__name__}, {error}"
        message = (
            str(error)
            if is_ours
            else f"{failure}. Please report this, with the traceback that {DEBUG_VARIABLE}=1 shows"
        )
        unread = replace(_failed(capture.title, path, message), configuration=configuration)
        return (_with_run(unread, manifest),)


def _overridden(known: Configuration | None, given: Run) -> Configuration | None:
    """Returns the configuration with what was given in place of what was known.

    Raises:
        ConfigurationError: an unknown model.
    """
    stated: dict[str, Any] = {key: getattr(given, key) for key in ("context_length", "batch_size", "precision")}
    stated["model"] = None if given.model is None else find_model(given.model)
    stated = {key: value for key, value in stated.items() if value is not None}
    if not stated:
        return known
    # The model's source comes first: a model from a file name is believed only if the kernels agree.
    source = f"{known.source}, command line" if known and known.model and not given.model else "command line"
    return structs.replace(known or Configuration(), **stated, source=source)


def _with_run(summary: CaptureSummary, run: Run | None) -> CaptureSummary:
    """Returns the summary with what its manifest says, which outranks the trace."""
    if run is None:
        return summary
    peak = run.peak_memory_bytes
    summary = replace(summary, run=run, unprofiled=Unprofiled("missing", peak_memory_bytes=peak) if peak else None)
    rank = None if summary.process else run.rank
    if summary.rank is None and run.rank_pids and summary.pid in run.rank_pids:
        rank = run.rank_pids.index(summary.pid)
    summary = summary if rank is None else replace(summary, rank=rank, process=f"rank {rank}")
    members = tuple(
        replace(
            member, rank=member.rank if len(summary.members) > 1 else summary.rank,
            world_size=run.world_size or member.world_size, run=run.group or "",
        )
        for member in summary.members
    )  # fmt: skip
    summary = replace(summary, members=members)
    if run.not_annotated:
        warning = f"Not everything of this program could be annotated: {run.not_annotated}."
        summary = replace(summary, warnings=(*summary.warnings, warning))
    if run.flops:
        summary = with_counted_flops(summary, run.flops)
    if run.lines and summary.modules:
        modules = tuple(replace(one, line=run.lines.get(one.kind, "")) for one in summary.modules.modules)
        summary = replace(summary, modules=replace(summary.modules, modules=modules))
    return summary if run.status == "ok" else replace(summary, status=run.status, message=run.message)


def _with_ranks(rows: Sequence[CaptureSummary], order: Sequence[str]) -> list[CaptureSummary]:
    """Returns the captures with the ranks that the ``order`` of their names is, where it is given, else as names say.

    A name is believed of captures of one process with collectives whose rank nothing else tells, where several names
    are the same but for the number, and no two have one number.
    """
    processes = Counter(row.name for row in rows)
    single = {row.name: row for row in rows if processes[row.name] == 1 and len(row.members) == 1}
    ranks = {name: (order.index(name), "", BY_ORDER) for name in single if name in order}
    named: dict[str, dict[str, int]] = defaultdict(dict)
    for name, row in single.items() if not order else ():
        for match in list(_RANK.finditer(name))[-1:] if row.rank is None else ():
            named[name[: match.start(1)] + name[match.end(1) :]][name] = int(match[1])
    for rest, numbers in named.items():
        # `_r1` and `_r2` may be two runs, as well.
        is_rank = "rank" in rest.lower() or 0 in numbers.values()
        if is_rank and 1 < len(numbers) == len(set(numbers.values())):
            ranks |= {name: (number, rest, single[name].members[0].run) for name, number in numbers.items()}
    told = []
    for row in rows:
        if row.name in ranks:
            rank, rest, run = ranks[row.name]
            member = replace(row.members[0], rank=rank, name_without_rank=rest, run=run)
            row = replace(row, rank=rank, process=f"rank {rank}", members=(member,))
        told.append(row)
    return told


def _order(summary: CaptureSummary) -> tuple[object, ...]:
    configuration = summary.configuration or Configuration()
    model = configuration.model
    return (model is None, model.parameters if model else 0, configuration.context_length or 0, summary.name)
