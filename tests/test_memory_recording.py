"""``run --memory`` and programs that run out of memory: a further run leaves a snapshot of PyTorch's memory."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsys_analyzer import render
from nsys_analyzer.analysis.memory.accounting import account_memory
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.capture.hooks.memory import FILE_VARIABLE, MemoryHistory
from nsys_analyzer.capture.plan import Recording, make_plan
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.capture.targets import Target
from nsys_analyzer.cli.run import _describe_memory
from nsys_analyzer.configuration import Run
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.sections.decision import decision_section
from nsys_analyzer.share import share
from nsys_analyzer.trace.memory_snapshot import SNAPSHOT_SUFFIX, find_snapshot_files, read_snapshot
from tests.support.annotated import ASKED, run
from tests.support.export import Export, training_step
from tests.test_sweep import FakeProfiler, sweep


def first_screen(capture: CaptureSummary) -> str:
    section = decision_section(capture, Evidence((capture,)))
    return " ".join(render(Report("", (section,))).replace("\N{NO-BREAK SPACE}", " ").split())


#: A program that trains on the CPU, and in which PyTorch behaves as on a GPU whose memory can be recorded.
PROGRAM = """
import time, torch
events, calls = [], []
def alloc(address):
    frames = [{"name": "forward", "filename": "model.py", "line": 7}]
    events.append({"action": "alloc", "addr": address, "size": 512, "stream": 0, "time_us": time.time_ns() // 1000,
                   "frames": frames})
torch.cuda.memory._record_memory_history = lambda **options: calls.append(options)
torch.cuda.memory._snapshot = lambda: {"segments": [], "device_traces": [list(events)]}
torch.cuda.synchronize = lambda: None
torch._C._cuda_attach_out_of_memory_observer = lambda observer: globals().update(observer=observer)
for call, _ in torch.cuda._queued_calls[:]:
    if call.__name__ == "_start":
        call()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    print(step, flush=True)
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alloc(1000 * step + 512)
            return x
        @staticmethod
        def backward(ctx, gradient):
            return gradient
    loss = model(Counted.apply(torch.randn(4, 8))).sum()
    {failure}
    loss.backward()
    optimizer.step()
