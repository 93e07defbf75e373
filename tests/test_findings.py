"""Findings: what each rule sees in steps that are worked out by hand, and what it says of captures of planted faults.

Beside each expectation stands how a step is worked out: the GPU's work, or the calls one behind the other, whichever
takes longer. See ``tests.support.steps`` for what a call takes.
"""

from __future__ import annotations

import functools
import json
import lzma
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import summarize
from nsys_analyzer.analysis.findings.diagnosis import diagnose
from nsys_analyzer.analysis.findings.finding import Candidate, Case, Diagnosis, Finding, Rule
from nsys_analyzer.analysis.findings.kernels import (
    find_exposed_communication,
    find_fp32_matmul,
    find_layout_copies,
    find_small_grids,
    find_unfused_attention,
    find_unfused_elementwise,
    find_unfused_optimizer,
)
from nsys_analyzer.analysis.findings.waits import (
    find_allocator,
    find_data_loading,
    find_device_to_host_copy,
    find_host_stall,
    find_host_sync,
    find_launch_bound,
    find_pageable_copy,
)
from nsys_analyzer.text import plain
from nsys_analyzer.trace.columns import (
    DEVICE_TO_PAGEABLE,
    ON_DEVICE,
    OTHER_CALL,
    PAGEABLE_TO_DEVICE,
    PINNED_TO_DEVICE,
)
from tests.conftest import ROOT
from tests.support.export import ADD, GEMM, SOFTMAX
from tests.support.program import NCCL
from tests.support.steps import US, Steps

FAULTS = ROOT / "examples" / "faults"
MEASURED: dict[str, dict[str, Any]] = json.loads((FAULTS / "measured.json").read_text(encoding="utf-8"))
#: The finding that each planted fault is.
PLANTED = {
    "loader": "data_loading", "item": "host_sync", "tiny_batch": "launch_bound", "pageable": "pageable_copy",
    "fp32": "fp32_matmul", "foreach": "unfused_optimizer", "empty_cache": "allocator",
    "attention": "unfused_attention", "collector": "host_stall", "checkpoint": "device_to_host_copy",
    "casts": "layout_copies", "eager": "unfused_elementwise",
}  # fmt: skip
IDS = {*PLANTED.values(), "small_grids", "exposed_communication", "gpu_idle"}

BF16_GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"
CAST = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)>"
)
LOG_SOFTMAX = SOFTMAX.replace("float *", "at::native::LogSoftMaxForwardEpilogue, float *")
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(int)"
REDUCTION = "void at::native::reduce_kernel<128, 4>(int)"
FOREACH = (
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float, 2, 2, 0>>(int)"
)
FUSED_ADAM = (
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>(int)"
)
EVENT = "cudaEventRecord_v3020"


# --- captures of planted faults, beside what their remedies saved


@functools.cache
def diagnosis_of(name: str) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.sqlite"
        path.write_bytes(lzma.decompress((FAULTS / "captures" / f"{path.name}.xz").read_bytes()))
        (capture,) = summarize(path)
    assert capture.diagnosis is not None
    return capture.diagnosis


def saved_ms(name: str) -> float:
    """What the remedy of a fault saves: the median of the rounds' differences."""
    rounds = zip(MEASURED[name]["fault_ms"], MEASURED[name]["remedy_ms"], strict=True)
    return float(statistics.median(fault - remedy for fault, remedy in rounds))


def test_every_fault_was_captured_and_timed() -> None:
    assert {path.name.partition(".")[0] for path in (FAULTS / "captures").iterdir()} == {*PLANTED, "none"}
    assert MEASURED.keys() == {*PLANTED, "none"}


def test_the_planted_fault_comes_first() -> None:
    firsts = {name: next((one.id for one in diagnosis_of(name).findings), None) for name in PLANTED}
    wrong = {name: first for name, first in firsts.items() if first != PLANTED[name]}
    assert len(wrong) <= 1, wrong


def test_the_measured_saving_lies_inside_a_narrow_interval() -> None:
    """Inside for at least 9 of 12, whose intervals are no wider than ±30 % of their middle."""
    good, others = [], {}
    for name, wanted in PLANTED.items():
        found = [one for one in diagnosis_of(name).findings if one.id == wanted]
        inside = [one for one in found if one.saves_ms_low <= saved_ms(name) <= one.saves_ms_high]
        if any(one.saves_ms_high - one.saves_ms <= 0.3 * one.saves_ms for one in inside):
            good.append(name)
        else:
            others[name] = (saved_ms(name), [(one.saves_ms_low, one.saves_ms_high) for one in found])
    assert len(good) >= 9, others


