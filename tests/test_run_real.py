"""``nsys-analyze run`` of the real transformer, under the real profilers of this machine."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.api import Trace
from nsys_analyzer.capture.jobs import LOG, run_sweep
from nsys_analyzer.capture.nsys import ProfileOptions
from nsys_analyzer.capture.profilers import NsysProfiler
from nsys_analyzer.capture.targets import Target
from nsys_analyzer.configuration import Run
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.inputs.manifest import configuration_of, read_manifest
from nsys_analyzer.system.machine import Nsys, count_gpus
from nsys_analyzer.system.process import JobResult, Progress
from tests.support.sweeping import default_signals, let_time_pass
from tests.test_process import gone

pytest.importorskip("torch", reason="the target needs PyTorch")

pytestmark = pytest.mark.slow

LAYERS = 2
PRODUCTS = 9 * LAYERS + 1
TINY = (
    "--target-option", f"--d-model=64 --d-ff=128 --num-layers={LAYERS} --num-heads=4 --vocab-size=500",
    "--context-length", "32",
)  # fmt: skip
NAME = "small_ctx32_train_fp32"
Sweep = tuple[Path, subprocess.CompletedProcess[str]]


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``nsys-analyze`` with these words, in ``folder``."""
    code = "import sys; sys.argv[0] = 'nsys-analyze'; from nsys_analyzer.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *words],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def forward_products(trace: Trace) -> list[int]:
    """The kernels of each recorded forward pass that are PyTorch's matmuls on a CPU.

    On a busy machine the first may be slow, and look like warm-up.
    """
    forward = trace.kernels[trace.kernels["phase"] == "forward"]
    products = forward[forward["name"].isin(["aten::mm", "aten::bmm"]) & ~forward["continues"]]
    return list(Counter(products["instance"]).values())


# --- the torch recorder on a CPU ---


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A run with the torch recorder: its folder, and how it ended."""
    folder = tmp_path_factory.mktemp("cpu")
    words = ("run", *TINY, "--mode", "train", "--device", "cpu", "--profiler", "torch", "--steps", "3")
    return folder, command(folder, *words)


def test_the_whole_way(on_cpu: Sweep) -> None:
    folder, ended = on_cpu
    assert ended.returncode == 0, ended.stderr
    assert "On the CPU: context 32, 1 + 3 steps; --context-length" in ended.stderr
    assert ended.stdout.splitlines()[-1] == "runs/report.md"
    place = folder / "runs" / NAME
    assert {path.name for path in place.iterdir()} == {
        "capture.json.gz", "capture.operators.gz", "manifest.json", "target.log",
    }  # fmt: skip
    report = (folder / "runs/report.md").read_text()
    assert NAME in report
    assert "matmul" in report


def test_the_manifest_says_what_flops_need(on_cpu: Sweep) -> None:
    said = read_manifest(on_cpu[0] / "runs" / NAME / "manifest.json")
    assert (said.status, said.message, said.profiler, said.device) == ("ok", None, "torch", "cpu")
    model = configuration_of(said).model
    assert model
    assert (model.d_model, model.d_ff, model.num_layers, model.num_heads, model.vocab_size) == (64, 128, LAYERS, 4, 500)
    assert (said.context_length, said.batch_size, said.warmup_steps, said.steps) == (32, 4, 1, 3)
    assert said.torch
    assert said.operators == ("capture.operators.gz",)
    assert said.command
    assert said.command.startswith("python -m profiling_targets.transformer --model small --context-length 32")


def test_the_forward_pass_has_nine_products_a_layer_and_one(on_cpu: Sweep) -> None:
    trace = Trace.load(on_cpu[0] / "runs" / NAME / "capture.json.gz")
    assert forward_products(trace) == [PRODUCTS] * 3


def test_python_and_the_profiler_see_the_same_steps(on_cpu: Sweep) -> None:
    folder = on_cpu[0] / "runs"
    with (folder / "timings.csv").open() as file:
        timings = {row["phase"]: row for row in csv.DictReader(file)}
    ranges = Trace.load(folder / NAME / "capture.json.gz").ranges
    recorded = Counter(ranges.names[name] for name in ranges.name.tolist())
    for name in ("forward", "loss", "backward", "optimizer"):
        assert recorded[name] == int(timings[name]["steps"]) == 3
    # A step is its phases, and what lies between them.
    said = json.loads((folder / NAME / "manifest.json").read_text())["timings"]
    parts = sum(sum(said["times_ms"][name]) for name in ("forward", "loss", "backward", "optimizer"))
    assert parts <= sum(said["times_ms"]["step"])
    # The recorded process itself made as many steps after the recording. Its single step of warm-up did one-time work.
    assert (len(said["steps_after_capture_ms"]), "steps_before_capture_ms" in said) == (3, False)
    assert (timings["step"]["process"], timings["forward"]["process"]) == ("recorded", "")


def test_the_report_is_made_again_from_what_is_there(on_cpu: Sweep) -> None:
    folder = on_cpu[0] / "runs"
    again = command(folder, "report", "--csv", "timings.csv", "-o", "again/report.md", "--force")
    assert again.returncode == 0, again.stderr
    assert NAME in again.stdout
    assert "unprofiled" in again.stdout


def test_a_model_that_no_memory_holds(tmp_path: Path) -> None:
    context = 20_000_000  # a mask of 2e7² bytes, 400 TB, is more than an address can say
    words = ("--d-model=2", "--d-ff=4", "--num-layers=1", "--num-heads=1", "--vocab-size=10")
    ended = command(
        tmp_path, "run", "--target-option", " ".join(words), "--context-length", str(context), "--batch-size", "1",
        "--profiler", "none", "--device", "cpu",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said = read_manifest(tmp_path / "runs" / f"small_ctx{context}_train_fp32_b1" / "manifest.json")
    assert said.status == "oom"
    assert said.message
    assert "400000000000000 bytes" in said.message
    assert "400000000000000 bytes" in (tmp_path / "runs/report.md").read_text()


PROGRAM = """
import sys, torch
from torch.profiler import record_function
x = torch.randn(64, 64)
torch.cuda.profiler.start()
for _ in range(2):
    with record_function("forward"):
        x = x @ x / 64
    if sys.argv[1:] == ["crash"]:
        raise ValueError("a NaN in the loss")
