"""Writes the attainable times of a GPU from the rows of ``nsys-analyze bench attainable`` that were measured on it.

Usage: ``python docs/make_attainable_times.py bench/attainable/bench.jsonl``. The rows of other GPUs stay as they are.
"""

from __future__ import annotations

import sys
from itertools import chain, groupby
from pathlib import Path

from nsys_analyzer.analysis.operators.attainable import COMPUTE_KINDS, TIMES_FILE
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments.benches import read_rows


def add_times(table: str, path: Path) -> str:
    """Returns the table with the times of a GPU, which replace older times of the same GPU."""
    _, _, rows = read_rows(path)
    gpu = str(rows[0].machine.get("gpu"))
    peaks = find_peaks(gpu)
    if peaks is None:
        sys.exit(f"PEAKS in analysis/transformer/peaks.py lacks the GPU {gpu} of {path}.")
    lines = {name: [*group] for name, group in groupby(table.splitlines(), lambda line: line.partition(",")[0])}
    lines[peaks.name] = [
        f"{peaks.name},{operator.operator_class},{operator.precision},"
        f"{operator.flops if row.case.kind in COMPUTE_KINDS else operator.bytes:.0f},{operator.us:g}"
        for row in rows
        for operator in row.figures.operators or ()
    ]
    return "\n".join([*chain(*lines.values()), ""])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        TIMES_FILE.write_text(add_times(TIMES_FILE.read_text(encoding="utf-8"), Path(argument)), encoding="utf-8")
