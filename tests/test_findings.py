"""Findings: what each rule sees in steps that are worked out by hand, and what it says of captures of planted faults.

Beside each expectation stands how a step is worked out: the GPU's work, or the calls one after the other, whichever
takes longer. See ``tests.support.steps`` for what a call takes.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import api, summarize
from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings import kernels as kernels_module
from nsys_analyzer.analysis.findings import kernels_without_operators, values_on_host, waits
from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    Diagnosis,
    Finding,
    FindingFigures,
    FindingTexts,
    Rule,
)
from nsys_analyzer.analysis.findings.values_on_host import find_device_to_host_copy, find_host_sync
from nsys_analyzer.analysis.findings.waits import (
    find_allocator,
)
from nsys_analyzer.analysis.steps.step import IdleTime
from nsys_analyzer.analysis.summary.complete import complete_captures, diagnose_capture
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import CompiledCode, Run
from nsys_analyzer.report.facts import say
from nsys_analyzer.report.finding_texts import TEXTS, ranks, write_finding
from nsys_analyzer.text import plain
from nsys_analyzer.trace.columns import (
    DEVICE_TO_PAGEABLE,
    ON_DEVICE,
    OTHER_CALL,
    PAGEABLE_TO_DEVICE,
    PINNED_TO_DEVICE,
)
from tests.support.cases import CASES, Case, Line, read_cases
from tests.support.export import ADD, GEMM, SOFTMAX
from tests.support.packed import EXAMPLES, FAULTS, unpack_fault
from tests.support.program import NCCL, Program
from tests.support.steps import H200, US, Steps

MEASURED: dict[str, dict[str, Any]] = json.loads((EXAMPLES / "faults/measured.json").read_text())["transformer"]
#: The finding that each planted fault is.
PLANTED = {
    "loader": "data_loading", "item": "host_sync", "tiny_batch": "launch_bound", "pageable": "pageable_copy",
    "fp32": "fp32_matmul", "foreach": "unfused_optimizer", "empty_cache": "allocator",
    "attention": "unfused_attention", "collector": "host_stall", "checkpoint": "device_to_host_copy",
    "casts": "layout_copies", "eager": "unfused_elementwise",
}  # fmt: skip
IDS = {
    *PLANTED.values(), "small_grids", "wave_tails", "gpu_idle",
    "between_steps", "cache_copies",
}  # fmt: skip
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, 4, 64, 64>(int)"

BF16_GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"
CAST = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)>"
)
TOP_K = "void at::native::sbtopk::gatherTopK<c10::BFloat16, unsigned int, 2, false>(int)"
GATHER = "void at::native::vectorized_gather_kernel<16, long>(char*)"
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
        (capture,) = summarize(unpack_fault(name, Path(folder)))
    assert capture.diagnosis is not None
    return capture.diagnosis


def saved_ms(name: str) -> float:
    """What the remedy of a fault saves: the median of the rounds' differences."""
    rounds = zip(MEASURED[name]["fault_ms"], MEASURED[name]["remedy_ms"], strict=True)
    return float(statistics.median(fault - remedy for fault, remedy in rounds))


def test_every_fault_was_captured_and_timed() -> None:
    """And what is no fault, and was changed to try what-if."""
    measured = {*PLANTED, "none", "bf16", "double_batch"}
    assert {path.name.partition(".")[0] for path in FAULTS.iterdir()} == MEASURED.keys() == measured


def test_the_planted_fault_comes_first() -> None:
    firsts = {name: next((one.id for one in diagnosis_of(name).findings), None) for name in PLANTED}
    wrong = {name: first for name, first in firsts.items() if first != PLANTED[name]}
    assert len(wrong) <= 1, wrong


def test_the_measured_saving_lies_inside_a_narrow_interval() -> None:
    """Inside for at least 10 of 12. Half of the intervals are no wider than ±25 % of their middle."""
    findings = {
        name: next(one for one in diagnosis_of(name).findings if one.id == wanted) for name, wanted in PLANTED.items()
    }
    outside = {
        name: (saved_ms(name), one.saves_ms_low, one.saves_ms_high)
        for name, one in findings.items()
        if not one.saves_ms_low <= saved_ms(name) <= one.saves_ms_high
    }
    assert len(outside) <= 2, outside
    widths = [(one.saves_ms_high - one.saves_ms_low) / 2 / one.saves_ms for one in findings.values()]
    assert statistics.median(widths) <= 0.25


