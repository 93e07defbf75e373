"""Declares the tables and columns of an nsys export that the package reads, with their names in all versions of nsys.

If a version of nsys renames a table or a column, the new name becomes an alias here. nsys creates tables only when they
have rows, so any table or column may be missing. Each column declares the value that replaces a missing or NULL value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Conversion factors between units of time. Times are integers in ns until they are shown.
NS_PER_US, NS_PER_MS, NS_PER_S, US_PER_MS, MS_PER_S = 1e3, 1e6, 1e9, 1e3, 1e3
#: The value of a time that is not in the file, such as the end of a range that was never closed.
NO_TIME = -(2**62)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the package's name for the column.
        aliases: the names of the column in files, newest first.
        default: the value that replaces a missing or NULL value.
        doc: the meaning and the unit of the values.
        narrow: whether the integers are stored in 32 bits.
    """

    name: str
    aliases: tuple[str, ...]
    default: int | str | bytes
    doc: str
    narrow: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the column contains texts or bytes instead of integers."""
        return isinstance(self.default, str | bytes)


@dataclass(frozen=True)
class Filter:
    """Selects the rows of a table to read, by the values of a column.

    Without that column in the file, all rows are read. Otherwise, rows without a value in the column are not read.

    Attributes:
        column: the column that is tested.
        values: values that select a row.
        globs: patterns that select a row.
        of_strings: whether the column contains string IDs, so that the patterns apply to the strings.
        excludes: whether a pattern excludes the rows that match it, instead of selecting them.
    """

    column: str
    values: tuple[int | str, ...] = ()
    globs: tuple[str, ...] = ()
    of_strings: bool = False
    excludes: bool = False

    @property
    def predicate(self) -> str:
        """The SQL condition that follows the column's name."""
        if self.of_strings:
            condition = " OR ".join(f"value GLOB '{glob}'" for glob in self.globs)
            return f"{'NOT ' if self.excludes else ''}IN (SELECT id FROM StringIds WHERE {condition})"
        values = ", ".join(f"'{value}'" if isinstance(value, str) else str(value) for value in self.values)
        return " OR ".join([f"IN ({values})", *(f"{self.column} GLOB '{glob}'" for glob in self.globs)])


@dataclass(frozen=True)
class Table:
    """A table of an export.

    Attributes:
        key: the package's name for the table.
        aliases: the names of the table in files, newest first. An older name is used only if that table has the
            required columns, because newer versions of nsys use some of these names for other tables.
        columns: the columns that are read.
        required: names of the columns without which the table cannot be read.
        filter: the rows to read; None for all rows.
        trace_option: the value of nsys's ``--trace`` option that makes nsys record the table.
        is_read_on_demand: whether only the function that needs the table reads it. It is not among ``TABLES``, so it is
            not read with the other tables and not copied by ``share``.
    """

    key: str
    aliases: tuple[str, ...]
    columns: tuple[Column, ...]
    required: tuple[str, ...] = ()
    filter: Filter | None = None
    trace_option: str = "cuda"
    is_read_on_demand: bool = False


def _column(name: str, *aliases: str, default: int | str | bytes = 0, doc: str, narrow: bool = False) -> Column:
    return Column(name, aliases or (name,), default, doc, narrow)


_START = _column("start", default=NO_TIME, doc="start, ns since the start of the session")
_END = _column("end", default=NO_TIME, doc="end, ns since the start of the session")
#: The columns of every table of GPU operations.
_OPERATION_COLUMNS = (
    _START,
    _END,
    _column("device", "deviceId", narrow=True, doc="CUDA device ordinal in its process"),
    _column("context", "contextId", narrow=True, doc="CUDA context ID; stream IDs are unique only within a context"),
    _column("stream", "streamId", doc="CUDA stream ID; an address on AMD's GPUs"),
    _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
    _column("process", "globalPid", doc="global process ID (low 24 bits zero)"),
    _column("graph_node", "graphNodeId", doc="CUDA graph node ID, 0 outside graph replays"),
)
#: The columns of tables of properties.
_PROPERTY_COLUMNS = (_column("name", default="", doc="property"), _column("value", default="", doc="its value"))

