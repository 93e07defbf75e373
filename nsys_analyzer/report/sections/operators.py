"""Answers what each operator should cost: the account of a step, and the operators above their attainable time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.counters.figures import Counters
from nsys_analyzer.analysis.operators.account import OperatorRow, StepAccount, fold_rows
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import RECORD_COMMAND
from nsys_analyzer.report.evidence import CAUSE_WORDS, format_step_length
from nsys_analyzer.report.model import Answer, Block, Details, Field, Paragraph, Table, make_table
from nsys_analyzer.report.sections.bars import ATTAINABLE, EXCESS, REDUNDANT, UNEXPLAINED, UNFUSED, round_account
from nsys_analyzer.report.units import format_ms, shorten_shapes
from nsys_analyzer.text import StrOrText, join_names, join_texts, phrase, plural, rounded_percent

#: The number of operators in full view, and the maximum number of operators in the section.
_FIRST_ROWS, _MAX_ROWS = 5, 30
#: The maximum number of causes in the answer.
_MAX_ANSWERED_CAUSES = 3
#: An operator is listed if its excess, or its time without an expectation, is at least this share of the step.
_MIN_ROW_SHARE = 0.001
#: The first screen names a share of the kernel time without an expectation, and an unexplained share of the step, from
#: these shares on.
_MIN_NAMED_SHARE, _MIN_UNEXPLAINED_SHARE = 0.01, 0.05
_WORDS = {
    ATTAINABLE: "attainable time", "operators": EXCESS, "unfused": UNFUSED, "redundant": REDUNDANT,
    UNEXPLAINED: UNEXPLAINED,
}  # fmt: skip
_WORDS |= {cause: words for cause, words in CAUSE_WORDS.items() if cause not in _WORDS}


def format_attainable(account: StepAccount) -> str:
    """Returns the attainable length of a step, rounded as in the account."""
    return format_ms(round_account(account).get(ATTAINABLE, 0.0))


def describe_limits_of_account(account: StepAccount) -> str:
    """Returns sentences on what limits the attainable time and the parts above it; empty if nothing does."""
    clauses = []
    if account.is_scaled:
        clauses.append(f"is scaled by data sheets from times that were measured on {account.measured_on}")
    if 1 - account.expected_share >= _MIN_NAMED_SHARE:
        share = rounded_percent(1 - account.expected_share)
        clauses.append(f"contains {share} of the kernel time as measured, because this part has no expectation")
    sentences = [f"The attainable time {' and '.join(clauses)}."] if clauses else []
    unexplained_ms = round_account(account).get(UNEXPLAINED, 0.0)
    if unexplained_ms >= _MIN_UNEXPLAINED_SHARE * account.step_ms:
        difference = format_ms(unexplained_ms)
        sentences.append(f"The replayed step is {difference} shorter than the step, so {difference} are unexplained.")
    return " ".join(sentences)


def explain_missing_account(capture: CaptureSummary) -> tuple[str, str] | None:
    """Returns why the account of a step is unknown, and the command that would record it, which may be empty.

    Returns None if the account is known, if the reason is the reason for missing findings, or if the program does not
    use PyTorch.
    """
    is_explained = capture.diagnosis is None or capture.diagnosis.doubt is not None or not capture.is_torch
    if capture.account or is_explained:
        return None
    if capture.operators is None:
        return "What each operator should cost is not known, because no operators were recorded.", RECORD_COMMAND
    return f"What each operator should cost on {capture.gpu or 'this GPU'} is not known.", ""


def answer_operators(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the account of a step and its operators; the command that records operators if there are none."""
    account, title = capture.account, capture.title
    if account is None:
        if reason := explain_missing_account(capture):
            why, command = reason
            yield Answer(phrase("{} `{}` records them.", why, command) if command else why, title)
        return
    length = format_step_length(capture.step) if capture.step else format_ms(account.step_ms)
    yield Answer(_summarize_account(account, length), title)
    yield _tabulate_account(account, title)
    rows = fold_rows(account.operators, lambda row: (row.operator, row.shapes, row.line))
    least_ms = _MIN_ROW_SHARE * account.step_ms
    rows_above_limit = [row for row in rows if row.excess_ms >= least_ms]
    rows_without_estimate = sorted((row for row in rows if row.attainable_ms is None), key=lambda row: -row.ms)
    caption = "The operators with the largest excess, ms per step:"
    if rows_above_limit:
        yield tabulate_operators(rows_above_limit[:_FIRST_ROWS], caption, title, counters=capture.counters)
    folded_blocks: list[Block] = []
    if rows_above_limit[_FIRST_ROWS:]:
        folded_blocks.append(
            tabulate_operators(rows_above_limit[_FIRST_ROWS:_MAX_ROWS], "The operators with less excess:", title)
        )
    if listed_rows := [row for row in rows_without_estimate if row.ms >= least_ms][:_MAX_ROWS]:
        folded_blocks.append(tabulate_operators(listed_rows, "Kernel time without an expectation, by operator:", title))
    hidden_count = len(rows) - len(rows_above_limit[:_MAX_ROWS]) - len(listed_rows)
    sentences: list[StrOrText] = [_define_terms(account)]
    if hidden_count:
        operators = plural(hidden_count, "operator")
        sentences.append(phrase("`nsys-analyze operators` lists {} more {}.", hidden_count, operators))
    folded_blocks.append(Paragraph(join_texts(" ", sentences), title))
    shown_reasons = {row.reason for row in (*rows_above_limit[:_MAX_ROWS], *listed_rows)}
    if meanings := [f"{words}: {meaning}" for reason, (words, meaning) in _REASONS.items() if reason in shown_reasons]:
        folded_blocks.append(Paragraph(f"The reasons are defined as follows. {' '.join(meanings)}", title))
    yield Details("More operators, and what the terms mean", tuple(folded_blocks), title)