def test_the_control_has_no_finding() -> None:
    assert [one for one in diagnosis_of("none").findings if one.share_of_step > 0.05] == []


@pytest.mark.parametrize("name", MEASURED)
def test_findings_of_a_capture(name: str) -> None:
    diagnosis = diagnosis_of(name)
    assert {one.id for one in diagnosis.findings} <= IDS
    obeys_the_laws(diagnosis)
    # the replayed steps are the recorded ones
    assert abs(diagnosis.replay_error) < 0.05


def obeys_the_laws(diagnosis: Diagnosis) -> None:
    """What holds for the findings of any steps."""
    assert diagnosis.step_ms_low <= diagnosis.step_ms_high
    savings = [one.saves_ms for one in diagnosis.findings]
    assert savings == sorted(savings, reverse=True)
    # What is left for launching is no more than the specific causes of idle time leave.
    idle = [one for one in diagnosis.findings if one.place and one.place.kind == "idle" and one.id != "gpu_idle"]
    if any(one.id == "launch_bound" for one in idle):
        assert sum(one.saves_ms_high for one in idle) <= diagnosis.step_ms_high * (1 + 1e-9)
    before = diagnosis.step_ms * (1 + 1e-9)
    for one in diagnosis.findings:
        assert 0 <= one.saves_ms_low <= one.saves_ms_high <= diagnosis.step_ms * (1 + 1e-9)
        assert one.step_ms == pytest.approx(diagnosis.step_ms)
        assert one.saves_ms + one.left_ms == pytest.approx(one.step_ms)
        assert 0 <= one.left_after_all_ms <= before
        before = one.left_after_all_ms * (1 + 1e-9) + 1e-9
        said = write_finding(one)
        texts = [said.title, *said.evidence, said.derivation, said.disproof, *said.remedy]
        assert all(plain(text, "") for text in texts)
        assert not any(word in plain(text, "") for text in texts for word in ("nan", "inf ", "-0"))


# --- each rule, by steps worked out by hand


def saved_us(rule: Rule, steps: Steps, **idle_ms: float) -> list[float]:
    """What each assumption saves of a step, µs; nothing where the rule finds nothing."""
    case = steps.case(**idle_ms)
    (baseline,) = case.baselines
    found = list(rule(case))
    assert len(found) <= 1
    return [round((baseline.step_ns - change(baseline).step_ns) / US, 1) for one in found for change in one.changes]


def texts_of(candidate: Candidate) -> FindingTexts:
    """The sentences of a candidate."""
    return TEXTS[type(candidate.figures)](candidate.figures)


def evidence_of(candidate: Candidate) -> str:
    """What was seen, with breaking spaces."""
    return " ".join(plain(sentence) for sentence in texts_of(candidate).evidence).replace("\xa0", " ")


def kernels(count: int, us: float, name: str = GEMM, after: float = 10, steps: Steps | None = None) -> Steps:
    steps = steps or Steps()
    for _ in range(count):
        steps.kernel(us, name, after)
    return steps


def checkpoint(inside: str, after_us: float = 0) -> Steps:
    """100 + 1,000 µs of work that the program waits for, and a call in the same range."""
    steps = Steps().kernel(100).copy(1_000, DEVICE_TO_PAGEABLE, 8 << 20, waits=True, range=inside)
    return steps.call(EVENT, after_us, range=inside) if after_us else steps


def optimizer(count: int, us: float, name: str = ADD) -> Steps:
    return kernels(count, us, name, steps=Steps(phase="optimizer"))


