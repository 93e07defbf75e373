from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.errors import ExportError
from nsys_analyzer.system.machine import find_nsys, nsys_version


def make_command(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert find_nsys(tmp_path) is None


def test_the_environment_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_command(tmp_path / "bin/nsys")
    chosen = make_command(tmp_path / "elsewhere/my-nsys")
    monkeypatch.setenv("NSYS", str(chosen))
    assert find_nsys(tmp_path) == chosen


@pytest.mark.parametrize("kind", ["absent", "folder", "not executable"])
def test_an_override_that_cannot_run_is_an_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = tmp_path / "override"
    if kind == "folder":
        override.mkdir()
    elif kind == "not executable":
        override.write_text("#!/bin/sh\n")
    make_command(tmp_path / "bin/nsys")  # must not answer in its place
    monkeypatch.setenv("NSYS", str(override))
    with pytest.raises(ExportError, match=f"NSYS is set to {override}, which is not an executable file"):
        find_nsys(tmp_path)


def test_path_comes_before_the_installations(tmp_path: Path) -> None:
    make_command(tmp_path / "opt/nvidia/nsight-systems/2025.3.2/bin/nsys")
    on_path = make_command(tmp_path / "bin/nsys")
    assert find_nsys(tmp_path) == on_path


@pytest.mark.parametrize(
    "place",
    [
        "opt/nvidia/nsight-systems/2024.1.1/bin/nsys",
        "opt/nvidia/nsight-systems-cli/2024.1.1/target-linux-x64/nsys",
        "usr/local/cuda-12.4/bin/nsys",
        "usr/local/cuda-12.4/nsight-systems-2023.4.4/bin/nsys",
        "usr/lib/nsight-systems/bin/nsys",
        "usr/lib/nsight-systems/target-linux-sbsa-armv8/nsys",
        "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys",
        "usr/local/cuda-12.4/nsight-compute-2024.1.1/host/target-linux-x64/nsys",
    ],
)
def test_installations_off_the_path(place: str, tmp_path: Path) -> None:
    installed = make_command(tmp_path / place)
    assert find_nsys(tmp_path) == installed


def test_the_newest_of_several(tmp_path: Path) -> None:
    for version in ("2023.4.4", "2024.9.2", "2024.10.1"):
        make_command(tmp_path / f"opt/nvidia/nsight-systems/{version}/bin/nsys")
    make_command(tmp_path / "opt/nvidia/nsight-compute/2026.1.0/host/target-linux-x64/nsys")
    assert find_nsys(tmp_path) == tmp_path / "opt/nvidia/nsight-systems/2024.10.1/bin/nsys"


def test_a_file_that_cannot_run_is_passed_over(tmp_path: Path) -> None:
    make_command(tmp_path / "usr/local/cuda-13.0/bin/nsys").chmod(0o644)
    older = make_command(tmp_path / "usr/local/cuda-12.4/bin/nsys")
    assert find_nsys(tmp_path) == older


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("NVIDIA Nsight Systems version 2022.4.2.1-df9881f", "2022.4.2.1"),
        ("NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0", "2023.4.4.54"),
    ],
)
def test_version(printed: str, version: str, tmp_path: Path) -> None:
    assert nsys_version(make_command(tmp_path / "nsys", f"echo '{printed}'")) == version


def test_a_command_that_prints_no_version(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="prints no version"):
        nsys_version(make_command(tmp_path / "nsys", "echo 'not installed' >&2; exit 1"))


def test_a_command_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--version failed"):
        nsys_version(tmp_path / "absent")
