"""Facts of this machine, asked cheaply: GPUs, driver, CPU, torch, and the state of the git checkout."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

_ANSWER_TIMEOUT_S = 20


def gpu_count() -> int:
    """Returns how many GPUs CUDA sees, 0 without a driver; ``CUDA_VISIBLE_DEVICES`` counts. Source: CUDA driver API."""
    driver, count = cuda_driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_driver() -> ctypes.CDLL | None:
    """Returns the library of the CUDA driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver by ``nvidia-smi``, such as ``580.159.04``; None without an answer."""
    lines = run_for_lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines[0] if lines else None


def torch_version() -> str | None:
    """Returns the installed torch's version, such as ``2.13.0+cpu``, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Returns the CPU, the driver, and the git commit of ``folder``, as far as known; untracked files do not count."""
    git = ("git", "-C", str(folder))
    commit = run_for_lines(*git, "rev-parse", "HEAD")
    changes = run_for_lines(*git, "status", "--porcelain", "--untracked-files=no") if commit else None
    known = {
        "host_cpu": cpu_model(),
        "driver": driver_version(),
        "git_commit": commit[0] if commit else None,
        "git_dirty": None if changes is None else bool(changes),
    }
    return {key: value for key, value in known.items() if value is not None}


def run_for_lines(*command: str) -> list[str] | None:
    """Returns the lines that a command prints; None where it is not installed, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


def cpu_model() -> str | None:
    """Returns the CPU's model from ``/proc/cpuinfo``; None on other systems."""
    return _value_in(Path("/proc/cpuinfo"), "model name")


def driver_module_version() -> str | None:
    """Returns the version of NVIDIA's driver, as its kernel module says; None where it is not loaded."""
    return _value_in(Path("/proc/driver/nvidia/version"), "NVRM version")


def _value_in(path: Path, key: str) -> str | None:
    """Returns the value in the first line ``key: value`` of a file; None where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
