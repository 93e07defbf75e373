"""``ask``, ``check`` and ``explain --budget``: answers with what they rest on, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer.report.named_figures import FIGURES
from tests.conftest import DATA, ROOT, Main
from tests.support.export import ADD, GEMM, Export

RealCapture = Callable[[str], Path]
MS = 1_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps of 10 ms: forward of 6 ms with 2 ms of GEMM, then 1 ms of ADD by the optimizer."""
    export = Export().gpu()
    for at in (0, 10 * MS):
        export.range("step", at, at + 9 * MS).range("forward", at, at + 6 * MS)
        export.range("optimizer", at + 6 * MS, at + 9 * MS)
        export.kernel(GEMM, at + MS, at + 2 * MS, at + 4 * MS).kernel(ADD, at + 7 * MS, at + 8 * MS, at + 9 * MS)
    return export.write(tmp_path / "t.sqlite")


# --- ask


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("gpu_busy_ms phase=forward", 2),
        ("wall_ms phase=forward", 6),
        ("class_share class=matmul", 0.666667),  # 2 of 3 ms
        ("class_ms class=softmax phase=forward", 0),
        ("kernels", 4),  # of the whole capture
        ("kernel_ms kernel=gemm phase=step", 2),
        ("instances phase=forward", 2),
        ("copies phase=forward", 0),
    ],
)
def test_a_figure(question: str, value: float, trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, question, "--format", "json")
    document = json.loads(outcome.out)
    (answer,) = document["answers"]
    assert (outcome.code, answer["figure"], answer["value"]) == (0, question, value)


def test_in_words(trace: Path, run_main: Main) -> None:
    said = run_main("ask", trace, "gpu_busy_ms phase=forward").out
    rests_on = "(2 rows of CUPTI_ACTIVITY_KIND_KERNEL in t.sqlite)"
    assert said == f"gpu_busy_ms phase=forward: 2 ms, median of 2 instances of forward {rests_on}\n"


def test_what_cannot_be_told_has_an_exit_code(trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, "gpu_busy_ms phase=forward", "peak_memory_bytes", "--format", "json")
    assert outcome.code == 4
    answer = json.loads(outcome.out)["answers"][1]
    needs = "nsys-analyze run --memory -- python train.py"
    assert answer["cannot_answer"] == {"why": "Memory was not recorded", "needs": needs}
    outcome = run_main("ask", trace, "wall_ms phase=backward")
    assert outcome.code == 4
    assert "cannot be told. It has no such measured phase" in outcome.out
    assert "Its phases: forward, optimizer, step" in outcome.out


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("gpu_bus phase=forward", "Did you mean gpu_busy_ms?"),
        ("gpu_busy_ms phases=forward", "Ask for gpu_busy_ms [phase=…]"),
        ("kernel_ms kernel='gemm", "Close the quotation marks"),
        ("class_ms", "class_ms class=… [phase=…]"),
        ("class_ms class=gemm", "There are: matmul, "),
        ("kernel_ms kernel=e", "2 kernels here are called 'e'"),
    ],
)
def test_what_is_no_question(question: str, said: str, trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, question)
    assert (outcome.code, outcome.out) == (1, "")
    assert said in outcome.err


def test_each_figure_is_listed(run_main: Main) -> None:
    lines = run_main("ask", "--list").out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(FIGURES)


# --- check

