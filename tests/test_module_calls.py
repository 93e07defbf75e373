"""The calls of modules among ranges, and the call that a kernel of forward or backward belongs to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.calls import (
    CallFinder,
    ModuleCalls,
    find_module_calls,
    find_parents,
    split_module_path,
)
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.summary.summarize import summarize
from tests.support.export import AUTOGRAD, GEMM, MAIN, PID, Export
from tests.support.kineto import AUTOGRAD as KINETO_AUTOGRAD
from tests.support.kineto import Kineto

CALL = "torch.nn.modules.Module.__call__"
ENGINE = "autograd::engine::evaluate_function: "


def attributed(trace: Export | Kineto, tmp_path: Path) -> AttributedTrace:
    name = "t.sqlite" if isinstance(trace, Export) else "t.json"
    return AttributedTrace(Trace.load(trace.write(tmp_path / name)))


def calls_of(trace: Export | Kineto, tmp_path: Path) -> ModuleCalls:
    calls = find_module_calls(attributed(trace, tmp_path))
    assert calls is not None
    return calls


def called(calls: ModuleCalls) -> list[str]:
    """The path of each call in the order of the file."""
    return [".".join(calls.paths[code]) for code in calls.path.tolist()]


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_range_that_holds_the_path_is_a_call_of_that_module(tmp_path: Path) -> None:
    """The path and the class are those in the name, whatever lies around; two calls of a module have one path."""
    export = Export().range("nn.Module: GPT: GPT", 0, 90).range("nn.Module: GPT/h.0.attn: Attention", 10, 40)
    export.range("something else", 20, 30).range("nn.Module: GPT/h.0.attn: Attention", 50, 80)
    calls = calls_of(export, tmp_path)
    assert dict(zip(calls.paths, calls.kinds, strict=True)) == {("GPT",): "GPT", ("GPT", "h", "0", "attn"): "Attention"}
    assert called(calls) == ["GPT", "GPT.h.0.attn", "GPT.h.0.attn"]
    assert calls.source == "the ranges of nsys-analyze run --modules"


@pytest.mark.parametrize(
    ("text", "path"),
    [("GPT", ("GPT",)), ("GPT/h.0.attn", ("GPT", "h", "0", "attn")), ("Net/fc", ("Net", "fc"))],
)
def test_the_words_of_a_path_are_parted_by_slash_and_dot(text: str, path: tuple[str, ...]) -> None:
    """``GPT/h.0.attn`` has four words."""
    assert split_module_path(text) == path


@pytest.mark.parametrize("name", ["nn.Module: Block_{}", "nn.Module: M/{}: Block"])
def test_of_very_many_nested_calls_the_deepest_are_part_of_the_hundredth(tmp_path: Path, name: str) -> None:
    """Each of 700 ranges lies in the one before, and the last one launches a kernel."""
    export = Export().gpu().range("forward", 0, 10_000)
    for depth in range(700):
        said = ".".join(["x"] * (depth + 1)) if "/" in name else depth
        export.range(name.format(said), 10 + depth, 9_990 - depth)
    export.kernel(GEMM, 800, 900, 1_000)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert summary.modules
    # Their paths have a hundred words; the second kind's outermost has two.
    assert max(module.depth for module in summary.modules.modules) == (98 if "/" in name else 99)


def test_calls_of_the_profiler_have_paths_by_nesting_and_order(tmp_path: Path) -> None:
    """A number counts the calls of one class inside one call; the profiler's own number does not matter."""
    trace = Kineto().operator("aten::mm", 12, 5)
    for at in (0, 100):  # two steps: the model and its first layer are the same ones
        trace.module("Sequential_0", at, 90).module("Linear_7", at + 10, 20).module("ReLU_0", at + 40, 10)
        trace.module("Linear_3", at + 60, 20)
    calls = calls_of(trace, tmp_path)
    step = ["Sequential", "Sequential.Linear[0]", "Sequential.ReLU[0]", "Sequential.Linear[1]"]
    assert called(calls) == step * 2
    assert dict(zip(map(".".join, calls.paths), calls.kinds, strict=True)) == {
        "Sequential": "Sequential",
        "Sequential.Linear[0]": "Linear",
        "Sequential.Linear[1]": "Linear",
        "Sequential.ReLU[0]": "ReLU",
    }
    assert calls.source == "the module calls that PyTorch's profiler wrote"


