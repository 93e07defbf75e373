"""Events and properties of a PyTorch profiler's trace that cannot be what they say: left out, counted and told."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.sources import convert
from tests.support.kineto import Kineto

GEMM = "ampere_sgemm_128x64_tn"


def step() -> Kineto:
    """Forward [100, 200) launches a GEMM at 110 that runs [120, 150), in which PyTorch's allocator gives out 512 B."""
    trace = Kineto().gpu().range("forward", 100, 100).operator("aten::mm", 105, 20)
    return trace.launch(1, 110).kernel(GEMM, 1, 120, 30).memory(512, 130, device=0, allocated=512)


def tables(text: str, tmp_path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of what a trace of this text becomes, by table; all but the mark of where it came from."""
    path, output = tmp_path / "t.json", tmp_path / "t.sqlite"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    convert(path, output)
    with closing(sqlite3.connect(output)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}
    output.unlink()
    found["META_DATA_EXPORT"] = [row for row in found["META_DATA_EXPORT"] if "SOURCE" not in row[0]]
    return found


def remarks(found: dict[str, list[tuple[Any, ...]]]) -> list[str]:
    return [text for _, text, _ in found.get("DIAGNOSTIC_EVENT", [])]


def added(event: str, trace: Kineto | None = None) -> str:
    """The step, or another trace, with one more event, given as JSON."""
    return (trace or step()).text().replace('"traceEvents": [', f'"traceEvents": [{event}, ')


KERNEL = '{"ph": "X", "cat": "kernel", "name": "bad", "pid": 0, "tid": 7, "ts": 125, "dur": 3, "args": %s}'
RANGE = '{"ph": "X", "cat": "user_annotation", "name": "bad", "pid": 500, "tid": 500, %s}'
MEMORY = '{"ph": "i", "name": "[memory]", "pid": 500, "tid": 500, "ts": 110, "args": %s}'


@pytest.mark.parametrize(
    ("event", "remark"),
    [
        (KERNEL % "[]", "1 of 2 events of the kind kernel"),
        (KERNEL % "[]", 'args: expected object | null, got array (1); the first is "bad"'),
        (KERNEL % '{"correlation": "a"}', "correlation: expected int | null, got str (1)"),
        (KERNEL % '{"correlation": NaN}', "correlation: expected int | null, got str (1)"),
        (KERNEL % '{"correlation": 9223372036854775808}', "correlation: expected int <= 9223372036854775807 (1)"),
        (KERNEL % '{"context": "0x55d0", "correlation": 1.5}', "correlation: expected int | null, got float (1)"),
        (KERNEL.replace('"tid": 7', '"tid": {"a": 1}') % "{}", "tid: expected int | str | null, got object (1)"),
        (KERNEL.replace('"pid": 0', '"pid": [0]') % "{}", "pid: expected int | str | null, got array (1)"),
        (KERNEL.replace('"tid": 7', '"tid": "stream"') % "{}", "a text, or nothing, where a number belongs (1)"),
        (KERNEL.replace('"dur": 3', '"dur": -1') % "{}", "a negative duration (1)"),
        (KERNEL.replace('"dur": 3', '"dur": 1e18') % "{}", "an impossible duration (1)"),
        (KERNEL.replace('"dur": 3', '"dur": 1e400') % "{}", "an impossible duration (1)"),
        (KERNEL.replace('"dur": 3', '"dur": 1e999999999') % "{}", "an impossible duration (1)"),
        (KERNEL.replace('"dur": 3', f'"dur": 1e{"9" * 30}') % "{}", "dur: invalid decimal string (1)"),
        (KERNEL.replace('"dur": 3', '"dur": NaN') % "{}", "an impossible duration (1)"),
        (KERNEL.replace('"dur": 3', f'"dur": {"9" * 5000}') % "{}", "an impossible duration (1)"),
        (KERNEL.replace(', "dur": 3', "") % "{}", "no duration (1)"),
        (KERNEL.replace('"ts": 125, ', "") % "{}", "no time (1)"),
        (KERNEL.replace("125", "-Infinity") % "{}", "an impossible time (1)"),
        (KERNEL.replace('"bad"', '"b\\ud800d"') % "{}", 'a text that is no Unicode (1); the first is "b\ufffdd"'),
        (KERNEL.replace('"bad"', "5") % "{}", "name: expected str | null, got int (1); the first is without a name"),
        (KERNEL.replace('"kernel"', '["kernel"]') % "{}", "events of the kind any"),
        (RANGE % '"ts": 1, "dur": -0.001', "1 of 2 events of the kind range"),
        (MEMORY % '{"Bytes": "many"}', "Bytes: expected int, got str"),
        (MEMORY % '{"Bytes": -9223372036854775808}', "Bytes: expected int >= -9223372036854775807"),
        ("17", "no object (1)"),
    ],
)  # fmt: skip
def test_a_bad_event_is_left_out_and_told(event: str, remark: str, tmp_path: Path) -> None:
    found = tables(added(event), tmp_path)
    (told,) = remarks(found)
    assert remark in told
    del found["DIAGNOSTIC_EVENT"]
    assert found == tables(step().text(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ('{"device": "GPU 0"}', "device"),
        ('{"device": 2147483648}', "device"),
        ('{"stream": [7]}', "stream"),
        ('{"direction": 3}', "direction"),
        ('{"graph node id": NaN}', "graph node id"),
    ],
)
def test_an_argument_that_cannot_be_read_is_absent(arguments: str, argument: str, tmp_path: Path) -> None:
    found = tables(added(", ".join([KERNEL % arguments] * 2)), tmp_path)
    assert remarks(found) == [f"2 events of the kind kernel have a `{argument}` that cannot be read"]
    del found["DIAGNOSTIC_EVENT"]
    assert found == tables(added(", ".join([KERNEL % "{}"] * 2)), tmp_path)


@pytest.mark.parametrize(
    ("written", "argument"),
    [
        ('"Sequence number": "many"', "Sequence number"),
        ('"Sequence number": 9223372036854775808', "Sequence number"),
        ('"Fwd thread id": [1]', "Fwd thread id"),
    ],
)
def test_an_operator_without_an_argument_that_cannot_be_read(written: str, argument: str, tmp_path: Path) -> None:
    odd, plain = (
        step().text().replace('"Sequence number": 1', f'"Sequence number": 1, "Input Dims": [[2, 3]]{more}')
        for more in (f", {written}", "")
    )
    found = tables(odd, tmp_path)
    assert remarks(found) == [f"1 events of the kind operator have a `{argument}` that cannot be read"]
    del found["DIAGNOSTIC_EVENT"]
    if argument == "Sequence number":
        plain = plain.replace('"Sequence number": 1, ', "")
    assert found == tables(plain, tmp_path)


@pytest.mark.parametrize("arguments", ["[]", "null", "7", '"none"'])
def test_an_operator_does_without_arguments(arguments: str, tmp_path: Path) -> None:
    text = step().text()
    written = '{"External id": 2, "Sequence number": 1}'
    assert written in text
    assert tables(text.replace(written, arguments), tmp_path) == tables(text.replace(written, "{}"), tmp_path)


@pytest.mark.parametrize("stream", ['"0x0"', "[7]"])
def test_a_call_has_no_use_for_a_stream(stream: str, tmp_path: Path) -> None:
    """ROCm writes its address as a text."""
    call = '{"ph": "X", "cat": "cuda_runtime", "name": "a", "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": %s}'
    found = tables(added(call % f'{{"correlation": 9, "stream": {stream}}}'), tmp_path)
    assert remarks(found) == []
    assert found == tables(added(call % '{"correlation": 9}'), tmp_path)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("null", "{}"),
        ('{"correlation": null, "stream": null}', "{}"),
        ('{"correlation": "1", "stream": "7"}', '{"correlation": 1, "stream": 7}'),
        ('{"correlation": 1.0, "device": 0.0}', '{"correlation": 1, "device": 0}'),
    ],
)
def test_arguments_of_another_form_are_read(written: str, read: str, tmp_path: Path) -> None:
    assert tables(added(KERNEL % written), tmp_path) == tables(added(KERNEL % read), tmp_path)


def test_a_process_or_thread_may_be_a_number_with_a_point(tmp_path: Path) -> None:
    odd = (KERNEL % "{}").replace('"pid": 0, "tid": 7', '"pid": 0.0, "tid": 7.0')
    assert tables(added(odd), tmp_path) == tables(added(KERNEL % "{}"), tmp_path)


@pytest.mark.parametrize("number", ["1.5", "[1]", '{"a": 1}', "true", "null"])
def test_the_id_of_an_event_that_is_no_arrow_may_be_anything(number: str, tmp_path: Path) -> None:
    odd = (KERNEL % "{}").replace('"ph": "X"', f'"ph": "X", "id": {number}')
    assert tables(added(odd), tmp_path) == tables(added(KERNEL % "{}"), tmp_path)


def test_kernels_of_an_intel_gpu_are_read(tmp_path: Path) -> None:
    """PyTorch's plugin for XPUs writes the context and the queue as texts, and no stream."""
    trace = Kineto(deviceProperties=[{"id": 0, "name": "Intel(R) Data Center GPU Max 1550"}])
    trace.range("forward", 0, 100).operator("aten::mm", 1, 30)
    for number in (1, 2):
        trace.add("xpu_runtime", "urEnqueueKernelLaunch", 4 + number, 1, correlation=number)
        queue = {"sycl queue": 1, "l0 queue": "0x000055d0c0ffee10"}
        where = {"appended": "1", "submitted": "2", "device": 0, "context": "0x000055d0c0ffee00", **queue}
        trace.add("kernel", "gemm_kernel", 20 * number, 10, 0, 3, **where, correlation=number)
    read = Trace.load(trace.write(tmp_path / "t.json"))
    assert read.operations.names == ("gemm_kernel",)
    assert read.operations.start.tolist() == [20_000, 40_000]
    assert read.operations.correlation.tolist() == [1, 2]
    assert read.operations.stream.tolist() == [3, 3]
    assert not read.metadata.diagnostics


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": "python_function", "name": "\\ud800", "pid": [], "ts": null, "args": null}',
        '{"ph": "C", "name": 5, "pid": {}, "ts": "x"}',
        '{"name": "no phase"}',
        '{"ph": "f", "id": NaN, "cat": "ac2g", "name": "ac2g", "pid": null, "tid": null, "ts": -1}',
    ],
)
def test_what_is_of_no_use_may_be_anything(event: str, tmp_path: Path) -> None:
    assert tables(added(event), tmp_path) == tables(step().text(), tmp_path)


