from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.capture.nsys import find_importer, find_start_fault
from tests.test_nsys import make_command

VERSION = "echo 'NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0'"


SYSTEMS = "opt/nvidia/nsight-systems/2024.1.1"
COMPUTE = "opt/nvidia/nsight-compute/2025.3.1/host"


@pytest.mark.parametrize(
    ("nsys", "importer"),
    [
        (f"{SYSTEMS}/bin/nsys", f"{SYSTEMS}/host-linux-x64"),
        (f"{SYSTEMS}/target-linux-x64/nsys", f"{SYSTEMS}/host-linux-x64"),
        (f"{COMPUTE}/target-linux-x64/nsys", f"{COMPUTE}/linux-desktop-glibc_2_11_3-x64"),
        # Debian's, where NSYS names the file itself
        ("usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys", "usr/lib/nsight-systems/host-linux-x64"),
    ],
)
def test_the_importer_of_a_layout(nsys: str, importer: str, tmp_path: Path) -> None:
    command = make_command(tmp_path / nsys, VERSION)
    assert find_importer(command) is None
    installed = make_command(tmp_path / importer / "QdstrmImporter")
    assert find_importer(command) == installed


def test_debian_has_it_beside_a_link(tmp_path: Path) -> None:
    """/usr/bin/nsys leads to lib/nsight-systems/bin/nsys, that to target-linux-x64, and that folder elsewhere."""
    make_command(tmp_path / "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys", VERSION)
    importer = make_command(tmp_path / "usr/lib/nsight-systems/host-linux-x64/QdstrmImporter")
    links = {
        "usr/bin/nsys": "../lib/nsight-systems/bin/nsys",
        "usr/lib/nsight-systems/bin/nsys": "../target-linux-x64/nsys",
        "usr/lib/nsight-systems/target-linux-x64": "../x86_64-linux-gnu/nsight-systems/target-linux-x64",
    }
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert find_importer(tmp_path / "usr/bin/nsys") == importer


def test_more_links_than_are_followed(tmp_path: Path) -> None:
    real = make_command(tmp_path / "a/b/nsys", VERSION)
    names = [tmp_path / f"links/{number}" for number in range(30)]
    names[0].parent.mkdir()
    for name, target in zip(names, [*names[1:], real], strict=True):
        name.symlink_to(target)
    importer = make_command(tmp_path / "a/host-linux-x64/QdstrmImporter")
    assert find_importer(names[0]) == importer


def test_what_keeps_a_command_from_starting(tmp_path: Path) -> None:
    assert find_start_fault(make_command(tmp_path / "good", 'test "$1" = --version')) is None
    assert find_start_fault(
        make_command(tmp_path / "bad", "echo first; echo 'libdw.so.1: not here' >&2; exit 127")
    ) == ("libdw.so.1: not here")
    assert find_start_fault(make_command(tmp_path / "silent", "exit 5")) == "exit status 5"
    assert "No such file" in (find_start_fault(tmp_path / "absent") or "")
