"""Runs jobs into a folder: the targets of a sweep, a program of the user, and the cases of an experiment.

All jobs share these rules. The output folder is locked while a job runs, and its log file gets the output of every
program. A result is stored as soon as it is complete, and an incomplete result is not stored. With ``--resume``, only
the jobs without a final result run. Each target of a sweep runs in two processes, one timed and one profiled. Its
results are collected in a hidden folder, which is renamed when the results are complete. A process of an experiment
measures many cases and adds a row for each case.
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

from nsys_analyzer.capture.energy import ENERGY_SECONDS, MOST_STEPS, STEPS_OF_RANKS, EnergyReader, Steps, open_nvml
from nsys_analyzer.capture.hooks import energy_steps, step_times
from nsys_analyzer.capture.hooks.memory import FILE_VARIABLE as FILE_VARIABLE_OF_MEMORY
from nsys_analyzer.capture.hooks.operators import FILE_VARIABLE
from nsys_analyzer.capture.launcher import rank_log, take_process_ids
from nsys_analyzer.capture.nsys import PROCESS_ID_VARIABLE
from nsys_analyzer.capture.profilers import Profiler, make_hook_variables, make_import_variables, make_timed_command
from nsys_analyzer.capture.targets import RANK_SUFFIX, Ranks, Target, capture_stems
from nsys_analyzer.configuration import GpuEnergy, Run, manifest_values, update_run
from nsys_analyzer.errors import ConfigurationError, CountersRefusedError, NsysAnalyzerError
from nsys_analyzer.inputs.manifest import MANIFEST, TIMINGS, ManifestError, make_run, manifest_file_name, read_manifest
from nsys_analyzer.inputs.rows import Row, Task, append_row, to_json_values
from nsys_analyzer.inputs.unprofiled_times import is_sweep_table, write_timings
from nsys_analyzer.share.names import remove_secrets
from nsys_analyzer.system.atomic_write import check_regular, remove_unfinished, write_text
from nsys_analyzer.system.machine import read_provenance
from nsys_analyzer.system.process import Job, JobResult, Progress, read_last_lines, run_job
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.memory_snapshot import SNAPSHOT_SUFFIX, find_snapshot_files
from nsys_analyzer.trace.operator_calls import OPERATORS_SUFFIX, find_operator_files
from nsys_analyzer.trace.stacks import STACKS_SUFFIX, find_stack_files

#: The name of the file with the output of the programs.
LOG = "target.log"
#: Environment variables that keep torch.compile from reusing code that an earlier case compiled.
_WITHOUT_COMPILE_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
#: Statuses after which a resumed run does not repeat a job. A job that ran out of memory would do so again.
_FINAL_STATUSES = ("ok", "oom")
#: Statuses of a case after which the target's process ends. A new process measures the remaining cases.
_STOPPING_STATUSES = ("oom", "failed")
_MOVE_AWAY_HINT = "Move it away, or choose another --output-dir"
_LOCK = ".lock"
#: Matches the hidden files of a process of an experiment: the cases that it reads, and the rows that it writes.
_CASE_FILE_NAME = re.compile(r"\.[0-9a-f]{32}\.(cases\.json|rows\.jsonl)")
#: The largest number of warm-up steps, and of steps after the warm-up, in a run that records memory. Three steps show
#: which memory grows.
_MEMORY_STEPS = 3
#: Matches the message of a program that ran out of the memory of a GPU.
_GPU_OUT_OF_MEMORY = re.compile(r"CUDA|CUBLAS|HIP|OutOfMemoryError")
#: The message for a program in which the hooks saw no PyTorch model.
_NO_MODEL_SEEN = "no call of a PyTorch model was seen, so no step and no phase is known"


# --- the folder ---


def existing_results_error(path: Path) -> ConfigurationError:
    """Returns the error for existing results if no option says whether to keep or to replace the results."""
    hint = "--resume keeps finished results, --rerun replaces them, --output-dir names another folder"
    return ConfigurationError(f"{path} already exists", hint)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes an output folder, and locks it against other runs until the block ends.

    Raises:
        ConfigurationError: another run uses the folder, or the lock is a file of another program.
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    check_regular(path)
    if path.exists() and path.read_bytes().strip(b"0123456789"):  # a lock holds at most a process ID
        raise ConfigurationError(f"{path} was not written by a sweep, and would be replaced", _MOVE_AWAY_HINT)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigurationError(
                f"Another sweep uses {folder} (process {lock.read().strip() or 'unknown'})",
                "Wait for it to end, or choose another --output-dir",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


# --- the targets of a sweep ---


def select_remaining_targets(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None, resume: bool | None
) -> list[Target]:
    """Returns the targets that have no result yet, or whose result a second run may improve.

    If an earlier sweep was killed, its incomplete results are removed. The result that it was replacing is restored.

    Args:
        targets: all targets of the sweep.
        folder: the output folder.
        profiler: as for :func:`run_sweep`.
        resume: True keeps finished results, False replaces them, and None raises an error if there are any.

    Raises:
        ConfigurationError: there are results and ``resume`` is None, the results belong to another program, or a file
            that would be replaced was not written by a sweep.
    """
    timings = folder / TIMINGS
    if timings.is_file() and not is_sweep_table(timings):
        raise ConfigurationError(f"{timings} was not written by a sweep, and would be replaced", _MOVE_AWAY_HINT)
    runs = {}
    for target in targets:
        result_folder = folder / target.name
        shutil.rmtree(_name_hidden_folder(result_folder, "part"), ignore_errors=True)
        _restore_replaced_folder(result_folder)
        if result_folder.exists():
            of_first_rank = result_folder / manifest_file_name(capture_stems(Ranks(1))[0])
            try:
                run = read_manifest(of_first_rank if of_first_rank.is_file() else result_folder / MANIFEST)
            except ManifestError as error:
                problem = f"{result_folder} exists, and has no {MANIFEST} of a sweep"
                raise ConfigurationError(problem, _MOVE_AWAY_HINT) from error
            if run.profiler is None:
                problem = f"{result_folder} exists, and a sweep did not write its {MANIFEST}"
                raise ConfigurationError(problem, _MOVE_AWAY_HINT)
            runs[target.name] = run
    if resume is False:
        return list(targets)
    if runs and resume is None:
        raise existing_results_error(folder / next(iter(runs)))
    return [
        target
        for target in targets
        if target.name not in runs or not _is_done(target, folder / target.name, runs[target.name], profiler)
    ]


def _is_done(target: Target, result_folder: Path, earlier: Run, profiler: Profiler | None) -> bool:
    """Returns whether the earlier run of a target suffices. A target that was recorded was always timed as well.

    Raises:
        ConfigurationError: the earlier run used other options or another profiler.
    """
    planned = replace(target.run, **_make_command_entries(target, profiler))
    if earlier.profiler != planned.profiler and "none" not in (earlier.profiler, planned.profiler):
        raise ConfigurationError(
            f"{result_folder} was recorded by {earlier.profiler}, and {planned.profiler} would replace it",
            f"Give --profiler {earlier.profiler}, or another --output-dir, or --rerun",
        )
    same = earlier.command == planned.command
    if not same or (earlier.profiler == planned.profiler and earlier.profile_command != planned.profile_command):
        raise ConfigurationError(
            f"{result_folder} was made with other options: {earlier.profile_command if same else earlier.command}",
            "Give those options, or another --output-dir, or --rerun",
        )
    return planned.profiler in ("none", earlier.profiler) and earlier.status in _FINAL_STATUSES


def run_sweep(
    targets: Sequence[Target], folder: Path, profiler: Profiler | None, timeout_s: float | None, progress: Progress,
    command: str = "",
) -> list[JobResult]:  # fmt: skip
    """Runs all targets into ``folder``, one after the other, and keeps ``timings.csv`` up to date.

    Args:
        targets: the targets to run.
        folder: the output folder, which must exist and be :func:`lock_folder`.
        profiler: records the targets. With None, they are only timed.
        timeout_s: the time limit of each process in seconds.
        progress: is told when a process starts and when a target ends.
        command: the command line of the sweep, which the manifests record.

    Returns:
        The result of each target, also of a target that runs out of memory, crashes or exceeds its time limit.

    Raises:
        KeyboardInterrupt: the user stopped the sweep. The results of finished targets are kept, and the files of the
            running target are removed.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    run = replace(Run(run=command or None), **read_provenance(Path.cwd()))
    write_timings(folder)  # an earlier sweep may have ended before it wrote the times of its last target
    results = []
    for target in targets:
        before = time.monotonic()
        result_folder = folder / target.name
        work_folder = _name_hidden_folder(result_folder, "part")
        shutil.rmtree(work_folder, ignore_errors=True)  # an earlier sweep may have been killed during this target
        work_folder.mkdir()
        try:
            result = _run_target(target, result_folder, work_folder, profiler, timeout_s, progress, run)
            _restore_replaced_folder(result_folder)
            if result_folder.exists():  # the old result is removed only after the new one is in place
                result_folder.rename(_name_hidden_folder(result_folder, "old"))
            work_folder.rename(result_folder)
        finally:
            _restore_replaced_folder(result_folder)
            shutil.rmtree(work_folder, ignore_errors=True)
        write_timings(folder)
        progress.ended(target.name, result, time.monotonic() - before)
        results.append(result)
    return results


