"""Compares what ``nsys-analyze what-if`` and findings predict of a change with the step after the change."""

from __future__ import annotations

import json
import lzma
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.findings.waits import find_pageable_copies
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import WhatIf, what_if
from nsys_analyzer.inputs.gather import gather

EXAMPLES = Path(__file__).parent
#: bf16: matmuls and attention by the peaks of an H100, 67 and 989 TFLOP/s, and what moves its tensors half the bytes.
HALF = dict.fromkeys(("elementwise", "reduction", "copy/layout", "softmax"), 0.5)
BF16 = {"classes": {"matmul": 0.07, "convolution": 0.07, "fused attention": 0.07, **HALF}}
#: TF32: by the peaks of an H100, 67 and 495 TFLOP/s.
TF32 = {"matmul": 0.14, "convolution": 0.14}
#: What is changed, what is asked about the steps before it, and the arguments of ``what_if``; none: a finding says it.
QUESTIONS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "bf16": ("bf16 autocast", "matmul, convolution and attention × 0.07, other passes × 0.5", BF16),
    "fp32": ("TF32", "matmul and convolution × 0.14", {"classes": TF32}),
    "double_batch": ("batch × 2", "each class but the optimizer × 2", {"classes": {}}),
    "eager": ("torch.compile of the blocks", "finding `unfused_elementwise`", None),
    "attention": ("SDPA", "finding `unfused_attention`", None),
    "foreach": ("fused AdamW", "finding `unfused_optimizer`", None),
    "tiny_batch": ("a CUDA graph", "`--launches 0`", {"launches": 0}),
    "pageable": ("copies ahead, from pinned memory", "`--copies pinned`", {"pinned": True}),
    "loader": ("batches by worker processes", "`--range data=0`", {"ranges": {"data": 0}}),
    "item": ("norms stay on the device", "`--range log=0`", {"ranges": {"log": 0}}),
    "checkpoint": ("weights copied while the GPU computes", "`--range checkpoint=0`", {"ranges": {"checkpoint": 0}}),
}
#: What NVLink transfers of these collectives ÷ what the host's memory does: 242 ÷ 28 GB/s.
NVLINK = 8.6


@dataclass(frozen=True)
class Tried:
    """A change that was made, and what was predicted from a capture of before.

    Attributes:
        where: what was changed.
        asked: the question, or the finding that says it.
        before_ms, after_ms: the unprofiled step, of each round.
        predicted: with the step unknown, and timed.
    """

    where: str
    asked: str
    before_ms: Sequence[float]
    after_ms: Sequence[float]
    predicted: Sequence[WhatIf | Finding]

    @property
    def saved_ms(self) -> float:
        """What the change saved: of rounds the median."""
        return statistics.median(before - after for before, after in zip(self.before_ms, self.after_ms, strict=True))

    def errors(self) -> list[float]:
        """The predicted step ÷ the measured one − 1, with the step unknown, and timed."""
        after = statistics.median(self.after_ms)
        return [(one.step_ms - one.saves_ms) / after - 1 for one in self.predicted]

    def inside(self) -> list[bool]:
        """Whether what was saved lies inside the intervals."""
        return [one.saves_ms_low <= self.saved_ms <= one.saves_ms_high for one in self.predicted]


def asked_of(change: str, capture: CaptureSummary) -> WhatIf | None:
    """Returns the answer to a change's question about a capture, None where a finding says it.

    Classes that the steps do not hold are left out; a question that names none is about all but the optimizer. Nothing
    is asked about ranges and copies that the steps do not hold.
    """
    question, study = QUESTIONS[change][2], capture.study
    if not question or not study:
        return None
    if "classes" in question:
        held = {study.classes[code] for code in set(study.operations.kernel.tolist()) if code >= 0}
        wanted = question["classes"] or dict.fromkeys(sorted(held - {"optimizer"}), 2)
        question = {"classes": {name: factor for name, factor in wanted.items() if name in held}}
    has_part = question.get("classes", True) and set(question.get("ranges", ())) <= {*study.ranges}
    if not has_part or ("pinned" in question and not find_pageable_copies(study).any()):
        return None
    return what_if(capture, **question)


