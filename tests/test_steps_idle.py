"""Tests the causes of idle time: one for every nanosecond, and each in a program made for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import merge_ranges
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import Gaps
from nsys_analyzer.analysis.steps.process import CAUSES, PAUSE_NS, IdleStretches, ProcessWork, is_loading
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.phase_names import REQUEST_RANGE, PhaseNames, map_by_shape, parse_served_step
from tests.support.cases import Capture, make_case_test
from tests.support.export import AUTOGRAD, MAIN, global_pid, global_tid
from tests.support.program import COPY, FREE, GRAPH, LAUNCH, MALLOC, NCCL, SYNC, US, Program, attributed, idle_of
from tests.support.program import summary_of_steps as summarize

VERSIONED = {name.partition("_v")[0]: name for name in (SYNC, COPY, MALLOC, FREE, GRAPH)}


def sum_idle_us(trace: AttributedTrace) -> dict[tuple[str, str, str], float]:
    """Returns the idle time of a program's only step by cause, range and API call, and checks the stretches of it."""
    summary = summarize(trace, global_pid())
    assert summary is not None
    for idle in idle_of(trace, global_pid()):
        ns = np.bincount(idle.cause, idle.end - idle.start, len(CAUSES)).tolist()
        by_cause = {cause: idle / 1e6 for cause, idle in zip(CAUSES, ns, strict=True) if idle}
        assert by_cause == pytest.approx({row.cause: row.ms for row in summary.causes})
        assert (idle.start[1:] >= idle.end[:-1]).all()
    # The version that CUPTI puts behind a name is left out.
    return {
        (row.cause, row.range or "", VERSIONED.get(row.api or "", row.api or "")): round(row.ms * 1e3, 6)
        for row in summary.idle_by_cause
    }


def stretches(capture: Capture) -> list[tuple[float, float, str]]:
    """Returns the start, the end (µs since the step began) and the cause of each stretch without work."""
    begun = int(capture.attributed.instances.start[0])
    (idle,) = idle_of(capture.attributed, global_pid())
    rows = zip((idle.start - begun).tolist(), (idle.end - begun).tolist(), idle.cause.tolist(), strict=True)
    return [(start / US, end / US, CAUSES[cause]) for start, end, cause in rows]


test_idle_time = make_case_test(
    "idle", {"idle us": lambda capture: sum_idle_us(capture.attributed), "stretches": stretches}
)


@pytest.mark.parametrize(
    ("table", "name", "tid", "by_profiler"),
    [
        ("CUPTI_ACTIVITY_KIND_OVERHEAD", "Activity Buffer Request", MAIN, 350),
        ("PROFILER_OVERHEAD", "Chunk Allocation", MAIN, 350),
        ("CUPTI_ACTIVITY_KIND_OVERHEAD", "Command Buffer Full", MAIN, 0),  # the queue of launches is full
        ("CUPTI_ACTIVITY_KIND_OVERHEAD", "Runtime Triggered Module Loading", MAIN, 0),  # the program's own
        ("PROFILER_OVERHEAD", "CUPTI Buffer flush", MAIN + 9, 0),  # beside the program
    ],
)
def test_what_the_profiler_notes_of_itself_is_no_launch(
    tmp_path: Path, table: str, name: str, tid: int, by_profiler: int
) -> None:
    """The launch of what runs from 600 on takes from 150 to 620; the profiler works in it from 160 to 550."""
    made = Program().step(0, 1000).work((-10, -6), (0, 200)).work((150, 620), (600, 1000))
    made.add(table, start=160 * US, end=550 * US, globalTid=global_tid(tid), nameId=made.string(name))
    by_cause = {cause: us for (cause, *_), us in sum_idle_us(attributed(made, tmp_path)).items()}
    assert (by_cause.get("profiler", 0), by_cause["launch"]) == (by_profiler, 400 - by_profiler)


