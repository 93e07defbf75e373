"""The check of measured figures against what the device can do, and of memory against what must live in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.peaks import Peaks, find_peaks
from nsys_analyzer.benches.model import Results
from nsys_analyzer.report.model import Block, Cell, Column, Listing, Paragraph, Table, Unit
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import emphasis, strong

#: What a measured figure may lie above a limit for the clock's and the ceiling's own spread.
_TOLERANCE = 1.02
#: Memory that no cache of today's devices holds.
_BEYOND_CACHES = 2**28
_UNKNOWN = "No peak is known for this device: the measured ceilings stand in, which a busy machine lowers."


@dataclass(frozen=True)
class Rate:
    """Work that was done in a time.

    Attributes:
        label: what it was.
        precision: of its products.
        flops: its FLOPs, None where they are not counted.
        bytes: the least it had to move to and from the device's memory, None where that is not counted.
        ms: the time.
        footprint_bytes: the distinct memory it touched, where that is less than what it moved: a small one stays in
            the caches, and says nothing of the memory's bandwidth.

    """

    label: str
    precision: str
    flops: float | None
    bytes: float | None
    ms: float
    footprint_bytes: float | None = None

    @property
    def memory_bytes(self) -> float | None:
        """What it moved, None where caches may have held it."""
        footprint = self.footprint_bytes or self.bytes or 0
        return self.bytes if footprint >= _BEYOND_CACHES else None


@dataclass(frozen=True)
class Residence:
    """Memory that was measured, and the sum of what must have lived in it at once, and why."""

    label: str
    measured_bytes: float
    must_live_bytes: float
    why: str


def physics(results: Results, rates: Sequence[Rate], residences: Sequence[Residence] = ()) -> tuple[Block, ...]:
    """The highest rates of each precision and the tightest memory, beside their limits, and what breaks one."""
    peaks = find_peaks(next((str(row.machine["gpu"]) for row in results.rows if row.machine.get("gpu")), None))
    blocks: list[Block] = []
    rows = [row for precision in _ordered(rates) for row in _rate_rows(results, peaks, precision, rates)]
    if rows:
        source = f"Peaks: {peaks.source}." if peaks else _UNKNOWN
        columns = (
            Column("highest rate in"), Column("of"), Column("reached"), Column("measured ceiling"), Column("peak"),
            Column("of the limit", "percent"),
        )  # fmt: skip
        measured = "The ceilings are a large product and a large copy, measured in the same run."
        caption = f"{emphasis('Physics.')} {source} {measured}"
        blocks.append(Table(columns, tuple(rows), caption))
    if residences:
        blocks.append(_residence_table(residences))
    beyond = strong("Impossible rate") if peaks else "Above the measured ceiling"
    broken = [
        *(f"{beyond}: {row[0]} is {format_number(_share(row), 'percent')} of its limit." for row in rows
          if _share(row) > _TOLERANCE),
        *(f"{strong('Impossible memory')}: {one.label} shows less than what must live ({one.why})."
          for one in residences if one.measured_bytes * _TOLERANCE < one.must_live_bytes),
    ]  # fmt: skip
    if broken:
        blocks.append(Listing(tuple(broken)))
    elif blocks:
        blocks.append(Paragraph("No figure of this bench lies beyond its limit."))
    return tuple(blocks)


def _ordered(rates: Sequence[Rate]) -> list[str]:
    return list(dict.fromkeys(rate.precision for rate in rates))


def _rate_rows(
    results: Results, peaks: Peaks | None, precision: str, rates: Sequence[Rate]
) -> Iterable[tuple[Cell, ...]]:
    """The highest FLOP/s and the highest bytes/s of one precision; of what is known of neither nothing."""
    units: tuple[tuple[Unit, dict[Rate, float | None], str, float | None], ...]
    own = [rate for rate in rates if rate.precision == precision and rate.ms > 0]
    ceiling = results.ceilings.get(precision)
    units = (
        (
            "flop/s",
            {r: r.flops for r in own},
            "product_flops_per_s",
            peaks.flops_per_s.get(precision) if peaks else None,
        ),
        ("bytes/s", {r: r.memory_bytes for r in own}, "copy_bytes_per_s", peaks.bytes_per_s if peaks else None),
    )
    for unit, work, key, peak in units:
        reached = {rate: amount / rate.ms * 1e3 for rate, amount in work.items() if amount}
        measured = ceiling.figures.get(key) if ceiling else None
        # A product that beats our large one may well be real, one that beats the silicon is not.
        limit = peak or measured
        if reached and limit:
            best = max(reached, key=lambda rate: reached[rate])
            shown = (format_number(value, unit) if value else "–" for value in (reached[best], measured, peak))
            yield best.label, precision, *shown, reached[best] / limit


def _share(row: tuple[Cell, ...]) -> float:
    share = row[-1]
    assert isinstance(share, float)
    return share


def _residence_table(residences: Sequence[Residence]) -> Table:
    columns = (
        Column("memory of"), Column("measured", "bytes"), Column("must live", "bytes"), Column("ratio", "factor"),
        Column("what must live"),
    )  # fmt: skip
    rows = tuple(
        (one.label, one.measured_bytes, one.must_live_bytes, one.measured_bytes / one.must_live_bytes, one.why)
        for one in residences
    )
    return Table(columns, rows, emphasis("Physics of memory."))
