"""Yields the statements of ``examples/README.md`` about the sweep, with numbers from the rows.

A function is of one paragraph or table, and yields its phrases as they stand on the page, the arithmetic beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.examples.rows import (
    COUNTS,
    DIMENSIONS,
    EXAMPLES,
    GB,
    SIZES,
    SWEEP,
    capture,
    manifests,
    mean_ms,
    millis,
    peak_gib,
    percent,
    sweep_column,
    timing,
    timings,
)


def provenance() -> Iterator[str]:
    """What was captured, with what."""
    trained = {(each["model"], each["context_length"]) for each in timings() if each["model"] != "10B"}
    contexts = {context for model, context in trained if model == "small"}
    others = {each["context_length"] for each in timings() if each["mode"] == "forward" or each["compile"] == "True"}
    failed = {each["capture"] for each in timings() if each["status"] != "ok"}
    yield (
        f"{COUNTS[len(SIZES)]} sizes at {COUNTS[len(contexts)]} contexts, then bf16, `torch.compile` and forward "
        "only at "
        f"context {others.pop()}, and {COUNTS[len(failed)]} that does not fit"
    )
    kept = manifests(SWEEP)
    yield f"{COUNTS[len(kept)]} of its captures"
    (made,) = {
        tuple(one[key] for key in ("gpu", "torch", "nsys", "batch_size", "steps", "warmup_steps")) for one in kept
    }
    gpu, torch, nsys, batch, steps, warmup = made
    yield (
        f"{gpu} with PyTorch {torch.rpartition('.')[0]} and nsys {'.'.join(nsys.split('.')[:2])}. The captures of the "
        f"sweep use batch size {batch}, naive (unfused) attention, and {steps} measured steps after {warmup} steps of "
        "warm-up"
    )


def programs() -> Iterator[str]:
    """How the programs were run, as the manifest of each says."""
    manifests = [json.loads(path.read_text()) for path in (EXAMPLES / "programs" / "captures").glob("*.manifest.json")]
    assert {one["gpu"] for one in manifests} == {"NVIDIA H100 80GB HBM3"}
    (steps,) = {one["steps"] for one in manifests}
    (warmup,) = {one["warmup_steps"] for one in manifests}
    assert [one["command"].split()[-1] for one in manifests if "--nproc-per-node 2" in one["command"]] == ["ddp.py"]
    yield f"--warmup {warmup} --steps {steps} -- python NAME.py"
    yield "on an H100 (`ddp` on two)"


def sweep_tables() -> Iterator[str]:
    """The two tables of step times."""
    for model in SIZES:
        times = [millis(mean_ms(capture(model, context))) for context in (128, 256, 512, 1024)]
        yield f"| {model} | {' | '.join(times)} |"
    kinds = ({"mode": "forward"}, {}, {"precision": "bf16"}, {"suffix": "_compile"})
    for model in SIZES:
        times = [millis(mean_ms(capture(model, 512, **kind))) for kind in kinds]
        yield f"| {model} | {' | '.join(times)} |"
    yield "| fp32 training | context 128 | 256 | 512 | 1,024 |"
    yield "| context 512 | forward only, fp32"


def launches() -> Iterator[str]:
    """A small model waits for its launches, and the profiler costs it most."""
    at_128, at_256 = (mean_ms(capture("small", context)) for context in (128, 256))
    yield (
        f"If the context doubles from 128 to 256, a step of small takes only {percent(at_256 / at_128 - 1)} longer "
        f"({at_128:.2f} to {at_256:.2f} ms)"
    )
    profiled, busy = sweep_column("step_ms"), sweep_column("busy_percent")
    small = capture("small", 128)
    busy_ms = busy[small] / 100 * profiled[small]
    yield (
        f"at context 128, the GPU is busy for {busy_ms:.0f} of {at_128:.0f} ms and idle for "
        f"{percent(1 - busy_ms / at_128)} of the step"
    )
    overhead = {name: ms / mean_ms(name) - 1 for name, ms in profiled.items()}
    *_, second, worst = sorted(overhead, key=lambda name: overhead[name])
    assert (second, worst) == (small, capture("small", 512, "bf16"))
    large = max(overhead[capture("2.7B", context)] for context in (128, 256, 512, 1024))
    yield (
        f"it adds {percent(overhead[small])} there, {percent(overhead[worst])} to small in bf16 at context 512, and "
        f"at most {percent(large, 1)} to 2.7B in fp32"
    )


def bf16() -> Iterator[str]:
    """What bf16 gains over the sweep, and what is left."""
    gains = [mean_ms(capture(size, 512)) / mean_ms(capture(size, 512, "bf16")) for size in ("2.7B", "small")]
    yield f"2.7B becomes {gains[0]:.1f} times as fast and small {gains[1]:.1f} times (training, context 512)"
    fp32, half = capture("2.7B", 512), capture("2.7B", 512, "bf16")
    share = {name: sweep_column(f"{name}_percent") for name in ("matmul", "elementwise", "optimizer", "copy")}
    yield f"Matmul falls from {share['matmul'][fp32]} % to {share['matmul'][half]} % of 2.7B's total kernel time"
    yield (
        f"elementwise kernels ({share['elementwise'][half]} %), AdamW ({share['optimizer'][half]} %) and copies "
        f"({share['copy'][half]} %)"
    )
    adamw = [mean_ms(name, "optimizer") for name in (fp32, half)]
    yield (
        f"AdamW takes {adamw[0]:.1f} ms of the fp32 step, which is {percent(adamw[0] / mean_ms(fp32))} of it, and "
        f"{adamw[1]:.1f} ms of the bf16 step, which is {percent(adamw[1] / mean_ms(half))}"
    )


def compiled_sweep() -> Iterator[str]:
    """What torch.compile gains over the sweep."""
    kernels = sweep_column("kernels")
    eager, fused = capture("small", 512), capture("small", 512, suffix="_compile")
    counts = [kernels[name] for name in (eager, fused)]
    yield f"a step of small runs {counts[1]:,.0f} kernels instead of {counts[0]:,.0f}"
    gains = [mean_ms(capture(size, 512)) / mean_ms(capture(size, 512, suffix="_compile")) for size in ("small", "2.7B")]
    yield f"small becomes {gains[0]:.2f} times as fast. 2.7B becomes only {gains[1]:.2f} times as fast"
    matmul = sweep_column("matmul_percent")[capture("2.7B", 512)]
    yield f"{matmul} % of its kernel time in fp32 is matmul"
    peaks = [peak_gib(capture("2.7B", 512, suffix=suffix)) for suffix in ("", "_compile")]
    yield f"2.7B peaks at {peaks[1]:.1f} GiB instead of {peaks[0]:.1f} GiB"


def inference() -> Iterator[str]:
    """The share of matmul in a forward pass and in a training step."""
    share = sweep_column("matmul_percent")
    pairs = [(share[capture(size, 512, mode="forward")], share[capture(size, 512)]) for size in ("small", "2.7B")]
    yield f"{pairs[0][0]} % against {pairs[0][1]} % for small, and {pairs[1][0]} % against {pairs[1][1]} % for 2.7B"


def softmax() -> Iterator[str]:
    """Softmax against the two attention matmuls."""
    ratio = sweep_column("matmul_over_softmax")
    slower = [name for name in ratio if ratio[name] >= 1]
    assert slower == [capture("2.7B", 256)]
    yield f"in {len(ratio) - len(slower)} of {len(ratio)} captures"
    small = DIMENSIONS["small"]
    flops = 4 * (small.d_model // small.num_heads) / 5  # 4·B·S²·d against 5·B·H·S²
    fp32, half = ratio[capture("small", 512)], ratio[capture("small", 512, "bf16")]
    yield (
        f"In small at context 512, the two matmuls have {flops:.0f} times its FLOPs, but take {fp32:.2f} times its "
        f"time, and {half:.2f} times its time in bf16"
    )
    yield f"Only in 2.7B at context 256 do they take longer: {ratio[slower[0]]:.2f} times the time of the softmax"


def memory_of_the_sweep() -> Iterator[str]:
    """What fits."""
    failed = timing(capture("10B", 128))
    capacity = float(failed["message"].partition("total capacity of ")[2].split()[0])
    yield f"At context 1,024, 2.7B peaks at {peak_gib(capture('2.7B', 1024)):.1f} of the GPU's {capacity:.1f} GiB"
    assert failed["status"] == "oom"
    needed = DIMENSIONS["10B"].parameters * 4 * 4 / GB  # fp32 weights, gradients and AdamW's two moments
    yield f"The 10B model needs {needed:.0f} GB for weights, gradients and AdamW's state"