GTX_1080 = replace(H200, name="NVIDIA GeForce GTX 1080")
MI355X = replace(H200, name="AMD Instinct MI355X")
#: The rules by their names in the case file.
RULES: dict[str, Rule] = {
    name.removeprefix("find_"): rule
    for module in (kernels_module, kernels_without_operators, values_on_host, waits)
    for name, rule in vars(module).items()
    if name.startswith("find_")
}
#: The words of the case file that stand for something else.
WORDS: dict[str, Any] = {
    "-": None, "GTX_1080": GTX_1080, "MI355X": MI355X, "GEMM": GEMM, "BF16_GEMM": BF16_GEMM, "ADD": ADD, "CAT": CAT,
    "SOFTMAX": SOFTMAX, "LOG_SOFTMAX": LOG_SOFTMAX, "CAST": CAST, "TOP_K": TOP_K, "GATHER": GATHER, "FLASH": FLASH,
    "REDUCTION": REDUCTION, "FOREACH": FOREACH, "FUSED_ADAM": FUSED_ADAM, "NCCL": NCCL, "ON_DEVICE": ON_DEVICE,
    "DEVICE_TO_PAGEABLE": DEVICE_TO_PAGEABLE, "PAGEABLE_TO_DEVICE": PAGEABLE_TO_DEVICE,
    "PINNED_TO_DEVICE": PINNED_TO_DEVICE,
}  # fmt: skip


def value_of(word: str) -> Any:
    """What a word of the case file stands for: a name, a number, or itself."""
    if word in WORDS:
        return WORDS[word]
    return int(word) if word.isdigit() else float(word) if re.fullmatch(r"\d+\.\d+", word) else word


class CheckedSteps:
    """Builds the steps of a case of ``tests/cases/findings.txt`` row by row, and checks what rules find in them.

    A row is a method of ``Steps`` with its arguments. ``steps`` gives the engine's kind or the GPU, ``phase`` the phase
    of the kernels behind it, and ``idle`` the idle time of a cause in ms. ``repeat`` repeats the rows below it.
    ``= RULE:`` is followed by what each assumption of the rule saves of a step, in µs, and ``= evidence has`` by a part
    of what that rule says, as ``title`` and ``remedy`` are. ``findings`` are the IDs of the ranked findings, and
    ``doubt`` is the reason for none. ``= RULE: a saving`` expects a saving of any size.
    """

    def __init__(self, case: Case) -> None:
        self.definitions = case.definitions
        self.start_over()
        for line in case.lines:
            self.carry_out(line)

    def start_over(self, **steps: Any) -> None:
        self.steps, self.idle_ms = Steps(**steps), dict[str, float]()

    def carry_out(self, line: Line) -> None:
        if line.text.startswith("="):
            self.compare(*line.text.removeprefix("= ").split(" ", maxsplit=1), f"line {line.number}")
            return
        verb, *words = shlex.split(line.text, comments=True)
        given = [value_of(word) for word in words if "=" not in word]
        options = {name: value_of(word) for name, equals, word in (word.partition("=") for word in words) if equals}
        if verb in ("start", "steps"):
            self.start_over(**options)
        elif verb == "phase":
            self.steps.phase = given[0]
        elif verb == "idle":
            self.idle_ms = options
        elif verb == "call":
            self.steps.call(f"{given[0]}_v3020", *given[1:], **options)
        elif verb == "repeat" or verb in self.definitions:
            times, rows = (given[0], line.below) if verb == "repeat" else (1, self.definitions[verb][1])
            for row in (*rows,) * times:
                self.carry_out(row)
        else:
            getattr(self.steps, verb)(*given, **options)

    def compare(self, name: str, text: str, where: str) -> None:
        if name == "doubt:":
            doubt = diagnosed(self.steps.capture(**self.idle_ms)).doubt
            assert (doubt.id if doubt else "none") == text, where
            return
        if name == "findings:":
            diagnosis = found(self.steps, **self.idle_ms)
            assert [one.id for one in diagnosis.findings] == ([] if text == "nothing" else eval(f"[{text}]")), where
            return
        if name in ("evidence", "title", "remedy"):
            (candidate,) = self.rule(self.steps.case(**self.idle_ms))
            texts = texts_of(candidate)
            said = {"evidence": evidence_of(candidate), "title": texts.title, "remedy": " ".join(texts.remedy)}[name]
            relation, phrase = text.split(" ", maxsplit=1)
            assert (phrase.strip('"') in said) == (relation == "has"), where
            return
        self.rule = RULES[name.removesuffix(":")]
        saved = saved_us(self.rule, self.steps, **self.idle_ms)
        if text == "a saving":
            assert saved, where
        else:
            assert saved == ([] if text == "nothing" else eval(f"[{text}]")), where


