"""Several ranks of one run: worked examples, each with its arithmetic."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranks.run import CollectiveFigures, ParallelRun
from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.renderers.json_report import captures_data
from nsys_analyzer.report.sections.ranks import describe_joins
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
_PIECE = re.compile(r"(\S+) (\d+)-(\d+)(?: @(\d+))?")
#: DDP of two ranks, in µs of a step; the second one is late by 100, so that the first one waits from 200 to 300.
DDP = (
    "compute 20-200, all-reduce 200-400, compute 420-500",
    "compute 20-300, all-reduce 300-400, compute 420-500",
)
UNMATCHED = "No collective could be matched with a collective of another rank, so waiting is unknown."


def steps(
    ranks: Sequence[Rank], numbers: Sequence[int] = range(3), name: str = "step",
    phases: Mapping[str, tuple[int, int]] | None = None,
) -> Sequence[tuple[int, Rank]]:  # fmt: skip
    """The begin of each step of each rank, of 1,000 µs, one behind the other; all but 20 µs of it is backward's."""
    begun = []
    for number in numbers:
        at = number * STEP
        for rank in ranks:
            rank.step(at, at + STEP, name.format(number))
            for phase, (begin, end) in (phases or {"backward": (10, 990)}).items():
                rank.step(at + begin * US, at + end * US, phase)
            begun.append((at, rank))
    return begun


def do(ranks: list[Rank], *work: str, size: int = 1 << 20, communicator: int = WORLD, **of_steps: Any) -> list[Rank]:
    """Each rank does its work in every step: kind, begin and end of each piece, and its launch, in µs of a step."""
    for at, rank in steps(ranks, **of_steps):
        for piece in work[rank.number % len(work)].split(", "):
            found = _PIECE.fullmatch(piece)
            assert found, piece
            kind, *rest = found.groups()
            start, end, launch = (None if time is None else at + int(time) * US for time in rest)
            assert start is not None and end is not None  # noqa: PT018
            if kind == "compute":
                rank.kernel(start, end, launch)
            elif kind == "copy":
                rank.copy(start, end, launch)
            else:
                rank.collective(kind, start, end, launch, size=size, communicator=communicator)
    return ranks


def us(ms: float | None) -> float | None:
    return None if ms is None else round(ms * 1000, 6)


def seen(run: ParallelRun, *names: str) -> dict[str, Any]:
    """Of figures of ranks, those of each in µs of a step, of statistics the median; else what the run says."""
    values: dict[str, Any] = {}
    for name in names:
        of_run = {"skew": us(run.skew_ms), "notes": [plain(note, "`") for note in describe_joins(run)]}
        if hasattr(run.ranks[0], f"{name}_ms"):
            every = [getattr(rank, f"{name}_ms") for rank in run.ranks]
            values[name] = [us(getattr(value, "median", value)) for value in every]
        else:
            values[name] = of_run[name] if name in of_run else getattr(run, name)
    return values


def only(run: ParallelRun) -> CollectiveFigures:
    (collective,) = run.collectives
    return collective


# --- who waits for whom


#: What ranks do in a step, and what their run then says, µs of a step.
EXAMPLES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # compute 180 + 80 and 280 + 80, communication 200 and 100, the rest of 1,000 is idle: 540 on both
    "the second of two is late": (DDP, {
        "step": [1000, 1000], "compute": [260, 360], "exposed_copy": [0, 0], "communication": [200, 100],
        "exposed_communication": [200, 100], "idle": [540, 540], "waiting": [100, 0], "transfer": [100, 100],
        "exposed_waiting": [100, 0], "exposed_transfer": [100, 100], "own": [900, 1000], "late": [0, 100],
        "slowest": 1, "fastest": 0, "skew": 100, "steps": 3, "world_size": 2, "missing": (), "notes": [],
        "strategies": ("data parallel (DDP)",),
    }),
    # rank 0 waits from 100 to 300, of which compute hides all until 250, and transfers until 400
    "hidden waiting costs nothing": (("compute 20-250, all-reduce 100-400", "compute 20-300, all-reduce 300-400"), {
        "communication": [300, 100], "exposed_communication": [150, 100], "waiting": [200, 0], "transfer": [100, 100],
        "exposed_waiting": [50, 0], "exposed_transfer": [100, 100], "own": [950, 1000],
    }),
    # all of the copy is exposed, and of the collective what lies before it
    "copies come before communication": (("all-reduce 300-400, copy 350-450",), {
        "exposed_copy": [100, 100], "communication": [100, 100], "exposed_communication": [50, 50], "idle": [850, 850],
    }),
    # without another rank's 50 and 70 the first two would be ready sooner
    "of three ranks all wait for the last": (("all-reduce 200-400", "all-reduce 250-400", "all-reduce 320-400"), {
        "waiting": [120, 70, 0], "transfer": [80, 80, 80], "late": [0, 50, 120], "slowest": 2, "skew": 120,
    }),
}  # fmt: skip


