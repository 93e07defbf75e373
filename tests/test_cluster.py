"""Captures read side by side, here or on Dask: the same rows as in turn, whatever becomes of a worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsys_analyzer.cli.options import quote_command_line
from nsys_analyzer.errors import ClusterError, TraceError
from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.system import cluster
from nsys_analyzer.system.cluster import MIN_PARALLEL_WORK_S, NO_SCHEDULER, SEQUENTIAL, OnTaskDone, Workers
from tests.conftest import Main
from tests.support.export import Export, training_step
from tests.support.sweeping import default_signals

MB = 1_000_000


@dataclass(frozen=True)
class Text:
    """A task: a file, whose text is the result."""

    path: Path
    seconds: float = 0.0
    memory_bytes: int = MB


@dataclass(frozen=True)
class SeenByOne:
    """A task whose file is there for one process alone."""

    there: Path
    process: int
    seconds: float = 0.0
    memory_bytes: int = MB

    @property
    def path(self) -> Path:
        return self.there if os.getpid() == self.process else self.there.with_name("missing")


def text_of(task: Text) -> str:
    return task.path.read_text()


def doubled(task: Text) -> str:
    """Fails where the file says so."""
    if task.path.read_text() == "bad":
        raise TraceError("bad file", "Give another")
    return text_of(task) * 2


def deadly(task: Text) -> str:
    """Ends the process that reads a file which says "deadly"."""
    if task.path.read_text() == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return text_of(task)


def place(_: Text) -> tuple[int, str, str | None]:
    """Where a task is done: the process, its folder and its threads."""
    return os.getpid(), str(Path.cwd()), os.environ.get("OMP_NUM_THREADS")


def ends(pid: int, task: Text) -> str:
    os.kill(pid, signal.SIGKILL)
    return text_of(task)


def first_dies(marker: Path, function: Callable[[Any], Any], task: Any) -> Any:
    """Kills the process that does the first of all tasks; the marker is who was it."""
    try:
        with marker.open("x") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
    return function(task)


def texts(folder: Path, *contents: str) -> list[Text]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return [Text(path) for path in paths]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A scheduler with two workers of one process each, started in another folder than the tests'."""
    import dask
    from distributed import LocalCluster

    keep = dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    with keep, tempfile.TemporaryDirectory() as folder, LocalCluster(
        n_workers=2, threads_per_worker=1, local_directory=folder, dashboard_address=None,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0", "allowed_failures": 1},
    ) as running:  # fmt: skip
        yield running.scheduler_address


# --- how many workers, and whether any ---


def test_in_turn(tmp_path: Path) -> None:
    """Results in the order of tasks; the one who shows progress is told of each."""
    seen: list[int] = []

    @contextmanager
    def shown(total: int) -> Iterator[OnTaskDone]:
        yield lambda: seen.append(total)

    assert Workers(NO_SCHEDULER, shown).map(doubled, texts(tmp_path, "b", "a")) == ["bb", "aa"]
    assert seen == [2, 2]
    with pytest.raises(TraceError, match="bad file"):
        SEQUENTIAL.map(doubled, texts(tmp_path, "a", "bad"))


@pytest.mark.parametrize(
    ("seconds", "workers"),
    [((MIN_PARALLEL_WORK_S * 0.4,) * 2, 1), ((MIN_PARALLEL_WORK_S * 0.6,) * 2, 2), ((99.0,), 1), ((9.0,) * 20, 8)],
)
def test_only_several_files_that_take_long_are_worth_processes(
    seconds: Sequence[float], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert cluster._count_local_workers([Text(Path("a"), one) for one in seconds]) == workers


def test_an_address_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ClusterError, match=r"not installed.* pip install 'nsys-analyze\[cluster\]'"):
        Workers("tcp://127.0.0.1:1").map(text_of, texts(tmp_path, "a"))


@pytest.mark.parametrize("words", [["--scheduler", "tcp://host:1"], ["--scheduler=tcp://host:1"], []])
def test_a_report_does_not_say_where_its_captures_were_read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nsys-analyze", "report", *words, "many", "-o", "-"])
    assert quote_command_line() == "nsys-analyze report many -o -"


