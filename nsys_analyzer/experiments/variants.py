"""Attention in several ways with the same result: error, time and memory of each, and its gain over the naive one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from nsys_analyzer.configuration import Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.attention import WithHeads, fused_rates
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, option, options_of, several, single
from nsys_analyzer.experiments.section import (
    MinimumMemory,
    Rate,
    bars,
    curves,
    each,
    endings,
    figure,
    fitted_exponent,
    formatted,
    mean_ms,
    ratio,
    section,
    span,
    spread,
)
from nsys_analyzer.report.model import Figure, Paragraph, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
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
class VariantsCase(WithHeads):
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
    def shape_name(self) -> str:
        """Its sizes and precision: 1×4×1,024×32 fp32."""
        return "×".join(f"{side:,}" for side in self.shape.sizes) + f" {self.precision}"

    @property
    def name(self) -> str:
        """The variant and its shape, in a sentence."""
        return f"{self.implementation} at {self.shape_name}{', causal' if self.causal else ''}"


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
VariantsRow: TypeAlias = Row[VariantsCase, VariantsFigures]
_Rows: TypeAlias = Mapping[VariantsCase, VariantsRow]


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
        yield from grid(
            TARGET,
            settings,
            lambda case: case.name,
            environment=None,
            **{key: (value,) for key, value in shape.items()},
        )


def _gain(rows: _Rows, row: VariantsRow, name: str = "forward") -> float | None:
    """Returns naive's time ÷ that of a variant; None where one of the two is missing."""
    naive = rows.get(replace(row.case, implementation="naive"))
    return ratio(mean_ms(naive, name), mean_ms(row, name))


def _bytes_of(row: VariantsRow, name: str, kind: str = "peak") -> int | None:
    """Returns the peak or the total memory of a pass; None where it was not measured."""
    return getattr(figure(row, name), f"{kind}_bytes", None)


def _largest_error(rows: Sequence[VariantsRow], names: Iterable[str], kind: str = "max") -> float | None:
    """Returns the largest max or relative error of some passes; None where none was checked."""
    errors = (getattr(figure(row, name), f"{kind}_error", None) for row in rows for name in names)
    return max((error for error in errors if error is not None), default=None)


def _status(row: VariantsRow, name: str) -> str:
    """Returns how one pass of a row ended; an ok row without the time of a pass never ran it."""
    if mean_ms(row, name) is not None:
        return "ok"
    asked = name == "forward" or row.case.backward
    return row.status if asked and not row.ok else "not run"


def _section(results: Results) -> Section:
    by_case = results.by_case(TARGET)
    rows = tuple(by_case.values())
    with_backward = any(mean_ms(row, "forward_backward") is not None for row in rows)
    families = _families(rows)
    return section(
        "variants",
        "attention variants, their memory and their time",
        results,
        rows,
        lambda row: row.case.name,
        answers=_answers(by_case, families, results.on_gpu),
        warmup=f"the check, the count of memory, and {each(rows, 'warmup_steps')} more of each call",
        measured=f"{each(rows, 'steps')} of each call; of one above a second at most 3, without more warm-up",
        synchronized="at the end of each call",
        gradients="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        blocks=(
            Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
            _errors(rows),
            _passes(by_case, "forward"),
            *([_passes(by_case, "forward_backward")] if with_backward else []),
            *(_growth_table(case, family) for case, family in families.items()),
            *_figures(by_case, families),
        ),
        definitions=_DEFINITIONS,
        rates=[rate for row in rows for rate in _rates(row)],
        memory=_minimum_memory(rows),
    )


