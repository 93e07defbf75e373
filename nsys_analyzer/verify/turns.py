"""Runs two programs in turns, in pairs of processes without a profiler; and finds the files of the old one.

The processes of a pair are there at once, and take turns block by block: what else a machine does changes within
seconds, and meets both. One waits while the other has its block. Two that do not fit into memory run one after another,
and so do programs of several processes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.comparison.turns import TimedProcess
from nsys_analyzer.capture.jobs import LOG
from nsys_analyzer.capture.profilers import annotating, timed_command
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.inputs.targets import Target, is_python
from nsys_analyzer.system.machine import run_for_lines
from nsys_analyzer.system.process import Job, JobResult, run_job
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.schema import MS_PER_S

#: So long a block takes, and so long all of a process, about as its start; the fewest and most steps of a block, and
#: the fewest and most blocks.
_BLOCK_S, _MEASURED_S = 0.1, 3.0
_STEPS, _BLOCKS = (3, 100), (6, 30)
_ANOTHER = "Give the old program by --before, such as --before 'python old/train.py', or its commit by --before-commit"


@dataclass(frozen=True)
class Program:
    """A program that takes turns, and the folder in which it runs; ``moved`` from one folder of a checkout to another.

    What it imports by ``PYTHONPATH`` out of the first comes out of the second.
    """

    name: str
    target: Target
    folder: Path
    moved: tuple[Path, Path] | None = None

    @property
    def is_one_process(self) -> bool:
        """Returns whether nothing but one process of Python makes its steps, which can wait without others."""
        words = self.target.program
        return is_python(words[0]) and not self.target.ranks and "torch.distributed" not in " ".join(words)


def measured(target: Target, step_ms: float | None) -> Target:
    """Returns the target as it runs in turns, with as many steps as are worth its start."""
    if not (target.annotation and target.is_timed):
        raise ConfigurationError(
            "The steps of this program cannot be timed without a profiler", "nsys-analyze compare compares two captures"
        )
    step_s = step_ms / MS_PER_S if step_ms else 1.0
    block = min(max(round(_BLOCK_S / step_s), _STEPS[0]), _STEPS[1])
    blocks = min(max(round(_MEASURED_S / step_s / block), _BLOCKS[0]), _BLOCKS[1])
    asked = replace(target.annotation, steps=blocks * block, block=block, run_to_end=False, modules=False, stacks=False)
    return replace(target, annotation=asked)


def take_turns(
    programs: Sequence[Program], folder: Path, timeout_s: float | None
) -> Iterator[tuple[TimedProcess, TimedProcess]]:
    """Yields pairs of processes of two programs, for as long as they are asked for.

    Args:
        programs: the old one and the new one.
        folder: gets a log of each.
        timeout_s: seconds for each pair.

    Raises:
        CaptureError: one of them failed, or had no steps.
    """
    together, order = all(program.is_one_process for program in programs), [*programs]
    while True:
        with tempfile.TemporaryDirectory() as place:
            jobs = [_job(program, Path(place), folder) for program in order]
            result = JobResult("ok")
            if together:
                result = _run(jobs, folder, timeout_s)
                together = result.status != "oom"
            for job in () if together else jobs:
                result = _run([job], folder, timeout_s)
                if result.status != "ok":
                    break
            if result.status != "ok":
                raise CaptureError(str(result.message), f"The output of both is in {folder}")
            processes = {program.name: _measured(program, Path(place), folder) for program in order}
        yield processes[programs[0].name], processes[programs[1].name]
        order.reverse()


def _job(program: Program, place: Path, folder: Path) -> dict[str, Any]:
    variables = annotating(program.target.annotation, place / f"{program.name}.json")
    if program.moved:  # the hooks, which come first, stay where they are
        hooks, *paths = variables["PYTHONPATH"].split(os.pathsep)
        here, there = map(str, program.moved)
        variables["PYTHONPATH"] = os.pathsep.join([hooks, *(path.replace(here, there) for path in paths)])
    command, log = timed_command(program.target, folder.absolute()), folder.absolute() / f"{program.name}.log"
    return {"command": command, "folder": str(program.folder), "variables": variables, "log": str(log)}


def _run(jobs: Sequence[dict[str, Any]], folder: Path, timeout_s: float | None) -> JobResult:
    command = [sys.executable, "-m", "nsys_analyzer.verify.side_by_side", json.dumps(jobs)]
    return run_job(Job(command, timeout_s=timeout_s, ends_descendants=True), folder / LOG)


def _measured(program: Program, place: Path, folder: Path) -> TimedProcess:
    results = place / f"{program.name}.json"
    values = decode_json(results.read_bytes()) if results.is_file() else {}
    steps_ms = values.get("times_ms", {}).get("step", ())
    if not steps_ms:
        why = values.get("not_annotated") or "no step of it was found"
        raise CaptureError(f"The {program.name} program: {why}", f"Its output is in {folder}")
    block = program.target.annotation.block if program.target.annotation else 1
    return TimedProcess(
        tuple(steps_ms), block, tuple(map(float, values.get("losses", ()))), tuple(values.get("rows", ()))
    )


@contextmanager
def checkout(revision: str, words: Sequence[str]) -> Iterator[tuple[Path, tuple[str, ...], tuple[Path, Path]]]:
    """Yields this folder as it was at a commit, in a worktree that goes with the block; a command line, and what moved.

    Files that git ignores, or that lie outside of the repository, stay where they are: an interpreter, data.

    Raises:
        ConfigurationError: there is no such commit, or a file that the command line names is not in it.
    """
    root = run_for_lines("git", "rev-parse", "--show-toplevel")
    if root is None:
        raise ConfigurationError("This folder is in no git repository, so there is no old program in it", _ANOTHER)
    with tempfile.TemporaryDirectory(prefix="nsys-analyze-") as place:
        tree = Path(place).resolve() / Path(root[0]).name
        if run_for_lines("git", "worktree", "add", "--detach", str(tree), revision) is None:
            raise ConfigurationError(f"git has no commit {revision} to make a worktree of", "git log lists them")
        try:
            folder = tree / Path.cwd().relative_to(root[0])
            found = tuple(str(Path(word).absolute()) if _is_no_commits(word, root[0]) else word for word in words)
            if lacking := [word for word in found if Path(word).is_file() and not (folder / word).is_file()]:
                raise ConfigurationError(f"{lacking[0]} is not in commit {revision}", _ANOTHER)
            yield folder, found, (Path(root[0]), tree)
        finally:
            run_for_lines("git", "worktree", "remove", "--force", str(tree))


def _is_no_commits(word: str, root: str) -> bool:
    """Tells whether a word names a file or folder that is in no commit, since git ignores it or it lies elsewhere."""
    is_inside = Path(word).resolve().is_relative_to(root)
    return Path(word).exists() and (not is_inside or run_for_lines("git", "check-ignore", word) is not None)
