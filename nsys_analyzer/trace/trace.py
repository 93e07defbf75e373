"""A trace in memory: GPU operations, launches and NVTX ranges as typed columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.errors import MissingTableError, TraceError
from nsys_analyzer.text import plain
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import (
    Bools,
    Frame,
    Ints,
    SmallInts,
    append_in_place,
    compress_constant,
    dense_codes,
    distinct,
    distinct_texts,
    iterate_rows,
)
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    BETWEEN_DEVICES,
    CALL_PREFIXES,
    FROM_HOST,
    INTO_HOST,
    KERNEL,
    LAUNCH,
    MEMCPY,
    ON_DEVICE,
    OPERATION_KINDS,
    OTHER_CALL,
    PROCESS_MASK,
    TO_DEVICE,
    TO_HOST,
    UNNAMED_KERNEL,
    GraphNodes,
    Launches,
    MemoryUses,
    Operations,
    Operators,
    Ranges,
    process_of,
)
from nsys_analyzer.trace.metadata import Metadata, explain_missing_cuda, read_diagnostics, read_metadata
from nsys_analyzer.trace.phase_names import normalize_module_name
from nsys_analyzer.trace.ranks import NcclCalls, Rank, read_nccl_calls, read_nccl_ranges, read_ranks
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.sources import is_export_of, is_report, open_capture
from nsys_analyzer.trace.stacks import Stacks, mark_clock_ranges, read_stacks
from nsys_analyzer.trace.time_checks import ExcludedRows, TimeCheck

if TYPE_CHECKING:
    from typing_extensions import Self


#: Characters of a kernel's name that are kept.
_LONGEST_KERNEL = 20_000
#: API calls that are enough for a median.
_FIRST_CALLS = 20_000
#: The largest grid that CUDA allows along y and z is 65,535, along x 2³¹ − 1; blocks of all three fit 64 bits then.
_LARGEST_GRID = 2**21 - 1
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY

_LARGE_TABLES = (schema.RUNTIME, *schema.OPERATIONS_BY_KIND, schema.NVTX)
_SMALL_TABLES = tuple(table for table in dict.fromkeys(schema.TABLES.values()) if table not in _LARGE_TABLES)


@dataclass(frozen=True)
class Trace:
    """One nsys export in memory.

    Attributes:
        failed_allocations: the launches that are allocations without success.
        open_ranges: ranges without an end.
        operators: PyTorch's operators (``aten::mm``, ``autograd::engine::evaluate_function: MmBackward0``): events of
            its profiler, or those of the ranges that ``--pytorch=autograd-nvtx`` wrote.
        tables: keys (``trace.schema``) of the tables that the file has.
        left_out: the rows whose times cannot be true, which are in none of the columns.
        untimed: the operations among them.
        memory: None where it was not recorded.
        costly_tables: those of ``schema.COSTLY_TABLES`` that were recorded.
        ranks: by global process ID, or by 0 that of the process launched.
        launch_ns: the median duration of the first kernel launches; None without any.
        nccl_calls: calls of NCCL's functions.
        callers: what of PyTorch the API calls with a backtrace were made for, by process and correlation ID.
        stacks: where the program was, by global process ID, where our hooks sampled it.
        off_cpu: by global thread ID, starts and ends of the stretches without a CPU, in order, where nsys noted them.
        old_export: the export that was read although the report is newer, because nsys is missing; else empty.
        started: the names of ranges that are started and ended, not pushed and popped: these may cross other ranges.
        noted: what the profiler noted about itself: its own work, and the span of its recording.
    """

    path: Path
    operations: Operations
    launches: Launches
    failed_allocations: Launches
    ranges: Ranges
    open_ranges: Ranges
    operators: Operators
    graph_nodes: GraphNodes
    metadata: Metadata
    tables: frozenset[str]
    left_out: tuple[ExcludedRows, ...] = ()
    untimed: Operations | None = None
    memory: MemoryUses | None = None
    costly_tables: tuple[str, ...] = ()
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    launch_ns: float | None = None
    callers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nccl_calls: NcclCalls = field(default_factory=NcclCalls.none)
    stacks: Mapping[int, Stacks] = field(default_factory=dict)
    off_cpu: Mapping[int, tuple[Ints, Ints]] = field(default_factory=dict)
    old_export: str = ""
    started: frozenset[str] = frozenset()
    noted: Ranges = field(default_factory=lambda: Ranges(*(np.zeros(0, np.int64),) * 4, ()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a ``.sqlite`` export; a folder of Parquet or Arrow files, a ``.nsys-rep``, or a PyTorch trace.

        Raises:
            TraceError: the file is absent, damaged, not an nsys export, or too large for the memory.
            MissingTableError: it holds no CUDA activity table and no NVTX ranges either.
            ExportError: a ``.nsys-rep`` could not be exported.
        """
        path = Path(path)
        try:
            return cls.read(open_capture(path), path)
        except MemoryError as error:
            remedy = "Capture fewer steps, or read it on a machine with more"
            raise TraceError(f"{path} needs more memory than there is", remedy) from error

    @classmethod
    def read(cls, reader: Reader, path: Path) -> Self:
        """Reads everything the analysis needs from an open export."""
        check_recorded(reader, path)
        frames = reader.read_all((*_LARGE_TABLES, *_SMALL_TABLES))
        strings = dict(iterate_rows(frames["strings"]))
        operations, (launches, out_of_memory) = _operations(frames, strings), _launches(frames["runtime"], strings)
        ranges, annotated, operators = _read_ranges(frames["nvtx"], strings)
        recorded = _recorded_operators(frames["operators"], strings)
        metadata = replace(read_metadata(frames, strings), unread_tables=reader.unread_tables())
        noted = read_nccl_ranges(reader, strings)
        duration = int(frames["session"]["duration"].max(initial=0)) or None
        moments = (operations.start, launches.start, ranges.start)
        by_nsys = metadata.profiler == "nsys"
        check = TimeCheck(duration, *moments, start=metadata.time_shift_ns, by_cupti=by_nsys)
        timed, called = check.operations(operations), check.calls(launches)
        once = check.not_repeated(operations) if by_nsys else timed
        valid, ended = check.ranges(schema.NVTX, ranges), ranges.end != schema.NO_TIME
        clocks = mark_clock_ranges(ranges)
        memory = None
        if reader.name_of(schema.MEMORY):
            start, process, size, operation, alive, _ = frames["memory"].values()
            memory = MemoryUses(start, process, np.where(operation == 0, size, -size), alive)
            memory = memory.select(check.memory(memory))
        first = launches.select(np.argsort(launches.start, kind="stable")[:_FIRST_CALLS])
        lasted = (first.end - first.start)[first.call == LAUNCH]
        lasted = lasted[lasted > 0]
        nodes = frames["graph_nodes"]
        return cls(
            path,
            operations.select(timed & once),
            launches.select(called),
            launches.select(called & out_of_memory),
            ranges.select(valid & ended & ~clocks),
            ranges.select(valid & ~ended & ~clocks),
            recorded.select(check.ranges(schema.OPERATORS, recorded))
            if reader.name_of(schema.OPERATORS)
            else operators.select((valid & ended)[annotated]),
            GraphNodes(*(nodes[column] for column in ("start", "thread", "graph_node", "original"))),
            metadata,
            frozenset(table.key for table in (*_LARGE_TABLES, *_SMALL_TABLES) if reader.name_of(table)),
            tuple(check.left_out),
            operations.select(~timed),
            memory,
            costly_tables(reader),
            read_ranks(reader, strings.values(), noted),
            float(np.median(lasted)) if len(lasted) else None,
            _read_callers(reader, strings, launches),
            read_nccl_calls(reader, noted),
            read_stacks(path, ranges.select(valid & clocks)),
            _read_off_cpu(reader),
            reader.path.name if is_report(path) and not is_export_of(reader.path, path) else "",
            frozenset(ranges.names[code] for code in distinct(ranges.name[np.isin(frames["nvtx"]["kind"], (60, 71))])),
            _noted((frames["overhead"], frames["profiler_overhead"]), strings),
        )


