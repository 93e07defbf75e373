"""Builds the command lines that run a target without a profiler, under Nsight Systems, or under torch.profiler.

The hooks put ranges around the steps and phases of an unannotated PyTorch program, measure the times of its steps and
phases, and open the capture range. Python loads the hooks through a folder in ``PYTHONPATH``. The Python of the program
may lack this package, because the hooks only need PyTorch.
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
from nsys_analyzer.capture.launcher import make_launch_command
from nsys_analyzer.capture.nsys import ProfileOptions, find_or_import_report, make_profile_command, start_recording
from nsys_analyzer.capture.recorder import BEGIN_FILE
from nsys_analyzer.capture.targets import RANK_SUFFIX, Annotation, Ranks, Target, is_python
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.system.machine import Nsys, run_for_lines
from nsys_analyzer.trace.nsys_report import ensure_export
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES
from nsys_analyzer.trace.sources import open_capture

INSTALL_TORCH = "Install it: pip install 'nsys-analyze[run]'"
#: Flags of the Python interpreter that take a value.
_FLAGS_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
#: Programs and modules (``python -m``) that run a Python script, which is one of their arguments.
_PYTHON_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch")
_FIND_MODULE_CODE = "from importlib.util import find_spec; print(find_spec({!r}))"
_PHASES = ("step", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class NsysProfiler:
    """Nsight Systems as the profiler of a program: ``nsys profile``, then ``nsys export``."""

    nsys: Nsys
    options: ProfileOptions
    name: str = "nsys"
    suffix: str = ".sqlite"

    @property
    def is_server(self) -> bool:
        """Whether the program is a server, which does not end by itself."""
        return self.options.is_server

    @property
    def records_range(self) -> bool:
        """Whether only the capture range is recorded, so that the steps outside of it run without the profiler."""
        has_own_range = any(word.startswith(("--capture-range", "-c")) for word in self.options.extra)
        return self.options.capture_range and not has_own_range

    def manifest_entries(self) -> dict[str, str]:
        """Returns the entries of a manifest that describe the profiler: the version of nsys."""
        return {"nsys": self.nsys.version}

    def begin_recording(self, folder: Path) -> None:
        """Begins the recording of a server into a folder, before its delay is over."""
        del folder
        start_recording(self.nsys)

    def record_command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """Returns the command line that records into ``capture.nsys-rep`` of the folder, or into a report of each rank.

        Raises:
            CaptureError: an extra option names another report.
        """
        report, launched = folder / "capture.nsys-rep", program
        if ranks and ranks.in_one_capture:
            launched = make_launch_command(program, ranks.count, folder)
        by_rank = ranks is not None and not ranks.in_one_capture
        command = make_profile_command(self.nsys, report, launched, self.options, by_rank=by_rank)
        return make_launch_command(command, ranks.count, folder) if ranks and by_rank else command

    def export_capture(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        """Exports the recording of a program that has ended to ``STEM.sqlite``. The program may have crashed.

        Args:
            folder: the folder of the recording.
            stem: the name of the capture without a suffix.
            log: the file with the output of the program.
            timeout_s: the time limit in seconds.

        Raises:
            NsysAnalyzerError: nothing was recorded, or the recording cannot be exported.
        """
        ensure_export(find_or_import_report(self.nsys, folder / f"{stem}.nsys-rep", log, timeout_s), timeout_s)


@dataclass(frozen=True)
class TorchProfiler:
    """The profiler ``torch.profiler``, which runs in the process of the program."""

    memory: bool = False
    whole_program: bool = False
    delay_s: float = 0
    duration_s: float = 0
    name: str = "torch"
    suffix: str = ".json.gz"
    is_server: bool = False

    @property
    def records_range(self) -> bool:
        """Whether only the capture range is recorded, so that the steps outside of it run without the profiler."""
        return not self.whole_program

    def manifest_entries(self) -> dict[str, str]:
        """Returns no entries of a manifest, because the target itself records the version of PyTorch."""
        return {}

    def begin_recording(self, folder: Path) -> None:
        """Begins the recording of a server into a folder, before its delay is over."""
        (folder / BEGIN_FILE).touch()

    def record_command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """Returns the command line that records into ``capture.json.gz`` of the folder, or into a trace of each rank.

        Raises:
            ConfigurationError: the program is not a Python program, its code is not in a file, or a single trace of
                several ranks was requested.
        """
        if ranks and ranks.in_one_capture:
            raise ConfigurationError("--one-report needs nsys, because torch.profiler writes a trace for each rank")
        if not is_python(program[0]):
            raise ConfigurationError(
                f"torch.profiler records only Python programs, and {program[0]} is not Python",
                "Start it with python, or install Nsight Systems: nsys-analyze doctor",
            )
        # Flags of the interpreter, such as ``-u`` and ``-X dev``, stand before the script or ``-m``.
        python_arguments = program[1:]
        end = _count_flag_words(python_arguments)
        if end >= len(python_arguments) or python_arguments[end] in ("-", "-c"):
            raise ConfigurationError(
                "torch.profiler records scripts and modules: python SCRIPT, or python -m MODULE",
                "Put the code into a file",
            )
        output = str(folder / f"capture{RANK_SUFFIX if ranks else ''}.json.gz")
        flags = ["--memory"] * self.memory + ["--whole-program"] * self.whole_program
        flags += [f"--delay={self.delay_s:g}"] * bool(self.delay_s)
        flags += [f"--duration={self.duration_s:g}"] * bool(self.duration_s)
        python = [program[0], *python_arguments[:end]]
        recorder = [*python, "-m", "nsys_analyzer.capture.recorder", "--output", output, *flags]
        command = [*recorder, "--", *python_arguments[end:]]
        return make_launch_command(command, ranks.count, folder) if ranks else command

    def export_capture(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        """Checks the trace ``STEM.json.gz`` of a program that has ended.

        Raises:
            NsysAnalyzerError: the trace is missing or cannot be read.
        """
        del log, timeout_s
        (folder / BEGIN_FILE).unlink(missing_ok=True)
        trace = folder / f"{stem}.json.gz"
        if not trace.is_file():
            causes = "it may have ended by os._exit(), or before its recording began"
            raise CaptureError(f"it ended without an error, but wrote no {trace.name}: {causes}")
        open_capture(trace)


Profiler: TypeAlias = NsysProfiler | TorchProfiler


def make_timed_command(target: Target, logs: Path) -> list[str]:
    """Returns the command line that runs a target without a profiler. Ranks write logs into the folder ``logs``."""
    return make_launch_command(target.program, target.ranks.count, logs) if target.ranks else list(target.program)


def make_hook_variables(
    annotation: Annotation | None,
    results: Path | None = None,
    stacks: Path | None = None,
    operators: Path | None = None,
) -> dict[str, str]:
    """Returns the environment variables that make a program and its child processes load the hooks.

    Args:
        annotation: the settings of the annotation. With None, the result is empty.
        results: the file for the times of steps and phases in a run without a profiler.
        stacks: the file for the sampled stacks of a recorded program.
        operators: the file for the operators of a recorded program.
    """
    if annotation is None:
        return {}
    settings = {
        **asdict(annotation),
        "results": str(results.absolute()) if results else None,
        "operators": str(operators.absolute()) if operators and annotation.operators else None,
        "samples": str(stacks.absolute()) if stacks and annotation.stacks else None,
        "spellings": {phase: list(DEFAULT_NAMES[phase]) for phase in _PHASES},
    }
    return {hooks.VARIABLE: json.dumps(settings), **make_import_variables()}


def make_import_variables() -> dict[str, str]:
    """Returns the ``PYTHONPATH`` with which a Python loads the hooks and can import this package."""
    folder, inherited = str(Path(hooks.__file__).with_name("injected")), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{inherited}" if inherited else folder}


def find_torch_hint(program: Sequence[str]) -> str:
    """Returns a hint on how to get PyTorch if the Python of a program lacks it, else an empty string."""
    if not program or not is_python(program[0]):
        return INSTALL_TORCH
    query = "import importlib.metadata; importlib.metadata.version('torch')"
    if run_for_lines(program[0], "-c", query) is not None:
        return ""
    return f"Use a Python with PyTorch instead of {shutil.which(program[0]) or program[0]}"


def check_script_exists(program: Sequence[str]) -> None:
    """Checks that the script or module of a Python program exists, before a recording, which needs long to start.

    Raises:
        ConfigurationError: the script or module does not exist.
    """
    python, *words = program
    launcher, script = Path(python).name, ""
    if is_python(python):
        script, launcher, *_ = [*words[_count_flag_words(words) :], "", ""]
        launcher = launcher.partition(".")[0] if script == "-m" else ""
        if launcher and run_for_lines(python, "-c", _FIND_MODULE_CODE.format(launcher)) == ["None"]:
            raise ConfigurationError(
                f"{python} finds no module {launcher}", "Start it in a folder where python -m finds it"
            )
    if launcher in _PYTHON_LAUNCHERS:
        script = next((word for word in words if word.endswith(".py")), "")
    if script and not script.startswith("-") and not Path(script).exists() and shutil.which(python):
        raise ConfigurationError(f"There is no file {script} in {Path.cwd()}", "Name the program by its path")


def _count_flag_words(words: Sequence[str]) -> int:
    """Returns the number of leading words that are flags of the Python interpreter or values of these flags."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "-c", "-m"):
        end += 2 if words[end] in _FLAGS_WITH_A_VALUE else 1
    return end
