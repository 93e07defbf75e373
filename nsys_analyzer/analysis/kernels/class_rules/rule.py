"""A row of the kernel class table, and the parts that patterns of kernel names share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Rule:
    """A kernel whose name ``pattern`` finds is of ``kernel_class``; ``example`` is a real such name.

    Libraries use some kernels for the work of other classes too: cuDNN multiplies matrices to convolve. Launched by an
    operator of one of the classes of ``part_of``, the kernel is of that class.
    """

    kernel_class: str
    pattern: str
    example: str
    part_of: tuple[str, ...] = ()


#: A rule of each class.
communication = partial(Rule, "communication")
convolution = partial(Rule, "convolution")
copy_layout = partial(Rule, "copy/layout")
elementwise = partial(Rule, "elementwise")
embedding = partial(Rule, "embedding")
fused_attention = partial(Rule, "fused attention")
matmul = partial(Rule, "matmul")
memset_memcpy = partial(Rule, "memset/memcpy")
normalization = partial(Rule, "normalization")
optimizer = partial(Rule, "optimizer")
random = partial(Rule, "random")
reduction = partial(Rule, "reduction")
softmax = partial(Rule, "softmax")
sort_scan = partial(Rule, "sort/scan")

#: The return type and any number of namespaces; what follows starts the name of the function.
FN = (
    r"^(?:void |static )*(?:std::enable_if<.*?, void>::type )?"
    r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::|\{anonymous\}::)*?"
)
#: What follows is anywhere in the qualified name of the kernel.
IN = FN + r"\w*?"
