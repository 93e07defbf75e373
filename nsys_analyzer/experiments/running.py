"""Plans an experiment from its options and what this machine has, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from nsys_analyzer.capture.jobs import already_there, locked, remaining_cases, run_cases
from nsys_analyzer.capture.plan import choose_device
from nsys_analyzer.capture.profilers import INSTALL_TORCH
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.experiments.model import AnyRow, Bench
from nsys_analyzer.experiments.results import read_finished, read_rows
from nsys_analyzer.inputs.rows import NAME, Task, note_command, start_file, written
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.writing import FOLDER_IN_USE_HINT, check_replaceable, write_report
from nsys_analyzer.system.machine import read_provenance, torch_version
from nsys_analyzer.system.process import Progress

_NEEDS_NO_RETRY = ("ok", "oom", "unsupported")
#: Shows the progress of so many cases, of which so many are finished.
Shown: TypeAlias = Callable[[int, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class BenchPlan:
    """A bench with its cases, and what the user should know before."""

    bench: Bench
    cases: tuple[Task[Any], ...]
    notices: tuple[str, ...] = ()


def make_plan(bench: Bench, options: Mapping[str, Any], given: Collection[str]) -> BenchPlan:
    """Chooses the device, and its defaults for the options that are not among the ``given`` ones.

    Raises:
        ConfigurationError: options that do not go together.
        CaptureError: what is needed is not installed.
    """
    elsewhere = bool(options.get("dry_run"))
    if torch_version() is None and not elsewhere:
        raise CaptureError("The benches need PyTorch, which is not installed", INSTALL_TORCH)
    device = choose_device(options["device"], elsewhere=elsewhere)
    values = {
        option.name: options[option.name] if option.name in given else option.default_on(device)
        for option in bench.options
    }
    notices: tuple[str, ...] = ()
    if device == "cpu" and any(
        option.default_on("cpu") != option.default and option.name not in given for option in bench.options
    ):
        notices = ("On the CPU the defaults are smaller; --help lists them beside those of a GPU.",)
    return BenchPlan(bench, bench.tasks({"device": device, **values}), notices)


def run_bench(
    plan: BenchPlan, folder: Path, timeout_s: float, resume: bool | None, shown: Shown, command: str
) -> tuple[Report, bool]:
    """Runs what is left of the plan, and writes ``NAME.md``.

    Args:
        plan: what to run.
        folder: the output folder, made as needed.
        timeout_s: seconds for each case.
        resume: True keeps finished rows, False replaces them, None refuses to choose.
        shown: shows the progress.
        command: the command line, for the file of rows.

    Returns:
        The section as a report, and whether no case needs a second try.

    Raises:
        ConfigurationError: results are there and ``resume`` does not say what to do, or they are of another bench.
        NsysAnalyzerError: ``NAME.md`` is there, and was not written here.
        KeyboardInterrupt: what was finished is kept.
    """
    check_replaceable(folder / f"{plan.bench.name}.md", FOLDER_IN_USE_HINT)
    with locked(folder):
        rows = _prepared(plan, folder, resume, command)
        todo = remaining_cases(plan.cases, rows)
        if resume and todo:
            note_command(folder, command)
        with shown(len(plan.cases), len(plan.cases) - len(todo)) as progress:
            run_cases(todo, folder, timeout_s, progress)
        *_, rows = read_rows(folder / NAME)
        report = Report(f"nsys-analyze bench {plan.bench.name}", (read_finished(folder).section,))
        write_report("markdown", report, folder / f"{plan.bench.name}.md")
    keys = {case.key for case in plan.cases}
    return report, all(row.status in _NEEDS_NO_RETRY for row in rows if row.key in keys)


def _prepared(plan: BenchPlan, folder: Path, resume: bool | None, command: str) -> Sequence[AnyRow]:
    """Returns the rows that are there already; begins the file without any."""
    path = folder / NAME
    if path.exists() and not (resume and b"\n" not in path.read_bytes()):  # an interrupt may have cut its first line
        _, header, rows = read_rows(path)
        if header["bench"] != plan.bench.name:
            raise ConfigurationError(f"{folder} holds a bench {header['bench']}", "Name another --output-dir")
        if resume is None:
            raise already_there(path)
        if resume:
            cases = [*(row.case for row in rows), *(task.case for task in plan.cases)]
            if len({written(case).get("device") for case in cases}) > 1:
                raise ConfigurationError(f"{path} is of another --device", "Give that, or another --output-dir")
            return rows
    start_file(folder, {"bench": plan.bench.name, "run": command, **read_provenance(Path.cwd())})
    return ()
