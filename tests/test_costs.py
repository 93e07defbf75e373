"""What a transformer costs, from its shapes alone."""

from dataclasses import replace

import pytest

from nsys_analyzer.analysis.transformer.costs import (
    AttentionShape,
    attention_matmul_flops,
    attention_to_softmax_flop_ratio,
    backward_flops,
    feed_forward_flops,
    forward_flops,
    head_flops,
    projection_flops,
    softmax_flops,
)
from nsys_analyzer.analysis.transformer.models import MODEL_SIZES, ModelSize, find_model
from nsys_analyzer.analysis.transformer.peaks import roofline_ms

TINY = ModelSize("tiny", d_model=8, d_ff=16, num_layers=3, num_heads=2, vocab_size=100)
B, S = 2, 5


def test_each_part_of_a_tiny_model() -> None:
    assert projection_flops(TINY, B, S) == 15_360  # 8·2·5·8²·3
    assert attention_matmul_flops(TINY, B, S) == 4_800  # 4·2·5²·8·3
    assert feed_forward_flops(TINY, B, S) == 23_040  # 6·2·5·8·16·3
    assert head_flops(TINY, B, S) == 16_000  # 2·2·5·8·100
    assert softmax_flops(TINY, B, S) == 1_500  # 5·2·2·5²·3


def test_parts_are_the_matmuls_they_stand_for() -> None:
    def matmul(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    tokens, d, d_head = B * S, TINY.d_model, TINY.d_head
    assert projection_flops(TINY, B, S) == 3 * 4 * matmul(tokens, d, d)
    scores_and_values = matmul(S, d_head, S) + matmul(S, S, d_head)
    assert attention_matmul_flops(TINY, B, S) == 3 * B * TINY.num_heads * scores_and_values
    assert feed_forward_flops(TINY, B, S) == 3 * (2 * matmul(tokens, d, TINY.d_ff) + matmul(tokens, TINY.d_ff, d))
    assert head_flops(TINY, B, S) == matmul(tokens, d, TINY.vocab_size)


def test_forward_and_backward() -> None:
    assert forward_flops(TINY, B, S) == 59_200  # 15,360 + 4,800 + 23,040 + 16,000
    assert backward_flops(TINY, B, S) == 118_400  # 2·59,200


def test_forward_of_small() -> None:
    # B 4, S 256: projections 8·1,024·768²·12 = 57,982,058,496; attention 4·4·256²·768·12 = 9,663,676,416;
    # feed-forward 6·1,024·768·3,072·12 = 173,946,175,488; head 2·1,024·768·10,000 = 15,728,640,000
    assert forward_flops(find_model("small"), 4, 256) == 257_320_550_400


@pytest.mark.parametrize("model", MODEL_SIZES, ids=lambda model: model.name)
def test_ratio_is_four_fifths_of_d_head(model: ModelSize) -> None:
    ratio = attention_matmul_flops(model, 4, 512) / softmax_flops(model, 4, 512)
    assert attention_to_softmax_flop_ratio(model) == pytest.approx(ratio)


def test_ratio_of_small() -> None:
    assert attention_to_softmax_flop_ratio(find_model("small")) == pytest.approx(51.2)  # 4·64/5


# --- one attention

SHAPE = AttentionShape(batch_size=2, heads=3, context_length=5, d_head=16, causal=True, precision="bf16")


def test_a_causal_square_is_its_half_with_the_diagonal() -> None:
    seen = sum(1 for query in range(5) for key in range(5) if key <= query)
    assert SHAPE.scores == 2 * 3 * seen == 90  # 5·6 ÷ 2 = 15 of each head
    assert replace(SHAPE, causal=False).scores == 150  # 2·3·5²


def test_flops_of_an_attention() -> None:
    assert SHAPE.forward_flops == 5_760  # 4·16·90
    assert SHAPE.backward_flops == 14_400  # 10·16·90, 2.5 forwards


def test_the_flops_of_an_attention_are_those_of_the_model() -> None:
    model = ModelSize("tiny", d_model=48, d_ff=1, num_layers=1, num_heads=3, vocab_size=1)
    assert replace(SHAPE, causal=False).forward_flops == attention_matmul_flops(model, 2, 5)


def test_bytes_of_an_attention() -> None:
    # one tensor 2·3·5·16·2 = 960, one number a row 2·3·5·4 = 120
    assert SHAPE.forward_bytes == 3_960  # q, k, v, out: 4·960 + 120
    assert SHAPE.backward_bytes == 7_800  # q, k, v, out, dout, dq, dk, dv: 8·960 + 120
    assert SHAPE.square_bytes == 300  # 2·3·5²·2


@pytest.mark.parametrize(("flops", "moved", "least_ms"), [(4e12, 1e9, 4.0), (1e12, 1e10, 5.0)])
def test_the_roofline_is_the_longer_of_computing_and_moving(flops: float, moved: float, least_ms: float) -> None:
    # at 1 PFLOP/s and 2 TB/s: 4 ms against 0.5 ms, 1 ms against 5 ms
    assert roofline_ms(flops, moved, 1e15, 2e12) == pytest.approx(least_ms)