def test_a_call_of_nsys_has_the_class_of_the_forward_right_inside(tmp_path: Path) -> None:
    """A call without one is a ``Module``; the forward of a module inside is not its own."""
    export = Export().range(CALL, 0, 90)
    export.range(CALL, 10, 40).range("torch.nn.modules.LayerNorm.forward", 15, 35)
    export.range(CALL, 50, 80).range("torch.nn.modules.Linear.forward", 55, 75)
    calls = calls_of(export, tmp_path)
    assert called(calls) == ["Module", "Module.LayerNorm[0]", "Module.Linear[0]"]
    assert calls.kinds == ("Module", "LayerNorm", "Linear")
    assert calls.source == "the module calls that nsys wrote"


def test_calls_of_two_threads_do_not_nest(tmp_path: Path) -> None:
    """A call on another thread lies beside the one that is open on this."""
    export = Export().thread(200, "worker").range(CALL, 0, 90).range(CALL, 10, 40, tid=200).range(CALL, 50, 80)
    assert called(calls_of(export, tmp_path)) == ["Module", "Module", "Module.Module[0]"]


def test_numbered_ranges_of_the_program_are_modules(tmp_path: Path) -> None:
    """Their names are their paths, without a class; what lies in no phase or in warm-up is left out."""
    export = Export().range("warmup", 0, 50).range("forward", 10, 40).range("block 0", 20, 30)
    export.range("block 0", 60, 70)  # in no phase
    export.range("forward", 100, 200).range("warm_up", 101, 105)
    for block, at in enumerate((110, 150)):
        export.range(f"block {block}", at, at + 30).range("mlp", at + 5, at + 25)
    calls = calls_of(export, tmp_path)
    # The one inside the phase in warm-up is a call, whose kernels are not measured.
    assert called(calls) == ["block 0", "block 0", "block 0.mlp", "block 1", "block 1.mlp"]
    assert set(calls.kinds) == {""}
    assert calls.source == "the program's own ranges"


@pytest.mark.parametrize(
    "name", ["block 0", "h.3", "Layer_12", "decoder-1", "TransformerBlock 4", "stage2", "layers 7"]
)
def test_names_of_layers_with_a_number_tell_modules(tmp_path: Path, name: str) -> None:
    """A word for a layer and a number."""
    assert called(calls_of(Export().range("forward", 0, 90).range(name, 10, 40), tmp_path)) == [name]


@pytest.mark.parametrize("name", ["epoch 3", "batch 1", "norm 1", "blocks", "attention", "chapter 3"])
def test_other_ranges_tell_no_modules(tmp_path: Path, name: str) -> None:
    """A number behind another word, or a word without a number."""
    assert find_module_calls(attributed(Export().range("forward", 0, 90).range(name, 10, 40), tmp_path)) is None


def test_operators_with_numbers_make_modules_of_any_range_of_the_program(tmp_path: Path) -> None:
    """They tell what backward is of; the operators themselves are no modules."""
    export = Export().range("forward", 0, 90).range("attention", 10, 40)
    assert find_module_calls(attributed(export, tmp_path)) is None
    export.range("aten::mm, seq = 3, op_id = 1", 20, 30).range("aten::empty", 32, 34)
    assert called(calls_of(export, tmp_path)) == ["attention"]


