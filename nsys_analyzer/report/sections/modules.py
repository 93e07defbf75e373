"""Answers which modules of the model take the time, in forward and in backward."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.summary.modules import EXPERT_PATH, Module, Modules, Work, fold_modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import kernel_word
from nsys_analyzer.report.model import Answer, Block, Field, Listing, Paragraph, Section, Table, make_table
from nsys_analyzer.report.units import format_count, format_ms, format_percent, rounded
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural, strong
from nsys_analyzer.trace.schema import MS_PER_S

#: The maximum number of rows of the table in a report, and the minimum share of kernel time of a row. The command
#: ``modules`` can show all rows.
_MAX_ROWS, _MIN_ROW_SHARE = 10, 0.005
#: The maximum number of sentences on layers that differ from the others.
_MAX_OUTLIERS = 4
#: The number of modules in the answer, and the minimum share of each.
_MAX_ANSWERED_MODULES, _MIN_ANSWERED_SHARE = 3, 0.01
_NO_MODULE, _COMMUNICATION = "(no module)", "(communication)"
#: The report says how to record the modules of backward if the share of backward that belongs to modules is below this
#: factor times the share of forward that belongs to modules.
_LOW_BACKWARD_COVERAGE_FACTOR = 0.5
#: The definition of the columns.
LEGEND = phrase(
    "Times are total kernel times: means of a step, or of a forward pass if steps are unknown. The time of a module "
    "includes the modules inside it, but its *own* time does not. `*` stands for layers of one kind, whose times are "
    "added up. "
    "*Forward* includes every phase except backward and optimizer. A recomputed forward pass counts as backward. "
    "*Exposed communication* is the time in which only collectives of the module run. No other column contains this "
    "time."
)

#: The prefix of a module's name in the table, repeated for each module that contains the module.
_INDENTATION = "· "
#: A module, and the kernel time of all modules.
_ModuleRow = tuple[Module, float]


def modules_section(captures: Sequence[CaptureSummary], *, each_layer: bool = False) -> Section:
    """Returns the section on the modules of captures.

    Args:
        captures: the captures.
        each_layer: whether each layer has its own row; otherwise the layers of one kind share a row.
    """
    blocks: list[Block] = []
    for capture in captures:
        answer = (*answer_modules(capture, each_layer=each_layer),)
        blocks += [Paragraph(strong(capture.title))] if answer and len(captures) > 1 else []
        blocks += answer
    return Section("modules", "Which modules take the time?", (*blocks, Paragraph(LEGEND)) if blocks else ())


def answer_modules(capture: CaptureSummary, *, each_layer: bool = False) -> Iterator[Block]:
    """Yields the modules of a capture, and the layers that differ from others of their kind."""
    title, modules = capture.title, capture.modules
    if modules is None:
        return
    folded_modules, outliers = fold_modules(modules.modules)
    time = f"{kernel_word(capture)} time"
    yield _summarize_modules(title, modules, folded_modules, time)
    yield _tabulate_modules(
        title, modules, modules.modules if each_layer else folded_modules, time, each_layer=each_layer
    )
    if outliers and not each_layer:
        lines = [
            phrase(
                "`{}` takes {}, whereas other layers of its kind take {} (median).",
                _shorten_path(outlier.path, modules),
                format_ms(outlier.ms),
                format_ms(outlier.median_ms),
            )
            for outlier in outliers[:_MAX_OUTLIERS]
        ]
        yield Listing(tuple(lines), capture=title)
    if experts := _describe_expert_load(modules):
        yield Paragraph(experts, capture=title)
    coverage = modules.backward_coverage
    if coverage is not None and coverage < _LOW_BACKWARD_COVERAGE_FACTOR * (modules.forward_coverage or 0.0):
        note = phrase(
            "The module is unknown for {} of the backward time. `nsys-analyze run --modules` records the modules of "
            "backward. For the included targets, use `--nsys-option --pytorch=autograd-nvtx`.",
            format_percent(1 - coverage),
        )
        yield Paragraph(note, capture=title)


def _summarize_modules(title: str, modules: Modules, folded_modules: Sequence[Module], time: str) -> Answer:
    """Returns the modules with the most own time, and how much of the time belongs to modules."""
    total = modules.forward_ms + modules.backward_ms
    longest_modules = sorted(folded_modules, key=lambda module: -_sum_own_ms(module))[:_MAX_ANSWERED_MODULES]
    answered = [
        module for module in longest_modules if _sum_own_ms(module) >= _MIN_ANSWERED_SHARE * total
    ] or longest_modules[:1]
    shares = [
        phrase("`{}` ({})", _shorten_path(module.path, modules), format_percent(_sum_own_ms(module) / total))
        for module in answered
    ]
    coverage = [
        f"{format_percent(share)} of {direction}"
        for direction, share in (("forward", modules.forward_coverage), ("backward", modules.backward_coverage))
        if share is not None
    ]
    text = phrase(
        "In {} ({} of {} per {}), the most own time is in {}. {} {} to a module, according to {}.",
        "forward and backward" if modules.backward_ms else "forward",
        format_ms(total),
        time,
        _name_unit(modules),
        join_texts(" and ", (join_texts(", ", shares[:-1]), shares[-1])) if len(shares) > 1 else shares[0],
        " and ".join(coverage),
        "belong" if len(coverage) > 1 else "belongs",
        modules.source,
    )
    return Answer(text, title)


def _name_unit(modules: Modules) -> str:
    """Returns the unit that the figures of modules are a mean over: "step", "forward pass" or "capture"."""
    return "forward pass" if modules.per == "forward" else modules.per


def _describe_expert_load(modules: Modules) -> StrOrText:
    """Returns how unevenly experts are loaded: by tokens, by FLOPs or by time, whichever is known first.

    The FLOPs of an expert are proportional to its tokens. The text is empty without experts.
    """
    layers = defaultdict[str, list[Module]](list)
    for module in modules.modules:
        if (match := EXPERT_PATH.fullmatch(module.path)) and module.forward.ms:
            layers[match[1]].append(module)
    has_flops = all(expert.forward.flops for experts in layers.values() for expert in experts)
    has_tokens = all(expert.tokens for experts in layers.values() for expert in experts)
    load_name = "tokens" if has_tokens else "FLOPs, and so tokens," if has_flops else "time"
    imbalances = []
    for experts in layers.values():
        loads = [
            (has_tokens and expert.tokens) or (has_flops and expert.forward.flops) or expert.forward.ms
            for expert in experts
        ]
        if len(experts) > 1:
            busiest = experts[loads.index(max(loads))]
            imbalances.append((max(loads) / statistics.mean(loads), busiest.path))
    if not imbalances:
        return ""
    largest_imbalance, path = max(imbalances)
    return phrase(
        "The busiest expert of a layer has {} times the mean {} of the active experts (median of {}), and {} "
        "times the mean in `{}`.",
        rounded(statistics.median(imbalance for imbalance, _ in imbalances)),
        load_name,
        format_count(len(imbalances), "layer"),
        rounded(largest_imbalance),
        _shorten_path(path, modules),
    )


def _sum_own_ms(module: Module) -> float:
    return module.own_forward_ms + module.own_backward_ms


def _shorten_path(path: str, modules: Modules) -> str:
    """Returns a module's path, without the class of the model if there is only one model with modules inside."""
    pairs = zip(modules.modules, modules.modules[1:], strict=False)
    models = [module for module, next_module in pairs if not module.depth and next_module.depth]
    return path.partition(".")[2] or path if len(models) == 1 and models[0].kind else path


