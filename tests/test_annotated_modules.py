"""Tests modules of programs without annotations: ranges, FLOPs of a step, and what the hooks must not touch.

A figure stands beside its arithmetic: a matmul of (m, k) and (k, n) takes 2·m·k·n FLOPs, and its backward pass as many
for the gradient of each of its two inputs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from nsys_analyzer.analysis.operators.costs import add_uncounted_flops
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.capture.targets import Annotation
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.operator_calls import read_operator_calls
from nsys_analyzer.trace.trace import Trace
from tests.support.annotated import ASKED, LONGEST_S, ProgramCase, read_programs, run
from tests.test_run_plan import plan

pytestmark = pytest.mark.slow  # each starts a program that imports PyTorch

torch = pytest.importorskip("torch", reason="the hooks are those of PyTorch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from nsys_analyzer.capture.hooks.flops import (  # noqa: E402
    CountedStep,
    count_bytes_read_by_decode,
    read_batch_dimensions,
    read_model_dimensions,
)
from nsys_analyzer.capture.hooks.operators import OperatorStep  # noqa: E402

TO_END = replace(ASKED, run_to_end=True)
WITH_MODULES = replace(TO_END, modules=True)
PREFIX = "nn.Module: "
SCENARIOS, DEFINED = read_programs("module_ranges")

# --- ranges ----------------------------------------------------------------------------------------------------------

#: Stands in for NVTX as the torch recorder does: what is opened and closed is printed when the program ends.
RECORDING = """
import atexit, itertools, json, sys, threading
import torch
log, handles = [], itertools.count(1)
def start(name):
    log.append(("start", next(handles), name))
    return log[-1][1]
torch.cuda.nvtx.mark = lambda _: None
torch.cuda.nvtx.range_push = lambda name: log.append(("push", threading.get_ident(), name))
torch.cuda.nvtx.range_pop = lambda: log.append(("pop", threading.get_ident(), ""))
torch.cuda.nvtx.range_start = start
torch.cuda.nvtx.range_end = lambda handle: log.append(("end", handle, ""))
torch.cuda.profiler.start = torch.cuda.profiler.stop = lambda: None
sys.modules["_nsys_analyze_hooks"].wrap_range_functions()
def scenario(name): log.append(("scenario", 0, name))
atexit.register(lambda: print(json.dumps(log)))
"""


class Recorded(NamedTuple):
    """The ranges of each scenario, indented, and those that were left open when the next began."""

    ranges: dict[str, list[str]]
    left: dict[str, list[str]]


def folded(log: list[tuple[str, int, str]]) -> Recorded:
    """Nests what was opened and closed.

    Raises:
        IndexError, ValueError: a range is closed that is not open.
    """
    recorded, current = Recorded({}, {}), ""
    opened: list[tuple[str, int, str]] = []
    for event, key, name in log:
        if event == "scenario":
            recorded.left[name] = [one for _, _, one in opened if one != "step"]
            current, recorded.ranges[name] = name, []
        elif event in ("push", "start"):
            depth = len([one for one in opened if one[2] != "step"])
            if current and name not in ("step", "optimizer"):
                recorded.ranges[current].append("  " * depth + name.removeprefix(PREFIX))
            opened.append((event, key, name))
        else:
            mine = [one for one in opened if one[:2] == ("push" if event == "pop" else "start", key)]
            opened.remove(mine[-1])
    return recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The ranges of a program whose steps are the scenarios, one after another, under a profiler."""
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "recording.py").write_text(RECORDING)
    steps = [f"recording.scenario({case.name!r})\n{case.text}\noptimizer.step()\n" for case in SCENARIOS]
    steps.append("recording.scenario('end')\noptimizer.step()\n")
    asked = Annotation(warmup_steps=1, steps=len(steps) + 1, modules=True, run_to_end=True)
    ran = run(folder, DEFINED["program"] + "\n".join(steps), asked, **make_hook_variables(asked))
    assert (ran.code, ran.err) == (0, "")
    return folded(json.loads(ran.out))


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: str(case.name))
def test_ranges_of_modules(recorded: Recorded, case: ProgramCase) -> None:
    assert recorded.ranges[case.name] == case.ranges


def test_ranges_are_closed(recorded: Recorded) -> None:
    """Whatever a scenario did, nothing but the step is open when it has ended."""
    assert recorded.left == {name: [] for name in recorded.ranges}


