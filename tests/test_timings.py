"""Times of runs without a profiler: the tables that hold them, and the captures that they belong to."""

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
from nsys_analyzer.runs.timed import with_timings
from nsys_analyzer.runs.timings import Timings, read_timings, timings_of_sweep, write_timings
from tests.support.export import GEMM, Export

SIZES = "768,3072,12,12"


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
    rows = timings_of_sweep(tmp_path).rows
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
    # The number of steps stands with the times; a row's place is its own.
    known = [replace(row, place="", run=replace(row.run, steps=None)) for row in rows]
    assert [replace(row, place="") for row in read] == known


# Of each table the phases, their mean times in ms, and how they ended.
TABLES: dict[str, tuple[str, list[tuple[str, float | None, str]]]] = {
    "a row for each phase": ("phase,mean_ms\nfwd,10\nBackward pass,20\nzero_grad,1\n",
        [("forward", 10, "ok"), ("backward", 20, "ok"), ("zero_grad", 1, "ok")]),
    "a column for each phase": (
        "Model Size,Forward mean (ms),Forward std (ms),bw_only_mean_ms,optimizer_step_ms,fwd_bwd_s,train_step_ms\n"
        "small,20,1,40,5,0.06,70\n",
        [("forward", 20, "ok"), ("backward", 40, "ok"), ("optimizer", 5, "ok"), ("forward+backward", 60, "ok"),
         ("step", 70, "ok")]),
    "both": ("phase,avg_ms,forward_ms\nstep,30,10\n", [("step", 30, "ok"), ("forward", 10, "ok")]),
    "the mode is what was timed": ("model,mode,mean_ms\nsmall,fwd_only,20\nsmall,fwd_bwd,60\nsmall,train,70\n",
        [("forward", 20, "ok"), ("forward+backward", 60, "ok"), ("step", 70, "ok")]),
    "a median alone": ("forward_ms_p20,forward_ms_p50\n9,10\n", [("forward", 10, "ok")]),
    "per step": ("Avg/Step(s) FWD,avg_ms_per_step bwd\n0.01,20\n", [("forward", 10, "ok"), ("backward", 20, "ok")]),
    "of two columns that with a unit": ("phase,mean_time,mean_ms\nforward,7,20\n", [("forward", 20, "ok")]),
    "what is no time": ("loss,step,speedup fwd,total_ms,max_step,loss_mean,forward_ms\n2.5,7,1.2,35,9,2,10\n",
        [("forward", 10, "ok")]),
    "semicolons, spaces, a byte order mark": ("\ufeff Phase ; Mean_MS \n forward ; 20.5\n\n ; \n",
        [("forward", 20.5, "ok")]),
    "tabs, and pandas' index": ("\tphase\tmean_ms\n0\tforward\t20\n", [("forward", 20, "ok")]),
    "out of memory in place of a time": ("model,forward_ms,backward_ms\nsmall,30,CUDA out of memory\n",
        [("forward", 30, "ok"), ("backward", None, "oom")]),
    "statuses": (
        "phase,mean_ms,status\na,1,Success\nb,,OOM\nc,-1,oom\nd,,crashed\ne,,timed out\nf,,Skipped\ng,,\nh,1,new\n",
        [("a", 1, "ok"), ("b", None, "oom"), ("c", None, "oom"), ("d", None, "failed"), ("e", None, "timeout"),
         ("f", None, "skipped"), ("g", None, "missing"), ("h", 1, "ok")]),
    "messages": ("phase,mean_ms,error\na,1,\nb,,rc=1\nc,,CUDA out of memory\n",
        [("a", 1, "ok"), ("b", None, "failed"), ("c", None, "oom")]),
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_tables(tmp_path: Path, table: str) -> None:
    text, expected = TABLES[table]
    assert brief(read(tmp_path, text)) == [(phase, pytest.approx(ms), status) for phase, ms, status in expected]


@pytest.mark.parametrize(
    ("header", "ms", "noted"),
    [
        ("mean_ms", 2, False), ("Mean (ms)", 2, False), ("avg_time_ms", 2, False), ("ms", 2, False),
        ("mean_s", 2_000, False), ("latency_us", 0.002, False), ("p50 [ns]", 2e-6, False), ("mean", 2_000, True),
        ("time", 2_000, True),
    ],
)  # fmt: skip
def test_units(tmp_path: Path, header: str, ms: float, noted: bool) -> None:
    timings = read(tmp_path, f"phase,{header}\nforward,2\n")
    assert brief(timings) == [("forward", pytest.approx(ms), "ok")]
    assert timings.notes == ((f"{header}: no unit in the column's name, read as seconds",) if noted else ())


@pytest.mark.parametrize(
    ("header", "cells", "expected"),
    [
        ("size,seq_len,batch,dtype,num_warmup", "2_7b,512.0,4,torch.bfloat16,5",
         {"model": "2.7B", "context_length": 512, "batch_size": 4, "precision": "bf16", "warmup_steps": 5}),
        ("name,d_model,d_ff,num_layers,num_heads", f"tiny,{SIZES}", {"model": "small"}),
        ("model,d_model,d_ff,num_layers,num_heads", "xl,64,256,2,4", {"model": "d64-L2"}),
        ("model", "llama-7b", {"model": "llama-7b", "configuration.model": None}),
        ("torch_compile", "compiled", {"compile": True}),
        ("compile,cuda_graph", "max-autotune,0", {"compile": None, "cuda_graph": False}),
        ("device,attn_impl", "cuda:0,sdpa", {"device": "cuda", "attention": "sdpa"}),
        ("device", "NVIDIA H100", {"device": None, "gpu": "NVIDIA H100"}),
    ],
)  # fmt: skip
def test_what_a_row_says_of_its_run(tmp_path: Path, header: str, cells: str, expected: dict[str, Any]) -> None:
    (row,) = read(tmp_path, f"{header},step_ms\n{cells},1\n").rows
    found = {**vars(row.run), **{k: v for k, v in structs.asdict(row.configuration).items() if v}, "model": row.model}
    found["configuration.model"] = row.configuration.model
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no"),
        ("just text\n", "no rows"),
        ("phase,mean_ms\n", "no rows. It needs phase and mean_ms (a row for each phase), or forward_ms"),
        ("model,ms,colour\nsmall,1,red\n", "no times of a phase; understood: ms, model; not: colour. It needs phase"),
        ("phase,forward_std_ms\nfwd,1\n", "no times of a phase; understood: forward_std_ms, phase"),
        ("phase,mean_ms\nforward,-3\n", "line 2, column 'mean_ms': '-3' is not a number, or no possible time"),
        ("phase,mean_ms\nforward,1\n\nstep,fast\n", "line 4, column 'mean_ms': 'fast'"),
        ("phase,mean_ms\nforward,inf\n", "'inf'"),
        ("phase,mean_ms,std_ms\nforward,1,x\n", "column 'std_ms': 'x'"),
        (
            "phase,ctx,mean_ms\nforward,12.5,1\n",
            "timings.csv, line 2, column 'context_length': '12.5' is not",
        ),
        ("phase,ctx,mean_ms\nforward,0,1\n", "column 'context_length': '0' is not what it holds"),
        ("d_model,d_ff,num_layers,num_heads,step_ms\n70,1,1,3,1\n", "line 2: .*not a multiple"),
        ("phase,mean_ms\nforward,1,234\n", "no CSV (.*Expected 2 fields in line 2, saw 3"),
        ("phase,mean_ms\n,1\n", "no row has a phase"),
    ],
)
def test_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TimingsError) as error:
        read(tmp_path, text)
    line = str(error.value)
    assert all(part in line for part in said.split(".*"))
    assert "timings.csv" in line
    assert error.value.hint
    assert "\n" not in line