def test_the_control_has_no_finding() -> None:
    assert [one for one in diagnosis_of("none").findings if one.share_of_step > 0.05] == []


@pytest.mark.parametrize("name", MEASURED)
def test_findings_of_a_capture(name: str) -> None:
    diagnosis = diagnosis_of(name)
    assert {one.id for one in diagnosis.findings} <= IDS
    obeys_the_laws(diagnosis)
    # the replayed steps are the recorded ones
    assert abs(diagnosis.error) < 0.05


def obeys_the_laws(diagnosis: Diagnosis) -> None:
    """What holds for the findings of any steps."""
    assert diagnosis.step_ms_low <= diagnosis.step_ms_high
    # Launching stands behind the causes that explain it, however much is left for it.
    savings = [one.saves_ms for one in diagnosis.findings if one.id not in ("launch_bound", "gpu_idle")]
    assert savings == sorted(savings, reverse=True)
    before = diagnosis.step_ms * (1 + 1e-9)
    for one in diagnosis.findings:
        assert 0 <= one.saves_ms_low <= one.saves_ms_high <= diagnosis.step_ms * (1 + 1e-9)
        assert one.step_ms == pytest.approx(diagnosis.step_ms)
        assert one.saves_ms + one.left_ms == pytest.approx(one.step_ms)
        assert 0 <= one.left_after_all_ms <= before
        before = one.left_after_all_ms * (1 + 1e-9) + 1e-9
        texts = [*one.evidence, one.derivation, one.disproof, *one.remedy]
        assert all(plain(text, "") for text in texts)
        assert not any(word in plain(text, "") for text in texts for word in ("nan", "inf ", "-0"))


# --- each rule, by steps worked out by hand


def candidate(rule: Rule, case: Case) -> Candidate:
    (found,) = rule(case)
    return found


def saved_us(rule: Rule, steps: Steps, **idle_ms: float) -> list[float]:
    """What each assumption saves of a step, µs; nothing where the rule finds nothing."""
    case = steps.case(**idle_ms)
    (baseline,) = case.baselines
    found = list(rule(case))
    assert len(found) <= 1
    return [round((baseline.step_ns - change(baseline).step_ns) / US, 1) for one in found for change in one.changes]


def evidence(rule: Rule, steps: Steps, **idle_ms: float) -> str:
    return " ".join(plain(words, "") for words in candidate(rule, steps.case(**idle_ms)).evidence)


@pytest.mark.parametrize("name", ["data", "train_loader", "next batch", "DataLoader.__next__"])
def test_data_loading(name: str) -> None:
    """3,000 + 10 µs of calls, 100 of work. A batch that is ready leaves 500 + 10, or the work."""
    steps = Steps().call(EVENT, 3_000, range=name).kernel(100)
    assert saved_us(find_data_loading, steps) == [3_010 - 510, 3_010 - 100]
    assert f"in the range {name}: 1 stretch." in evidence(find_data_loading, steps, data=2.9)


@pytest.mark.parametrize("way", [PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE])
def test_data_loading_without_a_range_is_before_a_copy(way: int) -> None:
    """3,000 + 10 + 10 µs of calls, 20 + 100 of work."""
    steps = Steps().call(EVENT, 3_000).copy(20, way, 1 << 20).kernel(100)
    assert saved_us(find_data_loading, steps) == [3_020 - 520, 3_020 - 120]
    assert "between two steps, before the batch is copied" in evidence(find_data_loading, steps)


@pytest.mark.parametrize(
    "steps",
    [
        Steps().call(EVENT, 99, range="data").kernel(10),  # no pause: below 0.1 ms
        Steps().call(EVENT, 3_000, range="BatchNorm2d").kernel(100),  # a part of the model
        Steps().call(EVENT, 3_000, range="gc").kernel(100),
        Steps().call(EVENT, 3_000).kernel(100),  # in no range, and no copy behind it
        Steps().call(EVENT, 3_000).copy(20, DEVICE_TO_PAGEABLE, 1 << 20).kernel(100),
    ],
)
def test_no_data_loading(steps: Steps) -> None:
    assert saved_us(find_data_loading, steps) == []


def test_host_sync() -> None:
    """The work ends at 20, the wait with it, 50 behind it: 70. Without the wait 10 + 25; without the call 20."""
    steps = Steps().kernel(20).sync(50, range="log")
    assert saved_us(find_host_sync, steps) == [70 - 35, 70 - 20]
    assert evidence(find_host_sync, steps) == "Each step waits in 1 call: cudaStreamSynchronize, in the range log."


