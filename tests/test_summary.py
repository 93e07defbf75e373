"""The figures of a summary, each with its arithmetic, and the laws they obey."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.kernels.classes import Kernels
from nsys_analyzer.analysis.statistics import MOST_VALUES, Moments, sample_ms
from nsys_analyzer.analysis.summary.kernel_tables import (
    ClassRow,
    ClassShares,
    KernelRow,
    MemoryRow,
    find_class_share,
    make_class_rows,
    make_kernel_rows,
    merge_kernels,
)
from nsys_analyzer.analysis.summary.summarize import check_attribution, summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration, find_model
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.facts import say_all
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, SOFTMAX, Export, training_step

MS = 1e-6  # ms in one ns


def summaries(export: Export, tmp_path: Path) -> tuple[CaptureSummary, ...]:
    return summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")


def test_the_five_clocks_of_a_step(step_trace: Path) -> None:
    (summary,) = summarize(Trace.load(step_trace), "step")
    forward, backward, optimizer, step = summary.phases
    assert [p.phase for p in summary.phases] == ["forward", "backward", "optimizer", "step"]
    # forward: range [10, 300); kernels [30, 130) and [130, 150): busy 120, span 120, sum 120.
    assert forward.wall_ms.mean == pytest.approx(290 * MS)
    assert forward.gpu_span_ms.mean == pytest.approx(120 * MS)
    assert forward.gpu_busy_ms.mean == pytest.approx(120 * MS)
    assert forward.kernel_time_ms.mean == pytest.approx(120 * MS)
    # backward: [360, 560) and [560, 600); both launched by autograd.
    assert backward.kernel_time_ms.mean == pytest.approx(240 * MS)
    # optimizer: [720, 800).
    assert optimizer.kernel_time_ms.mean == pytest.approx(80 * MS)
    # step: all five, 120 + 240 + 80 = 440, from 30 to 800.
    assert step.kernels_per_instance == 5
    assert step.kernel_time_ms.mean == pytest.approx(440 * MS)
    assert step.gpu_span_ms.mean == pytest.approx(770 * MS)
    assert [phase.holds_backward for phase in summary.phases] == [False, True, False, True]


def test_classes_and_kernels_of_a_phase(step_trace: Path) -> None:
    (summary,) = summarize(Trace.load(step_trace), "step")
    forward = summary.phases[0]
    # GEMM 100 of 120, ADD 20 of 120.
    assert [(r.kernel_class, r.share) for r in forward.classes] == [
        ("matmul", pytest.approx(100 / 120)),
        ("elementwise", pytest.approx(20 / 120)),
    ]
    assert [(r.name, r.launches_per_instance, r.avg_us) for r in forward.kernels] == [
        (GEMM, 1.0, pytest.approx(0.1)),
        (ADD, 1.0, pytest.approx(0.02)),
    ]


def test_mean_and_spread_over_instances(tmp_path: Path) -> None:
    # Walls of 100, 120 and 140 ns: mean 120, sample deviation sqrt((400 + 0 + 400) / 2) = 20.
    export = Export()
    for number, wall in enumerate((100, 120, 140)):
        at = number * 1000
        export.range("forward", at, at + wall).kernel(GEMM, at + 10, at + 20, at + 50)
    (summary,) = summaries(export, tmp_path)
    wall_ms = summary.phases[0].wall_ms
    assert (wall_ms.n, wall_ms.mean, wall_ms.std) == (3, pytest.approx(120 * MS), pytest.approx(20 * MS))
    assert (wall_ms.min, wall_ms.median, wall_ms.max) == tuple(pytest.approx(w * MS) for w in (100, 120, 140))


def test_overlapping_streams_count_once_in_busy_and_twice_in_the_sum(tmp_path: Path) -> None:
    # [20, 60) on stream 7 and [40, 80) on stream 8: busy 60, span 60, sum 80.
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 60).kernel(ADD, 11, 40, 80, stream=8)
    (summary,) = summaries(export, tmp_path)
    phase = summary.phases[0]
    assert phase.gpu_busy_ms.mean == pytest.approx(60 * MS)
    assert phase.kernel_time_ms.mean == pytest.approx(80 * MS)


def test_copies_and_fills_are_busy_time_but_no_kernels(tmp_path: Path) -> None:
    # Kernel [20, 30), copy [30, 50), fill [60, 65): busy 35, span 45, kernel sum 10.
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 30)
    export.memory("MEMCPY", 12, 30, 50).memory("MEMSET", 14, 60, 65)
    (summary,) = summaries(export, tmp_path)
    phase = summary.phases[0]
    assert (phase.gpu_busy_ms.mean, phase.gpu_span_ms.mean) == (pytest.approx(35 * MS), pytest.approx(45 * MS))
    assert phase.kernel_time_ms.mean == pytest.approx(10 * MS)
    assert phase.kernels_per_instance == 1
    assert [(r.kind, r.operations_per_instance) for r in phase.memory] == [("memcpy", 1.0), ("memset", 1.0)]


def test_a_range_that_does_not_wait_for_its_kernel(tmp_path: Path) -> None:
    # The range ends at 50 µs, its kernel at 90 µs.
    export = Export().range("forward", 0, 50_000).kernel(GEMM, 10, 20_000, 90_000)
    (summary,) = summaries(export, tmp_path)
    assert not summary.phases[0].synchronized


def test_an_opaque_graph_is_busy_time_with_unknown_kernels(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).graph(10, 20, 80)
    (summary,) = summaries(export, tmp_path)
    phase = summary.phases[0]
    assert summary.status == "no_kernels"
    assert phase.gpu_busy_ms.mean == pytest.approx(60 * MS)
    assert phase.kernel_time_ms.mean is None
    assert any("--cuda-graph-trace=node" in warning for warning in say_all(summary.warnings))


def test_two_processes_are_two_entries_by_device(tmp_path: Path) -> None:
    export = Export().gpu(0).gpu(1, "NVIDIA H200 NVL")
    training_step(export, pid=100)
    export.range("forward", 10, 50, tid=200, pid=200).kernel(GEMM, 20, 30, 45, tid=200, pid=200, device=1)
    first, second = summaries(export, tmp_path)
    assert (first.process, second.process) == ("device 0", "device 1")
    assert (first.rank, second.rank) == (None, None)
    assert second.gpu is None  # no table says which GPU device 1 of pid 200 is
    assert first.coverage is not None
    assert second.coverage is not None
    assert (first.coverage.kernels, second.coverage.kernels) == (5, 1)


def test_processes_that_share_a_gpu_are_called_by_their_ids(tmp_path: Path) -> None:
    export = training_step(Export(), pid=100)
    export.kernel(GEMM, 20, 30, 45, tid=200, pid=200)
    assert [s.process for s in summaries(export, tmp_path)] == ["pid 100", "pid 200"]


def test_softmax_against_the_products(tmp_path: Path) -> None:
    # Products: GEMM [110, 140) and [200, 230) = 60. Softmax: max, exp, divide = 5 + 10 + 5 = 20, without a softmax
    # in any name. The scale inside `scores` ([140, 150)) is neither. Ratio 60 / 20.
    export = Export().range("forward", 0, 1000).range("scaled dot product attention", 100, 300)
    export.range("computing attention scores", 100, 150).kernel(GEMM, 101, 110, 140).kernel(ADD, 102, 140, 150)
    export.range("computing softmax", 150, 190)
    for at, length in ((151, 5), (152, 10), (153, 5)):
        export.kernel(ADD, at, at + 10 * (at - 150), at + 10 * (at - 150) + length)
    export.range("final matmul", 190, 290).kernel(GEMM, 195, 200, 230)
    export.kernel(GEMM, 400, 500, 600).kernel(SOFTMAX, 410, 600, 700)
    export.range("softmax", 420, 450).kernel(ADD, 430, 700, 800)  # a sampler's
    (summary,) = summaries(export, tmp_path)
    attention = summary.attention
    assert attention is not None
    assert attention.matmul_ms == pytest.approx(60 * MS)
    assert attention.softmax_ms == pytest.approx(20 * MS)
    assert attention.runtime_ratio == pytest.approx(3.0)
    assert (attention.matmul_launches, attention.softmax_launches) == (2, 3)


def test_a_softmax_by_name_counts_inside_attention_only(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 1000).range("attention", 100, 300)
    export.kernel(GEMM, 101, 110, 140).kernel(SOFTMAX, 102, 140, 150).kernel(SOFTMAX, 900, 910, 990)
    (summary,) = summaries(export, tmp_path)
    assert summary.attention is not None
    assert summary.attention.softmax_ms == pytest.approx(10 * MS)


def test_no_phases_still_gives_the_whole_capture(tmp_path: Path) -> None:
    export = Export(drop=("NVTX_EVENTS",)).kernel(GEMM, 10, 20, 60).kernel(ADD, 11, 40, 80, stream=8)
    (summary,) = summaries(export, tmp_path)
    assert summary.phases == ()
    assert summary.whole is not None
    assert summary.whole.gpu_busy_ms.mean == pytest.approx(60 * MS)
    assert any("NVTX" in warning for warning in say_all(summary.warnings))


events = st.lists(
    st.tuples(
        st.sampled_from([MAIN, AUTOGRAD, 101]),
        st.integers(0, 400),  # launch
        st.integers(0, 50),  # queueing delay
        st.integers(1, 60),  # duration
        st.sampled_from([GEMM, ADD]),
        st.sampled_from([7, 8]),
    ),
    max_size=12,
)
spans = st.lists(
    st.tuples(
        st.sampled_from(["forward", "backward", "optimizer", "step", "warmup", "block"]),
        st.sampled_from([MAIN, 101]),
        st.integers(0, 400),
        st.integers(0, 200),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events, spans)
def test_laws(
    tmp_path: Path, kernels: list[tuple[int, int, int, int, str, int]], ranges: list[tuple[str, int, int, int]]
) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    for tid, launch, delay, duration, name, stream in kernels:
        export.kernel(name, launch, launch + delay, launch + delay + duration, tid=tid, stream=stream)
    for range_name, tid, start, length in ranges:
        export.range(range_name, start, start + length, tid=tid)
    if not kernels and not ranges:
        return
    (summary,) = summaries(export, tmp_path)
    coverage = summary.coverage
    assert coverage is not None
    # Conservation, in count and in time.
    assert coverage.attributed + coverage.unattributed == coverage.kernels == len(kernels)
    assert sum(coverage.how.values()) == coverage.kernels
    assert coverage.attributed_ms + coverage.unattributed_ms == pytest.approx(coverage.kernel_ms)
    assert coverage.kernel_ms == pytest.approx(sum(k[3] for k in kernels) * MS)
    # What belongs to the start of a program is warm-up, whether or not a range holds it.
    assert coverage.in_warmup <= coverage.in_phases <= coverage.attributed + coverage.in_warmup
    for phase in summary.phases:
        if phase.instances:
            assert sum(row.launches_per_instance for row in phase.kernels) == pytest.approx(phase.kernels_per_instance)
            assert sum(r.ms_per_instance for r in phase.classes) == pytest.approx(phase.kernel_time_ms.mean)
            if phase.kernels:
                assert sum(row.share for row in phase.classes) == pytest.approx(1.0)
            busy, total, span = (s.max or 0.0 for s in (phase.gpu_busy_ms, phase.kernel_time_ms, phase.gpu_span_ms))
            assert busy <= total + 1e-12
            assert busy <= span + 1e-12
    leaves = [p for p in summary.phases if not p.phase.startswith("step")]
    counted = sum(p.kernels_per_instance * p.instances for p in leaves)
    assert counted <= coverage.in_phases + 1e-9


def test_a_file_name_that_the_kernels_contradict_is_not_believed(step_trace: Path) -> None:
    # The small model needs 4 · 12 + 1 = 49 matmuls per forward or more; the step launches one.
    guessed = Configuration(find_model("small"), 256, source="file name")
    (summary,) = summarize(Trace.load(step_trace), "train_small256", configuration=guessed)
    assert summary.configuration is not None
    assert (summary.configuration.model, summary.configuration.context_length) == (None, 256)
    assert any("49 matmuls" in warning for warning in say_all(summary.warnings))


@pytest.mark.parametrize(("matmuls", "believed"), [(0, True), (48, False), (49, True)])
def test_a_file_names_model_needs_four_matmuls_a_layer_and_a_head(matmuls: int, believed: bool, tmp_path: Path) -> None:
    # The small model has 12 layers: 49. Other kernels, and those of backward, are no matmul of the forward.
    export = Export().range("forward", 0, 1000).range("backward", 1000, 2000).kernel(GEMM, 1001, 1010, 1020)
    for number in range(60):
        export.kernel(GEMM if number < matmuls else ADD, 1 + number, 10 + number, 11 + number)
    trace, model = Trace.load(export.write(tmp_path / "t.sqlite")), find_model("small")
    (guessed,) = summarize(trace, "t", configuration=Configuration(model, 256, source="file name"))
    assert guessed.configuration == Configuration(model if believed else None, 256, source="file name")
    (told,) = summarize(trace, "t", configuration=Configuration(model, 256, source="manifest"))
    assert told.configuration == Configuration(model, 256, source="manifest")


def test_rows_are_of_one_instance(tmp_path: Path) -> None:
    # Two forwards with GEMMs of 10, 30 and 20 ns, 60 in three launches, copies of 4 and 8 ns, and an ADD of 15.
    export = Export().range("forward", 0, 100).range("forward", 200, 300)
    for launch, start, end in ((10, 20, 30), (11, 30, 60), (210, 220, 240)):
        export.kernel(GEMM, launch, start, end)
    export.kernel(ADD, 211, 240, 255).memory("MEMCPY", 12, 60, 64).memory("MEMCPY", 212, 260, 268)
    (summary,) = summaries(export, tmp_path)
    forward = summary.phases[0]
    assert [(r.name, r.launches_per_instance, r.ms_per_instance, r.avg_us, r.share) for r in forward.kernels] == [
        (GEMM, 1.5, pytest.approx(30 * MS), pytest.approx(0.020), pytest.approx(60 / 75)),
        (ADD, 0.5, pytest.approx(7.5 * MS), pytest.approx(0.015), pytest.approx(15 / 75)),
    ]
    assert forward.memory == (MemoryRow("memcpy", 1.0, pytest.approx(6 * MS)),)
    # Kernel sums of 40 and 35: mean 37.5, sample deviation sqrt(2 · 2.5²).
    total = forward.kernel_time_ms
    assert (total.n, total.mean, total.std) == (2, pytest.approx(37.5 * MS), pytest.approx(3.5355339 * MS))
    assert summary.precisions == {"fp32": 1.0}


def test_tables_of_phases_together() -> None:
    # 2 launches of 3 ms each and 1 of 2 ms are 8 ms in 3 launches, of 10 ms together.
    gemm = KernelRow("gemm", "matmul", 2.0, 6.0, 3000.0, 0.75)
    merged = merge_kernels(
        (KernelRow("add", "elementwise", 4.0, 2.0, 500.0, 0.25), gemm),
        (structs.replace(gemm, launches_per_instance=1.0, ms_per_instance=2.0),),
    )
    assert merged == (
        KernelRow("gemm", "matmul", 3.0, 8.0, pytest.approx(8000 / 3), 0.8),
        KernelRow("add", "elementwise", 4.0, 2.0, 500.0, 0.2),
    )
    assert merge_kernels((structs.replace(gemm, ms_per_instance=0.0),))[0].share == 0.0
    only = Kernels(np.zeros(1, np.int64), ("gemm",), ("matmul",))
    assert make_kernel_rows(only, np.ones(1, np.int64), np.zeros(1, np.int64), 1)[0].share == 0.0
    assert make_class_rows(merged) == (ClassRow("matmul", 3.0, 8.0, 0.8), ClassRow("elementwise", 4.0, 2.0, 0.2))


def test_a_share_is_unknown_where_kernels_without_a_name_may_change_its_digits() -> None:
    rows = [ClassRow("matmul", 1.0, 6.0, 0.6), ClassRow("unknown", 1.0, 4.0, 0.4)]
    assert find_class_share(rows, "matmul") is None
    few = [ClassRow("matmul", 1.0, 6.0, 0.6), ClassRow("unknown", 1.0, 0.004, 0.0004)]
    assert (find_class_share(few, "matmul"), find_class_share(few, "softmax")) == (0.6, 0.0)


def test_shares_of_the_classes_that_compute() -> None:
    rows = (
        ClassRow("communication", 1.0, 6.0, 0.6),
        ClassRow("matmul", 1.0, 3.0, 0.3),
        ClassRow("random", 1.0, 1.0, 0.1),
    )
    computing = ClassShares("step", rows).without_communication().classes
    assert [(row.kernel_class, row.share) for row in computing] == [("matmul", 0.75), ("random", 0.25)]
    assert ClassShares("step", rows[:1]).without_communication().classes == ()
    nothing = structs.replace(rows[1], ms_per_instance=0.0)
    assert ClassShares("step", (nothing,)).without_communication().classes == (nothing,)
    assert ClassShares("step", (rows[0], nothing)).without_communication().classes[0].share == 0.0


@pytest.mark.parametrize(
    ("length", "late", "synchronized"),
    [(50_000, 5_000, True), (50_000, 5_001, False), (9_000_000, 9_000, True), (9_000_000, 9_001, False)],
)
def test_a_few_microseconds_are_no_lack_of_synchronisation(
    length: int, late: int, synchronized: bool, tmp_path: Path
) -> None:
    # Clock skew: 5 µs, or a thousandth of the range where that is more.
    start = 10**9
    export = (
        Export().range("forward", start, start + length).kernel(GEMM, start + 10, start + 20, start + length + late)
    )
    (summary,) = summaries(export, tmp_path)
    assert summary.phases[0].synchronized == synchronized


@pytest.mark.parametrize(("stragglers", "synchronized"), [(1, True), (2, False)])
def test_one_instance_in_twenty_may_end_late(stragglers: int, synchronized: bool, tmp_path: Path) -> None:
    export = Export()
    for number in range(20):
        at = number * 100_000
        export.range("forward", at, at + 1000)
        export.kernel(GEMM, at + 10, at + 20, at + (90_000 if number < stragglers else 900))
    (summary,) = summaries(export, tmp_path)
    assert summary.phases[0].synchronized == synchronized


def test_the_names_of_a_phases_ranges(tmp_path: Path) -> None:
    export = Export().range("optimizer", 900, 950).kernel(GEMM, 910, 920, 930)
    for number in range(5):
        export.range(f"step {number}", number * 100, number * 100 + 50)
    for number, name in enumerate(("forward", "fwd", "forward pass")):
        export.range(name, number * 100, number * 100 + 20)
    (summary,) = summaries(export, tmp_path)
    assert {phase.phase: phase.range for phase in summary.phases} == {
        "forward": "forward, forward pass, fwd",
        "optimizer": "optimizer",
        "step": "step 0, step 1, step 2 and 2 more",
    }
    assert not any(phase.holds_backward for phase in summary.phases)


def test_precisions_by_time_of_matmul_and_attention(tmp_path: Path) -> None:
    # fp32 10 + 10, tf32 60, unknown 20 of 100; ADD is no matmul.
    export = Export()
    for at, (name, length) in enumerate(
        ((GEMM, 10), ("cutlass_80_tensorop_s1688tf32gemm_128x128", 60), (GEMM, 10), ("gemm_kernel", 20), (ADD, 50))
    ):
        export.kernel(name, at * 100, at * 100 + 10, at * 100 + 10 + length)
    (summary,) = summaries(export, tmp_path)
    assert list(summary.precisions.items()) == [("tf32", 0.6), ("fp32", 0.2), ("unknown", 0.2)]


def test_counts_and_times_of_coverage(tmp_path: Path) -> None:
    # Process 100: a kernel of 100 ns in the step and in no other phase, one of 40 outside every range, one of 5 without
    # a launch. It lasts from its first call at 10 to the end of its step at 2000; waits of 20, 10. Process 200: one
    # kernel of 7 ns that waits for 3, from 4000 to 4010.
    export = Export().range("step", 500, 2000).kernel(GEMM, 600, 620, 720).kernel(ADD, 10, 20, 60)
    export.kernel(ADD, None, 800, 805).kernel(GEMM, 4000, 4003, 4010, tid=200, pid=200, device=1)
    ours, other = (summary.coverage for summary in summaries(export, tmp_path))
    assert ours is not None
    assert other is not None
    assert (ours.kernels, ours.attributed, ours.in_phases, ours.unattributed, ours.without_launch) == (3, 1, 1, 2, 1)
    assert (ours.kernel_ms, ours.attributed_ms, ours.unattributed_ms) == tuple(
        pytest.approx(t * MS) for t in (145, 100, 45)
    )
    assert ours.how == {"none": 2, "same thread": 1, "other thread": 0, "graph": 0}


def test_a_broken_law_is_an_error_not_a_warning(step_trace: Path) -> None:
    (summary,) = summarize(Trace.load(step_trace), "step")
    coverage = summary.coverage
    assert coverage is not None
    check_attribution(summary)
    for broken in ({"attributed": 6}, {"unattributed_ms": 1.0}, {"in_phases": 4}, {"kernel_ms": 0.5}):
        with pytest.raises(NsysAnalyzerError, match="is not true"):
            check_attribution(replace(summary, coverage=replace(coverage, **broken)))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 10**6)), min_size=1),
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
)
def test_moments_over_steps(pieces: list[tuple[int, int, int]], near: list[bool]) -> None:
    """The mean over the steps near the median, and the deviation over all of 4 steps, of each of 3 kinds."""
    step, kind, ns = (np.array(column) for column in zip(*pieces, strict=True))
    moments = Moments(3)
    moments.add(step, kind, ns, np.array(near))
    in_steps = [[sum(n for s, k, n in pieces if (s, k) == (i, j)) / 1e6 for i in range(4)] for j in range(3)]
    for (mean, std), values in zip(moments.of(1.0), in_steps, strict=True):
        typical = [value for value, is_near in zip(values, near, strict=True) if is_near]
        assert mean == pytest.approx(statistics.fmean(typical), abs=1e-9)
        assert std == pytest.approx(statistics.stdev(values), abs=1e-6)
    single = Moments(1)
    single.add(np.array([0]), np.array([0]), np.array([5]), np.array([True]))
    assert single.of(1.0) == [(pytest.approx(5 / 1e6), None)]


def test_values_of_very_many_instances() -> None:
    """The first, the last and evenly spread ones between them."""
    assert sample_ms(np.array([1_000_000, 2_500_000])) == (1.0, 2.5)
    spread = sample_ms(np.arange(1_000) * 1_000_000)
    assert (len(spread), spread[0], spread[-1]) == (MOST_VALUES, 0.0, 999.0)