def _run_target(
    target: Target, result_folder: Path, work_folder: Path, profiler: Profiler | None, timeout_s: float | None,
    progress: Progress, run: Run,
) -> JobResult:  # fmt: skip
    """Runs a target with and without the profiler, and writes the manifest of each capture.

    Args:
        place: the final folder of the target.
        work_folder: the folder that collects the results. The caller renames it to ``result_folder``.
    """
    run = replace(run, **{**manifest_values(target.run), **_make_command_entries(target, profiler)})
    count = target.ranks.count if target.ranks else 1
    result = JobResult("ok")
    processes: list[tuple[Run, Any]] = [(Run(), None)] * count
    step_lengths: list[dict[str, Any]] = [{}] * count
    if target.is_timed:
        progress.started(target.name, "timing")
        result, processes = _time_target(target, work_folder, timeout_s)
    # A program of the user that fails is still recorded up to its failure.
    if profiler and (result.status == "ok" or not target.timed):
        progress.started(target.name, f"profiling with {profiler.name}")
        result, step_lengths = _record_target(target, work_folder, profiler, timeout_s)
        if result.message:  # the message may name files in the folder that the caller renames
            result = replace(result, message=result.message.replace(str(work_folder), str(result_folder)))
    ran_out_of_memory = result.status == "oom" and _GPU_OUT_OF_MEMORY.search(result.message or "")
    if target.is_timed and (ran_out_of_memory or (target.memory and result.status == "ok")):
        progress.started(target.name, "recording memory")
        _record_memory(target, work_folder, timeout_s, is_failing=result.status == "oom")
    processes = [
        (description, {"status": "ok", "times_ms": {}, **(timings or {}), **lengths} if lengths else timings)
        for (description, timings), lengths in zip(processes, step_lengths, strict=True)
    ]
    pids, ranks, group = take_process_ids(work_folder), target.ranks, uuid.uuid4().hex
    remove_unfinished(work_folder)  # a recorder may have been killed while it wrote its trace
    # A single capture of all ranks gets the description of the first rank and the times of all ranks.
    for number, (stem, (description, timings)) in enumerate(zip(capture_stems(ranks), processes, strict=False)):
        described = update_run(run, description)
        if target.annotation:  # the user's description of a program replaces what the hooks observed
            described = update_run(described, replace(target.run, steps=None, warmup_steps=None))
        snapshots = tuple(path.name for path in find_snapshot_files(work_folder / stem))
        described = replace(described, status=result.status, message=result.message, memory=snapshots or None)
        if profiler:
            capture = f"{stem}{profiler.suffix}"
            stacks = tuple(path.name for path in find_stack_files(work_folder / capture))
            operators = tuple(path.name for path in find_operator_files(work_folder / capture))
            described = replace(described, capture=capture, stacks=stacks or None, operators=operators or None)
        extra: dict[str, Any] = {"timings": timings}
        if ranks:
            rank = None if ranks.in_one_capture else number
            described = replace(described, rank=rank, world_size=ranks.count, group=group)
            if ranks.in_one_capture:
                described = replace(described, rank_pids=pids or None) if profiler else described
                rows = [row for process, _ in processes for row in process.energy or ()]
                described = replace(described, energy=tuple(rows) or None)
                extra["rank_timings"] = [times for _, times in processes]
        manifest = {**manifest_values(described), **extra}
        write_text(work_folder / manifest_file_name(stem), json.dumps(manifest, indent=1) + "\n")
    return result


