"""Tests the findings about operators, by calls that are worked out by hand.

The GPU's work takes longer than the launches where nothing else is said, so a step takes the sum of its kernels, and a
change saves what it takes from them. The attainable times are those of the H200 in ``attainable_times.csv``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import api
from nsys_analyzer.analysis.findings import fewer_operators
from nsys_analyzer.analysis.findings import operators as rules
from nsys_analyzer.analysis.findings.diagnosis import _rank_candidates, _without_explained_work
from nsys_analyzer.analysis.findings.finding import Candidate, Rule, StepsToExplain
from nsys_analyzer.analysis.findings.kernels import find_small_grids
from nsys_analyzer.analysis.findings.kernels_without_operators import find_layout_copies, find_unfused_elementwise
from nsys_analyzer.analysis.findings.redundant_work import find_redundant_work
from nsys_analyzer.analysis.findings.waits import find_launch_bound
from nsys_analyzer.analysis.operators.account import fold_rows, make_account
from nsys_analyzer.analysis.operators.costs import estimate_cost
from nsys_analyzer.analysis.operators.shape_reasons import find_misaligned_sizes
from nsys_analyzer.analysis.operators.waves import count_resident_blocks, find_idle_shares
from nsys_analyzer.analysis.steps.lines import StackSamples
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import CompiledCode, Run
from nsys_analyzer.report.finding_texts import TEXTS
from nsys_analyzer.text import plain
from nsys_analyzer.trace.columns import BlockResources
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from nsys_analyzer.trace.stacks import StackFrame, Stacks
from tests.conftest import DATA
from tests.support.operator_calls import OperatorSteps, tensor
from tests.support.packed import unpack
from tests.support.steps import H200, US

#: 64 MB in bf16, and in fp32.
LARGE, LARGE_FP32 = tensor(8192, 4096), tensor(8192, 4096, dtype="float32")


def saved_us(steps: StepsToExplain, candidate: Candidate) -> list[float]:
    """What each assumption saves of a step, µs."""
    (baseline,) = steps.baselines
    return [(baseline.step_ns - change(baseline).step_ns) / US for change in candidate.changes]


def only(rule: Rule, steps: StepsToExplain) -> Candidate:
    (candidate,) = rule(steps)
    return candidate


def text_of(candidate: Candidate) -> str:
    texts = TEXTS[type(candidate.figures)](candidate.figures)
    sentences = (texts.title, *texts.evidence, texts.derivation, *texts.remedy, texts.disproof)
    said = " ".join(map(plain, sentences)).replace("\xa0", " ")
    assert not any(word in said for word in ("nan", "inf ", "None", "-0"))
    return said


def places(candidate: Candidate, steps: StepsToExplain) -> list[str]:
    return [line.place for line in candidate.find_lines(steps)]


# --- captures of planted faults

#: For each capture of a Llama-like model on an H100: the length of a step with and without the fault, as measured
#: without a profiler, ms, the finding, and its first line. The loss is computed in fp32 by separate operators, or a
#: second forward pass in each step keeps the graph.
FAULTS = {
    "logits_loss": (46.0, 33.8, "unfused_chains", "llama.py:56"),
    "eval_grads": (44.6, 33.8, "no_backward_work", "llama.py:79"),
}


#: The measured lengths of a step of the Llama-like model, and of a ResNet-50 in channels_last, without a fault, ms.
CONTROLS = {"llama_control": 33.8, "resnet_control": 34.3}


def summarize(name: str, step_ms: float, folder: Path) -> CaptureSummary:
    for suffix in (".operators.gz", ".stacks.gz"):
        shutil.copy(DATA / "operators" / f"{name}{suffix}", folder)
    (capture,) = api.summarize(unpack(DATA / "operators" / f"{name}.sqlite.xz", folder), step_ms=step_ms)
    return capture


@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_comes_first_with_its_line(name: str, tmp_path: Path) -> None:
    """The measured saving is in the interval."""
    before_ms, after_ms, finding_id, place = FAULTS[name]
    capture = summarize(name, before_ms, tmp_path)
    assert capture.findings
    first = capture.findings[0]
    assert (first.id, first.lines[0].place) == (finding_id, place)
    saved_ms = before_ms - after_ms
    assert first.saves_ms_low <= saved_ms <= first.saves_ms_high
    assert capture.account
    assert first.saves_ms_high <= capture.account.step_ms - capture.account.attainable_ms


@pytest.mark.parametrize("name", CONTROLS)
def test_an_eager_program_without_a_fault_has_no_finding(name: str, tmp_path: Path) -> None:
    """Its chains, such as those of rotary embeddings, are a part of the account only."""
    capture = summarize(name, CONTROLS[name], tmp_path)
    assert capture.findings == ()
    assert capture.account
    assert {part.cause: part.ms for part in capture.account.parts}["unfused"] > 0.05 * CONTROLS[name]


#: Reasons of operators of the ResNet-50, by operator, line and first shape. The two longest kernels of
#: the backward convolution have 105 and 117 blocks, for 132 multiprocessors. The norm and its neighbors pass over the
#: same images. The first convolution launches 5 operations, but one of them takes 84 % of its time.
RESNET_REASONS = {
    ("convolution_backward", "resnet.py:16", "128×64×56×56"): "small_grid",
    ("convolution", "resnet.py:27", "128×3×224×224"): "",
    ("native_batch_norm", "resnet.py:16", "128×64×56×56"): "unfused",
    ("convolution", "resnet.py:17", "128×64×56×56"): "",
}


def test_the_reasons_of_a_real_program(tmp_path: Path) -> None:
    """The kernels named nvjet are persistent: each multiprocessor runs one block of 384 threads with 168 registers."""
    capture = summarize("resnet_control", CONTROLS["resnet_control"], tmp_path)
    assert capture.account
    assert capture.study
    rows = fold_rows(capture.account.operators, lambda row: (row.operator, row.line, row.shapes))
    reasons = {
        (row.operator.removeprefix("aten::"), row.line.partition(" ")[0], row.shapes.partition(" ")[0]): row.reason
        for row in reversed(rows)
    }
    assert {key: reasons[key] for key in RESNET_REASONS} == RESNET_REASONS
    assert BlockResources(168, 384, 231_424) in capture.study.resources
    assert "wave_tail" not in reasons.values()
    idle = find_idle_shares(capture.study)
    is_persistent = capture.study.kernel_matches(re.compile("^nvjet")) & (capture.study.operations.size == 132)
    assert is_persistent.any()
    assert not idle.most[is_persistent].any()


def test_a_fault_does_not_change_the_attainable_step(tmp_path: Path) -> None:
    """The steps take 33.8 ms without a fault, and 46.0 and 44.6 ms with a fault."""
    lengths = {"llama_control": CONTROLS["llama_control"], **{name: fault[0] for name, fault in FAULTS.items()}}
    accounts = [summarize(name, ms, tmp_path).account for name, ms in lengths.items()]
    control_ms, *with_fault_ms = (account.attainable_ms for account in accounts if account)
    assert with_fault_ms == pytest.approx([control_ms] * len(FAULTS), rel=0.05)


# --- redundant work


def checkpointed(us: float) -> OperatorSteps:
    """A forward pass of two calls, which the backward pass runs again before its own call reads what they write."""
    steps = OperatorSteps()
    for phase, value in (("forward", 1), ("recomputed", 3)):
        options = {"us": us, "phase": phase, "line": "model.py:7 in forward"}
        steps.call("relu", LARGE, out=[LARGE], reads=[0], writes=[value], module="model.0: Block", **options)
        steps.call("sin", LARGE, out=[LARGE], reads=[value], writes=[value + 1], module="model.0.act: Sine", **options)
    return steps.call("cos", LARGE, out=[LARGE], us=us, reads=[2, 4], writes=[5], phase="backward")


def test_recomputed_work_is_removed() -> None:
    """Two of five calls, of 100 µs each, are recomputed. Launches do not limit the step."""
    steps = checkpointed(100).case(lasting=[5])
    candidate = only(find_redundant_work, steps)
    assert candidate.id == "recomputed_work"
    assert saved_us(steps, candidate) == pytest.approx([200, 200])
    assert places(candidate, steps) == ["model.py:7"]
    said = text_of(candidate)
    assert "Activations are recomputed" in said
    assert "2 operator calls take 0.2 ms (40 % of the step)" in said
    # Backward reads one of two recomputed results: 8,192 · 4,096 elements of 2 bytes are 64 MiB.
    assert "Recomputation saves about 64.0 MiB of memory: keep the checkpoints if" in said


def test_recomputed_work_is_removed_with_its_launches() -> None:
    """Each of five launches takes 10 µs, and its work 1 µs: two launches are removed of 50 µs."""
    steps = checkpointed(1).case(lasting=[5])
    assert saved_us(steps, only(find_redundant_work, steps)) == pytest.approx([20, 20])


def test_the_first_and_the_last_launch_of_redundant_work_save_at_most_a_usual_launch() -> None:
    """The recomputed calls take 10 and 40 µs of the CPU: the time up to backward is limited to the usual 10 µs."""
    steps = OperatorSteps()
    for value, (phase, after) in enumerate((("forward", 10), ("recomputed", 10), ("recomputed", 40), ("backward", 10))):
        options = {"us": 1, "phase": phase, "after": after}
        steps.call("relu", LARGE, out=[LARGE], reads=[value], writes=[value + 1], **options)
    case = steps.case(lasting=[4])
    assert saved_us(case, only(find_redundant_work, case)) == pytest.approx([10 + 10, 10 + 10])


@pytest.mark.parametrize(("phase", "saved"), [("recomputed", [2_010, 2_010]), ("forward", [10, 2_010])])
def test_a_pause_inside_a_recomputation_is_part_of_it(phase: str, saved: list[float]) -> None:
    """After the first of two redundant launches, the program pauses for 2,000 µs. The second one takes 10 µs.

    In a forward pass, the calls are unused, and the program may do other work in the pause.
    """
    steps = OperatorSteps()
    for value, (place, after) in enumerate(((phase, 2_000), (phase, 10), ("backward", 10))):
        steps.call("relu", LARGE, out=[LARGE], us=1, reads=[9], writes=[value], phase=place, after=after)
    case = steps.case(lasting=[2])
    assert saved_us(case, only(find_redundant_work, case)) == pytest.approx(saved)


def test_launches_of_redundant_work_are_no_cause_of_their_own() -> None:
    """Of five launches of 10 µs, two are redundant. Without launches, 5 · 1 µs of work remain, or 3 · 1 µs."""
    steps = checkpointed(1).case(lasting=[5], launch=0.045)
    launching = only(find_launch_bound, steps)
    ((_, alone),) = _rank_candidates(steps, [launching])
    redundant = only(find_redundant_work, steps)
    both = {candidate.id: saving for candidate, saving in _rank_candidates(steps, [launching, redundant])}
    assert alone.middle == pytest.approx((50 - 5) / 1_000)
    assert both["launch_bound"].middle == pytest.approx((30 - 3) / 1_000)


def evaluation(*, backward_reads: int) -> OperatorSteps:
    """Two forward passes; the backward pass reads a value of one or of none of them."""
    steps = OperatorSteps()
    steps.call("relu", LARGE, out=[LARGE], writes=[1], line="train.py:3 in main")
    steps.call("sin", LARGE, out=[LARGE], writes=[2], instance=2, line="train.py:9 in main")
    return steps.call("cos", LARGE, out=[LARGE], reads=[1, backward_reads], writes=[3], phase="backward")


def test_a_forward_pass_without_backward_pass() -> None:
    """One of three calls of 100 µs."""
    steps = evaluation(backward_reads=1).case(lasting=[2, 3])
    candidate = only(find_redundant_work, steps)
    assert candidate.id == "no_backward_work"
    assert saved_us(steps, candidate) == pytest.approx([100, 100])
    assert places(candidate, steps) == ["train.py:9"]
    assert "torch.no_grad()" in text_of(candidate)


def test_two_forward_passes_of_one_backward_pass_are_needed() -> None:
    assert [*find_redundant_work(evaluation(backward_reads=2).case(lasting=[3]))] == []


def test_every_kind_of_redundant_work_has_sentences() -> None:
    """``sin`` repeats, ``cos`` is unused, and the cast to float32 is undone."""
    steps = OperatorSteps()
    for value in (2, 3):
        steps.call("sin", LARGE, out=[LARGE], reads=[1], writes=[value])
    steps.call("cos", LARGE, out=[LARGE], reads=[1], writes=[4])
    steps.call("_to_copy", LARGE, out=[LARGE_FP32], reads=[2], writes=[5])
    steps.call("_to_copy", LARGE_FP32, out=[LARGE], reads=[5], writes=[6])
    steps.call("add", LARGE, LARGE, out=[LARGE], reads=[3, 6], writes=[7])
    case = steps.case(lasting=[7])
    candidates = {candidate.id: candidate for candidate in find_redundant_work(case)}
    assert candidates.keys() == {"repeated_work", "unused_work", "undone_work"}
    assert {key: round(saved_us(case, one)[0]) for key, one in candidates.items()} == {
        "repeated_work": 100, "unused_work": 100, "undone_work": 200,
    }  # fmt: skip
    assert all(map(text_of, candidates.values()))


@pytest.mark.parametrize(("is_view", "expected"), [(True, ["aten::mm", "aten::sum"]), (False, ["aten::sum"])])
def test_a_view_does_not_need_the_values_that_it_shows(is_view: bool, expected: list[str]) -> None:
    """Nothing reads the sum of a view. A call that returns no tensor may do anything with what it reads."""
    steps = OperatorSteps().call("mm", LARGE, LARGE, out=[LARGE], reads=[1], writes=[2])
    steps.call("_unsafe_view", LARGE, out=[LARGE] if is_view else [], reads=[2], kernels=0)
    steps.call("sum", LARGE, out=[LARGE], reads=[2], writes=[3])
    operators = steps.call("add", LARGE, out=[LARGE], reads=[1], writes=[4]).case(lasting=[1, 4]).operators
    assert operators is not None
    signature = operators.calls.signature[operators.redundant["unused"]]
    assert [operators.calls.signatures[index].name for index in signature.tolist()] == expected


def masks(*, lasting: tuple[int, ...] = (9,), changes: bool = False) -> list[str]:
    """Two layers make the same mask from the same numbers, and apply it to their input. What is repeated."""
    mask, steps = tensor(64, 64, dtype="bool"), OperatorSteps()
    for layer in (0, 1):
        numbers, made = 10 * layer + 1, 10 * layer + 2
        steps.call("ones", out=[mask], arguments=("[64, 64]",), writes=[numbers])
        steps.call("tril", mask, out=[mask], reads=[numbers], writes=[made])
        if changes:
            steps.call("fill_", mask, out=[mask], reads=[made], writes=[made + 3])
        steps.call("where", mask, LARGE, out=[LARGE], reads=[made, 100 + layer], writes=[101 + layer])
    operators = steps.case(lasting=[102, *lasting]).operators
    assert operators is not None
    signature = operators.calls.signature[operators.redundant["repeated"]]
    return [operators.calls.signatures[index].name for index in signature.tolist()]


def test_a_mask_that_each_layer_makes_again() -> None:
    """``ones`` has no inputs, so that its memory may be written later. ``tril`` of equal values is repeated."""
    assert masks() == ["aten::tril"]


def test_equal_results_with_memory_of_their_own_are_not_repeated() -> None:
    """The second mask outlives the step, or is changed in place."""
    assert masks(lasting=(12,)) == []
    assert masks(changes=True) == []


# --- the reason that shapes tell


def head(vocabulary: int, us: float) -> StepsToExplain:
    """A matmul with the vocabulary, and one without it that takes 1.1 times its attainable time."""
    steps = OperatorSteps()
    inner = (tensor(8192, 1024), tensor(1024, 4096))
    inner_us = attainable_us("mm", *inner, out=[tensor(8192, 4096)])
    steps.call("mm", *inner, out=[tensor(8192, 4096)], us=1.1 * inner_us, line="model.py:3 in forward")
    operands = (tensor(8192, 1024), tensor(1024, vocabulary, strides=(1, 1024)))
    return steps.call("mm", *operands, out=[tensor(8192, vocabulary)], us=us, line="model.py:9 in forward").case()


def attainable_us(name: str, *inputs: object, out: object) -> float:
    steps = OperatorSteps().call(name, *inputs, out=out).case()
    return float(steps.operators.attainable_ns[0]) / US


def test_a_size_that_does_not_suit_tensor_cores() -> None:
    """Of 32,003 columns in bf16, rows have 64,006 bytes, no multiple of 16. The next multiple of 64 is 32,064.

    The matmul takes 5,000 µs. The padded one takes its attainable time, or 1.1 times as long, as the other matmul does.
    """
    steps = head(32_003, 5_000)
    padded_us = attainable_us("mm", tensor(8192, 1024), tensor(1024, 32_064), out=[tensor(8192, 32_064)])
    candidate = only(rules.find_misaligned_operators, steps)
    assert saved_us(steps, candidate) == pytest.approx([5_000 - 1.1 * padded_us, 5_000 - padded_us])
    assert places(candidate, steps) == ["model.py:9"]
    assert "The size 32003 does not suit tensor cores" in text_of(candidate)
    assert "32003 -> 32064" in text_of(candidate)


def test_a_suitable_size_is_slow_for_another_reason() -> None:
    """32,000 columns: the same time has no reason. Of the time above the attainable time, none or all is saved."""
    steps = head(32_000, 5_000)
    assert [*rules.find_misaligned_operators(steps)] == []
    candidate = only(rules.find_slow_operators, steps)
    excess_us = 5_000 - attainable_us("mm", tensor(8192, 1024), tensor(1024, 32_000), out=[tensor(8192, 32_000)])
    assert saved_us(steps, candidate) == pytest.approx([0, excess_us])
    assert places(candidate, steps) == ["model.py:9"]
    assert "mm takes longer than attainable" in text_of(candidate)


def test_operators_at_their_attainable_time_are_no_finding() -> None:
    us = attainable_us("mm", tensor(8192, 1024), tensor(1024, 32_000), out=[tensor(8192, 32_000)])
    steps = head(32_000, us)
    assert [found for rule in (*rules.RULES, *fewer_operators.RULES) for found in rule(steps)] == []


@pytest.mark.parametrize(
    ("shape", "name", "sizes"),
    [((64, 72), "mm", []), ((64, 65), "mm", [65]), ((64, 68), "mm", [68]), ((64, 1), "mm", [])],
)
def test_misaligned_sizes(shape: tuple[int, ...], name: str, sizes: list[int]) -> None:
    """Rows of 72, 65, 68 and 1 elements in bf16 have 144 = 9 · 16, 130, 136 and 2 bytes. A vector needs no rows."""
    signature = Signature(f"aten::{name}", (tensor(128, 64), tensor(*shape)), (tensor(128, shape[1]),))
    assert sorted(find_misaligned_sizes(signature, estimate_cost(signature))) == sizes


CHANNELS = (64, 64, 56, 56)
CHANNELS_LAST = (64 * 56 * 56, 1, 64 * 56, 64)
CONVOLUTION = ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")


def images(strides: tuple[int, ...] | None, us: float = 1_000) -> StepsToExplain:
    """A convolution of 3 × 3 and a norm."""
    image, weight = tensor(*CHANNELS, strides=strides), tensor(64, 64, 3, 3)
    steps = OperatorSteps().call("convolution", image, weight, None, out=[image], us=us, arguments=CONVOLUTION)
    return steps.call("native_batch_norm", image, tensor(64), tensor(64), out=[image], us=us).case()


def test_images_that_are_not_channels_last() -> None:
    """65 to 100 % of the time above the attainable time of both operators is saved."""
    steps = images(None)
    candidate = only(rules.find_memory_format, steps)
    excess_us = 2_000 - float(steps.operators.attainable_ns.sum()) / US
    assert excess_us > 1_000
    assert saved_us(steps, candidate) == pytest.approx([0.65 * excess_us, excess_us])
    assert "channels_last" in text_of(candidate)


def test_images_that_are_channels_last() -> None:
    assert [*rules.find_memory_format(images(CHANNELS_LAST))] == []


def network(*, converts: bool, writes: bool = True) -> StepsToExplain:
    """Three layers of a convolution and relu in channels_last. A copy may convert the image after the first layer.

    relu on the converted image takes 400 µs instead of 100, and the convolution that reads its result takes 1,000 µs
    more. The result of this convolution is in channels_last again, because its weight is.
    """
    last, by_channel = tensor(*CHANNELS, strides=CHANNELS_LAST), tensor(*CHANNELS)
    weight, value, steps = tensor(64, 64, 3, 3, strides=(576, 1, 192, 64)), 0, OperatorSteps()

    def call(name: str, *inputs: Tensor | None, out: Tensor, us: float, line: int, **options: object) -> None:
        nonlocal value
        values = {"reads": [value], "writes": [value + 1]} if writes else {}
        steps.call(name, *inputs, out=[out], us=us, line=f"model.py:{line} in forward", **values, **options)
        value += 1

    for layer in (1, 2, 3):
        is_changed = converts and layer == 2
        if is_changed:
            call("clone", last, out=by_channel, us=200, line=22)
        image = by_channel if is_changed else last
        call("relu", image, out=image, us=400 if is_changed else 100, line=10 * layer + 3)
        us = 2_000 if is_changed else 1_000
        call("convolution", image, weight, None, out=last, us=us, line=10 * layer + 4, arguments=CONVOLUTION)
    return steps.case(lasting=[value])


def test_an_operator_that_changes_the_memory_format() -> None:
    """Compared with the other layers: 200 µs of the copy, 300 of relu and 1,000 of the convolution; 65 to 100 %."""
    steps = network(converts=True)
    candidate = only(rules.find_memory_format, steps)
    assert saved_us(steps, candidate) == pytest.approx([0.65 * 1_500, 1_500])
    assert places(candidate, steps) == ["model.py:22"]
    assert candidate.figures.calls == 3
    assert "by channel (NCHW) after clone, although convolutions use channels_last" in text_of(candidate)
    assert [*fewer_operators.find_copied_tensors(steps)] == []


def test_images_that_keep_their_memory_format() -> None:
    assert [*rules.find_memory_format(network(converts=False))] == []


def test_a_changed_memory_format_without_values() -> None:
    """The saving does not depend on the data flow. Each call names its own line: 22, 23 and 24."""
    steps = network(converts=True, writes=False)
    candidate = only(rules.find_memory_format, steps)
    assert saved_us(steps, candidate) == pytest.approx([0.65 * 1_500, 1_500])
    assert sorted(places(candidate, steps)) == ["model.py:22", "model.py:23", "model.py:24"]


def test_an_image_that_is_a_view_of_converted_pixels() -> None:
    """A copy of (images, channels, pixels) is read as an image by channel. Attention between them has 4 dimensions."""
    last, by_channel = tensor(*CHANNELS, strides=CHANNELS_LAST), tensor(*CHANNELS)
    weight, heads = tensor(64, 64, 3, 3, strides=(576, 1, 192, 64)), tensor(64, 8, 3136, 8)
    pixels = tensor(64, 3136, 64)
    steps, options = OperatorSteps(), {"arguments": CONVOLUTION, "us": 1_000}
    for value in (0, 1):
        steps.call("convolution", last, weight, None, out=[last], reads=[value], writes=[value + 1], **options)
    steps.call("relu", heads, out=[heads], us=9_000, reads=[2], writes=[3])
    transposed = tensor(64, 64, 3136, strides=(64 * 3136, 1, 64))
    copied = [tensor(64, 64, 3136)]
    steps.call("mm", pixels, out=[pixels], reads=[3], writes=[4], line="model.py:5 in forward")
    steps.call("clone", transposed, out=copied, us=50, reads=[4], writes=[5], line="model.py:6 in forward")
    options["us"] = 3_000
    steps.call("convolution", by_channel, weight, None, out=[last], reads=[5], writes=[6], **options)
    case = steps.case(lasting=[6])
    candidate = only(rules.find_memory_format, case)
    assert saved_us(case, candidate) == pytest.approx([0.65 * 2_000, 2_000])
    assert places(candidate, case) == ["model.py:6"]


def test_matmuls_in_fp32_without_tensor_cores() -> None:
    """It takes 10 times the time in TF32: that in TF32 or that in bf16 remains. At TF32's time, it is no finding."""
    operands = [(tensor(4096, 4096, dtype=dtype),) * 2 for dtype in ("float32", "bfloat16")]
    steps = OperatorSteps().call("mm", *operands[0], out=operands[0][:1]).case()
    rates, cost = steps.operators.rates, steps.operators.costs[0]
    tf32_us = rates.time_ns(cost._replace(precision="tf32")) / US
    bf16_us = attainable_us("mm", *operands[1], out=operands[1][:1])
    steps = OperatorSteps().call("mm", *operands[0], out=operands[0][:1], us=10 * tf32_us).case()
    candidate = only(rules.find_fp32_operators, steps)
    assert saved_us(steps, candidate) == pytest.approx([9 * tf32_us, 10 * tf32_us - bf16_us])
    assert "TF32" in text_of(candidate)
    steps = OperatorSteps().call("mm", *operands[0], out=operands[0][:1], us=tf32_us).case()
    assert [*rules.find_fp32_operators(steps)] == []


