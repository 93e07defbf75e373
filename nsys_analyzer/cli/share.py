"""``nsys-analyze share``: a copy of a trace for others, without what an export tells of its owner."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import OUTPUT, SHOWN, command, option
from nsys_analyzer.cli.options import trace_argument

if TYPE_CHECKING:
    from nsys_analyzer.share.names import Renaming

_WIDTH = 100


@command(epilog="Example: nsys-analyze share capture.sqlite -o small.sqlite --keep 'load .*'")
@trace_argument
@option(
    OUTPUT, "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True,
    help="The copy to write, an SQLite file.",
)  # fmt: skip
@option(SHOWN, "--keep", multiple=True, metavar="REGEX", help="Keep names that match this as a whole. Repeatable.")
@option(SHOWN, "--keep-all-names", is_flag=True, help="Keep all names.")
@option(SHOWN, "--keep-source", is_flag=True,
              help="Keep the stacks of the program, with its paths and lines of its source.")  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace a file that is there already; make a missing folder.")
def share(
    trace: Path, output: Path, keep: tuple[str, ...], keep_all_names: bool, keep_source: bool, force: bool
) -> None:
    """Write a copy of TRACE to give to others: small, without private data, with the same figures.

    An export holds the environment variables, host name, processes and paths of its machine. The copy has only the
    columns that the analysis reads.

    These names are kept: those of PyTorch (aten::mm, AddmmBackward0, nn.Module: Linear_3), of CUDA's and HIP's calls,
    and of kernels that a rule of this package knows; the spellings of phases and steps ("forward_pass", "step 3"); and
    those that --keep matches. Any other name becomes an alias, with its phase, class and precision, so that the figures
    stay the same; so does each word of a module's path that is none of torch.nn. The list of aliases is for you.

    Of the profiler's messages the sentences stay that are known, and of the machine the names of products and
    versions. Look for names of your own kernels: a rule may know them ("falcon_softmax_kernel").

    Process and thread IDs stay, a short number at the end of a name, and the CUDA calls
    with their times: they explain why the GPU was idle.
    """
    from nsys_analyzer.share import share as write_copy
    from nsys_analyzer.text import visible

    patterns = [_pattern(text) for text in ((".*",) if keep_all_names else keep)]
    for line in _lines(output, write_copy(trace, output, force=force, keep=patterns, keep_source=keep_source)):
        click.echo(line)
    if dropped := _dropped(trace, output):
        click.echo(f"Tables that the copy lacks: {visible(', '.join(dropped))}")


def _dropped(trace: Path, output: Path) -> list[str]:
    """Returns the tables of an nsys trace that hold rows and are not in the copy."""
    from nsys_analyzer.trace.sources import KINETO, find_source, open_capture

    if find_source(trace) is KINETO:  # a reader makes its tables from the events that it knows
        return []
    reader, copied = open_capture(trace), open_capture(output).columns_of
    left_out = (name for name in reader.columns_of if name not in copied and not name.startswith("ENUM_"))
    return sorted(name for name in left_out if reader.has_rows(name))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise click.BadParameter(f"{text!r} is no regular expression ({error})", param_hint="--keep") from error


def _lines(output: Path, renamed: Sequence[Renaming]) -> Iterator[str]:
    from nsys_analyzer.report.units import format_number

    yield f"{output}: {format_number(output.stat().st_size, 'bytes')}"
    yield f"Names replaced by an alias: {len(renamed):,}"
    for one in renamed:  # on one line, control characters escaped
        text = one.text.encode("unicode_escape").decode().replace("\\u2026", "…")
        yield f"  {one.alias}: {text[:_WIDTH]}{'…' if len(text) > _WIDTH else ''}"
    if renamed:
        yield "The list above is for you, and not in the copy. Allow names of it with --keep REGEX, or --keep-all-names"
    yield f"Other names are kept. See for yourself: nsys-analyze info {output}"
