"""Tests a program that is started as several ranks, and the results of each, with a fake nsys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.capture.jobs import select_remaining_targets
from nsys_analyzer.capture.nsys import ProfileOptions
from nsys_analyzer.capture.profilers import NsysProfiler, TorchProfiler
from nsys_analyzer.capture.targets import Annotation, Ranks, Target, program_target
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.inputs.manifest import read_manifest
from nsys_analyzer.inputs.unprofiled_times import read_sweep_timings, read_timings
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.system.machine import Nsys
from nsys_analyzer.system.process import JobResult
from nsys_analyzer.text import plain
from tests.conftest import ROOT
from tests.support.sweeping import make_recording_nsys
from tests.test_sweep import sweep

#: Writes times as the hooks do where they are wanted: 1 and 3 ms on rank 0, 2 and 4 ms on rank 1.
PROGRAM = """
import json, os, pathlib
rank = int(os.environ["RANK"])
results = json.loads(os.environ["NSYS_ANALYZE_ANNOTATION"])["results"]
print("rank", rank, "timed" if results else "profiled")
if results:
    times = {"step": [1.0 + rank, 3.0 + rank]}
    path = pathlib.Path(results.replace("%q{RANK}", str(rank)))
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"gpu": f"GPU {rank}", "times_ms": times}))
    unfinished.replace(path)
"""

#: Exports a step of each rank that the launcher has started.
EXPORT = """
import json, pathlib, sys
from tests.support.export import GEMM, Export
output, pids = map(pathlib.Path, sys.argv[1:])
export = Export().gpu()
for rank, pid in enumerate(json.loads(pids.read_text())):
    export.range("step", 0, 1000, tid=pid, pid=pid)
    export.kernel(GEMM, 20, 30, 130, tid=pid, pid=pid, device=1 - rank)
export.write(output)
"""


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NsysProfiler:
    return recording(tmp_path, monkeypatch)


def recording(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> NsysProfiler:
    path = make_recording_nsys(folder, **more)
    monkeypatch.setenv("NSYS", str(path))  # exports, too
    return NsysProfiler(Nsys(path, "2022.4.2.1"), ProfileOptions())


def target(folder: Path, ranks: Ranks | None, program: str = PROGRAM) -> Target:
    script = folder / "train.py"
    script.write_text(program)
    return program_target((sys.executable, str(script)), Run(batch_size=2), Annotation(1, 2), ranks)


def manifest(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def test_each_rank_leaves_a_capture_a_manifest_and_its_times(tmp_path: Path, nsys: NsysProfiler) -> None:
    """Which find each other, and are not run again."""
    runs, one = tmp_path / "runs", target(tmp_path, Ranks(2))
    (ended,), told = sweep([one], runs, nsys)
    assert ended == JobResult("ok"), ended
    assert told == ["train: timing", "train: profiling with nsys", "train: ok"]
    of_ranks = {f"{stem}_rank{rank}" for stem in ("capture", "target") for rank in (0, 1)}
    suffixes = {"capture": (".nsys-rep", ".sqlite", ".manifest.json"), "target": (".log",)}
    expected = {f"{stem}{suffix}" for stem in of_ranks for suffix in suffixes[stem.partition("_")[0]]}
    assert {path.name for path in (runs / "train").iterdir()} == {"target.log", *expected}
    assert (runs / "train/target_rank1.log").read_text() == "rank 1 timed\nrank 1 profiled\n"
    said = [read_manifest(runs / f"train/capture_rank{rank}.manifest.json") for rank in (0, 1)]
    assert [(run.rank, run.world_size, run.capture, run.gpu, run.batch_size) for run in said] == [
        (0, 2, "capture_rank0.sqlite", "GPU 0", 2), (1, 2, "capture_rank1.sqlite", "GPU 1", 2),
    ]  # fmt: skip
    # (1 + 3) ÷ 2 and (2 + 4) ÷ 2
    for timings in (read_sweep_timings(runs), read_timings(runs / "timings.csv")):
        captures = gather([runs], timings=timings).captures
        found = {each.name: (each.rank, each.unprofiled and each.unprofiled.phases["step"].mean) for each in captures}
        assert found == {"train_rank0": (0, 2.0), "train_rank1": (1, 3.0)}
    assert select_remaining_targets([one], runs, nsys, resume=True) == []
    assert select_remaining_targets([one], runs, nsys, resume=False) == [one]
    with pytest.raises(ConfigurationError, match="already exists"):
        select_remaining_targets([one], runs, nsys, resume=None)
    with pytest.raises(ConfigurationError, match=r"made with other options: python -m .*launcher --nproc 2"):
        select_remaining_targets([target(tmp_path, Ranks(3))], runs, nsys, resume=True)
    with pytest.raises(ConfigurationError, match="made with other options"):
        select_remaining_targets([target(tmp_path, None)], runs, nsys, resume=True)
    # All ranks of one run are of one group, and those of another run of another one.
    sweep([one], tmp_path / "again", nsys)
    groups = [run.group for run in (*said, read_manifest(tmp_path / "again/train/capture_rank0.manifest.json"))]
    assert all(groups)
    assert groups[0] == groups[1] != groups[2]


def test_one_report_holds_all_ranks_and_keeps_their_times(tmp_path: Path, nsys: NsysProfiler) -> None:
    runs = tmp_path / "runs"
    assert sweep([target(tmp_path, Ranks(2, in_one_capture=True))], runs, nsys)[0] == [JobResult("ok")]
    captures = {path.name for path in (runs / "train").iterdir() if path.name.startswith("capture")}
    assert captures == {"capture.nsys-rep", "capture.sqlite"}
    said = manifest(runs / "train/manifest.json")
    assert ("rank" in said, said["world_size"], said["capture"]) == (False, 2, "capture.sqlite")
    assert said["timings"]["times_ms"] == {"step": [1.0, 3.0]}
    assert [one["times_ms"]["step"] for one in said["rank_timings"]] == [[1.0, 3.0], [2.0, 4.0]]
    assert len(set(said["rank_pids"])) == 2
    # The process of this export is none of them.
    (capture,) = gather([runs], timings=read_sweep_timings(runs)).captures
    assert (capture.rank, capture.unprofiled) == (None, None)
    (warning,) = (text for one in say_all(capture.warnings) if "none of the rows" in (text := plain(one)))
    assert "they differ in rank (0, 1) (give a file with" in warning


def test_each_rank_of_one_report_has_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the export are those that ran, and nothing in it tells their ranks: rank 1 uses device 0."""
    script = tmp_path / "export.py"
    script.write_text(EXPORT)
    export = f'PYTHONPATH="{ROOT}" "{sys.executable}" "{script}" "$output" "{tmp_path}/pids"'
    after = f'echo report > "$output.nsys-rep"; cp "$(dirname "$output")/process_ids.json" "{tmp_path}/pids"'
    nsys = recording(tmp_path, monkeypatch, export=export, after=after)
    runs = tmp_path / "runs"
    (ended,), _ = sweep([target(tmp_path, Ranks(2, in_one_capture=True))], runs, nsys)
    assert ended == JobResult("ok"), ended
    captures = gather([runs], timings=read_sweep_timings(runs)).captures
    found = {one.title: (one.rank, one.unprofiled and one.unprofiled.phases["step"].mean) for one in captures}
    # (1 + 3) ÷ 2 and (2 + 4) ÷ 2
    assert found == {"train rank 0": (0, 2.0), "train rank 1": (1, 3.0)}
    assert not any("none of the rows" in warning for one in captures for warning in map(plain, say_all(one.warnings)))


