"""The report of a sweep: matrices, what all captures share said once, and what a reader of many captures needs."""

import re
from pathlib import Path

import pytest

from nsys_analyzer.experiments.loading import load_evidence
from nsys_analyzer.report.model import Bars, Panels, Report
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from tests.support.export import GEMM, Export
from tests.test_report_command import section, two_steps
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
    times = ",,,," if mean is None else f"{mean},0.1,{mean - 1},{mean},{mean + 1}"
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
    return build_report(load_evidence([folder], [csv] if csv.is_file() else [], command))


def test_the_step_by_model_and_context(sweep: Path) -> None:
    rows = rows_of(section(text_of(sweep), "Summary"))
    assert rows[:4] == [
        ["model", "context 128", "context 256", "context 512"],
        ["small", "10.00", "20.00", "41.00"],
        ["medium", "30.00", "61.00", "–"],
        ["2.7B", "–", "oom", "–"],
    ]
    # bf16 was run at one context alone: it stands beside fp32 there
    assert rows[4] == ["model", "context", "fp32", "bf16"]
    assert rows[5:7] == [["small", "256", "20.00", "8.000"], ["medium", "256", "61.00", "24.00"]]
    # 20 ÷ 8 and 61 ÷ 24
    assert rows[7:10] == [
        ["model", "context", "bf16 over fp32"],
        ["small", "256", "2.500×"],
        ["medium", "256", "2.542×"],
    ]


def test_the_step_is_drawn_by_model_over_context(sweep: Path) -> None:
    figures = [figure for figure in report_of(sweep).figures if figure.key.startswith("unprofiled")]
    (drawn,) = figures
    assert isinstance(drawn, Panels)
    assert drawn.panels == (  # nothing is known of 2.7B
        ("small", (("fp32", ((128, 10.0), (256, 20.0), (512, 41.0))), ("bf16", ((256, 8.0),)))),
        ("medium", (("fp32", ((128, 30.0), (256, 61.0))), ("bf16", ((256, 24.0),)))),
    )


def test_no_matrix_of_one_model(sweep: Path) -> None:
    rows = [row_of("a", "small", context, "fp32", 9.0) for context in (128, 256)]
    (sweep / "timings.csv").write_text(HEADER + "".join(rows), encoding="utf-8")
    assert "Unprofiled ms of one step" not in text_of(sweep)


def test_how_a_run_ended_is_a_column_where_one_ended_badly(sweep: Path) -> None:
    rows = rows_of(section(text_of(sweep), "Summary"))
    rows = rows[rows.index(next(row for row in rows if row[0] == "capture")) :]
    assert rows[0][:2] == ["capture", "status"]
    assert rows[-1][:3] == ["2.7B_ctx256_fp32", "oom", "–"]


def test_conditions_that_all_share_are_said_once(sweep: Path) -> None:
    conditions = section(text_of(sweep), "Capture conditions")
    shared = re.search(r"The same in every row: (.*)\.\n", conditions)
    assert shared is not None
    assert "GPU NVIDIA H200" in shared.group(1)
    asked = conditions[conditions.index("What was asked for") :]
    assert re.search(r"The same in every row: .*seed 0", asked)
    head, *rows = rows_of(asked)
    assert head == ["capture", "precision"]
    assert rows[1] == ["small_ctx256_bf16", "bf16"]
    assert rows[-1] == ["2.7B_ctx256_fp32", "fp32"]  # it left no trace


def test_a_table_that_says_the_same_in_every_row_has_no_rows(tmp_path: Path) -> None:
    for i in range(7):
        run_of(tmp_path, f"run{i}", two_steps())
    conditions = section(text_of(tmp_path), "Capture conditions")
    assert rows_of(conditions) == []
    assert "The same in every row: precision fp32" in conditions


def test_every_run_is_a_command_once(sweep: Path) -> None:
    text = section(text_of(sweep), "How to generate")
    fp32, bf16 = ("nsys-analyze run --precision fp32", "nsys-analyze run --precision bf16")
    assert text.count(fp32) == text.count(bf16) == 1
    assert text.index(fp32) < text.index(bf16) < text.index("# this report\nnsys-analyze report --csv timings.csv")
    whole = section(text_of(sweep, bf16), "How to generate")
    assert whole.count(bf16) == 1
    assert "# this report" not in whole


