"""Plans an experiment from its options and from the hardware and software of this machine, and runs the experiment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from nsys_analyzer.capture.jobs import existing_results_error, lock_folder, run_cases, select_remaining_cases
from nsys_analyzer.capture.plan import choose_device
from nsys_analyzer.capture.profilers import INSTALL_TORCH
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.experiments.benches import read_finished, read_rows
from nsys_analyzer.experiments.model import AnyRow, Bench
from nsys_analyzer.inputs.rows import ROWS_FILE, Task, append_command, start_rows_file, to_json_values
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.writing import FOLDER_IN_USE_HINT, check_replaceable, write_report
from nsys_analyzer.system.machine import read_provenance, torch_version
from nsys_analyzer.system.process import Progress

_FINAL_STATUSES = ("ok", "oom", "unsupported")
#: Shows the progress of an experiment, from the number of its cases and the number of its finished cases.
ShowProgress: TypeAlias = Callable[[int, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class BenchPlan:
    """An experiment with its cases, and notices for the user before it starts."""

    bench: Bench
    cases: tuple[Task[Any], ...]
    notices: tuple[str, ...] = ()


def make_plan(bench: Bench, options: Mapping[str, Any], set_options: Collection[str]) -> BenchPlan:
    """Chooses the device, and the device's defaults for all options that the user did not set.

    Args:
        bench: the experiment.
        options: the values of the options.
        set_options: the names of the options that the user set.

    Raises:
        ConfigurationError: the options cannot be combined.
        CaptureError: PyTorch is not installed.
    """
    dry_run = bool(options.get("dry_run"))
    if torch_version() is None and not dry_run:
        raise CaptureError("The experiments need PyTorch, which is not installed", INSTALL_TORCH)
    device = choose_device(options["device"], dry_run=dry_run)
    value_of_option = {
        option.name: options[option.name] if option.name in set_options else option.default_on(device)
        for option in bench.options
    }
    notices: tuple[str, ...] = ()
    if device == "cpu" and any(
        option.default_on("cpu") != option.default and option.name not in set_options for option in bench.options
    ):
        notices = ("On the CPU the defaults are smaller; --help lists them beside those of a GPU.",)
    return BenchPlan(bench, bench.tasks({"device": device, **value_of_option}), notices)


def run_bench(
    plan: BenchPlan, folder: Path, timeout_s: float, resume: bool | None, show_progress: ShowProgress, command: str
) -> tuple[Report, bool]:
    """Runs the cases of the plan that have no row yet, and writes ``NAME.md``.

    Args:
        plan: the experiment and its cases.
        folder: the output folder, which is made if necessary.
        timeout_s: the time limit of each case in seconds.
        resume: True keeps finished rows, False replaces them, and None raises an error if there are any.
        show_progress: shows the progress.
        command: the command line, which the file of rows records.

    Returns:
        The section as a report, and whether every case has a final status, so that no case needs a second run.

    Raises:
        ConfigurationError: the folder contains results, and ``resume`` is None, or they are of another experiment.
        NsysAnalyzerError: ``NAME.md`` exists and nsys-analyze did not write it.
        KeyboardInterrupt: the user stopped the run. Finished rows are kept.
    """
    check_replaceable(folder / f"{plan.bench.name}.md", FOLDER_IN_USE_HINT)
    with lock_folder(folder):
        rows = _prepare_rows(plan, folder, resume, command)
        remaining_cases = select_remaining_cases(plan.cases, rows)
        if resume and remaining_cases:
            append_command(folder, command)
        with show_progress(len(plan.cases), len(plan.cases) - len(remaining_cases)) as progress:
            run_cases(remaining_cases, folder, timeout_s, progress)
        *_, rows = read_rows(folder / ROWS_FILE)
        report = Report(f"nsys-analyze bench {plan.bench.name}", (read_finished(folder).section,))
        write_report("markdown", report, folder / f"{plan.bench.name}.md")
    case_keys = {case.key for case in plan.cases}
    return report, all(row.status in _FINAL_STATUSES for row in rows if row.key in case_keys)


def _prepare_rows(plan: BenchPlan, folder: Path, resume: bool | None, command: str) -> Sequence[AnyRow]:
    """Returns the rows of earlier runs that are kept. If none is kept, starts a new file of rows."""
    path = folder / ROWS_FILE
    # With --resume, a file without a complete first line is written anew, because an interrupt may have cut the line.
    if path.exists() and not (resume and b"\n" not in path.read_bytes()):
        _, header, rows = read_rows(path)
        if header["bench"] != plan.bench.name:
            raise ConfigurationError(
                f"{folder} holds results of bench {header['bench']}", "Choose another --output-dir"
            )
        if resume is None:
            raise existing_results_error(path)
        if resume:
            cases = [*(row.case for row in rows), *(task.case for task in plan.cases)]
            if len({to_json_values(case).get("device") for case in cases}) > 1:
                raise ConfigurationError(f"{path} was measured on another --device", "Use it, or another --output-dir")
            return rows
    start_rows_file(folder, {"bench": plan.bench.name, "run": command, **read_provenance(Path.cwd())})
    return ()
