"""Tests comparisons of two sides: parts that add up, matched kernels, findings, verdicts and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from nsys_analyzer.analysis.comparison.compare import compare, match_kernels
from nsys_analyzer.analysis.comparison.comparison import Comparison, StepChange
from nsys_analyzer.analysis.comparison.estimates import RunSpread
from nsys_analyzer.analysis.comparison.pairs import Comparisons, UnmatchedRun, compare_runs, match_runs
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.step import KernelTime, StepSummary
from nsys_analyzer.analysis.summary.summary import Summary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.model import Answer, Block, Listing, SignedChange, Table, unfold_details
from nsys_analyzer.report.sections.comparison import answer_comparison, caution_sentences, require_comparisons
from nsys_analyzer.text import plain
from tests.examples import comparing
from tests.support.sides import finding, kernel, run, side

MS = st.floats(0.0, 1e3)
KERNELS = st.lists(
    st.builds(
        kernel,
        name=st.sampled_from("abcdef"),
        ms=MS,
        kernel_class=st.sampled_from(["matmul", "elementwise", "softmax"]),
        launches=st.sampled_from([1, 2, 24]),
    ),
    max_size=8,
    unique_by=lambda one: (one.name, one.kernel_class),
)
RUNS = st.builds(
    run,
    KERNELS,
    st.dictionaries(st.sampled_from([cause for cause in CAUSES if cause != "launch"]), MS, max_size=4),
    copy_ms=MS,
    jitter_ms=st.lists(MS, min_size=1, max_size=10),
)
SIDES = st.lists(RUNS, min_size=1, max_size=3).map(lambda runs: side(*runs))


def compared(before: Summary, after: Summary) -> Comparison:
    return compare(side(before), side(after))


def compared_steps(before: Any, after: Any) -> StepChange:
    """The comparison of the steps of two sides."""
    step = compare(before, after).step
    assert step
    return step


def blocks_of(*pairs: Comparison) -> list[Block]:
    """What is written of comparisons, folded or not."""
    return [*unfold_details(answer_comparison(Comparisons(pairs, (), ()), 0.05).blocks)]


def remarks_of(before: Summary, after: Summary) -> list[str]:
    """The verdict, and the lines below it."""
    verdict, listing, *_ = blocks_of(compared(before, after))
    assert isinstance(verdict, Answer)
    assert isinstance(listing, Listing)
    return [plain(verdict.text), *map(plain, listing.lines)]


# --- laws


@given(SIDES, SIDES)
def test_parts_and_kernels_add_up(before: Any, after: Any) -> None:
    """Kernels to their class, parts to the step."""
    step = compared_steps(before, after)
    assert sum(part.change.ms for part in step.parts) == pytest.approx(step.wall.ms, abs=1e-6)
    for part in (part for part in step.parts if part.kind == "compute"):
        assert sum(one.change.ms for one in part.kernels) == pytest.approx(part.change.ms, abs=1e-6)
    sizes = [abs(part.change.ms) for part in step.parts]
    assert sizes == sorted(sizes, reverse=True)


@given(SIDES, SIDES)
def test_the_table_of_parts_adds_up(before: Any, after: Any) -> None:
    """Each column to its last row, the step, but for what four digits of it do not show."""
    table = next(block for block in blocks_of(compare(before, after)) if isinstance(block, Table))
    figures = [[cell.value if isinstance(cell, SignedChange) else cell for cell in row[1:]] for row in table.rows]
    for column in zip(*figures, strict=True):
        longest = max(*figures[-1][:2], 1e-6)
        assert sum(column[:-1]) == pytest.approx(column[-1], abs=0.001 * longest)


@given(KERNELS, KERNELS)
def test_every_kernel_stands_in_one_pair(before: list[KernelTime], after: list[KernelTime]) -> None:
    """And no two that are left alone on either side could stand for each other: their names say no layout."""
    pairs = match_kernels(before, after)
    assert Counter(was for was, _ in pairs if was) == Counter(before)
    assert Counter(now for _, now in pairs if now) == Counter(after)
    gone = {(was.kernel_class, was.launches) for was, now in pairs if was and not now}
    new = {(now.kernel_class, now.launches) for was, now in pairs if now and not was}
    assert not gone & new


@given(RUNS, RUNS)
def test_there_and_back(before: Summary, after: Summary) -> None:
    """The change back is the same with the other sign."""
    there, back = compared_steps(side(before), side(after)), compared_steps(side(after), side(before))
    assert there.wall.ms == pytest.approx(-back.wall.ms)
    if there.wall.low_ms is not None and back.wall.high_ms is not None:
        assert there.wall.low_ms == pytest.approx(-back.wall.high_ms)


# --- kernels


def test_kernels_of_one_name_are_a_pair_of_their_class() -> None:
    """A kernel has a row for each class; the same kernel twice as often is the same kernel."""
    before = [kernel("gemm", 1.0), kernel("gemm", 2.0, "convolution")]
    pairs = match_kernels(before, [kernel("gemm", 3.0, launches=2)])
    assert [tuple(one and one.ms for one in pair) for pair in pairs] == [(1.0, 3.0), (2.0, None)]


def test_kernels_of_other_names_are_paired_by_launches_the_longest_first() -> None:
    before = [kernel("fp32 64x64", 3.0, launches=24), kernel("fp32 128x64", 5.0, launches=24), kernel("div", 1.0, "e")]
    after = [kernel("bf16 a", 1.0, launches=24), kernel("bf16 b", 2.0, launches=24), kernel("cast", 1.0, "e", 3)]
    names = [tuple(one.name if one else None for one in pair) for pair in match_kernels(before, after)]
    assert names == [("fp32 128x64", "bf16 b"), ("fp32 64x64", "bf16 a"), ("div", None), (None, "cast")]


def test_matmuls_of_other_operands_do_not_stand_for_each_other() -> None:
    """Forward, the gradient of the input and that of the weight, launched as often; a reduction says no layout."""
    before = [
        kernel("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3", 3.0, launches=24),
        kernel("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)", 5.0, launches=24),
        kernel("void cublasLt::splitKreduce_kernel<(int)32, (int)16>", 9.0, launches=24),
        kernel("add_nt_add", 1.0, "elementwise", launches=24),
    ]
    after = [
        kernel("nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN", 1.0, launches=24),
        kernel("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", 0.5, launches=24),
        kernel("nvjet_sm90_tst_64x96_64x8_4x2_h_bz_NTT", 4.0, launches=24),
        kernel("add_nn", 1.0, "elementwise", launches=24),
    ]
    assert sorted(match_kernels(before, after), key=str) == sorted(
        [(before[0], after[0]), (before[1], after[1]), (before[2], None), (before[3], after[3]), (None, after[2])],
        key=str,
    )


def test_kernels_of_one_operator_are_paired_if_both_sides_know_their_operators() -> None:
    """The times alone would pair the kernel of the backward pass, 18 ms, with that of the statistics, 5 ms."""
    backward, forward = "aten::native_batch_norm_backward", "aten::native_batch_norm"
    before = [kernel("backward", 18.0, operator=backward), kernel("statistics", 8.0, operator=forward)]
    after = [kernel("backward_last", 3.0, operator=backward), kernel("statistics_last", 5.0, operator=forward)]
    assert match_kernels(before, after) == (*zip(before, after, strict=True),)
    unknown = [structs.replace(one, operator="") for one in after]
    assert match_kernels(before, unknown) == ((before[0], unknown[1]), (before[1], unknown[0]))
    other = [kernel("copy", 1.0, operator="aten::copy_")]
    assert match_kernels(before[:1], other) == ((before[0], None), (None, other[0]))


# --- what it says


def test_what_was_changed_comes_first() -> None:
    """10 ms of matmul become 4, 5 ms of waiting none, and launching takes 1 ms longer."""
    before = run([kernel("gemm", 10.0), kernel("add", 2.0, "elementwise")], {"sync": 5.0, "launch": 1.0})
    after = run([kernel("bf16 gemm", 4.0), kernel("add", 2.0, "elementwise")], {"launch": 2.0})
    step = compared_steps(side(before), side(after))
    assert [(part.kind, part.name, part.change.ms) for part in step.parts] == [
        ("compute", "matmul", -6.0), ("idle", "sync", -5.0), ("idle", "launch", 1.0), ("compute", "elementwise", 0.0),
    ]  # fmt: skip
    (changed,) = step.parts[0].kernels
    assert (changed.before_name, changed.after_name) == ("gemm", "bf16 gemm")
    assert step.wall.ms == -10.0
    assert step.busy.ms == -6.0


@pytest.mark.parametrize(
    ("after", "threshold", "verdict"),
    [(100.5, 0.05, "no change"), (101.0, 0.05, "slower"), (99.0, 0.05, "faster"), (100.5, 0.005, "unclear")],
)
def test_verdicts(after: float, threshold: float, verdict: str) -> None:
    """GPU work of 100 ms varies by 0.25 % from run to run: ± 1.96 × √2 × 0.25 = 0.7 %."""
    assert compared(run([kernel("gemm", 100.0)]), run([kernel("gemm", after)])).verdict(threshold) == verdict


def test_verdicts_on_waiting_and_on_one_step() -> None:
    """Waiting varies by 25 %; one step a side tells no interval."""
    waiting, longer = (side(run([], {"host": ms})) for ms in (100.0, 120.0))
    assert compare(waiting, longer).verdict() == "unclear"
    assert not compare(waiting, longer).is_slower_by(0.05)
    assert compare(waiting, longer, cpu_spread=0.01).verdict() == "slower"
    single = run([kernel("gemm", 100.0)], jitter_ms=[0.0])
    assert compared(single, run([kernel("gemm", 200.0)], jitter_ms=[1.0])).verdict() == "unclear"


def test_slower_by_more_than_a_limit() -> None:
    """By the best estimate, where it is more than chance; how far the interval reaches down is another matter."""
    before = run([kernel("gemm", 100.0)])
    slower = compared(before, run([kernel("gemm", 106.0)]))
    assert [slower.is_slower_by(share) for share in (0.05, 0.07)] == [True, False]
    assert not compared(before, run([kernel("gemm", 94.0)])).is_slower_by(0.05)


def test_times_without_the_profiler_come_first() -> None:
    """40 to 30 ms without it, whatever the profiled steps say."""
    before = run([kernel("gemm", 30.0)], {"launch": 30.0}, unprofiled=Stats(10, 40.0, 0.1, 39.9, 40.0, 40.1))
    after = run([kernel("gemm", 30.0)], {"launch": 30.0}, unprofiled=Stats(10, 30.0, 0.1, 29.9, 30.0, 30.1))
    comparison = compared(before, after)
    assert comparison.unprofiled == comparison.headline
    assert comparison.unprofiled
    assert comparison.unprofiled.ms == -10.0
    assert comparison.step
    assert comparison.step.wall.ms == 0.0
    one_side = compared(before, run([kernel("gemm", 30.0)]))
    assert one_side.unprofiled is None
    assert one_side.headline == (one_side.step and one_side.step.wall)


def test_doubted_times_are_left_out() -> None:
    times = Stats(5, 10.0, 0.1, 9.0, 10.0, 11.0)
    one, other = (run([kernel("gemm", 30.0)], unprofiled=times) for _ in range(2))
    assert compared(one, other).unprofiled
    doubted = Unprofiled("ok", phases={"step": times}, doubts={"step": ("the GPU is busy for longer",)})
    assert compared(one, replace(other, unprofiled=doubted)).unprofiled is None
    reason = "The step of train without the profiler is not trusted: the GPU is busy for longer."
    assert reason in remarks_of(one, replace(other, unprofiled=doubted))
    assert not any("not trusted" in line for line in remarks_of(one, other))


def test_a_wide_interval_is_not_written_out() -> None:
    """1 ms of the CPU's in two steps of 0 and 2 ms: ±12.7 × √2 ms and more, which is 18 times the step."""
    before, after = (run([], {"host": ms}, jitter_ms=[0.0, 2.0]) for ms in (0.0, 0.5))
    verdict, *_ = remarks_of(before, after)
    assert verdict.startswith("Too uncertain to tell: a step takes 1.000 → 1.500")
    assert verdict.endswith("+0.500\N{NO-BREAK SPACE}ms (too short to tell).")
    cells = [cell for block in blocks_of(compared(before, after)) if isinstance(block, Table) for cell in block.rows[0]]
    assert "too short to tell" in cells


