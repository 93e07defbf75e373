from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer.capture.jobs import LOG, run_sweep
from nsys_analyzer.capture.nsys import ProfileOptions
from nsys_analyzer.capture.profilers import NsysProfiler, Profiler, TorchProfiler, make_import_variables
from nsys_analyzer.capture.targets import Target
from nsys_analyzer.cli.main import cli
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.machine import Nsys
from nsys_analyzer.system.process import JobResult, Progress
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
    command = TorchProfiler().record_command(program, Path("out"))
    assert command == [program[0], *before, *OUTPUT, "--", *after]


def test_what_the_recorder_is_told() -> None:
    command = TorchProfiler(memory=True, whole_program=True).record_command(["python", "train.py"], Path("out"))
    assert command[5:] == ["--memory", "--whole-program", "--", "train.py"]


@pytest.mark.parametrize("words", [[], ["-u"], ["-X"], ["-c", "pass"], ["-u", "-c", "pass"], ["-"]])
def test_no_script(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="records scripts and modules"):
        TorchProfiler().record_command(["python", *words], Path())


@pytest.mark.parametrize("program", ["./train.py", "torchrun", "bash"])
def test_no_python(program: str) -> None:
    with pytest.raises(ConfigurationError, match=f"records only Python programs, and {program} is not Python. Start"):
        TorchProfiler().record_command([program, "train.py"], Path())


def record(profiler: Profiler, program: tuple[str, ...], folder: Path, timeout_s: float = 300) -> JobResult:
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
        (f"output.write_bytes(gzip.compress({json.dumps(EVENTS).encode()!r}))", JobResult("ok"), True),
        (
            f"output.write_bytes(gzip.compress({json.dumps(EVENTS).encode()!r})); sys.exit('it broke')",
            JobResult("failed", "exit code 1: it broke"),
            True,
        ),
        ("sys.exit('it broke')", JobResult("failed", "exit code 1: it broke"), False),
    ],
)
def test_what_was_recorded_is_kept(
    code: str, ended: JobResult, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = recorder(tmp_path / "code", code)
    monkeypatch.chdir(tmp_path / "code")
    assert record(TorchProfiler(), program, tmp_path) == ended
    assert (tmp_path / "out/capture.json.gz").is_file() == kept
    if kept:
        assert Trace.load(tmp_path / "out/capture.json.gz").operations.names == ("aten::mm",)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has PyTorch, and not this package, as beside a tool of its own environment."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))
    return folder / "bin/python"


def test_a_python_without_this_package_finds_the_recorder(bare_python: Path, tmp_path: Path) -> None:
    """The recorder and what it imports; of the rest nothing is needed, and the program's own modules come first."""
    command = [str(bare_python), "-m", "nsys_analyzer.capture.recorder", "--help"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if alone.returncode == 0:
        pytest.skip("this package stands beside PyTorch as plain files")
    assert "No module named" in alone.stderr
    done = subprocess.run(
        command, cwd=tmp_path, env={**environment, **make_import_variables()}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the Python program to run" in " ".join(done.stdout.split())
    (tmp_path / "nsys_analyzer.py").write_text("where = 'the program'")
    own = [str(bare_python), "-c", "import nsys_analyzer; print(nsys_analyzer.where)"]
    done = subprocess.run(
        own, cwd=tmp_path, env={**environment, **make_import_variables()}, capture_output=True, text=True
    )
    assert done.stdout == "the program\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--no-annotate", "--whole-program")])
def test_a_program_whose_python_lacks_this_package_is_recorded(
    bare_python: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(20):\n    model(torch.ones(2, 8)).sum().backward()\n    optimizer.step()\n"
    )
    made = ["run", "--profiler", "torch", *words, "--", str(bare_python), "train.py"]
    done = CliRunner().invoke(cli, made, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "aten::addmm" in Trace.load(Path("runs/train/capture.json.gz")).operations.names


def test_a_trace_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = recorder(tmp_path / "code", "output.write_bytes(gzip.compress(b'{'))")
    monkeypatch.chdir(tmp_path / "code")
    ended = record(TorchProfiler(), program, tmp_path)
    assert ended.status == "failed"
    assert ended.message
    assert str(tmp_path / "out/capture.json.gz") in ended.message
    with gzip.open(tmp_path / "out/capture.json.gz") as kept:
        assert kept.read() == b"{"  # what there is stays


def record_with_nsys(folder: Path, program: tuple[str, ...], timeout_s: float = 300, **does: str) -> JobResult:
    nsys = Nsys(make_recording_nsys(folder, **does), "2022.4.2.1")
    return record(NsysProfiler(nsys, ProfileOptions(capture_range=False)), program, folder, timeout_s)


def test_a_crash_under_nsys_keeps_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    ended = record_with_nsys(tmp_path, ("sh", "-c", "echo 'ValueError: NaN' >&2; exit 9"))
    assert ended == JobResult("failed", "exit code 9: ValueError: NaN")
    assert (tmp_path / "out/capture.sqlite").is_file()


def test_a_time_out_under_nsys_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    assert record_with_nsys(tmp_path, ("sleep", "600"), 0.3) == JobResult("timeout", "stopped after 0.3 s")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {LOG, "manifest.json"}


def test_an_export_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "target-linux-x64/nsys"))
    let_time_pass(monkeypatch, lambda: 0.0)  # the program has all the time that it needs
    ended = record_with_nsys(tmp_path, ("true",), 1, export='[ -z "$output" ] || exec sleep 600')
    assert ended.status == "failed"
    assert ended.message
    assert ended.message.startswith(f"nsys export of {tmp_path}/out/capture.nsys-rep was stopped after 1 s")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"capture.nsys-rep", LOG, "manifest.json"}
