"""The arguments and options that several commands share."""

from __future__ import annotations

import csv
import functools
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.analysis.transformer.models import list_model_names
from nsys_analyzer.cli.help import CONFIGURATION, INPUT, OUTPUT, PHASES, RUNNING, Function, option
from nsys_analyzer.configuration import LEDGER, OPTIONS, Prices
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.text import FORMULA_START, join_names
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, US_PER_MS

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence
    from nsys_analyzer.report.model import Report

#: The type of an option that counts tokens, sequences or steps.
COUNT_TYPE = click.IntRange(1, 2**31 - 1)
#: The type of an argument or option that is the path of a file or folder.
PATH = click.Path(path_type=Path)

#: The argument of a command that reads one capture.
trace_argument = click.argument("trace", type=PATH, metavar="TRACE")
#: The argument of a command that reads one capture, or each capture in a folder.
folder_argument = click.argument("trace", type=PATH, metavar="TRACE|FOLDER")
#: The argument of a command that reads one capture and has the options of ``evidence_options``.
evidence_argument = click.argument("traces", type=PATH, metavar="TRACE", callback=lambda _, __, path: (path,))

_SCHEDULER = "--scheduler"
_PRICE_TYPE = click.FloatRange(0, 1e6)


# --- options on how captures are read


def evidence_options(function: Function) -> Function:
    """Adds the options on how captures are read to a command with the argument ``traces``.

    The command gets the parameter ``evidence``, a function that reads the captures.
    """

    @option(
        INPUT, "--csv", "csv_paths", type=PATH, metavar="FILE", multiple=True,
        help="A CSV file with times that were measured without the profiler. The file has a row for each phase, with "
        "the columns phase and mean_ms, or it has a column for each phase, such as forward_ms or step_ms. Repeatable. "
        "Default: FOLDER/timings.csv.",
    )  # fmt: skip
    @option(
        INPUT, "--step-ms", type=_Milliseconds(0, 1e9, min_open=True), callback=_refuse_nan, metavar="MS",
        help="The length of a step without the profiler, for one capture or for all ranks of one run.",
    )  # fmt: skip
    @option(
        INPUT, "--ranks", "in_order", is_flag=True,
        help="Treat the captures as the ranks of one run, in their order: rank 0, rank 1, and so on.",
    )  # fmt: skip
    @names_options
    @configuration_options
    @price_options
    @scheduler_option
    @functools.wraps(function)
    def command(
        *args: Any, traces: tuple[Path, ...], csv_paths: tuple[Path, ...], step_ms: float | None, in_order: bool,
        names: Any, configuration: Any, prices: Prices, scheduler: str | None, **options: Any,
    ) -> Any:  # fmt: skip
        """Runs the command with the values that the options give."""
        if csv_paths and step_ms:
            raise click.UsageError("--step-ms replaces --csv: give only one of them.")

        def evidence(*, with_tracks: bool = False) -> Evidence:
            """Reads the captures that the command line names."""
            from nsys_analyzer.cli.run_progress import show_reading
            from nsys_analyzer.experiments.evidence import make_evidence
            from nsys_analyzer.inputs.gather import gather
            from nsys_analyzer.system.cluster import Workers

            workers = Workers(scheduler, show_reading)
            inputs = gather(
                traces, csv_paths, names=names, overrides=configuration, step_ms=step_ms, in_order=in_order,
                with_tracks=with_tracks, prices=prices, workers=workers, tell=tell,
            )  # fmt: skip
            return make_evidence(inputs, quote_command_line())

        return function(*args, evidence=evidence, **options)

    return command  # type: ignore[return-value]


