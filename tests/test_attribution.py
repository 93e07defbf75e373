"""Each rule of attribution on a trace of a few rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.export.frame import COLUMNS, kernel_frame
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.cases import Capture, make_case_test
from tests.support.export import Export


def columns(capture: Capture) -> dict[str, list[object]]:
    frame = kernel_frame(capture.trace, capture.names or PhaseNames.parse([]))
    return {name: [None if pd.isna(value) else value for value in frame[name].tolist()] for name in frame.columns}


def steps_of_kernels(capture: Capture) -> list[int]:
    """Returns the place of each kernel's step among the instances, -1 for none."""
    step_of, instances = capture.attributed.instances_of_operations[1], capture.attributed.instances
    return [instances.phases[instances.phase[one]] if one >= 0 else None for one in step_of.tolist()]


test_attribution = make_case_test(
    "attribution",
    {
        "kernels": columns,
        "phases of instances": lambda capture: sorted(
            capture.attributed.instances.phases[code] for code in capture.attributed.instances.phase
        ),
        "steps of kernels": steps_of_kernels,
    },
)


def test_the_table_has_all_its_columns(step_trace: Path) -> None:
    assert list(Trace.load(step_trace).kernels.columns) == list(COLUMNS)


def test_a_trace_without_kernels_has_no_table(tmp_path: Path) -> None:
    trace = Trace.load(Export().range("forward", 0, 100).write(tmp_path / "t.sqlite"))
    with pytest.raises(MissingTableError) as failure:
        kernel_frame(trace, PhaseNames.parse([]))
    assert failure.value.hint == "Capture again with --trace=cuda,nvtx"
