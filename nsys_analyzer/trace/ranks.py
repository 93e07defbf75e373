"""Reads the rank of each process and the calls of NCCL from the export of a run of several ranks."""

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

#: The prefix of NCCL functions that create a communicator. The payload of such a call's range contains the rank.
INIT_COMMUNICATOR = "ncclCommInit"
UNKNOWN_NUMBER = -1
_ID_MASK = 2**63 - 1  # IDs are unsigned 64-bit integers, but columns contain signed ones

#: The fields of the payloads of NCCL's ranges, in lower case.
RANK, RANKS, COMMUNICATOR, BYTES, PEER = (
    "rank", "no. of ranks", "nccl communicator id", "message size [bytes]", "peer rank",
)  # fmt: skip
_PEER_FIELDS = (PEER, "peer")
_SIZE_FIELDS = (BYTES, "bytes")  # the second name is used in broadcasts and exchanges by older versions of NCCL
#: Matches the NCCL functions that send messages, unlike functions that create communicators or query something.
_MESSAGE_FUNCTION = re.compile(
    "nccl(?:AllReduce|AllGather|All[Tt]o[Aa]ll|ReduceScatter|Reduce|Broadcast|Bcast|Send|Recv|Gather|Scatter)"
)
_INTEGER = re.compile(r"[0-9]{1,20}")
#: The header that nsys writes before a binary payload: domain, schema, size and offset, each with 8 bytes.
_PAYLOAD_HEADER = struct.Struct("<QQQQ")
#: NVTX's codes of the types int, int32_t, uint64_t and size_t.
_STRUCT_OF_TYPE = {5: struct.Struct("<i"), 15: struct.Struct("<i"), 18: struct.Struct("<Q"), 22: struct.Struct("<Q")}


@dataclass(frozen=True)
class NcclCalls(Columns):
    """Calls of NCCL's functions that send messages, sorted by start.

    Attributes:
        start: ns.
        thread: global thread ID.
        communicator: ID of the communicator (its low 63 bits), which is equal on all ranks; 0 if unknown.
        bytes: message size of one rank, as NCCL counts it; -1 if unknown.
        peer: rank of the sender or the receiver in the communicator; -1 if the call is no send or receive.
        ranks: number of ranks in the communicator; 0 if unknown, because the capture began after its creation.
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
        """Returns an empty table of calls."""
        no_integers = np.zeros(0, np.int64)
        return NcclCalls(
            no_integers,
            no_integers,
            no_integers,
            no_integers,
            no_integers,
            no_integers,
            no_integers.astype(np.int32),
            (),
        )


class NcclRange(NamedTuple):
    """The range of an NCCL function, with the integers in its payload by field name in lower case."""

    start: int
    thread: int
    name: str
    numbers: dict[str, int]


def read_nccl_calls(reader: Reader, nccl_ranges: Sequence[NcclRange]) -> NcclCalls:
    """Returns the calls of NCCL's functions that send messages.

    They are in the table ``NCCL_CALLS``, or else among ``nccl_ranges``.

    Raises:
        TraceError: the file is damaged.
    """
    has_table = reader.name_of(schema.NCCL_CALLS)
    rows = sorted(iterate_rows(reader.read(schema.NCCL_CALLS)) if has_table else _make_message_rows(nccl_ranges))
    if not rows:
        return NcclCalls.none()
    start, thread, functions, *number_columns = zip(*rows, strict=True)
    function_names = tuple(dict.fromkeys(functions))
    code_of_function = {name: i for i, name in enumerate(function_names)}
    communicator, size, peer, ranks = (np.array(column, np.int64) for column in number_columns)
    return NcclCalls(
        start=np.array(start, np.int64),
        thread=np.array(thread, np.int64),
        communicator=communicator,
        bytes=size,
        peer=peer,
        ranks=ranks,
        name=np.array([code_of_function[name] for name in functions], np.int32),
        names=function_names,
    )


def _make_message_rows(nccl_ranges: Sequence[NcclRange]) -> Iterator[tuple[Any, ...]]:
    """Yields the calls that send messages as rows of ``schema.NCCL_CALLS``."""

    def read_integer(call: NcclRange, default: int, *fields: str) -> int:
        """Returns the value of the first of the given fields that the call's payload contains."""
        value = next((call.numbers[field] for field in fields if field in call.numbers), default)
        return value & _ID_MASK if value > 0 else value

    creations = (call for call in nccl_ranges if call.name.startswith(INIT_COMMUNICATOR))
    ranks = {read_integer(call, 0, COMMUNICATOR): read_integer(call, 0, RANKS) for call in creations}
    for call in nccl_ranges:
        if match := _MESSAGE_FUNCTION.match(call.name):
            communicator = read_integer(call, 0, COMMUNICATOR)
            size, peer = (
                read_integer(call, UNKNOWN_NUMBER, *_SIZE_FIELDS),
                read_integer(call, UNKNOWN_NUMBER, *_PEER_FIELDS),
            )
            yield call.start, call.thread, match[0], communicator, size, peer, ranks.get(communicator, 0)


