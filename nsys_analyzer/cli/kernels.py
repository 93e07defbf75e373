"""``nsys-analyze kernels``: the kernel table of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import OUTPUT, SHOWN, Choice, command, did_you_mean, option
from nsys_analyzer.cli.options import names_options, trace_argument
from nsys_analyzer.errors import ConfigurationError, MissingTableError

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranges.phases import PhaseNames
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
    from nsys_analyzer.report.model import Unit

#: The title and the unit of each figure of a row.
_FIGURES: dict[str, tuple[str, Unit]] = {
    "launches": ("launches", "count"),
    "ms": ("ms", "ms"),
    "avg_us": ("avg µs", "us"),
    "share": ("share", "percent"),
}


@command(epilog="Example: nsys-analyze kernels capture.sqlite --phase forward --class matmul --top 10")
@trace_argument
@option(SHOWN, "--phase", metavar="PHASE", help="Only this phase, per measured instance. --phase-name names its range.")
@option(SHOWN, "--class", "kernel_class", metavar="CLASS", help="Only kernels of this class, such as matmul.")
@option(SHOWN, "--top", type=click.IntRange(1), metavar="N", help="Only the N kernels with the most time.")
@option(
    OUTPUT, "--format", "output_format", type=Choice(["text", "csv", "json"]), default="text", show_default=True,
    help="csv and json hold the full kernel names.",
)  # fmt: skip
@names_options
def kernels(
    trace: Path,
    phase: str | None,
    kernel_class: str | None,
    top: int | None,
    output_format: str,
    names: PhaseNames,
) -> None:
    """Print the kernels of TRACE, longest total first: class, launches, times and share of the total kernel time.

    Without --phase, of the whole capture without warm-up.
    """
    from nsys_analyzer.analysis.summary.summarize import summarize
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.text import plain
    from nsys_analyzer.trace.metadata import explained
    from nsys_analyzer.trace.trace import Trace

    loaded = Trace.load(trace)
    if "kernel" not in loaded.tables:
        hint = "--cuda-graph-trace=node" if "graph" in loaded.tables else "--trace=cuda,nvtx"
        why = "" if "graph" in loaded.tables else plain(explained(loaded.metadata.diagnostics), "`")
        raise MissingTableError(f"{trace} holds no kernels", why or f"Capture again with {hint}")
    captures = summarize(loaded, trace.name, names)
    rows = [row for capture in captures for row in _rows(capture, _phase(captures, capture, phase), kernel_class, top)]
    if kernel_class and not rows:
        shown = (_phase(captures, capture, phase) for capture in captures)
        seen = sorted({row.kernel_class for part in shown if part for row in part.classes})
        where = f"The {phase} phase" if phase else "The trace"
        raise ConfigurationError(
            f"No kernel of class {kernel_class!r} here",
            f"{where} has: {', '.join(seen)}.{did_you_mean(kernel_class, seen)}",
        )
    if output_format == "json":
        click.echo(json.dumps(rows, indent=1), file=data_stream())
    elif output_format == "csv":
        _print_csv(rows, len(captures) > 1)
    else:
        _print_table(rows, len(captures) > 1)


def _phase(captures: tuple[CaptureSummary, ...], capture: CaptureSummary, name: str | None) -> PhaseSummary | None:
    """The phase to print of one process; without a name the whole capture without warm-up.

    Raises:
        ConfigurationError: no process has a measured instance of that phase.
    """
    if name is None:
        return capture.whole
    if not any(other.phase(name) for other in captures):
        seen = sorted({phase.phase for other in captures for phase in other.phases if phase.instances})
        raise ConfigurationError(
            f"The trace has no measured phase {name!r}",
            f"It has: {', '.join(seen) or 'none'}.{did_you_mean(name, seen)} To name one: --phase-name {name}=RANGE",
        )
    return capture.phase(name)


def _rows(
    capture: CaptureSummary, phase: PhaseSummary | None, kernel_class: str | None, top: int | None
) -> Iterator[dict[str, Any]]:
    chosen = [row for row in (phase.kernels if phase else ()) if kernel_class in (None, row.kernel_class)]
    for row in chosen[:top]:
        yield {
            "process": capture.process or "",
            "name": row.name,
            "class": row.kernel_class,
            "launches": row.launches_per_instance,
            "ms": row.ms_per_instance,
            "avg_us": row.avg_us,
            "share": row.share,
        }


def _print_table(rows: list[dict[str, Any]], several: bool) -> None:
    from rich.table import Table

    from nsys_analyzer.analysis.kernels.labels import short_labels
    from nsys_analyzer.report.screen import console
    from nsys_analyzer.report.units import format_number

    labels = short_labels(sorted({row["name"] for row in rows}))
    table = Table(box=None, pad_edge=False)
    for title in (["process"] if several else []) + ["kernel", "class"]:
        table.add_column(title, overflow="fold")
    for title, _ in _FIGURES.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        figures = [format_number(row[key], unit) for key, (_, unit) in _FIGURES.items()]
        table.add_row(*([row["process"]] if several else []), labels[row["name"]], row["class"], *figures)
    console().print(table)


def _print_csv(rows: list[dict[str, Any]], several: bool) -> None:
    import csv

    from nsys_analyzer.report.screen import data_stream

    columns = [column for column in (rows[0] if rows else ()) if several or column != "process"]
    writer = csv.DictWriter(data_stream(), columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
