"""Writes captures into one file of an export format. If the format has one timeline, the captures are aligned first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process, find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranks.join import find_clocks
from nsys_analyzer.analysis.ranks.matching import Clock
from nsys_analyzer.analysis.steps.groups import find_steps
from nsys_analyzer.analysis.steps.member import Member, record_members
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.errors import TraceError
from nsys_analyzer.export import load_formats
from nsys_analyzer.inputs.manifest import find_manifest
from nsys_analyzer.inputs.traces import find_traces
from nsys_analyzer.report.writing import OutputKind, check_target
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.sources import trace_stem
from nsys_analyzer.trace.trace import Trace


def default_target(path: Path, form: str) -> Path:
    """Returns the default output file of an export: in the working folder, and named after the capture or folder."""
    return Path(f"{trace_stem(Path(path.resolve().name))}{load_formats()[form].suffix}")


def export(
    paths: Sequence[Path], target: Path, form: str, names: PhaseNames | None = None, *, force: bool = False,
    tell: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Writes captures into one file, completely or not at all.

    Args:
        paths: captures, and folders of captures.
        target: the output file.
        form: the name of a format of ``load_formats()``.
        names: the range names of phases.
        force: whether to replace a file of another program.
        tell: called with a message for the user.

    Returns:
        The size of the file in bytes.

    Raises:
        NsysAnalyzerError: a capture cannot be read, or the file cannot be written.
    """
    export_format = load_formats()[form]

    def may_replace_file(path: Path) -> bool:
        """Returns whether a file is empty, or was written in this format."""
        return path.stat().st_size == 0 or export_format.is_ours(path)

    output = OutputKind(form, f"capture{export_format.suffix}", may_replace_file, export_format.suffix)
    # The target is checked before the captures are read, so that an unsuitable target fails at once.
    check_target(target, paths, force=force, output=output)
    captures: Sequence[Capture] = [Capture(path, names or PhaseNames()) for path in find_traces(paths)]
    if not captures:  # there are no captures if no run in the folder was profiled
        raise TraceError(f"{paths[0]} contains no trace", "Give a trace, or a folder with some")
    if export_format.on_one_clock:
        captures = align_captures(captures, tell)
    with atomic_write(target) as unfinished:
        export_format.write(captures, unfinished)
        # The target is checked again, because reading a .nsys-rep may have written its export to this path.
        check_target(target, paths, force=force, output=output)
    return target.stat().st_size


@dataclass(frozen=True)
class Capture:
    """A capture to be exported. It is read when it is written, so that only one capture is in memory at a time.

    Attributes:
        path: the trace.
        names: the range names of phases.
        clock: the conversion of the capture's times to the clock of the first capture.
        shift_ns: offset that is added to the converted times, so that no time is negative.
    """

    path: Path
    names: PhaseNames
    clock: Clock = Clock()  # noqa: RUF009 - ``Clock`` is frozen
    shift_ns: int = 0

    def read(self) -> AttributedTrace:
        """Reads the capture, and attributes its operations to ranges; raises the errors of ``Trace.load``."""
        return AttributedTrace(Trace.load(self.path), self.names)

    def to_common_clock(self, time_ns: Ints) -> Ints:
        """Converts times of the capture to the common clock."""
        aligned = self.clock.aligned(time_ns) if self.clock != Clock() else time_ns
        return aligned + self.shift_ns if self.shift_ns else aligned

    def start_ns(self, attributed: AttributedTrace) -> int:
        """Returns the start of the first operation, call, range or allocation on the common clock."""
        trace = attributed.trace
        tables = (trace.operations, trace.launches, trace.ranges, trace.operators, trace.memory)
        first_starts = [int(table.start.min()) for table in tables if table is not None and len(table)]
        return int(self.to_common_clock(np.array([min(first_starts, default=0)]))[0])

    def shifted(self, ns: int) -> Capture:
        """Returns the capture with times on the common clock that are later by ``ns``."""
        return replace(self, shift_ns=self.shift_ns + ns)

    def processes(self, attributed: AttributedTrace) -> tuple[Process, ...]:
        """Returns the capture's processes. A single process without a rank gets the rank in the capture's manifest."""
        processes = find_processes(attributed.trace)
        manifest = find_manifest(self.path) if len(processes) == 1 and processes[0].rank is None else None
        if manifest is None or manifest.rank is None:
            return processes
        return (replace(processes[0], rank=manifest.rank, label=f"rank {manifest.rank}"),)


def align_captures(captures: Sequence[Capture], tell: Callable[[str], None]) -> tuple[Capture, ...]:
    """Returns captures on a common clock, which is the clock of the first capture.

    The captures of one run are aligned by their collectives. Any other capture starts at its own time 0, and ``tell``
    is called with its name. If there are several captures, they are read here, and again when they are written.
    """
    if len(captures) < 2:
        return tuple(captures)
    members: list[Member] = []
    starts_ns: list[int] = []
    for capture in captures:
        attributed, key = capture.read(), str(capture.path)
        starts_ns.append(capture.start_ns(attributed))
        manifest = find_manifest(capture.path)
        for process in capture.processes(attributed):
            steps = find_steps(attributed, process.global_pid)
            if steps is None:
                continue
            work = ProcessWork(attributed, process.global_pid, steps.recorded)
            run = manifest.group if manifest and manifest.group else ""
            members += [replace(member, run=run) for member in record_members(work, process, steps, key)]
    clocks = find_clocks(members)
    aligned = [replace(capture, clock=clocks.get(str(capture.path), ("", Clock()))[1]) for capture in captures]
    starts_ns = [
        int(capture.to_common_clock(np.array([ns]))[0]) for capture, ns in zip(aligned, starts_ns, strict=True)
    ]
    aligned = [capture.shifted(-min(*starts_ns, 0)) for capture in aligned]
    unaligned_names = [capture.path.name for capture in captures if str(capture.path) not in clocks]
    if unaligned_names:
        tell(f"Not aligned by collectives, so each starts at its own time 0: {', '.join(unaligned_names)}")
    return tuple(aligned)
