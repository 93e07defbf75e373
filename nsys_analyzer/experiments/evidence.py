"""Makes the contents of a report from its inputs, and gathers the runs of a comparison with their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.gather import Inputs, gather_runs
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.finding_texts import write_texts
from nsys_analyzer.report.model import FinishedBench, Paragraph, Section
from nsys_analyzer.text import phrase


def make_evidence(inputs: Inputs, command: str = "") -> Evidence:
    """Returns the contents of a report, with the sections of the experiments among the inputs.

    An experiment that cannot be read has a section with the error, unless the report has no other content.

    Args:
        inputs: the inputs of the report.
        command: the command line that makes the report again.

    Raises:
        ConfigurationError: the only experiment cannot be read, and there is nothing else to report.
    """
    is_alone = len(inputs.bench_folders) == 1 and not inputs.captures
    benches = []
    for folder in inputs.bench_folders:
        # Imported here, so that a report of captures starts faster.
        from nsys_analyzer.experiments.benches import read_finished

        try:
            benches.append(read_finished(folder))
        except NsysAnalyzerError as error:
            if is_alone:
                raise
            section = Section(f"bench-{folder.name}", f"Bench: {folder.name}", (Paragraph(f"Left out: {error}"),))
            benches.append(FinishedBench(folder.name, section))
    notes = (phrase("Read from the captures' folder. `--csv` names another file."),) if inputs.found_times else ()
    return Evidence(inputs.captures, command, inputs.times_source, notes, tuple(benches))


def load_runs(path: Path, csv_paths: Sequence[Path] = (), **options: Any) -> tuple[Summary, ...]:
    """Gathers the runs of one side of a comparison, and writes the sentences of their findings.

    Args:
        path: a capture, a folder of captures, the JSON of a report, or the folder of a baseline.
        csv_paths: tables of unprofiled times.
        **options: the options of ``inputs.gather.gather_runs``.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    runs = gather_runs(path, csv_paths, **options)
    return tuple(write_texts(run) if isinstance(run, CaptureSummary) else run for run in runs)
