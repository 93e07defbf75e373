"""Rules for kernels of captures without operators: with tensor cores, or with fewer passes over the data.

The names, classes and order of kernels show what they do. If operators are known, the rules on operators are more
exact, and the rules of this file find nothing. ``report/finding_texts/kernels.py`` makes sentences from the figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    Place,
    Rule,
    StepsToExplain,
    saved_launches,
    saved_work,
)
from nsys_analyzer.analysis.findings.kernels import GATHER_KERNEL, CopiesFigures, find_attention
from nsys_analyzer.analysis.findings.waits import LEAST_IDLE_SHARE
from nsys_analyzer.analysis.kernels.classes import find_precision
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL, ON_DEVICE

#: The peaks of a GPU give a theoretical speedup of TF32 over fp32. The gain over 1 is assumed to be between these
#: shares of the theoretical gain.
TF32_GAIN_SHARE = (0.3, 0.8)
#: The minimum ratio of the TF32 peak to the fp32 peak for which a finding is reported.
_LEAST_TF32_SPEEDUP = 1.5
#: Matches kernels that multiply by a vector. Such kernels read each element once, so tensor cores do not help.
_VECTOR_PRODUCT_KERNEL = re.compile(r"(?i)gemv|dot_kernel")
#: The minimum duration of a matmul that tensor cores are assumed to make faster, ns.
_SHORTEST_MATMUL_NS = 15_000
#: Matches kernels that torch.compile or XLA generated.
_COMPILED_KERNEL = re.compile("^triton_|_fusion")
#: The classes whose kernels pass once over the data, so that a compiler can fuse them with their neighbors.
_FUSIBLE_CLASSES = ("elementwise", "copy/layout", "reduction", "normalization", "softmax")
#: The minimum number of consecutive copies that are a chain.
SHORTEST_COPY_CHAIN = 3
#: The smallest and the largest share of a chain's work that a better layout is assumed to save.
COPY_CHAIN_SAVINGS = (0.65, 1.0)
#: The maximum number of consecutive copies that are a chain. More copies copy different tensors, as an average of
#: weights does.
_LONGEST_COPY_CHAIN = 16
#: The maximum ratio of the grid sizes of two copies of one tensor. The sizes differ if the element types differ.
_MAX_GRID_SIZE_RATIO = 4
#: Matches kernels that copy one tensor, possibly into another layout or type.
_COPY_KERNEL = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")


@dataclass(frozen=True)
class Fp32MatmulFigures(FindingFigures):
    """The matmuls in fp32, per step, and the peaks of the GPU.

    Attributes:
        kernels: the number of fp32 matmuls per step.
        ms: the time of fp32 matmuls per step, ms.
        share: this time as a share of the step without the profiler.
        gpu: the name of the GPU.
        fp32_flops, tf32_flops, bf16_flops: the peaks of the GPU, FLOP/s.
        speedups: the smallest and the largest factor by which TF32 is assumed to make the matmuls faster.
    """

    kernels: float
    ms: float
    share: float
    gpu: str
    fp32_flops: float
    tf32_flops: float
    bf16_flops: float
    speedups: tuple[float, float]


def find_fp32_matmul(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds matmuls whose kernels multiply in fp32 on CUDA cores, on a GPU whose TF32 peak is known."""
    if steps.operators and steps.operators.rates:  # the rule on operators in fp32 knows more
        return
    study = steps.study
    peaks = find_peaks(study.gpu.name if study.gpu else None)
    if peaks is None or "tf32" not in peaks.flops_per_s:
        return
    fp32, tf32, bf16 = (peaks.flops_per_s[precision] for precision in ("fp32", "tf32", "bf16"))
    is_fp32 = (find_precision(name) == "fp32" and not _VECTOR_PRODUCT_KERNEL.search(name) for name in study.kernels)
    in_fp32 = np.array([*is_fp32, False])
    matmuls = in_fp32[study.operations.kernel] & (study.operations.duration_ns >= _SHORTEST_MATMUL_NS)
    if tf32 / fp32 < _LEAST_TF32_SPEEDUP or not matmuls.any():
        return
    ms = study.work_ms(matmuls)
    least, most = (1 + (tf32 / fp32 - 1) * share for share in TF32_GAIN_SHARE)
    figures = Fp32MatmulFigures(
        study.operations_per_step(matmuls), ms, ms / steps.step_ms, peaks.name, fp32, tf32, bf16, (least, most)
    )
    changes = tuple(saved_work(matmuls * (1 - 1 / speedup)) for speedup in (least, most))
    yield Candidate("fp32_matmul", figures, changes, Place("class", "matmul"), matmuls)


