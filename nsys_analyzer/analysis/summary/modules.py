"""Sums up the time and the counted FLOPs of each module of a model, and folds similar modules, such as layers."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover, Timeline
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.calls import (
    CallFinder,
    ModuleCalls,
    ModulePath,
    find_module_calls,
    split_module_path,
)
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.arrays import Bools, Floats, Ints, distinct
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.operator_calls import OperatorCalls, Tensor
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.trace import Trace

#: The directions in which a module works. ``FORWARD`` and ``BACKWARD`` are their codes.
DIRECTIONS = ("forward", "backward")
FORWARD, BACKWARD = range(2)
#: The phases whose counted FLOPs belong to backward. "recomputed" is a forward pass that a backward pass repeats.
_BACKWARD_PHASES = ("backward", "recomputed")
#: Matches the number that distinguishes layers, in names such as ``layers.0``, ``block 0`` and ``Linear[0]``.
_LAYER_NUMBER = re.compile(r"(?:(?<![^.])|(?<=[\s_\-\[a-z]))\d+(?=\]?$)")
#: Matches the path of an expert, the path of its layer first.
EXPERT_PATH = re.compile(r"(.*\bexperts)\.\d+")
#: The position of the operand whose rows are tokens among the inputs of each matmul.
_POSITION_OF_ROWS = {"mm": 0, "bmm": 0, "linear": 0, "addmm": 1}
#: A layer is an outlier if its time differs from the median by more than this share of the median.
_OUTLIER_SHARE = 0.2
#: The minimum number of similar layers for which outliers are reported. Of two layers, either may be the usual one.
_MIN_LAYERS_FOR_OUTLIERS = 3


@dataclass(frozen=True)
class Work:
    """The kernels in one direction: their time in ms, launches and FLOPs (None if unknown), as means per step."""

    ms: float
    launches: float
    flops: float | None = None


@dataclass(frozen=True)
class Module:
    """One module, or several similar modules that were folded into one.

    Attributes:
        path: the names of the enclosing modules and of the module, joined by dots. The model's class comes first.
        label: the part of the path after the path of the enclosing module.
        kind: the module's class, empty if it is not known.
        depth: the number of enclosing modules.
        count: the number of folded modules, whose work is added up.
        forward, backward: the work in each direction, including all modules inside.
        own_forward_ms, own_backward_ms: the kernel time outside of the modules inside.
        line: the file and line of ``forward`` of the module's class; empty if it is not known.
        exposed_communication_ms: the time in which only collectives that the module launches run on their GPU, in
            forward and backward. It is None if the module launches no collective in forward: the collectives of
            backward then reduce gradients of many modules.
        tokens: the tokens that an expert of a mixture of experts computes per step; None if this is not known, and for
            modules that are no expert.
    """

    path: str
    label: str
    kind: str
    depth: int
    forward: Work
    backward: Work
    own_forward_ms: float
    own_backward_ms: float
    count: int = 1
    line: str = ""
    exposed_communication_ms: float | None = None
    tokens: int | None = None

    @property
    def ms(self) -> float:
        """Returns the kernel time of the module in forward and backward, ms."""
        return self.forward.ms + self.backward.ms

    def is_shallower_than(self, other: Module) -> bool:
        """Returns whether another module lies deeper in the tree of modules."""
        return other.depth > self.depth


@dataclass(frozen=True)
class Modules:
    """The modules of one process of a capture.

    Attributes:
        source: what wrote the ranges of modules, such as "the program's own ranges".
        per: the unit that the figures are a mean over: "step", "forward", or "capture".
        modules: the modules in depth-first order, siblings in the order of their first calls.
        outside_forward, outside_backward: the kernels outside all modules.
        communication_forward, communication_backward: the collectives. Collectives belong to no module, because a
            bucket of gradients belongs to many modules.
        forward_ms, backward_ms: the kernel time of all passes. Forward includes everything that is neither backward nor
            an optimizer.
        forward_coverage, backward_coverage: the share of the kernel time without collectives that belongs to a
            module; None if there is no such time.
    """

    source: str
    per: str
    modules: tuple[Module, ...]
    outside_forward: Work
    outside_backward: Work
    communication_forward: Work
    communication_backward: Work
    forward_ms: float = field(init=False)
    backward_ms: float = field(init=False)
    forward_coverage: float | None = field(init=False)
    backward_coverage: float | None = field(init=False)

    def __post_init__(self) -> None:
        """Computes the sums over forward and backward."""
        for name in DIRECTIONS:
            outside_ms, communication_ms = (
                getattr(self, f"outside_{name}").ms,
                getattr(self, f"communication_{name}").ms,
            )
            inside_ms = sum(getattr(module, name).ms for module in self.modules if not module.depth)
            ms = inside_ms + outside_ms + communication_ms
            computing_ms = ms - communication_ms
            vars(self)[f"{name}_ms"] = ms
            vars(self)[f"{name}_coverage"] = 1 - outside_ms / computing_ms if computing_ms else None


# --- the time of each module


def summarize_modules(attributed: AttributedTrace, process: int, *, by_ranges: bool = True) -> Modules | None:
    """Sums up the time of each module of one process, as a mean per step; returns None if no range names a module.

    Kernels in backward phases count as backward, and kernels in other measured phases as forward. Kernels of an
    optimizer are left out.

    Args:
        attributed: the trace with the phase of each operation.
        process: the global ID of the process.
        by_ranges: whether ranges mark each step. If not, the figures are means per forward pass.
    """
    calls = find_module_calls(attributed)
    if calls is None:
        return None
    trace = attributed.trace
    scope, units, is_counted = _find_units(attributed, process, by_ranges=by_ranges)
    is_backward = attributed.instances.phase == attributed.instances.phases.index("backward")
    # The direction of each phase instance; the last entry is for operations without an instance.
    direction_of_instance = np.append(np.where(is_counted, np.where(is_backward, BACKWARD, FORWARD), NONE), NONE)
    leaf, step = attributed.instances_of_operations
    direction_of_operation = direction_of_instance[np.where(leaf == NONE, step, leaf)]
    kernels = np.flatnonzero((trace.operations.kind == KERNEL) & (direction_of_operation != NONE))
    call = CallFinder(attributed, calls).find_calls(kernels)
    if not (call != NONE).any():
        return None
    direction, duration = direction_of_operation[kernels], (trace.operations.end - trace.operations.start)[kernels]
    # The codes of the modules are followed by one code for kernels outside all modules, and one code for collectives.
    code_outside_modules, code_of_collectives = len(calls.paths), len(calls.paths) + 1
    module = np.append(calls.path, code_outside_modules)[call]
    classes = np.array(attributed.kernels.classes, np.str_)[attributed.kernels.code[kernels]]
    is_collective = classes == COMMUNICATION
    exposed_ns = np.zeros((len(calls.paths) + 2, len(DIRECTIONS)))
    np.add.at(
        exposed_ns, (module[is_collective], direction[is_collective]), _measure_exposed(trace, kernels[is_collective])
    )
    module[is_collective] = code_of_collectives
    launches = 1 - trace.operations.continues[kernels].astype(np.int64)
    key, size = module * len(DIRECTIONS) + direction, (len(calls.paths) + 2) * len(DIRECTIONS)
    # Sums of floats are exact below 2**53 ns.
    columns = (np.bincount(key, values, size) for values in (duration, launches))
    duration_ns, launches = (column.astype(np.int64).reshape(-1, len(DIRECTIONS)) for column in columns)
    tree = _ModuleTree(calls, trace.ranges.start[calls.range], duration_ns, launches, units, exposed_ns)
    modules = tuple(tree.modules())
    if not modules:  # only collectives were launched
        return None
    return Modules(
        source=calls.source,
        per=scope,
        modules=modules,
        outside_forward=tree.sum_work([code_outside_modules], FORWARD),
        outside_backward=tree.sum_work([code_outside_modules], BACKWARD),
        communication_forward=tree.sum_work([code_of_collectives], FORWARD),
        communication_backward=tree.sum_work([code_of_collectives], BACKWARD),
    )


def _measure_exposed(trace: Trace, collectives: Ints) -> Ints:
    """Returns for each collective the part of its duration in which its GPU runs only collectives, ns."""
    operations, exposed_ns = trace.operations, np.zeros(len(collectives), np.int64)
    for device in np.unique(operations.device[collectives]).tolist():
        others = np.setdiff1d(np.flatnonzero(operations.device == device), collectives)
        others = others[np.argsort(operations.start[others], kind="stable")]
        on_device = np.flatnonzero(operations.device[collectives] == device)
        begin, end = (times[collectives[on_device]] for times in (operations.start, operations.end))
        covered_ns = Cover.from_intervals(operations.start[others], operations.end[others]).covered_within(begin, end)
        exposed_ns[on_device] = end - begin - covered_ns
    return exposed_ns


def _find_units(attributed: AttributedTrace, process: int, *, by_ranges: bool) -> tuple[str, int, Bools]:
    """Finds the unit of the means: measured steps, or forward passes if there are no such steps.

    Returns:
        The unit, the number of units, and a mask of the instances whose kernels are included, shape (instances,). A
        step is included as a whole if it has no phases, as in an inference engine.
    """
    instances = attributed.instances
    is_unit = {name: instances.phase == instances.phases.index(name) for name in (STEP, "forward")}
    is_measured = instances.is_measured & (instances.process == process)
    is_counted = is_measured.copy()
    for name in ("optimizer", STEP, OTHER_STEP):
        is_counted &= instances.phase != instances.phases.index(name)
    steps = np.flatnonzero(is_measured & is_unit[STEP])
    timeline = Timeline(instances.process[steps], instances.start[steps], instances.end[steps], innermost=True)
    step = timeline.open_at(instances.process, instances.start)
    in_step = is_counted & (step != NONE)
    if len(steps) and by_ranges:
        in_step[np.delete(steps, distinct(step[in_step]))] = True
        return STEP, len(steps), in_step
    forwards = int((is_measured & is_unit["forward"]).sum())
    return ("forward", forwards, is_counted) if forwards else ("capture", 1, is_counted)


class _ModuleTree:
    """The called modules as a tree. The parent of a module has the longest path with which the module's path begins."""

    def __init__(
        self, calls: ModuleCalls, call_times: Ints, duration_ns: Ints, launches: Ints, units: int, exposed_ns: Floats
    ) -> None:
        """Builds the tree.

        Args:
            calls: the calls of modules.
            call_times: the time of each call.
            duration_ns, launches: the sums over all units by module and direction, shape (modules + 2, directions).
            units: the number of units that figures are a mean over.
            exposed_ns: the exposed time of the collectives that each module launches, of the same shape.
        """
        self._exposed_ns = exposed_ns
        self._duration_ns, self._launches, self._calls, self._units = duration_ns, launches, calls, units
        first_call = np.full(len(calls.paths), np.iinfo(np.int64).max)
        np.minimum.at(first_call, calls.path, call_times)
        self._children: dict[ModulePath, list[int]] = {}
        paths = set(calls.paths)
        for module in np.argsort(first_call, kind="stable").tolist():
            path = calls.paths[module]
            prefixes = (path[:length] for length in range(len(path) - 1, 0, -1))
            parent = next((prefix for prefix in prefixes if prefix in paths), ())  # empty for the outermost modules
            self._children.setdefault(parent, []).append(module)

    def modules(self, parent: ModulePath = (), depth: int = 0) -> Iterator[Module]:
        """Yields the modules below ``parent`` that launch a kernel, depth first."""
        for module in self._children.get(parent, ()):
            path, subtree = self._calls.paths[module], self._find_subtree(module)
            if self._launches[subtree].any():
                own_ms, exposed_ns = self._duration_ns[module] / self._units / NS_PER_MS, self._exposed_ns[subtree]
                yield Module(
                    path=".".join(path),
                    label=".".join(path[len(parent) :]),
                    kind=self._calls.kinds[module],
                    depth=depth,
                    forward=self.sum_work(subtree, FORWARD),
                    backward=self.sum_work(subtree, BACKWARD),
                    own_forward_ms=float(own_ms[FORWARD]),
                    own_backward_ms=float(own_ms[BACKWARD]),
                    exposed_communication_ms=float(exposed_ns.sum()) / self._units / NS_PER_MS
                    if exposed_ns[:, FORWARD].any()
                    else None,
                )
                yield from self.modules(path, depth + 1)

    def sum_work(self, modules: Sequence[int], direction: int) -> Work:
        """Returns the work of modules in one direction, as a mean per unit."""
        duration_ns, launches = (
            int(sums[modules, direction].sum()) / self._units for sums in (self._duration_ns, self._launches)
        )
        return Work(duration_ns / NS_PER_MS, launches)

    def _find_subtree(self, module: int) -> Sequence[int]:
        """Returns the indices of a module and of all modules inside it."""
        children = self._children.get(self._calls.paths[module], ())
        return [module, *(inner_module for child in children for inner_module in self._find_subtree(child))]


