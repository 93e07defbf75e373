"""The bench of torch.compile: its cases, and its section from hand-made rows and real captures."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.experiments.compile import BENCH, TracePair, class_changes, pairs_of, trace_answers, trace_pairs
from nsys_analyzer.experiments.results import all_cases
from nsys_analyzer.experiments.steps import TARGET, StepCase, StepFigures, StepRow
from nsys_analyzer.runs.captures import load_captures
from tests.support.rows import COLD, check, default_settings, figures, page, typed_row

EXAMPLES = Path(__file__).parent.parent / "examples" / "sweep"
PARTED = ("forward", "loss", "backward", "optimizer", "step")
CASE = {
    "device": "cuda", "attention": "unfused", "warmup_steps": 5, "steps": 10, "seed": 0, "model": "small",
    "context_length": 256, "precision": "fp32", "mode": "train", "batch_size": 4, "optimizer": "torch",
}  # fmt: skip
LARGE = {"model": "large"}


settings = partial(default_settings, BENCH)


def row(compiled: bool, step_ms: float, changes: dict[str, Any] | None = None, **figures: Any) -> StepRow:
    """Forward is 0.3 of a step, loss 0.1, backward 0.4, optimizer 0.2; the first step takes 20 s more."""
    known: dict[str, Any] = {
        "forward_ms": 0.3 * step_ms, "loss_ms": 0.1 * step_ms, "backward_ms": 0.4 * step_ms,
        "optimizer_ms": 0.2 * step_ms, "step_ms": step_ms, "step_std_ms": 1.0, "first_step_ms": 20_000 + step_ms,
        "times_ms": 9 * [step_ms],
        "product_bits": 23, "forward_flops": 1e9, "backward_flops": 2e9, "parameters_bytes": 2**29,
        "gradients_bytes": 2**29, "optimizer_bytes": 2**30, "logits_bytes": 2**20, "peak_allocated_bytes": 2**32,
    }  # fmt: skip
    known |= figures
    known = {**{f"{key[:-3]}_median_ms": ms for key, ms in known.items() if key[:-3] in PARTED}, **known}
    case = {**CASE, "compile": compiled, **(changes or {})}
    return typed_row(TARGET, case, known, environment=COLD if compiled else {})


@pytest.fixture(scope="module")
def example_captures() -> dict[str, CaptureSummary]:
    found = load_captures([EXAMPLES]).captures
    return {capture.name: capture for capture in found}


@pytest.fixture
def trace_pair(example_captures: dict[str, CaptureSummary]) -> TracePair:
    """Real captures of one model, the eager one at a context of 256, the compiled one at 512."""
    return TracePair(
        "x", example_captures["small_ctx256_train_fp32"], example_captures["small_ctx512_train_fp32_compile"]
    )


def test_cases_are_eager_first_then_compiled_without_a_cache() -> None:
    cases = all_cases(BENCH, settings())[2:]  # after the ceilings in fp32 and bf16
    assert len(cases) == 2 * 3 * 2 * 2  # eager and compiled, three models, two precisions, two modes
    assert [case.case.compile for case in cases] == [False] * 12 + [True] * 12
    assert [dict(case.environment) for case in cases] == [{}] * 12 + [COLD] * 12
    assert cases[1].case == StepCase(**CASE)
    assert cases[13].label == "small, context 256, fp32, train, compiled"


def test_on_a_cpu_one_narrow_layer_and_the_cache_for_the_traces() -> None:
    cases = all_cases(BENCH, settings("cpu"))[1:]
    assert [(case.case.compile, dict(case.environment)) for case in cases] == [(False, {}), (True, {})]
    assert [getattr(cases[0].case, key) for key in ("d_model", "d_ff", "num_layers", "num_heads")] == [256, 1024, 1, 4]


def test_the_profiled_step_is_that_of_the_cases() -> None:
    assert BENCH.captures
    targets = {one.name: one for one in BENCH.captures(settings(num_layers=3, seed=7)).targets}
    assert len(targets) == 4  # two precisions, twice
    eager, compiled = targets["small_ctx256_train_fp32"], targets["small_ctx256_train_fp32_compile"]
    assert eager.program == (
        sys.executable, "-m", "profiling_targets.transformer", "--model", "small", "--context-length", "256",
        "--mode", "train", "--precision", "fp32", "--device", "cuda", "--steps", "5", "--warmup", "5",
        "--num-layers", "3", "--seed", "7",
    )  # fmt: skip
    assert not compiled.timed
    assert [getattr(compiled.run, key) for key in ("d_model", "num_layers", "seed")] == [768, 3, 7]
    assert BENCH.captures(settings(profiled_models=0)).targets == ()


LOST = replace(
    row(True, 1), status="oom", message="CUDA out of memory", figures=StepFigures(peak_allocated_bytes=2**33)
)
#: Thirds of three steps: medians 16.8 and 14.6, 16.8 ÷ 14.6 = 1.15; 15.7 ÷ 15 = 1.047.
COOLING, STEADY = [17.2, 16.8, 16.7, 14.7, 14.5, 14.6, 14.7, 14.6, 14.3], [15.7, 15.7, 15.7, *6 * [15.0]]


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # small 100 ÷ 80, large 50 ÷ 20; phases are shares of the step, so that each is as much faster
        # 20 s of compiling: 20,000 ÷ (100 - 80) = 1,000 steps; 20,000 ÷ (50 - 20) = 667
        ((row(False, 100), row(True, 80), row(False, 50, LARGE, peak_allocated_bytes=2**35), row(True, 20, LARGE)),
         ["makes a train step 1.250× (small fp32, context 256) to 2.500× (large fp32, context 256) as fast",
          "Inside a training step: forward 1.250× to 2.500×, backward + optimizer 1.250× to 2.500×",
          "Compiling takes 20.0 s (large fp32, context 256, train, repaid after 667 steps) to 20.0 s (small fp32, "
          "context 256, train, repaid after 1,000 steps).", "compiled anew, without a cache"],
         ["Impossible", "Unsteady phases", "Was anything compiled?"]),
        ((row(False, 100), row(True, 125)),
         ["0.800×", "Compiling takes 20.0 s (small fp32, context 256, train, never repaid). Of 1 configurations 1 are"],
         []),
        ((row(False, 100), row(True, 125), row(False, 50, LARGE), row(True, 40, LARGE)),
         ["repaid after 2,000 steps)",  # 20,000 ÷ (50 - 40)
          "Of 2 configurations 1 are no faster for it."], []),
        ((row(True, 80),), ["Compiling takes 20.0 s (small fp32, context 256, train)."], []),  # against no eager row
        # the cheaper one, 10 s, saves 5 ms: 2,000 steps; the dearer one, 20 s, saves 20 ms: 1,000
        ((row(False, 100), row(True, 80), row(False, 55, LARGE), row(True, 50, LARGE, first_step_ms=10_050)),
         ["10.0 s (large fp32, context 256, train, repaid after 2,000 steps) to 20.0 s (small fp32"], []),
        ((row(False, 28), row(True, 15, times_ms=COOLING)),
         ["train, compiled, is slower than the last: 16.80 ms, then 14.60 ms"], []),
        ((row(False, 28), row(True, 15, times_ms=STEADY)), [], ["**Not warm yet**"]),
        ((row(False, 28), row(True, 15, times_ms=[30.0, 15.0])), [], ["**Not warm yet**"]),  # no third of two
        ((row(False, 28), row(True, 15, forward_cv=0.2, loss_cv=0.1)),
         ["**Unsteady phases**, CV above 10.0 %: forward of small fp32, context 256, train, compiled: 20.0 %"], []),
        ((row(False, 100), row(True, 100, first_step_ms=350)), ["Was anything compiled?"], []),  # 250 ms more
        ((row(False, 100), row(True, 100, first_step_ms=450)), [], ["Was anything compiled?"]),
        # memory is known even so
        ((row(False, 100), LOST), ["4.0 GiB | 8.0 GiB | eager ok, compiled oom |", "CUDA out of memory"], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[StepRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_parts_of_a_step() -> None:
    (pair,) = pairs_of([row(False, 100), row(True, 80, backward_ms=10, optimizer_ms=20)])
    assert pair.ms("backward + optimizer") == (60, 30)  # 0.4·100 + 0.2·100, 10 + 20
    assert pair.speed_up("backward + optimizer") == 2
    both = [row(False, 10, {"mode": "forward"}), row(True, 5, {"mode": "forward"})]
    (pair,) = pairs_of([replace(one, figures=replace(one.figures, backward=None)) for one in both])
    assert (pair.speed_up("forward"), pair.speed_up("backward + optimizer")) == (2, None)
    # a slow step or two lift the mean to 90, the median stays: 100 ÷ 80
    assert pairs_of([row(False, 100), row(True, 90, step_median_ms=80)])[0].speed_up("step") == 1.25


def test_a_changed_model_is_named_by_its_dimensions() -> None:
    (pair,) = pairs_of([row(False, 1, {"num_layers": 2})])
    assert pair.title == "d768-L2 fp32, context 256, train"
    assert pair.compile_s is None


def test_classes_of_real_captures(trace_pair: TracePair) -> None:
    changes = class_changes(trace_pair)
    assert [change.ms for change in changes] == sorted(change.ms for change in changes)
    assert changes[0].kernel_class == "elementwise"  # what torch.compile fuses
    assert changes[-1].kernel_class == "matmul"  # of twice the context here
    for capture, key in ((trace_pair.eager, "eager"), (trace_pair.compiled, "compiled")):
        phases = [capture.phase(name) for name in ("forward", "backward")]
        kernels = sum(phase.kernels_per_instance for phase in phases if phase)
        ms = sum(phase.kernel_time_ms.mean or 0 for phase in phases if phase)
        assert sum(getattr(change, f"{key}_launches") for change in changes) == pytest.approx(kernels)
        assert sum(getattr(change, f"{key}_ms") for change in changes) == pytest.approx(ms)
    (sentence,) = trace_answers([trace_pair], [], "kernel")
    kernels = "In the traces of x, kernels per step go from 1,948 to 657; in forward and backward less elementwise ("
    assert sentence.startswith(kernels)


def test_a_gpu_that_waits_gains_by_fewer_launches_too(trace_pair: TracePair) -> None:
    busy = [phase.gpu_busy_ms.median for phase in trace_pair.phase("step") or ()]
    assert busy[0]
    assert busy[1]
    name = "small fp32, context 256, train"
    traces = [replace(trace_pair, name=name)]

    def shared(eager_ms: float, compiled_ms: float) -> str:
        _, sentence = trace_answers(traces, pairs_of([row(False, eager_ms), row(True, compiled_ms)]), "kernel")
        return sentence.replace("\N{NO-BREAK SPACE}", " ")

    slow = shared(4 * max(busy), 3 * max(busy))
    assert f"busy for {busy[0] / (4 * max(busy)):.1%}".replace("%", " %") in slow
    assert "waits for the CPU (idle for 30.0 % or more)" in slow
    assert "waits for the CPU" not in shared(4 * max(busy), 1.2 * busy[1])  # 1 ÷ 1.2 = 83 % of the compiled step
    assert len(list(trace_answers(traces, pairs_of([row(False, 1)]), "kernel"))) == 1  # nothing to compare with


def test_captures_are_paired_by_what_was_run(example_captures: dict[str, CaptureSummary]) -> None:
    assert trace_pairs(tuple(example_captures.values())) == []  # no two of them differ in compile alone
    eager, compiled = (
        example_captures[name] for name in ("small_ctx256_train_fp32", "small_ctx512_train_fp32_compile")
    )
    alike = replace(compiled, configuration=eager.configuration)
    (pair,) = trace_pairs([alike, eager])
    assert (pair.name, pair.eager, pair.compiled) == ("small fp32, context 256, train", eager, alike)
    rows = (row(False, 100), row(True, 80))
    lost = CaptureSummary("small_ctx256_train_fp32", None, "capture.sqlite", "failed", "nsys crashed")
    table, classes = "| small fp32, context 256, train | step", "Classes in forward and backward of small fp32"
    failed = "| small_ctx256_train_fp32 | failed | nsys crashed |"
    check(page(BENCH, rows, captures=(eager, alike, lost)), [table, classes, failed])
    drawn = figures(BENCH, rows, captures=(eager, alike))
    assert list(drawn) == ["compile-speed-up-train", "compile-classes"]
    assert drawn["compile-speed-up-train"].series[2] == ("step", (1.25,))
