"""``nsys-analyze what-if``: predicts the length of a step if some of its parts took more or less time."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from nsys_analyzer.cli.help import CHANGES, Command, command, format_option, option
from nsys_analyzer.cli.options import PATH, evidence_options, print_json, print_report

if TYPE_CHECKING:
    from nsys_analyzer.analysis.what_if_memory import OptimizerKind
    from nsys_analyzer.report.evidence import Evidence


class _NameAndValue(click.ParamType[tuple[Any, Any]]):
    """The type of an option that assigns a value to a name: ``matmul=0.5``."""

    name = "pair"

    def __init__(self, example: str, first: click.ParamType[Any], second: click.ParamType[Any]) -> None:
        self.example, self.types = example, (first, second)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, Any]:
        """Splits the argument ``NAME=VALUE``, and converts the name and the value. Fails if it has another form."""
        name, equals_sign, text = value.rpartition("=")
        if not equals_sign or not name:
            self.fail(f"{value!r} does not have the form {self.example}", param, ctx)
        return self.types[0].convert(name, param, ctx), self.types[1].convert(text, param, ctx)


class _WhatIf(Command):
    """The command ``what-if``. It suggests --class if a kernel class is given as an option, such as ``--matmul``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments, or fails."""
        words = " ".join(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from nsys_analyzer.analysis.kernels.classes import known_classes

            kernel_class = error.option_name.lstrip("-").replace("-", " ").casefold()
            if kernel_class not in known_classes():
                raise
            factor = re.search(rf"{re.escape(error.option_name)}[= ]([\d.]+)", words)
            pair = shlex.quote(f"{kernel_class}={factor[1] if factor else 2}")
            message = f"No such option {error.option_name!r}. Did you mean --class {pair}?"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from error


class _FactorOrAttainable(click.ParamType[Any]):
    """The type of a factor, or of the word "attainable", which becomes None."""

    name = "factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        """Returns the factor, or None for the word "attainable"; fails for other text."""
        return None if value == "attainable" else click.FLOAT.convert(value, param, ctx)


#: The type of a number, which also converts text.
_NUMBER: click.ParamType[Any] = click.FLOAT


class _Multiple(click.ParamType[float]):
    """The type of a multiple, such as 2x."""

    name = "multiple"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the factor of a text such as 2x, and fails for text without a number."""
        return float(_NUMBER.convert(str(value).removesuffix("x"), param, ctx))


_FACTOR = _NameAndValue("NAME=FACTOR, such as matmul=0.5", click.STRING, click.FLOAT)


@command(cls=_WhatIf, epilog="Example: nsys-analyze what-if capture.sqlite --class matmul=0.5 --launches 0")
@click.argument("traces", type=PATH, nargs=-1, required=True, metavar="TRACE|FOLDER...")
@option(
    CHANGES, "--class", "classes", type=_FACTOR, multiple=True, metavar="CLASS=FACTOR",
    help="Multiply the time of kernels of this class by FACTOR: 0.5 makes the kernels twice as fast, and 0 removes "
    "them. Repeatable.",
)  # fmt: skip
@option(
    CHANGES, "--range", "ranges", type=_FACTOR, multiple=True, metavar="RANGE=FACTOR",
    help="Multiply the CPU time in ranges of this name, and the time of the GPU work launched there, by FACTOR. The "
    "factor 0 removes these ranges and the waits inside them. Repeatable.",
)  # fmt: skip
@option(
    CHANGES, "--operator", "operators", multiple=True, metavar="NAME=attainable|FACTOR",
    type=_NameAndValue("NAME=attainable, such as mm=attainable", click.STRING, _FactorOrAttainable()),
    help="Shorten the kernels of this operator of PyTorch, such as aten::mm or mm, to its attainable time on this GPU, "
    "or multiply their time by FACTOR. Repeatable.",
)  # fmt: skip
@option(
    CHANGES, "--launches", type=float, metavar="FACTOR",
    help="Multiply the time of launches by FACTOR. With 0, a CUDA graph launches the work, without pauses.",
)  # fmt: skip
@option(
    CHANGES, "--copies", type=click.Choice(["pinned"]),
    help="With pinned, large copies to the GPU read from pinned memory, and the program does not wait for them.",
)  # fmt: skip
@option(
    CHANGES, "--rank", "on_time", type=_NameAndValue("RANK=on-time", click.INT, click.Choice(["on-time"])),
    multiple=True, metavar="RANK=on-time",
    help="Assume that the other ranks of the run never wait for this rank. This needs the captures of all ranks. "
    "Repeatable.",
)  # fmt: skip
@option(
    CHANGES, "--network", type=float, metavar="FACTOR",
    help="Make the transfer of collectives faster by this factor. A collective transfers data after its last rank has "
    "started it.",
)  # fmt: skip
@option(
    CHANGES, "--to-ranks", "rank_count", type=int, metavar="N",
    help="Predict a run of N ranks, each with the work of a recorded rank. Each collective takes the time that its "
    "algorithm needs among N ranks. This needs the captures of all recorded ranks.",
)  # fmt: skip
@option(
    CHANGES, "--checkpoint", multiple=True, metavar="MODULES",
    help="Checkpoint the activations of these modules, such as 'h.*': backward runs their forward passes again. A * "
    "stands for one name of a module's path. This option and the next three also predict the peak memory. Repeatable.",
)  # fmt: skip
@option(CHANGES, "--batch", type=_Multiple(), metavar="FACTORx", help="Change the batch size by this factor, as in 2x.")
@option(
    CHANGES, "--micro-batches", type=int, metavar="N",
    help="Divide the batch into N micro-batches, whose gradients are added up before the optimizer's step.",
)  # fmt: skip
@option(CHANGES, "--optimizer", type=click.Choice(["8bit", "offload"]),
        help="Keep the optimizer's state with 8 bits per element, or in the CPU's memory.")  # fmt: skip
