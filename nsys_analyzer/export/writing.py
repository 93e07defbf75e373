"""Writes captures into a file of one of the formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.errors import TraceError
from nsys_analyzer.export import FORMATS, Format
from nsys_analyzer.export.captures import Capture, on_one_clock
from nsys_analyzer.report.writing import Output, check_target
from nsys_analyzer.runs.captures import find_traces
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.trace.sources import trace_stem


def default_name(path: Path, form: str) -> Path:
    """The file in the working folder that a capture, or a folder of captures, is exported to."""
    return Path(f"{trace_stem(Path(path.resolve().name))}{FORMATS[form].suffix}")


def export(
    paths: Sequence[Path], target: Path, form: str, names: PhaseNames | None = None, *, force: bool = False,
    tell: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Writes captures, and those of folders, into one file, whole or not at all; returns its size in bytes.

    Args:
        paths: the captures.
        target: the file.
        form: one of ``FORMATS``.
        names: the names of phases' ranges.
        force: whether to replace a file that was not written here.
        tell: takes a line for the user.

    Raises:
        NsysAnalyzerError: a capture cannot be read, or the file cannot be written.
    """
    chosen = FORMATS[form]
    output = Output(form, f"capture{chosen.suffix}", partial(_is_ours, chosen), chosen.suffix)
    # Before the captures are read: a long wait should not end in a typing error.
    check_target(target, paths, force=force, output=output)
    captures: Sequence[Capture] = [Capture(path, names or PhaseNames()) for path in find_traces(paths)]
    if not captures:  # a folder of runs that were not profiled
        raise TraceError(f"{paths[0]} holds no trace", "Give a trace, or a folder with some")
    if chosen.on_one_clock:
        captures = on_one_clock(captures, tell)
    with atomic_write(target) as unfinished:
        chosen.write(captures, unfinished)
        check_target(target, paths, force=force, output=output)  # reading has made exports
    return target.stat().st_size


def _is_ours(form: Format, path: Path) -> bool:
    return path.stat().st_size == 0 or form.is_ours(path)
