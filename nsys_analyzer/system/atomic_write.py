"""Writes files atomically: the old file remains until the new content is completely on the disk."""

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
from nsys_analyzer.text import format_bytes

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: A disk with less free space than this counts as full.
_FULL_DISK_BYTES = 1 << 20
#: The name of the temporary folder contains this many characters of the file's name, because names are limited to 255
#: bytes.
_MAX_NAME_CHARACTERS = 40
#: The file that marks a temporary folder of this module. A folder with a similar name is removed only with this file.
UNFINISHED_MARK = ".written-by-nsys-analyze"


@contextmanager
def atomic_write(target: Path, needed_bytes: int | None = None, source: Path | None = None) -> Iterator[Path]:
    """Yields a temporary path to write to. The file there replaces ``target`` when the block ends without an error.

    The path is in a temporary folder beside the target, so that the journal of a database is removed with the folder.
    Temporary folders that killed processes left are removed first. If the target is a symbolic link, the link remains,
    and the file that it points to is replaced. The new file gets the owner and the permissions of the old file. Without
    an old file, the umask sets the permissions.

    Args:
        target: the file to write.
        needed_bytes: size of the new file, for the message about a full disk; None if unknown.
        source: the file from which the new file is made. The new file gets no permission that its source lacks.

    Raises:
        NsysAnalyzerError: ``target`` is a folder, a device or a pipe.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written, or the source is missing.
    """
    check_regular(target)
    allowed_mode = ~0 if source is None else source.stat().st_mode
    destination = resolve_links(target)
    with _explain_full_disk(target, needed_bytes), _unfinished_folder(destination) as folder:
        unfinished_path = folder / destination.name
        yield unfinished_path
        if destination.exists():
            old_status = destination.stat()
            with suppress(OSError):  # ignores a failure: only root may change the owner
                os.chown(unfinished_path, old_status.st_uid, old_status.st_gid)
            with suppress(OSError):  # ignores a failure: some file systems have no permissions
                unfinished_path.chmod(stat.S_IMODE(old_status.st_mode))
        if (mode := stat.S_IMODE(unfinished_path.stat().st_mode)) & ~allowed_mode:
            unfinished_path.chmod(mode & allowed_mode)
        with unfinished_path.open("rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
        unfinished_path.replace(destination)


def write_text(target: Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8; raises the errors of :func:`atomic_write`."""
    content = text.encode()
    with atomic_write(target, len(content)) as unfinished:
        unfinished.write_bytes(content)


def append_text(target: Path, text: str) -> None:
    """Appends a text to a file, either completely or not at all; raises the errors of :func:`atomic_write`."""
    content = text.encode()
    with _explain_full_disk(target, len(content)), target.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            written = file.write(content)
            if written < len(content):  # a full disk accepts a part of the text, and reports an error at the next write
                file.write(content[written:])
        except OSError:
            file.truncate(end)
            raise


def check_regular(path: Path, hint: str = "Name a file") -> None:
    """Checks that a path is a regular file or does not exist; raises NsysAnalyzerError otherwise."""
    if path.exists() and not path.is_file():  # is_file follows links, such as /dev/stdout to an open pipe
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise NsysAnalyzerError(f"{path} is {kind}, not a file", hint)


def check_parent_folder(path: Path, *, force: bool) -> None:
    """Checks that the folder of a file exists, or that ``force`` allows this module to create the folder.

    If a parent of the folder is a file, the folder cannot be created. Then this function raises no error, because
    writing the file will raise an error.

    Raises:
        NsysAnalyzerError: the folder is missing.
    """
    nearest_folder = next((folder for folder in path.parents if os.path.lexists(folder)), path.parent)
    if nearest_folder != path.parent and nearest_folder.is_dir() and not force:
        raise NsysAnalyzerError(f"There is no folder {path.parent}", "Create it, or add --force to create it")


def resolve_links(path: Path) -> Path:
    """Returns a path without symbolic links. The file need not exist."""
    return Path(os.path.realpath(path))


@contextmanager
def _unfinished_folder(destination: Path) -> Iterator[Path]:
    """Creates a hidden folder beside a path for the block. A lock on the folder shows that the process still runs."""
    remove_unfinished(destination.parent, destination.stem)
    prefix = f".{destination.stem[:_MAX_NAME_CHARACTERS]}-export-"
    folder = Path(tempfile.mkdtemp(dir=destination.parent, prefix=prefix))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # ignores a failure: without locks, ``remove_unfinished`` removes nothing
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The mark follows the lock, because other processes remove folders with the mark and without a lock.
        (folder / UNFINISHED_MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_unfinished(folder: Path, stem: str | None = None) -> None:
    """Removes the temporary folders that killed processes left in a folder.

    If ``stem`` is given, only temporary folders of files with this stem are removed.
    """
    name = "*" if stem is None else glob.escape(stem[:_MAX_NAME_CHARACTERS])
    for mark in list(folder.glob(f".{name}-export-*/{UNFINISHED_MARK}")):
        with suppress(OSError):  # skips a folder that was removed or is locked, and a file system without locks
            descriptor = os.open(mark.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def is_disk_full(folder: Path) -> bool:
    """Returns whether the disk of a folder is nearly full. Programs that fail on a full disk may not say why."""
    return shutil.disk_usage(folder).free < _FULL_DISK_BYTES


@contextmanager
def _explain_full_disk(target: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns any error of the block into one that names the file and the needed space, if the disk is full."""
    try:
        yield
    except NoSpaceError:
        raise
    except (OSError, RuntimeError, sqlite3.Error, NsysAnalyzerError) as error:
        number = error.errno if isinstance(error, OSError) else None
        folder = resolve_links(target).parent
        is_full = number in _DISK_FULL_ERRNOS or (isinstance(error, sqlite3.Error) and "disk is full" in str(error))
        if not is_full and not is_disk_full(folder):
            # SQLite gives no errno for a quota, a limit of the file size or a failing disk.
            if isinstance(error, sqlite3.OperationalError):
                hint = f"Write to another disk, or check this one: df -h {target.parent}"
                raise NsysAnalyzerError(f"{target} cannot be written ({error})", hint) from error
            raise
        reason = os.strerror(number if number in _DISK_FULL_ERRNOS else errno.ENOSPC)
        needs = "" if needed_bytes is None else f"it needs {format_bytes(needed_bytes)}, and "
        raise NoSpaceError(
            f"{target} cannot be written ({reason}): {needs}{format_bytes(shutil.disk_usage(folder).free)} are free",
            f"Free some space, or write to another disk: df -h {target.parent}",
        ) from error