@pytest.mark.parametrize("case", read_cases(CASES / "findings.txt"), ids=lambda case: case.name)
def test_what_a_rule_finds(case: Case) -> None:
    CheckedSteps(case)


def test_an_allocation_now_and_then() -> None:
    """One call in four steps is what the cache needs to grow."""
    case = Steps(steps=4).call("cudaMalloc_v3020", 200).kernel(100).case()
    assert list(find_allocator(case))
    kind = case.study.calls.kind.copy()
    kind[2:] = OTHER_CALL
    study = replace(case.study, calls=replace(case.study.calls, kind=kind))
    assert list(find_allocator(replace(case, study=study))) == []


# --- the ranking


def diagnosed(capture: CaptureSummary) -> Diagnosis:
    diagnosis = diagnose_capture(capture)
    assert diagnosis is not None
    return diagnosis


def found(steps: Steps, **given: Any) -> Diagnosis:
    diagnosis = diagnosed(steps.capture(**given))
    obeys_the_laws(diagnosis)
    return diagnosis


def of(diagnosis: Diagnosis, name: str) -> Finding:
    return next(one for one in diagnosis.findings if one.id == name)


def test_the_largest_saving_is_first_and_what_is_left_is_replayed_together() -> None:
    """A chain of 4 elementwise kernels, 1,000 µs; a matmul of 200 on half of the GPU.

    500 to 750 and 50 to 90 are saved; of 1,200 µs are left 700 and, with both, 650. Another run differs by 3 % of the
    GPU's time that is saved at most, and by 1 % of the time that is then left.
    """
    diagnosis = found(kernels(4, 250, ADD).kernel(200, BF16_GEMM, blocks=66))
    assert [one.id for one in diagnosis.findings] == ["unfused_elementwise", "small_grids"]
    first, second = diagnosis.findings
    for finding, low, high in ((first, 0.500, 0.750), (second, 0.050, 0.090)):
        half = math.hypot((high - low) / 2, 0.03 * high, 0.01 * (1.2 - high))
        expected = (low + high) / 2 - half, (low + high) / 2 + half
        assert (finding.saves_ms_low, finding.saves_ms_high) == pytest.approx(expected)
    assert (first.left_after_all_ms, second.left_after_all_ms) == pytest.approx((0.700, 0.650))
    assert first.share_of_step == pytest.approx((0.500 + 0.750) / 2 / 1.2)


def calls() -> Steps:
    """Calls 80 µs apart, of which recording takes 20, each launching 5 µs of work."""
    steps = Steps()
    for _ in range(10):
        steps.kernel(5, BF16_GEMM, after=80, events=20)
    return steps


def test_a_step_without_the_profiler_is_estimated() -> None:
    """10 · 80 µs recorded. The profiler takes 40 % to all of 10 · 20; without one the CPU needs 0.84 of the rest.

    Between runs, the 50 µs of the GPU differ by 3 %, and the rest by 15 %. The interval ends with the recorded 800 µs.
    """
    diagnosis = found(calls(), low_share=0.4)
    assert not diagnosis.is_timed
    middle = (0.600 * 0.84 + 0.720) / 2
    spread = 0.03 * 0.050 + 0.15 * (middle - 0.050)
    half = 0.800 - middle + 0.03 * 0.050
    assert half < (0.720 - 0.600 * 0.84) / 2 + spread
    assert (diagnosis.step_ms_low, diagnosis.step_ms_high) == pytest.approx((middle - half, middle + half))
    assert (diagnosis.profiled_ms, diagnosis.busy_ms, diagnosis.replay_error) == pytest.approx((0.8, 0.050, 0))


@pytest.mark.parametrize("unprofiled_us", [200, 600, 799])
def test_a_step_that_was_timed(unprofiled_us: float) -> None:
    """The calls are as fast as the timing says: without what launching takes, 50 µs are left.

    No more may be saved: 50 µs are the GPU's work, which stays, and 700 the idle time for launches. But another run may
    save less, because of 15 % of the CPU's time, and of 3 % and 1 % of the GPU's.
    """
    diagnosis = found(calls(), unprofiled_us=unprofiled_us, launch=0.7)
    assert diagnosis.is_timed
    assert diagnosis.step_ms_low == diagnosis.step_ms_high == unprofiled_us / US
    launches = of(diagnosis, "launch_bound")
    saved = (unprofiled_us - 50) / US
    half = math.hypot(0.15 * unprofiled_us, 0.03 * 50, 0.01 * 50) / US
    assert launches.saves_ms_low == pytest.approx(saved - half, rel=1e-3)
    assert launches.saves_ms_high == pytest.approx(min(saved, 0.7), rel=1e-3)


