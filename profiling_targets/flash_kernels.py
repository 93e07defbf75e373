"""Defines FlashAttention-2 as Triton kernels: one kernel for the forward pass, and three for the backward pass.

No kernel writes the S × S scores to memory. Each kernel keeps one tile of scores in registers and discards it after
use. The forward pass stores one number per row, the logarithm of the softmax's denominator, from which the backward
pass recomputes the probabilities (Dao, *FlashAttention-2*, 2023, https://arxiv.org/abs/2307.08691, algorithms 1 and 2).
``tiled_attention.py`` is the same algorithm in PyTorch, to read first.

Powers of two are cheaper than powers of e, so ``scale`` is log2(e) ÷ √d_head, and a row's ``lse`` is the binary
logarithm of Σ 2^(scale · q·k). Tiles without masked scores run in a separate loop. Only the tiles on the diagonal, and
the last tiles of a length that is no multiple of the tile, apply a mask.

Shapes: S rows of d_head numbers for each of B × H heads. A tile has ``block_m`` queries and ``block_n`` keys. q, k and
v share their strides (``stride_batch``, ``stride_head``, ``stride_row``, in numbers). All other tensors are contiguous.
"""

# mypy: ignore-errors
# Triton compiles these functions as its own language: arguments are pointers, blocks and compile-time constants.

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)  # scale · LN_2 is 1 ÷ √d_head


