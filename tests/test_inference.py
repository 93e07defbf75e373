"""Phases of programs that name none: from nsys's function ranges, and from autograd's operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, Export
from tests.support.kineto import AUTOGRAD as TORCH_AUTOGRAD
from tests.support.kineto import Kineto

CALL = "torch.nn.modules.Module.__call__"
ADAMW = "Optimizer.step#AdamW.step"
ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def summary_of(path: Path, names: PhaseNames | None = None) -> CaptureSummary:
    (summary,) = summarize(Trace.load(path), "t", names)
    return summary


def kernels(summary: CaptureSummary) -> dict[str, tuple[int, float]]:
    """Phase to its instances, and kernels of one."""
    return {phase.phase: (phase.instances, phase.kernels_per_instance) for phase in summary.phases}


# --- threads and kernels alone -----------------------------------------------------------------------------------

ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>(int)"


def unmarked(export: Export, at: int, *, updates: bool = True) -> Export:
    """A step of 1,000 ns without a range: forward launches at 10 and 20, autograd's thread at 110, 120 and 130, the
    optimizer at 210 and 230, with the step counter's addition at 220 in between; gradients are set to zero at 30, by a
    kernel like the optimizer's, behind the first matmul.
    """
    export.kernel(GEMM, at + 10, at + 11, at + 15).kernel(ADAM if updates else ADD, at + 30, at + 31, at + 35)
    export.kernel(ADD, at + 20, at + 21, at + 25)
    for time in (110, 120, 130):
        export.kernel(GEMM, at + time, at + time + 1, at + time + 5, tid=AUTOGRAD)
    for time, name in ((210, ADAM), (220, ADD), (230, ADAM)):
        export.kernel(name if updates else ADD, at + time, at + time + 1, at + time + 5)
    return export


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (True, {"forward": (3, 3), "backward": (3, 3), "optimizer": (3, 3)}),
        (False, {"backward": (3, 3)}),  # which of the additions updates weights is not known
    ],
)
def test_a_capture_without_a_range(tmp_path: Path, updates: bool, expected: dict[str, tuple[int, float]]) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    for step in range(3):
        unmarked(export, 1000 * step, updates=updates)
    summary = summary_of(export.write(tmp_path / "t.sqlite"))
    assert kernels(summary) == expected
    assert all(phase.inferred and "autograd's threads" in phase.range for phase in summary.phases)


def test_steps_that_differ_are_told_by_threads(tmp_path: Path) -> None:
    # From the first launch of a step at 10 to that of the next one, 1,000 ns on; each has more additions than the last.
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    for step, additions in enumerate((0, 5, 1, 7, 3)):
        unmarked(export, 1000 * step)
        for time in range(40, 40 + 8 * additions, 8):
            export.kernel(ADD, 1000 * step + time, 1000 * step + time + 1, 1000 * step + time + 5)
    step = summary_of(export.write(tmp_path / "t.sqlite")).step
    assert step is not None
    assert (step.source, step.length_ms) == ("phases", pytest.approx(1e-3))


# --- nsys's function ranges --------------------------------------------------------------------------------------


def functions(export: Export, at: int) -> Export:
    """One step of 1,000 ns: the model at [0, 300) with a module inside, its criterion at [310, 340), backward at
    [400, 600), AdamW at [700, 800) around Adam, a scheduler after it. Forward: 3 kernels (20, 120, 320), none of them
    that of the data (5, before the model); backward: 2 (450 of autograd's thread, 500 of a module called again).
    """
    export.kernel(ADD, at + 5, at + 6, at + 8)
    export.range(CALL, at + 10, at + 300).range(CALL, at + 100, at + 200).kernel(GEMM, at + 20, at + 30, at + 40)
    export.kernel(GEMM, at + 120, at + 130, at + 140)
    export.range(CALL, at + 310, at + 340).kernel(ADD, at + 320, at + 330, at + 335)
    export.range("torch.Tensor.backward", at + 400, at + 600).range("torch.autograd.backward", at + 410, at + 590)
    export.kernel(GEMM, at + 450, at + 460, at + 470, tid=AUTOGRAD)
    export.range(CALL, at + 490, at + 520, tid=AUTOGRAD).kernel(GEMM, at + 500, at + 510, at + 520, tid=AUTOGRAD)
    export.range("torch.optim.AdamW.step", at + 700, at + 800).range("torch.optim.Adam.step", at + 710, at + 790)
    export.kernel(ADD, at + 720, at + 730, at + 740)
    return export.range("torch.optim.lr_scheduler.LRScheduler.step", at + 850, at + 860)


def traced(steps: int = 2) -> Export:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    for step in range(steps):
        functions(export, 1000 * step)
    return export


def test_function_ranges_are_phases_by_their_outermost(tmp_path: Path) -> None:
    summary = summary_of(traced().write(tmp_path / "t.sqlite"))
    assert kernels(summary) == {"forward": (2, 3), "backward": (2, 2), "optimizer": (2, 1)}
    assert all(phase.inferred for phase in summary.phases)
    forward = summary.phase("forward")
    assert forward is not None
    assert forward.wall_ms.mean == pytest.approx(
        330 / 1e6
    )  # from the model's start at 10 to the criterion's end at 340
    assert "function ranges" in forward.range


def test_a_phase_named_by_option_switches_it_off(tmp_path: Path) -> None:
    path = traced(1).range("my_pass", 0, 600).write(tmp_path / "t.sqlite")
    summary = summary_of(path, PhaseNames.parse(["forward=my_pass"]))
    assert kernels(summary) == {"forward": (1, 6)}  # all of 5 to 500: backward is not known, so nothing is taken out
    assert not summary.phases[0].inferred


def test_warm_up_of_another_process_parts_no_forward(tmp_path: Path) -> None:
    # It begins between the model and its criterion.
    export = traced().range("warmup", 305, None, tid=200, pid=200).kernel(ADD, 1, 2, 3, tid=200, pid=200)
    first, _ = sorted(summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t"), key=lambda one: one.pid or 0)
    assert kernels(first) == {"forward": (2, 3), "backward": (2, 2), "optimizer": (2, 1)}


def test_a_forward_begins_with_the_outermost_operator_of_its_thread(tmp_path: Path) -> None:
    # aten::to opens at 45 around aten::copy_, which launches at 50; backward makes its first gradient from 188 on.
    trace = Kineto()
    torch_step(trace.operator("aten::to", 45, 10).operator("aten::copy_", 47, 5), 0, 1)
    forward = summary_of(trace.write(tmp_path / "t.json")).phase("forward")
    assert forward is not None
    assert forward.wall_ms.mean == pytest.approx((188 - 45) / 1e3)


# --- autograd's operators ----------------------------------------------------------------------------------------


def torch_step(trace: Kineto, at: int, number: int, passes: int = 1) -> Kineto:
    """One step of 1,000 us: each pass has a forward of two kernels, at 110 and 150, the first by an operator that
    starts at 105; ``backward()`` makes the first gradient at 190 by a kernel; the engine runs [200, 240) and [250, 280)
    with a kernel each; the optimizer has one at 710. A copy of the batch at 50 is launched by the step, too.
    """
    trace.range(f"ProfilerStep#{number}", at, 1000).range(ADAMW, at + 700, 50)
    launched = 100 * number
    calls = [(50, MAIN_OF_TORCH, ADD), (710, MAIN_OF_TORCH, ADD)]
    for one in range(passes):
        start = at + 300 * one
        trace.operator("aten::linear", start + 105, 40).operator("aten::ones_like", start + 188, 8)
        trace.operator(ENGINE, start + 200, 40, tid=TORCH_AUTOGRAD).operator(
            ENGINE, start + 250, 30, tid=TORCH_AUTOGRAD
        )
        calls += [(300 * one + t, MAIN_OF_TORCH, GEMM) for t in (110, 150, 190)]
        calls += [(300 * one + t, TORCH_AUTOGRAD, GEMM) for t in (210, 260)]
    for i, (time, thread, name) in enumerate(calls, launched):
        trace.launch(i + 1, at + time, tid=thread).kernel(name, i + 1, at + time + 5, 4)
    return trace


MAIN_OF_TORCH = 500


def test_the_engine_is_backward_and_what_the_step_launches_before_it_forward(tmp_path: Path) -> None:
    trace = Kineto().gpu()
    for number in (1, 2):
        torch_step(trace, 2000 * number, number)
    summary = summary_of(trace.write(tmp_path / "t.json"))
    # forward: the copy at 50, 110, 150; backward: the first gradient at 190, 210, 260; optimizer: 710
    assert kernels(summary) == {"forward": (2, 3), "backward": (2, 3), "optimizer": (2, 1), "step": (2, 7)}
    backward, forward = summary.phase("backward"), summary.phase("forward")
    assert backward is not None
    assert forward is not None
    assert backward.inferred
    assert backward.wall_ms.mean == pytest.approx(0.092)  # from 188, the first gradient's start, to 280
    assert forward.wall_ms.mean == pytest.approx(0.138)  # from the copy at 50 to 188


def test_a_schedule_that_runs_the_engine_on_two_threads(tmp_path: Path) -> None:
    # A pipeline's step calls autograd for the weights' gradients itself: both threads run the engine, and no optimizer
    # is there. What the helper launches at 210 and 260 is of the profiler's step nevertheless, as is 310 of the main
    # thread.
    trace = Kineto().range("ProfilerStep#1", 0, 1000).operator("aten::linear", 105, 40)
    trace.operator(ENGINE, 200, 40, tid=TORCH_AUTOGRAD).operator(ENGINE, 250, 30, tid=TORCH_AUTOGRAD)
    trace.operator(ENGINE, 300, 30)
    launches = [(110, MAIN_OF_TORCH), (210, TORCH_AUTOGRAD), (260, TORCH_AUTOGRAD), (310, MAIN_OF_TORCH)]
    for i, (time, thread) in enumerate(launches, 1):
        trace.launch(i, time, tid=thread).kernel(GEMM, i, time + 5, 4)
    summary = summary_of(trace.write(tmp_path / "t.json"))
    assert kernels(summary) == {"step": (1, 4), "forward": (1, 1), "backward": (1, 3)}


def test_the_parts_of_a_schedule_are_no_steps(tmp_path: Path) -> None:
    # Two layers, each with four parts in turns, in one step of the profiler. The engine's thread has no ranges and no
    # name of its own: what it launches at 260 and 660 is of attn(B) and of the step.
    trace = Kineto().range("ProfilerStep#1", 0, 1000)
    for i, at in enumerate((0, 400)):
        for part, name in enumerate(("attn(F)", "mlp(B)", "attn(B)", "mlp(W)")):
            trace.range(name, at + 100 * part, 90)
            thread = TORCH_AUTOGRAD if name == "attn(B)" else MAIN_OF_TORCH
            number = 4 * i + part + 1
            trace.launch(number, at + 100 * part + 60, tid=thread)
            trace.kernel(GEMM, number, at + 100 * part + 70, 10)
    summary = summary_of(trace.write(tmp_path / "t.json"))
    assert kernels(summary) == {"forward": (2, 1), "backward": (6, 1), "step": (1, 8)}
    assert summary.step is not None
    assert (summary.step.source, summary.step.instances) == ("profiler_step", 1)


def test_forwards_that_differ_much_do_not_suffice(tmp_path: Path) -> None:
    """An evaluation of 10 kernels between two steps of 3: forwards of 3 and 13."""
    export = functions(functions(Export().thread(AUTOGRAD, "pt_autograd_0").gpu(), 0), 5000)
    for i in range(10):
        export.range(CALL, 2000 + 100 * i, 2050 + 100 * i).kernel(GEMM, 2010 + 100 * i, 2020 + 100 * i, 2030 + 100 * i)
    summary = summary_of(export.write(tmp_path / "t.sqlite"))
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.kernels_least, forward.kernels_most) == (3, 14)  # the kernel of the data is inside, too
    assert not summary.phases_suffice
    assert any("The inferred forward launches 3 to 14 kernels" in warning for warning in say_all(summary.warnings))


def test_gradients_set_to_zero_are_no_forward(tmp_path: Path) -> None:
    trace = torch_step(Kineto().gpu(), 2000, 1).range("Optimizer.zero_grad#AdamW.zero_grad", 2010, 20)
    summary = summary_of(trace.launch(90, 2015).kernel(ADD, 90, 2020, 4).write(tmp_path / "t.json"))
    forward = summary.phase("forward")
    assert forward is not None
    assert forward.wall_ms.mean == pytest.approx(0.138)  # from the copy at 50 to 188, not from 15


# --- programs, and what is inferred of them -----------------------------------------------------------------------


def calls(*starts: int, export: Export | None = None, tids: tuple[int, ...] = ()) -> Export:
    """Calls of modules of 50 ns, each with a kernel, on threads of their own or on the main one."""
    export = export or Export().gpu()
    for at, tid in zip(starts, tids or (MAIN,) * len(starts), strict=True):
        export.range(CALL, at + 1, at + 50, tid=tid).kernel(GEMM, at + 10, at + 20, at + 30, tid=tid)
    return export


def prefetching(export: Export) -> Export:
    """With 12 copies of a thread of their own, while nothing of the step is open."""
    for i in range(12):
        export.kernel(ADD, 2000 + i, 2100 + 10 * i, 2105 + 10 * i, tid=77)
    return export


def operators(*rows: tuple[str, int, int], trace: Kineto | None = None) -> Kineto:
    """Operators of 20 us by name, start and thread, each with a kernel."""
    trace = trace or Kineto().gpu()
    for number, (name, at, tid) in enumerate(rows, 1):
        trace.operator(name, at, 20, tid=tid).launch(number, at + 5, tid=tid).kernel(GEMM, number, at + 8, 4)
    return trace


def decoding(module: str, us: int) -> Kineto:
    """A step that launches a graph of 100 us, and calls one module."""
    trace = Kineto().gpu().range("step[DECODE bs=1]", 0, 200)
    trace.launch(1, 10, api="cudaGraphLaunch").kernel(GEMM, 1, 20, 100)
    return trace.module(module, 130, 20).launch(2, 135).kernel(ADD, 2, 150, us)


def closure(at: int) -> list[tuple[str, int, int]]:
    """The operators of a step whose optimizer runs the model."""
    forward, backward = ((("aten::mm", MAIN_OF_TORCH), (20, 60)), ((ENGINE, TORCH_AUTOGRAD), (200, 240)))
    rows = [(name, at + time, tid) for (name, tid), times in (forward, backward) for time in times]
    return [*rows, ("aten::_fused_adamw_", at + 500, MAIN_OF_TORCH)]


TRAINED = {"forward": (1, 1), "backward": (1, 1)}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (calls(0, 100, 200), {"forward": (3, 1)}),  # without a backward every call is a forward
        (traced(1).range("loss", 310, 340), {"loss": (1, 1)}),  # a range of the person's own switches it off
        # Of several threads that call modules the busiest runs the forwards.
        (calls(0, 100, 200, 300, tids=(101, 102, 102, 103)), {"forward": (2, 1)}),
        # The optimizer's call holds the model's, backward's and its own kernel.
        (
            calls(20, export=Export().gpu().range("torch.optim.AdamW.step", 0, 900))
            .range("torch.autograd.backward", 300, 500).kernel(GEMM, 350, 360, 370).kernel(ADD, 600, 610, 620),
            {**TRAINED, "optimizer": (1, 1)},
        ),
        # A module whose call trains is no forward.
        (
            calls(20, export=Export().gpu().range(CALL, 0, 900))
            .range("torch.autograd.backward", 300, 500).kernel(GEMM, 350, 360, 370),
            TRAINED,
        ),
        # A thread that launches more than the steps does not run them.
        (prefetching(traced(1)), {"forward": (1, 3), "backward": (1, 2), "optimizer": (1, 1)}),
        # Threads of autograd without a name.
        (functions(Export().gpu(), 0), {"forward": (1, 3), "backward": (1, 2), "optimizer": (1, 1)}),
        # A call that no backward follows is no training forward.
        (calls(5000, export=traced(2)), {"forward": (2, 3), "backward": (2, 2), "optimizer": (2, 1)}),
        # No thread launches outside the engine: backward is a range of the engine's own.
        (operators((ENGINE, 200, TORCH_AUTOGRAD)).thread(TORCH_AUTOGRAD, "pt_autograd_0"), {"backward": (1, 1)}),
        # Gradients of two passes: the first forward has the copy, 110 and 150, the second 410 and 450: 2.5 of each.
        (
            torch_step(Kineto().gpu(), 0, 1, passes=2),
            {"forward": (2, 2.5), "backward": (2, 3), "optimizer": (1, 1), "step": (1, 12)},
        ),
        # The model is a graph of 100 us; beside it a sampler of 11 us is no forward, a head of 12 us may be one.
        (decoding("Sampler_0", 11), {"step": (1, 2)}),
        (decoding("Head_0", 12), {"forward": (1, 1), "step": (1, 2)}),
        # A step of inference has no inferred forward.
        (
            operators(("aten::mm", 5, MAIN_OF_TORCH), trace=Kineto().gpu().range("ProfilerStep#1", 0, 100)),
            {"step": (1, 1)},
        ),
        # Two optimizer steps of 900 us whose closure runs the model: 2 kernels forward, 2 backward, 1 of the update.
        (
            operators(
                *closure(0), *closure(2000),
                trace=Kineto().gpu().range(ADAMW, 10, 890).range(ADAMW, 2010, 890),
            ),
            {"forward": (2, 2), "backward": (2, 2), "optimizer": (2, 1)},
        ),
        # DDP copies buckets back to gradients when the engine is done, on the engine's thread: at 290 of [100, 300).
        (
            torch_step(Kineto().gpu(), 0, 1).launch(99, 290, tid=TORCH_AUTOGRAD).kernel(ADD, 99, 295, 3),
            {"forward": (1, 3), "backward": (1, 4), "optimizer": (1, 1), "step": (1, 8)},
        ),
        # A capture that begins inside backward.
        (
            torch_step(
                Kineto().gpu().operator(ENGINE, 10, 40, tid=TORCH_AUTOGRAD).launch(90, 20, tid=TORCH_AUTOGRAD)
                .kernel(GEMM, 90, 25, 4),
                2000, 1,
            ),
            {"forward": (1, 3), "backward": (1, 3), "optimizer": (1, 1), "step": (1, 7)},
        ),
    ],
)  # fmt: skip
def test_what_is_inferred(tmp_path: Path, program: Export | Kineto, expected: dict[str, tuple[int, float]]) -> None:
    suffix = ".json" if isinstance(program, Kineto) else ".sqlite"
    assert kernels(summary_of(program.write(tmp_path / f"t{suffix}"))) == expected


def test_a_phase_named_by_option_and_not_in_the_capture_switches_it_off(tmp_path: Path) -> None:
    assert kernels(summary_of(traced().write(tmp_path / "t.sqlite"), PhaseNames.parse(["forward=missing"]))) == {}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5).map(
        lambda all: sorted(all, key=sum)
    )
)
def test_every_kernel_before_and_in_a_backward_has_its_phase(steps: list[tuple[int, int]]) -> None:
    """Passes of some kernels forward and some backward, one after the other: as many instances, and no kernel lost.

    The first is the shortest: a long one is left out.
    """
    trace = Kineto().gpu()
    number, at = 0, 0
    for forward, backward in steps:
        for tid, launches in ((MAIN_OF_TORCH, forward), (TORCH_AUTOGRAD, backward)):
            for _ in range(launches):
                number, at = number + 1, at + 10
                name = ENGINE if tid == TORCH_AUTOGRAD else "aten::mm"
                trace.operator(name, at, 8, tid=tid).launch(number, at + 2, tid=tid).kernel(GEMM, number, at + 4, 3)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = kernels(summary_of(trace.write(Path(folder) / "t.json")))
    n = len(steps)
    assert found["forward"] == (n, pytest.approx(sum(f for f, _ in steps) / n))
    assert found["backward"] == (n, pytest.approx(sum(b for _, b in steps) / n))


# --- beside warm-up ----------------------------------------------------------------------------------------------


def warmed() -> Export:
    """One kernel at 5 makes the weights; warm-up [100, 2000) holds a step at 200, two steps follow at 2200 and 3200.

    A step has a kernel forward at 20, backward at 220 and in the optimizer at 420; warm-up launches one more at 800.
    """
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu().kernel(ADD, 5, 6, 9).range("warmup", 100, 2000)
    for at in (200, 2200, 3200):
        export.range("aten::mm, seq = 1", at + 10, at + 100).kernel(GEMM, at + 20, at + 30, at + 40)
        export.range(f"{ENGINE}, seq = 1", at + 200, at + 300, tid=AUTOGRAD)
        export.kernel(GEMM, at + 220, at + 230, at + 240, tid=AUTOGRAD)
        export.range("Optimizer.step#SGD.step, op_id = 1", at + 400, at + 500).kernel(ADD, at + 420, at + 430, at + 440)
    return export.kernel(ADD, 800, 801, 809)


def test_no_forward_goes_across_a_bound_of_warm_up(tmp_path: Path) -> None:
    """Neither from the weights' kernel into warm-up, nor from warm-up's last one into the first measured step."""
    summary = summary_of(warmed().write(tmp_path / "t.sqlite"))
    assert kernels(summary) == {"forward": (2, 1), "backward": (2, 1), "optimizer": (2, 1)}
    assert [phase.warmup_instances for phase in summary.phases] == [1, 1, 1]


def test_a_module_called_before_warm_up_is_no_training_forward(tmp_path: Path) -> None:
    """A check of the model at [10, 50), then warm-up [500, 1900) around one step, then one step: no backward follows
    the check, so it is no training forward.
    """
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu().range(CALL, 10, 50)
    export.kernel(GEMM, 20, 30, 40).range("warmup", 500, 1900)
    summary = summary_of(functions(functions(export, 900), 2000).write(tmp_path / "t.sqlite"))
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.warmup_instances, forward.kernels_per_instance) == (1, 1, 3)


# --- one real program, both ways ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["functions_trace_gpt2", "functions_autograd_gpt2", "operators alone"])
def test_one_program_both_ways(real_capture: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Three steps of GPT-2: 3,012 kernels = 3 · (371 + 624 + 9), however they were annotated."""
    path = real_capture("functions_autograd_gpt2" if " " in name else name)
    if " " in name:
        path = without_function_ranges(path, tmp_path / "t.sqlite")
    assert kernels(summary_of(path)) == {"forward": (3, 371), "backward": (3, 624), "optimizer": (3, 9)}


def without_function_ranges(path: Path, copy: Path) -> Path:
    import shutil
    import sqlite3
    from contextlib import closing

    shutil.copy(path, copy)
    with closing(sqlite3.connect(copy)) as connection, connection:
        names = "SELECT id FROM StringIds WHERE value LIKE 'torch.%'"
        connection.execute(f"DELETE FROM NVTX_EVENTS WHERE textId IN ({names}) OR text LIKE 'torch.%'")
    return copy
