"""The modules of programs that nobody annotated: their ranges, the FLOPs of a step, and what the hooks must not touch.

A figure stands beside its arithmetic: a matmul of (m, k) and (k, n) takes 2·m·k·n FLOPs, and its backward pass as many
for the gradient of each of its two inputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from nsys_analyzer.capture.profilers import annotating
from nsys_analyzer.capture.targets import Annotation
from nsys_analyzer.trace.trace import Trace
from tests.test_annotation import ASKED, LONG, MODEL, Ran, run
from tests.test_run_plan import plan

pytestmark = pytest.mark.slow  # each starts a program that imports PyTorch

torch = pytest.importorskip("torch", reason="the hooks are those of PyTorch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from nsys_analyzer.capture.hooks.flops import CountedStep, of_batch, of_model, read_by_decode  # noqa: E402

TO_END = replace(ASKED, run_to_end=True)
WITH_MODULES = replace(TO_END, modules=True)
PREFIX = "nn.Module: "

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
sys.modules["_nsys_analyze_hooks"].watch()
def scenario(name): log.append(("scenario", 0, name))
atexit.register(lambda: print(json.dumps(log)))
"""
MODELS = """
import recording, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

def linear(): return nn.Linear(4, 4)
class Block(nn.Module):
    def __init__(self): super().__init__(); self.inner = linear()
    def forward(self, x): return x + self.inner(x)
class Pair(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = Block(), linear()
    def forward(self, x): return self.b(self.a(x))

x, optimizer = torch.randn(2, 4), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
optimizer.step()  # the warm-up
"""


class Scenario(NamedTuple):
    """What a program does in one step, and the ranges between its optimizer's, each indented below its parent."""

    text: str
    ranges: str


FORWARD_OF_PAIR = """
    forward
      Net: Net
        Net/a: Block
          Net/a.inner: Linear
        Net/b: Linear
"""
NODES_OF_PAIR = """
      Net/b: Linear
      Net/a: Block
      Net/a.inner: Linear
"""
BACKWARD = "    backward"
BACKWARD_OF_PAIR = BACKWARD + NODES_OF_PAIR


def of_pair(text: str, forward: str = FORWARD_OF_PAIR, backward: str = BACKWARD_OF_PAIR, name: str = "") -> Scenario:
    """A scenario of a Pair; its class is called Net in the ranges here."""
    return Scenario(f"class {name}(Pair): pass\nnet = {name}()\n{text}", f"{forward}{backward}".replace("Net", name))


def second(ranges: str) -> str:
    """The same ranges of a second model of the class."""
    return ranges.replace("Net:", "Net#2:").replace("Net/", "Net#2/")


BLOCK = """
      Net/block: Sequential
        Net/block.0: Linear
        Net/block.1: ReLU
"""


def checkpointed(name: str, backward: str, *, reentrant: bool) -> Scenario:
    """Layers a and c, and between them a block that is computed again."""
    return Scenario(
        f"""
class {name}(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.block, self.c = linear(), nn.Sequential(linear(), nn.ReLU()), linear()
    def forward(self, x): return self.c(checkpoint(self.block, self.a(x), use_reentrant={reentrant}))
{name}()(x).sum().backward()
""",
        f"""
    forward
      Net: Net
        Net/a: Linear
{indent(BLOCK, "  ")}
        Net/c: Linear
    backward
      Net/c: Linear
{backward}
      Net/block.0: Linear
{"      Net: Net" if reentrant else ""}
      Net/a: Linear
""".replace("Net", name),
    )


