"""Answers how a server processes requests: its steps by kind, their parts, and the latencies of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsys_analyzer.analysis.kernels.class_rules import MATMUL
from nsys_analyzer.analysis.steps.serving import Quantiles, Serving, StepKind
from nsys_analyzer.analysis.steps.step import IdleTime, KernelTime
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.peaks import Peaks, find_peaks
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Answer, Block, Details, Field, Listing, Paragraph, Table, make_table
from nsys_analyzer.report.units import (
    INTER_TOKEN_LATENCY,
    LEAST_READ_DATA,
    TOKENS_PER_S,
    TTFT,
    format_count,
    format_ms,
    format_number,
    rounded,
    rounded_percent,
)
from nsys_analyzer.text import StrOrText, join_names, phrase

_DEFINITIONS = phrase(
    "A *prefill* step processes the tokens of prompts, a *decode* step makes one token for each sequence of its batch, "
    "and a *mixed* step does both. A step lasts from its start to the start of the next step. *tokens/s* is the number "
    "of new tokens divided by the time of the steps. *Between steps* is the time from the end of a step's range to the "
    "start of the next step's range, in which the CPU runs the scheduler and any other work of the program."
)
#: How to let decode proceed beside prefill, and how to enlarge the batch, with the options of the engines.
_REMEDIES = (
    "# decode beside prefill: vLLM --enable-chunked-prefill; SGLang --enable-mixed-chunk --chunked-prefill-size 2048;",
    "# TensorRT-LLM enable_chunked_prefill: true; or prefill on other GPUs (disaggregated)",
    "# to check: serve prompts of one token; if the inter-token latency stays as uneven, prefill is not the cause",
    "# a larger batch: vLLM --max-num-seqs; SGLang --max-running-requests; TensorRT-LLM max_batch_size",
    "# to check: serve twice as many requests at once; if tokens/s hardly rise, matmuls do not limit the step",
)
#: A batch counts as small if it is at most this share of the smallest batch with which matmuls are compute-bound.
_SMALL_BATCH_SHARE = 0.25
#: Doubling a small batch lengthens matmuls by at most this share.
_MAX_MATMUL_GROWTH = 0.4
_HEADS_ASSUMPTION = (
    " The bytes assume as many key and value heads as query heads. With fewer (GQA, MQA), they are an upper bound."
)
#: The maximum number of rows of idle time for each kind of step, and the minimum share of a step for a row.
_MAX_IDLE_ROWS, _MIN_IDLE_SHARE = 4, 0.01


def tabulate_step_kinds(capture: CaptureSummary) -> Iterator[Table]:
    """Yields a table of a server's steps by kind, or nothing for other programs."""
    serving = capture.serving
    if serving is None:
        return
    suffix = " (inferred)" if serving.inferred else ""
    fields: tuple[Field[StepKind], ...] = (
        Field("kind", "text", lambda kind: f"{kind.kind}{suffix}"),
        Field("steps", "count", lambda kind: kind.steps),
        Field("batch", "count", lambda kind: kind.batch),
        Field("tokens", "count", lambda kind: kind.tokens),
        Field("ms", "ms", lambda kind: kind.length_ms.median),
        Field("p95", "ms", lambda kind: kind.length_ms.p95),
        Field("operators" if capture.on_cpu else "GPU busy", "percent", lambda kind: kind.busy_share),
        Field("between steps", "ms", lambda kind: kind.between_ms),
        Field(TOKENS_PER_S, "count", lambda kind: kind.tokens_per_s),
    )
    caption = "Steps by kind under the profiler; times are medians in ms:"
    yield make_table(fields, serving.kinds, caption, capture=capture.title)


