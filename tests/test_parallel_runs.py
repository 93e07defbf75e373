"""Several ranks of one run: worked examples, each with its arithmetic."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranks.join import runs_of
from nsys_analyzer.analysis.ranks.run import CollectiveFigures, ParallelRun
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.text import plain
from tests.support.export import Export
from tests.support.ranks import (
    KERNELS,
    WORLD,
    Noted,
    Rank,
    joined,
    one_capture,
    own_captures,
    summaries,
    with_schemas,
    write,
)

US = 1_000
STEP = 1_000 * US
#: What makes up a run: its ranks in one capture, or each in its own.
Ranks = Callable[..., list[Rank]]
both_ways = pytest.mark.parametrize("made", [one_capture, own_captures])
OTHER = 77  # a communicator


def steps(
    ranks: Sequence[Rank], numbers: Sequence[int] = range(3), name: str = "step", phase: str = "backward"
) -> Sequence[tuple[int, Rank]]:
    """The begin of each step of each rank, of 1,000 µs, one behind the other; all but 20 µs of it is in one phase."""
    begun = []
    for number in numbers:
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + STEP, name.format(number)).step(at + 10 * US, at + STEP - 10 * US, phase)
            begun.append((at, rank))
    return begun


def ddp(ranks: Sequence[Rank], numbers: Sequence[int] = range(3), name: str = "step", **collective: Any) -> list[Rank]:
    """DDP of two ranks, the second one late by 100 µs, in µs of a step.

    rank 0: compute [20, 200), collective [200, 400) of which it waits until 300, compute [420, 500)
    rank 1: compute [20, 300), collective [300, 400),                              compute [420, 500)
    """
    for at, rank in steps(ranks, numbers, name):
        ready = at + (200 + 100 * rank.number) * US
        rank.kernel(at + 20 * US, ready).collective("all-reduce", ready, at + 400 * US, **collective)
        rank.kernel(at + 420 * US, at + 500 * US)
    return list(ranks)


def us(ms: float | None) -> float | None:
    return None if ms is None else round(ms * 1000, 6)


def figures(run: ParallelRun, *names: str) -> list[tuple[float | None, ...]]:
    """Some figures of each rank, µs of a step; of statistics the median."""
    found = [[getattr(rank, f"{name}_ms") for name in names] for rank in run.ranks]
    return [tuple(us(getattr(value, "median", value)) for value in row) for row in found]


def notes(run: ParallelRun) -> list[str]:
    return [plain(note, "`") for note in run.notes]


# --- two ranks, one of which is late


@both_ways
@pytest.mark.parametrize("noted", ["json", "binary"])
def test_two_ranks_of_which_one_is_late(made: Ranks, noted: Noted, tmp_path: Path) -> None:
    """Compute 180 + 80 and 280 + 80 µs, communication 200 and 100, the rest of 1,000 is idle: 540 on both."""
    run = joined(ddp(made(2, noted)), tmp_path)
    names = "step", "compute", "exposed_copy", "communication", "exposed_communication", "idle"
    assert figures(run, *names) == [(1000, 260, 0, 200, 200, 540), (1000, 360, 0, 100, 100, 540)]
    # Rank 0 waits from 200 to 300; both transfer from 300 to 400.
    names = "waiting", "transfer", "exposed_waiting", "exposed_transfer"
    assert figures(run, *names) == [(100, 100, 100, 100), (0, 100, 0, 100)]
    # Without waiting the steps take 900 and 1,000.
    assert figures(run, "own", "late") == [(900, 0), (1000, 100)]
    assert (run.slowest, run.fastest, us(run.skew_ms)) == (1, 0, 100)
    assert [rank.slowest_steps for rank in run.ranks] == [0, 3]
    assert (run.steps, run.world_size, run.missing) == (3, 2, ())
    assert run.strategies == ("data parallel (DDP)",)
    assert notes(run) == []


@both_ways
def test_where_the_late_rank_loses_its_time(made: Ranks, tmp_path: Path) -> None:
    """Rank 1 computes 100 µs more in backward, with matmuls: all of the 100 µs by which the own times differ."""
    run = joined(ddp(made(2)), tmp_path)
    parts = {(row.phase, row.part): us(row.ms) for row in run.lost if us(row.ms)}
    assert parts == {("backward", "compute"): 100}
    assert run.lost[0].kernel_class == "matmul"
    assert us(sum(row.ms for row in run.lost)) == 100


def test_the_losses_add_up(tmp_path: Path) -> None:
    """Rank 1 computes 60 µs more in backward, idles 30 µs more in forward, copies 20 µs more and transfers 10 µs more.

    rank 0: forward [50, 100),  copy [300, 310), backward [310, 350), collective [350, 500), 120 of them waiting
    rank 1: forward [80, 130),  copy [330, 360), backward [360, 460), collective [470, 510), none of them waiting
    """
    ranks = one_capture(2)
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + STEP).step(at + 10 * US, at + 300 * US, "forward")
            rank.step(at + 300 * US, at + 900 * US, "backward")
            late = 30 * US * rank.number
            rank.kernel(at + 50 * US + late, at + 100 * US + late, at + 20 * US)
            copied = at + (310 + 50 * rank.number) * US
            rank.copy(at + 300 * US + late, copied, at + 301 * US if not late else None)
            computed = copied + (40 + 60 * rank.number) * US
            rank.kernel(copied, computed, at + 305 * US)
            begun = computed + 10 * US * rank.number
            rank.collective("all-reduce", begun, at + (500 + 10 * rank.number) * US, at + 306 * US)
    run = joined(ranks, tmp_path)
    # own: 1000 - 120, and 1000 - 0
    assert figures(run, "own", "exposed_waiting", "exposed_transfer") == [(880, 120, 30), (1000, 0, 40)]
    assert us(run.skew_ms) == 120
    parts = {(row.phase, row.part): us(row.ms) for row in run.lost if us(row.ms)}
    assert (parts["backward", "compute"], parts["backward", "copies"], parts["", "transferring"]) == (60, 20, 10)
    # Forward begins 30 later. Behind the collective there is 10 less, which the next step's forward ends, but in the
    # last one of three steps nothing does. The collective starts 10 after its compute.
    assert parts["forward", "idle"] == pytest.approx(30 - 10 * 2 / 3)
    assert parts["outside the phases", "idle"] == pytest.approx(-10 / 3)
    assert parts["backward", "idle"] == 10
    assert sum(parts.values()) == pytest.approx(120)


@both_ways
def test_hidden_waiting_costs_nothing(made: Ranks, tmp_path: Path) -> None:
    """Rank 0's collective [100, 400) waits until 300; compute [20, 250) hides 150 of it.

    Waiting 200, of which [250, 300) is exposed; transferring 100, all exposed.
    """
    ranks = made(2)
    for at, rank in steps(ranks):
        rank.kernel(at + 20 * US, at + (250, 300)[rank.number] * US)
        rank.collective("all-reduce", at + (100, 300)[rank.number] * US, at + 400 * US)
    run = joined(ranks, tmp_path)
    names = "communication", "exposed_communication", "waiting", "transfer", "exposed_waiting", "exposed_transfer"
    assert figures(run, *names) == [(300, 150, 200, 100, 50, 100), (100, 100, 0, 100, 0, 100)]
    assert figures(run, "own") == [(950,), (1000,)]


def test_copies_come_before_communication(tmp_path: Path) -> None:
    """Copy [350, 450) over collective [300, 400): 100 of copy are exposed, and 50 of communication."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        rank.collective("all-reduce", at + 300 * US, at + 400 * US).copy(at + 350 * US, at + 450 * US)
    run = joined(ranks, tmp_path)
    names = "exposed_copy", "communication", "exposed_communication", "idle"
    assert figures(run, *names) == [(100, 100, 50, 850)] * 2


