"""A sweep: each target timed, then profiled, in processes of its own; each result whole or not there.

Everything of a target is made in a hidden folder beside its own, which takes its name once it is complete. The
timings of all targets are written anew from their manifests each time, so an interrupt loses nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.atomic_write import check_regular, remove_unfinished, write_whole
from nsys_analyzer.capture.machine import provenance
from nsys_analyzer.capture.manifest import SCHEMA_VERSION
from nsys_analyzer.capture.process import Ended, end_left_in, last_lines, run_logged
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.capture.progress import Progress
from nsys_analyzer.capture.targets import Target
from nsys_analyzer.capture.timings.writing import NAME as TIMINGS
from nsys_analyzer.capture.timings.writing import is_from_a_sweep, write_timings
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.strict_json import decoded

MANIFEST = "manifest.json"
_LOG = "target.log"
_LOCK = ".lock"
_ELSEWHERE = "Move it away, or name another --output-dir"
#: Ends after which a configuration is not run again: more memory is not going to appear.
_FINAL = ("ok", "oom")


def run_sweep(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    command: str = "",
) -> list[Ended]:  # fmt: skip
    """Runs every target into ``folder``, one after the other, and keeps ``timings.csv`` up to date.

    Args:
        targets: those that are still to run.
        folder: the output folder, which must be there and locked (:func:`locked`).
        profiler: records the targets, None for timings alone.
        timeout_s: seconds for each process.
        progress: is told of each step.
        command: the command line of the sweep, for the manifests.

    Returns:
        How each target ended; running out of memory, a crash or a time-out is a result like others.

    Raises:
        KeyboardInterrupt: what was finished is kept, what was at work is gone.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    where = {"schema_version": SCHEMA_VERSION, "run": command or None, **provenance(Path.cwd())}
    write_timings(folder)  # of what is there: an earlier sweep may have ended just before it did so
    results = []
    for target in targets:
        before = time.monotonic()
        ended = _run_target(target, folder, profiler, timeout_s, progress, where)
        write_timings(folder)
        progress.ended(target.name, ended, time.monotonic() - before)
        results.append(ended)
    return results


