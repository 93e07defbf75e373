"""Tests the phases of programs without phase ranges, from nsys's function ranges and from autograd's operators."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from tests.support.cases import make_case_test
from tests.support.export import GEMM
from tests.support.kineto import AUTOGRAD, MAIN, Kineto

ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def kernels(path: Path) -> dict[str, tuple[int, float]]:
    """Returns the instances of each phase, and the kernels of one instance."""
    (summary,) = summarize(Trace.load(path), "t")
    return {phase.phase: (phase.instances, phase.kernels_per_instance) for phase in summary.phases}


test_inference = make_case_test(
    "inference",
    {
        "inferred": lambda capture: {one.phase: one.inferred for one in capture.summary.phases},
        "warm-up": lambda capture: [one.warmup_instances for one in capture.summary.phases],
    },
)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5).map(
        lambda steps: sorted(steps, key=sum)
    )
)
def test_every_kernel_before_and_in_a_backward_has_its_phase(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """Passes of some kernels forward and some backward, one after the other: as many instances, and no kernel lost.

    The first is the shortest: a long one is left out.
    """
    trace = Kineto().gpu()
    number, at = 0, 0
    for forward, backward in steps:
        for tid, launches, name in ((MAIN, forward, "aten::mm"), (AUTOGRAD, backward, ENGINE)):
            for _ in range(launches):
                number, at = number + 1, at + 10
                trace.operator(name, at, 8, tid=tid).launch(number, at + 2, tid=tid).kernel(GEMM, number, at + 4, 3)
    phases = kernels(trace.write(tmp_path_factory.mktemp("passes") / "t.json"))
    n = len(steps)
    assert phases["forward"] == (n, pytest.approx(sum(f for f, _ in steps) / n))
    assert phases["backward"] == (n, pytest.approx(sum(b for _, b in steps) / n))


@pytest.mark.parametrize("name", ["functions_trace_gpt2", "functions_autograd_gpt2", "operators alone"])
def test_one_program_both_ways(real_capture: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Three steps of GPT-2: 3,012 kernels = 3 · (371 + 624 + 9), however they were annotated."""
    path = real_capture("functions_autograd_gpt2" if " " in name else name)
    if " " in name:
        path = Path(shutil.copy(path, tmp_path / "t.sqlite"))
        with closing(sqlite3.connect(path)) as connection, connection:
            names = "SELECT id FROM StringIds WHERE value LIKE 'torch.%'"
            connection.execute(f"DELETE FROM NVTX_EVENTS WHERE textId IN ({names}) OR text LIKE 'torch.%'")
    assert kernels(path) == {"forward": (3, 371), "backward": (3, 624), "optimizer": (3, 9)}
