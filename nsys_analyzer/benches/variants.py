"""Attention in several ways: the same result from other memory, and what each way gains over the naive one."""

from __future__ import annotations

import re

from nsys_analyzer.analysis.attention_costs import attention_forward_bytes, attention_forward_flops, square_bytes
from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.flash_costs import THREE_PRODUCTS
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Settings
from nsys_analyzer.benches.physics import Rate, Residence, physics
from nsys_analyzer.benches.variants_answers import answers, at_asked_shapes, flags, label
from nsys_analyzer.benches.variants_growth import growth, memory_by_length
from nsys_analyzer.benches.variants_tables import (
    BOTH,
    FORWARD,
    Shape,
    errors,
    implementations,
    memory,
    memory_figure,
    shape_of,
    speed_up_figures,
    times,
)
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Section
from nsys_analyzer.text import marked

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
_ON_CPU = marked(
    "*Variants.* naive, blocked, fused and flash are C++ on all threads, without a library's products: naive makes all "
    "N² scores in three passes of plain loops, blocked makes both products tile by tile, fused goes query by query and "
    "takes four keys at a time, flash keeps one tile of scores with an online softmax. Blocked and flash share their "
    "products, so that between these two memory makes the difference; torch is PyTorch's scaled_dot_product_attention."
)
_ON_GPU = marked(
    "*Variants.* naive is product, mask, softmax, product over all N² scores; blocked makes the products in tiles of "
    "256; fused goes by blocks of 128 queries, whose scores backward makes anew; tiled is FlashAttention-2 in "
    "PyTorch's operators, flash the same as Triton kernels; torch is PyTorch's scaled_dot_product_attention."
)
_DEFINITIONS = marked(
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
_UNLIKE = marked(
    "*Products in fp32* are unlike ones: flash makes true fp32 products, which only CUDA cores do; the kernel that "
    "PyTorch takes for fp32 makes each of three in TF32 on tensor cores; the others are cuBLAS's in true fp32."
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
    found = (*precision_warnings(results), *flags(results))
    with_backward = any(f"{BOTH}_ms" in row.figures for row in results.rows)
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(answers(results))),
        *((Listing(asked),) if (asked := tuple(at_asked_shapes(results))) else ()),
        conditions(
            results,
            warmup=f"the check, the count of memory, and {_each(results, 'warmup_steps')} more of each call",
            steps=f"{_each(results, 'steps')} of each call; of one above a second at most 3, without more warm-up",
            synchronized="at the end of each call",
            grad="forward under no_grad" + (", backward to q, k and v into fresh tensors" if with_backward else ""),
        ),
        Paragraph(_ON_GPU if results.on_gpu else _ON_CPU),
        *((Listing(found),) if found else ()),
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
        Paragraph(" ".join((_DEFINITIONS, *(_MASK_ON_GPU,) * results.on_gpu, *_unlike_products(results)))),
    )
    return Section("bench-variants", "Bench: attention variants, their memory and their time", blocks)


def _each(results: Results, key: str) -> str:
    return ", ".join(str(value) for value in sorted({row.case[key] for row in results.rows}))


def _unlike_products(results: Results) -> tuple[str, ...]:
    found = {row.case["implementation"] for row in results.of(device="cuda", precision="fp32")}
    return (_UNLIKE,) if found & {"flash", "torch"} else ()


def _rates(results: Results) -> list[Rate]:
    """The work that no variant can avoid: of causal attention the visible scores, of backward four products."""
    found = []
    for row in results.rows:
        cost = shape_of(row).cost(row.case["causal"])
        flops, precision, said = attention_forward_flops(cost), str(row.case["precision"]), label(row)
        if row.case["device"] == "cuda" and (row.case["implementation"], precision) == ("torch", "fp32"):
            flops, precision, said = 3 * flops, "tf32", f"{said}, {THREE_PRODUCTS}"
        if f"{FORWARD}_ms" in row.figures:
            ms = row.figures[f"{FORWARD}_ms"]
            found.append(Rate(f"forward, {said}", precision, flops, attention_forward_bytes(cost), ms))
        if f"{BOTH}_ms" in row.figures:
            found.append(Rate(f"and backward, {said}", precision, 3 * flops, None, row.figures[f"{BOTH}_ms"]))
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
            found.append(Residence(label(row), row.figures[f"{FORWARD}_peak_bytes"], least, why))
    return found


BENCH = Bench(
    "variants",
    "Attention naive, blocked, fused, flash and PyTorch's own: errors, time and all memory, causal and not.",
    _OPTIONS,
    _cases,
    _section,
    precisions=_precisions,
)
