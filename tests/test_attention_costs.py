from dataclasses import replace

import pytest

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape, roofline_ms
from nsys_analyzer.analysis.transformer.flops import attention_matmul_flops
from nsys_analyzer.analysis.transformer.models import ModelSize

SHAPE = AttentionShape(batch_size=2, heads=3, context_length=5, d_head=16, causal=True, precision="bf16")


def test_a_causal_square_is_its_half_with_the_diagonal() -> None:
    seen = sum(1 for query in range(5) for key in range(5) if key <= query)
    assert SHAPE.scores == 2 * 3 * seen == 90  # 5·6 ÷ 2 = 15 of each head
    assert replace(SHAPE, causal=False).scores == 150  # 2·3·5²


def test_flops() -> None:
    assert SHAPE.forward_flops == 5_760  # 4·16·90
    assert SHAPE.backward_flops == 14_400  # 10·16·90, 2.5 forwards


def test_forward_is_that_of_the_model() -> None:
    model = ModelSize("tiny", d_model=48, d_ff=1, num_layers=1, num_heads=3, vocab_size=1)
    assert replace(SHAPE, causal=False).forward_flops == attention_matmul_flops(model, 2, 5)


def test_bytes() -> None:
    # one tensor 2·3·5·16·2 = 960, one number a row 2·3·5·4 = 120
    assert SHAPE.forward_bytes == 3_960  # q, k, v, out: 4·960 + 120
    assert SHAPE.backward_bytes == 7_800  # q, k, v, out, dout, dq, dk, dv: 8·960 + 120
    assert SHAPE.square_bytes == 300  # 2·3·5²·2


@pytest.mark.parametrize(("flops", "moved", "least_ms"), [(4e12, 1e9, 4.0), (1e12, 1e10, 5.0)])
def test_the_roofline_is_the_longer_of_computing_and_moving(flops: float, moved: float, least_ms: float) -> None:
    # at 1 PFLOP/s and 2 TB/s: 4 ms against 0.5 ms, 1 ms against 5 ms
    assert roofline_ms(flops, moved, 1e15, 2e12) == pytest.approx(least_ms)