def test_who_is_slowest_from_step_to_step(tmp_path: Path) -> None:
    """Late by 40 µs in turn: rank 0 in steps 0, 2 and 4, rank 1 in 1 and 3; the median of its own time is 1,000."""
    ranks = one_capture(2)
    for at, rank in steps(ranks, range(5)):
        late = (at // STEP) % 2 == rank.number
        rank.collective("all-reduce", at + (240 if late else 200) * US, at + 300 * US)
    run = joined(ranks, tmp_path)
    assert [rank.slowest_steps for rank in run.ranks] == [3, 2]
    assert run.slowest == 0
    assert figures(run, "own", "late") == [(1000, 40), (960, 0)]


def test_of_three_ranks_all_wait_for_the_last(tmp_path: Path) -> None:
    """Starts at 200, 250 and 320: the first ranks wait 120 and 70."""
    ranks = one_capture(3)
    for at, rank in steps(ranks):
        rank.collective("all-reduce", at + (200, 250, 320)[rank.number] * US, at + 400 * US)
    run = joined(ranks, tmp_path)
    assert figures(run, "waiting", "transfer", "late") == [(120, 80, 0), (70, 80, 50), (0, 80, 120)]
    assert (run.slowest, us(run.skew_ms)) == (2, 120)


# --- collectives


def collective(run: ParallelRun) -> CollectiveFigures:
    (only,) = run.collectives
    return only


#: Bytes that pass each rank's link, of a message of 1,000,000 bytes as NCCL counts it among 4 ranks (nccl-tests).
LINKS = {
    "all-reduce": 2 * 3 / 4 * 1e6,  # of the whole: each rank sends and receives all but its own part twice
    "all-gather": 3 * 1e6,  # of one rank: the parts of the three others come in
    "reduce-scatter": 3 * 1e6,  # of one rank: the same the other way
    "all-to-all": 3 * 1e6,  # of two ranks: to each of the three others
    "broadcast": 1e6,
    "reduce": 1e6,
}


@both_ways
@pytest.mark.parametrize(("kind", "link"), LINKS.items())
def test_bus_bandwidth(made: Ranks, kind: str, link: float, tmp_path: Path) -> None:
    """In 100 µs of transferring; rank 0 starts 50 µs before the others, which is no time of the link."""
    ranks = made(4)
    kernel = KERNELS.get(kind, KERNELS["send/receive"])  # NCCL sends and receives for an all-to-all
    for at, rank in steps(ranks):
        start = at + (200 if rank.number else 150) * US
        rank.collective(kind, start, at + 300 * US, size=1_000_000, kernel=kernel)
    row = collective(joined(ranks, tmp_path))
    assert (row.kind, row.phase, row.bytes, row.ranks, row.count) == (kind, "backward", 1_000_000, 4, 1)
    assert row.bus_bytes_per_s == pytest.approx(link / 100e-6)
    assert us(row.transfer_one_ms.median) == 100
    assert (us(row.waiting_ms), us(row.transfer_ms)) == (50 / 4, 100)  # mean of four ranks, one of which waits


def test_an_exchange_passes_its_larger_way(tmp_path: Path) -> None:
    """A send of 1 MB and a receive of 1 MB at the same time: 1 MB in 100 µs."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        peers = [1 - rank.number] * 2
        rank.collective("send/receive", at + 200 * US, at + 300 * US, size=1_000_000, peers=peers)
    row = collective(joined(ranks, tmp_path))
    assert (row.bytes, row.bus_bytes_per_s) == (1_000_000, pytest.approx(1e6 / 100e-6))


def test_collectives_by_kind_phase_and_size(tmp_path: Path) -> None:
    """Three sizes and kinds: two of 64 KiB, one of 1 MiB, a broadcast, each of 10 µs."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        for place, (kind, size) in enumerate((("all-reduce", 16), ("all-reduce", 16), ("all-reduce", 20))):
            rank.collective(kind, at + (100 + 20 * place) * US, at + (110 + 20 * place) * US, size=1 << size)
        rank.collective("broadcast", at + 300 * US, at + 310 * US, size=8)
    rows = {(row.kind, row.bytes): (row.count, us(row.transfer_ms)) for row in joined(ranks, tmp_path).collectives}
    assert rows == {
        ("all-reduce", 1 << 16): (2, 20),
        ("all-reduce", 1 << 20): (1, 10),
        ("broadcast", 8): (1, 10),
    }


def test_two_communicators_of_as_many_ranks_count_together(tmp_path: Path) -> None:
    """One all-reduce of the same size on either communicator: two a step of each rank, 20 µs of transferring."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        rank.collective("all-reduce", at + 100 * US, at + 110 * US)
        rank.collective("all-reduce", at + 200 * US, at + 210 * US, communicator=OTHER, stream=21)
    row = collective(joined(ranks, tmp_path))
    assert (row.count, us(row.transfer_ms), row.duration_ms.n) == (2, 20, 12)


def test_sizes_that_nobody_noted(tmp_path: Path) -> None:
    row = collective(joined(ddp(one_capture(2, "none")), tmp_path))
    assert (row.bytes, row.bus_bytes_per_s, us(row.transfer_ms)) == (None, None, 100)


# --- clocks


@pytest.mark.parametrize(("offset", "drift"), [(0, 0.0), (7_000_123, 0.0), (5_000_000, 2e-5), (10**15, -1e-4)])
def test_a_clock_that_is_ahead_and_drifts(offset: int, drift: float, tmp_path: Path) -> None:
    """Ends agree to ±0.3 µs (from -300 to 300 ns in turn); rank 1 starts 100 µs after rank 0, on one clock.

    In the middle of 41 steps, at 20.4 ms, a clock that drifts by 2e-5 is ahead by 408 ns more than at the start. It is
    found to half a µs: the ends' own error.
    """
    ranks = own_captures(2, offsets=[0, offset], drifts=[0, drift])
    for at, rank in steps(ranks, range(41)):
        jitter = ((at // STEP) * 7 % 13 - 6) * 50 * rank.number
        rank.collective("all-reduce", at + (200 + 100 * rank.number) * US, at + 400 * US + jitter)
    run = joined(ranks, tmp_path)
    assert run.alignment is not None
    assert (run.alignment.one_clock, run.alignment.collectives) == (False, 41)
    assert run.alignment.spread_ms <= 0.0005
    assert run.ranks[1].offset_ms == pytest.approx((offset + drift * 20.4e6) / 1e6, abs=0.0005)
    assert run.ranks[0].waiting_ms == pytest.approx(0.100, abs=0.0005)  # drift left alone would add up to ±2 µs
    assert run.ranks[1].waiting_ms == pytest.approx(0, abs=0.0005)
    if drift:
        assert [us(one.late_ms.std) for one in run.ranks if one.late_ms] == pytest.approx([0, 0], abs=0.6)


def test_absolute_times_of_the_captures_are_taken_off(tmp_path: Path) -> None:
    """The session of rank 1 began 3 ms after that of rank 0, and its clock is behind by 1 ms: 2 ms earlier by it.

    What happens at t on rank 0's clock happens at t - 3 ms after the start of rank 1's session, and 1 ms less by the
    host's clock: the session's start plus the time in it is behind by 1 ms.
    """
    ranks = own_captures(2, offsets=[0, -4_000_000])
    for rank, start in zip(ranks, (1_700_000_000_000_000_000, 1_700_000_000_003_000_000), strict=True):
        rank.export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=start)
    run = joined(ddp(ranks, range(5, 10)), tmp_path)
    assert run.ranks[1].offset_ms == pytest.approx(-1.0)
    assert figures(run, "waiting") == [(100,), (0,)]
    (note,) = notes(run)  # a step takes 1 ms: the clocks could as well agree, and the captures begin a step apart
    assert note.startswith("The captures' clocks are 1 ms apart, more than half a step.")


@pytest.mark.parametrize("noted", ["json", "binary"])
def test_one_capture_and_one_of_each_rank_say_the_same(noted: Noted, tmp_path: Path) -> None:
    """But for names, offsets and what is said of clocks."""

    def said(ranks: list[Rank], folder: str) -> tuple[object, ...]:
        (tmp_path / folder).mkdir()
        run = joined(ddp(ranks, range(2, 6)), tmp_path / folder)
        names = [
            name.removesuffix("_ms") for name in vars(run.ranks[0]) if name.endswith("_ms") and name != "offset_ms"
        ]
        return figures(run, *names), run.collectives, run.lost, run.slowest, run.skew_ms, run.strategies

    together = said(one_capture(2, noted), "together")
    assert said(own_captures(2, noted, offsets=[0, 123_456_789]), "apart") == together


# --- steps


@pytest.mark.parametrize(
    ("name", "first", "second", "common"),
    [
        # Rank 1's capture begins a step later; steps 4 to 6 are those of both.
        ("step {}", range(3, 7), range(4, 7), 3),
        ("ProfilerStep#{}", range(3, 7), range(4, 7), 3),
        ("step_{}", range(3, 7), range(4, 7), 3),
        # As many steps of other numbers: 1 and 2 are those of both.
        ("step {}", range(3), range(1, 4), 2),
        # Without numbers they are joined by place.
        ("step", range(3), range(4), 3),
    ],
)
def test_steps_are_joined_by_their_numbers(name: str, first: range, second: range, common: int, tmp_path: Path) -> None:
    """Rank 1 is late by 100 µs in each."""
    ranks = own_captures(2)
    ddp(ranks[:1], first, name)
    ddp(ranks[1:], second, name)
    run = joined(ranks, tmp_path)
    assert (run.steps, run.ranks[1].offset_ms) == (common, 0)
    assert figures(run, "waiting", "own") == [(100, 900), (0, 1000)]
    assert notes(run) == [
        f"The ranks have different steps (rank 0 has {len(first)}, rank 1 has {len(second)}): {common} of all are "
        "looked at."
    ]


def test_no_step_in_common(tmp_path: Path) -> None:
    """Each rank's own figures stay; nothing is said of who waits."""
    ranks = own_captures(2)
    ddp(ranks[:1], range(3), "step {}")
    ddp(ranks[1:], range(5, 8), "step {}")
    run = joined(ranks, tmp_path)
    assert (run.steps, run.slowest, run.skew_ms, run.alignment, run.collectives) == (0, None, None, None, ())
    assert figures(run, "step", "compute", "waiting", "own") == [(1000, 260, None, None), (1000, 360, None, None)]
    assert notes(run) == [
        "The ranks have no step of one number in common: each is shown by its own steps, and none compared."
    ]


def test_collectives_that_differ_in_a_step(tmp_path: Path) -> None:
    """Rank 1 has one more in step 1, where nobody is known to wait: all figures are those of the 2 other steps."""
    ranks = ddp(one_capture(2))
    ranks[1].collective("all-reduce", STEP + 600 * US, STEP + 610 * US)
    run = joined(ranks, tmp_path)
    assert figures(run, "step", "compute", "communication", "waiting", "transfer", "own") == [
        (1000, 260, 200, 100, 100, 900), (1000, 360, 100, 0, 100, 1000),
    ]  # fmt: skip
    assert (run.steps, [rank.slowest_steps for rank in run.ranks]) == (2, [0, 2])
    assert [[step.number for step in rank.steps] for rank in run.ranks] == [[0, 2]] * 2
    assert (collective(run).count, us(collective(run).waiting_ms)) == (1, 50)  # mean of 100 and 0
    assert notes(run) == ["The collectives of 1 step differ from rank to rank (step 1): it is left out of all figures."]


def test_kinds_that_differ_in_a_step(tmp_path: Path) -> None:
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        kind = "all-gather" if rank.number and at else "all-reduce"
        rank.collective(kind, at + (200 + 100 * rank.number) * US, at + 400 * US)
    run = joined(ranks, tmp_path)
    assert (run.steps, figures(run, "waiting")) == (1, [(100,), (0,)])
    assert notes(run) == [
        "The collectives of 2 steps differ from rank to rank (steps 1, 2): they are left out of all figures."
    ]


def test_collectives_that_differ_in_every_step(tmp_path: Path) -> None:
    """Each rank's own figures stay; nothing is said of who waits."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        kind = "all-gather" if rank.number else "all-reduce"
        rank.collective(kind, at + (200 + 100 * rank.number) * US, at + 400 * US)
    run = joined(ranks, tmp_path)
    assert (run.steps, run.slowest, run.alignment) == (3, None, None)
    assert figures(run, "communication", "waiting", "own") == [(200, None, None), (100, None, None)]
    assert {(row.kind, row.count, row.waiting_ms) for row in run.collectives} == {
        ("all-reduce", 1, None),
        ("all-gather", 1, None),
    }
    assert notes(run) == ["The collectives of every step differ from rank to rank, so nothing is known to wait."]


@both_ways
def test_what_is_between_two_steps_is_of_the_first(made: Ranks, tmp_path: Path) -> None:
    """Steps of 900 µs, and behind each an all-reduce of a loss, which ends in the next step.

    In µs of a step: launched at 950, it runs from 960 on rank 0 and from 1,020 on rank 1, and ends at 1,050. The steps
    of rank 0 but the last hold [960, 1000) of it and those but the first [0, 50), of which it waits until 20; those of
    rank 1 hold [20, 50). What is launched behind the last step no figure is of. The steps take 1,000, 1,000 and 900 µs,
    of which nothing is work: the median is 30 / 29 of the mean, which all parts are scaled by.
    """
    ranks = made(2)
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + 900 * US).step(at + 10 * US, at + 890 * US, "backward")
            rank.collective("all-reduce", at + 200 * US, at + 300 * US)
            behind = at + (1020 if rank.number else 960) * US
            rank.collective("all-reduce", behind, at + 1050 * US, at + 950 * US, size=4)
    ranks[1].collective("all-reduce", 3100 * US, 3110 * US, size=4)
    run = joined(ranks, tmp_path)
    parts = [(100 + 2 / 3 * (40 + 50), 2 / 3 * (40 + 20), 100 + 2 / 3 * 30), (100 + 2 / 3 * 30, 0, 100 + 2 / 3 * 30)]
    scaled = [tuple(us * 30 / 29 for us in row) for row in parts]
    assert figures(run, "communication", "waiting", "transfer") == [pytest.approx(row, abs=1e-5) for row in scaled]
    rows = [(row.bytes, row.phase, row.count) for row in run.collectives]
    assert sorted(rows) == [(4, "", pytest.approx(2 / 3)), (1 << 20, "backward", 1)]
    assert notes(run) == []


# --- several communicators


#: Of the four ranks: tensor parallel in pairs 0 1 and 2 3, data parallel in pairs 0 2 and 1 3.
TENSOR, DATA = (11, 11, 12, 12), (21, 22, 21, 22)


def tensor_and_data(ranks: Sequence[Rank]) -> list[Rank]:
    """In µs of a step, of rank r: forward's collective [100 + 20 r, 200), backward's [500 + 20 r, 600)."""
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + STEP).step(at + 10 * US, at + 400 * US, "forward")
            rank.step(at + 400 * US, at + 900 * US, "backward")
            late = 20 * US * rank.number
            ids = {"communicator": TENSOR[rank.number], "stream": 20}
            rank.collective("all-reduce", at + 100 * US + late, at + 200 * US, **ids)  # type: ignore[arg-type]
            ids = {"communicator": DATA[rank.number], "stream": 21}
            rank.collective("all-reduce", at + 500 * US + late, at + 600 * US, **ids)  # type: ignore[arg-type]
    return list(ranks)


@both_ways
def test_each_communicator_waits_for_its_own_ranks(made: Ranks, tmp_path: Path) -> None:
    """Tensor: 0 waits 20 for 1, and 2 waits 20 for 3. Data: 0 waits 40 for 2, and 1 waits 40 for 3."""
    run = joined(tensor_and_data(made(4)), tmp_path)
    assert figures(run, "waiting", "transfer") == [(60, 140), (40, 120), (20, 100), (0, 80)]
    assert set(run.strategies) == {"tensor parallel", "data parallel (DDP)"}
    rows = {row.phase: (row.ranks, row.count, us(row.waiting_ms)) for row in run.collectives}
    # a mean of 20, 0, 20 and 0; and of 40, 40, 0 and 0
    assert rows == {"forward": (2, 1, 10), "backward": (2, 1, 20)}
    assert run.alignment is not None
    assert run.alignment.collectives == 3  # one of each step with the rank that it is aligned with


def test_unnamed_communicators_of_many_ranks_are_said_to_be_of_all(tmp_path: Path) -> None:
    run = joined(tensor_and_data(one_capture(4, "none")), tmp_path)
    (note,) = notes(run)
    assert "each collective is taken to be of all 4 ranks, which is wrong where groups of them have their own" in note


# --- pipelines


def pipeline(ranks: Sequence[Rank], *, peers: bool = True) -> list[Rank]:
    """A forward pass through stages, in µs of a step: stage r computes [100 r + 20, 100 r + 100).

    It sends to the next one in [100 r + 100, 100 r + 120), which has waited to receive since 10.
    """
    for at, rank in steps(ranks, phase="forward"):
        stage, last = rank.number, len(ranks) - 1
        turn = at + 100 * stage * US
        if stage:
            named = {"peers": [stage - 1]} if peers else {}
            rank.collective("send/receive", at + 10 * US, turn + 20 * US, **named, size=1 << 16)  # type: ignore[arg-type]
        rank.kernel(turn + 20 * US, turn + 100 * US, at + 15 * US)
        if stage < last:
            named = {"peers": [stage + 1]} if peers else {}
            rank.collective(
                "send/receive", turn + 100 * US, turn + 120 * US, at + 16 * US, **named, size=1 << 16  # type: ignore[arg-type]
            )  # fmt: skip
    return list(ranks)


@both_ways
def test_a_pipeline_of_two_stages(made: Ranks, tmp_path: Path) -> None:
    """The second stage waits from 10 to 100, when the first one sends; both transfer until 120."""
    run = joined(pipeline(made(2)), tmp_path)
    assert figures(run, "waiting", "transfer", "compute") == [(0, 20, 80), (90, 20, 80)]
    assert run.strategies == ("pipeline parallel",)


@both_ways
def test_a_pipeline_of_three_stages(made: Ranks, tmp_path: Path) -> None:
    """The third one waits from 10 to 200. The second receives for 20 and sends for 20."""
    run = joined(pipeline(made(3)), tmp_path)
    assert figures(run, "waiting", "transfer") == [(0, 20), (90, 40), (190, 20)]


def test_two_stages_need_no_peers(tmp_path: Path) -> None:
    run = joined(pipeline(one_capture(2, "none")), tmp_path)
    assert figures(run, "waiting", "transfer") == [(0, 20), (90, 20)]


def test_three_stages_without_peers_are_not_guessed(tmp_path: Path) -> None:
    run = joined(pipeline(one_capture(3, "none")), tmp_path)
    assert figures(run, "waiting", "own") == [(None, None)] * 3
    assert notes(run) == ["No collective of a rank can be told to be one of another rank, so nothing is known to wait."]


# --- several GPUs in one process


def test_several_gpus_in_one_process(tmp_path: Path) -> None:
    """Two devices of one process, one all-reduce of both: device 0 waits 100 µs for device 1."""
    export = with_schemas(Export())
    first, second = Rank(0, export, device=0), Rank(0, export, device=1)
    for at, _ in steps([first]):
        first.call("ncclGroupStart", at + 50 * US)
        for rank in (first, second):
            rank.call("ncclAllReduce", at + (51 + rank.device) * US, 1_000_000)
        first.call("ncclGroupEnd", at + 53 * US)
        for rank in (first, second):
            start, launch = at + (200 + 100 * rank.device) * US, at + (54 + rank.device) * US
            rank.kernel(start, at + 400 * US, launch, KERNELS["all-reduce"], 20)
    run = joined([first, second], tmp_path)
    assert [(rank.label, rank.device) for rank in run.ranks] == [("device 0", 0), ("device 1", 1)]
    assert run.strategies == ("several GPUs in one process",)
    assert figures(run, "waiting", "transfer") == [(100, 100), (0, 100)]
    assert collective(run).bus_bytes_per_s == pytest.approx(1e6 / 100e-6)  # 2 × 1/2 × 1 MB


def test_a_device_without_a_collective(tmp_path: Path) -> None:
    """Of two devices of one process one runs an all-reduce, the other one computes alone: nobody is known to wait."""
    export = with_schemas(Export())
    first, second = Rank(0, export, device=0), Rank(0, export, device=1)
    for at, rank in steps([first]):
        rank.collective("all-reduce", at + 200 * US, at + 300 * US)
        second.kernel(at + 200 * US, at + 250 * US)
    run = joined([first, second], tmp_path)
    assert figures(run, "compute", "communication", "waiting") == [(0, 100, None), (50, 0, None)]
    assert (collective(run).count, us(collective(run).duration_ms.mean)) == (1, 100)
    assert notes(run) == ["No collective of a rank can be told to be one of another rank, so nothing is known to wait."]


# --- strategies


#: Kind and phase of the collectives of a step.
PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "data parallel (DDP)": (("broadcast", "forward"), ("all-reduce", "backward"), ("all-reduce", "backward")),
    "fully sharded (FSDP)": (("all-gather", "forward"), ("all-gather", "backward"), ("reduce-scatter", "backward")),
    "tensor parallel": (("all-reduce", "forward"), ("all-reduce", "backward")),
    "tensor parallel, with its sequence": (
        ("all-gather", "forward"), ("reduce-scatter", "forward"), ("all-gather", "backward"),
        ("reduce-scatter", "backward"),
    ),
    "pipeline parallel": (("send/receive", "forward"), ("send/receive", "backward")),
    "sharded optimizer (ZeRO)": (("reduce-scatter", "backward"), ("all-gather", "optimizer")),
    "expert parallel": (("all-to-all", "forward"), ("all-to-all", "forward"), ("all-to-all", "backward")),
}  # fmt: skip


def patterned(ranks: Sequence[Rank], pattern: Sequence[tuple[str, str]], size: int = 1 << 20) -> list[Rank]:
    phases = {"forward": 0, "backward": 300, "optimizer": 600}
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + STEP)
            for phase, begun in phases.items():
                rank.step(at + begun * US, at + (begun + 300) * US, phase)
                for place, kind in enumerate([kind for kind, where in pattern if where == phase]):
                    start = at + (begun + 20 + 50 * place) * US
                    kernel = KERNELS.get(kind, KERNELS["send/receive"])
                    rank.collective(kind, start, start + 30 * US, size=size, kernel=kernel, peers=[1 - rank.number])
    return list(ranks)


@both_ways
@pytest.mark.parametrize(("strategy", "pattern"), PATTERNS.items())
def test_the_pattern_of_collectives_names_the_strategy(
    made: Ranks, strategy: str, pattern: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    run = joined(patterned(made(2), pattern), tmp_path)
    assert run.strategies == (strategy,)
    assert figures(run, "waiting") == [(0,), (0,)]


@both_ways
@pytest.mark.parametrize("count", [2, 4])
def test_an_all_to_all_of_sends_and_receives(made: Ranks, count: int, tmp_path: Path) -> None:
    """As PyTorch launches it: a send to and a receive from every rank, itself among them, each of 1 MB.

    In 100 µs, 1 MB passes to each of the other ranks. Rank 0 waits for 50 µs.
    """
    ranks = made(count)
    for at, rank in steps(ranks, phase="forward"):
        start = at + (200 if rank.number else 150) * US
        peers = [peer for peer in range(count) for _ in ("send", "receive")]
        rank.collective("send/receive", start, at + 300 * US, size=1_000_000, peers=peers)
    run = joined(ranks, tmp_path)
    row = collective(run)
    assert run.strategies == ("expert parallel",)
    assert (row.kind, row.bytes, row.bus_bytes_per_s) == (
        "all-to-all",
        1_000_000,
        pytest.approx((count - 1) * 1e6 / 100e-6),
    )
    assert figures(run, "waiting") == [(50,), *[(0,)] * (count - 1)]


def test_a_stage_that_exchanges_with_both_neighbours_is_of_a_pipeline(tmp_path: Path) -> None:
    """The middle one of three, alone: its kernels have one peer or two, but never itself."""
    (rank,) = own_captures(3)[1:2]
    for at, _ in steps([rank]):
        rank.collective("send/receive", at + 100 * US, at + 200 * US, peers=[0])
        rank.collective("send/receive", at + 300 * US, at + 400 * US, peers=[0, 2])
    assert joined([rank], tmp_path).strategies == ("pipeline parallel",)


def test_a_loss_that_is_averaged_is_no_strategy(tmp_path: Path) -> None:
    """An all-reduce of 4 bytes in forward beside DDP's."""
    ranks = patterned(one_capture(2), PATTERNS["data parallel (DDP)"])
    for number in range(3):
        for rank in ranks:
            rank.collective("all-reduce", number * STEP + 250 * US, number * STEP + 255 * US, size=4)
    assert joined(ranks, tmp_path).strategies == ("data parallel (DDP)",)


# --- what does not belong together


def test_a_missing_rank(tmp_path: Path) -> None:
    """Of one capture alone nothing is known to wait."""
    (run,) = runs_of(summaries(write(ddp(own_captures(2))[:1], tmp_path)))
    assert (run.missing, run.world_size, run.slowest) == ((1,), 2, None)
    assert figures(run, "exposed_communication", "waiting", "own") == [(200, None, None)]
    assert notes(run) == ["No capture is of rank 1: who waits for it is unknown."]


def test_some_of_many_ranks(tmp_path: Path) -> None:
    """Ranks 0 and 2 of four: one waits for the other at least; bandwidth is not said, for who comes last is unknown."""
    ranks = own_captures(4)
    for at, rank in steps(ranks):
        rank.collective("all-reduce", at + (200 + 20 * rank.number) * US, at + 400 * US)
    (run,) = runs_of(summaries(write([ranks[0], ranks[2]], tmp_path)))
    assert figures(run, "waiting", "transfer") == [(40, 160), (0, 160)]
    assert (collective(run).transfer_ms, collective(run).bus_bytes_per_s) == (None, None)
    assert collective(run).ranks == 4  # as NCCL notes when it makes the communicator
    assert notes(run) == ["No capture is of ranks 1, 3: time spent waiting for it counts as transferring."]


@pytest.mark.parametrize("chosen", [[0], [0, 1], [0, 2]])
@pytest.mark.parametrize("noted", ["json", "binary"])
def test_the_captures_at_hand_are_no_measure_of_a_communicator(chosen: list[int], noted: Noted, tmp_path: Path) -> None:
    """Of four ranks, tensor parallel in pairs 0 1 and 2 3: NCCL notes the size of those, and not of 0 2 and 1 3."""
    ranks = tensor_and_data(own_captures(4, noted))
    for rank in ranks:
        rank.init(TENSOR[rank.number], 2)
    (run,) = runs_of(summaries(write([ranks[number] for number in chosen], tmp_path)))
    assert {row.phase: row.ranks for row in run.collectives} == {"forward": 2, "backward": None}
    assert run.world_size == 4


@both_ways
def test_one_device_of_an_unknown_number_of_ranks(made: Ranks, tmp_path: Path) -> None:
    (run,) = runs_of(summaries(write(ddp(made(1, "none")), tmp_path)))
    assert (run.world_size, collective(run).ranks) == (0, None)


def environment(rank: Rank, start: int) -> Rank:
    """A rank that only the environment tells, of a session that began some ns after another one."""
    for name, value in (("RANK", rank.number), ("WORLD_SIZE", rank.ranks)):
        rank.export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    rank.export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000 + start)
    return rank


