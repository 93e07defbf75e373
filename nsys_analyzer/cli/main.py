"""The command line: the group of all commands, and the only place that catches the errors of the package."""

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

#: The commands by group, each with the line that the help shows for the command.
_COMMANDS = {
    "Record": {
        "doctor": "Checks whether this machine can record captures.",
        "run": "Times and profiles transformers, or any program.",
        "bench": "Runs a standard experiment.",
    },
    "Read": {
        "report": "Reports where the time of captures goes.",
        "explain": "Explains the length of a step, and what to do first.",
        "what-if": "Predicts the length of a step if parts of it took less time.",
        "kernels": "Prints the kernels of a capture.",
        "modules": "Prints the time of each module of the model.",
        "operators": "Prints what each operator costs, and what it should cost.",
        "memory": "Prints what fills the memory of a GPU, and why it ran out.",
        "info": "Prints the contents of a capture.",
        "ask": "Prints single figures by their names.",
        "check": "Checks each line of a text against a capture.",
    },
    "Compare": {
        "compare": "Compares two runs, and explains the change.",
        "verify": "Measures whether a changed program is faster.",
        "history": "Prints the results of all verifications.",
        "baseline": "Keeps runs for later comparisons.",
    },
    "Exchange": {
        "export": "Writes a capture for ui.perfetto.dev, or as a table.",
        "share": "Copies a capture without private data.",
        "mcp": "Serves these commands to an agent.",
    },
}


class _Commands(Group):
    """The group of all commands; each command is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands, group by group."""
        del ctx
        return [name for lines in _COMMANDS.values() for name in lines]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command with this name and returns it; returns None for an unknown name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"nsys_analyzer.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups of commands without importing any command."""
        del ctx
        for group, lines in _COMMANDS.items():
            with formatter.section(group):
                # The fixed width aligns the columns of all groups.
                formatter.write_dl([(f"{name:<7}", line) for name, line in lines.items()])


#: The variable that a shell sets when it asks for completions.
_COMPLETION_VARIABLE = "_NSYS_ANALYZE_COMPLETE"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: nsys-analyze report capture.sqlite",
)
@click.version_option(__version__, prog_name="nsys-analyze")
@click.option("--debug", is_flag=True, help=f"Print the traceback of an error, as {DEBUG_VARIABLE}=1 does.")
def cli(debug: bool) -> None:
    """Answers questions about transformers from Nsight Systems captures.

    How long do forward, backward and optimizer take, on the CPU and on the GPU? Which kernels dominate? What share of
    the time is matmul? How does softmax compare with the matmuls of attention?
    """
    if debug:  # sets the variable for child processes that read captures
        os.environ[DEBUG_VARIABLE] = "1"


def main() -> None:
    """Runs the command line; prints an error of the package or the system as one line, and exits with its status."""
    # The page faults of Arrow's own allocator would take a tenth of the time of a long report.
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")  # os.environ, which started programs inherit, stays unchanged
    if _COMPLETION_VARIABLE not in os.environ:  # for completions, click writes bytes to the streams itself
        use_safe_streams()
    if sys.stdout is None:  # standard output is None if the parent process closed it
        _fail("Standard output is closed. Send it to a file or to /dev/null")
    try:
        cli()
    except NsysAnalyzerError as error:
        _fail(str(error), error.exit_status)
    except MemoryError:
        _fail("There is not enough memory for this. Give fewer captures at once, or a machine with more")
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe: nothing more can be printed
            sys.stderr.close()
            sys.exit(1)
        location = f"{error.filename}: " if error.filename else ""
        remedy = ". Free some space, or write elsewhere" if error.errno == errno.ENOSPC else ""
        _fail(f"{location}{error.strerror or error}{remedy}")


def _fail(message: str, status: int = 1) -> NoReturn:
    """Prints an error as one line, after its traceback if that is wanted, and exits."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    if sys.stderr is not None:
        click.echo(f"Error: {visible(message)}", err=True)
    sys.exit(status)
