"""Comparisons as JSON: ``comparisons``, ``refused`` with the reasons, and ``unmatched`` runs.

What is refused has ``other_conditions`` where the sides ran on other hardware or were timed in other ways.
A run that is unmatched has the reasons why it cannot be compared with any, if there are such.

A comparison holds

- ``before``, ``after``: the runs of each side, by name, process, rank, source and gpu;
- ``verdict``: faster, slower, no change, or unclear (a change of the ``threshold`` would not have been seen);
- ``is_slower``: whether ``--fail-above`` fails: slower by more than the threshold, and by more than chance;
- ``same``: whether both sides are the same capture; ``cautions``: the reasons that ``--force`` overrode;
- ``budgets``: what ``after`` takes of those that were given: what, unit, most, value (null where not known), verdict;
- ``differences``: what the sides say otherwise of themselves: key, before, after;
- ``unprofiled``: the step without the profiler, a change, or null;
- ``step``: under the profiler: ``wall``, the change of its length, ``busy``, that of a median; kernels launched before
  and after; ``parts``, each with its ``change``, which add up to that of ``wall``, and its kernels, which add up to it;
- ``phases``: each with ``unprofiled``, ``wall`` and ``busy``, changes of medians; ``wall`` is the time of its work
  where it is ``synchronized``;
- ``findings``: status (gone, new, changed, stays), and what each saves before and after, of several runs the findings
  that most of them have, and medians; null where one side's are not known.

A change has ``before_ms``, ``after_ms``, their difference ``ms``, the interval ``low_ms`` to ``high_ms`` (null where a
single instance tells none), these three as shares of before (the ends by the logarithm of
after ÷ before), ``before_n`` and ``after_n`` instances or runs (null where timings do not say how many), and
``is_change``: whether 0 lies outside of the interval.
"""

from __future__ import annotations

from typing import Any

from nsys_analyzer.analysis.comparison.comparison import Comparison, Side
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.errors import CannotAnswerError
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION, to_plain_data


def comparison_data(found: Comparisons, limit: float) -> dict[str, Any]:
    """Comparisons as plain data for ``json.dumps``; ``limit`` is the change that is looked for, a share of the step."""
    unmatched = [
        {
            "side": one.side,
            "name": one.run.title,
            "reasons": to_plain_data(one.reasons),
        }
        for one in found.unmatched
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "generator": GENERATOR,
        "comparisons": [_comparison(one, limit) for one in found.compared],
        "refused": [_refused(one) for one in found.refused],
        "unmatched": unmatched,
    }


def _refused(one: Comparison) -> dict[str, Any]:
    reasons = to_plain_data(one.cautions)
    error = CannotAnswerError(" ".join(reasons), "nsys-analyze compare BEFORE AFTER --force")
    sides = {"before": _side(one.before), "after": _side(one.after)}
    return {**sides, "reasons": reasons, "other_conditions": one.is_of_other_conditions, **error.data}


_KEYS = ("same", "cautions", "budgets", "differences", "unprofiled", "phases", "step")


def _comparison(one: Comparison, limit: float) -> dict[str, Any]:
    findings = [
        {
            "id": row.finding.id,
            "title": row.finding.title,
            "status": row.status,
            "saves_ms_before": [row.before.saves_ms_low, row.before.saves_ms_high] if row.before else None,
            "saves_ms_after": [row.after.saves_ms_low, row.after.saves_ms_high] if row.after else None,
        }
        for row in one.findings or ()
    ]
    return {
        "before": _side(one.before),
        "after": _side(one.after),
        "verdict": one.verdict(limit),
        "threshold": limit,
        "is_slower": one.is_slower_by(limit),
        **{key: to_plain_data(getattr(one, key)) for key in _KEYS},
        "findings": None if one.findings is None else findings,
    }


def _side(side: Side) -> list[dict[str, Any]]:
    return [
        {"name": run.name, "process": run.process, "rank": run.rank, "source": run.source, "gpu": run.gpu}
        for run in side.runs
    ]
