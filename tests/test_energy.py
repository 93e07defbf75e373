"""Tests the energy of steps against GPUs whose power is known, and what the report says about it."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.comparison.compare import compare
from nsys_analyzer.analysis.comparison.estimates import Budgets, check_budgets
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.energy import add_energy
from nsys_analyzer.analysis.summary.summary import CaptureSummary, StepEnergy, Summary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.capture import energy
from nsys_analyzer.capture import plan as run_plan
from nsys_analyzer.capture.energy import EnergyReader, Reading, Steps, check_energy, measure_steps
from nsys_analyzer.capture.hooks.energy_steps import VARIABLE, EnergySteps
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.configuration import NO_PRICES, GpuEnergy, Prices, Run, manifest_values
from nsys_analyzer.inputs.manifest import make_run
from nsys_analyzer.report.facts import say
from nsys_analyzer.report.model import Report, Section
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.report.sections.comparison import answer_comparison
from nsys_analyzer.report.sections.energy import (
    answer_energy,
    describe_energy_of_ranks,
    list_phase_joules,
    tabulate_gpus,
)
from nsys_analyzer.report.sections.findings import findings_section
from nsys_analyzer.text import plain
from tests.conftest import Main
from tests.support import sides
from tests.support.annotated import ASKED
from tests.support.annotated import run as run_program
from tests.support.nvml import FakeGpu, FakeNvml
from tests.support.sweeping import Desk, make_recording_nsys
from tests.test_step_times import LOOP
from tests.test_step_times import FakeGpu as FakeTorchGpu

UUID, OTHER_UUID = "GPU-AAAA-1", "GPU-BBBB-2"
S = 1_000_000_000


def read(gpu: FakeGpu, seconds: float, **figures: Any) -> list[Reading]:
    """The readings of a GPU at 20 Hz, whose interval varies as that of the reader."""
    times_s, random = [0.0], Random(0)
    while times_s[-1] < seconds:
        times_s.append(times_s[-1] + 0.05 * random.uniform(0.8, 1.2))
    return [
        Reading(round(now_s * S), gpu.counter_mj(now_s), gpu.clock_mhz, gpu.limit_bits, **figures) for now_s in times_s
    ]


def steps(start_s: float, end_s: float, count: int = 10, phases: list[tuple[str, int, int]] | None = None) -> Steps:
    return Steps(round(start_s * S), round(end_s * S), count, [UUID], phases or [])


def busy_between(
    start_s: float, end_s: float, watts: float = 700.0, idle_watts: float = 70.0
) -> Callable[[float], float]:
    """The energy of a GPU that is busy in this time."""
    return lambda now_s: idle_watts * now_s + (watts - idle_watts) * min(max(now_s - start_s, 0.0), end_s - start_s)


@pytest.mark.parametrize("update_s", [0.02, 0.05, 0.1])
def test_joules_are_the_integral_of_the_power(update_s: float) -> None:
    """5.013 s of 700 W between 3.007 s and 8.02 s are 3,509.1 J. Updates every 100 ms leave an error of 2 %."""
    gpu = FakeGpu(UUID, busy_between(3.007, 8.02), update_s)
    figures = measure_steps(read(gpu, 10), steps(3.007, 8.02))
    assert figures
    assert figures["joules"] == pytest.approx(700 * 5.013, rel=0.03)
    assert abs(figures["joules"] - 700 * 5.013) <= figures["error_joules"]
    assert figures["error_joules"] <= figures["joules"] * (update_s + 0.06) / 5.013  # a reading may miss an update


def test_idle_power_is_that_before_the_program_used_the_gpu() -> None:
    """The GPU idles at 70 W for 3 s. Its utilization, read each second, is 0 at 0, 1 and 2 s."""
    gpu = FakeGpu(UUID, busy_between(3, 8))
    readings = [
        reading._replace(utilization_percent=(0 if n < 60 else 98) if n % 20 == 0 else None)
        for n, reading in enumerate(read(gpu, 10))
    ]
    figures = measure_steps(readings, steps(3, 8))
    assert figures
    assert figures["idle_watts"] == pytest.approx(70, rel=0.05)
    always_busy = [reading._replace(utilization_percent=98) for reading in readings]
    busy_figures = measure_steps(always_busy, steps(3, 8))
    assert busy_figures
    assert busy_figures["idle_watts"] is None


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param([], id="none"),
        pytest.param(read(FakeGpu(UUID, busy_between(3, 8)), 7.9), id="ended_before_the_steps"),
        pytest.param(read(FakeGpu(UUID, lambda s: 70 * s if s < 5 else 70 * (s - 5)), 10), id="counter_was_reset"),
        pytest.param(read(FakeGpu(UUID, busy_between(3, 8)), 10, processes=2), id="another_program"),
    ],
)
def test_nothing_is_said_without_reliable_readings(readings: list[Reading]) -> None:
    assert measure_steps(readings, steps(3, 8)) is None


def test_clocks_that_power_or_heat_limits_are_counted() -> None:
    gpu = FakeGpu(UUID, busy_between(3, 8), limit_bits=0x4, clock_mhz=1500)
    figures = measure_steps(read(gpu, 10), steps(3, 8))
    assert figures
    assert (figures["limits"], figures["clock_mhz"]) == ({"power": 1.0}, 1500)
    calm = measure_steps(read(FakeGpu(UUID, busy_between(3, 8)), 10), steps(3, 8))
    assert calm
    assert calm["limits"] == {}


def phase_readings(forward_s: float, backward_s: float, update_s: float = 0.1) -> tuple[list[Reading], Steps]:
    """Five seconds of steps with forward at 400 W and backward at 700 W."""
    length_s = forward_s + backward_s

    def joules_at(now_s: float) -> float:
        whole, part_s = divmod(now_s, length_s)
        in_forward_s = min(part_s, forward_s)
        return whole * (400 * forward_s + 700 * backward_s) + 400 * in_forward_s + 700 * (part_s - in_forward_s)

    count = math.ceil(10 / length_s)
    spans = [
        span
        for n in range(count)
        for span in (
            ("forward", round(n * length_s * S), round((n * length_s + forward_s) * S)),
            ("backward", round((n * length_s + forward_s) * S), round((n + 1) * length_s * S)),
        )
    ]
    readings = read(FakeGpu(UUID, joules_at, update_s), count * length_s + 0.1)
    return readings, steps(0, count * length_s, count, spans)


def test_long_phases_have_their_own_power() -> None:
    figures = measure_steps(*phase_readings(0.53, 0.81))
    assert figures
    watts = {name: phase.watts for name, phase in figures["phases"].items()}
    assert watts == {"forward": pytest.approx(400, rel=0.1), "backward": pytest.approx(700, rel=0.1)}


def test_short_phases_are_not_told_apart() -> None:
    """Phases of 17 and 33 ms lie between two updates of the counter."""
    figures = measure_steps(*phase_readings(0.017, 0.033))
    assert figures
    assert figures["phases"] == {}


@given(st.floats(0.3, 1.5), st.floats(0.3, 1.5), st.sampled_from([0.02, 0.05, 0.1]))
def test_the_parts_of_a_step_add_up(forward_s: float, backward_s: float, update_s: float) -> None:
    """The energy of the phases and of the rest is that of a step. The power of a phase is known within four errors."""
    figures = measure_steps(*phase_readings(forward_s, backward_s, update_s))
    assert figures
    gpu = GpuEnergy(gpu="NVIDIA H200", index=0, **figures)
    rows = list_phase_joules(gpu)
    if rows:
        assert sum(row[3] for row in rows) == pytest.approx(gpu.joules / gpu.steps)
    for name, watts in (("forward", 400), ("backward", 700)):
        if phase := gpu.phases.get(name):
            assert abs(phase.watts - watts) <= 4 * phase.error_watts


def test_a_thread_reads_the_gpus_while_a_program_runs() -> None:
    """Two GPUs of 500 and 300 W, of which each of two ranks uses one, for 0.5 s of real time."""
    nvml = FakeNvml(FakeGpu(UUID, lambda s: 500 * s), FakeGpu(OTHER_UUID, lambda s: 300 * s, limit_bits=0x40))
    with EnergyReader(nvml) as reader:
        time.sleep(0.15)
        start_ns = time.monotonic_ns()
        time.sleep(0.5)
        end_ns = time.monotonic_ns()
        time.sleep(0.15)
    # PyTorch writes UUIDs without the prefix, and in lower case.
    of_rank = [Steps(start_ns, end_ns, 5, [name], []) for name in ("bbbb-2", "aaaa-1")]
    (first,), (second,) = reader.measure(of_rank, has_ranks=True)
    assert (first.index, first.rank, second.index, second.rank) == (1, 0, 0, 1)
    assert first.joules == pytest.approx(300 * (end_ns - start_ns) / S, abs=first.error_joules)
    assert second.joules == pytest.approx(500 * (end_ns - start_ns) / S, abs=second.error_joules)
    assert (first.limits, second.limits) == ({"heat": 1.0}, {})
    # If both ranks use one GPU, its counter does not tell them apart. A rank without steps has no energy.
    assert reader.measure([of_rank[0], of_rank[0]], has_ranks=True) == [[], []]
    assert reader.measure([None], has_ranks=False) == [[]]
    # A process that uses both GPUs has a row for each, and none if one of its GPUs is not known.
    both = Steps(start_ns, end_ns, 5, ["aaaa-1", "bbbb-2"], [])
    assert [row.index for row in reader.measure([both], has_ranks=False)[0]] == [0, 1]
    assert reader.measure([both._replace(gpus=["aaaa-1", "cccc-3"])], has_ranks=False) == [[]]
    # An old PyTorch names no GPU, and here are two.
    assert reader.measure([Steps(start_ns, end_ns, 5, [""], [])], has_ranks=False) == [[]]


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (FakeGpu(UUID, lambda s: s, denied=["nvmlDeviceGetTotalEnergyConsumption"]), "Insufficient Permissions"),
        (FakeGpu(UUID, lambda s: s, is_mig=True), "MIG shares it"),
    ],
)
def test_a_gpu_without_a_counter_of_its_own(gpu: FakeGpu, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(gpu)
    with EnergyReader(nvml) as reader:
        time.sleep(0.01)
    assert reader.measure([Steps(1, 2, 1, ["aaaa-1"], [])], has_ranks=False) == [[]]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert (check_energy().status, why in check_energy().description) == ("missing", True)


def test_doctor_says_how_to_get_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.open_nvml() is None
    check = check_energy()
    assert (check.status, check.remedy) == ("missing", "Install it: pip install 'nsys-analyze[run]'")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(UUID, lambda s: s)))
    assert (check_energy().status, check_energy().description) == ("ok", "NVML counts the energy of 1 GPU")


def test_questions_that_are_not_permitted_leave_the_energy() -> None:
    denied = ["nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetUtilizationRates"]
    with EnergyReader(FakeNvml(FakeGpu(UUID, lambda s: 500 * s, denied=denied))) as reader:
        time.sleep(0.1)
        start_ns = time.monotonic_ns()
        time.sleep(0.2)
        end_ns = time.monotonic_ns()
        time.sleep(0.1)
    ((row,),) = reader.measure([Steps(start_ns, end_ns, 5, [""], [])], has_ranks=False)
    assert (row.clock_mhz, row.limits, row.idle_watts) == (None, {}, None)
    assert row.joules == pytest.approx(500 * (end_ns - start_ns) / S, abs=row.error_joules)


# --- the steps


@pytest.fixture
def torch() -> Any:
    gpu = FakeTorchGpu()
    gpu.cuda.device_count = lambda: 2
    gpu.cuda.memory_allocated = lambda number: number
    gpu.cuda.get_device_properties = lambda number: type("Properties", (), {"uuid": f"uuid-{number}"})
    gpu.distributed = type("Distributed", (), {"is_available": lambda: False})  # type: ignore[attr-defined]
    return gpu


def test_steps_last_for_the_wanted_time(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 400 ms run until 3 × 1 s have passed, because 20 steps take longer: 8. The last phase is noted, too."""
    now_s = 0.0
    monkeypatch.setattr("nsys_analyzer.capture.hooks.energy_steps.time.monotonic_ns", lambda: round(now_s * S))
    monkeypatch.setenv(VARIABLE, f"1.0:100:{tmp_path / 'energy.json'}")
    observed = EnergySteps(torch)
    assert observed.mark_phase_start() is None
    assert not observed.note_step_end()  # the measured steps
    observed.note_range_closed()
    ended = []
    while observed.is_measuring:
        start = observed.mark_phase_start()
        torch.now_ms += 300
        observed.note_phase("forward", start)
        now_s += 0.4
        torch.now_ms += 100
        ended.append(observed.note_step_end())
    assert ended == [False] * 7 + [True]
    values = json.loads((tmp_path / "energy.json").read_text())
    assert (values["steps"], values["end_ns"] - values["start_ns"]) == (8, round(3.2 * S))
    assert values["gpus"] == ["uuid-1"]  # the program has no memory on GPU 0
    assert values["phases"][-1] == ["forward", round(2.8 * S), round(3.1 * S)]
    # Steps of 40 ms end after 1 s.
    observed = EnergySteps(torch)
    observed.note_range_closed()
    for count in range(1, 26):
        now_s += 0.04
        assert observed.note_step_end() == (count == 25)