def names_options(function: Function) -> Function:
    """Adds the options that name phases, steps and kernel classes. The command gets the argument ``names``."""

    @option(
        PHASES, "--phase-name", "phase_names", metavar="PHASE=RANGE", multiple=True,
        help="Count the ranges named RANGE as the phase PHASE. A phase is forward, loss, backward, optimizer, step, "
        "warmup, a part of attention (attention, scores, softmax, values), or a phase of your own. Repeatable.",
    )  # fmt: skip
    @option(
        PHASES, "--step", metavar="RANGE", help="The name of the range around each step. A number may follow the name."
    )
    @option(
        PHASES, "--steps", type=COUNT_TYPE, metavar="N",
        help="The number of steps in the capture. Needed if neither NVTX ranges nor repeated launches show the steps.",
    )  # fmt: skip
    @option(
        INPUT, "--classes", "class_file", type=PATH, metavar="FILE", expose_value=False, callback=_use_classes,
        help="A TOML file with kernel classes of your own. Each class is a table, such as [attention] with the line "
        "kernels = [\"my_attn\"].",
    )  # fmt: skip
    @functools.wraps(function)
    def command(*args: Any, phase_names: tuple[str, ...], step: str | None, steps: int | None, **options: Any) -> Any:
        """Runs the command with the values that the options give."""
        from nsys_analyzer.trace.phase_names import PhaseNames

        pairs = (*phase_names, *([f"step={step}"] if step else ()))
        return function(*args, names=PhaseNames.parse(pairs, steps or 0), **options)

    return command  # type: ignore[return-value]


