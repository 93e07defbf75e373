import re
from pathlib import Path

import pytest

from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings import UNKNOWN_PHASE, Selection, Timing, Timings, read_timings
from nsys_analyzer.runs.timings.cells import cell_of_time

OURS = (
    "model,context_length,batch_size,precision,mode,phase,warmup_steps,steps,"
    "mean_ms,std_ms,min_ms,max_ms,median_ms,peak_memory_bytes,status\n"
)


def read(tmp_path: Path, text: str, encoding: str = "utf-8") -> Timings:
    path = tmp_path / "timings.csv"
    path.write_bytes(text.encode(encoding))
    return read_timings(path)


def fails(tmp_path: Path, text: str, message: str) -> TimingsError:
    with pytest.raises(TimingsError, match=message) as error:
        read(tmp_path, text)
    assert str(tmp_path / "timings.csv") in error.value.message
    assert error.value.hint
    assert "\n" not in str(error.value)
    return error.value


def brief(timings: Timings) -> list[tuple[str, str, float | None, str]]:
    return [(row.model_name, row.phase, row.mean_ms, row.status) for row in timings.rows]


def test_our_own_columns(tmp_path: Path) -> None:
    timings = read(tmp_path, OURS + "small,256,4,fp32,train,forward,5,10,20.5,0.5,20,21,20.4,1000,ok\n")
    assert timings.rows == (
        Timing(
            model=find_model("small"),
            model_name="small",
            context_length=256,
            batch_size=4,
            precision="fp32",
            mode="train",
            phase="forward",
            warmup_steps=5,
            steps=10,
            mean_ms=20.5,
            std_ms=0.5,
            min_ms=20.0,
            max_ms=21.0,
            median_ms=20.4,
            peak_memory_bytes=1000,
            status="ok",
            line=2,
            file=str(tmp_path / "timings.csv"),
            condition_cells=(
                ("model", "small"),
                ("context_length", "256"),
                ("batch_size", "4"),
                ("precision", "fp32"),
            ),
        ),
    )
    assert timings.notes == ()


# --- columns that people already have ---


def test_dimensions_seconds_and_success(tmp_path: Path) -> None:
    timings = read(
        tmp_path,
        "d_model,d_ff,num_layers,num_heads,context_length,batch_size,mean_time,std_time,cv,status,only_forward\n"
        "768,3072,12,12,128,4,0.078,0.0012,0.015,success,False\n"
        "768,3072,12,12,128,4,0.026,0.0,0.0,success,True\n",
    )
    # 0.078 s = 78 ms, 0.026 s = 26 ms, 0.0012 s = 1.2 ms
    assert [(row.model_name, row.phase, row.status) for row in timings.rows] == [
        ("small", "forward+backward", "ok"),
        ("small", "forward", "ok"),
    ]
    assert [row.mean_ms for row in timings.rows] == pytest.approx([78.0, 26.0])
    assert timings.rows[0].std_ms == pytest.approx(1.2)
    assert timings.rows[0].mode is None
    assert timings.notes == ("mean_time, std_time: no unit in the column's name, read as seconds",)


@pytest.mark.parametrize(
    ("header", "value", "expected_ms", "noted"),
    [
        ("mean_ms", "2", 2.0, False),
        ("avg_ms", "2", 2.0, False),
        ("avg_ms_per_step", "2", 2.0, False),
        ("mean_time_ms", "2", 2.0, False),
        ("Mean (ms)", "2", 2.0, False),
        ("mean_s", "2", 2_000.0, False),
        ("mean_time_s", "2", 2_000.0, False),
        ("latency_us", "2", 0.002, False),
        ("mean_time", "2", 2_000.0, True),
        ("mean", "2", 2_000.0, True),
        ("time", "2", 2_000.0, True),
    ],
)
def test_units(tmp_path: Path, header: str, value: str, expected_ms: float, noted: bool) -> None:
    timings = read(tmp_path, f"model,phase,{header}\nsmall,forward,{value}\n")
    assert timings.rows[0].mean_ms == pytest.approx(expected_ms)
    assert bool(timings.notes) == noted


