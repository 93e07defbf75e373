"""Accounts for the length of a step: the attainable step, and the parts of the time above it."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Floats
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from nsys_analyzer.trace.schema import NS_PER_MS


@dataclass(frozen=True)
class AccountPart:
    """A part of the time between the attainable step and the step.

    Attributes:
        cause: ``operators`` (operators that take longer than their attainable time), ``redundant`` (work that a step
            does not need), ``unexplained``, or a cause of idle time such as ``launch``.
        ms: the time per step, ms.
    """

    cause: str
    ms: float


@dataclass(frozen=True)
class OperatorRow:
    """The calls of one operator with one signature, in one phase and at one line, per step.

    Attributes:
        operator: the name of the operator, such as ``aten::mm``.
        shapes: the shapes of its tensors, and the type of the first one, such as ``8192×1024 · 1024×4096 bf16``.
        phase: the phase that calls it.
        module: the module that calls it, with ``*`` for the numbers of layers; empty if it is unknown.
        line: the line of the program that calls it; empty if it is unknown.
        limit: what limits an operator that takes its attainable time, ``FLOPs`` or ``memory``; empty if unknown.
        calls: the number of calls.
        ms: the measured kernel time, ms.
        attainable_ms: the attainable time, ms; None if it is unknown.
        excess_ms: the measured time above the attainable time, ms.
        flops: the FLOPs; None if they are unknown.
        bytes: the bytes that are read and written at least; None if they are unknown.
    """

    operator: str
    shapes: str
    phase: str
    module: str
    line: str
    limit: str
    calls: int
    ms: float
    attainable_ms: float | None
    excess_ms: float
    flops: float | None
    bytes: float | None


@dataclass(frozen=True)
class StepAccount:
    """The account of a step without the profiler. The attainable step and the parts add up to the step.

    Attributes:
        step_ms: the length of a step, ms.
        attainable_ms: the length of the replayed step if each operator takes its attainable time, redundant work is
            gone, and launching and waiting cost no time, ms.
        parts: what lies between both, the longest part first. A part is negative only if it is ``unexplained``.
        expected_share: the share of the kernel time whose operators have an attainable time.
        measured_on: the GPU on which the attainable rates were measured.
        is_scaled: whether the rates were scaled from that GPU by data sheets.
        operators: the operators, those with the largest excess first.
        operators_left_out: the number of operators that JSON leaves out, which are those with the shortest times.
    """

    step_ms: float
    attainable_ms: float
    parts: tuple[AccountPart, ...]
    expected_share: float
    measured_on: str
    is_scaled: bool
    operators: tuple[OperatorRow, ...]
    operators_left_out: int = 0

    def with_longest(self, count: int) -> StepAccount:
        """Returns the account with at most ``count`` operators: those that take longest, in the same order.

        They include the operators with the largest excess, because an excess is a part of the time.
        """
        longest = sorted(range(len(self.operators)), key=lambda index: -self.operators[index].ms)[:count]
        rows = tuple(self.operators[index] for index in sorted(longest))
        left_out = self.operators_left_out + len(self.operators) - len(rows)
        return replace(self, operators=rows, operators_left_out=left_out)


def make_account(
    operators: PricedOperators,
    baselines: Sequence[Replay],
    scale: float,
    step_ms: float,
    idle_ms: Mapping[str, float],
) -> StepAccount | None:
    """Makes the account of a step; None if no operator has an attainable time.

    The GPU's work and the CPU's time hide each other, so the saving of a change depends on the changes before it. Each
    part is the mean of two orders: the GPU's parts first, and the CPU's time first.

    Args:
        operators: the operators with their times.
        baselines: replays of the steps without the profiler.
        scale: the ratio of the length of a step to the length of a replayed step.
        step_ms: the length of a step without the profiler, ms.
        idle_ms: the idle time of the GPU by cause, ms, by which the saving of the CPU's time is divided.
    """
    if operators.rates is None or not operators.is_priced.any():
        return None
    remaining = find_remaining_shares(operators)
    redundant = np.any([calls for kind, calls in operators.redundant.items() if kind != "monitoring"], axis=0)

    def without_redundant(steps: Replay) -> Replay:
        """Returns the steps without the work that they do not need."""
        return steps.scale_work(np.where(operators.operations_of(redundant), 0.0, 1.0))

    def at_attainable_times(steps: Replay) -> Replay:
        """Returns the steps with the attainable time of each operator."""
        return steps.scale_work(operators.spread(remaining))

    def part_lengths_ns(steps: Replay) -> list[float]:
        """Returns the redundant work, the excess of operators, the CPU's time and the attainable step, ns."""
        gpu_first = _differences(steps, (without_redundant, at_attainable_times, without_cpu_time))
        cpu_first = _differences(steps, (without_cpu_time, without_redundant, at_attainable_times))
        pairs = zip(gpu_first, (cpu_first[1], cpu_first[2], cpu_first[0]), strict=True)
        parts_ns = [(first + second) / 2 for first, second in pairs]
        return [*parts_ns, steps.step_ns - sum(parts_ns)]

    # The length without the profiler is estimated as the middle of the shortest and the longest baseline.
    by_length = sorted(baselines, key=lambda baseline: baseline.step_ns)
    bounds = by_length[:1] if by_length[0].step_ns == by_length[-1].step_ns else [by_length[0], by_length[-1]]
    lengths_ms = np.mean([part_lengths_ns(steps) for steps in bounds], axis=0) * scale / NS_PER_MS
    redundant_ms, operators_ms, cpu_ms, attainable_ms = lengths_ms.tolist()
    total_idle_ms = sum(idle_ms.values())
    parts = [AccountPart("redundant", redundant_ms), AccountPart("operators", operators_ms)]
    parts += [AccountPart(cause, cpu_ms * ms / total_idle_ms) for cause, ms in idle_ms.items() if ms > 0]
    explained_ms = attainable_ms + sum(part.ms for part in parts)
    parts.append(AccountPart("unexplained", step_ms - explained_ms))
    measured_ns, is_priced = operators.measured_ns, operators.is_priced
    kernel_ns = operators.study.operations.exposed_ns.sum() / operators.study.steps
    return StepAccount(
        step_ms=step_ms,
        attainable_ms=attainable_ms,
        parts=tuple(sorted((part for part in parts if round(part.ms, 6)), key=lambda part: -part.ms)),
        expected_share=float(measured_ns[is_priced].sum() / kernel_ns) if kernel_ns else 0.0,
        measured_on=operators.rates.measured_on,
        is_scaled=operators.rates.is_scaled,
        operators=make_operator_rows(operators),
    )


