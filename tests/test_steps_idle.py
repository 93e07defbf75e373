"""Why the GPU idles: one cause for every nanosecond, and each cause in a program made for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING, COMPUTE, COPYING, Gaps, dissect
from nsys_analyzer.analysis.steps.host import PAUSE_NS, find_host, is_loading
from nsys_analyzer.analysis.steps.idle import CAUSES, Causes, find_causes
from nsys_analyzer.analysis.steps.summarize import find_idle
from nsys_analyzer.analysis.steps.windows import Windows
from tests.support.export import AUTOGRAD, MAIN, global_pid
from tests.support.program import COPY, FREE, LAUNCH, MALLOC, NCCL, SYNC, US, Program, attributed, summary_of_steps

OTHER_PID = 200
VERSIONED = {name.partition("_v")[0]: name for name in (SYNC, COPY, MALLOC, FREE)}


def idle_us(program: Program, folder: Path) -> dict[tuple[str, str, str], float]:
    """The idle time of a program's only step by cause, range and API call, µs: that of its stretches, too."""
    trace = attributed(program, folder)
    summary = summary_of_steps(trace, global_pid())
    assert summary is not None
    for found in find_idle(trace, global_pid()):
        ns = np.bincount(found.cause, found.end - found.start, len(CAUSES)).tolist()
        by_cause = {cause: idle / 1e6 for cause, idle in zip(CAUSES, ns, strict=True) if idle}
        assert by_cause == pytest.approx({one.cause: one.ms for one in summary.causes})
        assert (found.start[1:] >= found.end[:-1]).all()
    # The version that CUPTI puts behind a name is left out.
    return {
        (row.cause, row.range or "", VERSIONED.get(row.api or "", row.api or "")): round(row.ms * 1e3, 6)
        for row in summary.idle_by_cause
    }


# --- one program for each cause: a step of 1,000 µs, whose first kernel runs from its start


def program(end: float = 200) -> Program:
    """A step [0, 1000) with a kernel that runs [0, end), launched before."""
    return Program().step(0, 1000).work((-10, -6), (0, end))


def test_sync(tmp_path: Path) -> None:
    """As ``.item()``: the copy ends at 202, the wait at 204; the next kernel is launched at 220, runs at 230."""
    export = program().copy((10, 13), (200, 202)).open("log", 5, 210)
    export.api(SYNC, 14, 204)
    export.work((220, 224), (230, 1000))
    assert idle_us(export, tmp_path) == {("sync", "log", SYNC): 28}


def test_allocator(tmp_path: Path) -> None:
    """Of the gap [200, 430), cudaFree has [200, 260), cudaMalloc [270, 400), and what is left is launching's: 40."""
    export = program().open("forward", 100, 500)
    export.api(FREE, 150, 260)
    export.api(MALLOC, 270, 400)
    export.work((410, 414), (430, 1000))
    assert idle_us(export, tmp_path) == {
        ("allocator", "forward", FREE): 60, ("allocator", "forward", MALLOC): 130, ("launch", "", ""): 40,
    }  # fmt: skip


def test_a_gap_is_cut_where_its_cause_changes(tmp_path: Path) -> None:
    """The gap of ``test_allocator``, up to 430; what lies between the calls and behind them is launching's."""
    export = program().open("forward", 100, 500)
    export.api(FREE, 150, 260)
    export.api(MALLOC, 270, 400)
    export.work((410, 414), (430, 1000))
    trace = attributed(export, tmp_path)
    begun = int(trace.instances.start[0])
    (found,) = find_idle(trace, global_pid())
    stretches = zip(found.start - begun, found.end - begun, found.cause, strict=True)
    assert [(start / US, end / US, CAUSES[cause]) for start, end, cause in stretches] == [
        (200, 260, "allocator"), (260, 270, "launch"), (270, 400, "allocator"), (400, 430, "launch"),
    ]  # fmt: skip


