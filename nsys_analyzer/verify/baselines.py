"""Writes baselines (folders with a JSON report for each GPU), and selects the runs of a baseline for a comparison."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nsys_analyzer.analysis.comparison.comparison import find_run_obstacles
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.renderers.json_report import captures_data, format_json
from nsys_analyzer.report.sections.comparison import describe_obstacle
from nsys_analyzer.report.writing import check_replaceable
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.text import join_texts, plain


def save_baseline(runs: Sequence[Summary], folder: Path, source: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Writes the comparable runs into a folder, and yields the path of the report for each GPU.

    Args:
        runs: the runs to keep.
        folder: the folder of the baseline.
        source: the path that the runs were read from, for the error message.
        tell: reports each run that is left out.

    Raises:
        NsysAnalyzerError: no run can be compared with others, or a file cannot be replaced.
    """
    runs_by_hardware = defaultdict[str, list[Summary]](list)
    for run in runs:
        if reasons := [describe_obstacle(obstacle) for obstacle in find_run_obstacles(run)]:
            tell(f"Left out: {plain(join_texts('; ', reasons))}")
        else:
            runs_by_hardware[run.hardware].append(run)
    if not runs_by_hardware:
        raise NsysAnalyzerError(f"{source} contains no run that can be compared", "Give runs that ended well")
    for hardware, comparable_runs in runs_by_hardware.items():
        stem = re.sub(r"[^\w.+-]+", "-", hardware) or "unknown"
        path = folder / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path, "Name another baseline")
        write_text(path, format_json(captures_data(comparable_runs)))
        yield path


def select_same_hardware(baseline: Sequence[Summary], runs: Sequence[Summary]) -> tuple[Summary, ...]:
    """Returns the runs of a baseline that ran on the same hardware as ``runs``; all of its runs if none did."""
    hardware = {run.hardware for run in runs}
    return tuple(run for run in baseline if run.hardware in hardware) or tuple(baseline)
