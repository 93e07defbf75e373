"""Tests the labels of processes whose rank is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.trace.ranks import Rank
from tests.support.export import GEMM, Export, global_pid


@pytest.mark.parametrize(
    ("devices_of", "gpus", "labels"),
    [
        ({100: (3,)}, (), ["100: "]),  # the only process
        ({100: (1,), 200: (0,)}, (), ["200: device 0", "100: device 1"]),
        # What nsys calls GPU 1 is CUDA's device 0: GPU, device and process.
        (
            {100: (0,), 200: (1,)},
            ((1, 0, 100), (1, 0, 200), (0, 1, 100), (0, 1, 200)),
            ["100: device 0", "200: device 1"],
        ),
        # With CUDA_VISIBLE_DEVICES of its own, each calls its GPU 0.
        ({100: (0,), 200: (0,)}, ((0, 0, 200), (1, 0, 100)), ["100: pid 100", "200: pid 200"]),
        (
            {100: (2, 3), 200: (0,), 300: (4,), 400: (4, 5)},
            (),
            ["200: device 0", "100: devices 2, 3", "300: pid 300", "400: pid 400"],
        ),
        ({100: (-1, 0), 200: (1,)}, (), ["100: devices -1, 0", "200: device 1"]),  # nsys numbers an unknown device -1
    ],
)
def test_what_a_process_is_called(
    devices_of: dict[int, tuple[int, ...]], gpus: tuple[tuple[int, int, int], ...], labels: list[str], tmp_path: Path
) -> None:
    export = Export().gpu(0).gpu(1) if gpus else Export()
    for gpu, device, pid in gpus:
        export.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=device, pid=pid)
    for pid, devices in devices_of.items():
        for device in devices:
            export.kernel(GEMM, 20, 30, 45, tid=pid, pid=pid, device=device)
    found = find_processes(Trace.load(export.write(tmp_path / "t.sqlite")))
    assert [f"{process.pid}: {process.label}" for process in found] == labels


def test_a_process_that_uses_no_gpu_is_found_by_its_ranges(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100, tid=300, pid=300)
    assert [process.pid for process in find_processes(Trace.load(export.write(tmp_path / "t.sqlite")))] == [300]


def test_processes_with_a_rank_come_first(tmp_path: Path) -> None:
    export = Export().gpu(0).gpu(1).kernel(GEMM, 20, 30, 45).kernel(GEMM, 20, 30, 45, tid=200, pid=200, device=1)
    trace = replace(Trace.load(export.write(tmp_path / "t.sqlite")), ranks={global_pid(200): Rank(3, 4)})
    assert [(one.label, one.rank) for one in find_processes(trace)] == [("rank 3", 3), ("device 0", None)]
