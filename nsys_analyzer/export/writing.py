"""Writes captures into a file of one of the formats: read one after another, each where it lies on a common clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process, find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.analysis.ranks.join import find_clocks
from nsys_analyzer.analysis.ranks.matching import Clock
from nsys_analyzer.analysis.steps.member import Member, record_members
from nsys_analyzer.analysis.steps.windows import find_steps
from nsys_analyzer.errors import TraceError
from nsys_analyzer.export import formats
from nsys_analyzer.inputs.captures import find_traces
from nsys_analyzer.inputs.manifest import find_manifest
from nsys_analyzer.report.writing import OutputKind, check_target
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.sources import trace_stem
from nsys_analyzer.trace.trace import Trace


def default_name(path: Path, form: str) -> Path:
    """Returns the file in the working folder that a capture, or a folder of captures, is exported to."""
    return Path(f"{trace_stem(Path(path.resolve().name))}{formats()[form].suffix}")


def export(
    paths: Sequence[Path], target: Path, form: str, names: PhaseNames | None = None, *, force: bool = False,
    tell: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Writes captures, and those of folders, into one file, whole or not at all; returns its size in bytes.

    Args:
        paths: the captures.
        target: the file.
        form: one of ``formats()``.
        names: the names of phases' ranges.
        force: whether to replace a file that was not written here.
        tell: takes a line for the user.

    Raises:
        NsysAnalyzerError: a capture cannot be read, or the file cannot be written.
    """
    chosen = formats()[form]

    def is_ours(path: Path) -> bool:
        return path.stat().st_size == 0 or chosen.is_ours(path)

    output = OutputKind(form, f"capture{chosen.suffix}", is_ours, chosen.suffix)
    # Before the captures are read: a long wait should not end in a typing error.
    check_target(target, paths, force=force, output=output)
    captures: Sequence[Capture] = [Capture(path, names or PhaseNames()) for path in find_traces(paths)]
    if not captures:  # a folder of runs that were not profiled
        raise TraceError(f"{paths[0]} holds no trace", "Give a trace, or a folder with some")
    if chosen.on_one_clock:
        captures = on_one_clock(captures, tell)
    with atomic_write(target) as unfinished:
        chosen.write(captures, unfinished)
        check_target(target, paths, force=force, output=output)  # reading has made exports
    return target.stat().st_size


@dataclass(frozen=True)
class Capture:
    """A capture, to be read when its turn comes: of several long ones only one is in the memory.

    Attributes:
        clock, begun_ns: what takes its times to the clock that all captures share.
    """

    path: Path
    names: PhaseNames
    clock: Clock = Clock()  # noqa: RUF009 - it is frozen
    begun_ns: int = 0

    def first_ns(self, attributed: AttributedTrace) -> int:
        """Returns when it begins on the clock that all share: its first operation, call, range or allocation."""
        trace = attributed.trace
        columns = (trace.operations, trace.launches, trace.ranges, trace.operators, trace.memory)
        starts = [int(one.start.min()) for one in columns if one is not None and len(one)]
        return int(self.shared(np.array([min(starts, default=0)]))[0])

    def read(self) -> AttributedTrace:
        """Reads the capture, with the ranges of its operations; raises what ``Trace.load`` does."""
        return AttributedTrace(Trace.load(self.path), self.names)

    def shared(self, time: Ints) -> Ints:
        """Times of the capture on the clock that all share."""
        aligned = self.clock.aligned(time) if self.clock != Clock() else time
        return aligned + self.begun_ns if self.begun_ns else aligned

    def later_by(self, ns: int) -> Capture:
        """Returns the capture at a later time on the clock that all share."""
        return replace(self, begun_ns=self.begun_ns + ns)

    def processes(self, attributed: AttributedTrace) -> tuple[Process, ...]:
        """Returns the processes, a single one with the rank that the manifest beside the capture says."""
        found = find_processes(attributed.trace)
        manifest = find_manifest(self.path) if len(found) == 1 and found[0].rank is None else None
        if manifest is None or manifest.rank is None:
            return found
        return (replace(found[0], rank=manifest.rank, label=f"rank {manifest.rank}"),)


def on_one_clock(captures: Sequence[Capture], tell: Callable[[str], None]) -> tuple[Capture, ...]:
    """Puts captures on the clock that they share: that of the first one.

    Of several, each is read here, and again when it is written. Collectives align the captures of one run. Others each
    begin at their own 0; ``tell`` gets a line on that. No time is below 0.
    """
    if len(captures) < 2:
        return tuple(captures)
    members: list[Member] = []
    first_ns: list[int] = []
    for capture in captures:
        attributed, key = capture.read(), str(capture.path)
        first_ns.append(capture.first_ns(attributed))
        manifest = find_manifest(capture.path)
        for process in capture.processes(attributed):
            steps = find_steps(attributed, process.global_pid)
            for member in record_members(attributed, process, steps, key) if steps else ():
                run = manifest.group if manifest and manifest.group else ""
                members.append(replace(member, run=run))
    clocks = find_clocks(members)
    placed = [replace(one, clock=clocks.get(str(one.path), ("", Clock()))[1]) for one in captures]
    begins = [int(one.shared(np.array([ns]))[0]) for one, ns in zip(placed, first_ns, strict=True)]
    placed = [one.later_by(-min(*begins, 0)) for one in placed]
    apart = [capture.path.name for capture in captures if str(capture.path) not in clocks]
    if apart:
        tell(f"Not aligned by collectives, each begins at its own 0: {', '.join(apart)}")
    return tuple(placed)