SCENARIOS = {
    # the addition of a block's residual is the block's: of its nodes the last, so the first of backward
    "residual": of_pair("net(x).sum().backward()", name="Residual"),
    "loss_of_a_module": of_pair(
        "nn.MSELoss()(net(x), x).backward()",
        FORWARD_OF_PAIR + "    loss\n      MSELoss: MSELoss",
        f"\n{BACKWARD}\n      MSELoss: MSELoss{NODES_OF_PAIR}",
        name="Criterion",
    ),
    "used_twice": Scenario(
        """
class Twice(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = linear(), linear()
    def forward(self, x): return self.a(self.b(self.a(x)))
Twice()(x).square().sum().backward()
""",
        """
    forward
      Twice: Twice
        Twice/a: Linear
        Twice/b: Linear
        Twice/a: Linear
    backward
      Twice/a: Linear
      Twice/b: Linear
      Twice/a: Linear
""",
    ),
    # one that never calls Module.__call__ is part of what calls it
    "call_overridden": Scenario(
        """
class Own(nn.Linear):
    def __call__(self, x): return super().__call__(x)
class Never(nn.Linear):
    def __call__(self, x): return self.forward(x)
class Over(nn.Module):
    def __init__(self): super().__init__(); self.own, self.never, self.c = Own(4, 4), Never(4, 4), linear()
    def forward(self, x): return self.c(self.never(self.own(x)))
Over()(x).sum().backward()
""",
        """
    forward
      Over: Over
        Over/own: Own
        Over/c: Linear
    backward
      Over/c: Linear
      Over: Over
      Over/own: Own
""",
    ),
    # backward goes through what was called last first
    "two_roots_of_one_class": of_pair(
        "(net(x) + Several()(x)).sum().backward()",
        FORWARD_OF_PAIR + second(FORWARD_OF_PAIR),
        BACKWARD + second(NODES_OF_PAIR) + NODES_OF_PAIR,
        name="Several",
    ),
    "held_in_a_list": Scenario(
        """
class Listed(nn.Module):
    def __init__(self): super().__init__(); self.hidden, self.a = [linear()], Block()
    def forward(self, x): return self.a(self.hidden[0](x))
Listed()(x).sum().backward()
""",
        """
    forward
      Listed: Listed
        Listed/Linear: Linear
        Listed/a: Block
          Listed/a.inner: Linear
    backward
      Listed/a: Block
      Listed/a.inner: Linear
      Listed/Linear: Linear
""",
    ),
    "no_gradient_of_the_first": of_pair(
        "net.a.requires_grad_(False); net(x).sum().backward()",
        backward=BACKWARD + "\n      Net/b: Linear",
        name="FirstFrozen",
    ),
    # nothing but the weight of the last layer asks for a gradient: no other node runs
    "autograd_grad_of_the_last": of_pair(
        "torch.autograd.grad(outputs=net(x).sum(), inputs=[net.b.weight])",
        backward=BACKWARD + "\n      Net/b: Linear",
        name="GradOfLast",
    ),
    "two_passes_over_a_graph": of_pair(
        "loss = net(x).sum(); loss.backward(retain_graph=True); loss.backward()",
        backward=2 * BACKWARD_OF_PAIR,
        name="Retained",
    ),
    "no_gradients": of_pair(
        "with torch.no_grad(): net(x)", FORWARD_OF_PAIR.replace("forward", "evaluation"), "", name="Evaluated"
    ),
    # the node that needs them has the block's tensors computed again: its last one's
    "checkpoint": checkpointed("Checkpoint", f"      Net/block.1: ReLU{indent(BLOCK, '  ')}", reentrant=False),
    # the whole block is one node, of what calls it; inside it runs forward, then its own backward pass
    "checkpoint_reentrant": checkpointed(
        "Reentrant", f"      Net: Net{indent(BLOCK, '  ')}      Net/block.1: ReLU", reentrant=True
    ),
    # the matmul before the checkpoint is of the module that holds both, whatever the checkpoint's own backward pass did
    "own_node_before_a_checkpoint": Scenario(
        """
class Owner(nn.Module):
    def __init__(self): super().__init__(); self.block, self.w = linear(), nn.Parameter(torch.ones(4, 4))
    def forward(self, x): return checkpoint(self.block, x @ self.w, use_reentrant=True)
Owner()(x).sum().backward()
""",
        """
    forward
      Owner: Owner
        Owner/block: Linear
    backward
      Owner: Owner
        Owner/block: Linear
      Owner/block: Linear
      Owner: Owner
""",
    ),
    # of the two heads' nodes only one runs, and the module is told by that
    "some_of_the_graph": Scenario(
        """
class Two(nn.Module):
    def __init__(self):
        super().__init__(); self.w1, self.w2 = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    def forward(self, x): return x @ self.w1, x @ self.w2
class Heads(nn.Module):
    def __init__(self): super().__init__(); self.h, self.l = Two(), linear()
    def forward(self, x):
        a, b = self.h(x)
        return self.l(a) + b
heads = Heads()
torch.autograd.grad(heads(x).sum(), heads.h.w1)
""",
        """
    forward
      Heads: Heads
        Heads/h: Two
        Heads/l: Linear
    backward
      Heads: Heads
      Heads/l: Linear
      Heads/h: Two
""",
    ),
    "wrappers_around_each_other": Scenario(
        """
class Wrapper(nn.Module):
    def __init__(self, module): super().__init__(); self.module = module
    def forward(self, x): return self.module(x)
class Held(nn.Module):
    def __init__(self): super().__init__(); self.a = linear()
    def forward(self, x): return self.a(x)
Wrapper(Wrapper(Held()))(x).sum().backward()
""",
        """
    forward
      Held: Held
        Held/a: Linear
    backward
      Held/a: Linear
""",
    ),
    "made_anew": Scenario(
        """
for _ in range(2): nn.Bilinear(4, 4, 1)(x, x).sum().backward()
""",
        """
    forward
      Bilinear: Bilinear
    backward
      Bilinear: Bilinear
    forward
      Bilinear: Bilinear
    backward
      Bilinear: Bilinear
""",
    ),
    "error_caught_in_forward": Scenario(
        """
class Catching(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = linear(), nn.Sequential(nn.Linear(5, 5))
    def forward(self, x):
        try: return self.b(x)
        except RuntimeError: return self.a(x)
Catching()(x).sum().backward()
""",
        """
    forward
      Catching: Catching
        Catching/b: Sequential
          Catching/b.0: Linear
        Catching/a: Linear
    backward
      Catching/a: Linear
""",
    ),
    # the layer before it is not reached
    "error_in_backward": Scenario(
        """
class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, gradient): raise ValueError("backward fails")
class BadBackward(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = linear(), linear()
    def forward(self, x): return self.b(Failing.apply(self.a(x)))
try: BadBackward()(x).sum().backward()
except ValueError: pass
""",
        """
    forward
      BadBackward: BadBackward
        BadBackward/a: Linear
        BadBackward/b: Linear
    backward
      BadBackward/b: Linear
      BadBackward: BadBackward
""",
    ),
    "after_the_errors": of_pair("net(x).sum().backward()", name="After"),
}
WRAPPED = {
    "distributed": ("class Distributed(Around): pass", "Distributed(Wrapped1())", "Wrapped1", "a: Block"),
    "compiled": ("class Compiled(Around): held = '_orig_mod'", "Compiled(Wrapped2())", "Wrapped2", "a: Block"),
    "inner": (
        "class Kept(Around): held = '_checkpoint_wrapped_module'\n"
        "inner = Wrapped3(); inner.a = Kept(inner.a)",
        "inner", "Wrapped3", "a: Kept",
    ),
}  # fmt: skip
AROUND = """
class Around(nn.Module):
    held = "module"
    def __init__(self, module): super().__init__(); setattr(self, self.held, module)
    def forward(self, x): return getattr(self, self.held)(x)
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
    of_wrapped = {
        f"wrapped_{name}": f"class {root}(Pair): pass\n{wrapper}\nnet = {made}\nnet(x).sum().backward()"
        for name, (wrapper, made, root, _) in WRAPPED.items()
    }
    texts = {**{name: one.text for name, one in SCENARIOS.items()}, **of_wrapped, "end": ""}
    steps = (f"recording.scenario({name!r})\n{text}\noptimizer.step()\n" for name, text in texts.items())
    asked = Annotation(warmup_steps=1, steps=len(texts) + 1, modules=True, run_to_end=True)
    ran = run(folder, MODELS + AROUND + "\n".join(steps), asked, **annotating(asked))
    assert (ran.code, ran.err) == (0, "")
    return folded(json.loads(ran.out))


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranges_of_modules(recorded: Recorded, name: str) -> None:
    """Nested in forward as they call each other; in backward one after another, each where its nodes run."""
    expected = dedent(SCENARIOS[name].ranges.strip("\n")).splitlines()
    assert recorded.ranges[name] == [line for line in expected if line]


def test_ranges_are_closed(recorded: Recorded) -> None:
    """Whatever a scenario did, nothing but the step is open when it has ended."""
    assert recorded.left == {name: [] for name in recorded.ranges}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_wrappers_call_a_module_is_not_in_its_path(recorded: Recorded, name: str) -> None:
    """Whatever holds it, the model is the root, and its layers are where they are without a wrapper."""
    _, _, root, first = WRAPPED[name]
    modules = {line.strip() for line in recorded.ranges[f"wrapped_{name}"]} - {"forward", "backward"}
    layers = {f"{root}/a: Block", f"{root}/a.inner: Linear", f"{root}/b: Linear", f"{root}/{first}"}
    assert modules == {f"{root}: {root}", *layers}


def test_the_command_line_asks_for_modules(tmp_path: Path) -> None:
    """``run --modules``: two recorded steps, each with a call of the layer in forward, and its nodes in backward."""
    (tmp_path / "prog.py").write_text(MODEL + "train()")
    words = ["run", "--modules", "--profiler", "torch", "--warmup", "2", "--steps", "2", "--output-dir", "runs"]
    program = ["--", sys.executable, "prog.py"]
    done = subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", *words, *program],
        capture_output=True, text=True, timeout=LONG, cwd=tmp_path,
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
    with_modules = run(tmp_path, f"import recording\n{text}", asked, **annotating(asked))
    for one in (counting, with_modules):
        assert (one.code, one.out, one.err) == (0, without.out, "")


@pytest.mark.parametrize(("inside", "behind", "flops"), [(9, 0, 10_944), (1, 8, 1216)])
def test_a_dispatch_mode_of_the_programs_own(tmp_path: Path, inside: int, behind: int, flops: int) -> None:
    """Around the loop, and around one step, so that it is closed while our counting has begun: both count as alone.

    Per step: 4·8 by 8·8 is 512 forward, 512 for the weight; 4·8 by 8·1 is 64 and 2·64: 1,216, and 9 steps are 10,944.
    """
    text = f"""
{MODEL}
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter: train({inside})
train({behind})
print(counter.get_total_flops(), torch.utils._python_dispatch._get_current_dispatch_mode())
"""
    ran = run(tmp_path, text, TO_END)
    assert (ran.code, ran.out, ran.err) == (0, f"{flops} None\n", "")
    assert ran.results["flops"]["classes"] == {"forward": {"matmul": 576}, "backward": {"matmul": 640}}


def test_an_error_in_the_step_that_is_counted(tmp_path: Path) -> None:
    """The next call is counted in its place, alone, and nothing counts for ever."""
    text = """
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
model = torch.nn.Linear(8, 8, bias=False)
with torch.no_grad():
    for i in range(12):
        try: model(torch.randn(4, 9 if i == 1 else 8))
        except RuntimeError: pass
