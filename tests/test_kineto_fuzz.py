"""Whatever stands in an event or a property of a PyTorch profiler's trace: it is converted, or refused in one line,
and what the other events say is not changed.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.errors import NsysAnalyzerError
from tests.conftest import DATA
from tests.support.kineto import AUTOGRAD, Kineto, tables_of

ANCHOR = "anchor"

OF_THE_CPU = ("TORCH_OPERATOR_EVENTS", "NVTX_EVENTS")
#: The tables in which each row is one event's.
OF_EVENTS = (
    *OF_THE_CPU, "CUDA_GPU_MEMORY_USAGE_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
)  # fmt: skip
#: Columns in which other events have a say: a process or thread that no number stands for gets the next that is free.
OF_OTHERS = {"globalTid", "globalPid"}


@dataclass(frozen=True)
class Base:
    """A trace that is right, and the tables of it in which each row is one event's."""

    trace: dict[str, Any]
    tables: tuple[str, ...]


def of_gpu() -> Base:
    trace = Kineto(cuda_driver_version=13000, torch_version="2.9.0", distributedInfo={"rank": 0, "world_size": 2})
    trace.gpu().range(ANCHOR, 50, 5).thread(AUTOGRAD, f"thread {AUTOGRAD} (pt_autograd_0)")
    trace.range("forward", 100, 100).operator("aten::mm", 105, 20)
    for number in range(6):
        trace.launch(number + 1, 110 + 5 * number).kernel(f"kernel {number}", number + 1, 140 + 7 * number, 6)
    trace.range("backward", 200, 200).operator("aten::mm", 245, 20, tid=AUTOGRAD)
    trace.launch(8, 330, api="cudaMemcpyAsync").copy("Memcpy DtoH (Device -> Pinned)", 8, 340, 5, size=64)
    return Base(json.loads(trace.memory(512, 130, device=0, allocated=512).text()), OF_EVENTS)


def of_cpu() -> Base:
    """The first 250 events of a real training step; that an operator is left out changes the time of its caller."""
    with gzip.open(DATA / "cpu_train.pt.trace.json.gz") as file:
        trace = json.load(file)
    trace["traceEvents"] = trace["traceEvents"][:250]
    first = next(event for event in trace["traceEvents"] if event["name"] == "step")
    first["name"] = ANCHOR
    return Base(trace, (*OF_THE_CPU, "CUDA_GPU_MEMORY_USAGE_EVENTS"))


BASES = (of_gpu(), of_cpu())

NUMBERS = st.sampled_from([0, -1, 2**24, 2**31, -(2**31) - 1, 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30, 10**400])
OF_KINETO = (
    "X", "i", "M", "s", "kernel", "gpu_memcpy", "cpu_op", "Operator", "cuda_runtime", "gpu_user_annotation",
    "Kernel", "Runtime", "[memory]", "thread_name",
)  # fmt: skip
WORDS = st.sampled_from([*OF_KINETO, chr(0), "1e400"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | WORDS | st.text(st.characters()),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(st.characters()), inside, max_size=3),
    max_leaves=6,
)


@st.composite
def touched(draw: st.DrawFn) -> tuple[Base, dict[str, Any], set[int]]:
    """A trace, what became of it, and the events in which a value was replaced."""
    base = draw(st.sampled_from(BASES))
    trace = json.loads(json.dumps(base.trace))
    events = trace["traceEvents"]
    which = draw(st.sets(st.integers(0, len(events) - 1), max_size=3))
    which = {number for number in which if events[number]["name"] != ANCHOR}
    for number in which:
        events[number] = draw(_changed(events[number]))
    for key in draw(st.sets(st.sampled_from(sorted(trace)), max_size=2)) - {"traceEvents"}:
        trace[key] = draw(_changed(trace[key]))
    return base, trace, which


def _changed(value: Any) -> st.SearchStrategy[Any]:
    """The value with one of those in it, or itself, replaced, or taken out of its object."""
    if isinstance(value, dict) and value:

        def within(key: str) -> st.SearchStrategy[Any]:
            rest = {other: inside for other, inside in value.items() if other != key}
            return st.just(rest) | _changed(value[key]).map(lambda new: {**rest, key: new})

        return st.sampled_from(sorted(value)).flatmap(within) | JSON
    if isinstance(value, list) and value:
        return JSON | st.sampled_from(range(len(value))).flatmap(
            lambda at: _changed(value[at]).map(lambda new: [*value[:at], new, *value[at + 1 :]])
        )
    return JSON


def rows_of(trace: Any, names: tuple[str, ...]) -> dict[str, Counter[tuple[Any, ...]]]:
    """The rows of the events, with times from the anchor's start on.

    Raises:
        NsysAnalyzerError: the trace was refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_text(json.dumps(trace), encoding="utf-8")
        tables = tables_of(path)
    ranges = tables.get("NVTX_EVENTS", {"textId": []})
    anchor = ranges["start"][ranges["textId"].index(ANCHOR)] if ANCHOR in ranges["textId"] else 0
    found = {}
    for name in (name for name in names if name in tables):
        columns = {key: values for key, values in tables[name].items() if key not in OF_OTHERS}
        for key in {"start", "end"} & set(columns):
            columns[key] = [time - anchor for time in columns[key]]
        found[name] = Counter(zip(*columns.values(), strict=True))
    return found


def without(base: Base, which: set[int]) -> dict[str, Any]:
    events = [event for number, event in enumerate(base.trace["traceEvents"]) if number not in which]
    return {**base.trace, "traceEvents": events}


@given(touched())
def test_what_stands_in_one_event_is_its_own(given_trace: tuple[Base, dict[str, Any], set[int]]) -> None:
    base, trace, which = given_trace
    try:
        untouched = rows_of(without(base, which), base.tables)
        found = rows_of(trace, base.tables)
    except NsysAnalyzerError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for table, rows in untouched.items():
        assert rows <= found.get(table, Counter()), table


def _texts(trace: dict[str, Any]) -> Iterator[bytes]:
    yield json.dumps(trace).encode()
    yield json.dumps(trace["traceEvents"], indent=1).encode()


@given(st.sampled_from([text for base in BASES for text in _texts(base.trace)]), st.data())
def test_bytes_that_are_no_trace_are_one_line(text: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 30)))
    text = text[:at] + data.draw(st.binary(max_size=8)) + text[until:]
    if data.draw(st.booleans()):
        text = gzip.compress(text)[: data.draw(st.integers(1, 100_000))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(text)
        try:
            tables_of(path)
        except NsysAnalyzerError as error:
            assert "\n" not in str(error)  # noqa: PT017
