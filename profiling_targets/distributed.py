"""Trains the transformer of ``transformer.py`` on several GPUs: DDP, FSDP2, tensor or pipeline parallel.

``torchrun --nproc-per-node 2 -m profiling_targets.distributed --strategy ddp`` trains on two GPUs, one process each;
``--device cpu`` trains anywhere, its ranks talking through gloo.

Nothing waits between the phases of a step, so communication overlaps with what is computed as in real training.
``--late-rank 1 --late-ms 10`` plants a fault: that rank starts each forward pass later than the others, because its CPU
was busy with something else.

The strategies are in ``parallelism.py``; options of the model in ``harness.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from nsys_analyzer.configuration import OPTIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS
from profiling_targets import harness
from profiling_targets.harness import Config, Times, annotate, command_line, profiler, read_options, synchronize
from profiling_targets.parallelism import STRATEGIES, Rank, SharedTraining, Sharing

_MICROBATCHES = 4
_LATE_MS = 10.0
_TIMEOUT = timedelta(minutes=10)
#: Options of the transformer that each strategy can do.
_OPTIONS = tuple(name for name in OPTIONS if name not in ("mode", "compile", "cuda_graph"))
_LAUNCH = "Start it with torchrun --nproc-per-node 2 -m profiling_targets.distributed …"


@dataclass(frozen=True)
class Lateness:
    """The fault: which rank is late in each step, and by how many milliseconds."""

    late_rank: int | None
    late_ms: float


def plant(lateness: Lateness, training: SharedTraining) -> list[float]:
    """Makes this rank late in each step to come, if it is the one; the list gets how long it slept, in ms."""
    delays: list[float] = []

    def sleep() -> None:
        before = time.perf_counter_ns()
        time.sleep(lateness.late_ms / MS_PER_S)
        delays.append((time.perf_counter_ns() - before) / NS_PER_MS)

    if training.rank.number == lateness.late_rank:
        training.before_load = sleep
    return delays


def step(training: SharedTraining, *, synchronized: bool) -> None:
    """One step of training; the GPU may be steps behind when it returns, unless steps are synchronized."""
    with annotate("step"):
        with annotate("input"):
            training.load()
        for name, phase in training.phases().items():
            with annotate(name):
                phase()
        if synchronized:
            synchronize(training.config.device)


def measure(
    training: SharedTraining, lateness: Lateness, meet: Callable[[], None], times: Times, *, synchronized: bool
) -> dict[str, Any]:
    """Warms up, then runs the steps from cudaProfilerStart to cudaProfilerStop, which all ranks call together.

    Adds milliseconds of each step to the times: ``step`` from its start to that of the next, by the CPU's clock, and
    ``delay`` where this rank is made late. Returns the loss, where this rank has it.
    """
    config, device = training.config, training.config.device
    delays = plant(lateness, training)
    with annotate("warmup"):
        for _ in range(config.warmup_steps):
            step(training, synchronized=synchronized)
        synchronize(device)
    meet()
    profiler("start", device)
    meet()  # a profiler starts faster on one rank than on another
    begins = []
    for _ in range(config.steps):
        begins.append(time.perf_counter_ns())
        step(training, synchronized=synchronized)
    synchronize(device)
    ended = time.perf_counter_ns()  # the last step lasts until the GPU has done it
    meet()
    profiler("stop", device)
    times["step"] = [(later - begin) / NS_PER_MS for begin, later in pairwise([*begins, ended])]
    if delays:
        times["delay"] = delays[-config.steps :]
    return {"loss": training.value.item() if training.has_loss else None}


def join(device: str, rank: Rank) -> Callable[[], None]:
    """Joins this process with the other ranks; returns a function in which they meet, by messages between CPUs alone.

    Raises:
        ConfigurationError: this machine has no GPU for the rank.
    """
    own = rank.device(device) if device == "cuda" else None
    if own:
        if rank.local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"Rank {rank.number} has no GPU: this machine has {torch.cuda.device_count()}",
                "Start as many processes as there are GPUs, or give --device cpu",
            )
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own else "gloo", timeout=_TIMEOUT, device_id=own)
    gate = dist.new_group(backend="gloo")  # a barrier of NCCL's would be a kernel in the capture
    return lambda: dist.monitored_barrier(gate, _TIMEOUT)


def this_rank() -> Rank:
    """The rank that the launcher's environment variables say.

    Raises:
        ConfigurationError: there is no launcher.
    """
    try:
        return Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except KeyError as error:
        raise ConfigurationError(
            f"{error.args[0]} is not set: no launcher has started this process", _LAUNCH
        ) from error


def parse(arguments: list[str]) -> tuple[Config, Sharing, Lateness, argparse.Namespace]:
    """Reads the command line: the model, how it is shared, who is late, and what else was said.

    Raises:
        ConfigurationError: what cannot run.
    """
    parser = command_line("distributed", "Trains a transformer on several GPUs for a few steps.", _OPTIONS)
    add = parser.add_argument
    add("--strategy", default="ddp", choices=STRATEGIES, help="how the ranks share the model (default ddp)")
    add("--bucket-mb", type=int, metavar="MIB", help="size of DDP's buckets of gradients (default: PyTorch's, 25)")
    add("--microbatches", type=int, metavar="N", help=f"parts of a pipeline's batch (default {_MICROBATCHES})")
    add("--late-rank", type=int, metavar="RANK", help="this rank is late in each step")
    add("--late-ms", type=float, metavar="MS", help=f"by so much (default {_LATE_MS:g})")
    add("--synchronize", action="store_true", help="wait for the GPU at the end of each step")
    config, given = read_options(parser, arguments)
    if given.strategy == "pipeline":
        given.microbatches = given.microbatches or _MICROBATCHES
    sharing = Sharing(given.strategy, given.bucket_mb, given.microbatches)
    return config, sharing, Lateness(given.late_rank, given.late_ms or _LATE_MS), given


def run(config: Config, sharing: Sharing, lateness: Lateness, given: argparse.Namespace) -> int:
    """Trains as this rank; returns the exit code."""
    rank = this_rank()
    if lateness.late_rank is not None and not 0 <= lateness.late_rank < rank.world_size:
        raise ConfigurationError(f"There is no rank {lateness.late_rank}: ranks are 0 to {rank.world_size - 1}")
    described = replace(config.run(), rank=rank.number, world_size=rank.world_size)
    results = given.results and given.results.with_stem(f"{given.results.stem}_rank{rank.number}")
    meet = join(config.device, rank)

    def measured(times: Times) -> Mapping[str, Any]:
        training = STRATEGIES[sharing.strategy](config, sharing, rank)
        found = measure(training, lateness, meet, times, synchronized=given.synchronize)
        return {**asdict(sharing), **asdict(lateness), "synchronize": given.synchronize, **found}

    code = harness.run_measured(measured, config.device, described, results, ranges=not given.no_ranges)
    if code == 0:  # where memory ran out, the others still wait, and would not let this rank go
        dist.destroy_process_group()
    return code


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    try:
        return run(*parse(sys.argv[1:] if arguments is None else arguments))
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