# --- the FLOPs of each module


def with_flops(modules: Modules, counted_flops: CountedFlops) -> Modules:
    """Returns the modules with the FLOPs that were counted in one step, including the FLOPs of the modules inside.

    Modules whose figures are not per step are returned unchanged.
    """
    if modules.per != "step":
        return modules
    flops: dict[str, dict[str, float]] = {direction: defaultdict(float) for direction in DIRECTIONS}
    for name, flops_by_phase in counted_flops.modules.items():
        path_words = split_module_path(name.rpartition(": ")[0])
        for phase, flops_of_phase in flops_by_phase.items():
            flops_of_direction = flops["backward" if phase in _BACKWARD_PHASES else "forward"]
            for length in range(1, len(path_words) + 1):
                flops_of_direction[".".join(path_words[:length])] += flops_of_phase

    def add_counted_flops(module: Module) -> Module:
        """Returns the module with the FLOPs that the run counted."""
        forward, backward = (flops_of_direction.get(module.path) for flops_of_direction in flops.values())
        return replace(
            module,
            forward=module.forward if forward is None else replace(module.forward, flops=forward),
            backward=module.backward if backward is None else replace(module.backward, flops=backward),
        )

    return replace(modules, modules=tuple(map(add_counted_flops, modules.modules)))


