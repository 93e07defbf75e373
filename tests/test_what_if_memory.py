"""``nsys-analyze what-if --checkpoint``, ``--batch``, ``--micro-batches``, ``--optimizer``: peak memory and time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import render
from nsys_analyzer.analysis.operators.checkpoints import find_modules, order_accesses
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.operators.tensor_memory import TensorMemory
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.complete import diagnose_capture
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.what_if_memory import MemoryQuestion, MemoryWhatIf, answer_memory_question
from nsys_analyzer.errors import CannotAnswerError, ConfigurationError
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.sections.what_if_memory import memory_what_if_section
from nsys_analyzer.trace.operator_calls import read_operator_calls
from tests.conftest import Main
from tests.support.operator_calls import OperatorSteps, tensor
from tests.support.packed import unpack

MIB = 1 << 20
DATA = Path(__file__).parent / "data" / "operators"
#: The tensors of a block in bf16, MiB: 1 at its ends, 4 in its middle, and 0.5 for each of its two weights.
END, MIDDLE, UP, DOWN = tensor(2048, 256), tensor(2048, 1024), tensor(256, 1024), tensor(1024, 256)


def two_blocks() -> OperatorSteps:
    """A step of two blocks up, relu, down, without a loss: 17 kernels of 100 µs each, and 10 µs of the CPU for each.

    The values 0 to 4 are the batch and the weights, and 30 to 37 are the state of the optimizer.
    """
    steps = OperatorSteps()
    for module, x, up, down, a in (("Net/h.0: Block", 0, 1, 2, 10), ("Net/h.1: Block", 12, 3, 4, 13)):
        steps.call("mm", END, UP, out=[MIDDLE], reads=[x, up], writes=[a], module=module)
        steps.call("relu", MIDDLE, out=[MIDDLE], reads=[a], writes=[a + 1], module=module)
        steps.call("mm", MIDDLE, DOWN, out=[END], reads=[a + 1, down], writes=[a + 2], module=module)
    steps.call("ones_like", END, out=[END], reads=[15], writes=[16], phase="backward")
    for module, x, up, down, a, g in (("Net/h.1: Block", 12, 3, 4, 14, 16), ("Net/h.0: Block", 0, 1, 2, 11, 21)):
        steps.call("mm", MIDDLE, END, out=[DOWN], reads=[a, g], writes=[g + 1], module=module, phase="backward")
        steps.call("mm", END, DOWN, out=[MIDDLE], reads=[g, down], writes=[g + 2], module=module, phase="backward")
        steps.call(
            "threshold_backward", MIDDLE, MIDDLE, out=[MIDDLE], reads=[g + 2, a], writes=[g + 3], module=module,
            phase="backward",
        )  # fmt: skip
        steps.call("mm", END, MIDDLE, out=[UP], reads=[x, g + 3], writes=[g + 4], module=module, phase="backward")
        if x:
            steps.call("mm", MIDDLE, UP, out=[END], reads=[g + 3, up], writes=[g + 5], module=module, phase="backward")
    weights = (UP, DOWN, UP, DOWN)
    reads = [1, 2, 3, 4, 17, 20, 22, 25, *range(30, 38)]
    steps.call(
        "_fused_adamw_", weights, weights, weights, weights, reads=reads, writes=range(40, 56), phase="optimizer"
    )
    return steps


def capture_of(steps: OperatorSteps, peak_mib: float | None = 25) -> CaptureSummary:
    capture = steps.steps.capture(unprofiled_us=1700)
    assert capture.study
    operators = OperatorWork(steps.calls(lasting=[0, 1, 2, 3, 4]), np.tile(steps.launched_by, capture.study.steps))
    peak = int(peak_mib * MIB) if peak_mib else None
    unprofiled = Unprofiled("ok", phases={"step": Stats(n=1, mean=1.7)}, peak_memory_bytes=peak)
    capture = replace(capture, operators=operators, unprofiled=unprofiled)
    return replace(capture, diagnosis=diagnose_capture(capture))


def answer(question: MemoryQuestion, peak_mib: float | None = 25) -> MemoryWhatIf:
    (prediction,) = answer_memory_question([capture_of(two_blocks(), peak_mib)], question)
    return prediction


def said(prediction: MemoryWhatIf) -> str:
    text = render(Report("", (memory_what_if_section(prediction),)))
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


def parts(prediction: MemoryWhatIf) -> dict[str, tuple[float, float]]:
    return {part.part: (part.before_bytes / MIB, part.after_bytes / MIB) for part in prediction.memory.parts}


def test_the_peak_of_the_recorded_step() -> None:
    """In the relu's gradient of h.1: the middles of both blocks and the end of h.0 are saved, 4 + 4 + 1.

    The gradients of the relu's input and output, 4 + 4, and of one weight, 0.5, are in use: 17.5 MiB. The batch, the
    weights and the state are older: 1 + 4 · 0.5 + 8 · 0.5.
    """
    memory = TensorMemory(two_blocks().calls())
    peak = memory.find_peak(order_accesses(memory, ()))
    assert (peak.bytes / MIB, peak.call) == (17.5, 9)
    assert {kind: size / MIB for kind, size in peak.parts.items()} == {
        "saved for backward": 9, "gradients": 0.5, "temporaries": 8
    }  # fmt: skip
    assert memory.older_bytes / MIB == 7
    state = memory.optimizer_state
    assert state is not None
    assert (state.state_bytes / MIB, state.parameter_bytes / MIB, state.gradient_bytes / MIB) == (4, 2, 2)
    assert (state.parameter_tensors, state.largest_state_bytes / MIB) == (4, 0.5)


def test_checkpoints_trade_memory_for_a_second_forward_pass() -> None:
    """At the same place, only the end of h.0 and the repeated middle of h.1 are left of the saved values: 17.5 − 4.

    The repeated values are no longer saved, so they are temporaries there. The pass up and the relu of both blocks run
    again, 4 kernels of 100 µs, or also the pass down, 6 kernels.
    """
    prediction = answer(MemoryQuestion(checkpoint=("h.*",)))
    assert (prediction.memory.before_bytes / MIB, prediction.memory.after_bytes / MIB) == (25, 21)
    assert prediction.new_step_ms == pytest.approx(2.2)
    assert prediction.saves_ms_low <= -0.6
    assert prediction.saves_ms_high >= -0.4
    assert parts(prediction)["not explained by operators"] == (0.5, 0.5)
    assert prediction.memory.before_at == "aten::threshold_backward of h.1 in backward"
    assert "a step would take 2.2 ms instead of 1.7 ms" in said(prediction)
    assert "2 checkpointed modules (h.\\*)" in said(prediction)
    assert "would be 21.0 MiB instead of 25.0 MiB" in said(prediction)


def test_a_larger_batch_scales_activations_only() -> None:
    """(9 + 8) · 2 + 0.5 instead of 17.5 MiB. Each kernel but the optimizer's takes up to twice as long: 3.3 ms."""
    prediction = answer(MemoryQuestion(batch=2))
    assert (prediction.memory.after_bytes - prediction.memory.before_bytes) / MIB == 17
    # The 0.5 MiB that no operator explains may double. The tolerance is 2 % of the new peak.
    assert (prediction.memory.after_bytes_high - prediction.memory.after_bytes) / MIB == pytest.approx(0.5 + 0.02 * 42)
    assert parts(prediction)["gradients"] == (0.5, 0.5)
    assert prediction.saves_ms_low <= -1.6
    assert prediction.saves_ms_high > prediction.saves_ms_low


