"""Trains a network with one planted fault. Each fault is a common way to lose time on a GPU.

``python examples/faults/faults.py --fault item`` trains with the fault, ``--remedy`` with what removes it, and
``--compare`` times the two in turns, without a profiler. ``--network`` chooses what is trained. A fault changes one
thing about the loop of ``fault_training.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace

import torch
from fault_training import NETWORKS, Case, Switches, Training
from host_work import Fault

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.atomic_write import write_text
from profiling_targets import harness
from profiling_targets.harness import annotate, synchronize

BATCH_SIZE, CONTEXT_LENGTH = 48, 512
ROUNDS = 7
_SETTLING_STEPS = 2
"""Steps before each timed block: what the other one did to allocator, caches and loader is not its time."""


CONTROL = Switches()
TINY = Switches(compiled=False, batch_size=1, context_length=64)
LARGE_FEATURES = Switches(feature_tensors=2)
SINGLE_PRECISION = Switches(precision="fp32", batch_size=8)
EAGER_ATTENTION = Switches(eager_attention=True, batch_size=32)
MANY_LAUNCHES = Switches(batch_size=32)
HEAP = Switches(heap_records=200_000)

FAULTS: dict[str, Fault] = {
    "none": Fault("nothing is wrong: the control", CONTROL, CONTROL),
    "loader": Fault(
        "the training loop tokenizes each batch itself; worker processes do it ahead",
        replace(CONTROL, tokenized=True, workers=0),
        replace(CONTROL, tokenized=True, workers=8),
    ),
    "item": Fault(
        "the norm of every parameter and gradient is read by .item(); norms of all of them stay on the device",
        replace(CONTROL, norms="each"),
        replace(CONTROL, norms="total"),
    ),
    "tiny_batch": Fault(
        "a batch so small that launching takes longer than computing; a CUDA graph launches once a step",
        TINY,
        replace(TINY, cuda_graph=True),
    ),
    "pageable": Fault(
        "batches are copied from pageable memory when they are needed; pinned memory lets them be copied ahead",
        replace(LARGE_FEATURES, copies="pageable"),
        LARGE_FEATURES,
    ),
    "fp32": Fault(
        "matmuls in fp32, without tensor cores; TF32 uses them",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="tf32"),
    ),
    "foreach": Fault(
        "AdamW runs a dozen small kernels for each parameter; the fused one does all in a few",
        replace(MANY_LAUNCHES, optimizer="for each parameter"),
        MANY_LAUNCHES,
    ),
    "empty_cache": Fault(
        "torch.cuda.empty_cache() after every step; without it",
        replace(CONTROL, empty_cache=True),
        CONTROL,
    ),
    "attention": Fault(
        "naive (unfused) attention; scaled_dot_product_attention, outside of the compiled regions as well",
        replace(EAGER_ATTENTION, attention="unfused"),
        EAGER_ATTENTION,
    ),
    "collector": Fault(
        "gc.collect() after every step, over a large heap; gc.freeze() once and no collection",
        replace(HEAP, collect=True),
        replace(HEAP, freeze=True),
    ),
    "checkpoint": Fault(
        "the weights go to pageable memory after every step; to pinned memory while the next step runs",
        replace(CONTROL, checkpoint="blocking"),
        replace(CONTROL, checkpoint="overlapped"),
    ),
    "casts": Fault(
        "activations are cast and transposed between blocks, there and back; not at all",
        replace(CONTROL, cast_chains=2),
        CONTROL,
    ),
    "eager": Fault(
        "nothing is compiled; blocks, norm and loss are",
        replace(CONTROL, compiled=False),
        CONTROL,
    ),
}
"""Every fault by its name: a new one is an entry."""

CHANGES: dict[str, Fault] = {
    "bf16": Fault(
        "all in fp32; matmuls and what autocast lets follow them in bf16",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="bf16"),
    ),
    "double_batch": Fault(
        "half of the usual batch; twice as much",
        replace(CONTROL, batch_size=BATCH_SIZE // 2),
        replace(CONTROL, batch_size=BATCH_SIZE),
    ),
}
"""What is no fault, and changes a step: each as what is there before and after."""


def compare(fault: Case, remedy: Case, *, steps: int, warmup: int, rounds: int = ROUNDS) -> tuple[list[float], ...]:
    """Times blocks of steps of the two in turns, so that a change of the machine's pace meets both.

    Returns:
        Milliseconds of a step of the fault, and of the remedy, without a profiler: one value for each round.
    """
    trainings = [Training(case) for case in (fault, remedy)]
    for training in trainings:
        timed_ms(training, warmup)
    times: tuple[list[float], ...] = ([], [])
    for _ in range(rounds):
        for training, values in zip(trainings, times, strict=True):
            values.append(timed_ms(training, steps))
    return times


def timed_ms(training: Training, steps: int) -> float:
    """Milliseconds of a step: the mean over steps between which nothing waits for the GPU.

    Workers start before the timed steps, and end after them: no other training's block meets them.
    """
    training.prepare()
    for _ in range(_SETTLING_STEPS):
        training.step()
    synchronize(training.device)
    before = time.perf_counter()
    for _ in range(steps):
        training.step()
    synchronize(training.device)
    elapsed = time.perf_counter() - before
    training.rest()
    return elapsed / steps * 1e3


def measure(case: Case, *, steps: int, warmup: int, opens_window: bool = True) -> tuple[float, float]:
    """Warms up, then runs the steps inside the capture range, and waits for the GPU only when all are launched.

    Args:
        case: what is trained.
        steps, warmup: how many steps are measured, and run before them.
        opens_window: whether there is a capture range; otherwise nsys-analyze run opens one.

    Returns:
        Milliseconds of a step, and the loss of the last.
    """
    training = Training(case)
    with annotate("warmup"):
        for _ in range(warmup):
            training.step()
        synchronize(case.device)
    training.prepare()  # what compiling left in memory is nothing for the garbage collector of the measured steps
    if opens_window:
        harness.switch_profiler("start", case.device)
    before = time.perf_counter()
    for _ in range(steps):
        training.step()
    synchronize(case.device)
    step_ms = (time.perf_counter() - before) / steps * 1e3
    if opens_window:
        harness.switch_profiler("stop", case.device)
    return step_ms, training.loss.item()


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code, 2 where the device cannot do it."""
    given = _parse(arguments)
    try:
        return _run(given)
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    harness._ranges_enabled = not given.no_ranges
    fault = {**FAULTS, **CHANGES}[given.fault]
    if given.compare:
        case = _case(fault.fault, given)
        fault_ms, remedy_ms = compare(case, _case(fault.remedy, given), steps=given.steps, warmup=given.warmup)
        for name, values in (("fault", fault_ms), ("remedy", remedy_ms)):
            print(f"{name:8} {statistics.median(values):10.3f} ms, {min(values):.3f} to {max(values):.3f}")
        found: dict[str, object] = {
            "gpu": torch.cuda.get_device_name() if case.device == "cuda" else None,
            "torch": str(torch.__version__),
            "rounds": len(fault_ms),
            "fault_ms": fault_ms,
            "remedy_ms": remedy_ms,
        }
    else:
        case = _case(fault.remedy if given.remedy else fault.fault, given)
        step_ms, loss = measure(case, steps=given.steps, warmup=given.warmup, opens_window=not given.no_window)
        print(f"step {step_ms:10.3f} ms, mean of {given.steps}; loss {loss:.4f}")
        found = {"remedy": given.remedy, "step_ms": step_ms, "loss": loss}
    if given.results:
        shape = {"network": case.network, "batch_size": case.batch_size, "context_length": case.context_length}
        results = {
            "fault": given.fault,
            "network": case.network,
            "model": case.size.name,
            **shape,
            "steps": given.steps,
            **found,
        }
        write_text(given.results, json.dumps(results, indent=1) + "\n")
    return 0


