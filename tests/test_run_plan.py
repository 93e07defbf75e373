from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.capture import plan as run_plan
from nsys_analyzer.capture.plan import Plan, Recording, make_plan
from nsys_analyzer.capture.profilers import NsysProfiler, TorchProfiler, check_script_exists
from nsys_analyzer.capture.targets import Ranks
from nsys_analyzer.configuration import OPTIONS, Run
from nsys_analyzer.errors import CaptureError, ConfigurationError
from tests.support.sweeping import make_recording_nsys


def plan(**given: Any) -> Plan:
    """The plan for these options, the others as they are by default."""
    options = {name: values if isinstance(values, tuple) else (values,) for name, values in given.items()}
    return make_plan(
        models=given.get("model", ()),
        options={name: options[name] for name in OPTIONS if name in options},
        recording=Recording(**{one.name: given[one.name] for one in fields(Recording) if one.name in given}),
        target_option=given.get("target_option", ()),
        program=given.get("program", ()),
    )


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, nsys: Path | None = None, torch: str = "2.13.0") -> None:
    monkeypatch.setattr(run_plan, "count_gpus", lambda: gpus)
    monkeypatch.setattr(run_plan, "find_nsys", lambda: nsys)
    monkeypatch.setattr(run_plan, "torch_version", lambda: torch or None)


def words_of(made: Plan) -> list[str]:
    (target,) = made.targets
    return list(target.program[3:])


def test_a_machine_with_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=1, nsys=make_recording_nsys(tmp_path))
    made = plan()
    assert isinstance(made.profiler, NsysProfiler)
    assert made.profiler.options.capture_range
    assert made.notices == ()
    assert words_of(made)[2:4] == ["--context-length", "256"]
    assert words_of(made)[-6:] == ["--device", "cuda", "--steps", "10", "--warmup", "5"]


def test_a_machine_with_nothing_but_pytorch() -> None:
    made = plan()
    assert made.profiler == TorchProfiler()
    gpu, lighter = made.notices
    assert gpu == "No GPU: torch.profiler records, and PyTorch's operators on the CPU are the kernels."
    assert lighter.startswith("On the CPU: context 128, 1 + 2 steps; --context-length")
    assert words_of(made)[-6:] == ["--device", "cpu", "--steps", "2", "--warmup", "1"]


def test_nsys_without_a_gpu_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=0, nsys=make_recording_nsys(tmp_path))
    made = plan()
    assert isinstance(made.profiler, TorchProfiler)
    assert made.notices[0].startswith("No GPU: nsys would only see NVTX ranges; torch.profiler records, ")
    asked = plan(profiler="nsys")
    assert isinstance(asked.profiler, NsysProfiler)
    assert not asked.profiler.options.capture_range  # nobody would open it
    assert asked.notices[0] == "No GPU: nsys only records NVTX ranges. Without --profiler nsys, operators are recorded."


def test_a_gpu_without_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=1)
    made = plan()
    assert isinstance(made.profiler, TorchProfiler)
    hint = "nsys-analyze doctor shows how to fix it"
    assert made.notices == (f"nsys is not installed here ({hint}). torch.profiler records instead.",)


@pytest.mark.parametrize("words", [{"device": "cpu"}, {}])
def test_a_gpu_that_is_not_used(words: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asked for the CPU, or PyTorch is a build for it: nobody would open nsys's capture range."""
    machine(monkeypatch, gpus=1, nsys=make_recording_nsys(tmp_path), torch="2.13.0" if words else "2.13.0+cpu")
    made = plan(**words)
    assert isinstance(made.profiler, TorchProfiler)
    assert made.notices[0].startswith("On the CPU: nsys would only see NVTX ranges; torch.profiler records")
    assert words_of(made)[-6:-4] == ["--device", "cpu"]


def test_a_program_decides_for_itself_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=1, nsys=make_recording_nsys(tmp_path), torch="2.13.0+cpu")
    made = plan(program=("./train.sh",))
    assert isinstance(made.profiler, NsysProfiler)
    assert made.profiler.options.capture_range
    whole = plan(program=("./train.sh",), whole_program=True).profiler
    assert isinstance(whole, NsysProfiler)
    assert not whole.options.capture_range


