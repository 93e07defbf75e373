"""Tests what the sends and receives of ranks tell about a pipeline: its stages, schedule, micro-batches and bubble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nsys_analyzer.analysis.ranks.run import Pipeline, Stage
from nsys_analyzer.report.sections.parallel import describe_pipeline
from tests.support.ranks import Rank, joined, own_captures

US = 1_000
STEP = 1_000 * US
STEPS = 3


def exchange(rank: Rank, function: str, peer: int, start: int, end: int) -> None:
    """Adds the send or receive of one message, in µs."""
    rank.collective("send/receive", start * US, end * US, peers=[peer], functions=[function], size=1 << 20)


def each_step(ranks: Sequence[Rank]) -> list[int]:
    """Adds the ranges of the steps, and returns the start of each step, µs."""
    for rank in ranks:
        for number in range(STEPS):
            rank.step(number * STEP, (number + 1) * STEP)
    return [number * STEP // US for number in range(STEPS)]


def two_stages() -> list[Rank]:
    """Two stages and two micro-batches. A pass takes 100 µs, and a message 10 µs once both ranks are ready.

    Stage 2 waits from 10 to 120 for the first activation. Stage 1 waits from 220 to 230 until stage 2 has room for the
    second one, and from 240 to 440 for the first gradient.
    """
    first, second = ranks = own_captures(2)
    for at in each_step(ranks):
        for start in (20, 120, 450, 560):
            first.kernel((at + start) * US, (at + start + 100) * US)
        exchange(first, "send", 1, at + 120, at + 130)
        exchange(first, "send", 1, at + 220, at + 240)
        exchange(first, "receive", 1, at + 240, at + 450)
        exchange(first, "receive", 1, at + 550, at + 560)
        for start in (130, 240, 340, 450):
            second.kernel((at + start) * US, (at + start + 100) * US)
        exchange(second, "receive", 0, at + 10, at + 130)
        exchange(second, "receive", 0, at + 230, at + 240)
        exchange(second, "send", 0, at + 440, at + 450)
        exchange(second, "send", 0, at + 550, at + 560)
    return ranks


def test_the_bubble_of_two_stages(tmp_path: Path) -> None:
    pipeline = joined(two_stages(), tmp_path).pipeline
    assert pipeline == Pipeline(
        schedule="GPipe or 1F1B",  # with as many micro-batches as stages, both have the same order
        micro_batches=2,
        chunks=1,
        # 10 + 200 µs of 1,000 are the first stage's bubble, and 110 µs the second stage's
        stages=(Stage(("rank 0",), 0.79, 0.21), Stage(("rank 1",), 0.89, 0.11)),
        bubble_share=pytest.approx((0.21 + 0.11) / 2),
        equal_stages_share=pytest.approx((2 - 1) / (2 + 2 - 1)),
        saves_ms=0.11 / 2,  # half of the bubble of the longest stage, which is the second one
    )
    text = describe_pipeline(pipeline)
    assert "has 2\u00a0stages and 2\u00a0micro-batches per step (schedule: GPipe or 1F1B)" in text
    assert "in 16\u00a0% of a step (bubble). If all stages took equally long, this share would be 33\u00a0%" in text
    assert "its own time is 0.89\u00a0ms per step, and that of the shortest stage is 0.79\u00a0ms" in text


#: The messages of a step in their order, each as the positions of the sender and the receiver.
Messages = Sequence[tuple[int, int]]
FORTH, BACK = (0, 1), (1, 0)
#: Two chunks of layers on each of three stages, three micro-batches: the last stage sends the activations of the first
#: chunk to the first stage, and the first stage sends the gradients of the second chunk to the last one.
INTERLEAVED = (
    *[pair for _ in range(3) for pair in ((0, 1), (1, 2), (2, 0), (0, 1), (1, 2))],
    *[pair for _ in range(3) for pair in ((2, 1), (1, 0), (0, 2), (2, 1), (1, 0))],
)


def with_messages(messages: Messages, count: int) -> list[Rank]:
    """Ranks that exchange these messages, one after the other, and compute between them."""
    ranks = own_captures(count)
    for at in each_step(ranks):
        for place, (sender, receiver) in enumerate(messages):
            start = at + 10 + 30 * place
            exchange(ranks[sender], "send", receiver, start, start + 10)
            exchange(ranks[receiver], "receive", sender, start, start + 10)
            for rank in ranks:
                rank.kernel((start + 12) * US, (start + 25) * US)
    return ranks


@pytest.mark.parametrize(
    ("messages", "count", "expected"),
    [
        ([FORTH] * 4 + [BACK] * 4, 2, ("GPipe", 4, 1)),
        ([FORTH, FORTH, BACK, FORTH, BACK, FORTH, BACK, BACK], 2, ("1F1B", 4, 1)),
        ([FORTH, FORTH, FORTH, BACK, FORTH, BACK, BACK, BACK], 2, ("unknown", 4, 1)),
        ([FORTH] * 4, 2, ("GPipe", 4, 1)),  # inference
        (INTERLEAVED, 3, ("interleaved", 3, 2)),
    ],
)
def test_schedules(messages: Messages, count: int, expected: tuple[str, int, int], tmp_path: Path) -> None:
    pipeline = joined(with_messages(messages, count), tmp_path).pipeline
    assert pipeline is not None
    assert (pipeline.schedule, pipeline.micro_batches, pipeline.chunks) == expected
    assert [stage.ranks for stage in pipeline.stages] == [(f"rank {number}",) for number in range(count)]


def test_a_ring_is_no_pipeline(tmp_path: Path) -> None:
    """Each rank sends to the next one and receives from the one before it, as in ring attention."""
    ranks = own_captures(3)
    for at in each_step(ranks):
        for rank in ranks:
            peers = [(rank.number + 1) % 3, (rank.number - 1) % 3]
            rank.collective("send/receive", (at + 100) * US, (at + 200) * US, peers=peers)
            rank.kernel((at + 200) * US, (at + 300) * US)
    assert joined(ranks, tmp_path).pipeline is None


def test_data_parallel_ranks_are_no_pipeline(tmp_path: Path) -> None:
    ranks = own_captures(2)
    for at in each_step(ranks):
        for rank in ranks:
            rank.kernel((at + 100) * US, (at + 200) * US).collective("all-reduce", (at + 200) * US, (at + 300) * US)
    run = joined(ranks, tmp_path)
    assert (run.pipeline, run.slow_link) == (None, None)
