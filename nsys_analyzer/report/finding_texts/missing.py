"""The sentences that say why findings are missing."""

from __future__ import annotations

from nsys_analyzer.analysis.findings.missing import (
    ColdStart,
    EarlierWork,
    HiddenInGraphs,
    IdleSteps,
    LostKernels,
    MissingReason,
    NoApiCalls,
    NoCapture,
    NoKernels,
    OutOfMemory,
    RanOnCpu,
    RecordsGraphs,
    ReplayDiffers,
    TooFewCalls,
)
from nsys_analyzer.report.finding_texts.waits import name_first
from nsys_analyzer.report.units import rounded, rounded_percent
from nsys_analyzer.text import StrOrText, phrase, plural


def explain_missing_findings(reason: MissingReason) -> StrOrText:
    """Returns why some findings of a capture are missing, or all of them, in whole sentences."""
    match reason:
        case EarlierWork() | ReplayDiffers() | ColdStart() | RecordsGraphs() | OutOfMemory():
            return f"No saving can be derived here: {_explain_doubt(reason)}."
        case RanOnCpu():
            return "The program ran on the CPU, for which no findings are looked for."
        case NoCapture(message):
            return message or "There is no capture of this run."
        case LostKernels(launches):
            return (
                f"{launches:,} kernel {plural(launches, 'launch')} and no kernel were recorded: the GPU's records were "
                "dropped or cut off. Record again, with a warm-up before the recorded steps."
            )
        case NoKernels(by_torch):
            return phrase("No kernel was recorded. {} around steps that run on the GPU.", _how_to_record(by_torch))
        case IdleSteps():
            return "Nothing runs on the GPU in the steps."
        case NoApiCalls(by_torch):
            return phrase(
                "This trace has no API calls. Without them waits and launches are unknown, and nothing can be "
                "replayed. So all findings are missing: on launches, waits, copies, memory and data loading, and on "
                "matmuls, attention, elementwise kernels and the optimizer. {}.",
                _how_to_record(by_torch),
            )
        case TooFewCalls():
            return "Findings need the API calls of whole steps, and this capture holds too few of them."
        case HiddenInGraphs(share):
            return phrase(
                "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded. So findings about "
                "matmuls, attention, elementwise kernels and the optimizer are missing. Capture with "
                "`--cuda-graph-trace=node`.",
                rounded_percent(share),
            )
    raise TypeError(f"no sentence says {reason!r}")


def _explain_doubt(doubt: MissingReason) -> str:
    """Returns why no saving can be derived, as a clause."""
    match doubt:
        case ReplayDiffers(error):
            differs = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
            return f"a replay of the recorded steps is {differs} than they are"
        case ColdStart(start_up_ms, total_ms, calls):
            names = name_first([f"{api} {rounded(ms)} ms" for api, ms in calls])
            return (
                f"this is a cold start, in which start-up calls take {rounded(start_up_ms)} of {rounded(total_ms)} ms, "
                f"as they do once ({names}). Record steps after the warm-up"
            )
        case RecordsGraphs():
            return "the program records CUDA graphs, as it does once, and the recorded operations do not run meanwhile"
        case OutOfMemory(message):
            return f"the program ran out of memory: {(message or 'an allocation failed').rstrip('.')}"
    return "the steps hold work of the GPU that was launched before them"


def _how_to_record(by_torch: bool) -> StrOrText:
    """Returns what records kernels and API calls, as the beginning of a sentence."""
    if by_torch:
        return phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
    return phrase("Capture with `nsys profile --trace=cuda,nvtx`")
