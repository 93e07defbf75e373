"""Tests the labels of processes whose rank is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.trace.ranks import Rank
from tests.support.cases import make_case_test
from tests.support.export import GEMM, Export, global_pid

test_processes = make_case_test(
    "processes",
    {"processes": lambda capture: [(process.pid, process.label) for process in find_processes(capture.trace)]},
)


def test_processes_with_a_rank_come_first(tmp_path: Path) -> None:
    export = Export().gpu(0).gpu(1).kernel(GEMM, 20, 30, 45).kernel(GEMM, 20, 30, 45, tid=200, pid=200, device=1)
    trace = replace(Trace.load(export.write(tmp_path / "t.sqlite")), ranks={global_pid(200): Rank(3, 4)})
    assert [(one.label, one.rank) for one in find_processes(trace)] == [("rank 3", 3), ("device 0", None)]