@pytest.mark.parametrize("name", ["ProfilerStep#3", "Optimizer.zero_grad#AdamW.zero_grad", "torch.optim.AdamW.step"])
def test_a_range_of_a_framework_is_no_module(tmp_path: Path, name: str) -> None:
    """Neither beside the program's own nor alone."""
    export = Export().range("forward", 0, 90).range(name, 10, 20)
    assert find_module_calls(attributed(export, tmp_path)) is None
    assert called(calls_of(export.range("block 0", 30, 40), tmp_path)) == ["block 0"]


def test_what_says_more_of_a_module_comes_first(tmp_path: Path) -> None:
    """Ranges with a path, then the profiler's calls, then nsys's, then the program's own."""
    export = Export().range("forward", 0, 90).range("block 0", 10, 80)
    assert called(calls_of(export, tmp_path)) == ["block 0"]
    assert called(calls_of(export.range(CALL, 15, 75), tmp_path)) == ["Module"]
    assert called(calls_of(export.range("nn.Module: Linear_3", 20, 70), tmp_path)) == ["Linear"]
    assert called(calls_of(export.range("nn.Module: Net/fc: Linear", 25, 65), tmp_path)) == ["Net.fc"]


@pytest.mark.parametrize(
    "export",
    [
        Export().kernel(GEMM, 10, 20, 30),
        Export().range("forward", 0, 90).kernel(GEMM, 10, 20, 30),
        Export().range("block 0", 0, 90).kernel(GEMM, 10, 20, 30),  # in no phase
        Export().range("forward", 0, 90).range("aten::mm, seq = 3, op_id = 1", 10, 40),
        Export().range("forward", 0, 90).range("attention", 5, 50).range("aten::mm", 10, 40),  # no number
    ],
)
def test_without_a_range_that_names_one_there_are_no_modules(tmp_path: Path, export: Export) -> None:
    """None, where nothing is known."""
    assert find_module_calls(attributed(export, tmp_path)) is None


def test_the_parent_of_a_range_is_the_innermost_one_around_it() -> None:
    """In its own group; of two equal ones the second lies in the first, and one that ends later is no child."""
    #                 0       1       2       3       4       5       6
    group = np.array([1, 1, 1, 2, 1, 1, 1])
    start = np.array([0, 10, 20, 25, 50, 50, 85])
    end = np.array([90, 40, 30, 28, 60, 60, 95])
    # 1 and 4 lie in 0, 2 in 1, 5 in 4; 3 is of another group, 6 goes across the end of 0.
    assert find_parents(group, start, end).tolist() == [-1, 0, 1, -1, 0, 4, -1]


# --- places ----------------------------------------------------------------------------------------------------------


def launch(export: Export, name: str, at: int, tid: int = MAIN, pid: int = PID) -> Export:
    """A kernel of 3 ns, launched at a time."""
    return export.kernel(name, at, at + 2, at + 5, tid=tid, pid=pid)


def node(export: Export, name: str, sequence: int | None, at: int, tid: int = AUTOGRAD, pid: int = PID) -> Export:
    """A node as it runs: the engine's range [at, at + 20), in which the node is [at + 2, at + 12)."""
    number = "" if sequence is None else f", seq = {sequence}"
    export.range(f"{ENGINE}{name}, op_id = {at}", at, at + 20, tid=tid, pid=pid)
    return export.range(f"{name}{number}, op_id = {at + 1}", at + 2, at + 12, tid=tid, pid=pid)


def forward(pid: int = PID, tid: int = MAIN, export: Export | None = None, *, first: int = 7) -> Export:
    """A forward [0, 100) of two modules: ``fc`` has the operator 7, ``act`` the operator 8; backward is [100, 900)."""
    export = export or Export()
    export.thread(AUTOGRAD, "pt_autograd_0", pid).range("forward", 0, 100, tid, pid).range(
        "backward", 100, 900, tid, pid
    )
    export.range("nn.Module: Net: Net", 5, 95, tid, pid)
    export.range("nn.Module: Net/fc: Linear", 10, 40, tid, pid)
    export.range(f"aten::addmm, seq = {first}, op_id = 1", 15, 35, tid, pid)
    export.range("nn.Module: Net/act: ReLU", 50, 80, tid, pid)
    return export.range(f"aten::relu, seq = {first + 1}, op_id = 2", 55, 75, tid, pid)


