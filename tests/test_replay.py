"""Tests replays: what a change does to a step, and that a replay without a change equals the measured step."""

from __future__ import annotations

import heapq
import lzma
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace, summarize
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranks.joined_study import join_replays
from nsys_analyzer.analysis.steps.groups import find_steps
from nsys_analyzer.analysis.steps.replay import (
    CALL_COLUMNS,
    COLLECTIVE_COLUMNS,
    OPERATION_COLUMNS,
    Replay,
    ReplayedTimes,
    replay_ranks,
)
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.steps.summarize import summarize_steps
from nsys_analyzer.trace.columns import SYNCHRONIZE
from tests.support.cases import Capture, make_case_test
from tests.support.export import ADD, global_pid
from tests.support.program import LAUNCH, US, Program, attributed, work_of

ROOT = Path(__file__).parent.parent


def floats(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, np.float64)


def make_replay(**columns: list[int]) -> Replay:
    """Returns the replay with these columns, as ``cpu_ns``; one that is not given has no time and waits for nothing."""
    calls, operations = len(columns["cpu_ns"]), len(columns["work_ns"])
    defaults = {
        "min_wait_ns": [0] * calls, "awaited": [-1] * calls, "return_ns": [0] * calls, "latency_ns": [0] * operations,
        "spacing_ns": [0] * operations, "first_call": [0, calls], "max_profiler_ns": [0] * calls,
        "pause_ns": [0] * calls, "stream": [0] * operations, "joined": [-1] * operations,
        "join_gap_ns": [0] * operations,
    }  # fmt: skip
    rows = {**defaults, **columns}
    return Replay(**{name: floats(row) if name.endswith("_ns") else np.array(row) for name, row in rows.items()})


# --- steps that are all alike, of random calls and work