@format_option("text", "markdown", "json", help="json contains every figure.")
@evidence_options
def what_if(
    evidence: Callable[[], Evidence], classes: tuple[tuple[str, float], ...], ranges: tuple[tuple[str, float], ...],
    operators: tuple[tuple[str, float | None], ...], launches: float | None, copies: str | None,
    on_time: tuple[tuple[int, str], ...], network: float | None, rank_count: int | None,
    checkpoint: tuple[str, ...], batch: float | None, micro_batches: int | None,
    optimizer: OptimizerKind | None, output_format: str,
) -> None:  # fmt: skip
    """Predicts how long a step of TRACE would take if some of its parts took more or less time.

    The recorded steps are replayed with all the given changes. The command prints the length of the new step, the
    saving, and what limits the new step. The ranks of a run are replayed together. Any other capture is replayed
    separately.

    The changes of memory (--checkpoint, --batch, --micro-batches, --optimizer) predict the peak memory and the length
    of a step together. They need a capture of nsys-analyze run, which records the tensors that each operator uses.
    """
    from nsys_analyzer.analysis.what_if import WhatIfQuestion, answer_all
    from nsys_analyzer.analysis.what_if_memory import MemoryQuestion, answer_memory_question
    from nsys_analyzer.inputs.saved_reports import GENERATOR
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION, to_plain_data
    from nsys_analyzer.report.sections.what_if import what_if_section
    from nsys_analyzer.report.sections.what_if_memory import memory_what_if_section

    question = WhatIfQuestion(
        dict(classes), dict(ranges), launches, copies == "pinned", tuple(dict(on_time)), network, dict(operators),
        rank_count,
    )  # fmt: skip
    memory_question = MemoryQuestion(checkpoint, batch, micro_batches, optimizer)
    if question == WhatIfQuestion() and memory_question == MemoryQuestion():
        raise click.UsageError(
            "Give a change: --class, --range, --operator, --launches, --copies, --rank, --network, --to-ranks, "
            "--checkpoint, --batch, --micro-batches or --optimizer."
        )
    if question != WhatIfQuestion() and memory_question != MemoryQuestion():
        raise click.UsageError("Give --checkpoint, --batch, --micro-batches and --optimizer without other changes.")
    answers: list[Any]
    if memory_question == MemoryQuestion():
        answers = list(answer_all(evidence().captures, question))
        sections = map(what_if_section, answers)
    else:
        answers = list(answer_memory_question(evidence().captures, memory_question))
        sections = map(memory_what_if_section, answers)
    if output_format == "json":
        print_json({"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "what_if": to_plain_data(answers)})
    else:
        print_report(Report("What if", tuple(sections)), output_format)
