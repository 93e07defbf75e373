"""Tests kernel classes of a file, and plugins with findings, classes and formats; a broken plugin is left out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsys_analyzer.analysis.kernels.classes import classify, use_classes
from nsys_analyzer.analysis.kernels.own_classes import OwnClass, compile_bounded_search
from nsys_analyzer.share.names import KERNEL, is_public
from nsys_analyzer.system import cluster
from nsys_analyzer.system.plugins import EXPORT_FORMATS, FINDINGS, KERNEL_CLASSES
from tests.conftest import ROOT, Main
from tests.support.export import ADD, GEMM, Export

MS = 1_000_000
SCAN = "void ours::selective_scan_fwd<float>(Params)"
CAPTURE = ROOT / "examples" / "sweep" / "small_ctx256_train_fp32" / "capture.sqlite"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A forward of 3 ms of SCAN, 2 ms of GEMM and 1 ms of ADD."""
    export = Export().gpu().range("forward", 0, 10 * MS)
    export.kernel(SCAN, 1, 10, 10 + 3 * MS).kernel(GEMM, 2, 4 * MS, 6 * MS).kernel(ADD, 3, 7 * MS, 8 * MS)
    return export.write(tmp_path / "trace.sqlite")


# --- a file


def classes_of(run_main: Main, *arguments: object) -> list[str]:
    outcome = run_main("kernels", *arguments, "--format", "json")
    assert outcome.code == 0, outcome.err
    return [row["class"] for row in json.loads(outcome.out)]


def test_classes_of_a_file(trace: Path, tmp_path: Path, run_main: Main) -> None:
    """A new class, and more kernels of one that there is; the next command knows nothing of them."""
    mine = tmp_path / "mine.toml"
    space = '["state space"]\nkernels = ["selective_scan"]\nmeaning = "Scans."\n'
    mine.write_text(f'{space}[softmax]\nkernels = ["CUDAFunctor_add"]\n')
    assert classes_of(run_main, trace) == ["other", "matmul", "elementwise"]
    assert classes_of(run_main, trace, "--classes", mine) == ["state space", "matmul", "softmax"]
    assert classes_of(run_main, trace) == ["other", "matmul", "elementwise"]
    report = tmp_path / "report.md"
    assert run_main("report", trace, "--classes", mine, "--no-figures", "-o", report).code == 0
    assert "*state space* (class): Scans." in report.read_text()


def test_classes_of_a_file_in_other_processes(
    trace: Path, tmp_path: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_count_local_workers", lambda _: 2)
    shutil.copy(trace, tmp_path / "other.sqlite")
    mine = tmp_path / "mine.toml"
    mine.write_text('["state space"]\nkernels = ["selective_scan"]\n')
    outcome = run_main("report", trace, tmp_path / "other.sqlite", "--classes", mine, "--format", "json", "-o", "-")
    captures = json.loads(outcome.out)["captures"]
    assert [one["whole"]["kernels"][0]["class"] for one in captures] == ["state space", "state space"]


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Sets Python's own limit: PyTorch's compiler raises it in a process that runs other tests, too."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kernels = 3\n", "Expected `object`, got `int`"),
        ('[a]\nkernel = ["x"]\n', "unknown field `kernel`"),
        ('[a]\nkernels = ["x("]\n', "'x(' is not a regular expression"),
        ("[a\n", "cannot be read"),
        ("a = " + "[" * 3000 + "]" * 3000, "it is nested too deep"),
        ("[x.y.z]\nkernels = ['a']", "unknown field `y`"),
        ("[x]\nkernels = ['" + "(" * 3000 + ")" * 3000 + "']", "(((…' is not a regular expression"),
        ("[x]\nkernels = ['a{99999999999}']", "the repetition number is too large"),
        ("[x]\nkernels = ['(?:a+)+(?=b)']", "invalid perl operator: (?="),
    ],
)
def test_a_file_that_says_something_else(text: str, said: str, trace: Path, tmp_path: Path, run_main: Main) -> None:
    (tmp_path / "mine.toml").write_text(text)
    outcome = run_main("kernels", trace, "--classes", tmp_path / "mine.toml")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert said in outcome.err
    assert 'Valid content is, for example: ["state space"]' in outcome.err


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(?:a?){99}a{99}$", "a*a*a*a*a*a*b$", "^(a|b|ab)*c"])
def test_every_pattern_ends(pattern: str) -> None:
    """Of 20,000 letters Python's own search would take longer than anybody lives."""
    assert not compile_bounded_search(pattern)("a" * 20_000 + "!")
    assert compile_bounded_search("a.*c(?!d)")("xabc"), "one repetition is Python's own"


