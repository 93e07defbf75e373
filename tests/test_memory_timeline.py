"""Memory of the device inside the measured steps of a capture: every expectation's arithmetic stands beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.questions.ask import ask
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.sections.decision import describe_conditions
from nsys_analyzer.trace.trace import Trace
from tests.support.export import Export, global_pid, training_step

_COLUMNS = "start, globalPid, bytes, memKind, memoryOperationType, localMemoryPoolUtilizedSize"
Use = tuple[int, int, int, int, int | None]


def _with_memory(path: Path, uses: list[Use]) -> Path:
    """Adds memory events: start, bytes, kind (2 device, 5 static), 0 allocation or 1 free, bytes in use in the pool."""
    training_step(Export().gpu()).write(path)
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS ({_COLUMNS})")
    rows = [(use[0], global_pid(), *use[1:]) for use in uses]
    connection.executemany("INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return path


def test_device_memory_inside_the_measured_steps(tmp_path: Path) -> None:
    # The step is [0, 1000]. Before it 700 are there; inside 200 come and go, and the static 9 are no allocation.
    uses: list[Use] = [
        (-5, 700, 2, 0, None), (-4, 9, 5, 0, None), (100, 200, 2, 0, None), (200, 200, 2, 1, None),
        (2000, 900, 2, 0, None),
    ]  # fmt: skip
    (summary,) = summarize(Trace.load(_with_memory(tmp_path / "memory.sqlite", uses)), "memory")
    assert summary.peak_memory_bytes == 900
    # Of five rows the static one is no allocation: four stand behind the figure, on the first screen and as evidence.
    answer = ask(Evidence((summary,)), "peak_memory_bytes")
    assert (answer.value, answer.evidence.table, answer.evidence.rows) == (900, "CUDA_GPU_MEMORY_USAGE_EVENTS", 4)
    assert "peak memory 900\N{NO-BREAK SPACE}B" in describe_conditions(summary)


def test_a_pool_says_itself_what_is_in_use(tmp_path: Path) -> None:
    # 5,000 were in use before recording began; the events add up to 100 alone.
    uses: list[Use] = [(100, 100, 2, 0, 5100), (200, 100, 2, 1, 5000)]
    (summary,) = summarize(Trace.load(_with_memory(tmp_path / "memory.sqlite", uses)), "memory")
    assert summary.peak_memory_bytes == 5100


def test_a_capture_without_memory_events_has_no_device_memory(real_capture: Callable[[str], Path]) -> None:
    (summary,) = summarize(Trace.load(real_capture("train_small256")), "train")
    assert summary.peak_memory_bytes is None


def test_a_real_capture_whose_allocator_had_all_it_needed(real_capture: Callable[[str], Path]) -> None:
    (summary,) = summarize(Trace.load(real_capture("mem_small256")), "memory")
    # SELECT sum(bytes) FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE memKind = 2: all of it at the session's start.
    assert summary.peak_memory_bytes == 3_598_977_024
