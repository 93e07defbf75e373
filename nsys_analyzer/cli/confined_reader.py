"""Confines the files that an agent can read to some folders."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.schema import TABLE_ENDINGS
from nsys_analyzer.trace.sources import capture_suffixes, trace_stem

#: The suffixes of files that are copied. Of files beside the requested captures, only small files with times and
#: manifests are copied. Each other file is replaced by an empty file with the same name.
_COPIED_SUFFIXES = (*TABLE_ENDINGS, ".gz", ".json", ".csv", ".jsonl")
_TIMES_AND_MANIFESTS, _MAX_BESIDE_BYTES = (".json", ".csv"), 1_000_000
#: The number of copied levels of folders: a requested folder, its runs, and an export of a run as a folder of tables.
_MAX_DEPTH = 3
#: The flags for opening a file: no link is followed, and opening a FIFO does not wait for its writer.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class ConfinedReader:
    """Gives access to captures inside some folders only, even if a link leads elsewhere or is made during the access.

    The reader opens a path once, folder by folder, without following links. It links or copies the opened files into a
    temporary folder, where they are read. So the files that were checked are the files that are read.
    """

    def __init__(self, folders: Sequence[Path], error_type: type[Exception]) -> None:
        """Confines access to the given folders. Every error has the given type."""
        self._folders, self._error_type = folders, error_type

    def resolve(self, path: str | Path) -> Path:
        """Returns the real path of a file or folder, which must be inside one of the folders."""
        real_path = Path(os.path.realpath(path))
        if not self._contains(real_path):
            raise self._error_type(f"{path} lies outside of {', '.join(map(str, self._folders))}")
        return real_path

    @contextmanager
    def open_copies(self, paths: str | Sequence[str]) -> Iterator[tuple[Path, ...]]:
        """Yields the paths of temporary copies of these files and folders; an error names the original paths."""
        requested_paths = [self.resolve(path) for path in ([paths] if isinstance(paths, str) else paths)]
        if not requested_paths:
            raise self._error_type("There is no path: give the path of a capture or of a folder")
        with tempfile.TemporaryDirectory(prefix="nsys-analyze-") as copies:
            try:
                for path in requested_paths:
                    folder = path if path.is_dir() else path.parent
                    self._copy_folder(folder, Path(copies), requested_paths, _MAX_DEPTH)
                    if self._contains(folder.parent):  # also copied: times and manifests in the parent folder
                        has_times = (folder.parent / "timings.csv").is_file()
                        self._copy_folder(folder.parent, Path(copies), requested_paths, 2 if has_times else 1)
                yield tuple(Path(copies, *path.parts[1:]) for path in requested_paths)
            except (NsysAnalyzerError, OSError) as error:
                raise self._error_type(str(error).replace(copies, "")) from error

    def _contains(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)

    def _copy_folder(self, folder: Path, copies: Path, requested_paths: Sequence[Path], levels: int) -> None:
        """Copies the files of a folder and of the folders in it, down to this number of levels."""
        descriptor = self._open_folder(folder)
        try:
            for name, folders, files, subfolder_descriptor in os.fwalk(".", dir_fd=descriptor):
                subfolder = folder / name
                is_last_level = len(subfolder.relative_to(folder).parts) + 1 >= levels
                folders[:] = [inner for inner in folders if not is_last_level and inner[0] != "."]
                for file in files:
                    self._copy_file(subfolder / file, subfolder_descriptor, copies, requested_paths)
        finally:
            os.close(descriptor)

    def _copy_file(self, path: Path, descriptor: int, copies: Path, requested_paths: Sequence[Path]) -> None:
        """Copies a file of an open folder, unless it cannot be opened or is a link to the outside."""
        target = copies.joinpath(*path.parts[1:])
        if os.path.lexists(target) or not (
            path in requested_paths or path.name.endswith((*capture_suffixes(), *_COPIED_SUFFIXES))
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.fdopen(os.open(path.name, _OPEN_FLAGS, dir_fd=descriptor), "rb")
        except OSError as error:
            real_path = Path(os.path.realpath(path))
            if error.errno == errno.ELOOP and self._contains(real_path):
                target.symlink_to(copies.joinpath(*real_path.parts[1:]))
                self._copy_folder(real_path.parent, copies, [*requested_paths, real_path], 1)
            return
        with file:
            status = os.fstat(file.fileno())
            prefixes = tuple(f"{trace_stem(requested_path)}." for requested_path in requested_paths)
            is_requested = path.name.startswith(prefixes) or any(map(path.is_relative_to, requested_paths))
            is_small = path.name.endswith(_TIMES_AND_MANIFESTS) and status.st_size <= _MAX_BESIDE_BYTES
            if not stat.S_ISREG(status.st_mode):
                return
            if not is_requested and not is_small:
                target.touch()
                return
            try:
                # With src_dir_fd, os.link follows the symbolic link in /proc to the open file.
                os.link(f"/proc/self/fd/{file.fileno()}", target, src_dir_fd=descriptor)
            except OSError:  # a link to the file fails across file systems, and if the file belongs to another user
                with target.open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _open_folder(self, path: Path) -> int:
        """Returns a descriptor of a folder without a link in its path, opened from one of the reader's folders down."""
        root = next(folder for folder in self._folders if path.is_relative_to(folder))
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for part in path.relative_to(root).parts:
            parent = folder
            try:
                folder = os.open(part, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=parent)
            finally:
                os.close(parent)
        return folder
