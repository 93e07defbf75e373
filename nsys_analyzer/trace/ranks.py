"""The rank of each process in its run, as far as the export tells it.

It is in a table of ours, in the variables by which launchers tell a process its rank, or in what NCCL notes beside its
ranges when a communicator is made. Nothing follows from the order of devices.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import rows_of
from nsys_analyzer.trace.columns import PROCESS_MASK
from nsys_analyzer.trace.nccl import INIT_COMMUNICATOR, RANK, RANKS, NotedCall
from nsys_analyzer.trace.reader import Reader

#: The variables of each launcher: rank, and how many ranks there are. A local rank is another thing.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_NAMES = tuple(name for pair in _VARIABLES for name in pair)
_SETTINGS = tuple(f"{name}=" for name in _NAMES)
_VARIABLE = re.compile(rf'(?:^|\0)({"|".join(_NAMES)})="?([0-9]{{1,9}})"?(?=\0|$)')


@dataclass(frozen=True)
class Rank:
    """A process's rank among all of its run, and how many there are, 0 where that is not known."""

    number: int
    world_size: int = 0


def read_ranks(reader: Reader, strings: Iterable[str], noted: Sequence[NotedCall]) -> dict[int, Rank]:
    """The ranks that an export tells, by global process ID; by 0 what it tells of the process that was launched.

    Args:
        reader: the export.
        strings: the values of its ``StringIds``.
        noted: the calls of NCCL's functions.

    Raises:
        TraceError: the file is damaged.
    """
    if reader.name_of(schema.RANKS):
        return {process: Rank(rank, size) for process, rank, size in rows_of(reader.read(schema.RANKS))}
    launched = _launched(reader, strings)
    return _of_communicators(noted) | ({0: launched} if launched else {})


def _launched(reader: Reader, strings: Iterable[str]) -> Rank | None:
    """The rank in the environment that nsys kept of the program it launched; None where two say different ones.

    Blocks of variables are those of other processes, too: they count where the capture's properties say nothing.
    """
    variables = (value for _, value in rows_of(reader.read(schema.VARIABLES)) if value.startswith(_SETTINGS))
    blocks = (text for text in strings if "\0" in text and ("RANK=" in text or "SLURM_PROCID=" in text))
    return _rank_in(variables) or _rank_in(blocks)


def _rank_in(texts: Iterable[str]) -> Rank | None:
    found: dict[str, set[int]] = defaultdict(set)
    for name, value in _VARIABLE.findall("\0".join(texts)):
        found[name].add(int(value))
    known = (Rank(min(found[rank]), min(found[size], default=0)) for rank, size in _VARIABLES if len(found[rank]) == 1)
    return next(known, None)


def _of_communicators(noted: Sequence[NotedCall]) -> dict[int, Rank]:
    """The rank of each process in the largest communicator that it made."""
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for call in noted:
        if call.name.startswith(INIT_COMMUNICATOR) and RANK in call.numbers and RANKS in call.numbers:
            found[call.thread & PROCESS_MASK].add((call.numbers[RANKS], call.numbers[RANK]))
    largest = {process: max(size for size, _ in pairs) for process, pairs in found.items()}
    ranks = {process: {rank for size, rank in found[process] if size == largest[process]} for process in found}
    return {process: Rank(min(numbers), largest[process]) for process, numbers in ranks.items() if len(numbers) == 1}


def distinct_ranks(ranks: Mapping[int, Rank], processes: Iterable[int]) -> dict[int, Rank]:
    """The ranks of some processes of one capture; a number that two of them have is the rank of neither.

    What is told of the launched process is told of the only one.
    """
    processes = list(processes)
    known = {process: ranks[process] for process in processes if process in ranks}
    if len(processes) == 1 and 0 in ranks:
        return {processes[0]: ranks[0]}
    times = Counter(rank.number for rank in known.values())
    return {process: rank for process, rank in known.items() if times[rank.number] == 1}
