"""Rules on copies: batches from pageable memory, tensors to the host, and chains of copies on the device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, Case, Place, listed, saved_launches, three, times
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import (
    COPY,
    DEVICE_TO_PAGEABLE,
    INTO_HOST,
    KERNEL,
    ON_DEVICE,
    PAGEABLE_TO_DEVICE,
)

#: What a copy from pinned memory reaches over 16 lanes of PCIe 4.0 at least, bytes/s.
_PINNED_BYTES_PER_S = 25e9
#: A smaller copy is no batch.
_BATCH_BYTES = 64 << 10
#: What is left of a pause for a batch that another thread has put into pinned memory, ns.
_READY_NS = 50_000
#: A copy to the host of so many bytes at most is a value that Python asks for (.item(), a mask for nonzero()).
_VALUE_BYTES = 4096
#: What is left of a copy's time on a stream of its own at most: it takes bandwidth, and host memory differs.
_LEFT_OF_COPY = 0.15
#: So many copies in a row are a chain; the least and the most of their work that a better layout saves.
_CHAIN, _SAVED_OF_CHAIN = 3, (0.65, 1.0)
#: A longer row copies tensors side by side, as an average of weights does.
_LONGEST_CHAIN = 16
#: Copies of one tensor differ by this factor in their thread blocks at most, for the sizes of their types.
_ALIKE_BLOCKS = 4
#: Kernels that copy one tensor as it is or in another layout or type; others of the class gather or join several.
_COPIES = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")
_GATHERING = re.compile(r"(?i)cat_?array|index|gather|scatter")


def find_pageable_copy(case: Case) -> Iterator[Candidate]:
    """Finds large copies from memory that is not pinned: they are slow, and the program waits for them."""
    study = case.study
    copies = (study.copy == PAGEABLE_TO_DEVICE) & (study.size >= _BATCH_BYTES)
    if not copies.any():
        return
    calls = case.copying(copies)
    faster = np.minimum(study.size / _PINNED_BYTES_PER_S * 1e9 / np.maximum(study.duration, 1), 1.0)

    def pinned(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, faster, 1.0))

    # Getting a batch into pinned memory ahead spares what it takes to get it at all, not the making of it.
    loading = study.loading & (study.replay.pause <= study.duration[copies].max())

    def prefetched(replay: Replay) -> Replay:
        ready = replay.with_pauses(loading, _READY_NS).without_waits(calls)
        return ready.without_calls(calls & (study.call == COPY)).with_work(np.where(copies, 0.0, 1.0))

    whole = copies & study.first
    size, ms = study.size[whole].sum() / study.steps, study.duration[whole].sum() / study.steps / 1e6
    yield Candidate(
        "pageable_copy",
        "Batches are copied from pageable memory",
        (pinned, prefetched),
        (
            f"{times(study.count(copies), 'copy')} a step from pageable memory: {size / 2**20:,.1f} MiB in "
            f"{ms:.3g} ms, {size / max(ms, 1e-9) / 1e6:.3g} GB/s.",
            "The program waits for each: such a copy goes through a buffer of the driver's.",
            *case.called_by(calls),
        ),
        f"The step is replayed with copies that do not block, at {_PINNED_BYTES_PER_S / 1e9:.0f} GB/s on the same "
        "stream, and hidden altogether.",
        (
            "loader = DataLoader(..., pin_memory=True)",
            "batch = batch.to(device, non_blocking=True)  # best on a side stream, a batch ahead",
        ),
        "Train on a batch that is on the GPU already: if the step is no shorter, the copies are hidden.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "copy"),
    )


def find_device_to_host_copy(case: Case) -> Iterator[Candidate]:
    """Finds copies to the host that are more than values: a checkpoint, or outputs that are logged."""
    study = case.study
    copies = np.isin(study.copy, INTO_HOST) & ~small_copies(case)
    if not copies.any():
        return
    calls = case.copying(copies)
    names = listed(study.names(study.range[calls]))
    around = calls | _in_ranges(case, calls, study.range)
    # Between two of these copies the program makes room for the next one.
    pausing = _in_ranges(case, calls, study.pause_range) | (calls & np.append(calls[1:], False))
    if (around & case.calls_of(study.kind == KERNEL)).any():  # the ranges hold more than copies
        around = calls

    def asynchronous(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, _LEFT_OF_COPY, 1.0))

    def gone(replay: Replay) -> Replay:
        return replay.without_calls(around).with_pauses(pausing, 0.0).with_work(np.where(copies, 0.0, 1.0))

    whole = copies & study.first
    size, ms = study.size[whole].sum() / study.steps, study.duration[whole].sum() / study.steps / 1e6
    pageable = study.size[whole & (study.copy == DEVICE_TO_PAGEABLE)].sum() / max(study.size[whole].sum(), 1)
    yield Candidate(
        "device_to_host_copy",
        "Tensors are copied to the host inside the step",
        (asynchronous, gone),
        (
            f"{times(study.count(copies), 'copy')} a step from the GPU: {size / 2**20:,.1f} MiB in {three(ms)} ms, "
            f"{pageable:.0%} of it to pageable memory{f', in the range {names}' if names else ''}.",
        ),
        "The step is replayed with copies on a stream of their own, which the program does not wait for, and without "
        "the code around them, too.",
        (
            "host = {k: torch.empty_like(v, device='cpu', pin_memory=True) for k, v in state.items()}  # once",
            "side = torch.cuda.Stream()  # once",
            "side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(side):",
            "    for k, v in state.items(): host[k].copy_(v, non_blocking=True)",
            "# before the next optimizer.step(): torch.cuda.current_stream().wait_stream(side)",
            "# before host is written to a file: side.synchronize()",
        ),
        "Leave the copies out for a run: if the step is no shorter, they are hidden.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "copy"),
    )


def small_copies(case: Case) -> Bools:
    """Marks the copies of values to the host."""
    values: Bools = np.isin(case.study.copy, INTO_HOST) & (case.study.size <= _VALUE_BYTES)
    return values


def _in_ranges(case: Case, calls: Bools, around: Ints) -> Bools:
    """Marks the calls around which is a range that holds the copies, and no phase of the step."""
    study = case.study
    codes = [code for code in np.unique(study.range[calls]).tolist() if code >= 0]
    inside: Bools = np.isin(around, [code for code in codes if study.ranges[code] not in study.phase_ranges])
    return inside


def find_layout_copies(case: Case) -> Iterator[Candidate]:
    """Finds runs of copies on the device, one directly behind the other: casts and layouts that go forth and back."""
    study = case.study
    chained = layout_chains(case)
    if not chained.any():
        return
    ms = case.ms(chained)
    yield Candidate(
        "layout_copies",
        "Chains of redundant copies",
        tuple(saved_launches(case, chained * share) for share in _SAVED_OF_CHAIN),
        (
            f"{times(study.count(chained), 'copy')} a step stand in chains of {_CHAIN} or more, one directly "
            f"behind the other, and take {three(ms)} ms ({ms / case.step_ms:.0%} of the step).",
        ),
        f"The step is replayed without {_SAVED_OF_CHAIN[0]:.0%} to {_SAVED_OF_CHAIN[1]:.0%} of them: a chain ends in "
        "one copy or none.",
        (
            "x = x.transpose(1, 2)         # a view: leave .contiguous() out until a kernel asks for it",
            "x = x.to(torch.bfloat16)      # once, not to float32 and back",
        ),
        "Leave the chain out for a run: the output stays the same.",
        place=Place("class", "copy/layout"),
    )


def layout_chains(case: Case) -> Bools:
    """Marks the copies on the device that stand in a chain, outside the optimizer.

    A chain copies one tensor: of neighbours neither has many times the other's thread blocks. (Under autocast the
    casts of a weight, its bias and an input stand side by side, and are no chain.)
    """
    study = case.study
    of_one = np.array([*(bool(_COPIES.search(name)) and not _GATHERING.search(name) for name in study.kernels), False])
    copies = (study.of_class("copy/layout") & of_one[study.kernel]) | (study.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    in_chain = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return in_chain
    size = np.maximum(study.size[index], 1)
    unlike = np.maximum(size[1:], size[:-1]) > _ALIKE_BLOCKS * np.minimum(size[1:], size[:-1])
    length = row_lengths(np.append(True, (np.diff(index) > 1) | unlike))
    in_chain[index[(length >= _CHAIN) & (length <= _LONGEST_CHAIN)]] = True
    return in_chain


def row_lengths(starts: Bools) -> Ints:
    """Returns how many pieces stand in the row of each; ``starts`` marks those that begin a row."""
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    return np.repeat(lengths, lengths)