@pytest.mark.parametrize(("data_ms", "most_ms"), [(15.0, 15.0), (14.0, 14.0), (19.0, 15.02)])
def test_no_saving_is_above_the_idle_time_of_its_cause(data_ms: float, most_ms: float) -> None:
    """20,000 + 10 + 10 µs of calls, 5,000 of work: 15.02 ms are saved, or 11.82 where the CPU takes 0.84 of its time.

    The middle is 13.42. The critical path of the last three steps consists of their calls and of the last kernel, which
    ends 5 ms after these: 3 · 20.02 − 5 ms are saved, and 3 · 5 − 5 ms of kernels added. In another run, 15 % and 3 %
    of these times and 1 % of the kernels' time are different.

    No more than the pipeline's own idle time, and no more than the step of 20.02 ms less the 5 of work that stays.
    """
    loading = Steps().call(EVENT, 20_000, range="data").call(EVENT).kernel(5_000, BF16_GEMM)
    finding = of(found(loading, data=data_ms), "data_loading")
    assert finding.saves_ms_high == pytest.approx(most_ms, rel=1e-3)
    half = math.hypot((15.02 - 11.82) / 2, 0.15 * (20.02 - 5 / 3), 0.03 * (5 - 5 / 3), 0.01 * 5)
    assert finding.saves_ms_low == pytest.approx((15.02 + 11.82) / 2 - half, rel=1e-3)


def test_a_wait_saves_no_more_than_it_lasts() -> None:
    """20 ms for a batch, 9 of work that is waited for from its launch on: without the wait both run side by side.

    The wait lasts 9 ms less the 10 µs of the launch, behind which the GPU idles for 20 µs; loading takes 20 of 29.02.
    """
    diagnosis = found(Steps().call(EVENT, 20_000, range="data").kernel(9_000, BF16_GEMM).sync(), data=20.0, launch=0.02)
    data, sync = diagnosis.findings
    assert (data.id, sync.id) == ("data_loading", "host_sync")
    assert sync.saves_ms_high == pytest.approx(9.01, rel=1e-3)
    assert data.saves_ms_high + sync.saves_ms_high <= 29.02


def test_no_saving_of_kernels_is_above_their_time() -> None:
    """Of 100 · 10 µs for launches 40 are left, and of 100 · 1 µs of work 30 to 60 %.

    600 µs are saved by fewer launches; that is more than the kernels' own 100 µs and 0.3 ms of idle time for launches.
    """
    finding = of(found(optimizer(100, 1), launch=0.3), "unfused_optimizer")
    assert finding.saves_ms_high == pytest.approx(0.1 + 0.3)


START_UP = "cudaFree 3,000 ms and cudaMalloc 900 ms"


@pytest.mark.parametrize(
    ("steps", "after_us", "said"), [(1, 1_000_000, START_UP), (1, 20_000_000, ""), (4, 10_000, "")]
)
def test_a_cold_start_is_no_step(steps: int, after_us: float, said: str) -> None:
    """Calls that wait for nothing take 3 + 0.9 s of 4.9, or of 23.9; where they come in each step, it is no start."""
    made = Steps(steps).call("cudaFree_v3020", 3_000_000).call("cudaMalloc_v3020", 900_000)
    diagnosis = diagnosed(made.kernel(100).call(EVENT, after_us).capture(allocator=3_000.0, launch=900.0))
    if not said:
        assert diagnosis.doubt is None or diagnosis.doubt.id != "cold_start"
        return
    assert diagnosis.findings == ()
    assert diagnosis.doubt
    assert diagnosis.doubt.id == "cold_start"
    sentence = plain(say(diagnosis.doubt))
    assert "this is a cold start. Of 4,900 ms on the CPU, 3,900 ms are calls" in sentence
    assert said in sentence
    assert sentence.endswith("Record steps after the warm-up.")