@pytest.mark.parametrize(
    "argument", ['"blocks per SM": NaN', '"Concrete Inputs": ["\\ud800"]', '"note": "a\x01b"', '"huge": 1e999999']
)
def test_arguments_of_no_use_may_be_anything(argument: str, tmp_path: Path) -> None:
    text = step().text()
    assert tables(text.replace('"args": {"External id": 2', f'"args": {{{argument}'), tmp_path) == tables(
        text, tmp_path
    )
    odd = tables(text.replace('"blocks per SM": 0.5', '"blocks per SM": Infinity'), tmp_path)
    assert odd == tables(text, tmp_path)


def test_bytes_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(step().text().encode().replace(b"ampere", b"amp\xffre"))
    assert Trace.load(path).operations.names == (GEMM.replace("ampere", "amp\ufffdre"),)


def test_a_name_with_control_characters_is_read(tmp_path: Path) -> None:
    found = tables(step().text().replace("forward", "for\x02ward"), tmp_path)
    assert "for\x02ward" in [text for _, text in found["StringIds"]]
    assert not remarks(found)


def test_a_name_is_told_on_one_line_and_cut(tmp_path: Path) -> None:
    bad = KERNEL.replace('"bad"', '"a\\nb\\u001b' + "c" * 100 + '"') % "[]"
    (told,) = remarks(tables(added(bad), tmp_path))
    assert told.isprintable()
    assert told.endswith("c" * 56 + '…"')


