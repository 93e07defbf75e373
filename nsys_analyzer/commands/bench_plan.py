"""What ``nsys-analyze bench NAME`` is going to do, from its options and what this machine has."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nsys_analyzer.benches import all_cases
from nsys_analyzer.benches.model import Bench, Case, Option, Profiled, Settings
from nsys_analyzer.capture.machine import torch_version
from nsys_analyzer.capture.profilers import Profiler
from nsys_analyzer.commands.run_plan import INSTALL_TORCH, choose_device, choose_profiler
from nsys_analyzer.errors import CaptureError


@dataclass(frozen=True)
class BenchPlan:
    """A bench with its cases, what is profiled besides and by what, and what the user should know before.

    ``shared`` are the settings that all cases have: the device, and each option that takes one value.
    """

    bench: Bench
    cases: tuple[Case, ...]
    profiled: Profiled
    profiler: Profiler | None
    notices: tuple[str, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Every case as the command that measures it alone, and every program that is profiled."""
        for case in self.cases:
            words = [f"{key}={value}" for key, value in case.environment.items()]
            yield shlex.join([*words, "python", "-m", case.module, *_options(case.values)])
        for target in self.profiled.targets:
            yield shlex.join(["python", *target.program[1:]])


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", str(value))


def make_plan(bench: Bench, options: Mapping[str, Any], given: Collection[str]) -> BenchPlan:
    """Chooses the device, and its defaults where the options say nothing.

    Args:
        bench: the bench.
        options: the command's parameters by name.
        given: the names of those that were on the command line.

    Raises:
        ConfigurationError: options that do not go together.
        CaptureError: what is needed is not installed.
    """
    if torch_version() is None:
        raise CaptureError("The benches need PyTorch, which is not installed", INSTALL_TORCH)
    device = choose_device(options["device"])
    settings = Settings(device, {option.name: _value(option, options, given, device) for option in bench.options})
    profiled, profiler = Profiled(()), None
    notices: tuple[str, ...] = ()
    if bench.captures:
        profiled = bench.captures(settings)
    if profiled.targets:
        recording = {"memory": profiled.memory, "profiler": options["profiler"], "whole_program": False,
                     "trace": "cuda,nvtx", "autograd_ranges": False, "nsys_option": ()}  # fmt: skip
        profiler, notices = choose_profiler(recording, (), device)
    if device == "cpu" and any(option.cpu != option.cuda and option.name not in given for option in bench.options):
        notices = (*notices, "On the CPU the defaults are smaller; --help lists them beside those of a GPU.")
    shared = {"device": device, **{one.name: settings[one.name] for one in bench.options if not one.several}}
    return BenchPlan(bench, all_cases(bench, settings), profiled, profiler, notices, shared)


def _value(option: Option, options: Mapping[str, Any], given: Collection[str], device: str) -> Any:
    if option.name in given:
        return options[option.name]
    default = option.cuda if device == "cuda" else option.cpu
    return default if option.several else default[0]
