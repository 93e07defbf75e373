"""Kernel classes: what kind of work a kernel does, told from its name.

The rules are a table, ``class_rules``: one row each, the first match wins. What no rule knows is ``other``, a
class with a share of its own in every table.
"""

from __future__ import annotations

import re
from functools import cache

from nsys_analyzer.analysis.class_rules import RULES, Rule

__all__ = ["CLASSES", "OTHER", "RULES", "Rule", "classify", "first_rule", "readable"]

OTHER = "other"
#: Its time is mostly waiting for the slowest rank, which is no work.
COMMUNICATION = "communication"

#: Every class, in the order of a report's legend, with its line of the glossary.
CLASSES: dict[str, str] = {
    "matmul": "Matrix products of any library: GEMM, batched GEMM, GEMV, dot and their split-K reductions.",
    "fused attention": "Attention in one kernel, products and softmax together, and its helper kernels.",
    "softmax": "A softmax or log-softmax, forward or backward, that is one by name.",
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
    OTHER: "Kernels whose name no rule knows.",
}

_COMPILED = tuple((re.compile(rule.pattern), rule) for rule in RULES)
_MANGLED = re.compile(r"_ZL?(?=N?K?L?\d)N?K?L?")


def readable(name: str) -> str:
    """Write the qualified name of a mangled kernel out; its template arguments stay mangled.

    ``_ZN2at6native13reduce_kernelILi512E…`` becomes ``at::native::reduce_kernel<ILi512E…``.
    """
    prefix = _MANGLED.match(name)
    if prefix is None:
        return name
    parts, position = [], prefix.end()
    while length := re.match(r"L?([1-9]\d{0,3})", name[position : position + 5]):
        start = position + length.end()
        position = start + int(length.group(1))
        parts.append(name[start:position])
    return "::".join(parts) + ("<" if name[position : position + 1] == "I" else "(") + name[position:]


def first_rule(name: str) -> Rule | None:
    """Find the rule that decides the class of the kernel ``name``, or None where no rule knows it."""
    text = readable(name)
    return next((rule for pattern, rule in _COMPILED if pattern.search(text)), None)


@cache
def classify(name: str) -> str:
    """Tell the class, a key of ``CLASSES``, of the kernel with the full (demangled or mangled) ``name``."""
    rule = first_rule(name)
    return rule.kernel_class if rule else OTHER
