"""The plan of ``nsys-analyze run``, made from its options and what this machine has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.capture.nsys import ProfileOptions, importer_check
from nsys_analyzer.capture.profilers import NsysProfiler, Profiler, TorchProfiler, lack_of_torch, timed_command
from nsys_analyzer.capture.targets import Annotation, Choices, Ranks, Target, program_target, transformer_targets
from nsys_analyzer.configuration import OPTIONS, Run, Value
from nsys_analyzer.errors import CaptureError, ConfigurationError, ExportError
from nsys_analyzer.system.machine import gpu_count, torch_version
from nsys_analyzer.system.nsys import Nsys, find_nsys, nsys_version

#: What a program of the user's may be described by; the other options are those of our transformer alone.
_OF_ANY_PROGRAM = (
    "context_length", "mode", "precision", "batch_size", "attention", "device", "steps", "warmup_steps",
)  # fmt: skip
#: The defaults of a CPU where a GPU has others: a step that takes a GPU 0.04 s takes a CPU 8.
_LIGHTER = {name: [entry.default_on_cpu] for name, entry in OPTIONS.items() if entry.default_on_cpu is not None}
#: What only the annotation of a program does.
_OF_ANNOTATION = ("run_to_end", "modules", "no_stacks")
#: What is asked of a program that runs on.
_OF_SERVERS = ("delay", "duration")
#: What says how many processes a program has, and the words behind which our own has several.
_OF_RANKS = ("nproc", "one_report")
_RANKS_OF_OURS = "Give one: nsys-analyze run --nproc 2 -- python -m profiling_targets.distributed --strategy ddp"
#: Programs that start the ranks themselves.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
#: A flag of Python with which it loads no hooks.
_SHUTS_OUT = re.compile(r"(?:\S*/)?python\S*(?: -[WX] \S+| -(?![cm] )\S+)*? (-[^-WXcm ]*[IES]\S*)")


@dataclass(frozen=True)
class Recording:
    """How ``nsys-analyze run`` was asked to record, by its options: None, False and empty are those not given."""

    profiler: str | None = None
    memory: bool = False
    whole_program: bool = False
    nsys_option: tuple[str, ...] = ()
    delay: float | None = None
    duration: float | None = None
    annotate: bool = True
    run_to_end: bool = False
    modules: bool = False
    no_stacks: bool = False
    nproc: int | None = None
    one_report: bool = False

    @property
    def runs_on(self) -> bool:
        """Whether the program would not end by itself."""
        return self.delay is not None or self.duration is not None

    @property
    def ranks(self) -> Ranks | None:
        """The processes of a program that is started several times at once; None for one that is started once."""
        return Ranks(self.nproc, self.one_report) if self.nproc else None


NO_RECORDING = Recording()


@dataclass(frozen=True)
class Plan:
    """The targets, their profiler (None: timings alone), and notices for the user."""

    targets: tuple[Target, ...]
    profiler: Profiler | None
    notices: tuple[str, ...]

    def command_lines(self, folder: Path) -> Iterator[str]:
        """Yields every command that will be run, as one would type it."""
        for target in self.targets:
            place = folder / target.name
            yield f"# {target.name}"
            if target.is_timed:
                yield shlex.join(timed_command(target, place))
            if self.profiler:
                yield shlex.join(self.profiler.command(target.program, place, target.ranks))


def make_plan(
    models: Sequence[str] = (), options: Choices | None = None, recording: Recording = NO_RECORDING,
    target_option: Sequence[str] = (), program: Sequence[str] = (), *, elsewhere: bool = False,
) -> Plan:  # fmt: skip
    """Chooses device, profiler and steps where nothing was asked, and lists the targets.

    Args:
        models: the names of models.
        options: the values of the options that were given, by name.
        recording: how to record.
        target_option: passed on to the transformer, each split as a shell does.
        program: the program to run in place of the transformer, empty for none.
        elsewhere: whether the plan is only printed, since the program will run on another machine.

    Raises:
        ConfigurationError: options that do not go together, or an unknown model.
        CaptureError: what is needed is not installed.
    """
    options = options or {}
    asked = options.get("device", [None])[0]
    device = choose_device(None if asked is None else str(asked), with_torch=not program, elsewhere=elsewhere)
    lack = "" if elsewhere or torch_version() is not None else lack_of_torch(program)
    profiler, notices = choose_profiler(recording, device, lack)
    if program:
        foreign = [OPTIONS[name].flag for name in options if name not in _OF_ANY_PROGRAM]
        foreign += ["--target-option"] if target_option else []
        _refuse(foreign, "for our transformer", "Give the program its own option")
        return Plan((_program(program, models, options, recording, profiler),), profiler, notices)
    of_programs = [] if recording.annotate else ["--no-annotate"]
    _refuse(_given(recording, _OF_RANKS), "for a program", _RANKS_OF_OURS)
    _refuse([*of_programs, *_given(recording, (*_OF_ANNOTATION, *_OF_SERVERS))], "for a program of yours")
    if lack:
        raise CaptureError("The targets need PyTorch, which is not installed", lack)
    choices: dict[str, Sequence[Value]] = {"device": [device], **options}
    if device == "cpu":
        choices = {**_LIGHTER, **choices}
        if not _LIGHTER.keys() <= options.keys():
            lighter = f"context {', '.join(map(str, choices['context_length']))}"
            lighter += f", {choices['warmup_steps'][0]} + {choices['steps'][0]} steps"
            notices = (*notices, f"On the CPU: {lighter}; --context-length, --warmup and --steps change it.")
    words = _words("--target-option", target_option)
    return Plan(transformer_targets(models or ("small",), choices, words), profiler, notices)


def choose_device(requested: str | None, *, with_torch: bool = True, elsewhere: bool = False) -> str:
    """Chooses ``cuda`` or ``cpu``: what was asked for, else a GPU where there is one that this torch can use.

    Raises:
        ConfigurationError: a GPU was asked for, and there is none, nor is it ``elsewhere`` that the program will run.
    """
    gpus, is_cpu_build = gpu_count(), "+cpu" in (torch_version() or "")
    device = requested or ("cuda" if gpus and not (with_torch and is_cpu_build) else "cpu")
    if device == "cuda" and not gpus and not elsewhere:
        raise ConfigurationError("--device cuda: CUDA sees no GPU here", "nsys-analyze doctor says what is missing")
    return device


def _words(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the words of an option that is passed on, as a shell splits them."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}", "Close the quotation mark") from error


def _program(
    program: Sequence[str], models: Sequence[str], options: Choices, recording: Recording, profiler: Profiler | None
) -> Target:
    """Returns the user's program, described by the options on the command line."""
    if recording.one_report:
        _refuse([] if recording.nproc else ["--one-report"], "for several processes", "Say how many: --nproc 2")
    if recording.nproc and (name := Path(program[0]).name) in _LAUNCHERS:
        raise ConfigurationError(f"--nproc starts the ranks, and so would {name}", f"Leave --nproc or {name} out")
    if profiler:
        profiler.command(program, Path(), recording.ranks)  # it raises where this program cannot be recorded
    elif not recording.annotate:
        raise ConfigurationError("--profiler none leaves nothing to do: --no-annotate takes no times")
    if recording.annotate and (found := _SHUTS_OUT.match(" ".join(program))):
        problem = f"python {found[1]} ignores PYTHONPATH or sitecustomize, through which steps and phases are found"
        raise ConfigurationError(problem, "Leave it out, or record without them: nsys-analyze run --no-annotate")
    if not recording.annotate:
        of_steps = [OPTIONS[name].flag for name in ("steps", "warmup_steps") if name in options]
        flags = [*of_steps, *_given(recording, _OF_ANNOTATION)]
        _refuse(flags, "for annotated programs, and --no-annotate asks for none")
    choices: Choices = {"model": [find_model(name).name for name in models], **options}
    for name, values in choices.items():
        if len(values) > 1:
            raise ConfigurationError(f"{_flag(name)} has several values for one program", "Give one")
    described: dict[str, Any] = {name: values[0] for name, values in choices.items() if values and name != "device"}
    counts: dict[str, Any] = {name: OPTIONS[name].default for name in ("warmup_steps", "steps")} | described
    annotation = Annotation(
        counts["warmup_steps"], counts["steps"], window=not (recording.whole_program or recording.runs_on),
        run_to_end=recording.run_to_end,
        # Ranks that end at different steps would wait for each other for ever.
        steady="warmup_steps" not in described and not recording.ranks, modules=recording.modules,
        stacks=not recording.no_stacks,
    )  # fmt: skip
    return program_target(program, Run(**described), annotation if recording.annotate else None, recording.ranks)


