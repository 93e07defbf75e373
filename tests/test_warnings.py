"""Tests the profiler's own messages: which process they belong to, and which are reported."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from nsys_analyzer.trace.metadata import is_irrelevant_message
from tests.support.export import GEMM, PID, Export, global_pid, training_step
from tests.test_report_command import section

WORKER = PID + 1
NOT_STARTED = "CUDA profiling might have not been started correctly."


def warnings_of(export: Export, tmp_path: Path) -> list[str]:
    summaries = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return [plain(warning, "`") for summary in summaries for warning in say_all(summary.warnings)]


def step_with(process: int, text: str = NOT_STARTED) -> Export:
    export = training_step(Export().gpu())
    return export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=text, globalPid=process)


def test_a_worker_that_does_nothing_is_no_news(tmp_path: Path) -> None:
    """torch.compile starts processes that never use the GPU."""
    assert warnings_of(step_with(global_pid(WORKER)), tmp_path) == []


@pytest.mark.parametrize("process", [global_pid(), 0xFE << 48])
def test_what_is_said_of_the_capture_or_of_its_process_is_kept(tmp_path: Path, process: int) -> None:
    assert warnings_of(step_with(process), tmp_path) == [f"nsys: {NOT_STARTED}"]


def test_a_process_with_ranges_and_no_kernel_is_news(tmp_path: Path) -> None:
    export = step_with(global_pid(WORKER)).range("step", 0, 10, pid=WORKER)
    assert warnings_of(export, tmp_path) == [f"nsys: {NOT_STARTED}"]


def test_a_message_of_the_torch_recorder_has_its_name(tmp_path: Path) -> None:
    export = step_with(global_pid(), "Some events might be missing")
    export._rows["META_DATA_EXPORT"].append({"name": "EXPORT_PRODUCT_NAME", "value": "torch.profiler"})
    assert warnings_of(export, tmp_path) == ["torch: Some events might be missing."]


def without_kernels(*texts: str) -> Export:
    """A process with ranges whose CUDA trace is empty, and what nsys says of it."""
    export = Export().gpu().range("forward", 0, 10)
    for text in texts:
        export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=text, globalPid=global_pid())
    return export


@pytest.mark.parametrize("text", [NOT_STARTED, "CUDA injection initialization failed."])
def test_a_trace_that_did_not_start_is_explained_and_not_asked_for(tmp_path: Path, text: str) -> None:
    warnings = warnings_of(without_kernels("No CUDA events collected. Does the process use CUDA?", text), tmp_path)
    (said,) = [warning for warning in warnings if "no kernel" in warning]
    assert f"nsys: {text} " in said
    assert "another profiler" in said
    assert not [warning for warning in warnings if "--trace=cuda" in warning]
    assert sum(text in warning for warning in warnings) == 1


def test_an_older_nsys_is_told_of(tmp_path: Path) -> None:
    text = (
        "Installed CUDA driver version (13.0) is not supported by this build of Nsight Systems. CUDA trace will be "
        "collected using libraries for driver version 12.8"
    )
    (said,) = [warning for warning in warnings_of(without_kernels(text), tmp_path) if "no kernel" in warning]
    assert f"nsys: {text}. " in said
    assert "install a newer nsys" in said


@pytest.mark.parametrize(("kernel", "said"), [(GEMM, "forward"), ("void life(int*)", "--step")])
def test_a_program_without_a_forward_pass_is_not_told_to_wrap_one(tmp_path: Path, kernel: str, said: str) -> None:
    export = Export().range("life", 0, 90).kernel(kernel, 10, 20, 40)
    (warning,) = (one for one in warnings_of(export, tmp_path) if "No range names a phase" in one)
    assert ("forward" in warning, "--step NAME" in warning) == (said == "forward", said == "--step")


def test_without_a_message_tracing_is_asked_for(tmp_path: Path) -> None:
    (said,) = [warning for warning in warnings_of(without_kernels(), tmp_path) if "no kernel" in warning]
    assert "`--trace=cuda,nvtx`" in said


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
