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
    "usr/local/cuda*/nsight-systems*/bin/nsys",  # where the toolkit's runfile puts it
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    # Nsight Compute bundles one that may lack the importer: the last resort.
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
)
"""Where installers put ``nsys``, below the root folder: an earlier pattern wins, within one the newest."""

_VERSION = re.compile(r"version (\d+(?:\.\d+)+)")
_ANSWER_TIMEOUT_S = 60
_INSTALL_HINT = "Set NSYS to the nsys of a complete Nsight Systems installation"


@dataclass(frozen=True)
class Nsys:
    """An ``nsys`` that runs: its command, as found, and its version, such as ``2023.4.4.54``."""

    path: Path
    version: str

    @classmethod
    def find(cls, root: Path = Path("/")) -> Nsys | None:
        """The ``nsys`` to run, as ``find_nsys`` finds it; None where there is none.

        Raises:
            ExportError: ``NSYS`` names no command, or the one found prints no version.
        """
        path = find_nsys(root)
        return cls(path, nsys_version(path)) if path else None


def find_nsys(root: Path = Path("/")) -> Path | None:
    """Find the ``nsys`` to run: ``$NSYS``, then ``PATH``, then below ``root`` where installers put it.

    Returns ``None`` where there is none. Raises ``ExportError`` when ``NSYS`` is set to something that cannot
    be run: whoever set it meant that one, and another must not answer in its place.
    """
    return next(iter(find_every_nsys(root)), None)


def find_every_nsys(root: Path = Path("/")) -> tuple[Path, ...]:
    """Find every ``nsys`` of this machine, the one to run first; several names of one command count once.

    Raises ``ExportError`` as ``find_nsys`` does.
    """
    override = os.environ.get("NSYS")
    chosen = [_checked_override(Path(override).expanduser().absolute())] if override else []
    on_path = shutil.which("nsys")
    candidates = [*chosen, *([Path(on_path)] if on_path else []), *_installed(root)]
    first_name: dict[Path, Path] = {}
    for candidate in candidates:
        first_name.setdefault(candidate.resolve(), candidate)
    return tuple(first_name.values())


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
    if _is_command(nsys):
        return nsys
    raise ExportError(
        f"NSYS is set to {nsys}, which is not an executable file",
        "Set NSYS to the nsys command itself, or unset it",
    )


def _installed(root: Path) -> list[Path]:
    return [
        candidate
        for pattern in SEARCH_PATTERNS
        for candidate in sorted(root.glob(pattern), key=_numbers_in, reverse=True)
        if _is_command(candidate)
    ]


def _is_command(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _numbers_in(path: Path) -> tuple[int, ...]:
    """Sort key under which ``2024.10.1`` comes after ``2024.9.2``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))