def test_what_backtraces_say_of_waits() -> None:
    """Three waits a step with a backtrace, and one without."""
    steps = Steps().kernel(20).sync(caller="item").sync(caller="nonzero").sync(caller="item").sync()
    assert "Those with a backtrace come from item (2 a step), nonzero (1 a step)." in evidence(find_host_sync, steps)


def test_values_that_are_read() -> None:
    """The work ends at 20 + 2, the wait with it, 50 behind it: 72. 10 + 5 + 25 of calls, 22 of work; or 10 and 20."""
    steps = Steps().kernel(20).copy(2, DEVICE_TO_PAGEABLE, 4).sync(50)
    assert saved_us(find_host_sync, steps) == [72 - 40, 72 - 20]
    assert "1 value a step are copied to the host" in evidence(find_host_sync, steps)


@pytest.mark.parametrize(
    "steps",
    [
        Steps().kernel(20),
        # the wait for a checkpoint is no value that is read
        Steps().kernel(20).copy(900, DEVICE_TO_PAGEABLE, 1 << 20).sync(50),
        Steps().kernel(20).copy(900, PAGEABLE_TO_DEVICE, 1 << 20).sync(50),
    ],
)
def test_no_host_sync(steps: Steps) -> None:
    assert saved_us(find_host_sync, steps) == []


def kernels(count: int, us: float, name: str = GEMM, after: float = 10, steps: Steps | None = None) -> Steps:
    steps = steps or Steps()
    for _ in range(count):
        steps.kernel(us, name, after)
    return steps


def test_launch_bound() -> None:
    """10 launches 10 µs apart, 3 µs of work each: 100, and 30 without what launching takes."""
    steps = kernels(10, 3)
    assert saved_us(find_launch_bound, steps, launch=0.07) == [70, 70]
    assert "10 operations a step take 3 µs on the GPU each" in evidence(find_launch_bound, steps, launch=0.07)


def test_launch_bound_with_work_of_the_program_between_launches() -> None:
    """9 · 10 + 500 µs of calls, 30 of work: without launching 500, without both the work."""
    steps = kernels(9, 3).kernel(3, after=500)
    assert saved_us(find_launch_bound, steps, launch=0.5) == [590 - 500, 590 - 30]


def test_no_graph_holds_a_wait() -> None:
    """Between waits so close, nothing becomes a graph. Behind the last one 10 µs go, of three steps."""
    assert saved_us(find_launch_bound, kernels(10, 3).sync(), launch=0.07) == [3.3, 3.3]


@pytest.mark.parametrize(
    ("steps", "idle"),
    [
        (kernels(10, 3), {"launch": 0.03, "sync": 0.04}),  # another cause is larger
        (kernels(10, 3), {}),
        (kernels(10, 7.1), {"launch": 0.029}),  # 71 of 100 µs are work: not 30 % idle
    ],
)
def test_not_launch_bound(steps: Steps, idle: dict[str, float]) -> None:
    assert saved_us(find_launch_bound, steps, **idle) == []


def test_pageable_copy() -> None:
    """400 + 100 µs of work, and 10 behind the wait. 2.5 MB take 100 at 25 GB/s; or the copy is hidden."""
    steps = Steps().copy(400, PAGEABLE_TO_DEVICE, 2_500_000, waits=True).kernel(100)
    assert saved_us(find_pageable_copy, steps) == [510 - 200, 510 - 100]
    said = evidence(find_pageable_copy, steps)
    assert said.startswith("1 copy a step from pageable memory: 2.4 MiB in 0.4 ms, 6.25 GB/s.")


@pytest.mark.parametrize(
    ("way", "size"), [(PAGEABLE_TO_DEVICE, (64 << 10) - 1), (PINNED_TO_DEVICE, 1 << 30), (DEVICE_TO_PAGEABLE, 1 << 30)]
)
def test_no_pageable_copy(way: int, size: int) -> None:
    assert saved_us(find_pageable_copy, Steps().copy(400, way, size).kernel(100)) == []


def test_device_to_host_copy() -> None:
    """500 + 1,000 µs of work, and 10 behind the wait; of the copy 15 % is left, or nothing."""
    steps = Steps().kernel(500).copy(1_000, DEVICE_TO_PAGEABLE, 8 << 20, waits=True, range="checkpoint")
    assert saved_us(find_device_to_host_copy, steps) == [1_510 - 650, 1_510 - 500]
    said = "1 copy a step from the GPU: 8.0 MiB in 1 ms, 100% of it to pageable memory, in the range checkpoint."
    assert evidence(find_device_to_host_copy, steps) == said