KERNEL = Table(
    "kernel",
    ("CUPTI_ACTIVITY_KIND_KERNEL",),
    (
        *_OPERATION_COLUMNS,
        _column("name", "demangledName", "shortName", doc="StringIds ID of the kernel's name"),
        _column(
            "continues",
            narrow=True,
            doc="1 for a later part of an operator on the CPU that calls others; 0 in nsys exports",
        ),
        _column("grid_x", "gridX", narrow=True, doc="thread blocks along x, 0 if unknown"),
        _column("grid_y", "gridY", narrow=True, doc="thread blocks along y"),
        _column("grid_z", "gridZ", narrow=True, doc="thread blocks along z"),
    ),
    ("start", "end", "name"),
)
#: What a block of each kernel occupies. The rows are those of ``KERNEL``, in the same order.
KERNEL_RESOURCES = Table(
    "kernel_resources",
    KERNEL.aliases,
    (
        _column("registers", "registersPerThread", narrow=True, doc="registers of a thread, 0 if unknown"),
        _column("static_bytes", "staticSharedMemory", narrow=True, doc="static shared memory of a block, bytes"),
        _column("dynamic_bytes", "dynamicSharedMemory", narrow=True, doc="dynamic shared memory of a block, bytes"),
        _column("block_x", "blockX", narrow=True, doc="threads of a block along x, 0 if unknown"),
        _column("block_y", "blockY", narrow=True, doc="threads of a block along y"),
        _column("block_z", "blockZ", narrow=True, doc="threads of a block along z"),
    ),
    is_read_on_demand=True,
)
_BYTES = _column("bytes", doc="bytes copied or set")
MEMCPY = Table(
    "memcpy",
    ("CUPTI_ACTIVITY_KIND_MEMCPY",),
    (
        *_OPERATION_COLUMNS,
        _BYTES,
        _column("direction", "copyKind", doc="1 host to device, 2 device to host, 8 on a device, 10 between devices"),
        _column("source", "srcKind", default=7, doc="kind of the source memory: 0 pageable, 1 pinned, 7 unknown"),
        _column("target", "dstKind", default=7, doc="kind of the destination memory, coded like the source"),
    ),
    ("start", "end"),
)
MEMSET = Table("memset", ("CUPTI_ACTIVITY_KIND_MEMSET",), (*_OPERATION_COLUMNS, _BYTES), ("start", "end"))
GRAPH = Table("graph", ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE",), _OPERATION_COLUMNS, ("start", "end"))
#: The tables of GPU operations, in the order of ``trace.columns.OPERATION_KINDS``.
OPERATIONS_BY_KIND = (KERNEL, MEMCPY, MEMSET, GRAPH)
#: Excludes API functions that only query something. They start no GPU work, and cuKernelGetName alone makes up nearly
#: half of PyTorch's calls.
_QUERY_CALLS_FILTER = Filter("nameId", globs=("cu*Get*", "hip*Get*"), of_strings=True, excludes=True)
RUNTIME = Table(
    "runtime",
    ("CUPTI_ACTIVITY_KIND_RUNTIME",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID"),
        _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
        _column("name", "nameId", doc="StringIds ID of the API function"),
        _column("result", "returnValue", narrow=True, doc="return value of the call, 0 for success"),
    ),
    ("start", "thread", "correlation"),
    _QUERY_CALLS_FILTER,
)
#: The kinds of NVTX events (``eventType``) that are ranges.
PUSH_POP_KINDS, START_END_KINDS = (59, 70), (60, 71)
NVTX = Table(
    "nvtx",
    ("NVTX_EVENTS",),
    (
        _START,
        _END,
        _column("kind", "eventType", default=59, doc="59 and 70 push-pop, 60 and 71 start-end; others are not ranges"),
        _column("thread", "globalTid", doc="global thread ID that opened the range"),
        _column("text_id", "textId", default=-1, doc="StringIds ID of the name"),
        _column("text", default="", doc="the name if there is no text ID"),
    ),
    ("start", "thread"),
    Filter("eventType", (*PUSH_POP_KINDS, *START_END_KINDS)),
    trace_option="nvtx",
)
#: The layout of the binary payloads of ranges.
PAYLOAD_FIELDS = Table(
    "payload_fields",
    ("NVTX_PAYLOAD_SCHEMA_ENTRIES",),
    (
        _column("schema", "schemaId", doc="ID of the payload's schema"),
        _column("type", doc="NVTX's code of the field's type"),
        _column("name", default="", doc="name of the field"),
        _column("offset", doc="bytes from the start of the payload"),
    ),
)
#: PyTorch's operators in traces of PyTorch's profiler. In nsys exports, the operators are NVTX ranges.
OPERATORS = Table(
    "operators",
    ("TORCH_OPERATOR_EVENTS",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID that ran the operator"),
        _column("name", "nameId", doc="StringIds ID of the operator's name"),
        _column("sequence", "sequenceNumber", default=-1, doc="sequence number of the autograd node, -1 for none"),
        _column(
            "forward_thread",
            "forwardThreadId",
            narrow=True,
            doc="PyTorch's number of the thread that created the node, or 0",
        ),
        _column(
            "arguments",
            "argumentsId",
            default=-1,
            narrow=True,
            doc="StringIds ID of the shapes, types, strides and values of the arguments as JSON, -1 for none",
        ),
    ),
    ("start", "end", "thread", "name"),
)
#: The overhead of the profiler itself. In traces of PyTorch's profiler, the table also contains the span of the
#: recording.
OVERHEAD = Table(
    "overhead",
    ("CUPTI_ACTIVITY_KIND_OVERHEAD",),
    (
        _START,
        _END,
        _column("thread", "globalTid", doc="global thread ID that was delayed; in PyTorch's traces the process ID"),
        _column("name", "nameId", default=-1, doc="StringIds ID of the activity's name"),
    ),
    ("start", "end"),
)
PROFILER_OVERHEAD = replace(OVERHEAD, key="profiler_overhead", aliases=("PROFILER_OVERHEAD",))
GRAPH_NODES = Table(
    "graph_nodes",
    # nsys up to 2023.4 writes graph nodes to CUDA_GRAPH_EVENTS. Since 2024.2, that table contains whole graphs.
    ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"),
    (
        _START,
        _column("thread", "globalTid", doc="global thread ID that created the node"),
        _column("graph_node", "graphNodeId", doc="CUDA graph node ID"),
        _column("original", "originalGraphNodeId", doc="ID of the captured node it was instantiated from, or 0"),
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
        _column("kind", "memKind", doc="kind of memory, used by the filter"),
    ),
    # Selects device memory that the program allocates. The other kinds are static variables and host memory.
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
    ("TARGET_INFO_GPU",),
    (
        _column("id", doc="GPU ID"),
        _column("name", default="", doc="GPU name"),
        _column("memory_bytes", "totalMemory", doc="device memory, bytes"),
        _column("sm_count", "smCount", doc="streaming multiprocessors"),
        _column("memory_bytes_per_s", "memoryBandwidth", doc="peak bandwidth of its memory, bytes/s"),
        _column("l2_bytes", "l2CacheSize", doc="L2 cache, bytes"),
        _column("compute_capability", "computeMajor", doc="major version of the compute capability"),
        _column("registers_per_sm", "maxRegistersPerSm", doc="registers of a multiprocessor"),
        _column("shared_bytes_per_sm", "maxShmemPerSm", doc="shared memory of a multiprocessor, bytes"),
        _column("warps_per_sm", "maxWarpsPerSm", doc="warps that a multiprocessor runs at once"),
        _column("blocks_per_sm", "maxBlocksPerSm", doc="blocks that a multiprocessor runs at once"),
        _column("clock_hz", "clockRate", doc="highest clock of the multiprocessors, Hz"),
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
    _PROPERTY_COLUMNS,
    ("name", "value"),
)
#: The ranks of the processes, in traces of PyTorch's profiler and in shared copies.
RANKS = Table(
    "ranks",
    ("PROCESS_RANKS",),
    (
        _column("process", "globalPid", doc="global process ID; 0 for the only process"),
        _column("rank", doc="rank among all processes of the run"),
        _column("world_size", "worldSize", doc="number of processes of the run, 0 if unknown"),
    ),
    ("process", "rank"),
)
#: Calls of NCCL, in traces of PyTorch's profiler and in shared copies. In nsys exports, the calls are NVTX ranges.
NCCL_CALLS = Table(
    "nccl_calls",
    ("NCCL_CALLS",),
    (
        _START,
        _column("thread", "globalTid", doc="global thread ID that made the call"),
        _column("function", default="", doc="NCCL's function"),
        _column("communicator", doc="ID of the communicator, 0 if unknown"),
        _column("bytes", default=-1, doc="message size of one rank, as NCCL counts it; -1 if unknown"),
        _column("peer", default=-1, doc="peer's rank in the communicator, for a send or receive; else -1"),
        _column("ranks", doc="number of ranks in the communicator, 0 if unknown"),
    ),
    ("start", "thread", "function"),
)
EXPORT = Table(
    "export",
    ("META_DATA_EXPORT", "EXPORT_META_DATA"),
    _PROPERTY_COLUMNS,
    ("name", "value"),
)
SESSION = Table(
    "session",
    ("ANALYSIS_DETAILS",),
    (_column("duration", doc="duration of the session, ns"),),
)
SESSION_START = Table(
    "session_start",
    ("TARGET_INFO_SESSION_START_TIME",),
    (_column("utc", "utcEpochNs", doc="start of the session, ns since 1970 (UTC)"),),
)
#: Options with which nsys recorded. The filter lists them, because the table also contains all environment variables.
CAPTURE = Table(
    "capture",
    ("META_DATA_CAPTURE",),
    _PROPERTY_COLUMNS,
    ("name", "value"),
    Filter(
        "name",
        (
            "CAPTURE_EVENT_TYPE", "CUDA_GRAPH_TRACE_OPTIONS:MODE", "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE",
        ),
    ),
)  # fmt: skip
#: The environment variables of the program that nsys launched. Each is a property whose value is NAME=VALUE.
VARIABLES = Table(
    "variables",
    CAPTURE.aliases,
    _PROPERTY_COLUMNS,
    filter=Filter("name", globs=("*ENVIRONMENT_VARIABLE*",)),
    is_read_on_demand=True,
)
#: The payloads that NCCL attaches to the ranges of its functions.
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
    is_read_on_demand=True,
)
#: The PyTorch functions in the backtraces of API calls.
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
    is_read_on_demand=True,
)
SAMPLED_CHAINS = replace(CALLCHAINS, key="sampled_chains", aliases=("SAMPLING_CALLCHAINS",))
#: nsys's CPU samples, about a thousand per second.
SAMPLES = Table(
    "samples",
    ("COMPOSITE_EVENTS",),
    (
        _column("id", doc="ID of the sample's backtrace"),
        _START,
        _column("thread", "globalTid", doc="global thread ID that was running"),
    ),
    is_read_on_demand=True,
)
#: The context switches: at each, a thread gets a CPU from the operating system, or loses it.
SWITCHES = Table(
    "switches",
    ("SCHED_EVENTS",),
    (
        _START,
        _column("is_in", "isSchedIn", doc="1 if the thread gets a CPU, 0 if it loses it"),
        _column("thread", "globalTid", doc="global thread ID"),
    ),
    ("is_in", "thread"),
    is_read_on_demand=True,
)
#: The samples of the GPU's hardware counters. Each metric of each sample is a row.
GPU_METRICS = Table(
    "gpu_metrics",
    ("GPU_METRICS",),
    (
        _column(
            "start", "timestamp", default=NO_TIME, doc="start of the sampled time, ns; negative before the session"
        ),
        _column("source", "typeId", doc="ID of the samples of one GPU; its lowest 8 bits are the GPU ID"),
        _column("metric", "metricId", narrow=True, doc="ID of the metric, which differs between reports and GPUs"),
        _column("value", default=-1, doc="mean in the sampled time: percent of the peak, or a frequency"),
    ),
    ("start", "source", "metric", "value"),
    is_read_on_demand=True,
)
METRIC_NAMES = Table(
    "metric_names",
    ("TARGET_INFO_GPU_METRICS",),
    (
        _column("source", "typeId", doc="ID of the samples of one GPU"),
        _column("metric", "metricId", doc="ID of the metric"),
        _column("name", "metricName", default="", doc="name of the metric"),
    ),
    ("source", "metric", "name"),
    is_read_on_demand=True,
)
#: The metrics of network cards. A value is a rate in the unit of its metric.
NIC_METRICS = Table(
    "nic_metrics",
    ("NET_NIC_METRIC",),
    (
        _START,
        _END,
        _column("card", "globalId", doc="global ID of the network card"),
        _column("port", "portId", narrow=True, doc="number of the card's port"),
        _column("metrics_list", "metricsListId", doc="ID of the list of metrics"),
        _column("metric", "metricsIdx", narrow=True, doc="index of the metric in its list"),
        _column("value", doc="mean rate in the time from start to end"),
    ),
    is_read_on_demand=True,
)
NIC_METRIC_NAMES = Table(
    "nic_metric_names",
    ("TARGET_INFO_NETWORK_METRICS",),
    (
        _column("metrics_list", "metricsListId", doc="ID of the list of metrics"),
        _column("metric", "metricsIdx", doc="index of the metric in its list"),
        _column("name", default="", doc="name of the metric"),
        _column("unit", default="", doc="unit of its values"),
    ),
    is_read_on_demand=True,
)
NIC_NAMES = Table(
    "nic_names",
    ("TARGET_INFO_NIC_INFO",),
    (_column("card", "nicId", doc="ID of the network card"), _column("name", default="", doc="its name")),
    is_read_on_demand=True,
)
NIC_IDS = Table(
    "nic_ids",
    ("NIC_ID_MAP",),
    (
        _column("card", "nicId", doc="ID of the network card"),
        _column("global_id", "globalId", doc="its global ID, which its metrics have"),
    ),
    is_read_on_demand=True,
)
CHAINED_CALLS = Table(
    "chained_calls",
    RUNTIME.aliases,
    (
        _column("thread", "globalTid", doc="global thread ID"),
        _column("correlation", "correlationId", doc="correlation ID, unique within a process"),
        _column("chain", "callchainId", default=-1, doc="ID of the call's backtrace, -1 without one"),
    ),
    is_read_on_demand=True,
)