def test_the_command_line_asks_for_modules(tmp_path: Path) -> None:
    """``run --modules``: two recorded steps, each with a call of the layer in forward, and its nodes in backward."""
    (tmp_path / "prog.py").write_text(read_programs("annotated_programs")[1]["model"] + "train()")
    words = ["run", "--modules", "--profiler", "torch", "--warmup", "2", "--steps", "2", "--output-dir", "runs"]
    program = ["--", sys.executable, "prog.py"]
    done = subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", *words, *program],
        capture_output=True, text=True, timeout=LONGEST_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "runs").rglob("*.json.gz")
    ranges = Trace.load(found).ranges
    names = [ranges.names[code] for code in ranges.name.tolist()]
    assert {name: names.count(name) for name in names if name.startswith(PREFIX)} == {
        f"{PREFIX}Sequential: Sequential": 2,
        f"{PREFIX}Sequential/0: Linear": 4,
        f"{PREFIX}Sequential/1: ReLU": 4,
        f"{PREFIX}Sequential/2: Linear": 4,
    }


# --- the program behaves as without the hooks ------------------------------------------------------------------------

RANDOM = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b, self.c = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in "abc")
    def forward(self, x):
        return self.c(checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=True))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for i in range(9):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print(torch.rand(1).item().hex())