# --- chains


def chain(*us: float, reads: bool = True, names: Sequence[str] = ("exp",)) -> OperatorSteps:
    """Calls that each read what the one before wrote."""
    steps = OperatorSteps()
    for number, time in enumerate(us):
        line, name = f"loss.py:{number + 1} in loss", names[number % len(names)]
        steps.call(name, LARGE, out=[LARGE], us=time, reads=[number] if reads else [], writes=[number + 1], line=line)
    return steps


def test_a_chain_that_one_kernel_could_do() -> None:
    """Of 100 + 300 + 200 µs, the two longest or the longest remain: 100 or 300 µs are saved.

    The three operators read and write 64 MiB each: 6 · 64 MiB. Value 0 enters the chain and value 3 leaves it.
    """
    steps = chain(100, 300, 200).case(lasting=[3])
    candidate = only(fewer_operators.find_unfused_chains, steps)
    assert saved_us(steps, candidate) == pytest.approx([100, 300])
    size = 8192 * 4096 * 2
    assert (candidate.figures.moved_bytes, candidate.figures.needed_bytes) == (6 * size, 2 * size)
    assert places(candidate, steps) == ["loss.py:2", "loss.py:3", "loss.py:1"]
    assert "in loss" in text_of(candidate)


def test_a_function_of_pytorch_takes_at_least_its_attainable_time() -> None:
    """Of 100 + 300 + 200 µs, the two longest remain, or the attainable time of F.rms_norm.

    The function reads and writes 64 MiB, as a copy does, and computes a mean, which reads and writes as much.
    """
    steps = chain(100, 300, 200, names=("mean", "rsqrt", "mul")).case(lasting=[3])
    candidate = only(fewer_operators.find_unfused_chains, steps)
    kernel_us = max(attainable_us(name, LARGE, out=[LARGE]) for name in ("clone", "mean"))
    assert saved_us(steps, candidate) == pytest.approx([100, 600 - kernel_us])
    said = text_of(candidate)
    assert "A norm is computed by separate operators in loss" in said
    assert "between the attainable time of that function and the time of the two longest operators" in said


