"""Runs two programs in pairs of processes that take turns, without a profiler, and checks out the old program.

The two processes of a pair run at the same time and take turns: while one runs a block of steps, the other waits. The
load of a machine changes within seconds, so both programs meet the same load. If the two processes do not fit into
memory together, or if a program has several processes, the programs run one after the other.
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
from nsys_analyzer.capture.profilers import make_hook_variables, make_timed_command
from nsys_analyzer.capture.targets import Target, is_python
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.system.machine import run_for_lines
from nsys_analyzer.system.process import Job, JobResult, run_job
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.schema import MS_PER_S

#: The intended duration of a block of steps, and of all measured steps of a process, in seconds. A process should
#: measure for about as long as it takes to start.
_BLOCK_DURATION_S, _MEASURED_DURATION_S = 0.1, 3.0
_MIN_STEPS_PER_BLOCK, _MAX_STEPS_PER_BLOCK = 3, 100
_MIN_BLOCKS, _MAX_BLOCKS = 6, 30
#: The hint of the errors that are raised if the old program is not known.
HOW_TO_NAME_OLD = (
    "Give the old program with --before, such as --before 'python old/train.py', or its commit with --before-commit"
)


@dataclass(frozen=True)
class Program:
    """A program that takes turns.

    Attributes:
        name: "old" or "new". The log of the program has this name.
        target: how the program is run.
        folder: the working folder of the program.
        root_and_worktree: the root of the repository, and the worktree that replaces the root in ``PYTHONPATH``; None
            if the program runs from the working folder.
    """

    name: str
    target: Target
    folder: Path
    root_and_worktree: tuple[Path, Path] | None = None

    @property
    def is_one_process(self) -> bool:
        """Returns whether one Python process runs all steps of the program, so that it can wait for its turn."""
        words = self.target.program
        return is_python(words[0]) and not self.target.ranks and "torch.distributed" not in " ".join(words)


def take_turns(
    programs: Sequence[Program], folder: Path, timeout_s: float | None
) -> Iterator[tuple[TimedProcess, TimedProcess]]:
    """Runs pairs of processes without end, and yields the measurements of each pair, the old program first.

    Args:
        programs: the old and the new program.
        folder: receives a log of each program.
        timeout_s: the time limit of each pair, in seconds.

    Raises:
        CaptureError: one of the programs failed, or had no steps.
    """
    is_simultaneous, ordered_programs = all(program.is_one_process for program in programs), [*programs]
    while True:
        with tempfile.TemporaryDirectory() as results_folder:
            jobs = [_make_job(program, Path(results_folder), folder) for program in ordered_programs]
            job_result = JobResult("ok")
            if is_simultaneous:
                job_result = _run_jobs(jobs, folder, timeout_s)
                is_simultaneous = job_result.status != "oom"
            for job in () if is_simultaneous else jobs:
                job_result = _run_jobs([job], folder, timeout_s)
                if job_result.status != "ok":
                    break
            if job_result.status != "ok":
                raise CaptureError(str(job_result.message), f"The output of both is in {folder}")
            processes = {
                program.name: _read_measurement(program, Path(results_folder), folder) for program in ordered_programs
            }
        yield processes[programs[0].name], processes[programs[1].name]
        ordered_programs.reverse()  # the programs alternate in having the first turn


def _make_job(program: Program, results: Path, folder: Path) -> dict[str, Any]:
    """Returns the job of ``side_by_side`` that runs a program and writes its measurement into ``results``."""
    variables = make_hook_variables(program.target.annotation, results / f"{program.name}.json")
    if program.root_and_worktree:  # the first path leads to the hooks, which stay those of this installation
        hooks, *paths = variables["PYTHONPATH"].split(os.pathsep)
        root, worktree = map(str, program.root_and_worktree)
        variables["PYTHONPATH"] = os.pathsep.join([hooks, *(path.replace(root, worktree) for path in paths)])
    command, log = make_timed_command(program.target, folder.absolute()), folder.absolute() / f"{program.name}.log"
    return {"command": command, "folder": str(program.folder), "variables": variables, "log": str(log)}


def _run_jobs(jobs: Sequence[dict[str, Any]], folder: Path, timeout_s: float | None) -> JobResult:
    command = [sys.executable, "-m", "nsys_analyzer.verify.side_by_side", json.dumps(jobs)]
    return run_job(Job(command, timeout_s=timeout_s, ends_descendants=True), folder / LOG)


def _read_measurement(program: Program, results: Path, folder: Path) -> TimedProcess:
    """Returns the measurement that a program has written.

    Raises:
        CaptureError: the program measured no step.
    """
    path = results / f"{program.name}.json"
    values = decode_json(path.read_bytes()) if path.is_file() else {}
    steps_ms = values.get("times_ms", {}).get("step", ())
    if not steps_ms:
        reason = values.get("not_annotated") or "none of its steps was found"
        raise CaptureError(f"The {program.name} program: {reason}", f"Its output is in {folder}")
    block = program.target.annotation.steps_per_turn if program.target.annotation else 1
    return TimedProcess(
        tuple(steps_ms), block, tuple(map(float, values.get("losses", ()))), tuple(values.get("rows", ()))
    )


def with_blocks_of_steps(target: Target, step_ms: float | None) -> Target:
    """Returns the target with the number of steps that a process should measure, in blocks.

    Args:
        target: the program.
        step_ms: the expected length of a step; None for an unknown length.

    Raises:
        ConfigurationError: the steps of the program cannot be timed without a profiler.
    """
    if not (target.annotation and target.is_timed):
        raise ConfigurationError(
            "The steps of this program cannot be timed without a profiler", "nsys-analyze compare compares two captures"
        )
    step_s = step_ms / MS_PER_S if step_ms else 1.0
    block = min(max(round(_BLOCK_DURATION_S / step_s), _MIN_STEPS_PER_BLOCK), _MAX_STEPS_PER_BLOCK)
    blocks = min(max(round(_MEASURED_DURATION_S / step_s / block), _MIN_BLOCKS), _MAX_BLOCKS)
    annotation = replace(
        target.annotation, steps=blocks * block, steps_per_turn=block, run_to_end=False, modules=False, stacks=False
    )
    return replace(target, annotation=annotation)


@contextmanager
def checkout(
    revision: str | None, words: Sequence[str]
) -> Iterator[tuple[Path, tuple[str, ...], tuple[Path, Path] | None]]:
    """Checks out a commit into a git worktree, and yields the working folder in it; removes the worktree afterwards.

    The yielded values are the folder, the command line to run in that folder, and the root of the repository with the
    worktree. Without a revision, the folder is the working folder itself. Words of the command line that name files
    outside the repository, or files that git ignores, become absolute paths.

    Raises:
        ConfigurationError: there is no such commit, or the commit lacks a file that the command line names.
    """
    if revision is None:
        yield Path.cwd(), tuple(words), None
        return
    root = run_for_lines("git", "rev-parse", "--show-toplevel")
    if root is None:
        raise ConfigurationError("The working folder is not in a git repository, so it has no commits", HOW_TO_NAME_OLD)
    with tempfile.TemporaryDirectory(prefix="nsys-analyze-") as parent:
        worktree_path = Path(parent).resolve() / Path(root[0]).name
        if run_for_lines("git", "worktree", "add", "--detach", str(worktree_path), revision) is None:
            raise ConfigurationError(f"git has no commit {revision} to make a worktree of", "git log lists them")
        try:
            folder = worktree_path / Path.cwd().relative_to(root[0])
            command_line = tuple(
                str(Path(word).absolute()) if _is_outside_commits(word, root[0]) else word for word in words
            )
            missing_files = [word for word in command_line if Path(word).is_file() and not (folder / word).is_file()]
            if missing_files:
                raise ConfigurationError(f"{missing_files[0]} is not in commit {revision}", HOW_TO_NAME_OLD)
            yield folder, command_line, (Path(root[0]), worktree_path)
        finally:
            run_for_lines("git", "worktree", "remove", "--force", str(worktree_path))


def _is_outside_commits(word: str, root: str) -> bool:
    """Tells whether a word names a file or folder that git ignores or that lies outside the repository."""
    is_inside = Path(word).resolve().is_relative_to(root)
    return Path(word).exists() and (not is_inside or run_for_lines("git", "check-ignore", word) is not None)
