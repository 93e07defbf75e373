"""Runs jobs into a folder: the targets of a sweep, a program of the user's, and the cases of an experiment.

What they share is here once: the folder is locked, its log gets the output of every program, each result is kept as
soon as it is there and is complete or absent, and a resume runs what has no final result. A target of a sweep takes two
processes, timed and then profiled, and fills a folder that is made in a hidden one beside it. A process of an
experiment measures many cases and adds a row for each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.launcher import rank_log, take_process_ids
from nsys_analyzer.capture.nsys import PROCESS_ID
from nsys_analyzer.capture.profilers import Profiler, annotating, importing, timed_command
from nsys_analyzer.capture.targets import RANK_SUFFIX, Ranks, Target, capture_stems
from nsys_analyzer.configuration import Run, manifest_values, update_run
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.inputs.manifest import MANIFEST, TIMINGS, ManifestError, make_run, manifest_name, read_manifest
from nsys_analyzer.inputs.rows import Row, Task, append_row, to_json_values
from nsys_analyzer.inputs.unprofiled_times import is_sweep_table, write_timings
from nsys_analyzer.share.names import without_secrets
from nsys_analyzer.system.atomic_write import check_regular, remove_unfinished, write_text
from nsys_analyzer.system.machine import read_provenance
from nsys_analyzer.system.process import Job, JobResult, Progress, last_lines, run_job
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.stacks import STACKS_SUFFIX as STACKS
from nsys_analyzer.trace.stacks import find_stack_files

#: The output of the programs.
LOG = "target.log"
#: PyTorch finds nothing that an earlier case compiled.
_NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
#: Ends after which nothing is run again: more memory is not going to appear.
_FINAL = ("ok", "oom")
#: Rows after which a target ends by itself, its other cases left to a fresh process.
_STOPPING = ("oom", "failed")
_ELSEWHERE = "Move it away, or name another --output-dir"
_LOCK = ".lock"
#: The files of cases for a process, and of the rows that it writes.
_HIDDEN = re.compile(r"\.[0-9a-f]{32}\.(cases\.json|rows\.jsonl)")
#: What is said of a program whose hooks left nothing.
_NOTHING_FOUND = "no call of a PyTorch model was seen, so no step and no phase is known"


# --- the folder ---


def already_there(path: Path) -> ConfigurationError:
    """Returns the error where results exist, and no option says whether to keep or to replace them."""
    hint = "--resume keeps what is finished, --rerun replaces it, --output-dir puts the results elsewhere"
    return ConfigurationError(f"{path} is there already", hint)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it.

    Raises:
        ConfigurationError: another run is at work there, or its lock is somebody else's file.
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    check_regular(path)
    if path.exists() and path.read_bytes().strip(b"0123456789"):  # it holds a process ID at most, and is written over
        raise ConfigurationError(f"{path} was not written by a sweep, and would be replaced", _ELSEWHERE)
    with path.open("a+") as lock:
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
        yield


# --- the targets of a sweep ---


def remaining(targets: Sequence[Target], folder: Path, profiler: Profiler | None, resume: bool | None) -> list[Target]:
    """Returns the targets still to run: those without a result, or with one that a second try may better.

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
    if timings.is_file() and not is_sweep_table(timings):
        raise ConfigurationError(f"{timings} was not written by a sweep, and would be replaced", _ELSEWHERE)
    runs = {}
    for target in targets:
        place = folder / target.name
        shutil.rmtree(_hidden(place, "part"), ignore_errors=True)
        _restore(place)
        if place.exists():
            runs[target.name] = _finished_run(place)
    if resume is False:
        return list(targets)
    if runs and resume is None:
        raise already_there(folder / next(iter(runs)))
    return [
        target
        for target in targets
        if target.name not in runs or not _is_done(target, folder / target.name, runs[target.name], profiler)
    ]