@pytest.mark.parametrize(("function", "is_recompiled"), [("loss", True), ("other", False)])
def test_a_chain_in_a_function_that_was_recompiled(function: str, is_recompiled: bool) -> None:
    """torch.compile has given up the function of the chain, or compiles another function of the file."""
    reason = f"loss.py:1 in {function}: self.n == 0  # /home/loss.py:4 in {function} (HINT: ...)"
    compiled = CompiledCode(graph_breaks={}, recompiles={reason: 5})
    case = replace(chain(100, 300, 200).case(lasting=[3]), run=Run(compiled=compiled))
    candidate = only(fewer_operators.find_unfused_chains, case)
    assert ("torch.compile recompiles a function" in text_of(candidate)) == is_recompiled
    assert candidate.is_common != is_recompiled
    assert places(candidate, case)[0] == ("loss.py:4" if is_recompiled else "loss.py:2")


def test_a_value_that_is_read_outside_of_a_chain_is_written() -> None:
    """Value 1 outlives the step: it is written, but not read: 3 · 64 MiB."""
    candidate = only(fewer_operators.find_unfused_chains, chain(100, 300, 200).case(lasting=[1, 3]))
    assert candidate.figures.needed_bytes == 3 * 8192 * 4096 * 2


def test_a_chain_takes_at_least_the_time_of_its_inputs_and_outputs() -> None:
    """Reading and writing 2 · 64 MiB takes longer than the two longest operators, of 2 µs each."""
    assert [*fewer_operators.find_unfused_chains(chain(1, 2, 2).case(lasting=[3]))] == []


