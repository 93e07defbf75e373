"""Tests the torch recorder on whole programs in processes of their own, and the traces that it writes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.capture.recorder import BEGIN, NOTHING_RECORDED, Annotation, Ranges, Recorder, main
from tests.support.kineto import tables_of

pytestmark = pytest.mark.slow  # each program imports torch

ROOT = Path(__file__).parent.parent

TRAINING = """
import sys
from pathlib import Path
import beside
import torch
from torch.cuda import nvtx, profiler

assert __name__ == "__main__" and __file__ == sys.argv[0]
print("arguments", *sys.argv[1:], beside.VALUE)
x = torch.ones(8, 8)

def step():
    with nvtx.range("step"):
        nvtx.range_push("forward")
        y = x @ x
        nvtx.range_pop()
        handle = nvtx.range_start("backward")
        y @ y
        nvtx.range_end(handle)
        nvtx.mark("done")

nvtx.range_push("warmup")
step()
nvtx.range_pop()
nvtx.range_push("open before")
profiler.start()
step()
step()
nvtx.range_push("open at the end")
profiler.stop()
nvtx.range_pop()
nvtx.range_pop()
torch.cuda.cudart().cudaProfilerStart()
step()
sys.exit(5)
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    trace: Path


Record = Callable[..., Outcome]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Runs a program under the recorder; ``{}`` in it is the folder of the trace."""
    pytest.importorskip("torch", reason="the recorder is PyTorch's profiler")

    def run(program: str, *options: str, arguments: tuple[str, ...] = (), module: bool = False) -> Outcome:
        folder = tmp_path / "out"
        folder.mkdir()
        script = tmp_path / "program.py"
        script.write_text(program.replace("{}", str(folder)))
        (tmp_path / "beside.py").write_text("VALUE = 42")
        output = folder / "trace.json.gz"
        named = ("-m", "program") if module else (str(script),)
        command = [sys.executable, "-m", "nsys_analyzer.capture.recorder", "--output", str(output), *options]
        finished = subprocess.run(
            [*command, "--", *named, *arguments], capture_output=True, text=True, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return Outcome(finished.returncode, finished.stdout, finished.stderr, output)

    return run


def kernels(trace: Trace) -> list[str]:
    """Returns the names of the operators that were called; one that calls others has a row for each part of its own."""
    called = trace.operations.continues == 0
    return [trace.operations.names[code] for code in trace.operations.name[called]]


def test_the_first_range_between_start_and_stop_is_recorded(record: Record) -> None:
    outcome = record(TRAINING, arguments=("--steps", "2"))
    assert outcome.code == 5
    assert outcome.out == "arguments --steps 2 42\n"
    assert outcome.err == (
        "recorder: only the first range between cudaProfilerStart and cudaProfilerStop is recorded\n"
    )
    assert [path.name for path in outcome.trace.parent.iterdir()] == ["trace.json.gz"]
    trace = Trace.load(outcome.trace)
    ranges = [trace.ranges.names[code] for code in trace.ranges.name]
    assert sorted(ranges) == sorted(["step", "forward", "backward", "done"] * 2 + ["open at the end"])
    assert kernels(trace).count("aten::mm") == 2 * 2  # two products in each of two steps
    import torch

    assert trace.metadata.profiler_version == torch.__version__


def test_a_program_that_never_starts_the_profiler(record: Record) -> None:
    outcome = record("import torch\ntorch.ones(2).add(1)\ntorch.cuda.profiler.stop()")
    assert outcome.code == NOTHING_RECORDED
    assert outcome.err == (
        "recorder: the program never called cudaProfilerStart; nsys-analyze run --whole-program records all of it\n"
    )
    assert list(outcome.trace.parent.iterdir()) == []


def test_a_program_that_fails_while_it_is_recorded(record: Record) -> None:
    outcome = record("import torch\ntorch.cuda.profiler.start()\ntorch.ones(2, 3) @ torch.ones(2, 3)")
    assert outcome.code == 1
    lines = outcome.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "program.py" in lines[1]
    assert "recorder" not in outcome.err
    assert lines[-1].startswith("RuntimeError: mat1 and mat2")
    assert list(outcome.trace.parent.iterdir()) == []


def test_a_program_that_fails_after_its_range(record: Record) -> None:
    program = "import torch\nwith torch.cuda.profiler.profile(): torch.ones(2, 2) @ torch.ones(2, 2)\nraise KeyError(3)"
    outcome = record(program)
    assert (outcome.code, outcome.err.splitlines()[-1]) == (1, "KeyError: 3")
    assert "aten::mm" in kernels(Trace.load(outcome.trace))


def test_a_range_that_is_never_stopped_ends_with_the_program(record: Record) -> None:
    outcome = record("import torch\ntorch.cuda.profiler.start()\ntorch.ones(2, 2) @ torch.ones(2, 2)")
    assert (outcome.code, outcome.err) == (0, "")
    assert "aten::mm" in kernels(Trace.load(outcome.trace))


def test_a_whole_module_with_its_memory(record: Record) -> None:
    program = "import torch\ntorch.cuda.profiler.start()\ntorch.cuda.profiler.stop()\ny = torch.ones(256, 256)\ndel y"
    outcome = record(program, "--whole-program", "--memory", module=True)
    assert (outcome.code, outcome.err) == (0, "")
    assert "aten::ones" in kernels(Trace.load(outcome.trace))
    memory = tables_of(outcome.trace)["CUDA_GPU_MEMORY_USAGE_EVENTS"]
    assert (memory["bytes"], memory["memoryOperationType"]) == ([256 * 256 * 4] * 2, [0, 1])


THREADS = """
import threading, torch
x = torch.ones(8, 8)
begun = threading.Event()

