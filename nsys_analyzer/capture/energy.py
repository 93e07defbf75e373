"""Reads the energy, power and clocks of GPUs while a program runs, by NVIDIA's management library (NVML).

NVML counts the energy of each GPU since its driver was loaded, in mJ. A thread of this process reads the counter 20
times per second. The hooks in the program note when steps without a profiler began and ended (``hooks.energy_steps``),
on the clock of the readings. The energy of these steps is the counter's increase, interpolated between readings. The
counter itself is updated every 20 to 100 ms, depending on the GPU. The longest time between two of its updates limits
the error of the energy.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.capture.nsys import Check
from nsys_analyzer.configuration import GpuEnergy, PhasePower
from nsys_analyzer.text import plural
from nsys_analyzer.trace.schema import NS_PER_S

#: The time for which steps run while their energy is read, s. With updates of the counter every 100 ms, the error of
#: the energy is at most 2 %.
ENERGY_SECONDS = 5.0
#: The largest number of steps whose energy is read, and the fixed number of such steps on each rank of a run, because
#: ranks must run equally many steps.
MOST_STEPS, STEPS_OF_RANKS = 100_000, 20
_INSTALL = "Install it: pip install 'nsys-analyze[run]'"
_INTERVAL_S = 0.05
#: The utilization and the processes of a GPU are read once per this number of readings, because they change slowly.
_READINGS_PER_SLOW_READING = 20
#: The power of an idle GPU is known if the GPU was idle for at least this time.
_MIN_IDLE_S = 1.0
#: The bits of NVML's reasons for a limited clock (nvmlClocksEventReasons in nvml.h), by cause.
_LIMIT_BITS = {"power": 0x4 | 0x80, "heat": 0x20 | 0x40}
_MJ_PER_J = 1000
#: The power of a phase is known from at least this number of readings, in at least this number of instances.
_FEWEST_PHASE_READINGS, _FEWEST_PHASE_INSTANCES = 20, 3


class Reading(NamedTuple):
    """One reading of a GPU by NVML. A figure is None if NVML does not support it, or if it was not read."""

    time_ns: int
    millijoules: int
    clock_mhz: int | None = None
    limit_bits: int | None = None
    utilization_percent: int | None = None
    processes: int | None = None


class Steps(NamedTuple):
    """The steps of a process whose energy is read: their start and end, their GPUs, and the spans of their phases."""

    start_ns: int
    end_ns: int
    steps: int
    gpus: list[str]
    phases: list[tuple[str, int, int]]


class EnergyReader:
    """Reads all GPUs of this machine during a ``with`` block, in a separate thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._stop = nvml, threading.Event()
        self._gpus = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            if _find_obstacle(nvml, index) is None:
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus[_shorten_uuid(nvml.nvmlDeviceGetUUID(gpu))] = index, gpu
        self._readings: dict[str, list[Reading]] = {uuid: [] for uuid in self._gpus}
        self._thread = threading.Thread(target=self._read_until_stopped, daemon=True)

    def __enter__(self) -> EnergyReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read_until_stopped(self) -> None:
        number = 0
        while True:
            for uuid, (_, gpu) in self._gpus.items():
                reading = self._read(gpu, is_slow=number % _READINGS_PER_SLOW_READING == 0)
                self._readings[uuid] += [reading] if reading else []
            number += 1
            # The interval varies, so that readings are never in step with the phases of a program.
            if self._stop.wait(_INTERVAL_S * random.uniform(0.8, 1.2)):
                return

    def _read(self, gpu: Any, *, is_slow: bool) -> Reading | None:
        """Reads a GPU; returns None if its counter cannot be read."""
        nvml, before_ns = self._nvml, time.monotonic_ns()
        millijoules = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
        time_ns = (before_ns + time.monotonic_ns()) // 2
        if millijoules is None:
            return None
        fast = (
            self._ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
        )
        if not is_slow:
            return Reading(time_ns, millijoules, *fast)
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, gpu)
        return Reading(
            time_ns, millijoules, *fast, utilization and utilization.gpu, None if processes is None else len(processes)
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the answer of NVML; None if NVML does not support or does not permit the question."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def measure(self, steps_of_processes: Sequence[Steps | None], *, has_ranks: bool) -> list[list[GpuEnergy]]:
        """Returns the energy of each GPU that each process used during its steps.

        If the energy of one GPU of a process is not known, the energy of a step is not known, so nothing is returned
        for the process. If several processes used a GPU, its counter does not show the energy of each process.
        """
        uuids_of_processes = [self._name_gpus(steps) if steps else [] for steps in steps_of_processes]
        counts = Counter(uuid for uuids in uuids_of_processes for uuid in uuids)
        measured_gpus = []
        for rank, (steps, uuids) in enumerate(zip(steps_of_processes, uuids_of_processes, strict=True)):
            is_alone = steps is not None and all(uuid in self._gpus and counts[uuid] == 1 for uuid in uuids)
            figures = [measure_steps(self._readings[uuid], steps) for uuid in uuids] if steps and is_alone else []
            measured_gpus.append(
                [
                    GpuEnergy(**self._describe_gpu(uuid), rank=rank if has_ranks else None, **figures_of_gpu)
                    for uuid, figures_of_gpu in zip(uuids, figures, strict=False)
                    if figures_of_gpu and all(figures)
                ]
            )
        return measured_gpus

    def _describe_gpu(self, uuid: str) -> dict[str, Any]:
        """Returns the name, the number and the highest clock of a GPU."""
        index, gpu = self._gpus[uuid]
        name = self._nvml.nvmlDeviceGetName(gpu)
        max_clock_mhz = self._ask(self._nvml.nvmlDeviceGetMaxClockInfo, gpu, self._nvml.NVML_CLOCK_SM)
        name_text = name.decode() if isinstance(name, bytes) else name
        return {"gpu": name_text, "index": index, "max_clock_mhz": max_clock_mhz}

    def _name_gpus(self, steps: Steps) -> list[str]:
        """Returns the UUIDs of a process's GPUs. With an old PyTorch, they are known only if there is a single GPU."""
        if any(steps.gpus):
            return [_shorten_uuid(uuid) for uuid in steps.gpus]
        is_only_gpu = self._nvml.nvmlDeviceGetCount() == 1 and len(steps.gpus) == 1
        return [*self._gpus] if is_only_gpu else []


def open_nvml() -> Any:
    """Returns the initialized module of NVML; None if the module or the driver is missing."""
    return None if isinstance(nvml := _load_nvml(), str) else nvml


def check_energy() -> Check:
    """Returns whether the energy of GPUs can be read on this machine, or why not."""
    nvml = _load_nvml()
    if isinstance(nvml, str):
        return Check("energy", "missing", f"{nvml}, so reports name no joules", _INSTALL if "pynvml" in nvml else "")
    count = nvml.nvmlDeviceGetCount()
    obstacles = [obstacle for index in range(count) if (obstacle := _find_obstacle(nvml, index))]
    if obstacles:
        return Check("energy", "missing", f"unknown for {len(obstacles)} of {count} GPUs: {obstacles[0]}")
    return Check("energy", "ok", f"NVML counts the energy of {count} {plural(count, 'GPU')}")


def _load_nvml() -> Any:
    """Returns the initialized module of NVML, or a text that says why NVML cannot be used."""
    try:
        import pynvml
    except ImportError:
        return "the Python package pynvml is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML cannot be used: {error}"
    return pynvml


def _find_obstacle(nvml: Any, index: int) -> str | None:
    """Returns why the energy of a GPU cannot be read; None if it can.

    A GPU that is shared by MIG counts the energy of all its instances together.
    """
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except nvml.NVMLError as error:
        return f"its energy counter cannot be read ({error})"
    try:
        is_shared = bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError:  # GPUs before Ampere have no MIG
        is_shared = False
    return "MIG shares it, and its counter does not show the energy of each instance" if is_shared else None


def _shorten_uuid(uuid: str | bytes) -> str:
    """Returns a UUID without the prefix ``GPU-``, which NVML adds and PyTorch does not."""
    return (uuid.decode() if isinstance(uuid, bytes) else uuid).removeprefix("GPU-").lower()


def measure_steps(readings: Sequence[Reading], steps: Steps) -> dict[str, Any] | None:
    """Returns the figures of ``GpuEnergy`` for one GPU during steps; None if the readings do not show them.

    The readings must span the steps. Meanwhile, the counter must not be reset, and no other process may use the GPU.
    """
    times_ns = [reading.time_ns for reading in readings]
    is_covered = bool(times_ns) and times_ns[0] <= steps.start_ns < steps.end_ns <= times_ns[-1]
    if not is_covered:
        return None
    first, last = np.searchsorted(times_ns, (steps.start_ns, steps.end_ns), side="right")
    during = readings[max(first - 1, 0) : last + 1]
    has_others = any((reading.processes or 0) > 1 for reading in during)
    if has_others or any(after.millijoules < before.millijoules for before, after in pairwise(during)):
        return None
    counter_mj = [reading.millijoules for reading in readings]
    start_mj, end_mj = np.interp([steps.start_ns, steps.end_ns], times_ns, counter_mj)
    joules, seconds = float(end_mj - start_mj) / _MJ_PER_J, (steps.end_ns - steps.start_ns) / NS_PER_S
    updates_ns = [during[0].time_ns]
    updates_ns += [after.time_ns for before, after in pairwise(during) if after.millijoules > before.millijoules]
    update_ns = max((after - before for before, after in pairwise(updates_ns)), default=steps.end_ns - steps.start_ns)
    inside = [reading for reading in during if steps.start_ns <= reading.time_ns <= steps.end_ns]
    clocks = [reading.clock_mhz for reading in inside if reading.clock_mhz is not None]
    bits = [reading.limit_bits for reading in inside if reading.limit_bits is not None]
    counts = {cause: sum(bool(value & mask) for value in bits) for cause, mask in _LIMIT_BITS.items()}
    return {
        "steps": steps.steps,
        "seconds": seconds,
        "joules": joules,
        "error_joules": joules * min(update_ns / NS_PER_S / seconds, 1.0),
        "idle_watts": _find_idle_watts(readings, steps.start_ns),
        "clock_mhz": round(statistics.median(clocks)) if clocks else None,
        "limits": {cause: count / len(bits) for cause, count in counts.items() if count},
        "phases": _measure_phases(during, steps, update_ns),
    }


def _find_idle_watts(readings: Sequence[Reading], end_ns: int) -> float | None:
    """Returns the mean power before the program used the GPU, W; None if the GPU was idle too briefly.

    Only the second half of the time counts, because an earlier program may have left the GPU's clocks high.
    """
    idle_ns = None
    for reading in readings:
        if reading.time_ns >= end_ns or reading.utilization_percent:
            break
        if reading.utilization_percent == 0:
            idle_ns = reading.time_ns
    if idle_ns is None or (idle_ns - readings[0].time_ns) / NS_PER_S < _MIN_IDLE_S:
        return None
    middle_ns = (readings[0].time_ns + idle_ns) / 2
    half = [reading for reading in readings if middle_ns <= reading.time_ns <= idle_ns]
    duration_s = (half[-1].time_ns - half[0].time_ns) / NS_PER_S
    increase_mj = half[-1].millijoules - half[0].millijoules
    return increase_mj / _MJ_PER_J / duration_s if duration_s > 0 and increase_mj >= 0 else None


def _measure_phases(readings: Sequence[Reading], steps: Steps, update_ns: int) -> dict[str, PhasePower]:
    """Returns the power while each phase runs; phases with too few readings or instances are left out.

    Only updates of the counter that follow the start of an instance by ``update_ns``, the longest time between two
    updates, and that precede its end, belong to the phase alone. The error is the larger of two: the standard error
    over the instances, and the error that the times of the readings cause.
    """
    updates = [after for before, after in pairwise(readings) if after.millijoules > before.millijoules]
    update_times_ns = [reading.time_ns for reading in updates]
    spans, lengths_s = defaultdict[str, list[tuple[float, float, int]]](list), defaultdict[str, float](float)
    for name, start_ns, end_ns in steps.phases:
        lengths_s[name] += (end_ns - start_ns) / NS_PER_S / steps.steps
        first, last = np.searchsorted(update_times_ns, (start_ns + update_ns, end_ns)).tolist()
        if last - first >= 2:
            joules = (updates[last - 1].millijoules - updates[first].millijoules) / _MJ_PER_J
            seconds = (update_times_ns[last - 1] - update_times_ns[first]) / NS_PER_S
            spans[name].append((joules, seconds, last - first))
    phases = {}
    for name, instances in spans.items():
        joules, seconds, count = (sum(column) for column in zip(*instances, strict=True))
        if count >= _FEWEST_PHASE_READINGS and len(instances) >= _FEWEST_PHASE_INSTANCES:
            errors = [statistics.stdev(instance[0] / instance[1] for instance in instances)]
            # Each end of an instance is read up to one interval after its update. The difference of two such delays has
            # the standard deviation of a triangular distribution.
            errors.append(joules / seconds * _INTERVAL_S / math.sqrt(6) / (seconds / len(instances)))
            error_watts = max(errors) / math.sqrt(len(instances))
            phases[name] = PhasePower(watts=joules / seconds, error_watts=error_watts, seconds_per_step=lengths_s[name])
    return phases
