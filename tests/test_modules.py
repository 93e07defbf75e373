"""The time and the FLOPs of modules: their sums, what is counted, and layers of one kind as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.modules import (
    Module,
    Modules,
    Outlier,
    Work,
    fold_modules,
    with_flops,
    with_tokens,
)
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.report.sections.modules import _describe_expert_load, answer_modules
from nsys_analyzer.text import plain
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature, Tensor
from nsys_analyzer.trace.schema import NS_PER_MS
from tests.support.cases import make_case_test
from tests.support.export import AUTOGRAD, GEMM, MAIN, Export
from tests.support.ranks import KERNELS

RealCapture = Callable[[str], Path]
RealSummary = Callable[[str], CaptureSummary]
NOTHING = Work(0.0, 0.0)


def summaries(export: Export, path: Path) -> tuple[CaptureSummary, ...]:
    return summarize(Trace.load(export.write(path)), "t")


def in_ns(work: Work) -> float:
    return round(work.ms * NS_PER_MS, 3)


def times(modules: Modules | None) -> dict[str, tuple[float, float]] | None:
    """Returns forward and backward of each module by its path, ns; None where there are no modules."""
    return modules and {one.path: (in_ns(one.forward), in_ns(one.backward)) for one in modules.modules}


def outside(modules: Modules) -> tuple[float, float]:
    return in_ns(modules.outside_forward), in_ns(modules.outside_backward)


test_modules = make_case_test(
    "modules",
    {
        "times": lambda capture: times(capture.summary.modules),
        "outside": lambda capture: capture.summary.modules and outside(capture.summary.modules),
        "communication": lambda capture: (
            in_ns(capture.summary.modules.communication_forward), in_ns(capture.summary.modules.communication_backward)
        ),
        "labels": lambda capture: [(one.label, one.depth, one.kind) for one in capture.summary.modules.modules],
        "own times": lambda capture: [
            (round(one.own_forward_ms * NS_PER_MS, 3), round(one.own_backward_ms * NS_PER_MS, 3))
            for one in capture.summary.modules.modules
        ],
    },
)  # fmt: skip


def all_ns(summary: CaptureSummary, units: int) -> tuple[int, int]:
    """What modules and the rest say of forward and backward over so many units."""
    assert summary.modules is not None
    sums = (summary.modules.forward_ms, summary.modules.backward_ms)
    forward, backward = (round(ms * units * NS_PER_MS) for ms in sums)
    return forward, backward


def phases_ns(summary: CaptureSummary) -> tuple[int, int]:
    """The kernel time of all phases in each direction, from the summaries of phases."""
    found = {True: 0, False: 0}
    for one in summary.phases:
        if one.phase not in ("optimizer", "step", "step without backward"):
            found[one.phase == "backward"] += round((one.kernel_time_ms.mean or 0) * one.instances * NS_PER_MS)
    return found[False], found[True]


@dataclass
class Tree:
    """A module: its own kernels in forward and in backward, each of so many ns, and the modules inside."""

    forward: Sequence[int]
    backward: Sequence[int]
    inside: Sequence[Tree]

    def sums(self) -> tuple[int, int]:
        """Of itself and all inside it."""
        below = [one.sums() for one in self.inside]
        return sum(self.forward) + sum(f for f, _ in below), sum(self.backward) + sum(b for _, b in below)

    def every(self, path: str) -> Iterator[tuple[str, Tree]]:
        yield path, self
        for number, one in enumerate(self.inside):
            yield from one.every(f"{path}.m{number}")


LENGTHS = st.lists(st.integers(1, 10**7), max_size=2)
TREES = st.recursive(
    st.builds(Tree, LENGTHS, LENGTHS, st.just(())),
    lambda inside: st.builds(Tree, LENGTHS, LENGTHS, st.lists(inside, max_size=3)),
    max_leaves=6,
)


@dataclass
class Program:
    """Writes a tree as a program that runs it: each module's call holds one operator, and its kernels."""

    export: Export = field(default_factory=lambda: Export().thread(AUTOGRAD, "pt_autograd_0"))
    clock: int = 0
    gpu_free: int = 0
    numbers: dict[str, int] = field(default_factory=dict)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def kernels(self, lengths: Sequence[int], tid: int) -> None:
        for length in lengths:
            launch = self.tick()
            start = max(launch, self.gpu_free) + 1
            self.gpu_free = start + length
            self.export.kernel(GEMM, launch, start, self.gpu_free, tid=tid)

    def call(self, tree: Tree, path: str) -> None:
        start, self.numbers[path] = self.tick(), len(self.numbers)
        number = self.tick()
        self.export.range(f"aten::mm, seq = {self.numbers[path]}, op_id = 1", number, self.tick())
        self.kernels(tree.forward, MAIN)
        for i, one in enumerate(tree.inside):
            self.call(one, f"{path}.m{i}")
        self.export.range(f"nn.Module: {path}: Module", start, self.tick())

    def step(self, tree: Tree, beside: tuple[Sequence[int], Sequence[int]]) -> None:
        start = self.tick()
        self.call(tree, "net")
        self.kernels(beside[0], MAIN)
        self.export.range("forward", start, self.tick())
        start = self.tick()
        for path, one in reversed(list(tree.every("net"))):
            began = self.tick()
            self.kernels(one.backward, AUTOGRAD)
            self.export.range(f"MmBackward0, seq = {self.numbers[path]}", began, self.tick(), AUTOGRAD)
        self.kernels(beside[1], AUTOGRAD)
        self.export.range("backward", start, self.tick())