@triton.jit
def load_rows(start, first_row, stride, length, rows: tl.constexpr, d_head: tl.constexpr, masked: tl.constexpr):
    """Loads the rows from ``first_row`` on as a block (rows, d_head). If masked, rows past the length are zeros."""
    row, column = tl.arange(0, rows), tl.arange(0, d_head)
    pointers = start + tl.cast(first_row, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    return tl.load(pointers, mask=(first_row + row)[:, None] < length, other=0.0) if masked else tl.load(pointers)


@triton.jit
def store_rows(start, first_row, length, block, rows: tl.constexpr, d_head: tl.constexpr, masked: tl.constexpr):
    """Writes a block (rows, d_head) to the rows from ``first_row`` on of a contiguous head, cast to the head's type."""
    row, column = tl.arange(0, rows), tl.arange(0, d_head)
    pointers = start + tl.cast(first_row, tl.int64) * d_head + (row[:, None] * d_head + column[None, :])
    block = block.to(start.dtype.element_ty)
    if masked:
        tl.store(pointers, block, mask=(first_row + row)[:, None] < length)
    else:
        tl.store(pointers, block)


@triton.jit
def load_numbers(start, first_row, length, rows: tl.constexpr, masked: tl.constexpr):
    """Loads one number for each row from ``first_row`` on. If masked, numbers past the length are zeros."""
    row = first_row + tl.arange(0, rows)
    return tl.load(start + row, mask=row < length, other=0.0) if masked else tl.load(start + row)


@triton.jit
def is_visible(first_row, first_key, length, block_m: tl.constexpr, block_n: tl.constexpr, causal: tl.constexpr):
    """Returns a mask (block_m, block_n) of the keys that each row may see. Rows past the length are never stored."""
    row, key = first_row + tl.arange(0, block_m), first_key + tl.arange(0, block_n)
    return row[:, None] >= key[None, :] if causal else tl.broadcast_to(key[None, :] < length, (block_m, block_n))


@triton.jit
def attend_tiles(
    acc, denominator, max_score, q_tile, k, v, stride, first_row, begin, end, length, scale,
    block_m: tl.constexpr, block_n: tl.constexpr, d_head: tl.constexpr,
    causal: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Adds the keys ``begin`` to ``end`` to the running sum of values, denominator and largest score of each row."""
    for first_key in tl.range(begin, end, block_n):
        k_tile = load_rows(k, first_key, stride, length, block_n, d_head, masked)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision)
        if masked:
            scores = tl.where(is_visible(first_row, first_key, length, block_m, block_n, causal), scores, float("-inf"))
        new_top = tl.maximum(max_score, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(max_score - new_top)  # the sums so far are relative to the old maximum
        denominator = denominator * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = load_rows(v, first_key, stride, length, block_n, d_head, masked)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=precision)
        max_score = new_top
    return acc, denominator, max_score


@triton.jit
def forward_kernel(
    q, k, v, out, lse, stride_batch, stride_head, stride_row, num_heads, length, scale,
    d_head: tl.constexpr, causal: tl.constexpr, even: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Computes attention of ``block_m`` rows of one head. The grid is (B × H, tiles of rows)."""
    head = tl.program_id(0).to(tl.int64)
    # The last rows see the most keys. They start first, so that they do not run alone at the end.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_m
    offset = head // num_heads * stride_batch + head % num_heads * stride_head
    q_tile = load_rows(q + offset, first_row, stride_row, length, block_m, d_head, not even)
    k, v = k + offset, v + offset
    acc = tl.zeros((block_m, d_head), tl.float32)
    denominator = tl.zeros((block_m,), tl.float32)
    max_score = tl.full((block_m,), float("-inf"), tl.float32)
    plain_end = (first_row if causal else length) // block_n * block_n
    acc, denominator, max_score = attend_tiles(
        acc, denominator, max_score, q_tile, k, v, stride_row, first_row, 0, plain_end, length, scale,
        block_m, block_n, d_head, causal, False, precision,
    )  # fmt: skip
    if causal or not even:
        end = tl.minimum(first_row + block_m, length) if causal else length
        acc, denominator, max_score = attend_tiles(
            acc, denominator, max_score, q_tile, k, v, stride_row, first_row, plain_end, end, length, scale,
            block_m, block_n, d_head, causal, True, precision,
        )  # fmt: skip
    row = first_row + tl.arange(0, block_m)
    tl.store(lse + head * length + row, max_score + tl.log2(denominator), mask=row < length)
    store_rows(out + head * length * d_head, first_row, length, acc / denominator[:, None], block_m, d_head, not even)


@triton.jit
def delta_kernel(out, out_grad, delta, rows, d_head: tl.constexpr, block_m: tl.constexpr):
    """Computes Σ out · gradient of out for each of the B × H × S rows, a term of the softmax's gradient."""
    first_row = tl.program_id(0).to(tl.int64) * block_m
    out_tile = load_rows(out, first_row, d_head, rows, block_m, d_head, True).to(tl.float32)
    grad_tile = load_rows(out_grad, first_row, d_head, rows, block_m, d_head, True).to(tl.float32)
    row = first_row + tl.arange(0, block_m)
    tl.store(delta + row, tl.sum(out_tile * grad_tile, 1), mask=row < rows)


@triton.jit
def key_tiles(
    dk, dv, k_tile, v_tile, q, out_grad, lse, delta, stride, first_key, begin, end, length, scale,
    block_m: tl.constexpr, block_n: tl.constexpr, d_head: tl.constexpr,
    causal: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the rows ``begin`` to ``end`` to the gradients of one tile of keys and values.

    The tiles of scores are transposed, (keys, rows), so that no matmul needs a transposed first operand. Rows past the
    length are zeros in q and in the gradient, so they add nothing.
    """
    for first_query in tl.range(begin, end, block_m):
        q_tile = load_rows(q, first_query, stride, length, block_m, d_head, masked)
        lse_tile = load_numbers(lse, first_query, length, block_m, masked)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=precision)  # (block_n, block_m)
        if masked and causal:
            visible = tl.trans(is_visible(first_query, first_key, length, block_m, block_n, causal))
            scores = tl.where(visible, scores, float("-inf"))
        p = tl.exp2(scores * scale - lse_tile[None, :])
        grad_tile = load_rows(out_grad, first_query, d_head, length, block_m, d_head, masked)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=precision)
        delta_tile = load_numbers(delta, first_query, length, block_m, masked)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=precision)
        ds = p * (dp - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=precision)
    return dk, dv


@triton.jit
def keys_kernel(
    q, k, v, out_grad, lse, delta, dk, dv, stride_batch, stride_head, stride_row, num_heads, length, scale,
    d_head: tl.constexpr, causal: tl.constexpr, even: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of ``block_n`` keys and values of one head.

    The grid is (B × H, tiles of keys). The tiles with the most rows start first.
    """
    head = tl.program_id(0).to(tl.int64)
    first_key = tl.program_id(1) * block_n
    offset = head // num_heads * stride_batch + head % num_heads * stride_head
    q, out_grad = q + offset, out_grad + head * length * d_head
    lse, delta = lse + head * length, delta + head * length
    k_tile = load_rows(k + offset, first_key, stride_row, length, block_n, d_head, not even)
    v_tile = load_rows(v + offset, first_key, stride_row, length, block_n, d_head, not even)
    dk_tile, dv_tile = tl.zeros((block_n, d_head), tl.float32), tl.zeros((block_n, d_head), tl.float32)
    begin = 0
    if causal:
        begin = tl.cdiv(first_key + block_n, block_m) * block_m  # the first row that sees all of these keys, or later
        dk_tile, dv_tile = key_tiles(
            dk_tile, dv_tile, k_tile, v_tile, q, out_grad, lse, delta, stride_row, first_key,
            first_key // block_m * block_m, tl.minimum(begin, length), length, scale,
            block_m, block_n, d_head, causal, True, precision,
        )  # fmt: skip
    plain_end = length // block_m * block_m
    dk_tile, dv_tile = key_tiles(
        dk_tile, dv_tile, k_tile, v_tile, q, out_grad, lse, delta, stride_row, first_key,
        begin, plain_end, length, scale, block_m, block_n, d_head, causal, False, precision,
    )  # fmt: skip
    if not even:
        dk_tile, dv_tile = key_tiles(
            dk_tile, dv_tile, k_tile, v_tile, q, out_grad, lse, delta, stride_row, first_key,
            tl.maximum(begin, plain_end), length, length, scale, block_m, block_n, d_head, causal, True, precision,
        )  # fmt: skip
    dk_tile *= scale * LN_2
    store_rows(dk + head * length * d_head, first_key, length, dk_tile, block_n, d_head, not even)
    store_rows(dv + head * length * d_head, first_key, length, dv_tile, block_n, d_head, not even)


@triton.jit
def query_tiles(
    dq, q_tile, grad_tile, lse_tile, delta_tile, k, v, stride, first_row, begin, end, length, scale,
    block_m: tl.constexpr, block_n: tl.constexpr, d_head: tl.constexpr,
    causal: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the keys ``begin`` to ``end`` to the gradients of one tile of queries."""
    for first_key in tl.range(begin, end, block_n):
        k_tile = load_rows(k, first_key, stride, length, block_n, d_head, masked)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision)
        if masked:
            scores = tl.where(is_visible(first_row, first_key, length, block_m, block_n, causal), scores, float("-inf"))
        p = tl.exp2(scores * scale - lse_tile[:, None])
        v_tile = load_rows(v, first_key, stride, length, block_n, d_head, masked)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=precision)
        ds = p * (dp - delta_tile[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=precision)
    return dq


@triton.jit
def queries_kernel(
    q, k, v, out_grad, lse, delta, dq, stride_batch, stride_head, stride_row, num_heads, length, scale,
    d_head: tl.constexpr, causal: tl.constexpr, even: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of ``block_m`` queries of one head.

    The grid is (B × H, tiles of rows). The tiles with the most keys start first.
    """
    head = tl.program_id(0).to(tl.int64)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_m
    offset, flat = head // num_heads * stride_batch + head % num_heads * stride_head, head * length * d_head
    q_tile = load_rows(q + offset, first_row, stride_row, length, block_m, d_head, not even)
    grad_tile = load_rows(out_grad + flat, first_row, d_head, length, block_m, d_head, not even)
    lse_tile = load_numbers(lse + head * length, first_row, length, block_m, not even)
    delta_tile = load_numbers(delta + head * length, first_row, length, block_m, not even)
    k, v = k + offset, v + offset
    dq_tile = tl.zeros((block_m, d_head), tl.float32)
    plain_end = (first_row if causal else length) // block_n * block_n
    dq_tile = query_tiles(
        dq_tile, q_tile, grad_tile, lse_tile, delta_tile, k, v, stride_row, first_row, 0, plain_end, length, scale,
        block_m, block_n, d_head, causal, False, precision,
    )  # fmt: skip
    if causal or not even:
        end = tl.minimum(first_row + block_m, length) if causal else length
        dq_tile = query_tiles(
            dq_tile, q_tile, grad_tile, lse_tile, delta_tile, k, v, stride_row, first_row, plain_end, end, length,
            scale, block_m, block_n, d_head, causal, True, precision,
        )  # fmt: skip
    store_rows(dq + flat, first_row, length, dq_tile * (scale * LN_2), block_m, d_head, not even)
