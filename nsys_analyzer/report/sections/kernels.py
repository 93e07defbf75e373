"""(b) Which kernel takes the most time, (c) which other kernels and classes matter, (d) what share is matmul."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.kernels.class_rules import FUSED, MATMUL, UNKNOWN
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.complete import BOTH, compared_phases, parts_and_enclosing
from nsys_analyzer.analysis.summary.statistics import ClassShares, KernelRow, Leader, MatmulShare, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import kernel_word, launch_word
from nsys_analyzer.report.model import Answer, Bars, Block, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, percent
from nsys_analyzer.text import joined, phrase, plural

#: From this share of all kernel time on, the kernels of the phases stand for those of all of it.
_MOST = 0.5
#: Kernels that stand in full view; "Details" has all of them.
_SHOWN, _DRAWN = 4, 12
_MEMORY = {"memcpy": "copies of memory", "memset": "fills of memory"}
#: A share worth naming, a change of a share worth a word, and a share too thin to see in a figure, %.
_MATTERS, _SMALL, _THIN = 0.03, 0.005, 0.5


# --- (b)


def answer_top_kernel(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """The kernel with the most time of forward, backward and both, and whether it is the same one."""
    found, kernel = capture.top_kernels, kernel_word(capture)
    noun = launch_word(capture)
    if not found:
        return
    said = [
        phrase(
            "in {} `{}`, {} in {}", _of(one.scope), labels[one.kernel.name], percent(one.kernel.share),
            counted(one.kernel.launches_per_instance, noun),
        )
        for one in found
    ]  # fmt: skip
    verdict = _verdict({one.scope: one.kernel.name for one in found}, kernel)
    text = joined("", (f"The top {kernel}: ", joined("; ", said), ".", f" {verdict}" if verdict else ""))
    yield Answer(text, capture.title)
    rows = [(one.scope, one.kernel) for one in found]
    rows += [(f"{one.scope}, communication", one.collective) for one in found if one.collective]
    fields: tuple[Field[tuple[str, KernelRow]], ...] = (
        Field("part", "text", lambda row: row[0]),
        Field(kernel, "code", lambda row: labels[row[1].name]),
        Field("class", "text", lambda row: row[1].kernel_class),
        Field(plural(2, noun), "count", lambda row: row[1].launches_per_instance),
        Field("ms", "ms", lambda row: row[1].ms_per_instance),
        Field("share", "percent", lambda row: row[1].share),
    )
    yield table(fields, rows, capture=capture.title)


def _of(scope: str) -> str:
    """A phase, or all of a step or capture, as it stands in a sentence."""
    return f"the {scope}" if " " in scope or scope in (STEP, "optimizer") else scope


def _verdict(leaders: dict[str, str], kernel: str) -> str:
    """Whether forward, backward and both together have one leader; empty where there are no such parts."""
    if BOTH not in leaders:
        return ""
    of_forward, of_backward, of_both = leaders["forward"], leaders["backward"], leaders[BOTH]
    if of_forward == of_backward == of_both:
        return f"The same {kernel} leads in forward, in backward and in both together."
    if of_forward == of_backward:
        return f"The same {kernel} leads in forward and in backward, another one in both together."
    if of_both in (of_forward, of_backward):
        phase = "forward" if of_both == of_forward else "backward"
        return f"Forward and backward have different top {kernel}s; that of {phase} leads in both together."
    return f"Forward, backward and both together have three different top {kernel}s."


def top_kernel(capture: CaptureSummary) -> Leader | None:
    """The leader over the most that was seen of a capture."""
    return capture.top_kernels[-1] if capture.top_kernels else None


# --- (c)


def answer_other_kernels(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """The classes beside matmul that take a share worth naming, and the kernels with the most time."""
    said = []
    for phase in compared_phases(capture):
        others = [row for row in phase.classes if row.kernel_class != MATMUL and row.share >= _MATTERS]
        names = ("its own kernels" if row.kernel_class == phase.phase else row.kernel_class for row in others)
        named = ", ".join(f"{name} {percent(row.share)}" for name, row in zip(names, others, strict=True))
        said.append(f"in {_of(phase.phase)} {named or 'nothing above 3 %'}")
    if not said:
        return
    besides = "Besides matmul" if capture.holds_model else "Classes"
    yield Answer(f"{besides}: {'; '.join(said)}.", capture.title)
    parts, enclosing = parts_and_enclosing(capture)
    whole = max((sum(row.ms_per_instance for row in one.kernels) * one.instances for one in enclosing), default=0.0)
    inside = sum(row.ms_per_instance * one.instances for one in parts for row in one.kernels)
    phases = parts if inside >= _MOST * whole else enclosing[-1:]
    yield kernel_table(capture, phases, labels, _SHOWN)
    shown = merge_kernels(*(phase.kernels for phase in phases))[:_DRAWN]
    kernel = kernel_word(capture)
    yield Bars(
        f"{capture.title}-top-kernels",
        f"{capture.title}: {kernel}s with the most time in {' + '.join(p.phase for p in phases)}",
        tuple(labels[row.name] for row in shown),
        (("ms", tuple(row.ms_per_instance for row in shown)),),
        "ms per instance",
        "horizontal",
        tuple(row.kernel_class for row in shown),
    )


#: The name and class of a kernel; the kind and "memory" of copies and fills.
_Key = tuple[str, str]


def kernel_table(
    capture: CaptureSummary, phases: Sequence[PhaseSummary], labels: Mapping[str, str], most: int | None = None
) -> Table:
    """The ms and the share of each kernel in each phase, and the ms of copies and fills, which have no share."""
    every, kernel = merge_kernels(*(phase.kernels for phase in phases)), kernel_word(capture)
    keys = [row.key for row in every[:most]]
    seen = {row.kind for phase in phases for row in phase.memory} if most is None else set()
    copies = [(kind, "memory") for kind in _MEMORY if kind in seen]
    fields: tuple[Field[_Key], ...] = (
        Field(kernel, "code", lambda key: _MEMORY[key[0]] if key in copies else labels[key[0]]),
        Field("class", "text", lambda key: key[1]),
        *(field for phase in phases for field in _in_phase(phase)),
    )
    caption = f"The {len(keys)} of {len(every)} {kernel}s with the most time:" if len(keys) < len(every) else ""
    return table(fields, [*keys, *copies], caption, capture=capture.title, names=2)


def _in_phase(phase: PhaseSummary) -> tuple[Field[_Key], ...]:
    rows = {row.key: row for row in phase.kernels}
    ms = {key: row.ms_per_instance for key, row in rows.items()}
    ms |= {(row.kind, "memory"): row.ms_per_instance for row in phase.memory}
    return (
        Field(f"{phase.phase} ms", "ms", ms.get),
        Field("share", "percent", lambda key: rows[key].share if key in rows else None),
    )


# --- (d)


def answer_matmul(capture: CaptureSummary) -> Iterator[Block]:
    """Matmul's share in each phase, of the training step against inference, and the shares of all classes."""
    share = capture.matmul
    if share is None or not share.phases or not capture.holds_model:
        return
    yield Answer(_matmul_sentence(capture, share), capture.title)
    scopes = share.scopes
    rows = sorted((row for one in scopes for row in one.classes), key=lambda row: -row.ms_per_instance)
    names = dict.fromkeys(row.kernel_class for row in rows if any(one.of(row.kernel_class) >= _SMALL for one in scopes))
    yield _class_table(capture, scopes, names)
    if any(one.communicates for one in scopes) and any(one.computing().classes for one in scopes):
        without = tuple(one.computing() for one in scopes)
        yield _class_table(capture, without, names, "Without communication, which mostly waits for the slowest rank:")
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
    if fused := [f"{percent(one.of(FUSED))} of {_of(one.scope)}" for one in phases if one.of(FUSED)]:
        text += f" Fused attention is counted apart: {', '.join(fused)}."
    if inference and step:
        of = f"of {share.inference_of}" if share.inference_of else "the forward pass"
        alone = ", without communication," if step.communicates or inference.communicates else ""
        change = _change(inference.computing(), step.computing(), f"in inference ({of})")
        text += f" In the {step.scope}{alone} it is {change}."
    return text


