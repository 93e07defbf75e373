"""The vocabulary of timings tables: what headers and cells are called, one table of spellings for each kind of word."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

Cells = Literal["text", "flag", "flags", "compiled", "warm-up", "number", "count", "numbering", "words", "date"]


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


class Field(NamedTuple):
    """A property of a run, the headers that its column goes by, and the kind of its cells.

    Where a header has several meanings its cells tell them apart: only ``flags``, ``compiled`` or eager, true or false
    (``warm-up``), different whole numbers (``numbering``), or ``words`` that are no flags.
    """

    name: str
    spellings: str
    cells: Cells = "text"


# The first spelling that a file has is used. Headers are compared in lower case, runs of anything but letters and
# digits as one underscore: "Context Length" is context_length.
FIELDS = (
    Field("capture", "capture"),
    Field("model", "model model_size size model_name config model_config preset 模型"),
    Field("d_model", "d_model hidden_size hidden_dim n_embd", "count"),
    Field("d_ff", "d_ff dff intermediate_size", "count"),
    Field("num_layers", "num_layers n_layers n_layer layers", "count"),
    Field("num_heads", "num_heads n_heads n_head heads", "count"),
    Field("vocab_size", "vocab_size", "count"),
    Field(
        "context_length",
        "context_length context context_len ctx ctx_len ctx_length seq_len seq_length sequence_length seq sequence",
        "count",
    ),
    Field("batch_size", "batch_size batch bs", "count"),
    Field("precision", "precision dtype torch_dtype data_type 精度"),
    Field("mixed_precision", "mixed_precision use_mixed_precision mixed autocast use_autocast amp use_amp mp"),
    Field("bf16", "bf16 bfloat16 use_bf16 use_bfloat16", "flags"),
    Field("fp16", "fp16 float16 half use_fp16", "flags"),
    Field("tf32", "tf32 use_tf32 allow_tf32", "flags"),
    Field("mode", "mode run_mode benchmark_mode"),
    Field("attention", "attention attn attention_impl attn_impl attention_type attn_implementation"),
    Field("compile", "compile compiled torch_compile use_compile use_torch_compile is_compiled", "compiled"),
    Field("cuda_graph", "cuda_graph cuda_graphs cudagraph cudagraphs use_cuda_graph use_cuda_graphs", "flags"),
    Field("device", "device device_type"),
    Field("gpu", "gpu gpu_name gpu_type device_name"),
    Field("phase", "phase pass pass_type stage"),
    Field("only_forward", "only_forward forward_only fwd_only time_forward_only inference_only", "flag"),
    Field("with_backward", "backward with_backward include_backward do_backward run_backward", "flags"),
    Field("with_optimizer", "optimizer with_optimizer include_optimizer include_step with_step", "flags"),
    Field("optimizer", "optimizer optimizer_name optim", "words"),
    Field(
        "iteration",
        "iteration iter i iteration_idx iter_idx step step_idx step_index trial trial_idx run run_idx repeat rep "
        "repetition sample round",
        "numbering",
    ),
    Field("is_warmup", "is_warmup warmup warm_up warmup_step", "warm-up"),
    Field(
        "warmup_steps",
        "warmup_steps warmup num_warmup num_warmup_steps n_warmup warm_up warmup_iters warm_up_steps warmup_iterations "
        "num_warmups warmups",
        "number",
    ),
    Field(
        "steps",
        "steps num_steps n_steps measure_steps measurement_steps num_measure_steps measure benchmark_steps "
        "num_benchmark timed_steps iters num_iters num_trials",
        "number",
    ),
    Field("peak_memory_bytes", "peak_memory_bytes peak_bytes max_memory_bytes peak_allocated_bytes", "number"),
    Field("oom", "oom is_oom out_of_memory", "flag"),
    Field("status", "status outcome"),
    Field("message", "message error"),
    Field("time_stamp", "time_stamp timestamp timestamp_utc date datetime", "date"),
)
CELLS: dict[str, Cells] = {field.name: field.cells for field in FIELDS}
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
"""The fields that describe a model without its name."""
CONDITIONS = (
    "model", *DIMENSIONS, "context_length", "batch_size", "precision", "mixed_precision", "bf16", "fp16", "tf32",
    "compile", "cuda_graph", "attention", "optimizer", "device", "gpu",
)  # fmt: skip
"""The fields that say under which condition a run was made, in the order in which a message names them."""

# A header made of these words alone is a time: "mean_ms", "forward_mean_ms", "Backward std (s)", "avg_ms_per_step".
# A model, a precision or "compiled" among them is the condition that the column's times were taken under.
TIME_WORDS = (
    ("phase", "forward", "forward fwd fw inference infer"),
    ("phase", "backward", "backward bwd bw back"),
    ("phase", "optimizer", "optimizer optim opt"),
    ("phase", "loss", "loss"),
    ("phase", "step", "step train training full"),
    ("phase", "forward+backward", "fwdbwd fwbw fwbwd both"),
    ("statistic", "mean", "mean avg average"),
    ("statistic", "std", "std stdev stddev sd dev deviation"),
    ("statistic", "min", "min minimum"),
    ("statistic", "max", "max maximum"),
    ("statistic", "median", "median med p50"),
    ("unit", "ms", "ms msec millisecond milliseconds 毫秒"),
    ("unit", "s", "s sec secs second seconds 秒"),
    ("unit", "us", "us usec microseconds µs μs"),
    ("word", "time", "time latency duration runtime elapsed"),
    ("word", "pass", "pass only and standard"),
    ("compile", "true", "compiled compile"),
    ("compile", "false", "eager vanilla uncompiled"),
    ("precision", "fp32", "fp32 float32"),
    ("precision", "tf32", "tf32"),
    ("precision", "bf16", "bf16 bfloat16"),
    ("precision", "fp16", "fp16 float16"),
    *(("model", name, name.lower()) for name in ("small", "medium", "large", "xl", "10B")),
    ("model", "2.7B", "2p7b"),
)
WORD_OF = {word: (kind, value) for kind, value, words in TIME_WORDS for word in words.split()}
CONDITIONS_OF_A_HEADER = ("model", "precision", "compile")
"""The kinds of ``TIME_WORDS`` that say what a column's times are of, each a field."""

