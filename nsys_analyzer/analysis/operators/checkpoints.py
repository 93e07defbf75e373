"""Changes the order of a step's calls: modules are checkpointed, and the batch is divided into micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.operators.tensor_memory import Access, TensorMemory

#: The repetitions of a second micro-batch are numbered from here. A step has fewer checkpointed modules.
_SECOND_MICRO_BATCH = 10**6


@dataclass(frozen=True)
class CheckpointedModule:
    """One call of a module whose forward pass a backward pass repeats, so that less memory is saved for backward.

    Attributes:
        path: the path of the module without the class of the model: ``h.0``.
        forward: the calls of operators in the module's forward pass.
        needed: how many of them PyTorch repeats: it stops at the last value that the backward pass reads.
        backward: the module's calls in the backward pass that read values of the forward pass.
        saved_tensors: the number of tensors that these calls read and that existed before the backward pass.
    """

    path: str
    forward: tuple[int, ...]
    needed: int
    backward: tuple[int, ...]
    saved_tensors: int


def find_modules(memory: TensorMemory, patterns: Sequence[str]) -> list[CheckpointedModule]:
    """Returns the outermost modules whose paths match one of the patterns, and whose values a backward pass reads.

    In a pattern, ``*`` stands for one name. The names before the pattern may be left out: ``h.*`` is also
    ``transformer.h.*``.
    """
    calls = memory.calls
    names = [re.escape(pattern).replace(r"\*", r"[^.]+") for pattern in patterns]
    matcher = re.compile(rf"(?:[^.]+\.)*?(?:{'|'.join(names)})(?=\.|$)")
    paths = [module.partition(": ")[0].partition("/")[2] for module in calls.modules]
    path_of_module = [match[0] if (match := matcher.match(path)) else "" for path in paths]
    path_of_call = [path_of_module[module] if module >= 0 else "" for module in calls.module.tolist()]
    forward, backward = calls.in_phase("forward"), calls.in_phase("backward")
    groups: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero(forward).tolist():
        if path_of_call[index]:
            groups.setdefault((path_of_call[index], int(calls.instance[index])), []).append(index)
    of_backward = {storage for index in np.flatnonzero(backward).tolist() for storage in memory.writes[index]}
    backward_of: dict[str, list[int]] = {}
    for index in np.flatnonzero(backward).tolist():
        backward_of.setdefault(path_of_call[index], []).append(index)
    modules = []
    for (path, _), indices in groups.items():
        written = {storage for index in indices for storage in memory.writes[index]} & memory.size_bytes.keys()
        readers = [index for index in backward_of.get(path, ()) if not written.isdisjoint(memory.reads[index])]
        read_storages = {storage for index in readers for storage in memory.reads[index]}
        saved = read_storages & written
        needed = [number for number, index in enumerate(indices, 1) if not saved.isdisjoint(memory.writes[index])]
        if needed:
            modules.append(
                CheckpointedModule(path, tuple(indices), needed[-1], tuple(readers), len(read_storages - of_backward))
            )
    return modules


def order_accesses(
    memory: TensorMemory, modules: Sequence[CheckpointedModule], micro_batches: int = 1
) -> Iterator[Access]:
    """Yields the memory of each call of a changed step, in the order of the calls.

    Before the first call of a checkpointed module in the backward pass, the module's forward pass is repeated. Two of
    several micro-batches are enough to find the peak: the gradients of the first micro-batch are kept during the
    second.
    """
    repetition_of: dict[int, tuple[int, set[int]]] = {}
    repeated_before: dict[int, tuple[CheckpointedModule, int, set[int]]] = {}
    for number, module in enumerate(modules, 1):
        repeated_storages = {storage for index in module.forward[: module.needed] for storage in memory.writes[index]}
        repeated_storages &= memory.size_bytes.keys()
        repeated_before[module.backward[0]] = module, number, repeated_storages
        repetition_of.update((index, (number, repeated_storages)) for index in module.backward)
    is_optimizer = memory.calls.in_phase("optimizer")
    first_of_optimizer = int(is_optimizer.argmax()) if is_optimizer.any() else len(is_optimizer)
    one_pass = list[Access]()
    for index in range(first_of_optimizer):
        if index in repeated_before:
            module, number, repeated_storages = repeated_before[index]
            one_pass += [memory.repeat(call, number, repeated_storages) for call in module.forward[: module.needed]]
        one_pass.append(memory.repeat(index, *repetition_of.get(index, ())))
    yield from one_pass
    for access in one_pass if micro_batches > 1 else ():
        reads, writes = (
            [(storage, _SECOND_MICRO_BATCH + number) for storage, number in keys]
            for keys in (access.reads, access.writes)
        )
        yield Access(reads, writes, access.call)
    yield from (memory.repeat(index) for index in range(first_of_optimizer, len(is_optimizer)))
