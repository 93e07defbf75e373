// Attention on a CPU in four ways, forward only: softmax(q k^T / sqrt(d)) v.
//
// q, k, v and the result have the shape (B, H, N, d), are contiguous and fp32. All four run on every thread that
// PyTorch uses and share the exponential of attention_cpu.h; they differ in what they store and in the order they go
// in. blocked and flash share their matmuls too: between these two, memory makes the difference. Every temporary is a
// tensor, allocated before the threads start, so that PyTorch's memory events count it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_cpu.h"

namespace {

using at::Tensor;

constexpr int64_t kTile = 64;  // queries and keys in a tile: at d 64 its q, k, v and scores are 64 KiB together

struct Problem {
  const float *q, *k, *v;
  int64_t batch, heads, n, d;
  float scale;
  bool causal;

  Problem(const Tensor& q_, const Tensor& k_, const Tensor& v_, bool causal_) : causal(causal_) {
    for (const Tensor* x : {&q_, &k_, &v_}) {
      TORCH_CHECK(x->device().is_cpu() && x->scalar_type() == at::kFloat, "q, k and v must be fp32 on the CPU");
      TORCH_CHECK(x->dim() == 4 && x->sizes() == q_.sizes(), "q, k and v must have one shape (B, H, N, d)");
      TORCH_CHECK(x->is_contiguous(), "q, k and v must be contiguous");
    }
    q = q_.const_data_ptr<float>(), k = k_.const_data_ptr<float>(), v = v_.const_data_ptr<float>();
    batch = q_.size(0), heads = q_.size(1), n = q_.size(2), d = q_.size(3);
    scale = 1.0f / std::sqrt(static_cast<float>(d));
  }

  int64_t rows() const { return batch * heads * n; }
  int64_t tiles() const { return batch * heads * tiles_of_head(); }
  int64_t tiles_of_head() const { return (n + kTile - 1) / kTile; }
  // Where the keys and values of a query's head start.
  int64_t head_of(int64_t row) const { return row / n * n * d; }
  // How many keys a query sees.
  int64_t seen_by(int64_t row) const { return causal ? row % n + 1 : n; }
};

// A tile of queries: the first row of its head, its own first row in that head, and how many rows it has.
struct Tile {
  int64_t head, begin, rows;

