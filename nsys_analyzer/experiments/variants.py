"""Attention in several ways with the same result: error, time and memory of each, and its gain over the naive one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from nsys_analyzer.analysis.transformer.costs import AttentionShape
from nsys_analyzer.configuration import Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.attention import fused_rates
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.model import (
    Bench,
    Results,
    Row,
    Settings,
    Task,
    grid,
    option,
    options_of,
    several,
    single,
)
from nsys_analyzer.experiments.section import (
    bars,
    curves,
    each,
    endings,
    figure,
    fitted_exponent,
    mean_ms,
    ratio,
    section,
    span,
    spread,
)
from nsys_analyzer.report.model import Block, Figure, Paragraph, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.runs.rows import CaseTarget
from nsys_analyzer.text import Words, phrase

#: The variants of attention, in PyTorch's operators; of these, the ones that C++ has for a CPU, forward only.
VARIANTS = ("naive", "blocked", "fused", "tiled", "flash", "torch")
CPP_VARIANTS = ("naive", "blocked", "fused", "flash")
_STORES_SCORES = ("naive", "blocked")
#: Names of the figures of a pass, and of the pass.
PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
MASKS = {False: "not causal", True: "causal"}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(fp32|bf16))?")
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

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs."""
        sizes = (self.batch_size, self.heads, self.context_length, self.d_head)
        return AttentionShape(*sizes, self.causal, self.precision)

    @property
    def name(self) -> str:
        """The variant and its shape, in a sentence."""
        return f"{self.implementation} at {shape_name(self.shape)}{', causal' if self.causal else ''}"


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
VariantsRow = Row[VariantsCase, VariantsFigures]


def shape_name(shape: AttentionShape) -> str:
    """Returns such as 1×4×1,024×32 fp32."""
    return "×".join(f"{side:,}" for side in shape.sizes) + f" {shape.precision}"


def _parsed(text: str) -> dict[str, Any]:
    """Returns the options that a text such as 1x4x1024x32:bf16 stands for."""
    found = _SHAPE.fullmatch(text)
    sides = [int(side) for side in found.groups()[:4]] if found else []
    if not found or 0 in sides:
        raise ConfigurationError(f"{text!r} is no shape", "Write batch size x heads x tokens x d_head: 1x4x1024x32")
    names = ("batch_size", "heads", "context_length", "d_head")
    return {**dict(zip(names, sides, strict=True)), "precision": found[5] or "fp32"}


def _cases(settings: Settings) -> Iterator[Task[VariantsCase]]:
    for shape in map(_parsed, settings["shape"]):
        values = {name: (value,) for name, value in shape.items()}
        yield from grid(TARGET, settings, lambda case: case.name, environment=None, **values)


class Variants:
    """The rows side by side; ``shapes``, ``names`` and ``precisions`` are in the order of the rows."""

    def __init__(self, results: Results) -> None:
        self.rows, self.on_gpu = results.rows_of(TARGET), results.on_gpu
        self.shapes = list(dict.fromkeys(replace(row.case.shape, causal=False) for row in self.rows))
        self.names = list(dict.fromkeys(row.case.implementation for row in self.rows))
        self.precisions = list(dict.fromkeys(shape.precision for shape in self.shapes))
        self._rows = {(row.case.shape, row.case.implementation): row for row in self.rows}

    def find(self, shape: AttentionShape, implementation: str, causal: bool) -> VariantsRow | None:
        """Returns the row of a variant at a shape."""
        return self._rows.get((replace(shape, causal=causal), implementation))

    def gain(self, row: VariantsRow, name: str = "forward") -> float | None:
        """Returns naive's time ÷ that of a variant; None where one of the two is missing."""
        return ratio(mean_ms(self.find(row.case.shape, "naive", row.case.causal), name), mean_ms(row, name))

    def families(self) -> list[list[AttentionShape]]:
        """Returns shapes that differ in their tokens alone, where there are several, the shortest first."""
        groups: dict[AttentionShape, list[AttentionShape]] = {}
        for shape in sorted(self.shapes, key=lambda shape: shape.context_length):
            groups.setdefault(replace(shape, context_length=0), []).append(shape)
        return [group for group in groups.values() if len(group) > 1]


def bytes_of(row: VariantsRow | None, name: str, kind: str = "peak") -> int | None:
    """Returns the peak or the total memory of a pass; None where it was not measured."""
    return getattr(figure(row, name), f"{kind}_bytes", None)


def error_of(row: VariantsRow, name: str, kind: str = "max") -> float | None:
    """Returns the max or the relative error of a pass; None where it was not checked."""
    return getattr(figure(row, name), f"{kind}_error", None)


def status(row: VariantsRow, name: str) -> str:
    """Returns how one pass of a row ended; an ok row without the time of a pass never ran it."""
    if mean_ms(row, name) is not None:
        return "ok"
    asked = name == "forward" or row.case.backward
    return row.status if asked and not row.ok else "not run"


