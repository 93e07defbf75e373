"""Reads captures with their manifests into summaries. A capture that cannot be read gets a row with the error."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.kernels.classes import use_classes, user_classes
from nsys_analyzer.analysis.kernels.own_classes import OwnClasses
from nsys_analyzer.analysis.steps.member import BY_ORDER
from nsys_analyzer.analysis.steps.tracks import MAX_OPERATIONS_OF_TRACKS
from nsys_analyzer.analysis.summary.complete import with_counted_flops
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import (
    Configuration,
    ConfigurationSource,
    configuration_from_name,
    find_model,
)
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import DEBUG_VARIABLE, NsysAnalyzerError, TraceError
from nsys_analyzer.inputs.manifest import (
    capture_name_of_manifest,
    configuration_of,
    find_manifest,
    find_untraced_manifests,
)
from nsys_analyzer.inputs.memory import add_memory
from nsys_analyzer.inputs.traces import find_titles, find_traces, is_folder, list_traces, name_of_trace
from nsys_analyzer.system.cluster import SEQUENTIAL, Workers
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.sources import estimate_size
from nsys_analyzer.trace.trace import Trace

#: The estimated time to read a capture, in seconds: a constant, and a time per byte in memory. They were measured with
#: 44 captures of 0.1 to 6.5 MB and one of 270 MB.
_READ_TIME_S, _READ_TIME_S_PER_BYTE = 0.25, 1e-8
#: The estimated memory to read a capture, in bytes: a constant, and a factor for its size in memory.
_READ_MEMORY_BYTES, _READ_MEMORY_PER_BYTE = 200_000_000, 2
#: Matches the rank in a file's name: `ddp_rank0` (as nsys writes %q{RANK}), `rank-1`, `ddp.rank2.profile`, `ddp_r3`.
_RANK_IN_NAME = re.compile(r"(?<![^\W_])(?:rank|r)[\W_]?(\d{1,6})(?![^\W_])", re.IGNORECASE)


def read_captures(
    paths: Sequence[Path], names: PhaseNames | None = None, overrides: Run | None = None,
    *, has_times: bool = False, in_order: bool = False, with_tracks: bool = False, workers: Workers = SEQUENTIAL,
) -> list[CaptureSummary]:  # fmt: skip
    """Reads captures and returns a summary of each process, in the order in which a report lists them.

    A capture that cannot be read gets a summary that contains the error. The error is raised instead if the report
    would have no other content: no other capture, no unprofiled times, and no manifest of a run that failed.

    Args:
        paths: traces, and folders of traces.
        names: the range names of phases.
        overrides: model, context length, batch size and precision from the command line.
        has_times: whether the report has unprofiled times.
        in_order: whether the captures are the ranks of one run, in the order of the paths.
        with_tracks: whether the summaries contain every operation of the measured steps, for a timeline.
        workers: the processes that read the captures.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    folders = [path for path in paths if is_folder(path)]
    unreadable_rows, untraced = [], []
    for folder in folders:
        for place, trace_files in list_traces(folder).items():
            if isinstance(trace_files, OSError):
                hint = f"Make it readable: chmod u+rx {place}"
                error = TraceError(f"{place} cannot be read ({trace_files.strerror})", hint)
                unreadable_rows.append(_make_failed_row(place.name, place, str(error)))
        for path, run in find_untraced_manifests(folder).items():
            name = capture_name_of_manifest(path)
            if isinstance(run, NsysAnalyzerError):
                unreadable_rows.append(_make_failed_row(name, path, str(run)))
                continue
            status, message = ("not_profiled", None) if run.profiler == "none" else ("failed", "its trace is missing")
            row = CaptureSummary(name, None, path.name, status, message, configuration=configuration_of(run))
            untraced.append(_add_manifest(row, run))
    traces = find_traces(paths, allow_none=has_times or bool(unreadable_rows))
    titles = find_titles(traces)
    # Unprofiled times suffice for a report, unless the user named a trace: then the trace must be readable.
    must_read = not (has_times and folders)
    is_only_input = must_read and len(traces) == 1 and not unreadable_rows
    # A page shows at most MAX_OPERATIONS_OF_TRACKS operations.
    max_operations = MAX_OPERATIONS_OF_TRACKS // max(len(traces), 1) if with_tracks else 0
    captures = [
        _CaptureToRead(
            trace,
            titles[trace],
            names or PhaseNames(),
            dict(user_classes),
            overrides or Run(),
            is_only_input,
            max_operations,
        )
        for trace in traces
    ]
    rows = unreadable_rows + [row for summaries in workers.map(_read_capture, captures) for row in summaries]
    if rows and must_read and all(row.metadata is None and row.run is None for row in rows):
        raise TraceError(f"None of {len(rows)} captures could be read; the first: {rows[0].message}")
    return sort_for_report(_add_ranks(rows + untraced, [titles[trace] for trace in traces] if in_order else []))


def sort_for_report(captures: Iterable[CaptureSummary]) -> list[CaptureSummary]:
    """Returns captures sorted by model size, context length and name."""

    def sort_key(capture: CaptureSummary) -> tuple[object, ...]:
        """Returns the key that orders captures by model and configuration."""
        configuration = capture.configuration or Configuration()
        model = configuration.model
        return (model is None, model.parameters if model else 0, configuration.context_length or 0, capture.name)

    return sorted(captures, key=sort_key)


def _make_failed_row(name: str, path: Path, message: str) -> CaptureSummary:
    return CaptureSummary(name, None, path.name, "failed", message, warnings=(Fact("unreadable", error=message),))


# --- one capture


