"""Programs that nobody annotated: their steps and phases are found, and they behave as they do without that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.capture.profilers import annotating
from nsys_analyzer.capture.targets import Annotation
from nsys_analyzer.trace.trace import Trace
from tests.support.prepared import run_prepared

pytestmark = pytest.mark.slow  # each runs a program with PyTorch

ASKED = Annotation(warmup_steps=3, steps=4)
LONG = 240
MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(count=20):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""


class Ran(NamedTuple):
    """How a program ended, and what the hooks wrote."""

    code: int
    out: str
    err: str
    results: dict[str, Any]

    def instances(self) -> dict[str, int]:
        """How often each phase was timed."""
        return {phase: len(times) for phase, times in self.results["times_ms"].items()}


def run(folder: Path, text: str, asked: Annotation | None = ASKED, *, afresh: bool = False, **more: str) -> Ran:
    """Runs a program with the hooks, without a profiler; ``afresh`` in a Python of its own."""
    program, results = folder / "program.py", folder / "results.json"
    program.write_text(text)
    environment = {**os.environ, **annotating(asked, results), **more}
    if afresh:
        words = [sys.executable, str(program)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=LONG, env=environment, cwd=folder)
    else:
        ended = run_prepared(program, environment)
    return Ran(
        ended.returncode, ended.stdout, ended.stderr, json.loads(results.read_text()) if results.exists() else {}
    )


TRAINING = {"zero_grad": 4, "forward": 4, "backward": 4, "optimizer": 4, "step": 4}
ACCUMULATED = """
for i in range(60):
    (model(torch.randn(4, 8)).sum() / 3).backward()
    if i % 3 == 2:
        optimizer.step(); optimizer.zero_grad()
"""
ADVERSARIAL = """
other = nn.Linear(8, 8)
of_other = torch.optim.Adam(other.parameters())
for i in range(30):
    optimizer.zero_grad(); model(other(torch.randn(4, 8)).detach()).sum().backward(); optimizer.step()
    of_other.zero_grad(); model(other(torch.randn(4, 8))).sum().backward(); of_other.step()
"""
MANY_OF_ONE = """
other = nn.Linear(8, 8)
of_other = torch.optim.Adam(other.parameters())
for i in range(60):
    model(torch.randn(4, 8)).sum().backward(); optimizer.step()
    if i % 3 == 2:
        model(other(torch.randn(4, 8))).sum().backward(); of_other.step()
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
for i in range(20):
    optimizer.zero_grad()
    checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
    optimizer.step()
"""
CLOSURE = """
def closure():
    optimizer.zero_grad(); loss = model(torch.randn(4, 8)).sum(); loss.backward(); return loss
for i in range(20): optimizer.step(closure)
"""
EVALUATED = """
from torch.utils.data import DataLoader, TensorDataset
data, criterion = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4), nn.MSELoss()
for x, y in data:
    optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()
    with torch.no_grad(): model(x)
"""
INFERRED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
with torch.no_grad():
    for i in range(20): model(torch.randn(4, 8))
"""


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        (MODEL + "train()", TRAINING),
        (MODEL + ACCUMULATED, {**TRAINING, "forward": 12, "backward": 12}),
        (MODEL + ADVERSARIAL, {"zero_grad": 8, "forward": 16, "backward": 8, "optimizer": 8, "step": 4}),
        # a step of the second optimizer closes three of the first
        (MODEL + MANY_OF_ONE, {"forward": 20, "backward": 16, "optimizer": 16, "step": 4}),
        (MODEL + CHECKPOINTED, TRAINING),
        (MODEL + CLOSURE, TRAINING),
        (MODEL + CLOSURE.replace("step(closure)", "step(closure=closure)"), TRAINING),
        (MODEL + EVALUATED, {**TRAINING, "data": 4, "loss": 4, "evaluation": 4}),
        (INFERRED, {"forward": 4, "step": 4}),
    ],
    ids=[
        "plain",
        "accumulated",
        "adversarial",
        "many_of_one",
        "checkpointed",
        "closure",
        "closure_named",
        "evaluated",
        "inferred",
    ],
)
def test_steps_and_phases(tmp_path: Path, text: str, instances: dict[str, int]) -> None:
    """Three steps pass, four are timed, then the program ends."""
    ran = run(tmp_path, text + "\nprint('never')", afresh=text == INFERRED)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert ran.instances() == instances
    assert ran.results["steps"] == 4
    assert ran.results["stopped_after"] == ran.results["warmup_steps"] + 4


def test_a_program_that_goes_on(tmp_path: Path) -> None:
    ran = run(tmp_path, MODEL + "train(); print('end')", replace(ASKED, run_to_end=True))
    assert (ran.code, ran.out, ran.err) == (0, "end\n", "")
    assert ran.instances() == TRAINING
    assert "stopped_after" not in ran.results