def configuration_options(function: Function) -> Function:
    """Adds the options on what captures do not record; the command gets ``configuration``, a Run."""
    precisions = click.Choice(["fp32", "tf32", "bf16", "fp16"], case_sensitive=False)

    @option(CONFIGURATION, "--model", metavar="NAME", help=f"The model in the captures: {list_model_names()}.")
    @option(
        CONFIGURATION, "--context-length", type=COUNT_TYPE, metavar="TOKENS", help="The context length in the captures."
    )
    @option(CONFIGURATION, "--batch-size", type=COUNT_TYPE, metavar="N", help="The batch size in the captures.")
    @option(CONFIGURATION, "--precision", type=precisions, help="The precision in the captures.")
    @functools.wraps(function)
    def command(
        *args: Any, model: str | None, context_length: int | None, batch_size: int | None, precision: str | None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Runs the command with the values that the options give."""
        from nsys_analyzer.configuration import Run

        configuration = Run(model=model, context_length=context_length, batch_size=batch_size, precision=precision)
        return function(*args, configuration=configuration, **options)

    return command  # type: ignore[return-value]


def price_options(function: Function) -> Function:
    """Adds the options on what electricity and GPUs cost. The command gets the argument ``prices``."""

    @option(
        CONFIGURATION, "--price-per-kwh", type=_PRICE_TYPE, callback=_refuse_nan, metavar="PRICE",
        help="The price of a kWh of electricity, in any currency. The report then says what a million tokens cost, if "
        "the energy of a step was measured.",
    )  # fmt: skip
    @option(
        CONFIGURATION, "--price-per-hour", type=_PRICE_TYPE, callback=_refuse_nan, metavar="PRICE",
        help="The price of one GPU for an hour, in the currency of --price-per-kwh.",
    )  # fmt: skip
    @functools.wraps(function)
    def command(*args: Any, price_per_kwh: float | None, price_per_hour: float | None, **options: Any) -> Any:
        """Runs the command with the values that the options give."""
        return function(*args, prices=Prices(price_per_kwh, price_per_hour), **options)

    return command  # type: ignore[return-value]


def scheduler_option(function: Function) -> Function:
    """Adds the option ``--scheduler``, the address of a Dask scheduler."""
    return option(
        RUNNING, _SCHEDULER, metavar="ADDRESS",
        help="The address of a Dask scheduler whose workers read the captures, such as tcp://host:8786. The workers "
        "need the same version of nsys-analyze and the same paths to the captures. With none, one process on this "
        "machine reads all captures. Default: processes on all cores of this machine share the captures.",
    )(function)  # fmt: skip


def _use_classes(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Registers the kernel classes of a TOML file; without a file, unregisters those of an earlier call."""
    from nsys_analyzer.analysis.kernels.classes import use_classes
    from nsys_analyzer.analysis.kernels.own_classes import read_classes

    use_classes(read_classes(path) if path else {})


# --- options on what is run, and where results are written

#: The option ``--force`` of a command that writes a file.
force_option = option(
    OUTPUT, "--force", is_flag=True,
    help="Replace a file even if nsys-analyze did not write it, and make a missing folder.",
)  # fmt: skip


def running_options(folder: Path) -> Callable[[Function], Function]:
    """Adds the options of a command that runs programs and writes into a folder, by default ``folder``."""

    def add_options(function: Function) -> Function:
        """Adds the options on how programs are run to a command."""
        options = (
            option(
                RUNNING, "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800, show_default=True,
                callback=_refuse_nan, metavar="SECONDS", help="The time limit of each process or experiment case.",
            ),
            option(
                RUNNING, "--resume/--rerun", default=None,
                help="Run only what has no result in the output folder yet, or run everything and replace the results.",
            ),
            output_option(folder),
            option(RUNNING, "--dry-run", is_flag=True, help="Print what would be run, and run nothing."),
        )  # fmt: skip
        for add_option in reversed(options):
            function = add_option(function)
        return function

    return add_options


def output_option(folder: Path) -> Callable[[Function], Function]:
    """Adds the option ``--output-dir``; ``folder`` is the default."""
    return option(
        OUTPUT, "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", default=folder,
        show_default=True, help="The folder for the results.",
    )  # fmt: skip


def ledger_option(function: Function) -> Function:
    """Adds the option ``--ledger``, the file in which ``verify`` keeps its results."""
    return option(
        INPUT, "--ledger", type=PATH, metavar="FILE", default=LEDGER, show_default=True,
        help="The file in which verify keeps its results.",
    )(function)  # fmt: skip


def target_options(function: Function) -> Function:
    """Adds the options of the transformer target; an option that is not given is None or an empty tuple."""
    for name, field in reversed(list(OPTIONS.items())):
        if not field.in_run:
            continue
        if field.kind is bool:
            function = option(CONFIGURATION, field.flag, name, is_flag=True, default=None, help=field.help)(function)
            continue
        default_on_cpu = f"; {field.default_on_cpu} on a CPU" if field.default_on_cpu is not None else ""
        default = "" if field.default is None else f" Default: {field.default}{default_on_cpu}."
        function = valued_option(
            CONFIGURATION, field.flag, name, field.choices or field.kind, field.unit, f"{field.help}{default}",
            least=field.least, in_list=field.several,
        )(function)  # fmt: skip
    return function


def valued_option(
    group: str, flag: str, name: str, kind: type | tuple[str, ...], unit: str, help: str, *, least: int, in_list: bool
) -> Callable[[Function], Function]:
    """Adds an option that takes a value.

    Args:
        group, flag, name, help: the group of the option, its flag, the name of its parameter, and its help text.
        kind: the type of the value, or the allowed words.
        unit: the word that the help shows in place of a value.
        least: the smallest allowed integer.
        in_list: whether the option takes several values, separated by commas.
    """
    is_switch = kind is bool
    words = ("off", "on") if is_switch else kind if isinstance(kind, tuple) else ()
    metavar = f"[{'|'.join(words)}]" if words else unit
    parameter: Any = _Switch(words) if is_switch else click.Choice(words) if words else kind
    if kind is int:
        parameter = click.IntRange(least, COUNT_TYPE.max)
    if in_list:
        return list_option(group, flag, name, click.types.convert_type(parameter), metavar, help)
    return option(group, flag, name, type=parameter, metavar=metavar, help=help, **_allow_missing_value(parameter))


def list_option(
    group: str, flag: str, name: str, kind: Any, metavar: str, help: str
) -> Callable[[Function], Function]:  # fmt: skip
    """Adds an option that takes several values of a click type, separated by commas or given again.

    The command gets a tuple of the distinct values, which is empty if the option is not given.
    """

    def convert(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[Any, ...]:
        """Splits the texts of the option at commas, and returns the distinct values. Fails if a value is invalid."""
        words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
        if texts and not words:
            raise click.BadParameter("give at least one value", ctx, param)
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return option(
        group, flag, name, metavar=f"{metavar}[,...]", multiple=True, callback=convert, help=help,
        **_allow_missing_value(kind),
    )  # fmt: skip


# --- types of options


def _allow_missing_value(kind: Any) -> dict[str, Any]:
    """Returns the attributes of an option that may stand without a value: a switch is then on."""
    return {"is_flag": False, "flag_value": "on"} if isinstance(kind, _Switch) else {}


class _Switch(click.Choice[str]):
    """The type of an option that is on or off, as a bool."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns True for "on" and False for "off". Fails for another value."""
        return super().convert(value, param, ctx) == "on"


class _Milliseconds(click.FloatRange):
    """The type of a time in ms, or with its unit: 35, 35ms, 0.035 s."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Converts a time such as ``35``, ``35ms`` or ``0.035 s`` to ms. Fails if the value is not a time."""
        match = re.fullmatch(r"\s*(\S*?)\s*(ns|us|µs|μs|ms|s|)\s*", str(value))
        try:
            number = float(match[1] if match else value)
        except ValueError:
            self.fail(f"{value!r} is not a time, such as 35 or 35ms", param, ctx)
        unit_ms = {"ns": 1 / NS_PER_MS, "us": 1 / US_PER_MS, "µs": 1 / US_PER_MS, "μs": 1 / US_PER_MS, "s": MS_PER_S}
        return super().convert(number * unit_ms.get(match[2] if match else "", 1.0), param, ctx)


def _refuse_nan(ctx: click.Context, param: click.Parameter, time: float | None) -> float | None:
    """Returns a time or price, or fails if it is nan, which passes every comparison with the ends of a range."""
    if time is not None and math.isnan(time):
        raise click.BadParameter("nan is not a price" if param.metavar == "PRICE" else "nan is not a time", ctx, param)
    return time


# --- helpers of commands


def choose_format(path: Path | None, output_format: str | None, suffixes: Mapping[str, str], default: str) -> str:
    """Returns the requested format, else the format of the file's suffix, else the default.

    Raises:
        ConfigurationError: the suffix belongs to another format, or to none.
    """
    suffix = path.suffix.lower() if path else ""
    file_format = next((name for name, ending in suffixes.items() if ending == suffix), None)
    if suffix and (file_format not in (None, output_format) if output_format else not file_format):
        if output_format:
            expected_suffix = f"the suffix of {output_format} is {suffixes[output_format]}"
        else:
            expected_suffix = f"a file must end in {join_names([*suffixes.values()], 'or')}"
        raise ConfigurationError(f"{path} ends in {suffix}, but {expected_suffix}", "Name another file with -o")
    return output_format or file_format or default


def print_json(data: Any, *, indent: int | None = 1) -> None:
    """Prints data as JSON, for other programs."""
    from nsys_analyzer.report.renderers.json_report import format_json
    from nsys_analyzer.report.screen import data_stream

    click.echo(format_json(data, indent=indent), nl=False, file=data_stream())


def print_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Prints rows as CSV. A text that a spreadsheet would execute as a formula gets an apostrophe."""
    from nsys_analyzer.report.screen import data_stream

    writer = csv.DictWriter(data_stream(), rows[0] if rows else columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                key: re.sub(FORMULA_START, r"'\1", value) if isinstance(value, str) else value
                for key, value in row.items()
            }
        )


def print_report(report: Report, output_format: str) -> None:
    """Prints a report as markdown, or its sections as text for a terminal."""
    from nsys_analyzer.report.renderers import markdown
    from nsys_analyzer.report.renderers.terminal import print_section

    if output_format == "markdown":
        click.echo(markdown.render(report, {}), nl=False)
        return
    for place, section in enumerate(report.sections):
        click.echo(nl=place > 0)
        print_section(section)


def tell(line: str) -> None:
    """Prints a line for the user on standard error, which is separate from a command's output."""
    click.echo(line, err=True)


def quote_command_line() -> str:
    """Returns the command line of this process as a reader of the report would type it in the folder of the captures.

    ``--scheduler``, which does not change a report, is left out. Keys and passwords are hidden.
    """
    from nsys_analyzer.share.names import remove_secrets  # imported here, because it loads all rules of kernel classes

    words, arguments = ["nsys-analyze"], iter(sys.argv[1:])
    for word in arguments:
        if word == _SCHEDULER:
            next(arguments, None)
        elif not word.startswith(f"{_SCHEDULER}="):
            words.append(Path(word).name if Path(word).is_absolute() else word)
    return shlex.join(remove_secrets(words))
