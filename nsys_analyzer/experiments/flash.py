"""FlashAttention-2 in Triton against unfused attention and PyTorch's own: latency, memory, share of the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.peaks import find_peaks, roofline_ms
from nsys_analyzer.experiments.attention import WithHeads, drawn_width, fused_rates, unfused_rates
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, option, several, single
from nsys_analyzer.experiments.section import (
    MinimumMemory,
    Rate,
    curves,
    endings,
    figure,
    mean_ms,
    ratio,
    section,
    span,
)
from nsys_analyzer.report.model import Block, Cell, Column, Details, Figure, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
from nsys_analyzer.text import Words, phrase, plural

IMPLEMENTATIONS = ("flash", "unfused", "sdpa", "sdpa_flash")
NAMES = {"flash": "flash", "unfused": "unfused", "sdpa": "SDPA", "sdpa_flash": "SDPA flash"}
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
_ALONE = {"forward": "forward", "backward": "backward"}
_CONTEXTS = tuple(2**power for power in range(7, 17))  # 128 to 65,536
_ENOUGH_CALLS = 5
_DEFINITIONS = phrase(
    "*Latency* is the median; *end to end* is forward and backward measured as one. At short contexts it is the fixed "
    "cost of a call, Python and launches. *÷ fastest peer* is flash's time ÷ the least time of the others: below 1 "
    "flash is faster. The *roofline* is the least time for the matmuls of the visible scores (4·d_head FLOPs each "
    "forward, 10·d_head backward, where they are recomputed), or for moving each tensor once, whichever is longer; a "
    "causal mask leaves S·(S + 1) ÷ 2 of S² scores. *Error* is the largest difference from unfused attention in fp32 ÷ "
    "its largest number, over the output and each gradient; what exceeds its tolerance is not timed."
)


@dataclass(frozen=True)
class FlashCase(WithHeads):
    """One implementation and shape: queries, keys and values of (batch_size, heads, context_length, d_head)."""

    device: str
    implementation: str = option(
        "flash",
        "ours (flash), unfused, PyTorch's choice (sdpa), its FlashAttention backend (sdpa_flash)",
        IMPLEMENTATIONS,
    )
    precision: str = option("bf16", "of the tensors and matmuls", ("bf16", "fp32"))
    d_head: int = option(64, "features of a head: 16, 32, 64 or 128")
    context_length: int = option(1024, "tokens", least=2)
    batch_size: int = option(1, "batch size")
    heads: int = option(8, "heads", cpu=2, spelling="num-heads")
    causal: bool = option(True, "with a causal mask")
    fp32_products: str = option(
        "tf32x3", "of our kernels in fp32: three matmuls in TF32, as SDPA's do, or true fp32", ("tf32x3", "ieee")
    )
    warmup_ms: int = option(25, "milliseconds of do_bench's warm-up, on a GPU", least=0)
    measured_ms: int = option(100, "milliseconds that do_bench measures for, on a GPU; more for five calls")
    warmup_steps: int = option(1, "calls before the measured ones, without do_bench", least=0)
    steps: int = option(3, "measured calls without do_bench: on a CPU, and of passes longer than 100 ms")

    @property
    def name(self) -> str:
        """The case in a sentence."""
        return f"{NAMES[self.implementation]}, {self.precision}, d_head {self.d_head}, context {self.context_length:,}"


@dataclass
class FlashTimes:
    """Latency of a pass: median, extremes, the timer, and do_bench's measuring time."""

    ms: float
    min_ms: float | None = None
    max_ms: float | None = None
    timer: str = "do_bench"
    measured_ms: float | None = None


@dataclass
class FlashFigures:
    """Error, latency and memory of an implementation.

    Attributes:
        inputs_bytes: queries, keys, values, and the gradient of the output.
        max_error: the largest difference from unfused attention in fp32 ÷ its largest number, the worst tensor's.
        end_to_end: forward and backward measured as one.
        peak_bytes: of forward and backward above the inputs.
        kernel: the name of what ran.
    """

    inputs_bytes: int | None = None
    max_error: float | None = None
    forward: FlashTimes | None = None
    peak_bytes: int | None = None
    kernel: str | None = None
    backward: FlashTimes | None = None
    end_to_end: FlashTimes | None = None


