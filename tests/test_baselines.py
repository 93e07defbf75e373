"""Tests baselines, budgets, refusals of different hardware, and the action for CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsys_analyzer.analysis.comparison.estimates import Budgets, check_budgets
from nsys_analyzer.analysis.comparison.pairs import compare_runs
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import DifferentConditionsError, NsysAnalyzerError
from nsys_analyzer.report.sections.comparison import require_comparisons
from tests.conftest import ROOT, Main, Outcome
from tests.support.export import Export
from tests.support.sides import kernel, run, side
from tests.test_compare_command import steps

ACTION = ROOT / ".github" / "actions" / "nsys-analyze"
COMPILE = ROOT / "examples" / "benches" / "compile" / "captures"
EAGER, COMPILED = COMPILE / "small_ctx256_train_fp32", COMPILE / "small_ctx256_train_fp32_compile"
MS = 1_000_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def timed_on_cpu(folder: Path, ms: float, cpu: str = "A CPU") -> Path:
    """A run that was timed without a profiler, and left no capture: 20 steps that vary by 1 %."""
    (folder / "train").mkdir(parents=True)
    manifest = {"status": "ok", "profiler": "none", "device": "cpu", "host_cpu": cpu, "batch_size": 8}
    (folder / "train" / "manifest.json").write_text(json.dumps(manifest))
    rows = [f"train,{phase},20,{share * ms},{share * ms / 100}" for phase, share in (("forward", 0.4), ("step", 1))]
    (folder / "timings.csv").write_text("\n".join(("capture,phase,steps,mean_ms,std_ms", *rows)))
    return folder


# --- baselines


def test_a_baseline_is_a_report_for_each_gpu(here: Path, run_main: Main) -> None:
    """And AFTER is compared with that of its own."""
    for gpu, us in (("NVIDIA H200", 5_000), ("NVIDIA A100", 9_000)):
        path = steps(us, gpu=gpu).write(here / "train.sqlite")
        saved = run_main("baseline", "save", "main", path)
        assert saved.out == f".nsys-analyze/baselines/main/{gpu.replace(' ', '-')}.json\n", saved.err
    after = steps(5_500).write(here / "after.sqlite")
    compared = run_main("compare", ".nsys-analyze/baselines/main", after, "--fail-above", "5%")
    assert (compared.code, compared.err) == (3, "")
    assert "Slower: a step takes 6.300 → 6.800" in compared.out
    other = run_main("compare", ".nsys-analyze/baselines/main", steps(gpu="AMD MI300").write(here / "other.sqlite"))
    assert other.code == 4
    assert "train ran on NVIDIA A100, other on AMD MI300" in other.err
    assert run_main("compare", ".nsys-analyze/baselines/main", after, "--csv-before", "x.csv").code == 1


def test_what_is_no_baseline(here: Path, run_main: Main) -> None:
    empty = Export().gpu().range("step", 0, MS).write(here / "empty.sqlite")
    refused = run_main("baseline", "save", "main", empty)
    assert (refused.code, refused.out) == (1, "")
    assert "Left out: empty contains no kernel" in refused.err
    assert "contains no run that can be compared" in refused.err
    good = steps().write(here / "good.sqlite")
    assert run_main("baseline", "save", "../main", good).code == 2
    target = here / ".nsys-analyze" / "baselines" / "main" / "NVIDIA-H200.json"
    target.parent.mkdir(parents=True)
    target.write_text("mine")
    assert "was not written by nsys-analyze" in run_main("baseline", "save", "main", good).err


# --- what is no change of the program


def test_other_hardware_and_other_ways_to_time() -> None:
    """The processor counts where there is no GPU; a clock that both have is enough."""
    on_gpu = run([kernel("a", 10)], gpu="NVIDIA H200", profiler="nsys", run=Run(host_cpu="A"))
    assert compare_runs([on_gpu], [replace(on_gpu, run=Run(host_cpu="B"))]).compared
    one, other = (run([kernel("a", 10)], gpu="CPU", run=Run(host_cpu=cpu)) for cpu in ("A", "B"))
    with pytest.raises(DifferentConditionsError, match="train ran on CPU A, train on CPU B"):
        require_comparisons(compare_runs([one], [other]))
    assert compare_runs([one], [replace(other, run=None)]).compared, "its processor is not known"
    assert compare_runs([one], [other], force=True).compared[0].conditions_differ
    by_torch = replace(on_gpu, profiler="torch")
    with pytest.raises(DifferentConditionsError, match="train was timed under nsys, train under torch"):
        require_comparisons(compare_runs([on_gpu], [by_torch]))
    timed = [run([kernel("a", 10)], profiler=name, unprofiled=Stats(5, 10, 0.1)) for name in ("nsys", "torch")]
    assert compare_runs(timed[:1], timed[1:]).compared
    with pytest.raises(NsysAnalyzerError) as raised:
        require_comparisons(compare_runs([on_gpu], [replace(on_gpu, status="oom")]))
    assert raised.value.exit_status == 1


# --- budgets


def verdicts(budgets: Budgets, *runs: Any) -> dict[str, tuple[float | None, str]]:
    return {one.quantity: (one.value, one.verdict) for one in check_budgets(budgets, side(*runs))}


def test_budgets() -> None:
    """A step of 10 ms of matmul, 1 ms of softmax and 4 ms in which the GPU waits for the program.

    Between runs it differs by 25 % of the 4 ms, 1 ms: 1.96 ms to either side. The GPU's work differs by 0.25 %.
    """
    one = run([kernel("a", 10, launches=3), kernel("b", 1, "softmax", launches=2)], {"host": 4})
    asked = Budgets(step_ms=14, launches=4, peak_memory_gib=1, phases_ms={"forward": 5}, classes_ms={"matmul": 9.5})
    assert verdicts(asked, one) == {
        "step": (15, "above, perhaps by chance"),
        "launches": (5, "exceeded"),
        "peak memory": (None, "not known"),
        "forward": (None, "not known"),
        "compute: matmul": (10, "exceeded"),
    }
    assert verdicts(Budgets(step_ms=12.9), one)["step"] == (15, "exceeded")
    assert verdicts(Budgets(step_ms=15), one)["step"] == (15, "kept")
    assert verdicts(Budgets(classes_ms={"embedding": 0}), one) == {"compute: embedding": (0, "kept")}
    timed = run([kernel("a", 10)], unprofiled=Stats(5, 9, 0.01))
    assert verdicts(Budgets(step_ms=8.9, phases_ms={"forward": 5}), timed) == {
        "step": (9, "exceeded"),
        "forward": (None, "not known"),
    }


def test_budgets_of_a_comparison(here: Path, run_main: Main) -> None:
    """Steps of 6.3 ms with two kernels each, GEMM for 5 ms."""
    path, budgets = steps().write(here / "train.sqlite"), here / "budgets.toml"
    budgets.write_text("step_ms = 7\nlaunches = 1\n[classes_ms]\nmatmul = 4.9\n")
    outcome = run_main("compare", path, path, "--budgets", budgets, "--format", "json")
    assert (outcome.code, outcome.err) == (3, "Budgets exceeded: launches, compute: matmul\n")
    (one,) = json.loads(outcome.out)["comparisons"]
    assert [(each["what"], each["value"], each["verdict"]) for each in one["budgets"]] == [
        ("step", pytest.approx(6.3), "kept"), ("launches", 2, "exceeded"), ("compute: matmul", 5, "exceeded"),
    ]  # fmt: skip
    budgets.write_text("peak_memory_gib = 1\n")
    outcome = run_main("compare", path, path, "--budgets", budgets, "--format", "markdown")
    assert (outcome.code, outcome.err) == (1, "Budgets not known: peak memory\n")
    assert "| peak memory | 1.0\N{NO-BREAK SPACE}GiB | –" in " ".join(
        outcome.out.replace("|\n", "| ").split(" ")
    ).replace("  ", "")
    for text, said in (
        ("steps_ms = 1", "unknown field `steps_ms`"),
        ("[classes_ms]\nmatmuls = 1", "kernel class 'mat"),
    ):
        budgets.write_text(text)
        outcome = run_main("compare", path, path, "--budgets", budgets)
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert said in outcome.err


# --- without a GPU


def test_times_alone_are_compared_on_one_processor(here: Path, run_main: Main) -> None:
    """10 % of 200 ms, by steps that vary by 1 % and a machine whose runs vary by 2 %."""
    assert run_main("baseline", "save", "main", timed_on_cpu(here / "before", 200)).code == 0
    compared: Callable[..., Outcome] = lambda after: run_main(  # noqa: E731
        "compare", ".nsys-analyze/baselines/main", after, "--fail-above", "5%", "--cpu-spread", "2%"
    )
    assert compared(timed_on_cpu(here / "slow", 220)).code == 3
    assert compared(timed_on_cpu(here / "same", 204)).code == 0
    assert compared(timed_on_cpu(here / "elsewhere", 204, "Another CPU")).code == 4
    (here / "budgets.toml").write_text("step_ms = 190\n[phases_ms]\nforward = 85\n")
    same = run_main("compare", "same", "same", "--budgets", "budgets.toml", "--cpu-spread", "1%")
    assert (same.code, same.err.splitlines()[-1]) == (3, "Budgets exceeded: step")


# --- the action


@pytest.fixture
def action(here: Path) -> Callable[..., tuple[int, str, str]]:
    """The script of the action: its exit status, its result, and the last line that it prints."""
    program = here / "bin" / "nsys-analyze"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsys_analyzer "$@"\n')
    program.chmod(0o755)

    def start(**variables: object) -> tuple[int, str, str]:
        told = {"GITHUB_OUTPUT": "output.txt", "GITHUB_STEP_SUMMARY": "summary.md"}
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        given = {name: str(value) for name, value in variables.items()}
        ended = subprocess.run(
            ("bash", ACTION / "check.sh"), env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **told, **given},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        result = (here / "output.txt").read_text().splitlines()[-1].removeprefix("result=")
        return ended.returncode, result, ended.stdout.splitlines()[-1]

    return start


@pytest.mark.slow
def test_the_action_on_captures(here: Path, action: Callable[..., tuple[int, str, str]]) -> None:
    """The baseline is compiled, and a step takes 28 ms of it; eager it takes 42."""
    assert action(CAPTURE=EAGER) == (
        0, "no-baseline",
        "::notice title=nsys-analyze no-baseline::There is no baseline main in .nsys-analyze/baselines",
    )  # fmt: skip
    assert action(CAPTURE=COMPILED, SAVE="true")[:2] == (0, "saved")
    status, result, line = action(CAPTURE=EAGER)
    assert (status, result) == (3, "slower")
    assert line.startswith("::error title=nsys-analyze slower::Slower: a step takes 28.06 → 41.80\N{NO-BREAK SPACE}ms")
    assert "%25 (95\N{NO-BREAK SPACE}%25 interval" in line
    assert "| compute: elementwise" in (here / "summary.md").read_text()
    assert action(CAPTURE=EAGER, FAIL_ABOVE="60%")[:2] == (0, "passed")
    (here / "budgets.toml").write_text("[classes_ms]\nelementwise = 4\n")
    status, result, line = action(CAPTURE=EAGER, BASELINE=EAGER, BUDGETS="budgets.toml")
    assert (status, result, line.partition("slower::")[2]) == (3, "slower", "Budgets exceeded: compute: elementwise")
    assert action(CAPTURE=EAGER, BASELINE="none", BUDGETS="budgets.toml")[:2] == (3, "slower")
    status, result, line = action(CAPTURE=timed_on_cpu(here / "cpu", 200))
    assert (status, result) == (0, "other-conditions")
    assert "ran on NVIDIA H200, train on CPU A CPU" in line
    assert action(CAPTURE="absent.sqlite")[:2] == (1, "failed")


PROGRAM = """
import sys, time, torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    time.sleep(float(sys.argv[1]))
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_action_records_a_program(here: Path, action: Callable[..., tuple[int, str, str]]) -> None:
    """Its times alone, without a GPU: steps that sleep for 30 ms are slower than those that sleep for 10.

    The words of the command line are those of a shell.
    """
    (here / "train it.py").write_text(PROGRAM)
    start, options = f"'{sys.executable}' 'train it.py'", "--profiler none --steps 10"
    assert action(PROGRAM=f"{start} 0.01", RUN_OPTIONS=options, SAVE="true")[:2] == (0, "saved")
    spread = "--cpu-spread 5%"  # another host than those on which 25 % was measured
    assert action(PROGRAM=f"{start} 0.03", RUN_OPTIONS=options, COMPARE_OPTIONS=spread)[:2] == (3, "slower")
    assert action(PROGRAM=f"{start} wrong", RUN_OPTIONS=options)[:2] == (1, "failed")


def test_the_script_takes_what_the_action_gives() -> None:
    """Inputs reach it as variables alone: what they hold is never read as a program of the shell, but for `program`."""
    described = yaml.safe_load((ACTION / "action.yml").read_text())
    install, checked = described["runs"]["steps"]
    given = {**install["env"], **checked["env"]}
    assert sorted(given.values()) == sorted(f"${{{{ inputs.{name} }}}}" for name in described["inputs"])
    assert not any("${{" in step["run"] for step in (install, checked))
    script = (ACTION / "check.sh").read_text()
    assert [name for name in checked["env"] if f"${{{name}" not in script] == []
    assert [name for name, one in described["inputs"].items() if not one["description"].endswith(".")] == []