def test_ranks_run_equally_many_steps(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(VARIABLE, f"0:2:{tmp_path}/energy_rank%q{{RANK}}.json")
    observed = EnergySteps(torch)
    observed.note_range_closed()
    assert [observed.note_step_end(), observed.note_step_end()] == [False, True]
    assert (tmp_path / "energy_rank1.json").is_file()
    # A rank that ends by the time would let other ranks wait.
    monkeypatch.setenv(VARIABLE, f"5:100:{tmp_path}/other_rank%q{{RANK}}.json")
    observed = EnergySteps(torch)
    observed.note_range_closed()
    assert not observed.is_measuring


# --- the figures

ROW = GpuEnergy(
    gpu="NVIDIA H200", index=0, steps=100, seconds=5.0, joules=3500.0, error_joules=70.0, idle_watts=70.0,
    clock_mhz=1500, max_clock_mhz=1980, limits={"power": 0.6},
)  # fmt: skip
CAPTURE = CaptureSummary(
    "train", None, "train.sqlite", "ok", run=Run(energy=(ROW,)),
    configuration=Configuration(context_length=256, batch_size=4, source="manifest"),
    unprofiled=Unprofiled("ok", phases={"step": Stats(10, 50.0)}),
)  # fmt: skip


def test_figures_of_a_step_and_of_a_token() -> None:
    """3,500 J ÷ 100 steps = 35 J, ÷ 5 s = 700 W, and 35 J ÷ 1,024 tokens = 34.2 mJ."""
    capture = add_energy(CAPTURE, NO_PRICES)
    assert capture.energy
    assert capture.cost is None
    assert (capture.energy.joules, capture.energy.error_joules, capture.energy.watts) == (35.0, 0.7, 700.0)
    text = " ".join(plain(block.text) for block in answer_energy(capture) if hasattr(block, "text"))
    assert "a step takes 35 J (± 0.7 J) on the GPU, which is 700 W; idle" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "A token takes 34.2 mJ" in text.replace("\N{NO-BREAK SPACE}", " ")
    warning = Fact("clock_limited", gpu="NVIDIA H200", cause="power", share=0.6, clock_mhz=1500, max_mhz=1980)
    assert capture.warnings == (warning,)
    assert "it ran at 1,500 MHz, where 1,980 MHz are possible" in plain(say(warning))


def test_steps_of_another_length_are_named() -> None:
    """5 s ÷ 100 steps = 50 ms, as timed; 5 s ÷ 80 steps = 62.5 ms."""
    for steps_read, is_named in ((100, False), (80, True)):
        capture = add_energy(replace(CAPTURE, run=Run(energy=(replace(ROW, steps=steps_read),))), NO_PRICES)
        section = plain_report(Section("energy", "", tuple(answer_energy(capture))))
        assert ("took 62.5 ms in the mean, and the timed steps 50 ms: they may do other work" in section) == is_named


def test_the_cost_of_a_million_tokens() -> None:
    """A million tokens are 976.6 steps of 35 J and 50 ms.

    These take 976.6 × 35 ÷ 3.6e6 = 0.009494 kWh, at 0.30 per kWh 0.002848, and 48.83 s, at 3 an hour 0.04069.
    """
    cost = add_energy(CAPTURE, Prices(0.30, 3.0)).cost
    assert cost
    assert cost.electricity == pytest.approx(0.002848, rel=1e-3)
    assert cost.gpu_time == pytest.approx(0.04069, rel=1e-3)
    assert cost.total == pytest.approx(0.002848 + 0.04069, rel=1e-3)
    without_energy = add_energy(replace(CAPTURE, run=Run()), Prices(0.30, 3.0))
    assert without_energy.energy is None
    assert without_energy.cost
    assert (without_energy.cost.electricity, without_energy.cost.gpu_time) == (None, cost.gpu_time)


def test_nothing_is_said_without_energy_and_prices() -> None:
    capture = add_energy(replace(CAPTURE, run=Run()), NO_PRICES)
    assert (capture.energy, capture.cost, capture.warnings, [*answer_energy(capture)]) == (None, None, (), [])


def test_each_rank_has_the_energy_of_its_own_gpus() -> None:
    """In one capture of two ranks, rank 1 has a GPU of 20 J a step."""
    rows = (replace(ROW, rank=0), replace(ROW, rank=1, joules=2000.0, limits={}))
    second = add_energy(replace(CAPTURE, rank=1, run=Run(energy=rows)), NO_PRICES)
    assert second.energy
    assert (second.energy.joules, second.warnings) == (20.0, ())
    assert add_energy(replace(CAPTURE, run=Run(energy=rows)), NO_PRICES).energy is None  # the rank is not known


def test_the_manifest_keeps_the_energy(tmp_path: Path) -> None:
    run = Run(energy=(ROW,))
    assert make_run(json.loads(json.dumps(manifest_values(run))), tmp_path).energy == (ROW,)


# --- comparisons and findings

OTHER_ROW = replace(ROW, joules=3000.0)


def energetic(row: GpuEnergy) -> Summary:
    """A run whose step takes the energy of this GPU."""
    energy_of_step = StepEnergy(row.joules / row.steps, row.error_joules / row.steps, 700.0, 70.0, 100, None, (row,))
    return sides.run([sides.kernel("gemm", 10)], energy=energy_of_step)


def test_compare_knows_joules() -> None:
    """35 → 30 J. Each side has a standard error of 0.35 J and a spread of 2 % between runs: √(2 × 0.35² + 0.7² + 0.6²)
    = 1.05 J. With Student's t of 1.96, the half width is 2.05 J, so that −5 J are more than chance.
    """
    before, after = sides.side(energetic(ROW)), sides.side(energetic(OTHER_ROW))
    change = compare(before, after).joules
    assert change
    assert (change.before_ms, change.after_ms, change.is_change) == (35.0, 30.0, True)
    assert change.low_ms == pytest.approx(-5 - 2.05, abs=0.02)
    section = plain_report(answer_comparison(Comparisons((compare(before, after),), (), ()), 0.03))
    assert "a step takes 35.00 J → 30.00 J, −14.3 % (95 % interval" in section
    assert compare(before, sides.side(sides.run([sides.kernel("gemm", 10)]))).joules is None


def test_a_budget_of_joules() -> None:
    """35 J are above 34 J by less than chance: √(0.35² + 0.7²) × 1.96 = 1.5 J."""
    verdicts = {
        limit: [budget.verdict for budget in check_budgets(Budgets(step_joules=limit), sides.side(energetic(ROW)))]
        for limit in (30, 34, 36)
    }
    assert verdicts == {30: ["exceeded"], 34: ["above, perhaps by chance"], 36: ["kept"]}
    (unknown,) = check_budgets(Budgets(step_joules=30), sides.side(sides.run([sides.kernel("gemm", 10)])))
    assert (unknown.unit, unknown.verdict) == ("J", "not known")


def test_a_baseline_keeps_joules() -> None:
    encoded = msgspec.json.encode(energetic(ROW).energy)
    assert msgspec.json.decode(encoded, type=StepEnergy).joules == 35.0


def test_findings_say_what_they_save_in_joules() -> None:
    """The GPU works for 80 % of a step: 700 W = 0.8 × 857.5 W + 0.2 × 70 W.

    A saving of 5 to 10 ms takes between 5 ms × 70 W = 0.35 J and 10 ms × 857.5 W = 8.575 J.
    """
    finding = Finding(
        id="host_sync", title="Waits", saves_ms_low=5.0, saves_ms_high=10.0, step_ms=50.0, left_after_all_ms=40.0,
        evidence=(), derivation="", remedy=(), disproof="",
    )  # fmt: skip
    diagnosis = Diagnosis(50.0, 50.0, 52.0, 40.0, 0.0, True, None, (finding,))
    step = sides.run([sides.kernel("gemm", 8)], {"host": 2}).step
    assert step
    diagnosed = replace(CAPTURE, step=replace(step, busy_share=0.8), diagnosis=diagnosis, findings=(finding,))
    capture = add_energy(diagnosed, NO_PRICES)
    assert capture.findings
    assert capture.findings[0].saves_joules == (pytest.approx(0.35), pytest.approx(8.575))
    assert "What a fix saves in energy. 0.3–8.6 J per step." in plain_report(findings_section(capture))
    without_idle_power = replace(diagnosed, run=Run(energy=(replace(ROW, idle_watts=None),)))
    unchanged = add_energy(without_idle_power, NO_PRICES)
    assert unchanged.findings == (finding,)


def plain_report(section: Section) -> str:
    """The text of a section."""
    text = markdown.render(Report("", (section,)), {})
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("*", "").replace("\n", " ")


# --- the command

#: Says when its steps ran, as the hooks do, while the fake GPU takes 500 W.
WRITE_STEPS = """
if timed:
    import time
    seconds, count, path = os.environ["NSYS_ANALYZE_ENERGY_STEPS"].split(":", 2)
    time.sleep(0.2)
    start_ns = time.monotonic_ns()
    time.sleep(0.5)
    steps = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "steps": 10, "gpus": ["aaaa-1"], "phases": []}
    pathlib.Path(path).write_text(json.dumps(steps))
    time.sleep(0.2)
else:
    assert "NSYS_ANALYZE_ENERGY_STEPS" not in os.environ
"""


def test_run_records_the_energy_of_unprofiled_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Main
) -> None:
    """10 steps of 50 ms at 500 W take 25 J each, within the error of 20 % that half a second of readings leaves."""
    desk = Desk.make(tmp_path / "desk")
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("NSYS", str(make_recording_nsys(tmp_path)))
    monkeypatch.setattr(run_plan, "count_gpus", lambda: 0)
    monkeypatch.setattr(run_plan, "torch_version", lambda: "2.13.0")
    monkeypatch.setenv("BEHAVIOUR", json.dumps({"small": WRITE_STEPS}))
    nvml = FakeNvml(FakeGpu(UUID, lambda s: 500 * s, limit_bits=0x4, clock_mhz=1500))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    options = ("--model", "small", "--profiler", "nsys", "--mode", "forward", "--context-length", "16")
    outcome = run_main("run", *options, "--price-per-kwh", "0.3")
    assert outcome.code == 0, outcome.err
    name = "small_ctx16_forward_fp32"
    (row,) = desk.manifest(name)["energy"]
    assert row["joules"] / row["steps"] == pytest.approx(25, rel=0.2)
    monkeypatch.setenv("BEHAVIOUR", json.dumps({"small": 'assert "NSYS_ANALYZE_ENERGY_STEPS" not in os.environ'}))
    assert run_main("run", *options, "--no-energy", "--output-dir", "without").code == 0
    assert "energy" not in json.loads((desk.folder / "without" / name / "manifest.json").read_text())
    asked = run_main("ask", desk.runs / name / "capture.sqlite", "step_joules", "power_w", "idle_power_w")
    assert "step_joules = 2" in asked.out
    assert "J, mean of 10 steps without the profiler" in asked.out
    assert "power_w = " in asked.out
    assert "idle_power_w: not known" in asked.out
    report = (desk.runs / "report.md").read_text()
    assert "How much energy does a step take?" in report
    assert "A million tokens cost" in report
    assert "Power limited the clock of the NVIDIA H200 in 100" in report
    data = run_main("report", desk.runs, "--format", "json", "-o", "-")
    assert json.loads(data.out)["captures"][0]["energy"]["watts"] == pytest.approx(500, rel=0.1)
    assert run_main("baseline", "save", "main", desk.runs).code == 0
    (tmp_path / "budgets.toml").write_text("step_joules = 1\n")
    compared = run_main(
        "compare", ".nsys-analyze/baselines/main", desk.runs, "--budgets", tmp_path / "budgets.toml", "--format", "json"
    )
    assert (compared.code, "Budgets exceeded: energy" in compared.err) == (3, True)
    (pair,) = json.loads(compared.out)["comparisons"]
    assert pair["joules"]["before_ms"] == pair["joules"]["after_ms"] == pytest.approx(25, rel=0.2)
    screen = outcome.out.replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"· 2[0-9.]+ J a step", " ".join(screen.split()))


