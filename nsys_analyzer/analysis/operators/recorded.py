"""Finds the calls of operators whose shapes a profiler recorded, and the GPU operations that they launched.

The operator of a GPU operation is the innermost operator around its launch whose tensors were recorded. Ranges of
autograd's nodes are not operators. If one of PyTorch's own operators launches operations itself, the operators that it
calls are a part of it: ``nll_loss_backward`` first calls ``fill_``. For a node of a CUDA graph, the capture of the node
counts as its launch.

Where types or lists of tensors are missing, they are inferred. nsys records no types, and PyTorch's profiler records no
types of the tensors in lists. Such tensors have the type in the name of PyTorch's kernel that the operator launched;
else the type in which all matmuls of the capture multiply, by the names of their kernels. PyTorch's profiler does not
record lists of more than 30 tensors: the lists that an optimizer takes contain the tensors whose gradients the step
accumulates.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import MATMUL
from nsys_analyzer.analysis.kernels.classes import find_innermost_operators, find_precision
from nsys_analyzer.analysis.ranges.calls import AUTOGRAD_NODE, CallFinder, find_module_calls, find_parents
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Ints, distinct, mask_by_name
from nsys_analyzer.trace.columns import FROM_HOST, INTO_HOST, Operators, process_of
from nsys_analyzer.trace.kineto import is_operator
from nsys_analyzer.trace.operator_calls import (
    OperatorCalls,
    OperatorStep,
    Signature,
    Tensor,
    TensorArgument,
    name_operations,
)
from nsys_analyzer.trace.operator_shapes import LINEAR_LAYER, TYPES, parse_signature
from nsys_analyzer.trace.trace import ATEN_PREFIX

#: The data types of matrices by the precision that the names of matmul kernels show.
_TYPE_OF_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32", "fp64": "float64"}
#: The names of the kernels that torch.compile generates begin with this text.
_COMPILED_KERNEL_PREFIX = "triton_"
#: The namespace that these kernels get in the signatures of operators.
_COMPILED_NAMESPACE = "triton::"
#: Matches the first floating-point type among the template arguments of PyTorch's own kernels.
_KERNEL_TYPE = re.compile(r"\bat::native\b.*?[<(, ](float|double|c10::BFloat16|c10::Half)\b")
#: Matches the kernels that convert a tensor in float32 to 16 bits.
_NARROWING_COPY = re.compile(r"\b(b?float16)_copy_kernel")
#: Matches the kernels that convert a tensor of any type.
_CONVERTING_COPY = re.compile(r"direct_copy_kernel.*LoadWithCast")
#: Matches the node that accumulates the gradient of a parameter.
_ACCUMULATION = re.compile(r"(?:torch::autograd::)?AccumulateGrad")
#: Matches the collectives of programs in which a rank updates only a part of each parameter, or some parameters.
_SHARDING_COLLECTIVE = re.compile(r"c10d::.*(?:reduce_scatter|all_?gather|broadcast)")
#: The operators of fused optimizers, and how many of their first arguments are lists with a tensor for each parameter.
_OPTIMIZER_OPERATORS = {"aten::_fused_adamw_": 4, "aten::_fused_adam_": 4, "aten::_fused_adagrad_": 3}
_RECOMPUTED, _OTHER = "recomputed", "other"


def find_recorded_step(work: ProcessWork, windows: Windows) -> OperatorStep | None:
    """Returns the calls of operators in one of the given steps; None if the trace contains no shapes."""
    trace, attribution = work.attributed.trace, work.attributed.attribution
    operators = trace.operators
    has_shapes = mask_by_name(operators, lambda name: is_operator(name) or name.startswith(_COMPILED_KERNEL_PREFIX))
    has_shapes &= operators.arguments != NONE
    if not has_shapes.any() or not work.devices:
        return None
    operations = _find_typical_step(work, windows)
    operator = find_innermost_operators(trace, attribution, operations, np.flatnonzero(has_shapes))
    operator = _include_inner_operators(operators, operator)
    operator[np.isin(trace.operations.copy[operations], (*FROM_HOST, *INTO_HOST))] = NONE  # they have no expectation
    # The range of a linear layer may also contain collectives and conversions.
    of_layer = np.append(mask_by_name(operators, LINEAR_LAYER.__eq__), False)[operator]
    kernels = work.attributed.kernels
    is_matmul = np.array([*(name == MATMUL for name in kernels.classes), False])[kernels.code[operations]]
    operator[of_layer & ~is_matmul] = NONE
    called = distinct(operator[operator != NONE])
    called = called[np.argsort(operators.start[called], kind="stable")]
    call_of_operator = np.full(len(operators) + 1, NONE)
    call_of_operator[called] = np.arange(len(called))
    call = call_of_operator[operator]
    calls = _describe_calls(work, called, operations, call)
    return OperatorStep(calls, name_operations(trace, operations), call)


def _include_inner_operators(operators: Operators, operator: Ints) -> Ints:
    """Returns the operators of operations, with an operator around them in place of the operators that it calls.

    Args:
        operators: the operators of the trace.
        operator: shape (operations,), the innermost operator around the launch of each operation, or -1.
    """
    called = distinct(np.sort(operator[operator != NONE]))
    called = called[np.lexsort((-operators.end[called], operators.start[called]))]  # outer operators come first
    thread, start, end = (column[called] for column in (operators.thread, operators.start, operators.end))
    outermost = np.append(np.arange(len(operators)), NONE)
    for inner, parent in zip(called.tolist(), find_parents(thread, start, end).tolist(), strict=True):
        if parent >= 0 and operators.names[operators.name[called[parent]]].startswith(ATEN_PREFIX):
            outermost[inner] = outermost[called[parent]]
    result: Ints = outermost[operator]
    return result


def _find_typical_step(work: ProcessWork, windows: Windows) -> Ints:
    """Returns the operations of the step with the median number of operations, in the order of their launches."""
    of_process = np.concatenate([*work.devices.values()])
    step = windows.step_at(work.launched_at[of_process])
    counts = np.bincount(step[step != NONE], minlength=len(windows))
    typical = int(np.argsort(counts, kind="stable")[(len(counts) - 1) // 2])
    operations = of_process[step == typical]
    start = work.attributed.trace.operations.start[operations]
    ordered: Ints = operations[np.lexsort((start, work.launched_at[operations]))]
    return ordered


def _describe_calls(work: ProcessWork, called: Ints, operations: Ints, call: Ints) -> OperatorCalls:
    """Returns the calls with their signatures, modules and phases.

    Args:
        work: the work of the process.
        called: shape (calls,), the index of the operator of each call.
        operations: the operations of the step in the order of their launches.
        call: shape (operations,), the call of each operation, or -1.
    """
    attributed = work.attributed
    trace, attribution, instances = attributed.trace, attributed.attribution, attributed.instances
    position = np.flatnonzero(call != NONE)
    first = operations[position[np.unique(call[position], return_index=True)[1]]]  # the first operation of each call
    instance = attributed.instances_of_operations[0][first]
    phases = (*instances.phases, _RECOMPUTED, _OTHER)
    phase = np.append(instances.phase, phases.index(_OTHER))[instance]
    is_node = mask_by_name(trace.operators, AUTOGRAD_NODE.fullmatch)
    makes_node = (trace.operators.sequence >= 0) & ~is_node
    keeps_graph, in_node = (
        find_innermost_operators(trace, attribution, first, np.flatnonzero(mask)) != NONE
        for mask in (makes_node, is_node)
    )
    phase[keeps_graph & in_node] = phases.index(_RECOMPUTED)
    number_in_step = np.zeros(len(called), np.int64)
    for code in distinct(np.sort(phase)).tolist():
        number_in_step[phase == code] = np.unique(instance[phase == code], return_inverse=True)[1] + 1
    module, modules = np.full(len(called), NONE), tuple[str, ...]()
    if module_calls := find_module_calls(attributed):
        module = np.append(module_calls.path, NONE)[CallFinder(attributed, module_calls).find_calls(first)]
        paths = (".".join(path).replace(".", "/", 1) for path in module_calls.paths)
        modules = tuple(": ".join(filter(None, pair)) for pair in zip(paths, module_calls.kinds, strict=True))
    kernels = trace.operations.name[operations[position]]
    shows_type = np.array([*(bool(find_kernel_types(name)) for name in trace.operations.names), False])[kernels]
    kernel = np.full(len(called), NONE)  # the first kernel of each call whose name shows a type
    kernel[call[position][shows_type][::-1]] = kernels[shows_type][::-1]
    signature, signatures = _make_signatures(work, called, kernel)
    return OperatorCalls(
        signature, module, np.full(len(called), NONE), phase, number_in_step, keeps_graph, signatures, modules,
        phases=phases,
    )  # fmt: skip


def _make_signatures(work: ProcessWork, called: Ints, kernel: Ints) -> tuple[Ints, tuple[Signature, ...]]:
    """Returns the index of the signature of each call, and the signatures.

    Args:
        work: the work of the process.
        called: shape (calls,), the index of the operator of each call.
        kernel: shape (calls,), the index of the name of the kernel that shows a type, or -1.
    """
    operators, kernel_names = work.attributed.trace.operators, (*work.attributed.trace.operations.names, "")
    texts = (*operators.argument_texts, "")  # index -1 selects the empty text
    columns = (operators.name[called], operators.arguments[called], kernel)
    keys = [*zip(*(column.tolist() for column in columns), strict=True)]
    common_type, signature_of_key = _find_common_type(work), {}
    for key in dict.fromkeys(keys):
        name, kernel_types = operators.names[key[0]], find_kernel_types(kernel_names[key[2]])
        signature = parse_signature(name, texts[key[1]])
        inputs = []
        for position, argument in enumerate(signature.inputs if signature else ()):
            kernel_type = kernel_types[min(position, len(kernel_types) - 1)] if kernel_types else ""
            inputs.append(_with_types(argument, kernel_type or common_type))
        name = f"{_COMPILED_NAMESPACE}{name}" if name.startswith(_COMPILED_KERNEL_PREFIX) else name
        signature_of_key[key] = Signature(name, tuple(inputs), None, signature.arguments if signature else ())
    index_of_signature = {signature: i for i, signature in enumerate(dict.fromkeys(signature_of_key.values()))}
    index = np.array([index_of_signature[signature_of_key[key]] for key in keys], np.int64)
    return index, tuple(_complete_lists(work, called, index, [*index_of_signature]))


@cache
def find_kernel_types(name: str) -> tuple[str, ...]:
    """Returns the types of an operator's tensors by the name of its kernel; empty if the name shows none.

    The last type is that of all further tensors. A kernel that converts has two types: that of the target comes first.
    The source's type is empty if the kernel reads any type.
    """
    if narrowing := _NARROWING_COPY.search(name):
        return narrowing[1], "float32"
    match = _KERNEL_TYPE.search(name)
    if not match:
        return ()
    return (TYPES[match[1]], "") if _CONVERTING_COPY.search(name) else (TYPES[match[1]],)


def _with_types(argument: TensorArgument, dtype: str) -> TensorArgument:
    """Returns an argument with a type for its tensors without one."""
    if argument is None or isinstance(argument, Tensor):
        return argument and argument._replace(dtype=argument.dtype or dtype)
    return tuple(tensor._replace(dtype=tensor.dtype or dtype) for tensor in argument)


def _find_common_type(work: ProcessWork) -> str:
    """Returns the type in which all matmuls of the trace multiply; empty if they have several types."""
    precisions = {find_precision(name) for name in work.attributed.trace.operations.names} - {None}
    return _TYPE_OF_PRECISION.get(str(precisions.pop()), "") if len(precisions) == 1 else ""


def _complete_lists(work: ProcessWork, called: Ints, index: Ints, signatures: list[Signature]) -> list[Signature]:
    """Returns the signatures with the tensors of the lists that were too long to be recorded.

    The lists of optimizers stay unknown if a rank updates only a part of the parameters, or if an operator is called
    for several groups of parameters.
    """
    operators, completed = work.attributed.trace.operators, [*signatures]
    if any(map(_SHARDING_COLLECTIVE.search, operators.names)):
        return completed
    for code in np.flatnonzero(np.bincount(index) == 1).tolist():
        signature = signatures[code]
        if () in signature.inputs and _takes_parameters(signature):
            parameters = _find_parameters(work, int(operators.start[called[index == code][0]]))
            count = _OPTIMIZER_OPERATORS.get(signature.name, len(signature.inputs))
            lists = (parameters if argument == () else argument for argument in signature.inputs[:count])
            completed[code] = signature._replace(inputs=(*lists, *signature.inputs[count:]))
    return completed


def _takes_parameters(signature: Signature) -> bool:
    """Returns whether the lists of an operator contain a tensor for each parameter, not the counters of their steps."""
    counts_steps = signature.name == "aten::_foreach_add_" and signature.arguments[1:2] == ("1",)
    return signature.name in _OPTIMIZER_OPERATORS or (signature.name.startswith("aten::_foreach_") and not counts_steps)


def _find_parameters(work: ProcessWork, time: int) -> tuple[Tensor, ...]:
    """Returns the tensors whose gradients the last backward pass before a time (ns) accumulated."""
    operators, instances = work.attributed.trace.operators, work.attributed.instances
    is_backward = instances.phase == instances.phases.index("backward")
    backward = np.flatnonzero(is_backward & (instances.process == work.process) & (instances.start < time))
    if not len(backward):
        return ()
    start, end = instances.start[backward[-1]], instances.end[backward[-1]]
    is_accumulation = mask_by_name(operators, _ACCUMULATION.fullmatch) & (operators.arguments != NONE)
    is_accumulation &= (operators.start >= start) & (operators.start < end)
    is_accumulation &= process_of(operators.thread) == work.process
    nodes = (parse_signature("", operators.argument_texts[i]) for i in operators.arguments[is_accumulation].tolist())
    gradients = (node.inputs[0] for node in nodes if node and node.inputs)
    return tuple(gradient for gradient in gradients if isinstance(gradient, Tensor))
