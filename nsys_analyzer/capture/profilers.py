"""The ways a target runs: without a profiler, or under one, Nsight Systems or PyTorch's own in the target's process.

A PyTorch program that nobody annotated gets ranges around its steps and phases, their times, and the capture range from
the hooks. Python loads them through a folder for ``PYTHONPATH``. The program's Python may be another one, without this
package: the hooks need nothing but PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from nsys_analyzer.capture import hooks
from nsys_analyzer.capture.launcher import launched
from nsys_analyzer.capture.nsys import ProfileOptions, finished_report, profile_command, start_now
from nsys_analyzer.capture.recorder import BEGIN
from nsys_analyzer.capture.targets import RANK_SUFFIX, Annotation, Ranks, Target, is_python
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.system.machine import run_for_lines
from nsys_analyzer.system.nsys import Nsys
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES
from nsys_analyzer.trace.sources import ensure_export, open_capture

INSTALL_TORCH = "Install it: pip install 'nsys-analyze[run]'"
_FLAGS_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # of the Python interpreter
#: Programs, and modules behind ``python -m``, that run a Python script.
_PYTHON_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch")
_FINDS = "from importlib.util import find_spec; print(find_spec({!r}))"
_PHASES = ("step", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class NsysProfiler:
    """``nsys profile``, then ``nsys export``."""

    nsys: Nsys
    options: ProfileOptions
    name: str = "nsys"
    suffix: str = ".sqlite"

    @property
    def runs_on(self) -> bool:
        """Whether the program is one that a signal ends."""
        return self.options.runs_on

    def described(self) -> dict[str, str]:
        """Returns its keys in a manifest: the version of nsys."""
        return {"nsys": self.nsys.version}

    def begin(self, folder: Path) -> None:
        """Begins the recording of a server into a folder, before its delay is over."""
        del folder
        start_now(self.nsys)

    def command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """Returns the command line that records into ``capture.nsys-rep`` of the folder, or a report of each rank.

        Raises:
            CaptureError: this nsys lacks an option that was asked for.
        """
        report = folder / "capture.nsys-rep"
        if ranks is None:
            return profile_command(self.nsys, report, program, self.options)
        if ranks.one_report:
            return profile_command(self.nsys, report, launched(program, ranks.count, folder), self.options)
        return launched(profile_command(self.nsys, report, program, self.options, by_rank=True), ranks.count, folder)

    def export(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        """Leaves ``STEM.sqlite`` of what a program left that has ended, even by a crash; ``log`` is its output.

        Raises:
            NsysAnalyzerError: nothing was recorded, or it cannot be exported.
        """
        ensure_export(finished_report(self.nsys, folder / f"{stem}.nsys-rep", log, timeout_s), timeout_s)


@dataclass(frozen=True)
class TorchProfiler:
    """``torch.profiler`` in the program's own process."""

    memory: bool = False
    whole_program: bool = False
    delay_s: float = 0
    duration_s: float = 0
    name: str = "torch"
    suffix: str = ".json.gz"
    runs_on: bool = False

    def described(self) -> dict[str, str]:
        """Returns its keys in a manifest: none, the target states the version of PyTorch."""
        return {}

    def begin(self, folder: Path) -> None:
        """Begins the recording of a server into a folder, before its delay is over."""
        (folder / BEGIN).touch()

    def command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """Returns the command line that records into ``capture.json.gz`` of the folder, or a trace of each rank.

        Raises:
            ConfigurationError: no Python program, or one whose code is not in a file; or one trace of several ranks.
        """
        if ranks and ranks.one_report:
            raise ConfigurationError("--one-report is for nsys, and torch.profiler records each rank by itself")
        if not is_python(program[0]):
            raise ConfigurationError(
                f"The torch recorder runs Python programs, and {program[0]} is none",
                "Start it with python, or install Nsight Systems: nsys-analyze doctor",
            )
        before = _interpreter_flags(program[1:])
        output = str(folder / f"capture{RANK_SUFFIX if ranks else ''}.json.gz")
        flags = ["--memory"] * self.memory + ["--whole-program"] * self.whole_program
        flags += [f"--delay={self.delay_s:g}"] * bool(self.delay_s)
        flags += [f"--duration={self.duration_s:g}"] * bool(self.duration_s)
        recorder = [program[0], *before, "-m", "nsys_analyzer.capture.recorder", "--output", output, *flags]
        command = [*recorder, "--", *program[1 + len(before) :]]
        return launched(command, ranks.count, folder) if ranks else command

    def export(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        """Checks ``STEM.json.gz``, which a program left that has ended; raises NsysAnalyzerError where it is none."""
        del log, timeout_s
        (folder / BEGIN).unlink(missing_ok=True)
        trace = folder / f"{stem}.json.gz"
        if not trace.is_file():
            how = "as a program does that ends with os._exit(), or before its recording began"
            raise CaptureError(f"it ended well and left no {trace.name}, {how}")
        open_capture(trace)


Profiler: TypeAlias = NsysProfiler | TorchProfiler


def timed_command(target: Target, logs: Path) -> list[str]:
    """Returns the command line that runs a target without a profiler; each of several ranks has a log in ``logs``."""
    return launched(target.program, target.ranks.count, logs) if target.ranks else list(target.program)


def annotating(asked: Annotation | None, results: Path | None = None, stacks: Path | None = None) -> dict[str, str]:
    """Returns variables for a program, and for all that it starts; none without an annotation.

    Args:
        asked: what to annotate.
        results: the file for the times of steps and phases, without a profiler.
        stacks: the file for the stacks of a program that is recorded.
    """
    if asked is None:
        return {}
    settings = {
        **asdict(asked),
        "results": str(results.absolute()) if results else None,
        "samples": str(stacks.absolute()) if stacks and asked.stacks else None,
        "spellings": {phase: list(DEFAULT_NAMES[phase]) for phase in _PHASES},
    }
    return {hooks.VARIABLE: json.dumps(settings), **importing()}


def importing() -> dict[str, str]:
    """Returns the variable with which a Python loads our ``sitecustomize``, and finds this package if it lacks it."""
    folder, before = str(Path(hooks.__file__).with_name("injected")), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else folder}


