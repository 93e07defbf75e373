"""Tests what ranks that are replayed together show: unequal work, repeated reductions, and what limits a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.finding_texts import write_run_texts
from tests.support.export import global_tid
from tests.support.program import WAIT
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


# --- collectives that could run beside other work


def run_of_layers(
    folder: Path, transfers_us: Sequence[int], megabytes: Sequence[int], *, work_us: int = 100, gathers: bool = False,
    waits: bool = True,
) -> ParallelRun:  # fmt: skip
    """Joins two ranks whose steps have a kernel and a collective for each layer, on two streams.

    The collective is an all-gather before the kernel, or else the reduction of a bucket after it. If ``waits``, an
    all-gather begins when the kernel of the layer before has ended. All is launched 2 µs apart, so the GPU limits the
    ranks. At its end, each of four steps waits for the GPU.
    """
    ranks, at = own_captures(2), 0
    for number in range(4):
        launched, kernel_end, transfer_end = at + 10 * US, at + 30 * US, at + 30 * US
        for transfer_us, size in zip(transfers_us, megabytes, strict=True):
            if gathers:
                transfer_start = max(transfer_end, kernel_end if waits else 0)
                kernel_start = max(kernel_end, transfer_start + transfer_us * US)
            else:
                kernel_start, transfer_start = kernel_end, max(kernel_end + work_us * US, transfer_end)
            kernel_end, transfer_end = kernel_start + work_us * US, transfer_start + transfer_us * US
            for rank in ranks:
                rank.kernel(kernel_start, kernel_end, launched + (2 * US if gathers else 0))
                kind, launch = ("all-gather", launched) if gathers else ("all-reduce", launched + 2 * US)
                rank.collective(kind, transfer_start, transfer_end, launch, size=size << 20, stream=20)
                for waiting_launch in [launched] * (gathers and waits) + [launched + 2 * US]:
                    rank.export.call(WAIT, waiting_launch - US, rank.pid, rank.pid)
            launched += 4 * US
        end = max(kernel_end, transfer_end)
        for rank in ranks:
            rank.step(at + US, launched, "forward" if gathers else "backward")
            if gathers:
                rank.step(launched, launched + 5 * US, "backward")
                rank.export.call(WAIT, launched + US, rank.pid, rank.pid)
                rank.collective("reduce-scatter", end, end + 4 * US, launched + 2 * US, stream=20)
            rank.export.add(
                "CUPTI_ACTIVITY_KIND_RUNTIME", start=launched + 4 * US, end=end + 6 * US, correlationId=10**6 + at,
                globalTid=global_tid(rank.pid, rank.pid), returnValue=0,
                nameId=rank.export.string("cudaDeviceSynchronize_v3020"),
            )  # fmt: skip
            rank.step(at, end + 20 * US, f"step {number}")
        at = end + 20 * US
    (run,) = gather(write(ranks, folder)).runs
    return run


def saving_of(run: ParallelRun, finding_id: str) -> tuple[float, float] | None:
    """Returns the bounds of a finding's saving; None if there is no such finding."""
    found = [finding for finding in run.findings if finding.id == finding_id]
    return (found[0].saves_ms_low, found[0].saves_ms_high) if found else None


def test_all_gathers_that_begin_only_after_the_computation_before_them(tmp_path: Path) -> None:
    """Four all-gathers of 50 µs each precede kernels of 100 µs. All but the first could run beside a kernel: 150 µs."""
    run = run_of_layers(tmp_path, (50, 50, 50, 50), (8, 8, 8, 8), gathers=True)
    assert saving_of(run, "late_gather") == pytest.approx((0.9 * 0.15, 1.1 * 0.15), abs=0.006)
    (finding,) = write_run_texts(run).findings
    assert finding.title == "Parameters are gathered only after the computation before it"
    assert "all-gathers of 8.0" in finding.evidence[0]


def test_all_gathers_that_run_beside_the_computation_before_them(tmp_path: Path) -> None:
    run = run_of_layers(tmp_path, (50, 50, 50, 50), (8, 8, 8, 8), gathers=True, waits=False)
    assert saving_of(run, "late_gather") is None


def test_a_large_bucket_at_the_end_of_backward(tmp_path: Path) -> None:
    """A bucket of 200 MiB takes 160 µs after backward: with buckets of 25 MiB, one to three of eight stay, 20 to 60 µs.

    So 100 to 140 µs are saved, minus 35 % of 140 µs at least, because hidden buckets slow backward down.
    """
    run = run_of_layers(tmp_path, (10, 10, 10, 160), (25, 25, 25, 200))
    expected = (0.9 * (0.1 - 0.35 * 0.14), 1.1 * 0.14)
    assert saving_of(run, "large_buckets") == pytest.approx(expected, abs=0.006)


def test_the_last_bucket_is_exposed(tmp_path: Path) -> None:
    """The last bucket takes 80 µs after backward. In four parts, 20 to 60 µs of them are hidden."""
    run = run_of_layers(tmp_path, (20, 20, 20, 80), (25, 25, 25, 40))
    assert saving_of(run, "exposed_bucket") == pytest.approx((0.9 * 0.02, 1.1 * 0.06), abs=0.004)


def test_buckets_that_backward_hides(tmp_path: Path) -> None:
    """The last bucket takes 8 µs of a step of about 430, of which at most 6 would be saved."""
    assert run_of_layers(tmp_path, (80, 80, 80, 8), (25, 25, 25, 25)).findings == ()


def test_small_buckets(tmp_path: Path) -> None:
    """Seven buckets of 1 MiB take 30 µs each, and one of 30 MiB takes 40, so that 1 MiB needs 1.3 µs of bandwidth.

    The transfers end 20 + 7 · 30 + 40 = 270 µs after the first kernel begins. Joined, the bucket of 37 MiB begins after
    8 · 20 µs of kernels and takes 40 to 40 + 7 · 1.3 µs: 61 to 70 µs are saved.
    """
    run = run_of_layers(tmp_path, (*[30] * 7, 40), (*[1] * 7, 30), work_us=20)
    assert saving_of(run, "small_buckets") == pytest.approx((0.9 * 0.061, 1.1 * 0.07), abs=0.006)