def test_the_code_around_a_copy_goes_with_it() -> None:
    """100 + 1,000 µs of work; 10 + 3,000 of calls behind the copy's end: at 1,100 it waits, until 4,110 and 10 more."""
    steps = Steps().kernel(100).copy(1_000, DEVICE_TO_PAGEABLE, 8 << 20, waits=True, range="checkpoint")
    steps.call(EVENT, 3_000, range="checkpoint")
    # A copy that is not waited for: 10 + 10 + 3,000 of calls; without the range's calls 10, and 100 of work.
    assert saved_us(find_device_to_host_copy, steps) == [4_110 - 3_020, 4_110 - 100]


def test_the_code_of_a_phase_stays() -> None:
    """A copy in forward: the other calls of forward are no part of it."""
    steps = Steps().kernel(100).copy(1_000, DEVICE_TO_PAGEABLE, 8 << 20, waits=True, range="forward")
    steps.call(EVENT, 3_000, range="forward")
    assert saved_us(find_device_to_host_copy, steps) == [4_110 - 3_020, 4_110 - 3_010]


@pytest.mark.parametrize(
    ("way", "size"), [(DEVICE_TO_PAGEABLE, 4_096), (PAGEABLE_TO_DEVICE, 1 << 30), (ON_DEVICE, 1 << 30)]
)
def test_no_device_to_host_copy(way: int, size: int) -> None:
    assert saved_us(find_device_to_host_copy, Steps().kernel(500).copy(1_000, way, size)) == []


def test_fp32_matmul() -> None:
    """The H200's peaks, 67 and 494.7 TFLOP/s, differ 7.38 times: 1 + 30 % of 6.38 is 2.915, 1 + 80 % of it 6.107.

    Of 1,000 µs 343.0 are left, or 163.8.
    """
    steps = Steps().kernel(1_000, GEMM).kernel(500, BF16_GEMM)
    assert saved_us(find_fp32_matmul, steps) == [657.0, 836.2]
    assert "1 kernel of matmuls a step run in fp32 for 1 ms (67% of the step)." in evidence(find_fp32_matmul, steps)


@pytest.mark.parametrize(
    "steps",
    [
        kernels(50, 14.9, after=1),  # too small for tensor cores to matter
        Steps().kernel(1_000, BF16_GEMM),
        Steps().kernel(1_000, ADD),
        Steps(gpu=None).kernel(1_000, GEMM),
    ],
)
def test_no_fp32_matmul(steps: Steps) -> None:
    assert saved_us(find_fp32_matmul, steps) == []


def test_fp32_on_a_gpu_without_tf32() -> None:
    steps = Steps().kernel(1_000, GEMM)
    assert steps.gpu is not None
    steps.gpu = replace(steps.gpu, name="NVIDIA GeForce GTX 1080")
    assert saved_us(find_fp32_matmul, steps) == []


@pytest.mark.parametrize(("name", "kind"), [(FOREACH, "multi-tensor (foreach)"), (ADD, "a parameter at a time")])
def test_unfused_optimizer(name: str, kind: str) -> None:
    """100 · 20 µs of work: 40 % or 70 % less of it."""
    steps = kernels(100, 20, name, steps=Steps(phase="optimizer"))
    assert saved_us(find_unfused_optimizer, steps) == [800, 1_400]
    assert f"100 kernels a step ({kind}) for 2 ms" in evidence(find_unfused_optimizer, steps)


def test_launches_of_an_unfused_optimizer() -> None:
    """100 · 10 µs of calls, 100 · 1 of work: 40 launches are left, 400."""
    steps = kernels(100, 1, ADD, steps=Steps(phase="optimizer"))
    assert saved_us(find_unfused_optimizer, steps) == [600, 600]


@pytest.mark.parametrize(
    "steps",
    [
        kernels(39, 20, ADD, steps=Steps(phase="optimizer")),
        kernels(60, 20, ADD, steps=kernels(1, 20, FUSED_ADAM, steps=Steps(phase="optimizer"))),
        kernels(100, 20, ADD, steps=Steps(phase="backward")),
    ],
)
def test_no_unfused_optimizer(steps: Steps) -> None:
    assert saved_us(find_unfused_optimizer, steps) == []


def test_allocator() -> None:
    """The wait ends with the work at 100, 10 + 200 µs behind it: 310. Without both calls the work is left."""
    steps = Steps().kernel(100).call("cudaDeviceSynchronize_v3020", waits=True).call("cudaFree_v3020", 200)
    assert saved_us(find_allocator, steps) == [310 - 100]
    assert "Each step makes 1 call of cudaFree. A call that frees" in evidence(find_allocator, steps)


def test_a_wait_that_frees_nothing_is_no_allocator_s() -> None:
    """cudaMalloc takes 200: without it, the wait ends at 100 and takes 10 more."""
    steps = Steps().call("cudaMalloc_v3020", 200).kernel(100).sync()
    assert saved_us(find_allocator, steps) == [310 - 110]


