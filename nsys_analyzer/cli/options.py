"""Options that several commands share."""

from __future__ import annotations

import functools
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nsys_analyzer.analysis.transformer.models import list_model_names
from nsys_analyzer.cli.help import CONFIGURATION, INPUT, OUTPUT, PHASES, RUNNING, option
from nsys_analyzer.configuration import LEDGER, OPTIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.text import join_names
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, US_PER_MS

if TYPE_CHECKING:
    from nsys_analyzer.report.evidence import Evidence

Command = TypeVar("Command", bound=Callable[..., Any])

#: A number of tokens or sequences.
SIZE = click.IntRange(1, 2**31 - 1)
#: The trace that a command reads.
trace_argument = click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")
#: A capture, or a folder of captures.
folder_argument = click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE|FOLDER")
#: The one that ``evidence_options`` reads.
evidence_argument = click.argument(
    "traces", type=click.Path(path_type=Path), metavar="TRACE", callback=lambda _, __, path: (path,)
)

_SCHEDULER = "--scheduler"
_PHASE_HELP = (
    "Take ranges of this name for this phase: forward, loss, backward, optimizer, step, warmup, a part of attention "
    "(attention, scores, softmax, values), or a phase of your own. Repeatable."
)


def command_line() -> str:
    """Returns the command line of this process as a reader of the report would type it, beside the captures.

    Where the captures were read is left out, for it changes nothing, and so are keys and passwords.
    """
    from nsys_analyzer.share.names import without_secrets  # the rules of kernels come with it

    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    apart = {place for place, word in enumerate(words) if word == _SCHEDULER}
    kept = [
        word
        for place, word in enumerate(words)
        if not apart & {place, place - 1} and not word.startswith(f"{_SCHEDULER}=")
    ]
    return shlex.join(["nsys-analyze", *without_secrets(kept)])


def tell(line: str) -> None:
    """Tells the user something beside a command's output."""
    click.echo(line, err=True)


def format_of(path: Path | None, form: str | None, suffixes: Mapping[str, str], default: str) -> str:
    """Returns the requested format, else the format of the file's suffix, else the default.

    Raises:
        ConfigurationError: the file's suffix is that of another format, or of none.
    """
    suffix = path.suffix.lower() if path else ""
    file_format = next((name for name, ending in suffixes.items() if ending == suffix), None)
    if suffix and (file_format not in (None, form) if form else not file_format):
        file_suffixes = join_names([*suffixes.values()], "or")
        expected = f"{form} ends in {suffixes[form]}" if form else f"a file ends in {file_suffixes}"
        raise ConfigurationError(f"{path} ends in {suffix}, and {expected}", "Name another file with -o")
    return form or file_format or default


class _Milliseconds(click.FloatRange):
    """A time in ms, or a time with its unit: 35, 35ms, 0.035 s."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the time in ms, or fails."""
        match = re.fullmatch(r"\s*(\S*?)\s*(ns|us|µs|μs|ms|s|)\s*", str(value))
        try:
            number = float(match[1] if match else value)
        except ValueError:
            self.fail(f"{value!r} is no time, such as 35 or 35ms", param, ctx)
        unit = {"ns": 1 / NS_PER_MS, "us": 1 / US_PER_MS, "µs": 1 / US_PER_MS, "μs": 1 / US_PER_MS, "s": MS_PER_S}.get(
            match[2] if match else "", 1.0
        )
        return super().convert(number * unit, param, ctx)


def scheduler_option(function: Command) -> Command:
    """Adds the option that says where captures are read."""
    text = (
        "Read each capture as a task of the Dask scheduler at this address, such as tcp://host:8786. Its workers have "
        "this version, and see the captures under the same paths, as on a shared file system. none: one capture after "
        "another, here. Default: on the cores of this machine, where there are enough captures to be worth it."
    )
    return option(INPUT, _SCHEDULER, metavar="ADDRESS", help=text)(function)