def test_chains_are_a_part_of_the_account() -> None:
    """A step has a chain of 100 + 300 + 200 µs, a matmul in its attainable time, and 50 µs whose result nothing uses.

    Of the chain, 300 to 500 µs remain, so fusing saves 200 µs, and the kernel takes 400 µs. Its attainable time is that
    of one of the calls.
    """
    matrix = tensor(4096, 4096)
    matmul_us = attainable_us("mm", matrix, matrix, out=[matrix])
    steps = chain(100, 300, 200).call("mm", matrix, matrix, out=[matrix], us=matmul_us, reads=[10], writes=[11])
    steps.call("exp", LARGE, out=[LARGE], us=50, reads=[0], writes=[12])
    case = steps.case(lasting=[3, 11])
    assert case.operators
    as_measured = np.ones(len(case.study.operations))
    account = make_account(
        case.operators, case.baselines, 1.0, case.step_ms, {}, as_measured, as_measured, case.reasons
    )
    assert account
    attainable = attainable_us("exp", LARGE, out=[LARGE])
    parts = {part.cause: part.ms * 1_000 for part in account.parts}
    assert parts == pytest.approx({"unfused": 200, "redundant": 50, "operators": 400 - attainable}, rel=1e-3)
    assert account.attainable_ms * 1_000 == pytest.approx(matmul_us + attainable, rel=1e-3)
    unfused = {f"loss.py:{line} in loss": "unfused" for line in (1, 2, 3)}
    assert {row.line: row.reason for row in account.operators} == {**unfused, "train.py:1 in step": ""}