def test_an_allocation_now_and_then() -> None:
    """One call in four steps is what the cache needs to grow."""
    case = Steps(steps=4).call("cudaMalloc_v3020", 200).kernel(100).case()
    assert list(find_allocator(case))
    call = case.study.call.copy()
    call[2:] = OTHER_CALL
    assert list(find_allocator(replace(case, study=replace(case.study, call=call)))) == []


def layer(steps: Steps, softmax: str = SOFTMAX, *, part: str = "") -> Steps:
    """Attention of a layer: 200 µs of matmuls, 300 of softmax."""
    steps.kernel(100, BF16_GEMM, part=part).kernel(300, softmax, part=part, blocks=777)
    return steps.kernel(100, BF16_GEMM, part=part)


def test_unfused_attention_by_its_ranges() -> None:
    """Backward: the kernel of as many blocks is on the scores, the matmuls next to it are attention's, others not.

    300 + 300 µs on the scores; matmuls of 200 + 400, of which nothing or 60 % goes.
    """
    steps = layer(Steps(), part="attention").kernel(500, BF16_GEMM)
    steps.phase = "backward"
    steps.kernel(200, BF16_GEMM).kernel(300, ADD, blocks=777).kernel(200, BF16_GEMM)
    steps.kernel(50, ADD).kernel(50, ADD).kernel(500, BF16_GEMM)
    assert saved_us(find_unfused_attention, steps) == [600, 960]
    said = "2 kernels a step over its scores for 0.6 ms, and 4 matmuls for 0.6 ms."
    assert said in evidence(find_unfused_attention, steps)


@pytest.mark.parametrize(("outside_us", "saved"), [(150, [600, 720]), (151, [300, 420])])
def test_blocks_that_say_little(outside_us: float, saved: list[float]) -> None:
    """Forward has kernels of as many blocks outside of attention, too.

    Of backward no matmul is attention's, and where they take more than half of the 300 µs inside, no kernel either.
    300 + 300 µs, or 300, on the scores; matmuls of 200.
    """
    steps = layer(Steps(), part="attention").kernel(outside_us, ADD, blocks=777)
    steps.phase = "backward"
    steps.kernel(200, BF16_GEMM).kernel(300, ADD, blocks=777).kernel(200, BF16_GEMM)
    assert saved_us(find_unfused_attention, steps) == saved


def test_unfused_attention_by_its_softmax() -> None:
    """Two layers: 600 µs of softmax, 400 of matmuls."""
    assert saved_us(find_unfused_attention, layer(layer(Steps()))) == [600, 840]


@pytest.mark.parametrize(
    "steps",
    [
        layer(Steps()),  # one softmax is the loss's
        layer(layer(Steps(), LOG_SOFTMAX), LOG_SOFTMAX),
        layer(layer(Steps(phase="loss"))),
        layer(layer(Steps())).kernel(100, FLASH),
        kernels(3, 100, SOFTMAX),  # without matmuls around it
        kernels(3, 100, FLASH),
        kernels(3, 100, BF16_GEMM),
        layer(Steps().kernel(100, FLASH, part="attention")),
    ],
)
def test_no_unfused_attention(steps: Steps) -> None:
    assert saved_us(find_unfused_attention, steps) == []


def test_host_stall() -> None:
    """5,000 + 10 µs of calls, 100 of work: pauses of 200 leave 210, those of 20 the work."""
    steps = Steps().call(EVENT, 5_000, pause="gc").kernel(100)
    assert saved_us(find_host_stall, steps) == [5_010 - 210, 5_010 - 100]
    said = (
        "1 pause of 3 ms or more, 5 ms together, in which the program makes no CUDA call, most of it in the range gc."
    )
    assert said in evidence(find_host_stall, steps)


@pytest.mark.parametrize(
    "steps",
    [
        Steps().call(EVENT, 2_999, pause="gc").kernel(100),
        Steps().call(EVENT, 5_000, range="data").kernel(100),  # it loads
    ],
)
def test_no_host_stall(steps: Steps) -> None:
    assert saved_us(find_host_stall, steps) == []


def test_unfused_elementwise() -> None:
    """Chains of 4 and of 5 kernels, 100 µs each: of 900 µs are left 2 · 200, or 2 · 100."""
    steps = kernels(5, 100, ADD, steps=kernels(4, 100, ADD).kernel(100, BF16_GEMM)).kernel(100, BF16_GEMM)
    assert saved_us(find_unfused_elementwise, steps) == [900 - 400, 900 - 200]
    said = (
        "9 kernels a step, elementwise, reductions, norms and casts, take 0.9 ms (82% of the step), 100 µs each. "
        "They stand in chains of 4.6 kernels on average, one directly behind the other."
    )
    assert evidence(find_unfused_elementwise, steps) == said  # (4 · 4 + 5 · 5) ÷ 9


