"""The report of a sweep: matrices, what all captures share said once, and what a reader of many captures needs."""

import re
from pathlib import Path

import pytest

from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.model import Lines, Report
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from tests.support.commands import section
from tests.support.export import GEMM, Export
from tests.test_report_command import two_steps
from tests.test_run_folders import HEADER, rows_of, run_of

MS = 1_000_000
#: Model, context, precision and the unprofiled time of a step; None is out of memory.
SWEEP = [
    ("small", 128, "fp32", 10.0),
    ("small", 256, "fp32", 20.0),
    ("small", 256, "bf16", 8.0),
    ("small", 512, "fp32", 41.0),
    ("medium", 128, "fp32", 30.0),
    ("medium", 256, "fp32", 61.0),
    ("medium", 256, "bf16", 24.0),
    ("2.7B", 256, "fp32", None),
]


def row_of(name: str, model: str, context: int, precision: str, mean: float | None) -> str:
    """A row of the table. The deviation is so large that each time may be that of a capture with steps of 12 ms."""
    times = ",,,," if mean is None else f"{mean},{mean},{mean - 1},{mean},{mean + 1}"
    status = "oom" if mean is None else "ok"
    return f"{name},{model},{context},4,{precision},train,step,5,10,{times},,{status},\n"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    rows = []
    for model, context, precision, mean in SWEEP:
        name = f"{model}_ctx{context}_{precision}"
        status = "ok" if mean else "oom"
        said = {"model": model, "context_length": context, "precision": precision, "status": status, "seed": 0}
        run_of(tmp_path, name, two_steps() if mean else None, **said, run=f"nsys-analyze run --precision {precision}")
        rows.append(row_of(name, model, context, precision, mean))
    (tmp_path / "timings.csv").write_text(HEADER + "".join(rows), encoding="utf-8")
    return tmp_path


def text_of(folder: Path, command: str = "nsys-analyze report --csv timings.csv") -> str:
    return render(report_of(folder, command), {}).replace("\N{NO-BREAK SPACE}", " ")


def report_of(folder: Path, command: str = "nsys-analyze report --csv timings.csv") -> Report:
    csv = folder / "timings.csv"
    return build_report(make_evidence(gather([folder], [csv] if csv.is_file() else []), command))


def before_titles(text: str) -> str:
    """What stands in full view before the first title."""
    return re.sub(r"<details>.*?</details>", "", text.partition("\n## ")[0], flags=re.S)


def test_the_grid_comes_first(sweep: Path) -> None:
    """Every question by model and context; the step as it was timed."""
    text = before_titles(text_of(sweep))
    rows = rows_of(text)
    assert rows[:6] == [
        ["model", "variant", "128", "256", "512"],
        ["small", "fp32", "10.00", "20.00", "41.00"],
        ["small", "bf16", "–", "8.000", "–"],
        ["medium", "fp32", "30.00", "61.00", "–"],
        ["medium", "bf16", "–", "24.00", "–"],
        ["2.7B", "fp32", "–", "out of memory", "–"],
    ]
    captions = re.findall(r"^([A-Z].*):$", text_of(sweep), re.M)
    assert captions[0] == "Step ms, by context length"
    assert set(captions) >= {
        "Forward ms, by context length",
        "Backward ms, by context length",
        "Matmul's share of kernel time, by context length",
        "Top kernel, by context length",
        "What to do first, by context length",
    }
    # 20 ÷ 8 and 61 ÷ 24
    rows = rows_of(text_of(sweep))
    assert ["small", "bf16 over fp32", "2.500×"] in rows
    assert ["medium", "bf16 over fp32", "2.542×"] in rows


def test_a_time_that_contradicts_its_capture_is_not_the_step(sweep: Path) -> None:
    """41 ± 0.1 ms without the profiler cannot be a step that takes 12 ms under it, so its length is estimated."""
    table = sweep / "timings.csv"
    table.write_text(table.read_text().replace(",41.0,41.0,", ",41.0,0.1,"), encoding="utf-8")
    (row,) = (row for row in rows_of(before_titles(text_of(sweep))) if row[:2] == ["small", "fp32"])
    assert row[2:4] == ["10.00", "20.00"]
    assert float(row[4]) < 12


def test_the_step_is_drawn_by_model_over_context(sweep: Path) -> None:
    figures = [figure for figure in report_of(sweep).figures if figure.key == "step"]
    (drawn,) = figures
    assert isinstance(drawn, Lines)
    assert drawn.series == (  # nothing is known of 2.7B, and bf16 was run at one context alone
        ("small fp32", ((128, 10.0), (256, 20.0), (512, 41.0))),
        ("medium fp32", ((128, 30.0), (256, 61.0))),
    )


