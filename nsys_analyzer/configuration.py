"""The configuration of a run, declared once: command lines, manifests, timings and reports are derived from it."""

# ruff: noqa: RUF009 - `option` makes a field of a dataclass

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from msgspec import Meta

from nsys_analyzer.system.strict_json import LARGEST_EXACT_INTEGER

SCHEMA_VERSION = 1
#: Where ``nsys-analyze verify`` keeps what was predicted and measured.
LEDGER = Path(".nsys-analyze", "ledger.jsonl")
MODES = ("forward", "forward-backward", "train")
PRECISIONS = ("fp32", "tf32", "bf16")
ATTENTIONS = ("unfused", "sdpa")
STATUSES = ("ok", "oom", "failed", "timeout")

Count = Annotated[int, Meta(ge=1, le=LARGEST_EXACT_INTEGER)]
CountOrNone = Annotated[int, Meta(ge=0, le=LARGEST_EXACT_INTEGER)]
Seed = Annotated[int, Meta(ge=-LARGEST_EXACT_INTEGER, le=LARGEST_EXACT_INTEGER)]
Value: TypeAlias = str | int | float | bool

#: What stands for an option that is not known: None, or NoReturn (no value at all) where every option has one.
Unknown = TypeVar("Unknown")


@dataclass(frozen=True)
class Option:
    """How command lines ask for an option of a target or an experiment, and where it is shown.

    Attributes:
        default: None where the program decides; its type is that of the option. A tuple where an experiment takes
            several values.
        default_on_cpu: a smaller default of ``nsys-analyze run`` and of experiments on a CPU.
        unit: what help calls a value.
        spelling: its name on a command line, without the dashes; empty where that is the field's name.
        several: whether a sweep takes several values of it.
        in_run: whether ``nsys-analyze run`` has it; others are passed on by ``--target-option``.
        in_name: how the name of a result says a value that is not the default; empty where it never does.
        column: its column in the report, empty where another table says it.
    """

    default: Any
    help: str
    choices: tuple[str, ...] = ()
    default_on_cpu: Any = None
    least: int = 1
    unit: str = "N"
    spelling: str = ""
    several: bool = False
    in_run: bool = True
    in_name: str | None = None
    column: str | None = None
    name: str = ""

    @property
    def flag(self) -> str:
        """``--warmup``."""
        return "--" + (self.spelling or self.name).replace("_", "-")

    @property
    def kind(self) -> type:
        """The type of a value."""
        first = self.default[0] if isinstance(self.default, tuple) else self.default
        return str if first is None else type(first)

    def default_on(self, device: str) -> Any:
        """Returns the default on ``cuda`` or ``cpu``."""
        return self.default_on_cpu if device == "cpu" and self.default_on_cpu is not None else self.default

    def words(self, value: Value) -> list[str]:
        """The words of a command line that ask for a value, none where it is what every machine does by default."""
        if self.kind is bool:
            return [self.flag] if value else []
        usual = not self.several and self.default_on_cpu is None and value == self.default
        return [] if usual else [self.flag, str(value)]

    def in_a_name(self, value: Value) -> str:
        """How the name of a result says this value, empty where it does not."""
        if value == self.default or self.in_name == "":
            return ""
        word = self.name.replace("_", "-")
        return (self.in_name or (word if self.kind is bool else f"{word}-{{}}")).format(value)


def option(default: Value | None, help: str, choices: tuple[str, ...] = (), **more: Any) -> Any:
    """A field of :class:`Options` with its :class:`Option`; None where the value is not known."""
    return field(default=None, metadata={"option": Option(default, help, choices, **more)})


@dataclass(frozen=True, kw_only=True)
class Options(Generic[Unknown]):
    """The options of the transformer target: each field is an option of ``nsys-analyze run`` and of the target.

    ``Options[None]`` is what is known of a run, ``Options[NoReturn]`` is complete. A new option is a new field here
    and the line of the target that uses it. Their order is that of words on the command line, in names and in tables.
    """

    context_length: Count | Unknown = option(
        256, "Context length.", default_on_cpu=128, unit="TOKENS", several=True, in_name="", column=""
    )
    mode: str | Unknown = option(
        "train", "Phases of a step: forward; with loss and backward; and with the optimizer.", MODES, several=True,
        in_name="", column="",
    )  # fmt: skip
    precision: str | Unknown = option("fp32", "Precision; bf16 is autocast.", PRECISIONS, several=True, in_name="")
    batch_size: Count | Unknown = option(4, "Batch size.", in_name="b{}", column="")
    attention: str | Unknown = option(
        "unfused", "Naive attention, kernel by kernel, or PyTorch's scaled_dot_product_attention.", ATTENTIONS,
        in_name="{}",
    )  # fmt: skip
    compile: bool | Unknown = option(
        False, "torch.compile the model; there are no ranges inside forward then.", column="compiled"
    )
    cuda_graph: bool | Unknown = option(
        False, "Capture each phase as a CUDA graph, then replay it.", column="CUDA graph"
    )
    seed: Seed | Unknown = option(0, "Seed of weights and data.", in_run=False, least=-LARGEST_EXACT_INTEGER)
    device: str | Unknown = option(
        None, "Where to run. Default: cuda where there is a GPU.", ("cuda", "cpu"), in_name="", column=""
    )
    steps: CountOrNone | Unknown = option(10, "Measured steps.", default_on_cpu=2, in_name="", column="")
    warmup_steps: CountOrNone | Unknown = option(
        5, "Steps before the measured ones.", default_on_cpu=1, least=0, spelling="warmup", in_name="", column=""
    )


