// The gradient of an output times the weight's scales, which lie along the dimension that is summed over, encoded in 16
// bits.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "numbers.h"

namespace fractrain_fx {

// Lanes in which the values of a row are summed.
constexpr int kLanes = 16;

struct FixedPoint {
  Tensor codes, units, offsets;
};

// Encodes h = (g_scale * g + g_zero) * scale in whole numbers of at most 32767: h = unit * code, with one unit for each
// run of `run` rows. The offset of a row is its product (g_scale * g + g_zero) @ zero; it is not finite if a value of
// the row is not.
template <class Given>
FixedPoint fixed_point(const Tensor& given, const Numbers& g_scale, const Numbers& g_zero, const Tensor& scale,
                       const Tensor& zero, int64_t run) {
  constexpr float kLargest = 32767.0f;
  constexpr float kSmallestUnit = 1e-30f;  // far below any gradient, and its reciprocal far from the end of float32
  const Tensor g = given.contiguous(), scales = scale.contiguous(), zeros = zero.contiguous();
  const int64_t rows = g.size(0), columns = g.size(1);
  const auto floats = g.options().dtype(at::kFloat);
  FixedPoint found{at::empty({rows, columns}, g.options().dtype(at::kShort)), at::empty({rows / run}, floats),
                   at::empty({rows}, floats)};
  const Given* values = g.const_data_ptr<Given>();
  const float *s = scales.const_data_ptr<float>(), *z = zeros.const_data_ptr<float>();
  int16_t* codes = found.codes.mutable_data_ptr<int16_t>();
  float *units = found.units.mutable_data_ptr<float>(), *offsets = found.offsets.mutable_data_ptr<float>();
  const int64_t worth = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns * run));
  at::parallel_for(0, rows / run, worth, [&](int64_t begin, int64_t end) {
    for (int64_t each = begin; each < end; ++each) {
      float largest = 0.0f;
      for (int64_t row = each * run; row < (each + 1) * run; ++row) {
        const Given* x = values + row * columns;
        const float step = g_scale[row], start = g_zero[row];
        float most[kLanes] = {}, sums[kLanes] = {};
        for (int64_t i = 0; i < columns; i += kLanes) {
          const int64_t lanes = std::min<int64_t>(kLanes, columns - i);
          const auto take = [&](int64_t lane) {
            const float value = step * static_cast<float>(x[i + lane]) + start, size = std::fabs(value * s[i + lane]);
            most[lane] = size > most[lane] ? size : most[lane];
            sums[lane] += value * z[i + lane];
          };
          if (lanes == kLanes) {
#pragma omp simd
            for (int64_t lane = 0; lane < kLanes; ++lane) take(lane);
          } else {
            for (int64_t lane = 0; lane < lanes; ++lane) take(lane);
          }
        }
        largest = std::max(largest, *std::max_element(most, most + kLanes));
        offsets[row] = std::accumulate(sums, sums + kLanes, 0.0f);
      }
      const float unit = std::max(largest / kLargest, kSmallestUnit), steps = 1.0f / unit;
      for (int64_t row = each * run; row < (each + 1) * run; ++row) {
        const Given* x = values + row * columns;
        const float step = g_scale[row], start = g_zero[row];
        int16_t* code = codes + row * columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          const float value = step * static_cast<float>(x[i]) + start;
          code[i] = static_cast<int16_t>(static_cast<int32_t>(std::rint(value * s[i] * steps)));
        }
      }
      units[each] = unit;
    }
  });
  return found;
}

// The encoded gradient. g holds codes, with a scale and a zero for each row, or float values.
inline FixedPoint fixed_point_of(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
                          const Tensor& w_scale, const Tensor& w_zero, int64_t run) {
  const int64_t rows = g.size(0);
  const bool coded = g.scalar_type() != at::kFloat;
  TORCH_CHECK(coded == g_scale.has_value() && coded == g_zero.has_value(),
              "expected codes with scales and zeros, or float values");
  check_numbers(g_scale, rows);
  check_numbers(g_zero, rows);
  const Tensor one = at::ones({1}, at::kFloat);
  const Numbers scale(coded ? *g_scale : one, rows), zero(g_zero, rows);
  const auto with = [&](auto kind) { return fixed_point<decltype(kind)>(g, scale, zero, w_scale, w_zero, run); };
  return !coded ? with(float()) : g.scalar_type() == at::kShort ? with(int16_t()) : with(int8_t());
}

}  // namespace fractrain_fx