def _time_target(target: Target, work_folder: Path, timeout_s: float | None) -> tuple[JobResult, list[tuple[Run, Any]]]:
    """Runs a target without a profiler, and returns its result, and the description and times of each process."""
    folder = work_folder.absolute()  # a relative path could look like an option
    path = folder / f"results{RANK_SUFFIX if target.ranks else ''}.json"
    command = [*make_timed_command(target, folder), *(["--results", str(path)] if target.timed else [])]
    variables = make_hook_variables(target.annotation, path)
    energy: list[list[GpuEnergy]] = []
    if target.reads_energy and (nvml := open_nvml()):
        energy_path = folder / f"energy{RANK_SUFFIX if target.ranks else ''}.json"
        limits = f"0:{STEPS_OF_RANKS}" if target.ranks else f"{ENERGY_SECONDS}:{MOST_STEPS}"
        variables[energy_steps.VARIABLE] = f"{limits}:{energy_path}"
        with EnergyReader(nvml) as reader:
            result = run_job(Job(command, variables, timeout_s), work_folder / LOG)
        steps = [Steps(**decode_json(text)) if text else None for text in _take_results(energy_path, target.ranks)]
        energy = reader.measure(steps, has_ranks=target.ranks is not None)
    else:
        result = run_job(Job(command, variables, timeout_s), work_folder / LOG)
    values = [decode_json(text) if text else {} for text in _take_results(path, target.ranks)]
    runs = [make_run(results, path) for results in values]
    if energy:
        runs = [replace(run, energy=tuple(rows) or None) for run, rows in zip(runs, energy, strict=True)]
    if target.annotation and result.status == "ok":
        run_without_model = Run(not_annotated=_NO_MODEL_SEEN)
        runs = [run if results else run_without_model for run, results in zip(runs, values, strict=True)]
    times = [results.get("times_ms") or {} for results in values]
    if result.status == "ok" and target.timed and not all(times):
        result = JobResult(
            "failed", f"it ended without an error, but wrote no times: {read_last_lines(work_folder / LOG)}"
        )
    elif out_of_memory := next((run for run in runs if run.status == "oom"), None):
        result = JobResult("oom", out_of_memory.message)
    # A program of the user may have no steps.
    timings = [
        {"status": result.status, "message": result.message, "times_ms": ms} if ms or target.timed else None
        for ms in times
    ]
    return result, list(zip(runs, timings, strict=True))


