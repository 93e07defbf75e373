"""Attention in several ways with the same result: error, time and memory of each, and its gain over the naive one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nsys_analyzer.configuration import Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    Settings,
    figure,
    grid,
    option,
    options_of,
    ratio,
    several,
    single,
)
from nsys_analyzer.experiments.precision import scientific
from nsys_analyzer.experiments.section import bars, curves, namer, rows_table, span
from nsys_analyzer.report.model import Block, Cell, Details, Paragraph
from nsys_analyzer.runs.rows import CaseTarget, Task
from nsys_analyzer.text import Words, phrase

#: The variants of attention; ``flash`` needs a GPU.
VARIANTS = ("naive", "blocked", "fused", "tiled", "flash", "torch")
#: Names of the figures of a pass, and of the pass.
PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(fp32|bf16))?")
_VARIANTS = phrase(
    "*Variants.* naive is matmul, mask, softmax, matmul over all N² scores; blocked makes the matmuls in tiles of 256; "
    "fused goes by blocks of 128 queries, whose scores backward recomputes; tiled is FlashAttention-2 in PyTorch's "
    "operators, flash the same as Triton kernels; torch is PyTorch's scaled_dot_product_attention. Naive, blocked and "
    "fused make their mask in each call. In fp32 flash makes true fp32 matmuls on CUDA cores, torch's kernel three in "
    "TF32 for each on tensor cores; the others use cuBLAS in true fp32."
)
_DEFINITIONS = phrase(
    "*Error* is the largest difference from PyTorch's attention in fp64 ÷ the largest value. A variant above its "
    "tolerance is not timed. *Peak* is the most memory at once above the inputs, *allocated* the sum of all "
    "allocations of a call; both hold the output and every temporary. *Over naive* is naive's time ÷ the variant's; "
    "naive and blocked compute what the mask hides, the others skip it."
)


@dataclass(frozen=True)
class VariantsCase:
    """One variant at one shape, (batch_size, heads, context_length, d_head)."""

    device: str
    implementation: str = option("naive", "the variants", VARIANTS)
    batch_size: int = option(1, "batch size")
    heads: int = option(4, "heads")
    context_length: int = option(1024, "tokens")
    d_head: int = option(32, "features of a head")
    precision: str = option("fp32", "of the tensors and matmuls", ("fp32", "bf16"))
    causal: bool = option(False, "with a causal mask")
    backward: bool = option(False, "measure forward and backward too, where the variant has one")
    warmup_steps: int = option(3, "calls before the measured ones; none more of one above a second", cpu=1, least=0)
    steps: int = option(10, "measured calls; at most 3 of one above a second", cpu=5)


@dataclass
class VariantPass:
    """Errors, memory and times of one pass; each is None until it is measured.

    Attributes:
        max_error: the largest difference from PyTorch's attention in fp64 ÷ the largest value, the worst tensor's.
        relative_error: ‖difference‖ ÷ ‖exact‖ of the worst tensor.
        peak_bytes, total_bytes: the most memory above the inputs, and the sum of all allocations.
        steps: measured calls; their times are as in ``Times``.
    """

    max_error: float | None = None
    relative_error: float | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None
    steps: int | None = None
    ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    cv: float | None = None


@dataclass
class VariantsFigures:
    """The passes of a variant, the tolerances of their errors, and the bytes of queries, keys and values."""

    inputs_bytes: int | None = None
    tolerance: float | None = None
    relative_tolerance: float | None = None
    forward: VariantPass | None = None
    forward_backward: VariantPass | None = None


TARGET = CaseTarget("profiling_targets.variants", VariantsCase, VariantsFigures)


def _shape_options(text: str) -> dict[str, Any]:
    """Returns the options that a text such as 1x4x1024x32:bf16 stands for."""
    found = _SHAPE.fullmatch(text)
    sides = [int(side) for side in found.groups()[:4]] if found else []
    if not found or 0 in sides:
        raise ConfigurationError(f"{text!r} is no shape", "Write batch size x heads x tokens x d_head: 1x4x1024x32")
    names = ("batch_size", "heads", "context_length", "d_head")
    return {**dict(zip(names, sides, strict=True)), "precision": found[5] or "fp32"}


def _cases(settings: Settings) -> Iterator[Task[VariantsCase]]:
    for shape in map(_shape_options, settings["shape"]):
        yield from grid(TARGET, settings, None, **{key: (value,) for key, value in shape.items()})


def _answers(results: Results) -> Iterator[Words]:
    """Yields gains over naive without a mask, and the largest errors."""
    rows = results.rows_of(TARGET)
    gains: dict[str, list[float]] = {}
    for row in rows:
        if not row.case.causal and (gain := results.gain(row, "forward", implementation="naive")):
            gains.setdefault(row.case.implementation, []).append(gain)
    if gains:
        words = ", ".join(f"{name} {span(factors)}" for name, factors in gains.items())
        yield f"Speed-up over naive, forward, not causal: {words}."
    for precision in dict.fromkeys(row.case.precision for row in rows):
        alike = [row for row in rows if row.case.precision == precision]
        errors = [error for row in alike for name in PASSES if (error := figure(row, f"{name}.max_error")) is not None]
        tolerance = max(row.figures.tolerance or 0 for row in alike)
        if errors:
            yield f"The largest error of any variant in {precision} is {max(errors):.1e} (tolerance {tolerance:.0e})."


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows_of(TARGET)
    yield Paragraph(_VARIANTS)
    for name, title in PASSES.items():

        def over_naive(row: AnyRow, name: str = name) -> Cell:
            return results.gain(row, name, implementation="naive")

        def over_inputs(row: AnyRow, name: str = name) -> Cell:
            return ratio(figure(row, f"{name}.peak_bytes"), row.figures.inputs_bytes)

        def error(row: AnyRow, name: str = name) -> Cell:
            return scientific(figure(row, f"{name}.max_error"))

        caption = f"{title.capitalize()}: time, mean ± standard deviation, and memory above the inputs:"
        made = rows_table(
            rows, caption, ("ms", "ms", name), ("over naive", "factor", over_naive),
            ("peak", "bytes", f"{name}.peak_bytes"), ("allocated", "bytes", f"{name}.total_bytes"),
            ("peak ÷ inputs", "factor", over_inputs), ("error", "text", error), status=name == "forward",
        )  # fmt: skip
        if made.rows:
            yield made if name == "forward" else Details(title.capitalize(), (made,))
    for causal, mask in ((False, "not causal"), (True, "causal")):
        shown = [row for row in rows if row.case.causal == causal]
        shape = namer(shown, ["implementation"])
        gains = {(shape(row), row.case.implementation): results.gain(row, "forward", implementation="naive")
                 for row in shown if row.case.implementation != "naive"}  # fmt: skip
        title = f"Speed-up over naive, forward, {mask}"
        yield from bars(f"variants-speed-up-{mask.replace(' ', '-')}", title, gains, "naive's time ÷ the variant's")
    yield from curves(
        "variants-memory-by-tokens", "Peak memory of forward by tokens", [row for row in rows if not row.case.causal],
        lambda row: ratio(figure(row, "forward.peak_bytes"), 2**20), "MiB above the inputs",
    )  # fmt: skip


BENCH = Bench(
    name="variants",
    title="attention variants, their memory and their time",
    summary="Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    options=(
        Option(
            ("1x4x512x32", "1x4x1024x32", "1x4x2048x32", "1x4x1024x64", "4x32x128x128:bf16", "64x32x4096x128:bf16"),
            "batch size x heads x tokens x d_head, in fp32, or with :bf16 in that",
            default_on_cpu=("1x4x512x32", "1x4x1024x32", "1x4x1024x64", "1x32x128x128"),
            several=True,
            name="shape",
        ),
        several(VariantsCase, "implementation", VARIANTS, ("naive", "blocked", "fused", "tiled", "torch")),
        several(VariantsCase, "causal", (False, True)),
        replace(options_of(VariantsCase)["backward"], default=True, default_on_cpu=False),
        *single(VariantsCase, "warmup_steps", "steps"),
    ),
    targets=(TARGET,),
    cases=_cases,
    how={
        "warm-up": "the check, the count of memory, and {warmup_steps} more of each call",
        "measured": "{steps} of each call; of one above a second at most 3, without more warm-up",
        "synchronized": "at the end of each call",
        "gradients": "forward under no_grad, backward to q, k and v into fresh tensors",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
