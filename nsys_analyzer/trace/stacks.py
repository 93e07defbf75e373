"""Reads the Python stacks that the capture hooks sampled, from the files beside a capture."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.system.atomic_write import check_regular
from nsys_analyzer.trace.arrays import Bools, Ints, mask_by_name
from nsys_analyzer.trace.columns import Ranges, process_of
from nsys_analyzer.trace.sources import find_files_beside

STACKS_SUFFIX = ".stacks.gz"
#: Matches the name of a clock range, by which the capture hooks record the process ID and the monotonic clock (ns) at
#: the start of the range.
CLOCK_RANGE = re.compile(r"nsys-analyze clock (\d{1,10}) (\d{1,18})")

#: The capture hooks write clock ranges in bursts. Successive ranges belong to one burst if at most this time is between
#: their starts.
_MAX_GAP_IN_BURST_NS = 10_000_000


class StackFrame(NamedTuple):
    """A frame of a Python stack: the file relative to the program's working folder, the line, and the function."""

    file: str
    line: int
    function: str


class _StacksFile(msgspec.Struct):
    """The content of a stacks file: the samples of one process.

    Times are ns of the monotonic clock. Each of ``stacks`` lists positions in ``frames``, innermost first. ``pid`` is
    the program's process ID, also if the samples are from a data loader process (``loads``).
    """

    pid: int
    loads: bool
    period_ns: int
    asked_ns: list[int]
    taken_ns: list[int]
    stack: list[int]
    stacks: list[list[int]]
    frames: list[StackFrame]
    source: dict[str, dict[int, str]]


@dataclass(frozen=True)
class Stacks:
    """Samples of the stack of a process's main thread.

    Attributes:
        requested, sampled: times of the request and of the sample, shape (samples,), ns of the capture's clock. A
            sample is late if the program holds Python's global lock (GIL). It then shows what the program did since
            the request.
        period_ns: time between two samples.
        stack: shape (samples,), index into ``stacks``.
        stacks: lines of the program's own code, innermost first.
        source: lines of the program's files, by file and line number.
        loader: samples of the data loader processes of this process, one process after the other.
    """

    requested: Ints
    sampled: Ints
    period_ns: int
    stack: Ints
    stacks: tuple[tuple[StackFrame, ...], ...]
    source: Mapping[str, Mapping[int, str]]
    loader: Stacks | None = None

    def append(self, later: Stacks | None) -> Stacks:
        """Returns these samples, followed by the samples of other stacks."""
        if later is None:
            return self
        requested, sampled = np.append(self.requested, later.requested), np.append(self.sampled, later.sampled)
        stack = np.append(self.stack, later.stack + len(self.stacks))
        source = {
            **self.source,
            **{file: {**self.source.get(file, {}), **lines} for file, lines in later.source.items()},
        }
        return Stacks(requested, sampled, self.period_ns, stack, (*self.stacks, *later.stacks), source)


def find_stack_files(capture: Path) -> list[Path]:
    """Returns the stacks files of a capture, including the files of its ranks and of their data loader processes."""
    return find_files_beside(capture, rf"(_rank\d+)?(_loader\d+)?{re.escape(STACKS_SUFFIX)}")


def find_clock_ranges(ranges: Ranges) -> Bools:
    """Returns the mask of the clock ranges (see ``CLOCK_RANGE``), shape (ranges,)."""
    return mask_by_name(ranges, CLOCK_RANGE.fullmatch)


def read_stacks(capture: Path, clocks: Ranges) -> dict[int, Stacks]:
    """Returns the stacks of each process of a capture by global process ID, from the files beside the capture.

    Args:
        capture: the capture.
        clocks: the ranges that :func:`find_clock_ranges` marks.

    Raises:
        NsysAnalyzerError: a file is damaged or not a regular file.
    """
    matches = [CLOCK_RANGE.fullmatch(clocks.names[name]) for name in clocks.name.tolist()]
    pid_and_clock = np.array([(int(match[1]), int(match[2])) for match in matches if match], np.int64).reshape(-1, 2)
    stacks_of, data_loader_stacks_of = dict[int, Stacks](), dict[int, Stacks]()
    for path in find_stack_files(capture) if len(pid_and_clock) else ():
        check_regular(path, "Remove it. The report then shows no source lines")
        try:
            file = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=_StacksFile)
            stacks = tuple(tuple(file.frames[index] for index in stack) for stack in file.stacks)
            samples = np.array([file.asked_ns, file.taken_ns, file.stack], np.int64)
        except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
            raise TraceError(
                f"{path} cannot be read ({error})", "Remove it. The report then shows no source lines"
            ) from error
        indices = np.flatnonzero(pid_and_clock[:, 0] == file.pid)
        if len(indices):
            indices = indices[np.argsort(pid_and_clock[indices, 1])]
            clock = pid_and_clock[indices, 1]
            burst = np.flatnonzero(np.diff(clock, prepend=clock[0] - 2 * _MAX_GAP_IN_BURST_NS) > _MAX_GAP_IN_BURST_NS)
            # The capture's clock and the monotonic clock drift in a long run. So the offset between them is computed
            # for each burst, from the range that starts soonest after the hooks read the monotonic clock.
            offset = np.minimum.reduceat(clocks.start[indices] - clock, burst)
            drift = np.interp(samples[:2] - clock[0], clock[burst] - clock[0], offset - offset[0])
            requested, sampled = samples[:2] + offset[0] + drift.astype(np.int64)
            process = int(process_of(clocks.thread[indices[0]]))
            process_stacks = Stacks(requested, sampled, file.period_ns, samples[2], stacks, file.source)
            if file.loads:
                data_loader_stacks_of[process] = process_stacks.append(data_loader_stacks_of.get(process))
            else:
                stacks_of[process] = process_stacks
    return {
        process: replace(stacks, loader=data_loader_stacks_of.get(process)) for process, stacks in stacks_of.items()
    }
