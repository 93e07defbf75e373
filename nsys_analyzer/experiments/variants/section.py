"""Attention in several ways with the same result: error, time and memory of each, and its gain over the naive one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nsys_analyzer.configuration import Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.attention.core import fused_rates, ms
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, options_of, several, single
from nsys_analyzer.experiments.section import each, endings, section, span
from nsys_analyzer.experiments.variants.cases import CPP_VARIANTS, TARGET, VARIANTS, VariantsCase, VariantsRow
from nsys_analyzer.experiments.variants.compared import MASKS, PASSES, Variants, bytes_of, case_name, error_of, growths
from nsys_analyzer.experiments.variants.tables import errors, growth, memory_by_tokens, passes, speed_ups
from nsys_analyzer.report.model import Paragraph, Section
from nsys_analyzer.text import phrase

_STORES_SCORES = ("naive", "blocked")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(fp32|bf16))?")
_OPTIONS = (
    Option(
        ("1x4x512x32", "1x4x1024x32", "1x4x2048x32", "1x4x1024x64", "4x32x128x128:bf16", "64x32x4096x128:bf16"),
        "batch size x heads x tokens x d_head, in fp32, or with :bf16 in that",
        default_on_cpu=("1x4x512x32", "1x4x1024x32", "1x4x1024x64", "1x32x128x128"),
        several=True,
        name="shape",
    ),
    several(VariantsCase, "implementation", VARIANTS, (*CPP_VARIANTS, "torch")),
    several(VariantsCase, "causal", (False, True)),
    replace(options_of(VariantsCase)["backward"], default=True, default_on_cpu=False),
    *single(VariantsCase, "warmup_steps", "steps"),
)  # fmt: skip
_ON_CPU = phrase(
    "*Variants.* naive, blocked, fused and flash are C++ on all threads without a library's matmuls: naive makes all "
    "N² scores in plain loops, blocked makes both matmuls in tiles, fused goes query by query, flash keeps one tile of "
    "scores with an online softmax. torch is PyTorch's scaled_dot_product_attention."
)
_ON_GPU = phrase(
    "*Variants.* naive is matmul, mask, softmax, matmul over all N² scores; blocked makes the matmuls in tiles of 256; "
    "fused goes by blocks of 128 queries, whose scores backward recomputes; tiled is FlashAttention-2 in PyTorch's "
    "operators, flash the same as Triton kernels; torch is PyTorch's scaled_dot_product_attention. Naive, blocked and "
    "fused make their mask in each call. In fp32 flash makes true fp32 matmuls on CUDA cores, torch's kernel three in "
    "TF32 for each on tensor cores; the others use cuBLAS in true fp32."
)
_DEFINITIONS = phrase(
    "*Error* is the largest difference from PyTorch's attention in fp64 ÷ the largest value; *‖error‖* is ‖difference‖ "
    "÷ ‖exact‖ of the worst tensor. A variant above its tolerance is not timed. *Peak* is the most memory at once "
    "above the inputs, *allocated* the sum of all allocations of a call; both hold the output and every temporary. "
    "*Over naive* is naive's time ÷ the variant's; naive and blocked compute what the mask hides, the others skip it. "
    "The *power* p of the growth is fitted to the last three lengths."
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
    rows = variants.rows
    with_backward = any(ms(row, "forward_backward") is not None for row in rows)
    return section(
        "variants",
        "attention variants, their memory and their time",
        results,
        rows,
        _name,
        answers=_answers(variants),
        warmup=f"the check, the count of memory, and {each(rows, 'warmup_steps')} more of each call",
        measured=f"{each(rows, 'steps')} of each call; of one above a second at most 3, without more warm-up",
        synchronized="at the end of each call",
        gradients="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        blocks=(
            Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
            errors(variants),
            passes(variants, "forward"),
            *([passes(variants, "forward_backward")] if with_backward else []),
            *growth(variants),
            *speed_ups(variants),
            *memory_by_tokens(variants),
        ),
        definitions=_DEFINITIONS,
        rates=[rate for row in rows for rate in _rates(row)],
        memory=_minimum(rows),
    )


def _name(row: VariantsRow) -> str:
    return case_name(row.case)


def _failed_name(row: VariantsRow) -> str:
    """The case, and where its forward pass was measured, that only backward failed."""
    forward = row.figures.forward
    return f"{_name(row)}, backward only" if forward and forward.ms else _name(row)


def _answers(variants: Variants) -> Iterator[str]:
    """Gains over naive, errors, growth, and what ran out of memory."""
    # On a GPU naive makes its causal mask in each call, and a gain over it would be one over the mask.
    for causal in (False,) if variants.on_gpu else MASKS:
        gains: dict[str, list[float]] = {}
        for row in variants.rows:
            name, gain = row.case.implementation, variants.gain(row)
            if gain and name != "naive" and row.case.causal == causal:
                gains.setdefault(name, []).append(gain)
        if gains:
            found = ", ".join(f"{name} {span(gains[name], 'factor')}" for name in gains)
            yield f"Speed-up over naive, forward, {MASKS[causal]}: {found}."
    for precision in variants.precisions:
        rows = [row for row in variants.rows if row.case.precision == precision]
        worst = max((error_of(row, one) or 0 for row in rows for one in PASSES), default=0)
        if tolerance := next((row.figures.tolerance for row in rows if row.figures.tolerance), None):
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."
    for _, family in list(growths(variants))[:1]:
        powers = ", ".join(f"{one.variant} {one.peak:.2f}" for one in family if one.peak is not None)
        yield f"Beyond a fixed part, peak memory of forward grows with the tokens to the power: {powers}."
    yield from endings(variants.rows, _failed_name, "No variant ran out of memory.")


def _rates(row: VariantsRow) -> Iterator[Rate]:
    in_three = (row.case.device, row.case.implementation, row.case.precision) == ("cuda", "torch", "fp32")
    passes = {"forward": "forward", "forward_backward": "and backward"}
    return fused_rates(row, f"{{}}, {_name(row)}", passes, in_three=in_three)


def _minimum(rows: Sequence[VariantsRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Of each variant: the output of forward, and of two of them every score."""
    for row in rows:
        shape, name = row.case.shape, row.case.implementation
        scores, why = (shape.square_bytes, "output and scores") if name in _STORES_SCORES else (0, "output")
        if measured := bytes_of(row, "forward"):
            yield name, MinimumMemory(_name(row), measured, shape.tensor_bytes + scores, why)


BENCH = Bench(
    "variants",
    "Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: tuple(dict.fromkeys(_parsed(text)["precision"] for text in settings["shape"])),
    targets=(TARGET,),
)
