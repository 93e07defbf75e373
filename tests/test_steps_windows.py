"""What a step is: named by a range, told by phases or by repetition, said by a person, or else one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.boundaries import find_windows
from nsys_analyzer.analysis.steps.groups import Steps, find_steps
from nsys_analyzer.analysis.steps.repetition import find_repeats
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.export import ADD, AUTOGRAD, GEMM, PID, SOFTMAX, Export, global_pid, training_step
from tests.support.program import NCCL, Program, attributed

Bounds = list[tuple[int, int]]
RealCapture = Callable[[str], Path]

EMBED = "void at::native::vectorized_gather_kernel<16, long>(char *, char *, long)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>(int)"
#: A layer of a model, and one of another; what a pass through a model adds to its layers.
LAYER = (GEMM, ADD, GEMM, SOFTMAX, GEMM, ADD)
HEAD = (SOFTMAX, GEMM, ADD)


def windows_of(export: Export, folder: Path, pid: int = PID, names: PhaseNames | None = None) -> Windows:
    trace = Trace.load(export.write(folder / "windows.sqlite"))
    windows = find_windows(AttributedTrace(trace, names), global_pid(pid))
    assert windows is not None
    return windows


def steps_of(export: Export, folder: Path) -> Steps:
    steps = find_steps(attributed(export, folder), global_pid())
    assert steps is not None
    return steps


def groups_of(found: Steps) -> list[tuple[str, int, bool]]:
    return [(group.kind, group.steps, group.measured) for group in found.groups]


def bounds(windows: Windows) -> Bounds:
    return list(zip(windows.start.tolist(), windows.end.tolist(), strict=True))


def steps(export: Export, count: int, at: int = 0, pid: int = PID, wrap: str | None = "step") -> Export:
    """Training steps of 1,000 ns one behind the other; their phases are [0, 400), [400, 650), [650, 950)."""
    export.thread(AUTOGRAD, "pt_autograd_0", pid)
    for number in range(count):
        training_step(export, at + number * 1000, pid, wrap=wrap and wrap.format(number))
    return export


def named_steps(starts: dict[int, int], name: str) -> Export:
    """Ranges of 990 ns, by the number in their names."""
    export = Export()
    for number, start in starts.items():
        export.range(name.format(number), start, start + 990)
    return export


# --- 1. a range that names the step


@pytest.mark.parametrize(
    ("name", "source", "unit"),
    [
        ("step", "range", "a range step"),
        ("train_step {}", "range", "a range such as train_step 0"),
        ("training_step", "range", "a range training_step"),
        ("Iteration {}", "range", "a range such as Iteration 0"),
        ("batch {}", "range", "a range such as batch 0"),
        ("execute_model", "range", "a range execute_model"),
        ("[pl][profile]run_training_batch", "range", "a range [pl][profile]run_training_batch"),
        ("global_step={}", "range", "a range such as global_step=0"),
        ("train_one_step", "range", "a range train_one_step"),
        ("epoch_0_step_{}", "range", "a range such as epoch_0_step_0"),
        ("execute_context_{}(8)_generation_31(31)", "range", "a range such as execute_context_0(8)_generation_31(31)"),
        ("step[DECODE bs={}]", "range", "a range such as step[DECODE bs=0]"),
        ("ProfilerStep#{}", "profiler_step", "a step of PyTorch's profiler"),
    ],
)
def test_ranges_of_steps(tmp_path: Path, name: str, source: str, unit: str) -> None:
    windows = windows_of(steps(Export(), 3, wrap=name), tmp_path)
    assert (windows.source, windows.unit, windows.on_gpu) == (source, unit, False)
    assert bounds(windows) == [(0, 1000), (1000, 2000), (2000, 3000)]


def program(
    *ranges: tuple[str, int, int], at: tuple[int, ...] = (0, 1000, 2000), export: Export | None = None
) -> Export:
    """The same ranges again and again, each with a kernel from 20 ns behind its start to 100 ns before its end."""
    export = export or Export()
    for start in at:
        for name, low, high in ranges:
            export.range(name, start + low, start + high)
            export.kernel(GEMM, start + low + 10, start + low + 20, start + high - 100)
    return export


EXECUTOR = "execute_8_context_0(sq0)_generation_8(sq8)"
TRAINING = (("forward", 0, 400), ("backward", 400, 700))


@pytest.mark.parametrize(
    ("name", "begins", "source"),
    [
        ("decode_step_{}", 0, "range"),
        ("decode", 0, "range"),
        ("decode", 800, "pass"),  # an image is decoded behind all that makes it
        ("micro_step_{}", 0, "pass"),
        ("epoch {} of 3", 0, "pass"),
    ],
)
def test_ranges_that_hold_what_the_gpu_does(tmp_path: Path, name: str, begins: int, source: str) -> None:
    """Four times a kernel of about 600 ns and one of 40, launched at 10 and at 850 of 1,000 ns."""
    export = Export()
    for number in range(4):
        at = 1000 * (number + 1)
        export.range(name.format(number), at + begins, at + 950)
        export.kernel(GEMM, at + 10, at + 20, at + 600 + 20 * number).kernel(ADD, at + 850, at + 860, at + 900)
    windows = windows_of(export, tmp_path)
    assert windows.source == source
    if source == "range":
        assert bounds(windows) == [(1000, 2000), (2000, 3000), (3000, 4000), (4000, 4950)]


@pytest.mark.parametrize(
    ("export", "source", "expected"),
    [
        # From one pass to the next; the last ends with its range, and its work.
        (program(("Model_Forward", 0, 900)), "phases", [(0, 1000), (1000, 2000), (2000, 2900)]),
        (program(("model_inference", 0, 900)), "phases", [(0, 1000), (1000, 2000), (2000, 2900)]),
        # What lies between steps is the time of the one before.
        (program(("step", 0, 600)), "range", [(0, 1000), (1000, 2000), (2000, 2600)]),
        # A range around the optimizer alone is no step: the third one ends with what its phases say of it.
        (program(*TRAINING, ("step", 700, 900)), "phases", [(0, 1000), (1000, 2000), (2000, 2700)]),
        # The profiler was told of one step around three passes.
        (
            program(("forward", 0, 900), export=Export().range("ProfilerStep#1", 0, 3000)),
            "phases", [(0, 1000), (1000, 2000), (2000, 2900)],
        ),
        # Steps 4 to 7 were not recorded: the third ends with its range, and not where the eighth begins.
        (
            program(
                ("forward", 0, 900), at=(0, 1000, 7000, 8000),
                export=named_steps({2: 0, 3: 1000, 8: 7000, 9: 8000}, "ProfilerStep#{}"),
            ),
            "profiler_step", [(0, 1000), (1000, 1990), (7000, 8000), (8000, 8990)],
        ),
        (
            program(("forward", 0, 900), at=(0, 5000), export=named_steps({3: 0, 8: 5000}, "ProfilerStep#{}")),
            "profiler_step", [(0, 990), (5000, 5990)],
        ),
        # Every tenth step has a range: none is missing, and what lies between is the time of the one before.
        (
            program(("forward", 0, 900), export=named_steps({10: 0, 20: 1000, 30: 2000}, "step {}")),
            "range", [(0, 1000), (1000, 2000), (2000, 2990)],
        ),
        # An engine's step lies in a range of its executor.
        (
            program(
                ("step[DECODE bs=8]", 500, 900), at=(0, 1000),
                export=Export().range(EXECUTOR, 0, 900).range(EXECUTOR, 1000, 1900),
            ),
            "range", [(500, 1500), (1500, 1900)],
        ),
        # Warm-up bounds a step.
        (steps(Export().range("warmup", 0, 2000), 4), "range", [(2000, 3000), (3000, 4000)]),
        # A step range without a backward pass where others have one bounds the step before, and is none.
        (
            steps(program(("step", 0, 500), at=(1000,), export=steps(Export(), 1)), 1, at=2000),
            "range", [(0, 1000), (2000, 3000)],
        ),
    ],
)  # fmt: skip
def test_what_bounds_steps(tmp_path: Path, export: Export, source: str, expected: Bounds) -> None:
    windows = windows_of(export, tmp_path)
    assert (windows.source, bounds(windows)) == (source, expected)


def test_how_much_lies_behind_the_last_step_is_not_known(tmp_path: Path) -> None:
    export = program(("step", 0, 600))
    assert windows_of(export, tmp_path).body_end.tolist() == [600, 1600, 2600]
    assert groups_of(steps_of(export, tmp_path)) == [("usual", 2, True), ("last", 1, False)]


def test_a_second_length_of_a_step_is_shown_nowhere(tmp_path: Path) -> None:
    export = program(("forward", 0, 900), export=Export().range("ProfilerStep#1", 0, 3000))
    (capture,) = summarize(Trace.load(export.write(tmp_path / "windows.sqlite")), "a")
    assert [phase.phase for phase in capture.phases] == ["forward"]


def test_a_range_that_a_person_names_is_the_step(tmp_path: Path) -> None:
    """Even one that holds no pass of the model."""
    said = windows_of(program(*TRAINING, ("update", 700, 900)), tmp_path, names=PhaseNames.parse(["step=update"]))
    assert (said.unit, bounds(said)) == ("a range update", [(700, 1700), (1700, 2700), (2700, 2900)])


def test_a_step_whose_kernels_the_capture_lacks_is_left_out(tmp_path: Path) -> None:
    """The optimizer of the third of five steps has launched a kernel that the file does not have."""
    for wrap in ("step", None):
        export = steps(Export(), 5, wrap=wrap)
        export.call("cudaLaunchKernel_v7000", 2800)
        starts = [start for start, _ in bounds(windows_of(export, tmp_path))]
        assert [start // 1000 for start in starts] == [0, 1, 3, 4], wrap


def test_each_process_has_its_own_steps(tmp_path: Path) -> None:
    export = steps(steps(Export(), 2), 3, at=500, pid=200)
    assert bounds(windows_of(export, tmp_path)) == [(0, 1000), (1000, 2000)]
    assert bounds(windows_of(export, tmp_path, pid=200)) == [(500, 1500), (1500, 2500), (2500, 3500)]


# --- 2. phases


def passes(export: Export, text: str, at: int = 0, name: str = GEMM) -> Export:
    """Phases of 100 ns each, one behind the other, by their letters; each launches a kernel that takes 80 ns."""
    called = {"F": "forward", "B": "backward", "O": "optimizer"}
    for number, letter in enumerate(text):
        start = at + 100 * number
        kernel = {"F": GEMM, "B": SOFTMAX, "O": ADD}[letter] if name == GEMM else name
        export.range(called[letter], start, start + 100).kernel(kernel, start + 5, start + 10, start + 90)
    return export


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FBOFBOFBO", [(0, 300), (300, 600), (600, 900)]),
        ("FBFBOFBFBO", [(0, 500), (500, 1000)]),  # two micro-batches
        ("FBFB", [(0, 200), (200, 400)]),  # no optimizer is known
        ("FFFF", [(0, 100), (100, 200), (200, 300), (300, 400)]),
        ("FBO", [(0, 300)]),  # one of each
        ("FBOFFFFBOFBO", [(0, 300), (600, 900), (900, 1200)]),  # three passes of evaluation before the second step
        ("BOFBOFBO", [(200, 500), (500, 800)]),  # the first step began before the capture
        ("FBOFBOFB", [(0, 300), (300, 600)]),  # the last one ended after it
        ("OOO", [(100, 200), (200, 300)]),  # from one optimizer's end to the next
    ],
)
def test_phases(tmp_path: Path, text: str, expected: Bounds) -> None:
    windows = windows_of(passes(Export(), text), tmp_path)
    assert windows.source == "phases"
    assert bounds(windows) == expected


def test_a_first_step_of_fewer_kernels_that_takes_long_starts_up(tmp_path: Path) -> None:
    """One kernel forward and four backward in 3 ms, then one and nine in each 1: it is no part of a step."""
    program = Program()
    for at, length, count in ((0, 3000, 4), (3000, 1000, 9), (4000, 1000, 9)):
        program.open("forward", at, at + 100).work((at + 1, at + 2), (at + 5, at + 20))
        program.open("backward", at + 100, at + length)
        for number in range(count):
            begin = at + 100 + 50 * number
            program.work((begin + 1, begin + 2), (begin + 5, begin + 20))
    found = steps_of(program, tmp_path)
    assert found.recorded.source == "phases"
    assert [(group.kind, group.steps) for group in found.groups] == [("usual", 2), ("first", 1)]


def test_models_that_train_in_turns_are_one_step(tmp_path: Path) -> None:
    """A GAN: an optimizer step of the discriminator, then one of the generator, whose kernels are others."""
    export = Export()
    for number in range(6):
        passes(export, "FBO", at=300 * number, name=(GEMM, "generator")[number % 2])
    windows = windows_of(export, tmp_path)
    assert windows.unit == "2 optimizer steps that take turns"
    assert bounds(windows) == [(0, 600), (600, 1200), (1200, 1800)]


def test_a_pass_recomputed_in_backward_is_none_of_its_own(tmp_path: Path) -> None:
    """Checkpointing: autograd's thread opens forward again, while nothing names the backward pass."""
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    for at in (0, 1000):
        export.range("forward", at, at + 300).kernel(GEMM, at + 5, at + 10, at + 290)
        for again in (400, 600):
            export.range("forward", at + again, at + again + 100, tid=AUTOGRAD)
            export.kernel(GEMM, at + again + 5, at + again + 10, at + again + 190, AUTOGRAD)
    assert bounds(windows_of(export, tmp_path)) == [(0, 1000), (1000, 1790)]


