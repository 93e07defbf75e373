"""Tests how padding in batches is found, and what a step saves without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.analysis.findings.padding import _has_rows, _is_attention, find_padding
from nsys_analyzer.trace.operator_calls import Batch, Signature, read_operator_calls
from tests.support.operator_calls import OperatorSteps, tensor
from tests.test_operator_findings import only, places, saved_us, text_of

torch = pytest.importorskip("torch", reason="the hooks are those of PyTorch")

from nsys_analyzer.capture.hooks.padding import find_tokens_of_rows  # noqa: E402 - it works on tensors of PyTorch

# --- what the arguments of a call tell

TOKENS = [5, 20, 10]
MASK = torch.arange(20) < torch.tensor(TOKENS)[:, None]
IDS = 1 + torch.arange(60).reshape(3, 20) * 7 % 59
PADDED = IDS.where(MASK, 0)
FEATURES = torch.ones(3, 20, 8)
SCORES = torch.zeros(3, 20).masked_fill(~MASK, float("-inf"))


class Model(torch.nn.Module):
    def forward(self, src, mask=None, src_key_padding_mask=None, lengths=None, attention_mask=None): ...


CALLS = {
    "a mask of tokens": ((IDS,), {"attention_mask": MASK.long()}),
    "by position": ((IDS, MASK), {}),
    "padded on the left": ((IDS, MASK.flip(1).float()), {}),
    "a mask of padding": ((FEATURES,), {"src_key_padding_mask": ~MASK}),
    "a mask of padding with the tokens in the first dimension": (
        (FEATURES.transpose(0, 1),), {"src_key_padding_mask": ~MASK},
    ),
    "a mask that is added to scores": ((FEATURES,), {"src_key_padding_mask": SCORES}),
    "a mask of padding with the name of a mask of tokens": ((IDS,), {"mask": ~MASK}),
    "lengths": ((FEATURES,), {"lengths": torch.tensor(TOKENS)}),
    "a batch in a mapping": (({"input_ids": IDS, "attention_mask": MASK},), {}),
    "rows that end with equal tokens": ((PADDED,), {}),
    "rows that begin with equal tokens": ((PADDED.flip(1),), {}),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "keywords"), CALLS.values(), ids=CALLS)
def test_tokens_of_rows(arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
    """The first row has 15 tokens of padding, the second none and the third 10."""
    assert find_tokens_of_rows(torch, Model(), arguments, keywords) == [(20, TOKENS)]
    compiled = torch.nn.Module()
    compiled._orig_mod = Model()
    assert find_tokens_of_rows(torch, compiled, arguments, keywords) == [(20, TOKENS)]


NOTHING = {
    "features": ((FEATURES,), {}, []),
    "no tensors": (("text",), {"mask": None}, []),
    "no rows": ((IDS[:0],), {}, []),
    "tokens that differ": ((IDS,), {}, [(20, [20] * 3)]),
    "equal tokens": ((torch.zeros_like(IDS),), {}, [(20, [20] * 3)]),
    "padding that is shorter than 8 tokens": ((PADDED[1:, :14],), {}, [(14, [14] * 2)]),
    "a mask of a cache": ((IDS[:, :1],), {"attention_mask": MASK}, [(1, [1] * 3)]),
    "tokens that a model should guess": ((FEATURES, IDS % 3 == 0), {}, []),
    "a mask between tokens": ((torch.ones(20, 20, 8), torch.ones(21, 21).tril()), {}, []),
}


@pytest.mark.parametrize(("arguments", "keywords", "expected"), NOTHING.values(), ids=NOTHING)
def test_batches_without_padding(arguments: tuple[object, ...], keywords: dict[str, object], expected: object) -> None:
    assert find_tokens_of_rows(torch, Model(), arguments, keywords) == expected


@pytest.mark.slow
def test_the_batches_of_a_program(tmp_path: Path) -> None:
    """Two calls of the model per step, of which the second has longer rows. The operators are those of the program."""
    from tests.test_operator_step import names, run_calls

    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
    def forward(self, ids, attention_mask=None):
        return self.head(self.embedding(ids))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    for length in (6, 9):
        mask = torch.arange(12) < torch.tensor([[4], [length]])
        model(torch.ones(2, 12, dtype=torch.long), attention_mask=mask).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    calls = run_calls(tmp_path, text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "model(torch" in row)
    assert [(batch.length, batch.tokens) for batch in calls.batches] == [(12, (4, 6)), (12, (4, 9))]
    assert {batch.line.partition(":")[2] for batch in calls.batches} == {f"{line} in <module>"}
    assert not {"aten::eq", "aten::cumprod", "aten::flip"} & set(names(calls))


def test_files_of_older_hooks_have_no_batches() -> None:
    path = Path(__file__).parent / "data/operators/eval_grads.operators.gz"
    assert read_operator_calls(path)[1].batches == ()


# --- what a step saves

ROWS, LENGTH, WIDTH = 4, 1000, 64
BATCH = Batch(LENGTH, (500, 250, 250, 0), "train.py:7 in main")


def step(*batches: Batch) -> OperatorSteps:
    """A matmul, scores and a loss of 1,000 µs each on tokens, and an operator on weights, and an optimizer."""
    steps, hidden = OperatorSteps(), tensor(ROWS * LENGTH, WIDTH)
    steps.call("mm", hidden, tensor(WIDTH, WIDTH), out=[hidden], us=1_000, after=1)
    scores = tensor(ROWS * 2, LENGTH, LENGTH)
    steps.call("_softmax", scores, out=[scores], us=1_000, after=1)
    logits = tensor(ROWS * (LENGTH - 1), WIDTH)
    steps.call("nll_loss_forward", logits, out=[tensor()], us=1_000, phase="loss", after=1)
    steps.call("mul", tensor(WIDTH, WIDTH), out=[tensor(WIDTH, WIDTH)], us=1_000, phase="backward", after=1)
    steps.call("add_", tensor(ROWS * LENGTH), out=[tensor(ROWS * LENGTH)], us=1_000, phase="optimizer", after=1)
    steps.batches += batches
    return steps


def test_the_work_on_padding_is_saved() -> None:
    """The longest row has half of the length, and the rows have 1,000 of 4,000 tokens.

    Without what is behind the longest row, half of three operators remains: 1,500 µs are saved. Without all padding, a
    quarter of the matmul and of the loss remains. Of the scores, (0.5² + 2 · 0.25²) ÷ 4 = 0.09375 remain. That saves
    750 + 750 + 906.25 µs.
    """
    case = step(BATCH).case()
    candidate = only(find_padding, case)
    assert saved_us(case, candidate) == pytest.approx([1_500, 2_406.25])
    assert places(candidate, case) == ["train.py:7"]
    said = text_of(candidate)
    assert "75 % of the tokens are padding" in said
    assert "Rows have up to 1000 tokens, of which up to 500 are no padding" in said
    assert "50 % of the tokens are behind the end of the longest row" in said
    assert "DataCollatorWithPadding" in said


def test_padding_to_the_longest_row_may_be_needed() -> None:
    """Rows of 1,000, 500, 500 and 0 tokens: nothing is saved for certain."""
    case = step(Batch(LENGTH, (1000, 500, 500, 0))).case()
    candidate = only(find_padding, case)
    assert saved_us(case, candidate) == pytest.approx([0, 500 + 500 + 1_000 * (1 - (1 + 2 * 0.25) / 4)])
    assert "Each batch is padded to its longest row" in text_of(candidate)
    assert "DataCollatorWithPadding" not in text_of(candidate)


def test_two_batches_of_one_shape_share_their_operators() -> None:
    """Half of the batches have no padding, so half of the work above is saved."""
    case = step(BATCH, Batch(LENGTH, (LENGTH,) * ROWS)).case()
    assert saved_us(case, only(find_padding, case)) == pytest.approx([750, 1_203.125])


@pytest.mark.parametrize("batches", [(), (Batch(LENGTH, (LENGTH,) * 3 + (LENGTH - 399,)),)])
def test_little_padding_is_no_finding(batches: tuple[Batch, ...]) -> None:
    """399 of 4,000 tokens are less than 10 %."""
    assert [*find_padding(step(*batches).case())] == []


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 256, 64), True), ((256, 4, 64), True), ((1024, 64), True), ((16, 256, 32), True), ((256, 16, 32), True),
     ((3, 256, 4, 64), True), ((4, 255), True), ((1020, 50), True), ((256, 128), False), ((256, 256), False),
     ((128, 512), False), ((), False)],
)  # fmt: skip
def test_tensors_with_the_tokens_of_four_rows(shape: tuple[int, ...], expected: bool) -> None:
    """4 rows of 256 tokens, or of 255 that have a next token; 16 are 4 rows of 4 heads. Weights have no rows."""
    assert _has_rows([tensor(*shape)], 4, 256) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((16, 256, 256), True), ((4, 4, 256, 256), True), ((4, 256, 256), False), ((256, 256), False)],
)
def test_scores_of_attention_between_the_tokens_of_a_row(shape: tuple[int, ...], expected: bool) -> None:
    """In (4, 256, 256), one of both 256 is the width of the model."""
    signature = Signature("aten::mul", (tensor(*shape),), (tensor(*shape),))
    assert _is_attention(signature, None, (4, 256)) == expected
