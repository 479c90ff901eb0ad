// The gradient of the input of a linear layer and of a convolution. The weight's scales lie along the dimension that is
// summed over, so they are multiplied into the output's gradient, which is then encoded in 16 bits.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "numbers.h"
#include "products.h"
#include "windows.h"

namespace fractrain_fx {
namespace {

// Lanes in which the values of a row are summed.
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
        in_lanes(columns, [&](int lane, int64_t i) {
          const float value = step * static_cast<float>(x[i]) + start, size = std::fabs(value * s[i]);
          most[lane] = size > most[lane] ? size : most[lane];
          sums[lane] += value * z[i];
        });
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

// The encoded gradient for both products below. g holds codes, with a scale and a zero for each row, or float values.
FixedPoint fixed_point_of(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
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

Tensor product_of_numbers(const Tensor& numbers, const Tensor& units, const Tensor& w, const Tensor& offsets) {
  const Tensor one = at::ones({1}, at::kFloat), none = at::zeros({1}, at::kFloat);
  return code_product(numbers, units, none, w, one, none, offsets, {});
}

// g @ (w_scale * w + w_zero), with one w_scale and one w_zero for each row of w.
Tensor error_product(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
                     const Tensor& w, const Tensor& w_scale, const Tensor& w_zero) {
  const FixedPoint h = fixed_point_of(g, g_scale, g_zero, w_scale, w_zero, 1);
  return product_of_numbers(h.codes, h.units, w, h.offsets);
}

// The same for a convolution at stride 1 whose output has these sizes. `padding` is that of g: kernel - 1 less the
// padding of the convolution. Each row of w holds a kernel, channels innermost. A code is copied into several rows of
// windows, so all rows of a sample share one unit.
Tensor window_errors(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
                     const Tensor& w, const Tensor& w_scale, const Tensor& w_zero, at::IntArrayRef sizes,
                     at::IntArrayRef kernel, at::IntArrayRef padding) {
  const int64_t places = c10::multiply_integers(sizes), samples = g.size(0) / places, outputs = g.size(1);
  const FixedPoint h = fixed_point_of(g, g_scale, g_zero, w_scale, w_zero, places);
  const Windows of(samples, outputs, sizes, kernel, padding), of_one(samples, 1, sizes, kernel, padding);
  const auto nothing = [](int64_t) { return int16_t{0}; };
  const Tensor rows = rows_of(h.codes.const_data_ptr<int16_t>(), of, h.codes.options(), nothing);
  const auto zero = [](int64_t) { return 0.0f; };
  const Tensor offsets = rows_of(h.offsets.const_data_ptr<float>(), of_one, h.offsets.options(), zero).sum(1);
  // The gradient of the input is a convolution with the flipped kernel.
  const Tensor turned = w.view({outputs, c10::multiply_integers(kernel), -1}).flip({1}).movedim(0, 1).flatten(0, 1);
  return product_of_numbers(rows, h.units, turned, offsets);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "error_product(Tensor g, Tensor? g_scale, Tensor? g_zero, Tensor w, Tensor w_scale, Tensor w_zero) -> Tensor");
  library.def(
      "window_errors(Tensor g, Tensor? g_scale, Tensor? g_zero, Tensor w, Tensor w_scale, Tensor w_zero, int[] sizes, "
      "int[] kernel, int[] padding) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("error_product", error_product);
  library.impl("window_errors", window_errors);
}

}  // namespace fractrain_fx
