"""Builds captures of programs whose operators were recorded in a step after the measured steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.operators.account import AccountPart, OperatorRow, StepAccount
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from tests.support.export import ADD, GEMM, PID
from tests.support.program import SYNC, Program
from tests.support.steps import Steps

#: The times of a step of ``record_operators``, µs: the length, the matmul and the addition.
STEP_US, MATMUL_US, ADD_US = 1000, 400, 100
#: The sizes of its square matrices.
SIZE = 4096


def record_operators(folder: Path, size: int = SIZE, *, recorded: bool = True) -> Path:
    """Writes a capture of an H200 with three steps of 1,000 µs, and returns its path.

    A step multiplies two bf16 matrices in 400 µs and adds two in 100 µs, then the program waits for both. In the step
    after them, each call of an operator has a range.
    """
    program = Program()
    for step in range(4):
        at = step * STEP_US
        # The launches of the two operators, each inside the range of its call in the last step.
        launches = (at + 10, at + 14), (at + 30, at + 34)
        ends = at + 20 + MATMUL_US, at + 20 + MATMUL_US + ADD_US
        if step < 3:
            program.step(at, at + STEP_US)
        elif recorded:
            program.open("nsys-analyze operators", at, at + STEP_US)
            for call, (start, end) in enumerate(launches):
                program.open(f"nsys-analyze operator {call}", start - 1, end + 1)
        else:
            break
        program.work(launches[0], (at + 20, ends[0]), name=GEMM).work(launches[1], ends, name=ADD)
        program.api(SYNC, at + 40, ends[1] + 10)
    path = program.write(folder / "capture.sqlite")
    if recorded:
        (folder / "capture.operators.gz").write_bytes(gzip.compress(json.dumps(describe_calls(size)).encode()))
    return path


def describe_calls(size: int = SIZE) -> dict[str, Any]:
    """Returns the content of the file of operators: ``aten::mm`` in a module of a layer, and ``aten::add``."""
    matrix = [[size, size], "bfloat16", [size, 1], "cuda"]
    return {
        "pid": PID,
        "tensors": [matrix],
        "signatures": [["aten::mm", [0, 0], [0], ["", ""]], ["aten::add", [0, 0], [0], ["", ""]]],
        "modules": ["GPT/h.0.up: Linear"],
        "lines": ["train.py:12 in forward", "train.py:20 in step"],
        "phases": ["forward"],
        "lasting": [0, 1, 2, 3],
        "signature": [0, 1],
        "module": [0, -1],
        "line": [0, 1],
        "phase": [0, 0],
        "passes": [0, 0],
        "keeps_graph": [0, 0],
        "reads": [[0, 1], [0, 2]],
        "writes": [[2], [3]],
    }


def make_row(
    operator: str, ms: float, attainable_ms: float | None, *, shapes: str = "4×4 bf16", module: str = "", line: str = ""
) -> OperatorRow:
    """Returns a row of an operator with one call."""
    excess_ms = 0.0 if attainable_ms is None else ms - attainable_ms
    texts = (operator, shapes, "forward", module, line, "", "memory")
    return OperatorRow(*texts, 1, ms, attainable_ms, excess_ms, 8.0, 96.0)


def make_account(**changes: Any) -> StepAccount:
    """Returns an account: 23.94 ms attainable + 8.19 + 5.47 + 4.48 + 4.00 ms = 46.08 ms."""
    parts = [("launch", 8.19), ("host", 5.47), ("redundant", 4.48), ("operators", 4.0)]
    account = StepAccount(
        step_ms=46.08,
        attainable_ms=23.94,
        parts=tuple(AccountPart(*part) for part in parts),
        expected_share=1.0,
        measured_on="H200",
        is_scaled=False,
        operators=(make_row("aten::mm", 8.0, 6.0), make_row("aten::add", 3.0, 1.0, line="train.py:20 in step")),
    )
    return replace(account, **changes)


def make_capture(**changes: Any) -> CaptureSummary:
    """Returns a capture with the account of ``make_account``, changed by these attributes."""
    return replace(Steps().kernel(40).capture(unprofiled_us=46_080), account=make_account(**changes))
