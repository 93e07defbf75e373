"""A row of the kernel class table, and the parts that patterns of kernel names share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A kernel whose name ``pattern`` finds is of ``kernel_class``; ``example`` is a real such name.

    Libraries use some kernels for the work of other classes too: cuDNN multiplies matrices to convolve. Launched by an
    operator of one of the classes of ``part_of``, the kernel is of that class.
    """

    pattern: str
    kernel_class: str
    example: str
    part_of: tuple[str, ...] = ()


#: The return type and any number of namespaces; what follows starts the name of the function.
FN = (
    r"^(?:void |static )*(?:std::enable_if<.*?, void>::type )?"
    r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::|\{anonymous\}::)*?"
)
#: What follows is anywhere in the qualified name of the kernel.
IN = FN + r"\w*?"