def test_the_profiler_s_command_is_the_example(tmp_path: Path) -> None:
    run_of(tmp_path, "a", two_steps(), command="python target.py", profile_command="nsys profile python target.py")
    text = section(text_of(tmp_path, "nsys-analyze run --model small"), "How to generate")
    assert "# the capture a\nnsys profile python target.py\n" in text


def test_matmul_of_a_capture_of_the_forward_pass_alone(tmp_path: Path) -> None:
    """Of 3 ms, 2 are a product: 66.7 %."""
    for i in range(7):
        forward = Export().gpu().range("forward", 0, 9 * MS)
        forward.kernel(GEMM, 10, MS, 3 * MS).kernel("softmax_warp_forward", 20, 4 * MS, 5 * MS)
        run_of(tmp_path, f"run{i}", forward, mode="forward")
    head, first, *_ = rows_of(section(text_of(tmp_path), "Summary"))
    assert first[head.index("matmul")] == "66.7 %"


def test_inference_is_compared_with_a_step_that_was_built_alike(tmp_path: Path) -> None:
    """The compiled step is no measure of what training adds to the forward pass that was not compiled."""
    run_of(tmp_path, "inference", two_steps(), mode="forward", compile=False)
    run_of(tmp_path, "eager", two_steps(), compile=False)
    run_of(tmp_path, "compiled", two_steps(), compile=True)
    answers = section(text_of(tmp_path), "(d)").splitlines()
    eager, compiled = (next(a for a in answers if a.startswith(f"**{name}:**")) for name in ("eager", "compiled"))
    assert "inference (inference)" in eager
    assert "inference (inference)" not in compiled


def test_the_full_name_of_each_kernel_once_and_not_padded(sweep: Path) -> None:
    names = section(text_of(sweep), "Full kernel names")
    assert names.count("vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>") == 1
    assert "  " not in names


def test_every_question_is_drawn_over_the_sweep(sweep: Path) -> None:
    """All captures are alike, and 54.5 % of their step is matmul; 5.5 ms busy of 10 and of 8 ms, others are doubted."""
    figures = {figure.key: figure for figure in report_of(sweep).figures}
    assert set(figures) >= {"unprofiled-times", "gpu-busy", "top-launches", "other-class", "matmul-step"}
    assert not any("small" in key for key in figures)  # none of a single capture
    step, busy = figures["matmul-step"], figures["gpu-busy"]
    assert isinstance(step, Panels)
    assert isinstance(busy, Bars)
    drawn = {(x, round(y, 1)) for _, curves in step.panels for _, points in curves for x, y in points if y}
    assert drawn == {(128, 54.5), (256, 54.5), (512, 54.5)}
    assert busy.groups == ("small_ctx128_fp32", "small_ctx256_bf16")
    assert busy.series == (("%", (pytest.approx(55.0), pytest.approx(68.75))),)


def test_what_tracing_costs_where_the_gpu_waits(tmp_path: Path) -> None:
    """A forward of 4 ms of wall and 1.5 ms of work, 3.2 ms without the profiler: +25 %, and 1.5 ÷ 3.2 = 46.9 % busy.

    Backward was not timed: 3 of 6 ms under the profiler, which can have added 2 · 5.2 us, so that 50.1 % is the most.
    """
    run_of(tmp_path, "a", two_steps())
    row = "a,small,256,4,fp32,train,forward,5,10,3.2,0.1,3,3.2,4,,ok,\n"
    (tmp_path / "timings.csv").write_text(HEADER + row, encoding="utf-8")
    text = section(text_of(tmp_path), "(a)")
    assert "forward +25.0 %; tracing adds a cost to every API call and range; a GPU with queued work hides it" in text
    assert "idle for 30 % or more of the unprofiled time: forward (46.9 % busy of 3.200 ms, 1.700 ms idle)." in text
    said = "idle for 30 % or more of the time, under the profiler and also without its estimated cost: backward "
    assert f"{said}(50.0 % to 50.1 % busy, at most 3.000 ms idle)" in text


def test_times_that_spread_by_more_than_they_differ(tmp_path: Path) -> None:
    run_of(tmp_path, "a", two_steps())
    row = "a,small,256,4,fp32,train,forward,5,10,3.2,0.9,3,3.2,4,,ok,\n"  # 4 − 3.2 = 0.8 ms apart
    (tmp_path / "timings.csv").write_text(HEADER + row, encoding="utf-8")
    assert "no cost of tracing can be told" in section(text_of(tmp_path), "(a)")