def work(name):
    begun.wait()
    with torch.cuda.nvtx.range(name):
        x @ x

before = threading.Thread(target=work, args=("before",))
before.start()
torch.cuda.profiler.start()
begun.set()
within = threading.Thread(target=work, args=("within",))
within.start()
before.join()
within.join()
torch.cuda.profiler.stop()
"""


def test_every_thread_is_recorded(record: Record) -> None:
    from torch._C._profiler import _ExperimentalConfig

    if "profile_all_threads" not in str(_ExperimentalConfig.__init__.__doc__):
        pytest.skip("this PyTorch records the first thread and autograd's alone")
    outcome = record(THREADS)
    assert (outcome.code, outcome.err) == (0, "")
    trace = Trace.load(outcome.trace)
    assert {trace.ranges.names[code] for code in trace.ranges.name} == {"before", "within"}
    assert len(set(trace.ranges.thread.tolist())) == 2
    assert kernels(trace).count("aten::mm") == 2


FORKING = """
import atexit, os, sys, torch
CODES = [0, 3, 1]

def bye():
    import __main__
    print("bye", __main__.CODES[child])

atexit.register(bye)
x = torch.ones(8, 8)
torch.cuda.profiler.start()
for child in (1, 2):
    if pid := os.fork():
        print("ended", os.waitpid(pid, 0)[1] >> 8, flush=True)
    elif child == 1:
        torch.cuda.profiler.stop()
        sys.exit(CODES[child])
    else:
        raise ValueError
child = 0
x @ x
"""


def test_children_end_as_they_do_without_the_recorder_and_the_parent_is_recorded(record: Record) -> None:
    outcome = record(FORKING)
    assert (outcome.code, outcome.out) == (0, "bye 3\nended 3\nbye 1\nended 1\nbye 0\n")
    assert outcome.err.splitlines()[-1] == "ValueError"
    assert kernels(Trace.load(outcome.trace)).count("aten::mm") == 1


def test_a_thread_that_outlives_the_main_one_is_recorded_to_its_end(record: Record) -> None:
    program = """
import threading, time, torch
from concurrent.futures import ThreadPoolExecutor

def train():
    threading.main_thread().join()
    torch.cuda.profiler.start()
    torch.ones(8, 8) @ torch.ones(8, 8)
    torch.cuda.profiler.stop()

pool = ThreadPoolExecutor(1)  # its thread waits until the program ends
pool.submit(print, "pool")
threading.Thread(target=train).start()
"""
    outcome = record(program)
    assert (outcome.code, outcome.out, outcome.err) == (0, "pool\n", "")
    assert kernels(Trace.load(outcome.trace)).count("aten::mm") == 1


@pytest.mark.parametrize("delay", [0.5, 900])
def test_a_server_is_recorded_by_time(record: Record, delay: float) -> None:
    """A file beside the trace begins it before the delay is over."""
    program = """
import pathlib, threading, time, torch
from http.server import HTTPServer, BaseHTTPRequestHandler

def compute():
    while True:
        torch.ones(8, 8) @ torch.ones(8, 8)
        time.sleep(0.01)

threading.Thread(target=compute, daemon=True).start()
HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler).serve_forever()
"""
    if delay > 1:
        program = program.replace("def compute():", f"pathlib.Path('{{}}/{BEGIN}').touch()\n\ndef compute():")
    outcome = record(program, "--whole-program", f"--delay={delay}", "--duration=1")
    assert (outcome.code, outcome.out, outcome.err) == (143, "", "")  # 128 and SIGTERM, which it does not handle
    assert "aten::mm" in kernels(Trace.load(outcome.trace))


def test_a_program_that_runs_pytorchs_profiler_itself(record: Record) -> None:
    """A process has one such profiler: the program's own finds nothing."""
    program = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule

x = torch.ones(8, 8)
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1)) as own:
    for step in range(9):
        if step == 5:
            torch.cuda.profiler.start()
        x @ x
        own.step()
        if step == 7:
            torch.cuda.profiler.stop()
own.export_chrome_trace("own.json")
print(len(own.events()), len(own.key_averages()))
"""
    outcome = record(program)
    assert (outcome.code, outcome.out) == (0, "0 0\n")
    said = "recorder: the program's own torch.profiler stays off while this one records: it finds nothing"
    assert outcome.err.splitlines().count(said) == 1
    assert kernels(Trace.load(outcome.trace)).count("aten::mm") == 3  # steps 5, 6 and 7


def test_a_trace_that_cannot_be_written(record: Record) -> None:
    program = "import shutil, torch\ntorch.cuda.profiler.start()\nshutil.rmtree('{}')\ntorch.cuda.profiler.stop()\n"
    outcome = record(program + "print('on')")
    assert (outcome.code, outcome.out) == (NOTHING_RECORDED, "on\n")
    assert "trace.json.gz cannot be written" in outcome.err
    assert len(outcome.err.splitlines()) == 1


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
