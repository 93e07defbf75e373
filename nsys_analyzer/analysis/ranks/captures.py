"""The runs of several ranks among the captures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsys_analyzer.analysis.ranks.lost import lost_time
from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.ranks.together import join_ranks
from nsys_analyzer.analysis.summary.summary import CaptureSummary


def runs_of(captures: Sequence[CaptureSummary]) -> tuple[ParallelRun, ...]:
    """The runs that the captures are of, as far as these exchange something with others; that of most ranks first."""
    of_member = {
        (member.capture, member.process, member.device): capture for capture in captures for member in capture.members
    }
    members = [member for capture in captures for member in capture.members]
    return tuple(_with_losses(run, of_member) for run in join_ranks(members))


def _with_losses(run: ParallelRun, captures: dict[tuple[str, int, int], CaptureSummary]) -> ParallelRun:
    if run.slowest is None or run.fastest is None or run.slowest == run.fastest:
        return run

    def found(place: int) -> tuple[RankFigures, CaptureSummary]:
        one = run.ranks[place]
        return one, captures[one.capture, one.process, one.device]

    return replace(run, lost=lost_time(found(run.slowest), found(run.fastest)))
