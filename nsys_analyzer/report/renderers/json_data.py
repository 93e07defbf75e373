"""The report as JSON: schema version 1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nsys_analyzer.analysis.summary.compared import FUSED, ClassShares, Leader, MatmulShare, leaders, matmul_share
from nsys_analyzer.analysis.summary.limits import ClassRate, limits_of
from nsys_analyzer.analysis.summary.statistics import KernelRow, without_communication
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.summary.verdicts import busy_share
from nsys_analyzer.report.sections.anatomy import call_name
from nsys_analyzer.report.sections.missing import why_missing
from nsys_analyzer.text import plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.findings.finding import Finding
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.analysis.steps.step import DeviceSteps, Parts
    from nsys_analyzer.report.model import FinishedBench, Report
    from nsys_analyzer.trace.metadata import Gpu, Metadata

SCHEMA_VERSION = 1
GENERATOR = "nsys-analyze"


def render(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one JSON document, without figures."""
    del figures
    return json.dumps(report_data(report), indent=1, allow_nan=False) + "\n"


def report_data(report: Report) -> dict[str, Any]:
    """A report as plain data for ``json.dumps``; times are those of one instance, shares are fractions."""
    captures = [_capture(capture, report.captures, report.labels) for capture in report.captures]
    return {**_document(captures, report.runs), "benches": [_bench(bench) for bench in report.benches]}


def _bench(bench: FinishedBench) -> dict[str, Any]:
    """Every row of a bench, and the ceilings of its device by precision."""
    return {
        "name": bench.name,
        "runs": list(bench.commands),
        "ceilings": {precision: row.written()["figures"] for precision, row in bench.ceilings.items()},
        "rows": [row.written() for row in bench.rows],
    }


def _capture(capture: CaptureSummary, captures: Sequence[CaptureSummary], labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        **_identity(capture),
        **_profiler(capture),
        "conditions": _conditions(capture.metadata, capture.gpu) if capture.metadata else None,
        "configuration": _configuration(capture),
        "precisions": capture.precisions,
        "phases": [{**_phase(phase, labels), "busy_share": _busy_share(capture, phase)} for phase in capture.phases],
        "share_in_phases": capture.share_in_phases,
        "phases_suffice": capture.phases_suffice,
        "whole": _phase(capture.whole, labels) if capture.whole else None,
        "top_kernels": [_leader(leader, labels) for leader in leaders(capture)],
        "matmul": _matmul(matmul_share(capture, captures)),
        "attention": _attention(capture),
        "limits": _limits(capture),
        "modules": _modules(capture),
        "step": _step(capture),
        **_findings(capture),
        "device_memory": asdict(capture.device_memory) if capture.device_memory else None,
        "coverage": asdict(capture.coverage) if capture.coverage else None,
        "run": asdict(capture.run) if capture.run else None,
        "unprofiled": _unprofiled(capture),
        "warnings": [plain(warning, "`") for warning in capture.warnings],
    }


def _configuration(capture: CaptureSummary) -> dict[str, Any] | None:
    known = capture.configuration
    return {**asdict(known), "model": known.model.name if known.model else None} if known else None


def explained_data(captures: Sequence[CaptureSummary], runs: Sequence[ParallelRun] = ()) -> dict[str, Any]:
    """Why the steps of captures are as long as they are, each figure as in the report's data."""
    return _document([_explained(capture) for capture in captures], runs)


def recorded_data(captures: Sequence[CaptureSummary]) -> dict[str, Any]:
    """What a comparison reads of captures (``analysis.comparison.recorded``), each figure as in the report's data."""
    return _document([_recorded(capture) for capture in captures])


def _recorded(capture: CaptureSummary) -> dict[str, Any]:
    return {
        **_identity(capture),
        "configuration": _configuration(capture),
        "precisions": capture.precisions,
        "phases": [_phase(replace(phase, kernels=(), classes=()), {}) for phase in capture.phases],
        "step": _step(capture),
        **_findings(capture),
        "run": asdict(capture.run) if capture.run else None,
        "unprofiled": _unprofiled(capture),
    }


