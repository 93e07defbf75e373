"""Helpers of the three experiments on attention: figures of rows, curves, and the FLOPs and bytes of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.limits import Rate
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.report.model import Lines


def figure(row: AnyRow | None, name: str) -> Any:
    """A figure of a row; None where either is missing."""
    return getattr(row.figures, name) if row else None


def ms(row: AnyRow | None, name: str) -> float | None:
    """The time of a pass; None where it was not measured."""
    times = figure(row, name)
    return times.ms if times else None


def drawn_width(widths: Iterable[int]) -> int:
    """The width of heads that figures show: 64, or the largest."""
    known = set(widths)
    return 64 if 64 in known else max(known)


def curves(
    key: str, title: str, points: Mapping[str, Iterable[tuple[float, float | None]]], y_axis: str
) -> Iterator[Lines]:
    """Values over the context length: a curve for each name that has two of them at least."""
    known = {name: sorted((x, y) for x, y in values if y is not None) for name, values in points.items()}
    if series := tuple((name, tuple(values)) for name, values in known.items() if len(values) > 1):
        yield Lines(key, title, series, "context length, tokens", y_axis, log_x=True, log_y=True)


def mib(size: float | None) -> float | None:
    """Bytes in MiB."""
    return None if size is None else size / 2**20


def unfused_rates(row: AnyRow, label: str, passes: int) -> Iterator[Rate]:
    """Work of naive attention: all scores, masked ones too, with two matmuls forward and four backward.

    ``passes`` is how often forward reads or writes all scores in memory, 0 where that is not known.
    """
    shape: AttentionShape = row.case.shape
    flops, square = 4 * shape.d_head * shape.square, shape.square_bytes
    if (forward := ms(row, "forward")) is not None:
        yield Rate(label.format("forward"), shape.precision, flops, passes * square or None, forward, 2 * square)
    if (backward := ms(row, "backward")) is not None:
        yield Rate(label.format("backward"), shape.precision, 2 * flops, None, backward)


def fused_rates(row: AnyRow, label: str, passes: Mapping[str, str], *, in_three: bool) -> Iterator[Rate]:
    """Least work of any attention: the visible scores, and each tensor moved once.

    ``passes`` are figures of the row, with their names for the ``label``. With ``in_three`` each fp32 matmul is made of
    three in TF32: all of them count, against TF32's peak.
    """
    shape: AttentionShape = row.case.shape
    work = {
        "forward": (shape.forward_flops, shape.forward_bytes),
        "backward": (shape.backward_flops, shape.backward_bytes),
        "forward_backward": (3 * shape.forward_flops, None),
    }
    precision, matmuls, suffix = (
        ("tf32", 3, ", fp32 as 3xTF32, all three counted") if in_three else (shape.precision, 1, "")
    )
    for one, words in passes.items():
        if (time := ms(row, one)) is not None:
            flops, moved = work[one]
            yield Rate(label.format(words) + suffix, precision, matmuls * flops, moved, time)
