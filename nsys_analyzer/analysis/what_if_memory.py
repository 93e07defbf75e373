"""Answers what-if questions about memory: predicts the peak memory and the length of a step together.

The peak follows from the tensors that each call of an operator reads and writes (``operators.tensor_memory``), and the
length from the replayed steps. Each change has two variants, which save least and most time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings.finding import ReplayChange
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.checkpoints import CheckpointedModule, find_modules, order_accesses
from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators, price_operators
from nsys_analyzer.analysis.operators.tensor_memory import TENSOR_KINDS, OptimizerState, TensorMemory
from nsys_analyzer.analysis.steps.repeated_calls import Repetition, repeat_calls
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import Saving, replay_changes
from nsys_analyzer.errors import RECORD_COMMAND, RECORD_ON_GPU_COMMAND, CannotAnswerError, ConfigurationError
from nsys_analyzer.text import plain
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import DEVICE_TO_PINNED, FROM_HOST, INTO_HOST, PINNED_TO_DEVICE

OptimizerKind: TypeAlias = Literal["8bit", "offload"]
#: The bytes of an element of 8-bit state: one byte, and a scale in fp32 for each block of 256 elements.
_BYTES_PER_8BIT_ELEMENT = 1 + 4 / 256
#: The assumed bandwidth of the link between CPU and GPU if no large copy was recorded: PCIe 4.0 and 5.0 with 16 lanes.
_ASSUMED_LINK_BYTES_PER_NS = (20.0, 50.0)
#: A copy shows the bandwidth of the link if it has at least this size, bytes.
_LARGE_COPY_BYTES = 1 << 22
#: The most time that the CPU needs for a saved tensor of a checkpointed module, ns, in each of its two passes: PyTorch
#: calls hooks in Python. With this time, the interval of a Llama with twelve checkpointed blocks of 20 saved tensors
#: ends at 45.8 ms on an H100. Its measured step is 46.1 ms, and launching limits it.
_SAVED_TENSOR_CPU_NS = 30_000.0
#: Matches the number of a layer in the path of a module.
_NUMBER = re.compile(r"(?<=\.)\d+\b|^\d+\b")
_LARGEST_BATCH, _MOST_MICRO_BATCHES = 64.0, 64
#: The assumed relative error of the predicted peak, with and without a measured peak before the changes.
_PEAK_TOLERANCE, _UNMEASURED_PEAK_TOLERANCE = 0.02, 0.08


@dataclass(frozen=True)
class MemoryQuestion:
    """The changes of a question about memory.

    Attributes:
        checkpoint: patterns of the modules to checkpoint, such as ``h.*``.
        batch: the size of the batch, as a multiple of the recorded size.
        micro_batches: the number of micro-batches into which each step divides the batch.
        optimizer: what happens to the optimizer's state: it has 8 bits per element, or it is kept in the CPU's memory.
    """

    checkpoint: tuple[str, ...] = ()
    batch: float | None = None
    micro_batches: int | None = None
    optimizer: OptimizerKind | None = None


@dataclass(frozen=True)
class ChangedMemoryPart:
    """A part of the memory at its peak, and the size of the part before and after the changes."""

    part: str
    before_bytes: float
    after_bytes: float


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peak memory of tensors on the GPU before and after changes.

    Attributes:
        before_bytes: the peak before the changes: measured without the profiler, or else computed from the operators.
        is_measured: whether ``before_bytes`` was measured.
        after_bytes: the predicted peak after the changes.
        after_bytes_low, after_bytes_high: the interval of ``after_bytes``.
        before_at, after_at: the operator, the module and the phase at which memory is at its peaks.
        parts: what fills the memory at both peaks.
    """

    before_bytes: float
    is_measured: bool
    after_bytes: float
    after_bytes_low: float
    after_bytes_high: float
    before_at: str
    after_at: str
    parts: tuple[ChangedMemoryPart, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryWhatIf(Saving):
    """The answer to a question about memory: the length of a step as in ``Saving``, and the peak memory.

    Attributes:
        capture: the name of the capture.
        changes: the changes that the question asks for.
        memory: the peak memory.
        link_bytes_per_s: the bandwidths of the link between CPU and GPU that the prediction assumes; empty if it
            assumes none.
        is_link_measured: whether copies of the capture show these bandwidths.
    """

    capture: str
    changes: tuple[Fact, ...]
    memory: PeakMemory
    link_bytes_per_s: tuple[float, ...] = ()
    is_link_measured: bool = False


def answer_memory_question(captures: Sequence[CaptureSummary], question: MemoryQuestion) -> Iterator[MemoryWhatIf]:
    """Yields the answer for each capture.

    Raises:
        CannotAnswerError: the steps cannot be replayed, or the capture does not tell which tensors they use.
        ConfigurationError: the question is invalid, or the steps do not contain what it changes.
    """
    if question == MemoryQuestion():
        raise ConfigurationError("The question changes nothing", "Give modules, a batch or an optimizer")
    if question.batch is not None and not 1 / _LARGEST_BATCH <= question.batch <= _LARGEST_BATCH:
        hint = "2x is twice the recorded batch"
        raise ConfigurationError(f"The batch is from 1/{_LARGEST_BATCH:g} to {_LARGEST_BATCH:g} times as large", hint)
    if question.micro_batches is not None and not 2 <= question.micro_batches <= _MOST_MICRO_BATCHES:
        raise ConfigurationError(f"The number of micro-batches is from 2 to {_MOST_MICRO_BATCHES}")
    for capture in captures:
        diagnosis = capture.diagnosis
        if capture.study is None or not capture.step or not diagnosis or diagnosis.doubt:
            reason = plain(capture.findings_missing or "Its steps are unknown.", "`").removesuffix(".")
            hint = RECORD_ON_GPU_COMMAND if capture.on_cpu else RECORD_COMMAND
            raise CannotAnswerError(f"The steps of {capture.title} cannot be replayed. {reason}", hint)
        if capture.operators is None or not capture.operators.calls.reads:
            reason = "does not contain the step that shows which tensors each operator reads and writes"
            hint = f"{RECORD_COMMAND}, without --no-operators and with the capture's own .operators.gz beside it"
            raise CannotAnswerError(f"{capture.title} {reason}", hint)
        memory = TensorMemory(capture.operators.calls)
        if not memory.size_bytes:
            raise CannotAnswerError(f"The operators of {capture.title} use no memory of a GPU", RECORD_ON_GPU_COMMAND)
        yield _answer(capture, capture.study, memory, question)


def _answer(capture: CaptureSummary, study: Study, memory: TensorMemory, question: MemoryQuestion) -> MemoryWhatIf:
    """Answers a question for one capture."""
    assert capture.operators is not None
    assert capture.step is not None
    assert capture.diagnosis is not None
    modules = find_modules(memory, question.checkpoint) if question.checkpoint else []
    if question.checkpoint and not modules:
        paths = {_NUMBER.sub("*", path.partition(": ")[0].partition("/")[2]) for path in memory.calls.modules} - {""}
        message = f"No module {' or '.join(question.checkpoint)} saves values for a backward pass"
        raise ConfigurationError(message, f"The modules are: {', '.join(sorted(paths))}")
    state = memory.optimizer_state
    if question.optimizer and (state is None or not state.state_bytes):
        raise ConfigurationError("The steps contain no optimizer that keeps a state of its own")
    if question.micro_batches and not memory.calls.in_phase("backward").any():
        raise ConfigurationError("The steps contain no backward pass, so micro-batches would change nothing")
    batch = (question.batch or 1.0) / (question.micro_batches or 1)
    changed = _ChangedSteps(study, price_operators(study, capture.operators), memory, modules, question, batch)
    diagnosis, step = capture.diagnosis, capture.step
    replays = replay_changes(
        changed.study, [changed.changes], step.length_ms, step.total_ms - step.idle_ms,
        diagnosis.step_ms if diagnosis.is_timed else None, diagnosis.in_recorded_process,
    )  # fmt: skip
    saving = replays.saving
    return MemoryWhatIf(
        steps=step.instances,
        step_ms=saving.step_ms,
        saves_ms=saving.saves_ms,
        saves_ms_low=saving.saves_ms_low,
        saves_ms_high=saving.saves_ms_high,
        capture=capture.title,
        changes=tuple(_name_changes(question, modules)),
        memory=_predict_peak(capture, memory, modules, question, batch),
        link_bytes_per_s=tuple(1e9 * bandwidth for bandwidth in changed.link_bytes_per_ns),
        is_link_measured=changed.is_link_measured,
    )


def _name_changes(question: MemoryQuestion, modules: Sequence[CheckpointedModule]) -> Iterator[Fact]:
    """Yields the changes of a question."""
    if modules:
        paths = tuple(dict.fromkeys(module.path for module in modules))
        yield Fact("checkpointed", modules=len(paths), names=", ".join(question.checkpoint))
    if question.batch is not None:
        yield Fact("changed_batch", factor=question.batch)
    if question.micro_batches:
        yield Fact("micro_batches", count=question.micro_batches)
    if question.optimizer:
        yield Fact("other_optimizer", kind=question.optimizer)


def _predict_peak(
    capture: CaptureSummary, memory: TensorMemory, modules: Sequence[CheckpointedModule], question: MemoryQuestion,
    batch: float,
) -> PeakMemory:  # fmt: skip
    """Predicts the peak memory: the measured peak, and the difference between the peaks of the two orders of calls."""
    before = memory.find_peak(order_accesses(memory, ()))
    after = memory.find_peak(order_accesses(memory, modules, question.micro_batches or 1), batch)
    state, older_bytes = memory.optimizer_state, memory.older_bytes
    state_bytes = state.state_bytes if state else 0.0
    new_state_bytes = _count_new_state_bytes(state, question.optimizer) if state else 0.0
    measured_peak_bytes = capture.unprofiled.peak_memory_bytes if capture.unprofiled else None
    peak_bytes = measured_peak_bytes or before.bytes + older_bytes
    other_bytes = peak_bytes - before.bytes - older_bytes
    new_peak_bytes = peak_bytes + after.bytes - before.bytes + new_state_bytes - state_bytes
    tolerance = _PEAK_TOLERANCE if measured_peak_bytes else _UNMEASURED_PEAK_TOLERANCE
    # Tensors that only a variable of the program keeps may grow with the batch, or not.
    half_bytes = tolerance * new_peak_bytes + abs(other_bytes * (batch - 1))
    parts = [
        ChangedMemoryPart("weights and other older tensors", *(2 * [older_bytes - state_bytes])),
        ChangedMemoryPart("optimizer state", state_bytes, new_state_bytes),
        *(ChangedMemoryPart(kind, before.parts[kind], after.parts[kind]) for kind in TENSOR_KINDS),
        ChangedMemoryPart("not explained by operators", other_bytes, other_bytes),
    ]
    return PeakMemory(
        before_bytes=peak_bytes,
        is_measured=measured_peak_bytes is not None,
        after_bytes=new_peak_bytes,
        after_bytes_low=max(new_peak_bytes - half_bytes, 0.0),
        after_bytes_high=new_peak_bytes + half_bytes,
        before_at=_name_call(memory, before.call),
        after_at=_name_call(memory, after.call),
        parts=tuple(part for part in parts if part.before_bytes or part.after_bytes),
    )


def _name_call(memory: TensorMemory, index: int) -> str:
    """Returns the operator, the module and the phase of a call: ``aten::mm of h.0.up in backward``."""
    calls = memory.calls
    module = calls.modules[calls.module[index]].partition(": ")[0].partition("/")[2] if calls.module[index] >= 0 else ""
    operator = calls.signatures[calls.signature[index]].name
    return f"{operator}{' of ' if module else ''}{module} in {calls.phases[calls.phase[index]]}"


def _count_new_state_bytes(state: OptimizerState, optimizer: OptimizerKind | None) -> float:
    """Returns the size of the optimizer's state on the GPU. Offloaded state passes through it tensor by tensor."""
    if optimizer == "8bit":
        return min(state.state_bytes, _BYTES_PER_8BIT_ELEMENT * state.state_elements)
    return state.largest_state_bytes if optimizer == "offload" else state.state_bytes


class _ChangedSteps:
    """The studied steps with all changes of a question.

    Attributes:
        study: the steps with repetitions that take no time.
        changes: the changes of a replay of ``study`` that save least and most.
        link_bytes_per_ns: the slowest and the fastest assumed bandwidth of the link to the CPU; empty without copies.
        is_link_measured: whether copies of the capture show the bandwidth.
    """

    def __init__(
        self, study: Study, priced: PricedOperators, memory: TensorMemory, modules: Sequence[CheckpointedModule],
        question: MemoryQuestion, batch: float,
    ) -> None:  # fmt: skip
        self._priced, self._memory, self._question, self._batch = priced, memory, question, batch
        self._count = question.micro_batches or 1
        repetitions, self._is_needed, self._checkpoint_cpu_ns = _repeat_modules(study, priced, modules)
        self._checkpoints = repeat_calls(study, repetitions)
        call = priced.call[self._checkpoints.source_operation]
        self._micro_batches = repeat_calls(
            self._checkpoints.study, _repeat_micro_batches(self._checkpoints.study, call, memory, self._count)
        )
        self.study = self._micro_batches.study
        self._call = call[self._micro_batches.source_operation]
        self._checkpoints = self._checkpoints.inside(self._micro_batches)
        self.link_bytes_per_ns: tuple[float, ...] = ()
        self.is_link_measured = False
        if question.optimizer == "offload":
            self.link_bytes_per_ns, self.is_link_measured = _find_link(study)
        self.changes = (self._make_change(saves_most=False), self._make_change(saves_most=True))

    def _make_change(self, *, saves_most: bool) -> ReplayChange:
        """Returns the change of a replay."""
        is_needed = np.append(self._is_needed, False)[self._checkpoints.repetition]
        call_share = (is_needed | (not saves_most)).astype(np.float64)
        operation_share = call_share[self.study.replay.launch]
        factors = self._scale_operations(saves_most=saves_most)
        is_optimizer = np.append(self._memory.calls.in_phase("optimizer"), False)[self._call]

        def change(replay: Replay) -> Replay:
            """Returns the steps with the changes."""
            replay = self._checkpoints.run(replay, call_share, operation_share)
            full_shares = np.ones(len(self.study.calls)), np.ones(len(self.study.operations))
            replay = self._micro_batches.run(replay, *full_shares).scale_work(factors)
            if not saves_most:
                starts = np.flatnonzero(np.diff(self._checkpoints.repetition, prepend=NONE) > 0)
                added_ns = self._checkpoint_cpu_ns[self._checkpoints.repetition[starts]]
                cpu_ns = replay.cpu_ns.copy()
                np.add.at(cpu_ns, starts, added_ns)
                np.add.at(cpu_ns, self._checkpoints.original_call[starts], added_ns)
                replay = replace(replay, cpu_ns=cpu_ns)
            replay = self._scale_loading(replay, saves_most=saves_most)
            return self._change_optimizer(replay, is_optimizer, saves_most=saves_most)

        return change

    def _scale_operations(self, *, saves_most: bool) -> Floats:
        """Returns the factor of the duration of each operation: that of a larger or smaller batch.

        Operations get as much longer as their attainable times do, which contain the shortest time of a kernel, or as
        the batch does. Work without a known operator changes as the batch does, or not at all.
        """
        calls, operations, batch = self._memory.calls, self.study.operations, self._batch
        bounds = np.ones((2, len(calls) + 1))  # the last entry is for operations of unknown calls
        ratio_of_signature = [self._find_attainable_ratio(code) for code in range(len(calls.signatures))]
        bounds[0, :-1] = np.where(self._memory.call_grows, np.array(ratio_of_signature)[calls.signature], 1.0)
        bounds[1, :-1] = np.where(self._memory.call_grows, batch, 1.0)
        factors = bounds[:, self._call]
        is_unknown = (self._call == NONE) & self.study.in_phase("forward", "loss", "backward")
        is_unknown |= np.isin(operations.copy, (*FROM_HOST, *INTO_HOST))
        factors[1, is_unknown] = batch
        factor: Floats = factors.min(axis=0) if saves_most else factors.max(axis=0)
        return factor

    def _find_attainable_ratio(self, code: int) -> float:
        """Returns the factor by which an operator's attainable time changes, or else that of the batch."""
        cost, signature = self._priced.costs[code], self._memory.calls.signatures[code]
        tensors = [tensor for tensor in Call(signature).all_tensors() if tensor.dtype]
        if cost is None or self._priced.rates is None or not tensors:
            return self._batch
        count_bytes = Call(signature).count_bytes
        growing = [tensor for tensor in tensors if tensor.shape not in self._memory.parameter_shapes]
        share = count_bytes(growing) / max(count_bytes(tensors), 1.0)
        scaled = cost._replace(flops=cost.flops * self._batch, bytes=cost.bytes * (1 + share * (self._batch - 1)))
        before_ns, after_ns = (self._priced.rates.time_ns(x, signature) for x in (cost, scaled))
        return after_ns / before_ns if before_ns > 0 and after_ns > 0 else self._batch

    def _scale_loading(self, replay: Replay, *, saves_most: bool) -> Replay:
        """Returns the steps in which loading a batch takes longer or shorter, or as long as before."""
        added_share = (self._question.batch or 1.0) - 1
        if (added_share > 0) == saves_most:
            return replay
        loading_ns = np.minimum(self.study.calls.loading_ns, replay.pause_ns) * added_share
        return replace(replay, cpu_ns=replay.cpu_ns + loading_ns, pause_ns=replay.pause_ns + loading_ns)

    def _change_optimizer(self, replay: Replay, is_optimizer: Bools, *, saves_most: bool) -> Replay:
        """Returns the steps with the work that the optimizer gets or loses, and the sums of the micro-batches.

        8-bit state is read and written in proportion to its bytes, by a kernel for each parameter; or nothing becomes
        faster. Offloaded state is copied to the GPU and back, in both directions at once or one after the other.
        """
        state, work_ns, cpu_ns, launches = self._memory.optimizer_state, replay.work_ns, replay.cpu_ns, 0
        if state is None or not is_optimizer.any():
            return replay
        added_ns = 0.0
        if self._question.optimizer == "8bit":
            launches += state.parameter_tensors
            other_bytes = 2 * state.parameter_bytes + state.gradient_bytes
            new_bytes = other_bytes + 2 * _count_new_state_bytes(state, "8bit")
            share = new_bytes / (other_bytes + 2 * state.state_bytes) if saves_most else 1.0
            work_ns = np.where(is_optimizer, work_ns * share, work_ns)
        elif self._question.optimizer == "offload":
            slowest, fastest = min(self.link_bytes_per_ns), max(self.link_bytes_per_ns)
            added_ns += state.state_bytes / fastest if saves_most else 2 * state.state_bytes / slowest
        if self._count > 1:
            launches += (self._count - 1) * state.parameter_tensors
            rates, traffic = self._priced.rates, 3 * state.gradient_bytes
            sum_ns = rates.time_ns(Cost("elementwise", "", 0.0, traffic)) if rates else 0.0
            added_ns += (self._count - 1) * sum_ns
        index = np.flatnonzero(is_optimizer)
        step = np.searchsorted(replay.first_call, replay.launch[index], side="right")
        first = index[np.unique(step, return_index=True)[1]]
        work_ns, cpu_ns = work_ns.copy(), cpu_ns.copy()
        work_ns[first] += added_ns
        cpu_ns[replay.launch[first]] += 0.0 if saves_most else launches * replay.median_launch_ns
        return replace(replay, work_ns=work_ns, cpu_ns=cpu_ns)


def _repeat_modules(
    study: Study, priced: PricedOperators, modules: Sequence[CheckpointedModule]
) -> tuple[list[Repetition], Bools, Floats]:
    """Returns the repetitions of the modules' forward passes in each step, which are needed, and the CPU's time.

    PyTorch stops a repetition at the last value that the backward pass reads. The rest is a repetition of its own.
    """
    repetitions, is_needed, cpu_ns = list[Repetition](), list[bool](), list[float]()
    launch = study.replay.launch
    step = np.searchsorted(study.replay.first_call, launch, side="right") - 1
    calls = len(priced.calls)
    for module in modules:
        groups = module.forward[: module.needed], module.forward[module.needed :], module.backward
        needed, unneeded, backward = (np.isin(priced.call, group) & (priced.call < calls) for group in groups)
        for number in range(study.steps):
            in_step = step == number
            if not (needed & in_step).any() or not (backward & in_step).any():
                continue
            first, end = (int(bound) for bound in (launch[needed & in_step].min(), launch[needed & in_step].max() + 1))
            before = int(launch[backward & in_step].min())
            repetitions.append(Repetition(first, end, before))
            is_needed.append(True)
            cpu_ns.append(module.saved_tensors * _SAVED_TENSOR_CPU_NS)
            if (unneeded & in_step).any():
                repetitions.append(Repetition(end, int(launch[unneeded & in_step].max()) + 1, before))
                is_needed.append(False)
                cpu_ns.append(0.0)
    return repetitions, np.array(is_needed, np.bool_), np.array(cpu_ns)


def _repeat_micro_batches(study: Study, call: Ints, memory: TensorMemory, count: int) -> Iterator[Repetition]:
    """Yields the repetitions of each step's work from the forward pass to the optimizer, for all further micro-batches.

    Args:
        study: the steps.
        call: shape (operations,), the call of an operator that launched each operation.
        memory: the memory of the step's tensors.
        count: the number of micro-batches.
    """
    forward, optimizer = (np.flatnonzero(memory.calls.in_phase(name)) for name in ("forward", "optimizer"))
    if count < 2 or not len(forward):
        return
    end_of_pass = optimizer[0] if len(optimizer) else len(memory.calls)
    is_inside = (call >= forward[0]) & (call < end_of_pass)
    for first, end in pairwise(study.replay.first_call.tolist()):
        launches = study.replay.launch[is_inside & (study.replay.launch >= first) & (study.replay.launch < end)]
        if len(launches):
            begin, after = int(launches.min()), int(launches.max()) + 1
            yield from [Repetition(begin, after, after)] * (count - 1)


def _find_link(study: Study) -> tuple[tuple[float, float], bool]:
    """Returns the slowest and the fastest bandwidth between CPU and GPU, bytes/ns, and whether copies show them."""
    operations = study.operations
    is_copy = np.isin(operations.copy, (PINNED_TO_DEVICE, DEVICE_TO_PINNED)) & (operations.size >= _LARGE_COPY_BYTES)
    rates = operations.size[is_copy] / np.maximum(operations.duration_ns[is_copy], 1)
    if not len(rates):
        return _ASSUMED_LINK_BYTES_PER_NS, False
    return (float(np.quantile(rates, 0.1)), float(rates.max())), True
