"""The parts of Nsight Systems beside ``nsys``: its importer, and the importer's libraries."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsys_analyzer.runs.machine import answer
from nsys_analyzer.system.nsys import Nsys, nsys_version
from nsys_analyzer.trace.sources.nsys_report import last_words

_ANSWER_TIMEOUT_S = 30
_LINKS_FOLLOWED = 16
INSTALL_NSYS = "apt-get install nsight-systems (Debian non-free), or https://developer.nvidia.com/nsight-systems"

#: Debian's and Ubuntu's package of a library that an importer was seen to lack. Nsight Compute's copy links libdw;
#: Debian's libssh.so beside the importer is a link to the system's.
_PACKAGE_OF = {
    "libdw.so": "libdw1",
    "libelf.so": "libelf1",
    "libpfm.so": "libpfm4",
    "libssh.so": "libssh-4",
    "libGL.so": "libgl1",
    "libglib-2.0.so": "libglib2.0-0",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, what was found, and the command that fixes it, empty where nothing does."""

    name: str
    status: Literal["ok", "missing", "broken", "unknown"]
    found: str
    remedy: str = ""


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    """Finds the ``QdstrmImporter`` of an ``nsys``, which turns a recording (``.qdstrm``) into a report.

    NVIDIA's packages have it in ``host-linux-*`` beside the folder of ``nsys``, and Nsight Compute in
    ``host/linux-desktop-*``. Debian's have it beside the folder of a *link* to ``nsys``, where ``nsys``, which
    asks for its own real path, does not look. Where ``nsys`` is a script (the toolkit's ``bin``), the importer is
    that of the installation with its version below ``root``. None where there is no importer.
    """
    folders = [name.parent.parent for name in _names_of(nsys)]
    real = nsys.resolve()
    if len(real.parents) > 3:  # lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys: lib/nsight-systems
        folders.append(real.parents[3] / real.parents[1].name)
    beside = (found for folder in folders for found in sorted(folder.resolve().glob("*/QdstrmImporter")))
    return next(beside, None) or _importer_of_version(nsys, root)


def importer_check(nsys: Nsys) -> Check:
    """Whether what an nsys records can become a report here."""
    importer = find_importer(nsys.path)
    if importer is None and not _is_binary(nsys.path):
        return Check("importer", "unknown", f"{nsys.path} is a script, and only it knows")
    if importer is None:
        return Check("importer", "missing", f"no QdstrmImporter belongs to {nsys.path}", INSTALL_NSYS)
    fault = start_fault(importer)
    if fault is None:
        return Check("importer", "ok", f"starts: {importer}")
    missing = missing_libraries(importer)
    if missing:
        return Check("importer", "broken", f"{importer} lacks {', '.join(missing)}", library_remedy(missing))
    return Check("importer", "broken", f"{importer} does not start: {fault}", INSTALL_NSYS)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def missing_libraries(binary: Path) -> tuple[str, ...]:
    """The shared libraries that a binary needs and that are not installed: ``libdw.so.1``; empty without ``ldd``."""
    lines = (line.partition("=>") for line in answer("ldd", str(binary)) or ())
    return tuple(dict.fromkeys(name.strip() for name, _, where in lines if where.strip() == "not found"))


def start_fault(binary: Path) -> str | None:
    """Starts a binary with ``--version``: None where it starts, else the last line of its message."""
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return last_words(done.stderr) or last_words(done.stdout) or f"exit status {done.returncode}"


def library_remedy(libraries: tuple[str, ...]) -> str:
    """The commands that install missing libraries on Debian and Ubuntu."""
    packages = {library: _PACKAGE_OF.get(library.partition(".so")[0] + ".so") for library in libraries}
    known = list(dict.fromkeys(package for package in packages.values() if package))
    commands = [f"apt-get install {' '.join(known)}"] if known else []
    unknown = [library for library, package in packages.items() if package is None]
    return ", then ".join([*commands, *(f"find the package: apt-file search {shlex.quote(name)}" for name in unknown)])


def _names_of(command: Path) -> list[Path]:
    """The command and every link on the way to the file itself."""
    names = [command.absolute()]
    while names[-1].is_symlink() and len(names) < _LINKS_FOLLOWED:
        names.append(names[-1].parent / names[-1].readlink())
    return [*names, command.resolve()]


def _importer_of_version(nsys: Path, root: Path) -> Path | None:
    short = ".".join(nsys_version(nsys).split(".")[:3])  # 2023.4.4.54 is installed in a folder 2023.4.4
    return next(iter(sorted(root.glob(f"opt/nvidia/nsight-systems*/{short}/host-linux-*/QdstrmImporter"))), None)
