"""``nsys-analyze memory``: prints what fills the memory of a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import PATH, print_csv, print_json, print_report


@command(epilog="Example: nsys-analyze memory snapshot.pickle")
@click.argument("snapshot", type=PATH, metavar="SNAPSHOT")
@option(SELECTION, "--all", "show_all", is_flag=True, help="Also print the lines with little memory.")
@format_option("text", "markdown", "csv", "json", help="json contains every figure, csv every line.")
def memory(snapshot: Path, show_all: bool, output_format: str) -> None:
    """Prints the peak of a GPU's memory, what fills it, what grows from step to step, and why an allocation failed.

    SNAPSHOT is a memory snapshot of PyTorch, plain or compressed with gzip, xz or zstd. A program writes one with
    torch.cuda.memory._record_memory_history() before its steps, and torch.cuda.memory._dump_snapshot(PATH) after them.
    """
    from nsys_analyzer.analysis.memory.accounting import account_memory
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.sections.memory import list_line_rows, memory_section
    from nsys_analyzer.trace.memory_snapshot import read_snapshot

    account = account_memory(read_snapshot(snapshot))
    if output_format == "json":
        print_json({"snapshot": snapshot.name, **asdict(account)})
    elif output_format == "csv":
        print_csv(list_line_rows(account.lines), ())
    else:
        section = memory_section(account, snapshot.name, show_all=show_all)
        print_report(Report(f"The memory of {snapshot.name}", (section,)), output_format)
