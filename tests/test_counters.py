"""Tests the figures of hardware counters, on a real capture of an H200 and on tiny exports."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.counters.figures import (
    MIN_SAMPLES,
    CounterRow,
    Counters,
    OperatorTraffic,
    SampledWork,
    summarize_counters,
)
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.configuration import Run
from nsys_analyzer.inputs.saved_reports import read_saved_report
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.json_report import report_data
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.sections.counters import answer_counters, describe_clock_change, describe_clocks_of_ranks
from nsys_analyzer.report.sections.kernels import describe_bandwidth
from nsys_analyzer.system.machine import Nsys, count_gpus
from nsys_analyzer.text import plain
from nsys_analyzer.trace.gpu_counters import find_counter
from tests.conftest import Main
from tests.support.export import ADD, GEMM, Export, global_pid, shared_copy
from tests.support.folders import as_folder
from tests.support.operators import record_operators

REAL = "gpu_metrics_small256"
SHARES = (
    "sms_active", "sm_issue", "tensor_active", "dram_read", "dram_write", "nvlink_received", "nvlink_sent",
    "pcie_received", "pcie_sent",
)  # fmt: skip
PARAMETER_BYTES = 4 * 128_625_408  # the model has 128,625,408 parameters in fp32
#: A part of the name of each kernel of AdamW, and how many tensors the size of the parameters it reads and writes.
KERNELS_OF_ADAMW = {
    "TernaryOpScalarFunctor": 3,  # exp_avg = lerp(exp_avg, gradient): reads both, writes one
    "PointwiseOpScalarFunctor": 3,  # exp_avg_sq += gradient²: reads both, writes one
    "PointwiseOpScalarListFunctor": 4,  # parameter += exp_avg ÷ denominator: reads three, writes one
    "Sqrt<float>": 2,  # reads one, writes one
}
STEPS = 3
PERIOD, GPU_ID, SOURCE = 100, 1, 256 + 1


def counters_of(path: Path) -> Counters | None:
    (summary,) = summarize(Trace.load(path), "capture")
    return summary.counters


def rows_of(counters: Counters) -> list[CounterRow]:
    groups = (counters.phases, counters.classes, counters.kernels, counters.modules, filter(None, (counters.whole,)))
    return [row for rows in groups for row in rows]


class CountedExport(Export):
    """An export with one GPU of 132 SMs, 1,000 bytes/s of memory bandwidth and samples of its counters."""

    METRICS = (
        "SMs Active [Throughput %]", "SM Issue [Throughput %]", "DRAM Read Bandwidth [Throughput %]",
        "DRAM Write Bandwidth [Throughput %]", "GPC Clock Frequency [MHz]", "Pixel Warps in Flight [Avg]",
    )  # fmt: skip

    def __init__(self, first_id: int = 0, gpu_id: int = GPU_ID) -> None:
        super().__init__()
        self.first_id, self.source = first_id, 256 + gpu_id
        self.add("TARGET_INFO_GPU", id=gpu_id, name="GPU", totalMemory=1 << 30, smCount=132, memoryBandwidth=1_000,
                 clockRate=2_000_000_000)  # fmt: skip
        self.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu_id, cudaId=0, pid=100)
        for number, name in enumerate(self.METRICS, first_id):
            self.add("TARGET_INFO_GPU_METRICS", typeId=self.source, metricId=number, metricName=name)

    def sample(self, time: int, *values: int) -> None:
        for number, value in enumerate(values, self.first_id):
            self.add("GPU_METRICS", timestamp=time, typeId=self.source, metricId=number, value=value)

    def steps(self, count: int = 2, samples: int = 20) -> CountedExport:
        """Adds steps of a matmul and an elementwise kernel of ``samples`` periods each, and an idle period."""
        for step in range(count):
            begin = step * (2 * samples + 1) * PERIOD
            middle, end = begin + samples * PERIOD, begin + 2 * samples * PERIOD
            self.range("step", begin, end + PERIOD)
            self.kernel(GEMM, begin + 1, begin, middle).kernel(ADD, begin + 2, middle, end)
            for index in range(samples):
                self.sample(begin + index * PERIOD, 100, 80, 10, 10, 1_000_000_000, 7)
                self.sample(middle + index * PERIOD, 50, 5, 40, 30, 2_000_000_000, 7)
            self.sample(end, 0, 0, 0, 0, 2_000_000_000, 7)
        return self


def test_dram_bytes_of_kernels(real_capture: Callable[[str], Path]) -> None:
    """The bytes of the memory are those that the kernels of AdamW read and write. The GPU moves 4,814.304 GB/s."""
    attributed = AttributedTrace(Trace.load(real_capture(REAL)))
    operations = attributed.trace.operations
    work = SampledWork(attributed, int(operations.process[0]), GPU_ID, 4_814_304_000_000)
    kernel = np.append(attributed.kernels.code, -1)[: len(operations)]
    parts = tuple(KERNELS_OF_ADAMW)
    names = attributed.kernels.names
    part_of_name = [next((i for i, part in enumerate(parts) if f"::{part}" in name), -1) for name in names]
    code = np.append(part_of_name, -1)[kernel]
    rows = {row.name: row for row in work.measure(code, parts, min_samples=5)}
    for index, (part, tensors) in enumerate(KERNELS_OF_ADAMW.items()):
        seconds = (operations.end - operations.start)[code == index].sum() / 1e9 / STEPS
        rate = rows[part].dram_bytes_per_s
        assert rate
        assert rate * seconds == pytest.approx(tensors * PARAMETER_BYTES, rel=0.1), part


def test_dram_bytes_of_the_optimizer(real_capture: Callable[[str], Path]) -> None:
    """AdamW's kernels read and write 20 tensors of the parameters' size, and its rate rests on 20 samples or more.

    They are: decay of the parameters 2, lerp 3, decay of exp_avg_sq 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
    """
    (summary,) = summarize(Trace.load(real_capture(REAL)), "capture")
    assert summary.counters
    optimizer = next(row for row in summary.counters.phases if row.name == "optimizer")
    phase = summary.phase("optimizer")
    assert phase
    assert optimizer.samples >= MIN_SAMPLES
    assert optimizer.dram_bytes_per_s
    moved_bytes = optimizer.dram_bytes_per_s * (phase.gpu_busy_ms.mean or 0) / 1e3
    assert moved_bytes == pytest.approx(20 * PARAMETER_BYTES, rel=0.1)
    assert optimizer.limited_by == "memory"


def test_figures_of_a_real_capture(real_capture: Callable[[str], Path]) -> None:
    counters = counters_of(real_capture(REAL))
    assert counters
    assert (counters.samples, counters.period_us, counters.sm_count) == (2_842, pytest.approx(100, abs=0.01), 132)
    assert [row.name for row in counters.phases] == ["backward", "forward", "optimizer"]
    assert counters.of_class("matmul")
    assert all(row.samples >= MIN_SAMPLES for row in rows_of(counters))
    for row in rows_of(counters):
        assert all(0 <= getattr(row, name) <= 1 for name in SHARES)
        assert 1_900 < (row.sm_clock_mhz or 0) <= 1_980.2  # the clock of an H200 is at most 1,980 MHz
    assert counters.slow_steps == ()


def test_a_shared_copy_has_the_same_counters(real_capture: Callable[[str], Path], tmp_path: Path) -> None:
    path = real_capture(REAL)
    assert counters_of(shared_copy(path, tmp_path / "copy.sqlite")) == counters_of(path)


def test_a_capture_without_counters_says_nothing(step_trace: Path) -> None:
    captures = summarize(Trace.load(step_trace), "capture")
    report = build_report(Evidence(captures))
    assert "counters" not in report_data(report)["captures"][0]
    assert "counters" not in [section.key for section in report.sections]


def test_counters_that_were_requested_in_vain() -> None:
    capture = CaptureSummary(
        "capture", None, "capture", "ok", run=Run(profile_command="nsys profile --trace=cuda a.py")
    )
    assert not [*answer_counters(capture, {})]
    requested = Run(profile_command="nsys profile --gpu-metrics-devices=all a.py")
    (answer,) = answer_counters(replace(capture, run=requested), {})
    assert plain(answer.text).startswith("nsys was told to sample the GPU's counters, but the capture has no samples")  # type: ignore[union-attr]


def test_figures_follow_from_the_samples(tmp_path: Path) -> None:
    """Each class runs alone in 40 samples, and the idle samples belong to none."""
    counters = counters_of(CountedExport().steps().write(tmp_path / "a.sqlite"))
    assert counters
    assert counters.samples == 2 * 41
    matmul, elementwise = (counters.of_class(name) for name in ("matmul", "elementwise"))
    assert matmul == CounterRow(
        "matmul", 40, sms_active=1.0, sm_issue=0.8, dram_read=0.1, dram_write=0.1, sm_clock_mhz=1_000.0,
        dram_bytes_per_s=200.0,  # (10 % + 10 %) of 1,000 bytes/s
    )  # fmt: skip
    assert matmul.limited_by == "compute"
    assert elementwise
    assert (elementwise.dram_read, elementwise.dram_write, elementwise.limited_by) == (0.4, 0.3, "memory")
    assert counters.peak_clock_mhz == 2_000


def test_activity_belongs_to_the_time_in_which_something_runs(tmp_path: Path) -> None:
    """A kernel runs in 60 of each 100 ns, and the SMs are active for 30 %: they are active for half of its time."""
    export = CountedExport()
    export.range("step", 0, 2_500)
    for index in range(25):
        export.kernel(GEMM, index * PERIOD, index * PERIOD, index * PERIOD + 60)
        export.sample(index * PERIOD, 30, 30, 0, 0, 2_000_000_000)
    counters = counters_of(export.write(tmp_path / "a.sqlite"))
    assert counters
    (row,) = counters.classes
    assert (row.samples, row.sms_active) == (25, pytest.approx(0.5))


def test_ids_may_differ_between_reports_and_gpus(tmp_path: Path) -> None:
    usual = counters_of(CountedExport().steps().write(tmp_path / "a.sqlite"))
    other = counters_of(CountedExport(first_id=70, gpu_id=3).steps().write(tmp_path / "b.sqlite"))
    assert usual
    assert other
    assert (other.gpu_id, other.classes) == (3, usual.classes)


def test_another_gpu_has_no_figures(tmp_path: Path) -> None:
    """Only GPU 2 was sampled, and the process runs on GPU 1."""
    export = CountedExport().steps()
    for table, key in (("GPU_METRICS", "typeId"), ("TARGET_INFO_GPU_METRICS", "typeId")):
        for row in export._rows[table]:
            row[key] = 256 + 2
    assert counters_of(export.write(tmp_path / "a.sqlite")) is None


def test_missing_samples_are_no_zeros(tmp_path: Path) -> None:
    """One class loses every second sample, so 20 of 40 remain; the other class loses 21, so it has no figures."""
    export = CountedExport().steps()
    times = sorted({row["timestamp"] for row in export._rows["GPU_METRICS"]})
    of_matmul = [time for time in times if time % 4_100 < 2_000][::2]
    of_elementwise = [time for time in times if 2_000 <= time % 4_100 < 4_000][:21]
    lost = {*of_matmul, *of_elementwise}
    export._rows["GPU_METRICS"] = [row for row in export._rows["GPU_METRICS"] if row["timestamp"] not in lost]
    counters = counters_of(export.write(tmp_path / "a.sqlite"))
    assert counters
    (row,) = counters.classes
    assert (row.name, row.samples, row.sms_active, row.dram_read) == ("matmul", 20, 1.0, pytest.approx(0.1))


def test_samples_outside_of_the_session_are_used_by_nothing(tmp_path: Path) -> None:
    export = CountedExport().steps()
    for time in (-300, -200, -100, 8_200, 8_300):
        export.sample(time, 100, 100, 100, 100, 1)
    assert (counters := counters_of(export.write(tmp_path / "a.sqlite")))
    assert counters.classes == counters_of(CountedExport().steps().write(tmp_path / "b.sqlite")).classes  # type: ignore[union-attr]


def test_impossible_values_are_missing(tmp_path: Path) -> None:
    export = CountedExport().steps()
    for row in export._rows["GPU_METRICS"]:
        if row["metricId"] == 0:
            row["value"] = -8_361_757  # a value that nsys has written for another metric of a real capture
    counters = counters_of(export.write(tmp_path / "a.sqlite"))
    assert counters
    assert {row.sms_active for row in counters.classes} == {None}
    assert counters.of_class("matmul").sm_issue == 0.8  # type: ignore[union-attr]


def test_a_low_clock_explains_a_slow_step(tmp_path: Path) -> None:
    """Of five steps, the third takes 30 periods instead of 20, and its clock is 1.2 GHz instead of 1.9 GHz."""
    export, begin = CountedExport(), 0
    for step in range(5):
        samples, clock_hz = (30, 1_200_000_000) if step == 2 else (20, 1_900_000_000)
        end = begin + samples * PERIOD
        export.range("step", begin, end).kernel(GEMM, begin + 1, begin, end)
        for time in range(begin, end, PERIOD):
            export.sample(time, 100, 80, 1, 1, clock_hz)
        begin = end
    path = export.write(tmp_path / "a.sqlite")
    (summary,) = summarize(Trace.load(path), "capture")
    assert summary.counters
    (slow,) = summary.counters.slow_steps
    assert (slow.number, slow.ms, slow.sm_clock_mhz, slow.samples) == (3, 0.003, 1_200.0, 30)
    answer = answer_of(path)
    assert "Step 3 takes 0.003 ms" in answer
    # 4 · 20 samples of 1,900 MHz and 30 of 1,200 MHz are a mean of 1,709 MHz, 85 % of 2,000 MHz.
    assert "the clock of its SMs is 1,709 MHz, which is 85 % of its highest clock (110 samples)" in answer


def test_a_collective_occupies_sms(tmp_path: Path) -> None:
    """A quarter of 132 SMs are active while only the collective runs."""
    export = CountedExport()
    export.range("step", 0, 2_000).kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1, 0, 2_000)
    for time in range(0, 2_000, PERIOD):
        export.sample(time, 25, 3, 1, 1, 2_000_000_000)
    path = export.write(tmp_path / "a.sqlite")
    assert "A collective occupies 33 of 132 SMs" in answer_of(path)


def answer_of(path: Path) -> str:
    report = build_report(Evidence(summarize(Trace.load(path), "capture")))
    section = next(section for section in report.sections if section.key == "counters")
    return plain(section.blocks[0].text).replace("\N{NO-BREAK SPACE}", " ")  # type: ignore[union-attr]


def test_answer_of_a_real_capture(real_capture: Callable[[str], Path]) -> None:
    assert answer_of(real_capture(REAL)) == (
        "By the GPU's counters, optimizer is memory-bound and matmul is compute-bound. The tensor cores are active for "
        "at most 1 % of the matmuls' time (252 samples)."
    )


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("tensor_active_share class=matmul", "0.00832444 fraction, mean of 252 samples in which only matmul runs"),
        ("dram_share phase=optimizer", "0.754735 fraction, mean of 87 samples in which only optimizer runs"),
        ("limited_by", "compute, mean of 721 samples in which the GPU works (721 rows of GPU_METRICS"),
    ],
)
def test_questions(question: str, answer: str, real_capture: Callable[[str], Path], run_main: Main) -> None:
    assert answer in run_main("ask", real_capture(REAL), question).out


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("sms_active_share class=softmax", "this work runs alone in fewer than 20 samples"),
        ("dram_share class=matmul phase=forward", "The counters are known by class and by phase, but not by both"),
    ],
)
def test_questions_without_an_answer(
    question: str, reason: str, real_capture: Callable[[str], Path], run_main: Main
) -> None:
    assert reason in "".join(run_main("ask", real_capture(REAL), question)[1:])


def test_a_capture_without_counters_names_the_command(step_trace: Path, run_main: Main) -> None:
    answer = "".join(run_main("ask", step_trace, "dram_share")[1:])
    assert "The hardware counters of the GPU were not recorded. It needs: nsys-analyze run --counters" in answer


def test_info_lists_what_else_was_recorded(
    step_trace: Path, real_capture: Callable[[str], Path], run_main: Main
) -> None:
    printed = run_main("info", real_capture(REAL)).out
    assert "hardware counters of GPU 1: 2,842 samples of sm clock, sms active, sm issue, tensor active" in printed
    assert "Recorded besides" not in run_main("info", step_trace).out


def test_json_is_read_back(real_capture: Callable[[str], Path], tmp_path: Path, run_main: Main) -> None:
    report = tmp_path / "report.json"
    assert run_main("report", real_capture(REAL), "--format", "json", "-o", report).code == 0
    (summary,) = read_saved_report(report)
    assert summary.counters == counters_of(real_capture(REAL))


@pytest.mark.gpu
@pytest.mark.nsys
@pytest.mark.slow
def test_counters_of_this_gpu(nsys: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Main) -> None:
    """Matmuls in bf16 keep the tensor cores of this GPU busy, and additions of 4 GiB keep its memory busy."""
    if not count_gpus():
        pytest.skip("no GPU on this machine")
    monkeypatch.setenv("NSYS", str(nsys.path))
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16); b = torch.empty(1 << 30, device='cuda')\n"
        "for step in range(8):\n"
        "    if step == 3: torch.cuda.profiler.start()\n"
        "    with torch.cuda.nvtx.range('step'):\n"
        "        for _ in range(5): a @ a\n"
        "        for _ in range(5): b.add_(1)\n"
        "        torch.cuda.synchronize()\n"
        "torch.cuda.profiler.stop()\n"
    )
    runs = tmp_path / "runs"
    result = run_main("run", "--counters", "--profiler", "nsys", "--output-dir", runs, "--", sys.executable, program)
    if "nsys may not sample" in result.out + result.err:
        pytest.skip("this user may not sample the counters of the GPU")
    assert result.code == 0, result.err
    (path,) = runs.rglob("capture*.sqlite")
    counters = counters_of(path)
    assert counters
    matmul, addition = counters.of_class("matmul"), counters.of_class("elementwise")
    assert matmul
    assert addition
    assert (matmul.limited_by, addition.limited_by) == ("compute", "memory")
    assert (matmul.tensor_active or 0) > 0.5


@pytest.mark.parametrize(
    ("name", "counter"),
    [
        ("SM Active [Throughput %]", "sms_active"),
        ("Tensor Active / FP16 Active [Throughput %]", "tensor_active"),
        ("NVLink RX Responses User Data [Throughput %]", "nvlink_received"),
        ("NVLink TX Bandwidth [Throughput %]", "nvlink_sent"),
        ("PCIe Read Throughput [Throughput %]", "pcie_received"),
        ("GPC Clock Frequency [MHz]", "sm_clock"),
        ("SYS Clock Frequency [MHz]", None),
        ("Compute Warps in Flight [Avg]", None),
        ("DRAM Read Bandwidth [GB/s]", None),
    ],
)
def test_names_of_metrics(name: str, counter: str | None) -> None:
    assert find_counter(name) == counter


KERNELS = st.tuples(st.integers(0, 4_000), st.integers(1, 300), st.sampled_from([GEMM, ADD]))
SAMPLES = st.tuples(st.integers(-300, 5_000), st.integers(-20, 120))


@given(st.lists(KERNELS, min_size=1, max_size=20), st.lists(SAMPLES, max_size=80))
def test_shares_are_between_0_and_1(
    tmp_path_factory: pytest.TempPathFactory, kernels: list[tuple[int, int, str]], samples: list[tuple[int, int]]
) -> None:
    export = CountedExport()
    for start, duration, name in kernels:
        export.kernel(name, start, start + 1, start + 1 + duration)
    for time, value in samples:
        export.sample(time, *(value,) * len(export.METRICS))
    trace = Trace.load(export.write(tmp_path_factory.mktemp("counters") / "a.sqlite"))
    attributed = AttributedTrace(trace)
    if GPU_ID not in trace.counters:
        return
    work = SampledWork(attributed, global_pid(), GPU_ID, 1_000)
    rows = work.measure(*work.group_by_class(), min_samples=1)
    assert sum(row.samples for row in rows) <= len(work.samples.start)
    for row in rows:
        shares = [share for name in SHARES if (share := getattr(row, name)) is not None]
        assert all(0 <= share <= 1 for share in shares)
        assert row.dram_bytes_per_s is None or 0 <= row.dram_bytes_per_s <= 2_000


def test_a_process_without_counters_is_not_summarized(step_trace: Path) -> None:
    attributed = AttributedTrace(Trace.load(step_trace))
    assert summarize_counters(attributed, global_pid(), None, None, None) is None


def test_columns_of_kernels(real_capture: Callable[[str], Path], step_trace: Path, run_main: Main) -> None:
    rows = json.loads(run_main("kernels", real_capture(REAL), "--format", "json").out)
    sampled = [row for row in rows if row["samples"]]
    assert [row["samples"] for row in sampled] == [45, 23]
    assert all(row["sms_active"] > 0.9 for row in sampled)
    assert "samples" not in json.loads(run_main("kernels", step_trace, "--format", "json").out)[0]


def levels_of(path: Path) -> dict[str, tuple[str, list[int], list[int]]]:
    (summary,) = summarize(Trace.load(path), "capture", tracked=1_000)
    assert summary.tracks
    return {level.title: (level.unit, level.time.tolist(), level.value.tolist()) for level in summary.tracks.levels}


def test_lanes_of_the_timeline(tmp_path: Path) -> None:
    """One step from 0 to 400: of the samples at 0, 100, 200 and 300, the third is lost."""
    export = CountedExport()
    export.range("step", 0, 400).kernel(GEMM, 1, 10, 390)
    for time, sms in ((-100, 1), (0, 10), (100, 20), (300, 30), (400, 99), (500, 99), (600, 99)):
        export.sample(time, sms, 0, 4, 5, 1_500_000_000)
    levels = levels_of(export.write(tmp_path / "a.sqlite"))
    assert levels["SMs active"] == ("%", [0, 100, 200, 300, 400], [10, 20, -1, 30, -1])
    assert levels["DRAM bandwidth"] == ("%", [0, 100, 200, 300, 400], [9, 9, -1, 9, -1])
    assert levels["SM clock"][2] == [1_500, 1_500, -1, 1_500, -1]
    assert "Tensor cores" not in levels  # they were not sampled
    assert "NVLink" not in levels


def with_network(export: Export) -> Export:
    """Adds a card that sends 250 and then 500 bytes/ms, and metrics that are not read."""
    export.add("TARGET_INFO_NIC_INFO", nicId=4, name="mlx5_0").add("NIC_ID_MAP", nicId=4, globalId=77)
    for index, (name, unit) in enumerate((("IB: Bytes sent", "bytes/ms"), ("IB: Send waits", "ticks/ms"))):
        export.add("TARGET_INFO_NETWORK_METRICS", metricsListId=1, metricsIdx=index, name=name, unit=unit)
        for start, value in ((0, 250), (200, 500)):
            export.add("NET_NIC_METRIC", start=start, end=start + 200, globalId=77, portId=0, metricsListId=1,
                       metricsIdx=index, value=value)  # fmt: skip
    return export


def test_lanes_of_network_cards(tmp_path: Path) -> None:
    """250 bytes/ms are 250,000 bytes/s."""
    export = Export().range("step", 0, 400).kernel(GEMM, 1, 10, 390)
    assert levels_of(with_network(export).write(tmp_path / "a.sqlite")) == {
        "mlx5_0 IB sent": ("B/s", [0, 200, 400], [250_000, 500_000, -1])
    }


def test_no_lanes_without_counters(tmp_path: Path) -> None:
    export = Export().range("step", 0, 400).kernel(GEMM, 1, 10, 390)
    assert levels_of(export.write(tmp_path / "a.sqlite")) == {}


def test_many_samples_are_averaged(tmp_path: Path) -> None:
    """40,000 samples become 20,000 values, each the mean of a sample of 10 % and one of 30 %."""
    export = CountedExport()
    export.range("step", 0, 4_000_000).kernel(GEMM, 1, 10, 3_999_990)
    for index in range(40_000):
        export.sample(index * PERIOD, 30 if index % 2 else 10)
    _, times, values = levels_of(export.write(tmp_path / "a.sqlite"))["SMs active"]
    assert times[:3] == [0, 200, 400]
    assert len(times) == 20_001  # the last one begins at the end of the samples
    assert set(values[:-1]) == {20}


def test_traffic_of_operators(tmp_path: Path, run_main: Main) -> None:
    """The matmul of 400 µs uses 10 % of 1 TB/s, which are 40 MB, although three matrices in bf16 have 100.7 MB."""
    path = record_operators(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE TARGET_INFO_GPU SET memoryBandwidth = 1000000000000")
        (gpu_id,) = database.execute("SELECT id FROM TARGET_INFO_GPU").fetchone()
        database.execute("CREATE TABLE TARGET_INFO_GPU_METRICS (typeId, metricId, metricName TEXT)")
        database.execute("CREATE TABLE GPU_METRICS (timestamp INT, typeId INT, metricId INT, value INT)")
        names = ("DRAM Read Bandwidth [Throughput %]", "DRAM Write Bandwidth [Throughput %]")
        metrics = [(256 + gpu_id, number, name) for number, name in enumerate(names)]
        database.executemany("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, ?, ?)", metrics)
        samples = [(time, 256 + gpu_id, metric, 5) for time in range(0, 4_000_000, 5_000) for metric in (0, 1)]
        database.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", samples)
    (summary,) = summarize(Trace.load(path), "capture")
    assert summary.counters
    traffic = {row.operator: row for row in summary.counters.operators}
    assert traffic["aten::mm"].dram_bytes == pytest.approx(40e6)
    assert traffic["aten::mm"].least_bytes == 3 * 2 * 4_096**2
    assert traffic["aten::mm"].samples == 3 * 400 // 5
    assert "aten::mm" not in answer_of(path)  # its bytes come from the cache, so there is no excess
    printed = run_main("operators", path).out.replace("\N{NO-BREAK SPACE}", " ")
    assert "DRAM bytes" in printed
    assert "38.1 MiB" in printed  # 40,000,000 ÷ 2²⁰


def test_an_operator_with_excess_traffic() -> None:
    """2 GiB are 4 times 512 MiB."""
    traffic = OperatorTraffic("aten::copy_", "4096×4096 bf16", 40, 2.0 * 2**30, 2.0**29)
    counters = Counters(0, 100, 100.0, 132, None, None, (), (), (), (), (traffic,))
    capture = CaptureSummary("capture", None, "capture", "ok", counters=counters)
    answer = plain(next(iter(answer_counters(capture, {}))).text).replace("\N{NO-BREAK SPACE}", " ")  # type: ignore[union-attr]
    assert answer == "A call of aten::copy_ (4096×4096 bf16) moves 2.0 GiB from and to DRAM, 4 times what it needs."


def with_clock(title: str, clock_mhz: float | None) -> CaptureSummary:
    whole = CounterRow("all work", 100, sm_clock_mhz=clock_mhz)
    return CaptureSummary(
        title, None, title, "ok", counters=Counters(0, 100, 100.0, 132, 1_980.0, whole, (), (), (), ())
    )


def test_a_rank_with_a_low_clock() -> None:
    """1,500 MHz are 79 % of 1,900 MHz; 1,850 MHz are 97 %."""
    ranks = [with_clock("rank 0", 1_900.0), with_clock("rank 1", 1_500.0), with_clock("rank 2", 1_900.0)]
    (sentence,) = describe_clocks_of_ranks(ranks)
    assert sentence.startswith(
        "While the GPU works, the clock of the SMs of rank 1 is 1,500 MHz, and that of the other ranks 1,900 MHz "
        "(median). So the kernels of rank 1 take longer."
    )
    assert not [*describe_clocks_of_ranks([with_clock("rank 0", 1_900.0), with_clock("rank 1", 1_850.0)])]
    assert not [*describe_clocks_of_ranks([with_clock("rank 0", 1_900.0), with_clock("rank 1", None)])]


def test_a_run_with_a_low_clock() -> None:
    before, after = with_clock("a", 1_900.0), with_clock("b", 1_500.0)
    (sentence,) = describe_clock_change([before], [after])
    assert sentence.startswith("While the GPU works, the clock of its SMs is 1,900 → 1,500 MHz. A lower clock makes")
    assert not [*describe_clock_change([before], [before])]
    assert not [*describe_clock_change([before], [with_clock("b", None)])]


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (0.5, "By the GPU's counters, softmax uses 80 % of the memory's peak bandwidth, and is memory-bound."),
        (0.1, "By the GPU's counters, softmax uses 40 % of the memory's peak bandwidth, and is not memory-bound."),
    ],
)
def test_softmax_is_judged_by_counters(read: float, sentence: str) -> None:
    row = CounterRow("softmax", 100, sm_issue=0.2, dram_read=read, dram_write=0.3)
    attention = AttentionSummary(1.0, 1.0, None, 1, 1, 0, "ranges", 1.0, None, None, None)
    assert describe_bandwidth(attention, row).strip().replace("\N{NO-BREAK SPACE}", " ") == sentence
    assert describe_bandwidth(attention, None) == ""


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_counters_of_a_folder(ending: str, tmp_path: Path) -> None:
    export = CountedExport().steps().write(tmp_path / "a.sqlite")
    assert counters_of(as_folder(export, tmp_path / "folder", ending)) == counters_of(export)
