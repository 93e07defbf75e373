"""Runs an experiment: what is to be done, from its options and what this machine has, and then that."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from nsys_analyzer.capture.cases import remaining_cases, run_cases
from nsys_analyzer.capture.plan import INSTALL_TORCH, Recording, choose_device, choose_profiler
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.capture.runner import already_there, locked
from nsys_analyzer.capture.sweep import recover, remaining, run_sweep
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.experiments import ceilings
from nsys_analyzer.experiments.model import Bench, Option, Profiled, Settings, Task, spelled
from nsys_analyzer.experiments.registry import all_cases
from nsys_analyzer.experiments.results import CAPTURES, check_rows_replaceable, read_finished, read_rows, write_rows
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.writing import ELSEWHERE, check_replaceable, write_as
from nsys_analyzer.runs.machine import provenance, torch_version
from nsys_analyzer.runs.rows import NAME, Row, note_command, start_file, written
from nsys_analyzer.system.process import Progress

_WELL = ("ok", "oom", "unsupported")
#: Shows the progress of so many cases, of which so many are finished.
Shown: TypeAlias = Callable[[int, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class BenchPlan:
    """A bench with its cases, what is profiled besides and by what, and what the user should know before.

    ``shared`` are the settings that all cases have: the device, and each option that takes one value.
    """

    bench: Bench
    cases: tuple[Task[Any], ...]
    profiled: Profiled
    profiler: Profiler | None
    notices: tuple[str, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Every case as the command that measures it alone, and every program that is profiled."""
        for case in self.cases:
            words = [f"{key}={value}" for key, value in case.environment.items()]
            yield shlex.join([*words, "python", "-m", case.target.module, *_options(written(case.case))])
        for target in self.profiled.targets:
            yield shlex.join(["python", *target.program[1:]])


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", str(value))


def make_plan(bench: Bench, options: Mapping[str, Any], given: Collection[str]) -> BenchPlan:
    """Chooses the device, and its defaults where the options say nothing.

    Args:
        bench: the bench.
        options: the command's parameters by name.
        given: the names of those that were on the command line.

    Raises:
        ConfigurationError: options that do not go together.
        CaptureError: what is needed is not installed.
    """
    if torch_version() is None:
        raise CaptureError("The benches need PyTorch, which is not installed", INSTALL_TORCH)
    device = choose_device(options["device"])
    settings = Settings(device, {option.name: _value(option, options, given, device) for option in bench.options})
    profiled, profiler = Profiled(()), None
    notices: tuple[str, ...] = ()
    if bench.captures:
        profiled = bench.captures(settings)
    if profiled.targets:
        recording = Recording(options["profiler"], memory=profiled.memory)
        profiler, notices = choose_profiler(recording, device)
    if device == "cpu" and any(option.cpu != option.cuda and option.name not in given for option in bench.options):
        notices = (*notices, "On the CPU the defaults are smaller; --help lists them beside those of a GPU.")
    same = {one.name: spelled(settings[one.name]) for one in bench.options if not one.several}
    shared = {"device": device, **same}
    return BenchPlan(bench, all_cases(bench, settings), profiled, profiler, notices, shared)


def _value(option: Option, options: Mapping[str, Any], given: Collection[str], device: str) -> Any:
    if option.name in given:
        return options[option.name]
    default = option.cuda if device == "cuda" else option.cpu
    return default if option.several else default[0]


def run_bench(
    plan: BenchPlan, folder: Path, timeout_s: float, resume: bool | None, shown: Shown, command: str
) -> tuple[Report, bool]:
    """Runs what is left of the plan, and writes ``NAME.csv`` and ``NAME.md``.

    Args:
        plan: what to run.
        folder: the output folder, made as needed.
        timeout_s: seconds for each case.
        resume: True keeps finished rows, False replaces them, None refuses to choose.
        shown: shows the progress.
        command: the command line, for the file of rows and the manifests.

    Returns:
        The section as a report, and whether every case ended in a way that needs no second try.

    Raises:
        ConfigurationError: results are there and ``resume`` does not say what to do, or they are of another bench.
        NsysAnalyzerError: ``NAME.md`` or ``NAME.csv`` is there, and was not written here.
        KeyboardInterrupt: what was finished is kept.
    """
    check_replaceable(folder / f"{plan.bench.name}.md", ELSEWHERE)
    check_rows_replaceable(folder / f"{plan.bench.name}.csv", ELSEWHERE)
    with locked(folder):
        rows = _prepared(plan, folder, resume, command)
        todo = remaining_cases(plan.cases, rows)
        captures, again = folder / CAPTURES, resume is not False
        recover(plan.profiled.targets, captures)
        targets = remaining(plan.profiled.targets, captures, plan.profiler, again)
        if resume and (todo or targets):
            note_command(folder, command)
        total = len(plan.cases) + len(plan.profiled.targets)
        with shown(total, total - len(todo) - len(targets)) as progress:
            run_cases(todo, folder, timeout_s, progress)
            ended = []
            if targets:
                captures.mkdir(exist_ok=True)
                ended = run_sweep(targets, captures, plan.profiler, timeout_s, progress, command)
        *_, rows = read_rows(folder / NAME)
        write_rows([row for row in rows if row.module != ceilings.TARGET.module], folder / f"{plan.bench.name}.csv")
        finished = read_finished(folder, "")
        report = Report(f"nsys-analyze bench {plan.bench.name}", (finished.section,))
        write_as("markdown", report, folder / f"{plan.bench.name}.md")
    keys = {case.key for case in plan.cases}
    well = all(row.status in _WELL for row in rows if row.key in keys)
    return report, well and all(one.status in _WELL for one in ended)


def _prepared(plan: BenchPlan, folder: Path, resume: bool | None, command: str) -> Sequence[Row[Any, Any]]:
    """The rows that are there already; without any the file is begun."""
    path = folder / NAME
    if path.exists() and not (resume and b"\n" not in path.read_bytes()):  # an interrupt may have cut its first line
        _, header, rows = read_rows(path)
        if header["bench"] != plan.bench.name:
            raise ConfigurationError(f"{folder} holds a bench {header['bench']}", "Name another --output-dir")
        if resume is None:
            raise already_there(path)
        if resume:
            _check_settings(plan, folder, header, rows)
            return rows
    about = {"bench": plan.bench.name, "run": command, "settings": dict(plan.shared)}
    start_file(folder, {**about, **provenance(Path.cwd())})
    return ()


def _check_settings(plan: BenchPlan, folder: Path, header: Mapping[str, Any], rows: Sequence[Row[Any, Any]]) -> None:
    """Raises where the rows that are there were measured on another device, or with other options for all cases."""
    made = header.get("settings") or ({"device": written(rows[-1].case).get("device")} if rows else {})
    for key, value in plan.shared.items():
        if made.get(key, value) != value:
            option = f"--{key.replace('_', '-')} {made[key]}"
            raise ConfigurationError(
                f"{folder / NAME} was made with {option}", "Give that, or another --output-dir, or --rerun"
            )