def test_an_out_of_memory_capture_says_what_ran_out(real_capture: Callable[[str], Path]) -> None:
    """The second of two calls of cudaMalloc that fail lies in a forward pass, and nothing is launched behind it."""
    (capture,) = summarize(real_capture("oom_fp32"))
    said = (
        "cudaMalloc failed in the range forward on the NVIDIA H200, which has 139.8\N{NO-BREAK SPACE}GiB, and nothing "
        "was launched afterwards."
    )
    assert (capture.status, capture.message, capture.findings) == ("oom", said, None)
    assert (
        capture.findings_missing == f"No saving can be derived for this capture: the program ran out of memory: {said}"
    )


def test_json_has_the_findings_and_the_shares_of_markdown() -> None:
    """A replay that is too short tells nothing, but the idle time: 1.2 of 1.3 ms, of which none to all is saved."""
    (capture,) = complete_captures([kernels(2, 50).capture(measured_us=1_300, sync=1.2)])
    assert capture.findings is not None
    (idle,) = capture.findings
    assert capture.missing_reason
    assert idle.share_of_step == pytest.approx(1.2 / 2 / 1.3)
    text = api.render(api.build_report([capture])).replace("\xa0", " ")
    assert "1. The GPU is idle because the program waits for it: a fix saves 0.0–1.2 ms a step (46 %)" in text
    assert "    46 % |" in text


def test_words_about_one_pass_name_no_step() -> None:
    case = checkpoint("save").kernel(100).sync().case()
    case = replace(case, summary=replace(case.summary, source="pass"))
    titles = [
        texts_of(candidate).title for rule in (find_device_to_host_copy, find_host_sync) for candidate in rule(case)
    ]
    assert titles == ["Tensors are copied to the host", "The program waits for the GPU"]


def test_a_copy_behind_the_last_step_is_none_of_the_loop() -> None:
    """Of four steps the last alone keeps its copy."""
    case = checkpoint("save").case()
    operations = case.study.operations
    copy = np.where(np.arange(len(operations)) >= 6, operations.copy, 0).astype(np.int8)
    study = replace(case.study, operations=replace(operations, copy=copy))
    assert list(find_device_to_host_copy(replace(case, study=study))) == []


@pytest.mark.parametrize("unprofiled_us", [500, 2_000])
def test_a_timed_step_that_no_profiler_explains(unprofiled_us: float) -> None:
    """1,000 µs of work take half, or twice, of that: so does what is saved, 25 to 45 % of 400, and what is left."""
    steps = Steps().kernel(600, BF16_GEMM).kernel(400, BF16_GEMM, blocks=66)
    finding = of(found(steps, unprofiled_us=unprofiled_us), "small_grids")
    pace = unprofiled_us / 1_000
    half = math.hypot((0.180 - 0.100) / 2, 0.03 * 0.180, 0.01 * (1 - 0.180)) * pace
    assert (finding.saves_ms_low, finding.saves_ms_high) == pytest.approx((0.140 * pace - half, 0.140 * pace + half))
    assert finding.left_after_all_ms == pytest.approx(0.900 * pace)


def test_the_profiler_slows_the_step_down() -> None:
    """800 µs under the profiler, 480 without: 40 % is the profiler's; of 800 and 561 it is less than 30 %."""
    assert found(calls(), unprofiled_us=480).profiler_overhead_ms == pytest.approx((0.32, 0.32))
    assert found(calls(), unprofiled_us=561).profiler_overhead_ms is None


def test_a_profiler_that_records_every_operator_hides_the_program(real_capture: Callable[[str], Path]) -> None:
    """A range for each operator: 151 ms a step, of which 52 to 94 are the program's."""
    diagnosis = next(iter(summarize(real_capture("mem_small256")))).diagnosis
    assert diagnosis is not None
    assert diagnosis.profiler_overhead_ms is not None
    assert diagnosis.profiled_ms - np.mean(diagnosis.profiler_overhead_ms) == pytest.approx(diagnosis.step_ms)
    assert diagnosis.profiler_overhead_ms[0] > 0.3 * diagnosis.profiled_ms