def _bounds(shares: ClassShares) -> str:
    """Between what values matmul's share lies, where kernels without a name may be of it or not."""
    least, unnamed = shares.of(MATMUL), shares.of(UNKNOWN)
    return f"{percent(least)} to {percent(least + unnamed)}" if unnamed < 1 else "not known"


def _matmul(shares: ClassShares) -> str:
    """Matmul's share, and behind it that of what computes, where there is communication."""
    computing = percent(shares.computing().of(MATMUL))
    return percent(shares.of(MATMUL)) + (f" ({computing} without communication)" if shares.communicates else "")


def _change(inference: ClassShares, step: ClassShares, there: str) -> str:
    """By how much the share changes, and which classes take or give it."""
    change = step.of(MATMUL) - inference.of(MATMUL)
    if abs(change) < _SMALL:
        return f"about the same as {there}"
    others = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    towards = -1 if change < 0 else 1
    change_of = {name: (inference.of(name) - step.of(name)) * towards for name in others}
    named = [
        f"{name} takes {percent(step.of(name))} instead of {percent(inference.of(name))}"
        for name in sorted(others, key=lambda name: (-change_of[name], name))[:2]
        if change_of[name] >= _SMALL
    ]
    points = f"{abs(change) * 100:.1f} percentage points {'lower' if change < 0 else 'higher'} than {there}"
    return f"{points}: {', '.join(named)}" if named else points


def _class_table(
    capture: CaptureSummary, scopes: Sequence[ClassShares], names: Mapping[str, None], caption: str = ""
) -> Table:
    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(_share_in, scopes))
    return table(fields, names, caption, capture=capture.title)


def _share_in(shares: ClassShares) -> Field[str]:
    return Field(shares.scope, "percent", lambda name: shares.of(name) or None)
