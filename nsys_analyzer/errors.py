"""Defines the package's errors. Each error says what failed, and what the user can do."""

from __future__ import annotations

_MAX_MESSAGE_CHARACTERS = 1_000
#: The environment variable that makes commands print tracebacks.
DEBUG_VARIABLE = "NSYS_ANALYZE_DEBUG"
#: The user's program in an example command line, and the command that records it.
PROGRAM_ARGUMENTS = "-- python train.py"
RECORD_COMMAND = f"nsys-analyze run {PROGRAM_ARGUMENTS}"
#: The hint for a capture that was recorded without a GPU: the command that records it with a GPU.
RECORD_ON_GPU_COMMAND = f"{RECORD_COMMAND}, on a machine with a GPU"
#: The command that also records the kernels inside CUDA graphs.
RECORD_GRAPH_NODES_COMMAND = f"nsys-analyze run --nsys-option=--cuda-graph-trace=node {PROGRAM_ARGUMENTS}"


class NsysAnalyzerError(Exception):
    """An error for the user.

    Attributes:
        message: one line that says what failed. The middle of a very long message is left out.
        hint: one line that says what the user can do; it may be empty.
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
    """A question that a capture cannot answer. ``message`` is the reason, and ``hint`` names a command that helps."""

    @property
    def data(self) -> dict[str, dict[str, str]]:
        """The JSON that a command writes in place of the answer."""
        return {"cannot_answer": {"why": self.message, "needs": self.hint}}


class TraceError(NsysAnalyzerError):
    """A trace cannot be read, because it is missing, damaged or not in a supported format."""


class MissingTableError(TraceError, CannotAnswerError):
    """The error that a trace lacks a table that the analysis needs."""


class ExportError(NsysAnalyzerError):
    """The error that ``nsys export`` is missing or failed."""


class TimingsError(NsysAnalyzerError):
    """A table of times cannot be read, or contradicts itself."""


class ConfigurationError(NsysAnalyzerError):
    """The error that a model is unknown, or that a configuration is impossible."""


class CaptureError(NsysAnalyzerError):
    """``nsys profile`` is missing, too old for the requested options, or wrote no report."""


class CountersRefusedError(CaptureError):
    """The error that ``nsys profile`` did not start the program, because it cannot sample the GPU's counters."""


class NoSpaceError(NsysAnalyzerError):
    """The error that a file does not fit on the disk."""


class ClusterError(NsysAnalyzerError):
    """A Dask cluster does not answer, or its workers have another version of the package or other files."""


class DifferentConditionsError(CannotAnswerError):
    """Two runs have different hardware or were timed differently, so their times may differ for that reason."""

    exit_status = 4