def choose_profiler(options: Recording, device: str, torch_hint: str = "") -> tuple[Profiler | None, tuple[str, ...]]:
    """Chooses the profiler that was asked for, or the best that works here, and why.

    Args:
        options, device: what is recorded, and where.
        torch_hint: how to get PyTorch, if it is missing; else empty.

    Raises:
        NsysAnalyzerError: what was asked for is not here, or does not go with the other options.
    """
    if options.profiler == "none":
        of_all = ("profiler", "annotate", "run_to_end", "nproc")
        names = [option.name for option in fields(Recording) if option.name not in of_all]
        _refuse(_given(options, names), "for a profiler, and --profiler none uses none")
        return None, ()
    on_gpu = device == "cuda"
    nsys, lack = _usable_nsys() if options.profiler != "torch" else (None, "")
    if options.profiler == "nsys" and lack:
        raise CaptureError(lack, "nsys-analyze doctor says how to fix it; or use --profiler torch")
    if nsys and not lack and (options.profiler == "nsys" or on_gpu):
        return _nsys(options, nsys, on_gpu=on_gpu)
    if torch_hint:
        raise CaptureError("Neither nsys with a GPU nor PyTorch is here to record with", torch_hint)
    _refuse(_given(options, ["nsys_option"]), "for nsys, and torch.profiler records here")
    records_all, runs_on = options.whole_program or options.runs_on, options.runs_on
    recorder = TorchProfiler(options.memory, records_all, options.delay or 0, options.duration or 0, runs_on=runs_on)
    if options.profiler == "torch":
        return recorder, ()
    if on_gpu:
        return recorder, (f"{lack} (nsys-analyze doctor says how to fix it): torch.profiler records.",)
    limits = " nsys would see NVTX ranges alone;" if nsys else ""
    lead = "On the CPU:" if gpu_count() else "No GPU:"
    return recorder, (f"{lead}{limits} torch.profiler records, and PyTorch's operators on the CPU are the kernels.",)