def read_nccl_ranges(reader: Reader, strings: Mapping[int, str]) -> list[NcclRange]:
    """Returns the ranges of NCCL's functions with their payloads; ``strings`` are the export's strings by ID.

    Raises:
        TraceError: the file is damaged.
    """
    events = reader.name_of(schema.NVTX)
    has_nccl_names = any(text.startswith("nccl") for text in strings.values())
    if not events or not has_nccl_names or "textId" not in reader.columns_of[events]:
        return []
    rows = list(iterate_rows(reader.read(schema.PAYLOADS)))
    layouts: _PayloadLayouts = defaultdict(dict)
    if any(binary for *_, binary in rows):
        for schema_id, kind, name, offset in iterate_rows(reader.read(schema.PAYLOAD_FIELDS)):
            if kind in _STRUCT_OF_TYPE:
                layouts[schema_id][name.lower()] = _STRUCT_OF_TYPE[kind], offset
    return [
        NcclRange(start, thread, strings.get(name_id, ""), {
            **_parse_json_payload(json),
            **_parse_json_payload(strings.get(json_id, "")),
            **_parse_binary_payload(binary, layouts),
        })
        for start, name_id, thread, json, json_id, binary in rows
    ]  # fmt: skip


def _parse_json_payload(text: str) -> dict[str, int]:
    """Returns the integers of a JSON payload, by field name in lower case."""
    try:
        payload = decode_json(text.encode())
    except ValueError:
        return {}  # the payload is not NCCL's, so another library wrote the range
    pairs = payload.items() if isinstance(payload, dict) else ()
    return {name.lower(): int(value) for name, value in pairs if _INTEGER.fullmatch(str(value))}


#: The type and the offset (bytes) of each integer field, by schema ID and field name in lower case.
_PayloadLayouts = dict[int, dict[str, tuple[struct.Struct, int]]]


def _parse_binary_payload(blob: bytes, layouts: _PayloadLayouts) -> dict[str, int]:
    """Returns the integers of a binary payload, by field name in lower case."""
    if len(blob) < _PAYLOAD_HEADER.size:
        return {}
    schema_id = _PAYLOAD_HEADER.unpack_from(blob)[1] & 0xFFFFFFFF
    payload = blob[_PAYLOAD_HEADER.size :]
    return {
        name: kind.unpack_from(payload, offset)[0]
        for name, (kind, offset) in layouts.get(schema_id, {}).items()
        if 0 <= offset <= len(payload) - kind.size
    }


#: The environment variables with the global rank and with the number of ranks, for each launcher.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_VARIABLE_NAMES = tuple(name for pair in _RANK_VARIABLES for name in pair)
_VARIABLE_PREFIXES = tuple(f"{name}=" for name in _VARIABLE_NAMES)
_RANK_ASSIGNMENT = re.compile(rf'(?:^|\0)({"|".join(_VARIABLE_NAMES)})="?([0-9]{{1,9}})"?(?=\0|$)')