@st.composite
def replays(draw: st.DrawFn, least: int = 1, most: int = 4, streams: int = 3) -> Replay:
    """Steps of one kind, as a program makes them: calls and streams wait for what was launched before.

    Times are whole, so that sums are exact. As on a device, work that follows other work starts sooner behind it than
    behind a launch, and a wait's end lies no further behind the work than the least that a wait takes.
    """
    steps, calls = draw(st.integers(least, most)), draw(st.integers(1, 6))
    operations = draw(st.lists(st.integers(0, calls - 1), max_size=6).map(sorted))  # the call that launched each
    small, many = st.integers(0, 9), len(operations)

    def each(elements: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(elements, min_size=count, max_size=count))

    spacing, stream = each(small, many), each(st.integers(0, streams - 1), many)
    latency = [draw(st.integers(max(spacing), 20)) for _ in operations]
    after, own = each(st.integers(0, 30), calls), each(small, calls)
    lag = [draw(st.integers(0, one)) for one in own]
    newest = [sum(launch <= call for launch in operations) - 1 for call in range(calls)]
    awaited = [draw(st.integers(0, last)) if last >= 0 and draw(st.booleans()) else -1 for last in newest]
    others = [[j for j in range(i) if stream[j] != stream[i]] for i in range(many)]
    behind = [draw(st.sampled_from(some)) if some and draw(st.booleans()) else -1 for some in others]

    def numbered(values: list[int], count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([one + step * count if one >= 0 else -1 for step in range(steps) for one in values], np.int64)

    times = {
        "cpu_ns": after, "min_wait_ns": own, "return_ns": lag, "latency_ns": latency, "spacing_ns": spacing,
        "work_ns": each(st.integers(0, 30), many), "max_profiler_ns": each(st.integers(0, 3), calls),
        "pause_ns": [draw(st.integers(0, one)) for one in after], "join_gap_ns": each(small, many),
    }  # fmt: skip
    return Replay(
        **{name: np.tile(floats(values), steps) for name, values in times.items()},
        awaited=numbered(awaited, many), launch=numbered(operations, calls), joined=numbered(behind, many),
        stream=np.tile(np.array(stream, np.int64), steps), first_call=np.arange(steps + 1) * calls,
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn, most: int = 3) -> list[Replay]:
    """Two or three ranks that meet in as many collectives, each the next operation of a rank that is left for one.

    Of some operations a rank does not wait for the others, as of what it sends.
    """
    steps = draw(st.integers(1, most))
    ranks = [draw(replays(steps, steps)) for _ in range(draw(st.integers(2, 3)))]
    met = draw(st.integers(0, min(len(rank.work_ns) for rank in ranks)))
    found = []
    for rank in ranks:
        collective, waits = np.full(len(rank.work_ns), -1), np.ones(len(rank.work_ns), np.bool_)
        places = sorted(draw(st.permutations(range(len(rank.work_ns))))[:met])
        collective[places] = range(met)
        waits[places] = [bool(draw(st.integers(0, 3))) for _ in range(met)]
        begin = (float(draw(st.integers(0, 50))),)
        found.append(replace(rank, collective=collective, waits_for_ranks=waits, rank_begin_ns=begin))
    return found


def joined(ranks: list[Replay]) -> Replay:
    """One replay of them all: positions are those among all calls, and among all operations."""
    calls = np.cumsum([0, *(len(rank.cpu_ns) for rank in ranks)])
    operations = np.cumsum([0, *(len(rank.work_ns) for rank in ranks)])
    names = (*CALL_COLUMNS, *OPERATION_COLUMNS, *COLLECTIVE_COLUMNS)
    columns = {name: [getattr(rank, name) for rank in ranks] for name in names}
    for name, before in (("launch", calls), ("first_call", calls), ("awaited", operations), ("joined", operations)):
        values = [getattr(rank, name) for rank in ranks]
        columns[name] = [np.where(one >= 0, one + at, -1) for one, at in zip(values, before, strict=False)]
    begin = tuple(rank.rank_begin_ns[0] for rank in ranks)
    return replace(ranks[0], **{name: np.concatenate(each) for name, each in columns.items()}, rank_begin_ns=begin)


def simulated(*ranks: Replay) -> float:
    """How long all steps take, event by event: programs that call, streams that work in order, waits for both.

    An operation that meets others ends its work's time after the last of them has started, and after its own start if
    it does not wait.
    """
    # What must have happened before an operation starts, each with the time from there: launch, operation before, other
    # stream.
    needs: dict[tuple[int, int], dict[tuple[str, int, int], float]] = {}
    for rank, replay in enumerate(ranks):
        for i in range(len(replay.work_ns)):
            before = max((j for j in range(i) if replay.stream[j] == replay.stream[i]), default=-1)
            needs[rank, i] = {("call", rank, int(replay.launch[i])): replay.latency_ns[i]}
            if before >= 0:
                needs[rank, i]["end", rank, before] = replay.spacing_ns[i]
            if replay.joined[i] >= 0:
                needs[rank, i]["end", rank, int(replay.joined[i])] = replay.join_gap_ns[i]
    meeting = {key: int(ranks[key[0]].collective[key[1]]) if len(ranks[key[0]].collective) else -1 for key in needs}
    ready, happened, last = dict.fromkeys(needs, 0.0), dict[tuple[str, int, int], float](), 0.0
    events = [(replay.rank_begin_ns[0], "call", rank, 0) for rank, replay in enumerate(ranks)]
    heapq.heapify(events)
    while events:
        time, kind, rank, number = heapq.heappop(events)
        happened[kind, rank, number] = last = time
        replay = ranks[rank]
        for key, waits in needs.items():
            if (kind, rank, number) in waits:
                ready[key] = max(ready[key], time + waits.pop((kind, rank, number)))
                if not waits:
                    heapq.heappush(events, (ready[key], "start", *key))
        if kind == "start":
            code = meeting[rank, number]
            others = [key for key, met in meeting.items() if code != -1 and met == code]
            all_started = all(("start", *key) in happened for key in others)
            ending = [key for key in others if ranks[key[0]].waits_for_ranks[key[1]]] if all_started else []
            alone = code == -1 or not replay.waits_for_ranks[number]
            for at, operation in [*ending, *([(rank, number)] if alone else [])]:
                heapq.heappush(events, (time + ranks[at].work_ns[operation], "end", at, operation))
        # The program goes on behind a call, or once both the call and what it waits for have happened.
        waiting = np.flatnonzero(replay.awaited == number).tolist() if kind == "end" else []
        for call in [number] if kind == "call" else waiting:
            if call == len(replay.cpu_ns) or ("call", rank, call) not in happened:
                continue
            operation, goes_on = int(replay.awaited[call]), happened["call", rank, call]
            if operation >= 0:
                if ("end", rank, operation) not in happened:
                    continue
                goes_on = max(
                    goes_on + replay.min_wait_ns[call], happened["end", rank, operation] + replay.return_ns[call]
                )
            heapq.heappush(events, (goes_on + replay.cpu_ns[call], "call", rank, call + 1))
    return last


@given(runs())
def test_ranks_take_what_a_simulation_takes(ranks: list[Replay]) -> None:
    """All at once; and each is what it was when they are taken apart again."""
    together = joined(ranks)
    assert together.total_ns == simulated(*ranks)
    for apart, rank in zip(together.ranks, ranks, strict=True):
        assert all(np.array_equal(getattr(apart, one), getattr(rank, one)) for one in ("awaited", "joined", "launch"))


@given(runs(most=2), st.sampled_from([0.5, 0.25]))
def test_only_the_critical_path_makes_ranks_shorter(ranks: list[Replay], left: float) -> None:
    """Of all ranks; a rank that nobody waits for has no part in it."""
    together = joined(ranks)
    calls, operations = together.critical_path()
    less = replace(together, cpu_ns=together.cpu_ns * np.maximum(calls, left)).scale_work(np.maximum(operations, left))
    assert less.total_ns == together.total_ns
    alone = replace(together, unawaited_ranks=frozenset([0]))
    assert alone.total_ns <= together.total_ns
    calls, operations = alone.critical_path()
    assert not calls[: len(ranks[0].cpu_ns)].any()
    assert not operations[: len(ranks[0].work_ns)].any()


def test_two_ranks_worked_out_by_hand() -> None:
    """Each launches A and a collective of 5, 2 apart, on one stream, 4 before they can start, and waits 1 for it.

    A takes 30 on rank 0, and 50 on rank 1: [4, 34) and [4, 54). The collective starts at 54 for both, and ends at 59;
    the waits end at 60, and the steps at 62.
    """
    late, early = (
        replace(
            make_replay(
                cpu_ns=[2, 2, 2], min_wait_ns=[0, 0, 1], awaited=[-1, -1, 1], return_ns=[0, 0, 1],
                launch=[0, 1], latency_ns=[4, 4], work_ns=[work, 5],
            ),
            collective=np.array([-1, 0]), waits_for_ranks=np.ones(2, np.bool_),
        )
        for work in (50, 30)
    )  # fmt: skip
    together = joined([early, late])
    assert together.step_ns == 62
    # Nobody waits for rank 1: [34, 39), 40, 42. The same if rank 0 does not wait for it, but the step is rank 1's.
    assert replace(together, unawaited_ranks=frozenset([1])).step_ns == 42
    assert joined([replace(early, waits_for_ranks=np.array([True, False])), late]).step_ns == 62
    # The collective, on one of both, and rank 1's A.
    assert together.critical_path()[1].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("name", ["ddp", *(f"ranks/{one}" for one in (
    "fsdp", "late_rank", "one_bucket", "one_report", "pipeline", "tensor", "usual_buckets"
))])  # fmt: skip
def test_a_replay_of_ranks_gives_their_steps(name: str, tmp_path: Path) -> None:
    """They wait for each other as long as they did: the steps but the first last as long as in the capture."""
    folder = ROOT / "examples" / ("ranks" if "/" in name else "programs") / "captures"
    paths = []
    for path in sorted(folder.glob(f"{name.partition('/')[2] or name}*.sqlite.xz")):
        paths.append(tmp_path / path.stem)
        paths[-1].write_bytes(lzma.decompress(path.read_bytes()))
    (run,) = join_replays(summarize(*paths))
    assert run.study is not None
    assert len(run.labels) == 2
    started, ended = run.study.calls.start, run.study.operations.start + run.study.operations.duration_ns
    for rank, times in zip(run.study.replay.ranks, replay_ranks(run.study.replay.ranks), strict=True):
        calls, operations = len(rank.cpu_ns), len(rank.work_ns)
        last = started[calls - 1] + rank.min_wait_ns[-1] * (rank.awaited[-1] >= 0) + rank.cpu_ns[-1]
        recorded = rank.step_lengths_ns(
            ReplayedTimes(np.append(started[:calls], last), np.append(ended[:operations], -(2.0**62)))
        )
        assert rank.step_lengths_ns(times)[1:-1].sum() == pytest.approx(recorded[1:-1].sum(), rel=0.01)
        started, ended = started[calls:], ended[operations:]


@given(replays())
def test_all_steps_take_what_a_simulation_takes(replay: Replay) -> None:
    assert replay.total_ns == simulated(replay)


# --- what a change does


def changes(replay: Replay, data: st.DataObject) -> list[Replay]:
    """Each kind of change that makes something shorter, the same one in every step."""
    calls, operations = len(replay.cpu_ns) // replay.steps, len(replay.work_ns) // replay.steps

    def chosen(count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.tile(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), replay.steps).astype(bool)

    return [
        replay.without_waits(chosen(calls)),
        replay.without_calls(chosen(calls)),
        replay.limit_pauses(chosen(calls), data.draw(st.integers(0, 20))),
        replay.scale_launches(np.where(chosen(calls), 0.5, 1.0)),
        replay.scale_work(np.where(chosen(operations), data.draw(st.sampled_from([0.0, 0.25, 0.5])), 1.0)),
        replay.without_profiler_cost(data.draw(st.integers(0, 10))),
    ]


@given(replays(), st.data())
def test_less_of_anything_never_takes_longer_in_all(replay: Replay, data: st.DataObject) -> None:
    for changed in changes(replay, data):
        assert changed.total_ns <= replay.total_ns + 1e-6


@given(replays(least=3, streams=1), st.data())
def test_less_of_anything_never_makes_a_step_longer(replay: Replay, data: st.DataObject) -> None:
    for changed in changes(replay, data):
        assert changed.step_ns <= replay.step_ns + 1e-6


@given(replays(least=3, streams=1))
def test_a_step_is_never_shorter_than_its_work(replay: Replay) -> None:
    """Neither than the GPU's, nor than the CPU's time without waits."""
    step = replay.step_ns
    assert step >= replay.work_ns.sum() / replay.steps - 1e-6
    assert step >= replay.cpu_ns.sum() / replay.steps - 1e-6
    unhindered = replay.without_waits(np.ones(len(replay.cpu_ns), np.bool_))
    assert step >= unhindered.cpu_ns.sum() / replay.steps - 1e-6


@given(replays())
def test_steps_take_at_most_all_there_is_one_behind_the_other(replay: Replay) -> None:
    everything = (
        replay.cpu_ns, replay.min_wait_ns, replay.return_ns, replay.latency_ns, replay.spacing_ns, replay.work_ns,
        replay.join_gap_ns,
    )  # fmt: skip
    assert replay.total_ns <= sum(float(part.sum()) for part in everything)


@given(replays(least=6, most=6), st.sampled_from([1, 2]))
def test_one_or_two_steps_are_repeated(replay: Replay, steps: int) -> None:
    """Three times, of which the last two times count."""

    def first(count: int) -> Replay:
        calls, operations = len(replay.cpu_ns) // 6 * count, len(replay.work_ns) // 6 * count
        columns = {name: getattr(replay, name)[:calls] for name in (*CALL_COLUMNS, "awaited")}
        columns |= {name: getattr(replay, name)[:operations] for name in (*OPERATION_COLUMNS, "launch", "joined")}
        return replace(replay, **columns, first_call=replay.first_call[: count + 1])

    later = first(3 * steps).total_ns - first(steps).total_ns
    assert first(steps).step_ns == later / (2 * steps)


@given(replays(most=2), st.sampled_from([0.5, 0.25]))
def test_only_the_critical_path_makes_steps_shorter(replay: Replay, left: float) -> None:
    """Less of what is not on it saves nothing; and of what is on it, more makes the steps as much longer at least."""
    calls, operations = replay.critical_path()
    assert set(calls.tolist() + operations.tolist()) <= {0, 1}
    less = replace(replay, cpu_ns=replay.cpu_ns * np.maximum(calls, left)).scale_work(np.maximum(operations, left))
    assert less.total_ns == replay.total_ns
    on_path = float((calls * replay.cpu_ns).sum() + (operations * replay.work_ns).sum())
    more = replace(replay, cpu_ns=replay.cpu_ns * (1 + calls)).scale_work(1 + operations)
    assert on_path <= replay.total_ns
    assert more.total_ns >= replay.total_ns + on_path


@given(replays(least=3))
def test_the_critical_path_is_as_long_as_the_steps(replay: Replay) -> None:
    """But for the first step; and but for what is no call's and no operation's time."""
    calls, operations = replay.critical_path()
    waits = replay.min_wait_ns.sum() + replay.return_ns.sum()
    gaps = (replay.latency_ns + replay.spacing_ns + replay.join_gap_ns).sum()
    on_path = float((calls * replay.cpu_ns).sum() + (operations * replay.work_ns).sum())
    assert on_path <= replay.step_ns * (replay.steps - 1) + 1e-6
    assert on_path >= replay.step_ns * (replay.steps - 1) - float(waits + gaps) - 1e-6


def test_steps_worked_out_by_hand() -> None:
    """Three calls: two launches 10 apart, a wait. Work 30 and 40 behind a latency of 5.

    The first runs [5, 35), the second, launched at 10, [36, 76); the wait ends at 76 + 2, and the step at 78 + 4.
    """
    replay = make_replay(
        cpu_ns=[10, 6, 4], min_wait_ns=[0, 0, 3], awaited=[-1, -1, 1], return_ns=[0, 0, 2],
        launch=[0, 1], latency_ns=[5, 5], spacing_ns=[1, 1], work_ns=[30, 40],
    )  # fmt: skip
    assert replay.step_ns == 82
    wait = np.array([False, False, True])
    # Without the wait the CPU needs 10 + 6 + 3 + 4 = 23, and the GPU 31 + 41; without the call the same.
    assert replay.without_waits(wait).step_ns == 72
    assert replay.without_calls(wait).step_ns == 72
    # Half the second operation's work: until 56, 58 with the wait, 62. Without the first: [15, 55), 57, 61.
    assert replay.scale_work(floats([1, 0]) / 2 + 0.5).step_ns == 62
    assert replay.scale_work(floats([0, 1])).step_ns == 61
    # At most 3 between calls: the second operation still ends at 76, the wait at 78; of the 4 behind it 3 are left.
    assert replace(replay, pause_ns=replay.cpu_ns).limit_pauses(np.ones(3, np.bool_), 3).step_ns == 81


def test_a_graph_whose_nodes_were_recorded() -> None:
    """The launch of two nodes takes 900 ns, the first starts behind it, and a wait ends 2 behind the second."""
    replay = make_replay(
        cpu_ns=[900, 4], min_wait_ns=[0, 3], awaited=[-1, 1], return_ns=[0, 2],
        launch=[0, 0], latency_ns=[905, 905], spacing_ns=[1, 1], work_ns=[30, 40],
    )  # fmt: skip
    replay = replace(replay, is_single_pass=True)
    # 905 + 30 + 1 + 40 = 976, the wait until 978, and 4.
    assert replay.step_ns == 982
    # A launch of 100 and its latency are 800 shorter; one of 1,000 at most is as it was.
    assert replay.with_graph_launches(100, 0).step_ns == 182
    assert replay.with_graph_launches(1_000, 0).step_ns == 982
    # The second node starts 1 behind the first: 0.25 without what recording it costs, or at once.
    assert replay.with_graph_launches(1_000, 0.75).step_ns == 981.25
    assert replay.with_graph_launches(1_000, 9).step_ns == 981


# --- programs whose timing is that of the model


def study_of(program: Program, folder: Path) -> Study:
    return study_of_process(attributed(program, folder), global_pid())


def study_of_process(trace: AttributedTrace, process: int) -> Study:
    study = summarize_steps(*work_of(trace, process))[1]
    assert study is not None
    return study


def study_in(capture: Capture) -> Study:
    """Returns the studied steps of a case."""
    study = study_of_process(capture.attributed, global_pid())
    assert study.steps >= 3
    return study


def step_with(part: float, kernel_class: str) -> Callable[[Capture], float]:
    """Returns the length of a step, µs, whose kernels of a class take this part of their time."""

    def measure(capture: Capture) -> float:
        study = study_in(capture)
        return study.replay.scale_work(np.where(study.of_class(kernel_class), part, 1.0)).step_ns / US

    return measure


def step_with_work(capture: Capture, part: float) -> float:
    study = study_in(capture)
    return study.replay.scale_work(np.full(len(study.operations.kind), part)).step_ns / US


def step_without_waits(capture: Capture) -> float:
    study = study_in(capture)
    return study.replay.without_waits(study.calls.kind == SYNCHRONIZE).step_ns / US


def step_with_launches_5_us_apart(capture: Capture) -> float:
    study = study_in(capture)
    launches = np.array([study.apis[code] == LAUNCH for code in study.calls.api])
    return replace(study.replay, pause_ns=study.replay.cpu_ns).limit_pauses(launches, 5 * US).step_ns / US


def classes_on_critical_path(capture: Capture) -> list[str]:
    study = study_in(capture)
    _, operations = study.replay.critical_path()
    return [name for name in ("communication", "elementwise", "matmul") if operations[study.of_class(name)].any()]


def us_on_critical_path(capture: Capture, of_calls: bool) -> float:
    """Returns the time of the calls, or of the operations, on the critical path of all steps but the first, µs."""
    replay = study_in(capture).replay
    calls, operations = replay.critical_path()
    return float((calls * replay.cpu_ns if of_calls else operations * replay.work_ns).sum()) / US


def by_class(count: Callable[[Study, str], float]) -> Callable[[Capture], dict[str, float]]:
    return lambda capture: {name: count(study_in(capture), name) for name in ("elementwise", "matmul")}


test_replayed_programs = make_case_test(
    "replay",
    {
        "step": lambda capture: study_in(capture).replay.step_ns / US,
        "step without work": lambda capture: step_with_work(capture, 0),
        "step with half the work": lambda capture: step_with_work(capture, 0.5),
        "step without waits": step_without_waits,
        "step with launches 5 µs apart": step_with_launches_5_us_apart,
        "step with half the matmul": step_with(0.5, "matmul"),
        "step with half the elementwise": step_with(0.5, "elementwise"),
        "step with half the communication": step_with(0.5, "communication"),
        "step with twice the communication": step_with(2, "communication"),
        "step without communication": step_with(0, "communication"),
        "classes on the critical path": classes_on_critical_path,
        "work on the critical path": lambda capture: us_on_critical_path(capture, of_calls=False),
        "calls on the critical path": lambda capture: us_on_critical_path(capture, of_calls=True),
        "ms of work": by_class(lambda study, name: study.work_ms(study.of_class(name))),
        "operations per step": by_class(lambda study, name: study.operations_per_step(study.of_class(name))),
        "busy_ms": lambda capture: study_in(capture).busy_ms,
    },
)


@pytest.mark.parametrize("steps", [4, 5, 20])
def test_a_program_that_runs_ahead_of_the_gpu(tmp_path: Path, steps: int) -> None:
    """Two kernels of 40 µs, 1 µs apart, launched 10 µs apart, and the next step's at once: 82 µs for the GPU."""
    program = Program()
    for step in range(steps):
        at = 20 * step + 1
        program.step(at, at + 20)
        for number in range(2):
            called, ran = at + 10 * number, 7 + 82 * step + 41 * number
            program.work((called, called + 4), (ran, ran + 40), name=ADD)
    study = study_of(program, tmp_path)
    assert study.steps >= 3
    assert study.replay.step_ns == 82 * US


def test_the_first_step_waits_for_work_from_before_the_steps(tmp_path: Path) -> None:
    """The GPU works on earlier kernels until 135 µs. So a kernel of 50 µs in each step hides launches every 52 µs."""
    program = Program().work((1, 3), (5, 135), name=ADD)
    for step in range(5):
        launch, start = 60 + 52 * step, 135 + 50 * step
        program.step(launch - 1, launch + 51).work((launch, launch + 4), (start, start + 50))
    study = study_of(program, tmp_path)
    assert study.steps >= 3
    assert study.replay.step_ns == 50 * US


def test_a_queue_full_of_what_came_before_holds_up_no_replay(tmp_path: Path) -> None:
    """400 kernels of 50 µs a step, behind 1,024 of 80 that fill the queue: each call lasts until the GPU takes one.

    So the program needs 400 × 80 µs for a step at first, and the GPU 400 × 50 µs for each.
    """
    program = Program()
    ended, queued, called = 3000, list[int](), 2100
    for number in range(1024):
        program.work((2 * number, 2 * number + 1), (ended, ended + 80), name=ADD)
        ended += 80
        queued.append(ended)
    for _ in range(5):
        begun = called
        for _ in range(400):
            left = queued[-1024]
            program.work((called, left + 1), (ended, ended + 50))
            ended, called = ended + 50, left + 1
            queued.append(ended)
        program.step(begun, called)
    assert study_of(program, tmp_path).replay.step_ns == 20_000 * US


@pytest.mark.parametrize(("earlier_end", "first_call_us"), [(302, 8), (15, 290)])
def test_a_wait_for_work_from_before_the_steps_is_not_replayed(
    tmp_path: Path, earlier_end: int, first_call_us: int
) -> None:
    """The first call lasts from 20 to 302 µs, and the next one starts at 310.

    If a kernel from before the steps runs until then, the call waits for it, and only 8 µs are the CPU's time. If that
    kernel has ended before, something else takes the 290 µs.
    """
    program = Program().work((1, 3), (5, earlier_end), name=ADD)
    program.api("cudaEventSynchronize_v3020", 20, 302)
    for begin in (10, 400, 790):
        launch = begin + 300
        program.step(begin, begin + 390).work((launch, launch + 4), (launch + 8, launch + 48), name=ADD)
    study = study_of(program, tmp_path)
    assert study.replay.cpu_ns[0] == first_call_us * US


def test_what_streams_wait_for_is_what_the_capture_recorded(real_capture: Callable[[str], Path]) -> None:
    """Of this capture CUPTI's own tables tell it, too: each of a step's 19 collectives waits for the compute stream,
    7, and that for each of them; waits of a third stream, 14, hold nothing up. Two steps are replayed.
    """
    path = real_capture("ddp2_small256")
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT DISTINCT e.streamId, s.streamId FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION s "
            "JOIN CUPTI_ACTIVITY_KIND_CUDA_EVENT e USING (globalPid, eventId) WHERE s.syncType = 2"
        ).fetchall()
    # An event's handle is used again: of the same stream a row is another event's.
    assert {(ran, waits) for ran, waits in rows if ran != waits and 14 not in (ran, waits)} == {(7, 17), (17, 7)}
    trace = AttributedTrace(Trace.load(path))
    for process in find_processes(trace.trace):
        replay = study_of_process(trace, process.global_pid).replay
        joins = np.flatnonzero(replay.joined >= 0)
        pairs = Counter(zip(replay.stream[replay.joined[joins]].tolist(), replay.stream[joins].tolist(), strict=True))
        assert pairs.keys() == {(7, 17), (17, 7)}
        assert all(0.85 * 38 < count <= 38 for count in pairs.values())


#: Every committed capture; of some without the calls of whole steps nothing is replayed.
CAPTURES = sorted([*(ROOT / "tests/data").glob("*.sqlite*"), *(ROOT / "examples").rglob("*.sqlite*")])


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_replay_gives_the_steps_of_a_real_capture(path: Path, tmp_path: Path) -> None:
    """Of nothing changed the replay is what was recorded: each step to one part in a thousand."""
    if path.suffix == ".xz":
        unpacked = tmp_path / path.stem
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        path = unpacked
    trace = AttributedTrace(Trace.load(path))
    for process in find_processes(trace.trace):
        process_id = process.global_pid
        study = summarize_steps(*work_of(trace, process_id))[1] if find_steps(trace, process_id) else None
        if study is None:
            assert path.stem in ("cpu_train", "nccl_init")
        else:
            assert study.replay.step_ns == pytest.approx(study.profiled_step_ns, rel=0.001)