def _usable_nsys() -> tuple[Nsys | None, str]:
    """Finds the nsys of this machine, and the reason why it cannot be used, empty where it can."""
    path = find_nsys()  # it raises where NSYS names no command: nobody who sets it wants another
    if path is None:
        return None, "There is no nsys here"
    try:
        nsys = Nsys(path, nsys_version(path))
    except ExportError as error:
        return None, error.message
    importer = importer_check(nsys)
    return nsys, importer.found if importer.status in ("missing", "broken") else ""


def _nsys(options: Recording, nsys: Nsys, *, on_gpu: bool) -> tuple[Profiler, tuple[str, ...]]:
    profile = ProfileOptions(
        # Nobody calls cudaProfilerStart without a GPU.
        capture_range=on_gpu and not (options.whole_program or options.runs_on),
        memory=options.memory,
        delay=options.delay,
        duration=options.duration,
        extra=_words("--nsys-option", options.nsys_option),
    )
    notice = () if on_gpu else ("No GPU: nsys records NVTX ranges alone. Without --profiler nsys, operators are seen.",)
    return NsysProfiler(nsys, profile), notice


def _given(asked: Recording, names: Sequence[str]) -> Iterator[str]:
    return (_flag(name) for name in names if getattr(asked, name) not in (None, False, ()))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(flags: Iterable[str], why: str, hint: str = "") -> None:
    """Refuses the first of these options, which would have no effect."""
    for flag in flags:
        raise ConfigurationError(f"{flag} is {why}", hint)
