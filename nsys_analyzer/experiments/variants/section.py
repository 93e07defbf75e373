"""Attention in several ways: the same result from other memory, and what each way gains over the naive one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.attention.core import (
    fused_rates,
    largest,
    ms,
    spread,
)
from nsys_analyzer.experiments.limits import MinimumMemory, Rate, check_limits
from nsys_analyzer.experiments.model import Bench, Option, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import UNSTEADY, conditions, each, precision_warnings, ratio, section, span
from nsys_analyzer.experiments.variants.cases import CPP_VARIANTS, TARGET, VARIANTS, VariantsCase, VariantsRow
from nsys_analyzer.experiments.variants.compared import (
    MASKS,
    PASSES,
    Variants,
    bytes_of,
    case_name,
    error_of,
    growths,
    shape_name,
    status,
)
from nsys_analyzer.experiments.variants.tables import bars, errors, growth, memory, memory_by_tokens, times
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Section
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import Words, joined, phrase

_STORES_SCORES = ("naive", "blocked")
#: The shapes that people ask for, (B, H, N, d): a short and a long context of a d_model of 4,096 in 32 heads.
_ASKED = ((4, 32, 128, 128), (64, 32, 4096, 128))
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(fp32|bf16))?")
_OPTIONS = (
    Option(
        "shape", str,
        ("1x4x512x32", "1x4x1024x32", "1x4x2048x32", "1x4x1024x64", "4x32x128x128:bf16", "64x32x4096x128:bf16"),
        ("1x4x512x32", "1x4x1024x32", "1x4x1024x64", "1x32x128x128"),
        "Batch size x heads x tokens x d_head, in fp32, or with :bf16 in that.",
    ),
    several(VariantsCase, "implementation", VARIANTS, (*CPP_VARIANTS, "torch")),
    several(VariantsCase, "causal", (False, True)),
    single(VariantsCase, "backward", cuda=True, cpu=False),
    single(VariantsCase, "warmup_steps"),
    single(VariantsCase, "steps"),
)  # fmt: skip
_ON_CPU = phrase(
    "*Variants.* naive, blocked, fused and flash are C++ on all threads, without a library's matmuls: naive makes all "
    "N² scores in three passes of plain loops, blocked makes both matmuls tile by tile, fused goes query by query and "
    "takes four keys at a time, flash keeps one tile of scores with an online softmax. Blocked and flash share their "
    "matmuls, so that between these two memory makes the difference; torch is PyTorch's scaled_dot_product_attention."
)
_ON_GPU = phrase(
    "*Variants.* naive is matmul, mask, softmax, matmul over all N² scores; blocked makes the matmuls in tiles of 256; "
    "fused goes by blocks of 128 queries, whose scores backward recomputes; tiled is FlashAttention-2 in PyTorch's "
    "operators, flash the same as Triton kernels; torch is PyTorch's scaled_dot_product_attention."
)
_DEFINITIONS = phrase(
    "*Error* is the largest difference from PyTorch's attention in fp64 of the same inputs, ÷ the largest value, over "
    "all heads or some of them; *‖error‖*, where it is shown, is the largest ‖difference‖ ÷ ‖exact‖ of any one tensor, "
    "so that small gradients count as much as large ones. A variant above a tolerance is not timed. *Peak* is the most "
    "tensor memory at once above the inputs, *allocated* the sum of all allocations of a call, however short they "
    "live; both hold the output and every temporary. *Over naive* is naive's time ÷ the variant's. Naive and blocked "
    "compute the whole square before they mask it; the others skip what the mask hides, in whole tiles or blocks, or "
    "key by key. The *power* p of the growth is that of the last three lengths, without what does not grow; of two "
    "lengths alone, with it."
)
_MASK_ON_GPU = "On a GPU naive, blocked and fused make their mask in each call, as one writes it down."
_UNLIKE = phrase(
    "*Matmuls in fp32* are unlike ones: flash makes true fp32 matmuls, which only CUDA cores do; the kernel that "
    "PyTorch takes for fp32 makes each of three in TF32 on tensor cores; the others are cuBLAS's in true fp32."
)


def _parsed(text: str) -> dict[str, Any]:
    """The options that a text such as 1x4x1024x32:bf16 stands for."""
    found = _SHAPE.fullmatch(text)
    sides = [int(side) for side in found.groups()[:4]] if found else []
    if not found or 0 in sides:
        raise ConfigurationError(f"{text!r} is no shape", "Write batch size x heads x tokens x d_head: 1x4x1024x32")
    names = ("batch_size", "heads", "context_length", "d_head")
    return {**dict(zip(names, sides, strict=True)), "precision": found[5] or "fp32"}


def _cases(settings: Settings) -> tuple[Task[VariantsCase], ...]:
    return tuple(
        task
        for shape in map(_parsed, settings["shape"])
        for options in [{name: (value,) for name, value in shape.items()}]
        for task in grid(
            TARGET, settings, case_name, environment=None, **options,
            implementation=settings["implementation"], causal=settings["causal"],
        )
    )  # fmt: skip


def _section(results: Results) -> Section:
    variants = Variants(results)
    asked = tuple(_at_asked_shapes(variants))
    with_backward = any(ms(row, "forward_backward") is not None for row in variants.rows)
    in_fp32 = {row.case.implementation for row in variants.rows if row.case.precision == "fp32" and results.on_gpu}
    definitions: list[Words] = [_DEFINITIONS, *([_MASK_ON_GPU] if results.on_gpu else [])]
    definitions += [_UNLIKE] if in_fp32 & {"flash", "torch"} else []
    blocks: list[Block] = [
        Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
        *([Listing(asked)] if asked else []),
        errors(variants),
        times(variants, "forward"),
        *([times(variants, "forward_backward")] if with_backward else []),
        memory(variants, "forward"),
        *(
            [Details("Memory of forward and backward", (memory(variants, "forward_backward"),))]
            if with_backward
            else []
        ),
        *growth(variants),
        *bars(variants),
        *memory_by_tokens(variants),
    ]
    return section(
        "variants",
        "attention variants, their memory and their time",
        answers=_answers(variants),
        conditions=conditions(
            results,
            warmup=f"the check, the count of memory, and {each(variants.rows, 'warmup_steps')} more of each call",
            steps=f"{each(variants.rows, 'steps')} of each call; of one above a second at most 3, without more warm-up",
            synchronized="at the end of each call",
            grad="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        ),
        warnings=(*precision_warnings(results), *_warnings(variants)),
        blocks=blocks,
        lacking=(),
        limits=check_limits(results, [rate for row in variants.rows for rate in _rates(row)], list(_minimum(variants))),
        definitions=joined(" ", definitions),
    )


def _answers(variants: Variants) -> Iterator[str]:
    """Errors, gains over naive of all shapes where none is asked for by many, growth, variants out of memory."""
    for precision in variants.precisions:
        checked = [
            row for row in variants.rows if row.case.precision == precision and error_of(row, "forward") is not None
        ]
        if checked:
            worst = max(error_of(row, one) or 0 for row in checked for one in PASSES)
            tolerance = checked[0].figures.tolerance
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."
    if not any(shape.sizes in _ASKED for shape in variants.shapes):
        yield from _gains(variants)
    first = next((found for _, found in growths(variants)), [])
    if powers := [f"{one.variant} {one.peak:.2f}" for one in first if one.peak is not None]:
        yield f"Peak memory of forward grows with the tokens to the power: {', '.join(powers)}."
    lost = dict.fromkeys(
        f"{case_name(row.case)}{', in backward' if row.case.backward and ms(row, 'forward') is not None else ''}"
        for row in variants.rows
        if row.status == "oom"
    )
    if lost:
        yield f"Out of memory: {'; '.join(lost)}."
    elif all(row.status in ("ok", "unsupported") for row in variants.rows):
        yield "No variant ran out of memory."


def _gains(variants: Variants) -> Iterator[str]:
    """The least and the largest gain over all shapes; not causal on a GPU alone, where naive's mask would be in it."""
    for causal in (False,) if variants.on_gpu else (False, True):
        spans = []
        for name in variants.names:
            found = [gain for shape in variants.shapes if (gain := variants.gain(shape, name, causal))]
            if found and name != "naive":
                spans.append(f"{name} {span(found, 'factor')}")
        if spans:
            yield f"Over naive, forward, {MASKS[causal]}: {', '.join(spans)}."