def test_no_grid_of_captures_in_one_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_of(tmp_path, name, two_steps())
    text = before_titles(text_of(tmp_path))
    assert rows_of(text)[0][:2] == ["capture", "Step ms"]
    assert "context 256" not in text


def test_what_did_not_fit_in_memory_is_said_first(sweep: Path) -> None:
    text = text_of(sweep)
    assert "**1 of 8 captures did not finish: 2.7B_ctx256_fp32 (out of memory).**" in text
    rows = rows_of(section(text, "More of the sweep, and each capture in a row"))
    assert rows[-8][:2] == ["small_ctx128_fp32", "10.00"]
    assert rows[-1][:2] == ["2.7B_ctx256_fp32", "out of memory"]


def test_conditions_of_every_run(sweep: Path) -> None:
    """What was asked for is known of a run that left no trace, too."""
    conditions = section(text_of(sweep), "Conditions")
    asked = rows_of(conditions[conditions.index("The options of each run") :])
    assert asked[0] == ["capture", "precision", "seed"]
    assert asked[2] == ["small_ctx256_bf16", "bf16", "0"]
    assert asked[8] == ["2.7B_ctx256_fp32", "fp32", "0"]


def test_a_shared_finding_stands_once_with_its_captures(sweep: Path) -> None:
    """Seven captures have a pause of 3 ms a step, in backward."""
    findings = section(text_of(sweep), "Findings")
    assert findings.count("**The CPU stops launching work: a fix saves ") == 1
    shown = rows_of(section(findings, "The captures"))
    assert {row[0] for row in shown[1:]} == {f"{model}_ctx{context}_{kind}" for model, context, kind, ms in SWEEP if ms}


def test_every_run_is_a_command_once(sweep: Path) -> None:
    text = section(text_of(sweep), "How this report was made")
    fp32, bf16 = ("nsys-analyze run --precision fp32", "nsys-analyze run --precision bf16")
    assert text.count(fp32) == text.count(bf16) == 1
    assert text.index(fp32) < text.index(bf16) < text.index("# this report\nnsys-analyze report --csv timings.csv")
    whole = section(text_of(sweep, bf16), "How this report was made")
    assert whole.count(bf16) == 1
    assert "# this report" not in whole


def test_the_profiler_s_command_is_the_example(tmp_path: Path) -> None:
    run_of(tmp_path, "a", two_steps(), command="python target.py", profile_command="nsys profile python target.py")
    text = section(text_of(tmp_path, "nsys-analyze run --model small"), "How this report was made")
    assert "# the capture a\nnsys profile python target.py\n" in text


def test_matmul_of_a_capture_of_the_forward_pass_alone(tmp_path: Path) -> None:
    """Of 3 ms, 2 are a product: 66.7 %."""
    for i in range(7):
        forward = Export().gpu().range("forward", 0, 9 * MS)
        forward.kernel(GEMM, 10, MS, 3 * MS).kernel("softmax_warp_forward", 20, 4 * MS, 5 * MS)
        run_of(tmp_path, f"run{i}", forward, mode="forward")
    rows = rows_of(before_titles(text_of(tmp_path)))
    assert rows[1][rows[0].index("Matmul's share of kernel time")] == "66.7 %"


def test_inference_is_compared_with_a_step_that_was_built_alike(tmp_path: Path) -> None:
    """The compiled step is no measure of what training adds to the forward pass that was not compiled."""
    run_of(tmp_path, "inference", two_steps(), mode="forward", compile=False)
    run_of(tmp_path, "eager", two_steps(), compile=False)
    run_of(tmp_path, "compiled", two_steps(), compile=True)
    text = text_of(tmp_path)
    assert "in inference (of inference)" in section(text, "<summary>eager")
    assert "in inference (of " not in section(text, "<summary>compiled")


def test_the_full_name_of_each_kernel_once_and_not_padded(sweep: Path) -> None:
    names = section(text_of(sweep), "Full kernel names")
    assert names.count("vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>") == 1
    assert "  " not in names


def test_every_measure_is_drawn_over_the_sweep(sweep: Path) -> None:
    """All captures are alike, and 54.5 % of their step is matmul."""
    figures = {figure.key: figure for figure in report_of(sweep).figures}
    assert set(figures) >= {"step", "forward", "matmul", "gpu-busy"}
    step = figures["matmul"]
    assert isinstance(step, Lines)
    drawn = {(x, round(y, 1)) for _, points in step.series for x, y in points if y}
    assert drawn == {(128, 54.5), (256, 54.5), (512, 54.5)}