@dataclass(frozen=True)
class Rank:
    """A process's rank in its run, and the number of ranks of the run, 0 if unknown."""

    number: int
    world_size: int = 0


def read_ranks(reader: Reader, strings: Iterable[str], nccl_ranges: Sequence[NcclRange]) -> dict[int, Rank]:
    """Returns the ranks of processes by global process ID. The key 0 stands for the process that nsys launched.

    Args:
        reader: the export.
        strings: the values of its ``StringIds``.
        nccl_ranges: the ranges of NCCL's functions.

    Raises:
        TraceError: the file is damaged.
    """
    if reader.name_of(schema.RANKS):
        return {process: Rank(rank, size) for process, rank, size in iterate_rows(reader.read(schema.RANKS))}
    # The properties of the capture contain the environment of the program that nsys launched. Environment blocks among
    # the strings may be from other processes, so they are used only if the properties contain no rank.
    properties = iterate_rows(reader.read(schema.VARIABLES))
    variables = (value for _, value in properties if value.startswith(_VARIABLE_PREFIXES))
    blocks = (text for text in strings if "\0" in text and ("RANK=" in text or "SLURM_PROCID=" in text))
    uses_nccl = any("nccl" in text for text in strings)
    launched_rank = _parse_rank(variables, uses_nccl=uses_nccl) or _parse_rank(blocks, uses_nccl=uses_nccl)
    return _find_ranks_in_communicators(nccl_ranges) | ({0: launched_rank} if launched_rank else {})


def _parse_rank(texts: Iterable[str], *, uses_nccl: bool) -> Rank | None:
    """Returns the rank in the given environment variables; None without a rank, or if a variable has several values.

    Slurm also assigns the task number 0 to shells and to programs with a single process. So it counts as a rank only if
    the process uses NCCL.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for name, value in _RANK_ASSIGNMENT.findall("\0".join(texts)):
        values[name].add(int(value))
    if not uses_nccl and values["SLURM_PROCID"] == {0}:
        values.pop("SLURM_PROCID")
    for rank, size in _RANK_VARIABLES:
        if len(values[rank]) == 1:
            return Rank(min(values[rank]), min(values[size], default=0))
    return None


def _find_ranks_in_communicators(nccl_ranges: Sequence[NcclRange]) -> dict[int, Rank]:
    """Returns the rank of each process in its largest communicator. A process with several ranks there is left out."""
    pairs_of: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for call in nccl_ranges:
        if call.name.startswith(INIT_COMMUNICATOR) and RANK in call.numbers and RANKS in call.numbers:
            pairs_of[call.thread & PROCESS_MASK].add((call.numbers[RANKS], call.numbers[RANK]))
    largest_size = {process: max(size for size, _ in pairs) for process, pairs in pairs_of.items()}
    ranks = {
        process: {rank for size, rank in pairs_of[process] if size == largest_size[process]} for process in pairs_of
    }
    return {
        process: Rank(min(numbers), largest_size[process]) for process, numbers in ranks.items() if len(numbers) == 1
    }


def find_unambiguous_ranks(ranks: Mapping[int, Rank], processes: Iterable[int]) -> dict[int, Rank]:
    """Returns the ranks of the given processes of one capture. A rank that two processes claim is dropped.

    If there is only one process, it gets the rank of the process that nsys launched (key 0), if that is known.
    """
    processes = list(processes)
    ranks_of_processes = {process: ranks[process] for process in processes if process in ranks}
    if len(processes) == 1 and 0 in ranks:
        return {processes[0]: ranks[0]}
    counts = Counter(rank.number for rank in ranks_of_processes.values())
    return {process: rank for process, rank in ranks_of_processes.items() if counts[rank.number] == 1}
