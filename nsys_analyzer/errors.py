"""Defines the package's errors. Each one says what failed and what to do about it."""

from __future__ import annotations

_MAX_MESSAGE_CHARACTERS = 1_000
#: The environment variable that makes commands print tracebacks.
DEBUG_VARIABLE = "NSYS_ANALYZE_DEBUG"
#: The user's program in an example command line, and the command that records it.
PROGRAM_ARGUMENTS = "-- python train.py"
RECORD_COMMAND = f"nsys-analyze run {PROGRAM_ARGUMENTS}"
#: The command that records a capture with a GPU, for a capture that was recorded on a CPU only.
RECORD_ON_GPU_COMMAND = f"{RECORD_COMMAND}, on a machine with a GPU"
#: The command that also records the kernels inside CUDA graphs.
RECORD_GRAPH_NODES_COMMAND = f"nsys-analyze run --nsys-option=--cuda-graph-trace=node {PROGRAM_ARGUMENTS}"


class NsysAnalyzerError(Exception):
    """An error for the user.

    Attributes:
        message: one line that says what failed. A long message, such as one that quotes a file, loses its middle.
        hint: one line that says what to do; it may be empty.
        exit_status: exit status of a command that fails with this error.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = f"{message[: _MAX_MESSAGE_CHARACTERS // 2]} … {message[-_MAX_MESSAGE_CHARACTERS // 4 :]}"
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class CannotAnswerError(NsysAnalyzerError):
    """A question that a capture cannot answer. ``message`` is the reason, ``hint`` names the command that would."""

    @property
    def data(self) -> dict[str, dict[str, str]]:
        """The JSON that every command writes instead of an answer."""
        return {"cannot_answer": {"why": self.message, "needs": self.hint}}


class TraceError(NsysAnalyzerError):
    """A trace that cannot be read because it is missing, damaged or not in a supported format."""


class MissingTableError(TraceError, CannotAnswerError):
    """A trace that lacks a table the analysis needs."""


class ExportError(NsysAnalyzerError):
    """``nsys export`` is missing or failed."""


class TimingsError(NsysAnalyzerError):
    """A timings CSV that cannot be read or contradicts itself."""


class ConfigurationError(NsysAnalyzerError):
    """An unknown model or an impossible configuration."""


class CaptureError(NsysAnalyzerError):
    """``nsys profile`` is missing, too old for the requested options, or wrote no report."""


class NoSpaceError(NsysAnalyzerError):
    """A file that does not fit on the disk."""


class ClusterError(NsysAnalyzerError):
    """A Dask cluster that does not answer, or whose workers have another version or other files."""


class DifferentConditionsError(CannotAnswerError):
    """Two runs with different hardware or ways of timing. Their times may differ for other reasons than the program."""

    exit_status = 4
