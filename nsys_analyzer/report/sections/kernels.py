"""Answers which kernels and classes take the most time, and how large the shares of matmul and softmax are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.counters.figures import CounterRow
from nsys_analyzer.analysis.kernels.class_rules import FUSED_ATTENTION, MATMUL, UNKNOWN
from nsys_analyzer.analysis.summary.complete import select_compared_phases, split_compared_phases
from nsys_analyzer.analysis.summary.kernel_tables import ClassShares, Leader, MatmulShare, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.transformer.attention import CAPTURE, FORWARD, MEMORY_BOUND_SHARE, AttentionSummary
from nsys_analyzer.report.evidence import kernel_word, launch_word, name_scope
from nsys_analyzer.report.model import Answer, Bars, Block, Field, Paragraph, Table, make_table
from nsys_analyzer.report.units import format_count, format_ms, format_number, format_percent, rounded
from nsys_analyzer.text import StrOrText, format_fixed, join_names, join_texts, phrase, rounded_percent

_MEMORY_OPERATIONS = {"memcpy": "copies of memory", "memset": "fills of memory"}
#: A sentence mentions a kernel class only if its share of a phase's kernel time is at least this value.
_MIN_MENTIONED_SHARE = 0.03
#: Tables and comparisons ignore shares, and differences of shares, below this value.
_NEGLIGIBLE_SHARE = 0.005
#: A class is left out of the figure if its share of every phase, in percent, is below this value.
_MIN_DRAWN_PERCENT = 0.5


def answer_top_kernel(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields the kernels with the most time in forward, in backward and in both, and whether they are equal."""
    if not capture.top_kernels:
        return
    kernel = kernel_word(capture)
    sentences: list[StrOrText] = [
        phrase(
            "The top {} of {} is `{}`, with {} of the {} time in {}.",
            kernel,
            name_scope(leader.scope),
            labels[leader.kernel.name],
            format_percent(leader.kernel.share),
            kernel,
            format_count(leader.kernel.launches_per_instance, launch_word(capture)),
        )
        for leader in capture.top_kernels
    ]
    if len(sentences) > 1:
        scopes = join_names([name_scope(leader.scope) for leader in capture.top_kernels])
        is_same = len({leader.kernel.name for leader in capture.top_kernels}) == 1
        top_kernels = f"the same top {kernel}" if is_same else f"different top {kernel}s"
        sentences.append(f"{scopes[0].upper()}{scopes[1:]} have {top_kernels}.")
    yield Answer(join_texts(" ", sentences), capture.title)


def find_top_kernel(capture: CaptureSummary) -> Leader | None:
    """Returns the kernel that takes the most time in the largest scope of a capture."""
    return capture.top_kernels[-1] if capture.top_kernels else None