def places(trace: Export | Kineto, tmp_path: Path) -> dict[str, str]:
    """The path of the module that each kernel belongs to, by the kernel's name; empty for none."""
    found = attributed(trace, tmp_path)
    calls = find_module_calls(found)
    assert calls is not None
    operations = found.trace.operations
    call = CallFinder(found, calls).calls_of_operations(np.arange(len(operations)))
    paths = [".".join(calls.paths[calls.path[one]]) if one >= 0 else "" for one in call.tolist()]
    return dict(zip([operations.names[i] for i in operations.name.tolist()], paths, strict=True))


def test_a_kernel_of_forward_is_of_the_innermost_call(tmp_path: Path) -> None:
    """At the moment of its launch, whenever it runs."""
    export = launch(launch(launch(forward(), "a", 20), "b", 45), "c", 60)
    export.kernel("late", 30, 500, 510)
    assert places(launch(export, "d", 97), tmp_path) == {
        "a": "Net.fc", "b": "Net", "c": "Net.act", "late": "Net.fc", "d": "",
    }  # fmt: skip


def test_a_range_on_autograds_thread_outranks_the_number_of_a_node(tmp_path: Path) -> None:
    """The hooks of ``run --modules`` open it; the node 8 inside is ``act``'s."""
    export = forward().range("nn.Module: Net/fc: Linear", 200, 260, AUTOGRAD)
    launch(node(export, "ReluBackward0", 8, 210), "inside", 215, AUTOGRAD)
    launch(node(export, "ReluBackward0", 8, 300), "outside", 305, AUTOGRAD)
    assert places(export, tmp_path) == {"inside": "Net.fc", "outside": "Net.act"}


def test_a_node_is_of_the_call_around_the_operator_with_its_number(tmp_path: Path) -> None:
    """Node 8 is of ``act``, node 7 of ``fc``, in the order of backward; between them nothing is known."""
    export = forward()
    launch(node(export, "ReluBackward0", 8, 200), "relu", 205, AUTOGRAD)
    launch(export, "between", 225, AUTOGRAD)
    launch(node(export, "AddmmBackward0", 7, 230), "addmm", 235, AUTOGRAD)
    assert places(export, tmp_path) == {"relu": "Net.act", "between": "", "addmm": "Net.fc"}


def test_what_the_engine_does_around_a_node_is_of_the_node(tmp_path: Path) -> None:
    """The node 8 is open until 212, the engine's range until 220: a sum of gradients is launched at 215."""
    export = node(forward(), "ReluBackward0", 8, 200).range("aten::add_", 213, 218, AUTOGRAD)
    assert places(launch(export, "add_", 215, AUTOGRAD), tmp_path) == {"add_": "Net.act"}


@pytest.mark.parametrize("name", ["AccumulateGrad", "torch::autograd::AccumulateGrad"])
def test_a_gradient_is_added_up_for_the_node_before(tmp_path: Path, name: str) -> None:
    """It has no number; before the first node of its thread it is of nothing."""
    export = forward().thread(AUTOGRAD + 1, "pt_autograd_1")
    launch(node(export, name, None, 200), "first", 205, AUTOGRAD)
    node(export, "AddmmBackward0", 7, 230)
    launch(node(export, name, None, 260), "behind fc", 265, AUTOGRAD)
    launch(node(export, name, None, 260, AUTOGRAD + 1), "other thread", 265, AUTOGRAD + 1)
    node(export, "ReluBackward0", 8, 290)
    launch(node(export, name, None, 320), "behind act", 325, AUTOGRAD)
    assert places(export, tmp_path) == {
        "first": "", "behind fc": "Net.fc", "other thread": "", "behind act": "Net.act",
    }  # fmt: skip


