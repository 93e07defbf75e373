"""Recognizes the names that people and frameworks give to ranges of phases, attention, serving steps and modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Literal, TypeAlias, TypeVar

from nsys_analyzer.errors import ConfigurationError

#: The phases of a training step, in order. The phase ``STEP`` encloses them.
LEAF_PHASES = ("forward", "loss", "backward", "optimizer")
STEP = "step"
#: The name of a step without a backward pass in a process whose other steps have a backward pass.
OTHER_STEP = "step without backward"
WARMUP = "warmup"
#: The roles of ranges in self-attention: the whole attention, and its three parts.
ATTENTION_PARTS = ("attention", "scores", "softmax", "values")

#: The role of the range of a module that is not attention.
MODULE = "module"
#: The name of a user's own phase is rejected as a misspelling if its similarity to a known phase reaches this ratio.
_MISSPELLING_SIMILARITY = 0.75
#: The class of attention modules that compute the projections themselves. Their ranges contain more than attention.
_ATTENTION_WITH_PROJECTIONS = "MultiheadAttention"
#: Matches the names of ranges that PyTorch's profiler or nsys writes without an annotation in the program.
_FRAMEWORK_RANGE = re.compile(r"ProfilerStep#|Optimizer\.(?:step|zero_grad)#|torch\.(?:nn|optim|autograd|Tensor)\.")
#: The prefix of the event with which PyTorch's profiler marks the span of its recording. A number follows.
RECORDING_RANGE = "PyTorch Profiler"

#: A prefill step processes the tokens of prompts. A decode step processes one or a few new tokens of each sequence. A
#: mixed step does both in one pass.
ServedStepKind: TypeAlias = Literal["prefill", "decode", "mixed"]

#: The spellings that are recognized without options, as ``normalize_name`` returns them.
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

#: The suffixes of ranges in a pipeline schedule, such as ``attn(F)``: forward (F), gradient of the input (B), and
#: gradient of the weights (W).
PIPELINE_PASS_SUFFIXES = {"(F)": "forward", "(B)": "backward", "(W)": "backward"}

#: Match the names that serving engines give to their steps, one pattern for each spelling. ``c`` and ``g`` are the
#: numbers of sequences in prefill (context) and in decode (generation). ``sq`` is the number of new tokens, and ``sk``
#: is the number of tokens to which the new tokens attend.
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
    # the user's program, and the capture hooks: prefill bs=1 toks=512, decode step 3
    re.compile(
        r"(?P<mode>(?i:prefill|decode|mixed))(?:[ _](?i:step|phase|batch|pass))?(?:[ _#:]{1,2}\d{1,6})?"
        r"(?P<inferred> \(inferred\))?(?: (?:bs|toks|sk)=\d{1,9})*"
    ),
)
#: The prefixes of an executor's step and of an engine's step. The executor's step encloses the engine's step, and also
#: waits outside of the engine's step.
EXECUTOR_STEP_PREFIX, ENGINE_STEP_PREFIX = "execute_", "step["
#: Matches the range of a request, from its arrival to its last token or to its first token.
REQUEST_RANGE = re.compile(r"(?P<first>first token of )?(?P<request>(?i:request)[ _#:]{0,2}[\w.-]{1,40})")


@dataclass(frozen=True)
class PhaseNames:
    """The names of the ranges of each phase. Phases that are not in ``extra`` have the default names.

    Attributes:
        extra: exact range names that the user gave, by phase (known or defined by the user) or part of attention.
        steps: the number of steps that the user gave; 0 without it. It is used if the steps cannot be found otherwise.
    """

    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int = 0

    @staticmethod
    def parse(options: Iterable[str], steps: int = 0) -> PhaseNames:
        """Parses options such as ``forward=NAME``. A phase may have several names.

        Raises:
            ConfigurationError: an option lacks a phase or a name, or its phase seems misspelled.
        """
        extra: dict[str, tuple[str, ...]] = {}
        for option in options:
            phase, separator, name = (part.strip() for part in option.partition("="))
            if not separator or not phase or not name:
                raise ConfigurationError(f"{option!r} is not PHASE=RANGE", "Write for example forward=model_fwd")
            phase = phase.lower()
            similar_names = get_close_matches(phase, DEFAULT_NAMES, 1, _MISSPELLING_SIMILARITY)
            if similar_names and phase not in DEFAULT_NAMES:
                hint = (
                    f"Did you mean {similar_names[0]}={name}? The name of a phase of your own must be less similar to "
                    f"{similar_names[0]}"
                )
                raise ConfigurationError(f"{phase!r} is not a phase", hint)
            extra[phase] = (*extra.get(phase, ()), name)
        return PhaseNames(extra, steps)

    @property
    def leaf_phases(self) -> tuple[str, ...]:
        """The phases that make up a step, in order. Phases that the user defines come last."""
        own_phases = [phase for phase in self.extra if phase not in (*LEAF_PHASES, STEP, WARMUP, *ATTENTION_PARTS)]
        return (*LEAF_PHASES, *own_phases)

    def find_roles(self, names: tuple[str, ...]) -> list[str | None]:
        """Returns, for each range name, the phase or the part of attention that it stands for, or None."""
        return [self.find_role(name) for name in names] if self.extra else map_by_shape(names, self.find_role)

    def find_role(self, name: str) -> str | None:
        """Returns the phase or the part of attention that this range name stands for, or None."""
        for role, exact_names in self.extra.items():
            if name in exact_names:
                return role
        if strip_counter(name) in self.extra.get(STEP, ()):
            return STEP
        normalized_name = normalize_name(name)
        for role, spellings in DEFAULT_NAMES.items():
            if role not in self.extra and normalized_name in spellings:
                return role
        if STEP not in self.extra and parse_served_step(name) is not None:
            return STEP
        for suffix, role in PIPELINE_PASS_SUFFIXES.items():
            if role not in self.extra and name.endswith(suffix):
                return role
        return None


@dataclass(frozen=True)
class ServedStep:
    """The information in the name of a serving step. A value is None if the name does not contain it.

    Attributes:
        kind: prefill, decode or mixed.
        batch: number of sequences.
        tokens: new tokens of all sequences.
        positions: cached positions that the new tokens attend to, summed over the sequences.
        inferred: whether the capture hooks wrote the name of a step that they inferred.
        certain: whether the name alone shows a serving step. "decode" without a batch may also decode an image.
    """

    kind: ServedStepKind
    batch: int | None
    tokens: int | None
    positions: int | None
    inferred: bool
    certain: bool


@cache
def parse_served_step(name: str) -> ServedStep | None:
    """Parses the name of a serving step; returns None for any other name."""
    match = next((match for pattern in ENGINE_STEPS if (match := pattern.fullmatch(name))), None)
    if match is None:
        return None
    groups = match.groupdict()
    counts = {key: int(value) for key, value in _KEY_AND_NUMBER.findall(name)}
    counts |= {key: int(value) for key, value in groups.items() if value and value.isdecimal()}
    mode = (groups.get("mode") or "").lower()
    if "c" in counts and "g" in counts:
        kind: ServedStepKind = "mixed" if counts["c"] and counts["g"] else "prefill" if counts["c"] else "decode"
    else:
        kind = "mixed" if mode == "mixed" else "prefill" if "extend" in mode or "prefill" in mode else "decode"
    batch = counts.get("bs", counts["c"] + counts["g"] if "c" in counts else None)
    if counts.get("c") and "c_sq" not in counts:
        new_tokens = None
    else:  # a sequence in decode has one new token unless the name contains another number
        new_tokens = counts.get("c_sq", 0) + counts.get("g_sq", counts.get("g", 0))
    tokens = counts.get("toks", counts.get("tok", new_tokens or (batch if kind == "decode" else None)))
    positions = [counts[key] for key in ("sk", "c_sk", "g_sk") if key in counts]
    inferred, certain = bool(groups.get("inferred")), batch is not None
    return ServedStep(kind, batch, tokens, sum(positions) if positions else None, inferred, certain)


#: The prefix of the range of a module's call: ``nn.Module: Linear_3`` by PyTorch's profiler,
#: ``nn.Module: GPT/h.0: Block`` by the capture hooks.
MODULE_RANGE_PREFIX = "nn.Module: "
#: Matches a module range that the capture hooks wrote, with the path and the class of the module.
MODULE_RANGE_WITH_PATH = re.compile(rf"{re.escape(MODULE_RANGE_PREFIX)}(?P<path>[^:]+): (?P<kind>[^:]+)")
#: The class of a module whose range does not contain the class.
UNKNOWN_MODULE_CLASS = "Module"
#: Matches a module range that vLLM or SGLang wrote: {'Module': 'LlamaForCausalLM.model.layers.0.mlp', 'Inputs': ..}
_ENGINE_MODULE_RANGE = re.compile(r"\{'Module': '(?P<path>[\w.]+)'")


def is_framework_name(name: str) -> bool:
    """Returns whether a framework writes ranges of this name without an annotation in the program."""
    return bool(_FRAMEWORK_RANGE.match(name))


def find_module_role(name: str) -> str | None:
    """Returns the role of a module's range, ``attention`` or ``module``; None for a range that is not a module's.

    Modules inside attention, such as its projections, have the role ``module``.
    """
    match = MODULE_RANGE_WITH_PATH.fullmatch(name)
    if match is None:
        return None
    *_, last_word = re.split(r"[/.]", match["path"])
    is_attention = normalize_name(last_word) in DEFAULT_NAMES["attention"] or match["kind"].endswith("Attention")
    return "attention" if is_attention and match["kind"] != _ATTENTION_WITH_PROJECTIONS else MODULE


_DIGITS_TO_ZERO = str.maketrans("123456789", "0" * 9)
_Mapped = TypeVar("_Mapped")


def map_by_shape(names: tuple[str, ...], function: Callable[[str], _Mapped]) -> list[_Mapped]:
    """Calls a function for names, and returns its result for each name. No result may depend on the value of a digit.

    The function is called once for all names that differ only in digits. A capture may contain a million such names.
    """
    shapes, codes = _find_shapes(names)
    results = [function(shape) for shape in shapes]
    return [results[code] for code in codes]


@lru_cache(maxsize=2)
def _find_shapes(names: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """Replaces every digit by 0. Returns the distinct names that result, and the position of each name among them."""
    code_of_name: dict[str, int] = {}
    codes = [code_of_name.setdefault(name.translate(_DIGITS_TO_ZERO), len(code_of_name)) for name in names]
    return tuple(code_of_name), codes


def normalize_module_name(name: str) -> str:
    """Returns the name of a range. The module range of a serving engine gets the spelling of the capture hooks."""
    match = _ENGINE_MODULE_RANGE.match(name)
    return f"{MODULE_RANGE_PREFIX}{match['path']}: {UNKNOWN_MODULE_CLASS}" if match else name


#: Only this many characters at the start of a name are compared.
_MAX_NAME_CHARACTERS = 500
_KEY_AND_NUMBER = re.compile(r"(\w+)=(\d+)")
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")
_EPOCH = re.compile(r"^epoch (\d+ )((of )?\d+ )?")


def strip_counter(name: str) -> str:
    """Returns a range's name without the counter at its end: ``micro_step_3`` becomes ``micro_step``."""
    return _COUNTER.sub("", name[:_MAX_NAME_CHARACTERS]).rstrip(" _-:=#/") or name


def normalize_name(name: str) -> str:
    """Returns a range's name in lower case without punctuation and counters.

    ``Forward_Pass #3`` and ``epoch_0_forward_pass_3`` become ``forward pass``. PyTorch's ``Optimizer.step#AdamW.step``
    becomes ``optimizer step``.
    """
    name = name[:_MAX_NAME_CHARACTERS]
    text = name.split("#", 1)[0] if name.startswith("Optimizer.") else name.split(",", 1)[0]
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", text)).lower()
    return _EPOCH.sub("", re.sub(r"[\W_]+", " ", text)).strip()
