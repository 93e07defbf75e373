"""Estimates the cost of an operator: the arithmetic and the memory traffic that its shapes require at least."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.operators.data_rules import find_data_rule
from nsys_analyzer.analysis.operators.matmul_rules import count_scores, find_matmul_rule
from nsys_analyzer.analysis.operators.operands import Call, OperatorKind
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature

#: The class of kernels in counted FLOPs, by the kind of the operator.
_COUNTED_CLASSES = {"matmul": "matmul", "convolution": "convolution", "attention": "fused attention"}
#: FLOPs of a softmax for each attention score: maximum, difference, exponential, sum and quotient.
_SOFTMAX_FLOPS_PER_SCORE = 5
#: The share of the matmuls of an attention's backward pass that do not compute the scores again.
_GRADIENT_SHARE = 4 / 5


class Cost(NamedTuple):
    """The least work that an operator requires.

    Attributes:
        kind: the kind of the operator, which selects the attainable rates. A backward operator has the kind of its
            forward operator.
        precision: the precision of the operands, as in ``Peaks.flops_per_s`` (``bf16``); empty if it is unknown.
            Operands in float32 have ``fp32``, even if the kernel multiplies in TF32, which no argument shows.
        flops: the number of floating-point operations; 0 for an operator that only moves data.
        bytes: the sizes of the inputs that are read once, and of the outputs that are written once; 0 if the types
            of the operands of a matmul, a convolution or an attention are unknown.
    """

    kind: OperatorKind
    precision: str
    flops: float
    bytes: float


def estimate_cost(signature: Signature, *, on_cpu: bool = False) -> Cost | None:
    """Returns the cost of an operator, or None if no formula fits its name and its arguments.

    Copies between the CPU and the GPU, and operators on the CPU, have no cost, unless ``on_cpu`` is true. An operator
    that only moves data has no cost if a type is unknown.
    """
    call = Call(signature)
    if not on_cpu and any(tensor.device == "cpu" and tensor.shape for tensor in call.all_tensors()):
        return None
    matmul_rule = find_matmul_rule(signature)
    rule = matmul_rule or find_data_rule(signature)
    if rule is None:
        return None
    try:
        flops = rule.flops(call)
        has_types = matmul_rule is None or all(tensor.dtype for tensor in call.tensors())
        transferred_bytes = rule.read(call) + rule.written(call) if has_types else 0.0
    except (LookupError, TypeError, ValueError, ZeroDivisionError):  # a formula does not fit the arguments of the call
        return None
    return Cost(rule.kind, call.find_precision(), float(flops), float(transferred_bytes))


def add_uncounted_flops(counted: CountedFlops, calls: OperatorCalls) -> CountedFlops:
    """Returns counted FLOPs with those of the operators for which PyTorch has no formula, or one that fails.

    Args:
        counted: the FLOPs that the hooks counted in one step.
        calls: the calls of operators in a step with the same work.
    """
    unknown = {text.partition(" ")[0].replace(".", "::", 1): text for text in counted.unknown}
    classes, modules = deepcopy((counted.classes, counted.modules))
    softmax, attention_matmul, counted_names = counted.softmax, counted.attention_matmul, set()
    for number, signature in enumerate(calls.signatures):
        work = _count_model_work(signature) if signature.name in unknown else None
        if work is None:
            continue
        kernel_class, flops, scores = work
        for index in np.flatnonzero(calls.signature == number).tolist():
            phase = calls.phases[calls.phase[index]]
            module = calls.modules[calls.module[index]] if calls.module[index] >= 0 else ""
            if module not in counted.modules_of_unknown.get(unknown[signature.name], [module]):
                continue
            counted_names.add(signature.name)
            for sums, key in ((classes.setdefault(phase, {}), kernel_class), (modules.setdefault(module, {}), phase)):
                sums[key] = sums.get(key, 0.0) + flops
            if scores and phase == "forward":
                attention_matmul += flops
                softmax += _SOFTMAX_FLOPS_PER_SCORE * scores
    return replace(
        counted,
        classes=classes,
        modules=modules,
        softmax=softmax,
        attention_matmul=attention_matmul,
        unknown=[text for name, text in unknown.items() if name not in counted_names],
    )


def _count_model_work(signature: Signature) -> tuple[str, float, float] | None:
    """Returns the kernel class of an operator, its FLOPs, and the number of scores of an attention.

    As in PyTorch's formulas, attention has all scores, also those that a mask hides. The scores that a backward pass
    computes again do not count. The result is None without a formula.
    """
    rule = find_matmul_rule(signature)
    is_attention = rule is not None and rule.kind == "attention"
    if is_attention:  # without its arguments, such as is_causal, it has all scores
        signature = signature._replace(arguments=("",) * len(signature.arguments))
    cost = estimate_cost(signature, on_cpu=True)
    if cost is None or cost.kind not in _COUNTED_CLASSES:
        return None
    share = _GRADIENT_SHARE if is_attention and "backward" in signature.name else 1.0
    return _COUNTED_CLASSES[cost.kind], share * cost.flops, count_scores(Call(signature)) if is_attention else 0.0
