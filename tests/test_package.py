"""Tests the installed package: it has types for a type checker, and its wheel works without torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from mypy import api

from nsys_analyzer import __version__

ROOT = Path(__file__).parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

CLIENT = """
import pandas as pd
from typing_extensions import assert_type

from nsys_analyzer import Trace, __version__, build_report, compare, load, render, summarize

trace = load("capture.sqlite")
assert_type(trace, Trace)
assert_type(trace.kernels, pd.DataFrame)
captures = summarize("capture.sqlite")
if (forward := captures[0].phase("forward")) is not None:
    assert_type(forward.gpu_busy_ms.median, float | None)
assert_type(render(build_report(captures), "json"), str)
assert_type(compare("before.sqlite", "after.sqlite").compared[0].is_slower_by(0.05), bool)
assert_type(__version__, str)
load(1)  # type: ignore[arg-type]
render(captures)  # type: ignore[arg-type]
"""


def environment(folder: Path, *paths: Path | str) -> Path:
    """The Python of a new virtual environment without pip, to which the folders are given."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "given.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_program_is_checked_against_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment with the package installed: without ``py.typed``, mypy would know nothing of it."""
    python = environment(tmp_path / "venv", ROOT, *(path for path in sys.path if path.endswith("site-packages")))
    monkeypatch.chdir(tmp_path)  # mypy finds what lies in the working directory without py.typed
    Path("client.py").write_text(CLIENT)
    options = ("--strict", f"--python-executable={python}", "--cache-dir=cache", "--config-file=")
    out, err, code = api.run([*options, "client.py"])
    assert (code, err) == (0, ""), out


def test_the_changelog_tells_of_this_version() -> None:
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built as pip builds it; without an index for its tools, the test skips."""
    folder = tmp_path_factory.mktemp("wheel")
    sample = [*PIP, "download", "--retries", "1", "--no-deps", "--dest", str(folder / "downloaded"), "setuptools"]
    reached = subprocess.run(sample, capture_output=True, text=True, check=False)
    if reached.returncode:
        pytest.skip(f"pip cannot download: {reached.stderr.strip().splitlines()[-1]}")
    source = folder / "source"  # a copy, since setuptools leaves files beside what it builds
    for package in ("nsys_analyzer", "profiling_targets"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_works_without_torch(wheel: Path, tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert names >= {"nsys_analyzer/py.typed", "nsys_analyzer/capture/hooks/injected/sitecustomize.py"}

    python = environment(tmp_path / "venv")
    subprocess.run([*PIP, f"--python={python}", "install", "--no-compile", wheel], check=True)
    absent = "import importlib.util as u; print([u.find_spec(name) for name in ('torch', 'triton', 'pytest')])"
    assert output(python, "-c", absent) == "[None, None, None]\n"
    program = python.with_name("nsys-analyze")
    assert output(program, "--version") == f"nsys-analyze, version {__version__}\n"
    assert {"report", "kernels"} <= set(re.findall(r"^  (\w+)", output(program, "--help"), re.MULTILINE))
    capture = real_capture("graphnode_small256")
    output(program, "report", capture, "-o", tmp_path / "report.md")
    assert json.loads(output(program, "report", capture, "--format", "json"))["schema_version"] == 1
    assert list((tmp_path / "report_figures").iterdir())
    assert "gemm" in output(program, "kernels", capture)


def output(*command: str | Path) -> str:
    """What the command prints, run away from the checkout."""
    return subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True).stdout
