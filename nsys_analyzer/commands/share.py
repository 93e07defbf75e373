"""``nsys-analyze share``: a copy of a trace for others, without what an export tells of its owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.commands.options import trace_argument

if TYPE_CHECKING:
    from nsys_analyzer.capture.share import Shared


@click.command(epilog="Example: nsys-analyze share capture.sqlite -o small.sqlite")
@trace_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE.sqlite", required=True, help="The copy to write."
)
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def share(trace: Path, output: Path, force: bool) -> None:
    """Write a copy of TRACE to give to others: small, scrubbed, and good for the same report.

    An export carries its machine's environment variables, host name, processes and paths. The copy has the
    columns that analysis reads and no others, and "…" in its texts (names of ranges, kernels and threads, messages
    of the profiler) for whatever names a person, a machine or a key: host and user names, e-mail, IP and MAC
    addresses, URLs, UUIDs, credentials by their look. Of a path its last name stays: …/train.py. The name of a layer
    that looks like one (/conv1/Conv) stays. Names that differ stay different: …/train.py, …/train.py (2).

    So do the values of the environment variables in the export go, those of 6 characters or more (4 in a variable
    called KEY, TOKEN, PASSWORD or the like, 3 in one called USER, HOST or the like). Numbers stay, and words that
    phases and kernels are called by: MODE=forward takes no phase away.

    Process and thread IDs stay, every other name that you gave a range, and the CUDA calls with their times, blocking
    ones (synchronise, allocate, free, copy) among them: they explain where the GPU was idle.
    """
    from nsys_analyzer.capture.share import share as write_copy

    for line in _lines(write_copy(trace, output, force=force)):
        click.echo(line)


def _lines(shared: Shared) -> Iterator[str]:
    left_out = shared.left_out
    yield f"{shared.path}: {_size(shared.bytes_after)}, of {_size(shared.bytes_before)}"
    tables = _listed(left_out.tables)
    yield f"Left out: {len(left_out.tables)} tables{tables}, {left_out.strings:,} strings that nothing refers to now"
    if left_out.rows:
        yield f"Left out of tables that are kept: rows{_listed(left_out.rows)}"
    yield f"Environment: {left_out.variables:,} variables found, left out, and looked for in every text that is kept"
    yield f"Texts changed: {left_out.texts:,}"
    yield f"Other names of ranges and kernels are kept. See for yourself: nsys-analyze info {shared.path}"


def _listed(rows: dict[str, int]) -> str:
    most = sorted(rows.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count:,}" for name, count in most[:4])
    return f" ({shown}{', …' if len(most) > 4 else ''})" if shown else ""


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"
