"""Which modules of the model take the time, in forward and in backward."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.summary.modules import Module, Modules, Work, fold_modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import kernel_word
from nsys_analyzer.report.model import Answer, Block, Field, Listing, Paragraph, Section, Table, make_table
from nsys_analyzer.report.units import format_percent, format_precise_ms
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural, strong
from nsys_analyzer.trace.schema import MS_PER_S

#: Rows of the table in a report, and the share that a row has at least; the command shows all.
_MOST_ROWS, _LEAST_SHARE = 10, 0.005
#: Layers that differ are named one by one, so many of them.
_MOST_OUTLIERS = 4
#: Modules in the few words of an answer.
_NAMED, _MATTERS = 3, 0.01
_NO_MODULE, _COMMUNICATION = "(no module)", "(communication)"
#: What the figures of modules are.
LEGEND = phrase(
    "Total kernel time, mean of a step (of a forward pass where no step is known). A module's time holds that of the "
    "modules inside it; *own* is without them, and `*` stands for layers of one kind, whose times are added up. "
    "*Forward* holds every phase but backward and optimizer; a forward that is computed again counts as backward."
)
#: Less of backward than this that is known by module, where forward is known, gets a word on how to know it.
_COVERED = 0.5

#: An expert of a layer, by its module's path.
_EXPERT = re.compile(r"(.*\bexperts)\.\d+")
#: What stands before a module for each one that it lies in.
_DEEPER = "· "
#: A module, and the kernel time of all.
_Row = tuple[Module, float]


def modules_section(captures: Sequence[CaptureSummary], *, every: bool = False) -> Section:
    """The tree of modules of each capture, layers of one kind as one; ``every`` is for each layer by itself."""
    blocks: list[Block] = []
    for capture in captures:
        answered = (*answer_modules(capture, every=every),)
        blocks += [Paragraph(strong(capture.title))] if answered and len(captures) > 1 else []
        blocks += answered
    return Section("modules", "Which modules take the time?", (*blocks, Paragraph(LEGEND)) if blocks else ())


def answer_modules(capture: CaptureSummary, *, every: bool = False) -> Iterator[Block]:
    """The modules of one capture, and the layers unlike others."""
    title, modules = capture.title, capture.modules
    if modules is None:
        return
    folded, outliers = fold_modules(modules.modules)
    time = f"{kernel_word(capture)} time"
    yield _answer(title, modules, folded, time)
    yield _table(title, modules, modules.modules if every else folded, time, every=every)
    if outliers and not every:
        unlike = [(_called(one.path, modules), one) for one in outliers[:_MOST_OUTLIERS]]
        times = [(path, format_precise_ms(one.ms), format_precise_ms(one.median_ms)) for path, one in unlike]
        lines = [phrase("`{}` takes {}, the layers of its kind {} (median).", *one) for one in times]
        yield Listing(tuple(lines), capture=title)
    if experts := _experts(modules):
        yield Paragraph(experts, capture=title)
    covered = modules.backward_coverage
    if covered is not None and covered < _COVERED * (modules.forward_coverage or 0.0):
        said = phrase(
            "Which modules backward belongs to is not known for {} of its time. "
            "`nsys-analyze run --modules` records it, and for our own targets `--nsys-option --pytorch=autograd-nvtx`.",
            format_percent(1 - covered),
        )
        yield Paragraph(said, capture=title)


def _answer(title: str, modules: Modules, folded: Sequence[Module], time: str) -> Answer:
    """The modules with the most time of their own, and how much is known."""
    total = modules.forward_ms + modules.backward_ms
    heaviest = sorted(folded, key=lambda one: -_own_ms(one))[:_NAMED]
    first = [one for one in heaviest if _own_ms(one) >= _MATTERS * total] or heaviest[:1]
    named = join_texts(
        ", ", [phrase("`{}` {}", _called(one.path, modules), format_percent(_own_ms(one) / total)) for one in first]
    )
    covered = [
        f"{format_percent(share)} of that of {name}"
        for name, share in (("forward", modules.forward_coverage), ("backward", modules.backward_coverage))
        if share is not None
    ]
    text = phrase(
        "Of the {} of {} ({} a {}), these modules have the most of their own: {}. {} {} to a module, by {}.",
        time, "forward and backward" if modules.backward_ms else "forward", format_precise_ms(total), modules.per,
        named,
        " and ".join(covered), "belong" if len(covered) > 1 else "belongs", modules.source,
    )  # fmt: skip
    return Answer(text, title)


def _experts(modules: Modules) -> StrOrText:
    """How unevenly experts are loaded: by FLOPs, of which each token takes as many, else by time; empty without any."""
    layers = defaultdict[str, list[Module]](list)
    for one in modules.modules:
        if (match := _EXPERT.fullmatch(one.path)) and one.forward.ms:
            layers[match[1]].append(one)
    by_flops = all(one.forward.flops for layer in layers.values() for one in layer)
    loads = []
    for layer in layers.values():
        work = [(by_flops and one.forward.flops) or one.forward.ms for one in layer]
        loads += [(max(work) / statistics.mean(work), layer[work.index(max(work))].path)] if len(layer) > 1 else []
    if not loads:
        return ""
    typical, (most, path) = statistics.median(load for load, _ in loads), max(loads)
    of = "FLOPs, and so tokens," if by_flops else "time"
    return phrase(
        "The busiest expert of a layer has {:.3g} times the mean {} of those that work (median of {} {}), {:.3g} times "
        "in `{}`.",
        typical,
        of,
        len(loads),
        plural(len(loads), "layer"),
        most,
        _called(path, modules),
    )


def _own_ms(one: Module) -> float:
    return one.own_forward_ms + one.own_backward_ms


def _called(path: str, modules: Modules) -> str:
    """A module's path, without the model's class where there is one model that holds others."""
    after = zip(modules.modules, modules.modules[1:], strict=False)
    models = [one for one, next_one in after if not one.depth and next_one.depth]
    return path.partition(".")[2] or path if len(models) == 1 and models[0].kind else path


def _table(title: str, modules: Modules, shown: Sequence[Module], time: str, *, every: bool) -> Table:
    total = modules.forward_ms + modules.backward_ms
    kept = [one for one in shown if every or one.ms >= _LEAST_SHARE * total]
    most = len(kept) if every else _MOST_ROWS
    least = sorted((one.ms for one in kept), reverse=True)[:most][-1] if kept else 0.0
    kept = [one for one in kept if one.ms >= least]
    left_out = len(shown) - len(kept)
    rest = f" ({left_out} small ones left out)" if left_out else ""
    others = [
        _row(_COMMUNICATION, modules.communication_forward, modules.communication_backward),
        _row(_NO_MODULE, modules.outside_forward, modules.outside_backward),
    ]
    rows = [*kept, *(one for one in others if one.ms)]
    cells = [(one, total) for one in rows]
    return make_table(_FIELDS, cells, f"Modules{rest}, ms of {time} a {modules.per}:", capture=title)


def _row(name: str, forward: Work, backward: Work) -> Module:
    """Kernels of no module as a row."""
    return Module(name, name, "", 0, forward, backward, forward.ms, backward.ms)


def _flops_per_s(row: _Row) -> float | None:
    """Of both directions, as far as they are known."""
    ways = [way for way in (row[0].forward, row[0].backward) if way.flops and way.ms]
    return sum(way.flops or 0 for way in ways) / (sum(way.ms for way in ways) / MS_PER_S) if ways else None


_FIELDS: tuple[Field[_Row], ...] = (
    Field("module", "code", lambda row: _DEEPER * row[0].depth + row[0].label),
    Field("×", "count", lambda row: row[0].count if row[0].count > 1 else None),
    Field("forward", "ms", lambda row: row[0].forward.ms or None),
    Field("backward", "ms", lambda row: row[0].backward.ms or None),
    Field("own", "ms", lambda row: _own_ms(row[0]) or None),
    Field("launches", "count", lambda row: row[0].forward.launches + row[0].backward.launches),
    Field("share", "percent", lambda row: row[0].ms / row[1] if row[1] else None),
    Field("line", "code", lambda row: row[0].line or None),
    Field("rate", "flop/s", _flops_per_s),
)
