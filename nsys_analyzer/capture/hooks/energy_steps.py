"""Marks steps whose energy is read: they follow the measured steps of the timed process, without any profiler.

The hooks only note when these steps run, on a clock that all processes of a machine share. Meanwhile, ``nsys-analyze
run`` reads the energy of the GPU (``capture.energy``), because the program's Python may not have NVML's library.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from .ranges import Clock, find_rank_file
from .step_times import StepTimes

#: The environment variable with the seconds for which steps should run, the largest number of steps, and the file for
#: their times, separated by colons. With 0 seconds, only the number of steps counts. Without it, no steps are marked.
VARIABLE = "NSYS_ANALYZE_ENERGY_STEPS"
#: If there are fewer than this number of steps after the wanted time, steps run for up to three times this time,
#: because the power of a phase needs many instances.
_ENOUGH_STEPS, _LONGEST_FACTOR = 20, 3
#: If this number of phases was noted, all of them are dropped, because such short phases have no power of their own.
_MOST_PHASE_SPANS = 2_000


class EnergySteps:
    """The steps after the measured steps, until they have taken the wanted time.

    Ranks of one program must run equally many steps, so only the number of steps counts for them. The class has the
    methods of ``StepTimes``.
    """

    def __init__(self, torch: Any) -> None:
        seconds, count, path = os.environ[VARIABLE].split(":", 2)
        self._torch, self._seconds, self._most_steps = torch, float(seconds), int(count)
        self._path = find_rank_file(path)
        self._clock: Clock | None = None
        self._start: Any = None
        self._end: Any = None
        self._start_ns = self._steps = 0
        self._phases: list[tuple[str, Any, Any]] = []

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is one of the marked steps."""
        return self._clock is not None

    def stop(self) -> None:
        """Ends the steps without a result."""
        self._clock = self._path = None

    def note_range_closed(self) -> None:
        """Begins the steps, unless other ranks, which run no additional steps, would wait for this rank."""
        distributed, cuda = self._torch.distributed, self._torch.cuda
        is_joined = distributed.is_available() and distributed.is_initialized()
        ranks = distributed.get_world_size() if is_joined else int(os.environ.get("WORLD_SIZE", "1"))
        is_on_gpu = cuda.is_available() and cuda.is_initialized()
        if self._path and is_on_gpu and not (ranks > 1 and self._seconds):
            cuda.synchronize()
            self._clock, self._start_ns = Clock(self._torch), time.monotonic_ns()
            self._start = self._end = self._clock.mark_time()

    def note_step_end(self) -> bool:
        """Notes the end of a step, and returns whether it was the last marked step."""
        if self._clock is None:
            return False
        if self._torch.cuda.is_current_stream_capturing():
            self.stop()  # the events of a captured step would have no times
            return True
        self._end = self._clock.mark_time()
        self._steps += 1
        elapsed_s = (time.monotonic_ns() - self._start_ns) / 1e9
        wanted_s = self._seconds * (1 if self._steps >= _ENOUGH_STEPS else _LONGEST_FACTOR)
        is_last = self._steps >= self._most_steps or 0 < wanted_s <= elapsed_s
        if is_last:
            self.finish()
        return is_last

    def mark_phase_start(self) -> Any:
        """Returns the mark for ``note_phase``; None if phases are not noted."""
        is_noted = self._clock and len(self._phases) < _MOST_PHASE_SPANS
        can_be_marked = is_noted and not self._torch.cuda.is_current_stream_capturing()
        return self._clock.mark_time() if self._clock and can_be_marked else None

    def note_phase(self, name: str, start: Any) -> None:
        """Notes that a phase, which began at ``start``, ends now."""
        if self._clock and start is not None:
            self._phases.append((name, start, self._clock.mark_time()))

    def finish(self) -> None:
        """Ends the steps, and writes their times, in ns of the monotonic clock, and their GPUs."""
        clock, self._clock = self._clock, None
        if clock is None or not self._steps or self._path is None:
            return
        cuda = self._torch.cuda
        cuda.synchronize()

        def to_ns(mark: Any) -> int:
            """Returns the time of a mark on the clock of the CPU. The GPU was idle when the steps began."""
            elapsed_ms: float = self._start.elapsed_time(mark)
            return self._start_ns + round(elapsed_ms * 1e6)

        used_gpus = [number for number in range(cuda.device_count()) if cuda.memory_allocated(number)]
        uuids = [str(getattr(cuda.get_device_properties(number), "uuid", "")) for number in used_gpus]
        end_ns = to_ns(self._end)
        spans = [(name, to_ns(start), to_ns(end)) for name, start, end in self._phases]
        is_complete = len(spans) < _MOST_PHASE_SPANS
        values = {
            "start_ns": self._start_ns, "end_ns": end_ns, "steps": self._steps, "gpus": uuids,
            "phases": [span for span in spans if span[2] <= end_ns] if is_complete else [],
        }  # fmt: skip
        self._path.write_text(json.dumps(values), encoding="utf-8")


def observe_steps(torch: Any) -> StepTimes | EnergySteps:
    """Returns the observer of unprofiled steps in this process: of their energy if it is timed, else of their times."""
    return EnergySteps(torch) if os.environ.get(VARIABLE) else StepTimes(torch)