#: A text on the capture above, each claim beside what becomes of it.
CLAIMS = (
    ("Forward takes 6.0 ms under the profiler", True),
    ("forward keeps the GPU busy for 2 ms", True),
    ("the GPU is busy 2 ms in forward", True),
    ("the GPU is busy 3 ms in forward", False),
    ("the GPU is busy 0.002 s in forward", True),
    ("about 2.05 ms of GPU busy in forward", True),  # within 5 %
    ("the GPU is busy more than 1 ms in forward", True),
    ("the GPU is busy under 1.5 ms in forward", False),
    ("matmul is 66.7 % of kernel time", True),
    ("matmul is 66.7% of a step", None),  # of its kernel time; of the step 20 %
    ("matmul is 60% of a step", False),
    ("matmul takes 2 ms/step", True),
    ("forward launches 1 kernels", True),
    ("forward launches 5 kernels", False),
    ("the capture has 3 steps", False),
    ("gpu_busy_ms phase=step = 3 ms", True),
    ("gpu_busy_ms phase=step = 4 ms", False),
    ("forward takes more than 5.9 ms under the profiler", True),
    ("forward takes more than 6.4 ms under the profiler", False),
    ("it takes 6 ms", None),
    ("7 kernels a step", None),  # of something that was said before, perhaps
    ("a step launches 7 kernels", False),
    ("forward takes 4 ms", None),  # without the profiler, perhaps
    ("forward takes 6 ms in each layer", None),  # a word that is no figure's
    ("forward would take 6 ms", None),
    ("peak memory is 3 GB", None),
    ("backward is busy 3 ms", None),
    ("forward takes 2 ms on the GPU", True),  # busy, and from first to last
    ("forward takes 6 ms on the GPU", False),  # 6 ms are the CPU's
    ("matmul is 66.7 % of the training step's kernel time", True),
)
#: Claims of one sentence: what the second leaves out is the first one's, or said at the start. No condition is known.
PAIRS = (
    ("In forward, the GPU is busy 2 ms", (True,)),
    ("In forward, the GPU is busy 3 ms", (False,)),
    ("Under the profiler, forward takes 6 ms", (True,)),
    ("Forward (profiled): 6.0 ms", (True,)),
    ("With bf16, the GPU is busy 2 ms in forward and 1 ms in the optimizer", (None, None)),
    ("Compared to eager, the GPU is busy 2 ms in forward", (None,)),
    ("The GPU is busy 2 ms in forward, which is wrong", (None,)),
    ("On an A100: the GPU is busy 2 ms in forward", (None,)),
    ("The GPU is busy 2 ms in forward, if the optimizer is fused", (None,)),
    ("The GPU is busy 2 ms in forward and optimizer", (None,)),  # in both together, or in each
    ("Forward and optimizer keep the GPU busy 2 ms", (None,)),
    ("The GPU is busy 2 ms in forward, and forward and optimizer keep it busy 1 ms", (True, None)),
    ("Each kernel of forward keeps the GPU busy 2 ms", (None,)),
    ("Without forward the GPU is busy 2 ms", (None,)),
    ("gpu_busy_ms phase=forward is not 2 ms", (None,)),
    ("If fused, gpu_busy_ms phase=forward would be 2 ms", (None,)),
    ("Matmul kernels take 2 ms per step", (True,)),  # kernels is a word here, no name of a figure
    ("A step launches 1 300 kernels", (False,)),
    ("The GPU is busy 2,5 ms in forward", ()),
    # A line goes on.
    ("Whatever is changed about it: in no configuration is the GPU\nbusy 2 ms in forward", (None,)),
    ("The GPU is busy 2 ms in forward and 1 ms in the optimizer", (True, True)),
    ("The GPU is busy 2 ms in forward and 2 ms in the optimizer", (True, False)),
    ("Forward takes 6 ms under the profiler, of which the GPU is busy 2 ms", (True, True)),
    ("Forward takes 6 ms under the profiler, of which the GPU is busy 3 ms", (True, False)),
    ("The GPU is busy 2 ms in forward. And 1 ms in the optimizer", (True, None)),  # another sentence
    ("The GPU is busy 2 ms in forward and 100 % in the optimizer", (True, None)),  # another unit
)


def test_each_claim_of_a_text(trace: Path, tmp_path: Path, run_main: Main) -> None:
    text = tmp_path / "claims.txt"
    text.write_text(". \n".join(claim for claim, _ in CLAIMS), encoding="utf-8")
    outcome = run_main("check", trace, text, "--format", "json")
    document = json.loads(outcome.out)
    assert [(one["text"], one["holds"]) for one in document["claims"]] == [
        (" ".join(claim.replace(" = ", " ").split()), holds) for claim, holds in CLAIMS
    ]
    assert outcome.code == 3
    assert all(("cannot_answer" in one) is (one["holds"] is None) for one in document["claims"])


@pytest.mark.parametrize(("text", "holds"), PAIRS)
def test_what_a_second_claim_leaves_out(
    text: str, holds: tuple[bool | None, ...], trace: Path, tmp_path: Path, run_main: Main
) -> None:
    (tmp_path / "claims.txt").write_text(text, encoding="utf-8")
    claims = json.loads(run_main("check", trace, tmp_path / "claims.txt", "--format", "json").out)["claims"]
    assert tuple(one["holds"] for one in claims) == holds


@pytest.mark.parametrize(
    ("text", "code"), [("The GPU is busy 2 ms in forward.", 0), ("Forward would take 1 ms.", 4), ("Nothing.", 0)]
)
def test_exit_codes_of_a_check(text: str, code: int, trace: Path, tmp_path: Path, run_main: Main) -> None:
    (tmp_path / "claims.txt").write_text(text, encoding="utf-8")
    assert run_main("check", trace, tmp_path / "claims.txt").code == code