#: The property with the offset (ns) that ``nsys export --ts-normalize`` or ``--ts-shift`` added to every time.
TIME_SHIFT = "EXPORT_CONFIG_TIME_SHIFT"

#: Descriptions of the tables whose recording slows a program down more than the recording of API calls and ranges.
COSTLY_TABLES = {
    "OSRT_API": "calls of the operating system (osrt)",
    "COMPOSITE_EVENTS": "CPU samples",
    "CUDA_CALLCHAINS": "backtraces of API calls",
}

#: The columns that one of the ``COSTLY_TABLES`` has in a shared copy. The empty table shows that it was recorded.
COSTLY_MARK = ("id",)

#: The tables of which every version of nsys writes at least one. A file without any of them is not an nsys export.
SIGNATURE_TABLES = (*STRINGS.aliases, *EXPORT.aliases)

#: The suffixes of the files of a folder export, which has one file per table. The numbers are the approximate ratios of
#: the size in memory to the size on disk.
TABLE_ENDINGS = {".parquet": 4, ".arrow": 1}

#: The tables by each of their aliases, without tables that are read on demand.
TABLES = {
    name: table
    for table in tuple(globals().values())
    if isinstance(table, Table) and not table.is_read_on_demand
    for name in table.aliases
}

#: The aliases of all tables from which something is read.
TABLE_ALIASES = frozenset(
    name for table in tuple(globals().values()) if isinstance(table, Table) for name in table.aliases
)