def test_a_chain_is_no_reason_for_the_excess_of_its_longest_call() -> None:
    """One kernel takes at least the 2,000 µs of the longest call, so fusing saves 60 µs and not the excess of it."""
    steps = chain(60, 2_000).case(lasting=[2])
    assert steps.reasons["unfused"].tolist() == [True, False]
    excess_us = 2_000 - attainable_us("exp", LARGE, out=[LARGE])
    assert saved_us(steps, only(rules.find_slow_operators, steps)) == pytest.approx([0, excess_us])


@pytest.mark.parametrize(
    ("us", "names", "is_finding"),
    [
        # The least saving is 100 of 2,600 µs, or 400 of 3,200: less or more than a tenth of the step.
        ((100, 300, 200), ("exp",), False),
        ((400, 400, 400), ("exp",), True),
        # F.rms_norm replaces the chain, so its mean saving counts: 200 of 2,600 µs.
        ((100, 300, 200), ("mean", "rsqrt", "mul"), True),
    ],
)
def test_a_common_chain_is_a_finding_if_it_saves_a_tenth_of_a_step(
    us: tuple[float, ...], names: tuple[str, ...], *, is_finding: bool
) -> None:
    matrix = tensor(4096, 4096)
    builder = chain(*us, names=names).call("mm", matrix, matrix, out=[matrix], us=2_000, reads=[10], writes=[11])
    steps = builder.case(lasting=[3, 11])
    ranked = _rank_candidates(steps, [only(fewer_operators.find_unfused_chains, steps)])
    assert len(ranked) == is_finding


