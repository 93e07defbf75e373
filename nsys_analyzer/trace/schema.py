"""The tables and columns of an nsys export that the package reads, with every name they have had.

A new schema version costs a row here. Nothing is guaranteed to be there: nsys creates tables lazily and
renames columns between versions, so each column says what stands in where it is absent or NULL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: How many of one unit of time are in another. Times are integers in ns until they are shown.
NS_PER_US, NS_PER_MS, NS_PER_S, US_PER_MS, MS_PER_S = 1e3, 1e6, 1e9, 1e3, 1e3
#: Stands for a time that the file does not hold, such as the end of a range that has none.
NO_TIME = -(2**62)


@dataclass(frozen=True)
class Column:
    """One column: our name, its names in the file (newest first), and the value where it is absent or NULL.

    The integers of a ``narrow`` one are kept in 32 bits.
    """

    name: str
    aliases: tuple[str, ...]
    default: int | str | bytes
    doc: str
    narrow: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds texts or bytes, not integers."""
        return isinstance(self.default, str | bytes)


@dataclass(frozen=True)
class Filter:
    """The rows worth reading: those whose column has one of some values, or that match one of some globs.

    In force where the file has the column. The globs of ``of_strings`` are for the string that the column holds the ID
    of; with ``without`` such rows are left out, and the others read. A row without a value is never read.
    """

    column: str
    values: tuple[int | str, ...] = ()
    globs: tuple[str, ...] = ()
    of_strings: bool = False
    without: bool = False

    @property
    def table(self) -> str:
        """Another table that it needs, empty for none."""
        return "StringIds" if self.of_strings else ""

    @property
    def predicate(self) -> str:
        """The test as SQL, behind the column's name."""
        if self.of_strings:
            matching = " OR ".join(f"value GLOB '{glob}'" for glob in self.globs)
            return f"{'NOT ' if self.without else ''}IN (SELECT id FROM {self.table} WHERE {matching})"
        listed = ", ".join(f"'{value}'" if isinstance(value, str) else str(value) for value in self.values)
        return " OR ".join([f"IN ({listed})", *(f"{self.column} GLOB '{glob}'" for glob in self.globs)])


@dataclass(frozen=True)
class Table:
    """One table: its names in the file, its columns, and the ``--trace`` option that records it.

    A name behind the first counts only with the required columns: some names were given to another table later.
    What is read ``aside`` is another look at some columns or rows of a table, for one question.
    """

    key: str
    aliases: tuple[str, ...]
    columns: tuple[Column, ...]
    required: tuple[str, ...] = ()
    filter: Filter | None = None
    trace_option: str = "cuda"
    aside: bool = False


def _column(name: str, *aliases: str, default: int | str | bytes = 0, doc: str, narrow: bool = False) -> Column:
    return Column(name, aliases or (name,), default, doc, narrow)


_START = _column("start", default=NO_TIME, doc="start, ns since the start of the session")
_END = _column("end", default=NO_TIME, doc="end, ns since the start of the session")
_GPU = (
    _START,
    _END,
    _column("device", "deviceId", narrow=True, doc="CUDA device ordinal in its process"),
    _column("context", "contextId", narrow=True, doc="CUDA context ID: streams are numbered in each"),
    _column("stream", "streamId", doc="CUDA stream ID; an address on AMD's GPUs"),
    _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
    _column("process", "globalPid", doc="global process ID (low 24 bits zero)"),
    _column("graph_node", "graphNodeId", doc="CUDA graph node ID, 0 outside graph replays"),
)
_PROPERTIES = (_column("name", default="", doc="property"), _column("value", default="", doc="its value"))

