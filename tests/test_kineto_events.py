"""Tests impossible events and properties in a PyTorch trace: they are left out, counted and reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from tests.support.kineto import Kineto, tables_of

GEMM = "ampere_sgemm_128x64_tn"


def step() -> Kineto:
    """Forward [100, 200) launches a GEMM at 110 that runs [120, 150), in which PyTorch's allocator gives out 512 B."""
    trace = Kineto().gpu().range("forward", 100, 100).operator("aten::mm", 105, 20)
    return trace.launch(1, 110).kernel(GEMM, 1, 120, 30).memory(512, 130, device=0, allocated=512)


def tables(text: str, tmp_path: Path) -> tuple[dict[str, Any], list[str]]:
    """The tables of a trace of this text, and what is told of it."""
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = tables_of(path)
    return found, found.pop("DIAGNOSTIC_EVENT", {"text": []})["text"]


def added(event: str, trace: Kineto | None = None) -> str:
    """The step, or another trace, with one more event, given as JSON."""
    return (trace or step()).text().replace('"traceEvents": [', f'"traceEvents": [{event}, ')


KERNEL = '{"ph": "X", "cat": "kernel", "name": "bad", "pid": 0, "tid": 7, "ts": 125, "dur": 3, "args": %s}'
RANGE = '{"ph": "X", "cat": "user_annotation", "name": "bad", "pid": 500, "tid": 500, %s}'
MEMORY = '{"ph": "i", "name": "[memory]", "pid": 500, "tid": 500, "ts": 110, "args": %s}'


@pytest.mark.parametrize(
    ("event", "remark"),
    [
        (KERNEL % "[]", '1 of 2 events of the kind kernel, .*; the first is "bad"'),
        (KERNEL % '{"correlation": "a"}', "of the kind kernel"),
        (KERNEL % '{"correlation": 9223372036854775808}', "of the kind kernel"),
        (KERNEL.replace('"tid": 7', '"tid": {"a": 1}') % "{}", "of the kind kernel"),
        (KERNEL.replace('"dur": 3', '"dur": -1') % "{}", "of the kind kernel"),
        (KERNEL.replace('"dur": 3', '"dur": 1e999999999') % "{}", "of the kind kernel"),
        (KERNEL.replace('"dur": 3', '"dur": NaN') % "{}", "of the kind kernel"),
        (KERNEL.replace('"dur": 3', f'"dur": {"9" * 5000}') % "{}", "of the kind kernel"),
        (KERNEL.replace('"ts": 125, ', "") % "{}", "of the kind kernel"),
        (KERNEL.replace('"bad"', "5") % "{}", "the first is without a name"),
        (KERNEL.replace('"bad"', '"a\\nb\\u001b' + "c" * 100 + '"') % "[]", "the first is .{56,90}$"),
        (RANGE % '"ts": 1, "dur": -0.001', "1 of 2 events of the kind range"),
        (MEMORY % '{"Bytes": "many"}', "1 of 2 events of the kind memory"),
        ("17", "1 of 1 events of the kind unknown"),
    ],
)
def test_a_bad_event_is_left_out_and_told(event: str, remark: str, tmp_path: Path) -> None:
    found, (told,) = tables(added(event), tmp_path)
    assert re.search(remark, told)
    assert told.isprintable()
    assert found == tables(step().text(), tmp_path)[0]


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": "python_function", "name": "f", "pid": [], "ts": null, "args": null}',
        '{"ph": "X", "cat": ["kernel"], "name": "bad"}',
        '{"ph": "C", "name": 5, "pid": {}, "ts": "x"}',
        '{"name": "no phase"}',
        '{"ph": "f", "id": NaN, "cat": "ac2g", "name": "ac2g", "pid": null, "tid": null, "ts": -1}',
    ],
)
def test_what_is_of_no_use_may_be_anything(event: str, tmp_path: Path) -> None:
    assert tables(added(event), tmp_path) == tables(step().text(), tmp_path)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("null", "{}"),
        ('{"correlation": null, "stream": null}', "{}"),
        ('{"correlation": "1", "stream": "7"}', '{"correlation": 1, "stream": 7}'),
        ('{"correlation": 1.0, "device": 0.0}', '{"correlation": 1, "device": 0}'),
        ('{"stream": "0x55d0", "blocks per SM": NaN, "note": "a\x01b", "huge": 1e999999}', "{}"),
    ],
)
def test_arguments_of_another_form_are_read(written: str, read: str, tmp_path: Path) -> None:
    assert tables(added(KERNEL % written), tmp_path) == tables(added(KERNEL % read), tmp_path)