def _tabulate_modules(
    title: str, modules: Modules, candidates: Sequence[Module], time: str, *, each_layer: bool
) -> Table:
    total = modules.forward_ms + modules.backward_ms
    table_modules = list(candidates)
    if not each_layer:
        table_modules = [module for module in candidates if module.ms >= _MIN_ROW_SHARE * total]
        largest_ms = sorted((module.ms for module in table_modules), reverse=True)[:_MAX_ROWS]
        table_modules = [module for module in table_modules if module.ms >= largest_ms[-1]]
    left_out = len(candidates) - len(table_modules)
    note = f" ({left_out} small {plural(left_out, 'module')} left out)" if left_out else ""
    remaining_rows = [
        _make_unassigned_row(_COMMUNICATION, modules.communication_forward, modules.communication_backward),
        _make_unassigned_row(_NO_MODULE, modules.outside_forward, modules.outside_backward),
    ]
    rows = [(row, total) for row in (*table_modules, *(row for row in remaining_rows if row.ms))]
    return make_table(_MODULE_FIELDS, rows, f"Modules{note}, ms of {time} per {_name_unit(modules)}:", capture=title)


def _make_unassigned_row(name: str, forward: Work, backward: Work) -> Module:
    """Returns a row for kernels that belong to no module."""
    return Module(name, name, "", 0, forward, backward, forward.ms, backward.ms)


def _compute_flops_per_s(row: _ModuleRow) -> float | None:
    """Returns the FLOP/s of a module in the directions whose FLOPs are known."""
    counted_work = [work for work in (row[0].forward, row[0].backward) if work.flops and work.ms]
    ms = sum(work.ms for work in counted_work)
    return sum(work.flops or 0 for work in counted_work) / (ms / MS_PER_S) if ms else None


_MODULE_FIELDS: tuple[Field[_ModuleRow], ...] = (
    Field("module", "code", lambda row: _INDENTATION * row[0].depth + row[0].label),
    Field("×", "count", lambda row: row[0].count if row[0].count > 1 else None),
    Field("forward", "ms", lambda row: row[0].forward.ms or None),
    Field("backward", "ms", lambda row: row[0].backward.ms or None),
    Field("own", "ms", lambda row: _sum_own_ms(row[0]) or None),
    Field("exposed communication", "ms", lambda row: row[0].exposed_communication_ms),
    Field("tokens", "count", lambda row: row[0].tokens),
    Field("launches", "count", lambda row: row[0].forward.launches + row[0].backward.launches),
    Field("share", "percent", lambda row: row[0].ms / row[1] if row[1] else None),
    Field("line", "code", lambda row: row[0].line or None),
    Field("rate", "flop/s", _compute_flops_per_s),
)