KERNEL = Table(
    "kernel",
    ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"),
    (
        *_GPU,
        _column("name", "demangledName", "shortName", doc="StringIds ID of the kernel's name"),
        _column("continues", narrow=True, doc="1 for a later part of an operator on the CPU that calls others; ours"),
        _column("grid_x", "gridX", narrow=True, doc="thread blocks along x, 0 where they are not known"),
        _column("grid_y", "gridY", narrow=True, doc="thread blocks along y"),
        _column("grid_z", "gridZ", narrow=True, doc="thread blocks along z"),
    ),
    ("start", "end", "name"),
)
_BYTES = _column("bytes", doc="bytes copied or filled")
MEMCPY = Table(
    "memcpy",
    ("CUPTI_ACTIVITY_KIND_MEMCPY",),
    (
        *_GPU,
        _BYTES,
        _column("direction", "copyKind", doc="1 host to device, 2 device to host, 8 inside a device, 10 to another"),
        _column("source", "srcKind", default=7, doc="memory it is read from: 0 pageable, 1 pinned; 7 unknown"),
        _column("target", "dstKind", default=7, doc="memory it is written to, as the source"),
    ),
    ("start", "end"),
)
MEMSET = Table("memset", ("CUPTI_ACTIVITY_KIND_MEMSET",), (*_GPU, _BYTES), ("start", "end"))
GRAPH = Table("graph", ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE",), _GPU, ("start", "end"))
#: The tables of GPU operations, in the order of ``trace.columns.KINDS``.
OPERATIONS_BY_KIND = (KERNEL, MEMCPY, MEMSET, GRAPH)
# A look-up puts no work on the GPU, and cuKernelGetName alone is nearly half of PyTorch's calls.
_NO_LOOK_UPS = Filter("nameId", globs=("cu*Get*", "hip*Get*"), of_strings=True, without=True)
RUNTIME = Table(
    "runtime",
    ("CUPTI_ACTIVITY_KIND_RUNTIME",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID"),
        _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
        _column("name", "nameId", doc="StringIds ID of the API function"),
        _column("result", "returnValue", narrow=True, doc="what the call returned, 0 for success"),
    ),
    ("start", "thread", "correlation"),
    _NO_LOOK_UPS,
)
NVTX = Table(
    "nvtx",
    ("NVTX_EVENTS",),
    (
        _START,
        _END,
        _column("kind", "eventType", default=59, doc="59/70 push-pop, 60/71 start-end; others are no ranges"),
        _column("thread", "globalTid", doc="global thread ID that opened the range"),
        _column("text_id", "textId", default=-1, doc="StringIds ID of the name"),
        _column("text", default="", doc="the name where there is no text ID"),
    ),
    ("start", "thread"),
    Filter("eventType", (59, 60, 70, 71)),
    trace_option="nvtx",
)
#: Where the parts of a binary payload of a range are.
PAYLOAD_FIELDS = Table(
    "payload_fields",
    ("NVTX_PAYLOAD_SCHEMA_ENTRIES",),
    (
        _column("schema", "schemaId", doc="ID of the payload's schema"),
        _column("type", doc="NVTX's number of the type"),
        _column("name", default="", doc="name of the field"),
        _column("offset", doc="bytes from the payload's start"),
    ),
)
#: PyTorch's operators, as our reader of its profiler's traces gives them; nsys writes them among the NVTX ranges.
OPERATORS = Table(
    "operators",
    ("TORCH_OPERATOR_EVENTS",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID that ran the operator"),
        _column("name", "nameId", doc="StringIds ID of the operator's name"),
        _column("sequence", "sequenceNumber", default=-1, doc="number of the autograd node, -1 for none"),
        _column(
            "forward_thread",
            "forwardThreadId",
            narrow=True,
            doc="PyTorch's number of the thread that made the node, or 0",
        ),
    ),
    ("start", "end", "thread", "name"),
)
#: What the profiler noted of its own work. For PyTorch's traces, our reader adds the span of the recording.
OVERHEAD = Table(
    "overhead",
    ("CUPTI_ACTIVITY_KIND_OVERHEAD",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID that was held up; in PyTorch's traces the process ID"),
        _column("name", "nameId", default=-1, doc="StringIds ID of what it did"),
    ),
    ("start", "end"),
)
PROFILER_OVERHEAD = replace(OVERHEAD, key="profiler_overhead", aliases=("PROFILER_OVERHEAD",))
GRAPH_NODES = Table(
    "graph_nodes",
    ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"),  # the latter up to nsys 2023.4; of graphs since 2024.2
    (
        _START,
        _column("thread", "globalTid", doc="global thread ID that created the node"),
        _column("graph_node", "graphNodeId", doc="CUDA graph node ID"),
        _column("original", "originalGraphNodeId", doc="the captured node this one was instantiated from, or 0"),
    ),
    ("start", "thread", "graph_node"),
)
MEMORY = Table(
    "memory",
    ("CUDA_GPU_MEMORY_USAGE_EVENTS",),
    (
        _START,
        _column("process", "globalPid", doc="global process ID"),
        _column("bytes", doc="bytes allocated or freed"),
        _column("operation", "memoryOperationType", doc="0 allocation, 1 free"),
        _column("alive", "localMemoryPoolUtilizedSize", default=-1, doc="bytes in use in its pool; -1 without a pool"),
        _column("kind", "memKind", doc="the kind of memory, by which rows are chosen"),
    ),
    # The device's memory that a program asked for, not that of its code's static variables, nor the host's.
    filter=Filter("memKind", (2, 3, 4)),
)
STRINGS = Table(
    "strings",
    ("StringIds",),
    (
        _column("id", doc="string ID"),
        _column("value", default="", doc="the string"),
    ),
    ("id", "value"),
    trace_option="cuda,nvtx",
)
THREADS = Table(
    "threads",
    ("ThreadNames",),
    (
        _column("thread", "globalTid", doc="global thread ID"),
        _column("name", "nameId", default=-1, doc="StringIds ID of the thread's name"),
    ),
    ("thread", "name"),
)
DIAGNOSTICS = Table(
    "diagnostics",
    ("DIAGNOSTIC_EVENT",),
    (
        _column("process", "globalPid", doc="global process ID the message is about"),
        _column("severity", default=1, doc="1 info, 2 warning, 3 error, 4 verbose"),
        _column("text", default="", doc="the profiler's message"),
    ),
    ("text",),
)
GPUS = Table(
    "gpus",
    # nsys 2020.4 has both, and in its TARGET_INFO_GPU neither memory nor multiprocessors.
    ("TARGET_INFO_CUDA_GPU", "TARGET_INFO_GPU"),
    (
        _column("id", "id", "deviceId", default=0, doc="GPU ID"),
        _column("name", default="", doc="GPU name"),
        _column("memory_bytes", "totalMemory", "memorySize", "globalMemorySize", doc="device memory, bytes"),
        _column("sm_count", "smCount", "smNum", "numMultiprocessors", doc="streaming multiprocessors"),
        _column("memory_bytes_per_s", "memoryBandwidth", doc="peak bandwidth of its memory, bytes/s"),
        _column("l2_bytes", "l2CacheSize", doc="L2 cache, bytes"),
    ),
    ("name",),
)
CUDA_DEVICES = Table(
    "cuda_devices",
    ("TARGET_INFO_CUDA_DEVICE",),
    (
        _column("gpu", "gpuId", doc="GPU ID"),
        _column("device", "cudaId", doc="CUDA device ordinal in its process"),
        _column("pid", doc="process ID"),
    ),
    ("gpu", "device", "pid"),
)
ENVIRONMENT = Table(
    "environment",
    ("TARGET_INFO_SYSTEM_ENV",),
    _PROPERTIES,
    ("name", "value"),
)
#: The ranks of the processes, as our reader of a PyTorch profiler's trace and a copy to share give them.
RANKS = Table(
    "ranks",
    ("PROCESS_RANKS",),
    (
        _column("process", "globalPid", doc="global process ID; 0 for the only one"),
        _column("rank", doc="rank among all processes of the run"),
        _column("world_size", "worldSize", doc="how many processes the run has, 0 where that is not known"),
    ),
    ("process", "rank"),
)
#: Calls of NCCL's functions, as a copy to share keeps them; nsys writes them among the NVTX ranges.
NCCL_CALLS = Table(
    "nccl_calls",
    ("NCCL_CALLS",),
    (
        _START,
        _column("thread", "globalTid", doc="global thread ID that made the call"),
        _column("function", default="", doc="NCCL's function"),
        _column("communicator", doc="ID of the communicator, 0 where it is not known"),
        _column("bytes", default=-1, doc="the message as NCCL counts it, of one rank; -1 where it is not known"),
        _column("peer", default=-1, doc="the other's rank in the communicator of a send or receive, or -1"),
        _column("ranks", doc="how many ranks the communicator is of, 0 where that is not known"),
    ),
    ("start", "thread", "function"),
)
EXPORT = Table(
    "export",
    ("META_DATA_EXPORT", "EXPORT_META_DATA"),
    _PROPERTIES,
    ("name", "value"),
)
SESSION = Table(
    "session",
    ("ANALYSIS_DETAILS",),
    (_column("duration", doc="from the start of the session to its end, ns"),),
)
SESSION_START = Table(
    "session_start",
    ("TARGET_INFO_SESSION_START_TIME",),
    (_column("utc", "utcEpochNs", doc="start of the session, ns since 1970 (UTC)"),),
)
#: How nsys was asked to record. The table holds every environment variable, too: the rows that are read are named.
CAPTURE = Table(
    "capture",
    ("META_DATA_CAPTURE",),
    _PROPERTIES,
    ("name", "value"),
    Filter(
        "name",
        (
            "CAPTURE_EVENT_TYPE", "CUDA_GRAPH_TRACE_OPTIONS:MODE", "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE",
        ),
    ),
)  # fmt: skip
#: The environment variables of the program that nsys launched, each as a property NAME=VALUE.
VARIABLES = Table(
    "variables", CAPTURE.aliases, _PROPERTIES, filter=Filter("name", globs=("*ENVIRONMENT_VARIABLE*",)), aside=True
)
#: What NCCL notes beside the ranges of its functions.
PAYLOADS = Table(
    "payloads",
    NVTX.aliases,
    (
        _START,
        _column("name", "textId", default=-1, doc="StringIds ID of the function"),
        _column("thread", "globalTid", doc="global thread ID that opened the range"),
        _column("json", "jsonText", default="", doc="the payload as JSON"),
        _column("json_id", "jsonTextId", default=-1, doc="StringIds ID of that JSON"),
        _column("binary", "binaryData", default=b"", doc="the payload as bytes"),
    ),
    filter=Filter("textId", globs=("nccl[A-Z]*",), of_strings=True),
    aside=True,
)
#: The frames of backtraces that are functions of PyTorch.
CALLCHAINS = Table(
    "callchains",
    ("CUDA_CALLCHAINS",),
    (
        _column("id", doc="ID of the backtrace"),
        _column("symbol", doc="StringIds ID of the function"),
        _column("depth", "stackDepth", doc="0 for the innermost frame"),
    ),
    ("id", "symbol", "depth"),
    Filter("symbol", globs=("*THP*_*(*", "*THCP*_*(*", "at::_ops::*::call*"), of_strings=True),
    aside=True,
)
SAMPLED_CHAINS = replace(CALLCHAINS, key="sampled_chains", aliases=("SAMPLING_CALLCHAINS",))
#: What nsys saw of the CPU, some thousand times a second.
SAMPLES = Table(
    "samples",
    ("COMPOSITE_EVENTS",),
    (
        _column("id", doc="ID of the sample's backtrace"),
        _START,
        _column("thread", "globalTid", doc="global thread ID that ran"),
    ),
    aside=True,
)
#: When the operating system gave a thread a CPU, and when it took it away.
SWITCHES = Table(
    "switches",
    ("SCHED_EVENTS",),
    (
        _START,
        _column("is_in", "isSchedIn", doc="1 where the thread gets a CPU, 0 where it loses it"),
        _column("thread", "globalTid", doc="global thread ID"),
    ),
    ("is_in", "thread"),
    aside=True,
)
CHAINED_CALLS = Table(
    "chained_calls",
    RUNTIME.aliases,
    (
        _column("thread", "globalTid", doc="global thread ID"),
        _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
        _column("chain", "callchainId", default=-1, doc="ID of the call's backtrace, -1 without one"),
    ),
    aside=True,
)

#: The property of an export with what ``nsys export --ts-normalize`` or ``--ts-shift`` added to each of its times, ns.
TIME_SHIFT = "EXPORT_CONFIG_TIME_SHIFT"

#: Tables that are not read, of things whose recording slows a program down by more than API calls and ranges do.
COSTLY_TABLES = {
    "OSRT_API": "calls of the operating system (osrt)",
    "COMPOSITE_EVENTS": "CPU samples",
    "CUDA_CALLCHAINS": "backtraces of API calls",
}

#: The columns of such a table in a copy to share, which keeps none of its rows.
COSTLY_MARK = ("id",)

#: A file with none of these is no nsys export: every version writes at least one.
SIGNATURE_TABLES = (*STRINGS.aliases, *EXPORT.aliases)

#: Of the files of an export that is a folder, one for each table.
TABLE_ENDINGS = (".parquet", ".arrow")

#: Every table here, by each name that it has had.
TABLES = {
    name: table
    for table in tuple(globals().values())
    if isinstance(table, Table) and not table.aside
    for name in table.aliases
}

#: Every name of a table of which anything is read.
TABLE_ALIASES = frozenset(
    name for table in tuple(globals().values()) if isinstance(table, Table) for name in table.aliases
)
