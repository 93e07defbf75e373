"""Steps of engines that serve requests: their marks, figures by kind, requests, and what a report says of them."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.cases import Capture, make_case_test
from tests.support.export import GEMM, Export

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


def kind_figure(kind: str) -> Callable[[Capture], StepKind]:
    return lambda capture: kind_of(capture.summary.serving, kind)


test_serving = make_case_test(
    "serving",
    {
        "decode": kind_figure("decode"),
        "prefill": kind_figure("prefill"),
        "decode's matmul share": lambda capture: kind_of(capture.summary.serving, "decode").share_of("matmul"),
        "phase named step": lambda capture: capture.summary.phase("step"),
        "kinds": lambda capture: {one.kind: one.steps for one in capture.summary.serving.kinds},
        "held up": lambda capture: capture.summary.serving.held_up,
        "requests": lambda capture: capture.summary.serving.requests,
        "groups": lambda capture: {group.kind: group.steps for group in capture.summary.step.groups},
        "definition": lambda capture: str(define_step(capture.summary.step)).replace("\N{NO-BREAK SPACE}", " "),
        "layers": lambda capture: {
            one.path: one.forward.ms for one in capture.summary.modules.modules if one.path.endswith("mlp")
        },
    },
)


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
    assert "With fewer (GQA, MQA), they are an upper bound" in text
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
