"""Each bench: its cases, and its section from hand-made rows."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.benches import BENCHES
from nsys_analyzer.experiments.compile import compute_compile_s, compute_speed_up, count_steps_to_repay
from nsys_analyzer.experiments.flash import compute_flops_per_s
from nsys_analyzer.experiments.model import AnyRow, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.inputs.rows import Times, to_json_values
from nsys_analyzer.report.model import Lines, Report, Spread
from nsys_analyzer.report.renderers.markdown import render
from tests.support.cases import CASES, Case, read_cases
from tests.support.rows import cells, default_settings, figures, page, table, typed_row

MIB, GIB = 2**20, 2**30
BENCH = {bench.name: bench for bench in BENCHES}
#: What the rows of all tests of a bench have in common.
STEPS = {"device": "cuda", "model": "small", "context_length": 256, "attention": "unfused", "warmup_steps": 5,
         "steps": 10, "seed": 0}  # fmt: skip
COMMON: dict[str, dict[str, Any]] = {
    "attention": {"device": "cuda", "implementation": "unfused", "heads": 1, "batch_size": 8, "d_head": 64,
                  "warmup_steps": 3, "steps": 10},
    "compile": {**STEPS, "precision": "fp32", "mode": "train", "batch_size": 4},
    "decode": {"device": "cuda", "num_layers": 0, "batch_size": 16, "prompt_length": 1024, "cache_length": 2048,
               "tokens": 100, "seed": 0, "warmup_tokens": 100},
    "flash": {"device": "cuda", "batch_size": 1, "heads": 8, "causal": True, "precision": "bf16", "d_head": 64,
              "measured_ms": 100, "warmup_steps": 3, "steps": 10},
    "memory": {"device": "cuda", "model": "small", "context_length": 256, "mode": "train", "precision": "fp32",
               "num_layers": 0, "batch_size": 4, "warmup_steps": 3},
    "precision": {**STEPS, "batch_size": 64, "mode": "forward-backward"},
    "timing": {**STEPS, "batch_size": 4, "mode": "train", "precision": "fp32"},
    "variants": {"device": "cuda", "batch_size": 1, "heads": 4, "context_length": 1024, "d_head": 32,
                 "precision": "fp32", "causal": False, "warmup_steps": 3, "steps": 10},
}  # fmt: skip
PARAMETERS = 128_625_408  # of small
CACHE_BYTES = 12 * 2 * 16 * 2048 * 768 * 4  # layers, keys and values, sequences, positions, features, fp32


def phase(name: str, peak_bytes: int, **changes: Any) -> dict[str, Any]:
    """A phase of 10 ms."""
    return {"name": name, "start_ms": 0.0, "end_ms": 10.0, "start_bytes": GIB, "peak_bytes": peak_bytes, **changes}


def attention_figures(case: dict[str, Any], ms: float) -> dict[str, Any]:
    scores = 3 * 8 * case["context_length"] ** 2 * 4
    return {"forward_ms": ms, "backward_ms": 2 * ms, "peak_bytes": 2 * scores, "inputs_bytes": 1000,
            "before_backward_bytes": scores + 8 * case["context_length"] * 64 * 4,
            "first_step_ms": 3 * ms + 7}  # fmt: skip


def compile_figures(_: dict[str, Any], ms: float) -> dict[str, Any]:
    """Forward is 0.3 of a step, loss 0.1, backward 0.4, optimizer 0.2; the first step takes 20 s more."""
    parts = {"forward": 0.3 * ms, "loss": 0.1 * ms, "backward": 0.4 * ms, "optimizer": 0.2 * ms, "step": ms}
    times = {f"{name}_{kind}": part for name, part in parts.items() for kind in ("ms", "median_ms")}
    return {**times, "step_std_ms": 1.0, "first_step_ms": 20_000 + ms, "peak_allocated_bytes": 2**32}


def decode_figures(case: dict[str, Any], ms: float) -> dict[str, Any]:
    """The first token takes 200 ms, or 100 with PyTorch's SDPA."""
    first_ms = 100 if case["attention"] == "sdpa" else 200
    return {"peak_bytes": 4 * PARAMETERS + CACHE_BYTES + 2**30, "weights_bytes": 4 * PARAMETERS,
            "cache_bytes": CACHE_BYTES if case["cache"] else 0, "first_token_ms": first_ms, "first_token_std_ms": 1.0,
            "between_tokens_ms": ms, "between_tokens_median_ms": ms, "between_tokens_p95_ms": 1.1 * ms,
            "token_times_ms": [first_ms, *99 * [ms]], "tokens_per_s": 16 / ms * 1e3}  # fmt: skip


