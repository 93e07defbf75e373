"""Makes the plan of ``nsys-analyze run`` from its options and the software and hardware of this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.capture.nsys import ProfileOptions, check_importer
from nsys_analyzer.capture.profilers import NsysProfiler, Profiler, TorchProfiler, find_torch_hint, make_timed_command
from nsys_analyzer.capture.targets import Annotation, Choices, Ranks, Target, program_target, transformer_targets
from nsys_analyzer.configuration import OPTIONS, Run, Value
from nsys_analyzer.errors import CaptureError, ConfigurationError, ExportError
from nsys_analyzer.system.machine import Nsys, count_gpus, find_nsys, nsys_version, torch_version

#: Options that may describe a program of the user. Every other option applies only to the package's transformer.
_PROGRAM_OPTIONS = (
    "context_length", "mode", "precision", "batch_size", "attention", "device", "steps", "warmup_steps",
)  # fmt: skip
#: The defaults of options on a CPU if they differ from those on a GPU, because a CPU is about 200 times as slow: a step
#: that takes 0.04 s on a GPU takes 8 s on a CPU.
_CPU_DEFAULTS = {name: [entry.default_on_cpu] for name, entry in OPTIONS.items() if entry.default_on_cpu is not None}
#: Options that apply only to a program of the user that the hooks annotate.
_ANNOTATION_OPTIONS = ("run_to_end", "modules", "no_stacks", "no_operators")
#: Options that apply only to a program that does not end by itself, such as a server.
_SERVER_OPTIONS = ("delay", "duration")
#: Options for a program that runs in several processes, and the hint for a user who gives one without a program.
_RANK_OPTIONS = ("nproc", "one_report")
_NPROC_HINT = "Give one: nsys-analyze run --nproc 2 -- python -m profiling_targets.distributed --strategy ddp"
#: The default limit of the number of steps that the recorded process times before, and after, the capture range.
_MOST_UNPROFILED_STEPS = 10
#: Programs that start the ranks themselves, so ``--nproc`` cannot start them.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
#: Matches the command line of a Python that does not load the hooks because of a flag, which is the group.
_ISOLATING_FLAG = re.compile(r"(?:\S*/)?python\S*(?: -[WX] \S+| -(?![cm] )\S+)*? (-[^-WXcm ]*[IES]\S*)")


@dataclass(frozen=True)
class Recording:
    """The options of ``nsys-analyze run`` for the recording. An option that was not given is None, False or empty."""

    profiler: str | None = None
    memory: bool = False
    counters: bool = False
    whole_program: bool = False
    nsys_option: tuple[str, ...] = ()
    delay: float | None = None
    duration: float | None = None
    annotate: bool = True
    run_to_end: bool = False
    modules: bool = False
    no_stacks: bool = False
    no_operators: bool = False
    nproc: int | None = None
    one_report: bool = False
    unprofiled_steps: int | None = None
    no_energy: bool = False

    @property
    def is_server(self) -> bool:
        """Whether the program is a server, which does not end by itself."""
        return self.delay is not None or self.duration is not None

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of a program that is started several times at once, or None for a single process."""
        return Ranks(self.nproc, self.one_report) if self.nproc else None


NO_RECORDING = Recording()


@dataclass(frozen=True)
class Plan:
    """The targets, the profiler (None if the targets are only timed), and notices for the user."""

    targets: tuple[Target, ...]
    profiler: Profiler | None
    notices: tuple[str, ...]

    def command_lines(self, folder: Path) -> Iterator[str]:
        """Yields each command that will be run, as a user would type it."""
        for target in self.targets:
            result_folder = folder / target.name
            yield f"# {target.name}"
            if target.is_timed:
                yield shlex.join(make_timed_command(target, result_folder))
            if self.profiler:
                yield shlex.join(self.profiler.record_command(target.program, result_folder, target.ranks))


