"""Tests the step of operators in small real programs: what its file says of each call, and that programs do not notice.

Three steps are warm-up, four are measured, and the eighth is the step of operators.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsys_analyzer.analysis.operators.memory_formats import find_image_formats
from nsys_analyzer.capture.hooks.operators import FILE_VARIABLE
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.export.writing import export
from nsys_analyzer.share import share
from nsys_analyzer.trace.operator_calls import OperatorCalls, read_operator_calls
from nsys_analyzer.trace.trace import Trace
from tests.support.annotated import ASKED, LONGEST_S, Ran, run

pytestmark = pytest.mark.slow  # each test runs a program with PyTorch

pytest.importorskip("torch", reason="the hooks are those of PyTorch")

TO_END = replace(ASKED, run_to_end=True, stacks=False)
MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.down(h)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x):
        return checkpoint(self.last, self.first(x), use_reentrant=REENTRANT)

torch.manual_seed(0)
REENTRANT = False
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAINING = f"""{MODEL}
for _ in range(12):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print([float(parameter.detach().double().sum()) for parameter in model.parameters()])
"""


def run_with_operators(folder: Path, text: str) -> tuple[Ran, OperatorCalls | None]:
    """Runs a program to its end as under a profiler, and returns the calls of its step of operators."""
    path = folder / "capture.operators.gz"
    variables: Any = make_hook_variables(TO_END, operators=path)
    ran = run(folder, text, TO_END, **variables)
    return ran, read_operator_calls(path)[1] if path.exists() else None


def run_calls(folder: Path, text: str) -> OperatorCalls:
    ran, calls = run_with_operators(folder, text)
    assert (ran.code, ran.err) == (0, "")
    assert calls is not None
    return calls


def names(calls: OperatorCalls) -> list[str]:
    return [calls.signatures[index].name for index in calls.signature]


def place(calls: OperatorCalls, index: int) -> tuple[str, str]:
    """The line (without the file) and the module of a call."""
    line, module = calls.line[index], calls.module[index]
    return calls.lines[line].partition(":")[2] if line >= 0 else "", calls.modules[module] if module >= 0 else ""


def matmuls(calls: OperatorCalls, phase: str) -> Counter[tuple[str, str]]:
    """The number of matmuls of a phase by line and module."""
    products = [name in ("aten::addmm", "aten::mm") for name in names(calls)]
    return Counter(place(calls, index) for index in np.flatnonzero(calls.in_phase(phase) & np.array(products)).tolist())


#: The lines of a block's forward pass, as files of operators name them.
UP, DOWN = (f"{TRAINING[: TRAINING.index(code)].count(chr(10)) + 1} in forward" for code in ("h = t", "return self.d"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_call_has_its_phase_line_and_module(reentrant: bool, tmp_path: Path) -> None:
    calls = run_calls(tmp_path, TRAINING.replace("REENTRANT = False", f"REENTRANT = {reentrant}"))
    first = {(UP, "Net/first.up: Linear"): 1, (DOWN, "Net/first.down: Linear"): 1}
    last = {(UP, "Net/last.up: Linear"): 1, (DOWN, "Net/last.down: Linear"): 1}
    assert matmuls(calls, "forward") == first | last
    # A checkpoint that is not reentrant stops before the last matmul, because backward needs no output of it.
    assert matmuls(calls, "recomputed") == (last if reentrant else {(UP, "Net/last.up: Linear"): 1})
    # Two gradients for each layer: its weight's and its input's. The input of the first layer needs none.
    twice = dict.fromkeys(first | last, 2) | {(UP, "Net/first.up: Linear"): 1}
    assert matmuls(calls, "backward") == twice
    # SGD adds the gradient to each of the 2·2·2 weights and biases.
    assert names(calls)[-8:] == ["aten::add_"] * 8
    assert {calls.phases[phase] for phase in calls.phase[-8:]} == {"optimizer"}


def test_the_memory_of_each_call(tmp_path: Path) -> None:
    """A recomputed call makes a new value from the same input, and the optimizer's values outlast the step."""
    calls = run_calls(tmp_path, TRAINING)
    relu = [index for index, name in enumerate(names(calls)) if name == "aten::relu"]
    assert [calls.phases[calls.phase[index]] for index in relu] == ["forward", "forward", "recomputed"]
    (of_forward,), (again,) = calls.writes[relu[1]], calls.writes[relu[2]]
    read_later = {value for reads in calls.reads[relu[2] + 1 :] for value in reads}
    assert again in read_later
    assert of_forward not in read_later  # the checkpoint discarded it
    # The matmul before it reads the input, the weight and the bias.
    assert calls.reads[relu[1] - 1] == calls.reads[relu[2] - 1]
    assert {value for writes in calls.writes[-8:] for value in writes} <= calls.lasting
    assert {of_forward, again}.isdisjoint(calls.lasting)
    (shape,) = {calls.signatures[calls.signature[index]].inputs[0] for index in relu}
    assert (shape.shape, shape.dtype, shape.strides, shape.device) == ((4, 16), "float32", (16, 1), "cpu")