def _finished_run(place: Path) -> Run:
    """Returns the run in a target's place; raises ConfigurationError where that is not a sweep's."""
    of_first_rank = place / manifest_name(capture_stems(Ranks(1))[0])
    try:
        run = read_manifest(of_first_rank if of_first_rank.is_file() else place / MANIFEST)
    except ManifestError as error:
        raise ConfigurationError(f"{place} is there, and has no {MANIFEST} of a sweep", _ELSEWHERE) from error
    if run.profiler is None:
        raise ConfigurationError(f"{place} is there, and its {MANIFEST} was not written by a sweep", _ELSEWHERE)
    return run


def _is_done(target: Target, place: Path, made: Run, profiler: Profiler | None) -> bool:
    """Whether a target needs no further run; what was recorded was timed, too.

    Raises:
        ConfigurationError: it was run with other options than now, or recorded by another profiler.
    """
    now = replace(target.run, **_commands(target, profiler))
    if made.profiler != now.profiler and "none" not in (made.profiler, now.profiler):
        raise ConfigurationError(
            f"{place} was recorded by {made.profiler}, which {now.profiler} would replace",
            f"Give --profiler {made.profiler}, or another --output-dir, or --rerun",
        )
    same = made.command == now.command
    if not same or (made.profiler == now.profiler and made.profile_command != now.profile_command):
        raise ConfigurationError(
            f"{place} was made with other options: {made.profile_command if same else made.command}",
            "Give those, or another --output-dir, or --rerun",
        )
    return now.profiler in ("none", made.profiler) and made.status in _FINAL


