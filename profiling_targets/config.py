"""What the transformer can be told to run, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.models import ModelSize, find_model
from nsys_analyzer.errors import ConfigurationError

if TYPE_CHECKING:
    from profiling_targets.harness import Measurement

MODES = ("forward", "forward-backward", "train")
PRECISIONS = ("fp32", "tf32", "bf16")
ATTENTIONS = ("unfused", "sdpa")


@dataclass(frozen=True)
class Config:
    """What to run; every field but ``size`` is an option of the same name.

    Raises:
        ConfigurationError: a combination that cannot run.
    """

    size: ModelSize
    context_length: int = 256
    batch_size: int = 4
    mode: str = "train"
    precision: str = "fp32"
    attention: str = "unfused"
    optimizer: str = "torch"
    compile: bool = False
    cuda_graph: bool = False
    block_ranges: bool = False
    seed: int = 0
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.precision == "tf32" and self.device == "cpu":
            raise ConfigurationError("TF32 is a precision of NVIDIA's tensor cores", "Choose fp32 or bf16 on a CPU")
        if self.cuda_graph and (self.device == "cpu" or self.optimizer == "plain" or self.compile):
            raise ConfigurationError("--cuda-graph needs a GPU and goes with neither --compile nor --optimizer plain")

    def described(self) -> dict[str, object]:
        """The configuration as results tell it: flat, the model's name as ``model``."""
        flat = {**asdict(self), **asdict(self.size), "model": self.size.name}
        return {key: value for key, value in flat.items() if key not in ("size", "name")}


def parse(arguments: list[str]) -> tuple[Config, Measurement]:
    """Reads the command line; a known model's dimensions can be changed one by one.

    Raises:
        ConfigurationError: an unknown model, impossible dimensions or a combination that cannot run.
    """
    from profiling_targets import harness  # imports torch: the choices above are read without it

    parser = argparse.ArgumentParser(
        "python -m profiling_targets.transformer", description="Trains a transformer for a few steps, with NVTX ranges."
    )
    parser.add_argument("--model", default="small", help="small, medium, large, xl, 2.7B, xl-2026 or 10B")
    for dimension in _dimensions():
        parser.add_argument(f"--{dimension.replace('_', '-')}", type=int, help="in place of the model's")
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--mode", choices=MODES, default="train")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16 is autocast")
    parser.add_argument("--attention", choices=ATTENTIONS, default="unfused")
    parser.add_argument(
        "--optimizer", choices=("torch", "plain"), default="torch", help="AdamW of torch.optim, or ours"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model; no ranges inside forward")
    parser.add_argument("--block-ranges", action="store_true", help="a range around each block")
    parser.add_argument("--seed", type=int, default=0)
    measurement = harness.add_arguments(parser)
    given = parser.parse_args(arguments)
    return _config(given), measurement(given)


def _dimensions() -> Iterator[str]:
    return (field.name for field in fields(ModelSize) if field.name != "name")


def _config(given: argparse.Namespace) -> Config:
    changed = {name: value for name in _dimensions() if (value := getattr(given, name)) is not None}
    size = replace(find_model(given.model), **changed)
    if changed:
        size = replace(size, name=f"d{size.d_model}-L{size.num_layers}")
    values = {field.name: getattr(given, field.name) for field in fields(Config) if field.name != "size"}
    return Config(size=size, **values)