def test_an_allocation_behind_the_launch_keeps_nothing_waiting(tmp_path: Path) -> None:
    """The kernel is launched at 300: of the gap [200, 320) the allocator has 90, not what follows."""
    export = program()
    export.api(MALLOC, 150, 290)
    export.work((300, 304), (320, 1000))
    export.api(MALLOC, 305, 600)
    assert idle_us(export, tmp_path) == {("allocator", "", MALLOC): 90, ("launch", "", ""): 30}


def test_copy(tmp_path: Path) -> None:
    """The copy's call returns at 240, 2 µs behind the copy: the gap [238, 260) begins inside it."""
    export = program().copy((100, 240), (200, 238)).work((250, 254), (260, 1000))
    assert idle_us(export, tmp_path) == {("copy", "", COPY): 22}


def test_an_asynchronous_copy_is_not_to_blame(tmp_path: Path) -> None:
    """Its call takes 5 µs, inside which the gap [200, 230) begins; the kernel is launched at 205."""
    export = program().copy((196, 201), (198, 200), stream=8).work((205, 209), (230, 1000))
    assert idle_us(export, tmp_path) == {("launch", "", ""): 30}


def test_launch(tmp_path: Path) -> None:
    """The kernel is launched at 205, after another call: a gap of 20 µs, no longer than launches take."""
    export = program()
    export.api("cudaStreamIsCapturing_v10000", 198, 204)
    assert idle_us(export.work((205, 210), (220, 1000)), tmp_path) == {("launch", "", ""): 20}


def test_a_call_that_takes_long_is_named(tmp_path: Path) -> None:
    """From 198 to 350 a module is loaded: of the gap [200, 370), all is launching's, kept open by that call."""
    export = program().open("forward", 190, 400)
    export.api("cuLibraryLoadData", 198, 350)
    assert idle_us(export.work((355, 360), (370, 1000)), tmp_path) == {("launch", "forward", "cuLibraryLoadData"): 170}


def test_queued_kernels_are_a_microsecond_apart(tmp_path: Path) -> None:
    """What the GPU needs from one kernel to the next that it has in its queue is launching's, too."""
    export = program().work((10, 14), (202, 1000))
    assert idle_us(export, tmp_path) == {("launch", "", ""): 2}


def test_host(tmp_path: Path) -> None:
    """No call from 14 to 500 but work in ``tokenize``: of the gap [200, 506), 300 are its, 6 the launch's."""
    export = program().open("tokenize", 20, 495).work((500, 504), (506, 1000))
    export.api("cudaEventRecord_v3020", 10, 14)
    assert idle_us(export, tmp_path) == {("host", "tokenize", ""): 300, ("launch", "", ""): 6}


def test_a_pause_in_no_range_but_the_steps_has_no_name(tmp_path: Path) -> None:
    assert idle_us(program().work((500, 504), (506, 1000)), tmp_path) == {("host", "", ""): 300, ("launch", "", ""): 6}


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "DataLoader",
        "load_batch",
        "fetch next batch 7",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    ],
)
def test_data(tmp_path: Path, name: str) -> None:
    export = program().open(name, 20, 495).work((500, 504), (506, 1000))
    assert idle_us(export, tmp_path) == {("data", name, ""): 300, ("launch", "", ""): 6}


def test_an_unnamed_pause_before_a_copy_is_the_input_pipelines(tmp_path: Path) -> None:
    """The program pauses until 500 and copies its batch; the gap [520, 530) behind the copy is launching's, too."""
    export = program().copy((500, 504), (506, 520)).work((522, 526), (530, 1000))
    assert idle_us(export, tmp_path) == {("data", "", ""): 300, ("launch", "", ""): 16}


def test_a_pause_with_a_name_before_a_copy_is_the_programs(tmp_path: Path) -> None:
    export = program().open("tokenize", 20, 495).copy((500, 504), (506, 520)).work((512, 516), (520, 1000))
    assert idle_us(export, tmp_path) == {("host", "tokenize", ""): 300, ("launch", "", ""): 6}


