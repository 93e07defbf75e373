"""Reads the traffic of network cards, which nsys samples with ``--nic-metrics``.

A sample is the mean rate of one metric of one port, such as ``IB: Bytes sent`` in bytes/ms, as NVIDIA's recipe
``network_traffic_map`` reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Floats, Ints, distinct_rows, iterate_rows
from nsys_analyzer.trace.reader import Reader

_BYTES_METRIC = re.compile(r"(?P<layer>IB|Eth): Bytes (?P<direction>received|sent)")
#: The factors from the units of rates to bytes/s. Metrics in other units are not read.
_BYTES_PER_S = {"bytes/ms": 1e3, "B/ms": 1e3, "bytes/s": 1.0, "B/s": 1.0}


@dataclass(frozen=True)
class NetworkTraffic:
    """The bytes that one port of a network card receives or sends.

    Attributes:
        title: the card, the port if it is not 0, the layer and the direction, such as ``mlx5_0 IB sent``.
        start, end: shape (samples,), the measured time, ns, sorted by start.
        bytes_per_s: shape (samples,), the mean rate in this time.
    """

    title: str
    start: Ints
    end: Ints
    bytes_per_s: Floats


def read_network_traffic(reader: Reader) -> tuple[NetworkTraffic, ...]:
    """Returns the traffic of each port and direction, sorted by title."""
    if not reader.name_of(schema.NIC_METRICS):
        return ()
    metrics: dict[tuple[int, int], tuple[str, float]] = {}
    for metrics_list, index, name, unit in iterate_rows(reader.read(schema.NIC_METRIC_NAMES)):
        if (match := _BYTES_METRIC.fullmatch(name)) and unit in _BYTES_PER_S:
            metrics[metrics_list, index] = f"{match['layer']} {match['direction']}", _BYTES_PER_S[unit]
    card_names = dict(iterate_rows(reader.read(schema.NIC_NAMES)))
    card_of_id = {number: card_names.get(nic, "") for nic, number in iterate_rows(reader.read(schema.NIC_IDS))}
    rows = reader.read(schema.NIC_METRICS)
    keys = [rows[name].astype(np.int64) for name in ("card", "port", "metrics_list", "metric")]
    first, code = distinct_rows(*keys)
    traffic = []
    for number, position in enumerate(first.tolist()):
        card, port, *metric_key = (int(key[position]) for key in keys)
        if metric := metrics.get((metric_key[0], metric_key[1])):
            words, scale = metric
            of_metric = np.flatnonzero((code == number) & (rows["end"] > rows["start"]))
            of_metric = of_metric[np.argsort(rows["start"][of_metric], kind="stable")]
            name = card_of_id.get(card) or f"network card {card}"
            title = f"{name}{f' port {port}' if port else ''} {words}"
            values = rows["value"][of_metric] * scale
            traffic.append(NetworkTraffic(title, rows["start"][of_metric], rows["end"][of_metric], values))
    return tuple(sorted(traffic, key=lambda row: row.title))
