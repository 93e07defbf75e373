"""Measures the cost of sampling stacks: steps of a training, with the sampler and without it in turns."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.capture.hooks.ranges import Ranges
from nsys_analyzer.capture.hooks.stacks import Sampler
from tests.benchmarks.bench_report import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "faults"))
from fault_training import NETWORKS, Case, Training
from faults import BATCH_SIZE, FAULTS, timed_ms


class Sampled(Training):
    """A training in whose steps a sampler may look at the stack."""

    sampler: Sampler | None = None

    def step(self) -> None:
        """A step, at whose beginning the hooks compare the clocks."""
        if self.sampler:
            self.sampler.mark_clock()
        super().step()


def main() -> None:
    """Prints the milliseconds of a step with and without the sampler, and what it costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--network", default="transformer", choices=NETWORKS)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    switches = FAULTS[given.fault].fault
    case = Case(switches, find_model("small"), switches.batch_size or BATCH_SIZE, 512, device, network=given.network)
    training = Sampled(case)
    ranges = Ranges(torch, {}, lambda: None, lambda: None)
    timed_ms(training, 6)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * given.rounds):
            training.sampler = Sampler(f"{folder}/{number}.stacks.gz", ranges) if number % 2 else None
            if training.sampler:
                training.sampler.open()
            times[number % 2 == 1].append(timed_ms(training, given.steps))
            if training.sampler:
                training.sampler.close()
        size = len(Path(f"{folder}/1.stacks.gz").read_bytes())
    print(f"{given.network}, {given.fault}, on {device}; the samples of a round take {size} bytes")
    without, sampled = times.values()
    print(Row("step without the sampler", without, "ms"))
    print(Row("step with it", sampled, "ms"))
    share = statistics.median(sampled) / statistics.median(without)
    print(Row("with it / without, medians", [share], "x", at_most=1.01))


if __name__ == "__main__":
    main()
