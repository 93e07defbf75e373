"""``nsys-analyze kernels``: prints the kernels of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import folder_argument, names_options, print_csv, print_json, tell
from nsys_analyzer.errors import RECORD_COMMAND, RECORD_GRAPH_NODES_COMMAND, ConfigurationError, MissingTableError

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.report.model import Table
    from nsys_analyzer.trace.phase_names import PhaseNames

#: A row of the table in JSON and CSV: values by the names of columns.
_Row = dict[str, Any]
_COLUMNS = ("capture", "process", "name", "class", "launches", "ms", "avg_us", "share")
#: The columns of the hardware counters, which the table has only if a capture has counters and no phase is selected.
_COUNTER_COLUMNS = ("sms_active", "tensor_active", "dram_bytes_per_s", "samples")


@command(epilog="Example: nsys-analyze kernels capture.sqlite --phase forward --class matmul --top 10")
@folder_argument
@option(
    SELECTION, "--phase", metavar="PHASE",
    help="Print only the kernels of this phase, as means over its measured instances. --phase-name gives the name of "
    "its range.",
)  # fmt: skip
@option(
    SELECTION, "--class", "kernel_class", metavar="CLASS", help="Print only the kernels of this class, such as matmul."

)  # fmt: skip
@option(SELECTION, "--top", type=click.IntRange(1), metavar="N", help="Print only the N kernels with the most time.")
@format_option("text", "csv", "json", help="csv and json contain the full kernel names.")
@names_options
def kernels(
    trace: Path,
    phase: str | None,
    kernel_class: str | None,
    top: int | None,
    output_format: str,
    names: PhaseNames,
) -> None:
    """Prints the kernels of TRACE with their class, launches, times and share of the total kernel time.

    The kernel with the most time comes first. Without --phase, all kernels of the capture except those of the warm-up
    are counted. For a FOLDER, kernels prints the kernels of each capture in the folder.
    """
    from nsys_analyzer.report.renderers.terminal import print_table

    rows = list_kernels(trace, phase, kernel_class, top, names)
    if output_format == "json":
        print_json(rows)
    elif output_format == "csv":
        print_csv(rows, _COLUMNS[1:])
    else:
        print_table(_make_table(rows))


def list_kernels(
    trace: Path, phase: str | None, kernel_class: str | None, top: int | None, names: PhaseNames | None = None
) -> list[_Row]:
    """Returns a row for each kernel of a capture, or of each capture in a folder.

    Args:
        trace: the capture or folder.
        phase: selects the kernels of one instance of a phase; None selects the whole capture without the warm-up.
        kernel_class: selects the kernels of a class; None selects all.
        top: the largest number of kernels for each process, those with the most time; None returns all.
        names: the names of the ranges of each phase.

    Raises:
        ConfigurationError: the captures have no such phase or class.
    """
    from nsys_analyzer.inputs.traces import read_each_trace

    summaries = read_each_trace(trace, lambda path: _summarize_capture(path, trace, names), tell)
    captures = [capture for processes in summaries for capture in processes]
    if phase is not None and not any(capture.phase(phase) for capture in captures):
        phases = sorted({part.phase for capture in captures for part in capture.phases if part.instances})
        raise ConfigurationError(
            f"The trace has no measured phase {phase!r}",
            f"It has: {', '.join(phases) or 'none'}. To name one: --phase-name {phase}=RANGE",
        )
    capture_parts = [(capture, capture.whole if phase is None else capture.phase(phase)) for capture in captures]
    rows = []
    has_counters = phase is None and any(capture.counters for capture in captures)
    for capture, part in capture_parts:
        counters = {row.name: row for row in capture.counters.kernels} if capture.counters else {}
        kernels = [row for row in (part.kernels if part else ()) if kernel_class in (None, row.kernel_class)]
        for row in kernels[:top]:
            names_of_row = (capture.name, capture.process or "", row.name, row.kernel_class)
            figures = (row.launches_per_instance, row.ms_per_instance, row.avg_us, row.share)
            cells = dict(zip(_COLUMNS, (*names_of_row, *figures), strict=True))
            if has_counters:
                cells |= {name: getattr(counters.get(row.name), name, None) for name in _COUNTER_COLUMNS}
            rows.append(cells)
    if len({capture.name for capture in captures}) == 1:
        for cells in rows:
            del cells["capture"]
    if kernel_class and not rows:
        classes = sorted({row.kernel_class for _, part in capture_parts if part for row in part.classes})
        raise ConfigurationError(f"No kernel of class {kernel_class!r} here", f"There is: {', '.join(classes)}")
    return rows


def _summarize_capture(trace: Path, given_path: Path, names: PhaseNames | None) -> tuple[CaptureSummary, ...]:
    """Returns the summaries of the processes of a capture.

    Raises:
        MissingTableError: the capture contains no kernels.
    """
    from nsys_analyzer.analysis.summary.summarize import summarize
    from nsys_analyzer.trace.metadata import explain_missing_cuda
    from nsys_analyzer.trace.trace import Trace

    loaded_trace = Trace.load(trace)
    if "kernel" not in loaded_trace.tables:
        reason = "" if "graph" in loaded_trace.tables else explain_missing_cuda(loaded_trace.metadata.diagnostics)
        remedy = RECORD_GRAPH_NODES_COMMAND if "graph" in loaded_trace.tables else RECORD_COMMAND
        raise MissingTableError(
            f"{trace} contains no kernels{': ' if reason else ''}{reason.removesuffix('.')}", remedy
        )
    return summarize(loaded_trace, trace.name if trace == given_path else str(trace.relative_to(given_path)), names)


def _make_table(rows: list[_Row]) -> Table:
    """Returns the table that a terminal shows, with short names of kernels."""
    from nsys_analyzer.analysis.kernels.labels import make_short_labels
    from nsys_analyzer.report.model import Field, make_table

    labels = make_short_labels(sorted({row["name"] for row in rows}))
    fields: tuple[Field[_Row], ...] = (
        Field("kernel", "text", lambda row: labels[row["name"]]),
        Field("class", "text", lambda row: row["class"]),
        Field("capture", "text", lambda row: row.get("capture")),
        Field("process", "text", lambda row: row["process"] or None),
        Field("launches", "count", lambda row: row["launches"]),
        Field("ms", "ms", lambda row: row["ms"]),
        Field("avg µs", "us", lambda row: row["avg_us"]),
        Field("share", "percent", lambda row: row["share"]),
        Field("SMs active", "percent", lambda row: row.get("sms_active")),
        Field("tensor cores", "percent", lambda row: row.get("tensor_active")),
        Field("DRAM B/s", "bytes/s", lambda row: row.get("dram_bytes_per_s")),
        Field("samples", "count", lambda row: row.get("samples")),
    )
    return make_table(fields, rows, names=2)
