"""The options of the transformer target, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from nsys_analyzer.analysis.transformer.models import ModelSize, find_model, model_names
from nsys_analyzer.configuration import ATTENTIONS as ATTENTIONS
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Options, Run
from nsys_analyzer.configuration import MODES as MODES
from nsys_analyzer.configuration import PRECISIONS as PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from profiling_targets.harness import NotHereError, add_option, default_device


@dataclass(frozen=True)
class Config(Options[NoReturn]):
    """A transformer, and what to do with it: options that are not given are at their defaults.

    Raises:
        ConfigurationError: a combination that cannot run.
    """

    size: ModelSize

    def __post_init__(self) -> None:
        usual = {option.name: option.default for option in OPTIONS.values() if option.default is not None} | {
            "device": "cuda"
        }
        for name, default in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.precision == "tf32" and self.device == "cpu":
            raise ConfigurationError("TF32 is a precision of NVIDIA's tensor cores", "Choose fp32 or bf16 on a CPU")
        if self.cuda_graph and (self.device == "cpu" or self.optimizer == "plain" or self.compile):
            raise ConfigurationError("--cuda-graph needs a GPU and goes with neither --compile nor --optimizer plain")

    def run(self) -> Run:
        """Returns the configuration as results tell it."""
        size = asdict(self.size)
        return Run(model=size.pop("name"), **size, **{name: getattr(self, name) for name in OPTIONS})


def config_of(case: Any, **more: Any) -> Config:
    """Returns the transformer's configuration in a case of an experiment: the options that both have, and more.

    Raises:
        NotHereError: this device cannot run it.
    """
    shared = {option.name for option in fields(Config)} & {option.name for option in fields(case)}
    try:
        return Config(**{"size": case.size, **{name: getattr(case, name) for name in shared}, **more})
    except ConfigurationError as error:
        raise NotHereError(str(error)) from error


def parse(arguments: list[str]) -> tuple[Config, argparse.Namespace]:
    """Reads the command line of the transformer target, as :func:`read` does."""
    return read(command_line("transformer", "Trains a transformer for a few steps, with NVTX ranges."), arguments)


def command_line(target: str, description: str, options: Iterable[str] = OPTIONS) -> argparse.ArgumentParser:
    """Returns the command line of a target that trains the transformer: model, these options, and where results go."""
    parser = argparse.ArgumentParser(f"python -m profiling_targets.{target}", description=description)
    parser.add_argument("--model", default="small", help=model_names())
    for dimension in DIMENSIONS:
        parser.add_argument(f"--{dimension.replace('_', '-')}", type=int, help="in place of the model's")
    for name in options:
        add_option(parser, OPTIONS[name])
    parser.add_argument("--no-ranges", action="store_true", help="no NVTX ranges: the difference is what they cost")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write times and status there, as JSON")
    parser.set_defaults(device=default_device())
    return parser


def read(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[Config, argparse.Namespace]:
    """Reads a command line; a known model's dimensions can be changed one by one.

    Returns:
        The configuration, and what else was said: ``results``, the file for times and status, or None; ``no_ranges``;
        and what the target added.

    Raises:
        ConfigurationError: an unknown model, impossible dimensions or a combination that cannot run.
    """
    given = parser.parse_args(arguments)
    asked: dict[str, Any] = {name: getattr(given, name) for name in OPTIONS if hasattr(given, name)}
    return Config(_size(given), **asked), given


def _size(given: argparse.Namespace) -> ModelSize:
    changed = {name: value for name in DIMENSIONS if (value := getattr(given, name)) is not None}
    size = replace(find_model(given.model), **changed)
    return replace(size, name=f"d{size.d_model}-L{size.num_layers}") if changed else size
