"""Answers which kernels and kernel classes take the most time, and how large the share of matmul is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.kernels.class_rules import FUSED, MATMUL, UNKNOWN
from nsys_analyzer.analysis.summary.complete import compared_phases, parts_and_enclosing
from nsys_analyzer.analysis.summary.kernel_tables import ClassShares, Leader, MatmulShare, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import kernel_word, launch_word
from nsys_analyzer.report.model import Answer, Bars, Block, Field, Table, make_table
from nsys_analyzer.report.units import format_count, format_percent
from nsys_analyzer.text import format_fixed, join_names, join_texts, phrase
from nsys_analyzer.trace.phase_names import STEP

_MEMORY_OPERATIONS = {"memcpy": "copies of memory", "memset": "fills of memory"}
#: A class with a smaller share of its phase is not mentioned.
_MIN_MENTIONED_SHARE = 0.03
#: Smaller shares and changes of shares are negligible.
_NEGLIGIBLE_SHARE = 0.005
#: A class with a smaller share of every phase, in percent, is too thin to be seen in the figure.
_MIN_DRAWN_PERCENT = 0.5


def answer_top_kernel(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields the kernel with the most time in forward, in backward and in both, and whether it is the same one."""
    if not capture.top_kernels:
        return
    kernel = kernel_word(capture)
    leaders = [
        phrase(
            "`{}` in {} ({} of the time, {})",
            labels[leader.kernel.name],
            _scope_in_sentence(leader.scope),
            format_percent(leader.kernel.share),
            format_count(leader.kernel.launches_per_instance, launch_word(capture)),
        )
        for leader in capture.top_kernels
    ]
    verdict = ""
    if len(leaders) > 1:
        is_same = len({leader.kernel.name for leader in capture.top_kernels}) == 1
        verdict = f" It is the same {kernel} in each." if is_same else f" They have different top {kernel}s."
    yield Answer(join_texts("", (f"The top {kernel} is ", join_texts(", ", leaders), ".", verdict)), capture.title)


def _scope_in_sentence(scope: str) -> str:
    """Returns the name of a phase, or of a whole step or capture, with an article if it needs one."""
    return f"the {scope}" if " " in scope or scope in (STEP, "optimizer") else scope


def top_kernel(capture: CaptureSummary) -> Leader | None:
    """Returns the kernel with the most time in the largest scope of a capture."""
    return capture.top_kernels[-1] if capture.top_kernels else None


def answer_other_kernels(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields the classes other than matmul with a large share of each phase, and tables of the top kernels."""
    shares = []
    for phase in compared_phases(capture):
        rows = [row for row in phase.classes if row.kernel_class != MATMUL and row.share >= _MIN_MENTIONED_SHARE]
        names = ["its own kernels" if row.kernel_class == phase.phase else row.kernel_class for row in rows]
        text = ", ".join(f"{name} {format_percent(row.share)}" for name, row in zip(names, rows, strict=True))
        shares.append(f"in {_scope_in_sentence(phase.phase)} {text or 'none above 3 %'}")
    if not shares:
        return
    subject = "Classes other than matmul" if capture.holds_model else "Classes"
    yield Answer(f"{subject}: {'; '.join(shares)}.", capture.title)
    for phases in parts_and_enclosing(capture):
        if phases:
            yield _kernel_table(capture, phases, labels)


#: The name and class of a kernel, or the kind of a copy or fill and "memory".
_RowKey = tuple[str, str]


def _kernel_table(capture: CaptureSummary, phases: Sequence[PhaseSummary], labels: Mapping[str, str]) -> Table:
    """Returns the ms and share of each kernel in each phase, and the ms of copies and fills, which have no share."""
    keys = [row.key for row in merge_kernels(*(phase.kernels for phase in phases))]
    kinds = {row.kind for phase in phases for row in phase.memory}
    memory_keys = [(kind, "memory") for kind in _MEMORY_OPERATIONS if kind in kinds]

    def label(key: _RowKey) -> str:
        return _MEMORY_OPERATIONS[key[0]] if key in memory_keys else labels[key[0]]

    fields: tuple[Field[_RowKey], ...] = (
        Field(kernel_word(capture), "code", label),
        Field("class", "text", lambda key: key[1]),
        *(field for phase in phases for field in _phase_fields(phase)),
    )
    return make_table(fields, [*keys, *memory_keys], capture=capture.title, names=2)


def _phase_fields(phase: PhaseSummary) -> tuple[Field[_RowKey], ...]:
    rows = {row.key: row for row in phase.kernels}
    ms = {key: row.ms_per_instance for key, row in rows.items()}
    ms |= {(row.kind, "memory"): row.ms_per_instance for row in phase.memory}
    return (
        Field(f"{phase.phase} ms", "ms", ms.get),
        Field("share", "percent", lambda key: rows[key].share if key in rows else None),
    )


def answer_matmul(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the share of matmul in each phase, in training compared with inference, and the shares of all classes."""
    share = capture.matmul
    if share is None or not share.phases or not capture.holds_model:
        return
    yield Answer(_matmul_sentence(capture, share), capture.title)
    scopes = share.scopes
    rows = sorted((row for shares in scopes for row in shares.classes), key=lambda row: -row.ms_per_instance)
    names = [
        name
        for name in dict.fromkeys(row.kernel_class for row in rows)
        if any(shares.of(name) >= _NEGLIGIBLE_SHARE for shares in scopes)
    ]

    def share_field(shares: ClassShares) -> Field[str]:
        return Field(shares.scope, "percent", lambda name: shares.of(name) or None)

    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(share_field, scopes))
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


