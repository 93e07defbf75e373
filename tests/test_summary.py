"""The figures of a summary, each with its arithmetic, and the laws they obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.consistency import check_conservation
from nsys_analyzer.analysis.models import Configuration, find_model
from nsys_analyzer.analysis.summarize import summarize
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.errors import NsysAnalyzerError
from tests.export import ADD, AUTOGRAD, GEMM, MAIN, SOFTMAX, Export, training_step

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
    assert forward.kernel_sum_ms.mean == pytest.approx(120 * MS)
    # backward: [360, 560) and [560, 600); both launched by autograd.
    assert backward.kernel_sum_ms.mean == pytest.approx(240 * MS)
    assert [(t.thread, t.kernels_per_instance) for t in backward.launch_threads] == [("pt_autograd_0", 2.0)]
    # optimizer: [720, 800).
    assert optimizer.kernel_sum_ms.mean == pytest.approx(80 * MS)
    # step: all five, 120 + 240 + 80 = 440, from 30 to 800.
    assert step.kernels_per_instance == 5
    assert step.kernel_sum_ms.mean == pytest.approx(440 * MS)
    assert step.gpu_span_ms.mean == pytest.approx(770 * MS)


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
    assert phase.kernel_sum_ms.mean == pytest.approx(80 * MS)


def test_copies_and_fills_are_busy_time_but_no_kernels(tmp_path: Path) -> None:
    # Kernel [20, 30), copy [30, 50), fill [60, 65): busy 35, span 45, kernel sum 10.
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 30)
    export.memory("MEMCPY", 12, 30, 50).memory("MEMSET", 14, 60, 65)
    (summary,) = summaries(export, tmp_path)
    phase = summary.phases[0]
    assert (phase.gpu_busy_ms.mean, phase.gpu_span_ms.mean) == (pytest.approx(35 * MS), pytest.approx(45 * MS))
    assert phase.kernel_sum_ms.mean == pytest.approx(10 * MS)
    assert phase.kernels_per_instance == 1
    assert [(r.kind, r.operations_per_instance) for r in phase.memory] == [("memcpy", 1.0), ("memset", 1.0)]


def test_a_range_that_does_not_wait_for_its_kernel(tmp_path: Path) -> None:
    # The range ends at 50 µs, its kernel at 90 µs.
    export = Export().range("forward", 0, 50_000).kernel(GEMM, 10, 20_000, 90_000)
    (summary,) = summaries(export, tmp_path)
    assert not summary.phases[0].synchronized
    assert summary.phases[0].gpu_lag_ms.mean == pytest.approx(0.04)


def test_an_opaque_graph_is_busy_time_with_unknown_kernels(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).graph(10, 20, 80)
    (summary,) = summaries(export, tmp_path)
    phase = summary.phases[0]
    assert summary.status == "no_kernels"
    assert phase.gpu_busy_ms.mean == pytest.approx(60 * MS)
    assert phase.kernel_sum_ms.mean is None
    assert any("--cuda-graph-trace=node" in warning for warning in summary.warnings)


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
    assert any("NVTX" in warning for warning in summary.warnings)


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert coverage.in_warmup <= coverage.in_phases <= coverage.attributed
    for phase in summary.phases:
        if phase.instances:
            assert sum(row.launches_per_instance for row in phase.kernels) == pytest.approx(phase.kernels_per_instance)
            assert sum(r.ms_per_instance for r in phase.classes) == pytest.approx(phase.kernel_sum_ms.mean)
            if phase.kernels:
                assert sum(row.share for row in phase.classes) == pytest.approx(1.0)
            busy, total, span = (s.max or 0.0 for s in (phase.gpu_busy_ms, phase.kernel_sum_ms, phase.gpu_span_ms))
            assert busy <= total + 1e-12
            assert busy <= span + 1e-12
    leaves = [p for p in summary.phases if not p.phase.startswith("step")]
    counted = sum(p.kernels_per_instance * p.instances for p in leaves)
    assert counted <= coverage.in_phases + 1e-9


def test_a_file_name_that_the_kernels_contradict_is_not_believed(step_trace: Path) -> None:
    # The small model needs 4 · 12 + 1 = 49 products per forward or more; the step launches one.
    guessed = Configuration(find_model("small"), 256, source="file name")
    (summary,) = summarize(Trace.load(step_trace), "train_small256", configuration=guessed)
    assert summary.configuration is not None
    assert (summary.configuration.model, summary.configuration.context_length) == (None, 256)
    assert any("49 products" in warning for warning in summary.warnings)


def test_a_broken_law_is_an_error_not_a_warning(step_trace: Path) -> None:
    (summary,) = summarize(Trace.load(step_trace), "step")
    coverage = summary.coverage
    assert coverage is not None
    check_conservation(summary)
    for broken in ({"attributed": 6}, {"unattributed_ms": 1.0}, {"in_phases": 4}, {"kernel_ms": 0.5}):
        with pytest.raises(NsysAnalyzerError, match="does not hold"):
            check_conservation(replace(summary, coverage=replace(coverage, **broken)))