def test_a_node_without_a_number_is_not_of_the_node_before(tmp_path: Path) -> None:
    """Only what adds up a gradient is."""
    export = node(forward(), "AddmmBackward0", 7, 230)
    assert places(launch(node(export, "CustomBackward", None, 260), "custom", 265, AUTOGRAD), tmp_path) == {
        "custom": ""
    }


def test_the_profiler_writes_a_number_for_the_engines_work_too(tmp_path: Path) -> None:
    """The same rule on a trace of PyTorch's profiler: times are µs."""
    trace = Kineto().thread(KINETO_AUTOGRAD, "pt_autograd_0").gpu()
    trace.range("forward", 0, 100).range("backward", 100, 400).module("Net_0", 5, 90).module("Linear_0", 10, 30)
    trace.operator("aten::addmm", 15, 20, sequence=7).module("ReLU_0", 50, 30)
    trace.operator("aten::relu", 55, 20, sequence=8)
    for number, name, at in ((8, "ReluBackward0", 200), (7, "AddmmBackward0", 300)):
        for called, start, length in ((ENGINE + name, at, 20), (name, at + 2, 10)):
            trace.operator(called, start, length, tid=KINETO_AUTOGRAD, sequence=number, forward_thread=1)
        trace.launch(number, at + 15, tid=KINETO_AUTOGRAD).kernel(name, number, at + 17, 3)
    assert places(trace, tmp_path) == {"ReluBackward0": "Net.ReLU[0]", "AddmmBackward0": "Net.Linear[0]"}


def test_a_forward_that_runs_again_in_backward_is_of_its_module(tmp_path: Path) -> None:
    """By the hook's range on autograd's thread, whose operators have numbers of that thread's own."""
    export = node(forward(), "CheckpointFunctionBackward", 8, 200)
    export.range("nn.Module: Net/fc: Linear", 203, 210, AUTOGRAD)
    export.range("aten::addmm, seq = 7, op_id = 3", 204, 208, AUTOGRAD)
    assert places(launch(export, "again", 206, AUTOGRAD), tmp_path) == {"again": "Net.fc"}


def test_a_forward_that_runs_again_without_ranges_is_of_the_checkpoints_module(tmp_path: Path) -> None:
    """Its operators are no nodes, however many: the node that runs is the checkpoint's, number 8, of ``act``."""
    export = node(forward(), "CheckpointFunctionBackward", 8, 200)
    for number in range(3):
        export.range(f"aten::addmm, seq = {number}, op_id = 3", 204 + number, 205 + number, AUTOGRAD)
    assert places(launch(export, "again", 206, AUTOGRAD), tmp_path) == {"again": "Net.act"}


def test_the_backward_pass_of_a_checkpoint_is_of_its_module(tmp_path: Path) -> None:
    """Its nodes have numbers of autograd's own thread: 7 there is not the 7 of ``fc``; the checkpoint is of ``act``."""
    export = forward().range(f"{ENGINE}CheckpointFunctionBackward, op_id = 9", 200, 300, AUTOGRAD)
    export.range("CheckpointFunctionBackward, seq = 8, op_id = 10", 202, 290, AUTOGRAD)
    export.range("aten::addmm, seq = 7, op_id = 11", 210, 220, AUTOGRAD)
    node(export, "AddmmBackward0", 7, 240)
    assert places(launch(export, "inner", 246, AUTOGRAD), tmp_path) == {"inner": "Net.act"}