def test_micro_batches_keep_gradients_and_repeat_launches() -> None:
    """Half of 9 + 8 MiB, and all four gradients of the first micro-batch: 10.5 instead of 17.5 MiB."""
    prediction = answer(MemoryQuestion(micro_batches=2))
    assert (prediction.memory.after_bytes - prediction.memory.before_bytes) / MIB == -7
    assert parts(prediction)["gradients"] == (0.5, 2)
    # A kernel takes from half its time to all of its time, so a step takes from 1.7 ms and the sums to 3.3 ms and them.
    assert 1.7 < prediction.new_step_ms < 3.4
    assert prediction.saves_ms_high <= 0


@pytest.mark.parametrize(("kind", "saved_mib"), [("8bit", 4 - 2 * (1 + 4 / 256)), ("offload", 4 - 0.5)])
def test_another_optimizer_state(kind: str, saved_mib: float) -> None:
    """2 Mi elements of state, with a byte and 4/256 bytes for scales each; or only the largest tensor at a time."""
    prediction = answer(MemoryQuestion(optimizer=kind))  # type: ignore[arg-type]
    assert (prediction.memory.before_bytes - prediction.memory.after_bytes) / MIB == pytest.approx(saved_mib)
    if kind == "offload":
        # 4 MiB at 50 GB/s, and twice at 20 GB/s, 84 and 419 µs: no copy of the capture shows the link.
        middle_ms = (4 * MIB / 50 + 2 * 4 * MIB / 20) / 2 / 1e6
        assert prediction.saves_ms == pytest.approx(-middle_ms)
        assert "is assumed: from 20 GB/s to 50 GB/s" in said(prediction)
    else:
        # Reads and writes 2 · 2 + 2 + 2 · 2.03 instead of 2 · 2 + 2 + 2 · 4 MiB of 100 µs; or nothing is faster.
        assert prediction.saves_ms_high >= 0.1 * (1 - (6 + 2 * 2 * (1 + 4 / 256)) / 14)