def test_gradients_that_accumulate(tmp_path: Path) -> None:
    calls = run_calls(
        tmp_path,
        f"{MODEL}\nfor _ in range(12):\n    for _ in range(3):\n        model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()",
    )
    forward = calls.in_phase("forward")
    assert Counter(calls.instance[forward].tolist()) == {1: 6, 2: 6, 3: 6}  # two blocks of addmm, relu and addmm


def test_inference_mode_shows_the_operators_of_a_composite_operator(tmp_path: Path) -> None:
    """Without an optimizer, a step is a call of the model. A cast copies, and a transposed tensor is copied, too."""
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)
    def forward(self, x):
        return self.layer(x).double().t().reshape(-1)
model = Net()
for _ in range(12):
    with torch.inference_mode():
        model(torch.randn(4, 8))
"""
    assert names(run_calls(tmp_path, text)) == [
        "aten::addmm", "aten::_to_copy", "aten::clone", "aten::_unsafe_view",
    ]  # fmt: skip


def test_the_line_after_which_images_are_stored_by_channel(tmp_path: Path) -> None:
    """The convolution restores channels_last, so only the copy, what reads it, and its gradient are by channel."""
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.sin(x.contiguous())
        return self.last(torch.relu(self.second(x)))
model = Net().to(torch.bfloat16, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.ones(2, 8, 6, 6, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
for _ in range(12):
    model(images).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    calls = run_calls(tmp_path, text)
    formats, forward = find_image_formats(calls), calls.in_phase("forward")
    assert formats.is_mixed
    called = names(calls)
    assert [called[index] for index in np.flatnonzero(formats.by_channel & forward)] == [
        "aten::clone", "aten::sin", "aten::convolution",
    ]  # fmt: skip
    copy, back = np.flatnonzero(formats.converts & forward)
    assert (called[copy], called[back]) == ("aten::clone", "aten::convolution")
    assert set(formats.origin[formats.by_channel & forward].tolist()) == {copy}
    assert place(calls, int(copy))[0] == "10 in forward"
    plain = run_calls(tmp_path, text.replace("x.contiguous()", "x"))
    assert not (find_image_formats(plain).by_channel & plain.in_phase("forward")).any()


def test_parts_of_a_class_of_tensors_are_described_and_sparse_tensors_have_no_memory(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
from torch.utils._pytree import tree_map
class Pair(torch.Tensor):
    @staticmethod
    def __new__(cls, low): return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)
    def __init__(self, low): self.low = low
    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        inner = tree_map(lambda value: value.low if isinstance(value, Pair) else value, (arguments, keywords or {}))
        return Pair(function(*inner[0], **inner[1]))
model = nn.Embedding(20, 8, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    torch.exp(Pair(torch.ones(2, 3)))
    torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(torch.ones(5, 2))
    torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    model(torch.randint(20, (4,))).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    calls = run_calls(tmp_path, text)
    assert {"aten::exp", "aten::cos", "aten::embedding"} <= set(names(calls))  # the derivative of sin is cos
    product = calls.signatures[calls.signature[names(calls).index("aten::mm")]]
    left, right, out = product.inputs  # the operator writes its third argument without reading it
    assert (left.shape, right.shape, out, product.outputs[0].shape) == ((2, 3), (3, 4), None, (2, 4))
    exp = calls.signatures[calls.signature[names(calls).index("aten::exp")]]
    assert exp.inputs[0].strides == (3, 1)  # of the tensor inside


PLAIN = TRAINING.replace("for _ in range(12):", "for i in range(12):")
CHANGES = {
    "nothing": ("", ""),
    "a failing operator that the program catches": (
        "    loss = model",
        "    try: torch.ones(2, 3) @ torch.ones(2, 3)\n    except RuntimeError: print('caught')\n    loss = model",
    ),
    "a mode of the program inside the step": (
        "    loss.backward()",
        "    from torch.utils.flop_counter import FlopCounterMode\n"
        "    with FlopCounterMode(display=False) as counter: loss.backward()\n    print(counter.get_total_flops())",
    ),
    "threads": (
        "    loss.backward()",
        "    import threading; thread = threading.Thread(target=loss.backward); thread.start(); thread.join()",
    ),
    "a loader": (
        "    loss.backward()",
        "    print(next(iter(torch.utils.data.DataLoader(torch.arange(4.), num_workers=1))))\n    loss.backward()",
    ),
    "a tensor that must be freed": (
        "    loss.backward()",
        "    import weakref; h = loss * 2; dead = weakref.ref(h.untyped_storage()); del h; print(dead())\n"
        "    loss.backward()",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_does_as_without_the_step(change: tuple[str, str], tmp_path: Path) -> None:
    text = PLAIN.replace(*change)
    plain = run(tmp_path, text, None)
    ran, calls = run_with_operators(tmp_path, text)
    assert (ran.code, ran.out, ran.err) == (plain.code, plain.out, plain.err) == (0, plain.out, "")
    assert calls


ENDS = {
    "a mode around the steps": (
        PLAIN.replace(
            "for i in",
            "from torch.utils.flop_counter import FlopCounterMode\ncounter = FlopCounterMode(display=False)\n"
            "counter.__enter__()\nfor i in",
        )
        + "counter.__exit__(None, None, None); print(counter.get_total_flops())",
        "RuntimeError: the program uses a TorchDispatchMode, such as FlopCounterMode",
    ),
    "the program ends": (PLAIN.replace("range(12)", "range(7)"), "the program ended after the measured steps"),
    "an error of ours": (
        "import sys, torch\ndef fail(*_): raise KeyError('ours')\n"
        "if operators := sys.modules.get('_nsys_analyze_hooks.operators'): operators._find_line = fail\n" + PLAIN,
        "KeyError: 'ours'",
    ),
    "a call of the model fails": (
        f"{MODEL}\nwith torch.no_grad():\n    for i in range(12):\n"
        "        try: print(float(model(torch.ones(4, 9 if i == 7 else 8)).sum()))\n"
        "        except RuntimeError: print('caught')",
        None,
    ),
}


@pytest.mark.parametrize(("text", "message"), ENDS.values(), ids=ENDS)
def test_a_step_that_is_not_recorded(text: str, message: str | None, tmp_path: Path) -> None:
    plain = run(tmp_path, text, None)
    ran, calls = run_with_operators(tmp_path, text)
    assert (ran.code, ran.out) == (plain.code, plain.out) == (0, plain.out)
    assert ran.err == (f"nsys-analyze: operators are not recorded: {message}\n" if message else "")
    assert calls is None


def record(folder: Path, text: str, *, operators: bool = True) -> tuple[int, Trace]:
    """Records a program with the torch recorder, and returns how it ended, and its trace."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text)
    asked = replace(ASKED, stacks=False, operators=operators)
    capture = folder / "capture.json.gz"
    recorder = [sys.executable, "-m", "nsys_analyzer.capture.recorder", "--output", str(capture), "--"]
    variables = make_hook_variables(asked, operators=folder / "capture.operators.gz")
    ended = subprocess.run(
        [*recorder, str(folder / "program.py")],
        capture_output=True, text=True, timeout=LONGEST_S, env={**os.environ, **variables}, cwd=folder,
    )  # fmt: skip
    return ended.returncode, Trace.load(capture)


