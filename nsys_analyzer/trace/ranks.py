"""What an export tells of the run of several ranks: the rank of each process, and the calls of NCCL's functions."""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Ints, SmallInts, iterate_rows
from nsys_analyzer.trace.columns import PROCESS_MASK, Columns
from nsys_analyzer.trace.reader import Reader

INIT_COMMUNICATOR = "ncclCommInit"
"""The start of the names of NCCL functions that make a communicator, and note the rank in it beside their range."""
UNKNOWN_NUMBER = -1
_MOST = 2**63 - 1  # IDs have 64 bits, the columns' integers a sign

#: The fields of payloads, in small letters.
RANK, RANKS, COMMUNICATOR, BYTES, PEER = (
    "rank", "no. of ranks", "nccl communicator id", "message size [bytes]", "peer rank",
)  # fmt: skip
_PEERS = (PEER, "peer")
_SIZES = (BYTES, "bytes")  # of a broadcast and an exchange in older versions of NCCL
#: The functions that send messages, not those that make communicators, group calls or ask for something.
_SENDS = re.compile(
    "nccl(?:AllReduce|AllGather|All[Tt]o[Aa]ll|ReduceScatter|Reduce|Broadcast|Bcast|Send|Recv|Gather|Scatter)"
)
_WHOLE = re.compile(r"[0-9]{1,20}")
#: What nsys writes before a binary payload: domain, schema, size and offset, 8 bytes each.
_HEADER = struct.Struct("<QQQQ")
#: NVTX's numbers of the types of fields: int, int32_t, uint64_t and size_t.
_TYPES = {5: struct.Struct("<i"), 15: struct.Struct("<i"), 18: struct.Struct("<Q"), 22: struct.Struct("<Q")}


@dataclass(frozen=True)
class NcclCalls(Columns):
    """Calls of NCCL's functions, in order of start.

    Attributes:
        start: ns.
        thread: global thread ID.
        communicator: its ID (63 bits of it), one for all of its ranks; 0 where it is not known.
        bytes: the message as NCCL counts it, of one rank; -1 where it is not known.
        peer: of a send or a receive, the other's rank in the communicator; -1 where it is not known.
        ranks: how many the communicator is of; 0 where that is not known, as where it was made before the capture.
        name: code into ``names``.
    """

    start: Ints
    thread: Ints
    communicator: Ints
    bytes: Ints
    peer: Ints
    ranks: Ints
    name: SmallInts
    names: tuple[str, ...]

    @staticmethod
    def none() -> NcclCalls:
        """Returns no calls."""
        empty = np.zeros(0, np.int64)
        return NcclCalls(empty, empty, empty, empty, empty, empty, empty.astype(np.int32), ())


class NcclRange(NamedTuple):
    """A call with the numbers that NCCL notes of it, by their names in small letters."""

    start: int
    thread: int
    name: str
    numbers: dict[str, int]


def read_nccl_calls(reader: Reader, noted: Sequence[NcclRange]) -> NcclCalls:
    """Returns the calls of NCCL's functions that send messages. Raises TraceError for a damaged file."""
    rows = sorted(iterate_rows(reader.read(schema.NCCL_CALLS)) if reader.name_of(schema.NCCL_CALLS) else _sent(noted))
    if not rows:
        return NcclCalls.none()
    start, thread, functions, *numbers = zip(*rows, strict=True)
    names = tuple(dict.fromkeys(functions))
    code = {name: i for i, name in enumerate(names)}
    communicator, size, peer, ranks = (np.array(column, np.int64) for column in numbers)
    return NcclCalls(
        start=np.array(start, np.int64),
        thread=np.array(thread, np.int64),
        communicator=communicator,
        bytes=size,
        peer=peer,
        ranks=ranks,
        name=np.array([code[name] for name in functions], np.int32),
        names=names,
    )


def _sent(noted: Sequence[NcclRange]) -> Iterator[tuple[Any, ...]]:
    """Yields start, thread, function and numbers of the calls that send messages, by what is noted of each."""

    def number(call: NcclRange, default: int, *fields: str) -> int:
        value = next((call.numbers[field] for field in fields if field in call.numbers), default)
        return value & _MOST if value > 0 else value

    made = (call for call in noted if call.name.startswith(INIT_COMMUNICATOR))
    ranks = {number(call, 0, COMMUNICATOR): number(call, 0, RANKS) for call in made}
    for call in noted:
        if sends := _SENDS.match(call.name):
            communicator = number(call, 0, COMMUNICATOR)
            sizes = number(call, UNKNOWN_NUMBER, *_SIZES), number(call, UNKNOWN_NUMBER, *_PEERS)
            yield call.start, call.thread, sends[0], communicator, *sizes, ranks.get(communicator, 0)


