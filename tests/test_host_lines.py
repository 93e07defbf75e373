"""Lines and functions whose time on the CPU makes the GPU wait, in steps that are worked out by hand.

A call takes 10 µs up to the next one where nothing else is said, and the work of all its kernels is hidden behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from nsys_analyzer.analysis.findings.finding import Candidate, StepsToExplain
from nsys_analyzer.analysis.findings.host_lines import HostLineFigures, find_host_lines
from nsys_analyzer.analysis.findings.values_on_host import find_host_sync
from nsys_analyzer.analysis.findings.waits import find_data_loading, find_host_stall
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.steps.lines import StackSamples
from nsys_analyzer.analysis.summary.complete import diagnose_capture
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.finding_texts import write_finding
from nsys_analyzer.text import plain
from nsys_analyzer.trace.columns import PAGEABLE_TO_DEVICE
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature
from nsys_analyzer.trace.stacks import StackFrame, Stacks
from tests.support.steps import US, Steps

#: The main program, which calls everything, and a line of the model, which launches.
MAIN = StackFrame("train.py", 3, "<module>")
MODEL = (StackFrame("model.py", 9, "Net.forward"), StackFrame("train.py", 7, "train"), MAIN)
Frames = tuple[StackFrame, ...]
#: The stack in the time after a call, or several stacks with their µs.
Stack = Frames | Mapping[Frames, float]


def line(number: int, function: str = "train") -> Frames:
    """A line of the training loop."""
    return (StackFrame("train.py", number, function), MAIN)


def helper(number: int, caller: int) -> Frames:
    """A line of a helper that a line of the training loop calls."""
    return (StackFrame("util.py", number, "helper"), *line(caller))


def explained(steps: Steps, stacks: Sequence[Stack], *, operators: OperatorCalls | None = None) -> StepsToExplain:
    """The steps, each of whose calls is sampled with these stacks every 100 µs, also while it waits."""
    case = steps.case()
    times = [stack if isinstance(stack, Mapping) else {stack: 0.0} for stack in stacks]
    rows = [(at, frames, us or steps.calls[at].after) for at, parts in enumerate(times) for frames, us in parts.items()]
    distinct = tuple(dict.fromkeys(frames for _, frames, _ in rows))
    nothing = np.zeros(0, np.int64)
    table = Stacks(nothing, nothing, 100 * US, nothing, distinct, {})
    first_calls = np.repeat(np.arange(steps.steps) * len(steps.calls), len(rows))
    call = np.tile([at for at, _, _ in rows], steps.steps) + first_calls
    stack = np.tile([distinct.index(frames) for _, frames, _ in rows], steps.steps)
    samples = StackSamples(call, stack, np.tile([us * US for _, _, us in rows], steps.steps), table)
    waiting = replace(samples, weight=case.waited_ns[call] + samples.weight)
    study = replace(case.study, cpu_samples=samples, call_samples=waiting)
    priced = None
    if operators:
        launched_by = np.tile(np.arange(len(operators)), steps.steps)
        unknown = np.full(len(operators), np.nan)
        priced = PricedOperators(study, operators, launched_by, (None,), unknown, unknown, None, {})
    return replace(case, study=study, operators=priced)


def found(case: StepsToExplain, *others: Candidate) -> list[tuple[str, list[float]]]:
    """Each name with what its changes save, µs per step."""
    replay = case.study.replay
    rows = []
    for one in find_host_lines(case, others):
        assert isinstance(one.figures, HostLineFigures)
        rows.append((one.figures.name, [(replay.step_ns - change(replay).step_ns) / US for change in one.changes]))
    return rows


def looped(us: float, kernels: int = 20) -> Steps:
    """Kernels one behind the other, and a Python loop after the last one, which also took its 10 µs to launch."""
    steps = Steps()
    for number in range(kernels):
        steps.kernel(1, after=10 if number < kernels - 1 else 10 + us)
    return steps


def test_a_python_loop_between_launches() -> None:
    """A step takes 19·10 + 1510 µs = 1700. The line has 1510 of them; the launch before is that of the model.

    It has 4·15.1 = 60.4 of 4·17 = 68 samples, so the relative error of its time is √((1 - 60.4/68) / 60.4) = 4.3 %.
    At most all of its time is saved.
    """
    case = explained(looped(1500), [MODEL] * 19 + [line(30)])
    ((name, (low, high)),) = found(case)
    error = 1510 * ((1 - 1510 / 1700) / 60.4) ** 0.5
    assert (name, low, high) == ("train.py:30", pytest.approx(1510 - error), pytest.approx(1510))
    (candidate,) = find_host_lines(case, ())
    assert [(one.place, one.called_from) for one in candidate.lines] == [("train.py:30", "train.py:3")]
    assert candidate.lines[0].ms == pytest.approx(1.51)


def test_fewer_samples_widen_the_interval() -> None:
    """The same share of 150 µs in one step: a tenth of the time and a quarter of the samples."""
    few = explained(replace(looped(1500), steps=1), [MODEL] * 19 + [line(30)])
    ((_, (low, _)),) = found(few)
    assert low == pytest.approx(1510 * (1 - ((1 - 1510 / 1700) / 15.1) ** 0.5))
    # 2.1 samples are sufficient in a pause of 210 µs, and 1.9 are not.
    assert found(explained(replace(looped(200), steps=1), [MODEL] * 19 + [line(30)]))
    assert not found(explained(replace(looped(180), steps=1), [MODEL] * 19 + [line(30)]))


def test_the_lines_of_a_loop_are_one_block_and_distant_lines_are_not() -> None:
    """Three lines share the 1510 µs after a kernel, and a line far below has the 910 µs after another kernel."""
    steps = looped(1500).kernel(1, after=910)
    loop = {line(30): 500.0, line(31): 500.0, line(33): 510.0}
    block, distant = found(explained(steps, [*[MODEL] * 19, loop, line(60)]))
    # With the statistical error, at most all of the time is saved.
    assert (block[0], block[1][-1]) == ("train.py:30-33", pytest.approx(1510))
    assert (distant[0], distant[1][-1]) == ("train.py:60", pytest.approx(910))


def test_a_helper_that_two_lines_call_has_the_time_of_both() -> None:
    """800 µs in each call, in three lines of the helper that are far from each other; the main loop has it all."""
    steps = looped(800).kernel(1, after=810)
    parts = [{helper(n, caller): 270.0 for n in (5, 25, 45)} for caller in (30, 60)]
    ((name, changes),) = found(explained(steps, [MODEL] * 19 + parts))
    assert (name, sum(changes) / 2) == ("helper", pytest.approx(1600, rel=0.05))
    # Two calls in one line of the loop, which also computes for 270 µs: the line has more than the helper.
    parts = [{helper(5, 30): 540.0, line(30): 270.0}, {helper(5, 30): 540.0, line(30): 270.0}]
    ((name, changes),) = found(explained(steps, [MODEL] * 19 + parts))
    assert (name, sum(changes) / 2) == ("train.py:30", pytest.approx(1600, rel=0.05))


def test_a_line_that_waits() -> None:
    """A small tensor is copied to the GPU, and the copy waits for a kernel of 500 µs; 60 µs of the CPU follow.

    The work and the wait for it end at 505, so a step takes 565 µs. Without the wait and the time, 505 of the GPU
    remain. No other rule explains the wait: the copy is small, and it brings no value to the host.
    """
    steps = Steps().kernel(500).copy(5, PAGEABLE_TO_DEVICE, 1024).sync(60)
    case = explained(steps, [MODEL, line(30), line(30)])
    assert not [*find_host_sync(case)]
    ((name, (low, high)),) = found(case)
    assert (name, low, high) == ("train.py:30", pytest.approx(60), pytest.approx(60))
    (candidate,) = find_host_lines(case, ())
    assert isinstance(candidate.figures, HostLineFigures)
    assert (candidate.figures.waits, candidate.figures.cpu_ms) == (1, pytest.approx(0.07))


def test_time_that_another_finding_explains_is_left_out() -> None:
    """4 ms load a batch, or are another long pause; at a value that is read, the program waits and works for 60 µs."""
    loading = explained(Steps().kernel(10, after=4010, pause="data").kernel(10), [line(30), MODEL])
    assert [name for name, _ in found(loading)] == ["train.py:30"]
    assert not found(loading, *find_data_loading(loading))
    stalled = explained(Steps().kernel(10, after=4010).kernel(10), [line(30), MODEL])
    assert [name for name, _ in found(stalled)] == ["train.py:30"]
    assert not found(stalled, *find_host_stall(stalled))
    reading = explained(Steps().kernel(500).sync(60), [MODEL, line(30)])
    assert [name for name, _ in found(reading)] == ["train.py:30"]
    assert not found(reading, *find_host_sync(reading))


def test_operators_tell_which_line_launches() -> None:
    """30 µs of a line follow each of 10 launches, whose usual time is 10 µs as that of 30 others.

    By the samples, the line has 3/4 of 10 launches: 300 µs are less than five times their 75. The operators' lines say
    that the model launches all: the line has 300 µs and no launch. A backward pass has the lines of its forward pass,
    so that it counts by the samples.
    """
    steps = Steps()
    for number in range(40):
        steps.kernel(1, after=40 if number < 10 else 10)
    stacks: list[Stack] = [{MODEL: 10.0, line(30): 30.0}] * 10 + [MODEL] * 30
    assert not found(explained(steps, stacks))

    def operators(phase: str) -> OperatorCalls:
        calls = np.zeros(40, np.int64)
        return OperatorCalls(
            calls, calls, calls, calls, calls, np.zeros(40, np.bool_), (Signature("aten::mm", ()),),
            lines=("model.py:9 in forward",), phases=(phase,),
        )  # fmt: skip

    ((name, changes),) = found(explained(steps, stacks, operators=operators("forward")))
    # 4·3 of 4·7 samples. The upper end is all of the time.
    error = ((1 - 12 / 28) / 12) ** 0.5
    assert (name, sum(changes) / 2) == ("train.py:30", pytest.approx(300 * (1 - error / 2)))
    assert not found(explained(steps, stacks, operators=operators("backward")))


def test_even_launches_and_hidden_lines_are_no_finding() -> None:
    """Each line launches at the usual pace; and a loop of 1500 µs runs beside 3000 µs of the GPU."""
    lines = [(StackFrame("model.py", 10 * (n % 7), "Net.forward"), MAIN) for n in range(40)]
    even = explained(looped(0, 40), lines)
    assert not found(even)
    hidden = looped(1500).kernel(3000)
    (capture, study) = (hidden.capture(launch=0.1), explained(hidden, [MODEL] * 19 + [line(30), MODEL]).study)
    diagnosis = diagnose_capture(replace(capture, study=study))
    assert diagnosis
    assert "host_line" not in [one.id for one in diagnosis.findings]
    assert found(explained(hidden, [MODEL] * 19 + [line(30), MODEL])) == [("train.py:30", [0, 0])]


def test_a_sample_in_a_long_time_says_nothing_of_the_calls_around_it() -> None:
    """Of 40 calls, only the first and that before the long time are sampled: the line has 510 µs and no other call."""
    steps = Steps()
    for number in range(40):
        steps.kernel(1, after=510 if number == 20 else 10)
    case = explained(steps, [MODEL] * 20 + [line(30)] + [MODEL] * 19)
    samples = case.study.cpu_samples
    assert samples
    kept = np.isin(samples.call % 40, (0, 20))
    few = replace(samples, call=samples.call[kept], stack=samples.stack[kept], weight=samples.weight[kept])
    ((name, changes),) = found(replace(case, study=replace(case.study, cpu_samples=few)))
    assert (name, changes[-1]) == ("train.py:30", pytest.approx(510))


def test_a_line_beside_a_cuda_graph() -> None:
    """The call that launches a graph of 50 kernels takes 1 ms, and a line after the next call takes 2 ms.

    The usual launch is that of the graph, so the line that launches it is not slow.
    """
    steps = Steps().kernel(1, after=1000).call("cudaEventRecord", 2000)
    steps.operations += [steps.operations[0]] * 49
    case = explained(steps, [MODEL, line(30)])
    replay = replace(case.study.replay, pause_ns=np.tile([0.0, 2000 * US], 4))
    ((name, changes),) = found(replace(case, study=replace(case.study, replay=replay)))
    assert (name, changes[-1]) == ("train.py:30", pytest.approx(2000))


def test_a_few_samples_must_be_sure_of_a_slow_line() -> None:
    """A line launches 3 of 40 operations in 180 µs, six times the usual 30.

    It has 4·1.8 = 7.2 of 4·5.5 = 22 samples in four steps, so that its time may be smaller by √((1 - 7.2/22) / 7.2) =
    31 %: 125 µs, less than five times. In 40 steps, it is smaller by at most 10 %: 162 µs.
    """
    steps = Steps()
    for number in range(40):
        steps.kernel(1, after=60 if number < 3 else 10)
    stacks = [line(30)] * 3 + [MODEL] * 37
    assert not found(explained(steps, stacks))
    assert [name for name, _ in found(explained(replace(steps, steps=40), stacks))] == ["train.py:30"]


def test_lines_that_launch_much_and_calls_of_phases_are_launching_in_general() -> None:
    """Nine of 40 launches take 90 µs. The line of all nine, or of six, is a layer; that of three may be a cause."""
    steps = Steps()
    for number in range(40):
        steps.kernel(1, after=90 if number < 9 else 10)
    assert not found(explained(steps, [line(30)] * 9 + [MODEL] * 31))
    few = [*[line(30)] * 3, *[line(50)] * 6, *[MODEL] * 31]
    assert [name for name, _ in found(explained(steps, few))] == ["train.py:30"]
    # The optimizer's step is called at line 30, and the time there is PyTorch's own.
    case = explained(looped(1500), [MODEL] * 19 + [line(30)])
    assert not found(replace(case, run=Run(lines={"optimizer": "train.py:30"})))


def test_only_what_no_line_explains_is_called_launching() -> None:
    """Of a step of 1700 µs, 1680 are idle. The line explains 1500, so launches cannot save more than 200 - 20.

    The line saves 1445 to 1510 µs (see above), or 0.84 times this on the fastest CPU that is assumed; replays have a
    tolerance of 3 %. So its interval is at least from 0.84·1445·0.97 to 1510·1.03.
    """
    steps = looped(1500)
    (plain_capture, study) = (
        steps.capture(launch=1.18, host=0.5), explained(steps, [MODEL] * 19 + [line(30)]).study
    )  # fmt: skip
    without = diagnose_capture(plain_capture)
    diagnosis = diagnose_capture(replace(plain_capture, study=study))
    assert without
    assert diagnosis
    assert [one.id for one in without.findings] == ["launch_bound"]
    first, second = diagnosis.findings
    assert (first.id, second.id) == ("host_line", "launch_bound")
    assert first.saves_ms == pytest.approx((0.84 * 1.445 * 0.97 + 1.51 * 1.03) / 2, rel=0.01)
    assert second.saves_ms_high <= 0.2
    assert without.findings[0].saves_ms > 0.9
    texts = write_finding(first)
    assert texts.title == "The GPU waits for a line that runs on the CPU"
    assert plain(texts.evidence[0], "`") == (
        "In each profiled step, the program's thread spends 1.51\xa0ms in `train.py:30` and launches no operation "
        "there."
    )
