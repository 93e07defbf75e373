"""``nsys-analyze operators``: prints what each operator costs, and what it should cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import configuration_options, folder_argument, names_options, print_csv, print_json, tell
from nsys_analyzer.errors import RECORD_COMMAND, CannotAnswerError

if TYPE_CHECKING:
    from nsys_analyzer.analysis.operators.account import OperatorRow
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.trace.phase_names import PhaseNames

#: The calls that share a row, for each choice of ``--by``.
_GROUP_KEYS: dict[str, Callable[[OperatorRow], Hashable]] = {
    "operator": lambda row: (row.operator, row.shapes, row.line),
    "module": lambda row: row.module,
    "line": lambda row: row.line,
}


@command(epilog="Example: nsys-analyze operators capture.sqlite --by line")
@folder_argument
@option(
    SELECTION, "--by", type=click.Choice([*_GROUP_KEYS]), default="operator", show_default=True,
    help="Print a row for each operator with its shapes and its line, for each module, or for each line.",
)  # fmt: skip
@option(SELECTION, "--top", type=click.IntRange(1), metavar="N", help="Print only the N rows with the largest excess.")
@format_option("text", "csv", "json", help="csv and json contain every figure.")
@names_options
@configuration_options
def operators(trace: Path, by: str, top: int | None, output_format: str, names: PhaseNames, configuration: Run) -> None:
    """Prints the operators of a step of TRACE with their measured and their attainable times.

    The excess of an operator is its measured time above its attainable time, without calls that are faster than it.
    The largest excess comes first. The reason explains most of the excess; it is missing if it is not known. The
    operators are known if TRACE was recorded by nsys-analyze run, by PyTorch's profiler with record_shapes=True, or by
    nsys with --pytorch=autograd-shapes-nvtx. TRACE is a capture or a folder of captures.
    """
    from nsys_analyzer.inputs.gather import gather
    from nsys_analyzer.report.renderers.terminal import print_table
    from nsys_analyzer.report.sections.operators import tabulate_operators

    captures = gather((trace,), names=names, overrides=configuration, tell=tell).captures
    try:
        tables = list_operators(captures, by, top)
    except CannotAnswerError as error:
        if output_format != "text":
            raise
        click.echo(f"{error.message}. Record them with: {error.hint}" if error.hint else error.message)
        return
    if output_format == "text":
        for capture, rows in tables:
            caption = f"{f'{capture.title}: ' if len(tables) > 1 else ''}ms per step, the largest excess first:"
            print_table(tabulate_operators(rows, caption, capture.title, by, capture.counters))
    elif output_format == "json":
        print_json(operators_data(tables))
    else:
        print_csv(operators_data(tables), ())


#: The rows of each capture.
_Tables = list[tuple["CaptureSummary", tuple["OperatorRow", ...]]]


def list_operators(captures: Sequence[CaptureSummary], by: str, top: int | None) -> _Tables:
    """Returns the captures whose operators are known, with a row for each operator, module or line.

    Args:
        captures: the captures.
        by: what has a row: ``operator``, ``module`` or ``line``.
        top: the largest number of rows of each capture, those with the largest excess; None returns all.

    Raises:
        CannotAnswerError: no capture has operators with attainable times.
    """
    from nsys_analyzer.analysis.operators.account import fold_rows
    from nsys_analyzer.report.sections.operators import explain_missing_account

    tables = [
        (capture, fold_rows(capture.account.operators, _GROUP_KEYS[by])[:top])
        for capture in captures
        if capture.account
    ]
    if not tables:
        reasons = (reason for capture in captures if (reason := explain_missing_account(capture)))
        why, needs = next(reasons, ("What each operator should cost is not known.", RECORD_COMMAND))
        raise CannotAnswerError(why.removesuffix("."), needs)
    return tables


def operators_data(tables: _Tables) -> list[dict[str, Any]]:
    """Returns the rows of all captures as values that JSON can represent."""
    return [
        {"capture": capture.name, "process": capture.process or "", **asdict(row)}
        for capture, rows in tables
        for row in rows
    ]