#: Two captures that are not of one run, and why.
APART: dict[str, Callable[[], Sequence[Rank]]] = {
    "both hold rank 0": lambda: [
        ddp(own_captures(2, offsets=[offset]), communicator=which)[0] for offset, which in ((0, WORLD), (500, OTHER))
    ],
    "one is of 2 ranks, one of 4": lambda: [ddp(own_captures(2))[0], ddp(own_captures(4)[:2], communicator=OTHER)[1]],
    "they share no communicator": lambda: [ddp(own_captures(2))[0], ddp(own_captures(2), communicator=OTHER)[1]],
    "the rank of one is not known": lambda: ddp(own_captures(2, "none")),
    # The other session began 60 s later: a clock that far ahead would be seen on no host.
    "one had ended before the other began": lambda: [
        environment(rank, rank.number * 60 * 10**9) for rank in ddp(own_captures(2, "none"))
    ],
}


def assert_apart(ranks: Sequence[Rank], why: str, folder: Path) -> None:
    """Each capture has its own figures, and it is said why."""
    paths = [rank.export.write(folder / f"{name}.sqlite") for name, rank in zip("ab", ranks, strict=True)]
    runs = runs_of(summaries(paths))
    assert [(len(run.ranks), run.slowest) for run in runs] == [(1, None)] * 2
    assert [note for run in runs for note in notes(run) if "not joined" in note] == [
        f"`a` and `b` are not joined: {why}."
    ]


