"""Tests how steps are found: by ranges, phases, repetition, the user's number, or else as one pass."""

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
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.cases import Capture, make_case_test
from tests.support.export import ADD, GEMM, PID, SOFTMAX, Export, global_pid
from tests.support.program import Program, attributed

Bounds = list[tuple[int, int]]
RealCapture = Callable[[str], Path]

EMBED = "void at::native::vectorized_gather_kernel<16, long>(char *, char *, long)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>(int)"
#: A layer of a model, and one of another; what a pass through a model adds to its layers.
LAYER = (GEMM, ADD, GEMM, SOFTMAX, GEMM, ADD)
HEAD = (SOFTMAX, GEMM, ADD)


def windows_of(export: Export, folder: Path, names: PhaseNames | None = None) -> Windows:
    trace = Trace.load(export.write(folder / "windows.sqlite"))
    windows = find_windows(AttributedTrace(trace, names), global_pid())
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


def windows_in(capture: Capture, steps: int = 0) -> Windows:
    """Returns the steps of the chosen process of a case; ``steps`` is their number if a person states it."""
    names = PhaseNames(steps=steps) if steps else capture.names
    windows = find_windows(AttributedTrace(capture.trace, names), global_pid(capture.pid or PID))
    assert windows is not None
    return windows


def steps_in(capture: Capture, steps: int = 0) -> Steps:
    found = find_steps(AttributedTrace(capture.trace, PhaseNames(steps=steps)), global_pid())
    assert found is not None
    return found


def phases_by_letter(export: Export, text: str, at: int = 0, name: str = GEMM) -> Export:
    """Adds phases of 100 ns each, one after the other, by their letters; each launches a kernel of 80 ns."""
    called = {"F": "forward", "B": "backward", "O": "optimizer"}
    for number, letter in enumerate(text):
        start = at + 100 * number
        kernel = {"F": GEMM, "B": SOFTMAX, "O": ADD}[letter] if name == GEMM else name
        export.range(called[letter], start, start + 100).kernel(kernel, start + 5, start + 10, start + 90)
    return export