def _answers(by_case: _Rows, families: Mapping[VariantsCase, _Family], on_gpu: bool) -> Iterator[Words]:
    """Yields gains over naive, errors, growth, and what ran out of memory."""
    rows = tuple(by_case.values())
    # On a GPU naive makes its causal mask in each call, and a gain over it would be one over the mask.
    for causal in (False,) if on_gpu else MASKS:
        gains: dict[str, list[float]] = {}
        for row in rows:
            name, gain = row.case.implementation, _gain(by_case, row)
            if gain and name != "naive" and row.case.causal == causal:
                gains.setdefault(name, []).append(gain)
        if gains:
            words = ", ".join(f"{name} {span(factors, 'factor')}" for name, factors in gains.items())
            yield f"Speed-up over naive, forward, {MASKS[causal]}: {words}."
    for precision in dict.fromkeys(row.case.precision for row in rows):
        alike = [row for row in rows if row.case.precision == precision]
        if tolerance := next((row.figures.tolerance for row in alike if row.figures.tolerance), None):
            worst = _largest_error(alike, PASSES) or 0
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."
    for family in list(families.values())[:1]:
        powers = ", ".join(f"{name} {peak:.2f}" for name, peak, _ in _growths(family) if peak is not None)
        yield f"Beyond a fixed part, peak memory of forward grows with the tokens to the power: {powers}."

    def failed_name(row: VariantsRow) -> str:
        """Returns the case, and where its forward pass was measured, that only backward failed."""
        return f"{row.case.name}, backward only" if mean_ms(row, "forward") else row.case.name

    yield from endings(rows, failed_name, "No variant ran out of memory.")


def _errors(rows: Sequence[VariantsRow]) -> Table:
    """Returns the largest error of each variant in each precision, over all shapes."""
    groups: dict[tuple[str, str], list[VariantsRow]] = {}
    for row in rows:
        if _largest_error([row], ["forward"]) is not None:
            groups.setdefault((row.case.precision, row.case.implementation), []).append(row)

    def worst(name: str, kind: str) -> Callable[[list[VariantsRow]], str | None]:
        return lambda rows: formatted(_largest_error(rows, [name], kind), ".1e")

    def tolerance(name: str) -> Callable[[list[VariantsRow]], str | None]:
        return lambda rows: next((f"{most:.0e}" for row in rows if (most := figure(row, name)) is not None), None)

    fields: tuple[Field[list[VariantsRow]], ...] = (
        Field("variant", "text", lambda rows: rows[0].case.implementation),
        Field("precision", "text", lambda rows: rows[0].case.precision),
        Field("cases", "count", len),
        Field("forward", "text", worst("forward", "max")),
        Field("gradients", "text", worst("forward_backward", "max")),
        Field("tolerance", "text", tolerance("tolerance")),
        Field("‖forward‖", "text", worst("forward", "relative")),
        Field("‖gradients‖", "text", worst("forward_backward", "relative")),
        Field("‖tolerance‖", "text", tolerance("relative_tolerance")),
    )
    return table(fields, groups.values(), "Largest error of each variant, checked before it was timed:", names=2)


def _passes(by_case: _Rows, name: str) -> Table:
    """Returns time and memory of a pass of each row, and its gain over naive."""

    def full_over_causal(row: VariantsRow) -> float | None:
        full = by_case.get(replace(row.case, causal=False))
        return ratio(mean_ms(full, name), mean_ms(row, name)) if row.case.causal else None

    fields: tuple[Field[VariantsRow], ...] = (
        Field("shape", "text", lambda row: row.case.shape_name),
        Field("variant", "text", lambda row: row.case.implementation),
        Field("mask", "text", lambda row: "causal" if row.case.causal else "none"),
        Field("ms", "ms", lambda row: spread(figure(row, name))),
        Field("over naive", "factor", lambda row: _gain(by_case, row, name)),
        Field("without mask ÷ causal", "factor", full_over_causal),
        Field("peak", "bytes", lambda row: _bytes_of(row, name)),
        Field("allocated", "bytes", lambda row: _bytes_of(row, name, "total")),
        Field("peak ÷ inputs", "factor", lambda row: ratio(_bytes_of(row, name), row.figures.inputs_bytes)),
        Field("status", "text", lambda row: _status(row, name)),
    )
    rows = [row for row in by_case.values() if _status(row, name) != "not run"]
    caption = f"{PASSES[name].capitalize()}: time, mean ± standard deviation, and memory above the inputs:"
    return table(fields, rows, caption, names=3)


