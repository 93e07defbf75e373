"""Pairs the runs of two sides by their configuration, and compares each pair."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD
from nsys_analyzer.analysis.comparison.compare import compare
from nsys_analyzer.analysis.comparison.comparison import (
    CONFIGURATION,
    Comparison,
    Obstacle,
    Side,
    find_differing_settings,
    find_run_obstacles,
    find_setting,
)
from nsys_analyzer.analysis.comparison.estimates import Budgets, check_budgets
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import CannotAnswerError, NsysAnalyzerError

SideName: TypeAlias = Literal["before", "after"]
_SIDES: tuple[SideName, ...] = ("before", "after")


@dataclass(frozen=True)
class UnmatchedRun:
    """A run that is compared with no run of the other side; ``obstacles`` say why no comparison is possible."""

    side: SideName
    run: Summary
    obstacles: tuple[Obstacle, ...] = ()


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of two sides, pair by pair.

    Attributes:
        compared: the comparisons that were made.
        refused: the pairs that cannot be compared, with the reasons in their ``cautions``.
        unmatched: the runs that match no run of the other side, and the runs that are left out of a side because of
            obstacles. The runs of ``before`` come first.
    """

    compared: tuple[Comparison, ...]
    refused: tuple[Comparison, ...]
    unmatched: tuple[UnmatchedRun, ...]

    def __repr__(self) -> str:
        """Returns one line of text, which an interactive session or a notebook displays."""
        refused_count, unmatched_count = len(self.refused), len(self.unmatched)
        return f"<Comparisons {[*self.compared]}, {refused_count} refused, {unmatched_count} unmatched>"


def compare_runs(
    before: Sequence[Summary],
    after: Sequence[Summary],
    *,
    cpu_spread: float = CPU_SPREAD,
    repeats: bool = False,
    force: bool = False,
    budgets: Budgets | None = None,
) -> Comparisons:
    """Compares every pair of runs. Runs that cannot be compared are left out of a side with several runs.

    Args:
        before, after: the runs.
        cpu_spread: see ``compare``.
        repeats: whether all runs of a side are of one program.
        force: whether to compare pairs with obstacles, too. Otherwise, they are refused.
        budgets: the budgets of ``after``.

    Raises:
        NsysAnalyzerError: a side has no run, or no run of one side matches a run of the other side.
    """
    side_pairs, unmatched_runs = match_runs(before, after, repeats=repeats)
    compared_pairs: list[Comparison] = []
    refused_pairs: list[Comparison] = []
    for pair in side_pairs:
        sides = []
        for side_name, side in zip(_SIDES, pair, strict=True):
            usable_runs, unusable_runs = [], []
            for run in side.runs:
                # With ``force``, a run with an obstacle is compared if it has a step.
                if (obstacles := tuple(find_run_obstacles(run))) and not (force and run.step):
                    unusable_runs.append(UnmatchedRun(side_name, run, obstacles))
                else:
                    usable_runs.append(run)
            sides.append(
                Side(tuple(usable_runs)) if usable_runs else side
            )  # a pair without a usable run is refused as a whole
            unmatched_runs += unusable_runs if usable_runs else []
        comparison = compare(sides[0], sides[1], cpu_spread)
        if budgets:
            comparison = replace(comparison, budgets=tuple(check_budgets(budgets, sides[1], cpu_spread)))
        (refused_pairs if comparison.cautions and not force else compared_pairs).append(comparison)
    if compared_pairs or refused_pairs:
        unmatched_runs.sort(key=lambda run: _SIDES.index(run.side))
        return Comparisons(tuple(compared_pairs), tuple(refused_pairs), tuple(unmatched_runs))
    if not before or not after:
        raise NsysAnalyzerError("One of the sides contains no run", "Give captures, or folders of captures")
    settings = ", ".join(
        f"{difference.key.replace('_', ' ')} ({difference.before} and {difference.after})"
        for difference in find_differing_settings(before[0], after[0], CONFIGURATION, unknown="unknown")
    )
    raise CannotAnswerError(
        f"No run of one side has exactly the configuration of a run of the other side; {before[0].title} and "
        f"{after[0].title} differ in {settings or 'their names or processes'}",
        "Compare two captures by their paths, or with --repeats all of one folder with all of the other",
    )


def match_runs(
    before: Sequence[Summary], after: Sequence[Summary], *, repeats: bool = False
) -> tuple[list[tuple[Side, Side]], list[UnmatchedRun]]:
    """Returns the pairs of sides to compare, and the runs that match no run of the other side.

    All runs of one configuration form a pair of sides. A setting that only one run records counts as different. Runs
    without a known model also need equal names.

    If each side is one capture, or if ``repeats`` is True, the configuration is not compared. Processes are then
    matched by rank or device. Processes that share a GPU are matched in the order of their IDs, if both sides have an
    equal number of them.
    """
    if len(before) == len(after) == 1:
        return [(Side(tuple(before)), Side(tuple(after)))], []
    are_matched_by_process = repeats or all(len({run.name for run in side}) == 1 for side in (before, after))
    runs_by_key: list[dict[object, list[Summary]]] = []
    for side in (before, after):
        group_of_side: defaultdict[object, list[Summary]] = defaultdict(list)
        for run, process_key in _find_process_keys(side):
            # Values are compared as text, because values from files can have any type.
            settings = tuple(None if (value := find_setting(run, key)) is None else str(value) for key in CONFIGURATION)
            # Without the model, the other settings fit many programs.
            setting_names = settings if find_setting(run, "model") is not None else (*settings, run.name)
            group_of_side[process_key if are_matched_by_process else (process_key, *setting_names)].append(run)
        runs_by_key.append(group_of_side)
    shared_keys = [key for key in runs_by_key[0] if key in runs_by_key[1]]
    unmatched_runs = [
        UnmatchedRun(side_name, run, tuple(find_run_obstacles(run)))
        for side_name, group in zip(_SIDES, runs_by_key, strict=True)
        for run in (run for key, runs in group.items() if key not in shared_keys for run in runs)
    ]
    return [(Side(tuple(runs_by_key[0][key])), Side(tuple(runs_by_key[1][key]))) for key in shared_keys], unmatched_runs


def _find_process_keys(runs: Sequence[Summary]) -> Iterator[tuple[Summary, object]]:
    """Yields each run with a key that identifies its process inside a capture, and is equal in other captures.

    Process IDs differ between captures, so processes that share a GPU are numbered in the order of their IDs.
    """
    sharing, counts = Counter(run.name for run in runs if run.shares_gpu), Counter[str]()
    for run in runs:
        key: object = run.process or ""
        if run.rank is not None:
            key = "rank", run.rank
        elif run.shares_gpu:
            counts[run.name] += 1
            key = "shared GPU", counts[run.name], sharing[run.name]
        yield run, key
