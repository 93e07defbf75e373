"""Yields the statements of ``examples/README.md`` about whole models, with numbers from the rows.

A function is of one paragraph, and yields its phrases as they stand on the page, the arithmetic beside them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator

from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.model import AnyRow as Row
from tests.examples.rows import (
    DIMENSIONS,
    GIB,
    MIB,
    SIZES,
    capture,
    ceilings,
    compile_kernels,
    peak_gib,
    percent,
    row,
    rows,
    span,
)


def rooflines() -> Iterator[str]:
    """The GPU's peaks, and what a large matmul and a large copy reached."""
    peaks = find_peaks("NVIDIA H200")
    assert peaks is not None
    rates = [peaks.flops_per_s[name] / 1e12 for name in ("fp32", "tf32", "bf16")]
    yield (
        f"{rates[0]:.0f} TFLOP/s in fp32, {rates[1]:.0f} in TF32, {rates[2]:.0f} in bf16, "
        f"and {peaks.bytes_per_s / 1e12:.1f} TB/s"
    )
    fp32, tf32, bf16 = (ceilings("product_flops_per_s", name) for name in ("fp32", "tf32", "bf16"))
    copies = [rate for name in ("fp32", "tf32", "bf16") for rate in ceilings("copy_bytes_per_s", name)]
    assert f"{min(fp32):.0f}" == f"{max(fp32):.0f}"
    assert len(tf32) == 1
    yield (
        f"a large matmul reaches {fp32[0]:.0f} TFLOP/s in fp32, {tf32[0]:.0f} in TF32 and {span(bf16)} in bf16, and a "
        f"large copy reaches {span(copies, 2)} TB/s"
    )


def timing() -> Iterator[str]:
    """Backward against forward, and the rate of forward."""
    steps = rows("timing", "training_steps")
    ratios = [one.figures["backward_ms"] / one.figures["forward_ms"] for one in steps if "backward_ms" in one.figures]
    yield f"Backward takes {span(ratios, 1)} times as long as forward"
    rates = [
        one.figures["forward_flops"] / one.figures["forward_ms"] / 1e9
        for size in SIZES
        for one in steps
        if (one.case["model"], one.case["context_length"], one.case["mode"]) == (size, 512, "forward")
    ]
    assert rates == sorted(rates)
    yield (
        f"the rate of a large matmul, which is {ceilings('product_flops_per_s', 'fp32')[0]:.0f} TFLOP/s: at context "
        f"512, forward runs at {rates[0]:.0f} TFLOP/s in small and at {rates[-1]:.0f} in 2.7B"
    )


def precision() -> Iterator[str]:
    """What TF32 and bf16 autocast gain and cost."""
    sizes = {"small": 64, "large": 32}

    def figure(name: str, model: str, precision: str, mode: str = "forward-backward") -> float:
        value: float = row("precision", "training_steps", model=model, precision=precision, mode=mode).figures[name]
        return value

    def gains(precision: str) -> list[float]:
        return [figure("step_ms", size, "fp32") / figure("step_ms", size, precision) for size in sizes]

    batch = {one.case["model"]: one.case["batch_size"] for one in rows("precision", "training_steps")}
    assert batch == sizes
    tf32, bf16 = gains("tf32"), gains("bf16")
    yield (
        f"TF32 makes forward and backward {tf32[0]:.1f} times (small, batch {batch['small']}) and {tf32[1]:.1f} times "
        f"(large, batch {batch['large']}) as fast, and bf16 autocast {bf16[0]:.1f} and {bf16[1]:.1f} times"
    )
    limit = {name: ceilings("product_flops_per_s", name)[0] for name in ("fp32", "tf32", "bf16")}
    yield (
        f"A large matmul becomes {limit['tf32'] / limit['fp32']:.0f} and {limit['bf16'] / limit['fp32']:.0f} "
        "times as fast"
    )
    name = "peak_allocated_bytes"
    saved = [1 - figure(name, size, "bf16") / figure(name, size, "fp32") for size in reversed(sizes)]
    yield (
        f"bf16 autocast saves {saved[0] * 100:.0f} to {percent(saved[1])} of the peak memory of forward and "
        "backward at "
        "these batch sizes"
    )
    trained = [1 - peak_gib(capture(size, 512, "bf16")) / peak_gib(capture(size, 512)) for size in SIZES]
    yield (
        f"{min(trained) * 100:.0f} to {percent(max(trained))} of the peak memory of a training step at batch 4 and "
        "context 512 (the sweep)"
    )
    more = figure(name, "large", "bf16", "forward") / figure(name, "large", "fp32", "forward") - 1
    yield f"Forward alone of large needs {percent(more)} more memory"


def _phase(one: Row, name: str) -> dict[str, float]:
    (found,) = (phase for phase in one.figures["phases"] if phase["name"] == name)
    return dict(found)


