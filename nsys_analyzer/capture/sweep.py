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
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.annotation.environment import annotating
from nsys_analyzer.capture.launcher import take_process_ids
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.capture.runner import ELSEWHERE, FINAL, LOG, already_there
from nsys_analyzer.capture.timing import Told, time_target, timed_command
from nsys_analyzer.configuration import Run, as_json, overlaid
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.machine import provenance
from nsys_analyzer.runs.manifest import MANIFEST, ManifestError, manifest_of_stem, read_manifest
from nsys_analyzer.runs.targets import Ranks, Target, capture_stems
from nsys_analyzer.runs.timings_csv import NAME as TIMINGS
from nsys_analyzer.runs.timings_csv import is_from_a_sweep, write_timings
from nsys_analyzer.system.atomic_write import remove_unfinished, write_text
from nsys_analyzer.system.process import Ended, Progress


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
        ended, told = Ended("ok"), [Told()] * (target.ranks.count if target.ranks else 1)
        if target.is_timed:
            progress.started(target.name, "timing")
            ended, told = time_target(target, part, timeout_s)
        # A program of the user's that fails is recorded as far as it comes.
        if profiler and (ended.status == "ok" or not target.timed):
            progress.started(target.name, f"profiling with {profiler.name}")
            environment = annotating(target.annotation)
            ended = profiler.record(target.program, part, part / LOG, timeout_s, environment, target.ranks)
            if ended.message:  # what it names is about to move
                ended = Ended(ended.status, ended.message.replace(str(part), str(folder / target.name)))
        pids = take_process_ids(part)
        if profiler and target.ranks and target.ranks.one_report:
            run = replace(run, rank_pids=pids or None)
        remove_unfinished(part)  # a recorder that was killed in the middle of its trace
        for name, manifest in _manifests(target, run, ended, told):
            write_text(part / name, json.dumps(manifest, indent=1) + "\n")
        _put_in_place(part, folder / target.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ended


def _manifests(target: Target, run: Run, ended: Ended, told: Sequence[Told]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and values of the manifest of each capture: one, or one for each rank with a capture of its own.

    One capture of all ranks has the first rank's description, and all their times.
    """
    ranks, stems = target.ranks, capture_stems(target.ranks)
    group = uuid.uuid4().hex
    for number, (stem, process) in enumerate(zip(stems, told, strict=False)):
        made = overlaid(run, process.run)
        if target.annotation:  # what the user says of a program outranks what was found in it
            made = overlaid(made, replace(target.run, steps=None, warmup_steps=None))
        made = replace(made, status=ended.status, message=ended.message)
        made = replace(made, capture=f"{stem}.sqlite") if run.capture else made
        manifest: dict[str, Any] = {"timings": process.timings}
        if ranks:
            made = replace(made, rank=None if ranks.one_report else number, world_size=ranks.count, group=group)
        if ranks and ranks.one_report:
            manifest["rank_timings"] = [one.timings for one in told]
        yield manifest_of_stem(stem), {**as_json(made), **manifest}


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
    known = {"command": _typed(timed_command(target, Path())), "profiler": profiler.name if profiler else "none"}
    if profiler is None:
        return known
    first, *rest = profiler.command(target.program, Path(), target.ranks)
    typed = _typed([first if first == sys.executable else Path(first).name, *rest])
    return {**known, **profiler.described(), "profile_command": typed, "capture": "capture.sqlite"}


def _typed(command: Sequence[str]) -> str:
    return shlex.join("python" if word == sys.executable else word for word in command)


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
    of_first_rank = place / manifest_of_stem(capture_stems(Ranks(1))[0])
    try:
        run = read_manifest(of_first_rank if of_first_rank.is_file() else place / MANIFEST)
    except ManifestError as error:
        raise ConfigurationError(f"{place} is there, and has no {MANIFEST} of a sweep", ELSEWHERE) from error
    if run.profiler is None:
        raise ConfigurationError(f"{place} is there, and its {MANIFEST} was not written by a sweep", ELSEWHERE)
    return run
