"""Time and memory of reading tables of timings, beside what Python's own reader of the format needs for their text.

Each shape of table is read at two sizes: the time of a row must not grow with their number.

    python -m tests.benchmarks.bench_timings
    python -m tests.benchmarks.bench_timings --rows 1000000
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from nsys_analyzer.inputs.unprofiled_times import read_timings

_PHASES = ("forward", "backward", "optimizer")
_SMALLER = 4  # times fewer rows
_MOST_TIMES_THE_FLOOR, _MOST_GROWTH = 150, 1.5
_RANDOM = random.Random(0)


def _ms() -> str:
    return f"{_RANDOM.gauss(10, 1):.6f}"


def _table(header: str, row: Callable[[int], str]) -> Callable[[int], str]:
    return lambda count: header + "\n" + "".join(row(i) + "\n" for i in range(count))


#: The name of a file of each shape, and its text of so many rows.
SHAPES: dict[str, tuple[str, Callable[[int], str]]] = {
    "a row for each phase": (
        "timings.csv",
        _table(
            "model,context_length,batch_size,phase,mean_ms",
            lambda i: f"small,{1 + i // 3},4,{_PHASES[i % 3]},{_ms()}",
        ),
    ),
    "captures": ("timings.csv", _table("capture,phase,mean_ms", lambda i: f"run{i},forward,{_ms()}")),
    "a column for each phase": (
        "timings.csv",
        _table("capture,forward_ms,backward_ms,optimizer_ms", lambda i: f"run{i},{_ms()},{_ms()},{_ms()}"),
    ),
}


def floor(path: Path) -> None:
    """Reads the text with the standard library, and nothing of its meaning."""
    with path.open(newline="") as file:
        for cells in csv.reader(file):
            tuple(cells)


def seconds(work: Callable[[Path], object], path: Path) -> float:
    """Process time of the fastest of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        work(path)
        taken.append(time.process_time() - began)
    return min(taken)


def allocated_mb(path: Path) -> float:
    """Most memory that reading holds at a time, in 10^6 bytes."""
    tracemalloc.start()
    read_timings(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    """Prints each shape's time, its ratio to the floor, and how the time of a row grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the larger table [%(default)s]")
    rows = parser.parse_args().rows
    print(f"timings of {rows:,} rows; a row at most {_MOST_GROWTH} times as long as among {rows // _SMALLER:,},")
    print(f"{_MOST_TIMES_THE_FLOOR} times as long as the text alone")
    print(f"{'':<24} {'s':>8} {'/ floor':>8} {'growth':>8} {'peak MB':>8}")
    with tempfile.TemporaryDirectory(prefix="bench-timings-") as folder:
        for shape, (name, text) in SHAPES.items():
            path = Path(folder) / name
            path.write_text(text(rows // _SMALLER))
            smaller = seconds(read_timings, path)
            path.write_text(text(rows))
            larger, least, peak_mb = seconds(read_timings, path), seconds(floor, path), allocated_mb(path)
            ratio, growth = larger / least, larger / smaller / _SMALLER
            met = "met" if ratio <= _MOST_TIMES_THE_FLOOR and growth <= _MOST_GROWTH else "MISSED"
            print(f"{shape:<24} {larger:>8.3f} {ratio:>8.2f} {growth:>8.2f} {peak_mb:>8.0f} {met}", flush=True)


if __name__ == "__main__":
    main()