def _waits(phase: dict[str, float]) -> float:
    """The share of a phase's wall in which all its work is issued and the GPU still works."""
    return 1 - phase["issue_ms"] / phase["wall_ms"]


def _paces(one: Row, name: str) -> tuple[float, float]:
    """GB/s by which memory rises in the first and in the last third of the time until a phase's last allocation."""
    phase = _phase(one, name)
    curve = [(phase["start_ms"], phase["start_bytes"])]
    curve += [point for point in one.figures["timeline_ms_bytes"] if phase["start_ms"] < point[0] <= phase["end_ms"]]
    start_ms, end_ms = curve[0][0], curve[-1][0]
    third = (end_ms - start_ms) / 3
    times = [ms for ms, _ in curve]
    first, one_third, two_thirds, last = (
        curve[bisect_right(times, start_ms + count * third + 1e-6) - 1][1] for count in range(4)
    )
    return (one_third - first) / third / 1e6, (last - two_thirds) / third / 1e6


def memory() -> Iterator[str]:
    """What fills the memory, and how fast."""
    trained = rows("memory", "memory_history", mode="train")
    above = [
        (one.case["precision"], one.figures["step_peak_bytes"] - one.figures["forward_peak_bytes"]) for one in trained
    ]
    fp32 = [difference for precision, difference in above if precision == "fp32"]
    bf16 = [difference / MIB for precision, difference in above if precision == "bf16"]
    assert all(_phase(one, "optimizer")["peak_bytes"] < one.figures["step_peak_bytes"] for one in trained)
    yield (
        f"Of {len(trained)} runs, {len(fp32)} are in fp32: the peak of their forward lies within {max(fp32)} bytes of "
        f"the peak of the step. In the {len(bf16)} runs in bf16, the loss adds {span(bf16)} MiB"
    )
    large = row("memory", "memory_history", model="large", context_length=512, mode="train", precision="fp32").figures
    layers, size = DIMENSIONS["large"].num_layers, DIMENSIONS["large"]
    assert large["layer_saves_bytes"] == large["layer_saves_by_shapes_bytes"]
    each = large["layer_saves_bytes"]
    yield (
        f"In large at context 512, the memory rises from {large['base_bytes'] / GIB:.1f} to "
        f"{large['step_peak_bytes'] / GIB:.1f} GiB. {layers * each / GIB:.1f} GiB of this are the tensors that "
        f"{layers} "
        f"layers save for backward, {each / MIB:.0f} MiB each"
    )
    scores = 3 * 4 * 4 * size.num_heads * 512**2  # three fp32 matrices, batch 4
    residuals = (each - scores) / large["residual_bytes"]
    yield (
        f"{percent(scores / each)} of them are attention scores: each layer saves 3 matrices of shape (B, H, S, S), "
        f"beside {residuals:.0f} tensors of the residual's size"
    )
    one = row("memory", "memory_history", model="large", context_length=512, mode="train", precision="fp32")
    first, last = _paces(one, "forward")
    yield (
        f"by {first:.0f} GB/s in the first third of the time in which forward is issued. When the launch queue is "
        f"full, it rises at the pace of the GPU: by {last:.0f} GB/s in the last third"
    )
    names = ("forward", "backward")
    phases = [(one, name) for one in rows("memory", "memory_history") for name in names if _has(one, name)]
    bound = [(one.case["model"], one.case["precision"]) for one, name in phases if _waits(_phase(one, name)) < 0.1]
    assert set(bound) == {("small", "bf16")}
    yield (
        f"In {len(bound)} of {len(phases)} forward and backward passes, all of them of small in bf16, the GPU "
        "waits for the host throughout"
    )


def _has(one: Row, name: str) -> bool:
    return any(phase["name"] == name for phase in one.figures["phases"])


