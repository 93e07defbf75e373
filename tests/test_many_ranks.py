"""Tests that a slow rank, link or stage is named among many ranks, which are copies of real ranks' captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.inputs.captures import read_captures
from nsys_analyzer.inputs.gather import MAX_DIAGNOSED_RANKS, gather
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.sections.ranks import describe_late_rank
from nsys_analyzer.text import plain
from tests.support.many_ranks import PLANTED_NS, Plant, make_ranks

RANKS = 14
#: Three links or replicas of a pipeline, the fewest among which one can be slower than the others.
FEW_RANKS = 6
PLANTED_MS = PLANTED_NS / 1e6


def run_of(folder: Path) -> ParallelRun:
    (run,) = find_runs(read_captures([folder]))
    return run


@pytest.mark.parametrize("plant", ["rank", "link", "stage"])
def test_the_planted_delay_is_named(plant: Plant, tmp_path: Path) -> None:
    planted = make_ranks(tmp_path, plant, FEW_RANKS, seed=1)
    run = run_of(tmp_path)
    names = [f"rank {rank}" for rank in planted.ranks]
    assert len(run.ranks) == FEW_RANKS
    assert plain(describe_late_rank(run)).lower().startswith(" and ".join(names))
    if plant == "rank":
        assert run.skew_ms == pytest.approx(PLANTED_MS, rel=0.1)  # the ranks differ by up to 0.3 ms in each step
        assert (run.slow_link, run.pipeline) == (None, None)
    elif plant == "link":
        assert run.slow_link
        assert run.slow_link.ratio == pytest.approx(2)
        assert all(finding.id != "late_rank" for finding in run.findings)
    else:
        assert run.pipeline
        assert run.pipeline.slow_rank_stage == 1 + planted.ranks[0] % 2
        assert run.pipeline.slow_rank_ms == pytest.approx(PLANTED_MS, rel=0.1)


def test_findings_are_derived_for_some_of_many_ranks(tmp_path: Path) -> None:
    planted = make_ranks(tmp_path, "rank", RANKS, 1)
    captures = gather([tmp_path]).captures
    diagnosed = [capture for capture in captures if capture.diagnosis]
    assert 1 < len(diagnosed) <= MAX_DIAGNOSED_RANKS < RANKS
    assert planted.ranks[0] in [capture.rank for capture in diagnosed]  # it has the most work of all
    text = render(build_report(Evidence(captures)), {})
    assert f"Findings are derived for {len(diagnosed)} of {RANKS} ranks" in text
    assert text.count("<summary>rank_rank") == len(diagnosed)
