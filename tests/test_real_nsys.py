"""A capture from beginning to end by the nsys of this machine; it needs no GPU, for NVTX ranges need none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nsys_analyzer.capture.nsys import ProfileOptions, find_importer, find_or_import_report, make_profile_command
from nsys_analyzer.errors import CaptureError
from nsys_analyzer.system.machine import Nsys
from nsys_analyzer.trace.nsys_report import ensure_export
from nsys_analyzer.trace.trace import Trace

pytestmark = [pytest.mark.nsys, pytest.mark.slow]

STEPS = 3
PROGRAM = f"""
import time, nvtx
for step in range({STEPS}):
    with nvtx.annotate("forward"):
        with nvtx.annotate("computing softmax"):
            time.sleep(0.002)
    nvtx.push_range("backward")
    time.sleep(0.001)
    nvtx.pop_range()
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    pytest.importorskip("nvtx", reason="no NVTX for this Python: pip install 'nvtx==0.2.11'")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


def profiled(nsys: Nsys, program: list[str], options: ProfileOptions, folder: Path) -> Path:
    """The report of a run of ``program``."""
    folder.mkdir()
    report, log = folder / "capture.nsys-rep", folder / "target.log"
    with log.open("wb") as output:
        subprocess.run(make_profile_command(nsys, report, program, options), stdout=output, stderr=output, check=True)
    return find_or_import_report(nsys, report, log)


def named(trace: Trace, name: str) -> list[tuple[int, int]]:
    """Start and end of the ranges of a name, in order."""
    ranges = trace.ranges.select(trace.ranges.name == trace.ranges.names.index(name))
    return sorted(zip(ranges.start.tolist(), ranges.end.tolist(), strict=True))


def check_ranges(trace: Trace) -> None:
    forward, softmax, backward = (named(trace, name) for name in ("forward", "computing softmax", "backward"))
    assert len(forward) == len(softmax) == len(backward) == STEPS
    assert len(trace.ranges) == 3 * STEPS
    for outer, inner, after in zip(forward, softmax, backward, strict=True):
        assert outer[0] <= inner[0] <= inner[1] <= outer[1] <= after[0]
        assert inner[1] - inner[0] >= 2_000_000  # it sleeps for 2 ms
        assert after[1] - after[0] >= 1_000_000


def test_a_capture_of_ranges(nsys: Nsys, program: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = profiled(nsys, program, ProfileOptions(capture_range=False), run)
    sqlite = ensure_export(report)
    check_ranges(Trace.load(sqlite))
    modified = sqlite.stat().st_mtime_ns
    assert ensure_export(report).stat().st_mtime_ns == modified
    assert sorted(path.name for path in run.iterdir()) == ["capture.nsys-rep", "capture.sqlite", "target.log"]


def test_a_range_that_never_opens(nsys: Nsys, program: list[str], tmp_path: Path) -> None:
    """Nobody calls cudaProfilerStart here, and there may be no CUDA at all."""
    with pytest.raises(CaptureError, match="no capture range was opened"):
        profiled(nsys, program, ProfileOptions(), tmp_path / "run")


def test_an_nsys_that_does_not_find_its_importer(nsys: Nsys, program: list[str], tmp_path: Path) -> None:
    """As Debian lays it out: the importer is beside a link to nsys, and nsys looks beside itself."""
    if not nsys.path.resolve().read_bytes().startswith(b"\x7fELF"):
        pytest.skip(f"{nsys.path} is a script, which knows where the real one is")
    apart = debian_layout(nsys, tmp_path / "usr")
    run = tmp_path / "run"
    report = profiled(apart, program, ProfileOptions(capture_range=False), run)
    assert sorted(path.name for path in run.iterdir()) == ["capture.nsys-rep", "target.log"]
    assert "mporter" in (run / "target.log").read_text()  # nsys complained that it found none
    check_ranges(Trace.load(ensure_export(report)))


def debian_layout(nsys: Nsys, usr: Path) -> Nsys:
    """A copy of ``nsys`` away from its importer, everything else by links to the real installation."""
    importer = find_importer(nsys.path)
    assert importer is not None
    real = nsys.path.resolve()
    target = usr / "lib/x86_64-linux-gnu/nsight-systems/target-linux-x64"
    target.mkdir(parents=True)
    for entry in real.parent.iterdir():
        if entry.name == real.name:
            shutil.copy(entry, target)
        else:
            (target / entry.name).symlink_to(entry)
    folder = usr / "lib/nsight-systems"
    (folder / "bin").mkdir(parents=True)
    (folder / importer.parent.name).symlink_to(importer.parent)
    (folder / "bin/nsys").symlink_to(os.path.relpath(target / real.name, folder / "bin"))
    return Nsys(folder / "bin/nsys", nsys.version)