"""
COMPILED = """
import torch
from torch import nn
from torch._dynamo.utils import counters
for backend in ("eager", "aot_eager"):
    torch.manual_seed(0)
    torch._dynamo.reset(); counters.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(9):
        optimizer.zero_grad()
        loss = compiled(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(backend, loss.item().hex(), counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("text", [RANDOM, COMPILED], ids=["random", "compiled"])
def test_the_same_numbers(tmp_path: Path, text: str) -> None:
    """Losses to the last bit, and how often PyTorch compiled: without hooks, counting FLOPs, and recording modules."""
    (tmp_path / "recording.py").write_text(RECORDING.replace("print(json.dumps(log))", "None"))
    without = run(tmp_path, text, None)
    assert (without.code, len(without.out.splitlines())) == (0, 10 if text == RANDOM else 18)
    counting = run(tmp_path, text, TO_END)
    assert counting.results["flops"]["classes"]["forward"]
    asked = replace(WITH_MODULES, steps=20)
    with_modules = run(tmp_path, f"import recording\n{text}", asked, **make_hook_variables(asked))
    for one in (counting, with_modules):
        assert (one.code, one.out, one.err) == (0, without.out, "")


# --- FLOPs of operators ----------------------------------------------------------------------------------------------


def counted(forward: Callable[[], Any]) -> dict[str, Any]:
    """The FLOPs of a function as a forward pass inside one module, and of its result's backward pass."""
    modules: Any = SimpleNamespace(is_tracking=False, current_module=lambda: "module")
    step = CountedStep(torch, modules, lambda phase: phase == "forward")
    step.open()
    with step.counting():
        result = forward()
        step.change_backward_depth(1, creates_graph=False)
        if result.requires_grad:
            result.sum().backward()
    step.close()
    flops: dict[str, Any] = step.manifest["flops"]
    return flops


def heads(tokens: int = 16, heads: int = 3) -> Any:
    """Queries, keys or values: 2 sequences of tokens, heads of d_head 8."""
    return torch.randn(2, heads, tokens, 8, requires_grad=True)


#: Two matmuls of 2·B·H·S·S·d_head: 4·2·3·16·16·8. A softmax takes 5 for each of the 2·3·16·16 scores.
MATMULS, SOFTMAX = 49_152, 7_680


def by_hand() -> Any:
    """Attention whose softmax is a maximum, a difference, exponentials, a sum and a quotient."""
    scores = heads() @ heads().transpose(-1, -2)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True) @ heads()


def fused(**options: Any) -> Callable[[], Any]:
    return lambda: functional.scaled_dot_product_attention(heads(), heads(), heads(), **options)


@pytest.mark.parametrize(
    ("forward", "kernel_class", "matmuls", "softmax"),
    [
        (fused(), "fused attention", MATMULS, SOFTMAX),
        (fused(is_causal=True), "fused attention", MATMULS, SOFTMAX),
        (fused(attn_mask=torch.ones(16, 16, dtype=torch.bool).tril()), "fused attention", MATMULS, SOFTMAX),
        # 16 queries and 4 keys: a quarter of the scores, and of all that is made of them.
        (
            lambda: functional.scaled_dot_product_attention(heads(), heads(4), heads(4)),
            "fused attention",
            MATMULS // 4,
            SOFTMAX // 4,
        ),
        # Batched matmuls in a module with a softmax are attention's.
        (lambda: (heads() @ heads().transpose(-1, -2)).softmax(-1) @ heads(), "matmul", MATMULS, SOFTMAX),
        (by_hand, "matmul", MATMULS, SOFTMAX),
    ],
    ids=["fused", "causal", "masked", "other tokens", "unfused", "softmax by hand"],
)
def test_flops_of_attention(forward: Callable[[], Any], kernel_class: str, matmuls: int, softmax: int) -> None:
    """Backward is twice forward: the scores that a fused kernel computes again are not among its FLOPs."""
    found = counted(forward)
    assert (found["attention_matmul"], found["softmax"], found["unknown"]) == (matmuls, softmax, [])
    assert found["classes"] == {"forward": {kernel_class: matmuls}, "backward": {kernel_class: 2 * matmuls}}


def test_batched_matmuls_without_a_softmax_are_no_attention() -> None:
    found = counted(lambda: heads() @ heads().transpose(-1, -2))
    assert (found["classes"]["forward"], found["attention_matmul"]) == ({"matmul": MATMULS // 2}, 0)


@pytest.mark.parametrize("with_weights", [False, True])
def test_flops_of_multihead_attention(with_weights: bool) -> None:
    """B·S = 32 tokens, d = 24: four projections of 2·32·24·24, those of the input in one matmul.

    Backward, the input needs no gradient: the three have their weights' alone, the fourth both.
    """
    projection, x = 2 * 32 * 24 * 24, torch.randn(2, 16, 24)
    module = nn.MultiheadAttention(24, 3, batch_first=True)
    found = counted(lambda: module(x, x, x, need_weights=with_weights)[0])
    kinds = {phase: sum(classes.values()) for phase, classes in found["classes"].items()}
    assert kinds == {"forward": 4 * projection + MATMULS, "backward": 5 * projection + 2 * MATMULS}
    assert ("fused attention" in found["classes"]["forward"]) is not with_weights
    assert (found["attention_matmul"], found["softmax"]) == (MATMULS, SOFTMAX)


def test_flops_of_a_convolution() -> None:
    """Two images, 4 channels of 6 × 6 out of 3 channels by 3 × 3: 2·2·4·36·27; backward for the weight alone."""
    found = counted(lambda: nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 8, 8)))
    assert found["classes"] == {"forward": {"convolution": 15_552}, "backward": {"convolution": 15_552}}


def test_an_attention_that_pytorch_cannot_count_is_counted_by_its_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11 raises an error for fewer heads of keys than of queries. A causal mask hides no FLOPs."""

    def attend() -> Any:
        """Attention with four heads of queries and two heads of keys: 4/3 of the scores of three heads."""
        return functional.scaled_dot_product_attention(
            heads(heads=4), heads(heads=2), heads(heads=2), is_causal=True, enable_gqa=True
        )

    def refuse(*_: Any, **__: Any) -> int:
        raise AssertionError

    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        monkeypatch.setitem(flop_registry, getattr(torch.ops.aten, name), refuse)
    found = counted(attend)
    assert found["modules_of_unknown"] == {key: ["module"] for key in found["unknown"]}
    assert (len(found["unknown"]), found["classes"]) == (2, {})

    modules: Any = SimpleNamespace(is_tracking=False, current_module=lambda: "module", next_node=lambda: 0)
    ranges: Any = SimpleNamespace(start=str, end=str, push=str, pop=str)
    phases = ["forward"]
    step = OperatorStep(torch, modules, ranges, str(tmp_path / "t.operators.gz"), lambda: phases[-1])
    step.open()
    result = attend()
    phases.append("backward")
    result.sum().backward()
    step.close()
    calls = read_operator_calls(tmp_path / "t.operators.gz")[1]
    completed = add_uncounted_flops(CountedFlops(**found), calls)
    assert completed.classes == {
        "forward": {"fused attention": MATMULS * 4 / 3}, "backward": {"fused attention": 2 * MATMULS * 4 / 3},
    }  # fmt: skip
    assert completed.modules == {"module": {"forward": MATMULS * 4 / 3, "backward": 2 * MATMULS * 4 / 3}}
    assert (completed.attention_matmul, completed.softmax) == (MATMULS * 4 / 3, SOFTMAX * 4 / 3)
    assert completed.unknown == []
    # Calls in other modules were counted.
    others = {**found, "modules_of_unknown": {key: ["another module"] for key in found["unknown"]}}
    assert add_uncounted_flops(CountedFlops(**others), calls) == CountedFlops(**others)


def test_an_operator_of_the_programs_own_is_unknown() -> None:
    @torch.library.custom_op("program::twice", mutates_args=())  # type: ignore[untyped-decorator]
    def twice(x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
        return x * 2

    assert counted(lambda: twice(torch.randn(2)))["unknown"] == ["program.twice"]
    # PyTorch has no formula for oneDNN's recurrent layers; without oneDNN they are matmuls.
    recurrent = counted(lambda: nn.LSTM(8, 8)(torch.randn(3, 2, 8))[0])
    assert bool(recurrent["unknown"]) is torch.backends.mkldnn.is_available()


# --- dimensions ------------------------------------------------------------------------------------------------------


def test_dimensions_of_a_configuration() -> None:
    """What transformers' configurations say goes before what the modules look like; not every number is there."""
    model: Any = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16))
    model.config = SimpleNamespace(n_layer=12, n_head=4, n_embd=64, vocab_size=1000, hidden_size=None)
    assert read_model_dimensions(model) == {"num_layers": 12, "num_heads": 4, "d_model": 64, "vocab_size": 1000}
    model.config = SimpleNamespace(num_hidden_layers=3)
    assert read_model_dimensions(model) == {"num_layers": 3, "d_model": 16, "vocab_size": 50}
    around = nn.Module()
    around.module = model  # as DistributedDataParallel
    assert read_model_dimensions(around)["num_layers"] == 3


