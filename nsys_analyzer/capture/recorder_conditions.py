"""Under which conditions the torch recorder records: versions, driver and CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path


def conditions() -> dict[str, str]:
    """What the converter wants to know and Kineto does not say; what is unknown is left out."""
    import torch

    known = {
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "cuda_version": torch.version.cuda,
        "driver_version": _first(Path("/proc/driver/nvidia/version"), "NVRM version:", _version_in),
        "cpu": _first(Path("/proc/cpuinfo"), "model name", lambda line: line.partition(":")[2].strip()),
        "os": _first(Path("/etc/os-release"), "PRETTY_NAME=", lambda line: line.partition("=")[2].strip('" ')),
    }
    return {key: str(value) for key, value in known.items() if value}


def _first(path: Path, start: str, read: Callable[[str], str]) -> str:
    """What ``read`` makes of the first line of a file that starts so; nothing where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((read(line) for line in lines if line.startswith(start)), "")


def _version_in(line: str) -> str:
    """The driver's version, ``580.159.04``, in the line in which it presents itself."""
    return next((word for word in line.split() if word[0].isdigit() and "." in word), "")
