"""Yields the statements of ``examples/README.md`` about several GPUs, from the captures and times."""

from __future__ import annotations

import csv
import json
import lzma
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from nsys_analyzer.analysis.ranks.matching import group_members, match_collectives
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.inputs.gather import gather
from tests.examples.rows import COUNTS, EXAMPLES

CAPTURES = EXAMPLES / "ranks" / "captures"
PLANTED_MS = 10.0


@cache
def captures() -> tuple[CaptureSummary, ...]:
    """Every capture of the example."""
    with tempfile.TemporaryDirectory() as folder:
        for packed in CAPTURES.iterdir():
            target = Path(folder) / packed.name.removesuffix(".xz")
            target.write_bytes(lzma.decompress(packed.read_bytes()) if packed.suffix == ".xz" else packed.read_bytes())
        return gather([Path(folder)]).captures


@cache
def runs() -> dict[str, ParallelRun]:
    """The runs by their names."""
    return {run.name.partition(" ")[0]: run for run in find_runs(captures())}


def unprofiled_ms(run: str) -> float:
    """The median time of a step without a profiler, mean of the ranks."""
    with (CAPTURES / "timings.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "step" and row["capture"].startswith(f"{run}_")]
    assert len(rows) == 2
    return sum(float(row["median_ms"]) for row in rows) / len(rows)


def ranks() -> Iterator[str]:
    """How the runs were made, as their manifests say."""
    manifests = [json.loads(path.read_text()) for path in CAPTURES.glob("*.manifest.json")]
    assert {one["gpu"] for one in manifests} == {"NVIDIA H200"}
    (size,) = {one["world_size"] for one in manifests}
    # A rank of the pipeline has a part of the model, and says nothing of the whole.
    whole = [one for one in manifests if "pipeline" not in one["capture"]]
    ((layers, batch, context),) = {
        tuple(one[key] for key in ("num_layers", "batch_size", "context_length")) for one in whole
    }
    yield f"nsys-analyze run --nproc {size} -- python -m profiling_targets.distributed"
    assert (size, layers) == (2, 4)
    yield f"on two GPUs: four layers of small in bf16, batch {batch}, context {context}"


def turns() -> Iterator[str]:
    """How steps were timed without a profiler, one run of each kind after another."""
    timed = json.loads((EXAMPLES / "ranks" / "turns.json").read_bytes())
    assert timed["gpu"] == "NVIDIA H200"
    (count,) = {len(times) for times in timed["step_ms"].values()}
    yield f"with the options of `ranks/captures`, for {timed['steps']} steps each, in {COUNTS[count]} turns"


def late_rank() -> Iterator[str]:
    """The rank that sleeps in each step."""
    run = runs()["late_rank"]
    assert run.slowest_rank is not None
    assert run.slowest_rank.rank == 1
    assert run.lost[0].range == "input"
    assert run.skew_ms is not None
    assert abs(run.skew_ms / PLANTED_MS - 1) <= 0.1
    yield (
        f"One rank sleeps {PLANTED_MS:.0f} ms before each forward. The report says that it is late by "
        f"{run.skew_ms:.1f} ms"
    )
    assert run.slowest_rank.slowest_steps == run.steps == 6
    yield "in each of six steps"
    fast = run.ranks[0]
    assert fast.waiting_ms is not None
    assert fast.exposed_waiting_ms is not None
    hidden_ms = fast.waiting_ms - fast.exposed_waiting_ms
    yield f"waits {fast.waiting_ms:.0f} ms a step. {hidden_ms:.0f} ms of that overlap with backward"
    yield f"runs {run.slowed_ms:.1f} ms slower because of it"
    yield f"differ by only {kernel_starts_ms():.1f} ms (median)"


def kernel_starts_ms() -> float:
    """By how much the collectives of the late rank start later, median over those of a step, and over steps."""
    members = [member for one in captures() if one.name.startswith("late_rank") for member in one.members]
    ((ordered, _),) = group_members(members)
    ((match,), _, _) = match_collectives(ordered)
    first, late = (member.collectives for member in ordered)
    apart = (late.start[match[1]] - first.start[match[0]]) / 1e6
    offset = float(np.median((late.end[match[1]] - first.end[match[0]]) / 1e6))
    step = first.step[match[0]]
    return median(float(np.median(apart[step == one] - offset)) for one in sorted(set(step.tolist())))


def one_bucket() -> Iterator[str]:
    """All gradients in one bucket, through the host's memory."""
    run = runs()["one_bucket"]
    row, found = run.collectives[0], run.findings[0]
    assert (found.id, row.count) == ("large_buckets", 1)
    assert row.bytes is not None
    yield f"One bucket of {row.bytes / 2**20:.0f} MiB, sent through the host's memory"
    yield f"is reduced in {row.transfer_ms:.1f} ms, and nothing hides that time"
    saved = unprofiled_ms("one_bucket") - unprofiled_ms("usual_buckets")
    assert found.saves_ms_low <= saved <= found.saves_ms_high
    yield (
        f"Buckets of 25 MiB should save {found.saves_ms_low:.1f} to {found.saves_ms_high:.1f} ms, and save "
        f"{saved:.1f} ms"
    )
    usual = runs()["usual_buckets"]
    assert usual.ranks[0].exposed_transfer_ms is not None
    transfer_ms = sum(row.transfer_ms or 0.0 for row in usual.collectives)
    yield f"{usual.ranks[0].exposed_transfer_ms:.1f} ms of {transfer_ms:.1f} ms stay exposed"


def bandwidth() -> Iterator[str]:
    """How fast the links are."""

    def fastest(name: str) -> float:
        return max(row.bus_bytes_per_s or 0.0 for row in runs()[name].collectives) / 1e9

    yield (
        f"{fastest('one_bucket'):.0f} GB/s through the host's memory, and up to {fastest('fsdp'):.0f} GB/s over NVLink"
    )


def sharing() -> Iterator[str]:
    """What the other ways of sharing the work wait for."""
    fsdp, tensor, pipeline = (runs()[name] for name in ("fsdp", "tensor", "pipeline"))
    # One of its ranks is ahead of the other, whose launches take no less of the CPU: nothing is to be saved there.
    assert not any(one.id == "late_rank" for one in tensor.findings)
    yield f"FSDP2 has {sum(row.count for row in fsdp.collectives):.0f} collectives a step"
    count = sum(row.count for row in tensor.collectives)
    exposed = max(one.exposed_transfer_ms or 0.0 for one in tensor.ranks)
    yield f"Tensor parallel has {count:.0f} all-reduces a step, and nothing hides their {exposed:.1f} ms"
    waits = [one.exposed_waiting_ms or 0.0 for one in pipeline.ranks]
    step = max(one.step_ms.median or 0.0 for one in pipeline.ranks)
    yield f"The stages of the pipeline wait {min(waits):.0f} and {max(waits):.0f} ms of a step of {step:.0f} ms"