TARGET = CaseTarget("profiling_targets.flash", FlashCase, FlashFigures)
FlashRow = Row[FlashCase, FlashFigures]


def _cases(settings: Settings) -> Iterator[Task[FlashCase]]:
    excluded = ("sdpa_flash", "fp32", "cuda")  # SDPA's FlashAttention backend takes no fp32 on a GPU
    for task in grid(TARGET, settings, lambda case: case.name):
        if (task.case.implementation, task.case.precision, task.case.device) != excluded:
            yield task


@dataclass(frozen=True)
class Limits:
    """Highest rates of the device in one precision, and their source."""

    flops_per_s: float
    bytes_per_s: float
    source: str

    def least_ms(self, row: FlashRow, name: str) -> float:
        """Returns the roofline of a pass."""
        shape = row.case.shape
        both = ((shape.forward_flops, shape.forward_bytes), (shape.backward_flops, shape.backward_bytes))
        forward, backward = (roofline_ms(*work, self.flops_per_s, self.bytes_per_s) for work in both)
        return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[name]


def find_limits(results: Results, precision: str) -> Limits | None:
    """Returns the datasheet's peaks of the GPU, else the measured ceilings; None where neither is known."""
    peaks = find_peaks(results.gpu)
    in_three = results.on_gpu and any(row.case.fp32_products == "tf32x3" for row in results.rows_of(TARGET))
    if peaks and "tf32" in peaks.flops_per_s and precision == "fp32" and in_three:
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
        self.implementations = sorted(found, key=lambda name: name == "flash")
        rows = [row for row in results.rows_of(TARGET) if row.case.precision == precision]
        self.rows = sorted(rows, key=lambda row: row.case.context_length)
        self.shapes = sorted({(row.case.d_head, row.case.context_length) for row in rows})
        self._rows = {(row.case.implementation, row.case.d_head, row.case.context_length): row for row in rows}

    def of(self, implementation: str) -> list[FlashRow]:
        """Returns the rows of an implementation, the shortest context first."""
        return [row for row in self.rows if row.case.implementation == implementation]

    def find(self, implementation: str, d: int, length: int) -> FlashRow | None:
        """Returns the row of a shape."""
        return self._rows.get((implementation, d, length))

    def over_peer(self, row: FlashRow, name: str, peer: str | None = None) -> float | None:
        """Returns a row's time ÷ that of another implementation of its shape, by default the fastest, or None."""
        peers = [peer] if peer else [other for other in self.implementations if other != row.case.implementation]
        others = [self.find(other, row.case.d_head, row.case.context_length) for other in peers]
        times = [time for other in others if (time := mean_ms(other, name))]
        return ratio(mean_ms(row, name), min(times, default=None))

    def of_roofline(self, row: FlashRow, name: str) -> float | None:
        """Returns the share of the roofline that a pass reaches; None where either is not known."""
        return ratio(self.limits.least_ms(row, name), mean_ms(row, name)) if self.limits else None


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    compared = [Compared(results, precision) for precision in dict.fromkeys(row.case.precision for row in rows)]
    return section(
        "flash",
        "FlashAttention-2 against unfused attention and SDPA",
        results,
        rows,
        lambda row: row.case.name,
        answers=_answers(results, compared),
        **_conditions(results, rows),
        warnings=_few_calls(rows),
        blocks=_blocks(compared),
        definitions=_DEFINITIONS,
        rates=[rate for row in rows for rate in rates(row)],
        memory=minimum_memory(rows),
    )


