"""Finds the ``nsys`` command and its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nsys_analyzer.errors import ExportError

SEARCH_PATTERNS = (
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/bin/nsys",  # from the toolkit's runfile
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    # Nsight Compute contains an nsys that may lack the importer, so it comes last.
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
)
"""Where installers put ``nsys``, below the root folder. An earlier pattern is preferred; within one, the newest."""

_VERSION = re.compile(r"version (\d+(?:\.\d+)+)")
_ANSWER_TIMEOUT_S = 60
_INSTALL_HINT = "Set NSYS to the nsys of a complete Nsight Systems installation"


@dataclass(frozen=True)
class Nsys:
    """An executable ``nsys``: its path, and its version, such as ``2023.4.4.54``."""

    path: Path
    version: str


def find_nsys(root: Path = Path("/")) -> Path | None:
    """Returns the ``nsys`` to run: ``$NSYS``, else the one on ``PATH``, else an installed one; None if there is none.

    Args:
        root: the folder below which :data:`SEARCH_PATTERNS` are searched.

    Raises:
        ExportError: ``NSYS`` is set to something that is not executable. No other nsys is used instead.
    """
    if override := os.environ.get("NSYS"):
        path = Path(override).expanduser().absolute()
        if not _is_command(path):
            problem = f"NSYS is set to {path}, which is not an executable file"
            raise ExportError(problem, "Set NSYS to the nsys command itself, or unset it")
        return path
    if on_path := shutil.which("nsys"):
        return Path(on_path)
    places = (path for pattern in SEARCH_PATTERNS for path in sorted(root.glob(pattern), key=version_key, reverse=True))
    return next((path for path in places if _is_command(path)), None)


def nsys_version(nsys: Path) -> str:
    """Returns the version that ``nsys --version`` prints, without the build (``2023.4.4.54``); raises ExportError."""
    try:
        match = _VERSION.search(run_query(nsys, "--version").stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"{nsys} --version failed: {error}", _INSTALL_HINT) from error
    if match is None:
        raise ExportError(f"{nsys} --version prints no version", _INSTALL_HINT)
    return match[1]


def run_query(*command: Path | str) -> subprocess.CompletedProcess[str]:
    """Runs a short command and returns its result; raises OSError or TimeoutExpired if it does not run."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S)


def _is_command(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def version_key(version: Path | str) -> tuple[int, ...]:
    """Returns the numbers of a version as a sort key, by which ``2024.10.1`` follows ``2024.9.2``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", str(version)))