def test_one_phase_of_many_kernels_beside_it_is_no_step(tmp_path: Path) -> None:
    """A forward range of 300 of 900 ns of work: the rest of the step has no name."""
    export = Export().range("forward", 0, 320).kernel(GEMM, 5, 10, 310)
    export.kernel(SOFTMAX, 400, 410, 710).kernel(ADD, 800, 810, 1110)
    assert windows_of(export, tmp_path).source == "pass"


def test_tokens_of_generation_are_steps(tmp_path: Path) -> None:
    """The prompt's pass takes ten times as long as a token's: it is other work, and not in the length of a step."""
    program = Program()
    for number, us in enumerate((1000, *[100] * 6)):
        at = 1200 * number
        program.open("forward", at, at + us + 10).work((at + 1, at + 2), (at + 5, at + 5 + us))
        program.work((at + us + 11, at + us + 12), (at + us + 15, at + us + 16), name=ADD)
    found = steps_of(program, tmp_path)
    assert groups_of(found) == [("usual", 5, True), ("other work", 1, False), ("last", 1, False)]
    assert found.length_ms == 1.2
    assert found.start_up is None


# --- 3. repetition


def sequence(export: Export, kernels: list[str], at: int = 0, pause: dict[int, int] | None = None) -> Export:
    """Kernels of 80 ns, launched 100 ns apart, with more time before some of them."""
    time = at
    for number, name in enumerate(kernels):
        time += 100 + (pause or {}).get(number, 0)
        export.kernel(name, time, time + 5, time + 85)
    return export


