"""The precision of matmuls: how it is asked for, and how it is measured."""

from __future__ import annotations

import torch


def set_precision(precision: str) -> None:
    """Lets matmuls of fp32 tensors run as TF32 for ``tf32``, and keeps them in fp32 for others."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def kept_bits(device: str, dtype: torch.dtype = torch.float32) -> int:
    """Bits of the mantissa that a matmul keeps of its operands: 23 for fp32, 10 for TF32 and fp16, 7 for bf16.

    Found by multiplying 1 + 2⁻ᵏ with one, for each k: what the settings say is not what ran, since an environment
    variable such as ``NVIDIA_TF32_OVERRIDE`` outranks them.
    """
    side = 256  # a size that tensor cores take
    bits = torch.arange(1, 24, device=device, dtype=torch.float64)
    values = torch.zeros(side, side, device=device, dtype=dtype)
    values[0, :23] = (1 + 2.0**-bits).to(dtype)  # the k-th column of the first row
    one = torch.eye(side, device=device, dtype=dtype)
    came_through = (values @ one)[0, :23].double() == 1 + 2.0**-bits
    return int(came_through.long().cumprod(0).sum().item())
