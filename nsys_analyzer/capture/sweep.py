"""A sweep: each target timed, then profiled, in processes of its own; each result is complete or absent.

Everything of a target is made in a hidden folder beside its own, which takes its name once it is complete. The
timings of all targets are written anew from their manifests each time, so an interrupt loses nothing.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.annotation.environment import annotating
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.capture.runner import ELSEWHERE, FINAL, LOG, already_there
from nsys_analyzer.configuration import Run, as_json, overlaid
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.machine import provenance
from nsys_analyzer.runs.manifest import MANIFEST, ManifestError, read_manifest, run_from
from nsys_analyzer.runs.targets import Target
from nsys_analyzer.runs.timings.writing import NAME as TIMINGS
from nsys_analyzer.runs.timings.writing import is_from_a_sweep, write_timings
from nsys_analyzer.system.atomic_write import remove_unfinished, write_text
from nsys_analyzer.system.process import Ended, Progress, last_lines, run_logged
from nsys_analyzer.system.strict_json import decode_json

#: What is said of a program whose hooks left nothing.
_NOTHING_FOUND = "no call of a PyTorch model was seen, so no step and no phase is known"


def run_sweep(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    command: str = "",
) -> list[Ended]:  # fmt: skip
    """Runs every target into ``folder``, one after the other, and keeps ``timings.csv`` up to date.

    Args:
        targets: those that are still to run.
        folder: the output folder, which must be there and locked (``runner.locked``).
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
    where = replace(Run(run=command or None), **provenance(Path.cwd()))
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
    target: Target, folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress, where: Run
) -> Ended:
    """Times and profiles one target in a hidden folder, and gives that its name."""
    part = _part(folder, target)
    shutil.rmtree(part, ignore_errors=True)  # what an earlier sweep was killed over
    part.mkdir()
    try:
        run = replace(where, **{**as_json(target.run), **_recorded(target, profiler)})
        ended, timings = Ended("ok"), None
        if target.is_timed:
            progress.started(target.name, "timing")
            ended, described, times_ms = _timed(target, part, timeout_s)
            run = overlaid(run, described)
            if target.annotation:  # what the user says of a program outranks what was found in it
                run = overlaid(run, replace(target.run, steps=None, warmup_steps=None))
            if times_ms or target.timed:  # a program of the user's may have no steps
                timings = {"status": ended.status, "message": ended.message, "times_ms": times_ms}
        # A program of the user's that fails is recorded as far as it comes.
        if profiler and (ended.status == "ok" or not target.timed):
            progress.started(target.name, f"profiling with {profiler.name}")
            ended = profiler.record(target.program, part, part / LOG, timeout_s, annotating(target.annotation))
            if ended.message:  # what it names is about to move
                ended = Ended(ended.status, ended.message.replace(str(part), str(folder / target.name)))
        run = replace(run, status=ended.status, message=ended.message)
        remove_unfinished(part)  # a recorder that was killed in the middle of its trace
        write_text(part / MANIFEST, json.dumps({**as_json(run), "timings": timings}, indent=1) + "\n")
        _put_in_place(part, folder / target.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ended


def _timed(target: Target, part: Path, timeout_s: float | None) -> tuple[Ended, Run, dict[str, Any]]:
    """Runs the target without a profiler: how it ended, its description of the run, and its times in ms by phase."""
    path = part / "results.json"  # absolute: an output folder may be called like an option
    words = ["--results", str(path.absolute())] if target.timed else []
    environment = annotating(target.annotation, path)
    ended = run_logged([*target.program, *words], part / LOG, timeout_s, environment=environment)
    results = decode_json(path.read_bytes()) if path.is_file() else {}
    path.unlink(missing_ok=True)
    run = run_from(results, path)
    times_ms = results.get("times_ms") or {}
    if target.annotation and ended.status == "ok" and not results:
        run = replace(run, not_annotated=_NOTHING_FOUND)
    if ended.status == "ok" and not times_ms and target.timed:
        ended = Ended("failed", f"it ended well and wrote no times: {last_lines(part / LOG)}")
    elif run.status == "oom":
        ended = Ended("oom", run.message)
    return ended, run, times_ms


def _part(folder: Path, target: Target) -> Path:
    """Where a target's result is made."""
    return folder / f".{target.name}.part"


def _put_in_place(part: Path, place: Path) -> None:
    """Gives a complete folder its name; what stood there goes only after that, and comes back if that fails."""
    _restore(part, place)
    if place.exists():
        place.rename(part.with_suffix(".old"))
    try:
        part.rename(place)
    finally:
        _restore(part, place)


def _restore(part: Path, place: Path) -> None:
    """Removes the folder that a result replaced, or gives it its name back where no result took its place."""
    old = part.with_suffix(".old")
    if old.exists() and not place.exists():
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _recorded(target: Target, profiler: Profiler | None) -> dict[str, Any]:
    """The manifest's entries on the profiler, and the command lines as one would type them beside the capture."""
    program = ["python" if target.program[0] == sys.executable else target.program[0], *target.program[1:]]
    known = {"command": shlex.join(program), "profiler": profiler.name if profiler else "none"}
    if profiler is None:
        return known
    first, *rest = profiler.command(program, Path())
    typed = shlex.join([Path(first).name, *rest])
    return {**known, **profiler.described(), "profile_command": typed, "capture": "capture.sqlite"}


def remaining(targets: Sequence[Target], folder: Path, profiler: Profiler | None, resume: bool | None) -> list[Target]:
    """The targets still to run: those without a result, or with one that a second try may better.

    Where a sweep was killed while it put a result in place, the older one is back, and what was half made is gone.

    Args:
        targets: all targets of the sweep.
        folder: the output folder.
        profiler: as for :func:`run_sweep`.
        resume: True keeps finished results, False replaces them, None refuses to choose.

    Raises:
        ConfigurationError: results are there already and ``resume`` does not say what to do, or they are of
            another program; or what would be replaced was not written by a sweep.
    """
    timings = folder / TIMINGS
    if timings.is_file() and not is_from_a_sweep(timings):
        raise ConfigurationError(f"{timings} was not written by a sweep, and would be replaced", ELSEWHERE)
    for target in targets:
        part = _part(folder, target)
        shutil.rmtree(part, ignore_errors=True)
        _restore(part, folder / target.name)
    there = {target.name: manifest for target in targets if (manifest := _finished(folder / target.name))}
    if resume is False:
        return list(targets)
    if there and resume is None:
        raise already_there(folder / next(iter(there)))
    return [
        target
        for target in targets
        if not (made := there.get(target.name)) or not _is_done(target, folder / target.name, made, profiler)
    ]


def _is_done(target: Target, place: Path, made: Run, profiler: Profiler | None) -> bool:
    """Whether a target needs no further run; what was recorded was timed, too.

    Raises:
        ConfigurationError: it was run with other options than now, or recorded by another profiler.
    """
    now = replace(target.run, **_recorded(target, profiler))
    if made.profiler != now.profiler and "none" not in (made.profiler, now.profiler):
        raise ConfigurationError(
            f"{place} was recorded by {made.profiler}, which {now.profiler} would replace",
            f"Give --profiler {made.profiler}, or another --output-dir, or --rerun",
        )
    commands = [(made.command, now.command)]
    if made.profiler == now.profiler:
        commands.append((made.profile_command, now.profile_command))
    for before, command in commands:
        if before != command:
            raise ConfigurationError(
                f"{place} was made with other options: {before}", "Give those, or another --output-dir, or --rerun"
            )
    return now.profiler in ("none", made.profiler) and made.status in FINAL


def _finished(place: Path) -> Run | None:
    """The manifest in a configuration's place, None where nothing stands there.

    Raises:
        ConfigurationError: what stands there was made by somebody else, and must not be replaced.
    """
    if not place.exists():
        return None
    try:
        run = read_manifest(place / MANIFEST)
    except ManifestError as error:
        raise ConfigurationError(f"{place} is there, and has no {MANIFEST} of a sweep", ELSEWHERE) from error
    if run.profiler is None:
        raise ConfigurationError(f"{place} is there, and its {MANIFEST} was not written by a sweep", ELSEWHERE)
    return run