def test_nsys_is_told_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=1, nsys=make_recording_nsys(tmp_path))
    made = plan(memory=True, nsys_option=("--trace=cuda,nvtx,cudnn", "-b none"))
    assert isinstance(made.profiler, NsysProfiler)
    command = made.profiler.record_command(("python", "a.py"), Path("out"))
    assert {"--trace=cuda,nvtx,cudnn", "--cuda-memory-usage=true"} <= set(command)
    assert command[-5:] == ["--trace=cuda,nvtx,cudnn", "-b", "none", "python", "a.py"]


@pytest.mark.parametrize(
    ("described", "option"),
    [
        ("--gpu-metrics-devices= <id>, all, cuda-visible", "--gpu-metrics-devices=cuda-visible"),
        ("--gpu-metrics-device= <id>, all", "--gpu-metrics-device=all"),
    ],
)
def test_nsys_samples_counters(described: str, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nsys = make_recording_nsys(tmp_path)
    help_text = f"[ \"$2\" = --help ] && echo '{described}' && exit"
    nsys.write_text(nsys.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{help_text}\n", 1))
    machine(monkeypatch, gpus=1, nsys=nsys)
    made = plan(counters=True, program=("python", "a.py"))
    assert made.profiler
    command = made.profiler.record_command(("python", "a.py"), Path("out"))
    assert {option, "--gpu-metrics-frequency=10000"} <= set(command)
    often = plan(counters=True, nsys_option=("--gpu-metrics-frequency=50000",)).profiler
    assert often
    frequencies = [word for word in often.record_command(("python", "a.py"), Path("out")) if "frequency" in word]
    assert frequencies == ["--gpu-metrics-frequency=50000"]


def test_counters_need_nsys_and_one_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--counters is for nsys, and torch\.profiler records here"):
        plan(counters=True, profiler="torch")
    monkeypatch.chdir(tmp_path)  # this nsys writes a report whenever it is called
    machine(monkeypatch, gpus=2, nsys=make_recording_nsys(tmp_path))
    with pytest.raises(ConfigurationError, match="--counters samples each GPU once") as refusal:
        plan(counters=True, program=("python", "a.py"), nproc=2)
    assert refusal.value.hint == "Add --one-report, which writes one report of all ranks"
    assert plan(counters=True, program=("python", "a.py"), nproc=2, one_report=True).profiler


def test_a_server_is_recorded_by_time_without_nsys_too_and_not_timed(tmp_path: Path) -> None:
    made = plan(profiler="torch", program=("python", "serve.py"), delay=30.0, duration=2.5)
    (target,) = made.targets
    assert made.profiler
    assert (made.profiler.is_server, target.is_timed) == (True, False)
    assert {"--whole-program", "--delay=30", "--duration=2.5"} <= set(
        made.profiler.record_command(target.program, tmp_path)
    )


def test_what_the_target_is_told_comes_last() -> None:
    made = plan(target_option=("--seed 3", "--d-model=64"), steps=1, warmup_steps=0)
    assert words_of(made)[-7:] == ["--steps", "1", "--warmup", "0", "--seed", "3", "--d-model=64"]


def test_every_light_default_can_be_changed_and_then_nothing_is_said() -> None:
    assert len(plan(context_length=(64,), warmup_steps=2, steps=3).notices) == 1
    assert "context 64, 1 + 2 steps" in plan(context_length=(64,)).notices[1]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_stacks_and_operators_of_a_program_are_recorded_but_where_that_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    machine(monkeypatch, gpus=0)
    for option, name in (("no_stacks", "stacks"), ("no_operators", "operators")):
        (target,) = plan(program=("python", "train.py"), **{option: not wanted}).targets
        assert target.annotation
        assert getattr(target.annotation, name) == wanted


def test_a_program_as_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=2, nsys=make_recording_nsys(tmp_path))
    made = plan(program=("python", "train.py"), nproc=2)
    (target,) = made.targets
    assert target.ranks == Ranks(2)
    assert target.annotation
    assert not target.annotation.waits_for_steady_steps  # ranks that stop at different steps wait for each other
    _, timed, profiled = made.command_lines(Path("out"))
    launcher = f"{sys.executable} -m nsys_analyzer.capture.launcher --nproc 2 --logs out/train -- "
    assert timed == f"{launcher}python train.py"
    assert profiled.startswith(f"{launcher}{tmp_path}")
    assert "'--output=out/train/capture_rank%q{RANK}'" in profiled
    (together,) = plan(program=("python", "train.py"), nproc=2, one_report=True).targets
    assert together.ranks == Ranks(2, in_one_capture=True)
    assert plan(program=("python", "train.py"), nproc=2, profiler="none").targets[0].ranks == Ranks(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"nproc": 2},
            "--nproc is for a program. Give one: nsys-analyze run --nproc 2 -- python -m profiling_targets.d",
        ),
        ({"one_report": True, "program": ("python", "a.py")}, "--one-report is for several processes. Give their"),
        ({"nproc": 2, "program": ("bin/torchrun", "a.py")}, "--nproc starts the ranks, and so does torchrun"),
        ({"nproc": 2, "one_report": True, "program": ("python", "a.py")}, "--one-report needs nsys"),
        (
            {"nproc": 2, "one_report": True, "profiler": "none", "program": ("python", "a.py")},
            "--one-report is for a pr",
        ),
    ],
)
def test_ranks_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(**given)


