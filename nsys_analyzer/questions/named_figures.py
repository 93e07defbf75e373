"""The figures of a capture that have a name: one table for ``ask``, ``check``, ``explain --budget`` and agents.

A new figure is a row of ``FIGURES``: where it stands in a summary. A key in brackets is a word of the question that
picks a row; ``phase`` is the phase of the question, or the whole capture outside warm-up, ``rank`` one of its run's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nsys_analyzer.analysis.kernels.class_rules import UNKNOWN
from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.summary.kernel_tables import find_class_share
from nsys_analyzer.errors import (
    PROGRAM_ARGUMENTS,
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
    CannotAnswerError,
    ConfigurationError,
)
from nsys_analyzer.report.sections.limits import OPTIONS, explain_missing_mfu
from nsys_analyzer.text import plain, plural

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary

#: A number, the two bounds of one, or a name.
Value: TypeAlias = "float | int | str | tuple[float, float]"


class Case(NamedTuple):
    """What is asked of: a process of a capture, the runs of ranks, and the words of the question."""

    capture: CaptureSummary
    runs: Sequence[ParallelRun]
    words: Mapping[str, str]

    @property
    def phase(self) -> PhaseSummary | None:
        """The phase of the question; without one the whole capture."""
        return self.capture.phase(self.words["phase"]) if "phase" in self.words else self.capture.whole

    @property
    def rank(self) -> RankFigures | None:
        """The rank of the process among those of its run."""
        ranks = [rank for run in self.runs for rank in run.ranks if rank.capture == self.capture.name]
        return next((rank for rank in ranks if len(ranks) == 1 or rank.label == self.capture.process), None)


@dataclass(frozen=True)
class Named:
    """A figure with a name.

    Attributes:
        path: where it stands; of two paths with ``..`` between them its bounds, with ``/`` their quotient.
        kinds: the ``_TABLES`` that it rests on.
        unless: the ``_OBSTACLES`` under which it cannot be told.
    """

    path: str
    doc: str
    kinds: tuple[str, ...] = ("kernel", "graph")
    unless: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The words that a question needs beside the name, in brackets where it may do without."""
        named = dict.fromkeys(re.findall(r"\[(\w+)\]", self.path))
        return (*named, "[phase]") if self.path.startswith("phase") else (*named,)


