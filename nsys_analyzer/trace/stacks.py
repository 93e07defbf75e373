"""The stacks that our hooks sampled while a program was recorded, from the file beside its capture."""

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
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import Ranges, process_of
from nsys_analyzer.trace.sources import trace_stem

STACKS_SUFFIX = ".stacks.gz"
#: A range of our hooks: the ID of its process, and the monotonic clock when it began.
CLOCK_RANGE = re.compile(r"nsys-analyze clock (\d{1,10}) (\d{1,18})")

#: Those of one row are nearer to each other than this.
_ROW_NS = 10_000_000


class StackFrame(NamedTuple):
    """A line of the program: its file, as seen from the folder that the program ran in, and its function."""

    file: str
    line: int
    function: str


class _File(msgspec.Struct):
    """The samples of one process: times in ns of the monotonic clock, frames by their places, innermost first.

    ``pid`` is that of the program's process, also where this one ``loads`` data for it.
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
    """The stack of a process's main thread at many moments.

    Attributes:
        asked, taken: shape (samples,), ns of the capture's clock: a sample is as old as the moment it was asked for
            where the program held Python's lock until it was taken.
        period_ns: from one sample to the next.
        stack: shape (samples,), index into ``stacks``: the lines of the program's own, the innermost first.
        source: lines of its files by their numbers.
        loader: those of a process that loads its data, one after the other where several did.
    """

    asked: Ints
    taken: Ints
    period_ns: int
    stack: Ints
    stacks: tuple[tuple[StackFrame, ...], ...]
    source: Mapping[str, Mapping[int, str]]
    loader: Stacks | None = None

    def followed_by(self, other: Stacks | None) -> Stacks:
        """Returns these and later ones."""
        if other is None:
            return self
        asked, taken = np.append(self.asked, other.asked), np.append(self.taken, other.taken)
        stack = np.append(self.stack, other.stack + len(self.stacks))
        source = {file: {**self.source.get(file, {}), **lines} for file, lines in other.source.items()}
        return Stacks(asked, taken, self.period_ns, stack, (*self.stacks, *other.stacks), {**self.source, **source})


def find_stack_files(capture: Path) -> list[Path]:
    """Returns the files of stacks that belong to a capture: its own, or those of its ranks, and of their loaders."""
    stem = trace_stem(capture)
    names = re.compile(rf"{re.escape(stem)}(_rank\d+)?(_loader\d+)?{re.escape(STACKS_SUFFIX)}")
    return sorted(path for path in capture.parent.iterdir() if names.fullmatch(path.name))


def mark_clock_ranges(ranges: Ranges) -> Bools:
    """Marks the ranges that only say what the clock was."""
    named: Bools = np.array([*(CLOCK_RANGE.fullmatch(name) is not None for name in ranges.names), False])[ranges.name]
    return named


def read_stacks(capture: Path, clocks: Ranges) -> dict[int, Stacks]:
    """Returns the stacks of each process of a capture, by its global ID, from the files beside it.

    Args:
        capture: the capture.
        clocks: the ranges of :func:`are_clocks`.

    Raises:
        NsysAnalyzerError: a file is damaged, or it is no regular file.
    """
    said = [CLOCK_RANGE.fullmatch(clocks.names[name]) for name in clocks.name.tolist()]
    own = np.array([(int(match[1]), int(match[2])) for match in said if match], np.int64).reshape(-1, 2)
    found, loaders = dict[int, Stacks](), dict[int, Stacks]()
    for path in find_stack_files(capture) if len(own) else ():
        check_regular(path, "Remove it: the report then names no lines")
        try:
            file = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=_File)
            stacks = tuple(tuple(file.frames[place] for place in stack) for stack in file.stacks)
            samples = np.array([file.asked_ns, file.taken_ns, file.stack], np.int64)
        except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
            raise TraceError(f"{path} cannot be read ({error})", "Remove it: the report then names no lines") from error
        mine = np.flatnonzero(own[:, 0] == file.pid)
        if len(mine):
            mine = mine[np.argsort(own[mine, 1])]
            clock = own[mine, 1]
            row = np.flatnonzero(np.diff(clock, prepend=clock[0] - 2 * _ROW_NS) > _ROW_NS)
            # The shortest way from the clock to the range is the best. The clocks drift apart in a long run.
            ahead = np.minimum.reduceat(clocks.start[mine] - clock, row)
            drift = np.interp(samples[:2] - clock[0], clock[row] - clock[0], ahead - ahead[0])
            asked, taken = samples[:2] + ahead[0] + drift.astype(np.int64)
            process = int(process_of(clocks.thread[mine[0]]))
            one = Stacks(asked, taken, file.period_ns, samples[2], stacks, file.source)
            if file.loads:
                loaders[process] = one.followed_by(loaders.get(process))
            else:
                found[process] = one
    return {process: replace(one, loader=loaders.get(process)) for process, one in found.items()}
