// Ranges (ALGORITHM 2), and the gate's gradient for all options in one look at a tensor and its gradient (ALGORITHM 3).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "grid.h"
#include "ranges.h"

namespace fractrain_fx {
namespace {

using at::Tensor;

// Values that are summed up in float32 before they go into float64, and that one thread takes at a time.
constexpr int64_t kBlock = 4096;

// Low end and width of the range of each entry of the first dimension, or of all values, in a given shape
// (formats/affine.py, measure).
std::tuple<Tensor, Tensor> measure(const Tensor& given, at::IntArrayRef shape) {
  const int64_t rows = c10::multiply_integers(shape);
  // Values that fill their memory without gaps have one range in whatever order.
  const Tensor x = rows == 1 && given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const int64_t columns = x.numel() / rows;
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const float* values = x.const_data_ptr<float>();
  std::vector<Ends> parts(rows * blocks);
  at::parallel_for(0, rows * blocks, std::max<int64_t>(1, 4 * kBlock / std::min(columns, kBlock)),
                   [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % blocks * kBlock;
      parts[task] = ends_of(values + task / blocks * columns + begin, std::min(kBlock, columns - begin));
    }
  });
  Tensor lowest = at::empty(shape, x.options()), widest = at::empty(shape, x.options());
  float *lowest_at = lowest.mutable_data_ptr<float>(), *widest_at = widest.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    auto [lo, hi] = parts[row * blocks];
    for (int64_t task = row * blocks; task < (row + 1) * blocks; ++task) {
      lo = std::isnan(parts[task].lo) || parts[task].lo < lo ? parts[task].lo : lo;
      hi = std::isnan(parts[task].hi) || parts[task].hi > hi ? parts[task].hi : hi;
    }
    lowest_at[row] = lo;
    widest_at[row] = width_of({lo, hi});
  }
  return {lowest, widest};
}

template <bool inside>
inline float error(float offset, float scale, float top) {
  float q = std::rint(offset / scale);
  if constexpr (!inside) {
    q = q < 0.0f ? 0.0f : q;
    q = q > top ? top : q;
  }
  q = q * scale;
  return q - offset;
}

template <bool inside>
float gain(const float* x, const float* g, int64_t count, float lo, float scale, float top) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += error<inside>(x[i] - lo, scale, top) * g[i];
  return sum;
}

// For each row of contiguous x and g, and each of several bits: the sum of g * (Q(x) - x), 0 where nothing is rounded.
Tensor gains(const Tensor& x, const Tensor& g, at::IntArrayRef bits, const Tensor& lo, const Tensor& span,
             bool inside) {
  const int64_t rows = x.size(0), columns = x.size(1), options = bits.size();
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const float *values = x.const_data_ptr<float>(), *upstream = g.const_data_ptr<float>();
  const float low = *lo.const_data_ptr<float>(), wide = *span.const_data_ptr<float>();
  std::vector<float> sums(rows * blocks * options);
  // The place of the first of equal bits.
  std::vector<int64_t> first_of(options);
  for (int64_t option = 0; option < options; ++option) {
    first_of[option] = std::find(bits.begin(), bits.end(), bits[option]) - bits.begin();
  }
  const auto computed = [&](int64_t option) { return first_of[option] == option && is_rounded(bits[option]); };
  at::parallel_for(0, rows * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % blocks * kBlock;
      const int64_t place = task / blocks * columns + begin;
      const int64_t count = std::min(kBlock, columns - begin);
      for (int64_t option = 0; option < options; ++option) {
        if (!computed(option)) continue;
        const auto sum = inside ? gain<true> : gain<false>;
        const float scale = scale_of(wide, bits[option]), top = top_of(bits[option]);
        sums[task * options + option] = sum(values + place, upstream + place, count, low, scale, top);
      }
    }
  });
  Tensor found = at::empty({rows, options}, x.options());
  float* result = found.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t option = 0; option < options; ++option) {
      double sum = 0.0;
      for (int64_t block = 0; block < blocks; ++block) {
        sum += sums[(row * blocks + block) * options + first_of[option]];
      }
      result[row * options + option] = static_cast<float>(sum);
    }
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("measure(Tensor x, int[] shape) -> (Tensor, Tensor)");
  library.def("gains(Tensor x, Tensor g, int[] bits, Tensor lo, Tensor span, bool inside) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("measure", measure);
  library.impl("gains", gains);
}

}  // namespace fractrain_fx
