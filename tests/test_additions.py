"""Adds one thing of each kind, as the table of CONTRIBUTING.md describes it: a module and an entry, or one row.

The table names the files that test the other kinds.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nsys_analyzer.analysis.comparison import comparison
from nsys_analyzer.analysis.findings import diagnosis
from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    FindingTexts,
    StepsToExplain,
    saved_work,
)
from nsys_analyzer.analysis.kernels import class_rules, classes
from nsys_analyzer.analysis.kernels.class_rules import Rule
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.transformer import peaks
from nsys_analyzer.api import summarize
from nsys_analyzer.cli import bench as cli_bench
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.experiments import benches
from nsys_analyzer.questions import ask
from nsys_analyzer.questions import figure as figure_module
from nsys_analyzer.questions.named_figures import FIGURES
from nsys_analyzer.questions.summary_parts import PHASE_PART
from nsys_analyzer.report import finding_texts, palette, sections
from nsys_analyzer.report.model import Block, Field, Paragraph, make_table
from nsys_analyzer.report.renderers import step_bar
from nsys_analyzer.report.sections import ReportQuestion
from nsys_analyzer.report.writing import check_target
from nsys_analyzer.trace import phase_names, sources
from tests.conftest import Main
from tests.support import new_experiment, new_format
from tests.support.export import Export


def test_a_question_is_a_function_and_an_entry(
    step_trace: Path, tmp_path: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(capture: CaptureSummary, _: Mapping[str, str]) -> Iterator[Block]:
        if capture.whole:
            yield Paragraph(f"There are {capture.whole.kernels_per_instance:.0f}.")

    asked = ReportQuestion("how-many", lambda _: "How many kernels are there?", answer)
    monkeypatch.setattr(sections, "QUESTIONS", (*sections.QUESTIONS, asked))
    assert run_main("report", step_trace, "-o", tmp_path / "report.md", "--no-figures").code == 0
    text = (tmp_path / "report.md").read_text()
    assert "\n## How many kernels are there?\n\nThere are 5.\n" in text


def test_a_named_figure_is_a_function(step_trace: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_module, "FIGURES", known := {**FIGURES})
    monkeypatch.setattr(ask, "FIGURES", known)

    @figure_module.figure(PHASE_PART, "count", needs=("class",))
    def distinct_kernels(phase: PhaseSummary, kernel_class: str) -> int:
        """Returns the number of distinct kernels of a class."""
        return sum(row.kernel_class == kernel_class for row in phase.kernels)

    answer = "distinct_kernels class=matmul = 1 count, the capture without warm-up"
    assert run_main("ask", step_trace, "distinct_kernels class=matmul").out.startswith(answer)
    listed = "distinct_kernels class=… [phase=…]\n    count: The number of distinct kernels of a class.\n"
    assert run_main("ask", "--list").out.endswith(listed)


def test_an_experiment_is_a_module_an_entry_and_a_target(
    tmp_path: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primes below 10: 2, 3, 5 and 7; below 20 also 11, 13, 17 and 19."""
    monkeypatch.setattr(benches, "BENCHES", (*benches.BENCHES, new_experiment.BENCH))
    monkeypatch.setattr(cli_bench, "_make_commands", cli_bench._make_commands.__wrapped__)  # they are made once
    ended = run_main("bench", "primes", "--limit", "10,20", "--device", "cpu", "--output-dir", tmp_path / "primes")
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "primes/bench.jsonl").read_text().splitlines()]
    assert [row["figures"]["primes_count"] for row in rows if "figures" in row] == [4, 8]
    report = tmp_path / "report.md"
    assert run_main("report", tmp_path / "primes", "-o", report).code == 0
    assert "Up to 8 primes." in report.read_text()