@dataclass(frozen=True)
class _CaptureToRead:
    """A capture to read, with everything that a worker process needs to read it.

    Attributes:
        path: the trace.
        title: the name of the capture in tables.
        names: the range names of phases.
        classes: the user's kernel classes.
        overrides: the configuration from the command line.
        is_only_input: whether the report has no other content, so that an error is raised.
        max_operations: the approximate number of operations to keep for a timeline.
    """

    path: Path
    title: str
    names: PhaseNames
    classes: OwnClasses
    overrides: Run
    is_only_input: bool
    max_operations: int

    @property
    def seconds(self) -> float:
        """Returns the estimated time to read the capture, in seconds."""
        return _READ_TIME_S + self._estimated_bytes * _READ_TIME_S_PER_BYTE

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory to read the capture, in bytes."""
        return _READ_MEMORY_BYTES + self._estimated_bytes * _READ_MEMORY_PER_BYTE

    @property
    def _estimated_bytes(self) -> int:
        try:
            return estimate_size(self.path)
        except OSError:  # reading the file will fail, too, and the row of the capture will contain that error
            return 0


def _read_capture(capture: _CaptureToRead) -> tuple[CaptureSummary, ...]:
    """Returns the summaries of a capture: one for each process, or a single one that contains the error."""
    path, overrides = capture.path, capture.overrides
    use_classes(capture.classes)  # loads the user's kernel classes in a worker process
    configuration = _override_configuration(configuration_from_name(name_of_trace(path)), overrides)
    manifest = None
    try:
        if path.is_symlink() and not path.exists():
            raise TraceError(f"{path} is a broken link", f"See where it leads: readlink {path}")  # noqa: TRY301
        manifest = find_manifest(path) if path.exists() else None
        configuration = _override_configuration(configuration_of(manifest), overrides) if manifest else configuration
        trace = Trace.load(path)
        summaries = summarize(trace, capture.title, capture.names, configuration, tracked=capture.max_operations)
        return add_memory(tuple(_add_manifest(summary, manifest) for summary in summaries), path)
    except Exception as error:  # a file that the reader fails on must not prevent the report of other files
        is_expected = isinstance(error, NsysAnalyzerError)
        if capture.is_only_input and (not is_expected or manifest is None or manifest.status == "ok"):
            raise
        if not is_expected and os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        message = (
            str(error)
            if is_expected
            else (
                f"{path} cannot be read: {type(error).__name__}, {error}. "
                f"Please report this with the traceback that {DEBUG_VARIABLE}=1 shows"
            )
        )
        row = replace(_make_failed_row(capture.title, path, message), configuration=configuration)
        return (_add_manifest(row, manifest),)


def _override_configuration(configuration: Configuration | None, overrides: Run) -> Configuration | None:
    """Returns a capture's configuration, in which values from the command line replace other values.

    Raises:
        ConfigurationError: an unknown model.
    """
    values: dict[str, Any] = {key: getattr(overrides, key) for key in ("context_length", "batch_size", "precision")}
    values["model"] = None if overrides.model is None else find_model(overrides.model)
    values = {key: value for key, value in values.items() if value is not None}
    if not values:
        return configuration
    source: ConfigurationSource = "command line"
    if configuration and configuration.model and not overrides.model:
        source = "file name, command line" if configuration.source == "file name" else "manifest, command line"
    return structs.replace(configuration or Configuration(), **values, source=source)


def _add_manifest(summary: CaptureSummary, run: Run | None) -> CaptureSummary:
    """Returns a summary with the facts of its manifest. Facts of the manifest take precedence over the trace."""
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
        summary = replace(summary, warnings=(*summary.warnings, Fact("not_annotated", parts=run.not_annotated)))
    if run.flops:
        summary = with_counted_flops(summary, run.flops)
    if run.lines and summary.modules:
        modules = tuple(replace(module, line=run.lines.get(module.kind, "")) for module in summary.modules.modules)
        summary = replace(summary, modules=replace(summary.modules, modules=modules))
    return summary if run.status == "ok" else replace(summary, status=run.status, message=run.message)


# --- ranks


def _add_ranks(rows: Sequence[CaptureSummary], order: Sequence[str]) -> list[CaptureSummary]:
    """Returns the captures with their ranks. A rank is the name's position in ``order``, or else a part of the name.

    A rank in a name is used only if the capture has a single process with collectives, the rank of this process is not
    known from the capture, and several captures have names that differ only in the rank.
    """
    processes = Counter(row.name for row in rows)
    candidates = {row.name: row for row in rows if processes[row.name] == 1 and len(row.members) == 1}
    #: By capture name: the rank, the name without the rank, and the run that the capture belongs to.
    ranks = {name: (order.index(name), "", BY_ORDER) for name in candidates if name in order}
    names_by_rest: dict[str, dict[str, int]] = defaultdict(dict)
    for name, row in candidates.items() if not order else ():
        for match in list(_RANK_IN_NAME.finditer(name))[-1:] if row.rank is None else ():
            names_by_rest[name[: match.start(1)] + name[match.end(1) :]][name] = int(match[1])
    for name_without_rank, numbers in names_by_rest.items():
        # `_r1` and `_r2` may also mean the first and the second run. They are ranks only if there is an `_r0`.
        is_rank = "rank" in name_without_rank.lower() or 0 in numbers.values()
        if is_rank and 1 < len(numbers) == len(set(numbers.values())):
            ranks |= {
                name: (number, name_without_rank, candidates[name].members[0].run) for name, number in numbers.items()
            }
    captures_with_rank = []
    for row in rows:
        if row.name in ranks:
            rank, name_without_rank, run = ranks[row.name]
            member = replace(row.members[0], rank=rank, name_without_rank=name_without_rank, run=run)
            row = replace(row, rank=rank, process=f"rank {rank}", members=(member,))
        captures_with_rank.append(row)
    return captures_with_rank
