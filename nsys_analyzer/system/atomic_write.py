"""Writes files atomically: the old content stays until the new content is complete and on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsys_analyzer.errors import NoSpaceError, NsysAnalyzerError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DISK_BYTES = 1 << 20  # below it nsys, SQLite and PyTorch fail in words of their own
_ALL_PERMISSIONS = 0o7777
_LONGEST_PREFIX = 40  # of a file's name in that of its folder, for a name is limited to 255 bytes
_UNFINISHED = re.compile(r"\.(.*)-export-[a-z0-9_]{8}", re.DOTALL)
#: In each of these folders, so that no other of such a name is taken for one.
UNFINISHED_MARK = ".written-by-nsys-analyze"
_OPEN_FILES = re.compile(r"/proc/\w+(/task/\d+)?/fd|/dev/fd")


@contextmanager
def atomic_write(target: Path, needed_bytes: int | None = None, source: Path | None = None) -> Iterator[Path]:
    """Yields a path to write to, which replaces ``target`` when the block ends without an error.

    It lies in a folder of its own beside the target, so that a journal goes with an unfinished file; those that killed
    processes left are removed. A symbolic link stays, and the file that it leads to is replaced. The new file has the
    permissions of the one that it replaces, or those that the umask leaves.

    Args:
        target: the file to write.
        needed_bytes: its size, where that is known, for the error of a full disk.
        source: the file that it is another form of; it never permits what its source does not.

    Raises:
        NsysAnalyzerError: a folder, a device, a pipe or a stream stands at ``target``.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written, or the source is gone.
    """
    check_regular(target)
    permitted = _ALL_PERMISSIONS if source is None else source.stat().st_mode
    place = link_target(target)
    remove_unfinished(place.parent, place.stem)
    try:
        folder, opened = _make_folder(place)
    except OSError as error:
        raise _no_space_error(error, target, needed_bytes) or error from error
    try:
        unfinished = folder / place.name
        yield unfinished
        _move_into_place(unfinished, place, permitted)
    except Exception as error:
        if full := _no_space_error(error, target, needed_bytes):
            raise full from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(opened)


@contextmanager
def atomic_folder(target: Path, source: Path) -> Iterator[Path]:
    """Yields a path for a new folder, which replaces ``target`` when the block ends without an error.

    It is open to those who may read ``source``, the file that it is another form of, and to nobody else.

    Raises:
        NoSpaceError: the disk is full.
        OSError: the folder around it cannot be written.
    """
    place = Path(os.path.realpath(target))
    remove_unfinished(place.parent, place.stem)
    folder, opened = _make_folder(place)
    try:
        yield folder / place.name
        readers = source.stat().st_mode & 0o044
        (folder / place.name).chmod(0o700 | readers | readers >> 2)
        if place.exists():  # a folder in use is not replaced in one step
            place.rename(folder / "before")
        (folder / place.name).rename(place)
    except Exception as error:
        if full := _no_space_error(error, target, None):
            raise full from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(opened)


def write_text(target: Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8; raises what :func:`atomic_write` does."""
    content = text.encode()
    with atomic_write(target, len(content)) as unfinished:
        unfinished.write_bytes(content)


def append_text(target: Path, text: str) -> None:
    """Appends a text to a file: all of it or nothing; raises what :func:`atomic_write` does."""
    content = text.encode()
    with target.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            written = file.write(content)
            if written < len(content):  # a disk takes what still fits, and says that it is full at the next write
                file.write(content[written:])
        except OSError as error:
            file.truncate(end)
            raise _no_space_error(error, target, len(content)) or error from error


def check_regular(path: Path, hint: str = "Name a file") -> None:
    """Checks that a path is a regular file, or that nothing is there; raises NsysAnalyzerError otherwise."""
    place = link_target(path, hint)
    if place.exists() and not place.is_file():
        kind = "a folder" if place.is_dir() else "a pipe or a device"
        raise NsysAnalyzerError(f"{path} is {kind}, not a file", hint)