@pytest.mark.parametrize(("us", "groups"), [((300, 300, 300), [""]), ((900, 100, 100), ["Gelu"])])
def test_chains_of_several_classes_are_one_finding_unless_one_class_stands_out(
    us: tuple[float, ...], groups: list[str]
) -> None:
    """Fusing saves a third in each class, or 9 of 11 parts in one class; the others save too little for a finding."""
    steps = OperatorSteps().call("mm", *[tensor(4096, 4096)] * 2, out=[tensor(4096, 4096)], us=10_000)
    for number, (time, name) in enumerate(zip(us, ("Gelu", "Norm", "Rope"), strict=True)):
        for value in (10 * number, 10 * number + 1):
            steps.call(
                "exp", LARGE, out=[LARGE], us=time, reads=[value], writes=[value + 1], module=f"m.{name}: {name}"
            )
    found = [*fewer_operators.find_unfused_chains(steps.case(lasting=[2, 12, 22]))]
    assert [one.figures.place for one in found] == groups
    assert "torch.compile(model)" in text_of(found[0])


def gated(*, needs_gate: bool) -> StepsToExplain:
    """silu, a matmul and a product of both, as in a gated layer; the matmul may need the result of silu."""
    steps = OperatorSteps().call("silu", LARGE, out=[LARGE], us=300, reads=[0], writes=[1])
    steps.call("mm", tensor(64, 64), tensor(64, 64), out=[tensor(64, 64)], us=5, reads=[int(needs_gate)], writes=[2])
    return steps.call("mul", LARGE, LARGE, out=[LARGE], us=400, reads=[1, 2], writes=[3]).case(lasting=[3])


def test_a_chain_continues_behind_a_matmul_that_does_not_need_it() -> None:
    """The matmul can run before both operators, of which the longer one remains."""
    steps = gated(needs_gate=False)
    assert saved_us(steps, only(fewer_operators.find_unfused_chains, steps)) == pytest.approx([0, 300])


def test_a_matmul_that_needs_a_result_of_a_chain_ends_it() -> None:
    assert [*fewer_operators.find_unfused_chains(gated(needs_gate=True))] == []


def test_operators_on_other_data_are_no_chain() -> None:
    assert [*fewer_operators.find_unfused_chains(chain(100, 300, 200, reads=False).case(lasting=[1, 2, 3]))] == []


def test_a_chain_on_a_gpu_without_attainable_times() -> None:
    """The longest of 100 + 300 + 200 µs remains. No other rule says anything."""
    builder = chain(100, 300, 200)
    builder.steps.gpu = replace(H200, name="a new GPU")
    steps = builder.case(lasting=[3])
    (candidate,) = [found for rule in (*rules.RULES, *fewer_operators.RULES) for found in rule(steps)]
    assert saved_us(steps, candidate) == pytest.approx([100, 300])
    assert "attainable" not in text_of(candidate)


def test_a_fused_chain_saves_no_launch_where_launching_limits_the_step() -> None:
    """Three launches take 300 µs, and their work 120 µs: the GPU is idle for 60 % of the step."""
    steps = OperatorSteps()
    for number in range(3):
        steps.call("exp", LARGE, out=[LARGE], us=40, reads=[number], writes=[number + 1], after=100)
    case = steps.case(lasting=[3], launch=0.18)
    assert saved_us(case, only(fewer_operators.find_unfused_chains, case)) == pytest.approx([0, 0])


def test_chains_replace_the_rules_on_kernels() -> None:
    """The rules on elementwise kernels and on copies know less."""
    steps = chain(100, 300, 200).case(lasting=[3])
    assert [*find_unfused_elementwise(steps), *find_layout_copies(steps)] == []


def test_a_softmax_by_separate_operators_is_named() -> None:
    steps = OperatorSteps()
    for number, name in enumerate(("exp", "sum", "log", "sub")):
        steps.call(name, LARGE, out=[LARGE], reads=[number], writes=[number + 1], line="loss.py:4 in loss_of")
    candidate = only(fewer_operators.find_unfused_chains, steps.case(lasting=[4]))
    assert "A log-softmax is computed by separate operators in loss_of" in text_of(candidate)
    assert "F.cross_entropy" in text_of(candidate)


# --- copies, and operators that are slow for no reason that shapes tell


def test_copies_at_a_line() -> None:
    """A copy of 400 µs that feeds a matmul: 30 or 100 % is saved."""
    steps = OperatorSteps().call("clone", LARGE, out=[LARGE], us=400, reads=[0], writes=[1], after=1)
    factors, product = (tensor(8192, 4096), tensor(4096, 64)), [tensor(8192, 64)]
    us = attainable_us("mm", *factors, out=product)
    steps.call("mm", *factors, out=product, us=us, reads=[1], writes=[2], after=1)
    case = steps.case(lasting=[2])
    candidate = only(fewer_operators.find_copied_tensors, case)
    assert saved_us(case, candidate) == pytest.approx([0.3 * 400, 400])
    assert "Tensors are copied" in text_of(candidate)
    assert [*rules.find_slow_operators(case)] == []


def test_copies_that_follow_each_other() -> None:
    """Of 100 + 300 + 200 µs, the longest copy remains, or only three launches of 10 µs."""
    steps = OperatorSteps()
    for number, us in enumerate((100, 300, 200)):
        line = f"model.py:{number} in there_and_back"
        steps.call("cat", (LARGE,), out=[LARGE], us=us, reads=[number], writes=[number + 1], line=line)
    case = steps.case(lasting=[3])
    candidate = only(fewer_operators.find_copied_tensors, case)
    assert saved_us(case, candidate) == pytest.approx([300, 600 - 30])
    assert "Tensors are copied in there_and_back" in text_of(candidate)
    assert [*fewer_operators.find_unfused_chains(case), *rules.find_slow_operators(case)] == []


def test_copies_in_a_chain_are_part_of_it() -> None:
    steps = OperatorSteps().call("clone", LARGE, out=[LARGE], us=400, reads=[0], writes=[1])
    case = steps.call("exp", LARGE, out=[LARGE], us=400, reads=[1], writes=[2]).case(lasting=[2])
    assert [*fewer_operators.find_copied_tensors(case)] == []


def parts(count: int, *, us: float = 3, after: float = 10, depend: bool = False) -> StepsToExplain:
    """A loop over small matmuls at one line, each of which may read the result of the one before."""
    steps, matrix = OperatorSteps(), tensor(64, 64)
    for number in range(count):
        reads = [number] if depend else [100]
        steps.call("mm", matrix, matrix, out=[matrix], us=us, reads=reads, writes=[number + 1], after=after)
    return steps.case(lasting=range(1, count + 1), launch=0.05)