def step_kernels(trace: Trace) -> list[list[str]]:
    """The operators of each step in order."""
    ranges, operations = trace.ranges, trace.operations
    steps = np.array([ranges.names[name] == "step" for name in ranges.name])
    found = []
    for start, end in sorted(zip(ranges.start[steps].tolist(), ranges.end[steps].tolist(), strict=True)):
        inside = np.flatnonzero((operations.start >= start) & (operations.start < end))
        inside = inside[np.argsort(operations.start[inside], kind="stable")]
        found.append([operations.names[name] for name in operations.name[inside].tolist()])
    return found


def test_a_trace_without_the_step(tmp_path: Path) -> None:
    """Recorded, shared and exported: the measured steps are there, and the step of operators is in none of them."""
    code, trace = record(tmp_path / "with", TRAINING)
    assert code == 0
    without_code, plain = record(tmp_path / "without", TRAINING, operators=False)
    assert without_code == 0
    kernels = step_kernels(trace)
    assert len(kernels) == 4
    # The first step may differ: PyTorch's profiler itself calls operators when it starts.
    assert kernels[1:] == step_kernels(plain)[1:]
    assert not plain.operator_steps
    assert not any("nsys-analyze" in name for name in trace.ranges.names)
    (step,) = trace.operator_steps.values()
    relu = [index for index, name in enumerate(names(step.calls)) if name == "aten::relu"]
    assert len(relu) == 3
    assert set(relu) <= set(step.call.tolist())

    shared = tmp_path / "shared/small.sqlite"
    for keep_source in (False, True):
        share(tmp_path / "with/capture.json.gz", shared, force=True, keep_source=keep_source)
        copy = Trace.load(shared)
        assert list(map(len, step_kernels(copy))) == list(map(len, kernels))
        assert len(copy.operations) == len(trace.operations)
        assert bool(copy.operator_steps) == keep_source
    timeline = tmp_path / "capture.pftrace"
    export([tmp_path / "with/capture.json.gz"], timeline, "perfetto")
    assert b"nsys-analyze operator" not in timeline.read_bytes()