def read_nccl_ranges(reader: Reader, strings: Mapping[int, str]) -> list[NcclRange]:
    """Returns the ranges of NCCL's functions, with what stands beside them; ``strings`` are the export's by ID.

    Raises:
        TraceError: the file is damaged.
    """
    events = reader.name_of(schema.NVTX)
    named = any(text.startswith("nccl") for text in strings.values())
    if not events or not named or "textId" not in reader.columns_of[events]:
        return []
    rows = list(iterate_rows(reader.read(schema.PAYLOADS)))
    fields = _fields(reader) if any(binary for *_, binary in rows) else {}
    return [
        NcclRange(start, thread, strings.get(name, ""), {
            **_numbers(json), **_numbers(strings.get(json_id, "")), **_decoded(binary, fields),
        })
        for start, name, thread, json, json_id, binary in rows
    ]  # fmt: skip


def _numbers(text: str) -> dict[str, int]:
    """Returns the whole numbers of a payload as JSON."""
    try:
        payload = decode_json(text.encode())
    except ValueError:
        return {}  # of a program that names its own ranges as NCCL does
    pairs = payload.items() if isinstance(payload, dict) else ()
    return {name.lower(): int(value) for name, value in pairs if _WHOLE.fullmatch(str(value))}


_Fields = dict[int, dict[str, tuple[struct.Struct, int]]]


def _fields(reader: Reader) -> _Fields:
    """Returns where the numbers of each payload schema are: schema ID to names to type and offset in bytes."""
    fields: _Fields = defaultdict(dict)
    for schema_id, kind, name, offset in iterate_rows(reader.read(schema.PAYLOAD_FIELDS)):
        if kind in _TYPES:
            fields[schema_id][name.lower()] = _TYPES[kind], offset
    return fields


def _decoded(blob: bytes, fields: _Fields) -> dict[str, int]:
    """Returns the numbers of a binary payload."""
    if len(blob) < _HEADER.size:
        return {}
    schema_id = _HEADER.unpack_from(blob)[1] & 0xFFFFFFFF
    payload = blob[_HEADER.size :]
    return {
        name: kind.unpack_from(payload, offset)[0]
        for name, (kind, offset) in fields.get(schema_id, {}).items()
        if 0 <= offset <= len(payload) - kind.size
    }


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


def read_ranks(reader: Reader, strings: Iterable[str], noted: Sequence[NcclRange]) -> dict[int, Rank]:
    """Returns the ranks that an export tells, by global process ID; by 0 that of the process that was launched.

    Args:
        reader: the export.
        strings: the values of its ``StringIds``.
        noted: the calls of NCCL's functions.

    Raises:
        TraceError: the file is damaged.
    """
    if reader.name_of(schema.RANKS):
        return {process: Rank(rank, size) for process, rank, size in iterate_rows(reader.read(schema.RANKS))}
    launched = _launched(reader, strings)
    return _of_communicators(noted) | ({0: launched} if launched else {})


def _launched(reader: Reader, strings: Iterable[str]) -> Rank | None:
    """Returns the rank in the environment that nsys kept of the program it launched; None where two are different.

    Blocks of variables may come from other processes: they count only if the capture's properties say nothing. Slurm
    also calls a shell, or a program that runs alone, task 0: such a program is a rank only if it uses NCCL.
    """
    variables = (value for _, value in iterate_rows(reader.read(schema.VARIABLES)) if value.startswith(_SETTINGS))
    blocks = (text for text in strings if "\0" in text and ("RANK=" in text or "SLURM_PROCID=" in text))
    uses_nccl = any("nccl" in text for text in strings)
    return _rank_in(variables, uses_nccl=uses_nccl) or _rank_in(blocks, uses_nccl=uses_nccl)


def _rank_in(texts: Iterable[str], *, uses_nccl: bool) -> Rank | None:
    values: dict[str, set[int]] = defaultdict(set)
    for name, value in _VARIABLE.findall("\0".join(texts)):
        values[name].add(int(value))
    if not uses_nccl and values["SLURM_PROCID"] == {0}:
        values.pop("SLURM_PROCID")
    for rank, size in _VARIABLES:
        if len(values[rank]) == 1:
            return Rank(min(values[rank]), min(values[size], default=0))
    return None


def _of_communicators(noted: Sequence[NcclRange]) -> dict[int, Rank]:
    """Returns the rank of each process in the largest communicator that it made."""
    pairs_of: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for call in noted:
        if call.name.startswith(INIT_COMMUNICATOR) and RANK in call.numbers and RANKS in call.numbers:
            pairs_of[call.thread & PROCESS_MASK].add((call.numbers[RANKS], call.numbers[RANK]))
    largest = {process: max(size for size, _ in pairs) for process, pairs in pairs_of.items()}
    ranks = {process: {rank for size, rank in pairs_of[process] if size == largest[process]} for process in pairs_of}
    return {process: Rank(min(numbers), largest[process]) for process, numbers in ranks.items() if len(numbers) == 1}


def distinct_ranks(ranks: Mapping[int, Rank], processes: Iterable[int]) -> dict[int, Rank]:
    """Returns the ranks of some processes of one capture; a number that two of them have is the rank of neither.

    What is told of the launched process is told of the only one.
    """
    processes = list(processes)
    told = {process: ranks[process] for process in processes if process in ranks}
    if len(processes) == 1 and 0 in ranks:
        return {processes[0]: ranks[0]}
    times = Counter(rank.number for rank in told.values())
    return {process: rank for process, rank in told.items() if times[rank.number] == 1}