OPTIONS: dict[str, Option] = {one.name: replace(one.metadata["option"], name=one.name) for one in fields(Options)}
"""Every option by the name of its field."""


#: FLOPs are more than other counts: a step of a large model has 1e16.
Flops = Annotated[float, Meta(ge=0, le=1e24)]
#: FLOPs by one word and another: a phase and a class of kernels, a module and a phase.
FlopsByTwo: TypeAlias = dict[str, dict[str, Flops]]


@dataclass(frozen=True, kw_only=True)
class CountedFlops:
    """The FLOPs of one step of a program, counted as its operators ran.

    Attributes:
        passes: how often each phase ran in the step.
        classes: by phase and class of kernels; ``recomputed`` is a forward pass that runs again in backward.
        modules: by module (``GPT/h.0.attn: Attention``) and phase.
        softmax, attention_matmul: of all forward passes; 5 for each score.
        unknown: operators that may compute, and that no formula is known for.
    """

    passes: dict[str, CountOrNone]
    classes: FlopsByTwo
    modules: FlopsByTwo = field(default_factory=dict)
    softmax: Flops = 0
    attention_matmul: Flops = 0
    unknown: list[str] = field(default_factory=list)

    def of(self, phase: str) -> float:
        """Of all passes of a phase."""
        return sum(self.classes.get(phase, {}).values())

    def of_pass(self, phase: str) -> Mapping[str, float]:
        """Of one pass, by class of kernels; empty where there is none."""
        passes = self.passes.get(phase)
        return {name: flops / passes for name, flops in self.classes.get(phase, {}).items()} if passes else {}

    @property
    def of_step(self) -> float:
        """Of the model in one step: what is computed again is left out, and what the optimizer does."""
        return sum(self.of(phase) for phase in self.classes if phase not in ("recomputed", "optimizer"))


@dataclass(frozen=True, kw_only=True)
class Run(Options[None]):
    """The manifest of a run, flat JSON of these keys: each is optional, None is unknown.

    Attributes:
        model: its name, which its dimensions outrank.
        optimizer: its name.
        status: one of ``STATUSES``; ``message`` says why where it is not ``ok``.
        profiler: ``nsys``, ``torch`` or ``none``, which leaves no trace.
        python, torch, cuda, driver, nsys: versions.
        git_dirty: whether tracked files differ from the commit of the working folder.
        command, profile_command: the command line of the target alone, and under its profiler.
        run: the ``nsys-analyze run`` that did both.
        capture: the file name of the trace that it belongs to.
        stacks: those of the stacks that were sampled while that was recorded.
        rank: the rank of the capture's process among those of the run.
        world_size: how many ranks the run has.
        rank_pids: the process ID of each rank, where one capture is of all.
        group: the same word for all ranks of one run, and for no other run.
        peak_memory_bytes: the most memory that tensors took on the device, without a profiler.
        weights_bytes: what each pass of a model that decodes reads of its weights.
        cache_bytes: what keys and values of one position take, in all layers.
        flops: counted while a program of the user's ran.
        waits: how often each line of it waits for the GPU in a step, as PyTorch warns of it.
        lines: file and line of ``forward`` of its own classes of modules, and of the first call of each phase.
        hooks_ms: the time of the CPU that the hooks took in a step of that run.
        stopped_after: the step of the user's program after which it was ended, for all was recorded that was asked for.
        not_annotated: what of the user's program was not found, and why.
        timed_by: ``hooks`` where the times without a profiler were taken from outside of the program.
    """

    schema_version: Count = SCHEMA_VERSION
    model: str | None = None
    d_model: Count | None = None
    d_ff: Count | None = None
    num_layers: Count | None = None
    num_heads: Count | None = None
    vocab_size: Count | None = None
    optimizer: str | None = None
    status: Annotated[str, Meta(pattern=rf"^({'|'.join(STATUSES)})\Z")] = "ok"
    message: str | None = None
    gpu: str | None = None
    host_cpu: str | None = None
    profiler: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    nsys: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    command: str | None = None
    profile_command: str | None = None
    run: str | None = None
    capture: str | None = None
    stacks: tuple[str, ...] | None = None
    rank: CountOrNone | None = None
    world_size: Count | None = None
    rank_pids: tuple[CountOrNone, ...] | None = None
    group: str | None = None
    peak_memory_bytes: CountOrNone | None = None
    weights_bytes: CountOrNone | None = None
    cache_bytes: CountOrNone | None = None
    flops: CountedFlops | None = field(default=None, hash=False)
    waits: dict[str, CountOrNone] | None = field(default=None, hash=False)
    lines: dict[str, str] | None = field(default=None, hash=False)
    timed_by: str | None = None
    hooks_ms: Annotated[float, Meta(ge=0)] | None = None
    stopped_after: CountOrNone | None = None
    not_annotated: str | None = None


#: What a run says of its model beside the name.
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")


def overlaid(run: Run, more: Run) -> Run:
    """The run with whatever another description of it knows."""
    return replace(run, **{one.name: value for one in fields(more) if (value := getattr(more, one.name)) is not None})


def as_json(run: Run) -> dict[str, Any]:
    """The known keys of a manifest, with their values."""
    known = {one.name: value for one in fields(run) if (value := getattr(run, one.name)) is not None}
    return {name: asdict(value) if isinstance(value, CountedFlops) else value for name, value in known.items()}