@both_ways
@pytest.mark.parametrize("noted", ["json", "binary"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_worked_examples(made: Ranks, noted: Noted, example: str, tmp_path: Path) -> None:
    work, expected = EXAMPLES[example]
    run = joined(do(made(max(len(work), 2), noted), *work), tmp_path)
    assert seen(run, *expected) == expected


@both_ways
def test_where_the_late_rank_loses_its_time(made: Ranks, tmp_path: Path) -> None:
    """Rank 1 computes 100 µs more in backward, with matmuls: all of the 100 µs by which the own times differ."""
    run = joined(do(made(2), *DDP), tmp_path)
    parts = {(row.phase, row.part): us(row.ms) for row in run.lost if us(row.ms)}
    assert parts == {("backward", "compute"): 100}
    assert run.lost[0].kernel_class == "matmul"
    assert us(sum(row.ms for row in run.lost)) == 100
    assert [rank.slowest_steps for rank in run.ranks] == [0, 3]


def test_the_losses_add_up(tmp_path: Path) -> None:
    """Rank 1 computes 60 µs more in backward, idles 30 µs more in forward, copies 20 µs more and transfers 10 µs more.

    Rank 0's collective waits for 120 of its 150 µs, from 350 until 470.
    """
    ranks = do(
        one_capture(2),
        "compute 50-100 @20, copy 300-310 @301, compute 310-350 @305, all-reduce 350-500 @306",
        "compute 80-130 @20, copy 330-360, compute 360-460 @305, all-reduce 470-510 @306",
        phases={"forward": (10, 300), "backward": (300, 900)},
    )
    run = joined(ranks, tmp_path)
    expected = {"own": [880, 1000], "exposed_waiting": [120, 0], "exposed_transfer": [30, 40], "skew": 120}
    assert seen(run, *expected) == expected
    parts = {(row.phase, row.part): us(row.ms) for row in run.lost if us(row.ms)}
    assert (parts["backward", "compute"], parts["backward", "copies"], parts["", "transferring"]) == (60, 20, 10)
    # Forward begins 30 later. Behind the collective there is 10 less, which the next step's forward ends, but in the
    # last one of three steps nothing does. The collective starts 10 after its compute.
    assert parts["forward", "idle"] == pytest.approx(30 - 10 * 2 / 3)
    assert parts["outside the phases", "idle"] == pytest.approx(-10 / 3)
    assert parts["backward", "idle"] == 10
    assert sum(parts.values()) == pytest.approx(120)


def test_who_is_slowest_from_step_to_step(tmp_path: Path) -> None:
    """Late by 40 µs in turn: rank 0 in steps 0, 2 and 4, rank 1 in 1 and 3; the median of its own time is 1,000."""
    ranks = one_capture(2)
    do(ranks, "all-reduce 240-300", "all-reduce 200-300", numbers=(0, 2, 4))
    do(ranks, "all-reduce 200-300", "all-reduce 240-300", numbers=(1, 3))
    run = joined(ranks, tmp_path)
    assert [rank.slowest_steps for rank in run.ranks] == [3, 2]
    assert seen(run, "slowest", "own", "late") == {"slowest": 0, "own": [1000, 960], "late": [40, 0]}


# --- collectives


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
    row = only(joined(ranks, tmp_path))
    assert (row.kind, row.phase, row.bytes, row.ranks, row.count) == (kind, "backward", 1_000_000, 4, 1)
    assert row.bus_bytes_per_s == pytest.approx(link / 100e-6)
    assert (us(row.waiting_ms), us(row.transfer_ms)) == (50 / 4, 100)  # mean of four ranks, one of which waits


@both_ways
@pytest.mark.parametrize(
    ("count", "to_all", "kind", "link"),
    [
        (2, False, "send/receive", 1e6),  # a send and a receive at the same time: the larger way counts
        (2, True, "all-to-all", 1e6),  # as PyTorch launches it: a send to and a receive from every rank
        (4, True, "all-to-all", 3e6),
    ],
)
def test_sends_and_receives(made: Ranks, count: int, to_all: bool, kind: str, link: float, tmp_path: Path) -> None:
    """Each of 1 MB, in 100 µs; rank 0 waits for 50 µs."""
    ranks = made(count)
    for at, rank in steps(ranks, phases={"forward": (10, 990)}):
        others = range(count) if to_all else [1 - rank.number]
        start, peers = at + (200 if rank.number else 150) * US, [peer for peer in others for _ in ("send", "receive")]
        rank.collective("send/receive", start, at + 300 * US, size=1_000_000, peers=peers)
    run = joined(ranks, tmp_path)
    row = only(run)
    assert (row.kind, row.bytes, row.bus_bytes_per_s) == (kind, 1_000_000, pytest.approx(link / 100e-6))
    assert seen(run, "waiting") == {"waiting": [50, *[0] * (count - 1)]}
    assert run.strategies == (("expert parallel",) if to_all else ("pipeline parallel",))


def test_collectives_by_kind_phase_and_size(tmp_path: Path) -> None:
    """Three sizes and kinds: two of 64 KiB, one of 1 MiB, a broadcast, each of 10 µs; the second one twice as another.

    Two communicators of as many ranks count together.
    """
    ranks = do(one_capture(2), "all-reduce 100-110, all-reduce 120-130", size=1 << 16)
    for at, rank in ((number * STEP, rank) for number in range(3) for rank in ranks):
        for start, communicator in ((140, WORLD), (160, OTHER)):
            begin, stream = at + start * US, 20 + start
            rank.collective("all-reduce", begin, begin + 10 * US, communicator=communicator, stream=stream)
        rank.collective("broadcast", at + 300 * US, at + 310 * US, size=8)
    rows = joined(ranks, tmp_path).collectives
    assert {(row.kind, row.bytes): (row.count, us(row.transfer_ms), row.duration_ms.n) for row in rows} == {
        ("all-reduce", 1 << 16): (2, 20, 12), ("all-reduce", 1 << 20): (2, 20, 12), ("broadcast", 8): (1, 10, 6),
    }  # fmt: skip


def test_sizes_that_nobody_noted(tmp_path: Path) -> None:
    row = only(joined(do(one_capture(2, "none"), *DDP), tmp_path))
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
    run = joined(do(ranks, *DDP, numbers=range(5, 10)), tmp_path)
    assert run.ranks[1].offset_ms == pytest.approx(-1.0)
    assert seen(run, "waiting") == {"waiting": [100, 0]}
    (note,) = seen(run, "notes")[
        "notes"
    ]  # a step takes 1 ms: the clocks could as well agree, and the captures begin a step apart
    assert note.startswith("The captures' clocks are 1 ms apart, more than half a step.")


@pytest.mark.parametrize("noted", ["json", "binary"])
def test_one_capture_and_one_of_each_rank_say_the_same(noted: Noted, tmp_path: Path) -> None:
    """But for names, offsets and what is said of clocks."""

    def said(ranks: list[Rank], folder: str) -> tuple[object, ...]:
        (tmp_path / folder).mkdir()
        run = joined(do(ranks, *DDP, numbers=range(2, 6)), tmp_path / folder)
        names = (name.removesuffix("_ms") for name in vars(run.ranks[0]) if name.endswith("_ms"))
        of_ranks = seen(run, *(name for name in names if name != "offset"))
        return of_ranks, run.collectives, run.lost, run.slowest, run.skew_ms, run.strategies

    together = said(one_capture(2, noted), "together")
    assert said(own_captures(2, noted, offsets=[0, 123_456_789]), "apart") == together


@pytest.mark.parametrize(
    ("work", "numbers", "note"),
    [
        # Ends that lie 0, 420, 240, 60, 480, 300, 120, 540, 360 µs apart, a tenth of a step and more. From their
        # median, 300, the differences' median is 180, × 1.4826.
        (
            [f"all-reduce {100 + late}-{200 + late}" for late in (37 * i % 10 * 60 for i in range(9))],
            range(9),
            "The clocks cannot be aligned: collectives end 0.267 ms apart from rank to rank.",
        ),
        # each on a communicator of its own
        (["all-reduce 200-300"] * 3, range(3), UNMATCHED),
    ],
)
def test_clocks_that_nothing_aligns(work: list[str], numbers: range, note: str, tmp_path: Path) -> None:
    ranks = own_captures(2) if note != UNMATCHED else one_capture(2)
    for number in numbers:
        do(ranks[:1], "all-reduce 100-200" if note != UNMATCHED else work[number], numbers=[number])
        communicator = OTHER if note == UNMATCHED else WORLD
        do(ranks[1:], work[number], work[number], numbers=[number], communicator=communicator)
    run = joined(ranks, tmp_path)
    assert seen(run, "slowest", "alignment", "waiting", "notes") == {
        "slowest": None, "alignment": None, "waiting": [None, None], "notes": [note],
    }  # fmt: skip


def test_clocks_without_a_shared_collective(tmp_path: Path) -> None:
    """Ranks 0 and 1 share one communicator, 2 and 3 another: by their captures nothing tells how the pairs lie."""
    ranks = [environment(rank, 0) for rank in own_captures(4, "none")]
    run = joined(do(ranks, *["all-reduce 200-300"] * 2, *["all-gather 200-300"] * 2), tmp_path)
    expected = {"slowest": None, "alignment": None, "communication": [100] * 4, "waiting": [None] * 4}
    assert seen(run, *expected) == expected
    said = "The clocks cannot be aligned: rank 1, rank 2, rank 3 share no collective with the other ranks."
    assert said in seen(run, "notes")["notes"]


def test_files_of_one_name_are_of_clocks_of_their_own(tmp_path: Path) -> None:
    """Two folders hold a capture of one name each, whose session's start is not known."""
    captures = []
    for rank in do(own_captures(2, offsets=[0, 5_000_000]), *DDP):
        (tmp_path / str(rank.number)).mkdir()
        path = rank.export.write(tmp_path / str(rank.number) / "trace.sqlite")
        captures += summarize(Trace.load(path), f"{rank.number}/trace")
    (run,) = find_runs(captures)
    assert run.ranks[1].offset_ms == pytest.approx(5.0)
    assert seen(run, "waiting") == {"waiting": [100, 0]}


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
    for rank, numbers in zip(ranks, (first, second), strict=True):
        do([rank], *DDP, numbers=numbers, name=name)
    run = joined(ranks, tmp_path)
    assert run.ranks[1].offset_ms == 0
    assert seen(run, "steps", "waiting", "own", "notes") == {
        "steps": common, "waiting": [100, 0], "own": [900, 1000],
        "notes": [
            f"The ranks have different steps (rank 0 has {len(first)}, rank 1 has {len(second)}). "
            f"The analysis uses the {common} common steps."
        ],
    }  # fmt: skip


def test_the_row_of_a_rank_is_of_the_shared_steps_alone(tmp_path: Path) -> None:
    """Rank 0 has three more steps, of 1,400 µs each: the median of its five is 1,400, that of the shared ones 1,000."""
    ranks = do(own_captures(2), *DDP, numbers=range(2), name="step {}")
    for number in (2, 3, 4):
        at = 2 * STEP + (number - 2) * 1_400 * US
        ranks[0].step(at, at + 1_400 * US, f"step {number}").kernel(at + 20 * US, at + 280 * US)
    expected = {"steps": 2, "step": [1000, 1000], "compute": [260, 360], "waiting": [100, 0], "idle": [540, 540]}
    assert seen(joined(ranks, tmp_path), *expected) == expected


def test_no_step_in_common(tmp_path: Path) -> None:
    """Each rank's own figures stay; nothing is said of who waits."""
    ranks = own_captures(2)
    for rank, numbers in zip(ranks, (range(3), range(5, 8)), strict=True):
        do([rank], *DDP, numbers=numbers, name="step {}")
    expected = {
        "steps": 0, "slowest": None, "skew": None, "alignment": None, "collectives": (), "step": [1000, 1000],
        "compute": [260, 360], "waiting": [None, None], "own": [None, None],
        "notes": ["The ranks have no step number in common, so the report does not compare their steps."],
    }  # fmt: skip
    assert seen(joined(ranks, tmp_path), *expected) == expected


def test_collectives_that_differ_in_a_step(tmp_path: Path) -> None:
    """Rank 1 has one more in step 1, where nobody is known to wait: all figures are those of the 2 other steps."""
    ranks = do(one_capture(2), *DDP)
    ranks[1].collective("all-reduce", STEP + 600 * US, STEP + 610 * US)
    run = joined(ranks, tmp_path)
    expected = {
        "step": [1000, 1000], "compute": [260, 360], "communication": [200, 100], "waiting": [100, 0],
        "transfer": [100, 100], "own": [900, 1000], "steps": 2,
        "notes": ["No figure includes 1 step whose collectives differ from rank to rank (step 1)."],
    }  # fmt: skip
    assert seen(run, *expected) == expected
    assert [rank.slowest_steps for rank in run.ranks] == [0, 2]
    assert [[step.number for step in rank.steps] for rank in run.ranks] == [[0, 2]] * 2
    assert (only(run).count, us(only(run).waiting_ms)) == (1, 50)  # mean of 100 and 0


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        ([1, 2], {
            "steps": 1, "waiting": [100, 0],
            "notes": [
                "No figure includes 2 steps whose collectives differ from rank to rank (steps 1, 2)."
            ],
        }),
        # the ranks' own figures stay; nothing is said of who waits
        ([0, 1, 2], {
            "steps": 3, "slowest": None, "alignment": None, "communication": [200, 100], "waiting": [None, None],
            "own": [None, None],
            "notes": ["The collectives of every step differ from rank to rank, so waiting time is unknown."],
        }),
    ],
)  # fmt: skip
def test_kinds_that_differ(apart: list[int], expected: dict[str, Any], tmp_path: Path) -> None:
    ranks = one_capture(2)
    for number in range(3):
        do(ranks, "all-reduce 200-400", f"all-{'gather' if number in apart else 'reduce'} 300-400", numbers=[number])
    assert seen(joined(ranks, tmp_path), *expected) == expected