def _summarize_account(account: StepAccount, length: str) -> str:
    """Returns the attainable time and the largest parts above it."""
    parts = round_account(account)
    attainable = format_ms(parts.pop(ATTAINABLE, 0.0))
    causes = sorted((cause for cause in parts if parts[cause] > 0), key=lambda cause: -parts[cause])
    largest = [f"{_WORDS[cause]} ({format_ms(parts[cause])})" for cause in causes[:_MAX_ANSWERED_CAUSES]]
    other_rows = (
        f" The largest {plural(len(largest), 'part')} above the attainable time: {join_names(largest)}."
        if largest
        else ""
    )
    return f"A step takes {length}; about {attainable} would be attainable on this GPU.{other_rows}"


def _tabulate_account(account: StepAccount, title: str) -> Table:
    """Returns the attainable time, the parts above it, and their sum, which is the step."""
    parts = round_account(account)
    fields: tuple[Field[tuple[str, float]], ...] = (
        Field("part of the step", "text", lambda row: row[0]),
        Field("ms", "ms", lambda row: format_ms(row[1]).removesuffix("\N{NO-BREAK SPACE}ms")),
        Field("share", "percent", lambda row: row[1] / account.step_ms),
    )
    names = sorted(parts, key=lambda name: (name != ATTAINABLE, -parts[name]))
    rows = [*((_WORDS[name], parts[name]) for name in names), ("the step", sum(parts.values()))]
    return make_table(fields, rows, "The account of a step without the profiler:", capture=title)