#: Milliseconds of matmul, elementwise, softmax and optimizer after, where they were 10, 4, 1 and 5 before.
OTHER_WORK = [
    ((5.0, 2.0, 0.9, 5.0), 7.0 / 14.0),  # softmax is no large class (7 %), the optimizer's work is that of any batch
    ((20.0, 9.0, 2.0, 5.0), 29.0 / 14.0),  # ÷ 14: 2.07; each within 9 % of it
    ((3.3, 2.0, 0.5, 5.0), None),  # bf16: the matmuls gain more
    ((9.0, 3.6, 0.9, 5.0), None),  # 0.9 is too near to 1
    ((5.0, 0.0, 0.5, 5.0), None),  # a class is gone
]


@pytest.mark.parametrize(("after", "factor"), OTHER_WORK)
def test_all_large_classes_by_one_factor(after: tuple[float, ...], factor: float | None) -> None:
    classes = ("matmul", "elementwise", "softmax", "optimizer")
    sides = [
        run([kernel(name, ms, name) for name, ms in zip(classes, times, strict=True) if ms])
        for times in ((10.0, 4.0, 1.0, 5.0), after)
    ]
    step = compared_steps(*map(side, sides))
    assert step.common_factor == (None if factor is None else pytest.approx(factor))
    asked = f"The times of all large classes changed by the factor {factor or 0:.2f}. Do batch sizes differ?"
    assert (asked in remarks_of(*sides)) == (factor is not None)
    batches = [replace(one, configuration=Configuration(batch_size=4)) for one in sides]
    assert not any("Do batch sizes differ" in line for line in remarks_of(*batches)), "it is known"


