"""``nsys-analyze doctor``: checks whether this machine can record captures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import command
from nsys_analyzer.cli.options import output_option

if TYPE_CHECKING:
    from nsys_analyzer.capture.nsys import Check

_NAME_WIDTH = 16
_STATUS_WIDTH = 8


@command(epilog="Example: nsys-analyze doctor")
@output_option(Path("runs"))
def doctor(output_dir: Path) -> None:
    """Checks whether this machine can record captures: nsys, the driver, the GPU, PyTorch and the folders.

    For each failed check, doctor prints how to fix it. The last line says what `nsys-analyze run` can do on this
    machine. The exit status is 1 if `nsys-analyze run` can do nothing.
    """
    from nsys_analyzer.capture.doctor import check_machine, check_run_command

    results = []
    for check in check_machine(output_dir):
        _print_check(check)
        results.append(check)
    verdict = check_run_command(results)
    _print_check(verdict)
    if verdict.status != "ok":
        sys.exit(1)


def _print_check(check: Check) -> None:
    click.echo(f"{check.name:<{_NAME_WIDTH}}{check.status:<{_STATUS_WIDTH}} {check.description}")
    if check.remedy:
        click.echo(f"{'':<{_NAME_WIDTH + _STATUS_WIDTH}} to fix it: {check.remedy}")
