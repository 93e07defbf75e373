"""What a process is called where nothing tells its rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import processes_of
from nsys_analyzer.trace.ranks import Rank
from tests.support.export import GEMM, Export, global_pid


def labels(devices_of: dict[int, tuple[int, ...]], tmp_path: Path, export: Export | None = None) -> list[str]:
    """The labels of processes that use these devices."""
    export = export or Export()
    for pid, devices in devices_of.items():
        for device in devices:
            export.kernel(GEMM, 20, 30, 45, tid=pid, pid=pid, device=device)
    return [f"{one.pid}: {one.label}" for one in processes_of(Trace.load(export.write(tmp_path / "t.sqlite")))]


def test_the_only_process_has_no_label(tmp_path: Path) -> None:
    assert labels({100: (3,)}, tmp_path) == ["100: "]


def test_a_process_is_called_by_its_device(tmp_path: Path) -> None:
    assert labels({100: (1,), 200: (0,)}, tmp_path) == ["200: device 0", "100: device 1"]


def test_the_device_is_numbered_as_cuda_does(tmp_path: Path) -> None:
    # What nsys calls GPU 1 is CUDA's device 0.
    export = Export().gpu(0).gpu(1)
    for gpu, device in ((1, 0), (0, 1)):
        for pid in (100, 200):
            export.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=device, pid=pid)
    assert labels({100: (0,), 200: (1,)}, tmp_path, export) == ["100: device 0", "200: device 1"]


def test_processes_that_each_see_one_gpu_are_called_by_their_ids(tmp_path: Path) -> None:
    # With CUDA_VISIBLE_DEVICES of its own, each calls its GPU 0.
    export = Export().gpu(0).gpu(1)
    for gpu, pid in ((0, 200), (1, 100)):
        export.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=0, pid=pid)
    assert labels({100: (0,), 200: (0,)}, tmp_path, export) == ["100: pid 100", "200: pid 200"]


def test_a_process_with_several_devices_names_them(tmp_path: Path) -> None:
    found = labels({100: (2, 3), 200: (0,), 300: (4,), 400: (4, 5)}, tmp_path)
    assert found == ["200: device 0", "100: devices 2, 3", "300: pid 300", "400: pid 400"]


def test_a_process_that_uses_no_gpu_is_found_by_its_ranges(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100, tid=300, pid=300)
    assert labels({}, tmp_path, export) == ["300: "]


def test_a_device_without_a_number_is_told_apart(tmp_path: Path) -> None:
    # nsys numbers an unknown device -1.
    assert labels({100: (-1, 0), 200: (1,)}, tmp_path) == ["100: devices -1, 0", "200: device 1"]


def test_processes_with_a_rank_come_first(tmp_path: Path) -> None:
    export = Export().gpu(0).gpu(1).kernel(GEMM, 20, 30, 45).kernel(GEMM, 20, 30, 45, tid=200, pid=200, device=1)
    trace = replace(Trace.load(export.write(tmp_path / "t.sqlite")), ranks={global_pid(200): Rank(3, 4)})
    assert [(one.label, one.rank) for one in processes_of(trace)] == [("rank 3", 3), ("device 0", None)]
