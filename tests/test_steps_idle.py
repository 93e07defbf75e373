"""Why the GPU idles: one cause for every nanosecond, and each cause in a program made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import merge_ranges
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import Gaps
from nsys_analyzer.analysis.steps.process import CAUSES, PAUSE_NS, Idle, ProcessWork, is_loading
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.phase_names import REQUEST_RANGE, PhaseNames, map_by_shape, parse_served_step
from tests.support.export import AUTOGRAD, MAIN, global_pid, global_tid
from tests.support.program import COPY, FREE, LAUNCH, MALLOC, NCCL, SYNC, US, Program, attributed, idle_of
from tests.support.program import summary_of_steps as summarize

OTHER_PID, GRAPH = 200, "cudaGraphLaunch_v10000"
VERSIONED = {name.partition("_v")[0]: name for name in (SYNC, COPY, MALLOC, FREE, GRAPH)}
NEXT_BATCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
#: A method of ``Program`` and what it is called with, µs.
Event = tuple[Any, ...]


def program(*events: Event, end: float = 200) -> Program:
    """A step [0, 1000) with a kernel that runs [0, end), launched before; and what follows."""
    made = Program().step(0, 1000).work((-10, -6), (0, end))
    made.thread(AUTOGRAD, "pt_autograd_0")
    for name, *arguments in events:
        named = arguments.pop() if isinstance(arguments[-1], dict) else {}
        getattr(made, name)(*arguments, **named)
    return made


def idle_us(program: Program, folder: Path) -> dict[tuple[str, str, str], float]:
    """The idle time of a program's only step by cause, range and API call, µs: that of its stretches, too."""
    trace = attributed(program, folder)
    summary = summarize(trace, global_pid())
    assert summary is not None
    for idle in idle_of(trace, global_pid()):
        ns = np.bincount(idle.cause, idle.end - idle.start, len(CAUSES)).tolist()
        by_cause = {cause: idle / 1e6 for cause, idle in zip(CAUSES, ns, strict=True) if idle}
        assert by_cause == pytest.approx({one.cause: one.ms for one in summary.causes})
        assert (idle.start[1:] >= idle.end[:-1]).all()
    # The version that CUPTI puts behind a name is left out.
    return {
        (row.cause, row.range or "", VERSIONED.get(row.api or "", row.api or "")): round(row.ms * 1e3, 6)
        for row in summary.idle_by_cause
    }


def last(called: float, ran: float) -> Event:
    """The kernel that ends the gap, and runs until the step's end."""
    return "work", (called, called + 4), (ran, 1000)


