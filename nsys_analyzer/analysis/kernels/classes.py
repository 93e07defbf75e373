"""Kernel classes: the kind of a kernel's work, by its name and the operator that launched it.

The rules are a table, ``class_rules``: one row each, the first match wins. Without a rule a kernel is ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from nsys_analyzer.analysis.kernels.aliases import read_alias
from nsys_analyzer.analysis.kernels.class_rules import RULES, Rule
from nsys_analyzer.trace.columns import UNNAMED

OTHER = "other"
#: A share of any class is known to this one's only.
UNKNOWN = "unknown"
#: Its time is mostly waiting for the slowest rank, which is no work.
COMMUNICATION = "communication"
#: Copies and fills, which are no kernels, too.
FILLS = "memset/memcpy"

#: Every class, in the order of a report's legend, with its line of the glossary.
CLASSES: dict[str, str] = {
    "matmul": "Matrix multiplications of any library: GEMM, batched GEMM, GEMV, dot and their split-K reductions.",
    "fused attention": "Attention in one kernel, matmuls and softmax together, and its helper kernels.",
    "softmax": "Kernels named softmax or log-softmax, forward or backward.",
    "reduction": "Sums, means, maxima and losses: many elements read, few written.",
    "elementwise": "One element out for each one in: arithmetic, activations, masks, fills, rotary.",
    "copy/layout": "Moves, casts or reorders elements: copy, cat, transpose, gather, scatter, indexing.",
    "normalization": "LayerNorm, RMSNorm, GroupNorm and BatchNorm where they are one kernel by name.",
    "embedding": "Looks rows of a table up, and adds their gradients back into it.",
    "convolution": "Convolutions, implicit GEMM among them, and the transforms made for them.",
    "sort/scan": "Sorting, top-k, prefix sums, selection and histograms.",
    "optimizer": "Multi-tensor (foreach) and fused optimizer kernels, gradient clipping among them.",
    "random": "Random numbers and dropout masks.",
    COMMUNICATION: "Collectives and exchanges between GPUs: NCCL, NVSHMEM, custom all-reduce.",
    "memset/memcpy": "Copies and fills of whole buffers that compute nothing.",
    UNKNOWN: "Kernels whose name the capture does not hold.",
    OTHER: "Kernels whose name no rule knows, and work of no class here: Fourier transforms, factorizations, solvers.",
}

#: Classes whose kernels read and write more than they compute.
MOVING = (
    "softmax", "reduction", "elementwise", "copy/layout", "normalization", "embedding", "optimizer", "random",
    "memset/memcpy",
)  # fmt: skip

#: Characters of a kernel's name that are looked at: C++ templates make names of ten thousand.
LONGEST_NAME = 20_000

_MANGLED = re.compile(r"_ZL?(?=N?K?L?\d)N?K?L?")
#: Of the Itanium ABI's mangled names: a number as a template argument, an identifier behind its length; and, to be
#: passed over, types and back references with digits of their own.
_ARGUMENT = re.compile(
    r"L[a-z](?P<number>\d+)E|(?P<enum>LNS[\dA-Z]*_)?(?P<length>[1-9]\d{0,3})(?=[A-Za-z_])|DF\d+[b_]|[ST][\dA-Z]*_"
)
_ENUMERATOR = re.compile(r"E\d+E")


def readable(name: str) -> str:
    """The qualified name of a mangled kernel name, with the names and numbers among its template arguments.

    ``_ZN2at6native13reduce_kernelILi512ENS0_8ReduceOpIf…`` becomes ``at::native::reduce_kernel<512, ReduceOp, …>``.
    Python's demanglers read only some of the names that HIP's compiler writes.
    """
    prefix = _MANGLED.match(name)
    if prefix is None:
        return name
    parts, position = [], prefix.end()
    while length := re.match(r"L?([1-9]\d{0,3})", name[position : position + 5]):
        start = position + length.end()
        position = start + int(length.group(1))
        parts.append(name[start:position].replace("_GLOBAL__N_1", "(anonymous namespace)"))
    is_template = name[position : position + 1] == "I"
    return "::".join(parts) + (f"<{', '.join(_arguments(name, position))}>" if is_template else "")


def _arguments(name: str, position: int) -> Iterator[str]:
    """The numbers and the identifiers of a mangled name from ``position`` on."""
    while found := _ARGUMENT.search(name, position):
        position = found.end() + int(found["length"] or 0)
        if argument := found["number"] or name[found.end() : position]:
            yield argument
        if found["enum"] and (value := _ENUMERATOR.match(name, position)):
            position = value.end()


@cache
def first_rule(name: str) -> Rule | None:
    """The rule that decides the class of the kernel ``name``, or None; an alias in a shared copy holds its own."""
    if alias := read_alias(name):
        known = alias.kernel_class in CLASSES
        return Rule(alias.kernel_class, re.escape(name), name, alias.part_of) if known else None
    text = readable(name[:LONGEST_NAME])
    return next((rule for rule in RULES if re.search(rule.pattern, text)), None)  # compiled when first needed


def open_classes(name: str) -> frozenset[str]:
    """The classes that the launching operator may make of the kernel ``name``: any where no rule knows it."""
    rule = first_rule(name)
    return frozenset(CLASSES if rule is None else rule.part_of)


@cache
def classify(name: str, operator: str = "") -> str:
    """The class of a kernel, a key of ``CLASSES``.

    Args:
        name: its full (demangled or mangled) name.
        operator: PyTorch's operator that launched it, where that is known. It decides where no rule knows the name,
            and where the name's rule leaves it open (``Rule.part_of``).
    """
    rule = first_rule(name)
    by_name = rule.kernel_class if rule else UNKNOWN if name.startswith(UNNAMED) else OTHER
    if not operator:
        return by_name
    by_operator = classify(operator)
    return by_operator if by_operator in open_classes(name) else by_name