#: The table of nsys and the category of a trace of PyTorch that hold each kind of row.
_TABLES = {
    "kernel": ("CUPTI_ACTIVITY_KIND_KERNEL", "kernel"), "memcpy": ("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy"),
    "memset": ("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset"), "graph": ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernel"),
    "range": ("NVTX_EVENTS", "user_annotation"), "memory": ("CUDA_GPU_MEMORY_USAGE_EVENTS", "[memory]"),
    "timing": ("timings", ""),
}  # fmt: skip
_ALL, _COPIES, _RANGES, _TIMES = ("kernel", "memcpy", "memset", "graph"), ("memcpy",), ("range",), ("timing",)
_GPU, _KERNELS, _NAMES = ("cpu",), ("graphs",), ("graphs", "unnamed")
#: By what rows are picked.
_IDENTITY = {"class": "kernel_class", "finding": "id", "module": "path", "kernel": "name", "memcpy": "kind"}
#: How the names of figures end, and the units that these are in; all others are counts.
_UNITS = {
    "_ms": "ms", "_us": "us", "share": "fraction", "mfu": "fraction", "flops": "flop", "bytes": "bytes",
    "per_s": "tokens/s", "gpu": "text", "top_kernel": "text",
}  # fmt: skip
_STEP, _EXPOSED = "step.unprofiled_ms", "step.exposed"
_CLASS, _FINDING = "phase.classes[class]", "findings[finding].saves_ms"
FIGURES: dict[str, Named] = {
    "gpu": Named("gpu", "The GPU's name."),
    "steps": Named("step.wall_ms.n", "Measured steps."),
    "step_ms": Named("step.said_ms", "A step's one length: unprofiled, else estimated, else profiled."),
    "step_unprofiled_ms": Named(f"{_STEP}.low", "A step without the profiler.", _TIMES, ("untimed",)),
    "step_estimated_ms": Named(f"{_STEP}.low..{_STEP}.high", "The same, estimated.", unless=("timed",)),
    "step_profiled_ms": Named("step.wall_ms", "A step under the profiler."),
    "step_compute_ms": Named("step.compute_ms", "Of that: kernels compute.", unless=_GPU),
    "step_copy_ms": Named(f"{_EXPOSED}_copy_ms", "Copies alone run.", _COPIES, _GPU),
    "step_communication_ms": Named(f"{_EXPOSED}_communication_ms", "Collectives.", unless=_GPU),
    "step_idle_ms": Named("step.idle_ms", "The GPU does nothing.", _ALL, _GPU),
    "step_busy_share": Named("step.busy_share", "The GPU works, of the step's one length.", _ALL, _GPU),
    "step_idle_share": Named("step.idle_ms/step.length_ms", "The share of that.", _ALL, _GPU),
    "idle_cause_ms": Named("step.causes[cause].ms", "It does nothing for one cause.", _ALL, _GPU),
    "step_class_ms": Named("step.classes[class].ms", "A kernel class computes.", unless=_NAMES),
    "step_class_share": Named("step.classes[class].ms/step.length_ms", "Its share.", unless=_NAMES),
    "step_kernels": Named("step.launches", "Kernels and fills of a step.", unless=_KERNELS),
    "launch_latency_us": Named("step.launch_latency_us.median", "From launch to start.", _ALL, _GPU),
    "saves_ms": Named(f"{_FINDING}_low..{_FINDING}_high", "What a finding saves.", unless=_GPU),
    "wall_ms": Named("phase.wall_ms", "By the CPU's clock.", _RANGES),
    "unprofiled_ms": Named("unprofiled.phases[phase]", "Not profiled.", _TIMES, ("doubt",)),
    "gpu_busy_ms": Named("phase.gpu_busy_ms", "The union of its GPU operations.", _ALL, _GPU),
    "gpu_span_ms": Named("phase.gpu_span_ms", "First start to last end.", _ALL, _GPU),
    "busy_share": Named("phase.busy_share.low..phase.busy_share.high", "GPU busy ÷ wall.", _ALL, _GPU),
    "kernel_sum_ms": Named("phase.kernel_time_ms", "Its kernels' sum.", unless=_KERNELS),
    "kernels": Named("phase.kernels_per_instance", "Kernels in one.", unless=_KERNELS),
    "instances": Named("phase.instances", "How many were measured.", _RANGES),
    "copies": Named("phase.memory[=memcpy].operations_per_instance", "Copies in one.", _COPIES, _GPU),
    "copy_ms": Named("phase.memory[=memcpy].ms_per_instance", "Their sum.", _COPIES, _GPU),
    "class_ms": Named(f"{_CLASS}.ms_per_instance", "Kernels of a class.", unless=_NAMES),
    "class_launches": Named(f"{_CLASS}.launches_per_instance", "How many.", unless=_NAMES),
    "class_share": Named(f"{_CLASS}.share", "Their share of kernel time.", unless=_NAMES),
    "top_kernel": Named("phase.kernels.0.name", "The kernel with most time.", unless=_KERNELS),
    "kernel_ms": Named("phase.kernels[kernel].ms_per_instance", "One kernel, by a part of its name.", unless=_KERNELS),
    "kernel_launches": Named("phase.kernels[kernel].launches_per_instance", "Its launches.", unless=_KERNELS),
    "softmax_ms": Named("attention.softmax_ms", "The softmax of attention.", unless=_KERNELS),
    "attention_matmul_ms": Named("attention.matmul_ms", "The matmuls of attention.", unless=_KERNELS),
    "module_ms": Named("modules.modules[module].ms", "A module with all inside, both ways.", unless=_KERNELS),
    "module_forward_ms": Named("modules.modules[module].forward.ms", "Forward alone.", unless=_KERNELS),
    "mfu": Named("limits.phases[phase].mfu", "The model's FLOPs ÷ time ÷ peak."),
    "model_flops": Named("limits.phases[phase].model_flops", "The model's FLOPs."),
    "peak_memory_bytes": Named("peak_memory_bytes", "The most device memory.", ("memory",), _GPU),
    "tokens_per_s": Named("unprofiled.tokens_per_second", "Tokens ÷ the unprofiled step.", _TIMES),
    "late_ms": Named("rank.lateness_ms", "A rank's own time less that of the fastest."),
    "collectives_ms": Named("rank.communication_ms", "Its collectives, hidden or not."),
    "waiting_ms": Named("rank.waiting_ms", "Of these, until the last rank starts."),
}  # fmt: skip
#: Why a figure is not told, and what would tell it, by what its path starts with.
_LACKS = {
    "phase": ("It has no such measured phase, or no such time of it. Its phases: ", RECORD_COMMAND),
    "step": ("Nothing tells its steps, or the time of one", RECORD_COMMAND),
    "unprofiled": ("It was not timed without the profiler, or what it counts is not known", RECORD_COMMAND),
    "findings": ("It has no such finding: ", "nsys-analyze explain CAPTURE"),
    "attention": ("Nothing tells it apart", "nsys-analyze ask CAPTURE QUESTION --phase-name softmax=RANGE"),
    "modules": ("No range names a module", f"nsys-analyze run --modules {PROGRAM_ARGUMENTS}"),
    "peak_memory_bytes": ("Memory was not recorded", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}"),
    "rank": ("The captures are not of several ranks of a run", f"nsys-analyze run --nproc 2 {PROGRAM_ARGUMENTS}"),
    "gpu": ("It names no GPU", RECORD_COMMAND),
}  # fmt: skip
#: What keeps figures from being told: whether it does, why, and what would help.
_OBSTACLES: Mapping[str, tuple[Callable[[Case], object], str, str]] = {
    "cpu": (lambda case: case.capture.on_cpu, "The program ran on the CPU", RECORD_ON_GPU_COMMAND),
    "graphs": (
        lambda case: case.phase and case.phase.opaque,
        "CUDA graphs hide their kernels in this capture",
        RECORD_GRAPH_NODES_COMMAND,
    ),
    "unnamed": (
        lambda case: case.phase and find_class_share(case.phase.classes, UNKNOWN) is None,
        "It holds kernels without a name",
        "nsys export --type sqlite REPORT",
    ),
    "untimed": (lambda case: not _timed(case), "The step was not timed without the profiler", RECORD_COMMAND),
    "timed": (lambda case: _timed(case), "It is measured", "nsys-analyze ask CAPTURE step_unprofiled_ms"),
    "doubt": (
        lambda case: case.capture.unprofiled and case.capture.unprofiled.doubts.get(case.words["phase"]),
        "Its times without the profiler cannot be right", RECORD_COMMAND,
    ),
}  # fmt: skip
_ZERO = SimpleNamespace(ms=0.0, ms_per_instance=0.0, launches_per_instance=0.0, operations_per_instance=0.0, share=0.0)