@pytest.mark.parametrize("why", APART)
def test_captures_that_are_not_of_one_run(why: str, tmp_path: Path) -> None:
    assert_apart(APART[why](), why, tmp_path)


def test_two_captures_of_one_rank_of_one_run(tmp_path: Path) -> None:
    """They share the communicator, as reports of one process do that nsys wrote one after another."""
    ranks = ddp(own_captures(2))[0], ddp(own_captures(2, offsets=[500]))[0]
    assert_apart(ranks, "both hold rank 0", tmp_path)


def test_the_environment_joins_ranks_of_one_time(tmp_path: Path) -> None:
    ranks = [environment(rank, rank.number * 2 * 10**9) for rank in ddp(own_captures(2, "none"))]
    run = joined(ranks, tmp_path)
    assert figures(run, "waiting") == [(100,), (0,)]
    assert run.ranks[1].offset_ms == pytest.approx(2_000)


def test_the_same_file_twice(tmp_path: Path) -> None:
    paths = write(ddp(own_captures(2)), tmp_path)
    copy = tmp_path / "zero.sqlite"
    shutil.copy(paths[0], copy)
    (run,) = runs_of(summaries([*paths, copy]))
    assert figures(run, "waiting") == [(100,), (0,)]
    assert notes(run) == ["`zero` is the same capture as `rank0`, and counts once."]


