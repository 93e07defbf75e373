"""Rules on the steps of engines that serve requests, and what to type for other findings where one serves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    Place,
    Rule,
    StepsToExplain,
    percent_between,
    saved_launches,
    times,
)
from nsys_analyzer.text import rounded, rounded_percent
from nsys_analyzer.trace.columns import ON_DEVICE

#: What is left of the time between two steps where the next one is prepared meanwhile, ns.
_BETWEEN_LEFT_NS = (200_000, 20_000)
#: What of the copies of a cache goes where new keys and values are written into their place.
_SAVED_OF_COPIES = (0.7, 1.0)
_CONCATENATING = re.compile("CatArrayBatchedCopy")
#: By the ID of a finding: what to type instead where an engine serves.
REMEDIES: Mapping[str, tuple[str, ...]] = {
    "launch_bound": (
        '# vLLM: leave out --enforce-eager; --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
        "# SGLang: leave out --disable-cuda-graph; --cuda-graph-max-bs as large as the batches get",
        "# TensorRT-LLM: cuda_graph_config: {enable_padding: true}",
        'model.generate(..., cache_implementation="static")  # transformers compiles decode then',
    ),
    "host_sync": (
        "# vLLM: --async-scheduling; SGLang: leave out --disable-overlap-schedule",
        "# TensorRT-LLM: disable_overlap_scheduler: false",
        "# a loop of your own: feed the new tokens back on the GPU, and read those of the step before",
    ),
    "pageable_copy": ("ids = torch.tensor(ids, pin_memory=True).to(device, non_blocking=True)",),
}
_OVERLAP = (
    "# vLLM: --async-scheduling, and detokenization in a process of its own as it is by default",
    "# SGLang: leave out --disable-overlap-schedule; TensorRT-LLM: disable_overlap_scheduler: false",
)


def of_serving(candidate: Candidate) -> Candidate:
    """Returns a candidate with what an engine is told instead, where that differs."""
    disproof = candidate.disproof
    if isinstance(disproof, str) and disproof.startswith("Run on"):
        disproof = "Serve one request again and again: if the step is no shorter, the copies do not hold it up."
    return replace(candidate, remedy=REMEDIES.get(candidate.id, candidate.remedy), disproof=disproof)


def find_between_steps(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds time between steps in which the program calls nothing of CUDA's: scheduling, sampling, detokenization."""
    study = steps.study
    between = np.zeros(len(study.call), np.bool_)
    between[study.replay.first_call[1:] - 1] = True
    between &= study.replay.pause > 0
    if not steps.summary.kind or not between.any():
        return
    ms = steps.paused_ms(steps.study.replay.pause[between])
    yield Candidate(
        "between_steps",
        "The GPU waits between the steps",
        tuple(lambda replay, ns=ns: replay.with_pauses(between, ns) for ns in _BETWEEN_LEFT_NS),  # type: ignore[misc]
        (
            f"From the last CUDA call of a step to the first of the next one pass {rounded(ms)} ms: the scheduler, "
            "sampling on the CPU, or detokenization.",
        ),
        "The step is replayed with 0.02 to 0.2 ms between steps, as where the next one is prepared meanwhile.",
        _OVERLAP,
        "Generate a fixed number of tokens without detokenization: if the step is no shorter, it waits for other work.",
        place=Place("idle", "host"),
    )


def find_cache_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds tensors that each decode step concatenates or copies on the device, as a cache that grows does."""
    study = steps.study
    copies = study.named(_CONCATENATING) | (study.copy == ON_DEVICE)
    if steps.summary.kind != "decode" or not copies.any():
        return
    ms = study.ms(copies)
    yield Candidate(
        "cache_copies",
        "Decode copies tensors as large as the cache",
        tuple(saved_launches(steps, copies * share) for share in _SAVED_OF_COPIES),
        (
            f"{times(study.count(copies), 'copy')} a step concatenate tensors or copy them on the device, for "
            f"{rounded(ms)} ms ({rounded_percent(ms / steps.step_ms)} of the step).",
        ),
        f"The step is replayed without {percent_between(_SAVED_OF_COPIES)} of them, as where new "
        "keys and values are written into their place.",
        (
            'model.generate(..., cache_implementation="static")  # room for all tokens, made once',
            "cache[:, :, position] = k  # in place of torch.cat((cache, k), 2); or pages, as vLLM and SGLang have",
        ),
        "Decode behind a prompt twice as long: if the copies take no longer, they are not those of the cache.",
        place=Place("class", "copy/layout"),
        pieces=copies,
    )


#: What is looked for; of two findings that save as much, the one that is named first comes first.
RULES: tuple[Rule, ...] = (find_between_steps, find_cache_copies)