def flash_figures(case: dict[str, Any], ms: float) -> dict[str, Any]:
    return {"forward_ms": ms / 4, "backward_ms": ms, "end_to_end_ms": ms, "peak_bytes": GIB,
            "kernel": case["implementation"]}  # fmt: skip


def memory_figures(case: dict[str, Any], _: float) -> dict[str, Any]:
    train = case["mode"] == "train"
    names = {"forward": 3, "loss": 4, "backward": 5, "optimizer": 4} if train else {"forward": 1}
    line = {"source": "transformer.py:65 unfused_attention", "code": "weights = scores.exp()  # (B, H, S, S)"}
    saved = {
        "layer_saves_bytes": 64 * MIB,
        "kept_bytes": GIB,
        "layer_saves": [{**line, "tensors": 1, "bytes": 64 * MIB}],
    }
    return {"phases": [phase(name, size * GIB) for name, size in names.items()],
            "step_peak_bytes": max(names.values()) * GIB, "reserved_peak_bytes": 8 * GIB, "base_bytes": GIB,
            "timeline_ms_bytes": [[0.0, GIB], [5.0, 5 * GIB], [10.0, GIB]], **(saved if train else {})}  # fmt: skip


def precision_figures(_: dict[str, Any], ms: float) -> dict[str, Any]:
    return {"peak_allocated_bytes": 8 * GIB, "step_ms": ms, "step_std_ms": 1.0, "forward_ms": ms / 3,
            "backward_ms": 2 * ms / 3, "tokens_per_s": TOKENS / ms}  # fmt: skip


def timing_figures(_: dict[str, Any], ms: float) -> dict[str, Any]:
    return {"peak_allocated_bytes": 8 * GIB, "step_ms": ms, "step_std_ms": ms / 100, "step_cv": 0.01,
            "step_min_ms": ms, "step_max_ms": ms, "step_median_ms": ms, "tokens_per_s": 1024e3 / ms,
            "forward_ms": ms / 4, "loss_ms": ms / 8, "backward_ms": ms / 2, "optimizer_ms": ms / 8}  # fmt: skip


def variants_figures(_: dict[str, Any], ms: float) -> dict[str, Any]:
    return {"max_error": 1e-6, "forward_peak_bytes": MIB, "forward_ms": ms, "forward_std_ms": 0.5,
            "forward_min_ms": ms, "forward_max_ms": ms}  # fmt: skip


TOKENS = 64 * 256e3  # of a step of the bench of precisions, ·1000 for times in ms


def row(bench: str, ms: float = 1, *, status: str = "ok", message: str = "", **changes: Any) -> AnyRow:
    """A row of a bench, whose other figures follow from a time; a row that failed has only the given figures."""
    target = BENCH[bench].target
    options = {one.name for one in fields(target.case)}
    case = {**COMMON[bench], **{name: value for name, value in changes.items() if name in options}}
    given = {name: value for name, value in changes.items() if name not in options}
    known = FIGURES[bench](case, ms) if status == "ok" else {}
    return typed_row(target, case, {**known, **given}, status, message)


FIGURES: dict[str, Callable[[dict[str, Any], float], dict[str, Any]]] = {
    "attention": attention_figures, "compile": compile_figures, "decode": decode_figures, "flash": flash_figures,
    "memory": memory_figures, "precision": precision_figures, "timing": timing_figures, "variants": variants_figures,
}  # fmt: skip
OOM = {"status": "oom", "message": "CUDA out of memory"}