def make_plan(
    models: Sequence[str] = (), options: Choices | None = None, recording: Recording = NO_RECORDING,
    target_option: Sequence[str] = (), program: Sequence[str] = (), *, dry_run: bool = False,
) -> Plan:  # fmt: skip
    """Plans a run: chooses the device, the profiler and the steps if no option sets them, and lists the targets.

    Args:
        models: the names of models.
        options: the values of the options that were given, by name.
        recording: the options for the recording.
        target_option: further arguments of the transformer. Each is split into words as a shell does.
        program: the command line of the user's program, or an empty one to run the transformer.
        dry_run: whether the plan is only printed. This machine then needs neither a GPU nor PyTorch.

    Raises:
        ConfigurationError: the options cannot be combined, or the model is unknown.
        CaptureError: PyTorch or a profiler is not installed.
    """
    options = options or {}
    requested = options.get("device", [None])[0]
    device = choose_device(None if requested is None else str(requested), with_torch=not program, dry_run=dry_run)
    torch_hint = "" if dry_run or torch_version() is not None else find_torch_hint(program)
    profiler, notices = choose_profiler(recording, device, torch_hint)
    if program:
        transformer_flags = [OPTIONS[name].flag for name in options if name not in _PROGRAM_OPTIONS]
        transformer_flags += ["--target-option"] if target_option else []
        _refuse_flags(transformer_flags, "for our transformer", "Give the program its own option")
        target = _make_program_target(program, models, options, recording, profiler)
        return Plan(_choose_measurements([target], recording, profiler), profiler, notices)
    _refuse_flags(_list_given_flags(recording, _RANK_OPTIONS), "for a program", _NPROC_HINT)
    program_flags = [] if recording.annotate else ["--no-annotate"]
    program_flags += _list_given_flags(recording, (*_ANNOTATION_OPTIONS, *_SERVER_OPTIONS))
    _refuse_flags(program_flags, "for a program of yours")
    if torch_hint:
        raise CaptureError("The targets need PyTorch, which is not installed", torch_hint)
    choices: dict[str, Sequence[Value]] = {"device": [device], **options}
    if device == "cpu":
        choices = {**_CPU_DEFAULTS, **choices}
        if not _CPU_DEFAULTS.keys() <= options.keys():
            lengths, warmup_steps = ", ".join(map(str, choices["context_length"])), choices["warmup_steps"][0]
            defaults = f"context {lengths}, {warmup_steps} + {choices['steps'][0]} steps"
            notices = (*notices, f"On the CPU: {defaults}; --context-length, --warmup and --steps change it.")
    arguments = _split_arguments("--target-option", target_option)
    targets = transformer_targets(models or ("small",), choices, arguments)
    return Plan(_choose_measurements(targets, recording, profiler), profiler, notices)


def _choose_measurements(
    targets: Sequence[Target], recording: Recording, profiler: Profiler | None
) -> tuple[Target, ...]:
    """Returns the targets with what is measured beside the recorded steps: energy, unprofiled steps and memory.

    By default, the recorded process measures as many unprofiled steps as are recorded, but at most
    ``_MOST_UNPROFILED_STEPS``.
    """
    targets = [replace(target, reads_energy=not recording.no_energy) for target in targets]
    if profiler is None or not profiler.records_range:
        return tuple(targets)
    recorded_steps = [target.annotation.steps if target.annotation else target.run.steps or 0 for target in targets]
    limits = [min(steps, _MOST_UNPROFILED_STEPS) for steps in recorded_steps]
    if recording.unprofiled_steps is not None:
        limits = [recording.unprofiled_steps] * len(targets)
    return tuple(
        replace(target, unprofiled_steps=limit, memory=recording.memory)
        for target, limit in zip(targets, limits, strict=True)
    )


def choose_device(requested: str | None, *, with_torch: bool = True, dry_run: bool = False) -> str:
    """Returns the requested device. Without a request, it returns ``cuda`` if PyTorch can use a GPU here, else ``cpu``.

    Args:
        requested: the device that the user requested, or None.
        with_torch: whether this Python runs the program. If its PyTorch is a CPU build, the program uses no GPU.
        dry_run: whether the program does not run on this machine.

    Raises:
        ConfigurationError: a GPU was requested, this machine has none, and this is no dry run.
    """
    gpus, is_cpu_build = count_gpus(), "+cpu" in (torch_version() or "")
    device = requested or ("cuda" if gpus and not (with_torch and is_cpu_build) else "cpu")
    if device == "cuda" and not gpus and not dry_run:
        raise ConfigurationError("--device cuda: CUDA sees no GPU here", "nsys-analyze doctor lists what is missing")
    return device


def _split_arguments(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Splits the values of an option into arguments, as a shell does."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}", "Close the quotation mark") from error


def _make_program_target(
    program: Sequence[str], models: Sequence[str], options: Choices, recording: Recording, profiler: Profiler | None
) -> Target:
    """Returns the target for the user's program, with the configuration that the command line gives."""
    if recording.one_report:
        _refuse_flags(
            [] if recording.nproc else ["--one-report"], "for several processes", "Give their number: --nproc 2"
        )
    if recording.nproc and (name := Path(program[0]).name) in _LAUNCHERS:
        raise ConfigurationError(f"--nproc starts the ranks, and so does {name}", f"Leave out --nproc or {name}")
    if profiler:
        profiler.record_command(program, Path(), recording.ranks)  # raises an error if the program cannot be recorded
    elif not recording.annotate:
        raise ConfigurationError("--profiler none with --no-annotate would neither record nor time the program")
    if recording.annotate and (isolating := _ISOLATING_FLAG.match(" ".join(program))):
        problem = f"python {isolating[1]} ignores PYTHONPATH or sitecustomize, which the annotation needs"
        raise ConfigurationError(problem, "Leave the flag out, or give --no-annotate to record without annotation")
    if not recording.annotate:
        step_flags = [OPTIONS[name].flag for name in ("steps", "warmup_steps") if name in options]
        flags = [*step_flags, *_list_given_flags(recording, (*_ANNOTATION_OPTIONS, "unprofiled_steps"))]
        _refuse_flags(flags, "for annotated programs, and --no-annotate turns the annotation off")
    choices: Choices = {"model": [find_model(name).name for name in models], **options}
    for name, values in choices.items():
        if len(values) > 1:
            raise ConfigurationError(f"{_flag(name)} has several values for one program", "Give one")
    described: dict[str, Any] = {name: values[0] for name, values in choices.items() if values and name != "device"}
    step_counts: dict[str, Any] = {name: OPTIONS[name].default for name in ("warmup_steps", "steps")} | described
    annotation = Annotation(
        step_counts["warmup_steps"], step_counts["steps"],
        opens_window=not (recording.whole_program or recording.is_server),
        run_to_end=recording.run_to_end,
        # Ranks that end at different steps would wait for each other forever.
        waits_for_steady_steps="warmup_steps" not in described and not recording.ranks, modules=recording.modules,
        stacks=not recording.no_stacks, operators=not recording.no_operators,
    )  # fmt: skip
    return program_target(program, Run(**described), annotation if recording.annotate else None, recording.ranks)