torch.cuda.profiler.stop()
"""


@pytest.mark.parametrize("crash", [False, True])
def test_a_program_of_the_users(crash: bool, tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text(PROGRAM)
    words = ("run", "--device", "cpu", "--profiler", "torch", "--", sys.executable, "-u", "my train.py")
    ended = command(tmp_path, *words, *(["crash"] if crash else []))
    place = tmp_path / "runs/my-train"
    said = read_manifest(place / "manifest.json")
    if crash:
        assert (ended.returncode, said.status) == (1, "failed")
        assert said.message == "exit code 1: ValueError: a NaN in the loss"
        assert "a NaN in the loss" in (tmp_path / "runs/report.md").read_text()
    else:
        assert (ended.returncode, said.status) == (0, "ok"), ended.stderr
        assert forward_products(Trace.load(place / "capture.json.gz")) == [1, 1]


DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(100):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_program_of_the_users_as_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    words = ("run", "--nproc", "2", "--device", "cpu", "--profiler", "torch", "--warmup", "2", "--steps", "3", "--")
    ended = command(tmp_path, *words, sys.executable, "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "The program ran twice, to be timed and then recorded" in ended.stdout
    # 5 steps, then the step of the operators, then as many unprofiled steps as recorded ones
    assert f"and was stopped after step 5 (when recorded, after step {5 + 1 + 3})." in ended.stdout
    for rank in (0, 1):
        manifest = read_manifest(tmp_path / f"runs/train/capture_rank{rank}.manifest.json")
        assert manifest.operators == (f"capture_rank{rank}.operators.gz",)
        (step,) = Trace.load(tmp_path / f"runs/train/capture_rank{rank}.json.gz").operator_steps.values()
        assert "c10d::allreduce_" in {signature.name for signature in step.calls.signatures}
    assert "Its output is in runs/train/target.log\n" in ended.stdout
    place = tmp_path / "runs/train"
    said = [read_manifest(place / f"capture_rank{rank}.manifest.json") for rank in (0, 1)]
    assert [(one.rank, one.world_size, one.steps, one.warmup_steps) for one in said] == [(0, 2, 3, 2), (1, 2, 3, 2)]
    for rank in (0, 1):
        (summary,) = summarize(Trace.load(place / f"capture_rank{rank}.json.gz"), "train")
        assert summary.rank == rank  # PyTorch's trace says it, too
        (backward,) = (phase for phase in summary.phases if phase.phase == "backward")
        assert backward.instances + backward.warmup_instances == 3  # a first step that takes long is left out
    with (tmp_path / "runs/timings.csv").open() as file:
        steps = [(row["capture"], row["steps"]) for row in csv.DictReader(file) if row["phase"] == "step"]
    assert steps == [("train_rank0", "3"), ("train_rank1", "3")]


def test_a_memory_error_that_says_nothing(tmp_path: Path) -> None:
    """Python's own does not; a result must not take that for all is well."""
    from nsys_analyzer.configuration import Options, Run
    from profiling_targets.harness import Workload, run

    def build() -> Workload:
        raise MemoryError

    results = tmp_path / "results.json"
    assert run(build, Options(device="cpu", warmup_steps=0, steps=1, cuda_graph=False), Run(), results) == 3
    said = read_manifest(results)
    assert (said.status, said.message) == ("oom", "MemoryError")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