def test_runs_of_one_program_are_no_other_work() -> None:
    """Of each two of the committed runs of a program, those with planted matmuls, too: 12 and 14 runs."""
    two = [both for both in combinations(comparing.runs(), 2) if both[0].program == both[1].program]
    steps = [compared(*(replace(run(), step=one.step) for one in both)).step for both in two]
    assert len(steps) == 12 * 11 / 2 + 14 * 13 / 2
    assert not any(step.common_factor for step in steps if step)


def said(before: Any, after: Any) -> list[tuple[str, str, float, float]] | None:
    """The findings of two sides: how each changed, and what it saves."""
    findings = compare(before, after).findings
    if findings is None:
        return None
    return [(one.finding.id, one.status, one.finding.saves_ms_low, one.finding.saves_ms_high) for one in findings]


def finding_in(*savings: tuple[str, float, float]) -> Summary:
    return run(findings=tuple(finding(*one) for one in savings))


def test_findings() -> None:
    """Gone, new, changed where the intervals have nothing in common, and those that stay."""
    before = side(finding_in(("sync", 1, 2), ("launch", 3, 4), ("loader", 5, 9)))
    assert said(before, side(finding_in(("launch", 5, 6), ("loader", 8, 9), ("fp32", 1, 1)))) == [
        ("sync", "gone", 1, 2), ("fp32", "new", 1, 1), ("launch", "changed", 5, 6), ("loader", "stays", 8, 9),
    ]  # fmt: skip
    assert said(before, side(run(findings=None))) is None