def compiling() -> Iterator[str]:
    """What torch.compile gains on small, and from which kernels."""

    def figures(precision: str, compiled: bool) -> dict[str, float]:
        return dict(row("compile", "training_steps", precision=precision, compile=compiled).figures)

    pairs = {name: (figures(name, False), figures(name, True)) for name in ("fp32", "bf16")}
    gain = {name: eager["step_median_ms"] / fused["step_median_ms"] for name, (eager, fused) in pairs.items()}
    yield f"a step of small {gain['fp32']:.2f} times as fast in fp32 and {gain['bf16']:.2f} times in bf16 (medians)"

    def kernels(precision: str, compiled: bool) -> tuple[float, int, float]:
        """Of one step: kernel ms, kernels, and the ms of matmul."""
        table = compile_kernels(precision, compiled)
        steps = table[table["phase"] == "forward"]["instance"].nunique()
        ms = table.groupby("class", observed=True)["duration_ns"].sum() / 1e6 / steps
        return float(ms.sum()), len(table) // steps, float(ms["matmul"])

    def elementwise(compiled: bool) -> tuple[float, float]:
        table = compile_kernels("bf16", compiled)
        steps = table[table["phase"] == "forward"]["instance"].nunique()
        chosen = table[(table["class"] == "elementwise") & table["phase"].isin(["forward", "backward"])]
        return chosen["duration_ns"].sum() / 1e6 / steps, len(chosen) / steps

    eager, fused = elementwise(False), elementwise(True)
    yield (
        f"in bf16, elementwise kernels fall from {eager[0]:.1f} to {fused[0]:.1f} ms and from {eager[1]:,.0f} "
        f"launches to {fused[1]:,.0f}"
    )
    shares = [matmul / total for total, _, matmul in (kernels(name, False) for name in ("fp32", "bf16"))]
    yield (
        f"Matmul is {percent(shares[0])} of the eager fp32 step's kernel time and {percent(shares[1])} of the "
        "eager bf16 step's"
    )
    bf16 = [kernels("bf16", compiled) for compiled in (False, True)]
    filled = [kernel[0] / pair["step_median_ms"] for kernel, pair in zip(bf16, pairs["bf16"], strict=True)]
    assert percent(filled[0]) == percent(filled[1])
    yield f"In bf16, the kernels fill {percent(filled[0])} of the unprofiled step, eager and compiled"
    yield f"{bf16[1][1]:,} kernels a step instead of {bf16[0][1]:,}"
    seconds = [(one["first_step_ms"] - one["step_median_ms"]) / 1e3 for _, one in pairs.values()]
    repaid = [
        second * 1e3 / (before["step_median_ms"] - after["step_median_ms"])
        for second, (before, after) in zip(seconds, pairs.values(), strict=True)
    ]
    yield (
        f"Compiling takes {seconds[0]:.1f} s in fp32 and {seconds[1]:.1f} s in bf16, which is repaid after "
        f"{repaid[0]:,.0f} and {repaid[1]:,.0f} steps"
    )


def decode() -> Iterator[str]:
    """The time of a token, with and without a cache."""
    found = {
        tuple(one.case[name] for name in ("precision", "attention", "cache")): one for one in rows("decode", "decoding")
    }

    def next_ms(precision: str, attention: str, cache: bool) -> float:
        one = found[precision, attention, cache]
        if (precision, attention, cache) == ("bf16", "sdpa", False):  # of the lengths that the warm-up had seen
            return statistics.median(one.figures["token_times_ms"][1 : one.case["warmup_tokens"]])
        value: float = one.figures["between_tokens_median_ms"]
        return value

    kinds = [(precision, attention) for precision in ("fp32", "bf16") for attention in ("unfused", "sdpa")]
    with_cache, without = ([next_ms(*kind, cache) for kind in kinds] for cache in (True, False))
    first = found["fp32", "unfused", True]
    yield (
        f"With a KV cache, a token takes {span(with_cache)} ms instead of {span(without)} ms (small, batch "
        f"{first.case['batch_size']}, prompt {first.case['prompt_length']:,})"
    )
    change = [next_ms("bf16", name, True) / next_ms("fp32", name, True) - 1 for name in ("unfused", "sdpa")]
    yield (
        f"bf16 changes this by {percent(change[0], sign='+')} with unfused attention and by "
        f"{percent(change[1], sign='+')} with PyTorch's"
    )
    used = [_bytes(found[(*kind, True)]) / next_ms(*kind, True) * 1e3 / _copy(kind[0]) * 100 for kind in kinds]
    yield f"a token reads weights and cache at {span(used)} % of the bandwidth of a large copy"
    cold = found["bf16", "sdpa", False].figures["between_tokens_median_ms"]
    yield (
        f"a token takes {cold:.0f} ms, but {next_ms('bf16', 'sdpa', False):.0f} ms for a length that the warm-up "
        "had seen"
    )
    firsts = {kind: one.figures["first_token_ms"] for kind, one in found.items()}
    gain = firsts["bf16", "unfused", True] / firsts["bf16", "sdpa", True]
    yield (
        f"Prefill, the time to first token (TTFT), takes {span(list(firsts.values()))} ms; in bf16, PyTorch's "
        f"attention makes it {gain:.1f} times as fast"
    )


def _copy(precision: str) -> float:
    rate: float = row("decode", "ceilings", precision=precision).figures["copy_bytes_per_s"]
    return rate


def _bytes(one: Row) -> float:
    """What a token must read: all weights but the embedding, and keys and values of the positions before it."""
    size, case = DIMENSIONS["small"], one.case
    number = 2 if case["precision"] == "bf16" else 4
    positions = case["prompt_length"] + case["tokens"] / 2
    cached = 2 * size.num_layers * case["batch_size"] * size.d_model * number * positions
    return float(one.figures["weights_bytes"] - size.vocab_size * size.d_model * number + cached)