@pytest.mark.parametrize(("name", "cause"), [(NCCL, "communication"), ("ampere_sgemm_128x64_tn", "unknown")])
def test_a_collective_that_waits_in_the_queue(tmp_path: Path, name: str, cause: str) -> None:
    """Launched at 30, started at 250: 50 µs in which the GPU has it, and nothing of the program's is missing."""
    export = program().work((30, 34), (250, 1000), name=name, stream=9)
    assert idle_us(export, tmp_path) == {(cause, "", ""): 50}


def test_nothing_of_the_programs_keeps_a_queued_operation_waiting(tmp_path: Path) -> None:
    """The program allocates meanwhile, [200, 240), and the collective starts at 250: it was launched at 30."""
    export = program().work((30, 34), (250, 1000), name=NCCL, stream=9)
    export.api(MALLOC, 150, 240)
    assert idle_us(export, tmp_path) == {("communication", "", ""): 50}


def test_behind_the_last_call_the_program_works_on_its_own(tmp_path: Path) -> None:
    assert idle_us(program(900), tmp_path) == {("host", "", ""): 100}


def test_an_operation_without_a_launch_was_queued_for_all_that_is_known(tmp_path: Path) -> None:
    export = program()
    export.kernel("ampere_sgemm_128x64_tn", None, 300 * US, 1000 * US)
    assert idle_us(export, tmp_path) == {("unknown", "", ""): 100}


# --- whose calls count


def test_a_drivers_call_inside_a_runtimes_counts_once(tmp_path: Path) -> None:
    """cuMemAlloc [155, 395) inside cudaMalloc [150, 400): of the gap [200, 430) the allocator has 200, not 395."""
    export = program()
    export.api(MALLOC, 150, 400)
    export.api("cuMemAlloc_v2", 155, 395)
    export.api("cuStreamSynchronize", 156, 300)
    export.work((410, 414), (430, 1000))
    assert idle_us(export, tmp_path) == {("allocator", "", MALLOC): 200, ("launch", "", ""): 30}


def test_autograds_thread_launches_while_the_main_thread_waits(tmp_path: Path) -> None:
    """Autograd's own range names an operator: the pause [18, 500) is backward's. Its allocations count."""
    export = program().open("backward", 5, 990)
    export.thread(AUTOGRAD, "pt_autograd_0")
    export.open("MulBackward0", 11, 600, tid=AUTOGRAD).work((12, 18), (200, 210), tid=AUTOGRAD)
    export.work((500, 504), (506, 510), tid=AUTOGRAD)
    export.api(MALLOC, 507, 800, tid=AUTOGRAD)
    export.work((802, 806), (810, 1000), tid=AUTOGRAD)
    # Gaps [210, 506) and [510, 810).
    assert idle_us(export, tmp_path) == {
        ("host", "backward", ""): 290, ("allocator", "backward", MALLOC): 290, ("launch", "", ""): 16,
    }  # fmt: skip


def test_two_threads_in_the_allocator_count_once(tmp_path: Path) -> None:
    """[190, 400) on one thread, [300, 420) on another: of the gap [200, 430), 220 together."""
    export = program().work((10, 14), (100, 110), tid=AUTOGRAD, stream=8)
    export.thread(AUTOGRAD, "pt_autograd_0")
    export.api(MALLOC, 190, 400)
    export.api(FREE, 300, 420, tid=AUTOGRAD)
    export.work((422, 426), (430, 1000))
    assert idle_us(export, tmp_path) == {
        ("allocator", "", MALLOC): 200, ("allocator", "", FREE): 20, ("launch", "", ""): 10,
    }  # fmt: skip


def test_a_thread_that_launches_nothing_does_not_count(tmp_path: Path) -> None:
    """A thread that pins memory: its cudaHostAlloc keeps nothing waiting, and ends no pause."""
    export = program().work((500, 504), (506, 1000))
    export.api("cudaHostAlloc_v3020", 250, 450, tid=MAIN + 7)
    assert idle_us(export, tmp_path) == {("host", "", ""): 300, ("launch", "", ""): 6}


