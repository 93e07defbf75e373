"""FlashAttention-2 in Triton against unfused attention and PyTorch's own: latency, memory, share of the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from nsys_analyzer.experiments.attention.core import curves, drawn_width, figure, fused_rates, ms, unfused_rates
from nsys_analyzer.experiments.flash.cases import IMPLEMENTATIONS, TARGET, FlashCase, FlashRow
from nsys_analyzer.experiments.flash.compared import Compared
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import endings, section, span
from nsys_analyzer.report.model import Cell, Column, Details, Figure, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import Words, phrase, plural

NAMES = {"flash": "flash", "unfused": "unfused", "sdpa": "SDPA", "sdpa_flash": "SDPA flash"}
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
_ALONE = {"forward": "forward", "backward": "backward"}
_CONTEXTS = tuple(2**power for power in range(7, 17))  # 128 to 65,536
_ENOUGH_CALLS = 5
_OPTIONS = (
    several(FlashCase, "implementation", IMPLEMENTATIONS, ("flash", "unfused", "sdpa")),
    several(FlashCase, "precision", ("bf16", "fp32"), ("fp32",)),
    several(FlashCase, "d_head", (16, 32, 64, 128), (64,)),
    several(FlashCase, "context_length", _CONTEXTS, (128, 256, 512)),
    *single(
        FlashCase, "batch_size", "heads", "causal", "fp32_products", "warmup_ms", "measured_ms", "warmup_steps", "steps"
    ),
)  # fmt: skip
_DEFINITIONS = phrase(
    "*Latency* is the median; *end to end* is forward and backward measured as one. At short contexts it is the fixed "
    "cost of a call, Python and launches. *÷ fastest peer* is flash's time ÷ the least time of the others: below 1 "
    "flash is faster. The *roofline* is the least time for the matmuls of the visible scores (4·d_head FLOPs each "
    "forward, 10·d_head backward, where they are recomputed), or for moving each tensor once, whichever is longer; a "
    "causal mask leaves S·(S + 1) ÷ 2 of S² scores. *Error* is the largest difference from unfused attention in fp32 ÷ "
    "its largest number, over the output and each gradient; what exceeds its tolerance is not timed."
)


def _cases(settings: Settings) -> tuple[Task[FlashCase], ...]:
    names = ("implementation", "precision", "d_head", "context_length")
    tasks = grid(TARGET, settings, _case_name, **{name: settings[name] for name in names})
    excluded = ("sdpa_flash", "fp32", "cuda")  # SDPA's FlashAttention backend takes no fp32 on a GPU
    return tuple(one for one in tasks if (one.case.implementation, one.case.precision, one.case.device) != excluded)


def _case_name(case: FlashCase) -> str:
    name = NAMES[case.implementation]
    return f"{name}, {case.precision}, d_head {case.d_head}, context {case.context_length:,}"


def _name(row: FlashRow) -> str:
    return _case_name(row.case)


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    compared = [Compared(results, precision) for precision in dict.fromkeys(row.case.precision for row in rows)]
    return section(
        "flash",
        "FlashAttention-2 against unfused attention and SDPA",
        results,
        rows,
        _name,
        answers=_answers(results, compared),
        **_conditions(results, rows),
        warnings=_few_calls(rows),
        blocks=(
            *(_latency(one, "end_to_end") for one in compared),
            *(block for one in compared for block in _figures(one)),
            _errors(compared),
            *(_details(one) for one in compared),
        ),
        definitions=_DEFINITIONS,
        rates=[rate for row in rows for rate in rates(row)],
        memory=minimum_memory(rows),
    )


def _answers(results: Results, compared: Sequence[Compared]) -> Iterator[Words]:
    for one in compared:
        ours = [row for row in one.of("flash") if row.ok]
        if ours:
            yield from _against_peers(one, ours)
        if ours and one.limits:
            best = (f"{percent(max(one.of_roofline(row, key) or 0 for row in ours))} {key}" for key in _ALONE)
            yield f"Flash reaches at best {' and '.join(best)} of the {one.precision} roofline ({one.limits.source})."
        yield from _memory(one)
    yield from endings(results.rows_of(TARGET), _name, "Nothing ran out of memory.")
    if not results.on_gpu:
        yield "Without a GPU, flash is the same algorithm as tiles in PyTorch: its times say nothing of the kernels."


def _against_peers(compared: Compared, rows: Sequence[FlashRow]) -> Iterator[str]:
    """Flash's time at the longest context ÷ that of its fastest peer, and of PyTorch's FlashAttention backend."""
    length = rows[-1].case.context_length
    parts = []
    for words, peer in (("its fastest peer", None), ("SDPA's FlashAttention backend", "sdpa_flash")):
        own = [row for row in rows if row.case.context_length == length]
        if found := [over for row in own if (over := compared.over_peer(row, "end_to_end", peer)) is not None]:
            parts.append(f"{span(found, 'factor')} the time of {words}")
    if parts:
        yield f"At context {length:,} in {compared.precision}, forward and backward, flash takes {' and '.join(parts)}."


def _memory(compared: Compared) -> Iterator[str]:
    """The longest context at which the memory of both unfused and flash is known."""
    for row in reversed(compared.of("unfused")):
        d, length = row.case.d_head, row.case.context_length
        flash = figure(compared.find("flash", d, length), "peak_bytes")
        if flash and row.figures.peak_bytes:
            unfused, fused = (format_number(size, "bytes") for size in (row.figures.peak_bytes, flash))
            of = f"context {length:,} ({compared.precision}, d_head {d})"
            yield f"At {of} unfused attention needs {unfused} above its inputs, flash {fused}."
            return


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
    """How many passes took so long that few calls fit the time of do_bench."""
    passes = [(row.case, times) for row in rows for one in PASSES if (times := figure(row, one))]
    few = sum(
        times.timer == "do_bench" and (times.measured_ms or case.measured_ms) < _ENOUGH_CALLS * times.ms
        for case, times in passes
    )
    if few:
        yield phrase("**Few calls**: do_bench made fewer than {} in {} of {} passes.", _ENOUGH_CALLS, few, len(passes))


_Shape: TypeAlias = tuple[int, int]
_SHAPE: tuple[Field[_Shape], ...] = (
    Field("d_head", "count", lambda shape: shape[0]),
    Field("context", "count", lambda shape: shape[1]),
)


def _of(compared: Compared, name: str, value: Callable[[FlashRow], Cell]) -> Callable[[_Shape], Cell]:
    """A figure of an implementation by d_head and context length; where a row has none, how it ended."""

    def cell(shape: _Shape) -> Cell:
        row = compared.find(name, *shape)
        found = value(row) if row else None
        return row.status if row and not row.ok and found is None else found

    return cell


def _latency(compared: Compared, one: str) -> Table:
    """The latency of a pass of each implementation, and that of flash against its fastest peer and the roofline."""
    fields: tuple[Field[_Shape], ...] = (
        *_SHAPE,
        *(
            Field(f"{NAMES[name]} ms", "ms", _of(compared, name, lambda row: ms(row, one)))
            for name in compared.implementations
        ),
        Field("÷ fastest peer", "factor", _of(compared, "flash", lambda row: compared.over_peer(row, one))),
        Field("of roofline", "percent", _of(compared, "flash", lambda row: compared.of_roofline(row, one))),
    )
    return table(fields, compared.shapes, f"Latency {PASSES[one]}, {compared.precision}:", names=2)


def _details(compared: Compared) -> Details:
    """The latency of forward and backward alone, and the peak memory."""
    peaks = [
        Field(NAMES[name], "bytes", _of(compared, name, lambda row: row.figures.peak_bytes))
        for name in compared.implementations
    ]
    caption = f"Peak memory of forward and backward above the inputs, {compared.precision}:"
    tables = (*(_latency(compared, one) for one in _ALONE), table((*_SHAPE, *peaks), compared.shapes, caption, names=2))
    return Details(f"Forward and backward alone, and memory, {compared.precision}", tables)


_ERRORS = (Column("implementation"), Column("precision"), Column("kernel"), Column("shapes", "count"), Column("error"))


def _errors(compared: Sequence[Compared]) -> Table:
    """The kernel of each implementation in each precision, and the largest error of its shapes."""
    cells: list[tuple[Cell, ...]] = []
    for one in compared:
        for name in one.implementations:
            figures = [row.figures for row in one.of(name)]
            kernels = ", ".join(dict.fromkeys(found.kernel for found in figures if found.kernel))
            errors = [found.max_error for found in figures if found.max_error is not None]
            worst = f"{max(errors):.1e}" if errors else None
            cells.append((NAMES[name], one.precision, kernels or None, len(errors), worst))
    return Table(
        _ERRORS, tuple(cells), "Kernel, and largest error against unfused attention in fp32, up to context 4,096:"
    )


def _figures(compared: Compared) -> Iterator[Figure]:
    """The latency of each pass over the context length, at one d_head."""
    d = drawn_width(d for d, _ in compared.shapes)
    for one, words in PASSES.items():
        points = {
            NAMES[name]: [(row.case.context_length, ms(row, one)) for row in compared.of(name) if row.case.d_head == d]
            for name in NAMES
        }
        title = f"Latency of attention, {words}, {compared.precision}, d_head {d}"
        yield from curves(f"flash-{compared.precision}-{one.replace('_', '-')}", title, points, "ms")


def rates(row: FlashRow) -> Iterator[Rate]:
    """Work of each measured pass: of fused attention what the roofline counts, of unfused attention its own."""
    case, label = row.case, f"{{}} of {_name(row)}"
    if case.implementation == "unfused":
        # Forward's matmuls write and read the scores; scale, mask and softmax do both.
        return unfused_rates(row, label, 8 if case.causal else 6)
    # On a GPU SDPA's kernel makes an fp32 matmul of three in TF32 (CUTLASS's 3xTF32), ours where it is asked to.
    in_fp32 = case.device == "cpu" or (case.implementation == "flash" and case.fp32_products == "ieee")
    return fused_rates(row, label, _ALONE, in_three=case.precision == "fp32" and not in_fp32)


def minimum_memory(rows: Sequence[FlashRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Tensors at the end of backward, by the implementation."""
    for row in rows:
        shape, name = row.case.shape, row.case.implementation
        least, why = 4 * shape.tensor_bytes + shape.lse_bytes, "output, three gradients, a number a row"
        if name == "unfused":
            least, why = 2 * shape.square_bytes + shape.tensor_bytes, "weights, their gradient, output"
        if measured := row.figures.peak_bytes:
            yield name, MinimumMemory(_name(row), measured, least, why)


BENCH = Bench(
    "flash",
    "FlashAttention-2 in Triton against unfused attention and SDPA: latency, memory, and the roofline.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET,),
)