def data_of_modules(captures: Sequence[CaptureSummary]) -> dict[str, Any]:
    """The modules of captures, each figure as in the report's data."""
    return _document([{**_identity(capture), "modules": _modules(capture)} for capture in captures])


def _document(captures: list[dict[str, Any]], runs: Sequence[ParallelRun] = ()) -> dict[str, Any]:
    document = {"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "captures": captures}
    if runs:
        first, *others = map(_run, runs)
        document |= {**first, "other_runs": others}
    return document


def _run(run: ParallelRun) -> dict[str, Any]:
    """Several ranks of one run; those of the run with most ranks stand in the document itself."""
    slowest = run.slowest_rank
    return {
        "run": run.name,
        "strategies": list(run.strategies),
        "world_size": run.world_size or None,
        "missing_ranks": list(run.missing),
        "ranks_from": run.ranks_from,
        "steps": run.steps,
        "ranks": [asdict(one) for one in run.ranks],
        "slowest_rank": slowest.rank if slowest else None,
        "slowest": slowest.label if slowest else None,
        "fastest": run.ranks[run.fastest].label if run.fastest is not None else None,
        "takes_turns": run.takes_turns,
        "slowed_ms": run.slowed_ms,
        "skew_ms": run.skew_ms,
        "lost": [asdict(row) for row in run.lost],
        "collectives": [asdict(row) for row in run.collectives],
        "run_findings": [_finding(one) for one in run.findings],
        "clocks": asdict(run.alignment) if run.alignment else None,
        "run_notes": [plain(note, "`") for note in run.notes],
    }


def _identity(capture: CaptureSummary) -> dict[str, Any]:
    """What tells a capture from others, and how it ended."""
    return {
        "name": capture.name,
        "process": capture.process or None,
        "pid": capture.pid,
        "rank": capture.rank,
        "source": capture.source,
        "status": capture.status,
        "message": plain(capture.message, "`") or None,
        "gpu": capture.gpu.name if capture.gpu else None,
    }


def _explained(capture: CaptureSummary) -> dict[str, Any]:
    return {
        **_identity(capture),
        "limits": _limits(capture),
        "step": _step(capture),
        **_findings(capture),
        "warnings": [plain(warning, "`") for warning in capture.warnings],
    }


def _modules(capture: CaptureSummary) -> dict[str, Any] | None:
    """Every module by itself, each behind the one that it lies in; None where none is known."""
    modules = capture.modules
    if modules is None:
        return None
    return {
        **asdict(modules),
        "forward_ms": modules.forward_ms,
        "backward_ms": modules.backward_ms,
        "forward_coverage": modules.forward_coverage,
        "backward_coverage": modules.backward_coverage,
    }


def _step(capture: CaptureSummary) -> dict[str, Any] | None:
    """The steps: the parts of one, of the device that computes most and of each; None where nothing ran."""
    step, diagnosis = capture.step, capture.diagnosis
    if step is None:
        return None
    latency, queue = step.launch_latency_us, step.queue
    return {
        "instances": step.instances,
        "source": step.source,
        "unit": step.unit,
        "length_ms": step.length_ms,
        "groups": [asdict(group) for group in step.groups],
        "cut": step.cut,
        "wall_ms": asdict(step.wall_ms),
        "wall_values_ms": list(step.values_ms),
        **_device(step.main),
        **_compared(step.main),
        "devices": [{"device": device.device, **_device(device)} for device in step.devices],
        "launch_latency_us": {"median": latency[0], "p90": latency[1]} if latency else None,
        "queue": {"median": queue[0], "max": queue[1]} if queue else None,
        "on_gpu_timeline": step.on_gpu,
        "unprofiled_ms": {"low": diagnosis.step_ms_low, "high": diagnosis.step_ms_high, "timed": diagnosis.timed}
        if diagnosis and (diagnosis.timed or not diagnosis.doubt)
        else None,
        "profiler_overhead_ms": diagnosis.overhead_ms if diagnosis else None,
    }


def _device(device: DeviceSteps) -> dict[str, Any]:
    """What fills a step on one device; the four parts add up to its length."""
    return {
        **_parts(device.parts),
        "classes": [{"class": one.kernel_class, "ms": one.ms, "std_ms": one.std_ms} for one in device.classes],
        "phases": [{"phase": one.phase, **_parts(one.parts)} for one in device.phases],
        "idle_by_cause": [
            {
                "cause": one.cause,
                "range": one.range or None,
                "api": call_name(one.api) or None,
                "ms": one.ms,
                "gaps": one.gaps,
            }
            for one in device.idle
        ],
    }


def _compared(device: DeviceSteps) -> dict[str, Any]:
    """What a comparison of two captures needs beside: of the device that computes most."""
    return {
        "busy_values_ms": list(device.busy_values_ms),
        "exposed_communication_std_ms": device.communication_std_ms,
        "exposed_copy_std_ms": device.copy_std_ms,
        "own_pauses_ms": device.own_pauses_ms,
        "causes": [asdict(one) for one in device.causes],
        "kernels": [_with_class(asdict(one)) for one in device.kernels],
    }


def _with_class(row: dict[str, Any]) -> dict[str, Any]:
    return {"class": row.pop("kernel_class"), **row}


def _parts(parts: Parts) -> dict[str, float]:
    return {
        "compute_ms": parts.compute_ms,
        "exposed_communication_ms": parts.exposed_communication_ms,
        "exposed_copy_ms": parts.exposed_copy_ms,
        "idle_ms": parts.idle_ms,
    }


def _findings(capture: CaptureSummary) -> dict[str, Any]:
    """The findings, the largest saving first, None where none can be derived; and why some or all are missing."""
    diagnosis, why = capture.diagnosis, why_missing(capture)
    return {
        "findings": [_finding(one) for one in diagnosis.findings] if diagnosis and not diagnosis.doubt else None,
        "findings_missing": plain(why, "`") if why else None,
    }


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "id": one.id,
        "title": one.title,
        "saves_ms": one.saves_ms,
        "saves_ms_low": one.saves_ms_low,
        "saves_ms_high": one.saves_ms_high,
        "share_of_step": one.share_of_step,
        "step_ms": one.step_ms,
        "left_ms": one.left_ms,
        "left_after_all_ms": one.left_after_all_ms,
        "evidence": [plain(seen, "`") for seen in one.evidence],
        "derivation": plain(one.derivation, "`"),
        "remedy": list(one.remedy),
        "disproof": plain(one.disproof, "`"),
    }


