"""Tests what ranks that are replayed together show: unequal work, repeated reductions, and what limits a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.inputs.gather import gather
from tests.support.export import global_tid
from tests.support.ranks import own_captures, write

US = 1_000
#: The time from the start of a pass to its kernel, and from the end of a pass to the next one.
_BEGIN, _END = 20 * US, 10 * US


def run_of(
    folder: Path, work_us: Sequence[int], reductions_us: Sequence[int | None] = (50,), flops: Sequence[int] = (),
    *, megabytes: Sequence[int] = (50, 50, 50),
) -> ParallelRun:  # fmt: skip
    """Joins ranks whose passes compute for so many µs on each rank, then reduce for so many µs, then wait for the GPU.

    A pass takes 20 µs until its kernel begins, the longest work of a rank, the reduction, and 10 µs. Each pass is a
    backward pass, and a step has as many passes as ``reductions_us`` has entries (None: no reduction).
    """
    ranks, at = own_captures(len(work_us)), 0
    for number in range(4):
        begin = at
        for reduction_us, megabyte_count in zip(reductions_us, megabytes, strict=False):
            ends = [at + _BEGIN + us * US for us in work_us]
            end = max(ends) + (reduction_us or 0) * US
            for rank, kernel_end in zip(ranks, ends, strict=True):
                rank.step(at, end + _END, "backward").kernel(at + _BEGIN, kernel_end, at + 10 * US)
                if reduction_us:
                    size = megabyte_count * 10**6
                    rank.collective("all-reduce", kernel_end, end, at + 15 * US, size=size, stream=7)
                rank.export.add(
                    "CUPTI_ACTIVITY_KIND_RUNTIME", start=at + 17 * US, end=end + 2 * US, correlationId=10**6 + at,
                    globalTid=global_tid(rank.pid, rank.pid), returnValue=0,
                    nameId=rank.export.string("cudaDeviceSynchronize_v3020"),
                )  # fmt: skip
            at = end + _END + US
        for rank in ranks:
            rank.step(begin, at, f"step {number}")
    paths = write(ranks, folder)
    for number, count in enumerate(flops):
        counted = {"passes": {"backward": 1}, "classes": {"backward": {"matmul": count}}}
        manifest = {"rank": number, "batch_size": 1, "context_length": count, "flops": counted}
        (folder / f"rank{number}.manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (run,) = gather(paths).runs
    return run


def test_ranks_with_unequal_work(tmp_path: Path) -> None:
    """Rank 0 computes for 300 µs and rank 1 for 450: with 375 µs each, a step of 531 µs is 75 µs shorter."""
    run = run_of(tmp_path, (300, 450), flops=(3000, 4500))
    assert run.unequal_work
    assert [rank.tokens for rank in run.unequal_work] == [4500, 3000]
    assert run.replayed
    assert run.replayed.equal_work_ms == pytest.approx((0.075, 0.075), abs=0.002)
    (finding,) = (finding for finding in run.findings if finding.id == "unequal_work")
    assert (finding.saves_ms_low, finding.saves_ms_high) == pytest.approx((0.9 * 0.075, 1.1 * 0.075), abs=0.002)
    assert not any(finding.id == "late_rank" for finding in run.findings)


@pytest.mark.parametrize(
    ("work_us", "flops"),
    [
        ((300, 300), (3000, 3000)),
        ((300, 450), (3000, 3000)),  # one GPU is slower
        ((300, 300), (3000, 4500)),  # the counted step is not like the others
        ((300, 450), ()),  # nothing was counted
    ],
)
def test_ranks_without_unequal_work(tmp_path: Path, work_us: Sequence[int], flops: Sequence[int]) -> None:
    run = run_of(tmp_path, work_us, flops=flops)
    assert run.unequal_work is None
    assert not any(finding.id == "unequal_work" for finding in run.findings)


def test_a_reduction_that_is_repeated_is_removed_in_the_replay(tmp_path: Path) -> None:
    """The reductions of the first two of three passes take 50 µs each, and no work hides them: 100 µs are saved.

    The launch of a reduction takes 2 µs, which the GPU's work hides.
    """
    run = run_of(tmp_path, (200, 200), (50, 50, 50))
    assert run.reductions == 3
    assert run.replayed
    assert run.replayed.reduced_once_ms == pytest.approx((0.1, 0.1), abs=0.006)
    (finding,) = (finding for finding in run.findings if finding.id == "repeated_reductions")
    assert (finding.saves_ms_low, finding.saves_ms_high) == pytest.approx((0.071, 0.129), abs=0.008)


def test_a_reduction_in_the_last_pass_only(tmp_path: Path) -> None:
    run = run_of(tmp_path, (200, 200), (None, None, 50))
    assert run.replayed
    assert run.replayed.reduced_once_ms is None
    assert not any(finding.id == "repeated_reductions" for finding in run.findings)


def test_what_limits_the_replayed_step(tmp_path: Path) -> None:
    """On the critical path, 200 µs are a kernel, 50 µs its reduction, and 10 µs the CPU's time before the launch."""
    run = run_of(tmp_path, (200, 200))
    assert run.replayed
    limits = run.replayed.limits
    assert list(limits) == ["work of the GPU", "communication", "launching", "other CPU work"]
    assert list(limits.values()) == pytest.approx([200 / 260, 50 / 260, 10 / 260, 0], abs=0.02)


def test_the_attainable_time_of_a_collective(tmp_path: Path) -> None:
    """The larger message of 50 MB takes 50 µs: 1 TB/s. At this bandwidth, 1 MB takes 1 µs, not 10 µs.

    Rank 0 waits for rank 1 for 20 µs in each, which is no part of the transfer.
    """
    run = run_of(tmp_path, (180, 200), (50, 10), megabytes=(50, 1))
    large, small = sorted(run.collectives, key=lambda row: -(row.bytes or 0))
    assert (large.transfer_ms, large.attainable_ms) == pytest.approx((0.05, 0.05), rel=0.01)
    assert (small.transfer_ms, small.attainable_ms) == pytest.approx((0.01, 0.001), rel=0.01)