@both_ways
def test_what_is_between_two_steps_is_of_the_first(made: Ranks, tmp_path: Path) -> None:
    """Steps of 900 µs, and behind each an all-reduce of a loss, which ends in the next step.

    In µs of a step: launched at 950, it runs from 960 on rank 0 and from 1,020 on rank 1, and ends at 1,050. The steps
    of rank 0 but the last hold [960, 1000) of it and those but the first [0, 50), of which it waits until 20; those of
    rank 1 hold [20, 50). What is launched behind the last step no figure is of. The steps take 1,000, 1,000 and 900 µs:
    the first two are those near the median, and what their means are of.
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
    # Rank 0: 40 and 40 + 50, of which it waits for 40 and 40 + 20; rank 1: nothing and 30.
    parts = [(100 + (40 + 90) / 2, (40 + 60) / 2, 100 + 30 / 2), (100 + 30 / 2, 0, 100 + 30 / 2)]
    for name, values in zip(("communication", "waiting", "transfer"), zip(*parts, strict=True), strict=True):
        assert seen(run, name)[name] == pytest.approx(values, abs=1e-5)
    rows = [(row.bytes, row.phase, row.count) for row in run.collectives]
    assert sorted(rows) == [(4, "", pytest.approx(2 / 3)), (1 << 20, "backward", 1)]
    assert not run.notes


# --- several communicators


#: Of the four ranks: tensor parallel in pairs 0 1 and 2 3, data parallel in pairs 0 2 and 1 3.
TENSOR, DATA = (11, 11, 12, 12), (21, 22, 21, 22)


def tensor_and_data(ranks: Sequence[Rank]) -> list[Rank]:
    """In µs of a step, of rank r: forward's collective [100 + 20 r, 200), backward's [500 + 20 r, 600)."""
    for at, rank in steps(ranks, phases={"forward": (10, 400), "backward": (400, 900)}):
        for begin, stream, ids in ((at + 100 * US, 20, TENSOR), (at + 500 * US, 21, DATA)):
            start, communicator = begin + 20 * US * rank.number, ids[rank.number]
            rank.collective("all-reduce", start, begin + 100 * US, communicator=communicator, stream=stream)
    return list(ranks)


@both_ways
def test_each_communicator_waits_for_its_own_ranks(made: Ranks, tmp_path: Path) -> None:
    """Tensor: 0 waits 20 for 1, and 2 waits 20 for 3. Data: 0 waits 40 for 2, and 1 waits 40 for 3."""
    run = joined(tensor_and_data(made(4)), tmp_path)
    assert seen(run, "waiting", "transfer") == {"waiting": [60, 40, 20, 0], "transfer": [140, 120, 100, 80]}
    assert set(run.strategies) == {"tensor parallel", "data parallel (DDP)"}
    rows = {row.phase: (row.ranks, row.count, us(row.waiting_ms)) for row in run.collectives}
    # a mean of 20, 0, 20 and 0; and of 40, 40, 0 and 0
    assert rows == {"forward": (2, 1, 10), "backward": (2, 1, 20)}
    assert run.alignment is not None
    assert run.alignment.collectives == 3  # one of each step with the rank that it is aligned with


def test_unnamed_communicators_of_many_ranks_are_said_to_be_of_all(tmp_path: Path) -> None:
    (note,) = seen(joined(tensor_and_data(one_capture(4, "none")), tmp_path), "notes")["notes"]
    assert (
        "The report assumes that each collective includes all 4 ranks, which is wrong if groups of ranks have" in note
    )


def pipeline(ranks: Sequence[Rank]) -> list[Rank]:
    """A forward pass through stages, in µs of a step: stage r computes [100 r + 20, 100 r + 100).

    It sends to the next one in [100 r + 100, 100 r + 120), which has waited to receive since 10.
    """
    for at, rank in steps(ranks, phases={"forward": (10, 990)}):
        stage, turn = rank.number, at + 100 * rank.number * US
        if stage:
            rank.collective("send/receive", at + 10 * US, turn + 20 * US, peers=[stage - 1], size=1 << 16)
        rank.kernel(turn + 20 * US, turn + 100 * US, at + 15 * US)
        if stage < len(ranks) - 1:
            sent = turn + 120 * US
            rank.collective("send/receive", sent - 20 * US, sent, at + 16 * US, peers=[stage + 1], size=1 << 16)
    return list(ranks)


#: Each stage receives and sends for 20 µs; the second one has waited from 10 to 100, the third one from 10 to 200.
PIPELINES: list[tuple[Ranks, int, Noted, dict[str, Any]]] = [
    *((made, 2, "json", {"waiting": [0, 90], "transfer": [20, 20], "compute": [80, 80], "notes": [],
                         "strategies": ("pipeline parallel",)}) for made in (one_capture, own_captures)),
    *((made, 3, "json", {"waiting": [0, 90, 190], "transfer": [20, 40, 20]}) for made in (one_capture, own_captures)),
    # two stages need no peers; of three they are not guessed
    (one_capture, 2, "none", {"waiting": [0, 90], "transfer": [20, 20]}),
    (one_capture, 3, "none", {"waiting": [None] * 3, "own": [None] * 3, "notes": [UNMATCHED]}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "count", "noted", "expected"), PIPELINES)
def test_a_pipeline(made: Ranks, count: int, noted: Noted, expected: dict[str, Any], tmp_path: Path) -> None:
    assert seen(joined(pipeline(made(count, noted)), tmp_path), *expected) == expected


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
    assert seen(run, "waiting", "transfer") == {"waiting": [100, 0], "transfer": [100, 100]}
    assert only(run).bus_bytes_per_s == pytest.approx(1e6 / 100e-6)  # 2 × 1/2 × 1 MB


def test_a_device_without_a_collective(tmp_path: Path) -> None:
    """Of two devices of one process one runs an all-reduce, the other one computes alone: nobody is known to wait."""
    export = with_schemas(Export())
    first, second = Rank(0, export, device=0), Rank(0, export, device=1)
    for at, rank in steps([first]):
        rank.collective("all-reduce", at + 200 * US, at + 300 * US)
        second.kernel(at + 200 * US, at + 250 * US)
    run = joined([first, second], tmp_path)
    expected = {"compute": [0, 50], "communication": [100, 0], "waiting": [None, None], "notes": [UNMATCHED]}
    assert seen(run, *expected) == expected
    assert (only(run).count, us(only(run).duration_ms.mean)) == (1, 100)


# --- strategies


#: Kind and phase of the collectives of a step.
PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "data parallel (DDP)": (("broadcast", "forward"), ("all-reduce", "backward"), ("all-reduce", "backward")),
    "fully sharded (FSDP)": (("all-gather", "forward"), ("all-gather", "backward"), ("reduce-scatter", "backward")),
    "tensor parallel": (("all-reduce", "forward"), ("all-reduce", "backward")),
    "tensor and sequence parallel": (
        ("all-gather", "forward"), ("reduce-scatter", "forward"), ("all-gather", "backward"),
        ("reduce-scatter", "backward"),
    ),
    "pipeline parallel": (("send/receive", "forward"), ("send/receive", "backward")),
    "sharded optimizer (ZeRO)": (("reduce-scatter", "backward"), ("all-gather", "optimizer")),
    "expert parallel": (("all-to-all", "forward"), ("all-to-all", "forward"), ("all-to-all", "backward")),
}  # fmt: skip


def patterned(ranks: Sequence[Rank], pattern: Sequence[tuple[str, str]]) -> list[Rank]:
    phases = {"forward": (0, 300), "backward": (300, 600), "optimizer": (600, 900)}
    for at, rank in steps(ranks, phases=phases):
        for phase, (begin, _) in phases.items():
            for place, kind in enumerate(kind for kind, where in pattern if where == phase):
                start = at + (begin + 20 + 50 * place) * US
                kernel = KERNELS.get(kind, KERNELS["send/receive"])
                rank.collective(kind, start, start + 30 * US, kernel=kernel, peers=[1 - rank.number])
    return list(ranks)


@both_ways
@pytest.mark.parametrize(("strategy", "pattern"), PATTERNS.items())
def test_the_pattern_of_collectives_names_the_strategy(
    made: Ranks, strategy: str, pattern: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    run = joined(patterned(made(2), pattern), tmp_path)
    assert run.strategies == (strategy,)
    assert seen(run, "waiting") == {"waiting": [0, 0]}


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


@pytest.mark.parametrize(
    ("work", "chosen", "expected"),
    [
        # of one capture alone nothing is known to wait
        (DDP, [0], {
            "missing": (1,), "world_size": 2, "slowest": None, "exposed_communication": [200], "waiting": [None],
            "own": [None], "notes": ["There is no capture of rank 1, so it is unknown which ranks wait for it."],
        }),
        # of ranks 0 and 2 of four one waits for the other at least
        ([f"all-reduce {200 + 20 * rank}-400" for rank in range(4)], [0, 2], {
            "missing": (1, 3), "waiting": [40, 0], "transfer": [160, 160],
            "notes": ["There is no capture of ranks 1, 3, so time spent waiting for them counts as transferring."],
        }),
    ],
)  # fmt: skip
def test_missing_ranks(work: Sequence[str], chosen: list[int], expected: dict[str, Any], tmp_path: Path) -> None:
    ranks = do(own_captures(len(work)), *work)
    (run,) = find_runs(summaries(write([ranks[number] for number in chosen], tmp_path)))
    assert seen(run, *expected) == expected
    # Who comes last is not known, so bandwidth is not said; NCCL notes of how many ranks a communicator is made.
    assert (only(run).transfer_ms, only(run).bus_bytes_per_s, only(run).ranks) == (None, None, len(work))


@pytest.mark.parametrize("chosen", [[0], [0, 1], [0, 2]])
@pytest.mark.parametrize("noted", ["json", "binary"])
def test_the_captures_at_hand_are_no_measure_of_a_communicator(chosen: list[int], noted: Noted, tmp_path: Path) -> None:
    """Of four ranks, tensor parallel in pairs 0 1 and 2 3: NCCL notes the size of those, and not of 0 2 and 1 3."""
    ranks = tensor_and_data(own_captures(4, noted))
    for rank in ranks:
        rank.init(TENSOR[rank.number], 2)
    (run,) = find_runs(summaries(write([ranks[number] for number in chosen], tmp_path)))
    assert {row.phase: row.ranks for row in run.collectives} == {"forward": 2, "backward": None}
    assert run.world_size == 4


@both_ways
def test_one_device_of_an_unknown_number_of_ranks(made: Ranks, tmp_path: Path) -> None:
    (run,) = find_runs(summaries(write(do(made(1, "none"), *DDP), tmp_path)))
    assert (run.world_size, only(run).ranks) == (None, None)


def environment(rank: Rank, start: int) -> Rank:
    """A rank that only the environment tells, of a session that began some ns after another one."""
    for name, value in (("RANK", rank.number), ("WORLD_SIZE", rank.ranks)):
        rank.export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    rank.export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000 + start)
    return rank


def of(which: int, *arguments: Any, communicator: int = WORLD, **more: Any) -> Rank:
    """One rank of a run of DDP, in a capture of its own."""
    return do(own_captures(*arguments, **more), *DDP * 2, communicator=communicator)[which]


#: Two captures that are not of one run, and why.
APART: list[tuple[str, Callable[[], Sequence[Rank]]]] = [
    ("both have rank 0", lambda: [of(0, 2), of(0, 2, offsets=[500], communicator=OTHER)]),
    # reports of one process that nsys wrote one after another share the communicator
    ("both have rank 0", lambda: [of(0, 2), of(0, 2, offsets=[500])]),
    ("one belongs to a run of 2 ranks, the other to a run of 4", lambda: [of(0, 2), of(1, 4, communicator=OTHER)]),
    ("they share no communicator", lambda: [of(0, 2), of(1, 2, communicator=OTHER)]),
    ("the rank of one of them is not known", lambda: do(own_captures(2, "none"), *DDP)),
    # The other session began 60 s later: a clock that far ahead would be seen on no host.
    ("one had ended before the other began", lambda: [
        environment(rank, rank.number * 60 * 10**9) for rank in do(own_captures(2, "none"), *DDP)
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("why", "ranks"), APART)
def test_captures_that_are_not_of_one_run(why: str, ranks: Callable[[], Sequence[Rank]], tmp_path: Path) -> None:
    """Each capture has its own figures, and it is said why."""
    paths = [rank.export.write(tmp_path / f"{name}.sqlite") for name, rank in zip("ab", ranks(), strict=True)]
    runs = find_runs(summaries(paths))
    assert [(len(run.ranks), run.slowest) for run in runs] == [(1, None)] * 2
    notes = [note for run in runs for note in seen(run, "notes")["notes"]]
    assert [note for note in notes if "not joined" in note] == [f"`a` and `b` are not joined: {why}."]


def test_the_environment_joins_ranks_of_one_time(tmp_path: Path) -> None:
    ranks = [environment(rank, rank.number * 2 * 10**9) for rank in do(own_captures(2, "none"), *DDP)]
    run = joined(ranks, tmp_path)
    assert seen(run, "waiting") == {"waiting": [100, 0]}
    assert run.ranks[1].offset_ms == pytest.approx(2_000)


def test_a_copy_counts_once_and_is_said_where_it_belongs(tmp_path: Path) -> None:
    """Two runs, and a copy of a capture of the second one; a capture of all ranks and its copy."""
    (tmp_path / "other").mkdir()
    one = write(do(own_captures(2), *DDP), tmp_path)
    two = do(own_captures(2, offsets=[50, 60]), *DDP, communicator=OTHER)
    paths = write(two, tmp_path / "other", "other{}")
    for original, others in ((paths[1], [*one, *paths]), (write(do(one_capture(2), *DDP), tmp_path, "all")[0], [])):
        copy = tmp_path / "zero.sqlite"
        shutil.copy(original, copy)
        runs = find_runs(summaries([*(others or [original]), copy]))
        said = [f"`zero` is the same capture as `{original.stem}`, and counts once."]
        of_run = {run.ranks[0].capture: (len(run.ranks), seen(run, "notes")["notes"]) for run in runs}
        assert of_run == ({"rank0": (2, []), "other0": (2, said)} if others else {"all": (2, said)})


def test_a_copy_is_no_rank_whatever_it_is_called(tmp_path: Path) -> None:
    """Nothing in the capture tells its rank, and the names say 0 and 1."""
    original = write(do(own_captures(2, "none"), *DDP)[:1], tmp_path)[0]
    shutil.copy(original, tmp_path / "rank1.sqlite")
    (run,) = gather([tmp_path]).runs
    assert seen(run, "notes")["notes"][0] == "`rank1` is the same capture as `rank0`, and counts once."
    assert len(run.ranks) == 1


def test_a_world_of_no_size_that_there_is(tmp_path: Path) -> None:
    """A manifest says 10⁹ ranks, of which a million are counted."""
    capture = write(do(own_captures(2, "none"), *DDP)[:1], tmp_path)[0]
    said = {"capture": capture.name, "rank": 0, "world_size": 10**9}
    capture.with_suffix(".manifest.json").write_text(json.dumps(said), encoding="utf-8")
    (run,) = gather([tmp_path]).runs
    assert (run.missing[0], len(run.missing)) == (1, 10**6 - 1)
    listed = ", ".join(map(str, range(1, 17)))
    assert f"There is no capture of ranks {listed} and 999,983 more, so " in seen(run, "notes")["notes"][0]
    assert captures_data((), [run])["missing_ranks"] == list(range(1, 1_001))


def test_nothing_comes_of_nothing() -> None:
    assert find_runs([]) == ()


def test_the_worlds_communicator_is_above_63_bits() -> None:
    assert WORLD >= 2**63  # else nothing here shows that such a one is read


# --- gradients that are reduced in each of several backward passes


def accumulate(sizes: Sequence[Sequence[int]], folder: Path) -> ParallelRun:
    """Two ranks, each of whose steps has backward passes of 240 µs, which reduce messages of so many MiB each.

    In a pass, rank 0 computes for 100 µs and rank 1 for 140; the reductions end at 200, one behind the other.
    """
    ranks = own_captures(2)
    for number in range(3):
        for rank in ranks:
            at = number * STEP
            rank.step(at, at + STEP)
            for place, messages in enumerate(sizes):
                begin = at + (10 + 240 * place) * US
                rank.step(begin, begin + 230 * US, "backward")
                computed = begin + (140 if rank.number else 100) * US
                rank.kernel(begin, computed)
                for index, size in enumerate(messages):
                    ends = begin + (200 - 10 * (len(messages) - 1 - index)) * US
                    rank.collective(
                        "all-reduce", computed if not index else ends - 10 * US, ends, begin, size=size << 20
                    )
    return joined(ranks, folder)


def test_gradients_that_are_reduced_in_each_backward_pass(tmp_path: Path) -> None:
    """Four passes each reduce 25 and 8 MiB. No saving is stated without a replay of the ranks."""
    run = accumulate([(25, 8)] * 4, tmp_path)
    assert (run.strategies, run.reductions) == (("data parallel (DDP)",), 4)
    assert "repeated_reductions" not in [one.id for one in run.findings]


@pytest.mark.parametrize(
    "sizes",
    [
        [(), (), (), (25, 8)],  # as no_sync() does
        [(25, 8), (30, 2)],  # two models, such as those of a GAN
        [(25, 25, 25)],  # equal buckets of one backward pass
    ],
)
def test_gradients_that_are_reduced_once(tmp_path: Path, sizes: Sequence[Sequence[int]]) -> None:
    run = accumulate(sizes, tmp_path)
    assert run.reductions == 1
    assert "repeated_reductions" not in [one.id for one in run.findings]
