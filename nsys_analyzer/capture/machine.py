"""What this machine is, asked cheaply: GPUs, driver, CPU, torch, and the state of the git checkout."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path

_ANSWER_TIMEOUT_S = 20


def gpu_count() -> int:
    """How many GPUs CUDA sees, 0 without a driver; ``CUDA_VISIBLE_DEVICES`` counts. Source: CUDA driver API."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_version() -> str | None:
    """The version of the installed torch, such as ``2.13.0+cpu``, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(folder: Path) -> dict[str, str | bool]:
    """What a manifest says of where a capture was taken: CPU, driver, and the git commit of ``folder``.

    What cannot be found out is left out.
    """
    commit = _answer("git", "-C", str(folder), "rev-parse", "HEAD")
    known: dict[str, str | bool | None] = {
        "host_cpu": _cpu(),
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "git_commit": commit,
        "git_dirty": _is_dirty(folder) if commit else None,
    }
    return {key: value for key, value in known.items() if value is not None}


def _is_dirty(folder: Path) -> bool | None:
    """Whether tracked files differ from the commit: what a run writes is no change of the code."""
    changes = command_output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes)


def _answer(*command: str) -> str | None:
    """The first line that a command prints; None where it is not there, fails or says nothing."""
    return next(iter((command_output(*command) or "").splitlines()), None)


def command_output(*command: str) -> str | None:
    """What a command prints, without the space around it; None where it is not there or fails."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _cpu() -> str | None:
    """The CPU's model from ``/proc/cpuinfo``; None on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
