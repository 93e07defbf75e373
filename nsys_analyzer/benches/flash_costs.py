"""What the rows of the flash bench claim of the device: against the roofline, and for the check of physics."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.attention_costs import (
    AttentionShape,
    attention_backward_bytes,
    attention_backward_flops,
    attention_forward_bytes,
    attention_forward_flops,
    roofline_ms,
    square_bytes,
)
from nsys_analyzer.analysis.peaks import find_peaks
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.benches.physics import Rate, Residence

_BYTES = {"fp32": 4, "bf16": 2}
_TIGHTEST = 2
#: What is said of a rate whose FLOPs are those of three products in TF32, so that TF32's peak limits it.
THREE_PRODUCTS = "fp32 as 3xTF32, all three counted"
#: Passes over the scores of an unfused forward: the products write and read them, scale, mask, softmax do both.
_UNFUSED_PASSES = 8


@dataclass(frozen=True)
class Limits:
    """What the device can do in one precision, and who says so."""

    flops_per_s: float
    bytes_per_s: float
    source: str


def shape_of(row: Row) -> AttentionShape:
    """The shape of a row's attention."""
    case = row.case
    return AttentionShape(
        case["batch_size"], case["heads"], case["context_length"], case["d_head"], case["causal"],
        _BYTES[case["precision"]],
    )  # fmt: skip


def find_limits(results: Results, precision: str) -> Limits | None:
    """The datasheet's peaks of the GPU, else the measured ceilings; None where neither is known."""
    peaks = find_peaks(next((str(row.machine["gpu"]) for row in results.rows if row.machine.get("gpu")), None))
    if peaks and precision == "fp32" and _in_three(results):
        source = "the datasheet's peaks, a product in fp32 as three in TF32"
        return Limits(peaks.flops_per_s["tf32"] / 3, peaks.bytes_per_s, source)
    if peaks and precision in peaks.flops_per_s:
        return Limits(peaks.flops_per_s[precision], peaks.bytes_per_s, "the datasheet's peaks")
    ceiling = results.ceilings.get(precision)
    product, copy = (
        ceiling.figures.get(key) if ceiling else None for key in ("product_flops_per_s", "copy_bytes_per_s")
    )
    return Limits(product, copy, "the measured ceilings") if product and copy else None


def _in_three(results: Results) -> bool:
    """Whether our kernels make a product of fp32 of three in TF32, which is faster than CUDA cores in fp32."""
    return results.on_gpu and any(row.case.get("fp32_products") == "tf32x3" for row in results.rows)


def least_ms(row: Row, key: str, limits: Limits) -> float:
    """The roofline of one pass of a row, ``forward_ms``, ``backward_ms`` or their sum ``end_to_end_ms``."""
    shape = shape_of(row)
    forward, backward = (
        roofline_ms(flops(shape), moved(shape), limits.flops_per_s, limits.bytes_per_s)
        for flops, moved in (
            (attention_forward_flops, attention_forward_bytes),
            (attention_backward_flops, attention_backward_bytes),
        )
    )
    return {"forward_ms": forward, "backward_ms": backward, "end_to_end_ms": forward + backward}[key]


def rates(results: Results) -> list[Rate]:
    """The work of each pass that was measured: of fused attention what the roofline counts, of unfused its own."""
    return [
        rate
        for row in results.rows
        for key, name in (("forward_ms", "forward"), ("backward_ms", "backward"))
        if key in row.figures
        for rate in (_rate(row, key, name),)
    ]


def _rate(row: Row, key: str, name: str) -> Rate:
    shape, case, ms = shape_of(row), row.case, row.figures[key]
    label = f"{case['implementation']} {name}, d_head {case['d_head']}, context {case['context_length']:,}"
    forward = key == "forward_ms"
    if case["implementation"] == "unfused":  # the whole square; its backward keeps the weights and has four products
        square = square_bytes(shape)
        flops = (4 if forward else 8) * case["d_head"] * square // shape.bytes_per_number
        moved = (_UNFUSED_PASSES if case["causal"] else _UNFUSED_PASSES - 2) * square if forward else None
        return Rate(label, case["precision"], flops, moved, ms, 2 * square)
    flops = (attention_forward_flops if forward else attention_backward_flops)(shape)
    moved = (attention_forward_bytes if forward else attention_backward_bytes)(shape)
    if _makes_three(row):
        return Rate(f"{label}, {THREE_PRODUCTS}", "tf32", 3 * flops, moved, ms)
    return Rate(label, case["precision"], flops, moved, ms)


def _makes_three(row: Row) -> bool:
    """Whether a fused kernel on a GPU makes a product of fp32 of three in TF32, as SDPA's does by CUTLASS's 3xTF32."""
    case = row.case
    true_fp32 = case["device"] == "cpu" or (case["implementation"] == "flash" and case["fp32_products"] == "ieee")
    return case["precision"] == "fp32" and not true_fp32


def residences(results: Results) -> list[Residence]:
    """What lives at the end of backward, for the largest rows of each implementation."""
    found = []
    for implementation in dict.fromkeys(row.case["implementation"] for row in results.rows):
        rows = [row for row in results.of(implementation=implementation) if "peak_bytes" in row.figures]
        for row in sorted(rows, key=lambda row: -row.figures["peak_bytes"])[:_TIGHTEST]:
            shape = shape_of(row)
            least, why = 4 * shape.tensor_bytes + shape.lse_bytes, "output, three gradients, a number a row"
            if implementation == "unfused":
                least, why = 2 * square_bytes(shape) + shape.tensor_bytes, "weights, their gradient, output"
            label = (
                f"{implementation}, {row.case['precision']}, d_head {shape.d_head}, context {shape.context_length:,}"
            )
            found.append(Residence(label, row.figures["peak_bytes"], least, why))
    return found
