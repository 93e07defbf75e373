"""Yields the statements of ``examples/README.md`` about attention alone, with numbers from the rows.

A function is of one paragraph, and yields its phrases as they stand on the page, the arithmetic beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.model import AnyRow as Row
from tests.examples.rows import GIB, MIB, percent, rows, span


def attention() -> Iterator[str]:
    """How attention grows with the context, and what compiling saves."""
    eager = rows("attention", "attention", compile=False)
    shapes = {(one.case["d_head"], one.case["context_length"]): one.figures for one in eager}
    compiled = {
        (one.case["d_head"], one.case["context_length"]): one.figures
        for one in rows("attention", "attention", compile=True)
    }
    powers = []
    for width in sorted({width for width, _ in shapes}):
        points = sorted((length, one["before_backward_bytes"]) for (d, length), one in shapes.items() if d == width)
        powers.append(float(np.polyfit(*np.log(np.array(points, float)).T, 1)[0]))
    batch = eager[0].case["batch_size"]
    yield (
        f"without heads, at batch {batch}. The tensors that it saves for backward grow with the context to the power "
        f"{span(powers, 2)}"
    )
    longest = [one for (_, length), one in shapes.items() if length == 16384]
    scores = 3 * batch * 16384**2 * 4
    assert {f"{one['before_backward_bytes'] / GIB:.0f}" for one in longest} == {f"{scores / GIB:.0f}"}
    assert {f"{one['peak_bytes'] / GIB:.0f}" for one in longest} == {"56"}
    inputs = max(one["inputs_bytes"] for one in longest) / GIB
    yield (
        f"At 16,384 tokens they take {scores / GIB:.0f} GiB, nearly all of it for 3 score matrices; the peak is "
        "56 GiB, "
        f"and the inputs take at most {inputs:.1f} GiB"
    )
    long = [shape for shape in shapes if shape[1] >= 4096]
    short = [shape for shape in shapes if shape[1] <= 1024]

    def gains(chosen: list[tuple[int, int]], *passes: str) -> list[float]:
        return [shapes[shape][f"{one}_ms"] / compiled[shape][f"{one}_ms"] for shape in chosen for one in passes]

    yield f"{span(gains(long, 'forward', 'backward'), 1)} times as fast at 4,096 tokens and more"
    kept = [compiled[shape]["before_backward_bytes"] / shapes[shape]["before_backward_bytes"] * 100 for shape in long]
    peak = [compiled[shape]["peak_bytes"] / shapes[shape]["peak_bytes"] * 100 for shape in long]
    assert all(round(share) == round(statistics.median(shares)) for shares in (kept, peak) for share in shares)
    yield (
        f"the tensors saved for backward shrink to {statistics.median(kept):.0f} %, and the peak to "
        f"{statistics.median(peak):.0f} %"
    )
    yield f"At 256 and 1,024 tokens, forward is {span(gains(short, 'forward'), 1)} times as fast"


def variants() -> Iterator[str]:
    """Where the variants of attention win and lose."""
    shapes: dict[tuple[object, ...], dict[str, Row]] = {}
    for one in rows("variants", "attention"):
        case = one.case
        shape = tuple(case[name] for name in ("batch_size", "heads", "context_length", "d_head", "precision", "causal"))
        shapes.setdefault(shape, {})[case["implementation"]] = one

    def over_naive(variant: str, figure: str = "forward_ms") -> list[float]:
        pairs = [(one[variant].figures, one["naive"].figures) for one in shapes.values() if variant in one]
        return [mine[figure] / naive[figure] for mine, naive in pairs if figure in mine and figure in naive]

    slow = [ratio for variant in ("blocked", "fused", "tiled") for ratio in over_naive(variant)]
    assert min(slow) > 1
    yield (
        "the variants that are written in PyTorch's operators are slower than the naive forward in all "
        f"{len(slow)} comparisons"
    )
    wins = {name: sum(ratio < 1 for ratio in over_naive(name)) for name in ("sdpa", "flash")}
    yield (
        f"faster than the naive forward in {wins['sdpa']} of {len(over_naive('sdpa'))} comparisons, and the "
        "Triton kernel in "
        f"{wins['flash']} of {len(over_naive('flash'))}"
    )
    largest = shapes[64, 32, 4096, 128, "bf16", False]
    naive = largest["naive"]
    gains = [naive.figures["forward_ms"] / largest[name].figures["forward_ms"] for name in ("sdpa", "flash")]
    scores = 64 * 32 * 4096**2 * 2 / GIB
    assert naive.status == "oom"
    yield (
        f"At batch 64, 32 heads and 4,096 tokens in bf16, where the scores alone take {scores:.0f} GiB, they are "
        f"{gains[0]:.1f} and {gains[1]:.1f} times as fast as the naive forward"
    )
    sizes = [
        (one["tiled"].figures["forward_peak_bytes"] / MIB, one["naive"].figures["forward_peak_bytes"] / MIB)
        for shape, one in shapes.items()
        if "tiled" in one and not shape[-1]
    ]
    less = [pair for pair in sizes if pair[0] < pair[1]]
    (more,) = (pair for pair in sizes if pair not in less)
    yield (
        f"In {len(less)} of {len(sizes)} shapes, it needs {span([tiled for tiled, _ in less], 1)} MiB where naive "
        "needs "
        f"{span([naive for _, naive in less])} MiB; in the other shape (batch 4, 32 heads, 128 tokens), it needs "
        f"{more[0]:.0f} MiB against {more[1]:.0f} MiB"
    )
    both = over_naive("tiled", "end_to_end_ms")
    yield f"It takes {span(over_naive('tiled'))} times as long in forward, and {span(both)} times as long with backward"
    yield from causal_masks(shapes)


def causal_masks(shapes: dict[tuple[object, ...], dict[str, Row]]) -> Iterator[str]:
    """What a causal mask does to forward: its time over that without."""
    full = [shape for shape in shapes if not shape[-1]]

    def change(shape: tuple[object, ...], variant: str) -> float:
        causal, whole = shapes[(*shape[:-1], True)], shapes[shape]
        ratio: float = causal[variant].figures["forward_ms"] / whole[variant].figures["forward_ms"]
        return ratio

    kernels = ("flash", "sdpa")
    halved = [shape for shape in full if max(change(shape, name) for name in kernels) < 0.6]
    others = [change(shape, name) for shape in full if shape not in halved for name in kernels]
    assert [shape[2] for shape in halved] == [4096]
    found = [change(halved[0], name) * 100 for name in kernels]
    yield (
        f"With the mask, their forward takes {span(found)} % of the time without it at that largest shape, and "
        f"{span([ratio * 100 for ratio in others])} % in the other {len(full) - 1} shapes"
    )
    naive = [change(shape, "naive") for shape in full if shape not in halved]
    yield f"The naive forward takes {span(naive, 1)} times as long with the mask"


def flash() -> Iterator[str]:
    """FlashAttention-2 in Triton against PyTorch's kernels, in bf16."""
    found = rows("flash", "attention", precision="bf16")
    by_case = {tuple(one.case[name] for name in ("implementation", "d_head", "context_length")): one for one in found}
    widths = sorted({one.case["d_head"] for one in found})
    (conditions,) = {(one.case["batch_size"], one.case["heads"], one.case["causal"]) for one in found}
    assert conditions == (1, 8, True)

    def ratios(peer: str, least: int, most: int) -> list[float]:
        return [
            one.figures["end_to_end_ms"] / by_case[peer, d_head, length].figures["end_to_end_ms"]
            for (name, d_head, length), one in by_case.items()
            if name == "flash" and least <= length <= most
        ]

    kernels = {
        name: {one.figures["kernel"] for one in found if one.case["implementation"] == name}
        for name in ("sdpa", "sdpa_flash")
    }
    assert kernels == {"sdpa": {"CudnnAttention"}, "sdpa_flash": {"FlashAttention"}}
    yield (
        f"At context 4,096 and above, the Triton FlashAttention-2 takes {span(ratios('sdpa_flash', 4096, 65536), 2)} "
        "times as long as PyTorch's FlashAttention backend (bf16, batch 1, 8 heads, causal, forward and "
        "backward), and "
        f"{span(ratios('sdpa', 4096, 65536), 2)} times as long as cuDNN's kernel"
    )

    def best(name: str, direction: str, factor: int) -> float:
        """TFLOP/s: two matmuls of 2·B·H·S²·d FLOPs forward and five backward, of which the mask hides half."""
        return max(
            factor * 8 * length**2 * d_head / one.figures[f"{direction}_ms"] / 1e9
            for (which, d_head, length), one in by_case.items()
            if which == name and d_head == max(widths)
        )

    rates = [
        best(name, way, factor) for name in ("flash", "sdpa_flash") for way, factor in (("forward", 2), ("backward", 5))
    ]
    yield (
        f"It reaches {rates[0]:.0f} TFLOP/s in forward and {rates[1]:.0f} in backward (d_head {max(widths)}); "
        f"PyTorch's backend reaches {rates[2]:.0f} and {rates[3]:.0f}"
    )
    peaks = find_peaks("NVIDIA H200")
    assert peaks is not None
    yield f"The backend's forward reaches {percent(rates[2] * 1e12 / peaks.flops_per_s['bf16'])} of the peak"
    yield f"Up to 1,024 tokens, the Triton kernel takes {span(ratios('sdpa', 128, 1024), 1)} times as long as cuDNN's"
    longest = {name: [by_case[name, d_head, 65536] for d_head in widths] for name in ("flash", "unfused")}
    assert all(one.status == "oom" and "backward_ms" not in one.figures for one in longest["unfused"])
    yield (
        "At 65,536 tokens, unfused attention still completes forward "
        f"(in {span([one.figures['forward_ms'] for one in longest['unfused']])} "
        f"ms), but runs out of memory in backward, where flash needs "
        f"{span([one.figures['peak_bytes'] / MIB for one in longest['flash']])} MiB"
    )
