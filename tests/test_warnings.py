"""The profiler's own messages: whose they are, and which are worth a reader's time."""

from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summarize import summarize
from tests.export import PID, Export, global_pid, training_step

WORKER = PID + 1
NOT_STARTED = "CUDA profiling might have not been started correctly."


def warnings_of(export: Export, tmp_path: Path) -> list[str]:
    summaries = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return [warning for summary in summaries for warning in summary.warnings]


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
