"""What ``nsys-analyze run`` is going to do, from its options and what this machine has."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.models import find_model, mode_from_text
from nsys_analyzer.capture.doctor import importer_check
from nsys_analyzer.capture.machine import gpu_count, torch_version
from nsys_analyzer.capture.nsys import Nsys, find_nsys, nsys_version
from nsys_analyzer.capture.profile import ProfileOptions, profile_command
from nsys_analyzer.capture.profilers import NsysProfiler, Profiler, TorchProfiler
from nsys_analyzer.capture.targets import Sweep, Target, program_target
from nsys_analyzer.errors import CaptureError, ConfigurationError, ExportError

#: Context length, warm-up and measured steps by device: a step that takes a GPU 0.04 s takes a CPU 8.
_DEFAULTS = {"cuda": (256, 5, 10), "cpu": (128, 1, 2)}
_TRANSFORMERS_OWN = ("optimizer", "compiled", "cuda_graph", "warmup", "steps", "target_option")
_PROFILERS_OWN = ("trace", "memory", "autograd_ranges", "whole_program", "nsys_option")
INSTALL_TORCH = "Install it: pip install 'nsys-analyze[run]'"


@dataclass(frozen=True)
class Plan:
    """The targets, what records them (None: timings alone), and what the user should know before."""

    targets: tuple[Target, ...]
    profiler: Profiler | None
    notices: tuple[str, ...]

    def command_lines(self, folder: Path) -> Iterator[str]:
        """Every command that will be run, as one would type it."""
        for target in self.targets:
            place = folder / target.name
            yield f"# {target.name}"
            if target.timed:
                yield shlex.join(target.program)
            if self.profiler:
                yield shlex.join(self.profiler.command(target.program, place))


def make_plan(options: Mapping[str, Any], given: Collection[str]) -> Plan:
    """Chooses device, profiler and steps where the options do not, and lists the targets.

    Args:
        options: the command's parameters by name.
        given: the names of those that were on the command line.

    Raises:
        ConfigurationError: options that do not go together, or an unknown model.
        CaptureError: what is needed is not installed.
    """
    device = choose_device(options["device"], with_torch=not options["program"])
    profiler, notices = choose_profiler(options, given, device)
    if options["program"]:
        return Plan((_program(options, given, profiler),), profiler, notices)
    if torch_version() is None:
        raise CaptureError("The targets need PyTorch, which is not installed", INSTALL_TORCH)
    sweep = _sweep(options, device)
    return Plan(sweep.targets(), profiler, (*notices, *_lighter(sweep, given)))


def choose_device(asked: str | None, *, with_torch: bool = True) -> str:
    """``cuda`` or ``cpu``: what was asked for, else a GPU where there is one that this torch can use.

    Raises:
        ConfigurationError: a GPU was asked for, and there is none.
    """
    gpus = gpu_count()
    device = asked or ("cuda" if gpus and not (with_torch and _is_cpu_build()) else "cpu")
    if device == "cuda" and not gpus:
        raise ConfigurationError("--device cuda: CUDA sees no GPU here", "nsys-analyze doctor says what is missing")
    return device


def _lighter(sweep: Sweep, given: Collection[str]) -> Iterator[str]:
    """What a CPU is spared by default."""
    if sweep.device == "cpu" and not {"context_length", "warmup", "steps"} <= set(given):
        context, warmup, steps = _DEFAULTS["cuda"]
        chosen = f"context {', '.join(map(str, sweep.context_lengths))}, {sweep.warmup_steps} + {sweep.steps} steps"
        usual = f"context {context}, {warmup} + {steps} steps (warm-up + measured)"
        yield f"On the CPU: {chosen}, where a GPU takes {usual}; --context-length, --warmup and --steps change it."


def _is_cpu_build() -> bool:
    return "+cpu" in (torch_version() or "")


def _sweep(options: Mapping[str, Any], device: str) -> Sweep:
    context_length, warmup, steps = _DEFAULTS[device]
    return Sweep(
        models=options["model"],
        context_lengths=options["context_length"] or (context_length,),
        modes=options["mode"],
        precisions=options["precision"],
        batch_size=options["batch_size"],
        warmup_steps=warmup if options["warmup"] is None else options["warmup"],
        steps=steps if options["steps"] is None else options["steps"],
        device=device,
        attention=options["attention"],
        optimizer=options["optimizer"],
        compile=options["compiled"],
        cuda_graph=options["cuda_graph"],
        options=_words(options, "target_option"),
    )


def _words(options: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The words of an option that is passed on, as a shell splits them."""
    try:
        return tuple(word for text in options[name] for word in shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{_spelled(name)}: {error}", "Close the quotation mark") from error


def _spelled(name: str) -> str:
    return "--compile" if name == "compiled" else f"--{name.replace('_', '-')}"


def _program(options: Mapping[str, Any], given: Collection[str], profiler: Profiler | None) -> Target:
    """The user's program, described by what was said of it on the command line."""
    for name in _TRANSFORMERS_OWN:
        if name in given:
            raise ConfigurationError(f"{_spelled(name)} is for our transformer", "Give the program its own option")
    if profiler is None:
        raise ConfigurationError("--profiler none leaves nothing to do: it is our transformer that times itself")
    profiler.command(options["program"], Path())  # it raises where this program cannot be recorded
    described: dict[str, Any] = {}
    for name in ("model", "context_length", "mode", "precision"):
        if name in given and len(options[name]) > 1:
            raise ConfigurationError(f"{_spelled(name)} has several values for one program", "Give one")
        if name in given:
            described[name] = options[name][0]
    described |= {name: options[name] for name in ("batch_size", "attention") if name in given}
    if "model" in described:
        described["model"] = find_model(described["model"]).name
    if "mode" in described:
        described["mode"] = mode_from_text(described["mode"])
    return program_target(options["program"], described)


def choose_profiler(
    options: Mapping[str, Any], given: Collection[str], device: str
) -> tuple[Profiler | None, tuple[str, ...]]:
    """The profiler that was asked for, or the best that works here, and why.

    Raises:
        NsysAnalyzerError: what was asked for is not here, or does not go with the other options.
    """
    asked = options["profiler"]
    if asked == "none":
        _refuse(_PROFILERS_OWN, given, "for a profiler, and --profiler none is none")
        return None, ()
    on_gpu = device == "cuda"
    nsys, lack = _usable_nsys() if asked != "torch" else (None, "")
    if asked == "nsys" and lack:
        raise CaptureError(lack, "nsys-analyze doctor says what mends it; or use --profiler torch")
    if nsys and not lack and (asked == "nsys" or on_gpu):
        return _nsys(options, nsys, on_gpu=on_gpu)
    if torch_version() is None:
        raise CaptureError("Neither nsys with a GPU nor PyTorch is here to record with", INSTALL_TORCH)
    _refuse(("trace", "autograd_ranges", "nsys_option"), given, "for nsys, and torch.profiler records here")
    recorder = TorchProfiler(memory=options["memory"], whole_program=options["whole_program"])
    if asked == "torch":
        return recorder, ()
    if on_gpu:
        return recorder, (f"{lack} (nsys-analyze doctor says what mends it): torch.profiler records.",)
    seen = " nsys would see NVTX ranges alone;" if nsys else ""
    lead = "On the CPU:" if gpu_count() else "No GPU:"
    return recorder, (f"{lead}{seen} torch.profiler records, and PyTorch's operators on the CPU are the kernels.",)


def _usable_nsys() -> tuple[Nsys | None, str]:
    """The nsys of this machine, and what keeps it from being used, empty where nothing does."""
    path = find_nsys()  # it raises where NSYS names no command: who set it wants no other
    if path is None:
        return None, "There is no nsys here"
    try:
        nsys = Nsys(path, nsys_version(path))
    except ExportError as error:
        return None, error.message
    importer = importer_check(nsys)
    return nsys, importer.found if importer.status in ("missing", "broken") else ""


def _nsys(options: Mapping[str, Any], nsys: Nsys, *, on_gpu: bool) -> tuple[Profiler, tuple[str, ...]]:
    profile = ProfileOptions(
        trace=tuple(word.strip() for word in options["trace"].split(",") if word.strip()),
        capture_range=on_gpu and not options["whole_program"],  # nobody calls cudaProfilerStart without a GPU
        memory=options["memory"],
        autograd_ranges=options["autograd_ranges"],
        extra=_words(options, "nsys_option"),
    )
    profile_command(nsys, Path("capture.nsys-rep"), ("true",), profile)  # it raises where this nsys is too old
    notice = () if on_gpu else ("No GPU: nsys records NVTX ranges alone. Without --profiler nsys, operators are seen.",)
    return NsysProfiler(nsys, profile), notice


def _refuse(names: Collection[str], given: Collection[str], why: str) -> None:
    """What was asked for must not be left out in silence."""
    for name in names:
        if name in given:
            raise ConfigurationError(f"{_spelled(name)} is {why}")
