"""Timing tables as benchmark scripts write them: the headers are those seen in the wild, the numbers are made up."""

from pathlib import Path

import pytest

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings import Timings, read_timings

Times = list[tuple[str, str, float | None]]
SIZES = "768,3072,12,12"


def read(tmp_path: Path, text: str, name: str = "timings.csv") -> Timings:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_timings(tmp_path / name)


def times(timings: Timings) -> Times:
    return [(row.model_name, row.phase, row.mean_ms) for row in timings.rows]


# One row or two under each header, and the times in ms that it holds.
LAYOUTS: dict[str, tuple[str, Times]] = {
    "short phases, backward alone": (
        "size,d_model,d_ff,num_layers,num_heads,fw_mean_ms,fw_std_ms,bw_only_mean_ms,bw_only_std_ms,fwbw_mean_ms\n"
        f"small,{SIZES},10,1,20,2,30\n",
        [("small", "forward", 10), ("small", "backward", 20), ("small", "forward+backward", 30)],
    ),
    "pass_type": (
        "model_size,pass_type,avg_time_ms,std_dev_ms,context_length,batch_size\n"
        "small,forward,10,1,128,4\nsmall,forward_backward,30,1,128,4\n",
        [("small", "forward", 10), ("small", "forward+backward", 30)],
    ),
    "modes with only and optim": (
        "model,mode,mean,std\nsmall,fwd_only,0.01,0.001\nsmall,fwd_bwd,0.03,0.001\nsmall,fwd_bwd_optim,0.04,0.001\n",
        [("small", "forward", 10), ("small", "forward+backward", 30), ("small", "step", 40)],
    ),
    "forward-back": (
        "model,context_length,mode,mean_s,std_s,volume,report_file\n"
        "small,256,forward,0.01,0.001,a,a.nsys-rep\nsmall,256,forward-back,0.03,0.001,b,b.nsys-rep\n",
        [("small", "forward", 10), ("small", "forward+backward", 30)],
    ),
    "train_step and measure_steps": (
        "model_size,mode,batch_size,context_length,warmup_steps,measure_steps,mean_ms,std_ms,device,precision,error\n"
        "small,forward,4,128,5,10,10,1,cuda,fp32,\nsmall,train_step,4,128,5,10,,,cuda,fp32,CUDA out of memory\n",
        [("small", "forward", 10), ("small", "step", None)],
    ),
    "flags of what was run": (
        "model_size,context_length,backward,optimizer,time_forward_only,mean_s,steps\n"
        "small,128,0,0,0,0.01,10\nsmall,128,1,0,0,0.03,10\nsmall,128,1,1,0,0.04,10\n",
        [("small", "forward", 10), ("small", "forward+backward", 30), ("small", "step", 40)],
    ),
    "a total, which nothing says of what": (
        "model,fwd_ms,bwd_ms,opt_ms,total_ms\nsmall,10,20,5,35\n",
        [("small", "forward", 10), ("small", "backward", 20), ("small", "optimizer", 5)],
    ),
    "statistic first": (
        "model_size,Mode,Avg Time (ms),Std Dev (ms),Avg Forward (ms),Std Dev Forward (ms),Warmup Steps\n"
        "small,forward_backward,30,1,10,1,5\n",
        [("small", "forward+backward", 30), ("small", "forward", 10)],
    ),
    "per step, total over all steps beside it": (
        "Config,Seq Len,Warmup Steps,Status FWD,Total(s) FWD,Warmup(s) FWD,Avg/Step(s) FWD,Std/Step(s) FWD\n"
        "small,128,5,OK,0.1,0.5,0.01,0.001\n",
        [("small", "forward", 10)],
    ),
    "percentiles after the unit": (
        "model_size,sequence_length,forward_ms_p20,forward_ms_p50,forward_ms_p80,training_step_ms_p50\n"
        "small,128,9,10,11,40\n",
        [("small", "forward", None), ("small", "step", None)],
    ),
    "compiled and eager in the header": (
        "Model Size,Vanilla Fwd (ms),Compiled Fwd (ms),Speedup Fwd\nsmall,10,8,1.25x\n",
        [("small", "forward", 10), ("small", "forward", 8)],
    ),
    "precisions in the header": (
        "Model,Mode,fp32 mean ms,bf16 mean ms\nsmall,forward,10,5\n",
        [("small", "forward", 10), ("small", "forward", 5)],
    ),
    "models in the header, a row for each iteration": (
        "iteration,small/fwd,10B/fwd\n0,0.01,0.1\n1,0.03,0.3\n",
        [("small", "forward", 20), ("10B", "forward", 200)],
    ),
    "Chinese headers and units": (
        "模型,精度,Forward（毫秒）,Backward Pass (秒)\nSmall,bf16,10,0.02\n",
        [("Small", "forward", 10), ("Small", "backward", 20)],
    ),
    "a unit in each cell, a deviation beside it": (
        "size,forward,full step\nsmall,10 ms ± 1 ms,0.04 s ± 0.001 s\n",
        [("small", "forward", 10), ("small", "step", 40)],
    ),
    "error in place of a time": (
        "mode,size,warmup,mean_ms,p95_ms,error\nforward,small,5,10,11,\nforward,10B,5,,,rc=1\n",
        [("small", "forward", 10), ("10B", "forward", None)],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path: Path, layout: str) -> None:
    text, expected = LAYOUTS[layout]
    found = times(read(tmp_path, text))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected])


