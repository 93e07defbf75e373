"""Copies follow copies: casts and changes of layout that go forth and back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_launches, three, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.columns import ON_DEVICE

#: So many copies in a row are a chain; the least and the most of their work that a better layout saves.
_CHAIN, _SAVED = 3, (0.65, 1.0)
#: A longer row copies tensors side by side, as an average of weights does.
_LONGEST = 16
#: Copies of one tensor differ by this factor in their thread blocks at most, for the sizes of their types.
_ALIKE = 4
#: Kernels that copy one tensor as it is or in another layout or type; others of the class gather or join several.
_COPIES = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")
_OTHERS = re.compile(r"(?i)cat_?array|index|gather|scatter")


def find(case: Case) -> Iterator[Candidate]:
    """Runs of copies on the device, one directly behind the other."""
    study = case.study
    chosen = chains(case)
    if not chosen.any():
        return
    ms = case.ms(chosen)
    yield Candidate(
        "layout_copies",
        "Chains of redundant copies",
        tuple(saved_launches(case, chosen * share) for share in _SAVED),
        (
            f"{times(study.count(chosen), 'copy')} a step stand in chains of {_CHAIN} or more, one directly behind the "
            f"other, and take {three(ms)} ms ({ms / case.step_ms:.0%} of the step).",
        ),
        f"The step is replayed without {_SAVED[0]:.0%} to {_SAVED[1]:.0%} of them: a chain ends in one copy or none.",
        (
            "x = x.transpose(1, 2)         # a view: leave .contiguous() out until a kernel asks for it",
            "x = x.to(torch.bfloat16)      # once, not to float32 and back",
        ),
        "Leave the chain out for a run: the output stays the same.",
        place=Place("class", "copy/layout"),
    )


def chains(case: Case) -> Bools:
    """The copies on the device that stand in a chain, outside the optimizer.

    A chain copies one tensor: of neighbours neither has many times the other's thread blocks. (Under autocast the
    casts of a weight, its bias and an input stand side by side, and are no chain.)
    """
    study = case.study
    of_one = np.array([*(bool(_COPIES.search(name)) and not _OTHERS.search(name) for name in study.kernels), False])
    copies = (study.of_class("copy/layout") & of_one[study.kernel]) | (study.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    found = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return found
    size = np.maximum(study.size[index], 1)
    unlike = np.maximum(size[1:], size[:-1]) > _ALIKE * np.minimum(size[1:], size[:-1])
    starts = np.flatnonzero(np.append(True, (np.diff(index) > 1) | unlike))
    lengths = np.diff(np.append(starts, len(index)))
    each = np.repeat(lengths, lengths)
    found[index[(each >= _CHAIN) & (each <= _LONGEST)]] = True
    return found
