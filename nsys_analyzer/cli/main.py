"""The command line: one group, and the one place that catches the package's errors."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from typing import NoReturn

import click

from nsys_analyzer import __version__
from nsys_analyzer.cli.help import Group
from nsys_analyzer.errors import DEBUG_VARIABLE, NsysAnalyzerError
from nsys_analyzer.report.screen import use_safe_streams
from nsys_analyzer.text import visible

#: The commands in groups, each with its line in the list of them.
_COMMANDS = {
    "Record": {
        "doctor": "Check what this machine has for a capture.",
        "run": "Time and profile transformers, or profile any program.",
        "bench": "Run a standard experiment.",
    },
    "Read": {
        "report": "Answer where the time of captures goes.",
        "explain": "Say why a step is as long as it is, and what to do first.",
        "what-if": "Say what a step would take if parts of it took less.",
        "kernels": "Print the kernel table of a capture.",
        "modules": "Say which modules of the model take the time.",
        "info": "Print what a capture holds.",
        "ask": "Print single figures by their names.",
        "check": "Say of each line in a text whether a capture holds it.",
    },
    "Compare": {
        "compare": "Say what changed between two runs, and what explains it.",
        "verify": "Say whether a changed program is faster, as predicted.",
        "history": "Print what was verified so far.",
        "baseline": "Keep runs that later ones are compared with.",
    },
    "Hand on": {
        "export": "Write a capture for ui.perfetto.dev, or as a table.",
        "share": "Copy a capture without private data.",
        "mcp": "Serve these questions to an agent.",
    },
}


class _Commands(Group):
    """The commands, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [name for lines in _COMMANDS.values() for name in lines]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"nsys_analyzer.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups of commands, of which none is imported."""
        del ctx
        for group, lines in _COMMANDS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{name:<7}", line) for name, line in lines.items()])  # columns of one width


#: The shell asks what a word may be completed to.
_COMPLETING = "_NSYS_ANALYZE_COMPLETE"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: nsys-analyze report capture.sqlite",
)
@click.version_option(__version__, prog_name="nsys-analyze")
@click.option("--debug", is_flag=True, help=f"Show where an error arose, as {DEBUG_VARIABLE}=1 does.")
def cli(debug: bool) -> None:
    """Answers questions about transformers from Nsight Systems captures.

    How long do forward, backward and optimizer take, on the CPU and on the GPU? Which kernels dominate? What share is
    matmul? How does softmax compare with the matmuls of attention?
    """
    if debug:  # processes that read captures inherit it
        os.environ[DEBUG_VARIABLE] = "1"


def main() -> None:
    """Runs the command line; an error of the package or the system is one line and exit code 1."""
    # Arrow's own allocator returns memory in a way that costs a tenth of a long report in page faults.
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")  # Arrow sees it, and no program that is run
    if _COMPLETING not in os.environ:  # click writes the shell's own words, as bytes
        use_safe_streams()
    if sys.stdout is None:  # closed by whoever started this: what a command prints has nowhere to go
        _fail("Standard output is closed. Send it to a file or to /dev/null")
    try:
        cli()
    except NsysAnalyzerError as error:
        _fail(str(error), error.exit_status)
    except MemoryError:
        _fail("There is not enough memory for this. Give fewer captures at once, or a machine with more")
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has gone: nothing is left to say
            sys.stderr.close()
            sys.exit(1)
        where = f"{error.filename}: " if error.filename else ""
        remedy = ". Free some space, or write elsewhere" if error.errno == errno.ENOSPC else ""
        _fail(f"{where}{error.strerror or error}{remedy}")


def _fail(message: str, status: int = 1) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    if sys.stderr is not None:
        click.echo(f"Error: {visible(message)}", err=True)
    sys.exit(status)
