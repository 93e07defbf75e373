"""Reports the answer to a what-if question: how long a step would be, and what would then limit it."""

from __future__ import annotations

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.what_if import PathLocation, PathPart, Saving, WhatIf
from nsys_analyzer.report.facts import say
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Section, SignedChange, make_table
from nsys_analyzer.report.units import format_ms, format_ms_range, rounded_percent
from nsys_analyzer.text import plain

#: The report says what limits the step if the saving is below this share of the removed work.
_FULL_SAVING_SHARE = 0.9
#: A change is reported as no change if it is below this share of a step.
_MIN_CHANGE_SHARE = 0.001
_MORE_RANKS_ASSUMPTIONS = (
    "The prediction assumes that each rank does the same work as a recorded rank, so the batch of all ranks grows with "
    "their number. It assumes that all links are as fast as the recorded links (a change from one node to several "
    "nodes is not included), that NCCL keeps its algorithm, and that the ranks are no later than the recorded ranks. "
    "The largest change also includes a latency that grows with the number of ranks. Collectives of only some ranks "
    "stay as they are."
)
_CRITICAL_PATH_FIELDS: tuple[Field[PathPart], ...] = (
    Field("part", "text", lambda row: row.part),
    Field("where", "text", lambda row: row.where),
    Field("rank", "text", lambda row: row.rank or None),
    Field("before ms", "ms", lambda row: row.before_ms),
    Field("after ms", "ms", lambda row: row.after_ms),
)
_STEP_GROUP_FIELDS: tuple[Field[Saving], ...] = (
    Field("steps", "text", lambda row: row.group),
    Field("count", "count", lambda row: row.steps),
    Field("before ms", "ms", lambda row: row.step_ms),
    Field("after ms", "ms", lambda row: row.new_step_ms),
    Field("change ms", "ms", lambda row: SignedChange(-row.saves_ms, -row.saves_ms_high, -row.saves_ms_low)),
)


def what_if_section(prediction: WhatIf) -> Section:
    """Returns the predicted length of a step after the changes, and its critical path before and after them."""
    step, new_step = format_ms(prediction.step_ms), format_ms(prediction.new_step_ms)
    low, high = prediction.saves_ms_low, prediction.saves_ms_high
    share = f" ({rounded_percent(abs(prediction.saves_ms) / prediction.step_ms)})"
    if max(abs(low), abs(high)) < _MIN_CHANGE_SHARE * prediction.step_ms:
        change, share = "as long as before", ""
    elif low < 0 < high:
        change = f"between {format_ms(high)} shorter and {format_ms(-low)} longer"
    else:
        change = f"{format_ms_range(*sorted((abs(low), abs(high))))} {'shorter' if high > 0 else 'longer'}"
    blocks: list[Block] = [
        Answer(f"Without the profiler, a step would take {new_step} instead of {step}: it would be {change}{share}.")
    ]
    if 0 <= prediction.saves_ms < _FULL_SAVING_SHARE * prediction.less_ms:
        sides: tuple[PathLocation, ...] = ("GPU", "CPU")
        # The limit is the side whose part of the critical path grows most.
        where, (before, after) = max(
            ((side, prediction.on_path_ms(side)) for side in sides),
            key=lambda side: (side[1][1] - side[1][0], side[1][1]),
        )
        reason = "because the remaining work is not on the critical path"
        if after > before:
            on_path = f"{format_ms(after)} instead of {format_ms(before)} of the critical path"
            reason = f"because the step then waits for the {where}, which takes {on_path}"
        on_each_rank = " on each rank" if prediction.ranks else ""
        blocks.append(
            Paragraph(
                f"The changes remove {format_ms(prediction.less_ms)} of work{on_each_rank} but save only "
                f"{format_ms(prediction.saves_ms)}, {reason}."
            )
        )
    if prediction.ranks:
        rank = max(prediction.ranks, key=lambda label: prediction.on_path_ms(label)[1])
        before, after = prediction.on_path_ms(rank)
        blocks.append(
            Paragraph(
                f"The ranks wait for each other. Of the critical path, {format_ms(after)} would be on {rank} instead "
                f"of {format_ms(before)}."
            )
        )
    if any(isinstance(change, Fact) and change.id == "more_ranks" for change in prediction.changes):
        blocks.append(Paragraph(_MORE_RANKS_ASSUMPTIONS))
    if prediction.groups:
        caption = "The length of a step in each group of steps, and in the mean of all steps:"
        blocks.append(make_table(_STEP_GROUP_FIELDS, prediction.groups, caption))
    caption = "The critical path of a step. Only less time on this path makes the step shorter:"
    blocks.append(make_table(_CRITICAL_PATH_FIELDS, prediction.path, caption))
    if not prediction.ranks and any(part.part == COMMUNICATION for part in prediction.path):
        blocks.append(
            Paragraph(
                "The prediction does not change the other ranks, so a collective that waits for another rank waits "
                "for it as long as before. This capture alone does not show how much of a collective is waiting. Give "
                "the captures of all ranks to replay all ranks together."
            )
        )
    changes = ", ".join(plain(say(change)) for change in prediction.changes)
    return Section("what_if", f"{prediction.capture}: what if {changes}", tuple(blocks))