def _case(switches: Switches, given: argparse.Namespace) -> Case:
    """The loop at the size that the command line, the fault or the defaults say, in this order."""
    if given.no_compile:
        switches = replace(switches, compiled=False)
    if given.device == "cpu" and switches.needs_gpu:
        raise ConfigurationError(
            f"--fault {given.fault} needs {switches.needs_gpu} here, which no CPU has",
            "Run it on a GPU, or choose another fault: --help names them",
        )
    return Case(
        switches,
        harness.read_model_size(given),
        batch_size=given.batch_size or switches.batch_size or BATCH_SIZE,
        context_length=given.context_length or switches.context_length or CONTEXT_LENGTH,
        device=given.device,
        network=given.network,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    description = "Trains a network with one fault planted, or without it."
    parser = harness.make_parser("faults", description, ["device"])
    parser.prog = "python examples/faults/faults.py"
    parser.add_argument("--fault", default="none", choices=[*FAULTS, *CHANGES], help="what is wrong")
    parser.add_argument("--network", default="transformer", choices=NETWORKS, help="what is trained")
    parser.add_argument("--remedy", action="store_true", help="train with what removes the fault")
    parser.add_argument("--compare", action="store_true", help="time fault and remedy in turns, without a profiler")
    parser.add_argument("--batch-size", type=int, help=f"default: the fault's, else {BATCH_SIZE}")
    parser.add_argument("--context-length", type=int, help=f"default: the fault's, else {CONTEXT_LENGTH}")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, with --compare those of each block")
    parser.add_argument("--warmup", type=int, default=6, help="steps before the measured ones")
    parser.add_argument("--no-window", action="store_true", help="leave the capture range to nsys-analyze run")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing, whatever the fault says")
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.warmup < 0:
        parser.error("--steps must be at least 1, and --warmup at least 0")
    return given


if __name__ == "__main__":
    sys.exit(main())
