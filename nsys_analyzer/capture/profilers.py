"""The profilers a target can run under: Nsight Systems, or PyTorch's own in the target's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nsys_analyzer.capture.launcher import launched
from nsys_analyzer.capture.nsys import ProfileOptions, finished_report, profile_command
from nsys_analyzer.errors import CaptureError, ConfigurationError
from nsys_analyzer.runs.targets import OF_RANK, Ranks, Target
from nsys_analyzer.system.nsys import Nsys
from nsys_analyzer.trace.sources import export_of, open_capture

_FLAGS_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # of the Python interpreter


@dataclass(frozen=True)
class NsysProfiler:
    """``nsys profile``, then ``nsys export``."""

    nsys: Nsys
    options: ProfileOptions
    name: str = "nsys"
    suffix: str = ".sqlite"

    def described(self) -> dict[str, str]:
        """Its keys in a manifest: the version of nsys."""
        return {"nsys": self.nsys.version}

    def command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """The command line that records a program into ``capture.nsys-rep`` of the folder, or a report of each rank.

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
        report = finished_report(self.nsys, folder / f"{stem}.nsys-rep", log, timeout_s)
        export_of(report, timeout_s, as_sqlite=True)


@dataclass(frozen=True)
class TorchProfiler:
    """``torch.profiler`` in the program's own process."""

    memory: bool = False
    whole_program: bool = False
    name: str = "torch"
    suffix: str = ".json.gz"

    def described(self) -> dict[str, str]:
        """Its keys in a manifest: none, the target states the version of PyTorch."""
        return {}

    def command(self, program: Sequence[str], folder: Path, ranks: Ranks | None = None) -> list[str]:
        """The command line that records a Python program into ``capture.json.gz`` of the folder, or a trace by rank.

        Raises:
            ConfigurationError: no Python program, or one whose code is not in a file; or one trace of several ranks.
        """
        if ranks and ranks.one_report:
            raise ConfigurationError("--one-report is for nsys, and torch.profiler records each rank by itself")
        if not Path(program[0]).name.startswith("python"):
            raise ConfigurationError(
                f"The torch recorder runs Python programs, and {program[0]} is none",
                "Start it with python, or install Nsight Systems: nsys-analyze doctor",
            )
        before = _interpreter_flags(program[1:])
        output = str(folder / f"capture{OF_RANK if ranks else ''}.json.gz")
        flags = ["--memory"] * self.memory + ["--whole-program"] * self.whole_program
        recorder = [program[0], *before, "-m", "nsys_analyzer.capture.recorder", "--output", output, *flags]
        command = [*recorder, "--", *program[1 + len(before) :]]
        return launched(command, ranks.count, folder) if ranks else command

    def export(self, folder: Path, stem: str, log: Path, timeout_s: float | None) -> None:
        """Checks ``STEM.json.gz``, which a program left that has ended; raises NsysAnalyzerError where it is none."""
        del log, timeout_s
        trace = folder / f"{stem}.json.gz"
        if not trace.is_file():
            raise CaptureError(f"it ended well and left no {trace.name}, as a program does that ends with os._exit()")
        open_capture(trace)


Profiler: TypeAlias = NsysProfiler | TorchProfiler


def timed_command(target: Target, logs: Path) -> list[str]:
    """Returns the command line that runs a target without a profiler; each of several ranks has a log in ``logs``."""
    return launched(target.program, target.ranks.count, logs) if target.ranks else list(target.program)


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