def without_cpu_time(replay: Replay) -> Replay:
    """Returns the steps as if the CPU's work and its waits took no time, as in a CUDA graph of the whole step."""
    calls = len(replay.cpu_ns)
    return replace(replay, cpu_ns=np.zeros(calls), pause_ns=np.zeros(calls), awaited=np.full(calls, NONE))


def find_remaining_shares(operators: PricedOperators) -> Floats:
    """Returns the share of the measured time of each call that its attainable time is; 1 if it is unknown."""
    measured_ns = np.maximum(operators.measured_ns, 1.0)
    shares: Floats = np.clip(np.nan_to_num(operators.attainable_ns / measured_ns, nan=1.0), 0.0, 1.0)
    return shares


def _differences(replay: Replay, changes: Sequence[Callable[[Replay], Replay]]) -> list[float]:
    """Returns by how much each change shortens a step after the changes before it, ns."""
    lengths_ns = [replay.step_ns]
    for change in changes:
        replay = change(replay)
        lengths_ns.append(replay.step_ns)
    return [before - after for before, after in pairwise(lengths_ns)]


def has_name(operator: str, name: str) -> bool:
    """Returns whether an operator has a name, which may lack the namespace: ``aten::mm`` or ``mm``."""
    return name in (operator, operator.rpartition("::")[2])