def _run_target(
    target: Target, folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    where: dict[str, Any],
) -> Ended:  # fmt: skip
    """Times and profiles one target in a hidden folder, and gives that its name."""
    part = _part(folder, target)
    shutil.rmtree(part, ignore_errors=True)  # what an earlier sweep was killed over
    part.mkdir()
    try:
        results: dict[str, Any] = {}
        ended = Ended("ok")
        if target.timed:
            progress.started(target.name, "timing")
            ended, results = _timed(target, part, timeout_s)
        timing = {"status": ended.status, "message": ended.message, "times_ms": results.pop("times_ms", {})}
        if profiler and ended.status == "ok":
            progress.started(target.name, f"profiling with {profiler.name}")
            ended = profiler.record(target.program, part, part / _LOG, timeout_s)
            if ended.message:  # what it names is about to move
                ended = Ended(ended.status, ended.message.replace(str(part), str(folder / target.name)))
        manifest = {
            **where, **target.described, **results, **_recorded(target, profiler),
            "status": ended.status, "message": ended.message, "timings": timing if target.timed else None,
        }  # fmt: skip
        remove_unfinished(part)  # a recorder that was killed in the middle of its trace
        write_whole(part / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        _put_in_place(part, folder / target.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ended


def _timed(target: Target, part: Path, timeout_s: float | None) -> tuple[Ended, dict[str, Any]]:
    """Runs the target without a profiler: how it ended, and what it said of itself and its times."""
    path = part / "results.json"  # absolute: an output folder may be called like an option
    ended = run_logged([*target.program, "--results", str(path.absolute())], part / _LOG, timeout_s)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.unlink(missing_ok=True)
    if ended.status == "ok" and not results.get("times_ms"):
        return Ended("failed", f"it ended well and wrote no times: {last_lines(part / _LOG)}"), results
    status, message = results.pop("status", ended.status), results.pop("message", ended.message)
    return (Ended(status, message) if status == "oom" else ended), results


def _part(folder: Path, target: Target) -> Path:
    """Where a target's result is made."""
    return folder / f".{target.name}.part"


def recover(targets: Sequence[Target], folder: Path) -> None:
    """Brings the results of these targets into order where a sweep was killed while it put one in place.

    A result that was about to be replaced is back in its place, and what was half made is gone.
    """
    for target in targets:
        part, place = _part(folder, target), folder / target.name
        shutil.rmtree(part, ignore_errors=True)
        old = part.with_suffix(".old")
        if old.exists() and not place.exists():
            old.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def _typed(program: Sequence[str]) -> tuple[str, ...]:
    """A command line as one would type it: this interpreter is python."""
    first, *rest = program
    return ("python" if first == sys.executable else first, *rest)


def _recorded(target: Target, profiler: Profiler | None) -> dict[str, str]:
    """What the manifest says of the profiler, and the command lines as one would type them beside the capture."""
    program = _typed(target.program)
    known = {"command": shlex.join(program), "profiler": profiler.name if profiler else "none"}
    if profiler is None:
        return known
    first, *rest = profiler.command(program, Path())
    typed = shlex.join([Path(first).name, *rest])
    return {**known, **profiler.described(), "profile_command": typed, "capture": "capture.sqlite"}


def _put_in_place(part: Path, place: Path) -> None:
    """Gives a complete folder its name; what stood there goes only after that, and comes back if that fails."""
    old = part.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    try:
        part.rename(place)
    except BaseException:
        if old.exists() and not place.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remaining(targets: Sequence[Target], folder: Path, profiler: Profiler | None, resume: bool | None) -> list[Target]:
    """The targets still to run: those without a result, or with one that a second try may better.

    Args:
        targets: all targets of the sweep.
        folder: the output folder.
        profiler: as for :func:`run_sweep`.
        resume: True keeps finished results, False replaces them, None refuses to choose.

    Raises:
        ConfigurationError: results are there already and ``resume`` does not say what to do, or they are of
            another program; or what would be replaced is none of a sweep's.
    """
    timings = folder / TIMINGS
    if timings.is_file() and not is_from_a_sweep(timings):
        raise ConfigurationError(f"{timings} is none of a sweep's, and would be replaced", _ELSEWHERE)
    there = {target.name: manifest for target in targets if (manifest := _finished(folder / target.name))}
    if resume is False:
        return list(targets)
    if there and resume is None:
        raise ConfigurationError(
            f"{folder / next(iter(there))} is there already",
            "--resume keeps what is finished, --rerun replaces it, --output-dir puts the results elsewhere",
        )
    wanted = profiler.name if profiler else "none"
    todo = []
    for target in targets:
        manifest = there.get(target.name)
        if manifest:
            _check_options(folder / target.name, manifest, _recorded(target, profiler))
        recorded = manifest and wanted in ("none", manifest.get("profiler"))  # what was recorded was timed, too
        if not manifest or not recorded or manifest.get("status") not in _FINAL:
            todo.append(target)
    return todo


def _check_options(place: Path, manifest: dict[str, Any], now: dict[str, str]) -> None:
    """Raises where a result was made with other options than now, or recorded by another profiler."""
    both = {manifest["profiler"], now["profiler"]} - {"none"}
    if len(both) > 1:
        raise ConfigurationError(
            f"{place} was recorded by {manifest['profiler']}, which {now['profiler']} would replace",
            f"Give --profiler {manifest['profiler']}, or another --output-dir, or --rerun",
        )
    keys = ("command", "profile_command") if manifest["profiler"] == now["profiler"] else ("command",)
    for made in (manifest.get(key) for key in keys if manifest.get(key) != now.get(key)):
        raise ConfigurationError(
            f"{place} was made with other options: {made}", "Give those, or another --output-dir, or --rerun"
        )


def _finished(place: Path) -> dict[str, Any] | None:
    """The manifest in a configuration's place, None where nothing stands there.

    Raises:
        ConfigurationError: what stands there was made by somebody else, and must not be replaced.
    """
    if not place.exists():
        return None
    try:
        manifest = decoded((place / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{place} is there, and has no {MANIFEST} of a sweep", _ELSEWHERE) from error
    if not isinstance(manifest, dict) or "profiler" not in manifest:
        raise ConfigurationError(f"{place} is there, and its {MANIFEST} is none of a sweep's", _ELSEWHERE)
    return manifest


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other sweeps out of it; what an earlier one has left running there is ended.

    Raises:
        ConfigurationError: another sweep is at work there, or its lock is somebody else's file.
        CaptureError: what an earlier sweep has left running does not end.
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_lock(folder / _LOCK)
    with (folder / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigurationError(
                f"Another sweep is at work in {folder} (process {lock.read().strip() or 'unknown'})",
                "Wait for it, or name another --output-dir",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        end_left_in(folder)
        yield


def _check_lock(path: Path) -> None:
    """Makes sure that a lock's file holds the number of a process at most, for it is written over."""
    check_regular(path)
    if path.exists() and path.read_bytes().strip(b"0123456789"):
        raise ConfigurationError(f"{path} is none of a sweep's, and would be replaced", _ELSEWHERE)