def test_no_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=0, torch="")
    with pytest.raises(CaptureError, match="Recording needs PyTorch, or nsys with a GPU, and neither is here"):
        plan()
    machine(monkeypatch, gpus=1, nsys=make_recording_nsys(tmp_path), torch="")
    with pytest.raises(CaptureError, match=r"need PyTorch, which is not installed. Install it: pip install 'nsys-"):
        plan()
    assert plan(program=("./train",)).targets[0].name == "train"  # it brings its own, or needs none


def test_the_pytorch_of_a_programs_own_python_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, gpus=0, torch="")
    for name, code in (("python_with", 0), ("python_without", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    assert isinstance(plan(program=(str(tmp_path / "python_with"), "train.py")).profiler, TorchProfiler)
    with pytest.raises(CaptureError, match=rf"neither is here.*instead of {tmp_path}/python_without"):
        plan(program=(str(tmp_path / "python_without"), "train.py"))


def test_commands_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0, torch="")
    with pytest.raises(ConfigurationError, match="CUDA sees no GPU here"):
        plan(device="cuda")
    made = make_plan(options={"device": ("cuda",)}, dry_run=True)
    assert words_of(made)[-6:] == ["--device", "cuda", "--steps", "10", "--warmup", "5"]


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        ("train.py --lr 1", ""),
        ("-u -X dev train.py", ""),
        ("package", ""),  # a folder with __main__.py
        ("-m package later.py", ""),  # an argument, which the module may write
        ("-c pass", ""),
        ("nosuch.py", "no file nosuch.py"),
        ("-u -W ignore nosuch.py train.py", "no file nosuch.py"),
        ("-m nosuch.module train.py", "finds no module nosuch"),
        ("-m torch.distributed.run --nproc-per-node 2 nosuch.py", "no file nosuch.py"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py nosuch.py", ""),
    ],
)
def test_code_that_is_not_there_is_told_at_once(
    words: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("package").mkdir()
    Path("package/__main__.py").touch()
    with pytest.raises(ConfigurationError, match=lacking) if lacking else nullcontext():
        check_script_exists([sys.executable, *words.split()])


def test_a_program_is_described() -> None:
    made = plan(program=("python", "train.py"), model=("2_7b",), mode=("forward-backward",), batch_size=8)
    (target,) = made.targets
    assert target.run == Run(model="2.7B", mode="forward-backward", batch_size=8)
    assert plan(program=("python", "train.py")).targets[0].run == Run()  # nothing is assumed of it