# --- ranks


def test_ranks_have_one_row_for_each_gpu() -> None:
    """20 J and 35 J a step, at 400 W and 700 W."""
    second = replace(ROW, index=1, rank=1, joules=2000.0)
    energies = [energetic(ROW).energy, replace(energetic(second).energy, watts=400.0)]  # type: ignore[type-var]
    text = describe_energy_of_ranks([energy for energy in energies if energy])
    assert text.replace("\N{NO-BREAK SPACE}", " ") == (
        "Without the profiler, a step takes 55 J on 2 GPUs together, which is 1,100 W."
    )
    table = tabulate_gpus((ROW, second), "run")
    assert [row[0] for row in table.rows] == ["0: NVIDIA H200", "1: NVIDIA H200"]


# --- programs


@pytest.mark.slow
def test_a_program_on_a_cpu_makes_no_more_steps(tmp_path: Path) -> None:
    """There are 3 steps of warm-up and 4 measured steps."""
    variables = make_hook_variables(ASKED, tmp_path / "results.json")
    ran = run_program(
        tmp_path, LOOP.format(steps=40, after_step=""), **variables, **{VARIABLE: f"5:100:{tmp_path / 'energy.json'}"}
    )
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == [str(step) for step in range(3 + 4)]
    assert not (tmp_path / "energy.json").exists()


