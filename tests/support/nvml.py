"""Provides a fake NVML whose GPUs have known power, as the module ``pynvml`` has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The error of the fake NVML."""


@dataclass
class FakeGpu:
    """A GPU whose counter has the integral of its power, as of the last update.

    Attributes:
        joules_at: the energy since the start of the clock, by the time in seconds.
        update_s: the time between two updates of the counter.
        denied: the names of the functions that are not permitted.
    """

    uuid: str
    joules_at: Callable[[float], float]
    update_s: float = 0.02
    name: str = "NVIDIA H200"
    utilization: int = 0
    limit_bits: int = 0
    clock_mhz: int = 1980
    processes: int = 1
    is_mig: bool = False
    denied: Sequence[str] = field(default_factory=tuple)

    def counter_mj(self, seconds: float) -> int:
        """The energy at the last update, in mJ."""
        return int(1000 * self.joules_at(seconds // self.update_s * self.update_s))


class FakeNvml:
    """The functions of ``pynvml`` that are used, over fake GPUs. ``now_s`` is the clock of their power."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, *gpus: FakeGpu, now_s: Callable[[], float] = time.monotonic) -> None:
        self._gpus, self._now_s = gpus, now_s

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[[FakeGpu], Any]] = {
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.counter_mj(self._now_s()),
            "nvmlDeviceGetClockInfo": lambda gpu: gpu.clock_mhz,
            "nvmlDeviceGetMaxClockInfo": lambda _: 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.limit_bits,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.utilization),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [None] * gpu.processes,
            "nvmlDeviceGetMigMode": lambda gpu: [int(gpu.is_mig), 0],
        }
        if name not in answers:
            raise AttributeError(name)

        def ask(gpu: FakeGpu, *_: object) -> Any:
            if name in gpu.denied:
                raise NVMLError("Insufficient Permissions")
            return answers[name](gpu)

        return ask

    def nvmlInit(self) -> None:  # noqa: N802 - the names are NVML's
        """Does nothing: the fake needs no driver."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self._gpus[index]