def test_times_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert sweep([target(tmp_path, Ranks(2))], runs)[0] == [JobResult("ok")]
    captures = gather([runs], timings=read_sweep_timings(runs)).captures
    assert [(one.name, one.status, one.rank) for one in captures] == [
        ("train_rank0", "not_profiled", 0), ("train_rank1", "not_profiled", 1),
    ]  # fmt: skip


def test_a_rank_that_fails_fails_the_run(tmp_path: Path, nsys: NsysProfiler) -> None:
    dies = PROGRAM + "if rank: raise ValueError('no data')\n"
    (ended,), _ = sweep([target(tmp_path, Ranks(2), dies)], tmp_path / "runs", nsys)
    assert ended == JobResult("failed", "exit code 1: rank 1: ValueError: no data")
    for rank in (0, 1):
        said = read_manifest(tmp_path / f"runs/train/capture_rank{rank}.manifest.json")
        assert (said.status, said.message) == (ended.status, ended.message)


def test_a_rank_that_recorded_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = recording(tmp_path, monkeypatch, after='[ "$RANK" = 1 ] || echo report > "$output.nsys-rep"')
    (ended,), _ = sweep([target(tmp_path, Ranks(2))], tmp_path / "runs", silent)
    assert ended.status == "failed"
    assert "nsys wrote no report: " in str(ended.message)
    assert "rank 1 profiled" in str(ended.message)
    assert "train/target_rank1.log" in str(ended.message)


def test_commands_say_where_each_rank_writes(nsys: NsysProfiler) -> None:
    each = nsys.record_command(("python", "a.py"), Path("100%"), Ranks(2))
    assert each[1:8] == ["-m", "nsys_analyzer.capture.launcher", "--nproc", "2", "--logs", "100%", "--"]
    assert "--output=100%%/capture_rank%q{RANK}" in each  # nsys reads %% as %
    assert each[-2:] == ["python", "a.py"]
    together = nsys.record_command(("python", "a.py"), Path("out"), Ranks(2, in_one_capture=True))
    assert together.index("--output=out/capture") < together.index("nsys_analyzer.capture.launcher")
    recorded = TorchProfiler().record_command(("python", "-u", "a.py"), Path("out"), Ranks(2))
    behind = recorded[recorded.index("--") + 1 :]
    assert behind == [
        "python", "-u", "-m", "nsys_analyzer.capture.recorder", "--output", "out/capture_rank%q{RANK}.json.gz", "--",
        "a.py",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="--one-report needs nsys"):
        TorchProfiler().record_command(("python", "a.py"), Path("out"), Ranks(2, in_one_capture=True))
