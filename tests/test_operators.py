"""Tests the numbers of autograd's nodes, and which of PyTorch's operators created a node."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nsys_analyzer import Trace
from nsys_analyzer.trace.columns import Operators
from tests.conftest import DATA
from tests.support.cases import make_case_test
from tests.support.export import Export

RealCapture = Callable[[str], Path]
NODE = re.compile(r"\w+Backward\d*|torch::autograd::Copy\w+")


def makers(operators: Operators) -> list[tuple[int, int]]:
    """Each node of backward and the operator that made it: the rule of ``Operators`` for one thread of forwards."""
    is_node = np.array([bool(NODE.fullmatch(name)) for name in operators.names])[operators.name]
    is_engine = np.array([name.startswith("autograd::engine") for name in operators.names])[operators.name]
    forward = np.flatnonzero(~is_node & ~is_engine & (operators.sequence >= 0))
    found = []
    for node in np.flatnonzero(is_node & (operators.sequence >= 0)).tolist():
        before = operators.start[forward] < operators.start[node]
        able = forward[before & (operators.sequence[forward] <= operators.sequence[node])]
        found.append((node, int(able[np.argmax(operators.start[able])])))
    return found


def pairs(operators: Operators) -> Counter[tuple[str, str]]:
    """How many nodes of each name were made by operators of each name."""
    name = [operators.names[code] for code in operators.name]
    return Counter((name[node], name[maker]) for node, maker in makers(operators))


test_operators = make_case_test(
    "operators",
    {
        "operators": lambda capture: [capture.trace.operators.names[code] for code in capture.trace.operators.name],
        "numbers": lambda capture: capture.trace.operators.sequence,
        "forward threads": lambda capture: capture.trace.operators.forward_thread,
        "makers of nodes": lambda capture: [maker for _, maker in makers(capture.trace.operators)],
    },
)


def test_a_selection_of_operators_keeps_their_numbers(tmp_path: Path) -> None:
    export = Export().range("aten::c, seq = 3, op_id = 3", 30, 40).range("aten::d, seq = 4, op_id = 4", 50, 60)
    operators = Trace.load(export.write(tmp_path / "t.sqlite")).operators
    assert operators.select(operators.start > 40).sequence.tolist() == [4]


def test_a_capture_without_operators(tmp_path: Path) -> None:
    operators = Trace.load(Export().range("forward", 0, 10).write(tmp_path / "t.sqlite")).operators
    assert len(operators) == 0
    assert operators.sequence.dtype == np.int64


def test_the_numbers_of_a_real_capture(real_capture: RealCapture) -> None:
    """``mem_small256``: three steps, whose forwards count on one thread from 10,255 to 16,408."""
    operators = Trace.load(real_capture("mem_small256")).operators
    carried = operators.sequence[operators.sequence >= 0]
    assert (len(operators), len(carried)) == (51_657, 19_872)
    assert (carried.min(), carried.max()) == (10_255, 16_408)
    made = pairs(operators)
    assert sum(made.values()) == 6153
    # 9 matmuls in each of 12 layers and the head, 3 steps: 327. The softmax by hand has an exponential a layer.
    assert made["BmmBackward0", "aten::bmm"] == (9 * 12 + 1) * 3
    assert made["ExpBackward0", "aten::exp"] == 12 * 3
    assert all(same(*pair) for pair in made)


def test_the_nodes_of_a_real_capture_with_sizes(real_capture: RealCapture) -> None:
    """GPT-2, 12 layers of four ``aten::addmm`` and 3 steps; autocast is on: each casts its inputs and calls another."""
    operators = Trace.load(real_capture("functions_autograd_gpt2")).operators
    addmm = operators.select(operators.name == operators.names.index("aten::addmm"))
    assert len(addmm) == 4 * 12 * 3 * 2
    assert all(same(*pair) for pair in pairs(operators))


def same(node: str, operator: str) -> bool:
    """Whether a node is called after an operator: ``ReshapeAliasBackward0`` after ``aten::_reshape_alias``."""
    words = operator.removeprefix("aten::").replace("_", "").removesuffix("forward")
    return re.sub(r"Backward\d*$", "", node).lower() == words


def test_the_nodes_of_a_real_trace(tmp_path: Path) -> None:
    """2 layers and a head: each has 4 projections and 3 matrices of its feed-forward, and attention 2 products."""
    trace = Path(shutil.copy(DATA / "cpu_train.pt.trace.json.gz", tmp_path))
    operators = Trace.load(trace).operators
    made = pairs(operators)
    assert made["MmBackward0", "aten::mm"] == (4 + 3) * 2 + 1
    assert made["BmmBackward0", "aten::bmm"] == 2 * 2
    assert all(same(*pair) for pair in made)
    engine = np.char.startswith(np.array(operators.names)[operators.name], "autograd::engine")
    assert set(operators.forward_thread[operators.sequence >= 0].tolist()) == {0, 1}
    # Of 697 numbers 293 are the forward's; each of 202 nodes has its own, and so has the engine's work around it.
    assert (operators.forward_thread > 0).sum() == 2 * 202
    assert (operators.sequence[engine] >= 0).sum() == 202


def test_a_node_is_traced_to_the_call_of_its_module(tmp_path: Path) -> None:
    """Recorded here, on the CPU: a step of two linear layers, whose nodes run in the order opposite to their calls."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    recorded = {"with_stack": True, "experimental_config": verbose}
    with profile(activities=[ProfilerActivity.CPU], **recorded) as p:
        model(torch.ones(2, 8)).sum().backward()
    p.export_chrome_trace(str(tmp_path / "t.json"))
    trace = Trace.load(tmp_path / "t.json")
    ranges, operators = trace.ranges, trace.operators
    assert sorted(ranges.names[code] for code in ranges.name) == [
        f"nn.Module: {name}" for name in ("Linear_0", "Linear_1", "ReLU_0", "Sequential_0")
    ]
    found = []
    for node, maker in makers(operators):
        if operators.names[operators.name[node]] == "AddmmBackward0":
            around = (ranges.start <= operators.start[maker]) & (operators.start[maker] < ranges.end)
            innermost = np.flatnonzero(around)[np.argmax(ranges.start[around])]
            found.append(ranges.names[ranges.name[innermost]])
    assert found == ["nn.Module: Linear_1", "nn.Module: Linear_0"]