def check_recorded(reader: Reader, path: Path) -> None:
    """Makes sure that there is something to analyse.

    Raises:
        MissingTableError: neither CUDA activity nor NVTX ranges; with the reason where the profiler gives one.
    """
    if not any(reader.name_of(table) for table in _LARGE_TABLES):
        why = plain(explain_missing_cuda(read_diagnostics(reader.read(schema.DIAGNOSTICS))), "`")
        remedy = why or "Capture again with: nsys profile --trace=cuda,nvtx"
        raise MissingTableError(f"{path} holds neither CUDA activity nor NVTX ranges", remedy)


def costly_tables(reader: Reader) -> tuple[str, ...]:
    """Returns those of ``schema.COSTLY_TABLES`` that were recorded: with rows, or with the mark of a copy to share."""
    present = [name for name in schema.COSTLY_TABLES if name in reader.columns_of]
    return tuple(n for n in present if reader.columns_of[n] == schema.COSTLY_MARK or reader.has_rows(n))


def _operations(frames: dict[str, Frame], strings: dict[int, str]) -> Operations:
    """Returns the GPU operations; takes the columns of the frames, which are too long to be there twice."""
    parts = [frames[kind] for kind in OPERATION_KINDS]
    lengths = [len(part["start"]) for part in parts]
    size, copy = _sizes(parts), _copies(parts[MEMCPY], lengths)
    ids, codes = dense_codes(parts[KERNEL].pop("name"))

    def column(key: str) -> Any:
        return append_in_place(*(part.pop(key) for part in parts))

    process = column("process")
    if not process.any():  # exports before globalPid leave it out: with one launching process it is that one
        launching = distinct(process_of(distinct(frames["runtime"]["thread"])))
        process = np.full_like(process, launching[0]) if len(launching) == 1 else process
    texts = [_cut(strings.get(i, "")) for i in ids.tolist()]
    return Operations(
        kind=np.repeat(np.arange(len(OPERATION_KINDS), dtype=np.int8), lengths),
        start=column("start"),
        end=column("end"),
        device=compress_constant(column("device")),
        context=compress_constant(column("context")),
        stream=compress_constant(column("stream")),
        correlation=column("correlation"),
        process=compress_constant(process),
        name=append_in_place(codes, np.full(sum(lengths[KERNEL + 1 :]), -1, np.int32)),
        graph_node=compress_constant(column("graph_node")),
        size=size,
        copy=copy,
        continues=append_in_place(parts[KERNEL].pop("continues"), np.zeros(sum(lengths[KERNEL + 1 :]), np.int32)),
        # A name of blanks, or that ends where it begins, is none.
        names=tuple(
            text if text.partition("\0")[0].strip() else f"{UNNAMED_KERNEL} {i}"
            for i, text in zip(ids.tolist(), texts, strict=True)
        ),
    )


