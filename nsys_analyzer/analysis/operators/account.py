"""Accounts for the length of a step: the attainable step, and the parts of the time above it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.chains import find_chains, fuse_chain
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import Reason, find_needed_calls
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools, Floats
from nsys_analyzer.trace.operator_calls import Signature
from nsys_analyzer.trace.schema import NS_PER_MS

#: The causes of an account's parts that are work of the GPU, in the order in which they are removed.
_GPU_PARTS = ("redundant", "unfused", "operators")


@dataclass(frozen=True)
class AccountPart:
    """A part of the time between the attainable step and the step.

    Attributes:
        cause: ``redundant`` (work that a step does not need), ``unfused`` (chains of operators that one kernel could
            do), ``operators`` (operators that take longer than their attainable time), ``unexplained``, or a cause of
            idle time such as ``launch``.
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
        reason: the reason for most of the excess, a ``Reason``; empty if it is unknown.
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
    reason: str
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
        attainable_ms: the length of the replayed step if redundant work is gone, one kernel does each chain of
            operators, each operator takes its attainable time, and launching and waiting cost no time, ms.
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
    fused_share: Floats,
    least_share: Floats,
    reasons: Mapping[Reason, Bools],
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
        fused_share: shape (operations of the study,), the share of each operation's work that remains after the chains
            of the findings are fused. The findings also know chains if the values of operators are unknown.
        least_share: the least share that remains after any change that a finding names, such as a lower precision. It
            is attainable even if the attainable time of the operator is longer.
        reasons: the calls whose time has each reason.
    """
    if operators.rates is None or not operators.is_priced.any():
        return None
    without_redundant, with_fused_chains, at_attainable_times = _find_remaining_shares(operators)
    with_fused_chains = np.minimum(with_fused_chains, fused_share)
    at_attainable_times = np.min([at_attainable_times, with_fused_chains, least_share], axis=0)
    shares = (without_redundant, with_fused_chains, at_attainable_times)

    def part_lengths_ns(steps: Replay) -> list[float]:
        """Returns the lengths of the parts in the order of ``_GPU_PARTS``, the CPU's time, the attainable step, ns."""
        with_cpu_ns, without_cpu_ns = (
            np.array([start.step_ns, *(start.scale_work(share).step_ns for share in shares)])
            for start in (steps, without_cpu_time(steps))
        )
        gpu_parts_ns = -np.diff(with_cpu_ns + without_cpu_ns) / 2
        cpu_ns = (with_cpu_ns - without_cpu_ns)[[0, -1]].mean()
        return [*gpu_parts_ns.tolist(), float(cpu_ns), float(without_cpu_ns[-1])]

    # The length without the profiler is estimated as the middle of the shortest and the longest baseline.
    by_length = sorted(baselines, key=lambda baseline: baseline.step_ns)
    bounds = by_length[:1] if by_length[0].step_ns == by_length[-1].step_ns else [by_length[0], by_length[-1]]
    lengths_ms = np.mean([part_lengths_ns(steps) for steps in bounds], axis=0) * scale / NS_PER_MS
    *gpu_parts_ms, cpu_ms, attainable_ms = lengths_ms.tolist()
    total_idle_ms = sum(idle_ms.values())
    parts = [AccountPart(cause, ms) for cause, ms in zip(_GPU_PARTS, gpu_parts_ms, strict=True)]
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
        operators=make_operator_rows(operators, reasons),
    )


def without_cpu_time(replay: Replay) -> Replay:
    """Returns the steps as if the CPU's work and its waits took no time, as in a CUDA graph of the whole step."""
    calls = len(replay.cpu_ns)
    return replace(replay, cpu_ns=np.zeros(calls), pause_ns=np.zeros(calls), awaited=np.full(calls, NONE))


def _find_remaining_shares(operators: PricedOperators) -> tuple[Floats, Floats, Floats]:
    """Returns the share of each operation's work that remains after each part of ``_GPU_PARTS`` is removed.

    The shares have the shape (operations of the study,), and those of a part include the removal of earlier parts.
    """
    needed, attainable = find_needed_calls(operators), find_remaining_shares(operators)
    fused = np.ones(len(needed))
    for chain in find_chains(operators, needed) if operators.calls.reads else ():
        kernel, total_ns = fuse_chain(operators, chain), operators.measured_ns[chain].sum()
        fused[chain] = (kernel.least_ns + kernel.most_ns) / 2 / total_ns
        attainable[chain] = kernel.attainable_ns / total_ns
    is_redundant = ~needed & (operators.measured_ns > 0)
    shares = (np.where(is_redundant, 0.0, share) for share in (1.0, fused, attainable))
    without_redundant, with_fused_chains, at_attainable_times = map(operators.spread, shares)
    return without_redundant, with_fused_chains, at_attainable_times


def find_remaining_shares(operators: PricedOperators) -> Floats:
    """Returns the share of the measured time of each call that its attainable time is; 1 if it is unknown."""
    measured_ns = np.maximum(operators.measured_ns, 1.0)
    shares: Floats = np.clip(np.nan_to_num(operators.attainable_ns / measured_ns, nan=1.0), 0.0, 1.0)
    return shares


def has_name(operator: str, name: str) -> bool:
    """Returns whether an operator has a name, which may lack the namespace: ``aten::mm`` or ``mm``."""
    return name in (operator, operator.rpartition("::")[2])


#: The number of a layer in the path of a module, such as ``GPT/h.0.attn: Attention``.
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def make_operator_rows(operators: PricedOperators, reasons: Mapping[Reason, Bools]) -> tuple[OperatorRow, ...]:
    """Returns a row for each operator with work, the largest excess first. Layers of one kind share rows."""
    calls, rows = operators.calls, []
    reason_of_call = {
        index: reason for reason, members in reasons.items() for index in np.flatnonzero(members).tolist()
    }
    modules = [LAYER_NUMBER.sub("*", module) for module in calls.modules]
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
                reason=reason_of_call.get(index, ""),
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

    A text that differs among the rows of a key becomes empty, except for the reason, which is that of the largest part
    of the excess. An operator without an attainable time counts with its
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
        excess_ms = defaultdict[str, float](float)
        for row in same:
            excess_ms[row.reason] += row.excess_ms
        is_priced = any(row.attainable_ms is not None for row in same)
        attainable_ms = sum(row.ms if row.attainable_ms is None else row.attainable_ms for row in same)
        costs = [(row.flops, row.bytes) for row in same if row.flops is not None and row.bytes is not None]
        flops, count = (sum(column) for column in zip(*costs, strict=True)) if len(costs) == len(same) else (None, None)
        folded.append(
            OperatorRow(
                **texts,
                reason=max(excess_ms, key=lambda reason: excess_ms[reason]),
                calls=sum(row.calls for row in same),
                ms=sum(row.ms for row in same),
                attainable_ms=attainable_ms if is_priced else None,
                excess_ms=sum(excess_ms.values()),
                flops=flops,
                bytes=count,
            )
        )
    return tuple(sorted(folded, key=lambda row: (-row.excess_ms, -row.ms)))


#: PyTorch's data types as reports write them.
_SHORT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def describe_shapes(signature: Signature) -> str:
    """Returns the shapes of an operator's tensors, and the first one's type: ``8192×1024 · 1024×4096 bf16``."""
    tensors = Call(signature).tensors()
    shapes = ["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]
    dtype = _SHORT_TYPES.get(tensors[0].dtype, tensors[0].dtype) if tensors else ""
    return f"{' · '.join(shapes)} {dtype}".strip()


def _text(texts: Sequence[str], index: int) -> str:
    return texts[index] if index >= 0 else ""
