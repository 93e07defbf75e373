"""Reads facts of this machine without heavy imports: GPUs, driver, CPU, torch, and the state of a git checkout."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

_ANSWER_TIMEOUT_S = 20


def gpu_count() -> int:
    """Returns the number of GPUs that CUDA sees, 0 without a driver. ``CUDA_VISIBLE_DEVICES`` is respected."""
    driver, count = cuda_driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_driver() -> ctypes.CDLL | None:
    """Returns the library of the CUDA driver; None if it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver from ``nvidia-smi``, such as ``580.159.04``; None without an answer."""
    lines = run_for_lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines[0] if lines else None


def torch_version() -> str | None:
    """Returns the version of the installed torch, such as ``2.13.0+cpu``, without importing it; None without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Returns the known ones of CPU, driver and git commit of ``folder``. Untracked files do not make it dirty."""
    git = ("git", "-C", str(folder))
    commit = run_for_lines(*git, "rev-parse", "HEAD")
    changes = run_for_lines(*git, "status", "--porcelain", "--untracked-files=no") if commit else None
    facts = {
        "host_cpu": cpu_model(),
        "driver": driver_version(),
        "git_commit": commit[0] if commit else None,
        "git_dirty": None if changes is None else bool(changes),
    }
    return {key: value for key, value in facts.items() if value is not None}


def run_for_lines(*command: str) -> list[str] | None:
    """Runs a command and returns its output lines; None if it is not installed, fails or takes too long."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip().splitlines() if finished.returncode == 0 else None


def cpu_model() -> str | None:
    """Returns the CPU's model from ``/proc/cpuinfo``; None on other systems."""
    return _value_in(Path("/proc/cpuinfo"), "model name")


def driver_module_version() -> str | None:
    """Returns the version line of NVIDIA's kernel module; None if it is not loaded."""
    return _value_in(Path("/proc/driver/nvidia/version"), "NVRM version")


def _value_in(path: Path, key: str) -> str | None:
    """Returns the value of the first line ``key: value`` in a file; None if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
