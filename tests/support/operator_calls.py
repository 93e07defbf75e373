"""Builds steps whose calls of operators are described, so that what a finding about operators saves can be worked out.

Each call launches kernels, one after the other, as in ``tests.support.steps``. Times are µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.findings.finding import StepsToExplain
from nsys_analyzer.analysis.findings.reasons import find_reasons
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.operators.pricing import price_operators
from nsys_analyzer.trace.columns import BlockResources
from nsys_analyzer.trace.operator_calls import Batch, OperatorCalls, Signature, Tensor, TensorArgument
from tests.support.steps import MANY, Steps


def tensor(*shape: int, dtype: str = "bfloat16", strides: Sequence[int] | None = None) -> Tensor:
    """A tensor on the GPU; its last dimension is contiguous where no strides are given."""
    dense = [1]
    for size in reversed(shape[1:]):
        dense.insert(0, dense[0] * size)
    return Tensor(shape, dtype, tuple(dense if strides is None else strides), "cuda")


class OperatorSteps:
    """Steps under construction: what calls of operators a step has, in this order."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps = steps or Steps()
        self.rows: list[dict[str, Any]] = []
        self.signatures: list[Signature] = []
        self.launched_by: list[int] = []
        self.batches: list[Batch] = []

    def call(
        self, name: str, *inputs: TensorArgument, out: Sequence[Tensor] = (), us: float = 100,
        reads: Sequence[int] = (), writes: Sequence[int] = (), phase: str = "forward",
        instance: int = 1, line: str = "train.py:1 in step",
        module: str = "", arguments: Sequence[str] = (), keeps_graph: bool = True, kernels: int = 1, after: float = 10,
        blocks: int = MANY, kernel: str = "", resources: BlockResources | None = None,
        way: int = 0, size: int = 0,
    ) -> OperatorSteps:  # fmt: skip
        """A call with its kernels, which take ``us`` together, or with a copy one ``way`` and a wait for it."""
        self.signatures.append(Signature(f"aten::{name}", inputs, tuple(out), tuple(arguments)))
        self.rows.append(
            {"phase": phase, "instance": instance, "line": line, "module": module, "keeps_graph": keeps_graph,
             "reads": tuple(reads), "writes": tuple(writes)}
        )  # fmt: skip
        self.steps.phase = phase
        if way:
            self.steps.copy(us, way, size, 1).sync(after)
            self.launched_by.append(len(self.rows) - 1)
            return self
        for _ in range(kernels):
            self.steps.kernel(us / kernels, kernel or f"{name}_kernel", after, blocks=blocks, resources=resources)
            self.launched_by.append(len(self.rows) - 1)
        return self

    def calls(self, lasting: Sequence[int] = ()) -> OperatorCalls:
        """The calls of one step."""
        texts, codes = {}, {}
        for name in ("phase", "line", "module"):
            texts[name] = tuple(dict.fromkeys(row[name] for row in self.rows if row[name]))
            codes[name] = np.array([texts[name].index(row[name]) if row[name] else -1 for row in self.rows])
        signatures = tuple(dict.fromkeys(self.signatures))
        return OperatorCalls(
            signature=np.array([signatures.index(one) for one in self.signatures]),
            instance=np.array([row["instance"] for row in self.rows]),
            keeps_graph=np.array([row["keeps_graph"] for row in self.rows]),
            signatures=signatures,
            reads=tuple(row["reads"] for row in self.rows),
            writes=tuple(row["writes"] for row in self.rows),
            offsets=tuple((0,) * len(row["reads"]) for row in self.rows),
            lasting=frozenset(lasting),
            batches=tuple(self.batches),
            **codes,
            modules=texts["module"], lines=texts["line"], phases=texts["phase"],
        )  # fmt: skip

    def case(self, lasting: Sequence[int] = (), **idle_ms: float) -> StepsToExplain:
        """What a rule looks at."""
        steps = self.steps.case(**idle_ms)
        call = np.tile(np.array(self.launched_by), steps.study.steps)
        operators = price_operators(steps.study, OperatorWork(self.calls(lasting), call))
        return replace(steps, operators=operators, reasons=find_reasons(operators))
