"""Bits of the mantissa that products keep of their operands: what tells the precision that they really ran in."""

from __future__ import annotations

#: Bits of a mantissa by precision, the hidden one left out.
MANTISSA_BITS = {"fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7}
#: The precision of products of fp32 or bf16 tensors by what they keep; of these, 10 bits are TF32's.
PRECISION_BY_BITS = {bits: precision for precision, bits in MANTISSA_BITS.items() if precision != "fp16"}
_TITLES = {"fp32": "fp32", "tf32": "TF32 (10 bits of mantissa)", "bf16": "bf16 (7 bits of mantissa)"}


def precision_title(bits: int) -> str:
    """What products of fp32 or bf16 tensors ran as, for a sentence."""
    return _TITLES.get(PRECISION_BY_BITS.get(bits, ""), f"{bits} bits")
