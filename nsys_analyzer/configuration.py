"""Declares the configuration of a run, which command lines, manifests, tables of times and reports use."""

# ruff: noqa: RUF009 - `option` makes a field of a dataclass

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from msgspec import Meta

from nsys_analyzer.system.strict_json import LARGEST_EXACT_INTEGER

SCHEMA_VERSION = 1
#: The file in which ``nsys-analyze verify`` records predictions and measurements.
LEDGER = Path(".nsys-analyze", "ledger.jsonl")
MODES = ("forward", "forward-backward", "train")
PRECISIONS = ("fp32", "tf32", "bf16")
ATTENTION_IMPLEMENTATIONS = ("unfused", "sdpa")
STATUSES = ("ok", "oom", "failed", "timeout")

Count = Annotated[int, Meta(ge=1, le=LARGEST_EXACT_INTEGER)]
CountFromZero = Annotated[int, Meta(ge=0, le=LARGEST_EXACT_INTEGER)]
Seed = Annotated[int, Meta(ge=-LARGEST_EXACT_INTEGER, le=LARGEST_EXACT_INTEGER)]
Value: TypeAlias = str | int | float | bool

#: The type of an unknown value of an option: None, or NoReturn if each option must have a value.
Unknown = TypeVar("Unknown")


@dataclass(frozen=True)
class Option:
    """Describes how an option of a target or an experiment is shown on command lines, in names and in reports.

    Attributes:
        default: the default value, which determines the type of the option. It is None if the program chooses the
            value, and a tuple if an experiment takes several values.
        help: the help text.
        choices: the possible values; empty if they are not limited to a list.
        default_on_cpu: a smaller default for ``nsys-analyze run`` and experiments on a CPU; None without one.
        least: the smallest value of a number.
        unit: the placeholder for a value in help texts.
        spelling: the name on a command line without the dashes; empty if it is ``name``.
        several: whether a sweep takes several values.
        in_run: whether ``nsys-analyze run`` has the option. Other options can be given by ``--target-option``.
        in_name: the part of a result's name for a value other than the default. It is empty if names do not contain
            the value, and None for the name of the option with the value.
        column: the column in the report. It is empty if another table shows the value, and None for the option's name.
        name: the name of the field.
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
        """Returns the option on a command line, such as ``--warmup``."""
        return "--" + (self.spelling or self.name).replace("_", "-")

    @property
    def kind(self) -> type:
        """Returns the type of a value."""
        value = self.default[0] if isinstance(self.default, tuple) else self.default
        return str if value is None else type(value)

    def default_on(self, device: str) -> Any:
        """Returns the default on ``cuda`` or ``cpu``."""
        return self.default_on_cpu if device == "cpu" and self.default_on_cpu is not None else self.default

    def arguments(self, value: Value) -> list[str]:
        """Returns the command-line arguments for a value. They are empty for a value that is the default everywhere."""
        if self.kind is bool:
            return [self.flag] if value else []
        is_default = not self.several and self.default_on_cpu is None and value == self.default
        return [] if is_default else [self.flag, str(value)]

    def name_part(self, value: Value) -> str:
        """Returns the part of a result's name for this value; empty if the name does not contain the value."""
        if value == self.default or self.in_name == "":
            return ""
        option_name = self.name.replace("_", "-")
        return (self.in_name or (option_name if self.kind is bool else f"{option_name}-{{}}")).format(value)


def option(default: Value | None, help: str, choices: tuple[str, ...] = (), **attributes: Any) -> Any:
    """Returns a field of :class:`Options` with its :class:`Option`. The default of the field is None, for unknown."""
    return field(default=None, metadata={"option": Option(default, help, choices, **attributes)})


@dataclass(frozen=True, kw_only=True)
class Options(Generic[Unknown]):
    """The options of the transformer target: each field is an option of ``nsys-analyze run`` and of the target.

    ``Options[None]`` may have unknown values, and ``Options[NoReturn]`` has none. A new option needs a field here, and
    a line in the target that uses it. Command lines, names and tables list the options in the order of the fields.
    """

    context_length: Count | Unknown = option(
        256, "Context length.", default_on_cpu=128, unit="TOKENS", several=True, in_name="", column=""
    )
    mode: str | Unknown = option(
        "train", "Phases of a step: forward only, also loss and backward, or also the optimizer.", MODES, several=True,
        in_name="", column="",
    )  # fmt: skip
    precision: str | Unknown = option("fp32", "Precision; bf16 uses autocast.", PRECISIONS, several=True, in_name="")
    batch_size: Count | Unknown = option(4, "Batch size.", in_name="b{}", column="")
    attention: str | Unknown = option(
        "unfused", "Naive attention (unfused), or PyTorch's scaled_dot_product_attention (sdpa).",
        ATTENTION_IMPLEMENTATIONS, in_name="{}",
    )  # fmt: skip
    compile: bool | Unknown = option(
        False, "Compile the model with torch.compile. The forward pass then contains no ranges.", column="compiled"
    )
    cuda_graph: bool | Unknown = option(False, "Capture each phase as a CUDA graph and replay it.", column="CUDA graph")
    seed: Seed | Unknown = option(0, "Seed for weights and data.", in_run=False, least=-LARGEST_EXACT_INTEGER)
    device: str | Unknown = option(
        None, "Device to run on. Default: cuda if there is a GPU.", ("cuda", "cpu"), in_name="", column=""
    )
    steps: CountFromZero | Unknown = option(10, "Measured steps.", default_on_cpu=2, in_name="", column="")
    warmup_steps: CountFromZero | Unknown = option(
        5, "Warm-up steps, which are not measured.", default_on_cpu=1, least=0, spelling="warmup", in_name="", column=""
    )


