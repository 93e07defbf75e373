"""The package's errors: each says what failed and what to do about it."""

from __future__ import annotations

_LONGEST = 1_000
#: The variable that has tracebacks shown.
DEBUG_VARIABLE = "NSYS_ANALYZE_DEBUG"
#: A program of the user's in a command line, and the command that records most of what may be missing.
PROGRAM_ARGUMENTS = "-- python train.py"
RECORD_COMMAND = f"nsys-analyze run {PROGRAM_ARGUMENTS}"
#: What records programs that the CPU runs here, and kernels that CUDA graphs hide.
RECORD_ON_GPU_COMMAND, RECORD_GRAPH_NODES_COMMAND = (
    f"{RECORD_COMMAND}, on a machine with a GPU",
    f"nsys-analyze run --nsys-option=--cuda-graph-trace=node {PROGRAM_ARGUMENTS}",
)


class NsysAnalyzerError(Exception):
    """An error for the user: one line of ``message`` and one line of remedy, ``hint``.

    A message that quotes a long text of a file loses the middle. The command ends with ``exit_status``.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 4 :]}"
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class CannotAnswerError(NsysAnalyzerError):
    """A question that a capture does not answer: ``message`` says why, ``hint`` is the command that would tell."""

    @property
    def data(self) -> dict[str, dict[str, str]]:
        """What JSON holds in place of an answer, of every command."""
        return {"cannot_answer": {"why": self.message, "needs": self.hint}}


class TraceError(NsysAnalyzerError):
    """A trace that cannot be read: absent, damaged, or not an Nsight Systems export."""


class MissingTableError(TraceError, CannotAnswerError):
    """A trace that lacks a table the analysis needs."""


class ExportError(NsysAnalyzerError):
    """``nsys export`` is missing or failed."""


class TimingsError(NsysAnalyzerError):
    """A timings CSV that cannot be read or contradicts itself."""


class ConfigurationError(NsysAnalyzerError):
    """An unknown model or an impossible configuration."""


class CaptureError(NsysAnalyzerError):
    """``nsys profile`` is missing, too old for what was asked, or left no report."""


class NoSpaceError(NsysAnalyzerError):
    """A file for which the disk has no room."""


class ClusterError(NsysAnalyzerError):
    """A Dask cluster that is missing, or whose workers are of another version or see other files."""


class DifferentConditionsError(CannotAnswerError):
    """Two runs on other hardware, or timed in other ways: what differs need not be the program."""

    exit_status = 4
