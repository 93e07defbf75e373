"""The section of an experiment: its parts in order, the sentences and figures that experiments have in common, limits.

The roofline check holds what was measured against the ceilings of the device, a large matmul and a large copy that are
measured before every experiment, and against the peaks of data sheets; measured memory against a lower bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.model import Results, option
from nsys_analyzer.report.model import Bars, Block, Details, Lines, Listing, Paragraph, Section, Spread, Unit
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.runs.rows import CaseTarget
from nsys_analyzer.text import Words, emphasis, joined, phrase, strong

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.experiments.model import AnyRow, Results, Settings
    from nsys_analyzer.runs.rows import Times

_ENDINGS = {"oom": "Out of memory", "timeout": "Out of time", "failed": "Failed", "unsupported": "Not supported here"}
_MOST_NAMED = 4
#: Letters of a message that a table has room for; the file of rows has all of them.
_MESSAGE_LENGTH = 160
#: PyTorch finds nothing that an earlier run compiled.
_NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
#: The standard deviation ÷ mean above which a mean says little.
UNSTEADY = 0.1


def section(
    name: str, title: str, results: Results, rows: Sequence[AnyRow], row_name: Callable[[Any], str], *,
    answers: Iterable[Words], warmup: str, measured: str, synchronized: str, gradients: str, blocks: Iterable[Block],
    definitions: Words, warnings: Iterable[Words] = (), rates: Iterable[Rate] = (),
    memory: Iterable[tuple[Hashable, MinimumMemory]] = (),
) -> Section:  # fmt: skip
    """Returns the section of an experiment.

    Args:
        name, title, results: the experiment's.
        rows: those of which it lists what was not measured, each by its ``row_name``.
        answers: sentences with its figures.
        warmup, measured, synchronized, gradients: the conditions, such as "5 steps", "10 steps", "at the end of each
            phase", "off (no_grad)".
        blocks: tables and figures; definitions say what their columns mean.
        warnings: what makes a figure suspect, a line each.
        rates, memory: what the roofline check compares with limits.
    """
    suspect = (*precision_warnings(results), *warnings)
    how = {"warm-up": warmup, "measured": measured, "synchronized": synchronized, "gradients": gradients}
    every: tuple[Block, ...] = (
        Paragraph(joined(" ", answers)),
        conditions(results, how),
        *([Listing(suspect)] if suspect else []),
        *blocks,
        *messages(rows, row_name),
        *check_limits(results, rates, memory),
        Paragraph(definitions),
    )
    return Section(f"bench-{name}", f"Bench: {title}", every)


def conditions(results: Results, how: Mapping[str, str]) -> Paragraph:
    """Says the device, versions, the precision that matmuls really had, and how it was timed."""
    found = [(row.case.precision, row.figures.product_bits) for row in results.ceilings.values()]
    machine = next((row.machine for row in (*results.rows, *results.ceilings.values()) if row.machine), {})
    device = machine.get("gpu") or f"CPU, {machine.get('threads', '?')} threads"
    parts = {
        "Device": f"{device}, PyTorch {machine.get('torch', '?')}, Python {machine.get('python', '?')}",
        "matmuls, as measured": ", ".join(f"{asked} ran as {precision_title(bits)}" for asked, bits in found if bits),
        **how,
    }
    text = "; ".join(f"{name}: {part}" for name, part in parts.items() if part)
    return Paragraph(emphasis("Conditions.") + f" {text}.")


def precision_warnings(results: Results) -> Iterator[Words]:
    """Yields a line for each precision whose matmuls ran as another one."""
    for row in results.ceilings.values():
        asked, bits = row.case.precision, row.figures.product_bits
        if asked == "fp32" and bits is not None and bits < MANTISSA_BITS["fp32"]:
            yield phrase(
                "**Matmuls called fp32 ran as {}**: a speed-up over them understates, and their error is TF32's. "
                "Look for NVIDIA_TF32_OVERRIDE and torch.backends.cuda.matmul settings.",
                precision_title(bits),
            )
        if asked == "tf32" and bits == MANTISSA_BITS["fp32"]:
            yield phrase("**Matmuls called tf32 ran as fp32**: this device has no TF32, or a setting forbids it.")


def unsteady(what: str, variations: Mapping[str, float]) -> Iterator[Words]:
    """Yields a line for those whose coefficient of variation is above ``UNSTEADY``."""
    far = {name: value for name, value in variations.items() if value > UNSTEADY}
    if far:
        which = named(f"{name}: {percent(value)}" for name, value in far.items())
        yield phrase(
            "**Unsteady {}**, CV above {}: {}. Short passes vary more; a busy machine adds to it.",
            what,
            percent(UNSTEADY),
            which,
        )


def named(names: Iterable[str]) -> str:
    """Returns the names for a sentence, of many the first, and how many more there are."""
    every = list(names)
    more = f"; {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return "; ".join(every[:_MOST_NAMED]) + more


def span(values: Iterable[float], unit: Unit) -> str:
    """Returns the least and the largest value, for a sentence: ``1.2× to 3.4×``, or one of two that read alike."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(format_number(value, unit) for value in (known[0], known[-1])))


