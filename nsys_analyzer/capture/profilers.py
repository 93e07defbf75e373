"""The profilers a target can run under: Nsight Systems, or PyTorch's own in the target's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nsys_analyzer.capture.nsys.profile import ProfileOptions, finished_report, profile_command
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.system.nsys import Nsys
from nsys_analyzer.system.process import Ended, run_logged
from nsys_analyzer.trace.sources import sqlite_of

_FLAGS_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # of the Python interpreter


@dataclass(frozen=True)
class NsysProfiler:
    """``nsys profile``, then ``nsys export``."""

    nsys: Nsys
    options: ProfileOptions
    name: str = "nsys"

    def described(self) -> dict[str, str]:
        """Its keys in a manifest: the version of nsys."""
        return {"nsys": self.nsys.version}

    def command(self, program: Sequence[str], folder: Path) -> list[str]:
        """The command line that records a program into ``capture.nsys-rep`` of the folder.

        Raises:
            CaptureError: this nsys lacks an option that was asked for.
        """
        return profile_command(self.nsys, folder / "capture.nsys-rep", program, self.options)

    def record(
        self, program: Sequence[str], folder: Path, log: Path, timeout_s: float | None,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:  # fmt: skip
        """Leaves ``capture.sqlite`` in the folder; of a program that crashed, what was recorded until then."""
        ended = run_logged(self.command(program, folder.absolute()), log, timeout_s, environment=environment)
        if ended.status == "timeout":
            return ended
        report = folder / "capture.nsys-rep"
        return _exported(ended, lambda: sqlite_of(finished_report(self.nsys, report, log, timeout_s), timeout_s))


@dataclass(frozen=True)
class TorchProfiler:
    """``torch.profiler`` in the program's own process, its trace converted to the tables of an nsys export."""

    memory: bool = False
    whole_program: bool = False
    name: str = "torch"

    def described(self) -> dict[str, str]:
        """Its keys in a manifest: none, the target states the version of PyTorch."""
        return {}

    def command(self, program: Sequence[str], folder: Path) -> list[str]:
        """The command line that records a Python program into ``capture.json.gz`` of the folder.

        Raises:
            ConfigurationError: no Python program, or one whose code is not in a file.
        """
        if not Path(program[0]).name.startswith("python"):
            raise ConfigurationError(
                f"The torch recorder runs Python programs, and {program[0]} is none",
                "Start it with python, or install Nsight Systems: nsys-analyze doctor",
            )
        before = _interpreter_flags(program[1:])
        recorder = ["-m", "nsys_analyzer.capture.recorder", "--output", str(folder / "capture.json.gz")]
        flags = ["--memory"] * self.memory + ["--whole-program"] * self.whole_program
        return [program[0], *before, *recorder, *flags, "--", *program[1 + len(before) :]]

    def record(
        self, program: Sequence[str], folder: Path, log: Path, timeout_s: float | None,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:  # fmt: skip
        """Leaves ``capture.sqlite`` in the folder."""
        ended = run_logged(self.command(program, folder.absolute()), log, timeout_s, environment=environment)
        trace = folder / "capture.json.gz"
        if not trace.is_file():
            silent = Ended("failed", "it ended well and left no trace, as a program does that ends with os._exit()")
            return silent if ended.status == "ok" else ended
        return _exported(ended, lambda: sqlite_of(trace))


Profiler: TypeAlias = NsysProfiler | TorchProfiler


def _exported(ended: Ended, export: Callable[[], object]) -> Ended:
    """How a recording ended, the export of what was recorded included."""
    try:
        export()
    except NsysAnalyzerError as error:
        return Ended("failed", str(error)) if ended.status == "ok" else ended
    return ended


def _interpreter_flags(words: Sequence[str]) -> list[str]:
    """The words behind ``python`` that come before the script or ``-m``, such as ``-u`` and ``-X dev``."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "-c", "-m"):
        end += 2 if words[end] in _FLAGS_WITH_A_VALUE else 1
    if end >= len(words) or words[end] in ("-", "-c"):
        raise ConfigurationError(
            "The torch recorder runs scripts and modules: python SCRIPT, or python -m MODULE", "Put the code in a file"
        )
    return list(words[:end])