def answer_serving(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields the steps of each kind, the latencies of requests, and the parts of a step of each kind."""
    serving, title = capture.serving, capture.title
    if serving is None:
        return
    subject = "operators run" if capture.on_cpu else "the GPU is busy"
    yield Answer(" ".join(_describe_step_kind(kind, subject) for kind in serving.kinds), title)
    larger_batch = next(
        filter(None, (_describe_larger_batch(kind, find_peaks(capture.gpu)) for kind in serving.kinds)), ""
    )
    for text in (*_describe_latencies(serving), *map(_describe_least_time, serving.kinds), larger_batch):
        if text:
            yield Paragraph(text, title)
    if serving.held_up or larger_batch:
        yield Details("What to change", (Listing(_REMEDIES, "python", title),), title)
    part_fields: tuple[Field[tuple[StepKind, str, float]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("part", "text", lambda row: row[1]),
        Field("ms", "ms", lambda row: row[2]),
        Field("share", "percent", lambda row: row[2] / row[0].total_ms if row[0].total_ms else None),
    )
    idle_fields: tuple[Field[tuple[StepKind, IdleTime]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("cause", "text", lambda row: CAUSE_WORDS[row[1].cause]),
        Field("range", "code", lambda row: row[1].range),
        Field("API call", "code", lambda row: row[1].api),
        Field("ms", "ms", lambda row: row[1].ms),
    )
    kernel_fields: tuple[Field[tuple[StepKind, KernelTime]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("top kernel", "code", lambda row: labels.get(row[1].name, row[1].name) or "in CUDA graphs, and fills"),
        Field("class", "text", lambda row: row[1].kernel_class),
        Field("launches", "count", lambda row: row[1].launches),
        Field("ms", "ms", lambda row: row[1].ms),
    )
    idle_rows = [(kind, idle) for kind in serving.kinds for idle in kind.idle_by_cause[:_MAX_IDLE_ROWS]]
    idle_rows = [(kind, idle) for kind, idle in idle_rows if idle.ms >= _MIN_IDLE_SHARE * kind.total_ms]
    part_rows = []
    for kind in serving.kinds:
        step_parts = [(row.kernel_class, row.ms) for row in kind.classes]
        step_parts += [
            ("exposed copies", kind.exposed_copy_ms),
            ("exposed communication", kind.exposed_communication_ms),
        ]
        part_rows += [(kind, name, ms) for name, ms in (*step_parts, ("idle", kind.idle_ms)) if ms]
    kernel_rows = [(kind, kernel) for kind in serving.kinds for kernel in kind.kernels]
    tables = (
        make_table(part_fields, part_rows, capture=title, names=2),
        make_table(idle_fields, idle_rows, capture=title, names=4),
        make_table(kernel_fields, kernel_rows, capture=title, names=3),
    )
    yield Details(
        "The parts of a step of each kind, and the causes of idle time",
        (Paragraph(_DEFINITIONS, title), *(table for table in tables if table.rows)),
        title,
    )


def _describe_step_kind(kind: StepKind, subject: str) -> str:
    """Returns a sentence on the steps of a kind.

    An example is "412 decode steps take 12.3 ms (median; 95th percentile 14 ms) with a batch of 8 and 650 tokens/s, and
    the GPU is busy 45 % of the time."
    """
    details = [f"a batch of {format_number(kind.batch, 'count')}"] if kind.batch is not None else []
    if kind.tokens not in (None, kind.batch):
        details.append(f"{format_number(kind.tokens, 'count')} tokens")
    if kind.tokens_per_s:
        details.append(f"{rounded(kind.tokens_per_s)} {TOKENS_PER_S}")
    steps = format_count(kind.steps, f"{kind.kind} step")
    text = f"{steps} {'takes' if kind.steps == 1 else 'take'} {_format_quantiles(kind.length_ms, kind.steps)}"
    text += f" with {join_names(details)}" if details else ""
    share = kind.busy_share
    return f"{text}." if share is None else f"{text}, and {subject} {rounded_percent(share)} of the time."


def _format_quantiles(times: Quantiles, count: int) -> str:
    median = format_ms(times.median)
    return f"{median} (median; 95th percentile {format_ms(times.p95)})" if count > 1 else median


def _describe_latencies(serving: Serving) -> Iterator[StrOrText]:
    """Yields the latencies of requests, and how much prefill delays decode."""
    if requests := serving.requests:
        count = format_count(requests.count, "request")
        text = f"The {TTFT} of {count} is {_format_quantiles(requests.ttft_ms, requests.count)}"
        inter_token = requests.inter_token_ms
        yield (
            f"{text}, and the {INTER_TOKEN_LATENCY} is {_format_quantiles(inter_token, 2)}."
            if inter_token
            else f"{text}."
        )
    if delay := serving.held_up:
        yield (
            f"Of {delay.of:,} decode steps that follow another decode step, {delay.steps:,} wait for prefill, each for "
            f"{_format_quantiles(delay.wait_ms, delay.steps)}. The wait delays the next token of each sequence in the "
            f"batch, on average by {format_ms(delay.per_step_ms)} per decode step. Without the wait, the decode steps "
            "themselves are no shorter."
        )
    if serving.inferred:
        yield "No inference engine marks these steps. Prefill is inferred from the shapes of the model's inputs."


def _describe_least_time(kind: StepKind) -> StrOrText:
    """Returns how a decode step compares with reading its weights and cache once, or "" if that is unknown."""
    if kind.least_ms is None or kind.weights_bytes is None:
        return ""
    cache = f" and {format_number(kind.cache_bytes, 'bytes')} of cache" if kind.cache_bytes is not None else ""
    omission = "" if cache else " These bytes do not include the cache, whose size is unknown."
    busy_ms = kind.total_ms - kind.idle_ms
    return (
        f"A decode step reads at least {format_number(kind.weights_bytes, 'bytes')} of weights{cache} "
        f"({LEAST_READ_DATA}), which takes {format_ms(kind.least_ms)} at the memory's peak bandwidth.{omission} The "
        f"step takes {rounded(kind.length_ms.median / kind.least_ms)} times as long, and the GPU is busy for "
        f"{rounded(busy_ms / kind.least_ms)} times as long.{'' if kind.counted else _HEADS_ASSUMPTION}"
    )


def _describe_larger_batch(kind: StepKind, peaks: Peaks | None) -> str:
    """Returns how decode with a small batch profits from twice the batch, or "" for other steps."""
    matmul_ms = sum(row.ms for row in kind.classes if row.kernel_class == MATMUL)
    # For each sequence, a weight of two bytes takes two FLOPs.
    balanced_batch = peaks.flops_per_s["bf16"] / peaks.bytes_per_s if peaks else 0.0
    is_small = kind.batch and kind.batch <= _SMALL_BATCH_SHARE * balanced_batch
    if kind.kind != "decode" or not kind.batch or not matmul_ms or not is_small:
        return ""
    other_busy_ms = kind.total_ms - kind.idle_ms - matmul_ms
    max_ratio = 1 + (_MAX_MATMUL_GROWTH * matmul_ms + other_busy_ms) / kind.total_ms
    growth = f"matmuls up to {rounded(1 + _MAX_MATMUL_GROWTH)} times, other GPU work up to 2 times"
    return (
        f"Decode's batch of {format_number(kind.batch, 'count')} is small. Matmuls read all weights for any batch, and "
        f"are memory-bound on this GPU below a batch of about {rounded(balanced_batch)} (bf16). A step of twice the "
        f"batch takes 1 to {max_ratio:.2g} times as long ({growth}, and equal idle time). So {TOKENS_PER_S} grow by a "
        f"factor of {2 / max_ratio:.2g} to 2, and the {INTER_TOKEN_LATENCY} grows with the step."
    )