def test_steps_that_a_replay_does_not_reproduce_have_no_findings() -> None:
    """1,000 µs of work, said to have taken 1,300: the replay is 23 % shorter."""
    diagnosis = found(Steps().kernel(1_000, GEMM), measured_us=1_300)
    assert diagnosis.findings == ()
    assert diagnosis.doubt
    assert diagnosis.doubt.values["error"] == pytest.approx(1_000 / 1_300 - 1)
    sentence = (
        "No saving can be derived for this capture: the replayed steps are 23\xa0% shorter than the recorded steps."
    )
    assert say(diagnosis.doubt) == sentence


def texts_of_idle_time(cause: str, *rows: tuple[str | None, str | None, float]) -> FindingTexts:
    """The texts of the one finding of steps that are too short to be replayed: range, call and ms of idle time."""
    capture = kernels(2, 100).capture(measured_us=1_300, **{cause: sum(ms for *_, ms in rows)})
    assert capture.step is not None
    idle = tuple(IdleTime(cause, range_, api, ms, 1) for range_, api, ms in rows)  # type: ignore[arg-type]
    (finding,) = diagnosed(replace(capture, step=replace(capture.step, idle_by_cause=idle))).findings
    return write_finding(finding)


@pytest.mark.parametrize(("second", "said"), [(0.2, True), (0.19, False)])
def test_most_is_half_or_more(second: float, said: bool) -> None:
    """Idle time of 0.3 ms and 0.2 in two calls of a range, of 0.3 and 0.2 in two others: half of it is most."""
    parts = (("a", "1", 0.3), ("a", "2", second), ("b", "3", 0.3), ("c", "4", 0.2))
    idle = texts_of_idle_time("sync", *parts)
    assert ("mostly in the range" in plain(idle.evidence[0], "")) is said


def test_idle_time_in_no_range_is_said_by_its_call() -> None:
    """Of 1.2 ms 1 is in launches of graphs: what to type is of them."""
    idle = texts_of_idle_time("launch", (None, "cudaGraphLaunch", 1.0), (None, None, 0.2))
    text = plain(idle.evidence[0]).replace("\N{NO-BREAK SPACE}", " ")
    assert "This idle time takes 1.1 ms of a step, mostly in cudaGraphLaunch." in text
    assert "--cuda-graph-trace=graph" in idle.remedy[0]


@pytest.mark.parametrize(("kernel", "said"), [("void at::native::sum(int)", True), ("void life(int*)", False)])
def test_a_program_without_pytorch_is_told_nothing_of_it(tmp_path: Path, kernel: str, said: bool) -> None:
    """Three steps of 5 ms, in each of which the program works 4.491 ms between two kernels."""
    program = Program()
    for at in range(0, 15_000, 5_000):
        program.step(at, at + 5_000).work((at + 5, at + 9), (at + 10, at + 20), name=kernel)
        program.work((at + 4_500, at + 4_504), (at + 4_505, at + 4_600), name=kernel)
    (capture,) = summarize(program.write(tmp_path / "life.sqlite"))
    assert capture.is_torch is said
    assert [any("Python" in line for line in one.remedy) for one in capture.findings or ()] == [said]
    text = api.render(api.build_report([capture]))
    assert ("```python\n" in text) is said


def test_without_steps_launches_or_a_gpu_nothing_is_looked_for() -> None:
    capture = calls().capture()
    assert capture.device is not None
    assert diagnosed(capture)
    assert diagnose_capture(replace(capture, step=None)) is None
    assert diagnose_capture(replace(capture, study=None)) is None
    assert diagnose_capture(replace(capture, device=replace(capture.device, name="CPU"))) is None


# --- sentences


def test_every_type_of_figures_has_its_texts() -> None:
    """A plugin's ``FindingTexts`` are sentences already."""
    kinds = [kind for base in FindingFigures.__subclasses__() for kind in base.__subclasses__() or [base]]
    in_package = {kind for kind in kinds if kind.__module__.startswith("nsys_analyzer.")}
    assert in_package - {FindingTexts} == TEXTS.keys() | ranks.TEXTS.keys()


