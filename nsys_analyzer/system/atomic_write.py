"""Writes files atomically: the old content stays until the new content is complete and on the disk."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nsys_analyzer.errors import NoSpaceError, NsysAnalyzerError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DISK_BYTES = 1 << 20  # below it nsys, SQLite and PyTorch fail in words of their own
_LONGEST_PREFIX = 40  # of a file's name in that of its folder, for a name is limited to 255 bytes
#: In each folder of an unfinished file, so that no other of such a name is taken for one.
UNFINISHED_MARK = ".written-by-nsys-analyze"


@contextmanager
def atomic_write(target: Path, needed_bytes: int | None = None, source: Path | None = None) -> Iterator[Path]:
    """Yields a path to write to, which replaces ``target`` when the block ends without an error.

    It lies in a folder of its own beside the target, so that a journal goes with an unfinished file; those that killed
    processes left are removed. A symbolic link stays, and the file that it leads to is replaced. The new file has the
    owner and the permissions of the one that it replaces, or what the umask leaves.

    Args:
        target: the file to write.
        needed_bytes: its size, where that is known, for the error of a full disk.
        source: the file that it is another form of; it never permits what its source does not.

    Raises:
        NsysAnalyzerError: a folder, a device or a pipe stands at ``target``.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written, or the source is gone.
    """
    check_regular(target)
    permitted = ~0 if source is None else source.stat().st_mode
    place = link_target(target)
    with _full_disk_named(target, needed_bytes), _unfinished_folder(place) as folder:
        unfinished = folder / place.name
        yield unfinished
        if place.exists():
            before = place.stat()
            with suppress(OSError):  # only root gives files away, and some file systems know no owners
                os.chown(unfinished, before.st_uid, before.st_gid)
            with suppress(OSError):  # nor permissions
                unfinished.chmod(stat.S_IMODE(before.st_mode))
        if (mode := stat.S_IMODE(unfinished.stat().st_mode)) & ~permitted:
            unfinished.chmod(mode & permitted)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
        unfinished.replace(place)


def write_text(target: Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8; raises what :func:`atomic_write` does."""
    content = text.encode()
    with atomic_write(target, len(content)) as unfinished:
        unfinished.write_bytes(content)


def append_text(target: Path, text: str) -> None:
    """Appends a text to a file: all of it or nothing; raises what :func:`atomic_write` does."""
    content = text.encode()
    with _full_disk_named(target, len(content)), target.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            written = file.write(content)
            if written < len(content):  # a disk takes what still fits, and says that it is full at the next write
                file.write(content[written:])
        except OSError:
            file.truncate(end)
            raise


def check_regular(path: Path, hint: str = "Name a file") -> None:
    """Checks that a path is a regular file, or that nothing is there; raises NsysAnalyzerError otherwise."""
    if path.exists() and not path.is_file():  # where a link leads, an open pipe (/dev/stdout) too, which has no path
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise NsysAnalyzerError(f"{path} is {kind}, not a file", hint)


def check_folder(path: Path, *, force: bool) -> None:
    """Makes sure that the folder of a file is there, or that ``force`` says to make it.

    Raises:
        NsysAnalyzerError: it is missing. Below a file none can be made: writing there says so.
    """
    nearest = next((folder for folder in path.parents if os.path.lexists(folder)), path.parent)
    if nearest != path.parent and nearest.is_dir() and not force:
        raise NsysAnalyzerError(f"There is no folder {path.parent}", "Make it, or add --force, which makes it")


def link_target(path: Path) -> Path:
    """Returns the path behind symbolic links; there need be no file."""
    return Path(os.path.realpath(path))


@contextmanager
def _unfinished_folder(place: Path) -> Iterator[Path]:
    """Makes a hidden folder beside a path, for the block; its lock tells that its process lives."""
    remove_unfinished(place.parent, place.stem)
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.stem[:_LONGEST_PREFIX]}-export-"))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: nobody tidies up there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / UNFINISHED_MARK).touch()  # after the lock: from now on others may look at it
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_unfinished(folder: Path, stem: str | None = None) -> None:
    """Removes the unfinished files that killed processes left in a folder, of the file ``stem`` alone if given."""
    name = "*" if stem is None else glob.escape(stem[:_LONGEST_PREFIX])
    for mark in list(folder.glob(f".{name}-export-*/{UNFINISHED_MARK}")):
        with suppress(OSError):  # it went in the meantime, its process lives, or locks are unknown there
            descriptor = os.open(mark.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def is_disk_full(folder: Path) -> bool:
    """Whether a folder's disk has next to no room left: programs that fail there may not say why."""
    return shutil.disk_usage(folder).free < _FULL_DISK_BYTES


@contextmanager
def _full_disk_named(target: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns what fails on a full disk, in whatever words, into an error that names the file and its need."""
    try:
        yield
    except NoSpaceError:
        raise
    except (OSError, RuntimeError, sqlite3.Error, NsysAnalyzerError) as error:
        number = error.errno if isinstance(error, OSError) else None
        folder = link_target(target).parent
        is_full = number in _FULL or (isinstance(error, sqlite3.Error) and "disk is full" in str(error))
        if not is_full and not is_disk_full(folder):
            if isinstance(error, sqlite3.OperationalError):  # a quota, a limit of a file's size, a disk that fails
                hint = f"Name another place, or look at this one: df -h {target.parent}"
                raise NsysAnalyzerError(f"{target} cannot be written ({error})", hint) from error
            raise
        reason = os.strerror(number if number in _FULL else errno.ENOSPC)
        needs = "" if needed_bytes is None else f"it needs {_size(needed_bytes)}, and "
        raise NoSpaceError(
            f"{target} cannot be written ({reason}): {needs}{_size(shutil.disk_usage(folder).free)} are free",
            f"Make room there, or name another place: df -h {target.parent}",
        ) from error


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
