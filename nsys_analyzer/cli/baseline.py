"""``nsys-analyze baseline``: runs that later ones are compared with, kept as reports in a folder."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, Command, Group, option
from nsys_analyzer.cli.options import tell

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import Summary

_folder_option = option(
    OUTPUT, "--folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", show_default=True,
    default=Path(".nsys-analyze/baselines"), help="Where baselines are kept.",
)  # fmt: skip


@click.group(cls=Group, epilog="Example: nsys-analyze baseline save main capture.sqlite")
def baseline() -> None:
    """Keep runs that later ones are compared with.

    A baseline is a folder with a report as JSON for each GPU, or for each processor where there is no GPU:
    nsys-analyze compare .nsys-analyze/baselines/main after.sqlite takes the one that AFTER ran on.
    """


@baseline.command(cls=Command, epilog="Example: nsys-analyze baseline save main capture.sqlite")
@click.argument("name")
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE|FOLDER")
@_folder_option
def save(name: str, trace: Path, folder: Path) -> None:
    """Keep TRACE as the baseline NAME: a capture, a folder of captures, or what report --format json wrote of them.

    Times without the profiler are those of the timings.csv beside it. What NAME holds of the same GPU is replaced.
    """
    from nsys_analyzer.analysis.comparison.comparison import reasons_against_run
    from nsys_analyzer.errors import NsysAnalyzerError
    from nsys_analyzer.experiments.gather import load_runs
    from nsys_analyzer.report.renderers.json_report import captures_data, in_json
    from nsys_analyzer.report.writing import check_replaceable
    from nsys_analyzer.system.atomic_write import write_text
    from nsys_analyzer.text import join_texts, plain

    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise click.BadParameter(f"{name!r} is no name of a folder", param_hint="NAME")
    of_hardware = defaultdict[str, list["Summary"]](list)
    for run in load_runs(trace, (), tell, option="report --csv"):
        if against := [*reasons_against_run(run)]:
            tell(f"Left out: {plain(join_texts('; ', against))}")
        else:
            of_hardware[run.hardware].append(run)
    if not of_hardware:
        raise NsysAnalyzerError(f"{trace} holds no run that others can be compared with", "Give runs that ended well")
    for hardware, runs in of_hardware.items():
        stem = re.sub(r"[^\w.+-]+", "-", hardware) or "unknown"
        path = folder / name / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path, "Name another baseline")
        write_text(path, in_json(captures_data(runs)))
        click.echo(str(path))