def _answers(results: Results, every: Sequence[Compared]) -> Iterator[Words]:
    """Yields flash's time and memory against its peers, its share of the roofline, and what failed."""
    for compared in every:
        if ours := [row for row in compared.of("flash") if row.ok]:
            length = ours[-1].case.context_length
            longest = [row for row in ours if row.case.context_length == length]
            parts = []
            for words, peer in (("its fastest peer", None), ("SDPA's FlashAttention backend", "sdpa_flash")):
                factors = (compared.over_peer(row, "end_to_end", peer) for row in longest)
                if known := [factor for factor in factors if factor is not None]:
                    parts.append(f"{span(known, 'factor')} the time of {words}")
            if parts:
                where = f"At context {length:,} in {compared.precision}, forward and backward"
                yield f"{where}, flash takes {' and '.join(parts)}."
            if limits := compared.limits:
                best = (f"{percent(max(compared.of_roofline(row, key) or 0 for row in ours))} {key}" for key in _ALONE)
                reached = " and ".join(best)
                yield f"Flash reaches at best {reached} of the {compared.precision} roofline ({limits.source})."
        # The longest context at which the memory of both is known.
        for row in reversed(compared.of("unfused")):
            d, length = row.case.d_head, row.case.context_length
            flash = figure(compared.find("flash", d, length), "peak_bytes")
            if flash and row.figures.peak_bytes:
                unfused, fused = (format_number(size, "bytes") for size in (row.figures.peak_bytes, flash))
                of = f"context {length:,} ({compared.precision}, d_head {d})"
                yield f"At {of} unfused attention needs {unfused} above its inputs, flash {fused}."
                break
    yield from endings(results.rows_of(TARGET), lambda row: row.case.name, "Nothing ran out of memory.")
    if not results.on_gpu:
        yield "Without a GPU, flash is the same algorithm as tiles in PyTorch: its times say nothing of the kernels."


def _conditions(results: Results, rows: Sequence[FlashRow]) -> dict[str, str]:
    case = rows[0].case
    calls = f"{case.steps} {plural(case.steps, 'call')}"
    warmup, measured = f"{case.warmup_steps} {plural(case.warmup_steps, 'call')}", f"{calls} of each pass"
    synchronized = "after each call"
    if results.on_gpu:
        warmup, measured = f"{case.warmup_ms} ms", f"{case.measured_ms} ms of each pass by triton.testing.do_bench"
        measured += f", {calls} of one that takes over 100 ms"
        synchronized = "by do_bench, with events around each call, the L2 cache cleared before it"
    measured += f", batch {case.batch_size}, {case.heads} heads, {'' if case.causal else 'not '}causal"
    gradients = "recorded in forward for queries, keys and values; backward alone is repeated from one forward"
    return {"warmup": warmup, "measured": measured, "synchronized": synchronized, "gradients": gradients}


def _few_calls(rows: Sequence[FlashRow]) -> Iterator[Words]:
    """Yields how many passes took so long that few calls fit the time of do_bench."""
    passes = [(row.case, times) for row in rows for name in PASSES if (times := figure(row, name))]
    few = sum(
        times.timer == "do_bench" and (times.measured_ms or case.measured_ms) < _ENOUGH_CALLS * times.ms
        for case, times in passes
    )
    if few:
        yield phrase("**Few calls**: do_bench made fewer than {} in {} of {} passes.", _ENOUGH_CALLS, few, len(passes))


def _blocks(every: Sequence[Compared]) -> Iterator[Block]:
    """Yields the latency of both passes, figures, kernels with their errors, and the rest folded away."""
    yield from (_latency(compared, "end_to_end") for compared in every)
    for compared in every:
        yield from _figures(compared)
    cells: list[tuple[Cell, ...]] = []
    for compared in every:
        for name in compared.implementations:
            figures = [row.figures for row in compared.of(name)]
            kernels = ", ".join(dict.fromkeys(found.kernel for found in figures if found.kernel))
            errors = [found.max_error for found in figures if found.max_error is not None]
            worst = f"{max(errors):.1e}" if errors else None
            cells.append((NAMES[name], compared.precision, kernels or None, len(errors), worst))
    columns = (
        Column("implementation"), Column("precision"), Column("kernel"), Column("shapes", "count"), Column("error"),
    )  # fmt: skip
    caption = "Kernel, and largest error against unfused attention in fp32, up to context 4,096:"
    yield Table(columns, tuple(cells), caption)
    for compared in every:
        peaks = [
            Field(NAMES[name], "bytes", _of(compared, name, lambda row: row.figures.peak_bytes))
            for name in compared.implementations
        ]
        caption = f"Peak memory of forward and backward above the inputs, {compared.precision}:"
        memory = table((*_SHAPE, *peaks), compared.shapes, caption, names=2)
        title = f"Forward and backward alone, and memory, {compared.precision}"
        yield Details(title, (*(_latency(compared, name) for name in _ALONE), memory))


