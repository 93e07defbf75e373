"""``nsys-analyze share``: writes a copy of a trace for others, without private data."""

from __future__ import annotations

import re
from pathlib import Path

import click

from nsys_analyzer.cli.help import OUTPUT, SELECTION, command, option
from nsys_analyzer.cli.options import PATH, trace_argument

#: The number of characters after which a printed name is cut.
_MAX_NAME_LENGTH = 100


@command(epilog="Example: nsys-analyze share capture.sqlite -o small.sqlite --keep 'load .*'")
@trace_argument
@option(
    OUTPUT, "-o", "--output", type=PATH, metavar="FILE", required=True,
    help="The copy to write, an SQLite file.",
)  # fmt: skip
@option(
    SELECTION, "--keep", multiple=True, metavar="REGEX",
    help="Keep each name that matches this regular expression as a whole. Repeatable.",
)  # fmt: skip
@option(SELECTION, "--keep-all-names", is_flag=True, help="Keep all names.")
@option(SELECTION, "--keep-source", is_flag=True,
              help="Keep the stacks, operators and memory of the program, with paths, lines and modules.")  # fmt: skip
@option(OUTPUT, "--force", is_flag=True, help="Replace an existing file, and make a missing folder.")
def share(
    trace: Path, output: Path, keep: tuple[str, ...], keep_all_names: bool, keep_source: bool, force: bool
) -> None:
    """Writes a small copy of TRACE for others, without private data and with the same figures.

    An export contains the environment variables, host name, processes and paths of its machine. The copy has only the
    columns that the analysis reads.

    The copy keeps the names of PyTorch (aten::mm, AddmmBackward0, nn.Module: Linear_3), of CUDA and HIP calls, and of
    kernels that a rule of nsys-analyze matches. It keeps the usual names of phases and steps ("forward_pass",
    "step 3"), and the names that --keep matches. An alias replaces any other name, and any word of a module's path that
    is not a class of torch.nn. The alias has the phase, class and precision of the name, so that the figures stay the
    same. share prints the list of aliases for you. The copy does not contain this list.

    The copy keeps the sentences of the profiler's messages that nsys-analyze knows, and the product names and versions
    of the machine. Look for names of your own kernels in the copy: a kernel keeps its name if a rule matches the name,
    such as "falcon_softmax_kernel".

    The copy also keeps process and thread IDs, short numbers at the ends of names, and the CUDA calls with their times,
    which explain why the GPU was idle.
    """
    from nsys_analyzer.share import find_missing_tables
    from nsys_analyzer.share import share as write_copy
    from nsys_analyzer.text import format_bytes, visible

    try:
        patterns = [re.compile(text, re.DOTALL) for text in ((".*",) if keep_all_names else keep)]
    except re.error as error:
        raise click.BadParameter(
            f"{error.pattern!r} is not a regular expression ({error})", param_hint="--keep"
        ) from error
    renamings = write_copy(trace, output, force=force, keep=patterns, keep_source=keep_source)
    click.echo(f"{output}: {format_bytes(output.stat().st_size)}")
    click.echo(f"Names replaced by an alias: {len(renamings):,}")
    for renaming in renamings:
        text = (
            renaming.text.encode("unicode_escape").decode().replace("\\u2026", "…")
        )  # escapes line breaks and control characters
        click.echo(f"  {renaming.alias}: {text[:_MAX_NAME_LENGTH]}{'…' if len(text) > _MAX_NAME_LENGTH else ''}")
    if renamings:
        click.echo("The copy does not contain this list. To keep names of it, use --keep REGEX or --keep-all-names")
    click.echo(f"Other names are kept. To see them: nsys-analyze info {output}")
    if tables := find_missing_tables(trace, output):
        click.echo(f"Tables that the copy lacks: {visible(', '.join(tables))}")
