"""``nsys-analyze doctor``: what this machine has for a capture, and how to fix the rest."""

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
    """Print what this machine has for a capture: nsys, driver, GPU, PyTorch, folders, and how to fix the rest.

    The last line says what `nsys-analyze run` does here; the exit code is 1 where it can do nothing.
    """
    from nsys_analyzer.capture.doctor import checks, run_check

    seen = []
    for check in checks(output_dir):
        seen.append(check)
        _show(check)
    verdict = run_check(seen)
    _show(verdict)
    if verdict.status != "ok":
        sys.exit(1)


def _show(check: Check) -> None:
    click.echo(f"{check.name:<{_NAME_WIDTH}}{check.status:<{_STATUS_WIDTH}} {check.found}")
    if check.remedy:
        click.echo(f"{'':<{_NAME_WIDTH + _STATUS_WIDTH}} to fix it: {check.remedy}")