def _unprofiled(capture: CaptureSummary) -> dict[str, Any] | None:
    """The target's own timings, tokens per second, and wall ÷ python − 1 of each phase that has both."""
    if capture.unprofiled is None:
        return None
    return {
        **asdict(capture.unprofiled),
        "tokens_per_second": capture.tokens_per_second,
        "profiler_overhead": {phase: capture.profiler_overhead(phase) for phase in capture.unprofiled.phases},
    }


def _profiler(capture: CaptureSummary) -> dict[str, Any]:
    metadata = capture.metadata
    by_nsys = metadata is not None and metadata.profiler == "nsys"
    return {
        "profiler": metadata.profiler if metadata else None,
        "profiler_version": metadata.profiler_version if metadata else None,
        "nsys_version": metadata.profiler_version if metadata and by_nsys else None,
    }


def _conditions(metadata: Metadata, gpu: Gpu | None) -> dict[str, Any]:
    """The versions of the trace and the machine, "unknown" where the trace is silent, and the GPU's own figures."""
    return {
        "schema_version": metadata.schema_version,
        "platform": metadata.platform,
        "driver": metadata.driver,
        "runtime": metadata.runtime,
        "cpu": metadata.cpu,
        "os": metadata.os,
        "gpu_memory_bytes": gpu.memory_bytes or None if gpu else None,
        "gpu_sm_count": gpu.sm_count or None if gpu else None,
    }


def _leader(leader: Leader, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "scope": leader.scope,
        "kernel": _kernel(leader.kernel, labels),
        "collective": _kernel(leader.collective, labels) if leader.collective else None,
    }


