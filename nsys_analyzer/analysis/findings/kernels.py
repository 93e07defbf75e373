"""Rules on kernels that could take less time: other cores, larger grids, fewer passes, copies and waits for others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    Change,
    Place,
    Rule,
    Shares,
    StepsToExplain,
    percent_between,
    saved_launches,
    saved_work,
    times,
)
from nsys_analyzer.analysis.findings.waits import IDLE
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.classes import find_precision
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.text import rounded, rounded_percent
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL, ON_DEVICE
from nsys_analyzer.trace.schema import US_PER_MS

#: So many times what a launch usually takes, the first launch of a kernel takes at least: it loads the kernel.
_LOADING = 10
#: How much faster TF32 is than fp32 in practice, of what the peaks say: the least and the most.
_OF_TF32_PEAK = (0.3, 0.8)
#: Products with a vector read each number once: no other cores make them faster.
_NO_TILES = re.compile(r"(?i)gemv|dot_kernel")
#: A shorter matmul is too small to be faster on other cores, ns.
_LARGE_MATMUL_NS = 15_000
#: A shorter kernel is done before more blocks would help, ns.
_LONG_KERNEL_NS = 20_000
#: The least and the most of what full occupation would save.
_SAVED_OF_GRIDS = (0.5, 0.9)
#: The time of fused attention ÷ that of the matmuls of unfused attention, backward included.
_FUSED_OF_MATMULS = (1.0, 0.4)
#: Softmax kernels of one step, at least, and kernels from a matmul over the softmax to the next, at most.
_FEWEST_LAYERS, _LONGEST_CHAIN = 2, 20
#: Kernels of as many blocks outside of attention, of the time of those inside, at most.
_SHARED = 0.5
#: The softmax of a loss over the vocabulary, and that of a backward pass.
_OF_LOSS, _BACKWARD, _MAXIMUM = re.compile("(?i)log"), re.compile("(?i)backward|bwd"), re.compile("(?i)max")
_ON_SCORES = ("elementwise", "reduction", "softmax", "copy/layout", "random")
#: A mixture of experts has a softmax between matmuls, too, to choose by: around it the largest are sorted out, and
#: behind it rows are gathered.
_CHOOSING = re.compile(r"(?i)top_?k|gating")
#: Kernels that torch.compile or XLA made.
_COMPILED = re.compile("^triton_|_fusion")
_PLAIN_CLASSES = ("elementwise", "copy/layout")
_ONE_PASS_CLASSES = (*_PLAIN_CLASSES, "reduction", "normalization", "softmax")
#: A fused AdamW moves 7 tensors of a parameter's size, a naive one 20; those that fit the cache cost less.
_SAVED_OF_OPTIMIZER = (0.4, 0.7)
#: A fused optimizer's kernel, of PyTorch, of Apex and those like it, and of a compiler.
_FUSED_OPTIMIZER = re.compile(r"[Ff]used\w*(?:MathFunctor|[Aa]dam|[Ss]gd)|AdamFunctor|^triton_")
#: Fused optimizers need fewer kernels than this.
_FUSED_KERNELS = 40
#: So many copies in a row are a chain; the least and the most of their work that a better layout saves.
_CHAIN, _SAVED_OF_CHAIN = 3, (0.65, 1.0)
#: A longer row copies tensors side by side, as an average of weights does.
_LONGEST_ROW = 16
#: Copies of one tensor differ by this factor in their thread blocks at most, for the sizes of their types.
_ALIKE_BLOCKS = 4
#: Kernels that copy one tensor as it is or in another layout or type; others of the class gather or join several.
_COPIES = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")
_GATHERING = re.compile(r"(?i)cat_?array|index|gather|scatter")


def find_fp32_matmul(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds matmuls whose kernels multiply in fp32 on CUDA cores, on a GPU whose TF32 peak is known."""
    study = steps.study
    peaks = find_peaks(study.gpu.name if study.gpu else None)
    if peaks is None or "tf32" not in peaks.flops_per_s:
        return
    speedup = peaks.flops_per_s["tf32"] / peaks.flops_per_s["fp32"]
    slow_names = (find_precision(name) == "fp32" and not _NO_TILES.search(name) for name in study.kernels)
    in_fp32 = np.array([*slow_names, False])
    slow_matmuls = in_fp32[study.kernel] & (study.duration >= _LARGE_MATMUL_NS)
    if speedup < 1.5 or not slow_matmuls.any():
        return
    ms = study.ms(slow_matmuls)
    slow, fast = (1 + (speedup - 1) * share for share in _OF_TF32_PEAK)
    yield Candidate(
        "fp32_matmul",
        "Matmuls run in fp32, without tensor cores",
        (saved_work(slow_matmuls * (1 - 1 / slow)), saved_work(slow_matmuls * (1 - 1 / fast))),
        (
            f"{times(study.count(slow_matmuls), 'kernel')} of matmuls a step run in fp32 for {rounded(ms)} ms "
            f"({rounded_percent(ms / steps.step_ms)} of the step).",
            f"The {peaks.name} does {peaks.flops_per_s['fp32'] / 1e12:.3g} TFLOP/s in fp32, "
            f"{peaks.flops_per_s['tf32'] / 1e12:.3g} in TF32 and {peaks.flops_per_s['bf16'] / 1e12:.3g} in bf16.",
        ),
        f"The step is replayed with these matmuls {slow:.2g} to {fast:.2g} times faster: TF32's "
        f"peak is {speedup:.2g} times that of fp32; {percent_between(_OF_TF32_PEAK)} of the gain are "
        "assumed.",
        (
            'torch.set_float32_matmul_precision("high")  # TF32: 10 bits of mantissa in the factors',
            "# or, with 7 bits: with torch.autocast('cuda', torch.bfloat16): ...",
        ),
        "The kernels' names hold tf32 or bf16 afterwards; if they do and the step is no shorter, it waits for "
        "something else.",
        place=Place("class", "matmul"),
        pieces=slow_matmuls,
    )