def _record_target(
    target: Target, work_folder: Path, profiler: Profiler, timeout_s: float | None
) -> tuple[JobResult, list[dict[str, Any]]]:
    """Runs a target under a profiler, which writes one capture or a capture for each rank.

    If the program crashes, its capture ends at the crash.

    Returns:
        The result, and for each process the lengths of the steps before and after the capture range, which the profiler
        did not record.
    """
    command = profiler.record_command(target.program, work_folder.absolute(), target.ranks)
    stacks = work_folder / f"capture{RANK_SUFFIX if target.ranks else ''}{STACKS_SUFFIX}"
    operators = work_folder / f"capture{RANK_SUFFIX if target.ranks else ''}{OPERATORS_SUFFIX}"
    environment = make_hook_variables(target.annotation, stacks=stacks, operators=operators)
    if target.timed:
        environment[FILE_VARIABLE] = str(operators.absolute())
    lengths = work_folder.absolute() / f"steps{RANK_SUFFIX if target.ranks else ''}.json"
    if target.is_timed and target.unprofiled_steps:
        environment[step_times.VARIABLE] = f"{target.unprofiled_steps}:{lengths}"
    if profiler.name == "torch" and not target.timed:  # the program's Python may lack this package
        environment |= make_import_variables()
    if profiler.is_server:
        environment[PROCESS_ID_VARIABLE] = str(os.getpid())
        signal.signal(signal.SIGUSR1, lambda *_: profiler.begin_recording(work_folder))
    result = run_job(Job(command, environment, timeout_s, profiler.is_server), work_folder / LOG)
    step_lengths = [decode_json(text) if text else {} for text in _take_results(lengths, target.ranks)]
    if result.status == "timeout":
        return result, step_lengths
    stems = capture_stems(target.ranks)
    for number, stem in enumerate(stems):
        log = work_folder / LOG if stems == capture_stems(None) else rank_log(work_folder, number)
        try:
            profiler.export_capture(work_folder, stem, log, timeout_s)
        except CountersRefusedError as error:  # the program has not run
            result = JobResult("failed", str(error))
        except NsysAnalyzerError as error:
            result = JobResult("failed", str(error)) if result.status == "ok" else result
    return result, step_lengths