print(_get_current_dispatch_mode())
"""
    ran = run(tmp_path, text, TO_END)
    assert (ran.code, ran.out) == (0, "None\n")
    assert ran.results["flops"]["passes"] == {"forward": 1}
    assert ran.results["flops"]["classes"] == {"forward": {"matmul": 512}}  # 2·4·8·8


def test_flops_in_inference_mode(tmp_path: Path) -> None:
    """Operators come whole there, and are counted by those that they are made of."""
    text = "import torch\nmodel = torch.nn.Linear(8, 8)\nwith torch.inference_mode():\n"
    ran = run(tmp_path, text + "    for _ in range(12): model(torch.randn(4, 8))", TO_END)
    assert ran.results["flops"]["classes"] == {"forward": {"matmul": 512}}  # 2·4·8·8


# --- FLOPs of a step -------------------------------------------------------------------------------------------------


def flops_of(ran: Ran) -> dict[str, Any]:
    """What was counted by a program that ended well."""
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = ran.results["flops"]
    return found


def test_flops_of_linear_layers(tmp_path: Path) -> None:
    """Three passes accumulate in a step; the first layer's input needs no gradient.

    Forward: 2·4·8·8 = 512 and 2·4·8·1 = 64. Backward: 512 for the first weight, 2·64 = 128 for the second layer.
    """
    text = """