# --- the tokens of each expert


def with_tokens(modules: Modules, calls: OperatorCalls) -> Modules:
    """Returns the modules with the tokens of each expert: the rows of its matmuls, from the shapes of the operators."""
    rows: dict[str, Counter[int]] = defaultdict(Counter)  # the rows of the matmuls of each module, by expert
    for signature_code, module, phase in zip(
        *(c.tolist() for c in (calls.signature, calls.module, calls.phase)), strict=True
    ):
        signature = calls.signatures[signature_code]
        position = _POSITION_OF_ROWS.get(signature.name.removeprefix("aten::"))
        if position is None or min(module, phase) < 0 or calls.phases[phase] != "forward":
            continue
        path = ".".join(split_module_path(calls.modules[module].rpartition(": ")[0]))
        operand = signature.inputs[position] if len(signature.inputs) > position else None
        if (match := EXPERT_PATH.match(path)) and isinstance(operand, Tensor):
            rows[match[0]][module] += math.prod(operand.shape[:-1])
    # All matmuls of an expert have equally many rows, so the module with the most rows has the rows of all passes.
    tokens = {path: max(rows_of_modules.values()) for path, rows_of_modules in rows.items()}
    return replace(
        modules, modules=tuple(replace(module, tokens=tokens.get(module.path)) for module in modules.modules)
    )