def test_kernels_that_are_one_pass_already() -> None:
    """A chain of 4, of which a softmax keeps its time: of the others' 300 µs are left 150, or 75.

    Of a sum the same is left, unless it becomes one kernel with those before it.
    """
    steps = kernels(3, 100, ADD).kernel(100, SOFTMAX).kernel(100, BF16_GEMM)
    assert saved_us(find_unfused_elementwise, steps) == [150, 225]
    steps = kernels(3, 100, ADD).kernel(100, REDUCTION).kernel(100, BF16_GEMM)
    assert saved_us(find_unfused_elementwise, steps) == [150, 300]


def test_launches_of_unfused_elementwise_kernels() -> None:
    """5 · 10 µs of calls, 5 · 8 of work, in a chain of 4 and a matmul: 2, or 1, of 4 launches are left.

    With 1 µs of work each, launching is the limit, and only that work is counted: none that the step waits for.
    """
    assert saved_us(find_unfused_elementwise, kernels(4, 8, ADD).kernel(8, BF16_GEMM)) == [20, 30]
    assert saved_us(find_unfused_elementwise, kernels(4, 1, ADD).kernel(1, BF16_GEMM)) == [0, 0]


@pytest.mark.parametrize(
    "steps",
    [
        kernels(3, 100, "triton_poi_fused_add_0"),
        kernels(3, 100, ADD, steps=Steps(phase="optimizer")),
        kernels(3, 100, BF16_GEMM),
        Steps().kernel(100, ADD),
        kernels(3, 100, CAST),  # a chain of copies, which is a finding of its own
        layer(layer(Steps())),  # attention's
    ],
)
def test_no_unfused_elementwise(steps: Steps) -> None:
    assert saved_us(find_unfused_elementwise, steps) == []


def test_layout_copies() -> None:
    """4 · 100 µs of copies: 65 % or all of it."""
    steps = kernels(4, 100, CAST).kernel(100, BF16_GEMM)
    assert saved_us(find_layout_copies, steps) == [260, 400]
    assert "4 copies a step stand in chains of 3 or more" in evidence(find_layout_copies, steps)


def test_a_chain_of_cudas_own_copies() -> None:
    steps = Steps().kernel(100, BF16_GEMM)
    for _ in range(3):
        steps.copy(100, ON_DEVICE, 1 << 20)
    assert saved_us(find_layout_copies, steps) == [195, 300]


@pytest.mark.parametrize(
    "steps",
    [
        kernels(2, 100, CAST).kernel(100, BF16_GEMM),
        kernels(2, 100, CAST, steps=kernels(2, 100, CAST).kernel(100, BF16_GEMM)).kernel(100, BF16_GEMM),
        kernels(4, 100, CAST, steps=Steps(phase="optimizer")).kernel(100, BF16_GEMM),
        # Under autocast: a weight, its bias, an input.
        Steps().kernel(100, CAST).kernel(2, CAST, blocks=3).kernel(50, CAST).kernel(100, BF16_GEMM),
        kernels(4, 100, ADD),
    ],
)
def test_no_layout_copies(steps: Steps) -> None:
    assert saved_us(find_layout_copies, steps) == []


def test_small_grids() -> None:
    """66 blocks on 132 multiprocessors, 200 µs: 50 % or 90 % of the half that has nothing to do."""
    steps = Steps().kernel(200, BF16_GEMM, blocks=66).kernel(100, BF16_GEMM)
    assert saved_us(find_small_grids, steps) == [50, 90]
    said = "1 kernel a step of fewer blocks than the GPU's 132 multiprocessors take 0.2 ms; 66 blocks on average."
    assert said in evidence(find_small_grids, steps)


@pytest.mark.parametrize(
    "steps",
    [
        Steps().kernel(19.9, BF16_GEMM, blocks=66),
        Steps().kernel(200, BF16_GEMM, blocks=132),
        Steps().kernel(200, BF16_GEMM, blocks=0),  # not recorded
        Steps(gpu=None).kernel(200, BF16_GEMM, blocks=66),
        Steps().kernel(200, NCCL, blocks=24),  # a collective needs no more
        Steps().copy(200, ON_DEVICE, 66),
    ],
)
def test_no_small_grids(steps: Steps) -> None:
    assert saved_us(find_small_grids, steps) == []


