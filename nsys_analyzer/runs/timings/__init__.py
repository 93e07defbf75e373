"""Tables of unprofiled times: what ``time.perf_counter()`` saw where no profiler slowed the run."""

from __future__ import annotations

from nsys_analyzer.runs.timings.matching import Timings
from nsys_analyzer.runs.timings.reading import Selection, read_timings
from nsys_analyzer.runs.timings.timing import UNKNOWN_PHASE, Timing

__all__ = ["UNKNOWN_PHASE", "Selection", "Timing", "Timings", "read_timings"]