_Shape: TypeAlias = tuple[int, int]
_SHAPE: tuple[Field[_Shape], ...] = (
    Field("d_head", "count", lambda shape: shape[0]),
    Field("context", "count", lambda shape: shape[1]),
)


def _of(compared: Compared, name: str, value: Callable[[FlashRow], Cell]) -> Callable[[_Shape], Cell]:
    """Returns a figure of an implementation by d_head and context length; where a row has none, how it ended."""

    def cell(shape: _Shape) -> Cell:
        row = compared.find(name, *shape)
        found = value(row) if row else None
        return row.status if row and not row.ok and found is None else found

    return cell


def _latency(compared: Compared, name: str) -> Table:
    """Returns the latency of a pass of each implementation, and flash's against its fastest peer and the roofline."""
    times = [
        Field(f"{NAMES[implementation]} ms", "ms", _of(compared, implementation, lambda row: mean_ms(row, name)))
        for implementation in compared.implementations
    ]
    fields: tuple[Field[_Shape], ...] = (
        *_SHAPE,
        *times,
        Field("÷ fastest peer", "factor", _of(compared, "flash", lambda row: compared.over_peer(row, name))),
        Field("of roofline", "percent", _of(compared, "flash", lambda row: compared.of_roofline(row, name))),
    )
    return table(fields, compared.shapes, f"Latency {PASSES[name]}, {compared.precision}:", names=2)


def _figures(compared: Compared) -> Iterator[Figure]:
    """Yields the latency of each pass over the context length, at one d_head."""
    d = drawn_width(d for d, _ in compared.shapes)
    for key, words in PASSES.items():
        points = {
            title: [(row.case.context_length, mean_ms(row, key)) for row in compared.of(name) if row.case.d_head == d]
            for name, title in NAMES.items()
        }
        title = f"Latency of attention, {words}, {compared.precision}, d_head {d}"
        yield from curves(f"flash-{compared.precision}-{key.replace('_', '-')}", title, points, "ms")


def rates(row: FlashRow) -> Iterator[Rate]:
    """Returns work of each measured pass: of fused attention what the roofline counts, of unfused attention its own."""
    case, label = row.case, f"{{}} of {row.case.name}"
    if case.implementation == "unfused":
        # Forward's matmuls write and read the scores; scale, mask and softmax do both.
        return unfused_rates(row, label, 8 if case.causal else 6)
    # On a GPU SDPA's kernel makes an fp32 matmul of three in TF32 (CUTLASS's 3xTF32), ours where it is asked to.
    in_fp32 = case.device == "cpu" or (case.implementation == "flash" and case.fp32_products == "ieee")
    return fused_rates(row, label, _ALONE, in_three=case.precision == "fp32" and not in_fp32)


def minimum_memory(rows: Sequence[FlashRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Yields tensors at the end of backward, by the implementation."""
    for row in rows:
        shape, name = row.case.shape, row.case.implementation
        least, why = 4 * shape.tensor_bytes + shape.lse_bytes, "output, three gradients, a number a row"
        if name == "unfused":
            least, why = 2 * shape.square_bytes + shape.tensor_bytes, "weights, their gradient, output"
        if measured := row.figures.peak_bytes:
            yield name, MinimumMemory(row.case.name, measured, least, why)


BENCH = Bench(
    "flash",
    "FlashAttention-2 in Triton against unfused attention and SDPA: latency, memory, and the roofline.",
    (
        several(FlashCase, "implementation", IMPLEMENTATIONS, ("flash", "unfused", "sdpa")),
        several(FlashCase, "precision", ("bf16", "fp32"), ("fp32",)),
        several(FlashCase, "d_head", (16, 32, 64, 128), (64,)),
        several(FlashCase, "context_length", _CONTEXTS, (128, 256, 512)),
        *single(FlashCase, "batch_size", "heads", "causal", "fp32_products", "warmup_ms", "measured_ms"),
        *single(FlashCase, "warmup_steps", "steps"),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    targets=(TARGET,),
)