#: The words for the reasons of operators in tables, and what they mean.
_REASONS: Mapping[str, tuple[str, str]] = {
    "recomputed": ("recomputed", "the backward pass runs the operator again."),
    "no_backward": ("no backward pass", "the operator keeps activations that no backward pass uses."),
    "unused": ("unused result", "nothing uses the result."),
    "repeated": ("repeated", "the operator already ran with the same inputs."),
    "undone": ("undone conversion", "a conversion is undone without a use in between."),
    "monitoring": ("only for metrics", "neither the backward pass nor the optimizer depends on the result."),
    "precision": ("fp32, no tensor cores", "the operator multiplies in fp32 on CUDA cores."),
    "memory_format": ("NCHW images", "images are stored by channel, not as channels_last."),
    "alignment": ("misaligned size", "the rows of matrices of the operator do not begin at multiples of 16 bytes."),
    "attention": ("unfused attention", "separate operators compute the scores of attention."),
    "efficient_attention": ("not FlashAttention", "PyTorch chose its memory-efficient attention."),
    "reduction": ("strided reduction", "the operator reduces over elements that are not adjacent in memory."),
    "unfused": ("unfused neighbors", "one kernel could replace the operator and operators before or after it."),
    "copies": ("copy", "the operator only copies a tensor."),
    "small_grid": ("too few blocks", "kernels have fewer blocks than the GPU has multiprocessors."),
    "wave_tail": ("partial last wave", "the last wave of the blocks of a kernel leaves multiprocessors idle."),
    "many_kernels": (
        "many kernels",
        "a call launches four or more kernels, and the longest kernel takes only a part of the time.",
    ),
}
#: The columns that name a row of a table of operators, by what the table has a row for.
_NAME_FIELDS: dict[str, tuple[Field[OperatorRow], ...]] = {
    "operator": (
        Field("operator", "code", lambda row: row.operator.removeprefix("aten::")),
        Field("shapes", "text", lambda row: shorten_shapes(row.shapes)),
        Field("line", "code", lambda row: row.line or None),
        Field("limit", "text", lambda row: row.limit or None),
    ),
    "module": (Field("module", "code", lambda row: row.module or "(no module)"),),
    "line": (Field("line", "code", lambda row: row.line or "(no line)"),),
}
_OTHER_FIELDS: tuple[Field[OperatorRow], ...] = (
    Field("reason", "text", lambda row: _REASONS[row.reason][0] if row.reason else None),
    Field("calls", "count", lambda row: row.calls),
    Field("ms", "ms", lambda row: row.ms),
    Field("attainable ms", "ms", lambda row: row.attainable_ms),
    Field("excess ms", "ms", lambda row: row.excess_ms),
)


def tabulate_operators(
    rows: Sequence[OperatorRow], caption: str, title: str, by: str = "operator", counters: Counters | None = None
) -> Table:
    """Returns a table of operators, modules or lines with their measured and attainable times per step.

    If hardware counters were sampled, the table of operators also shows the DRAM traffic of each row.
    """
    bytes_of_call = {(row.operator, row.shapes): row.dram_bytes for row in counters.operators} if counters else {}

    def find_traffic(row: OperatorRow) -> float | None:
        """Returns the DRAM traffic of all calls of a row in a step, bytes; None if no counters were sampled."""
        return row.calls * bytes_of_call.get((row.operator, row.shapes), 0.0) or None

    traffic_fields: tuple[Field[OperatorRow], ...] = (
        Field("DRAM bytes", "bytes", find_traffic),
        Field("bytes at least", "bytes", lambda row: row.bytes if find_traffic(row) else None),
    )
    fields = (*_NAME_FIELDS[by], *_OTHER_FIELDS, *(traffic_fields if by == "operator" else ()))
    return make_table(fields, rows, caption, capture=title, names=min(len(_NAME_FIELDS[by]), 2))


def _define_terms(account: StepAccount) -> str:
    """Returns the definitions of the terms in the account of a step."""
    return (
        "The attainable time of an operator is the longer one of two times: that of its arithmetic, and that of "
        "reading its inputs and writing its outputs once. Both times are interpolated between times of well-shaped "
        f"operators that were measured on {account.measured_on}. The longer one is that of the limit: FLOPs or memory. "
        "The excess is the measured time above the attainable time. Calls that are faster do not reduce the excess of "
        "other calls. Unfused operators pass over the same data one after the other, so that one kernel could replace "
        "them. The kernel takes between the time of the longest operator and that of the two longest operators, and "
        "the account assumes the middle. Redundant work is only the time on the GPU: a finding about it also saves its "
        "launches, which the account counts as launching. The account replays the step and counts only what makes the "
        "step shorter. So the operators may exceed their attainable times by more than the account shows. The GPU's "
        "work may hide launching and waiting, and launching and waiting may hide the GPU's work. So each part is the "
        "mean of its savings before and after the other part is removed."
    )
