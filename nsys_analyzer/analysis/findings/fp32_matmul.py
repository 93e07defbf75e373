"""Matmuls run in fp32 on the CUDA cores, where the GPU has tensor cores for TF32 and bf16."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_work, three, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.kernels.precision import gemm_precision
from nsys_analyzer.analysis.transformer.peaks import find_peaks

#: How much faster TF32 is than fp32 in practice, of what the peaks say: the least and the most.
_OF_PEAK = (0.3, 0.8)
#: Products with a vector read each number once: no other cores make them faster.
_NO_TILES = re.compile(r"(?i)gemv|dot_kernel")
#: A shorter matmul is too small to be faster on other cores, ns.
_LARGE_NS = 15_000


def find(case: Case) -> Iterator[Candidate]:
    """Matmuls whose kernels multiply in fp32, on a GPU whose TF32 peak is known."""
    study = case.study
    peaks = find_peaks(study.gpu.name if study.gpu else None)
    if peaks is None:
        return
    speedup = peaks.flops_per_s["tf32"] / peaks.flops_per_s["fp32"]
    slow_names = (gemm_precision(name) == "fp32" and not _NO_TILES.search(name) for name in study.kernels)
    in_fp32 = np.array([*slow_names, False])
    chosen = in_fp32[study.kernel] & (study.duration >= _LARGE_NS)
    if speedup < 1.5 or not chosen.any():
        return
    ms = case.ms(chosen)
    slow, fast = (1 + (speedup - 1) * share for share in _OF_PEAK)
    yield Candidate(
        "fp32_matmul",
        "Matmuls run in fp32, without tensor cores",
        (saved_work(chosen * (1 - 1 / slow)), saved_work(chosen * (1 - 1 / fast))),
        (
            f"{times(study.count(chosen), 'kernel')} of matmuls a step run in fp32 for {three(ms)} ms "
            f"({ms / case.step_ms:.0%} of the step).",
            f"The {peaks.name} does {peaks.flops_per_s['fp32'] / 1e12:.3g} TFLOP/s in fp32, "
            f"{peaks.flops_per_s['tf32'] / 1e12:.3g} in TF32 and {peaks.flops_per_s['bf16'] / 1e12:.3g} in bf16.",
        ),
        f"The step is replayed with these matmuls {slow:.2g} to {fast:.2g} times faster: TF32's "
        f"peak is {speedup:.2g} times that of fp32; {_OF_PEAK[0]:.0%} to {_OF_PEAK[1]:.0%} of the gain are assumed.",
        (
            'torch.set_float32_matmul_precision("high")  # TF32: 10 bits of mantissa in the factors',
            "# or, with 7 bits: with torch.autocast('cuda', torch.bfloat16): ...",
        ),
        "The kernels' names hold tf32 or bf16 afterwards; if they do and the step is no shorter, it waits for "
        "something else.",
        place=Place("class", "matmul"),
    )
