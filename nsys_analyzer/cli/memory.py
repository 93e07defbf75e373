"""``nsys-analyze memory``: prints what fills the memory of a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import PATH, print_csv, print_json, print_report
from nsys_analyzer.errors import PROGRAM_ARGUMENTS, CannotAnswerError


@command(epilog="Example: nsys-analyze memory snapshot.pickle")
@click.argument("path", type=PATH, metavar="SNAPSHOT|TRACE")
@option(SELECTION, "--all", "show_all", is_flag=True, help="Also print the lines with little memory.")
@format_option("text", "markdown", "csv", "json", help="json contains every figure, csv every line.")
def memory(path: Path, show_all: bool, output_format: str) -> None:
    """Prints the peak of a GPU's memory, what fills it, what grows from step to step, and why an allocation failed.

    SNAPSHOT is a memory snapshot of PyTorch, plain or compressed with gzip, xz or zstd. A program writes one with
    torch.cuda.memory._record_memory_history() before its steps, and torch.cuda.memory._dump_snapshot(PATH) after them.
    For a TRACE, memory reads the snapshots that nsys-analyze run --memory keeps beside it.
    """
    from nsys_analyzer.analysis.memory.accounting import account_memory
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.sections.memory import list_line_rows, memory_section
    from nsys_analyzer.trace.memory_snapshot import find_snapshot_files, read_snapshot
    from nsys_analyzer.trace.sources import is_capture

    snapshots = find_snapshot_files(path) if is_capture(path) and path.exists() else [path]
    if not snapshots:
        raise CannotAnswerError(
            f"There is no memory snapshot beside {path}", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}"
        )
    accounts = [(snapshot.name, account_memory(read_snapshot(snapshot))) for snapshot in snapshots]
    if output_format == "json":
        print_json([{"snapshot": name, **asdict(account)} for name, account in accounts])
    elif output_format == "csv":
        print_csv(
            [{"snapshot": name, **row} for name, account in accounts for row in list_line_rows(account.lines)], ()
        )
    else:
        sections = tuple(memory_section(account, name, show_all=show_all) for name, account in accounts)
        print_report(Report(f"The memory of {path.name}", sections), output_format)