def a_pass(layers: int) -> list[str]:
    return [EMBED, *LAYER * layers, *HEAD]


def paused(kernels: list[str], pauses: dict[int, int]) -> Export:
    return sequence(Export(), kernels, pause=pauses)


LONG = 9 + 6 * 10 - 5  # operations of a pass of 10 layers
LOGS = {number * LONG + 3 * (number > 3): 100 for number in range(8)}


@pytest.mark.parametrize(
    ("export", "starts", "period"),
    [
        # Ten passes of 20 layers: no kernel is unique to a pass.
        (sequence(Export(), a_pass(20) * 10), [100 + 12_400 * number for number in range(10)], 124),
        # Shifted by a pass less a layer, 97 of 100 operations are the same.
        (sequence(Export(), a_pass(60) * 6), [100 + 36_400 * number for number in range(6)], 364),
        # A model without layers that are alike: an optimizer's kernels tell that a unit trains.
        (sequence(Export(), [GEMM, SOFTMAX, EMBED, GEMM, ADAM] * 4), [100, 600, 1100, 1600], 5),
        # The capture begins in the middle of a step; 5 µs lie between the head and the embedding.
        (
            paused([*a_pass(10)[30:], *a_pass(10) * 4], {LONG - 30 + LONG * number: 5_000 for number in range(4)}),
            [100 * (LONG - 30) + 5_100 + number * (100 * LONG + 5_000) for number in range(4)], LONG,
        ),
        # Three kernels more in the fourth of eight; the program pauses for 100 ns before each.
        (
            paused([*a_pass(10) * 4, ADD, SOFTMAX, ADD, *a_pass(10) * 4], LOGS),
            [200 + number * (100 * LONG + 100) + 300 * (number > 3) for number in range(8)], LONG,
        ),
    ],
)  # fmt: skip
def test_units_that_repeat(tmp_path: Path, export: Export, starts: list[int], period: int) -> None:
    windows = windows_of(export, tmp_path)
    assert (windows.source, windows.unit) == ("repetition", f"a sequence of {period} operations that repeats")
    assert windows.start.tolist() == starts


