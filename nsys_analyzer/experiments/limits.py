"""The roofline check: measured rates against the hardware's limits, and measured memory against a lower bound."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.peaks import Peaks, find_peaks
from nsys_analyzer.experiments.ceilings import CeilingsFigures
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.report.model import Block, Listing, Paragraph, Unit
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import Words, emphasis, phrase, strong

#: How far a figure may lie above a limit, for the spread of the clock and of the ceiling.
_TOLERANCE = 1.02
#: Memory that no cache of today's devices holds.
_BEYOND_CACHES = 2**28
_UNKNOWN = "No peak is known for this device: the measured ceilings stand in, which a busy machine lowers."


@dataclass(frozen=True)
class Rate:
    """Work that was done in a time.

    Attributes:
        label: what it was.
        precision: of its matmuls.
        flops: None where they are not counted.
        bytes: the least that it moves to and from the device's memory, None where that is not counted.
        footprint_bytes: the distinct memory that it touches, where that is less than what it moves.
    """

    label: str
    precision: str
    flops: float | None
    bytes: float | None
    ms: float
    footprint_bytes: float | None = None

    @property
    def memory_bytes(self) -> float | None:
        """The bytes, None where caches may have held them: then they say nothing of the memory's bandwidth."""
        footprint = self.footprint_bytes or self.bytes or 0
        return self.bytes if footprint >= _BEYOND_CACHES else None


@dataclass(frozen=True)
class MinimumMemory:
    """Memory that was measured, and a lower bound: the sum of the parts that are allocated at the same time."""

    label: str
    measured_bytes: float
    least_bytes: float
    parts: str

    @property
    def ratio(self) -> float:
        """Measured memory ÷ the lower bound."""
        return self.measured_bytes / self.least_bytes


@dataclass(frozen=True)
class _Highest:
    """The highest rate of one precision, beside the measured ceiling and the data sheet's peak where they are known."""

    label: str
    precision: str
    unit: Unit
    rate: float
    ceiling: float | None
    peak: float | None

    @property
    def share(self) -> float:
        """Share of the limit: a matmul that beats our large one may be real, one that beats the silicon is not."""
        return self.rate / (self.peak or self.ceiling or math.inf)

    def written(self, value: float | None) -> str | None:
        """A rate with its unit: the column holds two of them."""
        return format_number(value, self.unit) if value else None


def check_limits(
    results: Results, rates: Iterable[Rate], memory: Iterable[tuple[Hashable, MinimumMemory]] = ()
) -> tuple[Block, ...]:
    """The highest rates of each precision and the tightest memory of each kind, beside their limits."""
    peaks = find_peaks(results.gpu)
    blocks: list[Block] = []
    highest = list(_highest_rates(results, peaks, tuple(rates)))
    if highest:
        source = f"Peaks: {peaks.source}." if peaks else _UNKNOWN
        measured = "The ceilings are a large matmul and a large copy, measured in the same run."
        blocks.append(table(_RATES, highest, phrase("*Roofline check.* {} {}", source, measured), names=2))
    tightest: dict[Hashable, MinimumMemory] = {}
    for kind, one in memory:
        tightest[kind] = min(tightest.get(kind, one), one, key=lambda known: known.ratio)
    if tightest:
        blocks.append(table(_MEMORY, tightest.values(), emphasis("Minimum memory.")))
    beyond = strong("Impossible rate") if peaks else "Above the measured ceiling"
    broken: list[Words] = [
        phrase("{}: {} is {} of its limit.", beyond, one.label, percent(one.share))
        for one in highest
        if one.share > _TOLERANCE
    ]
    broken += [
        phrase("**Impossible memory**: {} shows less than its minimum ({}).", one.label, one.parts)
        for one in tightest.values()
        if one.ratio * _TOLERANCE < 1
    ]
    if broken:
        blocks.append(Listing(tuple(broken)))
    elif blocks:
        blocks.append(Paragraph("No figure of this bench lies beyond its limit."))
    return tuple(blocks)


def _highest_rates(results: Results, peaks: Peaks | None, rates: Sequence[Rate]) -> Iterator[_Highest]:
    """The highest FLOP/s and the highest bytes/s of each precision that have a limit."""
    for precision in dict.fromkeys(rate.precision for rate in rates):
        timed = [rate for rate in rates if rate.precision == precision and rate.ms > 0]
        row = results.ceilings.get(precision)
        ceilings = row.figures if row else CeilingsFigures()
        flop_peak, byte_peak = (peaks.flops_per_s.get(precision), peaks.bytes_per_s) if peaks else (None, None)
        flops = [(rate.flops / rate.ms * 1e3, rate.label) for rate in timed if rate.flops]
        moved = [(rate.memory_bytes / rate.ms * 1e3, rate.label) for rate in timed if rate.memory_bytes]
        if flops and (flop_peak or ceilings.product_flops_per_s):
            highest, label = max(flops)
            yield _Highest(label, precision, "flop/s", highest, ceilings.product_flops_per_s, flop_peak)
        if moved and (byte_peak or ceilings.copy_bytes_per_s):
            highest, label = max(moved)
            yield _Highest(label, precision, "bytes/s", highest, ceilings.copy_bytes_per_s, byte_peak)


_RATES: tuple[Field[_Highest], ...] = (
    Field("highest rate in", "text", lambda one: one.label),
    Field("precision", "text", lambda one: one.precision),
    Field("reached", "text", lambda one: one.written(one.rate)),
    Field("measured ceiling", "text", lambda one: one.written(one.ceiling)),
    Field("peak", "text", lambda one: one.written(one.peak)),
    Field("of the limit", "percent", lambda one: one.share),
)
_MEMORY: tuple[Field[MinimumMemory], ...] = (
    Field("memory of", "text", lambda one: one.label),
    Field("measured", "bytes", lambda one: one.measured_bytes),
    Field("minimum", "bytes", lambda one: one.least_bytes),
    Field("ratio", "factor", lambda one: one.ratio),
    Field("what the minimum holds", "text", lambda one: one.parts),
)