def test_one_remark_tells_all_of_a_kind(tmp_path: Path) -> None:
    events = ", ".join([KERNEL.replace('"dur": 3', '"dur": -1') % "{}"] * 3 + [KERNEL % "[]", RANGE % '"ts": 5'])
    kernels, ranges = remarks(tables(added(events), tmp_path))
    assert "4 of 5 events of the kind kernel" in kernels
    assert "a negative duration (3), args: expected object | null, got array (1)" in kernels
    assert "1 of 2 events of the kind range" in ranges


def test_remarks_become_warnings(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(added(KERNEL % "[]"))
    assert any("of the kind kernel" in one.text for one in Trace.load(path).metadata.diagnostics)


@pytest.mark.parametrize("time", ["1e15", "-1e15"])
def test_an_event_years_from_the_others_is_in_no_figure(time: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(added((KERNEL % "{}").replace("125", time)))
    loaded = Trace.load(path)
    assert any("a time more than a day from the others (1)" in one.text for one in loaded.metadata.diagnostics)
    assert (loaded.operations.start - loaded.ranges.start[0]).tolist() == [20_000]  # forward at 100, the GEMM at 120


def test_ranks_with_clocks_days_apart_are_kept(tmp_path: Path) -> None:
    day = 86_400_000_000  # in us
    trace = Kineto().launch(1, 100, pid="rank 0", tid=1).kernel("a", 1, 101, 1, device=0)
    trace.launch(1, 5 * day, pid="rank 1", tid=1).kernel("b", 1, 5 * day + 1, 1, device=1)
    found = tables(trace.text(), tmp_path)
    assert [row[0] for row in found["CUPTI_ACTIVITY_KIND_KERNEL"]] == [1_000, 5 * day * 1000 + 1_000 - 100_000]
    assert not remarks(found)


def test_it_is_said_why_no_kernel_is_left(tmp_path: Path) -> None:
    trace = Kineto().launch(1, 110).kernel(GEMM, 1, 120, -30)
    with pytest.raises(
        TraceError, match=r"neither operators nor kernels: .*1 of 1 events .* a negative duration \(1\)"
    ):
        tables(trace.text(), tmp_path)


def test_a_trace_of_bad_events_alone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"no events of PyTorch's profiler: .* no duration \(1\); the first is \"a\""
    ) as caught:
        tables('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "pid": 0, "tid": 0}]}', tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("properties", "remark"),
    [
        ({"deviceProperties": [{"name": "a"}]}, "The trace's deviceProperties is ignored: "),
        ({"deviceProperties": "H100"}, "deviceProperties: expected array, got str"),
        ({"deviceProperties": [7]}, "expected object, got int"),
        ({"deviceProperties": [{"id": 1 << 40}]}, "expected int <= 2147483647"),
        ({"deviceProperties": [{"id": 0, "totalGlobalMem": 1 << 63}]}, "expected int <= 9223372036854775807"),
        ({"distributedInfo": {"rank": "first"}}, "distributedInfo.rank: expected int | null, got str"),
        ({"distributedInfo": [0]}, "distributedInfo: expected object | null, got array"),
        ({"torch_version": {"a": 1}}, "torch_version: expected"),
        ({"cuda_driver_version": 10**400}, "cuda_driver_version: expected int"),
        ({"driver_version": "\ud800"}, "The trace's driver_version is ignored: a text that is no Unicode"),
    ],
)
def test_an_impossible_property_is_ignored_and_told(properties: dict[str, Any], remark: str, tmp_path: Path) -> None:
    trace = step()
    trace.properties = properties
    found = tables(trace.text(), tmp_path)
    (told,) = remarks(found)
    assert remark in told
    del found["DIAGNOSTIC_EVENT"]
    trace.properties = {}
    assert found == tables(trace.text(), tmp_path)


def test_a_few_events_of_another_clock_are_left_out_and_counted(tmp_path: Path) -> None:
    """The machine has run for 5 days, which its clock counts; one range has no time, which is 0."""
    trace = step()
    for event in trace.events:
        if "ts" in event:
            event["ts"] += 5 * 86_400e6
    path, clean = tmp_path / "t.json", tmp_path / "clean.json"
    clean.write_text(trace.text())
    path.write_text(added(RANGE % '"ts": 0, "dur": 5', trace))
    stray, whole = Trace.load(path), Trace.load(clean)
    assert len(stray.ranges) == len(whole.ranges)
    assert any("a time more than a day from the others (1)" in one.text for one in stray.metadata.diagnostics)


@pytest.mark.parametrize("argument", ['"name": null', '"Device Id": "a"', '"Bytes": "many"'])
def test_an_argument_of_another_kind_of_event_is_not_read(argument: str, tmp_path: Path) -> None:
    assert tables(added(KERNEL % f"{{{argument}}}"), tmp_path) == tables(added(KERNEL % "{}"), tmp_path)