def test_operators_on_parts_of_their_data() -> None:
    """10 launches take 30 µs each, and their work 3 µs. One launch remains; the usual time of a launch is 30 µs."""
    steps = parts(10, after=30)
    candidate = only(fewer_operators.find_split_operators, steps)
    assert saved_us(steps, candidate) == pytest.approx([270, 270], abs=1)
    assert "Operators run 10 times on parts of their data" in text_of(candidate)


def test_parts_that_need_each_other_are_not_split() -> None:
    assert [*fewer_operators.find_split_operators(parts(10, depend=True))] == []


def test_large_parts_save_only_launches() -> None:
    """The attainable time of 4 matmuls of 8,192³ is that of one of four times the size, and the launches are hidden."""
    steps, matrix = OperatorSteps(), tensor(8192, 8192)
    for number in range(4):
        steps.call("mm", matrix, matrix, out=[matrix], us=2_000, reads=[100], writes=[number + 1])
    case = steps.case(lasting=[1, 2, 3, 4])
    assert saved_us(case, only(fewer_operators.find_split_operators, case)) == pytest.approx([0, 0], abs=40)


def masked_attention(*, with_padding: bool) -> StepsToExplain:
    """Attention with a lower triangle as its mask, which may also hide the padding of a batch."""
    heads, mask, scores = tensor(8, 16, 1024, 64), tensor(1024, 1024), tensor(8, 1, 1024, 1024)
    steps = OperatorSteps().call("ones", out=[mask], us=5, reads=[], writes=[1])
    steps.call("tril", mask, out=[mask], us=5, reads=[1], writes=[2], line="gpt.py:6 in forward")
    reads = [2, 9] if with_padding else [2]
    steps.call("logical_not", scores, out=[scores], us=45, reads=reads, writes=[3], line="gpt.py:6 in forward")
    steps.call(
        "_scaled_dot_product_cudnn_attention", heads, heads, heads, scores, out=[heads], us=900, reads=[7, 8, 9, 3],
        writes=[4], line="gpt.py:7 in forward", arguments=["", "", "", "", "True", "0.0", "False"],
    )  # fmt: skip
    return steps.case(lasting=[4])


def test_attention_with_a_causal_mask() -> None:
    """The mask takes 5 + 45 µs. Of the 900 µs, the attainable time of all scores remains, or half of it."""
    steps = masked_attention(with_padding=False)
    assert steps.operators is not None
    attainable = float(steps.operators.attainable_ns[3]) / US
    candidate = only(rules.find_causal_masks, steps)
    assert saved_us(steps, candidate) == pytest.approx([950 - attainable, 950 - attainable / 2], abs=1)
    assert "is_causal=True" in text_of(candidate)
    assert places(candidate, steps)[0] == "gpt.py:7"


def test_a_mask_that_hides_padding_is_not_only_causal() -> None:
    assert [*rules.find_causal_masks(masked_attention(with_padding=True))] == []


#: For each reason of a slow operator: the dimension that it sums over, the kernels of a call, and the sentence. The
#: elements of a column of ``LARGE`` are 4,096 apart.
SLOW_REASONS = {
    "reduction": ("[0]", 1, "not adjacent in memory"),
    "many_kernels": ("[1]", 8, "Each call launches 8 kernels on average."),
}


@pytest.mark.parametrize("reason", SLOW_REASONS)
def test_what_is_known_of_a_slow_operator(reason: str) -> None:
    """With a reason, 30 or 100 % of the excess are saved."""
    dimension, kernels, sentence = SLOW_REASONS[reason]
    steps = OperatorSteps().call(
        "sum", LARGE, out=[tensor(4096)], us=4_000, kernels=kernels, after=1, arguments=("", dimension, "False"),
        writes=[1],
    ).case(lasting=[1])  # fmt: skip
    candidate = only(rules.find_slow_operators, steps)
    excess_us = 4_000 - float(steps.operators.attainable_ns[0]) / US
    assert saved_us(steps, candidate) == pytest.approx([0.3 * excess_us, excess_us])
    assert sentence in text_of(candidate)
    assert [name for name, calls in steps.reasons.items() if calls.any()] == [reason]


def test_a_sum_of_elements_that_are_stored_one_after_the_other_has_no_reason() -> None:
    steps = OperatorSteps().call(
        "sum", LARGE, out=[tensor(8192)], us=4_000, arguments=("", "[1]", "False"), writes=[1]
    ).case(lasting=[1])  # fmt: skip
    assert not any(calls.any() for calls in steps.reasons.values())


# --- waves of blocks

#: 168 registers and 384 threads: 12 warps of 5,376 registers need 64,512 of 65,536, so one block runs at a time.
ONE_BLOCK = BlockResources(168, 384, 0)
#: 64 registers and 256 threads: 8 warps of 2,048 registers, so 32 warps or 4 blocks run at a time.
FOUR_BLOCKS = BlockResources(64, 256, 0)


@pytest.mark.parametrize(
    ("block", "resident"),
    [
        (ONE_BLOCK, 1),
        (FOUR_BLOCKS, 4),
        # 18 · 32 = 576 registers become 768. A quarter of the registers is enough for 21 warps: 4 · 21 // 4 = 21
        # blocks, but 64 warps are 16 blocks.
        (BlockResources(18, 128, 0), 16),
        # 73,728 + 1,024 bytes, of 233,472: 3 blocks.
        (BlockResources(32, 128, 73_728), 3),
        # 32 threads, 32 registers: the GPU runs at most 32 blocks.
        (BlockResources(32, 32, 0), 32),
    ],
)
def test_blocks_that_a_multiprocessor_runs_at_once(block: BlockResources, resident: int) -> None:
    assert count_resident_blocks(block, H200) == resident


def test_blocks_without_known_limits_or_sizes() -> None:
    assert count_resident_blocks(ONE_BLOCK, replace(H200, registers_per_sm=0)) == 0
    assert count_resident_blocks(ONE_BLOCK._replace(registers=0), H200) == 0
    assert count_resident_blocks(ONE_BLOCK._replace(threads=0), H200) == 0


def multiply(us: float, blocks: int, block: BlockResources) -> StepsToExplain:
    """A matmul of 8192 × 4096 × 4096, whose attainable time is 332 µs."""
    matrix = tensor(4096, 4096)
    return OperatorSteps().call("mm", LARGE, matrix, out=[LARGE], us=us, blocks=blocks, resources=block).case()


