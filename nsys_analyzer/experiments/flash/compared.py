"""Rows of the experiment ``flash`` side by side, and the roofline of each pass."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.attention_costs import roofline_ms
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.attention.core import figure, ms
from nsys_analyzer.experiments.flash.cases import TARGET, FlashRow
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.section import ratio


@dataclass(frozen=True)
class Limits:
    """Highest rates of the device in one precision, and their source."""

    flops_per_s: float
    bytes_per_s: float
    source: str

    def least_ms(self, row: FlashRow, one: str) -> float:
        """The roofline of a pass."""
        shape = row.case.shape
        both = ((shape.forward_flops, shape.forward_bytes), (shape.backward_flops, shape.backward_bytes))
        forward, backward = (roofline_ms(*work, self.flops_per_s, self.bytes_per_s) for work in both)
        return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[one]


def find_limits(results: Results, precision: str) -> Limits | None:
    """The datasheet's peaks of the GPU, else the measured ceilings; None where neither is known."""
    peaks = find_peaks(results.gpu)
    in_three = results.on_gpu and any(row.case.fp32_products == "tf32x3" for row in results.rows_of(TARGET))
    if peaks and precision == "fp32" and in_three:
        source = "the datasheet's peaks, an fp32 matmul as three in TF32"
        return Limits(peaks.flops_per_s["tf32"] / 3, peaks.bytes_per_s, source)
    if peaks and precision in peaks.flops_per_s:
        return Limits(peaks.flops_per_s[precision], peaks.bytes_per_s, "the datasheet's peaks")
    ceiling = results.ceilings.get(precision)
    matmul, copy = (figure(ceiling, name) for name in ("product_flops_per_s", "copy_bytes_per_s"))
    return Limits(matmul, copy, "the measured ceilings") if matmul and copy else None


class Compared:
    """The rows of one precision, side by side.

    Attributes:
        limits: of the device in this precision, None where they are not known.
        implementations: those that were run, ours last.
        shapes: each d_head and context length, the smallest first.
    """

    def __init__(self, results: Results, precision: str) -> None:
        self.precision, self.limits = precision, find_limits(results, precision)
        found = dict.fromkeys(row.case.implementation for row in results.rows_of(TARGET))
        self.implementations = sorted(found, key=lambda one: one == "flash")
        rows = [row for row in results.rows_of(TARGET) if row.case.precision == precision]
        self.rows = sorted(rows, key=lambda row: row.case.context_length)
        self.shapes = sorted({(row.case.d_head, row.case.context_length) for row in rows})
        self._rows = {(row.case.implementation, row.case.d_head, row.case.context_length): row for row in rows}

    def of(self, implementation: str) -> list[FlashRow]:
        """The rows of an implementation, the shortest context first."""
        return [row for row in self.rows if row.case.implementation == implementation]

    def find(self, implementation: str, d: int, length: int) -> FlashRow | None:
        """The row of a shape."""
        return self._rows.get((implementation, d, length))

    def over_peer(self, row: FlashRow, one: str, peer: str | None = None) -> float | None:
        """A row's time ÷ that of another implementation of its shape, by default the fastest; None without one."""
        peers = [peer] if peer else [name for name in self.implementations if name != row.case.implementation]
        others = [self.find(name, row.case.d_head, row.case.context_length) for name in peers]
        times = [time for other in others if (time := ms(other, one))]
        return ratio(ms(row, one), min(times, default=None))

    def of_roofline(self, row: FlashRow, one: str) -> float | None:
        """The share of the roofline that a pass reaches; None where either is not known."""
        return ratio(self.limits.least_ms(row, one), ms(row, one)) if self.limits else None