def test_a_capture_of_all_ranks_twice(tmp_path: Path) -> None:
    (path,) = write(ddp(one_capture(2)), tmp_path)
    copy = tmp_path / "zero.sqlite"
    shutil.copy(path, copy)
    (run,) = runs_of(summaries([path, copy]))
    assert len(run.ranks) == 2
    assert notes(run) == ["`zero` is the same capture as `rank0`, and counts once."]


def test_a_copy_is_said_where_it_belongs(tmp_path: Path) -> None:
    """Two runs, and a copy of a capture of the second one."""
    (tmp_path / "other").mkdir()
    one = write(ddp(own_captures(2)), tmp_path)
    two = write(ddp(own_captures(2, offsets=[50, 60]), communicator=OTHER), tmp_path / "other", "other{}")
    shutil.copy(two[1], tmp_path / "zero.sqlite")
    runs = runs_of(summaries([*one, *two, tmp_path / "zero.sqlite"]))
    assert sorted((run.ranks[0].capture, notes(run)) for run in runs) == [
        ("other0", ["`zero` is the same capture as `other1`, and counts once."]),
        ("rank0", []),
    ]


def test_clocks_without_a_shared_collective(tmp_path: Path) -> None:
    """Ranks 0 and 1 share one communicator, 2 and 3 another: by their captures nothing tells how the pairs lie."""
    ranks = [environment(rank, 0) for rank in own_captures(4, "none")]
    for at, rank in steps(ranks):
        kind = "all-reduce" if rank.number < 2 else "all-gather"
        rank.collective(kind, at + 200 * US, at + 300 * US)
    run = joined(ranks, tmp_path)
    assert (run.slowest, run.alignment) == (None, None)
    assert figures(run, "communication", "waiting") == [(100, None)] * 4
    assert "The clocks cannot be aligned: rank 1, rank 2, rank 3 shares no collective with the other ranks." in notes(
        run
    )