def test_a_finding_is_a_rule_and_its_texts(
    real_capture: Callable[[str], Path], run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are accumulated over four steps leave a quarter of the optimizer's work, over ten a tenth."""

    @dataclass(frozen=True)
    class FrequentOptimizerFigures(FindingFigures):
        ms: float

    def find(steps: StepsToExplain) -> Iterator[Candidate]:
        work = steps.study.in_phase("optimizer")
        changes = (saved_work(work * (1 - 1 / 4)), saved_work(work * (1 - 1 / 10)))
        yield Candidate("frequent_optimizer", FrequentOptimizerFigures(steps.study.work_ms(work)), changes)

    def say(figures: FrequentOptimizerFigures) -> FindingTexts:
        return FindingTexts(
            title="The optimizer runs in every step",
            evidence=(f"It takes {figures.ms:.3g} ms.",),
            derivation="The step is replayed with a quarter and with a tenth of its work.",
            remedy=("if step % 4 == 0: optimizer.step()",),
            disproof="Call it in every tenth step: if the step is no shorter, the GPU has other work.",
        )

    monkeypatch.setattr(diagnosis, "RULES", (*diagnosis.RULES, find))
    monkeypatch.setitem(finding_texts.TEXTS, FrequentOptimizerFigures, say)
    monkeypatch.setattr(diagnosis, "SMALLEST_SAVING_SHARE", 0.0)
    path = real_capture("train_small256")
    (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
    (found,) = (one for one in capture["findings"] if one["id"] == "frequent_optimizer")
    assert 0 <= found["saves_ms_low"] <= found["saves_ms_high"]
    said = run_main("explain", path).out
    assert "The optimizer runs in every step" in said
    assert "    if step % 4 == 0: optimizer.step()\n" in said


def test_an_input_format_is_a_module_and_an_entry(
    tmp_path: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its captures are found in folders, read by their suffix, and nothing is written under their suffix."""
    (tmp_path / "run").mkdir()
    capture = tmp_path / "run" / "small.lines"
    capture.write_text("100 300 forward\n300 700 backward\n")
    monkeypatch.setattr(sources, "SOURCES", (*sources.SOURCES, new_format.LINES))
    assert run_main("report", tmp_path / "run", "-o", tmp_path / "report.md", "--no-figures").code == 0
    text = (tmp_path / "report.md").read_text()
    assert "forward" in text
    assert "backward" in text
    assert "small" in run_main("explain", capture).out
    with pytest.raises(NsysAnalyzerError, match="has the name of an input"):
        check_target(tmp_path / "other.lines", [capture], force=False)


def test_a_kernel_class_is_an_entry_and_a_rule(tmp_path: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry holds the line of the glossary, the color of figures and pages, and the letter of bars."""
    row = Rule("fourier transform", r"^butterfly_", "butterfly_512")
    entry = class_rules.KernelClass("Sums of sines and cosines.", "#996600", "Q")
    assert classes.find_rule(row.example) is None
    monkeypatch.setitem(class_rules.CLASSES, row.kernel_class, entry)
    monkeypatch.setattr(classes, "RULES", (row, *classes.RULES))
    classes.find_rule.cache_clear()
    classes.classify.cache_clear()
    trace = Export().gpu().range("forward", 0, 100).kernel(row.example, 10, 20, 60).write(tmp_path / "t.sqlite")
    ended = run_main("report", trace, "--no-figures", "-o", tmp_path / "t.md")
    classes.find_rule.cache_clear()
    classes.classify.cache_clear()
    assert ended.code == 0, ended.err
    assert entry.meaning in (tmp_path / "t.md").read_text()
    derived = [importlib.reload(module) for module in (palette, step_bar)]
    assert palette.assign_colors([row.kernel_class]) == {row.kernel_class: entry.color}
    assert (step_bar.part_color(row.kernel_class), step_bar.part_letter(row.kernel_class)) == (entry.color, "Q")
    monkeypatch.undo()
    for module in derived:
        importlib.reload(module)


def test_the_peaks_of_a_gpu_are_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = peaks._peaks("X1", 10, 20, 40, 80, None, 1.5, "a datasheet", 30)
    assert peaks.find_peaks("NVIDIA X1") is None
    monkeypatch.setattr(peaks, "PEAKS", (*peaks.PEAKS, row))
    found = peaks.find_peaks("NVIDIA X1")
    assert found is not None
    assert (found.flops_per_s["fp8"], "fp4" in found.flops_per_s) == (80e12, False)
    assert (found.flops_per_s["bf16"], found.bytes_per_s, found.l2_bytes) == (40e12, 1.5e12, 30 * 2**20)


def test_a_spelling_of_a_phase_is_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert phase_names.PhaseNames().find_role("Vorwaerts") is None
    words = {**phase_names.DEFAULT_NAMES, "forward": (*phase_names.DEFAULT_NAMES["forward"], "vorwaerts")}
    monkeypatch.setattr(phase_names, "DEFAULT_NAMES", words)
    assert phase_names.PhaseNames().find_role("Vorwaerts") == "forward"


def test_a_column_of_a_table_is_a_field() -> None:
    """A column without any value is left out, and so is a row without any."""
    names: Field[tuple[str, float | None]] = Field("kernel", "text", lambda row: row[0])
    times: Field[tuple[str, float | None]] = Field("ms", "ms", lambda row: row[1])
    doubled: Field[tuple[str, float | None]] = Field("twice ms", "ms", lambda row: row[1] and 2 * row[1])
    unknown: Field[tuple[str, float | None]] = Field("rate", "count", lambda _: None)
    table = make_table((names, times, doubled, unknown), [("gemm", 1.5), ("unknown", None)])
    assert [column.title for column in table.columns] == ["kernel", "ms", "twice ms"]
    assert table.rows == (("gemm", 1.5, 3.0),)


def test_a_spelling_of_the_steps_of_an_engine_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of the pattern are the sequences in prefill (c) and in decode (g)."""
    name = "round 3: 2 prompts, 5 tokens"
    phase_names.parse_served_step.cache_clear()
    assert phase_names.parse_served_step(name) is None
    row = re.compile(r"round \d+: (?P<c>\d+) prompts, (?P<g>\d+) tokens")
    monkeypatch.setattr(phase_names, "ENGINE_STEPS", (*phase_names.ENGINE_STEPS, row))
    phase_names.parse_served_step.cache_clear()
    step = phase_names.parse_served_step(name)
    phase_names.parse_served_step.cache_clear()
    assert step is not None
    assert (step.kind, step.batch) == ("mixed", 2 + 5)


def test_an_option_that_distinguishes_configurations_is_a_key(
    step_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (capture,) = summarize(step_trace)
    sides = [comparison.Side((replace(capture, run=Run(seed=seed)),)) for seed in (1, 2)]
    assert comparison.compare_settings(*sides) == ()
    monkeypatch.setattr(comparison, "_OPTION_KEYS", (*comparison._OPTION_KEYS, "seed"))
    (difference,) = comparison.compare_settings(*sides)
    assert (difference.key, difference.before, difference.after) == ("seed", "1", "2")
