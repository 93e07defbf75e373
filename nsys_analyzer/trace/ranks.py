"""The rank of each process in its run, as far as the export tells it.

It is in a table of ours, in the variables by which launchers tell a process its rank, or in what NCCL notes beside its
ranges when a communicator is made. Nothing follows from the order of devices.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import rows_of
from nsys_analyzer.trace.columns import PROCESS_MASK
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

INIT_COMMUNICATOR = schema.INIT_COMMUNICATOR
"""The start of the names of NCCL functions that make a communicator, and note the rank in it beside their range."""

_WHOLE = re.compile(r"[0-9]{1,9}")
_RANK, _RANKS = "rank", "no. of ranks"
#: What nsys writes before a binary payload: domain, schema, size and offset, 8 bytes each; and NVTX's type "int".
_HEADER, _INT = struct.Struct("<QQQQ"), struct.Struct("<i")
_INT_TYPE = 5


@dataclass(frozen=True)
class Rank:
    """A process's rank among all of its run, and how many there are, 0 where that is not known."""

    number: int
    world_size: int = 0


def read_ranks(reader: Reader, strings: Iterable[str] | None = None) -> dict[int, Rank]:
    """The ranks that an export tells, by global process ID; by 0 what it tells of the process that was launched.

    Args:
        reader: the export.
        strings: its ``StringIds``, where they have been read.

    Raises:
        TraceError: the file is damaged.
    """
    if reader.name_of(schema.RANKS):
        return {process: Rank(rank, size) for process, rank, size in rows_of(reader.read(schema.RANKS))}
    launched = _launched(reader, reader.read(schema.STRINGS)["value"].to_pylist() if strings is None else strings)
    return _of_communicators(reader) | ({0: launched} if launched else {})


def _launched(reader: Reader, strings: Iterable[str]) -> Rank | None:
    """The rank in the environment that nsys kept of the program it launched; None where two say different ones."""
    variables = (value for _, value in rows_of(reader.read(schema.VARIABLES)) if value.startswith(_SETTINGS))
    blocks = (text for text in strings if "\0" in text and ("RANK=" in text or "SLURM_PROCID=" in text))
    found: dict[str, set[int]] = defaultdict(set)
    for name, value in _VARIABLE.findall("\0".join((*variables, *blocks))):
        found[name].add(int(value))
    known = (Rank(min(found[rank]), min(found[size], default=0)) for rank, size in _VARIABLES if len(found[rank]) == 1)
    return next(known, None)


def _of_communicators(reader: Reader) -> dict[int, Rank]:
    """The rank of each process in the largest communicator that it made."""
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for thread, fields in _payloads(reader):
        if _RANK in fields and _RANKS in fields:
            found[thread & PROCESS_MASK].add((fields[_RANKS], fields[_RANK]))
    largest = {process: max(size for size, _ in pairs) for process, pairs in found.items()}
    ranks = {process: {rank for size, rank in found[process] if size == largest[process]} for process in found}
    return {process: Rank(min(numbers), largest[process]) for process, numbers in ranks.items() if len(numbers) == 1}


def _payloads(reader: Reader) -> Iterator[tuple[int, dict[str, int]]]:
    """The thread and the numbers beside each range in which NCCL makes a communicator, as JSON or binary."""
    events = reader.name_of(schema.NVTX)
    if not events or not reader.name_of(schema.STRINGS) or "textId" not in reader.columns_of[events]:
        return
    noted = list(rows_of(reader.read(schema.PAYLOADS)))
    strings = dict(rows_of(reader.read(schema.STRINGS))) if any(json_id >= 0 for _, _, json_id, _ in noted) else {}
    fields = _integer_fields(reader) if any(binary for *_, binary in noted) else {}
    for thread, json, json_id, binary in noted:
        yield thread, _numbers(json)
        yield thread, _numbers(strings.get(json_id, ""))
        yield thread, _decoded(binary, fields)


def _numbers(text: str) -> dict[str, int]:
    """The whole numbers of a payload as JSON, by their names in small letters."""
    try:
        payload = decode_json(text.encode())
    except ValueError:
        return {}  # of a program that names its own ranges as NCCL does
    pairs = payload.items() if isinstance(payload, dict) else ()
    return {name.lower(): int(value) for name, value in pairs if _WHOLE.fullmatch(str(value))}


def _integer_fields(reader: Reader) -> dict[int, dict[str, int]]:
    """Where the integers of each payload schema are: schema ID to names, in small letters, to offsets in bytes."""
    fields: dict[int, dict[str, int]] = defaultdict(dict)
    for schema_id, kind, name, offset in rows_of(reader.read(schema.PAYLOAD_FIELDS)):
        if kind == _INT_TYPE:
            fields[schema_id][name.lower()] = offset
    return fields


def _decoded(blob: bytes, fields: dict[int, dict[str, int]]) -> dict[str, int]:
    """The integers of a binary payload."""
    if len(blob) < _HEADER.size:
        return {}
    schema_id = _HEADER.unpack_from(blob)[1] & 0xFFFFFFFF
    payload = blob[_HEADER.size :]
    return {
        name: _INT.unpack_from(payload, offset)[0]
        for name, offset in fields.get(schema_id, {}).items()
        if offset + _INT.size <= len(payload)
    }


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
