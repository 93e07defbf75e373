"""Tests what the launcher tells the ranks, and how it ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsys_analyzer.capture.launcher import make_launch_command, rank_log
from nsys_analyzer.system.process import Job, JobResult, run_job
from tests.support.sweeping import default_signals, let_time_pass, wait_for
from tests.test_process import gone, python

#: What each rank writes of itself: its process ID into a file of its name.
NOTED = "import os, pathlib, sys, time; rank = os.environ['RANK']; pathlib.Path(rank).write_text(str(os.getpid()));"
BOTH_THERE = "\nwhile not (pathlib.Path('0').exists() and pathlib.Path('1').exists()): time.sleep(0.01)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ranks(code: str, folder: Path, count: int = 2, timeout_s: float | None = None) -> JobResult:
    return run_job(Job(make_launch_command(python(code), count, folder), timeout_s=timeout_s), folder / "target.log")


def test_each_rank_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")  # of some other run
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks("import json, os; print(json.dumps(dict(os.environ)))", tmp_path, 3) == JobResult("ok")
    told = [json.loads(rank_log(tmp_path, rank).read_text()) for rank in range(3)]
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in told] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["OMP_NUM_THREADS"]) for one in told} == {("3", "3", "1")}
    ((address, port),) = {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}
    assert address == "127.0.0.1"
    assert int(port) > 1


def test_what_was_asked_of_threads_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    ranks("import os; print(os.environ['OMP_NUM_THREADS'])", tmp_path)
    assert rank_log(tmp_path, 1).read_text() == "7\n"


def test_a_rank_that_dies_takes_the_others_along_and_is_named(tmp_path: Path) -> None:
    code = NOTED + BOTH_THERE + "if rank == '1': raise ValueError('no data')\nprint('on'); time.sleep(600)"
    assert ranks(code, tmp_path) == JobResult("failed", "exit code 1: rank 1: ValueError: no data")
    assert gone(int(Path("0").read_text()))


def test_the_first_to_fail_is_named_not_those_that_fail_for_it(tmp_path: Path) -> None:
    waits = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('peer is gone'));"
    code = waits + NOTED + BOTH_THERE + "if rank == '1': sys.exit('full')\ntime.sleep(600)"
    assert ranks(code, tmp_path) == JobResult("failed", "exit code 1: rank 1: full")
    assert rank_log(tmp_path, 0).read_text() == "peer is gone\n"  # it was asked, not killed


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    code = NOTED + "print('at work', flush=True); rank == '0' and os.kill(os.getpid(), 11)"
    assert ranks(code, tmp_path) == JobResult("failed", f"exit code {128 + signal.SIGSEGV}: rank 0: at work")


def test_memory_that_ran_out_on_one_rank_is_that_of_the_run(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text("MemoryError of an earlier run\n")
    code = NOTED + "rank == '1' and sys.exit('torch.OutOfMemoryError: CUDA out of memory.')"
    assert ranks(code, tmp_path) == JobResult("oom", "rank 1: torch.OutOfMemoryError: CUDA out of memory.")
    assert ranks(NOTED + "sys.exit(3 * (rank == '0'))", tmp_path) == JobResult(
        "failed", "exit code 3: rank 0: it printed nothing"
    )


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ended = run_job(Job(make_launch_command(["/no/such", "x"], 2, tmp_path)), tmp_path / "target.log")
    assert ended == JobResult("failed", "/no/such x cannot be run (No such file or directory)")


def test_a_time_out_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_time_pass(monkeypatch, lambda: 9.0 if all(Path(rank).exists() for rank in ("0", "1")) else 0.0)
    code = (
        NOTED.replace("write_text(", "with_suffix('.new').write_text(")
        + "os.rename(rank + '.new', rank); time.sleep(600)"
    )
    assert ranks(code, tmp_path, timeout_s=3) == JobResult("timeout", "stopped after 3 s")
    assert all(gone(int(Path(rank).read_text())) for rank in ("0", "1"))


def test_alone_it_prints_what_the_ranks_print_and_ends_with_them() -> None:
    command = make_launch_command(python(NOTED + "os.write(1, b'hello\\n'); time.sleep(600)"), 2)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=default_signals,
    ) as tool:
        assert tool.stdout
        assert [tool.stdout.readline() for _ in range(2)] == ["hello\n"] * 2
        wait_for(lambda: all(Path(rank).exists() and Path(rank).read_text() for rank in ("0", "1")))
        tool.send_signal(signal.SIGINT)
        assert tool.wait(60) != 0
    assert all(gone(int(Path(rank).read_text())) for rank in ("0", "1"))


def test_no_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run(make_launch_command(["true"], 0)).returncode == 2
    assert "--nproc must be at least 1" in capfd.readouterr().err
