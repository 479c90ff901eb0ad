// The layers of a gate (nn/gates.py) and their gradients, for some samples side by side.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace fractrain_fx {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// Samples that are computed together: every loop over them is one or a few instructions.
constexpr int64_t kSamples = 32;

// Values of these samples side by side, for one feature after the other.
class Lines {
 public:
  explicit Lines(int64_t features) : values_(features * kSamples) {}

  float* operator[](int64_t feature) { return values_.data() + feature * kSamples; }
  const float* operator[](int64_t feature) const { return values_.data() + feature * kSamples; }
  int64_t features() const { return static_cast<int64_t>(values_.size()) / kSamples; }

  // From `count` rows, each of which has the features of one sample; further samples are 0.
  void take(const float* rows, int64_t count) {
    const int64_t length = features();
    for (int64_t i = 0; i < length; ++i) {
      float* line = (*this)[i];
      for (int64_t t = 0; t < count; ++t) line[t] = rows[t * length + i];
      std::fill(line + count, line + kSamples, 0.0f);
    }
  }

  void give(float* rows, int64_t count) const {
    const int64_t length = features();
    for (int64_t i = 0; i < length; ++i) {
      const float* line = (*this)[i];
      for (int64_t t = 0; t < count; ++t) rows[t * length + i] = line[t];
    }
  }

 private:
  std::vector<float> values_;
};

// Calls take(i, t) for all features and samples.
template <class Take>
inline void for_each(int64_t features, Take&& take) {
  for (int64_t i = 0; i < features; ++i) {
#pragma omp simd
    for (int64_t t = 0; t < kSamples; ++t) take(i, t);
  }
}

// A linear layer with its gradients.
struct Layer {
  Tensor weight, bias;
  int64_t outputs, inputs;

  Layer(const Tensor& w, const Tensor& b)
      : weight(w.contiguous()), bias(b.contiguous()), outputs(w.size(0)), inputs(w.size(1)) {}

  // out = weight * in + bias, or added to what out holds.
  void forward(const Lines& in, Lines& out, bool add = false) const {
    const float *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>();
    for (int64_t o = 0; o < outputs; ++o, w += inputs) {
      float sums[kSamples], *to = out[o];
      for (int64_t t = 0; t < kSamples; ++t) sums[t] = b[o] + (add ? to[t] : 0.0f);
      for (int64_t i = 0; i < inputs; ++i) {
        const float* from = in[i];
#pragma omp simd
        for (int64_t t = 0; t < kSamples; ++t) sums[t] += w[i] * from[t];
      }
      std::copy_n(sums, kSamples, to);
    }
  }

  // The gradient of `in`.
  void errors(const Lines& of_out, Lines& of_in) const {
    const float* w = weight.const_data_ptr<float>();
    for (int64_t i = 0; i < inputs; ++i) {
      float sums[kSamples] = {};
      for (int64_t o = 0; o < outputs; ++o) {
        const float *from = of_out[o], each = w[o * inputs + i];
#pragma omp simd
        for (int64_t t = 0; t < kSamples; ++t) sums[t] += each * from[t];
      }
      std::copy_n(sums, kSamples, of_in[i]);
    }
  }

  // Adds the gradients of the weight and of the bias, where the layer's inputs are rows (null: all are 0). Gradients of
  // samples beyond `count` are 0.
  void add_gradients(const Lines& of_out, const float* in, int64_t count, const Tensor& of_weight,
                     const Tensor& of_bias) const {
    float *w = of_weight.mutable_data_ptr<float>(), *b = of_bias.mutable_data_ptr<float>();
    for (int64_t o = 0; o < outputs; ++o, w += inputs) {
      const float* g = of_out[o];
      for (int64_t t = 0; t < count; ++t) b[o] += g[t];
      for (int64_t t = 0; in != nullptr && t < count; t += 4) {
        const auto row = [&](int64_t next) { return in + std::min(t + next, count - 1) * inputs; };
        const float *x0 = row(0), *x1 = row(1), *x2 = row(2), *x3 = row(3);
        const float g0 = g[t], g1 = g[t + 1], g2 = g[t + 2], g3 = g[t + 3];
#pragma omp simd
        for (int64_t i = 0; i < inputs; ++i) w[i] += (g0 * x0[i] + g1 * x1[i]) + (g2 * x2[i] + g3 * x3[i]);
      }
    }
  }
};

// e^x to 2 units in the last place, in a form that becomes vector instructions (coefficients: Cephes' expf).
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float whole = std::rint(x * 1.44269504088896341f);
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  const float value = sum * (r * r) + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return value * power;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
inline float tanh_of(float x) { return 2.0f * sigmoid_of(2.0f * x) - 1.0f; }

inline Tensor rows(const Tensor& like, int64_t features) { return at::empty({like.size(0), features}, like.options()); }

// Rows of a tensor that may be missing, which is as if all were 0.
class Given {
 public:
  explicit Given(const Maybe& x) : x_(x ? std::optional(x->contiguous()) : std::nullopt) {}

  explicit operator bool() const { return x_.has_value(); }

  // The row of a sample; null if all are missing.
  const float* at(int64_t sample) const { return x_ ? x_->const_data_ptr<float>() + sample * x_->size(1) : nullptr; }

  void into(Lines& lines, int64_t first, int64_t count) const { lines.take(at(first), x_ ? count : 0); }

 private:
  Maybe x_;
};

inline void give(const Lines& lines, const Tensor& to, int64_t first, int64_t count) {
  lines.give(to.mutable_data_ptr<float>() + first * lines.features(), count);
}

// Calls take(first, count) for all samples of x, some at a time.
template <class Take>
void for_samples(const Tensor& x, Take&& take) {
  for (int64_t first = 0; first < x.size(0); first += kSamples) take(first, std::min(kSamples, x.size(0) - first));
}

}  // namespace fractrain_fx
