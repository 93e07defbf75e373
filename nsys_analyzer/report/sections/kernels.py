"""Which kernel takes the most time, which other kernels and classes matter, and what share is matmul."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.kernels.class_rules import FUSED, MATMUL, UNKNOWN
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.complete import compared_phases, parts_and_enclosing
from nsys_analyzer.analysis.summary.kernel_tables import ClassShares, Leader, MatmulShare, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import kernel_word, launch_word
from nsys_analyzer.report.model import Answer, Bars, Block, Field, Table, make_table
from nsys_analyzer.report.units import format_count, format_percent
from nsys_analyzer.text import join_texts, phrase

_MEMORY = {"memcpy": "copies of memory", "memset": "fills of memory"}
#: A share worth naming, a change of a share worth a word, and a share too thin to see in a figure, %.
_MATTERS, _SMALL, _THIN = 0.03, 0.005, 0.5


def answer_top_kernel(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """The kernel with the most time of forward, backward and both, and whether it is the same one."""
    found, kernel = capture.top_kernels, kernel_word(capture)
    noun = launch_word(capture)
    if not found:
        return
    said = [
        phrase(
            "in {} `{}`, {} in {}", _of(one.scope), labels[one.kernel.name], format_percent(one.kernel.share),
            format_count(one.kernel.launches_per_instance, noun),
        )
        for one in found
    ]  # fmt: skip
    same = len({one.kernel.name for one in found}) == 1
    verdict = f" {'The same one leads' if same else f'Different {kernel}s lead'} there." if len(found) > 1 else ""
    yield Answer(join_texts("", (f"The top {kernel}: ", join_texts("; ", said), ".", verdict)), capture.title)


def _of(scope: str) -> str:
    """A phase, or all of a step or capture, as it stands in a sentence."""
    return f"the {scope}" if " " in scope or scope in (STEP, "optimizer") else scope


def top_kernel(capture: CaptureSummary) -> Leader | None:
    """The leader over the most that was seen of a capture."""
    return capture.top_kernels[-1] if capture.top_kernels else None


def answer_other_kernels(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """The classes beside matmul that take a share worth naming, and the kernels with the most time."""
    said = []
    for phase in compared_phases(capture):
        others = [row for row in phase.classes if row.kernel_class != MATMUL and row.share >= _MATTERS]
        names = ("its own kernels" if row.kernel_class == phase.phase else row.kernel_class for row in others)
        named = ", ".join(f"{name} {format_percent(row.share)}" for name, row in zip(names, others, strict=True))
        said.append(f"in {_of(phase.phase)} {named or 'nothing above 3 %'}")
    if not said:
        return
    besides = "Besides matmul" if capture.holds_model else "Classes"
    yield Answer(f"{besides}: {'; '.join(said)}.", capture.title)
    for phases in parts_and_enclosing(capture):
        if phases:
            yield _kernel_table(capture, phases, labels)


#: The name and class of a kernel; the kind and "memory" of copies and fills.
_Key = tuple[str, str]


def _kernel_table(capture: CaptureSummary, phases: Sequence[PhaseSummary], labels: Mapping[str, str]) -> Table:
    """The ms and the share of each kernel in each phase, and the ms of copies and fills, which have no share."""
    keys = [row.key for row in merge_kernels(*(phase.kernels for phase in phases))]
    seen = {row.kind for phase in phases for row in phase.memory}
    copies = [(kind, "memory") for kind in _MEMORY if kind in seen]
    fields: tuple[Field[_Key], ...] = (
        Field(kernel_word(capture), "code", lambda key: _MEMORY[key[0]] if key in copies else labels[key[0]]),
        Field("class", "text", lambda key: key[1]),
        *(field for phase in phases for field in _in_phase(phase)),
    )
    return make_table(fields, [*keys, *copies], capture=capture.title, names=2)


def _in_phase(phase: PhaseSummary) -> tuple[Field[_Key], ...]:
    rows = {row.key: row for row in phase.kernels}
    ms = {key: row.ms_per_instance for key, row in rows.items()}
    ms |= {(row.kind, "memory"): row.ms_per_instance for row in phase.memory}
    return (
        Field(f"{phase.phase} ms", "ms", ms.get),
        Field("share", "percent", lambda key: rows[key].share if key in rows else None),
    )


def answer_matmul(capture: CaptureSummary) -> Iterator[Block]:
    """Matmul's share in each phase, of the training step against inference, and the shares of all classes."""
    share = capture.matmul
    if share is None or not share.phases or not capture.holds_model:
        return
    yield Answer(_matmul_sentence(capture, share), capture.title)
    scopes = share.scopes
    rows = sorted((row for one in scopes for row in one.classes), key=lambda row: -row.ms_per_instance)
    names = dict.fromkeys(row.kernel_class for row in rows if any(one.of(row.kernel_class) >= _SMALL for one in scopes))

    def share_in(shares: ClassShares) -> Field[str]:
        return Field(shares.scope, "percent", lambda name: shares.of(name) or None)

    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(share_in, scopes))
    yield make_table(fields, names, capture=capture.title)
    kernel = kernel_word(capture)
    series = tuple((name, tuple(one.of(name) * 100 for one in scopes)) for name in names)
    yield Bars(
        f"{capture.title}-class-shares",
        f"{capture.title}: classes of {kernel}s, share of each phase's total {kernel} time",
        tuple(one.scope for one in scopes),
        tuple(one for one in series if max(one[1]) >= _THIN),
        f"% of total {kernel} time",
        "stacked",
    )


