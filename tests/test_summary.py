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
from nsys_analyzer.analysis.statistics import MAX_SAMPLE_VALUES, StepTimes, sample_ms
from nsys_analyzer.analysis.summary.kernel_tables import (
    ClassRow,
    ClassShares,
    KernelRow,
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
from tests.support.cases import make_case_test
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, Export

MS = 1e-6  # ms in one ns

test_summary = make_case_test(
    "summary",
    {
        "kernels": lambda capture: [
            (row.name, row.launches_per_instance, row.ms_per_instance, row.avg_us, row.share)
            for row in capture.summary.phases[0].kernels
        ],
        "shares of classes": lambda capture: {row.kernel_class: row.share for row in capture.summary.phases[0].classes},
        "memory": lambda capture: [
            (row.kind, row.operations_per_instance, row.ms_per_instance) for row in capture.summary.phases[0].memory
        ],
        "ranges": lambda capture: {phase.phase: phase.range for phase in capture.summary.phases},
        "with backward": lambda capture: [phase.phase for phase in capture.summary.phases if phase.holds_backward],
        "precisions": lambda capture: list(capture.summary.precisions.items()),
        "processes": lambda capture: [
            (one.process, one.rank, one.gpu, one.coverage and one.coverage.kernels) for one in capture.summaries
        ],
    },
)


def summaries(export: Export, tmp_path: Path) -> tuple[CaptureSummary, ...]:
    return summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")


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
def test_times_over_steps(pieces: list[tuple[int, int, int]], near: list[bool]) -> None:
    """The mean over the steps near the median, and the deviation over all of 4 steps, of each of 3 kinds."""
    step, kind, ns = (np.array(column) for column in zip(*pieces, strict=True))
    times = StepTimes(3)
    times.add(step, kind, ns, np.array(near))
    in_steps = [[sum(n for s, k, n in pieces if (s, k) == (i, j)) / 1e6 for i in range(4)] for j in range(3)]
    for (mean, std), values in zip(times.mean_and_std_ms(1.0), in_steps, strict=True):
        typical = [value for value, is_near in zip(values, near, strict=True) if is_near]
        assert mean == pytest.approx(statistics.fmean(typical), abs=1e-9)
        assert std == pytest.approx(statistics.stdev(values), abs=1e-6)
    single = StepTimes(1)
    single.add(np.array([0]), np.array([0]), np.array([5]), np.array([True]))
    assert single.mean_and_std_ms(1.0) == [(pytest.approx(5 / 1e6), None)]


def test_values_of_very_many_instances() -> None:
    """The first, the last and evenly spread ones between them."""
    assert sample_ms(np.array([1_000_000, 2_500_000])) == (1.0, 2.5)
    spread = sample_ms(np.arange(1_000) * 1_000_000)
    assert (len(spread), spread[0], spread[-1]) == (MAX_SAMPLE_VALUES, 0.0, 999.0)
