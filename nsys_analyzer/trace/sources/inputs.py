"""Keeps what is read from being written over, by whatever name it is called."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.sources import SOURCES, is_capture, is_made_from, trace_stem
from nsys_analyzer.trace.sources.folder import TABLE_ENDINGS
from nsys_analyzer.trace.sources.made import SQLITE_SIDECARS, places

_MANIFEST = "manifest.json"
_READ_IN_FOLDERS = (_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS)


def check_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Makes sure that a file to write is none of those that are read: hard links, symbolic links and spellings count.

    Args:
        output: the file to write.
        inputs: traces, files of timings, and folders that hold them.

    Raises:
        NsysAnalyzerError: it is one of the inputs, a manifest of theirs, or what an input was made from.
    """
    if not output.exists():
        return
    for source in inputs:
        for one in _with_sidecars(_files_in(source) if source.is_dir() else _files_behind(source)):
            if _is_same(output, one):
                named = "the input itself" if one == source else f"{one}, which is read"
                raise NsysAnalyzerError(f"{output} is {named}", "Name another file with -o")


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # the other is not there, or cannot be looked at: then it is not read, either
        return False


def _files_in(folder: Path) -> Iterator[Path]:
    """The files that a folder stands for, its own and those one level below."""
    for inside, subfolders, names in os.walk(folder, followlinks=True):
        for name in names:
            if is_capture(Path(inside, name)):
                yield from _files_behind(Path(inside, name))
            elif name.endswith(_READ_IN_FOLDERS):
                yield Path(inside, name)
        if Path(inside) != folder:
            subfolders.clear()


def _with_sidecars(files: Iterable[Path]) -> Iterator[Path]:
    """The files, each with what SQLite keeps beside it where it is a database."""
    for file in files:
        yield file
        yield from (file.with_name(file.name + ending) for ending in SQLITE_SIDECARS)


def _files_behind(source: Path) -> Iterator[Path]:
    """A file, its manifests, and the other forms of the same capture: report, trace, export, beside it or cached."""
    yield source
    for one in dict.fromkeys((source, Path(os.path.realpath(source)))):
        stem = trace_stem(one)
        yield from (one.with_name(name) for name in (_MANIFEST, f"{stem}.{_MANIFEST}"))
        yield from (one.with_name(f"{stem}{suffix}") for kind in SOURCES for suffix in kind.suffixes)
        export, cached = places(one, stem)
        yield cached
        named = (one.with_name(f"{stem}{suffix}") for kind in SOURCES for suffix in kind.ambiguous_suffixes)
        yield from (capture for capture in named if is_made_from(export, capture))