for i in range(30):
    (model(torch.randn(4, 8)).sum() / 3).backward()
    if i % 3 == 2: optimizer.step(); optimizer.zero_grad()
"""
    ran = run(tmp_path, MODEL + text)
    assert flops_of(ran) == {
        "passes": {"forward": 3, "backward": 3, "optimizer": 1, "zero_grad": 1},
        "classes": {"forward": {"matmul": 3 * 576}, "backward": {"matmul": 3 * 640}},
        "modules": {
            "Sequential/0: Linear": {"forward": 3 * 512, "backward": 3 * 512},
            "Sequential/2: Linear": {"forward": 3 * 64, "backward": 3 * 128},
        },
        "softmax": 0,
        "attention_matmul": 0,
        "unknown": [],
    }
    assert "batch_size" not in ran.results  # of which of the three


@pytest.mark.parametrize("reentrant", [False, True])
def test_flops_of_what_is_computed_again(tmp_path: Path, reentrant: bool) -> None:
    """Layers of 2·2·4·4 = 64 FLOPs: the checkpointed one runs twice, and each has 128 backward, the first 64.

    The input of the checkpointed layer is the first one's output; what non-reentrant checkpointing has no use for, such
    as the last operator of a block, it does not compute again: there is a ReLU after the layer.
    """
    text = f"""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    def forward(self, x): return checkpoint(self.block, self.a(x), use_reentrant={reentrant})
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9):
    optimizer.zero_grad(); model(torch.randn(2, 4)).sum().backward(); optimizer.step()
