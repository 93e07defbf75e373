"""The profiler's own messages: what they mean, and which of them say nothing of CUDA or NVTX."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nsys_analyzer.text import Words, phrase

#: The severities of a message, as nsys numbers them.
SEVERITIES = {1: "info", 2: "warning", 3: "error", 4: "verbose"}

#: Messages that explain why a process has no CUDA trace, and what they mean. CUPTI takes one client at a time
#: (cupti_result.h, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED); tracing asks for no special rights, but for those
#: that a virtual GPU may withhold.
_NO_CUDA = (
    (
        re.compile(r"CUDA (?:profiling might have not been started correctly|injection initialization failed)"),
        phrase(
            "nsys got no CUDA trace of the process. Either it made no CUDA call, as a launcher or a data loader; or "
            "CUPTI could not start in it, because another profiler was attached (torch.profiler, a debugger), nsys is "
            "older than the driver, a virtual GPU allows no tracing, or the process was forked without exec "
            "(`--trace-fork-before-exec=true`); or it was killed before it wrote its records."
        ),
    ),
    (
        re.compile(r"Installed CUDA driver version .* is not supported by this build"),
        "The driver is newer than this nsys, whose CUPTI may record nothing or stop early: install a newer nsys.",
    ),
    (
        re.compile(r"CUDA tracing is not supported"),
        "This GPU cannot be traced by nsys.",
    ),
)
#: Characters of a message that are looked at: those of nsys are far shorter.
_LONGEST = 1_000
_OURS = r"(?!CUDA |NVTX |CUPTI )"
#: Messages about other APIs and about samples of the CPU: no figure of ours comes from these.
_OF_OTHERS = re.compile(
    rf"No {_OURS}.+ events collected\. Does (?:the|any) process use"
    rf"|{_OURS}[\w ./+-]+ profiling might have not been started correctly"
    rf"|Not all {_OURS}.+ events might have been collected"
    rf"|.*Some {_OURS}[\w ]+ events might be missing"
    r"|.*Unified Memory trace is not supported"
    r"|(?i:.*\b(?:ip samples?|sampling|context[ -]switch\w*|backtraces?|ftrace|gpu metrics)\b)"
)


@dataclass(frozen=True)
class Diagnostic:
    """A message of the profiler: the global process ID it is about, 1 info, 2 warning or 3 error, its text."""

    process: int
    severity: int
    text: str


def touches_no_figure(text: str) -> bool:
    """Whether a message is about APIs other than CUDA and NVTX, or about samples of the CPU."""
    return bool(_OF_OTHERS.match(text[:_LONGEST]))


def first_sentence(text: str) -> str:
    """A message on one line, without its advice."""
    sentence = " ".join(text.split()).split(". To make sure")[0].rstrip(".")
    return sentence if sentence.endswith(("?", "!")) else f"{sentence}."


def meaning(text: str) -> Words:
    """The meaning of a message about a missing CUDA trace, empty for any other message."""
    return next((explanation for pattern, explanation in _NO_CUDA if pattern.search(text)), "")


def why_no_cuda(messages: Iterable[Diagnostic]) -> Diagnostic | None:
    """The first message that explains a missing CUDA trace, the plainest first."""
    texts = list(messages)
    found = (one for pattern, _ in _NO_CUDA for one in texts if pattern.search(one.text))
    return next(found, None)


def explained(messages: Iterable[Diagnostic]) -> Words:
    """Why there is no CUDA trace, in the profiler's words and ours; empty where no message says so."""
    reason = why_no_cuda(messages)
    return phrase("nsys: {} {}", first_sentence(reason.text), meaning(reason.text)) if reason else ""
