"""Finds the padding in the batches that a program gives to a model: the tokens of each row, without its padding.

A mask or lengths among the arguments tell it. Without them, a row that ends or begins with many equal tokens is padded.
All rows of a batch are padded on the same side.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

#: Matches the names of arguments with a mask of the tokens, and of arguments with the number of tokens of each row.
_MASK, _LENGTHS = re.compile(r"(^|_)(attention|padding|pad|input)_mask$|^mask$"), re.compile(r"(^|_)(lengths|lens)$")
#: Matches the names of arguments with integers that are no tokens of the model's input.
_NO_TOKENS = re.compile("label|target|position|type|segment|mask")
#: A row without a mask is padded if it ends or begins with at least this number of equal tokens.
_SHORTEST_PADDING = 8


def find_tokens_of_rows(torch: Any, module: Any, arguments: Any, keywords: Any) -> list[tuple[int, list[int]]]:
    """Returns the length of the rows of each batch among a call's arguments, and the number of tokens of each row.

    The arguments are copied to the CPU for this, so that the program waits for the GPU.
    """
    named_arguments = _name_arguments(module, arguments, keywords)
    tensors = {name: value for name, value in named_arguments if type(value) is torch.Tensor and value.numel()}
    masks = [name for name in tensors if _MASK.search(name) and tensors[name].dim() == 2]
    sizes = {tuple(value.shape[:2]) for name, value in tensors.items() if name not in masks and value.dim() >= 2}
    tokens_of_shape: dict[tuple[int, ...], list[int] | None] = {}
    for name in masks:
        # A mask of other tokens, for example of the earlier tokens in a cache, shows no padding of the batch.
        shape = tuple(tensors[name].shape)
        if shape in sizes or (shape[::-1] in sizes and "pad" in name):
            tokens_of_shape[shape] = _read_mask(torch, tensors[name].cpu(), marks_padding="pad" in name)
    for name, value in tensors.items():
        if _LENGTHS.search(name) and value.dim() == 1 and not value.is_floating_point():
            lengths = value.tolist()
            for size in sizes - tokens_of_shape.keys():
                tokens_of_shape[size] = lengths if size[0] == len(lengths) and 0 < max(lengths) <= size[1] else None
    for name, value in tensors.items():
        is_integer = value.dtype in (torch.int64, torch.int32)
        if (
            is_integer
            and value.dim() == 2
            and not _NO_TOKENS.search(name)
            and not tokens_of_shape.get(tuple(value.shape))
        ):
            tokens_of_shape[tuple(value.shape)] = _read_tokens(torch, value.cpu())
    return [(shape[1], tokens) for shape, tokens in tokens_of_shape.items() if tokens]


def _name_arguments(module: Any, arguments: Any, keywords: Any) -> list[tuple[str, Any]]:
    """Returns the arguments of a call with their names, and the items of arguments that are mappings."""
    for attribute in ("_orig_mod", "module"):  # the model inside of compiled code, or inside of a wrapper such as DDP
        module = getattr(module, attribute, module)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names += [str(position) for position in range(len(names), len(arguments))]
    named_arguments = [*zip(names, arguments, strict=False), *keywords.items()]
    return [
        item
        for name, value in named_arguments
        for item in (value.items() if isinstance(value, Mapping) else [(name, value)])
    ]


def _read_mask(torch: Any, mask: Any, *, marks_padding: bool) -> list[int] | None:
    """Returns the number of tokens of each row of a mask; None if the mask shows something else than padding.

    A mask of numbers that are added to scores is negative at the padding. In any other mask, the tokens have the value
    of the column that has one value: the first column, or the last one if rows are padded on the left. If both columns
    have one value, the name of the mask decides.
    """
    if mask.is_floating_point() and bool((mask < 0).any()):
        return _count_tokens(torch, mask >= 0)
    is_set = mask != 0
    columns = [column for column in (is_set[:, 0], is_set[:, -1]) if bool((column == column[0]).all())]
    token = bool(columns[0][0]) if len(columns) == 1 else not marks_padding
    return _count_tokens(torch, is_set == token)


def _read_tokens(torch: Any, tokens: Any) -> list[int]:
    """Returns the number of tokens of each row without equal tokens at its end, or else at its start."""
    rows, length = tokens.shape
    for ordered in (tokens, tokens.flip(1)):
        padding = ordered[:, -1].mode().values
        count = (ordered.flip(1) == padding).cumprod(1).sum(1)
        if bool((count >= _SHORTEST_PADDING).any()) and bool((count < length).all()):
            return list((length - torch.where(count >= _SHORTEST_PADDING, count, 0)).tolist())
    return [length] * rows


def _count_tokens(torch: Any, is_token: Any) -> list[int] | None:
    """Returns the number of tokens of each row; None if a row has padding between its tokens, or if no row has any."""
    counts, length = is_token.sum(1, keepdim=True), is_token.shape[1]
    positions = torch.arange(length)
    sides = (positions < counts, positions >= length - counts)
    is_padded = any(torch.equal(side, is_token) for side in sides) and bool(is_token.any())
    return list(counts.flatten().tolist()) if is_padded else None
