"""Tests what collectives would cost among more ranks, with the arithmetic of their algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.analysis.what_if import what_if
from nsys_analyzer.errors import CannotAnswerError, ConfigurationError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.sections.what_if import what_if_section
from tests.support.packed import EXAMPLES, unpack

CAPTURES = EXAMPLES / "ranks" / "captures"


def unpack_ranks(name: str, folder: Path) -> None:
    for path in CAPTURES.glob(f"{name}_rank*"):
        unpack(path, folder)


def test_twice_as_many_data_parallel_ranks(tmp_path: Path) -> None:
    unpack_ranks("usual_buckets", tmp_path)
    captures = gather([tmp_path]).captures
    answer = what_if(*captures, rank_count=4)
    on_path = [part for part in answer.path if part.part == "communication"]
    before_ms, after_ms = sum(part.before_ms for part in on_path), sum(part.after_ms for part in on_path)
    # The bytes over each link: 2 · 3/4 of the message instead of 2 · 1/2. The only exposed bucket is the last one.
    assert after_ms / before_ms == pytest.approx((3 / 4) / (1 / 2), rel=0.1)
    # Only exposed communication makes the step longer.
    assert -answer.saves_ms == pytest.approx(after_ms - before_ms, rel=0.1)
    # As many ranks as before change nothing.
    assert what_if(*captures, rank_count=2).saves_ms == pytest.approx(0)
    section = what_if_section(answer)
    assert section.title.endswith("what if 4 ranks instead of 2")
    assert any("a change from one node to several nodes is not included" in str(block) for block in section.blocks)


@pytest.mark.parametrize(
    ("name", "only", "count", "error", "message"),
    [
        ("usual_buckets", "*_rank0*", 4, ConfigurationError, "no run of several ranks"),
        ("usual_buckets", "*", 1, ConfigurationError, "The number of ranks is from 2"),
        ("tensor", "*", 4, CannotAnswerError, "share the layers of the model"),
    ],
)
def test_questions_without_an_answer(
    name: str, only: str, count: int, error: type[Exception], message: str, tmp_path: Path
) -> None:
    unpack_ranks(name, tmp_path)
    captures = gather(sorted(tmp_path.glob(f"{only}.sqlite"))).captures
    with pytest.raises(error, match=message):
        what_if(*captures, rank_count=count)
