"""Tests the energy of steps against GPUs whose power is known, and what the report says about it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.energy import add_energy
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.capture import energy
from nsys_analyzer.capture.energy import EnergyReader, Reading, Steps, check_energy, measure_steps
from nsys_analyzer.capture.hooks.energy_steps import VARIABLE, EnergySteps
from nsys_analyzer.configuration import NO_PRICES, GpuEnergy, Prices, Run, manifest_values
from nsys_analyzer.inputs.manifest import make_run
from nsys_analyzer.report.facts import say
from nsys_analyzer.report.sections.energy import answer_energy, list_phase_joules
from nsys_analyzer.text import plain
from tests.support.nvml import FakeGpu, FakeNvml
from tests.test_step_times import FakeGpu as FakeTorchGpu

UUID, OTHER_UUID = "GPU-AAAA-1", "GPU-BBBB-2"
S = 1_000_000_000


def read(gpu: FakeGpu, seconds: float, **figures: Any) -> list[Reading]:
    """The readings of a GPU at 20 Hz."""
    return [
        Reading(n * 50_000_000, gpu.counter_mj(n * 0.05), gpu.clock_mhz, gpu.limit_bits, **figures)
        for n in range(int(seconds / 0.05) + 1)
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
    assert figures["error_joules"] <= figures["joules"] * (update_s + 0.051) / 5.013  # a reading may miss an update


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
    """The energy of the phases and of the rest is the energy of a step, and the rest is small if phases fill it."""
    figures = measure_steps(*phase_readings(forward_s, backward_s, update_s))
    assert figures
    gpu = GpuEnergy(gpu="NVIDIA H200", index=0, **figures)
    rows = list_phase_joules(gpu)
    if rows:
        assert sum(row[3] for row in rows) == pytest.approx(gpu.joules / gpu.steps)
    if len(rows) == 3:
        assert abs(rows[-1][3]) <= 0.1 * gpu.joules / gpu.steps


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
    """Steps of 400 ms until 1 s has passed: 3. The phase of the last step is noted, too."""
    now_s = 0.0
    monkeypatch.setattr("nsys_analyzer.capture.hooks.energy_steps.time.monotonic_ns", lambda: round(now_s * S))
    monkeypatch.setenv(VARIABLE, f"1.0:100:{tmp_path / 'energy.json'}")
    observed = EnergySteps(torch)
    assert observed.mark_phase_start() is None
    assert not observed.note_step_end()
    observed.note_range_closed()
    ended = []
    for _ in range(3):
        start = observed.mark_phase_start()
        torch.now_ms += 300
        observed.note_phase("forward", start)
        now_s += 0.4
        torch.now_ms += 100
        ended.append(observed.note_step_end())
    assert (ended, observed.is_measuring) == ([False, False, True], False)
    values = json.loads((tmp_path / "energy.json").read_text())
    assert (values["steps"], values["end_ns"] - values["start_ns"]) == (3, round(1.2 * S))
    assert values["gpus"] == ["uuid-1"]  # the program has no memory on GPU 0
    assert values["phases"][-1] == ["forward", round(0.8 * S), round(1.1 * S)]


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


def test_the_manifest_keeps_the_energy(tmp_path: Path) -> None:
    run = Run(energy=(ROW,))
    assert make_run(json.loads(json.dumps(manifest_values(run))), tmp_path).energy == (ROW,)
