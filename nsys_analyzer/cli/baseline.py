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
    from nsys_analyzer.experiments.loading import load_runs
    from nsys_analyzer.report.renderers.json_report import captures_data, in_json
    from nsys_analyzer.report.writing import check_replaceable
    from nsys_analyzer.system.atomic_write import write_text
    from nsys_analyzer.text import joined, plain

    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise click.BadParameter(f"{name!r} is no name of a folder", param_hint="NAME")
    of_hardware = defaultdict[str, list["Summary"]](list)
    for run in load_runs(trace, (), tell, option="report --csv"):
        if against := [*reasons_against_run(run)]:
            tell(f"Left out: {plain(joined('; ', against))}")
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


@baseline.command("list", cls=Command, epilog="Example: nsys-analyze baseline list")
@_folder_option
def list_baselines(folder: Path) -> None:
    """Print the baselines: what each is of, and how long its step takes, without a profiler where it was timed so."""
    from nsys_analyzer.analysis.comparison.comparison import clocks_of
    from nsys_analyzer.analysis.ranges.phases import STEP
    from nsys_analyzer.experiments.loading import reports_at
    from nsys_analyzer.report.model import Section
    from nsys_analyzer.report.renderers.json_report import read_report
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.tables import Field, table

    def step_ms(run: Summary) -> float | None:
        unprofiled = run.unprofiled.trusted_ms(STEP) if run.unprofiled else None
        return unprofiled or (run.step.length_ms if run.step else None)

    places = sorted(folder.iterdir()) if folder.is_dir() else []
    rows = [(place.name, run) for place in places for report in reports_at(place) for run in read_report(report)]
    fields: tuple[Field[tuple[str, Summary]], ...] = (
        Field("baseline", "text", lambda row: row[0]),
        Field("hardware", "text", lambda row: row[1].hardware),
        Field("run", "text", lambda row: row[1].title),
        Field("step, ms", "ms", lambda row: step_ms(row[1])),
        Field("timed", "text", lambda row: max(clocks_of(row[1]), default="")),
    )
    if rows:
        print_section(Section("baselines", "", (table(fields, rows),)))
    else:
        click.echo(f"{folder} holds no baseline. To keep one: nsys-analyze baseline save main capture.sqlite")