# --- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bench", "device", "settings", "count", "number", "case"),
    [
        # eager and compiled, four widths, five lengths
        ("attention", "cuda", {}, 2 * 4 * 5, 0, {"d_head": 16, "context_length": 256, "compile": False}),
        # eager and compiled, three models, two precisions, two modes
        ("compile", "cuda", {}, 2 * 3 * 2 * 2, 1, {}),
        # models, precisions, attentions, cache or not
        ("decode", "cuda", {}, 3 * 2 * 2 * 2, 0, {}),
        ("decode", "cuda", {}, 3 * 2 * 2 * 2, 1, {"cache": False}),
        ("decode", "cpu", {}, 4, None, {}),
        # implementations, precisions, widths, lengths
        ("flash", "cuda", {}, 4 * 2 * 4 * 10, 0, {"d_head": 16, "context_length": 128, "implementation": "flash"}),
        ("flash", "cpu", {}, 3 * 3, None, {}),
        # models, lengths, modes, precisions
        ("memory", "cuda", {}, 2 * 3 * 2 * 2, None, {}),
        # models, modes, precisions
        ("precision", "cuda", {}, 2 * 2 * 3, 2, {"batch_size": 4, "mode": "forward", "precision": "bf16"}),
        # sizes, contexts, modes
        ("timing", "cuda", {}, 5 * 4 * 3, 0, {"context_length": 128, "mode": "forward"}),
        # two lengths, two variants, causal and not
        ("variants", "cpu", {"context_length": (512, 4096), "implementation": ("naive", "flash")}, 2 * 2 * 2, -1,
         {"device": "cpu", "implementation": "flash", "context_length": 4096, "causal": True, "warmup_steps": 1,
          "steps": 5}),
    ],
)  # fmt: skip
def test_cases(
    bench: str, device: str, settings: dict[str, Any], count: int, number: int | None, case: dict[str, Any]
) -> None:
    cases = BENCH[bench].tasks(default_settings(BENCH[bench], device, **settings))
    assert len(cases) == count
    if number is not None:
        assert cases[number].case == BENCH[bench].target.case(**{**COMMON[bench], **case})


def test_eager_cases_come_before_compiled_ones() -> None:
    for name, eager in (("attention", 20), ("compile", 12)):
        cases = BENCH[name].tasks(default_settings(BENCH[name]))
        assert [case.case.compile for case in cases] == [False] * eager + [True] * eager
    assert cases[13].label == "compile on, small, context length 256, fp32, train"
    memory = BENCH["memory"].tasks(default_settings(BENCH["memory"]))
    assert memory[0].label == "small, context length 128, forward, fp32"


def test_cases_on_a_cpu_are_small() -> None:
    cases = BENCH["compile"].tasks(default_settings(BENCH["compile"], "cpu"))
    assert [case.case.compile for case in cases] == [False, True]
    assert [getattr(cases[0].case, key) for key in ("d_model", "d_ff", "num_layers", "num_heads")] == [256, 1024, 1, 4]
    cases = BENCH["precision"].tasks(default_settings(BENCH["precision"], "cpu"))
    assert not [case for case in cases if "tf32" in to_json_values(case.case).values()]


def test_dimensions_are_told_where_they_are_given() -> None:
    settings = partial(default_settings, BENCH["timing"])
    cases = BENCH["timing"].tasks(settings("cuda", d_model=64))
    assert {case.case.d_model for case in cases} == {64}
    assert cases[0].case.num_layers == 0
    assert BENCH["timing"].tasks(settings("cpu"))[0].case.num_layers == 2
    with pytest.raises(ConfigurationError, match="Unknown model 'huge'"):  # before anything runs
        BENCH["timing"].tasks(settings("cuda", model=("huge",)))


def test_every_default_is_allowed_on_the_command_line() -> None:
    for option in BENCH["timing"].options:
        if option.kind is int:
            for default in (option.default, option.default_on("cpu")):
                assert min(default if option.several else (default,)) >= option.least
    zero = {option.name for option in BENCH["timing"].options if option.least == 0}
    assert {"warmup_steps", "seed", "num_layers"} <= zero