def test_a_program_that_ends_early(tmp_path: Path) -> None:
    """Five of the seven steps: the two after the warm-up are kept; of two steps nothing is, and that is said."""
    assert run(tmp_path, MODEL + "train(5)").instances()["optimizer"] == 2
    few = run(tmp_path, MODEL + "train(2)")
    said = "the program ended after 2 steps, and the first 3 are not recorded: give --warmup 1"
    assert few.err == f"nsys-analyze: {said}\n"
    assert few.results == {"timed_by": "hooks", "not_annotated": said}


GENERATING = """
import torch
from torch import nn
from nvtx import opened
from transformers.generation.utils import GenerationMixin
class Model(nn.Module, GenerationMixin):
    def __init__(self): super().__init__(); self.table = nn.Embedding(9, 4)
    def forward(self, input_ids, cache=None, attention_mask=None): return self.table(input_ids)
model = Model()
for _ in range(2): model.generate(torch.zeros(2, 5, dtype=torch.long), 3)
model(torch.zeros(2, 5, dtype=torch.long))
print([name for name in opened if "=" in name])
"""
MIXIN = """
class GenerationMixin:
    def generate(self, ids, tokens):
        self(input_ids=ids)
        for _ in range(tokens - 1): self(ids[:, :1], cache=0, attention_mask=ids)
"""
NVTX = """
opened = []
push_range = start_range = opened.append
def pop_range(): pass
end_range = annotate = print
"""


def test_prefill_and_decode_of_a_generation(tmp_path: Path) -> None:
    """Two generations of three tokens for two prompts of five; a call outside is neither. The mask says positions."""
    package = tmp_path / "transformers" / "generation"
    package.mkdir(parents=True)
    for name, text in (("../__init__", ""), ("__init__", ""), ("utils", MIXIN), ("../../nvtx", NVTX)):
        (package / f"{name}.py").write_text(text)
    ran = run(tmp_path, GENERATING, afresh=True)
    passes = ["prefill (inferred) bs=2 toks=10", *2 * ["decode (inferred) bs=2 toks=2 sk=10"]]
    assert (ran.code, ran.out) == (0, f"{2 * passes}\n"), ran.err


BATCHING = """
import torch
from types import SimpleNamespace as Of
from nvtx import opened
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

def inputs(*requests):
    made = [Of(query_length=new, state=Of(position_offset=there)) for new, there in requests]
    return Of(requests_in_batch=made)

processor = ContinuousBatchProcessor()
print(processor._generation_step("of an older transformers"))
of_two = Of(current_pair=1, io_pairs=[None, Of(host_io=inputs((1, 7)))])
for processor.inputs_and_outputs in (inputs((5, 5), (7, 7)), inputs((1, 6), (9, 9)), of_two, inputs()):
    print(processor._generation_step("model"))
print([name for name in opened if "=" in name])
"""
PROCESSOR = """
class ContinuousBatchProcessor:
    def _generation_step(self, model): return model
"""


def test_steps_of_continuous_batching(tmp_path: Path) -> None:
    """What the scheduler has put into the batch: new tokens of each request, and how many it has with them."""
    package = tmp_path / "transformers" / "generation" / "continuous_batching"
    package.mkdir(parents=True)
    texts = ("__init__", ""), ("../__init__", ""), ("../../__init__", ""), ("continuous_api", PROCESSOR)
    for name, text in (*texts, ("../../../nvtx", NVTX)):
        (package / f"{name}.py").write_text(text)
    ran = run(tmp_path, BATCHING, afresh=True)
    steps = ["prefill bs=2 toks=12 sk=12", "mixed bs=2 toks=10 sk=15", "decode bs=1 toks=1 sk=7"]
    model = "model\n"
    assert (ran.code, ran.out) == (0, f"of an older transformers\n{4 * model}{steps}\n"), ran.err


OWN_FINDER = """
import sys
from importlib.abc import MetaPathFinder
class Finder(MetaPathFinder):
    def find_spec(self, *_): return None
sys.meta_path.insert(0, Finder())
"""
OWN_WINDOW = """
import contextlib
def opened(call):
    with contextlib.suppress(Exception): getattr(torch.cuda.profiler, call)()
train(6); opened("start"); train(2); opened("stop"); train(2); print("end")
"""


def test_a_capture_range_of_the_programs_own(tmp_path: Path) -> None:
    """The script opens one, so the hooks do not, and the program runs to its end.

    On a CPU its calls fail, and the two steps between them are the measured ones all the same.
    """
    ran = run(tmp_path, MODEL + OWN_WINDOW)
    assert (ran.code, ran.out) == (0, "end\n")
    assert (ran.results["warmup_steps"], ran.results["steps"], len(ran.results["times_ms"]["step"])) == (6, 2, 2)


