"""The names that people and frameworks give to the ranges of a training step's phases, and of attention's parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias, TypeVar

#: The name that PyTorch's profiler gives the span of its recording; a number follows it.
RECORDING_RANGE = "PyTorch Profiler"

#: New tokens of prompts, one token or few for each sequence, or both in one pass.
ServedStepKind: TypeAlias = Literal["prefill", "decode", "mixed"]

#: The spellings found without options, as ``normalized_name`` writes them.
DEFAULT_NAMES: Mapping[str, tuple[str, ...]] = {
    "forward": (
        "forward", "fwd", "fw", "forward pass", "fwd pass", "forward step", "fwd step", "model forward",
        "forward only", "inference", "inference step", "model inference", "gpu model runner forward",
    ),
    "loss": ("loss", "compute loss", "loss computation", "loss fn", "loss function", "criterion", "cross entropy"),
    "backward": (
        "backward", "bwd", "bw", "backward pass", "bwd pass", "backward step", "bwd step", "loss backward",
        "model backward",
    ),
    "optimizer": (
        "optimizer", "optimiser", "optim", "opt", "optimizer step", "optimiser step", "optim step", "opt step",
        "step optimizer", "optimizer update", "optimizer pass", "adamw", "adamw step", "adam step", "sgd step",
    ),
    "step": (
        "step", "train step", "training step", "iteration", "iter", "train iteration", "training iteration",
        "profiler step", "profilerstep", "batch", "train batch", "training batch", "execute model", "global step",
        "train one step", "train one batch", "run training batch", "pl profile run training batch",
    ),
    "warmup": ("warmup", "warm up", "warmup step", "warmup steps", "warm up step", "warm up steps", "warmup iteration",
               "warmup iterations", "warmup phase", "warming up"),
    "attention": (
        "scaled dot product attention", "sdpa", "attention", "self attention", "attn", "causal self attention",
        "multi head attention", "multihead attention", "multi head self attention", "multihead self attention",
    ),
    "scores": (
        "computing attention scores", "attention scores", "compute attention scores", "attn scores", "scores",
        "qk", "qk t", "q k t", "qkt", "qk matmul",
    ),
    "softmax": ("computing softmax", "softmax", "compute softmax", "attention softmax", "attn softmax"),
    "values": (
        "final matmul", "attention output", "attn output", "av", "pv", "av matmul", "pv matmul", "attn v",
        "attention values", "scores v", "computing final matmul",
    ),
}  # fmt: skip

#: How the parts of a pipeline's schedule end, as in ``attn(F)``: B is the gradient of the input, W that of the weights.
PIPELINE_PASS_SUFFIXES = {"(F)": "forward", "(B)": "backward", "(W)": "backward"}

#: How engines that serve models call their steps, a row for each spelling. ``c`` and ``g`` are sequences in prefill
#: (context) and in decode (generation), ``sq`` new tokens, ``sk`` all that these attend to.
ENGINE_STEPS: tuple[re.Pattern[str], ...] = (
    # vLLM: execute_context_1(80)_generation_31(31), execute_32_context_0(sq0sk0..)_generation_32(sq32sk55086..)
    re.compile(
        r"execute_(?:model )?(?:\d+_)?context_(?P<c>\d+)\((?:sq)?(?P<c_sq>\d+)(?:sk(?P<c_sk>\d+)[sqk\d]*)?(?:_\d+)?\)"
        r"[_ ]generation_(?P<g>\d+)\((?:sq)?(?P<g_sq>\d+)(?:sk(?P<g_sk>\d+)[sqk\d]*)?(?:_\d+)?\)"
    ),
    # SGLang: step[DECODE bs=32], step[EXTEND bs=15 toks=15360], step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 ..]
    re.compile(r"step\[(?P<mode>(?!IDLE)[A-Z_]{2,20})\b[^\]]*\]"),
    # ATOM: prefill[bs=2 tok=14721 ctx=[7803, 6918]], decode[bs=117/128 tok=117 d=117]
    re.compile(r"(?:eager_)?(?P<mode>prefill|decode)\[bs=\d.*\]"),
    # TensorRT-LLM: [Executor] _forward_step 7: 1 ctx reqs, 512 ctx tokens, 63 gen reqs; executeStep: 0 ctx reqs, ..
    re.compile(
        r"(?:(?:\[Executor\] )?_forward_step(?: \d+)?|executeStep): (?P<c>\d+) ctx reqs, "
        r"(?:(?P<c_sq>\d+) ctx tokens, )?(?P<g>\d+) gen reqs"
    ),
    # a program's own, and our hooks': prefill bs=1 toks=512, decode step 3
    re.compile(
        r"(?P<mode>(?i:prefill|decode|mixed))(?:[ _](?i:step|phase|batch|pass))?(?:[ _#:]{1,2}\d{1,6})?"
        r"(?P<inferred> \(inferred\))?(?: (?:bs|toks|sk)=\d{1,9})*"
    ),
)
#: An executor's step lies around one of the engine, and waits for more than that.
EXECUTOR_STEP_PREFIX, ENGINE_STEP_PREFIX = "execute_", "step["
#: A request from its arrival to its last token, and from its arrival to its first token.
REQUEST_RANGE = re.compile(r"(?P<first>first token of )?(?P<request>(?i:request)[ _#:]{0,2}[\w.-]{1,40})")


@dataclass(frozen=True)
class ServedStep:
    """What a mark says of the step of an engine; None is not said.

    Attributes:
        batch: sequences.
        tokens: new tokens of all of them.
        positions: what these attend to in the cache, summed over the sequences.
        certain: whether the mark alone shows that it is a step: "decode" without a batch may be that of an image.
    """

    kind: ServedStepKind
    batch: int | None
    tokens: int | None
    positions: int | None
    inferred: bool
    certain: bool


@cache
def parse_served_step(name: str) -> ServedStep | None:
    """Reads the mark of a step that serves requests; None of another name."""
    found = next((match for one in ENGINE_STEPS if (match := one.fullmatch(name))), None)
    if found is None:
        return None
    groups = found.groupdict()
    said = {key: int(value) for key, value in _PAIR.findall(name)}
    said |= {key: int(value) for key, value in groups.items() if value and value.isdecimal()}
    mode = (groups.get("mode") or "").lower()
    if "c" in said and "g" in said:
        kind: ServedStepKind = "mixed" if said["c"] and said["g"] else "prefill" if said["c"] else "decode"
    else:
        kind = "mixed" if mode == "mixed" else "prefill" if "extend" in mode or "prefill" in mode else "decode"
    batch = said.get("bs", said["c"] + said["g"] if "c" in said else None)
    # A sequence in decode has one new token where nothing else is said.
    new = None if said.get("c") and "c_sq" not in said else said.get("c_sq", 0) + said.get("g_sq", said.get("g", 0))
    tokens = said.get("toks", said.get("tok", new or (batch if kind == "decode" else None)))
    positions = [said[key] for key in ("sk", "c_sk", "g_sk") if key in said]
    inferred, certain = bool(groups.get("inferred")), batch is not None
    return ServedStep(kind, batch, tokens, sum(positions) if positions else None, inferred, certain)


#: How the range of a module's call begins: ``nn.Module: Linear_3`` of PyTorch's profiler, ``nn.Module: GPT/h.0: Block``
#: of our hooks.
MODULE_RANGE_PREFIX = "nn.Module: "
#: The second kind, with the path and the class of the module.
MODULE_RANGE_WITH_PATH = re.compile(rf"{re.escape(MODULE_RANGE_PREFIX)}(?P<path>[^:]+): (?P<kind>[^:]+)")
#: The class of a module where nobody says it.
UNKNOWN_MODULE_CLASS = "Module"
#: A call as vLLM and SGLang mark it layer by layer: {'Module': 'LlamaForCausalLM.model.layers.0.mlp', 'Inputs': ..}
_MODULE_OF_ENGINE = re.compile(r"\{'Module': '(?P<path>[\w.]+)'")


_DIGITS = str.maketrans("123456789", "0" * 9)
_Answer = TypeVar("_Answer")


def map_by_shape(names: tuple[str, ...], function: Callable[[str], _Answer]) -> list[_Answer]:
    """Returns a function's answer for each name; the answer must not depend on the value of any digit.

    The function is called once for all names that differ only in digits: a capture may hold a million such names.
    """
    shapes, place = _shapes_of(names)
    answers = [function(shape) for shape in shapes]
    return [answers[code] for code in place]


@lru_cache(maxsize=2)
def _shapes_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    code: dict[str, int] = {}
    place = [code.setdefault(name.translate(_DIGITS), len(code)) for name in names]
    return tuple(code), place


def normalize_module_name(name: str) -> str:
    """Returns the name of a range; that of a module's call in an engine as our hooks write it."""
    found = _MODULE_OF_ENGINE.match(name)
    return f"{MODULE_RANGE_PREFIX}{found['path']}: {UNKNOWN_MODULE_CLASS}" if found else name


_LONGEST_NAME = 500
_PAIR = re.compile(r"(\w+)=(\d+)")
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")
_EPOCH = re.compile(r"^epoch (\d+ )((of )?\d+ )?")


def strip_counter(name: str) -> str:
    """Returns a range's name without the counter at its end: ``micro_step_3`` is ``micro_step``."""
    return _COUNTER.sub("", name[:_LONGEST_NAME]).rstrip(" _-:=#/") or name


def normalize_name(name: str) -> str:
    """Returns a range's name without case, punctuation and counters: ``Forward_Pass #3`` is ``forward pass``.

    So is ``epoch_0_forward_pass_3``. PyTorch's own ``Optimizer.step#AdamW.step`` becomes ``optimizer step``. Of an
    endless name the start counts.
    """
    name = name[:_LONGEST_NAME]
    text = name.split("#", 1)[0] if name.startswith("Optimizer.") else name.split(",", 1)[0]
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", text)).lower()
    return _EPOCH.sub("", re.sub(r"[\W_]+", " ", text)).strip()
