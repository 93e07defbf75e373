"""Reads the GPUs, driver, CPU, torch, nsys and git commit of this machine, without imports that take long."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsys_analyzer.errors import ExportError

_QUERY_TIMEOUT_S = 60


def count_gpus() -> int:
    """Returns the number of GPUs that CUDA sees according to ``CUDA_VISIBLE_DEVICES``; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    has_count = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if has_count else 0


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver from ``nvidia-smi``, such as ``580.159.04``; None if it fails."""
    lines = run_for_lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines[0] if lines else None


def torch_version() -> str | None:
    """Returns the version of the installed torch, such as ``2.13.0+cpu``, without importing it; None without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Returns the CPU, the driver, and the git commit of a folder, if known. Untracked files do not make it dirty."""
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
        finished_process = run_query(*command)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished_process.stdout.strip().splitlines() if finished_process.returncode == 0 else None


def run_query(*command: Path | str) -> subprocess.CompletedProcess[str]:
    """Runs a short command and returns its result; raises OSError if it cannot run, TimeoutExpired if it takes long."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_QUERY_TIMEOUT_S)


def cpu_model() -> str | None:
    """Returns the CPU's model from ``/proc/cpuinfo``; None on other systems."""
    return _find_value(Path("/proc/cpuinfo"), "model name")


def driver_module_version() -> str | None:
    """Returns the version line of NVIDIA's kernel module; None if the module is not loaded."""
    return _find_value(Path("/proc/driver/nvidia/version"), "NVRM version")


def _find_value(path: Path, key: str) -> str | None:
    """Returns the value of the first line ``key: value`` in a file; None without such a line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


# --- nsys

#: The paths of ``nsys`` below the root folder, as installers choose them. An earlier pattern is preferred. If several
#: paths match one pattern, the newest version is preferred.
NSYS_PATHS = (
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/bin/nsys",  # installed by the CUDA toolkit's runfile
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    # The nsys of Nsight Compute comes last, because its importer may be missing.
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
)

_VERSION = re.compile(r"version (\d+(?:\.\d+)+)")
_INSTALL_HINT = "Set NSYS to the nsys of a complete Nsight Systems installation"


@dataclass(frozen=True)
class Nsys:
    """An executable ``nsys``: its path, and its version, such as ``2023.4.4.54``."""

    path: Path
    version: str


def find_nsys(root: Path = Path("/")) -> Path | None:
    """Returns the ``nsys`` to run: ``$NSYS``, else the nsys on ``PATH``, else an installed nsys; None if there is none.

    Args:
        root: the folder below which :data:`NSYS_PATHS` are searched.

    Raises:
        ExportError: ``NSYS`` is set to something that is not executable. No other nsys is used instead.
    """
    if override := os.environ.get("NSYS"):
        path = Path(override).expanduser().absolute()
        if not _is_executable(path):
            problem = f"NSYS is set to {path}, which is not an executable file"
            raise ExportError(problem, "Set NSYS to the nsys command itself, or unset it")
        return path
    if path_of_command := shutil.which("nsys"):
        return Path(path_of_command)
    installed_paths = (
        path for pattern in NSYS_PATHS for path in sorted(root.glob(pattern), key=version_key, reverse=True)
    )
    return next((path for path in installed_paths if _is_executable(path)), None)


def nsys_version(nsys: Path) -> str:
    """Returns the version that ``nsys --version`` prints, without the build (``2023.4.4.54``); raises ExportError."""
    try:
        match = _VERSION.search(run_query(nsys, "--version").stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"{nsys} --version failed: {error}", _INSTALL_HINT) from error
    if match is None:
        raise ExportError(f"{nsys} --version prints no version", _INSTALL_HINT)
    return match[1]


def _is_executable(path: Path) -> bool:
    """Returns whether a path is a file that this user may execute."""
    return path.is_file() and os.access(path, os.X_OK)


def version_key(version: Path | str) -> tuple[int, ...]:
    """Returns the numbers in a version as a key for sorting, so that ``2024.10.1`` follows ``2024.9.2``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", str(version)))
