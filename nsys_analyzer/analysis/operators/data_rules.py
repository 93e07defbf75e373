"""Defines the rules for operators that move data and hardly compute.

These are elementwise operators, norms, softmax, reductions, copies, lookups, optimizers, collectives and the kernels of
torch.compile. Unless ``_FORMULAS`` contains other formulas, an operator reads all its tensors and writes its outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from nsys_analyzer.analysis.operators.operands import (
    Call,
    Formula,
    OperatorKind,
    Rule,
    bytes_of,
    count_elements,
    count_stored_elements,
    nothing,
    operations,
    outputs_or,
    size_of,
)
from nsys_analyzer.trace.operator_calls import Signature, Tensor


def find_data_rule(signature: Signature) -> Rule | None:
    """Returns the rule of an operator that moves data, or None for operators whose shapes do not tell their work."""
    if signature.name.startswith("triton::triton_"):
        return _make_triton_rule(signature.name)
    namespace, _, name = signature.name.partition("::")
    if namespace in _COLLECTIVE_NAMESPACES:
        return Rule("collective", _read_by_collective)
    kind: OperatorKind = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "elementwise")
    if namespace not in _NAMESPACES or (kind == "elementwise" and _UNKNOWN_WORK.search(name)):
        return None
    flops = operations(_OPERATIONS_PER_ELEMENT.get(kind, 0.0))
    for pattern, (read, written) in _FORMULAS.items():
        if pattern.fullmatch(name):
            return Rule(kind, read, written, flops)
    is_in_place = name.endswith("_")
    return Rule(kind, bytes_of(), size_of(0) if is_in_place else outputs_or(_OUTPUTS.get(kind, size_of(0))), flops)


#: The namespaces of operators that PyTorch defines.
_NAMESPACES = ("aten", "fsdp")
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
#: Matches operators that compute more than they move, or that read an unknown part of a table.
_UNKNOWN_WORK = re.compile(
    r"mm_?$|conv|attention|transformer|rnn|linalg|cholesky|dist|sparse|embedding_bag|grid_sampler"
)
#: The kinds of operators by a pattern of their names. Other operators are elementwise.
_KINDS: dict[OperatorKind, re.Pattern[str]] = {
    "optimizer": re.compile(r"_foreach_\w+|_fused_(?:adam|sgd|adagrad)\w*|_amp_\w+"),
    "reduction": re.compile(
        r"(?:nan)?(?:sum|median)|mean|prod|std|var|std_mean|var_mean|a?max|a?min|aminmax|arg(?:max|min)|all|any|equal"
        r"|norm|linalg_vector_norm|logsumexp|count_nonzero|mode|kthvalue|(?!nll)\w+_loss|binary_cross_entropy\w*logits"
        r"|\w*_?pool[123]d\w*|batch_norm_(?:stats|backward_reduce)"
    ),
    "norm": re.compile(r"\w*(?:layer|group|batch|rms|weight)_norm\w*"),
    "softmax": re.compile(r"\w*softmax(?:_backward_data)?"),
    "cross entropy": re.compile(r"nll_loss\w*"),
    "embedding": re.compile(
        r"embedding(?:_dense_backward)?|_?(?:unsafe_)?index(?:_\w+)?|gather|take|(?:slice_|select_)?scatter\w*"
    ),
    "other": re.compile(
        r"sort|cum\w+|logcumsumexp|topk|unique\w*|_unique2|histc|bincount|multinomial|nonzero|masked_select"
        r"|searchsorted|bucketize|isin|_fft\w+"
    ),
    "copy": re.compile(
        r"\w*_?copy_?|clone|cat|_?chunk_cat|stack|flip|roll|repeat\w*|\w+_pad(?:_nd|[123]d)\w*|\w+shuffle|im2col|col2im"
        r"|(?:slice|select|unfold)_backward|all_gather_copy_in|_local_scalar_dense|fill_|zero_|arange|\w*rand\w*"
        r"|(?:new_)?(?:zeros|ones|full)(?:_like)?|normal_?|uniform_|bernoulli_|exponential_|scalar_tensor"
    ),
}  # fmt: skip
#: The operations per element of the first argument: additions, multiplications, comparisons and functions.
#: A norm needs 8 operations: 1 for the mean, 3 for the variance, 2 for the normalization, and 2 for weight and bias. A
#: softmax needs 5: one each for maximum, difference, exponential, sum and quotient. The backward operators of both need
#: as many, within a factor of 2.
_OPERATIONS_PER_ELEMENT: dict[OperatorKind, float] = {
    "norm": 8, "softmax": 5, "elementwise": 1, "reduction": 1, "optimizer": 1,
}  # fmt: skip


def _count_broadcast(call: Call) -> float:
    """Returns the bytes of a tensor as large as the largest argument, in the widest type of the arguments."""
    tensors = [tensor for tensor in call.tensors() if tensor.shape] or call.tensors()
    return float(max(map(count_elements, tensors)) * max(map(call.element_bytes, tensors)))


#: The bytes of outputs that the source does not contain. The output of other kinds is like the first argument.
_OUTPUTS: dict[OperatorKind, Formula] = {"elementwise": _count_broadcast, "reduction": nothing, "other": nothing}


def _read_by_collective(call: Call) -> float:
    """Returns the bytes of the inputs of ``(outputs, inputs, …)``, or of the tensors that are changed in place."""
    return call.count_bytes(call.tensors(1) or call.tensors(0))


def _read_by_addcmul(call: Call) -> float:
    """Returns the bytes that ``addcmul(self, tensor1, tensor2)`` reads.

    Optimizers pass the gradients as both factors. So two lists with the same shapes count as one list that is squared.
    """
    factors = call.signature.inputs[1:3]
    return call.count_bytes(call.tensors(0, 1) if len(set(factors)) == 1 else call.tensors(0, 1, 2))


# --- lookups and updates by index: they touch the elements that the indices select


def _read_by_lookup(call: Call) -> float:
    """Returns the bytes of the indices, and of the elements that they select."""
    return _count_selected(call) + call.count_bytes(call.tensors(1, 2))


def _count_selected(call: Call) -> float:
    """Returns the bytes of the elements that a lookup selects and returns.

    ``gather(table, dim, index)`` has an index for each element, and ``index_select(table, dim, index)`` one for each
    slice. ``embedding(table, index)`` selects rows.
    """
    if call.outputs is not None:
        return call.count_bytes(call.outputs)
    table, index = call.tensor(0), call.tensor(1 if call.signature.name == "aten::embedding" else 2)
    dim = int(call.value(1)) if call.signature.name == "aten::index_select" else 0
    per_index = 1 if call.signature.name == "aten::gather" else count_elements(table) // max(1, table.shape[dim])
    return float(count_elements(index) * per_index * call.element_bytes(table))


def _count_updated(call: Call) -> float:
    """Returns the bytes of the elements that ``(table, …, index, …, values)`` replaces, or adds to.

    A mask does not tell how many elements it selects. If the program does not ask for a change in place, autograd
    nevertheless changes tensors of zeros in place, except in the step that the hooks record.
    """
    counts = [count_elements(tensor) for tensor in call.tensors()[1:] if tensor.dtype != "bool"]
    return float(max(counts, default=0) * call.element_bytes(call.tensor(0)))


def _read_by_update(call: Call) -> float:
    """Returns the bytes of the indices and the values, and of the elements of the table that they change."""
    return _count_updated(call) + call.count_bytes(call.tensors()[1:])


def _read_by_nll_loss(call: Call) -> float:
    """Returns the bytes that ``nll_loss(logarithms, targets, weight)`` reads: one logarithm for each target."""
    return count_elements(call.tensor(1)) * call.element_bytes(call.tensor(0)) + bytes_of(1, 2)(call)


def _table_gradient(call: Call) -> float:
    """Returns the bytes of the output of ``embedding_dense_backward(gradient, indices, rows)``: the whole table."""
    gradient = call.tensor(0)
    return float(call.value(2) * gradient.shape[-1] * call.element_bytes(gradient))


# --- images


def _resized(call: Call) -> float:
    """Returns the bytes of the output of ``(images, height and width, …)``."""
    images = call.tensor(0)
    return float(math.prod(images.shape[:2]) * math.prod(call.value(1)) * call.element_bytes(images))


def _pooled(call: Call) -> float:
    """Returns the bytes of the output of ``pool(images, kernel_size, stride, …)``, and of the indices of maxima."""
    images, index_bytes = call.tensor(0), 8 if "max" in call.signature.name else 0
    elements = count_elements(images) / math.prod(call.value(2, []) or call.value(1))
    return float(elements * (call.element_bytes(images) + index_bytes))


#: The bytes that operators read and write, by a pattern of their names, if they do not read all their tensors once or
#: if the inputs do not tell the size of the outputs.
_FORMULAS: dict[re.Pattern[str], tuple[Formula, Formula]] = {
    re.compile(pattern): formulas
    for pattern, formulas in {
        r"(?:_foreach_)?copy_": (bytes_of(1), size_of(0)),
        r"split_with_sizes_copy|_?chunk_cat|all_gather_copy_in": (bytes_of(0), size_of(0)),
        r"(?:new_)?(?:zeros|ones|full)(?:_like)?|rand\w*": (nothing, outputs_or(size_of(0))),
        r"fill_|zero_|_foreach_zero_|normal_|uniform_|bernoulli_|random_|exponential_": (nothing, size_of(0)),
        # Parameters, moments and the maxima of moments, but not the gradients.
        r"_fused_(?:adam|sgd|adagrad)\w*": (bytes_of(), size_of(0, 2, 3, 4)),
        r"(?:_foreach_)?addcmul_": (_read_by_addcmul, size_of(0)),
        r"addcmul": (_read_by_addcmul, outputs_or(size_of(0))),
        r"_foreach_(?:norm|max|powsum)|_local_scalar_dense": (bytes_of(), outputs_or(nothing)),
        r"nll_loss\w*forward": (_read_by_nll_loss, outputs_or(nothing)),
        r"nll_loss\w*backward": (bytes_of(0, 2, 3, 6), outputs_or(size_of(1))),
        r"embedding|gather|take|index|_unsafe_index|index_select": (_read_by_lookup, outputs_or(_count_selected)),
        r"embedding_dense_backward": (bytes_of(), outputs_or(_table_gradient)),
        r"scatter\w*|_?(?:unsafe_)?index_(?:put|add|copy|fill|reduce)\w*": (_read_by_update, _count_updated),
        # The gradient of images, of which only the shape is needed, and the indices of maxima.
        r"\w*pool\w+_backward|\w+_pad\w+_backward": (bytes_of(0, 2, 7), outputs_or(size_of(1))),
        r"(?:max|avg)_pool\w+": (bytes_of(), outputs_or(_pooled)),
        r"_?(?:upsample|adaptive)_\w+": (bytes_of(), outputs_or(_resized)),
    }.items()
}  # fmt: skip

# --- kernels of torch.compile

#: The kinds of the kernels of torch.compile by a word in their names. The first one that occurs applies.
_TRITON_KINDS: tuple[tuple[str, OperatorKind], ...] = (
    ("norm", "norm"), ("nll_loss", "cross entropy"), ("softmax", "softmax"), ("triton_poi", "elementwise"),
    ("triton_for", "optimizer"), ("triton_red", "reduction"), ("triton_per", "reduction"),
)  # fmt: skip


def _make_triton_rule(name: str) -> Rule | None:
    """Makes the rule of a kernel of torch.compile, ``triton_poi_fused_add_mul_0``, or returns None for other kernels.

    A kernel reads and writes no more elements of a buffer than it has iterations, whose numbers are its last arguments.
    In a source without outputs, a buffer that is read and written counts once.
    """

    def count_used(call: Call, tensors: Iterable[Tensor]) -> float:
        """Returns the bytes that a kernel uses of buffers."""
        numbers = [int(text) for text in call.signature.arguments if text.isdigit()]
        iterations = math.prod(numbers) if numbers else math.inf
        return sum(min(count_stored_elements(x), iterations) * call.element_bytes(x) for x in tensors)

    kind = next((kind for word, kind in _TRITON_KINDS if word in name), None)
    if kind is None:
        return None
    return Rule(kind, lambda call: count_used(call, call.tensors()), lambda call: count_used(call, call.outputs or ()))
