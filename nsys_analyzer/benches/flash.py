"""FlashAttention-2 in Triton against attention without fusion and PyTorch's own: latency, memory, what is possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.endings import messages
from nsys_analyzer.benches.flash_costs import Limits, find_limits, least_ms, rates, residences
from nsys_analyzer.benches.flash_tables import (
    NAMES,
    PASSES,
    details,
    errors,
    find,
    flat_until,
    matrix,
    passes_measured,
    ratio,
    shape_name,
    spread,
    widths,
)
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.report.model import Block, Figure, Lines, Listing, Paragraph, Section
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import marked, strong

_CONTEXTS = tuple(2**power for power in range(7, 17))  # 128 to 65,536
_SAME = ("batch_size", "heads", "fp32_products", "warmup_ms", "measured_ms", "warmup_steps", "steps")
_HELD = "sdpa_flash"
_WHOLE = PASSES[-1][0]
_DRAWN_D = 64
_OPTIONS = (
    Option("implementation", tuple(NAMES), tuple(NAMES), ("flash", "unfused", "sdpa"),
           "Ours (flash), unfused, PyTorch's choice (sdpa), its FlashAttention backend (sdpa_flash)."),
    Option("precision", ("bf16", "fp32"), ("bf16", "fp32"), ("fp32",), "Of the tensors and products."),
    Option("d_head", int, (16, 32, 64, 128), (64,), "Features of a head: 16, 32, 64 or 128."),
    Option("context_length", int, _CONTEXTS, (128, 256, 512), "Tokens.", least=2),
    Option("batch_size", int, (1,), (1,), "Sequences.", several=False),
    Option("heads", int, (8,), (2,), "Heads.", several=False),
    Option("causal", ("on", "off"), ("on",), ("on",), "Whether no token sees a later one.", several=False),
    Option("fp32_products", ("tf32x3", "ieee"), ("tf32x3",), ("tf32x3",),
           "Of our kernels in fp32: three of TF32, as SDPA's do, or true fp32.", several=False),
    Option("warmup_ms", int, (25,), (25,), "Warm-up of do_bench, on a GPU.", several=False, least=0),
    Option("measured_ms", int, (100,), (100,), "Time of do_bench, on a GPU; more for 5 calls.", several=False),
    Option("warmup_steps", int, (1,), (1,), "Calls before those measured without do_bench.", several=False, least=0),
    Option("steps", int, (3,), (3,), "Measured calls on a CPU, and of what takes over 100 ms.", several=False),
)  # fmt: skip
_DEFINITIONS = marked(
    "*Definitions.* Latency is the median; *end to end* is forward and backward measured as one. *÷ faster peer*: our "
    "time ÷ the least of the others', below 1 is faster. The *roofline* is the least time for the products of the "
    "scores that a token may see, 4·d_head FLOPs each forward and 10·d_head backward (five products, since the scores "
    "are made anew), or for moving each tensor once, whichever is longer; of causal attention these are S·(S + 1) ÷ 2 "
    "of S², the diagonal and all below. *Error*: the largest difference to unfused attention in fp32 ÷ its largest "
    "number, over the output and each gradient; what is wrong is not timed. *Context up to which the time does not "
    "grow*: the longest whose time end to end is within 10 % of the least of those up to it."
)


def _cases(settings: Settings) -> tuple[Case, ...]:
    same = {"device": settings.device, **{key: settings[key] for key in _SAME}, "causal": settings["causal"] == "on"}
    return tuple(
        Case(
            "profiling_targets.flash",
            {**same, "implementation": one, "precision": precision, "d_head": d, "context_length": length},
            f"{NAMES[one]}, {precision}, d_head {d}, context {length:,}",
        )
        for one in settings["implementation"]
        for precision in settings["precision"]
        if not (one == "sdpa_flash" and precision == "fp32" and settings.device == "cuda")  # it takes no fp32 there
        for d in settings["d_head"]
        for length in settings["context_length"]
    )


def _section(results: Results) -> Section:
    precisions = tuple(dict.fromkeys(row.case["precision"] for row in results.rows))
    limits = {precision: found for precision in precisions if (found := find_limits(results, precision))}
    flags = (*precision_warnings(results), *_failed(results))
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(_answers(results, precisions, limits))),
        _conditions(results),
        *([Listing(flags)] if flags else []),
        *(block for precision in precisions for block in matrix(results, precision, limits.get(precision))),
        *_figures(results, precisions),
        errors(results),
        *(block for precision in precisions for block in details(results, precision, limits.get(precision))),
        *messages(results.rows, shape_name),
        *physics(results, rates(results), residences(results)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-flash", "Bench: FlashAttention-2 against unfused attention and SDPA", blocks)


def _answers(results: Results, precisions: Sequence[str], limits: Mapping[str, Limits]) -> Iterator[str]:
    """Ours against its peers and the roofline, memory, and what ran out of it."""
    if not results.on_gpu:
        yield "Without a GPU, flash is the same algorithm as tiles in PyTorch: its times say nothing of the kernels."
    for precision in precisions:
        rows = [row for row in results.of(implementation="flash", precision=precision) if row.ok]
        yield from _against_peers(results, precision, rows)
        if rows and precision in limits:
            yield _at_best(precision, rows, limits[precision])
    yield from _memory(results)
    yield _out_of_memory(results)


def _against_peers(results: Results, precision: str, rows: Sequence[Row]) -> Iterator[str]:
    """The ratios end to end, on a GPU of the contexts whose work shows in the time, and what shorter ones take."""
    flat = {d: flat_until(results, "flash", precision, d) or 0 for d in widths(results, precision)}
    grown = [row for row in rows if not results.on_gpu or row.case["context_length"] > flat[row.case["d_head"]]]
    parts = []
    for words, peer in (("as long as its faster peer", None), ("as long as SDPA's FlashAttention backend", _HELD)):
        found = [value for row in grown if (value := ratio(results, row, _WHOLE, peer)) is not None]
        if found:
            parts.append(f"{spread(found, '{:.2f}')} times {words}")
    if parts:
        wide = {row.case["d_head"] for row in grown}
        contexts = [min(row.case["context_length"] for row in grown if row.case["d_head"] == d) for d in wide]
        where = f" from context {spread(contexts, '{:,}')} on" if results.on_gpu else ""
        where += " (by d_head)" if " to " in where else ""
        yield f"In {precision}, forward and backward together,{where} flash takes {', '.join(parts)}."
    if results.on_gpu:
        yield from _launches(results, precision)


def _launches(results: Results, precision: str) -> Iterator[str]:
    """Up to which context the time of flash and of PyTorch's choice does not grow, and what it is."""
    parts = []
    for one in ("flash", "sdpa"):
        flat = {d: last for d in widths(results, precision) if (last := flat_until(results, one, precision, d))}
        times = [
            row.figures[_WHOLE]
            for row in results.of(implementation=one, precision=precision)
            if _WHOLE in row.figures and row.case["context_length"] <= flat.get(row.case["d_head"], 0)
        ]
        if times:
            parts.append(f"{NAMES[one]} {spread(times, '{:.2f}')} ms up to context {spread([*flat.values()], '{:,}')}")
    if parts:
        yield (
            f"Shorter contexts do not show in the time ({', '.join(parts)}): there the fixed cost of a call is "
            "measured, Python and launches among it, not attention."
        )