def _cut(name: str) -> str:
    """Returns a kernel's name, cut if templates made it endless: every table and report holds the name."""
    return name if len(name) <= _LONGEST_KERNEL else f"{name[:_LONGEST_KERNEL]}… ({len(name):,} characters)"


def _sizes(parts: list[Frame]) -> Ints:
    """Shape (operations,): thread blocks of kernels, or bytes."""
    blocks = np.ones(len(parts[KERNEL]["start"]), np.int64)
    for axis in "xyz":  # none overflows a product of three
        blocks *= parts[KERNEL].pop(f"grid_{axis}").clip(0, _LARGEST_GRID)
    of_others = (part.get("bytes", np.zeros(len(part["start"]), np.int64)) for part in parts[KERNEL + 1 :])
    return np.concatenate([blocks, *of_others])


def _copies(frame: Frame, lengths: list[int]) -> SmallInts:
    """Shape (operations,): the kind of each copy."""
    direction, source, target = (frame[column] for column in ("direction", "source", "target"))
    copies = np.zeros(sum(lengths), np.int32)
    copies[sum(lengths[:MEMCPY]) :][: lengths[MEMCPY]] = np.select(
        [direction == 1, direction == 2, direction == 8, direction == 10],
        [
            np.select([source == 0, source == 1], FROM_HOST[:2], TO_DEVICE),
            np.select([target == 0, target == 1], INTO_HOST[:2], TO_HOST),
            ON_DEVICE,
            BETWEEN_DEVICES,
        ],
    )
    return copies