def test_a_program_that_fails_in_the_step_keeps_its_measured_steps(tmp_path: Path) -> None:
    code, trace = record(tmp_path, PLAIN.replace("    loss.backward()", "    assert i < 7\n    loss.backward()"))
    assert code == 1
    assert len(step_kernels(trace)) == 4
    assert not trace.operator_steps
    assert not any("nsys-analyze" in name for name in trace.ranges.names)


def test_graph_breaks_and_recompilations(tmp_path: Path) -> None:
    """Steps 0 to 4 have four rows, and step 5, the third measured step, has six, so that it is compiled again."""
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y * 2
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, dynamic=False, backend="eager")
for i in range(12):
    compiled(torch.ones(4 if i < 5 else 6, 8)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    found = run(tmp_path, text).results["compiled"]
    (line,) = found["graph_breaks"]
    assert line.startswith("program.py:10 in forward: ")
    assert {re.sub(r":.*", "", place): count for place, count in found["recompiles"].items()} == {"program.py": 1}
    (place,) = (place for place in found["recompiles"] if place.startswith("program.py:8 in forward"))
    assert "size mismatch at index 0. expected 4, actual 6" in place


def test_the_transformer_records_its_operators(tmp_path: Path) -> None:
    path = tmp_path / "capture.operators.gz"
    words = ["--model", "small", "--num-layers", "2", "--context-length", "16", "--device", "cpu", "--steps", "1"]
    target = [sys.executable, "-m", "profiling_targets.transformer", *words, "--warmup", "0"]
    ended = subprocess.run(
        target, capture_output=True, text=True, timeout=LONGEST_S, env={**os.environ, FILE_VARIABLE: str(path)}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "over 1 steps" in ended.stdout
    _, calls = read_operator_calls(path)
    products = Counter(
        calls.phases[calls.phase[index]] for index, name in enumerate(names(calls)) if name in ("aten::mm", "aten::bmm")
    )
    # Nine matmuls per layer and the head's. Each has two gradients.
    assert products == {"forward": 9 * 2 + 1, "backward": 2 * (9 * 2 + 1)}
    places = [place(calls, index) for index in range(len(calls))]
    lines = {line for line, module in places if module == "Transformer/norm: RMSNorm"}
    assert lines == {f"{number} in forward" for number in (40, 41)}  # in fp32, line 39 does nothing