def test_ten_thousand_classes() -> None:
    many = {f"c{number}": OwnClass((f"kernel_{number}_",)) for number in range(10_000)}
    use_classes(many)
    try:
        assert [classify(f"kernel_{number}_x") for number in (0, 9_999, 10_000)] == ["c0", "c9999", "other"]
    finally:
        use_classes({})


def test_what_own_classes_name_is_not_public(trace: Path, tmp_path: Path, run_main: Main) -> None:
    (tmp_path / "mine.toml").write_text('["state space"]\nkernels = ["selective"]\n')
    assert classes_of(run_main, trace, "--classes", tmp_path / "mine.toml")[0] == "state space"
    assert not is_public("selective_things", KERNEL)


# --- packages


def ended(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """How the program ends where the packages of a folder are installed."""
    command = [sys.executable, "-m", "nsys_analyzer", *map(str, arguments)]
    paths = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_example_package(trace: Path, tmp_path: Path) -> None:
    """Its finding takes 3/4 to 9/10 of the optimizer's 2.84 ms; a part of that is less, where the CPU is the limit."""
    shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "source")
    target = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "--quiet", "install", "--no-build-isolation", "--no-deps", "--no-index")
    subprocess.run([*pip, "--target", target, tmp_path / "source"], check=True)

    explained = ended(target, "explain", CAPTURE, "--format", "json")
    assert explained.returncode == 0, explained.stderr
    findings = {one["id"]: one for one in json.loads(explained.stdout)["captures"][0]["findings"]}
    assert 0 < findings["frequent_optimizer"]["saves_ms_low"] < findings["frequent_optimizer"]["saves_ms_high"] < 2.84
    assert findings["frequent_optimizer"]["evidence"] == ["It takes 2.84 ms of the GPU in a step."]
    rows = json.loads(ended(target, "kernels", trace, "--format", "json").stdout)
    assert [row["class"] for row in rows] == ["state space", "matmul", "elementwise"]
    for _ in range(2):  # it replaces what it wrote
        written = ended(target, "export", trace, "--format", "kernel-names", "-o", tmp_path / "names.txt")
        assert (written.returncode, written.stderr) == (0, "")
    assert (tmp_path / "names.txt").read_text().splitlines() == ["# kernels", *sorted((ADD, GEMM, SCAN))]


BROKEN = """
from nsys_analyzer.analysis.findings.finding import Candidate, FindingTexts

def fails(case):
    raise KeyError("a row\\nof ours")

def fails_later(case):
    yield Candidate("x", FindingTexts("x", (), "", (), ""), (lambda replay: replay.of_yesterday,))

CLASSES = {"ours": {"kernels": ["x("]}}
FORMAT = object()
"""
POINTS = """
[nsys_analyzer.findings]
absent = no_such_module:find
failing = broken:fails
late = broken:fails_later
[nsys_analyzer.kernel_classes]
wrong = broken:CLASSES
[nsys_analyzer.export_formats]
none = broken:FORMAT
"""


@pytest.mark.slow
def test_broken_plugins_are_named_and_left_out(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "broken.py").write_text(BROKEN)
    explained, without = (ended(folder, "explain", CAPTURE) for folder in (tmp_path, tmp_path / "none"))
    assert (explained.returncode, explained.stdout) == (0, without.stdout)
    start = "Left out: the plugin "
    times, *left_out = explained.stderr.splitlines()
    assert times.startswith("Unprofiled times: ")
    assert left_out == [
        f"{start}wrong ({KERNEL_CLASSES}) of broken 1.2: ValidationError: 'x(' is not a regular expression: missing ), "
        "unterminated subpattern at position 1 - at `$[...]`",
        f"{start}absent ({FINDINGS}) of broken 1.2: ModuleNotFoundError: No module named 'no_such_module'",
        f"{start}failing ({FINDINGS}) of broken 1.2: KeyError: 'a row\\nof ours'",
        f"{start}late ({FINDINGS}) of broken 1.2: AttributeError: 'Replay' object has no attribute 'of_yesterday'",
    ]
    exported = ended(tmp_path, "export", CAPTURE, "--format", "csv", "-o", tmp_path / "out.csv")
    assert (exported.returncode, exported.stderr.count("\n")) == (0, 2)
    assert f"{start}none ({EXPORT_FORMATS}) of broken 1.2: AttributeError: " in exported.stderr