# --- similar modules as one


@dataclass(frozen=True)
class Outlier:
    """A layer whose time differs from similar layers: its path, its time in ms, and the median time of these layers."""

    path: str
    ms: float
    median_ms: float


class _ModuleKind(NamedTuple):
    """The properties in which modules must agree to be folded into one.

    Attributes:
        parent: the class of the enclosing module.
        label: the label of the modules without its number.
        kind: the class of the modules.
        inside: the relative paths and the classes of the modules inside.
    """

    parent: _ModuleKind | None
    label: str
    kind: str
    inside: tuple[tuple[str, str], ...]


def fold_modules(modules: Sequence[Module]) -> tuple[tuple[Module, ...], tuple[Outlier, ...]]:
    """Folds sibling modules into one if they differ only in a number of their label, and contain equal modules.

    Modules of a known class that contain no modules are not folded, because nothing shows that they are similar.

    Returns:
        The modules after folding, and the outliers among the folded modules.
    """
    modules_by_kind: dict[_ModuleKind, list[Module]] = {}
    enclosing_kinds: list[_ModuleKind] = []
    for place, module in enumerate(modules):
        modules_inside = takewhile(module.is_shallower_than, modules[place + 1 :])
        inner_paths_and_kinds = tuple((inner.path[len(module.path) :], inner.kind) for inner in modules_inside)
        label = _LAYER_NUMBER.sub("*", module.label) if inner_paths_and_kinds or not module.kind else module.label
        del enclosing_kinds[module.depth :]
        enclosing_kinds.append(
            _ModuleKind(enclosing_kinds[-1] if enclosing_kinds else None, label, module.kind, inner_paths_and_kinds)
        )
        modules_by_kind.setdefault(enclosing_kinds[-1], []).append(module)
    module_of_kind: dict[_ModuleKind | None, Module] = {}
    outliers: list[Outlier] = []
    for kind, similar_modules in modules_by_kind.items():
        parent, is_several = module_of_kind.get(kind.parent), len({module.label for module in similar_modules}) > 1
        label = kind.label if is_several else similar_modules[0].label
        module_of_kind[kind] = replace(
            similar_modules[0],
            path=f"{parent.path}.{label}" if parent else label,
            label=label,
            forward=_add_work([module.forward for module in similar_modules]),
            backward=_add_work([module.backward for module in similar_modules]),
            own_forward_ms=sum(module.own_forward_ms for module in similar_modules),
            own_backward_ms=sum(module.own_backward_ms for module in similar_modules),
            exposed_communication_ms=sum(exposed_ms)
            if (exposed_ms := [ms for m in similar_modules if (ms := m.exposed_communication_ms) is not None])
            else None,
            tokens=sum(m.tokens or 0 for m in similar_modules) or None,
            count=len(similar_modules),
        )
        if is_several and len(similar_modules) >= _MIN_LAYERS_FOR_OUTLIERS:
            median_ms = statistics.median(module.ms for module in similar_modules)
            outliers += [
                Outlier(module.path, module.ms, median_ms)
                for module in similar_modules
                if abs(module.ms - median_ms) > _OUTLIER_SHARE * median_ms
            ]
    return tuple(module_of_kind.values()), tuple(outliers)


def _add_work(works: Sequence[Work]) -> Work:
    """Returns the sum of the given work. The FLOPs of the sum are known only if all FLOPs are known."""
    flops = [work.flops for work in works if work.flops is not None]
    total_flops = sum(flops) if len(flops) == len(works) else None
    return Work(sum(work.ms for work in works), sum(work.launches for work in works), total_flops)
