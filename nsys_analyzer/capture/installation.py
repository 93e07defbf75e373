"""What an installation of Nsight Systems needs beside ``nsys``: its importer, and the importer's libraries."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from nsys_analyzer.capture.nsys import nsys_version

_ANSWER_TIMEOUT_S = 30
_LINKS_FOLLOWED = 16

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


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    """Find the ``QdstrmImporter`` of an ``nsys``: it turns what was recorded (``.qdstrm``) into a report.

    NVIDIA's packages have it in ``host-linux-*`` beside the folder of ``nsys``, and Nsight Compute in
    ``host/linux-desktop-*``. Debian's have it beside the folder of a *link* to ``nsys``, where ``nsys``, which
    asks for its own real path, does not look. Where ``nsys`` is a script (the toolkit's ``bin``), the importer is
    that of the installation with its version.

    Args:
        nsys: the command, as found.
        root: the folder below which installers work.

    Returns:
        The importer, or None where there is none.
    """
    folders = [name.parent.parent for name in _names_of(nsys)]
    real = nsys.resolve()
    if len(real.parents) > 3:  # lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys: lib/nsight-systems
        folders.append(real.parents[3] / real.parents[1].name)
    beside = (found for folder in folders for found in sorted(folder.resolve().glob("*/QdstrmImporter")))
    return next(beside, None) or _importer_of_version(nsys, root)


def missing_libraries(binary: Path) -> tuple[str, ...]:
    """The shared libraries that a binary needs, itself or through another, and that are not here: ``libdw.so.1``.

    Empty where nothing is missing, and where ``ldd`` cannot say: ``start_fault`` tells those two apart.
    """
    try:
        answer = subprocess.run(
            ["ldd", binary], capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = (line.partition("=>") for line in answer.stdout.splitlines())
    return tuple(dict.fromkeys(name.strip() for name, _, where in lines if where.strip() == "not found"))


def start_fault(binary: Path) -> str | None:
    """Start a binary with ``--version``: None where it starts, else what was said instead."""
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if answer.returncode == 0:
        return None
    said = answer.stderr.strip().splitlines() or answer.stdout.strip().splitlines()
    return said[-1] if said else f"exit status {answer.returncode}"


def library_remedy(libraries: tuple[str, ...]) -> str:
    """The commands that install missing libraries on Debian and Ubuntu; other systems name packages otherwise."""
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