def test_findings_of_several_runs() -> None:
    """A side's are those of most runs that tell any: medians of 1, 2, 9 and 2, 3, 10; one of two runs is not most."""
    untold = run(findings=None)
    before = side(
        finding_in(("sync", 9, 10)), finding_in(("sync", 1, 2), ("loader", 1, 1)), finding_in(("sync", 2, 3)), untold
    )
    after = side(finding_in(("launch", 1, 1)), finding_in(("launch", 3, 5), ("sync", 9, 9)), untold)
    assert said(before, after) == [("sync", "gone", 2, 3), ("launch", "new", 2, 3)]
    assert said(before, side(untold, untold)) is None
    assert said(before, side(untold, finding_in())) == [("sync", "gone", 2, 3)]


def test_several_runs_of_a_side() -> None:
    """10, 20 and 30 ms against 11, 21 and 31 ms: means of 20 and 21, and errors of 10 ÷ √3."""
    before, after = (
        side(*(run([], {"host": float(ms)}, jitter_ms=[0.0] * 3) for ms in hosts))
        for hosts in ((10, 20, 30), (11, 21, 31))
    )
    change = compare(before, after).headline
    assert change
    assert (change.before_ms, change.after_ms, change.before_n) == (20.0, 21.0, 3)
    assert change.high_ms == pytest.approx(1 + 2.776 * (200 / 3) ** 0.5)
    assert before.title == "train and 2 more"


def uneven(last_kernel_ms: float, last_copy_ms: float) -> StepSummary:
    """Four steps of 10 ms of compute and 1 ms of waiting, and one of so much more."""
    times = [10.0] * 4 + [10.0 + last_kernel_ms + last_copy_ms]
    step = run([kernel("gemm", 10.0 + last_kernel_ms / 5)], {"host": 1.0}, copy_ms=last_copy_ms / 5).step
    assert step
    return replace(step, wall_values_ms=tuple(ms + 1 for ms in times), busy_values_ms=tuple(times), own_pauses_ms=0.0)


