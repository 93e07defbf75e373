"""Compares the phases of two captures: ``python examples/compare.py before.sqlite after.sqlite``."""

import sys

from nsys_analyzer import summarize


def main() -> None:
    """Prints GPU busy time and matmul's share of each phase that both captures have."""
    if len(sys.argv) != 3:
        sys.exit("Give two captures: python examples/compare.py before.sqlite after.sqlite")
    (before,), (after,) = (summarize(path)[:1] for path in sys.argv[1:])
    print(f"{'phase':<12} {'GPU busy ms':>24} {'matmul':>18}")
    for one in before.phases:
        other = after.phase(one.phase)
        if other and one.gpu_busy_ms.median is not None and other.gpu_busy_ms.median is not None:
            busy = f"{one.gpu_busy_ms.median:.3f} to {other.gpu_busy_ms.median:.3f}"
            share = " to ".join(f"{phase.share_of('matmul') or 0:.1%}" for phase in (one, other))
            print(f"{one.phase:<12} {busy:>24} {share:>18}")


if __name__ == "__main__":
    main()