def _at_best(precision: str, rows: Sequence[Row], limits: Limits) -> str:
    best = []
    for key, name in PASSES[:2]:
        share, row = max(((least_ms(row, key, limits) / row.figures[key], row) for row in rows), key=lambda one: one[0])
        best.append(f"{percent(share)} {name} (d_head {row.case['d_head']}, context {row.case['context_length']:,})")
    return f"It reaches at best {' and '.join(best)} of the {precision} roofline from {limits.source}."


def _memory(results: Results) -> Iterator[str]:
    """The largest shape whose memory is known of both unfused and flash."""
    both = [
        (row, ours)
        for row in results.of(implementation="unfused")
        if (ours := find(results, "flash", row.case["precision"], row.case["d_head"], row.case["context_length"]))
        and all("peak_bytes" in one.figures for one in (row, ours))
    ]
    if both:
        row, ours = max(both, key=lambda pair: pair[0].figures["peak_bytes"])
        unfused, flash = (format_number(one.figures["peak_bytes"], "bytes") for one in (row, ours))
        yield (
            f"At context {row.case['context_length']:,} ({row.case['precision']}, d_head {row.case['d_head']}) unfused "
            f"attention peaks at {unfused} above its inputs, flash at {flash}."
        )


def _out_of_memory(results: Results) -> str:
    """From which context on each implementation ran out of memory."""
    first: dict[tuple[str, str], int] = {}
    for row in results.rows:
        if row.status == "oom":
            key, length = (NAMES[row.case["implementation"]], row.case["precision"]), row.case["context_length"]
            first[key] = min(length, first.get(key, length))
    found = "; ".join(
        f"{name} in {precision} from context {length:,} on" for (name, precision), length in first.items()
    )
    return f"Out of memory: {found}." if found else "Nothing ran out of memory."


def _conditions(results: Results) -> Paragraph:
    case = results.rows[0].case
    calls, before = _counted(case["steps"], "call"), _counted(case["warmup_steps"], "call")
    if results.on_gpu:
        warmup, measured = f"{case['warmup_ms']} ms", passes_measured(results, calls)
        synchronized = "by do_bench, with events around each call, the L2 cache cleared before it"
    else:
        warmup, measured, synchronized = before, f"{calls} of each pass", "after each call"
    shape = f"batch {case['batch_size']}, {case['heads']} heads, {'' if case['causal'] else 'not '}causal"
    grad = "recorded in forward for queries, keys and values; backward alone is repeated from one forward"
    return conditions(results, warmup=warmup, steps=f"{measured}, {shape}", synchronized=synchronized, grad=grad)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _failed(results: Results) -> tuple[str, ...]:
    """What failed: a wrong result among it."""
    broken = (row for row in results.rows if row.status in ("failed", "timeout"))
    return tuple(f"{strong('Not measured')}: {shape_name(row)}: {row.message}" for row in broken)


def _figures(results: Results, precisions: Sequence[str]) -> Iterator[Figure]:
    """The latency of each pass over the context length, at one d_head."""
    for precision in precisions:
        wide = widths(results, precision)
        d = _DRAWN_D if _DRAWN_D in wide else wide[-1]
        for key, name in PASSES:
            series = tuple(
                (NAMES[one], points)
                for one in NAMES
                if len(points := _points(results.of(implementation=one, precision=precision, d_head=d), key)) > 1
            )
            if series:
                title = f"Latency of attention, {name}, {precision}, d_head {d}"
                yield Lines(f"flash-{precision}-{key.removesuffix('_ms').replace('_', '-')}", title, series,
                            "context length, tokens", "ms", log_x=True, log_y=True)  # fmt: skip


def _points(rows: Sequence[Row], key: str) -> tuple[tuple[float, float | None], ...]:
    found = ((row.case["context_length"], row.figures[key]) for row in rows if key in row.figures)
    return tuple(sorted(found))


BENCH = Bench(
    "flash",
    "FlashAttention-2 in Triton against unfused attention and SDPA: latency, memory, and the roofline.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: settings["precision"],
)
