"""FlashAttention-2 in Triton against unfused attention and PyTorch's own: latency, memory, what is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.experiments.attention.core import (
    curves,
    figure,
    fused_rates,
    largest,
    ms,
    span,
    unfused_rates,
)
from nsys_analyzer.experiments.flash.cases import IMPLEMENTATIONS, TARGET, FlashCase, FlashRow
from nsys_analyzer.experiments.flash.compared import Compared
from nsys_analyzer.experiments.limits import MinimumMemory, Rate, check_limits
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import conditions, messages, precision_warnings, section
from nsys_analyzer.report.model import Block, Cell, Details, Figure, Paragraph, Section, Table, Unit
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import Words, phrase

NAMES = {"flash": "flash", "unfused": "unfused", "sdpa": "SDPA", "sdpa_flash": "SDPA flash"}
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
_CONTEXTS = tuple(2**power for power in range(7, 17))  # 128 to 65,536
_DRAWN_D = 64
_ENOUGH_CALLS = 5
_TIGHTEST = 2
_OPTIONS = (
    several(FlashCase, "implementation", IMPLEMENTATIONS, ("flash", "unfused", "sdpa")),
    several(FlashCase, "precision", ("bf16", "fp32"), ("fp32",)),
    several(FlashCase, "d_head", (16, 32, 64, 128), (64,)),
    several(FlashCase, "context_length", _CONTEXTS, (128, 256, 512)),
    *(single(FlashCase, name) for name in ("batch_size", "heads", "causal", "fp32_products", "warmup_ms", "measured_ms",
                                           "warmup_steps", "steps")),
)  # fmt: skip
_ERRORS_CAPTION = "What ran, and its error against unfused attention in fp32, of the contexts up to 4,096:"
_DEFINITIONS = phrase(
    "*Definitions.* Latency is the median; *end to end* is forward and backward measured as one. *÷ faster peer*: our "
    "time ÷ the least of the others', below 1 is faster. The *roofline* is the least time for the matmuls of the "
    "scores that a token may see, 4·d_head FLOPs each forward and 10·d_head backward (five matmuls, since the scores "
    "are recomputed), or for moving each tensor once, whichever is longer; of causal attention these are S·(S + 1) ÷ 2 "
    "of S², the diagonal and all below. *Error*: the largest difference to unfused attention in fp32 ÷ its largest "
    "number, over the output and each gradient; what is wrong is not timed. *Context up to which the time does not "
    "grow*: the longest whose time end to end is within 10 % of the least of those up to it."
)


def _cases(settings: Settings) -> tuple[Task[FlashCase], ...]:
    names = ("implementation", "precision", "d_head", "context_length")
    tasks = grid(TARGET, settings, _name, **{name: settings[name] for name in names})
    held = ("sdpa_flash", "fp32", "cuda")  # SDPA's FlashAttention backend takes no fp32 on a GPU
    return tuple(one for one in tasks if (one.case.implementation, one.case.precision, one.case.device) != held)


def _name(case: FlashCase) -> str:
    name = NAMES[case.implementation]
    return f"{name}, {case.precision}, d_head {case.d_head}, context {case.context_length:,}"


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    compared = [Compared(results, precision) for precision in dict.fromkeys(row.case.precision for row in rows)]
    checked = [_Checked(name, one.precision, one.of(name)) for one in compared for name in one.implementations]
    broken = [row for row in rows if row.status in ("failed", "timeout")]
    return section(
        "flash",
        "FlashAttention-2 against unfused attention and SDPA",
        answers=_answers(results, compared),
        conditions=_conditions(results, rows),
        warnings=(
            *precision_warnings(results),
            *(phrase("**Not measured**: {}: {}", _name(row.case), row.message) for row in broken),
        ),
        blocks=(
            *(block for one in compared for block in _matrices(one)),
            *(block for one in compared for block in _figures(one)),
            table(_ERRORS, checked, _ERRORS_CAPTION, names=2),
            *(block for one in compared for block in _details(one)),
        ),
        lacking=messages(rows, lambda row: _name(row.case)),
        limits=check_limits(results, [rate for row in rows for rate in rates(row)], list(minimum_memory(rows))),
        definitions=_DEFINITIONS,
    )


def _answers(results: Results, compared: Sequence[Compared]) -> Iterator[Words]:
    """Ours against its peers and the roofline, memory, and what ran out of it."""
    if not results.on_gpu:
        yield "Without a GPU, flash is the same algorithm as tiles in PyTorch: its times say nothing of the kernels."
    for one in compared:
        yield from _against_peers(one, results.on_gpu)
        ours = [row for row in one.of("flash") if row.ok]
        if ours and one.limits:
            yield _at_best(one, ours, one.limits.source)
    yield from _memory(compared)
    yield _out_of_memory(results.rows_of(TARGET))


def _against_peers(compared: Compared, on_gpu: bool) -> Iterator[Words]:
    """The ratios end to end, on a GPU of the contexts whose work shows in the time, and what shorter ones take."""
    flat = compared.flat_until("flash") if on_gpu else {}
    ours = [row for row in compared.of("flash") if row.ok]
    grown = [row for row in ours if row.case.context_length > flat.get(row.case.d_head, 0)]
    parts = []
    for words, peer in (
        ("as long as its faster peer", None),
        ("as long as SDPA's FlashAttention backend", "sdpa_flash"),
    ):
        found = [value for row in grown if (value := compared.over_peer(row, "end_to_end", peer)) is not None]
        if found:
            parts.append(f"{span(found, '{:.2f}')} times {words}")
    if parts:
        first: dict[int, int] = {}
        for row in grown:  # the shortest context first
            first.setdefault(row.case.d_head, row.case.context_length)
        where = f" from context {span([*first.values()], '{:,}')} on" if on_gpu else ""
        where += " (by d_head)" if " to " in where else ""
        yield f"In {compared.precision}, forward and backward together,{where} flash takes {', '.join(parts)}."
    if on_gpu and (fixed := [text for name in ("flash", "sdpa") for text in _fixed_cost(compared, name)]):
        yield (
            f"Shorter contexts do not show in the time ({', '.join(fixed)}): there the fixed cost of a call is "
            "measured, Python and launches among it, not attention."
        )


def _fixed_cost(compared: Compared, name: str) -> Iterator[str]:
    """Up to which context the time of an implementation does not grow, and what it is."""
    flat = compared.flat_until(name)
    short = [row for row in compared.of(name) if row.case.context_length <= flat.get(row.case.d_head, 0)]
    if times := [time for row in short if (time := ms(row, "end_to_end"))]:
        yield f"{NAMES[name]} {span(times, '{:.2f}')} ms up to context {span([*flat.values()], '{:,}')}"


def _at_best(compared: Compared, rows: Sequence[FlashRow], source: str) -> str:
    best = []
    for one in ("forward", "backward"):
        share, row = max(((compared.of_roofline(row, one) or 0, row) for row in rows), key=lambda pair: pair[0])
        best.append(f"{percent(share)} {one} (d_head {row.case.d_head}, context {row.case.context_length:,})")
    return f"It reaches at best {' and '.join(best)} of the {compared.precision} roofline from {source}."


def _memory(compared: Sequence[Compared]) -> Iterator[str]:
    """The largest shape whose memory is known of both unfused and flash."""
    pairs = [
        (one.find("flash", row.case.d_head, row.case.context_length), row)
        for one in compared
        for row in one.of("unfused")
    ]
    sizes = [(figure(row, "peak_bytes"), figure(ours, "peak_bytes"), row.case) for ours, row in pairs]
    if known := [one for one in sizes if None not in one]:
        unfused, flash, case = max(known, key=lambda one: one[0])
        yield (
            f"At context {case.context_length:,} ({case.precision}, d_head {case.d_head}) unfused attention peaks at "
            f"{format_number(unfused, 'bytes')} above its inputs, flash at {format_number(flash, 'bytes')}."
        )


def _out_of_memory(rows: Sequence[FlashRow]) -> str:
    """From which context on each implementation ran out of memory."""
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.status == "oom":
            key, length = (NAMES[row.case.implementation], row.case.precision), row.case.context_length
            first[key] = min(length, first.get(key, length))
    found = "; ".join(f"{name} in {kind} from context {length:,} on" for (name, kind), length in first.items())
    return f"Out of memory: {found}." if found else "Nothing ran out of memory."


def _conditions(results: Results, rows: Sequence[FlashRow]) -> Paragraph:
    case = rows[0].case
    calls, before = (f"{number} call{'' if number == 1 else 's'}" for number in (case.steps, case.warmup_steps))
    if results.on_gpu:
        warmup, measured = f"{case.warmup_ms} ms", _measured(rows, calls)
        synchronized = "by do_bench, with events around each call, the L2 cache cleared before it"
    else:
        warmup, measured, synchronized = before, f"{calls} of each pass", "after each call"
    shape = f"batch {case.batch_size}, {case.heads} heads, {'' if case.causal else 'not '}causal"
    grad = "recorded in forward for queries, keys and values; backward alone is repeated from one forward"
    return conditions(results, warmup=warmup, steps=f"{measured}, {shape}", synchronized=synchronized, grad=grad)


def _measured(rows: Sequence[FlashRow], calls: str) -> str:
    """What was measured on a GPU, and how many passes were measured by few calls."""
    passes = [(row, times) for row in rows for one in PASSES if (times := figure(row, one))]
    benched = [(times, times.measured_ms or row.case.measured_ms) for row, times in passes if times.timer == "do_bench"]
    long = len(passes) - len(benched)
    told = f"{rows[0].case.measured_ms} ms of each pass by triton.testing.do_bench"
    # do_bench takes as many calls as fit its time, one at the least.
    few = sum(given < _ENOUGH_CALLS * times.ms for times, given in benched)
    single_call = sum((times.min_ms or 0) == times.max_ms for times, _ in benched)
    if few:
        told += f" (of {few} of {len(passes)} passes fewer than {_ENOUGH_CALLS} calls fit into that"
        told += f", of {single_call} the least and the largest time are the same: one call)" if single_call else ")"
    return told + (f", {calls} of the {long} passes that take over 100 ms" if long else "")


def _column(
    compared: Compared, title: str, unit: Unit, name: str, d: int, value: Callable[[FlashRow], Cell]
) -> Field[int]:
    """Figures of an implementation at a d_head by context length; where a row has none, how it ended."""

    def cell(length: int) -> Cell:
        row = compared.find(name, d, length)
        found = value(row) if row else None
        return row.status if row and not row.ok and found is None else found

    return Field(title, unit, cell)


def _by_context(compared: Compared, caption: str, columns: Sequence[Field[int]]) -> Table:
    context: Field[int] = Field("context", "count", lambda length: length)
    return table((context, *columns), compared.lengths, caption)


def _matrices(compared: Compared) -> Iterator[Block]:
    """Ours end to end against its faster peer, then of the roofline: context lengths down, d_head across."""
    said, limits = f"{compared.precision}, end to end:", compared.limits
    if compared.of("flash"):
        caption = f"{said} time of flash ÷ that of the faster peer, below 1 is faster:"
        yield _matrix(compared, "factor", lambda row: compared.over_peer(row, "end_to_end"), caption)
    if compared.of("flash") and limits:
        caption = f"{said} what flash reaches of the roofline from {limits.source}:"
        yield _matrix(compared, "percent", lambda row: compared.of_roofline(row, "end_to_end"), caption)


def _matrix(compared: Compared, unit: Unit, value: Callable[[FlashRow], Cell], caption: str) -> Table:
    columns = [_column(compared, f"d_head {d}", unit, "flash", d, value) for d in compared.widths]
    return _by_context(compared, caption, columns)


def _details(compared: Compared) -> Iterator[Block]:
    """Every latency and the peak memory, folded, for each d_head."""
    for d in compared.widths:
        of = f"{compared.precision}, d_head {d}"
        tables = [_latency(compared, d, one, f"{words.capitalize()}, {of}:") for one, words in PASSES.items()]
        peaks = [
            _column(compared, NAMES[name], "bytes", name, d, lambda row: row.figures.peak_bytes)
            for name in compared.implementations
        ]
        tables.append(_by_context(compared, f"Peak memory of forward and backward above the inputs, {of}:", peaks))
        yield Details(f"{of}: every latency, and memory", tuple(tables))


def _latency(compared: Compared, d: int, one: str, caption: str) -> Table:
    columns = [
        _column(compared, f"{NAMES[name]} ms", "ms", name, d, lambda row: ms(row, one))
        for name in compared.implementations
    ]
    columns += [
        _column(compared, "÷ faster peer", "factor", "flash", d, lambda row: compared.over_peer(row, one)),
        _column(compared, "of roofline", "percent", "flash", d, lambda row: compared.of_roofline(row, one)),
    ]
    return _by_context(compared, caption, columns)


class _Checked(NamedTuple):
    """The rows of an implementation in one precision."""

    name: str
    precision: str
    rows: list[FlashRow]

    @property
    def kernels(self) -> str:
        """What ran."""
        return ", ".join(dict.fromkeys(row.figures.kernel for row in self.rows if row.figures.kernel))

    @property
    def errors(self) -> list[float]:
        """The error of each shape that was checked."""
        return [row.figures.max_error for row in self.rows if row.figures.max_error is not None]

    @property
    def largest(self) -> str | None:
        """The largest of them; unfused attention in fp32 is what the others are compared with."""
        is_reference = (self.name, self.precision) == ("unfused", "fp32")
        return None if not self.errors else "reference" if is_reference else f"{max(self.errors):.1e}"


_ERRORS: tuple[Field[_Checked], ...] = (
    Field("implementation", "text", lambda one: NAMES[one.name]),
    Field("precision", "text", lambda one: one.precision),
    Field("what ran", "text", lambda one: one.kernels or None),
    Field("shapes checked", "count", lambda one: len(one.errors)),
    Field("largest error", "text", lambda one: one.largest),
)


def _figures(compared: Compared) -> Iterator[Figure]:
    """The latency of each pass over the context length, at one d_head."""
    d = _DRAWN_D if _DRAWN_D in compared.widths else compared.widths[-1]
    for one, words in PASSES.items():
        points = {NAMES[n]: [(row.case.context_length, ms(row, one)) for row in compared.of(n, d)] for n in NAMES}
        title = f"Latency of attention, {words}, {compared.precision}, d_head {d}"
        yield from curves(f"flash-{compared.precision}-{one.replace('_', '-')}", title, points, "ms")


def rates(row: FlashRow) -> Iterator[Rate]:
    """The work of each pass that was measured: of fused attention what the roofline counts, of unfused its own."""
    case = row.case
    label = f"{case.implementation} {{}}, d_head {case.d_head}, context {case.context_length:,}"
    if case.implementation == "unfused":
        # Forward's matmuls write and read the scores; scale, mask and softmax do both.
        return unfused_rates(row, label, 8 if case.causal else 6)
    # On a GPU SDPA's kernel makes a matmul of fp32 of three in TF32 (CUTLASS's 3xTF32), ours where it is asked to.
    in_fp32 = case.device == "cpu" or (case.implementation == "flash" and case.fp32_products == "ieee")
    passes = {"forward": "forward", "backward": "backward"}
    return fused_rates(row, label, passes, in_three=case.precision == "fp32" and not in_fp32)


def minimum_memory(rows: Sequence[FlashRow]) -> Iterator[MinimumMemory]:
    """What is alive at the end of backward, for the largest rows of each implementation."""
    for name in dict.fromkeys(row.case.implementation for row in rows):
        own = [row for row in rows if row.case.implementation == name]
        for row, measured in largest(own, lambda row: row.figures.peak_bytes, _TIGHTEST):
            shape = row.case.shape
            least, why = 4 * shape.tensor_bytes + shape.lse_bytes, "output, three gradients, a number a row"
            if name == "unfused":
                least, why = 2 * shape.square_bytes + shape.tensor_bytes, "weights, their gradient, output"
            label = f"{name}, {shape.precision}, d_head {shape.d_head}, context {shape.context_length:,}"
            yield MinimumMemory(label, measured, least, why)


BENCH = Bench(
    "flash",
    "FlashAttention-2 in Triton against unfused attention and SDPA: latency, memory, and the roofline.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET,),
)
