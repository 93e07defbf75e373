"""What the experiments on attention share: rows side by side, curves, and the work of unfused attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.limits import Rate
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.report.model import Lines, Spread

R = TypeVar("R", bound=AnyRow)

#: Said of a rate whose FLOPs are those of three matmuls in TF32, so that TF32's peak limits it.
THREE_MATMULS = "fp32 as 3xTF32, all three counted"


def figure(row: AnyRow | None, name: str) -> Any:
    """A figure of a row; None where either is missing."""
    return getattr(row.figures, name) if row else None


def ms(row: AnyRow | None, name: str) -> float | None:
    """The time of a pass; None where it was not measured."""
    times = figure(row, name)
    return times.ms if times else None


def spread(row: AnyRow | None, name: str) -> Spread | None:
    """The mean time of a pass with its standard deviation; None where it was not measured."""
    mean = ms(row, name)
    return None if mean is None else Spread(mean, figure(row, name).std_ms)


def quotient(above: float | None, below: float | None) -> float | None:
    """The one ÷ the other; None where one of them is missing."""
    return above / below if above and below else None


def same_status(words: dict[str, str]) -> str:
    """How several ended, in one word where they ended alike."""
    one, *others = dict.fromkeys(words.values())
    return ", ".join(f"{name} {status}" for name, status in words.items()) if others else one


def span(values: Sequence[float], pattern: str) -> str:
    """The least and the largest value, as one where they are written alike."""
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} to {high}"


def curves(
    key: str, title: str, points: Mapping[str, Iterable[tuple[float, float | None]]], y_axis: str, scale: int = 1
) -> Iterator[Lines]:
    """Values ÷ ``scale`` over the context length, a curve for each name that has two of them at the least."""
    known = {name: sorted((x, y / scale) for x, y in values if y is not None) for name, values in points.items()}
    if series := tuple((name, tuple(values)) for name, values in known.items() if len(values) > 1):
        yield Lines(key, title, series, "context length, tokens", y_axis, log_x=True, log_y=True)


def largest(rows: Iterable[R], size: Callable[[R], float | None], most: int) -> list[tuple[R, float]]:
    """The rows of the largest sizes, where what must be in memory counts the most, and these sizes."""
    known = [(row, found) for row in rows if (found := size(row)) is not None]
    return sorted(known, key=lambda one: -one[1])[:most]


def unfused_rates(row: AnyRow, label: str, passes: int) -> Iterator[Rate]:
    """The work of unfused attention: all scores, masked ones too, with two matmuls forward and four backward.

    Args:
        row: its row.
        label: what it was, with a place for the name of the pass.
        passes: how often forward reads or writes all scores in memory; 0 where that is not known.
    """
    shape: AttentionShape = row.case.shape
    flops, square = 4 * shape.d_head * shape.square, shape.square_bytes
    if (forward := ms(row, "forward")) is not None:
        yield Rate(label.format("forward"), shape.precision, flops, passes * square or None, forward, 2 * square)
    if (backward := ms(row, "backward")) is not None:
        yield Rate(label.format("backward"), shape.precision, 2 * flops, None, backward)


def fused_rates(row: AnyRow, label: str, passes: Mapping[str, str], *, in_three: bool) -> Iterator[Rate]:
    """The work that no attention can avoid: the visible scores, each tensor moved once.

    Args:
        row: its row.
        label: what it was, with a place for the name of the pass.
        passes: figures of the row, with their names; of ``backward`` five matmuls count, of ``forward_backward`` six.
        in_three: whether each matmul of fp32 is made of three in TF32.
    """
    shape: AttentionShape = row.case.shape
    work = {
        "forward": (shape.forward_flops, shape.forward_bytes),
        "backward": (shape.backward_flops, shape.backward_bytes),
        "forward_backward": (3 * shape.forward_flops, None),
    }
    precision, times, suffix = ("tf32", 3, f", {THREE_MATMULS}") if in_three else (shape.precision, 1, "")
    for one, words in passes.items():
        if (time := ms(row, one)) is not None:
            flops, moved = work[one]
            yield Rate(label.format(words) + suffix, precision, times * flops, moved, time)
