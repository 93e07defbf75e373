"""From an Nsight Systems report (``.nsys-rep``) to its SQLite export, made once and kept."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from nsys_analyzer.capture.nsys import find_nsys, nsys_version
from nsys_analyzer.errors import ExportError

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
"""What a report is called: ``.qdrep`` until Nsight Systems 2021.3, ``.nsys-rep`` since."""

_SQLITE_MAGIC = b"SQLite format 3\x00"
_PROGRESS = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
_NOT_A_REPORT = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


def exported_sqlite(report: Path) -> Path:
    """Return the SQLite export of ``report``, running ``nsys export`` only where no fresh one is there.

    Looked for, and made, as ``X.sqlite`` beside ``X.nsys-rep``; in ``~/.cache/nsys-analyze`` (or below
    ``$XDG_CACHE_HOME``) where the report's folder cannot be written. An export is fresh when it is a SQLite
    file no older than the report. It appears whole or not at all.

    Raises ``ExportError``: no such report, an empty one, no ``nsys`` here, or an ``nsys`` that fails or is
    older than the report.
    """
    _check_report(report)
    beside, cached = report.with_suffix(".sqlite"), _cached_path(report)
    for export in (beside, cached):
        if _is_fresh(export, report):
            return export
    nsys = find_nsys()
    if nsys is None:
        raise _missing_nsys(report, stale=beside if _is_sqlite(beside) else None)
    target = beside if _is_writable(beside.parent) else _made_cache_folder(cached)
    _export(nsys, report, target)
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


def _cached_path(report: Path) -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    cache = Path(root) if root else Path("~/.cache").expanduser()
    digest = hashlib.sha256(os.fsencode(report.resolve())).hexdigest()[:16]
    return cache / "nsys-analyze" / digest / f"{report.stem}.sqlite"


def _made_cache_folder(cached: Path) -> Path:
    """Make the folder of ``cached``, closed to others: an export holds its owner's environment variables."""
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(
            f"The export has nowhere to go: {error}", "Set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return cached


def _is_fresh(export: Path, report: Path) -> bool:
    return _is_sqlite(export) and export.stat().st_mtime_ns >= report.stat().st_mtime_ns


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def _is_writable(folder: Path) -> bool:
    """Say whether a file can be made in ``folder``, by making one: modes and mounts both have a say."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _export(nsys: Path, report: Path, target: Path) -> None:
    # In a folder of its own, on the target's file system, so that a journal goes with an unfinished export.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-export-") as folder:
        unfinished = Path(folder) / target.name
        finished = _run_export(nsys, report, unfinished)
        if finished.returncode != 0 or not _is_sqlite(unfinished):
            raise _failed_export(nsys, report, finished)
        unfinished.replace(target)


def _run_export(nsys: Path, report: Path, output: Path) -> subprocess.CompletedProcess[str]:
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(output)]
    try:
        return subprocess.run(
            [str(nsys), "export", *options, str(report)], capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ExportError(f"{nsys} cannot be run: {error}", "Set NSYS to an nsys that runs here") from error


def _missing_nsys(report: Path, stale: Path | None) -> ExportError:
    what = f"{report} must be exported to SQLite first, and there is no nsys here"
    if stale is not None:
        what = f"{stale} is older than {report.name}, and there is no nsys here to export it again"
    how = _export_command(report.name)
    return ExportError(what, f"Install Nsight Systems, or export on the machine that has it: {how}")


def _failed_export(nsys: Path, report: Path, finished: subprocess.CompletedProcess[str]) -> ExportError:
    said = _last_words(finished.stderr) or _last_words(finished.stdout)
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


def _last_words(output: str) -> str:
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
    return f"nsys export --type sqlite {shlex.quote(report)}"