def test_clocks_whose_ends_lie_far_apart(tmp_path: Path) -> None:
    """The ends lie 0, 60, 120, ... µs apart in no order: a tenth of a step and more, so nothing tells who waits."""
    ranks = own_captures(2)
    for at, rank in steps(ranks, range(9)):
        start = at + (100 + rank.number * (at // STEP * 37 % 10) * 60) * US
        rank.collective("all-reduce", start, start + 100 * US)
    run = joined(ranks, tmp_path)
    assert (run.slowest, run.alignment) == (None, None)
    (note,) = notes(run)
    # of the differences 0, 420, 240, 60, 480, 300, 120, 540, 360 from their median, 300: the median is 180, × 1.4826
    assert note == "The clocks cannot be aligned: collectives end 0.267 ms apart from rank to rank."


def test_ranks_that_share_no_collective_wait_for_nobody_knows_whom(tmp_path: Path) -> None:
    """In one capture, each on a communicator of its own."""
    ranks = one_capture(2)
    for at, rank in steps(ranks):
        rank.collective("all-reduce", at + 200 * US, at + 300 * US, communicator=OTHER + rank.number)
    run = joined(ranks, tmp_path)
    assert (run.slowest, figures(run, "waiting")) == (None, [(None,), (None,)])
    assert notes(run) == ["No collective of a rank can be told to be one of another rank, so nothing is known to wait."]


def test_files_of_one_name_are_of_clocks_of_their_own(tmp_path: Path) -> None:
    """Two folders hold a capture of one name each, whose session's start is not known."""
    ranks = ddp(own_captures(2, offsets=[0, 5_000_000]))
    found = []
    for rank in ranks:
        (tmp_path / str(rank.number)).mkdir()
        path = rank.export.write(tmp_path / str(rank.number) / "trace.sqlite")
        found += summarize(Trace.load(path), f"{rank.number}/trace")
    (run,) = runs_of(found)
    assert run.ranks[1].offset_ms == pytest.approx(5.0)
    assert figures(run, "waiting") == [(100,), (0,)]


def test_nothing_comes_of_nothing() -> None:
    assert runs_of([]) == ()


def test_the_worlds_communicator_is_above_63_bits() -> None:
    assert WORLD >= 2**63  # else nothing here shows that such a one is read
