"""The steps of the command line, for use from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD, Comparison
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import what_if as what_if
from nsys_analyzer.export.frame import kernel_frame
from nsys_analyzer.report.model import Report
from nsys_analyzer.trace import trace

if TYPE_CHECKING:
    import pandas as pd

_Path = str | Path


class Trace(trace.Trace):
    """An nsys export: ``Trace.load(path).kernels`` is its kernel table.

    For other phase names than the default ones see :func:`nsys_analyzer.export.frame.kernel_frame`.
    """

    @property
    def kernels(self) -> pd.DataFrame:
        """Returns one row for each kernel, with its phase, instance, range path and class.

        The columns and their units are ``nsys_analyzer.export.frame.COLUMNS``.

        Raises:
            MissingTableError: the export has no GPU activity table.
        """
        return kernel_frame(self)


def load(path: _Path) -> Trace:
    """Returns one capture: an export (.sqlite), a report of nsys (.nsys-rep) or a trace of PyTorch (.json, .json.gz).

    Raises:
        TraceError: it is absent, damaged, or of another program.
    """
    return Trace.load(Path(path))


def summarize(
    *paths: _Path, timings: _Path | Sequence[_Path] = (), phases: Mapping[str, Sequence[str]] | None = None,
    model: str | None = None, context_length: int | None = None, batch_size: int | None = None,
    precision: str | None = None, step_ms: float | None = None, with_tracks: bool = False,
) -> tuple[CaptureSummary, ...]:  # fmt: skip
    """Returns the figures of captures, ordered by model and context length, one entry for each process.

    Args:
        paths: captures, and folders that hold them.
        timings: files of times without a profiler, as ``--csv`` takes them.
        phases: phase to the names of its ranges, in place of the default names.
        model, context_length, batch_size, precision: what the captures do not say of their configuration.
        step_ms: the time of a step without a profiler, in place of ``timings``; of one capture or one run's ranks.
        with_tracks: whether to keep every moment of the measured steps, which the timeline of a page shows.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.inputs.captures import load_captures
    from nsys_analyzer.inputs.timings import read_timings

    files = [Path(one) for one in ([timings] if isinstance(timings, str | Path) else timings)]
    names = PhaseNames({phase: tuple(ranges) for phase, ranges in (phases or {}).items()})
    given = Run(model=model, context_length=context_length, batch_size=batch_size, precision=precision)
    timed = read_timings(*files) if files else None
    found = [Path(path) for path in paths]
    return load_captures(found, names, given, timed, step_ms=step_ms, with_tracks=with_tracks).captures


def compare(before: _Path, after: _Path, *, repeats: bool = False, force: bool = False) -> Comparisons:
    """Returns what changed from one side to the other, each a capture, a report's JSON, or a folder of captures.

    Args:
        before, after: the sides; ``timings.csv`` beside them is read, too.
        repeats: whether all captures of a folder are runs of one program.
        force: whether to compare what cannot be compared.

    Raises:
        NsysAnalyzerError: one of them cannot be read, or nothing can be compared.
    """
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.experiments.gather import load_runs

    return compare_runs(load_runs(Path(before), ()), load_runs(Path(after), ()), repeats=repeats, force=force)


def build_report(captures: Iterable[CaptureSummary]) -> Report:
    """Returns the report of these captures: sections for people, and the data they are written from."""
    from nsys_analyzer.report import sections
    from nsys_analyzer.report.evidence import Evidence

    return sections.build_report(Evidence(tuple(captures)))


def render(report: Report, output_format: str = "markdown") -> str:
    """Returns a report as text, without figures.

    Args:
        report: the report.
        output_format: one of ``nsys_analyzer.report.renderers.RENDERERS``: "markdown", "html" or "json".

    Raises:
        KeyError: there is no such format.
    """
    from nsys_analyzer.report.renderers import RENDERERS

    return RENDERERS[output_format].render(report, {})


# --- in a notebook


def _report_as_html(report: Report) -> str:
    """Returns the report's sections as HTML without scripts."""
    from nsys_analyzer.report.renderers.html import render_fragment

    return render_fragment(report)


def _summary_as_html(summary: CaptureSummary) -> str:
    """Returns what comes first in the report of one capture, and what would make its step shorter."""
    from nsys_analyzer.report.sections import EXPLAIN_SECTION_KEYS

    report = build_report([summary])
    return _report_as_html(
        replace(report, sections=tuple(one for one in report.sections if one.key in EXPLAIN_SECTION_KEYS))
    )


def _comparisons_as_html(found: Comparisons) -> str:
    """Returns what ``nsys-analyze compare`` says."""
    from nsys_analyzer.report.sections.comparison import answer_comparison

    return _report_as_html(Report("", (answer_comparison(found, DEFAULT_THRESHOLD),)))


def _comparison_as_html(comparison: Comparison) -> str:
    """Returns what ``nsys-analyze compare`` says of one pair."""
    return _comparisons_as_html(Comparisons((comparison,), (), ()))


# Here, for the rooms of these types know nothing of a report; `_repr_html_` is the name that notebooks ask for.
setattr(Report, "_repr_html_", _report_as_html)  # noqa: B010 - it is no attribute for a type checker
setattr(CaptureSummary, "_repr_html_", _summary_as_html)  # noqa: B010
setattr(Comparisons, "_repr_html_", _comparisons_as_html)  # noqa: B010
setattr(Comparison, "_repr_html_", _comparison_as_html)  # noqa: B010
