// Rounding in one pass over memory, where plain operations take three and more (ALGORITHM 2).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/TensorIterator.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "grid.h"

namespace fractrain_fx {
namespace {

using at::Tensor;
using Yes = std::true_type;
using No = std::false_type;

// Uniform in -0.5..0.5 from a position and a seed: what formats/noise.py hashes in compiled graphs.
inline float noise_at(uint32_t position, uint32_t low, uint32_t high) {
  uint32_t h = position ^ low;
  h = (h ^ (h >> 16)) * 0x7FEB352Du + high;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return static_cast<float>(static_cast<int32_t>(h) >> 8) * 0x1p-24f;
}

enum Operand { kOut, kX, kLo, kScale, kTop, kOperands };

struct Noise {
  const float* first;  // of the values, from which positions in memory count
  uint32_t low, high;
};

// noisy: noise is added to the level. inside: nothing lies outside the range, and a bad value shows in it.
// levels: the result is the level, not its value.
template <bool noisy, bool inside, bool levels>
inline float rounded(float x, float lo, float scale, float top, uint32_t position, const Noise& noise) {
  float q = (x - lo) / scale;
  if constexpr (noisy) q += noise_at(position, noise.low, noise.high);
  q = q < 0.0f ? 0.0f : q;
  q = std::rint(q > top ? top : q);
  if constexpr (levels) return q;
  q = q * scale;
  q += lo;
  if constexpr (!inside) q += 0.0f * x;  // an infinite value, which the ends hide, is NaN
  return q;
}

// The innermost two dimensions, of any strides (in bytes). A highest level of 0 leaves values as they are.
template <bool noisy, bool inside, bool levels>
void round_plane(char** data, const int64_t* strides, int64_t columns, int64_t rows, const Noise& noise) {
  constexpr int64_t size = sizeof(float);
  const bool dense = strides[kOut] == size && strides[kX] == size && strides[kTop] == 0;
  const bool same_grid = strides[kLo] == 0 && strides[kScale] == 0;
  const bool each_grid = strides[kLo] == size && strides[kScale] == size;
  for (int64_t row = 0; row < rows; ++row) {
    const auto at = [&](int which, int64_t column) {
      return reinterpret_cast<float*>(data[which] + row * strides[kOperands + which] + column * strides[which]);
    };
    float* out = at(kOut, 0);
    const float *x = at(kX, 0), *lo = at(kLo, 0), *scale = at(kScale, 0);
    const float top = *at(kTop, 0);
    const uint32_t position = static_cast<uint32_t>(x - noise.first);
    if (dense && top == 0.0f) {
      if (out != x) std::copy(x, x + columns, out);
    } else if (dense && same_grid) {
      const float low = *lo, step = *scale;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = rounded<noisy, inside, levels>(x[i], low, step, top, position + static_cast<uint32_t>(i), noise);
      }
    } else if (dense && each_grid) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = rounded<noisy, inside, levels>(x[i], lo[i], scale[i], top, position + static_cast<uint32_t>(i), noise);
      }
    } else {
      for (int64_t i = 0; i < columns; ++i) {
        float* target = at(kOut, i);
        const float value = *at(kX, i), highest = *at(kTop, i);
        const uint32_t place = static_cast<uint32_t>(at(kX, i) - noise.first);
        *target = highest == 0.0f
                      ? value
                      : rounded<noisy, inside, levels>(value, *at(kLo, i), *at(kScale, i), highest, place, noise);
      }
    }
  }
}

template <bool noisy, bool inside, bool levels>
void round_all(at::TensorIterator& iterator, const Noise& noise) {
  iterator.for_each([&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
    round_plane<noisy, inside, levels>(data, strides, columns, rows, noise);
  });
}

enum Outcome : int64_t { kUnrounded, kRounded, kRefused };

// Distance between levels for each of some bits, of whose highest levels top is, or for each of some ranges. Where bits
// round nothing it is not read.
Tensor scales(const Tensor& widths, const Tensor& top, const Tensor& spans) {
  if (spans.numel() > 1 && widths.numel() > 1) return spans.div(top.clamp_min(1.0)).clamp_min_(kSmallestScale);
  const bool one_span = spans.numel() == 1, one_width = widths.numel() == 1;
  Tensor scale = at::empty(one_span ? widths.sizes() : spans.sizes(), spans.options());
  const int64_t* width = widths.const_data_ptr<int64_t>();
  const float* wide = spans.const_data_ptr<float>();
  float* step = scale.mutable_data_ptr<float>();
  for (int64_t i = 0; i < scale.numel(); ++i) {
    const int64_t bits = width[one_width ? 0 : i];
    step[i] = is_rounded(bits) ? scale_of(wide[one_span ? 0 : i], bits) : 1.0f;
  }
  return scale;
}

// Rounds values, which may be out itself, to bits (whole numbers) in a range. Bits and range broadcast against them.
// Where all bits are 0 or 32, and where differences inside the range may overflow, nothing is written.
int64_t round_affine(const Tensor& given, const Tensor& bits, const Tensor& lo, const Tensor& span,
                     std::optional<int64_t> seed, bool inside, bool levels, Tensor& out) {
  const Tensor widths = bits.to(at::kLong).contiguous(), spans = span.contiguous();
  const int64_t *width = widths.const_data_ptr<int64_t>();
  const float* wide = spans.const_data_ptr<float>();
  if (std::none_of(width, width + widths.numel(), is_rounded)) return kUnrounded;
  const auto modest = [](float each) { return each < kWide; };
  if (!std::all_of(wide, wide + spans.numel(), modest)) return kRefused;
  Tensor top = at::empty(widths.sizes(), spans.options());
  float* highest = top.mutable_data_ptr<float>();
  std::transform(width, width + widths.numel(), highest,
                 [](int64_t each) { return is_rounded(each) ? top_of(each) : 0.0f; });
  const Tensor scale = scales(widths, top, spans);
  // Noise belongs to a place in memory, which is one value's own only where values fill theirs.
  const Tensor x = !seed || given.is_non_overlapping_and_dense() ? given : given.contiguous();
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .resize_outputs(false)
                      .add_output(out)
                      .add_const_input(x)
                      .add_const_input(lo)
                      .add_const_input(scale)
                      .add_const_input(top)
                      .build();
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  const Noise noise{x.const_data_ptr<float>(), static_cast<uint32_t>(drawn & 0x7FFFFFFF),
                    static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  const auto run = [&](auto noisy, auto in, auto as_levels) {
    round_all<decltype(noisy)::value, decltype(in)::value, decltype(as_levels)::value>(iterator, noise);
  };
  const auto choose = [&](auto noisy, auto in) { levels ? run(noisy, in, Yes{}) : run(noisy, in, No{}); };
  const auto with_noise = [&](auto noisy) { inside ? choose(noisy, Yes{}) : choose(noisy, No{}); };
  seed ? with_noise(Yes{}) : with_noise(No{});
  return kRounded;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "round_affine(Tensor x, Tensor bits, Tensor lo, Tensor span, int? seed, bool inside, bool levels, *, "
      "Tensor(a!) out) -> int");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("round_affine", round_affine); }

}  // namespace fractrain_fx
