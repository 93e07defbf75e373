"""Runs a program with or without a planted fault, or times both in turns, in two processes of which one always waits.

``llama.py`` and ``resnet.py`` are such programs. Like most training programs, they contain no marks for a profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from host_work import Fault, HostSwitches

from profiling_targets.harness import synchronize

ROUNDS, STEPS = 7, 10
_WARMUP_STEPS = 8
_SETTLING_STEPS = 2
"""Untimed steps before each timed block, because allocator, caches and loader change during the pause before it."""

Train = Callable[[HostSwitches, argparse.Namespace, "Iterator[None] | None"], None]
"""Trains with the given switches and arguments, and advances the iterator, if there is one, after each step."""


def run(program: str, description: str, faults: Mapping[str, Fault], shape: Mapping[str, object], train: Train) -> None:
    """Trains, or compares fault and remedy, as the command line of a program asks.

    Args:
        program: the path of the program.
        description: what the program trains.
        faults: the faults by their names.
        shape: the model and the usual batch, as entries of the results.
        train: trains with a fault or without it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fault", default="none", choices=faults, help="the planted fault")
    parser.add_argument("--remedy", action="store_true", help="train with the remedy instead of the fault")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the training (default 1000)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two samples in a batch, for a CPU")
    parser.add_argument("--compare", action="store_true", help="time fault and remedy in turns, without a profiler")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="with --compare, write the times to this JSON file"
    )
    parser.add_argument("--take-turns", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    fault = faults[given.fault]
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not given.compare:
        turns = time_in_turns(given.device) if given.take_turns else None
        if turns:
            next(turns)
        train(fault.remedy if given.remedy else fault.fault, given, turns)
        return
    command = [sys.executable, program, "--fault", given.fault, "--take-turns", "--steps", "1000000"]
    command += ["--tiny"] if given.tiny else []
    fault_ms, remedy_ms = compare(command, [*command, "--remedy"])
    for name, values in (("fault", fault_ms), ("remedy", remedy_ms)):
        print(f"{name:8} {statistics.median(values):10.3f} ms, {min(values):.3f} to {max(values):.3f}")
    if given.results:
        results = {
            "fault": given.fault,
            "description": fault.description,
            "network": Path(program).stem,
            **shape,
            "batch_size": fault.fault.batch_size or shape["batch_size"],
            "gpu": torch.cuda.get_device_name() if given.device == "cuda" else None,
            "torch": str(torch.__version__),
            "steps": STEPS,
            "rounds": ROUNDS,
            "fault_ms": fault_ms,
            "remedy_ms": remedy_ms,
        }
        given.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare(*commands: list[str]) -> tuple[list[float], ...]:
    """Runs the programs in turns, so that a change of the machine's speed affects all programs.

    Returns:
        The length of a step in each round, ms, for each program.
    """
    times: tuple[list[float], ...] = tuple([] for _ in commands)
    with ExitStack() as stack:  # when the block ends, the inputs close, and the programs end
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        programs = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for command in commands]
        for program in programs:
            _read_line(program, "waiting")
        for _ in range(ROUNDS):
            for program, values in zip(programs, times, strict=True):
                assert program.stdin
                program.stdin.write("your turn\n")
                program.stdin.flush()
                values.append(float(_read_line(program, "step_ms").split()[1]))
    return times


def _read_line(program: subprocess.Popen[str], start: str) -> str:
    """Returns the next line with the given start, or exits if the program ends before it prints such a line."""
    assert program.stdout
    for line in program.stdout:
        if line.startswith(start):
            return line
    sys.exit(f"{program.args} ended with {program.wait()}")


def time_in_turns(device: str) -> Iterator[None]:
    """Yields once per step. Waits for a line of input before each turn, and prints the turn's mean step after it."""
    for _ in range(_WARMUP_STEPS):
        yield
    synchronize(device)
    print("waiting", flush=True)
    while sys.stdin.readline():
        for _ in range(_SETTLING_STEPS):
            yield
        synchronize(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            yield
        synchronize(device)
        print("step_ms", round((time.perf_counter() - start) / STEPS * 1e3, 3), flush=True)
    sys.exit()
