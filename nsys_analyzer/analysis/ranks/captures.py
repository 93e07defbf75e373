"""The runs of several ranks among the captures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsys_analyzer.analysis.ranks.findings import find_in_run
from nsys_analyzer.analysis.ranks.lost import find_losses
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.ranks.together import join_ranks
from nsys_analyzer.analysis.summary.summary import CaptureSummary


def runs_of(captures: Sequence[CaptureSummary]) -> tuple[ParallelRun, ...]:
    """The runs that the captures are of, as far as these exchange something with others; that of most ranks first."""
    of_member = {
        (member.capture, member.process, member.device): capture for capture in captures for member in capture.members
    }
    members = [member for capture in captures for member in capture.members]
    joined = (_with_losses(run, of_member) for run in join_ranks(members))
    return tuple(replace(run, findings=find_in_run(run)) for run in joined)


def _with_losses(run: ParallelRun, captures: dict[tuple[str, int, int], CaptureSummary]) -> ParallelRun:
    """The run with where its ranks lose time to the one with least own time, and how late each of them is by that."""
    if run.slowest is None or run.fastest is None or run.slowest == run.fastest:
        return run
    pairs = [(one, captures[one.capture, one.process, one.device]) for one in run.ranks]
    losses = [find_losses(pair, pairs[run.fastest]) for pair in pairs]
    ranks = [
        replace(one, late_ms=one.late_ms.shifted(lost.slowed_ms)) if lost and one.late_ms and i != run.fastest else one
        for i, (one, lost) in enumerate(zip(run.ranks, losses, strict=True))
    ]
    most = losses[run.slowest]
    if most is None:
        return run
    skew = (run.skew_ms or 0.0) + most.slowed_ms
    return replace(run, ranks=tuple(ranks), skew_ms=skew, lost=most.rows, slowed_ms=most.slowed_ms)