def _matmul(share: MatmulShare) -> dict[str, Any]:
    return {
        "phases": [_shares(one) for one in share.phases],
        "step": _shares(share.step) if share.step else None,
        "inference": _shares(share.inference) if share.inference else None,
        "inference_of": share.inference_of or None,
    }


def _shares(shares: ClassShares) -> dict[str, Any]:
    """Matmul's share of the kernels' time, and of those that compute: None where kernels without a name may be any."""
    return {
        "scope": shares.scope,
        "kernel_sum_ms": shares.kernel_time_ms,
        "matmul": shares.matmul,
        "matmul_without_communication": shares.computing().matmul,
        "fused_attention": shares.of(FUSED),
        "unnamed": shares.unnamed,
    }


def _phase(phase: PhaseSummary, labels: Mapping[str, str]) -> dict[str, Any]:
    data = asdict(replace(phase, classes=(), kernels=(), profiler_cost=None))
    for internal in ("holds_backward", "kernels_least", "kernels_most", "profiler_cost"):
        del data[internal]
    return {
        "memory_operations": data.pop("memory"),
        "kernel_sum_ms": data.pop("kernel_time_ms"),
        **data,
        "classes": _classes(phase),
        "kernels": [_kernel(row, labels) for row in phase.kernels],
    }


def _kernel(row: KernelRow, labels: Mapping[str, str]) -> dict[str, Any]:
    data = asdict(row)
    return {"class": data.pop("kernel_class"), "label": labels[row.name], **data}


def _classes(phase: PhaseSummary) -> list[dict[str, Any]]:
    """The classes of a phase; a share of what computes is unknown for communication."""
    computing = {row.kernel_class: row.share for row in without_communication(phase.classes)}
    rows = [asdict(row) for row in phase.classes]
    names = [row.pop("kernel_class") for row in rows]
    return [
        {"class": name, **row, "share_without_communication": computing.get(name)}
        for name, row in zip(names, rows, strict=True)
    ]


def _busy_share(capture: CaptureSummary, phase: PhaseSummary) -> dict[str, Any] | None:
    share = busy_share(capture, phase)
    return {**asdict(share), "verdict": share.verdict} if share else None


def _attention(capture: CaptureSummary) -> dict[str, Any] | None:
    attention = capture.attention
    if attention is None:
        return None
    return {
        **asdict(attention),
        "softmax_flops_per_s": attention.softmax_flops_per_s,
        "matmul_flops_per_s": attention.matmul_flops_per_s,
        "fused_flops_per_s": attention.fused_flops_per_s,
        "ratio_of": "products / softmax",
    }


def _limits(capture: CaptureSummary) -> dict[str, Any] | None:
    """What the capture achieves of its GPU's peaks; shares are fractions."""
    limits = limits_of(capture)
    if limits is None:
        return None
    return {
        "mfu": {one.phase: one.mfu for one in limits.phases if one.mfu is not None},
        "mfu_of_best": {one.phase: one.mfu_of_best for one in limits.phases if one.mfu_of_best is not None},
        "time_of": {one.phase: one.time_of for one in limits.phases},
        "ms": {one.phase: one.ms for one in limits.phases},
        "model_flops": {one.phase: one.model_flops for one in limits.phases},
        "precision": limits.precision,
        "peak_flops": limits.peak_flops_per_s,
        "best_precision": limits.best_precision,
        "best_peak_flops": limits.best_peak_flops_per_s,
        "peak_bytes_per_s": limits.peak_bytes_per_s,
        "source": limits.source or None,
        "tensor_core_share": limits.tensor_core_share,
        "tensor_core_unknown": limits.tensor_core_unknown,
        "classes": [_class_rate(one) for one in limits.classes],
        "missing": list(limits.missing),
        "notes": list(limits.notes),
        "doubt": limits.doubt or None,
    }


def _class_rate(one: ClassRate) -> dict[str, Any]:
    return {
        "class": one.kernel_class,
        "phase": one.phase,
        "ms": one.ms,
        "flops": one.flops,
        "flops_per_s": one.flops_per_s,
        "share_of_peak": one.share_of_peak,
        "bytes": one.bytes,
        "bytes_per_s": one.bytes_per_s,
        "precision": one.precision,
    }