# The phases that a text names, in its order and each once, and the one phase they are; other combinations are none.
_PHASE_OF: dict[tuple[str, ...], str] = {
    **{(value,): value for kind, value, _ in TIME_WORDS if kind == "phase"},
    ("optimizer", "step"): "optimizer",
    ("forward", "backward"): "forward+backward",
    ("forward", "backward", "step"): "step",
    ("forward", "backward", "optimizer"): "step",
    ("forward", "backward", "optimizer", "step"): "step",
}
MS_PER_UNIT = {"ms": 1.0, "s": 1_000.0, "us": 0.001}

STATUSES = (
    ("ok", "ok success succeeded passed pass done completed"),
    ("failed", "failed fail failure error crashed"),
    ("timeout", "timeout timed_out"),
)
FLAGS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}
COMPILED = {**FLAGS, "compiled": True, "compile": True, "eager": False, "vanilla": False, "none": False}
"""The meaning of a cell in a column ``compile``."""
MISSING = frozenset({"", "-", "--", "–", "—", "…", "...", "nan", "none", "null", "na", "n/a", "<na>"})

# Words of headers whose columns tell no conditions apart: what a run is called and where it came from, ...
ORIGIN_WORDS = _set(
    "time timestamp date started finished created host hostname node user commit git hash sha branch path file "
    "filename folder dir report trace snapshot log logs url id uuid index idx job note notes comment comments remark "
    "command cmd args script seed error message raw timings times unnamed"
)
# ... and, where they hold numbers, what was measured in it.
RESULT_WORDS = _set(
    "ms us ns s sec seconds memory mem peak alloc allocated reserved active bytes kb mb mib gb gib tokens throughput "
    "samples tflops gflops flops mfu hfu util utilization bandwidth gbps loss perplexity ppl acc accuracy speedup "
    "ratio percent pct share cv var variance ci sem power energy temp temperature clock p5 p10 p20 p25 p75 p80 p90 p95 "
    "p99 params parameters count total"
)

#: So many spellings are kept at hand: files repeat their words.
SPELLINGS = 4_096
_OOM = re.compile(r"\boom\b|out[\s_-]*of[\s_-]*memory", re.IGNORECASE)


@lru_cache(SPELLINGS)
def word(text: str) -> str:
    """The text in lower case, each run of anything but letters and digits as one underscore."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<!\d)2[._]7b", "2p7b", text.lower())).strip("_")


def single_phase(phases: list[str]) -> str | None:
    """The one phase that these make together, such as forward and backward; ``None`` where they make none."""
    return _PHASE_OF.get(tuple(dict.fromkeys(phases)))


@lru_cache(SPELLINGS)
def phase_from_text(text: str) -> str | None:
    """``forward``, ``backward``, ``optimizer``, ``loss``, ``step`` or ``forward+backward``; ``None`` for others."""
    kinds = [WORD_OF.get(part, ("", part)) for part in word(text).split("_")]
    if any(kind != "phase" and value != "pass" for kind, value in kinds):
        return None
    return single_phase([value for kind, value in kinds if kind == "phase"])


def phase_in_name(stem: str) -> str | None:
    """The phase that a file's name says among other words: ``forward_times``, ``timings_bwd``; ``None`` without."""
    meanings = [WORD_OF.get(part, ("", "")) for part in word(stem).split("_")]
    phases = [value for kind, value in meanings if kind == "phase"]
    return single_phase(phases) if {"forward", "backward", "optimizer"} & set(phases) else None  # "train_times" is any


@lru_cache(SPELLINGS)
def status_from_text(text: str) -> str | None:
    """``ok``, ``oom``, ``failed`` or ``timeout`` from a status's usual words; ``None`` for others."""
    if _OOM.search(text):
        return "oom"
    return next((name for name, words in STATUSES if word(text) in words.split()), None)
