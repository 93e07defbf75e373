"""Parses the arguments of operators that PyTorch's profiler and nsys record with their shapes.

PyTorch's profiler writes four lists with one entry per argument: shapes, types, strides, and the values of arguments
that are not tensors. The shape of a list of tensors is a list of shapes. A list of more than 30 tensors is empty.

The NVTX ranges of ``nsys --pytorch=autograd-shapes-nvtx`` contain only shapes. The shape of an argument that is not a
tensor is empty, as is that of a scalar tensor. A list of tensors is written as its tensors, without its beginning and
its end.

vLLM (``--enable-layerwise-nvtx-tracing``) and SGLang (``--enable-layerwise-nvtx-marker``) write a range around each
call of a module, with the shapes of the module's parameters and inputs. These shapes tell the matmul of a linear layer.
They do not tell the work of attention, which depends on the lengths of the sequences in the cache.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeAlias

import msgspec

from nsys_analyzer.trace.operator_calls import Signature, Tensor, TensorArgument

#: PyTorch's names of data types by the names that its profiler writes, which are those of C++. Types with a name such
#: as ``c10::Float8_e4m3fn`` have this name in lower case.
TYPES = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64",
    "bool": "bool", "unsigned char": "uint8", "signed char": "int8", "short": "int16", "short int": "int16",
    "int": "int32", "long": "int64", "long int": "int64", "long long": "int64", "__int64": "int64",
    "unsigned short": "uint16", "unsigned int": "uint32", "unsigned long": "uint64",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_SMALL_TYPE_PREFIXES = ("c10::Float8_", "c10::Float4_")
_TENSOR_LIST = "TensorList"
#: Operators that take several lists of as many tensors, such as parameters and their gradients.
_OPERATORS_ON_LISTS = ("aten::_foreach_", "aten::_fused_")
#: Operators whose first argument is a list of tensors.
_OPERATORS_ON_A_LIST = ("aten::cat", "aten::stack", "aten::_cat", "aten::hstack", "aten::vstack")
_MAX_LISTS = 5
#: The name of the operator that stands for the matmul of a linear layer in a serving engine.
LINEAR_LAYER = "module::linear"
_Sizes: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class _Texts(msgspec.Struct, array_like=True):
    """The lists that describe the arguments of a call. All but the first are missing if only shapes were recorded."""

    shapes: list[Any]
    types: list[Any] | None = None
    strides: list[Any] = []
    values: list[Any] = []


def parse_signature(name: str, text: str) -> Signature | None:
    """Returns the signature of an operator; None if the text is damaged. The outputs are unknown.

    Args:
        name: the name of the operator.
        text: the lists that describe the arguments, as JSON. The list of types may be missing.
    """
    try:
        lists = msgspec.json.decode(text, type=_Texts)
        if lists.types is None:
            return Signature(name, _group_tensors(name, [_parse_tensor(shape, None, "") for shape in lists.shapes]))
        strides = [*lists.strides, *([None] * len(lists.shapes))]
        inputs = [_parse_argument(*row) for row in zip(lists.shapes, lists.types, strides, strict=False)]
    except (msgspec.MsgspecError, RecursionError):
        return None
    return Signature(name, tuple(inputs), None, tuple(map(str, lists.values)))


class _EngineModule(msgspec.Struct):
    """The shapes in the range that a serving engine writes around the call of a module."""

    parameters: dict[str, _Sizes] = msgspec.field(name="TrainableParams")
    inputs: list[_Sizes] = msgspec.field(name="Inputs")


@cache
def describe_linear_layer(text: str) -> str:
    """Returns the arguments of a linear layer for ``parse_signature``; empty for the text of any other range.

    Args:
        text: the text of a range: ``{'Module': 'model.layers.0.mlp.down_proj', 'TrainableParams': {'weight': [4096,
            14336]}, 'Inputs': [[32, 14336]]}``. Engines store some weights transposed.
    """
    try:
        module = msgspec.convert(ast.literal_eval(text), _EngineModule)
        tokens, (rows, columns) = module.inputs[0], module.parameters["weight"]
    except (msgspec.MsgspecError, SyntaxError, LookupError, TypeError, ValueError, RecursionError, MemoryError):
        return ""
    if len(tokens) < 2 or tokens[-1] not in (rows, columns):
        return ""
    weight = (rows, columns) if columns == tokens[-1] else (columns, rows)
    return msgspec.json.encode([[tokens, weight]]).decode()


def _parse_argument(shape: Any, type_name: Any, strides: Any) -> TensorArgument:
    """Returns the tensor or the tensors of an argument; None for an argument of another kind.

    Raises:
        msgspec.MsgspecError: the shape is damaged.
    """
    if type_name == _TENSOR_LIST and isinstance(shape, list):
        return tuple(_parse_tensor(shape_of_tensor, None, "") for shape_of_tensor in shape)
    dtype = TYPES.get(str(type_name), "")
    if str(type_name).startswith(_SMALL_TYPE_PREFIXES):
        dtype = str(type_name).removeprefix("c10::").lower()
    return _parse_tensor(shape, strides, dtype) if dtype or shape else None


def _parse_tensor(shape: Any, strides: Any, dtype: str) -> Tensor:
    """Returns a tensor of the given shape.

    Raises:
        msgspec.MsgspecError: the shape is no list of sizes.
    """
    sizes, steps = msgspec.convert(shape, _Sizes), msgspec.convert(strides or [], tuple[int, ...])
    return Tensor(sizes, dtype, steps if len(steps) == len(sizes) else None)


def _group_tensors(name: str, tensors: Sequence[Tensor]) -> tuple[TensorArgument, ...]:
    """Returns the arguments of an operator whose lists of tensors were recorded as their tensors.

    Operators on several lists take lists of equal shapes. Scalar tensors are left out, because they cannot be told from
    other arguments.
    """
    tensors_with_shape = [tensor for tensor in tensors if tensor.shape]
    if name in _OPERATORS_ON_A_LIST:
        return (tuple(tensors_with_shape),)
    if not name.startswith(_OPERATORS_ON_LISTS):
        return tuple(tensor if tensor.shape else None for tensor in tensors)
    for lists in range(_MAX_LISTS, 0, -1):
        length, remainder = divmod(len(tensors_with_shape), lists)
        if tensors_with_shape and not remainder and tensors_with_shape == tensors_with_shape[:length] * lists:
            return tuple(
                tuple(tensors_with_shape[start : start + length]) for start in range(0, len(tensors_with_shape), length)
            )
    return ()
