"""The ceilings of a device: a large matmul and a large copy, measured before every experiment."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.experiments.model import CaseTarget, option


@dataclass(frozen=True)
class CeilingsCase:
    """The ceilings in one precision."""

    device: str
    precision: str = option("fp32", "of the matmul", ("fp32", "tf32", "bf16"))


@dataclass
class CeilingsFigures:
    """The best rates of a matmul of square matrices and of a copy of a large tensor.

    Attributes:
        product_bits: bits of the mantissa that matmuls keep of their operands: the precision that they really have.
        product_side: rows and columns of the matrices.
        copy_bytes_per_s: bytes read and written.
    """

    product_bits: int | None = None
    product_side: int | None = None
    product_flops_per_s: float | None = None
    copied_bytes: int | None = None
    copy_bytes_per_s: float | None = None


TARGET = CaseTarget("profiling_targets.ceilings", CeilingsCase, CeilingsFigures)

#: Bits of the mantissa, without the hidden one, that matmuls keep of their operands in each precision.
MANTISSA_BITS = {"fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7}
#: The precision of matmuls of fp32 or bf16 tensors by the bits that they keep; of these, 10 bits are TF32's.
_PRECISION_BY_BITS = {bits: precision for precision, bits in MANTISSA_BITS.items() if precision != "fp16"}
_TITLES = {"fp32": "fp32", "tf32": "TF32 (10 bits of mantissa)", "bf16": "bf16 (7 bits of mantissa)"}


def precision_found(bits: int | None, asked: str) -> str:
    """The precision of matmuls that keep so many bits; the one asked for where they were not counted."""
    return _PRECISION_BY_BITS.get(bits or 0, asked)


def precision_title(bits: int) -> str:
    """The precision of matmuls of fp32 or bf16 tensors that keep so many bits, for a sentence."""
    return _TITLES.get(precision_found(bits, ""), f"{bits} bits")
