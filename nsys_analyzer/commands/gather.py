"""Finds the captures a report is about, reads them, and keeps a row for those that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsys_analyzer.analysis.models import Configuration, configuration_from_name, find_model
from nsys_analyzer.analysis.phases import PhaseNames
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summarize import summarize
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.capture.manifest import Manifest, find_manifest, manifests_without_trace
from nsys_analyzer.capture.timings import Timing, Timings
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.trace.trace import Trace

TRACE_SUFFIXES = (".sqlite", ".nsys-rep", ".qdrep")
#: A capture of this name is called after its folder: `small_ctx256/capture.sqlite`.
_GENERIC_STEM = "capture"


@dataclass(frozen=True)
class Given:
    """What the command line says of the configuration; None where it is silent."""

    model: str | None = None
    context_length: int | None = None
    batch_size: int | None = None
    precision: str | None = None

    def over(self, known: Configuration | None) -> Configuration | None:
        """The configuration with what was given in place of what was known.

        Raises:
            ConfigurationError: an unknown model.
        """
        given = {
            "model": find_model(self.model) if self.model is not None else None,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "precision": self.precision,
        }
        stated = {key: value for key, value in given.items() if value is not None}
        if not stated:
            return known
        # The model's source comes first: a model from a file name is believed only if the kernels agree.
        source = f"{known.source}, command line" if known and known.model and not self.model else "command line"
        return replace(known or Configuration(), **stated, source=source)  # type: ignore[arg-type]


def find_traces(paths: Iterable[Path]) -> list[Path]:
    """The trace files among files and folders (a folder's own, and those one level below), each capture once.

    Raises:
        TraceError: a path does not exist, or a folder holds no trace.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = _traces_in(path)
            if not inside and not manifests_without_trace(path):
                raise TraceError(f"{path} holds no trace", "Give a folder with .sqlite or .nsys-rep files")
            found += inside
        else:
            found.append(path)
    first: dict[Path, Path] = {}
    for path in found:
        first.setdefault(path.resolve(), path)
    return list(first.values())


def _traces_in(folder: Path) -> list[Path]:
    """A report and its export are one capture: the report file stands for both, its export is reused."""
    places = [folder, *sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))]
    files = [p for place in places for p in sorted(place.iterdir()) if p.suffix in TRACE_SUFFIXES and p.is_file()]
    reports = {path.with_suffix("") for path in files if path.suffix != ".sqlite"}
    exported = {path.with_suffix("") for path in files if path.suffix == ".sqlite"}
    keep_report = reports - {stem for stem in reports & exported if not _is_stale(stem)}
    return [p for p in files if (p.suffix == ".sqlite") != (p.with_suffix("") in keep_report)]


def _is_stale(stem: Path) -> bool:
    reports = [p for suffix in TRACE_SUFFIXES[1:] if (p := stem.parent / f"{stem.name}{suffix}").exists()]
    export = stem.parent / f"{stem.name}.sqlite"
    return any(report.stat().st_mtime > export.stat().st_mtime for report in reports)