def _section(results: Results) -> Section:
    variants = Variants(results)
    rows = variants.rows
    with_backward = any(mean_ms(row, "forward_backward") is not None for row in rows)
    return section(
        "variants",
        "attention variants, their memory and their time",
        results,
        rows,
        lambda row: row.case.name,
        answers=_answers(variants),
        warmup=f"the check, the count of memory, and {each(rows, 'warmup_steps')} more of each call",
        measured=f"{each(rows, 'steps')} of each call; of one above a second at most 3, without more warm-up",
        synchronized="at the end of each call",
        gradients="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        blocks=(
            Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
            _errors(variants),
            _passes(variants, "forward"),
            *([_passes(variants, "forward_backward")] if with_backward else []),
            *_growth_tables(variants),
            *_figures(variants),
        ),
        definitions=_DEFINITIONS,
        rates=[rate for row in rows for rate in _rates(row)],
        memory=_minimum_memory(rows),
    )


def _answers(variants: Variants) -> Iterator[Words]:
    """Yields gains over naive, errors, growth, and what ran out of memory."""
    # On a GPU naive makes its causal mask in each call, and a gain over it would be one over the mask.
    for causal in (False,) if variants.on_gpu else MASKS:
        gains: dict[str, list[float]] = {}
        for row in variants.rows:
            name, gain = row.case.implementation, variants.gain(row)
            if gain and name != "naive" and row.case.causal == causal:
                gains.setdefault(name, []).append(gain)
        if gains:
            words = ", ".join(f"{name} {span(factors, 'factor')}" for name, factors in gains.items())
            yield f"Speed-up over naive, forward, {MASKS[causal]}: {words}."
    for precision in variants.precisions:
        rows = [row for row in variants.rows if row.case.precision == precision]
        worst = max((error_of(row, name) or 0 for row in rows for name in PASSES), default=0)
        if tolerance := next((row.figures.tolerance for row in rows if row.figures.tolerance), None):
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."
    for _, family in list(growths(variants))[:1]:
        powers = ", ".join(f"{growth.variant} {growth.peak:.2f}" for growth in family if growth.peak is not None)
        yield f"Beyond a fixed part, peak memory of forward grows with the tokens to the power: {powers}."

    def failed_name(row: VariantsRow) -> str:
        """Returns the case, and where its forward pass was measured, that only backward failed."""
        return f"{row.case.name}, backward only" if mean_ms(row, "forward") else row.case.name

    yield from endings(variants.rows, failed_name, "No variant ran out of memory.")


def _errors(variants: Variants) -> Table:
    """Returns the largest error of each variant in each precision, over all shapes."""

    def worst(rows: Sequence[VariantsRow], name: str, kind: str) -> str | None:
        found = [error for row in rows if (error := error_of(row, name, kind)) is not None]
        return f"{max(found):.1e}" if found else None

    def tolerance(rows: Sequence[VariantsRow], name: str) -> str | None:
        return next((f"{most:.0e}" for row in rows if (most := figure(row, name)) is not None), None)

    fields: tuple[Field[list[VariantsRow]], ...] = (
        Field("variant", "text", lambda rows: rows[0].case.implementation),
        Field("precision", "text", lambda rows: rows[0].case.precision),
        Field("cases", "count", len),
        Field("forward", "text", lambda rows: worst(rows, "forward", "max")),
        Field("gradients", "text", lambda rows: worst(rows, "forward_backward", "max")),
        Field("tolerance", "text", lambda rows: tolerance(rows, "tolerance")),
        Field("‖forward‖", "text", lambda rows: worst(rows, "forward", "relative")),
        Field("‖gradients‖", "text", lambda rows: worst(rows, "forward_backward", "relative")),
        Field("‖tolerance‖", "text", lambda rows: tolerance(rows, "relative_tolerance")),
    )
    groups: dict[tuple[str, str], list[VariantsRow]] = {}
    for row in variants.rows:
        if error_of(row, "forward") is not None:
            groups.setdefault((row.case.precision, row.case.implementation), []).append(row)
    return table(fields, groups.values(), "Largest error of each variant, checked before it was timed:", names=2)


def _passes(variants: Variants, name: str) -> Table:
    """Returns time and memory of a pass of each row, and its gain over naive."""

    def full_over_causal(row: VariantsRow) -> float | None:
        full = variants.find(row.case.shape, row.case.implementation, False)
        return ratio(mean_ms(full, name), mean_ms(row, name)) if row.case.causal else None

    fields: tuple[Field[VariantsRow], ...] = (
        Field("shape", "text", lambda row: shape_name(row.case.shape)),
        Field("variant", "text", lambda row: row.case.implementation),
        Field("mask", "text", lambda row: "causal" if row.case.causal else "none"),
        Field("ms", "ms", lambda row: spread(figure(row, name))),
        Field("over naive", "factor", lambda row: variants.gain(row, name)),
        Field("without mask ÷ causal", "factor", full_over_causal),
        Field("peak", "bytes", lambda row: bytes_of(row, name)),
        Field("allocated", "bytes", lambda row: bytes_of(row, name, "total")),
        Field("peak ÷ inputs", "factor", lambda row: ratio(bytes_of(row, name), row.figures.inputs_bytes)),
        Field("status", "text", lambda row: status(row, name)),
    )
    rows = [row for row in variants.rows if status(row, name) != "not run"]
    caption = f"{PASSES[name].capitalize()}: time, mean ± standard deviation, and memory above the inputs:"
    return table(fields, rows, caption, names=3)


