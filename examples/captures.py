"""Prints a row of ``sweep/captures.csv`` for each capture of a folder: ``python examples/captures.py FOLDER``."""

import csv
import sys
from pathlib import Path

from nsys_analyzer import summarize

CLASSES = ("matmul", "elementwise", "optimizer", "copy/layout")


def main() -> None:
    """Means per measured step under the profiler: kernels, wall time, GPU busy, shares of classes, matmul ÷ softmax."""
    if len(sys.argv) != 2:
        sys.exit("Give a folder of captures: python examples/captures.py sweep")
    table = csv.writer(sys.stdout, lineterminator="\n")
    shares = [f"{name.partition('/')[0]}_percent" for name in CLASSES]
    table.writerow(["capture", "kernels", "step_ms", "busy_percent", *shares, "matmul_over_softmax"])
    for path in sorted(Path(sys.argv[1]).glob("*/capture.sqlite")):
        (capture,) = summarize(path)
        step = capture.phase("step")
        wall_ms, busy_ms = step.wall_ms.mean, step.gpu_busy_ms.mean
        percents = [100 * share if (share := step.share_of(name)) else None for name in CLASSES]
        ratio = capture.attention.runtime_ratio if capture.attention else None
        figures = [step.kernels_per_instance, wall_ms, 100 * busy_ms / wall_ms, *percents, ratio]
        table.writerow([path.parent.name, *("" if figure is None else f"{figure:.6g}" for figure in figures)])


if __name__ == "__main__":
    main()
