"""Finds the stages, the schedule and the micro-batches of a pipeline from the sends and receives between its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.intervals import Cover
from nsys_analyzer.analysis.ranks.collectives import Waits
from nsys_analyzer.analysis.ranks.matching import Match
from nsys_analyzer.analysis.ranks.run import Pipeline, Schedule, Stage
from nsys_analyzer.analysis.steps.member import SEND_RECEIVE, Member
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: A rank counts as slower than the other ranks of its stage if it has the longest own time of the stage in at least the
#: first share of the steps, and if its own time exceeds the stage's median by at least the second share of a step.
_STEADILY_SLOWEST_SHARE, _SLOWER_SHARE = 0.75, 0.02

#: The number of messages per step, by the positions of the sending and of the receiving rank in the run.
_Messages: TypeAlias = "dict[tuple[int, int], int]"


def find_pipeline(
    members: Sequence[Member], matches: Sequence[Match], steps: Sequence[Ints], waits: Sequence[Waits],
    own_ns: npt.NDArray[Any],
) -> Pipeline | None:  # fmt: skip
    """Returns the pipeline that the ranks form; None if they form no pipeline, or if waiting times are not known.

    In a pipeline, the first message of a step between two ranks goes to the later stage, and the first stage sends
    before it receives.

    Args:
        members: the members of the run.
        matches: the collectives that members share.
        steps: the indices of the compared steps among the steps of each member.
        waits: the waiting times of each member; empty if they are not known.
        own_ns: the lengths of the steps without exposed waiting, shape (members, steps), ns.
    """
    exchanges = [
        match
        for match in matches
        if len(match) == 2 and all((members[at].collectives.kind[i] == SEND_RECEIVE).all() for at, i in match.items())
    ]
    if not exchanges or not own_ns.size:
        return None
    messages, later_stages = _count_messages(members, exchanges, steps)
    chains = [*_find_chains(messages, later_stages)]
    lengths = {len(chain) for chain in chains}
    if len(lengths) != 1 or not max(lengths):
        return None
    first, second, *_, last = (*chains[0], chains[0][-1])
    # If the schedule is interleaved, the last stage also sends activations to the first stage.
    wrapped = messages[last, first] if first in later_stages.get(last, ()) else 0
    micro_batches = messages[first, second] - wrapped
    if micro_batches <= 0:
        return None
    stage_count, chunks = len(chains[0]), round(messages[first, second] / micro_batches)
    step_ns = np.array([(m.end - m.start)[index] for m, index in zip(members, steps, strict=True)])
    bubble_ns = np.array([_measure_bubble(*row) for row in zip(members, waits, steps, strict=True)])
    own_ms, bubble_ms = (np.median(ns, axis=1) / NS_PER_MS for ns in (own_ns, bubble_ns))
    stages = tuple(
        Stage(
            tuple(members[at].label for at in places), *(float(np.median(ms[[*places]])) for ms in (own_ms, bubble_ms))
        )
        for places in zip(*chains, strict=True)
    )
    in_pipeline = np.concatenate(chains)
    equal_stages_share = (stage_count - 1) / (micro_batches * chunks + stage_count - 1)
    length_ms = float(np.median(step_ns[in_pipeline])) / NS_PER_MS
    # Twice as many micro-batches remove half of the bubble of the longest stage, but not the time in which other stages
    # wait for the longest stage.
    longest = max(stages, key=lambda stage: stage.own_ms)
    return Pipeline(
        "interleaved" if chunks > 1 else _find_schedule(members, exchanges, steps, chains[0], micro_batches),
        micro_batches,
        chunks,
        stages,
        float((bubble_ns[in_pipeline].sum(axis=1) / step_ns[in_pipeline].sum(axis=1)).mean()),
        equal_stages_share,
        min(longest.bubble_ms, equal_stages_share * length_ms) / 2,
        *_find_slow_rank(members, chains, own_ns, length_ms),
    )


def _count_messages(
    members: Sequence[Member], exchanges: Sequence[Match], steps: Sequence[Ints]
) -> tuple[_Messages, dict[int, set[int]]]:
    """Counts the messages per step of each pair of ranks, and finds the ranks of the later stages.

    If a rank begins each step with a message to another rank, the other rank runs a later stage.
    """
    messages: _Messages = {}
    later_stages: dict[int, set[int]] = defaultdict(set)
    for match in exchanges:
        for place, other in (tuple(match), tuple(match)[::-1]):
            sends, receives, first_rows = _rows_of_steps(members[place], match[place], steps[place])
            messages[place, other] = round(sends.sum() / max(len(first_rows), 1))
            if len(first_rows) and (sends[first_rows] > 0).all() and not receives[first_rows].any():
                later_stages[place].add(other)
    return messages, later_stages


def _rows_of_steps(member: Member, index: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the number of sends and receives in each exchange of the steps, and the first exchange of each step."""
    collectives = member.collectives
    index = index[np.isin(collectives.step[index], steps)]
    index = index[np.argsort(collectives.launched[index], kind="stable")]
    _, first_rows = np.unique(collectives.step[index], return_index=True)
    return collectives.sends[index], collectives.receives[index], first_rows


