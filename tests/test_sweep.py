from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.capture.jobs import lock_folder, run_sweep, select_remaining_targets
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.capture.targets import Ranks, Target
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.atomic_write import UNFINISHED_MARK
from nsys_analyzer.system.process import JobResult, Progress
from tests.support.export import Export, training_step

#: A target that writes the results it is told to, as our own targets do, and ends as it is told to.
SCRIPT = """
import json, pathlib, sys
results, code = json.loads(sys.argv[1]), int(sys.argv[2])
if results and "--results" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--results") + 1]).write_text(json.dumps(results))
print("I was run")
sys.exit(code)
"""
OK = {"status": "ok", "message": None, "times_ms": {"forward": [1.0, 3.0], "step": [2.0, 4.0]}, "torch": "2.13.0"}
OOM = {"status": "oom", "message": "CUDA out of memory. Tried to allocate 2 GiB", "times_ms": {}}
DESCRIBED: dict[str, Any] = {
    "model": "small",
    "context_length": 256,
    "batch_size": 4,
    "mode": "forward",
    "precision": "fp32",
}


@dataclass(frozen=True)
class FakeProfiler:
    """Runs the program and leaves a tiny trace, unless the program fails under it."""

    name: str = "nsys"
    code: int = 0
    suffix: str = ".sqlite"
    is_server: bool = False

    def manifest_entries(self) -> dict[str, str]:
        return {"nsys": "2025.3.2"}

    def record_command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        del folder, ranks
        return [*program[:-1], str(self.code)]

    def export_capture(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        del log, timeout_s
        if not self.code:
            training_step(Export().gpu()).write(folder / f"{stem}.sqlite")


class Told:
    """Keeps what a sweep tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress = Progress(
            lambda name, work: self.lines.append(f"{name}: {work}"),
            lambda name, ended, _: self.lines.append(f"{name}: {ended.status}"),
        )


def target(name: str, results: dict[str, Any] | None = None, code: int = 0, **described: Any) -> Target:
    program = (sys.executable, "-c", SCRIPT, json.dumps(OK if results is None else results), str(code))
    return Target(name, program, Run(**{**DESCRIBED, **described}), timed=True)


def sweep(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None = None
) -> tuple[list[JobResult], list[str]]:
    told = Told()
    with lock_folder(folder):
        return run_sweep(targets, folder, profiler, 300, told.progress), told.lines


def manifest(folder: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / name / "manifest.json").read_text())
    return read


def timings(folder: Path) -> list[dict[str, str]]:
    with (folder / "timings.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_target_is_timed_profiled_and_described(tmp_path: Path) -> None:
    ended, told = sweep([target("one")], tmp_path, FakeProfiler())
    assert ended == [JobResult("ok")]
    assert told == ["one: timing", "one: profiling with nsys", "one: ok"]
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"capture.sqlite", "manifest.json", "target.log"}
    assert (tmp_path / "one/target.log").read_text() == "I was run\nI was run\n"  # timed, then profiled
    said = manifest(tmp_path, "one")
    assert {key: said[key] for key in ("model", "status", "profiler", "nsys", "torch", "capture")} == {
        "model": "small", "status": "ok", "profiler": "nsys", "nsys": "2025.3.2", "torch": "2.13.0",
        "capture": "capture.sqlite",
    }  # fmt: skip
    forward, step = timings(tmp_path)
    # 1 and 3 ms: mean 2, sample standard deviation √2 = 1.414214
    assert (forward["capture"], forward["phase"], forward["status"]) == ("one", "forward", "ok")
    assert [forward[f"{name}_ms"] for name in ("mean", "std", "min", "median", "max")] == [
        "2.000000", "1.414214", "1.000000", "2.000000", "3.000000",
    ]  # fmt: skip
    assert (step["phase"], step["mean_ms"]) == ("step", "3.000000")


def test_a_target_spells_its_mode_as_it_likes(tmp_path: Path) -> None:
    sweep([target("one", {**OOM, "mode": "forward-backward"}, 3, mode="forward+backward")], tmp_path)
    assert [row["phase"] for row in timings(tmp_path)] == ["forward", "loss", "backward", "step"]


def test_a_program_that_times_nothing(tmp_path: Path) -> None:
    program = Target("train", (sys.executable, "-c", SCRIPT, "{}", "0"), Run())
    ended, told = sweep([program], tmp_path, FakeProfiler())
    assert (ended, told) == ([JobResult("ok")], ["train: profiling with nsys", "train: ok"])
    assert timings(tmp_path) == []


def test_nothing_is_run_twice(tmp_path: Path) -> None:
    targets = [target("one"), target("two", OOM, 3), target("three", {}, 1), target("four")]
    sweep(targets[:3], tmp_path)
    # Out of memory is an answer; a crash may have been an accident.
    assert [one.name for one in select_remaining_targets(targets, tmp_path, None, resume=True)] == ["three", "four"]
    assert select_remaining_targets(targets, tmp_path, None, resume=False) == targets
    with pytest.raises(ConfigurationError, match=r"one already exists. --resume keeps .* --rerun"):
        select_remaining_targets(targets, tmp_path, None, resume=None)


def test_what_was_only_timed_is_run_again_with_a_profiler(tmp_path: Path) -> None:
    sweep([target("one")], tmp_path)
    assert [one.name for one in select_remaining_targets([target("one")], tmp_path, FakeProfiler(), resume=True)] == [
        "one"
    ]


def test_a_rerun_replaces_the_whole_folder(tmp_path: Path) -> None:
    sweep([target("one")], tmp_path, FakeProfiler())
    sweep([target("one", {**OK, "times_ms": {"forward": [7.0]}})], tmp_path)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"manifest.json", "target.log"}
    (row,) = timings(tmp_path)
    assert (row["mean_ms"], row["std_ms"]) == ("7.000000", "")


def test_an_interrupt_leaves_whole_folders_only(tmp_path: Path) -> None:
    class Interrupted(FakeProfiler):
        def export_capture(self, folder: Path, *_: Any) -> None:
            (folder / "capture.sqlite").write_bytes(b"half")
            raise KeyboardInterrupt

    sweep([target("one")], tmp_path, FakeProfiler())
    with pytest.raises(KeyboardInterrupt):
        sweep([target("two")], tmp_path, Interrupted())
    assert {path.name for path in tmp_path.iterdir()} == {"one", "timings.csv", ".lock"}
    sweep([target("two")], tmp_path, FakeProfiler())
    assert {row["capture"] for row in timings(tmp_path)} == {"one", "two"}


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_kill_while_a_result_is_put_in_place(moment: str, tmp_path: Path) -> None:
    """The older result is back, or the new one is there; nothing hidden stays."""
    sweep([target("one")], tmp_path, FakeProfiler())
    part, old, place = tmp_path / ".one.part", tmp_path / ".one.old", tmp_path / "one"
    shutil.copytree(place, part)
    if moment == "between":
        place.rename(old)
    elif moment == "after":
        part.rename(old)
    assert select_remaining_targets([target("one")], tmp_path, FakeProfiler(), resume=True) == []
    assert {path.name for path in tmp_path.iterdir()} == {"one", "timings.csv", ".lock"}
    assert manifest(tmp_path, "one")["status"] == "ok"


def test_half_a_trace_of_a_recorder_that_was_killed_goes(tmp_path: Path) -> None:
    class Killed(FakeProfiler):
        def export_capture(self, folder: Path, *_: Any) -> None:
            (folder / ".capture-export-abcd_123").mkdir()
            (folder / ".capture-export-abcd_123/plain.json").write_text("half")
            (folder / ".capture-export-abcd_123" / UNFINISHED_MARK).touch()

    sweep([target("one")], tmp_path, Killed(code=9))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"manifest.json", "target.log"}


def test_two_sweeps_in_one_folder(tmp_path: Path) -> None:
    message = rf"Another sweep uses {tmp_path} \(process {os.getpid()}\)"
    with lock_folder(tmp_path), pytest.raises(ConfigurationError, match=message), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):  # free again
        pass


def test_timings_are_written_anew_from_what_is_there(tmp_path: Path) -> None:
    """An earlier sweep may have been killed between a result and its timings."""
    sweep([target("one")], tmp_path)
    (tmp_path / "timings.csv").unlink()
    half = tmp_path / ".two.part"
    half.mkdir()
    (half / "manifest.json").write_text((tmp_path / "one/manifest.json").read_text())  # not finished: no name yet
    sweep([], tmp_path)
    assert {row["capture"] for row in timings(tmp_path)} == {"one"}


def test_a_target_that_writes_no_times_has_failed(tmp_path: Path) -> None:
    silent = Target("silent", (sys.executable, "-c", "print('bye')"), Run(**DESCRIBED), timed=True)
    ended, _ = sweep([silent], tmp_path, FakeProfiler())
    assert ended == [JobResult("failed", "it ended without an error, but wrote no times: bye")]
    assert timings(tmp_path)[0]["status"] == "failed"


@pytest.mark.parametrize("text", [None, "{", "[]", '{"name": "an app"}'])
@pytest.mark.parametrize("resume", [True, False, None])
def test_what_stands_in_a_targets_place_is_not_replaced(text: str | None, resume: bool | None, tmp_path: Path) -> None:
    place = tmp_path / "one"
    place.mkdir()
    if text is not None:
        (place / "manifest.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"one exists, and .*Move it away, or choose another --output-dir"):
        select_remaining_targets([target("one")], tmp_path, None, resume)


def test_another_profiler_does_not_replace_what_one_recorded(tmp_path: Path) -> None:
    sweep([target("one")], tmp_path, FakeProfiler())
    with pytest.raises(ConfigurationError, match="one was recorded by nsys, and torch would replace it"):
        select_remaining_targets([target("one")], tmp_path, FakeProfiler(name="torch"), resume=True)
