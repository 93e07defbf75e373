"""``make nsys``: from the machine's own apt sources, whatever its mirror is called, or a reason why not."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apt_sources import main, with_non_free_lines, with_non_free_stanzas
from tests.conftest import ROOT

STANZAS = """\
# the archive, through a mirror
Types: deb deb-src
URIs: https://mirror.example/debian
# a comment inside
Suites: bookworm bookworm-updates
Components: main
  contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJ
 -----END PGP PUBLIC KEY BLOCK-----

types: deb
uris: https://mirror.example/debian-security
suites: bookworm-security
components: main non-free
trusted: yes

Enabled: no
Types: deb
URIs: https://mirror.example/old
Suites: bookworm
Components: main

Types: deb-src
URIs: https://mirror.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: https://packages.example/node
Suites: nodistro
Components: main
"""
LINES = """\
# deb http://mirror.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib  # the archive
deb [ arch=amd64 signed-by=/etc/apt/keyrings/debian.gpg ] http://user:word@mirror.example/d stable main non-free
deb-src http://mirror.example/debian bookworm main
deb cdrom:[Debian_12]/ bookworm main
deb http://mirror.example/flat ./
deb https://packages.example/docker bookworm stable
deb https://packages.example/postgres bookworm-pgdg main
deb https://packages.example/cloud cloud-sdk-bookworm main
"""


def test_stanzas_keep_their_mirror_and_their_key() -> None:
    """Two of five are the archive: one is off, one is of sources, one is nobody's release."""
    first, second = with_non_free_stanzas(STANZAS, "bookworm")
    assert first == (
        "Types: deb\nComponents: main contrib non-free\nURIs: https://mirror.example/debian\n"
        "Suites: bookworm bookworm-updates\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mDMEY865UxYJ\n"
        " -----END PGP PUBLIC KEY BLOCK-----"
    )
    assert second == (
        "Types: deb\nComponents: main non-free\nuris: https://mirror.example/debian-security\n"
        "suites: bookworm-security\ntrusted: yes"
    )


def test_lines_keep_their_mirror_and_their_options() -> None:
    assert list(with_non_free_lines(LINES, "bookworm")) == [
        "deb http://mirror.example/debian bookworm main contrib non-free",
        "deb [ arch=amd64 signed-by=/etc/apt/keyrings/debian.gpg ] http://user:word@mirror.example/d stable main "
        "non-free",
    ]


@pytest.mark.parametrize(("name", "text"), [("debian.sources", STANZAS), ("debian.list", LINES)])
def test_a_folder_of_either_format(tmp_path: Path, name: str, text: str) -> None:
    parts, output = tmp_path / "sources.list.d", tmp_path / "out"
    parts.mkdir()
    output.mkdir()
    (parts / name).write_text(text)
    (parts / "debian.sources.save").write_text(STANZAS)  # apt reads *.list and *.sources alone
    assert main(tmp_path / "sources.list", parts, "bookworm", output) == 0
    written = {path.name: path.read_text() for path in output.iterdir()}
    assert "non-free" in written[name]
    assert sum(map(len, (text.strip() for text in written.values()))) == len(written[name].strip())


def test_a_machine_without_debian(tmp_path: Path) -> None:
    sources = tmp_path / "sources.list"
    sources.write_text("deb http://mirror.example/ubuntu jammy main universe\n")
    assert main(sources, tmp_path / "sources.list.d", "bookworm", tmp_path) == 1


def run_script(folder: Path, **commands: str) -> str:
    """What the script prints in a checkout of its own, with stand-ins for commands of the system."""
    (folder / "tests").mkdir()
    (folder / "bin").mkdir()
    for name in ("fetch_nsys.sh", "apt_sources.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    for name in ("bash", "cat", "dirname", "mkdir", "mktemp", "rm"):  # and no nsys of this machine
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
    for name, body in {"uname": "echo Linux x86_64", **commands}.items():
        command = folder / "bin" / name.replace("_", "-")
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    here = {**os.environ, "PATH": str(folder / "bin"), "PYTHON": sys.executable}
    finished = subprocess.run([folder / "tests/fetch_nsys.sh"], env=here, capture_output=True, text=True, check=True)
    return finished.stdout


def test_the_script_gives_apt_private_folders_and_the_machine_s_sources(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://mirror.example/debian stable main\n")
    printed = run_script(
        tmp_path,
        apt_config=f'echo "list={tmp_path}/sources.list parts={tmp_path}/none"',
        apt_get=f'echo "$@" >>{tmp_path}/asked; cat sources/debian.list >>{tmp_path}/asked; exit 1',
    )
    asked = (tmp_path / "asked").read_text()
    assert "deb http://mirror.example/debian stable main non-free" in asked
    assert "Dir::State::Lists=/" in asked
    assert "Dir::Etc::sourceparts=/" in asked
    assert printed.startswith("no nsys for the tests: the Debian sources of this machine do not give it")
    assert not (tmp_path / ".nsys").exists()


def test_the_script_says_why_where_there_is_no_debian(tmp_path: Path) -> None:
    config = f'echo "list={tmp_path}/sources.list parts={tmp_path}/none"'
    printed = run_script(tmp_path, apt_config=config, apt_get="exit 1")
    assert printed == (
        "no nsys for the tests: no apt source of this machine is Debian's archive "
        f"({tmp_path}/sources.list, {tmp_path}/none)\n"
    )