@pytest.mark.parametrize(
    "kernels",
    [
        a_pass(36),
        [*a_pass(36), EMBED, *LAYER * 18],  # and a half
        [*LAYER * 36],  # cut out of one
        [ADD, SOFTMAX, ADD] * 100,  # one parameter after the other
        [GEMM],
        [GEMM, ADD, SOFTMAX, ADD, ADD, GEMM, SOFTMAX, GEMM, ADD, SOFTMAX, SOFTMAX, SOFTMAX],
        # An optimizer beside a model: its repeats hold 24 of 64 kernels.
        [*(f"kernel {number}" for number in range(40)), *[GEMM, ADD, ADAM] * 8],
    ],
)
def test_what_is_one_pass(tmp_path: Path, kernels: list[str]) -> None:
    windows = windows_of(sequence(Export(), kernels), tmp_path)
    assert (windows.source, windows.unit) == ("pass", "the whole capture")
    assert bounds(windows) == [(100, 100 * len(kernels) + 85)]


def test_a_pass_lasts_as_long_as_its_process_is_recorded(tmp_path: Path) -> None:
    """A loader before the first call and a range behind the last work; another process does not count."""
    export = sequence(Export(), a_pass(36)).range("load", 20, 90).range("save", 25_000, 30_000)
    export.range("else", 1, 90_000, pid=PID + 1)
    assert bounds(windows_of(export, tmp_path)) == [(20, 30_000)]
    # Warm-up that comes first is no part of it; a range that was opened before the session counts from its start.
    assert bounds(windows_of(export.range("warmup", 30, 70), tmp_path)) == [(70, 30_000)]
    export = sequence(Export(), a_pass(36)).range("main", -500, 30_000)
    assert bounds(windows_of(export, tmp_path)) == [(0, 30_000)]