def _find_chains(messages: _Messages, later_stages: Mapping[int, set[int]]) -> Iterator[tuple[int, ...]]:
    """Yields the ranks of each replica of the pipeline in the order of its stages.

    The last chain is empty if a rank begins steps with messages to several ranks, or if some ranks are in no chain.
    """
    has_earlier_stage = {later for stages in later_stages.values() for later in stages}
    heads = [place for place in later_stages if place not in has_earlier_stage]
    # If the schedule is interleaved, no stage is a head. The first stage is then the stage of the lowest rank.
    connected: set[int] = set()
    for head in heads or sorted(later_stages):
        if head in connected:
            continue
        chain = [head]
        while later := [place for place in later_stages.get(chain[-1], ()) if place not in chain]:
            if len(later) > 1:
                yield ()
                return
            chain += later
        connected |= set(chain)
        yield tuple(chain)
    if connected != {place for pair in messages for place in pair}:
        yield ()


def _find_schedule(
    members: Sequence[Member], exchanges: Sequence[Match], steps: Sequence[Ints], chain: Sequence[int],
    micro_batches: int,
) -> Schedule:  # fmt: skip
    """Returns the schedule, from the number of messages that the first stage sends before it receives a message."""
    match = next(match for match in exchanges if set(match) == set(chain[:2]))
    sends, receives, first_rows = _rows_of_steps(members[chain[0]], match[chain[0]], steps[chain[0]])
    has_received = np.append(np.flatnonzero(receives), len(sends) - 1)
    end = np.minimum(has_received[np.searchsorted(has_received, first_rows)] + 1, [*first_rows[1:], len(sends)])
    sent = np.append(0, np.cumsum(sends))
    sent_first = sent[end] - sent[first_rows]
    if round(float(np.median(sent_first))) == micro_batches:
        return "GPipe" if micro_batches > len(chain) else "GPipe or 1F1B"
    return "1F1B" if np.median(sent_first) <= len(chain) < micro_batches else "unknown"


def _measure_bubble(member: Member, waits: Waits, steps: Ints) -> Ints:
    """Returns the time in each step in which a rank only waits in sends and receives, ns."""
    collectives = member.collectives
    begin = np.where(collectives.kind == SEND_RECEIVE, waits.transfer_start_ns, collectives.start)
    order = np.argsort(begin, kind="stable")
    _, *gaps = Cover.from_intervals(begin[order], collectives.end[order]).find_gaps(*member.exposed)
    return Cover.from_intervals(gaps[0], gaps[1]).covered_within(member.start[steps], member.end[steps])


def _find_slow_rank(
    members: Sequence[Member], chains: Sequence[tuple[int, ...]], own_ns: npt.NDArray[Any], step_ms: float
) -> tuple[str, int, float]:
    """Returns the label, the stage and the delay, in ms, of the rank that is slower than the other ranks of its stage.

    Returns an empty label if there is no such rank. Of several such ranks, the rank with the longest delay counts.
    """
    slow_rank = ("", 0, 0.0)
    for number, places in enumerate(zip(*chains, strict=True), 1):
        own_of_stage = own_ns[list(places)]
        later_ns = own_of_stage - np.median(own_of_stage, axis=0)
        latest = int(np.argmax(np.median(later_ns, axis=1)))
        late_ms = float(np.median(later_ns[latest])) / NS_PER_MS
        is_steady = (later_ns.argmax(axis=0) == latest).mean() >= _STEADILY_SLOWEST_SHARE
        if len(places) > 2 and is_steady and late_ms >= max(_SLOWER_SHARE * step_ms, slow_rank[2]):
            slow_rank = (members[places[latest]].label, number, late_ms)
    return slow_rank
