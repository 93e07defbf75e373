"""Tests that every number of ``examples/README.md`` follows from the committed rows or has a source here."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ROOT
from tests.examples import attention, comparing, ranks, steps, sweep
from tests.examples.rows import EXAMPLES, SWEEP

RAW = (EXAMPLES / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(
    r"(?<![\w-])\d[\d,.]*(?<![,.])"  # not of a name: bf16, GPT-2, d_head
    r"|\b(?:half|halves|halved|thirds?|quarters?|fifth|fiftieth|twice|double|doubling|most|two|three|four|five|six|seven|"
    r"eight|nine|ten|dozen|hundred|thousand)\b",
    re.IGNORECASE,
)
STATEMENTS: tuple[Callable[[], Iterator[str]], ...] = (
    sweep.provenance,
    sweep.programs,
    sweep.sweep_tables,
    sweep.launches,
    sweep.bf16,
    sweep.compiled_sweep,
    sweep.inference,
    sweep.softmax,
    sweep.memory_of_the_sweep,
    steps.rooflines,
    steps.timing,
    steps.precision,
    steps.memory,
    attention.attention,
    attention.variants,
    attention.flash,
    steps.compiling,
    steps.decode,
    ranks.ranks,
    ranks.turns,
    ranks.late_rank,
    ranks.one_bucket,
    ranks.bandwidth,
    ranks.sharing,
    comparing.comparison,
)

#: Figures that others published, with the source that the page links in the same paragraph.
PUBLISHED = {
    "45 TFLOP/s for the forward pass of one GPT-2 layer and 53 with backward, on an A100 "
    "on which a matmul alone reaches 116 in fp32 (TF32) and 230 in fp16": "https://github.com/mli/transformers-benchmarks",
    "about 3 times": "https://github.com/huggingface/transformers/issues/14450",
    "s·b·h·(34 + 5·a·s/h) bytes in 16 bits: 17 such tensors and 2.5 such matrices": "https://arxiv.org/abs/2205.05198",
    "its feed-forward network has two matmuls": "https://arxiv.org/abs/2205.05198",
    "PyTorch 2 paper": "https://pytorch.org/assets/pytorch2-2.pdf",
    "1.41 times for training (geometric mean over more than 180 models": "https://pytorch.org/assets/pytorch2-2.pdf",
    "7.6 times for GPT-2's attention on an A100": "https://arxiv.org/abs/2205.14135",
    "35 % of an H100's peak, against 75 % (740 TFLOP/s)": "https://arxiv.org/abs/2407.08608",
    "73 % (230 TFLOP/s) of an A100's": "https://arxiv.org/abs/2307.08691",
    "PyTorch 2.0 announcement": "https://pytorch.org/get-started/pytorch-2.0/",
    "1.21 and 1.51 (fp32 and AMP, means over 163 models": "https://pytorch.org/get-started/pytorch-2.0/",
    "Llama-7B at batch 1 on an A100, generates 25.5 tokens/s and reads 13.5 GB of weights for each, "
    "which is 17 % of 2 TB/s": "https://pytorch.org/blog/accelerating-generative-ai-2/",
}

#: What is no measurement: names, conditions, and what follows from the models' definition.
GIVEN = (
    "fp32 | bf16 | fp32, compiled |",
    "it has two matmuls for each matmul of forward",
    "where SwiGLU has three",
    "where the naive one is five",  # maximum, difference, exponential, sum, quotient
    "(fp32, context 512). The optimizer",
    "At context 512 in fp32, small becomes",
    "slows such a step down most",  # `sweep.launches` finds the two highest
    "--model small --precision bf16 --requests 16 --batch-size 8 --tokens 32",  # the command line of the server
    "`torchrun --nproc-per-node 2 -m profiling_targets.distributed`",
    "with buckets of 25 MiB, and with such buckets over NVLink",  # DistributedDataParallel's own size of buckets
    "11 faults on H200s, two at a time, and 16 on H100s, three at a time",  # faults of unknown kinds
    "on one H100, six of them three at a time",  # faults were recorded beside each other
    "two further programs look like those of users",
    "--warmup 14 --steps 10 -- python llama.py",  # the command line of the new pairs
)


def test_the_sweep_s_captures_say_what_was_kept_of_them() -> None:
    """``examples/captures.py`` on the committed captures, beside the rows of all."""
    command = [sys.executable, EXAMPLES / "captures.py", SWEEP]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    with (SWEEP / "captures.csv").open(encoding="utf-8", newline="") as file:
        kept = {row["capture"]: row for row in csv.DictReader(file)}
    rows = list(csv.DictReader(printed.splitlines()))
    assert len(rows) == 4
    for row in rows:
        of_all = kept[row["capture"]]
        assert row.keys() == of_all.keys()
        for name in row.keys() - {"capture"}:
            assert bool(row[name]) == bool(of_all[name])
            assert not row[name] or float(row[name]) == pytest.approx(float(of_all[name]), rel=1e-3, abs=0.06)


def test_the_table_of_comparisons_is_what_the_runs_make() -> None:
    page = "\n".join(comparing.program()["page"](comparing.runs())) + "\n"
    assert page == (EXAMPLES / "comparison" / "table.md").read_text(encoding="utf-8"), "python examples/comparison.py"


def plain(text: str) -> str:
    """The text without addresses of links, in one line."""
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).replace("[", "").replace("]", "").split())


PAGE = plain(RAW)


@pytest.mark.parametrize("statements", STATEMENTS, ids=lambda statements: str(statements.__name__))
def test_the_statements_follow_from_the_rows(statements: Callable[[], Iterator[str]]) -> None:
    absent = [phrase for phrase in statements() if phrase not in PAGE]
    assert absent == [], "the rows say so, examples/README.md does not"


@pytest.mark.parametrize("phrase", PUBLISHED)
def test_published_figures_stand_beside_their_source(phrase: str) -> None:
    paragraphs = [plain(text) for text in RAW.split("\n\n") if f"]({PUBLISHED[phrase]})" in text]
    assert any(phrase in paragraph for paragraph in paragraphs)


def test_every_number_of_the_page_has_its_source() -> None:
    phrases = [phrase for statements in STATEMENTS for phrase in statements()] + [*PUBLISHED, *GIVEN]
    covered = [False] * len(PAGE)
    for phrase in phrases:
        for found in re.finditer(re.escape(phrase), PAGE):
            covered[found.start() : found.end()] = [True] * len(phrase)
    loose = [number for number in NUMBER.finditer(PAGE) if not all(covered[number.start() : number.end()])]
    assert [PAGE[max(0, number.start() - 30) : number.end() + 30] for number in loose] == []
    assert [phrase for phrase in (*PUBLISHED, *GIVEN) if phrase not in PAGE] == []