REASONS = (
    Fact("earlier_work"),
    Fact("replay_differs", error=0.2),
    Fact("cold_start", start_up_ms=3_000.0, total_ms=4_000.0, calls=(("cudaFree", 3_000.0),)),
    Fact("captures_graphs"),
    Fact("findings_out_of_memory", failure=None),
    Fact("ran_on_cpu"),
    Fact("no_capture", reason=None),
    Fact("only_launches_recorded", launches=3),
    Fact("no_recorded_kernel", by_torch=True),
    Fact("idle_steps"),
    Fact("no_replay_without_api_calls", by_torch=False),
    Fact("too_few_api_calls"),
    Fact("hidden_in_graphs", share=0.5),
)


def test_every_reason_for_missing_findings_is_explained() -> None:
    """Each reason in a sentence of its own, which ends with a full stop."""
    sentences = [plain(say(reason)) for reason in REASONS]
    assert len(set(sentences)) == len(sentences)
    assert all(sentence.endswith(".") for sentence in sentences)


# --- compiled programs


def diagnose_compiled(steps: Steps, compiled: CompiledCode | None, **idle_ms: float) -> tuple[Finding, ...]:
    """The findings of steps whose manifest has these graph breaks and recompilations."""
    run = Run(compiled=compiled)
    (capture,) = complete_captures((replace(steps.capture(**idle_ms), run=run),))
    assert capture.diagnosis
    return tuple(map(write_finding, capture.diagnosis.findings))


def test_graph_breaks_explain_why_the_gpu_waits_for_launches() -> None:
    """Ten kernels of 1 µs are launched in 100 µs: 90 are idle. Graph breaks have the saving of launches, and reasons.

    Without a graph break, and if the GPU is busy, nothing is said of them.
    """
    launches = Steps()
    for _ in range(10):
        launches.kernel(1)
    broken = CompiledCode(graph_breaks={"model.py:7 in forward: print": 1, "model.py:9 in forward: .item()": 3})
    (plain_finding,) = diagnose_compiled(launches, CompiledCode(), launch=0.09)
    (found,) = diagnose_compiled(launches, broken, launch=0.09)
    assert (plain_finding.id, found.id) == ("launch_bound", "graph_breaks")
    assert (found.saves_ms_low, found.saves_ms_high) == (plain_finding.saves_ms_low, plain_finding.saves_ms_high)
    assert plain(found.evidence[0], "`").endswith(
        "(number of compilations): `model.py:9 in forward: .item()` 3×, `model.py:7 in forward: print` 1×."
    )
    busy = diagnose_compiled(Steps().kernel(100, BF16_GEMM), broken, launch=0.001)
    assert "graph_breaks" not in [one.id for one in busy]


@pytest.mark.parametrize(("pause_us", "found"), [(80_000, "recompilation"), (20_000, "host_stall")])
def test_recompilations_explain_long_pauses(pause_us: float, found: str) -> None:
    """A pause of 80 ms in each step may be a recompilation; one of 20 ms is too short."""
    compiled = CompiledCode(recompiles={"model.py:5 in forward: size mismatch": 2})
    steps = Steps().kernel(10, after=pause_us).kernel(10)
    (finding,) = diagnose_compiled(steps, compiled, host=pause_us / 1e3)
    assert finding.id == found
    assert ("compiles" in plain(finding.evidence[0])) == (found == "recompilation")
    assert [one.id for one in diagnose_compiled(steps, None, host=pause_us / 1e3)] == ["host_stall"]


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
            steps.call(api, after, range=inside, waits=bool(steps.operations) and api != EVENT)
    if not steps.operations:
        steps.kernel(10)
    return steps


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of 30 kB: a capture with many steps
@given(any_steps(), st.floats(0, 1), st.sampled_from(["launch", "sync", "data"]))
def test_findings_of_any_steps(steps: Steps, low_share: float, cause: str) -> None:
    found(steps, low_share=low_share, **{cause: 1.0})


@given(any_steps(), st.floats(0.05, 1.5))
def test_findings_of_any_timed_steps(steps: Steps, of_recorded: float) -> None:
    recorded = steps.study().profiled_step_ns / US
    diagnosis = found(steps, unprofiled_us=recorded * of_recorded, launch=1.0)
    assert diagnosis.step_ms_low == diagnosis.step_ms_high == pytest.approx(recorded * of_recorded / US)
