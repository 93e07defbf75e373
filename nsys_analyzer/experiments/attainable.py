"""Defines the experiment ``attainable``: kernel times of well-shaped operators, for the table of attainable times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.experiments.model import Bench, Results, list_option, option, scalar_options
from nsys_analyzer.inputs.rows import CaseTarget
from nsys_analyzer.report.model import Block, Details, Field, make_table
from nsys_analyzer.text import phrase

#: The kinds of operators that are measured.
KINDS = (
    "matmul", "attention", "convolution", "elementwise", "copy", "norm", "softmax", "reduction", "embedding",
    "cross entropy", "optimizer",
)  # fmt: skip
_US_PER_S = 1e6
_DEFINITIONS = phrase(
    "*Time* is the total kernel time of an operator: the mean of successive calls with the same tensors, which "
    "therefore stay in the L2 cache if they fit. On a CPU, it is the time of the operators. *FLOPs* and *bytes* follow "
    "from the shapes: inputs are read once, and outputs are written once. `docs/make_attainable_times.py` writes the "
    "table of attainable times from these rows."
)


@dataclass(frozen=True)
class AttainableCase:
    """A kind of operators, all of whose operators are measured."""

    device: str
    kind: str = option("matmul", "kinds of operators to measure", KINDS)
    max_mib: int = option(4096, "size of the largest tensor of an operator, MiB", cpu=1)
    warmup_steps: int = option(3, "calls before the measured calls", least=0, cpu=1)
    steps: int = option(20, "measured calls", cpu=2)


@dataclass
class MeasuredOperator:
    """An operator with its kernel time.

    Attributes:
        operator_class: the most similar class of ``find_classes``.
        operator: the name of the operator.
        shapes: the shapes of its tensors, such as ``4096×1024 · 1024×4096``.
        precision: the precision in which the operator computes, or the precision of its tensors.
        flops: the number of floating-point operations.
        bytes: the sizes of the inputs that are read once, and of the outputs that are written once.
        us: the total kernel time of a call, µs.
    """

    operator_class: str
    operator: str
    shapes: str
    precision: str
    flops: float
    bytes: float
    us: float


@dataclass
class AttainableFigures:
    """The operators of a kind."""

    operators: list[MeasuredOperator] | None = None


TARGET = CaseTarget("profiling_targets.attainable", AttainableCase, AttainableFigures)


def _write_sentences(results: Results) -> Iterator[str]:
    yield f"Measured operators: {sum(len(row.figures.operators or ()) for row in results.rows):,}."


def _make_tables(results: Results) -> Iterator[Block]:
    """Yields the operators of each kind."""
    columns: tuple[Field[MeasuredOperator], ...] = (
        Field("class", "text", lambda operator: operator.operator_class),
        Field("precision", "text", lambda operator: operator.precision),
        Field("operator", "code", lambda operator: operator.operator),
        Field("shapes", "text", lambda operator: operator.shapes),
        Field("time µs", "us", lambda operator: operator.us),
        Field("FLOP/s", "flop/s", lambda operator: operator.flops / operator.us * _US_PER_S),
        Field("bytes/s", "bytes/s", lambda operator: operator.bytes / operator.us * _US_PER_S),
    )
    for row in results.rows:
        yield Details(f"Operators: {row.case.kind}", (make_table(columns, row.figures.operators or ()),))


BENCH = Bench(
    name="attainable",
    title="attainable times of operators",
    summary="Measures the kernel times of well-shaped operators, from which the attainable times of a GPU follow.",
    options=(
        list_option(AttainableCase, "kind", KINDS),
        *scalar_options(AttainableCase, "max_mib", "warmup_steps", "steps"),
    ),
    target=TARGET,
    conditions={
        "warm-up": "{warmup_steps} calls of each operator",
        "measured": "{steps} calls of each operator, whose largest tensor has at most {max_mib} MiB",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables,
    definitions=_DEFINITIONS,
)