# --- a real nsys ---


@pytest.mark.nsys
def test_nsys_without_a_gpu(nsys: Nsys, tmp_path: Path) -> None:
    pytest.importorskip("nvtx", reason="no NVTX for a PyTorch without CUDA: pip install 'nvtx==0.2.11'")
    odd = "a folder, 50%h"
    ended = command(
        tmp_path, "run", *TINY, "--device", "cpu", "--profiler", "nsys", "--output-dir", odd, CUDA_VISIBLE_DEVICES=""
    )
    assert ended.returncode == 0, ended.stderr
    assert "No GPU: nsys only records NVTX ranges. Without --profiler nsys, operators are recorded." in ended.stderr
    said = read_manifest(tmp_path / odd / NAME / "manifest.json")
    assert (said.status, said.profiler, said.nsys) == ("ok", "nsys", nsys.version)
    (summary,) = summarize(Trace.load(tmp_path / odd / NAME / "capture.sqlite"), NAME)
    walls = {phase.phase: phase.wall_ms.mean for phase in summary.phases}
    assert min(walls[name] for name in ("forward", "loss", "backward", "optimizer")) > 0
    assert {phase.instances for phase in summary.phases} == {2}  # the warm-up's is left out
    with (tmp_path / odd / "timings.csv").open() as file:
        assert {row["status"] for row in csv.DictReader(file)} == {"ok"}
    assert "forward" in (tmp_path / odd / "report.md").read_text()


@pytest.mark.nsys
def test_a_time_out_under_nsys_ends_its_target_too(nsys: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    log = tmp_path / ".slow.part" / LOG
    let_time_pass(monkeypatch, lambda: 100.0 if log.exists() and "\n" in log.read_text() else 0.0)
    profiler = NsysProfiler(nsys, ProfileOptions(capture_range=False))
    quiet = Progress(lambda *_: None, lambda *_: None)
    target = Target("slow", (sys.executable, str(tmp_path / "slow.py")), Run())
    (result,) = run_sweep([target], tmp_path, profiler, 70, quiet)
    assert result == JobResult("timeout", "stopped after 70 s")
    assert gone(int((tmp_path / "slow" / LOG).read_text().split()[0]))


SERVER = """
import os, pathlib, signal, sys, time
import nvtx
if sys.argv[1] == "worker" and os.fork() == 0:
    time.sleep(600)
for number in range(10_000):
    with nvtx.annotate("decode bs=2 toks=2"): time.sleep(0.01)
    if number == 50: pathlib.Path("ready").touch()
    if number == 150 and sys.argv[1] == "worker": os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path("ended by itself").touch()
"""


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("words", "how", "status"),
    [
        (("--delay", "1", "--duration", "2"), "", "ok"),
        (("--delay", "0"), "interrupt", "ok"),
        (("--delay", "900", "--duration", "2"), "signal", "ok"),  # SIGUSR1 begins it
        (("--delay", "0"), "worker", "failed"),  # the first process is killed, and a worker lives on
    ],
)
def test_a_server_leaves_a_capture(nsys: Nsys, tmp_path: Path, words: tuple[str, ...], how: str, status: str) -> None:
    pytest.importorskip("nvtx", reason="no NVTX for a PyTorch without CUDA: pip install 'nvtx==0.2.11'")
    (tmp_path / "serve.py").write_text(SERVER)
    code = "import sys; sys.argv[0] = 'nsys-analyze'; from nsys_analyzer.cli.main import main; main()"
    asked = ["run", "--profiler", "nsys", *words, "--", sys.executable, "serve.py", how]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NSYS": str(nsys.path)}
    command = [sys.executable, "-c", code, *asked]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=default_signals) as process:
        while how in ("interrupt", "signal") and not (tmp_path / "ready").exists():
            time.sleep(0.05)
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        if how == "signal":
            process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == (0 if status == "ok" else 1)
    assert not (tmp_path / "ended by itself").exists()
    place = tmp_path / "runs" / "serve"
    assert read_manifest(place / "manifest.json").status == status
    ranges = Trace.load(place / "capture.sqlite").ranges
    assert len(ranges) >= 40  # half a second of steps of 0.01 s, at the least
    assert {ranges.names[code] for code in ranges.name} == {"decode bs=2 toks=2"}


