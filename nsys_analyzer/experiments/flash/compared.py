"""The rows of the experiment ``flash`` side by side, and what the device can do at best."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from nsys_analyzer.analysis.transformer.attention_costs import roofline_ms
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.attention.core import figure, ms, quotient
from nsys_analyzer.experiments.flash.cases import TARGET, FlashRow
from nsys_analyzer.experiments.model import Results

#: What a time may be above the least of those at shorter contexts, and still count as not grown.
_FLAT = 1.1


@dataclass(frozen=True)
class Limits:
    """What the device can do in one precision, and who says so."""

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
        source = "the datasheet's peaks, a matmul in fp32 as three in TF32"
        return Limits(peaks.flops_per_s["tf32"] / 3, peaks.bytes_per_s, source)
    if peaks and precision in peaks.flops_per_s:
        return Limits(peaks.flops_per_s[precision], peaks.bytes_per_s, "the datasheet's peaks")
    ceiling = results.ceilings.get(precision)
    matmul, copy = (figure(ceiling, name) for name in ("product_flops_per_s", "copy_bytes_per_s"))
    return Limits(matmul, copy, "the measured ceilings") if matmul and copy else None


class Compared:
    """The rows of one precision, side by side.

    Attributes:
        precision: of the tensors and matmuls.
        limits: what the device can do in it, None where that is not known.
        implementations: those that were run, ours last.
        widths, lengths: each d_head and each context length, the smallest first.
    """

    def __init__(self, results: Results, precision: str) -> None:
        self.precision, self.limits = precision, find_limits(results, precision)
        self.rows = [row for row in results.rows_of(TARGET) if row.case.precision == precision]
        found = dict.fromkeys(row.case.implementation for row in results.rows_of(TARGET))
        self.implementations = sorted(found, key=lambda one: one == "flash")
        self.widths = sorted({row.case.d_head for row in self.rows})
        self.lengths = sorted({row.case.context_length for row in self.rows})
        self._rows = {(row.case.implementation, row.case.d_head, row.case.context_length): row for row in self.rows}

    def of(self, implementation: str, d: int | None = None) -> list[FlashRow]:
        """The rows of an implementation, of one d_head or all, the shortest context first."""
        own = [row for row in self.rows if row.case.implementation == implementation and d in (None, row.case.d_head)]
        return sorted(own, key=lambda row: row.case.context_length)

    def find(self, implementation: str, d: int, length: int) -> FlashRow | None:
        """The row of a shape."""
        return self._rows.get((implementation, d, length))

    def over_peer(self, row: FlashRow, one: str, peer: str | None = None) -> float | None:
        """A row's time ÷ that of another implementation of its shape, by default the fastest; None without one."""
        peers = [peer] if peer else [name for name in self.implementations if name != row.case.implementation]
        others = [self.find(name, row.case.d_head, row.case.context_length) for name in peers]
        times = [time for other in others if (time := ms(other, one))]
        return quotient(ms(row, one), min(times, default=None))

    def of_roofline(self, row: FlashRow, one: str) -> float | None:
        """What a pass reaches of the roofline; None where either is not known."""
        return quotient(self.limits.least_ms(row, one), ms(row, one)) if self.limits else None

    def flat_until(self, implementation: str) -> dict[int, int]:
        """By d_head the longest context at which a pass end to end takes as long as at shorter ones, if there is one.

        As long: within 10 % of the least time up to there. As long as the work does not show in the time, the time is
        a fixed cost of each call.
        """
        found = {}
        for d in self.widths:
            times = [
                (row.case.context_length, time) for row in self.of(implementation, d) if (time := ms(row, "end_to_end"))
            ]
            least = accumulate((time for _, time in times), min)
            flat = [length for (length, time), low in zip(times, least, strict=True) if time <= _FLAT * low]
            if len(flat) > 1:
                found[d] = flat[-1]
        return found