def test_no_file_a_folder_and_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"SQLite format 3\xff\xfa")
    for name, said in (("none.csv", "No such file"), (".", "cannot be read"), ("binary", "no CSV")):
        with pytest.raises(TimingsError, match=said):
            read_timings(tmp_path / name)


# --- repeats ---

REPEATS = "ctx,iteration,loss,forward_ms\n128,0,2.31,90\n128,1,2.29,10\n256,0,2.3,5\n128,2,2.2,12\n128,3,2.1,14\n"


def test_repeats_are_pooled(tmp_path: Path) -> None:
    timings = read(tmp_path, REPEATS)
    first, second = timings.rows
    # (90 + 10 + 12 + 14) ÷ 4 = 31.5; √((58.5² + 21.5² + 19.5² + 17.5²) ÷ 3) = 39.034; median between 12 and 14
    std = pytest.approx(39.034, abs=0.001)
    assert vars(first.times) == {"n": 4, "mean": 31.5, "std": std, "min": 10, "median": 13, "max": 90}
    assert (first.place, second.times and second.times.mean) == ("timings.csv, line 2", 5)
    assert timings.notes == ("1 timings are each the mean of 4 rows",)


def test_repeats_of_several_steps_each(tmp_path: Path) -> None:
    """Two runs of 10 steps and one that failed: mean of means, least and most of all."""
    rows = "forward,10,12,1,9,15,ok\nforward,10,14,1,8,20,ok\nforward,10,,,,,oom\n"
    (row,) = read(tmp_path, f"phase,steps,mean_ms,std_ms,min_ms,max_ms,status\n{rows}").rows
    std = pytest.approx(2**0.5)  # of 12 and 14
    assert vars(row.times) == {"n": 20, "mean": 13, "std": std, "min": 8, "median": 13, "max": 20}
    assert row.status == "ok"


def test_rows_of_two_files_are_one_table(tmp_path: Path) -> None:
    for name, phase in (("a", "forward"), ("b", "backward")):
        (tmp_path / f"{name}.csv").write_text(f"phase,mean\n{phase},0.01\n", encoding="utf-8")
    timings = read_timings(tmp_path / "a.csv", tmp_path / "b.csv")
    assert (timings.source, [row.phase for row in timings.rows]) == ("a.csv, b.csv", ["forward", "backward"])
    assert timings.notes[0].startswith("a.csv: mean: no unit")


