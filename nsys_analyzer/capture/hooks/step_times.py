"""Measures steps in the process of a capture while nothing is recorded: before and after the capture range.

These steps show the pace of the program without the profiler. Another process would not show it, because processes of
one program differ by up to two thirds. The hooks measure the steps of a user's program, and the targets of this package
measure their own.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .ranges import Clock, find_rank_file

#: The environment variable with the largest number of steps to measure on each side of the capture range, a colon, and
#: the file for their lengths. Without this variable, nothing is measured.
VARIABLE = "NSYS_ANALYZE_STEP_TIMES"
#: The keys of the file with the lengths of the steps before and after the capture range, ms.
_BEFORE, _AFTER = "steps_before_capture_ms", "steps_after_capture_ms"
#: The number of first steps of the program that are not measured, because they do one-time work.
_STEPS_WITH_ONE_TIME_WORK = 2


class StepTimes:
    """The lengths of steps outside of the capture range.

    The GPU is synchronized only before the first and after the last of consecutive steps, so that they overlap as they
    do in the program. A length is the time from the end of a step to the end of the next step, on the GPU's clock.
    """

    def __init__(self, torch: Any) -> None:
        count, _, path = os.environ.get(VARIABLE, "").partition(":")
        self._path = find_rank_file(path)
        self._torch, self._most_steps = torch, int(count or 0)
        self._key: str | None = _BEFORE  # None inside the capture range and after the last measured step
        self._ended_steps = self._measured_steps = 0
        self._clock: Clock | None = None
        self._lengths_ms: dict[str, list[float]] = {}

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._clock is not None

    def stop(self) -> None:
        """Ends the measurement without a result."""
        self._clock = self._key = self._path = None

    def note_step_end(self) -> bool:
        """Notes the end of a step, and returns whether it was the last step to measure after the capture range."""
        self._ended_steps += 1
        cuda = self._torch.cuda
        if cuda.is_available() and cuda.is_initialized() and cuda.is_current_stream_capturing():
            self._clock = None  # the events of the captured step would have no times
            return self._key == _AFTER
        if self._clock:
            self._clock.end_step()
            self._measured_steps += 1
            if self._key == _AFTER and self._measured_steps >= self._most_steps:
                self.finish()
                return True
            self._clock.begin_step()
        elif self._key == _BEFORE and self._ended_steps >= _STEPS_WITH_ONE_TIME_WORK:
            self._begin(_BEFORE)
        return False

    def note_range_closed(self) -> None:
        """Begins to measure the steps after the capture range."""
        self._begin(_AFTER)

    def finish(self) -> None:
        """Ends the measurement, because the capture range opens or the program ends, and writes the lengths."""
        clock, key, self._clock, self._key = self._clock, self._key, None, None
        lengths_ms = clock.times_ms().get("step", []) if clock else []
        if lengths_ms and key and self._path:
            self._lengths_ms[key] = lengths_ms[-self._most_steps :]
            self._path.write_text(json.dumps(self._lengths_ms), encoding="utf-8")

    def _begin(self, key: str) -> None:
        if self._path and self._most_steps:
            if self._torch.cuda.is_available() and self._torch.cuda.is_initialized():
                self._torch.cuda.synchronize()
            self._key, self._clock, self._measured_steps = key, Clock(self._torch), 0
            self._clock.begin_step()