# --- schedulers that do not do ---


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_TIMEOUT_S", 0.5)
    with pytest.raises(ClusterError, match=r"No Dask scheduler answers at tcp://127.0.0.1:1 .*dask scheduler"):
        Workers("tcp://127.0.0.1:1").map(text_of, texts(tmp_path, "a"))


def test_a_program_that_accepts_and_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "tcp://{}:{}".format(*silent.getsockname())
        with pytest.raises(ClusterError, match=rf"answers at {address} \(no answer within 0.5 s\)\. .*dask sch"):
            Workers(address).map(text_of, texts(tmp_path, "a"))


@pytest.mark.slow
def test_a_scheduler_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import LocalCluster

    monkeypatch.setattr(cluster, "_ANSWER_TIMEOUT_S", 2)
    with LocalCluster(
        n_workers=0, threads_per_worker=1, dashboard_address=None, scheduler_kwargs={"dashboard_address": "127.0.0.1:0"}
    ) as running, pytest.raises(ClusterError, match=r"has no workers\. .*dask worker tcp://"):  # fmt: skip
        Workers(running.scheduler_address).map(text_of, texts(tmp_path, "a"))


@dataclass(frozen=True)
class Programs:
    """A scheduler and a worker that nobody starts again, each a process."""

    address: str
    scheduler: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    monkeypatch.setattr(cluster, "_ANSWER_TIMEOUT_S", 300)  # a busy machine starts them slowly
    noted = tmp_path / "scheduler.json"
    words = {
        "scheduler": ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"],
        "worker": ["--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path)],
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{name}", "--scheduler-file", noted, *words[name]],
            stderr=subprocess.DEVNULL,
        )
        for name in words
    ]
    try:
        while not (noted.exists() and noted.read_text().endswith("}")) and started[0].poll() is None:
            time.sleep(0.1)
        yield Programs(json.loads(noted.read_text())["address"], *started)
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_scheduler_that_ends(programs: Programs, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="The Dask scheduler is gone"):
        Workers(programs.address).map(partial(ends, programs.scheduler.pid), texts(tmp_path, "a"))


