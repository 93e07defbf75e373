from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from nsys_analyzer.capture.jobs import LOG, run_sweep
from nsys_analyzer.capture.nsys import ProfileOptions
from nsys_analyzer.capture.profilers import NsysProfiler, Profiler, TorchProfiler
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.targets import Target
from nsys_analyzer.system.nsys import Nsys
from nsys_analyzer.system.process import Progress, Result
from nsys_analyzer.trace.trace import Trace
from tests.support.sweeping import let_time_pass, make_recording_nsys

OUTPUT = ["-m", "nsys_analyzer.capture.recorder", "--output", "out/capture.json.gz"]


@pytest.mark.parametrize(
    ("program", "before", "after"),
    [
        (["python", "train.py", "-u"], [], ["train.py", "-u"]),
        (["/usr/bin/python3.12", "-m", "my.trainer", "--lr", "1"], [], ["-m", "my.trainer", "--lr", "1"]),
        (["python", "-u", "-X", "dev", "-W", "error", "train.py"], ["-u", "-X", "dev", "-W", "error"], ["train.py"]),
        (["python", "-Xdev", "-m", "trainer"], ["-Xdev"], ["-m", "trainer"]),
    ],
)
def test_the_recorder_takes_the_scripts_place(program: list[str], before: list[str], after: list[str]) -> None:
    command = TorchProfiler().command(program, Path("out"))
    assert command == [program[0], *before, *OUTPUT, "--", *after]


def test_what_the_recorder_is_told() -> None:
    command = TorchProfiler(memory=True, whole_program=True).command(["python", "train.py"], Path("out"))
    assert command[5:] == ["--memory", "--whole-program", "--", "train.py"]


@pytest.mark.parametrize("words", [[], ["-u"], ["-X"], ["-c", "pass"], ["-u", "-c", "pass"], ["-"]])
def test_no_script(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="runs scripts and modules"):
        TorchProfiler().command(["python", *words], Path())


@pytest.mark.parametrize("program", ["./train.py", "torchrun", "bash"])
def test_no_python(program: str) -> None:
    with pytest.raises(ConfigurationError, match=f"runs Python programs, and {program} is none. Start it with python"):
        TorchProfiler().command([program, "train.py"], Path())


def record(profiler: Profiler, program: tuple[str, ...], folder: Path, timeout_s: float = 300) -> Result:
    """Runs a program under a profiler, as a target called "out"."""
    quiet = Progress(lambda *_: None, lambda *_: None)
    (result,) = run_sweep([Target("out", program, Run())], folder, profiler, timeout_s, quiet)
    return result


def recorder(folder: Path, code: str) -> tuple[str, str]:
    """A program that takes the recorder's place: a module of its name, found first."""
    module = folder / "nsys_analyzer/capture/recorder.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent.parent, module.parent):
        (package / "__init__.py").touch()
    module.write_text(f"import gzip, pathlib, sys\noutput = pathlib.Path(sys.argv[2])\n{code}")
    return sys.executable, "train.py"


EVENTS = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}


@pytest.mark.parametrize(
    ("code", "ended", "kept"),
    [
        (f"output.write_bytes(gzip.compress({json.dumps(EVENTS).encode()!r}))", Result("ok"), True),
        (
            f"output.write_bytes(gzip.compress({json.dumps(EVENTS).encode()!r})); sys.exit('it broke')",
            Result("failed", "exit code 1: it broke"),
            True,
        ),
        ("sys.exit('it broke')", Result("failed", "exit code 1: it broke"), False),
    ],
)
def test_what_was_recorded_is_kept(
    code: str, ended: Result, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = recorder(tmp_path / "code", code)
    monkeypatch.chdir(tmp_path / "code")
    assert record(TorchProfiler(), program, tmp_path) == ended
    assert (tmp_path / "out/capture.json.gz").is_file() == kept
    if kept:
        assert Trace.load(tmp_path / "out/capture.json.gz").operations.names == ("aten::mm",)


def test_a_trace_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = recorder(tmp_path / "code", "output.write_bytes(gzip.compress(b'{'))")
    monkeypatch.chdir(tmp_path / "code")
    ended = record(TorchProfiler(), program, tmp_path)
    assert ended.status == "failed"
    assert ended.message
    assert str(tmp_path / "out/capture.json.gz") in ended.message
    with gzip.open(tmp_path / "out/capture.json.gz") as kept:
        assert kept.read() == b"{"  # what there is stays


def record_with_nsys(folder: Path, program: tuple[str, ...], timeout_s: float = 300, **does: str) -> Result:
    nsys = Nsys(make_recording_nsys(folder, **does), "2022.4.2.1")
    return record(NsysProfiler(nsys, ProfileOptions(capture_range=False)), program, folder, timeout_s)


def test_a_crash_under_nsys_keeps_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    ended = record_with_nsys(tmp_path, ("sh", "-c", "echo 'ValueError: NaN' >&2; exit 9"))
    assert ended == Result("failed", "exit code 9: ValueError: NaN")
    assert (tmp_path / "out/capture.sqlite").is_file()


def test_a_time_out_under_nsys_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    assert record_with_nsys(tmp_path, ("sleep", "600"), 0.3) == Result("timeout", "stopped after 0.3 s")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {LOG, "manifest.json"}


def test_an_export_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    let_time_pass(monkeypatch, lambda: 0.0)  # the program has all the time that it needs
    ended = record_with_nsys(tmp_path, ("true",), 1, export='[ -z "$output" ] || exec sleep 600')
    assert ended.status == "failed"
    assert ended.message
    assert ended.message.startswith(f"nsys export of {tmp_path}/out/capture.nsys-rep was stopped after 1 s")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"capture.nsys-rep", LOG, "manifest.json"}
