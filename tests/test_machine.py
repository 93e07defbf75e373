from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from nsys_analyzer.system import machine
from tests.test_nsys import make_command


class Driver:
    """libcuda as it answers: ``cuInit`` with a code, ``cuDeviceGetCount`` with a number."""

    def __init__(self, code: int, count: int) -> None:
        self.code, self.count = code, count

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self.code

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        count._obj.value = self.count  # type: ignore[attr-defined]
        return 0


@pytest.mark.parametrize(("code", "count", "gpus"), [(0, 2, 2), (0, 0, 0), (100, 2, 0)])  # 100: no device
def test_gpus(code: int, count: int, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(code, count))
    assert machine.count_gpus() == gpus


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert machine.count_gpus() == 0


def test_torch_is_asked_without_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.13.0+cpu"}.__getitem__)
    assert machine.torch_version() == "2.13.0+cpu"

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert machine.torch_version() is None


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *author, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_where_a_capture_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    known = machine.read_provenance(tmp_path)
    assert (known["git_commit"], known["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "train.py").write_text("2")
    assert machine.read_provenance(tmp_path)["git_dirty"] is True
    make_command(tmp_path / "bin/nvidia-smi", "echo 580.159.04; echo 580.159.04")  # one for each of two GPUs
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert machine.read_provenance(tmp_path)["driver"] == "580.159.04"


def test_what_cannot_be_found_out_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_command(tmp_path / "bin/nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no git there
    assert not {"driver", "git_commit", "git_dirty"} & set(machine.read_provenance(tmp_path))
    monkeypatch.setattr(machine, "cpu_model", lambda: None)
    assert machine.read_provenance(tmp_path) == {}