@pytest.mark.slow
def test_workers_of_another_version(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version("nsys-analyze")
    monkeypatch.setattr(metadata, "version", lambda _: "9.9")
    with pytest.raises(ClusterError, match=rf"has nsys-analyze {installed}, and this command is 9\.9\. .*==9\.9"):
        Workers(address).map(text_of, texts(tmp_path, "a"))


# --- tasks on workers ---


@pytest.mark.slow
def test_a_relative_path_is_relative_to_the_command(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tmp_path, "here")
    monkeypatch.chdir(tmp_path)
    assert Workers(address).map(text_of, [Text(Path("0.txt"))]) == ["here"]
    ((pid, folder, _),) = Workers(address).map(place, [Text(Path("0.txt"))])
    assert (pid != os.getpid(), folder) == (True, str(tmp_path))


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_file(address: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(
        ClusterError,
        match=rf"does not see {tmp_path}/missing\. Start workers on machines where the captures have the same paths",
    ):
        Workers(address).map(text_of, [SeenByOne(tmp_path / "a", os.getpid())])  # type: ignore[type-var]


@pytest.mark.slow
def test_a_task_whose_worker_is_killed_is_done_again(address: str, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    tasks = texts(tmp_path, *"abcdefghij")
    assert Workers(address).map(partial(first_dies, marker, text_of), tasks) == list("abcdefghij")
    assert int(marker.read_text()) != os.getpid()


# --- on workers of a scheduler and on processes of this machine ---


@pytest.fixture(params=["dask", "here"])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(cluster, "_count_local_workers", lambda _: 2)
    return Workers(request.getfixturevalue("address") if request.param == "dask" else None)


@pytest.mark.slow
def test_results_and_errors_are_those_of_the_function(workers: Workers, tmp_path: Path) -> None:
    assert workers.map(doubled, texts(tmp_path, *"hgfedcba")) == [2 * letter for letter in "hgfedcba"]
    assert workers.map(doubled, []) == []
    with pytest.raises(TraceError, match="bad file") as raised:
        workers.map(doubled, texts(tmp_path, "a", "bad"))
    assert raised.value.hint == "Give another"


@pytest.mark.slow
def test_a_task_that_kills_its_workers_is_one_line(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"was killed. Memory may have run out.* --scheduler none"):
        workers.map(deadly, texts(tmp_path, "deadly", *"abc"))


@pytest.mark.slow
def test_processes_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They share its threads, and are gone without trace."""
    monkeypatch.setattr(cluster, "_count_local_workers", lambda _: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    placed = Workers().map(place, texts(tmp_path, *"abcdefgh"))
    pids, folders, threads = map(set, zip(*placed, strict=True))
    assert (folders, threads) == ({str(Path.cwd())}, {"3"})  # 6 cores ÷ 2 workers
    assert not any(map(psutil.pid_exists, pids))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_interrupt_ends_all_of_it(tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    """As Ctrl-C sends it: to the command and to every process that it has started."""
    for number in range(60):  # at 0.25 s and more each, enough for processes
        shutil.copyfile(real_capture("jax_mlp"), tmp_path / f"{number}.sqlite")
    command = [sys.executable, "-m", "nsys_analyzer", "report", tmp_path, "-o", tmp_path / "report.md"]
    with subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    ) as process:
        watched = psutil.Process(process.pid)
        workers: list[psutil.Process] = []
        while process.poll() is None and len(workers) < min(2, os.cpu_count() or 1):
            time.sleep(0.05)
            workers = [one for one in watched.children() if "spawn_main" in " ".join(one.cmdline())]
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr
        assert process.stderr.read().strip() == "Aborted!"
    assert process.returncode == 1
    assert not [one for one in workers if one.is_running()]
    assert not (tmp_path / "report.md").exists()


# --- reports ---


class FirstDies(Workers):
    """Workers of which the first to read anything is killed."""

    def map(self, function: Any, tasks: Any) -> Any:
        return super().map(partial(first_dies, Path("killed"), function), tasks)


@pytest.fixture
def many(tmp_path: Path, real_capture: Callable[[str], Path]) -> Path:
    """A folder of good captures, two of one name, and of files that cannot be read."""
    folder = tmp_path / "many"
    (folder / "sub").mkdir(parents=True)
    names = ("train_small256", "jax_mlp", "nccl_init", "graph_small256", "functions_autograd_gpt2", "oom_fp32")
    for number, name in enumerate(names):
        (folder / f"{name}_{number}.sqlite").symlink_to(real_capture(name))
    for place in (folder, folder / "sub"):
        training_step(Export().gpu()).write(place / "twice.sqlite")
    (folder / "damaged.sqlite").write_bytes(b"no database")
    (folder / "nowhere.sqlite").symlink_to("missing.sqlite")
    (folder / "run.nsys-rep").write_bytes(b"")
    return folder


@pytest.mark.slow
def test_a_report_is_the_same_to_the_last_byte(
    address: str, many: Path, monkeypatch: pytest.MonkeyPatch, run_main: Main
) -> None:
    """In turn, on workers, and where one of these is killed: markdown and JSON, failed rows and their messages too."""
    monkeypatch.chdir(many.parent)
    reports = [
        build_report(make_evidence(gather([Path(many.name)], workers=workers), "command"))
        for workers in (SEQUENTIAL, Workers(address), FirstDies(address))
    ]
    assert Path("killed").exists()
    for name in ("markdown", "json"):
        in_turn, *others = (RENDERERS[name].render(report, {}) for report in reports)
        assert others == [in_turn, in_turn]
    printed = [run_main("report", "many", "--format", "json", "--scheduler", one) for one in ("none", address)]
    assert printed[0] == printed[1]
    assert printed[0].code == 0
    explained = [run_main("explain", "many", "--scheduler", one).out for one in ("none", address)]
    assert explained[0] == explained[1] != ""
