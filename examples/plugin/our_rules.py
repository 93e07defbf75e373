"""Adds a finding, a kernel class and a format of exports, as a company may keep them for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nsys_analyzer.analysis.findings.finding import Candidate, FindingTexts, Place, StepsToExplain, saved_work
from nsys_analyzer.analysis.kernels.own_classes import OwnClass
from nsys_analyzer.export import Format
from nsys_analyzer.export.writing import Capture

#: Our kernels, which no rule of the package knows.
CLASSES = {"state space": OwnClass(("selective_scan", "^ssd_chunk_"), "Scans of our state-space layers.")}

_FIRST_LINE = "# kernels\n"


def find_frequent_optimizer(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds an optimizer that could run in every fourth or tenth step: our batches are small enough to be summed up."""
    work = steps.study.in_phase("optimizer")
    if work.any():
        texts = FindingTexts(
            title="The optimizer runs in every step",
            evidence=(f"It takes {steps.study.work_ms(work):.3g} ms of the GPU in a step.",),
            derivation="The step is replayed with a quarter, and with a tenth, of the optimizer's work.",
            remedy=("if step % 4 == 0: optimizer.step(); optimizer.zero_grad()",),
            disproof="Call it in every tenth step: if a step is no shorter, the GPU has other work.",
        )
        changes = (saved_work(work * (1 - 1 / 4)), saved_work(work * (1 - 1 / 10)))
        yield Candidate("frequent_optimizer", texts, changes, Place("phase", "optimizer"))


class KernelNames:
    """A text with the names of the kernels, one a line."""

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the distinct names of all captures."""
        names = {name for one in captures for name in one.read().trace.operations.names}
        path.write_text(_FIRST_LINE + "".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Returns whether a file was written by this format, and may be replaced."""
        return path.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE)


KERNEL_NAMES = Format("our_rules:KernelNames", ".txt")
