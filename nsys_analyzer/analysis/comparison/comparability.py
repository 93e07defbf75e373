"""What two sides say otherwise of themselves, and the reasons against comparing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nsys_analyzer.analysis.comparison.comparison import Difference, Side
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.text import Words, phrase

#: What makes another program of a run, by the key of the report's JSON; then the dimensions that the model stands for.
_WORK = ("model", "context_length", "batch_size", "mode")
_DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
#: What people change, to see what it gains.
_OPTIONS = ("precision", "attention", "compile", "cuda_graph", "optimizer", "device")
#: All of a configuration: runs of one that is the same in every key are runs of one program.
CONFIGURATION = (*_WORK, *_OPTIONS)
#: What differs by itself between machines and days.
_VERSIONS = ("torch", "cuda", "driver", "nsys", "host_cpu", "git_commit")
#: A matmul precision that stands for a run, as a share of the matmul time.
_MOSTLY = 0.5
#: Steps that no name tells are the same work where neither has so many times the matmuls of the other.
_AS_MANY = 1.1
_STATUS = {
    "oom": "ran out of memory",
    "partial": "is partial: a range has no end",
    "no_kernels": "holds no kernel",
    "failed": "failed",
    "timeout": "was stopped after its time limit",
    "not_profiled": "was not profiled",
}


def value_of(run: Summary, key: str) -> Any:
    """What a run says of itself under a key of its configuration or manifest; None where it says nothing."""
    known = getattr(run.configuration, "model_name" if key == "model" else key, None)
    return getattr(run.run, key, None) if known is None else known


def differences(before: Side, after: Side) -> tuple[Difference, ...]:
    """What both sides know, and say otherwise: first what was asked for, then versions."""
    one, other = before.runs[0], after.runs[0]
    found = list(differing(one, other, (*_WORK, *_DIMENSIONS, *_OPTIONS)))
    precisions = _matmul_precision(one), _matmul_precision(other)
    if all(precisions) and precisions[0] != precisions[1] and not any(each.key == "precision" for each in found):
        found.append(Difference("matmul precision", *precisions))
    return (*found, *differing(one, other, _VERSIONS))


def differing(one: Summary, other: Summary, keys: tuple[str, ...], unknown: str = "") -> Iterator[Difference]:
    """The keys under which two runs say otherwise; with a word for ``unknown``, those that one leaves out, too."""
    for key in keys:
        values = value_of(one, key), value_of(other, key)
        if values[0] != values[1] and (unknown or None not in values):
            yield Difference(key, *(_written(value, unknown) for value in values))


def _written(value: Any, unknown: str) -> str:
    if value is None:
        return unknown
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _matmul_precision(run: Summary) -> str:
    """The precision of most of the matmul time; empty where none has most of it."""
    return next((name for name, share in run.precisions.items() if share > _MOSTLY and name != "unknown"), "")


def reasons_against(before: Side, after: Side) -> tuple[Words, ...]:
    """Why two sides cannot be compared, a sentence each; none where they can."""
    runs = (*before.runs, *after.runs)
    found = [*dict.fromkeys(reason for run in runs for reason in reasons_against_run(run))]
    for run in runs[1:]:
        found += [reason for reason in _of_pair(runs[0], run) if reason not in found]
    return tuple(found)


def reasons_against_run(run: Summary) -> Iterator[Words]:
    """Why a run cannot be compared with any other, a sentence each; none where it can."""
    if run.status == "not_profiled" and run.unprofiled and run.unprofiled.trusted_ms(STEP):
        return  # its times alone are compared
    if run.status != "ok":
        said = f" ({run.message})" if run.message else ""
        yield f"{run.title} {_STATUS.get(run.status, run.status)}{said}"
    elif run.step is None:
        yield f"{run.title} holds no step that ran on a GPU"


def _modules(run: Summary) -> frozenset[str]:
    """The modules whose FLOPs were counted while the program ran, by their paths and classes; empty where none were."""
    return frozenset(run.run.flops.modules if run.run and run.run.flops else ())


def _of_pair(one: Summary, other: Summary) -> Iterator[Words]:
    if one.gpu and other.gpu and one.gpu != other.gpu:
        yield f"{one.title} is of {one.gpu}, {other.title} of {other.gpu}"
    for difference in differing(one, other, (*_WORK, *_DIMENSIONS)):
        what = difference.key.replace("_", " ")
        yield f"The {what} of {one.title} is {difference.before}, that of {other.title} {difference.after}"
    modules = _modules(one), _modules(other)
    if all(modules) and modules[0].isdisjoint(modules[1]):
        yield f"The models of {one.title} and {other.title} have no module in common"
    if not one.step or not other.step:
        return
    few, many = sorted((one.step.matmuls, other.step.matmuls))
    if one.step.source != other.step.source:
        yield phrase(
            "Their steps are not the same: of {} {}; of {} {}", one.title, one.step.unit, other.title, other.step.unit
        )
    elif one.step.is_found and many > _AS_MANY * few:
        yield phrase(
            "{} has {:,.0f} matmuls in {}, {} has {:,.0f} in {}, and nothing names what a step is (`--step RANGE`, "
            "`--steps N`)",
            one.title, one.step.matmuls, one.step.unit, other.title, other.step.matmuls, other.step.unit,
        )  # fmt: skip
