"""Tests the FLOPs and bytes of a transformer, computed from its shapes alone."""

import pytest

from nsys_analyzer.analysis.transformer.models import (
    MODEL_SIZES,
    ModelSize,
    attention_matmul_flops,
    attention_to_softmax_flop_ratio,
    find_model,
    forward_flops,
    softmax_flops,
)

TINY = ModelSize("tiny", d_model=8, d_ff=16, num_layers=3, num_heads=2, vocab_size=100)
B, S = 2, 5


def test_each_part_of_a_tiny_model() -> None:
    assert attention_matmul_flops(TINY, B, S) == 4_800  # 4·2·5²·8·3
    assert softmax_flops(TINY, B, S) == 1_500  # 5·2·2·5²·3


def test_parts_are_the_matmuls_they_stand_for() -> None:
    def matmul(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    tokens, d, d_head = B * S, TINY.d_model, TINY.d_head
    projections = 3 * 4 * matmul(tokens, d, d)
    scores_and_values = matmul(S, d_head, S) + matmul(S, S, d_head)
    assert attention_matmul_flops(TINY, B, S) == 3 * B * TINY.num_heads * scores_and_values
    feed_forward = 3 * (2 * matmul(tokens, d, TINY.d_ff) + matmul(tokens, TINY.d_ff, d))
    parts = projections + feed_forward + matmul(tokens, d, TINY.vocab_size)
    assert forward_flops(TINY, B, S) == parts + attention_matmul_flops(TINY, B, S)


def test_forward() -> None:
    # Projections 8·2·5·8²·3 = 15,360; attention 4,800; feed-forward 6·2·5·8·16·3 = 23,040; head 2·2·5·8·100 = 16,000.
    assert forward_flops(TINY, B, S) == 59_200


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