def test_repeats_inside_a_single_phase_are_its_layers(tmp_path: Path) -> None:
    export = sequence(Export(), a_pass(20) * 4).range("optimizer", 50, 90_000)
    assert windows_of(export, tmp_path).source == "pass"


@pytest.mark.parametrize(("eager", "source"), [(SOFTMAX, "repetition"), (GEMM, "pass")])
def test_a_replay_and_what_runs_beside_it(tmp_path: Path, eager: str, source: str) -> None:
    """What samples a token computes no matmul. A part of a layer that takes no graph, as attention, may be one."""
    export = Export()
    for at in range(1_000, 7_000, 1_000):
        export.kernel(ADD, at, at + 5, at + 15).graph(at + 20, at + 25, at + 800)
        export.kernel(eager, at + 30, at + 800, at + 850)
    assert windows_of(export, tmp_path).source == source


@pytest.mark.parametrize(
    ("replays", "eager", "period"),
    [
        ([LAYER * 10], [], 60),  # ten layers that are alike, and nothing else
        ([LAYER * 10], [ADD, SOFTMAX], 62),
        ([LAYER * 10, [ADD, GEMM] * 15], [], 90),  # a forward and a backward graph
    ],
)
def test_a_step_is_never_a_part_of_one_launch(
    tmp_path: Path, replays: list[list[str]], eager: list[str], period: int
) -> None:
    """Eight tokens of 20 µs, each the replay of graphs whose kernels were recorded, and what runs beside them."""
    export = Export().gpu()
    for token in range(8):
        at = 1_000 + 20_000 * token
        for number, kernels in enumerate(replays):
            launch, start = export.call("cudaGraphLaunch_v10000", at + 100 * number), at + 200 + 7_000 * number
            for place, name in enumerate(kernels):
                begin = start + 100 * place
                export.kernel(name, None, begin, begin + 90, correlation=launch, node=1 + place)
        for place, name in enumerate(eager):
            export.kernel(name, at + 500 + place, at + 18_000 + 100 * place, at + 18_090 + 100 * place)
    windows = windows_of(export, tmp_path)
    assert (windows.source, windows.unit) == ("repetition", f"a sequence of {period} operations that repeats")
    assert windows.start.tolist() == [1_000 + 20_000 * token for token in range(8)]


def test_what_sets_a_program_up_may_take_longer_than_its_steps(tmp_path: Path) -> None:
    """A copy of 100 µs, and 3 · 76 kernels of 80 ns to the end, 18 µs: most operations, not most of the time."""
    export = Export().memory("MEMCPY", 0, 10, 100_010)
    assert windows_of(sequence(export, a_pass(12) * 3, at=100_100), tmp_path).source == "repetition"


def test_steps_of_the_device_that_works_most(tmp_path: Path) -> None:
    """Two GPUs of one process: the second one has a part of the work, launched in between now and then."""
    export = sequence(Export(), a_pass(10) * 5)
    for at in (150, 777, 1_951, 20_050):
        export.kernel(ADD, at, at + 5, at + 50, device=1)
    assert len(windows_of(export, tmp_path)) == 5


