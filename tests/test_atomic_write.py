"""Tests what an atomic write replaces, what it leaves alone, and what remains after a kill."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from nsys_analyzer.errors import NoSpaceError, NsysAnalyzerError
from nsys_analyzer.system.atomic_write import append_text, atomic_write, remove_unfinished, resolve_links, write_text


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_new_file_has_what_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "new.md", "text")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.md") == mode


@pytest.mark.parametrize("before", [None, 0o644])
@pytest.mark.parametrize(("of_source", "mode"), [(0o600, 0o600), (0o640, 0o640), (0o666, 0o644), (0o444, 0o444)])
def test_another_form_of_a_file_permits_no_more_than_it(
    of_source: int, mode: int, before: int | None, tmp_path: Path
) -> None:
    source, target = tmp_path / "t.json", tmp_path / "t.sqlite"
    source.touch()
    source.chmod(of_source)
    if before is not None:
        target.touch()
        target.chmod(before)
    umask = os.umask(0o022)
    try:
        with atomic_write(target, source=source) as unfinished:
            unfinished.write_text("new")
    finally:
        os.umask(umask)
    assert mode_of(target) == mode


def test_a_file_that_is_replaced_keeps_its_permissions_and_owner(tmp_path: Path) -> None:
    path = tmp_path / "old.md"
    path.write_text("old")
    if os.getuid() == 0:
        os.chown(path, 12345, 23456)
    path.chmod(0o604)
    before = path.stat()
    write_text(path, "new")
    assert (mode_of(path), path.stat().st_uid, path.stat().st_gid) == (0o604, before.st_uid, before.st_gid)
    assert path.read_text() == "new"


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "near/one").symlink_to("../far/two")
    (tmp_path / "far/two").symlink_to(tmp_path / "far/new.md")  # nothing is there yet
    seen = []
    with atomic_write(tmp_path / "near/one") as unfinished:
        seen = [path.name for path in (tmp_path / "near").iterdir()]
        unfinished.write_text("text")
    assert seen == ["one"]  # it was made beside what the links lead to
    assert (tmp_path / "near/one").is_symlink()
    assert (tmp_path / "far/two").is_symlink()
    assert (tmp_path / "far/new.md").read_text() == "text"


def test_an_open_pipe_of_a_process_is_no_file() -> None:
    """So is ``/dev/stdout`` before a pipe: its link leads to a name that is no path."""
    reading, writing = os.pipe()
    with pytest.raises(NsysAnalyzerError, match="is a pipe or a device"), atomic_write(Path(f"/dev/fd/{writing}")):
        pass
    os.close(reading)
    os.close(writing)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "folder": "is a folder", "pipe": "a pipe or a device", "/dev/null": "a pipe or a device",
    }.items():  # fmt: skip
        with pytest.raises(NsysAnalyzerError, match=said):
            write_text(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
    assert resolve_links(Path("/dev/shm/x.md")) == Path(os.path.realpath("/dev/shm"), "x.md")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("old")

    def interrupted() -> None:
        with atomic_write(tmp_path / "old.md") as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.md", "old")]


HALF = """
import os, sys
from pathlib import Path
from typing import NoReturn
from nsys_analyzer.system.atomic_write import atomic_write
with atomic_write(Path(sys.argv[1])) as unfinished:
    unfinished.write_text("half")
    print("half", flush=True)
    sys.stdin.read()
"""


def half_written(path: Path) -> subprocess.Popen[str]:
    """A process that has written half of a file, and waits."""
    writing = subprocess.Popen(
        [sys.executable, "-c", HALF, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writing.stdout
    assert writing.stdout.readline() == "half\n"
    return writing


def test_what_a_killed_process_left_goes_at_the_next_write(tmp_path: Path) -> None:
    killed, other, at_work = (half_written(tmp_path / name) for name in ("a.md", "b.md", "a.md"))
    killed.send_signal(signal.SIGKILL)
    other.send_signal(signal.SIGKILL)
    killed.communicate()
    other.communicate()
    mine = tmp_path / ".a-export-20250101"
    mine.mkdir()
    (mine / "notes.txt").write_text("of a person, in a folder of such a name")
    assert len(list(tmp_path.iterdir())) == 4
    write_text(tmp_path / "a.md", "whole")
    left = {path.name[:10] for path in tmp_path.iterdir() if path != mine}
    assert (mine / "notes.txt").exists()
    assert left == {"a.md", ".a-export-", ".b-export-"}  # of the one at work, and of another file
    assert at_work.communicate("")[0] == ""
    assert (tmp_path / "a.md").read_text() == "half"  # it was the last to finish
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "a.md"]


def test_a_long_name(tmp_path: Path) -> None:
    name = "é" * 126 + ".md"  # 255 bytes, the longest that there is
    write_text(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == [name]


# --- full disks ---


def test_what_sqlite_cannot_write_is_an_error_of_the_file(tmp_path: Path) -> None:
    """A quota, or a limit of a file's size: SQLite says no more than this."""
    target = tmp_path / "t.db"
    with pytest.raises(NsysAnalyzerError, match=r"t\.db cannot be written \(disk I/O error\)"), atomic_write(target):
        raise sqlite3.OperationalError("disk I/O error")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_the_file_and_its_need(tmp_path: Path) -> None:
    write_text(tmp_path / "a.md", "old")
    with pytest.raises(NoSpaceError) as known, atomic_write(tmp_path / "a.md", 3_000_000):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert known.value.message.startswith(
        f"{tmp_path}/a.md cannot be written (No space left on device): it needs 2.9\N{NO-BREAK SPACE}MiB, and "
    )
    assert known.value.hint == f"Free some space, or write to another disk: df -h {tmp_path}"
    with pytest.raises(NoSpaceError, match=r"[\d,.]+\s[MG]iB are free"), atomic_write(tmp_path / "a.md"):
        raise sqlite3.OperationalError("database or disk is full")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_an_error_of_another_kind_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.DatabaseError, match="malformed"), atomic_write(tmp_path / "a.md"):
        raise sqlite3.DatabaseError("database disk image is malformed")


@contextmanager
def limited() -> Iterator[None]:
    """Files of more than 1,000 bytes are refused, as by a quota; what pytest writes to is one, too, but not in here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    said = r"rows cannot be written \(File too large\): it needs 200\s+B"
    with limited():
        append_text(path, "x" * 899 + "\n")
        with pytest.raises(NoSpaceError, match=said):
            append_text(path, "y" * 199 + "\n")
        assert path.read_text() == "x" * 899 + "\n"
        append_text(path, "z\n")
    assert path.read_text().endswith("x\nz\n")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_owners_or_permissions(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    target = tmp_path / "report.md"
    target.write_text("old")
    monkeypatch.setattr("os.chown", refuse)
    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    write_text(target, "new")
    assert target.read_text() == "new"
