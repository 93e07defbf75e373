"""Tests the torch recorder on whole programs in processes of their own, and the traces that it writes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.capture.recorder import BEGIN_FILE, NOTHING_RECORDED, Annotation, Ranges, Recorder, main
from tests.support.annotated import ProgramCase, read_programs
from tests.support.kineto import tables_of
from tests.support.prepared import run_prepared

pytestmark = pytest.mark.slow  # each program imports torch

ROOT = Path(__file__).parent.parent


#: Starts the recorder as ``python -m`` does.
START = """
import runpy, sys
sys.argv = ["recorder", *{arguments}]
runpy.run_module("nsys_analyzer.capture.recorder", run_name="__main__", alter_sys=True)
"""


def read_trace(path: Path) -> dict[str, Any]:
    """What a trace holds. An operator that calls others has a row for each part of its own, and is called once."""
    trace = Trace.load(path)
    kernels = [trace.operations.names[code] for code in trace.operations.name[trace.operations.continues == 0]]
    memory = tables_of(path).get("CUDA_GPU_MEMORY_USAGE_EVENTS", {})
    return {
        "kernels": kernels,
        "products": kernels.count("aten::mm"),
        "ranges": sorted(trace.ranges.names[code] for code in trace.ranges.name),
        "threads_of_ranges": len(set(trace.ranges.thread.tolist())),
        "memory": (memory.get("bytes"), memory.get("memoryOperationType")),
        "profiler_version": trace.metadata.profiler_version,
    }


@pytest.mark.parametrize("case", read_programs("recorded_programs")[0], ids=lambda case: str(case.name))
def test_a_recorded_program(case: ProgramCase, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the recorder is PyTorch's profiler")
    config = torch._C._profiler._ExperimentalConfig.__init__.__doc__
    if "all_threads" in case.options and "profile_all_threads" not in str(config):
        pytest.skip("this PyTorch records the first thread and autograd's alone")
    folder, script = tmp_path / "recorded", tmp_path / "program.py"
    folder.mkdir()
    script.write_text(case.text.replace("{folder}", str(folder)).replace("{begin}", BEGIN_FILE))
    case.write_files(tmp_path)
    words = [*case.options.get("recorder", "").split(), "--"]
    words += ["-m", "program"] if case.options.get("module") else [str(script)]
    arguments = ["--output", str(folder / "trace.json.gz"), *words, *case.options.get("words", "").split()]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if case.options.get("afresh"):
        command = [sys.executable, "-m", "nsys_analyzer.capture.recorder", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    else:
        start = tmp_path / "start.py"
        start.write_text(START.format(arguments=arguments))
        ended = run_prepared(start, environment)
    trace = folder / "trace.json.gz"
    results = read_trace(trace) if trace.exists() else {}
    results["files"] = [path.name for path in folder.iterdir()] if folder.exists() else None
    known = {"NOTHING_RECORDED": NOTHING_RECORDED, "torch_version": torch.__version__}
    case.compare(ended.returncode, ended.stdout, ended.stderr, {**results, **known})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--output", "t.json.gz"],
        ["--output", "t.json.gz", "--", "-m"],
        ["--output", "absent/t.json.gz", "--", "a.py"],
    ],
)
def test_wrong_use_is_told_before_anything_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m nsys_analyzer.capture.recorder" in capsys.readouterr().err


class Switch:
    """Stands for the recorder: whether it records."""

    is_recording = False


@pytest.fixture
def ranges() -> Ranges:
    pytest.importorskip("torch", reason="ranges are PyTorch's")
    return Ranges(Switch())  # type: ignore[arg-type]


def test_pytorchs_talk_of_several_recordings_is_not_in_the_programs_log(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = pytest.importorskip("torch.profiler", reason="the recorder is PyTorch's profiler")

    def prepare(_: object) -> None:  # as PyTorch 2.7 does; a warning that is not caught is an error here
        warnings.warn("Warning: Profiler clears events at the end of each cycle.\nOnly events in", stacklevel=1)

    monkeypatch.setattr(profiler.profile, "prepare_trace", prepare)
    Recorder(Path("trace.json.gz"))
    with pytest.raises(UserWarning):
        prepare(None)


def test_threads_that_start_ranges_at_once_get_a_handle_each(ranges: Ranges) -> None:
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda _: ranges.start("batch"), range(4000)))
    assert len(set(handles)) == 4000


def test_ranges_have_the_depths_of_nvtx(ranges: Ranges) -> None:
    assert [ranges.push("a"), ranges.push(msg="b")] == [0, 1]
    assert [ranges.pop(), ranges.pop(), ranges.pop()] == [1, 0, -1]


def test_a_decorated_function_is_a_range_of_its_name(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(ranges, "push", opened.append)
    monkeypatch.setattr(ranges, "pop", lambda: opened.append("end"))

    @Annotation(ranges)
    def twice(number: int) -> int:
        return 2 * number

    with Annotation(ranges, message="outer", color="red"):
        assert twice(3) == 6
    assert opened == ["outer", "twice", "end", "end"]


def test_ranges_that_began_outside_the_recording_end_in_it(ranges: Ranges) -> None:
    ranges.push("before")
    handle = ranges.start("before, too")
    ranges._recorder.is_recording = True
    ranges.push("within")
    ranges.close_all()
    ranges.end(handle)
    ranges.end(handle)
    assert [ranges.pop(), ranges.pop(), ranges.pop()] == [1, 0, -1]
