"""Lower bounds of attention: FLOPs of its matmuls, bytes to and from memory, and the time that a device needs.

B is the batch size, H the heads, S the context length, d = d_head. A matmul of (m, k) and (k, n) counts 2·m·k·n, as
in ``flops.py``; softmax is not counted. Fused attention reads and writes queries, keys, values, output and their
gradients alone, not its scores.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of one number in each precision.
NUMBER_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}
#: Of one number per row in fp32, from which backward recomputes the probabilities.
_LSE_BYTES = 4


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one attention, and its costs: queries, keys and values are (B, H, S, d) in ``precision``.

    Causal: a token sees no later one.
    """

    batch_size: int
    heads: int
    context_length: int
    d_head: int
    causal: bool
    precision: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, S and d."""
        return self.batch_size, self.heads, self.context_length, self.d_head

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the queries; keys, values, output and each gradient take as many."""
        return self.batch_size * self.heads * self.context_length * self.d_head * NUMBER_BYTES[self.precision]

    @property
    def lse_bytes(self) -> int:
        """Bytes of the log-sum-exp: one number in each row, saved for backward."""
        return self.batch_size * self.heads * self.context_length * _LSE_BYTES

    @property
    def square(self) -> int:
        """Numbers in all scores of unfused attention, masked ones too: B·H·S²."""
        return self.batch_size * self.heads * self.context_length**2

    @property
    def square_bytes(self) -> int:
        """Bytes of all scores, or of all weights, of unfused attention."""
        return self.square * NUMBER_BYTES[self.precision]

    @property
    def scores(self) -> int:
        """Pairs of a query and a key that it sees: B·H·S², or B·H·S·(S + 1) ÷ 2 of causal attention."""
        length = self.context_length
        pairs = length * (length + 1) // 2 if self.causal else length**2
        return self.batch_size * self.heads * pairs

    @property
    def forward_flops(self) -> int:
        """FLOPs of forward: 4·d for each score, for q·kᵀ and for its weight times v."""
        return 4 * self.d_head * self.scores

    @property
    def backward_flops(self) -> int:
        """FLOPs of backward: 10·d for each score.

        Five matmuls: q·kᵀ once more, dv, the weights' gradient, dk and dq; four (8·d) where the weights were saved.
        Source: Dao, FlashAttention-2, 2023, section 4.1: backward counts 2.5 forwards.
        """
        return 10 * self.d_head * self.scores

    @property
    def forward_bytes(self) -> int:
        """Minimum bytes of forward: q, k and v are read, the output and the log-sum-exp written, each once."""
        return 4 * self.tensor_bytes + self.lse_bytes

    @property
    def backward_bytes(self) -> int:
        """Minimum bytes of backward: q, k, v, output, its gradient and lse are read, three gradients written, once."""
        return 8 * self.tensor_bytes + self.lse_bytes


def roofline_ms(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The least milliseconds for the work: the longer of computing and moving, which at best overlap.

    Source: Williams, Waterman and Patterson, Roofline, Communications of the ACM 52 (4), 2009.
    """
    return max(flops / flops_per_s, moved_bytes / bytes_per_s) * 1e3
