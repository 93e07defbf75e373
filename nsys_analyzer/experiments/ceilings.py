"""What a device reaches: a large product, and a large copy, measured before every experiment as ceilings for it."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.runs.rows import CaseTarget, option


@dataclass(frozen=True)
class CeilingsCase:
    """The ceilings in one precision."""

    device: str
    precision: str = option("fp32", "of the product", ("fp32", "tf32", "bf16"))


@dataclass
class CeilingsFigures:
    """The best rates of a product of square matrices and of a copy of a large tensor.

    Attributes:
        product_bits: bits of the mantissa that products keep: the precision that they really have.
        product_side: rows and columns of the matrices.
        product_flops_per_s: a multiplication and an addition for each term.
        copied_bytes: the size of the tensor.
        copy_bytes_per_s: bytes read and written.

    """

    product_bits: int | None = None
    product_side: int | None = None
    product_flops_per_s: float | None = None
    copied_bytes: int | None = None
    copy_bytes_per_s: float | None = None


TARGET = CaseTarget("profiling_targets.ceilings", CeilingsCase, CeilingsFigures)

#: Bits of the mantissa that products keep of their operands by precision, the hidden one left out: what tells the
#: precision that they really ran in.
MANTISSA_BITS = {"fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7}
#: The precision of products of fp32 or bf16 tensors by what they keep; of these, 10 bits are TF32's.
PRECISION_BY_BITS = {bits: precision for precision, bits in MANTISSA_BITS.items() if precision != "fp16"}
_TITLES = {"fp32": "fp32", "tf32": "TF32 (10 bits of mantissa)", "bf16": "bf16 (7 bits of mantissa)"}


def precision_title(bits: int) -> str:
    """What products of fp32 or bf16 tensors ran as, for a sentence."""
    return _TITLES.get(PRECISION_BY_BITS.get(bits, ""), f"{bits} bits")
