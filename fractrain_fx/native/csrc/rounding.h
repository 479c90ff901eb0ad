// What rounds one value, and what all values of a tensor are rounded by (ALGORITHM 2).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

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

using Widths = c10::SmallVector<int64_t, 16>;

inline Widths widths_of(const Tensor& bits) {
  const bool is_int = bits.scalar_type() == at::kInt;
  const Tensor numbers = (is_int ? bits : bits.to(at::kLong)).contiguous();
  Widths widths(numbers.numel());
  is_int ? std::copy_n(numbers.const_data_ptr<int32_t>(), widths.size(), widths.begin())
         : std::copy_n(numbers.const_data_ptr<int64_t>(), widths.size(), widths.begin());
  return widths;
}

// Stand for the highest level of values that stay as they are, and of those that become 0.
constexpr float kStay = 0.0f, kErased = -1.0f;

// How a tensor is rounded. Bits, low ends and widths of ranges broadcast against it.
struct Rounding {
  Outcome outcome;  // nothing is to be done where no bits change a value; nothing can be where a range may overflow
  Widths widths;
  Tensor bits, lo, span;
  Tensor x;  // its values, where noise can be told from their places in memory
  Noise noise;
  float top_of_0;  // for values of 0 bits

  float top(int64_t each) const { return is_rounded(each) ? top_of(each) : each == 0 ? top_of_0 : kStay; }
};

inline Rounding rounding_of(const Tensor& given, const Tensor& bits, const Tensor& low, const Tensor& wide,
                            std::optional<int64_t> seed, bool erase = false) {
  const Widths widths = widths_of(bits);
  const auto changes = [erase](int64_t each) { return is_rounded(each) || (erase && each == 0); };
  if (std::none_of(widths.begin(), widths.end(), changes)) return {kUnrounded, {}, {}, {}, {}, {}, {}, kStay};
  const Tensor lo = low.contiguous(), span = wide.contiguous();
  const float* spans = span.const_data_ptr<float>();
  const auto modest = [](float each) { return each < kWide; };
  if (!std::all_of(spans, spans + span.numel(), modest)) return {kRefused, {}, {}, {}, {}, {}, {}, kStay};
  // Noise belongs to a place in memory, which is one value's own only where values fill theirs.
  const Tensor x = !seed || given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  const Noise noise{x.const_data_ptr<float>(), static_cast<uint32_t>(drawn & 0x7FFFFFFF),
                    static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  return {kRounded, widths, bits, lo, span, x, noise, erase ? kErased : kStay};
}

// The levels of some values.
struct Grid {
  float lo, scale, top;
};

// One grid, or one for each entry of the first dimension; none where they are shared out otherwise.
inline std::vector<Grid> grids_of(const Rounding& how) {
  const Tensor& x = how.x;
  if (how.lo.numel() != how.span.numel()) return {};
  int64_t count = 1;
  for (const Tensor* each : {&how.bits, &how.span}) {
    if (each->numel() == 1) continue;
    count = x.size(0);
    if (each->dim() != x.dim() || each->numel() != count || each->size(0) != count) return {};
  }
  const float *lo = how.lo.const_data_ptr<float>(), *span = how.span.const_data_ptr<float>();
  const bool each_span = how.span.numel() > 1, each_width = how.widths.size() > 1;
  std::vector<Grid> grids(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = each_span ? i : 0, bits = how.widths[each_width ? i : 0];
    grids[i] = {lo[place], is_rounded(bits) ? scale_of(span[place], bits) : 1.0f, how.top(bits)};
  }
  return grids;
}

// Calls take with parts of some values that 32 bits can count, first index and count: with 64, a loop that also counts
// places for noise takes a third longer. What take captures it has to copy: to write a byte might change all that it
// refers to, so that the loop would not be one of vectors.
template <class Take>
void in_parts(int64_t count, Take&& take) {
  constexpr int64_t kMost = int64_t{1} << 30;
  for (int64_t first = 0; first < count; first += kMost) {
    take(first, static_cast<int32_t>(std::min(kMost, count - first)));
  }
}

// Calls run with whether there is noise, and whether all values lie inside the range, as types.
template <class Run>
void with_kinds(bool noisy, bool inside, Run&& run) {
  const auto with_noise = [&](auto kind) { inside ? run(kind, Yes{}) : run(kind, No{}); };
  noisy ? with_noise(Yes{}) : with_noise(No{});
}

}  // namespace fractrain_fx