def _matmul_sentence(capture: CaptureSummary, share: MatmulShare) -> str:
    phases, step, inference = share.phases, share.step, share.inference
    if any(shares.matmul is None for shares in (*phases, *([inference] if inference else []))):
        bounds = ", ".join(f"{_matmul_bounds(shares)} of {_scope_in_sentence(shares.scope)}" for shares in phases)
        return f"Matmul is {bounds}: the capture lacks names of kernels."
    parts = ", ".join(f"{_matmul_share(shares)} of {_scope_in_sentence(shares.scope)}" for shares in share.scopes)
    text = f"Matmul is {parts}, by total {kernel_word(capture)} time."
    fused = [(shares.of(FUSED), _scope_in_sentence(shares.scope)) for shares in phases if shares.of(FUSED)]
    if fused:
        parts = ", ".join(f"{format_percent(value)} of {scope}" for value, scope in fused)
        text += f" Fused attention is not included: it is {parts}."
    if inference and step:
        origin = f"of {share.inference_of}" if share.inference_of else "the forward pass"
        condition = ", without communication," if step.communicates or inference.communicates else ""
        scopes = inference.without_communication(), step.without_communication()
        comparison = _compare(*scopes, f"in inference ({origin})")
        text += f" In the {step.scope}{condition} it is {comparison}."
    return text


def _matmul_bounds(shares: ClassShares) -> str:
    """Returns the bounds of matmul's share, since kernels without a name may be matmuls."""
    least, unnamed = shares.of(MATMUL), shares.of(UNKNOWN)
    return f"{format_percent(least)} to {format_percent(least + unnamed)}" if unnamed < 1 else "an unknown share"


def _matmul_share(shares: ClassShares) -> str:
    """Returns matmul's share, and its share of the time without communication if there is any."""
    share = format_percent(shares.of(MATMUL))
    if not shares.communicates:
        return share
    return f"{share} ({format_percent(shares.without_communication().of(MATMUL))} without communication)"


def _compare(inference: ClassShares, step: ClassShares, reference: str) -> str:
    """Returns how matmul's share of a step differs from that of inference, and which classes cause the difference."""
    difference = step.of(MATMUL) - inference.of(MATMUL)
    if abs(difference) < _NEGLIGIBLE_SHARE:
        return f"about the same as {reference}"
    other_classes = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    sign = -1 if difference < 0 else 1
    contributions = {name: (inference.of(name) - step.of(name)) * sign for name in other_classes}
    causes = [
        f"{name} takes {format_percent(step.of(name))} instead of {format_percent(inference.of(name))}"
        for name in sorted(contributions, key=lambda name: (-contributions[name], name))[:2]
        if contributions[name] >= _NEGLIGIBLE_SHARE
    ]
    direction = "lower" if difference < 0 else "higher"
    points = f"{format_fixed(abs(difference) * 100, 1)} percentage points {direction} than {reference}"
    return f"{points}: {join_names(causes)}" if causes else points
