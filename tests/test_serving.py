"""Steps of engines that serve requests: their marks, figures by kind, requests, and what a report says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsys_analyzer import api
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.serving import Serving, StepKind
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.sections.serving import answer_serving
from nsys_analyzer.report.sections.steps import define_step
from nsys_analyzer.text import plain
from nsys_analyzer.trace.phase_names import ServedStep, parse_served_step
from tests.support.export import GEMM, Export, global_tid

MS = 1_000_000


@pytest.mark.parametrize(
    ("name", "kind", "batch", "tokens", "positions"),
    [
        ("execute_context_1(80)_generation_31(31)", "mixed", 32, 111, None),  # 1 + 31 sequences, 80 + 31 tokens
        ("execute_context_1(888_788544)_generation_0(0)", "prefill", 1, 888, None),
        ("execute_model context_0(0) generation_4(4)", "decode", 4, 4, None),
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk550sqsq32sqsk550)", "decode", 32, 32, 550),
        ("execute_9_context_1(sq8sk20sqsq64sqsk160)_generation_1(sq1sk30sqsq1sqsk30)", "mixed", 2, 9, 50),
        ("step[DECODE bs=32]", "decode", 32, 32, None),
        ("step[EXTEND bs=15 toks=15360]", "prefill", 15, 15_360, None),
        ("step[TARGET_VERIFY bs=2 g_sq=8 g_sk=90]", "decode", 2, 8, 90),
        ("step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 g_sq=1 g_sk=12]", "mixed", 2, 6, 20),
        ("step[MIXED bs=1 c=1 g=0 c_sq=3 c_sk=3 g_sq=0 g_sk=0]", "prefill", 1, 3, 3),
        ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", "prefill", 2, 14_721, None),
        ("decode[bs=117/128 tok=117 d=117]", "decode", 117, 117, None),
        ("[Executor] _forward_step 7: 1 ctx reqs, 512 ctx tokens, 3 gen reqs", "mixed", 4, 515, None),
        ("[Executor] _forward_step 7: 2 ctx reqs, 3 gen reqs", "mixed", 5, None, None),
        ("executeStep: 0 ctx reqs, 8 gen reqs", "decode", 8, 8, None),
        ("decode bs=8 toks=8 sk=400", "decode", 8, 8, 400),
        ("prefill (inferred) bs=2 toks=20", "prefill", 2, 20, None),
        ("mixed bs=2 toks=36 sk=90", "mixed", 2, 36, 90),
        ("Decode step 3", "decode", None, None, None),
    ],
)
def test_marks(name: str, kind: str, batch: int | None, tokens: int | None, positions: int | None) -> None:
    mark = parse_served_step(name)
    assert mark == ServedStep(kind, batch, tokens, positions, "(inferred)" in name, batch is not None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["capture_32_FULL", "capture_8192_PIECEWISE", "step[IDLE bs=0]", "decoder", "execute_model"]
)
def test_other_names_are_no_marks(name: str) -> None:
    assert parse_served_step(name) is None


def step(export: Export, name: str, at: int, ms: int, busy: int = 1, kernel: str = GEMM) -> Export:
    """A step of ``ms`` from ``at`` on, whose range ends 1 ms earlier, with a kernel of ``busy`` ms."""
    export.range(name, at * MS, (at + ms - 1) * MS)
    return export.kernel(kernel, at * MS + 1_000, at * MS + 2_000, at * MS + 2_000 + busy * MS)


def served(tmp_path: Path, export: Export) -> CaptureSummary:
    (capture,) = api.summarize(export.gpu().write(tmp_path / "served.sqlite"))
    assert capture.serving is not None
    return capture


def server() -> Export:
    """Prefill of 20 ms at 0 and 60; decode of 10 ms at 20, 30, 40, 50, and of 10 and 12 at 80 and 90."""
    export = Export()
    step(export, "prefill bs=1 toks=512 sk=512", 0, 20, 15)
    for at in (20, 30, 40, 50):
        step(export, "decode bs=4 toks=4 sk=2000", at, 10, 4)
    step(export, "prefill bs=1 toks=256 sk=256", 60, 20, 15)
    step(export, "decode bs=4 toks=4 sk=2000", 80, 10, 4)
    return step(export, "decode bs=2 toks=2 sk=1000", 90, 12, 4)


def kind_of(serving: Serving | None, kind: str) -> StepKind:
    assert serving is not None
    return next(one for one in serving.kinds if one.kind == kind)


def test_steps_by_kind(tmp_path: Path) -> None:
    capture = served(tmp_path, server())
    decode, prefill = kind_of(capture.serving, "decode"), kind_of(capture.serving, "prefill")
    assert (decode.steps, decode.batch, decode.tokens, decode.positions) == (6, 4, 4, 2000)
    # Five of 10 ms; the last one lasts to its range's end, 11. Sorted, the 95th percentile is at 0.95 · 5 = 4.75.
    assert (decode.length_ms.median, decode.length_ms.p95) == (10, pytest.approx(10 + 0.75 * 1))
    assert decode.tokens_per_s == pytest.approx((5 * 4 + 2) / 0.061)
    assert decode.between_ms == 1  # a range ends 1 ms before the next step begins
    # Parts add up to the median: 4 ms of kernels, 6 of idle time.
    assert (decode.compute_ms, decode.idle_ms) == (pytest.approx(4), pytest.approx(6))
    assert decode.share_of("matmul") == 1
    assert (prefill.steps, prefill.batch, prefill.tokens) == (2, 1, (512 + 256) / 2)
    assert (prefill.length_ms.median, prefill.compute_ms) == (20, pytest.approx(15))
    # The step of the capture is a decode step, of the same length.
    assert capture.step is not None
    assert (capture.step.kind, capture.step.instances, capture.step.length_ms, capture.step.batch) == (
        "decode",
        6,
        10,
        4,
    )
    assert capture.phase("step") is None  # a mean of both kinds would say nothing


def test_decode_that_waits_behind_prefill(tmp_path: Path) -> None:
    held = served(tmp_path, server()).serving.held_up  # type: ignore[union-attr]
    assert held is not None
    # Of five decode steps behind another one, that at 80 waits for the prefill of 20 ms: 4 ms for each.
    assert (held.steps, held.of, held.wait_ms.median, held.per_step_ms) == (1, 5, 20, 4)


def test_the_next_generation_holds_nothing_up(tmp_path: Path) -> None:
    """Where hooks mark the steps, each prefill begins a generation, and the one before has ended."""
    export = Export()
    for at in (0, 40):
        step(export, "prefill (inferred) bs=1 toks=9", at, 20)
        step(export, "decode (inferred) bs=1 toks=1 sk=10", at + 20, 10)
        step(export, "decode (inferred) bs=1 toks=1 sk=11", at + 30, 10)
    serving = served(tmp_path, export).serving
    assert serving is not None
    assert (serving.inferred, serving.held_up) == (True, None)
    assert kind_of(serving, "decode").positions == 10.5


def test_a_cold_generation_is_left_out(tmp_path: Path) -> None:
    """Four tokens of 80 ms, of which the first comes of the prompt, then two calls of 20 ms and three times 10."""
    export, at = Export(), 0
    for prompt, token in ((80, 80), (20, 10), (20, 10)):
        step(export, "prefill (inferred) bs=1 toks=9", at, prompt)
        for number in range(3):
            step(export, f"decode (inferred) bs=1 toks=1 sk={10 + number}", at + prompt + number * token, token)
        at += prompt + 3 * token
    capture = served(tmp_path, export)
    decode, prefill = kind_of(capture.serving, "decode"), kind_of(capture.serving, "prefill")
    assert (decode.steps, decode.length_ms.median, decode.length_ms.p95) == (6, 10, 10)
    assert (prefill.steps, prefill.length_ms.median) == (2, 20)
    assert capture.step is not None
    groups = {group.kind: group.steps for group in capture.step.groups}
    assert groups == {"usual": 6, "other work": 2, "first": 4}
    assert "The first 4 steps take 80 ms (median), since" in str(define_step(capture.step)).replace("\xa0", " ")


def test_time_without_a_request_is_no_step(tmp_path: Path) -> None:
    export = server()
    step(export, "decode bs=4 toks=4 sk=2000", 5_000, 10, 4)
    decode = kind_of(served(tmp_path, export).serving, "decode")
    # The one before the pause lasts to its range's end, 11 ms, and so does the last one, 9 ms.
    assert (decode.steps, decode.length_ms.median) == (7, 10)
    assert decode.length_ms.p95 < 11.1


def test_requests_that_are_marked(tmp_path: Path) -> None:
    export = server()
    export.range("request 1", 0, 50 * MS, kind=60).range("first token of request 1", 0, 19 * MS, kind=60)
    export.range("request 2", 5 * MS, 102 * MS, kind=60).range("first token of request 2", 5 * MS, 79 * MS, kind=60)
    requests = served(tmp_path, export).serving.requests  # type: ignore[union-attr]
    assert requests is not None
    assert (requests.count, requests.ttft_ms.median) == (2, (19 + 74) / 2)
    # Request 1: tokens at 19, 29, 39, 49; request 2: at 79, 89, 101. Between them 10, 10, 10, 10, 12.
    assert requests.inter_token_ms is not None
    assert requests.inter_token_ms.median == 10
    assert requests.inter_token_ms.p95 == pytest.approx(10 + 0.8 * 2)  # at 0.95 · 4 = 3.8


@pytest.mark.parametrize("around", ["ProfilerStep#3", "step"])
def test_a_range_around_the_steps_of_an_engine_is_none(tmp_path: Path, around: str) -> None:
    capture = served(tmp_path, server().range(around, 0, 110 * MS))
    assert [one.steps for one in capture.serving.kinds] == [6, 2]  # type: ignore[union-attr]


def test_decode_without_a_batch_needs_prefill_beside_it(tmp_path: Path) -> None:
    """The decoder of an image has a range of that name, too."""
    export = Export()
    for at in (0, 10, 20):
        step(export, "decode", at, 10)
    (capture,) = api.summarize(export.gpu().write(tmp_path / "image.sqlite"))
    assert capture.serving is None
    assert [one.kind for one in served(tmp_path, step(export, "prefill", 30, 10)).serving.kinds] == [
        "decode",
        "prefill",
    ]  # type: ignore[union-attr]


def test_an_opaque_graph_is_busy(tmp_path: Path) -> None:
    export = Export()
    for at in (0, 10, 20, 30):
        export.range("decode bs=1 toks=1", at * MS, (at + 9) * MS).graph(at * MS, at * MS, (at + 8) * MS)
    decode = kind_of(served(tmp_path, export).serving, "decode")
    assert decode.busy_share == pytest.approx(0.8, abs=0.03)  # 8 of 10 ms, the last step 8 of 9


def test_the_kernels_of_a_graph_belong_to_the_layers_it_was_captured_in(tmp_path: Path) -> None:
    """vLLM and SGLang mark layers as they are captured; each of 2 replays runs 2 ms in one layer and 4 in the other."""
    export = Export()
    for layer, at in enumerate((1_000, 2_000)):
        mark = str({"Module": f"Llama.layers.{layer}.mlp", "Inputs": [[8, 4096 + layer]]})
        export.range(mark, at, at + 500).add(
            "CUDA_GRAPH_NODE_EVENTS", start=at + 100, end=at + 200, globalTid=global_tid(), graphNodeId=layer + 1
        )
    for at in (10 * MS, 20 * MS):
        export.range("decode bs=8 toks=8", at, at + 9 * MS)
        replay = export.call("cudaGraphLaunch_v10000", at + 1_000)
        export.kernel(GEMM, None, at + MS, at + 3 * MS, correlation=replay, node=1)
        export.kernel(GEMM, None, at + 3 * MS, at + 7 * MS, correlation=replay, node=2)
    modules = served(tmp_path, export).modules
    assert modules is not None
    assert (modules.per, modules.source) == ("step", "the layers that an engine marked")
    layers = {module.path: module.forward.ms for module in modules.modules if module.path.endswith("mlp")}
    assert layers == {"Llama.layers.0.mlp": 2, "Llama.layers.1.mlp": 4}


def test_what_decode_reads_at_the_least(tmp_path: Path) -> None:
    """Small has 128,625,408 parameters, 7,680,000 in the embedding; a position 2 · 12 · 768 elements."""
    known = Configuration(model=find_model("small"))
    capture = replace(served(tmp_path, server()), configuration=known, precisions={"bf16": 1.0})
    (capture,) = complete_captures([capture])
    assert capture.serving is not None
    serving = capture.serving
    decode = kind_of(serving, "decode")
    weights, cache = 2 * (128_625_408 - 7_680_000), 2 * 2000 * 2 * 12 * 768
    assert (decode.weights_bytes, decode.cache_bytes) == (weights, cache)
    assert decode.least_ms == pytest.approx((weights + cache) / 4.8e12 * 1e3)  # 0.0658 ms
    assert kind_of(serving, "prefill").least_ms is None
    text = " ".join(
        plain(getattr(block, "text", "")) for block in answer_serving(replace(capture, serving=serving), {})
    )
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "The step takes 152 times as long, and the GPU is busy for 60.8 times as long." in text
    )  # 10 and 4 ms ÷ 0.0658
    assert "With fewer (GQA, MQA), the bytes are an upper bound" in text
    assert (
        "6 decode steps take 10 ms (median; 95th percentile 10.8 ms) with a batch of 4 and 361 tokens/s" in text
    )  # 22 ÷ 0.061
    # The model's own, with 2 of 12 heads of keys and values: 60 + 2000 · 0.006 = 72 MB take 0.015 ms.
    (counted,) = complete_captures([replace(capture, run=Run(weights_bytes=60_000_000, cache_bytes=6_000))])
    decode = kind_of(counted.serving, "decode")
    assert (decode.weights_bytes, decode.cache_bytes, decode.least_ms) == (60e6, 12e6, pytest.approx(0.015))
    assert "GQA" not in " ".join(plain(getattr(block, "text", "")) for block in answer_serving(counted, {}))


def test_what_a_larger_batch_brings(tmp_path: Path) -> None:
    """Matmuls take 4 of 10 ms, and 5.6 at most for twice the batch: 11.6 ms, 2 ÷ 1.16 = 1.72 times the tokens."""
    capture = served(tmp_path, server())

    def said(capture: CaptureSummary) -> str:
        return " ".join(plain(getattr(block, "text", "")) for block in answer_serving(capture, {}))

    # 989.4 TFLOP/s ÷ 4.8 TB/s are 206 FLOPs for a byte.
    assert "Decode's batch of 4 is small" in said(capture)
    assert "below a batch of about 206 (bf16). A step of twice the batch takes 1 to 1.2 times as long" in said(capture)
    assert "tokens/s grow by a factor of 1.7 to 2" in said(capture)
    assert "is small" not in said(replace(capture, gpu=None, device=None))  # no peaks
    decode = kind_of(capture.serving, "decode")
    large = replace(capture, serving=Serving((replace(decode, batch=52),), False))  # a quarter of 206 are 51.5
    assert "is small" not in said(large)


def test_a_report_of_serving_speaks_of_its_steps(tmp_path: Path) -> None:
    text = api.render(api.build_report([served(tmp_path, server())]))
    assert "How are requests served?" in text
    assert "decode step" in text
    assert "training" not in text


def test_the_time_of_a_whole_generation_is_that_of_no_step(tmp_path: Path) -> None:
    """Hooks time a call of ``generate``; a step of the capture makes one token."""
    capture = served(tmp_path, server())
    times = Unprofiled("ok", phases={"step": Stats(n=1, mean=900.0), "forward": Stats(n=1, mean=9.0)})
    for timed_by, kept in (("hooks", ["forward"]), (None, ["step", "forward"])):
        (one,) = complete_captures([replace(capture, unprofiled=times, run=Run(timed_by=timed_by))])
        assert one.unprofiled is not None
        assert list(one.unprofiled.phases) == kept
