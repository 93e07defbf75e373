"""``nsys-analyze export``: writes captures as a Perfetto trace, or their GPU operations as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, command, option
from nsys_analyzer.cli.options import PATH, choose_format, force_option, names_options
from nsys_analyzer.export import load_formats

if TYPE_CHECKING:
    from nsys_analyzer.trace.phase_names import PhaseNames


@command(epilog="Example: nsys-analyze export capture.sqlite --format perfetto -o capture.pftrace")
@click.argument("traces", nargs=-1, required=True, type=PATH, metavar="TRACE|FOLDER...")
@option(
    OUTPUT, "--format", "output_format", type=click.Choice(list(load_formats())),
    help="perfetto is a timeline for https://ui.perfetto.dev. The other formats are a table with a row for each GPU "
    "operation. Default: the format that the suffix of -o names, else perfetto.",
)  # fmt: skip
@option(
    OUTPUT, "-o", "--output", type=PATH, metavar="FILE",
    help="The file to write. Default: a file in the working folder, with the name of the first TRACE and the suffix "
    ".pftrace, .parquet, .csv or .db.",
)  # fmt: skip
@force_option
@names_options
def export(
    traces: tuple[Path, ...], output_format: str | None, output: Path | None, force: bool, names: PhaseNames
) -> None:
    """Writes captures for other tools: as a timeline, or as a table of GPU operations.

    The timeline has tracks for the streams of each GPU, for the GPU's idle time by cause, for the threads of the
    program, and for GPU memory if it was recorded. The track of a thread shows its ranges, and the API calls that
    launch, block or allocate. Arrows connect launches with kernels. The details of a kernel are its class, phase,
    ranges, launch latency and precision. Open the timeline at https://ui.perfetto.dev, which reads it in your browser
    and uploads nothing.

    TRACE is any capture that nsys-analyze report reads. Captures of several ranks become one timeline. The ranks'
    clocks are aligned by means of the collectives.
    """
    from nsys_analyzer.export.writing import default_target
    from nsys_analyzer.export.writing import export as write
    from nsys_analyzer.text import format_bytes, visible

    suffixes = {name: exporter.suffix for name, exporter in load_formats().items()}
    output_format = choose_format(output, output_format, suffixes, "perfetto")
    target = output or default_target(traces[0], output_format)
    size = write(
        traces,
        target,
        output_format,
        names,
        force=force,
        tell=lambda line: click.echo(visible(line), err=True),
    )
    click.echo(f"{target}: {format_bytes(size)}")
