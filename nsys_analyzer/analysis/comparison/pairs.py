"""Which runs of two sides stand against each other, and all that is compared of them: runs of one configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from nsys_analyzer.analysis.comparison.budgets import Budgets, check_budgets
from nsys_analyzer.analysis.comparison.change import CPU_SPREAD
from nsys_analyzer.analysis.comparison.compare import compare
from nsys_analyzer.analysis.comparison.comparison import (
    CONFIGURATION,
    Comparison,
    Side,
    differing_settings,
    reasons_against_run,
    setting_of,
)
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import CannotAnswerError, DifferentConditionsError, NsysAnalyzerError
from nsys_analyzer.text import StrOrText, join_texts, plain

_SideName: TypeAlias = Literal["before", "after"]
_SIDES: tuple[_SideName, ...] = ("before", "after")


@dataclass(frozen=True)
class UnmatchedRun:
    """A run that stands against none; ``reasons`` say why it cannot be compared with any, a sentence each."""

    side: _SideName
    run: Summary
    reasons: tuple[StrOrText, ...] = ()


@dataclass(frozen=True)
class Comparisons:
    """What two sides have in common, pair by pair.

    Attributes:
        compared: the comparisons that were made.
        refused: those against which there are reasons, which their ``cautions`` hold.
        unmatched: the runs that stand against none, and those that are left out; those of ``before`` first.
    """

    compared: tuple[Comparison, ...]
    refused: tuple[Comparison, ...]
    unmatched: tuple[UnmatchedRun, ...]

    def __repr__(self) -> str:
        """Returns one line: a session or a notebook shows it."""
        refused, unmatched = len(self.refused), len(self.unmatched)
        return f"<Comparisons {[*self.compared]}, {refused} refused, {unmatched} unmatched>"


def compare_runs(
    before: Sequence[Summary],
    after: Sequence[Summary],
    *,
    cpu_spread: float = CPU_SPREAD,
    repeats: bool = False,
    force: bool = False,
    budgets: Budgets | None = None,
) -> Comparisons:
    """Returns every pair of runs of two sides; of several runs of one program those that can be compared.

    Args:
        before, after: the runs.
        cpu_spread: as of ``compare``.
        repeats: whether all runs of a side are of one program.
        force: whether to compare those against which there are reasons, too.
        budgets: of ``after``.

    Raises:
        OtherConditionsError: they ran on other hardware, or were timed in other ways.
        NsysAnalyzerError: nothing can be compared.
    """
    pairs, unmatched = match_runs(before, after, repeats=repeats)
    compared: list[Comparison] = []
    refused: list[Comparison] = []
    for pair in pairs:
        sides = []
        for name, side in zip(_SIDES, pair, strict=True):
            good, bad = [], []
            for run in side.runs:
                against = tuple(reasons_against_run(run))
                if against and not (force and run.step):
                    bad.append(UnmatchedRun(name, run, against))
                else:
                    good.append(run)
            sides.append(Side(tuple(good)) if good else side)  # where none can be compared, all are refused
            unmatched += bad if good else []
        comparison = compare(sides[0], sides[1], cpu_spread)
        if budgets:
            comparison = replace(comparison, budgets=tuple(check_budgets(budgets, sides[1], cpu_spread)))
        (refused if comparison.cautions and not force else compared).append(comparison)
    if compared:
        unmatched.sort(key=lambda run: _SIDES.index(run.side))
        return Comparisons(tuple(compared), tuple(refused), tuple(unmatched))
    if refused:
        listed = plain(join_texts("; ", dict.fromkeys(reason for one in refused for reason in one.cautions)), "`")
        kind = DifferentConditionsError if all(one.is_of_other_conditions for one in refused) else CannotAnswerError
        raise kind(f"These cannot be compared: {listed}", "To compare them all the same, add --force")
    if not before or not after:
        raise NsysAnalyzerError("One of the sides holds no run", "Give captures, or folders that hold them")
    apart = differing_settings(before[0], after[0], CONFIGURATION, unknown="unknown")
    listed = ", ".join(f"{one.key.replace('_', ' ')} ({one.before} and {one.after})" for one in apart)
    raise CannotAnswerError(
        f"No run of one side has exactly the configuration of one of the other; {before[0].title} and "
        f"{after[0].title} differ in {listed or 'their names or processes'}",
        "Compare two captures by their paths, or with --repeats all of one folder with all of the other",
    )


def match_runs(
    before: Sequence[Summary], after: Sequence[Summary], *, repeats: bool = False
) -> tuple[list[tuple[Side, Side]], list[UnmatchedRun]]:
    """Returns the runs that stand against each other, and those that stand against none.

    Runs of one configuration, which may be several on a side, are a pair; what is known of one alone keeps apart. Two
    captures are a pair whatever they are, process by process: by rank or devices; of processes that share a GPU the
    first is that of the other side where both sides have as many. Runs of which no configuration is known are a pair by
    their name. With ``repeats`` all runs of a side are of one program.
    """
    if len(before) == len(after) == 1:
        return [(Side(tuple(before)), Side(tuple(after)))], []
    by_process = repeats or all(len({run.name for run in side}) == 1 for side in (before, after))
    groups: list[dict[object, list[Summary]]] = []
    for side in (before, after):
        of_side: defaultdict[object, list[Summary]] = defaultdict(list)
        for run, place in _placed(side):
            # As texts: what a file says may be of any type.
            known = tuple(None if (value := setting_of(run, key)) is None else str(value) for key in CONFIGURATION)
            # Without a model, what else is known is true of many programs.
            named = known if setting_of(run, "model") is not None else (*known, run.name)
            of_side[(place,) if by_process else (place, *named)].append(run)
        groups.append(of_side)
    shared = [key for key in groups[0] if key in groups[1]]
    unmatched = [
        UnmatchedRun(side, run, tuple(reasons_against_run(run)))
        for side, group in zip(_SIDES, groups, strict=True)
        for run in (run for key, runs in group.items() if key not in shared for run in runs)
    ]
    return [(Side(tuple(groups[0][key])), Side(tuple(groups[1][key]))) for key in shared], unmatched


def _placed(runs: Sequence[Summary]) -> Iterator[tuple[Summary, str]]:
    """Yields each run with what tells its process from the others of its capture, and is the same in another capture.

    A process ID is not: of processes that share a GPU that is their number, in the order of their IDs.
    """
    sharing, so_far = Counter(run.name for run in runs if run.shares_gpu), Counter[str]()
    for run in runs:
        place = run.process or ""
        if run.rank is not None:
            place = f"rank {run.rank}"
        elif run.shares_gpu:
            so_far[run.name] += 1
            place = f"{so_far[run.name]} of {sharing[run.name]} that share a GPU"
        yield run, place
