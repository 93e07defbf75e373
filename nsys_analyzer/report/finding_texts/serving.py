"""The sentences of findings about engines that serve requests, and what to type for other findings in an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nsys_analyzer.analysis.findings.finding import FindingFigures, FindingTexts
from nsys_analyzer.analysis.findings.serving import CACHE_COPY_SAVINGS, BetweenStepsFigures, CacheCopiesFigures
from nsys_analyzer.report.finding_texts.kernels import say_percent_range
from nsys_analyzer.report.units import format_count, rounded, rounded_percent

#: By the id of a finding: the remedy in an engine that serves requests, instead of the one in PyTorch code.
_REMEDIES: Mapping[str, tuple[str, ...]] = {
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
#: By the id of a finding: the experiment that would disprove it in an engine.
_DISPROOFS: Mapping[str, str] = {
    "data_loading": "Serve one request again and again: if the step is no shorter, loading does not limit it.",
    "pageable_copy": "Serve one request again and again: if the step is no shorter, the copies do not limit it.",
}


def adapt_to_serving(finding_id: str, texts: FindingTexts) -> FindingTexts:
    """Returns the texts of a finding with the remedy and the disproof for an engine, if they differ there."""
    remedy, disproof = _REMEDIES.get(finding_id, texts.remedy), _DISPROOFS.get(finding_id, texts.disproof)
    return replace(texts, remedy=remedy, disproof=disproof)


def _between_steps(figures: BetweenStepsFigures) -> FindingTexts:
    return FindingTexts(
        title="The GPU waits between the steps",
        evidence=(
            f"{rounded(figures.gap_ms)} ms pass from the last CUDA call of a step to the first of the next one: in the "
            "scheduler, in sampling on the CPU, or in detokenization.",
        ),
        derivation="The step is replayed with 0.02 to 0.2 ms between steps, as if the next one were prepared "
        "meanwhile.",
        remedy=(
            "# vLLM: --async-scheduling, and detokenization in a process of its own as it is by default",
            "# SGLang: leave out --disable-overlap-schedule; TensorRT-LLM: disable_overlap_scheduler: false",
        ),
        disproof="Generate a fixed number of tokens without detokenization: if the step is no shorter, it waits for "
        "other work.",
    )


def _cache_copies(figures: CacheCopiesFigures) -> FindingTexts:
    return FindingTexts(
        title="Decode copies tensors as large as the cache",
        evidence=(
            f"{format_count(figures.copies, 'copy')} a step concatenate tensors or copy them on the device, for "
            f"{rounded(figures.ms)} ms ({rounded_percent(figures.share)} of the step).",
        ),
        derivation=f"The step is replayed without {say_percent_range(CACHE_COPY_SAVINGS)} of them, as if new keys and "
        "values were written in place.",
        remedy=(
            'model.generate(..., cache_implementation="static")  # room for all tokens, allocated once',
            "cache[:, :, position] = k  # instead of torch.cat((cache, k), 2); or pages, as vLLM and SGLang have",
        ),
        disproof="Decode after a prompt twice as long: if the copies take no longer, they do not copy the cache.",
    )


TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    BetweenStepsFigures: _between_steps,
    CacheCopiesFigures: _cache_copies,
}
