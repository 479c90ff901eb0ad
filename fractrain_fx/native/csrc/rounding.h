// What rounds one value, and what all values of a tensor are rounded by (ALGORITHM 2).

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "grid.h"

namespace fractrain_fx {

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

struct Noise {
  const float* first;  // of the values, from which positions in memory count
  uint32_t low, high;
};

// The number of a level. noisy: noise is added before rounding.
template <bool noisy>
inline float level(float x, float lo, float scale, float top, uint32_t position, const Noise& noise) {
  float q = (x - lo) / scale;
  if constexpr (noisy) q += noise_at(position, noise.low, noise.high);
  q = q < 0.0f ? 0.0f : q;
  return std::rint(q > top ? top : q);
}

// The value of a level, to which x was rounded. inside: nothing lies outside the range, and a bad value shows in it.
template <bool inside>
inline float value_of(float q, float x, float lo, float scale) {
  float value = q * scale;
  value += lo;
  if constexpr (!inside) value += 0.0f * x;  // an infinite value, which the ends hide, is NaN
  return value;
}

enum Outcome : int64_t { kUnrounded, kRounded, kRefused };

// Distance between levels for each of some bits, of whose highest levels top is, or for each of some ranges. Where bits
// round nothing it is not read.
inline Tensor scales(const Tensor& widths, const Tensor& top, const Tensor& spans) {
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

// How a tensor is rounded.
struct Rounding {
  Outcome outcome;    // nothing can be done where all bits are 0 or 32, or differences in a range may overflow
  Tensor scale, top;  // broadcast against it; a highest level of 0 leaves values as they are
  Tensor x;           // its values, where noise can be told from their places in memory
  Noise noise;
};

// Bits are whole numbers; they and the range broadcast against the values.
inline Rounding rounding_of(const Tensor& given, const Tensor& bits, const Tensor& span, std::optional<int64_t> seed) {
  const Tensor widths = bits.to(at::kLong).contiguous(), spans = span.contiguous();
  const int64_t *width = widths.const_data_ptr<int64_t>();
  const float* wide = spans.const_data_ptr<float>();
  if (std::none_of(width, width + widths.numel(), is_rounded)) return {kUnrounded, {}, {}, {}, {}};
  const auto modest = [](float each) { return each < kWide; };
  if (!std::all_of(wide, wide + spans.numel(), modest)) return {kRefused, {}, {}, {}, {}};
  Tensor top = at::empty(widths.sizes(), spans.options());
  std::transform(width, width + widths.numel(), top.mutable_data_ptr<float>(),
                 [](int64_t each) { return is_rounded(each) ? top_of(each) : 0.0f; });
  const Tensor scale = scales(widths, top, spans);
  // Noise belongs to a place in memory, which is one value's own only where values fill theirs.
  const Tensor x = !seed || given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  const Noise noise{x.const_data_ptr<float>(), static_cast<uint32_t>(drawn & 0x7FFFFFFF),
                    static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  return {kRounded, scale, top, x, noise};
}

// Goes over one or more results and what they are rounded from: values, low end, scale, highest level. One result alone
// has to have their type.
inline at::TensorIterator iterator_of(std::initializer_list<const Tensor*> results, const Rounding& how,
                                      const Tensor& lo) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(results.size() == 1).set_check_mem_overlap(false).resize_outputs(false);
  for (const Tensor* result : results) config.add_output(*result);
  return config.add_const_input(how.x)
      .add_const_input(lo)
      .add_const_input(how.scale)
      .add_const_input(how.top)
      .build();
}

// Calls run with whether there is noise, and whether all values lie inside the range, as types.
template <class Run>
void with_kinds(bool noisy, bool inside, Run&& run) {
  const auto with_noise = [&](auto kind) { inside ? run(kind, Yes{}) : run(kind, No{}); };
  noisy ? with_noise(Yes{}) : with_noise(No{});
}

}  // namespace fractrain_fx