ON_AUTOGRAD = {"tid": AUTOGRAD}
QUEUED = "work", (30, 34), (250, 1000)  # launched at 30, started at 250: nothing of the program's is missing
#: Of a step [0, 1000) µs, whose first kernel runs [0, 200): what else happens, and the idle time by cause.
IDLE: dict[str, tuple[list[Event], dict[tuple[str, str, str], float]]] = {
    # As ``.item()``: the copy ends at 202, the wait at 204; the next kernel is launched at 220, runs at 230.
    "sync": (
        [("copy", (10, 13), (200, 202)), ("open", "log", 5, 210), ("api", SYNC, 14, 204), last(220, 230)],
        {("sync", "log", SYNC): 28},
    ),
    # Of the gap [200, 430), cudaFree has [200, 260), cudaMalloc [270, 400), and what is left is launching's: 40.
    "allocator": (
        [("open", "forward", 100, 500), ("api", FREE, 150, 260), ("api", MALLOC, 270, 400), last(410, 430)],
        {("allocator", "forward", FREE): 60, ("allocator", "forward", MALLOC): 130, ("launch", "", ""): 40},
    ),
    # The kernel is launched at 300: of the gap [200, 320) the allocator has 90, not what follows.
    "an allocation behind the launch": (
        [("api", MALLOC, 150, 290), last(300, 320), ("api", MALLOC, 305, 600)],
        {("allocator", "", MALLOC): 90, ("launch", "", ""): 30},
    ),
    # The copy's call returns at 240, 2 µs behind the copy: the gap [238, 260) begins inside it.
    "copy": ([("copy", (100, 240), (200, 238)), last(250, 260)], {("copy", "", COPY): 22}),
    # Its call takes 5 µs, inside which the gap [200, 230) begins; the kernel is launched at 205.
    "an asynchronous copy": ([("copy", (196, 201), (198, 200), 8), last(205, 230)], {("launch", "", ""): 30}),
    # The kernel is launched at 205, after another call: a gap of 20 µs, no longer than launches take.
    "launch": ([("api", "cudaStreamIsCapturing_v10000", 198, 204), last(205, 220)], {("launch", "", ""): 20}),
    # From 198 to 350 a module is loaded: of the gap [200, 370), 150 are that call's, 20 the launch's.
    "a call that takes long": (
        [("open", "forward", 190, 400), ("api", "cuLibraryLoadData", 198, 350), last(355, 370)],
        {("launch", "forward", "cuLibraryLoadData"): 150, ("launch", "", ""): 20},
    ),
    # As ``.item()`` before the launch of a graph: of the gap [202, 600) the wait has [202, 220), up to the next call.
    "a launch that takes long behind a wait": (
        [("copy", (10, 13), (200, 202)), ("api", SYNC, 14, 204), ("work", (220, 620), (600, 1000), {"api": GRAPH})],
        {("sync", "", SYNC): 18, ("launch", "", GRAPH): 380},
    ),
    # The GPU runs dry at 200, inside the call that launches what runs from 600 on.
    "a launch that takes long": ([("work", (150, 620), (600, 1000), {"api": GRAPH})], {("launch", "", GRAPH): 400}),
    # The same for a copy that waits for the kernel before it: what the GPU needs from one to the next.
    "a copy that waits": (
        [("copy", (50, 300), (205, 298)), last(301, 302)], {("launch", "", ""): 5, ("copy", "", COPY): 4},
    ),
    # What the GPU needs from one kernel to the next that it has in its queue is launching's, too.
    "queued kernels": ([last(10, 202)], {("launch", "", ""): 2}),
    # No call from 14 to 500 but work in ``tokenize``, to 495: of the gap [200, 506), 295 are its, 6 the launch's.
    "host": (
        [("open", "tokenize", 20, 495), ("api", "cudaEventRecord_v3020", 10, 14), last(500, 506)],
        {("host", "tokenize", ""): 295, ("host", "", ""): 5, ("launch", "", ""): 6},
    ),
    "a pause in no range but the step's": ([last(500, 506)], {("host", "", ""): 300, ("launch", "", ""): 6}),
    "data": (
        [("open", NEXT_BATCH, 20, 495), last(500, 506)],
        {("data", NEXT_BATCH, ""): 295, ("host", "", ""): 5, ("launch", "", ""): 6},
    ),
    # The loader has [200, 250) of the gap [200, 506) and ``augment`` [300, 400). What is in no range is not the
    # loader's, although a copy follows: 50 + 100.
    "a pause that goes on behind the loader": (
        [
            ("open", NEXT_BATCH, 20, 250), ("open", "augment", 300, 400), ("copy", (500, 504), (506, 520)),
            last(512, 520),
        ],
        {("data", NEXT_BATCH, ""): 50, ("host", "augment", ""): 100, ("host", "", ""): 150, ("launch", "", ""): 6},
    ),
    # The innermost of ranges counts: [200, 260) and [350, 495) are ``epoch``'s, [260, 350) the loader's.
    "a loader inside another range": (
        [("open", "epoch", 20, 495), ("open", NEXT_BATCH, 260, 350), last(495, 506)],
        {("host", "epoch", ""): 60 + 145, ("data", NEXT_BATCH, ""): 90, ("launch", "", ""): 11},
    ),
    # The program pauses until 500 and copies its batch; the gap [520, 530) behind the copy is launching's, too.
    "an unnamed pause before a copy": (
        [("copy", (500, 504), (506, 520)), last(522, 530)],
        {("data", "", ""): 300, ("launch", "", ""): 16},
    ),
    "a named pause before a copy": (
        [("open", "tokenize", 20, 495), ("copy", (500, 504), (506, 520)), last(512, 520)],
        {("host", "tokenize", ""): 295, ("host", "", ""): 5, ("launch", "", ""): 6},
    ),
    "a collective in the queue": ([(*QUEUED, {"name": NCCL, "stream": 9})], {("communication", "", ""): 50}),
    "a kernel in the queue": ([(*QUEUED, {"stream": 9})], {("unknown", "", ""): 50}),
    # The program allocates meanwhile, [200, 240), which keeps nothing waiting.
    "an allocation beside the queue": (
        [(*QUEUED, {"name": NCCL, "stream": 9}), ("api", MALLOC, 150, 240)],
        {("communication", "", ""): 50},
    ),
    "an operation without a launch": (
        [("kernel", "ampere_sgemm_128x64_tn", None, 300 * US, 1000 * US)],
        {("unknown", "", ""): 100},
    ),
    # cuMemAlloc [155, 395) inside cudaMalloc [150, 400): of the gap [200, 430) the allocator has 200, not 395.
    "a driver's call inside a runtime's": (
        [
            ("api", MALLOC, 150, 400), ("api", "cuMemAlloc_v2", 155, 395), ("api", "cuStreamSynchronize", 156, 300),
            last(410, 430),
        ],
        {("allocator", "", MALLOC): 200, ("launch", "", ""): 30},
    ),
    # Autograd's own range names an operator: the pause [18, 500) is backward's. Its allocations count.
    # Gaps [210, 506) and [510, 810).
    "autograd's thread, while the main one waits": (
        [
            ("open", "backward", 5, 990), ("open", "MulBackward0", 11, 600, ON_AUTOGRAD),
            ("work", (12, 18), (200, 210), ON_AUTOGRAD), ("work", (500, 504), (506, 510), ON_AUTOGRAD),
            ("api", MALLOC, 507, 800, ON_AUTOGRAD), ("work", (802, 806), (810, 1000), ON_AUTOGRAD),
        ],
        {("host", "backward", ""): 290, ("allocator", "backward", MALLOC): 290, ("launch", "", ""): 16},
    ),
    # [190, 400) on one thread, [300, 420) on another: of the gap [200, 430), 220 together.
    "two threads in the allocator": (
        [
            ("work", (10, 14), (100, 110), {**ON_AUTOGRAD, "stream": 8}), ("api", MALLOC, 190, 400),
            ("api", FREE, 300, 420, ON_AUTOGRAD), last(422, 430),
        ],
        {("allocator", "", MALLOC): 200, ("allocator", "", FREE): 20, ("launch", "", ""): 10},
    ),
    # A thread that pins memory: its cudaHostAlloc keeps nothing waiting, and ends no pause.
    "a thread that launches nothing": (
        [last(500, 506), ("api", "cudaHostAlloc_v3020", 250, 450, MAIN + 7)],
        {("host", "", ""): 300, ("launch", "", ""): 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_what_a_gap_is_due_to(tmp_path: Path, case: str) -> None:
    events, expected = IDLE[case]
    assert idle_us(program(*events), tmp_path) == expected


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
    made = program(("work", (150, 620), (600, 1000)))
    made.add(table, start=160 * US, end=550 * US, globalTid=global_tid(tid), nameId=made.string(name))
    by_cause = {cause: us for (cause, *_), us in idle_us(made, tmp_path).items()}
    assert (by_cause.get("profiler", 0), by_cause["launch"]) == (by_profiler, 400 - by_profiler)


@pytest.mark.parametrize(("beyond", "unrecorded"), [(1_500, 1_500), (900, 0)])
def test_a_wait_beyond_all_recorded_work_is_for_other_work(tmp_path: Path, beyond: int, unrecorded: int) -> None:
    """The last kernel ends at 200, and the wait for it 1,500 µs later: no return of a call takes so long."""
    made = Program().step(0, 2000).work((-10, -6), (0, 200))
    made.api(SYNC, 10, 200 + beyond)
    made.work((1990, 1992), (1994, 2000))
    idle = idle_us(made, tmp_path)
    assert idle.get(("unrecorded", "", SYNC), 0) == unrecorded
    # What is left of the gap, with the 4 of the launch that ends it, is due to the call in which it begins.
    assert idle.get(("sync", "", SYNC), 0) == 4 + beyond - unrecorded


def test_behind_the_last_call_the_program_works_on_its_own(tmp_path: Path) -> None:
    assert idle_us(program(end=900), tmp_path) == {("host", "", ""): 100}


def test_a_gap_is_cut_where_its_cause_changes(tmp_path: Path) -> None:
    """The gap of "allocator", up to 430; what lies between the calls and behind them is launching's."""
    trace = attributed(program(*IDLE["allocator"][0]), tmp_path)
    begun = int(trace.instances.start[0])
    (idle,) = idle_of(trace, global_pid())
    stretches = zip(idle.start - begun, idle.end - begun, idle.cause, strict=True)
    assert [(start / US, end / US, CAUSES[cause]) for start, end, cause in stretches] == [
        (200, 260, "allocator"), (260, 270, "launch"), (270, 400, "allocator"), (400, 430, "launch"),
    ]  # fmt: skip


def test_another_process_does_not_count(tmp_path: Path) -> None:
    other = {"tid": OTHER_PID, "pid": OTHER_PID}
    pauses = [("open", "tokenize", 20, 495), ("work", (500, 504), (506, 600)), last(900, 910)]
    others = [
        ("work", (100, 104), (300, 450), other), ("open", "data", 600, 900, other),
        *(("api", *call, other) for call in ((MALLOC, 210, 400), (SYNC, 590, 890), (COPY, 905, 990))),
    ]  # fmt: skip
    expected = {("host", "tokenize", ""): 295, ("host", "", ""): 305, ("launch", "", ""): 16}
    assert idle_us(program(*pauses), tmp_path) == idle_us(program(*pauses, *others), tmp_path) == expected


def test_names_of_an_input_pipeline() -> None:
    loading = (
        "data", "DataLoader", "load_batch", "fetch next batch 7", "get_batch", "next batch", "load inputs", NEXT_BATCH,
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
    return Windows.of_program("range", "a range step", np.array([0]), np.array([1200 * US]))


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


def causes_of(trace: AttributedTrace, bounds: list[int]) -> tuple[Gaps, Idle]:
    """The gaps of the steps between some moments, µs, and their causes."""
    start, end = np.array(bounds[:-1]) * US, np.array(bounds[1:]) * US
    work = ProcessWork(trace, global_pid(), one_step())
    pauses = work.busy.select(np.isin(work.busy.cause, [CAUSES.index("host"), CAUSES.index("data")]))
    _, start_of_pause, end_of_pause = merge_ranges(np.zeros(len(pauses)), pauses.start, pauses.end)
    assert (end_of_pause - start_of_pause >= PAUSE_NS).all()
    ((_, anatomy),) = work.dissect(Windows.of_program("range", "a range step", start, end), 0)
    return anatomy.gaps, work.find_causes(anatomy.gaps)


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