def extremes(values: Iterable[tuple[float, str]], write: Callable[[float], str]) -> str:
    """Returns the least and the largest value with their names, for a sentence: ``1.2× (small) to 3.4× (large)``."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(f"{write(value)} ({name})" for value, name in (known[0], known[-1])))


def each(rows: Iterable[AnyRow], option: str) -> str:
    """Returns the values that an option has in the rows, for a sentence."""
    values = dict.fromkeys(getattr(row.case, option) for row in rows)
    return ", ".join(f"{value:,}" if type(value) is int else str(value) for value in values)


def no_cache(settings: Settings) -> dict[str, str]:
    """Returns the environment of compiled cases; on a CPU the cache stays in use, as the C++ compiler needs seconds."""
    return _NO_CACHE if settings.device == "cuda" else {}


def compile_cache(rows: Iterable[AnyRow]) -> str:
    """Returns whether compiled code may come from a cache, for the conditions; empty where nothing was compiled."""
    environments = [row.environment for row in rows if row.case.compile]
    if not environments:
        return ""
    cold = all(environment == _NO_CACHE for environment in environments)
    return "; compiled anew, without a cache" if cold else "; compiled code may come from PyTorch's cache"


def ratio(over: float | None, under: float | None) -> float | None:
    """Returns the one ÷ the other; None where either is missing or 0."""
    return over / under if over and under else None


def formatted(value: float | None, spec: str) -> str | None:
    """Returns a figure as text, such as ``.1e`` makes; None where it is missing."""
    return None if value is None else format(value, spec)


def factor(value: float) -> str:
    """Returns a ratio, for a sentence."""
    return format_number(value, "factor")


def figure(row: AnyRow | None, name: str) -> Any:
    """Returns a figure of a row; None where either is missing."""
    return getattr(row.figures, name) if row else None


def mean_ms(row: AnyRow | None, name: str) -> float | None:
    """Returns the time of a pass; None where it was not measured."""
    times = figure(row, name)
    return times.ms if times else None


def fitted_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the exponent p of y = c · xᵖ that fits positive points best, by least squares of log y over log x.

    None below two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def spread(times: Times | None) -> Spread | None:
    """Returns mean and standard deviation, for a cell; None of a pass that was not timed."""
    return Spread(times.ms, times.std_ms) if times and times.ms is not None else None


def bars(
    key: str, title: str, values: Mapping[tuple[str, str], float | None], axis: str,
    kind: Literal["grouped", "stacked"] = "grouped",
) -> Iterator[Bars]:  # fmt: skip
    """Yields a bar chart of values by group and series; nothing where no value is known."""
    groups = tuple(dict.fromkeys(group for group, _ in values))
    names = dict.fromkeys(name for (_, name), value in values.items() if value is not None)
    series = tuple((name, tuple(values.get((group, name)) for group in groups)) for name in names)
    if series:
        yield Bars(key, title, groups, series, axis, kind)


def curves(
    key: str, title: str, points: Mapping[str, Iterable[tuple[float, float | None]]], y_axis: str
) -> Iterator[Lines]:
    """Yields values over the context length: a curve for each name that has two of them at least."""
    known = {name: sorted((x, y) for x, y in values if y is not None) for name, values in points.items()}
    if series := tuple((name, tuple(values)) for name, values in known.items() if len(values) > 1):
        yield Lines(key, title, series, "context length, tokens", y_axis, log_x=True, log_y=True)


def endings(rows: Sequence[AnyRow], name: Callable[[AnyRow], str], all_well: str = "") -> Iterator[str]:
    """Yields a sentence for each status that is not ok, with the rows that ended so, or ``all_well`` without any."""
    for status, word in _ENDINGS.items():
        if ended := [name(row) for row in rows if row.status == status]:
            yield f"{word}: {named(ended)}."
    if all_well and rows and all(row.ok for row in rows):
        yield all_well


def messages(rows: Sequence[AnyRow] | Sequence[CaptureSummary], name: Callable[[Any], str]) -> Iterator[Block]:
    """Yields why rows or captures are not ok, folded away."""

    def shortened(row: AnyRow) -> str:
        return row.message if len(row.message) <= _MESSAGE_LENGTH else f"{row.message[:_MESSAGE_LENGTH]}…"

    if lacking := [row for row in rows if row.status != "ok"]:
        fields: tuple[Field[Any], ...] = (
            Field("what", "text", name),
            Field("status", "text", lambda row: row.status),
            Field("message", "text", shortened),
        )
        yield Details(f"What was not measured, and why: {len(lacking)} rows", (table(fields, lacking),))


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