def test_names_of_an_input_pipeline() -> None:
    loading = (
        "data", "DataLoader", "load_batch", "fetch next batch 7", "get_batch", "next batch", "load inputs",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "torch/utils/data/dataloader.py(701): __next__", "src/dataset.py(9): __getitem__", "train.py(30): get_batch",
    )  # fmt: skip
    others = (
        "update", "database", "inputs_embeds", "input_layernorm", "BatchNorm2d", "workload", "", "Batch 7",
        "DistributedDataParallel.forward", "load_balancing_loss", "process_batch", "eval_batch", "load_checkpoint",
        "expert load balance", "prefetch_h2d_w3", "prefetch_h2d_wo", "fetch_expert_3",
        "/data/flashinfer/cubin_loader.py(185): get_cubin", "models/loader.py(7): load_model",
    )  # fmt: skip
    assert [name for name in (*loading, *others) if is_loading(name)] == list(loading)


# --- laws

Draws = tuple[list[tuple[str, int, int, int]], list[tuple[int, int, int, str]], list[tuple[str, int, int]]]
CALLS = (LAUNCH, SYNC, COPY, MALLOC, FREE, "cuMemAlloc_v2", "cudaEventRecord_v3020")
times = st.integers(0, 1200)
calls = st.lists(
    st.tuples(st.sampled_from(CALLS), times, st.sampled_from([1, 5, 20, 60, 300]), st.sampled_from([MAIN, AUTOGRAD])),
    max_size=10,
)
kernels = st.lists(
    st.tuples(times, st.integers(0, 250), st.integers(1, 150), st.sampled_from(["kernel", "copy", NCCL, "unlaunched"])),
    max_size=10,
)
ranges = st.lists(
    st.tuples(st.sampled_from(["step", "data", "tokenize", "backward"]), times, st.integers(1, 600)), max_size=5
)


def one_step() -> Windows:
    """A step of 1200 µs."""
    return Windows.of_program("range", "a range named step", np.array([0]), np.array([1200 * US]))


def random_program(draws: Draws) -> Program:
    """Calls of two threads, kernels and copies launched by others, and ranges, all of them anywhere."""
    export = Program()
    export.thread(AUTOGRAD, "pt_autograd_0").kernel("first", -5 * US, -4 * US, -3 * US).kernel(
        "first of autograd's", -5 * US, -4 * US, -3 * US, tid=AUTOGRAD
    )
    for name, start, length, thread in draws[0]:
        export.api(name, start, start + length, thread)
    for called, latency, length, kind in draws[1]:
        ran = (called + latency, called + latency + length)
        if kind == "copy":
            export.copy((called, called + 4), ran, stream=8)
        elif kind == "unlaunched":
            export.kernel("unlaunched", None, ran[0] * US, ran[1] * US, stream=10)
        else:
            export.work((called, called + 4), ran, name=kind, stream=9)
    for name, start, length in draws[2]:
        export.open(name, start, start + length)
    return export


def test_a_call_of_no_length_at_the_end_of_another_is_a_call(tmp_path: Path) -> None:
    """The driver's in [12, 15) lies inside the runtime's in [10, 20); a coarse clock puts the next into [20, 20)."""
    own = [(SYNC, 10, 10, MAIN), ("cuStreamSynchronize", 12, 3, MAIN), ("cudaEventRecord_v3020", 20, 0, MAIN)]
    trace = attributed(random_program((own, [], [])), tmp_path)
    work = ProcessWork(trace, global_pid(), one_step())
    assert np.diff(work.calls.start[-2:]).tolist() == [10 * US]
    assert len(work.calls) == 2 + 2  # beside the launches of both threads