#: The options by the names of their fields.
OPTIONS: dict[str, Option] = {
    declared.name: replace(declared.metadata["option"], name=declared.name) for declared in fields(Options)
}


#: A number of FLOPs. A step of a large model may have 1e16 FLOPs, which exceeds the maximum of ``Count``.
Flops = Annotated[float, Meta(ge=0, le=1e24)]
#: FLOPs by two keys: by phase and kernel class, or by module and phase.
NestedFlops: TypeAlias = dict[str, dict[str, Flops]]


@dataclass(frozen=True, kw_only=True)
class CompiledCode:
    """The graph breaks and the recompilations of a program that uses torch.compile.

    Attributes:
        graph_breaks: the number of compilations in which torch.compile had to end a graph, by the line and the reason
            (``model.py:7 in forward: Failed to trace builtin operator``).
        recompiles: the number of recompilations during the measured steps, by the function and the reason
            (``model.py:5 in forward: tensor 'x' size mismatch at index 0. expected 4, actual 6``).
    """

    graph_breaks: dict[str, Count] = field(default_factory=dict)
    recompiles: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CountedFlops:
    """The FLOPs of one step of a program, counted while its operators ran.

    Attributes:
        passes: the number of times that each phase ran in the step.
        classes: FLOPs by phase and kernel class. The phase ``recomputed`` is a forward pass that backward runs again.
        modules: FLOPs by module (``GPT/h.0.attn: Attention``) and phase.
        softmax: FLOPs of the softmax in all forward passes, counted as 5 per attention score.
        attention_matmul: FLOPs of the attention matmuls in all forward passes.
        unknown: operators that may compute something, but whose FLOPs are not known.
        modules_of_unknown: the modules that call each of these operators. A formula may fail for some modules only.
    """

    passes: dict[str, CountFromZero]
    classes: NestedFlops
    modules: NestedFlops = field(default_factory=dict)
    softmax: Flops = 0
    attention_matmul: Flops = 0
    unknown: list[str] = field(default_factory=list)
    modules_of_unknown: dict[str, list[str]] = field(default_factory=dict)

    def flops_of_phase(self, phase: str) -> float:
        """Returns the FLOPs of all passes of a phase."""
        return sum(self.classes.get(phase, {}).values())

    def flops_per_pass(self, phase: str) -> Mapping[str, float]:
        """Returns the FLOPs of one pass by kernel class; empty if the phase has no pass."""
        passes = self.passes.get(phase)
        return {name: flops / passes for name, flops in self.classes.get(phase, {}).items()} if passes else {}

    @property
    def flops_per_step(self) -> float:
        """Returns the FLOPs of one step, without recomputed passes and without the optimizer."""
        return sum(self.flops_of_phase(phase) for phase in self.classes if phase not in ("recomputed", "optimizer"))


@dataclass(frozen=True, kw_only=True)
class PhasePower:
    """The mean power of a GPU while a phase runs, fitted to the readings of its energy counter.

    Attributes:
        watts, error_watts: the power, and its standard error.
        seconds_per_step: the time of the phase in a step.
    """

    watts: Annotated[float, Meta(ge=0)]
    error_watts: Annotated[float, Meta(ge=0)]
    seconds_per_step: Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class GpuEnergy:
    """The energy that one GPU consumed during steps without a profiler, as NVIDIA's management library counts it.

    Attributes:
        gpu: the name of the GPU. ``index`` is its number in NVML, which ``nvidia-smi`` also shows.
        rank: the rank of the process that used the GPU; None if the program has no ranks.
        steps: the number of steps, which took ``seconds`` together.
        joules, error_joules: the energy of all these steps, and the largest error by the counter's updates.
        idle_watts: the power before the program used the GPU; None if it was not seen idle for long enough.
        clock_mhz, max_clock_mhz: the median clock of the multiprocessors during the steps, and the highest clock that
            the GPU allows.
        limits: the share of the readings in which the clock was limited, by cause: ``power`` or ``heat``.
        phases: the power while each phase ran; empty if the phases are too short.
    """

    gpu: str
    index: CountFromZero
    rank: CountFromZero | None = None
    steps: Count
    seconds: Annotated[float, Meta(gt=0)]
    joules: Annotated[float, Meta(ge=0)]
    error_joules: Annotated[float, Meta(ge=0)]
    idle_watts: Annotated[float, Meta(ge=0)] | None = None
    clock_mhz: CountFromZero | None = None
    max_clock_mhz: CountFromZero | None = None
    limits: dict[str, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=dict)
    phases: dict[str, PhasePower] = field(default_factory=dict)


