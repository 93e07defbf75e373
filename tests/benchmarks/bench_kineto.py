"""Time and memory of loading a PyTorch profiler trace of a million events, as Kineto lays it out.

The time is held to what ``json.load`` takes for the same file in the same round, the start of Python included.

    python -m tests.benchmarks.bench_kineto
    python -m tests.benchmarks.bench_kineto --events 100000 --runs 5
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench_report import Row, run_well
from tests.support.kineto import MAIN, PID

TRACE = """
import sys

from nsys_analyzer.trace.trace import Trace

Trace.load(sys.argv[1])
"""
LOAD = """
import gzip, json, sys

with gzip.open(sys.argv[1]) as file:
    json.load(file)
"""
KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, %dul> >"
)
INDENTATION = 2
MOST_TIMES = 1  # what json.load takes
EACH = 5
"""Events of each operator: itself, its launch, its kernel, and the two ends of the arrow between them."""


def events(count: int, space: str) -> Iterator[str]:
    """The events of ``count`` / 5 operators, 10 us apart, whose kernels start 10 us later."""
    cpu = f'"pid": {PID}, "tid": {MAIN}'
    for number in range(1, count // EACH + 1):
        ts = 4375873182668.740 + 10 * number
        yield _event(space, "cpu_op", f"aten::op{number % 200}", cpu, ts, f'"External id": {number}')
        yield _event(space, "cuda_runtime", "cudaLaunchKernel", cpu, ts + 2, f'"cbid": 211, "correlation": {number}')
        args = f'"device": 0, "stream": 7, "correlation": {number}, "blocks per SM": 0.48, "grid": [64, 1, 1]'
        yield _event(space, "kernel", KERNEL % (number % 200), '"pid": 0, "tid": 7', ts + 10, args)
        for end, where, at in (("s", cpu, ts + 2), ("f", '"pid": 0, "tid": 7', ts + 10)):
            yield f'{space}{{"ph": "{end}", "id": {number}, {where}, "ts": {at:.3f},\n{space * 2}"cat": "ac2g"}}'


def _event(space: str, category: str, name: str, where: str, ts: float, args: str) -> str:
    head = f'"ph": "X", "cat": "{category}", "name": "{name}", {where}'
    lines = (head, f'"ts": {ts:.3f}, "dur": 6.784', f'"args": {{\n{space * 3}{args}\n{space * 2}}}')
    return f"{space}{{\n{space * 2}" + f",\n{space * 2}".join(lines) + f"\n{space}}}"


def write_trace(path: Path, count: int) -> None:
    with gzip.open(path, "wt", compresslevel=4) as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],\n"traceEvents": [\n')
        for number, event in enumerate(events(count, " " * INDENTATION)):
            file.write(f",\n{event}" if number else event)
        file.write('\n],\n"traceName": "trace.json"}')


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="[%(default)s]")
    parser.add_argument("--runs", type=int, default=3, help="[%(default)s]")
    options = parser.parse_args()
    print(f"{options.events:,} events {'median':>27} {'min':>10} {'max':>10}     of {options.runs} runs")
    with tempfile.TemporaryDirectory(prefix="bench-kineto-") as folder:
        path = Path(folder) / "trace.json.gz"
        write_trace(path, options.events)
        command, load = [sys.executable, "-c", TRACE, path], [sys.executable, "-c", LOAD, path]
        rounds = [(run_well(command), run_well(load)) for _ in range(options.runs)]
        ratios = [read.seconds / loaded.seconds for read, loaded in rounds]
        print(Row("time", [read.seconds for read, _ in rounds], "s"))
        print(Row("time ÷ json.load", ratios, "", at_most=MOST_TIMES))
        print(Row("peak memory", [read.peak_gb for read, _ in rounds], "GB", at_most=0.5))


if __name__ == "__main__":
    main()
