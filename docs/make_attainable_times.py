"""Writes the attainable times of a GPU from the rows of ``nsys-analyze bench attainable`` that were measured on it.

Usage: ``python docs/make_attainable_times.py bench/attainable/bench.jsonl``. The rows of other GPUs stay as they are.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from nsys_analyzer.analysis.operators.attainable import COMPUTE_KINDS, TIMES_FILE
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.benches import read_rows

COLUMNS = ("gpu", "class", "precision", "amount", "microseconds")


def read_times(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Returns the GPU on which the rows of an experiment were measured, and its rows of the table."""
    _, _, rows = read_rows(path)
    peaks = find_peaks(str(rows[0].machine.get("gpu")))
    if peaks is None:
        sys.exit(f"PEAKS in analysis/transformer/peaks.py lacks the GPU {rows[0].machine.get('gpu')} of {path}.")
    times = []
    for row in rows:
        for operator in row.figures.operators or ():
            amount = operator.flops if row.case.kind in COMPUTE_KINDS else operator.bytes
            values = (peaks.name, operator.operator_class, operator.precision, f"{amount:.0f}", f"{operator.us:g}")
            times.append(dict(zip(COLUMNS, values, strict=True)))
    return peaks.name, times


def add_times(table: str, path: Path) -> str:
    """Returns the table with the times of a GPU, which replace older times of the same GPU."""
    gpu, times = read_times(path)
    by_gpu: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        by_gpu.setdefault(row["gpu"], []).append(row)
    by_gpu[gpu] = times
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for rows in by_gpu.values() for row in rows)
    return file.getvalue()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        TIMES_FILE.write_text(add_times(TIMES_FILE.read_text(encoding="utf-8"), Path(argument)), encoding="utf-8")