def of_benches() -> Iterator[Tried]:
    """Yields what was tried by the bench of torch.compile: it, and bf16, in steps that launching limits."""
    folder = EXAMPLES / "benches" / "compile"
    rows = [json.loads(line) for line in (folder / "bench.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [(row["case"], row["figures"]) for row in rows if "step_median_ms" in row.get("figures", ())]
    ms = {(case["precision"], case["compile"]): figures["step_median_ms"] for case, figures in timed}
    for precision in ("fp32", "bf16"):
        before, after = ms[precision, False], ms[precision, True]
        path = folder / "captures" / f"small_ctx256_train_{precision}" / "capture.sqlite"
        captures = [gather([path], step_ms=step_ms).captures[0] for step_ms in (None, before)]
        found = [one for each in captures for one in each.findings or () if one.id == "unfused_elementwise"]
        yield Tried(
            f"bench, {precision}: torch.compile", "finding `unfused_elementwise`", [before], [after],
            found if len(found) == len(captures) else [],
        )  # fmt: skip
        if precision == "fp32":
            title, words, _ = QUESTIONS["bf16"]
            answers = [one for capture in captures if (one := asked_of("bf16", capture))]
            yield Tried(f"bench, fp32: {title}", words, [before], [ms["bf16", False]], answers)


def of_ranks() -> Iterator[Tried]:
    """Yields what was tried with two ranks."""
    turns: dict[str, list[float]] = json.loads((EXAMPLES / "ranks" / "turns.json").read_bytes())["step_ms"]
    for capture, after, where, asked, question in (
        ("late_rank", "on_time", "a rank on time", "`--rank 1=on-time`", {"on_time": [1]}),
        ("one_bucket", "usual_buckets", "buckets of 25 MiB in place of one", "finding `large_buckets`", None),
        ("usual_buckets", "nvlink", "NVLink, not the host's memory", f"`--network {NVLINK}`", {"network": NVLINK}),
    ):  # fmt: skip
        predicted: list[WhatIf | Finding] = []
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for rank in (0, 1):
                name = f"{capture}_rank{rank}"
                packed = EXAMPLES / "ranks" / "captures" / name
                paths.append(Path(folder) / f"{name}.sqlite")
                paths[-1].write_bytes(lzma.decompress(packed.with_suffix(".sqlite.xz").read_bytes()))
                manifest = packed.with_suffix(".manifest.json")
                (Path(folder) / manifest.name).write_bytes(manifest.read_bytes())
            for step_ms in (None, statistics.median(turns[capture])):
                inputs = gather(paths, step_ms=step_ms)
                if question:
                    predicted.append(what_if(*inputs.captures, **question))
                else:
                    predicted += [one for run in inputs.runs for one in run.findings[:1]]
        yield Tried(f"two ranks: {where}", asked, turns[capture], turns[after], predicted)


def tried_table(tried: Sequence[Tried]) -> Iterator[str]:
    """Yields the table of changes that were tried, with their errors."""
    counted = [one for one in tried if one.predicted]
    yield "## What-ifs that were tried"
    yield ""
    yield (
        "The table compares two steps: the step that `nsys-analyze what-if` predicts from the capture before a change, "
        "and the measured step after the change. If no option expresses a change, a finding predicts the step. The "
        "factors are those that one would give before the change: the peaks of the data sheet for matmuls, and "
        "half the "
        "bytes for tensors in bf16. bf16 and the batch size were tried on an H100, in 7 rounds; two ranks on two "
        "H200s, "
        "in 3 rounds; the bench once on an H200. The error of the step is in parentheses."
    )
    yield ""
    yield "| of the changes | the step unknown | timed |"
    yield "|---|---|---|"
    # A timed step that contradicts its capture is refused, so that the change has only the first prediction.
    of_place = [[one for one in counted if len(one.predicted) > place] for place in (0, 1)]
    errors = [sorted(abs(one.errors()[place]) for one in of_place[place]) for place in (0, 1)]
    cells = (f"{statistics.median(one):.0%}; {one[-(-9 * len(one) // 10) - 1]:.0%}" for one in errors)
    yield f"| error of the step after it: median; nine of ten within | {' | '.join(cells)} |"
    cells = (f"{sum(one.inside()[i] for one in of_place[i])} of {len(of_place[i])}" for i in (0, 1))
    yield f"| the measured saving inside the interval | {' | '.join(cells)} |"
    yield ""
    yield (
        "| change | asked | measured before, after | predicted after; step timed | measured saving | "
        "predicted saving; timed | inside |"
    )
    yield "|---|---|---:|---:|---:|---:|---|"
    for one in tried:
        pairs = zip(one.predicted, one.errors(), strict=True)
        figures = (
            ", ".join(f"{statistics.median(ms):.1f}" for ms in (one.before_ms, one.after_ms)),
            "; ".join(f"{each.step_ms - each.saves_ms:.1f} ({error:+.0%})" for each, error in pairs),
            f"{one.saved_ms:.1f}",
            "; ".join(f"{each.saves_ms_low:.1f} to {each.saves_ms_high:.1f}" for each in one.predicted),
            "; ".join("yes" if is_inside else "no" for is_inside in one.inside()),
        )
        cells = (figure.replace("-", "\N{MINUS SIGN}") or "–" for figure in figures)
        yield f"| {one.where} | {one.asked} | {' | '.join(cells)} |"