"""
    found = flops_of(run(tmp_path, text))
    assert found["classes"] == {
        "forward": {"matmul": 128},
        "backward": {"matmul": 192},
        "recomputed": {"matmul": 64},
    }
    assert found["modules"] == {
        "Net/a: Linear": {"forward": 64, "backward": 64},
        "Net/block.0: Linear": {"forward": 64, "recomputed": 64, "backward": 128},
    }


def test_flops_of_our_own_transformer(tmp_path: Path) -> None:
    """The formulas of a forward pass, B = 2, S = 32, d = 64, d_ff = 128, L = 2, V = 10,000; backward twice that."""
    projections = 8 * 2 * 32 * 64**2 * 2
    attention = 4 * 2 * 32**2 * 64 * 2
    feed_forward = 6 * 2 * 32 * 64 * 128 * 2
    head = 2 * 2 * 32 * 64 * 10_000
    forward = projections + attention + feed_forward + head
    assert forward == 93_454_336
    words = "--model small --d-model 64 --d-ff 128 --num-layers 2 --num-heads 2 --context-length 32 --batch-size 2"
    more = "--device cpu --no-ranges --steps 1 --warmup 3"
    done = subprocess.run(
        [sys.executable, "-m", "profiling_targets.transformer", *words.split(), *more.split()],
        capture_output=True, text=True, timeout=LONG,
        env={**os.environ, **annotating(replace(ASKED, steps=1), tmp_path / "results.json")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    flops = results["flops"]
    assert flops["classes"] == {"forward": {"matmul": forward}, "backward": {"matmul": 2 * forward}}
    assert flops["modules"]["Transformer/head: Linear"] == {"forward": head, "backward": 2 * head}
    # of each layer the two matmuls of attention, which no module of their own computes
    of_attention = {"forward": attention // 2, "backward": attention}
    assert flops["modules"]["Transformer/blocks.1.attention: SelfAttention"] == of_attention
    assert flops["unknown"] == []
    dimensions = {"num_layers": 2, "vocab_size": 10_000, "d_model": 64, "batch_size": 2, "context_length": 32}
    assert {key: results.get(key) for key in dimensions} == dimensions


def test_flops_of_a_model_of_transformers(tmp_path: Path) -> None:
    """A GPT-2 of B = 2, S = 16, d = 32, L = 2, H = 2, V = 100: its feed-forward has two matrices of d by 4·d."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    text = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=100))
optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(100, (2, 16))
for _ in range(9):
    optimizer.zero_grad(); model(input_ids=tokens, labels=tokens).loss.backward(); optimizer.step()
"""
    ran = run(tmp_path, text)
    assert ran.code == 0, ran.err
    flops, attention = ran.results["flops"], 4 * 2 * 16**2 * 32 * 2
    forward = 8 * 2 * 16 * 32**2 * 2 + attention + 2 * 2 * 2 * 16 * 32 * 4 * 32 * 2 + 2 * 2 * 16 * 32 * 100
    totals = {phase: sum(classes.values()) for phase, classes in flops["classes"].items()}
    assert totals == {"forward": forward, "backward": 2 * forward}
    assert (flops["attention_matmul"], flops["softmax"]) == (attention, 5 * 2 * 2 * 16**2 * 2)
    dimensions = {"num_layers": 2, "num_heads": 2, "vocab_size": 100, "d_model": 32}
    batch = {"batch_size": 2, "context_length": 16}
    assert {key: ran.results.get(key) for key in (*dimensions, *batch)} == {**dimensions, **batch}


def test_one_step_of_warmup_has_no_flops(tmp_path: Path) -> None:
    """The first step prepares what later ones use: with no second one before the capture range, none is counted."""
    assert "flops" not in run(tmp_path, MODEL + "train()", replace(ASKED, warmup_steps=1)).results


# --- FLOPs of operators ----------------------------------------------------------------------------------------------


def counted(forward: Callable[[], Any]) -> dict[str, Any]:
    """The FLOPs of a function as a forward pass inside one module, and of its result's backward pass."""
    modules: Any = SimpleNamespace(active=False, current=lambda: "module")
    step = CountedStep(torch, modules, lambda phase: phase == "forward")
    step.open()
    with step.counting():
        result = forward()
        step.begin_backward(1, creates_graph=False)
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
    assert of_model(model) == {"num_layers": 12, "num_heads": 4, "d_model": 64, "vocab_size": 1000}
    model.config = SimpleNamespace(num_hidden_layers=3)
    assert of_model(model) == {"num_layers": 3, "d_model": 16, "vocab_size": 50}
    around = nn.Module()
    around.module = model  # as DistributedDataParallel
    assert of_model(around)["num_layers"] == 3


def test_what_decoding_reads_of_a_model() -> None:
    """The table of the embedding is looked up; as the head it is read, once. 2 heads of 8 in 3 layers, 2 bytes each."""
    model: Any = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)).bfloat16()
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, hidden_size=16, is_encoder_decoder=False)
    model.config = config
    assert read_by_decode(model) == {"weights_bytes": 50 * 16 * 2, "cache_bytes": 2 * 3 * 4 * 4 * 2}
    config.num_key_value_heads, config.head_dim = 2, 8
    model[1].weight = model[0].weight
    assert read_by_decode(model) == {"weights_bytes": 50 * 16 * 2, "cache_bytes": 2 * 3 * 2 * 8 * 2}
    config.num_local_experts = 8  # a pass may leave some out
    assert read_by_decode(model) == {"cache_bytes": 192}
    config.is_encoder_decoder = True
    assert read_by_decode(model) == {}
    assert read_by_decode(nn.ReLU()) == {}