def test_wide_columns(tmp_path: Path) -> None:
    timings = read(
        tmp_path,
        "Model Size,Forward mean (ms),Forward std (ms),backward_mean_ms,optimizer_step_ms,fwd_bwd_s,loss_mean\n"
        "small,20,1,40,5,0.06,2.3\n",
    )
    assert brief(timings) == [
        ("small", "forward", 20.0, "ok"),
        ("small", "backward", 40.0, "ok"),
        ("small", "optimizer", 5.0, "ok"),
        ("small", "forward+backward", 60.0, "ok"),  # 0.06 s
    ]
    assert [row.std_ms for row in timings.rows] == [1.0, None, None, None]


def test_wide_and_only_forward_tell_the_mode(tmp_path: Path) -> None:
    text = "model,only_forward,forward_ms,backward_ms\nsmall,True,19,\nsmall,False,20,40\n"
    assert [(row.mode, row.phase, row.mean_ms) for row in read(tmp_path, text).rows] == [
        ("forward", "forward", 19.0),
        ("forward+backward", "forward", 20.0),
        ("forward+backward", "backward", 40.0),
    ]


def test_mode_says_what_was_timed_where_there_is_no_phase(tmp_path: Path) -> None:
    text = "model,mode,mean_ms\nsmall,fwd,20\nsmall,fwd_bwd,60\nsmall,train,70\nsmall,compiled,9\n"
    timings = read(tmp_path, text)
    assert [(row.mode, row.phase) for row in timings.rows] == [
        (None, "forward"),
        (None, "forward+backward"),
        (None, "step"),
        ("compiled", UNKNOWN_PHASE),
    ]
    assert "no column says which phase was timed" in timings.notes[0]


