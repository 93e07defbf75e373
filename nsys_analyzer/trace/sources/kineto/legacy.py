"""Events of PyTorch's autograd profiler as it was before Kineto (``torch.autograd.profiler``, PyTorch 1.7).

It wrote a bare array without categories: an event's process is "CPU functions" or "CUDA functions". On the GPU are no
kernels but operators, timed by CUDA events around each; an arrow leads there from the operator on the CPU. Later
versions write the CPU's side and the arrows alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from nsys_analyzer.trace.sources.kineto.events import Call, Event, GpuOperation, Name
from nsys_analyzer.trace.sources.kineto.operators import longest, own_stretches

ARROW = "arrow"
"""The kind of the two ends of an arrow from an operator to what it did on the GPU."""

LEGACY_ON_GPU = "operator on the GPU"
"""The kind of an operator as it was timed on the GPU."""

LEGACY_ON_CPU = "operator on the CPU"
"""The kind of an operator, or a range, as it was timed on the CPU."""

_KINDS = {"cpu functions": LEGACY_ON_CPU, "cuda functions": LEGACY_ON_GPU}
_ARROWS = "cpu_to_"  # "cpu_to_cuda"
_BACKWARD = re.compile(r"Backward\d*$")

_TIMED_BY_EVENTS = (
    "The autograd profiler of PyTorch before 1.8 records no kernels: each one here is an operator, by the time between "
    "CUDA events around it without the operators it calls, which is more than its kernels take where the GPU waits"
)
_WITHOUT_GPU = (
    "The operators launched work on a GPU, and the autograd profiler recorded none of it: the times are those of the "
    "CPU. Record with torch.profiler"
)


def legacy_kind(process: Any) -> str | None:
    """The kind of an event without a category, by the process it names; None for another tool's."""
    return _KINDS.get(process.lower()) if isinstance(process, str) else None


def is_arrow(phase: str, category: str | None) -> bool:
    """Whether an event is one end of an arrow from the CPU to the GPU."""
    return phase in ("s", "f") and category is not None and category.startswith(_ARROWS)


def sort_legacy(events: dict[str, list[Any]]) -> tuple[str, ...]:
    """Sorts the events of this profiler into operators or ranges, kernels and launches, in place; returns warnings."""
    functions, spans, arrows = (events.pop(kind, []) for kind in (LEGACY_ON_CPU, LEGACY_ON_GPU, ARROW))
    names = {event.name for event in functions}
    for event in functions:
        is_operator = "::" in event.name or f"aten::{event.name}" in names or _BACKWARD.search(event.name)
        event.kind = "operator" if is_operator else "range"
        events[event.kind].append(event)
    if not spans:
        return (_WITHOUT_GPU,) if functions and arrows else ()
    events["kernel"] = list(_kernels(spans, arrows))
    events["runtime"] = [event for event in arrows if legacy_kind(event.pid) == LEGACY_ON_CPU]
    return (_TIMED_BY_EVENTS,)


def _kernels(spans: list[Event], arrows: list[Call]) -> Iterator[GpuOperation]:
    """The spans as kernels, each with the number of the arrow that ends where it starts."""
    ends: dict[tuple[str, Name, int], list[int]] = defaultdict(list)
    for arrow in reversed(arrows):
        if legacy_kind(arrow.pid) == LEGACY_ON_GPU:
            ends[arrow.name, arrow.tid, arrow.start].append(arrow.correlation)
    for span, free in chain.from_iterable(own_stretches(spans)):
        correlations = ends[span.name, span.tid, span.start]
        correlation = correlations.pop() if correlations else 0
        run = longest(span, free)
        yield GpuOperation("kernel", span.name, span.pid, span.tid, *run, correlation, device=int(span.tid))