  Tile(const Problem& p, int64_t index)
      : head(index / p.tiles_of_head() * p.n),
        begin(index % p.tiles_of_head() * kTile),
        rows(std::min(kTile, p.n - begin)) {}
};

// The scores of a tile of queries against `columns` keys from `key` on; `turned` (d, kTile) takes the keys transposed,
// so that the matmul runs along them without a sum across lanes.
void score_tile(Matrix<float> scores, const Problem& p, const Tile& tile, int64_t key, int64_t columns, float* turned) {
  const float *q = p.q + (tile.head + tile.begin) * p.d, *k = p.k + (tile.head + key) * p.d;
  for (int64_t c = 0; c < p.d; ++c) {
    for (int64_t j = 0; j < columns; ++j) turned[c * kTile + j] = k[j * p.d + c];
  }
  for (int64_t r = 0; r < tile.rows; ++r) std::fill_n(scores.at(r, 0), columns, 0.0f);
  add_product(scores, {q, p.d}, {turned, kTile}, tile.rows, p.d, columns);
}

// Three passes over all scores, (B, H, N, N), in plain loops. The mask comes after the scores: none is spared.
Tensor naive(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const Problem p(q, k, v, causal);
  const Tensor scores = at::empty({p.batch, p.heads, p.n, p.n}, q.options()), out = at::empty_like(q);
  float *s = scores.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
#pragma omp parallel num_threads(at::get_num_threads())
  {
#pragma omp for
    for (int64_t row = 0; row < p.rows(); ++row) score(s + row * p.n, p.q + row * p.d, p.k + p.head_of(row), p.n, p.d);
#pragma omp for
    for (int64_t row = 0; row < p.rows(); ++row) softmax(s + row * p.n, p.seen_by(row), p.n, p.scale);
#pragma omp for
    for (int64_t row = 0; row < p.rows(); ++row) weigh(o + row * p.d, s + row * p.n, p.v + p.head_of(row), p.n, p.d);
  }
  return out;
}

// As `naive`, with both matmuls tile by tile out of the cache.
Tensor blocked(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const Problem p(q, k, v, causal);
  const Tensor scores = at::empty({p.batch, p.heads, p.n, p.n}, q.options()), out = at::empty_like(q);
  const Tensor buffers = at::empty({at::get_num_threads(), p.d, kTile}, q.options());
  float *s = scores.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
  float* turned = buffers.mutable_data_ptr<float>();
#pragma omp parallel num_threads(at::get_num_threads())
  {
#pragma omp for
    for (int64_t index = 0; index < p.tiles(); ++index) {
      const Tile tile(p, index);
      for (int64_t j = 0; j < p.n; j += kTile) {
        const Matrix<float> mine{s + (tile.head + tile.begin) * p.n + j, p.n};
        score_tile(mine, p, tile, j, std::min(kTile, p.n - j), turned + omp_get_thread_num() * p.d * kTile);
      }
    }
#pragma omp for
    for (int64_t row = 0; row < p.rows(); ++row) softmax(s + row * p.n, p.seen_by(row), p.n, p.scale);
#pragma omp for
    for (int64_t index = 0; index < p.tiles(); ++index) {
      const Tile tile(p, index);
      const int64_t row = tile.head + tile.begin;
      std::fill_n(o + row * p.d, tile.rows * p.d, 0.0f);
      for (int64_t j = 0; j < p.n; j += kTile) {
        const Matrix<const float> weights{s + row * p.n + j, p.n}, values{p.v + (tile.head + j) * p.d, p.d};
        add_product({o + row * p.d, p.d}, weights, values, tile.rows, std::min(kTile, p.n - j), p.d);
      }
    }
  }
  return out;
}

// The three passes one query at a time: a thread holds the scores of one, in its nearest cache, and none that the mask
// hides.
Tensor fused(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const Problem p(q, k, v, causal);
  const Tensor scores = at::empty({at::get_num_threads(), p.n}, q.options()), out = at::empty_like(q);
  float *s = scores.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
#pragma omp parallel for num_threads(at::get_num_threads()) schedule(dynamic, 16)
  for (int64_t row = 0; row < p.rows(); ++row) {
    float* mine = s + omp_get_thread_num() * p.n;
    const int64_t seen = p.seen_by(row);
    score_by_four(mine, p.q + row * p.d, p.k + p.head_of(row), seen, p.d);
    softmax(mine, seen, seen, p.scale);
    weigh_by_four(o + row * p.d, mine, p.v + p.head_of(row), seen, p.d);
  }
  return out;
}

// One tile of queries: tile after tile of keys, with a running maximum and sum of each query's softmax. `buffer` takes
// the tile's keys, its scores, the maxima and the sums.
void flash_tile(float* out, const Problem& p, const Tile& tile, float* buffer) {
  float *scores = buffer + p.d * kTile, *most = scores + kTile * kTile, *sum = most + kTile;
  std::fill_n(out, tile.rows * p.d, 0.0f);
  std::fill_n(most, tile.rows, -INFINITY);
  std::fill_n(sum, tile.rows, 0.0f);
  const int64_t end = p.causal ? tile.begin + tile.rows : p.n;
  for (int64_t j = 0; j < end; j += kTile) {
    const int64_t columns = std::min(kTile, p.n - j);
    score_tile({scores, kTile}, p, tile, j, columns, buffer);
    for (int64_t r = 0; r < tile.rows; ++r) {
      float* mine = scores + r * kTile;
      const int64_t seen = p.causal ? std::min(columns, tile.begin + r - j + 1) : columns;
      const float before = most[r];
      most[r] = std::max(before, p.scale * largest(mine, seen));
      const float keep = exponential(before - most[r]);
      sum[r] = keep * sum[r] + exponentials(mine, seen, p.scale, most[r]);
      std::fill(mine + seen, mine + columns, 0.0f);
      for (int64_t c = 0; c < p.d; ++c) out[r * p.d + c] *= keep;
    }
    add_product({out, p.d}, {scores, kTile}, {p.v + (tile.head + j) * p.d, p.d}, tile.rows, columns, p.d);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t c = 0; c < p.d; ++c) out[r * p.d + c] /= sum[r];
  }
}

// The online softmax of Milakov and Gimelshein (arXiv:1805.02867) over tiles, as in FlashAttention (arXiv:2205.14135):
// a thread holds one tile of scores, however many tokens there are, and skips the tiles that the mask hides.
Tensor flash(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const Problem p(q, k, v, causal);
  const int64_t each = kTile * (p.d + kTile + 2);
  const Tensor buffers = at::empty({at::get_num_threads(), each}, q.options()), out = at::empty_like(q);
  float *b = buffers.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
#pragma omp parallel for num_threads(at::get_num_threads()) schedule(dynamic)
  for (int64_t index = 0; index < p.tiles(); ++index) {
    const Tile tile(p, index);
    flash_tile(o + (tile.head + tile.begin) * p.d, p, tile, b + omp_get_thread_num() * each);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(nsys_analyze_attention, library) {
  library.def("naive(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor", &naive);
  library.def("blocked(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor", &blocked);
  library.def("fused(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor", &fused);
  library.def("flash(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor", &flash);
}
