"""The limits of a device, and the roofline check of what was measured against them.

The ceilings are a large matmul and a large copy, measured before every experiment; the peaks are those of data sheets.
Measured memory is held against a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.model import Results, option
from nsys_analyzer.report.model import Block, Listing, Paragraph, Unit
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.runs.rows import CaseTarget
from nsys_analyzer.text import Words, emphasis, phrase, strong


@dataclass(frozen=True)
class CeilingsCase:
    """The ceilings in one precision."""

    device: str
    precision: str = option("fp32", "of the matmul", ("fp32", "tf32", "bf16"))


@dataclass
class CeilingsFigures:
    """The best rates of a matmul of square matrices and of a copy of a large tensor.

    Attributes:
        product_bits: bits of the mantissa that matmuls keep of their operands: the precision that they really have.
        product_side: rows and columns of the matrices.
        copy_bytes_per_s: bytes read and written.
    """

    product_bits: int | None = None
    product_side: int | None = None
    product_flops_per_s: float | None = None
    copied_bytes: int | None = None
    copy_bytes_per_s: float | None = None


TARGET = CaseTarget("profiling_targets.ceilings", CeilingsCase, CeilingsFigures)

#: Bits of the mantissa, without the hidden one, that matmuls keep of their operands in each precision.
MANTISSA_BITS = {"fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7}
#: The precision of matmuls of fp32 or bf16 tensors by the bits that they keep; of these, 10 bits are TF32's.
_PRECISION_BY_BITS = {bits: precision for precision, bits in MANTISSA_BITS.items() if precision != "fp16"}
_TITLES = {"fp32": "fp32", "tf32": "TF32 (10 bits of mantissa)", "bf16": "bf16 (7 bits of mantissa)"}


def precision_found(bits: int | None, asked: str) -> str:
    """Returns the precision of matmuls that keep so many bits; the one asked for where they were not counted."""
    return _PRECISION_BY_BITS.get(bits or 0, asked)


def precision_title(bits: int) -> str:
    """Returns the precision of matmuls of fp32 or bf16 tensors that keep so many bits, for a sentence."""
    return _TITLES.get(precision_found(bits, ""), f"{bits} bits")


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
        """Returns a rate with its unit: the column holds two of them."""
        return format_number(value, self.unit) if value else None


def check_limits(
    results: Results, rates: Iterable[Rate], memory: Iterable[tuple[Hashable, MinimumMemory]] = ()
) -> tuple[Block, ...]:
    """Returns the highest rates of each precision and the tightest memory of each kind, beside their limits."""
    peaks = find_peaks(results.gpu)
    blocks: list[Block] = []
    highest = list(_highest_rates(results, tuple(rates)))
    if highest:
        source = f"Peaks: {peaks.source}." if peaks else _UNKNOWN
        measured = "The ceilings are a large matmul and a large copy, measured in the same run."
        blocks.append(table(_RATES, highest, phrase("*Roofline check.* {} {}", source, measured), names=2))
    tightest: dict[Hashable, MinimumMemory] = {}
    for kind, minimum in memory:
        tightest[kind] = min(tightest.get(kind, minimum), minimum, key=lambda known: known.ratio)
    if tightest:
        blocks.append(table(_MEMORY, tightest.values(), emphasis("Minimum memory.")))
    beyond = strong("Impossible rate") if peaks else "Above the measured ceiling"
    broken: list[Words] = [
        phrase("{}: {} is {} of its limit.", beyond, rate.label, percent(rate.share))
        for rate in highest
        if rate.share > _TOLERANCE
    ]
    broken += [
        phrase("**Impossible memory**: {} shows less than its minimum ({}).", minimum.label, minimum.parts)
        for minimum in tightest.values()
        if minimum.ratio * _TOLERANCE < 1
    ]
    if broken:
        blocks.append(Listing(tuple(broken)))
    elif blocks:
        blocks.append(Paragraph("No figure of this bench lies beyond its limit."))
    return tuple(blocks)


def _highest_rates(results: Results, rates: tuple[Rate, ...]) -> Iterator[_Highest]:
    """Yields the highest FLOP/s and the highest bytes/s of each precision that have a limit."""
    peaks = find_peaks(results.gpu)
    for precision in dict.fromkeys(rate.precision for rate in rates):
        timed = [rate for rate in rates if rate.precision == precision and rate.ms > 0]
        row = results.ceilings.get(precision)
        ceilings: CeilingsFigures = row.figures if row else CeilingsFigures()
        flops = [(rate.flops / rate.ms * 1e3, rate.label) for rate in timed if rate.flops]
        moved = [(rate.memory_bytes / rate.ms * 1e3, rate.label) for rate in timed if rate.memory_bytes]
        flop_peak, byte_peak = (peaks.flops_per_s.get(precision), peaks.bytes_per_s) if peaks else (None, None)
        reached: tuple[tuple[Unit, list[tuple[float, str]], float | None, float | None], ...] = (
            ("flop/s", flops, ceilings.product_flops_per_s, flop_peak),
            ("bytes/s", moved, ceilings.copy_bytes_per_s, byte_peak),
        )
        for unit, values, ceiling, peak in reached:
            if values and (peak or ceiling):
                rate, label = max(values)
                yield _Highest(label, precision, unit, rate, ceiling, peak)


_RATES: tuple[Field[_Highest], ...] = (
    Field("highest rate in", "text", lambda rate: rate.label),
    Field("precision", "text", lambda rate: rate.precision),
    Field("reached", "text", lambda rate: rate.written(rate.rate)),
    Field("measured ceiling", "text", lambda rate: rate.written(rate.ceiling)),
    Field("peak", "text", lambda rate: rate.written(rate.peak)),
    Field("of the limit", "percent", lambda rate: rate.share),
)
_MEMORY: tuple[Field[MinimumMemory], ...] = (
    Field("memory of", "text", lambda minimum: minimum.label),
    Field("measured", "bytes", lambda minimum: minimum.measured_bytes),
    Field("minimum", "bytes", lambda minimum: minimum.least_bytes),
    Field("ratio", "factor", lambda minimum: minimum.ratio),
    Field("what the minimum holds", "text", lambda minimum: minimum.parts),
)