# --- a GPU ---


@pytest.fixture(scope="module")
def on_gpu(nsys: Nsys, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaptureSummary]:
    """One configuration under both recorders."""
    if not count_gpus():
        pytest.skip("no GPU on this machine")
    folder = tmp_path_factory.mktemp("gpu")
    summaries = {}
    for profiler in ("nsys", "torch"):
        words = ("--context-length", "128", "--steps", "5", "--profiler", profiler, "--output-dir", profiler)
        ended = command(folder, "run", *words, NSYS=str(nsys.path))
        assert ended.returncode == 0, ended.stderr
        name = "small_ctx128_train_fp32"
        (summaries[profiler],) = gather([folder / profiler / name]).captures
    return summaries


@pytest.mark.gpu
@pytest.mark.nsys
def test_the_recorders_agree(on_gpu: dict[str, CaptureSummary]) -> None:
    ours, theirs = ({phase.phase: phase for phase in on_gpu[name].phases} for name in ("torch", "nsys"))
    assert set(ours) == set(theirs) >= {"forward", "loss", "backward", "optimizer"}
    for name, phase in theirs.items():
        assert ours[name].instances == phase.instances == 5
        assert ours[name].kernels_per_instance == phase.kernels_per_instance
        assert ours[name].kernel_time_ms.mean == pytest.approx(phase.kernel_time_ms.mean, rel=0.03)


@pytest.mark.gpu
@pytest.mark.nsys
def test_each_kernel_of_the_operator_step_on_a_gpu_has_its_call(nsys: Nsys, tmp_path: Path) -> None:
    if not count_gpus():
        pytest.skip("no GPU on this machine")
    ended = command(tmp_path, "run", *TINY, "--steps", "3", "--profiler", "nsys", NSYS=str(nsys.path))
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "runs" / NAME / "capture.sqlite")
    (step,) = trace.operator_steps.values()
    assert not any("nsys-analyze" in name for name in trace.ranges.names)
    assert (step.call >= 0).all()
    assert len(step.operation) * 3 == len(trace.operations)  # the three measured steps do the same work
    matmuls = ("aten::mm", "aten::bmm")
    forward = step.calls.in_phase("forward")
    calls = [
        index
        for index in set(step.call.tolist())
        if forward[index] and step.calls.signatures[step.calls.signature[index]].name in matmuls
    ]
    assert len(calls) == PRODUCTS


@pytest.mark.gpu
@pytest.mark.nsys
def test_a_forward_pass_on_a_gpu_has_nine_products_a_layer_and_one(nsys: Nsys, tmp_path: Path) -> None:
    if not count_gpus():
        pytest.skip("no GPU on this machine")
    words = ("run", *TINY, "--steps", "3", "--nsys-option=--pytorch=autograd-nvtx", "--profiler", "nsys")
    ended = command(tmp_path, *words, NSYS=str(nsys.path))
    if "pytorch" in ended.stderr:
        pytest.skip(f"nsys {nsys.version} makes no autograd ranges")
    assert ended.returncode == 0, ended.stderr
    ranges = Trace.load(tmp_path / "runs" / NAME / "capture.sqlite").ranges
    named = [ranges.names[index].partition(",")[0] for index in ranges.name.tolist()]
    rows = list(zip(named, ranges.start.tolist(), ranges.end.tolist(), strict=True))
    products = [start for name, start, _ in rows if name in ("aten::mm", "aten::bmm")]
    forward = [(start, end) for name, start, end in rows if name == "forward"]
    assert [sum(start <= one < end for one in products) for start, end in forward] == [PRODUCTS] * 3