def _record_memory(target: Target, work_folder: Path, timeout_s: float | None, *, is_failing: bool) -> None:
    """Runs a target once more, without a profiler, to write a snapshot of its memory, or of that of each rank.

    A program that runs out of memory does so again, and leaves the snapshot of that moment. Any other program ends
    after a few steps.
    """
    rank = RANK_SUFFIX if target.ranks else ""
    path = work_folder.absolute() / f"capture{rank}{SNAPSHOT_SUFFIX}"
    annotation = target.annotation
    if annotation and not is_failing:
        annotation = replace(
            annotation,
            warmup_steps=min(annotation.warmup_steps, _MEMORY_STEPS),
            steps=min(annotation.steps, _MEMORY_STEPS),
            run_to_end=False,
            waits_for_steady_steps=False,
            modules=False,
        )
    variables = {**make_hook_variables(annotation), FILE_VARIABLE_OF_MEMORY: str(path)}
    command = make_timed_command(target, work_folder.absolute())
    run_job(Job(command, variables, timeout_s), work_folder / LOG)


def _take_results(path: Path, ranks: Ranks | None) -> list[bytes]:
    """Removes the file with results of each process, and returns its content, which is empty without a file."""
    files = [Path(str(path).replace(RANK_SUFFIX, f"_rank{rank}")) for rank in range(ranks.count)] if ranks else [path]
    contents = [file.read_bytes() if file.is_file() else b"" for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return contents


def _make_command_entries(target: Target, profiler: Profiler | None) -> dict[str, Any]:
    """Returns the manifest's entries for the profiler and for the command lines, with paths relative to its folder."""
    entries = {
        "command": _format_command(make_timed_command(target, Path())),
        "profiler": profiler.name if profiler else "none",
    }
    if profiler is None:
        return entries
    first, *rest = profiler.record_command(target.program, Path(), target.ranks)
    profile_command = _format_command([first if first == sys.executable else Path(first).name, *rest])
    return {**entries, **profiler.manifest_entries(), "profile_command": profile_command}


def _format_command(command: Sequence[str]) -> str:
    return shlex.join(remove_secrets(["python" if word == sys.executable else word for word in command]))


def _restore_replaced_folder(result_folder: Path) -> None:
    """Removes the old result of a target if there is a new one. Otherwise moves the old result back to its folder."""
    old = _name_hidden_folder(result_folder, "old")
    if old.exists() and not result_folder.exists():
        old.rename(result_folder)
    shutil.rmtree(old, ignore_errors=True)


def _name_hidden_folder(result_folder: Path, kind: str) -> Path:
    return result_folder.with_name(f".{result_folder.name}.{kind}")


# --- the cases of an experiment ---


def select_remaining_cases(cases: Sequence[Task[Any]], rows: Sequence[Row[Any, Any]]) -> list[Task[Any]]:
    """Returns the cases that have no row yet, or whose row a second run may improve."""
    final = {row.key for row in rows if row.status in _FINAL_STATUSES}
    return [case for case in cases if case.key not in final]


def run_cases(cases: Sequence[Task[Any]], folder: Path, timeout_s: float | None, progress: Progress) -> None:
    """Measures the cases in order, and adds their rows to ``bench.jsonl`` in the folder.

    The cases share a process until one of them runs out of memory, fails or exceeds its time limit. Then a new process
    measures the remaining cases. A row is written as soon as its case has ended.

    Args:
        cases: the cases to measure.
        folder: the output folder, which must be locked.
        timeout_s: the time limit of each case in seconds. The start of a process counts as part of its first case.
        progress: is told when a case starts and when it ends.

    Raises:
        KeyboardInterrupt: the user stopped the experiment. Finished rows are kept.
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written.
    """
    for path in folder.iterdir():  # an earlier run may have been killed
        if _CASE_FILE_NAME.fullmatch(path.name):
            path.unlink()
    unmeasured = list(cases)
    while unmeasured:
        unmeasured = _CaseProcess(unmeasured, folder, progress).run(timeout_s)


class _CaseProcess:
    """A process of a target that measures the cases of an experiment and writes a row for each case."""

    def __init__(self, cases: Sequence[Task[Any]], folder: Path, progress: Progress) -> None:
        self._unmeasured = list(cases)
        self._folder, self._progress = folder, progress
        name = uuid.uuid4().hex  # a process of an earlier run may still write to its files
        self._cases, self._rows = (folder.resolve() / f".{name}.{kind}" for kind in ("cases.json", "rows.jsonl"))
        self._read_characters, self._status = 0, ""

    def run(self, timeout_s: float | None) -> list[Task[Any]]:
        """Runs the process to its end, and returns the cases that it did not measure."""
        write_text(self._cases, json.dumps([to_json_values(task.case) for task in self._unmeasured]))
        self._rows.write_text("", encoding="utf-8")
        first = self._unmeasured[0]
        command = [sys.executable, "-m", first.target.module, "--cases", str(self._cases), "--rows", str(self._rows)]
        # On a CPU, the cache of torch.compile is used, because the C++ compiler needs seconds for each kernel.
        environment = _WITHOUT_COMPILE_CACHE if to_json_values(first.case).get("device") == "cuda" else {}
        self._start_next()
        try:
            result = run_job(Job(command, environment, timeout_s), self._folder / LOG, self._append_new_rows)
        finally:
            self._append_new_rows()
            self._cases.unlink()
            self._rows.unlink()
        if self._unmeasured and self._status not in _STOPPING_STATUSES:  # the process ended during this case
            status = result.status if result.status != "ok" else "failed"
            self._append_row({"status": status, "message": result.message or "the process ended before its cases"})
        return self._unmeasured

    def _append_new_rows(self) -> bool:
        """Appends the new rows of the process to the folder's file of rows, and returns whether there were any."""
        text = self._rows.read_text(encoding="utf-8")
        new = text[self._read_characters : text.rfind("\n") + 1]
        self._read_characters += len(new)
        for line in new.splitlines():
            self._append_row(json.loads(line))
        return bool(new)

    def _append_row(self, values: Mapping[str, Any]) -> None:
        """Appends the row of the current case to the folder's file of rows, and continues with the next case."""
        task = self._unmeasured.pop(0)
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
        if self._unmeasured:
            self._progress.started(self._unmeasured[0].label, "measuring")