def test_a_range_of_the_programs_own_around_backward_is_no_module(tmp_path: Path) -> None:
    """``scaled loss`` lies around all of backward; the node's number says ``block 0``."""
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("forward", 0, 100).range("block 0", 10, 90)
    export.range("aten::mm, seq = 5, op_id = 1", 20, 40).range("backward", 100, 300).range("scaled loss", 110, 290)
    node(export, "MmBackward0", 5, 150)
    assert places(launch(export, "gradient", 155, AUTOGRAD), tmp_path) == {"gradient": "block 0"}


def test_numbers_are_those_of_the_thread_with_most_operators(tmp_path: Path) -> None:
    """A second thread counts from the same number: its one operator 7 does not hide that of ``fc``."""
    export = forward().thread(300, "loader").range("nn.Module: Net/act: ReLU", 20, 90, 300)
    export.range("aten::stack, seq = 7, op_id = 9", 30, 40, 300)
    assert places(launch(node(export, "AddmmBackward0", 7, 200), "addmm", 205, AUTOGRAD), tmp_path) == {
        "addmm": "Net.fc"
    }


def test_each_process_has_numbers_of_its_own(tmp_path: Path) -> None:
    """Of two processes the first has 7 in ``fc``, the second in ``act``, whose operators carry 6 and 7."""
    export = forward(export=forward(), pid=PID + 1, first=6)
    for pid in (PID, PID + 1):
        launch(node(export, "SomeBackward0", 7, 200, pid=pid), f"of {pid}", 205, AUTOGRAD, pid)
    assert places(export, tmp_path) == {f"of {PID}": "Net.fc", f"of {PID + 1}": "Net.act"}


@pytest.mark.parametrize(("number", "module"), [(6, ""), (7, "Net.fc"), (8, "Net.fc"), (9, "Net.act"), (12, "Net.act")])
def test_a_number_that_no_operator_carries_is_of_the_one_below(tmp_path: Path, number: int, module: str) -> None:
    """``copy_`` into a slice makes two nodes and carries the first's number; below all numbers nothing is known."""
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("forward", 0, 100).range("backward", 100, 900)
    export.range("nn.Module: Net/fc: Linear", 10, 40).range("aten::copy_, seq = 7, op_id = 1", 15, 35)
    export.range("nn.Module: Net/act: ReLU", 50, 80).range("aten::relu, seq = 9, op_id = 2", 55, 75)
    export = launch(node(export, "CopySlices", number, 200), "copy", 205, AUTOGRAD)
    assert places(export, tmp_path) == {"copy": module}


def test_an_operator_that_starts_behind_a_node_has_not_made_it(tmp_path: Path) -> None:
    """The next forward carries 9 in ``fc`` first; node 9 ran before that, and is of ``act``, number 8."""
    export = node(forward(), "CopySlices", 9, 200).range("forward", 1000, 1100)
    export.range("nn.Module: Net/fc: Linear", 1010, 1040).range("aten::addmm, seq = 9, op_id = 5", 1015, 1035)
    assert places(launch(export, "early", 205, AUTOGRAD), tmp_path) == {"early": "Net.act"}


def test_backward_on_the_thread_of_forward_is_known_by_numbers_too(tmp_path: Path) -> None:
    """The engine runs on the calling thread where it has no other; its nodes have made none."""
    export = node(node(forward(), "ReluBackward0", 8, 200, MAIN), "AddmmBackward0", 7, 230, MAIN)
    launch(launch(export, "relu", 205), "addmm", 235)
    assert places(export, tmp_path) == {"relu": "Net.act", "addmm": "Net.fc"}


def test_a_node_that_runs_inside_another_is_of_its_own_module(tmp_path: Path) -> None:
    """The backward of ``act`` runs that of ``fc`` itself, from 204 to 206."""
    export = node(forward(), "CustomBackward", 8, 200).range("AddmmBackward0, seq = 7, op_id = 3", 204, 206, AUTOGRAD)
    launch(launch(export, "inside", 205, AUTOGRAD), "behind", 208, AUTOGRAD)
    assert places(export, tmp_path) == {"inside": "Net.fc", "behind": "Net.act"}