def test_all_changes_together() -> None:
    """Two micro-batches of the recorded size, checkpointed: 13.5 MiB, and four gradients instead of one or three."""
    together = answer(MemoryQuestion(("h.*",), batch=2, micro_batches=2, optimizer="8bit"))
    without_state = answer(MemoryQuestion(("h.*",), batch=2, micro_batches=2))
    assert (without_state.memory.after_bytes - without_state.memory.before_bytes) / MIB == 13.5 - 0.5 + 2 - 17.5
    state_mib = (without_state.memory.after_bytes - together.memory.after_bytes) / MIB
    assert state_mib == pytest.approx(4 - 2 * (1 + 4 / 256))


def test_the_recorded_peak_is_the_sum_of_tensors_without_a_measured_one() -> None:
    prediction = answer(MemoryQuestion(batch=2), peak_mib=None)
    assert not prediction.memory.is_measured
    assert prediction.memory.before_bytes / MIB == 17.5 + 7
    assert "was not measured" in said(prediction)


def test_a_checkpointed_llama_has_the_memory_that_was_measured() -> None:
    """The same program with and without checkpoints had peaks of 3,365,249,536 and 7,951,995,392 bytes on an H100.

    The order of the calls with checkpoints is the recorded order of the other program.
    """
    control, recompute = (
        TensorMemory(read_operator_calls(DATA / f"{name}.operators.gz")[1]) for name in ("llama_control", "recompute")
    )
    modules = find_modules(control, ["blocks.*"])
    assert len(modules) == 12
    before, after = (control.find_peak(order_accesses(control, given)) for given in ([], modules))
    assert before.bytes - after.bytes == pytest.approx(7_951_995_392 - 3_365_249_536, rel=1e-3)
    recorded = recompute.find_peak(order_accesses(recompute, ()))
    assert after.bytes == pytest.approx(recorded.bytes, rel=1e-6)
    repeated = sum(module.needed for module in modules)
    assert repeated == int(recompute.calls.in_phase("recomputed").sum())
    # The older tensors and the step's own make up the measured peak.
    assert before.bytes + control.older_bytes == pytest.approx(7_951_995_392, rel=0.01)
    # What is already checkpointed saves nothing for backward.
    assert find_modules(recompute, ["blocks.*"]) == []