def test_dimensions_of_modules() -> None:
    """The longest list of one class is that of the layers; heads and width are the attention's."""
    layer = nn.TransformerEncoderLayer(d_model=24, nhead=3, dim_feedforward=48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    assert of_model(encoder) == {"num_layers": 4, "num_heads": 3, "d_model": 24}
    assert of_model(nn.Linear(2, 2)) == {}


def test_dimensions_of_a_batch() -> None:
    """Two dimensions of integers are tokens; of images only their number is known."""
    tokens = torch.zeros(4, 128, dtype=torch.long)
    assert of_batch((tokens,), {}) == {"batch_size": 4, "context_length": 128}
    assert of_batch((), {"labels": tokens[:, :7], "input_ids": tokens}) == {"batch_size": 4, "context_length": 128}
    assert of_batch((torch.zeros(8, 3, 32, 32),), {}) == {"batch_size": 8}
    assert of_batch((torch.zeros(8, 16),), {}) == {"batch_size": 8}
    assert of_batch((torch.tensor(1.0),), {"flag": True}) == {}


# --- a steady warm-up ------------------------------------------------------------------------------------------------

#: The clock of steps goes on by these seconds alone.
WAITING = """
import time
waits, passed_s = {waits}, 0.0
time.perf_counter = lambda: passed_s
for i in range(40):
    passed_s += waits[i] if i < len(waits) else 0.06
    train(1)
"""


@pytest.mark.parametrize(
    ("waits", "steady", "steps"),
    [
        ([0.06, 0.18] * 3, True, 9),  # the last three steps must be alike, and 6 are uneven
        ([0.06, 0.18] * 20, True, 10),  # twice the warm-up is the end of it
        ([0.06, 0.18] * 3, False, 5),
    ],
)
def test_the_warmup_goes_on_until_steps_are_alike(tmp_path: Path, waits: list[float], steady: bool, steps: int) -> None:
    asked = Annotation(warmup_steps=5, steps=1, steady=steady)
    ran = run(tmp_path, MODEL + WAITING.format(waits=waits), asked)
    assert (ran.code, ran.err, ran.results["warmup_steps"]) == (0, "", steps)


@pytest.mark.parametrize("given", [{}, {"warmup_steps": 7}])
def test_an_asked_warmup_is_exact(given: dict[str, int]) -> None:
    (target,) = plan(program=("python", "train.py"), profiler="torch", device="cpu", **given).targets
    assert target.annotation is not None
    assert (target.annotation.warmup_steps, target.annotation.steady) == (given.get("warmup_steps", 5), not given)


# --- the classes that stay patched -----------------------------------------------------------------------------------

NARROWED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a = {layer}
    {more}
    def forward(self, x): return self.a(x)
model, criterion = Net(), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9):
    optimizer.zero_grad(); criterion(model(torch.randn(4, 4)), torch.zeros(4, 4)).backward(); optimizer.step()
    original = nn.Module.__call__ is nn.Module._wrapped_call_impl
    patched = [one for one in (Net, nn.MSELoss, nn.Linear) if one.__call__ is not nn.Module._wrapped_call_impl]
    print(int(original), len(patched))
