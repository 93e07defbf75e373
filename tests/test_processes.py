"""What a process is called where nothing tells its rank."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer import Trace
from nsys_analyzer.analysis.processes import processes_of
from tests.export import GEMM, Export


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
