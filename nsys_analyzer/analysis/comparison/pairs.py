"""All that is compared of two folders of runs, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD
from nsys_analyzer.analysis.comparison.comparability import reasons_against_run
from nsys_analyzer.analysis.comparison.compare import compare
from nsys_analyzer.analysis.comparison.comparison import Comparison, Side
from nsys_analyzer.analysis.comparison.matching import PROCESS, Alone, match
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.text import joined, plain


@dataclass(frozen=True)
class Comparisons:
    """What two sides have in common, pair by pair.

    Attributes:
        compared: the comparisons that were made.
        refused: those against which there are reasons, which their ``cautions`` hold.
        only_before, only_after: the runs that stand against none, and those that are left out.
    """

    compared: tuple[Comparison, ...]
    refused: tuple[Comparison, ...]
    only_before: tuple[Alone, ...]
    only_after: tuple[Alone, ...]

    @property
    def alone(self) -> Iterator[tuple[str, Alone]]:
        """The runs that stand against none, each with its side."""
        yield from (("before", one) for one in self.only_before)
        yield from (("after", one) for one in self.only_after)


def compare_runs(
    before: Sequence[Summary],
    after: Sequence[Summary],
    *,
    cpu_spread: float = CPU_SPREAD,
    repeats: bool = False,
    force: bool = False,
) -> Comparisons:
    """Every pair of runs of two sides. Of several runs of one program those that cannot be compared are left out.

    Args:
        before, after: the runs.
        cpu_spread: as of ``compare``.
        repeats: whether all runs of a side are of one program.
        force: whether to compare those against which there are reasons, too.

    Raises:
        NsysAnalyzerError: nothing can be compared.
    """
    matched = match(before, after, repeats=repeats)
    parted = [[_parted(side, force=force) for side in pair] for pair in matched.pairs]
    made = [compare(before, after, cpu_spread) for (before, _), (after, _) in parted]
    compared = tuple(one for one in made if force or not one.cautions)
    if compared:
        refused = tuple(one for one in made if not force and one.cautions)
        only_before = (*matched.only_before, *(one for (_, bad), _ in parted for one in bad))
        only_after = (*matched.only_after, *(one for _, (_, bad) in parted for one in bad))
        return Comparisons(compared, refused, only_before, only_after)
    if made:
        reasons = plain(joined("; ", dict.fromkeys(reason for one in made for reason in one.cautions)), "`")
        raise NsysAnalyzerError(f"These cannot be compared: {reasons}", "To compare them all the same, add --force")
    near = min((one for one in matched.only_before if one.nearest), key=lambda one: len(one.differences), default=None)
    if near is None or near.nearest is None:
        raise NsysAnalyzerError("One of the sides holds no run", "Give captures, or folders that hold them")
    listed = ", ".join(f"{one.key.replace('_', ' ')} ({one.before} and {one.after})" for one in near.differences)
    raise NsysAnalyzerError(
        f"No run of one side has exactly the configuration of one of the other; {near.run.title} and "
        f"{near.nearest.title} differ least, in {listed or 'their names'}",
        "Give captures of as many processes"
        if any(one.key == PROCESS for one in near.differences)
        else "Compare two captures by their paths, or with --repeats all of one folder with all of the other",
    )


def _parted(side: Side, *, force: bool) -> tuple[Side, tuple[Alone, ...]]:
    """The runs of a side that can be compared, and the others; all of them where none can, so that these are refused.

    By ``force`` any that has a step can.
    """
    good, bad = [], []
    for run in side.runs:
        reasons = tuple(reasons_against_run(run))
        if reasons and not (force and run.step):
            bad.append(Alone(run, None, (), reasons))
        else:
            good.append(run)
    return (Side(tuple(good)), tuple(bad)) if good else (side, ())