@pytest.mark.parametrize("name", ["train_small256", "llama_bf16", "graph_small256"])
def test_no_figure_of_a_report_is_called_false(
    name: str, real_capture: RealCapture, tmp_path: Path, run_main: Main
) -> None:
    """Most of its words cannot be told: another word changes what a number is of."""
    report = tmp_path / "report.txt"
    report.write_text(run_main("explain", real_capture(name), "--all", "--format", "markdown").out, encoding="utf-8")
    claims = json.loads(run_main("check", real_capture(name), report, "--format", "json").out)["claims"]
    assert len(claims) > 20
    assert True in [one["holds"] for one in claims]
    assert [one["text"] for one in claims if one["holds"] is False] == []


def test_a_false_claim_in_words(trace: Path, tmp_path: Path, run_main: Main) -> None:
    (tmp_path / "claims.txt").write_text("The GPU is busy 3 ms in forward.", encoding="utf-8")
    first, right = run_main("check", trace, tmp_path / "claims.txt").out.splitlines()
    assert first == "false: The GPU is busy 3 ms in forward"
    assert right.startswith("    gpu_busy_ms phase=forward: 2 ms, ")


# --- explain --budget, and what cannot be told elsewhere


@pytest.mark.parametrize("budget", [200, 1000, 2000, 100_000])
def test_a_budget_holds(budget: int, real_capture: RealCapture, run_main: Main) -> None:
    out = run_main("explain", real_capture("train_small256"), "--format", "json", "--budget", budget).out
    document = json.loads(out)
    assert len(out.encode()) <= budget
    figures = [one["figure"] for one in document["answers"]]
    order = ["step_estimated_ms", "step_profiled_ms", "saves_ms finding=launch_bound"]
    assert figures[:3] == order[: len(figures)]
    assert (document["left_out"] == 0) is (budget == 100_000)
    if budget == 100_000:
        missing = {one["cannot_answer"]["needs"] for one in document["answers"] if "cannot_answer" in one}
        assert "nsys-analyze run --modules -- python train.py" in missing


def test_a_budget_is_of_json(trace: Path, run_main: Main) -> None:
    assert "--budget is of --format json" in run_main("explain", trace, "--budget", 500).err


def test_captures_of_one_file_name_are_told_apart(trace: Path, tmp_path: Path, run_main: Main) -> None:
    for name in ("before", "after"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "capture.sqlite").write_bytes(trace.read_bytes())
    out = run_main("explain", tmp_path / "runs", "--format", "json", "--budget", 1000).out
    sources = {one["evidence"]["capture"] for one in json.loads(out)["answers"]}
    assert sources == {"before/capture.sqlite", "after/capture.sqlite"}


def test_a_report_says_what_its_captures_lack(real_capture: RealCapture, run_main: Main) -> None:
    needs = {}
    for path in (real_capture("graph_small256"), DATA / "cpu_train.pt.trace.json.gz", real_capture("train_small256")):
        (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
        needs[capture["name"]] = capture.get("cannot_answer", {}).get("needs")
    assert needs == {
        "graph_small256": "nsys-analyze run --nsys-option=--cuda-graph-trace=node -- python train.py",
        "cpu_train": "nsys-analyze run -- python train.py, on a machine with a GPU",
        "train_small256": None,
    }


def test_captures_that_match_in_nothing_have_no_comparison(real_capture: RealCapture, run_main: Main) -> None:
    outcome = run_main("compare", real_capture("train_small256"), real_capture("nccl_init"), "--format", "json")
    assert json.loads(outcome.out)["cannot_answer"]["why"].startswith("No run of one side has exactly the")


@pytest.mark.parametrize("words", [("what-if", "--launches", "0"), ("kernels",)])
def test_other_commands_say_it_alike(words: tuple[str, ...], tmp_path: Path, run_main: Main) -> None:
    path = Export().range("forward", 0, 10).write(tmp_path / "ranges.sqlite")
    command, *options = words
    outcome = run_main(command, path, *options, "--format", "json")
    assert outcome.code == 1
    assert set(json.loads(outcome.out)["cannot_answer"]) == {"why", "needs"}


def test_documents_are_those_of_the_schema(real_capture: RealCapture, tmp_path: Path, run_main: Main) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "answers.schema.json").read_text(encoding="utf-8"))
    (tmp_path / "claims.txt").write_text("The GPU is busy 3 ms in forward. A step would take 1 ms.", encoding="utf-8")
    capture = real_capture("graph_small256")
    for words in (
        ("ask", capture, "gpu_busy_ms phase=forward", "top_kernel", "busy_share phase=forward"),
        ("check", capture, tmp_path / "claims.txt"),
        ("explain", capture, "--budget", 100_000),
        ("what-if", DATA / "cpu_train.pt.trace.json.gz", "--launches", 0),
    ):
        jsonschema.validate(json.loads(run_main(*words, "--format", "json").out), schema)