def choose_profiler(options: Recording, device: str, torch_hint: str = "") -> tuple[Profiler | None, tuple[str, ...]]:
    """Returns the requested profiler, or the best profiler that works here, and notices that explain the choice.

    Args:
        options: the options for the recording.
        device: the device of the program.
        torch_hint: how to install PyTorch if it is missing, else empty.

    Raises:
        NsysAnalyzerError: the requested profiler is missing, or an option does not apply to it.
    """
    if options.profiler == "none":
        general = ("profiler", "annotate", "run_to_end", "nproc")
        names = [option.name for option in fields(Recording) if option.name not in general]
        _refuse_flags(_list_given_flags(options, names), "for a profiler, and --profiler none uses none")
        return None, ()
    on_gpu = device == "cuda"
    nsys, nsys_fault = _find_nsys_and_fault() if options.profiler != "torch" else (None, "")
    if options.profiler == "nsys" and nsys_fault:
        raise CaptureError(nsys_fault, "nsys-analyze doctor shows how to fix it; or use --profiler torch")
    if options.counters and options.ranks and not options.one_report:
        raise ConfigurationError(
            "--counters samples each GPU once, so it cannot record each rank by itself",
            "Add --one-report, which writes one report of all ranks",
        )
    if nsys and not nsys_fault and (options.profiler == "nsys" or on_gpu):
        profile = ProfileOptions(
            # Without a GPU, no program calls cudaProfilerStart.
            capture_range=on_gpu and not (options.whole_program or options.is_server),
            memory=options.memory,
            counters=options.counters,
            delay=options.delay,
            duration=options.duration,
            extra=_split_arguments("--nsys-option", options.nsys_option),
        )
        limit = "No GPU: nsys only records NVTX ranges. Without --profiler nsys, operators are recorded."
        return NsysProfiler(nsys, profile), () if on_gpu else (limit,)
    if torch_hint:
        raise CaptureError("Recording needs PyTorch, or nsys with a GPU, and neither is here", torch_hint)
    _refuse_flags(_list_given_flags(options, ["nsys_option", "counters"]), "for nsys, and torch.profiler records here")
    recorder = TorchProfiler(
        memory=options.memory,
        whole_program=options.whole_program or options.is_server,
        delay_s=options.delay or 0,
        duration_s=options.duration or 0,
        is_server=options.is_server,
    )
    if options.profiler == "torch":
        return recorder, ()
    if on_gpu:
        return recorder, (f"{nsys_fault} (nsys-analyze doctor shows how to fix it). torch.profiler records instead.",)
    limits = " nsys would only see NVTX ranges;" if nsys else ""
    lead = "On the CPU:" if count_gpus() else "No GPU:"
    return recorder, (f"{lead}{limits} torch.profiler records, and PyTorch's operators on the CPU are the kernels.",)


def _find_nsys_and_fault() -> tuple[Nsys | None, str]:
    """Returns the nsys of this machine, or None, and why nsys cannot be used, or an empty text if it can."""
    path = find_nsys()  # raises an error if the environment variable NSYS names no command
    if path is None:
        return None, "nsys is not installed here"
    try:
        nsys = Nsys(path, nsys_version(path))
    except ExportError as error:
        return None, error.message
    importer = check_importer(nsys)
    return nsys, importer.description if importer.status in ("missing", "broken") else ""


def _list_given_flags(recording: Recording, names: Sequence[str]) -> Iterator[str]:
    """Yields the flags of those options among ``names`` that the user gave."""
    return (_flag(name) for name in names if getattr(recording, name) not in (None, False, ()))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_flags(flags: Iterable[str], purpose: str, hint: str = "") -> None:
    """Raises an error for the first of the flags, which would have no effect: it is meant for another purpose."""
    for flag in flags:
        raise ConfigurationError(f"{flag} is {purpose}", hint)
