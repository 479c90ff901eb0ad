// Ranges (ALGORITHM 2), and the gate's gradient for all options, in one pass over a tensor and its gradient
// (ALGORITHM 3).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "grid.h"
#include "places.h"
#include "ranges.h"
#include "tasks.h"

namespace fractrain_fx {

// The values that a thread takes at a time. Their sum is in float32; the sums of several such blocks add up in float64.
constexpr int64_t kBlock = 4096;

std::tuple<Tensor, Tensor> measure(const Tensor& given, at::IntArrayRef shape) {
  const int64_t rows = c10::multiply_integers(shape);
  // One range for all values does not depend on their order, so a dense tensor is read as it lies.
  const Tensor x = rows == 1 && given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const int64_t columns = x.numel() / rows;
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const float* values = x.const_data_ptr<float>();
  std::vector<Ends> parts(rows * blocks);
  at::parallel_for(0, rows * blocks, std::max<int64_t>(1, 2 * kGrain / std::min(columns, kBlock)),
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

namespace {

// Rounds to the nearest bfloat16, ties to even.
inline float bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

template <bool inside, bool twice>
inline float error(float x, float lo, float scale, float top) {
  const float offset = x - lo;
  float q = std::rint(offset / scale);
  if constexpr (!inside) {
    q = q < 0.0f ? 0.0f : q;
    q = q > top ? top : q;
  }
  q = q * scale;
  if constexpr (twice) q = bfloat16_of(q + lo) - lo;
  return q - offset;
}

template <bool inside, bool twice, bool squared>
float gain(const float* x, const float* g, int64_t count, float lo, float scale, float top) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float part = error<inside, twice>(x[i], lo, scale, top) * g[i];
    sum += squared ? part * part : part;
  }
  return sum;
}

template <bool squared>
auto gain_of(bool inside, bool twice) {
  if (twice) return inside ? gain<true, true, squared> : gain<false, true, squared>;
  return inside ? gain<true, false, squared> : gain<false, false, squared>;
}

// For each entry of the first dimension of x and g, and each of several bits: the sum of g * (Q(x) - x), or of its
// squares, which is 0 for bits that do not round. twice: Q(x) is then rounded to bfloat16.
Tensor gains(const Tensor& given_x, const Tensor& given_g, at::IntArrayRef bits, const Tensor& lo, const Tensor& span,
             bool inside, bool twice, bool squared) {
  // The order of a sum is free, so rows that are contiguous in both tensors are read as they lie.
  std::optional<Places> rows = places_of(given_x, given_g, 1, -1);
  const Tensor x = rows ? given_x : given_x.contiguous(), g = rows ? given_g : given_g.contiguous();
  const Places places = rows ? *rows : *places_of(x, g, 1, -1);
  const int64_t samples = x.size(0), options = bits.size();
  // One task takes a part of a long row, or several short rows.
  const int64_t parts = (places.length + kBlock - 1) / kBlock, together = std::max<int64_t>(1, kBlock / places.length);
  const int64_t blocks = (places.count + together - 1) / together * parts;
  const float *values = x.const_data_ptr<float>(), *upstream = g.const_data_ptr<float>();
  const float low = *lo.const_data_ptr<float>(), wide = *span.const_data_ptr<float>();
  std::vector<float> sums(samples * blocks * options);
  // Of options with equal bits only the first is computed; first_of names it for each option.
  std::vector<int64_t> first_of(options);
  struct Computed {
    int64_t option;
    float scale, top;
  };
  std::vector<Computed> computed;
  for (int64_t option = 0; option < options; ++option) {
    first_of[option] = std::find(bits.begin(), bits.end(), bits[option]) - bits.begin();
    if (first_of[option] != option || !is_rounded(bits[option])) continue;
    computed.push_back({option, scale_of(wide, bits[option]), top_of(bits[option])});
  }
  const auto sum = squared ? gain_of<true>(inside, twice) : gain_of<false>(inside, twice);
  const int64_t values_at_once = std::min(kBlock, places.length) * together;
  const int64_t work = values_at_once * std::max<int64_t>(1, static_cast<int64_t>(computed.size()));
  at::parallel_for(0, samples * blocks, std::max<int64_t>(1, kGrain / work), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t sample = task / blocks, row = task % blocks / parts * together;
      const int64_t begin = task % parts * kBlock, count = std::min(kBlock, places.length - begin);
      const float* x_of = values + sample * x.stride(0) + begin;
      const float* g_of = upstream + sample * g.stride(0) + begin;
      for_places(places, row, std::min(places.count, row + together), [&](int64_t from, int64_t to, const auto&) {
        for (const auto& [option, scale, top] : computed) {
          sums[task * options + option] += sum(x_of + from, g_of + to, count, low, scale, top);
        }
      });
    }
  });
  Tensor found = at::empty({samples, options}, x.options());
  float* result = found.mutable_data_ptr<float>();
  for (int64_t sample = 0; sample < samples; ++sample) {
    for (int64_t option = 0; option < options; ++option) {
      double sum = 0.0;
      for (int64_t block = 0; block < blocks; ++block) {
        sum += sums[(sample * blocks + block) * options + first_of[option]];
      }
      result[sample * options + option] = static_cast<float>(sum);
    }
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("measure(Tensor x, int[] shape) -> (Tensor, Tensor)");
  library.def(
      "gains(Tensor x, Tensor g, int[] bits, Tensor lo, Tensor span, bool inside, bool twice=False, "
      "bool squared=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("measure", measure);
  library.impl("gains", gains);
}

}  // namespace fractrain_fx