def run_sweep(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    command: str = "",
) -> list[JobResult]:  # fmt: skip
    """Runs every target into ``folder``, one after the other, and keeps ``timings.csv`` up to date.

    Args:
        targets: those that are still to run.
        folder: the output folder, which must be there and :func:`locked`.
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
    run = replace(Run(run=command or None), **read_provenance(Path.cwd()))
    write_timings(folder)  # of what is there: an earlier sweep may have ended just before it did so
    results = []
    for target in targets:
        before = time.monotonic()
        place = folder / target.name
        part = _hidden(place, "part")
        shutil.rmtree(part, ignore_errors=True)  # what an earlier sweep was killed over
        part.mkdir()
        try:
            result = _run_target(target, place, part, profiler, timeout_s, progress, run)
            _restore(place)
            if place.exists():  # what stands there goes only after the new result has its name
                place.rename(_hidden(place, "old"))
            part.rename(place)
        finally:
            _restore(place)
            shutil.rmtree(part, ignore_errors=True)
        write_timings(folder)
        progress.ended(target.name, result, time.monotonic() - before)
        results.append(result)
    return results


def _run_target(
    target: Target, place: Path, part: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    run: Run,
) -> JobResult:  # fmt: skip
    """Times and profiles a target in a folder that is to become its place, and writes the manifest of each capture."""
    run = replace(run, **{**manifest_values(target.run), **_commands(target, profiler)})
    result, processes = JobResult("ok"), [(Run(), None)] * (target.ranks.count if target.ranks else 1)
    if target.is_timed:
        progress.started(target.name, "timing")
        result, processes = _time(target, part, timeout_s)
    # A program of the user's that fails is recorded as far as it comes.
    if profiler and (result.status == "ok" or not target.timed):
        progress.started(target.name, f"profiling with {profiler.name}")
        result = _record(target, part, profiler, timeout_s)
        if result.message:  # what it names is about to move
            result = replace(result, message=result.message.replace(str(part), str(place)))
    pids, ranks, group = take_process_ids(part), target.ranks, uuid.uuid4().hex
    remove_unfinished(part)  # a recorder that was killed in the middle of its trace
    # One capture of all ranks has the first rank's description, and all their times.
    for number, (stem, (description, timings)) in enumerate(zip(capture_stems(ranks), processes, strict=False)):
        made = update_run(run, description)
        if target.annotation:  # what the user says of a program outranks what was found in it
            made = update_run(made, replace(target.run, steps=None, warmup_steps=None))
        made = replace(made, status=result.status, message=result.message)
        if profiler:
            capture = f"{stem}{profiler.suffix}"
            stacks = tuple(path.name for path in find_stack_files(part / capture))
            made = replace(made, capture=capture, stacks=stacks or None)
        manifest: dict[str, Any] = {"timings": timings}
        if ranks:
            made = replace(made, rank=None if ranks.one_report else number, world_size=ranks.count, group=group)
            if ranks.one_report:
                made = replace(made, rank_pids=pids or None) if profiler else made
                manifest["rank_timings"] = [times for _, times in processes]
        write_text(part / manifest_name(stem), json.dumps({**manifest_values(made), **manifest}, indent=1) + "\n")
    return result


def _time(target: Target, part: Path, timeout_s: float | None) -> tuple[JobResult, list[tuple[Run, Any]]]:
    """Runs a target without a profiler; of each process what it says of its run, and its times for the manifest."""
    folder = part.absolute()  # an output folder may be called like an option
    path = folder / f"results{RANK_SUFFIX if target.ranks else ''}.json"
    command = [*timed_command(target, folder), *(["--results", str(path)] if target.timed else [])]
    result = run_job(Job(command, annotating(target.annotation, path), timeout_s), part / LOG)
    names = [f"results_rank{rank}.json" for rank in range(target.ranks.count)] if target.ranks else [path.name]
    values: list[dict[str, Any]] = []
    for file in (folder / name for name in names):
        values.append(decode_json(file.read_bytes()) if file.is_file() else {})
        file.unlink(missing_ok=True)
    runs = [make_run(results, path) for results in values]
    if target.annotation and result.status == "ok":
        silent = Run(not_annotated=_NOTHING_FOUND)
        runs = [run if results else silent for run, results in zip(runs, values, strict=True)]
    times = [results.get("times_ms") or {} for results in values]
    if result.status == "ok" and target.timed and not all(times):
        result = JobResult("failed", f"it ended well and wrote no times: {last_lines(part / LOG)}")
    elif full := next((run for run in runs if run.status == "oom"), None):
        result = JobResult("oom", full.message)
    # A program of the user's may have no steps.
    timings = [
        {"status": result.status, "message": result.message, "times_ms": ms} if ms or target.timed else None
        for ms in times
    ]
    return result, list(zip(runs, timings, strict=True))


def _record(target: Target, part: Path, profiler: Profiler, timeout_s: float | None) -> JobResult:
    """Runs a target under a profiler, which leaves a capture or one for each rank; of a crash, what came before it."""
    command = profiler.command(target.program, part.absolute(), target.ranks)
    stacks = part / f"capture{RANK_SUFFIX if target.ranks else ''}{STACKS}"
    environment = annotating(target.annotation, stacks=stacks)
    if profiler.name == "torch" and not target.timed:  # the other programs do not need this package
        environment |= importing()
    if profiler.runs_on:
        environment[PROCESS_ID] = str(os.getpid())
        signal.signal(signal.SIGUSR1, lambda *_: profiler.begin(part))
    result = run_job(Job(command, environment, timeout_s, profiler.runs_on), part / LOG)
    if result.status == "timeout":
        return result
    stems = capture_stems(target.ranks)
    for number, stem in enumerate(stems):
        log = part / LOG if stems == capture_stems(None) else rank_log(part, number)
        try:
            profiler.export(part, stem, log, timeout_s)
        except NsysAnalyzerError as error:
            result = JobResult("failed", str(error)) if result.status == "ok" else result
    return result


def _commands(target: Target, profiler: Profiler | None) -> dict[str, Any]:
    """Returns the manifest's entries on the profiler, and the command lines as typed beside the capture."""
    entries = {"command": _typed(timed_command(target, Path())), "profiler": profiler.name if profiler else "none"}
    if profiler is None:
        return entries
    first, *rest = profiler.command(target.program, Path(), target.ranks)
    typed = _typed([first if first == sys.executable else Path(first).name, *rest])
    return {**entries, **profiler.described(), "profile_command": typed}