def find_small_grids(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds long kernels of fewer blocks than the GPU has multiprocessors, collectives left out."""
    study = steps.study
    units = study.gpu.sm_count if study.gpu else 0
    small = (study.kind == KERNEL) & (study.size > 0) & (study.size < units) & (study.duration >= _LONG_KERNEL_NS)
    small &= ~study.of_class("communication")
    if not units or not small.any():
        return
    idle = np.where(small, 1 - study.size / units, 0.0)
    ms = study.ms(small)
    worst = study.kernels[int(np.bincount(study.kernel[small], study.replay.work[small]).argmax())]
    yield Candidate(
        "small_grids",
        "Kernels are too small to fill the GPU",
        tuple(saved_work(share * idle) for share in _SAVED_OF_GRIDS),
        (
            f"{times(study.count(small), 'kernel')} a step of fewer blocks than the GPU's {units} multiprocessors take "
            f"{ms:.3g} ms; {np.average(study.size[small], weights=study.replay.work[small]):.0f} blocks on average.",
            f"Most of that time is in {worst[:80]}.",
        ),
        f"The step is replayed with {percent_between(_SAVED_OF_GRIDS)} of what the idle multiprocessors could do.",
        (
            "# a larger batch, or several small problems at once: torch.bmm, torch._foreach_*, streams",
            'model = torch.compile(model, mode="max-autotune")  # tries split-K and smaller tiles',
        ),
        "Double the batch: if these kernels take twice as long, their grids were not what limits them.",
        place=Place("kernel", worst),
        pieces=small,
    )


def find_unfused_attention(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds attention with kernels over the scores, by its ranges or by its softmax."""
    study = steps.study
    matmuls, chain = _attention_work(steps)
    if not matmuls.any() or not chain.any() or study.of_class("fused attention").any():
        return
    fused_ms, chain_ms = study.ms(matmuls), study.ms(chain)

    yield Candidate(
        "unfused_attention",
        "Attention is not fused",
        tuple(_less_of(chain + matmuls * (1 - ratio), study.calls_of(chain), 0.0) for ratio in _FUSED_OF_MATMULS),
        (
            f"Attention runs {times(study.count(chain), 'kernel')} a step over its scores for {chain_ms:.3g} ms, and "
            f"{times(study.count(matmuls), 'matmul')} for {fused_ms:.3g} ms.",
        ),
        "The step is replayed without the kernels over the scores, and with 0.4 to 1 times the matmuls' time: a fused "
        "kernel does the same matmuls, half of them where a causal mask lets it.",
        ("out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # in bf16 or fp16: FlashAttention",),
        "The kernels' names hold flash or fmha afterwards; the softmax's kernels are gone.",
        place=Place("class", "softmax"),
        pieces=matmuls | chain,
    )


def _attention_work(steps: StepsToExplain) -> tuple[Bools, Bools]:
    """Marks the pieces that are attention's matmuls, and those that work on its scores, forward and backward.

    Softmax stands between them: in a forward pass behind one matmul and before another, in a backward pass behind two
    and before two. Where the program's ranges name the parts of attention, these say it of the forward pass.
    """
    study = steps.study
    matmul, moving = study.of_class("matmul"), study.of_class(*_ON_SCORES)
    matmuls = study.in_part("scores", "values") & matmul
    part = study.in_part(*ATTENTION_PARTS)
    chain = part & moving if matmuls.any() else np.zeros_like(part)
    # One that is written by hand takes the maximum first.
    by_hand = part & study.of_class("reduction") & study.named(_MAXIMUM)
    softmax = (study.of_class("softmax") & ~study.named(_OF_LOSS) & (part if part.any() else True)) | by_hand
    softmax &= ~study.in_phase("loss", "optimizer")
    backward = study.of_class("softmax") & (study.in_phase("backward") | study.named(_BACKWARD))
    backward &= ~study.named(_OF_LOSS)
    forward = softmax & ~backward if not matmuls.any() else np.zeros_like(part)
    at = np.flatnonzero(matmul)
    chooses, gathers = study.of_class("sort/scan") | study.named(_CHOOSING), study.named(_GATHERING)
    step = np.searchsorted(study.replay.first_call, study.replay.launch, side="right")
    of_router: set[int] = set()
    for softmaxes, around in ((forward, 1), (backward, 2)):
        alike = defaultdict[tuple[int, ...], list[Ints]](list)
        for piece in np.flatnonzero(softmaxes).tolist():
            behind, size = int(np.searchsorted(at, piece)), int(study.size[piece])
            between = at[max(behind - around, 0) : behind + around]
            if len(between) < 2 * around or between[-1] - between[0] > _LONGEST_CHAIN:
                continue
            first, last = between[0], between[-1]
            if around == 1 and (chooses[first:last].any() or gathers[piece:last].any()):
                of_router.add(size or NONE)
            elif step[first] == step[last] and not (around == 2 and size in of_router):
                alike[(size, *study.kernel[[piece, *between]].tolist())].append(between)
        for layers in alike.values():
            # Every layer has one; a single one, as over a vocabulary, is of something else.
            for between in layers if part.any() or len(layers) >= _FEWEST_LAYERS * study.steps else ():
                matmuls[between] = True
                chain[between[0] : between[-1]] |= moving[between[0] : between[-1]]
    if chain.any() and not backward.any():
        more = _by_grids(steps, part, chain)
        return matmuls | more[0], chain | more[1]
    return matmuls, chain


def _by_grids(steps: StepsToExplain, part: Bools, chain: Bools) -> tuple[Bools, Bools]:
    """Marks the same of a backward pass without a softmax by name.

    Kernels of as many thread blocks as those of the forward pass work on the same scores, and the matmuls beside them
    are attention's. Where the forward pass has kernels of as many blocks outside of attention, too, that says little of
    the backward pass, and nothing of its matmuls.
    """
    study = steps.study
    moving, matmul = study.of_class(*_ON_SCORES), study.of_class("matmul")
    outside = study.in_phase("forward", "loss") & ~part & ~chain & moving
    backward = study.in_phase("backward") & ~part & moving
    grids = np.unique(study.size[chain & (study.duration >= 5_000) & (study.size > 0)])
    inside_ms, outside_ms = (
        np.array([study.ms(some & (study.size == grid)) for grid in grids.tolist()]) for some in (chain, outside)
    )
    mostly, only = grids[outside_ms <= _SHARED * inside_ms], grids[outside_ms == 0]
    near = np.flatnonzero(backward & np.isin(study.size, only))
    beside = np.zeros(len(study.size), np.bool_)
    candidates = np.flatnonzero(study.in_phase("backward") & ~part & matmul)
    if len(near) and len(candidates):
        place = np.searchsorted(near, candidates)
        before = candidates - near[np.maximum(place - 1, 0)]
        behind = near[np.minimum(place, len(near) - 1)] - candidates
        beside[candidates[((before > 0) & (before <= 3)) | ((behind > 0) & (behind <= 3))]] = True
    return beside, backward & np.isin(study.size, mostly)


def find_unfused_elementwise(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds elementwise kernels, casts and the like that no compiler made, outside the optimizer.

    A compiler makes one kernel of a chain of k that follow each other: between 1/k and 2/k of their time is left.
    Kernels that are one pass already (a norm, a softmax, a sum) are part of a chain, and keep their time.
    """
    study = steps.study
    separate = study.of_class(*_ONE_PASS_CLASSES) & ~study.named(_COMPILED) & ~study.in_phase("optimizer")
    # Those have findings of their own.
    separate &= ~_attention_work(steps)[1] & ~_layout_chains(steps)
    if study.count(separate) < 2:
        return
    # Each compiled region costs the CPU time of its own. Where launching is the limit, that may take all that fewer
    # launches save: of two models so bound, compiling made one 43 % faster, the other 2 %.
    saved = saved_work if steps.idle_share >= IDLE else partial(saved_launches, steps)
    # Of each kernel, how many stand in a row around it.
    index, length = np.flatnonzero(separate), np.ones(len(separate))
    length[index] = _row_lengths(np.append(True, np.diff(index) > 1))
    least = np.where(study.of_class(*_PLAIN_CLASSES), np.maximum(1 - 2 / length, 0.0), 0.0)
    most = np.where(study.of_class(*_PLAIN_CLASSES, "reduction"), 1 - 1 / length, 0.0)
    ms, typical = study.ms(separate), float(np.average(length[separate], weights=study.replay.work[separate]))
    yield Candidate(
        "unfused_elementwise",
        "Elementwise kernels are not fused",
        tuple(saved(share * separate) for share in (least, most)),
        (
            f"{times(study.count(separate), 'kernel')} a step, elementwise, reductions, norms and casts, take {ms:.3g} "
            f"ms ({rounded_percent(ms / steps.step_ms)} of the step), "
            f"{ms / study.count(separate) * US_PER_MS:.3g} µs each.",
            f"They stand in chains of {typical:.2g} kernels on average, one directly behind the other.",
        ),
        "The step is replayed with each chain of k kernels as one: 1/k to 2/k of the time of its elementwise kernels "
        "and casts is left, and of their launches, unless launching is the limit: compiled code costs the CPU, too.",
        ("model = torch.compile(model)  # or block.compile() for each block: it compiles faster",),
        "Kernels named triton_… take the place of these; if the step is no shorter, it waits for something else.",
        place=Place("class", "elementwise"),
        pieces=separate,
    )


def find_layout_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds runs of copies on the device, one directly behind the other: casts and layouts that go forth and back."""
    study = steps.study
    chained = _layout_chains(steps)
    if not chained.any():
        return
    ms = study.ms(chained)
    yield Candidate(
        "layout_copies",
        "Chains of redundant copies",
        tuple(saved_launches(steps, chained * share) for share in _SAVED_OF_CHAIN),
        (
            f"{times(study.count(chained), 'copy')} a step stand in chains of {_CHAIN} or more, one directly "
            f"behind the other, and take {rounded(ms)} ms ({rounded_percent(ms / steps.step_ms)} of the step).",
        ),
        f"The step is replayed without {percent_between(_SAVED_OF_CHAIN)} of them: a chain ends in one copy or none.",
        (
            "x = x.transpose(1, 2)         # a view: leave .contiguous() out until a kernel asks for it",
            "x = x.to(torch.bfloat16)      # once, not to float32 and back",
        ),
        "Leave the chain out for a run: the output stays the same.",
        place=Place("class", "copy/layout"),
        pieces=chained,
    )


def _layout_chains(steps: StepsToExplain) -> Bools:
    """Marks the copies on the device that stand in a chain, outside the optimizer.

    A chain copies one tensor: of neighbours neither has many times the other's thread blocks. (Under autocast the
    casts of a weight, its bias and an input stand side by side, and are no chain.)
    """
    study = steps.study
    of_one = study.named(_COPIES) & ~study.named(_GATHERING)
    copies = (study.of_class("copy/layout") & of_one) | (study.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    in_chain = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return in_chain
    size = np.maximum(study.size[index], 1)
    unlike = np.maximum(size[1:], size[:-1]) > _ALIKE_BLOCKS * np.minimum(size[1:], size[:-1])
    length = _row_lengths(np.append(True, (np.diff(index) > 1) | unlike))
    in_chain[index[(length >= _CHAIN) & (length <= _LONGEST_ROW)]] = True
    return in_chain


def _row_lengths(starts: Bools) -> Ints:
    """Returns how many pieces stand in the row of each; ``starts`` marks those that begin a row."""
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    return np.repeat(lengths, lengths)


def find_unfused_optimizer(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds an optimizer of many kernels, none of them fused: a fused one reads and writes each parameter once."""
    study = steps.study
    updates = study.in_phase("optimizer") & study.of_class("optimizer", "elementwise", "reduction", "copy/layout")
    if study.count(updates) < _FUSED_KERNELS or (study.named(_FUSED_OPTIMIZER) & updates).any():
        return
    calls = study.calls_of(updates)
    per_step = study.count(updates)
    foreach = study.of_class("optimizer") & updates
    kind = "multi-tensor (foreach)" if foreach.sum() > 0.5 * updates.sum() else "a parameter at a time"
    yield Candidate(
        "unfused_optimizer",
        "The optimizer is not fused",
        tuple(_less_of(updates * share, calls, _FUSED_KERNELS / per_step) for share in _SAVED_OF_OPTIMIZER),
        (f"It runs {times(per_step, 'kernel')} a step ({kind}) for {rounded(study.ms(updates))} ms on the GPU.",),
        f"The step is replayed with {_FUSED_KERNELS} launches in the optimizer and "
        f"{percent_between(_SAVED_OF_OPTIMIZER)} less work: a fused AdamW moves 7 tensors of the parameters' size, a "
        "naive one 20, some of them in the cache.",
        ("optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)",),
        "Count the optimizer's kernels afterwards: if they are few and the step is no shorter, the GPU had other work.",
        place=Place("phase", "optimizer"),
        pieces=updates,
    )


def _less_of(share: Shares, calls: Bools, kept: float) -> Change:
    """Returns a change that saves a share of each piece's work, and keeps ``kept`` of the time behind some calls.

    None saves more than ten launches as they usually are: the first launch of a kernel loads it.
    """
    work, after = (1 - share).astype(np.float64), np.where(calls, kept, 1.0)
    return lambda replay: replay.with_launching(after, _LOADING * replay.launching_ns).with_work(work)


#: What is looked for; of two findings that save as much, the one that is named first comes first.
RULES: tuple[Rule, ...] = (
    find_fp32_matmul, find_unfused_optimizer, find_unfused_attention, find_unfused_elementwise,
    find_layout_copies, find_small_grids,
)  # fmt: skip
