"""Writes comparisons as JSON: ``comparisons``, ``refused`` pairs with the reasons, and ``unmatched`` runs.

A refused pair has ``other_conditions`` if the sides ran on different hardware or were timed in different ways. An
unmatched run has the reasons why it cannot be compared with any run, if there are any.

A comparison contains

- ``before``, ``after``: the runs of each side, by name, process, rank, source and gpu;
- ``verdict``: faster, slower, no change, or unclear if a change as large as ``threshold`` could not be detected;
- ``is_slower``: whether the step is slower by more than ``threshold`` and by more than chance, as for ``--fail-above``;
- ``same``: whether the same capture was given for both sides;
- ``cautions``: the reasons for which the sides would not be compared without ``--force``;
- ``budgets``: each given budget, with the keys what, unit, most, value (of ``after``; null if not known) and verdict;
- ``differences``: the settings and versions that differ, with the keys key, before and after;
- ``unprofiled``: the change of the step without the profiler, or null;
- ``joules``: the change of the energy of a step, in J in spite of the names of its keys, or null;
- ``step``: the step under the profiler. ``wall`` is the change of the step's length, and ``busy`` is the change of the
  GPU's work in a median step. The other keys are the kernels launched before and after, and ``parts``. The changes of
  the parts add up to ``wall``, and the changes of a part's kernels add up to the change of the part;
- ``phases``: the changes of medians: ``unprofiled``, ``wall`` and ``busy``. ``wall`` contains the GPU's work only if
  the phase is ``synchronized``;
- ``findings``: the status of each finding (gone, new, changed, stays), and its savings before and after. A side with
  several runs has the findings that most of its runs have, with medians of the savings. The key is null if the
  findings of one side are not known;
- ``operators``: the at most 50 operators whose kernel time differs most, with the keys operator, before_shapes,
  after_shapes, before_calls, after_calls, before_ms, after_ms and ms. The key is null if the operators of one side are
  not known.

A change has ``before_ms``, ``after_ms`` and their difference ``ms``. The interval of the change is ``low_ms`` to
``high_ms``, null if there is only one instance. ``share``, ``low_share`` and ``high_share`` are ``ms``, ``low_ms`` and
``high_ms`` as shares of ``before_ms``; the last two are derived from the logarithm of after ÷ before. ``before_n`` and
``after_n`` are the numbers of instances or runs, null if timings do not give these numbers. ``is_change`` tells whether
0 lies outside of the interval.
"""

from __future__ import annotations

from typing import Any

from nsys_analyzer.analysis.comparison.comparison import Side
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.errors import CannotAnswerError
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION, to_plain_data
from nsys_analyzer.report.sections.comparison import caution_sentences, describe_obstacle

#: The maximum number of changed operators.
_MAX_OPERATORS = 50
_PLAIN_KEYS = ("budgets", "differences", "unprofiled", "joules", "phases", "step")


def comparison_data(comparisons: Comparisons, limit: float) -> dict[str, Any]:
    """Returns comparisons as plain data for ``json.dumps``.

    Args:
        comparisons: the comparisons.
        limit: the change to look for, as a share of the step.
    """
    encoded_pairs = []
    for pair in comparisons.compared:
        findings = [
            {
                "id": row.finding.id,
                "title": row.finding.title,
                "status": row.status,
                "saves_ms_before": [row.before.saves_ms_low, row.before.saves_ms_high] if row.before else None,
                "saves_ms_after": [row.after.saves_ms_low, row.after.saves_ms_high] if row.after else None,
            }
            for row in pair.findings or ()
        ]
        encoded_pairs.append(
            {
                "before": _encode_side(pair.before),
                "after": _encode_side(pair.after),
                "verdict": pair.verdict(limit),
                "threshold": limit,
                "is_slower": pair.is_slower_by(limit),
                "same": pair.same,
                "cautions": to_plain_data(caution_sentences(pair)),
                **{key: to_plain_data(getattr(pair, key)) for key in _PLAIN_KEYS},
                "findings": None if pair.findings is None else findings,
                "operators": to_plain_data(pair.operators and pair.operators[:_MAX_OPERATORS]),
            }
        )
    unmatched_runs = [
        {
            "side": unmatched_runs.side,
            "name": unmatched_runs.run.title,
            "reasons": to_plain_data([*map(describe_obstacle, unmatched_runs.obstacles)]),
        }
        for unmatched_runs in comparisons.unmatched
    ]
    refused_pairs = []
    for pair in comparisons.refused:
        reasons = to_plain_data(caution_sentences(pair))
        error = CannotAnswerError(" ".join(reasons), "nsys-analyze compare BEFORE AFTER --force")
        sides = {"before": _encode_side(pair.before), "after": _encode_side(pair.after)}
        refused_pairs.append({**sides, "reasons": reasons, "other_conditions": pair.conditions_differ, **error.data})
    return {
        "schema_version": SCHEMA_VERSION,
        "generator": GENERATOR,
        "comparisons": encoded_pairs,
        "refused": refused_pairs,
        "unmatched": unmatched_runs,
    }


def _encode_side(side: Side) -> list[dict[str, Any]]:
    return [
        {"name": run.name, "process": run.process, "rank": run.rank, "source": run.source, "gpu": run.gpu}
        for run in side.runs
    ]