def _use_classes(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    from nsys_analyzer.analysis.kernels.classes import use_classes
    from nsys_analyzer.analysis.kernels.own_classes import read_classes

    use_classes(read_classes(path) if path else {})


def names_options(function: Command) -> Command:
    """Adds the options that say what ranges, steps and kernels are; the command takes the first two as ``names``."""

    @functools.wraps(function)
    def read(*args: Any, phase_names: tuple[str, ...], step: str | None, steps: int | None, **others: Any) -> Any:
        from nsys_analyzer.analysis.ranges.phases import PhaseNames

        said = (*phase_names, *([f"step={step}"] if step else ()))
        return function(*args, names=PhaseNames.parse(said, steps or 0), **others)

    for each in (
        option(
            INPUT, "--classes", "class_file", type=click.Path(path_type=Path), metavar="FILE", expose_value=False,
            callback=_use_classes,
            help="Kernel classes of your own, TOML with a table for each: [attention], kernels = [\"my_attn\"].",
        ),
        option(
            PHASES, "--steps", type=SIZE, metavar="N",
            help="How many steps the capture holds, where neither ranges nor repeating work tell.",
        ),
        option(PHASES, "--step", metavar="RANGE", help="A step is a range of this name, with any number behind it."),
        option(
            PHASES, "--phase-name", "phase_names", metavar="PHASE=RANGE", multiple=True, help=_PHASE_HELP,
        ),
    ):  # fmt: skip
        read = each(read)
    return read  # type: ignore[return-value]


def _unprofiled_options(function: Command) -> Command:
    """Adds the options on times without the profiler, and on ranks, to a command with ``traces``.

    It takes them as ``csv_paths``, ``step_ms`` and ``in_order``.
    """

    @functools.wraps(function)
    def read(*args: Any, **others: Any) -> Any:
        if others["csv_paths"] and others["step_ms"]:
            raise click.UsageError("--step-ms takes the place of --csv: give one of them.")
        return function(*args, **others)

    for each in (
        option(
            INPUT, "--ranks", "in_order", is_flag=True,
            help="The captures are the ranks of one run, in this order: rank 0, rank 1, ...",
        ),
        option(
            INPUT, "--step-ms", type=_Milliseconds(0, 1e9, min_open=True), callback=_finite, metavar="MS",
            help="How long a step takes without the profiler; of one capture, or of the ranks of one run.",
        ),
        option(
            INPUT, "--csv", "csv_paths", type=click.Path(path_type=Path), metavar="FILE", multiple=True,
            help="Times of runs without the profiler, as CSV: a row for each phase (phase, mean_ms), or a column "
            "(forward_ms, step_ms). Repeatable. Default: FOLDER/timings.csv.",
        ),
    ):  # fmt: skip
        read = each(read)
    return read  # type: ignore[return-value]


def configuration_options(function: Command) -> Command:
    """Adds the options that say what captures do not of their configuration; the command takes them as ``given``."""

    @functools.wraps(function)
    def read(*args: Any, **others: Any) -> Any:
        from nsys_analyzer.configuration import Run

        keys = ("model", "context_length", "batch_size", "precision")
        return function(*args, given=Run(**{key: others.pop(key) for key in keys}), **others)

    of_model = f"The model of the captures: {list_model_names()}."
    precisions = click.Choice(["fp32", "tf32", "bf16", "fp16"], case_sensitive=False)
    for each in (
        option(CONFIGURATION, "--precision", type=precisions, help="The precision of the captures."),
        option(CONFIGURATION, "--batch-size", type=SIZE, metavar="N", help="The batch size of the captures."),
        option(
            CONFIGURATION, "--context-length", type=SIZE, metavar="TOKENS", help="The context length of the captures.",
        ),
        option(CONFIGURATION, "--model", metavar="NAME", help=of_model),
    ):  # fmt: skip
        read = each(read)
    return read  # type: ignore[return-value]


def evidence_options(function: Command) -> Command:
    """Adds the options that say how captures are read to a command with ``traces``.

    The command takes ``evidence``, a function that reads them.
    """

    @scheduler_option
    @_unprofiled_options
    @names_options
    @configuration_options
    @functools.wraps(function)
    def read(*args: Any, **others: Any) -> Any:
        paths, csv_paths, names, given = (others.pop(key) for key in ("traces", "csv_paths", "names", "given"))
        scheduler = others.pop("scheduler")
        more = {key: others.pop(key) for key in ("step_ms", "in_order")}

        def evidence(*, with_tracks: bool = False) -> Evidence:
            from nsys_analyzer.cli.run_progress import reading
            from nsys_analyzer.experiments.gather import load_evidence
            from nsys_analyzer.system.cluster import Workers

            workers = Workers(scheduler, reading)
            return load_evidence(
                paths, csv_paths, command_line(), tell, names, given, workers,
                with_tracks=with_tracks, **more,
            )  # fmt: skip

        return function(*args, evidence=evidence, **others)

    return read  # type: ignore[return-value]


def ledger_option(function: Command) -> Command:
    """Adds the file in which ``verify`` keeps what it measured."""
    path = click.Path(path_type=Path)
    return option(
        INPUT, "--ledger", type=path, metavar="FILE", default=LEDGER, show_default=True, help="What verify wrote.",
    )(function)  # fmt: skip


def output_option(folder: Path) -> Callable[[Command], Command]:
    """Adds the folder for results, by default this one."""
    path = click.Path(path_type=Path, file_okay=False)
    return option(
        OUTPUT, "--output-dir", type=path, metavar="FOLDER", default=folder, show_default=True,
        help="The folder for results.",
    )  # fmt: skip


def _finite(ctx: click.Context, param: click.Parameter, time: float | None) -> float | None:
    if time is not None and math.isnan(time):  # it passes every comparison of a range
        raise click.BadParameter("nan is not a time", ctx, param)
    return time


def running_options(folder: Path) -> Callable[[Command], Command]:
    """Adds the options of a command that runs programs one after another into a folder, by default this one."""

    def decorate(function: Command) -> Command:
        planned = "Print what would be run, and run nothing."
        function = option(RUNNING, "--dry-run", is_flag=True, help=planned)(function)
        kept = "Keep finished results in the output folder, or replace them."
        function = option(RUNNING, "--resume/--rerun", default=None, help=kept)(output_option(folder)(function))
        return option(
            RUNNING, "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800, show_default=True,
            callback=_finite, metavar="SECONDS", help="Time limit of each process or case.",
        )(function)  # fmt: skip

    return decorate


def several(group: str, flag: str, name: str, kind: Any, metavar: str, help: str) -> Callable[[Command], Command]:
    """Adds an option of several values of a click type, with commas between them or given again: one tuple, each once.

    The tuple is empty where the option is not given.
    """

    def convert(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        if given and not words:
            raise click.BadParameter("give at least one value", ctx, param)
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    more: dict[str, Any] = {"is_flag": False, "flag_value": "on"} if isinstance(kind, _Switch) else {}
    return option(
        group, flag, name, metavar=f"{metavar}[,...]", multiple=True, callback=convert, help=help, **more
    )  # fmt: skip


def target_options(function: Command) -> Command:
    """Adds the options of the transformer target; None, or an empty tuple, where one is not given."""
    for name, one in reversed(list(OPTIONS.items())):
        if not one.in_run:
            continue
        if one.kind is bool:
            function = option(CONFIGURATION, one.flag, name, is_flag=True, default=None, help=one.help)(function)
            continue
        lighter = f"; {one.default_on_cpu} on a CPU" if one.default_on_cpu is not None else ""
        text = one.help if one.default is None else f"{one.help} Default: {one.default}{lighter}."
        kind = one.choices or one.kind
        function = valued(
            CONFIGURATION, one.flag, name, kind, one.unit, text, least=one.least, in_list=one.several
        )(function)  # fmt: skip
    return function


def valued(
    group: str, flag: str, name: str, kind: type | tuple[str, ...], unit: str, help: str, *, least: int, in_list: bool
) -> Callable[[Command], Command]:
    """Adds an option with values of a type, or one of these words; ``in_list`` with commas between several."""
    is_switch = kind is bool
    words = ("off", "on") if is_switch else kind if isinstance(kind, tuple) else ()
    metavar = f"[{'|'.join(words)}]" if words else unit
    parameter: Any = _Switch(words) if is_switch else click.Choice(words) if words else kind
    if kind is int:
        parameter = click.IntRange(least, SIZE.max)
    if in_list:
        return several(group, flag, name, click.types.convert_type(parameter), metavar, help)
    more: dict[str, Any] = {"is_flag": False, "flag_value": "on"} if is_switch else {}
    return option(group, flag, name, type=parameter, metavar=metavar, help=help, **more)


class _Switch(click.Choice[str]):
    """On or off, as a bool; on where the option stands alone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) == "on"
