"""Reads from torch.compile why it could not compile a function as a whole, and why it compiled functions again."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from typing import Any

from .stacks import relative_path

#: Matches the number of the compiled code whose guard failed: the number of the function and that of its version.
_VERSION = re.compile(r"\d+/(\d+): ")
#: Matches the name of the function that torch.compile makes from the lines after a graph break.
_RESUMED_FUNCTION = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_MAX_REASON_LENGTH = 200
_HOOKS_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - the hooks import little


class CompiledCode:
    """The graph breaks of a program, and the recompilations since ``start``.

    A graph break is a line at which torch.compile ends a graph, so that Python runs between two compiled functions. In
    a recompilation, no version of a compiled function fits the function's arguments.
    """

    def __init__(self) -> None:
        self._failures_before: dict[Any, int] = {}

    def start(self) -> None:
        """Starts to count recompilations."""
        self._failures_before = {code: len(reasons) for code, reasons in _read("guard_failures", {}).items()}

    def describe(self) -> dict[str, dict[str, int]] | None:
        """Returns the manifest's entry, or None if torch.compile has compiled nothing.

        Its key ``graph_breaks`` has the number of compilations with a graph break by line and reason. Its key
        ``recompiles`` has the number of recompilations since ``start`` by function and reason.
        """
        if not has_compiled():
            return None
        breaks: Counter[str] = Counter()
        for compilation in _read("graph_break_reasons", []):
            if getattr(compilation, "graph_break", False) and (stack := getattr(compilation, "user_stack", None)):
                frame = stack[-1]
                breaks[_join(frame.filename, frame.lineno, frame.name, compilation.reason)] += 1
        recompilations: Counter[str] = Counter()
        for code, reasons in _read("guard_failures", {}).items():
            if code.co_filename.startswith(_HOOKS_FOLDER):  # the hook of a call is compiled with the module
                continue
            for reason in reasons[self._failures_before.get(code, 0) :]:
                version = _VERSION.match(str(reason))
                if version is None or version[1] == "0":  # each recompilation has one reason for each version
                    reason = str(reason)[version.end() if version else 0 :]
                    recompilations[_join(code.co_filename, code.co_firstlineno, code.co_name, reason)] += 1
        return {"graph_breaks": dict(breaks), "recompiles": dict(recompilations)}


def has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    counters = _read("counters", {})
    kinds = (("frames", "total"), ("stats", "unique_graphs"))
    return any(counters[kind][name] for kind, name in kinds if kind in counters)


def _read(name: str, default: Any) -> Any:
    """Returns a variable of torch.compile, or the default if this version of PyTorch lacks it."""
    return getattr(sys.modules.get("torch._dynamo.utils"), name, default)


def _join(file: str, line: int | None, function: str, reason: object) -> str:
    if resumed := _RESUMED_FUNCTION.fullmatch(function):
        function = resumed[1]
    first_line = str(reason).strip().partition("\n")[0]
    return f"{relative_path(file)}:{line} in {function}: {first_line[:_MAX_REASON_LENGTH]}"