def _launches(frame: Frame, strings: dict[int, str]) -> tuple[Launches, Bools]:
    """Returns the API calls, and which of them are allocations for which there was no memory."""
    ids, codes = dense_codes(frame.pop("name"))
    names = tuple(strings.get(i, "") for i in ids.tolist())
    kinds = [
        next((kind for kind, starts in CALL_PREFIXES.items() if name.startswith(starts)), OTHER_CALL) for name in names
    ]
    call = np.array([*kinds, OTHER_CALL], np.int8)[codes]
    result = frame.pop("result")
    call[(call == LAUNCH) & (result != 0)] = OTHER_CALL  # it launched nothing
    launches = Launches(frame["start"], frame["end"], frame["thread"], frame["correlation"], call, codes, names)
    return launches, (call == ALLOCATE) & (result == _OUT_OF_MEMORY)


# ``nsys --pytorch=autograd-nvtx`` and PyTorch's own ``emit_nvtx`` write the number of autograd's node behind the name
# of an operator, ``aten::mm, seq = 9157, op_id = 91984``, and with shapes also the sizes of its inputs:
# ``sizes = [[8192, 768], [768, 3072]], input_op_ids = [(91979,0), (657,0)]``.
_ATEN = "aten::"
_ANNOTATION = re.compile(r",\s*(?:seq|op_id|sizes|input_op_ids)\s*=.*")
_SEQUENCE = re.compile(r",\s*seq\s*=\s*(\d{1,18})(?:\D|$)", re.ASCII)


def _read_ranges(frame: Frame, strings: Mapping[int, str]) -> tuple[Ranges, Ints, Operators]:
    """Returns the ranges, named by text ID or by text; which of them are PyTorch's operators, as indices; and these.

    Operators are the ranges with one of ATen's names, and those of names that have an annotation behind them anywhere.
    """
    by_id = frame["text_id"]
    used, id_codes = dense_codes(by_id)
    written = [*(strings.get(i, "") for i in used.tolist()), *frame["text"].to_pylist()]
    text = np.where(by_id >= 0, id_codes, len(used) + np.arange(len(by_id)))
    named = [_ANNOTATION.sub("", each) if "=" in each else each for each in written]
    annotated = {name for name, whole in zip(named, written, strict=True) if len(name) < len(whole)}
    names, codes = distinct_texts([normalize_module_name(name) if name.startswith("{") else name for name in named])
    ranges = Ranges(frame["start"], frame["end"], frame["thread"], codes[text], names)
    are_operators = np.array([name in annotated or name.startswith(_ATEN) for name in names], np.bool_)
    index = np.flatnonzero(are_operators[ranges.name])
    numbers = (_SEQUENCE.search(each) if "=" in each else None for each in written)
    sequence = np.array([int(match[1]) if match else -1 for match in numbers], np.int64)[text[index]]
    operators = Operators(
        **ranges.select(index).columns(),
        names=names,
        sequence=sequence,
        forward_thread=np.zeros(len(index), np.int32),
    )
    return ranges, index, operators