@dataclass(frozen=True)
class Prices:
    """The prices that the cost of tokens is computed from; None for an unknown price.

    Attributes:
        per_kwh: the price of a kWh of electricity.
        per_hour: the price of one GPU for an hour.
    """

    per_kwh: float | None = None
    per_hour: float | None = None


#: The prices if none are given.
NO_PRICES = Prices()


@dataclass(frozen=True, kw_only=True)
class Run(Options[None]):
    """The manifest of a run, which is a JSON object with these keys. Each key is optional. None means unknown.

    Attributes:
        model: the name of the model. Dimensions given beside the name take precedence over the name.
        optimizer: the name of the optimizer.
        status: one of ``STATUSES``. ``message`` gives the reason for a status other than ``ok``.
        profiler: ``nsys``, ``torch``, or ``none`` for a run that leaves no trace.
        python, torch, cuda, driver, nsys: the versions of the software.
        git_dirty: whether tracked files differ from the commit of the working folder.
        command: the command line of the target without the profiler.
        profile_command: the command line of the target with the profiler.
        run: the ``nsys-analyze run`` command that started the timed and the recorded run.
        capture: the file name of the trace that the manifest belongs to.
        stacks: the names of the files with Python stacks that were sampled during the recording.
        operators: the names of the files that list the operator calls of one extra step, which ran after the measured
            steps.
        memory: the names of the memory snapshots of PyTorch, from a further run of the program.
        rank: the rank of the capture's process.
        world_size: the number of ranks of the run.
        rank_pids: the process ID of each rank, if one capture records all of them.
        group: an identifier that all ranks of one run share, and that no other run has.
        peak_memory_bytes: the most device memory of tensors, without a profiler.
        energy: the energy of steps without a profiler, for each GPU that the program used.
        weights_bytes: the bytes of weights that each pass of a decoding model reads.
        cache_bytes: the bytes of keys and values of one position in all layers.
        flops: the FLOPs that were counted while the user's program ran.
        compiled: the graph breaks and recompilations of the user's program; None if torch.compile was not used.
        waits: the number of waits for the GPU per step, by line of the program, from PyTorch's warnings.
        lines: the file and line of each module class's ``forward``, and of the first call of each phase.
        hooks_ms: the CPU time that the hooks take in a step of the timed run.
        stopped_after: the step after which the user's program was ended, because the recording was complete.
        not_annotated: the parts of the user's program that the hooks did not find, and the reason.
        timed_by: ``hooks`` if hooks measured the times without a profiler, instead of the program itself.
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
    operators: tuple[str, ...] | None = None
    memory: tuple[str, ...] | None = None
    rank: CountFromZero | None = None
    world_size: Count | None = None
    rank_pids: tuple[CountFromZero, ...] | None = None
    group: str | None = None
    peak_memory_bytes: CountFromZero | None = None
    energy: tuple[GpuEnergy, ...] | None = field(default=None, hash=False)
    weights_bytes: CountFromZero | None = None
    cache_bytes: CountFromZero | None = None
    flops: CountedFlops | None = field(default=None, hash=False)
    compiled: CompiledCode | None = field(default=None, hash=False)
    waits: dict[str, CountFromZero] | None = field(default=None, hash=False)
    lines: dict[str, str] | None = field(default=None, hash=False)
    timed_by: str | None = None
    hooks_ms: Annotated[float, Meta(ge=0)] | None = None
    stopped_after: CountFromZero | None = None
    not_annotated: str | None = None


#: The phases that a run times, in the order of a step, by the mode of the run.
PHASES_OF_MODE = {
    "forward": ("forward", "step"),
    "forward+backward": ("forward", "loss", "backward", "step"),
    "train": ("forward", "loss", "backward", "optimizer", "step"),
}
#: The keys of a run with the dimensions of its model.
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")


def update_run(run: Run, update: Run) -> Run:
    """Returns the run, in which the known values of ``update`` replace the run's values."""
    names = [declared.name for declared in fields(update)]
    return replace(run, **{name: value for name in names if (value := getattr(update, name)) is not None})


def manifest_values(run: Run) -> dict[str, Any]:
    """Returns the keys of a manifest whose values are known, with these values."""
    values = {declared.name: getattr(run, declared.name) for declared in fields(run)}
    return {
        name: asdict(value) if isinstance(value, (CountedFlops, CompiledCode)) else value
        for name, value in values.items()
        if value is not None and name != "energy"
    } | ({"energy": [asdict(row) for row in run.energy]} if run.energy else {})
