"""Tests the tables of times without a profiler, and the captures that the times belong to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import TimingsError
from nsys_analyzer.inputs.match_times import match_timings
from nsys_analyzer.inputs.unprofiled_times import Timings, read_sweep_timings, read_timings, write_timings
from nsys_analyzer.report.facts import say, say_all
from tests.support.commands import make_command_test
from tests.support.export import GEMM, Export


def read(folder: Path, text: str, name: str = "timings.csv") -> Timings:
    (folder / name).write_text(text, encoding="utf-8")
    return read_timings(folder / name)


def brief(timings: Timings) -> list[tuple[str, float | None, str]]:
    return [(row.phase, row.times.mean if row.times else None, row.status) for row in timings.rows]


def test_the_times_of_a_sweep_are_those_of_its_file(tmp_path: Path) -> None:
    """Of a run of 3 steps, of one of two ranks with a step each, and of one that ran out of memory."""
    asked = {"model": "small", "context_length": 256, "batch_size": 4, "precision": "fp32", "compile": False}
    every = {**asked, "mode": "forward", "device": "cuda", "warmup_steps": 5, "steps": 3, "gpu": "NVIDIA H200"}
    manifests: dict[str, dict[str, Any]] = {
        "one": {"timings": {"status": "ok", "times_ms": {"forward": [1, 2, 6], "step": [2, 3, 4]}}},
        "ranks": {
            "capture": "capture.sqlite",
            "rank_timings": [{"status": "ok", "times_ms": {"step": [ms]}} for ms in (1.00000049, 2)],
        },
        "xl": {"timings": {"status": "oom", "message": "out of\n memory", "times_ms": {}}},
        "untimed": {"timings": None},
        ".part": {"timings": 7},  # what is hidden is not finished
    }
    for name, values in manifests.items():
        (tmp_path / name).mkdir()
        text = json.dumps({**every, "peak_memory_bytes": 1000, **values})
        (tmp_path / name / "manifest.json").write_text(text, encoding="utf-8")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/manifest.json").write_text('["of another program"]', encoding="utf-8")
    rows = read_sweep_timings(tmp_path).rows
    assert [(row.run.capture, row.run.rank, row.phase, row.status) for row in rows] == [
        ("one", None, "forward", "ok"), ("one", None, "step", "ok"), ("ranks", 0, "step", "ok"),
        ("ranks", 1, "step", "ok"), ("xl", None, "forward", "oom"), ("xl", None, "step", "oom"),
    ]  # fmt: skip
    # 3, and √((2² + 1² + 3²) ÷ 2); a single step has no deviation, and is kept to the nanosecond
    std = pytest.approx(7**0.5, abs=1e-6)
    assert vars(rows[0].times) == {"n": 3, "mean": 3, "std": std, "min": 1, "median": 2, "max": 6}
    assert rows[2].times
    assert (rows[2].times.mean, rows[2].times.std) == (1.0, None)
    assert (rows[0].run.peak_memory_bytes, rows[4].run.peak_memory_bytes) == (1000, None)
    assert (rows[0].configuration.mode, rows[4].run.message) == ("forward", "out of memory")
    read = read_timings(write_timings(tmp_path)).rows
    assert [replace(row, place="") for row in read] == [replace(row, place="") for row in rows]
    assert [row.cells for row in read] == [row.cells for row in rows]


FORMS = (
    "Give a sweep's timings.csv, a table with a row for each phase (columns phase and mean_ms, and capture if there "
    "are several captures), or a table with a column for each phase, such as forward_ms and step_ms"
)


def run_of_first_row(_: object) -> dict[str, Any]:
    """The run and the configuration of the first row of timings.csv; ``known_model`` is a model with its dimensions."""
    row = read_timings(Path("timings.csv")).rows[0]
    known = {key: value for key, value in structs.asdict(row.configuration).items() if value}
    return {**vars(row.run), **known, "model": row.model, "known_model": row.configuration.model}


def error_of(_: object) -> str:
    """How timings.csv is refused: in one line, with a hint."""
    with pytest.raises(TimingsError) as error:
        read_timings(Path("timings.csv"))
    assert error.value.hint
    assert "timings.csv" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


test_tables = make_command_test("unprofiled_times", values={"FORMS": FORMS}, figures={
    "rows": lambda _: brief(read_timings(Path("timings.csv"))), "run": run_of_first_row, "error": error_of,
})  # fmt: skip


def test_spaces_empty_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    table = read(tmp_path, "\ufeffphase, mean_ms\r\n\r\nforward , 20.5\r\n,\r\n")
    assert brief(table) == [("forward", 20.5, "ok")]
    with pytest.raises(TimingsError, match="line 4, column 'mean_ms': 'fast'"):
        read(tmp_path, "phase,mean_ms\nforward,1\n\nstep,fast\n")


def test_no_file_a_folder_and_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"SQLite format 3\xff\xfa")
    for name, problem in (("none.csv", "No such file"), (".", "cannot be read"), ("binary", "not CSV")):
        with pytest.raises(TimingsError, match=problem):
            read_timings(tmp_path / name)


def test_rows_of_two_files_are_one_table(tmp_path: Path) -> None:
    for name, phase in (("a", "forward"), ("b", "backward")):
        (tmp_path / f"{name}.csv").write_text(f"phase,mean_ms\n{phase},10\n", encoding="utf-8")
    timings = read_timings(tmp_path / "a.csv", tmp_path / "b.csv")
    assert (timings.source, [row.phase for row in timings.rows]) == ("a.csv, b.csv", ["forward", "backward"])
    with pytest.raises(TimingsError, match=r"a.csv, line 2: 'forward' of the same run also has a time in a.csv"):
        read_timings(tmp_path / "a.csv", tmp_path / "./b.csv", tmp_path / "a.csv")


# --- which capture ---


def capture(name: str = "any", rank: int | None = None, run: Run | None = None, **known: Any) -> CaptureSummary:
    precisions = known.pop("precisions", {})
    configuration = Configuration(**known) if known else None
    return CaptureSummary(name, None, "", "ok", configuration=configuration, run=run, rank=rank, precisions=precisions)


def timed(folder: Path, text: str, *captures: CaptureSummary, one_run: bool = False) -> list[CaptureSummary]:
    return match_timings(captures, read(folder, text), one_run=one_run or len(captures) == 1)


def means(row: CaptureSummary) -> dict[str, float | None]:
    return {phase: times.mean for phase, times in row.unprofiled.phases.items()} if row.unprofiled else {}


SMALL = find_model("small")
SWEEP = (
    "model,context_length,batch_size,precision,mode,phase,mean_ms\n"
    "small,128,4,fp32,train,forward,10\nsmall,128,4,fp32,train,backward,20\nsmall,128,4,fp32,train,step,35\n"
    "small,256,4,fp32,train,forward,30\nsmall,256,4,bf16,train,forward,40\nsmall,256,4,bf16,forward,forward,45\n"
    "2.7B,256,4,fp32,train,forward,50\n"
)
NAMED = "capture,model,phase,mean_ms\neager,small,forward,10\neager,small,backward,20\nnew,small,forward,5\n"
AT_256 = {"model": SMALL, "context_length": 256}
FLAGS = "model,compile,attention,forward_ms\nsmall,False,naive,9\nsmall,True,sdpa,5\n"


@pytest.mark.parametrize(
    ("text", "one", "expected"),
    [
        (SWEEP, capture(model=SMALL, context_length=128, mode="train"), {"forward": 10, "backward": 20, "step": 35}),
        # a step without an optimizer is another one, its phases are not
        (SWEEP, capture(model=SMALL, context_length=128, mode="forward+backward"), {"forward": 10, "backward": 20}),
        (SWEEP, capture(**AT_256), "mode (train, forward), precision (fp32, bf16)"),
        (SWEEP, capture(**AT_256, precision="fp32"), {"forward": 30}),
        (SWEEP, capture(**AT_256, precision="bf16"), "they differ in mode (train, forward)"),
        (SWEEP, capture(**AT_256, precision="bf16", mode="train"), {"forward": 40}),
        (SWEEP, capture(**AT_256, mode="train", precisions={"unknown": 1}), "precision (fp32, bf16)"),
        (SWEEP, capture(model=find_model("xl-2026")), {"forward": 50}),  # the 2.7B's dimensions
        (SWEEP, capture(model=SMALL, context_length=512), {}),
        (SWEEP, capture(model=SMALL, context_length=128, batch_size=8), {}),
        (NAMED, capture("eager"), {"forward": 10, "backward": 20}),
        (NAMED, capture("new", precision="bf16"), {"forward": 5}),
        (NAMED, capture("renamed"), {}),
        ("capture,phase,mean_ms\nother,step,10\n", capture(), {}),  # of another capture, and nothing says of this one
        (FLAGS, capture(model=SMALL, run=Run(compile=True)), {"forward": 5}),
        (FLAGS, capture(model=SMALL), "attention (naive, sdpa), compile (False, True)"),
        ("rank,phase,mean_ms\n0,step,10\n1,step,12\n", capture(rank=1), {"step": 12}),
        ("model,optimizer,step_ms\nsmall,,10\nsmall,sgd,9\n", capture(model=SMALL), "optimizer (empty, sgd) (give"),
        ("model,step_ms\nllama,10\n", capture(), {"step": 10}),
        ("model,step_ms\nllama,10\n", capture(model=SMALL), {}),
        ("warmup_steps,step_ms\n0,58\n5,20\n", capture(), "warmup_steps (0, 5) (give a file with only the rows"),
    ],
)  # fmt: skip
def test_the_rows_of_a_capture(
    tmp_path: Path, text: str, one: CaptureSummary, expected: dict[str, float] | str
) -> None:
    found = timed(tmp_path, text, one)[0]
    assert means(found) == ({} if isinstance(expected, str) else expected)
    assert [expected in str(line) for line in say_all(found.warnings)] == ([True] if isinstance(expected, str) else [])


SWITCHES = (
    "model,precision,compile,forward_ms\n"
    "small,fp32,False,30\nsmall,fp32,True,20\nsmall,bf16,False,15\nsmall,bf16,True,10\n"
)


@pytest.mark.parametrize(
    ("text", "precision", "kernel", "expected", "said"),
    [
        (SWITCHES, "fp32", GEMM, 30, "fp32, eager"),
        (SWITCHES, "tf32", GEMM, 30, "fp32, eager"),  # of a program that lets fp32 run as TF32
        (SWITCHES, "fp32", "triton_poi_fused_mul_silu_8", 20, "fp32, compiled"),
        (SWITCHES, "bf16", GEMM, 15, "bf16, eager"),
        (SWITCHES, "bf16", "triton_poi_fused_mul_silu_8", 10, "bf16, compiled"),
        (SWEEP.replace(",forward,forward,45", ",train,step,45"), "bf16", GEMM, 40, "bf16"),
    ],
)
def test_kernels_tell_which_row_is_the_captures(
    tmp_path: Path, text: str, precision: str, kernel: str, expected: float, said: str
) -> None:
    one = capture(**AT_256, mode="train", precisions={precision: 0.6, "unknown": 0.4})
    whole = Export().kernel(kernel, 1, 2, 3).write(tmp_path / "kernels.sqlite")
    (summary,) = summarize(Trace.load(whole), "t")
    found = timed(tmp_path, text, replace(one, whole=summary.whole))[0]
    assert means(found)["forward"] == expected
    assert str(say(found.warnings[-1])).endswith(
        f"this row was chosen among the rows that fit, because the capture's kernels are {said}"
    )


@pytest.mark.parametrize(("columns", "row"), [("phase,mean_ms", "step,10"), ("step_ms", "10")])
def test_times_without_a_model_are_of_the_captures_of_the_call(tmp_path: Path, columns: str, row: str) -> None:
    text, two = f"{columns}\n{row}\n", (capture("a"), capture("b", model=SMALL))
    assert [means(one) for one in timed(tmp_path, text, capture(model=SMALL))] == [{"step": 10}]
    assert [means(one) for one in timed(tmp_path, text, *two, one_run=True)] == [{"step": 10}] * 2
    found = timed(tmp_path, text, *two)
    assert [means(one) for one in found] == [{}] * 2
    assert all("name neither their capture nor a model" in str(say(one.warnings[0])) for one in found)
    named = timed(tmp_path, f"capture,{columns}\nb,{row}\n", *two)
    assert [means(one) for one in named] == [{}, {"step": 10}]
    assert [one.configuration for one in named] == [one.configuration for one in two]


def test_rows_that_were_only_timed(tmp_path: Path) -> None:
    text = (
        "capture,model,context_length,batch_size,compile,attention,phase,mean_ms,status\n"
        ",small,128,4,False,sdpa,step,10,ok\n"  # of the capture
        ",small,256,4,False,sdpa,step,20,ok\n,small,256,4,True,naive,step,15,ok\n,xl,,4,False,sdpa,step,,oom\n"
        "gone,,,,,,step,,failed\n,small,512,4,False,sdpa,step,,\n"
    )
    _, *found = timed(tmp_path, text, capture("a", model=SMALL, context_length=128))
    assert [(one.name, one.status, means(one)) for one in found] == [
        ("small_ctx256_b4_sdpa", "not_profiled", {"step": 20}),
        ("small_ctx256_b4_compiled_naive", "not_profiled", {"step": 15}),
        ("xl_ctx?_b4_sdpa", "oom", {}),
        ("gone", "failed", {}),
    ]
    assert found[1].run == Run(compile=True, attention="naive")