@pytest.mark.parametrize(
    ("name", "count", "ms"),
    [
        ("train_small256", 3, 79.6),
        ("bf16_sdpa_small1024", 3, 108.3),
        ("mem_small256", 3, 153.6),
        ("accumulate_tf32", 3, 27.3),  # two micro-batches a step
        ("checkpoint_fp16", 3, 37.7),
        ("compile_bf16", 3, 15.7),
        ("llama_bf16", 3, 21.5),
        ("functions_trace_gpt2", 3, 45.2),
        ("small_ctx1024_train_fp32", 3, 139.3),
        # Each replays the graph of a forward pass three times.
        ("graph_small256", 3, 9.5),
        ("graphnode_small256", 3, 9.5),
    ],
)
def test_real_captures_without_any_range(real_capture: RealCapture, name: str, count: int, ms: float) -> None:
    """Their steps are those of their ranges."""
    trace = Trace.load(real_capture(name))
    ranges, operators = trace.ranges.select(slice(0, 0)), trace.operators.select(slice(0, 0))
    bare = AttributedTrace(replace(trace, ranges=ranges, operators=operators))
    (process,) = find_processes(bare.trace)
    found = find_steps(bare, process.global_pid)
    assert found is not None
    assert (found.recorded.source, len(found.recorded)) == ("repetition", count)
    assert found.length_ms == pytest.approx(ms, abs=0.2 if "graph" in name else 0.1)


@given(
    st.lists(st.integers(0, 5), min_size=8, max_size=30).filter(lambda layer: len(set(layer)) > 1),
    st.integers(3, 8),
    st.integers(2, 6),
    st.lists(st.integers(6, 9), min_size=1, max_size=4),
)
def test_the_period_of_nested_repeats_is_the_outer_one(
    layer: list[int], layers: int, count: int, head: list[int]
) -> None:
    """Passes of equal layers and a head of other kernels, however the layers are made."""
    one = [*layer * layers, *head]
    symbols = np.array(one * count)
    ns = np.ones(len(symbols), np.int64)
    found = next(find_repeats(symbols, ns, np.zeros(len(symbols), np.int64)))
    assert found.period == len(one)
    assert np.diff(found.starts).tolist() == [len(one)] * (len(found.starts) - 1)
    assert len(found.starts) == count
    assert (found.before, found.behind) == (0, 0)


# --- 4. said, or one pass


def test_as_many_steps_as_are_said(tmp_path: Path) -> None:
    """Layers that are not told from passes are, where a person says how many there are; else parts are equal."""
    layers = windows_of(sequence(Export(), [*LAYER * 36]), tmp_path, names=PhaseNames(steps=36))
    assert (layers.source, len(layers)) == ("said", 36)
    windows = windows_of(sequence(Export(), [GEMM, ADD, SOFTMAX, EMBED]), tmp_path, names=PhaseNames(steps=2))
    # Equal parts have no groups.
    said = AttributedTrace(Trace.load(tmp_path / "windows.sqlite"), PhaseNames(steps=4))
    groups = find_steps(said, global_pid())
    assert groups is not None
    assert groups_of(groups) == [("usual", 4, True)]
    # from the launch at 100 to the end at 485
    assert bounds(windows) == [(100, 292), (292, 485)]


def test_what_a_range_names_is_not_overruled(tmp_path: Path) -> None:
    assert len(windows_of(steps(Export(), 3), tmp_path, names=PhaseNames(steps=2))) == 3


def test_without_work_there_is_nothing(tmp_path: Path) -> None:
    export = Export().range("step", 0, 100).range("step", 100, 200)
    assert find_windows(attributed(export, tmp_path), global_pid()) is None


# --- a program that runs ahead of the GPU


def ahead(count: int = 4) -> Program:
    """Steps that the program launches in 50 µs each, one behind the other, and that take the GPU 300 µs each."""
    program = Program()
    for number in range(count):
        start, begin = number * 50, 20 + number * 300
        program.step(start, start + 50).work((start + 5, start + 9), (begin, begin + 200))
        program.work((start + 10, start + 14), (begin + 200, begin + 300), name=ADD)
    return program


def test_steps_that_the_program_runs_ahead_of_are_the_gpus(tmp_path: Path) -> None:
    """The first begins with its range, each ends with its last kernel: 320, 620, 920, 1220 µs."""
    windows = windows_of(ahead(), tmp_path)
    assert windows.on_gpu
    assert bounds(windows) == [(0, 320_000), (320_000, 620_000), (620_000, 920_000), (920_000, 1_220_000)]
    assert windows.cpu_start.tolist() == [0, 50_000, 100_000, 150_000]


def test_work_of_before_the_first_step_is_none_of_it(tmp_path: Path) -> None:
    """What was launched before the steps runs until 20 µs: the first begins there."""
    windows = windows_of(ahead().work((-20, -15), (-10, 20)), tmp_path)
    assert bounds(windows)[0] == (20_000, 320_000)


def test_unseen_work_of_before_the_first_step(tmp_path: Path) -> None:
    """A step launched in 50 µs runs [600, 900) on the GPU, which had other work that the file does not hold."""
    program = Program().step(0, 50).work((5, 9), (600, 900))
    assert bounds(windows_of(program, tmp_path)) == [(600_000, 900_000)]


