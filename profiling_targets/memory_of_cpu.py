"""Records the memory of one step on the CPU, from the memory events of ``torch.profiler``.

A mode around every operator marks the line that called it, so that an event can be told its line by time; in backward
no line calls, and the name of autograd's node stands in. Marks and profiler slow the step down: nothing is timed here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from profiling_targets.harness import Phases
from profiling_targets.memory_recording import Frame, Recording, Source, source_of
from profiling_targets.memory_timeline import MemoryEvent, Span

_PHASE, _LINE, _NODE = "memory phase: ", "memory line: ", "autograd::engine::evaluate_function: "
#: Backward has no lines to mark, and could not reuse memory that a mode holds on to.
_MARKED = ("forward", "loss", "optimizer")

Interval = tuple[float, float, str]
"""Start and end in µs, and a name."""


def record(phases: Phases, living: Callable[[], Iterable[Tensor]]) -> Recording:
    """Records one step.

    Args:
        phases: the phases of a step, which must have run before.
        living: all tensors that outlive a step.

    """
    marks = _Marks()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for phase in phases.values():  # the profiler sees no free of what it did not see allocated
            phase()
        storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in living())}
        for name, phase in phases.items():
            with record_function(_PHASE + name), marks if name in _MARKED else nullcontext():
                phase()
    return _reduced(_exported(profiler), marks.sources, sum(storages.values()))


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts a range around each operator; its name is the number of the line that called it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: list[Source] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = source_of(_frames())
        if source not in self.sources:
            self.sources.append(source)
        with record_function(f"{_LINE}{self.sources.index(source)}"):
            return func(*args, **(kwargs or {}))


def _frames() -> Iterator[Frame]:
    frame = sys._getframe(1)
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _exported(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def _reduced(trace: Sequence[dict[str, Any]], sources: Sequence[Source], base_bytes: int) -> Recording:
    """The recording, from the events of a trace in order."""
    phases, lines, nodes = (list(_intervals(trace, prefix)) for prefix in (_PHASE, _LINE, _NODE))
    begin = phases[0][0]
    events = []
    for event in trace:
        if event["name"] == "[memory]" and begin <= event["ts"] <= phases[-1][1]:
            number, node = _around(lines, event["ts"]), _around(nodes, event["ts"])
            source = sources[int(number)] if number else Source(node or "")
            ms, values = (event["ts"] - begin) / 1e3, event["args"]
            events.append(
                MemoryEvent(ms, values["Bytes"], values["Addr"], source.line, source.in_block, source.is_residual)
            )
    spans = [Span(name, (start - begin) / 1e3, (end - begin) / 1e3) for start, end, name in phases]
    return Recording(events, spans, base_bytes)


def _intervals(trace: Sequence[dict[str, Any]], prefix: str) -> Iterator[Interval]:
    for event in trace:
        if event.get("ph") == "X" and event["name"].startswith(prefix):
            yield event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(prefix)


def _around(intervals: Sequence[Interval], ts: float) -> str | None:
    """The name of the interval that holds a moment; none of them lies in another."""
    index = bisect_right(intervals, ts, key=lambda interval: interval[0]) - 1
    return intervals[index][2] if index >= 0 and ts <= intervals[index][1] else None