@pytest.mark.parametrize(
    ("text", "code", "out"),
    [
        ("print('no torch')", 0, "no torch\n"),
        ("import sys; sys.exit(7)", 7, ""),
        (MODEL + "train(2); raise SystemExit(5)", 5, ""),
        (MODEL + "optimizer.step = None\ntry: optimizer.step()\nexcept TypeError: print('raised')", 0, "raised\n"),
        (MODEL + "try: model(torch.randn(4, 9))\nexcept RuntimeError: print('raised')\ntrain(2)", 0, "raised\n"),
        (MODEL + "m = torch.jit.trace(model, torch.randn(4, 8)); print(len(m(torch.zeros(4, 8))))", 0, "4\n"),
        (MODEL + "m = torch.jit.script(model); print(len(m(torch.zeros(4, 8))))", 0, "4\n"),
        (MODEL + "import os\nif os.fork() == 0: train(2); os._exit(0)\nos.wait(); print('end')", 0, "end\n"),
        (OWN_FINDER + MODEL + "import colorsys; print('found')", 0, "found\n"),
        ("import sys; print([one for one in sys.path if 'injected' in one])", 0, "[]\n"),
        (MODEL + "class C(nn.Linear):\n  def __call__(self, x): return 3\nprint(C(2, 2)(None))", 0, "3\n"),
    ],
)  # fmt: skip
def test_a_program_behaves_as_without_the_hooks(tmp_path: Path, text: str, code: int, out: str) -> None:
    ran = run(tmp_path, text, afresh=not text.startswith(MODEL))
    assert (ran.code, ran.out) == (code, out)
    assert "Traceback" not in ran.err
    assert "annotation ended" not in ran.err


def test_a_compiled_model_stays_whole(tmp_path: Path) -> None:
    """``fullgraph`` raises where the hooks would break the graph."""
    text = "model = torch.compile(model, fullgraph=True, backend='eager')\ntrain()"
    assert run(tmp_path, MODEL + text).instances() == TRAINING


def test_the_programs_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("print('own')")
    before = annotating(ASKED)["PYTHONPATH"]
    ran = run(tmp_path, "print('program')", afresh=True, PYTHONPATH=f"{before}{os.pathsep}{tmp_path / 'own'}")
    assert ran.out == "own\nprogram\n"


def test_a_child_leaves_no_results_of_its_parents_steps(tmp_path: Path) -> None:
    """Steps 4 to 7 are timed; the child is forked behind the fifth and ends after its parent."""
    forked = "import os\ntrain(5)\nread, write = os.pipe()\nif os.fork():\n    os.close(read); train()\n"
    ran = run(tmp_path, MODEL + f"{forked}else:\n    os.close(write); os.read(read, 1)\nprint('end')", afresh=True)
    assert (ran.code, ran.out, ran.err) == (0, "end\n", "")  # of the child: the parent stops behind step 7
    assert ran.instances() == TRAINING


def test_an_unknown_pytorch_is_said(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    ran = run(tmp_path, "import torch; print('end')", afresh=True)
    assert (ran.code, ran.out) == (0, "end\n")
    assert ran.err.startswith("nsys-analyze: this program is not annotated: AttributeError")


def recorded(folder: Path, *words: str) -> CaptureSummary:
    """What the torch recorder and the hooks make of our target."""
    command = [sys.executable, "-m", "nsys_analyzer.capture.recorder", "--output", str(folder / "trace.json.gz"), "--"]
    target = ["-m", "profiling_targets.transformer", "--model", "small", "--num-layers", "2", "--context-length", "16"]
    done = subprocess.run(
        [*command, *target, "--steps", "2", "--warmup", "2", "--device", "cpu", *words],
        capture_output=True, text=True, timeout=LONG, env={**os.environ, **annotating(ASKED)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (summary,) = summarize(Trace.load(folder / "trace.json.gz"), folder.name)
    return summary


@pytest.mark.nightly
def test_the_same_kernels_as_with_the_programs_own_ranges(tmp_path: Path) -> None:
    """Our target without its ranges, and with them: then no range of the hooks stands beside one of its own."""
    found = {}
    for name, words in (("own", []), ("hooked", ["--no-ranges"])):
        (tmp_path / name).mkdir()
        found[name] = recorded(tmp_path / name, *words)
    for phase in ("forward", "backward", "optimizer"):
        own, hooked = (
            {row.name: row.launches_per_instance for row in one.phase(phase).kernels}  # type: ignore[union-attr]
            for one in (found["own"], found["hooked"])
        )
        assert own
        assert own == hooked
    step = found["own"].phase("step")
    assert step is not None
    assert step.instances + step.warmup_instances == 2  # on a busy machine the first may be a slow start