def test_unknown_phase_matches_nothing(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,mean_ms\nsmall,20\n")
    assert timings.rows[0].phase == UNKNOWN_PHASE
    assert found(timings, model=find_model("small")) is None


def test_synonyms_of_the_other_fields(tmp_path: Path) -> None:
    text = "size,seq_len,batch,dtype,num_warmup,n_steps,phase,mean_ms\n2_7b,512.0,4,torch.bfloat16,5,10,bwd,9\n"
    row = read(tmp_path, text).rows[0]
    assert row.model == find_model("2.7B")
    assert row.model_name == "2_7b"
    assert (row.context_length, row.batch_size, row.precision) == (512, 4, "bf16")
    assert (row.warmup_steps, row.steps, row.phase) == (5, 10, "backward")


@pytest.mark.parametrize(
    ("header", "cells", "precision"),
    [
        ("mixed_precision", "True", "bf16"),
        ("mixed_precision", "False", "fp32"),
        ("mixed_precision", "fp16", "fp16"),
        ("mixed_precision", "", None),
        ("dtype,mixed_precision", "float32,True", "bf16"),
        ("dtype,mixed_precision", "float16,True", "fp16"),
        ("dtype,mixed_precision", "tf32,False", "tf32"),
        ("precision", "TF32", "tf32"),
    ],
)
def test_precision(tmp_path: Path, header: str, cells: str, precision: str | None) -> None:
    timings = read(tmp_path, f"model,phase,mean_ms,{header}\nsmall,forward,20,{cells}\n")
    assert timings.rows[0].precision == precision


def test_own_model_by_dimensions(tmp_path: Path) -> None:
    text = "model,d_model,d_ff,num_layers,num_heads,forward_ms\ntiny,64,256,2,4,1\n,128,512,2,4,2\n"
    timings = read(tmp_path, text)
    assert timings.rows[0].model == ModelSize("tiny", 64, 256, 2, 4)
    assert timings.rows[1].model_name == "d128-L2"


def test_known_name_with_other_dimensions_is_noted(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,d_model,d_ff,num_layers,num_heads,forward_ms\nxl,2560,10240,32,32,1\n")
    assert timings.rows[0].model == find_model("2.7B")
    assert timings.notes == ("xl has the dimensions of 2.7B in this file, not those of the known xl",)


# --- statuses and missing values ---


@pytest.mark.parametrize(
    ("header", "cells", "status"),
    [
        ("mean_ms", "OOM", "oom"),
        ("mean_ms", "CUDA out of memory", "oom"),
        ("mean_ms", "failed", "failed"),
        ("mean_ms", "", "missing"),
        ("mean_ms", "NaN", "missing"),
        ("mean_ms", "-", "missing"),
        ("mean_ms,status", "nan,OOM", "oom"),
        ("mean_ms,status", ",torch.OutOfMemoryError: tried to allocate", "oom"),
        ("mean_ms,status", "-1,oom", "oom"),
        ("mean_ms,status", ",timeout", "timeout"),
        ("mean_ms,status", ",Skipped", "skipped"),
        ("mean_ms,oom", ",True", "oom"),
        ("mean_ms,oom", ",False", "missing"),
    ],
)
def test_no_time(tmp_path: Path, header: str, cells: str, status: str) -> None:
    timings = read(tmp_path, f"model,phase,{header}\nxl,forward,{cells}\n")
    assert brief(timings) == [("xl", "forward", None, status)]


@pytest.mark.parametrize("status", ["ok", "Success", "", "measured"])
def test_a_time_with_a_status(tmp_path: Path, status: str) -> None:
    timings = read(tmp_path, f"model,phase,mean_ms,status\nxl,forward,12,{status}\n")
    assert brief(timings) == [("xl", "forward", 12.0, "ok")]


def test_wide_row_that_ran_out_of_memory_in_backward(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,forward_ms,backward_ms,oom\nxl,30,,True\n2.7B,,,True\nlarge,9,OOM,\n")
    assert brief(timings) == [
        ("xl", "forward", 30.0, "ok"),
        ("xl", "backward", None, "oom"),
        ("2.7B", "forward", None, "oom"),
        ("2.7B", "backward", None, "oom"),
        ("large", "forward", 9.0, "ok"),
        ("large", "backward", None, "oom"),
    ]


# --- the file itself ---


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_case_spaces_and_blank_lines(tmp_path: Path, separator: str) -> None:
    lines = [" MODEL , Context Length,Phase ,Mean_MS", "small, 128 , forward,20.5", "", " , , ,", "", ""]
    timings = read(tmp_path, "\r\n".join(lines).replace(",", separator))
    assert brief(timings) == [("small", "forward", 20.5, "ok")]
    assert timings.rows[0].line == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    assert brief(read(tmp_path, "model,forward_ms\nsmall,20\n", encoding)) == [("small", "forward", 20.0, "ok")]


def test_decimal_comma_and_pandas_index(tmp_path: Path) -> None:
    assert brief(read(tmp_path, ";model;forward_ms\n0;small;20,5\n")) == [("small", "forward", 20.5, "ok")]


def test_two_columns_for_one_figure(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,phase,mean_time,mean_ms\nsmall,forward,7,20\n")
    assert timings.rows[0].mean_ms == 20.0
    assert timings.notes == ("mean_time: not used, another column gives the same figure",)


# --- find ---

SWEEP = (
    "model,context_length,batch_size,precision,mode,phase,mean_ms\n"
    "small,128,4,fp32,train,forward,10\n"
    "small,128,4,fp32,train,backward,20\n"
    "small,256,4,fp32,train,forward,30\n"
    "small,256,4,bf16,train,forward,40\n"
    "small,256,4,bf16,forward,forward,45\n"
    "2.7B,256,4,fp32,train,forward,50\n"
)


def found(timings: Timings, phase: str = "forward", **known: object) -> float | None:
    return found_under(timings, Configuration(**known), phase=phase)  # type: ignore[arg-type]


def found_under(timings: Timings, known: Configuration, run: Run | None = None, phase: str = "forward") -> float | None:
    timing = timings.of_capture("any", set(), known, run or Run()).get(phase)
    return timing.mean_ms if timing else None


def test_find(tmp_path: Path) -> None:
    timings = read(tmp_path, SWEEP)
    small = find_model("small")
    assert found(timings, model=small, context_length=128) == 10.0
    assert found(timings, "backward", model=small, context_length=128) == 20.0
    assert found(timings, "optimizer", model=small, context_length=128) is None
    assert found(timings, model=small, context_length=256) is None  # fp32 or bf16: unsure
    assert found(timings, model=small, context_length=256, precision="fp32") == 30.0
    assert found(timings, model=small, context_length=256, precision="bf16") is None  # train or forward: unsure
    assert found(timings, model=small, context_length=256, precision="bf16", mode="train") == 40.0
    assert found(timings, model=small, context_length=256, precision="bf16", mode="forward+backward") == 40.0
    assert found(timings, model=small, context_length=512) is None
    assert found(timings, model=small, context_length=128, batch_size=8) is None
    assert found(timings, model=find_model("xl-2026")) == 50.0  # the 2.7B's dimensions
    assert found(timings) is None
    assert len(timings.configurations()) == 5


def test_find_prefers_rows_that_know_more(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,ctx,precision,forward_ms\nsmall,128,,10\nsmall,128,bf16,20\n")
    assert found(timings, model=find_model("small"), context_length=128, precision="bf16") == 20.0
    assert found(timings, model=find_model("small"), context_length=128, precision="fp32") == 10.0


def test_a_step_is_not_found_across_modes(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,mode,phase,mean_ms\nsmall,forward+backward,step,10\n")
    assert found(timings, "step", model=find_model("small"), mode="train") is None
    assert found(timings, "step", model=find_model("small")) == 10.0


def test_knowing_nothing_fits_a_file_of_one_configuration(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,ctx,forward_ms,backward_ms\nsmall,128,10,20\n")
    assert found(timings, "backward") == 20.0
    assert timings.configurations() == (Configuration(find_model("small"), 128, source="timings"),)
    two = read(tmp_path, "model,mode,phase,mean_ms\nsmall,forward,forward,10\nsmall,train,backward,20\n")
    assert found(two, "backward") is None


# --- rows that name their capture ---

NAMED = (
    "capture,model,ctx,phase,mean_ms,message\n"
    "eager,small,128,forward,10,\n"
    "eager,small,128,backward,20,\n"
    "compiled,small,128,forward,5,\n"
)


def of_capture(timings: Timings, name: str, others: set[str], **known: object) -> dict[str, float | None]:
    found = timings.of_capture(name, others, Configuration(**known))  # type: ignore[arg-type]
    return {phase: timing.mean_ms for phase, timing in found.items()}


def test_a_capture_by_name_before_its_configuration(tmp_path: Path) -> None:
    timings = read(tmp_path, NAMED)
    assert of_capture(timings, "eager", {"compiled"}) == {"forward": 10.0, "backward": 20.0}
    assert of_capture(timings, "compiled", {"eager"}, precision="bf16") == {"forward": 5.0}


def test_a_row_of_another_capture_is_not_used(tmp_path: Path) -> None:
    timings = read(tmp_path, NAMED)
    small = find_model("small")
    assert of_capture(timings, "third", {"eager", "compiled"}, model=small) == {}
    # "compiled" is no capture at hand: its row may be the renamed capture's
    assert of_capture(timings, "third", {"eager"}, model=small, context_length=128) == {"forward": 5.0}
    assert of_capture(timings, "third", {"eager"}, model=small, context_length=256) == {}


def test_a_named_row_needs_no_model(tmp_path: Path) -> None:
    timings = read(tmp_path, "capture,model,phase,mean_ms,status,message\nmine,,step,,failed,exit code 1\n")
    (row,) = timings.rows
    assert (row.model, row.capture, row.status, row.message) == (None, "mine", "failed", "exit code 1")


# --- repeats ---


def test_repeats_are_refused(tmp_path: Path) -> None:
    error = fails(tmp_path, "model,ctx,forward_ms\nsmall,128,10\nxl,128,9\nsmall,128,11\n", "lines 2 and 4")
    assert "both time the forward of small, context 128" in error.message
    assert "warmup_steps or timestamp" in error.hint


def test_most_warmup_steps_win(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,warmup,forward_ms\nsmall,0,58\nsmall,5,20\nsmall,1,21\n")
    assert brief(timings) == [("small", "forward", 20.0, "ok")]
    assert timings.notes == (
        "rows for the same run, the one with the most warm-up steps used: line 3 (forward), not 2, 4",
    )


@pytest.mark.parametrize(
    ("header", "older", "newer"),
    [
        ("timestamp", "2025-06-12 09:00:00", "2025-06-12T10:00:00Z"),
        ("date", "2025-06-12", "2025-06-13"),
        ("time_stamp", "20250612_090000", "20250612_100000"),
        ("timestamp", "1749700000", "1749700001.5"),
        ("timestamp", "2025-06-12 09:00:00.100000", "2025-06-12 09:00:00.200000"),
    ],
)
def test_newest_wins(tmp_path: Path, header: str, older: str, newer: str) -> None:
    timings = read(tmp_path, f"model,forward_ms,{header}\nsmall,2,{newer}\nsmall,1,{older}\n")
    assert brief(timings) == [("small", "forward", 2.0, "ok")]
    assert timings.notes == ("rows for the same run, the one with the newest time stamp used: line 2 (forward), not 3",)


def test_warmup_first_then_time_stamp(tmp_path: Path) -> None:
    rows = "small,5,1,2025-06-12\nsmall,5,2,2025-06-13\nsmall,0,3,2025-06-14\n"
    assert read(tmp_path, "model,warmup,forward_ms,date\n" + rows).rows[0].mean_ms == 2.0


@pytest.mark.parametrize("stamp", ["", "yesterday"])
def test_a_missing_time_stamp_tells_nothing(tmp_path: Path, stamp: str) -> None:
    fails(tmp_path, f"model,forward_ms,date\nsmall,1,2025-06-12\nsmall,2,{stamp}\n", "lines 2 and 3")


# --- two conditions are never one run ---

SMALL = Configuration(find_model("small"), 128, precision="fp32", mode="forward")
CONDITIONS = "model,ctx,precision,compile,causal,forward_ms,date\n"


def conditions(timings: Timings) -> list[tuple[bool | None, tuple[tuple[str, str], ...], float | None]]:
    return [(row.compile, row.conditions, row.mean_ms) for row in timings.rows]


def test_known_conditions_are_apart(tmp_path: Path) -> None:
    """Not the newest of the four: each has a precision and is compiled or not."""
    rows = ("False,False,10,2025-01-01", "False,True,8,2025-01-02", "True,False,6,2025-01-03", "True,True,4,2025-01-04")
    timings = read(tmp_path, "model,bfloat16,compile,forward_ms,date\n" + "".join(f"small,{row}\n" for row in rows))
    assert [(row.precision, row.compile, row.mean_ms) for row in timings.rows] == [
        ("fp32", False, 10.0),
        ("fp32", True, 8.0),
        ("bf16", False, 6.0),
        ("bf16", True, 4.0),
    ]
    assert timings.notes == ()
    small = find_model("small")
    eager, compiled = Run(compile=False), Run(compile=True)
    assert found(timings, model=small, precision="fp32") is None  # compiled or not: unsure
    for precision, run, expected in (("fp32", eager, 10.0), ("fp32", compiled, 8.0), ("bf16", compiled, 4.0)):
        assert found_under(timings, Configuration(small, precision=precision), run) == expected
    assert found_under(timings, Configuration(small), compiled) is None


def test_unknown_conditions_are_apart(tmp_path: Path) -> None:
    rows = "small,128,fp32,,True,10,2025-01-01\nsmall,128,fp32,,False,12,2025-01-02\n"
    timings = read(tmp_path, CONDITIONS + rows)
    assert conditions(timings) == [(None, (("causal", "True"),), 10.0), (None, (("causal", "False"),), 12.0)]
    assert found_under(timings, SMALL) is None
    assert timings.undecided("a", set(), SMALL) == {"causal": ("True", "False")}


def test_a_column_that_is_the_same_in_a_setup_splits_nothing(tmp_path: Path) -> None:
    rows = "small,128,fp32,,True,10,\nsmall,256,fp32,,False,12,\n"
    timings = read(tmp_path, CONDITIONS + rows)
    assert conditions(timings) == [(None, (), 10.0), (None, (), 12.0)]
    assert found_under(timings, SMALL) == 10.0


def test_the_run_chooses_by_a_column_of_its_own_name(tmp_path: Path) -> None:
    timings = read(tmp_path, "model,profiler,forward_ms\nsmall,nsys,10\nsmall,torch,9\n")
    assert found_under(timings, Configuration(find_model("small")), Run(profiler="torch")) == 9.0


@pytest.mark.parametrize(("asked", "expected"), [("sdpa", 8.0), ("SDPA", 8.0), ("unfused", None)])
def test_words_choose_where_the_file_uses_them(tmp_path: Path, asked: str, expected: float | None) -> None:
    """What one calls naive is unfused for another: both fit, and neither is chosen."""
    timings = read(tmp_path, "model,attention,optimizer,forward_ms\nsmall,naive,AdamW,10\nsmall,sdpa,AdamW,8\n")
    known = Configuration(find_model("small"), attention=asked)
    assert found_under(timings, known, Run(optimizer="torch")) == expected


def test_a_device_that_is_a_gpu(tmp_path: Path) -> None:
    rows = read(tmp_path, "model,device,forward_ms\nsmall,cuda:0,1\nsmall,cpu,2\nsmall,NVIDIA A100,3\n").rows
    assert [(row.device, row.gpu) for row in rows] == [("cuda", None), ("cpu", None), (None, "NVIDIA A100")]


@pytest.mark.parametrize(
    ("gpu", "expected"), [("NVIDIA H100 80GB HBM3", 5.0), ("NVIDIA A100-SXM4-80GB", 9.0), ("NVIDIA L4", None)]
)
def test_the_gpu_chooses(tmp_path: Path, gpu: str, expected: float | None) -> None:
    timings = read(tmp_path, "gpu,model,forward_ms\nA100 80GB,small,9\nH100,small,5\n")
    assert found_under(timings, Configuration(find_model("small")), Run(gpu=gpu)) == expected


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        ("run_id", "a1", "b2"),
        ("git_hash", "9342be9", "b782baf"),
        ("hostname", "gpu01", "gpu02"),
        ("notes", "first", "again"),
        ("seed", "1", "2"),
        ("report_file", "a.nsys-rep", "b.nsys-rep"),
        ("final_loss", "2.31", "2.29"),
        ("p95_ms", "11", "12"),
        ("peak_memory_gb", "3", "4"),
        ("tokens_per_sec", "1000", "1100"),
        ("speedup", "1.4x", "1.5x"),
        ("cv", "0.015", "0.016"),
        ("score", "0.123456", "0.123457"),
        ("started", "2025-06-12 09:00:00", "2025-06-12 09:01:00"),
        ("finished_at", "2025-06-12", "2025-06-13"),
        ("raw_timings_ms", '"[1, 2]"', '"[1, 3]"'),
        ("", "0", "1"),
    ],
)
def test_results_and_origins_are_no_conditions(tmp_path: Path, header: str, first: str, second: str) -> None:
    """The two rows are one run, timed twice: the newer is used."""
    rows = f"small,1,2025-06-12,{first}\nsmall,2,2025-06-13,{second}\n"
    timings = read(tmp_path, f"model,forward_ms,date,{header}\n" + rows)
    assert conditions(timings) == [(None, (), 2.0)]


def test_a_name_of_each_row_is_no_condition(tmp_path: Path) -> None:
    """It differs in every row, where a condition recurs for the next model."""
    names = [("small", "b", 1), ("small", "a", 2), ("xl", "d", 3), ("xl", "c", 4)]
    rows = "".join(f"{model},{name},{warmup},{warmup}\n" for model, name, warmup in names)
    timings = read(tmp_path, "model,tag,warmup,forward_ms\n" + rows)
    assert [(row.model_name, row.conditions, row.mean_ms) for row in timings.rows] == [("small", (), 2), ("xl", (), 4)]


# --- picking rows ---

PICKED = (
    "model,bfloat16,heads_per_group,phase,mean_ms\n"
    "small,False,2,forward,10\n"
    "small,True,2,forward,6\n"
    "small,True,4,forward,5\n"
)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["bfloat16=False"], [10.0]),
        (["bfloat16=false"], [10.0]),
        (["BFloat16=1"], [6.0, 5.0]),
        (["bfloat16=True", "heads per group=4"], [5.0]),
        (["heads_per_group=2.0"], [10.0, 6.0]),
        (["bf16=True"], [6.0, 5.0]),
    ],
)
def test_where(tmp_path: Path, where: list[str], expected: list[float]) -> None:
    path = tmp_path / "timings.csv"
    path.write_text(PICKED, encoding="utf-8")
    timings = read_timings(path, selection=Selection.parse(where, None, None))
    assert [row.mean_ms for row in timings.rows] == expected


@pytest.mark.parametrize(
    ("where", "message", "hint"),
    [
        (["bfloat16"], "'bfloat16' is not COLUMN=VALUE", "bfloat16=False"),
        (["=False"], "'=False' is not COLUMN=VALUE", "bfloat16=False"),
        (["fp64=True"], "no column 'fp64'", "Give one of 'model', 'bfloat16', 'heads_per_group', 'phase', 'mean_ms'"),
        (["bfloat16=Maybe"], "column 'bfloat16': no row has 'Maybe'", "Give one of 'False', 'True'"),
        (["bfloat16=False", "heads_per_group=4"], "column 'heads_per_group': no row has '4'", "Give one of '2'"),
    ],
)
def test_where_that_finds_nothing(tmp_path: Path, where: list[str], message: str, hint: str) -> None:
    path = tmp_path / "timings.csv"
    path.write_text(PICKED, encoding="utf-8")
    with pytest.raises(TimingsError, match=message) as error:
        read_timings(path, selection=Selection.parse(where, None, None))
    assert hint in error.value.hint
    assert "\n" not in str(error.value)


def test_where_in_headers(tmp_path: Path) -> None:
    path = tmp_path / "timings.csv"
    path.write_text("model,Eager fwd (ms),Compiled fwd (ms)\nsmall,10,8\n", encoding="utf-8")
    timings = read_timings(path, selection=Selection.parse(["compile=True"], None, None))
    assert brief(timings) == [("small", "forward", 8.0, "ok")]


def test_the_phase_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("model,mean_ms\nsmall,10\n", encoding="utf-8")
    timings = read_timings(path, selection=Selection.parse([], "fwd", None))
    assert brief(timings) == [("small", "forward", 10.0, "ok")]
    assert timings.notes == ()
    path.write_text("model,forward_ms\nsmall,10\n", encoding="utf-8")
    with pytest.raises(TimingsError, match="--csv-phase forward: its columns say what was timed"):
        read_timings(path, selection=Selection.parse([], "fwd", None))


# --- a row for each iteration ---

ITERATIONS = "model,phase,iteration,mean_ms\n" + "".join(
    f"{model},forward,{i},{ms}\n" for model in ("small", "xl") for i, ms in enumerate((90, 10, 12, 14))
)


def test_iterations_are_one_timing(tmp_path: Path) -> None:
    row, other = read(tmp_path, ITERATIONS).rows
    # (90 + 10 + 12 + 14) ÷ 4 = 31.5; median between 12 and 14
    assert (row.model_name, row.steps, row.mean_ms, row.min_ms, row.median_ms, row.max_ms, row.line) == (
        *("small", 4, 31.5, 10.0, 13.0, 90.0),
        2,
    )
    # √((58.5² + 21.5² + 19.5² + 17.5²) ÷ 3) = 39.034
    assert row.std_ms == pytest.approx(39.034, abs=0.001)
    assert other.model_name == "xl"
    assert read(tmp_path, ITERATIONS).notes == ("2 timings are each the mean of 4 rows, its iterations",)


def test_the_first_iterations_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timings.csv"
    path.write_text(ITERATIONS, encoding="utf-8")
    timings = read_timings(path, selection=Selection(skip=1))
    assert [(row.mean_ms, row.steps, row.std_ms) for row in timings.rows] == [(12.0, 3, 2.0)] * 2
    assert timings.notes == ("2 timings are each the mean of 3 rows, its iterations, the first 1 of each left out",)
    with pytest.raises(TimingsError, match="--csv-skip 4 leaves none of 4 iterations of small"):
        read_timings(path, selection=Selection(skip=4))


def test_iterations_without_a_number(tmp_path: Path) -> None:
    path = tmp_path / "timings.csv"
    path.write_text("model,forward_ms,backward_ms\nsmall,90,50\nsmall,10,20\nsmall,12,22\n", encoding="utf-8")
    with pytest.raises(TimingsError, match="both time the forward") as error:
        read_timings(path)
    assert "--csv-skip 0" in error.value.hint
    timings = read_timings(path, selection=Selection(skip=1))
    assert brief(timings) == [("small", "forward", 11.0, "ok"), ("small", "backward", 21.0, "ok")]
    path.write_text("model,forward_ms\nsmall,90\n", encoding="utf-8")
    with pytest.raises(TimingsError, match="--csv-skip 1 leaves out iterations, and no run has a row for each"):
        read_timings(path, selection=Selection(skip=1))


def test_iterations_of_two_conditions(tmp_path: Path) -> None:
    rows = "".join(f"small,{flag},{i},{ms + i}\n" for flag, ms in (("True", 10), ("False", 20)) for i in range(3))
    timings = read(tmp_path, "model,jit,trial,forward_ms\n" + rows)
    assert conditions(timings) == [(None, (("jit", "True"),), 11.0), (None, (("jit", "False"),), 21.0)]


def test_iterations_of_warmup_are_left_out(tmp_path: Path) -> None:
    rows = "".join(f"small,{i},{i < 2},{ms}\n" for i, ms in enumerate((90, 50, 10, 12)))
    timings = read(tmp_path, "model,iter,warmup,forward_ms\n" + rows)
    assert [(row.mean_ms, row.steps) for row in timings.rows] == [(11.0, 2)]
    assert timings.notes[0] == "2 rows of warm-up are left out"


def test_an_iteration_twice_is_refused(tmp_path: Path) -> None:
    text = "model,iter,forward_ms\nsmall,0,10\nsmall,1,11\nsmall,0,9\n"
    error = fails(tmp_path, text, "lines 2 and 4: iteration 0 of small twice")
    assert "--csv-where" in error.hint


def test_numbers_of_other_rows_are_no_iterations(tmp_path: Path) -> None:
    """The run of a sweep, repeated later: the newer."""
    rows = "3,small,10,2025-06-12\n4,xl,90,2025-06-12\n17,small,11,2025-06-13\n"
    timings = read(tmp_path, "run,model,forward_ms,date\n" + rows)
    assert sorted(brief(timings)) == [("small", "forward", 11.0, "ok"), ("xl", "forward", 90.0, "ok")]


# --- malformed ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("just text\n", "line 1: not a CSV"),
        ("model,forward_ms\n", "a header and no rows"),
        ("model,phase\nsmall,forward\n", "line 1: no column of times among 'model', 'phase'"),
        ("model,forward_std_ms\nsmall,1\n", "no column of times"),
        ("name,mean_ms\nsmall,1\n", "line 1: no column names the model"),
        ("d_model,num_layers,mean_ms\n768,12,1\n", "no column names the model"),
        ("model,mean_ms\nsmall,-3\n", "line 2, column 'mean_ms': '-3' is outside the range"),
        ("model,mean_ms\nsmall,fast\n", "line 2, column 'mean_ms': 'fast' is not a number"),
        ("model,mean_ms\nsmall,inf\n", "'inf' is not a number"),
        ("model,mean_ms,std_ms\nsmall,1,x\n", "column 'std_ms': 'x' is not a number"),
        ("model,ctx,mean_ms\nsmall,12.5,1\n", "column 'ctx': '12.5' is not a whole number of at least 1"),
        ("model,ctx,mean_ms\nsmall,0,1\n", "column 'ctx': '0' is not a whole number"),
        ("model,ctx,mean_ms\nsmall,1e300,1\n", "column 'ctx': '1e300' is not a whole number up to 9,007"),
        ("model,only_forward,mean_ms\nsmall,maybe,1\n", "'maybe' is neither true nor false"),
        ("model,mean_ms\n,1\n", "line 2, column 'model': no model"),
        ("model,mean_ms\nhuge,1\n\ngiant,1\n", "line 2, column 'model': Unknown model 'huge'"),
        ("model,d_model,mean_ms\nsmall,64,1\n", "column 'd_model': 64 is not small's, which is 768"),
        ("d_model,d_ff,num_layers,num_heads,mean_ms\n70,1,1,3,1\n", "line 2, column 'd_model'.*not a multiple"),
        ("model,mean_ms\nsmall,1,234\n", "line 2: 3 cells under a header of 2"),
        ("model,mean_ms\nsmall,1\0\n", "not a CSV: it is not text"),
    ],
)
def test_malformed(tmp_path: Path, text: str, message: str) -> None:
    fails(tmp_path, text, message)


def test_spaces_in_a_time_cost_no_time(tmp_path: Path) -> None:
    """Ten thousand spaces between four places for them could be split in 10^15 ways."""
    fails(tmp_path, f"model,mean_ms\nsmall,20.5{' ' * 10_000}3\n", "is not a number")
    assert cell_of_time(f"20.5{' ' * 10_000}±  0.3 ms")


def test_unknown_model_says_what_can_be_given(tmp_path: Path) -> None:
    error = fails(tmp_path, "model,mean_ms\nhuge,1\n", "Unknown model")
    assert re.search("Known models: small, .*; or give its d_model, d_ff, num_layers, num_heads", error.hint)


def test_no_such_file_folder_or_binary(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="No such file"):
        read_timings(tmp_path / "none.csv")
    with pytest.raises(TimingsError, match="cannot be read"):
        read_timings(tmp_path)
    binary = tmp_path / "trace.csv"
    binary.write_bytes(b"SQLite format 3\xff\xfa")
    with pytest.raises(TimingsError, match="it is not text"):
        read_timings(binary)


# --- times that cannot be right ---


def test_a_time_in_doubt_is_not_trusted() -> None:
    times = {"forward": Stats(10, 5.0), "backward": Stats(10, 9.0)}
    unprofiled = Unprofiled("ok", phases=times, doubts={"forward": ("below the GPU's busy time",)})
    assert unprofiled.typical_ms("forward") == 5.0
    assert unprofiled.trusted_ms("forward") is None
    assert unprofiled.trusted_ms("backward") == 9.0
    assert unprofiled.trusted_ms("optimizer") is None
