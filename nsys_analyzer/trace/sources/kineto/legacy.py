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

import numpy as np

from nsys_analyzer.trace.sources.kineto.events import (
    CALL,
    COLUMNS,
    EVENT,
    GPU_OPERATION,
    OPERATOR,
    Name,
    Place,
    Rows,
    with_columns,
)
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


def sort_legacy(events: dict[str, Rows], texts: list[str], places: list[Place]) -> tuple[str, ...]:
    """Sorts the events of this profiler into operators or ranges, kernels and launches, in place; returns warnings."""
    functions, spans, arrows = (
        events.pop(kind, np.empty(0, columns))
        for kind, columns in ((LEGACY_ON_CPU, OPERATOR), (LEGACY_ON_GPU, EVENT), (ARROW, CALL))
    )
    names = {texts[number]: number for number in np.unique(functions["name"])}
    operators = [
        number for name, number in names.items() if "::" in name or f"aten::{name}" in names or _BACKWARD.search(name)
    ]
    is_operator = np.isin(functions["name"], operators)
    for kind, rows in (("operator", functions[is_operator]), ("range", functions[~is_operator])):
        if len(rows):
            columns = COLUMNS.get(kind, EVENT)
            events[kind] = np.concatenate([events.get(kind, np.empty(0, columns)), with_columns(rows, columns)])
    if not len(spans):
        return (_WITHOUT_GPU,) if len(functions) and len(arrows) else ()
    from_cpu, on_gpu = (
        arrows[np.isin(arrows["place"], [n for n, (pid, _) in enumerate(places) if legacy_kind(pid) == side])]
        for side in (LEGACY_ON_CPU, LEGACY_ON_GPU)
    )
    events["kernel"] = np.array(list(_kernels(spans, on_gpu, texts, places)), GPU_OPERATION)
    events["runtime"] = from_cpu
    return (_TIMED_BY_EVENTS,)


def _kernels(spans: Rows, arrows: Rows, texts: list[str], places: list[Place]) -> Iterator[tuple[int, ...]]:
    """The spans as kernels, each with the number of the arrow that ends where it starts."""
    ends: dict[tuple[int, Name, int], list[int]] = defaultdict(list)
    for name, place, start, _, correlation in reversed(arrows.tolist()):
        ends[name, places[place][1], start].append(correlation)
    for (name, place, start, _), free in chain.from_iterable(own_stretches(spans, texts)):
        device = places[place][1]
        correlations = ends[name, device, start]
        correlation = correlations.pop() if correlations else 0
        yield name, place, *longest(start, free), correlation, int(device), 0, 0, 0