def test_unseen_work_that_the_program_waits_for(tmp_path: Path) -> None:
    """A step waits in a copy until 605 µs for work that the file does not hold; its own runs in [600, 700)."""
    program = Program().step(0, 660).work((5, 9), (600, 605)).work((610, 612), (614, 700))
    assert bounds(windows_of(program, tmp_path)) == [(600_000, 700_000)]


def test_a_late_launch_waits_for_nothing(tmp_path: Path) -> None:
    """The first launch comes at 600 µs, and the second begins a long one."""
    program = Program().step(0, 660).work((600, 604), (605, 640)).work((5, 598), (599, 601))
    assert bounds(windows_of(program, tmp_path)) == [(0, 660_000)]


def test_steps_that_the_program_waits_for_are_the_ranges(tmp_path: Path) -> None:
    """A tenth of a step's time at most, 30 of 300 µs: a last kernel may end a little behind its range."""
    program = Program()
    for start in (0, 300, 600):
        program.step(start, start + 300).work((start + 5, start + 9), (start + 31, start + 330))
    windows = windows_of(program, tmp_path)
    assert not windows.on_gpu
    assert bounds(windows) == [(0, 300_000), (300_000, 600_000), (600_000, 930_000)]


# In µs, and none at 0: that is no time.
launches = st.lists(
    st.tuples(st.integers(950, 1500), st.integers(0, 400), st.integers(1, 300), st.integers(7, 9)),
    min_size=1, max_size=15,
)  # fmt: skip
ranges = st.lists(
    st.tuples(st.integers(1000, 1400), st.integers(1, 100), st.integers(100, 102)), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@given(ranges, launches)
def test_steps_are_in_order_and_do_not_overlap(
    folder: Path, rows: list[tuple[int, int, int]], launched: list[tuple[int, int, int, int]]
) -> None:
    program = Program()
    for start, length, thread in rows:
        program.open("step", start, start + length, thread)
    for called, latency, length, stream in launched:
        program.work((called, called), (called + latency, called + latency + length), tid=100 + stream, stream=stream)
    windows = windows_of(program, folder)
    assert (windows.end > windows.start).all()
    assert (windows.start[1:] >= windows.end[:-1]).all()
    assert (np.diff(windows.cpu_start) > 0).all()
    assert (windows.cpu_end > windows.cpu_start).all()
    assert ((windows.cpu_start < windows.body_end) & (windows.body_end <= windows.cpu_end)).all()


# --- groups


def lasting(*lengths: int) -> Program:
    """Steps of so many µs one behind the other, each with work of 20 µs."""
    program, at = Program(), 0
    for length in lengths:
        program.step(at, at + length).work((at + 2, at + 3), (at + 4, at + 24))
        at += length
    return program


USUAL, WAITS = (1000,) * 6, (3000,) * 4


@pytest.mark.parametrize(
    ("lengths", "groups", "length_ms"),
    [
        ((1000, 1010, 990), [("usual", 3, True)], 1.0),
        ((4000, 1000, 1010, 990), [("usual", 3, True), ("first", 1, False)], 1.0),
        # Four of ten wait for a batch, one of three, one of ten: they are counted, and not in the length.
        ((*USUAL[:2], *WAITS, *USUAL[2:]), [("usual", 6, True), ("longer", 4, False)], 1.0),
        ((1000, 3000, 1000), [("usual", 2, True), ("longer", 1, False)], 1.0),
        ((*USUAL[:3], 3000, *USUAL), [("usual", 9, True), ("longer", 1, False)], 1.0),
    ],
)
def test_groups_of_steps(
    tmp_path: Path, lengths: tuple[int, ...], groups: list[tuple[str, int, bool]], length_ms: float
) -> None:
    found = steps_of(lasting(*lengths), tmp_path)
    assert groups_of(found) == groups
    assert found.length_ms == pytest.approx(length_ms)
    assert len(found.windows) == sum(many for _, many, measured in groups if measured)


def test_a_first_step_is_left_out_of_every_figure(tmp_path: Path) -> None:
    """Its phases, its kernels, the whole capture: 4 ms, then three steps of 1 ms."""
    from nsys_analyzer import summarize

    program, at = Program(), 0
    for length in (4000, 1000, 1000, 1000):
        program.step(at, at + length).open("forward", at, at + length // 2).open(
            "backward", at + length // 2, at + length
        )
        program.work((at + 2, at + 3), (at + 4, at + 24)).work(
            (at + length - 40, at + length - 39), (at + length - 38, at + length - 18)
        )
        at += length
    (summary,) = summarize(program.write(tmp_path / "t.sqlite"))
    assert summary.step is not None
    assert summary.step.instances == 3
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.warmup_instances, forward.wall_ms.max) == (3, 1, 0.5)
    assert summary.whole is not None
    assert summary.whole.kernels_per_instance == 6
    assert summary.coverage is not None
    assert summary.coverage.in_warmup == 2