def gather(
    paths: Sequence[Path], names: PhaseNames, given: Given, timings: Timings | None
) -> tuple[CaptureSummary, ...]:
    """One summary for each process of each capture, ordered by model and context length.

    A capture that cannot be read keeps a row with its error, unless it is the only one.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    traces = find_traces(paths)
    titles = _titles(traces)
    rows = [row for trace in traces for row in _read(trace, titles[trace], names, given, alone=len(traces) == 1)]
    failed = [row for row in rows if row.status == "failed"]
    if failed and len(failed) == len(rows):
        raise TraceError(f"None of {len(rows)} captures could be read; the first: {failed[0].message}")
    for folder in (path for path in paths if path.is_dir()):
        rows += [_without_trace(manifest) for manifest in manifests_without_trace(folder)]
    if timings:
        rows = [_with_timings(row, timings) for row in rows]
        rows += _only_timed(rows, timings)
    return tuple(sorted(rows, key=_order))


def _titles(traces: Sequence[Path]) -> dict[Path, str]:
    """What each capture is called: after its file, with its folder where several files have one name."""
    titles = {trace: _name(trace) for trace in traces}
    for longer in (lambda path: f"{path.resolve().parent.name}/{_name(path)}", str):
        times = Counter(titles.values())
        titles = {trace: title if times[title] == 1 else longer(trace) for trace, title in titles.items()}
    return titles


def _read(path: Path, title: str, names: PhaseNames, given: Given, *, alone: bool) -> Iterator[CaptureSummary]:
    configuration = given.over(configuration_from_name(_name(path)))
    try:
        manifest = find_manifest(path) if path.exists() else None
        configuration = given.over(manifest.configuration()) if manifest else configuration
        for summary in summarize(Trace.load(path), title, names, configuration):
            yield _with_status(summary, manifest)
    except NsysAnalyzerError as error:
        if alone:
            raise
        message = str(error)
        yield CaptureSummary(title, "", path.name, "failed", message, configuration=configuration, warnings=(message,))


def _name(path: Path) -> str:
    stem = path.name.removesuffix(path.suffix)
    return path.resolve().parent.name if stem == _GENERIC_STEM else stem


def _with_status(summary: CaptureSummary, manifest: Manifest | None) -> CaptureSummary:
    """What the run says of itself outranks what the trace shows."""
    if manifest is None or manifest.status == "ok":
        return summary
    status = "oom" if manifest.status == "oom" else "failed"
    return replace(summary, status=status, message=manifest.message or manifest.status)


def _without_trace(manifest: Manifest) -> CaptureSummary:
    own = manifest.path.name.removesuffix(".json").removesuffix(".manifest")
    name = manifest.path.resolve().parent.name if own == "manifest" else own
    status = "oom" if manifest.status == "oom" else "failed"
    message = manifest.message or ("no trace was written" if manifest.status == "ok" else manifest.status)
    return CaptureSummary(
        name, "", manifest.path.name, status, "" if status == message else message,
        configuration=manifest.configuration(),
    )  # fmt: skip


def _with_timings(summary: CaptureSummary, timings: Timings) -> CaptureSummary:
    configuration = summary.configuration or Configuration()
    configuration = replace(configuration, mode=configuration.mode or _mode(summary))

    def timed(phase: str) -> Stats | None:
        found = timings.find(configuration, phase)
        return _stats(found) if found else None

    phases = tuple(replace(phase, python_ms=timed(phase.phase)) for phase in summary.phases)
    return replace(summary, phases=phases, python_forward_backward_ms=timed("forward+backward"))


def _mode(summary: CaptureSummary) -> str | None:
    """What a capture ran, from the phases it has."""
    if summary.phase("optimizer"):
        return "train"
    return "forward+backward" if summary.phase("backward") else "forward" if summary.phase("forward") else None


def _stats(timing: Timing) -> Stats | None:
    """The timing's statistics; where it gives a median alone, that stands for the mean."""
    center = timing.mean_ms if timing.mean_ms is not None else timing.median_ms
    if center is None:
        return None
    return Stats(timing.steps, center, timing.std_ms, timing.min_ms, timing.median_ms, timing.max_ms)


def _only_timed(rows: Sequence[CaptureSummary], timings: Timings) -> Iterator[CaptureSummary]:
    """A row for each configuration that the timings say ran out of memory and that left no capture."""
    captured = [row.configuration for row in rows if row.configuration]
    out = [_configuration(timing) for timing in timings.rows if timing.status == "oom"]
    lost = [one for one in out if not any(_may_be(one, other) for other in captured)]
    for configuration in dict.fromkeys(replace(one, mode=None) for one in lost):
        model = configuration.model.name if configuration.model else "unknown model"
        details = (f"b{configuration.batch_size}" if configuration.batch_size else "", configuration.precision or "")
        name = "_".join([f"{model}_ctx{configuration.context_length or '?'}", *filter(None, details)])
        yield CaptureSummary(name, "", timings.path.name, "oom", configuration=configuration)


def _configuration(timing: Timing) -> Configuration:
    return Configuration(
        timing.model, timing.context_length, timing.batch_size, timing.precision, timing.mode, source="timings"
    )


def _may_be(one: Configuration, other: Configuration) -> bool:
    """Whether two configurations of one model and context contradict each other in nothing that both know."""
    pairs = ((one.batch_size, other.batch_size), (one.precision, other.precision), (one.mode, other.mode))
    same = (one.model, one.context_length) == (other.model, other.context_length)
    return same and all(left == right for left, right in pairs if left is not None and right is not None)


def _order(summary: CaptureSummary) -> tuple[object, ...]:
    configuration = summary.configuration
    model = configuration.model if configuration else None
    known = model is not None
    return (
        not known,
        model.parameters if model else 0,
        (configuration.context_length or 0) if configuration else 0,
        summary.name,
    )