def _at_asked_shapes(variants: Variants) -> Iterator[Words]:
    """A line for each shape that people ask for, not causal and causal: naive's time and what each gains over it."""
    for shape in (shape for shape in variants.shapes if shape.sizes in _ASKED):
        for causal in variants.masks:
            said = [text for one in PASSES if (text := _times_said(variants, shape, causal, one))]
            mask = _mask_said(variants, shape) if causal and variants.on_gpu else ""
            if said:
                of = f"d_model {shape.heads * shape.d_head:,}, {MASKS[causal]}{mask}"
                yield phrase("**{}** ({}): {}.", shape_name(shape), of, "; ".join(said))


def _mask_said(variants: Variants, shape: AttentionShape) -> str:
    """What the mask that naive makes in each call does to the times that others are compared with."""
    without, with_mask = (ms(variants.find(shape, "naive", causal), "forward") for causal in (False, True))
    longer = ratio(with_mask, without)
    return f"; naive makes its mask in each call, which takes {longer:.2f}× as long as without" if longer else ""


def _times_said(variants: Variants, shape: AttentionShape, causal: bool, one: str) -> str:
    """The time of each variant, and its gain over naive where that was measured; empty where nothing was."""
    parts = []
    for name in variants.names:
        row, gain = variants.find(shape, name, causal), variants.gain(shape, name, causal, one)
        over = f" ({gain:.2f}×)" if gain and name != "naive" else ""
        parts.append(f"{name} {_time(row, one)}{over}")
    measured = any(ms(variants.find(shape, name, causal), one) for name in variants.names)
    return f"{PASSES[one]} {', '.join(parts)}" if measured else ""


