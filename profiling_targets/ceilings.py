"""The rates of a large matmul and of a large copy on this device: ceilings for what other programs claim.

``python -m profiling_targets.ceilings --precision bf16`` prints them.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from nsys_analyzer.experiments.section import TARGET, CeilingsCase, CeilingsFigures
from profiling_targets.harness import kept_bits, main, set_precision, times_ms

_WARMUP, _STEPS = 3, 10
_SIDE = {"cuda": 8192, "cpu": 1024}
#: Bytes of the tensor that is copied: several times the last cache.
_COPIED = {"cuda": 2**32, "cpu": 2**28}


def measure(case: CeilingsCase, figures: CeilingsFigures) -> None:
    """Times a matmul of square matrices and the copy of a large tensor; the best of ten, for it is a ceiling."""
    set_precision(case.precision)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    figures.product_bits = kept_bits(case.device, dtype)
    side = _SIDE[case.device]
    matrix = torch.randn(side, side, device=case.device, dtype=dtype)
    fastest_ms = min(times_ms(partial(torch.matmul, matrix, matrix.T), case.device, _WARMUP, _STEPS))
    figures.product_side = side
    figures.product_flops_per_s = 2 * side**3 / fastest_ms * 1e3  # a multiplication and an addition for each term
    del matrix
    source = torch.zeros(_COPIED[case.device] // 4, device=case.device)
    target = torch.empty_like(source)
    fastest_ms = min(times_ms(lambda: target.copy_(source), case.device, _WARMUP, _STEPS))
    figures.copied_bytes = _COPIED[case.device]
    figures.copy_bytes_per_s = 2 * _COPIED[case.device] / fastest_ms * 1e3  # read once, written once


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