def unit_of(name: str) -> str:
    """Returns the unit of a figure."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "count")


def take(named: Named, case: Case) -> tuple[Value, str, str, int]:
    """Returns the figure of a case, what it is of in words, and the table and number of rows that it rests on.

    Raises:
        CannotAnswerError: the capture does not tell it.
        ConfigurationError: the question asks for something that there is not.
    """
    capture, root = case.capture, named.path.partition(".")[0].partition("[")[0]
    if capture.whole is None:
        why = plain(capture.message or capture.findings_missing or "Nothing of it could be read", "`")
        raise CannotAnswerError(why.removesuffix("."), RECORD_COMMAND)
    for is_so, why, needs in map(_OBSTACLES.__getitem__, named.unless):
        if is_so(case):
            raise CannotAnswerError(why, needs)
    values = [_at(path, case) for path in re.split(r"\.\.|/", named.path)]
    if None in (values[0], getattr(values[0], "typical", "")):
        why, needs = _LACKS.get(root) or _lacks_rate(capture, case.words["phase"])
        details = {
            "findings": plain(capture.findings_missing or ", ".join(one.id for one in capture.findings or ()), "`"),
            "phase": ", ".join(one.phase for one in capture.phases if one.instances),
        }
        raise CannotAnswerError(f"{why}{details.get(root, '')}", needs)
    phase, value = case.phase or capture.whole, values[0]
    of = _of("unprofiled" if "unprofiled" in named.path else root, case)  # a step without the profiler
    if named.path in ("step.busy_share", "step.said_ms") and capture.step and capture.step.unprofiled_ms:
        of = f"{_of('unprofiled', case)}{'' if _timed(case) else ', estimated'}"
    of = of.removeprefix("near the ") if "step.wall_ms" in named.path else of
    rows = {one.kind: one.operations_per_instance * phase.instances for one in phase.memory}
    rows |= {"kernel": phase.kernels_per_instance * phase.instances, "range": phase.instances}
    rows |= {"memory": capture.memory_events, "timing": 1}
    if named.path == "rank.lateness_ms" and not isinstance(value, Stats):
        of = "a step without the profiler, replayed"
    if isinstance(value, Stats):
        of = of if value.median is None else of.replace("mean of", "median of")
        rows["timing"], value = value.n or 1, value.typical
    elif len(values) > 1:
        value = value / values[1] if "/" in named.path else (value, values[1]) if value != values[1] else value
    if "[class]" in named.path and root == "phase":
        rows["kernel"] = _at(f"{_CLASS}.launches_per_instance", case) * phase.instances
    kinds = [kind for kind in named.kinds if rows.get(kind)] or named.kinds[:1]
    return value, of, _tables(kinds, capture), round(sum(rows.get(kind, 0) for kind in kinds))


def _lacks_rate(capture: CaptureSummary, phase: str) -> tuple[str, str]:
    """Returns why the rate of a phase is unknown, and the command with the missing options."""
    limits = capture.limits
    if limits is None:
        return "Nothing of it ran on a GPU", RECORD_ON_GPU_COMMAND
    rated = ", ".join(limit.phase for limit in limits.phases if limit.phase != phase and limit.mfu is not None)
    why = f"The FLOPs or the time of {phase} are not known. Those of these phases are known: {rated}" if rated else ""
    missing = limits.missing if "peaks" not in limits.missing else ()
    options = [f"{OPTIONS[name]} {'NAME' if name == 'model' else 'N'}" for name in missing if name in OPTIONS]
    needs = f"nsys-analyze ask CAPTURE QUESTION {' '.join(options)}" if options else ""
    return why or plain(explain_missing_mfu(limits), "`").removesuffix("."), needs


def _at(path: str, case: Case) -> Any:
    """What stands at a path, 0 where no row of a known class, cause or kind is there; None where it is not known."""
    thing: Any = case if path.startswith(("phase", "rank")) else case.capture
    for name, key in re.findall(r"(\w+)(?:\[=?(\w+)\])?", path):
        thing = next(iter(thing), None) if name == "0" else getattr(thing, name)
        if key and thing is not None:
            wanted = case.words.get(key, key)
            thing = thing.get(wanted) if isinstance(thing, dict) else _picked(thing, key, wanted)
        if thing is None:
            break
    return thing


def _picked(rows: Sequence[Any], key: str, wanted: str) -> Any:
    """The row that a word picks: of kernels by a part of the name, of modules by the end of the path, too."""
    known = {"class": known_classes(), "cause": CAUSES, "memcpy": ("memcpy",)}.get(key)
    if known and wanted not in known:
        raise ConfigurationError(f"There is no {key} {wanted!r}", f"There are: {', '.join(known)}")
    named = [(row, getattr(row, _IDENTITY.get(key, key))) for row in rows]
    found = [row for row, name in named if name == wanted]
    if not found and key == "kernel":
        found = [row for row, name in named if wanted in name]
    if not found and key == "module":
        found = [row for row, name in named if name.endswith(f".{wanted}")]
    if len(found) != 1 and key in ("kernel", "module"):
        raise ConfigurationError(f"{len(found)} {key}s here are called {wanted!r}", f"See: nsys-analyze {key}s CAPTURE")
    return found[0] if found else _ZERO if known else None


def _timed(case: Case) -> bool:
    known = case.capture.step.unprofiled_ms if case.capture.step else None
    return known is not None and known.timed


def _of(root: str, case: Case) -> str:
    """What a figure is of, by what its path starts with."""
    capture, phase, rank = case.capture, case.phase, case.rank
    if root == "phase" and phase and "phase" in case.words:
        return f"mean of {phase.instances} {plural(phase.instances, 'instance')} of {phase.label}"
    if root == "step" and capture.step:
        steps = f"{capture.step.wall_ms.n or 0} {plural(capture.step.wall_ms.n or 0, 'step')}"
        return f"near the median of {steps} under the profiler, {plain(capture.step.unit)}"
    if root == "rank" and rank:
        return f"mean of {len(rank.steps)} {plural(len(rank.steps), 'step')} of all ranks under the profiler"
    per = {"attention": capture.attention, "modules": capture.modules}.get(root)
    without = f"{case.words.get('phase', 'a step')} without the profiler"
    timed = f"mean of {without}" if "phase" in case.words else without
    said = {"findings": f"{without}, replayed", "unprofiled": timed, "limits": case.words.get("phase", "")}
    return f"mean of one {per.per}" if per else said.get(root, "the capture without warm-up")


def _tables(kinds: Sequence[str], capture: CaptureSummary) -> str:
    """The tables of these kinds of rows: ``CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY``."""
    if ".json" not in capture.source or tuple(kinds) == _TIMES:
        return ", ".join(_TABLES[kind][0] for kind in kinds).replace(", CUPTI_ACTIVITY_KIND", ", ")
    categories = ("cpu_op" if capture.on_cpu and kind == "kernel" else _TABLES[kind][1] for kind in kinds)
    return f"traceEvents: {', '.join(categories)}"