def test_a_first_step_is_left_out_where_two_others_remain(tmp_path: Path) -> None:
    """Steps of 951, 501 and 503 µs: the first range is as long as the others, and what makes it longer lies behind it.

    How much lies behind the third is not known, so that the second is the step.
    """
    program, at = Program(), 0
    for length in (951, 501, 503):
        program.step(at, at + 400).work((at + 2, at + 3), (at + 4, at + 24))
        at += length
    found = steps_of(program, tmp_path)
    assert groups_of(found) == [("usual", 1, True), ("first", 1, False), ("last", 1, False)]
    assert found.length_ms == pytest.approx(0.501)


def generation(*calls: tuple[int, int], names: tuple[str, ...] = (), prompt_us: int = 400) -> Program:
    """Calls of so many tokens, each of so many µs; the first pass of a call is over the prompt and computes for longer.

    ``names``: of ``step`` around a call, of ``forward`` and of ``decode`` around a pass.
    """
    program, at = Program(), 1000
    for number, (tokens, us) in enumerate(calls):
        begun = at
        if number == 0:
            program.copy((at, at + 1), (at + 1, at + 400))  # of the weights
        for token in range(tokens):
            kind = f"decode (inferred) bs=1 toks=1 sk={9 + token}" if token else "prefill (inferred) bs=1 toks=9"
            for name in {"forward": ("forward",), "decode": (kind,)}.items() if names else ():
                if name[0] in names:
                    program.open(*name[1], at + 1, at + us - 10)
            program.work((at + 2, at + 3), (at + 5, at + 5 + (100 if token else prompt_us)))
            at += us
        if "step" in names:
            program.open("step", begun, at - 5)
        at += 20
    return program


COLD, WARM = (16, 8_000), ((16, 1_100), (16, 1_000))


@pytest.mark.parametrize(
    ("names", "unit", "groups"),
    [
        # Of 48 passes 16 are cold; what lies behind the last is not known to be a whole one.
        (("forward",), "from one forward pass to the next", [("usual", 32, True), ("first", 16, False)]),
        (("step", "forward"), "from one forward pass to the next", [("usual", 32, True), ("first", 16, False)]),
        # Two prompts of warm calls are of another kind.
        (
            ("step", "forward", "decode"), "a range such as prefill (inferred) bs=1 toks=9",
            [("usual", 30, True), ("other work", 2, False), ("first", 16, False)],
        ),
        # A call alone tells no token.
        (("step",), "a range step", [("usual", 2, True), ("first", 1, False)]),
    ],
)  # fmt: skip
def test_the_tokens_of_a_generation_and_its_cold_call(
    tmp_path: Path, names: tuple[str, ...], unit: str, groups: list[tuple[str, int, bool]]
) -> None:
    found = steps_of(generation(COLD, *WARM, names=names), tmp_path)
    assert (found.windows.unit, groups_of(found)) == (unit, groups)
    assert found.start_up is not None
    assert found.start_up[1] - found.start_up[0] == 16 * 8_000_000 + 20_000  # up to the next call
    if names != ("step",):  # of 30 or 32 passes half takes 1.1 ms, and half 1 ms
        assert found.length_ms == pytest.approx(1.05, abs=0.06)


def test_a_long_prompt_is_no_start_up(tmp_path: Path) -> None:
    """A first pass that computes for 6 ms in place of 0.1 takes 7 of them."""
    program = generation((1, 7_000), (30, 1_000), names=("forward",), prompt_us=6_000)
    assert groups_of(steps_of(program, tmp_path))[0][0] == "usual"
    assert "first" not in [kind for kind, _, _ in groups_of(steps_of(program, tmp_path))]


def test_collectives_that_wait_are_no_other_work(tmp_path: Path) -> None:
    """A rank that waits 900 µs in a collective in one step does what it does in others."""
    program, at = Program(), 0
    for waits in (10, 10, 900, 10, 10):
        program.step(at, at + 1000).work((at + 2, at + 3), (at + 5, at + 55))
        program.work((at + 4, at + 5), (at + 56, at + 56 + waits), name=NCCL)
        at += 1000
    assert [one.kind for one in steps_of(program, tmp_path).groups] == ["usual"]