class Growth(NamedTuple):
    """The power of the tokens with which the memory of a variant grows, None where it is not known."""

    variant: str
    peak: float | None
    allocated: float | None


def growths(variants: Variants) -> Iterator[tuple[list[AttentionShape], list[Growth]]]:
    """Yields shapes that differ in their tokens alone, with the growth of every variant over them."""
    for family in variants.families():
        found = []
        for name in variants.names:
            rows = [(shape.context_length, variants.find(shape, name, False)) for shape in family]
            powers = (_power([(n, bytes_of(row, "forward", kind)) for n, row in rows]) for kind in ("peak", "total"))
            found.append(Growth(name, *powers))
        yield family, [growth for growth in found if any(growth[1:])]


def _power(points: Sequence[tuple[int, float | None]]) -> float | None:
    """Returns the power p of a + b·Nᵖ through the last three points, of N, 2N and 4N say; of two points that of b·Nᵖ.

    What does not grow, such as tiles of a fixed size, drops out of the differences: these go with Nᵖ alone.
    """
    last = [(n, value) for n, value in points if value is not None][-3:]
    steps = [(first[0], second[1] - first[1]) for first, second in pairwise(last)]
    even = len(last) == 3 and last[0][0] * last[2][0] == last[1][0] ** 2
    return fitted_exponent(steps if even and all(step > 0 for _, step in steps) else last[-2:])


def _growth_tables(variants: Variants) -> Iterator[Block]:
    """Yields the growth of every variant, a table for shapes that differ in their tokens alone."""

    def written(power: float | None) -> str | None:
        return None if power is None else f"{power:.2f}"

    fields: tuple[Field[Growth], ...] = (
        Field("variant", "text", lambda growth: growth.variant),
        Field("peak", "text", lambda growth: written(growth.peak)),
        Field("allocated", "text", lambda growth: written(growth.allocated)),
    )
    for (first, *_, last), found in growths(variants):
        tokens = f"{first.context_length:,} to {last.context_length:,} tokens"
        of = f"{first.batch_size} × {first.heads} heads, d {first.d_head}, {first.precision}, not causal"
        yield table(fields, found, f"Growth from {tokens} ({of}): the power p of a + b·Nᵖ:")


def _figures(variants: Variants) -> Iterator[Figure]:
    """Yields the gain of each variant over naive, forward, and its peak memory over the tokens."""
    for causal, words in MASKS.items():
        rows = [row for row in variants.rows if row.case.causal == causal and row.case.implementation != "naive"]
        gains = {(shape_name(row.case.shape), row.case.implementation): variants.gain(row) for row in rows}
        key, title = f"variants-speed-up-{words.replace(' ', '-')}", f"Speed-up over naive, forward, {words}"
        yield from bars(key, title, gains, "naive's time ÷ the variant's")
    for number, family in enumerate(variants.families()):
        points: dict[str, list[tuple[float, float | None]]] = {name: [] for name in variants.names}
        for shape, name in product(family, variants.names):
            size = bytes_of(variants.find(shape, name, False), "forward")
            points[name].append((shape.context_length, None if size is None else size / 2**20))
        key = f"variants-memory-by-tokens{f'-{number + 1}' if number else ''}"
        title = f"Peak memory of forward by tokens, {family[0].heads} heads, d {family[0].d_head}"
        yield from curves(key, title, points, "MiB above the inputs")


def _rates(row: VariantsRow) -> Iterator[Rate]:
    in_three = (row.case.device, row.case.implementation, row.case.precision) == ("cuda", "torch", "fp32")
    passes = {"forward": "forward", "forward_backward": "and backward"}
    return fused_rates(row, f"{{}}, {row.case.name}", passes, in_three=in_three)


def _minimum_memory(rows: Sequence[VariantsRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Yields the memory of each variant: the output of forward, and of two of them every score."""
    for row in rows:
        shape, name = row.case.shape, row.case.implementation
        scores, why = (shape.square_bytes, "output and scores") if name in _STORES_SCORES else (0, "output")
        if measured := bytes_of(row, "forward"):
            yield name, MinimumMemory(row.case.name, measured, shape.tensor_bytes + scores, why)


BENCH = Bench(
    "variants",
    "Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    (
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
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: tuple(dict.fromkeys(_parsed(text)["precision"] for text in settings["shape"])),
    targets=(TARGET,),
)
