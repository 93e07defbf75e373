"""Tests that a trace is decoded in pieces of any size, and that other text is refused."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.kineto import read as kineto_read
from nsys_analyzer.trace.kineto.read import read_kineto
from nsys_analyzer.trace.sources import open_capture
from tests.support.kineto import Kineto, tables_of

MIB = 1 << 20


def step() -> Kineto:
    return Kineto().range("forward", 0, 100).operator("aten::mm", 10, 20).operator("aten::add", 40, 5)


def spread(text: str, space: str) -> str:
    """The text with white space at places where JSON lets it stand: in and between events, before and after all."""
    text = text.replace('"traceEvents": [', f'"traceEvents":{space}[{space}').replace("}, {", f"}}{space},{space}{{")
    return f"{space}{text}{space}"


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_file_that_expands_a_thousand_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (70 * MIB)))
    with pytest.raises(TraceError, match=r"t\.json\.gz expands more than 200 times") as caught:
        read_kineto(path)
    assert caught.value.hint.endswith("gunzip -k t.json.gz")


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize("before", ["", '{"a": ', '{"traceEvents": [', '{"traceEvents": [{"ph": "X", "args": '])
def test_deep_nesting_is_one_line(before: str, depth: int, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(before + "[" * depth)
    with pytest.raises(TraceError, match="is not JSON, or only a part of it") as caught:
        read_kineto(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_opened(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "t.json.gz")
    with pytest.raises(TraceError, match=r"t\.json\.gz is not a regular file"):
        open_capture(tmp_path / "t.json.gz")


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm%d", "ts": %d, "dur": 1, "pid": 1, "tid": 1}'
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + ", ".join(event % (n, n) for n in range(200_000)) + "]}")
    program = (
        "import resource, sys; from pathlib import Path\n"
        "import pyarrow\n"
        "import nsys_analyzer.trace.trace, nsys_analyzer.trace.kineto  # before the memory is scarce\n"
        "from nsys_analyzer.trace.trace import Trace\n"
        "from nsys_analyzer.errors import TraceError\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20,) * 2)\n"
        "try: Trace.load(Path(sys.argv[1]))\n"
        "except TraceError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path} needs more memory than is available")
    assert done.stdout.count("\n") == 1


def test_a_value_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text in ('{"torch_version": "', '{"traceEvents": ["', '["', '{"traceEvents": [{"args": {"a": 1', "}"):
        path.write_text(text)
        with pytest.raises(TraceError, match="is not JSON, or only a part of it"):
            read_kineto(path)


# --- what is read, though it is not written as it should be -----------------------------------------------------------


def test_a_large_plain_file_takes_memory_for_its_text_once(tmp_path: Path) -> None:
    trace = step()
    for at in range(30):
        trace.add("python_function", "train.py(1): main", at, 1, **{"Call stack": "x" * MIB})
    program = (
        "import resource, sys; from pathlib import Path\n"
        "import nsys_analyzer.trace.kineto.read as read\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 80 * 2**20,) * 2)\n"
        "print(len(read.read_kineto(Path(sys.argv[1])).of('operator')))\n"
    )
    for name in ("t.json", "t.json.gz"):
        path = trace.write(tmp_path / name)
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("2\n", "")


COMMAS = "The trace is not valid JSON and was repaired: it has 2 decimal commas in wrong places"
BACKSLASHES = COMMAS.replace("2 decimal commas", "3 backslashes")


@pytest.mark.parametrize(
    ("arguments", "remarks"),
    [
        ('{"blocks per SM": 7,757576, "warps per SM": -31,030304e-2}', [COMMAS]),
        ('{"blocks per SM": inf, "warps per SM": [-nan, -inf, nan(ind), Infinity]}', []),
        (r'{"Python file": "C:\Users\me", "a": "\u12", "b": "C:\\tidy \" \u00e9"}', [BACKSLASHES]),
        (r'{"a": "inf, nan, \": 1,5}", "b": nan, "c": 1,5, "d": 2,5}', [COMMAS]),
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_what_pytorch_writes_wrongly_is_read(
    arguments: str, remarks: list[str], is_array: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    trace = step().operator("aten::nan", 60, 5)
    text = trace.array() if is_array else trace.text()
    path.write_text(text.replace('"External id"', f'"odd": {arguments}, "External id"', 1))
    right = trace.write(tmp_path / "right.json")
    read, expected = read_kineto(path), read_kineto(right)
    assert read.remarks == remarks
    assert tables_of(path).keys() - {"DIAGNOSTIC_EVENT"} == tables_of(right).keys()
    for kind in ("range", "operator"):
        assert read.of(kind).tolist() == expected.of(kind).tolist()
    assert read.texts == expected.texts


def test_a_time_with_a_decimal_comma_is_a_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(step().text().replace('"ts": 40, "dur": 5', '"ts": 40,250, "dur": 5,5'))
    # 40.25 us and 5.5 us later, from the range's start at 0
    assert read_kineto(path).of("operator")[["start", "end"]].tolist() == [(10_000, 30_000), (40_250, 45_750)]


def test_what_cannot_be_read_is_shown_with_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(step().text().replace('"dur": 5', '"dur": five'))
    with pytest.raises(
        TraceError, match=r'is not JSON, or only a part of it \(.*byte \d+\)\): ….*"dur": five'
    ) as caught:
        read_kineto(path)
    assert "LC_ALL=C" in caught.value.hint


# --- how the text is cut -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=4), inside, max_size=4),
    max_leaves=10,
)


@given(st.lists(JSON, max_size=8), st.integers(1, 40), st.sampled_from(["", " ", "\n  "]))
def test_the_same_is_read_wherever_the_pieces_end(values: list[Any], piece: int, space: str) -> None:
    import json
    import tempfile

    events = (
        Kineto().operator("aten::}, {", 0, 5).operator('aten::\\"}, {\u00e9', 1, 2).operator("aten::mm", 7, 1).events
    )
    for event, value in zip(events, values, strict=False):
        event["args"] = {"odd": value}
    text = spread(json.dumps({"a": values, "traceEvents": [*events, *values], "z": values}), space)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        path = Path(folder) / "t.json"
        path.write_text(text, encoding="utf-8")
        whole = tables_of(path)
        patched.setattr(kineto_read, "_PIECE_BYTES", piece)
        assert tables_of(path) == whole
    assert len(whole["TORCH_OPERATOR_EVENTS"]["start"]) == 3
