"""How requests are served: the steps by kind, what fills each, what lies between them, and what a request sees."""

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
    INTER_TOKEN,
    LEAST_READ,
    TOKENS_PER_S,
    TTFT,
    format_ms,
    format_number,
    rounded_percent,
)
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural

_DEFINITIONS = phrase(
    "*Prefill* is a pass over the tokens of prompts, *decode* one that makes a token for each sequence of its batch, "
    "*mixed* does both. A step lasts from its start to the next one's. *tokens/s* counts the new tokens of a kind's "
    "steps in their time. *Between steps* is the CPU's time from the end of one step's range to the start of the next: "
    "the scheduler, and what else the program does there."
)
#: What lets decode go on beside prefill, and more sequences share a step, in the engines' own options.
_REMEDIES = (
    "# decode beside prefill: vLLM --enable-chunked-prefill; SGLang --enable-mixed-chunk --chunked-prefill-size 2048;",
    "# TensorRT-LLM enable_chunked_prefill: true; or prefill on other GPUs (disaggregated)",
    "# to check: serve prompts of one token; if inter-token latency stays as uneven, prefill is not the cause",
    "# a larger batch: vLLM --max-num-seqs; SGLang --max-running-requests; TensorRT-LLM max_batch_size",
    "# to check: serve twice as many requests at once; if tokens/s hardly rise, matmuls are not what a step waits for",
)
#: A batch of this share of the one at which a matmul's computing takes as long as its reading is small: twice as many
#: sequences make a matmul take this much longer at most.
_SMALL, _LONGER = 0.25, 0.4
_BY_DIMENSIONS = (
    " Keys and values are taken to have as many heads as queries: where they have fewer (GQA, MQA), the bytes are an "
    "upper limit."
)
#: Rows of idle time of a kind, and the share of its step that each has at least.
_ROWS, _LEAST_SHARE = 4, 0.01


def kinds_of_steps(capture: CaptureSummary) -> Iterator[Table]:
    """The steps of a server by kind; none of other programs."""
    serving = capture.serving
    fields: tuple[Field[StepKind], ...] = (
        Field("kind", "text", lambda one: f"{one.kind}{' (inferred)' if serving and serving.inferred else ''}"),
        Field("steps", "count", lambda one: one.steps),
        Field("batch", "count", lambda one: one.batch),
        Field("tokens", "count", lambda one: one.tokens),
        Field("ms", "ms", lambda one: one.length_ms.median),
        Field("p95", "ms", lambda one: one.length_ms.p95),
        Field("operators" if capture.on_cpu else "GPU busy", "percent", lambda one: one.busy_share),
        Field("between steps", "ms", lambda one: one.between_ms),
        Field(TOKENS_PER_S, "count", lambda one: one.tokens_per_s),
    )
    if serving:
        caption = "Steps by kind under the profiler; lengths are medians in ms:"
        yield make_table(fields, serving.kinds, caption, capture=capture.title)