def link_target(path: Path, hint: str = "Name a file") -> Path:
    """The path behind symbolic links; there need be no file.

    Raises:
        NsysAnalyzerError: an open file of a process, such as ``/dev/stdout``, or links that lead in a circle.
    """
    if Path(os.path.realpath(path)).is_symlink():
        raise NsysAnalyzerError(f"{path} is a symbolic link that leads in a circle", hint)
    at = path
    while at.is_symlink():
        if _OPEN_FILES.fullmatch(os.path.realpath(at.parent)):
            raise NsysAnalyzerError(f"{path} is a stream, not a file", hint)
        at = at.parent / at.readlink()
    return Path(os.path.realpath(at))


def remove_unfinished(folder: Path, stem: str | None = None) -> None:
    """Removes the unfinished files that killed processes left in a folder, of the file ``stem`` alone if given."""
    name = None if stem is None else stem[:_LONGEST_PREFIX]
    found = []
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:  # one may write where one may not list
        found = [(_UNFINISHED.fullmatch(entry.name), entry.path) for entry in entries]
    for path in (path for match, path in found if match and name in (None, match[1])):
        with contextlib.suppress(OSError):  # it went in the meantime, or is no folder, or locks are unknown there
            opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if Path(path, UNFINISHED_MARK).exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    Path(path).rmdir()  # killed before the mark; anybody else's holds something, and stays
            finally:
                os.close(opened)


def _make_folder(place: Path) -> tuple[Path, int]:
    """Makes a folder beside a path, and returns it with the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.stem[:_LONGEST_PREFIX]}-export-"))
        with contextlib.suppress(FileNotFoundError):
            (folder / UNFINISHED_MARK).touch()
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if _is_locked(opened) and folder.exists():
                return folder, opened
            os.close(opened)  # who tidies up here was faster than the lock: once more


def _is_locked(opened: int) -> bool:
    with contextlib.suppress(OSError):  # a file system without locks: nobody tidies up there
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _move_into_place(unfinished: Path, place: Path, permitted: int) -> None:
    """Replaces a file by the complete one, which gets its owner and those of its permissions that are permitted."""
    with contextlib.suppress(FileNotFoundError):
        before = place.stat()
        with contextlib.suppress(OSError):  # only root gives files away, and some file systems know no owners
            os.chown(unfinished, before.st_uid, before.st_gid)
        with contextlib.suppress(OSError):  # nor permissions
            unfinished.chmod(stat.S_IMODE(before.st_mode))
    if (mode := stat.S_IMODE(unfinished.stat().st_mode)) & ~permitted:
        unfinished.chmod(mode & permitted)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
    unfinished.replace(place)


def is_disk_full(folder: Path) -> bool:
    """Whether a folder's disk has next to no room left: programs that fail there may not say why."""
    return shutil.disk_usage(folder).free < _FULL_DISK_BYTES


def _no_space_error(error: Exception, target: Path, needed_bytes: int | None) -> NoSpaceError | None:
    """The error that names the file and its need where a disk is full, None where that is not why it failed."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, sqlite3.Error) and "disk is full" in str(error):
        number = errno.ENOSPC
    folder = link_target(target).parent
    known = isinstance(error, (OSError, RuntimeError, sqlite3.Error, NsysAnalyzerError))
    if isinstance(error, NoSpaceError) or not (number in _FULL or (known and is_disk_full(folder))):
        return None
    reason = os.strerror(number if number in _FULL else errno.ENOSPC)
    needs = "" if needed_bytes is None else f"it needs {_size(needed_bytes)}, and "
    return NoSpaceError(
        f"{target} cannot be written ({reason}): {needs}{_size(shutil.disk_usage(folder).free)} are free",
        f"Make room there, or name another place: df -h {target.parent}",
    )


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
