"""Trains the transformer of ``transformer.py`` on several GPUs: DDP, FSDP2, tensor or pipeline parallel.

``torchrun --nproc-per-node 2 -m profiling_targets.distributed --strategy ddp`` trains on two GPUs with one process
each. ``--device cpu`` trains on any machine, and the ranks communicate through gloo.

Nothing synchronizes between the phases of a step, so communication overlaps with computation as in real training.
``--late-rank 1 --late-ms 10`` plants a fault: rank 1 starts each forward pass 10 ms later, as if its CPU were busy.

The strategies are in ``parallelism.py``, and the options of the model are in ``harness.py``.
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
from profiling_targets.harness import Config, Times, annotate, make_parser, read_options, switch_profiler, synchronize
from profiling_targets.parallelism import STRATEGIES, Rank, SharedTraining, Sharing

_MICROBATCHES = 4
_LATE_MS = 10.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
#: Options of the transformer that every strategy supports.
_OPTIONS = tuple(name for name in OPTIONS if name not in ("mode", "compile", "cuda_graph"))
_HOW_TO_LAUNCH = "Start it with torchrun --nproc-per-node 2 -m profiling_targets.distributed …"


@dataclass(frozen=True)
class Lateness:
    """The planted fault: the rank that is late in each step, and how late it is in ms. Without a rank, none is late."""

    late_rank: int | None
    late_ms: float


def plant_delay(lateness: Lateness, training: SharedTraining) -> list[float]:
    """Makes this rank sleep at the start of each step from now on, if it is the late rank.

    Returns:
        A list to which each step appends the duration of its sleep in ms.
    """
    delays: list[float] = []

    def sleep() -> None:
        """Sleeps for the planted time, and notes the duration of the sleep in ms."""
        start = time.perf_counter_ns()
        time.sleep(lateness.late_ms / MS_PER_S)
        delays.append((time.perf_counter_ns() - start) / NS_PER_MS)

    if training.rank.number == lateness.late_rank:
        training.before_load = sleep
    return delays


def step(training: SharedTraining, *, synchronized: bool) -> None:
    """Runs one training step. Unless it is synchronized, the GPU may still run the step afterwards."""
    with annotate("step"):
        with annotate("input"):
            training.load()
        for name, phase in training.phases().items():
            with annotate(name):
                phase()
        if synchronized:
            synchronize(training.config.device)


def measure(
    training: SharedTraining,
    lateness: Lateness,
    wait_for_all_ranks: Callable[[], None],
    times: Times,
    *,
    synchronized: bool,
) -> dict[str, Any]:
    """Warms up, then runs the steps between cudaProfilerStart and cudaProfilerStop, which all ranks call together.

    The times of each step are added to ``times`` in ms: ``step`` is the time on the CPU's clock from the start of the
    step to the start of the next step, and ``delay`` is the planted sleep of a late rank.

    Returns:
        The loss under the key ``loss``, or None there if another rank computes the loss.
    """
    config, device = training.config, training.config.device
    delays = plant_delay(lateness, training)
    with annotate("warmup"):
        for _ in range(config.warmup_steps):
            step(training, synchronized=synchronized)
        synchronize(device)
    wait_for_all_ranks()
    switch_profiler("start", device)
    wait_for_all_ranks()  # waits, because the profiler needs different times to start on the ranks
    begins = []
    for _ in range(config.steps):
        begins.append(time.perf_counter_ns())
        step(training, synchronized=synchronized)
    synchronize(device)
    end_ns = time.perf_counter_ns()  # the last step ends when the GPU has finished it
    wait_for_all_ranks()
    switch_profiler("stop", device)
    times["step"] = [(later - begin) / NS_PER_MS for begin, later in pairwise([*begins, end_ns])]
    if delays:
        times["delay"] = delays[-config.steps :]
    return {"loss": training.value.item() if training.has_loss else None}


def join_ranks(device: str, rank: Rank) -> Callable[[], None]:
    """Joins this process with the other ranks, and returns a function that waits for all ranks.

    The function sends messages between CPUs only, because a barrier of NCCL would run a kernel on the GPU.

    Raises:
        ConfigurationError: this machine has no GPU for the rank.
    """
    gpu = rank.device(device) if device == "cuda" else None
    if gpu:
        if rank.local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"Rank {rank.number} has no GPU: this machine has {torch.cuda.device_count()}",
                "Start as many processes as there are GPUs, or give --device cpu",
            )
        torch.cuda.set_device(gpu)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=_COLLECTIVE_TIMEOUT, device_id=gpu)
    cpu_group = dist.new_group(backend="gloo")
    return lambda: dist.monitored_barrier(cpu_group, _COLLECTIVE_TIMEOUT)


def read_rank() -> Rank:
    """Returns the rank of this process, from the environment variables that a launcher sets.

    Raises:
        ConfigurationError: the variables are not set, so no launcher started this process.
    """
    try:
        return Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except KeyError as error:
        raise ConfigurationError(
            f"{error.args[0]} is not set: no launcher started this process", _HOW_TO_LAUNCH
        ) from error


def parse_arguments(arguments: list[str]) -> tuple[Config, Sharing, Lateness, argparse.Namespace]:
    """Reads the command line: the model, how the ranks share the model, the planted lateness, and all parsed arguments.

    Raises:
        ConfigurationError: the options cannot run together.
    """
    parser = make_parser("distributed", "Trains a transformer on several GPUs for a few steps.", _OPTIONS)
    add = parser.add_argument
    add("--strategy", default="ddp", choices=STRATEGIES, help="how the ranks share the model (default ddp)")
    add("--bucket-mb", type=int, metavar="MIB", help="size of DDP's gradient buckets (default: PyTorch's 25)")
    add("--microbatches", type=int, metavar="N", help=f"microbatches of a pipeline's batch (default {_MICROBATCHES})")
    add("--late-rank", type=int, metavar="RANK", help="make this rank late in each step")
    add("--late-ms", type=float, metavar="MS", help=f"how late the late rank is (default {_LATE_MS:g})")
    add("--synchronize", action="store_true", help="wait for the GPU at the end of each step")
    config, parsed_options = read_options(parser, arguments)
    if parsed_options.strategy == "pipeline":
        parsed_options.microbatches = parsed_options.microbatches or _MICROBATCHES
    sharing = Sharing(parsed_options.strategy, parsed_options.bucket_mb, parsed_options.microbatches)
    return config, sharing, Lateness(parsed_options.late_rank, parsed_options.late_ms or _LATE_MS), parsed_options


def run(config: Config, sharing: Sharing, lateness: Lateness, parsed: argparse.Namespace) -> int:
    """Trains in this process as one rank, and returns the exit code."""
    rank = read_rank()
    if lateness.late_rank is not None and not 0 <= lateness.late_rank < rank.world_size:
        raise ConfigurationError(f"There is no rank {lateness.late_rank}: the ranks are 0 to {rank.world_size - 1}")
    described_run = replace(config.run(), rank=rank.number, world_size=rank.world_size)
    results = parsed.results and parsed.results.with_stem(f"{parsed.results.stem}_rank{rank.number}")
    wait_for_all_ranks = join_ranks(config.device, rank)

    def train_steps(times: Times) -> Mapping[str, Any]:
        """Trains with the chosen strategy, and returns the entries for the results."""
        training = STRATEGIES[sharing.strategy](config, sharing, rank)
        outcome = measure(training, lateness, wait_for_all_ranks, times, synchronized=parsed.synchronize)
        return {**asdict(sharing), **asdict(lateness), "synchronize": parsed.synchronize, **outcome}

    code = harness.run_measured(train_steps, config.device, described_run, results, ranges=not parsed.no_ranges)
    # Not called if memory ran out on this rank: it would wait for the other ranks, which still wait for a collective.
    if code == 0:
        dist.destroy_process_group()
    return code


def main(arguments: list[str] | None = None) -> int:
    """Runs the target with the arguments of the command line, and returns the exit code."""
    try:
        return run(*parse_arguments(sys.argv[1:] if arguments is None else arguments))
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
