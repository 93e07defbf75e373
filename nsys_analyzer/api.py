"""Functions for use from Python: they do the same as the commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD, Comparison
from nsys_analyzer.analysis.comparison.pairs import Comparisons
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import what_if as what_if
from nsys_analyzer.export.frame import kernel_frame
from nsys_analyzer.report.model import Report
from nsys_analyzer.trace import trace
from nsys_analyzer.trace.phase_names import PhaseNames

if TYPE_CHECKING:
    import pandas as pd

_Path = str | Path


class Trace(trace.Trace):
    """A capture: ``Trace.load(path).kernels`` is its kernel table.

    :func:`nsys_analyzer.export.frame.kernel_frame` makes the table with other names of phases.
    """

    @property
    def kernels(self) -> pd.DataFrame:
        """Returns one row for each kernel, with its phase, instance, range path and class.

        The columns and their units are ``nsys_analyzer.export.frame.COLUMNS``.

        Raises:
            MissingTableError: the capture has no table of GPU operations.
        """
        return kernel_frame(self)


def load(path: _Path) -> Trace:
    """Returns one capture: an export (.sqlite), a report of nsys (.nsys-rep) or a trace of PyTorch (.json, .json.gz).

    Raises:
        TraceError: the file is missing, damaged, or of another program.
    """
    return Trace.load(Path(path))


def summarize(
    *paths: _Path, timings: _Path | Sequence[_Path] = (), phases: Mapping[str, Sequence[str]] | None = None,
    model: str | None = None, context_length: int | None = None, batch_size: int | None = None,
    precision: str | None = None, step_ms: float | None = None, with_tracks: bool = False,
) -> tuple[CaptureSummary, ...]:  # fmt: skip
    """Returns the summaries of captures, one for each process, ordered by model and context length.

    Args:
        paths: captures, and folders of captures.
        timings: CSV files of times without the profiler, as for ``--csv``.
        phases: the range names of each phase, which replace the default names.
        model, context_length, batch_size, precision: the configuration, if the captures do not record it.
        step_ms: the time of a step without the profiler, which replaces ``timings``; for one capture or the ranks of
            one run.
        with_tracks: whether to keep the events of the measured steps, which the timeline of a page shows.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.inputs.gather import gather
    from nsys_analyzer.report.finding_texts import write_texts

    csv_paths = [Path(path) for path in ([timings] if isinstance(timings, str | Path) else timings)]
    names = PhaseNames({phase: tuple(ranges) for phase, ranges in (phases or {}).items()})
    configuration = Run(model=model, context_length=context_length, batch_size=batch_size, precision=precision)
    inputs = gather(
        [Path(path) for path in paths], csv_paths, names=names, overrides=configuration, step_ms=step_ms,
        find_times=False, with_tracks=with_tracks,
    )  # fmt: skip
    return tuple(map(write_texts, inputs.captures))


def compare(before: _Path, after: _Path, *, repeats: bool = False, force: bool = False) -> Comparisons:
    """Returns the comparison of two sides. Each is a capture, a JSON report, or a folder of captures.

    Args:
        before, after: the two sides; a ``timings.csv`` beside them is read as well.
        repeats: whether all captures of a folder are runs of one program.
        force: whether to compare runs even if their configurations differ.

    Raises:
        NsysAnalyzerError: a side cannot be read, or no runs can be compared.
    """
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.experiments.evidence import load_runs
    from nsys_analyzer.report.sections.comparison import require_comparisons

    runs_before, runs_after = load_runs(Path(before)), load_runs(Path(after))
    return require_comparisons(compare_runs(runs_before, runs_after, repeats=repeats, force=force))


def build_report(captures: Iterable[CaptureSummary]) -> Report:
    """Returns the report of captures: its sections, and the data from which the sections are written."""
    from nsys_analyzer.report import sections
    from nsys_analyzer.report.evidence import Evidence

    return sections.build_report(Evidence(tuple(captures)))


def render(report: Report, output_format: str = "markdown") -> str:
    """Returns a report as text, without charts.

    Args:
        report: the report.
        output_format: "markdown", "html" or "json", a key of ``nsys_analyzer.report.renderers.RENDERERS``.

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
    """Returns the beginning and the findings of the report of one capture, as HTML."""
    from nsys_analyzer.report.sections import EXPLAIN_SECTION_KEYS

    report = build_report([summary])
    sections = tuple(section for section in report.sections if section.key in EXPLAIN_SECTION_KEYS)
    return _report_as_html(replace(report, sections=sections))


def _comparisons_as_html(comparisons: Comparisons) -> str:
    """Returns what ``nsys-analyze compare`` prints, as HTML."""
    from nsys_analyzer.report.sections.comparison import answer_comparison

    return _report_as_html(Report("", (answer_comparison(comparisons, DEFAULT_THRESHOLD),)))


# Notebooks call `_repr_html_` to show a value. The methods are set here, because the modules of these types cannot
# import the report.
setattr(Report, "_repr_html_", _report_as_html)  # noqa: B010 - a type checker refuses the assignment of an attribute
setattr(CaptureSummary, "_repr_html_", _summary_as_html)  # noqa: B010
setattr(Comparisons, "_repr_html_", _comparisons_as_html)  # noqa: B010
setattr(Comparison, "_repr_html_", lambda comparison: _comparisons_as_html(Comparisons((comparison,), (), ())))  # noqa: B010
