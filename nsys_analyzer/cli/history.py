"""``nsys-analyze history``: what was predicted and measured by ``verify``, as a table and a curve."""

from __future__ import annotations

from pathlib import Path

import click

from nsys_analyzer.cli.help import OUTPUT, SHOWN, command, option
from nsys_analyzer.cli.options import format_of, ledger_option, tell


@command(epilog="Example: nsys-analyze history -o history.html")
@ledger_option
@option(SHOWN, "--calibrate", is_flag=True, help="Say how much wider intervals must be for 80% of what was measured "
        "to lie inside; explain --calibrate widens its own by that.")  # fmt: skip
@option(OUTPUT, "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
        help="Write a page with a curve, too (.html), or markdown.")  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace a file that nsys-analyze did not write.")
def history(ledger: Path, calibrate: bool, output: Path | None, force: bool) -> None:
    """Print what each change that was verified brought, and whether its prediction held."""
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.writing import check_target, write_report
    from nsys_analyzer.verify.ledger import read_ledger
    from nsys_analyzer.verify.section import history as history_section

    built = history_section(read_ledger(ledger, tell), calibrate=calibrate)
    form = format_of(output, None, {"markdown": ".md", "html": ".html"}, "markdown")
    if output:
        check_target(output, (ledger,), force=force)
        write_report(form, built, output, force=force)
    print_section(built.sections[0])
    if output:
        click.echo(f"\n{output}")
