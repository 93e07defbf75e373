"""``nsys-analyze history``: prints what ``verify`` predicted and measured, as a table and a curve."""

from __future__ import annotations

from pathlib import Path

import click

from nsys_analyzer.cli.help import OUTPUT, SELECTION, command, option
from nsys_analyzer.cli.options import PATH, choose_format, ledger_option, tell


@command(epilog="Example: nsys-analyze history -o history.html")
@ledger_option
@option(SELECTION, "--calibrate", is_flag=True, help="Print the factor by which predicted intervals must be wider to "
        "contain 80% of the measured savings. explain --calibrate widens its intervals by this factor.")  # fmt: skip
@option(OUTPUT, "-o", "--output", type=PATH, metavar="FILE",
        help="Also write the table to a file: as a page with a curve (.html), or as markdown (.md).")  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace a file even if nsys-analyze did not write it.")
def history(ledger: Path, calibrate: bool, output: Path | None, force: bool) -> None:
    """Prints what each verified change saved, and whether its prediction held."""
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.writing import check_target, write_report
    from nsys_analyzer.verify.ledger import read_ledger
    from nsys_analyzer.verify.section import history_report

    report = history_report(read_ledger(ledger, tell), calibrate=calibrate)
    output_format = choose_format(output, None, {"markdown": ".md", "html": ".html"}, "markdown")
    if output:
        check_target(output, (ledger,), force=force)
        write_report(output_format, report, output, force=force)
    print_section(report.sections[0])
    if output:
        click.echo(f"\n{output}")