def test_exposed_communication() -> None:
    """300 µs of matmul, 200 of a collective that 200 more are hidden of: 55 % or all of the 200."""
    steps = Steps(phase="backward").kernel(300, BF16_GEMM).kernel(200, NCCL, duration=400)
    assert saved_us(find_exposed_communication, steps) == [110, 200]
    said = "1 collective a step take 0.4 ms, of which nothing hides 0.2 ms."
    assert said in evidence(find_exposed_communication, steps)


def test_no_exposed_communication() -> None:
    assert saved_us(find_exposed_communication, kernels(3, 100)) == []


# --- the ranking


def found(steps: Steps, **given: Any) -> Diagnosis:
    diagnosis = diagnose(steps.capture(**given))
    assert diagnosis is not None
    obeys_the_laws(diagnosis)
    return diagnosis


def of(diagnosis: Diagnosis, name: str) -> Finding:
    return next(one for one in diagnosis.findings if one.id == name)


def test_the_largest_saving_is_first_and_what_is_left_is_replayed_together() -> None:
    """A chain of 4 elementwise kernels, 1,000 µs; a collective of 200; 3 % of margin, for two runs differ.

    500 to 750 and 110 to 200 are saved; of 1,200 µs are left 700 and, with both, 590.
    """
    steps = replace(kernels(4, 250, ADD), phase="backward").kernel(200, NCCL)
    diagnosis = found(steps)
    assert [one.id for one in diagnosis.findings] == ["unfused_elementwise", "exposed_communication"]
    first, second = diagnosis.findings
    assert (first.saves_ms_low, first.saves_ms_high) == pytest.approx((0.500 * 0.97, 0.750 * 1.03))
    assert (second.saves_ms_low, second.saves_ms_high) == pytest.approx((0.110 * 0.97, 0.200 * 1.03))
    assert (first.left_after_all_ms, second.left_after_all_ms) == pytest.approx((0.700, 0.590))
    assert first.share_of_step == pytest.approx((0.485 + 0.7725) / 2 / 1.2)


def test_what_saves_less_than_3_percent_is_left_out() -> None:
    """Of a collective's 77.5 % are saved, the middle: 2.9 % of the step with 38 of 1,038 µs, 3.1 % with 41 of 1,041."""
    assert found(Steps(phase="backward").kernel(1_000, BF16_GEMM).kernel(38, NCCL)).findings == ()
    assert [one.id for one in found(Steps(phase="backward").kernel(1_000, BF16_GEMM).kernel(41, NCCL)).findings] == [
        "exposed_communication"
    ]


def calls() -> Steps:
    """Calls 80 µs apart, of which recording takes 20, each launching 5 µs of work."""
    steps = Steps()
    for _ in range(10):
        steps.kernel(5, BF16_GEMM, after=80, events=20)
    return steps


def test_a_step_without_the_profiler_is_estimated() -> None:
    """10 · 80 µs recorded. The profiler takes 40 % to all of 10 · 20; without one the CPU needs 0.84 of the rest."""
    diagnosis = found(calls(), low_share=0.4)
    assert not diagnosis.timed
    assert (diagnosis.step_ms_low, diagnosis.step_ms_high) == pytest.approx((0.600 * 0.84, 0.720))
    assert (diagnosis.profiled_ms, diagnosis.busy_ms, diagnosis.error) == pytest.approx((0.8, 0.050, 0))


@pytest.mark.parametrize("unprofiled_us", [200, 600, 799])
def test_a_step_that_was_timed(unprofiled_us: float) -> None:
    """The calls are as fast as the timing says: without what launching takes, 50 µs are left, give or take 20 %."""
    diagnosis = found(calls(), unprofiled_us=unprofiled_us, launch=0.7)
    assert diagnosis.timed
    assert diagnosis.step_ms_low == diagnosis.step_ms_high == unprofiled_us / US
    launches = of(diagnosis, "launch_bound")
    saved = (unprofiled_us - 50) / US
    assert launches.saves_ms_low == pytest.approx(saved * 0.8, rel=1e-3)
    assert launches.saves_ms_high == pytest.approx(min(saved * 1.2, unprofiled_us / US), rel=1e-3)


@pytest.mark.parametrize("unprofiled_us", [500, 2_000])
def test_a_timed_step_that_no_profiler_explains(unprofiled_us: float) -> None:
    """1,000 µs of work take half, or twice, of that: so does what is saved, 55 % to all of 400, and what is left."""
    steps = Steps(phase="backward").kernel(600, BF16_GEMM).kernel(400, NCCL)
    finding = of(found(steps, unprofiled_us=unprofiled_us), "exposed_communication")
    pace = unprofiled_us / 1_000
    assert (finding.saves_ms_low, finding.saves_ms_high) == pytest.approx((0.220 * 0.97 * pace, 0.400 * 1.03 * pace))
    assert finding.left_after_all_ms == pytest.approx(0.780 * pace)


