"""From an Nsight Systems report (``.nsys-rep``) to its SQLite export, made once and kept."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from nsys_analyzer.capture.atomic_write import made_whole
from nsys_analyzer.capture.kineto_origin import is_current, is_made_from
from nsys_analyzer.capture.nsys import find_nsys, nsys_version
from nsys_analyzer.capture.placement import REPORT_SUFFIXES, is_sqlite, places, writable_place
from nsys_analyzer.capture.process import run_captured
from nsys_analyzer.errors import ExportError

_PROGRESS = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
_NOT_A_REPORT = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


def exported_sqlite(report: Path, timeout_s: float | None = None) -> Path:
    """Return the SQLite export of ``report``, running ``nsys export`` only where no fresh one is there.

    Looked for, and made, as ``X.sqlite`` beside ``X.nsys-rep``; in ``~/.cache/nsys-analyze`` (or below
    ``$XDG_CACHE_HOME``) where the report's folder cannot be written, or holds what a trace of PyTorch's profiler
    became under that name. An export is fresh when it is a SQLite file no older than the report. It appears whole
    or not at all.

    Raises ``ExportError``: no such report, an empty one, no ``nsys`` here, or an ``nsys`` that fails, is
    older than the report, or takes longer than ``timeout_s``.
    """
    _check_report(report)
    beside, cached = places(report, report.stem)
    if beside.exists() and not is_made_from(beside, report):
        beside = cached
    for export in (beside, cached):
        if is_current(export, report):
            return export
    nsys = find_nsys()
    if nsys is None:
        raise _missing_nsys(report, stale=beside if is_sqlite(beside) else None)
    target = writable_place(beside, cached)
    _export(nsys, report, target, timeout_s)
    return target


def _check_report(report: Path) -> None:
    if report.suffix not in REPORT_SUFFIXES:
        raise ExportError(
            f"{report} is not called like an Nsight Systems report (.nsys-rep)",
            "Give the .nsys-rep that nsys profile wrote, or its .sqlite export",
        )
    if not report.is_file():
        raise ExportError(f"{report} does not exist or is not a file", f"Look for it: ls {report.parent}")
    if report.stat().st_size == 0:
        raise ExportError(f"{report} is empty", "Capture again: the run ended before nsys wrote its report")


def _export(nsys: Path, report: Path, target: Path, timeout_s: float | None) -> None:
    with made_whole(target, source=report) as unfinished:
        finished = _run_export(nsys, report, unfinished, timeout_s)
        if finished.returncode != 0 or not is_sqlite(unfinished):
            raise _failed_export(nsys, report, finished)


def _run_export(nsys: Path, report: Path, output: Path, timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(output.absolute())]
    try:  # an absolute path is never taken for an option
        return run_captured([str(nsys), "export", *options, str(report.absolute())], timeout_s)
    except OSError as error:
        raise ExportError(f"{nsys} cannot be run: {error}", "Set NSYS to an nsys that runs here") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"nsys export of {report} was stopped after {timeout_s:g} s",
            f"Give it more time by hand: {_export_command(str(report))}",
        ) from error


def _missing_nsys(report: Path, stale: Path | None) -> ExportError:
    what = f"{report} must be exported to SQLite first, and there is no nsys here"
    if stale is not None:
        what = f"{stale} is older than {report.name}, and there is no nsys here to export it again"
    how = _export_command(report.name)
    return ExportError(what, f"Install Nsight Systems, or export on the machine that has it: {how}")


def _failed_export(nsys: Path, report: Path, finished: subprocess.CompletedProcess[str]) -> ExportError:
    said = last_words(finished.stderr) or last_words(finished.stdout)
    if any(phrase in said for phrase in _NOT_A_REPORT):
        return ExportError(
            f"{report} is not an Nsight Systems report, or only a part of one: {said}",
            "Copy it again, or capture again with nsys profile",
        )
    taken_by = _report_version(report)
    if taken_by and _as_numbers(taken_by) > _as_numbers(own := nsys_version(nsys)):
        return ExportError(
            f"{report} was taken by Nsight Systems {taken_by}, and {nsys} is {own}: too old to read it",
            f"Install a newer one, or export on the machine that took it: {_export_command(report.name)}",
        )
    reason = said or f"exit status {finished.returncode}"
    return ExportError(f"nsys export failed: {reason}", f"Try it by hand: {_export_command(str(report))}")


def last_words(output: str) -> str:
    """Return the last two lines of what ``nsys`` said, as one, without the progress bars between them."""
    lines = (line.strip() for line in re.split(r"[\r\n]", output))
    return " ".join([line for line in lines if line and not _PROGRESS.match(line)][-2:]).rstrip(".")


def _report_version(report: Path) -> str | None:
    """Return the version in the report's first bytes, ``2023.4.4.54``; those of 2022 and before hold none."""
    with report.open("rb") as file:
        match = _REPORT_VERSION.search(file.read(128))
    return match[1].decode().replace("@", ".") if match else None


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _export_command(report: str) -> str:
    path = f"./{report}" if report.startswith("-") else report  # not to be taken for an option
    return f"nsys export --type sqlite {shlex.quote(path)}"