#: The number of a layer in the path of a module, such as ``GPT/h.0.attn: Attention``.
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def make_operator_rows(operators: PricedOperators) -> tuple[OperatorRow, ...]:
    """Returns a row for each operator with work, the largest excess first. Layers of one kind share rows."""
    calls, rows = operators.calls, []
    modules = [_LAYER_NUMBER.sub("*", module) for module in calls.modules]
    shapes = [describe_shapes(signature) for signature in calls.signatures]
    limits = [
        operators.rates.find_limit(cost, signature) if operators.rates and cost else ""
        for cost, signature in zip(operators.costs, calls.signatures, strict=True)
    ]
    for index in np.flatnonzero(operators.measured_ns > 0).tolist():
        signature, attainable_ns = calls.signature[index], operators.attainable_ns[index]
        cost = operators.costs[signature]
        rows.append(
            OperatorRow(
                operator=calls.signatures[signature].name,
                shapes=shapes[signature],
                phase=_text(calls.phases, calls.phase[index]),
                module=_text(modules, calls.module[index]),
                line=_text(calls.lines, calls.line[index]),
                limit=limits[signature] if not np.isnan(attainable_ns) else "",
                calls=1,
                ms=float(operators.measured_ns[index]) / NS_PER_MS,
                attainable_ms=None if np.isnan(attainable_ns) else float(attainable_ns) / NS_PER_MS,
                excess_ms=float(operators.excess_ns[index]) / NS_PER_MS,
                flops=cost.flops if cost else None,
                bytes=cost.bytes if cost else None,
            )
        )
    return fold_rows(rows, lambda row: (row.operator, row.shapes, row.phase, row.module, row.line))


def fold_rows(rows: Iterable[OperatorRow], key: Callable[[OperatorRow], Hashable]) -> tuple[OperatorRow, ...]:
    """Adds up the rows with equal keys, and returns the sums, the largest excess first.

    A text that differs among the rows of a key becomes empty. An operator without an attainable time counts with its
    measured time, unless no operator of the key has an attainable time.
    """
    groups: dict[Hashable, list[OperatorRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    folded = []
    for same in groups.values():
        texts = {
            name: getattr(same[0], name) if len({getattr(row, name) for row in same}) == 1 else ""
            for name in ("operator", "shapes", "phase", "module", "line", "limit")
        }
        is_priced = any(row.attainable_ms is not None for row in same)
        attainable_ms = sum(row.ms if row.attainable_ms is None else row.attainable_ms for row in same)
        costs = [(row.flops, row.bytes) for row in same if row.flops is not None and row.bytes is not None]
        flops, count = (sum(column) for column in zip(*costs, strict=True)) if len(costs) == len(same) else (None, None)
        folded.append(
            OperatorRow(
                **texts,
                calls=sum(row.calls for row in same),
                ms=sum(row.ms for row in same),
                attainable_ms=attainable_ms if is_priced else None,
                excess_ms=sum(row.excess_ms for row in same),
                flops=flops,
                bytes=count,
            )
        )
    return tuple(sorted(folded, key=lambda row: (-row.excess_ms, -row.ms)))


#: PyTorch's data types as reports write them.
_SHORT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def describe_shapes(signature: Signature) -> str:
    """Returns the shapes of an operator's tensors, and the first one's type: ``8192×1024 · 1024×4096 bf16``."""
    tensors: list[Tensor] = []
    for argument in signature.inputs:
        tensors += [argument] if isinstance(argument, Tensor) else argument or ()
    shapes = ["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]
    dtype = _SHORT_TYPES.get(tensors[0].dtype, tensors[0].dtype) if tensors else ""
    return f"{' · '.join(shapes)} {dtype}".strip()


def _text(texts: Sequence[str], index: int) -> str:
    return texts[index] if index >= 0 else ""
