"""Writes a copy of an export that can be given to others: what analysis needs, and nothing of its owner."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.capture.atomic_write import check_regular, made_whole
from nsys_analyzer.capture.inputs import check_no_input
from nsys_analyzer.errors import NsysAnalyzerError, TraceError

if TYPE_CHECKING:
    from nsys_analyzer.capture.share_copy import LeftOut


@dataclass(frozen=True)
class Shared:
    """A copy: its path, the sizes of the export and of the copy in bytes, and what is not in it."""

    path: Path
    bytes_before: int
    bytes_after: int
    left_out: LeftOut


def share(trace: Path, output: Path, *, force: bool = False, keep: Sequence[re.Pattern[str]] = ()) -> Shared:
    """Copies what analysis needs of a trace, scrubbed, into a new export.

    The copy gives the same figures as the trace; the program's command line and names that read as none are not in
    its report. It appears whole or not at all.

    Args:
        trace: a ``.sqlite`` export, or anything else that ``Trace.load`` takes.
        output: the copy, ``.sqlite``; its folder is made as needed.
        force: whether a file that is there already is replaced. The trace itself never is.
        keep: names that match one of these as a whole stay as they are, whether they read as names or not.

    Raises:
        TraceError: the trace is absent, damaged, or not an nsys export.
        MissingTableError: it holds neither CUDA activity nor NVTX ranges.
        ExportError: a ``.nsys-rep`` could not be exported.
        NsysAnalyzerError: the output is the trace, is there already, or cannot be written.
    """
    from nsys_analyzer.capture.share_copy import copy_export
    from nsys_analyzer.trace.reader import Reader
    from nsys_analyzer.trace.trace import check_recorded, sqlite_of

    _check_output(trace, output, force=force)
    reader = Reader(sqlite_of(trace))
    _check_output(reader.path, output, force=force)
    check_recorded(reader, reader.path)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with made_whole(output) as unfinished:
            left_out = copy_export(reader, unfinished, keep)
            sizes = reader.path.stat().st_size, unfinished.stat().st_size
    except sqlite3.Error as error:
        raise _failed(reader.path, output, error) from error
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise NsysAnalyzerError(f"{output} cannot be written ({reason})", "Name another file with -o") from error
    return Shared(output, *sizes, left_out)


def _check_output(trace: Path, output: Path, *, force: bool) -> None:
    if output.suffix.lower() != ".sqlite":
        raise NsysAnalyzerError(f"{output} is not called like an export", f"Name it {output.stem or 'small'}.sqlite")
    check_regular(output, "Name a file with -o")
    check_no_input(output, [trace])
    if output.exists() and not force:
        raise NsysAnalyzerError(f"{output} is there already", "Name another file with -o, or replace it with --force")


def _failed(source: Path, output: Path, error: sqlite3.Error) -> NsysAnalyzerError:
    if "disk" in str(error).replace("disk image", ""):  # "database or disk is full", "disk I/O error"
        return NsysAnalyzerError(f"{output} cannot be written ({error})", "Name a file on another disk with -o")
    return TraceError(f"{source} is damaged or truncated ({error})", "Export the report again")
