"""Makes the lanes of a timeline that show the hardware counters of a GPU, and the traffic of network cards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.counters.figures import find_sampled_gpu
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.tracks import Level, LevelUnit, Tracks
from nsys_analyzer.trace.arrays import Floats, Ints
from nsys_analyzer.trace.gpu_counters import Counter

#: The lanes of a GPU: the title, the unit, the counters that are added up, and the factor that gives the unit.
_LANES: tuple[tuple[str, LevelUnit, tuple[Counter, ...], float], ...] = (
    ("SMs active", "%", ("sms_active",), 100),
    ("Tensor cores", "%", ("tensor_active",), 100),
    ("DRAM bandwidth", "%", ("dram_read", "dram_write"), 100),
    ("NVLink", "%", ("nvlink_received", "nvlink_sent"), 50),  # each direction has its own peak, so the mean is shown
    ("SM clock", "MHz", ("sm_clock",), 1e-6),
)
#: The maximum number of values of a lane. If there are more samples, adjacent samples are averaged.
_MAX_VALUES = 20_000
#: The value of a time without a sample.
MISSING = -1


def make_levels(attributed: AttributedTrace, process: int, tracks: Tracks) -> tuple[Level, ...]:
    """Returns the lanes of the GPU and of the network cards in the time of the tracks, without lanes that are all 0."""
    levels = [*_make_gpu_levels(attributed, process, tracks), *_make_network_levels(attributed, tracks)]
    return tuple(level for level in levels if (level.value > 0).any())


def _make_gpu_levels(attributed: AttributedTrace, process: int, tracks: Tracks) -> Iterator[Level]:
    gpu_id = find_sampled_gpu(attributed, process)
    if gpu_id is None:
        return
    samples = attributed.trace.counters[gpu_id]
    for title, unit, counters, factor in _LANES:
        recorded = [samples.values[counter] for counter in counters if counter in samples.values]
        if len(recorded) == len(counters):
            yield _make_level(title, unit, samples.start, samples.end, np.sum(recorded, axis=0) * factor, tracks)


def _make_network_levels(attributed: AttributedTrace, tracks: Tracks) -> Iterator[Level]:
    for traffic in attributed.trace.network:
        yield _make_level(traffic.title, "B/s", traffic.start, traffic.end, traffic.bytes_per_s, tracks)


def _make_level(title: str, unit: LevelUnit, start: Ints, end: Ints, value: Floats, tracks: Tracks) -> Level:
    """Returns a lane whose values each hold until the next time. A time without a sample has the value ``MISSING``."""
    is_shown = (end > tracks.origin_ns) & (start < tracks.origin_ns + tracks.duration_ns)
    start, end, value = start[is_shown] - tracks.origin_ns, end[is_shown] - tracks.origin_ns, value[is_shown]
    size = max(1, -(-len(start) // _MAX_VALUES))
    first = np.arange(0, len(start), size)
    has_value = ~np.isnan(value)
    count = np.add.reduceat(has_value, first, dtype=np.int64) if len(first) else np.zeros(0, np.int64)
    total = np.add.reduceat(np.where(has_value, value, 0), first) if len(first) else np.zeros(0)
    mean = np.where(count > 0, np.round(total / np.maximum(count, 1)), MISSING).astype(np.int64)
    times, ends = np.maximum(start[first], 0), end[np.minimum(first + size, len(start)) - 1]
    is_gap = np.append(times[1:] > ends[:-1], True)[: len(times)]
    order = np.argsort(np.append(times, ends[is_gap]), kind="stable")
    values = np.append(mean, np.full(int(is_gap.sum()), MISSING))
    return Level(title, unit, np.append(times, ends[is_gap])[order], values[order])
