"""Predicts what the collectives of a run would cost with another number of ranks, by the cost of their algorithms.

A ring all-reduce of S bytes among p ranks sends 2 (p − 1) / p · S bytes over each link in 2 (p − 1) steps (Patarasuk
and Yuan, JPDC 2009). An all-gather, a reduce-scatter and an all-to-all of S bytes in total send half as many bytes, and
a broadcast or a reduction to one rank sends S bytes. A tree needs about log2(p) steps (Sanders, Speck and Träff, 2009).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.findings.finding import ReplayChange
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Floats

#: The largest latency that is assumed for a collective of the recorded ranks, ns. The remaining time of a transfer is
#: assumed to depend on the bandwidth.
MAX_LATENCY_NS = 100_000.0
#: Matches kernels of collectives that send more bytes over each link if there are more ranks.
_GROWING = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce", re.IGNORECASE)
_EXCHANGE = re.compile("send|recv", re.IGNORECASE)
_TREE = re.compile("tree", re.IGNORECASE)


def change_rank_count(study: Study, rank_count: int) -> tuple[ReplayChange, ReplayChange]:
    """Returns two changes that give the collectives of all ranks the cost that they have among ``rank_count`` ranks.

    In the first change, the time of the shortest collective is the latency of each collective, and the latency grows
    with the number of ranks. In the second change, the whole transfer depends on the bandwidth of the links.
    Collectives of only some ranks, sends and receives keep their time.
    """
    work, collective = study.replay.work_ns, study.replay.collective
    recorded_count = len(study.replay.rank_begin_ns)
    participants = np.bincount(collective[collective >= 0])
    kernels = [*study.kernels, ""]
    is_of_all = (collective >= 0) & (participants[np.maximum(collective, 0)] == recorded_count) & (work > 0)
    is_of_all &= ~np.array([bool(_EXCHANGE.search(name)) for name in kernels])[study.operations.kernel]
    is_growing = np.array([bool(_GROWING.search(name)) for name in kernels])[study.operations.kernel]
    is_tree = np.array([bool(_TREE.search(name)) for name in kernels])[study.operations.kernel]
    byte_ratio = ((rank_count - 1) / rank_count) / ((recorded_count - 1) / recorded_count)
    byte_ratios = np.where(is_growing, byte_ratio, 1.0)
    ring_ratio = (rank_count - 1) / (recorded_count - 1)
    step_ratios = np.where(is_tree, math.log2(rank_count) / math.log2(recorded_count), ring_ratio)
    latency_ns = work[is_of_all].min(initial=MAX_LATENCY_NS)
    latency_shares = latency_ns / np.maximum(work, 1.0)

    def scale_by(factors: Floats) -> ReplayChange:
        """Returns a change that multiplies the time of each collective among all ranks by its factor."""

        def change(replay: Replay) -> Replay:
            """Returns the replay with the new times of collectives."""
            return replace(replay, work_ns=np.where(is_of_all, replay.work_ns * factors, replay.work_ns))

        return change

    return (
        scale_by(latency_shares * step_ratios + (1 - latency_shares) * byte_ratios),
        scale_by(byte_ratios),
    )
