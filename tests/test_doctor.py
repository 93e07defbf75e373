from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer.capture import doctor
from nsys_analyzer.capture import nsys as installation
from nsys_analyzer.capture import plan as run_plan
from nsys_analyzer.capture.doctor import check_machine, check_run_command
from nsys_analyzer.capture.nsys import Check
from nsys_analyzer.cli.doctor import doctor as command
from nsys_analyzer.system import machine
from nsys_analyzer.system.machine import Nsys, find_nsys
from tests.test_nsys import make_command
from tests.test_profile import IMPORTER, make_nsys

TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "gpus": 1}


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nsys, no GPU, a PATH of the test's own, and a torch that says what it is told to."""
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "find_nsys", lambda: None)
    set_gpus(monkeypatch, 0)
    install_torch(monkeypatch, tmp_path, f"echo '{json.dumps(TORCH)}'")
    set_recorders(monkeypatch)


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: count)
    monkeypatch.setattr(run_plan, "count_gpus", lambda: count)


def set_recorders(monkeypatch: pytest.MonkeyPatch, nsys: Nsys | None = None, torch: str | None = "2.13.0") -> None:
    monkeypatch.setattr(run_plan, "find_nsys", lambda: nsys.path if nsys else None)
    monkeypatch.setattr(run_plan, "torch_version", lambda: torch)


def install_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    monkeypatch.setattr(sys, "executable", str(make_command(folder / "python", script)))


def install_nsys(monkeypatch: pytest.MonkeyPatch, found: Path) -> None:
    monkeypatch.setattr(doctor, "find_nsys", lambda: found)


@pytest.fixture
def one(tmp_path: Path) -> Callable[[str], Check]:
    """The check of a name."""

    def check(name: str) -> Check:
        (found,) = [check for check in check_machine(tmp_path / "runs") if check.name == name]
        return found

    return check


Look = Callable[[str], Check]


