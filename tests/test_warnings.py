"""Tests the profiler's own messages: which process they belong to, and which are reported."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from nsys_analyzer.trace.metadata import is_irrelevant_message
from tests.support.cases import Capture, make_case_test
from tests.support.commands import section
from tests.support.export import PID, Export, global_pid, training_step

NOT_STARTED = "CUDA profiling might have not been started correctly."


def warnings_of(capture: Capture) -> list[str]:
    return [plain(warning, "`") for summary in capture.summaries for warning in say_all(summary.warnings)]


def warnings_with(text: str) -> Callable[[Capture], list[str]]:
    return lambda capture: [warning for warning in warnings_of(capture) if text in warning]


test_messages = make_case_test(
    "messages",
    {
        "all warnings": warnings_of,
        "warnings about missing kernels": warnings_with("no kernel"),
        "number of warnings about missing kernels": lambda capture: len(warnings_with("no kernel")(capture)),
        "number of warnings about a failed start": lambda capture: sum(
            "started correctly" in warning or "injection" in warning for warning in warnings_of(capture)
        ),
        "warnings about missing phases": warnings_with("No range names a phase"),
    },
    {"PROCESS": global_pid(), "WORKER": global_pid(PID + 1), "CAPTURE": 0xFE << 48},
)


def test_an_export_of_nothing_says_why(tmp_path: Path) -> None:
    export = Export().add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=NOT_STARTED, globalPid=global_pid())
    with pytest.raises(MissingTableError) as error:
        Trace.load(export.write(tmp_path / "t.sqlite"))
    assert f"nsys: {NOT_STARTED} " in str(error.value)
    assert "--trace=cuda" not in str(error.value)


FOLDED = [
    "No cuDNN events collected. Does the process use cuDNN?",
    "No OS runtime libraries events collected. Does any process use OS runtime libraries?",
    "Not all cuBLAS events might have been collected.",
    "cuBLAS profiling might have not been started correctly.",
    "OpenGL driver vendor 'X' is not supported. Some OpenGL events might be missing.",
    "CUDA device 0: Unified Memory trace is not supported by the current driver version or configuration.",
    "CPU context switch tracing not supported, the kernel does not allow it.",
    "No CPU IP/backtrace samples collected.",
]
KEPT = [
    NOT_STARTED,
    "No CUDA events collected. Does the process use CUDA?",
    "Not all NVTX events might have been collected.",
    "NVTX profiling might have not been started correctly.",
    "CUPTI dropped 12 records. Some CUPTI events might be missing.",
    "The disk is full.",
]


def test_which_messages_touch_a_figure() -> None:
    assert [text for text in (*FOLDED, *KEPT) if is_irrelevant_message(text)] == FOLDED


def test_messages_that_touch_no_figure_are_no_warnings(tmp_path: Path) -> None:
    export = training_step(Export().gpu())
    for text in (*FOLDED[:3], FOLDED[0], KEPT[4]):
        export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=text, globalPid=global_pid())
    path = export.write(tmp_path / "t.sqlite")
    text = CliRunner().invoke(cli, ["report", str(path), "-o", "-"], catch_exceptions=False).stdout
    shown = section(text, "1 warning")
    assert [line for line in shown.splitlines() if line.startswith("- **")] == [f"- **t:** nsys: {KEPT[4]}"]
    printed = CliRunner().invoke(cli, ["info", str(path)], catch_exceptions=False).stdout
    assert f"  warning: {FOLDED[0]} (2 times)\n  warning: {FOLDED[1]}\n" in printed
    assert f"  warning: {KEPT[4]}\n" in printed
