"""The measured steps of a process as tracks over one axis of time, as a page draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nsys_analyzer.trace.arrays import Ints

#: Operations that a page shows; of longer captures as many steps around the median one as have about so many in all.
MOST_OPERATIONS = 1_000_000

Kind = Literal["ranges", "calls", "stream", "idle"]


@dataclass(frozen=True)
class Track:
    """The boxes of one thread, stream or device, in order of start.

    Attributes:
        title: what it is of, such as "GPU stream 7".
        kind: "ranges" lie inside each other, "calls" block or allocate, "stream" is the GPU's work, "idle" its gaps.
        start, duration: shape (boxes,), ns; the start since ``Tracks.origin_ns``.
        name: shape (boxes,), code into ``Tracks.names``; of idle time the range that the program was in.
        group: shape (boxes,), code into ``Tracks.groups``: the kernel class, or the cause of idle time.
        depth: shape (boxes,), how many ranges of the track lie around each.
    """

    title: str
    kind: Kind
    start: Ints
    duration: Ints
    name: Ints
    group: Ints
    depth: Ints


@dataclass(frozen=True)
class Stream(Track):
    """The GPU's work on one stream.

    Attributes:
        phase, module, path: shape (boxes,), codes into ``Tracks.phases``, ``Tracks.modules`` and ``Tracks.paths``: the
            phase and module that each belongs to, and the ranges around its launch; the first of each is empty.
        wait: shape (boxes,), from its launch to its start, ns; -1 where the launch is not known.
        thread: shape (boxes,), position among the tracks of the ranges of the thread that launched it, -1 for none.
    """

    phase: Ints
    module: Ints
    path: Ints
    wait: Ints
    thread: Ints


@dataclass(frozen=True)
class Tracks:
    """The tracks of one process of a capture.

    Attributes:
        origin_ns: the moment 0 of all tracks, on the capture's clock.
        duration_ns: from there to the end of the last step.
        global_pid: the process.
        steps: start and end of each measured step, ns since the origin.
        on_cpu: whether the streams hold operators that compute on the CPU, as of a program without a GPU.
        left_out: in words, which steps are not shown; empty where all are.
        names, groups, phases, modules, paths: the texts of the codes.
        memory: time in ns since the origin and bytes in use from then on; empty where that was not recorded.
    """

    origin_ns: int
    duration_ns: int
    global_pid: int
    steps: tuple[tuple[int, int], ...]
    on_cpu: bool
    left_out: str
    tracks: tuple[Track, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    paths: tuple[str, ...]
    memory: tuple[Ints, Ints]
