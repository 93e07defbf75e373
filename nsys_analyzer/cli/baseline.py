"""``nsys-analyze baseline``: keeps runs for later comparisons."""

from __future__ import annotations

import re
from pathlib import Path

import click

from nsys_analyzer.cli.help import OUTPUT, Command, Group, option
from nsys_analyzer.cli.options import PATH, tell


@click.group(cls=Group, epilog="Example: nsys-analyze baseline save main capture.sqlite")
def baseline() -> None:
    """Keeps runs as baselines for later comparisons.

    A baseline is a folder with a JSON report for each GPU, or for each processor if there is no GPU. The command
    nsys-analyze compare .nsys-analyze/baselines/main after.sqlite uses the report of the GPU that after.sqlite was
    recorded on.
    """


@baseline.command(cls=Command, epilog="Example: nsys-analyze baseline save main capture.sqlite")
@click.argument("name")
@click.argument("trace", type=PATH, metavar="TRACE|FOLDER")
@option(
    OUTPUT, "--folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", show_default=True,
    default=Path(".nsys-analyze/baselines"), help="The folder for baselines.",
)  # fmt: skip
def save(name: str, trace: Path, folder: Path) -> None:
    """Keeps TRACE as the baseline NAME: a capture, a folder of captures, or a JSON report of them.

    The times without the profiler are read from the timings.csv beside TRACE. An earlier report of the same GPU
    in the baseline is replaced.
    """
    from nsys_analyzer.experiments.evidence import load_runs
    from nsys_analyzer.verify.baselines import save_baseline

    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise click.BadParameter(f"{name!r} is not the name of a folder", param_hint="NAME")
    for path in save_baseline(load_runs(trace, tell=tell, option="report --csv"), folder / name, trace, tell):
        click.echo(str(path))
