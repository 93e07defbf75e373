"""The bench of attention: its cases, its section from hand-made rows, and one real run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from nsys_analyzer.experiments.attention import BENCH, TARGET, AttentionCase
from nsys_analyzer.experiments.model import AnyRow as Row
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.results import all_cases
from nsys_analyzer.report.model import Lines, Report, Section, Spread, Table, unfolded
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.runs.rows import NAME, read_file, typed
from profiling_targets.attention import saved_tensors
from profiling_targets.attention_variants import Passes, later_keys
from profiling_targets.harness import allocations
from profiling_targets.transformer import unfused_attention
from tests.support.rows import default_settings, unpadded

COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
CASE = {"device": "cuda", "batch_size": 8, "precision": "fp32", "warmup_steps": 5, "steps": 100}


def row(length: int, compiled: bool, forward_ms: float, **figures: Any) -> Row:
    scores = 3 * 8 * length**2 * 4
    known = {
        "forward_ms": forward_ms,
        "backward_ms": 2 * forward_ms,
        "before_backward_bytes": scores + 8 * length * 64 * 4,
        "peak_bytes": 2 * scores,
        "inputs_bytes": 1000,
        "first_step_ms": 3 * forward_ms + 7,
        "compiled_graphs": 1,
    }
    case = {**CASE, "d": 64, "context_length": length, "compile": compiled}
    return Row("profiling_targets.attention", case, "ok", "", {**known, **figures}, {"gpu": "NVIDIA H200"})


def section(*rows: Row) -> Section:
    """The section of rows as the file holds them."""
    return BENCH.section(Results(tuple(typed(row, TARGET) for row in rows)))


def text(*rows: Row) -> str:
    return render(Report("x", (section(*rows),)), {})


def plain(*rows: Row) -> str:
    return unpadded(text(*rows))


def test_cases() -> None:
    cases = all_cases(BENCH, default_settings(BENCH, "cuda"))
    assert len(cases) == 1 + 2 * 4 * 5  # the ceilings; eager and compiled, four widths, five lengths
    assert cases[1].case == AttentionCase(**CASE, d=16, context_length=256, compile=False)
    assert [case.environment for case in (cases[1], cases[-1])] == [{}, COLD]  # eager first, compiled last
    assert not any(case.environment for case in all_cases(BENCH, default_settings(BENCH, "cpu")))


def test_section() -> None:
    said = text(row(1024, False, 10), row(4096, False, 160), row(1024, True, 5), row(4096, True, 40))
    # 3·S² + 64·S of 4,096 and 1,024 tokens: (3·4096 + 64) ÷ (3·1024 + 64) = 3.938, times 4 → log₄(15.75) = 1.989
    assert "to the power 1.99" in said
    # 10 ÷ 5 and 160 ÷ 40, forward as backward
    assert "2.000× to 4.000× as fast" in said
    assert "No shape ran out of memory" in said
    blocks = list(unfolded(section(row(1024, True, 5)).blocks))
    times, memory = [block for block in blocks if isinstance(block, Table)][:2]
    # Without an eager row there is no speed-up; compiling took 3 · 5 + 7 ms without the 5 + 10 of a later step.
    assert [column.title for column in times.columns[3:]] == ["forward ms", "backward ms", "compile ms", "status"]
    assert times.rows == ((64, 1024, "compiled", Spread(5, None), Spread(10, None), 7, "ok"),)
    saved = 3 * 8 * 1024**2 * 4
    assert memory.rows == ((64, 1024, "compiled", 1000, saved + 8 * 1024 * 64 * 4, 2 * saved),)


def test_unsteady_passes_are_flagged_and_make_no_headline() -> None:
    rows = row(1024, False, 10), row(4096, False, 160), row(1024, True, 50, forward_cv=0.3), row(4096, True, 40)
    said = plain(*rows)
    # 10 ÷ 50 = 0.2 of forward is left out; of the steady ones 20 ÷ 100 and 160 ÷ 40 are the ends
    assert "0.200× to 4.000× as fast" in said
    assert "**Unsteady passes**, CV above 10.0 %: d 64, context 1,024, compiled, forward: 30.0 %." in said
    assert "Unsteady" not in plain(rows[0], rows[1])
    none = plain(*(row(1024, on, 10 - on, forward_cv=0.2, backward_cv=0.2) for on in (False, True)))
    assert "as fast" not in none


def test_times_show_their_spread() -> None:
    said = plain(row(1024, False, 0.492, forward_std_ms=0.145), row(1024, True, 0.246))
    times = next(line for line in said.splitlines() if "±" in line and line.startswith("|"))
    assert [cell.strip() for cell in times.split("|")[3:6]] == ["eager", "0.492 ± 0.145", "–"]
    assert "| compiled | 0.246 | 2.000× |" in said


def test_rows_of_either_environment_are_paired() -> None:
    eager, kept = row(1024, False, 10), row(1024, True, 5)
    anew = replace(row(1024, True, 4), environment=COLD)
    assert "2.000×" in plain(eager, kept)
    assert "from PyTorch's cache" in plain(eager, kept)
    assert "2.500×" in plain(eager, kept, anew)  # the later one, 10 ÷ 4
    assert "without a cache" in plain(eager, anew)


def test_what_is_saved_for_backward_is_named_so() -> None:
    assert "| saved for backward at d 64, context 1,024 |" in plain(row(1024, False, 10))


def test_nothing_compiled_is_flagged() -> None:
    assert "Nothing was compiled" in text(row(1024, False, 10), row(1024, True, 9, compiled_graphs=0))


def test_out_of_memory_keeps_its_row() -> None:
    lost = Row(
        "profiling_targets.attention",
        {**CASE, "d": 64, "context_length": 16384, "compile": False},
        "oom",
        "CUDA out of memory",
    )
    said = text(row(1024, False, 10), lost)
    assert "Out of memory: d 64, context 16,384." in said
    assert any("16,384" in line and "oom" in line for line in said.splitlines() if line.startswith("|"))
    assert "| CUDA out of memory |" in said


def test_what_failed_says_why() -> None:
    said = plain(row(1024, False, 10), replace(row(1024, True, 1), status="failed", message="no compiler", figures={}))
    assert "Failed: d 64, context 1,024, compiled." in said
    assert "| d 64, context 1,024, compiled | failed | no compiler |" in said
    assert "No shape ran out of memory" not in said


@pytest.mark.slow
def test_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--d", "8", "--context-length", "32,64", "--steps", "2", "--warmup-steps", "0", "--device", "cpu"]
    done = CliRunner().invoke(cli, ["bench", "attention", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "bench" / "attention"
    header, rows = read_file(folder / NAME)
    assert header["bench"] == "attention"
    assert [one.status for one in rows] == ["ok"] * 5  # the ceilings, two lengths eager and compiled
    eager = next(one for one in rows if one.case.get("context_length") == 64)
    # Between the passes: three score matrices, two columns of row maxima and sums, the output; 8 bytes of bookkeeping.
    expected = 4 * (3 * 8 * 64**2 + 2 * 8 * 64 + 8 * 64 * 8)
    assert eager.figures["before_backward_bytes"] == pytest.approx(expected, abs=64)
    assert (folder / "attention.csv").read_text().count("\n") == 1 + 4
    assert (folder / "attention_figures" / "attention-forward.png").stat().st_size > 1000
    again = CliRunner().invoke(cli, ["bench", "attention", *options, "--resume"], catch_exceptions=False)
    assert again.exit_code == 0
    assert "5 of 5 configurations are finished already" in again.output


def test_figures_name_their_axes() -> None:
    blocks = section(row(1024, False, 10), row(4096, False, 160)).blocks
    figures = [block for block in blocks if isinstance(block, Lines)]
    assert [figure.y_axis for figure in figures] == ["ms", "ms", "MiB saved for backward"]
    assert figures[0].series == (("eager", ((1024, 10), (4096, 160))),)


def test_what_is_saved_is_freed_again() -> None:
    masked = later_keys(16, 16, "cpu")
    passes = Passes.random(lambda q, k, v: unfused_attention(q, k, v, masked), (2, 16, 4), "cpu")
    with allocations("cpu") as counted:
        saved = saved_tensors(passes.forward)
    # the scores, their exponentials and the weights, (B, S, S) each
    assert ([2, 16, 16], "float32", 3, 3 * 2 * 16**2 * 4) in saved
    assert counted.total_bytes > 3 * 2 * 16**2 * 4
    assert counted.alive_bytes == 0