def test_what_the_percentiles_are(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "model,forward_ms_p20,forward_ms_p50\nsmall,9,10\n").rows
    assert (row.mean_ms, row.median_ms, row.conditions) == (None, 10.0, ())


def test_what_a_header_says_is_the_condition(tmp_path: Path) -> None:
    text = "model,Eager fwd (ms),Compiled fwd (ms)\nsmall,10,8\n"
    assert [(row.compile, row.mean_ms) for row in read(tmp_path, text).rows] == [(False, 10.0), (True, 8.0)]
    text = "model,phase,fp32 mean ms,bf16 mean ms\nsmall,forward,10,5\n"
    assert [(row.precision, row.mean_ms) for row in read(tmp_path, text).rows] == [("fp32", 10.0), ("bf16", 5.0)]


@pytest.mark.parametrize(
    ("header", "cells", "precision"),
    [
        ("bfloat16", "True", "bf16"),
        ("bfloat16", "False", "fp32"),
        ("use_fp16", "yes", "fp16"),
        ("allow_tf32", "1", "tf32"),
        ("autocast", "True", "bf16"),
        ("amp", "fp16", "fp16"),
        ("precision,autocast", "fp32,True", "bf16"),
        ("precision", "full", "fp32"),
        ("precision", "mixed", "bf16"),
        ("dtype", "fp16_autocast", "fp16"),
    ],
)
def test_precision_by_flag(tmp_path: Path, header: str, cells: str, precision: str) -> None:
    assert read(tmp_path, f"model,phase,mean_ms,{header}\nsmall,forward,20,{cells}\n").rows[0].precision == precision


@pytest.mark.parametrize(
    ("header", "cell", "compiled"),
    [
        ("compile", "True", True),
        ("torch_compile", "0", False),
        ("compiled", "eager", False),
        ("use_compile", "compiled", True),
        ("jit", "True", None),  # of torch.jit or of torch.compile: a condition, and not which
        ("compile", "max-autotune", None),
    ],
)
def test_compile(tmp_path: Path, header: str, cell: str, compiled: bool | None) -> None:
    assert read(tmp_path, f"model,phase,mean_ms,{header}\nsmall,forward,20,{cell}\n").rows[0].compile is compiled


@pytest.mark.parametrize(
    "header", ["loss", "forward", "speedup fwd", "total_ms", "comm_ms", "forward_total_ms", "step"]
)
def test_what_is_no_time(tmp_path: Path, header: str) -> None:
    assert times(read(tmp_path, f"model,{header},backward_ms\nsmall,2.5,20\n")) == [("small", "backward", 20.0)]


# --- other formats ---

