"""Defines the experiment ``attainable``: kernel times of well-shaped operators, for the table of attainable times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, list_option, option, scalar_options
from nsys_analyzer.inputs.rows import CaseTarget
from nsys_analyzer.report.model import Block, Details, Field, Table, make_table
from nsys_analyzer.report.units import format_number, format_percent
from nsys_analyzer.text import StrOrText, phrase

#: The kinds of operators that are measured.
KINDS = (
    "matmul", "attention", "convolution", "elementwise", "copy", "norm", "softmax", "reduction", "embedding",
    "cross entropy", "optimizer",
)  # fmt: skip
_US_PER_S = 1e6
_DEFINITIONS = phrase(
    "*Time* is the total kernel time of an operator: the mean of successive calls with the same tensors, from "
    "PyTorch's profiler. Data that fit into the L2 cache are therefore read from it. On a CPU, the time is that of "
    "the operators. *FLOPs* and *bytes* follow from the shapes: inputs are read once, and outputs are written once. "
    "*Of the peak* is the rate ÷ the peak in the data sheet. For matmul, attention and convolution this is the larger "
    "share of FLOP/s and bytes/s. `docs/make_attainable_times.py` writes the table of attainable times from these "
    "rows."
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


def compute_flops_per_s(operator: MeasuredOperator) -> float:
    """Returns the FLOP/s of an operator."""
    return operator.flops / operator.us * _US_PER_S


def compute_bytes_per_s(operator: MeasuredOperator) -> float:
    """Returns the bytes/s of an operator."""
    return operator.bytes / operator.us * _US_PER_S


def compute_share_of_peak(row: AnyRow, operator: MeasuredOperator) -> float | None:
    """Returns the rate of an operator ÷ the peak that limits it, or None if the peaks are unknown."""
    peaks = find_peaks(str(row.machine.get("gpu")))
    if peaks is None:
        return None
    share = compute_bytes_per_s(operator) / peaks.bytes_per_s
    peak = peaks.flops_per_s.get(operator.precision) if _has_arithmetic(row) else None
    return max(share, compute_flops_per_s(operator) / peak) if peak else share


def _has_arithmetic(row: AnyRow) -> bool:
    """Returns whether arithmetic may limit the operators of a row."""
    from nsys_analyzer.analysis.operators.attainable import COMPUTE_KINDS

    return row.case.kind in COMPUTE_KINDS


def find_largest_operators(row: AnyRow) -> list[MeasuredOperator]:
    """Returns the operator with the most work of each class and precision. It does not fit into the L2 cache."""
    largest: dict[tuple[str, str], MeasuredOperator] = {}
    for operator in sorted(row.figures.operators or (), key=lambda operator: (operator.flops, operator.bytes)):
        largest[operator.operator_class, operator.precision] = operator
    return [*largest.values()]


def _write_sentences(results: Results) -> Iterator[StrOrText]:
    """Yields the rates of the largest matmuls, and of the largest elementwise operator and copy."""
    rates = [
        f"{operator.operator_class} in {operator.precision} {_format_rate(row, operator)}"
        for row in results.rows
        if row.case.kind in ("matmul", "elementwise", "copy")
        for operator in find_largest_operators(row)
    ]
    if rates:
        yield f"Rates of the largest operators: {'; '.join(rates)}."


def _format_rate(row: AnyRow, operator: MeasuredOperator) -> str:
    share, has_arithmetic = compute_share_of_peak(row, operator), _has_arithmetic(row)
    rate = compute_flops_per_s(operator) if has_arithmetic else compute_bytes_per_s(operator)
    text = format_number(rate, "flop/s" if has_arithmetic else "bytes/s")
    return text if share is None else f"{text} ({format_percent(share)} of the peak)"


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    operators = [(row, operator) for row in results.rows for operator in find_largest_operators(row)]
    yield _make_table("The largest operator of each class and precision:", operators)
    for row in results.rows:
        if row.figures.operators:
            operators = [(row, operator) for operator in row.figures.operators]
            yield Details(f"All operators: {row.case.kind}", (_make_table("", operators),))


def _make_table(caption: str, operators: list[tuple[AnyRow, MeasuredOperator]]) -> Table:
    columns: tuple[Field[tuple[AnyRow, MeasuredOperator]], ...] = (
        Field("class", "text", lambda line: line[1].operator_class),
        Field("precision", "text", lambda line: line[1].precision),
        Field("operator", "code", lambda line: line[1].operator),
        Field("shapes", "text", lambda line: line[1].shapes),
        Field("FLOPs", "flop", lambda line: line[1].flops),
        Field("bytes", "bytes", lambda line: line[1].bytes),
        Field("time µs", "us", lambda line: line[1].us),
        Field("FLOP/s", "flop/s", lambda line: compute_flops_per_s(line[1])),
        Field("bytes/s", "bytes/s", lambda line: compute_bytes_per_s(line[1])),
        Field("of the peak", "percent", lambda line: compute_share_of_peak(*line)),
    )
    return make_table(columns, operators, caption)


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
        "synchronized": "after all calls of an operator",
        "gradients": "backward operators compute the gradients of all inputs",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