# --- sections --------------------------------------------------------------------------------------------------------

attention = partial(row, "attention", context_length=1024, compile=False)
compiled = partial(row, "compile", compile=True)
eager = partial(row, "compile", compile=False)
LARGE = {"model": "large"}
decode = partial(row, "decode", model="small", precision="fp32", attention="unfused", cache=True)
flash, memory, timing = partial(row, "flash"), partial(row, "memory"), partial(row, "timing")
precision = partial(row, "precision", precision="fp32")
variant = partial(row, "variants")

FOUR_DECODED = (
    decode(10), decode(400, cache=False), decode(5, attention="sdpa"), decode(300, cache=False, attention="sdpa")
)  # fmt: skip
UNSTEADY_DECODE = replace(decode(10), figures=replace(decode(10).figures, between_tokens=Times(10, cv=0.3)))
#: Peaks of equal height: of backward, which is never above where it starts.
EQUAL = [
    phase("forward", 4 * GIB), phase("loss", 4 * GIB + 8, start_bytes=3 * GIB),
    phase("backward", 4 * GIB + 4, start_bytes=4 * GIB + 4), phase("optimizer", 3 * GIB),
]  # fmt: skip
TIMED = (timing(10, mode="forward"), timing(40), timing(context_length=1024, **OOM), timing(80, context_length=512))
PRECISIONS = (
    precision(300), precision(150, precision="tf32"), precision(75, precision="bf16", peak_allocated_bytes=6 * GIB)
)  # fmt: skip
VARIANTS = tuple(
    variant(ms, implementation=name, causal=causal, d_head=d_head)
    for name, ms, causal, d_head in (
        ("naive", 30, False, 32), ("naive", 30.5, True, 32), ("flash", 10, False, 32), ("flash", 5, True, 32),
        ("naive", 60, False, 64), ("flash", 12, False, 64),
    )
)  # fmt: skip
NAIVE, FLASH = variant(30, implementation="naive"), variant(10, implementation="flash")
#: Forward was measured, and backward was not; of the causal one nothing was measured.
LOST = (replace(NAIVE, **OOM), variant(implementation="naive", causal=True, status="oom"))


@pytest.mark.parametrize("case", read_cases(CASES / "bench_sections.txt"), ids=lambda case: case.name)
def test_what_a_section_says(case: Case) -> None:
    rows, *expectations = case.lines
    _, bench, expressions = rows.text.split(" ", maxsplit=2)
    text = page(BENCH[bench], eval(f"[{expressions}]"))
    for line in expectations:
        _, relation, phrase = line.text.split(" ", maxsplit=2)
        assert (ast.literal_eval(phrase) in text) == (relation == "has"), f"line {line.number}: {text}"


# --- tables and figures ----------------------------------------------------------------------------------------------


def test_tables_and_figures_of_attention() -> None:
    # Compiling took 3 · 5 + 7 ms without the 5 + 10 of a later step.
    short, long, faster = attention(10), attention(160, context_length=4096), attention(5, compile=True)
    assert cells(BENCH["attention"], [short, faster], "Time")[1] == {
        "compile": "on", "forward ms": Spread(5, None), "speed-up": 2.0, "backward ms": Spread(10, None),
        "compile ms": 7,
    }  # fmt: skip
    saved = 3 * 8 * 1024**2 * 4
    in_memory = {"compile": "on", "saved for backward": saved + 8 * 1024 * 64 * 4, "peak": 2 * saved}
    assert cells(BENCH["attention"], [short, faster], "Memory")[1] == in_memory
    drawn = figures(BENCH["attention"], [short, long, faster])  # a single point is no curve
    assert [figure.y_axis for figure in drawn.values()] == ["ms", "ms", "MiB saved for backward"]
    assert drawn["attention-forward"].series == (("compile off", ((1024, 10), (4096, 160))),)