JSON_ROWS = (
    '{"model_size": "small", "mode": "forward", "mean_ms": 10, "std_ms": 1.5, "times": [9, 11], "device": "cuda"}',
    '{"model_size": "xl", "mode": "forward", "mean_ms": null, "status": "oom"}',
)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("timings.jsonl", "\n".join(JSON_ROWS) + "\n", [1, 2]),
        ("timings.json", "[\n" + ",\n".join(JSON_ROWS) + "\n]\n", [2, 3]),
    ],
)
def test_json(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    rows = read(tmp_path, text, name).rows
    assert [(row.model_name, row.phase, row.mean_ms, row.std_ms, row.status) for row in rows] == [
        ("small", "forward", 10.0, 1.5, "ok"),
        ("xl", "forward", None, None, "oom"),
    ]
    assert [row.line for row in rows] == lines


def test_json_of_objects_in_objects(tmp_path: Path) -> None:
    text = '{"model": "small", "compile": true, "forward": {"mean_ms": 10, "std_ms": 1}}'
    (row,) = read(tmp_path, text, "t.jsonl").rows
    assert (row.phase, row.mean_ms, row.std_ms, row.compile) == ("forward", 10.0, 1.0, True)


def test_markdown(tmp_path: Path) -> None:
    text = (
        "# Results\n\nContext 128\n\n"
        "| **Model** | Forward (ms)   | Backward (ms) |\n"
        "|:----------|---------------:|:-------------:|\n"
        "| `small`   | 10.5 ± 0.5     | $20 \\pm 1$   |\n"
        "| xl        | OOM            | --            |\n\nThe end\n"
    )
    rows = read(tmp_path, text, "results.md").rows
    assert [(row.model_name, row.phase, row.mean_ms, row.std_ms, row.status, row.line) for row in rows] == [
        ("small", "forward", 10.5, 0.5, "ok", 7),
        ("small", "backward", 20.0, 1.0, "ok", 7),
        ("xl", "forward", None, None, "oom", 8),
        ("xl", "backward", None, None, "missing", 8),
    ]


def test_nan_in_json_is_a_value_that_is_missing(tmp_path: Path) -> None:
    """As Python's json module writes the deviation of one run."""
    text = '{"model": "small", "phase": "forward", "mean_ms": 2, "std_ms": NaN}'
    (row,) = read(tmp_path, text, "t.jsonl").rows
    assert (row.mean_ms, row.std_ms) == (2.0, None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"model": "small", "mean_ms": 1}\n{"model": \n', "line 3: not JSON"),
        ("t.json", "[1, 2]", "line 1: a JSON int, not an object"),
        ("t.json", "[]", "a header and no rows"),
        ("t.json", '{"a": 1}', "no column of times among 'a'"),
        ("t.jsonl", '{"model": "small", "mean_ms": 1e999}', "line 1: inf is no number"),
        ("t.jsonl", '{"model": "small\\ud800", "mean_ms": 1}', "line 1: .*surrogates not allowed"),
        ("t.jsonl", '{"model": "small", "mean_\\udfff": 1}', "line 1: .*surrogates not allowed"),
        ("t.jsonl", '{"model": "small", "mean_ms": ' + "1" * 5_000 + "}", "line 1: Exceeds the limit"),
        ("t.jsonl", '\n{"a": ' + "[" * 100_000, "line 2: nested too deep"),
        ("t.jsonl", '{"a": ' * 100 + "1" + "}" * 100, "line 1: nested too deep"),
        ("t.md", "no table\n", "line 1: no markdown table"),
        ("t.md", "| a | b |\n|---|---|\n| 1 | 2 |\n\n| c | d |\n|---|---|\n| 1 | 2 |\n", "2 markdown tables"),
        ("t.csv", "small,forward,0.01,0.001\nxl,forward,0.1,0.01\n", "Its first line is data"),
    ],
)
def test_malformed(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(TimingsError, match=message) as error:
        read(tmp_path, text, name)
    assert name in error.value.message
    assert "\n" not in str(error.value)


def test_a_table_is_not_much_larger_than_its_file(tmp_path: Path) -> None:
    text = "\n".join(f'{{"model": "small", "mean_ms": 1, "key{i}": 1}}' for i in range(2_000))
    with pytest.raises(TimingsError, match="2,002 different keys"):
        read(tmp_path, text, "t.jsonl")


# --- rows that cost themselves alone ---


def test_a_header_in_the_middle(tmp_path: Path) -> None:
    """As two runs of a script leave it that appends to its file."""
    timings = read(tmp_path, "model,ctx,forward_ms\nsmall,128,10\nmodel,ctx,forward_ms\nsmall,256,20\n")
    assert times(timings) == [("small", "forward", 10.0), ("small", "forward", 20.0)]
    assert timings.notes == ("line 3: the header again, left out",)


def test_unknown_models(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,forward_ms\nsmall,10\nhuge,20\nten_b,30\nhuge,20\n")
    assert times(timings) == [("small", "forward", 10.0)]
    assert timings.notes == ("lines 3, 4, 5: unknown models 'huge', 'ten_b', left out",)


# --- one file for each phase ---


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward_times.csv", "forward"),
        ("timings-backward.csv", "backward"),
        ("simple_profile_fwd_warmup5.csv", "forward"),
        ("forward_backward.csv", "forward+backward"),
        ("fwd_bwd_opt.csv", "step"),
        ("train_times.csv", "unknown"),
    ],
)
def test_the_name_of_the_file_says_the_phase(tmp_path: Path, name: str, phase: str) -> None:
    timings = read(tmp_path, "model,mean_ms\nsmall,10\n", name)
    assert times(timings) == [("small", phase, 10.0)]
    assert "no column says which phase was timed" in timings.notes[0]


def test_a_column_outranks_the_name(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,phase,mean_ms\nsmall,backward,10\n", "forward.csv")
    assert times(timings) == [("small", "backward", 10.0)]
    assert timings.notes == ()


def test_a_file_for_each_phase(tmp_path: Path) -> None:
    for name, ms in (("forward", 10), ("backward", 20)):
        (tmp_path / f"{name}.csv").write_text(f"model,mean_ms\nsmall,{ms}\n", encoding="utf-8")
    timings = read_timings(tmp_path / "forward.csv", tmp_path / "backward.csv")
    assert times(timings) == [("small", "forward", 10.0), ("small", "backward", 20.0)]
    assert timings.source == "forward.csv, backward.csv"
    assert timings.notes[0].startswith("forward.csv: ")


def test_two_files_that_time_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("model,forward_ms\nsmall,10\n", encoding="utf-8")
    with pytest.raises(TimingsError, match=r"a\.csv, line 2, and .*b\.csv, line 2: both time the forward of small"):
        read_timings(tmp_path / "a.csv", tmp_path / "b.csv")