def answer_other_kernels(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields the classes other than matmul with a large share of each phase, and tables of the top kernels."""
    kernel, sentences = kernel_word(capture), []
    except_matmul = " except matmul" if capture.holds_model else ""
    for phase in select_compared_phases(capture):
        rows = [row for row in phase.classes if row.kernel_class != MATMUL and row.share >= _MIN_MENTIONED_SHARE]
        least_share = rounded_percent(_MIN_MENTIONED_SHARE)
        text = f"no {kernel} class{except_matmul} takes {least_share} of the {kernel} time or more"
        if rows:
            noun, verb = ("class", "is") if len(rows) == 1 else ("classes", "are")
            first_class, *other_classes = [f"{row.kernel_class} ({format_percent(row.share)}" for row in rows]
            classes = join_names([f"{first_class} of the {kernel} time)", *(f"{name})" for name in other_classes)])
            text = f"the largest {kernel} {noun}{except_matmul} {verb} {classes}"
        sentences.append(f"In {name_scope(phase.phase)}, {text}.")
    if not sentences:
        return
    yield Answer(" ".join(sentences), capture.title)
    for phases in split_compared_phases(capture):
        if phases:
            yield _tabulate_kernels(capture, phases, labels)


#: The name and class of a kernel, or the kind of a copy or fill and "memory".
_RowKey = tuple[str, str]


def _tabulate_kernels(capture: CaptureSummary, phases: Sequence[PhaseSummary], labels: Mapping[str, str]) -> Table:
    """Returns the table of the time and share of each kernel in each phase. Copies and fills have no share."""
    keys = [row.key for row in merge_kernels(*(phase.kernels for phase in phases))]
    kinds = {row.kind for phase in phases for row in phase.memory}
    memory_keys = [(kind, "memory") for kind in _MEMORY_OPERATIONS if kind in kinds]

    def label_row(key: _RowKey) -> str:
        """Returns the label of a row's kernel or memory operation."""
        return _MEMORY_OPERATIONS[key[0]] if key in memory_keys else labels[key[0]]

    fields: list[Field[_RowKey]] = [
        Field(kernel_word(capture), "code", label_row),
        Field("class", "text", lambda key: key[1]),
    ]
    for phase in phases:
        ms = {row.key: row.ms_per_instance for row in phase.kernels}
        ms |= {(row.kind, "memory"): row.ms_per_instance for row in phase.memory}
        shares = {row.key: row.share for row in phase.kernels}
        fields += [Field(f"{phase.phase} ms", "ms", ms.get), Field("share", "percent", shares.get)]
    return make_table(fields, [*keys, *memory_keys], capture=capture.title, names=2)


def answer_matmul(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the share of matmul in each phase, in training compared with inference, and the shares of all classes."""
    share = capture.matmul
    if share is None or not share.phases or not capture.holds_model:
        return
    yield Answer(_describe_matmul(capture, share), capture.title)
    scopes = share.scopes
    rows = sorted((row for shares in scopes for row in shares.classes), key=lambda row: -row.ms_per_instance)
    names = [
        name
        for name in dict.fromkeys(row.kernel_class for row in rows)
        if any(shares.of(name) >= _NEGLIGIBLE_SHARE for shares in scopes)
    ]

    def make_share_field(shares: ClassShares) -> Field[str]:
        """Returns the column with each class's share of the kernel time in one scope."""
        return Field(shares.scope, "percent", lambda name: shares.of(name) or None)

    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(make_share_field, scopes))
    yield make_table(fields, names, capture=capture.title)
    kernel = kernel_word(capture)
    percentages = {name: tuple(shares.of(name) * 100 for shares in scopes) for name in names}
    yield Bars(
        f"{capture.title}-class-shares",
        f"{capture.title}: share of each class of {kernel}s in the total {kernel} time of each phase",
        tuple(shares.scope for shares in scopes),
        tuple((name, values) for name, values in percentages.items() if max(values) >= _MIN_DRAWN_PERCENT),
        f"% of total {kernel} time",
        "stacked",
    )


def _describe_matmul(capture: CaptureSummary, share: MatmulShare) -> str:
    phases, step, inference = share.phases, share.step, share.inference
    if any(shares.matmul is None for shares in (*phases, *([inference] if inference else []))):
        clauses = []
        for shares in phases:  # gives a range, because kernels without a name may be matmuls
            matmul_share, unknown_share = shares.of(MATMUL), shares.of(UNKNOWN)
            bounds = f"{format_percent(matmul_share)} to {format_percent(matmul_share + unknown_share)}"
            clauses.append(f"{bounds if unknown_share < 1 else 'an unknown share'} in {name_scope(shares.scope)}")
        return f"Of the kernel time, matmul takes {join_names(clauses)}. The names of some kernels are missing."
    clauses = []
    for shares in share.scopes:
        clause = f"{format_percent(shares.of(MATMUL))} in {name_scope(shares.scope)}"
        if shares.communicates:
            clause += f" ({format_percent(shares.without_communication().of(MATMUL))} without communication)"
        clauses.append(clause)
    kernel = kernel_word(capture)
    text = f"Of the total {kernel} time, matmul takes {join_names(clauses)}."
    scopes_with_fused_attention = [shares for shares in phases if shares.of(FUSED_ATTENTION)]
    if scopes_with_fused_attention:
        clauses = [
            f"{format_percent(shares.of(FUSED_ATTENTION))} in {name_scope(shares.scope)}"
            for shares in scopes_with_fused_attention
        ]
        text += f" Fused attention does not count as matmul, and takes {join_names(clauses)}."
    if inference and step:
        origin = f"of {share.inference_of}" if share.inference_of else "the forward pass"
        condition = ", without communication," if step.communicates or inference.communicates else ""
        scopes = inference.without_communication(), step.without_communication()
        comparison = _compare_matmul_shares(*scopes, f"in inference ({origin})", kernel)
        text += f" In {name_scope(step.scope)}{condition} the share of matmul is {comparison}."
    return text


def _compare_matmul_shares(inference: ClassShares, step: ClassShares, reference: str, kernel: str) -> str:
    """Returns how matmul's share of a step differs from that of inference, and which classes cause the difference."""
    difference = step.of(MATMUL) - inference.of(MATMUL)
    if abs(difference) < _NEGLIGIBLE_SHARE:
        return f"about the same as {reference}"
    other_classes = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    sign = -1 if difference < 0 else 1
    contributions = {name: (inference.of(name) - step.of(name)) * sign for name in other_classes}
    causes = [
        f"{name} {kernel}s take {format_percent(step.of(name))} instead of {format_percent(inference.of(name))}"
        for name in sorted(contributions, key=lambda name: (-contributions[name], name))[:2]
        if contributions[name] >= _NEGLIGIBLE_SHARE
    ]
    direction = "lower" if difference < 0 else "higher"
    points = f"{format_fixed(abs(difference) * 100, 1)} percentage points {direction} than {reference}"
    return f"{points}, because {join_names(causes)}" if causes else points


# --- attention

_ATTENTION_FIELDS: tuple[Field[AttentionSummary], ...] = (
    Field("unit", "text", lambda row: f"one {row.per}" if row.per != CAPTURE else _count_ranges(row)),
    Field("softmax ms", "ms", lambda row: row.softmax_ms),
    Field("matmul ms", "ms", lambda row: row.matmul_ms),
    Field("fused ms", "ms", lambda row: row.fused_ms),
    Field("time: matmul ÷ softmax", "factor", lambda row: row.runtime_ratio),
    Field("FLOPs: matmul ÷ softmax", "factor", lambda row: row.flop_ratio),
    Field("softmax FLOP/s", "flop/s", lambda row: row.softmax_flops_per_s),
    Field("matmul FLOP/s", "flop/s", lambda row: row.matmul_flops_per_s),
    Field("fused FLOP/s", "flop/s", lambda row: row.fused_flops_per_s),
    Field("softmax B/s", "bytes/s", lambda row: row.softmax_traffic.bytes_per_s if row.softmax_traffic else None),
    Field("share of peak", "percent", lambda row: row.softmax_traffic.peak_share if row.softmax_traffic else None),
)


def answer_attention(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the ratios of times and FLOPs, the achieved FLOP/s, and a note if softmax runs as other kernel classes."""
    attention = capture.attention
    if attention is None:
        return
    forward = capture.phase(FORWARD)
    has_softmax_kernels = forward is not None and forward.share_of("softmax")
    sampled = capture.counters.of_class("softmax") if capture.counters and has_softmax_kernels else None
    yield Answer(_describe_attention(attention, sampled), capture.title)
    figures = make_table(_ATTENTION_FIELDS, [attention], capture=capture.title)
    if len(figures.columns) > 2:  # one column is the time of fused attention, which the sentence gives
        yield figures
    if attention.softmax_ms and forward and not has_softmax_kernels:
        text = "Inside its ranges, softmax runs as kernels that other tables list as elementwise and reduction."
        yield Paragraph(text, capture.title)


def _count_ranges(attention: AttentionSummary) -> str:
    return format_count(attention.occurrences or 0, "attention range")


def _describe_attention(attention: AttentionSummary, sampled: CounterRow | None) -> str:
    softmax, matmul = attention.softmax_ms, attention.matmul_ms
    unit = {FORWARD: "one forward pass", CAPTURE: _count_ranges(attention)}.get(attention.per, "one step")
    if softmax is None or matmul is None or attention.runtime_ratio is None:
        fused = format_ms(attention.fused_ms or 0.0)
        return (
            f"Attention is fused, and takes {fused} in {unit}. The kernels of fused attention also compute the softmax."
        )
    ratio = f"{rounded(attention.runtime_ratio)}×"
    times = f"In {unit}, the attention matmuls take {format_ms(matmul)} and softmax takes {format_ms(softmax)}."
    comparison = f"The attention matmuls take {ratio} the time of softmax."
    if attention.flop_ratio is not None:
        flops = f"{rounded(attention.flop_ratio)}×"
        comparison = f"The attention matmuls do {flops} the FLOPs of softmax in {ratio} the time of softmax."
    return f"{comparison} {times}{describe_bandwidth(attention, sampled)}"


def describe_bandwidth(attention: AttentionSummary, sampled: CounterRow | None) -> str:
    """Returns the bandwidth of softmax, its share of the memory's peak, and whether softmax is memory-bound.

    The hardware counters ``sampled`` of softmax show this. Without counters, a lower bound of its traffic shows it.
    """
    if sampled and sampled.dram_share is not None:
        share, verdict = rounded_percent(sampled.dram_share), "is" if sampled.limited_by == "memory" else "is not"
        return (
            f" By the GPU's counters, softmax uses {share} of the memory's peak bandwidth, and {verdict} memory-bound."
        )
    traffic = attention.softmax_traffic
    if traffic is None or traffic.peak_share is None:
        return ""
    rate = format_number(traffic.bytes_per_s, "bytes/s")
    text = f" Softmax moves at least {rate}, {format_percent(traffic.peak_share)} of the memory's peak bandwidth"
    if traffic.fits_in_l2:
        return f"{text}. The attention scores fit into the L2 cache, which may serve a part of this traffic."
    if traffic.memory_bound is None:
        return f"{text}."
    if traffic.memory_bound:
        return f"{text}, so softmax is memory-bound."
    return f"{text}. Softmax is not memory-bound, because that requires at least {format_percent(MEMORY_BOUND_SHARE)}."


HOW_TO_ANNOTATE = phrase(
    "To measure the parts of attention, wrap attention in an NVTX range `scaled dot product attention`, and its parts "
    "in `computing attention scores`, `computing softmax` and `final matmul`. For existing ranges, give their names: "
    "`--phase-name attention=NAME --phase-name scores=NAME --phase-name softmax=NAME --phase-name values=NAME`. A "
    "compiled model opens no ranges in its parts. To record the kernels of a CUDA graph, capture with "
    "`--cuda-graph-trace=node`."
)