#: Lets the hooks take the clock of the CPU for that of a GPU.
CPU_AS_GPU = """
import sys, time, torch

class Mark:
    def __init__(self):
        self.ns = time.monotonic_ns()
    def elapsed_time(self, end):
        return (end.ns - self.ns) / 1e6

class Clock:
    mark_time = staticmethod(Mark)

def begin(self):
    self._clock, self._start_ns = Clock(), time.monotonic_ns()
    self._start = self._end = self._clock.mark_time()

sys.modules["_nsys_analyze_hooks.energy_steps"].EnergySteps.note_range_closed = begin
torch.cuda.device_count, torch.cuda.synchronize = (lambda: 0), (lambda: None)
torch.cuda.is_current_stream_capturing = lambda: False
"""


@pytest.mark.slow
def test_a_program_makes_steps_for_the_wanted_time(tmp_path: Path) -> None:
    """Each step sleeps for 20 ms between backward and the optimizer, so 0.5 s contain at most 25 whole steps, and one
    more ends after this time. A busy machine makes fewer than 20 steps in 0.5 s, and then runs for longer.
    """
    variables = make_hook_variables(ASKED, tmp_path / "results.json")
    program = CPU_AS_GPU + LOOP.format(steps=100, after_step="")
    ran = run_program(tmp_path, program, **variables, **{VARIABLE: f"0.5:100:{tmp_path / 'energy.json'}"})
    assert (ran.code, ran.err) == (0, "")
    values = json.loads((tmp_path / "energy.json").read_text())
    assert 1 <= values["steps"] <= 26
    assert len(ran.out.split()) == 3 + 4 + values["steps"]
    assert (values["end_ns"] - values["start_ns"]) / S >= 0.5
    # The measured steps of the results are only the 4 before.
    assert len(json.loads((tmp_path / "results.json").read_text())["times_ms"]["step"]) == 4
    names = [name for name, _, _ in values["phases"]]
    assert {name: names.count(name) for name in ("forward", "backward", "optimizer")} == dict.fromkeys(
        ("forward", "backward", "optimizer"), values["steps"]
    )
    assert all(values["start_ns"] <= start <= end <= values["end_ns"] for _, start, end in values["phases"])