def test_a_pair_of_eager_and_compiled() -> None:
    # a slow step or two lift the mean to 90, the median stays: 100 ÷ 80
    pair = {False: eager(100), True: compiled(90, step_median_ms=80)}
    assert compute_speed_up(pair, "step") == 1.25
    assert compute_compile_s(pair) == pytest.approx(20.01)  # 20,090 - 80 ms
    assert count_steps_to_repay(pair) == 1000  # 20,010 ÷ 20 is 1,000.5
    assert (compute_speed_up({False: eager(100)}, "step"), compute_compile_s({False: eager(1)})) == (None, None)


def test_table_and_bars_of_compile() -> None:
    rows = (eager(100), compiled(80))
    (line,) = cells(BENCH["compile"], rows, "Speed-up")
    gains = {"model": "small", "forward": 1.25, "backward": 1.25, "step": 1.25}
    assert line.items() >= {**gains, "compile s": 20.0, "repaid after steps": 1000}.items()
    bars = figures(BENCH["compile"], rows)["compile-speed-up"]
    assert bars.groups == ("small",)
    assert bars.series == (("forward", (1.25,)), ("backward", (1.25,)), ("step", (1.25,)))


def test_figures_of_decode_show_the_largest_model_that_is_complete() -> None:
    assert not figures(BENCH["decode"], [decode(status="failed", message="no")])
    drawn = figures(BENCH["decode"], (*FOUR_DECODED, decode(20, model="large")))
    assert list(drawn) == ["decode-token-times", "decode-throughput"]
    lines, bars = drawn.values()
    assert lines.title == "Time of each token, small"
    assert lines.series[0][0] == "unfused, with cache"
    assert lines.series[0][1][:2] == ((1, 200), (2, 10))
    assert bars.groups == ("small", "large")
    assert bars.series[1] == ("unfused, no cache", (16 / 400 * 1e3, None))


def test_flops_of_flash() -> None:
    # 8·4096·4097 ÷ 2 = 67,125,248 scores of 4·64 FLOPs forward, 10·64 backward
    causal = flash(implementation="flash", context_length=4096)
    assert compute_flops_per_s(causal, "forward") == 4 * 64 * 67_125_248 / 0.25e-3
    assert compute_flops_per_s(causal, "backward") == 10 * 64 * 67_125_248 / 1e-3
    full = flash(implementation="flash", context_length=4096, causal=False)
    assert compute_flops_per_s(full, "end_to_end") == 14 * 64 * 8 * 4096**2 / 1e-3


def test_figures_of_flash() -> None:
    points = (("flash", 256, 2.0, 64), ("flash", 128, 1.0, 64), ("flash", 128, 9.0, 128), ("sdpa", 128, 3.0, 64))
    rows = [flash(ms, implementation=name, context_length=length, d_head=d) for name, length, ms, d in points]
    drawn = figures(BENCH["flash"], rows)
    assert list(drawn) == ["flash-bf16-forward", "flash-bf16-backward", "flash-bf16-end-to-end"]
    *_, figure = drawn.values()
    assert figure.series == (("flash", ((128, 1.0), (256, 2.0))),)  # a single point is no curve
    assert (figure.log_x, figure.log_y, figure.y_axis) == (True, True, "ms")


def memory_rows(*lengths: int) -> list[AnyRow]:
    return [memory(mode=mode, context_length=length, model=model)
            for model in ("small", "large") for length in lengths for mode in ("forward", "train")]  # fmt: skip


def test_the_first_timelines_of_memory_are_seen_at_once() -> None:
    rows = memory_rows(128, 256)
    section = make_section(BENCH["memory"], Results(tuple(rows)))
    seen = [block.key for block in section.blocks if isinstance(block, Lines)]
    assert seen == ["memory-small-256-train-fp32", "memory-large-256-train-fp32"]
    drawn = figures(BENCH["memory"], rows)
    assert list(drawn)[2:] == ["memory-small-256-forward-fp32", "memory-large-256-forward-fp32"]
    first, *_ = drawn.values()
    assert first.series == (("memory", ((0.0, 1.0), (5.0, 5.0), (10.0, 1.0))),)
    assert first.spans[0] == ("forward", 0.0, 10.0)
    assert (first.y_axis, first.steps) == ("GiB", True)


