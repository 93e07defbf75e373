"""Tests the bytes of operators against the DRAM counters of an H200.

``dram_small256.tsv.xz`` contains the kernels of three training steps of the small model (768 features, a vocabulary of
10,000, 4 · 256 tokens, fp32) with the shares of the DRAM bandwidth that nsys sampled every 100 µs. The operators below
use more memory than the L2 cache holds, and have several samples in which no other kernel runs.
"""

from __future__ import annotations

import csv
import lzma
from itertools import pairwise

import numpy as np
import pytest

from nsys_analyzer.analysis.operators.costs import estimate_cost
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from tests.conftest import DATA

BYTES_PER_NS, STEPS = 4814.304, 3
PARAMETERS = (Tensor((128_625_408,), "float32"),)
HIDDEN, WEIGHT, LOGITS = (Tensor(shape, "float32") for shape in ((1024, 768), (768, 10_000), (1024, 10_000)))

#: The part of a kernel's name, its operator, and the arguments: the lists of AdamW, each with all parameters.
LISTS = [
    ("TernaryOpScalarFunctor", "_foreach_lerp_", 2),
    ("PointwiseOpScalarFunctor", "_foreach_addcmul_", 3),  # the gradients, squared
    ("PointwiseOpScalarListFunctor", "_foreach_addcdiv_", 3),
    ("Sqrt", "_foreach_sqrt", 1),
    ("BinaryOpScalarListFunctor", "_foreach_div_", 1),
    ("std::plus", "_foreach_add_", 1),
]


def read_kernels_and_samples() -> tuple[list[str], np.ndarray, np.ndarray]:
    """The names of the kernels, their starts and ends, and the samples: time, share of reads and share of writes, %."""
    with lzma.open(DATA / "dram_small256.tsv.xz", "rt", encoding="utf-8") as file:
        rows = [*csv.reader(file, delimiter="\t")]
    names = {row[1]: row[2] for row in rows if row[0] == "name"}
    kernels, samples = ([row[1:] for row in rows if row[0] == kind] for kind in ("kernel", "sample"))
    times = np.array([row[:2] for row in kernels], np.int64)
    return [names[row[2]] for row in kernels], times, np.array(samples, np.int64)


NAMES, TIMES, SAMPLES = read_kernels_and_samples()


def measure_bytes(part_of_name: str) -> float:
    """The DRAM traffic of all kernels with a part of a name in a step, from the samples in which only they run."""
    is_wanted = np.array([part_of_name in name for name in NAMES])
    traffic = busy = 0.0
    for (begin, *shares), (end, _, _) in pairwise(SAMPLES):  # a sample is a mean from its time to the next one
        inside = np.maximum(np.minimum(TIMES[:, 1], end) - np.maximum(TIMES[:, 0], begin), 0)
        if inside[is_wanted].sum() > 0.9 * (end - begin) and not inside[~is_wanted].any():
            traffic += sum(shares) / 100 * BYTES_PER_NS * (end - begin)
            busy += inside.sum()
    assert busy > 500_000  # several samples
    return traffic / busy * (TIMES[is_wanted, 1] - TIMES[is_wanted, 0]).sum() / STEPS


@pytest.mark.parametrize(("part_of_name", "operator", "lists"), LISTS)
def test_elementwise(part_of_name: str, operator: str, lists: int) -> None:
    cost = estimate_cost(Signature(f"aten::{operator}", (PARAMETERS,) * lists))
    assert cost
    assert measure_bytes(part_of_name) == pytest.approx(cost.bytes, rel=0.1)


def test_matmuls_of_the_head() -> None:
    """The forward pass, and the gradients of the weight and of the hidden states."""
    transposed = [tensor._replace(shape=tensor.shape[::-1]) for tensor in (HIDDEN, WEIGHT)]
    operands = ((HIDDEN, WEIGHT), (transposed[0], LOGITS), (LOGITS, transposed[1]))
    costs = [estimate_cost(Signature("aten::mm", pair)) for pair in operands]
    parts = ("tn_n_tilesize128x64x8", "sgemm_256x128_8x4_nt", "nn_n_tilesize256x128x8")
    assert sum(map(measure_bytes, parts)) == pytest.approx(sum(cost.bytes for cost in costs if cost), rel=0.1)
