"""Finding the ``nsys`` command, and asking which version it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from nsys_analyzer.errors import ExportError

SEARCH_PATTERNS = (
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    # Nsight Compute bundles one that may lack the importer: the last resort.
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
)
"""Where installers put ``nsys``, below the root folder: an earlier pattern wins, within one the newest."""

_VERSION = re.compile(r"version (\d+(?:\.\d+)+)")
_ANSWER_TIMEOUT_S = 60
_INSTALL_HINT = "Set NSYS to the nsys of a complete Nsight Systems installation"


def find_nsys(root: Path = Path("/")) -> Path | None:
    """Find the ``nsys`` to run: ``$NSYS``, then ``PATH``, then below ``root`` where installers put it.

    Returns ``None`` where there is none. Raises ``ExportError`` when ``NSYS`` is set to something that cannot
    be run: whoever set it meant that one, and another must not answer in its place.
    """
    override = os.environ.get("NSYS")
    if override:
        return _checked_override(Path(override).expanduser())
    on_path = shutil.which("nsys")
    return Path(on_path) if on_path else _installed_nsys(root)


def nsys_version(nsys: Path) -> str:
    """Return the version that ``nsys --version`` prints, without the build: ``2023.4.4.54``.

    Raises ``ExportError`` when it cannot be run or prints no version.
    """
    try:
        answer = subprocess.run(
            [nsys, "--version"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"{nsys} --version failed: {error}", _INSTALL_HINT) from error
    match = _VERSION.search(answer.stdout)
    if match is None:
        raise ExportError(f"{nsys} --version prints no version", _INSTALL_HINT)
    return match[1]


def _checked_override(nsys: Path) -> Path:
    if nsys.is_file() and os.access(nsys, os.X_OK):
        return nsys
    raise ExportError(
        f"NSYS is set to {nsys}, which is not an executable file",
        "Set NSYS to the nsys command itself, or unset it",
    )


def _installed_nsys(root: Path) -> Path | None:
    for pattern in SEARCH_PATTERNS:
        for candidate in sorted(root.glob(pattern), key=_numbers_in, reverse=True):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    return None


def _numbers_in(path: Path) -> tuple[int, ...]:
    """Sort key under which ``2024.10.1`` comes after ``2024.9.2``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))
