"""Reads the samples of a GPU's hardware counters, which nsys takes with ``--gpu-metrics-devices``.

The IDs of metrics differ between reports and GPUs, and only their names are stable. A sample contains the mean of each
metric from its time to the next sample. In a real capture, the active SMs have a correlation of 0.99 with the
kernels of this interval, and of 0.80 with the kernels of the interval before it. The first samples are taken before the
session starts, and the last samples after the last kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Floats, Frame, Ints, distinct, iterate_rows
from nsys_analyzer.trace.reader import Reader

#: The name of a counter. All counters are shares of the peak, except for ``sm_clock``, which is in Hz.
Counter = Literal[
    "sms_active", "sm_issue", "tensor_active", "dram_read", "dram_write", "nvlink_received", "nvlink_sent",
    "pcie_received", "pcie_sent", "sm_clock",
]  # fmt: skip

#: Patterns of the names of each counter's metrics, without the unit at the end. A counter is the sum of its metrics.
METRIC_NAMES: Mapping[Counter, re.Pattern[str]] = {
    "sms_active": re.compile(r"SMs? Active"),
    "sm_issue": re.compile(r"SM Issue"),
    "tensor_active": re.compile(r"Tensor Active(?: / FP16 Active)?"),
    "dram_read": re.compile(r"DRAM Read (?:Bandwidth|Throughput)"),
    "dram_write": re.compile(r"DRAM Write (?:Bandwidth|Throughput)"),
    "nvlink_received": re.compile(r"NVLink RX (?:Bandwidth|Throughput|(?:Requests|Responses) (?:Protocol|User) Data)"),
    "nvlink_sent": re.compile(r"NVLink TX (?:Bandwidth|Throughput|(?:Requests|Responses) (?:Protocol|User) Data)"),
    "pcie_received": re.compile(r"PCIe (?:RX|Read) (?:Bandwidth|Throughput)"),
    "pcie_sent": re.compile(r"PCIe (?:TX|Write) (?:Bandwidth|Throughput)"),
    "sm_clock": re.compile(r"GPC Clock Frequency"),
}
_UNITS = ("Throughput %", "%", "MHz")
_UNIT_OF_METRIC = re.compile(r"\s*\[(?P<unit>[^\]]*)\]$")
#: The part of ``typeId`` that is the ID of the GPU.
_GPU_ID_MASK = 0xFF
#: If the next sample starts more than this many periods later, samples are missing between both.
_LONGEST_SAMPLE_PERIODS = 1.5
#: The period is a low quantile of the times between samples, because many samples may be missing.
_PERIOD_QUANTILE = 0.1
#: A frequency up to this value is in MHz. nsys writes Hz, although the metric's name says MHz.
_HIGHEST_MHZ = 100_000
_HZ_PER_MHZ = 1e6
#: The sums of rounded shares may exceed 100 by the rounding of each of their metrics.
_HIGHEST_PERCENT = 102


@dataclass(frozen=True)
class GpuSamples:
    """The samples of one GPU, sorted by time.

    Attributes:
        start, end: shape (samples,), the sampled time, ns. If samples are missing, it is one period after the start.
        values: the values of each recorded counter, shape (samples,): shares from 0 to 1, or Hz; NaN if it is missing.
    """

    start: Ints
    end: Ints
    values: Mapping[Counter, Floats]


def read_gpu_counters(reader: Reader) -> dict[int, GpuSamples]:
    """Returns the samples of each GPU, by GPU ID. Only metrics of ``METRIC_NAMES`` are read."""
    rows = reader.read(select_samples(reader))
    metrics: dict[int, dict[Counter, list[int]]] = {}
    for source, metric, name in iterate_rows(reader.read(schema.METRIC_NAMES)):
        if counter := find_counter(name):
            metrics.setdefault(source, {}).setdefault(counter, []).append(metric)
    sources = (source for source in distinct(rows["source"]).tolist() if source in metrics)
    return {source & _GPU_ID_MASK: _make_samples(rows, source, metrics[source]) for source in sources}


def select_samples(reader: Reader) -> schema.Table:
    """Returns the table of samples with a filter that selects the metrics of ``METRIC_NAMES``."""
    metrics = iterate_rows(reader.read(schema.METRIC_NAMES))
    ids = tuple(sorted({metric for _, metric, name in metrics if find_counter(name)}))
    return replace(schema.GPU_METRICS, filter=schema.Filter("metricId", ids))


def find_counter(metric_name: str) -> Counter | None:
    """Returns the counter to which a metric belongs; None for a metric that is not read, or has an unknown unit."""
    name, unit = _UNIT_OF_METRIC.sub("", metric_name), _UNIT_OF_METRIC.search(metric_name)
    counter = next((counter for counter, pattern in METRIC_NAMES.items() if pattern.fullmatch(name)), None)
    return counter if unit is None or unit["unit"] in _UNITS else None


def _make_samples(rows: Frame, source: int, metrics: Mapping[Counter, list[int]]) -> GpuSamples:
    """Returns the samples of one GPU. A value outside the range of a share counts as missing, as in dropped samples."""
    is_of_source = (rows["source"] == source) & (rows["start"] != schema.NO_TIME)
    start, position = np.unique(rows["start"][is_of_source], return_inverse=True)
    metric, value = rows["metric"][is_of_source], rows["value"][is_of_source]
    values: dict[Counter, Floats] = {}
    for counter, ids in metrics.items():
        total = np.zeros(len(start))
        for metric_id in ids:
            of_metric, is_metric = np.full(len(start), np.nan), metric == metric_id
            of_metric[position[is_metric]] = value[is_metric]
            total += of_metric
        if counter == "sm_clock":
            clock_hz = np.where(total <= _HIGHEST_MHZ, total * _HZ_PER_MHZ, total)
            values[counter] = np.where(clock_hz > 0, clock_hz, np.nan)
        else:
            values[counter] = np.where((total >= 0) & (total <= _HIGHEST_PERCENT), np.minimum(total / 100, 1), np.nan)
    gaps = np.diff(start)
    period = int(np.quantile(gaps, _PERIOD_QUANTILE)) if len(gaps) else 0
    end = start + np.append(np.where(gaps <= _LONGEST_SAMPLE_PERIODS * period, gaps, period), period)
    return GpuSamples(start, end, values)
