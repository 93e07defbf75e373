// The arithmetic of attention on a CPU, fp32: exponentials, softmax, matmuls row by row and tile by tile.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kStripRows = 4, kStripColumns = 16;  // sums that fit into eight registers of AVX2

// e^x for x <= 0, to about 1e-6 of it: 2^whole by its bits, the rest by the Taylor series. A loop of these is
// vectorised, which a loop of std::exp is not.
inline float exponential(float x) {
  const float t = std::max(x, -87.0f) * 1.44269504f;
  const float whole = std::floor(t + 0.5f), y = (t - whole) * 0.693147181f;
  const float e = 1 + y * (1 + y * (1.0f / 2 + y * (1.0f / 6 + y * (1.0f / 24 + y * (1.0f / 120 + y / 720)))));
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return e * power;
}

inline float largest(const float* x, int64_t count) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < count; ++j) most = x[j] > most ? x[j] : most;
  return most;
}

// x[j] = e^(scale x[j] - shift); returns their sum.
inline float exponentials(float* x, int64_t count, float scale, float shift) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) sum += x[j] = exponential(scale * x[j] - shift);
  return sum;
}

// The softmax of scale x over the first `seen`; zero for the rest, which the mask hides.
inline void softmax(float* x, int64_t seen, int64_t count, float scale) {
  const float sum = exponentials(x, seen, scale, scale * largest(x, seen));
  for (int64_t j = 0; j < seen; ++j) x[j] /= sum;
  std::fill(x + seen, x + count, 0.0f);
}

// scores[j] = q . k[j] for `count` keys, plainly; the pragma lets the compiler add in lanes.
inline void score(float* scores, const float* q, const float* k, int64_t count, int64_t d) {
  for (int64_t j = 0; j < count; ++j) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; ++c) sum += q[c] * k[j * d + c];
    scores[j] = sum;
  }
}

// out = the sum of w[j] v[j] over `count` values, plainly.
inline void weigh(float* out, const float* w, const float* v, int64_t count, int64_t d) {
  std::fill_n(out, d, 0.0f);
  for (int64_t j = 0; j < count; ++j) {
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) out[c] += w[j] * v[j * d + c];
  }
}

// As `score`, four keys at a time: the latency of one sum hides behind three others.
inline void score_by_four(float* scores, const float* q, const float* k, int64_t count, int64_t d) {
  for (int64_t j = 0; j + 4 <= count; j += 4) {
    const float *k0 = k + j * d, *k1 = k0 + d, *k2 = k1 + d, *k3 = k2 + d;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t c = 0; c < d; ++c) {
      s0 += q[c] * k0[c], s1 += q[c] * k1[c], s2 += q[c] * k2[c], s3 += q[c] * k3[c];
    }
    scores[j] = s0, scores[j + 1] = s1, scores[j + 2] = s2, scores[j + 3] = s3;
  }
  const int64_t done = count / 4 * 4;
  score(scores + done, q, k + done * d, count - done, d);
}

// As `weigh`, four values at a time: out is read and written a quarter as often.
inline void weigh_by_four(float* out, const float* w, const float* v, int64_t count, int64_t d) {
  std::fill_n(out, d, 0.0f);
  for (int64_t j = 0; j + 4 <= count; j += 4) {
    const float *v0 = v + j * d, *v1 = v0 + d, *v2 = v1 + d, *v3 = v2 + d;
    const float w0 = w[j], w1 = w[j + 1], w2 = w[j + 2], w3 = w[j + 3];
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) out[c] += w0 * v0[c] + w1 * v1[c] + w2 * v2[c] + w3 * v3[c];
  }
  for (int64_t j = count / 4 * 4; j < count; ++j) {
    for (int64_t c = 0; c < d; ++c) out[c] += w[j] * v[j * d + c];
  }
}

// A matrix in memory: the distance between its rows is `stride`.
template <typename Number>
struct Matrix {
  Number* data;
  int64_t stride;
  Number* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};

// kStripRows x kStripColumns of out += a b: the sums stay in registers while `inner` passes by.
inline void add_strip(Matrix<float> out, Matrix<const float> a, Matrix<const float> b, int64_t inner) {
  float sum[kStripRows][kStripColumns] = {};
  for (int64_t c = 0; c < inner; ++c) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < kStripRows; ++r) {
#pragma omp simd
      for (int64_t l = 0; l < kStripColumns; ++l) sum[r][l] += *a.at(r, c) * *b.at(c, l);
    }
  }
  for (int64_t r = 0; r < kStripRows; ++r) {
    for (int64_t l = 0; l < kStripColumns; ++l) *out.at(r, l) += sum[r][l];
  }
}

// out (rows, columns) += a (rows, inner) b (inner, columns), strip by strip, the edges plainly.
inline void add_product(Matrix<float> out, Matrix<const float> a, Matrix<const float> b, int64_t rows, int64_t inner,
                        int64_t columns) {
  for (int64_t i = 0; i < rows; i += kStripRows) {
    for (int64_t j = 0; j < columns; j += kStripColumns) {
      if (i + kStripRows <= rows && j + kStripColumns <= columns) {
        add_strip({out.at(i, j), out.stride}, {a.at(i, 0), a.stride}, {b.at(0, j), b.stride}, inner);
        continue;
      }
      for (int64_t r = i; r < std::min(i + kStripRows, rows); ++r) {
        for (int64_t c = 0; c < inner; ++c) {
          for (int64_t l = j; l < std::min(j + kStripColumns, columns); ++l) *out.at(r, l) += *a.at(r, c) * *b.at(c, l);
        }
      }
    }
  }
}

}  // namespace