def test_the_profiler_slows_the_step_down() -> None:
    """800 µs under the profiler, 480 without: 40 % is the profiler's; of 800 and 561 it is less than 30 %."""
    assert found(calls(), unprofiled_us=480).overhead_ms == pytest.approx((0.32, 0.32))
    assert found(calls(), unprofiled_us=561).overhead_ms is None


def test_a_profiler_that_records_every_operator_hides_the_program(real_capture: Callable[[str], Path]) -> None:
    """A range for each operator: 151 ms a step, of which 52 to 94 are the program's."""
    diagnosis = next(iter(summarize(real_capture("mem_small256")))).diagnosis
    assert diagnosis is not None
    assert diagnosis.overhead_ms is not None
    assert diagnosis.overhead_ms[0] == pytest.approx(diagnosis.profiled_ms - diagnosis.step_ms_high)
    assert diagnosis.overhead_ms[0] > 0.3 * diagnosis.profiled_ms


def test_steps_that_a_replay_does_not_reproduce_have_no_findings() -> None:
    """1,000 µs of work, said to have taken 1,300: the replay is 23 % shorter."""
    diagnosis = found(Steps().kernel(1_000, GEMM), measured_us=1_300)
    assert diagnosis.findings == ()
    assert diagnosis.doubt == "a replay of the recorded steps is 23% shorter than they are"


def test_without_steps_launches_or_a_gpu_nothing_is_looked_for() -> None:
    capture = calls().capture()
    assert capture.step is not None
    assert capture.device is not None
    assert diagnose(capture) is not None
    assert diagnose(replace(capture, step=None)) is None
    assert diagnose(replace(capture, study=None)) is None
    assert diagnose(replace(capture, device=replace(capture.device, name="CPU"))) is None


# --- laws


NAMES = (GEMM, BF16_GEMM, ADD, SOFTMAX, CAST, FLASH, FOREACH, NCCL, "triton_poi_fused_add_0")
APIS = (EVENT, "cudaStreamSynchronize_v3020", "cudaFree_v3020", "cudaMalloc_v3020")
WAYS = (PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE, DEVICE_TO_PAGEABLE, ON_DEVICE)


@st.composite
def any_steps(draw: st.DrawFn) -> Steps:
    """Steps of any calls and any work; waits wait for what was launched before them."""
    steps = Steps(draw(st.integers(3, 5)))
    times = st.sampled_from([1, 10, 60, 150, 2_000])
    ranges = st.sampled_from(["", "", "data", "log", "forward"])
    for _ in range(draw(st.integers(1, 10))):
        steps.phase = draw(st.sampled_from(["forward", "loss", "backward", "optimizer"]))
        many, us, after, inside = draw(st.sampled_from([1, 1, 3, 45])), draw(times), draw(times), draw(ranges)
        what = draw(st.sampled_from(["kernel", "kernel", "kernel", "call", "copy"]))
        if what == "kernel":
            name, part, blocks = (
                draw(st.sampled_from(NAMES)),
                draw(st.sampled_from(["", "attention"])),
                draw(st.sampled_from([8, 777, 10_000])),
            )
            for _ in range(many):
                steps.kernel(us, name, after, part=part, blocks=blocks, range=inside, events=draw(st.integers(0, 9)))
        elif what == "copy":
            way, size = draw(st.sampled_from(WAYS)), draw(st.sampled_from([4, 1 << 16, 1 << 24]))
            steps.copy(us, way, size, after, waits=draw(st.booleans()), range=inside)
        else:
            api = draw(st.sampled_from(APIS))
            steps.call(api, after, range=inside, waits=bool(steps.pieces) and api != EVENT)
    if not steps.pieces:
        steps.kernel(10)
    return steps


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of 30 kB: a capture with many steps
@given(any_steps(), st.floats(0, 1), st.sampled_from(["launch", "sync", "data"]))
def test_findings_of_any_steps(steps: Steps, low_share: float, cause: str) -> None:
    found(steps, low_share=low_share, **{cause: 1.0})


@given(any_steps(), st.floats(0.05, 1.5))
def test_findings_of_any_timed_steps(steps: Steps, of_recorded: float) -> None:
    recorded = steps.study().measured_ns / US
    diagnosis = found(steps, unprofiled_us=recorded * of_recorded, launch=1.0)
    assert diagnosis.step_ms_low == diagnosis.step_ms_high == pytest.approx(recorded * of_recorded / US)