def answer_serving(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """The steps of each kind, the requests, and what fills each kind."""
    serving, title = capture.serving, capture.title
    if serving is None:
        return
    works = "operators run" if capture.on_cpu else "the GPU works"
    yield Answer("; ".join(_kind(one, works) for one in serving.kinds) + ".", title)
    larger = next(filter(None, (_larger(one, find_peaks(capture.gpu)) for one in serving.kinds)), "")
    for said in (*_said(serving), *map(_least, serving.kinds), larger):
        if said:
            yield Paragraph(said, title)
    if serving.held_up or larger:
        yield Details("What to change", (Listing(_REMEDIES, "python", title),), title)
    fills: tuple[Field[tuple[StepKind, str, float]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("part", "text", lambda row: row[1]),
        Field("ms", "ms", lambda row: row[2]),
        Field("share", "percent", lambda row: row[2] / row[0].total_ms if row[0].total_ms else None),
    )
    idle: tuple[Field[tuple[StepKind, IdleTime]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("cause", "text", lambda row: CAUSE_WORDS[row[1].cause]),
        Field("range", "code", lambda row: row[1].range),
        Field("API call", "code", lambda row: row[1].api),
        Field("ms", "ms", lambda row: row[1].ms),
    )
    kernels: tuple[Field[tuple[StepKind, KernelTime]], ...] = (
        Field("kind", "text", lambda row: row[0].kind),
        Field("top kernel", "code", lambda row: labels.get(row[1].name, row[1].name) or "in CUDA graphs, and fills"),
        Field("class", "text", lambda row: row[1].kernel_class),
        Field("launches", "count", lambda row: row[1].launches),
        Field("ms", "ms", lambda row: row[1].ms),
    )
    why = [(one, row) for one in serving.kinds for row in one.idle_by_cause[:_ROWS]]
    why = [(one, row) for one, row in why if row.ms >= _LEAST_SHARE * one.total_ms]
    tables = (
        make_table(fills, [row for one in serving.kinds for row in _parts(one)], capture=title, names=2),
        make_table(idle, why, capture=title, names=4),
        make_table(kernels, [(one, row) for one in serving.kinds for row in one.kernels], capture=title, names=3),
    )
    yield Details(
        "What fills a step of each kind, and why the GPU idles in it",
        (Paragraph(_DEFINITIONS, title), *(one for one in tables if one.rows)),
        title,
    )


def _kind(kind: StepKind, works: str) -> str:
    """412 decode steps of 12.3 ms (95th percentile 14 ms), batch 8, 650 tokens/s, the GPU works 45 % of it."""
    said = [f"{kind.steps:,} {kind.kind} {plural(kind.steps, 'step')} of {_times(kind.length_ms, kind.steps)}"]
    said += [f"batch {format_number(kind.batch, 'count')}"] if kind.batch is not None else []
    said += [f"{format_number(kind.tokens, 'count')} tokens"] if kind.tokens not in (None, kind.batch) else []
    said += [f"{kind.tokens_per_s:,.0f} {TOKENS_PER_S}"] if kind.tokens_per_s else []
    said += [f"{works} {rounded_percent(kind.busy_share)} of it"] if kind.busy_share is not None else []
    return ", ".join(said)


def _times(times: Quantiles, count: int) -> str:
    median = format_ms(times.median)
    return f"{median} (median; 95th percentile {format_ms(times.p95)})" if count > 1 else median


def _said(serving: Serving) -> Iterator[StrOrText]:
    """What a request sees, and whether prefill holds decode up."""
    if requests := serving.requests:
        many, between = requests.count, requests.inter_token_ms
        then = f", {INTER_TOKEN} {_times(between, 2)}." if between else "."
        yield f"{TTFT} of {many:,} {plural(many, 'request')} is {_times(requests.ttft_ms, many)}{then}"
    if held := serving.held_up:
        yield (
            f"{held.steps:,} of {held.of:,} decode steps that follow another one wait behind prefill, each for "
            f"{_times(held.wait_ms, held.steps)}: so much later do the sequences of the batch get their next token, "
            f"{format_ms(held.per_step_ms)} for each decode step on average. The steps are no shorter without."
        )
    if serving.inferred:
        yield (
            "No engine marks these steps: which are prefill is inferred from the shapes that the model was called with."
        )


def _least(kind: StepKind) -> StrOrText:
    """How far a decode step is from reading its weights, and its cache, once; empty where that is not known."""
    if kind.least_ms is None or kind.weights_bytes is None:
        return ""
    cache = f" and {format_number(kind.cache_bytes, 'bytes')} of cache" if kind.cache_bytes is not None else ""
    without = "" if kind.cache_bytes is not None else ", without the cache, whose size no mark says"
    return join_texts(
        "",
        (
            f"A decode step reads {format_number(kind.weights_bytes, 'bytes')} of weights{cache} at the least "
            f"({LEAST_READ}): {format_ms(kind.least_ms)} at the memory's peak{without}. The step takes ",
            f"{kind.length_ms.median / kind.least_ms:.3g} times as long, the GPU's work in it "
            f"{(kind.total_ms - kind.idle_ms) / kind.least_ms:.3g} times.{'' if kind.counted else _BY_DIMENSIONS}",
        ),
    )


def _larger(kind: StepKind, peaks: Peaks | None) -> str:
    """What twice the batch brings to decode whose batch is small; empty for others."""
    matmul = sum(row.ms for row in kind.classes if row.kernel_class == MATMUL)
    # A weight of two bytes takes two FLOPs for each sequence.
    even = peaks.flops_per_s["bf16"] / peaks.bytes_per_s if peaks else 0.0
    if kind.kind != "decode" or not kind.batch or not matmul or kind.batch > _SMALL * even:
        return ""
    longest = 1 + (_LONGER * matmul + kind.total_ms - kind.idle_ms - matmul) / kind.total_ms
    return (
        f"Decode's batch of {kind.batch:,.0f} is small: matmuls read every weight whatever the batch, and on this GPU "
        f"computing takes as long as reading from one of about {even:,.0f} on, in bf16. A step of twice the batch "
        f"takes 1 to {longest:.2g} times as long (matmuls up to {1 + _LONGER:.2g} times, the rest of the GPU's work up "
        f"to twice, idle time as now): that is {2 / longest:.2g} to 2 times the {TOKENS_PER_S}, and a sequence's "
        f"{INTER_TOKEN} grows as the step does."
    )


def _parts(kind: StepKind) -> Iterator[tuple[StepKind, str, float]]:
    """The classes that compute, what nothing hides of copies and communication, and idle time."""
    parts = [(row.kernel_class, row.ms) for row in kind.classes]
    parts += [("exposed copies", kind.exposed_copy_ms), ("exposed communication", kind.exposed_communication_ms)]
    yield from ((kind, name, ms) for name, ms in (*parts, ("idle", kind.idle_ms)) if ms)