@dataclass(frozen=True)
class UnfusedElementwiseFigures(FindingFigures):
    """The separate elementwise kernels, casts, norms and reductions that a compiler could fuse, per step.

    Attributes:
        kernels: the number of these kernels per step.
        ms: the time of these kernels per step, ms.
        share: this time as a share of the step without the profiler.
        chain_length: the mean number of such kernels that follow each other directly, weighted by time.
    """

    kernels: float
    ms: float
    share: float
    chain_length: float


def find_unfused_elementwise(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds elementwise kernels, casts, norms and reductions outside the optimizer that no compiler generated.

    A compiler fuses a chain of consecutive kernels into one kernel. This kernel takes between the time of the longest
    kernel of the chain and that of the two longest kernels.
    """
    if steps.has_data_flow:  # the rule on chains of operators knows more
        return
    study = steps.study
    least, most, chain_length = np.zeros((3, len(study.operations)))
    for chain in find_kernel_chains(study):
        work_ns = np.sort(study.replay.work_ns[chain])
        chain_length[chain] = len(chain)
        for share, kernels in ((least, 2), (most, 1)):
            share[chain] = work_ns[:-kernels].sum() / max(work_ns.sum(), 1.0)
    separate = chain_length > 0
    if study.operations_per_step(separate) < 2:
        return
    # Each compiled region costs additional CPU time. If launching limits the step, this cost may be as large as the
    # saving of fewer launches: compiling made one such model 43 % faster, and another model 2 %.
    save = saved_work if steps.idle_share >= LEAST_IDLE_SHARE else partial(saved_launches, steps)
    ms = study.work_ms(separate)
    mean_length = float(np.average(chain_length[separate], weights=study.replay.work_ns[separate]))
    figures = UnfusedElementwiseFigures(study.operations_per_step(separate), ms, ms / steps.step_ms, mean_length)
    changes = (save(least), save(most))
    yield Candidate("unfused_elementwise", figures, changes, Place("class", "elementwise"), separate, is_common=True)


def find_kernel_chains(study: Study) -> Iterator[Ints]:
    """Yields the operations of each chain of consecutive kernels that a compiler could fuse; at least one kernel.

    Other rules report attention's kernels and chains of copies.
    """
    fusible = study.of_class(*_FUSIBLE_CLASSES) | (study.operations.copy == ON_DEVICE)
    fusible &= ~study.kernel_matches(_COMPILED_KERNEL) & ~study.in_phase("optimizer") & ~find_attention(study)[1]
    # Fills and copies between two kernels do not keep a compiler from fusing them.
    is_barrier, index = (study.operations.kind == KERNEL) & ~fusible, np.flatnonzero(fusible)
    starts = np.diff(np.cumsum(is_barrier)[index], prepend=-1) > 0
    copy_chains = _find_copy_chains(study)
    yield from (chain for chain in np.split(index, np.flatnonzero(starts)[1:]) if not copy_chains[chain].all())


class LayoutCopiesFigures(CopiesFigures):
    """The figures of chains of copies: casts and layout changes of one tensor."""


def find_layout_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds chains of copies on the device: casts and layout changes of one tensor that follow each other directly."""
    if steps.has_data_flow:  # the rule on chains of operators knows more
        return
    study = steps.study
    chained = _find_copy_chains(study)
    if not chained.any():
        return
    ms = study.work_ms(chained)
    figures = LayoutCopiesFigures(study.operations_per_step(chained), ms, ms / steps.step_ms)
    changes = tuple(saved_launches(steps, chained * share) for share in COPY_CHAIN_SAVINGS)
    yield Candidate("layout_copies", figures, changes, Place("class", "copy/layout"), chained)


def _find_copy_chains(study: Study) -> Bools:
    """Returns True for each copy on the device that is part of a chain, outside the optimizer; shape (operations,).

    All copies of a chain copy one tensor, so the grid sizes of neighbors are similar. Under autocast, the casts of a
    weight, a bias and an input follow each other, but have different grid sizes and are not a chain.
    """
    copies_one_tensor = study.kernel_matches(_COPY_KERNEL) & ~study.kernel_matches(GATHER_KERNEL)
    copies = (study.of_class("copy/layout") & copies_one_tensor) | (study.operations.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    in_chain = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return in_chain
    size = np.maximum(study.operations.size[index], 1)
    is_unlike = np.maximum(size[1:], size[:-1]) > _MAX_GRID_SIZE_RATIO * np.minimum(size[1:], size[:-1])
    length = _find_run_lengths(np.append(True, (np.diff(index) > 1) | is_unlike))
    in_chain[index[(length >= SHORTEST_COPY_CHAIN) & (length <= _LONGEST_COPY_CHAIN)]] = True
    return in_chain


def _find_run_lengths(starts: Bools) -> Ints:
    """Returns the length of the run of operations that contains each operation.

    ``starts`` is True for the first operation of each run.
    """
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    return np.repeat(lengths, lengths)


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (find_fp32_matmul, find_unfused_elementwise, find_layout_copies)