test_steps = make_case_test(
    "steps",
    {
        "source": lambda capture: windows_in(capture).source,
        "unit": lambda capture: windows_in(capture).unit,
        "on_gpu": lambda capture: windows_in(capture).on_gpu,
        "windows": lambda capture: find_windows(capture.attributed, global_pid()),
        "bounds": lambda capture: bounds(windows_in(capture)),
        "bounds in 2": lambda capture: bounds(windows_in(capture, 2)),
        "ends of ranges": lambda capture: windows_in(capture).body_end.tolist(),
        "starts in µs": lambda capture: (windows_in(capture).start // 1000).tolist(),
        "starts on the CPU": lambda capture: windows_in(capture).cpu_start.tolist(),
        "groups": lambda capture: groups_of(steps_in(capture)),
        "groups in 4": lambda capture: groups_of(steps_in(capture, 4)),
        "source of all": lambda capture: steps_in(capture).recorded.source,
        "length_ms": lambda capture: steps_in(capture).length_ms,
        "start_up": lambda capture: steps_in(capture).start_up_bounds,
        "phases of the summary": lambda capture: [phase.phase for phase in capture.summary.phases],
        "measured steps": lambda capture: capture.summary.step.instances if capture.summary.step else 0,
    },
    builders={"phases": lambda text: phases_by_letter(Export(), text)},
)


# --- 2. phases


def test_models_that_train_in_turns_are_one_step(tmp_path: Path) -> None:
    """A GAN: an optimizer step of the discriminator, then one of the generator, whose kernels are others."""
    export = Export()
    for number in range(6):
        phases_by_letter(export, "FBO", at=300 * number, name=(GEMM, "generator")[number % 2])
    windows = windows_of(export, tmp_path)
    assert windows.unit == "2 optimizer steps that take turns"
    assert bounds(windows) == [(0, 600), (600, 1200), (1200, 1800)]


# --- 3. repetition


def sequence(export: Export, kernels: list[str], at: int = 0, pause: dict[int, int] | None = None) -> Export:
    """Adds kernels of 80 ns, launched 100 ns apart, with a pause before some of them."""
    time = at
    for number, name in enumerate(kernels):
        time += 100 + (pause or {}).get(number, 0)
        export.kernel(name, time, time + 5, time + 85)
    return export


def a_pass(layers: int) -> list[str]:
    return [EMBED, *LAYER * layers, *HEAD]


def with_pauses(kernels: list[str], pauses: dict[int, int]) -> Export:
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
            with_pauses([*a_pass(10)[30:], *a_pass(10) * 4], {LONG - 30 + LONG * number: 5_000 for number in range(4)}),
            [100 * (LONG - 30) + 5_100 + number * (100 * LONG + 5_000) for number in range(4)], LONG,
        ),
        # Three kernels more in the fourth of eight; the program pauses for 100 ns before each.
        (
            with_pauses([*a_pass(10) * 4, ADD, SOFTMAX, ADD, *a_pass(10) * 4], LOGS),
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
def test_the_whole_capture_is_one_pass(tmp_path: Path, kernels: list[str]) -> None:
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


def test_start_up_may_take_longer_than_the_steps(tmp_path: Path) -> None:
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
    assert (found.operations_before, found.operations_after) == (0, 0)


# --- 4. said, or one pass


def test_a_person_states_the_number_of_steps(tmp_path: Path) -> None:
    """Layers that are not told from passes are steps then."""
    layers = windows_of(sequence(Export(), [*LAYER * 36]), tmp_path, names=PhaseNames(steps=36))
    assert (layers.source, len(layers)) == ("said", 36)


# --- a law

# Times are µs. None is 0, which is no time.
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


def steps_lasting(*lengths: int) -> Program:
    """Returns steps of these lengths in µs, one after the other, each with work of 20 µs."""
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
    found = steps_of(steps_lasting(*lengths), tmp_path)
    assert groups_of(found) == groups
    assert found.length_ms == pytest.approx(length_ms)
    assert len(found.windows) == sum(many for _, many, measured in groups if measured)


def generation(*calls: tuple[int, int], names: tuple[str, ...] = (), prompt_us: int = 400) -> Program:
    """Returns calls of a model, each given by its tokens and the µs of a token. Its first pass is the prompt's.

    ``names`` are those of the ranges: ``step`` around a call, ``forward`` and ``decode`` around a pass.
    """
    program, at = Program(), 1000
    for number, (tokens, us) in enumerate(calls):
        begun = at
        if number == 0:
            program.copy((at, at + 1), (at + 1, at + 400))  # the weights
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
        (("forward",), "the time from one forward pass to the next", [("usual", 32, True), ("first", 16, False)]),
        (
            ("step", "forward"), "the time from one forward pass to the next",
            [("usual", 32, True), ("first", 16, False)],
        ),
        # Two prompts of warm calls are of another kind.
        (
            ("step", "forward", "decode"), "a range named like prefill (inferred) bs=1 toks=9",
            [("usual", 30, True), ("other work", 2, False), ("first", 16, False)],
        ),
        # A call alone tells no token.
        (("step",), "a range named step", [("usual", 2, True), ("first", 1, False)]),
    ],
)  # fmt: skip
def test_the_tokens_of_a_generation_and_its_cold_call(
    tmp_path: Path, names: tuple[str, ...], unit: str, groups: list[tuple[str, int, bool]]
) -> None:
    found = steps_of(generation(COLD, *WARM, names=names), tmp_path)
    assert (found.windows.unit, groups_of(found)) == (unit, groups)
    assert found.start_up_bounds is not None
    assert found.start_up_bounds[1] - found.start_up_bounds[0] == 16 * 8_000_000 + 20_000  # up to the next call
    if names != ("step",):  # of 30 or 32 passes half takes 1.1 ms, and half 1 ms
        assert found.length_ms == pytest.approx(1.05, abs=0.06)


def test_a_long_prompt_is_no_start_up(tmp_path: Path) -> None:
    """A first pass that computes for 6 ms in place of 0.1 takes 7 of them."""
    program = generation((1, 7_000), (30, 1_000), names=("forward",), prompt_us=6_000)
    assert groups_of(steps_of(program, tmp_path))[0][0] == "usual"
    assert "first" not in [kind for kind, _, _ in groups_of(steps_of(program, tmp_path))]