"""


def fake_torch(calls: list[Any]) -> Any:
    """A PyTorch whose memory can be recorded, and that notes the calls to it."""
    torch = SimpleNamespace(_C=SimpleNamespace())
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _snapshot=lambda: {"segments": [], "device_traces": [[]]},
    )
    torch.cuda = SimpleNamespace(memory=memory, _lazy_call=lambda call: call(), synchronize=lambda: None)
    torch._C._cuda_attach_out_of_memory_observer = calls.append
    return torch


def test_the_history_begins_with_the_first_use_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, f"{tmp_path}/capture_rank%q{{RANK}}{SNAPSHOT_SUFFIX}")
    monkeypatch.setenv("RANK", "1")
    calls: list[Any] = []
    torch = fake_torch(calls)
    waiting: list[Callable[[], None]] = []
    torch.cuda._lazy_call = waiting.append
    history = MemoryHistory(torch)
    assert not calls
    waiting[0]()
    assert calls[0] == {"context": "alloc", "stacks": "python", "max_entries": 1_000_000}
    history.add_phase("forward", 5)
    history.note_step_end()
    history.add_phase("backward", 7)
    history.finish()
    assert calls[-1] == {"enabled": None}
    (path,) = find_snapshot_files(tmp_path / "capture.sqlite")
    assert path.name == f"capture_rank1{SNAPSHOT_SUFFIX}"
    (forward, backward) = read_snapshot(path).phases
    assert (forward[:3], backward[:3]) == (("forward", 0, 5), ("backward", 1, 7))
    assert forward[3] > forward[2]


def test_nothing_is_recorded_without_the_variable_or_by_an_old_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    MemoryHistory(fake_torch(calls)).finish()
    assert calls == []
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "snapshot"))
    old = fake_torch(calls)
    del old.cuda.memory._record_memory_history
    MemoryHistory(old).finish()
    assert "the memory is not recorded: AttributeError" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_the_hooks_write_the_phases_of_each_step(tmp_path: Path) -> None:
    """Three warm-up steps and two more: each forward allocates 512 bytes, on the clock of the phases."""
    path = tmp_path / f"capture{SNAPSHOT_SUFFIX}"
    asked = replace(ASKED, warmup_steps=3, steps=2, stacks=False, operators=False)
    variables = {**make_hook_variables(asked), FILE_VARIABLE: str(path)}  # a run for memory alone writes no times
    ended = run(tmp_path, PROGRAM.replace("{failure}", "pass"), asked, afresh=True, **variables)
    assert ended.code == 0, ended.err
    assert ended.out.split()[-1] == "4"
    snapshot = read_snapshot(path)
    names = [(name, step) for name, step, _, _ in snapshot.phases if name in ("forward", "backward", "optimizer")]
    assert names[:6] == [(name, step) for step in (0, 1) for name in ("forward", "backward", "optimizer")]
    account = account_memory(snapshot)
    assert account.phases_from == "ranges"


@pytest.mark.slow
def test_running_out_of_memory_leaves_a_snapshot_at_once(tmp_path: Path) -> None:
    """The observer is called in step 2, before the program handles its error."""
    path = tmp_path / f"capture{SNAPSHOT_SUFFIX}"
    failure = "if step == 2: observer(0, 10, 20, 5); raise torch.OutOfMemoryError('CUDA out of memory')"
    ended = run(tmp_path, PROGRAM.replace("{failure}", failure), afresh=True, **{FILE_VARIABLE: str(path)})
    assert ended.code == 1
    snapshot = read_snapshot(path)
    assert len(snapshot.events) == 3
    assert max(step for _, step, _, _ in snapshot.phases) == 2


#: A program that notes what it is run for, and leaves a snapshot if it is asked for.
SCRIPT = f"""
import json, os, pathlib, sys
memory = os.environ.get("{FILE_VARIABLE}")
results = sys.argv[sys.argv.index("--results") + 1] if "--results" in sys.argv else None
with open(sys.argv[1], "a") as file:
    print("memory" if memory else "timed" if results else "profiled", file=file)
if memory:
    pathlib.Path(memory).write_bytes(b"")
elif results:
    pathlib.Path(results).write_text(sys.argv[2])
sys.exit(3 if "oom" in sys.argv[2] else 0)
"""


@pytest.mark.parametrize(
    ("status", "message", "memory", "kinds"),
    [
        ("ok", None, True, ["timed", "profiled", "memory"]),
        ("ok", None, False, ["timed", "profiled"]),
        ("oom", "CUDA out of memory. Tried to allocate 2 GiB", False, ["timed", "memory"]),
        ("oom", "DefaultCPUAllocator: can't allocate memory", False, ["timed"]),
    ],
)
def test_a_further_run_records_memory(
    tmp_path: Path, status: str, message: str | None, memory: bool, kinds: list[str]
) -> None:
    """Neither the timed nor the profiled run is slowed down; out of the CPU's memory, no snapshot helps."""
    results = json.dumps({"status": status, "message": message, "times_ms": {"step": [1.0]}})
    program = (sys.executable, "-c", SCRIPT, str(tmp_path / "ran"), results)
    target = Target("one", program, Run(), timed=True, memory=memory)
    (result,), _ = sweep([target], tmp_path / "runs", FakeProfiler())
    assert result.status == status
    assert (tmp_path / "ran").read_text().split() == kinds
    manifest = json.loads((tmp_path / "runs/one/manifest.json").read_text())
    names = [f"capture{SNAPSHOT_SUFFIX}"] if "memory" in kinds else None
    assert manifest.get("memory") == names


def test_the_option_reaches_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsys_analyzer.capture.plan.count_gpus", lambda: 0)
    plan = make_plan(
        models=[], options={}, recording=Recording(memory=True, profiler="torch"), target_option=(),
        program=(sys.executable, "train.py"), dry_run=True,
    )  # fmt: skip
    assert [target.memory for target in plan.targets] == [True]


