"""Tests the numbers of autograd's nodes, and which of PyTorch's operators created a node."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nsys_analyzer import Trace
from nsys_analyzer.trace.columns import Operators
from tests.conftest import DATA
from tests.support.export import Export
from tests.support.kineto import AUTOGRAD, Kineto

RealCapture = Callable[[str], Path]
SIZES = "[[768], [8192, 768], [768, 3072], [], []]"
NODE = re.compile(r"\w+Backward\d*|torch::autograd::Copy\w+")


def loaded(trace: Export | Kineto, tmp_path: Path) -> Operators:
    if isinstance(trace, Export):
        return Trace.load(trace.write(tmp_path / "t.sqlite")).operators
    return Trace.load(trace.write(tmp_path / "t.json")).operators


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


# --- NVTX ranges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_id", [False, True])
def test_a_range_tells_the_number(tmp_path: Path, by_id: bool) -> None:
    export = Export().range("forward", 0, 100)
    export.range(f"aten::addmm, seq = 9157, op_id = 9, sizes = {SIZES}, input_op_ids = [(1,0)]", 10, 20, by_id=by_id)
    export.range("aten::t, seq = 9157, op_id = 8", 30, 40, by_id=by_id).range("aten::empty", 50, 60, by_id=by_id)
    export.range(f"MmBackward0, seq = 12, sizes = {SIZES}", 70, 80, by_id=by_id)
    operators = loaded(export, tmp_path)
    assert [operators.names[code] for code in operators.name] == [
        "aten::addmm",
        "aten::t",
        "aten::empty",
        "MmBackward0",
    ]
    assert operators.sequence.tolist() == [9157, 9157, -1, 12]
    assert operators.forward_thread.tolist() == [0, 0, 0, 0]  # ranges do not say it


@pytest.mark.parametrize(
    ("text", "sequence"),
    [
        ("aten::mm, seq = 7, op_id = 1, sizes = [[8192, 768], [768,", 7),  # cut by the profiler
        ("aten::mm, op_id = 1, sizes = []", -1),
        ("aten::cat, sizes = [[[2, 3], [4, 3]], []], input_op_ids = [(7,0)]", -1),
        ("aten::mm, seq = 99999999999999999999, op_id = 1", -1),  # no column holds it
        ("aten::mm, seq = -3", -1),
        ("aten::mm, sizes = somewhere", -1),
    ],
)
def test_an_annotation_of_another_form(tmp_path: Path, text: str, sequence: int) -> None:
    operators = loaded(Export().range(text, 10, 20), tmp_path)
    assert operators.names[operators.name[0]] == text.partition(",")[0]
    assert operators.sequence.tolist() == [sequence]


def test_operators_that_are_left_out_take_their_numbers_with_them(tmp_path: Path) -> None:
    """The first has no end, the second ends before it starts; what is left are the numbers 3 and 4."""
    export = Export().range("aten::a, seq = 1, op_id = 1", 5, None).range("aten::b, seq = 2, op_id = 2", 20, 10)
    export.range("aten::c, seq = 3, op_id = 3", 30, 40).range("aten::d, seq = 4, op_id = 4", 50, 60)
    operators = loaded(export, tmp_path)
    assert operators.sequence.tolist() == [3, 4]
    assert operators.select(operators.start > 40).sequence.tolist() == [4]


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


# --- PyTorch's profiler ----------------------------------------------------------------------------------------------


def test_an_event_tells_the_number_and_the_thread(tmp_path: Path) -> None:
    trace = Kineto().operator("aten::linear", 0, 20, sequence=26, forward_thread=0)
    trace.operator("aten::t", 2, 3, sequence=26, forward_thread=0)
    trace.operator("aten::as_strided", 3, 1, sequence=None)
    trace.operator("AddmmBackward0", 30, 20, tid=AUTOGRAD, sequence=27, forward_thread=1)
    operators = loaded(trace, tmp_path)
    assert operators.sequence.tolist() == [26, 26, -1, 27]
    assert operators.forward_thread.tolist() == [0, 0, 0, 1]


def test_several_nodes_of_one_operator_are_its_own(tmp_path: Path) -> None:
    """An assignment to a slice: ``copy_`` 29 makes the nodes 29 and 30, and 31; the next operator carries 32."""
    trace = Kineto()
    for at, (name, number) in enumerate([("aten::select", 28), ("aten::copy_", 29), ("aten::select", 32)]):
        trace.operator(name, 10 * at, 5, sequence=number)
    trace.operator("torch::autograd::CopySlices", 50, 9, tid=AUTOGRAD, sequence=30, forward_thread=1)
    trace.operator("torch::autograd::CopyBackwards", 60, 9, tid=AUTOGRAD, sequence=29, forward_thread=1)
    assert [maker for _, maker in makers(loaded(trace, tmp_path))] == [1, 1]


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


def test_a_capture_without_operators(tmp_path: Path) -> None:
    operators = loaded(Export().range("forward", 0, 10), tmp_path)
    assert len(operators) == 0
    assert operators.sequence.dtype == np.int64
