"""``nsys-analyze doctor``: what this machine has for a capture, and what mends the rest."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.errors import NsysAnalyzerError

if TYPE_CHECKING:
    from nsys_analyzer.capture.doctor import Check

_NAME_WIDTH = 16
_STATUS_WIDTH = 8

#: What a run cannot do without, whatever records it, and what it needs of nsys.
_NEEDED = ("torch", "output folder", "temporary files")
_NEEDED_OF_NSYS = ("nsys", "importer", "device files")


@click.command(epilog="Example: nsys-analyze doctor")
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"), show_default=True,
              help="Where captures would go.")  # fmt: skip
def doctor(output_dir: Path) -> None:
    """Print what this machine has for a capture: nsys, driver, GPU, PyTorch, folders, and what mends the rest.

    The last line says what `nsys-analyze run` does here; the exit code is 1 where it can do nothing.
    """
    from nsys_analyzer.capture.doctor import checks

    seen = []
    for check in checks(output_dir):
        seen.append(check)
        _show(check)
    verdict = run_check(seen)
    _show(verdict)
    if verdict.status != "ok":
        sys.exit(1)


def run_check(seen: Collection[Check]) -> Check:
    """What ``nsys-analyze run`` does here, asked of ``run`` itself, and what of ``seen`` keeps it from doing so."""
    from nsys_analyzer.capture.doctor import Check
    from nsys_analyzer.commands.run import run
    from nsys_analyzer.commands.run_plan import make_plan

    try:
        plan = make_plan(run.make_context("run", []).params, ())
    except NsysAnalyzerError as error:
        return Check("run", "broken", error.message, error.hint)
    if plan.profiler is None:
        return Check("run", "broken", "nothing here can record")
    by_nsys = plan.profiler.name == "nsys"
    needed = (*_NEEDED, *_NEEDED_OF_NSYS) if by_nsys else _NEEDED
    faults = [check.name for check in seen if check.name in needed and check.status in ("missing", "broken")]
    if faults:
        return Check("run", "broken", f"would fail: {', '.join(faults)}", "Mend what is said above")
    how = f"profiles with nsys {plan.profiler.described()['nsys']}" if by_nsys else "records with torch.profiler"
    return Check("run", "ok", " ".join([f"{how}.", *plan.notices]))


def _show(check: Check) -> None:
    click.echo(f"{check.name:<{_NAME_WIDTH}}{check.status:<{_STATUS_WIDTH}} {check.found}")
    if check.remedy:
        click.echo(f"{'':<{_NAME_WIDTH + _STATUS_WIDTH}} to mend it: {check.remedy}")