#: Rows without a mask that differ in their tokens alone, the shortest first, by variant.
_Family: TypeAlias = Mapping[str, Sequence[VariantsRow]]


def _families(rows: Sequence[VariantsRow]) -> dict[VariantsCase, _Family]:
    """Returns the rows over several lengths, by what they have in common."""
    found: dict[VariantsCase, dict[str, list[VariantsRow]]] = {}
    for row in sorted(rows, key=lambda row: row.case.context_length):
        if not row.case.causal:
            alike = replace(row.case, implementation="", context_length=0)
            found.setdefault(alike, {}).setdefault(row.case.implementation, []).append(row)
    return {case: family for case, family in found.items() if len(_lengths(family)) > 1}


def _lengths(family: _Family) -> list[int]:
    return sorted({row.case.context_length for rows in family.values() for row in rows})


def _growths(family: _Family) -> Iterator[tuple[str, float | None, float | None]]:
    """Yields the powers of the tokens with which peak and total memory of a variant grow, None where not known."""
    for name, rows in family.items():
        peak, total = (
            _power([(row.case.context_length, _bytes_of(row, "forward", kind)) for row in rows])
            for kind in ("peak", "total")
        )
        if peak or total:
            yield name, peak, total


def _power(points: Sequence[tuple[int, float | None]]) -> float | None:
    """Returns the power p of a + b·Nᵖ through the last three points, of N, 2N and 4N say; of two points that of b·Nᵖ.

    What does not grow, such as tiles of a fixed size, drops out of the differences: these go with Nᵖ alone.
    """
    last = [(n, value) for n, value in points if value is not None][-3:]
    steps = [(first[0], second[1] - first[1]) for first, second in pairwise(last)]
    even = len(last) == 3 and last[0][0] * last[2][0] == last[1][0] ** 2
    return fitted_exponent(steps if even and all(step > 0 for _, step in steps) else last[-2:])


def _growth_table(case: VariantsCase, family: _Family) -> Table:
    fields: tuple[Field[tuple[str, float | None, float | None]], ...] = (
        Field("variant", "text", lambda growth: growth[0]),
        Field("peak", "text", lambda growth: formatted(growth[1], ".2f")),
        Field("allocated", "text", lambda growth: formatted(growth[2], ".2f")),
    )
    first, *_, last = _lengths(family)
    of = f"{case.batch_size} × {case.heads} heads, d {case.d_head}, {case.precision}, not causal"
    caption = f"Growth from {first:,} to {last:,} tokens ({of}): the power p of a + b·Nᵖ:"
    return table(fields, _growths(family), caption)


def _figures(by_case: _Rows, families: Mapping[VariantsCase, _Family]) -> Iterator[Figure]:
    """Yields the gain of each variant over naive, forward, and its peak memory over the tokens."""
    for causal, words in MASKS.items():
        rows = [row for row in by_case.values() if row.case.causal == causal and row.case.implementation != "naive"]
        gains = {(row.case.shape_name, row.case.implementation): _gain(by_case, row) for row in rows}
        key, title = f"variants-speed-up-{words.replace(' ', '-')}", f"Speed-up over naive, forward, {words}"
        yield from bars(key, title, gains, "naive's time ÷ the variant's")
    for number, (case, family) in enumerate(families.items(), 1):
        points = {
            name: [(row.case.context_length, ratio(_bytes_of(row, "forward"), 2**20)) for row in rows]
            for name, rows in family.items()
        }
        key = f"variants-memory-by-tokens{f'-{number}' if number > 1 else ''}"
        title = f"Peak memory of forward by tokens, {case.heads} heads, d {case.d_head}"
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
        if measured := _bytes_of(row, "forward"):
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
    precisions=lambda settings: tuple(dict.fromkeys(_shape_options(text)["precision"] for text in settings["shape"])),
    targets=(TARGET,),
)