def _time(row: VariantsRow | None, one: str) -> str:
    times = spread(row, one)
    if times is None:
        ended = status(row, one)
        return "out of memory" if ended == "oom" else ended
    std = times.std or 0
    around = f" ± {format_number(std, 'ms')}" if std > UNSTEADY * times.mean else ""
    return f"{format_number(times.mean, 'ms')}{around} ms"


def _warnings(variants: Variants) -> Iterator[Words]:
    """What went wrong, what cannot run here, a fused variant that gains no time, and times that are the same."""
    for row in variants.rows:
        if row.status in ("failed", "unsupported", "timeout"):
            yield phrase("**{}**: {}: {}", row.status.capitalize(), case_name(row.case), row.message)
    fused = {row.case: row for row in variants.rows if row.case.implementation == "fused"}
    gains = {case: gain for case in fused if (gain := variants.gain(case.shape, "fused", case.causal))}
    slower = [case_name(case) for case, gain in gains.items() if gain <= 1]
    if slower and variants.on_gpu:
        yield (
            f"fused takes at least as long as naive in {len(slower)} of {len(gains)} comparisons, forward: its "
            "blocks go through the same passes over the scores, in more launches."
        )
    elif slower:
        yield phrase("**No gain**: at least as long as naive, forward: {}.", "; ".join(slower))
    printed: dict[tuple[object, ...], str] = {}
    for row in variants.rows:
        times = row.figures.forward
        if times is None or times.std_ms is None:
            continue
        digits = [format_number(value, "ms") for value in (times.ms, times.min_ms, times.max_ms) if value is not None]
        key = (row.case.shape, *digits)
        if key in printed:
            yield phrase("**Equal to the last digit**: {} has the times of {}.", case_name(row.case), printed[key])
        printed[key] = row.case.implementation


def _rates(row: VariantsRow) -> Iterator[Rate]:
    in_three = (row.case.device, row.case.implementation, row.case.precision) == ("cuda", "torch", "fp32")
    passes = {"forward": "forward", "forward_backward": "and backward"}
    return fused_rates(row, f"{{}}, {case_name(row.case)}", passes, in_three=in_three)


def _minimum(variants: Variants) -> Iterator[MinimumMemory]:
    """The largest forward of each variant: its output is alive, and of two variants every score."""
    for name in variants.names:
        own = [row for row in variants.rows if row.case.implementation == name]
        for row, measured in largest(own, lambda row: bytes_of(row, "forward"), 1):
            scores = row.case.shape.square_bytes if name in _STORES_SCORES else 0
            why = "output and scores" if scores else "output"
            yield MinimumMemory(case_name(row.case), measured, row.case.shape.tensor_bytes + scores, why)


BENCH = Bench(
    "variants",
    "Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: tuple(dict.fromkeys(_parsed(text)["precision"] for text in settings["shape"])),
    targets=(TARGET,),
)