@pytest.mark.gpu
def test_a_real_gpu_leaves_a_snapshot(tmp_path: Path) -> None:
    """The weights, which the program allocates before its first step, have a line of the program."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    program = (
        "import torch\nmodel = torch.nn.Linear(1024, 1024).cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for step in range(20):\n    model(torch.randn(64, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    path = tmp_path / f"capture{SNAPSHOT_SUFFIX}"
    ended = run(tmp_path, program, replace(ASKED, operators=False), afresh=True, **{FILE_VARIABLE: str(path)})
    assert ended.code == 0, ended.err
    account = account_memory(read_snapshot(path))
    parts = {part.category: part.bytes for part in account.parts}
    assert parts["weights"] >= 1024 * 1024 * 4
    assert account.phases_from == "ranges"


def test_the_first_sentence_of_a_report_says_that_memory_ran_out(real_capture: Callable[[str], Path]) -> None:
    """Idle launches are not the answer for a program that was interrupted; a snapshot beside the capture is named."""
    (capture,) = gather((real_capture("oom_fp32"),)).captures
    text = first_screen(capture)
    assert text.index("The program ran out of memory: cudaMalloc failed in the range forward") < text.index("303 ms")
    assert "idle" not in text
    assert "What filled the memory is not recorded. If a program of `nsys-analyze run` runs out of memory" in text
    run = replace(capture.run or Run(), memory=("capture.memory.pickle.gz",))
    assert "`nsys-analyze memory capture.memory.pickle.gz`" in first_screen(replace(capture, run=run))


def test_a_complete_capture_does_not_speak_of_memory(real_capture: Callable[[str], Path]) -> None:
    (capture,) = gather((real_capture("train_small256"),)).captures
    assert "memory" not in first_screen(capture).partition("What limits")[0]


def test_run_prints_what_a_snapshot_shows(tmp_path: Path) -> None:
    """One block of 512 bytes is in use when an allocation of 1,024 bytes fails."""
    frames = [{"name": "forward", "filename": "model.py", "line": 7}]
    event = {"stream": 0, "frames": frames}
    events = [
        {"action": "alloc", "addr": 4096, "size": 512, "time_us": 1_000_000, **event},
        {"action": "oom", "device_free": 100, "size": 1024, "time_us": 2_000_000, **event},
    ]
    name = f"capture{SNAPSHOT_SUFFIX}"
    with gzip.open(tmp_path / name, "wb") as file:
        pickle.dump({"segments": [], "device_traces": [events]}, file)
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "oom", "memory": [name]}))
    target = Target("one", ("python",), Run())
    (line,) = _describe_memory(target, tmp_path)
    command, sentence = line.split("\n")
    assert command == f"nsys-analyze memory {tmp_path / name}"
    assert sentence.startswith("An allocation of 1.0\N{NO-BREAK SPACE}KiB failed")
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "ok"}))
    assert [*_describe_memory(target, tmp_path)] == []
    (missing,) = _describe_memory(replace(target, memory=True), tmp_path)
    assert missing.startswith("There is no memory snapshot")


def test_share_leaves_snapshots_out_unless_it_keeps_the_source(tmp_path: Path) -> None:
    """A snapshot contains paths and lines of the program."""
    trace = training_step(Export().gpu()).write(tmp_path / "capture.sqlite")
    (tmp_path / f"capture_rank1{SNAPSHOT_SUFFIX}").write_bytes(b"snapshot")
    share(trace, tmp_path / "shared/copy.sqlite", force=True)
    assert find_snapshot_files(tmp_path / "shared/copy.sqlite") == []
    share(trace, tmp_path / "shared/copy.sqlite", force=True, keep_source=True)
    (copied,) = find_snapshot_files(tmp_path / "shared/copy.sqlite")
    assert (copied.name, copied.read_bytes()) == (f"copy_rank1{SNAPSHOT_SUFFIX}", b"snapshot")