def _typed(command: Sequence[str]) -> str:
    return shlex.join(without_secrets(["python" if word == sys.executable else word for word in command]))


def _restore(place: Path) -> None:
    """Removes the folder that a result replaced, or gives it its name back where no result took its place."""
    old = _hidden(place, "old")
    if old.exists() and not place.exists():
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _hidden(place: Path, kind: str) -> Path:
    return place.with_name(f".{place.name}.{kind}")


# --- the cases of an experiment ---


def remaining_cases(cases: Sequence[Task[Any]], rows: Sequence[Row[Any, Any]]) -> list[Task[Any]]:
    """Returns the cases without a row, or with one that a second try may better."""
    final = {row.key for row in rows if row.status in _FINAL}
    return [case for case in cases if case.key not in final]


def run_cases(cases: Sequence[Task[Any]], folder: Path, timeout_s: float | None, progress: Progress) -> None:
    """Measures the cases in order and adds their rows to ``bench.jsonl`` of the folder, which must be locked.

    They share a process until one of them runs out of memory, fails or takes too long; the rest go on in
    a fresh one. A row is there as soon as its case has ended. ``timeout_s`` is the limit of each case, the start of its
    process included.

    Raises:
        KeyboardInterrupt: the rows that were finished are kept.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    for path in folder.iterdir():  # of a run that was killed
        if _HIDDEN.fullmatch(path.name):
            path.unlink()
    left = list(cases)
    while left:
        left = _CaseProcess(left, folder, progress).run(timeout_s)


class _CaseProcess:
    """One process of a target, and the rows that come out of it."""

    def __init__(self, cases: Sequence[Task[Any]], folder: Path, progress: Progress) -> None:
        self._left = list(cases)
        self._folder, self._progress = folder, progress
        name = uuid.uuid4().hex  # a process that outlived an earlier run may still write to its own files
        self._cases, self._rows = (folder.resolve() / f".{name}.{kind}" for kind in ("cases.json", "rows.jsonl"))
        self._characters_read, self._status = 0, ""

    def run(self, timeout_s: float | None) -> list[Task[Any]]:
        """Runs it to its end and returns the cases that it left."""
        write_text(self._cases, json.dumps([to_json_values(task.case) for task in self._left]))
        self._rows.write_text("", encoding="utf-8")
        first = self._left[0]
        command = [sys.executable, "-m", first.target.module, "--cases", str(self._cases), "--rows", str(self._rows)]
        # On a CPU the cache stays in use: the C++ compiler needs seconds for each kernel.
        environment = _NO_CACHE if to_json_values(first.case).get("device") == "cuda" else {}
        self._start_next()
        try:
            result = run_job(Job(command, environment, timeout_s), self._folder / LOG, self._take_rows)
        finally:
            self._take_rows()
            self._cases.unlink()
            self._rows.unlink()
        if self._left and self._status not in _STOPPING:  # it ended over this case, before a row of it was written
            status = result.status if result.status != "ok" else "failed"
            self._keep({"status": status, "message": result.message or "it ended before its cases did"})
        return self._left

    def _take_rows(self) -> bool:
        """Takes over the rows that are new; whether there were any."""
        text = self._rows.read_text(encoding="utf-8")
        new = text[self._characters_read : text.rfind("\n") + 1]
        self._characters_read += len(new)
        for line in new.splitlines():
            self._keep(json.loads(line))
        return bool(new)

    def _keep(self, values: Mapping[str, Any]) -> None:
        """Writes the row of the case at work, and goes on to the next."""
        task = self._left.pop(0)
        row = Row(
            task.target.module, to_json_values(task.case), values["status"], values.get("message") or "",
            values.get("figures", {}), values.get("machine", {}),
        )  # fmt: skip
        append_row(self._folder, row)
        self._status = row.status
        self._progress.ended(task.label, JobResult(row.status, row.message or None), time.monotonic() - self._since)
        self._start_next()

    def _start_next(self) -> None:
        self._since = time.monotonic()
        if self._left:
            self._progress.started(self._left[0].label, "measuring")
