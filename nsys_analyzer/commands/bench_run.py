"""Runs a bench's plan, and makes its CSV and its section from what lies in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsys_analyzer.benches.model import CEILINGS
from nsys_analyzer.capture.cases import NAME, Row, go_on, read_file, remaining_cases, run_cases, start_file
from nsys_analyzer.capture.machine import provenance
from nsys_analyzer.capture.process import Ended
from nsys_analyzer.capture.progress import Progress
from nsys_analyzer.capture.sweep import locked, recover, remaining, run_sweep
from nsys_analyzer.capture.targets import Target
from nsys_analyzer.commands.bench_plan import BenchPlan
from nsys_analyzer.commands.bench_results import CAPTURES, check_rows_replaceable, read_finished, write_rows
from nsys_analyzer.commands.run_progress import shown
from nsys_analyzer.commands.writing import ELSEWHERE, check_replaceable, command_line, write_as
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Report

_WELL = ("ok", "oom", "unsupported")
_AGAIN = "--resume keeps what is finished, --rerun replaces it, --output-dir puts the results elsewhere"


def run_bench(plan: BenchPlan, folder: Path, timeout_s: float, resume: bool | None) -> tuple[Report, bool]:
    """Runs what is left of the plan, and writes ``NAME.csv`` and ``NAME.md``.

    Args:
        plan: what to run.
        folder: the output folder, made as needed.
        timeout_s: seconds for each case.
        resume: True keeps finished rows, False replaces them, None refuses to choose.

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
        rows = _prepared(plan, folder, resume)
        todo = remaining_cases(plan.cases, rows)
        captures, again = folder / CAPTURES, resume is not False
        recover(plan.profiled.targets, captures)
        targets = remaining(plan.profiled.targets, captures, plan.profiler, again)
        if resume and (todo or targets):
            go_on(folder, command_line())
        total = len(plan.cases) + len(plan.profiled.targets)
        with shown(total, total - len(todo) - len(targets)) as progress:
            run_cases(todo, folder, timeout_s, progress)
            ended = _profile(targets, plan, captures, timeout_s, progress)
        _, rows = read_file(folder / NAME)
        write_rows([row for row in rows if row.module != CEILINGS], folder / f"{plan.bench.name}.csv")
        finished = read_finished(folder, "")
        report = Report(f"nsys-analyze bench {plan.bench.name}", (finished.section,))
        write_as("markdown", report, folder / f"{plan.bench.name}.md")
    keys = {case.key for case in plan.cases}
    well = all(row.status in _WELL for row in rows if row.key in keys)
    return report, well and all(one.status in _WELL for one in ended)


def _profile(
    targets: Sequence[Target], plan: BenchPlan, folder: Path, timeout_s: float, progress: Progress
) -> list[Ended]:
    """Profiles what is left to be profiled, and says how it ended."""
    if not targets:
        return []
    folder.mkdir(exist_ok=True)
    return run_sweep(targets, folder, plan.profiler, timeout_s, progress, command_line())


def _prepared(plan: BenchPlan, folder: Path, resume: bool | None) -> Sequence[Row]:
    """The rows that are there already; without any the file is begun."""
    path = folder / NAME
    if path.exists() and not (resume and b"\n" not in path.read_bytes()):  # an interrupt may have cut its first line
        header, rows = read_file(path)
        if header["bench"] != plan.bench.name:
            raise ConfigurationError(f"{folder} holds a bench {header['bench']}", "Name another --output-dir")
        if resume is None:
            raise ConfigurationError(f"{path} is there already", _AGAIN)
        if resume:
            _check_settings(plan, folder, header, rows)
            return rows
    about = {"bench": plan.bench.name, "run": command_line(), "settings": dict(plan.shared)}
    start_file(folder, {**about, **provenance(Path.cwd())})
    return ()


def _check_settings(plan: BenchPlan, folder: Path, header: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raises where the rows that are there were measured on another device, or with other options for all cases."""
    made = header.get("settings") or ({"device": rows[-1].case.get("device")} if rows else {})
    for key, value in plan.shared.items():
        if made.get(key, value) != value:
            option = f"--{key.replace('_', '-')} {made[key]}"
            raise ConfigurationError(
                f"{folder / NAME} was made with {option}", "Give that, or another --output-dir, or --rerun"
            )