def test_a_target_marks_its_phases(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 measured steps, and 3 steps whose energy is read, with two phases each."""
    harness = pytest.importorskip("profiling_targets.harness", reason="the target needs PyTorch")
    monkeypatch.setenv(VARIABLE, f"0:3:{tmp_path / 'energy.json'}")
    monkeypatch.setattr(harness, "observe_steps", lambda _: EnergySteps(torch))
    phases = {"forward": lambda: None, "backward": lambda: None}
    workload = type("Workload", (), {"phases": lambda _: phases})
    options = Run(device="cpu", steps=2, warmup_steps=1, cuda_graph=False)
    assert harness.run(workload, options, Run(), tmp_path / "results.json", ranges=False) == 0
    values = json.loads((tmp_path / "energy.json").read_text())
    assert (values["steps"], [name for name, _, _ in values["phases"]]) == (3, ["forward", "backward"] * 3)
    assert len(json.loads((tmp_path / "results.json").read_text())["times_ms"]["step"]) == 2


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_the_joules_are_those_of_the_counter() -> None:
    """The counter is read by hand before and after equal steps, and its increase is compared with the report's."""
    torch = pytest.importorskip("torch")
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py reads the counter")
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    if check_energy().status != "ok":
        pytest.skip(f"the energy cannot be read: {check_energy().description}")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    with EnergyReader(pynvml) as reader:
        for _ in range(200):  # until the clock is steady
            a @ a
        torch.cuda.synchronize()
        start_ns, start_mj = time.monotonic_ns(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        while time.monotonic_ns() - start_ns < 5 * S:
            a @ a
            torch.cuda.synchronize()
        end_ns, end_mj = time.monotonic_ns(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        time.sleep(0.2)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    ((row,),) = reader.measure([Steps(start_ns, end_ns, 1, [uuid], [])], has_ranks=False)
    assert row.joules == pytest.approx((end_mj - start_mj) / 1000, rel=0.03)