@pytest.mark.parametrize("more", [(0.0, 0.0), (50.0, 0.0), (0.0, 90.0)])
def test_one_long_step_does_not_change_what_the_median_one_differs_by(more: tuple[float, float]) -> None:
    """10 ms of compute, 0.25 % of which runs differ by, and 1 ms of waiting, 25 %."""
    step, spread = uneven(*more), RunSpread(0.25)
    assert spread.of_step(step, 11.0) == pytest.approx((0.025**2 + 0.25**2) ** 0.5)
    assert spread.of_busy(step) == pytest.approx(0.025)


@given(RUNS)
def test_the_usual_compute_fits_into_the_median_step(one: Summary) -> None:
    """So no time that the GPU waits is below 0."""
    assert one.step
    assert one.step.usual_compute_ms <= one.step.median_busy_ms <= np.median(one.step.wall_values_ms) + 1e-9


# --- what can be compared


def test_what_differs_and_what_is_another_program() -> None:
    known = Configuration(find_model("small"), 256, 4, "fp32", "train")
    before = run(configuration=known, run=Run(compile=False, torch="2.11"))
    after = run(configuration=structs.replace(known, precision="bf16"), run=Run(compile=True, torch="2.11"))
    comparison = compared(before, after)
    assert [(one.key, one.before, one.after) for one in comparison.differences] == [
        ("precision", "fp32", "bf16"), ("compile", "off", "on"),
    ]  # fmt: skip
    assert comparison.cautions == ()


@pytest.mark.parametrize(
    ("after", "reasons"),
    [
        (run(name="long", configuration=Configuration(context_length=512)),
         ["The context length is 256 in train, and 512 in long"]),
        (run(configuration=Configuration(context_length=512)),  # both are named train
         ["The context length is 256 in the first run, and 512 in the second run"]),
        (run(), []),  # what is not known contradicts nothing
        (run(name="other", gpu="NVIDIA H100"), ["train ran on NVIDIA H200, other on NVIDIA H100"]),
        (run(name="cut", status="partial"), ["cut is partial: a range has no end, or some of its kernels are missing"]),
        (run(status="oom", message="2 GiB"), ["train ran out of memory (2 GiB)"]),
        (run(step=None), ["train contains no step that ran on a GPU"]),
        (run(status="not_profiled", step=None), ["train was not profiled"]),
    ],
)  # fmt: skip
def test_reasons_against_a_comparison(after: Summary, reasons: list[str]) -> None:
    before = run(configuration=Configuration(context_length=256))
    assert [*map(plain, caution_sentences(compared(before, after)))] == reasons


def test_the_precision_that_the_kernels_tell() -> None:
    (one,) = compared(run(precisions={"fp32": 1.0}), run(precisions={"unknown": 0.3, "bf16": 0.7})).differences
    assert (one.key, one.before, one.after) == ("matmul precision", "fp32", "bf16")


def test_a_run_that_was_timed_alone() -> None:
    """Its times are compared, and nothing else is known of it."""
    times = Stats(10, 40.0, 0.1, 39.9, 40.0, 40.1)
    timed = run(status="not_profiled", step=None, unprofiled=times)
    comparison = compared(timed, run([kernel("gemm", 30.0)], unprofiled=times))
    assert comparison.cautions == ()
    assert comparison.step is None
    assert comparison.headline
    assert comparison.headline.ms == 0.0


def test_one_capture_on_both_sides() -> None:
    """By whatever name."""
    before = run([], {"host": 100.0})
    comparison = compared(before, run([], {"host": 100.0}, name="copy"))
    assert comparison.same
    assert comparison.verdict() == "no change"
    assert not compared(before, run([], {"host": 100.5})).same


# --- matching


def of(name: str, **configuration: Any) -> Summary:
    return run(name=name, configuration=Configuration(find_model("small"), **configuration))


def sharing(name: str, *pids: int) -> list[Summary]:
    return [run(name=name, process=f"pid {pid}", pid=pid) for pid in pids]


