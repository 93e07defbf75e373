"""Tests traces of devices that are not NVIDIA's: operations, descriptions of the machine, and words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.cli.main import cli
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    BEGIN_CAPTURE,
    COPY,
    END_CAPTURE,
    LAUNCH,
    LAUNCH_GRAPH,
    SYNCHRONIZE,
)
from tests.support.export import shared_copy
from tests.support.kineto import MAIN, PID, Kineto

GEMM = "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32"
HIP_VERSION = 70_253_211  # 7.2.53211: major · 10,000,000 + minor · 100,000 + patch


def summary_of(path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(path), "t")
    return summary


# --- AMD -----------------------------------------------------------------------------------------------------------


def amd(name: str = "AMD Instinct MI300X") -> Kineto:
    """Forward [100, 200) launches a kernel at 110 that runs [120, 150)."""
    trace = (
        Kineto(hip_runtime_version=HIP_VERSION, hip_driver_version=HIP_VERSION)
        .range("forward", 100, 100)
        .launch(1, 110, api="hipExtModuleLaunchKernel")
    )
    trace.properties["deviceProperties"] = [{"id": 0, "name": name, "totalGlobalMem": 192 << 30, "numSms": 304}]
    return trace.kernel(GEMM, 1, 120, 30)


@pytest.mark.parametrize(
    ("name", "properties", "gpu", "runtime"),
    [
        ("AMD Instinct MI300X", {}, "AMD Instinct MI300X", "7.2.53211 (ROCm 7.2)"),
        ("AMD Instinct MI300X", {"hip_runtime_version": 0}, "AMD Instinct MI300X", "7.2.53211 (ROCm 7.2)"),
        # Its calls tell AMD where no property does.
        ("Radeon", {"hip_runtime_version": None, "hip_driver_version": None}, "Radeon", "unknown"),
        ("", {}, "unnamed AMD GPU", "7.2.53211 (ROCm 7.2)"),
        ("", {"deviceProperties": []}, "unnamed AMD GPU", "7.2.53211 (ROCm 7.2)"),
    ],
)
def test_hip_and_rocm_stand_where_cuda_does(
    name: str, properties: dict[str, Any], gpu: str, runtime: str, tmp_path: Path
) -> None:
    trace = amd(name)
    trace.properties |= properties
    path = trace.write(tmp_path / "t.json")
    for each in (path, shared_copy(path, tmp_path / "copy.sqlite")):
        metadata = Trace.load(each).metadata
        assert (metadata.platform, metadata.runtime) == ("HIP", runtime)
        assert summary_of(each).gpu == gpu


@pytest.mark.parametrize(
    ("api", "call"),
    [
        ("hipLaunchKernel", LAUNCH),
        ("hipExtLaunchKernel", LAUNCH),
        ("hipModuleLaunchKernel", LAUNCH),
        ("hipExtModuleLaunchKernel", LAUNCH),
        ("hipLaunchCooperativeKernel", LAUNCH),
        ("hipStreamBeginCapture", BEGIN_CAPTURE),
        ("hipStreamEndCapture", END_CAPTURE),
        ("hipMalloc", ALLOCATE),
        ("hipHostMalloc", ALLOCATE),
        ("hipGraphLaunch", LAUNCH_GRAPH),
        ("hipMemcpyWithStream", COPY),
        ("hipStreamSynchronize", SYNCHRONIZE),
    ],
)
def test_hips_calls_mean_what_cudas_do(api: str, call: int, tmp_path: Path) -> None:
    trace = amd().launch(2, 160, api=api)
    assert Trace.load(trace.write(tmp_path / "t.json")).launches.call.tolist() == [LAUNCH, call]


def test_hips_look_ups_are_left_out_as_cudas_are(tmp_path: Path) -> None:
    trace = amd().launch(2, 160, api="hipGetDevicePropertiesR0600").launch(3, 162, api="hipPointerGetAttribute")
    assert len(Trace.load(trace.write(tmp_path / "t.json")).launches.start) == 1


def test_a_launch_of_hip_that_left_no_kernel_is_told(tmp_path: Path) -> None:
    trace = amd().launch(2, 160, api="hipLaunchKernel")
    warnings = say_all(summary_of(trace.write(tmp_path / "t.json")).warnings)
    assert any(warning.startswith("The kernels of 1 kernel launch are missing") for warning in warnings)


@pytest.mark.parametrize("category", ["privateuse1_runtime", "privateuse1_driver"])
def test_calls_of_other_devices_are_launches(category: str, tmp_path: Path) -> None:
    trace = Kineto().range("forward", 100, 100).add(category, "enqueue", 110, 1, PID, MAIN, correlation=1)
    forward = summary_of(trace.kernel("gemm_kernel", 1, 250, 30).write(tmp_path / "t.json")).phase("forward")
    assert forward
    assert forward.kernels_per_instance == 1


# --- the words -----------------------------------------------------------------------------------------------------


def report(*paths: Path) -> str:
    output = paths[0].with_name("report.md")
    done = CliRunner().invoke(cli, ["report", *map(str, paths), "-o", str(output)])
    assert done.exit_code == 0, done.output
    return output.read_text(encoding="utf-8")


def test_the_conditions_name_the_platform_s_version(tmp_path: Path) -> None:
    text = report(amd().write(tmp_path / "amd.json.gz"))
    assert "7.2.53211 (ROCm 7.2)" in text
    heading = next(line for line in text.splitlines() if "| driver" in line)
    assert [cell.strip() for cell in heading.strip("|").split("|")][:5] == [
        "capture", "GPU", "memory", "driver", "CUDA or HIP",
    ]  # fmt: skip


def test_info_names_the_platform(tmp_path: Path) -> None:
    text = CliRunner().invoke(cli, ["info", str(amd().write(tmp_path / "t.json"))]).output
    assert "HIP 7.2.53211 (ROCm 7.2)" in text
    assert "304 CUs" in text