def test_many_rows_are_read_together(tmp_path: Path) -> None:
    """Each group of rows as by itself: 50,000 rows of 8 runs, the mean of i + 0.5 over every eighth."""
    rows = "".join(f"{128 * (1 + i % 4)},{('fwd', 'bwd')[i // 4 % 2]},{i // 8},{i}.5\n" for i in range(50_000))
    found = read(tmp_path, f"context_length,phase,iteration,ms\n{rows}").rows
    assert [row.times and (row.times.n, row.times.mean) for row in found] == [(6250, 24_996.5 + i) for i in range(8)]


# --- which capture ---


def capture(name: str = "any", rank: int | None = None, run: Run | None = None, **known: Any) -> CaptureSummary:
    precisions = known.pop("precisions", {})
    configuration = Configuration(**known) if known else None
    return CaptureSummary(name, None, "", "ok", configuration=configuration, run=run, rank=rank, precisions=precisions)


def timed(folder: Path, text: str, *captures: CaptureSummary, one_run: bool = False) -> list[CaptureSummary]:
    return with_timings(captures, read(folder, text), one_run=one_run or len(captures) == 1)


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
FLAGS = "model,compile,attention,gpu,forward_ms\nsmall,False,naive,A100 80GB,9\nsmall,True,sdpa,H100,5\n"


@pytest.mark.parametrize(
    ("text", "one", "expected"),
    [
        (SWEEP, capture(model=SMALL, context_length=128, mode="train"), {"forward": 10, "backward": 20, "step": 35}),
        # a step without an optimizer is another one, its phases are not
        (SWEEP, capture(model=SMALL, context_length=128, mode="forward+backward"), {"forward": 10, "backward": 20}),
        (SWEEP, capture(**AT_256), "precision (fp32, bf16), mode (train, forward)"),
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
        (FLAGS, capture(model=SMALL), "compile (False, True), attention (naive, sdpa)"),
        ("rank,phase,mean_ms\n0,step,10\n1,step,12\n", capture(rank=1), {"step": 12}),
        ("model,causal,step_ms\nsmall,,10\nsmall,1,9\n", capture(model=SMALL), "causal (empty, 1); give a file"),
        ("model,step_ms\nllama,10\n", capture(), {"step": 10}),
        ("model,step_ms\nllama,10\n", capture(model=SMALL), {}),
        ("warmup,step_ms\n0,58\n5,20\n", capture(), "warmup_steps (0, 5); give a file with the rows of this run alone"),
    ],
)  # fmt: skip
def test_the_rows_of_a_capture(
    tmp_path: Path, text: str, one: CaptureSummary, expected: dict[str, float] | str
) -> None:
    found = timed(tmp_path, text, one)[0]
    assert means(found) == ({} if isinstance(expected, str) else expected)
    assert [expected in str(line) for line in found.warnings] == ([True] if isinstance(expected, str) else [])


SWITCHES = (
    "model,bfloat16,compile,forward_ms\n"
    "small,False,False,30\nsmall,False,True,20\nsmall,True,False,15\nsmall,True,True,10\n"
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
    assert found.warnings[-1].endswith(f"taken, of the rows that fit, since the capture's kernels are {said}")


@pytest.mark.parametrize(("columns", "row"), [("phase,mean_ms", "step,10"), ("step_ms", "10")])
def test_times_without_a_model_are_of_the_captures_of_the_call(tmp_path: Path, columns: str, row: str) -> None:
    text, two = f"{columns}\n{row}\n", (capture("a"), capture("b", model=SMALL))
    assert [means(one) for one in timed(tmp_path, text, capture(model=SMALL))] == [{"step": 10}]
    assert [means(one) for one in timed(tmp_path, text, *two, one_run=True)] == [{"step": 10}] * 2
    found = timed(tmp_path, text, *two)
    assert [means(one) for one in found] == [{}] * 2
    assert all("name neither their capture nor a model" in str(one.warnings[0]) for one in found)
    named = timed(tmp_path, f"capture,{columns}\nb,{row}\n", *two)
    assert [means(one) for one in named] == [{}, {"step": 10}]
    assert [one.configuration for one in named] == [one.configuration for one in two]


def test_rows_that_were_only_timed(tmp_path: Path) -> None:
    text = (
        "capture,model,ctx,batch,compile,causal,phase,mean_ms,status\n"
        ",small,128,4,False,True,step,10,ok\n"  # of the capture
        ",small,256,4,False,True,step,20,ok\n,small,256,4,True,False,step,15,ok\n,xl,,4,False,True,step,,oom\n"
        "gone,,,,,,step,,failed\n,small,512,4,False,True,step,,\n"
    )
    _, *found = timed(tmp_path, text, capture("a", model=SMALL, context_length=128))
    assert [(one.name, one.status, means(one)) for one in found] == [
        ("small_ctx256_b4_causal=True", "not_profiled", {"step": 20}),
        ("small_ctx256_b4_compiled_causal=False", "not_profiled", {"step": 15}),
        ("xl_ctx?_b4_causal=True", "oom", {}),
        ("gone", "failed", {}),
    ]
    assert found[1].run == Run(compile=True)
