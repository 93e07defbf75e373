"""Defines a trace in memory, with GPU operations, API calls and NVTX ranges as typed columns, and reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.errors import MissingTableError, TraceError
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
    BlockResources,
    GraphNodes,
    Launches,
    MemoryUses,
    Operations,
    Operators,
    Ranges,
    process_of,
)
from nsys_analyzer.trace.gpu_counters import GpuSamples, read_gpu_counters
from nsys_analyzer.trace.metadata import Metadata, explain_missing_cuda, read_diagnostics, read_metadata
from nsys_analyzer.trace.network import NetworkTraffic, read_network_traffic
from nsys_analyzer.trace.nsys_report import is_export_of
from nsys_analyzer.trace.operator_calls import OperatorStep, find_operator_files, without_operator_steps
from nsys_analyzer.trace.operator_shapes import LINEAR_LAYER, describe_linear_layer
from nsys_analyzer.trace.phase_names import normalize_module_name
from nsys_analyzer.trace.ranks import NcclCalls, Rank, read_nccl_calls, read_nccl_ranges, read_ranks
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.sources import is_report, open_capture
from nsys_analyzer.trace.stacks import Stacks, find_clock_ranges, read_stacks
from nsys_analyzer.trace.time_checks import ExcludedRows, TimeCheck

if TYPE_CHECKING:
    from typing_extensions import Self


_MAX_KERNEL_NAME_CHARACTERS = 20_000
#: The median duration of a launch is computed from the launches among this many first API calls of the capture.
_CALLS_FOR_MEDIAN = 20_000
#: A number of thread blocks along one axis of a grid is reduced to this maximum, so that the product of the three axes
#: fits into 64 bits even in a damaged file.
_MAX_BLOCKS_PER_AXIS = 2**21 - 1
_MAX_THREADS_PER_AXIS = 1024  # the largest number on any GPU
_OUT_OF_MEMORY_CODE = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY

_LARGE_TABLES = (schema.RUNTIME, *schema.OPERATIONS_BY_KIND, schema.NVTX)
_SMALL_TABLES = tuple(table for table in dict.fromkeys(schema.TABLES.values()) if table not in _LARGE_TABLES)


@dataclass(frozen=True)
class Trace:
    """One capture in memory.

    Attributes:
        path: the path of the capture, as the user gave it.
        failed_allocations: the API calls among ``launches`` that are allocations for which no memory was left.
        open_ranges: ranges without an end.
        operators: PyTorch's operators (``aten::mm``, ``autograd::engine::evaluate_function: MmBackward0``), from
            PyTorch's profiler or from the NVTX ranges that ``--pytorch=autograd-nvtx`` writes.
        tables: keys (``trace.schema``) of the tables in the file.
        left_out: descriptions of the rows with invalid times, which are in no column.
        untimed_operations: the operations with invalid times.
        memory: allocations and releases of device memory; None if they were not recorded.
        costly_tables: the tables of ``schema.COSTLY_TABLES`` that were recorded.
        ranks: ranks by global process ID; the key 0 stands for the process that nsys launched.
        median_launch_ns: median duration of the first kernel launches; None without launches.
        torch_callers: the PyTorch operator or function that made an API call, by process and correlation ID. Only
            calls with a backtrace or a CPU sample have an entry.
        nccl_calls: calls of NCCL's functions.
        stacks: samples of the Python stack by global process ID, if the capture hooks took them.
        off_cpu: starts and ends (ns, in order) of the periods in which a thread had no CPU, by global thread ID. It is
            empty if nsys recorded no context switches.
        stale_export: name of the export, if it is older than its report and was read because nsys is missing; else an
            empty text.
        start_end_names: names of start-end ranges. Unlike push-pop ranges, they may overlap other ranges of their
            thread without being nested.
        profiler_events: events of the profiler itself, such as its overhead and the span of its recording.
        operator_steps: the step in which each operator has a range, by global process ID. No other attribute contains
            this step.
        counters: samples of the hardware counters of each GPU, by GPU ID. It is empty if nsys recorded none.
        network: the traffic of each port of the network cards.
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
    untimed_operations: Operations | None = None
    memory: MemoryUses | None = None
    costly_tables: tuple[str, ...] = ()
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    median_launch_ns: float | None = None
    torch_callers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nccl_calls: NcclCalls = field(default_factory=NcclCalls.none)
    stacks: Mapping[int, Stacks] = field(default_factory=dict)
    off_cpu: Mapping[int, tuple[Ints, Ints]] = field(default_factory=dict)
    stale_export: str = ""
    start_end_names: frozenset[str] = frozenset()
    profiler_events: Ranges = field(default_factory=lambda: Ranges(*(np.zeros(0, np.int64),) * 4, ()))
    operator_steps: Mapping[int, OperatorStep] = field(default_factory=dict)
    counters: Mapping[int, GpuSamples] = field(default_factory=dict)
    network: tuple[NetworkTraffic, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a ``.sqlite`` export, a folder of Parquet or Arrow files, a ``.nsys-rep`` report or a PyTorch trace.

        Raises:
            TraceError: the file is missing, damaged, not an nsys export, or too large for the memory.
            MissingTableError: it has neither CUDA activity nor NVTX ranges.
            ExportError: a ``.nsys-rep`` could not be exported.
        """
        path = Path(path)
        try:
            return cls.read(open_capture(path), path)
        except MemoryError as error:
            remedy = "Capture fewer steps, or read it on a machine with more"
            raise TraceError(f"{path} needs more memory than is available", remedy) from error

    @classmethod
    def read(cls, reader: Reader, path: Path) -> Self:
        """Reads everything that the analysis needs from an open export.

        Args:
            reader: the export.
            path: the capture that the user named; the stacks files are beside it.

        Raises:
            TraceError: the export is damaged.
            MissingTableError: it has neither CUDA activity nor NVTX ranges.
        """
        check_recorded(reader, path)
        frames = reader.read_all((*_LARGE_TABLES, *_SMALL_TABLES))
        strings = dict(iterate_rows(frames["strings"]))
        operations, (launches, out_of_memory) = (
            _make_operations(frames, strings),
            _make_launches(frames["runtime"], strings),
        )
        ranges, operator_index, nvtx_operators = _make_ranges(frames["nvtx"], strings)
        torch_operators = _make_operators(frames["operators"], strings)
        if len(torch_operators) or len(nvtx_operators) or any(find_operator_files(path)):
            operations = _with_resources(operations, reader.read(schema.KERNEL_RESOURCES))
        metadata = replace(read_metadata(frames, strings), unread_tables=reader.unread_tables())
        nccl_ranges = read_nccl_ranges(reader, strings)
        duration = int(frames["session"]["duration"].max(initial=0)) or None
        row_starts = (operations.start, launches.start, ranges.start)
        by_nsys = metadata.profiler == "nsys"
        time_check = TimeCheck(duration, *row_starts, start=metadata.time_shift_ns, by_cupti=by_nsys)
        have_times, are_valid_calls = (
            time_check.find_valid_operations(operations),
            time_check.find_valid_calls(launches),
        )
        are_first_rows = time_check.find_unique_operations(operations) if by_nsys else have_times
        are_valid, have_ends = time_check.find_valid_ranges(schema.NVTX, ranges), ranges.end != schema.NO_TIME
        are_clocks = find_clock_ranges(ranges)
        memory = None
        if reader.name_of(schema.MEMORY):
            start, process, size, operation, alive, _ = frames["memory"].values()
            memory = MemoryUses(start, process, np.where(operation == 0, size, -size), alive)
            memory = memory.select(time_check.find_valid_memory(memory))
        first_launches = launches.select(np.argsort(launches.start, kind="stable")[:_CALLS_FOR_MEDIAN])
        launch_ns = (first_launches.end - first_launches.start)[first_launches.call == LAUNCH]
        launch_ns = launch_ns[launch_ns > 0]
        if reader.name_of(schema.OPERATORS):
            operators = torch_operators.select(time_check.find_valid_ranges(schema.OPERATORS, torch_operators))
        else:
            operators = nvtx_operators.select((are_valid & have_ends)[operator_index])
        nodes = frames["graph_nodes"]
        is_start_end = np.isin(frames["nvtx"]["kind"], schema.START_END_KINDS)
        trace = cls(
            path=path,
            operations=operations.select(have_times & are_first_rows),
            launches=launches.select(are_valid_calls),
            failed_allocations=launches.select(are_valid_calls & out_of_memory),
            ranges=ranges.select(are_valid & have_ends & ~are_clocks),
            open_ranges=ranges.select(are_valid & ~have_ends & ~are_clocks),
            operators=operators,
            graph_nodes=GraphNodes(*(nodes[column] for column in ("start", "thread", "graph_node", "original"))),
            metadata=metadata,
            tables=frozenset(table.key for table in (*_LARGE_TABLES, *_SMALL_TABLES) if reader.name_of(table)),
            left_out=tuple(time_check.left_out),
            untimed_operations=operations.select(~have_times),
            memory=memory,
            costly_tables=costly_tables(reader),
            ranks=read_ranks(reader, strings.values(), nccl_ranges),
            median_launch_ns=float(np.median(launch_ns)) if len(launch_ns) else None,
            torch_callers=_read_torch_callers(reader, strings, launches),
            nccl_calls=read_nccl_calls(reader, nccl_ranges),
            stacks=read_stacks(path, ranges.select(are_valid & are_clocks)),
            off_cpu=_read_off_cpu(reader),
            stale_export=reader.path.name if is_report(path) and not is_export_of(reader.path, path) else "",
            start_end_names=frozenset(ranges.names[code] for code in distinct(ranges.name[is_start_end])),
            profiler_events=_make_profiler_events((frames["overhead"], frames["profiler_overhead"]), strings),
            counters=read_gpu_counters(reader),
            network=read_network_traffic(reader),
        )
        trace_without_operator_steps: Self = without_operator_steps(trace)
        return trace_without_operator_steps


def check_recorded(reader: Reader, path: Path) -> None:
    """Checks that a capture contains CUDA activity or NVTX ranges.

    Raises:
        MissingTableError: it contains neither. If a message of the profiler explains that, the hint is the explanation.
    """
    if not any(reader.name_of(table) for table in _LARGE_TABLES):
        explanation = explain_missing_cuda(read_diagnostics(reader.read(schema.DIAGNOSTICS)))
        remedy = explanation or "Capture again with: nsys profile --trace=cuda,nvtx"
        raise MissingTableError(f"{path} contains neither CUDA activity nor NVTX ranges", remedy)


def costly_tables(reader: Reader) -> tuple[str, ...]:
    """Returns the tables of ``schema.COSTLY_TABLES`` that have rows, or that had rows before ``share`` removed them."""
    recorded_tables = [name for name in schema.COSTLY_TABLES if name in reader.columns_of]
    return tuple(n for n in recorded_tables if reader.columns_of[n] == schema.COSTLY_MARK or reader.has_rows(n))


def _make_operations(frames: dict[str, Frame], strings: dict[int, str]) -> Operations:
    """Returns the GPU operations, and removes their columns from the frames to save memory."""
    frames_of_kinds = [frames[kind] for kind in OPERATION_KINDS]
    lengths = [len(part["start"]) for part in frames_of_kinds]
    blocks = np.ones(lengths[KERNEL], np.int64)
    for axis in "xyz":
        blocks *= frames_of_kinds[KERNEL].pop(f"grid_{axis}").clip(0, _MAX_BLOCKS_PER_AXIS)
    bytes_of_others = (
        part.get("bytes", np.zeros(len(part["start"]), np.int64)) for part in frames_of_kinds[KERNEL + 1 :]
    )
    size, copy = np.concatenate([blocks, *bytes_of_others]), _find_copy_kinds(frames_of_kinds[MEMCPY], lengths)
    string_ids, name_codes = dense_codes(frames_of_kinds[KERNEL].pop("name"))

    def join_column(key: str) -> Any:
        """Joins a column of the kinds of operations, and removes it from the frames."""
        return append_in_place(*(part.pop(key) for part in frames_of_kinds))

    process = join_column("process")
    if not process.any():  # an old export has no globalPid, so all operations belong to the only process that launches
        launching_processes = distinct(process_of(distinct(frames["runtime"]["thread"])))
        process = np.full_like(process, launching_processes[0]) if len(launching_processes) == 1 else process
    kernel_names = [strings.get(i, "") for i in string_ids.tolist()]
    for position, text in enumerate(kernel_names):  # shortens names of templates, because reports contain the names
        if len(text) > _MAX_KERNEL_NAME_CHARACTERS:
            kernel_names[position] = f"{text[:_MAX_KERNEL_NAME_CHARACTERS]}… ({len(text):,} characters)"
    return Operations(
        kind=np.repeat(np.arange(len(OPERATION_KINDS), dtype=np.int8), lengths),
        start=join_column("start"),
        end=join_column("end"),
        device=compress_constant(join_column("device")),
        context=compress_constant(join_column("context")),
        stream=compress_constant(join_column("stream")),
        correlation=join_column("correlation"),
        process=compress_constant(process),
        name=append_in_place(name_codes, np.full(sum(lengths[KERNEL + 1 :]), -1, np.int32)),
        graph_node=compress_constant(join_column("graph_node")),
        size=size,
        copy=copy,
        continues=append_in_place(
            frames_of_kinds[KERNEL].pop("continues"), np.zeros(sum(lengths[KERNEL + 1 :]), np.int32)
        ),
        # A name counts as missing if it is blank or begins with a null character.
        resource=np.broadcast_to(np.int32(-1), sum(lengths)),
        names=tuple(
            text if text.partition("\0")[0].strip() else f"{UNNAMED_KERNEL} {i}"
            for i, text in zip(string_ids.tolist(), kernel_names, strict=True)
        ),
    )


def _with_resources(operations: Operations, frame: Frame) -> Operations:
    """Returns the operations with what a block of each kernel occupies, from the rows of ``KERNEL_RESOURCES``."""
    registers, static_bytes, dynamic_bytes, *sides = (values.astype(np.int64) for values in frame.values())
    threads = np.prod([side.clip(0, _MAX_THREADS_PER_AXIS) for side in sides], axis=0)
    # The three numbers become one number of 60 bits.
    numbers = (registers.clip(0, 2**12 - 1), threads.clip(0, 2**16 - 1), (static_bytes + dynamic_bytes).clip(0, 2**31))
    keys, code = np.unique(numbers[0] << 48 | numbers[1] << 32 | numbers[2], return_inverse=True)
    resource = np.full(len(operations), -1, np.int32)
    resource[operations.kernels] = np.where((registers > 0) & (threads > 0), code, -1)
    rows = zip((keys >> 48).tolist(), (keys >> 32 & 0xFFFF).tolist(), (keys & 0xFFFFFFFF).tolist(), strict=True)
    return replace(operations, resource=resource, resources=tuple(BlockResources(*row) for row in rows))


def _find_copy_kinds(frame: Frame, lengths: list[int]) -> SmallInts:
    """Returns the code of each copy's kind in ``COPY_KINDS``, shape (operations,); 0 for other operations."""
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


def _make_launches(frame: Frame, strings: dict[int, str]) -> tuple[Launches, Bools]:
    """Returns the API calls, and the mask of the allocations that failed because no memory was left."""
    ids, codes = dense_codes(frame.pop("name"))
    names = tuple(strings.get(i, "") for i in ids.tolist())
    kinds = [
        next((kind for kind, starts in CALL_PREFIXES.items() if name.startswith(starts)), OTHER_CALL) for name in names
    ]
    call = np.array([*kinds, OTHER_CALL], np.int8)[codes]
    result = frame.pop("result")
    call[(call == LAUNCH) & (result != 0)] = OTHER_CALL  # a failed call launches nothing
    launches = Launches(frame["start"], frame["end"], frame["thread"], frame["correlation"], call, codes, names)
    return launches, (call == ALLOCATE) & (result == _OUT_OF_MEMORY_CODE)


# ``nsys --pytorch=autograd-nvtx`` and PyTorch's ``emit_nvtx`` annotate the names of operators with the sequence number
# of the autograd node: ``aten::mm, seq = 9157, op_id = 91984``. If shapes are recorded, the sizes of the operator's
# inputs follow: ``sizes = [[8192, 768], [768, 3072]], input_op_ids = [(91979,0), (657,0)]``.
ATEN_PREFIX = "aten::"
_ANNOTATION = re.compile(r",\s*(?:seq|op_id|sizes|input_op_ids)\s*=.*")
_SIZES = re.compile(r",\s*sizes\s*=\s*(\[.*?\])\s*(?:,\s*input_op_ids|$)")
_SEQUENCE = re.compile(r",\s*seq\s*=\s*(\d{1,18})(?:\D|$)", re.ASCII)


def _make_ranges(frame: Frame, strings: Mapping[int, str]) -> tuple[Ranges, Ints, Operators]:
    """Returns the ranges, the positions of PyTorch's operators among them, and these operators.

    A range is an operator if its name begins with ``aten::``, or if a range of this name is annotated. The range of a
    linear layer of a serving engine is also the operator ``LINEAR_LAYER``.
    """
    text_ids = frame["text_id"]
    used_ids, id_codes = dense_codes(text_ids)
    recorded_texts = [*(strings.get(i, "") for i in used_ids.tolist()), *frame["text"].to_pylist()]
    text_code = np.where(text_ids >= 0, id_codes, len(used_ids) + np.arange(len(text_ids)))
    texts_without_arguments = [_ANNOTATION.sub("", text) if "=" in text else text for text in recorded_texts]
    annotated = {
        name for name, text in zip(texts_without_arguments, recorded_texts, strict=True) if len(name) < len(text)
    }
    names, codes = distinct_texts(
        [normalize_module_name(name) if name.startswith("{") else name for name in texts_without_arguments]
    )
    ranges = Ranges(frame["start"], frame["end"], frame["thread"], codes[text_code], names)
    is_operator_name = np.array([name in annotated or name.startswith(ATEN_PREFIX) for name in names], np.bool_)
    layers = [describe_linear_layer(text) if text.startswith("{") else "" for text in recorded_texts]
    is_layer = np.array([*map(bool, layers)], np.bool_)[text_code]
    index = np.flatnonzero(is_operator_name[ranges.name] | is_layer)
    matches = (_SEQUENCE.search(text) if "=" in text else None for text in recorded_texts)
    sequence = np.array([int(match[1]) if match else -1 for match in matches], np.int64)[text_code[index]]
    operand_sizes = [match[1] if "sizes" in text and (match := _SIZES.search(text)) else "" for text in recorded_texts]
    argument_texts, arguments = distinct_texts(  # the empty text comes first
        [f"[{text}]" if text else layer for text, layer in zip(operand_sizes, layers, strict=True)]
    )
    operators = Operators(
        ranges.start[index],
        ranges.end[index],
        ranges.thread[index],
        np.where(is_layer, len(names), ranges.name)[index],
        (*names, LINEAR_LAYER),
        sequence=sequence,
        forward_thread=np.zeros(len(index), np.int32),
        arguments=np.where(arguments > 0, arguments, -1)[text_code[index]],
        argument_texts=argument_texts,
    )
    return ranges, index, operators


def _make_operators(frame: Frame, strings: Mapping[int, str]) -> Operators:
    """Returns the operators that PyTorch's profiler recorded."""
    names, name = dense_codes(frame["name"])
    described, arguments = dense_codes(frame["arguments"])  # the first ID is -1, for a missing text
    texts = tuple(strings.get(i, "") for i in described.tolist())
    return Operators(
        start=frame["start"],
        end=frame["end"],
        thread=frame["thread"],
        name=name.astype(np.int64),
        names=tuple(strings.get(i, "") for i in names.tolist()),
        sequence=np.maximum(frame["sequence"], -1),
        forward_thread=frame["forward_thread"],
        arguments=np.where(np.array([*map(bool, texts), False])[arguments], arguments, -1),
        argument_texts=texts,
    )


def _make_profiler_events(tables: Sequence[Frame], strings: Mapping[int, str]) -> Ranges:
    """Returns the events of the profiler itself that have a start and a later end."""
    names = ("start", "end", "thread", "name")
    start, end, thread, ids = (np.concatenate([table[name] for table in tables]) for name in names)
    used_ids, codes = dense_codes(ids)
    events = Ranges(start, end, thread, codes.astype(np.int64), tuple(strings.get(i, "") for i in used_ids.tolist()))
    return events.select((start != schema.NO_TIME) & (end > start))


#: Matches the symbol of a PyTorch function that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), and the
#: symbol of an operator.
_TORCH_SYMBOL = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def _read_torch_callers(
    reader: Reader, strings: Mapping[int, str], launches: Launches
) -> Mapping[tuple[int, int], str]:
    """Returns the outermost PyTorch operator or function around each API call, by process and correlation ID.

    The function is taken from the backtrace of the call, or from a CPU sample during the call. A call without a PyTorch
    function in its backtrace has no entry. ``strings`` are the export's strings by ID.
    """
    #: One entry for CPU samples and one for backtraces of API calls. Each entry has the thread, the correlation ID and
    #: the backtrace ID of each call, and the outermost PyTorch function by backtrace ID.
    sources: list[tuple[Ints, Ints, Ints, dict[int, str]]] = []
    if functions := _outermost_functions(reader, schema.SAMPLED_CHAINS, strings):
        samples = reader.read(schema.SAMPLES)
        chain, thread, time = (samples[name] for name in ("id", "thread", "start"))
        # Calls and samples are sorted by thread and start. The samples during a call then follow this call and precede
        # the next call.
        order = np.lexsort((np.append(time, launches.start), np.append(thread, launches.thread)))
        last_call = np.maximum.accumulate(np.where(order < len(time), -1, np.arange(len(order))))
        sample_positions = np.flatnonzero((order < len(time)) & (last_call >= 0))
        sample, call = order[sample_positions], order[last_call[sample_positions]] - len(time)
        is_during_call = (launches.thread[call] == thread[sample]) & (launches.end[call] > time[sample])
        sample, call = sample[is_during_call], call[is_during_call]
        sources.append((thread[sample], launches.correlation[call], chain[sample], functions))
    if functions := _outermost_functions(reader, schema.CALLCHAINS, strings):
        calls = reader.read(schema.CHAINED_CALLS)
        sources.append((calls["thread"], calls["correlation"], calls["chain"], functions))
    return {
        (thread_id & PROCESS_MASK, correlation_id): functions[chain_id]
        for thread, correlation, chain, functions in sources
        for thread_id, correlation_id, chain_id in zip(
            thread.tolist(), correlation.tolist(), chain.tolist(), strict=True
        )
        if chain_id in functions
    }


def _read_off_cpu(reader: Reader) -> Mapping[int, tuple[Ints, Ints]]:
    """Returns the starts and ends (ns) of the periods in which each thread had no CPU, by global thread ID."""
    switches = reader.read(schema.SWITCHES)
    order = np.lexsort((switches["start"], switches["thread"]))
    start, thread, is_in = (switches[name][order] for name in ("start", "thread", "is_in"))
    switched_off = np.flatnonzero((is_in[:-1] == 0) & (is_in[1:] != 0) & (thread[:-1] == thread[1:]))
    threads, first_of_thread = np.unique(thread[switched_off], return_index=True)
    off_of_threads = zip(threads.tolist(), np.split(switched_off, first_of_thread[1:]), strict=False)
    return {thread_id: (start[rows], start[rows + 1]) for thread_id, rows in off_of_threads}


def _outermost_functions(reader: Reader, table: schema.Table, strings: Mapping[int, str]) -> dict[int, str]:
    """Returns the outermost PyTorch function in each backtrace of a table, by backtrace ID."""
    name = reader.name_of(table)
    if not name or not reader.filter_of(table, name):
        return {}
    chains = sorted(iterate_rows(reader.read(table)), key=lambda row: row[2])  # sorted by depth in the stack
    match_of_chain = {chain: _TORCH_SYMBOL.search(strings.get(symbol, "")) for chain, symbol, _ in chains}
    return {chain: match["function"] or match["operator"] for chain, match in match_of_chain.items() if match}