def _recorded_operators(frame: Frame, strings: Mapping[int, str]) -> Operators:
    """Returns the operators of the profiler's own table."""
    names, name = dense_codes(frame["name"])
    return Operators(
        start=frame["start"],
        end=frame["end"],
        thread=frame["thread"],
        name=name.astype(np.int64),
        names=tuple(strings.get(i, "") for i in names.tolist()),
        sequence=np.maximum(frame["sequence"], -1),
        forward_thread=frame["forward_thread"],
    )


def _noted(tables: Sequence[Frame], strings: Mapping[int, str]) -> Ranges:
    """Returns what the profiler noted about itself, without the rows whose times CUPTI could not collect."""
    names = ("start", "end", "thread", "name")
    start, end, thread, ids = (np.concatenate([table[name] for table in tables]) for name in names)
    used, codes = dense_codes(ids)
    noted = Ranges(start, end, thread, codes.astype(np.int64), tuple(strings.get(i, "") for i in used.tolist()))
    return noted.select((start != schema.NO_TIME) & (end > start))


#: A function of PyTorch that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), or an operator.
_CALLED = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def _read_callers(reader: Reader, strings: Mapping[int, str], launches: Launches) -> Mapping[tuple[int, int], str]:
    """Returns the outermost operator or function of PyTorch around each API call, by process and correlation ID.

    It is that of the call's backtrace, or of a sample of the CPU during the call. A call without one, or with none of
    PyTorch's functions in it, has no entry. ``strings`` are those of the export, by their IDs.
    """
    found: list[tuple[Ints, Ints, Ints, dict[int, str]]] = []
    if called := _called(reader, schema.SAMPLED_CHAINS, strings):
        samples = reader.read(schema.SAMPLES)
        chain, thread, time = (samples[name] for name in ("id", "thread", "start"))
        # In order of threads and starts, a call and the samples behind it, before the next call.
        order = np.lexsort((np.append(time, launches.start), np.append(thread, launches.thread)))
        last = np.maximum.accumulate(np.where(order < len(time), -1, np.arange(len(order))))
        place = np.flatnonzero((order < len(time)) & (last >= 0))
        sample, call = order[place], order[last[place]] - len(time)
        inside = (launches.thread[call] == thread[sample]) & (launches.end[call] > time[sample])
        sample, call = sample[inside], call[inside]
        found.append((thread[sample], launches.correlation[call], chain[sample], called))
    if called := _called(reader, schema.CALLCHAINS, strings):
        calls = reader.read(schema.CHAINED_CALLS)
        found.append((calls["thread"], calls["correlation"], calls["chain"], called))
    return {
        (t & PROCESS_MASK, c): called[number]
        for thread, correlation, chain, called in found
        for t, c, number in zip(thread.tolist(), correlation.tolist(), chain.tolist(), strict=True)
        if number in called
    }


def _read_off_cpu(reader: Reader) -> Mapping[int, tuple[Ints, Ints]]:
    """Returns when each thread had no CPU: from where it lost one to where it got the next."""
    switches = reader.read(schema.SWITCHES)
    order = np.lexsort((switches["start"], switches["thread"]))
    start, thread, is_in = (switches[name][order] for name in ("start", "thread", "is_in"))
    off = np.flatnonzero((is_in[:-1] == 0) & (is_in[1:] != 0) & (thread[:-1] == thread[1:]))
    threads, first = np.unique(thread[off], return_index=True)
    each = zip(threads.tolist(), np.split(off, first[1:]), strict=False)
    return {one: (start[mine], start[mine + 1]) for one, mine in each}


def _called(reader: Reader, table: schema.Table, strings: Mapping[int, str]) -> dict[int, str]:
    """Returns the outermost function of PyTorch in each backtrace of a table, by their IDs."""
    name = reader.name_of(table)
    if not name or not reader.filter_of(table, name):
        return {}
    chains = sorted(iterate_rows(reader.read(table)), key=lambda row: row[2])  # by depth
    outermost = {chain: _CALLED.search(strings.get(symbol, "")) for chain, symbol, _ in chains}
    return {chain: match["function"] or match["operator"] for chain, match in outermost.items() if match}