def test_another_process_does_not_count(tmp_path: Path) -> None:
    def two_pauses() -> Program:
        return program().open("tokenize", 20, 495).work((500, 504), (506, 600)).work((900, 904), (910, 1000))

    alone = idle_us(two_pauses(), tmp_path)
    export = two_pauses()
    export.work((100, 104), (300, 450), tid=OTHER_PID, pid=OTHER_PID)
    export.open("data", 600, 900, tid=OTHER_PID, pid=OTHER_PID)
    for name, start, end in ((MALLOC, 210, 400), (SYNC, 590, 890), (COPY, 905, 990)):
        export.api(name, start, end, tid=OTHER_PID, pid=OTHER_PID)
    assert alone == {("host", "tokenize", ""): 300, ("host", "", ""): 300, ("launch", "", ""): 16}
    assert idle_us(export, tmp_path) == alone


@pytest.mark.parametrize(
    "name",
    [
        "update", "database", "inputs_embeds", "input_layernorm", "BatchNorm2d", "DistributedDataParallel.forward",
        "load_balancing_loss", "workload", "",
    ],
)  # fmt: skip
def test_these_are_no_names_of_an_input_pipeline(name: str) -> None:
    assert not is_loading(name)


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


def causes_of(trace: AttributedTrace, bounds: tuple[int, ...]) -> tuple[Gaps, Causes]:
    """The gaps of the steps between some moments, µs, and their causes."""
    operations, attribution = trace.trace.operations, trace.attribution
    start, end = np.array(bounds[:-1]) * US, np.array(bounds[1:]) * US
    windows = Windows("range", "a range step", start, end, start, end, end)
    names = np.array([*operations.names, ""])[operations.name]
    rank = np.where(names == "", COPYING, np.where(names == NCCL, COMMUNICATING, COMPUTE))
    gaps = dissect(windows, operations, np.argsort(operations.start, kind="stable"), rank).gaps
    launched = np.where(attribution.thread != NONE, attribution.time, LONG_AGO)
    host = find_host(trace, global_pid())
    assert (host.pauses.end - host.pauses.start >= PAUSE_NS).all()
    return gaps, find_causes(gaps, host, launched, rank, trace.roles.mask("step"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@given(st.tuples(calls, kernels, ranges), st.lists(times, min_size=2, max_size=4, unique=True).map(sorted))
def test_the_causes_add_up_to_the_gaps(
    folder: Path,
    draws: Draws,
    bounds: list[int],
) -> None:
    gaps, causes = causes_of(attributed(random_program(draws), folder), tuple(bounds))
    parts = np.stack([causes.base_ns, causes.pause_ns, causes.allocator_ns])
    assert (parts >= 0).all()
    assert parts.sum(axis=0).tolist() == gaps.length.tolist()
    # A gap has one cause besides pauses and allocations, and the rows say the same by cause.
    by_cause = dict.fromkeys(CAUSES, 0)
    for row in causes.rows:
        by_cause[row.cause] += row.ns
    assert by_cause.pop("host") + by_cause.pop("data") == causes.pause_ns.sum()
    assert by_cause.pop("allocator") == causes.allocator_ns.sum()
    base = np.bincount(causes.base, causes.base_ns, len(CAUSES)).astype(np.int64)
    assert by_cause == {cause: base[CAUSES.index(cause)] for cause in by_cause}
    assert all(row.ns > 0 and row.gaps > 0 for row in causes.rows)
    assert len({(row.cause, row.range, row.api) for row in causes.rows}) == len(causes.rows)


@given(st.tuples(calls, kernels, ranges), st.integers(1, 1199))
def test_what_a_gap_is_due_to_depends_on_it_alone(
    folder: Path,
    draws: Draws,
    cut: int,
) -> None:
    """The gaps of two steps that are looked at together have the causes that they have one by one."""
    trace = attributed(random_program(draws), folder)
    _, together = causes_of(trace, (0, cut, 1200))
    apart = [causes_of(trace, bounds)[1] for bounds in ((0, cut), (cut, 1200))]
    for name in ("base", "base_ns", "pause_ns", "allocator_ns"):
        assert getattr(together, name).tolist() == [one for part in apart for one in getattr(part, name).tolist()]