def listed(texts: str) -> list[Summary]:
    """Runs by their names, and what is known of them: ``a/128/fp32`` of a context and a precision, ``b/rank 1``."""
    runs = []
    for name, *known in (text.split("/") for text in texts.split(", ")):
        if not known:
            runs.append(run(name=name))
        elif known[0].startswith("rank"):
            runs.append(run(name=name, process=known[0], rank=int(known[0][-1])))
        elif known[0].startswith(("device", "pid")):
            runs.append(run(name=name, process=known[0], pid=int(known[-1].split()[-1])))
        else:
            asked = dict(zip(("context_length", "precision"), (int(known[0] or 0) or None, *known[1:]), strict=False))
            runs.append(of(name, **asked))
    return runs


def matched(
    before: list[Summary], after: list[Summary], *, repeats: bool = False
) -> tuple[list[str], list[UnmatchedRun]]:
    """The pairs in words, and the runs without one."""
    pairs, unmatched = match_runs(before, after, repeats=repeats)
    return [" | ".join("+".join(run.title for run in side.runs) for side in pair) for pair in pairs], unmatched


#: Two sides, their pairs, and the runs without one.
MATCHED = [
    # by their configuration
    (
        "a/128/fp32, b/256/fp32", "c/256/fp32, d/128/bf16", ["b | c"], ["a", "d"],
    ),
    # several runs of one configuration stand together
    ("a/128, b/128, x/64", "c/128, d/512", ["a+b | c"], ["x", "d"]),
    # what is known of one run alone keeps apart
    ("a/128, x/64", "c/, d/64", ["x | d"], ["a", "c"]),
    # two captures are a pair process by process, whatever they are called
    (
        "one/rank 0, one/rank 1", "other/rank 1, other/rank 2", ["one rank 1 | other rank 1"],
        ["one rank 0", "other rank 2"],
    ),
    ("a/1", "b/2", ["a | b"], []),
    # processes that share a GPU in order: an ID may be another process's in the other capture
    (
        "one/pid 100, one/pid 101, one/device 1/3", "other/device 1/2, other/pid 101, other/pid 102",
        ["one pid 100 | other pid 101", "one pid 101 | other pid 102", "one device 1 | other device 1"], [],
    ),
    # without a configuration by name
    ("a, b", "b, c", ["b | b"], ["a", "c"]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "pairs", "alone"), MATCHED)
def test_which_runs_stand_against_each_other(before: str, after: str, pairs: list[str], alone: list[str]) -> None:
    in_words, unmatched = matched(listed(before), listed(after))
    assert in_words == pairs
    assert [one.run.title for one in unmatched] == alone
    assert [one.side for one in unmatched] == ["before", "after"][: len(unmatched)]


def test_repeats_are_runs_of_one_program() -> None:
    """Process by process."""
    assert matched(listed("a, b"), listed("c, d"), repeats=True) == (["a+b | c+d"], [])
    twice = [*sharing("before", 100, 101), *sharing("again", 7, 8)]
    assert matched(twice, sharing("after", 101, 102), repeats=True)[0] == [
        "before pid 100+again pid 7 | after pid 101", "before pid 101+again pid 8 | after pid 102",
    ]  # fmt: skip


def test_of_another_number_of_processes_none_is_taken_for_another() -> None:
    with pytest.raises(NsysAnalyzerError, match="before pid 1 and after pid 1 differ in their names or processes"):
        compare_runs(sharing("before", 1, 2), sharing("after", 1, 2, 3))


def test_nothing_can_be_compared() -> None:
    with pytest.raises(NsysAnalyzerError, match=r"a and c differ in context length \(1 and 2\)\. Compare two"):
        compare_runs([of("a", context_length=1), of("b", batch_size=3)], [of("c", context_length=2)])
    with pytest.raises(NsysAnalyzerError, match=r"train ran on NVIDIA H200, train on A100\. .* add --force"):
        require_comparisons(compare_runs([run()], [run(gpu="A100")]))
    (forced,) = compare_runs([run()], [run(gpu="A100")], force=True).compared
    assert forced.cautions
    with pytest.raises(NsysAnalyzerError, match="contains no run"):
        compare_runs([run()], [])


def test_what_is_refused_beside_what_is_compared() -> None:
    found = compare_runs(
        [of("a", context_length=1), of("b", context_length=2)],
        [of("a", context_length=1), replace(of("b", context_length=2), gpu="A100")],
    )
    assert [one.before.title for one in found.compared] == ["a"]
    assert [one.before.title for one in found.refused] == ["b"]
