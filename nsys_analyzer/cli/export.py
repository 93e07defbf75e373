"""``nsys-analyze export``: captures as a Perfetto trace, or their GPU operations as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, command, option
from nsys_analyzer.cli.options import format_of, names_options
from nsys_analyzer.export import formats

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranges.phases import PhaseNames


@command(epilog="Example: nsys-analyze export capture.sqlite --format perfetto -o capture.pftrace")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE|FOLDER...")
@option(
    OUTPUT, "--format", "output_format", type=click.Choice(list(formats())),
    help="perfetto: a timeline for https://ui.perfetto.dev. Else a table with a row for each GPU operation. Default: "
    "what -o ends in, else perfetto.",
)  # fmt: skip
@option(
    OUTPUT, "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="The file to write. Default: the first TRACE's name with .pftrace, .parquet, .csv or .db, in this folder.",
)  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace a file that nsys-analyze did not write; make a missing folder.")
@names_options
def export(
    traces: tuple[Path, ...], output_format: str | None, output: Path | None, force: bool, names: PhaseNames
) -> None:
    """Write captures for other tools: as a timeline, or as a table of GPU operations.

    The timeline has a track for each stream of a GPU, for its idle time by cause, for each thread, with its ranges and
    the API calls that launch, block or allocate, and for GPU memory, where that was recorded. Arrows lead from launches
    to kernels, whose details say class, phase, ranges, launch latency and precision. Open it at https://ui.perfetto.dev,
    which reads it in your browser and uploads nothing.

    TRACE is what the report takes. Captures of several ranks become one timeline, their clocks aligned by collectives.
    """
    from nsys_analyzer.export.writing import default_name
    from nsys_analyzer.export.writing import export as write
    from nsys_analyzer.report.units import format_number
    from nsys_analyzer.text import visible

    suffixes = {form: exporter.suffix for form, exporter in formats().items()}
    output_format = format_of(output, output_format, suffixes, "perfetto")
    target = output or default_name(traces[0], output_format)
    size = write(
        traces,
        target,
        output_format,
        names,
        force=force,
        tell=lambda line: click.echo(visible(line), err=True),
    )
    click.echo(f"{target}: {format_number(size, 'bytes')}")