def _matmul_sentence(capture: CaptureSummary, share: MatmulShare) -> str:
    phases, step, inference = share.phases, share.step, share.inference
    if any(one.matmul is None for one in (*phases, *([inference] if inference else []))):
        said = ", ".join(f"{_bounds(one)} of {_of(one.scope)}" for one in phases)
        return f"Matmul is {said}: the capture lacks names of kernels."
    said = ", ".join(f"{_matmul(one)} of {_of(one.scope)}" for one in share.scopes)
    text = f"Matmul is {said}, by total {kernel_word(capture)} time."
    if fused := [f"{format_percent(one.of(FUSED))} of {_of(one.scope)}" for one in phases if one.of(FUSED)]:
        text += f" Fused attention is counted apart: {', '.join(fused)}."
    if inference and step:
        of = f"of {share.inference_of}" if share.inference_of else "the forward pass"
        alone = ", without communication," if step.communicates or inference.communicates else ""
        change = _change(inference.without_communication(), step.without_communication(), f"in inference ({of})")
        text += f" In the {step.scope}{alone} it is {change}."
    return text


def _bounds(shares: ClassShares) -> str:
    """Between what values matmul's share lies, where kernels without a name may be of it or not."""
    least, unnamed = shares.of(MATMUL), shares.of(UNKNOWN)
    return f"{format_percent(least)} to {format_percent(least + unnamed)}" if unnamed < 1 else "not known"


def _matmul(shares: ClassShares) -> str:
    """Matmul's share, and behind it that of what computes, where there is communication."""
    computing = format_percent(shares.without_communication().of(MATMUL))
    return format_percent(shares.of(MATMUL)) + (f" ({computing} without communication)" if shares.communicates else "")


def _change(inference: ClassShares, step: ClassShares, there: str) -> str:
    """By how much the share changes, and which classes take or give it."""
    change = step.of(MATMUL) - inference.of(MATMUL)
    if abs(change) < _SMALL:
        return f"about the same as {there}"
    others = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    towards = -1 if change < 0 else 1
    change_of = {name: (inference.of(name) - step.of(name)) * towards for name in others}
    named = [
        f"{name} takes {format_percent(step.of(name))} instead of {format_percent(inference.of(name))}"
        for name in sorted(others, key=lambda name: (-change_of[name], name))[:2]
        if change_of[name] >= _SMALL
    ]
    points = f"{abs(change) * 100:.1f} percentage points {'lower' if change < 0 else 'higher'} than {there}"
    return f"{points}: {', '.join(named)}" if named else points
