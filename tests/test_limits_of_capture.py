"""Captures against their GPU's peaks: MFU, rates of classes, tensor cores, what is left out, and the roofline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.findings.finding import Diagnosis
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.kernel_tables import KernelRow, make_class_rows
from nsys_analyzer.analysis.summary.limits import compare_with_peaks
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage, Limits, PhaseSummary, Unprofiled
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.analysis.transformer.models import (
    Configuration,
    ModelSize,
    attention_matmul_elements,
    count_linear_elements,
    find_model,
    fused_attention_elements,
)
from nsys_analyzer.configuration import CountedFlops, Run
from nsys_analyzer.questions.ask import ask
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.facts import say, say_all
from nsys_analyzer.report.model import Answer, Block, Table, unfold_details
from nsys_analyzer.report.renderers.json_report import report_data
from nsys_analyzer.report.sections import build_report, limits
from nsys_analyzer.text import plain
from nsys_analyzer.trace.metadata import CPU, Gpu
from tests.support.export import GEMM

Capture = Callable[[str], Path]

BF16, SPLIT_K = "nvjet_tst_128x160_64x5_2x4_h_bz_NTT", "void splitKreduce_kernel<32, 16, int, float>"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::bfloat16_t>>"
)
# One layer: B = 2, S = 10, d = 100, d_ff = 200, V = 50. FLOPs of a forward pass:
# projections 8·2·10·100² = 1,600,000; attention 4·2·10²·100 = 80,000; feed-forward 6·2·10·100·200 = 2,400,000;
# head 2·2·10·100·50 = 200,000; together 4,280,000.
MODEL = ModelSize("tiny", 100, 200, 1, 2, 50)
FORWARD, ATTENTION = 4_280_000, 80_000
KNOWN = Configuration(MODEL, 10, 2)
H200 = Gpu(0, "NVIDIA H200", 150 << 30, 132)
FP32, BF16_PEAK = 67e12, 989.4e12
#: In 1e-4 ms, so 1e-7 s, the forward pass runs at 42.8 TFLOP/s.
MS = 1e-4


def stats(ms: float) -> Stats:
    return Stats(3, ms, 0.0, ms, ms, ms)


NO_WHOLE_STEPS = "The measured passes do not make up whole steps, so the FLOPs of a step are not known."


def row(name: str, kernel_class: str, launches: float, ms: float) -> KernelRow:
    return KernelRow(name, kernel_class, launches, ms, ms * 1e3 / launches, 0.0)


def phase(name: str, *kernels: KernelRow, busy: float, wall: float | None = None, instances: int = 3) -> PhaseSummary:
    total = sum(one.ms_per_instance for one in kernels)
    shared = tuple(structs.replace(one, share=one.ms_per_instance / total) for one in kernels)
    launches = sum(one.launches_per_instance for one in kernels)
    return PhaseSummary(
        name, instances, launches, stats(busy), stats(busy), stats(total), make_class_rows(shared), shared, (),
        wall_ms=stats(wall or busy), synchronized=True,
    )  # fmt: skip


def training(gemm: str = GEMM, *, ms: float = MS, forwards: int = 3, steps: int = 3, **more: Any) -> CaptureSummary:
    """Forward of ``ms`` of which 0.8 is matmul, backward of twice that, a step of four times."""
    first = phase("forward", row(gemm, "matmul", 10, 0.8 * ms), busy=ms, instances=forwards)
    second = phase("backward", row(gemm, "matmul", 20, 1.6 * ms), busy=2 * ms, instances=forwards)
    adam = row("adam", "optimizer", 1, ms)
    both = row(gemm, "matmul", 30, 2.4 * ms), adam
    optimizer = phase("optimizer", adam, busy=ms, instances=steps)
    step = phase("step", *both, busy=4 * ms, instances=steps)
    precisions = {"bf16": 1.0} if gemm == BF16 else {"fp32": 1.0}
    whole = phase("whole capture", *both, busy=4 * ms, instances=1)
    made = CaptureSummary(
        "t", None, "t.sqlite", "ok", device=H200, configuration=KNOWN, phases=(first, second, optimizer, step),
        whole=whole, precisions=precisions,
    )  # fmt: skip
    return replace(made, **more)


def found(capture: CaptureSummary) -> Limits:
    limits = compare_with_peaks(capture)
    assert limits is not None
    return limits


def mfu(limits: Limits) -> dict[str, float | None]:
    return {one.phase: one.mfu for one in limits.phases}


def test_mfu_of_each_phase() -> None:
    limits = found(training())
    # 4,280,000 FLOPs in 1e-7 s: 42.8 of 67 TFLOP/s; backward 2 · 42.8 ÷ 2; the step 3 · 42.8 ÷ 4 = 32.1 TFLOP/s.
    assert mfu(limits) == pytest.approx({"forward": 42.8 / 67, "backward": 42.8 / 67, "step": 32.1 / 67})
    assert {one.phase: one.mfu_of_best for one in limits.phases}["step"] == pytest.approx(32.1 / 989.4)
    assert {one.time_of for one in limits.phases} == {"wall"}
    assert (limits.precision, limits.peak_flops) == ("fp32", FP32)
    assert (limits.best_precision, limits.best_peak_flops) == ("bf16", BF16_PEAK)
    assert limits.peak_bytes_per_s == 4.8e12
    assert (limits.missing, limits.doubt) == ((), None)


def test_the_best_known_time() -> None:
    capture = training()
    timed = Unprofiled("ok", phases={"forward": Stats(3, 2 * MS), "backward": Stats(3, MS)})
    diagnosis = Diagnosis(5 * MS, 7 * MS, 9 * MS, 4 * MS, 0.0, False, None, ())
    limits = found(replace(capture, unprofiled=timed, diagnosis=diagnosis))
    times = {one.phase: (one.ms, one.time_of) for one in limits.phases}
    # The unprofiled time of backward is below its GPU time, 2 · MS: it is of other work.
    assert times == {
        "forward": (2 * MS, "unprofiled"), "backward": (2 * MS, "wall"), "step": (4 * MS, "wall"),
    }  # fmt: skip
    # From one step to the next are 6 · MS, which hold more than the step. Where it is no longer, the estimate counts.
    shorter = replace(diagnosis, step_ms_low=4 * MS, step_ms_high=4 * MS)
    step = found(replace(capture, diagnosis=shorter)).phase("step")
    assert step is not None
    assert (step.ms, step.time_of) == (4 * MS, "estimated")
    # A phase that the GPU fills for less than 90 % of its wall time: the profiler's cost is not hidden.
    waiting = structs.replace(capture.phases[0], wall_ms=stats(MS / 0.89))
    first = found(replace(capture, phases=(waiting, *capture.phases[1:]))).phase("forward")
    assert first is not None
    assert (first.ms, first.time_of) == (MS, "gpu_busy")


def test_accumulated_gradients_are_several_passes_a_step() -> None:
    # Six passes in three steps: the step does twice 3 · 4,280,000 FLOPs in 4e-7 s, 64.2 TFLOP/s.
    limits = found(training(forwards=6))
    assert mfu(limits)["step"] == pytest.approx(64.2 / 67)
    assert "A step has 2 forward passes, and each is assumed to have batch size 2." in say_all(limits.notes)
    limits = found(training(forwards=4))
    assert "step" not in mfu(limits)
    assert NO_WHOLE_STEPS in say_all(limits.notes)


def test_an_inference_step_is_its_forward_passes() -> None:
    capture = training()
    forward, _, _, step = capture.phases
    inference = replace(capture, phases=(forward, step), configuration=structs.replace(KNOWN, mode="forward"))
    assert mfu(found(inference)) == pytest.approx({"forward": 42.8 / 67, "step": 42.8 / 4 / 67})
    unnamed = replace(inference, configuration=structs.replace(KNOWN, mode="train"))
    assert "step" not in mfu(found(unnamed))
    assert NO_WHOLE_STEPS in say_all(found(unnamed).notes)


def test_rates_of_classes() -> None:
    forward, backward = found(training()).classes
    # 4,280,000 FLOPs in 0.8e-7 s are 53.5 TFLOP/s, in backward twice both.
    for one in (forward, backward):
        assert (one.kernel_class, one.precision) == ("matmul", "fp32")
        assert one.flops_per_s == pytest.approx(53.5e12)
        assert one.share_of_peak == pytest.approx(53.5 / 67)
    # Elements with T = 20 tokens: projections 4·(2·20·100 + 100²) = 56,000; feed-forward 3·(20·100 + 100·200 + 20·200)
    # = 78,000; head 20·100 + 100·50 + 20·50 = 8,000; attention 2·(2·2·10·100 + 2·2·10²) = 8,800: 150,800 of 4 bytes.
    assert (forward.bytes, backward.bytes) == (603_200, 2 * 603_200)
    # 603,200 bytes in 0.8e-7 s would be 7.5 TB/s, above the 4.8 of the memory: a cache has served them.
    assert forward.bytes_per_s is None
    assert forward.intensity is None
    slow = found(training(ms=2 * MS)).classes[0]
    assert slow.bytes_per_s == pytest.approx(3.77e12)
    assert slow.intensity == pytest.approx(FORWARD / 603_200)


def test_least_bytes() -> None:
    # The sums of test_rates_of_classes; fused attention reads Q, K, V and writes its result: 4 · 2 · 10 · 100.
    assert count_linear_elements(MODEL, 2, 10) == 56_000 + 78_000 + 8_000
    assert attention_matmul_elements(MODEL, 2, 10) == 8_800
    assert fused_attention_elements(MODEL, 2, 10) == 8_000


def test_fused_attention_is_a_class_of_its_own() -> None:
    gemm, flash = row(BF16, "matmul", 8, 0.1 * MS), row(FLASH, "fused attention", 1, 0.1 * MS)
    forward = phase("forward", gemm, flash, busy=MS)
    capture = training(BF16)
    matmul, fused = found(replace(capture, phases=(forward, *capture.phases[2:]))).classes
    assert (matmul.flops, fused.flops) == (FORWARD - ATTENTION, ATTENTION)
    assert matmul.share_of_peak == pytest.approx(420 / 989.4)  # 4,200,000 FLOPs in 1e-8 s
    assert fused.flops_per_s == pytest.approx(8e12)
    # 142,000 elements of 2 bytes; 8,000 of 2 bytes.
    assert (matmul.bytes, fused.bytes) == (284_000, 16_000)
    # In 7e-11 s the whole square would be 1,143 TFLOP/s: a causal kernel does half of it.
    causal = phase("forward", gemm, row(FLASH, "fused attention", 1, 7e-8), busy=MS)
    limits = found(replace(capture, phases=(causal, *capture.phases[2:])))
    assert [one.kernel_class for one in limits.classes] == ["matmul"]
    assert any(note.startswith("Fused attention in forward skips work") for note in map(plain, say_all(limits.notes)))
    assert limits.doubt is None


def test_no_rate_of_causal_attention_is_above_the_peak() -> None:
    # Matmuls and softmax of 80,000 + 5 · 2 · 2 · 10² FLOPs in 7e-11 s are 1,171 TFLOP/s; in 1e-8 s they are 8.2.
    def rate(ms: float) -> float | None:
        attention = AttentionSummary(None, None, ms, 0, 0, 1, "", None, 40, 2_000, ATTENTION)
        (capture,) = complete_captures([replace(training(BF16), attention=attention)])
        assert capture.attention is not None
        return capture.attention.fused_flops_per_s

    assert rate(7e-8) is None
    assert rate(1e-5) == pytest.approx(8.2e12)
    # In a precision that is not known, fused attention may not exceed the best peak either.
    gemm, flash = row("gemm", "matmul", 8, 0.1 * MS), row("flash", "fused attention", 1, 7e-8)
    phases = (phase("forward", gemm, flash, busy=MS),)
    unknown = found(replace(training(), phases=phases, precisions={"unknown": 1.0}))
    assert "fused attention" not in [one.kernel_class for one in unknown.classes]


@pytest.mark.parametrize(
    ("changed", "why", "needs"),
    [
        ({"configuration": Configuration(replace(MODEL, num_layers=3), 10, 2)}, "needs at least 13 matmuls", ""),
        ({"device": replace(H200, name="Orin")}, "The peaks of this GPU (Orin) are not known", ""),
        (
            {"configuration": structs.replace(KNOWN, batch_size=None)}, "The MFU needs the batch size",
            "nsys-analyze ask CAPTURE QUESTION --batch-size N",
        ),
        ({"phases": training().phases[:1]}, "They are known for these phases: forward", ""),
    ],
)  # fmt: skip
def test_mfu_asks_for_nothing_that_was_given(changed: dict[str, Any], why: str, needs: str) -> None:
    answer = ask(Evidence(complete_captures([training(**changed)])), "mfu phase=step")
    assert answer.cannot_answer is not None
    assert why in answer.cannot_answer.why
    assert answer.cannot_answer.needs == needs


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 8.56 of the 4.28 million FLOPs are for batch size 4: 2 · 42.8 ÷ 67 = 1.28; the matmuls alone 1.6.
        (
            {"configuration": structs.replace(KNOWN, batch_size=4)},
            "matmul in forward would run at 1.6 times the GPU's peak",
        ),
        (
            {"configuration": Configuration(replace(MODEL, num_layers=3), 10, 2)},
            "needs at least 13 matmuls per forward pass",
        ),
    ],
)
def test_no_rate_above_a_peak(changed: dict[str, Any], said: str) -> None:
    limits = found(training(**changed))
    assert said in plain(say(limits.doubt))
    assert (limits.phases, limits.classes) == ((), ())


def test_the_peak_of_several_precisions_is_by_the_time_of_each() -> None:
    # 3/4 of the matmul time in bf16 and 1/4 in fp32; what is below 5 % has no roof: 0.75 · 989.4 + 0.25 · 67 = 758.8
    # TFLOP/s. The step does 32.1 of them.
    known = found(training(precisions={"bf16": 0.72, "fp32": 0.24, "tf32": 0.04}))
    assert known.peak_flops == pytest.approx(0.75 * BF16_PEAK + 0.25 * FP32)
    assert mfu(known)["step"] == pytest.approx(32.1 / 758.8, rel=1e-4)
    capture = replace(training(), limits=known)
    assert "of the GPU's bf16 and fp32 peak" in str(next(iter(limits.answer_limits(capture))))


def test_a_precision_that_is_not_detected() -> None:
    # bf16 matmuls at ten times the fp32 peak, with names that say fp32.
    limits = found(training(ms=MS / 10))
    assert "times the GPU's peak in fp32, which is impossible" in plain(say(limits.doubt))
    unknown = found(training(precisions={"unknown": 0.6, "fp32": 0.4}))
    assert unknown.precision is None
    assert mfu(unknown) == dict.fromkeys(("forward", "backward", "step"))


@given(
    ms=st.floats(1e-7, 1e3),
    batch=st.integers(1, 512),
    context=st.integers(1, 4096),
    gemm=st.sampled_from([GEMM, BF16]),
    python_ms=st.none() | st.floats(1e-7, 1e3),
)
def test_every_rate_is_possible(ms: float, batch: int, context: int, gemm: str, python_ms: float | None) -> None:
    timed = Unprofiled("ok", phases={"step": Stats(3, python_ms)}) if python_ms else None
    capture = training(gemm, ms=ms, configuration=Configuration(MODEL, context, batch), unprofiled=timed)
    limits = found(capture)
    shares = [share for one in limits.phases for share in (one.mfu, one.mfu_of_best)]
    shares += [one.share_of_peak for one in limits.classes]
    shares += [one.bytes_per_s / 4.8e12 for one in limits.classes if one.bytes_per_s]
    assert all(share is not None and 0 < share <= 1.02 for share in shares)
    assert bool(limits.phases) != bool(limits.doubt)


def test_flops_that_were_counted() -> None:
    """In one step of two passes: 6e6 FLOPs of matmul and 2e6 of softmax forward, of a pass half of each."""
    counted = CountedFlops(
        passes={"forward": 2, "backward": 2},
        classes={
            "forward": {"matmul": 6e6, "softmax": 2e6},
            "backward": {"matmul": 1e7},
            "recomputed": {"matmul": 1e6},
        },
        unknown=("aten.x",),
    )
    limits = found(training(forwards=6, configuration=None, run=Run(flops=counted)))
    flops = {one.phase: one.model_flops for one in limits.phases}
    assert flops == {"forward": 4_000_000, "backward": 5_000_000, "step": 18_000_000}
    assert mfu(limits)["forward"] == pytest.approx(40 / 67)  # 4,000,000 in 1e-7 s
    # There is no softmax kernel, and backward computes a forward pass again.
    assert [(one.kernel_class, one.phase, one.flops, one.bytes) for one in limits.classes] == [
        ("matmul", "forward", 3_000_000, None)
    ]
    assert "The FLOPs of these operators are unknown, and no rate includes them: aten.x." in say_all(limits.notes)
    uneven = found(training(forwards=4, configuration=None, run=Run(flops=counted)))
    assert uneven.phase("step") is None
    assert say(uneven.notes[1]) == NO_WHOLE_STEPS


def test_what_is_missing_and_how_to_give_it() -> None:
    limits = found(training(configuration=Configuration(MODEL), device=replace(H200, name="NVIDIA Unheard Of")))
    assert limits.missing == ("context length", "batch size", "peaks")
    assert said_of(training(configuration=None)).startswith(
        "The MFU needs the model, context length and batch size (--model, --context-length, --batch-size)."
    )
    said = said_of(training(device=replace(H200, name="NVIDIA Unheard Of")))
    assert said.startswith("The step reaches 32.1 TFLOP/s in 0.0004 ms (under the profiler). The peaks of this GPU")


def test_nothing_of_a_cpu_or_of_lost_kernels() -> None:
    assert compare_with_peaks(training(device=replace(H200, name=CPU))) is None
    assert compare_with_peaks(CaptureSummary("t", None, "t", "failed")) is None
    lost = Coverage(1, 1, 1, 0, 0, 1.0, 1.0, 0.0, 0, 0, {}, 3, 0.0)
    assert found(training(coverage=lost)).classes == ()


def blocks_of(capture: CaptureSummary) -> list[Block]:
    (whole,) = complete_captures([capture])
    return list(unfold_details(tuple(limits.answer_limits(whole))))


def said_of(capture: CaptureSummary) -> str:
    """The answer to how far the capture is from the limits."""
    (said,) = (one for one in blocks_of(capture) if isinstance(one, Answer))
    return str(said.text).replace("\N{NO-BREAK SPACE}", " ")


def test_the_section_says_how_far() -> None:
    text, blocks = said_of(training(ms=2 * MS)), blocks_of(training(ms=2 * MS))
    # Half of the rates above: the step 16.05 of 67 TFLOP/s; matmuls 60 % of it, at 26.75 of 67.
    assert text.startswith("The step reaches 16 TFLOP/s in 0.0008 ms (")
    assert text.endswith("which is an MFU of 24.0 % of the GPU's fp32 peak.")
    first, second = (block for block in blocks if isinstance(block, Table))
    assert [one[0] for one in first.rows] == ["forward", "backward", "step"]
    assert [one[:2] for one in second.rows] == [("matmul", "forward"), ("matmul", "backward")]


def test_json() -> None:
    (data,) = report_data(build_report(Evidence(complete_captures([training(ms=2 * MS)]))))["captures"]
    data = json.loads(json.dumps(data["limits"], allow_nan=False))
    assert [(one["phase"], one["time_of"]) for one in data["phases"]] == [
        ("forward", "wall"), ("backward", "wall"), ("step", "wall"),
    ]  # fmt: skip
    assert data["phases"][2]["mfu"] == pytest.approx(16.05 / 67)
    assert (data["precision"], data["peak_flops"], data["best_peak_flops"]) == ("fp32", FP32, BF16_PEAK)
    assert data["doubt"] is None
    assert data["classes"][0]["flops_per_s"] == pytest.approx(26.75e12)


def limits_of_real(real_capture: Capture, name: str, context: int) -> Limits:
    known = Configuration(find_model("small"), context, 4)
    (summary,) = summarize(Trace.load(real_capture(name)), name, configuration=known)
    return found(*complete_captures([summary]))


def test_a_real_training_step(real_capture: Capture) -> None:
    limits = limits_of_real(real_capture, "train_small256", 256)
    # Small at 256, batch 4: 8·1024·768²·12 + 4·4·256²·768·12 + 6·1024·768·3072·12 + 2·1024·768·10,000 FLOPs.
    flops = 57_982_058_496 + 9_663_676_416 + 173_946_175_488 + 15_728_640_000
    forward = limits.phase("forward")
    assert forward is not None
    assert forward.model_flops == flops
    # The GPU is busy for 9.04 of 20.9 ms: 257.3 GFLOP in 9.0446 ms are 28.45 of 67 TFLOP/s.
    assert forward.time_of == "gpu_busy"
    assert forward.mfu == pytest.approx(0.4246, abs=1e-4)
    step = limits.phase("step")
    assert step is not None
    assert (step.model_flops, step.time_of) == (3 * flops, "estimated")
    (matmul,) = (one for one in limits.classes if (one.kernel_class, one.phase) == ("matmul", "forward"))
    assert matmul.share_of_peak == pytest.approx(flops / 6.9943e-3 / 67e12, rel=1e-3)
    # 109 products of fp32 in FFMA kernels; split-K reductions do not say.
    assert {one.kernel_class for one in limits.classes} == {
        "matmul", "attention matmul", "softmax", "copy, on the device",
    }  # fmt: skip


def test_a_real_fused_attention(real_capture: Capture) -> None:
    limits = limits_of_real(real_capture, "bf16_sdpa_small1024", 1024)
    rates = {(one.kernel_class, one.phase): one for one in limits.classes}
    # 4·4·1024²·768·12 = 154.6 GFLOP in 0.3319 ms; backward twice that in 1.0046 ms.
    assert rates["fused attention", "forward"].flops_per_s == pytest.approx(465.9e12, rel=1e-3)
    assert rates["fused attention", "backward"].flops_per_s == pytest.approx(307.8e12, rel=1e-3)
    assert limits.doubt is None


def test_a_batch_size_that_a_real_capture_cannot_have(real_capture: Capture) -> None:
    known = Configuration(find_model("small"), 256, 32)  # eight times the FLOPs
    (summary,) = summarize(Trace.load(real_capture("train_small256")), "t", configuration=known)
    assert "which is impossible: the configuration (small, context length 256, batch size 32)" in (
        plain(say(found(summary).doubt or ""))
    )