KNOWN_SIZES = {"grid": [4, 2, 3], "block": [128, 2, 1], "registers per thread": 40, "shared memory": 1024}
SIZE_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "dynamicSharedMemory")


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [4, 2, 3, 128, 2, 1, 40, 1024]),
        ({"block": None}, [0] * 8),
        ({"grid": [4, 2]}, [0] * 8),
        ({"registers per thread": "many"}, [0] * 8),
        ({"grid": [-1, 2, 3]}, [0] * 8),
    ],
)
def test_sizes_of_kernels(changes: dict[str, Any], sizes: list[int], tmp_path: Path) -> None:
    """Sizes of another form are unknown, and the kernel is kept."""
    read, remarks = tables(step().kernel(GEMM, 2, 160, 30, **{**KNOWN_SIZES, **changes}).text(), tmp_path)
    kernels = read["CUPTI_ACTIVITY_KIND_KERNEL"]
    assert [kernels[column][1] for column in SIZE_COLUMNS] == sizes
    assert remarks == []


@pytest.mark.parametrize("place", ['"pid": 0.0, "tid": 7.0', '"pid": "0", "tid": "7"'])
def test_a_process_or_thread_may_be_a_number_of_another_form(place: str, tmp_path: Path) -> None:
    odd = (KERNEL % "{}").replace('"pid": 0, "tid": 7', place)
    assert tables(added(odd), tmp_path) == tables(added(KERNEL % "{}"), tmp_path)


def test_odd_characters_of_names_are_read(tmp_path: Path) -> None:
    text = step().text().replace("forward", "for\x02ward").encode().replace(b"ampere", b"amp\xffre")
    (tmp_path / "t.json").write_bytes(text)
    trace = Trace.load(tmp_path / "t.json")
    assert trace.operations.names == (GEMM.replace("ampere", "amp\ufffdre"),)
    assert "for ward" in trace.ranges.names
    assert not trace.metadata.diagnostics


def test_one_remark_tells_all_of_a_kind(tmp_path: Path) -> None:
    events = ", ".join([KERNEL.replace('"dur": 3', '"dur": -1') % "{}"] * 3 + [KERNEL % "[]", RANGE % '"ts": 5'])
    (tmp_path / "t.json").write_text(added(events))
    kernels, ranges = (message.text for message in Trace.load(tmp_path / "t.json").metadata.diagnostics)
    assert "4 of 5 events of the kind kernel" in kernels
    assert "1 of 2 events of the kind range" in ranges


@pytest.mark.parametrize("time", ["1e14", "-1e14"])
def test_an_event_years_from_the_others_is_in_no_figure(time: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(added((KERNEL % "{}").replace("125", time)))
    trace = Trace.load(tmp_path / "t.json")
    assert [(row.rows, row.reason) for row in trace.left_out] == [(1, "a time outside the capture")]
    assert (trace.operations.start - trace.ranges.start[0]).tolist() == [20_000]  # forward at 100, the GEMM at 120


@pytest.mark.parametrize(
    "properties",
    [
        {"deviceProperties": [{"name": "a"}]},
        {"deviceProperties": "H100"},
        {"deviceProperties": [{"id": 0, "totalGlobalMem": 1 << 63}]},
        {"distributedInfo": {"rank": "first"}},
        {"cuda_driver_version": 10**400},
    ],
)
def test_impossible_properties_are_ignored_and_told(properties: dict[str, Any], tmp_path: Path) -> None:
    trace = step()
    trace.properties = properties
    found, (told,) = tables(trace.text(), tmp_path)
    assert told.startswith("The trace's properties are ignored: ")
    trace.properties = {}
    assert found == tables(trace.text(), tmp_path)[0]