def test_what_decoding_reads_of_a_model() -> None:
    """The table of the embedding is looked up; as the head it is read, once. 2 heads of 8 in 3 layers, 2 bytes each."""
    model: Any = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)).bfloat16()
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, hidden_size=16, is_encoder_decoder=False)
    model.config = config
    assert count_bytes_read_by_decode(model) == {"weights_bytes": 50 * 16 * 2, "cache_bytes": 2 * 3 * 4 * 4 * 2}
    config.num_key_value_heads, config.head_dim = 2, 8
    model[1].weight = model[0].weight
    assert count_bytes_read_by_decode(model) == {"weights_bytes": 50 * 16 * 2, "cache_bytes": 2 * 3 * 2 * 8 * 2}
    config.num_local_experts = 8  # a pass may leave some out
    assert count_bytes_read_by_decode(model) == {"cache_bytes": 192}
    config.is_encoder_decoder = True
    assert count_bytes_read_by_decode(model) == {}
    assert count_bytes_read_by_decode(nn.ReLU()) == {}


def test_dimensions_of_modules() -> None:
    """The longest list of one class is that of the layers; heads and width are the attention's."""
    layer = nn.TransformerEncoderLayer(d_model=24, nhead=3, dim_feedforward=48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    assert read_model_dimensions(encoder) == {"num_layers": 4, "num_heads": 3, "d_model": 24}
    assert read_model_dimensions(nn.Linear(2, 2)) == {}


def test_dimensions_of_a_batch() -> None:
    """Two dimensions of integers are tokens; of images only their number is known."""
    tokens = torch.zeros(4, 128, dtype=torch.long)
    assert read_batch_dimensions((tokens,), {}) == {"batch_size": 4, "context_length": 128}
    assert read_batch_dimensions((), {"labels": tokens[:, :7], "input_ids": tokens}) == {
        "batch_size": 4,
        "context_length": 128,
    }
    assert read_batch_dimensions((torch.zeros(8, 3, 32, 32),), {}) == {"batch_size": 8}
    assert read_batch_dimensions((torch.zeros(8, 16),), {}) == {"batch_size": 8}
    assert read_batch_dimensions((torch.tensor(1.0),), {"flag": True}) == {}


# --- a steady warm-up ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"warmup_steps": 7}])
def test_an_asked_warmup_is_exact(given: dict[str, int]) -> None:
    (target,) = plan(program=("python", "train.py"), profiler="torch", device="cpu", **given).targets
    assert target.annotation is not None
    assert (target.annotation.warmup_steps, target.annotation.waits_for_steady_steps) == (
        given.get("warmup_steps", 5),
        not given,
    )


# --- what the report says of the hooks -------------------------------------------------------------------------------


def test_a_program_without_a_model_is_said_to_be_one(tmp_path: Path) -> None:
    """The report's warnings say that no call of a model was seen."""
    (tmp_path / "none.py").write_text("print(1)\n")
    words = ["run", "--profiler", "torch", "--output-dir", "runs", "--", sys.executable, "none.py"]
    subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", *words], capture_output=True, timeout=LONGEST_S, cwd=tmp_path
    )
    assert "no call of a PyTorch model was seen" in (tmp_path / "runs" / "report.md").read_text(encoding="utf-8")
