"""Runs a target without a profiler, for its times: what it says of itself, or each of its ranks does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.annotation.environment import annotating
from nsys_analyzer.capture.launcher import launched
from nsys_analyzer.capture.runner import LOG
from nsys_analyzer.configuration import Run
from nsys_analyzer.runs.manifest import run_from
from nsys_analyzer.runs.targets import OF_RANK, Target
from nsys_analyzer.system.process import Ended, last_lines, run_logged
from nsys_analyzer.system.strict_json import decode_json

#: What is said of a program whose hooks left nothing.
_NOTHING_FOUND = "no call of a PyTorch model was seen, so no step and no phase is known"


@dataclass(frozen=True)
class Told:
    """What a process told of its run, and the entry of a manifest with its times, None where it took none."""

    run: Run = field(default_factory=Run)
    timings: Mapping[str, Any] | None = None


def timed_command(target: Target, logs: Path) -> list[str]:
    """The command line that runs a target without a profiler; ``logs`` is a folder for those of several ranks."""
    return launched(target.program, target.ranks.count, logs) if target.ranks else list(target.program)


def time_target(target: Target, folder: Path, timeout_s: float | None) -> tuple[Ended, list[Told]]:
    """Runs the target in a folder for its files: how it ended, and what its process told, or each of its ranks."""
    place = folder.absolute()  # an output folder may be called like an option
    path = place / f"results{OF_RANK if target.ranks else ''}.json"
    words = ["--results", str(path)] if target.timed else []
    environment = annotating(target.annotation, path)
    command = [*timed_command(target, place), *words]
    ended = run_logged(command, folder / LOG, timeout_s, environment=environment)
    names = [path.name] if not target.ranks else [f"results_rank{rank}.json" for rank in range(target.ranks.count)]
    results = [_taken(place / name) for name in names]
    runs = [run_from(values, path) for values in results]
    if target.annotation and ended.status == "ok":
        silent = Run(not_annotated=_NOTHING_FOUND)
        runs = [run if values else silent for run, values in zip(runs, results, strict=True)]
    times = [values.get("times_ms") or {} for values in results]
    if ended.status == "ok" and target.timed and not all(times):
        ended = Ended("failed", f"it ended well and wrote no times: {last_lines(folder / LOG)}")
    elif full := next((run for run in runs if run.status == "oom"), None):
        ended = Ended("oom", full.message)
    told = [
        # A program of the user's may have no steps.
        Told(run, {"status": ended.status, "message": ended.message, "times_ms": times_ms})
        if times_ms or target.timed
        else Told(run)
        for run, times_ms in zip(runs, times, strict=True)
    ]
    return ended, told


def _taken(path: Path) -> dict[str, Any]:
    """The results in a file, which is removed; none where there is none."""
    results: dict[str, Any] = decode_json(path.read_bytes()) if path.is_file() else {}
    path.unlink(missing_ok=True)
    return results