def test_the_nsys_that_is_used(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, broken = make_nsys(tmp_path / "a"), make_command(tmp_path / "c/nsys")
    install_nsys(monkeypatch, used.path)
    assert one("nsys") == Check("nsys", "ok", f"2022.4.2.1 at {used.path}")
    install_nsys(monkeypatch, broken)
    assert (one("nsys").status, one("nsys").description) == ("broken", f"{broken} --version prints no version")


def test_an_override_that_is_no_command(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nsys", find_nsys)
    monkeypatch.setenv("NSYS", str(tmp_path / "absent"))
    assert (one("nsys").status, one("nsys").remedy) == ("broken", "Set NSYS to the nsys command itself, or unset it")


def test_an_importer(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nsys(monkeypatch, make_nsys(tmp_path).path)
    importer = make_command(tmp_path / IMPORTER)
    assert one("importer") == Check("importer", "ok", f"starts: {importer}")
    make_command(importer, "echo 'no licence' >&2; exit 1")
    assert (one("importer").status, one("importer").description) == ("broken", f"{importer} does not start: no licence")
    assert f"ldd {importer}" in one("importer").remedy


def test_no_importer(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = make_nsys(tmp_path).path
    install_nsys(monkeypatch, nsys)
    assert (one("importer").status, one("importer").description) == (
        "unknown",
        f"{nsys} is a script, so its importer cannot be checked",
    )
    nsys.with_name("binary").write_bytes(b"\x7fELF")
    monkeypatch.setattr(installation, "find_importer", lambda _nsys: None)
    assert installation.check_importer(Nsys(nsys.with_name("binary"), "2022.4.2.1")).status == "missing"


def test_a_gpu(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_command(tmp_path / "bin/nvidia-smi", "echo 580.65.06")
    assert one("GPU").description == "CUDA sees none, although driver 580.65.06 is installed"
    set_gpus(monkeypatch, 1)
    assert one("GPU") == Check("GPU", "ok", "CUDA sees 1, driver 580.65.06")


def test_no_gpu(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_module_version", lambda: None)
    make_command(tmp_path / "bin/nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert (one("GPU").status, one("GPU").description) == ("missing", "CUDA sees none, so targets run on the CPU")


def test_a_command_that_does_not_answer(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUERY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor, "_TORCH_TIMEOUT_S", 0.1)
    make_command(tmp_path / "bin/nvidia-smi", "exec sleep 60")
    install_torch(monkeypatch, tmp_path, "exec sleep 60")
    assert one("GPU").status == "missing"
    assert (one("torch").status, "timed out" in one("torch").description) == ("unknown", True)


CUDA_BUILD = {**TORCH, "gpus": 0}
CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0}


@pytest.mark.parametrize(
    ("script", "gpus", "status", "found"),
    [
        (f"echo '{json.dumps(TORCH)}'", 1, "ok", "2.13.0+cu130 (built with CUDA 13.0), sees 1 GPUs"),
        (f"echo '{json.dumps(CUDA_BUILD)}'", 0, "ok", "2.13.0+cu130 (built with CUDA 13.0), sees 0 GPUs"),
        (
            f"echo '{json.dumps(CUDA_BUILD)}'", 1, "broken",
            "2.13.0+cu130 (built with CUDA 13.0), sees 0 GPUs: the driver may be older than this CUDA",
        ),
        (f"echo '{json.dumps(CPU_BUILD)}'", 0, "ok", "2.13.0+cpu (built with no CUDA), sees 0 GPUs"),
        (
            f"echo '{json.dumps(CPU_BUILD)}'", 1, "ok",
            "2.13.0+cpu (built with no CUDA), sees 0 GPUs, so its targets run on the CPU",
        ),
        ("echo 'OSError: libcudart.so.12: no such file' >&2; exit 1", 1, "broken",
         "cannot be imported: OSError: libcudart.so.12: no such file"),
        ("exit 4", 1, "broken", "cannot be imported: exit status 4"),
    ],
)  # fmt: skip
def test_torch(
    script: str, gpus: int, status: str, found: str, one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch, tmp_path, script)
    set_gpus(monkeypatch, gpus)
    check = one("torch")
    assert (check.status, check.description) == (status, found)
    assert bool(check.remedy) == (gpus == 1 and script != f"echo '{json.dumps(TORCH)}'")


def test_no_torch(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(monkeypatch, tmp_path, "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert one("torch") == Check("torch", "missing", f"not installed for {tmp_path}/python", "pip install torch")


def test_folders(one: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one("output folder").status == "ok"
    assert one("output folder").description.startswith(f"{tmp_path} can be written")  # runs would be made in it
    assert not (tmp_path / "runs").exists()
    usage = type("Usage", (), {"free": 3 << 28})
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    assert one("output folder").status == one("temporary files").status == "broken"
    assert one("output folder").description.endswith("768.0\N{NO-BREAK SPACE}MiB free")
    assert "df -h" in one("output folder").remedy


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = [check for check in check_machine(tmp_path / "file" / "runs") if check.name == "output folder"]
    assert (check.status, check.description) == ("broken", f"{tmp_path}/file cannot be written: Not a directory")
    assert "--output-dir" in check.remedy


# --- what run does here ---

FINE = (Check("torch", "ok", ""), Check("output folder", "ok", ""))


def test_run_records_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_run_command(FINE)
    assert check.status == "ok"
    assert check.description.startswith("records with torch.profiler. No GPU")
    set_gpus(monkeypatch, 1)
    assert "nsys is not installed here" in check_run_command(FINE).description


def test_run_profiles_with_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_gpus(monkeypatch, 1)
    set_recorders(monkeypatch, make_nsys(tmp_path, version="2025.3.2.474"))
    assert check_run_command(FINE).description == "profiles with nsys 2025.3.2.474."


def test_what_keeps_run_from_working(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    importer = Check("importer", "broken", "lacks libdw.so.1")
    assert check_run_command([importer, *FINE]).status == "ok"  # torch.profiler imports nothing
    full = Check("output folder", "broken", "full")
    assert check_run_command([importer, full]).description == "would fail because of: output folder"
    set_gpus(monkeypatch, 1)
    set_recorders(monkeypatch, make_nsys(tmp_path))
    assert check_run_command([importer, *FINE]).description == "would fail because of: importer"


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path / "runs")]
    shown = CliRunner().invoke(command, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == "nsys            missing  not on the PATH, and not where installers put it"
    assert lines[1].startswith("                         to fix it: apt-get install nsight-systems")
    assert lines[-1].startswith("run             ok       records with torch.profiler")
    set_recorders(monkeypatch, torch=None)
    assert CliRunner().invoke(command, arguments).exit_code == 1