def causes_of(trace: AttributedTrace, bounds: list[int]) -> tuple[Gaps, IdleStretches]:
    """The gaps of the steps between some moments, µs, and their causes."""
    start, end = np.array(bounds[:-1]) * US, np.array(bounds[1:]) * US
    work = ProcessWork(trace, global_pid(), one_step())
    pauses = work.delays.select(np.isin(work.delays.cause, [CAUSES.index("host"), CAUSES.index("data")]))
    _, start_of_pause, end_of_pause = merge_ranges(np.zeros(len(pauses)), pauses.start, pauses.end)
    assert (end_of_pause - start_of_pause >= PAUSE_NS).all()
    ((_, anatomy),) = work.dissect_blocks(Windows.of_program("range", "a range step", start, end), 0)
    return anatomy.gaps, work.find_idle_causes(anatomy.gaps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@given(st.tuples(calls, kernels, ranges), st.lists(times, min_size=2, max_size=4, unique=True).map(sorted))
def test_the_causes_add_up_to_the_gaps(folder: Path, draws: Draws, bounds: list[int]) -> None:
    gaps, idle = causes_of(attributed(random_program(draws), folder), bounds)
    assert (idle.end > idle.start).all()
    # Joined where they touch, the stretches are the gaps.
    inside = np.isin(idle.start, idle.end) & ~np.isin(idle.start, gaps.start)
    assert idle.start[~inside].tolist() == gaps.start.tolist()
    assert np.bincount(np.cumsum(~inside) - 1, idle.end - idle.start).tolist() == (gaps.end - gaps.start).tolist()
    # A gap has one cause besides pauses, allocations and launches that take long.
    base = ~np.isin(idle.cause, [CAUSES.index(cause) for cause in ("host", "data", "allocator")])
    base &= (idle.cause != CAUSES.index("launch")) | (idle.api == -1)
    gap = np.cumsum(~inside)[base]
    assert len(set(zip(gap.tolist(), idle.cause[base].tolist(), strict=True))) == len(set(gap.tolist()))
    assert idle.begins[base].sum() == len(set(gap.tolist()))


@given(st.tuples(calls, kernels, ranges), st.integers(1, 1199))
def test_what_a_gap_is_due_to_depends_on_it_alone(folder: Path, draws: Draws, cut: int) -> None:
    """The gaps of two steps that are looked at together have the causes that they have one by one."""
    trace = attributed(random_program(draws), folder)
    _, together = causes_of(trace, [0, cut, 1200])
    apart = [causes_of(trace, bounds)[1] for bounds in ([0, cut], [cut, 1200])]
    for name in ("start", "end", "cause", "range", "api", "is_device_pause"):
        assert getattr(together, name).tolist() == [one for part in apart for one in getattr(part, name).tolist()]


# --- many names


@given(st.text(alphabet="0123459 _#-/[](),=forwadstepFBWDLIx:", max_size=30))
def test_what_names_say_does_not_depend_on_the_values_of_digits(name: str) -> None:
    names = (
        name,
        *(f"{word}{name}" for word in ("step ", "decode step ", "request ", "batch", "prefill[bs=1", "fetch_")),
    )
    assert PhaseNames().find_roles(names) == [PhaseNames().find_role(one) for one in names]
    assert map_by_shape(names, is_loading) == [is_loading(one) for one in names]
    for known in (lambda one: parse_served_step(one) is not None, lambda one: bool(REQUEST_RANGE.fullmatch(one))):
        assert map_by_shape(names, known) == [known(one) for one in names]


def test_idle_time_of_many_ranges_is_told_of_the_longest_alone(tmp_path: Path) -> None:
    """A pause from 200 to 1,700 ms in 1,500 ranges of 1 ms: each is 1 ns shorter than the one before."""
    made = (
        Program().step(0, 1_800_000).work((-10, -6), (0, 200_000)).work((1_700_000, 1_700_004), (1_700_010, 1_800_000))
    )
    at = 200_000_000
    for number in range(1_500):
        length = 1_000_000 - 750 + 1_500 - number
        made.range(f"request {number} of x", at, at + length)
        at += length
    summary = summarize(attributed(made, tmp_path), global_pid())
    assert summary is not None
    named = [row.range for row in summary.idle_by_cause if (row.range or "").startswith("request")]
    rest = [row for row in summary.idle_by_cause if row.range == "other ranges"]
    assert named == [f"request {number} of x" for number in range(len(named))]
    assert 990 < len(named) <= 1_000
    assert sum(row.gaps for row in rest) == 1_500 - len(named)
    assert sum(row.ms for row in summary.idle_by_cause) == pytest.approx(summary.idle_ms)