@pytest.mark.parametrize(
    ("blocks", "block", "finding_id", "saved"),
    [
        # Half of 132 multiprocessors are idle: 50 or 90 % of half of 600 µs, but at most of the excess.
        (66, ONE_BLOCK, "small_grids", [0.5, 0.9]),
        # 198 / 132 = 1.5 blocks per multiprocessor, in 2 waves: 0.5 / 2 of 600 µs are wasted.
        (198, ONE_BLOCK, "wave_tails", [0.5 * 150, 0.9 * 150]),
        # 4 · 132 = 528 places. 594 / 528 = 1.125 waves waste at most 0.875 / 2. At least, 4.5 blocks per multiprocessor
        # waste 0.5 / 5 of 600 µs, which is less than half of the excess.
        (594, FOUR_BLOCKS, None, []),
    ],
)
def test_idle_multiprocessors(blocks: int, block: BlockResources, finding_id: str | None, saved: list[float]) -> None:
    steps = multiply(600, blocks, block)
    excess_us = 600 - float(steps.operators.attainable_ns[0]) / US
    assert 150 < excess_us < 300
    candidates = [*find_small_grids(steps)]
    assert [candidate.id for candidate in candidates] == ([finding_id] if finding_id else [])
    for candidate in candidates:
        limited = [share * excess_us for share in saved] if finding_id == "small_grids" else saved
        assert saved_us(steps, candidate) == pytest.approx(limited)
        assert "The operator mm (8192×4096 · 4096×4096 bf16) launches it." in text_of(candidate)
        (slow,) = rules.find_slow_operators(steps) if not finding_id else [None]
        assert slow is None or saved_us(steps, slow) == pytest.approx([0, excess_us])


@pytest.mark.parametrize(("us", "blocks"), [(600, 132), (600, 264), (380, 66), (380, 198)])
def test_full_waves_and_operators_without_excess_have_no_reason(us: float, blocks: int) -> None:
    """One block for each multiprocessor is also the grid of a persistent kernel. 332 of 380 µs are attainable."""
    assert [*find_small_grids(multiply(us, blocks, ONE_BLOCK))] == []


def test_attention_with_a_mask() -> None:
    """A mask that is a tensor rules FlashAttention out: 30 or 100 % of the excess is saved."""
    query = tensor(8, 16, 1024, 64)
    mask = tensor(8, 16, 1024, 1024)
    arguments = ("", "", "", "", "False", "0.0", "False")
    steps = OperatorSteps().call(
        "_scaled_dot_product_efficient_attention", query, query, query, mask, out=[query], us=5_000, arguments=arguments
    ).case()  # fmt: skip
    candidate = only(rules.find_slow_operators, steps)
    excess_us = 5_000 - float(steps.operators.attainable_ns[0]) / US
    assert saved_us(steps, candidate) == pytest.approx([0.3 * excess_us, excess_us])
    assert "is_causal=True" in text_of(candidate)


# --- findings about the same work


def test_small_grids_are_no_finding_if_the_shapes_tell_another_reason() -> None:
    image = tensor(*CHANNELS)
    steps = OperatorSteps().call(
        "convolution", image, tensor(64, 64, 3, 3), None, out=[image], us=4_000, arguments=CONVOLUTION, blocks=100
    ).case()  # fmt: skip
    assert [*find_small_grids(steps)] == []
    assert only(rules.find_memory_format, steps).id == "memory_format"


def test_small_grids_of_operators_without_an_attainable_time() -> None:
    """Half of the multiprocessors are idle for 200 µs: 50 or 90 % of this half is saved."""
    steps = OperatorSteps().call("sort", LARGE, us=200, blocks=66).case()
    assert saved_us(steps, only(find_small_grids, steps)) == pytest.approx([50, 90])


def test_slow_operators_are_left_out_if_another_finding_explains_them() -> None:
    """The other finding saves less, but it tells the reason."""
    steps = head(32_000, 5_000)
    slow = only(rules.find_slow_operators, steps)
    explained = replace(slow, id="explained", is_symptom=False)
    savings = [type("Saving", (), {"middle": middle}) for middle in (2.0, 1.0)]
    kept = _without_explained_work(steps.study, list(zip((slow, explained), savings, strict=True)))
    assert [candidate.id for candidate, _ in kept] == ["explained"]


# --- lines


def samples(*stacks: tuple[str, ...]) -> StackSamples:
    """A sample of 1 ms in each call, with its frames from the outermost: ``file:line function``."""
    frames = []
    for stack in stacks:
        parsed = [(place.split(":"), function) for place, function in (frame.split(" ") for frame in reversed(stack))]
        frames.append(tuple(StackFrame(file, int(line), function) for (file, line), function in parsed))
    number = np.arange(len(stacks))
    sampled = Stacks(number, number, 1_000_000, number, tuple(frames), {"train.py": {9: "loss = f(x)"}})
    return StackSamples(number, number, np.full(len(stacks), 1e6), sampled)


TRAINING, EVALUATION = ("train.py:20 <module>", "train.py:3 main"), ("train.py:20 <module>", "train.py:9 main")


def test_the_outermost_line_of_some_calls() -> None:
    """Line 20 executes other calls as well, line 9 only these. ``model.py:5`` is inside."""
    one = samples(*[(*TRAINING, "model.py:5 Block.forward")] * 3, *[(*EVALUATION, "model.py:5 Block.forward")] * 3)
    (line,) = one.find_first_line(np.arange(6) >= 3, 2.0)
    assert (line.place, line.function, line.ms, line.source) == ("train.py:9", "main", 2.0, (">    9 loss = f(x)",))


def test_calls_that_share_their_lines_with_others_have_no_first_line() -> None:
    one = samples(*[(*TRAINING, "model.py:5 Block.forward")] * 6)
    assert one.find_first_line(np.arange(6) >= 3, 2.0) == ()


def test_the_callers_of_a_function() -> None:
    """Line 7 calls Block.forward in two of three samples; the call inside of Block.forward is not one."""
    block = "model.py:5 Block.forward"
    calling = (*TRAINING, "model.py:7 M.forward", block)
    one = samples(calling, (*calling, block), (*TRAINING, block))
    assert [(line.place, round(line.share, 2)) for line in one.find_callers("Block.forward")] == [
        ("model.py:7", 0.67), ("train.py:3", 0.33),
    ]  # fmt: skip