def test_tables_of_memory_in_sight_fit_a_page() -> None:
    folded, widest = False, 0
    report = Report("x", (make_section(BENCH["memory"], Results(tuple(memory_rows(128, 512)))),))
    for line in render(report, {figure.key: "" for figure in report.figures}).splitlines():
        folded = (folded or line.startswith("<details>")) and not line.startswith("</details>")
        if line.startswith("|") and not folded:
            widest = max(widest, len(line))
    assert 0 < widest <= 120


def test_table_and_figures_of_precision() -> None:
    assert table(BENCH["precision"], PRECISIONS).rows == (  # speed-up and memory are against fp32
        ("small", "fp32", Spread(300, 1), None, TOKENS / 300, 8 * GIB, None),
        ("small", "tf32", Spread(150, 1), 2.0, TOKENS / 150, 8 * GIB, 1.0),
        ("small", "bf16", Spread(75, 1), 4.0, TOKENS / 75, 6 * GIB, 0.75),
    )
    drawn = figures(
        BENCH["precision"],
        (precision(300), precision(precision="bf16", **OOM), precision(50, precision="bf16", mode="forward")),
    )
    assert list(drawn) == ["precision-throughput"]
    (throughput,) = drawn.values()
    assert throughput.groups == ("small, forward-backward", "small, forward")
    assert throughput.series == (("fp32", (TOKENS / 300, None)), ("bf16", (None, TOKENS / 50)))


def test_table_and_figures_of_timing() -> None:
    assert table(BENCH["timing"], TIMED).rows == (
        ("small", 256, Spread(10, 0.1), Spread(40, 0.4)),
        ("small", 1024, None, "oom"),
        ("small", 512, None, Spread(80, 0.8)),
    )
    rows = table(BENCH["timing"], (timing(40), timing(20, precision="tf32"))).rows
    assert [line[:2] for line in rows] == [("small", "fp32"), ("small", "tf32")]
    drawn = figures(BENCH["timing"], (timing(40), timing(80, context_length=512)))
    assert list(drawn) == ["timing-step", "timing-phases"]
    assert drawn["timing-step"].series == (("small", ((256, 40), (512, 80))),)
    # forward a quarter, loss and optimizer an eighth each, backward a half
    assert [values for _, values in drawn["timing-phases"].series] == [(25,), (12.5,), (50,), (12.5,)]


def test_tables_of_variants() -> None:
    causal = cells(BENCH["variants"], VARIANTS, "Forward:")[3]
    # 30.5 ÷ 5
    assert causal.items() >= {"implementation": "flash", "causal": "on", "over naive": 6.1, "d head": 32}.items()
    both = {"end_to_end_ms": 40.0, "end_to_end_std_ms": 1.0, "peak_bytes": 7 * MIB}
    rows = (variant(30, implementation="naive", **{**both, "end_to_end_ms": 100.0}),
            variant(10, implementation="flash", **both))  # fmt: skip
    fused = cells(BENCH["variants"], rows, "Forward and backward:")[1]
    assert (fused["over naive"], fused["peak"]) == (2.5, 7 * MIB)  # 100 ÷ 40
    early = cells(BENCH["variants"], LOST, "Forward:")
    assert [(line["causal"], line["ms"], line["status"]) for line in early] == [
        ("off", Spread(30, 0.5), "oom"), ("on", None, "oom"),
    ]  # fmt: skip


def test_figures_of_variants() -> None:
    rows = [variant(factor**2, implementation="naive", forward_peak_bytes=2**22 * factor**2,
                    context_length=512 * factor) for factor in (1, 2, 4)]  # fmt: skip
    by_tokens = figures(BENCH["variants"], rows)["variants-memory-by-tokens"]
    assert by_tokens.series[0][1] == ((512, 4.0), (1024, 16.0), (2048, 64.0))  # MiB
    (drawn,) = figures(BENCH["variants"], (NAIVE, FLASH)).items()
    assert (drawn[0], drawn[1].series) == ("variants-speed-up-not-causal", (("flash", (3.0,)),))