@given(tree=TREES, beside=st.tuples(LENGTHS, LENGTHS))
def test_modules_and_the_rest_are_the_time_of_the_phases_exactly(
    tree: Tree, beside: tuple[Sequence[int], Sequence[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In ns: each module's sums, none below those of a module inside, and all of them those of the phases."""
    program = Program()
    program.step(tree, beside)
    (summary,) = summaries(program.export, tmp_path_factory.mktemp("tree") / "t.sqlite")
    forward, backward = tree.sums()
    if not any(one.forward or one.backward for _, one in tree.every("net")):
        assert summary.modules is None
        return
    assert summary.modules is not None
    assert times(summary.modules) == {path: one.sums() for path, one in tree.every("net") if any(one.sums())}
    assert outside(summary.modules) == (sum(beside[0]), sum(beside[1]))
    assert all_ns(summary, 1) == phases_ns(summary) == (forward + sum(beside[0]), backward + sum(beside[1]))
    around: list[Module] = []
    for one in summary.modules.modules:
        del around[one.depth :]
        assert not around or one.forward.ms <= around[-1].forward.ms
        assert not around or one.backward.ms <= around[-1].backward.ms
        around.append(one)


@pytest.mark.parametrize("name", ["functions_autograd_gpt2", "functions_trace_gpt2", "mem_small256"])
def test_modules_of_real_captures_are_the_time_of_the_phases_exactly(real_summary: RealSummary, name: str) -> None:
    """Three steps each: the outermost modules and the rest are forward (with loss) and backward in ns."""
    summary = real_summary(name)
    assert all_ns(summary, 3) == phases_ns(summary)
    assert summary.modules is not None
    own = sum(one.own_forward_ms for one in summary.modules.modules) + summary.modules.outside_forward.ms
    assert own == pytest.approx(summary.modules.forward_ms, rel=1e-12)


def test_the_numbers_of_operators_tell_the_modules_of_backward(real_summary: RealSummary) -> None:
    """``functions_autograd_gpt2``: nsys's calls name the modules, autograd's numbers lead backward to them."""
    summary = real_summary("functions_autograd_gpt2")
    modules = summary.modules
    assert modules is not None
    assert modules.forward_coverage == 1
    assert modules.backward_coverage is not None
    assert 0.99 < modules.backward_coverage < 1  # one kernel makes the first gradient
    assert modules.outside_backward.launches == 1
    # 12 layers, in each of which backward takes longer than forward.
    layers = [one for one in modules.modules if one.depth == 2 and one.kind == "Module"]
    assert len(layers) == 12
    assert all(one.backward.ms > one.forward.ms for one in layers)


def test_calls_without_numbers_tell_the_modules_of_forward_alone(real_summary: RealSummary) -> None:
    """``functions_trace_gpt2``: the same program without operators."""
    summary = real_summary("functions_trace_gpt2")
    assert summary.modules is not None
    assert summary.modules.forward_coverage == 1
    assert summary.modules.backward_coverage == 0
    assert all(one.backward == NOTHING for one in summary.modules.modules)


def test_softmax_has_a_backward_part(real_summary: RealSummary) -> None:
    """``mem_small256``: the program's own range around softmax has 5 kernels in each of 12 layers, and its backward."""
    summary = real_summary("mem_small256")
    assert summary.modules is not None
    assert summary.modules.source == "the program's own ranges"
    (softmax,) = (one for one in summary.modules.modules if one.label == "computing softmax")
    assert softmax.path == "scaled dot product attention.computing softmax"
    assert softmax.forward.launches == 12 * 5
    assert softmax.backward.ms > softmax.forward.ms > 0


# --- layers of one kind as one ---------------------------------------------------------------------------------------


def module(path: str, label: str, depth: int, kind: str = "Linear", forward: float = 1.0, own: float = 1.0) -> Module:
    """A module that takes so many ms in forward, in two launches, and twice that in backward, in three."""
    return Module(path, label, kind, depth, Work(forward, 2), Work(2 * forward, 3), own, 2 * own)


def model(layers: Sequence[float]) -> list[Module]:
    """GPT of some layers ``h.N`` of so many ms, in each of which is one ``attn`` of half that."""
    found = [module("GPT", "GPT", 0, "GPT", sum(layers), 0.0)]
    for number, ms in enumerate(layers):
        found.append(module(f"GPT.h.{number}", f"h.{number}", 1, "Block", ms, ms / 2))
        found.append(module(f"GPT.h.{number}.attn", "attn", 2, "Attention", ms / 2, ms / 2))
    return found


def written(text: str) -> list[Module]:
    """Modules from lines of a label, a class and ms in forward, each indented below the module around it."""
    found: list[Module] = []
    around: list[str] = []
    for line in text.strip("\n").splitlines():
        label, kind, ms = (word.strip() for word in line.split(","))
        depth = (len(line) - len(line.lstrip())) // 2
        around = [*around[:depth], label]
        found.append(module(".".join(around), label, depth, kind, float(ms)))
    return found


def test_the_layers_of_a_list_are_one_with_their_work_added_up() -> None:
    """Twelve of 2 ms, 4 ms in backward: ``h.*`` takes 24 and 48 ms, its attention half of that."""
    (_, layer, attention), outliers = fold_modules(model([2.0] * 12))
    assert (layer.path, layer.count, layer.forward, layer.backward) == ("GPT.h.*", 12, Work(24.0, 24), Work(48.0, 36))
    assert (layer.own_forward_ms, layer.own_backward_ms) == (12.0, 24.0)
    assert (attention.forward.ms, attention.own_forward_ms, attention.kind) == (12.0, 12.0, "Attention")
    assert outliers == ()


FOLDED = {
    "layers inside layers": (
        "".join(f"h.{i}, B, 2\n  x.0, M, 1\n    up, L, 1\n  x.1, M, 1\n    up, L, 1\n" for i in range(3)),
        [("h.*", 3, 6.0), ("h.*.x.*", 6, 6.0), ("h.*.x.*.up", 6, 6.0)],
    ),
    "of a Sequential": ("0, B, 1\n  fc, L, 1\n1, B, 1\n  fc, L, 1\n", [("*", 2, 2.0), ("*.fc", 2, 2.0)]),
    "places of calls": (
        "M[0], M, 1\n  L[0], L, 1\nM[1], M, 1\n  L[0], L, 1\n",
        [("M[*]", 2, 2.0), ("M[*].L[0]", 2, 2.0)],
    ),
    "another name": (
        "h.0, B, 1\n  fc, L, 1\ng.0, B, 1\n  fc, L, 1\n",
        [("h.0", 1, 1.0), ("h.0.fc", 1, 1.0), ("g.0", 1, 1.0), ("g.0.fc", 1, 1.0)],
    ),
    "they hold nothing": (  # `ln_1` and `ln_2` are two things, though their class is one
        "ln_1, L, 1\nln_2, L, 1\nfc1, L, 1\nfc2, L, 1\nL[0], L, 1\nL[1], L, 1\n",
        [(label, 1, 1.0) for label in ("ln_1", "ln_2", "fc1", "fc2", "L[0]", "L[1]")],
    ),
    "ranges of the program have no class and need hold nothing": (
        "block 0, , 1\nblock 1, , 1\n",
        [("block *", 2, 2.0)],
    ),
    "every second layer of another class": (
        "".join(f"h.{i}, {'Local' if i % 2 else 'Global'}, 1\n  fc, L, 1\n" for i in range(4)),
        [("h.*", 2, 2.0), ("h.*.fc", 2, 2.0)] * 2,
    ),
    "layers that hold different things": (
        "h.0, B, 1\n  attn, A, 1\nh.1, B, 1\n  mlp, A, 1\nh.2, B, 1\n",
        [("h.0", 1, 1.0), ("h.0.attn", 1, 1.0), ("h.1", 1, 1.0), ("h.1.mlp", 1, 1.0), ("h.2", 1, 1.0)],
    ),
    "different parents": (
        "".join(f"{half}, {half}, 2\n  0, Y, 1\n    fc, L, 1\n  1, Y, 1\n    fc, L, 1\n" for half in ("enc", "dec")),
        [
            (f"{half}{path}", count, 2.0)
            for half in ("enc", "dec")
            for path, count in (("", 1), (".*", 2), (".*.fc", 2))
        ],
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_modules_of_one_kind_beside_each_other_are_one(name: str) -> None:
    """Modules that hold another one, and whose labels differ in a number alone."""
    text, expected = FOLDED[name]
    assert [(one.path, one.count, one.forward.ms) for one in fold_modules(written(text))[0]] == expected


def test_flops_are_added_up_where_all_are_known() -> None:
    """Two layers of 10 and 30 are 40; with one unknown the sum is."""
    one, other = (
        replace(module(name, name, 0, ""), forward=Work(1.0, 2, flops)) for name, flops in (("h.0", 10), ("h.1", 30))
    )
    assert fold_modules([one, other])[0][0].forward.flops == 40
    unknown = replace(other, forward=replace(other.forward, flops=None))
    assert fold_modules([one, unknown])[0][0].forward.flops is None


@pytest.mark.parametrize(("ms", "differs"), [(1.19, False), (1.21, True), (0.81, False), (0.79, True)])
def test_a_layer_that_differs_by_more_than_a_fifth_from_the_median_is_named(ms: float, differs: bool) -> None:
    """Of 12 layers 11 take 1 ms and 2 ms in backward, so that the median is 3 ms; the fifth takes 3·ms.

    Its attention differs alike, but the layer says so.
    """
    found = fold_modules(model([1.0] * 4 + [ms] + [1.0] * 7))[1]
    layers = [one for one in found if not one.path.endswith("attn")]
    assert layers == ([Outlier("GPT.h.4", ms + 2 * ms, 3.0)] if differs else [])
    assert fold_modules(model([1.0, 3.0]))[1] == ()  # of two there is no telling which


def test_an_outlier_inside_layers_that_are_folded() -> None:
    """In each of two layers the third of three experts takes 2 ms, the others 1 ms; backward is twice that."""
    experts = "".join(f"  x.{i}, E, {2 if i == 2 else 1}\n    fc, L, 1\n" for i in range(3))
    outliers = fold_modules(written(f"h.0, B, 4\n{experts}h.1, B, 4\n{experts}"))[1]
    assert outliers == tuple(Outlier(f"h.{layer}.x.2", 3 * 2.0, 3 * 1.0) for layer in range(2))


LABELS = st.lists(st.sampled_from(["h.0", "h.1", "h.2", "ln_1", "ln_2", "0", "1", "block 0", "block 1"]), unique=True)


@st.composite
def trees(draw: st.DrawFn, path: str = "", depth: int = 0) -> list[Module]:
    """Modules with whole ms, so that sums are exact."""
    found: list[Module] = []
    for label in draw(LABELS.filter(lambda one: len(one) <= 4)):
        own, called = draw(st.integers(0, 9)), f"{path}.{label}" if path else label
        inside = draw(trees(called, depth + 1)) if depth < 2 else []
        below = sum(one.forward.ms for one in inside if one.depth == depth + 1)
        kind = draw(st.sampled_from(["", "A"]))
        found.append(module(called, label, depth, kind, own + below, own))
        found += inside
    return found


@given(trees())
def test_nothing_is_lost_where_modules_are_folded(modules: list[Module]) -> None:
    """Their number, the sum of their own times and that of the outermost ones are those of all."""
    folded = fold_modules(modules)[0]
    assert sum(one.count for one in folded) == len(modules)
    for total in (_own, _outermost):
        assert total(folded) == total(modules)


def _own(modules: Sequence[Module]) -> tuple[float, float]:
    return sum(one.own_forward_ms for one in modules), sum(one.own_backward_ms for one in modules)


def _outermost(modules: Sequence[Module]) -> tuple[float, float, float]:
    first = [one for one in modules if not one.depth]
    launches = sum(one.forward.launches for one in first)
    return sum(one.forward.ms for one in first), sum(one.backward.ms for one in first), launches


def test_the_layers_of_a_real_capture_are_one(real_summary: RealSummary) -> None:
    """GPT-2's 12 blocks, and all that is in them; the own times add up to those of all 151 modules."""
    summary = real_summary("functions_autograd_gpt2")
    assert summary.modules is not None
    every = summary.modules.modules
    folded = fold_modules(every)[0]
    (layers,) = (one for one in folded if one.depth == 2 and one.count > 1)
    assert (layers.path, layers.count) == ("Module.Module[0].Module[*]", 12)
    assert _own(folded) == pytest.approx(_own(every), rel=1e-12)
    assert sum(one.count for one in folded) == len(every)


# --- FLOPs that were counted -----------------------------------------------------------------------------------------

COUNTED = CountedFlops(
    passes={"forward": 1},
    classes={},
    modules={
        "GPT: GPT": {"loss": 3},
        "GPT/h.0: Block": {"forward": 1},
        "GPT/h.0.attn: Attention": {"forward": 10, "backward": 20, "recomputed": 5},
        "GPT/h.1.unseen: Linear": {"forward": 100},
        "other": {"forward": 7},
    },
)


def of_steps(modules: Sequence[Module]) -> Modules:
    return Modules("hooks", "step", tuple(modules), NOTHING, NOTHING, NOTHING, NOTHING)


def test_the_exposed_communication_of_blocks(tmp_path: Path) -> None:
    """Block 0 reduces for 100 ns, of which a kernel of block 1 hides 30; the bucket in backward is of no module."""
    export = Export().gpu().thread(AUTOGRAD, "pt_autograd_0").range("forward", 0, 1_000)
    export.range("nn.Module: Net: Net", 10, 900).range("nn.Module: Net.b0: Block", 20, 300)
    export.range("nn.Module: Net.b1: Block", 300, 600)
    export.kernel(GEMM, 30, 100, 200).kernel(KERNELS["all-reduce"], 40, 200, 300, stream=20)
    export.kernel(GEMM, 310, 270, 400)
    (summary,) = summaries(export, tmp_path / "t.sqlite")
    assert summary.modules is not None
    exposed = {one.path: one.exposed_communication_ms for one in summary.modules.modules}
    assert exposed == {"Net": pytest.approx(70 / NS_PER_MS), "Net.b0": pytest.approx(70 / NS_PER_MS), "Net.b1": None}


def test_the_tokens_of_experts() -> None:
    """Of 24 tokens with two experts each, expert 0 gets 40 and expert 1 gets 8, in two matmuls of equal rows."""
    names, calls = [], []
    for expert, tokens in ((0, 40), (1, 8)):
        for inner, shapes in (("up", ((tokens, 16), (16, 64))), ("down", ((64,), (tokens, 64), (64, 16)))):
            names.append(f"Net/h.0.experts.{expert}.{inner}: Linear")
            operands = tuple(Tensor(shape, "float32") for shape in shapes)
            calls.append(Signature("aten::mm" if inner == "up" else "aten::addmm", operands))
    index = np.arange(len(calls))
    phase = np.zeros(len(calls), np.int64)
    recorded = OperatorCalls(
        index, index, index, phase, phase, index < 0, tuple(calls), modules=tuple(names), phases=("forward",)
    )
    experts = [module(f"Net.h.0.experts.{number}", "Expert", 1) for number in (0, 1)]
    found = with_tokens(of_steps([module("Net.h.0", "Block", 0), *experts]), recorded)
    assert [one.tokens for one in found.modules] == [None, 40, 8]
    text = plain(_describe_expert_load(found))
    # 40 / ((40 + 8) / 2) = 1.67
    assert text.startswith("The busiest expert of a layer has 1.67 times the mean tokens of the active experts")


def test_counted_flops_are_those_of_the_modules_inside_too() -> None:
    """What is computed again counts to backward, a loss to forward; what has no row of its own is in those around."""
    found = with_flops(of_steps(model([1.0, 1.0])), COUNTED)
    assert {one.path: (one.forward.flops, one.backward.flops) for one in found.modules} == {
        "GPT": (3 + 1 + 10 + 100, 20 + 5),
        "GPT.h.0": (1 + 10, 20 + 5),
        "GPT.h.0.attn": (10, 20 + 5),
        "GPT.h.1": (100, None),
        "GPT.h.1.attn": (None, None),
    }


def test_counted_flops_are_those_of_a_step_alone() -> None:
    """Figures of anything else stay without; those from sizes stay where none were counted."""
    modules = of_steps([replace(one, forward=replace(one.forward, flops=9.0)) for one in model([1.0])])
    assert with_flops(replace(modules, per="forward"), COUNTED) == replace(modules, per="forward")
    assert with_flops(modules, CountedFlops(passes={}, classes={})) == modules


@pytest.mark.parametrize(
    ("by_flops", "said"),
    [
        (
            True,
            "has 1.75 times the mean FLOPs, and so tokens, of the active experts (median of 2 layers), and 2 times the "
            "mean in ",
        ),
        (False, "has 1.5 times the mean time of the active experts (median of 2 layers), and 2 times the mean in "),
    ],
)
def test_the_load_of_experts(tmp_path: Path, by_flops: bool, said: str) -> None:
    """Of 6, 2 and 1 ms the mean is 3; of 2 and 2 it is each. Of 10, 10 and 40 FLOPs it is 20, and of 30 and 10."""
    (summary,) = summaries(Export().gpu().range("forward", 0, 900).kernel(GEMM, 30, 40, 140), tmp_path / "t.sqlite")
    lines = [(0, 0, 6.0, 10), (0, 1, 2.0, 10), (0, 2, 1.0, 40), (1, 4, 2.0, 30), (1, 5, 2.0, 10), (2, 0, 0.0, 0)]
    found = [
        replace(module(f"h.{layer}.experts.{number}", "", 0), forward=Work(ms, 2, flops if by_flops else None))
        for layer, number, ms, flops in lines
    ]
    blocks = answer_modules(replace(summary, modules=of_steps(found)))
    text = " ".join(plain(getattr(block, "text", "")) for block in blocks).replace("\N{NO-BREAK SPACE}", " ")
    assert f"{said}h.0.experts." in text
