"""Attention in several ways: the same result from other memory, and what each way gains over the naive one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.attention_costs import attention_forward_bytes, attention_forward_flops, square_bytes
from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import Rate, Residence, physics
from nsys_analyzer.benches.variants_tables import (
    BOTH,
    FORWARD,
    Shape,
    errors,
    find,
    growth,
    implementations,
    memory,
    memory_by_length,
    memory_figure,
    shape_of,
    shapes,
    speed_up_figures,
    speed_ups,
    times,
)
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Section
from nsys_analyzer.report.units import format_number

_VARIANTS = ("naive", "blocked", "fused", "tiled", "flash", "torch")
_IN_CPP = ("naive", "blocked", "fused", "flash", "torch")
_STORES_SCORES = ("naive", "blocked")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(fp32|bf16))?")
_OPTIONS = (
    Option(
        "shape", str,
        ("1x4x512x32", "1x4x1024x32", "1x4x2048x32", "1x4x1024x64", "4x32x128x128:bf16", "64x32x4096x128:bf16"),
        ("1x4x512x32", "1x4x1024x32", "1x4x1024x64", "1x32x128x128"),
        "Sequences x heads x tokens x d_head, in fp32, or with :bf16 in that.",
    ),
    Option("implementation", _VARIANTS, _VARIANTS, _IN_CPP, "The variants."),
    Option("causal", ("off", "on"), ("off", "on"), ("off", "on"), "Whether a query sees no later key."),
    Option("backward", ("on", "off"), ("on",), ("off",), "Forward and backward too.", several=False),
    Option("warmup_steps", int, (3,), (1,), "Calls before the measured ones.", several=False, least=0),
    Option("steps", int, (10,), (5,), "Measured calls.", several=False),
)  # fmt: skip
_ON_CPU = (
    "*Variants.* naive, blocked, fused and flash are C++ on all threads, without a library's products: naive makes all "
    "N² scores in three passes of plain loops, blocked makes both products tile by tile, fused goes query by query and "
    "takes four keys at a time, flash keeps one tile of scores with an online softmax. Blocked and flash share their "
    "products, so that between these two memory makes the difference; torch is PyTorch's scaled_dot_product_attention."
)
_ON_GPU = (
    "*Variants.* naive is product, mask, softmax, product over all N² scores; blocked makes the products in tiles of "
    "256; fused goes by blocks of 128 queries, whose scores backward makes anew; tiled is FlashAttention-2 in "
    "PyTorch's operators, flash the same as Triton kernels; torch is PyTorch's scaled_dot_product_attention."
)
_DEFINITIONS = (
    "*Error* is the largest difference from PyTorch's attention in fp64 of the same inputs, ÷ the largest value, over "
    "all heads or some of them; a variant above the tolerance is not timed. *Peak* is the most tensor memory at once "
    "above the inputs, *allocated* the sum of all allocations of a call, however short they live; both hold the "
    "output and every temporary. *Over naive* is naive's time ÷ the variant's. Naive and blocked compute the whole "
    "square before they mask it; the others skip what the mask hides, in whole tiles or blocks, or key by key."
)


def _cases(settings: Settings) -> tuple[Case, ...]:
    backward = settings["backward"] == "on"
    return tuple(
        Case(
            "profiling_targets.variants",
            {
                "device": settings.device,
                "implementation": implementation,
                **shape.options,
                "causal": causal == "on",
                "backward": backward,
                "warmup_steps": settings["warmup_steps"],
                "steps": settings["steps"],
            },
            f"{implementation} at {shape.name}{', causal' if causal == 'on' else ''}",
        )
        for shape in map(_parsed, settings["shape"])
        for implementation in settings["implementation"]
        for causal in settings["causal"]
    )


def _parsed(text: str) -> Shape:
    found = _SHAPE.fullmatch(text)
    sides = [int(side) for side in found.groups()[:4]] if found else []
    if not found or 0 in sides:
        raise ConfigurationError(f"{text!r} is no shape", "Write sequences x heads x tokens x d_head: 1x4x1024x32")
    batch_size, heads, context_length, d_head = sides
    return Shape(batch_size, heads, context_length, d_head, found[5] or "fp32")


def _precisions(settings: Settings) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_parsed(text).precision for text in settings["shape"]))


def _section(results: Results) -> Section:
    flags = (*precision_warnings(results), *_flags(results))
    with_backward = any(f"{BOTH}_ms" in row.figures for row in results.rows)
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(_answers(results))),
        conditions(
            results,
            warmup=f"the check, the count of memory, and {_each(results, 'warmup_steps')} more of each call",
            steps=f"{_each(results, 'steps')} of each call; of one above a second at most 3, without more warm-up",
            synchronized="at the end of each call",
            grad="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        ),
        Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
        *((Listing(flags),) if flags else ()),
        errors(results),
        times(results, FORWARD),
        *((times(results, BOTH),) if with_backward else ()),
        memory(results, FORWARD),
        *((Details("Memory of forward and backward", (memory(results, BOTH),)),) if with_backward else ()),
        *growth(results),
        *speed_up_figures(results),
        *memory_figure(results),
        *memory_by_length(results),
        *physics(results, _rates(results), _residences(results)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-variants", "Bench: attention variants, their memory and their time", blocks)


def _each(results: Results, key: str) -> str:
    return ", ".join(str(value) for value in sorted({row.case[key] for row in results.rows}))


def _answers(results: Results) -> Iterator[str]:
    for precision in dict.fromkeys(shape.precision for shape in shapes(results)):
        rows = [row for row in results.of(precision=precision) if "forward_max_error" in row.figures]
        if rows:
            worst = max(row.figures[key] or 0 for row in rows for key in row.figures if key.endswith("max_error"))
            tolerance = rows[0].figures["tolerance"]
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."
    for causal in (False, True):
        ranges = [
            f"{name} {_span(found)}"
            for name in implementations(results)
            if name != "naive" and (found := [x for s in shapes(results) if (x := speed_ups(results, s, causal)[name])])
        ]
        if ranges:
            yield f"Over naive, forward, {'causal' if causal else 'not causal'}: {', '.join(ranges)}."
    yield from _growth_said(results)
    lost = [row for row in results.rows if row.status == "oom"]
    if lost:
        yield f"Out of memory: {'; '.join(dict.fromkeys(map(_label, lost)))}."
    else:
        yield "No variant ran out of memory."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}×", f"{max(values):.2f}×"
    return low if low == high else f"{low} to {high}"


def _growth_said(results: Results) -> Iterator[str]:
    """How the peak of each variant grows, of the first table of growth."""
    table = next(iter(growth(results)), None)
    if table:
        said = [f"{row[0]} {row[2]}" for row in table.rows if row[2]]
        yield f"Peak memory of forward grows with the tokens to the power: {', '.join(said)}."


def _label(row: Row) -> str:
    return f"{row.case['implementation']} at {shape_of(row).name}{', causal' if row.case['causal'] else ''}"


def _flags(results: Results) -> Iterator[str]:
    """What went wrong, what cannot run here, a fused variant that gains nothing, and times that are the same."""
    for row in results.rows:
        if row.status in ("failed", "unsupported", "timeout"):
            yield f"**{row.status.capitalize()}**: {_label(row)}: {row.message}"
    for row in results.of(implementation="fused"):
        naive = find(results, shape_of(row), "naive", row.case["causal"])
        if naive and naive.ok and row.ok and naive.figures["forward_ms"] <= row.figures["forward_ms"]:
            yield f"**No gain**: {_label(row)} takes at least as long as naive."
    yield from _same(results)


def _same(results: Results) -> Iterator[str]:
    printed: dict[tuple[Shape, bool, str], str] = {}
    for row in (row for row in results.rows if "forward_std_ms" in row.figures):
        digits = ("forward_ms", "forward_min_ms", "forward_max_ms")
        key = (shape_of(row), row.case["causal"], " ".join(format_number(row.figures[d], "ms") for d in digits))
        if key in printed:
            yield f"**Equal to the last digit**: {_label(row)} has the times of {printed[key]}."
        printed[key] = row.case["implementation"]


def _rates(results: Results) -> list[Rate]:
    """The work that no variant can avoid: of causal attention the visible scores, of backward four products."""
    found = []
    for row in results.rows:
        cost = shape_of(row).cost(row.case["causal"])
        flops, precision = attention_forward_flops(cost), str(row.case["precision"])
        if f"{FORWARD}_ms" in row.figures:
            ms = row.figures[f"{FORWARD}_ms"]
            found.append(Rate(f"forward, {_label(row)}", precision, flops, attention_forward_bytes(cost), ms))
        if f"{BOTH}_ms" in row.figures:
            found.append(Rate(f"and backward, {_label(row)}", precision, 3 * flops, None, row.figures[f"{BOTH}_ms"]))
    return found


def _residences(results: Results) -> list[Residence]:
    """The largest forward of each variant: its output must live, and of two variants every score."""
    found = []
    for name in implementations(results):
        rows = [row for row in results.of(implementation=name) if f"{FORWARD}_peak_bytes" in row.figures]
        if rows:
            row = max(rows, key=lambda row: row.figures[f"{FORWARD}_peak_bytes"])
            cost, stores = shape_of(row).cost(row.case["causal"]), name in _STORES_SCORES
            least = cost.tensor_bytes + (square_bytes(cost) if stores else 0)
            why = "output and scores" if stores else "output"
            found.append(Residence(_label(row), row.figures[f"{FORWARD}_peak_bytes"], least, why))
    return found


BENCH = Bench(
    "variants",
    "Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    _OPTIONS,
    _cases,
    _section,
    precisions=_precisions,
)