"""


@pytest.mark.parametrize(
    ("layer", "more", "last"),
    [
        ("nn.Linear(4, 4)", "", "1 2"),  # Net and MSELoss
        ("torch.compile(nn.Linear(4, 4), backend='eager')", "", "0 3"),
        ("nn.Linear(4, 4)", "def __call__(self, x): return super().__call__(x)", "0 3"),
    ],
    ids=["narrowed", "compiled", "overridden"],
)
def test_only_what_the_program_calls_stays_patched(tmp_path: Path, layer: str, more: str, last: str) -> None:
    """Two steps show what it calls itself; what a compiler or the program itself built on stays as it is."""
    ran = run(tmp_path, NARROWED.format(layer=layer, more=more), TO_END)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == ["0 3", *[last] * 8]
    assert ran.instances() == {"zero_grad": 4, "forward": 4, "loss": 4, "backward": 4, "optimizer": 4, "step": 4}


def test_nothing_is_left_out_where_modules_are_asked_for(tmp_path: Path) -> None:
    """Each module's call is wanted then, so every class stays patched."""
    asked = replace(WITH_MODULES, steps=2)
    text = NARROWED.format(layer="nn.Linear(4, 4)", more="")
    ran = run(tmp_path, text, asked, **annotating(asked))
    assert (ran.code, ran.out.splitlines()) == (0, ["0 3"] * 9)


# --- what the report says of the hooks -------------------------------------------------------------------------------


def test_the_cost_of_the_hooks_is_measured(tmp_path: Path) -> None:
    """It is a part of a step, and more than nothing."""
    results = run(tmp_path, MODEL + "train()").results
    assert 0 < results["hooks_ms"] < max(results["times_ms"]["step"])


def test_a_program_without_a_model_is_said_to_be_one(tmp_path: Path) -> None:
    """The report's warnings say that no call of a model was seen."""
    (tmp_path / "none.py").write_text("print(1)\n")
    words = ["run", "--profiler", "torch", "--output-dir", "runs", "--", sys.executable, "none.py"]
    subprocess.run([sys.executable, "-m", "nsys_analyzer", *words], capture_output=True, timeout=LONG, cwd=tmp_path)
    assert "no call of a PyTorch model was seen" in (tmp_path / "runs" / "report.md").read_text(encoding="utf-8")


# --- programs that a counting mode or an attribute would break --------------------------------------------------------

COMPILED_STEP = (
    MODEL
    + """
@torch.compile(backend="eager")
def whole(x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(8): optimizer.zero_grad(); whole(torch.randn(4, 8))
print("end")
"""
)
HIGHER_ORDER = """
import torch
from torch.nn.attention.flex_attention import flex_attention
class Flex(torch.nn.Module):
    def __init__(self): super().__init__(); self.w = torch.nn.Parameter(torch.ones(1))
    def forward(self, x): return flex_attention(x * self.w, x, x)
model = Flex()
with torch.no_grad():
    for _ in range(8): model(torch.randn(1, 2, 16, 8))
print("end")
"""
ODD_ATTRIBUTE = """
import torch
class Odd(torch.nn.Linear):
    @property
    def config(self): raise ValueError("not yet")
model = Odd(8, 8)
with torch.no_grad():
    for _ in range(8): model(torch.randn(4, 8))
print("end")
"""


@pytest.mark.parametrize(
    "text", [COMPILED_STEP, HIGHER_ORDER, ODD_ATTRIBUTE], ids=["step", "higher_order", "attribute"]
)
def test_a_program_ends_as_it_does_without_us(tmp_path: Path, text: str) -> None:
    """A compiled function around a whole step, an operator that takes functions, an attribute that raises."""
    ran = run(tmp_path, text, TO_END)
    assert (ran.code, ran.out) == (0, "end\n"), ran.err
    assert ran.results["times_ms"]["step"]


def test_another_threads_backward_pass_is_not_the_programs(tmp_path: Path) -> None:
    """It goes on while the model is called: the FLOPs of the step are those of the thread that makes the steps."""
    text = (
        MODEL
        + """
import threading
other, stop = nn.Linear(8, 8), threading.Event()
def learn():
    while not stop.is_set(): other(torch.randn(4, 8)).sum().backward()
train(1)
thread = threading.Thread(target=learn); thread.start()
train(9); stop.set(); thread.join()
"""
    )
    ran = run(tmp_path, text, TO_END)
    assert ran.code == 0, ran.err
    assert ran.results["flops"]["passes"]["forward"] == ran.results["flops"]["passes"]["backward"] == 1
