"""``nsys-analyze modules``: prints the time of each module of the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import SELECTION, command, format_option, option
from nsys_analyzer.cli.options import (
    configuration_options,
    folder_argument,
    names_options,
    print_json,
    print_report,
    tell,
)
from nsys_analyzer.errors import PROGRAM_ARGUMENTS, CannotAnswerError

if TYPE_CHECKING:
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.trace.phase_names import PhaseNames


NO_MODULES = CannotAnswerError("No range names a module", f"nsys-analyze run --modules {PROGRAM_ARGUMENTS}")


@command(epilog="Example: nsys-analyze modules capture.sqlite")
@folder_argument
@option(SELECTION, "--all", "show_all", is_flag=True,
        help="Print each layer by itself, and also modules that take almost no time.")  # fmt: skip
@format_option("text", "markdown", "json", help="json contains every module, in the form of the report's JSON.")
@names_options
@configuration_options
def modules(
    trace: Path,
    show_all: bool,
    output_format: str,
    names: PhaseNames,
    configuration: Run,
) -> None:
    """Prints the time of each module of the model in TRACE, in forward and in backward.

    The modules are known if the capture was recorded by nsys-analyze run --modules, if nsys or PyTorch's profiler
    recorded module calls, or if the program itself has ranges around the blocks of its model. TRACE is a capture or a
    folder of captures.
    """
    from nsys_analyzer.inputs.gather import gather
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.renderers.json_report import MODULE_KEYS, captures_data
    from nsys_analyzer.report.sections.modules import modules_section

    captures = gather((trace,), names=names, overrides=configuration, tell=tell).captures
    section = modules_section(captures, each_layer=show_all)
    if output_format == "json":
        modules_data = captures_data(captures, keys=MODULE_KEYS)
        for document in modules_data["captures"]:
            document |= {} if document["modules"] else NO_MODULES.data
        print_json(modules_data)
    elif not section.blocks:
        click.echo(f"{trace} contains no range that names a module. Record one with: {NO_MODULES.hint}")
    else:
        print_report(Report(f"The modules of {trace.name}", (section,)), output_format)