def test_memory_that_is_overwritten_in_place_is_not_allocated_again() -> None:
    """relu_ writes over its input of 4 MiB, and the sum in place over the older one of two values that are not read."""
    steps = OperatorSteps()
    steps.call("mm", END, UP, out=[MIDDLE], reads=[0, 1], writes=[2])
    steps.call("relu_", MIDDLE, out=[MIDDLE], reads=[2], writes=[3])
    steps.call("mul", MIDDLE, out=[MIDDLE], reads=[3], writes=[4])
    steps.call("add_", MIDDLE, MIDDLE, out=[MIDDLE], reads=[3, 4], writes=[5])
    memory = TensorMemory(steps.calls(lasting=[0, 1]))
    assert sorted(memory.size_bytes) == [2, 4]
    assert memory.find_peak(order_accesses(memory, ())).bytes / MIB == 8


def test_an_optimizer_of_single_operators_keeps_the_same_state() -> None:
    """A weight of 0.5 MiB with two states, and the square root of one of them, which is no gradient and no state."""
    steps = OperatorSteps()
    steps.call("mm", END, UP, out=[MIDDLE], reads=[0, 1], writes=[2])
    steps.call("mm", END, MIDDLE, out=[UP], reads=[0, 2], writes=[3], phase="backward")
    steps.call("lerp_", UP, UP, out=[UP], reads=[3, 4], writes=[5], phase="optimizer")
    steps.call("addcmul_", UP, UP, out=[UP], reads=[3, 6], writes=[7], phase="optimizer")
    steps.call("sqrt", UP, out=[UP], reads=[7], writes=[8], phase="optimizer")
    steps.call("addcdiv_", UP, UP, UP, out=[UP], reads=[1, 5, 8], writes=[9], phase="optimizer")
    state = TensorMemory(steps.calls(lasting=[0, 1, 4, 5, 6, 7, 9])).optimizer_state
    assert state is not None
    assert (state.state_bytes / MIB, state.parameter_bytes / MIB, state.gradient_bytes / MIB) == (1, 0.5, 0.5)
    assert state.parameter_tensors == 1


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (MemoryQuestion(), "changes nothing"),
        (MemoryQuestion(checkpoint=("layers.*",)), "No module layers.* saves values for a backward pass"),
        (MemoryQuestion(batch=0), "The batch is from 1/64 to 64 times as large"),
        (MemoryQuestion(micro_batches=1), "from 2 to 64"),
    ],
)
def test_impossible_questions(question: MemoryQuestion, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("*", r"\*")):
        answer(question)


def test_a_capture_without_operators_says_how_to_record_them() -> None:
    capture = replace(capture_of(two_blocks()), operators=None)
    with pytest.raises(CannotAnswerError, match="which tensors each operator reads and writes") as error:
        list(answer_memory_question([capture], MemoryQuestion(batch=2)))
    assert "nsys-analyze run" in str(error.value.hint)


def test_the_command(tmp_path: Path, run_main: Main) -> None:
    """The control program of a Llama; its manifest does not accompany it, so its peak was not measured."""
    for suffix in (".operators.gz", ".stacks.gz"):
        shutil.copy(DATA / f"llama_control{suffix}", tmp_path)
    path = unpack(DATA / "llama_control.sqlite.xz", tmp_path)
    (answer,) = json.loads(run_main("what-if", path, "--checkpoint", "blocks.*", "--format", "json").out)["what_if"]
    assert answer["memory"]["is_measured"] is False
    assert answer["memory"]["before_bytes"] - answer["memory"]["after_bytes"] == pytest.approx(4_586_745_984, rel=1e-3)
    assert answer["new_step_ms"] > answer["step_ms"]
    assert answer["changes"] == ["12 checkpointed modules (blocks.*)"]
    wrong = run_main("what-if", path, "--checkpoint", "layers.*")
    assert "The modules are: blocks.*, blocks.*.attn," in wrong.err
    refused = run_main("what-if", path, "--batch", "2x", "--launches", "0").err
    assert "without other changes" in refused