def lack_of_torch(program: Sequence[str]) -> str:
    """Returns how to get PyTorch if the Python of a program, which may differ from ours, lacks it; else ""."""
    if not program or not is_python(program[0]):
        return INSTALL_TORCH
    has_torch = (
        run_for_lines(program[0], "-c", "import importlib.metadata; importlib.metadata.version('torch')") is not None
    )
    return "" if has_torch else f"Name a Python that has it, in place of {shutil.which(program[0]) or program[0]}"


def check_code(program: Sequence[str]) -> None:
    """Checks that the script or module of a Python program exists, before a recording takes half a minute to start.

    Raises:
        ConfigurationError: it does not exist.
    """
    python, *words = program
    launcher, script = Path(python).name, ""
    if is_python(python):
        script, launcher, *_ = [*words[_end_of_flags(words) :], "", ""]
        launcher = launcher.partition(".")[0] if script == "-m" else ""
        if launcher and run_for_lines(python, "-c", _FINDS.format(launcher)) == ["None"]:
            raise ConfigurationError(f"{python} finds no module {launcher}", "Start it where python -m finds it")
    if launcher in _PYTHON_LAUNCHERS:
        script = next((word for word in words if word.endswith(".py")), "")
    if script and not script.startswith("-") and not Path(script).exists() and shutil.which(python):
        raise ConfigurationError(f"There is no file {script} in {Path.cwd()}", "Name the program by its path")


def _end_of_flags(words: Sequence[str]) -> int:
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "-c", "-m"):
        end += 2 if words[end] in _FLAGS_WITH_A_VALUE else 1
    return end


def _interpreter_flags(words: Sequence[str]) -> list[str]:
    """Returns the words behind ``python`` that come before the script or ``-m``, such as ``-u`` and ``-X dev``."""
    end = _end_of_flags(words)
    if end >= len(words) or words[end] in ("-", "-c"):
        raise ConfigurationError(
            "The torch recorder runs scripts and modules: python SCRIPT, or python -m MODULE", "Put the code in a file"
        )
    return list(words[:end])
