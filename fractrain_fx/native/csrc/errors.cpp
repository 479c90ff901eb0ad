// What goes back through a weight: its scales lie on the dimension that is summed over, so that they go into the
// gradient, which becomes whole numbers of 16 bits.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "products.h"

namespace fractrain_fx {
namespace {

// The lanes in which a row is summed up.
constexpr int kLanes = 16;

template <class Take>
void in_lanes(int64_t count, Take&& take) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, i + lane);
  }
  for (; i < count; ++i) take(0, i);
}

struct FixedPoint {
  Tensor codes, units, offsets;
};

// Each row of g_scale * g + g_zero times scale as whole numbers of up to 32767, the unit in which they are, and the
// row's product with zero, which is no number where the row has something that is none.
template <class Given>
FixedPoint fixed_point(const Tensor& given, const Numbers& g_scale, const Numbers& g_zero, const Tensor& scale,
                       const Tensor& zero) {
  constexpr float kLargest = 32767.0f;
  constexpr float kSmallestUnit = 1e-30f;  // far below any gradient, and its reciprocal far from the end of float32
  const Tensor g = given.contiguous(), scales = scale.contiguous(), zeros = zero.contiguous();
  const int64_t rows = g.size(0), columns = g.size(1);
  const auto floats = g.options().dtype(at::kFloat);
  FixedPoint found{at::empty({rows, columns}, g.options().dtype(at::kShort)), at::empty({rows}, floats),
                   at::empty({rows}, floats)};
  const Given* values = g.const_data_ptr<Given>();
  const float *s = scales.const_data_ptr<float>(), *z = zeros.const_data_ptr<float>();
  int16_t* codes = found.codes.mutable_data_ptr<int16_t>();
  float *units = found.units.mutable_data_ptr<float>(), *offsets = found.offsets.mutable_data_ptr<float>();
  const int64_t worth = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
  at::parallel_for(0, rows, worth, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Given* x = values + row * columns;
      const float step = g_scale[row], start = g_zero[row];
      int16_t* code = codes + row * columns;
      float most[kLanes] = {}, sums[kLanes] = {};
      in_lanes(columns, [&](int lane, int64_t i) {
        const float value = step * static_cast<float>(x[i]) + start, size = std::fabs(value * s[i]);
        most[lane] = size > most[lane] ? size : most[lane];
        sums[lane] += value * z[i];
      });
      const float unit = std::max(*std::max_element(most, most + kLanes) / kLargest, kSmallestUnit);
      const float steps = 1.0f / unit;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const float value = step * static_cast<float>(x[i]) + start;
        code[i] = static_cast<int16_t>(static_cast<int32_t>(std::rint(value * s[i] * steps)));
      }
      float offset = 0.0f;
      for (const float sum : sums) offset += sum;
      units[row] = unit;
      offsets[row] = offset;
    }
  });
  return found;
}

// g @ (w_scale * w + w_zero), where w_scale and w_zero are numbers of the rows of w. g may be codes with scales and zeros
// of rows, or values.
Tensor error_product(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
                     const Tensor& w, const Tensor& w_scale, const Tensor& w_zero) {
  const int64_t rows = g.size(0);
  const bool coded = g.scalar_type() != at::kFloat;
  TORCH_CHECK(coded == g_scale.has_value() && coded == g_zero.has_value(), "expected codes with scales, or values");
  check_numbers(g_scale, rows);
  check_numbers(g_zero, rows);
  const Tensor one = at::ones({1}, at::kFloat), none = at::zeros({1}, at::kFloat);
  const Numbers scale(coded ? *g_scale : one, rows), zero(g_zero, rows);
  const auto run = [&](auto kind) { return fixed_point<decltype(kind)>(g, scale, zero, w_scale, w_zero); };
  const FixedPoint h = !coded ? run(float()) : g.scalar_type() == at::kShort ? run(int16_t()) : run(int8_t());
  return code_product(h.codes, h.units, none, w, one, none, h.offsets, {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "error_product(Tensor g, Tensor? g_scale, Tensor? g_zero, Tensor w, Tensor w_scale, Tensor w_zero) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("error_product", error_product); }

}  // namespace fractrain_fx
